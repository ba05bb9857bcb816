"Uniform and proportional sampling beside naive twins; the protocol, its errors, its state"
import itertools

import numpy as np
import pytest
from draws import batch, filled

from fastrl_replay.samplers.rng import Rng, unit
from fastrl_replay.samplers.own import OwnSampler, as_sampler
from fastrl_replay.samplers.more import ERE, Combined
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.uniform import Uniform
from refusals import about, refused
from words import WORDS

SIZES = [1, 2, 5, 13, 64, 100]


def chi2(counts, expected): return ((counts - expected)**2/expected).sum()
def limit(freedom): return freedom + 4*np.sqrt(2*freedom) + 8          # far in the tail, for seeds that are fixed


def same(a, b):
    assert a.keys() == b.keys()
    return all(np.array_equal(a[k], b[k]) for k in a)


def unchanged(sampler, f, what, rng=None, error=ValueError):
    "`f` raises an error about `what`, and leaves the sampler and the generator as they were"
    before, words = sampler.get_state(), rng and rng.get_state()
    with about(what, error): f()
    assert same(sampler.get_state(), before) and (rng and rng.get_state()) == words and sampler.check_valid()


# ---- uniform

@pytest.mark.parametrize('n', SIZES)
def test_distinct_slots_for_every_batch_size(n):
    sampler, rng = filled(Uniform(), n, n + 7), Rng(n)
    for bs in {*range(1, min(n, 20) + 1), n//2, n//2 + 1, n - 1, n} - {0}:
        for _ in range(20):
            slots, probs, weights = batch(sampler, bs, rng)
            assert len(set(slots)) == bs and slots.min() >= 0 and slots.max() < n
            assert (probs == np.float32(1/n)).all() and (weights == 1).all()
            assert sampler.check_valid()


@pytest.mark.parametrize('bs,n', [(1, 4), (2, 4), (3, 4), (4, 4), (2, 5), (3, 5), (2, 7)])
def test_all_orders_are_equally_likely(bs, n):
    sampler, rng = filled(Uniform(), n), Rng(17)
    orders = dict.fromkeys(itertools.permutations(range(n), bs), 0)
    for _ in range(300*len(orders)): orders[tuple(sampler.draw(bs, rng)[0].tolist())] += 1
    assert chi2(np.array(list(orders.values())), 300) < limit(len(orders) - 1)


@pytest.mark.parametrize('bs,replace', [(50, False), (600, False), (50, True), (1500, True)])
def test_each_slot_alike(bs, replace):
    sampler, rng = filled(Uniform(replace), 1000), Rng(5)
    counts = sum(np.bincount(sampler.draw(bs, rng)[0], minlength=1000) for _ in range(200_000//bs))
    assert chi2(counts, counts.sum()/1000) < limit(999)


def test_uniform_refusals():
    sampler, rng = filled(Uniform(), 5, 8), Rng(0)
    unchanged(sampler, lambda: sampler.draw(6, rng), 'too few, and what to do', rng)
    unchanged(sampler, lambda: sampler.draw(0, rng), 'at least one', rng)
    unchanged(sampler, lambda: sampler.draw(-1, rng), 'at least one', rng)
    unchanged(sampler, lambda: batch(sampler, 0, rng), 'at least one', rng)
    unchanged(sampler, lambda: sampler.draw(1.5, rng), 'no index', rng, TypeError)
    unchanged(sampler, lambda: sampler.attach(8), 'it serves a memory')
    for empty in (Uniform(), Uniform(True), Proportional()):
        for f in (lambda o: None, lambda o: o.attach(3)):
            f(empty)
            with pytest.raises(ValueError, match=WORDS['it is empty']): empty.draw(1, rng)


@pytest.mark.parametrize('make', [Uniform, Proportional])
def test_slots_are_those_of_the_memory(make):
    with pytest.raises(ValueError, match=WORDS['it serves none']): make().add_run(0, 1)
    with refused('slots'): make().on_add([0])
    sampler, rng = make(), Rng(0)
    sampler.attach(200)
    for k in range(200):
        sampler.on_add(np.array([k]), None)
        assert sampler.size == k + 1 and sampler.check_valid()
    assert set(np.concatenate([sampler.draw(100, rng)[0] for _ in range(50)])) == set(range(200))
    other = filled(make(), 3, 5)
    unchanged(other, lambda: other.on_add([5], None), 'beyond 5 slots')
    unchanged(other, lambda: other.on_add([-1], None), 'beyond 5 slots')
    unchanged(other, lambda: other.on_add([[1, 2]], None), 'flat slots')
    unchanged(other, lambda: other.on_add([.5], None), 'whole slots')
    for bad in (0, -1, 2**31, 1.5, None, True):
        with refused('max_sz'): make().attach(bad)


# ---- the protocol

class Five:
    "A sampler of one's own: the first slots, with given probabilities"
    def __init__(self, probs=None): self.slots, self.probs, self.errors = [], probs, {}
    def on_add(self, slots, priorities): self.slots += [int(s) for s in slots]
    def draw(self, bs, rng): return self.slots[:bs], (self.probs or [.5]*bs)[:bs]
    def update(self, slots, td_errors): self.errors.update(zip(slots.tolist(), td_errors.tolist()))
    def get_state(self): return dict(slots=list(self.slots))
    def set_state(self, state): self.slots = list(state['slots'])


def test_what_is_no_sampler():
    for bad in (None, 3, object(), Five, np.random.default_rng(0)):
        with refused('sampler', TypeError): as_sampler(bad)
    own = Five()
    del Five.update
    try:
        with refused('sampler', TypeError): as_sampler(own)
    finally: Five.update = lambda self, slots, td_errors: None
    u = Uniform()
    assert as_sampler(u) is u and isinstance(as_sampler(Five()), OwnSampler)


# ---- proportional

class Twin:
    "Proportional prioritization in plain Python"
    def __init__(self, max_sz, alpha, eps): self.p, self.max_sz, self.alpha, self.eps, self.largest = [], max_sz, alpha, eps, 1.
    def add(self, first, m, given):
        values = [self.largest]*m if given is None else given
        for k in range(m):
            slot = (first + k) % self.max_sz
            if slot == len(self.p): self.p.append(None)
            self.p[slot] = float(values[k])
        self.largest = max([self.largest, *map(float, values)])
    def update(self, slots, td):
        last = dict(zip(slots.tolist(), td.tolist()))
        for s, d in last.items(): self.p[s] = abs(d) + self.eps
        self.largest = max(self.largest, *(self.p[s] for s in last))
    def probs(self):
        leaves = np.array([p**self.alpha for p in self.p])
        return leaves/leaves.sum() if leaves.any() else np.full(len(leaves), 1/len(leaves))
    def weights(self, slots, beta, normalize):
        probs = self.probs()
        w = (len(probs)*probs[slots])**-beta
        return w/(w.max() if normalize == 'batch' else ((len(probs)*probs[probs > 0])**-beta).max())


def expected_slots(probs, bs, words):
    "The stratified draw from the same random words, through cumulative sums; and how far each lies from a border"
    u = (np.arange(bs) + [unit(words) for _ in range(bs)])/bs
    cumulative = probs.cumsum()
    slots = np.minimum(np.searchsorted(cumulative, u*cumulative[-1], 'right'), np.flatnonzero(probs)[-1])
    return slots, np.abs(cumulative[:, None] - u*cumulative[-1]).min(0)


def compare(sampler, twin, rng, bs, beta, normalize):
    before = Rng(0)
    before.set_state(rng.get_state())
    slots, probs, weights = batch(sampler, bs, rng)
    right = twin.probs()
    want, margin = expected_slots(right, bs, before.words)
    got = np.sort(slots)
    assert (got == np.sort(want)).all() or margin.min() < 1e-12
    assert np.allclose(probs, right[slots], rtol=1e-6, atol=1e-37) and (right[slots] > 0).all()
    assert np.allclose(weights, twin.weights(slots, beta, normalize), rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize('max_sz,alpha,eps,normalize', [(1, .6, 1e-6, 'batch'), (2, 1., 0., 'memory'), (5, .6, 1e-6, 'batch'),
    (13, .7, 0., 'memory'),                                                        (100, .6, 1e-3, 'batch'), (257, 1.5, 0., 'memory'),
    (1000, .4, 1e-6, 'batch')])
def test_beside_the_twin(max_sz, alpha, eps, normalize):
    rng, chance = Rng(max_sz), np.random.default_rng(max_sz)
    sampler, twin, n = Proportional(alpha, .5, eps, normalize), Twin(max_sz, alpha, eps), 0
    sampler.attach(max_sz)
    for _ in range(250):
        what = chance.random()
        if what < .35 or not twin.p:
            m = int(chance.integers(1, min(max_sz, 40) + 1))
            given = None if chance.random() < .6 else np.where(chance.random(m) < .3, 0., chance.exponential(2, m))
            if n and chance.random() < .5:
                slots = (n + np.arange(m)) % max_sz
                sampler.on_add(slots, given)
            else: sampler.add_run(n % max_sz, m, given)
            twin.add(n % max_sz, m, given)
            n += m
        elif what < .65:
            k = int(chance.integers(1, 2*len(twin.p) + 2))
            slots, td = chance.integers(0, len(twin.p), k), chance.normal(size=k)*(chance.random(k) < .7)
            td = td.astype(np.float32) if chance.random() < .3 else td
            sampler.update(slots, td); twin.update(slots, td)
        elif what < .7:
            sampler.alpha = twin.alpha = [0., alpha, 1.][chance.integers(3)]
        else: compare(sampler, twin, rng, int(chance.integers(1, 60)), .5, normalize)
        assert sampler.check_valid() and sampler.size == len(twin.p)
        assert sampler.priorities.tolist() == twin.p and sampler.largest == twin.largest


def test_alpha_on_a_living_memory():
    sampler, rng = filled(Proportional(), 50), Rng(0)
    sampler.update(np.arange(50), np.linspace(0, 5, 50)**9)
    before = sampler.tree.copy()
    sampler.alpha = 0
    assert np.allclose(sampler.draw(9, rng)[1], 1/50)
    sampler.alpha = 2.5
    assert sampler.check_valid()
    p = sampler.priorities**2.5
    slots, probs, _ = batch(sampler, 9, rng)
    assert np.allclose(probs, (p/p.sum())[slots])
    sampler.alpha = .6
    assert (sampler.tree == before).all()


@pytest.mark.parametrize('slots,td,says', [
    ([0, 1], [1., np.nan], ('td_errors', 'finite numbers', 'nan at 1')),
    ([0, 1], [np.inf, 1.], ('td_errors', 'finite numbers', 'inf at 0')),
    ([0, 1], [-np.inf, 1.], ('td_errors', 'finite numbers', '-inf at 0')), ([0, 1], [1.], ('td_errors', 'one for each of 2 transitions', 'shape (1,)')),
    ([0], [1., 2.], ('td_errors', 'one for each of 1 transitions', 'shape (2,)')), ([0, 7], [1., 2.], ('slots', 'numbers from 0 to 6', '7')),
    ([0, -1], [1., 2.], ('slots', 'numbers from 0 to 6', '-1')), ([0, .5], [1., 2.], 'whole slots')])
def test_a_bad_update_changes_nothing(slots, td, says):
    sampler = filled(Proportional(), 7, 9)
    sampler.update(np.arange(7), np.arange(7.))
    before = sampler.tree.copy()
    unchanged(sampler, lambda: sampler.update(slots, td), says)
    unchanged(sampler, lambda: sampler.update(slots, np.array(td, np.float32)), says)
    assert (sampler.tree == before).all()
    sampler.update([], [])
    assert (sampler.tree == before).all()


# ---- more samplers


def test_the_checks_can_fail():
    sampler = filled(Proportional(normalize='memory'), 30)
    sampler.check_valid()
    first = int(sampler.tree[0, 0])
    for line, q in ((0, 7), (1, 1), (first, 0), (first, 4), (-1, -1)):
        broken = filled(Proportional(normalize='memory'), 30)
        broken.tree[line, q] += .5
        with pytest.raises(AssertionError): broken.check_valid()
    broken = filled(Proportional(normalize='memory'), 30)
    broken.lows[1, 0] = .5
    with pytest.raises(AssertionError, match=WORDS['a wrong low']): broken.check_valid()
    uniform = filled(Uniform(), 30)
    uniform.marks[0] = 4
    with pytest.raises(AssertionError, match=WORDS['marks left']): uniform.check_valid()
    twin, rng = Twin(30, .6, 1e-6), Rng(0)
    twin.add(0, 30, None)
    compare(sampler, twin, rng, 9, .4, 'memory')
    twin.p[4] = 2.
    with pytest.raises(AssertionError): compare(sampler, twin, rng, 200, .4, 'memory')


@pytest.mark.parametrize('bs,n', [(1, 1), (1, 5), (2, 5), (4, 5), (5, 5), (3, 40)])
def test_combined_has_the_newest_and_the_others_alike(bs, n):
    sampler, rng = filled(Combined(), n), Rng(bs)
    sampler.add_run(n - 1, 2)                                 # over the end: slot 0 is the newest, or the only one
    newest, places, counts = 0 if n > 1 else 0, np.zeros(bs), np.zeros(n)
    for _ in range(4000):
        slots, probs, weights = batch(sampler, bs, rng)
        assert (slots == newest).sum() == 1 and len(set(slots)) == bs and (weights == 1).all()
        assert np.allclose(probs, np.where(slots == newest, 1, 1/max(n - 1, 1)))
        places[slots == newest] += 1
        counts[slots] += 1
    assert chi2(places, 4000/bs) < limit(bs - 1)
    if n > 1: assert chi2(counts[1:], 4000*(bs - 1)/(n - 1) or 1) < limit(n - 2) + (n - 1)*(bs == 1)
    unchanged(sampler, lambda: sampler.draw(n + 1, rng), 'no batch without replacement', rng)
    sampler.on_add([n//2])
    assert n//2 in sampler.draw(bs, rng)[0]


def test_ere_closes_its_window():
    sampler, rng = filled(ERE(.99, 20, 10), 300), Rng(0)
    sampler.add_run(0, 100)
    windows = []
    for k in range(25):
        windows.append(sampler.window)
        ages = (99 - sampler.draw(3000, rng)[0]) % 300
        assert ages.max() < windows[-1] and len(set(ages)) == windows[-1]
        assert windows[-1] == max(int(300*.99**(1000*(k % 10 + 1)/10)), 20)
    sampler.on_add([100])
    sampler.n_batches = 9                                     # the last before the window opens again
    assert set((100 - sampler.draw(3000, rng)[0]) % 300) == set(range(20))
    young = filled(ERE(), 7, 100)
    assert young.window == 7 and set(young.draw(100, rng)[0]) == set(range(7))
    for bad in (dict(eta=1.5), dict(c_min=0), dict(period=0)):
        with refused(next(iter(bad))): ERE(**bad)
    with pytest.raises(ValueError, match=WORDS['it is empty']): ERE().draw(1, rng)
