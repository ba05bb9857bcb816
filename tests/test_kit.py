"""Everything that the kit is about passes it: every memory in each form of storage, every sampler, every storage, every pipe.

A new one is a line here. What is known to differ from the contract stands in `KNOWN`, until it is mended."""
import ast
import inspect

import numpy as np
import pytest
from torch import nn

from fastrl_replay.all import (
    ERE, LAP, Actors, AgeWeighted, Combined, DeviceMemory, Episodes, ExperienceReplay, GymStepper, HindsightReplay, LinearSchedule,
    MixedMemory, Normalized, NStep, PrioritizedReplay, Proportional, RankBased, RankReplay, RayActors, RayReplay, ReplayMemory,
    SequenceReplay, SimpleStep, Uniform)
from fastrl_replay.pipes.normalized import Statistics
from fastrl_replay.protocol import Memory, members
from fastrl_replay.ray import RayMemory
from fastrl_replay.steps import Layout
from fastrl_replay.storage.base import Storage
from fastrl_replay.storage.choice import storage_for
from fastrl_replay.testing import LACKS, LAWS, check_memory, check_pipe, check_sampler, check_storage
from naive_storage import NaiveStorage
from test_sampler_faults import Own

pytestmark = [pytest.mark.filterwarnings('ignore:device. on a CPU', 'ignore:.*use of fork'), pytest.mark.usefixtures('quick')]

# name → what differs; strict, so that what has been mended is noticed
KNOWN: dict[str, str] = dict(ray_actors='it has no state_dict')


def params(table):
    "One of `pytest.param` for each name; those in `KNOWN` have to fail"
    return [pytest.param(v, id=k, marks=[pytest.mark.xfail(reason=o, strict=True) for o in [KNOWN.get(k)] if o]) for k, v in table.items()]


# --- samplers
SAMPLERS = dict(
    uniform=Uniform, repeating=lambda: Uniform(True), proportional=Proportional, scheduled=lambda: Proportional(beta=LinearSchedule(.4, 1., 9)),
    by_memory=lambda: Proportional(1., .7, 0., 'memory'), rank=RankBased, lap=LAP, combined=Combined, ere=lambda: ERE(.99, 5, 7),
    aged=lambda: AgeWeighted(9, .2), own=Own)

@pytest.mark.parametrize('make', params(SAMPLERS))
def test_every_sampler(make):
    found = check_sampler(make)
    assert sum(found.values()) > 250 and found['probabilities']==3 and min(found.values()) > 2


# --- memories
def ram(sampler, **options): return lambda max_sz, step, folder: ReplayMemory(max_sz, sampler(), step=step, seed=0, **options)
def on_disk(sampler, **options): return lambda max_sz, step, folder: ReplayMemory(max_sz, sampler(), step=step, seed=0, path=folder, **options)

def on_device(sampler, **options):
    return lambda max_sz, step, folder: DeviceMemory(max_sz, sampler(), device='cpu', compile=False, n_envs=1, max_ends=max_sz, seed=0, **options)

def mixed(max_sz, step, folder):
    "One that is drawn from, and one that is not"
    other = ReplayMemory(9, Proportional(), seed=1)
    other.extend([step]*3)
    return MixedMemory([ReplayMemory(max_sz, Proportional(), step=step, dedup='frames', seed=2), other], shares=(1., 0.), seed=0)

MEMORIES = dict(
    records=ram(Proportional, dedup=None), frames=ram(RankBased, dedup='frames'), next_state=ram(Uniform, dedup='next_state'),
    lz4=ram(lambda: AgeWeighted(5), dedup='frames', codec='lz4'), unknown_first_step=lambda n, step, folder: ReplayMemory(n, LAP(), seed=0),
    own_sampler=ram(Own), disk=on_disk(lambda: Proportional(normalize='memory')), disk_frames=on_disk(RankBased, dedup='frames'),
    mixed=mixed, ray=lambda n, step, folder: RayMemory(0, n, Proportional(), step=step, seed=0),
    device=on_device(Proportional), device_uniform=on_device(Uniform), device_in_full=on_device(lambda: AgeWeighted(5), next_of=None))

@pytest.mark.parametrize('make', params(MEMORIES))
def test_every_memory(make):
    found = check_memory(make)
    assert {'add', 'extend', 'sample', 'update_priorities', 'next', 'episode', 'save'} <= {*found} and min(found.values()) > 2


# --- storages
STORAGES = dict(naive=lambda n, step, folder: NaiveStorage(n, Layout.of(step))) | {
    str(dedup): lambda n, step, folder, dedup=dedup: storage_for(Layout.of(step), n, dedup=dedup) for dedup in (None, 'frames', 'next_state')}

@pytest.mark.parametrize('make', params(STORAGES))
def test_every_storage(make):
    found = check_storage(make)
    assert {'zeros', 'next', 'sample', 'correct', 'save', 'state_dict'} <= {*found}


def test_storages_have_what_the_protocol_names_and_it_is_small():
    names = {o for o in (*vars(Storage), *Storage.__annotations__) if not o.startswith('_')}
    assert len(names) <= 17
    layout = Layout.of(SimpleStep(0., 0, 0.))
    for o in (storage_for(layout, 5), NaiveStorage(5, layout)):
        for name in names: assert hasattr(o, name), name
    assert len(inspect.getsource(inspect.getmodule(NaiveStorage)).splitlines()) <= 100


@pytest.mark.xfail(strict=True, reason='an interrupt between the lines of Ring.write leaves its counters apart, as the page of what works where says')
def test_a_memory_on_a_device_survives_an_interrupt(monkeypatch):
    "The one thing of the kit that it is spared"
    monkeypatch.setitem(LACKS, 'DeviceMemory', LACKS['DeviceMemory'].replace('Ctrl', ''))
    check_memory(MEMORIES['device'])


# --- pipes
class Goals:
    "The same items, with goals in their states"
    def __init__(self, items): self.items = items
    def __iter__(self):
        for item in self.items:
            if isinstance(item, SimpleStep): yield goal(item)
            else: yield [goal(o) for o in item]
    def state_dict(self): return self.items.state_dict()
    def load_state_dict(self, state): self.items.load_state_dict(state)

def goal(step):
    def seen(frames): return dict(observation=frames, achieved_goal=frames[0].astype(np.float32), desired_goal=frames[1].astype(np.float32))
    return step._replace(state=seen(step.state), next_state=seen(step.next_state))

def reward(achieved, desired, info): return (achieved==desired).all((1, 2)).astype(np.float32)

def summed(episode): return dict(total_reward=episode.reward.cumsum(0))

def replay(kind, **options): return lambda source: kind(source, bs=4, max_sz=30, seed=0, steps_per_batch=3, **options)

PIPES = dict(
    n_step=lambda source: NStep(source, n=3, gamma=.9), replay=replay(ExperienceReplay, min_sz=9), prioritized=replay(PrioritizedReplay),
    rank=replay(RankReplay), sequences=replay(SequenceReplay, length=3), actors=lambda source: Actors(source, 0, chunk=4),
    statistics=lambda source: Statistics(source, Normalized(nn.Flatten())),
    hindsight=lambda source: replay(HindsightReplay, compute_reward=reward)(Goals(source)), ray_actors=lambda source: RayActors(source, 0, chunk=4))
NOT_EXACT = dict(       # environments are not saved, nor is what lies before a memory of shards
    gym=lambda source: GymStepper(['CartPole-v1'], seed=0), ray=replay(RayReplay, shards=0),
    whole=lambda source: ExperienceReplay(NStep(source, n=3, gamma=.9), bs=4, max_sz=30, seed=0),
    episodes=Episodes, labelled=lambda source: Episodes(source, summed))

# Each starts a worker, which imports torch: three are enough for who has just changed something
QUICK = ['n_step', 'prioritized', 'whole']

@pytest.mark.parametrize('name', QUICK)
def test_a_pipe_with_a_memory_and_one_without(name):
    if name in NOT_EXACT: assert check_pipe(NOT_EXACT[name], exact=False)['loops']==1
    else: assert check_pipe(PIPES[name])=={'loops': 1, 'copies': 1, 'states': 1}

@pytest.mark.parametrize('make', params({k: v for k, v in PIPES.items() if k not in QUICK}))
def test_every_pipe(make): assert check_pipe(make)=={'loops': 1, 'copies': 1, 'states': 1}

@pytest.mark.parametrize('make', params({k: v for k, v in NOT_EXACT.items() if k not in QUICK}))
def test_every_pipe_that_starts_over(make): assert check_pipe(make, exact=False)['loops']==1


# --- the kit itself
def test_it_is_imported_by_nobody_and_stays_small(root):
    for path in (root/'fastrl_replay').rglob('*.py'):
        if path.name in ('_modidx.py', 'testing.py'): continue
        text = path.read_text(encoding='utf-8')
        for node in ast.walk(ast.parse(text)) if 'testing' in text else ():
            names = [node.module or ''] + [o.name for o in node.names] if isinstance(node, ast.ImportFrom) else []
            assert not any('testing' in o.split('.') for o in names), path
    lines = (root/'fastrl_replay'/'testing.py').read_text(encoding='utf-8').split('# %% ../nbs')[1:]
    assert sum(bool(line.strip()) for cell in lines for line in cell.splitlines()[1:]) <= 602


def test_there_is_a_law_for_each_sampler_and_a_word_for_each_memory():
    from fastrl_replay.samplers.own import KINDS
    assert {*LAWS}=={*KINDS} - {'SequenceSampler'}           # which draws no rows
    for kind in (ReplayMemory, RayMemory, MixedMemory, DeviceMemory): assert kind.__name__ in LACKS


def test_a_memory_of_an_unknown_kind_is_asked_for_what_the_protocol_names():
    class Other:
        def __init__(self, n, step): self.own = ReplayMemory(n, step=step, seed=0)
        def __getattr__(self, name):
            if name in members(Memory) or name=='check_valid': return getattr(self.own, name)
            raise AttributeError(name)
        def __len__(self): return len(self.own)
        def __bool__(self): return True
    found = check_memory(lambda n, step, folder: Other(n, step))
    assert {'add', 'extend', 'sample', 'next', 'episode'} <= {*found} and not {'save', 'drop', 'windows', 'correct', 'Ctrl'} & {*found}
