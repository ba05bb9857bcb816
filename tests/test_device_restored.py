"""What a device restores: the options that were saved with the rows, by the rule of all memories.

Refused by name, before anything changes: what the memory is, and what no device has. Restored as it was saved, with one warning: alpha, beta."""

import numpy as np
import pytest
import torch

import restoring
from fastrl_replay.batch import Batch
from fastrl_replay.memory import DeviceMemory, ReplayMemory
from fastrl_replay.mixed import MixedMemory
from fastrl_replay.samplers.age import AgeWeighted
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.schedules import LinearSchedule
from fastrl_replay.steps import Transition
from fastrl_replay.storage.sequence_sampler import Sequence
from harness import seen
from restoring import by_pipe, by_restore, made_by, said
from words import WORDS

pytestmark = pytest.mark.filterwarnings('ignore:device')


def rows(a, n, k=4):
    "`n` time steps of `k` streams, from number `a` on"
    t = torch.arange(a, a + n).repeat_interleave(k).float()
    return Transition(t[:, None], t.long() % 3, t, t[:, None] + 1, t.long() % 9==8, torch.zeros(len(t), dtype=torch.bool))

def filled(n=12, sampler=None, **options):
    memory = DeviceMemory(64, sampler, device='cpu', n_envs=4, seed=1, max_ends=32, **options)
    memory.extend(rows(0, n))
    if memory.sampler.prioritized and memory.sequence is None:
        memory.update_priorities(np.arange(len(memory)), np.random.default_rng(0).random(len(memory))*3)
    return memory

def on_host(sampler=None, **options):
    memory = ReplayMemory(64, sampler, seed=1, **options)
    for t in range(12): memory.extend(Batch.of(Transition(*(o.numpy() for o in rows(t, 1)))))
    return memory

def by_mixture(a, b, folder):
    "The first of the two members fits"
    state, pieces = MixedMemory([on_host(), a], seed=3).saved()
    MixedMemory([on_host(), b], seed=3).restore(state, pieces.pieces())

FORMS = dict(restore=by_restore, pipe=by_pipe, mixture=by_mixture)

def each(cases):
    "Each form with each case; rows and sequences are never in one mixture"
    return [(form, case) for form in FORMS for case in cases if form!='mixture' or 'sequence' not in case]


def now(memory):
    state, pieces = memory.saved()
    return seen(dict(state=state, pieces=[*pieces.pieces()])), memory.sampler.leaves.clone().tolist()

def stays(move, saved, here, what, folder): restoring.stays(move, saved, here, what, folder, now, ignored='device')

OTHERS = dict(
    kind=(dict(sampler=Proportional), dict(sampler=lambda: Uniform(True)), 'sampler.kind'),
    eps=(dict(sampler=Proportional), dict(sampler=lambda: Proportional(eps=.5)), 'sampler.options.eps'),
    horizon=(dict(sampler=lambda: AgeWeighted(30)), dict(sampler=lambda: AgeWeighted(31)), 'sampler.options.horizon'),
    replace=(dict(sampler=Uniform), dict(sampler=lambda: Uniform(True)), 'sampler.options.replace'),
    n_step=(dict(n_step=3), dict(), 'n_step'),
    gamma=(dict(n_step=3, gamma=.9), dict(n_step=3, gamma=.99), 'gamma'),
    sequence=(dict(sequence=Sequence(4)), dict(sequence=Sequence(3)), 'sequence.length'),
    no_sequence=(dict(sequence=Sequence(4)), dict(), 'sequence'),
    dtypes=(dict(), dict(dtypes=dict(state=torch.bfloat16)), 'dtypes.state'))

@pytest.mark.parametrize('form,other', each(OTHERS))
def test_another_memory_is_refused_by_name_before_anything_changes(form, other, tmp_path):
    saved, here, named = OTHERS[other]
    stays(FORMS[form], made_by(filled, saved, 12), made_by(filled, here, 9), named, tmp_path)


HOSTS = dict(
    windows=(lambda: on_host(windows={'reward': (-1, 0)}), 'windows'),
    max_draws=(lambda: on_host(max_draws=3), 'max_draws'),
    sequence=(lambda: on_host(sequence=Sequence(3)), 'sampler.kind'),
    normalize=(lambda: on_host(Proportional(normalize='memory')), 'normalize'),
    rank=(lambda: on_host(RankBased()), 'sampler.kind'))

@pytest.mark.parametrize('form,kind', each(HOSTS))
def test_what_no_device_has_is_refused_by_name(form, kind, tmp_path):
    make, named = HOSTS[kind]
    stays(FORMS[form], make(), filled(9, Proportional() if kind in ('normalize', 'rank') else Uniform()), named, tmp_path)

def test_dropped_rows_never_come_back_on_a_device(tmp_path):
    "They would be drawn again"
    host = on_host(Proportional())
    host.drop([3, 7])
    stays(by_restore, host, filled(9, Proportional()), ('state', 'rows that may all be drawn', '2 that were dropped'), tmp_path)
    host.save(tmp_path)
    with pytest.raises(ValueError, match=WORDS['dropped rows for a device']): DeviceMemory.load(tmp_path, device='cpu')


@pytest.mark.parametrize('form', FORMS)
def test_alpha_and_beta_go_on_as_they_were_saved(form, tmp_path):
    saved = filled(sampler=Proportional(alpha=.9, beta=LinearSchedule(.4, 1., 9)))
    here = filled(9, Proportional(alpha=.3))
    here.sample(8)
    [text] = said(FORMS[form], saved, here, tmp_path)
    for name in ('sampler.options.alpha: 0.9, not 0.3', 'sampler.options.beta'): assert name in text
    assert here.sampler.alpha==.9 and here.sampler.beta==LinearSchedule(.4, 1., 9)
    assert torch.equal(here.sampler.leaves, saved.sampler.leaves)
    for _ in range(3):
        a, b = saved.sample(16), here.sample(16)
        assert torch.equal(a.ids, b.ids) and torch.equal(a.weights, b.weights) and torch.equal(a.probs, b.probs)
        for o in (saved, here): o.update_priorities(a.ids, a.reward)
        for o in (saved, here): o.extend(rows(12, 1))
    assert said(FORMS[form], saved, here, tmp_path/'again')==[]            # now they agree

def test_priorities_of_a_replay_memory_get_its_alpha(tmp_path):
    host = on_host(Proportional(alpha=1., eps=0.))
    host.update_priorities(np.arange(48), np.arange(48.))
    here = filled(9, Proportional(alpha=.5))
    [text] = said(by_restore, host, here, tmp_path)
    assert 'alpha: 1.0, not 0.5' in text and 'eps' in text
    assert here.sampler.leaves[:48].tolist()==[float(k) for k in range(48)]

def test_windows_are_drawn_with_the_alpha_that_was_saved(tmp_path):
    "Their leaves are saved as they are, p^alpha"
    saved, here = (filled(sampler=Proportional(alpha=o), sequence=Sequence(3)) for o in (.9, .3))
    batch = saved.sample(8)
    saved.update_priorities(batch.ids, batch.reward)
    [text] = said(by_restore, saved, here, tmp_path)
    assert 'alpha' in text and here.sampler.alpha==.9
    a, b = saved.sample(8), here.sample(8)
    assert torch.equal(a.ids, b.ids)
    for o in (saved, here): o.update_priorities(a.ids, a.reward*2)
    assert torch.equal(saved.sampler.leaves, here.sampler.leaves)
