"""What `n_added`, `len` and `stats()` say while a shard doesn't answer, and how long one that starts is waited for. Shards of this process
play those of a cluster: they fall silent, and others store in them meanwhile."""
import threading
import warnings
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from fastrl_replay.all import GymStepper
from fastrl_replay.batch import Batch
from fastrl_replay.pipes.actors import ActorError
from fastrl_replay.ray import RayMemory, RayReplay
from fastrl_replay.ray.shard import LocalShard, ShardLost, ShardSlow
from words import words


class Row(NamedTuple):
    value: int
    env_id: int


def rows(n, env=0): return Batch.of(Row(np.arange(n), np.full(n, env)))


class Moody(LocalShard):
    "A shard of this process that may be silent"
    silent = False
    def get(self, ref, timeout):
        if self.silent: raise ShardSlow('no answer')
        return super().get(ref, timeout)


def two_shards(**options):
    "A memory of two shards with 30 rows each, and the second shard, which can be silenced"
    memory = RayMemory(2, 200, place='here', **dict(timeout=2., seed=0) | options)
    seat = memory.shards.directory.shard.seats[1]
    seat.handle = memory.shards.places[1].handle = Moody(seat.handle.shard)
    for env in range(6): memory.extend(rows(10, env))
    assert (memory.n_added, len(memory), memory.first_id) == (60, 60, 0) and memory.stats()['fill'] == [30, 30]
    return memory, seat.handle


def lose(memory, shard):
    "The shard is silent, and the memory has noticed; then somebody else stores five rows there, which is acknowledged"
    shard.silent = True
    memory.refresh()
    assert not memory.shards.places[1].live
    shard.shard.memory.extend(rows(5, 7))


@pytest.mark.parametrize('ask, known, true', [
    (lambda o: o.n_added, 60, 65), (len, 60, 65), (lambda o: o.first_id, 0, 0), (lambda o: o.stats()['n_added'], [30, 30], [30, 35]),
    (lambda o: o.health()['n'], 60, 65), (lambda o: o.usage()['samples_per_insert'], 0., 0.)])
def test_the_figures_of_a_silent_shard_are_those_last_known_and_that_is_said_once(ask, known, true):
    memory, shard = two_shards()
    for _ in range(2):
        lose(memory, shard)
        with pytest.warns(RuntimeWarning, match=words('a shard is away', k=1)):
            assert ask(memory) == known
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            assert ask(memory) == known                       # said already
            shard.silent = False
            memory.flush()
            assert ask(memory) == true and memory.stats()['live'] == [True, True]
        known, true = true, [a + 5*(k == 1) for k, a in enumerate(true)] if isinstance(true, list) else true + 5*(true > 0)


def test_a_shard_that_was_just_lost_is_waited_for():
    memory, shard = two_shards(timeout=40.)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        lose(memory, shard)
        threading.Timer(.4, setattr, (shard, 'silent', False)).start()
        assert memory.n_added == 65


def test_where_losses_are_waited_for_figures_wait_as_long():
    memory, shard = two_shards(timeout=2., on_loss='wait')
    lose(memory, shard)
    threading.Timer(1., setattr, (shard, 'silent', False)).start()         # twice the moment that others wait
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert len(memory) == 65


def test_stats_tell_who_is_silent_and_for_how_long():
    memory, shard = two_shards()
    lose(memory, shard)
    with pytest.warns(RuntimeWarning): found = memory.stats()
    assert found['live'] == [True, False] and found['silent'][0] == 0 and found['silent'][1] >= .5
    assert any('shard 1 has not answered' in o for o in memory.health()['warnings'])
    memory.sample(20)                                                      # of the other one
    assert repr(memory).startswith('RayMemory(60 of 200')


def test_a_pipe_does_not_wait_for_figures():
    "What is due is counted by what is known"
    memory, shard = two_shards(timeout=4000.)
    replay = RayReplay([], memory=memory, bs=8)
    lose(memory, shard)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert len(replay.sample(4)) == 4 and memory.shards.known_added == 60


# ---- starting

def slow_to_start(monkeypatch, times, room=True):
    "Shards whose first answer comes when it has been asked for so many times"
    asked = []
    def get(self, ref, timeout):
        if type(ref[0]).__name__ == 'Info' and len(asked) < times:
            asked.append(timeout)
            raise ShardSlow('no answer')
        return real(self, ref, timeout)
    real = LocalShard.get
    monkeypatch.setattr(LocalShard, 'get', get)
    monkeypatch.setattr('fastrl_replay.ray.memory.has_room', lambda cpus: room)
    monkeypatch.setattr('fastrl_replay.ray.memory.not_started', lambda what, cpus, seconds: f'{what}: not within {seconds:g} s')
    return asked


def test_shards_that_start_have_five_times_the_patience(monkeypatch):
    asked = slow_to_start(monkeypatch, 4)
    memory = RayMemory(1, 100, place='here', timeout=3.)
    assert len(asked) == 4 and asked[-1] > 3*3.
    memory.extend(rows(5))
    asked.clear()
    memory.add_shards(1)                                                   # these, too
    assert len(asked) == 4 and len(memory.shards.places) == 2 and len(memory) == 5


def test_one_that_takes_longer_is_given_up(monkeypatch):
    slow_to_start(monkeypatch, 5)
    with pytest.raises(ShardLost, match=words('a shard is late', k=0, seconds=15)): RayMemory(1, 100, place='here', timeout=3.)


def test_one_that_has_no_room_is_given_up_in_time(monkeypatch):
    asked = slow_to_start(monkeypatch, 1, room=False)
    with pytest.raises(ShardLost, match=words('a shard is late', k=0, seconds=3)): RayMemory(1, 100, place='here', timeout=3.)
    assert len(asked) == 1


def test_actors_that_start_have_it_too(monkeypatch):
    monkeypatch.setattr('fastrl_replay.ray.replay.not_started', lambda what, cpus, seconds: f'{what}: not within {seconds:g} s, with {cpus} of a CPU')
    room = True
    monkeypatch.setattr('fastrl_replay.ray.replay.has_room', lambda cpus: room)
    steps = GymStepper(['CartPole-v1'], seed=0).ray_actors(2, timeout=10., resources=dict(num_cpus=3))
    late = [SimpleNamespace(number=k) for k in (0, 1)]
    steps._is_late(39., late)                                            # it goes on
    with pytest.raises(ActorError, match=words('an actor is late, and needs more', k=0, more=1, seconds=50, cpus=3)): steps._is_late(41., late)
    room = False
    with pytest.raises(ActorError, match=words('an actor is late', k=1, more=0, seconds=10)): steps._is_late(.1, late[1:])
