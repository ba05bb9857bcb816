"""Steps in, compared with Stable-Baselines3 and cpprb: `python benchmarks/insert.py [--rows N]`

One step, and 1, 8 and 64 steps at once in every dtype that is accepted, 512 steps in a list, steps of 256 and 10,000 floats, and all
rows in one call. Stable-Baselines3 stores with its default handling of time limits, and does not look at what it is given. The small memories have wrapped around before the clock starts, so that no page is
touched for the first time while it runs.
"""
import cpprb
import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.buffers import ReplayBuffer
from timing import begin, interleaved, repeat, table

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.steps import Transition

ROWS, ENVS, MANY = 50_000, (1, 8, 64), 512
WIDE = {256: 20_000, 10_000: 3000}              # floats of an observation: rows


def peer(n_envs, width=4, rows=ROWS):
    "Stable-Baselines3's `add` of `n_envs` transitions, wrapped around"
    buffer = ReplayBuffer(rows, gym.spaces.Box(-1, 1, (width,)), gym.spaces.Discrete(2), n_envs=n_envs)
    o = np.zeros((n_envs, width), np.float32)
    infos = [{} for _ in range(n_envs)]
    args = o, o + 1, np.zeros(n_envs, np.int64), np.ones(n_envs), np.zeros(n_envs, bool), infos
    for _ in range(rows // n_envs + 1): buffer.add(*args)
    return repeat(buffer.add, *args)


def filled(chunk):
    "A memory of ours, wrapped around"
    memory = ReplayMemory(ROWS)
    while memory.n_added <= ROWS: memory.extend(chunk)
    return memory


def single(rng):
    "One step in each accepted dtype: name → step"
    s, t = (rng.random(4, dtype=np.float32) for _ in range(2))
    return {'Python numbers': Transition(s, 1, 1., t, False, False),
            'numpy scalars': Transition(s, np.int64(1), np.float32(1), t, np.False_, np.False_),
            'a float64 reward': Transition(s, np.int64(1), np.float64(1), t, False, False),
            'a uint8 action': Transition(s, np.uint8(1), 1., t, False, False),
            '0-d arrays': Transition(s, np.array(1), np.array(1.), t, np.array(False), np.array(False)),
            'tensors': Transition(torch.from_numpy(s), torch.tensor(1), torch.tensor(1.), torch.from_numpy(t), False, False)}


def stacked(rng, n):
    "`n` transitions as stacked arrays, as they are stored and in need of casts: name → step of arrays"
    s, t, r = rng.random((n, 4), np.float32), rng.random((n, 4), np.float32), rng.random(n, np.float32)
    i, no = rng.integers(0, 2, n), np.zeros(n, bool)
    return {'as stored': Transition(s, i, r, t, no, no), 'float64 rewards': Transition(s, i, r.astype(float), t, no, no),
            'uint8 actions': Transition(s, i.astype(np.uint8), r, t, no, no)}


def beside(title, cases, base, per=1):
    "Print each case in µs, and how many times as fast it is as `base` (a case), of which one call does 1/`per` of the work"
    us = interleaved(cases)
    rows = [[k, f'{v:.2f}', '' if k == base else f'{us[base]*per/v:.2f}'] for k, v in us.items()]
    table(title, rows, ['', 'µs a call', 'times as fast'])


def bulk(rng, rows):
    "All rows in one call"
    arrays = stacked(rng, rows)['as stored']
    memory, columns = ReplayMemory(rows), arrays._asdict()
    buffer = cpprb.ReplayBuffer(rows, {k: dict(shape=v.shape[1:] or 1, dtype=v.dtype) for k, v in columns.items()})
    cases = {'cpprb': (repeat(buffer.add, **columns), 2), 'ours': (repeat(memory.extend, arrays), 2)}
    beside(f'{rows:,} rows in one call', cases, 'cpprb')


def at_once(rng, n):
    "`n` transitions at once"
    arrays = stacked(rng, n)
    arrays['as stored, a Batch'] = chunk = Batch.of(arrays['as stored'])
    memory = filled(chunk)
    cases = {'Stable-Baselines3': (peer(n), 1000)} | {k: (repeat(memory.extend, v), 1000) for k, v in arrays.items()}
    beside(f'{n} at once', cases, 'Stable-Baselines3')


def wide(rng, width, rows):
    "One step of many floats, with the next state stored once, if it is large, and in full"
    s, t = rng.random((2, width), np.float32)
    step = Transition(s, 1, 1., t, False, False)
    columns = {'state': {'shape': width}, 'action': {'dtype': np.int64}, 'reward': {}, 'next_state': {'shape': width}} | \
        {f: {'dtype': bool} for f in ('terminated', 'truncated')}
    buffer, cases = cpprb.ReplayBuffer(rows, columns), {'Stable-Baselines3': (peer(1, width, rows), 300)}
    cases['cpprb'] = repeat(buffer.add, **step._asdict()), 300
    for name, dedup in {'ours': 'auto', 'ours, in full': None}.items():
        memory = ReplayMemory(rows, dedup=dedup)
        for k in range(rows + 1): memory.add(step._replace(state=s + k, next_state=s + k + 1))
        cases[name] = repeat(memory.add, step), 300
    for _ in range(rows + 1): buffer.add(**step._asdict())
    beside(f'One step of {width:,} floats', cases, 'Stable-Baselines3')


def main():
    "Measure and print"
    rows = begin()
    rng = np.random.default_rng(0)
    steps = single(rng)
    one, memory = peer(1), filled(Batch.of(stacked(rng, 64)['as stored']))
    beside('One step', {'Stable-Baselines3': (one, 2000)} | {k: (repeat(memory.add, v), 2000) for k, v in steps.items()},
           'Stable-Baselines3')
    for n in ENVS: at_once(rng, n)
    for width, some in WIDE.items(): wide(rng, width, some)
    listed = [steps['Python numbers']]*MANY
    beside(f'{MANY} in a list', {'Stable-Baselines3, one': (one, 2000), 'ours': (repeat(memory.extend, listed), 20)},
           'Stable-Baselines3, one', MANY)
    bulk(rng, rows)


if __name__ == '__main__': main()
