"""Sequences beside TorchRL's SliceSampler and Flashbax's trajectory buffer: `python benchmarks/sequences.py [--rows N]`

A draw is a batch of windows as torch tensors (of Flashbax: as its arrays). "moving": one step is added between two draws, as in
training. TorchRL caches where its episodes are, as long as nothing is added. Flashbax draws only from fixed periods; the one here
is a step long. What isn't installed is left out.
"""
import importlib.util

import numpy as np
import torch
from timing import begin, errors, interleaved, repeat, table

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.storage.sequence_sampler import Sequence
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import Transition

EPISODE, BLOCK = 200, 10_000


def block():
    "Steps of one stream, in episodes of 200, as a step of stacked arrays"
    rng, ends = np.random.default_rng(0), np.arange(1, BLOCK + 1) % EPISODE==0
    s, t = (rng.random((BLOCK, 4), dtype=np.float32) for _ in range(2))
    return Transition(s, rng.integers(0, 2, BLOCK), rng.random(BLOCK, dtype=np.float32), t, ends, np.zeros(BLOCK, bool))


def one(k=0): return Transition(*(column[k] for column in block()))


def own(rows, length, sampler=None):
    "Our memory, filled"
    memory, chunk = ReplayMemory(rows, sampler or Uniform(), sequence=Sequence(length, stride=1) if length else None, seed=0), block()
    while memory.n_added < rows: memory.extend(chunk, streams='one')
    return memory


def moving(memory, bs):
    "A draw after one more step"
    step = one()
    def draw():
        memory.add(step)
        return memory.sample(bs).astuple()
    return repeat(draw)


def pairs(memory, bs, length):
    "A draw, and new priorities for it"
    tds = errors(bs*length)
    def pair():
        batch = memory.sample(bs)
        batch.update_priorities(next(tds).reshape(bs, length))
        return batch.astuple()
    return repeat(pair)


def torchrl_buffer(rows, bs, length, cache):
    "TorchRL's buffer, filled likewise"
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SliceSampler
    sampler = SliceSampler(slice_len=length, end_key=('next', 'terminated'), cache_values=cache, strict_length=True)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), sampler=sampler, batch_size=bs*length)
    o = {k: torch.from_numpy(v) for k, v in block()._asdict().items()}
    after = {k: o[k] for k in ('reward', 'terminated', 'truncated')} | dict(state=o['next_state'])
    chunk = TensorDict(dict(state=o['state'], action=o['action'], next={k: v if v.ndim > 1 else v[:, None] for k, v in after.items()}), [BLOCK])
    for _ in range(rows//BLOCK): buffer.extend(chunk)
    def draw(): return buffer.sample()
    def moved():
        buffer.add(chunk[0])
        return buffer.sample()
    return draw, moved


def flashbax_buffer(rows, bs, length):
    "Flashbax's trajectory buffer, with a period of one step"
    import flashbax
    import jax
    import jax.numpy as jnp
    buffer = flashbax.make_trajectory_buffer(add_batch_size=1, sample_batch_size=bs, sample_sequence_length=length, period=1,
                                             min_length_time_axis=length, max_length_time_axis=rows)
    example = {k: jnp.asarray(v) for k, v in one()._asdict().items()}
    add, sample = jax.jit(buffer.add, donate_argnums=0), jax.jit(buffer.sample)
    held = dict(state=buffer.init(example), key=jax.random.PRNGKey(0))
    chunk = {k: jnp.asarray(v)[None] for k, v in block()._asdict().items()}
    for _ in range(rows//BLOCK): held['state'] = add(held['state'], chunk)
    step = {k: v[:, :1] for k, v in chunk.items()}
    def draw():
        held['key'], key = jax.random.split(held['key'])
        return jax.block_until_ready(sample(held['state'], key).experience)
    def moved():
        held['state'] = add(held['state'], step)
        return draw()
    return draw, moved


def draws(rows, bs, length, peers=True):
    "One size: ours uniform and proportional, standing still and moving, beside what is installed"
    memory, ranked = own(rows, length), own(rows, length, Proportional())
    cases = {'ours': (repeat(lambda: memory.sample(bs).astuple()), 300), 'ours, moving': (moving(memory, bs), 300),
             'proportional': (repeat(lambda: ranked.sample(bs).astuple()), 300), 'proportional, moving': (moving(ranked, bs), 300),
             'proportional, with updates': (pairs(ranked, bs, length), 300)}
    if peers and importlib.util.find_spec('torchrl'):
        for name, cache in (('TorchRL, cached', True), ('TorchRL', False)):
            draw, moved = torchrl_buffer(rows, bs, length, cache)
            if cache: cases[name] = repeat(draw), 20
            cases[name + ', moving'] = repeat(moved), 3
    if peers and importlib.util.find_spec('flashbax'):
        draw, moved = flashbax_buffer(rows, bs, length)
        cases |= {'Flashbax': (repeat(draw), 50), 'Flashbax, moving': (repeat(moved), 20)}
    us = interleaved(cases, reps=7)
    out = [[name, f'{v:.1f}', f'{v/us["ours, moving" if "moving" in name else "ours"]:.1f}'] for name, v in us.items()]
    table(f'{bs} windows of {length} out of {rows:,}', out, ['', 'µs', 'times ours'])


def adding(rows=100_000, length=80):
    "Steps in: one by one, 64 at once, many at once; with a draw for each 64 steps, which tells the sampler"
    step, chunk = one(), block()
    small = Transition(*(c[:64] for c in chunk))
    out = []
    for name, sampler in (('uniform', Uniform), ('proportional', Proportional)):
        plain, ours = own(rows, 0, sampler()), own(rows, length, sampler())
        def told(memory, f, k):
            def run():
                for _ in range(k): f(memory)
                len(memory.sampler.arrays)
            return repeat(run)
        ways = {'one step': (lambda m: m.add(step), 64, 30), '64 at once': (lambda m: m.extend(small, streams='one'), 1, 300),
                '10,000 at once': (lambda m: m.extend(chunk, streams='one'), 1, 10)}
        for way, (f, k, n) in ways.items():
            us = interleaved({'plain': (told(plain, f, k), n), 'sequences': (told(ours, f, k), n)})
            out.append([f'{way}, {name}', f'{us["plain"]:.1f}', f'{us["sequences"]:.1f}', f'{us["sequences"]/us["plain"]:.2f}'])
    table(f'Steps into {rows:,}; the sampler told after each 64', out, ['', 'plain µs', 'sequences µs', 'ratio'])


def main():
    "Fill, measure, print"
    rows = begin(BLOCK, 5_000_000)
    adding()
    draws(rows, 256, 4)
    draws(max(BLOCK, rows//5), 64, 80)
    for size in (rows//50, rows*10):
        if size % BLOCK==0: draws(size, 256, 4, peers=False)


if __name__ == '__main__': main()
