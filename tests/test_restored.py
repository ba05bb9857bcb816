"""What was saved with one set of options is restored by a memory with another: in every form, by one rule.

Refused by name, before anything changes: what the memory is. Restored as it was saved, with one warning: what may be set at any time."""
import warnings

import numpy as np
import pytest

import restoring

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.memory.options import Options
from fastrl_replay.mixed import MixedMemory
from fastrl_replay.ray import RayMemory
from fastrl_replay.ray.replay import RayReplay
from fastrl_replay.samplers.age import AgeWeighted
from fastrl_replay.samplers.more import ERE
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.schedules import LinearSchedule
from fastrl_replay.steps import Transition
from fastrl_replay.storage.sequence_sampler import Sequence
from harness import seen
from restoring import by_pipe, by_restore, made_by, said
from refusals import about, refused
from words import words


def step(k): return Transition(np.full((2, 20, 20), k % 250, np.uint8), k % 3, float(k), np.full((2, 20, 20), (k + 1) % 250, np.uint8), k % 9==8, False)

def filled(n=30, max_sz=20, sampler=None, **options):
    memory = ReplayMemory(max_sz, sampler, seed=1, **options)
    memory.extend([step(k) for k in range(n)])
    return memory

# Each form of a state: it goes from one memory into another that was made before
def by_dict(a, b, folder): b.load_state_dict(a.state_dict())
def by_mixture(a, b, folder):
    "The first of the two members fits"
    def mixed(memory): return MixedMemory([filled(), memory], seed=3)
    mixed(a).save(folder)
    state, rows = mixed(a).saved()
    mixed(b).restore(state, rows.pieces())

FORMS = dict(dict=by_dict, restore=by_restore, pipe=by_pipe, mixture=by_mixture)


def now(memory):
    assert memory.check_valid()
    return seen(memory.state_dict())

def stays(move, saved, here, argument, folder): restoring.stays(move, saved, here, argument, folder, now)

OTHERS = dict(
    size=(dict(max_sz=20), dict(max_sz=21), 'max_sz'),
    kind=(dict(sampler=Proportional), dict(sampler=Uniform), 'sampler.kind'),
    draws=(dict(max_draws=3), dict(), 'max_draws'),
    no_draws=(dict(), dict(max_draws=3), 'max_draws'),
    other_draws=(dict(max_draws=2), dict(max_draws=3), 'max_draws'),
    dedup=(dict(dedup='frames'), dict(dedup='next_state'), 'dedup'),
    plain=(dict(dedup=None), dict(dedup='next_state'), 'dedup'),
    told=(dict(sampler=Proportional), dict(sampler=lambda: Proportional(eps=.5)), 'sampler.options.eps'),
    told_twice=(dict(sampler=lambda: Proportional(normalize='memory', eps=.2)), dict(sampler=lambda: Proportional(eps=.5)), 'sampler.options.eps'),
    horizon=(dict(sampler=lambda: AgeWeighted(30)), dict(sampler=lambda: AgeWeighted(31)), 'sampler.options.horizon'),
    eta=(dict(sampler=lambda: ERE(.99)), dict(sampler=lambda: ERE(.9)), 'sampler.options.eta'))

@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('other', OTHERS)
def test_another_memory_is_refused_by_name_before_anything_changes(form, other, tmp_path):
    saved, here, named = OTHERS[other]
    stays(FORMS[form], made_by(filled, saved, 30), made_by(filled, here, 25), named, tmp_path)


@pytest.mark.parametrize('form', ['dict', 'restore', 'pipe'])
def test_other_sequences_are_refused_by_name(form, tmp_path):
    here = filled(25, sequence=Sequence(4, 1))
    stays(FORMS[form], filled(sequence=Sequence(4)), here, 'sampler.options.sequence.burn_in', tmp_path)
    stays(FORMS[form], filled(), here, 'sampler.kind', tmp_path/'rows')


@pytest.mark.parametrize('form', FORMS)
def test_what_may_be_set_at_any_time_is_restored_and_told_once(form, tmp_path):
    saved = filled(sampler=Proportional(alpha=.7, eps=.01, beta=LinearSchedule(.4, 1., 9)), windows={'reward': (-1, 0)})
    saved.sampler.alpha = .9
    here = filled(25, sampler=Proportional(alpha=.3), windows={'action': (0, 1)})
    [text] = said(FORMS[form], saved, here, tmp_path)
    for name in ('sampler.options.alpha: 0.9, not 0.3', 'sampler.options.beta', 'sampler.options.eps: 0.01', 'windows.reward', 'windows.action'): assert name in text
    assert here.sampler.alpha==.9 and here.sampler.eps==.01 and here.sampler.beta==LinearSchedule(.4, 1., 9)
    assert here.windows=={'reward': (-1, 0)} and here.sample(3).reward.shape==(3, 2)
    assert said(FORMS[form], saved, here, tmp_path/'again')==[]          # now they agree


@pytest.mark.parametrize('form', FORMS)
def test_a_memory_that_was_told_nothing_takes_what_was_saved(form, tmp_path):
    saved, here = filled(windows={'reward': (-1, 0)}), filled(25)
    assert said(FORMS[form], saved, here, tmp_path)==[] and here.windows==saved.windows
    with pytest.warns(UserWarning, match=words('it goes on', name='windows', saved=None, here={'reward': [-1, 0]})): FORMS[form](filled(), here, tmp_path/'b')
    assert here.windows is None


# --- a folder ---------------------------------------------------------------------------------------------------------
def test_a_folder_keeps_what_was_set(tmp_path):
    "None means the folder's own, as they were set last"
    filled(sampler=Proportional(alpha=.7), path=tmp_path/'m', windows={'reward': (0, 1)}).close()
    with ReplayMemory.open(tmp_path/'m') as memory: memory.sampler.alpha, memory.sampler.beta, memory.windows = .2, .9, {'action': (0, 1)}
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for make in (lambda: ReplayMemory.open(tmp_path/'m'), lambda: ReplayMemory(20, path=tmp_path/'m'),
                     lambda: ReplayMemory(20, Proportional(alpha=.2, beta=.9), path=tmp_path/'m')):
            with make() as again: assert (again.sampler.alpha, again.sampler.beta, again.windows)==(.2, .9, {'action': (0, 1)}) and again.check_valid()
    for options, named in ((dict(sampler=Proportional(alpha=.5, beta=.9)), words('the folder has', name='sampler.options.alpha', its=.2, own=.5)), (dict(max_draws=3), 'max_draws')):
        with about(named): ReplayMemory(20, path=tmp_path/'m', **options)
    with pytest.warns(UserWarning, match=words('it goes on', name='windows.reward', saved=None, here=[0, 1])) as found, ReplayMemory(20, path=tmp_path/'m', windows={'reward': (0, 1)}) as again:
        assert again.windows=={'action': (0, 1)} and len(found)==1


@pytest.mark.parametrize('other', ['size', 'kind', 'draws', 'other_draws', 'told', 'dedup'])
def test_a_folder_refuses_another_state_and_stays_as_it_was(other, tmp_path):
    saved, here, named = OTHERS[other]
    def made(options, n, **more):
        options = dict(options)
        sampler = options.pop('sampler', None)
        return filled(n, sampler=sampler and sampler(), **options, **more)
    with made(here, 25, path=tmp_path/'m') as memory: stays(by_dict, made(saved, 30), memory, named, tmp_path)
    with ReplayMemory.open(tmp_path/'m') as again: assert again.n_added==25 and again.check_valid()


# --- pipes and shards -------------------------------------------------------------------------------------------------

def sharded(sampler=None, n=30, max_sz=20, shards=2, **options):
    memory = RayMemory(shards, max_sz, sampler, seed=1, place='here', **options)
    for k in range(0, n, 5): memory.extend([step(i) for i in range(k, k + 5)])
    return memory

def held(memory): return [seen(o.handle.shard.memory.state_dict()) for o in memory.shards.places]

@pytest.mark.parametrize('other', [dict(sampler=Uniform()), dict(sampler=Proportional(eps=.3)), dict(sampler=Proportional(), dedup=None)], ids=['kind', 'told', 'dedup'])
@pytest.mark.parametrize('shards', [0, 2])
def test_shards_refuse_another_memory_before_one_of_them_changes(other, shards, tmp_path):
    saved, here = sharded(Proportional(), shards=shards, dedup='next_state'), sharded(n=25, shards=shards, **dict(dedup='next_state') | other)
    saved.save(tmp_path)
    before = held(here)
    named = r'sampler\.kind|sampler\.options\.eps|dedup'
    with pytest.raises(ValueError, match=named): here.restore(tmp_path)
    assert held(here)==before and here.check_valid()
    for o in saved, here: o.close()


def test_a_ray_replay_compares_before_it_replaces(tmp_path):
    "What a memory alone has saved has no counters of a pipe: it used to fail after the rows were replaced"
    def replay(sampler=None, bs=4): return RayReplay([step(k) for k in range(30)], 0, bs, 20, sampler=sampler, seed=1, min_sz=8)
    first, here = replay(Proportional()), replay(Proportional(), 6)
    for o, n in ((first, 5), (here, 3)):
        for _ in zip(range(n), o): pass
    first.save(tmp_path/'whole')
    first.memory.save(tmp_path/'alone')
    before, n_batches = held(here.memory), here.n_batches
    with refused('folder', expected='what a RayReplay saved', got='what a RayMemory saved'): here.load(tmp_path/'alone')
    other = replay(Proportional(eps=.4))
    next(iter(other))
    others = held(other.memory)
    with refused('sampler.options.eps'): other.load(tmp_path/'whole')
    assert held(here.memory)==before and here.n_batches==n_batches and held(other.memory)==others
    with pytest.warns(UserWarning, match=words('another bs', saved=4, here=6)): here.load(tmp_path/'whole')
    assert here.bs==4 and here.n_batches==first.n_batches and held(here.memory)==held(first.memory)
    for o in first, here, other: o.close()


# --- the part itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('forged, argument, got', [
    (dict(windows=3), 'windows', 'int 3'), (dict(windows={'reward': 'x'}), "windows['reward']", "str 'x'"), (dict(windows={'reward': []}), "windows['reward']", '[]'),
    (dict(max_draws=0), 'max_draws', '0'), (dict(max_draws='a'), 'max_draws', "'a'"), (dict(max_sz=-1), 'max_sz', '-1'), (dict(sampler=4), 'state', 'int 4'),
    (dict(sampler=dict(kind='Uniform')), 'state', None), (dict(sampler=dict(kind='Uniform', options=[])), 'state', 'list []')])
def test_forged_options_are_named(forged, argument, got):
    with refused(argument, (TypeError, ValueError), got=got): Options.from_plain(filled()._parts.options().to_plain() | forged)
