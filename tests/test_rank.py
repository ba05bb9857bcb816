"Sorted blocks and rank-based sampling beside `sorted()`, over thousands of random operations on blocks small and large"
import numpy as np
import pytest
from draws import batch, filled

from fastrl_replay.samplers.rng import Rng, unit
from fastrl_replay.samplers.rank import (
    BIRTH, BLOCK, BORN, FIRST, HEAD, SIZE, START, WIDTH, RankBased)


def rank_based(width=128, **kw):
    sampler = RankBased(**kw)
    sampler.width = width
    return sampler


def same(a, b): return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


class Twin:
    "Ranks by `sorted`: the largest first, of equals the older"
    def __init__(self, max_sz): self.p, self.age, self.max_sz, self.born, self.largest = {}, {}, max_sz, 0, 1.
    def add(self, slots, given):
        p = self.largest
        for k, s in enumerate(slots.tolist()):
            self.p[s], self.age[s] = p if given is None else float(given[k]), self.born
            self.born += 1
        self.largest = max(self.largest, *(self.p[s] for s in slots.tolist()))
    def update(self, slots, td):
        for s, d in zip(slots.tolist(), td.tolist()): self.p[s] = abs(d)
        self.largest = max(self.largest, *(self.p[s] for s in slots.tolist()))
    def order(self): return sorted(self.p, key=lambda s: (-self.p[s], self.age[s]))


def probabilities(n, alpha): return np.arange(1., n + 1)**-alpha / (np.arange(1., n + 1)**-alpha).sum()


def compare(sampler, twin, rng, bs, alpha, beta):
    "The same random words through cumulative sums and a sorted list"
    before = Rng(0)
    before.set_state(rng.get_state())
    slots, probs, weights = batch(sampler, bs, rng)
    order, right = np.array(twin.order()), probabilities(len(twin.p), alpha)
    u = (np.arange(bs) + [unit(before.words) for _ in range(bs)])/bs
    ranks = np.minimum(np.searchsorted(right.cumsum(), u*right.cumsum()[-1], 'right'), len(right) - 1)
    margin = np.abs(right.cumsum()[:, None] - u*right.cumsum()[-1]).min()
    assert (np.sort(slots) == np.sort(order[ranks])).all() or margin < 1e-12
    rank_of = np.empty(len(order), int)
    rank_of[order] = np.arange(len(order))
    assert np.allclose(probs, right[rank_of[slots]], rtol=1e-5)
    w = (len(right)*right[rank_of[slots]])**-beta
    assert np.allclose(weights, w/w.max(), rtol=1e-5)


VALUES = {
    'spread': lambda chance, m: 10**chance.uniform(-12, 12, m),
    'ties': lambda chance, m: chance.integers(0, 3, m).astype(float),
    'all alike': lambda chance, m: np.full(m, 1.),
    'rising': lambda chance, m: np.sort(chance.random(m)) + chance.integers(0, 5),
    'falling': lambda chance, m: -np.sort(chance.random(m)),
}


@pytest.mark.parametrize('kind', VALUES)
@pytest.mark.parametrize('max_sz,width', [(1, 4), (2, 4), (7, 4), (50, 4), (150, 8), (400, 128)])
def test_beside_sorted(max_sz, width, kind):
    rng, chance, value = Rng(max_sz), np.random.default_rng(max_sz), VALUES[kind]
    alpha, beta = chance.choice([0., .4, .7, 1., 1.3]), chance.choice([0., .5, 1.])
    sampler, twin, n = rank_based(width, alpha=alpha, beta=beta), Twin(max_sz), 0
    sampler.attach(max_sz)
    for _ in range(100):
        what = chance.random()
        if what < .4 or not twin.p:
            m = int(chance.integers(1, min(max_sz, 60) + 1))
            given, slots = None if chance.random() < .6 else np.abs(value(chance, m)), (n + np.arange(m)) % max_sz
            if chance.random() < .5: sampler.add_run(n % max_sz, m, given)
            else: sampler.on_add(slots, given)
            twin.add(slots, given)
            n += m
        elif what < .75:
            k = int(chance.integers(1, 2*len(twin.p) + 2))
            slots, td = chance.integers(0, len(twin.p), k), value(chance, k)
            sampler.update(slots, td); twin.update(slots, td)
        else: compare(sampler, twin, rng, int(chance.integers(1, 2*max_sz + 20)), alpha, beta)
        assert sampler.check_valid() and sampler.largest == twin.largest
        assert np.argsort(sampler.ranks).tolist() == twin.order()
        assert sampler.priorities.tolist() == [twin.p[s] for s in range(len(twin.p))]


def test_filled_at_once_as_one_by_one():
    "From a state, with ties or without, the ranks are those that `sorted` gives"
    chance = np.random.default_rng(0)
    for _ in range(100):
        n, p = int(chance.integers(1, 60)), chance.integers(1, 6)
        sampler, twin = filled(rank_based(8), n, 60), Twin(60)
        twin.add(np.arange(n), None)
        slots, td = chance.permutation(n), chance.integers(0, p, n).astype(float)
        sampler.update(slots, td); twin.update(slots, td)
        again = rank_based(8)
        again.attach(60)
        again.set_state(sampler.get_state())
        assert again.check_valid() and np.argsort(again.ranks).tolist() == twin.order()


def test_a_zero_with_a_sign_is_a_zero():
    state = filled(rank_based(8), 4).get_state()
    again = rank_based(8)
    again.attach(4)
    again.set_state({**state, 'priorities': np.array([-0., 2., 0., 1.])})
    assert again.ranks.tolist()==[3, 1, 4, 2] and again.check_valid()


@pytest.mark.parametrize('row,at,by', [(START, 3, 10**17), (BIRTH, 2, 5), (SIZE, 2, 1), (BLOCK, 2, 1), (HEAD, WIDTH, 1), (HEAD, BORN, -5), (HEAD, FIRST, 10**18)])
def test_the_checks_can_fail(row, at, by):
    sampler = filled(rank_based(8), 100)
    if row != BIRTH: sampler.update(np.arange(100), np.random.default_rng(0).random(100))
    assert sampler.check_valid()
    sampler.directory[row, at] += by
    with pytest.raises((AssertionError, IndexError)): sampler.check_valid()
