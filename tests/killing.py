"""A process that works on a memory on disk until it is killed, and the naive twin that knows what it must have left.

Run as a script it is the parent of such processes: for each line `seed folder sampler step` on its standard input it
forks one and prints its process id; when that one is gone it prints `gone`. Everything is imported and compiled before,
so a fork is at work at once. What a process does follows from its seed alone, and after each piece of work it writes a
line into the folder's log."""
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import SimpleStep, Transition

MAX_SZ, EPS = 300, .5
KINDS = 'simple', 'transition', 'frames'         # of the last kind observations are stored once
SAMPLERS = dict(uniform=Uniform, proportional=lambda: Proportional(eps=EPS, normalize='memory'), rank=RankBased)


def frame(k): return np.full((6, 6), k, np.int32)

def stack(k, odd=False):
    "The newest four frames of the stream of step k, seven steps apart; in some states they are strange to it"
    return np.stack([frame(-i if odd else i) for i in range(k - 21, k + 1, 7)])


def make_step(kind, k):
    "Step number k: every part of it says so"
    a, b = np.full(4, k, np.float32), np.full(4, k + 1, np.float32)
    if kind=='frames': a, b = stack(k, k % 5==0), stack(k + 7)
    if kind!='transition': return SimpleStep(a, k, b, False, False, float(k % 1000), 0., k % 7, 0, k, 0)
    return Transition(a, k, float(k % 1000), b, False, False)


def make_chunk(kind, first, m):
    steps = [make_step(kind, first + i) for i in range(m)]
    def column(values): return np.stack([np.asarray(v, np.float32 if isinstance(v, float) else None) for v in values])
    return Batch.of(type(steps[0])(*map(column, zip(*steps))))


def is_whole(kind, rows):
    "Does every row say of itself what its id says?"
    ids = rows.ids.numpy()
    if kind=='frames':
        want = [make_step(kind, k) for k in ids.tolist()]
        return all((a==o.state).all() and (b==o.next_state).all() and c==o.action and e==o.env_id for a, b, c, e, o in
                   zip(rows.state.numpy(), rows.next_state.numpy(), rows.action.tolist(), rows.env_id.tolist(), want))
    fine = (rows.action.numpy()==ids) & (rows.reward.numpy()==ids % 1000)
    fine &= (rows.state.numpy()==ids[:, None]).all(1) & (rows.next_state.numpy()==ids[:, None] + 1).all(1)
    return fine.all() and (kind!='simple' or (rows.env_id.numpy()==ids % 7).all())


def open_memory(folder, sampler, kind):
    dedup = 'frames' if kind=='frames' else None
    return ReplayMemory(MAX_SZ, SAMPLERS[sampler](), path=Path(folder)/'memory', seed=0, dedup=dedup)


WORK = {'add': .4, 'give': .1, 'chunk': .1, 'list': .05, 'given chunk': .05, 'update': .2, 'sample': .06, 'save': .03,
        'reopen': .01}

def plan(rng, n, first):
    "The next piece of work on a memory of ids `first` … `n − 1`: its name, and numbers"
    what = rng.choice(list(WORK), p=list(WORK.values()))
    if what in ('chunk', 'list', 'given chunk'):
        m = int(rng.choice([1, 5, 40, 299, 700], p=[.3, .3, .2, .1, .1]))
        return what, n, m, rng.integers(1, 50, size=m).astype(float)
    if what in ('update', 'sample', 'save', 'reopen') and n==first: what = 'add'
    if what=='update':
        ids = rng.integers(first, n, size=int(rng.choice([1, 30, 250])))
        return what, ids, None, rng.integers(1, 60, size=250).astype(float)
    return what, n, 1, rng.integers(1, 50, size=1).astype(float)


def work(seed, folder, sampler, kind):
    "Do one thing after the other, for ever"
    rng, log = np.random.default_rng(seed), os.open(Path(folder)/'log', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    def say(what): os.write(log, f'{what}\n'.encode())
    say('opening')
    memory = open_memory(folder, sampler, kind)
    say(f'open {memory.n_added}')
    number = 0
    while True:
        what, at, m, numbers = plan(rng, memory.n_added, memory.first_id)
        if what=='add': memory.add(make_step(kind, at))
        elif what=='give': memory.add(make_step(kind, at), priority=numbers[0])
        elif what=='chunk': memory.extend(make_chunk(kind, at, m))
        elif what=='list': memory.extend([make_step(kind, at + i) for i in range(m)])
        elif what=='given chunk': memory.extend(make_chunk(kind, at, m), numbers)
        elif what=='update': memory.update_priorities(at, numbers[:len(at)])
        elif what=='sample': memory.sample(min(8, len(memory)))
        elif what=='save': memory.save(Path(folder)/'checkpoint')
        else:
            memory.close()
            memory = open_memory(folder, sampler, kind)
        say(f'{number} {memory.n_added}')
        number += 1


class KillTwin:
    "What a memory must hold: priorities by id, with the largest so far"
    def __init__(self, sampler): self.sampler, self.n, self.p, self.largest, self.saved = sampler, 0, {}, 1., None
    @property
    def first(self): return max(0, self.n - MAX_SZ)

    def apply(self, piece):
        what, at, m, numbers = piece
        if what=='update':
            for i, e in zip(at.tolist(), numbers): self.p[i] = abs(e) + (EPS if self.sampler=='proportional' else 0.)
            self.largest = max(self.largest, *(self.p[i] for i in at.tolist()))
        elif what=='save': self.saved = self.n
        elif what not in ('sample', 'reopen'):
            for i in range(m):
                given = what in ('give', 'given chunk')
                if given: self.largest = max(self.largest, numbers[i])
                self.p[self.n] = numbers[i] if given else self.largest
                self.n += 1


def warm_up(folder, sampler, kind):
    memory = open_memory(folder, sampler, kind)
    for _ in range(2): memory.extend(make_chunk(kind, memory.n_added, 200))
    memory.extend(make_chunk(kind, memory.n_added, 5), np.ones(5))
    memory.extend([make_step(kind, memory.n_added)]*3)
    memory.add(make_step(kind, memory.n_added))
    memory.sample(8)
    memory.update_priorities(np.arange(200, 230), np.ones(30))
    memory.check_valid()
    memory.save(Path(folder)/'checkpoint')
    memory.close()
    open_memory(folder, sampler, kind).close()


def main():
    for kind in KINDS:                         # compile what the processes will need
        for sampler in SAMPLERS:
            with TemporaryDirectory() as folder: warm_up(folder, sampler, kind)
    print('ready', flush=True)
    for line in sys.stdin:
        seed, *rest = line.split()
        child = os.fork()
        if not child:
            try: work(int(seed), *rest)
            finally: os._exit(1)
        print(child, flush=True)
        os.waitpid(child, 0)
        print('gone', flush=True)


if __name__=='__main__': main()
