"""Compiled calls of a memory on a device that is not there: what asks CUDA while a function is compiled cannot be compiled."""
import numpy as np
import pytest
import torch

from fastrl_replay.memory import DeviceMemory
from fastrl_replay.samplers.age import AgeWeighted
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import Transition
from fastrl_replay.storage.sequence_sampler import Sequence


class Pretended:
    "A CUDA device whose tensors are on the CPU"
    type = 'cuda'
    __hash__ = None
    def __eq__(self, other): return isinstance(other, torch.device) and other.type=='cpu'


def step(k, n=4):
    state, flags = torch.full((n, 2), float(k)), torch.zeros(n, dtype=torch.bool)
    return Transition(state, torch.zeros(n, dtype=torch.long), torch.ones(n), state + 1, flags, flags)


KINDS = dict(uniform=dict(), without=dict(sampler=Uniform()), prioritized=dict(sampler=Proportional()), age=dict(sampler=AgeWeighted(100)),
             n_step=dict(n_step=3), whole=dict(next_of=None), sequences=dict(sequence=Sequence(4)))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.filterwarnings('ignore:device')
def test_extend_is_one_graph_on_cuda(kind, monkeypatch):
    memory = DeviceMemory(64, device='cpu', n_envs=4, compile=False, seed=0, **KINDS[kind])
    memory.extend(step(0))
    memory.device = Pretended()
    torch._dynamo.reset()
    extend = torch.compile(lambda s: memory.extend(s), fullgraph=True, backend='eager')
    for k in range(1, 9): assert extend(step(k)) is None
    memory.device = torch.device('cpu')
    assert memory.n_added==36 and np.array_equal(memory.fetch(range(36)).state[:, 0], np.arange(9).repeat(4))


@pytest.mark.parametrize('captured', [True, False])
@pytest.mark.filterwarnings('ignore:device')
def test_a_captured_extend_leaves_counting_to_the_device(captured, monkeypatch):
    memory = DeviceMemory(64, device='cpu', n_envs=4, compile=False, seed=0)
    memory.extend(step(0))
    memory.device = Pretended()
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: captured)
    ids = memory.extend(step(1))
    assert ids is None if captured else ids.tolist()==[4, 5, 6, 7]
    assert memory.n_added==8
