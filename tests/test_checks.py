"What each check accepts, and what it says of anything else: the name, what was expected, what came, what to do"
import numpy as np
import pytest
import torch

from fastrl_replay.checks import (
    BITS, Words, array, differences, extra, plain_array, refuse, values_of, whole)
from words import words

NAN, INF = float('nan'), float('inf')


def said(error, f, *args, **kw):
    "The message of the `error` that this call ends with: of this class, not of one below it"
    with pytest.raises(error) as caught: f(*args, **kw)
    assert type(caught.value) is error
    return str(caught.value)


def test_a_refusal_has_one_form():
    assert said(ValueError, refuse, 'bs', 'a number', 'x') == "bs: expected a number, got 'x'"
    assert said(KeyError, refuse, 'bs', 'a number', None, 'give one', KeyError) == repr('bs: expected a number, got None; give one')
    assert said(TypeError, refuse, 'bs', 1, Words('two of them'), '', TypeError) == 'bs: expected 1, got two of them'


@pytest.mark.parametrize('v', [3, np.int8(3), np.uint64(3), np.array(3), torch.tensor(3)])
def test_whole_numbers_of_any_kind(v):
    got = whole('n', v)
    assert type(got) is int and got == 3


@pytest.mark.parametrize('dtype', ['?', 'b', 'B', 'h', 'H', 'i', 'I', 'q', 'Q', 'e', 'f', 'd', 'F', 'D', '>i4', '>f8'])
def test_arrays_lists_and_tensors_become_arrays(dtype):
    a = np.array([[0, 1], [1, 1]], dtype)
    found, bits = plain_array('x', a)
    assert bits is None and found.dtype == a.dtype.newbyteorder('=') and (found == a).all() and (plain_array('x', a.tolist())[0] == a).all()
    if a.dtype.isnative and a.dtype.char not in 'HIQ': assert (plain_array('x', torch.from_numpy(a).requires_grad_(dtype in 'efdFD'))[0] == a).all()


@pytest.mark.parametrize('dtype', list(BITS))
def test_floats_that_numpy_lacks_come_as_their_bits(dtype):
    t = torch.tensor([[1.5, -.25], [0., 2.]]).to(dtype)
    bits, stands_for = plain_array('x', t.T)
    assert stands_for is dtype and bits.dtype == BITS[dtype] and bits.shape == (2, 2)
    assert (values_of(bits, dtype) == t.T.double().numpy()).all() and (array('x', t.T) == t.T.double().numpy()).all()


@pytest.mark.parametrize('v,error,what', [
    ([[1.], [2., 3.]], ValueError, 'an array of one shape, got a ragged list'), (['a'], TypeError, 'got an array of <U1'), (None, TypeError, 'got NoneType'),
    (object(), TypeError, 'got object <object'), ('left', TypeError, "got str 'left'; encode it as numbers or drop the field"),
    (np.ma.array([1, 2], mask=[0, 1]), TypeError, 'got a masked one; fill it'), (np.array(['2020'], 'M8[D]'), TypeError, 'datetime64'),
    (np.zeros(2, np.longdouble), TypeError, 'numbers (bool, int, float, complex)'), ({1: 2}, TypeError, 'got dict {1: 2}'),
    (torch.zeros(2).to_sparse(), TypeError, 'a dense tensor of numbers'), (torch.zeros(2, device='meta'), TypeError, 'on meta')])
def test_what_is_no_array_of_numbers(v, error, what):
    assert what in said(error, plain_array, 'state.camera', v) and said(error, plain_array, 'x', v).startswith('x: expected ')
    if type(v) is not np.ndarray: assert said(error, array, 'x', v) == said(error, plain_array, 'x', v)       # what is one is not looked at twice


def test_differences_of_nested_options():
    there, mine = dict(a=1, b=dict(c=2, d=3), e=4), dict(a=1, b=dict(c=5, d=3), f=6)
    assert list(differences(there, mine)) == [('b.c', 2, 5), ('e', 4, None), ('f', None, 6)]
    assert list(differences(there, there)) == [] and list(differences(1, 2, ('k',))) == [('k', 1, 2)]


def test_a_missing_package_names_the_extra():
    with pytest.raises(ModuleNotFoundError, match=words('an extra', what='Pictures need it', name='pictures')) as caught, extra('Pictures need it', 'pictures'):
        import no_such_package_at_all  # noqa: F401
    assert caught.value.name == 'no_such_package_at_all' and isinstance(caught.value.__cause__, ModuleNotFoundError)
    with pytest.raises(ZeroDivisionError), extra('Pictures need it', 'pictures'): int(1/0)
    with extra('Numbers need it', 'numbers'): import math
    assert math.pi > 3
