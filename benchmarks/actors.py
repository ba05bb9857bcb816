"""Worker processes that make steps, and one memory that takes them.

    python benchmarks/actors.py [--learn] [crossing slowed asking lag prefetching]

Chunks of 64 CartPole-sized steps (4 floats) out of one worker, and what the memory alone takes in; an environment
slowed to 1 ms a step with one worker and two; what it costs to ask an agent, to publish and to pull weights; how many
chunks after its publication a version of the weights is used; what prefetching gains. With `--learn`, CartPole with
two spawned actors and in one process, with the command line's own settings. It uses all cores it is allowed.
"""
import argparse
import itertools
import statistics
import tempfile
import time
import timeit
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from timing import machine, table

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.pipes.actors import Actors
from fastrl_replay.pipes.agents import EpsilonGreedy
from fastrl_replay.pipes.base import IterDataPipe
from fastrl_replay.pipes.replay import PrioritizedReplay, batches_due
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.pipes.weights import SharedAgent, SharedParams
from fastrl_replay.steps import SimpleStep, Transition


class Ready(IterDataPipe):
    "Steps that cost nothing to make, one by one or in batches of 64"
    def __init__(self, step_type=SimpleStep, rows=1): self.step_type, self.rows = step_type, rows
    def one(self, s, i):
        if self.step_type is Transition: return Transition(s[i], i % 2, 1., s[i + 1], False, i==63)
        return SimpleStep(s[i], i % 2, s[i + 1], False, i==63, 1., float(i), 0, 0, i, 0)
    def __iter__(self):
        s = np.random.default_rng(0).random((65, 4), np.float32)
        steps = [self.one(s, i) for i in range(64)]
        batch = Batch.of(self.step_type(*map(np.array, zip(*steps))))
        while True: yield from steps if self.rows==1 else [batch]


class Slow(gym.Wrapper):
    "A CartPole that takes a millisecond"
    def __init__(self): super().__init__(gym.make('CartPole-v1', disable_env_checker=True))
    def step(self, action):
        time.sleep(.001)
        return self.env.step(action)


def rate(items, n):
    "Steps a second over `n` chunks, after ten of warm-up"
    it = iter(items)
    for _ in range(10): next(it)
    start, steps = time.perf_counter(), 0
    for chunk in itertools.islice(it, n): steps += len(chunk)
    return steps/(time.perf_counter() - start)


def crossing():
    "Steps a second out of a worker, and into a memory"
    rows = []
    for kind in (SimpleStep, Transition):
        for name, rows_, n in (('steps, one worker', 1, 1), ('batches, one worker', 64, 1), ('steps, no worker', 1, 0)):
            pipe = Actors(Ready(kind, rows_), n)
            rows.append([kind.__name__, name, f'{statistics.median(rate(pipe, 1000) for _ in range(5)):,.0f}'])
            pipe.close()
    chunk = next(iter(Actors(Ready(rows=64), 0)))
    for name, sampler in (('uniform', None), ('prioritized', Proportional())):
        memory = ReplayMemory(50_000, sampler, seed=0)
        def taken(memory=memory):
            while True:
                memory.extend(chunk)
                yield chunk
        speed = statistics.median(rate(taken(), 3000) for _ in range(5))
        rows.append(['SimpleStep', f'into a {name} memory', f'{speed:,.0f}'])
    pipe, memory = Actors(Ready(), 1), ReplayMemory(50_000, Proportional(), seed=0)
    def stored():
        for c in pipe:
            memory.extend(c)
            yield c
    speed = statistics.median(rate(stored(), 1000) for _ in range(5))
    rows.append(['SimpleStep', 'one worker into a prioritized memory', f'{speed:,.0f}'])
    pipe.close()
    table('Steps a second, in chunks of 64', rows, ['step', 'what', 'steps/s'])


def slowed(seconds=4.):
    "An environment of 1 ms, one worker and two, with a learner that draws every fourth step"
    rates, rows = {}, []
    for n in (1, 2):
        pipe = GymStepper([Slow], seed=0).actors(n, chunk=64)
        replay = PrioritizedReplay(pipe, bs=64, max_sz=50_000, min_sz=200, steps_per_batch=4, seed=0)
        exact, start, first = True, None, 0
        for k, _ in enumerate(replay, 1):
            n_added = replay.memory.n_added
            due = batches_due(n_added, 200, replay.steps_per_batch)
            exact = exact and due - 64//4 <= k <= due
            if start is None: start, first = time.perf_counter(), n_added
            if k==due and time.perf_counter() - start > seconds: break
        rates[n] = (n_added - first)/(time.perf_counter() - start)
        rows.append([n, f'{rates[n]:,.0f}', f'{k:,}', f'{due:,}', 'yes' if exact else 'NO'])
        pipe.close()
    table(f'1 ms a step: two workers make {rates[2]/rates[1]:.2f} times the steps of one', rows,
          ['workers', 'steps/s', 'batches drawn', 'batches due', 'never early'])


def lag(n=200):
    "After a publication, how many more chunks of a worker begin with older weights"
    model = torch.nn.Linear(4, 2)
    shared = SharedParams(model)
    pipe = GymStepper(['CartPole-v1'], agent=SharedAgent(EpsilonGreedy(model, .1, seed=0), shared), seed=0).actors(2)
    it, old = iter(pipe), []
    for _ in range(4): next(it)
    for _ in range(n):
        version, stale = shared.publish(model), [0, 0]
        for _ in range(8):
            w = int(next(it).env_id[0]) % 2
            if pipe.stats()['versions'][w] < version: stale[w] += 1
        old += stale
    pipe.close()
    table('Chunks of a worker that begin with older weights, after a publication', [[k, old.count(k)] for k in sorted(set(old))],
          ['chunks', 'times'])


def asking():
    "Microseconds for one action of a CartPole network, exploring or not, and for sharing its weights"
    torch.set_num_threads(1)
    def best(f, number=100): return f'{min(timeit.repeat(f, number=number, repeat=20))/number*1e6:.1f}'
    rows, state = [], np.zeros((1, 4), np.float32)
    for hidden in (128, 1024):
        net = torch.nn.Sequential(torch.nn.Linear(4, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden),
                                  torch.nn.ReLU(), torch.nn.Linear(hidden, 2))
        shared, greedy, random = SharedParams(net), EpsilonGreedy(net, 0.), EpsilonGreedy(net, 1.)
        random(state)
        timed = (lambda: greedy(state), lambda: random(state), lambda: shared.publish(net),      # noqa: B023
                 lambda: shared.pull(net), lambda: shared.pull(net, shared.version))             # noqa: B023
        rows.append([hidden, *map(best, timed)])
    table('Microseconds: one state, two hidden layers', rows,
          ['hidden', 'greedy', 'exploring', 'publish', 'pull', 'nothing new'])


def prefetching():
    "A learner that computes in torch for some time, with batches drawn beside it"
    torch.set_num_threads(1)
    rows = []
    for bs, dim, hidden in ((64, 4, 64), (256, 512, 256), (1024, 2048, 256)):
        memory = ReplayMemory(20_000, seed=0)
        s = np.random.default_rng(0).random((2000, dim), np.float32)
        i, no, r = np.zeros(2000, np.int64), np.zeros(2000, bool), np.zeros(2000, np.float32)
        replay = PrioritizedReplay([], bs=bs, max_sz=20_000, freeze_memory=True, seed=0)
        for _ in range(10): replay.memory.extend(SimpleStep(s, i, s, no, no, r, r, i, i, i, i))
        del memory
        net = torch.nn.Sequential(torch.nn.Linear(dim, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 2))
        def learn(loader, n, net=net):
            for batch in itertools.islice(loader, n):
                loss = net(batch.state).square().mean() + net(batch.next_state).square().mean()
                loss.backward()
                batch.update_priorities(batch.reward)
        loaders, spent = [replay.loader(), replay.loader(prefetch=1), replay.loader(prefetch=4)], [[], [], []]
        for _ in range(5):
            for loader, times in zip(loaders, spent):
                start = time.perf_counter()
                learn(loader, 40)
                times.append((time.perf_counter() - start)/40*1e6)
        start = time.perf_counter()
        for _ in range(100): replay.sample()
        draw = (time.perf_counter() - start)/100*1e6
        none, one, four = (statistics.median(o) for o in spent)
        rows.append([bs, f'{8*dim*bs/1e6:.1f}', f'{draw:.0f}', f'{none:.0f}', f'{none/one:.2f}', f'{none/four:.2f}'])
    table('Prefetching', rows, ['rows', 'MB a batch', 'draw µs', 'update µs', 'times as fast, k=1', 'k=4'])


def learning(seeds=(0, 1, 2)):
    "CartPole by the command line, in one process and with two spawned actors"
    from fastrl_replay import cli
    rows = []
    for seed in seeds:
        for n in (0, 2):
            with tempfile.TemporaryDirectory() as folder:
                given = ['--seed', str(seed), '--actors', str(n), '--out', str(Path(folder)/'run')]
                options = cli.parse_options(cli.train, given)
                result = cli.train(**options)
            rows.append([seed, n, f'{result["mean_return"]:.1f}', f'{result["steps"]:,}', f'{result["seconds"]:.0f}'])
    table('CartPole-v1, 20 greedy episodes of the weights chosen', rows, ['seed', 'actors', 'mean return', 'steps', 'seconds'])


def main():
    "Measure, print"
    parser = argparse.ArgumentParser()
    parts = dict(crossing=crossing, slowed=slowed, asking=asking, lag=lag, prefetching=prefetching)
    parser.add_argument('parts', nargs='*', choices=[[], *parts], help='which measurements (default: all)')
    parser.add_argument('--learn', action='store_true')
    options = parser.parse_args()
    print(machine())
    for name, measure in parts.items():
        if name in options.parts or not options.parts: measure()
    if options.learn: learning()


if __name__ == '__main__': main()
