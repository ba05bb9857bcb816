"""What counting the draws costs: whole calls of `sample` with the tally and without: `python benchmarks/counting.py [--rows N]`

Every column is read while the previous batch is still held. Both ways draw from the very same memory, in turn; without the tally
its address is given as 0, which the kernel takes for "nobody counts". A second run of the same, without, shows the noise.
"""

import numpy as np
from timing import begin, interleaved, table

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import Transition

SIZES, BLOCK = (32, 256, 4096), 10_000


def filled(rows, sampler):
    "A memory of CartPole-like transitions, every priority its own"
    rng, no = np.random.default_rng(0), np.zeros(BLOCK, bool)
    s, t = (rng.random((BLOCK, 4), dtype=np.float32) for _ in range(2))
    memory = ReplayMemory(rows, sampler, seed=0)
    while memory.n_added < rows: memory.extend(Transition(s, rng.integers(0, 2, BLOCK), rng.random(BLOCK, dtype=np.float32), t, no, no))
    memory.update_priorities(np.arange(memory.first_id, memory.n_added), rng.random(rows))
    return memory


def draws(memory, bs, address):
    "A function that draws `n` batches with the tally at `address`"
    def draw(n):
        memory._array.tally.address, held = address, None
        for _ in range(n):
            batch = memory.sample(bs)
            held = batch, batch.astuple(), batch.ids, batch.weights
        return held
    return draw


def main():
    "Fill, draw, print"
    rows = begin()
    for size in sorted({min(rows, 50_000), rows}):
        for sampler in Uniform(), Proportional():
            memory, out = filled(size, sampler), []
            tally = memory._array.tally.address
            for bs in SIZES:
                n = max(20, min(1000, 100_000 // bs))
                us = interleaved({k: (draws(memory, bs, a), n) for k, a in (('without', 0), ('counted', tally), ('without, again', 0))}, 41)
                out.append([bs, *(f'{v:.2f}' for v in us.values()), *(f'{100*(us[k]/us["without"] - 1):+.1f} %' for k in list(us)[1:])])
            table(f'{type(sampler).__name__}, {size:,} transitions, one slot in {memory._array.tally.stride} watched', out,
                  ['rows', 'without µs', 'counted µs', 'again µs', 'counted', 'noise'])


if __name__ == '__main__': main()
