"""What a call costs stays level as memories grow: counted, not timed. How many rows, slots and blocks are looked at, how often the
system is asked, what is allocated, and how many kernels are compiled, for a memory and for one of sixteen times its size."""
import sys
import tracemalloc
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.hindsight import HindsightReplay
from fastrl_replay.samplers.age import AgeWeighted, mass_left
from fastrl_replay.samplers.eligible import Eligible, last_before
from fastrl_replay.samplers.more import ERE, Combined, draw_recent
from fastrl_replay.samplers.rng import Rng
from fastrl_replay.steps import Transition
from fastrl_replay.storage import base, episodes, rooms
from fastrl_replay.storage.base import Accepted, Streams
from fastrl_replay.storage.choice import strings_in, tables_of

pytestmark = pytest.mark.filterwarnings('ignore:overflow')        # of random numbers, which kernels make modulo 2^64
SMALL, LARGE = 2_000, 32_000


class Looks:
    "An array that counts how often an item of it is read, as a kernel does that runs in Python"
    def __init__(self, array): self.array, self.n = np.asarray(array), 0
    def __len__(self): return len(self.array)
    def __getitem__(self, k):
        self.n += 1
        return self.array[k]
    def __setitem__(self, k, v): self.array[k] = v


def is_level(count, most=1.5):
    "The counts of a small memory and of a large one, which must not be more"
    small, large = count(SMALL), count(LARGE)
    assert 0 < large <= most*small + 8, f'{small} for {SMALL} rows, {large} for {LARGE}'


def steps(n, episode=100):
    "`n` transitions as stacked arrays, in episodes of one stream"
    k = np.arange(n)
    s = k[:, None].repeat(3, 1).astype(np.float32)
    return Transition(s, k % 4, s[:, 0], s + 1, k % episode==episode - 1, np.zeros(n, bool))


def filled(n, sampler=None, episode=100, **options):
    memory = ReplayMemory(n, sampler, seed=0, **options)
    memory.extend(steps(n, episode), streams='one')
    return memory


def left_of(n, share, rng):
    "Of `n` slots, some share may not be drawn any more"
    eligible = Eligible(n)
    eligible.take_out(np.flatnonzero(rng.random(n) < share), n)
    return eligible


# ---- what was dropped

@pytest.mark.parametrize('strategy', episodes.STRATEGIES)
@pytest.mark.parametrize('share', [.5, .9])
def test_hindsight_in_one_long_episode(strategy, share):
    "Half or nine tenths of it dropped: as many looks as draws, whatever the length"
    def count(n):
        rng = np.random.default_rng(1)
        memory, eligible = filled(n, episode=n), left_of(n, share, rng)
        index = memory.episode_index()
        tables, held, slots = index.catch_up(), Looks(eligible.held), rng.integers(0, n*9//10, 64)
        kind = episodes.STRATEGIES.index(strategy)
        episodes._choose.py_func(tables, slots, kind, Rng(0).words, n, held, np.empty(64, np.int64))
        return held.n
    is_level(count)


def test_windows_before_a_dropped_row():
    def count(n):
        rng = np.random.default_rng(2)
        index, eligible = filled(n).episode_index(), left_of(n, .02, rng)
        slots = np.flatnonzero(eligible.holds(np.arange(n)))[-64:]
        held, shape = Looks(eligible.held), (64, 3)
        episodes._look_around.py_func(index.catch_up(), slots, np.array([-1, 0, 7]), held, np.empty(shape, np.int64), np.empty(shape, bool))
        return held.n
    is_level(count)


@pytest.mark.parametrize('share', [.001, .5, .99])
def test_ere_after_a_drop(share):
    "Of blocks of 512 slots the counts are read, of slots those that are drawn, and two blocks"
    def count(n):
        eligible = left_of(n, share, np.random.default_rng(3))
        if eligible.all: eligible.take_out(np.array([5]), n)
        places, blocks = Looks(eligible.places), Looks(eligible.blocks)
        draw_recent.py_func(np.empty(64, np.int64), Rng(0).words, n - 1, n*9//10, n, eligible.slots[:eligible.among(n)], places, blocks)
        assert blocks.n <= 2*n/512 + 8 or share==.99
        return places.n
    is_level(count, most=2)


def test_combined_when_the_newer_half_is_dropped():
    def count(n):
        eligible = Eligible(n)
        eligible.take_out(np.arange(n//2, n), n)
        places, blocks = Looks(eligible.places), Looks(eligible.blocks)
        assert last_before.py_func(places, blocks, n - 1, n)==n//2 - 1 and blocks.n <= n/512 + 2
        return places.n - blocks.n                         # beside one slot a block
    is_level(count)


def test_ages_after_a_drop():
    def count(n):
        eligible = left_of(n, .5, np.random.default_rng(4))
        places = Looks(eligible.places)
        mass_left.py_func(places, eligible.blocks, eligible.among(n), n - 1, n, n, n/2, .1)
        return places.n
    is_level(count)


# ---- rows that are each a stream of their own

def test_a_part_of_a_chunk_allocates_what_it_has():
    "A part of 64 rows of a chunk, whose streams are its numbers, made numbers for the whole chunk"
    def count(n):
        rows = Accepted([np.zeros(n, np.float32)], n)
        tracemalloc.start()
        part = rows[n - 64:]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert part.streams.tolist()==[*range(n - 64, n)]
        return peak
    is_level(count)


def test_streams_that_are_positions_need_no_table():
    memory = filled(LARGE)
    table = memory._shelf.storage.streams.table
    for _ in range(3): memory.extend(steps(LARGE))
    assert memory._shelf.storage.streams.table is table and len(table)==128 and memory.check_valid()


def test_a_table_is_moved_once_for_each_doubling(monkeypatch):
    moved = []
    monkeypatch.setattr(Streams, 'make_room', lambda self, first_id, make=Streams.make_room: (moved.append(len(self.table)), make(self, first_id)))
    whose = np.random.default_rng(5).integers(-2**60, 2**60, LARGE)
    memory = ReplayMemory(LARGE)
    memory.extend(steps(LARGE), streams=whose)
    assert len(moved)==len(set(moved)) <= np.log2(LARGE) and len(memory._shelf.storage.streams.table) < 20*LARGE


def test_a_search_in_the_table_looks_at_few_places():
    def count(n):
        streams = Streams()
        whose = np.random.default_rng(6).integers(-2**60, 2**60, n)
        streams.link(whose, np.zeros((n, 2), np.int32), 0, np.zeros((n, 2), np.int32), 0, n)
        table = Looks(streams.table)
        for o in whose[:200].tolist(): base.find_place(table, streams.shift, o)
        return table.n
    is_level(count)


# ---- strings

class Told(NamedTuple):
    x: Any
    task: Any


def test_new_strings_ask_for_free_memory_once_a_megabyte(monkeypatch):
    asked = []
    monkeypatch.setattr(rooms, 'free_memory', lambda: asked.append(1) or 1 << 40)
    memory = ReplayMemory(5000)
    for k in range(5000): memory.add(Told(0., f'task {k}'))
    assert len(asked) < 10


def test_a_question_about_strings_is_one_about_distinct_ones():
    def count(n):
        memory = ReplayMemory(n)
        memory.extend(Told(np.zeros(n), np.array([f'task {k % 7}' for k in range(n)], object)))
        strings, at = strings_in(memory._shelf.storage, 'task', np.arange(n))
        assert strings[at].tolist()==memory.recent(n).task
        return len(strings)
    is_level(count)


# ---- what is packed

def test_usage_of_packed_frames_looks_at_none():
    pytest.importorskip('lz4')
    class Counted(list):
        def __iter__(self): raise AssertionError('all frames were looked at')
    rng, memory = np.random.default_rng(7), ReplayMemory(40, seed=0, dedup='frames', codec='lz4')
    planes = rng.integers(0, 9, (200, 20, 20), np.uint8)
    for k in range(150):
        memory.add(Transition(planes[k:k + 4], 0, 0., planes[k + 1:k + 5], False, False))
        [table] = tables_of(memory._shelf.storage)
        assert table.n_packed==sum(map(len, list.copy(table.packed)))
    memory.load_state_dict(memory.state_dict())
    [table] = tables_of(memory._shelf.storage)
    assert table.n_packed==sum(map(len, table.packed))
    table.packed = Counted(table.packed)
    assert memory.usage()['nbytes'] > table.n_packed > 0


# ---- kernels

def compiled():
    "How many specializations of the package's kernels there are"
    found = {id(o): o for name, module in list(sys.modules.items()) if name.startswith('fastrl_replay') for o in list(vars(module or sys).values())
             if isinstance(o, Dispatcher)}
    return {o.py_func.__qualname__: len(o.overloads) for o in found.values() if o.overloads}


def use(n, m, bs):
    "Memories of `n` rows with much that was dropped, chunks of `m` rows, batches of `bs`"
    for sampler in (None, ERE(c_min=5), Combined(), AgeWeighted(50)):
        memory = filled(n, sampler)
        index = memory.episode_index()
        for share in (0, 1/n, .3, .5):
            memory.drop(np.unique(np.random.default_rng(n).integers(0, n, int(share*n))) + memory.first_id)
            memory.extend(Transition(*(o[:m] for o in steps(max(m, 2)))))
            memory.extend(Transition(*(o[:m] for o in steps(max(m, 2)))), streams=np.arange(m) << 40)
            batch = memory.sample(bs)
            memory.sample(bs, windows={'state': (-1, 0), 'action': range(m)})
            memory.sample(bs, windows={'action': (0, -3)}, fields=('action', 'reward'))
            slots = batch.ids.numpy() % n
            index = memory.episode_index()
            for strategy in episodes.STRATEGIES: index.choose(slots, strategy, memory.rng, memory.sampler.eligible)
            shape = len(slots), 2
            index.around(slots, np.array([0, 1]), np.empty(shape, np.int64), np.empty(shape, bool), memory.sampler.eligible)
        memory.check_valid()


def test_no_size_and_no_share_compiles_a_kernel_again():
    use(300, 3, 8)
    before = compiled()
    for n, m, bs in ((40, 1, 4), (700, 64, 32), (5000, 4500, 256)): use(n, m, bs)
    assert compiled()==before and sum(before.values()) > 20


# ---- hindsight, as a whole

def test_hindsight_draws_as_many_numbers_after_a_drop(monkeypatch):
    "The pipe, not the kernel: no episode is listed"
    monkeypatch.setattr(episodes.EpisodeIndex, 'ids_of', lambda *o: pytest.fail('an episode was listed'))
    def state(i): return dict(observation=i[:, None], achieved_goal=i[:, None], desired_goal=0*i[:, None])
    i = np.arange(3000, dtype=np.float32)
    chunk = Transition(state(i), np.zeros(3000, int), i, state(i + 1), np.zeros(3000, bool), np.zeros(3000, bool))
    replay = HindsightReplay([], lambda a, d, info: np.zeros(len(a)), bs=64, max_sz=3000, seed=0)
    replay.extend(chunk, streams='one')
    dropped = np.random.default_rng(0).permutation(3000)[:1500]
    replay.memory.drop(dropped)
    for _ in range(5):
        batch = replay.sample()
        goals = batch.state['desired_goal'][batch.relabelled, 0].numpy() - 1
        assert not np.isin(goals, dropped).any() and (goals >= batch.ids[batch.relabelled].numpy()).all()


def test_a_drop_after_clear_looks_at_what_is_dropped(monkeypatch):
    "Each listed all rows that had been cleared"
    def count(n):
        memory, seen = filled(n), []
        memory.clear()
        memory.extend(steps(100), streams='one')
        memory.drop([memory.n_added - 1])
        monkeypatch.setattr(Eligible, 'holds', lambda self, slots, real=Eligible.holds: (seen.append(np.size(slots)), real(self, slots))[1])
        memory.drop([memory.n_added - 2])
        monkeypatch.undo()
        return sum(seen)
    is_level(count)
