"""What was once silently wrong, each through the public API."""
import pickle
import tracemalloc

import numpy as np
import pytest
import torch

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.steps import SimpleStep, Transition
from twins import Only
from refusals import named, refused
from words import words

Z = np.zeros(4, np.float32)

def step(i, **changed): return Transition(Z + i, i % 2, float(i), Z + i + 1, False, False)._replace(**changed)
def stacked(n): return Transition(*map(np.array, zip(*map(step, range(n)))))


# --- assigning a column ----------------------------------------------------------------------------------------------
def drawn():
    memory = ReplayMemory(32, Proportional(), seed=0)
    memory.extend(stacked(32))
    return memory.sample(8)

@pytest.mark.parametrize('make', [drawn, lambda: Batch.of(stacked(8)), lambda: Batch.of_steps([step(i) for i in range(8)]),
                                  lambda: pickle.loads(pickle.dumps(drawn()))], ids=['drawn', 'chunk', 'list', 'pickled'])
@pytest.mark.parametrize('value', [torch.full((8,), -1.), np.full(8, -1.), [-1]*8], ids=['tensor', 'float64', 'list'])
def test_an_assigned_column_counts_everywhere(make, value):
    batch = make()
    before = batch.state.clone()
    batch.reward = value
    other, memory = ReplayMemory(8), ReplayMemory(8)
    other.extend(batch)
    memory.extend(list(batch))
    views = dict(column=batch.reward, item=batch['reward'], numpy=batch.numpy().reward, rows=[o.reward for o in batch], row=[batch[3].reward]*8,
                 tuple=batch.astuple().reward, extend=other.recent(8).reward, rows_in=memory.recent(8).reward, pickle=pickle.loads(pickle.dumps(batch)).reward,
                 slice=batch[:].reward, to=batch.to('meta').reward.shape and batch.reward, replaced=batch.replace(action=batch.action).reward)
    for name, column in views.items(): assert np.asarray(column, np.float32).tolist()==[-1]*8, name
    assert torch.equal(batch.state, before) and torch.equal(other.recent(8).state, before)

def test_what_cannot_be_assigned():
    batch = drawn()
    for bad, says in ((torch.zeros(7), 'reward'), (1., 'reward')):
        with refused(says): batch.reward = bad
    with refused('rewards', AttributeError): batch.rewards = torch.zeros(8)
    with pytest.raises(AttributeError, match=words('no such field', name='rewards')): batch.rewards

def test_a_pickle_holds_what_torch_has_moved():
    batch = drawn()
    batch.state.share_memory_()
    batch.state.fill_(5)
    batch.reward.share_memory_()
    batch.reward.fill_(6)
    for again in (pickle.loads(pickle.dumps(batch)), batch.replace(action=batch.action)):
        assert again.state.unique().tolist()==[5] and again.reward.unique().tolist()==[6]
    assert batch.to('meta').state.device.type=='meta'


# --- one rule for single steps, lists and arrays -------------------------------------------------------------------
class Mixed:
    leaves = dict(f8=np.float64(.5), f4=.5, i8=1, u1=np.uint8(1), b=True, c8=np.complex64(1), f2=np.float16(1), bf16=torch.tensor(1., dtype=torch.bfloat16))
    values = [0, 1, True, np.bool_(True), .5, 2**53 + 1, 2**63, -1, 300, 1e39, float('nan'), float('-inf'), np.float16('-inf'), np.float32(.1), np.float64(.1), np.uint64(2**63),
              np.int8(-1), np.array(3), np.array(.25), np.ma.masked_array(1., True), 1j, np.complex128(.1), 'x', None, torch.tensor(2), torch.tensor(.5, requires_grad=True),
              torch.tensor(1.5, dtype=torch.bfloat16), np.array(1, '>i8'), [1], np.longdouble(1)]

@pytest.mark.parametrize('kind', Mixed.leaves)
def test_a_list_takes_what_add_takes_and_nothing_else(kind):
    "Mixed with values of every other kind: the list was once cast as a whole"
    from fastrl_replay.steps import derived_type
    Box = derived_type('Box', ('x',))
    def attempt(store):
        memory = ReplayMemory(4, step=Box(Mixed.leaves[kind]))
        try: store(memory)
        except (TypeError, ValueError) as e: return type(e), named(e), len(memory)
        return memory.recent(1).numpy().x[0].tobytes()
    for v in Mixed.values:
        alone = attempt(lambda m, v=v: m.add(Box(v)))
        assert attempt(lambda m, v=v: m.extend([Box(v)]))==alone, repr(v)
        for beside in (Mixed.leaves[kind], .5, 1, np.float64(.5)):
            if isinstance(attempt(lambda m, b=beside: m.add(Box(b))), tuple): continue
            assert attempt(lambda m, v=v, b=beside: m.extend([Box(b), Box(v)]))==alone, (repr(v), repr(beside))


# --- streams -----------------------------------------------------------------------------------------------------------
def episode(n): return [step(i, terminated=i==n - 1) for i in range(n)]

def test_what_decides_whose_row_it_is():
    "env_id, then the argument, then the batch, then the form"
    def simple(i): return SimpleStep(Z, 0, Z, env_id=i)
    memory = ReplayMemory(20)
    memory.extend([simple(0), simple(1), simple(0)])
    assert memory.episode(0).ids.tolist()==[0, 2]
    memory.extend([simple(7), simple(8), simple(7)], streams=[7, 8, 7])
    assert memory.next([3, 4]).tolist()==[5, -1]
    with refused('streams', expected='8 for row 1, its env_id', got='7'): memory.extend([simple(7), simple(8)], streams='one')
    plain, chunk = ReplayMemory(20), Batch.of(stacked(4), streams=[5, 5, 6, 6])
    plain.extend(chunk)
    assert plain.next([0, 1, 2, 3]).tolist()==[1, -1, 3, -1]
    plain.extend(chunk, streams=[1, 2, 1, 2])
    assert plain.next([4, 5, 6, 7]).tolist()==[6, 7, -1, -1]


# --- in time and room that don't grow with the memory ----------------------------------------------------------------
@pytest.mark.parametrize('streams', ['two', [0, 1], [0., 1., 2., 3.], np.zeros((4, 1), int), object()])
def test_streams_that_are_none(streams):
    memory = ReplayMemory(20)
    with refused('streams', (TypeError, ValueError)): memory.extend(stacked(4), streams=streams)
    assert len(memory)==0


def test_a_slot_is_read_without_looking_at_the_others():
    memory = ReplayMemory(300_000)
    memory.extend(Only(np.zeros((300_000, 3), np.int32)))
    memory[5]
    tracemalloc.start()
    memory[5], memory[-1], next(iter(memory))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000
    with pytest.raises(IndexError): memory[300_000]

def test_buffers_of_held_batches_are_not_scanned_forever_and_come_back():
    memory = ReplayMemory(64, seed=0)
    memory.extend(stacked(64))
    held = [memory.sample(16) for _ in range(100)]
    places = {b.state.data_ptr() for b in held}
    assert len(places)==100
    kept = [column.clone() for b in held for column in b.astuple()]
    for _ in range(50): memory.sample(16), memory.fetch([1, 2]), memory.recent(9)
    assert all(torch.equal(a, b) for a, b in zip(kept, (c for b in held for c in b.astuple())))
    del held
    again = [memory.sample(16) for _ in range(60)]
    assert len({b.state.data_ptr() for b in again} & places) > 50, 'what was held is never used again'
    sizes = {memory.fetch(np.arange(n % 9 + 1)).state.data_ptr() for n in range(200)}
    assert len(sizes) < 30, 'nine sizes in turn use their buffers again'
