"""A naive memory in plain Python, and steps of many kinds to put into it and its serious twin.

The twin keeps, by id, the bytes that every transition must read back as. Nothing here uses the package's own machinery,
so that a slip there can't hide behind the same slip here."""
import re
from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
import torch

from fastrl_replay.batch import FETCHED, Batch
from fastrl_replay.steps import SimpleStep, Transition

LOOSE = ('reward', 'total_reward', 'discount')
PYTHON = {float: np.float32, int: np.int64, bool: np.bool_}


def named(v):
    "The name of a test with this value: the same in each process"
    return re.sub(r' at 0x\w+', '', repr(v))[:60]


# --- what a value must be stored as -----------------------------------------------------------------------------------
def kids(v):
    "The nested parts of a value, those of a dict in the order of its keys; None for a leaf"
    if isinstance(v, dict): return [v[k] for k in sorted(v)]
    return list(v) if isinstance(v, tuple) else None


def mapped(f, v):
    if isinstance(v, dict): return {k: mapped(f, o) for k, o in v.items()}
    return tuple(mapped(f, o) for o in v) if isinstance(v, tuple) else f(v)


def stored(v, field=None):
    "The arrays in which the contract stores a value, one for each leaf; bfloat16 as its bits"
    parts = kids(v)
    if parts is not None: return [a for o in parts for a in stored(o)]
    if isinstance(v, torch.Tensor):
        v = v.detach()
        if v.dtype==torch.bfloat16: v = v.float() if field in LOOSE else v.contiguous().view(torch.int16)
    a = np.asarray(v)
    if field in LOOSE: return [a.astype(np.float32)]
    return [a.astype(PYTHON.get(type(v), a.dtype.newbyteorder('=')))]


def _bytes(a): return a.dtype.str, a.shape, a.tobytes()
def step_bytes(step): return [_bytes(a) for f, v in zip(step._fields, step) for a in stored(v, f)]


def column_bytes(batch):
    "What each row of a batch reads as, from its columns"
    arrays = [a for v in batch.astuple() for a in stored(v)]
    return [[_bytes(a[i]) for a in arrays] for i in range(len(batch))]


def row_bytes(step): return [_bytes(np.asarray(a)) for v in step for a in stored(v)]


def as_row(step):
    "What a step reads as by row: there, numpy has no bfloat16"
    def widen(v): return v.float() if isinstance(v, torch.Tensor) and v.dtype==torch.bfloat16 else v
    return step_bytes(type(step)(*(mapped(widen, v) for v in step)))


# --- kinds of steps ---------------------------------------------------------------------------------------------------
class Nested(NamedTuple):
    obs: Any
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    env_id: Any

class Image(NamedTuple):
    state: Any
    action: Any
    reward: Any

class Brain(NamedTuple):
    state: Any
    scalar: Any
    reward: Any
    discount: Any

class Odd(NamedTuple):          # names that a tuple, a batch or a memory uses for something else
    ids: Any
    replace: Any
    to: Any
    weights: Any
    index: Any
    count: Any
    probs: Any
    columns: Any
    step_type: Any

class Only(NamedTuple):
    x: Any

Wide = namedtuple('Wide', [f'field_{k}' for k in range(12)])


def _floats(rng, *shape): return rng.standard_normal(shape).astype(np.float32)
def _flag(rng): return bool(rng.random() < .15)
def _loose(rng): return [float(rng.standard_normal()), int(rng.integers(-9, 9)), np.float64(rng.random()), np.float32(.1), float('inf'), -0.][rng.integers(6)]

def transition(rng, world):
    return Transition(_floats(rng, 4), int(rng.integers(-2**62, 2**62)), _loose(rng), _floats(rng, 4), _flag(rng), _flag(rng))

def simple(rng, world):
    "Streams of five environments, whose episodes end at random"
    e = int(rng.integers(5))
    step_n, episode_n = world.setdefault(e, (0, 0))
    end, cut = _flag(rng), _flag(rng)
    world[e] = (0, episode_n + 1) if end or cut else (step_n + 1, episode_n)
    return SimpleStep(_floats(rng, 2), int(rng.integers(4)), _floats(rng, 2), end, cut, _loose(rng), _loose(rng), e, 0, step_n, episode_n)

def nested(rng, world):
    obs = {'camera': rng.integers(256, size=(3, 5), dtype=np.uint8), 'pose': (_floats(rng, 2), np.float64(rng.random()), {'on': _flag(rng)})}
    return Nested(obs, (int(rng.integers(9)), rng.random(3).astype(np.float16)), _loose(rng), _flag(rng), _flag(rng), np.int8(rng.integers(-3, 3)))

def image(rng, world): return Image(rng.integers(256, size=(1, 25, 27), dtype=np.uint8), np.uint8(rng.integers(18)), rng.random(3))

def brain(rng, world):
    t = torch.randn(5, generator=torch.Generator().manual_seed(int(rng.integers(2**40))))
    return Brain(t.bfloat16(), t[0].bfloat16(), t[1].bfloat16(), t[2])

def odd(rng, world):
    return Odd(int(rng.integers(9)), rng.random(3), bool(rng.integers(2)), float(rng.random()), np.int16(rng.integers(9)),
               complex(rng.random(), 2.), rng.integers(9, size=2), _floats(rng, 1), np.uint64(2**64 - 1 - int(rng.integers(5))))

def only(rng, world): return Only(rng.integers(9, size=3, dtype=np.int32))
def wide(rng, world): return Wide(*(np.float32(rng.random()) if k % 3 else bool(k % 2) for k in range(12)))

KINDS = dict(transition=transition, simple=simple, nested=nested, image=image, brain=brain, odd=odd, only=only, wide=wide)


def disguised(rng, v, field=None):
    "The same value in other clothes: a tensor, strided, the other byte order, a dict in another order, a numpy scalar, a float"
    if isinstance(v, dict): return {k: disguised(rng, v[k]) for k in rng.permutation(list(v)).tolist()}
    if isinstance(v, tuple): return tuple(disguised(rng, o) for o in v)
    if isinstance(v, torch.Tensor): return v.clone().requires_grad_() if v.dtype.is_floating_point and rng.random() < .5 else v.clone()
    if isinstance(v, np.ndarray):
        wears = [v.copy(), np.asfortranarray(v), v.astype(v.dtype.newbyteorder('>')), np.stack([v, v], -1)[..., 0], v[::-1].copy()[::-1]]
        if v.dtype!=np.uint64: wears.append(torch.from_numpy(v.copy()))
        return wears[rng.integers(len(wears))]
    wears = [v, np.asarray(v).astype(PYTHON.get(type(v), np.asarray(v).dtype))[()]]
    if field in LOOSE: wears = [v, np.asarray(v)]
    if isinstance(v, int) and abs(v) < 2**50: wears += [np.array(v), float(v), torch.tensor(v)]
    return wears[rng.integers(len(wears))]


def dressed(rng, step): return type(step)(*(disguised(rng, v, f) for f, v in zip(step._fields, step)))


def stacked(steps):
    "A step of stacked arrays, each in its stored dtype"
    def stack(field, *vs):
        if isinstance(vs[0], dict): return {k: stack(None, *(v[k] for v in vs)) for k in vs[0]}
        if isinstance(vs[0], tuple): return tuple(stack(None, *o) for o in zip(*vs))
        if isinstance(vs[0], torch.Tensor) and vs[0].dtype==torch.bfloat16: return torch.stack(vs)
        return np.stack([stored(v, field)[0] for v in vs])
    return type(steps[0])(*(stack(f, *vs) for f, vs in zip(steps[0]._fields, zip(*steps))))


CHUNKS = dict(list=list, tuple=tuple, stacked=stacked, batch=lambda steps: Batch.of(stacked(steps)), generator=lambda steps: (o for o in steps))


# --- the twin ---------------------------------------------------------------------------------------------------------
class Twin:
    "A memory as one would write it in ten minutes, if speed and space didn't matter: everything is kept for ever"
    def __init__(self, max_sz, prioritized=False, alpha=.6, eps=1e-6, ranked=False):
        self.max_sz, self.prioritized, self.alpha, self.eps, self.ranked = max_sz, prioritized, alpha, eps, ranked
        self.steps, self.bytes, self.prev, self.next, self.newest = [], [], {}, {}, {}
        self.priority, self.largest, self.n_stale = {}, 1., 0

    @property
    def n_added(self): return len(self.steps)
    @property
    def first_id(self): return max(0, len(self.steps) - self.max_sz)
    @property
    def ids(self): return range(self.first_id, self.n_added)
    @property
    def by_slot(self): return sorted(self.ids, key=lambda i: i % self.max_sz)

    def add(self, step, priority=None, row=0):
        id = len(self.steps)
        self.steps.append(step)
        self.bytes.append(step_bytes(step))
        stream = int(step.env_id) if 'env_id' in step._fields else row
        before = self.newest.get(stream)
        if before is not None: self.prev[id], self.next[before] = before, id
        self.newest[stream] = id
        if priority is not None: self.largest = max(self.largest, float(priority))
        self.priority[id] = self.largest if priority is None else float(priority)
        return id

    def extend(self, steps, priorities=None, form='stacked'):
        "A list is one stream in the order of time; stacked arrays and a `Batch` are one row of each"
        one = form not in ('stacked', 'batch')
        return [self.add(o, None if priorities is None else priorities[k], 0 if one else k) for k, o in enumerate(steps)]

    def update(self, ids, td):
        last = {}
        for i, e in zip(ids, td):
            if i < self.first_id: self.n_stale += 1
            else: last[i] = e
        if not self.prioritized: return 0
        for i, e in last.items():
            self.priority[i] = abs(float(e)) + self.eps
            self.largest = max(self.largest, self.priority[i])
        return len(last)

    def links(self, id):
        "How far back and ahead the neighbours in the stream lie; 0 where there is none, or it is gone"
        back, ahead = self.prev.get(id), self.next.get(id)
        return (id - back if back is not None and back >= self.first_id else 0), (ahead - id if ahead is not None else 0)

    def episode(self, id):
        def together(a, b):
            a, b = self.steps[a], self.steps[b]
            if 'episode_n' in a._fields: return a.episode_n==b.episode_n
            return not (a.terminated or a.truncated)
        first = id
        while self.links(first)[0] and together(self.prev[first], first): first = self.prev[first]
        ids = [first]
        while ids[-1] in self.next and together(ids[-1], self.next[ids[-1]]): ids.append(self.next[ids[-1]])
        return ids

    def probs(self):
        "The chance of every living id"
        if not self.prioritized: return {i: 1/len(self.ids) for i in self.ids}
        order = sorted(self.ids, key=lambda i: (-self.priority[i], i))          # equal priorities: the older first
        mass = {i: rank**-self.alpha for rank, i in enumerate(order, 1)} if self.ranked else {i: self.priority[i]**self.alpha for i in order}
        total = sum(mass.values())
        return {i: m/total if total else 1/len(mass) for i, m in mass.items()}


def read(storage, slots, fields=None):
    "A batch of the rows in these slots of a storage"
    request = storage.ask(len(slots), fields, FETCHED)
    request.slots[:] = slots
    return storage.read(request)
