"""A memory on disk: the same as one in memory, whole at every line, for one writer, refused where it doesn't fit."""
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager

import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.saving import CheckpointError
from fastrl_replay.schedules import LinearSchedule
from fastrl_replay.storage import mapped
from harness import seen
from hostile import rewrite
from test_harness import Own, memory_of, use
from test_mapped import held, needs_proc, small_disk
from twins import CHUNKS, KINDS, Only, stacked

SAMPLERS = dict(uniform=Uniform, proportional=Proportional, ranked=RankBased,
                whole=lambda: Proportional(.9, LinearSchedule(.4, 1., 30), .01, 'memory'))


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


def alive(memory): return np.arange(memory.first_id, memory.n_added)
def links(memory): return memory.previous(alive(memory)).tolist(), memory.next(alive(memory)).tolist()
def contents(memory): return memory.n_added, memory.first_id, seen(memory.fetch(alive(memory))), links(memory)
def priorities(memory): return memory.sampler.priorities.copy()
def step_of(k): return Only(np.full(3, k, np.int32))


def filled(path, n=30, sampler=Uniform, max_sz=20):
    memory = ReplayMemory(max_sz, sampler(), path=path)
    for k in range(n): memory.add(step_of(k))
    return memory


@contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        yield


# --- the same as in memory --------------------------------------------------------------------------------------------
@pytest.mark.parametrize('sampler', SAMPLERS)
@pytest.mark.parametrize('kind', ['simple', 'transition'])
def test_it_is_the_same_as_in_memory(sampler, kind, tmp_path):
    "Random work on both, the one on disk reopened now and then: contents, links, priorities and batches are the same"
    make = SAMPLERS[sampler]
    ram, disk = ReplayMemory(30, make(), seed=5), ReplayMemory(30, make(), seed=5, path=tmp_path)
    rngs, worlds = [np.random.default_rng(1) for _ in range(2)], [{}, {}]
    for k in range(60):
        for o, rng, world in zip((ram, disk), rngs, worlds): put_in_something(o, rng, world, kind)
        assert disk.check_valid()
        if k % 7==3:
            disk.close()
            disk = ReplayMemory(30, make(), seed=99, path=tmp_path)
            assert disk.check_valid()
        if not len(ram): continue
        bs = min(5, len(ram))
        assert seen(ram.sample(bs))==seen(disk.sample(bs)) and ram.n_stale==disk.n_stale
        assert contents(ram)==contents(disk)
        if hasattr(ram.sampler, 'priorities'): assert seen(priorities(ram))==seen(priorities(disk))
    assert disk.n_added > 200
    disk.close()


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


def test_streams_without_env_id_are_known_after_a_reopening(tmp_path):
    "Which stream a row belongs to is kept beside the rows"
    ram, disk, rng = ReplayMemory(30), ReplayMemory(30, path=tmp_path), np.random.default_rng(0)
    for k in range(40):
        m = int(rng.choice([1, 4, 40]))
        steps, streams = [step_of(100*k + i) for i in range(m)], rng.integers(3, size=m)
        for o in (ram, disk): o.extend(stacked(steps), streams=streams)
        if k % 3==0:
            disk.close()
            disk = ReplayMemory.open(tmp_path)
        assert contents(ram)==contents(disk)
    disk.close()


class Teller(Own):
    "A user's sampler that remembers what it was told"
    def __init__(self):
        super().__init__()
        self.told, self.errors = {}, {}
    def on_add(self, slots, priorities):
        super().on_add(slots, priorities)
        for k, s in enumerate(slots.tolist()):
            self.told[s] = None if priorities is None else float(priorities[k])
            self.errors.pop(s, None)
    def update(self, slots, td_errors): self.errors |= dict(zip(slots.tolist(), np.asarray(td_errors).tolist()))


def test_a_sampler_of_the_users_own_is_told_again(tmp_path):
    rng, memory, most = np.random.default_rng(0), ReplayMemory(20, Teller(), path=tmp_path), 0
    for k in range(40):
        put_in_something(memory, rng, {}, 'only')
        before = memory.sampler.inner
        if k % 3: continue
        most = max(most, len(before.errors))
        memory.close()
        memory = ReplayMemory(20, Teller(), path=tmp_path)
        after = memory.sampler.inner
        assert (after.told, after.errors, after.newest)==(before.told, before.errors, before.newest)
        assert memory.check_valid()
    assert most > 2


# --- killed at every line ---------------------------------------------------------------------------------------------
def as_left(files, notes, path, sampler):
    "A memory over these files, as a process killed at that moment left them"
    path.mkdir()
    for name, data in (files | notes).items(): (path/name).write_bytes(data)
    return ReplayMemory(8, sampler(), path=path)


LINE_BY_LINE = """
import sys
from pathlib import Path
import numpy as np
from fastrl_replay.memory import ReplayMemory
from test_ondisk import SAMPLERS, as_left, contents, priorities
from twins import KINDS, stacked
from watched import files_of, moments, torn

kind, sampler, folder = sys.argv[1], SAMPLERS[sys.argv[2]], Path(sys.argv[3])
memory, rng, world = ReplayMemory(8, sampler(), path=folder/'m'), np.random.default_rng(0), {}
memory.add(KINDS[kind](rng, world))
notes, count, undone = {name: (folder/'m'/name).read_bytes() for name in ('memory.json', 'flushed.json')}, 0, 0
for m in (1, 1, 3, 2, 1, 1, 3, 1, 20, 1):
    steps, p = [KINDS[kind](rng, world) for _ in range(m)], rng.integers(1, 9, size=m).astype(float)
    before, known = contents(memory), priorities(memory)
    def work():
        if m==1: memory.add(steps[0], priority=p[0])
        else: memory.extend(stacked(steps), p)
    shots = moments(folder/'m', work)
    after = contents(memory)
    assert len(shots) > 3, len(shots)
    for a, b in zip(shots, shots[1:] + [shots[-1]]):
        for files in (a, *(torn(a, b, rng) for _ in range(4))):
            again, count = as_left(files, notes, folder/str(count), sampler), count + 1
            got = contents(again)
            assert again.check_valid() and again.first_id==max(0, again.n_added - 8)
            pieces = m > 8 and before[0] < got[0] < after[0]
            assert got in (before, after) or pieces, 'neither the state before nor the one after'
            undone += got==before and np.frombuffer(files['counts.map'], np.int64)[1] > before[1]
            if got==before: assert (priorities(again)==known).all(), 'a priority of a step that is still there'
    assert contents(memory)==after
assert undone > 15, f'only {undone} writes were cut short while they overwrote something'
"""

@pytest.mark.parametrize('kind,sampler', [('simple', 'proportional'), ('transition', 'ranked')])
def test_killed_at_any_line(root, kind, sampler, tmp_path):
    "Kernels run as Python, and the files are copied before every line; each copy opens as the state before or after"
    env = dict(os.environ, NUMBA_DISABLE_JIT='1', PYTHONPATH=os.pathsep.join([str(root), str(root/'tests')]))
    args = [sys.executable, '-c', LINE_BY_LINE, kind, sampler, str(tmp_path)]
    ran = subprocess.run(args, env=env, capture_output=True, text=True)
    assert ran.returncode==0, ran.stderr[-3000:]


def test_an_update_cut_short_leaves_old_and_new_priorities(tmp_path):
    "Any mixture of the words before and after an update"
    from watched import files_of, torn
    memory, rng = ReplayMemory(8, Proportional(normalize='memory'), path=tmp_path/'m'), np.random.default_rng(0)
    for k in range(20): memory.add(step_of(k))
    notes = {name: (tmp_path/'m'/name).read_bytes() for name in ('memory.json', 'flushed.json')}
    for k in range(60):
        old, before = priorities(memory), files_of(tmp_path/'m')
        memory.update_priorities(rng.integers(12, 20, size=3), rng.random(3)*9)
        new, after = priorities(memory), files_of(tmp_path/'m')
        again = as_left(torn(before, after, rng), notes, tmp_path/str(k), lambda: Proportional(normalize='memory'))
        got = priorities(again)
        assert ((got==old) | (got==new)).all() and again.check_valid() and again.sampler.largest >= got.max()


# --- one writer -------------------------------------------------------------------------------------------------------
def opened_elsewhere(path):
    "What another process says that opens the memory for writing"
    code = f'from fastrl_replay.memory import ReplayMemory\nprint(ReplayMemory.open({str(path)!r}).n_added)'
    ran = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    return ran.stdout + ran.stderr


def test_a_second_open_says_who_has_it(tmp_path):
    memory = filled(tmp_path/'m')
    with pytest.raises(BlockingIOError, match=f'process {os.getpid()}'): ReplayMemory(20, path=tmp_path/'m')
    shutil.copytree(tmp_path/'m', tmp_path/'copy')         # which closes a descriptor of the lock file
    assert f'process {os.getpid()} is writing' in opened_elsewhere(tmp_path/'m')
    memory.add(memory[0])                      # the refused ones have taken nothing away
    memory.close()
    assert opened_elsewhere(tmp_path/'m')=='31\n' and ReplayMemory.open(tmp_path/'copy').n_added==30


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
        for do in (lambda: memory.add(step_of(0)), lambda: memory.sample(3), lambda: ReplayMemory(20, path=tmp_path),
                   lambda: memory.update_priorities([15], [1.]), lambda: memory.flush(), lambda: memory.recent(2)):
            try: do()
            except Exception as e: said.append(type(e).__name__)      # noqa: BLE001
        os.write(child_says, ' '.join(said).encode())
        time.sleep(60)
        os._exit(0)
    try:
        wanted = ['RuntimeError', 'RuntimeError', 'BlockingIOError', 'RuntimeError', 'RuntimeError', 'RuntimeError']
        assert os.read(ready, 999).decode().split()==wanted
        memory.add(memory[0])
        memory.close()
        again = ReplayMemory(20, path=tmp_path)                # the child still lives
        assert again.n_added==31
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize('sampler', SAMPLERS)
def test_after_close_nothing_is_left(sampler, tmp_path):
    memory = filled(tmp_path, sampler=SAMPLERS[sampler])
    batch = memory.sample(4)
    rows = seen(batch)
    memory.close()
    memory.close()
    if os.path.exists('/proc/self/maps'): assert held(tmp_path)==[]
    for do in (lambda: memory.add(step_of(0)), lambda: memory.sample(2), lambda: memory.flush(),
               lambda: memory.recent(1), lambda: memory.update_priorities([15], [1.]),
               lambda: memory.save(tmp_path/'x')):
        with pytest.raises(RuntimeError, match='closed'): do()
    assert seen(batch)==rows and 'closed' in repr(memory)
    assert ReplayMemory.open(tmp_path).n_added==30


@needs_proc
def test_a_sampler_that_is_still_held_holds_no_file(tmp_path):
    sampler = Proportional()
    memory = filled(tmp_path, sampler=lambda: sampler)
    memory.close()
    assert held(tmp_path)==[]


@needs_proc
def test_an_opening_that_fails_leaves_nothing(tmp_path):
    filled(tmp_path).close()
    counts = np.fromfile(tmp_path/'counts.map', np.int64)
    counts[0] = -1
    counts.tofile(tmp_path/'counts.map')
    for _ in range(2):
        with pytest.raises(CheckpointError, match='counts.map'): ReplayMemory.open(tmp_path)
        assert held(tmp_path)==[]


def test_a_memory_on_disk_is_not_pickled(tmp_path):
    with pytest.raises(RuntimeError, match='save'): pickle.dumps(filled(tmp_path))


# --- what doesn't fit -------------------------------------------------------------------------------------------------
def all_files(path):
    return {p.name: p.read_bytes() for p in path.iterdir() if p.suffix=='.map' or p.name=='memory.json'}


def test_what_differs_is_named_and_nothing_changed(tmp_path):
    filled(tmp_path, sampler=lambda: Proportional(alpha=.7, normalize='memory')).close()
    ReplayMemory.open(tmp_path).close()
    before = all_files(tmp_path)
    def own(**more): return Proportional(**{'alpha': .7, 'normalize': 'memory', **more})
    wide = Only(np.zeros(4, np.int32))
    for open_it, words in ((lambda: ReplayMemory(21, own(), path=tmp_path), 'max_sz: .*20.*21'),
                           (lambda: ReplayMemory(20, Uniform(), path=tmp_path), 'sampler.kind: .*Proportional.*Uniform'),
                           (lambda: ReplayMemory(20, own(alpha=.5), path=tmp_path), r'sampler\.options\.alpha: .*0\.7.*0\.5'),
                           (lambda: ReplayMemory(20, own(normalize='batch'), path=tmp_path), 'normalize: .*memory.*batch'),
                           (lambda: ReplayMemory(20, own(), dedup='next_state', path=tmp_path), 'dedup'),
                           (lambda: ReplayMemory(20, own(), step=wide, path=tmp_path), 'step: .*Only')):
        with pytest.raises(ValueError, match=words): open_it()
        assert all_files(tmp_path)==before
    again = ReplayMemory(20, own(), path=tmp_path)
    with pytest.raises(TypeError, match='Only'): again.add(KINDS['transition'](np.random.default_rng(0), {}))
    assert again.n_added==30 and again.check_valid()


OPTIONS = [Uniform, lambda: Uniform(replace=True), lambda: Proportional(alpha=0.), RankBased, lambda: RankBased(.5, .3),
           lambda: Proportional(.9, LinearSchedule(.4, 1., 30), .01, 'memory')]

@pytest.mark.parametrize('make', OPTIONS)
def test_open_asks_for_nothing_that_lies_with_the_files(make, tmp_path):
    "Size, sampler and its options, schedules included"
    memory = filled(tmp_path, sampler=make)
    want = memory.sampler.options(), seen(memory.fetch(alive(memory)))
    memory.close()
    with ReplayMemory.open(tmp_path) as memory:
        assert (memory.sampler.options(), seen(memory.fetch(alive(memory))))==want
        assert type(memory.sampler) is type(make()) and (memory.max_sz, memory.n_added)==(20, 30)
        assert memory.check_valid()
    with pytest.raises(CheckpointError): ReplayMemory.open(tmp_path/'nothing')


def test_open_of_a_sampler_of_the_users_own_asks_for_it(tmp_path):
    filled(tmp_path, sampler=Own).close()
    with pytest.raises(ValueError, match='sampler='): ReplayMemory.open(tmp_path)
    assert ReplayMemory.open(tmp_path, sampler=Own()).n_added==30


FILES = ['memory.json', 'flushed.json', 'records.map', 'counts.map', 'priorities.map', 'journal.map']

@pytest.mark.parametrize('name', FILES)
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


IMPOSSIBLE = [dict(max_sz=0), dict(max_sz='20'), dict(max_sz=2**70), dict(layout=[]), dict(layout=None),
              dict(sampler=3), dict(sampler=dict(kind='Proportional', alpha='x'))]

@pytest.mark.parametrize('sampler', [Proportional, RankBased])
def test_a_look_knows_priorities_before_the_sampler_does(sampler, tmp_path):
    "Rows come in, and the sampler is told of them at the next draw: until then they have the largest priority"
    memory = filled(tmp_path, sampler=sampler)
    memory.sample(1)
    memory.update_priorities([memory.n_added - 1], [7.])
    memory.extend(memory.recent(2))
    with ReplayMemory.peek(tmp_path) as view: seen_by_view = view.priorities(np.arange(memory.first_id, memory.n_added))
    slots = np.arange(memory.first_id, memory.n_added) % memory.max_sz
    assert seen_by_view.tolist()==priorities(memory)[slots].tolist() and seen_by_view[-1]==seen_by_view.max() >= 7
    memory.close()


@pytest.mark.parametrize('change', IMPOSSIBLE)
def test_a_description_that_cannot_be_is_refused(change, tmp_path):
    "The checksum is mended: the contents are checked"
    filled(tmp_path, sampler=Proportional).close()
    rewrite(tmp_path/'memory.json', change)
    for look in (ReplayMemory.open, ReplayMemory.peek):
        with pytest.raises(CheckpointError, match='memory.json'): look(tmp_path)


def test_impossible_counters_are_refused(tmp_path):
    filled(tmp_path).close()
    counters, whole = tmp_path/'counts.map', (tmp_path/'counts.map').read_bytes()
    for n, first in ((-1, 0), (30, 9), (30, 31), (5, -2)):
        counters.write_bytes(np.array([n, first], np.int64).tobytes() + whole[16:])
        with pytest.raises(CheckpointError, match='counts.map'): ReplayMemory(20, path=tmp_path)


def test_a_full_disk_is_an_error_at_the_opening(tmp_path):
    before, old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    try:
        memory = ReplayMemory(1_000_000, path=tmp_path)
        with pytest.raises(OSError, match=str(tmp_path)): memory.add(step_of(0))
        assert len(memory)==0
        with pytest.raises(OSError): ReplayMemory(1_000_000, Proportional(), path=tmp_path/'b')
        assert not list((tmp_path/'b').glob('*.map'))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, before)
    memory.close()
    assert not list(tmp_path.glob('*.map')) and filled(tmp_path/'c').n_added==30


def test_a_small_disk(tmp_path):
    "A file system of four megabytes: no room for the memory, and none of its files is left behind"
    with small_disk(tmp_path, '4m'):
        with pytest.raises(OSError, match='more bytes'): ReplayMemory(400_000, step=step_of(0), path=tmp_path/'m')
        assert not list((tmp_path/'m').glob('*.map'))
        memory = filled(tmp_path/'m', sampler=Proportional)
        memory.add(memory[0])
        memory.close()
        assert ReplayMemory.open(tmp_path/'m').n_added==31


# --- the power goes ---------------------------------------------------------------------------------------------------
def test_after_a_power_cut_a_warning_says_what_is_certain(tmp_path, monkeypatch):
    memory = filled(tmp_path)
    memory.flush()
    memory.add(step_of(30))
    del memory                                 # no close, no flush: as a kill
    with no_warning(): assert ReplayMemory.open(tmp_path).power_cut is None
    monkeypatch.setattr(mapped, 'boot_id', lambda: 'the next boot')
    with pytest.warns(UserWarning, match=r'ids below 30.*check_valid\(\)'): memory = ReplayMemory.open(tmp_path)
    assert memory.power_cut[:2]==(30, 10) and memory.check_valid()
    memory.close()
    with no_warning(): assert ReplayMemory.open(tmp_path).power_cut is None


def test_a_memory_that_was_closed_survives_a_restart(tmp_path, monkeypatch):
    filled(tmp_path).close()
    monkeypatch.setattr(mapped, 'boot_id', lambda: 'the next boot')
    with no_warning(): assert ReplayMemory.open(tmp_path).power_cut is None


# --- looking ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('sampler', SAMPLERS)
def test_a_look_at_a_memory_that_is_being_written(sampler, tmp_path):
    memory = filled(tmp_path, 25, SAMPLERS[sampler])
    memory.update_priorities([7, 9], [5., 6.])
    view = ReplayMemory.peek(tmp_path)
    assert (len(view), view.max_sz, view.n_added, view.first_id)==(20, 20, 25, 5)
    assert type(memory.sampler).__name__ in repr(view) and '20' in repr(view)
    assert seen(view.recent(4).x)==seen(memory.recent(4).x) and view.recent(4).ids.tolist()==[21, 22, 23, 24]
    want = getattr(memory.sampler, 'priorities', None)
    got = view.priorities(np.arange(5, 25))
    assert got is None if want is None else got.tolist()==want[np.arange(5, 25) % 20].tolist()
    memory.add(memory[0])
    assert view.recent().ids.tolist()==list(range(6, 26)) and view.fetch([3, 7, 99]).ids.tolist()==[7]
    assert set(view.sample(200).ids.tolist())==set(range(6, 26))
    for path, words in ((tmp_path/'nothing', 'nothing'), (tmp_path.parent, 'no memory here')):
        with pytest.raises(CheckpointError, match=words): ReplayMemory.peek(path)


def test_rows_that_are_overwritten_while_they_are_read_are_dropped(tmp_path):
    memory = filled(tmp_path, 26)
    view = ReplayMemory.peek(tmp_path)
    class Late(type(view)):
        "Rows are overwritten between the look at the counters and the reading"
        @property
        def first_id(self):
            first = super().first_id
            if self.late:
                self.late = False
                for _ in range(3): memory.add(step_of(-1))
            return first
    view.__class__, view.late = Late, True
    got = view.fetch(np.arange(6, 20))
    assert got.ids.tolist()==list(range(9, 20))==got.x[:, 0].tolist()


def test_a_reader_beside_a_writer_never_sees_a_torn_row(tmp_path):
    code = f'''if 1:
        import numpy as np
        from fastrl_replay.memory import ReplayMemory
        from twins import Only
        memory = ReplayMemory(50, path={str(tmp_path)!r})
        for k in range(10**9):
            memory.add(Only(np.full(300, k, np.int32)))
            if k==60: print('go', flush=True)
    '''
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    writer = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert writer.stdout.readline()=='go\n'
        view, n = ReplayMemory.peek(tmp_path), 0
        for _ in range(300):
            rows = view.recent(30)
            assert (rows.x==rows.ids[:, None]).all()
            n += len(rows)
        assert n > 300 and view.n_added > 400
    finally:
        writer.kill()
        writer.wait()


# --- loading ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('sampler', [Uniform, Proportional, RankBased])
def test_a_state_is_loaded_into_a_memory_on_disk(sampler, tmp_path):
    ram = memory_of('simple', sampler)()
    use(ram, 15)
    disk = ReplayMemory(20, sampler(), path=tmp_path/'m')
    disk.make = ram.make
    disk.load_state_dict(ram.state_dict())
    assert disk.check_valid() and seen(use(disk, 5))==seen(use(ram, 5))
    disk.close()
    disk = ReplayMemory(20, sampler(), path=tmp_path/'m')
    disk.make = ram.make
    assert disk.check_valid() and seen(use(disk, 5))==seen(use(ram, 5))
    disk.load_state_dict(ram.state_dict())
    assert seen(use(disk, 5))==seen(use(ram, 5))
    disk.save(tmp_path/'again')
    again = ReplayMemory.load(tmp_path/'again')
    again.make = ram.make
    assert contents(again)==contents(disk)==contents(ram) and seen(use(again, 5))==seen(use(disk, 5))


def test_a_load_that_was_killed_half_way_is_noticed(tmp_path):
    code = '''if 1:
        import sys
        from pathlib import Path
        from fastrl_replay.memory import ReplayMemory
        from fastrl_replay.samplers.proportional import Proportional
        from test_ondisk import as_left, contents, filled
        from watched import moments
        folder = Path(sys.argv[1])
        memory, other = (filled(folder/k, n, Proportional, 8) for k, n in (('m', 30), ('o', 40)))
        notes = {name: (folder/'m'/name).read_bytes() for name in ('memory.json', 'flushed.json')}
        before, after, refused = contents(memory), contents(other), 0
        shots = moments(folder/'m', lambda: memory.load_state_dict(other.state_dict()))
        for k, files in enumerate(shots):
            try: assert contents(as_left(files, notes, folder/str(k), Proportional)) in (before, after)
            except ValueError as e: refused += 'interrupted' in str(e)
        assert refused > 0 and contents(memory)==after, refused
    '''
    env = dict(os.environ, NUMBA_DISABLE_JIT='1', PYTHONPATH=os.pathsep.join(sys.path))
    ran = subprocess.run([sys.executable, '-c', code, str(tmp_path)], env=env, capture_output=True, text=True)
    assert ran.returncode==0, ran.stderr[-3000:]


def test_what_close_keeps(tmp_path):
    "Random numbers and counters travel too"
    memory = filled(tmp_path, sampler=Proportional)
    for _ in range(3): memory.update_priorities(memory.sample(4).ids, np.ones(4))
    memory.update_priorities([2, 12], [1., 1.])
    assert (tmp_path/'lock').read_text()==f'process {os.getpid()}' and memory.n_stale==1
    memory.flush()
    words, n = memory.rng.get_state(), memory.sampler.n_batches
    del memory
    again = ReplayMemory(20, Proportional(), path=tmp_path, seed=8)
    assert (again.n_stale, again.sampler.n_batches, seen(again.rng.get_state()))==(1, n, seen(words)) and n==3


def test_a_chunk_larger_than_the_journal_is_stored_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped.MappedFolder, 'JOURNAL', 1600)
    monkeypatch.setattr(mapped.MappedFolder, 'LEAST', 1)
    memory = ReplayMemory(2000, path=tmp_path, step=step_of(0))
    ids = memory.extend(stacked([step_of(k) for k in range(5000)]))
    assert ids.tolist()==list(range(5000)) and (memory.n_added, memory.first_id)==(5000, 3000) and memory.check_valid()
    assert memory.recent(2000).x[:, 0].tolist()==list(range(3000, 5000))
    memory.close()
    assert ReplayMemory.open(tmp_path).recent(1).x.tolist()==[[4999]*3]
