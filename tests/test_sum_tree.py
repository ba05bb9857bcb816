"The sum tree beside cumulative sums, over random operations on awkward sizes and 24 decades of magnitude"
import numpy as np
import pytest
from numba import njit

from fastrl_replay.samplers import sum_tree
from fastrl_replay.samplers.sum_tree import (
    CAPACITY, FIRST, NO_LOWS, ROOT, clear_sums, count_reached, leaf_lines, new_lows, new_tree, tree_shape)

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 63, 100, 129, 255, 257, 1000, 2049]


@njit
def resum_run(tree, lows, start, stop): sum_tree.resum_run(tree, lows, start, stop)
@njit
def resum_many(tree, lows, lines): sum_tree.resum_many(tree, lows, lines, lines.shape[0])
@njit
def find(flat, targets, slots): sum_tree.find(flat, targets, slots)
@njit
def power(x, exponent): return sum_tree.power(x, exponent)


def check(tree, lows=NO_LOWS):
    "Every node that is in use is the sum of its children in order, its ends and low are theirs"
    first, capacity = int(tree[0, FIRST]), int(tree[0, CAPACITY])
    lines = -(-capacity//4)
    assert (first, lines) == tree_shape(capacity) and tree.shape == (2*first + lines, 8) and tree.ctypes.data % 64 == 0
    left, right = first, first + lines - 1
    while left:
        for line in range(left, right + 1):
            n = 4 if line >= first else 8
            up, sums = divmod(line + 6, 8), np.cumsum(tree[line, :n])
            assert tree[up] == sums[-1] >= 0, line
            assert n == 4 or (tree[first + lines + line] == sums).all(), line
            if lows is not NO_LOWS:
                below = tree[line, :4] if n == 4 else lows[line]
                assert lows[up] == min((o for o in below if o > 0), default=np.inf), line
        left, right = (left + 6) >> 3, (right + 6) >> 3


def put(tree, slots, weights):
    "The weights, the last of duplicates, without their sums; the lines they lie in"
    for s, w in zip(slots, weights): leaf_lines(tree)[s//4, s % 4] = w
    return int(tree[0, FIRST]) + np.asarray(slots, np.int64)//4


def leaves(tree): return leaf_lines(tree)[:, :4].reshape(-1)[:int(tree[0, CAPACITY])]


def grown(weights, with_lows=False):
    tree = new_tree(len(weights))
    lows = new_lows(tree) if with_lows else NO_LOWS
    put(tree, range(len(weights)), weights)
    resum_run(tree, lows, 0, len(weights))
    return tree, lows


def found(tree, targets):
    targets, slots = np.array(targets, float), np.empty(len(targets), np.int64)
    find(tree.reshape(-1), targets, slots)
    return slots


def some_weights(rng, n):
    "Zeros, equals, and 24 decades"
    return np.where(rng.random(n) < .3, 0., 10**rng.uniform(-12, 12, n) if rng.random() < .5 else rng.integers(0, 4, n))


@pytest.mark.parametrize('n,with_lows', [(n, k % 2==0) for k, n in enumerate(SIZES)])
def test_beside_cumulative_sums(n, with_lows):
    rng = np.random.default_rng(n)
    tree, twin = new_tree(n), np.zeros(n)
    lows = new_lows(tree) if with_lows else NO_LOWS
    for _ in range(40 if n < 300 else 8):
        k = int(rng.integers(1, 2*n + 2))
        if rng.random() < .5:
            slots, weights = rng.integers(0, n, k), some_weights(rng, k)
            for s, w in zip(slots, weights): twin[s] = w
            resum_many(tree, lows, put(tree, slots, weights))
        else:
            start = int(rng.integers(0, n)); stop = int(rng.integers(start + 1, n + 1))
            twin[start:stop] = some_weights(rng, stop - start)
            put(tree, range(start, stop), twin[start:stop])
            resum_run(tree, lows, start, stop)
        check(tree, lows)
        total = twin.sum()
        assert np.isclose(tree[0, ROOT], total, rtol=1e-12, atol=0)
        if with_lows: assert lows[0, ROOT] == min(twin[twin > 0], default=np.inf)
        if total == 0: continue
        cumulative, targets = twin.cumsum(), rng.random(300)*tree[0, ROOT]
        slots = found(tree, targets)
        assert (twin[slots] > 0).all()
        before = np.where(slots > 0, cumulative[slots - 1], 0.)
        assert (before <= targets + 1e-12*total).all() and (targets <= cumulative[slots] + 1e-12*total).all()


def test_no_drift():
    "The tree after 10⁷ updates over 24 decades is the tree built afresh, bit for bit"
    rng, n = np.random.default_rng(0), 777
    tree = new_tree(n)
    lows = new_lows(tree)
    for _ in range(5000):
        slots, weights = rng.integers(0, n, 2000), 10**rng.uniform(-12, 12, 2000)
        leaf_lines(tree)[slots//4, slots % 4] = weights
        resum_many(tree, lows, int(tree[0, FIRST]) + slots//4)
    again, low_again = grown(leaves(tree), True)
    assert (tree == again).all() and (lows == low_again).all()
    clear_sums(again, low_again)
    assert again[0, ROOT] == 0 and (leaves(again) == leaves(tree)).all() and np.isinf(low_again).all()
    leaf_lines(tree)[:] = 0
    resum_run(tree, lows, 0, n)
    assert tree[0, ROOT] == 0


@pytest.mark.parametrize('exponent', [0., .1, .4, .6, .7, 1., 1.5, 2.])
def test_power(exponent):
    x = np.concatenate([10**np.random.default_rng(1).uniform(-40, 40, 3000), [1e-300, .5, 1, 2, 3, 1e150]])
    ours, right = np.array([power(float(o), exponent) for o in x]), x**exponent
    fits = (right > 1e-300) & (right < 1e290)
    assert np.allclose(ours[fits], right[fits], rtol=2e-13, atol=0)
    decent = fits & (np.abs(np.log(x)) < 30)
    assert np.allclose(ours[decent], right[decent], rtol=1e-14, atol=0)
    assert power(1., exponent) == 1 and power(0., exponent) == 0.**exponent


def test_count_reached_is_the_same_in_a_kernel():
    rng = np.random.default_rng(0)
    flat = new_tree(100).reshape(-1)[:32]
    compiled = njit(lambda a, i, x: count_reached(a, np.uint64(i), x))
    for _ in range(100):
        flat[:] = np.sort(rng.integers(0, 9, 32))
        flat[rng.integers(0, 32):] = np.inf
        for i in (0, 8, 24):
            x = float(rng.integers(0, 9))
            assert compiled(flat, i, x) == count_reached(flat, i, x) == sum(flat[i:i+8] <= x)
