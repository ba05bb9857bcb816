"What each check accepts, and what it says of anything else: the name, what was expected, what came, what to do"
import numpy as np
import pytest
import torch

from fastrl_replay.checks import (
    BITS, array, extra, plain_array, values_of)
from words import words

NAN, INF = float('nan'), float('inf')


def said(error, f, *args, **kw):
    "The message of the `error` that this call ends with: of this class, not of one below it"
    with pytest.raises(error) as caught: f(*args, **kw)
    assert type(caught.value) is error
    return str(caught.value)


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


def test_a_missing_package_names_the_extra():
    with pytest.raises(ModuleNotFoundError, match=words('an extra', what='Pictures need it', name='pictures')) as caught, extra('Pictures need it', 'pictures'):
        import no_such_package_at_all  # noqa: F401
    assert caught.value.name == 'no_such_package_at_all' and isinstance(caught.value.__cause__, ModuleNotFoundError)
    with pytest.raises(ZeroDivisionError), extra('Pictures need it', 'pictures'): int(1/0)
    with extra('Numbers need it', 'numbers'): import math
    assert math.pi > 3
