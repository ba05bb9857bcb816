"""A memory on disk: the same as one in memory, whole at every line, for one writer, refused where it doesn't fit."""
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager

import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.saving import CheckpointError
from fastrl_replay.schedules import LinearSchedule
from harness import seen
from hostile import rewrite
from test_harness import Own
from lasting import Teller
from twins import CHUNKS, KINDS, Only
from refusals import refused
from words import words

pytestmark = pytest.mark.usefixtures('quick')

SAMPLERS = dict(uniform=Uniform, proportional=Proportional, ranked=RankBased,
                whole=lambda: Proportional(.9, LinearSchedule(.4, 1., 30), .01, 'memory'))


def put_in_something(memory, rng, world, kind):
    "One random thing that changes a memory"
    make, what = KINDS[kind], rng.integers(5)
    m = int(rng.choice([1, 3, 17, 45]))
    steps, p = [make(rng, world) for _ in range(m)], rng.random(m)
    if what==0: memory.add(steps[0], p[0] if rng.random() < .5 else None)
    elif what < 4: memory.extend(CHUNKS[rng.choice(['list', 'stacked', 'batch'])](steps), p if what==1 else None)
    elif len(memory):
        ids = rng.integers(max(0, memory.first_id - 3), memory.n_added, size=m)
        memory.update_priorities(ids, p)


def alive(memory): return np.arange(memory.first_id, memory.n_added)
def links(memory): return memory.previous(alive(memory)).tolist(), memory.next(alive(memory)).tolist()
def contents(memory): return memory.n_added, memory.first_id, seen(memory.fetch(alive(memory))), links(memory)
def priorities(memory): return memory.sampler.priorities.copy()
def step_of(k): return Only(np.full(3, k, np.int32))


def filled(path, n=30, sampler=Uniform, max_sz=20):
    memory = ReplayMemory(max_sz, sampler(), path=path)
    for k in range(n): memory.add(step_of(k))
    return memory


@contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        yield


# --- the same as in memory --------------------------------------------------------------------------------------------


def test_a_sampler_of_the_users_own_is_told_again(tmp_path):
    rng, memory, most = np.random.default_rng(0), ReplayMemory(20, Teller(), path=tmp_path), 0
    for k in range(40):
        put_in_something(memory, rng, {}, 'only')
        before = memory.sampler.inner
        if k % 3: continue
        most = max(most, len(before.errors))
        memory.close()
        memory = ReplayMemory(20, Teller(), path=tmp_path)
        after = memory.sampler.inner
        assert (after.told, after.errors, after.newest)==(before.told, before.errors, before.newest)
        assert memory.check_valid()
    assert most > 2


# --- killed at every line ---------------------------------------------------------------------------------------------
def as_left(files, notes, path, sampler):
    "A memory over these files, as a process killed at that moment left them"
    path.mkdir()
    for name, data in (files | notes).items(): (path/name).write_bytes(data)
    return ReplayMemory(8, sampler(), path=path)


LINE_BY_LINE = """
import sys
from pathlib import Path
import numpy as np
from fastrl_replay.memory import ReplayMemory
from test_ondisk import SAMPLERS, as_left, contents, priorities
from twins import KINDS, stacked
from faults import files_of, moments, torn

kind, sampler, folder = sys.argv[1], SAMPLERS[sys.argv[2]], Path(sys.argv[3])
memory, rng, world = ReplayMemory(8, sampler(), path=folder/'m'), np.random.default_rng(0), {}
memory.add(KINDS[kind](rng, world))
notes, count, undone = {name: (folder/'m'/name).read_bytes() for name in ('memory.json', 'flushed.json')}, 0, 0
for m in (1, 1, 3, 2, 1, 1, 3, 1, 20, 1):
    steps, p = [KINDS[kind](rng, world) for _ in range(m)], rng.integers(1, 9, size=m).astype(float)
    before, known = contents(memory), priorities(memory)
    def work():
        if m==1: memory.add(steps[0], priority=p[0])
        else: memory.extend(stacked(steps), p)
    shots = moments(folder/'m', work)
    after = contents(memory)
    assert len(shots) > 3, len(shots)
    for a, b in zip(shots, shots[1:] + [shots[-1]]):
        for files in (a, *(torn(a, b, rng) for _ in range(4))):
            again, count = as_left(files, notes, folder/str(count), sampler), count + 1
            got = contents(again)
            assert again.check_valid() and again.first_id==max(0, again.n_added - 8)
            pieces = m > 8 and before[0] < got[0] < after[0]
            assert got in (before, after) or pieces, 'neither the state before nor the one after'
            undone += got==before and np.frombuffer(files['counts.map'], np.int64)[1] > before[1]
            if got==before: assert (priorities(again)==known).all(), 'a priority of a step that is still there'
    assert contents(memory)==after
assert undone > 15, f'only {undone} writes were cut short while they overwrote something'
"""

@pytest.mark.parametrize('kind,sampler', [('simple', 'proportional'), ('transition', 'ranked')])
def test_killed_at_any_line(root, kind, sampler, tmp_path):
    "Kernels run as Python, and the files are copied before every line; each copy opens as the state before or after"
    env = dict(os.environ, NUMBA_DISABLE_JIT='1', PYTHONPATH=os.pathsep.join([str(root), str(root/'tests')]))
    args = [sys.executable, '-c', LINE_BY_LINE, kind, sampler, str(tmp_path)]
    ran = subprocess.run(args, env=env, capture_output=True, text=True)
    assert ran.returncode==0, ran.stderr[-3000:]


def test_an_update_cut_short_leaves_old_and_new_priorities(tmp_path):
    "Any mixture of the words before and after an update"
    from faults import files_of, torn
    memory, rng = ReplayMemory(8, Proportional(normalize='memory'), path=tmp_path/'m'), np.random.default_rng(0)
    for k in range(20): memory.add(step_of(k))
    notes = {name: (tmp_path/'m'/name).read_bytes() for name in ('memory.json', 'flushed.json')}
    for k in range(60):
        old, before = priorities(memory), files_of(tmp_path/'m')
        memory.update_priorities(rng.integers(12, 20, size=3), rng.random(3)*9)
        new, after = priorities(memory), files_of(tmp_path/'m')
        again = as_left(torn(before, after, rng), notes, tmp_path/str(k), lambda: Proportional(normalize='memory'))
        got = priorities(again)
        assert ((got==old) | (got==new)).all() and again.check_valid() and again.sampler.largest >= got.max()


# --- what doesn't fit -------------------------------------------------------------------------------------------------
OPTIONS = [Uniform, lambda: Uniform(replace=True), lambda: Proportional(alpha=0.), RankBased, lambda: RankBased(.5, .3),
           lambda: Proportional(.9, LinearSchedule(.4, 1., 30), .01, 'memory')]

@pytest.mark.parametrize('make', OPTIONS)
def test_open_asks_for_nothing_that_lies_with_the_files(make, tmp_path):
    "Size, sampler and its options, schedules included"
    memory = filled(tmp_path, sampler=make)
    want = memory.sampler.options(), seen(memory.fetch(alive(memory)))
    memory.close()
    with ReplayMemory.open(tmp_path) as memory:
        assert (memory.sampler.options(), seen(memory.fetch(alive(memory))))==want
        assert type(memory.sampler) is type(make()) and (memory.max_sz, memory.n_added)==(20, 30)
        assert memory.check_valid()
    with pytest.raises(CheckpointError): ReplayMemory.open(tmp_path/'nothing')


def test_open_of_a_sampler_of_the_users_own_asks_for_it(tmp_path):
    filled(tmp_path, sampler=Own).close()
    with refused('sampler'): ReplayMemory.open(tmp_path)
    assert ReplayMemory.open(tmp_path, sampler=Own()).n_added==30


IMPOSSIBLE = [dict(max_sz=0), dict(max_sz='20'), dict(max_sz=2**70), dict(layout=[]), dict(layout=None),
              dict(sampler=3), dict(sampler=dict(kind='Proportional', alpha='x'))]

@pytest.mark.parametrize('sampler', [Proportional, RankBased])
def test_a_look_knows_priorities_before_the_sampler_does(sampler, tmp_path):
    "Rows come in, and the sampler is told of them at the next draw: until then they have the largest priority"
    memory = filled(tmp_path, sampler=sampler)
    memory.sample(1)
    memory.update_priorities([memory.n_added - 1], [7.])
    memory.extend(memory.recent(2))
    with ReplayMemory.peek(tmp_path) as view: seen_by_view = view.priorities(np.arange(memory.first_id, memory.n_added))
    slots = np.arange(memory.first_id, memory.n_added) % memory.max_sz
    assert seen_by_view.tolist()==priorities(memory)[slots].tolist() and seen_by_view[-1]==seen_by_view.max() >= 7
    memory.close()


@pytest.mark.parametrize('change', IMPOSSIBLE)
def test_a_description_that_cannot_be_is_refused(change, tmp_path):
    "The checksum is mended: the contents are checked"
    filled(tmp_path, sampler=Proportional).close()
    rewrite(tmp_path/'memory.json', change)
    for look in (ReplayMemory.open, ReplayMemory.peek):
        with pytest.raises(CheckpointError, match=words('it is named', name='memory.json')): look(tmp_path)


# --- looking ----------------------------------------------------------------------------------------------------------
def test_a_reader_beside_a_writer_never_sees_a_torn_row(tmp_path):
    code = f'''if 1:
        import numpy as np
        from fastrl_replay.memory import ReplayMemory
        from twins import Only
        memory = ReplayMemory(50, path={str(tmp_path)!r})
        for k in range(10**9):
            memory.add(Only(np.full(300, k, np.int32)))
            if k==60: print('go', flush=True)
    '''
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    writer = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert writer.stdout.readline()=='go\n'
        view, n = ReplayMemory.peek(tmp_path), 0
        for _ in range(300):
            rows = view.recent(30)
            assert (rows.x==rows.ids[:, None]).all()
            n += len(rows)
        assert n > 300 and view.n_added > 400
    finally:
        writer.kill()
        writer.wait()


# --- loading ----------------------------------------------------------------------------------------------------------
def test_a_load_that_was_killed_half_way_is_noticed(tmp_path):
    code = '''if 1:
        import re
        import sys
        from pathlib import Path
        from fastrl_replay.memory import ReplayMemory
        from fastrl_replay.samplers.proportional import Proportional
        from test_ondisk import as_left, contents, filled
        from faults import moments
        from words import WORDS
        folder = Path(sys.argv[1])
        memory, other = (filled(folder/k, n, Proportional, 8) for k, n in (('m', 30), ('o', 40)))
        notes = {name: (folder/'m'/name).read_bytes() for name in ('memory.json', 'flushed.json')}
        before, after, refused = contents(memory), contents(other), 0
        shots = moments(folder/'m', lambda: memory.load_state_dict(other.state_dict()))
        for k, files in enumerate(shots):
            try: assert contents(as_left(files, notes, folder/str(k), Proportional)) in (before, after)
            except ValueError as e: refused += bool(re.search(WORDS['it was interrupted'], str(e)))
        assert refused > 0 and contents(memory)==after, refused
    '''
    env = dict(os.environ, NUMBA_DISABLE_JIT='1', PYTHONPATH=os.pathsep.join(sys.path))
    ran = subprocess.run([sys.executable, '-c', code, str(tmp_path)], env=env, capture_output=True, text=True)
    assert ran.returncode==0, ran.stderr[-3000:]
