"""What may be drawn beside a twin that is a set: the list, the counts of its blocks, the last before a slot, any one by its number, and
the draws of ERE from a window of which much is gone."""
import copy
import pickle
from collections import Counter

import numpy as np
import pytest

from fastrl_replay.samplers.eligible import BLOCK, Eligible, count_between, may_draw, nth_from
from fastrl_replay.samplers.more import draw_recent
from fastrl_replay.samplers.rng import Rng

SIZES = 1, 7, BLOCK, BLOCK + 1, 3*BLOCK - 5


def check(eligible, twin, size):
    "Compare everything that may be asked"
    assert eligible.among(size)==len(twin) and eligible.check_valid(np.arange(size), size)
    there = np.isin(np.arange(size), [*twin])
    np.testing.assert_array_equal(eligible.holds(np.arange(size)), there)
    assert [bool(may_draw(eligible.held, o)) for o in range(size)]==there.tolist()
    if eligible.all: return
    below = np.concatenate([[0], np.cumsum(there)])
    numbers = np.concatenate([[0], np.cumsum(there*np.arange(size))])
    some = np.unique(np.r_[0, size, np.random.default_rng(size).integers(0, size + 1, 8)])
    for a in some:
        for b in some[some >= a]:
            found = count_between(eligible.places, eligible.blocks, int(a), int(b))
            assert found==(below[b] - below[a], numbers[b] - numbers[a])
    order = sorted(twin)
    for slot in some[(some < size)].tolist() if order else []:
        assert eligible.last(slot, size)==max((o for o in order if o <= slot), default=order[-1])
        turned = [o for o in order if o >= slot] + [o for o in order if o < slot]
        for n in {0, len(order)//2, len(order) - 1}:
            assert nth_from(eligible.places, eligible.blocks, slot, n)==turned[n]


@pytest.mark.parametrize('size', SIZES)
def test_the_list_and_its_blocks_know_what_a_set_knows(size):
    rng, eligible, twin = np.random.default_rng(size), Eligible(size), set(range(size))
    for k in range(20):
        if rng.random() < .6:
            gone = rng.integers(0, size, int(rng.integers(1, max(2, size//2))))
            if rng.random() < .3: gone = np.arange(*np.sort(rng.integers(0, size + 1, 2)))
            eligible.take_out(gone, size)
            twin -= set(gone.tolist())
        else:
            first, m = int(rng.integers(size)), int(rng.integers(0, size + 1))
            eligible.put_in(first, m)
            twin |= {o % size for o in range(first, first + m)}
        if k % 4==0: eligible = [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o)), lambda o: Eligible.of(size, o.to_plain())][k//4 % 3](eligible)
        check(eligible, twin, size)


WINDOWS = dict(whole=(1.5, 0, 2*BLOCK), few=(.01, 0, 2*BLOCK), narrow=(.5, BLOCK//2, 60), seam=(.5, 10, 100), others=(.02, 30, 120))

@pytest.mark.parametrize('name', WINDOWS)
def test_what_is_left_of_a_window_is_drawn_with_equal_chances(name):
    "From the window or from the list, whichever is shorter, and where both take too many tries, by number"
    share, newest, window = WINDOWS[name]
    size, rng = 2*BLOCK, np.random.default_rng(5)
    eligible = Eligible(size)
    gone = np.flatnonzero(rng.random(size) >= share)
    eligible.take_out(gone[gone!=3], size)
    if name=='others': eligible.take_out(np.setdiff1d((newest - np.arange(window)) % size, [3]), size)
    if eligible.all: eligible.take_out(np.array([5]), size)
    among = {int(o) for o in (newest - np.arange(window)) % size if eligible.holds(np.array([o]))[0]}
    slots, n = np.empty(max(4000, 60*len(among)), np.int64), eligible.among(size)
    found = draw_recent(slots, Rng(1).words, newest, window, size, eligible.slots[:n], eligible.places, eligible.blocks)
    seen, expected = Counter(slots.tolist()), len(slots)/max(1, len(among))
    assert found==len(among) and seen.keys()==among
    chi = sum((seen[o] - expected)**2/expected for o in among)
    assert chi < len(among) + 6*np.sqrt(2*len(among)) + 6


def test_a_window_of_which_nothing_is_left_is_told():
    eligible, slots = Eligible(40), np.full(8, -7)
    eligible.take_out(np.arange(20, 40), 40)
    assert draw_recent(slots, Rng(0).words, 39, 15, 40, eligible.slots[:20], eligible.places, eligible.blocks)==0 and (slots==-7).all()


def test_one_slot_that_is_left_far_from_the_newest_is_found_by_number():
    "Neither the window nor the list is short: 10,000 slots, of which the window has one"
    eligible, slots = Eligible(20_000), np.empty(64, np.int64)
    eligible.take_out(np.setdiff1d(np.arange(10_000, 20_000), [12_345]), 20_000)
    n = eligible.among(20_000)
    assert draw_recent(slots, Rng(0).words, 19_999, 10_000, 20_000, eligible.slots[:n], eligible.places, eligible.blocks)==1
    assert (slots==12_345).all()
