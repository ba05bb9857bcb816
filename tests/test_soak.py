"""Everything at once, for 20 seconds; `pytest tests/test_soak.py --soak 1800` takes half an hour. See soak.py"""
import os
import random
import statistics

import pytest
from soak import Soak, Wrong, soak
from words import WORDS

ROUNDS, BYTES = 5, 30e6          # rounds by which a level is known; by how much it may vary


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork on this system')
def test_everything_at_once(pytestconfig, capsys):
    def say(text):
        with capsys.disabled(): print(text, flush=True)
    seconds = pytestconfig.getoption('--soak')
    counts, levels = soak(seconds, say=say if seconds > 20 else lambda text: None)
    if seconds > 20: say(counts)
    done = set().union(*counts.values())
    assert {'write', 'draw', 'look', 'keep', 'copy', 'fork', 'fork 0', 'drop', 'correct', 'mix'} <= done, counts
    assert all(o['draw'] for o in counts.values()), counts
    nbytes, descriptors = zip(*levels)
    assert descriptors[-1]==descriptors[0], f'open descriptors after each round: {descriptors}'
    quarter = len(levels)//4
    if quarter >= ROUNDS:            # level at the end: threads and kernels take their room at the beginning
        before, last = (statistics.median(nbytes[a:b]) for a, b in ((-2*quarter, -quarter), (-quarter, None)))
        assert last < before + BYTES, f'bytes in use after each round: {nbytes}'


# ---- the soak itself notices

@pytest.fixture
def one(tmp_path):
    made = []
    def make(kind):
        made.append(Soak(kind, tmp_path, 0))
        return made[-1]
    yield make
    for o in made: o.memory.close()


def test_it_notices_other_rows(one):
    o = one('uniform')
    o.twin[o.memory.n_added - 1] += 1
    with pytest.raises(Wrong, match=WORDS['a serial']): o.check_memory(o.memory)


def test_it_notices_torn_rows(one):
    o = one('uniform')
    rows = o.memory.recent(3)
    rows.state[1, 2] += 1
    with pytest.raises(Wrong, match=WORDS['a state of rows']): o.check_rows(rows)


@pytest.mark.parametrize('kind', ['proportional', 'lz4', 'disk'])
def test_it_notices_priorities_of_other_rows(one, kind):
    o = one(kind)
    o.check_memory(o.memory)
    o.memory.update_priorities([o.memory.n_added - 1], [99.])
    with pytest.raises(Wrong, match=WORDS['other priorities']): o.check_memory(o.memory)


def test_it_notices_windows_that_jump(one):
    o = one('sequences')
    batch = o.memory.sample(2)
    o.draw_windows(batch, [], random.Random(0))
    batch.serial[0, 1] += 1
    with pytest.raises(Wrong, match=WORDS['a window that jumps']): o.draw_windows(batch, [], random.Random(0))


def test_it_notices_a_batch_that_changes(one):
    o, held = one('frames'), []
    for _ in range(21): o.draw(held, random.Random(0))
    held[0][0].serial[0] += 1
    with pytest.raises(Wrong, match=WORDS['a held batch']): o.recheck(held)

