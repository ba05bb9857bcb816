"""What refusals say in words, in this one file: elsewhere tests compare which value is refused (refusals.py). Each row is a call and the whole
message; where a refusal is made by the checks, its attributes are parts of that message."""
import copy
import pickle
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fastrl_replay import checks
from fastrl_replay.all import (
    ERE, AgeWeighted, DeviceMemory, EpsilonGreedy, ExperienceReplay, GymStepper, HindsightReplay, LinearSchedule, MixedMemory, NStep,
    PrioritizedReplay, Proportional, RankBased, ReplayMemory, Sequence, SequenceReplay, SimpleStep, Transition, Uniform)
from fastrl_replay.checks import Words, placed, refuse
from fastrl_replay.ray import RayMemory
from fastrl_replay.saving import CheckpointError
from refusals import refused


class Told(NamedTuple):
    reward: float
    task: str


class Nothing:
    "Not what anybody expects"
    def __repr__(self): return 'Nothing()'


def step(**other):
    state = np.zeros(4, np.float32)
    return Transition(state, 0, 1., state, False, False)._replace(**other)
def told(task): return Told(1., task)
def stacked():
    state, flags = np.zeros((3, 4), np.float32), np.zeros(3, bool)
    return Transition(state, np.zeros(3, int), np.ones(3), state, flags, flags)


def memory(**options):
    "One of six steps, the last of which ends an episode"
    made = ReplayMemory(10, Proportional(), seed=0, **options)
    for k in range(6): made.add(step(truncated=k == 5))
    return made
def sequences():
    made = ReplayMemory(10, seed=0, sequence=Sequence(3, stride=1))
    made.extend([step() for _ in range(6)])
    return made
def texts():
    made = ReplayMemory(10)
    made.add(told('lift'))
    return made


REFUSALS = [
    # made with wrong numbers, words and objects
    (lambda: ReplayMemory(0), ValueError,
     'max_sz: expected a whole number ≥ 1, got 0'),
    (lambda: ReplayMemory(10, dtype='f4'), TypeError,
     "dtype: expected a structured dtype with the step's fields, got dtype('float32')"),
    (lambda: ReplayMemory(10, max_draws=0), ValueError,
     'max_draws: expected a whole number ≥ 1, got 0'),
    (lambda: ReplayMemory(10, dedup='frame'), ValueError,
     "dedup: expected 'auto', 'large', 'frames', 'next_state' or None, got 'frame'"),
    (lambda: ReplayMemory(10, dedup='frames', step=step()), ValueError,
     "dedup='frames': expected a stack of 2 to 16 frames, got float32[4]; use 'next_state'"),
    (lambda: ReplayMemory(10, codec='zip'), ValueError,
     "codec: expected 'lz4' or None, got 'zip'"),
    (lambda: ReplayMemory(10, dedup=None, codec='lz4'), ValueError,
     "codec='lz4': dedup=None keeps no frames to pack; leave one out"),
    (lambda: ReplayMemory(10, Uniform), TypeError,
     "sampler: expected an object with the methods on_add, draw, update, get_state, set_state; got <class 'fastrl_replay.samplers.uniform.Uniform'>, a class: call it to make one"),
    (lambda: ReplayMemory(10, Nothing()), TypeError,
     'sampler: expected an object with the methods on_add, draw, update, get_state, set_state; got Nothing(), which lacks on_add, draw, update, get_state, set_state'),
    (lambda: ReplayMemory(10, AgeWeighted(9), sequence=Sequence(4)), TypeError,
     'sampler: expected Uniform or Proportional, which draw sequences, got AgeWeighted(horizon=9.0, floor=0.1): 0 slots filled, 0 batches drawn'),
    (lambda: ReplayMemory(10, sequence=Sequence(11)), ValueError,
     'sequence: expected a length of at most max_sz=10, got 11'),
    (lambda: ReplayMemory(10, sequence=4), TypeError,
     'sequence: expected a Sequence, got int 4'),
    (lambda: ReplayMemory(10, sequence=Sequence(4), windows={'action': [0]}), ValueError,
     'windows: the columns of sequences are windows already; leave it out'),
    (lambda: ReplayMemory(10, windows={'action': []}), ValueError,
     "windows['action']: expected one offset or more, got []; leave the field out, to read its rows alone"),
    (lambda: ReplayMemory(10, windows={'speed': [0]}).add(step()), ValueError,
     "windows: no field 'speed'; there are ('state', 'action', 'reward', 'next_state', 'terminated', 'truncated')"),
    (lambda: Sequence(4, burn_in=4), ValueError,
     'burn_in: expected less than the length of 4, got 4'),
    (lambda: Uniform('yes'), TypeError,
     "replace: expected a bool, got str 'yes'"),
    (lambda: Proportional(alpha=-1), ValueError,
     'alpha: expected a finite number ≥ 0, got -1'),
    (lambda: Proportional(beta=1.1), ValueError,
     'beta: expected a number from 0 to 1, got 1.1'),
    (lambda: Proportional(beta='x'), ValueError,
     "beta: expected a number from 0 to 1, got 'x'"),
    (lambda: Proportional(normalize='all'), ValueError,
     "normalize: expected 'batch' or 'memory', got 'all'"),
    (lambda: RankBased(alpha=True), ValueError,
     'alpha: expected a finite number ≥ 0, got True'),
    (lambda: ERE(eta=1.5), ValueError,
     'eta: expected a number from 0 to 1, got 1.5'),
    (lambda: AgeWeighted(0), ValueError,
     'horizon: expected a number above 0, at most 2.14748e+09, got 0'),
    (lambda: LinearSchedule(0., 1., 0), ValueError,
     'LinearSchedule: n: expected a whole number ≥ 1, got 0'),
    # steps that don't fit
    (lambda: memory().add([1, 2]), TypeError,
     "step: expected Transition('state', 'action', 'reward', 'next_state', 'terminated', 'truncated'), got list [1, 2]; a memory holds one type of step"),
    (lambda: memory().add(SimpleStep(1., 2, 3.)), TypeError,
     "step: expected Transition('state', 'action', 'reward', 'next_state', 'terminated', 'truncated'), got SimpleStep SimpleStep(state=1.0, action=2, next_state=3.0, terminated=False, truncated=Fals; a memory holds one type of step"),
    (lambda: memory().add(step(state=np.zeros(3, np.float32))), ValueError,
     'state: expected shape (4,), got (3,); every step of a memory has the same shapes'),
    (lambda: memory().extend([step(), step(state=np.zeros(3, np.float32))]), ValueError,
     'step 1 of 2: state: expected shape (4,), got (3,); every step of a memory has the same shapes'),
    (lambda: memory().add(step(state=np.full(4, 1e300))), TypeError,
     'state: expected float32[4], got dtype float64, which would lose precision; cast it yourself, or give the memory a wider dtype'),
    (lambda: memory().add(step(action=.5)), ValueError,
     'action: expected int64, got float64 array(0.5), which does not fit without loss; cast it yourself, or make the first one of a wider dtype (0. instead of 0)'),
    (lambda: memory().add(step(action='left')), TypeError,
     "action: expected numbers (bool, int, float, complex), got str 'left'; encode it as numbers or drop the field"),
    (lambda: memory().add(step(reward=[1., 2.])), ValueError,
     'reward: expected shape (), got (2,); every step of a memory has the same shapes; `extend` takes chunks'),
    (lambda: memory().add(step(reward=1e39)), ValueError,
     'reward: expected a number within float32, got array(1.e+39), which overflows; scale it'),
    (lambda: memory().add(step(terminated=2)), ValueError,
     'terminated: expected True, False, 0 or 1, got int64 2; a flag says yes or no: compare the number yourself'),
    (lambda: memory().add(step(terminated=np.array([0, 1]))), ValueError,
     'terminated: expected shape (), got (2,); each step has one flag; `extend` takes chunks, with flags of shape (n,)'),
    (lambda: memory().add(step(state=np.ma.array(np.zeros(4), mask=True))), TypeError,
     'state: expected an array, got a masked one; fill it'),
    (lambda: ReplayMemory(9).add(step(next_state=np.zeros(3, np.float32))), ValueError,
     'next_state: expected float32[4], as in state, got float32[3]; cast it, or name the fields, whose order in Transition is state, action, reward, next_state, terminated, truncated'),
    (lambda: ReplayMemory(9).add(step(next_state=0., terminated=np.zeros(4))), ValueError,
     'next_state: expected float32[4], as in state, got float32; cast it, or name the fields, whose order in Transition is state, action, reward, next_state, terminated, truncated'),
    (lambda: memory().extend(stacked(), streams='two'), ValueError,
     "streams: expected 'one' or an int array, got 'two'"),
    (lambda: memory().extend(stacked(), streams=[0, 1]), ValueError,
     'streams: expected 3 whole numbers, one for each row, got int64 of shape (2,)'),
    (lambda: memory().extend(stacked(), priorities=[1.]), ValueError,
     'priorities: expected one for each of 3 transitions, got shape (1,)'),
    (lambda: memory().extend(stacked(), priorities=[1., -1., 1.]), ValueError,
     'priorities: expected finite numbers ≥ 0, got -1.0 at 1'),
    (lambda: memory().add(step(), priority=float('nan')), ValueError,
     'priority: expected finite numbers ≥ 0, got nan'),
    (lambda: texts().add(told(3)), TypeError,
     'task: expected a string, got int 3; a field of strings holds nothing else'),
    (lambda: texts().column('task'), ValueError,
     'task: expected one number, got strings or several numbers a step: Layout(Told: reward float32, task str; 32 bytes)'),
    # drawn, read and changed
    (lambda: ReplayMemory(9).sample(1), ValueError,
     'the memory is empty: add steps before sampling'),
    (lambda: memory().sample(0), ValueError,
     'bs: expected a whole number ≥ 1, got 0'),
    (lambda: memory().sample(True), ValueError,
     'bs: expected a whole number ≥ 1, got True'),
    (lambda: memory().sample(2, fields='state'), TypeError,
     "fields: expected a list of field names, got str 'state'"),
    (lambda: memory().sample(2, fields=['sate']), ValueError,
     "fields: no field 'sate'; there are ('state', 'action', 'reward', 'next_state', 'terminated', 'truncated')"),
    (lambda: memory().sample(2, windows=[0]), TypeError,
     "windows: expected a dict such as {'action': range(8)}, got list [0]"),
    (lambda: memory().sample(2, windows={'sate': [0]}), ValueError,
     "windows: no field 'sate'; there are ('state', 'action', 'reward', 'next_state', 'terminated', 'truncated')"),
    (lambda: memory().sample(2, windows={'state': (-5, 5)}), ValueError,
     "windows['state']: expected a window within the 10 rows of the memory, got one of 11 rows"),
    (lambda: sequences().sample(2, windows={'state': [0]}), ValueError,
     'windows: the columns of sequences are windows already; leave it out'),
    (lambda: sequences().add(step(), priority=1.), ValueError,
     'priority: a sequence gets its priority from update_priorities; leave it out'),
    (lambda: memory().sample_sequences(2, 12), ValueError,
     'length: expected a whole number ≤ 10, got 12'),
    (lambda: memory().update_priorities([0], [1., 2.]), ValueError,
     'td_errors: expected one for each of 1 transitions, got shape (2,); send the error of each transition, not their mean'),
    (lambda: memory().update_priorities([0], [float('nan')]), ValueError,
     'td_errors: expected finite numbers, got nan at 0; NaN or infinity usually means a diverging loss'),
    (lambda: memory().update_priorities([.5], [1.]), TypeError,
     'ids: expected whole numbers in one dimension, got float64 of shape (1,)'),
    (lambda: memory().update_priorities([99], [1.]), ValueError,
     'ids: 99 (at 0) was never given out; expected numbers from 0 to 5'),
    (lambda: memory().fetch([6]), ValueError,
     'ids: 6 is not in the memory, which holds 0 to 5'),
    (lambda: memory().recent(7), ValueError,
     'k: expected at most the 6 transitions stored, got 7'),
    (lambda: memory().drop([-1]), ValueError,
     'ids: -1 is not in the memory, which holds 0 to 5'),
    (lambda: memory().column('state'), ValueError,
     'state: expected one number, got strings or several numbers a step: Layout(Transition: state float32[4], action int64, reward float32, next_state float32[4], terminated bool, truncated bool; 64 bytes)'),
    (lambda: memory().column('speed'), ValueError,
     "column: no field 'speed'; there are ('state', 'action', 'reward', 'next_state', 'terminated', 'truncated')"),
    (lambda: memory().where('reward', lambda r: r), ValueError,
     'test: expected a bool for each of 6 numbers, got float32 of shape (6,); return values > 0, for example'),
    (lambda: memory()['state'], TypeError,
     "memory['state']: expected a slot or a slice; columns belong to a Batch"),
    (lambda: memory().sample(2).speed, AttributeError,
     "this Batch has no 'speed'; its fields are ('state', 'action', 'reward', 'next_state', 'terminated', 'truncated')"),
    (lambda: memory().sample(2).replace(speed=1), ValueError,
     "speed: expected one of ('state', 'action', 'reward', 'next_state', 'terminated', 'truncated'); replace adds no columns"),
    # saved and loaded
    (lambda: memory().save('somewhere', also=3), TypeError,
     'also: expected a dict of plain data, got int 3'),
    (lambda: memory().save('somewhere', also={'a': Nothing()}), TypeError,
     'also.a: expected numbers, strings, None, arrays, tensors, or lists, tuples and dicts of them, got Nothing Nothing(); save its state_dict, or leave it out'),
    (lambda: memory().load_state_dict(3), TypeError,
     'state: expected a dict as from state_dict, got int 3'),
    (lambda: memory().load_state_dict({}), ValueError,
     'state: expected format 4 or format 3, got None'),
    (lambda: ReplayMemory.open('/nowhere'), CheckpointError,
     '/nowhere: no such folder; there is no memory here'),
    # pipes
    (lambda: PrioritizedReplay([], replace=True), TypeError,
     'replace: prioritized_replay always draws with replacement; leave it out'),
    (lambda: ExperienceReplay([], bs=3, min_sz=2), ValueError,
     "bs: a batch of 3 without replacement can't be drawn from 2 transitions (min_sz 2, max_sz 100); make them larger, or draw with replace=True"),
    (lambda: ExperienceReplay([], steps_per_batch=0), ValueError,
     'steps_per_batch: expected a number above 0, got 0'),
    (lambda: ExperienceReplay([], memory=memory(), seed=3), TypeError,
     'seed: an option of a new memory, but memory= is given; leave it out'),
    (lambda: ExperienceReplay([], alpha=.5), TypeError,
     'alpha: experience_replay has no such option; it is an option of prioritized_replay, or pass sampler=Proportional(alpha=...)'),
    (lambda: ExperienceReplay([], memory=[]), TypeError,
     'memory: expected a memory, got list without add, draws, episode, fetch, first_id, health, layout, lock, max_sz, n_added, news, next, previous, rng, sample, sampler, show, update_priorities, usage'),
    (lambda: SequenceReplay([], 4, 100, 5, alpha=.5, replace=True), TypeError,
     'replace: with alpha, sequence_replay always draws with replacement; leave it out'),
    (lambda: HindsightReplay([], None), TypeError,
     'compute_reward: expected a function of (achieved, desired, info), got NoneType None'),
    (lambda: HindsightReplay([], lambda *a: 0, strategy='past'), ValueError,
     "strategy: expected 'future', 'final' or 'episode', got 'past'"),
    (lambda: NStep([], 0, .9), ValueError,
     'n_step: n: expected a whole number ≥ 1, got 0'),
    (lambda: NStep([], 3, 2.), ValueError,
     'n_step: gamma: expected a number from 0 to 1, got 2.0'),
    (lambda: NStep([], 3, .9).push([]), TypeError,
     'push: this NStep has a source, and is iterated; make one without'),
    (lambda: list(NStep([3], 2, .9)), TypeError,
     'n_step: expected steps (NamedTuples), a Batch or a list of steps, got int 3; arrays of several steps are a chunk: make a Batch of them, Batch.of(step_type(...), streams=...)'),
    (lambda: GymStepper('CartPole-v1'), TypeError,
     "gym_stepper: expected an iterable of environments, got 'CartPole-v1'; put it in a list: ['CartPole-v1']"),
    (lambda: next(iter(GymStepper([]))), ValueError,
     'gym_stepper: expected at least one environment or id, got an empty source'),
    (lambda: EpsilonGreedy(None, eps=-.1), ValueError,
     'eps: expected a number from 0 to 1, got -0.1'),
    (lambda: ExperienceReplay([]).loader(num_workers=2), ValueError,
     "num_workers: a replay lives in the learner's process, where priorities come back; each worker would fill and sample a copy of its own. Leave num_workers at 0"),
    (lambda: ExperienceReplay([]).loader(prefetch=1, stateful=True), ValueError,
     'prefetch: batches drawn ahead are not in the state; leave it out'),
    # several memories
    (lambda: MixedMemory([]), ValueError,
     'memories: expected at least one memory, got none'),
    (lambda: MixedMemory([memory(), memory()], 'half'), TypeError,
     "shares: expected a number for each memory, or a schedule, got str 'half'"),
    (lambda: MixedMemory([memory(), memory()], (1, 1)), ValueError,
     'shares: expected numbers that add up to 1, got (1, 1); they add up to 2'),
    (lambda: MixedMemory([memory(), 3]), TypeError,
     'memory: expected a memory, got int without add, draws, episode, extend, fetch, first_id, health, layout, lock, max_sz, n_added, news, next, previous, rng, sample, sampler, show, update_priorities, usage (memory 1)'),
    (lambda: MixedMemory([memory(), memory()]).fetch([2 << 56]), ValueError,
     'ids: 144115188075855872 is of memory 2; there are 2, from 0 on'),
    (lambda: MixedMemory([memory(), ReplayMemory(9)]).sample(4), ValueError,
     'memory 1 is empty, and its share of a batch is 0.5: store steps in it, or set its share to 0'),
    (lambda: MixedMemory([memory(), memory()]).drop([0]), AttributeError,
     'drop: MixedMemory has no such method; call it on one of its `memories`'),
    (lambda: RayMemory(-1), ValueError,
     'shards: expected a whole number ≥ 0, got -1'),
    (lambda: RayMemory(0, 10, on_loss='stop'), ValueError,
     "on_loss: expected 'go_on', 'wait' or 'raise', got 'stop'"),
    (lambda: RayMemory(0, 10, max_draws=2), TypeError,
     'max_draws: shards do not have this option of a `ReplayMemory`; leave it out'),
    (lambda: RayMemory(0, 10, sequence=Sequence(4)), ValueError,
     'sequence: shards draw single steps; leave it out'),
    (lambda: RayMemory(0, 10, RankBased()), ValueError,
     "sampler: RankBased ranks all transitions, by priority or age, and a shard knows only its own: the law would not be that of one memory; take Proportional, or rank='shard' to rank within each shard"),
    (lambda: DeviceMemory(10, device='cpu', path='somewhere'), TypeError,
     'path: a DeviceMemory has no such option; a ReplayMemory may have it'),
]


@pytest.mark.parametrize('call, error, message', [pytest.param(*o, id=o[2][:60]) for o in REFUSALS])
def test_what_is_said(call, error, message):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with pytest.raises(error) as caught: call()
    told = caught.value
    assert type(told) is error and str(told) == message
    if getattr(told, 'argument', None) is None: return
    assert f'{told.argument}: ' in f'{message}: '.replace('=', ': ')
    if told.expected is not None and ': expected ' in message: assert f'{told.argument}: expected {told.expected}, got {told.got}' in message


# ---- the attributes

def attributes(f, *args, **kw):
    with pytest.raises(Exception) as caught: f(*args, **kw)
    return tuple(vars(caught.value).get(o) for o in ('argument', 'expected', 'got'))


@pytest.mark.parametrize('check, args, said', [
    ('whole', ('bs', 0, 1), ('bs', 'a whole number ≥ 1', '0')), ('number', ('alpha', -1), ('alpha', 'a finite number ≥ 0', '-1')),
    ('one_of', ('codec', 'zip', ('lz4', None)), ('codec', "'lz4' or None", "'zip'")),
    ('some_of', ('fields', 'state', ('state',)), ('fields', "a list of some of ('state',)", "str 'state'")),
    ('some_of', ('fields', ['sate'], ('state',)), ('fields', "some of ('state',)", "'sate'")),
    ('of_type', ('sequence', 5, dict), ('sequence', 'a dict', 'int 5')),
    ('plain_array', ('state', 'left'), ('state', 'numbers (bool, int, float, complex)', "str 'left'")),
    ('plain_array', ('state', torch.zeros(2).to_sparse()), ('state', 'a dense tensor of numbers', None)),
    ('array', ('td', [.1], 'iu'), ('td', 'whole numbers', 'float64 of shape (1,)')),
    ('array', ('td', [.1], 'f', (3,)), ('td', 'shape (3,)', 'shape (1,)')),
    ('ids_of', ('ids', [.5]), ('ids', 'whole numbers in one dimension', 'float64 of shape (1,)')),
    ('stored_ids', ([9], 2, 5), ('ids', '2 to 4', '9')), ('stored_ids', ([3], 5, 5), ('ids', 'nothing', '3')),
    ('within', ('p', np.array([1., -1.]), 0), ('p', 'finite numbers ≥ 0', '-1.0 at 1')),
    ('leave_out', ('beta', .4, 'there are no weights'), ('beta', None, '0.4')),
    ('take', ({}, 'size'), ('state', None, None)), ('take', (3, 'size'), ('state', 'a dict with size', 'int 3')),
    ('refuse', ('x', 1, Words('two')), ('x', '1', 'two')), ('refuse', (('a', 0), 1, None), ("('a', 0)", '1', 'None')),
    ('require', (False, 'dedup: these rows do not fit'), ('dedup', None, None)),
    ('require', (False, "codec='lz4': there is nothing to pack"), ('codec', None, None)),
    ('require', (False, '/a/folder: no such file'), (None, None, None)), ('require', (False, 'checksum mismatch'), (None, None, None)),
    ('require', (False, 'the memory is empty: add steps'), (None, None, None))])
def test_each_check_says_what_it_refuses(check, args, said):
    argument, expected, got = attributes(getattr(checks, check), *args)
    assert (argument, expected) == said[:2] and (said[2] is None and check == 'plain_array' or got == said[2])
    assert all(type(o) in (str, type(None)) for o in (argument, expected, got))


def made(error=ValueError):
    with pytest.raises(error) as caught: refuse('bs', 'a number', 'x', 'give one', error)
    return caught.value


@pytest.mark.parametrize('error', [ValueError, TypeError, RuntimeError, KeyError, CheckpointError])
def test_attributes_travel(error):
    "Pickled, copied, placed: the class, the message and the attributes stay"
    told = made(error)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1): same(pickle.loads(pickle.dumps(told, protocol)), told)
    same(copy.copy(told), told)
    same(copy.deepcopy(told), told)
    moved = placed(told, 'step 3')
    assert type(moved) is error and vars(moved) == vars(told) and moved.args[0].startswith('step 3: ')


def same(a, b): assert type(a) is type(b) and a.args == b.args and vars(a) == vars(b) != {}


def test_a_step_among_several_keeps_what_is_said_of_it():
    with refused('state', expected='shape (4,)', got='(3,)'): memory().extend([step(), step(state=np.zeros(3, np.float32))])
    with refused('fields') as caught: MixedMemory([memory(), memory()]).sample(4, ['sate'])
    assert type(caught.value) is ValueError
