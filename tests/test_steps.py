"""The rules by which values become records: which dtype the first one asks for, and what may come after it."""
import pickle
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fastrl_replay.steps import Layout, SimpleStep, Transition, derived_type, encode
from twins import KINDS, named, stored
from refusals import refused


class Only(NamedTuple):
    x: Any

def leaf_of(example, field='x'):
    [leaf] = Layout.of(namedtuple('T', [field])(example)).leaves
    return leaf


FIRST = [(1., np.float32), (1, np.int64), (True, np.bool_), (np.float64(1), np.float64), (np.float32(1), np.float32), (np.int8(1), np.int8),
         (np.bool_(True), np.bool_), (np.uint64(1), np.uint64), (np.float16(1), np.float16), (1j, np.complex128), (np.complex64(1), np.complex64),
         ([1., 2.], np.float32), ([1, 2], np.int64), ([True], np.bool_), ([[1.], [2]], np.float32), (np.zeros(3), np.float64),
         (np.zeros(3, '>i4'), np.int32), (torch.zeros(2), np.float32), (torch.zeros(2, dtype=torch.int16), np.int16), (torch.tensor(True), np.bool_),
         (torch.zeros(2, dtype=torch.bfloat16), np.uint16), (torch.zeros((), requires_grad=True), np.float32), (np.array(3.), np.float64),
         ([torch.tensor(1.), torch.tensor(2.)], np.float32), (torch.nn.Parameter(torch.zeros(2)), np.float32)]

@pytest.mark.parametrize('value,dtype', FIRST, ids=lambda o: str(o)[:30])
def test_the_dtype_that_a_first_value_asks_for(value, dtype):
    leaf = leaf_of(value)
    assert leaf.dtype==dtype and leaf.shape==np.shape(value.detach() if isinstance(value, torch.Tensor) else value)


@pytest.mark.parametrize('field', ['reward', 'total_reward', 'discount'])
@pytest.mark.parametrize('value', [1, 1., True, np.float64(1.), np.int8(1), torch.tensor(1.), torch.tensor(1., dtype=torch.bfloat16), np.ones(3), [1, 2],
                                   torch.ones(2, dtype=torch.float64), np.float16(1), np.uint64(1)], ids=str)
def test_rewards_are_float32_whatever_comes(field, value):
    leaf = leaf_of(value, field)
    assert leaf.dtype==np.float32 and leaf.bits_of is None
    got = encode(leaf, value)
    assert got.dtype==np.float32 and (got==1).all() or field and np.ndim(value)
    for other in (.1, np.float64(.1), 1/3, np.float64(1e-300), -7, np.nan, np.inf, -np.inf, 2**40 + 1):
        if leaf.shape: other = np.full(leaf.shape, other)
        np.testing.assert_array_equal(encode(leaf, other), np.asarray(other).astype(np.float32))
    with refused(field): encode(leaf, np.full(leaf.shape, 1e39))


DTYPES = [np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64, np.complex64, np.complex128]

@pytest.mark.parametrize('to', DTYPES, ids=lambda o: o.__name__)
def test_a_number_is_accepted_if_and_only_if_it_casts_without_loss(to):
    "Every pair of dtypes, the limits of each and what lies beyond; scalars, 0-d arrays and Python numbers alike"
    leaf = leaf_of(to(1))
    exact = {}
    for dt in DTYPES:
        kind = np.dtype(dt).kind
        if kind=='b': values = [dt(0), dt(1)]
        elif kind in 'iu': values = [dt(o) for o in (0, 1, 2, np.iinfo(dt).max, np.iinfo(dt).min, np.iinfo(dt).max//2 + 1)]
        else:
            with np.errstate(over='ignore'): values = [dt(o) for o in (0., 1., 2., .5, -1., 1/3, np.finfo(dt).max, np.inf, np.nan, 65504., 3., 2.**31, 2.**53, 2.**63)]
        if kind=='c': values += [dt(1 + 1j)]
        for v in values: exact[dt.__name__, repr(v)] = v
    for v in exact.values():
        python = v.item()
        with np.errstate(all='ignore'):
            lossless = _equals(to, v)
        if v.dtype.kind=='c' and lossless and v.dtype!=to: continue         # such arrays are refused for their dtype: either is fine
        for form in (v, np.array(v)) + ((python,) if isinstance(python, (int, bool)) else ()):
            if lossless: assert _same(encode(leaf, form), v), (to, form)
            else:
                with refused('x', (ValueError, TypeError)):
                    got = encode(leaf, form)
                    print(f'{type(form)} {form!r} became {got!r}')


def _number(v):
    "A numpy number as an exact Python one, or as text if there is none"
    c = complex(v) if v.dtype.kind=='c' else None
    if c is not None: return _number(np.float64(c.real)) if c.imag==0 else ('complex', c)
    if v.dtype.kind in 'biu': return int(v)
    return repr(float(v)) if not np.isfinite(v) else int(v) if float(v).is_integer() else float(v)

def _equals(to, v):
    "Is there a value of dtype `to` that is the number `v`?  Complex numbers into real fields never go"
    dt = np.dtype(to)
    if v.dtype.kind=='c' and dt.kind!='c': return False
    if dt.kind in 'biu' and not np.isfinite(v): return False
    if dt.kind in 'biu':
        low, high = (0, 1) if dt.kind=='b' else (np.iinfo(dt).min, np.iinfo(dt).max)
        return isinstance(_number(v), int) and low <= _number(v) <= high
    return _number(np.asarray(v).astype(dt)[()])==_number(v)

def _same(got, v): return _number(got[()])==_number(v)


REFUSED = [None, b'a', object(), {1, 2}, np.datetime64('2020'), np.array(['a']), np.array([None]), lambda: 1, [[1, 2], [3]], [], np.zeros((0, 3)), {}, (), [None],
           np.zeros(2, [('a', 'f4')]), np.longdouble(1), np.ma.masked_array([1., 2.], [0, 1]), iter([1]), range(0), {'a': None}, ({'b': 'c'},), {1: 1., '1': 2.}, 10**30, 2**63]

@pytest.mark.parametrize('value', REFUSED, ids=named)
def test_what_is_no_value_of_a_field(value):
    with pytest.raises((ValueError, TypeError)) as caught: Layout.of(Only(value))
    assert caught.value.argument.split('.')[0]=='x'


@pytest.mark.parametrize('tensor', [torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj().imag, torch.ones(2).requires_grad_() * 2,
                                    torch.ones(2, 2).t(), torch.ones(1).expand(2), torch.ones(2).to_sparse(), torch.ones(2, device='meta'),
                                    torch.ones(4)[::2]], ids=['conj', 'negative bit', 'grad', 'transposed', 'expanded', 'sparse', 'meta', 'strided'])
def test_tensors_of_all_sorts_are_stored_as_they_are_or_refused(tensor):
    try: layout = Layout.of(Only(tensor))
    except (ValueError, TypeError) as e: assert e.argument=='x' and (tensor.is_sparse or tensor.is_meta)
    else: np.testing.assert_array_equal(encode(layout.leaves[0], tensor), tensor.detach().resolve_conj().resolve_neg().numpy())


@pytest.mark.parametrize('kind', KINDS)
def test_a_layout_of_any_step(kind):
    rng, world = np.random.default_rng(0), {}
    step = KINDS[kind](rng, world)
    layout = Layout.of(step)
    arrays = [a for f, v in zip(step._fields, step) for a in stored(v, f)]
    assert sorted((o.dtype.itemsize, o.shape) for o in layout.leaves)==sorted((a.dtype.itemsize, a.shape) for a in arrays)
    assert layout==Layout.of(KINDS[kind](rng, world)) and hash(layout)==hash(Layout.of(step))
    again = pickle.loads(pickle.dumps(layout))
    assert again==layout and again.record==layout.record
    plain = Layout.from_plain(layout.to_plain())
    assert plain.record==layout.record and plain.fields==layout.fields and plain.step_type.__name__==type(step).__name__
    # no two leaves overlap, each is aligned to its word, and records are whole words
    spans = sorted((at, at + o.nbytes, o.word) for at, o in zip(layout.offsets(), layout.leaves))
    links = sorted(layout.record.fields[o][1] for o in ('_prev', '_next'))
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:])) and all(at % word==0 for at, _, word in spans)
    assert not any(at < o + 4 and o < end for at, end, _ in spans for o in links) and links[1] >= links[0] + 4
    assert layout.record.itemsize % 8==0 and spans[-1][1] <= layout.record.itemsize <= 1.5*(sum(o.nbytes for o in layout.leaves) + 8) + 64


def test_record_sizes_of_the_contract():
    state = np.zeros(4, np.float32)
    assert Layout.of(Transition(state, 0, 1., state, False, False)).record.itemsize==64
    assert Layout.of(SimpleStep(state, 0, state)).record.itemsize==128


def test_a_dict_subclass_and_a_nested_namedtuple():
    class Pair(NamedTuple):
        a: Any
        b: Any
    layout = Layout.of(Only(OrderedDict(p=Pair(1, np.zeros(2)), q=1.)))
    values = layout.values(Only(dict(q=2., p=Pair(5, np.ones(2)))))
    assert [np.asarray(v).tolist() for v in values]==[5, [1., 1.], 2.]
    back = layout.step(values)
    assert isinstance(back.x['p'], Pair) and back.x['p'].a==5


def test_types_made_at_run_time_are_one_and_pickle():
    a = derived_type('Made', ('x', 'y'), (1,))
    assert a is derived_type('Made', ['x', 'y'], [1]) and a is not derived_type('Made', ('x', 'y'))
    assert pickle.loads(pickle.dumps(a)) is a and pickle.loads(pickle.dumps(a(3)))==a(3, 1) and type(pickle.loads(pickle.dumps(a(3)))) is a
