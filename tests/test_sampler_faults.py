"""What every sampler must withstand: copies that are attached to other memories, interrupts between any two lines,
damaged states, options that travel. Each test runs for every sampler of the library and for a user's own."""
import copy
import json
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from draws import batch, filled

from fastrl_replay.samplers.rng import Rng
from fastrl_replay import samplers
from fastrl_replay.samplers.base import Prioritized, Sampler
from fastrl_replay.samplers.age import AgeWeighted
from fastrl_replay.samplers.more import ERE, LAP, Combined
from fastrl_replay.samplers.own import KINDS, OwnSampler, as_sampler, sampler_from
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.schedules import ExponentialSchedule, LinearSchedule
from faults import interrupted
from refusals import about, refused
from words import WORDS


class Own:
    "A user's sampler: proportional, in plain numpy"
    beta = .5
    def __init__(self): self.p, self.n = np.zeros(0), 0
    def on_add(self, slots, priorities):
        grown = np.zeros(max(len(self.p), int(np.max(slots)) + 1))
        grown[:len(self.p)] = self.p
        grown[slots] = 1. if priorities is None else priorities
        self.p = grown
    def draw(self, bs, rng):
        chances = (self.p + .01)/(self.p + .01).sum()
        slots = rng.choice(len(chances), bs, p=chances)
        return slots, chances[slots]
    def update(self, slots, td_errors): self.p[slots] = np.abs(td_errors)
    def get_state(self): return dict(p=self.p.copy())
    def set_state(self, state): self.p = np.array(state['p'], float)


class Derived(Sampler):
    "A user's sampler with the base class, which draws the oldest slots"
    def draw(self, bs, rng): return np.arange(bs) % self.size, np.full(bs, 1/self.size)


MAKES = dict(uniform=Uniform, repeating=lambda: Uniform(True), proportional=Proportional,
             by_memory=lambda: Proportional(1., .7, 0., 'memory'), rank=RankBased, lap=LAP, combined=Combined,
             ere=lambda: ERE(.99, 5, 7),
             aged=lambda: AgeWeighted(9, .2), own=lambda: as_sampler(Own()), derived=Derived)
every = pytest.mark.parametrize('make', MAKES.values(), ids=MAKES.keys())
COPIES = dict(pickle=lambda o: pickle.loads(pickle.dumps(o)), copy=copy.copy, deepcopy=copy.deepcopy)


class Room:
    "An allocator with fences behind what it gives"
    def __init__(self, known=None): self.known = known or {}
    def __call__(self, name, nbytes=None):
        if nbytes is None: nbytes = len(self.known[name]) - 256
        if name not in self.known: self.known[name] = np.full(nbytes + 256, 170, np.uint8)
        whole = self.known[name]
        start = -whole.ctypes.data % 64
        if (whole[start:start + nbytes]==170).all(): whole[start:start + nbytes] = 0
        return whole[start:start + nbytes]
    def check(self):
        for name, whole in self.known.items(): assert whole[-192:].min()==170==whole[-192:].max(), name


def plain(v):
    "A state as nested lists that == compares"
    if isinstance(v, dict): return {k: plain(o) for k, o in v.items()}
    if isinstance(v, tuple): return [plain(o) for o in v]
    return v.tolist() if isinstance(v, np.ndarray) else v


def live(sampler, rng, max_sz, n, rounds=30):
    "Adds, draws and updates, checked after each round; all that was drawn"
    chance, drawn = np.random.default_rng(n), []
    for _ in range(rounds):
        m = int(chance.integers(1, max_sz + 1))
        sampler.add_run(n % max_sz, m, None if chance.random() < .5 else chance.random(m))
        n += m
        bs = int(chance.integers(1, sampler.size + 1))
        slots, probs, weights = batch(sampler, bs, rng)
        drawn.append([slots.tolist(), probs.tolist(), weights.tolist()])
        sampler.update_ids(slots + max(0, (n - 1)//max_sz)*max_sz - (slots > (n - 1) % max_sz)*max_sz*(n > max_sz),
                           chance.normal(size=bs), max(0, n - max_sz), n)
        assert sampler.check_valid()
    return drawn


# ---- copies

@every
@pytest.mark.parametrize('how,allocated', [*zip(COPIES.values(), [True, False, True])], ids=COPIES.keys())
def test_a_copy_that_was_never_attached_serves_any_memory(make, how, allocated):
    "It has no arrays of another size: with an allocator, nothing is written beyond what was allocated"
    for max_sz in (1, 3, 64, 1000):
        room, sampler = Room(), how(make())
        sampler.attach(max_sz, room if allocated else None)
        drawn = live(sampler, Rng(1), max_sz, 0)
        room.check()
        again = make()
        again.attach(max_sz)
        assert live(again, Rng(1), max_sz, 0)==drawn


@every
@pytest.mark.parametrize('how,allocated', [*zip(COPIES.values(), [False, True, True])], ids=COPIES.keys())
def test_a_copy_of_one_that_serves_lives_its_own_life(make, how, allocated):
    room, sampler, counter = Room(), make(), np.full(1, 9)
    sampler.attach(50, *((room, counter) if allocated else ()))
    if not allocated: sampler.n_entered = 9
    live(sampler, Rng(1), 50, 0, 5)
    twin, before, there = how(sampler), plain(sampler.get_state()), {k: v.copy() for k, v in room.known.items()}
    assert plain(twin.get_state())==before and twin.check_valid() and repr(twin).split(' at 0x')[0]==repr(sampler).split(' at 0x')[0]
    twin.n_entered += 1
    assert (twin.n_entered, sampler.n_entered, counter[0])==(10, 9, 9)
    drawn = live(twin, Rng(2), 50, 77, 5)
    assert plain(sampler.get_state())==before and all((there[k]==v).all() for k, v in room.known.items())
    assert live(sampler, Rng(2), 50, 77, 5)==drawn
    with pytest.raises(ValueError, match=WORDS['it serves a memory']): twin.attach(50)


@every
def test_what_was_kept_is_recovered(make):
    "Another process opens the same bytes, which know of some rows that the sampler was not told about"
    for n, told in ((20, 20), (20, 17), (70, 70), (70, 50), (200, 100)):
        room, sampler, counter = Room(), make(), np.zeros(1, np.int64)
        sampler.attach(50, room, counter)
        sampler.enter(SimpleNamespace(first_id=0, n_added=0))
        for k in range(told):
            sampler.enter(SimpleNamespace(first_id=max(0, k - 49), n_added=k + 1), (k, np.array([float(k % 7)])) if k % 3 else None)
        assert counter[0]==sampler.n_entered==told
        ids = np.arange(max(0, n - 50), told)
        if len(ids): sampler.update_ids(ids[::2], ids[::2] % 5, max(0, told - 50), told)
        again = make()
        again.attach(50, Room(room.known), counter)
        assert again.n_entered==told
        again.enter(SimpleNamespace(first_id=max(0, n - 50), n_added=n))
        assert counter[0]==again.n_entered==n
        assert again.check_valid() and again.size==min(n, 50)
        if hasattr(sampler, 'priorities'):
            want, slots = np.full(50, again.largest), ids % 50
            want[slots] = sampler.priorities[slots]
            assert again.priorities.tolist()==want[:again.size].tolist()
            kept = make().kept_priorities(Room(room.known)('priorities'), 50, slots)[0]
            assert kept.tolist()==want[slots].tolist()
        live(again, Rng(0), 50, n, 3)
        room.check()


# ---- rows enter

@pytest.mark.parametrize('make', [Proportional, RankBased])
def test_rows_enter_once_each_with_its_priority(make):
    """Late, in any numbers, with priorities for the last of them: as if each had been told of at once. A priority counts as seen
    even if its row was overwritten before it entered"""
    sampler, chance, n, largest, want = make(), np.random.default_rng(0), 0, 1., {}
    sampler.attach(7)
    for _ in range(300):
        start = n + int(chance.integers(0, 12))
        p = chance.random(int(chance.integers(0, 12)))*largest*1.2 if chance.random() < .6 else None
        first_new, n = n, start + (0 if p is None else len(p))
        for id in range(first_new, n):
            want[id % 7] = largest if id < start else p[id - start]
            largest = max(largest, want[id % 7])
        sampler.enter(SimpleNamespace(n_added=n, first_id=max(0, n - 7)), None if p is None else (start, p))
        assert sampler.n_entered==n and sampler.largest==largest and sampler.check_valid()
        assert sampler.priorities.tolist()==[want[k] for k in range(len(want))]


# ---- interrupts

HERE = str(Path(samplers.__file__).parent)


CALLS = dict(
    add=lambda o, rng: o.add_run(45, 1, np.array([3.])),
    add_many=lambda o, rng: o.add_run(45, 12),
    add_over_the_end=lambda o, rng: o.add_run(45, 20, np.arange(20.)),
    on_add=lambda o, rng: o.on_add([45, 46], [1., 9.]),
    update=lambda o, rng: o.update_ids(np.arange(0, 45, 3), np.arange(15.), 0, 45),
    draw=lambda o, rng: batch(o, 9, rng),
    set_state=lambda o, rng: o.set_state(rng))


def ready(make, room=None):
    sampler = make()
    sampler.attach(60, room)
    sampler.add_run(0, 45)
    sampler.update_ids(np.arange(45), np.arange(45.) % 7, 0, 45)
    return sampler


@every
@pytest.mark.parametrize('call', CALLS)
@pytest.mark.parametrize('allocated', [False, True])
def test_an_interrupt_anywhere_is_made_good_by_calling_again(make, call, allocated):
    "As a memory does: what storage has published is added again at the next call"
    f, at, right = CALLS[call], 0, ready(make)
    def arg(): return filled(make(), 11, 60).get_state() if call=='set_state' else Rng(0)
    f(right, arg())
    while True:
        sampler, given = ready(make, Room() if allocated else None), arg()
        if not interrupted(lambda o=sampler, a=given: f(o, a), at, HERE, events=('line',)): break
        at += 1
        f(sampler, given)
        assert sampler.check_valid(), at
        got, want = (plain(o.get_state()) for o in (sampler, right))
        for state in (got, want):                                # another batch may have been drawn; births are later
            for name in ('n_batches', 'born', 'births'): state.pop(name, None)
        assert got==want, at
        twin = copy.deepcopy(right)
        twin.n_batches = sampler.n_batches
        if not isinstance(sampler, OwnSampler) or call!='draw':
            assert plain(batch(sampler, 9, Rng(3)))==plain(batch(twin, 9, Rng(3))), at
    assert at > 0


# ---- options

@pytest.mark.parametrize('sampler', [
    Uniform(True), Uniform(), Proportional(.3, .2, .1, 'memory'), Proportional(0., None, 0.), RankBased(.1, 1.),
    Proportional(beta=LinearSchedule(.4, 1., 99)), RankBased(beta=ExponentialSchedule(.1, 1., 7)), LAP(.9), Combined(),
    ERE(.5, 3, 4), AgeWeighted(7.5, .3)], ids=repr)
def test_options_make_the_sampler_again(sampler):
    plain_ = json.loads(json.dumps(dict(kind=sampler.kind, options=sampler.options())))
    again = sampler_from(plain_)
    assert type(again) is type(sampler) and again.options()==sampler.options() and repr(again)==repr(sampler)
    assert again.beta==sampler.beta
    sampler = copy.copy(sampler)
    sampler.attach(9)
    sampler.add_run(0, 9)
    other = sampler_from(sampler.get_state())                    # a whole state serves as well
    other.attach(9)
    other.set_state(sampler.get_state())
    assert plain(other.get_state())==plain(sampler.get_state())


def test_what_is_not_of_this_library_is_asked_for():
    def mine(n): return .5
    for sampler in (as_sampler(Own()), Derived(), Proportional(beta=mine)):
        state = dict(kind=sampler.kind, options=sampler.options())
        with pytest.raises(ValueError, match=WORDS['pass it again']): sampler_from(state)
        assert sampler_from(state, sampler) is sampler
        with refused('sampler'): sampler_from(state, Uniform())
    assert isinstance(sampler_from(dict(kind='OwnSampler', options={}), Own()), OwnSampler)
    try:
        KINDS['Derived'] = Derived
        assert isinstance(sampler_from(dict(kind='Derived', options={})), Derived)
    finally: del KINDS['Derived']
    for bad in (None, {}, dict(kind='Uniform'), dict(kind=[], options={}), dict(kind='Uniform', options=3),
                dict(kind='Uniform', options={'nonsense': 1}), dict(kind='RankBased', options={'alpha': 'a'}),
                dict(kind='RankBased', options={'beta': {'name': 'LinearSchedule', 'start': 1}}),
                dict(kind='RankBased', options={'beta': {}}), dict(kind='ERE', options={'c_min': 2**70}), dict(kind='AgeWeighted', options={'horizon': 0})):
        with pytest.raises(ValueError): sampler_from(bad)
    for bad in (dict(alpha=.7, beta=.4), dict(alpha=.6, gone=1), 3):
        with pytest.raises(ValueError, match=WORDS['the saved one']): sampler_from(dict(kind='Proportional', options=bad), Proportional())


# ---- a user's own probabilities

@pytest.mark.parametrize('drawn,what', [
    (([0, 1, 2], None), 'slots and probs'), ([0, 1, 2], 'slots and probs'),
    (np.arange(3), 'slots and probs'), (None, 'slots and probs'),
    (([0, 1, 2], [.5, .5, np.nan]), ('Faulty.draw', 'finite probabilities above 0', None)), (([0, 1, 2], [.5, .5, 0.]), ('Faulty.draw', 'finite probabilities above 0', None)),
    (([0, 1, 2], [.5, .5, -.1]), ('Faulty.draw', 'finite probabilities above 0', None)), (([0, 1, 2], [.5, .5, np.inf]), ('Faulty.draw', 'finite probabilities above 0', None)),
    (([0, 1, 2], ['a', 'b', 'c']), ('Faulty.draw', 'finite probabilities above 0', None)),
    ((['x', 'y', 'z'], [.5]*3), ('Faulty.draw', 'whole numbers from 0 to 4, the filled slots', None)), (([0, 1], [.5]*3), 'as many')])
@pytest.mark.parametrize('beta', [None, .4])
def test_probabilities_that_cannot_be(drawn, what, beta):
    class Faulty(Own):
        def draw(self, bs, rng): return drawn
    Faulty.beta = beta
    sampler = filled(as_sampler(Faulty()), 5)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with about(what): batch(sampler, 3, Rng(0))
    assert sampler.n_batches==0


def test_unequal_probabilities_without_a_beta_are_told_once():
    class Plain(Own): beta = None
    sampler = filled(as_sampler(Plain()), 5)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        batch(sampler, 3, Rng(0))                                # all alike
    sampler.update_ids([0, 1], [5., 2.], 0, 5)
    with pytest.warns(UserWarning, match=WORDS['no weights']): weights = batch(sampler, 64, Rng(0))[2]
    assert (weights==1).all()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        batch(sampler, 64, Rng(0))
        sampler.beta = 1.
        slots, probs, weights = batch(sampler, 64, Rng(0))
    assert np.allclose(weights, probs.min()/probs)


# ---- damaged states

BAD = [None, 'a', -1, 2**70, 1.5, np.nan, [], {}, [np.nan], np.full(3, -1.), np.full(5, np.inf), True, b'x', [[1]], 10**400]


def damaged(v, path=()):
    "Each value of a nested dict replaced by each bad one, or missing"
    for k, o in v.items():
        yield {a: b for a, b in v.items() if a!=k}, (*path, k)
        for bad in BAD: yield v | {k: bad}, (*path, k)
        if isinstance(o, dict):
            for part, at in damaged(o, (*path, k)): yield v | {k: part}, at
        if isinstance(o, np.ndarray) and len(o):
            for twisted in (o[1:], np.append(o, o[:1]), -o - 1, o.astype(float) + .5, o*np.array(2**40), o.reshape(1, -1)):
                yield v | {k: twisted}, (*path, k)


@every
def test_a_damaged_state_is_named_and_changes_nothing(make):
    "Or it is a possible state, and then all is well with it"
    for max_sz in (45, 60):
        sampler = make()
        sampler.attach(max_sz)
        sampler.add_run(0, 45)
        sampler.update_ids(np.arange(45), np.arange(45.) % 7, 0, 45)
        state = sampler.get_state()
        if 'inner' in state: state = {k: v for k, v in state.items() if k!='inner'}      # the user's own business
        for bad, at in damaged(state):
            if isinstance(sampler, OwnSampler): bad = bad | dict(inner=sampler.inner.get_state())
            before = plain(sampler.get_state())
            try: sampler.set_state(bad)
            except ValueError as e: assert str(e) and plain(sampler.get_state())==before, at
            else:
                assert sampler.check_valid(), at
                if sampler.size: batch(sampler, 1, Rng(0))
                whole = state if not isinstance(sampler, OwnSampler) else state | dict(inner=sampler.inner.get_state())
                sampler.set_state(whole)
        for bad in (None, [], 3, 'a', {}):
            with pytest.raises(ValueError): sampler.set_state(bad)
        assert sampler.check_valid()


# ---- what memories on many machines ask

@every
def test_mass_least_priority_and_largest(make):
    sampler = make()
    if not isinstance(sampler, Prioritized): return
    assert sampler.mass()==0
    sampler.attach(50)
    assert sampler.mass()==0
    sampler.note_largest(1e-3)
    sampler.add_run(0, 40)
    chance = np.random.default_rng(0)
    for _ in range(5):
        sampler.update_ids(np.arange(0, 40, 2), chance.random(20)*9*(chance.random(20) < .7), 0, 40)
        ranked = isinstance(sampler, RankBased)
        leaves = np.arange(1., 41)**-sampler.alpha if ranked else sampler.priorities**sampler.alpha
        assert np.isclose(sampler.mass(), leaves.sum(), rtol=1e-12, atol=0)
        assert ranked or np.isclose(sampler.least_priority(), leaves[leaves > 0].min(), rtol=1e-12, atol=0)
    for priority in (0., 77.):
        before = sampler.largest
        sampler.note_largest(priority)
        assert sampler.largest==max(priority, before) > 0
    sampler.add_run(40, 1)
    assert sampler.priorities[40]==77 and sampler.check_valid()
    for bad in (-1, np.nan, np.inf, 'a'):
        with refused('priority'): sampler.note_largest(bad)
