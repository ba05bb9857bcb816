"""The stepper: every step it yields happened, each once, in its stream.

CartPole's physics is deterministic, so each transition is judged by putting the state into an environment and pushing; that goes through
gymnasium's own equations, and once through ours. A counting environment, whose observation tells stream, episode and step, judges
everything that is about bookkeeping.
"""
import collections, functools, itertools, json, pickle
from itertools import islice
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper, Multiplexer

from fastrl_replay.batch import Batch
from fastrl_replay.pipes.base import IterDataPipe
from fastrl_replay.pipes.actors import Actors
from fastrl_replay.pipes.agents import EpsilonGreedy
from fastrl_replay.pipes.n_step import NStep
from fastrl_replay.pipes.replay import ExperienceReplay
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.schedules import LinearSchedule
from fastrl_replay.steps import SimpleStep, Transition
from refusals import refused
from words import WORDS, words

MODES = list(AutoresetMode)


def take(pipe, k): return list(islice(iter(pipe), k))


def flat(items):
    for o in items:
        if isinstance(o, Batch): yield from o
        else: yield o


class Items(IterDataPipe):
    "A pipe of items, on torch's base or on the shim"
    def __init__(self, items): self.items = items
    def __iter__(self): yield from self.items


# ---- CartPole's physics

def cartpole(s, a):
    "The next state and whether it is out of bounds (Barto, Sutton & Anderson 1983; gymnasium's constants, Euler's method)"
    x, v, th, w = (float(o) for o in s)
    force, cos, sin = (10. if a == 1 else -10.), np.cos(th), np.sin(th)
    temp = (force + .05*w*w*sin)/1.1
    w_acc = (9.8*sin - cos*temp)/(.5*(4/3 - .1*cos*cos/1.1))
    v_acc = temp - .05*w_acc*cos/1.1
    new = np.array([x + .02*v, v + .02*v_acc, th + .02*w, w + .02*w_acc])
    return new, abs(new[0]) > 2.4 or abs(new[2]) > 12*2*np.pi/360


def judge(steps, limit=500):
    "Every step follows the physics, ends as it should, and is in its place in its stream"
    last = {}
    for s in steps:
        new, out = cartpole(s.state, s.action)
        assert np.allclose(new, s.next_state, atol=1e-5), 'this never happened'
        margin = min(abs(abs(new[0]) - 2.4), abs(abs(new[2]) - 12*2*np.pi/360))
        assert bool(s.terminated) == bool(out) or margin < 1e-5
        assert bool(s.truncated) == (s.step_n == limit - 1)
        assert s.reward == 1. and s.total_reward == s.step_n + 1
        old = last.get(int(s.env_id))
        if old is None: assert (s.step_n, s.episode_n) == (0, 0)
        elif old.terminated or old.truncated: assert (s.step_n, s.episode_n) == (0, old.episode_n + 1)
        else:
            assert (s.step_n, s.episode_n) == (old.step_n + 1, old.episode_n)
            assert np.array_equal(old.next_state, s.state)
        if s.step_n == 0: assert (np.abs(s.state) <= .05).all()
        last[int(s.env_id)] = s
    return last


def limited(limit): return gym.wrappers.TimeLimit(gym.make('CartPole-v1').unwrapped, limit)


def test_the_judge_can_say_no():
    step = take(GymStepper(['CartPole-v1'], seed=0), 1)[0]
    judge([step])
    for wrong in (dict(action=1 - step.action), dict(next_state=step.state), dict(terminated=True), dict(truncated=True), dict(step_n=1)):
        with pytest.raises(AssertionError): judge([step._replace(**wrong)])


@pytest.mark.parametrize('limit', [12, 500])
def test_single(limit):
    source = ['CartPole-v1'] if limit == 500 else [functools.partial(limited, limit)]
    steps = take(GymStepper(source, seed=1), 1500)
    judge(steps, limit)
    env = gym.make('CartPole-v1').unwrapped
    env.reset()
    for s in steps[:300]:
        env.state = s.state.astype(np.float64)
        env.steps_beyond_terminated = None
        assert np.allclose(env.step(int(s.action))[0], s.next_state, atol=1e-5)


@pytest.mark.parametrize('limit', [12, 500])
@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('copy', [True, False])
def test_vector_in_every_mode(mode, limit, copy):
    envs = SyncVectorEnv([functools.partial(limited, limit)]*6, autoreset_mode=mode, copy=copy)
    chunks = take(GymStepper([envs], seed=2), 250)
    rows = list(flat(chunks))
    ends = judge(rows, limit)
    assert len(ends) == 6
    n_ends = sum(bool(s.terminated or s.truncated) for s in rows)
    assert n_ends > 30
    if mode is not AutoresetMode.NEXT_STEP: assert len(rows) == 1500
    else: assert len(rows) >= 1500 - n_ends                             # one row lost for each end


@pytest.mark.parametrize('limit', [12, 500])
def test_cartpoles_own_vector_form(limit):
    envs = gym.make_vec('CartPole-v1', 6, vectorization_mode='vector_entry_point', max_episode_steps=limit)
    judge(list(flat(take(GymStepper([envs], seed=3), 250))), limit)


def test_vector_wrappers_and_async():
    envs = gym.wrappers.vector.RecordEpisodeStatistics(gym.make_vec('CartPole-v1', 3, vectorization_mode='sync'))
    judge(list(flat(take(GymStepper([envs], seed=4), 100))))
    envs = gym.make_vec('CartPole-v1', 2, vectorization_mode='async', vector_kwargs=dict(autoreset_mode=AutoresetMode.SAME_STEP))
    try: judge(list(flat(take(GymStepper([envs], seed=4), 60))))
    finally: envs.close()


@pytest.mark.parametrize('n_envs', [1, 4])
def test_n_envs(n_envs):
    for item in ('CartPole-v1', gym.spec('CartPole-v1'), functools.partial(gym.make, 'CartPole-v1')):
        pipe = GymStepper([item], seed=5, n_envs=n_envs)
        items = take(pipe, 120)
        assert all(isinstance(o, SimpleStep if n_envs == 1 else Batch) for o in items)
        assert len(judge(list(flat(items)))) == n_envs
        pipe.close()


# ---- an environment that counts

class Count(gym.Env):
    "Observation: (number of this environment, episode, step); ends by plan; writes all observations into one array"
    made = itertools.count()
    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, lengths=(3, 1, 4), reward=1, flags=('terminated', 'truncated')):
        self.number, self.lengths, self.reward, self.flags = next(Count.made), lengths, reward, flags
        self.buffer, self.seeds = np.zeros(3, np.float32), []
        self.buffer[1] = -1

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.buffer[:] = self.number, self.buffer[1] + 1, 0
        return self.buffer, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.buffer[2] += 1
        ended = self.buffer[2] == self.lengths[int(self.buffer[1]) % len(self.lengths)]
        flag = self.flags[int(self.buffer[1]) % len(self.flags)]
        return self.buffer, self.reward, ended and flag == 'terminated', ended and flag == 'truncated', {}


def counted(steps, lengths=(3, 1, 4), flags=('terminated', 'truncated')):
    "Check the bookkeeping of `Count`'s steps; how many steps each stream made"
    at = collections.defaultdict(lambda: (0, 0))
    number = {}
    for s in steps:
        e, t = at[int(s.env_id)]
        k = number.setdefault(int(s.env_id), s.state[0])
        assert s.state.tolist() == [k, e, t] and s.next_state.tolist() == [k, e, t + 1], s
        assert (s.episode_n, s.step_n) == (e, t)
        ended = t + 1 == lengths[e % len(lengths)]
        flag = flags[e % len(flags)]
        assert (bool(s.terminated), bool(s.truncated)) == (ended and flag == 'terminated', ended and flag == 'truncated')
        at[int(s.env_id)] = (e + 1, 0) if ended else (e, t + 1)
    assert len(set(number.values())) == len(number)
    return collections.Counter(int(s.env_id) for s in steps)


def test_streams_of_a_finite_source_take_turns():
    steps = take(GymStepper([Count, Count, Count]), 31)
    assert [s.env_id for s in steps] == [k % 3 for k in range(31)]
    assert counted(steps) == {0: 11, 1: 10, 2: 10}


def test_buffers_that_are_used_again():
    steps = take(GymStepper([Count()]), 40)
    counted(steps)
    arrays = [a for s in steps for a in (s.state, s.next_state)]
    assert not any(np.shares_memory(a, b) for a, b in itertools.combinations(arrays[:30], 2))


@pytest.mark.parametrize('mode', MODES)
def test_buffers_of_vector_environments(mode):
    envs = SyncVectorEnv([Count]*3, copy=False, autoreset_mode=mode)
    counted(list(flat(take(GymStepper([envs]), 60))))


def test_a_consumer_may_write_into_what_it_gets():
    def spoil(states):
        states[...] = 99.
        return [0]*len(states)
    steps = []
    for s in islice(GymStepper([Count()], agent=spoil), 20):
        steps.append(s._replace(state=s.state.copy(), next_state=s.next_state.copy()))
        s.state[...] = s.next_state[...] = -1
    counted(steps)
    rows = []
    for c in islice(GymStepper([SyncVectorEnv([Count]*2, copy=False)], agent=spoil), 20):
        rows += list(c[:])
        for column in c.numpy(): column[...] = 0
    counted(rows)


def test_an_endless_source_cycles_over_its_environments():
    envs = [Count(), Count()]
    steps = take(GymStepper(itertools.cycle(envs)), 21)
    assert counted(steps) == {0: 11, 1: 10}
    envs = [Count(), SyncVectorEnv([Count]*2), Count()]
    items = take(GymStepper(itertools.cycle(envs)), 12)
    assert [isinstance(o, Batch) for o in items] == [False, True, False]*4
    assert [s.env_id for s in flat(items[:3])] == [0, 1, 2, 3]
    counted(list(flat(items)))


def test_the_source_is_pulled_once_a_step():
    pulled = []
    def endless():
        env = Count()
        while True:
            pulled.append(1)
            yield env
    it = iter(GymStepper(endless()))
    for k in range(1, 8):
        next(it)
        assert len(pulled) == k

    class Finite:
        def __iter__(self):
            for o in (Count, Count):
                pulled.append(1)
                yield o
    pulled.clear()
    counted(take(GymStepper(Finite()), 9))
    assert len(pulled) == 9


def test_one_environment_in_several_places():
    env = Count()
    assert counted(take(GymStepper([env, Count, env]), 12)) == {0: 8, 1: 4}


def test_sources_of_all_kinds():
    for make in (IterableWrapper, tuple, iter, lambda o: (x for x in o), collections.deque):
        assert counted(take(GymStepper(make([Count, Count])), 11)) == {0: 6, 1: 5}
    assert counted(take(GymStepper(IterableWrapper([Count(), Count()])), 11)) == {0: 6, 1: 5}      # copies its items for each pass
    assert counted(take(Items([Count]).gym_stepper(), 5)) == {0: 5}


@pytest.mark.parametrize('make', [
    lambda: [Count, Count], lambda: IterableWrapper([Count, Count]), lambda: itertools.cycle([Count(), Count()]),
    lambda: iter([Count, Count, Count]), lambda: [SyncVectorEnv([Count]*2), Count()]])
@pytest.mark.parametrize('visits', [[1]*40, [3, 1, 0, 7, 2, 5, 9], [20]])
def test_taken_up_again(make, visits):
    pipe, got = GymStepper(make()), []
    for k in visits: got += take(pipe, k)
    plain = take(GymStepper(make()), sum(visits))
    rows, want = list(flat(got)), list(flat(plain))
    counted(rows)
    assert [(s.env_id, s.episode_n, s.step_n) for s in rows] == [(s.env_id, s.episode_n, s.step_n) for s in want]


def test_taken_up_again_through_n_step():
    def pipe(): return GymStepper([Count, Count]).n_step(3, .5)
    def key(s): return s.env_id, s.episode_n, s.step_n, s.reward, s.discount
    one, whole = pipe(), take(pipe(), 60)
    got = [o for k in [1, 4, 0, 2, 13, 40] for o in take(one, k)]
    assert list(map(key, got)) == list(map(key, whole))


# ---- n-step over real episodes

@pytest.mark.parametrize('step_type', [SimpleStep, Transition])
@pytest.mark.parametrize('mode', MODES)
def test_n_step_over_chunks(mode, step_type):
    "With and without env_id: in NEXT_STEP mode rows are missing from chunks, and the streams still hold together"
    chunks = take(NStep(GymStepper([SyncVectorEnv([Count]*3, autoreset_mode=mode)], step_type=step_type), 3, .5), 60)
    for s in flat(chunks):
        number, episode, at = s.state.tolist()
        length = (3, 1, 4)[int(episode) % 3]
        m = min(3, length - int(at))
        assert s.next_state.tolist() == [number, episode, at + m] and s.discount == .5**m and s.reward == [0, 1, 1.5, 1.75][m]
        assert bool(s.terminated or s.truncated) == (at + m == length)


# ---- seeds

def states(k=60, **kw): return [np.asarray(s.state) for s in flat(take(GymStepper(['CartPole-v1']*2, **kw), k))]


@pytest.mark.parametrize('n_envs', [1, 3])
def test_the_same_seed_gives_the_same_steps(n_envs):
    a, b, c, d = (states(seed=s, n_envs=n_envs) for s in (7, 7, 8, None))
    assert np.array_equal(a, b) and not np.array_equal(a[0], c[0]) and not np.array_equal(a[0], d[0])
    starts = {tuple(o) for o in a[:2*n_envs]}
    assert len(starts) == 2*n_envs


def test_episodes_differ_and_seeds_are_used_once():
    env = Count()
    take(GymStepper([env], seed=3), 30)
    assert isinstance(env.seeds[0], int) and set(env.seeds[1:]) == {None} and len(env.seeds) > 5
    firsts = [tuple(s.state) for s in take(GymStepper(['CartPole-v1'], seed=0), 500) if s.step_n == 0]
    assert len(set(firsts)) == len(firsts) > 10
    env = Count()
    take(GymStepper([env]), 9)
    assert set(env.seeds) == {None}


def test_actions_differ_between_streams():
    a = np.array([s.action for s in take(GymStepper(['CartPole-v1']*2, seed=0), 100)])
    assert (a[::2] != a[1::2]).any()
    b = np.array([s.action for s in take(GymStepper(['CartPole-v1']*2, seed=0), 100)])
    assert (a == b).all()


def test_workers_are_apart():
    pipe = GymStepper(['CartPole-v1']*2, seed=0)
    dl = DataLoader(pipe, batch_size=None, collate_fn=lambda o: o, num_workers=2, multiprocessing_context='fork')
    steps = take(dl, 20)
    assert {int(s.env_id) for s in steps} == {0, 1, 2, 3} and {int(s.proc_id) for s in steps} == {0, 1}
    assert len({tuple(s.state) for s in steps if s.step_n == 0}) == 4
    alone = take(GymStepper(['CartPole-v1']*2, seed=0), 2)
    assert np.array_equal(alone[0].state, next(s for s in steps if s.env_id == 0).state)


# ---- what environments return

@pytest.mark.parametrize('name', ['Taxi-v4', 'FrozenLake-v1', 'CliffWalking-v1', 'Pendulum-v1', 'MountainCarContinuous-v0', 'Blackjack-v1'])
@pytest.mark.parametrize('n_envs', [1, 3])
def test_rewards_and_observations_of_all_kinds(name, n_envs):
    name = name if name in gym.registry else name.replace('v4', 'v3').replace('CliffWalking-v1', 'CliffWalking-v0')
    items = take(GymStepper([name], seed=0, n_envs=n_envs), 40)
    rows = [s for o in items for s in ([o] if n_envs == 1 else o)]
    assert all(isinstance(float(s.reward), float) for s in rows) and len(rows) == 40*n_envs
    whole = items[0] if n_envs > 1 else Batch.of(SimpleStep(*(stacked(s) for s in zip(*items))))
    assert whole.reward.dtype == torch.float32
    if name.startswith('Pendulum'):
        assert np.isclose(sum(float(s.reward) for s in rows[:n_envs*9:n_envs]), float(rows[8*n_envs].total_reward), rtol=1e-4)


def stacked(values):
    if isinstance(values[0], tuple): return tuple(np.array(o) for o in zip(*values))
    return np.array(values)


class Nested(gym.Env):
    "Dict observations with a tuple inside; tuple actions; an array for a reward"
    observation_space = gym.spaces.Dict(eye=gym.spaces.Box(0, 255, (2, 2), np.uint8),
                                        body=gym.spaces.Tuple([gym.spaces.Discrete(9), gym.spaces.Box(-9, 9, (2,), np.float32)]))
    action_space = gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.Dict(push=gym.spaces.Box(-1, 1, (2,)))])

    def __init__(self): self.t, self.force = 0, np.zeros(2, np.float32)
    def obs(self): return dict(eye=np.full((2, 2), self.t, np.uint8), body=(self.t % 9, self.force))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.force[:] = 0, 0
        return self.obs(), {}

    def step(self, action):
        gear, more = action
        assert self.action_space.contains(action), action
        self.t += 1
        self.force += gear*more['push']
        more['push'][...] = np.nan
        return self.obs(), np.array([1.5]) if self.t % 2 else 1.5, self.t == 5, False, {}


def check_nested(rows):
    for s in rows:
        assert (s.state['eye'] == s.step_n).all() and (s.next_state['eye'] == s.step_n + 1).all()
        assert s.next_state['body'][0] == s.step_n + 1
        assert np.allclose(s.next_state['body'][1] - s.state['body'][1], s.action[0]*s.action[1]['push'], atol=1e-6)
        assert s.reward == 1.5 and s.total_reward == 1.5*(s.step_n + 1)


def pusher(states):
    n = len(states['eye'])
    assert states['eye'].shape == (n, 2, 2) and states['body'][0].shape == (n,) and states['body'][1].shape == (n, 2)
    return torch.ones(n), dict(push=torch.full((n, 2), .5, dtype=torch.float64))


class WithSingleRewards(Nested):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, 1.5, *rest


@pytest.mark.parametrize('agent', [None, pusher])
def test_nested_observations_and_actions(agent):
    check_nested(take(GymStepper([Nested], agent=agent, seed=0), 23))
    for mode in MODES:
        chunks = take(GymStepper([SyncVectorEnv([WithSingleRewards]*3, autoreset_mode=mode, copy=False)], agent=agent, seed=0), 23)
        check_nested(list(flat(chunks)))
    assert chunks[0].state['eye'].dtype == torch.uint8 and chunks[0].action[1]['push'].shape == (3, 2)
    check_nested(list(flat(take(GymStepper([WithSingleRewards], agent=agent, seed=0, n_envs=2), 23))))


class FakePool:
    """CartPole behind the interface that envpool documents: single spaces, a length, `reset(env_id)`, `step(action, env_id)`; a pool
    resets itself in the call after an episode's end, and was seeded when it was made. Here it writes into the same arrays each time"""
    def __init__(self, n=5, limit=500, batch_size=None, space=None):
        self.envs = gym.make_vec('CartPole-v1', n, vectorization_mode='vector_entry_point', max_episode_steps=limit)
        self.config, self.spec = dict(num_envs=n, batch_size=batch_size or n), None
        self.observation_space, self.action_space = self.envs.single_observation_space, space or self.envs.single_action_space
        self.all_env_ids, self.obs, self.n_closed = np.arange(n, dtype=np.int32), np.zeros((n, 4), np.float32), 0
    def __len__(self): return self.config['num_envs']
    @property
    def is_async(self): return self.config['batch_size'] != self.config['num_envs']
    def reset(self, env_id=None):
        self.obs[:] = self.envs.reset(seed=3)[0]
        return self.obs, dict(env_id=self.all_env_ids, elapsed_step=np.zeros(len(self), np.int32))
    def step(self, action, env_id=None):
        assert action.shape == (len(self),) and action.dtype == np.int64
        obs, *rest, _ = self.envs.step(action)
        self.obs[:] = obs
        action[:] = 7
        return self.obs, *rest, dict(env_id=self.all_env_ids, elapsed_step=self.envs.steps)
    def close(self): self.n_closed += 1


class NewFakePool(FakePool):
    "Newer envpools have the attributes of gymnasium's vector environments too, with a space for one copy where those have one for all"
    metadata = dict(autoreset_mode=AutoresetMode.NEXT_STEP)
    num_envs = property(FakePool.__len__)
    single_action_space = property(lambda self: self.action_space)
    single_observation_space = property(lambda self: self.observation_space)
    def reset(self, env_id=None, *, seed=None, options=None):
        assert seed is None and options is None
        return super().reset(env_id)


def envpools():
    yield FakePool
    yield NewFakePool
    try: import envpool
    except ImportError: return
    yield lambda n=5, limit=500: envpool.make('CartPole-v1', env_type='gymnasium', num_envs=n, max_episode_steps=limit, seed=3, num_threads=1)


@pytest.mark.parametrize('limit', [12, 500])
@pytest.mark.parametrize('make', [*envpools()])
def test_envpools(make, limit):
    agents = [None, lambda states: (states[:, 2] + .5*states[:, 3] > 0).astype(np.int32)]
    for agent in agents:
        pool = make(limit=limit)
        pipe = GymStepper([pool], agent=agent, seed=1)
        rows = list(flat(take(pipe, 200)))
        if not isinstance(make, type):       # envpool calls an end at the time limit a truncation, whatever else it is
            rows = [s._replace(terminated=cartpole(s.state, s.action)[1]) if s.truncated else s for s in rows]
        assert len(judge(rows, limit)) == 5 and len(rows) > 700
        if agent is None: assert len({tuple(c.action.tolist()) for c in take(pipe, 30)}) > 10, 'the copies act alike'
    got = take(GymStepper([make, pool], seed=0), 6)
    assert [o.env_id.tolist() for o in got[:2]] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert len(take(GymStepper(itertools.cycle([pool])).n_step(3, .9), 20)) == 20


def test_envpools_are_closed_by_who_made_them():
    pools = []
    def make():
        pools.append(FakePool())
        return pools[-1]
    mine = FakePool()
    pipe = GymStepper([make, mine])
    take(pipe, 5)
    pipe.close()
    assert [p.n_closed for p in pools] == [1] and mine.n_closed == 0


@pytest.mark.parametrize('pool', [FakePool(batch_size=2), FakePool(space=object())])
def test_envpools_that_do_not_fit(pool):
    with refused('gym_stepper'): take(GymStepper([pool]), 1)
    with refused('gym_stepper'): take(GymStepper([pool], n_envs=2), 1)


class LastRows(gym.vector.VectorEnv):
    "A vector environment of its own kind, in same-step mode, whose `final_obs` is a plain array with a row for every copy"
    def __init__(self, mode=AutoresetMode.SAME_STEP):
        self.num_envs, self.metadata = 2, dict(autoreset_mode=mode)
        self.single_observation_space, self.single_action_space = gym.spaces.Box(-99, 99, (1,)), gym.spaces.Discrete(2)
        self.observation_space, self.action_space = gym.spaces.Box(-99, 99, (2, 1)), gym.spaces.MultiDiscrete([2, 2])

    def reset(self, *, seed=None, options=None):
        self.t = np.array([0, 0])
        return self.t[:, None].astype('f4'), {}

    def step(self, actions):
        self.t += 1
        ended = self.t == [2, 3]
        last = self.t[:, None].astype('f4')
        self.t[ended] = 0
        info = dict(final_obs=last, _final_obs=ended) if ended.any() else {}
        return self.t[:, None].astype('f4'), np.ones(2), ended, np.zeros(2, bool), info


def test_final_observations_as_one_array():
    rows = list(flat(take(GymStepper([LastRows()]), 12)))
    assert all(s.next_state[0] == s.state[0] + 1 == s.step_n + 1 for s in rows)
    assert [int(s.step_n) for s in rows if s.env_id == 0] == [0, 1]*6


def test_a_mode_that_is_not_told():
    with refused("LastRows(num_envs=2): metadata['autoreset_mode']", got='None'): take(GymStepper([LastRows(None)]), 1)


def test_all_copies_reset_at_once():
    "In NEXT_STEP mode a call may give no row at all: no empty chunk comes out, and no item is lost"
    chunks = take(GymStepper([SyncVectorEnv([functools.partial(Count, (2,))]*3)]), 8)
    assert [len(c) for c in chunks] == [3]*8
    counted(list(flat(chunks)), lengths=(2,))


def test_n_steps_of_a_wrapped_autoreset_environment():
    steps = take(GymStepper([gym.wrappers.Autoreset(Count())]), 25)
    counted(steps)


# ---- step types

class Small(NamedTuple):
    next_state: Any
    reward: Any
    state: Any
    note: Any = 5


@pytest.mark.parametrize('n_envs', [1, 2])
def test_any_step_type(n_envs):
    for s in flat(take(GymStepper([Count], step_type=Small, n_envs=n_envs), 9)):
        assert type(s) is Small and s.note == 5 and s.next_state[2] == s.state[2] + 1 and s.reward == 1
    Unknown = collections.namedtuple('Unknown', 'state colour')
    with refused('step_type', got='Unknown with colour'): GymStepper([], step_type=Unknown)
    for bad in (tuple, 'SimpleStep', None, SimpleStep(0, 0, 0)):
        with refused('step_type', TypeError): GymStepper([], step_type=bad)


# ---- agents

@pytest.mark.parametrize('answer', [
    lambda n: np.ones(n, np.int64), lambda n: [1]*n, lambda n: torch.ones(n, dtype=torch.int32), lambda n: np.ones((n, 1)),
    lambda n: torch.ones(n, requires_grad=True)])
def test_answers_of_all_kinds(answer):
    asked = []
    def agent(states):
        asked.append(states.shape)
        return answer(len(states))
    steps = take(GymStepper([Count], agent=agent), 9)
    counted(steps)
    assert all(s.action == 1 and type(s.action) is int for s in steps) and set(asked) == {(1, 3)}
    rows = list(flat(take(GymStepper([Count], agent=agent, n_envs=3), 9)))
    assert all(s.action == 1 and s.action.dtype == np.int64 for s in rows) and asked[-1] == (3, 3)


@pytest.mark.parametrize('answer,said', [([0, 1], 'actions: the agent got 1 state'), (5.5, 'actions: the agent got 1 state'), ([.5], 'actions'),
                                         ([[0, 1]], 'actions: the agent got 1 state')])
def test_bad_answers_cost_nothing(answer, said):
    answers = iter([[0], [1], answer, [2], [0], [1]])
    pipe = GymStepper([Count()], agent=lambda states: next(answers))
    steps = take(pipe, 2)
    with refused(said): take(pipe, 1)
    counted(steps + take(pipe, 3))


def test_continuous_actions_get_the_spaces_dtype():
    for agent in (lambda s: np.full((len(s), 1), .25), lambda s: torch.full((len(s), 1), .25, dtype=torch.float64), lambda s: [.25]*len(s)):
        step = take(GymStepper(['Pendulum-v1'], agent=agent, seed=0), 1)[0]
        assert step.action.dtype == np.float32 and step.action.shape == (1,) and step.action[0] == .25
        chunk = take(GymStepper(['Pendulum-v1'], agent=agent, seed=0, n_envs=3), 1)[0]
        assert chunk.action.shape == (3, 1) and chunk.action.dtype == torch.float32


def test_epsilon_greedy_drives():
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    for n_envs in (1, 3, 20):
        agent = EpsilonGreedy(model, LinearSchedule(1., 0., 300), seed=0)
        rows = list(flat(take(GymStepper(['CartPole-v1'], agent=agent, seed=0, n_envs=n_envs), 400)))
        judge(rows)
        assert agent.eps_now() == 0.
        with torch.no_grad(): q = model(torch.from_numpy(np.stack([s.state for s in rows[-100:]])))
        clear = (q[:, 0] - q[:, 1]).abs() > 1e-4
        assert torch.equal(q.argmax(1)[clear], torch.tensor([int(s.action) for s in rows[-100:]])[clear])
        again = EpsilonGreedy(model, LinearSchedule(1., 0., 300), seed=0)
        same = list(flat(take(GymStepper(['CartPole-v1'], agent=again, seed=0, n_envs=n_envs), 400)))
        assert all(np.array_equal(a.next_state, b.next_state) for a, b in zip(rows, same))


class Recurrent(NamedTuple):
    state: Any
    action: Any
    next_state: Any
    terminated: Any
    truncated: Any
    env_id: Any
    step_n: Any
    episode_n: Any
    hidden: Any = (np.zeros(2, np.float32), 0)
    note: Any = 7


class Remembers:
    "Its hidden state counts the calls since `restarted`, in one buffer that it writes into"
    def __init__(self, n, tensors=False): self.hidden, self.told, self.tensors = np.zeros((n, 2), np.float32), 0, tensors
    def restarted(self, mask):
        assert mask.dtype == bool and mask.shape == (len(self.hidden),) and mask.any()
        self.hidden[mask] = 0
        self.told += int(mask.sum())
    def __call__(self, states):
        self.hidden += 1
        h = torch.from_numpy(self.hidden).requires_grad_() if self.tensors else self.hidden
        return np.ones(len(states), np.int64), dict(hidden=(h, np.arange(len(states))))


def check_remembered(rows):
    for s in rows:
        assert np.array_equal(s.hidden[0], [s.step_n + 1]*2) and s.note == 7, s
    streams = collections.defaultdict(list)
    for s in rows: streams[int(s.env_id)].append(s)
    return sum(len({int(s.episode_n) for s in of}) for of in streams.values())


@pytest.mark.parametrize('tensors', [False, True])
def test_an_agent_with_a_state_of_its_own(tensors):
    "It is told where an episode begins, and the state it acted from stands in the step, as it was then"
    agent = Remembers(1, tensors)
    steps = take(GymStepper([lambda: Count((3, 1, 4))], agent=agent, step_type=Recurrent), 40)
    assert check_remembered(steps) == agent.told and steps[0].hidden[1] == 0 and not any(np.shares_memory(a.hidden[0], b.hidden[0]) for a, b in zip(steps, steps[1:]))


@pytest.mark.parametrize('mode', AutoresetMode)
@pytest.mark.parametrize('tensors', [False, True])
def test_an_agent_with_a_state_of_its_own_in_every_mode(mode, tensors):
    agent = Remembers(4, tensors)
    envs = gym.vector.SyncVectorEnv([lambda k=k: Count((3, 1, 4)[k % 3:] + (5 + k,)) for k in range(4)], autoreset_mode=mode)
    rows = list(flat(take(GymStepper([envs], agent=agent, step_type=Recurrent), 60)))
    begun = check_remembered(rows)
    assert agent.told in range(begun, begun + 5) and {int(s.hidden[1]) for s in rows} == set(range(4))
    assert all(s.hidden[1] == s.env_id for s in rows)


def test_an_agent_is_told_of_every_beginning():
    "After a load, a close, and an environment that raised too, since all of them begin an episode"
    agent = Remembers(3)
    envs = [functools.partial(Count, (4,))]
    pipe = GymStepper(envs, agent=agent, n_envs=3, step_type=Recurrent)
    rows = list(flat(take(pipe, 6)))
    assert agent.told == 6
    pipe.load_state_dict(pipe.state_dict())
    rows += flat(take(pipe, 2))
    pipe.close()
    rows += flat(take(pipe, 5))
    assert agent.told == 6 + 3 + 3 + 3
    check_remembered(rows)
    agent = Remembers(1)
    pipe = GymStepper([functools.partial(Fragile, (3,))], agent=agent, step_type=Recurrent)
    rows = take(pipe, 3)
    with pytest.raises(OSError): take(pipe, 1)
    check_remembered(rows + take(pipe, 4))
    assert agent.told == 4          # once in vain


@pytest.mark.parametrize('n', [1, 3])
def test_what_an_agent_remembers_through_n_step_and_replay(n):
    agent = Remembers(n)
    class Whole(NamedTuple):
        state: Any
        action: Any
        reward: Any
        next_state: Any
        terminated: Any
        truncated: Any
        env_id: Any
        step_n: Any
        hidden: Any = (np.zeros(2, np.float32), 0)
    pipe = GymStepper([functools.partial(Count, (3, 1, 4))], agent=agent, step_type=Whole, n_envs=n).n_step(2, .9)
    batch = next(iter(ExperienceReplay(pipe, bs=16, max_sz=100, min_sz=40, seed=0)))
    assert torch.equal(batch.hidden[0][:, 0], batch.step_n + 1.) and torch.equal(batch.hidden[1], batch.env_id)


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
@pytest.mark.parametrize('workers', [0, 2])
def test_what_an_agent_remembers_through_actors(workers):
    "Each worker has an agent of its own, and its state fields arrive with the steps that they belong to"
    made = functools.partial(Count, (3, 1, 4))
    pipe = Actors(GymStepper([made], agent=Remembers(3), step_type=Recurrent, n_envs=3), workers, 'fork', chunk=6)
    try: rows = list(flat(take(pipe, 20)))
    finally: pipe.close()
    assert check_remembered(rows) > 20 and len({int(s.env_id) for s in rows}) == 3*max(workers, 1)
    assert {int(s.hidden[1]) for s in rows} == {0, 1, 2}


@pytest.mark.parametrize('wrong,said', [
    (dict(reward=np.ones((2, 1))), 'reward'), (dict(ended=np.zeros(3, bool)), 'reward'),
    (dict(reward=np.array([1., 1e39])), 'reward')])
def test_wrong_rewards_of_a_vector_environment(wrong, said):
    class Wrong(LastRows):
        def step(self, actions):
            obs, reward, ended, truncated, info = super().step(actions)
            return obs, wrong.get('reward', reward), wrong.get('ended', ended), truncated, info
    with refused(said): take(GymStepper([Wrong()]), 1)


def test_fields_that_an_agent_may_not_fill():
    def agent(extra): return lambda states: ([0]*len(states), extra)
    for extra in (dict(colour=[1]), dict(reward=[1.]), dict(hidden=1, colour=2)):
        with pytest.raises(ValueError, match=WORDS['a field of the agent']): take(GymStepper([Count], agent=agent(extra), step_type=Recurrent), 1)
    assert take(GymStepper([Count], agent=agent({}), step_type=Recurrent), 1)[0].note == 7
    pipe = GymStepper([Count()], agent=agent(dict(note=[3])), step_type=Recurrent)
    assert take(pipe, 1)[0].note == 3


# ---- life and death

class Fragile(Count):
    def step(self, action):
        if (self.buffer[1], self.buffer[2]) == (1, 0): self.dead = True
        if getattr(self, 'dead', False):
            self.dead = False
            raise OSError('the simulator died')
        return super().step(action)


def test_an_environment_that_raises():
    pipe = GymStepper([functools.partial(Fragile, (3,))])
    steps = take(pipe, 3)
    with pytest.raises(OSError, match='^the simulator died$'): take(pipe, 1)
    more = take(pipe, 4)
    seen = [(s.state[1], s.step_n, s.episode_n) for s in steps + more]
    assert seen == [(0, 0, 0), (0, 1, 0), (0, 2, 0), (2, 0, 1), (2, 1, 1), (2, 2, 1), (3, 0, 2)]


def test_close_closes_only_what_it_made():
    closed = []
    class Closing(Count):
        def close(self): closed.append(self.number)
    mine = Closing()
    pipe = GymStepper([Closing, mine])
    steps = take(pipe, 9)
    pipe.close()
    assert closed == [int(steps[0].state[0])]
    more = take(pipe, 2)
    assert [(s.env_id, s.step_n, s.episode_n) for s in more] == [(1, 0, 2), (0, 0, 3)]
    pipe.close()
    assert mine.number not in closed


def test_state_is_small_and_loads():
    def pipe(): return GymStepper([Count, Count, Count], agent=EpsilonGreedy(torch.nn.Linear(3, 3), .5, seed=0), seed=9)
    first = pipe()
    old = take(first, 20)
    state = first.state_dict()
    assert len(json.dumps(state)) < 1000
    take(first, 300)
    assert len(json.dumps(first.state_dict())) < 1000
    runs = []
    for other in (first, pipe(), GymStepper([Count, Count, Count], agent=EpsilonGreedy(first.agent.model, .5), seed=1)):
        other.agent.model = first.agent.model
        other.load_state_dict(json.loads(json.dumps(state)))
        assert other.state_dict()['position'] == state['position'] and other.agent.n_steps == 20
        new = take(other, 30)
        assert [s.env_id for s in new[:4]] == [2, 0, 1, 2] and all(s.step_n == 0 for s in new[:3])
        last = {s.env_id: s for s in old}
        for s in new[:3]: assert s.episode_n == last[s.env_id].episode_n + 1
        runs.append([(s.env_id, s.episode_n, s.step_n) for s in new])
    assert runs[0] == runs[1] == runs[2]


def test_loading_gives_new_episodes_the_same_each_time():
    def run(state=None):
        pipe = GymStepper(['CartPole-v1'], seed=4)
        if state: pipe.load_state_dict(state)
        return pipe, take(pipe, 100)
    pipe, old = run()
    (_, a), (_, b) = run(pipe.state_dict()), run(pipe.state_dict())
    assert all(np.array_equal(x.state, y.state) for x, y in zip(a, b))
    assert not {tuple(s.state) for s in a} & {tuple(s.state) for s in old}
    assert a[0].episode_n == old[-1].episode_n + 1
    fresh = GymStepper(['CartPole-v1'], seed=4)
    again = GymStepper(['CartPole-v1'], seed=99)
    again.load_state_dict(fresh.state_dict())
    assert all(np.array_equal(x.state, y.state) for x, y in zip(take(fresh, 50), take(again, 50)))


def test_n_step_closes_windows_when_a_stepper_is_loaded():
    steps = GymStepper([functools.partial(Count, (50,))], seed=0)
    pipe = steps.n_step(3, 1.)
    got = take(pipe, 5)                                    # seven steps were made
    steps.load_state_dict(steps.state_dict())
    got += take(pipe, 4)
    seen = [(s.episode_n, s.step_n, s.reward, s.truncated) for s in got[5:]]
    assert seen == [(0, 5, 2., True), (0, 6, 1., True), (1, 0, 3., False), (1, 1, 3., False)]


def test_pickled_and_copied():
    pipe = GymStepper([Count, Count], seed=1)
    old = take(pipe, 9)
    new = take(pickle.loads(pickle.dumps(pipe)), 4)
    assert [s.env_id for s in new] == [1, 0, 1, 0] and all(s.episode_n >= 2 for s in new) and len(old) == 9
    counted(old + take(pipe, 5))


def test_in_a_dataloader():
    vector = gym.make_vec('CartPole-v1', 2, vectorization_mode='sync')      # can't be pickled, and neither can a lambda
    for source in ([functools.partial(Count, (3,))], [vector], [lambda: gym.make('CartPole-v1')]):
        assert len(take(DataLoader(GymStepper(source, seed=0), batch_size=None, collate_fn=lambda o: o), 5)) == 5


# ---- streams of several steppers

SOURCES = dict(single=(['CartPole-v1'], 1, 1), several=(['CartPole-v1']*3, 1, 3), vector=(['CartPole-v1'], 4, 4), vectors=(['CartPole-v1']*2, 3, 6))

@pytest.mark.parametrize('kind', SOURCES)
def test_stream_numbers_begin_where_they_are_told_to(kind):
    source, n_envs, n = SOURCES[kind]
    def made(**kw): return list(flat(take(GymStepper(source, seed=0, n_envs=n_envs, **kw), 60)))
    plain, moved = made(), made(first_env_id=100)
    assert {int(o.env_id) for o in plain} == set(range(n)) and {int(o.env_id) for o in moved} == set(range(100, 100 + n))
    for a, b in zip(plain, moved):                  # nothing else has changed
        assert a.env_id + 100 == b.env_id and np.array_equal(a.state, b.state) and a[1] == b[1] and a[3:7] == b[3:7] and a[8:] == b[8:]


def test_chunks_without_env_id_have_them_as_streams():
    chunk, = take(GymStepper(['CartPole-v1'], n_envs=3, step_type=Transition, first_env_id=7), 1)
    assert chunk.streams.tolist() == [7, 8, 9]


def test_a_loaded_stepper_keeps_its_stream_numbers():
    pipe, again = (GymStepper(['CartPole-v1']*2, seed=0, first_env_id=5) for _ in range(2))
    take(pipe, 50)
    again.load_state_dict(pipe.state_dict())
    assert {s.env_id for s in take(again, 4)} == {5, 6}
    assert {s.env_id for s in take(pickle.loads(pickle.dumps(pipe)), 4)} == {5, 6}


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_steppers_in_workers_keep_apart():
    "Two steppers of two environments each, in two workers of a DataLoader, and of `.actors()`"
    def stepper(first): return GymStepper(['CartPole-v1']*2, seed=0, first_env_id=first)
    found = []
    for first in (0, 2):
        dl = DataLoader(stepper(first), batch_size=None, collate_fn=lambda o: o, num_workers=2, multiprocessing_context='fork')
        found.append({int(s.env_id) for s in take(dl, 20)})
    assert found == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    both = Actors(Multiplexer(stepper(0), stepper(2)), 2, 'fork', chunk=8)
    try: rows = list(flat(take(both, 8)))
    finally: both.close()
    assert {int(s.env_id) for s in rows} == set(range(8))


@pytest.mark.parametrize('first', [-1, 1.5, '3', None, True])
def test_bad_first_env_ids(first):
    with refused('gym_stepper: first_env_id'): GymStepper(['CartPole-v1'], first_env_id=first)


@pytest.mark.parametrize('first', [0, 1])
def test_two_steppers_in_one_pipe(first):
    "The n-step transitions of two steppers are what each makes alone, if their streams have different numbers"
    def stepper(seed, **kw): return GymStepper(['CartPole-v1'], seed=seed, **kw)
    def fields(s): return (*s.state.tolist(), s.reward, s.discount, *s.next_state.tolist())
    alone = [fields(s) for seed in (0, 1) for s in take(NStep(stepper(seed), 3, .9), 400)]
    mixed = NStep(Multiplexer(stepper(0), stepper(1, first_env_id=first)), 3, .9)
    if first: right = {fields(s) for s in take(mixed, 700)}
    else:
        with pytest.warns(UserWarning, match=WORDS['name the environments']): right = {fields(s) for s in take(mixed, 700)}
    share = np.mean([o in right for o in alone[:300]])
    assert share == 1 if first else share < .2


# ---- fields from info

class Told(Count):
    "A counting environment whose info says what its step was: a number, an array and a word; and at each reset something else"
    def reset(self, seed=None, options=None):
        return super().reset(seed=seed)[0], dict(at=-1, pair=np.full(2, -1.), flag=True, only_reset=1)

    def step(self, action):
        obs, *rest, _ = super().step(action)
        _, e, t = obs.tolist()
        info = dict(at=int(100*e + t), pair=np.array([e, t]), flag=bool(rest[1]), nested=dict(a=1))
        if rest[1] or rest[2]: info['at_end'] = 1
        return obs, *rest, info


class Informed(NamedTuple):
    "A step with three fields that only `info` knows"
    state: Any
    action: Any
    next_state: Any
    terminated: bool
    truncated: bool
    reward: float
    at: int = -7
    was: Any = (0., 0.)
    flag: bool = False
    env_id: int = 0
    step_n: int = 0
    episode_n: int = 0

INFO = dict(at='at', was='pair', flag='flag')


def informed(rows):
    for s in rows:
        _, e, t = s.next_state.tolist()
        assert (s.at, list(s.was), bool(s.flag)) == (100*e + t, [e, t], bool(s.terminated)), s
    return len(rows)


def test_info_of_one_environment():
    "Of the step that led to the next state, never of a reset"
    rows = take(GymStepper([Told], step_type=Informed, info=INFO), 40)
    assert informed(rows) == 40
    assert not any(np.shares_memory(a.was, b.was) for a, b in itertools.combinations(rows[:10], 2))


@pytest.mark.parametrize('lengths', [(3, 1, 4), (1,), (2, 2)])
@pytest.mark.parametrize('mode', MODES)
def test_info_of_vector_environments(mode, lengths):
    "In each mode, episodes' ends included, also where all copies end at once"
    env = SyncVectorEnv([functools.partial(Told, lengths[k % 2:] + lengths[:k % 2]) for k in range(4)], autoreset_mode=mode)
    rows = list(flat(take(GymStepper([env], step_type=Informed, info=INFO), 60)))
    assert informed(rows) == len(rows) > 100 and any(s.terminated for s in rows) and any(s.truncated for s in rows)


def test_info_through_n_step_memory_and_actors():
    "The fields of the window's first step; and the same from workers"
    pipe = GymStepper([Told]*2, seed=0, n_envs=3, step_type=Informed, info=INFO)
    rows = list(flat(take(NStep(pipe, 2, .9), 30)))
    assert all(s.at == 100*s.state[1] + s.state[2] + 1 for s in rows)
    replay = ExperienceReplay(GymStepper([Told], step_type=Informed, info=INFO), bs=16, max_sz=100, seed=0)
    assert informed(list(take(replay, 20)[-1])) == 16
    for workers in (0, 1):
        actors = Actors(GymStepper([Told], step_type=Informed, info=INFO), workers, 'fork', chunk=8)
        try: assert informed(list(flat(take(actors, 4)))) == 32
        finally: actors.close()


def test_info_of_a_vector_environment_without_marks():
    "What tells no `_key` tells it of all copies"
    class Own(gym.vector.VectorEnv):
        metadata = dict(autoreset_mode=AutoresetMode.NEXT_STEP)
        num_envs, single_action_space = 2, gym.spaces.Discrete(2)
        single_observation_space = gym.spaces.Box(-9, 9, (1,))
        action_space = gym.vector.utils.batch_space(single_action_space, 2)
        def reset(self, seed=None, options=None): return np.zeros((2, 1), np.float32), {}
        def step(self, actions): return np.zeros((2, 1), np.float32), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool), dict(at=np.arange(2))
    chunk, = take(GymStepper([Own()], step_type=Informed, info=dict(at='at')), 1)
    assert chunk.at.tolist() == [0, 1]


@pytest.mark.parametrize('key,said', [('lives', 'info: lives'),
                                      ('only_reset', 'info: only_reset'), ('at_end', 'info: at_end'), ('nested', 'info: nested')])
@pytest.mark.parametrize('n_envs', [1, 3])
def test_a_key_that_is_missing_is_named(key, said, n_envs):
    pipe = GymStepper([Told], n_envs=n_envs, step_type=Informed, info=dict(at=key))
    if n_envs == 3 and key != 'nested': said = f'info: {key}'
    with refused(said, (ValueError, TypeError)): take(pipe, 30)


def test_bad_info():
    for bad, error, said in ((['at'], TypeError, 'info'), (dict(reward='r'), ValueError, 'info'),
                             (dict(lives='at'), ValueError, 'info'), (dict(at=3), TypeError, 'info: at')):
        with refused(said, error): GymStepper([Told], step_type=Informed, info=bad)
    with refused('info', got="'lives'"): GymStepper([Told], info=dict(lives='at'))
    def agent(states): return np.zeros(len(states), int), dict(at=np.zeros(len(states), int))
    with refused('at'): take(GymStepper([Told], agent, step_type=Informed, info=INFO), 1)


# ---- errors

@pytest.mark.parametrize('name', ['CartPol-v1', 'CartPole-v99', 'nowhere/CartPole-v1', 'no such id!', 'no_module_at_all:Env-v0', ''])
@pytest.mark.parametrize('n_envs', [1, 2])
def test_unknown_environments(name, n_envs):
    with pytest.raises(ValueError, match=words('an unknown environment', name=repr(name))) as e: take(GymStepper([name], n_envs=n_envs), 1)
    assert '\n' not in str(e.value)
    if name == 'CartPol-v1': assert e.match(words('it is named', name='CartPole'))


@pytest.mark.parametrize('source', [[], (), iter([]), IterableWrapper([])])
def test_empty_sources(source):
    with refused('gym_stepper', got='an empty source'): take(GymStepper(source), 1)


@pytest.mark.parametrize('item', [42, None, 1.5, object(), ['CartPole-v1'], {'id': 'CartPole-v1'}, b'CartPole-v1'])
def test_items_that_are_no_environment(item):
    with refused('gym_stepper', TypeError) as caught: take(GymStepper([item]), 1)
    assert caught.value.got.startswith(f'{type(item).__name__} ')


def test_other_errors():
    with refused('gym_stepper', TypeError, got="'CartPole-v1'"): GymStepper('CartPole-v1')
    with pytest.raises(TypeError) as caught: take(GymStepper([lambda: 'CartPole-v1']), 1)
    assert (caught.value.expected, caught.value.got) == ('an environment', "str 'CartPole-v1'")
    for n in (0, -1, 1.5, '2', None):
        with refused('gym_stepper: n_envs'): GymStepper([], n_envs=n)
    with refused('gym_stepper'): take(GymStepper([Count()], n_envs=2), 1)
    with refused('gym_stepper'): take(GymStepper([SyncVectorEnv([Count]*3)], n_envs=2), 1)
    with pytest.raises(ValueError): GymStepper([], seed=-1)
    with refused('gym_stepper'): take(GymStepper(Count() for _ in itertools.count()), 2000)


def test_epsilon_greedy_errors():
    model = torch.nn.Linear(4, 2)
    for eps in (-.1, 1.1, float('nan')):
        with refused('eps'): EpsilonGreedy(model, eps)
    with refused('eps', TypeError, got="'.1'"): EpsilonGreedy(model, '.1')
    with refused('EpsilonGreedy: model', got='(12,)'): EpsilonGreedy(torch.nn.Flatten(0), 0.)(np.zeros((3, 4)))
