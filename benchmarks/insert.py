"""Putting steps in, beside Stable-Baselines3: `python benchmarks/insert.py`

Stable-Baselines3 stores with its default handling of time limits. Both memories are wrapped around before the clock starts, so
that no page is touched for the first time while it runs.
"""
import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.buffers import ReplayBuffer
from timing import interleaved, machine, pin, repeat, table

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.steps import Transition

ROWS, ENVS, MANY = 50_000, 64, 512


def peer(n_envs):
    "Stable-Baselines3's buffer and the arguments of its `add`"
    buffer = ReplayBuffer(ROWS, gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2), n_envs=n_envs)
    o = np.zeros((n_envs, 4), np.float32)
    args = o, o + 1, np.zeros(n_envs, np.int64), np.ones(n_envs, np.float32), np.zeros(n_envs, bool), [{} for _ in range(n_envs)]
    for _ in range(ROWS // n_envs + 1): buffer.add(*args)
    return buffer, args


def filled(chunk):
    "Our memory, wrapped around"
    memory = ReplayMemory(ROWS)
    while memory.n_added <= ROWS: memory.extend(chunk)
    return memory


def main():
    "Measure one step, 64 environments' steps, and 512 steps at once"
    pin()
    torch.set_num_threads(1)
    print(machine())
    rng = np.random.default_rng(0)
    def state(): return rng.random(4, dtype=np.float32)
    steps = [Transition(state(), 1, 1., state(), False, False) for _ in range(MANY)]
    o, i, no = np.zeros((ENVS, 4), np.float32), np.zeros(ENVS, np.int64), np.zeros(ENVS, bool)
    arrays = Transition(o, i, np.ones(ENVS, np.float32), o + 1, no, no)
    chunk = Batch.of(arrays)
    one, many = peer(1), peer(ENVS)
    cases = {'sb3, one step': (repeat(one[0].add, *one[1]), 2000),
             'one step': (repeat(filled(chunk).add, steps[0]), 2000),
             f'sb3, {ENVS} at once': (repeat(many[0].add, *many[1]), 1000),
             f'{ENVS} at once, a Batch': (repeat(filled(chunk).extend, chunk), 1000),
             f'{ENVS} at once, arrays': (repeat(filled(chunk).extend, arrays), 1000),
             f'{MANY} in a list': (repeat(filled(chunk).extend, steps), 10)}
    us = interleaved(cases)
    alone, vector = us['sb3, one step'], us[f'sb3, {ENVS} at once']
    rows = [[k, f'{v:.2f}', f'{(vector if str(ENVS) in k else alone*(MANY if str(MANY) in k else 1))/v:.1f}'] for k, v in us.items()]
    table('Steps in', rows, ['', 'µs a call', 'times as fast as Stable-Baselines3'])


if __name__ == '__main__': main()
