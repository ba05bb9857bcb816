"Windows around a row: with frames, pipes, stacks and hindsight, and what is refused (beside a naive memory: test_kit.py)"
import copy
import pickle
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch

from fastrl_replay.all import GymStepper, ReplayMemory, Sequence, SimpleStep, Transition
from fastrl_replay.pipes.hindsight import HindsightReplay
from fastrl_replay.pipes.replay import ExperienceReplay, PrioritizedReplay, RankReplay
from fastrl_replay.pipes.sequences import SequenceReplay
from refusals import refused


def played(n=200, length=9, **options):
    "A memory of `n` steps in episodes of this length"
    memory = ReplayMemory(n, seed=0, **options)
    for k in range(n):
        e, t = divmod(k, length)
        memory.add(SimpleStep(np.float32([e, t]), k, np.float32([e, t + 1]), t==length - 1, False, 1., 0., 0, 0, t, e))
    return memory


WINDOWS = {'state': (-1, 0), 'action': range(8)}


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
