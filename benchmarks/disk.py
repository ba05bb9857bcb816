"""Memories on disk and checkpoints, beside memory and plain files: `python benchmarks/disk.py [FOLDER]`

One million CartPole transitions. On disk against in memory: the same calls in turn, page cache warm. A save against writing and syncing
as many bytes with numpy, a load against reading them; both are the medians of interleaved repetitions. Peak memory is the growth of the
process's resident set, sampled, over what the memory itself allocates.
"""
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from timing import interleaved, machine, pin, table

from fastrl_replay import checkpoint, ondisk  # noqa: F401   (they bring save, load and path)
from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import Transition

ROWS, REPS = 1_000_000, 5
SAMPLERS = dict(uniform=Uniform, proportional=Proportional, rank=RankBased)
RNG = np.random.default_rng(0)


def transitions(m):
    "A chunk of m CartPole transitions, as arrays"
    return Transition(RNG.random((m, 4), np.float32), RNG.integers(2, size=m), np.ones(m, np.float32), RNG.random((m, 4), np.float32),
                      np.zeros(m, bool), np.zeros(m, bool))


def filled(sampler, **kw):
    "A memory, wrapped around, with priorities"
    memory, chunk = ReplayMemory(ROWS, sampler(), seed=0, **kw), Batch.of(transitions(64))
    while memory.n_added <= ROWS: memory.extend(chunk)
    memory.update_priorities(np.arange(memory.first_id, memory.n_added), RNG.random(ROWS))
    return memory


def repeat(f, *args):
    "A function that calls `f(*args)` n times"
    def run(n):
        for _ in range(n): f(*args)
    return run


def steps_and_batches(name, folder):
    "µs of the calls that a run makes, in memory and on disk"
    ram, disk = filled(SAMPLERS[name]), filled(SAMPLERS[name], path=folder)
    one, chunk = Transition(np.zeros(4, np.float32), 1, 1., np.zeros(4, np.float32), False, False), Batch.of(transitions(64))
    ages, td = ROWS//2 + RNG.permutation(ROWS//4)[:256], RNG.random(256)
    calls = {'add': (lambda o: o.add(one), 20_000), 'extend(64)': (lambda o: o.extend(chunk), 2000),
             'sample(32)': (lambda o: o.sample(32), 3000), 'sample(256)': (lambda o: o.sample(256), 1000),
             'update_priorities(256)': (lambda o: o.update_priorities(o.n_added - ages, td), 500)}
    spent = interleaved({(call, where): (repeat(f, memory), n) for call, (f, n) in calls.items()
                         for where, memory in (('ram', ram), ('disk', disk))}, 9)
    disk.close()
    pairs = {call: (spent[call, 'ram'], spent[call, 'disk']) for call in calls}
    return [(f'{name} {call}', f'{a:.2f}', f'{b:.2f}', f'{b/a:.2f}') for call, (a, b) in pairs.items()]


class Peak:
    "The growth of the resident set while it runs, in bytes"
    def now(self): return int(Path('/proc/self/statm').read_text().split()[1])*os.sysconf('SC_PAGE_SIZE')
    def __enter__(self):
        self.start, self.most, self.over = self.now(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        while not self.over.wait(.001): self.most = max(self.most, self.now() - self.start)
    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


def write_and_sync(path, raw):
    "What numpy would do with these bytes"
    with open(path, 'wb') as f:
        raw.tofile(f)
        f.flush()
        os.fsync(f.fileno())


def timed(f, *args):
    start = time.perf_counter()
    result = f(*args)
    return time.perf_counter() - start, result


def own_bytes(memory):
    "What the memory and its sampler allocate"
    return memory.nbytes + sum(v.nbytes for v in vars(memory.sampler).values() if isinstance(v, np.ndarray))


def saves_and_loads(name, folder):
    "A first save, a second after 1 % of new transitions and 1 % of new priorities, a load; each beside the bytes alone"
    memory, spent = filled(SAMPLERS[name]), []
    for _ in range(REPS):
        shutil.rmtree(folder/'saved', ignore_errors=True)
        save, first = timed(memory.save, folder/'saved')
        raw = np.full(first, 3, np.uint8)
        write, _ = timed(write_and_sync, folder/'raw', raw)
        del raw
        load, again = timed(ReplayMemory.load, folder/'saved')
        del again
        read, _ = timed(np.fromfile, folder/'raw', np.uint8)
        spent.append((save, write, load, read))
    save, write, load, read = np.median(spent, 0)
    memory.extend(Batch.of(transitions(ROWS//100)))
    memory.update_priorities(RNG.choice(np.arange(memory.first_id, memory.n_added), ROWS//100, replace=False), RNG.random(ROWS//100))
    with Peak() as saving: second = memory.save(folder/'saved')
    own = own_bytes(memory)
    del memory
    gc.collect()
    with Peak() as loading: ReplayMemory.load(folder/'saved')
    peaks = f'{1 + saving.most/own:.2f}', f'{loading.most/own:.2f}'
    return name, f'{first/1e6:.1f}', f'{save/write:.2f}', f'{second/first:.3f}', f'{load/read:.2f}', *peaks


def main():
    pin()
    base = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    print(machine())
    try:
        rows = [row for name in SAMPLERS for row in steps_and_batches(name, base/name)]
        table(f'{ROWS:,} transitions: µs a call', rows, ('call', 'in memory', 'on disk', 'ratio'))
        rows = [saves_and_loads(name, base) for name in SAMPLERS]
        table('checkpoints', rows, ('sampler', 'MB', 'save / write', 'second / first', 'load / read', 'peak in save', 'peak in load'))
    finally: shutil.rmtree(base)


if __name__=='__main__': main()
