"""Several memories as one: exact shares, ids and priorities that find their way, and all of it saved as one, beside a naive twin."""
import copy, os, pickle
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fastrl_replay.all import (
    ExperienceReplay, HindsightReplay, LinearSchedule, MixedMemory, PrioritizedReplay, Proportional, RankBased, RankReplay,
    ReplayMemory, Sequence, SequenceReplay, SimpleStep, Transition,
    Uniform)
from fastrl_replay.mixed import SHIFT, dealt
from fastrl_replay.ray import RayMemory
from fastrl_replay.saving import CheckpointError
from test_saving_format import Calls, Injected, quiet_disk
from refusals import refused
from words import WORDS, words


class Named(NamedTuple):
    "A step that says who it is: `state` (its number, its memory)"
    state: np.ndarray
    action: int
    reward: float
    next_state: np.ndarray
    terminated: bool
    truncated: bool

class Wider(NamedTuple):
    "The same in another order, with a field of its own"
    reward: float
    state: np.ndarray
    extra: int
    action: int
    next_state: np.ndarray
    terminated: bool
    truncated: bool

def step(k, n, kind=Named, ended=False):
    state = np.array([n, k], np.float32)
    known = dict(state=state, action=n % 5, reward=float(n), next_state=state + 1, terminated=ended, truncated=False, extra=7)
    return kind(**{f: known[f] for f in kind._fields})

def filled(k, n, max_sz=50, sampler=None, kind=Named, **kw):
    memory = ReplayMemory(max_sz, sampler, seed=k, **kw)
    if n: memory.extend([step(k, i, kind) for i in range(n)])
    return memory

def mixture(shares=(.25, .75), n=30, seed=0, **kw):
    return MixedMemory([filled(0, n, **kw), filled(1, n, 40, Proportional(), kind=Wider)], shares, seed)


# ---- shares

@pytest.mark.parametrize('seed', range(8))
def test_shares_of_any_numbers_hold_in_the_long_run(seed):
    rng = np.random.default_rng(seed)
    m = int(rng.integers(1, 7))
    shares = rng.dirichlet(np.full(m, .5))
    if m > 2: shares[0] = 0
    shares, owed, given, asked = tuple(shares/shares.sum()), (0.,)*m, np.zeros(m), 0
    for _ in range(400):
        bs = int(rng.integers(1, 40))
        rows, owed = dealt(bs, shares, owed)
        given, asked = given + rows, asked + bs
        assert sum(rows)==bs and min(rows) >= 0 and (m < 3 or rows[0]==0)
        assert np.abs(given - asked*np.array(shares)).max() < (1 if m < 3 else 2)
        assert np.allclose(owed, asked*np.array(shares) - given)

def test_shares_may_be_schedules():
    mixed = mixture((LinearSchedule(0., 1., 100), LinearSchedule(1., 0., 100)))
    counts = [int((mixed.sample(8).source==0).sum()) for _ in range(150)]
    assert counts[0]==0 and counts[100:]==[8]*50 and abs(sum(counts[:100]) - 8*sum(k/100 for k in range(100))) < 1
    one = mixture(LinearSchedule(1., .5, 10))                      # that of the first
    assert [int(one.sample(4).source.sum()) for _ in range(12)][:1]==[0] and one.sampler.shares_now==(.5, .5)
    both = mixture(lambda k: (.5, .5) if k % 2 else (1., 0.))
    assert [int(both.sample(4).source.sum()) for _ in range(4)]==[0, 2, 0, 2]
    late = mixture(lambda k: (.5, .5) if k < 1 else (.7, .7))
    late.sample(2)
    with refused('shares', got='(0.7, 0.7)'): late.sample(2)

def test_new_shares_forget_what_was_owed():
    mixed = mixture((.5, .5))
    mixed.sample(1)
    mixed.set_shares((.25, .75))
    assert mixed.sampler.shares_now==(.25, .75) and mixed.sampler.owed==(0., 0.)
    assert int((mixed.sample(4).source==0).sum())==1
    with refused('shares', got='(1, 1)'): mixed.set_shares((1, 1))
    assert mixed.sampler.shares_now==(.25, .75)

def test_every_order_is_equally_likely():
    "Which memory has which place: chi-square of all 15 arrangements of two and four rows"
    mixed = mixture((1/3, 2/3))
    found = Counter(tuple(mixed.sample(6).source.tolist()) for _ in range(15_000))
    assert len(found)==15 and sum((n - 1000)**2/1000 for n in found.values()) < 36.1          # 14 degrees, one in a thousand


# ---- beside a twin

class Twin:
    "What several memories hold: by (memory, id) the number of a step and its priority"
    def __init__(self, sizes): self.sizes, self.rows, self.n, self.largest = sizes, {}, [0]*len(sizes), [1.]*len(sizes)
    def alive(self, k, id): return max(0, self.n[k] - self.sizes[k]) <= id < self.n[k]
    def store(self, k, numbers):
        for number in numbers:
            self.rows[k, self.n[k]] = [number, self.largest[k]]
            self.n[k] += 1
    def update(self, ids, errors):
        changed = {}
        for id, e in zip(ids, errors):
            if self.alive(id >> SHIFT, id % 2**SHIFT): changed[id >> SHIFT, id % 2**SHIFT] = abs(e) + 1e-6
        for key, p in changed.items():
            self.rows[key][1] = p
            self.largest[key[0]] = max(self.largest[key[0]], p)
        return len(changed)
    def check(self, mixed, batch):
        ids, source, slots = batch.ids.tolist(), batch.source.tolist(), batch.idxs.tolist()
        for i, (id, k, slot) in enumerate(zip(ids, source, slots)):
            own = id % 2**SHIFT
            assert id >> SHIFT==k and self.alive(k, own) and slot==own % self.sizes[k]
            assert batch.state[i].tolist()==[self.rows[k, own][0], k] and batch.reward[i]==self.rows[k, own][0]
    def check_all(self, mixed):
        for k, o in enumerate(mixed.memories):
            ids = range(max(0, self.n[k] - self.sizes[k]), self.n[k])
            assert [self.rows[k, i][1] for i in ids]==o.sampler.priorities[[i % self.sizes[k] for i in ids]].tolist()
        assert len(mixed)==min(self.n[0], self.sizes[0]) and mixed.n_added==self.n[0]
        assert mixed.check_valid()


@pytest.mark.parametrize('seed', range(2))
def test_thousands_of_operations_beside_a_twin(seed, tmp_path):
    rng, sizes = np.random.default_rng(seed), [30, 50, 7]
    memories = [ReplayMemory(n, Proportional(alpha), seed=seed) for n, alpha in zip(sizes, (.6, 1., .3))]
    mixed, twin, seen, number = MixedMemory(memories, seed=seed), Twin(sizes), [], 0
    for k, kind in enumerate((Named, Wider, Named)):
        memories[k].extend([step(k, i, kind) for i in range(5)])
        twin.store(k, range(5))
    for turn in range(700):
        what = rng.choice(['add', 'extend', 'other', 'sample', 'update', 'fetch', 'shares', 'copy', 'save'],
                          p=[.2, .1, .1, .25, .2, .1, .03, .01, .01])
        number += 10
        if what=='add':
            assert mixed.add(step(0, number))==twin.n[0]
            twin.store(0, [number])
        elif what in ('extend', 'other'):
            k = 0 if what=='extend' else int(rng.integers(1, 3))
            numbers = range(number, number + int(rng.integers(1, 9)))
            (mixed if k==0 else memories[k]).extend([step(k, i, Wider if k==1 else Named) for i in numbers])
            twin.store(k, numbers)
        elif what=='sample':
            batch = mixed.sample(int(rng.integers(1, 30)))
            twin.check(mixed, batch)
            seen += batch.ids.tolist()
        elif what=='update' and seen:
            ids = rng.choice(seen[-200:], int(rng.integers(1, 20)))
            errors = rng.integers(1, 9, len(ids)).astype(float)
            assert mixed.update_priorities(ids, errors)==twin.update(ids.tolist(), errors.tolist())
        elif what=='fetch' and seen:
            ids = [i for i in seen[-40:] if twin.alive(i >> SHIFT, i % 2**SHIFT)]
            rows = mixed.fetch(ids)
            assert rows.ids.tolist()==ids and rows.source.tolist()==[i >> SHIFT for i in ids]
            assert rows.state.tolist()==[[twin.rows[i >> SHIFT, i % 2**SHIFT][0], i >> SHIFT] for i in ids]
        elif what=='shares': mixed.set_shares(tuple(rng.dirichlet(np.ones(3))))
        elif what=='copy':
            mixed = copy.deepcopy(mixed) if rng.random() < .5 else pickle.loads(pickle.dumps(mixed))
            memories = mixed.memories
        elif what=='save':
            mixed.save(tmp_path/'state')
            again = MixedMemory.load(tmp_path/'state')
            assert again.sample(9).ids.tolist()==copy.deepcopy(mixed).sample(9).ids.tolist()
            twin.check_all(again)
        if turn % 40==0: twin.check_all(mixed)
    twin.check_all(mixed)


def test_rows_that_memories_copy_are_those_of_joined_batches(seed=0):
    "Drawn straight into a batch, or as batches that are joined: the same to the bit, whatever is stored, dropped or asked for"
    rng = np.random.default_rng(seed)
    samplers = Uniform(), Proportional(beta=.4), Uniform(replace=True)
    memories = [filled(k, 20, 25 + 10*k, o, Wider if k==1 else Named) for k, o in enumerate(samplers)]
    straight = MixedMemory(memories, (.2, .5, .3), seed)
    joined = copy.deepcopy(straight)
    joined._blend.here = False
    for turn in range(200):
        bs, fields = int(rng.integers(1, 40)), [None, ['state'], ['reward', 'action']][turn % 3]
        some = rng.integers(0, 3)
        rows = [step(some, 100 + turn, Wider if some==1 else Named)]*int(rng.integers(0, 4))
        ids, errors = rng.integers(0, 20, 5) | 1 << SHIFT, rng.random(5)
        shares = rng.dirichlet(np.ones(3))
        found = []
        for o in (straight, joined):
            if turn % 50==49: o.set_shares(tuple(shares))
            if turn==99: o.memories[0].drop(o.memories[0].recent(5).ids)
            o.memories[some].extend(rows)
            o.update_priorities(ids, errors)
            try: batch = o.sample(bs, fields)
            except ValueError as e: found.append(str(e))
            else: found.append([batch.ids.tolist(), batch.source.tolist(), batch.probs.tolist(), batch.weights.tolist(),
                                *(c.tolist() for c in batch.astuple()), batch.layout.fields])
            found[-1] = found[-1], o.rng.get_state(), [*o.n_drawn]
        assert found[0]==found[1]


def test_locks_are_taken_in_one_order():
    a, b, c = (filled(k, 3) for k in range(3))
    orders = [MixedMemory(o).lock.memories for o in ([a, b, c], [c, a, b], [b, c, a])]
    assert orders[0]==orders[1]==orders[2] and set(map(id, orders[0]))==set(map(id, (a, b, c)))


# ---- columns

def test_the_columns_are_those_that_all_have():
    mixed = mixture()
    batch = mixed.sample(8)
    assert batch.step_type is Named and batch.layout.fields==Named._fields and not hasattr(batch, 'extra')
    assert {o.layout.fields for o in [mixed.sample(8) for _ in range(5)]}=={Named._fields}
    some = mixed.sample(8, ['reward', 'state'])
    assert some.layout.fields==('reward', 'state') and some.reward.tolist()==some.state[:, 0].tolist()
    with refused('fields'): mixed.sample(8, ['extra'])
    with refused('fields', TypeError, got="str 'state'"): mixed.sample(8, 'state')

def test_a_field_called_source_stays_the_users():
    class Sourced(NamedTuple):
        state: float
        source: int
    memory = ReplayMemory(9, seed=0)
    memory.extend([Sourced(1., 5)]*9)
    assert memory.sample(3).source.tolist()==[5]*3
    other = ReplayMemory(9, seed=0)
    other.extend([Sourced(1., 6)]*9)
    batch = MixedMemory([memory, other], seed=0).sample(4)
    assert [5 + k for k in batch.source.tolist()]==batch['source'].tolist()


# ---- what is refused

def test_what_does_not_fit_together_is_refused_by_name():
    a, b = filled(0, 9), filled(1, 9)
    for shares, expected in [((.5, .6), 'numbers that add up to 1'), ((-.5, 1.5), 'numbers ≥ 0'),
                            ((1.,), '2, one for each memory'), ((.5, .25, .25), '2, one for each memory'),
                            ((float('nan'), 1.), 'numbers ≥ 0'), (('a', 'b'), 'numbers ≥ 0'), (2., 'numbers ≥ 0')]:
        with refused('shares', expected=expected, got=repr(shares if isinstance(shares, tuple) else (2., -1.))): MixedMemory([a, b], shares)
    for wrong, error, message in [([], ValueError, 'memories'),
                                  ([a, a], ValueError, 'memories'),
                                  (a, TypeError, 'memories'),
                                  ([a, []], TypeError, 'memory'),
                                  ([a, MixedMemory([b])], ValueError, 'memories')]:
        with refused(message, error): MixedMemory(wrong)
    with refused('shares', TypeError, got="str 'half'"): MixedMemory([a, b], 'half')

def test_columns_that_differ_are_refused_by_name():
    def of(**kw): return filled(0, 0, step=Transition(**dict(state=np.zeros(2, np.float32), action=0, reward=0., next_state=np.zeros(2, np.float32),
                                                             terminated=False, truncated=False) | kw))
    wide, double = (np.zeros(s, t) for s, t in ((3, np.float32), (2, np.float64)))
    for kw, message in [(dict(state=wide, next_state=wide), 'state'),
                        (dict(state=double, next_state=double), 'state'),
                        (dict(action=np.float32(0)), 'action'),
                        (dict(state=dict(a=wide), next_state=dict(a=wide)), 'state')]:
        with refused(message): MixedMemory([of(), of(**kw)])
    Other, Summed = NamedTuple('Other', [('pixels', float)]), NamedTuple('Summed', [('state', float), ('discount', float)])
    with refused('memories', got="('pixels',)"):
        MixedMemory([of(), ReplayMemory(9, step=Other(1.))])
    with refused('discount'):
        MixedMemory([ReplayMemory(9, step=NamedTuple('Alone', [('state', float)])(1.)), ReplayMemory(9, step=Summed(1., .9))])

@pytest.mark.parametrize('how', ['add', 'extend', 'stacked'])
def test_a_first_step_that_differs_is_not_stored(how):
    mixed = MixedMemory([ReplayMemory(9), filled(1, 9)])
    wrong = step(0, 1)._replace(state=np.zeros(3, np.float32), next_state=np.zeros(3, np.float32))
    with refused('state', got='state float32[2] in memory 1'):
        if how=='add': mixed.add(wrong)
        elif how=='extend': mixed.extend([wrong]*3)
        else: mixed.extend(Named(*(np.stack([v, v]) for v in wrong)))
    assert mixed.n_added==0 and mixed.layout is None
    mixed.extend([step(0, n) for n in range(9)])
    assert len(mixed.sample(4))==4

def test_an_empty_memory_is_named_unless_it_has_no_share():
    mixed = MixedMemory([filled(0, 9), ReplayMemory(9)], (.75, .25), seed=1)
    state = mixed.rng.get_state(), mixed.memories[0].draws.n_rows
    with pytest.raises(ValueError, match=words('a share of an empty memory', k=1, share=.25)): mixed.sample(4)
    assert (mixed.rng.get_state(), mixed.memories[0].draws.n_rows)==state and mixed.n_drawn==[0, 0]
    mixed.set_shares((1, 0))
    assert mixed.sample(4).source.tolist()==[0]*4
    mixed.set_shares((.2, .8))
    mixed.memories[1].extend([step(1, n) for n in range(3)])
    state = mixed.rng.get_state()
    with pytest.raises(ValueError, match=words('too few of a memory', k=1, bs=4, n=3)): mixed.sample(5)
    assert mixed.rng.get_state()==state                                              # whoever may refuse is asked first


# ---- sequences, shards

def test_bad_input_is_refused_and_changes_nothing():
    mixed = mixture()
    batch, before = mixed.sample(9), mixed.memories[1].sampler.priorities
    good = [1 << SHIFT]
    for ids, td, message in [(good + [2 << SHIFT], [1., 1.], 'ids'), (good + [-5], [1., 1.], 'ids'),
                             (good + [30], [1., 1.], 'ids'), (good + [1 << SHIFT | 30], [1., 1.], 'ids'),
                             (good, [1., 2.], 'td_errors'), (good, [float('nan')], 'td_errors')]:
        with refused(message): mixed.update_priorities(ids, td)
    for ids in ([.5], ['a']):
        with refused('ids', TypeError): mixed.update_priorities(ids, [1.])
    for bs in (0, -1, 1.5, True, None):
        with refused('bs'): mixed.sample(bs)
    with refused('ids'): mixed.fetch([2 << SHIFT])
    with refused('ids', got='30'): mixed.fetch([30])
    assert (mixed.memories[1].sampler.priorities==before).all()
    assert batch.update_priorities(torch.ones(9))==len({*batch.ids[batch.source==1].tolist()})


def sequences(k, n=60, burn_in=1, **kw):
    memory = ReplayMemory(80, seed=k, sequence=Sequence(6, burn_in), **kw)
    memory.extend([SimpleStep(np.float32(i), k, np.float32(i + 1), i % 9==8, False, 1., env_id=0, step_n=i % 9, episode_n=i//9) for i in range(n)])
    return memory

def test_sequences_of_several_memories():
    mixed = MixedMemory([sequences(0), sequences(1, sampler=Proportional())], (.25, .75), seed=0)
    for _ in range(20):
        batch = mixed.sample(8)
        assert batch.mask.shape==batch.ids.shape==(8, 6) and batch.burn_in==1 and (batch.source.bincount()==torch.tensor([2, 6])).all()
        assert (batch.ids[~batch.mask]==-1).all() and (batch.idxs[~batch.mask]==-1).all()
        assert (batch.action[batch.mask]==batch.source[:, None].expand(8, 6)[batch.mask]).all()
        assert torch.equal(batch.state[batch.mask].long(), batch.idxs[batch.mask])
        first = batch.time_first()
        assert torch.equal(first.source, batch.source) and torch.equal(first.idxs, batch.idxs.T) and torch.equal(first.state, batch.state.T)
    changed = batch.update_priorities(torch.ones(8, 6))
    assert changed==len({*batch.ids[batch.source==1][:, 0].tolist()})
    with refused('memory 1', got='None'): MixedMemory([sequences(0), filled(1, 9)])
    with refused('memory 1'): MixedMemory([sequences(0), sequences(1, burn_in=2)])

def test_shards_may_be_one_of_them():
    shards = RayMemory(3, 60, Proportional(), place='here', seed=0)
    shards.extend([step(0, n) for n in range(45)])
    mixed = MixedMemory([filled(1, 20), shards], (.5, .5), seed=0)
    for _ in range(5):
        batch = mixed.sample(12)
        assert batch.state[:, 1].tolist()==[1. - k for k in batch.source.tolist()]
        assert torch.equal(mixed.fetch(batch.ids).state, batch.state)
        assert batch.update_priorities(np.ones(12))==len({*batch.ids[batch.source==1].tolist()})
    with refused('memory', TypeError): mixed.save('anywhere')
    assert mixed.health()['memories'][1]['n']==45 and mixed.show().axes


# ---- saved

def everything(mixed):
    "All that two equal mixtures have in common"
    rows = [list(map(repr, o.fetch(np.arange(o.first_id, o.n_added)).astuple())) for o in mixed.memories]
    return rows, mixed.rng.get_state(), [o.sampler.get_state()['n_batches'] for o in mixed.memories], [*mixed.n_drawn], mixed.sampler.shares_now

def test_shares_and_what_is_owed_are_saved(tmp_path):
    schedule = (LinearSchedule(.2, .6, 50), LinearSchedule(.8, .4, 50))
    for shares in ((.35, .65), schedule, LinearSchedule(.1, .9, 30)):
        mixed = mixture(shares)
        for _ in range(7): mixed.sample(9)
        mixed.save(tmp_path/'s')
        again = MixedMemory.load(tmp_path/'s')
        for _ in range(30): assert torch.equal(mixed.sample(9).ids, again.sample(9).ids)
    own = mixture(lambda k: (.5, .5))
    own.save(tmp_path/'s')
    with pytest.raises(CheckpointError, match=WORDS['a schedule of others']): MixedMemory.load(tmp_path/'s')
    assert MixedMemory.load(tmp_path/'s', shares=lambda k: (.5, .5)).sample(4).source.sum()==2

def test_another_kind_of_folder_is_refused(tmp_path):
    mixed, one = mixture(), filled(0, 9)
    mixed.save(tmp_path/'mixed')
    one.save(tmp_path/'one')
    with refused(str(tmp_path/'one'/'manifest.json'), CheckpointError, expected='the state of a mixed memory', got='a memory'): MixedMemory.load(tmp_path/'one')
    with pytest.raises(CheckpointError, match=words('not a state', what='a memory')): ReplayMemory.load(tmp_path/'mixed')
    with refused('samplers'): MixedMemory.load(tmp_path/'mixed', samplers=[None])

def test_a_restore_that_fails_changes_nothing():
    mixed, other = mixture(), mixture(n=12)
    state, rows = other.saved()
    state['memories'][1]['max_sz'] = 9
    before = everything(mixed)
    with refused('max_sz'): mixed.restore(state, rows.pieces())
    assert everything(mixed)==before and mixed.check_valid()
    state, rows = other.saved()
    with pytest.raises(ValueError): mixed.restore(state | dict(shares=[1., 1.]), rows.pieces())
    assert everything(mixed)==before
    state, rows = other.saved()
    mixed.restore(state, rows.pieces())
    assert everything(mixed)==everything(other)

def test_it_has_members_on_disk(tmp_path):
    with filled(0, 30, path=tmp_path/'online') as online:
        mixed = MixedMemory([online, filled(1, 30)], seed=0)
        mixed.flush()
        mixed.save(tmp_path/'saved')
        assert everything(MixedMemory.load(tmp_path/'saved'))==everything(mixed)


def saved_and_changed(folder):
    "A mixture with rows that its save in this folder lacks, and all that was saved"
    mixed = mixture(n=40)
    mixed.save(folder)
    old = everything(mixed)
    mixed.extend([step(0, n) for n in range(90, 140)])
    mixed.memories[1].extend([step(1, n, Wider) for n in range(60)])
    return mixed, old

@pytest.mark.parametrize('after', [False, True])
def test_every_call_to_the_system_fails_in_turn(tmp_path, monkeypatch, after):
    quiet_disk(monkeypatch)
    olds = news = 0
    for fail in range(500):
        folder = tmp_path/f'{fail}'
        mixed, old = saved_and_changed(folder)
        with monkeypatch.context() as patch:
            calls = Calls(patch, fail, after)
            try: mixed.save(folder)
            except Injected: pass
        if len(calls.made) <= fail: break
        found = everything(MixedMemory.load(folder))
        assert found in (old, everything(mixed)), f'{calls.made[fail]}, call {fail}: a part of each'
        olds, news = olds + (found==old), news + (found!=old)
    assert olds > 15 and news > 3

@pytest.mark.skipif(not hasattr(os, 'fork'), reason='forks')
def test_a_save_killed_at_every_call_to_the_system(tmp_path, monkeypatch):
    quiet_disk(monkeypatch)
    olds = news = 0
    for fail in range(500):
        folder = tmp_path/f'{fail}'
        mixed, old = saved_and_changed(folder)
        child = os.fork()
        if not child:                                              # at this call it is gone, without another word
            calls = Calls(pytest.MonkeyPatch(), fail, error=lambda *_: os._exit(9))
            mixed.save(folder)
            os._exit(0 if len(calls.made) <= fail else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code==0: break
        assert code==9
        found = everything(MixedMemory.load(folder))
        assert found in (old, everything(mixed)), f'call {fail}: a part of each'
        olds, news = olds + (found==old), news + (found!=old)
    assert olds > 15 and news > 3


# ---- in pipes and learners

def loop(n, first=0):
    rng = np.random.default_rng(n + first)
    for i in range(first, n):
        state = rng.normal(size=4).astype(np.float32)
        yield SimpleStep(state, int(rng.integers(2)), state + 1, i % 10==9, False, 1., float(i % 10 + 1), env_id=0, step_n=i % 10, episode_n=i//10)

def test_every_pipe_takes_one():
    def of(*samplers, **kw): return MixedMemory([ReplayMemory(60, o, seed=1, **kw) for o in samplers], seed=2)
    def fill(mixed):
        for o in mixed.memories[1:]: o.extend([*loop(60)])
        return mixed
    mixed = fill(of(Proportional(), Proportional()))
    batches = [*loop_through(PrioritizedReplay, mixed, bs=6)]
    assert len(batches)==16 and all((o.source.bincount()==3).all() for o in batches) and batches[-1].update_priorities(np.ones(6)) > 3
    mixed = fill(of(RankBased(), RankBased()))
    assert len([*loop_through(RankReplay, mixed, bs=6)])==16
    mixed = fill(of(None, None, sequence=Sequence(5)))
    batches = [*loop_through(SequenceReplay, mixed, bs=4, max_sz=60, length=5)]
    assert len(batches) > 10 and batches[-1].mask.shape==(4, 5) and (batches[-1].source.bincount()==2).all()
    for pipe, kw, message in [(PrioritizedReplay, dict(alpha=.7), 'alpha'),
                              (PrioritizedReplay, dict(beta=LinearSchedule(.4, 1., 9)), 'beta'),
                              (RankReplay, {}, 'memory')]:
        with refused(message, TypeError): pipe([], memory=fill(of(Proportional(), Proportional())), **kw)
    with refused('memory', TypeError):
        SequenceReplay([], bs=2, max_sz=60, length=6, memory=mixed)
    with refused('memory', TypeError):
        HindsightReplay([], lambda a, b, info: 0, memory=fill(of(None, None)))

def loop_through(pipe, mixed, **kw): return pipe(loop(80), memory=mixed, **dict(min_sz=20, steps_per_batch=4) | kw)

def test_a_pipe_waits_for_a_memory_that_is_empty():
    demos = ReplayMemory(60, seed=1)
    mixed, found = MixedMemory([ReplayMemory(200, seed=0), demos], (.5, .5), seed=0), []
    def steps():
        for i, o in enumerate(loop(100)):
            if i==60: demos.extend([*loop(30)])
            yield o
    for _ in ExperienceReplay(steps(), bs=4, memory=mixed, min_sz=10, steps_per_batch=10): found.append(mixed.n_added)
    assert found==[70, 80, 90, 100]                                # those that were due before are skipped
    mixed = MixedMemory([ReplayMemory(200, seed=0), ReplayMemory(9)], (1., 0.), seed=0)
    assert len([*ExperienceReplay(loop(100), bs=4, memory=mixed, min_sz=10, steps_per_batch=10)])==10

def test_rows_that_were_dropped_are_not_drawn():
    mixed = mixture((.5, .5))
    assert mixed.memories[1].drop(np.arange(25))==25
    assert (torch.cat([o.idxs[o.source==1] for o in [mixed.sample(8) for _ in range(20)]]) >= 25).all()
    mixed.memories[1].drop(np.arange(25, 30))
    with pytest.raises(ValueError, match=words('a share of what cannot be drawn', k=1, share=.5)): mixed.sample(8)


def test_recent_is_the_first_memorys():
    "As `n_added` is: with ids of the mixture, and with the same errors"
    first = filled(0, 65, sampler=Proportional())
    mixed = MixedMemory([first, filled(1, 30)], seed=0)
    for k in (1, 4, 50):
        rows, truth = mixed.recent(k), first.recent(k)
        assert rows.ids.tolist()==truth.ids.tolist()==[*range(65 - k, 65)] and torch.equal(rows.state, truth.state) and rows.source.tolist()==[0]*k
        assert torch.equal(mixed.fetch(rows.ids).state, rows.state)
    assert mixed.recent(4).update_priorities(np.ones(4))==4
    assert mixed.recent(3, ['reward']).columns('reward')[0].tolist()==[62, 63, 64]
    for bad in (51, 0, -1):
        with refused('k'): mixed.recent(bad)
