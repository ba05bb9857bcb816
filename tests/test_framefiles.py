"""Frames on disk: the same as in memory, whole wherever a write is cut short, growing while there is room, refused where they don't fit."""
import os
import shutil
from pathlib import Path

import numpy as np
import pytest


from fastrl_replay.memory import ReplayMemory
from fastrl_replay.saving import CheckpointError
from fastrl_replay.steps import Layout
from fastrl_replay.storage.choice import storage_for
from fastrl_replay.storage.records import Records
from fastrl_replay.storage.mapped import MappedFolder
from harness import seen
from test_frames import Pair, World, fetched, held, ids_in
from lasting import small_disk
from twins import Twin, column_bytes, stacked
from faults import moments, torn
from words import words


pytestmark = pytest.mark.usefixtures('quick')


def opened(path, layout, max_sz, dedup='frames'):
    "A storage in the files of a folder"
    folder = MappedFolder(path)
    storage = storage_for(layout, max_sz, dedup, room=folder)
    if folder.description is None: folder.describe(dict(max_sz=max_sz, layout=layout.to_plain(), dedup=dedup))
    return storage

def released(storage):
    folder = storage.room
    storage.close()
    folder.close()

def wild(seed=0, **kw): return World(seed, odd=1., end=0., speeds=(1.,), **{'shape': (30, 30), **kw})
def blocks(path): return {p.name: os.stat(p).st_blocks for p in Path(path).glob('*.map')}


class OnDisk(Pair):
    "A storage on disk and its twin; now and then it is opened again"
    def __init__(self, path, world, seed, max_sz=30):
        super().__init__(world, seed, max_sz, dedup='frames')
        self.path, self.layout = path, self.storage.layout
        self.storage = opened(path, self.layout, max_sz)

    def again(self):
        released(self.storage)
        self.storage = opened(self.path, self.layout, self.twin.max_sz)
        assert self.storage.n_added==self.twin.n_added

    def run(self, n):
        for _ in range(n):
            (self.add if self.rng.random() < .7 else self.extend)()
            self.check()
            if self.rng.random() < .1: self.more()
            if self.rng.random() < .1: self.again()


def test_every_row_is_what_it_was(tmp_path):
    for seed, max_sz, n in ((0, 30, 300), (1, 7, 100), (2, 1, 40), (3, 300, 60)):
        pair = OnDisk(tmp_path/str(seed), World(seed), seed, max_sz)
        pair.run(n)
        released(pair.storage)


# --- cut short --------------------------------------------------------------------------------------------------------
def test_a_write_cut_short_at_any_line_is_undone(tmp_path):
    """The files are copied before every line; each copy, and a mixture of two, opens as what was there before, or after, and goes on:
    no frame has taken the place of one that is held."""
    rng, world, count, undone = np.random.default_rng(0), World(0, 2, (2, 3), end=.2, odd=.2), 0, 0
    layout = Layout.of(world.step())
    storage = opened(tmp_path/'m', layout, 6)
    notes = {name: (tmp_path/'m'/name).read_bytes() for name in ('memory.json', 'flushed.json')}
    def state(o): return [o.n_added, o.first_id, seen(fetched(o, ids_in(o)))]
    storage.add(world.step())
    for m in (1, 3, 1, 2, 1, 1, 4, 6, 1, 2, 1, 15):
        steps, before = world.steps(m), state(storage)
        def work(steps=steps, m=m):
            if m==1: storage.add(steps[0])
            else: storage.put(storage.accept(stacked(steps)))
        shots = moments(tmp_path/'m', work)
        after = state(storage)
        for a, b in zip(shots, shots[1:] + shots[-1:]):
            for files in (a, torn(a, b, rng)):
                path, count = tmp_path/str(count), count + 1
                path.mkdir()
                for name, data in (files | notes).items(): (path/name).write_bytes(data)
                again = opened(path, layout, 6)
                got = state(again)
                assert again.check_valid() and again.first_id==max(0, again.n_added - 6)
                assert got in (before, after) or m > 1 and before[0] < got[0] < after[0], 'neither what was there before nor after'
                undone += got==before and np.frombuffer(files['counts.map'], np.int64)[1] > before[1]
                kept, more = np.arange(max(0, got[0] - 5), got[0]), world.step()
                known = seen(fetched(again, kept))
                assert again.add(more)==got[0] and (fetched(again, [got[0]]).next_state[0].numpy()==more.next_state).all() and again.check_valid()
                assert seen(fetched(again, kept))==known, 'a new frame took the place of one that is held'
                released(again)
                shutil.rmtree(path)
    assert undone > 5 and count > 100, (undone, count)
    released(storage)


def numbers(storage): return {int(n) for name in ('state', 'next_state') for n in storage.records[name].reshape(-1)}

def test_what_was_given_up_is_kept_until_the_end(tmp_path):
    "A chunk overwrites every row: until it is known, none of its frames lies where one of theirs did"
    world = World(0, odd=1., end=0.)
    storage = opened(tmp_path, Layout.of(world.step()), 8)
    for step in world.steps(8): storage.add(step)
    before, kept = numbers(storage), storage.tables[0].frames.copy()
    storage.put(storage.accept(world.steps(8)))
    rows = np.array(sorted(before)) - 1
    assert (storage.tables[0].frames[rows]==kept[rows]).all() and len(numbers(storage) - before) > 20 and storage.check_valid()
    released(storage)


# --- room -------------------------------------------------------------------------------------------------------------
def test_it_grows_and_what_is_free_is_used_again(tmp_path):
    "Stacks that don't slide need six frames a step; blocks are there before they are written, and after opening again"
    pair = OnDisk(tmp_path, wild(), 0, 70)
    first = blocks(tmp_path)['frames.0.map']
    for _ in range(90): pair.add()
    [table] = pair.storage.tables
    assert held(pair.storage) > 300 and blocks(tmp_path)['frames.0.map']*512 >= table.used*900 > first*512
    there = blocks(tmp_path)
    pair.again()
    pair.check()
    assert pair.storage.tables[0].ready >= pair.storage.tables[0].used
    for _ in range(90): pair.add()
    pair.check()
    assert blocks(tmp_path)==there
    released(pair.storage)


def test_a_small_disk(tmp_path):
    "A file system that is really full: no signal, and every row that was acknowledged"
    with small_disk(tmp_path, '1m'):
        world, twin, memory = wild(), Twin(300), ReplayMemory(300, path=tmp_path/'m')
        with pytest.raises(OSError):
            for _ in range(300):
                step = world.step()
                memory.add(step)
                twin.add(step)
        assert 20 < len(memory) < 300
        there = blocks(tmp_path/'m')
        with pytest.raises(OSError): memory.extend(stacked(world.steps(250)))
        assert blocks(tmp_path/'m')==there and memory.check_valid()
        memory.close()
        memory = ReplayMemory.open(tmp_path/'m')
        assert memory.check_valid() and column_bytes(memory.recent(len(memory)))==twin.bytes
        memory.close()
        with pytest.raises(OSError): ReplayMemory(3000, path=tmp_path/'b', step=step)
        assert not blocks(tmp_path/'b')


def test_a_chunk_longer_than_the_journal(tmp_path, monkeypatch):
    "It goes in piece by piece, once there is room for all of it"
    monkeypatch.setattr(MappedFolder, 'JOURNAL', 1)
    monkeypatch.setattr(MappedFolder, 'LEAST', 16)
    pair = OnDisk(tmp_path, World(2, end=.05, odd=0., shape=(30, 30)), 0, 500)
    for m in (10, 40, 490, 1300):
        steps = pair.world.steps(m)
        pair.storage.put(pair.storage.accept(steps))
        pair.twin.extend(steps)
        pair.check()
        assert len(pair.storage.journal)==16
    pair.run(20)
    released(pair.storage)


# --- what doesn't fit, what is damaged --------------------------------------------------------------------------------
def filled(path, n=40, max_sz=30, **options):
    memory, world = ReplayMemory(max_sz, path=path, **dict(dict(dedup='frames'), **options)), World(0)
    for step in world.steps(n): memory.add(step)
    return memory


def test_a_record_that_refers_to_no_frame_is_damage(tmp_path):
    layout = filled(tmp_path/'x').layout
    filled(tmp_path/'m').close()
    path, stored = tmp_path/'m'/'records.map', storage_for(layout, 30, 'frames').stored
    whole = np.fromfile(path, stored.record)
    for number in (0, -5, 10_000, 2**31 - 1, -2**31):
        records = whole.copy()
        records['next_state'][7, 1] = number
        records.tofile(path)
        with pytest.raises(CheckpointError, match=words('a frame that is not there', step=37)): ReplayMemory.open(tmp_path/'m')
    whole.tofile(path)
    with ReplayMemory.open(tmp_path/'m') as memory: assert memory.check_valid()


# --- looking, loading -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('late', ['records', 'frames'])
def test_frames_that_are_used_again_while_they_are_read(late, tmp_path, monkeypatch):
    "Rows whose records, or whose frames, are overwritten between the look and the copy are left out"
    memory, world = filled(tmp_path, 45), wild(9, shape=(4, 5))
    want = {i: memory.fetch([i]) for i in range(15, 45)}
    view = ReplayMemory.peek(tmp_path)
    [table] = view._storage.tables
    kind, name = (Records, 'read') if late=='records' else (type(table), 'fill')
    plain, asked = getattr(kind, name), []
    def watched(self, *args):
        if self in (table, view._storage) and not asked:
            asked.append(1)
            memory.extend(world.steps(4))
        return plain(self, *args)
    monkeypatch.setattr(kind, name, watched)
    got = view.fetch(np.arange(15, 45))
    assert asked and got.ids.tolist()==list(range(19, 45))
    for row, id in enumerate(got.ids.tolist()): assert column_bytes(got)[row]==column_bytes(want[id])[0]
    view.close()
    memory.close()
