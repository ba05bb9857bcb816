"What each check accepts, and what it says of anything else: the name, what was expected, what came, what to do"
import inspect
import random

import numpy as np
import pytest
import torch

from fastrl_replay import checks
from fastrl_replay.checks import (
    BITS, Words, array, differences, extra, form, ids_of, is_number, leave_out, number, of_type, one_of, plain_array, refuse, require,
    shown, some_of, take, typed, values_of, whole, within)
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


def test_a_refusal_within_the_handling_of_an_error_hides_that():
    with pytest.raises(ValueError) as caught:
        try: int('x')
        except ValueError: refuse('n', 'digits', 'x')
    assert caught.value.__suppress_context__


def test_values_are_shown_on_one_short_line():
    assert shown('a\nb') == r"'a\nb'" and shown(Words('as it is')) == 'as it is' and typed(3) == 'int 3'
    for v in (np.arange(10_000.).reshape(100, 100), 'x'*1000, list(range(1000)), dict.fromkeys(range(500), 'y'), object()):
        assert len(shown(v)) <= 80 and '\n' not in shown(v)
    assert form(np.zeros((3, 0), 'u1')) == 'uint8 of shape (3, 0)' and form(torch.zeros(2)) == 'torch.float32 of shape (2,)'


@pytest.mark.parametrize('v', [3, np.int8(3), np.uint64(3), np.array(3), torch.tensor(3)])
def test_whole_numbers_of_any_kind(v):
    got = whole('n', v)
    assert type(got) is int and got == 3


@pytest.mark.parametrize('v', [True, np.True_, 3., '3', None, [3], np.array([3, 4]), NAN, 3 + 0j])
def test_what_is_no_whole_number(v):
    assert said(ValueError, whole, 'bs', v, 1).startswith('bs: expected a whole number ≥ 1, got ')


def test_bounds_of_whole_numbers():
    assert [whole('n', v, 2, 4) for v in (2, 3, 4)] == [2, 3, 4]
    assert said(ValueError, whole, 'n', 1, 2, 4) == 'n: expected a whole number ≥ 2, got 1'
    assert said(ValueError, whole, 'n', 5, 2, 4, 'so many are stored') == 'n: expected a whole number ≤ 4, got 5; so many are stored'
    assert said(ValueError, whole, 'n', 2**31).startswith('n: expected a whole number ≤ 2147483647')


@pytest.mark.parametrize('v', [.5, 0, 1, np.float32(.5), np.int64(1), np.float64(0)])
def test_numbers_within_bounds(v):
    got = number('alpha', v, 0, 1)
    assert type(got) is float and got == v and is_number(v)


@pytest.mark.parametrize('v', [True, np.True_, '1', None, [1.], np.array([.5, .5]), NAN, INF, -INF, 10**400, 1j, np.float32('nan')])
def test_what_is_no_number(v):
    assert not is_number(v)
    assert said(ValueError, number, 'alpha', v).startswith('alpha: expected a finite number ≥ 0, got ')


def test_bounds_of_numbers_in_words():
    assert said(ValueError, number, 'a', 2, 0, 1) == 'a: expected a number from 0 to 1, got 2'
    assert said(ValueError, number, 'a', -.1, 0, .5) == 'a: expected a number from 0 to 0.5, got -0.1'
    assert said(ValueError, number, 'a', 0, 0, 1, above=True) == 'a: expected a number above 0, at most 1, got 0'
    assert said(ValueError, number, 'a', 0, above=True, hint='in seconds') == 'a: expected a number above 0, got 0; in seconds'
    assert said(ValueError, number, 'a', NAN, -INF) == 'a: expected a finite number, got nan'
    assert number('a', -7, -INF) == -7. and number('a', 1e-300, above=True) == 1e-300


def test_one_of_some_words():
    assert one_of('codec', 'lz4', ('lz4', None)) == 'lz4' and one_of('codec', None, ('lz4', None)) is None
    assert said(ValueError, one_of, 'codec', 'zip', ('lz4', None)) == "codec: expected 'lz4' or None, got 'zip'"
    assert said(ValueError, one_of, 'on', 'x', ('a', 'b', 'c'), 'or none') == "on: expected 'a', 'b' or 'c', got 'x'; or none"
    for v in (np.zeros(3), [], {}, 0, False, torch.zeros(2)):            # compared with none of them, whatever `==` gives
        assert said(ValueError, one_of, 'codec', v, ('lz4', None)).startswith("codec: expected 'lz4' or None, got ")


def test_some_of_the_fields():
    known = 'state', 'action', 'reward'
    assert some_of('fields', ['reward', 'state'], known) == ('reward', 'state')
    assert said(ValueError, some_of, 'fields', ['sate'], known) == f"fields: no field 'sate'; there are {known}"
    for v, got in (('state', "str 'state'"), ([], 'list []'), ({'state'}, "set {'state'}"), (None, 'NoneType None')):
        assert said(TypeError, some_of, 'fields', v, known) == f'fields: expected a list of some of {known}, got {got}'


def test_of_a_type():
    assert of_type('n', 3, int) == 3 and of_type('n', 3, (str, int), 'a str or an int') == 3
    assert said(TypeError, of_type, 'n', 'x', dict) == "n: expected a dict, got str 'x'"
    assert said(TypeError, of_type, 'n', 1., (str, int), 'a str or an int', 'cast it') == 'n: expected a str or an int, got float 1.0; cast it'


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


def test_kinds_and_shapes_of_arrays():
    a = np.arange(6).reshape(2, 3)
    assert array('x', a, 'iu', (2, 3)) is a and array('x', a, shape=(None, 3)) is a and array('x', 3., shape=()).shape == ()
    assert said(TypeError, array, 'x', a*.5, 'iu') == 'x: expected whole numbers, got float64 of shape (2, 3)'
    assert said(TypeError, array, 'x', [1j]) == 'x: expected real numbers, got complex128 of shape (1,)'
    assert said(ValueError, array, 'x', a, shape=(2, 4)) == 'x: expected shape (2, 4), got shape (2, 3)'
    assert said(ValueError, array, 'x', a, shape=(None,), hint='one each') == 'x: expected shape (None,), got shape (2, 3); one each'


def test_ids():
    a = np.arange(5)
    assert ids_of('ids', a) is a
    for v in (a[::2], [0, 2, 4], (0, 2, 4), torch.tensor([0, 2, 4]), np.array([0, 2, 4], 'u1'), np.array([0, 2, 4], '>i4')):
        got = ids_of('ids', v)
        assert got.dtype == np.int64 and got.flags.c_contiguous and got.tolist() == [0, 2, 4]
    assert ids_of('ids', []).dtype == np.int64 and ids_of('ids', []).shape == (0,)
    for v in (3, [[1]], [1.], [True], np.zeros((0, 2))):
        assert said(TypeError, ids_of, 'ids', v).startswith('ids: expected whole numbers in one dimension, got ')


def test_numbers_of_an_array_within_bounds():
    a = np.array([[0., 1.], [2., 3.]])
    assert within('p', a, 0, 3) is a and within('p', np.zeros(0), 5).size == 0 and within('p', np.array(True)).shape == ()
    assert said(ValueError, within, 'p', a, 1) == 'p: expected finite numbers ≥ 1, got 0.0 at 0, 0'
    assert said(ValueError, within, 'p', a, 0, 2, 'or none') == 'p: expected numbers from 0 to 2, got 3.0 at 1, 1; or none'
    for v in (NAN, INF, -INF): assert said(ValueError, within, 'p', np.array([1, v])) == f'p: expected finite numbers, got {v} at 1'
    assert said(ValueError, within, 'p', np.array(-1), 0) == 'p: expected finite numbers ≥ 0, got -1'


def test_the_first_number_out_of_bounds_is_named():
    rng = random.Random(0)
    for _ in range(2000):
        a, least, most = [rng.randint(-3, 9) for _ in range(rng.randint(1, 8))], rng.randint(-3, 3), rng.randint(3, 9)
        wrong = [k for k, o in enumerate(a) if not least <= o <= most]
        if not wrong: assert within('x', np.array(a), least, most).tolist() == a
        else:
            where = f' at {wrong[0]}' if len(a) > 1 else ''
            assert said(ValueError, within, 'x', np.array(a), least, most) == f'x: expected numbers from {least} to {most}, got {a[wrong[0]]}{where}'


def test_options_to_be_left_out():
    for v in (None, False): leave_out('beta', v, 'there are no weights')
    for v in (0, .4, True, '', np.zeros(2)): assert said(TypeError, leave_out, 'beta', v, 'none here') == 'beta: none here; leave it out'
    assert said(ValueError, leave_out, 'beta', 1, 'none here', ValueError) == 'beta: none here; leave it out'


def test_conditions_of_a_state():
    require(1, 'fine'), require('x', 'fine')
    assert said(ValueError, require, '', 'it is empty') == 'it is empty' and said(OSError, require, None, 'gone', OSError) == 'gone'
    assert take(dict(a=1, b=2, c=3), 'c', 'a') == [3, 1] and take({}) == []
    assert said(ValueError, take, dict(a=1), 'a', 'b', 'c') == 'state: b, c: missing'
    for v in (None, [1], 'ab'): assert said(ValueError, take, v, 'a', 'b') == f'state: expected a dict with a, b, got {type(v).__name__} {v!r}'


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


def test_beside_an_installed_package_the_extra_is_named_with_it(tmp_path, monkeypatch):
    "A package in site-packages has no pyproject.toml beside it"
    package = tmp_path/'site-packages'/'fastrl_replay'
    package.mkdir(parents=True)
    monkeypatch.setattr(checks, 'files', lambda name: package)
    assert checks.how_to_install('atari') == "pip install 'fastrl_replay[atari]'"
    (package.parent/'pyproject.toml').touch()
    assert checks.how_to_install('atari') == "pip install -e '.[atari]'"


def test_every_check_names_what_it_checks():
    "Whatever takes a `name` takes it first, so that all read alike"
    named = [f for k, f in vars(checks).items() if inspect.isfunction(f) and f.__module__ == checks.__name__ and 'name' in inspect.signature(f).parameters]
    first = {f.__name__: [*inspect.signature(f).parameters][:2] for f in named if f.__name__ != 'extra'}
    assert len(first) >= 9 and all(o[0] == 'name' for o in first.values()), first
