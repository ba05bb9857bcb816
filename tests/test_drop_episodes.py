"Whole episodes are dropped by age, by draws, by a test: beside a twin that goes through all rows one by one"
import threading
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fastrl_replay.all import (
    DeviceMemory, MixedMemory, Proportional, RankBased, ReplayMemory, Sampler, Sequence, Uniform)
from refusals import refused
from words import WORDS


class Flagged(NamedTuple):
    state: np.ndarray
    reward: float
    terminated: bool
    truncated: bool
    env_id: int

class Numbered(NamedTuple):
    "Steps whose episodes are told by their numbers alone"
    state: np.ndarray
    reward: float
    env_id: int
    episode_n: int


class Twin:
    "All rows that there ever were, as dicts; `episode`: a number that rows of one episode have in common"
    def __init__(self, max_sz, kind): self.max_sz, self.kind, self.rows, self.newest, self.first_id, self.n_episodes = max_sz, kind, [], {}, 0, 0
    def add(self, step):
        id, before = len(self.rows), self.newest.get(step.env_id)
        linked = before is not None and id - before < self.max_sz and before >= self.first_id - self.max_sz
        goes_on = linked and not self.ends_before(self.rows[before], step)
        self.n_episodes += not goes_on
        self.rows.append(dict(id=id, step=step, episode=self.rows[before]['episode'] if goes_on else self.n_episodes, dropped=False, drawn=0))
        self.newest[step.env_id] = id
        self.first_id = max(self.first_id, len(self.rows) - self.max_sz)
    def ends_before(self, row, step):
        if self.kind is Numbered: return row['step'].episode_n!=step.episode_n
        return row['step'].terminated or row['step'].truncated
    def clear(self): self.first_id, self.newest = len(self.rows), {}
    def stored(self): return self.rows[self.first_id:]
    def left(self): return [o['id'] for o in self.stored() if not o['dropped']]
    def drop(self, ids):
        new = [o for o in self.stored() if o['id'] in ids and not o['dropped']]
        for o in new: o['dropped'] = True
        return len(new)
    def episodes(self):
        found = {}
        for o in self.stored(): found.setdefault(o['episode'], []).append(o)
        return list(found.values())
    def ended(self, episode):
        last = episode[-1]
        if self.kind is Flagged and (last['step'].terminated or last['step'].truncated): return True
        return any(o['step'].env_id==last['step'].env_id for o in self.rows[last['id'] + 1:])
    def drop_episodes(self, older_than, drawn, test):
        going = []
        for episode in self.episodes():
            if all(o['dropped'] for o in episode): continue
            if older_than is not None and not len(self.rows) - 1 - episode[-1]['id'] > older_than: continue
            if drawn is not None and not any(o['drawn'] >= drawn for o in episode): continue
            if (drawn is not None or test is not None) and not self.ended(episode): continue
            if test is not None and not test([o['step'] for o in episode]): continue
            going += [o['id'] for o in episode]
        return self.drop(going)


TESTS = {       # of the twin's list of steps, and of a Batch
    'poor': (lambda o: sum(s.reward for s in o) < 1, lambda o: o.reward.sum() < 1),
    'short': (lambda o: len(o) < 4, lambda o: len(o) < 4),
    'begins': (lambda o: o[0].state[0] % 2==0, lambda o: np.bool_(o.state[0, 0].item() % 2==0)),
    'all': (lambda o: True, lambda o: True), 'none': (lambda o: False, lambda o: torch.tensor([False]))}
KINDS = {'uniform': (lambda: Uniform(replace=True), {}), 'proportional': (Proportional, {}), 'rank': (RankBased, {}),
         'counted': (Proportional, dict(max_draws=10**9)), 'sequences': (Proportional, dict(sequence=Sequence(3))), 'windows': (Proportional, dict(windows={'state': (-1, 0)}))}


class World:
    "A memory and its twin, on which the same things happen"
    def __init__(self, kind, name, seed, folder=None):
        self.make, self.options = KINDS[name]
        self.rng, self.kind, self.folder, self.n_saved = np.random.default_rng(seed), kind, folder, 0
        self.on_disk = folder is not None and seed % 2==1
        max_sz = int(self.rng.integers(12, 60))
        self.twin, self.place = Twin(max_sz, kind), dict(path=folder/'memory') if self.on_disk else {}
        self.memory, self.at, self.episode = ReplayMemory(max_sz, self.make(), seed=seed, **self.options, **self.place), 0, {}
    def step(self):
        stream, end = int(self.rng.integers(4)), self.rng.random() < .2
        own = self.episode.setdefault(stream, 0)
        if end: self.episode[stream] += 1
        self.at += 1
        told = (bool(end and self.at % 2), bool(end and not self.at % 2), stream) if self.kind is Flagged else (stream, own)
        return self.kind(np.full(2, self.at, np.float32), float(self.rng.integers(2)), *told)
    def add(self):
        step = self.step()
        self.memory.add(step)
        self.twin.add(step)
    def extend(self):
        steps = [self.step() for _ in range(self.rng.integers(1, 20))]
        self.memory.extend(steps)
        for o in steps: self.twin.add(o)
    def sample(self):
        try: ids = self.memory.sample(int(self.rng.integers(1, 9))).ids.flatten().tolist()
        except ValueError: return                        # nothing is left, or no sequence is whole
        for id in ids:
            if id >= 0: self.twin.rows[id]['drawn'] += 1
    def drop(self):
        if not len(self.memory): return
        ids = self.rng.integers(self.memory.first_id, self.memory.n_added, 3)
        assert self.memory.drop(ids)==self.twin.drop(ids)
    def clear(self):
        if not len(self.memory): return
        self.memory.clear()
        self.twin.clear()
    def drop_episodes(self):
        asked = self.rng.random(3) < .5
        if not asked.any(): asked[self.rng.integers(3)] = True
        older, drawn, name = int(self.rng.integers(30)), int(self.rng.integers(1, 6)), str(self.rng.choice([*TESTS]))
        wanted, test = TESTS[name]
        got = self.memory.drop_episodes(*(v if k else None for v, k in zip((older, drawn, test), asked)))
        assert got==self.twin.drop_episodes(*(v if k else None for v, k in zip((older, drawn, wanted), asked))), (older, drawn, name, asked)
    def again(self):
        if self.folder is None or self.twin.n_episodes==0: return
        if self.on_disk:
            self.memory.close()
            self.memory = ReplayMemory.open(self.folder/'memory')
        else:
            self.n_saved += 1
            self.memory.save(self.folder/f'saved{self.n_saved}')
            self.memory = ReplayMemory.load(self.folder/f'saved{self.n_saved}')
        if 'max_draws' in self.options: return
        for o in self.twin.rows: o['drawn'] = 0          # draws are counted from here on
    def go(self, n):
        names = 'add extend extend sample sample sample drop_episodes drop_episodes drop clear again'.split()
        odds = np.array([3, 3, 3, 3, 3, 3, 4, 4, 2, .2, .3])
        for _ in range(n):
            getattr(self, str(self.rng.choice(names, p=odds/odds.sum())))()
            memory, ids = self.memory, np.arange(self.memory.first_id, self.memory.n_added)
            assert (memory.first_id, memory.n_added)==(self.twin.first_id, len(self.twin.rows)) and memory.check_valid()
            if len(ids): assert ids[memory.sampler.eligible.holds(ids % memory.max_sz)].tolist()==self.twin.left()
        if self.on_disk: self.memory.close()


@pytest.mark.parametrize('name,kind,seed', [(o, (Flagged, Numbered)[k % 2], k//2 % 2) for k, o in enumerate([*KINDS]*2)])
def test_a_memory_drops_what_its_twin_drops(kind, name, seed, tmp_path):
    "In RAM, saved and loaded, and on disk, closed and opened again"
    World(kind, name, 10*seed + seed, tmp_path).go(80)


def game(n, moves=4, ended=True, stream=0):
    return [Flagged(np.full(2, n, np.float32), float(n), ended and k==moves - 1, False, stream) for k in range(moves)]

def games(n, **kw):
    memory = ReplayMemory(100, seed=0, **kw)
    for k in range(n): memory.extend(game(k))
    return memory


def test_what_goes_on_waits_for_its_end_but_not_for_ever():
    memory = ReplayMemory(100, seed=0)
    memory.extend(game(0, ended=False))
    memory.extend(game(1, stream=7))
    assert memory.drop_episodes(test=lambda o: o.reward[0]==0)==0 and memory.drop_episodes(older_than=3, test=lambda o: True)==0
    assert memory.drop_episodes(older_than=3)==4          # nobody continued it
    memory.add(game(0, moves=1)[0])
    assert memory.drop_episodes(test=lambda o: o.reward[0]==0)==1     # of the same episode: its last step was drawn still


class Endless(NamedTuple):
    state: float

class Stubborn(Sampler):
    "A sampler that does not know how to leave rows out"
    on_drop = None
    def draw(self, bs, rng): return np.zeros(bs, np.int64), np.ones(bs)


def test_what_cannot_be_known_is_refused_and_changes_nothing(monkeypatch):
    memory, endless, large, stubborn = games(3), ReplayMemory(9), ReplayMemory(5000), ReplayMemory(9, Stubborn())
    endless.add(Endless(1.))
    large.extend(game(1))
    stubborn.extend(game(1))
    with refused('drop_episodes'): memory.drop_episodes()
    for bad in (-1, 2.5, 'x', True):
        with refused('older_than'): memory.drop_episodes(older_than=bad)
    for bad in (0, -1, 2.5):
        with refused('drawn'): memory.drop_episodes(drawn=bad)
    with refused('test', TypeError): memory.drop_episodes(test=7)
    with refused('episode'): endless.drop_episodes(older_than=1)
    with refused('drawn'): large.drop_episodes(drawn=1)
    with refused('sampler', TypeError): stubborn.drop_episodes(test=lambda o: pytest.fail('not even asked'))
    for bad in (lambda o: None, lambda o: o.terminated, lambda o: 1, lambda o: 'yes', lambda o: torch.ones(())):
        with refused('test', TypeError): memory.drop_episodes(test=bad)
    def fails(o):
        if o.reward[0]==1: raise ZeroDivisionError
        return True
    with pytest.raises(ZeroDivisionError): memory.drop_episodes(test=fails)
    assert all(o.sampler.eligible.all for o in (memory, endless, large, stubborn)) and memory.check_valid()
    for other in (MixedMemory([memory]), DeviceMemory(9, device='cpu', compile=False)):
        with pytest.raises(AttributeError, match=WORDS['no whole episodes here']): other.drop_episodes(older_than=1)


def test_draws_of_every_row_are_counted_where_that_is_asked_for():
    memory = ReplayMemory(5000, Uniform(replace=True), max_draws=10**9, seed=0)
    for k in range(3): memory.extend(game(k))
    while not memory.drop_episodes(drawn=6): memory.sample(2)
    assert len(memory.sample(999).ids.unique())==8


def test_others_go_on_while_a_test_runs():
    "It holds no lock; what is overwritten meanwhile is not dropped, and what takes its place is drawn"
    memory = ReplayMemory(12, Uniform(replace=True), seed=0)
    for k in range(3): memory.extend(game(k))
    def slow(episode):
        if episode.reward[0]==0:
            other = threading.Thread(target=lambda: [memory.extend(game(k)) for k in (3, 4)])      # overwrites games 0 and 1
            other.start()
            other.join(60)
            assert not other.is_alive(), 'the lock was held'
        return True
    assert memory.drop_episodes(test=slow)==4              # game 2
    assert {*memory.sample(200).reward.tolist()}=={3., 4.} and memory.check_valid()
