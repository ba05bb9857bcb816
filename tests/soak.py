"""Everything at once: memories of all kinds, and threads that write, draw, reprice, look, save, copy, fork and close at the same time.

    python tests/soak.py SECONDS [SEED] [KIND …]

Each row says by itself what it must be (all of it follows from its `serial`), and a naive twin keeps which serial got which id,
which rows were dropped or drawn as often as they may be, and which were corrected. So whatever comes out of a memory can be checked
alone: a batch, a copy, a file, what a forked child sees, a folder reopened."""
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
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.mixed import MixedMemory
from fastrl_replay.pipes.hindsight import HindsightReplay
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.storage.sequence_sampler import Sequence
from words import WORDS

MAX_SZ, LENGTH, STREAM = 400, 12, 12 << 28         # rows; steps of an episode; serials of stream k begin at k·STREAM
PATIENCE = 60                                      # seconds that a child may take
M_ARENA_MAX = -8                                   # of malloc.h
STARVED = re.compile('dropped|there are 0 complete')             # said where nothing may be drawn


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

Told = NamedTuple('Told', [*((f, Any) for f in Step._fields), ('task', Any)])


# ---- what a row must be, from its serial; `n` is an array

def plain(n): return (n[:, None] % 1009 + np.arange(4)).astype(np.float32)

def frames(n):
    "Stacks of the newest three frames of the episode, its first repeated"
    at = n[:, None] - np.arange(2, -1, -1)
    begin = (n % STREAM)//LENGTH*LENGTH + n//STREAM*STREAM
    at = np.maximum(at, begin[:, None])
    return ((at[:, :, None, None]*np.arange(1, 257).reshape(16, 16)) % 251).astype(np.uint8)

def pixels(n): return ((n[:, None, None]*np.arange(1, 1025).reshape(32, 32)) % 251).astype(np.uint8)
def wide(n): return ((n[:, None, None]*np.arange(1, 5121).reshape(64, 80)) % 251).astype(np.uint8)

def goals(n):
    reached = np.stack([n//STREAM, (n % STREAM)//LENGTH, n % LENGTH], 1).astype(np.float32)
    return dict(observation=plain(n), achieved_goal=reached, desired_goal=np.zeros((len(n), 3), np.float32))

def tasks(n): return [f'episode {k//LENGTH}' if k % 2 else f'step {k}' for k in n.tolist()]

def expected(observe, serials, step_type=Step):
    "Stacked columns of these rows. A state after the last of an episode is one more number in the same episode"
    n = np.asarray(serials, np.int64)
    k, last = n % STREAM, n % LENGTH==LENGTH - 1
    after = observe(n + 1)
    if last.any():            # in its own episode still: the next one begins elsewhere
        own = observe(n)
        after = {f: np.where(last[:, None], own[f], after[f]) for f in own} if isinstance(own, dict) else \
            np.where(last.reshape(-1, *[1]*(own.ndim - 1)), own, after)
    columns = Step(observe(n), n % 5, after, (n % 7).astype(np.float32), last & (k//LENGTH % 2==0), last & (k//LENGTH % 2==1),
                   n//STREAM, k % LENGTH, k//LENGTH, n)
    return columns if step_type is Step else Told(*columns, tasks(n))

def priority_of(serials): return 1. + np.asarray(serials) % 97/8.

def steps_of(columns):
    def at(v, i): return {k: o[i] for k, o in v.items()} if isinstance(v, dict) else v[i]
    return [type(columns)(*(at(c, i) for c in columns)) for i in range(len(columns.serial))]


class Own:
    "A sampler of one's own: any slot that was not dropped"
    def __init__(self): self.there = np.zeros(MAX_SZ, bool)
    def on_add(self, slots, priorities): self.there[slots] = True
    def on_drop(self, slots): self.there[slots] = False
    def draw(self, bs, rng):
        found = np.flatnonzero(self.there)
        return found[rng.integers(len(found), size=bs)], np.full(bs, 1/len(found))
    def update(self, slots, td_errors): pass
    def get_state(self): return dict(there=self.there.copy())
    def set_state(self, state): self.there[:] = state['there']


class Kind(NamedTuple):
    "A memory, and what is done with it"
    observe: Any                       # the observations of rows
    options: Any                       # of the memory, in this folder
    more: tuple[str, ...] = ()         # what further threads do
    step_type: Any = Step

AROUND = dict(serial=range(-2, 4), state=(-1, 0), action=range(4))      # offsets of the rows that are drawn with each

KINDS = dict(
    uniform=Kind(plain, lambda folder: dict()),
    proportional=Kind(plain, lambda folder: dict(sampler=Proportional(eps=0.))),
    rank=Kind(plain, lambda folder: dict(sampler=RankBased())),
    sequences=Kind(plain, lambda folder: dict(sequence=Sequence(6, 2, 3, learn_first=False))),
    hindsight=Kind(goals, lambda folder: dict()),
    frames=Kind(frames, lambda folder: dict(dedup='frames', sampler=Proportional(eps=0.))),
    next_state=Kind(pixels, lambda folder: dict(dedup='next_state')),
    lz4=Kind(frames, lambda folder: dict(dedup='frames', codec='lz4', sampler=Proportional(eps=0.))),
    disk=Kind(plain, lambda folder: dict(path=folder, sampler=Proportional(eps=0.))),
    disk_frames=Kind(frames, lambda folder: dict(path=folder, dedup='frames')),
    disk_sequences=Kind(plain, lambda folder: dict(path=folder, sequence=Sequence(6))),
    strings=Kind(plain, lambda folder: dict(), step_type=Told),
    disk_strings=Kind(plain, lambda folder: dict(path=folder, sampler=Proportional(eps=0.)), step_type=Told),
    around=Kind(plain, lambda folder: dict(windows=AROUND), ('drop',)),
    disk_around=Kind(frames, lambda folder: dict(path=folder, dedup='frames', windows=AROUND, sampler=Proportional(eps=0.))),
    dropped=Kind(plain, lambda folder: dict(sampler=Proportional(eps=0.)), ('drop',)),
    dropped_rank=Kind(plain, lambda folder: dict(sampler=RankBased()), ('drop',)),
    dropped_own=Kind(plain, lambda folder: dict(sampler=Own()), ('drop',)),
    dropped_sequences=Kind(plain, lambda folder: dict(sequence=Sequence(4), sampler=Proportional(eps=0.)), ('drop',)),
    disk_dropped=Kind(plain, lambda folder: dict(path=folder), ('drop',)),
    burn_in=Kind(plain, lambda folder: dict(sequence=Sequence(6, 2, 3), sampler=Proportional(eps=0.))),
    disk_burn_in=Kind(plain, lambda folder: dict(path=folder, sequence=Sequence(5, 2, learn_first=True))),
    mixed=Kind(plain, lambda folder: dict(sampler=Proportional(eps=0.)), ('mix',)),
    max_draws=Kind(plain, lambda folder: dict(max_draws=5, sampler=Proportional(eps=0.))),
    disk_max_draws=Kind(plain, lambda folder: dict(path=folder, max_draws=3)),
    large=Kind(pixels, lambda folder: dict(dedup='large')),
    large_frames=Kind(frames, lambda folder: dict(dedup='large', sampler=Proportional(eps=0.)), ('drop',)),
    auto=Kind(wide, lambda folder: dict(sampler=Proportional(eps=0.))),
    corrected=Kind(plain, lambda folder: dict(sampler=Proportional(eps=0.)), ('correct',)),
    disk_corrected=Kind(frames, lambda folder: dict(path=folder, dedup='frames'), ('correct',)))


class Wrong(AssertionError):
    "A promise that was not kept"


def same(a, b):
    if isinstance(a, dict): return a.keys()==b.keys() and all(same(a[k], b[k]) for k in a)
    return np.array_equal(a, b)


class Soak:
    "One memory, its twin, and what threads do with it"
    def __init__(self, kind, folder, seed):
        self.kind, self.folder, self.rng = kind, Path(folder), random.Random(seed)
        self.observe, options, self.more, self.step_type = KINDS[kind]
        self.options = options(self.folder/'memory')
        self.twin: dict[int, int] = {}             # id → serial, noted after `add` has returned
        self.ids_of: dict[int, int] = {}           # serial → id
        self.dropped = frozenset[int]()            # ids that are not drawn any more, since before they were noted here
        self.drawn: dict[int, int] = {}            # of a kind with `max_draws`: id → how often
        self.turns: dict[int, int] = {}            # id → the turn in which it was corrected last
        self.turn = 0                              # the newest that has begun
        self.memory = self._open()
        self.pipe = HindsightReplay([], lambda reached, wanted, info: -(reached!=wanted).any(1).astype(np.float32),
                                    memory=self.memory) if kind=='hindsight' else None
        self.next = [k*STREAM for k in range(3)]
        self.counts: dict[str, int] = {}
        while len(self.memory) < MAX_SZ//4: self.write(self.rng.randrange(2), self.rng)
        if 'mix' in self.more: self._mix()

    @property
    def durable(self): return 'path' in self.options
    @property
    def by_rows(self): return 'sequence' not in self.options
    @property
    def alone(self): return self.by_rows and 'windows' not in self.options
    def expected(self, serials): return expected(self.observe, serials, self.step_type)

    def _open(self): return ReplayMemory(MAX_SZ, seed=0, **copy.deepcopy(self.options))

    # ---- what comes out
    def check_rows(self, rows, known=True):
        "Each row is what its serial says; where the twin knows its id, it has the serial that this id got"
        serials = rows.serial.numpy()
        self.check_columns(rows.numpy(), serials)
        if known and rows.ids is not None: self.check_ids(rows.ids.numpy(), serials)

    def check_columns(self, columns, serials):
        for f, got, want in zip(self.step_type._fields, columns, self.expected(serials), strict=True):
            if f=='reward' and 'correct' in self.more: got = got % 7           # see `correct`
            if not same(got, want): raise Wrong(f'{self.kind}: {f} of rows {serials[:5]} …')

    def check_step(self, step):
        one = [{k: o[None] for k, o in v.items()} if isinstance(v, dict) else np.asarray(v)[None] for v in step]
        self.check_columns(one, step.serial[None])

    def check_ids(self, ids, serials):
        for i, s in zip(ids.tolist(), serials.tolist()):
            if self.twin.get(i, s)!=s: raise Wrong(f'{self.kind}: id {i} is serial {self.twin[i]}, got {s}')

    def check_drawn(self, ids, gone):
        "None of these is among those that were gone before"
        wrong = gone.intersection(ids.reshape(-1).tolist())
        if wrong: raise Wrong(f'{self.kind}: ids {sorted(wrong)[:5]} were drawn after they were dropped')

    def check_turns(self, rows, before):
        "Rows are as they were corrected, or later"
        for i, reward in zip(rows.ids.tolist(), rows.reward.tolist()):
            if not before.get(i, 0) <= reward//7 <= self.turn:
                raise Wrong(f'{self.kind}: id {i} was corrected in turn {before.get(i, 0)} of {self.turn}, got {reward//7}')

    def check_gone(self, memory, gone, whole):
        "What was dropped is not drawn from a copy either; as many are dropped as are known to be"
        stored = sum(i >= memory.first_id for i in gone)
        n = memory.usage()['n_dropped']
        if n < stored or whole and n!=stored: raise Wrong(f'{self.kind}: {n} rows are dropped, not {stored}')
        try: batch = memory.sample(8)
        except ValueError as e:
            if STARVED.search(str(e)): return
            raise
        self.check_drawn(batch.ids.numpy(), gone - {-1})

    def check_memory(self, memory, whole=False, gone=frozenset(), turns=None):
        """A memory that nobody else uses: valid, and row for row, with the priorities that belong to the rows.
        `gone`, `turns`: what was dropped and corrected before it was copied"""
        memory.check_valid()
        n = len(memory)
        if not n: raise Wrong(f'{self.kind}: a copy is empty')
        rows = memory.recent(n)
        self.check_rows(rows)
        if turns: self.check_turns(rows, turns)
        if memory.sampler.prioritized and self.by_rows and memory.sampler.kind!='OwnSampler': self.check_priorities(memory, rows)
        if whole:
            want = [self.twin[i] for i in range(memory.first_id, memory.n_added)]
            if rows.serial.tolist()!=want: raise Wrong(f'{self.kind}: other rows than were stored')
        self.check_links(memory, rows)
        self.check_gone(memory, gone, whole and not self.closing)

    def check_priorities(self, memory, rows):
        slots = rows.ids.numpy() % MAX_SZ
        drawn = memory.sampler.eligible.holds(slots)
        p = memory.sampler.priorities[slots]
        if not np.allclose(p[drawn], priority_of(rows.serial.numpy())[drawn], rtol=1e-5):
            raise Wrong(f'{self.kind}: priorities of other rows')

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
        columns = self.expected(serials)
        p = priority_of(serials) if self.by_rows else None
        if m==1: ids = [self.memory.add(steps_of(columns)[0], None if p is None else float(p[0]))]
        else: ids = self.memory.extend(rng.choice([Batch.of, lambda o: o, steps_of])(columns), p).tolist()
        self.next[stream] = n + m
        self.twin.update(zip(ids, serials.tolist()))
        self.ids_of.update(zip(serials.tolist(), ids))

    def draw(self, held, rng):
        bs = rng.choice([1, 8, 32] if self.by_rows else [1, 4])       # there are fewer windows
        if self.pipe is not None: return self.draw_goals(bs)
        if 'windows' in self.options: return self.draw_around(bs, held, rng)
        gone, turns = self.dropped, self.turns
        batch = self.sample(bs)
        if batch is None: return
        self.check_drawn(batch.ids.numpy(), gone - {-1})
        if not self.by_rows: return self.draw_windows(batch, held, rng)
        self.check_rows(batch)
        if 'correct' in self.more: self.check_turns(batch, turns)
        if rng.random() < .5: self.memory.update_priorities(batch.ids, priority_of(batch.serial.numpy()))
        held.append((batch, batch.serial.clone()))

    def sample(self, bs):
        "A batch; None, if all have been dropped, or drawn as often as they may be"
        try: batch = self.memory.sample(bs)
        except ValueError as e:
            if not ('drop' in self.more or 'max_draws' in self.options) or not STARVED.search(str(e)): raise
            self.counts['starved'] = self.counts.get('starved', 0) + 1
            return time.sleep(.002)
        if 'max_draws' in self.options: self.count(batch.ids.tolist())
        return batch

    def count(self, ids):
        for i in ids: self.drawn[i] = self.drawn.get(i, 0) + 1
        spent = [i for i in ids if self.drawn[i] >= self.options['max_draws']]
        self.note_dropped(spent)

    def note_dropped(self, ids):
        first = self.memory.first_id
        self.dropped = frozenset(i for i in self.dropped if i >= first).union(ids)

    def some(self, rng):
        "Some ids of rows that are stored"
        first = self.memory.first_id
        n = self.memory.n_added
        return rng.sample(range(max(first, n - 200), n), rng.choice([1, 2, 12]))

    def drop(self, held, rng):
        "Drop some rows, but never more than half of them"
        memory = self.memory
        if memory.usage()['n_dropped'] < len(memory)/2:
            ids = self.some(rng)
            memory.drop(ids)
            self.note_dropped(ids)
        time.sleep(.001)

    def correct(self, held, rng):
        "Add a number of sevens to the rewards of some rows: each turn more"
        memory, self.turn = self.memory, self.turn + 1
        ids = [i for i in self.some(rng) if i in self.twin]
        value = [float(self.twin[i] % 7 + 7*self.turn) for i in ids]
        memory.correct(ids, 'reward', rng.choice([list, np.array])(value))
        first = memory.first_id
        self.turns = {i: t for i, t in self.turns.items() if i >= first} | dict.fromkeys(ids, self.turn)
        time.sleep(.001)

    def draw_windows(self, batch, held, rng):
        mask, serials, ids, learn = (getattr(batch, o).numpy() for o in ('mask', 'serial', 'ids', 'learn'))
        for at, s in zip(mask, serials):
            k = at.sum()
            if not k or at[k:].any() or not (np.diff(s[:k])==1).all(): raise Wrong(f'{self.kind}: a window jumps: {s}')
            if s[0]//LENGTH!=s[k - 1]//LENGTH: raise Wrong(f'{self.kind}: a window leaves its episode: {s}')
        sequence = self.options['sequence']
        begins = (serials[:, :1] % STREAM % LENGTH==0) & sequence.learn_first
        if not same(learn, mask & (begins | (np.arange(sequence.length) >= sequence.burn_in))):
            raise Wrong(f'{self.kind}: other steps count for the loss: {learn} of {serials}')
        self.check_ids(ids[mask], serials[mask])
        self.check_columns([c[mask] for c in batch.numpy()], serials[mask])
        if rng.random() < .5: self.memory.update_priorities(batch.ids, np.where(learn, priority_of(serials), 1e6))
        with self.memory.lock: most = self.memory.sampler.priorities.max(initial=1.) if self.memory.sampler.prioritized else 1.
        if most > 20: raise Wrong(f'{self.kind}: a priority of {most}: an error of a step that does not count')
        held.append((batch, batch.serial.clone()))

    def draw_around(self, bs, held, rng):
        "Rows around each: of one episode, in order, repeated where nothing is stored, and all that is stored"
        with self.memory.lock:
            gone, batch = self.dropped, self.sample(bs)
            if batch is None: return
            walked = self.walk(batch.ids.numpy()) if rng.random() < .3 and not self.more else None
        self.check_drawn(batch.ids.numpy(), gone)
        serials, is_pad = batch.serial.numpy(), batch.is_pad['serial'].numpy()
        own, offsets = serials[:, 2], np.array(AROUND['serial'])
        if (serials//LENGTH!=own[:, None]//LENGTH).any(): raise Wrong(f'{self.kind}: a window leaves its episode: {serials}')
        reached = np.clip(own[:, None] + offsets, serials.min(1, keepdims=True), serials.max(1, keepdims=True))
        if not same(reached, serials) or not same(is_pad, serials!=own[:, None] + offsets):
            raise Wrong(f'{self.kind}: a window jumps: {serials}, {is_pad}')
        self.check_drawn(np.array([self.ids_of.get(s, -1) for s in serials.reshape(-1).tolist()]), gone)
        if walked is not None and not same(walked, serials): raise Wrong(f'{self.kind}: rows around {own} are {walked}, got {serials}')
        self.check_ids(batch.ids.numpy(), own)
        columns, want = batch.numpy(), self.expected(own)
        ahead, before = (self.expected(serials[:, o].reshape(-1)) for o in (slice(2, 6), slice(1, 3)))
        want = want._replace(serial=serials, action=ahead.action.reshape(-1, 4),
                             state=before.state.reshape(-1, 2, *before.state.shape[1:]))
        for f, got, wanted in zip(Step._fields, columns, want, strict=True):
            if not same(got, wanted): raise Wrong(f'{self.kind}: {f} around rows {own[:5]} …')
        held.append((batch, batch.serial.clone()))

    def walk(self, ids):
        "The serials around rows, found one by one along the links; the caller has the lock"
        found, memory = {0: ids}, self.memory
        for by, step, most in ((1, memory.next, 3), (-1, memory.previous, 2)):
            at, goes_on = ids, np.ones(len(ids), bool)
            for k in range(1, most + 1):
                other = step(at, True)
                goes_on = goes_on & (other >= 0)
                at = found[k*by] = np.where(goes_on, other, at)
        around = np.stack([found[k] for k in AROUND['serial']], 1)
        return memory.fetch(around.reshape(-1), ('serial',)).serial.numpy().reshape(around.shape)

    # ---- beside another
    def _mix(self):
        self.other, self.other_next = ReplayMemory(MAX_SZ, Proportional(eps=0.), seed=1), 5*STREAM
        self._write_other(MAX_SZ)
        self.mixture = MixedMemory([self.memory, self.other], shares=[.75, .25], seed=0)
    def _write_other(self, m):
        serials = np.arange(self.other_next, self.other_next + m)
        self.other.extend(self.expected(serials), priority_of(serials))
        self.other_next += m

    def mix(self, held, rng):
        "Draw from both, and sometimes write to the other, send priorities, copy, save"
        batch, what = self.mixture.sample(rng.choice([1, 8, 33])), rng.random()
        serials, source, ids = batch.serial.numpy(), batch.source.numpy(), batch.ids.numpy()
        self.check_columns(batch.numpy(), serials)
        if not same(serials//STREAM==5, source==1) or not same(ids >> 56, source.astype(np.int64)):
            raise Wrong(f'{self.kind}: rows {serials} came from memories {source}, with ids {ids}')
        self.check_ids(ids[source==0], serials[source==0])
        others = (ids[source==1] & ((1 << 56) - 1)) + 5*STREAM
        if not same(others, serials[source==1]): raise Wrong(f'{self.kind}: ids {others} of rows {serials[source==1]}')
        drawn = self.mixture.n_drawn
        if abs(drawn[1] - sum(drawn)/4) > 1: raise Wrong(f'{self.kind}: {drawn} rows were drawn, shares .75 and .25')
        if what < .5: self.mixture.update_priorities(batch.ids, priority_of(serials))
        elif what < .6: self._write_other(rng.choice([1, 20]))
        elif what < .7: self.check_columns(self.mixture.fetch(ids).numpy(), serials)
        elif what < .73: self.keep_mixed(rng)

    def keep_mixed(self, rng):
        which = rng.randrange(3)
        if which==0: made = copy.deepcopy(self.mixture)
        elif which==1: made = pickle.loads(pickle.dumps(self.mixture))
        else:
            self.mixture.save(self.folder/'mixed')
            made = MixedMemory.load(self.folder/'mixed', step=steps_of(self.expected([7*STREAM]))[0])
        made.check_valid()
        first, other = made.memories
        self.check_memory(first)
        rows = other.recent(len(other))
        self.check_rows(rows, known=False)
        self.check_priorities(other, rows)

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
            if self.alone: self.check_rows(batch, known=False)

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
        gone, turns = self.dropped, self.turns
        self.memory.save(folder)
        own = self.options.get('sampler') if 'own' in self.kind else None
        self.check_memory(ReplayMemory.load(folder, copy.deepcopy(own)), gone=gone, turns=turns)
        if self.durable: self.check_rows(ReplayMemory.peek(self.memory.path).recent(20))

    def copy(self, held, rng):
        if self.durable: return
        which, gone, turns = rng.randrange(3), self.dropped, self.turns
        if which==0: made = copy.deepcopy(self.memory)
        elif which==1: made = pickle.loads(pickle.dumps(self.memory))
        else:
            made = self._open()
            made.load_state_dict(self.memory.state_dict())
        self.check_memory(made, gone=gone, turns=turns)
        made.add(steps_of(self.expected([7*STREAM]))[0])

    def in_child(self):
        "What a forked child finds: whole rows that it may read, or a refusal in words"
        memory, step = self.memory, steps_of(self.expected([7*STREAM]))[0]
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
        jobs += [(name, None) for name in self.more]
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
            self.check_memory(self.memory, whole=True, gone=self.dropped, turns=self.turns)
            self.closing = True
            self.memory.close()
        if self.durable:
            self.memory = self._open()
            for i in range(self.memory.first_id, self.memory.n_added):     # a call that was ended by `close` noted nothing
                if i not in self.twin: self.twin[i] = int(self.memory.fetch([i], ('serial',)).serial[0])
            self.check_memory(self.memory, whole=True, gone=self.dropped, turns=self.turns)
            self.memory.close()


def share_arena():
    "Let all threads that come take memory from one arena: else each leaves holes in one of its own, and the level creeps up"
    choose = getattr(ctypes.CDLL(None), 'mallopt', None)           # of Linux
    if choose is not None: choose(M_ARENA_MAX, 1)

def level():
    "Bytes of memory in use, without those that only wait in the allocator for their next use, and open descriptors"
    gc.collect()
    trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)         # of Linux: thirty threads leave much behind
    if trim is not None: trim(0)
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    return pages*os.sysconf('SC_PAGE_SIZE'), len(os.listdir('/proc/self/fd'))


def soak(seconds, seed=0, kinds=tuple(KINDS), at_once=4, say=lambda text: None):
    "Rounds of some kinds at once, for so many seconds in all; return how often each was done with each kind, and the levels after each round"
    share_arena()
    rng, begin, levels = random.Random(seed), time.monotonic(), []
    counts: dict[str, Counter] = {kind: Counter() for kind in kinds}
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
            for o in soaks: counts[o.kind].update(o.counts)
            soaks = o = None
        finally: shutil.rmtree(folder, ignore_errors=True)
        levels.append(level())
        say(f'{time.monotonic() - begin:6.0f} s  {" ".join(now):50}  {levels[-1][0]/1e6:.0f} MB, {levels[-1][1]} descriptors')
    return counts, levels


if __name__=='__main__':
    seconds, seed = float(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else '0'
    counts, found = soak(seconds, seed, tuple(sys.argv[3:]) or tuple(KINDS), say=lambda text: print(text, flush=True))
    for kind, of_kind in counts.items(): print(f'{kind:18} {sum(of_kind.values()):9,}  {dict(of_kind)}')
