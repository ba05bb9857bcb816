"""Every line of the package that may store something, as it is about to run: what a kill at that moment would leave.

With `NUMBA_DISABLE_JIT=1` kernels are Python, and their lines are among them."""
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import fastrl_replay

PACKAGE = str(Path(fastrl_replay.__file__).parent)
STORING = tuple(f'{PACKAGE}/{o}' for o in ('storage/', 'samplers/', 'memory/', 'kernels.py'))
assert all(Path(o).exists() for o in STORING)


@contextmanager
def at_every_line(watch, storing=STORING):
    "Call `watch()` before each line of the storages, samplers, memory and kernels, and when a function ends"
    def inside(frame, event, arg):
        watch()
        return inside
    def begin(frame, event, arg): return inside if frame.f_code.co_filename.startswith(storing) else None
    before = sys.gettrace()
    sys.settrace(begin)
    try: yield
    finally: sys.settrace(before)


class Stop(BaseException): "What an interrupt raises, here"

def interrupted(work, line):
    "Interrupt `work()` before line number `line` that runs in the package; was there such a line?"
    lines = iter(range(line))
    def stop():
        if next(lines, None) is None: raise Stop
    try:
        with at_every_line(stop): work()
    except Stop: return True
    return False


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
