"""A memory on CUDA without a GPU: on fake tensors, which have a device, a dtype and a shape, and no numbers.

Whatever would wait for the device (a number, a mask as an index, what is not zero) raises there, and whatever mixes devices. It needs
a PyTorch that was built with CUDA, but neither a GPU nor a driver: `make test-fakes` makes an environment with one, and runs this."""
import importlib.util
import itertools

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastrl_replay.batch import Batch, first_row
from fastrl_replay.memory import DeviceMemory
from fastrl_replay.samplers.age import AgeWeighted
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.schedules import LinearSchedule
from fastrl_replay.steps import Layout, Transition
from fastrl_replay.storage.sequence_sampler import Sequence

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason='this PyTorch was built without CUDA: make test-fakes')

SAMPLERS = dict(uniform=lambda: Uniform(True), distinct=Uniform, proportional=Proportional, scheduled=lambda: Proportional(beta=LinearSchedule(.4, 1., 9)), age=lambda: AgeWeighted(99))
NEXT_OF = dict(found={}, full=dict(next_of=None))
FORMS = dict(rows={}, n_step=dict(n_step=3), windows=dict(sequence=Sequence(4)), burnt=dict(sequence=Sequence(4, burn_in=2)))
DTYPES = dict(wide={}, bfloat16=dict(dtypes=dict(state=torch.bfloat16, next_state=torch.bfloat16)), float16=dict(dtypes=dict(state=torch.float16, next_state=torch.float16)))
KINDS = ['-'.join(o) for o in itertools.product(SAMPLERS, NEXT_OF, FORMS, DTYPES) if o[2] in ('rows', 'n_step') or o[0] not in ('distinct', 'age')]
COMPILED = [o for o in KINDS if 'float16' not in o or o.startswith('proportional-found')]


def step(m, device='cuda'):
    flags = torch.zeros(m, dtype=torch.bool, device=device)
    return Transition(torch.zeros(m, 5, device=device), torch.zeros(m, 2, device=device), torch.zeros(m, device=device), torch.zeros(m, 5, device=device), flags, flags)


class Copied(Exception): "A call copied from a device to the host, or back"

class Moves(TorchDispatchMode):
    "Raises where something is copied between devices, which fakes do without a word"
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        kinds = {o.device.type for o in tree_leaves((args, found)) if isinstance(o, torch.Tensor) and o.ndim}
        if len(kinds) > 1: raise Copied(func)
        return found

@pytest.fixture
def fakes(monkeypatch):
    "In here, tensors are fake"
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)      # which would ask the driver
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True): yield
    torch._dynamo.reset()


def filled(kind, **options):
    sampler, next_of, form, dtypes = kind.split('-')
    kw = NEXT_OF[next_of] | FORMS[form] | DTYPES[dtypes] | options
    memory = DeviceMemory(16*32, SAMPLERS[sampler](), device='cuda', compile=False, seed=0, **kw)
    memory._take(memory._new_ring(LAYOUT, 16))             # a layout asks for values, which fakes have not
    for _ in range(3): memory.extend(step(16))
    return memory

LAYOUT = Layout.of(first_row(step(1, 'cpu')))


WAITS = [lambda x: float(x[0]), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: bool(x.any()), lambda x: x.unique(), lambda x: x.tolist(), lambda x: x.cpu(), lambda x: torch.zeros(4).copy_(x)]
@pytest.mark.parametrize('waits', WAITS)
def test_what_waits_raises_on_fakes(fakes, waits):
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException, Copied)), Moves(): waits(torch.zeros(4, device='cuda'))

def test_what_mixes_devices_raises_on_fakes(fakes):
    with pytest.raises(RuntimeError): torch.zeros(4, device='cuda') + torch.zeros(4)
    torch.zeros(4, device='cuda') + torch.zeros(4, device='cuda')


@pytest.mark.parametrize('kind', KINDS)
def test_eager_calls_never_wait(fakes, kind):
    memory = filled(kind)
    given = step(32), step(16), torch.ones(16, device='cuda'), torch.zeros(8, device='cuda')
    with Moves():
        assert memory.extend(given[0]).tolist()==[*range(48, 80)]
        batch = memory.sample(8)
        batch.update_priorities(given[3])
        if memory.sequence is None: assert memory.sample_groups(2, 4).state.shape==(2, 4, 5)
        if memory.sampler.prioritized and memory.sequence is None: memory.extend(given[1], given[2])
    assert isinstance(batch, Batch) and all(o.device.type=='cuda' for o in (batch.ids, batch.probs, batch.weights, batch.state, batch.next_state))
    assert batch.state.dtype==torch.float32 and batch.state.shape==((8, 4, 5) if memory.sequence else (8, 5))


@pytest.mark.parametrize('kind', COMPILED)
def test_compiled_calls_are_one_graph_each(fakes, kind):
    memory, graphs = filled(kind), []
    def counted(gm, inputs):
        graphs.append(gm)
        return gm.forward
    def once(f, *args):
        torch.compile(f, fullgraph=True, backend=counted)(*args)
    def update(s):
        memory.extend(s)
        batch = memory.sample(8)
        batch.update_priorities(batch.reward)
        return batch.state.sum()
    once(update, step(16))
    once(lambda s: memory.extend(s), step(32))
    once(lambda ids, td: memory.update_priorities(ids, td), torch.zeros(8, dtype=torch.int64, device='cuda'), torch.zeros(8, device='cuda'))
    assert len(graphs)==3


def test_what_is_marked_never_moves(fakes):
    memory = filled('proportional-found-rows-wide')
    tensors = [*memory._ring.tensors(), memory._ring.clock, memory._ring.counts, memory.sampler.leaves, *memory.sampler.tensors().values()]
    assert all(o._dynamo_static_input_type=='unguarded' for o in tensors)


def test_the_benchmark_runs_to_its_end(fakes, root, monkeypatch, capsys):
    "All but TorchRL's buffers: how long a call takes is not asked"
    spec = importlib.util.spec_from_file_location('bench_device', root/'benchmarks'/'device.py')
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    def once(call, device):
        call()
        return 1.
    monkeypatch.setattr(bench, 'one', once)
    monkeypatch.setattr(bench, 'captured', lambda call: call)
    monkeypatch.setattr(bench, 'of_torchrl', lambda rows, step, device: bench.Others())
    monkeypatch.setattr(bench, 'host_and_copy', lambda rows, step, device: {})
    obs, act = np.zeros(bench.OBS, np.float32), np.zeros(bench.ACT, np.float32)
    layout = Layout.of(Transition(obs, act, 0., obs, False, False))
    def filled(memory, step, rows):
        if isinstance(memory, DeviceMemory): memory._take(memory._new_ring(layout, bench.ENVS))
        for _ in range(3): memory.extend(step)
        return memory
    monkeypatch.setattr(bench, 'filled', filled)
    device, sizes = torch.device('cuda', 0), bench.Sizes((20*bench.ENVS,), (bench.ENVS,), 1)
    bench.calls(sizes.rows[0], sizes, device, False)
    bench.sums(sizes.rows[0], sizes, device, False)
    found = capsys.readouterr().out
    for word in ('extend 1,024', 'sample 1,024', 'update 1,024', 'draw ours captured', 'fasttd3', 'flat', 'blocks_64'): assert word in found
