"""A memory on a device beside others there, and beside the host memory: what each call costs, eager, compiled and captured.

    python benchmarks/device.py              on CUDA: 100k, 1M, 10M rows, batches of 4,096 and 32,768
    python benchmarks/device.py --small      a smoke test of seconds, on the CPU too

On CUDA times are those of the device (events, medians over replays); on a CPU, CPU time of one thread, interleaved, medians.
It needs the extra `torchrl`. Nothing in the project's pages was measured on CUDA so far."""
import argparse, statistics, time, warnings
from typing import Any, NamedTuple

import torch

from fastrl_replay.all import Proportional, ReplayMemory, Transition, Uniform
from fastrl_replay.memory import DeviceMemory
from fastrl_replay.memory.device_draws import ByMass, DeviceRng

OBS, ACT, ENVS = 48, 12, 1024


class Sizes(NamedTuple):
    "How many rows, which batches, and how often each call is timed"
    rows: tuple
    batches: tuple
    rounds: int


class TimeRing:
    """A buffer that behaves as FastTD3's: tensors (env, time, …), a time of its own for each env's draw, one gather a column,
    next observations in full, 1-step"""
    def __init__(self, rows: int, step: Any) -> None:
        self.times, self.n = rows//ENVS, 0
        self.columns = [torch.zeros((ENVS, self.times, *v.shape[1:]), dtype=long_flags(v).dtype, device=v.device) for v in step]
    def extend(self, step: Any) -> None:
        "Write one time step of every env"
        for column, v in zip(self.columns, step): column[:, self.n % self.times] = long_flags(v)
        self.n += 1
    def sample(self, bs: int) -> list:
        "Draw bs/ENVS times of each env"
        at = torch.randint(0, min(self.n, self.times), (ENVS, bs//ENVS), device=self.columns[0].device)
        return [torch.gather(c, 1, at.view(*at.shape, *[1]*(c.ndim - 2)).expand(*at.shape, *c.shape[2:])).flatten(0, 1) for c in self.columns]


class FlatSums:
    "Proportional draws by one sum over all leaves in one dimension, float64: what blocks of 32 are compared with"
    def __init__(self, leaves: torch.Tensor) -> None: self.leaves = leaves.clone()
    def draw(self, bs: int) -> torch.Tensor:
        "Return the slots of a stratified batch"
        ends = self.leaves.cumsum(0, dtype=torch.float64)
        u = torch.arange(bs, device=ends.device) + torch.rand(bs, dtype=torch.float64, device=ends.device)
        return torch.searchsorted(ends, u*(ends[-1]/bs), right=True)


class BlockSums(FlatSums):
    "The same by sums of blocks, made at the draw"
    def __init__(self, leaves: torch.Tensor, block: int) -> None:
        super().__init__(torch.nn.functional.pad(leaves, (0, -len(leaves) % block)))
        self.block = block
    def draw(self, bs: int) -> torch.Tensor:
        "Return the slots of a stratified batch"
        blocks = self.leaves.view(-1, self.block)
        ends = blocks.sum(1, dtype=torch.float64).cumsum(0)
        u = torch.arange(bs, device=ends.device) + torch.rand(bs, dtype=torch.float64, device=ends.device)
        mass = u*(ends[-1]/bs)
        at = torch.searchsorted(ends, mass, right=True)
        inner = blocks[at].cumsum(1, dtype=torch.float64)
        rest = (mass - ends[at] + inner[:, -1]).clamp(min=0).minimum(inner[:, -1]*(1 - 2.**-52))
        return at*self.block + (inner <= rest[:, None]).sum(1)


def long_flags(v: torch.Tensor) -> torch.Tensor: return v.long() if v.dtype==torch.bool else v

def a_step(device: Any) -> Transition:
    "A time step of every env"
    def rows(*shape): return torch.rand(ENVS, *shape, device=device)
    return Transition(rows(OBS), rows(ACT), rows(), rows(OBS), rows() < .01, rows() < .005)


def microseconds(calls: dict, rounds: int, device: torch.device) -> dict:
    "The median time of each call, interleaved: of the device on CUDA, else CPU time"
    found: dict = {k: [] for k in calls}
    for _ in range(rounds + 2):
        for k, call in calls.items(): found[k].append(one(call, device))
    return {k: statistics.median(v[2:]) for k, v in found.items()}

def one(call: Any, device: torch.device) -> float:
    if device.type=='cpu':
        start = time.process_time()
        call()
        return 1e6*(time.process_time() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return 1e3*begin.elapsed_time(end)

def captured(call: Any) -> Any:
    "The call as a CUDA graph, to be replayed"
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3): call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): call()
    return graph.replay

def ways(name: str, call: Any, device: torch.device, compiled: bool) -> dict:
    "A call eager and, where asked, compiled and captured"
    found = {f'{name} eager': call}
    if compiled: found[f'{name} compiled'] = torch.compile(call, fullgraph=True)
    if device.type=='cuda': found[f'{name} captured'] = captured(found.get(f'{name} compiled', call))
    return found


def line(title: str, times: dict) -> None:
    "Print one row"
    print(f'{title:24}' + '   '.join(f'{k} {v:,.0f} µs' for k, v in times.items()), flush=True)

def filled(memory: Any, step: Any, rows: int) -> Any:
    "A memory with all of its rows"
    for _ in range(rows//ENVS): memory.extend(step)
    return memory

def calls_of_ours(rows: int, step: Any, device: torch.device) -> dict:
    "Our memories, of rows with next observations found and in full, and prioritized"
    def made(**kw): return filled(DeviceMemory(rows, device=device, compile=False, seed=0, **kw), step, rows)
    return dict(ours=made(), in_full=made(next_of=None), prioritized=made(sampler=Proportional(), next_of=None))


def calls(rows: int, sizes: Sizes, device: torch.device, compiled: bool) -> None:
    "Each call of ours, TorchRL's and FastTD3's, and of the host memory with a copy"
    step = a_step(device)
    ours, theirs = calls_of_ours(rows, step, device), others(rows, step, device)
    extends = {f'extend {k}': (lambda m=m: m.extend(step)) for k, m in ours.items()}
    print(f'\n{rows:,} rows of {OBS} + {ACT} numbers, {ENVS:,} envs, on {device}')
    line('extend 1,024', microseconds(each(extends, device, compiled) | theirs.extend, sizes.rounds, device))
    for bs in sizes.batches: draws_and_updates(bs, ours, theirs, sizes, device, compiled)

def draws_and_updates(bs: int, ours: dict, theirs: dict, sizes: Sizes, device: torch.device, compiled: bool) -> None:
    "The calls whose size is that of a batch"
    draws = {f'draw {k}': (lambda m=m: m.sample(bs).astuple()) for k, m in ours.items()}
    uniform = theirs.uniform(bs)
    line(f'sample {bs:,}', microseconds(each(draws, device, compiled) | uniform, sizes.rounds, device))
    memory, td = ours['prioritized'], torch.rand(bs, device=device)
    ids = memory.sample(bs).ids
    update = each({'update': lambda: memory.update_priorities(ids, td)}, device, compiled)
    line(f'update {bs:,}', microseconds(update | theirs.update(bs, td), sizes.rounds, device))

def each(calls: dict, device: torch.device, compiled: bool) -> dict:
    "All ways of several calls"
    return {k: v for name, call in calls.items() for k, v in ways(name, call, device, compiled).items()}


class Others(NamedTuple):
    "The calls of other buffers: of `extend`, of a draw of bs rows, of an update of bs priorities"
    extend: dict = {}
    uniform: Any = lambda bs: {}
    update: Any = lambda bs, td: {}

def of_torchrl(rows: int, step: Any, device: torch.device) -> Others:
    "TorchRL's buffers; none where it is not installed, and no priorities where its trees do not load"
    try: from tensordict import TensorDict
    except ImportError:
        print("TorchRL's buffers: tensordict and torchrl are not installed (the extra `torchrl`)")
        return Others()
    from torchrl.data import LazyTensorStorage, RandomSampler, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
    after = dict(reward=step.reward, state=step.next_state, terminated=step.terminated, truncated=step.truncated)
    rows_of_td = TensorDict(dict(state=step.state, action=step.action, next=after), [ENVS])
    def storage(): return LazyTensorStorage(rows, device=device)
    plain, ranked = TensorDictReplayBuffer(storage=storage(), sampler=RandomSampler(), batch_size=ENVS), None
    try: ranked = TensorDictPrioritizedReplayBuffer(alpha=.6, beta=.4, storage=storage(), batch_size=ENVS)
    except (RuntimeError, ImportError) as e:                     # its trees do not load with every version of torch
        print(f"TorchRL's prioritized sampler: {str(e).splitlines()[0]}")
    for _ in range(rows//ENVS):
        for buffer in (plain, ranked):
            if buffer is not None: buffer.extend(rows_of_td.clone())
    def update(bs, td):
        if ranked is None: return {}
        drawn = ranked.sample(bs)
        return {'torchrl update': lambda: ranked.update_priority(drawn['index'], td)}
    return Others(dict(torchrl=lambda: plain.extend(rows_of_td)), lambda bs: dict(torchrl=lambda: plain.sample(bs)), update)

def host_and_copy(rows: int, step: Any, device: torch.device) -> dict:
    "The host memory, whose batches are pinned and copied to the device"
    host = filled(ReplayMemory(rows, Uniform(True), seed=0), Transition(*(v.cpu().numpy() for v in step)), rows)
    def draw(bs):
        batch = host.sample(bs)
        return (batch.pin_memory() if device.type=='cuda' else batch).to(device)
    return {'host and copy': draw}

def others(rows: int, step: Any, device: torch.device) -> Others:
    "TorchRL's buffers, one of FastTD3's behaviour, and the host memory with a copy to the device"
    theirs, ring, host = of_torchrl(rows, step, device), filled(TimeRing(rows, step), step, rows), host_and_copy(rows, step, device)
    def uniform(bs):
        draws = dict(fasttd3=lambda: ring.sample(bs)) | {k: (lambda draw=draw: draw(bs)) for k, draw in host.items()}
        return theirs.uniform(bs) | draws
    return Others(theirs.extend | dict(fasttd3=lambda: ring.extend(step)), uniform, theirs.update)


def sums(rows: int, sizes: Sizes, device: torch.device, compiled: bool) -> None:
    "One sum over all leaves beside blocks of 32 and 64, and ours"
    leaves = torch.empty(rows, device=device).exponential_()
    law = ByMass(Proportional(), rows, DeviceRng(0, device))
    law.leaves[:rows] = leaves
    first, n = torch.zeros((), dtype=torch.int64, device=device), torch.tensor(rows, device=device)
    kinds = dict(flat=FlatSums(leaves), blocks_32=BlockSums(leaves, 32), blocks_64=BlockSums(leaves, 64))
    for bs in sizes.batches:
        found = {k: (lambda o=o, bs=bs: o.draw(bs)) for k, o in kinds.items()} | dict(ours=lambda bs=bs: law.draw(bs, first, n))
        line(f'the draw alone, {bs:,}', microseconds(each(found, device, compiled and device.type=='cuda'), sizes.rounds, device))


def main() -> None:
    "Run it"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--small', action='store_true', help='a smoke test: few rows, few rounds')
    parser.add_argument('--device', help='cuda or cpu (default: cuda where there is one)')
    parser.add_argument('--eager', action='store_true', help='compile nothing')
    parser.add_argument('--rows', type=int, nargs='*', help='rows, in place of 100k, 1M and 10M')
    options = parser.parse_args()
    device = torch.empty(0, device=options.device or ('cuda' if torch.cuda.is_available() else 'cpu')).device
    if device.type=='cpu': torch.set_num_threads(1)
    sizes = Sizes((20*ENVS,), (ENVS,), 3) if options.small else Sizes((98*ENVS, 976*ENVS, 9765*ENVS), (4096, 32_768), 50 if device.type=='cuda' else 7)
    if options.rows: sizes = sizes._replace(rows=tuple(max(1, n//ENVS)*ENVS for n in options.rows))
    print(torch.cuda.get_device_name(device) if device.type=='cuda' else 'on a CPU: nothing here is about CUDA')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for rows in sizes.rows:
            calls(rows, sizes, device, not options.eager)
            sums(rows, sizes, device, not options.eager)


if __name__=='__main__': main()
