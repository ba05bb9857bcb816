"""A memory in Ray actors: what goes in and comes out, the limiter, learners; processes are killed, and nothing acknowledged is
lost or there twice; who is left behind. One cluster for the file; `pytest --nbflags slow` runs the long ones too."""
import json, os, signal, subprocess, sys, time
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from clusters import WAIT, beside, named, until

from fastrl_replay.all import EpsilonGreedy, GymStepper, SharedAgent
from fastrl_replay.batch import Batch
from fastrl_replay.pipes.actors import ActorError
from fastrl_replay.ray import RayMemory, RayParams, RayPusher, RayReplay, shard as module
from fastrl_replay.ray.shard import ShardLost, from_wire, to_wire
from fastrl_replay.samplers.proportional import Proportional
from refusals import refused
from words import WORDS, words

ray = pytest.importorskip('ray')


class Row(NamedTuple):
    value: int
    env_id: int


@pytest.fixture(scope='module')
def cluster(tmp_path_factory):
    # compile here, once, what every shard would compile for itself
    for k, chunk in enumerate((rows(0, 50), sights(0, 50, 0))):
        for path in None, tmp_path_factory.mktemp('compiled')/str(k):
            with RayMemory(2, 200, Proportional(), path=path, place='here') as local:
                local.extend(chunk)
                local.sample(8).update_priorities(np.ones(8))
                local.fetch(local.sample(8).ids)
        from_wire(to_wire(chunk))
    with pytest.MonkeyPatch.context() as patch:            # the actors import what this file does
        beside(patch)
        ray.init('local', num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=150_000_000)
    yield
    ray.shutdown()


@pytest.fixture
def name(cluster, request):
    "A name for a memory; afterwards none of its actors is left"
    yield request.node.name
    until(lambda: not named(), 'actors are left behind')


def rows(start, n, env=0): return Batch.of(Row(np.arange(start, start + n), np.full(n, env)))


def kill(pid): os.kill(pid, signal.SIGKILL)


@pytest.fixture
def gauges(monkeypatch):
    "What Ray's metrics were set to: {(metric, memory, shard): value}"
    found = {}
    class Gauge:
        def __init__(self, what): self.what = what
        def set(self, value, tags): found[self.what, tags['memory'], int(tags['shard'])] = value
    monkeypatch.setattr('fastrl_replay.ray.memory._gauge', Gauge)
    return found


def test_what_goes_in_comes_out(name, gauges, monkeypatch):
    with RayMemory(3, 3000, Proportional(), name=name, seed=0, timeout=300) as memory:
        ids = np.concatenate([memory.extend(rows(a, 20, a % 7)) for a in range(0, 400, 20)])
        assert memory.fetch(ids).value.tolist() == list(range(400))
        stats = memory.stats()
        assert sum(stats['n_added']) == 400 == len(memory) and len(set(stats['pids'])) == 3 and os.getpid() not in stats['pids']
        batch = memory.sample(64)
        assert memory.fetch(batch.ids).value.tolist() == batch.value.tolist()
        assert batch.update_priorities(np.full(64, 5.)) == len(set(batch.ids.tolist()))
        memory.add(Row(1, 1))
        stats = memory.stats()
        assert min(stats['largest']) >= 1 and max(stats['largest']) == 5.000001
        total = sum(stats['mass'])
        batch = memory.sample(200)
        hot = batch.probs > 1.5/total
        assert np.allclose(batch.probs[hot], 5.000001**.6/total, rtol=1e-4) and hot.any()
        with refused('value', TypeError): memory.extend([Row('x', 1)])
        with refused('name', expected='one that no memory has', got=repr(name)): RayMemory(1, 10, name=name)
        assert memory.check_valid() and not memory.health()['warnings']
        drawn = [RayMemory.attach(name, timeout=300, rank=k).rng.random() for k in (0, 1, 2, 1)]
        assert len(set(drawn)) == 3 and drawn[1] == drawn[3]

        clock = [time.monotonic()]
        with monkeypatch.context() as patch:
            patch.setattr(time, 'monotonic', lambda: clock[0])
            memory.sample(8)
            gauges.clear()
            memory.sample(8)
            assert not gauges                                 # they are set every five seconds
            clock[0] += 6
            stats = memory.stats()
            memory.sample(8)
        for what in ('fill', 'mass', 'n_drawn', 'n_capped'): assert [gauges[what, name, k] for k in range(3)] == stats[what]
        assert sum(stats['n_drawn']) == 64 + 200 + 2*8 and gauges['rate', name, 0] > 0


def linear(): return torch.nn.Linear(4, 2)


@pytest.mark.slow
def test_actors_push_and_the_ratio_holds(name):
    "Two actors with published weights, one of which is killed: the ratio holds at each moment, and no step is missing or double"
    params = RayParams(model := linear(), name='params')
    agent = SharedAgent(EpsilonGreedy(model, eps=.5, seed=0), params, every=16)
    steps = GymStepper(['CartPole-v1'], agent=agent, seed=0).n_step(n=3, gamma=.9).ray_actors(2, chunk=16)
    replay = steps.ray_replay(shards=2, bs=32, max_sz=100_000, sampler=Proportional(), min_sz=100, steps_per_batch=4, seed=0, name=name, group=4, timeout=300)
    seen, killed = set(), []
    with pytest.warns(RuntimeWarning, match=WORDS['a worker is replaced']):
        for k, batch in enumerate(replay):
            batch.update_priorities(np.ones(32))
            if k >= 200 and 2 in batch.env_id: break                        # the actor that replaced another one is there
            seen.update(batch.env_id.tolist())
            if k >= 60 and seen >= {0, 1} and not killed:                   # both have stored steps
                killed.append(next(iter(steps._crew.workers.values())).actor)
                ray.kill(killed[0])
            if k % 20: continue
            n = replay.memory.n_added
            assert 100 + 4*(replay.n_batches - 1) <= n <= 100 + 4*replay.n_batches + replay.slack
            with torch.no_grad(): model.weight.add_(1.)
            published = params.publish(model)
    mine = linear()
    assert params.version == params.pull(mine) == published and (mine.weight == model.weight).all() and params.n_steps > 100
    with pytest.raises(ValueError, match=WORDS['other shapes']): params.pull(torch.nn.Linear(3, 2))
    replay.freeze_memory = True
    seen = replay.memory.stats()
    assert steps.n_restarts == 1 and sum(seen['n_added']) >= 100 + 4*199 and replay.memory.check_valid()
    steps.close()
    held = {}
    for _, batch in replay.memory.news({}, ('env_id', 'episode_n', 'step_n')):
        for env, episode, step in zip(*(batch[k].tolist() for k in ('env_id', 'episode_n', 'step_n'))): held.setdefault(env, []).append((episode, step))
    assert set(held) == {0, 1, 2}
    for v in held.values():
        at = {e: [s for o, s in v if o == e] for e, _ in v}
        assert all(s == list(range(len(s))) for s in at.values()) and list(at) == list(range(len(at)))
    replay.close()
    params.close()


class Breaks(gym.Wrapper):
    "An environment that fails at its 40th step"
    def __init__(self): super().__init__(gym.make('CartPole-v1'))
    def step(self, action):
        self.n = getattr(self, 'n', 0) + 1
        if self.n == 40: raise OSError('the joystick is unplugged')
        return super().step(action)


@pytest.mark.slow
def test_an_error_of_an_environment_says_what_it_is(name):
    steps = GymStepper([Breaks], seed=0).ray_actors(1, chunk=8)
    with steps.ray_replay(shards=1, bs=4, max_sz=500, min_sz=8, steps_per_batch=2, name=name, timeout=300) as replay:
        with pytest.raises(ActorError, match=words('it is named', name='OSError: the joystick is unplugged')) as caught:
            for _ in replay: pass
        assert 'in step' in ''.join(caught.value.__notes__) and isinstance(caught.value.__cause__, OSError)
        assert len(replay) == 39 and len(replay.sample()) == 4              # what had been made is there


# ---- several learners

RANK = '''
import sys, torch, torch.distributed as dist, ray
from fastrl_replay.ray import RayReplay
name, address, folder = sys.argv[1:]
dist.init_process_group('gloo')
rank, world = dist.get_rank(), dist.get_world_size()
ray.init(address, log_to_driver=False)
replay = RayReplay.attach(name, rank=rank, world=world, bs=64, group=2, timeout=300)
batch = next(iter(replay))
w = torch.ones((), dtype=torch.float64, requires_grad=True)
(batch.weights.double()*(w*batch.value.double() - 3)**2).mean().backward()
dist.all_reduce(w.grad)
torch.save(dict(ids=batch.ids.clone(), value=batch.value.clone(), grad=w.grad/world), f'{folder}/{rank}.pt')
dist.barrier()
replay.close()
dist.destroy_process_group()
'''


@pytest.mark.slow
def test_two_ranks_average_to_the_gradients_of_one_big_batch(name, tmp_path):
    "By torchrun, with gloo: the weights of both ranks have one scale, so the mean gradient is that of both batches together"
    with RayMemory(2, 1000, Proportional(alpha=1., beta=.7), name=name, seed=0, timeout=300) as memory:
        ids = np.concatenate([memory.extend(rows(a, 10, a)) for a in range(0, 400, 10)])
        p = np.random.default_rng(0).random(400) + .01
        memory.update_priorities(ids, p)
        leaves = dict(zip(ids.tolist(), p + 1e-6))
        (tmp_path/'rank.py').write_text(RANK)
        command = [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node=2', '--master-port=0', '--rdzv-backend=c10d', '--rdzv-endpoint=localhost:0',
                   str(tmp_path/'rank.py'), name, ray.get_runtime_context().gcs_address, str(tmp_path)]
        ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=os.pathsep.join(map(os.path.abspath, sys.path))))
        assert not ran.returncode, ran.stderr[-3000:]
        a, b = (torch.load(tmp_path/f'{k}.pt') for k in (0, 1))
        assert a['grad'] == b['grad'] and not torch.equal(a['ids'], b['ids'])
        total = sum(leaves.values())
        P = torch.tensor([leaves[i]/total for i in torch.cat([a['ids'], b['ids']]).tolist()], dtype=torch.float64)
        weights = (min(leaves.values())/total/P)**.7
        v = torch.cat([a['value'], b['value']]).double()
        assert torch.allclose(a['grad'], (weights*2*v*(v - 3)).mean(), rtol=1e-5)


LEARNER = '''
import sys, time, ray
from fastrl_replay.all import GymStepper, Proportional
name, address = sys.argv[1:]
ray.init(address, log_to_driver=False)
steps = GymStepper(['CartPole-v1'], seed=0).ray_actors(2, chunk=16)
replay = steps.ray_replay(shards=2, bs=32, max_sz=100_000, sampler=Proportional(), min_sz=100, steps_per_batch=4, seed=0, name=name, timeout=300)
seen, told = set(), False
for k, batch in enumerate(replay):
    batch.update_priorities([1.]*32)
    seen.update(batch.env_id.tolist())
    if k >= 50 and seen >= {0, 1} and not told:
        told = True
        print('learning', flush=True)
'''


@pytest.mark.slow
def test_a_learner_dies_and_another_goes_on(name):
    "kill -9 of the learner: its actors go with it, the shards stay, and another one takes over with actors of its own"
    address = ray.get_runtime_context().gcs_address
    env = os.environ | dict(PYTHONPATH=os.pathsep.join(map(os.path.abspath, sys.path)))
    first = subprocess.Popen([sys.executable, '-c', LEARNER, name, address], stdout=subprocess.PIPE, text=True, env=env)
    assert first.stdout.readline() == 'learning\n'
    kill(first.pid)
    first.wait()
    steps = GymStepper(['CartPole-v1'], seed=1).ray_actors(2, chunk=16)
    replay = RayReplay.attach(name, source_datapipe=steps, bs=32, min_sz=100, steps_per_batch=4, timeout=300)
    before, drawn = replay.memory.n_added, replay.n_batches
    assert before >= 300 and 50 < drawn <= 1 + (before - 100)//4                 # what was drawn, not what was due
    for _, batch in zip(range(100), replay):
        batch.update_priorities(np.ones(32))
        assert replay.memory.shards.known_added <= 100 + 4*replay.n_batches + replay.slack
    assert replay.memory.check_valid()
    steps.close()
    held = {}
    for _, batch in replay.memory.news({}, ('env_id', 'episode_n', 'step_n')):
        for env, episode, step in zip(*(batch[k].tolist() for k in ('env_id', 'episode_n', 'step_n'))): held.setdefault(env, []).append((episode, step))
    assert set(held) >= {0, 1} and len(held) > 2 and all(v == sorted(set(v)) for v in held.values())       # each stream once, and in order
    replay.close(everything=True)


@pytest.mark.slow
def test_saved_under_load_and_loaded(name, tmp_path):
    "While actors push, save; after more batches, load: the same batches as after saving, as long as no step comes"
    steps = GymStepper(['CartPole-v1'], seed=0).ray_actors(2, chunk=16)
    replay = steps.ray_replay(shards=2, bs=32, max_sz=10_000, sampler=Proportional(), min_sz=100, steps_per_batch=4, seed=0, name=name, timeout=300)
    for _, batch in zip(range(50), replay): batch.update_priorities(np.arange(32.))
    replay.save(tmp_path)
    for _, batch in zip(range(50), replay): batch.update_priorities(np.arange(32.))
    drawn = []
    for _ in range(2):
        replay.load(tmp_path)
        assert replay.n_batches == 50
        n = replay.memory.n_added
        drawn.append([replay.memory.sample(32) for _ in range(10)])
        assert n == replay.memory.n_added and replay.memory.check_valid()
    for a, b in zip(*drawn):
        for k in ('ids', 'state', 'probs', 'weights'): assert torch.equal(getattr(a, k), getattr(b, k))
    for _, batch in zip(range(20), replay): batch.update_priorities(np.ones(32))       # with new actors
    assert replay.n_batches == 70 and replay.memory.shards.known_added <= 100 + 4*70 + replay.slack
    replay.close()


@pytest.mark.slow
def test_shards_are_added_and_retired_while_actors_push(name):
    steps = GymStepper(['CartPole-v1'], seed=0).ray_actors(3, chunk=16)
    with steps.ray_replay(shards=2, bs=32, max_sz=4000, min_sz=100, steps_per_batch=4, slack=5000, seed=0, name=name, timeout=300) as replay:
        for _ in zip(range(50), replay): pass
        replay.add_shards(1)
        replay.retire_shard(0)
        before = replay.stats()['n_added'][0]
        for _ in zip(range(300), replay): pass
        stats = replay.stats()
        rows = dict(zip(stats['number'], stats['n_added']))       # the retired one may have been let go since
        assert rows.pop(0, before) <= before + 3*4*16 and len(rows) == 2 and sum(rows.values()) > 1000
        assert replay.memory.check_valid()


@pytest.mark.slow
def test_the_command_line_trains_on_a_cluster(name, tmp_path):
    run = 'import sys; from fastrl_replay.cli import main; sys.exit(main())'
    command = [sys.executable, '-c', run, 'train', '--ray', '--shards', '2', '--actors', '2', '--steps', '1500', '--every', '200', '--select', '2',
               '--confirm', '2', '--episodes', '2', '--out', str(tmp_path)]
    env = os.environ | dict(PYTHONPATH=os.pathsep.join(map(os.path.abspath, sys.path)), RAY_ADDRESS=ray.get_runtime_context().gcs_address)
    ran = subprocess.run(command, capture_output=True, text=True, env=env)
    assert not ran.returncode, ran.stderr[-3000:]
    result = json.loads((tmp_path/'result.json').read_text())
    assert 1400 < result['steps'] < 2000 and len(result['returns']) == 2 and (tmp_path/'learning_curve.png').exists()


# ---- shards, pushers and learners are killed

class Sight(NamedTuple):
    state: np.ndarray
    value: int
    next_state: np.ndarray
    env_id: int


def sights(start, n, env):
    k = start + np.arange(n)
    frames = np.random.default_rng(env).integers(0, 255, (start + n + 4, 12, 12), np.uint8)
    return Batch.of(Sight(frames[k[:, None] + np.arange(4)], k, frames[k[:, None] + np.arange(1, 5)], np.full(n, env)))


def is_running(pid):
    try: return open(f'/proc/{pid}/stat').read().split()[2] not in 'ZX'
    except OSError: return False


@ray.remote(num_cpus=0, max_restarts=0)
class Source:
    "A Ray actor that pushes steps 0, 1, … of stream `env`, and knows which are stored"
    def __init__(self, name, env): self.pusher, self.env, self.made = RayPusher(name, timeout=WAIT), env, 0
    def push(self, n, m):
        for _ in range(n):
            self.pusher.push(sights(self.made, m, self.env))
            self.made += m
    def flush(self):
        self.pusher.flush()
        return self.made
    def place(self): return self.pusher.place


def contents(memory):
    "The steps of each stream, in the order in which its shard stored them; their frames are checked"
    memory.refresh()
    streams = {}
    for o in memory.shards.places:
        if o.dropped or not o.info.fill: continue
        batch = memory.fetch(np.arange(o.info.first_id, o.info.n_added) | o.info.number << 44)
        for env in np.unique(batch.env_id.numpy()).tolist():
            mine = (batch.env_id == env).numpy()
            steps, frames = batch.value.numpy()[mine], np.random.default_rng(env).integers(0, 255, (int(batch.value.max()) + 5, 12, 12), np.uint8)
            assert (batch.state.numpy()[mine] == frames[steps[:, None] + np.arange(4)]).all()
            assert (batch.next_state.numpy()[mine] == frames[steps[:, None] + np.arange(1, 5)]).all()
            streams[env] = streams.get(env, []) + steps.tolist()
    return streams


def kills(name, folder, n_shards, n_pushers, n_kills, pushers):
    "Sources push and a learner draws while shards are killed, at random moments, and the sources at `pushers` {kill: source}"
    rng, draws, killed = np.random.default_rng(0), 0, set()
    with RayMemory(n_shards, 200_000, Proportional(), name=name, seed=0, path=folder, timeout=WAIT) as memory:
        sources = [Source.remote(name, env) for env in range(n_pushers)]
        for k in range(n_kills):
            calls = [o.push.remote(25, 17) for o in sources]
            if k == 0: ray.get(calls, timeout=WAIT)
            until(lambda: len(memory), 'no step')
            for _ in range(int(rng.integers(1, 20))): memory.sample(32).update_priorities(rng.random(32))
            kill(memory.stats()['pids'][k % n_shards])
            if k == 1:                                      # once more, as soon as the new process is there: it is opening its files
                place, old = memory.shards.places[k % n_shards], memory.shards.places[k % n_shards].info.pid
                until(lambda: [memory.sample(8)] and place.live and place.info.pid != old, 'no shard came back')
                kill(place.info.pid)
            if k in pushers:
                ray.kill(sources[pushers[k]])
                killed.add(pushers[k])
                sources[pushers[k]] = Source.remote(name, n_pushers + k)
            for w, call in enumerate(calls):
                while not ray.wait([call], timeout=0)[0]:
                    memory.sample(32).update_priorities(rng.random(32))
                    draws += 1
                if pushers.get(k) != w: ray.get(call, timeout=WAIT)
        made = {env: ray.get(o.flush.remote(), timeout=WAIT) for env, o in enumerate(sources)}
        until(lambda: all(memory.stats()['live']), 'a shard is still away')
        memory.flush()
        held = contents(memory)
        for env, n in made.items():
            if env not in killed: assert held[env] == list(range(n))
        for v in held.values(): assert v == list(range(len(v)))               # of a source that was killed, too: no gap
        assert memory.n_added == sum(map(len, held.values())) and memory.check_valid() and memory.stats()['number'] == list(range(n_shards))
        for o in sources: ray.kill(o)
        return memory.shards.n_dead, draws


def test_exactly_once_over_a_kill(name, tmp_path): assert kills(name, tmp_path, 2, 2, 1, {})[0] == 1


@pytest.mark.slow
def test_exactly_once_over_many_kills(name, tmp_path, request):
    "Eight kills; with `--kills 100` more, in memories of their own, since a shard is not restarted for ever"
    wanted = request.config.getoption('--kills')
    drawn = 0
    for k in range(1 if wanted <= 25 else -(-wanted//8)):
        n_dead, draws = kills(f'{name}-{k}', tmp_path/str(k), 2, 3, 8, {3: 0, 5: 1})
        assert n_dead >= 8
        drawn += draws              # of one memory there may be none: its sources were quicker
    assert drawn or wanted <= 25


@pytest.mark.slow
def test_save_kill_all_load_and_draw_the_same(name, tmp_path):
    "One pusher; what is drawn from the loaded shards is what would have been drawn"
    with RayMemory(2, 2000, Proportional(), name=name, seed=0, timeout=WAIT) as memory:
        for a in range(0, 300, 20): memory.extend(sights(a, 20, a//20))
        memory.sample(16).update_priorities(np.arange(16.))
        memory.save(tmp_path/'saved')
        drawn = [memory.sample(32) for _ in range(3)]
        memory.add_shards(1)                                 # what comes after the save is forgotten
        new = memory.extend(sights(0, 40, 99))
        assert len(memory) == 340 and memory.fetch(new).value.tolist() == list(range(40))
        pids = memory.stats()['pids']
        assert len(set(pids)) == 3
        for pid in pids: kill(pid)
    until(lambda: not any(map(is_running, pids)) and not named(), 'a shard is left')
    with RayMemory.load(tmp_path/'saved', name=name, timeout=WAIT) as again:
        for o in drawn:
            batch = again.sample(32)
            for field in ('ids', 'value', 'state', 'probs', 'weights'): assert (getattr(batch, field) == getattr(o, field)).all()
        again.retire_shard(0, drop=True)
        assert set((again.sample(16).ids >> 44).tolist()) == {1} and again.check_valid()
        pids = again.stats()['pids']
    until(lambda: not any(map(is_running, pids)), 'a process is left')


@pytest.mark.slow
def test_saved_with_two_shards_and_loaded_with_three(name, tmp_path):
    "The two are started beside the three for as long as it takes; frames and priorities arrive"
    with RayMemory(2, 1200, Proportional(), name=name, seed=0, timeout=WAIT) as memory:
        for a in range(0, 300, 20): memory.extend(sights(a, 20, a//20))
        for _ in range(4): memory.sample(32).update_priorities(np.arange(32.)**2)
        memory.save(tmp_path)
        before, held = memory.stats(), contents(memory)
        rows = {(int(o.env_id), int(o.value)): p for batch in memory.take(memory.ask(20, 64)) for o, p in zip(batch, batch.probs.tolist())}
    with RayMemory.load(tmp_path, name=name, shards=3, timeout=WAIT) as again:
        stats = again.stats()
        assert contents(again) == held and stats['number'] == [2, 3, 4] and len(named()) == 4
        assert np.isclose(sum(stats['mass']), sum(before['mass'])) and max(stats['fill']) - min(stats['fill']) < 60
        for batch in again.take(again.ask(20, 64)):
            for o, p in zip(batch, batch.probs.tolist()): assert abs(rows.get((int(o.env_id), int(o.value)), p) - p) < 1e-5*p
        assert again.check_valid()


@pytest.mark.slow
def test_a_shard_that_dies_again_and_again_is_given_up_in_words(name):
    with RayMemory(2, 2000, name=name, seed=0, timeout=WAIT) as memory:
        for env in range(4): memory.extend(sights(0, 50, env))
        place = memory.shards.places[0]
        for _ in range(module.RESTARTS + 1):
            until(lambda: [memory.sample(8)] and place.live, 'no shard came back')
            kill(place.info.pid)
            until(lambda: [memory.sample(8)] and not place.live, 'nobody noticed')
        until(lambda: [memory.sample(8)] and 'died' in place.why, 'nobody said so')
        assert any(f'died {module.RESTARTS + 1} times' in o for o in memory.health()['warnings'])
        assert set((memory.sample(32).ids >> 44).tolist()) == {1}             # the learner goes on


@pytest.mark.slow
@pytest.mark.parametrize('on_loss', ['wait', 'raise'])
def test_what_a_loss_does(name, tmp_path, on_loss):
    with RayMemory(2, 2000, name=name, path=tmp_path, seed=0, on_loss=on_loss, timeout=WAIT) as memory:
        for env in range(4): memory.extend(sights(0, 50, env))
        kill(memory.stats()['pids'][0])
        if on_loss == 'raise':
            with pytest.raises(ShardLost, match=words('a shard', k=0)):
                while True: memory.sample(8)
        batch = memory.sample(150) if on_loss == 'wait' else None
        assert batch is None or len(set((batch.ids >> 44).tolist())) == 2 and memory.shards.n_dead == 1


@ray.remote(num_cpus=0, max_restarts=0)
class Learner:
    "A process that makes a memory, draws, and is killed"
    def __init__(self, name, folder): self.memory = RayMemory(2, 20_000, Proportional(), name=name, path=folder, timeout=WAIT)
    def pid(self): return os.getpid()
    def learn(self, n):
        until(lambda: len(self.memory) > 50, 'no step')
        for _ in range(n): self.memory.sample(16).update_priorities(np.ones(16))
        return self.memory.n_added


@pytest.mark.slow
def test_a_learner_dies_and_another_takes_over(name, tmp_path):
    learner = Learner.remote(name, str(tmp_path))
    pid = ray.get(learner.pid.remote(), timeout=WAIT)
    source = Source.remote(name, 0)
    ray.get(source.push.remote(10, 20), timeout=WAIT)
    assert ray.get(learner.learn.remote(5), timeout=WAIT) >= 50
    call = source.push.remote(20, 20)
    kill(pid)
    memory = RayMemory.attach(name, timeout=WAIT)
    ray.get(call, timeout=WAIT)
    assert ray.get(source.flush.remote(), timeout=WAIT) == 600
    memory.flush()                                        # of a shard that is slow, n_added says what was known
    assert memory.n_added == 600
    assert contents(memory) == {0: list(range(600))} and memory.sample(16).update_priorities(np.ones(16)) > 0 and memory.check_valid()
    ray.kill(source)
    memory.close(everything=True)


@pytest.mark.slow
def test_a_pusher_leaves_a_retired_shard(name):
    with RayMemory(2, 20_000, name=name, seed=0, timeout=WAIT) as memory:
        source = Source.remote(name, 0)
        k = ray.get(source.place.remote(), timeout=WAIT)
        call = source.push.remote(400, 20)
        until(lambda: len(memory) > 100, 'no step')
        memory.retire_shard(k)
        ray.get(call, timeout=WAIT)
        assert ray.get(source.flush.remote(), timeout=WAIT) == 8000
        memory.flush()
        assert memory.n_added == 8000
        assert min(memory.stats()['n_added']) > 0 and ray.get(source.place.remote(), timeout=WAIT) == 1 - k
        steps = contents(memory)[0]
        assert sorted(steps) == list(range(8000))
        ray.kill(source)
