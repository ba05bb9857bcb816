"""Every field `next_x` beside a field `x` is about the step after the last of a window, wherever n-step transitions are made."""
from typing import Any, NamedTuple

import numpy as np
import pytest

from fastrl_replay.batch import Batch
from fastrl_replay.memory import DeviceMemory
from fastrl_replay.pipes.n_step import NStep


class Critic(NamedTuple):
    "A step with more to come than its observation"
    state: Any
    action: Any
    reward: Any
    next_state: Any
    critic: Any
    next_critic: Any
    next_action: Any
    next_of_kin: Any
    terminated: Any
    truncated: Any
    env_id: Any
    step_n: Any


N, GAMMA = 3, .5
LAST = 'next_state', 'next_critic', 'next_action', 'terminated', 'truncated'


def episodes(n_envs, n, seed=0):
    "Time steps of several streams, a list of steps each; their ends lie anywhere"
    rng, k, rows = np.random.default_rng(seed), [0]*n_envs, []
    for t in range(n):
        row = []
        for e in range(n_envs):
            at = 1000.*e + t
            ended = rng.integers(4) if k[e] else 3
            row.append(Critic(np.array([at, 0], np.float32), t % 5, float(rng.integers(9)), np.array([at + 1, 0], np.float32),
                              dict(a=np.float32(-at)), dict(a=np.float32(-at - 1)), (t + 1) % 5, t % 7, bool(ended==0), bool(ended==1), e, k[e]))
            k[e] = 0 if ended < 2 else k[e] + 1
        rows.append(row)
    return rows


def plain(v): return {k: plain(o) for k, o in v.items()} if isinstance(v, dict) else np.asarray(v).tolist()


def twin(rows, n=N):
    "What each step becomes if it is the first of a window: by stream and number of the time step"
    out = {}
    for e in range(len(rows[0])):
        stream = [row[e] for row in rows]
        for t, first in enumerate(stream):
            window = []
            for step in stream[t:t + n]:
                window.append(step)
                if step.terminated or step.truncated: break
            last = window[-1]
            whole = len(window)==n or last.terminated or last.truncated
            made = {f: plain(getattr(last if f in LAST else first, f)) for f in Critic._fields}
            made |= dict(reward=sum(GAMMA**k*s.reward for k, s in enumerate(window)), discount=GAMMA**len(window))
            out[e, t] = made, whole
    return out


def compared(made, wanted, steps_only=True):
    "Compare rows with the twin, by their state; return how many there were"
    seen = 0
    for row in made:
        e, t = divmod(int(row.state[0]), 1000)
        want, whole = wanted[e, t]
        if not whole: continue
        assert {f: plain(v) for f, v in zip(row._fields, row)}==want
        seen += 1
    return seen


FORMS = dict(
    steps=lambda rows: [step for row in rows for step in row],
    lists=lambda rows: rows,
    chunks=lambda rows: [Batch.of_steps(row) for row in rows])


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('pushed', [True, False])
@pytest.mark.parametrize('form', FORMS)
def test_n_step_pipes(form, pushed, seed):
    rows = episodes(4, 60, seed)
    items, wanted = FORMS[form](rows), twin(rows)
    if pushed:
        pipe = NStep(None, N, GAMMA)
        made = [pipe.push(o) for o in items]
    else: made = list(NStep(items, N, GAMMA))
    made = [step for o in made for step in (o if isinstance(o, (list, Batch)) else [o])]
    assert compared(made, wanted)==sum(whole for _, whole in wanted.values())


@pytest.mark.parametrize('max_sz', [400, 80])
@pytest.mark.parametrize('next_of', [None, {'next_state': 'state'}, {'next_state': 'state', 'next_critic': 'critic'}, {'next_critic': 'critic'}])
@pytest.mark.filterwarnings('ignore:device')
def test_memories_on_a_device(next_of, max_sz):
    rows, n_envs = episodes(4, 60), 4
    memory = DeviceMemory(max_sz, device='cpu', n_envs=n_envs, n_step=N, gamma=GAMMA, next_of=next_of, seed=0, max_ends=max_sz)
    for row in rows: memory.extend(Batch.of_steps(row))
    seen, wanted = 0, twin(rows)
    for _ in range(20): seen += compared(list(memory.sample(64)), wanted)
    assert seen > 500
