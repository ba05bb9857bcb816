"What a loop stores that is written wrongly is found where it is, and nowhere else; large observations are read in small parts"
import threading, tracemalloc
from itertools import islice
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from fastrl_replay.all import GymStepper, NStep, Proportional, ReplayMemory, SimpleStep, Transition
from fastrl_replay.health import newest, not_finite, reused_arrays, stored_resets, torn_streams, wrong_ends

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


@pytest.mark.parametrize('how', [{}, dict(singly=True), dict(Vector=AsyncVectorEnv), dict(env_id='Pendulum-v1', max_episode_steps=40),
                                 dict(env_id='FrozenLake-v1')], ids=str)
def test_rows_stored_at_resets_are_found(how):
    memory, n_wrong = wrong(300, **how)
    health = memory.health()
    assert n_wrong - 4 <= health['n_stored_resets'] <= n_wrong and n_wrong > 20
    warning, = said(memory)
    assert f'{health["n_stored_resets"]:,} of 1,200 rows' in warning and 'drop the row' in warning and 'GymStepper' in warning


@pytest.mark.parametrize('mode,env_id', [*zip(MODES, ['CartPole-v1', 'Taxi-v4', 'FrozenLake-v1'])])
def test_a_right_loop_is_not_accused(mode, env_id):
    memory = right(300, mode, env_id, max_episode_steps=30)
    assert memory.health()['n_stored_resets']==0 and not said(memory)


@pytest.mark.parametrize('mode,n', [*zip(MODES, [1, 3, 3])])
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


# ---- mistakes: what is said of a memory, by name

WORDS = dict(n_stored_resets='drop the row after', n_wrong_ends="info['final_obs']", n_reused='both are one array', n_torn='env_id')

def mistakes(memory):
    "The mistakes that are found, and how often; each has a warning, and a memory without one has none of these"
    health = memory.health()
    found = {k: health[k] for k in WORDS if health[k]}
    for k, word in WORDS.items(): assert any(word in o for o in health['warnings'])==(k in found), (k, health['warnings'])
    return found


class Rooms(gym.Env):
    "A dot walks through a picture whose walls are drawn anew for each episode; also as a dict"
    def __init__(self, nested=False, limit=20):
        self.nested, self.limit = nested, limit
        picture = gym.spaces.Box(0, 255, (12, 12), np.uint8)
        self.observation_space = gym.spaces.Dict(picture=picture, at=gym.spaces.Box(-99, 99, (2,), np.float32)) if nested else picture
        self.action_space = gym.spaces.Discrete(4)
    def seen(self):
        picture = self.walls.copy()
        picture[self.at[0] % 12, self.at[1] % 12] = 255
        return dict(picture=picture, at=self.at.astype(np.float32)) if self.nested else picture
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.walls = (self.np_random.random((12, 12)) < .4).astype(np.uint8)*100
        self.at, self.t = self.np_random.integers(-9, 9, 2), 0
        return self.seen(), {}
    def step(self, action):
        self.at[action//2] += action % 2*2 - 1
        self.t += 1
        return self.seen(), 1., False, self.t >= self.limit, {}


def rows_of(o, k): return {f: v[k] for f, v in o.items()} if isinstance(o, dict) else o[k]


def same_step(n, make_env, naive, n_envs=4, Vector=SyncVectorEnv, max_sz=10_000):
    "A loop in the mode SAME_STEP; a memory, and how many episodes have ended that are followed by another"
    envs = Vector([make_env]*n_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.action_space.seed(0)
    memory, (state, _), n_ends = ReplayMemory(max_sz), envs.reset(seed=0), 0
    for t in range(n):
        action = envs.action_space.sample()
        after, reward, terminated, truncated, info = envs.step(action)
        n_ends += (terminated | truncated).sum()*(t < n - 1)
        for k in range(n_envs):
            last = info['final_obs'][k] if not naive and (terminated | truncated)[k] else rows_of(after, k)
            memory.add(SimpleStep(rows_of(state, k), action[k], last, terminated[k], truncated[k], reward[k], env_id=k))
        state = after
    envs.close()
    return memory, n_ends


VECTORS = {'CartPole': make('CartPole-v1'), 'Pendulum': make('Pendulum-v1', max_episode_steps=40), 'Taxi': make('Taxi-v4', max_episode_steps=30), 'pictures': Rooms, 'dict': lambda: Rooms(True)}

@pytest.mark.parametrize('name', VECTORS)
def test_first_observations_taken_for_last_ones_are_found(name):
    memory, n_ends = same_step(400, VECTORS[name], naive=True)
    assert n_ends > 30 and mistakes(memory)==dict(n_wrong_ends=n_ends)


@pytest.mark.parametrize('name', [*VECTORS, 'FrozenLake'])
def test_last_observations_are_not_accused(name):
    memory, n_ends = same_step(400, VECTORS.get(name, make('FrozenLake-v1')), naive=False)
    assert n_ends > 30 and mistakes(memory)=={}


def test_they_are_found_in_other_vectors_and_after_a_round():
    memory, n_ends = same_step(200, VECTORS['CartPole'], naive=True, Vector=AsyncVectorEnv)
    assert mistakes(memory)==dict(n_wrong_ends=n_ends)
    memory, _ = same_step(400, VECTORS['CartPole'], naive=True, max_sz=700)
    ends = newest(memory).ends().sum()
    assert ends - 8 <= mistakes(memory)['n_wrong_ends'] <= ends


def test_where_episodes_begin_in_one_state_nothing_can_be_told():
    memory, n_ends = same_step(400, make('FrozenLake-v1'), naive=True)
    assert n_ends > 100 and mistakes(memory)=={}


WALKS |= dict(
    days=lambda: walk(500, lambda r, s: np.append(0., r.normal(size=3)) if s is None else s,          # only the clock is set back
                      lambda r, s, end: np.append(0. if end else s[0] + 1, s[1:] + r.normal(size=3)), length=lambda r: 24),
    pictures_go_on=lambda: walk(500, lambda r, s: np.zeros((8, 8), np.uint8) if s is None else s,
                                lambda r, s, end: np.where(r.random((8, 8)) < .1, r.integers(0, 255, (8, 8)), s).astype(np.uint8)),
    rarely=lambda: walk(3000, lambda r, s: r.normal(size=2) if s is None else s, lambda r, s, end: s + r.normal(size=2)*(r.random() < .01)),
    by_episode=lambda: walk(3000, lambda r, s: r.normal(size=2), lambda r, s, end: s),
    cards=lambda: walk(3000, lambda r, s: int(r.integers(9)), lambda r, s, end: int(r.integers(9)) if r.random() < .05 else s))

@pytest.mark.parametrize('name', WALKS)
def test_walks_are_not_accused(name): assert mistakes(WALKS[name]())=={}


# ---- one array for two states

class InPlace(gym.Wrapper):
    "Writes every observation into the same arrays"
    array: Any = None
    def write(self, obs):
        if self.array is None: self.array = {k: v.copy() for k, v in obs.items()} if isinstance(obs, dict) else obs.copy()
        for k in obs if isinstance(obs, dict) else [...]: (self.array if k is ... else self.array[k])[...] = obs if k is ... else obs[k]
        return self.array
    def reset(self, **kw): return self.write(self.env.reset(**kw)[0]), {}
    def step(self, action):
        obs, *rest = self.env.step(action)
        return self.write(obs), *rest


def singly(env, n, step=Transition, collected=0, keep=lambda: True, fresh_reset=False, **options):
    "The loop that is written first, for one environment. `collected`: how many steps are stored together; `keep`: which are"
    env.action_space.seed(0)
    memory, state, chunk, t, episode = ReplayMemory(n, **options), env.reset(seed=0)[0], [], 0, 0
    for _ in range(n):
        action = env.action_space.sample()
        after, reward, terminated, truncated, _ = env.step(action)
        numbers = dict(step_n=t, episode_n=episode) if step is SimpleStep else {}
        chunk.append(step(state=state, action=action, next_state=after, reward=reward, terminated=terminated, truncated=truncated, **numbers))
        if len(chunk) > collected:
            memory.extend([o for o in chunk if keep()])
            chunk = []
        state, t = after, t + 1
        if terminated or truncated:
            state, t, episode = env.reset()[0], 0, episode + 1
            if fresh_reset: state = state.copy()
    return memory


ARRAYS = {'CartPole': VECTORS['CartPole'], 'Pendulum': VECTORS['Pendulum'], 'pictures': Rooms, 'dict': lambda: Rooms(True)}

@pytest.mark.parametrize('name,how', [*zip(ARRAYS, [{}, dict(step=SimpleStep), dict(collected=5), dict(step=SimpleStep, collected=63)])])
def test_arrays_that_are_used_again_are_found(name, how):
    memory = singly(InPlace(ARRAYS[name]()), 1500, **how)
    found = mistakes(memory)
    assert list(found)==['n_reused'] and found['n_reused']==len(memory)
    assert mistakes(singly(ARRAYS[name](), 1500, **how))=={}


@pytest.mark.parametrize('dedup', ['next_state', 'frames'])
def test_arrays_are_found_in_memories_that_share(dedup):
    env = gym.wrappers.FrameStackObservation(Rooms(), 4)
    memory = singly(InPlace(env), 400, SimpleStep, dedup=dedup)
    assert mistakes(memory)==dict(n_reused=400)
    assert mistakes(singly(gym.wrappers.FrameStackObservation(Rooms(), 4), 400, SimpleStep, dedup=dedup))=={}


@pytest.mark.parametrize('mode', MODES)
def test_arrays_of_a_vector_environment_are_found(mode):
    envs = SyncVectorEnv([make('CartPole-v1')]*4, copy=False, autoreset_mode=mode)
    envs.action_space.seed(0)
    memory, (state, _) = ReplayMemory(5000), envs.reset(seed=0)
    for _ in range(300):
        after, reward, terminated, truncated, _ = envs.step(action := envs.action_space.sample())
        memory.extend(Transition(state, action, reward, after, terminated, truncated))
        if mode==AutoresetMode.DISABLED and (terminated | truncated).any(): after, _ = envs.reset(options=dict(reset_mask=terminated | truncated))
        state = after
    assert list(mistakes(memory))==['n_reused']


@pytest.mark.parametrize('name,kept,step', [('FrozenLake-v1', 1, SimpleStep), ('Blackjack-v1', .5, Transition), ('CliffWalking-v1', .1, SimpleStep), ('Taxi-v4', .5, Transition)])
def test_states_that_rarely_change_are_not_accused(name, kept, step):
    rng = np.random.default_rng(0)
    memory = singly(gym.make(name), 3000, step, keep=lambda: rng.random() < kept)
    assert len(memory) > 200 and mistakes(memory)=={}


@pytest.mark.parametrize('kept,step', [(.9, Transition), (.5, SimpleStep), (.1, Transition)])
def test_nor_are_those_that_change_once_in_a_while(kept, step):
    "A state of which one in a hundred steps changes anything, with some of the rows"
    class Slow(gym.Env):
        action_space = gym.spaces.Discrete(2)
        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            self.t, self.at = 0, self.np_random.normal(size=3)
            return self.at, {}
        def step(self, action):
            self.t += 1
            if self.np_random.random() < .01: self.at = self.at + self.np_random.normal(size=3)
            return self.at, 0., False, self.t >= 100, {}
    rng = np.random.default_rng(1)
    assert mistakes(singly(Slow(), 5000, step, keep=lambda: rng.random() < kept))=={}


# ---- two sources in one stream

def stepper(seed, **kw): return GymStepper(['CartPole-v1'], seed=seed, **kw)


def filled_by(pipes, n, max_sz=100_000, keep=lambda: True, **options):
    "A memory of `n` items of pipes that take turns"
    memory, turns = ReplayMemory(max_sz, **options), [iter(o) for o in pipes]
    for k in range(n):
        item = next(turns[k % len(turns)])
        if keep(): memory.extend(item) if not hasattr(item, '_fields') else memory.add(item)
    return memory


@pytest.mark.parametrize('n,max_sz,n_envs', [(2, 100_000, 1), (3, 500, 3), (8, 500, 1)])
def test_two_steppers_of_one_number_are_found(n, max_sz, n_envs):
    "Also after a while, when they are in different episodes"
    memory = filled_by([stepper(k, n_envs=n_envs) for k in range(n)], 1500, max_sz)
    found = mistakes(memory)
    assert list(found)==['n_torn'] and found['n_torn'] > .5*len(memory)
    warning, = [o for o in memory.health()['warnings'] if 'env_id' in o]
    assert 'stream' in warning and 'first_env_id' in warning and f'of {len(memory):,} rows' in warning
    assert mistakes(filled_by([stepper(k, n_envs=n_envs, first_env_id=k*n_envs) for k in range(n)], 1500, max_sz))=={}


def test_two_threads_that_add_to_one_stream_are_found():
    memory, barrier = ReplayMemory(5000), threading.Barrier(2)
    def run(seed):
        for s in islice(stepper(seed), 1000):
            barrier.wait()
            memory.add(s)
    threads = [threading.Thread(target=run, args=[k]) for k in range(2)]
    for o in threads: o.start()
    for o in threads: o.join()
    assert list(mistakes(memory))==['n_torn']


def test_a_loop_that_leaves_env_id_out_is_found():
    memory = ReplayMemory(5000)
    for chunk in islice(stepper(0, n_envs=4), 300): memory.extend([s._replace(env_id=0) for s in chunk])
    assert list(mistakes(memory))==['n_torn']


def test_steps_that_jump_are_found():
    rng, memory = np.random.default_rng(0), ReplayMemory(1000)
    for k in range(1000): memory.add(SimpleStep(rng.normal(size=3), 0, rng.normal(size=3), step_n=k % 50, episode_n=k//50, truncated=k % 50==49))
    assert mistakes(memory)==dict(n_torn=980) and any('noise' in o for o in memory.health()['warnings'])


@pytest.mark.parametrize('share', [.05, .3])
def test_a_tenth_is_the_border(share):
    rng, memory, state = np.random.default_rng(0), ReplayMemory(3000), np.zeros(3)
    for k in range(3000):
        after = state + rng.normal(size=3)
        memory.add(SimpleStep(state, 0, after, step_n=k % 100, episode_n=k//100, truncated=k % 100==99))
        state = rng.normal(size=3) if k % 100==99 or rng.random() < share else after
    found = mistakes(memory)
    assert found=={} if share < .1 else abs(found['n_torn'] - share*2970) < 150


RIGHT = {
    'one': lambda keep: filled_by([stepper(0)], 2000, keep=keep),
    'several sources': lambda keep: filled_by([GymStepper(['CartPole-v1']*3, seed=0)], 2000, keep=keep),
    'several copies': lambda keep: filled_by([stepper(0, n_envs=5)], 400, keep=keep),
    'one after another': lambda keep: filled_by([iter([*islice(stepper(0), 1000), *islice(stepper(1), 1000)])], 2000, keep=keep),
    'overwritten': lambda keep: filled_by([stepper(0, n_envs=5)], 400, max_sz=300, keep=keep),
    'n-step': lambda keep: filled_by([NStep(stepper(0, n_envs=5), 3, .9)], 400, keep=keep),
    'n-step of two': lambda keep: filled_by([NStep(stepper(k), 3, .9) for k in range(2)], 2000, keep=keep),
    'without numbers': lambda keep: filled_by([stepper(k, step_type=Transition) for k in range(2)], 2000, keep=keep),
    'pictures': lambda keep: filled_by([GymStepper([lambda: gym.wrappers.FrameStackObservation(Rooms(), 4)], seed=0)], 800, keep=keep, dedup='frames'),
    'one state': lambda keep: filled_by([GymStepper(['FrozenLake-v1'], seed=0, n_envs=4)], 500, keep=keep),
    **{f'{mode.name}': lambda keep, mode=mode: filled_by([GymStepper([SyncVectorEnv([make('CartPole-v1')]*4, autoreset_mode=mode)], seed=0)], 400, keep=keep)
       for mode in MODES}}

@pytest.mark.parametrize('name,kept', [(o, (1, .7, .1)[k % 3]) for k, o in enumerate(RIGHT)])
def test_right_pipelines_are_not_accused(name, kept):
    "Whole, and with some of their items only"
    rng = np.random.default_rng(0)
    assert mistakes(RIGHT[name](lambda: rng.random() < kept))=={}


def test_steps_numbered_by_hand_are_not_accused():
    "`step_n` that counts through all episodes, `episode_n` that stays 0, few steps, NaN in all states"
    rng, memories = np.random.default_rng(0), [ReplayMemory(1000) for _ in range(3)]
    for k, s in enumerate(islice(stepper(0), 1000)):
        memories[0].add(s._replace(step_n=k, episode_n=0))
        if rng.random() < .5: memories[1].add(s._replace(episode_n=0))
        memories[2].add(s._replace(state=np.full(4, np.nan), next_state=np.full(4, np.nan)))
    for memory in memories: assert mistakes(memory)=={}


def test_what_is_found_is_asked_for_by_functions():
    memory = filled_by([stepper(k) for k in range(2)], 400)
    rows = newest(memory)
    assert torn_streams(memory, rows) > 100 and not (wrong_ends(memory, rows) or reused_arrays(memory, rows) or stored_resets(memory, rows))
    bare = ReplayMemory(100)
    bare.extend([Flags(k % 7==6, False, 0.) for k in range(100)])
    assert not any(f(bare, newest(bare)) for f in (torn_streams, wrong_ends, reused_arrays))


class Floats(NamedTuple):
    brain: Any
    wave: Any
    pair: Any
    n: int
    reward: float

def test_what_is_not_finite_is_found_in_floats_of_every_kind(monkeypatch):
    "bfloat16, complex, nested; of large fields only some rows are read, from the oldest to the newest"
    memory, inf = ReplayMemory(100), float('inf')
    for k in range(40):
        brain, wave = torch.full((3,), float('nan') if k==0 else 1., dtype=torch.bfloat16), np.complex64(complex(0, inf if k > 37 else 0))
        memory.add(Floats(brain, wave, {'a': np.full((2, 2), -inf if k % 2 else 0, np.float16), 'b': np.zeros(2, np.int8)}, k, 0.))
    assert not_finite(memory)==({'brain': 1, 'wave': 2, 'pair.a': 20}, 40)
    each = sum(o.nbytes for o in memory.layout.leaves if o.name!='n')
    monkeypatch.setattr('fastrl_replay.health._BYTES', 5*each)
    assert not_finite(memory)==({'brain': 1, 'wave': 1, 'pair.a': 4}, 5)            # the rows 0, 9, 19, 29 and 39


def test_of_a_large_memory_the_newest_rows_are_read():
    "A row whose predecessor is not among them is known to have one; one whose predecessor was overwritten too"
    memory = ReplayMemory(20)
    for k in range(30): memory.add(Transition(np.zeros(2), 0, 1., np.zeros(2), k % 10==9, False))
    few, all_rows = newest(memory, 5), newest(memory)
    assert few.ids.tolist()==list(range(25, 30)) and few.before.tolist()==[-2, 0, 1, 2, 3] and few.columns['reward'].tolist()==[1]*5
    assert all_rows.before.tolist()==[-2, *range(19)]
    young = ReplayMemory(20)
    young.add(memory[0])
    assert newest(young).before.tolist()==[-1] and newest(young, shift=3).before.tolist()==[-2]
