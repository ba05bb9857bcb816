"""The format of saved states: what a state may hold, increments by id, every call of a save failing in turn, interrupts, kills, damage, strangers."""
import os
import signal
import subprocess
import sys
import threading
import time
import zlib

import numpy as np
import pytest
import torch

from fastrl_replay import saving
from fastrl_replay.saving import (FORMAT, MANIFEST, CheckpointError, Rows, SavedState, lock_file, read_manifest, save_state)
from harness import seen
from hostile import attack, forge, nested, no_pickle, setter
from faults import Calls, Injected, interrupted
from refusals import refused
from words import WORDS


class Ring:
    "A naive memory of rows, which knows how to save and to load itself"
    def __init__(self, max_sz=40, width=100):
        self.max_sz, self.n, self.known = max_sz, 0, {}
        self.rows, self.births, self.priorities = np.zeros((max_sz, width), np.float32), np.zeros(max_sz, np.int64), np.ones(200)

    @property
    def first(self): return max(0, self.n - self.max_sz)

    def add(self, m=1):
        for _ in range(m):
            self.rows[self.n % self.max_sz], self.births[self.n % self.max_sz] = self.n, self.n
            self.priorities[self.n % len(self.priorities)] += 1
            self.n += 1
        return self

    def get(self, since):
        slots = np.arange(since, self.n) % self.max_sz
        return dict(first=since, rows=self.rows[slots], births=self.births[slots], tail={'!odd': (1, np.arange(since, self.n))})

    def as_rows(self): return Rows(self.first, self.n, self.get, self.known)
    def save(self, folder): return save_state(folder, dict(max_sz=self.max_sz, n=self.n, priorities=self.priorities), 'ring', self.as_rows())

    @classmethod
    def load(cls, folder, width=100):
        with SavedState(folder, 'ring') as saved, saved.sense('a ring'):
            state = saved.state()
            if not 0 < state['max_sz'] < 10**6: raise ValueError('max_sz')
            ring = cls(state['max_sz'], width)
            ring.priorities[:] = state['priorities']
            for piece in saved.pieces():
                ids = piece['tail']['!odd'][1]
                if (piece['births']!=ids).any() or len(ids)!=len(piece['rows']): raise ValueError('ids')
                ring.rows[ids % ring.max_sz], ring.births[ids % ring.max_sz] = piece['rows'], piece['births']
                ring.n = int(ids[-1]) + 1
            if ring.n!=state['n']: raise ValueError('n')
            ring.known = {saved.token: ring.n}
        return ring

    def __eq__(self, other):
        if not isinstance(other, Ring): return False
        return self.n==other.n and all(np.array_equal(getattr(self, k), getattr(other, k)) for k in ('rows', 'births', 'priorities'))

    def copy(self):
        again = Ring(self.max_sz, self.rows.shape[1])
        again.n, again.known, again.rows, again.births, again.priorities = (self.n, dict(self.known), self.rows.copy(), self.births.copy(), self.priorities.copy())
        return again


def pieces_of(folder): return [(o['first'], o['end']) for o in read_manifest(folder/MANIFEST)['pieces']]

def named_in(folder):
    manifest = read_manifest(folder/MANIFEST)
    return {name for part in (manifest['state'], *manifest['pieces']) for name in part['files']}

def is_tidy(folder): return {o.name for o in folder.iterdir()}==named_in(folder) | {MANIFEST}


# --- what a state may hold --------------------------------------------------------------------------------------------
def anything():
    "A bit of everything"
    big = np.random.default_rng(0).random((20, 24))
    return dict(none=None, flag=True, n=-2**70, x=.1, inf=float('inf'), text='ä\n\ud800', nested=[1, (2, [3.5]), {}], keys={1: 'a', (2, 3): 'b', '!x': 4},
                a=np.arange(6, dtype='>i2').reshape(2, 3), empty=np.empty((0, 4), np.float16), scalar=np.array(3.5), c=np.ones(2, np.complex128),
                flags=np.array([True, False]), t=torch.arange(4.).reshape(2, 2), b=torch.ones(3, dtype=torch.bfloat16), zero=torch.tensor(2.),
                none_of_it=torch.empty(0, 3), big=big, turned=big.T, some=big[::3, 1::2], backwards=big[::-1, ::-1],
                swapped=big.astype('>f8'), wide=np.broadcast_to(big[0], (50, 24)), flags2=big > .5, cplx=big + 1j, half=big.astype(np.float16),
                tensor=torch.rand(40, 30, dtype=torch.float64).to(torch.bfloat16), columns=torch.rand(40, 30).T, packed=np.asfortranarray(big))


def test_what_a_state_may_hold(tmp_path):
    state = anything()
    written = save_state(tmp_path, state, 'anything')
    with SavedState(tmp_path) as saved:
        again = saved.state()
        assert (saved.kind, list(saved.pieces()))==('anything', [])
    assert written==sum(o.stat().st_size for o in tmp_path.iterdir())
    assert seen(again)==seen(state)
    assert all(v.flags.writeable for v in again.values() if isinstance(v, np.ndarray)), 'the caller may go on with them'
    for wrong in (object(), {1}, np.array(['a']), np.array([object()]), np.zeros(2, 'i4,f8'), np.ma.ones(3), b'x', 1j, print):
        with refused('state.deep.0', TypeError): save_state(tmp_path, dict(deep=[wrong]), 'anything')
    with SavedState(tmp_path) as saved: assert seen(saved.state())==seen(state)
    with refused(str(tmp_path/'manifest.json'), CheckpointError, expected='the state of a memory', got='a anything'): SavedState(tmp_path, 'memory')
    assert is_tidy(tmp_path)


def test_blocks_of_every_size(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, 'BLOCK', 1 << 12)
    rng, state = np.random.default_rng(0), {}
    for k in range(40):
        a = rng.random(tuple(rng.integers(1, 12, size=int(rng.integers(1, 5)))))
        state[f'a{k}'] = a.transpose(rng.permutation(a.ndim))[::int(rng.choice([1, 1, 2, -1]))]
    save_state(tmp_path, state, 'arrays')
    with SavedState(tmp_path) as saved: assert seen(saved.state())==seen(state)


# --- increments -------------------------------------------------------------------------------------------------------
def test_a_second_save_writes_what_is_new(tmp_path):
    ring = Ring(20_000, 16).add(20_000)
    first = ring.save(tmp_path)
    second = ring.add(200).save(tmp_path)
    assert second < .03*first and pieces_of(tmp_path)==[(0, 20_000), (20_000, 20_200)]
    assert Ring.load(tmp_path, 16)==ring and is_tidy(tmp_path)
    assert ring.save(tmp_path) < .01*first and len(pieces_of(tmp_path))==2, 'nothing is new'


def test_a_folder_holds_the_last_state_whatever_came_before(tmp_path):
    "Memories that are saved by turns, loaded, copied, go back in time; folders that are copied, damaged, or lose files"
    rng, rings, folders, saves = np.random.default_rng(0), [Ring(), Ring(7)], [tmp_path/'a', tmp_path/'b'], 0
    holds = {}
    for _ in range(400):
        k, folder = int(rng.integers(len(rings))), folders[int(rng.integers(2))]
        what = rng.choice(['save', 'add', 'load', 'copy', 'lose'], p=[.45, .35, .1, .05, .05])
        if what=='add': rings[k].add(int(rng.choice([1, 3, 30])))
        elif what=='load' and folder in holds: rings[k] = Ring.load(folder)
        elif what=='copy': rings.append(rings[k].copy())
        elif what=='lose' and folder in holds and named_in(folder):
            (folder/sorted(named_in(folder))[int(rng.integers(len(named_in(folder))))]).unlink()
            del holds[folder]
        elif what=='save':
            rings[k].save(folder)
            holds[folder] = rings[k].copy()
            saves += len(pieces_of(folder)) > 1
            assert is_tidy(folder)
        rings = rings[-4:]
        for o, want in holds.items(): assert Ring.load(o)==want
    assert saves > 10, 'hardly ever was there an increment'


def test_many_small_saves_become_one_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, 'PIECES', 5)
    ring, counts = Ring(200), []
    for _ in range(20):
        ring.add(3).save(tmp_path)
        counts.append(len(pieces_of(tmp_path)))
    assert max(counts)==5 and counts.count(1) >= 3 and Ring.load(tmp_path)==ring


def test_only_a_known_token_is_built_upon(tmp_path):
    one, two = Ring().add(20), Ring().add(25)
    one.save(tmp_path)
    two.known = {'0'*16: 20}
    two.save(tmp_path)
    assert pieces_of(tmp_path)==[(0, 25)]
    one.add(8).save(tmp_path)
    assert pieces_of(tmp_path)==[(0, 28)] and Ring.load(tmp_path)==one
    with SavedState(tmp_path) as saved: assert one.known[saved.token]==28
    for _ in range(2*saving._TOKENS): one.save(tmp_path)
    assert len(one.known)==saving._TOKENS


# --- every call of a save fails, in turn ------------------------------------------------------------------------------
def quiet_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(saving, "PATIENCE", 1.)


def before_a_save(tmp_path, name, case):
    "A folder and a memory that is about to be saved into it: for the first time, again with more rows, or anew"
    folder, ring = tmp_path/name/'deep'/'folder', Ring().add(25)
    if case!='first':
        ring.save(folder)
        ring.add(30)
    if case=='anew': ring.known.clear()
    return folder, ring


CASES = ['first', 'again', 'anew']

@pytest.mark.parametrize('error', [Injected, KeyboardInterrupt])
@pytest.mark.parametrize('after', [False, True])
@pytest.mark.parametrize('case', CASES)
def test_every_call_to_the_system_fails_in_turn(tmp_path, monkeypatch, case, after, error):
    kept_old = made_new = 0
    quiet_disk(monkeypatch)
    for fail in range(500):
        folder, ring = before_a_save(tmp_path, f'{fail}', case)
        old, raised = Ring.load(folder) if folder.exists() else None, None
        with monkeypatch.context() as patch:
            calls = Calls(patch, fail, after, error)
            try: ring.save(folder)
            except (Injected, KeyboardInterrupt) as e: raised = e
        if len(calls.made) <= fail: break
        found, what = Ring.load(folder) if (folder/MANIFEST).exists() else None, calls.made[fail]
        assert found in (old, ring), f'{what}, call {fail}: neither the old state nor the new one'
        assert raised or found==ring, f'{what}, call {fail}: the save said nothing and did nothing'
        if found!=ring and what!='unlink':
            assert is_tidy(folder) if old else not (tmp_path/f'{fail}').exists(), f'{what}, call {fail}: a failed save left something'
        kept_old, made_new = kept_old + (found!=ring), made_new + (found==ring)
        ring.add(2).save(folder)
        assert Ring.load(folder)==ring and is_tidy(folder)
    else: pytest.fail('a save never ends')
    assert kept_old > 15 and made_new > 3 and {'replace', 'mkdir' if case=='first' else 'unlink', 'write', 'flock'} <= {*calls.made}


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')      # an interrupt within __del__
@pytest.mark.parametrize('case', CASES)
def test_an_interrupt_at_every_line(tmp_path, monkeypatch, case):
    "Ctrl-C at each line of the module"
    quiet_disk(monkeypatch)
    kept_old = made_new = 0
    for stop in range(5000):
        folder, ring = before_a_save(tmp_path, f'{stop}', case)
        old = Ring.load(folder) if folder.exists() else None
        if not interrupted(lambda ring=ring, folder=folder: ring.save(folder), stop, saving.__file__, KeyboardInterrupt, events=('line',)): break
        found = Ring.load(folder) if (folder/MANIFEST).exists() else None
        assert found in (old, ring), f'interrupted at line event {stop}'
        kept_old, made_new = kept_old + (found!=ring), made_new + (found==ring)
        ring.add(2).save(folder)
        assert Ring.load(folder)==ring and is_tidy(folder)
    else: pytest.fail('a save never ends')
    assert kept_old > 50 and made_new > 10


def test_a_failed_sync_of_the_folder_keeps_the_new_state(tmp_path, monkeypatch):
    "The rename has happened: what the manifest in place names stays"
    ring = Ring().add(25)
    ring.save(tmp_path)
    ring.add(30)
    with monkeypatch.context() as patch:
        patch.setattr(saving, 'sync_folder', lambda _: (_ for _ in ()).throw(OSError('the folder')))
        with pytest.raises(OSError, match='the folder'): ring.save(tmp_path)
    assert Ring.load(tmp_path)==ring


def test_a_failed_first_save_leaves_no_folder(tmp_path):
    there = tmp_path/'there'
    there.mkdir()
    for folder in (tmp_path/'a'/'b', there/'c', there):
        with refused('state.x', TypeError): save_state(folder, dict(big=np.zeros(1000), x=object()), 'x')
    assert [o.name for o in tmp_path.iterdir()]==['there'] and not list(there.iterdir())


def test_a_process_killed_at_any_time(tmp_path, request):
    "It saves without end; whenever it dies, the last state that it reported, or the one it was at, is there"
    rng, report = np.random.default_rng(0), tmp_path/'report'
    folder, lived = tmp_path/'folder', 0
    for _ in range(request.config.getoption('--kills')):
        report.write_bytes(b'')
        pid = os.fork()
        if pid==0:
            try:
                ring, fd = Ring.load(folder) if folder.exists() and (folder/MANIFEST).exists() else Ring(), os.open(report, os.O_WRONLY | os.O_APPEND)
                while True:
                    ring.add(int(rng.integers(1, 30))).save(folder)
                    os.write(fd, f'{ring.n}\n'.encode())
            finally: os._exit(1)
        saves, patience = int(rng.choice([0, 1, 2, 5])), time.monotonic() + 60
        while report.read_bytes().count(b'\n') < saves and time.monotonic() < patience: time.sleep(.0005)
        time.sleep(float(rng.uniform(0, .02)))
        os.kill(pid, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1])==signal.SIGKILL, 'it died of something else'
        reported = [int(o) for o in report.read_text().split()]
        lived += len(reported)
        if not (folder/MANIFEST).exists():
            assert not reported
            continue
        ring = Ring.load(folder)
        assert ring==Ring().add(ring.n) and ring.n >= max(reported, default=0)
    ring.add(1).save(folder)
    assert lived and is_tidy(folder)


# --- damage -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def saved_twice(tmp_path):
    ring = Ring().add(30)
    ring.save(tmp_path)
    ring.add(35).save(tmp_path)
    return tmp_path

def not_loaded(folder, match):
    with pytest.raises(CheckpointError, match=match): Ring.load(folder)


def test_a_failing_disk_is_named(saved_twice, monkeypatch):
    for number in range(3):
        with monkeypatch.context() as patch:
            seen, real = [], os.path.isfile
            def isfile(path, seen=seen, number=number, real=real):
                seen.append(path)
                return real(path) if len(seen) <= number else False
            patch.setattr(os.path, 'isfile', isfile)
            not_loaded(saved_twice, WORDS['no file'])


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    for name in ('notes.txt', 'x.npy', 'abc-1.npy', '0'*16 + '-1.npz', 'deep'): (tmp_path/name).write_text('mine')
    orphan = tmp_path/('0'*16 + '-7.npy')
    orphan.write_bytes(b'half a save that was killed')
    ring = Ring()
    for _ in range(3): ring.add(20).save(tmp_path)
    assert not orphan.exists() and is_tidy(tmp_path) is False
    assert {o.name for o in tmp_path.iterdir()} - named_in(tmp_path)=={MANIFEST, 'notes.txt', 'x.npy', 'abc-1.npy', '0'*16 + '-1.npz', 'deep'}


# --- strangers --------------------------------------------------------------------------------------------------------
FORGERIES = dict(
    far_file=lambda o: o['state'].update(files={'../../etc/passwd': [10, 0]}),
    absolute=lambda o: o['pieces'][0].update(files={'/etc/passwd': [10, 0]}),
    far_file_used=lambda o: o['state']['plain'].update(priorities={'!file': '../../etc/passwd'}),
    unlisted=lambda o: o['state']['plain'].update(priorities={'!file': '0'*16 + '-0.npy'}),
    listed_twice=lambda o: o['state']['files'].update(o['pieces'][0]['files']),
    used_twice=lambda o: o['state']['plain'].update(again=o['state']['plain']['priorities']),
    negative_size=lambda o: o['state']['files'].update({k: [-1, 0] for k in o['state']['files']}),
    huge_size=lambda o: o['state']['files'].update({k: [2**61, 0] for k in o['state']['files']}),
    objects=setter('state', 'plain', 'priorities', value={'!array': ['|O', [1], 'AAAAAAAAAAA=']}),
    code_as_dtype=setter('state', 'plain', 'priorities', value={'!array': ['__import__("os").abort()', [1], '']}),
    huge_shape=setter('state', 'plain', 'priorities', value={'!array': ['<f8', [2**40, 2**40], '']}),
    bad_base64=setter('state', 'plain', 'priorities', value={'!array': ['<f8', [1], 'AAAA*AAAAAA=']}),
    a_tensor_of_nothing=setter('state', 'plain', 'priorities', value={'!tensor': [[1], 'load', [1]]}),
    a_huge_tensor=setter('state', 'plain', 'priorities', value={'!tensor': [{'!array': ['|u1', [0], '']}, 'float32', [2**62, 2**62]]}),
    unknown_tag=setter('state', 'plain', 'priorities', value={'!eval': 'print(1)'}),
    two_tags=setter('state', 'plain', 'priorities', value={'!tuple': [], 'x': 1}),
    no_key=setter('state', 'plain', 'priorities', value={'!pairs': [[[], 1]]}),
    deep=setter('state', 'plain', 'priorities', value=nested(900)),
    no_state=lambda o: o.pop('state'),
    no_files=lambda o: o['state'].pop('files'),
    no_token=setter('token', value=None),
    path_as_token=setter('token', value='../../../tmp/abc'),
    pieces_backwards=lambda o: o['pieces'].reverse(),
    pieces_with_a_gap=lambda o: o['pieces'].pop(0),
    a_piece_too_few=lambda o: o['pieces'].pop(),
    no_pieces=setter('pieces', value=[]),
    pieces_of_something=setter('pieces', value={'a': 1}),
    an_empty_piece=lambda o: o['pieces'].append(dict(o['pieces'][-1], first=65, files={})),
    from_before=setter('pieces', 0, 'first', value=-5),
    true_as_a_number=setter('pieces', 0, 'first', value=False),
    half_a_row=setter('n_added', value=65.),
    too_many=setter('n_added', value=2**70),
    emptied=lambda o: o.clear(),
)

@pytest.mark.parametrize('forgery', FORGERIES)
def test_a_strangers_manifest_is_refused(saved_twice, forgery, monkeypatch):
    "Whole by its checksums, and asking for what it should not have"
    forge(saved_twice, FORGERIES[forgery])
    no_pickle(monkeypatch)
    not_loaded(saved_twice, WORDS['bytes of a file'] if forgery=='huge_size' else MANIFEST)
    ring = Ring().add(3)
    ring.known = {read_manifest(saved_twice/MANIFEST).get('token'): 65}
    ring.save(saved_twice)
    assert Ring.load(saved_twice)==ring


@pytest.mark.parametrize('body', [b'', b'{', b'['*100_000, b'[1]', b'3', b'null', b'"x"', b'{"a":' + b'9'*5000 + b'}', b'\xff\xfe', b'{"state":{"files":{},"plain":' + b'['*5000 + b']'*5000 + b'}}'])
def test_a_manifest_that_is_no_manifest_is_refused(tmp_path, body):
    body += b'\n'
    (tmp_path/MANIFEST).write_bytes(b'{"format":%d,"crc32":"%08x"}\n%b' % (FORMAT, zlib.crc32(body), body))
    not_loaded(tmp_path, MANIFEST)


HEADERS = [b'(-25, -100)', b'(25, 100, 99999999999)', b'(99999999999999999999, 100)', b'(25,)', b'(0,)', b'"x"', b'(2.5, 100)', b'(' + b'('*50]

@pytest.mark.parametrize('shape', HEADERS)
def test_a_strangers_header_is_refused(tmp_path, shape):
    Ring().add(25).save(tmp_path)
    name = max(named_in(tmp_path), key=lambda o: (tmp_path/o).stat().st_size)
    raw = (tmp_path/name).read_bytes()
    assert b'(25, 100)' in raw[:128]
    raw = raw[:128].replace(b'(25, 100)', shape).replace(b' '*max(0, len(shape) - 9), b'', 1)[:127] + b'\n' + raw[128:]
    (tmp_path/name).write_bytes(raw)
    forge(tmp_path, lambda o: o['pieces'][0]['files'].update({name: [len(raw), zlib.crc32(raw)]}))
    not_loaded(tmp_path, name)


@pytest.mark.parametrize('data', [b'', b'\x93NUMPY', b'PK\x05\x06' + bytes(18), b'\x80\x04N.', b'\x93NUMPY\x09\x00' + bytes(200)])
def test_a_file_that_is_no_array_is_refused(tmp_path, data):
    Ring().add(25).save(tmp_path)
    name = min(named_in(tmp_path))
    (tmp_path/name).write_bytes(data)
    def mend(manifest):
        for part in (manifest['state'], *manifest['pieces']):
            if name in part['files']: part['files'][name] = [len(data), zlib.crc32(data)]
    forge(tmp_path, mend)
    not_loaded(tmp_path, name)


def test_mutants(tmp_path, saved_twice_elsewhere, request):
    "Manifests and arrays mutated, their checksums mended; 100, or with `--mutants N` more"
    def load(folder): Ring.load(folder).add(3)
    n = request.config.getoption('--mutants')
    counts = attack(saved_twice_elsewhere, load, n, tmp_path)
    assert counts['refused'] > n//2, f'hardly a mutant was one: {counts}'

@pytest.fixture
def saved_twice_elsewhere(tmp_path_factory):
    folder, ring = tmp_path_factory.mktemp('origin')/'ring', Ring().add(30)
    ring.save(folder)
    ring.add(35)
    save_state(folder, dict(max_sz=40, n=65, priorities=ring.priorities, extra=anything()), 'ring', ring.as_rows())
    return folder


# --- files and locks --------------------------------------------------------------------------------------------------
def test_two_saves_at_a_time_and_loads_between(tmp_path):
    "Threads here, and another process: every load finds a whole state"
    rings, stop, wrong = [Ring().add(20), Ring(9).add(5)], threading.Event(), []
    rings[0].save(tmp_path)
    def saver(ring):
        while not stop.wait(.005): ring.add(3).save(tmp_path)
    def loader():
        while not stop.wait(.005):
            ring = Ring.load(tmp_path)
            if ring!=Ring(ring.max_sz).add(ring.n): wrong.append(ring.n)
    code = ('import sys; sys.path.insert(0, "tests"); from test_saving_format import Ring; from pathlib import Path\n'
            f'for k in range(1, 9): Ring(5).add(k).save(Path({str(tmp_path)!r}))')
    threads = [threading.Thread(target=saver, args=[o]) for o in rings] + [threading.Thread(target=loader) for _ in range(2)]
    for o in threads: o.start()
    ran = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=300)
    stop.set()
    for o in threads: o.join(60)
    assert not any(o.is_alive() for o in threads) and not wrong and ran.returncode==0, ran.stderr


def test_lock_file(tmp_path):
    fds = [os.open(tmp_path/'lock', os.O_RDWR | os.O_CREAT) for _ in range(3)]
    lock_file(fds[0], exclusive=False)
    lock_file(fds[1], exclusive=False)
    with pytest.raises(BlockingIOError): lock_file(fds[2], exclusive=True)
    with pytest.raises(BlockingIOError): lock_file(fds[2], exclusive=True, wait=.05)
    for fd in fds[:2]: os.close(fd)
    lock_file(fds[2], exclusive=True, wait=1)
    with open(tmp_path/'lock') as f:
        with pytest.raises(BlockingIOError): lock_file(f.fileno(), exclusive=False)
    os.close(fds[2])


def test_without_fcntl_and_folders_that_open(tmp_path):
    "As on Windows: the import works, and so do saving and loading"
    code = ('import os, sys; sys.modules["fcntl"] = None; sys.path.insert(0, "tests")\nreal = os.open\n'
            'def refuse(path, *a, **k):\n    if os.path.isdir(path): raise PermissionError(13, "a folder")\n    return real(path, *a, **k)\n'
            'os.open = refuse\nfrom fastrl_replay import saving\nassert saving.fcntl is None\n'
            'import types; sys.modules["fcntl"] = types.ModuleType("fcntl")\n'
            'from test_saving_format import Ring; from pathlib import Path\n'
            f'folder = Path({str(tmp_path)!r})/"a"\nring = Ring().add(30); ring.save(folder); ring.add(5).save(folder); assert Ring.load(folder)==ring\n'
            'saving.lock_file(0, True); print("fine")')
    ran = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert ran.stdout.endswith('fine\n'), ran.stderr


def test_a_frozen_folder_is_loaded(root, tmp_path):
    "It was written once, by the version that brought this format, and is never written again; see make_checkpoint.py beside it"
    folder = root/'tests'/'data'/'saved_v3'
    assert (folder/MANIFEST).read_bytes().startswith(b'{"format":3,') and pieces_of(folder)==[(0, 30), (30, 65)]
    assert Ring.load(folder)==Ring().add(65)
    with SavedState(folder) as saved: assert seen(saved.state()['extra'])==seen({k: v for k, v in anything().items() if k not in ('tensor', 'columns')})
