"Windows around a row: what is drawn equals what a list of all rows ever stored gives, whatever the sampler, the streams and the storage"
import copy
import pickle
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch

from fastrl_replay.all import AgeWeighted, GymStepper, Proportional, RankBased, ReplayMemory, Sequence, SimpleStep, Transition, Uniform
from fastrl_replay.pipes.hindsight import HindsightReplay
from fastrl_replay.pipes.replay import ExperienceReplay, PrioritizedReplay, RankReplay
from fastrl_replay.pipes.sequences import SequenceReplay
from refusals import refused


class Own(NamedTuple):
    state: Any
    action: Any
    terminated: Any
    truncated: Any
    env_id: Any = 0


class Twin:
    "All rows ever stored, in a list; a window is a walk; one that was dropped is not there"
    def __init__(self, max_sz): self.max_sz, self.rows, self.dropped = max_sz, [], set()
    @property
    def first(self): return max(0, len(self.rows) - self.max_sz)

    def beside(self, id, sign):
        "The stored neighbour of a row in its episode, or None"
        line = range(id + 1, len(self.rows)) if sign > 0 else range(id - 1, self.first - 1, -1)
        there = next((k for k in line if self.rows[k][0]==self.rows[id][0]), None)
        if there is None or there in self.dropped: return None
        before = self.rows[min(id, there)][1]
        return None if before.terminated or before.truncated else there

    def window(self, id, by):
        "The row `by` steps further, or the last before it, and whether it is that"
        for _ in range(abs(by)):
            there = self.beside(id, by)
            if there is None: return id, True
            id = there
        return id, False

    def check(self, batch, windows):
        for i, id in enumerate(batch.ids.tolist()):
            own = self.rows[id][1]
            for f in batch.layout.fields:
                there = [self.window(id, by) for by in windows[f]] if f in windows else None
                value = getattr(own, f) if there is None else [getattr(self.rows[k][1], f) for k, _ in there]
                assert np.array_equal(batch[f][i], np.asarray(value)), (id, f)
                if there is not None: assert batch.is_pad[f][i].tolist()==[pad for _, pad in there]


def world(rng, n_streams):
    "Endless (stream, step): episodes of one to a dozen steps, streams by turns at random"
    n = 0
    while True:
        n += 1
        ends = rng.random(2) < (.08, .05)
        stream = int(rng.integers(n_streams))
        yield stream, Own(np.float32([n, stream, -n]), np.int64(n), *ends, stream)

FIELDS = 'state', 'action', 'truncated'

def some_windows(rng, most):
    names = list(FIELDS)[int(rng.integers(2)):][:rng.integers(1, 4)]       # few combinations: each is a kernel
    return {f: [range(-2, 1), rng.integers(-most, most + 1, int(rng.integers(1, 6))).tolist(), (0,), (-1, 0), np.arange(4)][rng.integers(5)] for f in names}


DROPS = (0, 1, 2, 3)        # seeds: AgeWeighted refuses dropped rows
SAMPLERS = [lambda: None, lambda: Uniform(replace=True), lambda: Proportional(.7), lambda: RankBased(), lambda: AgeWeighted(20)]

@pytest.mark.parametrize('seed', range(4))
def test_windows_are_those_of_a_list_of_all_rows(seed, tmp_path):
    "Thousands of adds, chunks, draws with and without windows, updates; every other memory lies on disk"
    rng = np.random.default_rng(seed)
    max_sz, place = [8, 23, 60][seed % 3], tmp_path/'there' if seed % 2 else None
    memory = ReplayMemory(max_sz, SAMPLERS[seed % 5](), seed=seed, path=place)
    twin, steps, order = Twin(max_sz), world(rng, 1 + seed % 4), 0
    for _ in range(200):
        for _ in range(int(rng.integers(1, 9))):
            twin.rows.append(next(steps))
            if rng.random() < .5: memory.add(twin.rows[-1][1])
            else: memory.extend([twin.rows[-1][1]])
        if rng.random() < .2:
            new = [next(steps) for _ in range(int(rng.integers(1, 2*max_sz)))]
            twin.rows += new
            memory.extend([o for _, o in new])
        if seed in DROPS and rng.random() < .3:
            gone = set(rng.choice(np.arange(memory.first_id, memory.n_added), 2).tolist())
            if len(range(twin.first, len(twin.rows))) - len({o for o in twin.dropped | gone if o >= twin.first}) > 5:
                memory.drop(sorted(gone))
                twin.dropped |= gone
        bs, windows = int(rng.integers(1, min(6, len(memory)) + 1)) if seed not in DROPS else 3, some_windows(rng, max_sz//2 - 1)
        fields = ['action', 'env_id', 'truncated', 'state'] if rng.random() < .3 else None
        batch = memory.sample(bs, fields, windows)
        twin.check(batch, windows)
        order += len(batch)
        if batch.weights is not None and rng.random() < .3: memory.update_priorities(batch.ids, rng.random(bs))
        plain = memory.sample(bs)
        assert plain.is_pad is None and plain.layout is memory.layout
        if rng.random() < .05: assert memory.check_valid()
    assert memory.draws.n_rows >= order
    memory.close()


def played(n=200, length=9, **options):
    "A memory of `n` steps in episodes of this length"
    memory = ReplayMemory(n, seed=0, **options)
    for k in range(n):
        e, t = divmod(k, length)
        memory.add(SimpleStep(np.float32([e, t]), k, np.float32([e, t + 1]), t==length - 1, False, 1., 0., 0, 0, t, e))
    return memory


WINDOWS = {'state': (-1, 0), 'action': range(8)}

def test_the_same_rows_are_drawn_with_and_without_windows():
    one, other = played(), played()
    for _ in range(9):
        a, b = one.sample(32), other.sample(32, windows=WINDOWS)
        assert torch.equal(a.ids, b.ids) and torch.equal(a.probs, b.probs) and torch.equal(a.reward, b.reward)
        assert torch.equal(a.state, b.state[:, 1]) and torch.equal(a.action, b.action[:, 0])
        assert b.state.shape==(32, 2, 2) and b.action.shape==(32, 8) and list(b.is_pad)==['state', 'action']


def test_nested_fields_and_frames_have_windows(tmp_path):
    "Of a dict, all parts; frames stored once form stacks when they are drawn"
    def step(k):
        def obs(n): return dict(camera=np.full((24, 24), n, np.uint8), speed=np.float32([n]))
        return Transition(obs(k), (np.int64(k), np.float32([k, k])), 0., obs(k + 1), k % 7==6, False)
    for options in (dict(dedup=None), dict(), dict(path=tmp_path/'there')):
        memory = ReplayMemory(50, seed=0, **options)
        for k in range(70): memory.add(step(k))
        for fields in (None, ['state', 'action']):
            batch = memory.sample(20, fields, {'state': (-3, -1, 0), 'action': (0, 2)})
            assert batch.state['camera'].shape==(20, 3, 24, 24) and batch.action[1].shape==(20, 2, 2)
            for i, k in enumerate(batch.ids.tolist()):
                first, last = max(20, k - k % 7), min(69, k - k % 7 + 6)
                wanted = [max(first, k + by) for by in (-3, -1, 0)]
                assert batch.state['speed'][i].ravel().tolist()==wanted
                assert batch.state['camera'][i, :, 5, 5].tolist()==wanted
                assert batch.action[0][i].tolist()==[k, min(last, k + 2)]
                assert batch.is_pad['state'][i].tolist()==[k - 3 < first, k - 1 < first, False]
        memory.close()


def test_windows_are_saved_loaded_reopened_copied_and_pickled(tmp_path):
    memory = played(windows=WINDOWS)
    memory.save(tmp_path/'saved')
    for made in (ReplayMemory.load(tmp_path/'saved'), copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert made.windows==memory.windows and torch.equal(copy.deepcopy(memory).sample(9).action, made.sample(9).action)
    other = ReplayMemory(200)
    other.load_state_dict(memory.state_dict())
    assert other.windows==memory.windows and other.sample(3).action.shape==(3, 8)

    played(path=tmp_path/'there', windows=WINDOWS).close()
    with ReplayMemory.open(tmp_path/'there') as again: assert again.windows==memory.windows and again.sample(3).action.shape==(3, 8)
    with ReplayMemory(200, path=tmp_path/'there') as again: assert again.windows==memory.windows
    for given in {'reward': [0, 1]}, {}:             # may be set at any time, so the folder's are used, and others set afterwards
        with pytest.warns(UserWarning), ReplayMemory(200, path=tmp_path/'there', windows=given) as again:
            assert again.windows==memory.windows
    with ReplayMemory.open(tmp_path/'there') as again:
        with refused('windows', got="'speed'"): again.windows = {'speed': [0]}
        again.windows = {'reward': [0, 1]}
    with ReplayMemory.open(tmp_path/'there') as again:
        assert again.windows=={'reward': (0, 1)} and again.sample(3).reward.shape==(3, 2)
        again.windows = None
    with ReplayMemory.open(tmp_path/'there') as again: assert again.windows is None and again.sample(3).is_pad is None
    played(path=tmp_path/'plain').close()
    assert b'windows' not in (tmp_path/'plain'/'memory.json').read_bytes()


@pytest.mark.parametrize('pipe', [ExperienceReplay, PrioritizedReplay, RankReplay])
def test_pipes_and_loaders_yield_windows(pipe, tmp_path):
    def make(**kw): return pipe(GymStepper(['CartPole-v1'], seed=0), bs=8, max_sz=100, min_sz=50, seed=0, windows=WINDOWS, **kw)
    replay = make()
    batches = [next(o) for o in [iter(replay.loader())] for _ in range(60)]
    for batch in batches:
        assert batch.state.shape==(8, 2, 4) and batch.is_pad['action'].shape==(8, 8)
        assert not batch.is_pad['action'][:, 0].any() and not batch.is_pad['state'][:, 1].any()
    assert any(o.is_pad['state'].any() for o in batches) and any(o.is_pad['action'].any() for o in batches)
    assert next(iter(make().loader(prefetch=2))).action.shape==(8, 8)
    replay.save(tmp_path/'saved')
    again = make().load(tmp_path/'saved')
    assert torch.equal(next(iter(again)).action, next(iter(replay)).action)


def test_stacks_formed_at_the_draw_are_those_of_gymnasium():
    "Of frames stored once: `state` at offsets −3 … 0, and for the next state the last three of it and `next_state`"
    class Frames(gym.ObservationWrapper):
        observation_space = gym.spaces.Box(0, 255, (30, 30), np.uint8)
        def observation(self, obs): return np.resize((obs*40).astype(np.int64).astype(np.uint8), (30, 30))
    def env(): return Frames(gym.make('CartPole-v1'))
    plain = ReplayMemory(300, seed=3)
    stacked = ReplayMemory(300, seed=3)
    for memory, made in ((plain, env()), (stacked, gym.wrappers.FrameStackObservation(env(), 4))):
        for _, step in zip(range(300), GymStepper([made], seed=1)): memory.add(step)
    a, b = plain.sample(200, windows={'state': range(-3, 1)}), stacked.sample(200)
    assert torch.equal(a.ids, b.ids) and torch.equal(a.action, b.action) and torch.equal(a.state, b.state)
    assert torch.equal(torch.cat([a.state[:, 1:], a.next_state[:, None]], 1), b.next_state)


def test_hindsight_takes_windows_of_actions_and_refuses_those_of_what_depends_on_the_goal():
    def steps():
        for k in range(200):
            def obs(n): return dict(observation=np.float32([n]), achieved_goal=np.float32([n]), desired_goal=np.float32([-1]))
            yield SimpleStep(obs(k), k, obs(k + 1), False, k % 8==7, 0., 0., 0, 0, k % 8, k//8)
    def reward(achieved, desired, info): return -(achieved!=desired)[:, 0].astype(float)
    replay = HindsightReplay(list(steps()), reward, bs=16, max_sz=100, seed=0, windows={'action': (0, 1, 2)})
    for batch in replay:
        assert batch.relabelled.any() and batch.is_pad['action'].shape==(16, 3)
        k = batch.state['observation'].long()
        wanted = torch.minimum(k + torch.arange(3), torch.minimum(k - k % 8 + 7, torch.tensor(replay.memory.n_added - 1)))
        assert torch.equal(batch.action, wanted)
    with refused('windows', got='state'):
        HindsightReplay(list(steps()), reward, windows={'state': (-1, 0)})
    given = ReplayMemory(50, windows={'next_state': (0, 1)})
    with refused('windows', got='next_state'): next(iter(HindsightReplay(list(steps()), reward, bs=4, memory=given)))


@pytest.mark.parametrize('windows, error, words', [
    ({'speed': [0]}, ValueError, 'windows'),
    ({'action': []}, ValueError, "windows['action']"),
    ({'action': range(0)}, ValueError, "windows['action']"),
    ({'action': [.5]}, TypeError, "windows['action']"),
    ({'action': 3}, TypeError, "windows['action']"),
    ({'action': [[0, 1]]}, TypeError, "windows['action']"),
    ({'action': 'all'}, TypeError, "windows['action']"),
    ({'action': [True]}, TypeError, "windows['action']"),
    ({'action': range(201)}, ValueError, "windows['action']"),
    ({'action': (-100, 100)}, ValueError, "windows['action']"),
    ({'action': (-200,)}, ValueError, "windows['action']"),
    ([0, 1], TypeError, 'windows'),
    ('action', TypeError, 'windows')])
def test_bad_windows_are_named_and_nothing_changes(windows, error, words):
    memory, like = played(), played()
    with refused(words, error): memory.sample(4, windows=windows)
    with refused(words, error): played(windows=windows)
    assert memory.draws.n_rows==0 and torch.equal(memory.sample(4).ids, like.sample(4).ids)


def test_windows_are_refused_where_they_make_no_sense(tmp_path):
    memory = ReplayMemory(50, sequence=Sequence(4))
    memory.extend([SimpleStep(0., 0, 0., step_n=k) for k in range(20)])
    with refused('windows', got="{'action': [0]}"): memory.sample(2, windows={'action': [0]})
    with refused('windows', got="{'action': [0]}"): memory.windows = {'action': [0]}
    memory.windows = None
    assert memory.windows is None and memory.sample(2).action.shape==(2, 4)
    with refused('windows', got="{'action': (0,)}"):
        ReplayMemory(50, sequence=Sequence(4), windows={'action': [0]})
    with refused('windows', TypeError):
        SequenceReplay([], bs=2, max_sz=50, length=4, windows={'action': [0]})
    with refused('windows', got="'action'"):
        played().sample(3, ['state', 'reward'], {'action': [0]})
    class Bare(NamedTuple):
        state: Any
    bare = ReplayMemory(9)
    bare.extend([Bare(k) for k in range(5)])
    with refused('episode'): bare.sample(2, windows={'state': [0]})
    given = ReplayMemory(9)
    with refused('windows', TypeError, got="{'action': [0]}"): ExperienceReplay([], memory=given, windows={'action': [0]})
