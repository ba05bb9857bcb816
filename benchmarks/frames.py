"""Stacks of Atari frames, beside Stable-Baselines3 and cpprb: `python benchmarks/frames.py`

Stable-Baselines3 stores with `optimize_memory_usage`, cpprb with `next_of` and `stack_compress`. All memories are full and wrapped around
before the clock starts. Resident bytes are measured as the growth of the process while a memory of ours is filled, in a process of its own.
"""
import subprocess
import sys

import cpprb
import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.buffers import ReplayBuffer
from timing import interleaved, machine, pin, table

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.steps import Transition

ROWS, EPISODE, S, SIDE = 40_000, 500, 4, 84
NOISE = np.random.default_rng(0).integers(256, size=(3_000, SIDE, SIDE), dtype=np.uint8)


def transitions(n):
    "Stacks that slide over noise, in episodes of 500 steps, each with an end and a new beginning"
    for t in range(n):
        k = (t + t//EPISODE*S) % (len(NOISE) - S - 1)
        yield Transition(NOISE[k:k + S], t % 6, 1., NOISE[k + 1:k + S + 1], t % EPISODE==EPISODE - 1, False)


def ours(**options):
    "Our memory, wrapped around"
    memory = ReplayMemory(ROWS, seed=0, **options)
    for step in transitions(ROWS + 1000): memory.add(step)
    return memory


def sb3():
    "Stable-Baselines3's buffer, wrapped around"
    buffer = ReplayBuffer(ROWS, gym.spaces.Box(0, 255, (S, SIDE, SIDE), np.uint8), gym.spaces.Discrete(6), optimize_memory_usage=True,
                          handle_timeout_termination=False)
    for step in transitions(ROWS + 1000): add_sb3(buffer, step)
    return buffer


def add_sb3(buffer, o):
    "One step into Stable-Baselines3's buffer"
    buffer.add(o.state[None], o.next_state[None], np.array([o.action]), np.array([o.reward]), np.array([o.terminated]), [{}])


def peer():
    "cpprb's buffer, wrapped around; its stacks are the last axis"
    buffer = cpprb.ReplayBuffer(ROWS, dict(obs=dict(shape=(SIDE, SIDE, S), dtype=np.uint8), act=dict(dtype=np.int64), rew={}, term=dict(dtype=np.bool_)),
                                next_of='obs', stack_compress='obs')
    for step in transitions(ROWS + 1000): add_cpprb(buffer, step)
    return buffer


def add_cpprb(buffer, o):
    "One step into cpprb's buffer"
    def last(a): return np.ascontiguousarray(np.moveaxis(a, 0, -1))
    buffer.add(obs=last(o.state), act=o.action, rew=o.reward, next_obs=last(o.next_state), term=o.terminated)
    if o.terminated: buffer.on_episode_end()


def repeat(f, *args):
    "A function that calls `f(*args)` n times"
    def run(n):
        for _ in range(n): f(*args)
    return run


def numpy_copy(bs, rng=np.random.default_rng(0)):      # noqa: B008
    "Copy five frames a transition, out of as many as a memory holds, into an array that is used again"
    frames = np.empty((ROWS, SIDE, SIDE), np.uint8)
    for k in range(0, ROWS, len(NOISE)): frames[k:k + len(NOISE)] = NOISE[:ROWS - k]
    out = np.empty((bs, 5, SIDE, SIDE), np.uint8)
    def run(n):
        for _ in range(n):
            for row, k in zip(out, rng.integers(ROWS - 5, size=bs).tolist()): row[...] = frames[k:k + 5]
    return run


def resident():
    "Bytes a transition by which the process grows while a memory fills (run by itself)"
    def now():
        with open('/proc/self/statm') as f: return int(f.read().split()[1])*4096
    steps = list(transitions(ROWS))
    memory = ReplayMemory(ROWS, seed=0)
    memory.add(steps[0])
    before = now()
    for step in steps[1:]: memory.add(step)
    print((now() - before)/(ROWS - 1))


def draw():
    "Draws of 32 and 256"
    memory, views, sb, cp = ours(), ours(frame_views=True), sb3(), peer()
    rows = []
    for bs, n in ((32, 60), (256, 12)):
        us = interleaved({'one column each': (repeat(memory.sample, bs), n), 'frame_views': (repeat(views.sample, bs), n),
                          'sb3': (repeat(sb.sample, bs), n), 'cpprb': (repeat(cp.sample, bs), max(2, n//6)), 'numpy, 5 frames': (numpy_copy(bs), n)}, 9)
        rows += [[bs, k, f'{v:.0f}', f'{us["sb3"]/v:.2f}', f'{us["cpprb"]/v:.2f}', f'{v/us["numpy, 5 frames"]:.2f}'] for k, v in us.items()]
    table('Draws', rows, ['batch', '', 'µs', 'times as fast as sb3', 'as cpprb', 'of 5 frames by numpy'])
    steps = list(transitions(2000))
    def each(f):
        it = iter(steps*1000)
        def run(n):
            for _ in range(n): f(next(it))
        return run
    us = interleaved({'add': (each(memory.add), 500), 'sb3': (each(lambda o: add_sb3(sb, o)), 500), 'cpprb': (each(lambda o: add_cpprb(cp, o)), 100)})
    table('One step in', [[k, f'{v:.2f}', f'{us["sb3"]/v:.2f}'] for k, v in us.items()], ['', 'µs', 'times as fast as sb3'])


def main():
    "Resident bytes, draws, insertion"
    pin()
    torch.set_num_threads(1)
    print(machine())
    grown = float(subprocess.run([sys.executable, __file__, 'resident'], capture_output=True, text=True, check=True).stdout)
    print(f'\nresident bytes a transition: {grown:,.0f}; as plain records {8*SIDE*SIDE:,}')
    draw()


if __name__ == '__main__': resident() if 'resident' in sys.argv else main()
