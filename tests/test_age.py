"The age-weighted sampler beside the law that defines it: exact at every whole age, in a memory, on disk and in pipes"
from typing import NamedTuple

import numpy as np
import pytest
from draws import batch, filled
from test_samplers import chi2, limit, unchanged

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.replay import ExperienceReplay
from fastrl_replay.ray.memory import RayMemory
from fastrl_replay.samplers.age import AgeWeighted
from fastrl_replay.samplers.rng import Rng
from fastrl_replay.steps import Transition
from fastrl_replay.storage.sequence_sampler import Sequence
from refusals import refused
from words import WORDS


class Aging:
    "The law from its definition: a list of slots, oldest first, and a weight for each age"
    def __init__(self, max_sz, horizon, floor): self.max_sz, self.horizon, self.floor, self.slots = max_sz, horizon, floor, []
    def add(self, slot, m):
        for k in range(m): self.slots.append((slot + k) % self.max_sz)
        del self.slots[:-self.max_sz]
    def law(self):
        "P of each slot (float64[max_sz])"
        w = [max(self.floor, 1 - age/self.horizon) for age in range(len(self.slots))]
        p = np.zeros(self.max_sz)
        for slot, o in zip(reversed(self.slots), w): p[slot] = o/sum(w)
        return p


def drawn_by_age(n, max_sz, horizon, floor, k):
    "A sampler and its twin after `n` additions, and `k` draws of each slot"
    sampler, twin = AgeWeighted(horizon, floor), Aging(max_sz, horizon, floor)
    sampler.attach(max_sz)
    for at in range(0, n, 7):
        m = min(7, n - at)
        sampler.add_run(at % max_sz, m)
        twin.add(at, m)
    slots, probs, weights = batch(sampler, k, Rng(n))
    assert (weights == 1).all() and np.allclose(probs, twin.law()[slots], rtol=1e-6, atol=0)
    return np.bincount(slots, minlength=max_sz), twin.law()


@pytest.mark.parametrize('n,max_sz,horizon,floor', [
    (1, 50, 10, .1), (11, 50, 10, .1), (77, 50, 30, .1), (133, 50, 50, .25), (133, 50, 51, 0.), (133, 50, 20, 0.), (133, 50, 20, 1.),
    (133, 50, 19.999, .3), (133, 50, 1e-9, .5), (133, 50, 2**31 - 1, .1), (90, 50, 10/3, .7), (3000, 2000, 1999.5, .001)])
def test_age_weighted_draws_what_the_twin_says(n, max_sz, horizon, floor):
    "Chi-square of all slots that can be drawn, and none of the others"
    counts, law = drawn_by_age(n, max_sz, horizon, floor, 200_000)
    there = law > 1e-12
    assert not counts[~there].any() and abs(counts[there].sum() - 2e5) < 1
    assert chi2(counts[there], law[there]*2e5) < limit(there.sum() - 1 or 1)


def test_age_weighted_is_exact_where_digits_would_cancel():
    "Ten million rows, and a line that nearly reaches zero: the oldest are drawn as often as their weight says"
    n, draws = 10_000_000, 4_000_000
    sampler = filled(AgeWeighted(n, 0.), n)
    slots, probs, _ = batch(sampler, draws, Rng(5))
    ages = n - 1 - slots
    total = n - (n - 1)/2
    assert np.allclose(probs, (1 - ages/n)/total, rtol=1e-5, atol=0)
    edges = [0, 10, 1000, n//2, n - 100_000, n - 20_000, n]
    right = np.array([(b - a) - (b*(b - 1) - a*(a - 1))/2/n for a, b in zip(edges, edges[1:])])/total
    counts = np.histogram(ages, edges)[0]
    assert right[-1]*draws > 10 and (np.abs(counts - right*draws) < 5*np.sqrt(right*draws) + 1).all()


def test_age_weighted_says_what_is_wrong_with_its_options():
    for bad in (dict(horizon=0), dict(horizon=-1), dict(horizon=np.inf), dict(horizon=np.nan), dict(horizon=2**31), dict(horizon='long'),
                dict(horizon=None), dict(horizon=5, floor=-.1), dict(horizon=5, floor=1.1), dict(horizon=5, floor=None)):
        with refused(list(bad)[-1]): AgeWeighted(**bad)
    with pytest.raises(ValueError, match=WORDS['it is empty']): AgeWeighted(5).draw(1, Rng(0))
    sampler = filled(AgeWeighted(5), 9)
    unchanged(sampler, lambda: sampler.draw(0, Rng(0)), 'bs')


class Rows(NamedTuple):
    "A step that is a number"
    k: int = 0


@pytest.mark.parametrize('where', ['ram', 'disk'])
def test_age_weighted_in_a_memory(where, tmp_path):
    "Ages are in rows, whatever way they came; saved, loaded and reopened it draws the same"
    options = dict(path=tmp_path/'memory') if where == 'disk' else {}
    memory = ReplayMemory(60, AgeWeighted(30, .2), step=Rows(), seed=1, **options)
    for k in range(20): memory.add(Rows(k))
    for a in range(20, 140, 12): memory.extend([Rows(k) for k in range(a, a + 12)])
    w = np.maximum(.2, 1 - np.arange(60)/30)
    drawn = memory.sample(200_000)
    assert np.allclose(drawn.probs, (w/w.sum())[139 - drawn.ids], rtol=1e-6) and (drawn.weights == 1).all() and (drawn.k == drawn.ids).all()
    assert chi2(np.bincount(139 - drawn.ids), w/w.sum()*200_000) < limit(59)
    memory.save(tmp_path/'saved')
    again = ReplayMemory.load(tmp_path/'saved')
    assert again.sampler.options() == dict(horizon=30., floor=.2)
    for o in memory, again: o.extend([Rows(k) for k in range(140, 147)])
    for _ in range(3): assert (memory.sample(64).ids == again.sample(64).ids).all()
    assert memory.update_priorities([146], [1.]) == 0 and memory.check_valid()
    if where == 'ram': return
    before = memory.rng.get_state()
    memory.close()
    with refused('sampler.options.horizon'): ReplayMemory(60, AgeWeighted(31, .2), step=Rows(), path=tmp_path/'memory')
    with ReplayMemory.open(tmp_path/'memory') as opened:
        assert opened.sampler.options() == dict(horizon=30., floor=.2) and opened.rng.get_state() == before
        assert (opened.sample(64).ids == again.sample(64).ids).all()


def test_age_weighted_in_pipes_and_where_it_is_refused(tmp_path):
    steps = [Transition(np.ones(2, np.float32)*k, 0, 0., np.ones(2, np.float32), False, False) for k in range(100)]
    replay = ExperienceReplay(steps, bs=8, max_sz=50, min_sz=20, seed=0, sampler=AgeWeighted(10, 0.))
    batches = list(replay)
    assert len(batches) == 81 and all(((19 + k) - o.ids < 10).all() for k, o in enumerate(batches))
    replay.save(tmp_path/'replay')
    other = ExperienceReplay([], bs=8, max_sz=50, min_sz=20, seed=3, sampler=AgeWeighted(10, 0.)).load(tmp_path/'replay')
    assert (other.sample().ids == replay.sample().ids).all()
    with refused('sampler', TypeError):
        ReplayMemory(50, AgeWeighted(10), sequence=Sequence(4))
    with refused('sampler'): RayMemory(0, 50, AgeWeighted(10))


@pytest.mark.parametrize('horizon,floor,gone', [
    (1500., .1, 'half'), (300., .1, 'newest'), (700.5, 0., 'newest'), (2000., 0., 'but the last on the line'), (900., 1., 'most'), (50., 0., 'newest')])
def test_age_weighted_draws_what_is_left_by_its_law(horizon, floor, gone):
    "Several blocks of slots, wrapped around; dropped, added to, dropped again: exact probabilities, and chi-square of many draws"
    n, max_sz, rng = 5000, 2000, np.random.default_rng(0)
    memory, dropped = ReplayMemory(max_sz, AgeWeighted(horizon, floor), step=Rows(), seed=2), set()
    memory.extend([Rows(k) for k in range(n)])
    for _ in range(3):
        ids = np.arange(memory.first_id, memory.n_added)
        age = memory.n_added - 1 - ids
        chosen = {'half': ids[rng.random(len(ids)) < .5], 'most': ids[rng.random(len(ids)) < .99], 'newest': ids[age < 600],
                  'but the last on the line': ids[age != 1990]}[gone]
        memory.drop(chosen)
        dropped |= set(chosen.tolist())
        if dropped >= set(ids.tolist()): break                       # nothing is left
        left = np.array([i for i in ids if i not in dropped])
        w = np.maximum(floor, 1 - (memory.n_added - 1 - left)/horizon)
        law = dict(zip(left.tolist(), (w/w.sum() if w.sum() else np.full(len(left), 1/len(left))).tolist()))
        batch = memory.sample(100_000)
        assert (batch.weights == 1).all() and np.allclose(batch.probs, [law[i] for i in batch.ids.tolist()], rtol=1e-5)
        p = np.array([o for o in law.values() if o])
        counts = np.bincount(np.searchsorted(left, batch.ids.numpy()), minlength=len(left))[np.array(list(law.values())) > 0]
        assert counts.sum() == 100_000 and chi2(counts, p*100_000) < limit(max(len(p) - 1, 1)) and memory.check_valid()
        memory.extend([Rows(memory.n_added + k) for k in range(137)])
    memory.extend([Rows(k) for k in range(max_sz)])                       # all that was dropped is overwritten
    assert memory.sampler.eligible.all
    memory.clear()
    with pytest.raises(ValueError, match=WORDS['all is gone']): memory.sample(1)
    memory.add(Rows(1))
    assert (memory.sample(5).ids == memory.n_added - 1).all()
