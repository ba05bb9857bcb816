"Strings in a step: stored as numbers, each distinct one once, and read as they were"
import copy
import pickle
import shutil
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fastrl_replay.all import MixedMemory, NStep, Proportional, ReplayMemory
from fastrl_replay.batch import Batch
from fastrl_replay.pipes.actors import Actors
from fastrl_replay.pipes.replay import ExperienceReplay
from fastrl_replay.ray import RayMemory
from fastrl_replay.saving import CheckpointError
from fastrl_replay.storage.choice import strings_in
from refusals import refused
from words import words


class Told(NamedTuple):
    state: Any
    action: Any
    reward: Any
    next_state: Any
    terminated: Any
    truncated: Any
    task: Any = 'none'
    where: Any = ''

WORDS = ['pick the cup', 'öffne die Tür', '', ' ', '把杯子拿起来', 'a\0b', 'x'*300, '\udce9', 'pick the cup ']

def told(k, task=None):
    s = np.float32([k, k])
    return Told(s, k, 0., s + 1, k % 5==4, False, WORDS[k*7 % len(WORDS)] if task is None else task, str(k % 3))

def expected(ids, field='task'): return [getattr(told(int(k)), field) for k in ids]


@pytest.mark.parametrize('seed', range(4))
def test_strings_come_back_as_they_went_in(seed, tmp_path):
    "Thousands of random operations; a list of all steps is the twin, by id"
    rng, n = np.random.default_rng(seed), 0
    memory = ReplayMemory(40, [None, Proportional()][seed % 2], seed=seed, path=tmp_path/'there' if seed > 1 else None)
    for turn in range(120):
        m = int(rng.integers(1, 60 if turn % 20==0 else 6))
        new = [told(k) for k in range(n, n + m)]
        columns = Told(*([getattr(o, f) for o in new] for f in Told._fields))
        arrays = columns._replace(task=np.array(columns.task, object), where=np.array(columns.where), state=np.array(columns.state), next_state=np.array(columns.next_state))
        way = rng.integers(5)
        if way==0: ids = [memory.add(o) for o in new]
        else: ids = memory.extend([new, columns, Batch.of_steps(new), Batch.of(arrays)][way - 1], streams='one')
        assert list(ids)==list(range(n, n + m))
        n += m
        for batch in (memory.sample(7 if len(memory) > 7 else 1), memory.recent(1), memory.fetch(rng.integers(memory.first_id, n, 5), ('where', 'task'))):
            assert batch.task==expected(batch.ids) and batch['where']==expected(batch.ids, 'where')
            assert [o.task for o in batch]==batch.task
        stored = np.arange(memory.first_id, n)
        strings, at = strings_in(memory._shelf.storage, 'where', stored % 40)
        assert strings[at].tolist()==expected(stored, 'where')
        around = memory.sample(1, windows={'task': (-1, 0, 1)})
        [k], [[a, b, c]] = around.ids.tolist(), around.task
        assert b==expected([k])[0] and a in (b, *expected([k - 1])) and c in (b, *expected([k + 1]))
        if turn % 50==7: assert memory.check_valid()
    assert memory.where('task', '').tolist()==[k for k in range(memory.first_id, n) if told(k).task=='']
    assert memory.where('task', lambda v: v!='').tolist()==[k for k in range(memory.first_id, n) if told(k).task!='']
    memory.close()


def test_a_column_of_strings_goes_wherever_a_batch_goes():
    memory = ReplayMemory(60, seed=0)
    memory.extend([told(k) for k in range(60)])
    batch = memory.sample(9)
    wanted = expected(batch.ids)
    for made in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch)), batch.to('meta'), batch.moved(torch.clone), batch[:], batch.unsqueezed(),
                 batch.replace(reward=batch.reward + 1), pickle.loads(pickle.dumps(batch.replace(reward=batch.reward + 1)))):
        assert made.task==wanted and made.layout.leaves[-1].text
    assert batch[2:5].task==wanted[2:5] and batch[-1].task==wanted[-1] and batch.numpy().task==wanted and batch.columns('task')==(wanted,)
    assert Batch.concat([batch, batch]).task==wanted*2 and type(batch.task) is list
    held, other = batch.to('cpu'), [memory.sample(9) for _ in range(20)]
    assert held.task==wanted and all(o.task==expected(o.ids) for o in other)
    changed = batch.replace(task=['x']*9)
    assert changed.task==['x']*9 and batch.task==wanted and changed[3].task=='x' and pickle.loads(pickle.dumps(changed)).task==['x']*9
    assert ReplayMemory(9).extend(changed).tolist()==list(range(9)) and changed.layout is batch.layout
    for bad in (['x'], [1]*9, torch.zeros(9), 'x'*9):
        with refused('task', (TypeError, ValueError)): changed.task = bad
    assert changed.task==['x']*9
    assert sorted(memory.sample_sequences(2, 3).first('task')) and memory.sample_sequences(4, 2).time_first().task[0].__len__()==4


def test_on_disk_a_string_is_there_before_the_step_that_uses_it(tmp_path):
    "A copy of the folder at any moment, as a kill would leave it, has all that was acknowledged; what a kill cut off is written over"
    memory = ReplayMemory(20, path=tmp_path/'there', seed=0)
    for k in range(45):
        memory.add(told(k))
        if k % 9: continue
        shutil.copytree(tmp_path/'there', tmp_path/str(k))
        raw = np.memmap(tmp_path/str(k)/'texts.6.map', np.uint8, 'r+')
        raw[memory._shelf.storage.tables[0].end + 4:][:50] = 7                      # half an entry: its length is not there yet
        raw.flush()
        with ReplayMemory.open(tmp_path/str(k)) as again:
            assert again.recent(len(memory)).task==memory.recent(len(memory)).task
            again.add(told(50, 'short'))
            again.add(told(51, 'a longer one than before'))
            assert again.recent(2).task==['short', 'a longer one than before'] and again.check_valid()
        with ReplayMemory.open(tmp_path/str(k)) as again: assert again.recent(2).task==['short', 'a longer one than before']
    view = ReplayMemory.peek(tmp_path/'there')
    memory.add(told(60, 'written while somebody looks'))
    assert view.fetch([45]).task==['written while somebody looks']
    view.close()
    memory.close()


def test_pipes_n_steps_mixtures_and_shards_keep_strings(tmp_path):
    steps = [told(k) for k in range(40)]
    for batch in ExperienceReplay(steps, bs=4, max_sz=30, seed=0): assert batch.task==expected(batch.ids)
    assert [o.task for o in NStep(steps, 3, .9)][:30]==expected(range(30))
    n_step = NStep(n=3, gamma=.9)
    done = n_step.push(Batch.of_steps(steps[:7])).task + n_step.push(Batch.of_steps(steps[7:])).task + n_step.flush().task
    assert done==expected(range(40))
    replay = ExperienceReplay(NStep([steps[:22]], 9, .9), bs=2, max_sz=30, min_sz=2, seed=0)
    next(iter(replay))
    replay.save(tmp_path/'saved')
    assert ExperienceReplay(NStep([steps], 9, .9), bs=2, max_sz=30, min_sz=2).load(tmp_path/'saved').memory.recent(3).task==replay.memory.recent(3).task
    one, two = ReplayMemory(30, seed=0), ReplayMemory(30, seed=1)
    one.extend(steps[:20])
    two.extend(steps[20:])
    mixed = MixedMemory([one, two], seed=0)
    batch = mixed.sample(10, windows={'where': (0, 1)})
    assert batch.task==[WORDS[k*7 % len(WORDS)] for k in batch.action.tolist()] and all(o[0]==str(k % 3) for o, k in zip(batch['where'], batch.action.tolist()))
    shard = RayMemory(0, 40, seed=0)
    shard.extend(steps)
    batch = shard.sample(8)
    assert batch.task==[WORDS[k*7 % len(WORDS)] for k in batch.action.tolist()] and shard.fetch(batch.ids).task==batch.task


def test_actors_send_strings():
    with_strings = Actors([told(k) for k in range(30)], num_workers=0, chunk=8)
    got = [t for chunk in with_strings for t in chunk.task]
    assert got==expected(range(30))


@pytest.mark.parametrize('value', [3, 3., True, None, b'x', np.float32(1), ['a'], np.array('a')[None], {'a': 'b'}])
def test_what_is_no_string_is_refused_by_name(value):
    memory = ReplayMemory(20, seed=0)
    memory.extend([told(k) for k in range(7)])
    state = memory.state_dict()
    for go in (lambda: memory.add(told(7)._replace(task=value)), lambda: memory.extend([told(7), told(8)._replace(task=value)])):
        with refused('task', (TypeError, ValueError)): go()
    assert memory.n_added==7 and memory.recent(7).task==expected(range(7)) and len(state['rows']['0']['records'])==7
    with pytest.raises((TypeError, ValueError)): memory.extend(Told(*([getattr(told(k), f) for k in range(3)] for f in Told._fields))._replace(task=[1, 2, 3]))


def test_a_damaged_table_is_named(tmp_path):
    memory = ReplayMemory(20, path=tmp_path/'there')
    for k in range(9): memory.add(told(k))
    memory.close()
    raw = np.memmap(tmp_path/'there'/'texts.6.map', np.uint8, 'r+')
    raw[:4] = 0
    raw.flush()
    with pytest.raises(CheckpointError, match=words('a string that is not there')): ReplayMemory.open(tmp_path/'there')
