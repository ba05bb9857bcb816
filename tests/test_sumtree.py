"The sum tree beside cumulative sums, over random operations on awkward sizes and 24 decades of magnitude"
import numpy as np
import pytest

from fastrl_replay.sumtree import count_reached, ends_at, find, leaf_numbers, lows_at, new_tree, power, resum_many, resum_run

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 63, 100, 129, 255, 257, 1000, 2049]


def check(tree):
    "Every node that is in use is the sum of its children in order, its ends and low are theirs"
    first, capacity, ends, lows = int(tree[0]), int(tree[1]), ends_at(tree), lows_at(tree)
    assert tree.ctypes.data % 64 == 0 and first % 8 == 0
    left, right = first, first + (capacity - 1)//4*8
    while left > 7:
        n = 4 if left == first else 8
        left, right = (left >> 3) + 6, (right >> 3) + 6
        for node in range(left, right + 1):
            group = 8*(node - 6)
            sums = np.cumsum(tree[group:group+n])
            assert tree[node] == sums[-1] >= 0, node
            assert n == 4 or (tree[ends+group:ends+group+8] == sums).all(), node
            if lows:
                below = tree[group:group+4] if n == 4 else tree[lows+group:lows+group+8]
                assert tree[lows+node] == min((o for o in below if o > 0), default=np.inf), node


def leaves(tree): return tree[leaf_numbers(tree)]


def grown(weights, lows=False):
    tree = new_tree(len(weights), lows)
    tree[leaf_numbers(tree)] = weights
    resum_run(tree, 0, len(weights))
    return tree


def found(tree, targets):
    targets, slots = np.array(targets, float), np.empty(len(targets), np.int64)
    find(tree, targets, slots)
    assert (targets == leaves(tree)[slots]).all()
    return slots


def some_weights(rng, n):
    "Zeros, equals, and 24 decades"
    return np.where(rng.random(n) < .3, 0., 10**rng.uniform(-12, 12, n) if rng.random() < .5 else rng.integers(0, 4, n))


@pytest.mark.parametrize('lows', [False, True])
@pytest.mark.parametrize('n', SIZES)
def test_beside_cumulative_sums(n, lows):
    rng = np.random.default_rng(n)
    tree, twin = new_tree(n, lows), np.zeros(n)
    for _ in range(40 if n < 300 else 8):
        k = int(rng.integers(1, 2*n + 2))
        if rng.random() < .5:
            slots, weights = rng.integers(0, n, k), some_weights(rng, k)
            for s, w in zip(slots, weights): twin[s] = tree[leaf_numbers(tree)[s]] = w
            resum_many(tree, slots)
        else:
            start = int(rng.integers(0, n)); stop = int(rng.integers(start + 1, n + 1))
            twin[start:stop] = tree[leaf_numbers(tree)[start:stop]] = some_weights(rng, stop - start)
            resum_run(tree, start, stop)
        check(tree)
        total = twin.sum()
        assert np.isclose(tree[7], total, rtol=1e-12, atol=0)
        if lows: assert tree[lows_at(tree) + 7] == min(twin[twin > 0], default=np.inf)
        if total == 0: continue
        cumulative, targets = twin.cumsum(), rng.random(300)*tree[7]
        slots = found(tree, targets)
        assert (twin[slots] > 0).all()
        before = np.where(slots > 0, cumulative[slots - 1], 0.)
        assert (before <= targets + 1e-12*total).all() and (targets <= cumulative[slots] + 1e-12*total).all()


@pytest.mark.parametrize('n', SIZES)
def test_zeros_are_never_found(n):
    "Not at the borders, not beside them, not at the end, not beyond it"
    rng = np.random.default_rng(n)
    for _ in range(60 if n < 300 else 10):
        weights = some_weights(rng, n)
        weights[rng.integers(0, n)] = 10**rng.uniform(-12, 12)
        if rng.random() < .5: weights[rng.integers(0, n):][1:] = 0.
        if not weights.any(): continue
        tree, borders = grown(weights), np.append(0., weights.cumsum())
        left, right = np.maximum(np.nextafter(borders, -np.inf), 0), np.nextafter(borders, np.inf)
        targets = np.concatenate([borders, left, right, [tree[7]*(1 + 1e-9), 2*tree[7]]])
        assert (weights[found(tree, targets)] > 0).all()


def test_borders_belong_to_the_right():
    tree = grown([3., 0., 1., 4., 2., 0., 0., 1., 1., 0.])
    assert found(tree, [0, 2.5, 3, 3.5, 4, 8, 10, 11, 11.5, 12, 99]).tolist() == [0, 0, 2, 2, 3, 4, 7, 8, 8, 8, 8]


def test_an_empty_tree_stays_within_bounds():
    slots = np.empty(50, np.int64)
    find(new_tree(1000), np.linspace(0, 1, 50), slots)
    assert (slots == 3).all()               # in the first line: callers draw uniformly where all is zero


def test_no_drift():
    "The tree after 10⁷ updates over 24 decades is the tree built afresh, bit for bit"
    rng, n = np.random.default_rng(0), 777
    tree = new_tree(n, lows=True)
    for _ in range(5000):
        slots, weights = rng.integers(0, n, 2000), 10**rng.uniform(-12, 12, 2000)
        tree[leaf_numbers(tree)[slots]] = weights
        resum_many(tree, slots)
    assert (tree == grown(leaves(tree), lows=True)).all()
    tree[leaf_numbers(tree)] = 0
    resum_run(tree, 0, n)
    assert tree[7] == 0


def test_the_check_can_fail():
    for at in (7, 8, 17):
        tree = grown(np.arange(1., 30.), lows=True)
        check(tree)
        tree[at] += 1e-9
        with pytest.raises(AssertionError): check(tree)
    for at in (ends_at(tree) + 9, lows_at(tree) + 9):
        tree = grown(np.arange(1., 30.), lows=True)
        tree[at] *= 2
        with pytest.raises(AssertionError): check(tree)


@pytest.mark.parametrize('exponent', [0., .1, .4, .6, .7, 1., 1.5, 2.])
def test_power(exponent):
    x = np.concatenate([10**np.random.default_rng(1).uniform(-40, 40, 3000), [1e-300, .5, 1, 2, 3, 1e150]])
    ours, right = np.array([power(float(o), exponent) for o in x]), x**exponent
    fits = (right > 1e-300) & (right < 1e290)
    assert np.allclose(ours[fits], right[fits], rtol=2e-13, atol=0)
    decent = fits & (np.abs(np.log(x)) < 30)
    assert np.allclose(ours[decent], right[decent], rtol=1e-14, atol=0)
    assert power(1., exponent) == 1 and power(0., exponent) == 0.**exponent


def test_power_is_held_within_what_can_be_added_up():
    assert power(5e-324, 2.) == power(1e-300, 2.) == 2.**-1000 > 0
    assert power(1e300, 5.) == 2.**980 and np.isfinite(power(1e300, 5.)*1e10)


def test_count_reached_is_its_plain_twin():
    from numba import njit
    from fastrl_replay import sumtree
    rng = np.random.default_rng(0)
    tree = new_tree(100)[:32]
    compiled = njit(lambda a, i, x: count_reached(a, np.uint64(i), x))
    for _ in range(100):
        tree[:] = np.sort(rng.integers(0, 9, 32))
        tree[rng.integers(0, 32):] = np.inf
        for i in (0, 8, 24):
            x = float(rng.integers(0, 9))
            assert compiled(tree, i, x) == sumtree._count_reached_plain(tree, i, x) == sum(tree[i:i+8] <= x)
