"""Forks: a child finds whole rows, reads them, and is told what it can't do. Beside threads that write, and from within a write."""
import copy
import linecache
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager

import numpy as np
import pytest

from fastrl_replay.memory import forks
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.replay import ExperienceReplay
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.storage.sequence_sampler import Sequence
from fastrl_replay.saving import save_state
from fastrl_replay.steps import SimpleStep

pytestmark = [pytest.mark.skipif(not hasattr(os, 'fork'), reason='there is no fork'),
              pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    "On a busy machine a fork may wait for longer than a second"
    monkeypatch.setattr(forks, 'PATIENCE', 60.)
    monkeypatch.setattr(forks, 'IN_ALL', 60.)


def step_of(k): return SimpleStep(np.full(4, k, np.float32), 0, np.full(4, k + 1, np.float32), k % 7==6, False, reward=k, env_id=0)
def picture(k): return np.random.default_rng(k % 5).integers(0, 255, (3, 16, 16), np.uint8)
def seen_at(k): return SimpleStep(picture(k), 0, picture(k + 1), k % 7==6, False, reward=k, env_id=0)

KINDS = dict(uniform=(step_of, dict), proportional=(step_of, lambda: dict(sampler=Proportional())), rank=(step_of, lambda: dict(sampler=RankBased())),
             sequence=(step_of, lambda: dict(sequence=Sequence(3), sampler=Proportional())),
             frames=(seen_at, lambda: dict(sampler=Proportional(), dedup='frames')), lz4=(seen_at, lambda: dict(dedup='frames', codec='lz4')))


def filled(kind='proportional', n=70, max_sz=50):
    make, options = KINDS[kind]
    memory = ReplayMemory(max_sz, seed=0, **options())
    for k in range(n): memory.add(make(k))
    if n: assert whole(memory)                                         # and all of it is compiled
    return memory


def in_child(work, seconds=60):
    "What `work()` returns in a forked child, or the traceback of what it raises"
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        said = b''
        try: said = pickle.dumps(work())
        except BaseException: said = pickle.dumps(traceback.format_exc())           # noqa: BLE001
        finally:
            os.write(into, said)
            os._exit(0)
    os.close(into)
    alarm = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
    alarm.start()
    try:
        with os.fdopen(out, 'rb') as file: said = file.read()
        os.waitpid(pid, 0)
    finally: alarm.cancel()
    assert said, 'the child hangs'
    return pickle.loads(said)


def error_of(call):
    "The error that a call raises, or what it returns, as a string"
    try: return repr(call())
    except Exception as e: return f'{type(e).__name__}: {e}'           # noqa: BLE001


def whole(memory):
    "Can it be read, and is it in order?"
    rows = memory.recent(len(memory))
    assert memory.check_valid() and rows.reward.long().tolist()==rows.ids.tolist()
    assert memory.sample(2) is not None and len(memory.episode(int(rows.ids[0]))) and memory.state_dict()
    return True


# --- a child reads, and does not write -------------------------------------------------------------------------------
WRITES = dict(
    add=lambda m, make: m.add(make(70)), add_with_a_priority=lambda m, make: m.add(make(70), 2.),
    extend=lambda m, make: m.extend([make(70), make(71)]), update_priorities=lambda m, make: m.update_priorities([60], [9.]),
    load_state_dict=lambda m, make: m.load_state_dict(m.state_dict()), from_a_batch=lambda m, make: m.fetch([60, 61]).update_priorities([9., 9.]),
    a_method_known_before=lambda m, make: m.before(make(70)), restore=lambda m, make: m.restore(m.saved()[0], [m.saved()[1].get(0)]))


@pytest.mark.parametrize('kind', KINDS)
def test_a_child_reads_a_memory_in_ram_and_does_not_write_to_it(kind):
    "`add` returned an id, and the row was lost when the child ended"
    memory, make = filled(kind), KINDS[kind][0]
    memory.before = memory.add                                         # bound before the fork
    def work():
        before = memory.n_added, memory.first_id, memory.recent(50).reward.tolist(), memory.n_stale
        said = {name: error_of(lambda: write(memory, make)) for name, write in WRITES.items()}
        after = memory.n_added, memory.first_id, memory.recent(50).reward.tolist(), memory.n_stale
        return said, before==after and whole(memory), memory.close(), error_of(lambda: len(memory))
    said, unchanged, _, closed = in_child(work)
    for name, text in said.items():
        assert text.startswith('RuntimeError') and 'forked' in text and 'copy.deepcopy' in text, f'{name}: {text}'
    assert unchanged and 'was closed' in closed
    assert whole(memory) and memory.add(make(70))==70                  # here nothing has changed


def test_an_empty_memory_is_not_written_to_in_a_child():
    memory = filled(n=0)
    empty = memory.state_dict()
    calls = (lambda: memory.add(step_of(0)), lambda: memory.extend([step_of(0)]), lambda: memory.load_state_dict(empty))
    def work(): return [error_of(o) for o in calls] + [len(memory), memory.layout, error_of(lambda: memory.sample(1)), repr(memory)]
    *said, n, layout, sample, _ = in_child(work)
    assert all('forked' in o for o in said) and (n, layout)==(0, None) and 'empty' in sample


@pytest.mark.parametrize('kind', KINDS)
def test_a_copy_in_a_child_is_its_own(kind):
    "By copy, pickle, folder and state; and what a child has made itself"
    memory, make = filled(kind), KINDS[kind][0]
    def work():
        fresh = ReplayMemory(50, seed=0, **KINDS[kind][1]())
        fresh.load_state_dict(memory.state_dict())
        copies = [copy.deepcopy(memory), copy.copy(memory), pickle.loads(pickle.dumps(memory)), fresh]
        done = [o.add(make(70))==70 and whole(o) for o in copies]
        return done, in_child(lambda: [error_of(lambda: o.add(make(71))) for o in copies])
    done, in_its_child = in_child(work)
    assert done==[True]*4 and all('forked' in o for o in in_its_child)


def test_a_pipe_in_a_child_says_so_too():
    replay = ExperienceReplay([step_of(k) for k in range(30)], bs=4, max_sz=20, seed=0)
    it = iter(replay)
    for _ in range(5): next(it)
    def work(): return error_of(lambda: next(it)), error_of(lambda: replay.add(step_of(9))), len(replay.sample())
    pulled, added, n = in_child(work)
    assert 'forked' in pulled and 'forked' in added and n==4
    assert len(list(it))==22


# --- beside threads ---------------------------------------------------------------------------------------------------
@contextmanager
def beside(*works):
    "Threads that do these works again and again"
    stop, raised = threading.Event(), []
    def run(work):
        try:
            while not stop.is_set(): work()
        except BaseException as e: raised.append(e)                    # noqa: BLE001
    threads = [threading.Thread(target=run, args=(o,)) for o in works]
    try:
        for t in threads: t.start()
        yield
    finally:
        stop.set()
        for t in threads: t.join()
    if raised: raise raised[0]


def works_of(memory, kind):
    make = KINDS[kind][0]
    def extend():
        with memory.lock:                                              # the ids that the rows hold
            n = memory.n_added
            memory.extend([make(n + k) for k in range(20)])
    def draw(): memory.sample(4)
    return extend, draw


@pytest.mark.parametrize('kind', KINDS)
def test_forks_while_other_threads_write_and_draw(kind):
    "The lock was new and the state half-written"
    memory = filled(kind)
    before = sys.getswitchinterval()
    def work():
        own = copy.deepcopy(memory)
        return whole(memory) and own.add(KINDS[kind][0](own.n_added))==memory.n_added and whole(own)
    with beside(*works_of(memory, kind)):
        sys.setswitchinterval(1e-5)
        try:
            for _ in range(15): assert in_child(work) is True
        finally: sys.setswitchinterval(before)
    assert whole(memory)


def test_a_fork_waits_until_a_write_is_complete():
    "One that is under way, and is interrupted in its middle"
    memory, inside, go = filled('uniform'), threading.Event(), threading.Event()
    class Slow:
        "Read in the middle of a write"
        def __array__(self, dtype=None, copy=None):
            inside.set()
            go.wait(.3)
            return np.zeros(4, np.float32)
    def write():
        with memory.lock: memory.extend([step_of(70), step_of(71)._replace(state=Slow())])
    thread = threading.Thread(target=write)
    thread.start()
    inside.wait()
    n, ok = in_child(lambda: (memory.n_added, memory.check_valid()))
    thread.join()
    assert (n, ok)==(72, True) and memory.n_added==72


def test_a_memory_that_stays_busy_cannot_be_used_in_a_child(monkeypatch):
    "The others can; and in the parent it is as before"
    monkeypatch.setattr(forks, 'PATIENCE', .2)
    memories = [filled() for _ in range(5)]
    ready, go = threading.Event(), threading.Event()
    def hold():
        with memories[1].lock, memories[3].lock:
            ready.set()
            go.wait()
    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait()
    def work():
        said = [[error_of(call) for call in (lambda: m.sample(2), lambda: m.add(step_of(1)), lambda: m.n_added, lambda: len(m), lambda: m.recent(1),
                                             lambda: copy.deepcopy(m), lambda: m.update_priorities([60], [1.]), m.state_dict)] for m in (memories[1], memories[3])]
        return said, [whole(memories[k]) for k in (0, 2, 4)], [m.close() for m in memories]
    begun = time.monotonic()
    said, others, _ = in_child(work)
    assert time.monotonic() - begun > .3
    go.set()
    thread.join()
    for calls in said:
        for text in calls: assert text.startswith('RuntimeError') and 'another thread' in text and 'fork' in text, text
    assert others==[True]*3 and all(whole(m) for m in memories)
    assert in_child(lambda: [whole(m) for m in memories])==[True]*5


def test_many_busy_memories_do_not_hold_a_fork_up(monkeypatch):
    monkeypatch.setattr(forks, 'PATIENCE', .2)
    monkeypatch.setattr(forks, 'IN_ALL', .5)
    memories = [filled() for _ in range(30)]
    ready, go = threading.Event(), threading.Event()
    def hold():
        for m in memories[:29]: m.lock.acquire()
        ready.set()
        go.wait()
        for m in memories[:29]: m.lock.release()
    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait()
    waits, order = [], []
    class Timed:
        def __init__(self, lock): self.lock = lock
        def acquire(self, timeout):
            waits.append(timeout)
            order.append(self)
            return self.lock.acquire(timeout=timeout)
        def release(self): self.lock.release()
    for m in memories: m.lock = Timed(m.lock)
    assert in_child(lambda: whole(memories[29])) is True               # one that is free is had without waiting
    go.set()
    thread.join()
    assert len(waits)==30 and sum(waits) < .8 and waits[-1]==0
    assert order==[m.lock for m in memories], 'forks wait in different orders'


def test_forks_at_the_same_time_do_not_wait_for_each_other():
    "From several threads, with memories that are made and dropped meanwhile"
    memories, said = [filled(k % 2 and 'uniform' or 'rank') for k in range(6)], []
    def fork():
        if len(said) < 40: said.append(in_child(lambda: all(whole(m) for m in memories)))
    def make_and_drop():
        made = filled(n=10)
        del made
        time.sleep(.001)
    def write(): [m.add(step_of(m.n_added)) for m in memories]
    begun = time.monotonic()
    with beside(fork, fork, fork, make_and_drop, write):
        while len(said) < 40 and time.monotonic() < begun + 60: time.sleep(.01)
    assert len(said) >= 40 and set(said)=={True}
    assert all(m.check_valid() for m in memories)


def test_a_memory_made_during_a_fork_is_not_taken_for_whole():
    "Nobody has waited for it"
    made = []
    class Late:
        "Asked last; another memory is made then"
        def acquire(self, timeout):
            made.append(filled())
            return self.lock.acquire(timeout=timeout)
        def release(self): self.lock.release()
    last, late = filled(), Late()
    late.lock, last.lock = last.lock, late
    said, fine = in_child(lambda: (error_of(lambda: made[0].sample(2)), whole(last)))
    last.lock = late.lock
    assert 'another thread' in said and fine
    assert whole(made[0]) and whole(last)


# --- from within ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('method,kind', [('add', 'proportional'), ('extend', 'frames'), ('extend', 'sequence'), ('sample', 'rank')])
def test_a_fork_at_any_line_of_a_call_of_its_own_thread(method, kind):
    "As a signal handler may fork: the child finds what an interrupt would leave, and can read it"
    make = KINDS[kind][0]
    calls = dict(add=lambda m: m.add(make(m.n_added)), extend=lambda m: m.extend([make(m.n_added + k) for k in range(3)]), sample=lambda m: m.sample(4))
    memory, said, count = filled(kind), [], [0]
    def ok():
        rows = memory.recent(len(memory))
        return memory.check_valid() and rows.reward.long().tolist()==rows.ids.tolist() and len(memory.sample(2))==2
    def trace(frame, event, arg):
        if 'fastrl_replay' not in frame.f_code.co_filename: return None
        count[0] += event=='line'
        if event=='line' and count[0] % 5==0:
            sys.settrace(None)
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            said.append((line, in_child(ok)))
            sys.settrace(trace)
        return trace
    sys.settrace(trace)
    try: calls[method](memory)
    finally: sys.settrace(None)
    assert len(said) >= 2
    for line, what in said: assert what is True, f'at {line}: {what}'
    assert whole(memory)


def test_a_fork_with_a_lock_of_ones_own():
    "Between two calls, in a block that holds them together"
    memory = filled()
    with memory.lock:
        memory.add(step_of(70))
        assert in_child(lambda: whole(memory)) is True
        memory.add(step_of(71))
    through = []
    thread = threading.Thread(target=lambda: through.append(memory.add(step_of(72))))
    thread.start()
    thread.join(20)
    assert through==[72]                                               # the lock is free again


def test_ctrl_c_while_a_fork_waits():
    "The fork goes on without that memory, and nobody waits forever"
    memories = [filled() for _ in range(3)]
    class Struck:
        def acquire(self, timeout): raise KeyboardInterrupt
        def release(self): raise RuntimeError
    lock, memories[1].lock = memories[1].lock, Struck()
    reported, before = [], sys.unraisablehook
    sys.unraisablehook = reported.append
    try: first, second, third = in_child(lambda: [error_of(lambda: whole(m)) for m in memories])
    finally: sys.unraisablehook = before
    memories[1].lock = lock
    assert first=='True' and 'another thread' in second and 'another thread' in third
    assert [o.exc_type for o in reported]==[KeyboardInterrupt]
    through = []
    thread = threading.Thread(target=lambda: through.extend(m.add(step_of(70)) for m in memories))
    thread.start()
    thread.join(20)
    assert through==[70]*3


def test_a_memory_on_disk_is_not_waited_for(tmp_path):
    "It is of no use in a child, whoever is writing to it"
    memory, ready, go = ReplayMemory(20, path=tmp_path), threading.Event(), threading.Event()
    memory.add(step_of(0))
    def hold():
        with memory.lock:
            ready.set()
            go.wait()
    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait()
    begun = time.monotonic()
    said = in_child(lambda: (error_of(lambda: memory.sample(1)), error_of(lambda: memory.add(step_of(1))), memory.close()))
    took = time.monotonic() - begun
    go.set()
    thread.join()
    assert all('in another process' in o for o in said[:2]) and took < forks.PATIENCE
    memory.close()


def test_a_child_saves_what_it_reads(tmp_path):
    memory = filled()
    def work():
        state, rows = memory.saved()
        return memory.save(tmp_path/'a') > 0 and save_state(tmp_path/'b', dict(memory=state), 'memory', rows) > 0
    assert in_child(work) is True
    for o in 'ab': assert ReplayMemory.load(tmp_path/o).recent(50).reward.tolist()==memory.recent(50).reward.tolist()
    assert memory.save(tmp_path/'a') > 0 and whole(ReplayMemory.load(tmp_path/'a'))
