"""Frames on disk: the same as in memory, whole at every store, growing while there is room, and refused where they don't fit."""
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fastrl_replay import checkpoint  # noqa: F401  (save and load)
from fastrl_replay.framefiles import MappedFrames, MappedFrameStore
from fastrl_replay.frames import FrameStore
from fastrl_replay.inspection import summary
from fastrl_replay.interning import CAPACITY, NEXT_STATE, STATE
from fastrl_replay.mapped import MappedArray, MappedFolder
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.replay import PrioritizedReplay
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.savefiles import CheckpointError, manifest_text
from fastrl_replay.stacks import interned
from fastrl_replay.steps import Layout, Transition
from harness import seen
from test_checkpoint import small_files
from test_frames import Pair, World, digest, held
from test_ondisk import links
from twins import column_bytes, stacked


class OnDisk(Pair):
    "A memory on disk and its twin; now and then it is opened anew, and somebody else has a look"
    def __init__(self, path, world, seed, max_sz=30, sampler=None, **options):
        super().__init__(World(seed) if world is None else world, seed, max_sz, **options)
        self.path, self.sampler, self.all = path, sampler, dict(dict(seed=seed, dedup='frames'), **options)
        self.anew(close=False)

    def anew(self, close=True):
        if close: self.memory.close() if self.rng.random() < .5 else self.memory.folder.close()         # the other half is not flushed
        if self.rng.random() < .5: self.all['dedup'] = 'auto' if close else 'frames'
        self.memory = ReplayMemory(self.twin.max_sz, self.sampler and self.sampler(), path=self.path, **self.all)
        assert self.memory.n_added==self.twin.n_added and self.memory.check_valid()

    def look(self):
        view = ReplayMemory.peek(self.path)
        batch = view.recent(int(self.rng.integers(1, len(view) + 1)))
        assert batch.ids[-1]==self.twin.n_added - 1
        self.same(batch)
        copy = view.copy()
        assert copy.check_valid() and len(copy)==len(view) and type(copy._array) is FrameStore
        assert column_bytes(copy.recent(len(copy)))==[self.twin.bytes[i] for i in sorted(self.twin.ids)]

    def check(self):
        assert self.memory.check_valid() and len(self.memory)==len(self.twin.ids)
        self.same(self.memory.fetch(self.rng.permutation(self.twin.ids)[:20]))
        if self.rng.random() < .2: self.same(self.memory.sample(int(self.rng.integers(1, len(self.memory) + 1))))

    def run(self, n):
        for _ in range(n):
            (self.add if self.rng.random() < .7 else self.extend)()
            self.check()
            if self.rng.random() < .1: self.more()
            if self.rng.random() < .03: self.look()
            if self.rng.random() < .05: self.anew()


@pytest.mark.parametrize('codec,views', [(None, False), ('lz4', True)])
def test_every_row_is_what_it_was(codec, views, tmp_path):
    for seed, max_sz, n in ((0, 30, 700), (1, 7, 250), (2, 1, 60), (3, 300, 100)):
        pair = OnDisk(tmp_path/str(seed), None, seed, max_sz, codec=codec, frame_views=views)
        pair.run(n)
        assert type(pair.memory._array) is MappedFrameStore and pair.memory.n_added > n


def test_steps_without_streams_of_their_own(tmp_path):
    "The rows of a chunk are streams; which row was which is remembered"
    rng = np.random.default_rng(0)
    ram, disk = ReplayMemory(40, dedup='frames', seed=1), ReplayMemory(40, dedup='frames', seed=1, path=tmp_path)
    def new(): return rng.integers(9, size=(4, 1, 30, 30)).astype(np.uint8)
    now = np.concatenate([new() for _ in range(4)], 1)
    for k in range(30):
        following = np.concatenate([now[:, 1:], new()], 1)
        flags = np.zeros(4, bool)
        for o in (ram, disk): o.extend(Transition(now, np.arange(4), np.full(4, k, np.float32), following, flags, flags))
        now = following
        if k % 9==5:
            disk.close()
            disk = ReplayMemory(40, path=tmp_path, seed=1)
        assert disk.check_valid() and held(disk)==held(ram) <= 40 + 16
        assert seen(ram.recent(len(ram)))==seen(disk.recent(len(disk)))
        assert links(ram)==links(disk)
    assert len(ReplayMemory.peek(tmp_path).copy().episode(3))==10


@pytest.mark.parametrize('sampler', [Proportional, RankBased])
def test_it_is_drawn_from_as_in_memory(sampler, tmp_path):
    "Batches, priorities and what `auto` chooses are the same; a step is drawn with its frames"
    def world(): return World(3, 4, (20, 9), True, np.float32, end=.05)
    ram, disk, rng = ReplayMemory(50, sampler(), seed=4), ReplayMemory(50, sampler(), seed=4, path=tmp_path), np.random.default_rng(0)
    worlds = world(), world()
    for k in range(60):
        m = int(rng.choice([1, 4]))
        for o, w in zip((ram, disk), worlds): o.extend(w.steps(m)) if m > 1 else o.add(w.step())
        ids, td = rng.integers(max(0, ram.first_id), ram.n_added, size=5), rng.random(5)
        assert ram.update_priorities(ids, td)==disk.update_priorities(ids, td)
        if k % 13==5:
            disk.close()
            disk = ReplayMemory.open(tmp_path)
        a, b = ram.sample(4), disk.sample(4)
        assert seen(a)==seen(b) and held(ram)==held(disk)
    assert 'frames of stacks of 4' in repr(disk) and disk.check_valid()


# --- killed at every store --------------------------------------------------------------------------------------------
STORE_BY_STORE = """
import sys
from pathlib import Path
import numpy as np
from watched import Watched                    # first of all: the kernels are made of what it watches
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.replay import PrioritizedReplay
from fastrl_replay.ondisk import DiskMemory
from harness import seen
from test_frames import World
from twins import stacked

folder, codec = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
world, rng, count, cut = World(0, 2, (2, 3), end=.2, odd=.2), np.random.default_rng(0), 0, 0
options = dict(dedup='frames', codec=codec)
memory = ReplayMemory(6, path=folder/'m', **options)
memory.add(world.step())
description = (folder/'m'/'memory.json').read_bytes()
def state(o): return o.n_added, o.first_id, seen(o.fetch(np.arange(o.first_id, o.n_added)))

for m in (1, 3, 1, 2, 1, 1, 4, 6, 1, 2, 1, 15):
    steps, shots, before = world.steps(m), {}, state(memory)
    def shoot():
        if rng.random() < .12:
            files = {name: bytes(o) for name, o in memory.folder.maps.items()}
            shots[tuple(files.values())] = files
    Watched.watch = shoot
    memory.add(steps[0]) if m==1 else memory.extend(stacked(steps))
    Watched.watch = None
    after = state(memory)
    assert shots
    for files in shots.values():
        path, count = folder/str(count), count + 1
        path.mkdir()
        (path/'memory.json').write_bytes(description)
        for name, data in files.items(): (path/f'{name}.map').write_bytes(data)
        again = ReplayMemory(6, path=path, **options)
        got = state(again)
        assert again.check_valid() and again.first_id==max(0, again.n_added - 6)
        assert got in (before, after) or m > 6 and before[0] < got[0] < after[0], 'neither what was there before nor after'
        cut += got==before and np.frombuffer(files['counts'], np.int64)[1] > before[1]
        rest = np.arange(max(0, got[0] - 5), got[0])
        known, more = seen(again.fetch(rest)), world.step()
        assert again.add(more)==got[0] and (again[got[0] % 6].next_state==more.next_state).all() and again.check_valid()
        assert seen(again.fetch(rest))==known, 'a new frame took the place of one that is held'
        again.close()
    assert state(memory)==after
assert cut > 30 and count > 150, (cut, count)
"""

@pytest.mark.parametrize('codec', [[], ['lz4']])
def test_killed_at_any_store(root, codec, tmp_path):
    "The kernels run as Python, and the files are copied after stores; each copy opens as what was there before, or after, and goes on"
    env = dict(os.environ, NUMBA_DISABLE_JIT='1', PYTHONPATH=os.pathsep.join([str(root), str(root/'tests')]), XDG_CACHE_HOME=str(tmp_path/'cache'))
    ran = subprocess.run([sys.executable, '-c', STORE_BY_STORE, str(tmp_path), *codec], env=env, capture_output=True, text=True)
    assert ran.returncode==0, ran.stderr[-3000:]


def test_what_was_given_up_is_kept_until_the_end(tmp_path):
    "A chunk overwrites every row: until it is known, none of its frames lies where one of theirs did"
    memory, world = ReplayMemory(8, dedup='frames', path=tmp_path), World(0, odd=1., end=0.)
    memory.extend(world.steps(8))
    array, [frames] = memory._array, memory._array.frames
    before = {int(n) for n in array.records['state'].reshape(-1)} | {int(n) for n in array.records['next_state'].reshape(-1)}
    memory.extend(stacked(world.steps(8)))
    after = {int(n) for n in array.records['state'].reshape(-1)} | {int(n) for n in array.records['next_state'].reshape(-1)}
    shared = before & after
    kept = array.inner.journal.copy().view(np.uint8).reshape(8, -1)
    assert {int(n) for at in (int(frames.plan[k]) for k in (STATE, NEXT_STATE)) for n in kept[:, at:at + 12].view(np.int32).reshape(-1)}==before
    assert len(after - before) > 20 and len(shared) < 15 and memory.check_valid()


# --- room -------------------------------------------------------------------------------------------------------------
def wild(seed=0, **kw): return World(seed, odd=1., end=0., speeds=(1.,), **{'shape': (30, 30), **kw})
def files(path): return sorted(p.name for p in Path(path).glob('*.map*'))

@pytest.mark.parametrize('codec', [None, 'lz4'])
def test_it_grows_in_whole_files(codec, tmp_path):
    "Stacks that don't slide need six frames a step; each file is allocated in full, and is there when the memory is opened again"
    pair = OnDisk(tmp_path, wild(), 0, 70, codec=codec)
    for _ in range(90): pair.add()
    assert held(pair.memory) > 300 and len(list(tmp_path.glob('frames_meta.0.*.map'))) > 3
    for p in tmp_path.glob('*.map'): assert os.stat(p).st_blocks*512 >= p.stat().st_size, p
    there = files(tmp_path)
    pair.anew()
    pair.check()
    assert files(tmp_path)==there
    for _ in range(90): pair.add()
    pair.check()
    assert files(tmp_path)==there, 'what is given up is used again'


@pytest.mark.parametrize('codec', [None, 'lz4'])
def test_a_full_disk_while_it_grows(codec, tmp_path):
    "An `OSError`; nothing is stored, nothing is left behind, and it goes on when there is room"
    pair, there = OnDisk(tmp_path, wild(), 0, 70, codec=codec), None
    for _ in range(3): pair.add()
    with small_files(1000):
        with pytest.raises(OSError):
            for _ in range(100): pair.add_or_nothing()
        before, there = digest(pair.memory), files(tmp_path)
        for failing in (lambda: pair.memory.add(pair.last), lambda: pair.memory.extend([pair.last]*9), lambda: pair.memory.extend(stacked([pair.last]*9))):
            with pytest.raises(OSError): failing()
            assert digest(pair.memory)==before and files(tmp_path)==there and pair.memory.check_valid()
        pair.check()
        pair.anew()                                      # opening asks for nothing new
    pair.twin.add(pair.last)
    pair.memory.add(pair.last)
    for _ in range(80): pair.add()
    pair.check()


@pytest.mark.skipif(not Path('/dev/shm').is_dir() or os.getuid()!=0, reason='needs the right to mount a small tmpfs')
def test_a_small_disk(tmp_path):
    "A file system that is really full: no signal, and every row that was acknowledged"
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'none', str(tmp_path)], capture_output=True).returncode: pytest.skip('may not mount')
    try:
        pair = OnDisk(tmp_path/'m', wild(), 0, 300, dedup='auto')
        with pytest.raises(OSError):
            for _ in range(300): pair.add_or_nothing()
        assert 20 < len(pair.memory) < 300
        there = files(tmp_path/'m')
        with pytest.raises(OSError): pair.memory.extend(pair.world.steps(250))
        assert files(tmp_path/'m')==there, 'files were left that nothing needs'
        pair.check()
        pair.anew()
        pair.check()
        with pytest.raises(OSError): ReplayMemory(3000, path=tmp_path/'b', step=pair.last)
        assert not files(tmp_path/'b')
    finally: subprocess.run(['umount', '-l', str(tmp_path)])


def test_a_chunk_longer_than_the_journal(tmp_path, monkeypatch):
    "It goes in piece by piece, once there is room for all of it; what it turned out not to need is given back"
    monkeypatch.setattr(MappedArray, 'JOURNAL', 1)
    monkeypatch.setattr(MappedArray, 'LEAST', 16)
    pair = OnDisk(tmp_path, World(2, end=.05, odd=0., shape=(30, 30)), 0, 500)
    for m in (10, 40, 490, 1300):
        steps = pair.world.steps(m)
        pair.memory.extend(stacked(steps))
        pair.twin.extend(steps)
        pair.check()
        assert len(pair.memory._array.inner.journal)==16
        assert pair.memory._array.frames[0].plan[CAPACITY] < 2*1100
    before, there = digest(pair.memory), files(tmp_path)
    with small_files(1000), pytest.raises(OSError): pair.memory.extend(stacked(wild().steps(400)))
    assert digest(pair.memory)==before and files(tmp_path)==there
    pair.run(20)


def test_a_look_notices_that_a_file_was_replaced(tmp_path):
    "Pieces are given back and made anew, under the same name, while somebody looks"
    memory, world = ReplayMemory(100, dedup='frames', path=tmp_path), World(0, odd=0., end=0., shape=(30, 30))
    memory.extend(world.steps(100))
    view = ReplayMemory.peek(tmp_path)
    def check(): assert torch.equal(view.recent().state, memory.fetch(view.recent().ids).state)
    for _ in range(3):
        for steps in (wild().steps(100), world.steps(100), world.steps(100)):
            memory.extend(stacked(steps))
            check()
        memory.close()
        memory = ReplayMemory.open(tmp_path)
        memory.extend(stacked(world.steps(100)))
        check()


# --- what doesn't fit, what is damaged --------------------------------------------------------------------------------
def filled(path, n=40, max_sz=30, **options):
    memory, world = ReplayMemory(max_sz, path=path, **dict(dict(dedup='frames'), **options)), World(0)
    for step in world.steps(n): memory.add(step)
    return memory


def test_what_differs_is_said_and_nothing_changed(tmp_path):
    filled(tmp_path/'f').close()
    filled(tmp_path/'p', dedup=None).close()
    filled(tmp_path/'z', codec='lz4').close()
    def now(): return {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file() and p.name!='lock'}
    before = now()
    for where, options, words in (('f', dict(dedup=None), "dedup: .* keeps state by frames of stacks of 3, each stored once; dedup=None would mean plain"),
                                  ('f', dict(dedup='next_state'), 'would mean state by states'), ('f', dict(codec='lz4'), 'codec: .* has None, this one lz4'),
                                  ('p', dict(dedup='frames'), 'keeps plain records; .* would mean state by frames'), ('p', dict(frame_views=True), 'frame_views: expected'),
                                  ('z', {}, 'codec: .* has lz4, this one None'), ('f', dict(dedup='frame'), "'frame'")):
        with pytest.raises(ValueError, match=words): ReplayMemory(30, path=tmp_path/where, **options)
        assert now()==before
    for where, kind in (('f', MappedFrameStore), ('p', MappedArray), ('z', MappedFrameStore)):
        for open_it in (lambda path: ReplayMemory.open(path), lambda path: ReplayMemory(30, path=path, codec='lz4' if path.name=='z' else None)):
            with open_it(tmp_path/where) as memory: assert type(memory._array) is kind and memory.check_valid() and memory.n_added==40
    with ReplayMemory.open(tmp_path/'f', frame_views=True) as memory: assert memory.sample(5).next_state.stride(0)==2*3*20
    with pytest.raises(ValueError, match="'zip'"): ReplayMemory(30, path=tmp_path/'n', codec='zip', step=World(0).step())


def test_small_observations_stay_in_plain_records(tmp_path):
    s = np.zeros(4, np.float32)
    memory = ReplayMemory(10, path=tmp_path, step=Transition(s, 0, 0., s, False, False))
    assert type(memory._array) is MappedArray and 'frames' not in memory.folder.description


def test_damage_is_named(tmp_path):
    filled(tmp_path, codec='lz4').close()
    there = {name: (tmp_path/name).read_bytes() for name in files(tmp_path)}
    def opened(**changed):
        for name, data in (there | changed).items(): (tmp_path/name).write_bytes(data) if data is not None else (tmp_path/name).unlink(missing_ok=True)
        with ReplayMemory.open(tmp_path) as memory: return memory.check_valid()
    assert opened()
    for name in files(tmp_path):
        if not name.startswith('frames'): continue
        later = '.0.0.map' not in name
        for data in (there[name][:-8], None):
            if later and data is None: continue              # it may hold nothing that is needed
            with pytest.raises(CheckpointError, match=name): opened(**{name: data})
    records = np.frombuffer(there['records.map'], filled(tmp_path/'x')._array.inner.layout.record).copy()
    for number in (0, -5, 10_000):
        records['next_state'][7, 1] = number
        with pytest.raises(CheckpointError, match=r'records.map.*step 37 has a frame of state'): opened(**{'records.map': records.tobytes()})
    cells = np.frombuffer(there['frames_packed.0.0.map'], np.int32).copy()
    cells[::32] = 1
    with pytest.raises(CheckpointError, match='frames_packed.0.* has lost its cells'): opened(**{'frames_packed.0.0.map': cells.tobytes()})
    assert opened()


def test_files_that_had_no_time_to_become_a_pair(tmp_path):
    "Killed while it grew: half a file, or one without its partner"
    memory = filled(tmp_path)
    before = digest(memory)
    memory.close()
    (tmp_path/'frames.0.9.map.part').write_bytes(b'half')
    [*_, last] = sorted(tmp_path.glob('frames_meta.0.*.map'))
    (tmp_path/f'frames_meta.0.{int(last.name.split(".")[2]) + 1}.map').write_bytes(bytes(64*24))
    memory = ReplayMemory.open(tmp_path)
    assert digest(memory)==before and not list(tmp_path.glob('*.part'))
    for step in wild(shape=(4, 5)).steps(60): memory.add(step)
    assert memory.check_valid() and len(list(tmp_path.glob('frames_meta.0.*')))==len(list(tmp_path.glob('frames.0.*')))


def test_a_newer_description_is_refused(tmp_path):
    memory = filled(tmp_path)
    description = json.loads(json.dumps(memory.folder.description))
    memory.close()
    description['frames']['version'] = 2
    (tmp_path/'memory.json').write_bytes(manifest_text(description))
    for look in (ReplayMemory.open, ReplayMemory.peek, lambda path: ReplayMemory(30, path=path)):
        with pytest.raises(CheckpointError, match='expected frames of version 1, got 2'): look(tmp_path)


# --- looking, loading -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('codec', [None, 'lz4'])
@pytest.mark.parametrize('late', [1, 2])
def test_frames_that_are_used_again_while_they_are_read(late, codec, tmp_path):
    "Rows whose records, or whose frames, are overwritten between the look and the copy are dropped"
    memory, world = filled(tmp_path, 45, codec=codec), wild(9, shape=(4, 5))
    view = ReplayMemory.peek(tmp_path)
    class Late(type(view)):
        @property
        def first_id(self):
            self.asked += 1
            if self.asked==late: memory.extend(world.steps(4))
            return super().first_id
    want = {i: memory.fetch([i]) for i in range(15, 45)}
    view.__class__, view.asked = Late, 0
    def before_frames(store, rows, fill=view._frames.fill):
        if late==2: memory.extend(world.steps(4))
        return fill(store, rows)
    view._frames.fill = before_frames
    got = view._read(np.arange(15, 45))
    assert got.ids.tolist()==list(range(23 if late==2 else 19, 45))
    for row in range(len(got)): assert column_bytes(got)[row]==column_bytes(want[int(got.ids[row])])[0]


def test_a_step_without_its_frames_is_damage_to_who_looks(tmp_path):
    memory = filled(tmp_path)
    memory._array.records['state'][35 % 30, 0] = 10_000
    view = ReplayMemory.peek(tmp_path)
    with pytest.raises(CheckpointError, match='step 35 has lost a frame'): view.recent()
    assert len(view.recent(4))==4


@pytest.mark.parametrize('codec', [None, 'lz4'])
def test_a_checkpoint_is_loaded_into_a_memory_on_disk(codec, tmp_path):
    ram = ReplayMemory(30, dedup='frames', codec=codec, seed=0)
    for step in World(5, odd=.3).steps(70): ram.add(step)
    disk = filled(tmp_path/'m', codec=codec)
    disk.load_state_dict(ram.state_dict())
    assert digest(disk)==digest(ram) and disk.check_valid()
    disk.close()
    disk = ReplayMemory.open(tmp_path/'m')
    assert seen(disk.recent(30))==seen(ram.recent(30)) and disk.check_valid()
    disk.save(tmp_path/'saved')
    again = ReplayMemory.load(tmp_path/'saved')
    assert type(again._array) is FrameStore and seen(again.recent(30))==seen(ram.recent(30))
    for step in World(6).steps(20): assert disk.add(step)==again.add(step)
    assert disk.check_valid() and seen(disk.recent(30))==seen(again.recent(30))


def test_a_load_for_which_there_is_no_room(tmp_path):
    ram, disk = ReplayMemory(70, dedup='frames'), ReplayMemory(70, dedup='frames', path=tmp_path)
    for step in wild().steps(70): ram.add(step)
    for step in World(0, shape=(30, 30)).steps(9): disk.add(step)
    before = digest(disk)
    with small_files(1000), pytest.raises(OSError): disk.load_state_dict(ram.state_dict())
    assert digest(disk)==before and disk.check_valid()
    with pytest.raises(ValueError, match='dedup: the state has frames of'):
        plain = ReplayMemory(70, dedup=None)
        plain.add(disk[0])
        disk.load_state_dict(plain.state_dict())
    assert digest(disk)==before
    disk.close()
    disk = ReplayMemory.open(tmp_path)
    assert digest(disk)==before
    disk.load_state_dict(ram.state_dict())
    assert seen(disk.recent(70))==seen(ram.recent(70)) and disk.check_valid()


def test_names_that_look_alike_have_files_of_their_own(tmp_path):
    obs = {'a.b': np.zeros(600, np.uint8), 'a': {'b': np.zeros(600, np.uint8)}, 'c/d': np.zeros(600, np.uint8)}
    layout, folder = Layout.of(Transition(obs, 0, 0., obs, False, False)), MappedFolder(tmp_path)
    made = [MappedFrames(70, layout.leaves[o.state], o, None, None, folder) for o in interned(layout)]
    names = [name for o in made for name in (o.meta.name, o.frames.name)]
    assert len(made)==3 and len({o.leaf.name for o in made})==2 and len(set(names))==6 and files(tmp_path)==sorted(f'{o}.0.map' for o in names)


def test_pipes_and_inspection(tmp_path):
    "A replay on disk that keeps frames once, killed in a way; what is found in its folder, while it is in use and after"
    steps = World(1, odd=0.).steps(60)
    replay = PrioritizedReplay(steps, bs=8, max_sz=40, seed=0, path=tmp_path, dedup='frames', frame_views=True)
    batches = list(replay)
    for batch in batches[-3:]:
        for i, state in zip(batch.ids.tolist(), batch.state.numpy()): assert (state==steps[i].state).all()
    for _ in range(2):
        told = dict(summary(tmp_path))
        assert told['stored'].startswith('40 of 40') and 'state uint8[3, 4, 5]' in told['steps'] and 'Proportional' in told['sampler']
        replay.memory.folder.close()
    again = PrioritizedReplay(steps, bs=8, max_sz=40, seed=0, path=tmp_path)
    assert type(again.memory._array) is MappedFrameStore and again.memory.check_valid() and again.memory.n_added==60
