"A memory that another process writes can be looked at: the same numbers as its own, where nobody writes; whole rows, where somebody does"
import matplotlib.pyplot as plt
import numpy as np
import pytest

from fastrl_replay.all import Proportional, ReplayMemory, Sequence, SimpleStep, Transition
from fastrl_replay.memory.peeked import Overwritten, Snapshot, looked_at
from words import WORDS


def seen(k):
    picture = np.zeros((3, 16, 16), np.uint8)
    picture[k % 3, k % 16] = 255
    return dict(camera=picture, joints=np.full(4, k, np.float32))

def plain(k, stream=0): return SimpleStep(np.full(4, k, np.float32), k % 2, np.full(4, k + 1, np.float32), k % 10==9, k % 30==29, float(k % 7), step_n=k % 10,
                                          episode_n=k//10, env_id=stream)
def nested(k): return Transition(seen(k), k % 4, float(k % 10==9), seen(k + 1), k % 10==9, False)


def pair(folder, make, n, max_sz=100, **kw):
    memory = ReplayMemory(max_sz, path=folder/'m', seed=0, **kw)
    for k in range(n): memory.add(make(k))
    return memory, ReplayMemory.peek(folder/'m')


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close('all')


ROWS = '''n max_sz fill n_added n_dropped bytes_each n_terminated n_truncated reward_min reward_mean reward_max reward_zero_share n_episodes return_mean
          n_looked_at not_finite n_read'''.split()

@pytest.mark.parametrize('step', [plain, nested])
@pytest.mark.parametrize('n', [30, 100, 250])
def test_the_numbers_of_rows_are_the_memorys_own(step, n, tmp_path):
    memory, view = pair(tmp_path, step, n, sampler=Proportional())
    memory.drop(np.arange(memory.first_id, memory.first_id + 5))
    memory.update_priorities([memory.n_added - 1], [9.])
    memory.flush()
    own, found = memory.health(), view.health()
    for k in ROWS: assert found[k]==own[k] or found[k]!=found[k] and own[k]!=own[k], k
    p = view.priorities(np.arange(memory.first_id, memory.n_added))
    assert found['priority_max']==p.max()==pytest.approx(9) and found['priority_median']==np.median(p)
    assert np.isnan(found['n_drawn']) and [o for o in own['warnings'] if 'rows' in o]==[o for o in found['warnings'] if 'rows' in o]
    assert type(found).__name__=='Health' and 'warning' in repr(found)
    view.close()
    memory.close()


@pytest.mark.parametrize('step', [plain, nested])
def test_episodes_and_steps_before_are_those_of_the_memory(step, tmp_path):
    memory, view = pair(tmp_path, step, 137)
    snapshot, ids = Snapshot(view), np.arange(37, 137)
    assert snapshot.previous(ids).tolist()==memory.previous(ids).tolist()
    for id in ids: assert snapshot.episode(id).ids.tolist()==memory.episode(id).ids.tolist()
    assert [o.name for o in view.fetch(ids, ['reward']).layout.leaves]==['reward']
    memory.close()


def test_an_empty_memory_and_sequences_can_be_looked_at(tmp_path):
    memory, view = pair(tmp_path, plain, 0, step=plain(0))
    assert view.health()['warnings']==['the memory is empty'] and view.show()
    memory.close()
    memory, view = pair(tmp_path/'s', plain, 60, sequence=Sequence(4), sampler=Proportional())
    assert view.health()['n']==60 and view.show()
    memory.close()


def test_a_look_begins_again_where_rows_were_overwritten(tmp_path):
    "With fewer of the oldest rows each time; a memory that is being filled leaves none out"
    memory, view = pair(tmp_path, plain, 100)
    spares = []
    def look(snapshot, new=6):
        spares.append(len(snapshot))
        first = snapshot.first_id
        if len(spares) < 3:
            for _ in range(new): memory.add(plain(memory.n_added))
        return snapshot.fetch([first, snapshot.n_added - 1]).ids.tolist()
    assert looked_at(view, look)==[13, 105] and spares==[100, 93]
    with pytest.raises(Overwritten): Snapshot(view).fetch([3])
    memory.close()
    memory, view = pair(tmp_path/'filled', plain, 20)
    def filled(snapshot):
        for _ in range(30): memory.add(plain(memory.n_added))
        return len(snapshot.fetch(np.arange(20)))
    assert looked_at(view, filled)==20
    memory.close()


def test_what_is_overwritten_too_fast_is_refused_by_name(tmp_path):
    memory, view = pair(tmp_path, plain, 100)
    def look(snapshot):
        for _ in range(100): memory.add(plain(memory.n_added))
        return snapshot.fetch([snapshot.first_id])
    with pytest.raises(RuntimeError, match=WORDS['overwritten too fast']): looked_at(view, look)
    memory.close()
