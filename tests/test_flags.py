"`terminated` and `truncated` are bool, and `next_state` is like `state`: both by name, however a step arrives"
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from twins import named

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.steps import Layout, SimpleStep, Transition
from refusals import refused
from words import WORDS, words

x = np.zeros(4, np.float32)
TRUE = [True, 1, 1., np.bool_(True), np.int64(1), np.uint8(1), np.float32(1), np.float64(1), np.float16(1), np.uint64(1), 1 + 0j, np.array(True),
        np.array(1), np.array(1., np.float32), torch.tensor(True), torch.tensor(1), torch.tensor(1., dtype=torch.bfloat16), torch.tensor(1., requires_grad=True)]
FALSE = [False, 0, 0., -0., np.bool_(False), np.int8(0), np.float64(-0.), np.array(0), torch.tensor(0), torch.tensor(0., dtype=torch.bfloat16), 0j]
WRONG = [2, -1, .5, float('nan'), float('inf'), 1e-30, np.uint8(255), np.float32(.5), np.int64(2), np.array(2), np.float64('nan'), torch.tensor(2), torch.tensor(.5, dtype=torch.bfloat16),
         1j, '1', None, object(), [1], [0], [], np.zeros(1, bool), np.zeros(8, bool), np.zeros((1, 1)), torch.zeros(1), {'a': 0}, (0, 1), (), 2**70]


def step(**fields): return Transition(x, 0, 1., x, False, False)._replace(**fields)
def simple(**fields): return SimpleStep(x, 0, x)._replace(**fields)
def stacked(n=5, **columns): return Transition(np.zeros((n, 4), np.float32), np.arange(n), np.ones(n), np.zeros((n, 4), np.float32), np.zeros(n, bool), np.zeros(n, bool))._replace(**columns)
FORMS = dict(add=lambda memory, o: memory.add(o), list=lambda memory, o: memory.extend([o]), second=lambda memory, o: memory.extend([type(o)(x, 0, *o[2:]), o][1:]))


def is_flag(batch, values):
    for f in ('terminated', 'truncated'): assert batch[f].dtype is torch.bool
    assert batch.terminated.tolist() == values and (~batch.terminated).tolist() == [not v for v in values]


@pytest.mark.parametrize('first', [True, False])
@pytest.mark.parametrize('make', [step, simple], ids=['Transition', 'SimpleStep'])
@pytest.mark.parametrize('form', FORMS)
def test_zeros_and_ones_of_any_type_are_flags(form, make, first):
    "Of an int64 flag `~` is −1 or −2, of a uint8 one 255 or 254: no target was ever right"
    for field in ('terminated', 'truncated'):
        memory, values = ReplayMemory(100), []
        if not first: memory.add(make())
        for value, meant in [(v, True) for v in TRUE] + [(v, False) for v in FALSE]:
            alone = ReplayMemory(5)
            for o in (alone, memory): FORMS[form](o, make(**{field: value}))
            assert alone.recent(1)[field].dtype is torch.bool and alone.recent(1)[field].tolist() == [meant]
            values.append(meant)
        rows = memory.recent(len(values))
        assert rows[field].tolist() == values and memory.column(field).dtype == bool and memory.check_valid()
        is_flag(rows, rows.terminated.tolist())


@pytest.mark.parametrize('options', [{}, dict(dtype='int'), dict(path='there')], ids=['first step', 'dtype= of int64', 'path='])
@pytest.mark.parametrize('value', WRONG, ids=named)
def test_all_else_is_refused_by_name(value, options, tmp_path):
    flag = options.get('dtype')
    dtype = np.dtype([('state', 'f4', 4), ('action', int), ('reward', float), ('next_state', 'f4', 4), ('terminated', flag), ('truncated', flag)]) if flag else None
    made = ReplayMemory(50, **options | dict(path=tmp_path/'m' if 'path' in options else None, dtype=dtype))
    for field in ('terminated', 'truncated'):
        for _ in range(2):
            n = len(made)
            for form in FORMS.values():
                with refused(field, (ValueError, TypeError)): form(made, step(**{field: value}))
            if n:
                with refused(field, (ValueError, TypeError)) as caught: made.extend([step(), step(**{field: value})])
                assert caught.match(WORDS['the second of two'])
            assert made.n_added == n
            for flags in ((True, 0), (1, False)): made.add(step(terminated=flags[0], truncated=flags[1]))
            is_flag(made.recent(2), [True, True])
        assert made.check_valid()
    made.close()


@pytest.mark.parametrize('first', [True, False])
@pytest.mark.parametrize('form', ['stacked', 'batch', 'dict', 'assigned'])
def test_chunks_of_flags_of_any_type(form, first):
    values = [False, True, True, False, True]
    kinds = [np.array(values, dtype) for dtype in (bool, np.int64, np.uint8, np.float32, np.float64, np.float16, np.uint64, complex)]
    kinds += [torch.tensor(values).to(o) for o in (torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16)] + [values, [int(v) for v in values], [float(v) for v in values]]
    for kind in kinds:
        memory = ReplayMemory(20)
        if not first: memory.add(step())
        memory.extend(dressed(form, kind))
        is_flag(memory.recent(5), values)
        assert memory.check_valid()
    one, many = np.zeros((5, 1), bool), np.zeros((5, 2), int)
    for kind in (np.array([0, 1, 2, 0, 1]), np.array([0, .5, 0, 0, 0]), np.full(5, np.nan), [0, 0, 0, 0, -1], torch.full((5,), 3), one, many, np.zeros(4, bool), ['a']*5, [None]*5):
        memory = ReplayMemory(20)
        if not first: memory.add(step())
        with refused('terminated', (ValueError, TypeError)): memory.extend(dressed(form, kind))
        assert memory.n_added == (not first)
        memory.extend(stacked())


def dressed(form, flags):
    if form == 'batch': return Batch.of(stacked(terminated=flags))
    if form == 'dict': return stacked(terminated=flags)._asdict()
    if form == 'stacked': return stacked(terminated=flags)
    batch = Batch.of(stacked())
    if not isinstance(flags, torch.Tensor):
        flags = np.asarray(flags)
        if flags.dtype.kind not in 'biufc': flags = np.full(5, .5)        # torch has neither strings nor objects
    batch.terminated = flags
    return batch


def test_a_step_of_stacked_environments_is_told_to_be_a_chunk():
    many = SimpleStep(np.zeros((8, 4), np.float32), np.zeros(8, int), np.zeros((8, 4), np.float32), np.zeros(8, bool), np.zeros(8, bool), np.zeros(8), env_id=np.arange(8))
    memory = ReplayMemory(100)
    with refused('terminated', got='(8,)'): memory.add(many)
    assert memory.layout is None
    memory.add(simple())
    with refused('state', got='(8, 4)'): memory.add(many)
    with refused('action', got='(8,)'): memory.add(simple(action=np.zeros(8, int)))
    assert len(memory) == 1


# --- memories of earlier versions -------------------------------------------------------------------------------------
def earlier(flags, max_sz=20, **options):
    "A memory as an earlier version made it: flags of the first step's type"
    memory = ReplayMemory(max_sz, seed=0, **options)
    memory._parts.open(Layout.as_is(step(**flags)))
    for k in range(25): memory.add(step(action=k, **{f: type(v)(k % 2) for f, v in flags.items()}))
    return memory


EARLIER = dict(ints=dict(terminated=0, truncated=0), bytes=dict(terminated=np.uint8(0), truncated=np.uint8(0)), floats=dict(truncated=np.float64(0)))

@pytest.mark.parametrize('known', [None, step(), step(terminated=1)], ids=['unknown', 'bool', 'int'])
@pytest.mark.parametrize('how,flags', [*zip(['folder', 'state', 'path'], EARLIER.values())])
def test_flags_that_were_saved_as_numbers_go_on_as_they_were(how, known, flags, tmp_path):
    memory = earlier(flags, path=tmp_path/'m' if how == 'path' else None)
    before = memory.fetch(np.arange(5, 25))
    if how == 'folder':
        memory.save(tmp_path/'s')
        memory = ReplayMemory.load(tmp_path/'s', step=known)
    elif how == 'state':
        state, memory = memory.state_dict(), ReplayMemory(20, step=known)
        memory.load_state_dict(state)
    else:
        memory.close()
        memory = ReplayMemory(20, path=tmp_path/'m', step=known)
    for round in range(2):
        rows = memory.fetch(np.arange(memory.first_id, 25))
        for f in Transition._fields: assert rows[f].dtype is before[f].dtype and (rows[f] == before[f][memory.first_id - 5:]).all()
        assert memory.sample(8, fields=['truncated']).truncated.dtype is before.truncated.dtype
        if round: break
        for k, value in enumerate((True, 0, np.bool_(True), 1)): memory.add(step(action=k, **dict.fromkeys(flags, value)))
        memory.extend([step(), step(terminated=1)])
        memory.extend(stacked(3))
        assert memory.recent(9).truncated[:4].tolist() == [True, False, True, True] and memory.check_valid()
    made = ReplayMemory(50)
    made.extend(memory.recent(8))
    is_flag(made.recent(8), [bool(v) for v in memory.recent(8).terminated])
    memory.close()


# --- next_state is like state -----------------------------------------------------------------------------------------
class Own(NamedTuple):
    terminated: Any
    next_state: Any
    state: Any

y = {'pos': x, 'goal': (x[:1], 3)}
UNLIKE = {
    'in the order of a Transition': SimpleStep(x, 0, 1., x, False, False),
    'in the order of a SimpleStep': Transition(x, 0, x, False, False, 1.),
    'so, with dicts': SimpleStep(y, 0, 1., y, False, False),
    'shape': step(next_state=x[:3]), 'scalar': step(next_state=0.), 'one more axis': step(next_state=x[None]),
    'dtype': step(next_state=np.zeros(4)), 'int for float': step(state=0., next_state=0), 'bits': step(next_state=torch.zeros(4, dtype=torch.bfloat16)),
    'other keys': step(state={'a': x}, next_state={'b': x}), 'one more key': step(state={'a': x}, next_state={'a': x, 'b': x}), 'no dict': step(state={'a': x}),
    'tuple for dict': step(state={0: x, 1: x}, next_state=(x, x)), 'inside': step(state=y, next_state={'pos': x, 'goal': (x[:1], 3.)}),
    'before wrong flags': step(next_state=x[:3], terminated=x), 'before a flag of .5': SimpleStep(x, 0, 1., .5, 2), 'own type': Own(x, 1, x)}


@pytest.mark.parametrize('wrong', UNLIKE.values(), ids=UNLIKE)
def test_a_next_state_unlike_the_state_is_refused(wrong):
    for store in (ReplayMemory.add, lambda memory, o: memory.extend([o])):
        memory = ReplayMemory(10)
        with pytest.raises(ValueError, match=words('the order of fields', name=type(wrong).__name__)): store(memory, wrong)
        assert memory.layout is None and len(memory) == 0
        memory.add(step())
    with refused('next_state'): ReplayMemory(10, step=wrong)


@pytest.mark.parametrize('dtype', [np.float64, np.uint8])
def test_chunks_with_unlike_states_are_refused(dtype):
    wrong = stacked(next_state=np.zeros((5, 4), dtype))
    batch = Batch.of(stacked())
    batch.next_state = wrong.next_state
    assert batch.next_state.dtype is torch.from_numpy(wrong.next_state).dtype               # a learner may do as it likes
    fields = [('state', 'f4', 4), ('action', int), ('reward', 'f4'), ('next_state', dtype, 4), ('terminated', bool), ('truncated', bool)]
    for store in (lambda: ReplayMemory(10).extend(wrong), lambda: ReplayMemory(10).extend(batch), lambda: Batch.of(wrong),
                  lambda: ReplayMemory(10, dtype=np.dtype(fields)).add(step()), lambda: ReplayMemory(10, dtype=np.dtype(fields)).extend(batch)):
        with refused('next_state', expected='float32[4], as in state', got=f'{np.dtype(dtype)}[4]'): store()


def test_states_that_are_alike_are_stored():
    "What counts is what is stored: Python floats are float32, and keys have no order"
    good = [step(state=[0., 1.], next_state=np.zeros(2, np.float32)), step(state=0., next_state=np.float32(1)), step(state=3, next_state=np.int64(4)),
            step(state=torch.zeros(3), next_state=np.zeros(3, np.float32)), step(state={'a': 1, 'b': x}, next_state={'b': x, 'a': 2}),
            step(state=np.zeros(4, '>f4')), step(state=(x, 1), next_state=(x, 2)), Own(False, 1, 2)]
    for o in good:
        memory = ReplayMemory(10)
        memory.add(o)
        memory.extend([o, o])
        assert len(memory) == 3 and memory.sample(2, ['next_state']).next_state is not None


def test_a_memory_saved_with_unlike_states_loads(tmp_path):
    odd = step(next_state=np.zeros(2, np.uint8))
    memory = ReplayMemory(10, path=tmp_path/'m')
    memory._parts.open(Layout.as_is(odd))
    for k in range(15): memory.add(odd._replace(action=k))
    state = memory.state_dict()
    memory.save(tmp_path/'s')
    memory.close()
    other = ReplayMemory(10)
    other.load_state_dict(state)
    for again in (ReplayMemory.load(tmp_path/'s'), ReplayMemory.open(tmp_path/'m'), other):
        again.add(odd)
        assert again.recent(3).action.tolist() == [13, 14, 0] and again.sample(2, ['next_state']).next_state.shape == (2, 2) and again.check_valid()
