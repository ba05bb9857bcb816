"""`ExperienceReplay` and `PrioritizedReplay`: the ratio of steps to batches to the item, whatever the source and whoever stops when."""
import math
import random
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fastrl_replay.batch import Batch
from fastrl_replay.pipes.base import IterDataPipe
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.loader import Facade
from fastrl_replay.pipes.replay import ExperienceReplay, PrioritizedReplay
from harness import seen
from test_harness import Own, Stream
from test_memory_protocol import NaiveMemory
from twins import Only, column_bytes, stacked
from refusals import refused
from words import WORDS


def only(i): return Only(np.full(3, i, np.int32))
def chunks(sizes, form=list):
    i = 0
    for m in sizes:
        yield form([only(i + k) for k in range(m)]) if m else only(i)
        i += m or 1
def batch_of(steps): return Batch.of(stacked(steps))

class Pipe(IterDataPipe):
    source = None
    def __iter__(self): yield from type(self).source()

class Counted:
    "A list as an iterable that counts what was pulled"
    def __init__(self, items): self.items, self.n = list(items), 0
    def __iter__(self):
        for o in self.items:
            self.n += 1
            yield o


# --- the ratio --------------------------------------------------------------------------------------------------------
RATIOS = [1, 2, 3, 7, 50, .5, .25, .1, .3, 1.5, 2.5, 1/3, Fraction(2, 3), np.float32(.5), np.float64(2.5), np.int64(3)]

@pytest.mark.parametrize('ratio', RATIOS, ids=str)
@pytest.mark.parametrize('min_sz', [1, 37])
def test_exactly_as_many_batches_as_are_due(ratio, min_sz):
    "After each step: 1 + ⌊(n − min_sz)/ratio⌋, with the ratio as it is written: a tenth is a tenth"
    exact = Fraction(ratio) if isinstance(ratio, int | np.integer | Fraction) else Fraction(str(float(ratio)))
    source = Counted(map(only, range(120)))
    replay = ExperienceReplay(source, bs=1, max_sz=50, min_sz=min_sz, steps_per_batch=ratio, seed=0)
    for k, batch in enumerate(replay, 1):
        assert len(batch)==1
        # the k-th batch comes as soon as it is due, and no step later
        assert source.n==min_sz + math.ceil((k - 1)*exact)
    assert k==1 + math.floor((120 - min_sz)/exact) and source.n==120==replay.memory.n_added


@pytest.mark.parametrize('sizes', [[1]*40, [0]*40, [40], [7]*6, [3, 0, 0, 10, 1, 0, 26], [60, 1, 1], [0, 5]*8])
@pytest.mark.parametrize('form,ratio,min_sz', [(list, 1, 4), (batch_of, 3, 10), (batch_of, .5, 4), (list, 2.5, 7)])
def test_a_chunk_enters_whole_and_then_what_is_owed_comes(sizes, form, ratio, min_sz):
    source = Counted(chunks(sizes, form))
    replay, ends = ExperienceReplay(source, bs=2, max_sz=30, min_sz=min_sz, steps_per_batch=ratio, seed=0), np.cumsum([m or 1 for m in sizes]).tolist()
    after = [0]*len(sizes)
    for _ in replay:
        assert replay.memory.n_added==ends[source.n - 1]
        after[source.n - 1] += 1
    due = [0 if n < min_sz else 1 + math.floor((n - min_sz)/Fraction(str(ratio))) for n in ends]
    assert np.cumsum(after).tolist()==due
    assert replay.memory.recent(min(30, ends[-1])).x[:, 0].tolist()==list(range(max(0, ends[-1] - 30), ends[-1]))


def test_fewer_steps_than_min_sz_give_nothing():
    replay = ExperienceReplay(map(only, range(9)), bs=4, min_sz=10, seed=0)
    assert list(replay)==[] and len(replay)==9
    assert list(ExperienceReplay([], bs=4))==[]
    assert list(ExperienceReplay([[], [], []], bs=4))==[]


@pytest.mark.parametrize('stop', range(1, 12))
def test_what_is_owed_survives_abandonment_and_re_iteration(stop):
    "However often a loop is left, in the middle of a chunk's batches or not: the same batches as in one go"
    def make(): return ExperienceReplay(Stream(chunk=9), bs=3, max_sz=40, min_sz=5, steps_per_batch=2, seed=0)
    one, many = make(), make()
    it = iter(one)
    want = [next(it) for _ in range(40)]
    got = []
    while len(got) < 40:
        for k, batch in enumerate(many, 1):
            got.append(batch)
            if k==stop: break
    assert seen(got[:40])==seen(want)


def test_no_item_of_a_plain_source_is_lost_or_repeated():
    for source in (list(map(only, range(30))), Counted(map(only, range(30)))):
        replay = ExperienceReplay(source, bs=2, max_sz=100, seed=0)
        for stop in (1, 4, 2, 9):
            for k, _ in enumerate(replay, 1):
                if k==stop: break
        for _ in replay: pass
        assert [int(o.x[0]) for o in replay.memory]==list(range(30))


def test_a_finished_source_begins_anew():
    replay = ExperienceReplay(list(map(only, range(10))), bs=2, max_sz=100, seed=0)
    assert [len(list(replay)) for _ in range(3)]==[9, 10, 10]
    assert [int(o.x[0]) for o in replay.memory]==[*range(10)]*3


def test_an_iterator_as_source():
    steps = map(only, range(30))
    replay = ExperienceReplay(steps, bs=2, max_sz=100, seed=0)
    next(iter(replay))
    assert len(list(replay))==28 and [int(o.x[0]) for o in replay.memory]==list(range(30))


def test_an_error_upstream_costs_nothing_but_itself():
    class Failing:
        def __init__(self): self.n, self.broken = 0, True
        def __iter__(self):
            while self.n < 20:
                if self.n==10 and self.broken: raise RuntimeError('the environment has died')
                self.n += 1
                yield only(self.n - 1)
    replay = ExperienceReplay(Failing(), bs=2, max_sz=100, seed=0)
    got = 0
    with pytest.raises(RuntimeError, match='has died'):
        for _ in replay: got += 1
    replay.source_datapipe.broken = False
    got += len(list(replay))
    assert got==19 and [int(o.x[0]) for o in replay.memory]==list(range(20))


def test_steps_added_by_hand_count_too():
    replay = ExperienceReplay(map(only, range(5)), bs=2, min_sz=4, max_sz=20, seed=0)
    assert replay.extend([only(i) for i in range(3)]).tolist()==[0, 1, 2] and replay.add(only(3))==3
    assert len(list(replay))==1 + 5


def test_sources_of_every_form_mixed():
    def source():
        yield only(0)
        yield [only(1), only(2)]
        yield batch_of([only(3), only(4), only(5)])
        yield []
        yield only(6)
    Pipe.source = staticmethod(source)
    for s in (list(source()), tuple(source()), source(), Pipe(), Counted(source()), DataLoader(Pipe(), batch_size=None, collate_fn=lambda o: o)):
        replay = ExperienceReplay(s, bs=1, max_sz=100, seed=0)
        assert len(list(replay))==7 and [int(o.x[0]) for o in replay.memory]==list(range(7))
    assert len(list(Pipe().experience_replay(bs=2, seed=0)))==6
    assert len(list(Pipe().prioritized_replay(bs=2, seed=0)))==6


# --- options ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('make', [ExperienceReplay, PrioritizedReplay])
def test_return_idxs(make):
    replay = make(Stream('only'), bs=5, max_sz=8, return_idxs=True, seed=0)
    for (batch, idxs), _ in zip(replay, range(20)):
        assert isinstance(batch, Batch) and torch.equal(idxs, batch.idxs) and idxs.dtype==torch.int64 and idxs.tolist()==[i % 8 for i in batch.ids.tolist()]
    batch, idxs = replay.sample()
    assert len(batch)==5 and torch.equal(idxs, batch.idxs)
    batch, idxs = replay.sample(3)
    assert len(batch)==len(idxs)==3


def test_positional_arguments_are_those_of_the_ancestor():
    class Learn: pass
    learn = Learn()
    replay = ExperienceReplay(Stream('only'), learn, 3, 7, True)
    assert learn.__dict__=={'experience_replay': replay}
    assert (replay.bs, replay.memory.max_sz, replay.return_idxs)==(3, 7, True)
    assert ExperienceReplay([]).bs==1 and ExperienceReplay([]).memory.max_sz==100


@pytest.mark.parametrize('max_sz', [1, 4, 20])
def test_the_trackers_and_the_length(max_sz):
    replay = ExperienceReplay([], bs=1, max_sz=max_sz, seed=0)
    assert (replay._sz_tracker, replay._idx_tracker, replay._cycle_tracker, len(replay), bool(replay))==(0, 0, 0, 0, True)
    for n in range(1, 3*max_sz + 2):
        replay.add(only(n))
        assert replay._sz_tracker==min(n, max_sz)==len(replay)
        assert (replay._idx_tracker, replay._cycle_tracker)==((n - 1) % max_sz + 1, (n - 1)//max_sz)


def test_the_ancestors_story():
    replay, seen_so_far = ExperienceReplay([], bs=1, max_sz=20, seed=0), []
    for n in (10, 20, 30, 40):
        replay.extend([only(i) for i in range(n - 10, n)])
        seen_so_far.append((replay._sz_tracker, replay._idx_tracker, replay._cycle_tracker))
    assert seen_so_far==[(10, 10, 0), (20, 20, 0), (20, 10, 1), (20, 20, 1)]


def test_a_frozen_memory_is_drawn_from_for_ever():
    source = Counted(map(only, range(50)))
    replay = ExperienceReplay(source, bs=2, max_sz=20, seed=0)
    it = iter(replay)
    for _ in range(10): next(it)
    pulled, state = source.n, column_bytes(replay.memory.recent(5))
    replay.freeze_memory = True
    for k, _ in enumerate(replay):
        if k==200: break
    for _ in range(20): next(iter(replay))
    assert source.n==pulled and column_bytes(replay.memory.recent(5))==state
    for f, a in ((replay.add, only(1)), (replay.extend, [only(1)])):
        with pytest.raises(RuntimeError, match=WORDS['frozen']): f(a)
    replay.freeze_memory = False
    for _ in replay: pass
    assert [int(o.x[0]) for o in replay.memory.recent(20)]==list(range(30, 50)) and source.n==50


def test_freezing_takes_effect_in_a_running_loop():
    source = Counted(map(only, range(50)))
    replay = ExperienceReplay(source, bs=2, max_sz=20, seed=0)
    it = iter(replay)
    next(it)
    replay.freeze_memory, pulled = True, source.n
    for _ in range(30): next(it)
    assert source.n==pulled
    replay.freeze_memory = False
    next(it)
    assert source.n > pulled


def test_a_batch_drawn_by_hand_pays_no_debt():
    replay = ExperienceReplay(map(only, range(20)), bs=2, max_sz=50, seed=0)
    n = 0
    for _ in replay:
        n += 1
        replay.sample()
        assert len(replay.sample(1))==1
    assert n==19


def test_a_sampler_of_the_users_own():
    "Five methods, and whatever has them"
    own = Own()
    replay = ExperienceReplay(Stream('only', chunk=4), bs=6, max_sz=30, min_sz=5, seed=0, sampler=own)
    for batch, _ in zip(replay, range(40)):
        assert batch.probs.tolist()==[np.float32(1/6)]*6 and batch.weights.tolist()==[1.]*6
        batch.update_priorities(np.ones(6))
    assert own.size==30 and own.n_updates > 0 and replay.memory.check_valid()
    assert replay.memory.sampler.inner is own


# --- chance -----------------------------------------------------------------------------------------------------------
def make_uniform(seed, **kw): return ExperienceReplay(Stream(), bs=5, max_sz=40, seed=seed, **kw)
def make_prioritized(seed): return PrioritizedReplay(Stream(), bs=5, max_sz=40, seed=seed)

@pytest.mark.parametrize('make', [make_uniform, lambda seed: make_uniform(seed, replace=True), make_prioritized])
def test_the_same_seed_gives_the_same_batches(make):
    def run(seed):
        out = []
        for batch, _ in zip(make(seed), range(60)):
            batch.update_priorities(batch.ids % 3)
            out.append(batch)
        return seen(out)
    assert run(4)==run(4)
    for other in (5, 0, None): assert run(4)!=run(other)
    assert run(None)!=run(None)


@pytest.mark.parametrize('how', ['pipe', 'loader'])
def test_the_global_generators_are_left_alone(how):
    def state(): return seen([random.getstate()[1], np.random.get_state()[1], torch.get_rng_state()])     # noqa: NPY002
    before = state()
    for make in (make_uniform, make_prioritized):
        replay = make(0)
        for batch, _ in zip(replay if how=='pipe' else replay.loader(), range(20)): batch.update_priorities(np.ones(5))
    assert state()==before


def test_what_others_draw_from_the_global_generators_changes_nothing():
    def run(seed):
        torch.manual_seed(seed)
        np.random.seed(seed)     # noqa: NPY002
        return seen([batch for batch, _ in zip(make_prioritized(0).loader(), range(20))])
    assert run(1)==run(2)


# --- loaders ----------------------------------------------------------------------------------------------------------
def test_the_loader_is_the_pipe():
    for make in (make_uniform, make_prioritized):
        direct, loaded = make(1), make(1)
        for a, b, _ in zip(direct, loaded.loader(), range(30)):
            assert isinstance(b, Batch) and seen(a)==seen(b)
            assert a.update_priorities(np.ones(5))==b.update_priorities(np.ones(5))
    with pytest.raises(TypeError): len(make_uniform(0).loader())
    assert isinstance(make_uniform(0).loader(), DataLoader) and make_uniform(0).loader().batch_size is None
    idxs = next(iter(make_uniform(0, return_idxs=True).loader()))
    assert isinstance(idxs, tuple) and torch.equal(idxs[1], idxs[0].idxs)


def test_two_epochs_of_a_loader_go_on():
    replay = ExperienceReplay(map(only, range(30)), bs=2, max_sz=100, seed=0)
    loader = replay.loader()
    n = sum(1 for _ in zip(range(7), loader))
    n += 1                                   # zip asked for an eighth
    n += len(list(loader))
    assert n in (29, 30) and [int(o.x[0]) for o in replay.memory]==list(range(30))


def test_a_loader_made_by_hand():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        replay = ExperienceReplay(list(map(only, range(30))), bs=2, max_sz=10, seed=0)
        assert len(list(DataLoader(replay, batch_size=None)))==29
        batches = list(DataLoader(replay, batch_size=None, collate_fn=lambda o: o))
    assert len(batches)==30 and all(isinstance(o, Batch) for o in batches)


def test_a_large_memory_costs_a_loader_nothing():
    "torch pickles what it finds in a pipe to walk the graph: it must find no arrays"
    import pickle
    replay = ExperienceReplay(Stream('only'), bs=2, max_sz=2_000_000, seed=0, step=only(0))
    replay.add(only(0))
    dumped = []
    class Spy(pickle.Pickler):
        def reducer_override(self, o):
            if isinstance(o, np.ndarray) and o.nbytes > 10**6: dumped.append(o.shape)
            return NotImplemented
    it = iter(DataLoader(replay, batch_size=None))
    next(it)
    assert not dumped


def first_of(loader):
    "The first item, with the workers ended before anything else happens"
    it = iter(loader)
    try: return next(it)
    finally: it._shutdown_workers()


@pytest.mark.parametrize('make,ctx,wrap', [(ExperienceReplay, 'fork', lambda o: o), (PrioritizedReplay, 'fork', Facade), (ExperienceReplay, 'spawn', lambda o: o)],
                         ids=['pipe, fork', 'facade, fork', 'pipe, spawn'])
def test_a_worker_process_is_refused(make, ctx, wrap):
    replay = make([only(i) for i in range(30)], bs=2, seed=0)
    loader = DataLoader(wrap(replay), batch_size=None, num_workers=1, multiprocessing_context=ctx, timeout=60)
    with pytest.raises(RuntimeError, match=WORDS['a worker of a loader']): first_of(loader)
    assert len(replay)==0
    assert len(list(replay.loader()))==29


def test_a_frozen_one_is_refused_there_too():
    replay = ExperienceReplay([], bs=2, seed=0)
    replay.memory.extend([only(i) for i in range(5)])
    replay.freeze_memory = True
    with pytest.raises(RuntimeError, match=WORDS['in a worker of a loader']): first_of(DataLoader(replay, batch_size=None, num_workers=1, multiprocessing_context='fork'))


def test_a_memory_of_ones_own_beside_the_pipe():
    "What the pipe does is what the memory does: the same seed, the same steps, the same batches"
    replay, memory = ExperienceReplay(map(only, range(40)), bs=4, max_sz=30, min_sz=10, steps_per_batch=2, seed=8), ReplayMemory(30, seed=8)
    want = []
    for n in range(1, 41):
        memory.add(only(n - 1))
        if n >= 10 and (n - 10) % 2==0: want.append(memory.sample(4))
    assert seen(list(replay))==seen(want)


def test_any_memory_serves():
    memory = NaiveMemory(500, 0)
    replay = ExperienceReplay(Stream('only', chunk=3), bs=4, memory=memory, min_sz=9, steps_per_batch=2)
    for batch, _ in zip(replay.loader(prefetch=2), range(20)):
        assert len(batch)==4 and replay.update_priorities(batch.ids, torch.ones(4))==0
    assert replay.memory is memory and replay.n_batches==1 + 2 + 20 and len(replay)==memory.n_added
    assert replay.add(only(1))==memory.n_added - 1 and replay.state_dict()['rng']==memory.rng.get_state()
    replay.load_state_dict(replay.state_dict())
    replay.freeze_memory, n = True, memory.n_added
    next(iter(replay))
    assert memory.n_added==n


def test_two_pipes_over_one_memory():
    memory = ReplayMemory(40, seed=0)
    a, b = (ExperienceReplay(map(only, range(20)), bs=bs, memory=memory) for bs in (2, 5))
    assert len(list(a))==19 and len(memory)==20
    assert len(list(b))==16 + 20 and len(memory)==40 and memory.check_valid()        # steps count for both, whoever pulled them


@pytest.mark.parametrize('name,value', dict(max_sz=7, seed=0, replace=True, step=only(0), dedup='frames', path='x', sampler=Own()).items())
def test_options_that_make_a_memory_are_refused_beside_one(name, value):
    with refused(name, TypeError): ExperienceReplay([], memory=ReplayMemory(50), **{name: value})
    with refused('memory', TypeError): PrioritizedReplay([], memory=ReplayMemory(50))
    assert ExperienceReplay([], memory=ReplayMemory(50), max_sz=50).memory.max_sz==50


def test_what_is_no_memory_is_refused():
    for o in ([], dict, 'memory', 3):
        with refused('memory', TypeError): ExperienceReplay([], memory=o)


def test_repr_says_something():
    text = repr(PrioritizedReplay(Stream(), bs=4, seed=0))
    assert 'PrioritizedReplay' in text and 'bs=4' in text and len(text) < 1000
