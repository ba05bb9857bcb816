"""A node of the cluster dies, with its shards; it comes back, and so do those whose files it has. Three nodes on one machine.

Long: run by `pytest --nbflags slow`."""
from typing import NamedTuple

import numpy as np
import pytest
from clusters import WAIT, beside, until, workers

from fastrl_replay.all import GymStepper
from fastrl_replay.batch import Batch
from fastrl_replay.ray import RayMemory
from fastrl_replay.ray.shard import ShardLost
from words import words

ray = pytest.importorskip('ray')
pytestmark = pytest.mark.slow


class Row(NamedTuple):
    value: int
    env_id: int


def rows(start, n, env): return Batch.of(Row(np.arange(start, start + n), np.full(n, env)))


@pytest.fixture(scope='module')
def cluster():
    from ray.cluster_utils import Cluster
    with pytest.MonkeyPatch.context() as patch:            # the actors import what this file does
        beside(patch)
        made = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1, node_name='head', include_dashboard=False))
        made.nodes = {name: made.add_node(num_cpus=1, node_name=name) for name in ('one', 'two')}
        ray.init(address=made.address, log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.mark.parametrize('path', [False, True])
def test_a_node_dies(cluster, tmp_path, path):
    "In RAM: its shards are replaced elsewhere, empty. With files: they wait for their node, whatever it is called inside Ray"
    with RayMemory(3, 3000, name=f'nodes-{path}', path=tmp_path if path else None, seed=0, timeout=WAIT) as memory:
        for env in range(6): memory.extend(rows(100*env, 50, env))
        before = memory.stats()
        cluster.remove_node(cluster.nodes['two'])
        until(lambda: [memory.sample(8)] and not all(memory.stats()['live']) or memory.shards.n_dead, 'nobody noticed')
        if path:
            until(lambda: [memory.sample(8)] and any('two' in o.why for o in memory.shards.places), 'nobody said so')
            assert any('waits for its node two' in o for o in memory.health()['warnings'])
            assert len(memory)==300, 'what was last known of a shard that is away counts'
            memory.shards.on_loss, memory.shards.timeout = 'wait', 2.
            with pytest.raises(ShardLost, match=words('a shard waits', name='two')): memory.sample(8)
            memory.shards.on_loss, memory.shards.timeout = 'go_on', WAIT
        cluster.nodes['two'] = cluster.add_node(num_cpus=1, node_name='two')
        until(lambda: all(memory.stats()['live']), 'a shard is still away')
        after = memory.stats()
        if path: assert after['n_added'] == before['n_added'] and after['number'] == before['number']
        else: assert after['number'] != before['number'] and len(memory) < 300 and memory.n_added == 300
        assert memory.check_valid()


def parents(pids):
    "How many of these processes each node started"
    found = [open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1] for pid in pids]
    return [found.count(o) for o in set(found)]


def test_shards_and_actors_are_spread_over_the_nodes(cluster, tmp_path):
    "Six shards and six actors on three nodes: at most three of a kind on one of them. With files, also on nodes of one name"
    steps = GymStepper(['CartPole-v1'], seed=0).ray_actors(6, chunk=16, timeout=WAIT)
    with steps.ray_replay(shards=6, bs=8, max_sz=6000, min_sz=10, seed=0, name='spread', timeout=WAIT) as replay:
        next(iter(replay))
        until(lambda: len(workers('ray::ActingWorker')) == 6, 'an actor is missing')
        for pids in replay.stats()['pids'], workers('ray::ActingWorker'):
            assert sum(parents(pids)) == 6 and max(parents(pids)) <= 3, parents(pids)
    twins = [cluster.add_node(num_cpus=1, node_name='twin') for _ in range(2)]
    with RayMemory(5, 500, name='twins', path=tmp_path, timeout=WAIT) as memory:
        assert parents(memory.stats()['pids']) == [1]*5
    for o in twins: cluster.remove_node(o)
