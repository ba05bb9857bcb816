"""Rows of several environments in one stream: an n-step pipe says so, once, and never where rows follow each other."""
import warnings
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch

from fastrl_replay.batch import Batch
from fastrl_replay.pipes.n_step import NStep
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.steps import SimpleStep, Transition
from words import WORDS


class Numbered(NamedTuple):
    "Steps with a number, and with no stream of their own"
    state: Any
    action: Any
    reward: Any
    next_state: Any
    terminated: Any
    truncated: Any
    step_n: Any


def walks(n_envs, n, kind=float, length=20):
    "For each time step the transitions of all environments, whose observations are `kind`s"
    out = []
    for t in range(n):
        row = []
        for e in range(n_envs):
            episode, k = divmod(t + 3*e, length)
            at = 1000.*e + 100*episode + k
            row.append(Transition(kind(at), 0, 1., kind(at + 1), k==length - 1, False))
        out.append(row)
    return out


def array(v): return np.array([v, -v], np.float32)
def nested(v): return dict(here=np.array([v]), there=(np.array([0.]), np.array([v/2])))
def tensor(v): return torch.tensor([v])


def told(items, n=3, pushed=True):
    "What is said of these items, by a pipe without a source or with one"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        if pushed:
            pipe = NStep(None, n, .9)
            for item in items: pipe.push(item)
        else:
            for _ in NStep(items, n, .9): pass
    return [str(o.message) for o in caught]


def stacked(rows, streams=None):
    "A batch of one row of each stream; `streams`: whose each row is, or 'one'"
    batch = Batch.of_steps(rows)
    return Batch.of_arrays(batch.layout, batch.arrays(), None if streams is None else np.array(streams))


FORMS = dict(
    steps=lambda rows: [step for row in rows for step in row],
    lists=lambda rows: rows,
    one_stream=lambda rows: [stacked(row, [0]*len(row)) for row in rows])


@pytest.mark.parametrize('pushed,kind', [(True, float), (False, int), (True, array), (False, nested), (True, tensor)])
@pytest.mark.parametrize('form', FORMS)
def test_steps_of_several_environments_in_one_stream(form, kind, pushed):
    [said] = told(FORMS[form](walks(8, 60, kind)), pushed=pushed)
    assert 'env_id' in said and 'streams=' in said and 'next_state' in said


@pytest.mark.parametrize('form', FORMS)
def test_it_is_said_though_it_begins_late(form):
    rows = [row[:1] for row in walks(1, 3000)] + walks(4, 3000)
    assert len(told(FORMS[form](rows)))==1


def test_environments_that_are_no_longer_alive_are_left_out():
    "Chunks of only those that are alive: their number stays the same, but who they are does not"
    rng = np.random.default_rng(0)
    said = told([stacked([row[e] for e in sorted(rng.choice(8, 4, False))]) for row in walks(8, 100)])
    assert len(said)==1 and 'env_id' in said[0]


@pytest.mark.parametrize('n', [2, 3, 5])
@pytest.mark.parametrize('kind', [float, array, nested, tensor])
def test_nothing_is_said_of_steps_that_follow_each_other(kind, n):
    one, eight = walks(1, 400, kind), walks(8, 100, kind)
    assert not told(FORMS['steps'](one), n) and not told(FORMS['lists'](one), n) and not told(FORMS['one_stream'](one), n)
    assert not told([stacked(row) for row in eight], n)
    assert not told([stacked(row, [2**62, -5, *range(6)]) for row in eight], n)
    ahead = [step for e in range(8) for step in (row[e] for row in eight)]      # one after the other, each cut off without a flag
    assert not told(ahead, n)


def test_nothing_is_said_where_nothing_is_joined():
    assert not told(FORMS['steps'](walks(8, 100)), n=1)
    flagged = [step._replace(truncated=True) for step in FORMS['steps'](walks(8, 100))]
    assert not told(flagged)


def test_nothing_is_said_of_not_a_number():
    def holed(v): return np.array([v, np.nan])
    for form in FORMS: assert not told(FORMS[form](walks(1, 400, holed)))


def test_nothing_is_said_of_filters_that_keep_whole_episodes():
    rows = [row[0] for row in walks(1, 2000)]
    kept = [step for k, step in enumerate(rows) if (k//20) % 3]
    assert not told(kept) and not told([stacked([step]) for step in kept])


def test_a_gap_in_the_numbers_is_another_mistake():
    steps = [Numbered(float(t), 0, 1., float(t + 1), False, False, t) for t in range(600)]
    assert not told(steps)
    [said] = told([step for k, step in enumerate(steps) if k % 4])
    assert 'gap' in said


@pytest.mark.parametrize('mode', ['SameStep', 'NextStep', 'Disabled'])
def test_nothing_is_said_of_real_environments(mode):
    def environments():
        return gym.vector.SyncVectorEnv([lambda: gym.make('CartPole-v1')]*4, autoreset_mode=getattr(gym.vector.AutoresetMode, mode.upper().replace('STEP', '_STEP')))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for source in ([environments()], ['CartPole-v1', 'CartPole-v1']):
            for _ in zip(range(400), NStep(GymStepper(source, seed=0, step_type=SimpleStep), 3, .9)): pass


def test_it_is_said_once_also_by_a_pipe_that_is_saved():
    pipe, steps = NStep(None, 3, .9), FORMS['steps'](walks(8, 200))
    with pytest.warns(UserWarning, match=WORDS['name the environments']):
        for step in steps: pipe.push(step)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for step in steps: pipe.push(step)


def test_steps_without_a_state_are_joined_as_before():
    class Stateless(NamedTuple):
        reward: Any
        next_state: Any
        terminated: Any
        truncated: Any
    steps = [Stateless(1., 0., False, False) for _ in range(300)]
    assert not told(steps) and not told([stacked([step]) for step in steps])
