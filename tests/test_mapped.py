"""A folder of mapped files: one writer, no hole that a full disk could tear open, and nothing held after `close`."""
import os
import resource
import shutil
import subprocess
import sys
import warnings
from functools import partial

import numpy as np
import pytest

from fastrl_replay.saving import CheckpointError
from fastrl_replay.steps import Layout, SimpleStep, Transition
from fastrl_replay.storage import mapped
from fastrl_replay.storage.mapped import MappedFolder
from fastrl_replay.storage.records import FIRST_ID, Records
from hostile import rewrite
from lasting import held, needs_proc
from faults import interrupted, moments, torn
from refusals import refused
from words import WORDS, words


pytestmark = pytest.mark.usefixtures('quick')


def made(path, **files):
    "A folder with these files, described"
    folder = MappedFolder(path)
    arrays = {name: folder.allocate(name, n) for name, n in dict(counts=64, **files).items()}
    folder.describe(dict(max_sz=3))
    return folder, arrays


# --- files ------------------------------------------------------------------------------------------------------------
@needs_proc
@pytest.mark.parametrize('hold', [False, True])
def test_close_gives_everything_back(hold, tmp_path):
    folder, arrays = made(tmp_path, numbers=1 << 20)
    assert len(held(tmp_path)) > 3
    kept = arrays['numbers'][:3] if hold else None
    del arrays
    folder.close()
    folder.close()
    if hold: assert kept.tolist()==[0, 0, 0]   # a view outlives `close`, and takes its mapping with it
    del kept
    assert held(tmp_path)==[] and folder.closed


def test_blocks_are_there_before_they_are_written(tmp_path):
    folder, _ = made(tmp_path, numbers=10_000_000)
    assert os.stat(tmp_path/'numbers.map').st_blocks*512 >= 10_000_000 > 1000*resource.getpagesize()
    folder.close()
    hole = tmp_path/'numbers.map'              # as a copy that leaves zeros out makes it
    os.truncate(hole, 0)
    os.truncate(hole, 10_000_000)
    folder = MappedFolder(tmp_path)
    folder.allocate('numbers', 10_000_000)
    assert os.stat(hole).st_blocks*512 >= 10_000_000
    folder.close()


@pytest.mark.parametrize('has_fallocate', [True, False])
def test_a_growing_file_is_given_blocks_as_it_is_asked_for_them(has_fallocate, tmp_path, monkeypatch):
    if not has_fallocate: monkeypatch.delattr(os, 'posix_fallocate')
    folder, size, used = MappedFolder(tmp_path), 1 << 36, lambda: os.stat(tmp_path/'frames.map').st_blocks*512
    frames = folder.allocate('frames', size, grow=True)
    folder.describe({})
    folder.extend('frames', 5 << 20)
    frames[:5 << 20] = 7
    assert 5 << 20 <= used() < 6 << 20
    folder.extend('frames', (5 << 20) + 1)     # an eighth more
    assert (45 << 20)//8 <= used() < 7 << 20
    folder.extend('frames', 1000)
    assert used() < 7 << 20 and (frames[:5 << 20]==7).all() and not frames[5 << 20:6 << 20].any()
    with refused('upto'): folder.extend('frames', size + 1)
    folder.close()
    again = MappedFolder(tmp_path)
    frames = again.allocate('frames', size, grow=True)
    again.extend('frames', 6 << 20)
    assert (frames[:5 << 20]==7).all() and not frames[5 << 20:6 << 20].any()
    again.close()


def test_what_an_interrupted_opening_left_is_removed(tmp_path):
    folder = MappedFolder(tmp_path)
    folder.allocate('records', 50)
    shutil.copytree(tmp_path, tmp_path.with_name('killed'))
    folder.close()
    assert [o.name for o in tmp_path.iterdir()]==['lock']
    MappedFolder(tmp_path.with_name('killed')).close()
    assert [o.name for o in tmp_path.with_name('killed').iterdir()]==['lock']


def test_a_reader_writes_nothing(tmp_path):
    folder, arrays = made(tmp_path, numbers=50)
    reader = MappedFolder(tmp_path, writable=False)
    seen = reader.allocate('numbers', 50)
    arrays['numbers'][7] = 9
    assert seen[7]==9 and reader.journal(64, 100) is None
    with pytest.raises(ValueError, match=WORDS['numpy is read-only']): seen[0] = 1
    reader.extend('numbers', 50)
    reader.close()
    for path, said in ((tmp_path/'nothing', WORDS['no folder']), (tmp_path.parent, WORDS['no memory yet'])):
        with pytest.raises(CheckpointError, match=said): MappedFolder(path, writable=False)
    assert not (tmp_path/'nothing').exists()


def test_a_windows_without_fcntl_imports_it():
    code = ('import os, sys, torch\nfor name in ("fcntl", "resource", "pwd"): sys.modules[name] = None\n'
            'del os.register_at_fork, os.posix_fallocate\nimport fastrl_replay.storage.mapped')
    ran = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert ran.returncode==0, ran.stderr


# --- the power goes ---------------------------------------------------------------------------------------------------
@pytest.fixture
def boots(monkeypatch):
    "Which boot of the computer this is; call it to restart"
    now = [0]
    monkeypatch.setattr(mapped, 'boot_id', lambda: f'boot {now[0]}')
    def restart(): now[0] += 1
    return restart


def opened(path):
    "Open, as a storage does, and close, with the warnings"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        folder = MappedFolder(path)
        folder.begin_use()
    folder.close()
    return folder.power_cut, [str(o.message) for o in said]


def test_after_a_power_cut_the_opening_says_what_is_certain(tmp_path, boots):
    folder, arrays = made(tmp_path)
    counts = arrays['counts'].view(np.int64)
    counts[:2] = 30, 10
    folder.flush()
    counts[:2] = 40, 20
    folder.close()                             # a kill, or a close without a flush
    assert opened(tmp_path)==(None, [])        # the same boot: the page cache has it all
    boots()
    cut, said = opened(tmp_path)
    assert (cut.n_added, cut.first_id)==(30, 10) and len(said)==1
    assert 'ids below 30' in said[0] and 'check_valid()' in said[0] and str(tmp_path) in said[0]
    assert opened(tmp_path)==(None, [])        # said once
    boots()
    assert opened(tmp_path)[0]==cut            # and nothing was flushed since


def test_a_power_cut_before_any_flush(tmp_path, boots):
    made(tmp_path)[0].close()
    boots()
    assert opened(tmp_path)[0][:2]==(0, 0)


@pytest.mark.parametrize('change', [dict(n_added='many'), dict(time=None), dict(boot=[]), dict(closed=3)])
def test_a_damaged_note_is_named(change, tmp_path):
    made(tmp_path)[0].close()
    rewrite(tmp_path/'flushed.json', change)
    with pytest.raises(CheckpointError, match=words('a damaged file', name='flushed.json')): MappedFolder(tmp_path)


# --- the journal ------------------------------------------------------------------------------------------------------
def state(k): return np.full(3, k, np.float32)
LAYOUTS = dict(keyed=lambda k: SimpleStep(state(k), k, state(k + 1), env_id=k % 3),
               plain=lambda k: Transition(state(k), k, float(k), state(k + 1), False, False))

def records_over(path, make, max_sz=8):
    folder, layout = MappedFolder(path), Layout.of(make(0))
    records = Records(max_sz, layout, folder)
    if not folder.description: folder.describe(dict(max_sz=max_sz, layout=layout.to_plain()))
    return records


def fetched(records, slots):
    request = records.ask(len(slots))
    request.slots[:] = slots
    return records.read(request)

def contents(records):
    "All rows with their ids and links, once they have been found to be in order"
    assert records.check_valid()
    if not records.n_added: return [[], []]
    slots = np.arange(records.first_id, records.n_added) % records.max_sz
    rows = fetched(records, slots)
    assert (rows.next_state==rows.state + 1).all() and (rows.action==rows.state[:, 0]).all()
    return [rows.ids.tolist(), rows.action.tolist(), *(records.follow(slots, 2, back)[:, 1].tolist() for back in (True, False))]


def stored(records, steps):
    if len(steps)==1: return records.add(steps[0])
    return records.put(records.accept(steps))


def released(records):
    folder = records.room
    records.close()
    folder.close()


@pytest.mark.parametrize('kind', LAYOUTS)
def test_a_write_cut_short_at_any_line_is_undone(kind, tmp_path):
    """The files are copied before every line; each copy, and a mixture of two, opens as the state before or after.

    A chunk that crosses the ring's end goes in in pieces."""
    make, rng, undone, count = LAYOUTS[kind], np.random.default_rng(0), 0, 0
    records = records_over(tmp_path/'m', make)
    notes = {name: (tmp_path/'m'/name).read_bytes() for name in ('memory.json', 'flushed.json')}
    for m in (1, 1, 3, 5, 1, 1, 3, 8, 1, 20):
        n, before = records.n_added, contents(records)
        steps = [make(n + k) for k in range(m)]
        shots = moments(tmp_path/'m', partial(stored, records, steps))
        after = contents(records)
        for a, b in zip(shots, shots[1:] + shots[-1:]):
            for files in (a, *(torn(a, b, rng) for _ in range(4))):
                path, count = tmp_path/str(count), count + 1
                path.mkdir()
                for name, data in (files | notes).items(): (path/name).write_bytes(data)
                again = records_over(path, make)
                got = contents(again)
                assert got in (before, after) if n % 8 + m <= 8 else n <= again.n_added <= n + m
                assert got[0]==got[1]==list(range(max(0, again.n_added - 8), again.n_added))
                undone += got==before and np.frombuffer(files['counts.map'], np.int64)[FIRST_ID] > max(0, n - 8)
                released(again)
    assert undone > 20, f'only {undone} writes were cut short while they overwrote something'
    released(records)


@pytest.mark.parametrize('durable', [False, True])
@pytest.mark.parametrize('m', [1, 3])
@pytest.mark.parametrize('kind', LAYOUTS)
def test_a_write_interrupted_at_any_line_is_completed_or_never_was(kind, m, durable, tmp_path):
    "As by Ctrl-C; rows are whole at once, nothing is missing, and a kill after the next write finds the same"
    make = LAYOUTS[kind]
    for line in range(1000):
        path = tmp_path/str(line)
        records = records_over(path, make) if durable else Records(8, Layout.of(make(0)))
        for k in range(11): records.add(make(k))
        again = interrupted(partial(stored, records, [make(11 + k) for k in range(m)]), line)
        fetched(records, np.arange(8))                    # as a sampler that knows nothing of it
        n = records.n_added
        assert n in (11, 11 + m) and contents(records)[1]==list(range(n - 8, n))
        records.add(make(n))
        assert contents(records)[1]==list(range(n - 7, n + 1))
        if durable:
            released(records)
            records = records_over(path, make)
            assert contents(records)[1]==list(range(n - 7, n + 1))
            released(records)
        if not again: return
    raise AssertionError('the write never came to its end')


# --- looking ----------------------------------------------------------------------------------------------------------
def test_a_journal_has_room_for_as_many_rows_as_it_says(tmp_path):
    folder = MappedFolder(tmp_path)
    assert [len(folder.journal(*o)) for o in ((64, 10), (64, 10**6), (10**5, 10**6))]==[10, 2**14, 256]
    folder.close()
