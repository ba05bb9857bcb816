"""How what a call costs grows: `python benchmarks/growth.py [--rows N]`

For each operation the microseconds of a call (of chunks: the nanoseconds of a row) at several sizes of the memory up to N rows, lengths of a
chunk, numbers of streams, of batches that are held, and shares of the rows that were dropped. The exponent e says that the cost grows as
size^e between the first and the last: 0 is level, 1 is proportional. Of dropped rows, where nothing grows, and of all others too, "times" is
the most expensive compared with the first. The cost is CPU time: memory that no cache holds makes a draw of a million rows dearer than one of
ten thousand, which is no fault of an algorithm. `tests/test_level.py` counts the looks, so that none of this can grow unseen.
"""
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import cycle
from math import log
from typing import Any, NamedTuple

import numpy as np
from timing import begin, interleaved, repeat, table

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.hindsight import HindsightReplay
from fastrl_replay.samplers.age import AgeWeighted
from fastrl_replay.samplers.more import ERE, Combined
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import SimpleStep, Transition
from fastrl_replay.storage.sequence_sampler import Sequence

BS, EPISODE, CALLS = 256, 200, 300
WINDOWS = {'state': (-1, 0), 'action': range(8)}
CHUNKS, STREAMS, HELD = (1, 16, 256, 4096, 65_536), (1, 100, 10_000, 100_000), (0, 1, 8, 64, 1000)
SAMPLERS = {'uniform, none twice': Uniform, 'uniform': lambda: Uniform(replace=True), 'proportional': Proportional, 'ranks': RankBased,
            'ages': lambda: AgeWeighted(100_000), 'ERE': ERE, 'Combined': Combined}


class Line(NamedTuple):
    "An operation, what it grows over, and a function that makes a call of it for one of these values"
    name: str
    over: str
    values: tuple
    call: Callable[[Any], Callable[[], Any]]
    rows: bool = False       # is a value the rows of a call, of which each shall cost the same?


def block(n):
    "`n` transitions of one stream, in episodes"
    rng, no = np.random.default_rng(0), np.zeros(n, bool)
    s, t = (rng.random((n, 4), dtype=np.float32) for _ in range(2))
    return Transition(s, rng.integers(0, 2, n), rng.random(n, dtype=np.float32), t, no, np.arange(n) % EPISODE == EPISODE - 1)


def full(n, sampler=None, share=0., **options):
    "A memory of `n` rows, of which a share was dropped (1/n: one row)"
    memory = ReplayMemory(n, sampler, seed=0, **options)
    memory.extend(block(n), streams='one')
    if share: memory.drop(np.random.default_rng(1).permutation(n)[:max(1, int(share*n))])
    return memory


def drawing(make):
    "`make(value)` makes a memory, of which batches are drawn"
    def call(value):
        memory = make(value)
        return lambda: memory.sample(BS)
    return call


def updating(make):
    "The same, with priorities sent back"
    errors = np.random.default_rng(2).random((64, BS))
    def call(value):
        memory, at = make(value), [0]
        def pair():
            at[0] = (at[0] + 1) % 64
            memory.sample(BS).update_priorities(errors[at[0]])
        return pair
    return call


def with_goals(n, share=0.):
    "A pipe that replaces goals, over `n` rows"
    rows, goal = block(n), np.zeros((n, 2), np.float32)
    state, after = (dict(observation=o, achieved_goal=o[:, :2], desired_goal=goal) for o in (rows.state, rows.next_state))
    replay = HindsightReplay([], lambda a, d, info: -np.linalg.norm(a - d, axis=1), bs=BS, max_sz=n, seed=0)
    replay.extend(rows._replace(state=state, next_state=after), streams='one')
    if share: replay.memory.drop(np.random.default_rng(1).permutation(n)[:max(1, int(share*n))])
    return replay


def each_once(n, f):
    "A call of `f` with one id after the other"
    ids = iter(np.random.default_rng(3).permutation(n).tolist())
    return lambda: f(next(ids))


def dropping(n):
    "Drops of one row, in a memory that was cleared and filled again by half"
    memory = full(n)
    memory.clear()
    memory.extend(block(n//2), streams='one')
    first = memory.first_id
    return each_once(n//2, lambda k: memory.drop([first + k]))


def correcting(n):
    "Corrections of one number"
    memory = full(n)
    return each_once(n, lambda k: memory.correct([k], 'reward', 1.))


def by_size(rows):
    "Everything that is asked of memories of several sizes"
    sizes = tuple(k for k in (10_000, 100_000, 1_000_000, 10_000_000) if k < rows) + (rows,)
    for name, make in SAMPLERS.items():
        kind = updating if make in (Proportional, RankBased) else drawing
        yield Line(name, 'size', sizes, kind(lambda n, make=make: full(n, make())))
    yield Line('windows', 'size', sizes, drawing(lambda n: full(n, windows=WINDOWS)))
    yield Line('hindsight', 'size', sizes, drawing(with_goals))
    yield Line('sequences of 20', 'size', sizes, drawing(lambda n: full(n, sequence=Sequence(20, 5))))
    yield Line('drop, after clear', 'size', sizes, dropping)
    yield Line('correct a number', 'size', sizes, correcting)
    yield Line('episode_ids', 'size', sizes, lambda n: each_once(n, full(n).episode_ids))


def by_share(n):
    "The same where one row, half of the rows, nearly all were dropped"
    shares = 0., 1/n, .5, .95
    for name, make in SAMPLERS.items():
        yield Line(name, 'dropped', shares, drawing(lambda share, make=make: full(n, make(), share)))
    yield Line('windows', 'dropped', shares, drawing(lambda share: full(n, None, share, windows=WINDOWS)))
    yield Line('hindsight', 'dropped', shares, drawing(lambda share: with_goals(n, share)))


def by_chunk(n):
    "Chunks of several lengths: of one stream, each row its own, and each its own by a number from anywhere"
    def extending(streams):
        def call(m):
            memory, chunk, whose = full(n), block(m), streams(m)
            return lambda: memory.extend(chunk, streams=whose)
        return call
    kinds = {'extend, one stream': lambda m: 'one', 'extend, each its own': lambda m: None,
             'extend, each its own, named': lambda m: np.random.default_rng(4).integers(-2**60, 2**60, m)}
    for name, streams in kinds.items(): yield Line(name, 'chunk', CHUNKS, extending(streams), True)


def by_streams(n):
    "Single steps of several numbers of streams in turn"
    def adding(factor):
        def call(k):
            memory, s = ReplayMemory(n), np.zeros(4, np.float32)
            steps = cycle([SimpleStep(s, 0, s, env_id=i*factor) for i in range(k)])
            memory.add(next(steps))
            return lambda: memory.add(next(steps))
        return call
    yield Line('add', 'streams', STREAMS, adding(1))
    yield Line('add, named', 'streams', STREAMS, adding(1_000_003 << 20))


def by_held(n):
    "Batches drawn while so many are held"
    def holding(k):
        memory, held = full(n), deque([], k)
        return lambda: held.append(memory.sample(32))
    yield Line('a batch of 32', 'held', HELD, holding)


def measured(line: Line) -> list:
    "A row of the table: each cost, the exponent, how many times the first the most expensive is"
    calls = {k: line.call(k) for k in line.values}
    cases = {k: (repeat(f), max(2, CALLS//k) if line.rows else CALLS) for k, f in calls.items()}
    us = interleaved(cases, 9, time.process_time)
    cost = [us[k]*1000/k if line.rows else us[k] for k in line.values]
    first, last = max(line.values[0], 1), line.values[-1]
    exponent = '' if line.over=='dropped' else f'{log(cost[-1]/cost[0])/log(last/first):.2f}'
    return [line.name, line.over, *(f'{o:.1f}' for o in cost), exponent, f'{max(cost)/cost[0]:.1f}']


def lines(rows: int) -> Iterator[tuple[str, tuple, list[Line]]]:
    "Each table: its title, its values, its lines"
    for title, make in {'µs by rows in the memory': by_size, 'µs by the share that was dropped': by_share, 'ns a row by rows in a chunk': by_chunk,
                        'µs by streams': by_streams, 'µs by batches held': by_held}.items():
        found = [*make(rows)]
        yield title, found[0].values, found


def main():
    "Measure and print"
    rows = begin()
    for title, values, found in lines(rows):
        head = ['', 'over', *(f'{k:.3g}' if isinstance(k, float) else f'{k:,}' for k in values), 'exponent', 'times']
        table(title, [measured(o) for o in found], head)


if __name__ == '__main__': main()
