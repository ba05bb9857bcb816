"""Every kind of memory that lasts, in a folder of its own (`path=`) or saved in one: the rows of the table in test_lasting.py.

    remember(kind, path, n)      a memory of that kind with the steps 0 … n − 1
    reopen(kind, path)           the one in that folder

Every part of step k says k, so `contents` of two memories are compared to the bit. Run as a script it is another process, which opens
for writing what each line of its standard input names (`kind path`) and prints how many steps were added, or the error."""
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.storage.sequence_sampler import Sequence
from harness import seen
from killing import make_step

MAX_SZ = 20
needs_proc = pytest.mark.skipif(not Path('/proc/self/maps').exists(), reason='needs /proc')


class Teller:
    "A user's sampler that remembers what it was told"
    def __init__(self): self.size, self.newest, self.told, self.errors = 0, 0, {}, {}
    def on_add(self, slots, priorities):
        self.size, self.newest = max(self.size, int(max(slots)) + 1), int(slots[-1])
        for k, s in enumerate(slots.tolist()):
            self.told[s] = None if priorities is None else float(priorities[k])
            self.errors.pop(s, None)
    def draw(self, bs, rng): return rng.integers(self.size, size=bs), np.full(bs, 1/self.size)
    def update(self, slots, td_errors): self.errors |= dict(zip(slots.tolist(), np.asarray(td_errors).tolist()))
    def get_state(self): return dict(size=self.size, newest=self.newest, told=self.told, errors=self.errors)
    def set_state(self, state): self.__dict__.update(state)


class Kind(NamedTuple):
    "Which steps (killing.py), which sampler, and the options that a folder remembers"
    steps: str
    sampler: Callable = Uniform
    options: dict[str, Any] = {}

def summed(): return Proportional(alpha=.7, normalize='memory')

KINDS = dict(
    uniform=Kind('transition'), proportional=Kind('simple', summed), ranked=Kind('transition', RankBased), own=Kind('simple', Teller),
    sequences=Kind('simple', options=dict(sequence=Sequence(3, stride=1))),
    prioritized_sequences=Kind('simple', Proportional, dict(sequence=Sequence(3, stride=1))),
    frames=Kind('frames', summed, dict(dedup='frames')), next_states=Kind('frames', RankBased, dict(dedup='next_state')))


def step_of(kind, k, wide=False):
    "Step number k; `wide`: of the same type, where observations are stored once, with frames that no other step has"
    step = make_step(KINDS[kind].steps, k)
    if not wide or KINDS[kind].steps!='frames': return step
    strange = np.arange(4*36, dtype=np.int32).reshape(4, 6, 6) + 1000*(k + 1)
    return step._replace(state=strange, next_state=-strange)


def steps_of(kind, first, m, **how): return [step_of(kind, first + k, **how) for k in range(m)]


def make(kind, path=None, max_sz=MAX_SZ, **more):
    steps, sampler, options = KINDS[kind]
    return ReplayMemory(max_sz, sampler(), path=path, **options | more)


def remember(kind, path=None, n=30, max_sz=MAX_SZ, **more):
    memory = make(kind, path, max_sz, **more)
    for k in range(n): memory.add(step_of(kind, k))
    return memory


def reopen(kind, path): return ReplayMemory.open(path, sampler=Teller() if kind=='own' else None)
def load(kind, path): return ReplayMemory.load(path, sampler=Teller() if kind=='own' else None)


def ids_of(memory): return np.arange(memory.first_id, memory.n_added)
def priorities(memory):
    "Those of the rows, of the starts that can be drawn, or what a user's sampler was told"
    sampler = memory.sampler
    if isinstance(getattr(sampler, 'inner', None), Teller): return sorted(sampler.inner.told.items()), sorted(sampler.inner.errors.items())
    starts, found = getattr(sampler, 'starts', None), getattr(sampler, 'priorities', None)
    if starts is None: return None if found is None else np.array(found)
    slots = starts[:len(sampler), 0]
    return sorted(zip(slots.tolist(), [1.]*len(slots) if found is None else found.tolist()))


def contents(memory):
    "Rows, what comes before and after each, priorities"
    memory.check_valid()
    ids = ids_of(memory)
    return memory.n_added, seen(memory.fetch(ids)), memory.previous(ids).tolist(), memory.next(ids).tolist(), seen(priorities(memory))


def held(path):
    "What this process still has of the files under `path`: mappings and descriptors"
    links = [o for fd in Path('/proc/self/fd').iterdir() if (o := target_of(fd))]
    return [o for o in [*open('/proc/self/maps'), *links] if str(path) in o]

def target_of(fd):
    try: return str(fd.readlink())
    except OSError: return None                # the one with which the folder was listed


@contextmanager
def small_disk(path, size):
    "A file system of `size` bytes at `path`; skips where this process may not mount"
    mount = ['mount', '-t', 'tmpfs', '-o', f'size={size}', 'none', str(path)]
    if shutil.which('mount') is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip('needs the right to mount a small tmpfs')
    try: yield
    finally: subprocess.run(['umount', '-l', str(path)])


def answer():
    for line in sys.stdin:
        kind, path = line.rstrip('\n').split(' ', 1)
        try:
            with reopen(kind, path) as memory: print(memory.n_added, flush=True)
        except Exception as e: print(f'{type(e).__name__}: {e}', flush=True)      # noqa: BLE001   (whatever it is, it is told)


if __name__=='__main__': answer()
