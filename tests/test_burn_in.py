"""Sequences whose episodes begin in them: which steps count for the loss, with which priorities, and what is said of the others.

The twin of all windows is in test_sequences.py, that of a device in test_device.py; here are the edges."""
import copy
import itertools
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from data.make_checkpoint import steps as seven

from fastrl_replay.memory import DeviceMemory, ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.steps import SimpleStep, Transition
from fastrl_replay.storage.sequence_sampler import Sequence
from refusals import refused


def episodes(length, n, streams=1, numbered=True):
    "Episodes of `length` steps; streams take turns"
    for i in range(n):
        k, e = i//streams, i % streams
        end = k % length==length - 1
        if numbered: yield SimpleStep(np.float32([i]), 0, np.float32([i]), end, False, 0., 0., e, 0, k % length, k//length)
        else: yield Transition(np.float32([i]), 0, 0., np.float32([i]), end, False)


def of(sequence, length=5, n=90, max_sz=60, numbered=True, **kw):
    memory = ReplayMemory(max_sz, kw.pop('sampler', None), sequence=sequence, seed=0, **kw)
    for step in episodes(length, n, numbered=numbered): memory.add(step)
    return memory


def every(memory):
    "Start → which steps count, of every window that can be drawn"
    batch = memory.sample(len(memory.sampler)) if not memory.sampler.prioritized else memory.sample(500)
    return {ids[0]: (np.array(ids), learn) for ids, learn in zip(batch.ids.tolist(), batch.learn.tolist())}


@pytest.mark.parametrize('numbered', [True, False])
def test_a_beginning_is_known_after_the_row_before_it_is_gone(numbered, tmp_path):
    "Overwritten, saved, loaded, pickled, reopened"
    memory, disk = (of(Sequence(8, 5, stride=2), length=20, n=81, max_sz=61, numbered=numbered, path=o) for o in (None, tmp_path/'m'))
    assert memory.first_id==20 and every(memory)[20][1]==[True]*8
    learned = {k: v[1] for k, v in every(memory).items()}
    memory.save(tmp_path/'saved')
    for other in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory)), ReplayMemory.load(tmp_path/'saved')):
        assert {k: v[1] for k, v in every(other).items()}==learned
    disk.close()
    with ReplayMemory.open(tmp_path/'m') as again: assert {k: v[1] for k, v in every(again).items()}==learned and again.check_valid()


def test_priorities_are_of_the_steps_that_count():
    o = Sequence(6, burn_in=4, eta=.75)
    memory = of(o, length=9, sampler=Proportional())
    batch, rng = memory.sample(30), np.random.default_rng(0)
    for width in (6, 2):
        td = rng.standard_normal((30, width))
        td[0, -1] = 1e-3
        batch.update_priorities(td)
        p = {int(s): float(p) for s, p in zip(memory.sampler.starts[:len(memory.sampler), 0], memory.sampler.priorities)}
        last = {ids[0]: (errors, learn[6 - width:]) for ids, errors, learn in zip(batch.ids.tolist(), np.abs(td), batch.learn.numpy())}
        for id, (errors, learn) in last.items():
            want = .75*errors[learn].max() + .25*errors[learn].mean() if learn.any() else 0.
            assert p[id % 60]==pytest.approx(want + 1e-6)
    early = np.zeros((30, 6))
    early[:, :4] = 7.
    batch.update_priorities(early)
    p = {int(s): float(p) for s, p in zip(memory.sampler.starts[:len(memory.sampler), 0], memory.sampler.priorities)}
    assert {id % 9==0: round(p[id % 60], 2) for id in batch.ids[:, 0].tolist()}=={True: round(.75*7 + .25*7*4/6, 2), False: 0.}


def test_learn_is_a_column():
    batch = of(Sequence(6, 3), length=8).sample(5)
    turned, part, thawed = batch.time_first(), batch[1:3], pickle.loads(pickle.dumps(batch))
    assert torch.equal(turned.learn, batch.learn.T) and torch.equal(part.learn, batch.learn[1:3]) and torch.equal(thawed.learn, batch.learn)
    assert batch.to('meta').learn.shape==(5, 6) and batch.learn.dtype==torch.bool and (batch.learn <= batch.mask).all()
    assert torch.equal(batch.columns('learn')[0], batch.learn) and copy.copy(batch).learn is batch.learn
    class Odd(NamedTuple):
        learn: Any
        terminated: Any
        truncated: Any
    memory = ReplayMemory(20, sequence=Sequence(3, 1))
    for k in range(20): memory.add(Odd(k, k % 4==3, False))
    assert memory.sample(2).learn.dtype==torch.bool and memory.sample(2)['learn'].dtype==torch.int64
    plain = of(Sequence(4), length=6).sample(3)
    assert torch.equal(plain.learn, plain.mask) and memory.sample_sequences(2, 3).learn.all()


def test_streams_that_begin_in_mid_episode_are_not_taken_for_beginnings():
    "Without numbers nothing tells it; with them, they do"
    for numbered in (True, False):
        memory = ReplayMemory(60, sequence=Sequence(6, 3, stride=3), seed=0)
        memory.extend([*episodes(12, 40, numbered=numbered)][5:])
        found = every(memory)
        begins = {id for id, (_, learn) in found.items() if learn[0]}
        assert begins=={7, 19} and (0 in found)==(not numbered)


# ---- what was saved

def test_windows_saved_before_load_and_draw_as_they_were():
    "From the next draw on, with the same windows and priorities"
    memory = ReplayMemory.load(Path(__file__).parent/'data'/'burn_in_v3')
    assert memory.sampler.sequence==Sequence(6, 3, 4, learn_first=False) and memory.check_valid()
    first = memory.sample(8)
    assert first.ids[:, 0].tolist()==[43, 42, 56, 56, 57, 43, 57, 42]
    assert torch.equal(first.learn, first.mask & (torch.arange(6) >= 3)) and memory.sample(8).ids[:, 0].tolist()==[42, 56, 50, 43, 56, 57, 57, 43]
    batch = ReplayMemory.load(Path(__file__).parent/'data'/'burn_in_v3')
    for step in [*seven(200)][75:]: memory.add(step)
    twin = ReplayMemory(40, Proportional(), sequence=Sequence(6, 3, 4, learn_first=False), seed=0)
    for step in seven(200): twin.add(step)
    assert set(every(memory))==set(every(twin)) and len(memory.sampler)==len(twin.sampler) and len(batch)==40


def test_the_option_is_written_where_it_matters_only(tmp_path):
    "So what does not use it stays readable for versions that do not know it"
    def plain(o): return of(o).state_dict()['memory']['sampler']['options']['sequence']
    assert 'learn_first' not in plain(Sequence(6)) and 'learn_first' not in plain(Sequence(6, 3, learn_first=False))
    assert plain(Sequence(6, 3))['learn_first'] is True
    assert Sequence(6)==Sequence(6, learn_first=False) and Sequence(6, 3)!=Sequence(6, 3, learn_first=False)
    for o in (Sequence(6), Sequence(6, 3), Sequence(6, 3, learn_first=False)): assert Sequence.of(o.to_plain())==o==pickle.loads(pickle.dumps(o))
    old = Sequence.__new__(Sequence)
    old.__setstate__({k: v for k, v in vars(Sequence(6, 3)).items() if k!='learn_first'})         # a pickle of before
    assert old==Sequence(6, 3, learn_first=False)
    with refused('learn_first', TypeError): Sequence(6, 3, learn_first='no')


# ---- on a device

@pytest.mark.parametrize('kw', [{}, dict(pad=False), dict(stride=2), dict(across_episodes=True), dict(learn_first=False)], ids=str)
@pytest.mark.parametrize('numbered', [True, False])
def test_a_device_draws_what_the_host_does(kw, numbered):
    "Row by row, from the time at which all are overwritten; saved and loaded, too"
    o, n = Sequence(6, **dict(burn_in=4, stride=3) | kw), 4
    rng, at, number = np.random.default_rng(0), [0]*n, [0]*n
    host = ReplayMemory(80, sequence=o, seed=0)
    with pytest.warns(UserWarning): device = DeviceMemory(80, device='cpu', n_envs=n, sequence=o, seed=0, next_of=None)
    for _ in range(60):
        ends = rng.random(n) < .2
        rows = [SimpleStep(np.float32(0), 0, np.float32(0), bool(ends[e]), False, 0., 0., e, 0, at[e], number[e]) for e in range(n)]
        if not numbered: rows = [Transition(r.state, 0, 0., r.next_state, r.terminated, False) for r in rows]
        for e in range(n): at[e], number[e] = (0, number[e] + 1) if ends[e] else (at[e] + 1, number[e])
        stacked = type(rows[0])(*(np.stack([np.asarray(getattr(r, f)) for r in rows]) for f in rows[0]._fields))
        host.extend(stacked)
        device.extend(type(stacked)(*(torch.from_numpy(np.asarray(v)) for v in stacked)))
        if not len(host.sampler): continue
        wanted, batch = every(host), device.sample(500)
        found = dict(zip(batch.ids[:, 0].tolist(), batch.learn.tolist()))
        assert {k: v[1] for k, v in wanted.items()}==found


def test_a_device_memory_that_is_loaded_knows_its_beginnings(tmp_path):
    with pytest.warns(UserWarning): memory = DeviceMemory(60, device='cpu', n_envs=1, sequence=Sequence(8, 5, stride=2), seed=0, next_of=None)
    for step in episodes(20, 80, numbered=False): memory.add(step)
    memory.save(tmp_path/'m')
    with pytest.warns(UserWarning): again = DeviceMemory.load(tmp_path/'m', device='cpu')
    assert again.sequence==memory.sequence
    for o in (memory, again):
        batch = o.sample(300)
        assert dict(zip(batch.ids[:, 0].tolist(), batch.learn[:, 0].tolist()))[20] is True


# ---- what health says

def test_health_tells_which_steps_never_count():
    "The example of R2D2's windows, with episodes of 20 steps"
    poor, fine = (of(Sequence(80, 40, 40, learn_first=o), 20, 5000, 4000).health() for o in (False, True))
    assert poor['unlearned_share']==1 and poor['idle_windows_share']==1
    assert any('100.0% of the steps stored count for the loss in no window' in o for o in poor['warnings'])
    assert any('100.0% of the windows hold no step that counts' in o for o in poor['warnings'])
    assert fine['unlearned_share']==0 and fine['idle_windows_share']==0 and not any('loss' in o for o in fine['warnings'])
    assert 'unlearned_share' not in ReplayMemory(9, seed=0).health()


@pytest.mark.parametrize('o', [Sequence(6, 3), Sequence(6, 3, learn_first=False), Sequence(6, 3, 8), Sequence(6, 3, pad=False), Sequence(7, 4, across_episodes=True)], ids=str)
def test_shares_are_those_of_a_loop(o):
    rng = np.random.default_rng(0)
    memory, k = ReplayMemory(300, sequence=o, seed=0), 0
    for step in itertools.chain.from_iterable(episodes(int(m), int(m)) for m in rng.integers(1, 15, size=60)):
        memory.add(step)
        k += 1
    ids = np.arange(memory.first_id, k)
    found, counted = every(memory), set()
    for ids_, learn in found.values(): counted |= set(ids_[np.array(learn)].tolist())
    health = memory.health()
    open_ = 0 if not o.across_episodes else o.length                       # windows that are not complete yet
    share = np.mean([id not in counted and id < k - open_ for id in ids])
    assert abs(health['unlearned_share'] - share) <= open_/300 and (open_ or health['unlearned_share']==share)
    assert health['idle_windows_share']==np.mean([not any(learn) for _, learn in found.values()])
    memory.drop(ids[20:22])
    assert memory.health()['unlearned_share'] > health['unlearned_share']


@pytest.mark.parametrize('name,turned', [('batch_sequences', False), ('batch_time_first', True)])
def test_a_batch_pickled_before_there_was_learn_tells_what_was_meant(name, turned):
    "Steps after the burn-in count, at the beginning of an episode, too"
    batch = pickle.loads((Path(__file__).parent/'data'/'pickles'/f'{name}.pkl').read_bytes())
    burn_in = batch.burn_in
    def wanted(batch, turned):
        mask = batch.mask.T if turned else batch.mask
        late = mask & (torch.arange(mask.shape[1]) >= burn_in)
        return late.T if turned else late
    assert burn_in > 0 and wanted(batch, turned).any() and not wanted(batch, turned).all()
    for made in (batch, pickle.loads(pickle.dumps(batch)), batch.to('cpu'), copy.copy(batch)): assert torch.equal(made.learn, wanted(batch, turned))
    if not turned: assert torch.equal(batch.time_first().learn, wanted(batch, False).T)
