"""Memories on disk and checkpoints, compared with memory and plain files: `python benchmarks/disk.py [FOLDER]`

One million CartPole transitions, and 20,000 of Atari whose frames are stored once. On disk against in memory: the same
calls in turn, page cache warm. A save against writing and syncing as many bytes with numpy, a load against reading
them; both are the medians of interleaved repetitions. Peaks are measured in processes of their own, from a start where
all kernels are compiled: the largest resident set, as Linux notes it, over what a memory takes once it is filled. That
is 1.00 for a save that needs nothing, and for a load that needs no more than it leaves.
"""
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from timing import interleaved, machine, pin, repeat, table

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import Transition

ROWS, REPS, SCREENS = 1_000_000, 9, 20_000
SAMPLERS = dict(uniform=Uniform, proportional=Proportional, rank=RankBased)
RNG = np.random.default_rng(0)


def transitions(m):
    "A chunk of m CartPole transitions, as arrays"
    state, next_state, no = RNG.random((m, 4), np.float32), RNG.random((m, 4), np.float32), np.zeros(m, bool)
    return Transition(state, RNG.integers(2, size=m), np.ones(m, np.float32), next_state, no, no)


def filled(sampler, rows=ROWS, **kw):
    "A memory, wrapped around, with priorities"
    memory, chunk = ReplayMemory(rows, sampler(), seed=0, **kw), Batch.of(transitions(64))
    while memory.n_added <= rows: memory.extend(chunk)
    memory.update_priorities(np.arange(memory.first_id, memory.n_added), RNG.random(rows))
    memory.sample(32)                  # which makes what draws need
    return memory


def steps_and_batches(name, folder):
    "µs of the calls that a run makes, in memory and on disk"
    ram, disk = filled(SAMPLERS[name]), filled(SAMPLERS[name], path=folder)
    one, chunk = Batch.of(transitions(1))[0], Batch.of(transitions(64))
    ages, td = ROWS//2 + RNG.permutation(ROWS//4)[:256], RNG.random(256)
    calls = {'add': (lambda o: o.add(one), 20_000), 'extend(64)': (lambda o: o.extend(chunk), 2000),
             'sample(32)': (lambda o: o.sample(32), 3000), 'sample(256)': (lambda o: o.sample(256), 1000),
             'update_priorities(256)': (lambda o: o.update_priorities(o.n_added - ages, td), 500)}
    spent = interleaved({(call, where): (repeat(f, memory), n) for call, (f, n) in calls.items()
                         for where, memory in (('ram', ram), ('disk', disk))}, 9)
    disk.close()
    pairs = {call: (spent[call, 'ram'], spent[call, 'disk']) for call in calls}
    return [(f'{name} {call}', f'{a:.2f}', f'{b:.2f}', f'{b/a:.2f}') for call, (a, b) in pairs.items()]


def atari(n):
    "Steps of 84 × 84 frames, four in a stack, one new in each"
    frames = RNG.integers(256, size=(n + 4, 84, 84), dtype=np.uint8)
    return [Transition(frames[k:k + 4].copy(), k % 6, 1., frames[k + 1:k + 5].copy(), False, False) for k in range(n)]


def frames_in_memory_and_on_disk(folder):
    "The same for a memory that stores each frame once"
    steps, more = atari(1024), atari(64)
    memories = dict(ram=ReplayMemory(SCREENS, seed=0), disk=ReplayMemory(SCREENS, seed=0, path=folder))
    for o in memories.values():
        for step in islice(cycle(steps), SCREENS*5//4): o.add(step)            # one by one: one stream
    chunk = Batch.of_steps(more)
    turn = cycle(steps)        # shared, so that neither finds its steps in the cache because the other had them
    calls = {'add': (lambda o: o.add(next(turn)), 1000), 'extend(64)': (lambda o: o.extend(chunk), 60),
             'sample(32)': (lambda o: o.sample(32), 300), 'sample(256)': (lambda o: o.sample(256), 30)}
    work = {(call, k): (repeat(f, o), n) for call, (f, n) in calls.items() for k, o in memories.items()}
    spent = interleaved(work, 15)
    memories['disk'].close()
    pairs = {call: (spent[call, 'ram'], spent[call, 'disk']) for call in calls}
    return [(call, f'{a:.2f}', f'{b:.2f}', f'{b/a:.2f}') for call, (a, b) in pairs.items()]


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


def renew(memory, part):
    "New transitions, and new priorities here and there, `part` of the memory each"
    n = len(memory)//part
    memory.extend(Batch.of(transitions(n)))
    memory.update_priorities(RNG.choice(np.arange(memory.first_id, memory.n_added), n, replace=False), RNG.random(n))


def resident(what='VmRSS'):
    "Bytes: the resident set now (VmRSS), or the largest since `forget` (VmHWM)"
    with open('/proc/self/status') as f: return 1024*int(re.search(what + r':\s+(\d+) kB', f.read())[1])


def forget():
    "Bytes resident, now that what was freed is given back; the largest begins anew"
    ctypes.CDLL(None).malloc_trim(0)
    with open('/proc/self/clear_refs', 'w') as f: f.write('5')
    return resident()


def peak_of_saves(name, folder):
    "Bytes that a filled memory takes, and at most during two saves of it"
    rehearse(name, folder)
    before = forget()
    memory = filled(SAMPLERS[name])
    own, more = forget() - before, []
    for _ in range(2):
        before = forget()
        memory.save(folder/'saved')
        more.append(resident('VmHWM') - before)
        renew(memory, 100)
    return dict(own=own, most=own + max(more))


def peak_of_a_load(name, folder):
    "Bytes taken at most during a load"
    rehearse(name, folder)
    before = forget()
    memory = ReplayMemory.load(folder/'saved')
    return dict(most=resident('VmHWM') - before, n=len(memory))


def rehearse(name, folder):
    "All that is done, in small, so that everything is compiled"
    memory = filled(SAMPLERS[name], 1000)
    for _ in range(2):
        memory.save(folder/'small')
        renew(memory, 10)
    ReplayMemory.load(folder/'small')


PEAKS = dict(save=peak_of_saves, load=peak_of_a_load)


def peaks(name, folder):
    "The peaks in a save and in a load, over what the memory takes"
    def measured(what):
        args = [sys.executable, __file__, '--peak', what, name, str(folder)]
        ran = subprocess.run(args, capture_output=True, text=True, check=True)
        return json.loads(ran.stdout)
    saving, loading = measured('save'), measured('load')
    return f'{saving["most"]/saving["own"]:.2f}', f'{loading["most"]/saving["own"]:.2f}'


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
    renew(memory, 100)
    second = memory.save(folder/'saved')
    ratios = f'{save/write:.2f}', f'{second/first:.3f}', f'{load/read:.2f}'
    return name, f'{first/1e6:.1f}', *ratios, *peaks(name, folder/'peaks')


def main():
    pin()
    base = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    print(machine())
    try:
        rows = [row for name in SAMPLERS for row in steps_and_batches(name, base/name)]
        table(f'{ROWS:,} transitions: µs a call', rows, ('call', 'in memory', 'on disk', 'ratio'))
        rows = frames_in_memory_and_on_disk(base/'frames')
        title = f'{SCREENS:,} Atari transitions, each frame once: µs a call'
        table(title, rows, ('call', 'in memory', 'on disk', 'ratio'))
        rows = [saves_and_loads(name, base) for name in SAMPLERS]
        columns = 'sampler', 'MB', 'save / write', 'second / first', 'load / read', 'peak in save', 'peak in load'
        table('checkpoints', rows, columns)
    finally: shutil.rmtree(base)


if __name__=='__main__':
    if sys.argv[1:2]==['--peak']: print(json.dumps(PEAKS[sys.argv[2]](sys.argv[3], Path(sys.argv[4])/sys.argv[3])))
    else: main()
