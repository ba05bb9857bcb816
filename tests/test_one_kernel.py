"One kernel reads rows of every layout, by a plan: beside NumPy's indexing, whatever the leaves; and the requests that it fills"
import collections
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba.core import event

import fastrl_replay
from fastrl_replay.all import ReplayMemory, Sequence, Transition
from fastrl_replay.batch import FETCHED
from fastrl_replay.saving import manifest_bytes, read_manifest
from fastrl_replay.steps import Layout
from fastrl_replay.storage import request as requests
from fastrl_replay.storage.choice import storage_for
from words import words

DTYPES = ['?', 'i1', 'u2', 'f2', 'i4', 'f4', 'i8', 'f8', 'c8', 'c16']


class Told(NamedTuple):
    state: Any
    action: Any
    next_state: Any
    terminated: Any
    truncated: Any
    task: Any
    env_id: Any = 0


def told(n, width):
    rng = np.random.default_rng(width)
    s, k = rng.random((n + 1, width)).astype(np.float32), np.arange(n)
    return [Told(s[i], i, s[i + 1], i % 7==6, False, f'task {i % 3}', i % 2) for i in k]


def random_layout(rng):
    "A step of leaves of all sizes of words, nested, some of a few bytes, some of many words"
    def leaf(): return rng.integers(2, size=tuple(rng.integers(1, 40, rng.integers(3)).tolist())).astype(rng.choice(DTYPES))
    Own = collections.namedtuple('Own', [f'f{k}' for k in range(rng.integers(1, 7))])
    return Own(*({'a': leaf(), 'b': (leaf(), leaf())} if rng.integers(4)==0 else leaf() for _ in Own._fields))


@pytest.mark.parametrize('seed', range(12))
def test_rows_of_any_layout(seed):
    rng, max_sz = np.random.default_rng(seed), 150
    layout = Layout.as_is(random_layout(rng))
    storage = storage_for(layout, max_sz, dedup=None)
    storage.rows[:, 8:] = rng.integers(2, size=(max_sz, storage.size - 8))          # whatever the bytes: no bool is above 1
    storage.counts[:2] = 390, 240
    for m in (0, 1, 2, 63, 64, 65, 130):
        fields = None if m % 2 else tuple(rng.permutation(layout.fields)[:1 + m % len(layout.fields)].tolist())
        asked, slots = storage.ask(m, fields, FETCHED), rng.integers(max_sz, size=m)
        slots[rng.random(m) < .2] = -1
        asked.slots[:] = slots
        batch = storage.read(asked)
        assert batch.ids.tolist()==[-1 if o < 0 else 390 - 390 % max_sz + o - (0 if o < 390 % max_sz else max_sz) for o in slots]
        stored = {o.path: storage.fields[k] for k, o in enumerate(layout.leaves)}
        for leaf, column in zip(batch.layout.leaves, batch.arrays()):
            want = stored[leaf.path][slots]
            want[slots < 0] = 0
            assert column.tobytes()==want.tobytes(), (leaf, m)


def test_a_slot_that_is_not_there():
    memory = ReplayMemory(8, seed=0)
    memory.extend(Transition(np.zeros((8, 3), np.float32), np.arange(8), np.ones(8), np.zeros((8, 3), np.float32), np.zeros(8, bool), np.zeros(8, bool)))
    asked = memory._shelf.storage.ask(3, header=FETCHED)
    asked.slots[:] = 0, 8, 1
    with pytest.raises(IndexError, match=words('slots within', n=8)): memory._shelf.storage.read(asked)


class Compiled(event.Listener):
    def __init__(self): self.names = []
    def on_start(self, event): self.names.append(event.data['dispatcher'].py_func.__name__)
    def on_end(self, event): pass


def drawn(width, strings=True, **options):
    "Batches of all kinds from a memory of observations that are so wide"
    memory, steps = ReplayMemory(60, seed=0, **options), told(70, width)
    if not strings: steps = [Transition(o.state, o.action, 1., o.next_state, o.terminated, o.truncated) for o in steps]
    memory.extend(steps)
    memory.add(steps[2])
    other = 'task' if strings else 'reward'
    if options.get('sequence'): return memory.sample(4), memory.sample(4, ['action', other])
    found = [memory.sample(5, o) for o in (None, ['action'], ['next_state', other], ['state'])] + [memory.fetch(memory.recent(3).ids)]
    return found + [memory.sample(5, windows=o) for o in ({'state': (-1, 0)}, {'action': range(3), other: (0, 1)}, {'next_state': (0, 2, 1)})]


def test_the_first_batch_of_any_layout_compiles_nothing():
    "Nor do other fields, windows, sequences, shared rows, strings"
    drawn(5)
    drawn(5, dedup='next_state')
    drawn(5, sequence=Sequence(3))
    heard = Compiled()
    with event.install_listener('numba:compile', heard):
        for width in (37, 61): drawn(width), drawn(width, strings=False)
        drawn(43, dedup='next_state')
        drawn(1301)
        drawn(47, sequence=Sequence(5))
        drawn(47, False, sequence=Sequence(5))
    assert not heard.names


def test_no_code_is_generated():
    sources = {p: p.read_text() for p in Path(fastrl_replay.__file__).parent.rglob('*.py')}
    found = [p.name for p, text in sources.items() if re.search(r'(?<![.\w])(exec|eval|compile)\(|exec_module|fetch_source', text)]
    assert not found


# --- requests ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def small():
    memory = ReplayMemory(4000, seed=0)
    k = np.arange(4000)
    memory.extend(Transition(np.zeros((4000, 4), np.float32), k, k, np.zeros((4000, 4), np.float32), k < 0, k < 0))
    return memory


@pytest.fixture
def made(monkeypatch):
    "How many requests have been made"
    plain, count = requests.Request.__init__, collections.Counter()
    def counted(self, *args, **kw):
        count['made'] += 1
        plain(self, *args, **kw)
    monkeypatch.setattr(requests.Request, '__init__', counted)
    return count


@pytest.mark.parametrize('held', [1, 2, 9, 64, 300])
def test_batches_that_are_held_in_turn_are_used_again(held, small, made):
    some = collections.deque(maxlen=held)
    for _ in range(3*held): some.append(small.sample(8))
    before = made['made']
    for _ in range(3*held): some.append(small.sample(8))
    assert made['made']==before <= held + 4
    assert len({b.reward.data_ptr() for b in some})==held


def test_batches_beside_others_that_are_kept(small, made):
    kept = [small.sample(8) for _ in range(300)]
    for _ in range(20): batch = small.sample(8)
    before = made['made']
    for _ in range(200): batch = small.sample(8)      # noqa: F841   (one is held while the next is drawn)
    assert made['made']==before
    assert [b.ids.tolist() for b in kept]==[b.reward.long().tolist() for b in kept]


def test_fetches_of_many_sizes_keep_few_bytes(small):
    held = None
    for n in [*range(1, 3001, 7), *range(2990, 0, -13)]:
        rows = small.fetch(np.arange(n))
        assert len(rows)==n and rows.action.tolist()==list(range(n))
        if held is not None: assert held.action.tolist()==list(range(len(held)))
        held = rows
    kept = small._shelf.storage._requests
    assert kept.nbytes < 8e6 and len(kept._pools) <= kept.KINDS


def test_more_kinds_than_are_kept(small):
    for length in range(1, 200): small.sample(3, windows={'action': range(length)})
    kept = small._shelf.storage._requests
    assert len(kept._pools) <= kept.KINDS


# --- what 'auto' shares -----------------------------------------------------------------------------------------------
def shared(memory): return [str(t) for t in memory._shelf.storage.tables if t.references[0].dtype==np.int32 and 'strings' not in str(t)]


@pytest.mark.parametrize('width, wide', [(4, False), (256, False), (1000, False), (1023, False), (1024, True), (1100, True)])
def test_observations_below_4_kb_stay_in_their_records(width, wide):
    memory = ReplayMemory(20, seed=0)
    memory.extend(told(5, width))
    assert bool(shared(memory))==wide and ('state by states' in repr(memory))==wide
    again = ReplayMemory(20)
    again.load_state_dict(memory.state_dict())
    assert shared(again)==shared(memory) and np.array_equal(again.recent(5).state, memory.recent(5).state)


def test_a_stack_is_shared_below_4_kb():
    obs = np.zeros((4, 12, 12), np.uint8)
    memory = ReplayMemory(20)
    memory.add(Transition(obs, 0, 0., obs, False, False))
    assert shared(memory)


def test_folders_and_states_keep_what_they_were_made_with(tmp_path):
    "An earlier version's 'auto' shared what has more than 512 bytes"
    with ReplayMemory(20, dedup='large', path=tmp_path/'old', seed=0) as old:
        old.extend(told(25, 200))
        state, rows = old.state_dict(), old.recent(20)
    assert state['memory']['options']['dedup']=='large'
    state['memory']['options']['dedup'] = 'auto'
    file = tmp_path/'old'/'memory.json'
    description = read_manifest(file)
    file.write_bytes(manifest_bytes(description | dict(dedup='auto')))
    for open_ in (lambda: ReplayMemory.open(tmp_path/'old'), lambda: ReplayMemory(20, path=tmp_path/'old')):
        with open_() as memory:
            assert shared(memory) and np.array_equal(memory.recent(20).next_state, rows.next_state)
    with ReplayMemory.peek(tmp_path/'old') as view: assert np.array_equal(view.recent(20).next_state, rows.next_state)
    fresh = ReplayMemory(20)
    fresh.load_state_dict(state)
    assert shared(fresh) and np.array_equal(fresh.recent(20).next_state, rows.next_state)
    fresh.add(told(3, 200)[0])
    fresh.save(tmp_path/'saved')
    assert shared(ReplayMemory.load(tmp_path/'saved'))
    with ReplayMemory(20, path=tmp_path/'new') as new:
        new.extend(told(25, 200))
        assert not shared(new)
    with ReplayMemory(20, path=tmp_path/'new') as new: assert not shared(new) and len(new)==20


# --- layouts ----------------------------------------------------------------------------------------------------------
def test_layouts_are_renumbered(monkeypatch):
    "Fields that are chosen, in any order, have the layout that a step of them has; no example is made for it"
    rng = np.random.default_rng(0)
    for _ in range(30):
        step = random_layout(rng)
        layout = Layout.as_is(step)
        fields = tuple(rng.permutation(step._fields)[:rng.integers(1, len(step._fields) + 1)].tolist())
        want = Layout.as_is(collections.namedtuple('Own', fields)(*(getattr(step, f) for f in fields)))
        with monkeypatch.context() as m:
            m.setattr('fastrl_replay.steps.leaf_of', lambda *_: pytest.fail('an example'))
            assert layout.select(fields)==want
        f, other = fields[0], np.zeros((2, 3), np.int16)
        assert layout.with_field(f, other)==Layout.as_is(step._replace(**{f: other}))
        assert layout.with_field(f, getattr(step, f))==layout
