"""Our buffer under Stable-Baselines3, compared with its own: `python benchmarks/sb3.py [--rows N]`

`add` and `sample` as its algorithms call them, with one environment and with eight, and the size of a saved buffer that is hardly filled.
"""
import pickle

import gymnasium as gym
import numpy as np
from stable_baselines3.common import buffers
from timing import begin, holding, interleaved, repeat, table

from fastrl_replay.interop import sb3

BATCHES, SAVED = (32, 256), 3000


def arguments(n):
    "The arguments of an `add` for `n` environments, as a `DummyVecEnv` gives them"
    o, infos = np.zeros((n, 4), np.float32), [{'TimeLimit.truncated': False} for _ in range(n)]
    return o, o + 1, np.zeros(n, np.int64), np.ones(n, np.float32), np.zeros(n, bool), infos


def filled(kind, rows, n):
    "A buffer that has wrapped around"
    buffer = kind(rows, gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2), 'cpu', n)
    for _ in range(rows//n + 1): buffer.add(*arguments(n))
    return buffer


def beside(rows, n):
    "Times of both libraries with `n` environments, as rows of a table"
    kinds = {'SB3': filled(buffers.ReplayBuffer, rows, n), 'ours': filled(sb3.ReplayBuffer, rows, n)}
    cases = {(who, 'add'): (repeat(o.add, *arguments(n)), 1000) for who, o in kinds.items()}
    for bs in BATCHES: cases |= {(who, f'sample({bs})'): (holding(lambda o=o, bs=bs: o.sample(bs)), 200) for who, o in kinds.items()}
    us = interleaved(cases, reps=31)
    for what in ('add', *(f'sample({bs})' for bs in BATCHES)):
        theirs, ours = us['SB3', what], us['ours', what]
        yield [f'{what}, {n} environment{"s"*(n > 1)}', f'{theirs:.1f}', f'{ours:.1f}', f'{theirs/ours:.2f}']


def saved(kind, rows):
    "Megabytes of a saved buffer that holds little"
    buffer = kind(rows, gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2), 'cpu')
    for _ in range(SAVED): buffer.add(*arguments(1))
    return len(pickle.dumps(buffer, pickle.HIGHEST_PROTOCOL))/1e6


def main():
    "Measure and print"
    rows = begin(multiple_of=8)
    times = [row for n in (1, 8) for row in beside(rows, n)]
    table(f'Under Stable-Baselines3, {rows:,} transitions', times, ['', 'SB3 µs', 'ours µs', 'times as fast'])
    sizes = [saved(o, rows) for o in (buffers.ReplayBuffer, sb3.ReplayBuffer)]
    table(f'Saved, {SAVED:,} of {rows:,} transitions', [[f'{o:.2f}' for o in sizes]], ['SB3 MB', 'ours MB'])


if __name__ == '__main__': main()
