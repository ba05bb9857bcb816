"Rows of several environments in one stream are told where somebody takes them in order, and nowhere else"
import copy
import warnings
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest

from fastrl_replay.all import (
    NStep, ReplayMemory, Sequence)
from fastrl_replay.batch import Batch
from fastrl_replay.health import consecutive, newest, torn_streams
from fastrl_replay.pipes.hindsight import HindsightReplay
from fastrl_replay.pipes.sequences import SequenceReplay
from words import WORDS


class Step(NamedTuple):
    state: Any
    action: Any
    reward: Any
    next_state: Any
    terminated: Any
    truncated: Any


class Worlds:
    "Environments that take turns: each a walk of its own, with episodes of its own length"
    def __init__(self, n=8, seed=0, nan=False):
        self.rng, self.n, self.t, self.nan = np.random.default_rng(seed), n, np.zeros(n, int), nan
        self.length, self.state = self.rng.integers(15, 40, n), self.rng.normal(size=(n, 3)).astype(np.float32)
    def step(self, which=None):
        "One row of each environment (or of those in `which`), stacked"
        which = np.arange(self.n) if which is None else which
        before = self.state[which].copy()
        after = (before + self.rng.normal(size=before.shape)).astype(np.float32)
        if self.nan: before[:, 0] = after[:, 0] = np.nan
        self.t[which] += 1
        ended = self.t[which] >= self.length[which]
        self.state[which] = after
        self.state[which[ended]] = self.rng.normal(size=(int(ended.sum()), 3))
        self.t[which[ended]] = 0
        return Step(before, which, np.ones(len(which), np.float32), after, np.zeros(len(which), bool), ended)
    def rows(self): return [Step(*o) for o in zip(*self.step())]


def said(memory): return [o for o in memory.health()['warnings'] if 'env_id' in o]

def singly(memory, world):
    for o in world.rows(): memory.add(o)
def as_list(memory, world): memory.extend(world.rows())

USES = dict(sequence=dict(sequence=Sequence(4)), windows=dict(windows={'action': range(4)}))

@pytest.mark.parametrize('nan,fill', [(False, singly), (True, as_list)])
@pytest.mark.parametrize('use', USES)
def test_eight_environments_in_one_stream_are_told(use, fill, nan):
    memory, world = ReplayMemory(3000, seed=0, **USES[use]), Worlds(nan=nan)
    for _ in range(100): fill(memory, world)
    warning, = said(memory)
    health = memory.health()
    assert 'env_id' in warning and 'streams=' in warning and f'{health["torn_share"]:.0%}' in warning
    assert health['torn_share'] > .9 and health['n_torn'] > 600 and health['n_torn']==torn_streams(memory, newest(memory))


@pytest.mark.parametrize('nan', [False, True])
@pytest.mark.parametrize('use', USES)
def test_the_same_rows_in_streams_of_their_own_are_not(use, nan):
    memory, world = ReplayMemory(3000, seed=0, **USES[use]), Worlds(nan=nan)
    for _ in range(100): memory.extend(world.step())
    assert said(memory)==[] and memory.health()['torn_share']==0
    by_streams, world = ReplayMemory(3000, seed=0, **USES[use]), Worlds(nan=nan)
    for _ in range(100): by_streams.extend(world.rows(), streams=np.arange(8))
    assert said(by_streams)==[] and by_streams.health()['torn_share']==0


def test_a_plain_memory_tells_the_share_and_warns_only_once_it_is_used_in_order():
    memory, world = ReplayMemory(3000, seed=0), Worlds()
    for _ in range(100): as_list(memory, world)
    for look in (lambda: None, lambda: memory.sample(8), lambda: memory.episode(3), lambda: memory.next([3], within_episode=True), lambda: [*memory.episodes()]):
        look()
        assert said(memory)==[] and memory.health()['torn_share'] > .9 and memory.health()['n_torn']==0
    for use in (lambda o: o.sample_sequences(2, 3), lambda o: o.sample(2, windows={'action': (0, 1)}), lambda o: o.episode_index()):
        used = copy.deepcopy(memory)
        use(used)
        assert len(said(used))==1


@pytest.mark.parametrize('n', [2, 3, 5])
def test_n_step_rows_of_a_list_of_environments_are_told(n):
    "In a plain memory, too: each is an impossible transition"
    memory, n_step, world = ReplayMemory(5000), NStep(n=n, gamma=.9), Worlds()
    for _ in range(150): memory.extend(n_step.push(world.rows()))
    assert len(said(memory))==1 and memory.health()['torn_share'] > .3


@pytest.mark.parametrize('gamma', [.9, 1.])
@pytest.mark.parametrize('n', [1, 3, 7])
def test_right_n_step_rows_are_not(n, gamma):
    "Of chunks, of single steps, in a memory that is used in order; and in any order in one that is not"
    world, chunks, one, singles = Worlds(), ReplayMemory(3000), Worlds(1), ReplayMemory(3000)
    by_chunk, by_step = NStep(n=n, gamma=gamma), NStep(n=n, gamma=gamma)
    for _ in range(200):
        chunks.extend(by_chunk.push(Batch.of(world.step())))
        singles.extend(by_step.push(one.rows()))
    mixed = ReplayMemory(3000)
    mixed.extend([*chunks.fetch(np.random.default_rng(0).permutation(len(chunks)))])
    for memory in (chunks, singles):
        assert said(memory)==[] and memory.health()['torn_share'] < .1
        memory.sample_sequences(2, 2)
        assert said(memory)==[]
    assert said(mixed)==[]


def test_hindsight_and_sequence_pipes_tell_it():
    class Goal(NamedTuple):
        state: Any
        action: Any
        reward: Any
        next_state: Any
        terminated: Any
        truncated: Any
    def goals(world, stacked):
        def of(a): return dict(observation=a, achieved_goal=a[..., :2].copy(), desired_goal=a[..., 1:].copy())
        for _ in range(100):
            o = world.step()
            o = Goal(of(o.state), o.action, o.reward, of(o.next_state), o.terminated, o.truncated)
            yield Batch.of(o) if stacked else [*Batch.of(o)]
    for stacked in (True, False):
        replay = HindsightReplay([*goals(Worlds(), stacked)], lambda a, d, info: np.zeros(len(a)), bs=4, max_sz=2000)
        for _ in islice(replay, 600): pass
        assert len(said(replay.memory))==1 - stacked
    for kind in ([Batch.of(o) for o in (w.step() for w in [Worlds()] for _ in range(60))], [o for w in [Worlds()] for _ in range(60) for o in w.rows()]):
        replay = SequenceReplay(kind, bs=2, max_sz=1000, length=4)
        for _ in islice(replay, 100): pass
        assert len(said(replay.memory))==(not isinstance(kind[0], Batch))


# ---- chunks of other numbers of rows

def alive(memory, n=60, seed=0):
    "Only those environments that have not ended yet are stored, until all have"
    rng, world, there = np.random.default_rng(seed), Worlds(), np.arange(8)
    for _ in range(n):
        memory.extend(world.step(there))
        there = there[rng.random(len(there)) < .95]
        if not len(there): there = np.arange(8)


@pytest.mark.parametrize('use', USES)
@pytest.mark.parametrize('form', [lambda o: o, lambda o: o._asdict(), Batch.of])
def test_stacked_rows_of_those_that_are_alive_are_warned_of_once(use, form):
    memory, world = ReplayMemory(3000, **USES[use]), Worlds()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        if use and form(world.step()).__class__ is dict: memory = ReplayMemory(3000, step=world.rows()[0], **USES[use])
        for _ in range(3): memory.extend(form(world.step()))
    with pytest.warns(UserWarning, match=WORDS['streams look mixed']) as found: memory.extend(form(world.step(np.arange(5))))
    assert len(found)==1 and found[0].filename==__file__ and len(memory)==29
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        alive(memory)


class Seen(NamedTuple):
    env_id: Any
    state: Any
    action: Any
    reward: Any
    next_state: Any
    terminated: Any
    truncated: Any

def test_other_chunks_are_not_warned_of():
    "With env_id, with streams, lists, a data set whose last part is shorter, a plain memory, n-step rows of a vector of environments"
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for m in (8, 8, 5, 8, 3):
            world = Worlds()
            if m==8: memory = ReplayMemory(200, sequence=Sequence(4))
            memory.extend(Seen(np.arange(m), *world.step(np.arange(m))))
        memory, world = ReplayMemory(200, sequence=Sequence(4)), Worlds()
        for m in (8, 5, 8, 3):
            memory.extend(world.step(np.arange(m)), streams=np.arange(m))
            memory.extend(Batch.of(world.step(np.arange(m)), streams=np.arange(m)))
            memory.extend([*Batch.of(world.step(np.arange(m)))], streams=np.arange(m))
            memory.extend([*Batch.of(world.step(np.arange(m)))])
        columns = [o for w in [Worlds(1)] for _ in range(100) for o in w.rows()]
        data = Step(*map(np.array, zip(*columns)))
        for options in ({}, dict(sequence=Sequence(4))):
            memory = ReplayMemory(200, **options)
            for a in range(0, 100, 30): memory.extend(Step(*(o[a:a + 30] for o in data)), streams='one')
            again = ReplayMemory(200, **options)
            for a in range(0, 100, 30): again.extend(Step(*(o[a:a + 30] for o in data)))
        alive(ReplayMemory(999))
        memory, n_step, world = ReplayMemory(999), NStep(n=3, gamma=.9), Worlds()
        for _ in range(60): memory.extend(n_step.push(Batch.of(world.step())))
        memory.sample_sequences(2, 2)
        for _ in range(60): memory.extend(n_step.push(Batch.of(world.step())))
    assert consecutive(again, 10) and not consecutive(memory, 10)
