"""Every fault, for every kind of memory that lasts: one table. Rows: the kinds in lasting.py, in folders of their own and saved, and what
else is saved. Columns: the tests. What is promised of one kind only stands with its chapter."""
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

from fastrl_replay import saving
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.base import Prioritized
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.saving import MANIFEST, CheckpointError, SavedState
from fastrl_replay.storage import mapped
from fastrl_replay.storage.mapped import MappedFolder
from fastrl_replay.storage.sequence_sampler import Sequence
from harness import seen
from hostile import files_in
from lasting import KINDS, contents, held, ids_of, load, make, needs_proc, priorities, remember, reopen, small_disk, step_of, steps_of
from faults import small_files
from test_harness import Stream, draw
from test_saving import REPLAYS, everything, learner
from test_saving_format import Ring, is_tidy
from twins import Only
from refusals import about, refused
from words import WORDS, words

pytestmark = pytest.mark.usefixtures('quick')
every_kind = pytest.mark.parametrize('kind', KINDS)
some_kinds = pytest.mark.parametrize('kind', ['own', 'prioritized_sequences', 'frames'])


def lay(folder, files):
    "Make the folder hold these files, and no other"
    shutil.rmtree(folder)
    for name, data in files.items():
        (folder/name).parent.mkdir(parents=True, exist_ok=True)
        if data is not None: (folder/name).write_bytes(data)


def error_of(call):
    try: call()
    except Exception as e: return type(e).__name__         # noqa: BLE001
    return 'no error'


# --- one writer -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope='module')
def elsewhere(root):
    "Ask another process to open a memory for writing: how many steps it has, or the error"
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    process = subprocess.Popen([sys.executable, str(root/'tests'/'lasting.py')], stdin=-1, stdout=-1, text=True, env=env)
    def opened(kind, path):
        process.stdin.write(f'{kind} {path}\n')
        process.stdin.flush()
        return process.stdout.readline().rstrip()
    yield opened
    process.stdin.close()
    process.wait(20)


@every_kind
def test_a_second_writer_is_told_who_is_writing(kind, tmp_path, elsewhere):
    memory, path = remember(kind, tmp_path/'m'), tmp_path/'m'
    def is_refused(here, there):
        with pytest.raises(BlockingIOError, match=here): make(kind, path)
        assert re.search(words('another writer', name=there), elsewhere(kind, path))
    mine = words('it is open here', name=f'process {os.getpid()}'), f'process {os.getpid()}'
    is_refused(*mine)
    shutil.copytree(path, tmp_path/'copy')     # closes a descriptor of the lock file: a lock of the POSIX kind would be gone
    is_refused(*mine)
    (path/'lock').unlink()                     # as `git clean` does
    is_refused(words('another writer', name='another process'), 'another process')
    memory.add(step_of(kind, 30))              # the refused ones have taken nothing away
    memory.close()
    assert [elsewhere(kind, o) for o in (path, tmp_path/'copy')]==['31', '30']


@some_kinds
def test_a_memory_that_was_dropped_can_be_opened(kind, tmp_path):
    memory = remember(kind, tmp_path)
    want, memory.itself = contents(memory), memory         # only the garbage collector finds it
    del memory
    with reopen(kind, tmp_path) as again: assert contents(again)==want


# --- forks ------------------------------------------------------------------------------------------------------------
USES = dict(add=lambda m, kind: m.add(step_of(kind, 0)), extend=lambda m, kind: m.extend(steps_of(kind, 0, 3)), sample=lambda m, kind: m.sample(3),
            update_priorities=lambda m, kind: m.update_priorities([15], [1.]), flush=lambda m, kind: m.flush(), recent=lambda m, kind: m.recent(2),
            reopen=lambda m, kind: make(kind, m.path))
REFUSED = {k: 'BlockingIOError' if k=='reopen' else 'RuntimeError' for k in USES}

def fork_beside(memory, kind):
    "A forked child that tries to use the memory and lives on: its number, and what each use raised"
    ready, says = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(says, ' '.join(error_of(partial(use, memory, kind)) for use in USES.values()).encode())
            signal.pause()
        finally: os._exit(1)
    return child, dict(zip(USES, os.read(ready, 999).decode().split()))


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@some_kinds
def test_a_forked_child_neither_uses_it_nor_holds_its_lock(kind, tmp_path):
    memory = remember(kind, tmp_path)
    child, said = fork_beside(memory, kind)
    try:
        assert said==REFUSED
        memory.add(step_of(kind, 30))
        memory.close()
        with reopen(kind, tmp_path) as again: assert again.n_added==31
        os.kill(child, 0)                      # it lives
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@every_kind
def test_the_child_of_a_killed_writer_does_not_hold_its_lock(kind, tmp_path):
    "And all that the writer was given is there, as in RAM"
    told, tells = os.pipe()
    writer = os.fork()
    if not writer:
        try:
            memory = remember(kind, tmp_path)
            os.write(tells, str(fork_beside(memory, kind)[0]).encode())
            signal.pause()
        finally: os._exit(1)
    child = int(os.read(told, 99))
    try:
        try:
            with pytest.raises(BlockingIOError, match=words('another writer', name=f'process {writer}')): make(kind, tmp_path)
        finally:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
        os.kill(child, 0)
        with reopen(kind, tmp_path) as again: assert contents(again)==contents(remember(kind))
    finally: os.kill(child, signal.SIGKILL)


# --- after close ------------------------------------------------------------------------------------------------------
@needs_proc
@some_kinds
def test_after_close_nothing_is_held(kind, tmp_path):
    "Neither by the memory nor by its sampler, batches, and views that are still there"
    memory = remember(kind, tmp_path)
    sampler, batch, room = memory.sampler, memory.sample(4), memory._shelf.room
    rows = seen(batch)
    with ReplayMemory.peek(tmp_path) as view: view.recent(), view.priorities([15])
    assert len(held(tmp_path)) > 3
    memory.close()
    memory.close()
    assert held(tmp_path)==[] and room.closed and sampler.n_entered==30
    assert 'closed' in repr(memory) and 'closed' in repr(view) and seen(batch)==rows
    uses = [partial(use, memory, kind) for name, use in USES.items() if name!='reopen']
    for use in (*uses, lambda: memory.save(tmp_path/'saved')):
        with pytest.raises(RuntimeError, match=WORDS['closed']): use()
    with reopen(kind, tmp_path) as again: assert contents(again)==contents(remember(kind))


# --- damage -----------------------------------------------------------------------------------------------------------
def one_bit(raw, rng):
    at, raw = int(rng.choice(np.flatnonzero(np.frombuffer(raw, np.uint8)))), bytearray(raw)
    raw[at] ^= 1 << int(rng.integers(8))
    return bytes(raw)

DAMAGE = dict(missing=lambda raw, rng: None, cut=lambda raw, rng: raw[:rng.choice([0, len(raw)//2, len(raw) - 1])],
              zeroed=lambda raw, rng: bytes(len(raw)), a_bit=one_bit)

def what_is_said(kind, path, want):
    "Of a damaged memory: the refusal, 'noticed' by `check_valid`, or 'harmless'; wrong contents that nobody noticed are an error"
    try: memory = reopen(kind, path)
    except CheckpointError as e:               # kept, as a notebook keeps the last error: the lock is free all the same
        with pytest.raises(CheckpointError, match=re.escape(str(e))): reopen(kind, path)
        return str(e)
    try: found = contents(memory)
    except AssertionError: return 'noticed'
    assert found==want, 'wrong, and nobody noticed'
    return 'harmless'


@needs_proc
@pytest.mark.parametrize('how', DAMAGE)
@every_kind
def test_a_damaged_file_is_named(kind, how, tmp_path):
    """All files but those of rows are known to be whole at the opening; these are compared by `check_valid`. What is refused holds no
    file, and whoever puts the file back has everything again"""
    memory, path, rng = remember(kind, tmp_path/'m'), tmp_path/'m', np.random.default_rng(0)
    want = contents(memory)
    memory.close()
    whole = {name: data for name, data in files_in(path).items() if name!='lock'}
    assert len(whole) > 6
    for name, data in whole.items():
        if data is None or not any(data) and how in ('zeroed', 'a_bit'): continue
        lay(path, whole | {name: DAMAGE[how](data, rng)})
        said = what_is_said(kind, path, want)
        assert held(path)==[]
        rows = how in ('zeroed', 'a_bit') and name.startswith(MappedFolder.ROWS)
        fine = ['noticed'] + ['harmless']*(name=='journal.map' or how=='a_bit') if rows else []
        assert said in fine or name.rsplit('/')[-1] in said, f'{name}: {said}'
        (path/name).write_bytes(data)
        with reopen(kind, path) as again: assert contents(again)==want


NO_COUNTERS = [{0: -1}, {0: 0}, {0: 2**62}, {1: 1}, {1: 9}, {1: 31}, {1: 2**62}, {2: 31}, {2: -1}, {3: 1}, {0: 0, 1: 0, 2: 0}, {0: 20, 1: 0, 2: 20},
               {0: 29, 1: 9, 2: 29}]           # n_added, first_id, told, loading; at last those of an earlier flush

def changed(raw, dtype, values):
    raw = np.frombuffer(raw, dtype).copy()
    for at, v in values.items(): raw[at] = v
    return raw.tobytes()

IMPOSSIBLE = {'counts.map': [partial(changed, dtype=np.int64, values=o) for o in NO_COUNTERS],
              'priorities.map': [lambda raw, p=p: np.where(np.frombuffer(raw) > 0, p, np.frombuffer(raw)).tobytes() for p in (0., -1.)],
              'starts.map': [partial(changed, dtype=np.int32, values={1 + 4*k: 77 for k in range(20)})]}

@needs_proc
@pytest.mark.parametrize('closed', [True, False])
@every_kind
def test_what_cannot_be_is_refused(kind, closed, tmp_path):
    "Counters, priorities and starts, after a kill too, when files may differ from what was flushed; the steps can still be read"
    memory, path = remember(kind, tmp_path/'m'), tmp_path/'m'
    want = contents(memory)
    memory.close() if closed else memory.flush()
    del memory
    whole = {name: data for name, data in files_in(path).items() if name!='lock'}
    for name in whole.keys() & IMPOSSIBLE.keys():
        for change in IMPOSSIBLE[name]:
            lay(path, whole | {name: change(whole[name])})
            said = what_is_said(kind, path, want)
            assert name in said or 'interrupted' in said, said
            assert held(path)==[]
            if name=='counts.map': continue
            with ReplayMemory.peek(path) as view: assert view.recent().ids.tolist()==list(range(10, 30))
    lay(path, whole)
    with reopen(kind, path) as again: assert contents(again)==want


# --- no room ----------------------------------------------------------------------------------------------------------
def is_no_room(kind, path, max_sz):
    "Making a memory of this size is an `OSError` that names the folder, which nothing is left in"
    memory = None
    with pytest.raises(OSError, match=words('no room', path=path)) as e:
        memory = make(kind, path, max_sz)
        memory.add(step_of(kind, 0))           # the first tells how large a row is
    if memory is not None:
        assert len(memory)==0
        memory.close()
    assert not list(path.glob('*.map'))
    return e.value.errno


@some_kinds
def test_a_full_disk_is_an_error_at_the_opening(kind, tmp_path):
    with small_files(100_000): assert is_no_room(kind, tmp_path/'m', 1_000_000)==errno.EFBIG
    with remember(kind, tmp_path/'m') as memory: assert memory.n_added==30


@some_kinds
def test_a_small_disk(kind, tmp_path):
    "A file system of four megabytes: too small for a memory, room enough for another"
    with small_disk(tmp_path, '4m'):
        assert is_no_room(kind, tmp_path/'m', 400_000)==errno.ENOSPC
        with remember(kind, tmp_path/'m') as memory: want = contents(memory)
        with reopen(kind, tmp_path/'m') as memory: assert contents(memory)==want


def blocks(path): return {o.name: o.stat().st_blocks for o in path.glob('*.map')}

@some_kinds
def test_the_disk_is_full_while_it_is_open(kind, tmp_path, monkeypatch):
    "Only frames grow later. An `OSError` changes nothing and leaves nothing behind, and when there is room it goes on"
    ram, disk = (remember(kind, path, 30, 200) for path in (None, tmp_path))
    grows, other, k, begun = bool(KINDS[kind].options.get('dedup')), remember(kind, n=0, max_sz=200), 30, blocks(tmp_path)
    other.extend(steps_of(kind, 0, 200, wide=True))
    def full(*_): raise OSError(errno.ENOSPC, 'No space left on device')
    with monkeypatch.context() as patch:
        patch.setattr(mapped, '_allocate_blocks', full)
        while k < 500 and error_of(lambda: disk.add(step_of(kind, k, wide=True)))=='no error':
            ram.add(step_of(kind, k, wide=True))
            k += 1
        assert (k < 500)==grows and contents(disk)==contents(ram)
        for write in (lambda: disk.add(step_of(kind, k, wide=True)), lambda: disk.extend(steps_of(kind, k, 100, wide=True)),
                      lambda: disk.load_state_dict(other.state_dict())) if grows else ():
            with pytest.raises(OSError, match=words('no room for a file', name='frames.0.map')): write()
            assert contents(disk)==contents(ram) and blocks(tmp_path)==begun
        if not grows: disk.load_state_dict(ram.state_dict())
    for o in (ram, disk): o.extend(steps_of(kind, k, 250, wide=True))
    assert contents(disk)==contents(ram) and (blocks(tmp_path)!=begun)==grows
    disk.close()
    with reopen(kind, tmp_path) as again:
        assert contents(again)==contents(ram)
        again.load_state_dict(other.state_dict())
        assert contents(again)==contents(other)


# --- states in and out ------------------------------------------------------------------------------------------------
def go_on(memory, kind):
    "What comes of some work with a memory"
    out = []
    for k in range(5):
        memory.extend(steps_of(kind, memory.n_added, 3))
        memory.add(step_of(kind, memory.n_added))
        batch = memory.sample(4)
        out += [seen(batch), batch.update_priorities(np.arange(1., 5.) + k)]
    return out, contents(memory)


@pytest.mark.parametrize('n', [0, 9])
@some_kinds
def test_a_state_is_loaded_into_a_memory_on_disk_and_saved_from_it(kind, n, tmp_path):
    "A reopened one draws the same, but from sequences, whose starts it orders anew; an object of the user's own isn't told of old errors"
    ram = remember(kind, n=47, seed=0)
    want, state = go_on(ram, kind)[1], ram.state_dict()
    drawn, disk = go_on(ram, kind), remember(kind, tmp_path/'m', n)
    for _ in range(2):                         # then into one that is full
        disk.load_state_dict(state)
        assert contents(disk)==want and go_on(disk, kind)==drawn
    disk.load_state_dict(state)
    disk.close()
    with reopen(kind, tmp_path/'m') as disk:
        assert contents(disk)[:4 + (kind!='own')]==want[:4 + (kind!='own')]
        disk.save(tmp_path/'saved')
        again = load(kind, tmp_path/'saved')
        assert again.path is None and contents(again)==contents(disk)
        then = go_on(disk, kind)
        assert go_on(again, kind)==then and (then==drawn or kind in ('own', 'sequences', 'prioritized_sequences'))


# --- options ----------------------------------------------------------------------------------------------------------
def is_like(a, b): return (a.kind, a.options())==(b.kind, b.options())

@some_kinds
def test_options_that_differ_are_named_and_nothing_changes(kind, tmp_path):
    "`open` asks for none of those that lie with the files"
    steps, sampler, options = KINDS[kind]
    remember(kind, tmp_path).close()
    with reopen(kind, tmp_path) as memory:
        assert is_like(memory.sampler, remember(kind).sampler) and (memory.max_sz, memory.n_added)==(20, 30)
    def now(): return {k: v for k, v in files_in(tmp_path).items() if k.endswith('.map') or k in ('memory.json', 'flushed.json')}
    before, plain = now(), dict(path=tmp_path, **options)
    def has(name, its, own): return words('the folder has', name=name, its=repr(its), own=repr(own))
    cases = [(lambda: ReplayMemory(21, sampler(), **plain), has('max_sz', 20, 21)),
             (lambda: make(kind, tmp_path, codec='lz4'), 'codec'), (lambda: make(kind, tmp_path, dedup='frame'), ('dedup', None, "'frame'")),
             (lambda: make(kind, tmp_path, step=Only(np.zeros(4, np.int32))), words('steps of another type', name='Only')),
             *[(lambda o=o: make(kind, tmp_path, dedup=o), has('dedup', options.get('dedup', 'auto'), o)) for o in ('frames', 'next_state', None) if o!=options.get('dedup')]]
    if 'sequence' in options:
        cases += [(lambda: ReplayMemory(20, sampler(), path=tmp_path, sequence=Sequence(4, stride=1)), has('sampler.options.sequence.length', 3, 4)),
                  (lambda: ReplayMemory(20, sampler(), path=tmp_path), has('sampler.kind', 'SequenceSampler', sampler.__name__))]
    else:
        other = Proportional if sampler is Uniform else Uniform
        cases += [(lambda: ReplayMemory(20, other(), **plain), has('sampler.kind', sampler().kind if kind!='own' else 'OwnSampler', other.__name__))]
    if sampler is Uniform: cases += [(lambda: ReplayMemory(20, Uniform(replace=True), **plain), has(f'sampler.options.{"sampler.options." if "sequence" in options else ""}replace', False, True))]
    if kind=='proportional':
        cases += [(lambda: ReplayMemory(20, Proportional(alpha=.5, normalize='memory'), **plain), has('sampler.options.alpha', .7, .5)),
                  (lambda: ReplayMemory(20, Proportional(alpha=.7), **plain), has('sampler.options.normalize', 'memory', 'batch'))]
    for open_it, what in cases:
        with about(what, (ValueError, TypeError)): open_it()
        assert now()==before
    with refused('codec'): make(kind, tmp_path/'new', codec='lz4')
    with ReplayMemory(20, sampler(), **plain | dict(dedup='auto')) as again:
        with refused('step', TypeError): again.add(Only(np.zeros(4, np.int32)))
        assert contents(again)==contents(remember(kind))


# --- looking ----------------------------------------------------------------------------------------------------------
def is_same(a, b): return seen(a.astuple())==seen(b.astuple()) and (a.ids==b.ids).all()

@needs_proc
@some_kinds
def test_a_look_beside_the_writer(kind, tmp_path):
    memory = remember(kind, tmp_path)
    if 'sequences' not in kind: memory.update_priorities([17, 19], [5., 6.])
    with ReplayMemory.peek(tmp_path) as view:
        assert (len(view), view.max_sz, view.n_added, view.first_id)==(20, 20, 30, 10)
        assert type(memory.sampler).__name__.replace('Own', '') in repr(view) and '20 of 20' in repr(view)
        want = priorities(memory)[ids_of(memory) % 20].tolist() if isinstance(memory.sampler, Prioritized) else None
        got = view.priorities(ids_of(memory))
        assert got is None if want is None else got.tolist()==want
        for k in range(20):                    # rows and frames come and go
            memory.add(step_of(kind, memory.n_added))
            memory.extend(steps_of(kind, memory.n_added, k))
            rows = view.recent()
            assert rows.ids.tolist()==ids_of(memory).tolist() and is_same(rows, memory.recent(20))
        first, n = memory.first_id, memory.n_added
        rows = view.fetch([3, n - 4, n - 9, n + 70])
        assert rows.ids.tolist()==[n - 4, n - 9] and (rows.idxs==rows.ids % 20).all()
        assert is_same(rows, memory.fetch([n - 4, n - 9])) and len(view.fetch([]))==0
        assert set(view.sample(300, seed=0).ids.tolist())==set(range(first, n))
        with refused('ids', TypeError, got='float64 of shape (1,)'): view.fetch([1.5])
    memory.close()
    assert held(tmp_path)==[] and 'closed' in repr(view)
    for path, what in ((tmp_path/'nothing', 'no folder'), (tmp_path.parent, 'no memory yet')):
        with pytest.raises(CheckpointError, match=WORDS[what]): ReplayMemory.peek(path)
    assert not (tmp_path/'nothing').exists()


@some_kinds
def test_rows_that_are_overwritten_while_they_are_read_are_left_out(kind, tmp_path, monkeypatch):
    "Between the look at the counters and the reading"
    memory = remember(kind, tmp_path, 26)
    view, plain, late = ReplayMemory.peek(tmp_path), mapped.View.first_id, []
    def first_id(self):
        first = plain.fget(self)
        if late: memory.extend(steps_of(kind, memory.n_added, late.pop()))
        return first
    monkeypatch.setattr(mapped.View, 'first_id', property(first_id))
    late.append(3)
    rows = view.fetch(np.arange(6, 20))
    assert rows.ids.tolist()==list(range(9, 20)) and is_same(rows, memory.fetch(np.arange(9, 20)))
    late.append(40)                            # all of them
    assert view.recent(5).ids.tolist()==list(range(64, 69))
    view.close()


# --- saved ------------------------------------------------------------------------------------------------------------
class Saver(NamedTuple):
    "Something that is saved in a folder: how it is made, used some more, saved, loaded, and what it holds"
    make: Callable
    more: Callable
    load: Callable
    take: Callable                     # (an object, folder): it goes on from what was saved; or it is as it was
    holds: Callable = lambda o: o.copy()

def take_state(memory, folder):
    with SavedState(folder, 'memory') as saved, saved.sense('a memory'): memory.restore(saved.state()['memory'], saved.pieces())

def memory_saver(kind, **more):
    return Saver(lambda: remember(kind, n=250, max_sz=200, **more), lambda o: o.extend(steps_of(kind, o.n_added, 90)), partial(load, kind), take_state,
                 lambda o: (contents(o), seen(o.saved()[0])))

def replay(): return REPLAYS['prioritized'](Stream())
def used(o, use):
    use(o)
    return o

SAVERS = {kind: memory_saver(kind) for kind in KINDS} | dict(
    packed=memory_saver('frames', codec='lz4'),
    ring=Saver(lambda: Ring().add(30), lambda o: o.add(35), Ring.load, lambda o, folder: Ring.load(folder)),
    replay=Saver(lambda: used(replay(), lambda o: draw(o, 20)), lambda o: draw(o, 5), lambda folder: replay().load(folder),
                 lambda o, folder: o.load(folder), lambda o: (o.n_batches, seen(o.memory.state_dict()))),
    learner=Saver(lambda: learner().fit(3), lambda o: o.fit(2), lambda folder: used(learner(), lambda o: o.load(folder)), lambda o, folder: o.load(folder),
                  lambda o: seen(everything(o))))

every_saver = pytest.mark.parametrize('saver', SAVERS.values(), ids=SAVERS)
SOME = ['own', 'packed', 'ring', 'learner']
some_savers = pytest.mark.parametrize('saver', [SAVERS[o] for o in SOME], ids=SOME)

@pytest.fixture
def saved(saver, tmp_path):
    "What was saved twice in this folder; the folder, its files"
    thing = saver.make()
    thing.save(tmp_path/'saved')
    saver.more(thing)
    thing.save(tmp_path/'saved')
    return thing, tmp_path/'saved', files_in(tmp_path/'saved')


def flips(data, rng):
    "The file with one bit flipped: in its header, at its end, anywhere"
    for at in {0, 8, 10, 40, len(data) - 1, len(data) - 2, *rng.integers(len(data), size=6).tolist()}:
        yield data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1:]

SPOILT = dict(flipped=flips, cut=lambda data, rng: (data[:n] for n in (0, 1, len(data)//2, len(data) - 1)), missing=lambda data, rng: [None],
              a_pipe=lambda data, rng: [os.mkfifo], a_folder=lambda data, rng: [os.mkdir])       # a pipe: to read it would be to wait for ever

@pytest.mark.parametrize('how', SPOILT)
@every_saver
def test_a_spoilt_file_is_named_and_what_was_to_load_it_is_as_it_was(saver, how, saved):
    (_, folder, files), rng, victim = saved, np.random.default_rng(0), saver.make()
    assert len(files) >= 2
    before = saver.holds(victim)
    for name, data in files.items():
        for spoilt in SPOILT[how](data, rng):
            lay(folder, files | {name: spoilt if isinstance(spoilt, bytes) else None})
            if callable(spoilt): spoilt(folder/name)
            for call in (lambda: saver.load(folder), lambda: saver.take(victim, folder)):
                with pytest.raises(CheckpointError, match=re.escape(name)): call()
    assert saver.holds(victim)==before
    lay(folder, files)
    saver.take(victim, folder)
    with pytest.raises(CheckpointError, match=words('no folder of this name', name='nothing')): saver.load(folder.with_name('nothing'))


@some_savers
def test_what_was_saved_comes_back_also_into_a_damaged_folder(saver, saved):
    "The run goes on: a save writes again what it can't trust"
    thing, folder, files = saved
    assert saver.holds(saver.load(folder))==saver.holds(thing)
    for name in files:
        if (folder/name).exists(): (folder/name).write_bytes((folder/name).read_bytes()[:-3])
        saver.more(thing)
        thing.save(folder)
        assert saver.holds(saver.load(folder))==saver.holds(thing) and is_tidy(folder)


@pytest.mark.parametrize('limit', [100, None])
@some_savers
def test_a_full_disk_leaves_what_was_saved_before(saver, limit, saved):
    "Full at once, after some bytes, or only for the manifest, which comes last"
    thing, folder, files = saved
    saver.more(thing)
    before = saver.holds(thing)
    with small_files(len(files[MANIFEST])//2 if limit is None else limit), pytest.raises(OSError): thing.save(folder)
    assert files_in(folder)==files and saver.holds(thing)==before
    thing.save(folder)
    assert saver.holds(saver.load(folder))==before


@some_savers
def test_a_save_waits_for_those_who_load_but_not_for_ever(saver, saved, monkeypatch):
    "A save within a load would wait for itself"
    thing, folder, _ = saved
    monkeypatch.setattr(saving, 'PATIENCE', .05)
    with SavedState(folder), SavedState(folder), pytest.raises(BlockingIOError, match=folder.name): thing.save(folder)
    thing.save(folder)


@some_savers
def test_a_child_forked_during_a_save_does_not_hold_its_lock(saver, saved, monkeypatch):
    (thing, folder, _), children = saved, []
    def fork(_):
        if children: return
        children.append(os.fork())
        if not children[0]:
            try: signal.pause()
            finally: os._exit(1)
    monkeypatch.setattr(saving, 'PATIENCE', .5)
    saver.more(thing)
    with monkeypatch.context() as patch:
        patch.setattr(os, 'fsync', fork)
        thing.save(folder)
    try:
        saver.more(thing)
        thing.save(folder)
        os.kill(children[0], 0)                # it lives
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)
