"""Drawing a batch from a million transitions, beside cpprb: `python benchmarks/draw.py [--rows N]`

*Drawn*: the batch is there, all its bytes copied, while the previous batch is still held, as a learner holds it. *Read*: every
column, and ids, probabilities and weights, are then read as torch tensors; cpprb's arrays, which are fewer, are wrapped with
`torch.from_numpy`, the cheapest way there is. cpprb stores the nested observation as two flat fields, which favours it.
"""
from typing import Any, NamedTuple

import cpprb
import numpy as np
import torch
from timing import begin, holding, interleaved, table

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import SimpleStep, Transition

SIZES, BLOCK = (32, 50, 256, 4096), 50_000


class Robot(NamedTuple):
    "A step with a nested observation"
    state: Any
    action: Any
    reward: Any
    next_state: Any
    terminated: Any
    truncated: Any


def chunks():
    "Name: a chunk of each step type, as a step of stacked arrays"
    rng, no = np.random.default_rng(0), np.zeros(BLOCK, bool)
    s, t = (rng.random((BLOCK, 4), dtype=np.float32) for _ in range(2))
    i, r = rng.integers(0, 2, BLOCK), rng.random(BLOCK, dtype=np.float32)
    yield 'Transition', Transition(s, i, r, t, no, no)
    yield 'SimpleStep', SimpleStep(s, i, t, no, no, r, r, i*0, i*0, i, i)
    state, after = ({'arm': o, 'camera': (o[:, :3]*255).astype(np.uint8)} for o in (s, t))
    yield 'nested', Robot(state, s[:, :2].copy(), r, after, no, no)


def flat(step):
    "{name: column} of a step of stacked arrays, nested fields under dotted names"
    out = {}
    for f, v in step._asdict().items(): out |= {f'{f}_{k}': o for k, o in v.items()} if isinstance(v, dict) else {f: v}
    return out


def peer(step, rows):
    "cpprb's uniform buffer, filled"
    columns = flat(step)
    buffer = cpprb.ReplayBuffer(rows, {k: dict(shape=v.shape[1:] or 1, dtype=v.dtype) for k, v in columns.items()})
    for _ in range(rows // BLOCK): buffer.add(**columns)
    return buffer


def own(step, rows, replace):
    "Our memory, filled"
    memory = ReplayMemory(rows, Uniform(replace), seed=0)
    for _ in range(rows // BLOCK): memory.extend(step)
    return memory


def reader(memory, fields, bs):
    "A function that draws `n` batches, reading every column"
    def draw():
        batch = memory.sample(bs)
        return batch, [getattr(batch, f) for f in fields], batch.ids, batch.probs, batch.weights
    return holding(draw)


def peer_reader(buffer, bs):
    "The same for cpprb"
    return holding(lambda: {k: torch.from_numpy(v) for k, v in buffer.sample(bs).items()})


def compare(title, cases, n_of):
    "Print µs and ratios of `cases` {name: function of bs that gives a function of n}, the last of them the peer's"
    out = []
    for bs in SIZES:
        us = interleaved({k: (make(bs), n_of(bs)) for k, make in cases.items()})
        *ours, theirs = us.values()
        out.append([bs, *(f'{v:.1f}' for v in us.values()), *(f'{theirs/v:.1f}' for v in ours)])
    names = list(cases)
    table(title, out, ['rows', *(f'{k} µs' for k in names), *(f'times as fast, {k}' for k in names[:-1])])


def main():
    "Fill, draw, print"
    rows = begin()
    for name, step in chunks():
        theirs, ours, distinct = peer(step, rows), own(step, rows, True), own(step, rows, False)
        def often(bs): return max(20, min(400, 100_000 // bs))
        compare(f'{name}: a batch drawn out of {rows:,}', {
            'ours': lambda bs, o=ours: holding(lambda: o.sample(bs)),
            'without replacement': lambda bs, o=distinct: holding(lambda: o.sample(bs)),
            'cpprb': lambda bs, o=theirs: holding(lambda: o.sample(bs))}, often)
        compare(f'{name}: drawn and read as tensors', {
            'ours': lambda bs, o=ours, f=step._fields: reader(o, f, bs),
            'without replacement': lambda bs, o=distinct, f=step._fields: reader(o, f, bs),
            'cpprb': lambda bs, o=theirs: peer_reader(o, bs)}, often)


if __name__ == '__main__': main()
