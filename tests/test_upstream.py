"""What is upstream is saved and restored through any pipe in between: torch's own, those of a user, several sources."""
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from fastrl_replay.pipes.base import IterDataPipe, sources_of, state_upstream, upstream
from fastrl_replay.pipes.n_step import NStep
from fastrl_replay.pipes.replay import ExperienceReplay
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.ray.replay import RayReplay
from fastrl_replay.saving import CheckpointError
from fastrl_replay.steps import SimpleStep
from refusals import refused
from words import words

ROOT = Path(__file__).resolve().parent.parent
SHIM = os.environ.get('FASTRL_REPLAY_SHIM')=='1'
needs_torch = pytest.mark.skipif(SHIM, reason='the shim has pipes of ours only')


class Counting(IterDataPipe):
    "A source of steps that knows how many it has made"
    def __init__(self, env_id=0): self.env_id, self.n = env_id, 0
    def __iter__(self):
        while True:
            k, self.n = self.n, self.n + 1
            yield SimpleStep(np.full(2, k, np.float32), k, np.full(2, k + 1, np.float32), k % 5==4, False, 1., 0., self.env_id, 0, k % 5, k//5)
    def state_dict(self): return dict(n=self.n)
    def load_state_dict(self, state): self.n = state['n']


class Clip(IterDataPipe):
    "A pipe as a user writes it: no state, a name of its own for its source"
    def __init__(self, behind): self.behind = behind
    def __iter__(self):
        for step in self.behind: yield step._replace(reward=min(step.reward, 1.))


class Mean(Clip):
    "One with a state that it gives away"
    def __init__(self, behind):
        super().__init__(behind)
        self.total = 0.
    def __iter__(self):
        for step in self.behind:
            self.total += step.reward
            yield step
    def state_dict(self): return dict(total=self.total)
    def load_state_dict(self, state): self.total = state['total']


class Turns(IterDataPipe):
    "Takes turns among the sources in a list or a dict"
    def __init__(self, several): self.several = several
    def __iter__(self):
        sources = list(self.several.values()) if isinstance(self.several, dict) else self.several
        for steps in zip(*sources): yield from steps


class Forgets(Clip):
    "One that lets its source go as soon as it has begun"
    def __iter__(self):
        it = iter(self.behind)
        self.behind = None
        yield from it


def same(step): return step
def always(step): return True
def parity(step): return int(step.step_n) % 2


def n_steps(source): return NStep(source, 2, .9)


PLAIN = dict(
    own=lambda: Clip(Counting()),
    own_twice=lambda: Clip(Clip(n_steps(Clip(Counting())))),
    own_state=lambda: Mean(n_steps(Mean(Counting()))),
    a_list=lambda: Turns([Counting(0), Clip(Counting(1)), n_steps(Counting(2)).source_datapipe]),
    a_dict=lambda: Turns(dict(a=Mean(Counting(0)), b=Counting(1))),
    windows=lambda: Turns([n_steps(Clip(Counting(0))), n_steps(Counting(1))]),
    gone=lambda: Forgets(Counting()))
OF_TORCH = dict(
    map=lambda: Counting().map(same),
    filter=lambda: n_steps(Counting().filter(always)).map(same),
    mux=lambda: n_steps(Counting(0).mux(Counting(1).map(same))),
    concat=lambda: Counting(0).concat(Counting(1)).map(same),
    zip=lambda: Counting(0).zip(Counting(1)).map(first),
    fork=lambda: first_of(Counting().map(same).fork(2)),
    demux=lambda: first_of(Counting().demux(2, parity)))


def first(pair): return pair[0]
def first_of(pipes): return pipes[0].mux(pipes[1])


def kept(replay):
    "What each pipe with a state has"
    return [(type(o).__name__, o.n if isinstance(o, Counting) else o.total) for o in upstream(replay) if isinstance(o, (Counting, Mean))]


def replay_of(source): return ExperienceReplay(source, bs=2, max_sz=1000, min_sz=4, seed=0)


def run(replay, k):
    for _ in zip(range(k), replay): pass


@pytest.mark.parametrize('name', [*PLAIN, *(pytest.param(o, marks=needs_torch) for o in OF_TORCH)])
@pytest.mark.filterwarnings('ignore:Some child DataPipes are not exhausted')
def test_states_are_saved_beyond_any_pipe(name, tmp_path):
    make = (PLAIN | OF_TORCH)[name]
    replay, again = replay_of(make()), replay_of(make())
    counters = [o for o in upstream(replay) if isinstance(o, (Counting, Mean))]
    run(replay, 23)
    assert any(o.n for o in counters if isinstance(o, Counting))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        replay.save(tmp_path)
        again.load(tmp_path)
    wanted = [(type(o).__name__, o.n if isinstance(o, Counting) else o.total) for o in counters]
    assert kept(again)==wanted and len(wanted)==len(set(map(id, counters)))
    small = replay_of(make())
    small.memory.restore(*replay.memory.saved()[:1], replay.memory.saved()[1].pieces())
    small.load_state_dict(replay.state_dict())
    assert kept(small)==wanted


def test_steps_that_wait_in_a_window_are_saved_beyond_any_pipe(tmp_path):
    def make(): return replay_of(Clip(Turns([Clip(NStep(Clip(Counting(k)), 3, .5)) for k in (0, 1)])))
    replay = make()
    run(replay, 21)
    with pytest.warns(UserWarning, match=words('it is named', name='Clip')): replay.save(tmp_path)
    again = make().load(tmp_path)
    run(again, 30)
    rows = again.memory.recent(len(again))
    keys = list(zip(rows.env_id.tolist(), rows.episode_n.tolist(), rows.step_n.tolist()))
    assert len(set(keys))==len(keys)
    for e in (0, 1):
        mine = sorted(5*episode + k for env_id, episode, k in keys if env_id==e)
        assert mine==list(range(len(mine))), 'a step was lost'


@needs_torch
@pytest.mark.parametrize('loader', [False, True])
def test_exploration_and_episodes_go_on(loader, tmp_path):
    from fastrl_replay.pipes.agents import EpsilonGreedy
    from fastrl_replay.schedules import LinearSchedule
    def make():
        agent = EpsilonGreedy(torch.nn.Linear(4, 2), LinearSchedule(1., .05, 1000), seed=0)
        steps = GymStepper(['CartPole-v1'], agent=agent, seed=0)
        return agent, steps.map(same).n_step(2, .9).prioritized_replay(bs=4, max_sz=2000, min_sz=10, steps_per_batch=4, seed=0)
    agent, replay = make()
    if loader:
        ahead = replay.loader(stateful=True)
        it = iter(ahead)
        for _ in range(100): next(it)
    else: run(replay, 100)
    again, second = make()
    assert agent.eps_now() < .7 and again.eps_now()==1.
    if loader:
        second.memory.restore(*replay.memory.saved()[:1], replay.memory.saved()[1].pieces())
        behind = second.loader(stateful=True)
        behind.load_state_dict(ahead.state_dict())
        next(iter(behind))
    else:
        replay.save(tmp_path)
        second.load(tmp_path)
    assert abs(again.eps_now() - agent.eps_now()) < .02
    begun = replay.memory.recent(1).episode_n.item()
    run(second, 50)
    assert second.memory.recent(1).episode_n.item() > begun


SCRIPT = '''
import os, signal, sys
import torch
from fastrl_replay.all import *

@datapipe('clip_rewards')
class ClipRewards(IterDataPipe):
    def __init__(self, upstream_of_mine): self.upstream_of_mine = upstream_of_mine
    def __iter__(self):
        for step in self.upstream_of_mine: yield step._replace(reward=min(step.reward, 1.))

agent = EpsilonGreedy(torch.nn.Linear(4, 2), eps=LinearSchedule(1., .05, 1000), seed=0)
replay = (GymStepper(['CartPole-v1'], agent=agent, seed=0).clip_rewards().n_step(n=3, gamma=.99)
          .prioritized_replay(bs=16, max_sz=5000, min_sz=100, steps_per_batch=2, seed=0))
folder, k = sys.argv[1], int(sys.argv[2])
if k: replay.load(folder)
print(agent.eps_now())
for _ in zip(range(150), replay): pass
replay.save(folder)
rows = replay.memory.recent(len(replay))
keys = list(zip(rows.env_id.tolist(), rows.episode_n.tolist(), rows.step_n.tolist()))
print(agent.eps_now(), len(keys), len(set(keys)), flush=True)
for _ in zip(range(20), replay): pass
os.kill(os.getpid(), signal.SIGKILL)
'''


@pytest.mark.parametrize('start', [1, 2])
def test_a_pipeline_with_a_pipe_of_ones_own_is_killed_and_resumed(start, tmp_path):
    (tmp_path/'script.py').write_text(textwrap.dedent(SCRIPT))
    env, before = dict(os.environ, PYTHONPATH=str(ROOT)), 1.
    for k in range(start + 1):
        done = subprocess.run([sys.executable, 'script.py', 'saved', str(k)], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode==-signal.SIGKILL, done.stderr
        assert done.stderr.count('ClipRewards')==done.stderr.count('UserWarning')==1
        begins, ends, n_rows, n_keys = done.stdout.split()
        assert float(begins)==before and float(ends) < before and n_rows==n_keys
        before = float(ends)


def warned(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        call()
    return [str(o.message) for o in caught]


def test_a_pipe_without_a_state_is_named_once(tmp_path):
    replay = replay_of(Turns([n_steps(Clip(Mean(Counting(0)))), n_steps(Clip(Counting(1)))]))
    run(replay, 5)
    [said] = warned(lambda: replay.save(tmp_path))
    assert said.startswith('Turns, Clip: ') and 'state_dict' in said
    assert not warned(lambda: replay.save(tmp_path)) and not warned(replay.state_dict)
    assert not warned(lambda: replay_of(Mean(n_steps(Mean(Counting())))).save(tmp_path/'other'))


def test_what_a_stepper_takes_its_environments_from_is_not_named(tmp_path):
    class Names(IterDataPipe):
        def __iter__(self): return iter(['CartPole-v1', 'CartPole-v1'])
    replay = replay_of(GymStepper(Names(), seed=0))
    run(replay, 5)
    assert not warned(lambda: replay.save(tmp_path))
    assert state_upstream(replay)['position'] > 0


@needs_torch
def test_pipes_of_torch_that_hold_nothing_are_not_named(tmp_path):
    from torch.utils.data.datapipes.iter import IterableWrapper
    steps = [step for _, step in zip(range(30), Counting())]
    source = IterableWrapper(steps).map(same).filter(always).mux(Counting(1).map(same))
    replay = replay_of(n_steps(source))
    run(replay, 5)
    assert not warned(lambda: replay.save(tmp_path))
    replay = replay_of(Counting().map(same).shuffle(buffer_size=3))
    run(replay, 5)
    [said] = warned(lambda: replay.save(tmp_path/'other'))
    assert said.startswith('ShufflerIterDataPipe: ')


def test_a_state_of_other_pipes_is_refused_and_nothing_changes(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        two, one = replay_of(Turns([Counting(0), Counting(1)])), replay_of(Clip(Counting()))
        for replay in (two, one): run(replay, 9)
        two.save(tmp_path/'two')
        one.save(tmp_path/'one')
    for folder, replay in (('two', one), ('one', two), ('one', replay_of([])), ('two', replay_of(Turns([Counting(0), Mean(Counting(1))])))):
        before = kept(replay), replay.memory.n_added, replay.n_batches
        with refused('upstream', CheckpointError): replay.load(tmp_path/folder)
        assert (kept(replay), replay.memory.n_added, replay.n_batches)==before


def test_a_pipe_in_between_may_be_added_or_left_out(tmp_path):
    replay, other = replay_of(n_steps(Counting())), replay_of(n_steps(Clip(Counting())))
    run(replay, 9)
    replay.save(tmp_path)
    other.load(tmp_path)
    assert kept(other)==kept(replay)!=[('Counting', 0)]


def test_where_a_pipe_fails_to_load_all_stays_as_it_was(tmp_path):
    class Fails(Mean):
        def load_state_dict(self, state): raise OSError('it cannot be loaded')
    def make(kind): return replay_of(Turns([Counting(0), kind(Counting(1))]))
    Fails.__name__ = 'Mean'
    replay, again = make(Mean), make(Fails)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        run(replay, 9)
        replay.save(tmp_path)
    run(again, 3)
    before = kept(again), again.memory.n_added, again.n_batches
    with pytest.raises(OSError, match='cannot be loaded'): again.load(tmp_path)
    assert (kept(again), again.memory.n_added, again.n_batches)==before


def test_a_checkpoint_of_an_older_version_says_that_it_looked_no_further():
    "It had no state of what lies beyond a pipe of a user's own, and no list of the pipes"
    replay, again = replay_of(Clip(n_steps(Counting()))), replay_of(Clip(n_steps(Counting())))
    run(replay, 9)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        state, rows = replay.saved()
    del state['upstream']
    state['waiting'], state['pipe']['source'] = [], None
    [said] = warned(lambda: again.restore(state, rows.pieces()))
    assert 'none of NStep' in said and again.memory.n_added==replay.memory.n_added and kept(again)==[('Counting', 0)]


def test_a_state_of_a_pipe_of_ones_own_from_an_older_version_loads():
    "It was the state of the next pipe alone"
    replay = replay_of(Mean(Clip(Counting())))
    run(replay, 9)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        state = replay.state_dict()
    assert state['source']['pipes']==['Mean', 'Counting']
    state['source'] = dict(total=3.)
    [said] = warned(lambda: replay.load_state_dict(state))
    assert 'none of Counting' in said and sources_of(replay).pipes[0].total==3.


def test_what_is_upstream_is_found_without_pickling_it_and_anew_for_a_new_source():
    class Heavy(Clip):
        def __init__(self, behind):
            super().__init__(behind)
            self.memory, self.seen = Unpicklable(), [behind]*5000        # a list that long holds data
    class Unpicklable:
        def __reduce__(self): raise AssertionError('pickled')
    replay = replay_of(Heavy(Counting()))
    assert sources_of(replay) is sources_of(replay) and [type(o).__name__ for o in sources_of(replay).pipes]==['Counting']
    replay.source_datapipe = Clip(Mean(Counting()))
    assert [type(o).__name__ for o in sources_of(replay).pipes]==['Mean', 'Counting']


def test_a_pipe_that_holds_its_own_replay_ends_nothing():
    clip = Clip(Counting())
    replay = replay_of(clip)
    clip.replay = replay
    assert len(upstream(replay))==3 and sources_of(replay).names()==['Counting']


@pytest.mark.parametrize('num_workers', [0, 1])
def test_beyond_actors(num_workers, tmp_path):
    from fastrl_replay.pipes.actors import Actors
    def make(): return ExperienceReplay(Actors(Clip(GymStepper(['CartPole-v1'], seed=0)), num_workers, ctx='fork', chunk=8), bs=2, max_sz=500, min_sz=8, seed=0)
    replay, again = make(), make()
    run(replay, 60)
    with pytest.warns(UserWarning, match=words('it is named', name='Clip')): replay.save(tmp_path)
    again.load(tmp_path)
    stepper = again.source_datapipe.source_datapipe.behind
    assert (stepper.state_dict()['episodes'][:1] > [[0]])==(num_workers==0)      # those of workers are theirs
    assert again.source_datapipe.state_dict()['n_streams']==replay.source_datapipe.state_dict()['n_streams'] > 0
    for o in (replay, again): o.source_datapipe.close()


def test_hindsight_finds_n_step_beyond_any_pipe():
    from fastrl_replay.pipes.hindsight import HindsightReplay
    with refused('hindsight'): HindsightReplay(Clip(n_steps(Counting())), lambda *_: 0.)


# ---- a memory in shards

def in_shards(source): return RayReplay(source, 0, 2, 1000, min_sz=4, steps_per_batch=None if source is None else 1, seed=0)

def test_a_replay_in_shards_saves_what_is_iterated_beside_it(tmp_path):
    def make(): return in_shards(Clip(Turns([Clip(NStep(Mean(Counting(k)), 3, .5)) for k in (0, 1)])))
    replay = make()
    run(replay, 21)
    counters = [o for o in upstream(replay) if isinstance(o, (Counting, Mean))]
    wanted = [(type(o).__name__, o.n if isinstance(o, Counting) else o.total) for o in counters]
    with pytest.warns(UserWarning, match=words('it is named', name='Clip')): replay.save(tmp_path)
    again = make().load(tmp_path)
    assert kept(again)==wanted and len(wanted)==4 and again.n_batches==21
    run(again, 30)
    rows = again.memory.fetch(range(again.memory.n_added))
    keys = list(zip(rows.env_id.tolist(), rows.episode_n.tolist(), rows.step_n.tolist()))
    assert len(set(keys))==len(keys)
    for e in (0, 1):
        mine = sorted(5*episode + k for env_id, episode, k in keys if env_id==e)
        assert mine==list(range(len(mine))), 'a step was lost'

def test_a_replay_in_shards_refuses_other_pipes_and_changes_nothing(tmp_path):
    replay = in_shards(NStep(Counting(), 3, .5))
    run(replay, 9)
    replay.save(tmp_path)
    for other in (in_shards(Mean(Counting())), in_shards(NStep(NStep(Counting(), 3, .5), 1, .5)), in_shards(None), in_shards(NStep(Counting(), 2, .5))):
        with pytest.raises((CheckpointError, ValueError)): other.load(tmp_path)
        assert other.n_batches==0 and other.memory.n_added==0 and all(n==0 for _, n in kept(other))
