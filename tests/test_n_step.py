"""N-step returns against a twin too simple to be wrong: whole episodes, cut up afterwards.

The twin never sees a stream of steps. It gets complete episodes, and for each step of each it adds up what follows.
"""
import collections, json, pickle, warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.n_step import NStep, n_step_type, rows_ahead
from fastrl_replay.steps import SimpleStep, Transition
from refusals import refused
from words import WORDS



class Short(NamedTuple):
    "Fields in another order, and one more"
    reward: Any
    terminated: Any
    truncated: Any
    next_state: Any
    colour: Any
    state: Any
    env_id: Any


# ---- the twin

def episodes(rng, streams, per_stream, longest=7):
    "Complete episodes: stream → lists of steps; the very last one of a stream may have no end yet"
    made, serial = {}, 0
    for e in range(streams):
        made[e] = []
        for k in range(per_stream):
            length, how = int(rng.integers(1, longest + 1)), rng.integers(4 if k == per_stream - 1 else 3)
            steps = []
            for t in range(length):
                last = t == length - 1
                terminated, truncated = bool(last and how in (0, 2)), bool(last and how in (1, 2))
                steps.append(SimpleStep(float(serial), serial % 3, float(serial + 1), terminated, truncated, float(rng.integers(-8, 9)),
                                        0., e, 0, t, k))
                serial += 1
            made[e].append(steps)
    return made


def twin(eps, n, gamma):
    "What must come out for these episodes, by the number of their first step"
    out = {}
    for ep in (ep for of_stream in eps.values() for ep in of_stream):
        ended = ep[-1].terminated or ep[-1].truncated
        for t, first in enumerate(ep):
            window = ep[t:t + n]
            if len(window) < n and not ended: continue
            last = window[-1]
            out[first.state] = (sum(gamma**k * s.reward for k, s in enumerate(window)), gamma**len(window), last.next_state,
                                last.terminated, last.truncated, first.action, first.env_id, first.step_n, first.episode_n)
    return out


def interleaved(rng, eps):
    "The steps of all streams, shuffled so that each stream keeps its order"
    queues = [collections.deque(s for ep in of_stream for s in ep) for of_stream in eps.values()]
    while any(queues):
        q = queues[rng.integers(len(queues))]
        if q: yield q.popleft()


def seen(steps):
    got = {}
    for s in steps:
        assert float(s.state) not in got, 'a step came twice'
        got[float(s.state)] = (float(s.reward), float(s.discount), float(s.next_state), bool(s.terminated), bool(s.truncated),
                               int(s.action), int(s.env_id), int(s.step_n), int(s.episode_n))
    return got


def same(got, want):
    assert got.keys() == want.keys()
    for k in want: assert got[k] == pytest.approx(want[k], rel=1e-6, abs=1e-5), k


def stack(steps): return Batch.of(type(steps[0])(*map(np.array, zip(*steps))))


def flat(items):
    for o in items:
        if isinstance(o, (Batch, list)): yield from o
        else: yield o


def cut(rng, steps, kinds=(stack,), longest=9):
    "The steps in pieces of random sizes, each of a random kind"
    i = 0
    while i < len(steps):
        j = i + int(rng.integers(1, longest + 1))
        yield kinds[rng.integers(len(kinds))](steps[i:j])
        i = j


@pytest.mark.parametrize('seed', range(6))
@pytest.mark.parametrize('form', ['single', 'list', 'chunk', 'mixed'])
def test_equals_the_twin(seed, form):
    rng = np.random.default_rng(seed)
    n, gamma = int(rng.integers(1, 8)), float(rng.choice([0., .5, .9, 1.]))
    eps = episodes(rng, streams=int(rng.integers(1, 40)), per_stream=5)
    steps = list(interleaved(rng, eps))
    kinds = dict(single=None, list=(list,), chunk=(stack,), mixed=(list, stack))[form]
    source = steps if kinds is None else list(cut(rng, steps, kinds))
    out = list(NStep(source, n, gamma))
    same(seen(flat(out)), twin(eps, n, gamma))
    if form == 'chunk': assert all(isinstance(o, Batch) and len(o) for o in out)
    if form == 'list': assert all(isinstance(o, list) and o for o in out)


def test_many_streams_with_far_numbers():
    "Stream numbers that are far apart take another way in the kernel"
    rng = np.random.default_rng(5)
    eps = episodes(rng, 30, 4)
    far = {e: [[s._replace(env_id=e*10**12 - 5) for s in ep] for ep in of] for e, of in eps.items()}
    steps = list(interleaved(rng, far))
    same(seen(flat(NStep(list(cut(rng, steps)), 3, .9))), twin(far, 3, .9))
    same(seen(NStep(steps, 3, .9)), twin(far, 3, .9))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.booleans(), st.lists(st.integers(0, 15), max_size=12))
def test_taken_up_again(seed, n, chunks, visits):
    "Left after any number of items and taken up again, with the source cut in pieces too: nothing lost, nothing twice"
    rng = np.random.default_rng(seed)
    eps = episodes(rng, 4, 3)
    steps = list(interleaved(rng, eps))
    items = list(cut(rng, steps)) if chunks else steps
    whole = list(flat(NStep(items, n, .5)))
    half = len(items)//2
    source = items[:half]
    pipe = NStep(source, n, .5)
    got = []
    for k in visits:
        before = len(got)
        got += [o for _, o in zip(range(k), pipe)]
        if len(got) - before < k: break                          # the source ended: do not begin it anew
    else: got += list(pipe)
    source[:] = items[half:]
    got += list(pipe)
    a, b = seen(flat(got)), seen(whole)
    assert a == b


def test_one_two_three_of_the_design():
    steps = [Transition(k, 0, r, k + 1, k == 2, False) for k, r in enumerate([1., 10., 100.])]
    out = list(NStep(steps, 3, .5))
    assert [o.reward for o in out] == [31., 60., 100.] and [o.discount for o in out] == [.125, .25, .5]
    assert [o.next_state for o in out] == [3, 3, 3] and all(o.terminated for o in out)


@pytest.mark.parametrize('flag', ['terminated', 'truncated'])
@pytest.mark.parametrize('chunk', [False, True])
def test_tails_come_at_both_ends(flag, chunk):
    steps = [SimpleStep(float(k), 0, k + 1., reward=1., step_n=k, **{flag: k == 4}) for k in range(5)]
    out = list(flat(NStep([stack([s]) for s in steps] if chunk else steps, 3, .5)))
    assert [float(o.reward) for o in out] == [1.75, 1.75, 1.75, 1.5, 1.]
    assert [bool(getattr(o, flag)) for o in out] == [False, False, True, True, True]
    other = 'truncated' if flag == 'terminated' else 'terminated'
    assert not any(getattr(o, other) for o in out)


def bare(stream, t, ends=None): return Transition(float(100*stream + t), 0, float(10**stream), 100*stream + t + 1., ends == (stream, t), False)

def rewards_of(items): return collections.Counter(float(o.reward) for o in flat(items))


def test_rows_of_a_batch_are_streams_without_env_id():
    out = list(NStep([stack([bare(s, t, (1, 3)) for s in range(3)]) for t in range(4)], 2, 1.))
    assert rewards_of(out) == {2.: 3, 20.: 3, 10.: 1, 200.: 3}
    assert all(float(o.state)//100 == float(o.next_state)//100 for o in flat(out))
    for batch in out: assert batch.streams.tolist() == [int(s)//100 for s in batch.state]         # each row says whose it is


@pytest.mark.parametrize('cuts', [[7], [1]*7, [3, 4], [2, 1, 4]])
@pytest.mark.parametrize('single', [False, True])
def test_a_list_without_env_id_is_one_stream_in_the_order_of_time(cuts, single):
    "As single steps are, however it is cut: no window begins before an end and goes on after it"
    steps = [Transition(float(t), 0, float(10**(t % 4)), t + 1., t == 2, t == 5) for t in range(7)]
    lists, at = [], 0
    for m in cuts:
        lists.append(steps[at:at + m])
        at += m
    if single: lists = [o[0] if len(o) == 1 else o for o in lists]
    got = [(float(o.state), float(o.reward), float(o.next_state), o.discount, o.terminated, o.truncated) for o in flat(NStep(lists, 2, .5))]
    assert got == [(0., 6., 2., .25, False, False), (1., 60., 3., .25, True, False), (2., 100., 3., .5, True, False),
                   (3., 1000.5, 5., .25, False, False), (4., 6., 6., .25, False, True), (5., 10., 6., .5, False, True)]


def test_the_streams_of_a_chunk_count_more_than_the_place():
    "A chunk may say whose its rows are: they may come in any order, number, and form"
    rng = np.random.default_rng(3)
    for _ in range(20):
        queues = {s: collections.deque(bare(s, t, (1, 3)) for t in range(6)) for s in range(3)}
        chunks = []
        while any(queues.values()):
            whose = [s for s in rng.permutation(3) for _ in range(rng.integers(0, 4)) if queues[s]]
            rows = [(s, queues[s].popleft()) for s in whose if queues[s]]
            if rows: chunks.append(Batch.of(Transition(*map(np.array, zip(*(r for _, r in rows)))), streams=[s for s, _ in rows]))
        out = list(NStep(chunks, 2, 1.))
        assert rewards_of(out) == {2.: 5, 20.: 4, 10.: 1, 200.: 5}
        assert all((batch.streams.tolist() == [int(s)//100 for s in batch.state]) for batch in out)
        again = list(NStep(list(NStep(chunks, 1, 1.)), 2, 1.))        # the streams go through
        assert rewards_of(again) == rewards_of(out)


def test_rows_that_have_shifted_are_refused():
    three, two = stack([bare(s, 0) for s in range(3)]), stack([bare(s, 1) for s in range(2)])
    with refused('n_step'): list(NStep([three, two], 2, .9))


@pytest.mark.parametrize('chunk', [False, True])
def test_a_gap_is_a_truncation(chunk):
    "A stream that breaks off, in its step or its episode number, is closed and not bridged"
    def run(numbers):
        steps = [SimpleStep(float(k), 0, k + 1., reward=1., episode_n=e, step_n=t) for k, (e, t) in enumerate(numbers)]
        return [(float(o.state), float(o.reward), bool(o.truncated), bool(o.terminated))
                for o in flat(NStep([stack(steps)] if chunk else steps, 3, 1.))]
    for numbers in ([(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)], [(0, 4), (0, 5), (0, 0), (0, 1), (0, 2)],
                    [(0, 0), (0, 1), (0, 7), (0, 8), (0, 9)]):
        assert run(numbers) == [(0., 2., True, False), (1., 1., True, False), (2., 3., False, False)]
    assert run([(0, 0)]*4) == [(0., 3., False, False), (1., 3., False, False)]      # unnumbered steps are taken as they come


def test_all_else_comes_from_the_first():
    steps = [Short(float(k), k == 2, False, k + 1, f'c{k}', k, 5) for k in range(3)]
    out = list(NStep(steps, 2, 1.))
    assert [o.colour for o in out] == ['c0', 'c1', 'c2'] and out[0]._fields == (*Short._fields, 'discount')
    assert [o.reward for o in out] == [1., 3., 2.]


def test_the_type_pickles_and_keeps_defaults():
    t = n_step_type(SimpleStep)
    assert pickle.loads(pickle.dumps(t)) is t and t(1, 2, 3).discount == 1. and t(1, 2, 3).reward == 0.
    batch = next(iter(NStep([stack([SimpleStep(0., 0, 1., True)])], 2, .9)))
    again = pickle.loads(pickle.dumps(batch))
    assert again.step_type is t and torch.equal(again.discount, batch.discount)


@pytest.mark.parametrize('chunk', [False, True])
def test_sums_are_float64(chunk):
    "A million, small change, and minus a million: float32 sums would lose the change"
    rewards = [1e8, 1.25, -1e8]
    steps = [Transition(float(k), 0, r, k + 1., k == 2, False) for k, r in enumerate(rewards)]
    out = next(iter(flat(NStep([stack([s]) for s in steps] if chunk else steps, 3, 1.))))
    assert float(out.reward) == 1.25


def test_ints_flags_and_tensors():
    steps = [Transition(0, 0, np.int64(3), 1, np.bool_(False), np.bool_(False)),
             Transition(1, 0, torch.tensor(4.), 2, torch.tensor(True), False)]
    assert [o.reward for o in NStep(steps, 2, .5)] == [5., 4.]


def test_nested_observations_and_bfloat16():
    def step(k):
        return SimpleStep(dict(a=np.full(2, k, np.uint8), b=(torch.full((3,), k/2, dtype=torch.bfloat16),)), 0,
                          dict(a=np.full(2, k + 1, np.uint8), b=(torch.full((3,), (k + 1)/2, dtype=torch.bfloat16),)),
                          k == 5, False, 1., step_n=k)
    def column(v): return dict(a=v['a'][None], b=(v['b'][0][None],))
    singles = list(NStep([step(k) for k in range(6)], 3, .5))
    def chunk(s):
        others = {f: [getattr(s, f)] for f in s._fields if f not in ('state', 'next_state')}
        return Batch.of(s._replace(state=column(s.state), next_state=column(s.next_state), **others))
    chunks = [chunk(step(k)) for k in range(6)]
    out = list(NStep(chunks, 3, .5))
    rows = list(flat(out))
    assert [float(r.reward) for r in rows] == [o.reward for o in singles]
    for r, o in zip(rows, singles):
        assert np.array_equal(r.next_state['a'], o.next_state['a']) and np.allclose(r.state['b'][0], o.state['b'][0].float())
    assert out[0].state['b'][0].dtype == torch.bfloat16
    back = list(flat(NStep([*chunks[:2], *(step(k) for k in range(2, 6))], 3, .5)))         # rows become steps
    assert [float(r.reward) for r in back] == [o.reward for o in singles]
    there = list(flat(NStep([*(step(k) for k in range(2)), *chunks[2:]], 3, .5)))           # and back
    assert [float(r.reward) for r in there] == [o.reward for o in singles]


def test_chunks_are_not_aliased():
    steps = [SimpleStep(np.full(2, k, np.float32), 0, np.full(2, k + 1, np.float32), k == 3, False, 1., step_n=k) for k in range(4)]
    chunks = [stack([s]) for s in steps]
    def spoiled():
        for c in chunks:
            yield c
            for column in c.numpy(): column[...] = 0
    rows = list(flat(NStep(spoiled(), 2, 1.)))
    assert [float(r.reward) for r in rows] == [2., 2., 2., 1.] and [float(r.state[0]) for r in rows] == [0., 1., 2., 3.]


def test_state_and_loading():
    steps = [SimpleStep(k, 0, k + 1, reward=1., step_n=k) for k in range(6)]
    pipe = NStep(steps, 4, .5)
    assert len(list(pipe)) == 3
    state = json.loads(json.dumps(pipe.state_dict()))
    assert len(json.dumps(state)) < 100
    pipe.load_state_dict(state)
    pipe.source_datapipe = []
    assert [(o.state, o.truncated) for o in pipe] == [(3, True), (4, True), (5, True)]
    assert list(pipe) == []
    fresh = NStep(steps, 4, .5)
    fresh.load_state_dict(state)
    assert len(list(fresh)) == 3
    with refused('n_step', got='n=4, gamma=0.5'): NStep(steps, 3, .5).load_state_dict(state)


@pytest.mark.parametrize('form', ['single', 'list', 'chunk'])
def test_what_waits_can_be_saved(form):
    "Closed as truncated in the copy, and still open here"
    steps = [SimpleStep(np.float32(k), 0, np.float32(k + 1), reward=1., step_n=k) for k in range(12)]
    items = dict(single=steps, list=[steps[i:i + 2] for i in range(0, 12, 2)], chunk=[stack(steps[i:i + 2]) for i in range(0, 12, 2)])[form]
    pipe = NStep(items, 4, .5)
    got = [o for _, o in zip(range(3), pipe)]
    state = pipe.waiting()
    copy = NStep([], 4, .5)
    copy.take_waiting(copy.read_waiting(state))
    cut = list(flat(copy))
    begun = [float(o.state) for o in flat(got)]
    assert [float(o.state) for o in cut] == [len(begun) + k for k in range(len(cut))] and [bool(o.truncated) for o in cut][-3:] == [True]*3
    assert [float(o.reward) for o in cut][-3:] == [1.75, 1.5, 1.]
    rest = list(flat(pipe))
    assert [float(o.state) for o in rest] == [float(k) for k in range(len(begun), 9)] and not any(o.truncated for o in rest)
    with refused('n_step', got='n=4, gamma=0.5'): NStep([], 3, .5).read_waiting(state)
    damaged = dict(state, items=[dict(state['items'][0], columns=state['items'][0]['columns'][1:])])
    with pytest.raises(ValueError, match=WORDS['no columns that fit']): copy.read_waiting(damaged)


def test_as_a_pipe():
    steps = [SimpleStep(float(k), 0, k + 1., k == 4, reward=1., step_n=k) for k in range(5)]
    again = NStep(steps, 1, 1.).n_step(n=2, gamma=.5)
    assert isinstance(again, NStep) and len(list(again)) == 5
    source = IterableWrapper(steps)
    pipe = NStep(source, 2, .5)
    assert len(list(pipe)) == 5
    assert len(list(DataLoader(pipe, batch_size=None, collate_fn=lambda o: o))) == 5
    assert len(list(pickle.loads(pickle.dumps(pipe)))) == 5
    nested = list(NStep(NStep(steps, 1, .5), 2, 1.))
    assert [o.discount for o in nested] == [.25]*4 + [.5]
    it = iter(pipe)
    next(it)
    assert len(list(source)) == 5                                     # somebody else reads the source: it begins anew,
    assert [(o.state, o.truncated) for o in pipe] == [(1., True), (0., False), (1., False), (2., False), (3., False), (4., False)]


@pytest.mark.parametrize('n', [0, -1, 1.5, '3', None])
def test_bad_n(n):
    with refused('n_step: n'): NStep([], n, .9)


@pytest.mark.parametrize('gamma', [-.1, 1.01, float('nan'), '1', None])
def test_bad_gamma(gamma):
    with refused('n_step: gamma'): NStep([], 3, gamma)


def test_bad_items_change_nothing():
    ok = [SimpleStep(k, 0, k + 1, reward=1., step_n=k) for k in range(4)]
    NoReward = NamedTuple('NoReward', [(f, Any) for f in ('state', 'next_state', 'terminated', 'truncated')])
    for bad, kind, said in ((7, TypeError, 'n_step'), ((1, 2), TypeError, 'n_step'), (None, TypeError, 'n_step'),
                            (NoReward(0, 1, False, False), ValueError, 'n_step'),
                            ([ok[1], 'x'], TypeError, 'n_step'), (Batch.of(NoReward(*[np.zeros(2)]*4)), ValueError, 'n_step')):
        pipe = NStep([ok[0], bad, *ok[1:]], 2, 1.)
        with refused(said, kind) as e: list(pipe)
        assert '\n' not in str(e.value)
        assert [o.state for o in pipe] == [0, 1, 2]


def test_rewards_of_a_chunk_are_numbers():
    two = Batch.of(SimpleStep(np.zeros(2), np.zeros(2), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool), np.zeros((2, 3)),
                              *[np.zeros(2, np.int64)]*5))
    with refused('reward', got='float32[3]'): list(NStep([two], 2, .9))


def test_another_layout_is_refused():
    a, b = stack([SimpleStep(0., 0, 1., step_n=0)]), stack([SimpleStep(np.zeros(2), 0, np.zeros(2), step_n=1)])
    with refused('n_step'): list(NStep([a, b], 3, .9))


# ---- windows that close on a gap

def said(items, n=3, times=1, pipe=None):
    "What the pipe warns of, as texts"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        pipe = NStep(items, n, .9) if pipe is None else pipe
        made = sum(1 for _ in flat(pipe))
    return [str(o.message) for o in found], made


def walked(env_id, lengths, first=0):
    "Whole episodes of these lengths, numbered as a stepper numbers them"
    return [SimpleStep(float(t), 0, t + 1., t==length - 1, False, 1., 0., env_id, 0, t, first + k) for k, length in enumerate(lengths) for t in range(length)]


FORMS = dict(single=lambda steps: steps, list=lambda steps: [steps[k:k + 16] for k in range(0, len(steps), 16)],
             chunk=lambda steps: [stack(steps[k:k + 16]) for k in range(0, len(steps), 16)], one=lambda steps: [stack(steps)])


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('how', ['two streams of one number', 'shuffled', 'two threads'])
def test_windows_that_close_on_gaps_are_noticed_once(form, how):
    rng = np.random.default_rng(0)
    a, b = (walked(0, rng.integers(5, 40, 40)) for _ in range(2))
    if how=='two streams of one number': steps = [s for pair in zip(a, b) for s in pair]
    elif how=='shuffled': steps = [a[k] for k in rng.permutation(len(a))]
    else:                                                  # two that pull from one pipe, and hand on what they got a little later
        steps = [a[min(k + int(d), len(a) - 1)] for k, d in enumerate(rng.integers(0, 2, len(a)))]
    texts, _ = said(FORMS[form](steps))
    assert len(texts)==1
    assert all(o in texts[0] for o in ('stream', 'env_id', 'first_env_id', 'shuffle', 'filter', 'threads'))
    assert said(FORMS[form](steps), n=1)[0]==[]                    # windows of one step close on nothing


def test_each_pipe_warns_once():
    a, b = walked(0, [30]*40), walked(0, [29]*40)
    pipe, mixed = NStep(source := [], 3, .9), [s for pair in zip(a, b) for s in pair]
    found = []
    for k in range(0, len(mixed), 50):
        source[:] = mixed[k:k + 50]
        found += said(None, pipe=pipe)[0]
    assert len(found)==1 and len(said(mixed)[0])==1


def test_it_is_noticed_where_it_begins_late():
    "A second stream is added after 50,000 steps of the first"
    a, b = walked(0, [50]*1100), walked(0, [47]*1100)
    steps = a[:50_000] + [s for pair in zip(a[50_000:], b) for s in pair]
    assert len(said(FORMS['chunk'](steps))[0])==len(said(steps)[0])==1


@pytest.mark.parametrize('n', [2, 3, 10])
@pytest.mark.parametrize('form', FORMS)
def test_what_is_right_is_not_warned_of(form, n):
    "Many streams with ends of both kinds, episodes of one step, steps without numbers; a source that ends"
    rng = np.random.default_rng(1)
    mixed = list(interleaved(rng, episodes(rng, 5, 60)))
    bare_ones = [Transition(float(k), 0, 1., k + 1., k % 7==6, False) for k in range(500)]
    unnumbered = [SimpleStep(float(k), 0, k + 1., k % 7==6) for k in range(500)]
    for steps in (mixed, unnumbered, walked(0, [1]*300)): assert said(FORMS[form](steps), n)[0]==[]
    if form in ('single', 'list'): assert said(FORMS[form](bare_ones), n)[0]==[]


@pytest.mark.parametrize('form', FORMS)
def test_a_few_gaps_are_not_warned_of(form):
    "A filter that drops a few steps, and every stream begun again twice, in the middle of an episode"
    rng = np.random.default_rng(2)
    steps = [s for s in walked(0, rng.integers(5, 60, 100)) if rng.random() > .03]
    assert said(FORMS[form](steps))[0]==[]
    again = [s for k in range(3) for t in range(7) for s in [SimpleStep(0., 0, 0., step_n=t, episode_n=k, env_id=e) for e in range(64)]]
    texts, made = said(FORMS[form](again))
    assert texts==[] and made > 1000


def test_loading_and_dying_actors_are_not_warned_of():
    "A state that is loaded closes windows; what a worker had open waits, since its streams get other numbers"
    pipe = NStep(source := [], 5, .9)
    for k in range(60):
        source[:] = [s._replace(env_id=k % 3) for s in walked(0, [9], first=k)][:7]
        assert said(None, pipe=pipe)[0]==[]
        pipe.load_state_dict(pipe.state_dict())
    died = [s for k in range(60) for s in walked(k, [9])[:7]]
    assert said(died, 5)[0]==[]


# ---- without a source: push and flush, beside the pipe

def columns(item):
    "What an item holds, as bytes: steps by their values and types, a `Batch` by its columns and streams"
    if isinstance(item, Batch): return [(str(a.dtype), a.tobytes()) for a in item.arrays()], None if item.streams is None else item.streams.tolist()
    return [[(type(v).__name__, repr(v)) for v in s] for s in item]


def through_pipe(items, n, gamma):
    "What a pipe yields for each item, and what its open windows yield as truncated"
    source, found = [], []
    pipe = NStep(source, n, gamma)
    for item in items:
        source[:] = [item]
        got = list(pipe)
        if isinstance(item, Batch): found.append(got[0] if got else None)
        else: found.append(got[0] if isinstance(item, list) and got else got)
    source.clear()
    pipe.load_state_dict(pipe.state_dict())
    last = list(pipe)
    return found, (last[0] if last and isinstance(last[0], Batch) else last)


PIECES = dict(single=None, list=(list,), chunk=(stack,), mixed=(list, stack))

@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('form', PIECES)
@pytest.mark.parametrize('cls', [SimpleStep, Transition])
def test_push_and_flush_give_what_the_pipe_gives(cls, form, seed):
    "Bit for bit, also through a saved state in the middle; a list for steps, a `Batch` for a `Batch`, perhaps empty"
    rng = np.random.default_rng(seed)
    n, gamma, eps = int(rng.integers(1, 6)), float(rng.choice([.5, .9, .99])), episodes(rng, int(rng.integers(1, 9)) if cls is SimpleStep else 1, 6)
    steps = [s._replace(reward=float(rng.normal())) for s in interleaved(rng, eps)]
    if cls is Transition: steps = [Transition(s.state, s.action, s.reward, s.next_state, s.terminated, s.truncated) for s in steps]
    pieces = steps if PIECES[form] is None else list(cut(rng, steps, PIECES[form]))
    if cls is Transition: pieces = [Batch.of(Transition(*o.arrays()), streams=np.zeros(len(o), np.int64)) if isinstance(o, Batch) else o for o in pieces]
    right, last = through_pipe(pieces, n, gamma)
    mine = NStep(n=n, gamma=gamma)
    for k, (item, want) in enumerate(zip(pieces, right)):
        got = mine.push(item)
        assert isinstance(got, Batch) if isinstance(item, Batch) else type(got) is list
        if want is None: assert len(got) == 0
        else: assert columns(got) == columns(want)
        if k % 3 == 1 and form != 'mixed':
            state = pickle.loads(pickle.dumps(mine.state_dict()))
            mine = NStep(n=n, gamma=gamma)
            mine.load_state_dict(state)
            if form in ('single', 'list'): mine = restored_types(mine, steps[0])
    got = mine.flush()
    assert len(got) == len(last) and (not len(got) or columns(got) == columns(last))
    assert len(mine.flush()) == 0 and type(mine.flush()) is type(got) and mine.state_dict()['open'] is None


def restored_types(n_step, step):
    "The same steps, of the types that they had before they were columns"
    for window in n_step._open.open.values():
        window.steps = [type(step)._make(type(a)(b) for a, b in zip(step, s)) for s in window.steps]
    return n_step


@pytest.mark.parametrize('form', ['single', 'chunk'])
def test_saved_windows_go_on_in_a_memory_bit_for_bit(form, tmp_path):
    "A memory fed through an interrupted loop holds what it holds without an interruption"
    rng = np.random.default_rng(3)
    steps = [s._replace(reward=float(rng.normal())) for s in interleaved(rng, episodes(rng, 4, 12))]
    pieces = steps if form == 'single' else list(cut(rng, steps))
    whole, broken = ReplayMemory(500, seed=0), ReplayMemory(500, seed=0)
    a, b = NStep(n=3, gamma=.97), NStep(n=3, gamma=.97)
    for k, item in enumerate(pieces):
        whole.extend(a.push(item))
        broken.extend(b.push(item))
        if k % 5 == 0:
            state = pickle.loads(pickle.dumps(b.state_dict()))
            b = NStep(n=3, gamma=.97)
            b.load_state_dict(state)
            broken.save(tmp_path/'m')
            broken = ReplayMemory.load(tmp_path/'m')
    for memory, n_step in ((whole, a), (broken, b)): memory.extend(n_step.flush())
    assert len(whole) == len(steps) == len(broken) and columns(whole[:]) == columns(broken[:])


def test_an_empty_push_stores_nothing():
    memory, n_step = ReplayMemory(10), NStep(n=3, gamma=.9)
    one = SimpleStep(np.zeros(2, np.float32), 0, np.ones(2, np.float32), reward=1.)
    assert memory.extend(n_step.push(one)).tolist() == [] == memory.extend(n_step.push([])).tolist() and len(memory) == 0
    assert memory.extend(n_step.flush()).tolist() == [0] and memory[0].truncated
    chunk = Batch.of(Transition(np.zeros((2, 3)), np.zeros(2, int), np.ones(2), np.zeros((2, 3)), np.zeros(2, bool), np.zeros(2, bool)))
    n_step, other = NStep(n=2, gamma=.9), ReplayMemory(10)
    assert other.extend(n_step.push(chunk)).tolist() == [] and isinstance(n_step.push(chunk), Batch)
    assert len(other.extend(n_step.flush())) == 2 and NStep(n=2, gamma=.9).flush() == []
    for n_step in NStep(n=2, gamma=.9), NStep(n=2, gamma=.9):      # all copies were being reset: a chunk without rows, before or after others
        assert len(other.extend(n_step.push(chunk[:0]))) == 0 and len(n_step.push(chunk)) == 0 == len(n_step.push(chunk[:0])) and len(n_step.push(chunk)) == 2
    assert [len(o) for o in NStep([chunk[:0], chunk, chunk[:0], chunk], 2, .9)] == [2]


def test_what_cannot_be_pushed_changes_nothing():
    stacked = Transition(np.zeros((3, 2)), np.zeros(3, int), np.ones(3), np.zeros((3, 2)), np.zeros(3, bool), np.zeros(3, bool))
    ok = [SimpleStep(float(k), 0, k + 1., reward=1., step_n=k) for k in range(4)]
    for bad, kind, said in ((stacked, ValueError, 'n_step: terminated'),
                            (stacked._asdict(), TypeError, 'n_step'), (3, TypeError, 'n_step'), (None, TypeError, 'n_step'),
                            (ok[1]._replace(reward=None), TypeError, 'reward'),
                            ([ok[1], ok[2]._replace(reward='x')], TypeError, 'reward'),
                            ([ok[1], ok[2]._replace(truncated=np.zeros(2))], ValueError, 'n_step: truncated')):
        n_step = NStep(n=2, gamma=1.)
        assert n_step.push(ok[0]) == []
        with refused(said, kind): n_step.push(bad)
        assert [o.state for o in n_step.push(ok[1])] == [0.] and [o.state for o in n_step.flush()] == [1.]
        pipe = NStep([ok[0], bad, *ok[1:]], 2, 1.)            # the pipe, too: a wrong reward doesn't stay in its window
        with refused(said, kind): list(pipe)
        assert [o.state for o in pipe] == [0., 1., 2.]


def test_with_and_without_a_source():
    with refused('push', TypeError): NStep([], 3, .9).push([])
    with refused('n_step', TypeError): list(NStep(n=3, gamma=.9))
    with refused('n_step: n', got='None'): NStep(gamma=.9)
    with refused('n_step: gamma', got='None'): NStep(n=3)
    mine, piped = NStep(n=3, gamma=.9), NStep([], 3, .9)
    with refused('n_step', got='n, gamma, source'): mine.load_state_dict(piped.state_dict())
    with refused('n_step', got='n, gamma, open'): piped.load_state_dict(mine.state_dict())
    with refused('n_step', got='n=3, gamma=0.9'): NStep(n=2, gamma=.9).load_state_dict(mine.state_dict())


@pytest.mark.parametrize('seed', range(4))
def test_windows_of_stored_rows(seed):
    "What other libraries ask for when they draw: the rewards ahead, up to the episode's end or the newest row, in a ring that has turned"
    rng = np.random.default_rng(seed)
    steps = list(interleaved(rng, episodes(rng, 3, 8)))
    memory = ReplayMemory(60, seed=0)
    memory.extend(steps)
    ids = rng.integers(memory.first_id, memory.n_added, 40)
    n = rng.integers(1, 6, 40) if seed % 2 else int(rng.integers(1, 6))
    rewards, m, last = rows_ahead(memory, ids, n)
    assert rewards.dtype==np.float32 and rewards.shape==(40, np.max(n)) and m.dtype==np.int64
    for k, id in enumerate(ids):
        first, want = steps[id], []
        for s in steps[id:]:
            if s.env_id != first.env_id or len(want) == np.broadcast_to(n, 40)[k]: continue
            if s.episode_n != first.episode_n: break
            want.append(s)
        assert rewards[k].tolist()==[s.reward for s in want] + [0.]*(rewards.shape[1] - len(want)) and m[k]==len(want)
        assert (last.next_state[k], last.terminated[k], last.truncated[k])==(want[-1].next_state, want[-1].terminated, want[-1].truncated)
