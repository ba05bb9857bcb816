"""Memories saved and loaded: every kind of step and sampler, what a second save writes, damage, strangers. The format by itself: test_saving_format."""
from typing import Any, NamedTuple

import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.age import AgeWeighted
from fastrl_replay.samplers.more import ERE, LAP, Combined
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.storage.sequence_sampler import Sequence, SequenceSampler
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.saving import CheckpointError, SavedState, save_state
from fastrl_replay.schedules import LinearSchedule
from fastrl_replay.steps import SimpleStep
from harness import check_resume, seen
from hostile import attack, forge, no_pickle, setter
from test_harness import Own, memory_of, use
from twins import KINDS, stacked
from refusals import refused
from words import WORDS, words

MORE = dict(replacing=lambda: Uniform(True), scheduled=lambda: Proportional(.9, LinearSchedule(.4, 1., 30), .01, 'memory'), rank=RankBased, lap=LAP, combined=Combined, ere=lambda: ERE(c_min=5, period=7), aged=lambda: AgeWeighted(9, .2),
                       falling=lambda: RankBased(.5, LinearSchedule(1., 0., 9)))


def files_of(folder): return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.fixture
def fresh_folder(tmp_path):
    count = iter(range(10**6))
    return lambda: tmp_path/f'folder{next(count)}'


@pytest.fixture
def by_files(fresh_folder):
    "Save and load by folders, for the harness: what travels is what comes out of them"
    def save(memory):
        folder = fresh_folder()
        memory.save(folder)
        with SavedState(folder, 'memory') as saved: return dict(state=saved.state()['memory'], pieces=list(saved.pieces()))
    def load(memory, found): memory.restore(found['state'], found['pieces'])
    return dict(save=save, load=load, through=lambda found: found)


@pytest.mark.parametrize('sampler', MORE)
def test_a_memory_goes_on_exactly(sampler, by_files): check_resume(memory_of('simple', MORE[sampler]), use, **by_files)

@pytest.mark.parametrize('kind', [o for o in KINDS if o!='simple'])
def test_a_memory_of_any_kind_of_step_goes_on_exactly(kind, by_files):
    check_resume(memory_of(kind, Proportional), use, steps=(9,), **by_files)


@pytest.mark.parametrize('sampler', MORE)
def test_load_makes_the_memory(sampler, tmp_path):
    "Sampler, schedule, step type and options come out of the folder; the batches are the same, of the original too"
    memory = memory_of('simple', MORE[sampler])()
    use(memory, 12)
    memory.save(tmp_path)
    again = ReplayMemory.load(tmp_path)
    assert repr(again)==repr(memory) and again.recent(1).step_type is SimpleStep and again.check_valid()
    again.make = memory.make
    assert seen(use(again, 9))==seen(use(memory, 9))


def test_what_is_of_the_users_own_is_handed_in(tmp_path):
    memory = memory_of('nested', Own)()
    use(memory, 5)
    memory.save(tmp_path)
    with refused('sampler'): ReplayMemory.load(tmp_path)
    step = memory[0]
    again = ReplayMemory.load(tmp_path, sampler=Own(), step=step)
    assert type(again[0]) is type(step) and seen(again[0])==seen(step)
    like = ReplayMemory.load(tmp_path, sampler=Own())[0]
    assert type(like) is not type(step) and (type(like).__name__, like._fields)==(type(step).__name__, step._fields)

    memory = ReplayMemory(9, Proportional(beta=lambda k: .5))
    memory.save(tmp_path)
    with pytest.raises(ValueError, match=WORDS['a schedule of others']): ReplayMemory.load(tmp_path)
    assert ReplayMemory.load(tmp_path, sampler=Proportional(beta=lambda k: .5)).sampler.beta(3)==.5


def half(k): return .5
def third(k): return .3


@pytest.mark.parametrize('saved,given,named', [
    (Proportional, lambda: Proportional(alpha=.9), ('alpha', '0.6, got 0.9')),
    (Proportional, lambda: Proportional(beta=LinearSchedule(.4, 1., 30)), ('beta', '')),
    (Proportional, lambda: Proportional(beta=half), ('beta', '')),
    (lambda: Proportional(beta=half), lambda: Proportional(beta=third), ('beta.name', "'half', got 'third'")),
    (lambda: Proportional(.9, LinearSchedule(.4, 1., 30), .01, 'memory'), lambda: Proportional(.9, LinearSchedule(.4, .9, 30), .01, 'memory'), ('beta.end', '')),
    (RankBased, lambda: RankBased(beta=.6), ('beta', '0.5, got 0.6')), (Uniform, lambda: Uniform(True), ('replace', '')),
    (lambda: SequenceSampler(Sequence(3), Proportional()), lambda: SequenceSampler(Sequence(3, 1), Proportional()), ('sequence.burn_in', '0')),
    (lambda: SequenceSampler(Sequence(3), Proportional()), lambda: SequenceSampler(Sequence(3), Proportional(.9)), ('sampler.options.alpha', '')),
    (Own, lambda: Other(), ('name', "'Own', got 'Other'"))])
def test_options_of_a_sampler_that_differ_are_refused_by_name(saved, given, named, tmp_path):
    "The saved ones were kept without a word: `alpha=.9` drew with .6. A memory with a path refuses the same"
    memory = ReplayMemory(20, saved(), seed=0)
    memory.extend([KINDS['transition'](np.random.default_rng(k), {}) for k in range(25)])
    memory.save(tmp_path)
    name, values = named
    with pytest.raises(ValueError, match=words('another option', name=name, values=values)): ReplayMemory.load(tmp_path, sampler=given())
    again = ReplayMemory.load(tmp_path, sampler=saved())
    assert seen(again.state_dict())==seen(memory.state_dict())
    again.save(tmp_path/'again')                                    # and what is loaded is what was saved
    assert ReplayMemory.load(tmp_path/'again', sampler=saved()).n_added==memory.n_added


class Other(Own): "Not the class that was saved"


# --- what is new ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('sampler', [Uniform, Proportional, RankBased])
def test_a_second_save_writes_what_is_new(sampler, tmp_path):
    memory, rng, n = ReplayMemory(200_000, sampler(), seed=0), np.random.default_rng(0), 200_000
    chunk = stacked([KINDS['transition'](rng, {}) for _ in range(1000)])
    for _ in range(210): memory.extend(chunk)
    memory.update_priorities(np.arange(10_000, 210_000), rng.random(n))
    first = memory.save(tmp_path)
    rest = sum(a.nbytes for a in memory.sampler.get_state().values() if isinstance(a, np.ndarray)) + 20_000
    assert memory.save(tmp_path) < rest
    for _ in range(2): memory.extend(chunk)
    memory.update_priorities(rng.choice(np.arange(memory.first_id, memory.n_added), 2000, replace=False), rng.random(2000))
    assert memory.save(tmp_path) < first/60 + rest
    again = ReplayMemory.load(tmp_path)
    assert seen(again.state_dict())==seen(memory.state_dict())
    again.extend(chunk)
    assert again.save(tmp_path) < first/60 + rest, 'one that was loaded goes on where the other stopped'
    assert seen(ReplayMemory.load(tmp_path).state_dict())==seen(again.state_dict())


# --- damage -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope='module')
def bytes_saved_twice(tmp_path_factory):
    memory, folder = memory_of('simple', Proportional, 500)(), tmp_path_factory.mktemp('twice')
    use(memory, 40)
    memory.extend([memory.make(np.random.default_rng(k), {}) for k in range(400)])
    memory.save(folder)
    memory.update_priorities([memory.first_id + 5, memory.n_added - 7], [3., 4.])
    use(memory, 5)
    memory.save(folder)
    return files_of(folder)

@pytest.fixture
def saved_twice(bytes_saved_twice, tmp_path):
    folder = tmp_path/'saved'
    folder.mkdir()
    for name, data in bytes_saved_twice.items(): (folder/name).write_bytes(data)
    return folder


def not_loaded(folder, error=CheckpointError):
    "Loading fails, and a memory that was to take the state is as it was"
    with pytest.raises(error): ReplayMemory.load(folder)
    victim = memory_of('simple', Proportional, 500)()
    use(victim, 3)
    before = seen(victim.state_dict())
    with pytest.raises(error):
        with SavedState(folder, 'memory') as saved, saved.sense('a memory'): victim.restore(saved.state()['memory'], saved.pieces())
    assert seen(victim.state_dict())==before and victim.check_valid()


# --- strangers --------------------------------------------------------------------------------------------------------
MEMORY, ROWS = ('state', 'plain', 'memory'), ('pieces', 0, 'plain')
FORGERIES = dict(
    code_as_shape=setter(*ROWS, 'layout', 'leaves', 0, 1, value=['1) or __import__("os").abort() or (1']),
    objects=setter(*ROWS, 'layout', 'leaves', 0, 0, value='|O'),
    no_field=setter(*ROWS, 'layout', 'fields', 0, value='x=print(1)'),
    no_name=setter(*ROWS, 'layout', 'name', value='A:\n import os'),
    leaf_twice=setter(*ROWS, 'layout', 'trees', 0, value=1),
    too_full=setter(*ROWS, 'n_added', value=2**70),
    backwards=setter(*ROWS, 'n_added', value=-4),
    early=setter(*ROWS, 'since', value=-4),
    no_rows=setter(*ROWS, 'records', value=None),
    wide_rows=setter(*ROWS, 'layout', 'leaves', 0, 1, value=[4, 4]),
    huge=setter(*MEMORY, 'max_sz', value=2**40),
    huge_but_possible=setter(*MEMORY, 'max_sz', value=2**31 - 1),
    unknown_sampler=setter(*MEMORY, 'sampler', 'kind', value='os.system'),
    size=setter(*MEMORY, 'sampler', 'size', value=4999),
    no_sampler=setter(*MEMORY, 'sampler', value=3),
    random=setter(*MEMORY, 'rng', value=[1, 2]),
    nothing=setter('state', 'plain', value={}),
    a_list=setter('state', 'plain', value=[1]),
    no_manifest=lambda manifest: manifest.clear(),
)

@pytest.mark.parametrize('forgery', FORGERIES)
def test_a_strangers_manifest_is_refused(saved_twice, forgery, monkeypatch):
    "Whole by its checksums, and asking for what it should not have"
    forge(saved_twice, FORGERIES[forgery])
    no_pickle(monkeypatch)
    not_loaded(saved_twice, ValueError)


@pytest.mark.parametrize('field,wrong,match', [
    ('births', lambda a: np.zeros_like(a), WORDS['an insertion number']), ('births', lambda a: np.where(a==a[-1], a[0], a), WORDS['an insertion number']),
    ('births', lambda a: -1 - a, 'birth'), ('births', lambda a: a + 10**9, 'birth'),
    ('priorities', lambda a: -a, 'priorities'), ('largest', lambda a: -1., 'largest'), ('largest', lambda a: float('nan'), 'largest'),
    ('born', lambda a: -3, 'born'), ('born', lambda a: 2**63 - 1, 'born'), ('options', lambda a: dict(a, alpha=float('nan')), 'alpha'),
    ('size', lambda a: 2**40, 'size')])
def test_a_strangers_ranks_are_refused_or_made_anew(field, wrong, match, tmp_path):
    "Kernels walk along them without looking: what could lead them astray never gets there"
    memory = memory_of('simple', RankBased)()
    use(memory, 12)
    state, rows = memory.saved()
    state['sampler'] = dict(memory.sampler.get_state(), priorities=np.ones(memory.sampler.size)) if field=='births' else memory.sampler.get_state()
    state['sampler'][field] = wrong(state['sampler'][field])
    save_state(tmp_path, dict(memory=state), 'memory', rows)
    if match is not None:
        with pytest.raises(ValueError, match=match): ReplayMemory.load(tmp_path)
        return
    again = ReplayMemory.load(tmp_path)
    assert again.check_valid() and (again.sampler.ranks==memory.sampler.ranks).all()


class Stacks(NamedTuple):
    state: Any
    action: int
    next_state: Any
    env_id: int
    terminated: bool
    truncated: bool

def stacks(rng, world):
    "A stack of four frames and the next, for one of two environments"
    e = int(rng.integers(2))
    k = world[e] = world.get(e, 0) + 1
    frames = [np.full((20, 20), (i*7 + e) % 256, np.uint8) for i in range(k, k + 5)]
    return Stacks(np.stack(frames[:4]), k, np.stack(frames[1:]), e, k % 9==0, False)

@pytest.mark.parametrize('kind,sampler', [('simple', Proportional), ('nested', RankBased), ('stacks', Proportional)])
def test_mutants_of_a_memory(kind, sampler, tmp_path, request):
    "What loads can be used and checked; the rest is refused by name; nothing ends the process. More with `--mutants N`"
    origin, work = tmp_path/'origin', tmp_path/'work'
    work.mkdir()
    memory = ReplayMemory(60, sampler(), dedup='frames' if kind=='stacks' else 'auto', seed=3)
    memory.make = stacks if kind=='stacks' else KINDS[kind]
    use(memory, 30)
    memory.save(origin)
    use(memory, 20)
    memory.save(origin)
    def load(folder):
        again = ReplayMemory.load(folder)
        if len(again)==0: return
        try: again.check_valid()
        except AssertionError as e: raise CheckpointError(str(e)) from e      # it is noticed
        batch = again.sample(8)
        batch.update_priorities(np.ones(8))
        again.extend([again[k] for k in range(min(70, len(again)))])
        again.episode(again.n_added - 1)
        again.fetch(np.arange(again.first_id, again.n_added))
    load(origin)
    n = -(-request.config.getoption('--mutants')//3)
    counts = attack(origin, load, n, work, (CheckpointError, ValueError))
    assert counts['refused'] > n//2, f'hardly a mutant was one: {counts}'
