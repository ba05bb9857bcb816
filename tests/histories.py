"""Histories of memories, mixtures and pipes: a kind and a seed say all that is done, and every operation tells what came of it.

    for operation, parts in history('ranks', 3): ...

`parts` are the ids, weights, columns … that an operation returned, by name. Everything goes through what users call, nothing depends on
the process, and each operation has random numbers of its own: so a history can be run with two versions of the library, and their
parts compared (same_draws.py), up to the first that differs and beyond it. What raises has the part `raises`, the built-in class of
the error: its words may change."""
import copy
import pickle
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import fastrl_replay.all as fr

HEADERS = 'ids', 'probs', 'weights', 'mask', 'source', 'relabelled'       # of a batch, beside its columns
OPERATIONS = 30                                                            # in a history


# ---- steps: step `k` of an episode of a stream, any number of them

class Rich(NamedTuple):
    "Nested observations, several dtypes, and strings"
    state: Any
    action: Any
    reward: Any
    next_state: Any
    terminated: Any
    truncated: Any
    env_id: Any
    step_n: Any
    episode_n: Any
    half: Any
    note: Any


class Goal(NamedTuple):
    "A state with a goal"
    state: Any
    action: Any
    reward: Any
    next_state: Any
    terminated: Any
    truncated: Any


class Value(NamedTuple):
    "A `Transition` with fields of its own"
    state: Any
    action: Any
    reward: Any
    next_state: Any
    terminated: Any
    truncated: Any
    value: Any
    code: Any


def vector(serial, k): return np.sin(np.arange(4) + serial).astype(np.float32)
def pixels(serial, k): return ((serial*np.arange(1, 1025)) % 251).astype(np.uint8).reshape(32, 32)
def frames(serial, k): return np.stack([pixels(serial - min(k, j), 0)[:16, :16] for j in (2, 1, 0)])
def nested(serial, k): return dict(place=vector(serial, k), seen=(pixels(serial, k)[:3, :4], np.float64(serial/7)))
def goals(serial, k):
    return dict(observation=vector(serial, k), achieved_goal=np.float32([k % 3, serial % 2]), desired_goal=np.float32([2, serial//20 % 2]))


def plain_step(o): return fr.Transition(o.state, o.serial % 5, o.reward, o.after, o.terminated, o.truncated)
def numbered_step(o):
    return fr.SimpleStep(o.state, o.serial % 5, o.after, o.terminated, o.truncated, o.reward, env_id=o.stream, step_n=o.k, episode_n=o.episode)
def goal_step(o): return Goal(o.state, np.float32([o.serial % 3, .5]), o.reward, o.after, o.terminated, o.truncated)
def value_step(o): return Value(o.state, o.serial % 5, o.reward, o.after, o.terminated, o.truncated, o.serial/8, np.int16(o.serial % 99))
def rich_step(o):
    action = np.float64([o.serial, -1]), np.uint8(o.serial % 7)
    return Rich(o.state, action, o.reward, o.after, o.terminated, o.truncated, o.stream, o.k, o.episode,
                torch.tensor([o.serial/3, 1.], dtype=torch.bfloat16), f'task {o.serial % 6}')


class Seen(NamedTuple):
    "What a step is made of"
    stream: int
    episode: int
    k: int
    serial: int
    state: Any
    after: Any
    reward: float
    terminated: bool
    truncated: bool


class Source:
    "Endless steps of `n` streams that take turns; iterating again goes on"
    def __init__(self, seed, step=plain_step, observe=vector, n=1, longest=14):
        self.rng, self.step, self.observe, self.longest = random.Random(f'steps {seed}'), step, observe, longest
        self.at = [[0, 0, self.rng.randint(2, longest)] for _ in range(n)]                # episode, step in it, its length
        self.turn = 0

    def __iter__(self): return self
    def __next__(self):
        stream = self.turn % len(self.at)
        self.turn += 1
        at = self.at[stream]
        episode, k, length = at
        serial, last = 1000*stream + 20*episode + k, k + 1==length
        terminated = last and self.rng.random() < .6
        seen = Seen(stream, episode, k, serial, self.observe(serial, k), self.observe(serial + 1, k + 1),
                    self.rng.choice((0., 1., -.5, serial/16)), terminated, last and not terminated)
        at[:] = (episode + 1, 0, self.rng.randint(2, self.longest)) if last else (episode, k + 1, length)
        return self.step(seen)
    def steps(self, m): return [next(self) for _ in range(m)]


def stacked(values):
    "The same thing with all leaves stacked: strings to lists"
    first = values[0]
    if isinstance(first, dict): return {k: stacked([o[k] for o in values]) for k in first}
    if hasattr(first, '_fields'): return type(first)(*(stacked([o[i] for o in values]) for i in range(len(first))))
    if isinstance(first, tuple): return tuple(stacked([o[i] for o in values]) for i in range(len(first)))
    if isinstance(first, str): return values
    return torch.stack(values) if isinstance(first, torch.Tensor) else np.stack(values)


# ---- what is told

def parts_of(batch, prefix=''):
    "The columns and headers of a batch (or step) by name"
    if batch is None: return {f'{prefix}nothing': True}
    if isinstance(batch, list):
        return {f'{prefix}n': len(batch)} | {k: v for i, o in enumerate(batch) for k, v in parts_of(o, f'{prefix}{i}.').items()}
    if isinstance(batch, tuple) and not hasattr(batch, '_fields'):          # a batch and its slots
        return parts_of(batch[0], prefix) | {f'{prefix}slots': batch[1]}
    if hasattr(batch, '_fields'): return {f'{prefix}{k}': v for k, v in batch._asdict().items()}
    found = {f'{prefix}{k}': batch[k] for k in batch.layout.fields}
    found |= {f'{prefix}<{k}>': v for k in HEADERS if (v := getattr(batch, k, None)) is not None}
    pads = getattr(batch, 'is_pad', None) or {}
    return found | {f'{prefix}<is_pad {k}>': v for k, v in pads.items()}


def built_in(error):
    "The name of the first built-in class that an error is of"
    return next(o.__name__ for o in type(error).__mro__ if o.__module__=='builtins')


class Own:
    "A user's sampler: the newer, the likelier"
    def __init__(self, max_sz=64): self.weight, self.n = np.zeros(max_sz), 0
    def on_add(self, slots, priorities):
        self.weight[slots] = self.n + 1 + np.arange(len(slots))
        self.n += len(slots)
    def draw(self, bs, rng):
        p = self.weight/self.weight.sum()
        slots = rng.choice(len(p), bs, p=p)
        return slots, p[slots]
    def update(self, slots, td_errors): self.weight[slots] += np.abs(td_errors)
    def on_drop(self, slots): self.weight[slots] = 0
    def get_state(self): return dict(weight=self.weight.copy(), n=self.n)
    def set_state(self, state): self.weight, self.n = np.array(state['weight']), int(state['n'])


# ---- worlds: something that operations are done to

class World:
    "What all have: operations by weight, each a method `do_…` with random numbers of its own"
    weights: dict[str, float] = {}

    def __init__(self, kind, seed, folder, without='', n=OPERATIONS, **options):
        self.kind, self.seed, self.folder, self.options, self.n = kind, seed, Path(folder), options, n
        self.operations = {k: w for k, w in self.weights.items() if k not in without.split()}
        self.number, self.batches = 0, list[Any]()

    def begin(self): raise NotImplementedError
    def close(self): pass
    def new_folder(self):
        self.number += 1
        return self.folder/f'{self.number}'

    def run(self) -> Iterator[tuple[str, dict[str, Any]]]:
        "Yield each operation, and the parts of what came of it"
        begun = self.told(lambda: self.begin() or {})
        yield 'begin', begun
        if begun: return
        for i in range(self.n):
            self.rng = random.Random(f'{self.kind} {self.seed} {i}')
            names = list(self.operations)
            name = 'more' if i < 3 else self.rng.choices(names, [self.operations[o] for o in names])[0]
            yield f'{i}: {name}', self.told(getattr(self, f'do_{name}'))
        yield 'end', self.told(self.do_look)
        self.close()
    def told(self, operation):
        try: parts = operation()
        except Exception as e: return dict(raises=built_in(e), words=f'{type(e).__name__}: {e}')      # noqa: BLE001
        return {k: v for k, v in parts.items() if v is not None}
    def keep(self, batch):
        self.batches = [*self.batches[-3:], batch]
        return parts_of(batch)
    def errors(self, shape):
        "TD errors, some of them large, some zero"
        return np.array([self.rng.choice((0., .25, 1., 7.5))*self.rng.random() for _ in range(int(np.prod(shape)))]).reshape(shape)


class Memories(World):
    "A `ReplayMemory` in RAM or in a folder"
    weights = dict(more=6, add=2, priority=1, sample=8, fields=1, update=6, stale=1, fetch=2, beside=1, episode=1, whole=.4, slots=1,
                   column=1, correct=.5, drop=1.2, drop_episode=.5, clear=.15, keep=1.5, around=1, sequences=1, look=1, alpha=.3)
    max_sz = 64

    def begin(self):
        options = dict(self.options)
        self.steps = Source(self.seed, options.pop('step', plain_step), options.pop('observe', vector), options.pop('streams', 1))
        self.chunks, self.sampler, self.on_disk = options.pop('chunks', ('list',)), options.pop('sampler', None), options.pop('on_disk', False)
        options |= {k: options[k]() for k in ('sequence', 'shares') if k in options}
        self.given = dict(max_sz=self.max_sz, seed=self.seed) | options
        self.path = self.new_folder() if self.on_disk else None
        self.memory = self.make()
    def make(self, **more): return fr.ReplayMemory(sampler=self.new_sampler(), **self.given | dict(path=self.path) | more)
    def new_sampler(self): return None if self.sampler is None else self.sampler()
    def own_sampler(self): return dict(sampler=self.new_sampler()) if self.sampler is Own else {}
    def close(self): self.memory.close()

    def some_ids(self, m):
        first, n = self.memory.first_id, self.memory.n_added
        return [self.rng.randrange(first, n) for _ in range(m)] if n > first else []

    # Rows in

    def do_more(self):
        m, how = self.rng.choice((1, 3, 8, 8, 20, 100)), self.rng.choice(self.chunks)
        steps = self.steps.steps(m)
        if how=='list': return dict(ids=self.memory.extend(steps))
        if how=='stacked': return dict(ids=self.memory.extend(stacked(steps), streams='one' if len(self.steps.at)==1 else None))
        batch = fr.Batch.of(stacked(steps))
        batch.streams = None if 'env_id' in batch.layout.fields else np.zeros(m, np.int64)
        return dict(ids=self.memory.extend(batch))
    def do_add(self): return dict(ids=[self.memory.add(o) for o in self.steps.steps(self.rng.randint(1, 5))])
    def do_priority(self):
        one = self.memory.add(next(self.steps), priority=self.rng.choice((0., .5, 9.)))
        return dict(ids=[one, *self.memory.extend(self.steps.steps(4), priorities=self.errors(4))])

    # Batches out

    def bs(self): return self.rng.choice((1, 4, 16, 16, 32))
    def do_sample(self): return self.keep(self.memory.sample(min(self.bs(), max(1, len(self.memory.sampler)))))
    def do_fields(self): return self.keep(self.memory.sample(3, fields=['reward', 'action']))
    def do_around(self): return self.keep(self.memory.sample(5, windows={'state': (-2, 0), 'action': range(4)}))
    def do_sequences(self): return parts_of(self.memory.sample_sequences(4, self.rng.choice((2, 3))))
    def do_update(self):
        if not self.batches: return {}
        batch = self.rng.choice(self.batches[-2:])
        return dict(changed=int(batch.update_priorities(self.errors(tuple(batch.ids.shape)))))
    def do_stale(self):
        ids = [0, 1, *self.some_ids(3)] if self.memory.n_added > 1 else []
        return dict(changed=int(self.memory.update_priorities(ids, self.errors(len(ids)))), n_stale=int(self.memory.n_stale))

    # Rows that are stored

    def do_fetch(self): return parts_of(self.memory.fetch(self.some_ids(5))) | parts_of(self.memory.recent(min(3, len(self.memory))), 'recent.')
    def do_beside(self):
        ids = self.some_ids(6)
        return {f'{name} {within}': getattr(self.memory, name)(ids, within) for name in ('previous', 'next') for within in (False, True)}
    def do_episode(self): return parts_of(self.memory.episode(self.some_ids(1)[0]))
    def do_whole(self): return parts_of([*self.memory.episodes()])
    def do_slots(self):
        n = len(self.memory)
        return parts_of(self.memory[self.rng.randrange(n)]) | parts_of(self.memory[n//3:n//2], 'slice.')
    def do_column(self): return dict(reward=self.memory.column('reward').copy(), ids=self.memory.where('reward', 1.))
    def do_correct(self):
        ids = sorted(set(self.some_ids(3)))
        self.memory.correct(ids, 'reward', np.float32(self.errors(len(ids))))
        return parts_of(self.memory.fetch(ids, ['reward']))
    def do_drop(self): return dict(n=self.memory.drop(self.some_ids(self.rng.choice((1, 3, 12)))))
    def do_drop_episode(self): return dict(n=self.memory.drop(self.memory.episode_ids(self.some_ids(1)[0])))
    def do_clear(self):
        self.memory.clear()
        return dict(first_id=self.memory.first_id) | self.do_more()
    def do_alpha(self):
        self.memory.sampler.alpha = self.rng.choice((.3, .6, 1.))
        return {}
    def do_look(self):
        memory, used = self.memory, self.memory.usage()
        found = dict(n=len(memory), first_id=memory.first_id, n_added=memory.n_added, n_stale=int(memory.n_stale), n_drawn=used['n_drawn'])
        if self.operations.get('alpha'): found['priorities'] = np.array(memory.sampler.priorities)
        memory.check_valid()
        return found | (parts_of(memory.fetch(np.arange(memory.first_id, memory.n_added))) if len(memory) else {})

    # The same memory in another place

    def do_keep(self):
        how = self.rng.choice(('close', 'save') if self.on_disk else ('save', 'copy', 'pickle', 'state'))
        getattr(self, f'keep_{how}')()
        self.batches = []                                              # they belong to the memory before
        return self.do_look()
    def keep_save(self):
        folder = self.new_folder()
        self.memory.save(folder)
        if self.on_disk: return
        self.memory.add(next(self.steps))                              # which is not in it
        self.memory = fr.ReplayMemory.load(folder, **self.own_sampler())
    def keep_copy(self): self.memory = copy.deepcopy(self.memory)
    def keep_pickle(self): self.memory = pickle.loads(pickle.dumps(self.memory))
    def keep_state(self):
        state, self.memory = self.memory.state_dict(), self.make(seed=1)
        self.memory.load_state_dict(state)
    def keep_close(self):
        self.memory.close()
        self.memory = fr.ReplayMemory.open(self.path, **self.own_sampler())


class Mixtures(Memories):
    "A `MixedMemory` of two"
    weights = dict(more=5, other=3, sample=8, fields=1, update=6, shares=.5, keep=1.2, look=1, around=.7)

    def make(self):
        sampler, shares = self.sampler or (lambda: None), self.given.pop('shares', (.7, .3))
        self.given.pop('path', None)
        members = [fr.ReplayMemory(sampler=sampler(), **self.given | dict(max_sz=n, seed=n)) for n in (64, 40)]
        for o in members: o.extend(self.steps.steps(40))
        return fr.MixedMemory(members, shares=shares, seed=self.seed)
    def close(self): pass
    def bs(self): return self.rng.choice((1, 4, 7, 12))
    def do_sample(self): return self.keep(self.memory.sample(self.bs()))
    def do_other(self): return dict(ids=self.memory.memories[1].extend(self.steps.steps(self.rng.choice((1, 5)))))
    def do_shares(self):
        self.memory.set_shares(self.rng.choice(((.5, .5), (.9, .1), (1., 0.))))
        return {}
    def do_look(self):
        memory = self.memory
        memory.check_valid()
        every = np.concatenate([k << 56 | np.arange(o.first_id, o.n_added) for k, o in enumerate(memory.memories)])
        return dict(n=len(memory), n_stale=int(memory.n_stale), n_drawn=memory.n_drawn) | parts_of(memory.fetch(every))
    def do_keep(self):
        if self.rng.random() < .5: self.memory = copy.deepcopy(self.memory)
        else:
            self.memory.save(folder := self.new_folder())
            self.memory = fr.MixedMemory.load(folder)
        self.batches = []
        return self.do_look()


class Shards(Memories):
    "A `RayMemory` of no shards, which needs no Ray"
    weights = dict(more=6, add=2, sample=8, fields=1, update=6, stale=1, fetch=2, beside=1, keep=.7, look=1)
    def make(self):
        from fastrl_replay.ray import RayMemory
        self.given.pop('path', None)
        return RayMemory(0, sampler=self.new_sampler(), **self.given)
    def do_look(self):
        memory = self.memory
        rows = parts_of(memory.recent(len(memory))) if len(memory) else {}
        return dict(n=len(memory), n_added=memory.n_added, n_stale=int(memory.n_stale)) | rows
    def do_fetch(self): return parts_of(self.memory.recent(min(3, len(self.memory))))
    def do_keep(self):
        from fastrl_replay.ray import RayMemory
        self.memory.save(folder := self.new_folder())
        self.memory.close()
        self.memory = RayMemory.load(folder, shards=0)
        self.batches = []
        return self.do_look()


class Devices(Memories):
    "A `DeviceMemory` on the CPU"
    weights = dict(more=6, sample=8, fields=1, update=6, stale=1, fetch=2, beside=1, episode=1, groups=1, keep=.7, look=1)
    n_envs = 4

    def make(self):
        self.given.pop('path', None)
        return fr.DeviceMemory(sampler=self.new_sampler(), device='cpu', **self.given)
    def close(self): pass
    def do_more(self):
        found = []
        for _ in range(self.rng.choice((1, 2, 6))):
            rows = stacked(self.steps.steps(self.n_envs))
            tensors = type(rows)(*(torch.as_tensor(np.asarray(o)) for o in rows))
            ids = self.memory.extend(tensors)
            found.append(torch.as_tensor(ids).clone())
        return dict(ids=torch.cat(found))
    def do_sample(self): return self.keep(self.memory.sample(min(self.bs(), len(self.memory))))
    def do_groups(self): return parts_of(self.memory.sample_groups(2, 3))
    def do_fetch(self): return parts_of(self.memory.fetch(self.some_ids(5)))
    def do_stale(self):
        ids = [0, 1, *self.some_ids(3)]
        self.memory.update_priorities(ids, self.errors(len(ids)))
        return dict(n_stale=int(self.memory.n_stale))
    def do_update(self):
        if not self.batches: return {}
        batch = self.batches[-1]
        self.memory.update_priorities(batch.ids, self.errors(tuple(batch.ids.shape)))
        return dict(n_stale=int(self.memory.n_stale))
    def do_look(self):
        memory = self.memory
        found = dict(n=len(memory), first_id=memory.first_id, n_added=memory.n_added, n_drawn=memory.usage()['n_drawn'])
        return found | (parts_of(memory.fetch(np.arange(memory.first_id, memory.n_added))) if len(memory) else {})
    def do_keep(self):
        self.memory.save(folder := self.new_folder())
        self.memory = fr.DeviceMemory.load(folder, device='cpu')
        self.batches = []
        return self.do_look()


class Pipes(World):
    "A pipeline over a source of steps, lists or `Batch`es"
    weights = dict(more=10, update=6, again=1, draw=1.5, look=1, keep=1.2, frozen=.5, ahead=.7)

    def begin(self):
        options = dict(self.options)
        self.pipeline = options.pop('pipeline')
        self.steps = Source(self.seed, options.pop('step', plain_step), options.pop('observe', vector), options.pop('streams', 1))
        self.chunk = options.pop('chunk', None)
        self.made: list[Any] = []
        self.pipe = self.make()
        self.items = iter(self.pipe)
    def make(self):
        pipe = self.pipeline(self.source(), self.seed)
        self.made.append(pipe)
        return pipe
    def source(self):
        "What a new pipe begins with, which goes on with the same steps"
        if self.chunk is None: return self.steps
        def chunks():
            while True:
                rows = self.steps.steps(self.chunk)
                yield rows if self.seed % 2 else fr.Batch.of(stacked(rows))
        return chunks()
    def do_more(self):
        found = {}
        for i in range(self.rng.randint(1, 4)): found |= {f'{i}.{k}': v for k, v in self.keep(next(self.items)).items()}
        return found
    def keep(self, item):
        found = super().keep(item)
        if isinstance(item, tuple) and not hasattr(item, '_fields'): self.batches[-1] = item[0]
        return found
    def do_update(self):
        batch = self.batches[-1] if self.batches else None
        if not isinstance(batch, fr.Batch): return {}
        return dict(changed=int(batch.update_priorities(self.errors(tuple(batch.ids.shape)))))
    def do_again(self):
        self.items = iter(self.pipe)
        return {}
    def do_draw(self): return self.keep(self.pipe.sample(self.rng.choice((1, 4))))
    def do_look(self):
        memory = self.pipe.memory
        return dict(n=len(self.pipe), n_added=memory.n_added, n_batches=self.pipe.n_batches, n_stale=int(memory.n_stale),
                    trackers=[self.pipe._sz_tracker, self.pipe._idx_tracker, self.pipe._cycle_tracker])
    def do_keep(self):
        self.pipe.save(folder := self.new_folder())
        self.pipe = self.make()
        self.pipe.load(folder)
        self.items, self.batches = iter(self.pipe), []
        return self.do_look()
    def do_frozen(self):
        self.pipe.freeze_memory = True
        found = parts_of(next(iter(self.pipe)))
        self.pipe.freeze_memory, self.items = False, iter(self.pipe)
        return found
    def do_ahead(self):
        found, batches = {}, iter(self.pipe.loader(prefetch=2))
        for i in range(3): found |= parts_of(next(batches), f'{i}.')
        self.items = iter(self.pipe)
        return found
    def close(self):
        for o in self.made: getattr(o, 'close', lambda: None)()


class Steppers(Pipes):
    "A pipeline that begins with environments"
    def source(self): return None


class Pushes(World):
    "`NStep` in a loop of one's own, over steps, lists or `Batch`es; what comes goes into a memory"
    weights = dict(more=10, flush=1, sample=3, look=1)
    def begin(self):
        options = dict(self.options)
        self.chunk = options.pop('chunk', None)
        self.n_step = fr.NStep(n=options.pop('n_step'), gamma=options.pop('gamma', .9))
        self.steps = Source(self.seed, options.pop('step', plain_step), options.pop('observe', vector), options.pop('streams', 1))
        self.memory = fr.ReplayMemory(200, seed=self.seed)
    def do_more(self):
        if self.chunk is None: rows = [o for s in self.steps.steps(self.rng.randint(1, 9)) for o in self.n_step.push(s)]
        elif self.seed % 2: rows = self.n_step.push(self.steps.steps(self.chunk))
        else: rows = self.n_step.push(fr.Batch.of(stacked(self.steps.steps(self.chunk))))
        return self.stored(rows)
    def do_flush(self): return self.stored(self.n_step.flush())
    def stored(self, rows):
        self.memory.extend(rows)
        return parts_of(rows)
    def do_sample(self): return parts_of(self.memory.sample(min(4, len(self.memory))))
    def do_look(self): return parts_of(self.memory.fetch(np.arange(self.memory.n_added)))


# ---- the kinds

def reward_of(reached, wanted, info): return -(reached!=wanted).any(-1).astype(np.float32)
def flags_of(reached, wanted, info): return (reached==wanted).all(-1)
def falling(n): return fr.LinearSchedule(.4, 1., n)
def coin(states): return (np.asarray(states)[:, 2] > 0).astype(np.int64)

# Operations that a kind is spared, since it refuses them or they say nothing
ROWS = 'alpha'
NO_UPDATES = 'priority update stale '
ALL_CHUNKS = dict(chunks=('list', 'stacked', 'batch'))
NUMBERED = dict(step=numbered_step, streams=3) | ALL_CHUNKS
ON_SEQUENCES = dict(without='priority stale around fields sequences alpha correct', step=numbered_step, streams=2, **ALL_CHUNKS)


def kind(world, **options): return lambda name, seed, folder: world(name, seed, folder, **options)

def replay(made, n_step=None, **options):
    "A pipeline of a source, perhaps n-step returns, and one replay"
    def pipeline(source, seed):
        if n_step is not None: source = fr.NStep(source, n=n_step, gamma=.95)
        return made(source, seed=seed, **dict(bs=4, max_sz=60) | options)
    return pipeline
def stepper(made, n_envs, **options):
    "The same behind environments"
    made = replay(made, **dict(bs=8, max_sz=90) | options)
    def pipeline(_, seed): return made(fr.GymStepper(['CartPole-v1'], agent=coin, seed=seed, n_envs=n_envs), seed)
    return pipeline


KINDS: dict[str, Callable[[str, int, Any], World]] = dict(
    uniform=kind(Memories, without=NO_UPDATES + ROWS, **ALL_CHUNKS),
    uniform_numbered=kind(Memories, without=NO_UPDATES + ROWS, **NUMBERED),
    uniform_replace=kind(Memories, without=NO_UPDATES + ROWS, sampler=lambda: fr.Uniform(replace=True), step=value_step),
    proportional=kind(Memories, sampler=fr.Proportional, **NUMBERED),
    proportional_memory=kind(Memories, sampler=lambda: fr.Proportional(.8, falling(40), 1e-3, 'memory'), **ALL_CHUNKS),
    ranks=kind(Memories, without=ROWS, sampler=fr.RankBased, **NUMBERED),
    ranks_beta=kind(Memories, without=ROWS, sampler=lambda: fr.RankBased(1., falling(30))),
    lap=kind(Memories, without=ROWS, sampler=fr.LAP, step=value_step),
    combined=kind(Memories, without=NO_UPDATES + ROWS, sampler=fr.Combined),
    ere=kind(Memories, without=NO_UPDATES + ROWS, sampler=lambda: fr.ERE(.99, 10, 20)),
    ages=kind(Memories, without=NO_UPDATES + ROWS, sampler=lambda: fr.AgeWeighted(30, .2)),
    ages_flat=kind(Memories, without=NO_UPDATES + ROWS, sampler=lambda: fr.AgeWeighted(300, 0.), **NUMBERED),
    own=kind(Memories, without='alpha', sampler=Own),
    rich=kind(Memories, without='alpha', sampler=fr.RankBased, step=rich_step, observe=nested, streams=2),
    texts=kind(Memories, sampler=fr.Proportional, step=rich_step, chunks=('list', 'batch')),
    frames=kind(Memories, dedup='frames', observe=frames, sampler=fr.Proportional, **NUMBERED),
    next_states=kind(Memories, without=NO_UPDATES + ROWS, dedup='next_state', observe=pixels, **ALL_CHUNKS),
    automatic=kind(Memories, without=NO_UPDATES + ROWS, observe=pixels, **NUMBERED),
    lz4=kind(Memories, dedup='frames', codec='lz4', observe=frames, sampler=fr.Proportional, **NUMBERED),
    path=kind(Memories, on_disk=True, sampler=fr.Proportional, **NUMBERED),
    path_uniform=kind(Memories, without=NO_UPDATES + ROWS, on_disk=True, **ALL_CHUNKS),
    path_ranks=kind(Memories, without=ROWS, on_disk=True, sampler=fr.RankBased, step=value_step),
    path_own=kind(Memories, without=ROWS, on_disk=True, sampler=Own),
    path_frames=kind(Memories, without=NO_UPDATES + ROWS, on_disk=True, dedup='frames', observe=frames, **NUMBERED),
    path_texts=kind(Memories, without=NO_UPDATES + ROWS, on_disk=True, step=rich_step, observe=nested, streams=2),
    path_sequences=kind(Memories, on_disk=True, sequence=lambda: fr.Sequence(5, 1, 2), **ON_SEQUENCES),
    path_max_draws=kind(Memories, without=NO_UPDATES + ROWS, on_disk=True, max_draws=3, **ALL_CHUNKS),
    max_draws=kind(Memories, max_draws=2, sampler=fr.Proportional, **ALL_CHUNKS),
    sequences=kind(Memories, sequence=lambda: fr.Sequence(6, 0, 3), **ON_SEQUENCES),
    sequences_burn_in=kind(Memories, sequence=lambda: fr.Sequence(8, 3, 2), **ON_SEQUENCES),
    sequences_priorities=kind(Memories, sequence=lambda: fr.Sequence(6, 2, 2), sampler=fr.Proportional, **ON_SEQUENCES),
    sequences_across=kind(Memories, sequence=lambda: fr.Sequence(7, 0, 2, across_episodes=True), **ON_SEQUENCES),
    sequences_whole=kind(Memories, sequence=lambda: fr.Sequence(4, 0, 1, pad=False), sampler=fr.Proportional, **ON_SEQUENCES),
    sequences_unnumbered=kind(Memories, sequence=lambda: fr.Sequence(5, 2), **ON_SEQUENCES | dict(step=plain_step, streams=1)),
    windows=kind(Memories, windows={'state': (-2, -1, 0), 'action': range(5)}, sampler=fr.Proportional, **NUMBERED),
    windows_uniform=kind(Memories, without=NO_UPDATES + ROWS, windows={'action': range(-1, 3)}),
    mixture=kind(Mixtures, step=value_step),
    mixture_priorities=kind(Mixtures, sampler=fr.Proportional, **NUMBERED),
    mixture_schedule=kind(Mixtures, shares=lambda: fr.LinearSchedule(.9, .2, 20), sampler=fr.RankBased),
    mixture_sequences=kind(Mixtures, without='fields around', sequence=lambda: fr.Sequence(4, 0, 1), step=numbered_step, streams=2),
    shards=kind(Shards, without=NO_UPDATES),
    shards_priorities=kind(Shards, sampler=fr.Proportional, **NUMBERED),
    device=kind(Devices, without='update stale', streams=4, n_envs=4),
    device_priorities=kind(Devices, sampler=fr.Proportional, streams=4, n_envs=4, step=value_step),
    device_ages=kind(Devices, without='update stale', sampler=lambda: fr.AgeWeighted(40), streams=4, n_envs=4),
    device_n_step=kind(Devices, sampler=fr.Proportional, n_step=3, gamma=.9, streams=4, n_envs=4),
    device_sequences=kind(Devices, without='groups fields stale update', sequence=lambda: fr.Sequence(5, 0, 1), streams=4, n_envs=4),
    n_step=kind(Pushes, n_step=3),
    n_step_streams=kind(Pushes, n_step=4, step=numbered_step, streams=3),
    n_step_chunks=kind(Pushes, n_step=3, chunk=6, step=numbered_step, streams=3),
    pipe=kind(Pipes, without='update', pipeline=replay(fr.ExperienceReplay)),
    pipe_ratio=kind(Pipes, without='update', pipeline=replay(fr.ExperienceReplay, steps_per_batch=.4, min_sz=9, replace=True, return_idxs=True)),
    pipe_chunks=kind(Pipes, pipeline=replay(fr.PrioritizedReplay, steps_per_batch=3), chunk=5, step=numbered_step, streams=5),
    pipe_n_step=kind(Pipes, pipeline=replay(fr.PrioritizedReplay, n_step=3), step=numbered_step, streams=2),
    pipe_ranks=kind(Pipes, pipeline=replay(fr.RankReplay, n_step=2, beta=falling(50))),
    pipe_sequences=kind(Pipes, pipeline=replay(fr.SequenceReplay, length=6, burn_in=2, alpha=.7), step=numbered_step, streams=2),
    pipe_hindsight=kind(Pipes, without='update', pipeline=replay(fr.HindsightReplay, compute_reward=reward_of, compute_terminated=flags_of),
                        step=goal_step, observe=goals),
    pipe_hindsight_episode=kind(Pipes, pipeline=replay(fr.HindsightReplay, compute_reward=reward_of, strategy='episode', k=2, sampler=None),
                                without='update', step=goal_step, observe=goals),
    pipe_windows=kind(Pipes, pipeline=replay(fr.PrioritizedReplay, windows={'action': range(3)})),
    stepper=kind(Steppers, pipeline=stepper(fr.PrioritizedReplay, 1, n_step=3)),
    stepper_vector=kind(Steppers, pipeline=stepper(fr.ExperienceReplay, 3), without='update'),
)


def history(name: str, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    "Yield the operations of history `seed` of a kind, each with the parts of what came of it"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield from KINDS[name](name, seed, folder).run()
