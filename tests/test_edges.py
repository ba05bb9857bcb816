"Slots that are empty, values that contradict each other, and names that are no fields"
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fastrl_replay.all import MixedMemory, Proportional, ReplayMemory, SimpleStep, Transition
from fastrl_replay.batch import Batch
from fastrl_replay.ray import RayMemory
from refusals import refused
from words import words


def step(k): return Transition(np.float32([k, k]), k, float(k), np.float32([k + 1, k + 1]), k % 5==4, False)


# ---- slots

@pytest.mark.parametrize('max_sz', [1, 7, 20])
@pytest.mark.parametrize('place', ['ram', 'disk'])
def test_a_slot_is_a_slot_beside_a_list_of_slots(max_sz, place, tmp_path):
    "A list of what is in each slot is the twin, through rounds and clearings"
    rng, memory, n = np.random.default_rng(max_sz), ReplayMemory(max_sz, path=tmp_path/'there' if place=='disk' else None), 0
    twin: list = []
    for _ in range(200):
        if n and rng.random() < .15:
            memory.clear()
            twin = [None]*len(twin)
        else:
            m = int(rng.integers(1, 5))
            memory.extend([step(k) for k in range(n, n + m)])
            for k in range(n, n + m):
                if k < max_sz: twin.append(None)
                twin[k % max_sz] = k
            n += m
        filled = [k for k in twin if k is not None]
        assert [o.action for o in memory]==filled and memory[:].action.tolist()==filled and len(memory)==len(filled)
        a, b, c = (int(o) for o in rng.integers(-max_sz - 2, max_sz + 2, 3))
        for part in (slice(a, b), slice(a, None, 2), slice(None, None, -1), slice(a, b, c or 1)):
            assert memory[part].action.tolist()==[k for k in twin[part] if k is not None] and memory[part].ids.tolist()==memory[part].action.tolist()
        for slot in range(-len(twin) - 1, len(twin) + 1):
            there = None if not -len(twin) <= slot < len(twin) else twin[slot]
            if there is not None: assert memory[slot].action==there
            else:
                with pytest.raises(IndexError, match=words('no such slot', slot=slot)): memory[slot]
    memory.close()


# ---- streams that contradict env_id

def simple(k, env=0): return SimpleStep(np.float32([k]), 0, np.float32([k + 1]), env_id=env)
def stacked(envs): return SimpleStep(*map(np.array, zip(*(simple(k, e) for k, e in enumerate(envs)))))

def memories():
    yield ReplayMemory(50)
    yield MixedMemory([ReplayMemory(50), ReplayMemory(50)])
    shards = RayMemory(0, 50)
    yield shards
    shards.close()


def test_streams_that_contradict_env_id_are_refused_by_name():
    for memory in memories():
        for chunk in (stacked([0, 0, 1, 1]), [*Batch.of(stacked([0, 0, 1, 1]))], Batch.of(stacked([0, 0, 1, 1]))):
            for streams, k, env_id, got in (([0, 1, 0, 1], 1, 0, 1), ('one', 2, 1, 0), ([7, 7, 8, 8], 0, 0, 7), (np.zeros(4, int), 2, 1, 0)):
                with refused('streams', expected=f'{env_id} for row {k}, its env_id', got=str(got)): memory.extend(chunk, streams=streams)
        assert len(memory)==0
        for chunk, streams in ((stacked([0, 0, 1, 1]), [0, 0, 1, 1]), (stacked([3, 3]), 'one'), (stacked([3, 4]), torch.tensor([3, 4])), (stacked([1]), None)):
            assert len(memory.extend(chunk, streams=streams))==len(chunk.env_id)
        assert len(memory)==9


# ---- corrections

class Seen(NamedTuple):
    state: Any
    value: Any
    half: Any
    count: Any
    flag: Any
    brain: Any


def test_an_id_with_two_values_is_refused_and_nothing_changes():
    memory = ReplayMemory(20, Proportional())
    memory.extend([step(k) for k in range(15)])
    before = memory.column('reward').copy()
    for values in ([1., 2., 3.], np.float32([1, 2, 3]), [1., 2., float('nan')]):
        with refused('ids', expected='one value for each', got=f'reward 1.0 and {values[2]} for 4'): memory.correct([4, 3, 4], 'reward', values)
    with refused('ids', expected='one value for each', got='terminated True and False for 3'): memory.correct([3, 4, 3], 'terminated', [True, True, False])
    assert np.array_equal(memory.column('reward'), before)
    memory.correct([4, 3, 4], 'reward', [1., 2., 1.])
    memory.correct([5, 5], 'reward', 9.)
    memory.correct([6, 7, 6], 'reward', [float('nan'), 3., float('nan')])
    assert memory.fetch([3, 4, 5, 7]).reward.tolist()==[2., 1., 9., 3.] and np.isnan(memory[6].reward)


def test_a_correction_takes_what_adding_takes():
    first = Seen(np.zeros(2), .5, np.float16(1), 3, True, torch.tensor(1., dtype=torch.bfloat16))
    values: list = [0., .1, .5, 1, 5, 2**64, 1e300, True, False, None, 'x', float('inf'), np.float32(2), np.float64(.1), np.float16(2), np.int32(4), np.bool_(1),
                    torch.tensor(3.), torch.tensor(2., dtype=torch.bfloat16), torch.tensor(.1, dtype=torch.float64), np.zeros(2), [1., 2.]]
    n_taken, others = 0, [*Seen._fields[1:]]
    for field in others:
        for v in values[:-2]:
            twin = ReplayMemory(9, step=first)
            try: twin.extend([first._replace(**{field: v})]*2)
            except (TypeError, ValueError): wanted = None
            else: wanted, n_taken = twin.recent(2)[field], n_taken + 1
            for how in (v, [v, v]):
                memory = ReplayMemory(9, step=first)
                memory.extend([first]*4)
                before = memory.fetch(range(4)).columns(*others)
                if wanted is None:
                    with refused(field, (TypeError, ValueError)): memory.correct([1, 3], field, how)
                else:
                    memory.correct([1, 3], field, how)
                    assert torch.equal(memory.fetch([1, 3])[field], wanted), (field, v)
                for name, was, now in zip(others, before, memory.fetch(range(4)).columns(*others)):
                    assert torch.equal(was[[0, 2]] if name==field and wanted is not None else was, now[[0, 2]] if name==field and wanted is not None else now)
    assert n_taken > 20
    for wrong in ([1., 2., 3.], np.zeros(3), np.zeros((2, 1)), [[1.], [2.]]):
        with refused('value', (TypeError, ValueError)): memory.correct([1, 3], 'value', wrong)
