"""The replay over a memory in several shards, without Ray: its limiter, its pipe, what it saves.

tests/test_ray_cluster.py has the same with Ray actors."""
import types
from collections import deque
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch

from fastrl_replay.all import CheckpointError, DQNLearner, GymStepper, q_network
from fastrl_replay.batch import Batch
from fastrl_replay.cli import main
from fastrl_replay.pipes.actors import ActorError
from fastrl_replay.pipes.replay import batches_due
from fastrl_replay.ray import RayActors, RayMemory, RayReplay, replay as module
from fastrl_replay.ray.replay import dealt
from fastrl_replay.ray.shard import Info, LocalShard
from fastrl_replay.samplers.proportional import Proportional
from refusals import refused
from words import WORDS


class Row(NamedTuple):
    value: int
    env_id: int


def rows(n, env=0): return Batch.of(Row(np.arange(n), np.full(n, env)))


def standing(number, n_added, cap): return Info(*[0]*len(Info._fields))._replace(number=number, n_added=n_added, cap=cap)


# ---- the limiter

class Late(LocalShard):
    "Calls reach the shard in their order, at any time until somebody waits for the answer"
    def __init__(self, shard):
        super().__init__(shard)
        self.waiting = deque()
    def send(self, *call):
        self.waiting.append([call, None])
        return self.waiting[-1]
    def deliver(self):
        if self.waiting:
            ticket = self.waiting.popleft()
            ticket[1] = super().send(*ticket[0])
    def get(self, ref, timeout):
        while ref[1] is None: self.deliver()
        return super().get(ref[1], timeout)


class Pushers(RayActors):
    "Actors that aren't there: whenever the learner looks at them, chunks and calls arrive at random"
    def __init__(self, rng, n, chunk):
        super().__init__([], n, chunk)
        self.rng, self.seq, self.n_refused = rng, {}, 0
    def begin(self, memory):
        self.shards = [o.handle.shard for o in memory.shards.places]
        self.late = [o.handle for o in memory.shards.places]
        self.places = self.rng.integers(0, len(self.shards), self.n)
    def watch(self):
        for _ in range(self.rng.integers(0, 6)):
            if self.rng.random() < .5: self.late[self.rng.integers(len(self.late))].deliver()
            else: self.push(int(self.rng.integers(self.n)))
            self.check()
        if self.rng.random() < .02: self.places = self.rng.integers(0, len(self.shards), self.n)      # others take over
        return True
    def push(self, w):
        shard, key = self.shards[self.places[w]], (w << 32) + int(self.places[w])
        seq = self.seq.get(key, 0) + 1
        m = int(self.rng.integers(1, self.chunk + 1))
        stored = shard.push(key, seq, seq, rows(m, w), limited=True)[0] > seq
        self.seq[key] = seq if stored else seq - 1
        self.n_refused += not stored


def limited(seed, monkeypatch, batches):
    "A replay whose calls are late: never a batch too many, never a step too many, and it goes on"
    rng = np.random.default_rng(seed)
    clock = types.SimpleNamespace(now=0.)
    def monotonic():
        clock.now += .001
        return clock.now
    monkeypatch.setattr(module, 'time', types.SimpleNamespace(monotonic=monotonic, sleep=lambda s: None))
    shards, n, chunk = (int(rng.integers(1, k)) for k in (6, 8, 40))
    ratio, group, ahead = float(rng.choice([.3, 1, 2.5, 7, 50])), int(rng.integers(1, 9)), int(rng.integers(1, 4))
    min_sz = int(rng.integers(1, 300))
    least = 2*shards*chunk + int(np.ceil(ratio*group*ahead))
    source = Pushers(rng, n, chunk)
    replay = RayReplay(source, shards, 4, 100_000, sampler=Proportional(), min_sz=min_sz, steps_per_batch=ratio, place='here',
                       slack=least + int(rng.integers(0, 3)*rng.integers(0, 200)), group=group, ahead=ahead, seed=seed)
    for o in replay.memory.shards.places:
        assert o.info.cap == 0
        o.handle = Late(o.handle.shard)
    def check():
        n = sum(o.memory.n_added for o in source.shards)
        assert n <= min_sz + replay.n_batches*replay.steps_per_batch + replay.slack
        assert replay.n_batches + len(replay._ready) <= batches_due(n, min_sz, replay.steps_per_batch)
    source.check = check
    for _, batch in zip(range(batches), replay):
        check()
        if rng.random() < .3: batch.update_priorities(rng.random(4))
    assert replay.n_batches == batches
    return source.n_refused


def test_the_limiter_holds_and_never_stands_still(monkeypatch):
    assert sum(limited(seed, monkeypatch, 50) > 0 for seed in range(20)) > 10


@pytest.mark.slow
def test_the_limiter_a_thousand_times(monkeypatch):
    for seed in range(40, 1040): limited(seed, monkeypatch, 15)


def test_credits_of_a_silent_shard_go_to_the_others():
    "One shard of three gets no step: what it may get falls to a third of what is left, and the sum never passes the total"
    n, caps, sent = [0, 0, 0], [0, 0, 0], []
    for k in range(200):
        infos = [standing(i, n[i], caps[i]) for i in range(3)]
        total = 900 + 10*k
        caps = list(dealt(infos, sent, total).values())
        assert sum(caps) <= total
        for i in (0, 2): n[i] = max(n[i], min(caps[i], n[i] + 40))
    assert n[1] == 0 and n[0] + n[2] > .99*(total - caps[1]) and caps[1] < 10


def test_another_learner_counts_what_was_drawn(monkeypatch):
    "Not what is due: batches that are owed stay owed, and a memory that nobody drew from owes nothing"
    replay = RayReplay(None, 2, 8, 10_000, place='here', steps_per_batch=4, min_sz=40, group=3, ahead=2, slack=9000, seed=0)
    replay.memory.extend(rows(2000))
    for _ in zip(range(30), replay): pass
    drawn = replay.memory.usage()['n_drawn']/8
    monkeypatch.setattr(module.RayMemory, 'attach', lambda *a: replay.memory)
    other = RayReplay.attach('replay', bs=8, min_sz=40, steps_per_batch=4)
    assert 30 <= other.n_batches == drawn <= 36 < batches_due(2000, 40, 4) == 491
    assert other._allowed() == 8                                       # a whole group is due
    replay.memory = RayMemory(2, 5000, place='here')
    replay.memory.extend(rows(2000))
    assert RayReplay.attach('replay', bs=8, min_sz=40, steps_per_batch=4).n_batches == 491


def test_too_little_slack_is_refused():
    steps = GymStepper(['CartPole-v1'], seed=0).ray_actors(1, chunk=64)
    with refused('slack'):
        steps.ray_replay(1, 8, place='here', steps_per_batch=4, slack=10)
    assert steps.ray_replay(1, 8, place='here', steps_per_batch=4).slack == 192
    assert steps.ray_replay(1, 8, place='here', slack=10).slack == 10                 # nothing is limited


def test_no_step_for_long_is_an_error(monkeypatch):
    replay = RayReplay(None, 2, 8, 1000, place='here', steps_per_batch=4, timeout=.05)
    with pytest.raises(ActorError, match=WORDS['no step has come']): next(iter(replay))


# ---- the pipe

def test_steps_that_come_through_this_process():
    "The ratio is exact, single steps travel together, the source goes on where it was, and updates arrive"
    values = iter(range(10**6))
    replay = RayReplay((Row(v, v % 3) for v in values), 3, 16, 300, sampler=Proportional(), min_sz=50, steps_per_batch=5, place='here', seed=0)
    for _ in range(3):
        for _, batch in zip(range(10), replay):
            k = replay.n_batches - 1
            assert replay.memory.n_added == 50 + 5*k == len(replay) and batch.value.max() < 50 + 5*k
            assert batch.update_priorities(np.full(16, 9.)) == len(set(batch.ids.tolist()))
    assert replay.n_batches == 30 and replay.memory.check_valid() and sorted(replay.memory.shards.known('largest'))[-1] == 9.000001
    assert replay._sz_tracker == 195 and bool(replay)


def test_it_ends_with_its_source():
    replay = RayReplay([rows(30), rows(11)], 0, 4, 100, min_sz=20, steps_per_batch=10)
    assert len(list(replay)) == 3 and len(list(replay)) == 4                        # the source again, for 41 steps more


def test_loader_idxs_and_frozen():
    replay = RayReplay([rows(64, env) for env in range(4)], 2, 8, 300, place='here', min_sz=200, return_idxs=True, seed=1)
    batch, idxs = next(iter(replay.loader(prefetch=2)))
    assert (idxs == batch.idxs).all() and replay.memory.n_added == 256
    replay.freeze_memory = True
    it = iter(replay)
    assert all(len(next(it)[0]) == 8 for _ in range(50)) and replay.memory.n_added == 256
    with pytest.raises(RuntimeError, match=WORDS['frozen']): replay.add(Row(1, 1))
    replay.freeze_memory = False
    assert replay.update_priorities(replay.extend(rows(5)), np.ones(5)) == 0          # uniform


def test_where_actors_may_stand():
    steps = GymStepper(['CartPole-v1'], seed=0).ray_actors(2)
    with refused('ray_actors'): steps.n_step(n=3, gamma=.9).ray_replay(2, 8)
    with refused('actors', got='RayReplay'): steps.ray_replay(0, 8, 100).ray_actors(2)
    replay = steps.ray_replay(0, 8, 500, min_sz=100, steps_per_batch=10)              # without Ray: in this process
    assert len([b for _, b in zip(range(5), replay)]) == 5 and not replay.pushed
    for wrong in (dict(group=0), dict(ahead=0), dict(bs=0), dict(min_sz=0), dict(steps_per_batch=0), dict(shards=-1), dict(on_loss='x')):
        with refused(next(iter(wrong))): RayReplay([], **dict(shards=0, bs=4, max_sz=10) | wrong)
    with refused('rank', got='2'): RayReplay.attach('nobody', rank=2, world=2)


@pytest.mark.parametrize('shards', [0, 3])
def test_saved_and_loaded_it_goes_on_the_same(tmp_path, shards):
    def made(): return RayReplay((rows(7, k % 5) for k in range(10**6)), shards, 16, 400, sampler=Proportional(), min_sz=60, steps_per_batch=3,
                                 group=4, place='here', seed=5)
    first = made()
    for _, batch in zip(range(61), first): batch.update_priorities(np.arange(16.))
    assert first.save(tmp_path) > 0
    second = made().load(tmp_path)
    assert (second.n_batches, second.memory.n_added) == (61, first.memory.n_added)
    for o in (first, second): o.source_datapipe = [rows(9, 50)]*100
    for _, a, b in zip(range(30), first, second):
        for k in ('value', 'ids', 'probs', 'weights'): assert (getattr(a, k) == getattr(b, k)).all(), k
        for o in (a, b): o.update_priorities(np.ones(16))
    next(tmp_path.glob('manifest*')).unlink()
    with pytest.raises(CheckpointError): made().load(tmp_path)


def test_weights_of_ranks_are_comparable():
    "Divided by the largest of the memory, w·P^beta is one number for all batches of all ranks"
    memory = RayMemory(3, 600, Proportional(alpha=1., beta=.7), place='here', seed=0)
    ids = memory.extend(rows(300, np.arange(300) % 7))
    memory.update_priorities(ids, np.random.default_rng(0).random(300) + .1)
    leaves = np.concatenate([o.handle.shard.memory.sampler.priorities for o in memory.shards.places])
    memory.sampler.normalize = 'memory'
    for batch in memory.take(memory.ask(20, 32)):
        wanted = (leaves.min()/leaves.sum()/batch.probs.double())**.7
        assert torch.allclose(batch.weights.double(), wanted, rtol=1e-5)


def test_a_learner_learns_from_it():
    env = GymStepper(['CartPole-v1'], seed=0)
    replay = env.ray_replay(3, 32, 2000, sampler=Proportional(), min_sz=200, steps_per_batch=4, place='here', seed=0)
    made = gym.make('CartPole-v1')
    learn = DQNLearner(q_network(made.observation_space, 2, 16, 0), replay.loader())
    learn.fit(200)
    assert learn.n_steps == replay.memory.n_added == 200 + 4*199 and len(learn.returns) > 10
    assert {'return', 'loss', 'beta', 'samples_per_insert'} <= learn.progress().keys()
    assert learn.return_steps == sorted(learn.return_steps)


@pytest.mark.parametrize('wrong, said', [(['--memory', 'rank'], '--memory rank'), (['--resume', 'x'], '--ray: a memory on a cluster'), (['--shards', '0'], '--shards')])
def test_what_the_command_line_refuses(wrong, said, capsys):
    assert main(['train', '--ray', *wrong]) == 2
    assert said in capsys.readouterr().err
