"""Prioritized draws, updates and insertion beside the peers: `python benchmarks/priority.py [--rows N]`

A pair is a batch of 256 drawn, every column and the weights read as torch tensors while the previous batch is still held, and 256
new TD errors given to what was drawn. cpprb's arrays are wrapped with `torch.from_numpy`, the cheapest way there is. The sorted list
is the plain way to exact ranks: one Python list kept in order by `bisect`. For the other libraries see compare.py.
"""
import bisect

import cpprb
import numpy as np
import torch
from timing import begin, errors, holding, interleaved, table

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.steps import Transition

BS, BLOCK, ALPHA, BETA = 256, 10_000, .6, .4


def block():
    "CartPole-like transitions, as a step of stacked arrays"
    rng, no = np.random.default_rng(0), np.zeros(BLOCK, bool)
    s, t = (rng.random((BLOCK, 4), dtype=np.float32) for _ in range(2))
    return Transition(s, rng.integers(0, 2, BLOCK), rng.random(BLOCK, dtype=np.float32), t, no, no)


def spread(rows):
    "A TD error for every transition, BLOCK at a time: (first, errors)"
    rng = np.random.default_rng(2)
    for a in range(0, rows, BLOCK): yield a, np.abs(rng.normal(size=min(BLOCK, rows - a))).astype(np.float32)


def own(sampler, rows):
    "Our memory, filled, every priority its own"
    memory, chunk = ReplayMemory(rows, sampler, seed=0), Batch.of(block())
    while memory.n_added < rows: memory.extend(chunk)
    for a, td in spread(rows): memory.update_priorities(np.arange(a, a + len(td)) + memory.first_id, td)
    return memory


def own_pairs(memory):
    "A function that does `n` pairs with our memory"
    tds = errors(BS)
    def pair():
        batch = memory.sample(BS)
        columns = batch.astuple()
        batch.update_priorities(next(tds))
        return batch, columns, batch.weights
    return holding(pair)


def cpprb_buffer(rows):
    "cpprb's buffer, filled likewise"
    columns = block()._asdict()
    buffer = cpprb.PrioritizedReplayBuffer(rows, {k: dict(shape=v.shape[1:] or 1, dtype=v.dtype) for k, v in columns.items()}, alpha=ALPHA)
    for _ in range(rows // BLOCK): buffer.add(**columns)
    for a, td in spread(rows): buffer.update_priorities(np.arange(a, a + len(td)), td)
    return buffer


def cpprb_pairs(buffer):
    "The pairs of cpprb"
    tds = errors(BS)
    def pair():
        got = buffer.sample(BS, beta=BETA)
        columns = {k: torch.from_numpy(v) for k, v in got.items()}
        buffer.update_priorities(got['indexes'], next(tds))
        return columns
    return holding(pair)


def sorted_pairs(rows):
    "Exact ranks in a Python list kept sorted"
    rng, tds = np.random.default_rng(0), errors(BS)
    priorities = np.concatenate([td for _, td in spread(rows)]).tolist()
    order = sorted((-p, k) for k, p in enumerate(priorities))
    mass = np.cumsum(np.arange(1., rows + 1)**-.7)
    columns = [torch.from_numpy(np.resize(column, (rows, *column.shape[1:]))) for column in block()]
    def pairs(n):
        held = None
        for _ in range(n):
            ranks = np.searchsorted(mass, (np.arange(BS) + rng.random(BS))*(mass[-1]/BS), side='right')
            ids = [order[min(k, rows - 1)][1] for k in ranks.tolist()]
            held = [column[torch.tensor(ids)] for column in columns]
            for k, p in zip(ids, next(tds).tolist()):
                del order[bisect.bisect_left(order, (-priorities[k], k))]
                priorities[k] = p
                bisect.insort(order, (-p, k))
        return held
    return pairs


def proportional(memory, buffer, rows):
    "Draw 256 and update 256, in proportion to the TD error"
    cases = {'ours': (own_pairs(memory), 500), 'cpprb': (cpprb_pairs(buffer), 100)}
    us = interleaved(cases)
    out = [[name, f'{v:.1f}', f'{v/us["ours"]:.1f}'] for name, v in us.items()]
    table(f'Proportional: draw {BS} and update {BS}, {rows:,} transitions', out, ['', 'µs', "times ours"])


def insertion(memory, buffer, rows):
    "One transition with a priority"
    chunk = block()
    steps = [Transition(*(column[k] for column in chunk)) for k in range(1000)]
    dicts, priorities = [step._asdict() for step in steps], np.abs(np.random.default_rng(3).normal(size=1000)).tolist()
    def ours(n):
        for k in range(n): memory.add(steps[k % 1000], priority=priorities[k % 1000])
    def usual(n):
        for k in range(n): memory.add(steps[k % 1000])
    def theirs(n):
        for k in range(n): buffer.add(**dicts[k % 1000], priorities=priorities[k % 1000])
    def their_usual(n):
        for k in range(n): buffer.add(**dicts[k % 1000])
    us = interleaved({'a priority given': (ours, 2000), 'cpprb, given': (theirs, 1000),
                      'the largest so far': (usual, 2000), 'cpprb, the largest': (their_usual, 1000)})
    names = list(us)
    out = [[a, f'{us[a]:.2f}', f'{us[b]:.2f}', f'{us[b]/us[a]:.1f}'] for a, b in (names[:2], names[2:])]
    table(f'Insertion into {rows:,}, one transition, the memory wrapped around', out, ['priority', 'ours µs', 'cpprb µs', 'times as fast'])


def ranked(buffer, rows):
    "The same pair by exact ranks, beside a sorted list, and beside cpprb's proportional pair at full size"
    out = []
    for size in sorted({s for s in (10_000, 100_000, rows) if s <= rows}):
        cases = {'ours': (own_pairs(own(RankBased(.7), size)), 200)}
        if size==rows: cases['cpprb'] = cpprb_pairs(buffer), 60
        if size <= 100_000: cases['list'] = sorted_pairs(size), 20 if size <= 10_000 else 3
        us = interleaved(cases, reps=9)
        out.append([f'{size:,}', *(f'{us[k]:.1f}' if k in us else '–' for k in ('ours', 'list', 'cpprb')),
                    *(f'{us[k]/us["ours"]:.2f}' if k in us else '–' for k in ('list', 'cpprb'))])
    head = ['transitions', 'ours µs', 'sorted list µs', 'cpprb proportional µs', 'list / ours', 'cpprb / ours']
    table(f'Exact ranks: draw {BS} and update {BS}', out, head)


def main():
    "Fill, measure, print"
    rows = begin(BLOCK)
    memory, buffer = own(Proportional(ALPHA, BETA), rows), cpprb_buffer(rows)
    proportional(memory, buffer, rows)
    ranked(buffer, rows)
    insertion(memory, buffer, rows)


if __name__ == '__main__': main()
