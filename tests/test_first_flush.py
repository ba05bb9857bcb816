"""The first `flush` and the first `close` of a memory on disk, killed before and after each call to the system: it opens again, whole.

A scheduler sends SIGTERM, on which a program flushes and closes, and soon after SIGKILL."""
import builtins
import mmap
import os
import signal

import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from data.make_pickles import spoken
from lasting import KINDS, Teller, contents, ids_of, step_of
from lasting import make as make_kind
from test_folders import CALLS

def filled(memory, steps):
    for o in steps: memory.add(o)
    return memory
def of(kind): return lambda path: filled(make_kind(kind, path), [step_of(kind, k) for k in range(30)])
def other(**options): return lambda path: filled(ReplayMemory(20, path=path, seed=1, **options), [step_of('uniform', k) for k in range(30)])
def drawn(path):
    memory = other(max_draws=2)(path)
    for _ in range(3): memory.sample(8)
    return memory
def dropped(path):
    memory = other(sampler=Proportional())(path)
    memory.drop([12, 15])
    return memory
def cleared(path):
    memory = other()(path)
    memory.clear()
    return filled(memory, [step_of('uniform', k) for k in range(30, 35)])
def texts(path): return filled(ReplayMemory(20, path=path), [spoken(k) for k in range(30)])

MEMORIES = {k: of(k) for k in KINDS} | dict(
    windows=other(windows={'reward': (0, 1)}), draws=drawn, dropped=dropped, cleared=cleared, texts=texts, first_step=lambda path: filled(make_kind('uniform', path), [step_of('uniform', 0)]))


def open_again(kind, path): return ReplayMemory.open(path, sampler=Teller() if kind=='own' else None)


class Killer:
    "Ends this process before the call to the system of a number, and counts them"
    def __init__(self, number): self.number, self.n = number, 0
    def __call__(self):
        self.n += 1
        if self.n==self.number: os.kill(os.getpid(), signal.SIGKILL)
    def around(self, f):
        def call(*args, **kw):
            self()
            return f(*args, **kw)
        return call
    def watch(self):
        for name in CALLS: setattr(os, name, self.around(getattr(os, name)))
        builtins.open, killer = self.around(builtins.open), self
        class Mapped(mmap.mmap):
            def flush(self, *_): killer()      # to a kill, the pages are written
        mmap.mmap = Mapped


def died(number, path, make, work):
    "Make a memory in a child, and kill that before the call of this number that `work` makes; were there as many?"
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.fsync, killer = lambda fd: None, Killer(0)
            killer.watch()                     # mappings are made with the class that counts
            memory = make(path)
            killer.number, killer.n = number, 0
            work(memory)
            killer()                           # after the last call
            code = 0
        finally: os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status)==0, 'the child failed'
    return os.WIFSIGNALED(status)


def told(kind, memory): return contents(memory), memory.windows, memory.max_draws, memory.usage()['n_dropped'], memory.sampler.options()

@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@pytest.mark.parametrize('what', ['flush', 'close'])
@pytest.mark.parametrize('kind', MEMORIES)
def test_killed_at_every_call_to_the_system_of_the_first_one(kind, what, tmp_path, quick):
    make = MEMORIES[kind]
    memory = make(tmp_path/'whole')
    expected = told(kind, memory)
    memory.close()
    for number in range(1, 200):
        path = tmp_path/str(number)
        killed = died(number, path, make, lambda o: getattr(o, what)())
        if not killed: break
        with open_again(kind, path) as again:
            assert told(kind, again)==expected
            again.flush()                      # and what was left half-done is in nobody's way
        with open_again(kind, path) as again: assert told(kind, again)==expected and len(ids_of(again))
    assert 8 < number < 199, f'{number} calls'
