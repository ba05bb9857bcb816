"Hindsight: an index that finds every step of an episode, and batches in which exactly as many goals are replaced as were asked for"
from collections import Counter, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.hindsight import HindsightBatch, HindsightReplay, relabel
from fastrl_replay.pipes.n_step import NStep
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.steps import SimpleStep, Transition
from fastrl_replay.storage.sequence_sampler import Sequence
from refusals import refused


class Bare(NamedTuple):
    "No episode numbers: flags and streams tell which steps belong together"
    state: Any
    action: Any
    reward: Any
    next_state: Any
    terminated: Any
    truncated: Any
    env_id: Any


def reached(achieved, desired, info):
    assert info == {} and achieved.shape == desired.shape
    return np.where((achieved == desired).all(1), 0., -1.)


def won(achieved, desired, info): return (achieved == desired).all(1)


class World:
    "Streams whose episodes end at random; achieved goals are the numbers of the steps, so that each row knows which it is"
    def __init__(self, seed, n_streams=3, kind=SimpleStep, end=.1, image=False):
        self.rng, self.kind, self.end, self.image = np.random.default_rng(seed), kind, end, image
        self.step_n, self.episode_n, self.made = [0]*n_streams, [0]*n_streams, 0

    def obs(self, k, e):
        own = dict(observation=np.full((1, 30, 30), k % 256, np.uint8)) if self.image else {}
        return own | dict(achieved_goal=np.float32([k, -k]), desired_goal=np.float32([-1 - self.episode_n[e], e]))

    def step(self, e):
        k = self.made = self.made + 1
        end, cut, left = self.rng.random(3) < (self.end/2, self.end/2, self.end/4)     # left: another episode without a flag
        by_name = dict(state=self.obs(2*k, e), action=0, reward=-1., next_state=self.obs(2*k + 1, e), terminated=bool(end), truncated=bool(cut),
                       total_reward=0., env_id=e, proc_id=0, step_n=self.step_n[e], episode_n=self.episode_n[e])
        self.step_n[e] += 1
        if end or cut or left and self.kind is SimpleStep: self.step_n[e], self.episode_n[e] = 0, self.episode_n[e] + 1
        return self.kind(*(by_name[o] for o in self.kind._fields))

    def steps(self, n): return [self.step(int(self.rng.integers(len(self.step_n)))) for _ in range(n)]
    def lockstep(self): return [self.step(e) for e in range(len(self.step_n))]


class Twin:
    "Every step ever made, with the numbers of its episode's steps, in a dict"
    def __init__(self, max_sz): self.max_sz, self.steps, self.open, self.episode = max_sz, [], {}, []

    def add(self, step):
        id, last = len(self.steps), self.open.get(step.env_id)
        self.steps.append(step)
        goes_on = last is not None and not (self.steps[last].terminated or self.steps[last].truncated)
        if goes_on and hasattr(step, 'episode_n'): goes_on = self.steps[last].episode_n == step.episode_n
        self.episode.append(self.episode[last] if goes_on else [])
        self.episode[id].append(id)
        self.open[step.env_id] = id

    def stored(self, id): return [o for o in self.episode[id] if o >= len(self.steps) - self.max_sz]
    @property
    def ids(self): return range(max(0, len(self.steps) - self.max_sz), len(self.steps))


def check(index, twin):
    "The index's answers; test_episodes_index goes into all of them"
    ids, max_sz = np.array(twin.ids), twin.max_sz
    before, after = index.counts(ids % max_sz)
    want = [twin.stored(o) for o in twin.ids]
    assert before.tolist() == [w.index(o) for o, w in zip(twin.ids, want)]
    assert after.tolist() == [len(w) - 1 - w.index(o) for o, w in zip(twin.ids, want)]
    for o, w in zip(twin.ids, want): assert index.ids_of(o % max_sz).tolist() == w
    assert index.check_valid()


@pytest.mark.parametrize('kind', [SimpleStep, Bare])
@pytest.mark.parametrize('max_sz,n_streams,end', [(1, 1, .3), (7, 2, .3), (64, 3, .1), (200, 8, .02), (50, 5, 0.), (30, 3, 2.), (90, 60, .1)])
def test_the_index_knows_what_a_dict_of_everything_knows(kind, max_sz, n_streams, end):
    world, twin, rng, memory = World(max_sz, n_streams, kind, end), Twin(max_sz), np.random.default_rng(1), ReplayMemory(max_sz)
    for _ in range(40):
        way = rng.integers(4)
        if way == 3: steps = world.steps(int(rng.integers(1, 2*max_sz + 5)))      # longer than the memory, now and then
        else: steps = world.lockstep() if way else world.steps(int(rng.integers(5)))
        for o in steps: twin.add(o)
        if way == 1: memory.extend(Batch.of_steps(steps))
        elif way == 2: [memory.add(o) for o in steps]
        else: memory.extend(steps)
        if len(memory) and rng.random() < .5: check(memory.episode_index(), twin)


@pytest.mark.parametrize('strategy', ['future', 'final', 'episode'])
def test_choices_are_uniform_over_the_right_steps(strategy):
    world, twin, memory = World(3, 2, end=.1), Twin(60), ReplayMemory(60, seed=0)
    steps = world.steps(150)
    for o in steps: twin.add(o)
    memory.extend(steps)
    index, n = memory.episode_index(), 500
    for id in twin.ids:
        stored = twin.stored(id)
        wanted = dict(future=[o for o in stored if o >= id], final=stored[-1:], episode=stored)[strategy]
        found = Counter(index.choose(np.full(n, id % 60), strategy, memory.rng).tolist())
        assert found.keys() <= set(wanted)
        expected = n/len(wanted)
        chi2 = sum((found[o] - expected)**2/expected for o in wanted)
        assert chi2 < len(wanted) + 6*np.sqrt(2*len(wanted)) + 6, (id, found)


@pytest.mark.parametrize('seed', range(4))
def test_the_last_step_that_is_left_is_found_whatever_came_in_between(seed):
    "Tails and single rows are dropped, steps are added and overwritten, rows are cleared: the index notes what it found before"
    world, twin, memory = World(seed, 3, end=.06), Twin(60), ReplayMemory(60, seed=0)
    rng, dropped, looks = np.random.default_rng(seed), set(), 0
    for k in range(300):
        steps = world.steps(int(rng.integers(1, 90 if k % 50==49 else 6)))
        for o in steps: twin.add(o)
        memory.extend(steps)
        dropped &= set(twin.ids)
        if rng.random() < .5:
            run = memory.episode_ids(int(rng.choice(list(twin.ids))))
            gone = (run[int(rng.integers(len(run))):] if rng.random() < .7 else rng.choice(run, 1)).tolist()
            memory.drop(gone)
            dropped |= set(gone)
        left = [o for o in twin.ids if o not in dropped]
        if not left: continue
        found = memory.episode_index().choose(np.array(left) % 60, 'final', memory.rng, memory.sampler.eligible)
        assert found.tolist()==[[o for o in twin.stored(i) if o not in dropped][-1] for i in left]
        looks += len(left)
    assert looks > 2000 and memory.check_valid()


def test_flags_end_an_episode_whose_number_stays():
    "Steps made by hand leave `episode_n` at 0"
    memory, obs = ReplayMemory(10), dict(achieved_goal=np.zeros(1), desired_goal=np.zeros(1))
    for k in range(6): memory.add(SimpleStep(obs, 0, obs, terminated=k == 1, truncated=k == 4))
    before, after = memory.episode_index().counts(np.arange(6))
    assert before.tolist() == [0, 1, 0, 1, 2, 0] and after.tolist() == [1, 0, 2, 1, 0, 0]


# ---- batches

def replay_of(world, n=600, max_sz=500, bs=50, **kw):
    "A replay that has stored `n` steps, and its twin"
    replay, twin = HindsightReplay([], reached, bs=bs, max_sz=max_sz, **dict(seed=0) | kw), Twin(max_sz)
    steps = world.steps(n)
    replay.extend(steps)
    for o in steps: twin.add(o)
    return replay, twin


@pytest.mark.parametrize('strategy', ['future', 'final', 'episode'])
@pytest.mark.parametrize('kind', [SimpleStep, Bare])
def test_a_batch_is_what_the_twin_says(strategy, kind):
    replay, twin = replay_of(World(1, kind=kind), strategy=strategy, k=4, compute_terminated=won)
    stored = replay.memory.state_dict()['rows']['0']['records'].clone()
    for _ in range(100):
        batch = replay.sample()
        assert isinstance(batch, HindsightBatch) and batch.relabelled.dtype == torch.bool and batch.relabelled.sum() == 40
        for id, other, row in zip(batch.ids.tolist(), batch.relabelled.tolist(), batch):
            step, goal = twin.steps[id], row.next_state['desired_goal']
            assert (row.state['desired_goal'] == goal).all()
            for a, b in ((row.state, step.state), (row.next_state, step.next_state)): assert (a['achieved_goal'] == b['achieved_goal']).all()
            if not other:
                assert (goal == step.state['desired_goal']).all() and row.reward == -1 and row.terminated == step.terminated
                continue
            source = int(goal[0] - 1)//2 - 1                          # achieved goals tell which step they are of
            assert (twin.steps[source].next_state['achieved_goal'] == goal).all() and source in twin.stored(id)
            if strategy == 'future': assert source >= id
            if strategy == 'final': assert source == twin.stored(id)[-1]
            assert row.reward == (0 if source == id else -1) and row.terminated == (source == id)
    assert (replay.memory.state_dict()['rows']['0']['records'] == stored).all()


@pytest.mark.parametrize('k,bs', [(0, 3), (.5, 1), (1, 2), (1, 33), (4, 10), (7, 33), (1e9, 10)])
def test_counts_are_exact(k, bs):
    replay, _ = replay_of(World(2), k=k, bs=bs)
    for _ in range(5): assert replay.sample().relabelled.sum() == round(bs*k/(k + 1))


def test_every_row_of_a_batch_is_chosen_alike():
    replay, _ = replay_of(World(2), k=1, bs=10)
    counts = sum(replay.sample().relabelled.long() for _ in range(1000))
    assert counts.min() > 420 and counts.max() < 580                # 500 ± 5 deviations


def test_termination_stays_without_a_function_for_it():
    replay, twin = replay_of(World(2), k=1e9)
    batch = replay.sample()
    assert batch.terminated.tolist() == [twin.steps[o].terminated for o in batch.ids.tolist()]


@pytest.mark.parametrize('image', [False, True])
def test_on_disk_and_with_frames(tmp_path, image):
    replay, twin = replay_of(World(4, image=image), 260, 200, path=tmp_path/'m', dedup='large')
    replay.memory.episode_index().check_valid()
    assert image == ('stored once' in repr(replay.memory))
    replay.memory.close()
    memory = ReplayMemory.open(tmp_path/'m')
    again = HindsightReplay([], reached, memory=memory, bs=50)
    check(memory.episode_index(), twin)
    for row in again.sample():
        if image: assert row.next_state['observation'].flat[0] == row.next_state['achieved_goal'][0] % 256
    memory.close()


def test_the_index_follows_a_memory_that_is_loaded(tmp_path):
    replay, _ = replay_of(World(5))
    other, twin = replay_of(World(6))
    replay.sample(), other.sample()
    other.save(tmp_path/'saved')
    replay.load(tmp_path/'saved')
    check(replay.memory.episode_index(), twin)
    other.memory.load_state_dict(replay.memory.state_dict())
    check(other.memory.episode_index(), twin)


def test_the_same_seed_gives_the_same_batches_and_so_does_a_saved_replay(tmp_path):
    a, b = (replay_of(World(7), seed=3)[0] for _ in range(2))
    def draw(replay): return [o.reward.tolist() + o.ids.tolist() for o in (replay.sample() for _ in range(5))]
    assert draw(a) == draw(b)
    a.save(tmp_path/'saved')
    new, _ = replay_of(World(8))
    new.load(tmp_path/'saved')
    assert draw(new) == draw(a)


def test_priorities_pass_through():
    replay, _ = replay_of(World(9), sampler=Proportional(), bs=32)
    batch = replay.sample()
    assert batch.weights is not None and batch.update_priorities(np.ones(32)) == len(set(batch.ids.tolist()))


def test_a_pipe_with_a_loader():
    world = World(10)
    replay = HindsightReplay(world.steps(300), reached, bs=16, min_sz=100, steps_per_batch=10, seed=0, return_idxs=True, max_sz=1000)
    found = list(replay.loader(prefetch=2))
    assert len(found) == 21 and all(o.relabelled.sum() == 13 and (i == o.idxs).all() for o, i in found)
    chunks = HindsightReplay([Batch.of_steps(world.lockstep()) for _ in range(40)], reached, bs=16, max_sz=100)
    for batch in chunks: assert batch.relabelled.sum() == 13
    assert chunks.memory.episode_index().check_valid()


def test_a_batch_keeps_its_flags():
    import copy
    import pickle
    batch = replay_of(World(11))[0].sample()
    rows = batch.relabelled.tolist()
    for made in (pickle.loads(pickle.dumps(batch)), copy.copy(batch), batch.to('cpu'), batch.replace(reward=batch.reward + 1)):
        assert made.relabelled.tolist() == rows and made.ids.tolist() == batch.ids.tolist()
    assert batch[5:20].relabelled.tolist() == rows[5:20] and not hasattr(batch[3], 'relabelled')


def test_a_batch_of_any_memory_is_relabelled_by_hand():
    memory = ReplayMemory(100, seed=0)
    memory.extend(World(12).steps(100))
    batch, rows = memory.sample(10), np.array([1, 4])
    made = relabel(batch, rows, np.zeros((2, 2), np.float32), lambda a, d, info: np.array([7, 8]))
    assert made.reward[rows].tolist() == [7, 8] and made.relabelled.sum() == 2 and (made.state['desired_goal'][rows] == 0).all()


# ---- bad input

@pytest.mark.parametrize('answer,expected,got', [
    (lambda a, d, i: np.zeros(3), 'one number for each of 8 rows', 'float64 of shape (3,)'), (lambda a, d, i: np.zeros((8, 1)), 'one number for each of 8 rows', 'float64 of shape (8, 1)'),
    (lambda a, d, i: 0., 'one number for each of 8 rows', 'float64 of shape ()'), (lambda a, d, i: np.full(8, np.nan), 'finite numbers', 'nan at 0'),
    (lambda a, d, i: np.full(8, np.inf), 'finite numbers', 'inf at 0'), (lambda a, d, i: [None]*8, 'numbers (bool, int, float, complex)', 'an array of object'),
    (lambda a, d, i: np.zeros(8, complex), 'one number for each of 8 rows', 'complex128 of shape (8,)')])
def test_wrong_answers_are_refused(answer, expected, got):
    replay, _ = replay_of(World(13), bs=10)
    before = replay.memory.state_dict()['rows']['0']['records']
    batch, rows = replay.memory.sample(10), np.arange(8)
    goals, old = np.ones((8, 2), np.float32), batch.state['desired_goal'].clone()
    for name in ('compute_reward', 'compute_terminated'):
        functions = [answer] if name == 'compute_reward' else [reached, answer]
        with refused(name, (ValueError, TypeError), expected, got): relabel(batch, rows, goals, *functions)
    assert (batch.state['desired_goal'] == old).all() and (batch.reward == -1).all()
    replay.compute_reward = answer
    with refused('compute_reward', (ValueError, TypeError), expected): replay.sample()
    assert (replay.memory.state_dict()['rows']['0']['records'] == before).all()


def test_an_answer_that_is_no_flag_is_refused():
    replay, _ = replay_of(World(13), bs=10)
    batch, rows, goals = replay.memory.sample(10), np.arange(8), np.ones((8, 2), np.float32)
    before, old = batch.terminated.clone(), batch.state['desired_goal'].clone()
    for wrong in (np.full(8, .7), np.arange(8), np.full(8, -1)):
        with refused('terminated'): relabel(batch, rows, goals, reached, lambda a, d, i: wrong)
    assert (batch.terminated == before).all() and (batch.state['desired_goal'] == old).all()
    for kind in (bool, int, np.float32):
        made = relabel(batch, rows, goals, reached, lambda a, d, i: (np.arange(8) % 2).astype(kind))
        assert made.terminated[:8].tolist() == [False, True]*4 and made.terminated.dtype is torch.bool


def goal_step(**changed):
    obs = dict(achieved_goal=np.zeros(2), desired_goal=np.zeros(2))
    return Transition(obs, 0, 0., obs, False, False)._replace(**changed)


NO_FLAGS = namedtuple('NoFlags', 'state action reward next_state')
NO_REWARD = namedtuple('NoReward', 'state action next_state terminated truncated')
DISCOUNTED = namedtuple('Discounted', [*Transition._fields, 'discount'])
OBS = goal_step().state
def both(state): return goal_step(state=state, next_state=state)


@pytest.mark.parametrize('step,said', [
    (both(np.zeros(2)), 'hindsight'),
    (both(dict(achieved_goal=np.zeros(2))), 'hindsight'),
    (both(dict(desired_goal=np.zeros(2))), 'hindsight'),
    (both(dict(desired_goal=np.zeros(2), achieved_goal=np.zeros(3))), 'hindsight: an achieved goal must be able to replace a goal'),
    (both(dict(desired_goal=np.zeros(2, int), achieved_goal=np.zeros(2))), 'hindsight: an achieved goal must be able to replace a goal'),
    (goal_step(reward=np.zeros(1)), 'hindsight'), (NO_REWARD(OBS, 0, OBS, False, False), 'hindsight'),
    (DISCOUNTED(*goal_step(), .9), 'hindsight')])
def test_steps_that_do_not_fit_are_not_stored(step, said):
    def stacked(v): return {k: stacked(o) for k, o in v.items()} if isinstance(v, dict) else np.stack([np.asarray(v)]*3)
    columns = type(step)(*map(stacked, step))
    for items in ([step], [[step, step]], [Batch.of_steps([step])]):
        replay = HindsightReplay(items, reached)
        with refused(said): next(iter(replay))
        assert len(replay) == 0 and replay.memory.layout is None
        for store in (lambda o: o.extend([step]), lambda o: o.extend(columns), lambda o: o.add(step)):
            with refused(said): store(replay)
        assert len(replay) == 0
    memory = ReplayMemory(10)
    memory.add(step)
    with refused(said): HindsightReplay([], reached, memory=memory)


def test_steps_without_borders_are_refused():
    replay = HindsightReplay([NO_FLAGS(OBS, 0, 0., OBS)]*3, reached, bs=3)
    with refused('episode'): next(iter(replay))


def test_transitions_of_several_steps_are_refused():
    with refused('hindsight'): NStep(iter([]), 3, .9).hindsight_replay(reached)     # at once


def test_a_memory_of_sequences_is_refused_by_name():
    memory = ReplayMemory(20, sequence=Sequence(3))
    with refused('memory', TypeError): HindsightReplay([], reached, memory=memory)


@pytest.mark.parametrize('options,said', [(dict(strategy='past'), 'strategy'), (dict(k=-1), 'k'), (dict(k=float('nan')), 'k'),
                                          (dict(bs=0), 'bs'), (dict(memory=3), 'memory')])
def test_wrong_options_are_refused(options, said):
    with refused(said, (ValueError, TypeError)): HindsightReplay([], reached, **options)
    with refused('compute_reward', TypeError, got='NoneType None'): HindsightReplay([], None)
