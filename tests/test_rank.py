"Sorted blocks and rank-based sampling beside `sorted()`, over thousands of random operations on blocks small and large"
import json
from functools import partial

import numpy as np
import pytest
from draws import batch, filled

from fastrl_replay.samplers.rng import Rng, unit
from fastrl_replay.samplers.rank import (
    BIRTH, BLOCK, BLOCKS, BORN, FIRST, HEAD, SIZE, START, WIDTH, RankBased, change, check_blocks, empty_blocks,
    entries_of, keys_of, slots_at)
from refusals import about, refused
from words import WORDS


def rank_based(width=128, **kw):
    sampler = RankBased(**kw)
    sampler.width = width
    return sampler


def same(a, b): return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def unchanged(sampler, f, what, rng=None, error=ValueError):
    before, words = sampler.get_state(), rng and rng.get_state()
    with about(what, error): f()
    assert same(sampler.get_state(), before) and (rng and rng.get_state()) == words and sampler.check_valid()


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


def test_scattered_slots():
    "Slots may come in any order"
    sampler, twin, chance = rank_based(8), Twin(None), np.random.default_rng(0)
    sampler.attach(400)
    for k in range(0, 400, 20):
        slots = chance.permutation(np.arange(k, k + 20)) if chance.random() < .5 else np.arange(k, k + 20)
        given = chance.integers(0, 4, 20).astype(float)
        sampler.on_add(slots, given); twin.add(slots, given)
        assert sampler.check_valid() and np.argsort(sampler.ranks).tolist() == twin.order()


def test_blocks_stay_within_bounds():
    "Whatever comes, no more blocks than were allocated, and no neighbours that ought to be one"
    chance, n = np.random.default_rng(0), 2000
    arrays = empty_blocks(n, width=8)
    directory, most = arrays[3], 0
    for round in range(60):
        slots = chance.permutation(n)[:chance.integers(1, n)] if round else np.arange(n)
        keys = -np.sort(chance.integers(1, 10**chance.integers(1, 9), len(slots)))[::chance.choice([-1, 1])].copy()
        change(*arrays, slots, keys, bool(chance.random() < .3) or not round)
        check_blocks(*arrays, n)
        most = max(most, directory[HEAD, BLOCKS])
    assert most <= 4*n//8 + 1 < directory.shape[1]


def test_the_first_fill_leaves_full_blocks():
    "Equal priorities, one after the other: every block but the last is full"
    sampler = filled(rank_based(16), 1000)
    sizes = sampler.directory[SIZE, :sampler.directory[HEAD, BLOCKS]]
    assert (sizes[:-1] == 16).all()


def test_all_slots_at_all_ranks():
    chance = np.random.default_rng(0)
    arrays = empty_blocks(500, width=8)
    change(*arrays, np.arange(500), -chance.integers(1, 50, 500), True)
    found = np.empty(500, np.int64)
    slots_at(arrays[1], arrays[3], np.arange(1, 501), found)
    assert (found == arrays[1][entries_of(arrays[3])]).all() and sorted(found) == list(range(500))


def test_births_are_wide():
    "Past 2³² insertions, and far past, the older still come first"
    for born in (2**32 - 5, 2**33 - 5, 2**62):
        sampler = filled(rank_based(4), 20)
        sampler.directory[HEAD, BORN] = born
        for k in range(30): sampler.add_run(k % 20, 1)
        assert (np.argsort(sampler.ranks) == (np.arange(20) + 10) % 20).all() and sampler.check_valid()
        again = rank_based(4)
        again.attach(20)
        again.set_state(sampler.get_state())
        assert (again.ranks == sampler.ranks).all()


@pytest.mark.parametrize('a,b', [(0., 5e-324), (1., np.nextafter(1., 2)), (1e-300, 1e300), (np.nextafter(3., 0), 3.), (0., 1.)])
def test_keys_resolve_every_double(a, b):
    above, below, minus = keys_of([a, b, -b]).tolist()
    assert above > below == minus < 0
    sampler = filled(RankBased(), 2)
    sampler.update([0, 1], [a, b])
    assert sampler.ranks.tolist() == [2, 1] and sampler.priorities.tolist() == [a, b]


@pytest.mark.parametrize('alpha', [0., .3, .7, .99, 1., 1 + 1e-9, 1.5, 2.5])
@pytest.mark.parametrize('n', [1, 2, 10, 3000])
def test_ranks_by_the_formula_are_exact(n, alpha):
    "Every border of the mass table, from both sides"
    from fastrl_replay.samplers.rank import ranks_at
    sampler, rng = filled(RankBased(alpha=alpha), n), Rng(0)
    sampler.draw(1, rng)
    mass, ranks = sampler.cumulated, np.empty(2*n - 1, np.int64)
    inner = mass[1:n]
    targets = np.sort(np.concatenate([inner, np.nextafter(inner, 0), [0.]]))
    ranks_at(targets, mass, n, alpha, ranks)
    assert (ranks == np.minimum(np.searchsorted(mass[1:n+1], targets, 'right') + 1, n)).all()
    assert sampler.check_valid()


def test_rows_come_in_random_order():
    sampler, rng = filled(RankBased(alpha=0.), 6), Rng(2)
    counts = np.zeros((6, 6))
    for _ in range(6000): counts[np.arange(6), sampler.draw(6, rng)[0]] += 1
    assert ((counts - 1000)**2/1000).sum() < 25 + 4*np.sqrt(50) + 8


def test_alpha_on_a_living_memory():
    sampler, twin, rng = filled(RankBased(), 50), Twin(50), Rng(0)
    twin.add(np.arange(50), None)
    for alpha in (.7, 0., 2., .7):
        sampler.alpha = alpha
        compare(sampler, twin, rng, 30, alpha, .5)
        assert sampler.check_valid()


def test_beta_schedule_counts_batches():
    seen, rng = [], Rng(0)
    sampler = filled(RankBased(beta=lambda n: seen.append(n) or 1.), 9)
    for _ in range(3): weights = batch(sampler, 30, rng)[2]
    assert seen == [0, 1, 2] and weights.max() == 1 and sampler.n_batches == 3
    bad = filled(RankBased(beta=lambda n: -1.), 3)
    unchanged(bad, lambda: bad.draw(1, rng), 'beta', rng)


def test_refusals():
    sampler, rng = filled(RankBased(), 7, 9), Rng(0)
    sampler.update(np.arange(7), np.arange(7.))
    for slots, td, says in (([0, 1], [1., np.nan], ('td_errors', 'finite numbers', 'nan at 1')),
                            ([0, 1], [np.inf, 1.], ('td_errors', 'finite numbers', 'inf at 0')), ([0, 1], [1.], ('td_errors', 'one for each of 2 transitions', 'shape (1,)')), ([0], [1., 2.], ('td_errors', 'one for each of 1 transitions', 'shape (2,)')),
                            ([0, 7], [1., 2.], ('slots', 'numbers from 0 to 6', '7')), ([0, -1], [1., 2.], ('slots', 'numbers from 0 to 6', '-1')), ([0, .5], [1., 2.], 'whole slots')):
        unchanged(sampler, partial(sampler.update, slots, td), says)
    for given in ([1., np.nan], [1., -1.], [np.inf, 1.], [1.]): unchanged(sampler, partial(sampler.on_add, [7, 8], given), 'priorities')
    unchanged(sampler, lambda: sampler.on_add([9]), 'beyond 9 slots')
    unchanged(sampler, lambda: sampler.draw(0, rng), 'at least one', rng)
    unchanged(sampler, lambda: sampler.attach(9), 'it serves a memory')
    for bad in (-.1, np.nan, np.inf, 'a'):
        with refused('alpha'): RankBased(alpha=bad)
        unchanged(sampler, partial(setattr, sampler, 'alpha', bad), 'alpha')
    with refused('beta', got='1.5'): RankBased(beta=1.5)
    with pytest.raises(ValueError, match=WORDS['it is empty']): RankBased().draw(1, rng)
    with refused('max_sz'): RankBased().attach(2**31)
    sampler.update([], [])


def test_a_state_goes_on_elsewhere():
    a, b, rng, twin = filled(rank_based(4), 30, 40), rank_based(4, alpha=.1, beta=.1), Rng(1), Rng(1)
    a.update(np.arange(30), np.arange(30.)**3 % 7)
    state = a.get_state()
    json.dumps({k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in state.items()})
    b.attach(40)
    b.add_run(0, 40)
    b.set_state(state)
    assert same(b.get_state(), state) and b.check_valid() and repr(a) == repr(b)
    for k in range(30):
        for o in a, b:
            o.add_run((30 + 3*k) % 40, 3)
            o.update(np.arange(k, k + 3) % 30, np.full(3, k + .5))
        assert all((x == y).all() for x, y in zip(batch(a, 9, rng), batch(b, 9, twin)))
    assert same(a.get_state(), b.get_state())
    unchanged(a, lambda: a.set_state({**state, 'births': [1]}), '30 births')
    unchanged(a, lambda: a.set_state({**state, 'births': np.zeros(30, int), 'priorities': np.ones(30)}), 'one insertion number')
    for births in (state['births'] - 1, state['births'] + 1): unchanged(a, partial(a.set_state, {**state, 'births': births}), 'births in range')
    for bad in (np.nan, -1., np.inf): unchanged(a, partial(a.set_state, {**state, 'largest': bad}), 'state: largest')
    unchanged(a, lambda: a.set_state({**state, 'kind': 'Uniform'}), 'that of a Uniform')
    empty = RankBased()
    empty.attach(3)
    empty.set_state(RankBased().get_state())
    assert empty.check_valid() and empty.ranks.tolist() == []


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


def test_a_wrong_place_is_noticed():
    for array in 'keys', 'slots', 'table', 'mass':
        sampler, rng = filled(rank_based(8), 100), Rng(0)
        sampler.draw(5, rng)
        sampler.cumulated[50] += 1e-3 if array == 'mass' else 0
        keys, slots, table, _ = sampler.blocks
        if array == 'keys': keys[5] -= 1
        if array == 'slots': slots[[3, 4]] = slots[[4, 3]]
        if array == 'table': table[7, 0] -= 1
        with pytest.raises(AssertionError): sampler.check_valid()
