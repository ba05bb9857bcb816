"""A memory in Ray actors: what a call costs beyond Ray and the memory itself, and how much goes in and out.

    python benchmarks/cluster.py [--seconds 10] [costs rates]

`costs`: CPU of all processes for a pushed chunk of 64 CartPole steps and for a drawn group of 8 batches of 512 with
their updates, less that of a call without arguments of an actor that does nothing; and over that of a call with the
same arguments and answers, as objects, followed by the work of one memory in this process. The memory's own work costs more after such a call than in a loop of its own, since
the call leaves the caches cold; both are shown. All are measured in turns within one run. `rates`: four pushers, and a learner, by the number
of shards. It needs the extra `ray`, and uses the cores it is allowed.
"""
import argparse
import statistics
import time
from collections import deque

import numpy as np
import ray
from timing import machine, table

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.ray import RayMemory, RayPusher
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.steps import SimpleStep

CHUNK, GROUP, BS, MAX_SZ = 64, 8, 512, 200_000


def steps(m=CHUNK, env=0):
    "A chunk of CartPole-sized steps"
    rng = np.random.default_rng(env)
    s, k = rng.random((m + 1, 4), np.float32), np.arange(m)
    return Batch.of(SimpleStep(s[:-1], k % 2, s[1:], k < 0, k == m - 1, np.ones(m, np.float32), k.astype(np.float32), np.full(m, env), k*0, k, k*0))


@ray.remote(num_cpus=0)
class Bare:
    "Takes what a shard takes and answers what a shard answered once, without any work"
    def __init__(self, answer): self.answer = answer
    def call(self, *args): return self.answer
    def nothing(self): pass
    def cpu(self): return time.process_time()


@ray.remote(num_cpus=0)
class Source:
    "Pushes the same chunk again and again"
    def __init__(self, name, env): self.pusher, self.chunk = RayPusher(name), steps(env=env)
    def run(self, seconds):
        limit, n = time.monotonic() + seconds, 0
        while time.monotonic() < limit:
            self.pusher.push(self.chunk)
            n += CHUNK
        self.pusher.flush()
        return n


def spent(calls, n, *others):
    "CPU microseconds of one call, here and in the `others`"
    before = time.process_time() + sum(o() for o in others)
    calls(n)
    return (time.process_time() + sum(o() for o in others) - before)/n*1e6


def keep_three(send):
    "A function that makes `n` calls, three of them under way"
    def run(n):
        refs = deque()
        for _ in range(n):
            refs.append(send())
            if len(refs) == 3: ray.get(refs.popleft())
        ray.get(list(refs))
    return run


def costs(seconds):
    "CPU a pushed chunk and a drawn group, over a bare call and the memory's own work"
    with RayMemory(1, MAX_SZ, Proportional(), name='costs', seed=0, timeout=600) as memory, RayPusher('costs', timeout=600) as pusher:
        alone, chunk, td = ReplayMemory(MAX_SZ, Proportional(), seed=0), steps(), np.ones(BS)
        for _ in range(100): pusher.push(chunk), alone.extend(chunk)
        pusher.flush()
        memory.refresh()
        memory.deferred = True
        shard = memory.shards.places[0].handle
        def cpu(): return shard.get(shard.send('info'), 60).cpu
        def draw(n):
            for _ in range(n):
                for batch in memory.take(memory.ask(GROUP, BS)): batch.update_priorities(td)
        def draw_alone(n):
            for _ in range(n*GROUP): alone.sample(BS).update_priorities(td)
        def push(n):
            for _ in range(n): pusher.push(chunk)
            pusher.flush()
        def push_alone(n):
            for _ in range(n): alone.extend(chunk)
        ids = np.arange(GROUP*BS)
        updates, counts = (ids, np.ones(GROUP*BS)), [BS]*GROUP
        answers = shard.get(shard.send('push', 1, 1, 1, chunk), 60), shard.get(shard.send('serve', None, counts, 1., None, None), 60)
        bare_push, bare_draw = (Bare.remote(o) for o in answers)
        def call_push(): return bare_push.call.remote(1, 1, 1, chunk, None, 0.)
        def bare_group(n):
            for _ in range(n): ray.get(bare_draw.call.remote(updates, counts, 1., None, None))
        def nothing(): return bare_push.nothing.remote()
        def both_push():
            alone.extend(chunk)
            return call_push()
        def both_group(n):
            for _ in range(n):
                bare_group(1)
                draw_alone(1)
        def nothings(n):
            for _ in range(n): ray.get(nothing())
        cases = {'push': (push, keep_three(nothing), keep_three(call_push), push_alone, keep_three(both_push), bare_push, 300),
                 'group': (draw, nothings, bare_group, draw_alone, both_group, bare_draw, 40)}
        found = {k: [] for k in cases}
        for *ways, _, n in cases.values():
            for way in ways: way(n)
        for _ in range(max(5, int(seconds))):
            for k, (ours, empty, bare, own, both, actor, n) in cases.items():
                def busy(actor=actor): return ray.get(actor.cpu.remote())
                def idle(): return ray.get(bare_push.cpu.remote())
                found[k].append([spent(ours, n, cpu), spent(empty, n, idle), spent(bare, n, busy), spent(own, n), spent(both, n, busy)])
    rows = []
    for k, v in found.items():
        medians = [f'{statistics.median(o):,.0f}' for o in zip(*v)]
        ratios = statistics.median(a/d for a, *_, d in v), statistics.median(a/(b + c) for a, _, b, c, _ in v)
        rows.append([k, *medians, f'{statistics.median(a - b for a, b, *_ in v):,.0f}', *(f'{o:.2f}' for o in ratios)])
    table('CPU µs of all processes', rows,
          ['what', 'ours', 'an empty call', 'a call with objects', "memory's own work", 'one after the other', 'ours less an empty call',
           'ours/one after the other', 'ours/sum of both loops'])


def rates(seconds):
    "Steps in from four pushers, batches out in groups, and both, by the number of shards"
    rows = []
    for shards in (1, 2, 4):
        with RayMemory(shards, MAX_SZ, Proportional(), name=f'rates{shards}', seed=0, timeout=600) as memory:
            sources = [Source.remote(f'rates{shards}', env) for env in range(4)]
            ray.get([o.run.remote(1.) for o in sources])
            start = time.monotonic()
            n_in = sum(ray.get([o.run.remote(seconds) for o in sources]))/(time.monotonic() - start)
            out = batches(memory, seconds)
            running = [o.run.remote(seconds) for o in sources[:2]]
            both_out = batches(memory, seconds)
            both_in = sum(ray.get(running))/seconds
            rows.append([shards, f'{n_in:,.0f}', f'{out:,.0f}', f'{both_in:,.0f}', f'{both_out:,.0f}'])
            for o in sources: ray.kill(o)
    table('Steps and batches a second (wall clock)', rows, ['shards', 'in, 4 pushers', f'out, {GROUP} × {BS}', 'both: in, 2 pushers', 'both: out'])


def batches(memory, seconds, ahead=2):
    "Batches a second, with updates, groups asked for ahead"
    memory.refresh()
    memory.deferred, asked, td, n = True, deque(), np.ones(BS), 0
    for phase in (1., seconds):
        start, n = time.monotonic(), 0
        while time.monotonic() < start + phase:
            while len(asked) < ahead: asked.append(memory.ask(GROUP, BS))
            for batch in memory.take(asked.popleft()):
                batch.update_priorities(td)
                n += 1
    while asked: memory.take(asked.popleft())
    return n/seconds


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('what', nargs='*', default=['costs', 'rates'], choices=['costs', 'rates'])
    parser.add_argument('--seconds', type=float, default=10.)
    args = parser.parse_args()
    print(machine())
    ray.init('local', num_cpus=4, include_dashboard=False, log_to_driver=False)
    for what in args.what: globals()[what](args.seconds)
    ray.shutdown()
