"""The life of a memory on a cluster: nothing is left behind, whatever its owner comes to; the directory, shards and pushers may die or
hang. Each row of the table of losses (nbs/4_processes/07_ray_cluster.ipynb) is a test here or in tests/test_ray_cluster.py."""
import os, signal, subprocess, sys, threading, time
from typing import NamedTuple

import numpy as np
import pytest
import torch
from clusters import beside, named, running, until, workers

from fastrl_replay.all import AgeWeighted, GymStepper, Sequence
from fastrl_replay.batch import Batch
from fastrl_replay.pipes.actors import ActorError
from fastrl_replay.ray import RayMemory, RayParams, RayPusher
from fastrl_replay.ray.shard import ShardLost, actors_called, named_actor
from fastrl_replay.samplers.proportional import Proportional
from refusals import refused
from words import WORDS, words

ray = pytest.importorskip('ray')
WAIT = 120.


class Row(NamedTuple):
    value: int
    env_id: int


def rows(start, n, env=0): return Batch.of(Row(np.arange(start, start + n), np.full(n, env)))


@pytest.fixture(scope='module')
def cluster():
    with RayMemory(2, 200, Proportional(), place='here') as local:        # compiled once, not in every shard
        local.extend(rows(0, 50))
        local.sample(8).update_priorities(np.ones(8))
    with pytest.MonkeyPatch.context() as patch:
        beside(patch)
        ray.init('local', num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=150_000_000)
        yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def name(cluster, request):
    yield request.node.name
    until(lambda: not named() and not workers(), 'something is left behind', 60)


# ---- nothing is left behind

OWNER = '''
import sys, time, signal
first, how, name, address = sys.argv[1:]
if first == 'ray': import ray
import numpy as np
from fastrl_replay.ray import RayMemory
from fastrl_replay.batch import Batch
from typing import NamedTuple
import ray
class Row(NamedTuple):
    value: int
    env_id: int
ray.init(address, log_to_driver=False)
memory = RayMemory(2, 1000, name=name, timeout=100)
memory.extend(Batch.of(Row(np.arange(20), np.zeros(20, int))))
print('pids', *memory.stats()['pids'], flush=True)
if how == 'raises': raise OSError('something else')
if how == 'waits': time.sleep(1000)
'''


def owner(first, how, name, address):
    "A program that makes a memory and doesn't close it, once it is there; and its shards' processes"
    program = subprocess.Popen([sys.executable, '-c', OWNER, first, how, name, address], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    said = program.stdout.readline().split()
    assert said[0] == 'pids'
    return program, [int(o) for o in said[1:]]


@pytest.mark.parametrize('first, how', [('ray', 'waits'), ('package', 'ends'), ('package', 'raises'), ('package', 'waits')])
def test_an_exit_without_close_leaves_nothing(name, cluster, first, how):
    program, pids = owner(first, how, name, cluster)
    if how == 'waits': program.send_signal(signal.SIGINT)
    assert (program.wait(WAIT) == 0) == (how == 'ends')
    until(lambda: not named() and not workers() and not any(map(running, pids)), 'something is left', 10)


def test_killed_owners_leave_nothing_for_long_but_what_is_detached(name, cluster):
    "One gets SIGTERM, one SIGKILL, one SIGKILL with its directory; a detached memory stays until it is closed"
    memory = RayMemory(2, 1000, name=name, detached=True, timeout=WAIT)
    ids, stays = memory.extend(rows(0, 20)), set(memory.stats()['pids'])
    owners = [owner('package', 'waits', f'{name}-{k}', cluster) for k in range(3)]
    del memory
    with pytest.raises(ValueError, match=words('a memory of this name', name=repr(name))):
        RayMemory(1, 10, name=name)
    ray.kill(named_actor(f'{name}-2').actor)
    begin = time.monotonic()
    for how, (program, _) in zip((signal.SIGTERM, signal.SIGKILL, signal.SIGKILL), owners):
        program.send_signal(how)
        program.wait(WAIT)
    for seconds, (_, pids) in zip((45, 45, 60), owners):
        until(lambda pids=pids: not any(map(running, pids)), 'a shard is left', begin + seconds - time.monotonic())
    until(lambda: not [o for o in named() if o.startswith(f'{name}-')], 'a name is left', begin + 60 - time.monotonic())
    time.sleep(max(0., begin + 35 - time.monotonic()))     # longer than a lease
    again = RayMemory.attach(name, timeout=WAIT)
    assert again.fetch(ids).value.tolist() == list(range(20)) and set(again.stats()['pids']) == stays
    again.close(everything=True)
    until(lambda: not named(), 'something is left', 10)
    with pytest.raises(ShardLost, match=WORDS['a closed memory']): again.add_shards(1)


PUBLISHER = '''
import sys, time, torch, ray
from fastrl_replay.ray import RayParams, replay
how, name, address = sys.argv[1:]
replay.LEASE = 10.
ray.init(address, log_to_driver=False)
model = torch.nn.Linear(4, 2)
with torch.no_grad(): model.weight.fill_(7.)
params = RayParams(model, name=name, timeout=100)
params.add_steps(5)
params.pull(model)
print('published', flush=True)
if how == 'waits': time.sleep(1000)
'''


def publisher(how, name, address):
    program = subprocess.Popen([sys.executable, '-c', PUBLISHER, how, name, address], stdout=subprocess.PIPE, text=True)
    assert program.stdout.readline() == 'published\n'
    return program


def test_weights_outlive_their_learner(name, cluster):
    "kill -9 of who publishes them: they can be pulled, and another one publishes; without one they end, and with their program they end at once"
    program = publisher('waits', name, cluster)
    program.kill()
    program.wait()
    params = RayParams.attach(name, model := torch.nn.Linear(4, 2), timeout=WAIT)
    with pytest.raises(ValueError, match=WORDS['weights of this name']): RayParams(model, name=name)
    with pytest.raises(ValueError, match=WORDS['other shapes']): RayParams.attach(name, torch.nn.Linear(3, 2))
    assert params.pull(model) == 0 and (model.weight == 7).all() and params.n_steps == 5
    time.sleep(15)                                        # longer than this lease: who is attached keeps them
    assert params.publish(model) == params.version == 1
    params.close()
    until(lambda: not named() and not workers(), 'something is left', 10)
    with pytest.raises(ShardLost, match=WORDS['closed weights']): params.pull(model)
    program = publisher('waits', name, cluster)
    program.kill()
    until(lambda: not named() and not workers(), 'something is left', 45)
    assert publisher('ends', name, cluster).wait(WAIT) == 0
    until(lambda: not named() and not workers(), 'something is left', 10)


# ---- the directory dies

@pytest.mark.parametrize('for_good', [False, True])
def test_the_directory_dies_and_nothing_is_lost(name, cluster, for_good):
    "Draws and pushes go on; another directory knows what the one before it knew, and replaces shards as before"
    with RayMemory(2, 10_000, Proportional(), name=name, seed=0, timeout=WAIT) as memory, RayPusher(name, timeout=WAIT) as pusher:
        ids = memory.extend(rows(0, 50))
        memory.add_shards(1)
        memory.retire_shard(0)
        before, numbers = memory.stats(), {memory.assign() for _ in range(3)}
        old = named_actor(name)
        if for_good: ray.kill(old.actor)
        else: ray.kill(old.actor, no_restart=False)
        for k in range(20):
            memory.sample(16).update_priorities(np.ones(16))
            pusher.push(rows(1000 + 10*k, 10, 1))
        pusher.flush()
        memory.flush()                                    # a shard that was slow, on a busy machine, is waited for
        assert memory.fetch(ids).value.tolist() == list(range(50)) and memory.n_added == 250
        after = memory.stats()
        assert after['pids'] == before['pids'] and after['number'] == before['number'] and after['retired'] == [True, False, False]
        assert memory.assign() not in numbers
        os.kill(after['pids'][1], signal.SIGKILL)           # in RAM: replaced, empty, under a number that is new
        until(lambda: [memory.sample(8)] and all(memory.stats()['live']) and memory.stats()['pids'] != after['pids'], 'no shard came back')
        assert memory.stats()['number'] == [0, 3, 2] and memory.check_valid()


def test_the_directory_dies_with_all_shards(name, tmp_path):
    "With files all is there again; in RAM the new shards have numbers of their own"
    for path in tmp_path, None:
        with RayMemory(2, 1000, name=name, path=path, seed=0, timeout=WAIT) as memory:
            ids = memory.extend(rows(0, 50))
            for o in (*actors_called(memory.shards.made['life']), named_actor(name).actor): ray.kill(o, no_restart=False)
            until(lambda: [memory.refresh()] and memory.shards.n_dead == 2 and all(memory.stats()['live']), 'no shard came back')
            if path: assert memory.fetch(ids).value.tolist() == list(range(50))
            else: assert len(memory) == 0 and memory.n_added == 50 and not set(memory.stats()['number']) & {0, 1}
        until(lambda: not named(), 'something is left', 10)


# ---- shards that hang, pushers that move, no room

@pytest.mark.parametrize('on_loss', ['go_on', 'wait', 'raise'])
def test_a_shard_that_hangs_is_away_and_comes_back(name, on_loss):
    with RayMemory(2, 1000, Proportional(), name=name, seed=0, on_loss=on_loss, timeout=WAIT) as memory:
        for k in range(4): memory.extend(rows(50*k, 50, k))
        memory.sample(150)
        before, memory.shards.timeout = memory.stats(), 20.
        pid = before['pids'][1]
        os.kill(pid, signal.SIGSTOP)
        try:
            if on_loss == 'go_on':
                for _ in range(5): assert set((memory.sample(32).ids >> 44).tolist()) == {0}
                assert any('shard 1 has not answered' in o for o in memory.health()['warnings'])
                assert set((memory.extend(rows(1000, 10, 9)) >> 44).tolist()) == {0}
            elif on_loss == 'wait':
                threading.Timer(2., os.kill, (pid, signal.SIGCONT)).start()
                assert set((memory.sample(150).ids >> 44).tolist()) == {0, 1}
            else:
                memory.shards.timeout = 3.
                with pytest.raises(ShardLost, match=words('a shard', k=1)): memory.sample(150)
        finally: os.kill(pid, signal.SIGCONT)
        memory.shards.timeout = WAIT
        until(lambda: all(memory.stats()['live']), 'it did not come back')
        after = memory.stats()
        assert after['number'] == before['number'] and after['pids'] == before['pids'] and memory.check_valid()


def test_one_pusher_fills_all_shards_and_those_that_are_added(name):
    with RayMemory(3, 300, name=name, seed=0, timeout=WAIT) as memory, RayPusher(name, timeout=WAIT) as pusher:
        n = 0
        def fill(most=2000):
            nonlocal n
            for _ in range(most):
                pusher.push(rows(n, 5))
                n += 5
                if n % 250 == 0 and min(memory.stats()['fill']) == 100: return
        fill()
        memory.flush()
        assert len(memory) == memory.max_sz == 300
        memory.add_shards(1)
        fill()
        pusher.flush()
        memory.flush()
        assert len(memory) == memory.max_sz == 400 and memory.n_added == n and memory.check_valid()


def test_without_a_free_cpu_the_error_says_so(name):
    @ray.remote(num_cpus=4)
    class Greedy:
        def ready(self): return True
    greedy = Greedy.remote()
    ray.get(greedy.ready.remote(), timeout=WAIT)
    with pytest.raises(ShardLost, match=words('no CPU for a shard', cpus=4, free=0, needs=.01)): RayMemory(2, 100, name=name, timeout=20)
    ray.kill(greedy)


def test_actors_without_a_free_cpu_are_an_error_in_words(name):
    "Some of them run, others find no room: after `timeout` that is said, and all end"
    steps = GymStepper(['CartPole-v1'], seed=0).ray_actors(4, resources=dict(num_cpus=3), timeout=15)
    with steps.ray_replay(shards=1, bs=8, max_sz=10**6, min_sz=10, name=name, timeout=WAIT) as replay:
        with pytest.raises(ActorError, match=words('no CPU for an actor', seconds=15, cpus=4, needs=3)):
            for _ in replay: pass
        until(lambda: not workers('ray::ActingWorker'), 'an actor is left', 20)
        assert len(replay) and len(replay.sample()) == 8


@pytest.mark.parametrize('wrong, said', [
    (dict(place='MOON'), 'place'), (dict(colour=3), 'colour'), (dict(colour=None), 'colour'), (dict(dedup='x'), 'dedup'),
    (dict(max_draws=3), 'max_draws'), (dict(sequence=Sequence(4)), 'sequence'),
    (dict(sampler=AgeWeighted(50)), 'sampler')])
def test_what_is_unknown_is_refused_before_any_actor_is_started(wrong, said, monkeypatch):
    def never(*a, **kw): raise AssertionError('an actor was started')
    monkeypatch.setattr('fastrl_replay.ray.memory.open_directory', never)
    with refused(said, (TypeError, ValueError)): RayMemory(2, 100, **wrong)


def test_an_error_of_a_shard_comes_with_its_traceback(name):
    with RayMemory(1, 100, name=name, timeout=WAIT) as memory:
        memory.extend(rows(0, 5))
        with refused('ids') as caught: memory.fetch([77])
        assert 'in ask' in str(caught.value.__cause__)
