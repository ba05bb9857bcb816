"""Faults, one injector for all tests of them.

    Calls(patch, fail, after, error)      the call number `fail` to the system fails, or kills: open, write, fsync, replace, mkdir, unlink, mmap …
    interrupted(work, line)               an exception, as of Ctrl-C, before the line of this number that runs in some files
    small_files(limit)                    a full disk
    moments(folder, work), torn(a, b)     what kills between any two lines would leave, and what a power cut might make of it

With `NUMBA_DISABLE_JIT=1` kernels are Python, and their lines are among them."""
import builtins
import errno
import io
import linecache
import mmap
import os
import resource
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

import fastrl_replay

try: import fcntl
except ImportError: fcntl = None

PACKAGE = str(Path(fastrl_replay.__file__).parent)
STORING = tuple(f'{PACKAGE}/{o}' for o in ('storage/', 'samplers/', 'memory/', 'kernels.py'))
assert all(Path(o).exists() for o in STORING)


# --- calls to the system ----------------------------------------------------------------------------------------------
class Injected(OSError):
    "What the disk says"

def kill(*_):
    "In place of an error: this process is killed"
    os.kill(os.getpid(), signal.SIGKILL)

NAMES = 'open', 'close', 'fsync', 'replace', 'unlink', 'mkdir', 'rmdir', 'stat', 'fstat', 'listdir', 'lstat'
METHODS = 'write', 'flush', 'fileno', 'tell', 'close', 'readinto', 'read'        # of open files

class Calls:
    """Counts calls to the system, by their names in `made`; the one numbered `fail` fails, before it does its work or `after`.

    `error`: a class of exceptions, or `kill`; `names`: functions of `os`; `methods`: of open files (empty: files are not looked at);
    'mmap' among the names: mappings. Everything is as it was when `patch`, pytest's monkeypatch, is undone."""
    def __init__(self, patch, fail=None, after=False, error=Injected, names=NAMES, methods=METHODS):
        self.fail, self.after, self.error, self.methods, self.made = fail, after, error, methods, []
        for name in names:
            if name=='mmap': patch.setattr(mmap, 'mmap', self.mapping(mmap.mmap))
            elif hasattr(os, name): patch.setattr(os, name, self.wrapped(name, getattr(os, name)))
        if not methods: return
        if fcntl is not None: patch.setattr(fcntl, 'flock', self.wrapped('flock', fcntl.flock))
        opener = self.wrapped('open file', builtins.open)
        for module in (builtins, io): patch.setattr(module, 'open', lambda *a, **k: File(opener(*a, **k), self))

    def wrapped(self, name, f):
        def call(*args, **kw):
            number = len(self.made)
            self.made.append(name)
            if number==self.fail and not self.after: raise self.error(errno.EIO, f'{name}, call {number}')
            out = f(*args, **kw)
            if number==self.fail:
                with suppress(AttributeError): out.close()
                raise self.error(errno.EIO, f'{name}, call {number}')
            return out
        return call

    def mapping(self, kind):
        calls = self
        class Mapping(kind):
            def __new__(cls, *args, **kw): return calls.wrapped('mmap', kind.__new__)(cls, *args, **kw)
        return Mapping

class File:
    "An open file, whose methods are calls that may fail"
    def __init__(self, f, calls):
        self.f = f
        for name in calls.methods: setattr(self, name, calls.wrapped(name, getattr(f, name, None)))
    def __enter__(self): return self
    def __exit__(self, *_):
        try: self.close()
        finally: self.f.close()
    def __iter__(self): return iter(self.f)
    def __getattr__(self, name): return getattr(self.f, name)


@contextmanager
def small_files(limit):
    "No file may grow beyond `limit` bytes: to a writer, a full disk"
    before, old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try: yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, before)


# --- lines ------------------------------------------------------------------------------------------------------------
RELEASES = 'release()', 'with self.lock'      # to end a `with`, as to release a lock, is one call in C: no signal comes between

@contextmanager
def at_every_line(watch, where=STORING, events=None, leave_out=()):
    "Call `watch()` before each line of the files that begin so, and when a function ends; `events`: ('line',) for lines alone"
    def inside(frame, event, arg):
        if events is None or event in events:
            code = linecache.getline(frame.f_code.co_filename, frame.f_lineno) if leave_out else ''
            if not any(o in code for o in leave_out): watch()
        return inside
    def begin(frame, event, arg): return inside if frame.f_code.co_filename.startswith(where) else None
    before = sys.gettrace()
    sys.settrace(begin)
    try: yield
    finally: sys.settrace(before)


class Stop(BaseException): "What an interrupt raises, here"

def interrupted(work, line, where=STORING, error=Stop, **kw):
    "Interrupt `work()` before line number `line`, from 0, that runs in these files; was there such a line?"
    lines, struck = iter(range(line)), []
    def stop():
        if struck or next(lines, None) is not None: return
        struck.append(True)
        raise error
    try:
        with at_every_line(stop, where, **kw): work()
    except error:
        if not struck: raise
    return bool(struck)


# --- files, at every moment -------------------------------------------------------------------------------------------
def files_of(folder):
    "The mapped files in a folder: their bytes now"
    return {p.name: p.read_bytes() for p in sorted(folder.glob('*.map'))}


def moments(folder, work):
    "The different states of the files while `work()` runs, in the order of time"
    seen = [files_of(folder)]
    def watch():
        now = files_of(folder)
        if now!=seen[-1]: seen.append(now)
    with at_every_line(watch): work()
    watch()
    return seen


def torn(before, after, rng):
    """The files between two moments: of the words that differ, some are old and some new.

    Where rows were overwritten between them, first_id was published before, and n_added is not there yet; where the memory was cleared,
    that was noted, and first_id is not there yet."""
    mixed = {name: _mixed(before.get(name, b''), b, rng) for name, b in after.items()}
    old, new = (np.frombuffer(o['counts.map'], np.int64) for o in (before, after))
    if 'counts.map' in before and old[0]!=new[0]: mixed['counts.map'] = np.append(old[0], new[1:]).tobytes()
    if 'counts.map' in before and old[5]!=new[5]: mixed['counts.map'] = np.concatenate([old[:5], new[5:]]).tobytes()
    return mixed


def _mixed(a, b, rng):
    if len(a)!=len(b) or len(b) % 8: return b
    a, b = np.frombuffer(a, np.uint64), np.frombuffer(b, np.uint64)
    return np.where(rng.random(len(a)) < .5, a, b).tobytes()
