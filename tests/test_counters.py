"Counters that no memory can have reached are refused by name, wherever they come from"
import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.saving import CheckpointError
from fastrl_replay.steps import Transition
from refusals import refused
from words import words

x = np.zeros(4, np.float32)


def filled(max_sz, **options):
    memory = ReplayMemory(max_sz, seed=0, **options)
    for k in range(25): memory.add(Transition(x, k, 1., x, False, False))
    return memory


def shifted(state, by):
    for piece in state['rows'].values(): piece.update({k: piece[k] + by for k in ('first_id', 'n_added', 'since')})
    return state


def left(max_sz, path):
    "A folder as a kill after a flush leaves it"
    memory = filled(max_sz, path=path)
    memory.flush()
    del memory

def shift_on_disk(path, by):
    counts = np.memmap(path/'counts.map', np.int64, 'r+')
    counts[:3] += by
    counts.flush()


@pytest.mark.parametrize('max_sz', [10, 13])
def test_ids_are_exact_as_far_as_counters_are_accepted(max_sz, tmp_path):
    by = (2**60 - 100)//max_sz*max_sz
    twin, memory = filled(max_sz), ReplayMemory(max_sz, seed=0)
    memory.load_state_dict(shifted(filled(max_sz).state_dict(), by))
    left(max_sz, tmp_path/'m')
    shift_on_disk(tmp_path/'m', by)
    there = ReplayMemory.open(tmp_path/'m')
    for _ in range(20):
        step = Transition(x, twin.n_added, 1., x, False, False)
        assert twin.add(step) == memory.add(step) - by == there.add(step) - by
        batch = memory.sample(7)
        same = there.fetch(batch.ids)
        assert (batch.ids - by == twin.sample(7).ids).all() and (batch.ids % max_sz == batch.idxs).all()
        for o in (batch, same): assert (o.action == o.ids - by).all()
        ids = np.arange(memory.first_id, memory.n_added)
        for o in (memory, there): assert (o.next(ids[:-1]) == ids[1:]).all() and o.check_valid()


@pytest.mark.parametrize('n', [2**60, 2**61, 2**62, 2**63 - 1])
def test_counters_beyond_that_are_refused(n, tmp_path):
    good, state = filled(10), shifted(filled(10).state_dict(), n - 25)
    before = good.recent(8)
    with refused('n_added'): good.load_state_dict(state)
    assert good.n_added == 25 and good.check_valid() and (good.fetch(before.ids).action == before.action).all()

    left(10, tmp_path/'m')
    shift_on_disk(tmp_path/'m', n - 25)
    for opened in (ReplayMemory.open, ReplayMemory.peek, lambda path: ReplayMemory(10, path=path)):
        with pytest.raises(CheckpointError, match=words('damaged counters', n=n)): opened(tmp_path/'m')
    shift_on_disk(tmp_path/'m', 25 - n)
    with ReplayMemory.open(tmp_path/'m') as there: assert there.n_added == 25 and there.check_valid()
