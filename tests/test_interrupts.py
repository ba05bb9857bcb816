"""Ctrl-C at any moment, threads, and forks: nobody waits forever, and what is stored holds together."""
import random
import signal
import threading
from typing import NamedTuple

import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import SimpleStep, Transition
from faults import PACKAGE, RELEASES, interrupted

SIGNALS = 600            # for each method; every one of them strikes somewhere in a tight loop
STEP = Transition(np.zeros(4, np.float32), 1, 1., np.zeros(4, np.float32), False, False)
CHUNK = Transition(np.zeros((8, 4), np.float32), np.ones(8, int), np.ones(8), np.zeros((8, 4), np.float32), np.zeros(8, bool), np.zeros(8, bool))
SAMPLERS = dict(uniform=lambda: Uniform(replace=True), proportional=Proportional, rank=RankBased)
METHODS = dict(
    add=lambda m: m.add(STEP),
    add_with_a_priority=lambda m: m.add(STEP, 2.),
    extend=lambda m: m.extend(CHUNK),
    extend_with_priorities=lambda m: m.extend(CHUNK, np.arange(1., 9.)),
    extend_a_list=lambda m: m.extend([STEP, STEP, STEP]),
    sample=lambda m: m.sample(4),
    update=lambda m: m.update_priorities(np.arange(m.first_id, m.first_id + 4), np.arange(4.)),
    fetch=lambda m: m.fetch([m.first_id]),
    recent=lambda m: m.recent(3),
    episode=lambda m: m.episode(m.n_added - 1),
    state=lambda m: m.state_dict(),
    check_valid=lambda m: m.check_valid(),
)


class Struck(Exception): pass


def filled(sampler, max_sz=64):
    memory = ReplayMemory(max_sz, SAMPLERS[sampler](), seed=0)
    for _ in range(10): memory.extend(CHUNK)
    for method in METHODS.values(): method(memory)          # all is compiled before the signals come
    return memory

def storm(call, n, rng):
    "Call in a tight loop, struck by `n` signals at random moments; how many of them reached the loop"
    def strike(*_): raise Struck
    before, hits = signal.signal(signal.SIGALRM, strike), 0
    try:
        for _ in range(n):
            try:
                # again after a second: Python drops what is raised while it finalizes an object
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-6, 4e-4), 1.)
                while True: call()
            except Struck: hits += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return hits

def reached(memory):
    "Does a second thread get through?"
    through = []
    thread = threading.Thread(target=lambda: through.append(len(memory.sample(2))), daemon=True)
    thread.start()
    thread.join(20)
    return bool(through)


@pytest.mark.parametrize('sampler', SAMPLERS)
@pytest.mark.parametrize('method', METHODS)
def test_interrupts_in_a_tight_loop(method, sampler):
    "A lock taken before the `try`, as by a decorator in Python, is left taken by some, and every other thread waits forever"
    memory, rng = filled(sampler), random.Random(1)
    for _ in range(3):
        assert storm(lambda: METHODS[method](memory), SIGNALS//3, rng)==SIGNALS//3
        assert reached(memory), 'another thread waits forever'
        assert memory.check_valid()
    assert len(memory.sample(64))==64
    ids = memory.extend(CHUNK)
    assert memory.recent(8).ids.tolist()==ids.tolist() and memory.episode(int(ids[-1])).ids[-1]==ids[-1]


@pytest.mark.parametrize('sampler', SAMPLERS)
def test_an_exception_at_every_line_of_a_write(sampler):
    "As Ctrl-C would raise it: between any two lines, of the memory, its storage and its sampler"
    for call in (METHODS[o] for o in ('add', 'add_with_a_priority', 'extend', 'extend_with_priorities', 'sample', 'update')):
        memory, k = filled(sampler), 0
        while interrupted(lambda: call(memory), k, PACKAGE, events=('line',), leave_out=RELEASES):
            assert reached(memory), f'line {k}: another thread waits forever'
            assert memory.check_valid(), f'line {k}'
            k += 1
        assert k > 5


@pytest.mark.parametrize('then', ['add', 'extend'])
def test_an_interrupted_call_leaves_no_priorities_for_the_rows_that_follow_at_any_line(then):
    "What was given for rows that never came in is forgotten"
    line, kept, gone = 0, 0, 0
    while True:
        memory = ReplayMemory(9, Proportional(eps=0.), seed=0)
        memory.extend([STEP, STEP])
        if not interrupted(lambda o=memory: o.extend([STEP, STEP], [7., 8.]), line, PACKAGE, events=('line',), leave_out=RELEASES): break
        n = memory.n_added
        METHODS['add' if then=='add' else 'extend_a_list'](memory)
        new = [1. if n==2 else 8.]*(memory.n_added - n)
        assert memory.sampler.priorities.tolist()==[1., 1.] + [7., 8.]*(n==4) + new, f'line {line}'
        line, kept, gone = line + 1, kept + (n==4), gone + (n==2)
    assert gone > 20 and kept


class Told(NamedTuple):
    state: float
    word: str


@pytest.mark.parametrize('durable', [False, True])
def test_strings_are_whole_after_an_interrupt_at_any_line(durable, tmp_path):
    "In the memory, when the same ones come again, and in what is saved"
    first, then = [Told(0., 'a'), Told(1., 'b')], [Told(2., 'c'), Told(3., 'd'), Told(4., 'c'), Told(5., 'e')]
    for line in range(0, 1000, 3 if durable else 1):
        memory = ReplayMemory(20, seed=0, path=tmp_path/f'{line}' if durable else None)
        memory.extend(first)
        again = interrupted(lambda o=memory: o.extend(then), line, PACKAGE, events=('line',), leave_out=RELEASES)
        assert memory.check_valid() and memory.n_added in (2, 6)
        if memory.n_added==2: memory.extend(then)
        memory.extend(then[::-1])
        words = [o.word for o in first + then + then[::-1]]
        assert memory.check_valid() and memory.recent(10).word==words, f'line {line}'
        memory.save(tmp_path/'saved')
        assert ReplayMemory.load(tmp_path/'saved').recent(10).word==words, f'line {line}'
        memory.close()
        if not again: break
    assert line > 50


def test_links_in_a_circle_end():
    "Records whose links were damaged: a walk along them ends, and says nothing that is not so"
    def step(i): return SimpleStep(np.zeros(2, np.float32), 0, np.zeros(2, np.float32), step_n=i)
    for prev, after in ((0, 0), (-1, -1), (1, -5), (2**31 - 1, 2**31 - 1), (-2**31, -2**31)):
        memory = ReplayMemory(16, seed=0)
        memory.extend([step(i) for i in range(16)])
        memory._shelf.storage.records['_prev'], memory._shelf.storage.records['_next'] = prev, after
        assert 1 <= len(memory.episode(8)) <= 16
        assert len(memory.next(range(16)))==16
        with pytest.raises(AssertionError): memory.check_valid()
