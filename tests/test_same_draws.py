"""same_draws.py finds what is planted: a seed, one bit of a weight, an update that is lost, a state that is not kept, another error."""
import shutil
from pathlib import Path

import numpy as np
import pytest

import fastrl_replay
import fastrl_replay.all as fr
from fastrl_replay.memory.parts import Parts
from histories import KINDS
from same_draws import Deliberate, Told, chosen, compare, difference, main, record, report
from words import WORDS


def found(kind, n=2, deliberate=(), plant=lambda: None):
    "What differs between histories of a kind as they are and, after a plant, as they are then"
    before = list(record(chosen(kind, n)))
    plant()
    return compare(before, record(chosen(kind, n)), deliberate)


def test_every_kind_is_the_same_twice_and_does_what_it_says():
    told, again = (list(record(chosen('*', len(KINDS)))) for _ in range(2))
    differs, counts = compare(told, again)
    assert not differs and counts['histories']==len(KINDS) and counts['operations']==len(told)
    assert counts['refused'] < len(told)/100, [o for o in told if 'raises' in o.parts]
    for kind in KINDS: assert any('ids' in k for o in told if o.kind==kind for k in o.parts), f'{kind}: no ids were told'


@pytest.mark.parametrize('kind', ['uniform', 'proportional', 'ages', 'sequences'])
def test_another_seed_is_found_at_the_first_draw(monkeypatch, kind):
    made = fr.ReplayMemory
    class Other(made):
        def __init__(self, *args, seed=None, **kw): super().__init__(*args, seed=seed + 1, **kw)
    differs, counts = found(kind, 2, plant=lambda: monkeypatch.setattr(fr, 'ReplayMemory', Other))
    assert {o.seed for o in differs}=={0, 1} and not report(differs, counts)
    drawn = ('sample', 'fields', 'around', 'sequences', 'keep')
    assert all(o.operation.split(': ')[1] in drawn for o in differs), differs


def test_one_bit_of_a_weight_is_found(monkeypatch):
    draw = fr.Proportional.draw_into
    def draw_into(self, slots, probs, weights, rng):
        draw(self, slots, probs, weights, rng)
        weights[0] = np.nextafter(weights[0], np.float32(2))
    differs, _ = found('proportional', 1, plant=lambda: monkeypatch.setattr(fr.Proportional, 'draw_into', draw_into))
    assert [o.part for o in differs]==['<weights>'] and 'at 0 (of 1 of' in differs[0].words


def test_priorities_that_are_slightly_off_are_found(monkeypatch):
    update = fr.Batch.update_priorities
    plant = lambda: monkeypatch.setattr(fr.Batch, 'update_priorities', lambda self, td: update(self, td*(1 + 1e-12)))
    differs, _ = found('proportional', 4, plant=plant)
    assert differs and {o.part for o in differs} <= {'priorities', '<ids>', '<probs>', '<weights>'}, differs


def test_a_counter_that_a_save_forgets_is_found(monkeypatch):
    counters = Parts.counters
    plant = lambda: monkeypatch.setattr(Parts, 'counters', lambda self: counters(self) | dict(n_stale=0))
    differs, _ = found('proportional', 6, plant=plant)
    assert {o.part for o in differs}=={'n_stale'}


def test_n_step_returns_of_another_discount_are_found(monkeypatch):
    class Other(fr.NStep):
        def __init__(self, *args, gamma, **kw): super().__init__(*args, gamma=gamma*(1 + 1e-7), **kw)
    differs, _ = found('pipe_n_step', 1, plant=lambda: monkeypatch.setattr(fr, 'NStep', Other))
    assert {o.part.split('.')[-1] for o in differs} <= {'reward', 'discount'} and differs


def test_an_error_is_found_and_its_words_are_not(monkeypatch):
    def fetch(error):
        def refuse(*_): raise error
        return refuse
    class Derived(ValueError): pass
    old = fr.ReplayMemory.fetch
    monkeypatch.setattr(fr.ReplayMemory, 'fetch', fetch(ValueError('some words')))
    other = lambda error: (lambda: monkeypatch.setattr(fr.ReplayMemory, 'fetch', fetch(error)))
    assert not found('uniform', 1, plant=other(Derived('other words')))[0]
    differs, _ = found('uniform', 1, plant=other(TypeError('some words')))
    assert [o.part for o in differs]==['raises'] and "'ValueError' before, 'TypeError' now" in differs[0].words
    differs, _ = found('uniform', 1, plant=lambda: monkeypatch.setattr(fr.ReplayMemory, 'fetch', old))
    assert {'raises', 'state'} <= {o.part for o in differs}


def test_what_is_meant_to_differ_is_told_and_the_rest_is_compared():
    def told(kind, *each): return [Told(kind, 0, f'{i}: sample', dict(a=a, b=b)) for i, (a, b) in enumerate(each)]
    before, now = told('x', (1, 1), (1, 1), (1, 1)), told('x', (1, 1), (2, 1), (2, 3))
    meant = Deliberate('x*', 'sample', 'a', 'a counts from two')
    differs, counts = compare(before, now, [meant])
    assert [(o.part, o.meant) for o in differs]==[('a', meant), ('a', meant), ('b', None)] and counts['operations']==1
    assert not report(differs, counts, [meant])
    differs, counts = compare(before, now, [meant._replace(follows=True)])
    assert len(differs)==1 and report(differs, counts, [meant])
    assert [o.meant for o in compare(before, now, [meant._replace(kinds='y')])[0]]==[None]
    assert 'nothing now' in compare(before, now[:2], [meant])[0][-1].words


@pytest.mark.parametrize('a, b, words', [
    (1., 1, 'it: float 1.0 before, int 1 now'), (np.float32([1, 2]), np.float64([1, 2]), 'float32 of shape (2,) before'),
    (np.zeros((2, 2)), np.array([[0., 0.], [-0., 0.]]), 'at 1, 0 (of 1 of 4 that differ)'), (['a'], ['b'], "[0]: 'a' before, 'b' now"),
    (dict(a=dict(b=1)), dict(a=dict(b=2)), '.a.b: 1 before, 2 now'), (dict(a=1), dict(b=1), 'a before, b now')])
def test_the_first_difference_is_told(a, b, words):
    assert words in difference(a, b)
    assert difference(a, a) is None is difference(b, b)


def test_a_planted_seed_is_found_in_another_tree(tmp_path, capfd):
    "The whole command, on a copy of the package with another seed in one line, and on one without"
    package, copy = Path(fastrl_replay.__file__).parent, tmp_path/'fastrl_replay'
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns('__pycache__'))
    few = ['--kinds', 'n_step', '--histories', '1']
    assert main([str(tmp_path), *few])==0 and '1 histories, 32 operations equal' in capfd.readouterr().out
    source = copy/'samplers'/'rng.py'
    text = source.read_text()
    planted = text.replace('np.array(_bits(seed)', 'np.array(_bits(seed + 1)')
    assert planted!=text
    source.write_text(planted)
    assert main([str(tmp_path), *few])==1
    out = capfd.readouterr().out
    assert 'n_step, seed 0' in out and '1 histories differ' in out


def test_what_is_no_tree_is_named(tmp_path):
    with pytest.raises(SystemExit, match=WORDS['no checkout']): main([str(tmp_path)])
    with pytest.raises(SystemExit, match=WORDS['no kind']): chosen('nothing', 1)
