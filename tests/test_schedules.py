"Schedules: both ends exactly, monotone between, written down and read again"
import json, pickle

import pytest
from hypothesis import given, strategies as st

from fastrl_replay.schedules import ExponentialSchedule, LinearSchedule, check_schedule, schedule_from, schedule_state, value_at
from refusals import refused

numbers = st.floats(-1e6, 1e6)
positive = st.floats(1e-6, 1e6)
lengths = st.integers(1, 10**9)


@given(numbers, numbers, lengths)
def test_linear_ends_are_exact(start, end, n):
    s = LinearSchedule(start, end, n)
    assert s(0) == start and s(n) == end and s(n + 1) == end and s(10*n) == end and s(-1) == start


@given(positive, positive, lengths)
def test_exponential_ends_are_exact(start, end, n):
    s = ExponentialSchedule(start, end, n)
    assert s(0) == start and s(n) == end and s(n + 5) == end


@given(numbers, numbers, lengths, st.floats(0, 1))
def test_linear_stays_between_its_ends(start, end, n, part):
    v = LinearSchedule(start, end, n)(int(part*n))
    slack = 1e-9*(abs(start) + abs(end) + 1)
    assert min(start, end) - slack <= v <= max(start, end) + slack


@given(positive, positive, lengths)
def test_saved_as_json_and_loaded(start, end, n):
    for s in (LinearSchedule(start, end, n), ExponentialSchedule(start, end, n)):
        assert schedule_from(json.loads(json.dumps(schedule_state(s)))) == s
        assert pickle.loads(pickle.dumps(s)) == s


def test_middle(): assert LinearSchedule(1., 0., 4)(1) == .75 and ExponentialSchedule(1., .01, 2)(1) == pytest.approx(.1)


@pytest.mark.parametrize('args,name', [((1, .1, 0), 'n'), ((1, .1, -3), 'n'), ((1, .1, 2.5), 'n'), ((1, .1, None), 'n'), ((float('nan'), .1, 9), 'start'),
                                       ((1, float('inf'), 9), 'end'), (('1', .1, 9), 'start'), ((None, .1, 9), 'start'), ((1, .1, True), 'n')])
@pytest.mark.parametrize('kind', [LinearSchedule, ExponentialSchedule])
def test_bad_arguments_are_named(kind, args, name):
    with refused(f'{kind.__name__}: {name}', got=repr(args['start end n'.split().index(name)])): kind(*args)


def test_a_ratio_needs_positive_ends():
    with refused('ExponentialSchedule: end', got='0.0'): ExponentialSchedule(1., 0., 9)


def test_number_or_schedule():
    assert value_at(.3, 99) == .3 and value_at(lambda k: k + 1, 99) == 100
    assert check_schedule('beta', .4) == .4
    for bad in ('x', None, [1], True):
        with refused('beta', TypeError): check_schedule('beta', bad)
    with refused('beta', got='nan'): check_schedule('beta', float('nan'))
