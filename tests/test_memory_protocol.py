"""Memories of one part and of several pass one set of tests, by the members of `Memory` alone (more of each: test_kit.py); so does a
naive one, which stands here as a pattern.

A twin remembers each step by the id that it got. What it expects holds for one memory and for one of several parts, whose ids
are far apart: a step before another may be stored in another part, and is then as if it were not there."""
import threading, weakref
from types import SimpleNamespace
from typing import NamedTuple

import matplotlib.pyplot
import numpy as np
import pytest
import torch

from fastrl_replay.all import ExperienceReplay, Proportional, ReplayMemory, SimpleStep
from fastrl_replay.batch import Batch, as_chunk, came_from, chunk_columns, chunk_streams
from fastrl_replay.health import memory_health
from fastrl_replay.mixed import MixedMemory
from fastrl_replay.protocol import Lasting, Memory, as_memory, members
from fastrl_replay.ray import RayMemory
from fastrl_replay.samplers.eligible import ALL
from fastrl_replay.samplers.rng import Rng
from fastrl_replay.show import memory_figure
from fastrl_replay.steps import Layout
from words import words

MAX_SZ = 24


class NaiveMemory:
    "All members of `Memory`, over lists and dicts: rows by id, and of each the ids of its neighbours"
    draws = layout = None
    def __init__(self, max_sz, seed=None):
        self.max_sz, self.rng, self.lock = max_sz, Rng(seed), threading.RLock()
        self.sampler = SimpleNamespace(prioritized=False, beta=None, n_batches=0, sequence=None, eligible=ALL, name='all alike')
        self.rows, self.before, self.after, self.newest = {}, {}, {}, {}
        self.n_added = self.n_drawn = self.n_stale = 0

    @property
    def first_id(self): return max(0, self.n_added - self.max_sz)
    def __len__(self): return self.n_added - self.first_id

    def add(self, step, priority=None): return int(self.extend([step])[0])
    def extend(self, chunk, priorities=None, streams=None):
        chunk = as_chunk(chunk, self.layout and self.layout.step_type)
        layout = self.layout or Layout.of(chunk[0])
        columns, m = chunk_columns(layout, chunk)
        streams, self.layout, first = chunk_streams(layout, chunk, columns, streams), layout, self.n_added
        if streams is None: streams = range(m)                       # one row of each
        with self.lock:
            for i in range(m):
                id, stream = first + i, int(streams[i])
                self.rows[id] = [np.array(c[i], leaf.dtype) for c, leaf in zip(columns, layout.leaves)]
                self.before[id] = self.newest.get(stream, -1)
                self.after[self.before[id]] = self.newest[stream] = id
            self.n_added += m
            for id in range(first - self.max_sz, self.first_id): self.rows.pop(id, None)
        return np.arange(first, self.n_added)

    def _batch(self, ids, fields=None, **drawn):
        layout = self.layout if fields is None else self.layout.select(fields)
        at = [self.layout.leaves.index(leaf) for leaf in layout.leaves]
        tensors = [torch.from_numpy(np.stack([self.rows[i][k] for i in ids])) for k in at]
        batch = Batch.of_tensors(layout, tensors, ids=torch.tensor(ids), max_sz=self.max_sz, **drawn)
        return came_from(batch, weakref.ref(self))
    def _known(self, ids):
        ids = np.asarray(ids).tolist()
        for i in ids:
            if i not in self.rows: raise ValueError(f'ids: {i} is not stored')
        return ids
    def fetch(self, ids, fields=None):
        with self.lock: return self._batch(self._known(ids), fields)
    def sample(self, bs, fields=None):
        with self.lock:
            if not self.rows: raise ValueError('the memory is empty')
            if bs > len(self): raise ValueError(f'{bs} rows without replacement of {len(self)}')
            self.n_drawn, self.sampler.n_batches = self.n_drawn + bs, self.sampler.n_batches + 1
            ids = self.rng.choice(sorted(self.rows), bs, replace=False).tolist()
            return self._batch(ids, fields, probs=torch.full((bs,), 1/len(self)), weights=torch.ones(bs))
    def update_priorities(self, ids, td_errors):
        ids = np.asarray(ids)
        if len(ids)!=len(td_errors): raise ValueError(f'td_errors: expected {len(ids)}')
        if (ids >= self.n_added).any() or not np.isfinite(np.asarray(td_errors)).all(): raise ValueError('ids: never given out')
        self.n_stale += int((ids < self.first_id).sum())
        return 0

    def _same(self, a, b):
        end, n = (self.layout.leaf(o) for o in ('terminated', 'episode_n'))
        return not self.rows[a][end] and self.rows[a][n]==self.rows[b][n]
    def _beside(self, ids, links, within):
        def one(i):
            j = links.get(i, -1)
            return j if j in self.rows and (not within or self._same(min(i, j), max(i, j))) else -1
        with self.lock: return np.array([one(i) for i in self._known(ids)], np.int64)
    def previous(self, ids, within_episode=False): return self._beside(ids, self.before, within_episode)
    def next(self, ids, within_episode=False): return self._beside(ids, self.after, within_episode)
    def episode(self, id):
        ids = [id]
        while (i := self.previous(ids[:1], True)[0]) >= 0: ids.insert(0, int(i))
        while (i := self.next(ids[-1:], True)[0]) >= 0: ids.append(int(i))
        return self.fetch(ids)

    def news(self, seen, fields=None):
        ids = np.arange(max(self.first_id, seen.get(0, 0)), self.n_added)
        seen[0] = self.n_added
        if len(ids): yield ids + 1, self.fetch(ids, fields)
    def health(self): return memory_health(self)
    def show(self, **kw): return memory_figure(self, **kw)
    def usage(self):
        return dict(n_drawn=self.n_drawn, n_stale=self.n_stale, samples_per_insert=self.n_drawn/max(1, self.n_added))


def mixed(*memories, seed):
    "One of several, of which the first alone is drawn from"
    other = ReplayMemory(9, Proportional() if memories[0].sampler.prioritized else None, seed=0)
    other.extend([World(5).step() for _ in range(9)])
    return MixedMemory([*memories, other], shares=(1., 0.), seed=seed)


KINDS = dict(naive=lambda seed: NaiveMemory(MAX_SZ, seed), proportional=lambda seed: ReplayMemory(MAX_SZ, Proportional(), seed=seed),
             three_shards=lambda seed: RayMemory(3, MAX_SZ, Proportional(), place='here', seed=seed),
             mixed=lambda seed: mixed(ReplayMemory(MAX_SZ, Proportional(), seed=seed), seed=seed),
             mixed_shards=lambda seed: mixed(RayMemory(3, MAX_SZ, place='here', seed=seed), seed=seed))


@pytest.fixture(params=list(KINDS))
def memory(request):
    made = KINDS[request.param](3)
    yield made
    if hasattr(made, 'close'): made.close()


class World:
    "Three streams whose episodes have random lengths; each step has a number of its own, in `state`"
    def __init__(self, seed=0):
        self.rng, self.n, self.steps = np.random.default_rng(seed), 0, {}
        self.t, self.episode = [0]*3, [0]*3
    def step(self):
        k = int(self.rng.integers(3))
        ended = bool(self.rng.random() < .2)
        made = SimpleStep(np.float32(self.n), 0, np.float32(self.n), ended, False, float(self.t[k]), env_id=k,
                          step_n=self.t[k], episode_n=self.episode[k])
        self.n += 1
        self.t[k], self.episode[k] = (0, self.episode[k] + 1) if ended else (self.t[k] + 1, self.episode[k])
        return made


def part(id): return id >> 44                   # whose steps follow each other


def living(memory, twin):
    "The ids that can be fetched, each by itself; all others are refused"
    found = []
    for id in list(twin)[-2*MAX_SZ:]:
        try: memory.fetch([id])
        except ValueError: continue
        found.append(id)
    return found


def check(memory, twin, rng):
    "Compare all that can be read with the twin: id → (number, stream, episode, place in it, place in the stream, ended)"
    assert memory.n_added==len(twin) and len(memory)==memory.n_added - memory.first_id <= memory.max_sz
    alive = living(memory, twin)
    assert len(alive)==len(memory)
    ids = rng.permutation(alive*2)
    rows = memory.fetch(ids)
    assert rows.ids.tolist()==ids.tolist() and rows.state.tolist()==[twin[i].n for i in ids]
    assert memory.fetch(ids[:3], ('reward', 'env_id')).reward.tolist()==[float(twin[i].t) for i in ids[:3]]
    at = {(o.stream, o.at): id for id, o in twin.items()}
    for back, ask in (True, memory.previous), (False, memory.next):
        for within in False, True:
            for id, other in zip(alive, ask(alive, within).tolist(), strict=True):
                o = twin[id]
                wanted = at.get((o.stream, o.at + (-1 if back else 1)), -1)
                apart = wanted >= 0 and within and twin[wanted].episode!=o.episode
                gone = wanted < 0 or wanted not in alive or apart or part(wanted)!=part(id)
                if not gone: assert other==wanted, (id, other, wanted, within)
                elif wanted < 0 or part(wanted)==part(id): assert other==-1, (id, other, wanted, within)
                elif other >= 0:                               # its stream goes on in another part, and then here again
                    there = twin[other]
                    assert there.stream==o.stream and (there.at < o.at)==back and (not within or there.episode==o.episode)
    id = int(rng.choice(alive))
    episode = memory.episode(id).ids.tolist()
    assert id in episode and {twin[i][1:3] for i in episode}=={twin[id][1:3]}
    assert memory.previous(episode, True).tolist()==[-1, *episode[:-1]] and memory.next(episode, True).tolist()==[*episode[1:], -1]


class Known(NamedTuple):
    n: float
    stream: int
    episode: int
    t: int
    at: int


def store(memory, world, twin, m, single=False):
    steps = [world.step() for _ in range(m)]
    ids = [memory.add(o) for o in steps] if single else memory.extend(steps).tolist()
    assert len(ids)==m and not set(ids) & set(twin)
    for id, o in zip(ids, steps):
        at = sum(k.stream==o.env_id for k in twin.values())
        twin[id] = Known(float(o.state), o.env_id, o.episode_n, o.step_n, at)
    return ids


def test_reading_is_that_of_a_twin(memory):
    world, twin, rng = World(), {}, np.random.default_rng(1)
    for turn in range(16):
        store(memory, world, twin, int(rng.integers(1, 9)), single=turn % 3==0)
        check(memory, twin, rng)


def test_what_is_not_stored_is_refused(memory):
    world, twin = World(), {}
    with pytest.raises(ValueError): memory.sample(1)
    store(memory, world, twin, 2*MAX_SZ)
    alive = living(memory, twin)
    gone = next(i for i in twin if i not in alive)
    for ids in [gone], [alive[0], max(alive) + 9], [alive[0], gone]:
        for read in memory.fetch, memory.previous, memory.next:
            with pytest.raises(ValueError): read(ids)
    with pytest.raises(ValueError): memory.episode(gone)
    n = memory.n_added
    for wrong in [world.step(), world.step()._replace(reward='lots')], [world.step()._replace(state=np.zeros(3))]:
        with pytest.raises((ValueError, TypeError)): memory.extend(wrong)
    assert memory.n_added==n and living(memory, twin)==alive


def test_draws_are_of_what_is_stored_and_are_counted(memory):
    world, twin = World(), {}
    for _ in range(20):
        store(memory, world, twin, 10)
        alive = set(living(memory, twin))
        batch = memory.sample(4)
        ids = batch.ids.tolist()
        assert set(ids) <= alive and batch.state.tolist()==[twin[i].n for i in ids]
        assert (batch.probs > 0).all() and batch.weights.shape==(4,) and (batch.weights <= 1).all()
        assert memory.sample(2, ('reward',)).reward.tolist()
    used = memory.usage()
    assert used['n_drawn']==20*6 and used['samples_per_insert']==20*6/200 and memory.sampler.n_batches==40
    assert memory.draws is None or memory.draws.n_rows==20*6


def test_news_are_every_row_once(memory):
    world, twin, seen, found, rng = World(), {}, {}, [], np.random.default_rng(3)
    assert list(memory.news(seen))==[]
    for _ in range(30):
        store(memory, world, twin, int(rng.integers(1, 12)))          # never more than one part has room for
        for stored, rows in memory.news(seen, ('state', 'reward')):
            assert len(stored)==len(rows) and (stored <= memory.n_added).all()
            found += zip(rows.state.tolist(), stored.tolist())
    numbers = [n for n, _ in found]
    assert len(set(numbers))==len(numbers) and set(numbers) <= set(range(world.n))
    assert len(numbers) > .8*world.n                                   # the rest was overwritten before it was read
    assert all(stored >= n + 1 for n, stored in found)


def test_who_holds_the_lock_is_alone(memory):
    world, done = World(), []
    memory.add(world.step())
    def write():
        memory.add(world.step())
        done.append(memory.n_added)
    with memory.lock, memory.lock:
        writer = threading.Thread(target=write)
        writer.start()
        writer.join(.2)
        assert not done and memory.n_added==1 and len(memory.sample(1))==1
    writer.join(10)
    assert done==[2]


def test_it_tells_how_it_is(memory):
    "Through a pipe too, which asks the memory itself"
    store(memory, World(), {}, 60)
    memory.sample(3)
    health = ExperienceReplay([], memory=memory).health()
    assert health['n']==len(memory)==MAX_SZ and isinstance(health['warnings'], list)
    assert ExperienceReplay([], memory=memory).show().axes and memory.show(source='Env-v0: ').axes
    matplotlib.pyplot.close('all')


def test_what_lacks_a_member_is_refused_by_name():
    assert 16 <= len(members(Memory)) <= 20 and set(members(Memory)) < set(members(Lasting))
    for name in members(Memory):
        made = type('Other', (), {k: None for k in members(Memory) if k!=name})
        with pytest.raises(TypeError, match=words('a member is missing', name=name)): as_memory(made())
    assert as_memory(ReplayMemory(9), Lasting)
