"""CPU seconds from import to the first update, with an empty cache of compiled kernels and with a warm one: `python benchmarks/cold.py`

Each figure is the CPU time of a process of its own, without that of a process which imports torch and numba only.
"""
import os
import resource
import statistics
import subprocess
import sys
import tempfile

from timing import begin, table

BASE = 'import numba, torch\n'
CODE = BASE + """import sys
import numpy as np
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import Transition
memory = ReplayMemory(10_000, {'uniform': Uniform, 'proportional': Proportional, 'rank': RankBased}[sys.argv[1]](), seed=0)
for k in range(100): memory.add(Transition(np.full(4, k, np.float32), 0, 1., np.full(4, k, np.float32), False, False))
batch = memory.sample(32)
batch.update_priorities(np.ones(32))
"""


def seconds(code, cache, *args):
    "CPU seconds of a process that runs `code`"
    def spent(): return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    before = spent()
    env = {**os.environ, 'NUMBA_CACHE_DIR': cache, 'OMP_NUM_THREADS': '1'}
    subprocess.run([sys.executable, '-c', code, *args], check=True, env=env, stderr=subprocess.DEVNULL)
    return spent() - before


def measured(sampler, reps=3):
    "Medians: (cold, warm), beyond torch's and Numba's own import"
    base, cold, warm = [], [], []
    for _ in range(reps):
        with tempfile.TemporaryDirectory() as cache:
            base.append(seconds(BASE, cache))
            cold.append(seconds(CODE, cache, sampler))
            warm.append(seconds(CODE, cache, sampler))
    own = statistics.median(base)
    return statistics.median(cold) - own, statistics.median(warm) - own


def main():
    "Measure and print"
    begin()
    rows = [[name, *(f'{v:.2f}' for v in measured(name))] for name in ('uniform', 'proportional', 'rank')]
    table('From import to first update, CPU seconds', rows, ['sampler', 'empty cache', 'warm cache'])


if __name__ == '__main__': main()
