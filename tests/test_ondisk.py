"""A memory on disk: the same as one in memory, whole at every store, for one writer, and refused where it doesn't fit."""
import os
import pickle
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from fastrl_replay.batch import Batch
from fastrl_replay.checkpoint import restore_memory
from fastrl_replay.kernels import FIRST_ID, N_ADDED
from fastrl_replay.mapped import TOLD, MappedArray, MappedFolder
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.ondisk import DiskMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.savefiles import FORMAT, CheckpointError, SavedState
from fastrl_replay.steps import Layout
from harness import seen
from test_checkpoint import MORE, small_files
from test_harness import Own, use
from twins import CHUNKS, KINDS, Only, stacked


def put_in_something(memory, rng, world, kind):
    "One random thing that changes a memory"
    make, what = KINDS[kind], rng.integers(5)
    m = int(rng.choice([1, 3, 17, 45]))
    steps, p = [make(rng, world) for _ in range(m)], rng.random(m)
    if what==0: memory.add(steps[0], p[0] if rng.random() < .5 else None)
    elif what < 4: memory.extend(CHUNKS[rng.choice(['list', 'stacked', 'batch'])](steps), p if what==1 else None)
    elif len(memory):
        ids = rng.integers(max(0, memory.first_id - 3), memory.n_added, size=m)
        memory.update_priorities(ids, p)


def links(memory):
    "Back and ahead to records that are still there, by id"
    ids = np.arange(memory.first_id, memory.n_added)
    rows = memory._array.records[ids % memory.max_sz]
    return np.where(ids - rows['_prev'] >= memory.first_id, rows['_prev'], 0).tolist(), rows['_next'].tolist()

@pytest.mark.parametrize('sampler', MORE)
@pytest.mark.parametrize('kind', ['simple', 'transition'])
def test_it_is_the_same_as_in_memory(sampler, kind, tmp_path):
    "Random work on both, the one on disk opened anew now and then: contents, links, priorities and batches are the same"
    ram, disk = ReplayMemory(30, MORE[sampler](), seed=5), ReplayMemory(30, MORE[sampler](), seed=5, path=tmp_path)
    rngs, worlds = [np.random.default_rng(1) for _ in range(2)], [{}, {}]
    for k in range(60):
        for o, rng, world in zip((ram, disk), rngs, worlds): put_in_something(o, rng, world, kind)
        assert disk.check_valid()
        if k % 7==3:
            disk.close()
            disk = ReplayMemory(30, MORE[sampler](), seed=99, path=tmp_path)
            assert disk.check_valid()
        if not len(ram): continue
        bs = min(5, len(ram))
        assert seen(ram.sample(bs))==seen(disk.sample(bs)) and ram.n_stale==disk.n_stale
        assert seen(ram.recent(len(ram)))==seen(disk.recent(len(disk)))
        assert links(ram)==links(disk)
        if hasattr(ram.sampler, 'priorities'): assert seen(ram.sampler.priorities)==seen(disk.sampler.priorities)
    assert disk.n_added > 200


@pytest.mark.parametrize('kind', KINDS)
def test_every_kind_of_step(kind, tmp_path):
    rng, world = np.random.default_rng(0), {}
    ram, disk = ReplayMemory(20, seed=0), ReplayMemory(20, seed=0, path=tmp_path)
    for k in range(3):
        steps = [KINDS[kind](rng, world) for _ in range(13)]
        for o in (ram, disk):
            for step in steps[:4]: o.add(step)
            o.extend(stacked(steps[4:]))
        if k!=1: continue
        disk.close()
        disk = ReplayMemory(20, seed=0, path=tmp_path, step=steps[0])
    assert disk.recent(20).step_type is type(steps[0]) and disk.check_valid()
    assert seen(ram.recent(20))==seen(disk.recent(20)) and seen(ram.sample(5))==seen(disk.sample(5))


def test_a_sampler_of_the_users_own_is_told_again(tmp_path):
    class Teller(Own):
        def __init__(self):
            super().__init__()
            self.told, self.errors = {}, {}
        def on_add(self, slots, priorities):
            super().on_add(slots, priorities)
            for k, s in enumerate(slots.tolist()):
                self.told[s] = None if priorities is None else float(priorities[k])
                self.errors.pop(s, None)
        def update(self, slots, td_errors): self.errors |= dict(zip(slots.tolist(), np.asarray(td_errors).tolist()))
    rng, memory, most = np.random.default_rng(0), ReplayMemory(20, Teller(), path=tmp_path), 0
    for k in range(40):
        put_in_something(memory, rng, {}, 'only')
        before = memory.sampler.inner
        if k % 3: continue
        most = max(most, len(before.errors))
        memory.close()
        memory = ReplayMemory(20, Teller(), path=tmp_path)
        after = memory.sampler.inner
        assert (after.told, after.errors, after.newest)==(before.told, before.errors, before.newest) and memory.check_valid()
    assert most > 2


# --- killed at every store --------------------------------------------------------------------------------------------
def files_now(memory): return {name: bytes(m) for name, m in memory.folder.maps.items()}

def opened(files, description, path, sampler):
    "A memory over these files, as a process killed at that moment left them"
    path.mkdir()
    (path/'memory.json').write_bytes(description)
    for name, data in files.items(): (path/f'{name}.map').write_bytes(data)
    return ReplayMemory(8, sampler(), path=path)


STORE_BY_STORE = """
import sys
from pathlib import Path
import numpy as np
from watched import Watched                    # first of all: the kernels are made of what it watches
from fastrl_replay.kernels import FIRST_ID
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from harness import seen
from test_ondisk import files_now, opened
from twins import KINDS, stacked

kind, sampler, folder = sys.argv[1], dict(Proportional=Proportional, RankBased=RankBased)[sys.argv[2]], Path(sys.argv[3])
memory, rng, world = ReplayMemory(8, sampler(), path=folder/'m'), np.random.default_rng(0), {}
memory.add(KINDS[kind](rng, world))
description, count, torn = (folder/'m'/'memory.json').read_bytes(), 0, 0
def state(o): return o.n_added, o.first_id, seen(o.fetch(np.arange(o.first_id, o.n_added)))

for m in (1, 1, 3, 2, 1, 1, 3, 1, 20, 1):
    steps, shots = [KINDS[kind](rng, world) for _ in range(m)], {}
    before, known = state(memory), memory.sampler.priorities.copy()
    def shoot():
        files = files_now(memory)
        shots[tuple(files.values())] = files
    Watched.watch = shoot
    if m==1: memory.add(steps[0], priority=float(rng.integers(1, 9)))
    else: memory.extend(stacked(steps), rng.integers(1, 9, size=m).astype(float))
    Watched.watch = None
    after = state(memory)
    assert len(shots) > 3*m, len(shots)
    for files in shots.values():
        again, count = opened(files, description, folder/str(count), sampler), count + 1
        got = state(again)
        assert again.check_valid() and again.first_id==max(0, again.n_added - 8)==again._array.living[FIRST_ID]
        assert got in (before, after) or m > 8 and before[0] < got[0] < after[0], 'neither what was there before nor after'
        torn += got==before and np.frombuffer(files['counts'], np.int64)[1] > before[1]
        if got==before: assert seen(again.sampler.priorities)==seen(known), 'a priority of a step that is still there'
        again.folder.close()                   # without waiting for the disk
    assert state(memory)==after
assert torn > 40, f'only {torn} writes were cut short while they overwrote something'
"""

@pytest.mark.parametrize('kind,sampler', [('simple', 'Proportional'), ('transition', 'RankBased')])
def test_killed_at_any_store(root, kind, sampler, tmp_path):
    "The kernels run as Python, and the files are copied after every store; each copy opens as what was there before, or after"
    env = dict(os.environ, NUMBA_DISABLE_JIT='1', PYTHONPATH=os.pathsep.join([str(root), str(root/'tests')]), XDG_CACHE_HOME=str(tmp_path/'cache'))
    ran = subprocess.run([sys.executable, '-c', STORE_BY_STORE, kind, sampler, str(tmp_path)], env=env, capture_output=True, text=True)
    assert ran.returncode==0, ran.stderr[-3000:]


def test_an_update_cut_short_leaves_old_and_new_priorities(tmp_path):
    "Any mixture of the tree's words before and after an update, and garbage for marks in its leaves"
    memory, rng = ReplayMemory(8, Proportional(normalize='memory'), path=tmp_path/'m'), np.random.default_rng(0)
    for _ in range(20): memory.add(KINDS['only'](rng, {}))
    description = (tmp_path/'m'/'memory.json').read_bytes()
    for k in range(60):
        before, old = files_now(memory), memory.sampler.priorities.copy()
        memory.update_priorities(rng.integers(12, 20, size=3), rng.random(3)*9)
        after, new = files_now(memory), memory.sampler.priorities
        a, b = (np.frombuffer(o['priorities'], np.float64) for o in (before, after))
        mixed = np.where(rng.random(len(a)) < .5, a, b)
        leaf = memory.sampler._lines[:, :4]
        marks = mixed[int(mixed[0]):][:leaf.size*2].reshape(-1, 8)[:, :4]
        marks[rng.random(marks.shape) < .2] = -1. - rng.integers(9)
        again = opened(dict(after, priorities=mixed.tobytes()), description, tmp_path/str(k), lambda: Proportional(normalize='memory'))
        got = again.sampler.priorities
        assert ((got==old) | (got==new)).all() and again.check_valid() and again.sampler.largest >= got.max()
        again.folder.close()                   # without waiting for the disk


def test_the_kernels_never_have_a_priority_out_of_place(root):
    "Run as Python, store by store: the priorities in the tree are at all times old or new ones, never a mark"
    code = '''
    import numpy as np
    from fastrl_replay.samplers import proportional as p
    from fastrl_replay.sumtree import new_tree
    allowed, stores = {0.}, 0
    class Watched(np.ndarray):
        def __setitem__(self, k, v):
            global stores
            super().__setitem__(k, v)
            if not hasattr(self, 'shape') or self.shape!=(size,): return
            stores += 1
            lines = np.asarray(self)[int(self[0]):int(self[0]) + 8*8].reshape(-1, 8)[:, 4:]
            wrong = set(lines.reshape(-1).tolist()) - allowed
            assert not wrong, wrong
    tree = new_tree(32).view(Watched)
    size, rng = len(tree), np.random.default_rng(0)
    for k in range(30):
        fresh = rng.integers(1, 99, size=5).astype(float)
        slots = rng.integers(32, size=5)
        allowed |= set(fresh.tolist()) | {1., float(tree[2]), *(fresh + .5).tolist()}
        p.write_run(tree, int(slots[0]), 3, .6, p._NONE if k % 2 else fresh[:3])
        p.write_priorities(tree, slots, fresh, 32, .6, .5)
        if hasattr(p, 'write_ids'): p.write_ids(tree, slots + 100, fresh, 100, 132, .6, .5)
    assert stores > 500
    '''
    env = dict(os.environ, NUMBA_DISABLE_JIT='1', PYTHONPATH=str(root))
    ran = subprocess.run([sys.executable, '-c', textwrap.dedent(code)], env=env, capture_output=True, text=True)
    assert ran.returncode==0, ran.stderr


# --- one writer -------------------------------------------------------------------------------------------------------
def filled(path, n=30, sampler=Uniform, max_sz=20):
    memory, rng = ReplayMemory(max_sz, sampler(), path=path), np.random.default_rng(0)
    for _ in range(n): memory.add(KINDS['only'](rng, {}))
    return memory


def test_a_second_open_says_who_has_it(tmp_path):
    memory = filled(tmp_path)
    with pytest.raises(BlockingIOError, match=f'process {os.getpid()}'): ReplayMemory(20, path=tmp_path)
    code = f'from fastrl_replay.mapped import MappedFolder\nMappedFolder({str(tmp_path)!r})'
    ran = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert f'process {os.getpid()} is writing' in ran.stderr
    memory.add(memory[0])                      # the refused ones have taken nothing away
    memory.close()
    assert len(ReplayMemory(20, path=tmp_path))==20


def test_a_memory_that_was_dropped_can_be_opened(tmp_path):
    filled(tmp_path)
    assert ReplayMemory(20, path=tmp_path).n_added==30


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_a_forked_child_neither_writes_nor_holds_the_lock(tmp_path):
    memory = filled(tmp_path)
    ready, child_says = os.pipe()
    child = os.fork()
    if not child:
        said = []
        for use in (lambda: memory.add(Only(np.zeros(3, np.int32))), lambda: memory.sample(3), lambda: ReplayMemory(20, path=tmp_path),
                    lambda: memory.update_priorities([15], [1.]), lambda: memory.flush(), lambda: memory.recent(2)):
            try: use()
            except Exception as e: said.append(type(e).__name__)      # noqa: BLE001
        os.write(child_says, ' '.join(said).encode())
        os.read(os.open(tmp_path/'wait', os.O_RDONLY), 1) if (tmp_path/'wait').exists() else None
        import time
        time.sleep(20)
        os._exit(0)
    try:
        assert os.read(ready, 999).decode().split()==['RuntimeError', 'RuntimeError', 'BlockingIOError', 'RuntimeError', 'RuntimeError', 'RuntimeError']
        memory.add(memory[0])
        memory.close()
        again = ReplayMemory(20, path=tmp_path)                # the child still lives
        assert again.n_added==31
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_after_close_nothing_goes(tmp_path):
    memory = filled(tmp_path, sampler=Proportional)
    batch = memory.sample(4)
    rows = seen(batch)
    memory.close()
    memory.close()
    for use_it in (lambda: memory.add(Only(np.zeros(3, np.int32))), lambda: memory.sample(2), lambda: len(memory), lambda: memory.flush(),
                   lambda: batch.update_priorities(np.ones(4)), lambda: memory.recent(1), lambda: memory.save(tmp_path/'x')):
        with pytest.raises(RuntimeError, match='closed'): use_it()
    assert seen(batch)==rows


def test_a_memory_on_disk_is_not_pickled(tmp_path):
    with pytest.raises(RuntimeError, match='save'): pickle.dumps(filled(tmp_path))


# --- what doesn't fit -------------------------------------------------------------------------------------------------
def test_what_differs_is_said_and_nothing_changed(tmp_path):
    memory = filled(tmp_path, sampler=Proportional)
    memory.close()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file() and p.name!='lock'}
    for open_it, words in ((lambda: ReplayMemory(21, Proportional(), path=tmp_path), 'max_sz: .* has 20, this one 21'),
                           (lambda: ReplayMemory(20, path=tmp_path), 'sampler: .* has Proportional, this one Uniform'),
                           (lambda: ReplayMemory(20, Proportional(), step=Only(np.zeros(4, np.int32)), path=tmp_path), 'step: .*Only'),
                           (lambda: ReplayMemory(20, Proportional(normalize='memory'), path=tmp_path), 'priorities.map: expected')):
        with pytest.raises(ValueError, match=words): open_it()
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file() and p.name!='lock'}==before
    again = ReplayMemory(20, Proportional(), path=tmp_path)
    with pytest.raises(TypeError, match='Only'): again.add(KINDS['transition'](np.random.default_rng(0), {}))
    assert again.n_added==30 and again.check_valid()


@pytest.mark.parametrize('name', ['memory.json', 'records.map', 'counts.map', 'priorities.map', 'journal.map'])
def test_damage_is_named(name, tmp_path):
    filled(tmp_path, sampler=Proportional).close()
    path, whole = tmp_path/name, (tmp_path/name).read_bytes()
    path.write_bytes(whole[:len(whole)//2])
    with pytest.raises(CheckpointError, match=name): ReplayMemory(20, Proportional(), path=tmp_path)
    path.unlink()
    if name!='memory.json':
        with pytest.raises(CheckpointError, match=name): ReplayMemory(20, Proportional(), path=tmp_path)
    path.write_bytes(whole)
    assert ReplayMemory(20, Proportional(), path=tmp_path).check_valid()


@pytest.mark.parametrize('sampler,at', [(Proportional, 2), (RankBased, 0)])
@pytest.mark.parametrize('wrong', [np.nan, np.inf])
def test_a_largest_priority_that_is_no_number_is_refused(sampler, at, wrong, tmp_path):
    filled(tmp_path, sampler=sampler).close()
    known = np.fromfile(tmp_path/'priorities.map', np.float64)
    known[at] = wrong
    known.tofile(tmp_path/'priorities.map')
    with pytest.raises(ValueError, match='damaged'): ReplayMemory(20, sampler(), path=tmp_path)


def test_impossible_counters_and_a_newer_format_are_refused(tmp_path):
    filled(tmp_path).close()
    counters, whole = tmp_path/'counts.map', (tmp_path/'counts.map').read_bytes()
    for n, first in ((-1, 0), (30, 9), (30, 31), (5, -2)):
        counters.write_bytes(np.array([n, first], np.int64).tobytes() + whole[16:])
        with pytest.raises(CheckpointError, match='counts.map'): ReplayMemory(20, path=tmp_path)
    counters.write_bytes(whole)
    text = (tmp_path/'memory.json').read_bytes()
    (tmp_path/'memory.json').write_bytes(text.replace(b'"format":%d' % FORMAT, b'"format":9'))
    with pytest.raises(CheckpointError, match=f'expected format {FORMAT}, got 9'): ReplayMemory(20, path=tmp_path)


def test_a_full_disk_is_an_error_at_the_opening(tmp_path):
    with small_files(100_000):
        memory = ReplayMemory(1_000_000, path=tmp_path)
        with pytest.raises(OSError): memory.add(Only(np.zeros(3, np.int32)))
        assert len(memory)==0
        with pytest.raises(OSError): ReplayMemory(1_000_000, Proportional(), path=tmp_path/'b')
        assert not list((tmp_path/'b').glob('*.map'))
    memory.close()
    assert not list(tmp_path.glob('*.map'))
    assert filled(tmp_path).n_added==30


@pytest.mark.skipif(not Path('/dev/shm').is_dir() or os.getuid()!=0, reason='needs the right to mount a small tmpfs')
def test_a_small_disk(tmp_path):
    "A file system of one megabyte: no room for the memory, and none of its files is left behind"
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'none', str(tmp_path)], capture_output=True).returncode: pytest.skip('may not mount')
    try:
        with pytest.raises(OSError): ReplayMemory(100_000, step=Only(np.zeros(3, np.int32)), path=tmp_path/'m')
        assert not list((tmp_path/'m').glob('*.map'))
        memory = filled(tmp_path/'m', sampler=Proportional)
        memory.save(tmp_path/'saved')
        big = ReplayMemory(100_000)
        big.extend(stacked([KINDS['only'](np.random.default_rng(k), {}) for k in range(60_000)]))
        with pytest.raises(OSError): big.save(tmp_path/'saved')
        assert ReplayMemory.load(tmp_path/'saved').n_added==30
        memory.add(memory[0])
        memory.close()
        assert ReplayMemory.open(tmp_path/'m').n_added==31
    finally: subprocess.run(['umount', '-l', str(tmp_path)])


def test_an_opening_that_was_killed_begins_anew(tmp_path):
    (tmp_path/'records.map').write_bytes(b'half')
    (tmp_path/'priorities.map').write_bytes(b'')
    assert filled(tmp_path, sampler=Proportional).n_added==30


# --- looking, loading -------------------------------------------------------------------------------------------------
def test_a_look_at_a_memory_that_is_being_written(tmp_path):
    memory = filled(tmp_path, 25)
    view = ReplayMemory.peek(tmp_path)
    assert (len(view), view.n_added, view.first_id)==(20, 25, 5)
    assert seen(view.recent(4).x)==seen(memory.recent(4).x) and view.recent(4).ids.tolist()==[21, 22, 23, 24]
    memory.add(memory[0])
    assert view.recent().ids.tolist()==list(range(6, 26)) and view.fetch([3, 7, 99]).ids.tolist()==[7]
    # a row is overwritten between the look at the counters and the reading
    class Late(type(view)):
        @property
        def first_id(self):
            first = super().first_id
            if self.late:
                self.late = False
                for _ in range(3): memory.add(Only(np.full(3, -1, np.int32)))
            return first
    view.__class__, view.late = Late, True
    got = view.fetch(np.arange(6, 20))
    assert got.ids.tolist()==list(range(9, 20)) and (got.x >= 0).all()
    with pytest.raises(CheckpointError, match='nothing'): ReplayMemory.peek(tmp_path/'nothing')
    with pytest.raises(CheckpointError, match='no memory here'): ReplayMemory.peek(tmp_path/'state')
    with pytest.raises(ValueError, match='read-only'): view._rows[0, 0] = 1


def test_open_asks_for_nothing_it_can_know(tmp_path):
    for sampler in (Uniform, Proportional, RankBased):
        filled(tmp_path/sampler.__name__, sampler=sampler).close()
        with ReplayMemory.open(tmp_path/sampler.__name__) as memory:
            assert isinstance(memory.sampler, sampler) and (memory.max_sz, memory.n_added)==(20, 30)
    with pytest.raises(CheckpointError): ReplayMemory.open(tmp_path/'nothing')


@pytest.mark.parametrize('sampler', [Uniform, Proportional, RankBased])
def test_a_checkpoint_is_loaded_into_a_memory_on_disk(sampler, tmp_path):
    from test_harness import memory_of
    ram = memory_of('simple', sampler)()
    use(ram, 15)
    ram.save(tmp_path/'saved')
    disk = ReplayMemory(20, sampler(), path=tmp_path/'m')
    disk.make = ram.make
    with SavedState(tmp_path/'saved') as saved: restore_memory(disk, saved)
    assert isinstance(disk, DiskMemory) and disk.check_valid()
    assert seen(use(disk, 5))==seen(use(ram, 5))
    disk.close()
    disk = ReplayMemory(20, sampler(), path=tmp_path/'m')
    disk.make = ram.make
    assert disk.check_valid() and seen(use(disk, 5))==seen(use(ram, 5))
    disk.load_state_dict(ram.state_dict())
    assert seen(use(disk, 5))==seen(use(ram, 5))
    disk.save(tmp_path/'again')
    assert seen(ReplayMemory.load(tmp_path/'again').state_dict())==seen(disk.state_dict())


def test_a_load_that_was_killed_half_way_is_noticed(tmp_path):
    memory = filled(tmp_path/'m', sampler=Proportional)
    description, files = (tmp_path/'m'/'memory.json').read_bytes(), {}
    class Cut(Exception): pass
    def cut(*_):
        files.update(files_now(memory))
        raise Cut
    state = memory.state_dict()
    memory._array.streams.insert = cut
    with pytest.raises(Cut): memory.load_state_dict(state)
    for name, data in files.items():
        (tmp_path/'c').mkdir(exist_ok=True)
        (tmp_path/'c'/f'{name}.map').write_bytes(data)
    (tmp_path/'c'/'memory.json').write_bytes(description)
    with pytest.raises(CheckpointError, match='did not come to its end'): ReplayMemory(20, Proportional(), path=tmp_path/'c')


def test_flush_and_the_lock_file(tmp_path):
    memory = filled(tmp_path)
    memory.n_stale = 7
    words = memory.rng.words.tolist()
    memory.flush()
    assert (tmp_path/'lock').read_text()==f'process {os.getpid()}'
    del memory
    again = ReplayMemory(20, path=tmp_path, seed=8)
    assert again.n_stale==7 and again.rng.words.tolist()==words
    assert [again._array.living[k] for k in (N_ADDED, FIRST_ID, TOLD)]==[30, 10, 30]


def test_an_array_keeps_as_much_as_its_journal(tmp_path, monkeypatch):
    "Chunks larger than the journal go in piece by piece; a refused chunk leaves the counters as they were"
    layout = Layout.of(Only(np.zeros(3, np.int32)))
    monkeypatch.setattr(MappedArray, 'JOURNAL', 1600)
    monkeypatch.setattr(MappedArray, 'LEAST', 1)
    array = MappedArray(2000, layout, MappedFolder(tmp_path))
    assert len(array.journal) < 101
    columns = [np.arange(15_000, dtype=np.int32).reshape(5000, 3)]
    array.put(columns, 5000)
    assert (array.n_added, array.first_id)==(5000, 3000) and array.row(4999 % 2000).x.tolist()==[14997, 14998, 14999]
    counts = array.counts.tolist()
    with pytest.raises(ValueError, match='columns'): array.put([np.zeros((7, 4), np.int32)], 7)
    with pytest.raises(ValueError, match='columns'): array.put([np.zeros((7, 3), np.float64)], 7)
    assert array.put_quick(Batch.of(Only(np.zeros((101, 3), np.int32)))) is None and array.counts.tolist()==counts


def test_files_are_allocated_in_full(tmp_path):
    filled(tmp_path, n=1, max_sz=100_000)
    used = sum(os.stat(p).st_blocks*512 for p in tmp_path.glob('*.map'))
    assert used >= sum(p.stat().st_size for p in tmp_path.glob('*.map')) > 100_000*16
    assert resource.getpagesize() <= 4096*16
