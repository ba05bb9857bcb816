"""The index of episodes beside a twin that keeps every row ever stored and walks: four patterns of streams, wrapped rings,
steps of one and of several time steps, whole streams, memories that are loaded, corrected, reopened, interrupted."""
import copy
from bisect import bisect_left
from typing import Any, NamedTuple

import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.eligible import Eligible
from fastrl_replay.samplers.rng import Rng
from fastrl_replay.storage.episodes import EpisodeIndex
from words import WORDS


class Numbered(NamedTuple):
    x: Any
    terminated: Any
    truncated: Any
    step_n: Any
    episode_n: Any

class Flagged(NamedTuple):
    x: Any
    terminated: Any
    truncated: Any

class Several(NamedTuple):       # n-step transitions with numbers: the last n of an episode are flagged
    x: Any
    terminated: Any
    truncated: Any
    step_n: Any
    episode_n: Any
    discount: Any

class Discounted(NamedTuple):    # and without
    x: Any
    terminated: Any
    truncated: Any
    discount: Any

KINDS = [Numbered, Flagged, Several, Discounted]
N, GAMMA = 3, .9


class World:
    "EpisodeIndex of random lengths in streams; it knows of each row whose episode it belongs to"
    def __init__(self, seed, kind, mean=12., leave=.0):
        self.rng, self.kind, self.mean, self.leave = np.random.default_rng(seed), kind, mean, leave
        self.left, self.rows, self.newest, self.episodes = {}, [], {}, 0

    def row(self, stream):
        "The next row of a stream"
        left, step_n, number = self.left.get(stream, (0, 0, 0))
        if left==0:
            self.episodes += 1
            left, step_n, number = int(self.rng.geometric(1/self.mean)), 0, self.episodes
        several = self.kind in (Several, Discounted)
        flagged = left <= (N if several else 1)
        by_name = dict(x=len(self.rows), terminated=flagged and number % 2==0, truncated=flagged and number % 2==1, step_n=step_n,
                       episode_n=number, discount=np.float32(GAMMA)**min(N, left))
        if self.kind is Numbered and left==1 and self.rng.random() < .3:         # left without a flag
            by_name.update(terminated=False, truncated=False)
        self.left[stream] = left - 1, step_n + 1, number
        self.rows.append((stream, number))
        return self.kind(*(by_name[o] for o in self.kind._fields))


PATTERNS = dict(
    one=lambda m, r: np.zeros(m, int), lockstep=lambda m, r: np.arange(m) % 16,
    chunks=lambda m, r: np.repeat(r.integers(0, 8, -(-m//16)), 16)[:m], random=lambda m, r: r.integers(0, 12, m),
    fresh=lambda m, r: r.integers(0, 1 << 40, m))              # nearly each row a stream of its own


def stored(world, max_sz, across=False):
    "Ids of the stored rows of each episode (or stream)"
    n, found = len(world.rows), {}
    for id in range(max(0, n - max_sz), n): found.setdefault(world.rows[id][not across], []).append(id)
    return found


def check(index, world, across=False):
    max_sz, n = index.storage.max_sz, len(world.rows)
    found, where = stored(world, max_sz, across), {}
    for ids in found.values():
        for k, id in enumerate(ids): where[id] = ids, k
    ids = np.arange(max(0, n - max_sz), n)
    before, after = index.counts(ids % max_sz)
    assert before.tolist()==[where[o][1] for o in ids.tolist()]
    assert after.tolist()==[len(where[o][0]) - 1 - where[o][1] for o in ids.tolist()]
    offsets = [0, 1, -1, 5, -9, 40, -max_sz, max_sz]
    want = [[run[k + o] if 0 <= k + o < len(run) else -1 for o in offsets] for run, k in (where[o] for o in ids.tolist())]
    np.testing.assert_array_equal(index.window(ids % max_sz, offsets), np.array(want).reshape(len(ids), -1))
    for id in ids[::max(1, len(ids)//7)].tolist(): assert index.ids_of(id % max_sz).tolist()==where[id][0]
    assert index.check_valid()
    slots, rng = np.repeat(ids, 3) % max_sz, Rng(n)
    for id, o in zip(np.repeat(ids, 3).tolist(), index.choose(slots, 'future', rng).tolist()): assert o in where[id][0] and o >= id
    for id, o in zip(np.repeat(ids, 3).tolist(), index.choose(slots, 'episode', rng).tolist()): assert o in where[id][0]
    assert index.choose(ids % max_sz, 'final', rng).tolist()==[where[o][0][-1] for o in ids.tolist()]
    for share in (0., .5, .97): check_left(index, where, ids, max_sz, np.random.default_rng(n).random(len(ids)) < share)


class Reach:
    "Of a run of ids: those that are left, and of each place how far back and on from it the ids beside it are left"
    def __init__(self, run, left):
        n = len(run)
        self.kept, self.first, self.last = [o for o in run if o in left], [*range(n)], [*range(n)]
        for k in range(1, n):
            if run[k - 1] in left: self.first[k] = self.first[k - 1]
        for k in range(n - 1)[::-1]:
            if run[k + 1] in left: self.last[k] = self.last[k + 1]


def check_left(index, where, ids, max_sz, gone):
    "The same, and windows, when some rows may not be drawn: all asks begin at rows that may, or that alone are left"
    eligible = Eligible(max_sz)
    eligible.take_out(ids[gone] % max_sz, min(index.storage.n_added, max_sz))
    left, rng, there = set(ids[~gone].tolist()), Rng(len(ids)), ids[~gone]
    runs = {run[0]: Reach(run, left) for run, k in where.values() if k==0}
    for strategy in ('future', 'episode', 'final'):
        some = np.repeat(ids, 2)
        for id, o in zip(some.tolist(), index.choose(some % max_sz, strategy, rng, eligible).tolist()):
            kept = runs[where[id][0][0]].kept
            fits = kept[bisect_left(kept, id):] if strategy=='future' else kept
            fits = fits or [id]
            assert o in (fits[-1:] if strategy=='final' else fits)
    offsets = np.array([0, -2, 3, 1, -40])
    found, is_pad = np.empty((len(there), 5), np.int64), np.empty((len(there), 5), bool)
    index.around(there % max_sz, offsets, found, is_pad, eligible)
    for id, slots, pads in zip(there.tolist(), found, is_pad):
        run, k = where[id]
        reach = runs[run[0]]
        at = np.clip(k + offsets, reach.first[k], reach.last[k])
        assert slots.tolist()==[run[o] % max_sz for o in at] and pads.tolist()==(at!=k + offsets).tolist()


def test_choices_among_few_that_are_left_are_uniform():
    "One of four of 400 steps, and three alone that nearly every draw misses"
    memory = ReplayMemory(400)
    memory.extend([Flagged(i, i==399, False) for i in range(400)])
    for left in (np.arange(0, 400, 4), np.array([7, 100, 399])):
        eligible = Eligible(400)
        eligible.take_out(np.setdiff1d(np.arange(400), left), 400)
        index, n = memory.episode_index(), 200*len(left)
        for strategy in ('future', 'episode'):
            wanted = left[1:] if strategy=='future' else left
            found = index.choose(np.full(n, left[1]), strategy, Rng(3), eligible)
            counts = np.array([(found==o).sum() for o in wanted])
            assert counts.sum()==n and ((counts - n/len(wanted))**2/(n/len(wanted))).sum() < len(wanted) + 6*np.sqrt(2*len(wanted)) + 6
        assert (index.choose(left, 'final', Rng(0), eligible)==left[-1]).all()


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('pattern', PATTERNS)
def test_the_index_knows_what_the_twin_knows(kind, pattern):
    for seed, max_sz in enumerate((1, 7, 64, 300)):
        rng, world, memory = np.random.default_rng(seed), World(seed, kind, 8. if seed % 2 else 60.), ReplayMemory(max_sz)
        index = along = None
        for _ in range(25):
            m = int(rng.choice([1, 2, 30, max_sz, 2*max_sz + 3]))
            streams = PATTERNS[pattern](m, rng)
            memory.extend([world.row(s) for s in streams.tolist()], streams=streams)
            if index is None: index, along = EpisodeIndex(memory._shelf.storage), EpisodeIndex(memory._shelf.storage, across_episodes=True)
            if rng.random() < .4: continue                   # the index lags behind, also by more than the memory holds
            check(index, world)
            check(along, world, across=True)


def test_streams_that_grow_shrink_and_vanish():
    "Each dominates for a while and then trickles, so that rings double, and places run out"
    rng, world, memory = np.random.default_rng(0), World(0, Flagged, 30.), ReplayMemory(500)
    memory.extend([world.row(0)], streams=np.zeros(1, int))
    index, used, laid_out = EpisodeIndex(memory._shelf.storage), 0, 0
    for k in range(160):
        m, busy = int(rng.integers(1, 90)), k//8
        streams = np.where(rng.random(m) < .93, busy, rng.integers(0, busy + 1, m))
        memory.extend([world.row(s) for s in streams.tolist()], streams=streams)
        index.catch_up()
        laid_out += index.tables.counts[0].used < used
        used = index.tables.counts[0].used
        assert used <= len(index.tables.places)
        if k % 9==0: check(index, world)
    assert laid_out > 0


def test_a_ring_that_doubles_keeps_its_rows():
    memory, world = ReplayMemory(2000), World(0, Flagged, 1e9)
    memory.add(world.row(0))
    index = EpisodeIndex(memory._shelf.storage)
    for k in range(1, 300):
        memory.add(world.row(0))
        slots = np.arange(k + 1)
        assert index.window(slots[-1:], -slots)[0].tolist()==slots[::-1].tolist()


def test_rows_that_come_after_billions_of_steps():
    "An episode that never ends: places wrap in 32 bits, and positions are not lost"
    memory, world = ReplayMemory(40), World(0, Flagged, 1e9)
    phases = np.full((40, 2), 2**31 - 30, np.int32)
    for _ in range(20): memory.add(world.row(0))
    index = EpisodeIndex(memory._shelf.storage, phases=phases, known=20)
    index.catch_up()
    for _ in range(6):
        for _ in range(15): memory.add(world.row(0))
        check(index, world)


def test_an_interrupted_write_is_left_out():
    "Rows are gone, and what was to overwrite them is not there"
    memory, world = ReplayMemory(50), World(0, Flagged, 20.)
    memory.extend([world.row(0) for _ in range(80)])
    storage = memory._shelf.storage
    index = EpisodeIndex(storage)
    check(index, world)
    storage._count[1] += 3                       # first_id was published
    storage.unsettled = True
    slots = np.arange(33, 80) % 50
    before, _ = index.counts(slots)
    assert (index.window(slots, -before - 1)[np.arange(47), np.arange(47)]==-1).all() and index.check_valid()
    assert min(np.concatenate([index.ids_of(s) for s in slots]))==33
    memory.extend([world.row(0) for _ in range(30)])
    check(index, world)


def test_a_slow_stream_goes_on_after_its_predecessor_is_gone():
    "Known of an overwritten row: whether it was flagged, and how many came before it"
    for flagged in (False, True):
        memory = ReplayMemory(10)
        def add(stream, end=False): memory.extend([Flagged(0, end, False)], streams=np.array([stream]))
        for _ in range(3): add(1)
        add(1, flagged)
        index = EpisodeIndex(memory._shelf.storage)
        index.catch_up()
        for _ in range(8): add(0)
        index.catch_up()
        add(1)                                   # the row before is 9 back
        for _ in range(3): add(0)                # and is overwritten before the index hears of both
        index.catch_up()
        assert index.tables.episodes[index.tables.rows[12 % 10].episode].length==(1 if flagged else 5) and index.counts(np.array([2]))[0].tolist()==[0]
        assert index.check_valid()


# ---- by a memory: rows that change under the index, and storages that keep no distances

def play(memory, world, m, streams=3):
    s = world.rng.integers(0, streams, m)
    memory.extend([world.row(k) for k in s.tolist()], streams=s)


def test_the_index_of_a_memory_follows_whatever_replaces_its_rows(tmp_path):
    "Loaded, copied, saved and loaded, on disk closed and opened, a state put into a folder that held other rows"
    one, two = (World(k, Flagged) for k in (1, 2))
    memory, disk = ReplayMemory(60), ReplayMemory(60, path=tmp_path/'m')
    for _ in range(3): play(memory, one, 50), play(disk, two, 37)
    check(memory.episode_index(), one), check(disk.episode_index(), two)
    other = copy.deepcopy(memory)
    memory.save(tmp_path/'saved')
    check(other.episode_index(), one), check(ReplayMemory.load(tmp_path/'saved').episode_index(), one)
    disk.close()
    with ReplayMemory.open(tmp_path/'m') as disk:
        check(disk.episode_index(), two)
        play(disk, two, 5)
        check(disk.episode_index(), two)
        disk.load_state_dict(memory.state_dict())                # the same storage, other rows, fewer or more
        check(disk.episode_index(), one)
        one_on_disk = copy.deepcopy(one)
        play(disk, one_on_disk, 20)
        check(disk.episode_index(), one_on_disk)
    play(memory, one, 11)
    check(memory.episode_index(), one)


def test_a_flag_that_is_corrected_is_seen_or_refused():
    from fastrl_replay.storage.sequence_sampler import Sequence
    memory = ReplayMemory(20)
    for k in range(12): memory.add(Flagged(k, k==5, False))
    assert memory.episode_ids(3).tolist()==[0, 1, 2, 3, 4, 5] and memory.next([5], within_episode=True).tolist()==[-1]
    memory.correct([2], 'truncated', True)
    memory.correct([5], 'terminated', False)
    assert memory.episode_ids(3).tolist()==list(range(3, 12)) and memory.next([2, 5], within_episode=True).tolist()==[-1, 6]
    memory.correct([8], 'terminated', True)
    assert [o.x.tolist() for o in memory.episodes()]==[[3, 4, 5, 6, 7, 8]] and memory.episode_index().check_valid()
    formed = ReplayMemory(20, sequence=Sequence(2))
    for k in range(12): formed.add(Discounted(k, False, False, .9))
    for field in ('terminated', 'discount'):
        with pytest.raises(ValueError, match=WORDS['sequences were formed']): formed.correct([2], field, 1)


def test_a_memory_checks_its_index():
    memory, world = ReplayMemory(30), World(3, Flagged)
    play(memory, world, 50)
    memory.episode_index().catch_up()[0][:] = 1
    with pytest.raises(AssertionError, match=WORDS['a wrong previous step']): memory.check_valid()


class Plain:
    "A storage that keeps no distances: the members that the index uses, and no more"
    def __init__(self, storage): self.kept, self.layout, self.max_sz = storage, storage.layout, storage.max_sz
    @property
    def n_added(self): return self.kept.n_added
    @property
    def first_id(self): return self.kept.first_id
    def numbers(self, field): return None if field=='_prev' else self.kept.numbers(field)
    def follow(self, slots, length, back=False): return self.kept.follow(slots, length, back)


@pytest.mark.parametrize('pattern', PATTERNS)
@pytest.mark.parametrize('kind', KINDS)
def test_a_storage_without_distances_is_asked_for_them(kind, pattern):
    rng, world, memory = np.random.default_rng(0), World(5, kind), ReplayMemory(90)
    index = None
    for _ in range(12):
        streams = PATTERNS[pattern](int(rng.choice([1, 20, 100])), rng)
        memory.extend([world.row(s) for s in streams.tolist()], streams=streams)
        index = index or EpisodeIndex(Plain(memory._shelf.storage))
        if rng.random() < .7: check(index, world)


def test_whole_episodes_of_a_storage_without_distances():
    "An episode begins with its first stored row where the row before it in the stream is stored, and ended one"
    memory, found = ReplayMemory(10), []
    for k in range(14):
        memory.add(Flagged(k, k % 4==3, False))
        if k in (3, 13): found.append([EpisodeIndex(o).begins(s) for o in (memory._shelf.storage, Plain(memory._shelf.storage)) for s in (0, 4, 8)])
    assert found[1][2] and found[1][5]
    assert not any(found[0]) and not found[1][1] and not found[1][4]   # nothing before id 0 is known; the row before id 4 is gone
