"Links along streams: beside a naive twin, with more new streams in a chunk than the table has room for"
import copy
from typing import Any, NamedTuple

import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.storage.base import Streams, find_place
from words import WORDS


class Numbered(NamedTuple):
    state: Any
    env_id: Any


class Twin:
    "The rows of each stream, in the order of time"
    def __init__(self, max_sz): self.max_sz, self.whose, self.rows = max_sz, [], {}
    def add(self, stream):
        self.rows.setdefault(stream, []).append(len(self.whose))
        self.whose.append(stream)
    def links(self):
        "Of each living row, the rows before and after it in its stream; −1 where there is none"
        first, before, after = max(0, len(self.whose) - self.max_sz), {}, {}
        for rows in self.rows.values():
            for a, b in zip(rows, rows[1:]): before[b], after[a] = a, b
        ids = range(first, len(self.whose))
        return [max(before.get(i, -1), first - 1) if before.get(i, -1) >= first else -1 for i in ids], [after.get(i, -1) for i in ids]


def agree(memory, twin):
    ids = np.arange(memory.first_id, memory.n_added)
    before, after = twin.links()
    np.testing.assert_array_equal(memory.previous(ids), before)
    np.testing.assert_array_equal(memory.next(ids), after)
    assert memory.check_valid()


# --- links that an earlier version lost ------------------------------------------------------------------------------
def lose_links(memory, rng):
    "What filling the table in mid-chunk did: rows say that none follows, though the next one leads back to them"
    links = memory._shelf.storage.links
    at = np.flatnonzero(links[:, 1])
    at = rng.permutation(at)[:len(at)//2 + 1]
    links[at, 1] = 0
    with pytest.raises(AssertionError, match=WORDS['wrong links']): memory.check_valid()


def filled(max_sz, path=None, steps=700):
    memory, twin = ReplayMemory(max_sz, path=path), Twin(max_sz)
    streams = np.arange(steps) % 48
    memory.extend(Numbered(np.zeros(steps, np.float32), streams))
    for s in streams.tolist(): twin.add(s)
    return memory, twin


@pytest.mark.parametrize('max_sz', [500, 1000])
@pytest.mark.parametrize('how', ['folder', 'state', 'path', 'copy'])
def test_a_memory_saved_with_lost_links_is_settled_at_loading(how, max_sz, tmp_path):
    memory, twin = filled(max_sz, tmp_path/'m' if how == 'path' else None)
    lose_links(memory, np.random.default_rng(0))
    if how == 'folder':
        memory.save(tmp_path/'saved')
        memory = ReplayMemory.load(tmp_path/'saved')
    elif how == 'state':
        state, memory = memory.state_dict(), ReplayMemory(max_sz)
        memory.load_state_dict(state)
    elif how == 'path':
        memory.close()
        memory = ReplayMemory.open(tmp_path/'m')
    else: memory = copy.deepcopy(memory)
    agree(memory, twin)
    for k in range(60):
        memory.add(Numbered(0., k % 50))
        twin.add(k % 50)
    agree(memory, twin)


# --- the table of streams --------------------------------------------------------------------------------------------
class Counting(list):
    "A table that counts how often a key is looked at"
    looks = 0
    def __getitem__(self, k):
        self.looks += k % 2 == 0
        return super().__getitem__(k)


def series():
    for shift in (0, 1, 8, 15, 16, 20, 31, 32, 33, 40, 48, 56): yield f'multiples of 2^{shift}', [k << shift for k in range(min(2000, 1 << 63 - shift))]
    for high, low in ((16, 0), (32, 0), (32, 16), (44, 0), (48, 32)): yield f'pairs {high}, {low}', [(i << high) + (j << low) for i in range(45) for j in range(45)]
    yield 'negative', [-k << 32 for k in range(2000)]
    yield 'both halves', [(k << 32) + k for k in range(2000)]
    yield 'odd steps', [k*1_000_003 for k in range(2000)]
    yield 'any', np.random.default_rng(0).integers(-2**63, 2**63, 2000).tolist()

SERIES = dict(series())


@pytest.mark.parametrize('name', SERIES)
def test_streams_are_found_at_once_whatever_their_numbers_have_in_common(name):
    "Of numbers that share their lower bits, all searches began at one place, and each passed all the others"
    streams, some = SERIES[name], Streams()
    some.link(np.array(streams), np.zeros((len(streams), 2), np.int32), 0, np.zeros((1, 2), np.int32), 0, 1)
    table = Counting(some.table.tolist())
    for k, s in enumerate(streams): assert table[find_place(table, some.shift, s) + 1] == k + 1
    assert table.looks < 1.6*len(streams)
