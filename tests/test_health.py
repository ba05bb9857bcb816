"Rows stored at a reset are found where they are, and nowhere else; large observations are read in small parts"
import tracemalloc
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from fastrl_replay.all import GymStepper, NStep, Proportional, ReplayMemory, SimpleStep, Transition
from fastrl_replay.health import newest, not_finite, stored_resets

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


def make(env_id, **kw): return lambda: gym.make(env_id, **kw)


def wrong(n, env_id='CartPole-v1', n_envs=4, Vector=SyncVectorEnv, singly=False, max_sz=10_000, **kw):
    "The loop that is written first, in the default mode; a memory, and how many rows it has stored at resets"
    envs = Vector([make(env_id, **kw)]*n_envs)
    envs.action_space.seed(0)
    memory, (state, _), ended, n_wrong = ReplayMemory(max_sz), envs.reset(seed=0), np.zeros(n_envs, bool), 0
    for _ in range(n):
        action = envs.action_space.sample()
        after, reward, terminated, truncated, _ = envs.step(action)
        n_wrong += ended.sum()
        if singly:
            for k in range(n_envs): memory.add(SimpleStep(state[k], action[k], after[k], terminated[k], truncated[k], reward[k], env_id=k))
        else: memory.extend(Transition(state, action, reward, after, terminated, truncated))
        ended, state = terminated | truncated, after
    envs.close()
    return memory, n_wrong


def right(n, mode, env_id='CartPole-v1', n_envs=4, **kw):
    "The same as it should be"
    envs = SyncVectorEnv([make(env_id, **kw)]*n_envs, autoreset_mode=mode)
    envs.action_space.seed(0)
    memory, (state, _), skip = ReplayMemory(10_000), envs.reset(seed=0), np.zeros(n_envs, bool)
    for _ in range(n):
        action = envs.action_space.sample()
        after, reward, terminated, truncated, info = envs.step(action)
        ended, next_state = terminated | truncated, after.copy()
        if 'final_obs' in info:
            for k in np.flatnonzero(info['_final_obs']): next_state[k] = info['final_obs'][k]
        for k in np.flatnonzero(~skip):
            memory.add(SimpleStep(state[k], action[k], next_state[k], terminated[k], truncated[k], reward[k], env_id=k))
        if mode==AutoresetMode.NEXT_STEP: skip = ended
        if mode==AutoresetMode.DISABLED and ended.any(): after, _ = envs.reset(options=dict(reset_mask=ended))
        state = after
    return memory


def said(memory): return [o for o in memory.health()['warnings'] if 'reset' in o]


@pytest.mark.parametrize('how', [{}, dict(singly=True), dict(Vector=AsyncVectorEnv), dict(env_id='Acrobot-v1', max_episode_steps=40),
                                 dict(env_id='MountainCar-v0', max_episode_steps=40), dict(env_id='Pendulum-v1', max_episode_steps=40),
                                 dict(env_id='Taxi-v4', max_episode_steps=30), dict(env_id='FrozenLake-v1')], ids=str)
def test_rows_stored_at_resets_are_found(how):
    memory, n_wrong = wrong(300, **how)
    health = memory.health()
    assert n_wrong - 4 <= health['n_stored_resets'] <= n_wrong and n_wrong > 20
    warning, = said(memory)
    assert f'{health["n_stored_resets"]:,} of 1,200 rows' in warning and 'drop the row' in warning and 'GymStepper' in warning


def test_they_are_found_when_the_memory_has_gone_round():
    memory, _ = wrong(500, max_sz=700)
    health = memory.health()
    ends = health['n_terminated'] + health['n_truncated']
    assert ends - 4 <= health['n_stored_resets'] <= ends + 4 and 'of 700 rows' in said(memory)[0]


@pytest.mark.parametrize('env_id', ['CartPole-v1', 'Acrobot-v1', 'Taxi-v4', 'FrozenLake-v1'])
@pytest.mark.parametrize('mode', MODES)
def test_a_right_loop_is_not_accused(mode, env_id):
    memory = right(300, mode, env_id, max_episode_steps=30)
    assert memory.health()['n_stored_resets']==0 and not said(memory)


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('n', [1, 3])
def test_nor_is_the_stepper(mode, n):
    def envs(): return SyncVectorEnv([make('CartPole-v1')]*4, autoreset_mode=mode)
    memory, pipe = ReplayMemory(5000), GymStepper([envs()], seed=0)
    for _, chunk in zip(range(300), NStep(pipe, n, .9) if n > 1 else pipe): memory.extend(chunk)
    assert len(memory) > 1000 and not said(memory)


def walk(n, begin, go, reward=lambda k: 0., length=lambda rng: int(rng.integers(3, 9))):
    "A memory of `n` steps of a walk, whose episodes begin in `begin(rng, last state)`"
    rng, memory, state, left = np.random.default_rng(0), ReplayMemory(n), None, 0
    for k in range(n):
        if not left: state, left = begin(rng, state), length(rng)
        left -= 1
        after = go(rng, state, left==0)
        memory.add(Transition(state, 0, reward(k), after, left==0, False))
        state = after
    return memory


WALKS = dict(
    constant=lambda: walk(500, lambda r, s: np.zeros(3), lambda r, s, end: np.zeros(3)),
    home=lambda: walk(500, lambda r, s: np.zeros(2), lambda r, s, end: np.zeros(2) if end else r.normal(size=2)),
    ring=lambda: walk(500, lambda r, s: 0, lambda r, s, end: 0 if end else (s + 1) % 5),
    two_states=lambda: walk(500, lambda r, s: int(r.integers(2)), lambda r, s, end: int(r.integers(2))),
    goes_on=lambda: walk(500, lambda r, s: r.normal(size=2) if s is None else s, lambda r, s, end: s + r.normal(size=2)),
    goes_on_paid=lambda: walk(500, lambda r, s: r.normal(size=2) if s is None else s, lambda r, s, end: s + 1., lambda k: 1.),
    goes_on_counted=lambda: walk(500, lambda r, s: s or 0, lambda r, s, end: s + 1, lambda k: float(k % 5), lambda r: 5),
    one_step=lambda: walk(500, lambda r, s: r.normal(size=2) if s is None else s, lambda r, s, end: r.normal(size=2), length=lambda r: 1),
    not_a_number=lambda: walk(500, lambda r, s: np.full(2, np.nan), lambda r, s, end: np.full(2, np.nan)))

@pytest.mark.parametrize('name', WALKS)
def test_what_begins_where_it_ends_is_not_accused(name):
    memory = WALKS[name]()
    assert memory.health()['n_stored_resets']==0


def test_few_ends_are_no_evidence():
    memory, n_wrong = wrong(20, max_sz=100)
    assert n_wrong < 5 and not said(memory)


class Seen(NamedTuple):
    obs: Any
    action: Any
    next_obs: Any
    terminated: Any
    truncated: Any

def test_other_names_nested_states_and_bfloat16():
    def of(v): return dict(a=torch.tensor(v[:2], dtype=torch.bfloat16), b=(v[2:], np.int64(v[0] > 0)))
    plain, n_wrong = wrong(200)
    memory = ReplayMemory(2000)
    for k in range(800):                    # the rows of one stream after another
        o = plain.fetch([k % 200*4 + k//200])[0]
        memory.add(Seen(of(o.state), o.action, of(o.next_state), o.terminated, o.truncated))
    assert abs(memory.health()['n_stored_resets'] - n_wrong) <= 4


class Flags(NamedTuple):
    terminated: Any
    truncated: Any
    reward: Any

def test_steps_without_states():
    memory = ReplayMemory(100)
    memory.extend([Flags(k % 7==6, False, 0.) for k in range(100)])
    assert memory.health()['n_stored_resets']==0 and stored_resets(memory, newest(memory))==0


def large(n=600, shape=(100, 100), dtype=np.uint8, dedup=None):
    "A memory of images, with rows stored at resets"
    rng, memory = np.random.default_rng(0), ReplayMemory(n, Proportional(), dedup=dedup)
    def image(): return (rng.random(shape)*99).astype(dtype)
    state, end = image(), False
    for k in range(n):
        after, was = image(), end
        end = not was and k % 9==8
        memory.add(Transition(state, 0, 0. if was else 1., after, end, False))
        state = after
    return memory


@pytest.mark.parametrize('dedup', [None, 'next_state'])
def test_large_observations_are_read_in_small_parts(monkeypatch, dedup):
    "600 rows of 20 kB, 12 MB in all, with a budget of 1 MB"
    from fastrl_replay import health
    memory = large(dedup=dedup)
    memory.health()                                  # compiled, and buffers made
    monkeypatch.setattr(health, '_BYTES', 1 << 20)
    tracemalloc.start()
    found = memory.health()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found['n_stored_resets']==66 and not found['not_finite']
    assert peak < 3 << 20, f'{peak:,} bytes'


def test_only_what_can_be_infinite_is_read():
    images, floats = large(200), large(200, dtype=np.float32)
    fetched = []
    def spy(memory):
        fetch = memory.fetch
        def noting(ids, fields=None):
            fetched.append((len(ids), tuple(fields)))
            return fetch(ids, fields)
        memory.fetch = noting
    for o in (images, floats): spy(o)
    assert not_finite(images)==({}, 200) and fetched==[(200, ('reward',))]
    assert not_finite(floats)==({}, 200) and fetched[1:]==[(200, ('state', 'reward', 'next_state'))]
