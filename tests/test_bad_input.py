"""Whatever is wrong with a call, it says which argument, and the memory is the same to the byte afterwards."""
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import SimpleStep, Transition
from twins import named
from refusals import named as argument_of


class Step(NamedTuple):
    obs: Any
    action: Any
    reward: Any
    env_id: Any
    wide: Any

class Other(NamedTuple):        # the same fields, another name
    obs: Any
    action: Any
    reward: Any
    env_id: Any
    wide: Any

def step(i=0, **changed):
    obs = {'image': np.full((2, 3), i, np.uint8), 'pose': (np.full(2, i, np.float32), i)}
    return Step(obs, i, float(i), i % 3, np.full(3, i, np.float64))._replace(**changed)

def obs(image=None, pose=None, n=0):
    return {'image': np.zeros((2, 3), np.uint8) if image is None else image, 'pose': (np.zeros(2, np.float32), n) if pose is None else pose}

def stacked(k=4):
    rows = [step(i) for i in range(k)]
    deep = {'image': np.stack([o.obs['image'] for o in rows]), 'pose': (np.stack([o.obs['pose'][0] for o in rows]), np.arange(k))}
    return Step(deep, np.arange(k), np.arange(k, dtype=np.float32), np.arange(k) % 3, np.stack([o.wide for o in rows]))


def plain(v):
    "A state as something that == compares, to the byte"
    if isinstance(v, dict): return {k: plain(o) for k, o in v.items()}
    if isinstance(v, torch.Tensor): return str(v.dtype), tuple(v.shape), v.numpy().tobytes()
    return repr(v)

def state(memory):
    "All there is: records (padding and stale ones included), counters, streams, sampler, generator"
    return plain(memory.state_dict()), memory.first_id, memory.n_added, len(memory), memory.n_stale

@pytest.fixture(params=['uniform', 'proportional'])
def memory(request):
    made = ReplayMemory(10, Proportional() if request.param=='proportional' else Uniform(), seed=0)
    made.extend([step(i) for i in range(14)])
    made.update_priorities([5, 6, 1], [.3, 2., 9.])
    made.sample(4)
    return made


class unchanged:
    "A context: the body raises `error` with a message that names `what`, and the memory is as it was, and works"
    def __init__(self, memory, error, what): self.memory, self.error, self.what, self.before = memory, error, what, state(memory)
    def __enter__(self): return self
    def __exit__(self, kind, e, tb):
        assert kind is not None, f'no error: expected one about {self.what}'
        if not issubclass(kind, self.error): return False
        assert any(o in argument_of(e) for o in self.what.split('|')), f'{kind.__name__} is not about {self.what!r}, but {argument_of(e)!r}: {e}'
        assert len(str(e).split('\nThis exception is thrown by')[0]) < 500, f'not readable: {e}'          # torch adds that
        assert state(self.memory)==self.before, 'the memory has changed'
        self.memory.check_valid()
        return True

BAD = (ValueError, TypeError)

VALUES = {          # case: (field named, changed fields)
    'string': ('action', dict(action='left')),
    'None': ('action', dict(action=None)),
    'object': ('action', dict(action=object())),
    'a date': ('action', dict(action=np.datetime64('2024-01-01'))),
    'int overflow': ('action', dict(action=2**63)),
    'uint64 overflow': ('action', dict(action=np.uint64(2**63))),
    'a fraction for an int': ('action', dict(action=1.5)),
    'NaN for an int': ('action', dict(action=float('nan'))),
    'an array for a number': ('action', dict(action=np.array([1]))),
    'a list for a number': ('action', dict(action=[1, 2])),
    'reward overflow': ('reward', dict(reward=1e300)),
    'reward tensor of one': ('reward', dict(reward=torch.ones(1))),
    'env_id fraction': ('env_id', dict(env_id=.5)),
    'env_id array': ('env_id', dict(env_id=np.array([1, 2]))),
    'shape': ('wide', dict(wide=np.zeros(4))),
    'ragged': ('wide', dict(wide=[[1.], [1., 2.], []])),
    'array of objects': ('wide', dict(wide=np.array([1, None, 2], object))),
    'long double': ('wide', dict(wide=np.ones(3, np.longdouble))),
    'nested shape': ('obs.image', dict(obs=obs(image=np.zeros((3, 2), np.uint8)))),
    'nested dtype': ('obs.image', dict(obs=obs(image=np.zeros((2, 3), np.float32)))),
    'nested overflow': ('obs.image', dict(obs=obs(image=np.full((2, 3), 256)))),
    'lossy array': ('obs.pose.0', dict(obs=obs(pose=(np.zeros(2), 0)))),
    'lossy ints in a list': ('obs.pose.0', dict(obs=obs(pose=([2**24 + 1, 0], 0)))),
    'a key missing': ('obs', dict(obs={'image': np.zeros((2, 3), np.uint8)})),
    'an array for a dict': ('obs', dict(obs=np.zeros(3))),
    'a longer tuple': ('obs.pose', dict(obs=obs(pose=(np.zeros(2, np.float32), 0, 0)))),
    'a list for a tuple': ('obs.pose', dict(obs=obs(pose=[np.zeros(2, np.float32), 0]))),
    'a sparse tensor': ('wide', dict(wide=torch.ones(3, dtype=torch.float64).to_sparse())),
    'a tensor without data': ('wide', dict(wide=torch.ones(3, dtype=torch.float64, device='meta'))),
}

@pytest.mark.parametrize('case', VALUES)
def test_a_bad_value_in_each_form(memory, case):
    field, changed = VALUES[case]
    bad = step(3, **changed)
    with unchanged(memory, BAD, field): memory.add(bad)
    with unchanged(memory, BAD, field): memory.add(bad, 5.)
    for at in (0, 2):
        chunk = [step(k) for k in range(3)]
        chunk[at] = bad
        with unchanged(memory, BAD, field): memory.extend(chunk)
        with unchanged(memory, BAD, field): memory.extend(tuple(chunk), [1., 9., 2.])
        with unchanged(memory, BAD, field): memory.extend(o for o in chunk)
    assert memory.add(step(99))==14 and memory.sample(5).reward.max() <= 99


NOT_FIRST = {       # fine at first
    'shape', 'a fraction for an int', 'NaN for an int', 'an array for a number', 'a list for a number',
    'uint64 overflow', 'reward tensor of one', 'env_id fraction', 'env_id array', 'nested shape', 'nested dtype',
    'nested overflow', 'lossy array', 'lossy ints in a list', 'a key missing', 'an array for a dict',
    'a longer tuple', 'a list for a tuple'}

@pytest.mark.parametrize('case', [o for o in VALUES if o not in NOT_FIRST])
def test_a_bad_first_step_opens_nothing(case):
    field, changed = VALUES[case]
    memory, bad = ReplayMemory(5, Proportional(), seed=0), step(3, **changed)
    with unchanged(memory, BAD, field): memory.add(bad)
    for chunk in ([bad], [step(1), bad], [bad, step(1)]):
        with unchanged(memory, BAD, field): memory.extend(chunk)
    simple = Transition(np.zeros(4, np.float32), 0, 0., np.zeros(4, np.float32), False, False)
    assert memory.nbytes==0 and memory.add(simple)==0           # steps of another kind may still come


@pytest.mark.parametrize('what', [(1, 2, 3), [1, 2], None, 'step', 7, np.zeros(3), dict(obs=1), object(), Other(*step()), SimpleStep(1, 2, 3),
                                  Batch.of(stacked()), Step, [step()]], ids=lambda o: f'{type(o).__name__}')
def test_what_is_no_step_or_another_step_type(memory, what):
    with unchanged(memory, TypeError, 'step'): memory.add(what)
    with unchanged(memory, TypeError, 'step'): memory.extend([step(), what, step()])
    if isinstance(what, Other): return
    fresh = ReplayMemory(4, seed=0)
    if isinstance(what, SimpleStep): return
    with unchanged(fresh, TypeError, 'step'): fresh.add(what)


@pytest.mark.parametrize('what', [None, 7, 'steps', {'obs': 1}, np.zeros(3), object(), [1, 2], [step(), None], (step(), 4), [[step()]], 1.5])
def test_what_is_no_chunk(memory, what):
    for m in (memory, ReplayMemory(4, seed=0)):
        with unchanged(m, TypeError, 'step|chunk'): m.extend(what)


CHUNKS = {
    'rows missing': ('action', dict(action=np.arange(3))),
    'rows too many': ('reward', dict(reward=np.zeros(5, np.float32))),
    'a single value': ('action', dict(action=3)),
    'shape': ('wide', dict(wide=np.zeros((4, 2)))),
    'a flat array': ('wide', dict(wide=np.zeros(12))),
    'dtype': ('obs.image', dict(obs=obs(np.zeros((4, 2, 3), np.float32), (np.zeros((4, 2), np.float32), np.arange(4))))),
    'lossy dtype': ('obs.pose.0', dict(obs=obs(np.zeros((4, 2, 3), np.uint8), (np.zeros((4, 2)), np.arange(4))))),
    'half bad': ('action', dict(action=[0, 1, None, 3])),
    'half lossy': ('action', dict(action=[0, 1, 2, 1.5])),
    'half too large': ('action', dict(action=np.array([0, 1, 2, 2**63], np.uint64))),
    'ragged': ('wide', dict(wide=[[1., 2., 3.]]*3 + [[1.]])),
    'strings': ('action', dict(action=list('abcd'))),
    'None': ('action', dict(action=None)),
    'overflow': ('reward', dict(reward=np.array([0, 1, 1e300, 2]))),
    'nested rows missing': ('obs.pose.1', dict(obs=obs(np.zeros((4, 2, 3), np.uint8), (np.zeros((4, 2), np.float32), np.arange(3))))),
    'nested key missing': ('obs', dict(obs={'image': np.zeros((4, 2, 3), np.uint8)})),
    'first field short': ('obs.image', dict(obs=obs(np.zeros((3, 2, 3), np.uint8), (np.zeros((4, 2), np.float32), np.arange(4))))),
}

@pytest.mark.parametrize('case', CHUNKS)
def test_a_bad_chunk_of_stacked_arrays(memory, case):
    field, changed = CHUNKS[case]
    bad = stacked()._replace(**changed)
    # which of two lengths is the wrong one nobody can know
    field = 'obs|action' if case=='first field short' else field
    with unchanged(memory, BAD, field): memory.extend(bad)
    with unchanged(memory, BAD, field): memory.extend(bad, np.ones(4))
    try: batch = Batch.of(bad)
    except BAD as e: assert any(o in argument_of(e) for o in field.split('|'))
    else:
        with unchanged(memory, BAD, field): memory.extend(batch)


def test_a_replaced_column_of_a_batch_is_checked_like_any_other(memory):
    batch = memory.recent(4)
    with unchanged(memory, BAD, 'wide'): memory.extend(batch.replace(wide=torch.zeros(4, 7)))
    with unchanged(memory, BAD, 'obs.image'): memory.extend(batch.replace(obs=obs(torch.zeros(4, 2, 3), (torch.zeros(4, 2), torch.arange(4)))))
    with unchanged(memory, ValueError, 'nonsense'): batch.replace(nonsense=torch.zeros(4))
    with unchanged(memory, ValueError, 'action'): batch.replace(action=torch.zeros(3))
    with unchanged(memory, ValueError, 'action'): batch.replace(action=torch.tensor(1))


@pytest.mark.parametrize('bad', [-1., float('nan'), float('inf'), -float('inf'), 'high', None, [1., 2.], [], object(), 1j, np.ones((1, 1, 1))],
                         ids=named)
def test_bad_priorities(memory, bad):
    if bad is not None:
        with unchanged(memory, BAD, 'priorit'): memory.add(step(), bad)
    if isinstance(bad, np.ndarray): return
    for given in ([1., bad, 2.], ):
        with unchanged(memory, BAD, 'priorit'): memory.extend([step()]*3, given)
    fresh = ReplayMemory(4, Proportional(), seed=0)
    with unchanged(fresh, BAD, 'priorit'): fresh.extend([step()]*3, [1., bad, 2.])


@pytest.mark.parametrize('td', [float('nan'), float('inf'), -float('inf')])
def test_td_errors_that_are_no_numbers(memory, td):
    for form in (list, np.array, torch.tensor, lambda v: np.array(v, np.float32)):
        with unchanged(memory, ValueError, 'td_errors'): memory.update_priorities([5, 6, 7], form([1., td, 2.]))
    with unchanged(memory, ValueError, 'td_errors'): memory.update_priorities([5, 1, 7], [1., td, 2.])         # at a stale id, too
    with unchanged(memory, ValueError, 'td_errors'): memory.update_priorities([5, 5, 7], [td, 1., 2.])         # and at an overruled one


@pytest.mark.parametrize('td', ['abc', ['a', 'b', 'c'], None, [None]*3, [1., 2.], [1.]*4, 1., [[1., 2., 3.]], [[1.], [2., 3.], []], np.ones((3, 2)),
                                np.ones(3)*1j, object(), torch.tensor(1.)], ids=named)
def test_td_errors_of_a_wrong_kind_or_length(memory, td):
    with unchanged(memory, BAD, 'td_errors'): memory.update_priorities([5, 6, 7], td)
    with unchanged(memory, BAD, 'td_errors'): memory.fetch([5, 6, 7]).update_priorities(td)


@pytest.mark.parametrize('ids', [[14], [-1], [5, 6, 14], [5, -3], [2**62], [-2**63], np.array([2**64 - 1], np.uint64)], ids=named)
def test_ids_never_given_out(memory, ids):
    with unchanged(memory, ValueError, 'ids'): memory.update_priorities(ids, np.ones(len(ids)))
    with unchanged(memory, ValueError, 'ids'): memory.fetch(ids)
    with unchanged(memory, ValueError, 'ids'): memory.episode(ids[-1])


def test_a_schedule_that_leaves_its_range():
    memory = ReplayMemory(4, Proportional(beta=lambda n: 2 - n), seed=0)
    memory.add(step())
    with unchanged(memory, ValueError, 'beta'): memory.sample(2)


def in_memory(**changed): return lambda s: s | dict(memory=s['memory'] | changed)
def without(name): return lambda s: s | dict(memory={k: v for k, v in s['memory'].items() if k!=name})
def in_rows(name, change): return lambda s: s | dict(rows={'0': s['rows']['0'] | {name: change(s['rows']['0'][name])}})
OTHER = ReplayMemory(10)
OTHER.add(SimpleStep(1, 2, 3))
BAD_STATES = dict(none=lambda s: None, empty=lambda s: {}, text=lambda s: 'state', format=lambda s: s | dict(format=2), max_sz=in_memory(max_sz=11),
                  sampler=lambda s: in_memory(sampler=s['memory']['sampler'] | dict(kind='Magic'))(s), no_sampler=without('sampler'),
                  rng=in_memory(rng=[1, 2]), no_rng=without('rng'), no_rows=lambda s: s | dict(rows={}), rows=lambda s: s | dict(rows=3),
                  records=in_rows('records', lambda a: a[:-1]), first_id=in_rows('first_id', lambda n: n - 1), n_added=in_rows('n_added', lambda n: 2**70),
                  since=in_rows('since', lambda n: -n), layout=in_rows('layout', lambda _: OTHER.state_dict()['rows']['0']['layout']))

@pytest.mark.parametrize('case', BAD_STATES)
def test_a_state_that_does_not_fit_changes_nothing(memory, case):
    other = ReplayMemory(10, type(memory.sampler)(), seed=9)
    other.extend([step(k + 50) for k in range(17)])
    with unchanged(memory, (ValueError, TypeError, KeyError), ''): memory.load_state_dict(BAD_STATES[case](other.state_dict()))
    memory.load_state_dict(other.state_dict())
    assert memory.n_added==17 and memory.check_valid()


def flat(i, **changed):
    made = SimpleStep(np.full(2, i, np.float32), i, np.full(2, i, np.float32), False, False, float(i), 0., i % 3, 0, i, 0)
    return made._replace(**changed)

FLAT = {
    'rows missing': dict(action=np.arange(3)), 'rows too many': dict(action=np.arange(5)), 'shape': dict(state=np.zeros((4, 3), np.float32)),
    'fewer dimensions': dict(state=np.zeros(8, np.float32)), 'dtype': dict(state=np.zeros((4, 2))), 'lossy': dict(action=np.full(4, 2**63, np.uint64)),
    'None': dict(action=None), 'a number': dict(reward=1.), 'strings': dict(terminated=np.array(list('abcd'))), 'objects': dict(action=np.array([None]*4)),
    'overflow': dict(reward=np.full(4, 1e300)), 'ragged': dict(state=[[1., 2.]]*3 + [[1.]]), 'half bad': dict(truncated=np.array([0, 1, 2, 0])),
    'streams missing': dict(env_id=np.arange(70, 73)), 'streams as floats': dict(env_id=np.arange(70, 74) + .5), 'streams as text': dict(env_id=np.array(list('abcd'))),
    'streams in two dimensions': dict(env_id=np.arange(70, 74)[:, None]), 'first field short': dict(state=np.zeros((3, 2), np.float32)),
    'first field a number': dict(state=3.), 'next field nothing': dict(next_state=np.zeros((4, 0), np.float32)), 'Python list of dicts': dict(state=[{}]*4),
}

@pytest.mark.parametrize('case', FLAT)
def test_a_bad_chunk_from_streams_never_seen(case):
    "Not even the names of its streams stay behind; what went in before, in the quickest way, changes nothing about it"
    memory = ReplayMemory(10, Proportional(), seed=0)
    columns = SimpleStep(*(np.stack([np.asarray(v) for v in vs]) for vs in zip(*[flat(i) for i in range(50, 54)])))
    good = columns._replace(reward=columns.reward.astype(np.float32), total_reward=columns.total_reward.astype(np.float32))
    memory.extend([flat(i) for i in range(4)])
    new = good._replace(env_id=np.arange(70, 74))
    for _ in range(2):
        [field] = FLAT[case]
        with unchanged(memory, BAD, 'state|action' if 'first field' in case else field): memory.extend(new._replace(**FLAT[case]))
        assert len(memory.extend(good))==4 and memory.check_valid()          # the good one still goes in
        assert memory.recent(4).state[:, 0].tolist()==[50., 51., 52., 53.]
    with unchanged(memory, BAD, field): memory.extend([flat(1, env_id=80), flat(2, env_id=81, **{field: 'nonsense'})])
    with unchanged(memory, BAD, field): memory.add(flat(2, **dict(env_id=82) | {field: 'nonsense'}))
    assert memory.extend(SimpleStep(*(o[:0] for o in good))).tolist()==[] and memory.check_valid()
