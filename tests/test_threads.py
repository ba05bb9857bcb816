"""Beside other threads: a copy of a memory is of one moment, its length is a length, and what is being closed says so."""
import copy
import io
import itertools
import pickle
import sys
import threading
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.hindsight import HindsightReplay
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.storage.sequence_sampler import Sequence


class Told(NamedTuple):
    "A step that knows its id, which is its reward, and in the first number of its state"
    state: Any
    action: Any
    reward: Any
    next_state: Any
    terminated: Any
    truncated: Any
    env_id: Any


def vector(id): return np.full(3, id, np.float32)
def picture(id): return np.random.default_rng(id % 7).integers(0, 255, (3, 20, 20), np.uint8)
def wide(id): return np.full(200, id, np.float32)
def goals(id): return dict(achieved_goal=np.float32([id, 0]), desired_goal=np.float32([-1, id % 5]), observation=np.float32([id]))

# Of each kind: what an observation is, whether rows have priorities, the options of its memory
KINDS = dict(
    uniform=(vector, False, dict),
    proportional=(vector, True, lambda: dict(sampler=Proportional(normalize='memory'))),
    rank=(vector, True, lambda: dict(sampler=RankBased())),
    sequence=(vector, False, lambda: dict(sequence=Sequence(4, stride=1), sampler=Proportional())),
    lz4=(picture, True, lambda: dict(sampler=Proportional(), dedup='frames', codec='lz4')),
    frames=(picture, False, lambda: dict(dedup='frames')),
    next_state=(wide, True, lambda: dict(sampler=Proportional(), dedup='next_state')),
    goals=(goals, True, lambda: dict(sampler=Proportional())))


def step_of(observe, id, ends=.1):
    rng = np.random.default_rng(id)
    return Told(observe(id), 0, float(id), observe(id + 1), bool(rng.random() < ends), False, int(rng.integers(3)))

def priority_of(id): return id % 1000 + 1.


def priorities_by_id(memory):
    ids = np.arange(memory.first_id, memory.n_added)
    return ids, memory.sampler.priorities[ids % memory.max_sz]


def check_whole(memory, observe, has_priorities):
    "Are these the rows of one moment, with their own ids, contents and priorities?"
    assert memory.check_valid() and len(memory)==memory.max_sz
    rows = memory.recent(len(memory))
    ids = rows.ids.numpy()
    assert rows.reward.long().tolist()==ids.tolist(), 'rows under the ids of others'
    for id, step in zip(ids[::17].tolist(), list(rows)[::17]): assert_same(step.state, observe(id))
    if has_priorities:
        ids, priorities = priorities_by_id(memory)
        wrong = priorities!=priority_of(ids)
        assert not wrong.any(), f'{wrong.sum()} priorities of other rows'
    assert memory.sample(4) and memory.add(step_of(observe, memory.n_added))==memory.n_added - 1


def assert_same(a, b):
    if not isinstance(b, dict): return np.testing.assert_array_equal(a, b)
    for k in b: assert_same(a[k], b[k])


@contextmanager
def beside(*works):
    "Threads that do these works again and again, and are often interrupted; what they raise is raised here"
    before, stop, raised = sys.getswitchinterval(), threading.Event(), []
    def run(work):
        try:
            while not stop.is_set(): work()
        except BaseException as e: raised.append(e)        # noqa: BLE001
    threads = [threading.Thread(target=run, args=(o,)) for o in works]
    sys.setswitchinterval(1e-5)
    try:
        for t in threads: t.start()
        yield
    finally:
        stop.set()
        sys.setswitchinterval(before)
        for t in threads: t.join()
    if raised: raise raised[0]


def writer(memory, observe, has_priorities):
    "A work: steps one by one and in chunks, with their priorities"
    made = {}
    def step(id):
        if id not in made: made[id] = step_of(observe, id)
        return made[id]
    numbers = itertools.count()
    def write():
        n = memory.n_added
        if next(numbers) % 3: memory.add(step(n), priority_of(n) if has_priorities else None)
        else: memory.extend([step(n + k) for k in range(5)], [priority_of(n + k) for k in range(5)] if has_priorities else None)
    return write


def filled(kind, max_sz=100):
    observe, has_priorities, options = KINDS[kind]
    memory = ReplayMemory(max_sz, seed=0, **options())
    write = writer(memory, observe, has_priorities)
    while memory.n_added < max_sz + 40: write()
    memory.sample(2)
    return memory, write


COPIES = dict(deepcopy=copy.deepcopy, pickle=lambda o: pickle.loads(pickle.dumps(o)))


@pytest.mark.parametrize('how', COPIES.values(), ids=COPIES)
@pytest.mark.parametrize('kind', KINDS)
def test_a_copy_beside_a_writer_is_of_one_moment(kind, how):
    "Rows, ids and priorities were read at different times: 8 of 24 pickles had the priorities of other rows"
    observe, has_priorities, _ = KINDS[kind]
    memory, write = filled(kind)
    with beside(write): copies = [how(memory) for _ in range(6)]
    for other in copies: check_whole(other, observe, has_priorities)
    assert memory.check_valid()


@pytest.mark.parametrize('kind', KINDS)
def test_what_is_written_while_a_memory_is_pickled_is_not_in_the_pickle(kind):
    "Not even if a thousand steps come in between two of its parts"
    observe, has_priorities, _ = KINDS[kind]
    memory, write = filled(kind)
    class Slow(pickle.Pickler):
        parts = 0
        def persistent_id(self, part):
            if not isinstance(part, (np.ndarray, dict, list, tuple)): return
            self.parts += 1
            for _ in range(20): write()
    n, file = memory.n_added, io.BytesIO()
    slow = Slow(file)
    slow.dump(memory)
    other = pickle.loads(file.getvalue())
    assert slow.parts > 10 and memory.n_added > n + 200 and other.n_added==n
    check_whole(other, observe, has_priorities)


def reached(achieved, desired, info): return np.where((achieved==desired).all(1), 0., -1.)


@pytest.mark.parametrize('how', COPIES.values(), ids=COPIES)
def test_a_copy_of_a_hindsight_replay_beside_a_writer(how):
    "Its index of episodes belongs to the memory that it is copied with"
    replay = HindsightReplay([], reached, bs=8, max_sz=300, seed=0)
    write = writer(replay.memory, goals, False)
    while replay.memory.n_added < 340: write()
    replay.sample()
    def both(): write(), replay.sample()
    with beside(both): copies = [how(replay) for _ in range(6)]
    for other in copies:
        index = other.memory.episode_index()
        assert other.memory is not replay.memory and index is not replay.memory.episode_index()
        check_whole(other.memory, goals, False)
        assert other.sample() and index.check_valid()


class Counting:
    "A sampler of the user's own, which is a part of its memory: copies of both go together"
    def __init__(self): self.n = self.spread = 0
    def on_add(self, slots, priorities):
        self.n += len(slots)
        for _ in range(50): pass                             # a thread may be interrupted here
        self.spread += len(slots)
    def draw(self, bs, rng): return np.arange(bs), np.full(bs, .1)
    def update(self, slots, td_errors): pass
    def get_state(self): return dict(n=self.n, spread=self.spread)
    def set_state(self, state): self.n, self.spread = state['n'], state['spread']


@pytest.mark.parametrize('how', COPIES.values(), ids=COPIES)
def test_a_copy_beside_a_writer_has_the_state_of_a_sampler_of_ones_own(how):
    memory = ReplayMemory(50, Counting(), seed=0)
    write = writer(memory, vector, False)
    for _ in range(60): write()
    with beside(write): copies = [how(memory) for _ in range(20)]
    for o in copies: assert o.sampler.inner.n==o.sampler.inner.spread==o.n_added


def test_a_copy_of_a_memory_keeps_what_is_shared_in_it():
    "A structure that holds a memory twice, and its sampler, holds one copy of each"
    memory, _ = filled('proportional', 20)
    first, again = copy.deepcopy([memory, memory])
    assert first is again and first is not memory and first.sampler is not memory.sampler


# --- lengths and other figures ---------------------------------------------------------------------------------------
@pytest.mark.parametrize('kind', ['uniform', 'lz4'])
def test_a_length_beside_a_writer(kind):
    "`n_added` and `first_id` were read one after the other: 'should return >= 0'"
    memory, write = filled(kind, 7)
    other = copy.deepcopy(memory)
    for _ in range(30): writer(other, *KINDS[kind][:2])()
    states = memory.state_dict(), other.state_dict()
    def load(): memory.load_state_dict(states[next(turns) % 2])
    turns = itertools.count()
    for works, least in (((write, write), 6), ((load,), 0)):
        with beside(*works):
            for _ in range(20_000):
                n = len(memory)
                assert least <= n <= 7
                used = memory.usage()
                assert used['bytes_each'] > 0 and not used['samples_per_insert'] < 0
    assert memory.check_valid()


def at_instruction(k, act, read):
    "What `read()` returns if `act()` comes before its k-th instruction in the library; and how many it has"
    count = itertools.count()
    def trace(frame, event, arg):
        if 'fastrl_replay' not in frame.f_code.co_filename: return None
        frame.f_trace_opcodes = True
        if event=='opcode' and next(count)==k:
            sys.settrace(None)
            act()
            sys.settrace(trace)
        return trace
    sys.settrace(trace)
    try: found = read()
    except RuntimeError as e: found = str(e)
    finally: sys.settrace(None)
    return found, next(count)


@pytest.mark.parametrize('kind', ['uniform', 'lz4'])
def test_a_length_when_steps_come_in_while_it_is_read(kind):
    "At each instruction of `len`"
    memory, write = filled(kind, 3)
    def several():
        for _ in range(3): write()
    _, n = at_instruction(-1, several, lambda: len(memory))
    assert n > 10
    for k in range(n): assert at_instruction(k, several, lambda: len(memory))[0]==3


# --- closing ---------------------------------------------------------------------------------------------------------
READ = dict(n_added=lambda m: m.n_added, first_id=lambda m: m.first_id, len=len, nbytes=lambda m: m.nbytes, usage=lambda m: m.usage())


@pytest.mark.parametrize('kind', ['uniform', 'lz4'])
def test_what_another_thread_is_closing_says_so(kind):
    "Not an `AttributeError` about a part of a storage that is half released; and no other figure than before"
    kept, _ = filled(kind, 5)
    for name, read in READ.items():
        for _ in range(20):
            memory, said, (begun, over, stop) = copy.deepcopy(kept), [], (threading.Event() for _ in range(3))
            want = repr(read(memory))
            def look():
                begun.set()
                try:
                    while repr(read(memory))==want: pass
                    said.append('another figure')
                except Exception as e: said.append(repr(e))                 # noqa: BLE001
                over.set()
                stop.wait()
            with beside(look):
                begun.wait()
                memory.close()
                over.wait()
                stop.set()
            assert 'RuntimeError' in said[0] and 'was closed' in said[0], f'{name}: {said}'


@pytest.mark.parametrize('name', READ)
def test_a_memory_that_is_closed_while_a_figure_is_read(name):
    "At each instruction of what reads it: the figure, or the words that it is closed"
    kept, read = filled('lz4', 5)[0], READ[name]
    def read_if_closed_at(k):
        memory = copy.deepcopy(kept)
        before = repr(read(memory)) if name!='draws' else ''
        found, n = at_instruction(k, memory.close, lambda: repr(read(memory)))
        assert 'was closed' in found or found==before or name=='draws' and found.startswith('<fastrl_replay'), f'step {k}: {found}'
        return n
    n = read_if_closed_at(-1)
    assert n > 10
    for k in range(n): read_if_closed_at(k)
