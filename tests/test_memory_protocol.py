"""Memories of one part and of several pass one set of tests, by the members of `Memory` alone (more of each: test_kit.py).

A twin remembers each step by the id that it got. What it expects holds for one memory and for one of several parts, whose ids
are far apart: a step before another may be stored in another part, and is then as if it were not there."""
import threading
from typing import NamedTuple

import matplotlib.pyplot
import numpy as np
import pytest

from fastrl_replay.all import ExperienceReplay, Proportional, ReplayMemory, SimpleStep
from fastrl_replay.mixed import MixedMemory
from fastrl_replay.protocol import Lasting, Memory, as_memory, members
from fastrl_replay.ray import RayMemory
from refusals import refused
from words import words

MAX_SZ = 24


def mixed(*memories, seed):
    "One of several, of which the first alone is drawn from"
    other = ReplayMemory(9, Proportional() if memories[0].sampler.prioritized else None, seed=0)
    other.extend([World(5).step() for _ in range(9)])
    return MixedMemory([*memories, other], shares=(1., 0.), seed=seed)


KINDS = dict(proportional=lambda seed: ReplayMemory(MAX_SZ, Proportional(), seed=seed),
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


@pytest.mark.parametrize('kind', KINDS)
def test_the_same_seed_draws_the_same(kind):
    def draws(seed):
        memory, world = KINDS[kind](seed), World()
        found = [memory.sample(5).ids.tolist() for _ in range(12) if store(memory, world, {}, 6)]
        if kind in ('proportional', 'mixed'):      # shards have generators of their own
            state = memory.rng.get_state()
            again = memory.sample(5).ids.tolist()
            memory.rng.set_state(state)
            assert memory.sample(5).ids.tolist()==again
        return found
    assert draws(3)==draws(3)!=draws(4)


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
