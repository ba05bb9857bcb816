"""`ReplayMemory` beside a naive twin, through thousands of random calls, with every invariant checked after each."""
import copy
import gc
import weakref

import numpy as np
import pytest
import torch

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.storage.sequence_sampler import Sequence
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import SimpleStep, Transition
from twins import CHUNKS, KINDS, Odd, Only, Twin, as_row, column_bytes, dressed, row_bytes
from refusals import refused

SAMPLERS = dict(uniform=Uniform, replacing=lambda: Uniform(True), proportional=Proportional, normalized=lambda: Proportional(.9, 1., .01, 'memory'),
                ranked=RankBased)


class Pair:
    "A memory and its twin, on which the same things are done"
    def __init__(self, kind, max_sz, sampler, seed):
        self.rng, self.world, self.make, self.kind = np.random.default_rng(seed), {}, KINDS[kind], kind
        self.memory = ReplayMemory(max_sz, SAMPLERS[sampler](), seed=seed)
        own = self.memory.sampler
        self.twin = Twin(max_sz, own.prioritized, getattr(own, 'alpha', .6), getattr(own, 'eps', 0), isinstance(own, RankBased))
        self.replaces = self.twin.prioritized or own.replace
        self.held = []

    def steps(self, m): return [self.make(self.rng, self.world) for _ in range(m)]
    def dressed(self, step): return dressed(self.rng, step) if self.twin.n_added else step      # the first one sets the dtypes
    def given(self, m): return [None, self.rng.exponential(2., m)][self.rng.integers(2)]

    def add(self):
        [step], p = self.steps(1), self.given(1)
        priority = None if p is None else [p[0], float(p[0]), torch.tensor(p[0])][self.rng.integers(3)]
        assert self.memory.add(self.dressed(step), priority)==self.twin.add(step, None if p is None else p[0])

    def extend(self):
        most = 2*self.memory.max_sz + 2 if self.rng.random() < .1 else 6
        steps = self.steps(self.rng.integers(1, min(most, 150)))
        form, p = self.rng.choice(list(CHUNKS)), self.given(len(steps))
        chunk = CHUNKS[form](list(map(self.dressed, steps)) if form in ('list', 'tuple', 'generator') else steps)
        ids = self.memory.extend(chunk, p)
        assert ids.dtype==np.int64 and ids.tolist()==self.twin.extend(steps, p, form)

    def sample(self):
        n = len(self.twin.ids)
        if not n: return
        bs = int(self.rng.integers(1, 2*n + 2 if self.replaces and n < 50 else min(n, 60) + 1))
        batch = self.memory.sample(bs)
        self.check_drawn(batch, bs)
        self.held = [*self.held[-5:], (batch, [self.twin.bytes[i] for i in batch.ids.tolist()])]

    def check_drawn(self, batch, bs):
        ids, probs, max_sz = batch.ids.tolist(), self.twin.probs(), self.memory.max_sz
        assert len(batch)==len(ids)==bs and set(ids) <= set(self.twin.ids)
        assert self.replaces or len(set(ids))==bs
        assert batch.idxs.tolist()==[i % max_sz for i in ids]
        assert column_bytes(batch)==[self.twin.bytes[i] for i in ids]
        np.testing.assert_allclose(batch.probs.numpy(), [probs[i] for i in ids], rtol=1e-5)
        assert batch.weights.dtype==torch.float32 and batch.probs.dtype==torch.float32
        if not self.twin.prioritized:
            assert batch.weights.tolist()==[1.]*bs
            return
        beta, least = self.memory.sampler.beta, [p for p in probs.values() if p]
        chances = np.array([probs[i] for i in ids])
        largest = min(least) if getattr(self.memory.sampler, 'normalize', '')=='memory' else chances.min()
        np.testing.assert_allclose(batch.weights.numpy(), (largest/chances)**beta, rtol=1e-5)

    def update(self):
        if not self.twin.n_added: return
        low = max(0, self.twin.first_id - 5) if self.rng.random() < .7 else self.twin.first_id
        ids = self.rng.integers(low, self.twin.n_added, size=self.rng.integers(0, 12))
        td = self.rng.standard_normal(len(ids)).astype([np.float32, np.float64][self.rng.integers(2)])
        if self.rng.random() < .2: td[:] = 0
        forms = [(ids, td), (ids.tolist(), td.tolist()), (torch.from_numpy(ids), torch.from_numpy(td)), (ids.astype(np.int32), td[:, None])]
        assert self.memory.update_priorities(*forms[self.rng.integers(4)])==self.twin.update(ids.tolist(), td)

    def update_held(self):
        "The errors of a batch drawn some time ago: part of it is stale, some of it stands there twice"
        if not self.held: return
        batch, _ = self.held[self.rng.integers(len(self.held))]
        td = self.rng.standard_normal(len(batch)).astype(np.float32)
        assert batch.update_priorities(torch.from_numpy(td))==self.twin.update(batch.ids.tolist(), td)

    def fetch(self):
        if not self.twin.n_added: return
        ids = self.rng.choice(self.twin.ids, self.rng.integers(1, 9))
        self.check_fetched(self.memory.fetch([ids, ids.tolist(), torch.from_numpy(ids)][self.rng.integers(3)]), ids.tolist())

    def check_fetched(self, batch, ids):
        assert batch.ids.tolist()==ids and batch.probs is None and batch.weights is None
        assert column_bytes(batch)==[self.twin.bytes[i] for i in ids]

    def recent(self):
        if not self.twin.n_added: return
        k = int(self.rng.integers(1, len(self.twin.ids) + 1))
        self.check_fetched(self.memory.recent(k), list(self.twin.ids)[-k:])

    def episode(self):
        fields = set(self.twin.steps[0]._fields) if self.twin.n_added else set()
        if 'episode_n' not in fields and not {'terminated', 'truncated'} <= fields: return
        id = int(self.rng.choice(self.twin.ids))
        self.check_fetched(self.memory.episode(id), self.twin.episode(id))

    def look(self):
        "By slot: one, some, all"
        memory, ids = self.memory, self.twin.by_slot
        if not ids: return
        k = int(self.rng.integers(len(ids)))
        assert row_bytes(memory[k])==as_row(self.twin.steps[ids[k]])
        a, b, c = sorted(self.rng.integers(-len(ids), len(ids) + 3, size=3).tolist())
        self.check_fetched(memory[a:c:1 + abs(b) % 3], ids[a:c:1 + abs(b) % 3])
        if len(ids) < 100: assert [row_bytes(o) for o in memory]==[as_row(self.twin.steps[i]) for i in ids]

    def check(self):
        memory, twin = self.memory, self.twin
        assert memory.check_valid()
        assert (len(memory), memory.n_added, memory.first_id, memory.n_stale)==(len(twin.ids), twin.n_added, twin.first_id, twin.n_stale)

    def check_all(self):
        memory, twin = self.memory, self.twin
        if not twin.n_added: return
        self.check_fetched(memory.fetch(list(twin.ids)), list(twin.ids))
        for i, before, after in zip(twin.ids, memory.previous(list(twin.ids)), memory.next(list(twin.ids))):
            assert (0 if before < 0 else i - before, 0 if after < 0 else after - i)==twin.links(i), f'links of {i}'
        for batch, rows in self.held: assert column_bytes(batch)==rows, 'a batch changed while it was held'
        if twin.prioritized:
            assert memory.sampler.priorities.tolist()==[twin.priority[i] for i in twin.by_slot]
            assert memory.sampler.largest==twin.largest

    DO = (add, extend, sample, update, update_held, fetch, recent, episode, look)

    def run(self, n):
        for k, op in enumerate(self.rng.choice(len(self.DO), n, p=[.3, .15, .15, .1, .08, .06, .05, .06, .05])):
            self.DO[op](self)
            self.check()
            if k % 50==0: self.check_all()
        self.check_all()


@pytest.mark.parametrize('sampler', SAMPLERS)
@pytest.mark.parametrize('max_sz', [1, 7, 64])
def test_beside_the_twin(max_sz, sampler): Pair('simple', max_sz, sampler, seed=max_sz).run(130)

@pytest.mark.parametrize('kind', [o for o in KINDS if o!='simple'])
def test_every_kind_of_step_beside_the_twin(kind):
    Pair(kind, 7, 'proportional', seed=1).run(120)
    Pair(kind, 30, 'uniform', seed=2).run(120)


@pytest.mark.parametrize('sampler', SAMPLERS)
def test_the_same_seed_gives_the_same_batches_and_another_seed_others(sampler):
    def drawn(seed):
        memory, rng = ReplayMemory(50, SAMPLERS[sampler](), seed=seed), np.random.default_rng(0)
        out = []
        for k in range(30):
            memory.extend([KINDS['only'](rng, {}) for _ in range(5)], rng.random(5))
            batch = memory.sample(4 + k % 3 - (k==0))
            batch.update_priorities(rng.random(len(batch)))
            out.append([o.tolist() for o in (batch.ids, batch.probs, batch.weights, batch.x)])
        return out
    assert drawn(5)==drawn(5)
    assert drawn(5)!=drawn(6)
    assert drawn(None)!=drawn(None)


def test_nothing_random_is_taken_from_the_global_generators():
    import random
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()     # noqa: NPY002
    pair = Pair('only', 20, 'proportional', seed=None)
    for _ in range(30):
        pair.memory.add(Only(np.zeros(3, np.int32)))
        pair.memory.sample(3)
    assert before==(random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())     # noqa: NPY002


def test_a_memory_copies_at_once_and_hands_out_nothing_of_its_own():
    "An environment that reuses its buffer, and a user who writes into what was read"
    memory, state = ReplayMemory(10, seed=0), np.zeros(3, np.int32)
    for i in range(5):
        state[:] = i
        if i % 2: memory.add(Only(state))
        else: memory.extend([Only(state)])
    state[:] = 77
    for o in (memory[0], next(iter(memory))): o.x[:] = 88
    for o in (memory.fetch([0, 1]), memory[0:3], memory.recent(5), memory.sample(5)): o.x.fill_(99)
    memory.state_dict()['rows']['0']['records'].zero_()
    assert memory.recent(5).x[:, 0].tolist()==[0, 1, 2, 3, 4]


def test_a_dtype_may_be_given():
    dtype = np.dtype([('count', 'i2'), ('ids', 'f8'), ('to', '?'), ('weights', 'f4'), ('index', 'i4'), ('replace', 'u1', (3,)), ('probs', 'f4'),
                      ('columns', 'f2'), ('step_type', [('a', 'f4'), ('b', 'i8')])])
    memory = ReplayMemory(5, dtype=dtype, seed=0)
    memory.add(Odd(ids=.1, replace=[1, 2, 255], to=True, weights=.5, index=3, count=4, probs=.25, columns=.5, step_type=dict(a=.1, b=2)))
    batch = memory.recent(1)
    got = {f: mapped_dtypes(batch[f]) for f in Odd._fields}
    assert got==dict(ids=torch.float64, replace=torch.uint8, to=torch.bool, weights=torch.float32, index=torch.int32, count=torch.int16,
                     probs=torch.float32, columns=torch.float16, step_type=dict(a=torch.float32, b=torch.int64))
    assert batch['ids'].item()==.1

def mapped_dtypes(v): return {k: mapped_dtypes(o) for k, o in v.items()} if isinstance(v, dict) else v.dtype


def test_len_is_never_falsy_and_an_empty_memory_answers():
    memory = ReplayMemory(5)
    assert memory and len(memory)==0 and list(memory)==[] and memory.n_added==memory.first_id==memory.n_stale==memory.nbytes==0
    assert memory.check_valid() and 'ReplayMemory' in repr(memory)
    assert memory.extend([]).tolist()==[] and memory.update_priorities([], [])==0


# --- nothing asked for, nothing found -----------------------------------------------------------------------------------
STACKED = SimpleStep(np.arange(144, dtype=np.uint8).reshape(4, 6, 6), 1, np.ones((4, 6, 6), np.uint8), False, False, .5)
FRAMES = {'plain': dict(dedup=None), 'frames': dict(dedup='frames'), 'next_state': dict(dedup='next_state'),
          'lz4': dict(dedup='frames', codec='lz4'), 'lz4 of states': dict(dedup='next_state', codec='lz4'),
          'sequences': dict(dedup='frames', sequence=Sequence(2)), 'ranked': dict(sampler=RankBased())}

@pytest.mark.parametrize('where', ['ram', 'disk'])
@pytest.mark.parametrize('kind', FRAMES)
def test_no_rows_are_an_empty_batch(kind, where, tmp_path):
    "`fetch([])`, slices of nothing, slices past what is filled; in every kind of memory, before the first step too"
    if where=='disk' and 'lz4' in kind: pytest.skip('lz4 is for RAM')
    sampler = dict(sampler=copy.deepcopy(FRAMES[kind]['sampler'])) if kind=='ranked' else {}
    memory = ReplayMemory(10, **FRAMES[kind] | sampler | (dict(path=tmp_path) if where=='disk' else {}))
    assert len(memory.fetch([]))==len(memory[0:0])==len(memory[5:9])==0
    for filled in (5, 12):
        for k in range(memory.n_added, filled): memory.add(STACKED._replace(step_n=k))
        for empty in (memory.fetch([]), memory[0:0], memory[5:9] if filled==5 else memory[10:12], memory[3:1]):
            assert len(empty)==0 and empty.state.shape==empty.next_state.shape==(0, 4, 6, 6) and empty.reward.shape==(0,)
            assert empty.state.dtype==torch.uint8 and empty.ids.tolist()==list(empty)==[]
        assert memory.fetch([], fields=['next_state']).next_state.shape==(0, 4, 6, 6)
        assert len(memory.fetch([memory.first_id]))==1 and memory.check_valid()
    if where=='ram': return
    with ReplayMemory.peek(tmp_path) as view:
        assert len(view.fetch([]))==len(view.fetch([0, 99]))==0 and view.fetch([99]).state.shape==(0, 4, 6, 6)
        assert len(view.recent(3))==3
    memory.close()


def test_a_peek_that_is_overtaken_is_an_empty_batch(tmp_path):
    "Between the look at the counters and the reading, all rows that were asked for are overwritten"
    memory = ReplayMemory(10, path=tmp_path, dedup='frames')
    for k in range(12): memory.add(STACKED._replace(step_n=k))
    view = ReplayMemory.peek(tmp_path)
    class Late(type(view)):
        @property
        def first_id(self):
            first, self.looks = super().first_id, self.looks + 1
            if self.looks==1:
                for k in range(12, 34): memory.add(STACKED._replace(step_n=k))
            return first
    view.__class__, view.looks = Late, 0
    rows = view.fetch([3, 7])
    assert len(rows)==0 and rows.state.shape==(0, 4, 6, 6)
    view.close()
    memory.close()


def test_the_length_of_a_view_beside_a_writer_is_between_none_and_all(tmp_path):
    "Any number of steps may come between its two looks at the counters"
    memory = ReplayMemory(10, path=tmp_path, dedup=None)
    memory.add(STACKED)
    view = ReplayMemory.peek(tmp_path)
    class Late(type(view)):
        def more(self):
            for _ in range(int(rng.choice([0, 1, 15]))): memory.add(STACKED)
        @property
        def n_added(self):
            found = super().n_added
            self.more()
            return found
        @property
        def first_id(self):
            found = super().first_id
            self.more()
            return found
    rng, view.__class__ = np.random.default_rng(0), Late
    seen = {len(view) for _ in range(60)}
    assert 0 <= min(seen) and max(seen)==10 and len(view)==10
    view.close()
    memory.close()


# --- a stored number is corrected -----------------------------------------------------------------------------------------


@pytest.mark.parametrize('where', ['ram', 'disk'])
def test_corrections_are_in_the_next_save_into_the_same_folder(where, tmp_path):
    "Pieces that were saved before hold the old values"
    rng, twin = np.random.default_rng(0), {}
    memory = ReplayMemory(30, path=tmp_path/'m' if where=='disk' else None)
    for _ in range(60):
        for _ in range(int(rng.integers(1, 9))):
            twin[memory.n_added] = [float(memory.n_added), False]
            memory.add(STACKED._replace(reward=float(memory.n_added)))
        alive = np.arange(memory.first_id, memory.n_added)
        if rng.random() < .5:
            ids = rng.choice(alive, size=min(3, len(alive)), replace=False)
            values = rng.random(len(ids)).astype(np.float32)
            memory.correct(ids, 'reward', values)
            memory.correct(ids[:1], 'truncated', True)
            for k, v in zip(ids.tolist(), values.tolist()): twin[k][0] = v
            twin[int(ids[0])][1] = True
        if where=='disk': memory.flush()
        memory.save(tmp_path/'saved')
        if rng.random() < .2 and where=='ram': memory = ReplayMemory.load(tmp_path/'saved')
        for o in (memory, ReplayMemory.load(tmp_path/'saved')):
            rows = o.fetch(alive)
            assert [list(o) for o in zip(rows.reward.tolist(), rows.truncated.tolist())]==[twin[k] for k in alive.tolist()]
        assert memory.check_valid()
    if where=='disk':
        memory.correct(alive[:2], 'reward', [5., 6.])
        del memory                                          # as a kill after the flush
        with ReplayMemory.open(tmp_path/'m') as memory:
            assert memory.fetch(alive[:2]).reward.tolist()==[5, 6] and memory.check_valid()


def test_a_correction_that_does_not_fit_changes_nothing():
    memory = ReplayMemory(10)
    for k in range(15): memory.add(STACKED._replace(reward=float(k)))
    before = column_bytes(memory.recent(10))
    for ids, field, values, words in (([3], 'reward', 1., 'ids'), ([15], 'reward', 1., 'ids'),
                                      ([7], 'rewards', 1., 'column'), ([7], 'state', 1., 'state'),
                                      ([7], 'reward', 'lots', 'reward'), ([7], 'action', .5, 'action'), ([7], 'env_id', 3, 'env_id'),
                                      ([7, 8], 'reward', [1., 2., 3.], 'reward'), ([7.5], 'reward', 1., 'ids')):
        with refused(words, (ValueError, TypeError)): memory.correct(ids, field, values)
    with refused('column'): ReplayMemory(5).correct([], 'reward', 1.)
    memory.correct([], 'reward', 1.)
    assert column_bytes(memory.recent(10))==before and memory.check_valid()
    memory = ReplayMemory(10, sequence=Sequence(2))
    for k in range(5): memory.add(STACKED._replace(step_n=k))
    memory.correct([1], 'reward', 3.)
    with refused('terminated'): memory.correct([1], 'terminated', True)
    assert memory.check_valid()


# ---- a memory that nobody has any more

OPTIONS = {**{k: lambda path, make=make: dict(sampler=make()) for k, make in SAMPLERS.items()}, 'sequences': lambda path: dict(sequence=Sequence(4)),
           'windows': lambda path: dict(windows={'state': (-1, 0)}), 'limited': lambda path: dict(max_draws=3), 'on disk': lambda path: dict(path=path)}


def used(**options):
    "A memory on which everything was done that makes parts of it"
    memory = ReplayMemory(30, seed=0, **options)
    for k in range(40): memory.add(Transition(np.full(3, k, np.float32), k % 2, 1., np.full(3, k + 1, np.float32), k % 10 == 9, False))
    memory.sample(2)
    memory.drop([memory.n_added - 1])
    assert list(memory.episodes()) and len(memory.previous([35])) == 1
    return memory


@pytest.mark.parametrize('kind', OPTIONS)
def test_rows_are_freed_with_the_memory(kind, tmp_path):
    "At once, and not when the garbage collector comes: a circle among its parts would keep gigabytes until then"
    gc.disable()
    try:
        memory = used(**OPTIONS[kind](tmp_path))
        shelf = memory._shelf
        parts = [weakref.ref(o) for o in (memory, shelf, shelf.storage, shelf.room, memory._chooser)]
        del memory, shelf
        assert not [type(o()).__name__ for o in parts if o() is not None]
    finally: gc.enable()
