"""Everything at once: memories of all kinds, and threads that write, draw, reprice, look, save, copy, fork and close at the same time.

    python tests/soak.py SECONDS [SEED] [KIND …]

Each row says by itself what it must be (all of it follows from its `serial`), and a naive twin keeps which serial got which id.
So whatever comes out of a memory can be checked alone: a batch, a copy, a file, what a forked child sees, a folder reopened."""
import copy
import ctypes
import gc
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.hindsight import HindsightReplay
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.storage.sequence_sampler import Sequence
from words import WORDS

MAX_SZ, LENGTH, STREAM = 400, 12, 12 << 28         # rows; steps of an episode; serials of stream k begin at k·STREAM
PATIENCE = 60                                      # seconds that a child may take


class Step(NamedTuple):
    "A `Transition` with numbers"
    state: Any
    action: Any
    next_state: Any
    reward: Any
    terminated: Any
    truncated: Any
    env_id: Any
    step_n: Any
    episode_n: Any
    serial: Any


# ---- what a row must be, from its serial; `n` is an array

def plain(n): return (n[:, None] % 1009 + np.arange(4)).astype(np.float32)

def frames(n):
    "Stacks of the newest three frames of the episode, its first repeated"
    at = n[:, None] - np.arange(2, -1, -1)
    begin = (n % STREAM)//LENGTH*LENGTH + n//STREAM*STREAM
    at = np.maximum(at, begin[:, None])
    return ((at[:, :, None, None]*np.arange(1, 257).reshape(16, 16)) % 251).astype(np.uint8)

def pixels(n): return ((n[:, None, None]*np.arange(1, 1025).reshape(32, 32)) % 251).astype(np.uint8)

def goals(n):
    reached = np.stack([n//STREAM, (n % STREAM)//LENGTH, n % LENGTH], 1).astype(np.float32)
    return dict(observation=plain(n), achieved_goal=reached, desired_goal=np.zeros((len(n), 3), np.float32))

def expected(observe, serials):
    "Stacked columns of these rows. A state after the last of an episode is one more number in the same episode"
    n = np.asarray(serials, np.int64)
    k, last = n % STREAM, n % LENGTH==LENGTH - 1
    after = observe(n + 1)
    if last.any():            # in its own episode still: the next one begins elsewhere
        own = observe(n)
        after = {f: np.where(last[:, None], own[f], after[f]) for f in own} if isinstance(own, dict) else \
            np.where(last.reshape(-1, *[1]*(own.ndim - 1)), own, after)
    return Step(observe(n), n % 5, after, (n % 7).astype(np.float32), last & (k//LENGTH % 2==0), last & (k//LENGTH % 2==1),
                n//STREAM, k % LENGTH, k//LENGTH, n)

def priority_of(serials): return 1. + np.asarray(serials) % 97/8.

def steps_of(columns):
    def at(v, i): return {k: o[i] for k, o in v.items()} if isinstance(v, dict) else v[i]
    return [Step(*(at(c, i) for c in columns)) for i in range(len(columns.serial))]


KINDS = dict(
    uniform=(plain, lambda folder: dict()),
    proportional=(plain, lambda folder: dict(sampler=Proportional(eps=0.))),
    rank=(plain, lambda folder: dict(sampler=RankBased())),
    sequences=(plain, lambda folder: dict(sequence=Sequence(6, 2, 3))),
    hindsight=(goals, lambda folder: dict()),
    frames=(frames, lambda folder: dict(dedup='frames', sampler=Proportional(eps=0.))),
    next_state=(pixels, lambda folder: dict(dedup='next_state')),
    lz4=(frames, lambda folder: dict(dedup='frames', codec='lz4', sampler=Proportional(eps=0.))),
    disk=(plain, lambda folder: dict(path=folder, sampler=Proportional(eps=0.))),
    disk_frames=(frames, lambda folder: dict(path=folder, dedup='frames')),
    disk_sequences=(plain, lambda folder: dict(path=folder, sequence=Sequence(6))))


class Wrong(AssertionError):
    "A promise that was not kept"


def same(a, b):
    if isinstance(a, dict): return a.keys()==b.keys() and all(same(a[k], b[k]) for k in a)
    return np.array_equal(a, b)


class Soak:
    "One memory, its twin, and what threads do with it"
    def __init__(self, kind, folder, seed):
        self.kind, self.folder, self.rng = kind, Path(folder), random.Random(seed)
        self.observe, options = KINDS[kind]
        self.options = options(self.folder/'memory')
        self.twin: dict[int, int] = {}             # id → serial, noted after `add` has returned
        self.memory = self._open()
        self.pipe = HindsightReplay([], lambda reached, wanted, info: -(reached!=wanted).any(1).astype(np.float32),
                                    memory=self.memory) if kind=='hindsight' else None
        self.next = [k*STREAM for k in range(3)]
        self.counts: dict[str, int] = {}
        while len(self.memory) < MAX_SZ//4: self.write(self.rng.randrange(2), self.rng)

    @property
    def durable(self): return 'path' in self.options
    @property
    def by_rows(self): return 'sequence' not in self.options

    def _open(self): return ReplayMemory(MAX_SZ, seed=0, **copy.deepcopy(self.options))

    # ---- what comes out
    def check_rows(self, rows, known=True):
        "Each row is what its serial says; where the twin knows its id, it has the serial that this id got"
        serials = rows.serial.numpy()
        self.check_columns(rows.numpy(), serials)
        if known and rows.ids is not None: self.check_ids(rows.ids.numpy(), serials)

    def check_columns(self, columns, serials):
        for f, got, want in zip(Step._fields, columns, expected(self.observe, serials)):
            if not same(got, want): raise Wrong(f'{self.kind}: {f} of rows {serials[:5]} …')

    def check_step(self, step):
        one = [{k: o[None] for k, o in v.items()} if isinstance(v, dict) else np.asarray(v)[None] for v in step]
        self.check_columns(one, one[-1])

    def check_ids(self, ids, serials):
        for i, s in zip(ids.tolist(), serials.tolist()):
            if self.twin.get(i, s)!=s: raise Wrong(f'{self.kind}: id {i} is serial {self.twin[i]}, got {s}')

    def check_memory(self, memory, whole=False):
        "A memory that nobody else uses: valid, and row for row, with the priorities that belong to the rows"
        memory.check_valid()
        n = len(memory)
        if not n: raise Wrong(f'{self.kind}: a copy is empty')
        rows = memory.recent(n)
        self.check_rows(rows)
        if memory.sampler.prioritized and self.by_rows:
            p = memory.sampler.priorities[rows.ids.numpy() % MAX_SZ]
            if not np.allclose(p, priority_of(rows.serial.numpy()), rtol=1e-5):
                raise Wrong(f'{self.kind}: priorities of other rows')
        if whole:
            want = [self.twin[i] for i in range(memory.first_id, memory.n_added)]
            if rows.serial.tolist()!=want: raise Wrong(f'{self.kind}: other rows than were stored')
        self.check_links(memory, rows)

    def check_links(self, memory, rows):
        ids, serials = rows.ids.numpy(), rows.serial.numpy()
        after = memory.next(ids)
        linked = after >= 0
        if not (serials[after[linked] - ids[0]]==serials[linked] + 1).all(): raise Wrong(f'{self.kind}: a stream jumps')
        last = {s//STREAM: s for s in serials.tolist()}
        if linked.sum()!=len(ids) - len(last): raise Wrong(f'{self.kind}: links are missing')

    # ---- what threads do, over and over
    def write(self, stream, rng):
        m = rng.choice([1, 1, 1, 3, 20, 70])
        n = self.next[stream]
        serials = np.arange(n, n + m)
        columns = expected(self.observe, serials)
        p = priority_of(serials) if self.by_rows else None
        if m==1: ids = [self.memory.add(steps_of(columns)[0], None if p is None else float(p[0]))]
        else: ids = self.memory.extend(rng.choice([Batch.of, lambda o: o, steps_of])(columns), p).tolist()
        self.next[stream] = n + m
        self.twin.update(zip(ids, serials.tolist()))

    def draw(self, held, rng):
        bs = rng.choice([1, 8, 32] if self.by_rows else [1, 4])       # there are fewer windows
        if self.pipe is not None: return self.draw_goals(bs)
        batch = self.memory.sample(bs)
        if not self.by_rows: return self.draw_windows(batch, held, rng)
        self.check_rows(batch)
        if rng.random() < .5: self.memory.update_priorities(batch.ids, priority_of(batch.serial.numpy()))
        held.append((batch, batch.serial.clone()))

    def draw_windows(self, batch, held, rng):
        mask, serials, ids = (getattr(batch, o).numpy() for o in ('mask', 'serial', 'ids'))
        for at, s in zip(mask, serials):
            k = at.sum()
            if not k or at[k:].any() or not (np.diff(s[:k])==1).all(): raise Wrong(f'{self.kind}: a window jumps: {s}')
            if s[0]//LENGTH!=s[k - 1]//LENGTH: raise Wrong(f'{self.kind}: a window leaves its episode: {s}')
        self.check_ids(ids[mask], serials[mask])
        self.check_columns([c[mask] for c in batch.numpy()], serials[mask])
        held.append((batch, batch.serial.clone()))

    def draw_goals(self, bs):
        batch = self.pipe.sample(bs)
        serials, new = batch.serial.numpy(), batch.relabelled.numpy()
        wanted = batch.next_state['desired_goal'].numpy()
        self.check_columns([c[~new] if not isinstance(c, dict) else {k: v[~new] for k, v in c.items()} for c in batch.numpy()],
                           serials[~new])
        for s, goal in zip(serials[new], wanted[new]):
            if goal[0]!=s//STREAM or goal[1]!=(s % STREAM)//LENGTH or goal[2] < min(s % LENGTH + 1, LENGTH - 1):
                raise Wrong(f'{self.kind}: serial {s} got the goal {goal}')

    def recheck(self, held):
        "Batches that were held are what they were"
        while len(held) > 20:
            batch, serials = held.pop(0)
            if not (batch.serial==serials).all(): raise Wrong(f'{self.kind}: a batch that was held has changed')
            if self.by_rows: self.check_rows(batch, known=False)

    def look(self, held, rng):
        memory = self.memory
        n = len(memory)
        if not 0 <= n <= MAX_SZ: raise Wrong(f'{self.kind}: {n} rows')
        what = rng.randrange(9)
        if what==0: self.check_rows(memory.recent(rng.randrange(1, 50)))
        elif what==1: self.check_rows(memory[rng.randrange(9):rng.randrange(10, 60)])
        elif what==2: self.check_step(memory[rng.randrange(n)])
        elif what==3: repr(memory), memory.nbytes, memory.usage()
        elif what==4: memory.check_valid()
        elif what==5:
            with memory.lock:
                ids = np.arange(memory.first_id, memory.n_added)
                self.check_links(memory, memory.fetch(ids))
        elif what==6: self.check_rows(memory.fetch([memory.n_added - 1]))
        elif what==7:
            rows = memory.episode(memory.n_added - 1)
            if not (np.diff(rows.serial.numpy())==1).all(): raise Wrong(f'{self.kind}: an episode jumps')
        elif what==8 and rng.random() < .2: memory.health()

    def keep(self, held, rng):
        "Save, and load what was saved"
        self.memory.flush()
        folder = self.folder/'saved'
        self.memory.save(folder)
        self.check_memory(ReplayMemory.load(folder))
        if self.durable: self.check_rows(ReplayMemory.peek(self.memory.path).recent(20))

    def copy(self, held, rng):
        if self.durable: return
        which = rng.randrange(3)
        if which==0: made = copy.deepcopy(self.memory)
        elif which==1: made = pickle.loads(pickle.dumps(self.memory))
        else:
            made = self._open()
            made.load_state_dict(self.memory.state_dict())
        self.check_memory(made)
        made.add(steps_of(expected(self.observe, [7*STREAM]))[0])

    def in_child(self):
        "What a forked child finds: whole rows that it may read, or a refusal in words"
        memory, step = self.memory, steps_of(expected(self.observe, [7*STREAM]))[0]
        for write in (lambda: memory.add(step), lambda: memory.extend([step])):
            try: write()
            except RuntimeError: continue
            raise Wrong(f'{self.kind}: a child wrote')
        try: n = len(memory)
        except RuntimeError: return 2                             # elsewhere, closed, or its lock was not had
        try:
            memory.check_valid()
            self.check_rows(memory.recent(n))
        except RuntimeError: return 2
        return 0

    def fork(self, held, rng):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                signal.alarm(PATIENCE)
                code = self.in_child()
            finally:
                if code==1: traceback.print_exc()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code not in (0, 2): raise Wrong(f'{self.kind}: a forked child ended with {code}')
        self.counts[f'fork {code}'] = self.counts.get(f'fork {code}', 0) + 1

    # ---- all at once
    def run(self, name, until, seed, stream=None):
        "A thread: the same work over and over, until the time is over or, near the end, the memory is closed"
        held, rng, work, fine = [], random.Random(seed), getattr(self, name), False
        try:
            while time.monotonic() < until and not self._once(work, stream, held, rng):
                self.counts[name] = self.counts.get(name, 0) + 1
                if name in ('keep', 'copy', 'fork'): time.sleep(.02)
                elif rng.random() < .1: time.sleep(.001)
            fine = True
        finally:
            if not fine: self.failures.append(f'{self.kind}, {name}: {traceback.format_exc()}')

    def _once(self, work, stream, held, rng):
        "Do it once; return whether the memory was closed meanwhile"
        try:
            if stream is None: work(held, rng)
            else: work(stream, rng)
            self.recheck(held)
        except RuntimeError as e:
            if self.closing and re.search(WORDS['closed'], str(e)): return True
            raise
        except ValueError as e:
            if not re.search(WORDS['it has gone'], str(e)): raise        # else it was overwritten meanwhile
        return False

    def start(self, seconds, seed):
        self.failures, self.closing = [], False
        until = time.monotonic() + seconds
        jobs = [('write', 0), ('write', 1), ('draw', None), ('look', None), ('keep', None), ('copy', None), ('fork', None)]
        self.threads = [threading.Thread(target=self.run, args=(name, until, f'{seed} {k}', stream))
                        for k, (name, stream) in enumerate(jobs)]
        for t in self.threads: t.start()

    def finish(self, seconds):
        "Wait, look at what is left, and close: while others go on, if this is a `path` that can be opened again"
        early = self.durable and self.rng.random() < .5
        if early:
            time.sleep(seconds/2)
            self.closing = True
            self.memory.close()
        for t in self.threads: t.join()
        if self.failures: raise Wrong(self.failures[0])
        if not early:
            self.check_memory(self.memory, whole=True)
            self.closing = True
            self.memory.close()
        if self.durable:
            self.memory = self._open()
            for i in range(self.memory.first_id, self.memory.n_added):     # a call that was ended by `close` noted nothing
                if i not in self.twin: self.twin[i] = int(self.memory.fetch([i], ('serial',)).serial[0])
            self.check_memory(self.memory, whole=True)
            self.memory.close()


def level():
    "Bytes of memory in use, without those that only wait in the allocator for their next use, and open descriptors"
    gc.collect()
    trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)         # of Linux: thirty threads leave much behind
    if trim is not None: trim(0)
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    return pages*os.sysconf('SC_PAGE_SIZE'), len(os.listdir('/proc/self/fd'))


def soak(seconds, seed=0, kinds=tuple(KINDS), at_once=4, say=lambda text: None):
    "Rounds of some kinds at once, for so many seconds in all; return what was done how often, and the levels after each round"
    rng, begin, counts, levels = random.Random(seed), time.monotonic(), {}, []
    rounds, order = max(-(-len(kinds)//at_once), round(seconds/20)), []
    for k in range(rounds):
        while len(order) < min(at_once, len(kinds)): order += [o for o in rng.sample(kinds, len(kinds)) if o not in order]
        now, order = order[:at_once], order[at_once:]
        left = (seconds - (time.monotonic() - begin))/(rounds - k)
        folder = tempfile.mkdtemp()
        try:
            soaks = [Soak(kind, Path(folder)/kind, f'{seed} {k} {kind}') for kind in now]
            for o in soaks: o.start(max(1., left), f'{seed} {k}')
            for o in soaks: o.finish(max(1., left))
            for o in soaks:
                for name, n in o.counts.items(): counts[name] = counts.get(name, 0) + n
            soaks = o = None
        finally: shutil.rmtree(folder, ignore_errors=True)
        levels.append(level())
        say(f'{time.monotonic() - begin:6.0f} s  {" ".join(now):50}  {levels[-1][0]/1e6:.0f} MB, {levels[-1][1]} descriptors')
    return counts, levels


if __name__=='__main__':
    seconds, seed = float(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else '0'
    counts, found = soak(seconds, seed, tuple(sys.argv[3:]) or tuple(KINDS), say=lambda text: print(text, flush=True))
    print(counts)
