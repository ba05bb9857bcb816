"""Batches: valid for as long as anyone holds anything of them, alike in layout, apart in memory; and everything one can do with them."""
import copy
import gc
import pickle
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.storage.sequence_sampler import Sequence
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import Transition
from twins import KINDS, Brain, Only, column_bytes, row_bytes, as_row, stacked, step_bytes
from refusals import refused
from words import words


def transition(i): return Transition(np.full(4, i, np.float32), i, float(i), np.full(4, -i, np.float32), False, i % 2==0)

def filled(n=60, max_sz=60, sampler=None, **kw):
    memory = ReplayMemory(max_sz, sampler, seed=0, **kw)
    memory.extend([transition(i) for i in range(n)])
    return memory


# --- validity ---------------------------------------------------------------------------------------------------------
def saved_by_autograd(b):
    x = torch.ones(len(b), requires_grad=True)
    loss = (b.reward * x).sum()
    def value():
        [grad] = torch.autograd.grad(loss, x, retain_graph=True)
        return grad
    return value

HOLDS = {       # a way to hold on to a batch -> a function that reads its rewards; the batch itself is let go
    'batch': lambda b: lambda: b.reward,
    'column': lambda b: (lambda r: lambda: r)(b.reward),
    'another column': lambda b: (lambda s: lambda: s[:, 0])(b.state),
    'view': lambda b: (lambda s: lambda: s[:, 0])(b.state[:, :1]),
    'view of a view': lambda b: (lambda s: lambda: s.T[0])(b.state.view(-1).view(-1, 4)[:, 1:][:, :2]),
    'ids': lambda b: (lambda i: lambda: i.float())(b.ids),
    'numpy': lambda b: (lambda a: lambda: torch.tensor(a))(b.reward.numpy()),
    'numpy view': lambda b: (lambda a: lambda: torch.tensor(a[:, 2].copy()))(b.state.numpy()[:, 1:]),
    'from_numpy': lambda b: (lambda t: lambda: t)(torch.from_numpy(b.reward.numpy())),
    'memoryview': lambda b: (lambda m: lambda: torch.tensor(np.asarray(m)))(memoryview(b.reward.numpy())),
    'dlpack': lambda b: (lambda t: lambda: t)(torch.from_dlpack(b.reward)),
    'storage': lambda b: (lambda s, n, at: lambda: torch.tensor([], dtype=torch.float32).set_(s, at, (n,)))(
        b.reward.untyped_storage(), len(b), b.reward.storage_offset()),
    'autograd': saved_by_autograd,
    'detached': lambda b: (lambda t: lambda: t)(b.reward.detach()),
    'data': lambda b: (lambda t: lambda: t)(b.reward.data),
    'split': lambda b: (lambda t: lambda: torch.cat(t))(b.reward.split(2)),
    'expanded': lambda b: (lambda t: lambda: t[2])(b.reward.expand(5, -1)),
    'bits': lambda b: (lambda t: lambda: t.view(torch.float32))(b.reward.view(torch.int32)),
    'row': lambda b: (lambda rows: lambda: torch.tensor(np.array([r.state[0] for r in rows])))(list(b)),
    'tuple': lambda b: (lambda t: lambda: t.reward)(b.astuple()),
    'numpy of all': lambda b: (lambda t: lambda: torch.tensor(t.reward))(b.numpy()),
    'replaced': lambda b: (lambda r: lambda: r.reward)(b.replace(action=b.action + 1)),
    'copy': lambda b: (lambda r: lambda: r.reward)(copy.copy(b)),
    'pickle': lambda b: (lambda p: lambda: pickle.loads(p).reward)(pickle.dumps(b)),
    'pickle out of band': lambda b: (lambda bufs, p: lambda: pickle.loads(p(bufs), buffers=bufs).reward)(
        bufs := [], lambda _, p=pickle.dumps(b, protocol=5, buffer_callback=bufs.append): p),
    'closure of the loop': lambda b: (lambda it: lambda: torch.tensor([r.reward for r in it()]))(lambda: iter(b)),
    'iterator': lambda b: (lambda it, out: lambda: out.extend(torch.tensor(r.reward) for r in it) or torch.stack(out))(iter(b), []),
}

@pytest.mark.parametrize('way', HOLDS)
def test_what_is_held_stays(way):
    memory = filled()
    for bs in (3, 8):
        batch = memory.sample(bs)
        want = batch.ids.float()
        read = HOLDS[way](batch)
        del batch
        for _ in range(12):
            other = memory.sample(bs)
            other.reward.fill_(-1.)
            other.state.fill_(-1.)
            other.ids.fill_(-1)
        assert read().tolist()==want.tolist()


def test_a_batch_outlives_its_memory():
    memory = filled()
    batch = memory.sample(5)
    want = column_bytes(batch)
    del memory
    gc.collect()
    assert column_bytes(batch)==want
    with refused('update_priorities', RuntimeError): batch.update_priorities(np.ones(5))


def test_a_storage_moved_elsewhere_by_torch_is_not_used_again():
    "`share_memory_` gives the storage other bytes"
    memory = filled()
    for _ in range(6):
        batch = memory.sample(8)
        batch.reward.share_memory_()
        del batch
        for _ in range(4):
            batch = memory.sample(8)
            assert column_bytes(batch)==column_bytes(memory.fetch(batch.ids))


# --- independence -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('kind', ['transition', 'nested', 'brain', 'odd', 'wide'])
def test_writing_into_one_column_changes_nothing_else(kind):
    rng, world = np.random.default_rng(0), {}
    memory = ReplayMemory(20, Proportional(), seed=0)
    memory.extend([KINDS[kind](rng, world) for _ in range(20)])
    everything = column_bytes(memory.recent(20))
    def tensors(v): return [v] if isinstance(v, torch.Tensor) else [t for o in (v.values() if isinstance(v, dict) else v) for t in tensors(o)]
    batch, other = memory.sample(7), memory.sample(7)
    columns = [*tensors(batch.astuple()), batch.ids, batch.probs, batch.weights]
    before = [[t.clone() for t in columns], column_bytes(other)]
    for k, t in enumerate(columns):
        t.view(-1).view(torch.uint8).bitwise_not_()
        for j, o in enumerate(columns): assert j <= k or (o.view(-1).view(torch.uint8)==before[0][j].view(-1).view(torch.uint8)).all(), (k, j)
    assert column_bytes(other)==before[1] and column_bytes(memory.recent(20))==everything
    del batch, other, columns
    again = memory.sample(7)
    assert column_bytes(again)==column_bytes(memory.fetch(again.ids)) and memory.check_valid()


def describe(batch):
    "Everything about a batch's layout that a compiler could depend on"
    return [(n, t.dtype, t.shape, t.stride(), t.is_contiguous(), t.requires_grad, t.grad_fn, t.grad, t.device, t.data_ptr() % 64, hasattr(t, 'mine'), t._version)
            for n, t in [*batch.astuple()._asdict().items(), *((o, getattr(batch, o)) for o in ('ids', 'probs', 'weights', 'idxs'))] if t is not None]


@pytest.mark.parametrize('sampler', [Uniform, lambda: Uniform(True), Proportional])
def test_the_layout_never_varies(sampler):
    memory = ReplayMemory(60, sampler(), seed=0)
    seen = set()
    for i in range(100):
        memory.add(transition(i)) if i % 3 else memory.extend([transition(i)]*2)
        if len(memory) < 8: continue
        seen.add(tuple(map(repr, [o[:-2] for o in describe(memory.sample(8)) if o[0]!='idxs'])))
    assert len(seen)==1
    for name, dtype, *_ in describe(memory.sample(8)):
        want = dict(ids=torch.int64, idxs=torch.int64, probs=torch.float32, weights=torch.float32, reward=torch.float32, action=torch.int64,
                    terminated=torch.bool, truncated=torch.bool)
        assert dtype==want.get(name, torch.float32)


# --- what can be done with one ----------------------------------------------------------------------------------------
def test_columns_and_items():
    batch = filled().sample(6)
    assert batch['reward'] is batch.reward and torch.equal(batch['idxs'], batch.idxs) and batch['weights'] is batch.weights
    state, ids = batch.columns('state', 'ids')
    assert state is batch.state and ids is batch.ids and batch.columns()==()
    assert isinstance(batch.astuple(), Transition) and batch.astuple().action is batch.action
    for bad in ('rewards', '_layout', 'replace'):
        with pytest.raises(KeyError, match=words('no such column', name=bad)): batch[bad]
    with pytest.raises(AttributeError, match=words('no such field', name='rewards')): batch.rewards
    assert not hasattr(batch, 'rewards') and hasattr(batch, 'reward')


@pytest.mark.parametrize('kind', ['transition', 'nested', 'brain', 'odd', 'only', 'wide'])
def test_rows(kind):
    rng, world = np.random.default_rng(0), {}
    steps = [KINDS[kind](rng, world) for _ in range(7)]
    memory = ReplayMemory(7, seed=0)
    memory.extend(steps)
    for batch in (memory.recent(7), Batch.of(stacked(steps)), memory.recent(7).replace()):
        assert len(batch)==7 and batch.step_type is type(steps[0])
        assert [row_bytes(o) for o in batch]==[as_row(o) for o in steps]
        assert row_bytes(batch[3])==row_bytes(batch[-4])==as_row(steps[3]) and type(batch[3]) is type(steps[3])
        for k in (slice(2, 5), slice(None), slice(-2, None), slice(None, None, 2), slice(5, 2)):
            part = batch[k]
            assert isinstance(part, Batch) and column_bytes(part)==[step_bytes(o) for o in steps[k]]
        for k in (7, -8, 100):
            with pytest.raises(IndexError): batch[k]
        part = batch[0:2]
        for t in part.numpy():
            if isinstance(t, np.ndarray): t.fill(0)
        assert column_bytes(batch)==list(map(step_bytes, steps))


def test_replace_keeps_the_way_back():
    memory = filled(sampler=Proportional(eps=0.))
    batch = memory.sample(6)
    new = batch.replace(reward=np.arange(6.), state=torch.zeros(6, 2, 3))
    assert new.reward.tolist()==[0., 1., 2., 3., 4., 5.] and new.state.shape==(6, 2, 3) and new.action is batch.action
    assert torch.equal(new.ids, batch.ids) and torch.equal(new.weights, batch.weights) and torch.equal(new.idxs, batch.idxs)
    ids = batch.ids.tolist()
    assert new.update_priorities(np.full(6, 3.))==len(set(ids))
    assert {memory.sampler.priorities[i] for i in ids}=={3.}
    assert batch.reward.tolist()==[float(i) for i in ids]


@pytest.mark.parametrize('kind', ['nested', 'odd'])
@pytest.mark.parametrize('how', ['pickle', 'deepcopy', 'copy', 'loader', 'torch'])
def test_copies_are_equal_and_their_own(kind, how, tmp_path):
    rng, world = np.random.default_rng(0), {}
    steps = [KINDS[kind](rng, world) for _ in range(30)]
    memory = ReplayMemory(20, Proportional(), seed=0)
    memory.extend(steps)
    def copied(b):
        if how=='pickle': return pickle.loads(pickle.dumps(b))
        if how=='torch':
            torch.save(b, tmp_path/'batch.pt')
            return torch.load(tmp_path/'batch.pt', weights_only=False)
        if how=='loader': return next(iter(DataLoader([b], batch_size=None)))
        return getattr(copy, how)(b)
    for batch in (memory.sample(5), memory.recent(4), Batch.of(stacked(steps)), memory.sample(5, ['reward'] if kind!='odd' else ['to']), memory.recent(3).replace()):
        new = copied(batch)
        assert column_bytes(new)==column_bytes(batch) and new.step_type.__name__==batch.step_type.__name__ and len(new)==len(batch)
        for o in ('ids', 'probs', 'weights', 'idxs'):
            a, b = getattr(batch, o), getattr(new, o)
            assert (a is None and b is None) or torch.equal(a, b), o
        if how in ('pickle', 'deepcopy', 'torch'):
            before = column_bytes(batch)
            for t in new.numpy(): _zero(t)
            assert column_bytes(batch)==before

def _zero(v):
    if isinstance(v, np.ndarray): v.fill(0)
    else:
        for o in (v.values() if isinstance(v, dict) else v): _zero(o)


def test_a_batch_is_handed_to_and_from_a_worker():
    memory = filled()
    batches = [memory.sample(5), memory.recent(3)]
    it = iter(DataLoader(batches, batch_size=None, num_workers=1, multiprocessing_context='fork'))
    for sent in batches:
        got = next(it)
        assert column_bytes(got)==column_bytes(sent) and torch.equal(got.ids, sent.ids)
    it._shutdown_workers()


def test_as_tensordict():
    pytest.importorskip('tensordict')
    rng, world = np.random.default_rng(0), {}
    memory = ReplayMemory(20, Proportional(), seed=0)
    memory.extend([KINDS['nested'](rng, world) for _ in range(20)])
    batch = memory.sample(6)
    td = batch.as_tensordict()
    assert td.batch_size==(6,) and torch.equal(td['obs', 'camera'], batch.obs['camera']) and torch.equal(td['reward'], batch.reward)
    assert torch.equal(td['ids'], batch.ids) and torch.equal(td['weights'], batch.weights)
    del batch
    want = td.clone()
    for _ in range(10): memory.sample(6)
    assert (td==want).all()
    assert 'probs' not in memory.recent(3).as_tensordict().keys()


def test_batch_of():
    batch = Batch.of(Transition([[1., 2.], [3., 4.]], [0, 1], [1, 2], np.zeros((2, 2), np.float32), [True, False], torch.tensor([False, False])))
    assert [t.dtype for t in batch.astuple()]==[torch.float32, torch.int64, torch.float32, torch.float32, torch.bool, torch.bool]
    assert batch.ids is batch.probs is batch.weights is batch.idxs is None
    with pytest.raises(RuntimeError): batch.update_priorities([1., 2.])
    source = np.ones((3, 2), np.float32)
    made = Batch.of(Only(source))
    source.fill(0)
    made.x[0] = 5
    assert made.x.tolist()==[[5., 5.], [1., 1.], [1., 1.]] and not source.any()
    for none in np.zeros((0, 2)), torch.zeros(0, 2, dtype=torch.bfloat16):         # all copies were being reset, say
        assert len(Batch.of(Only(none)))==0 and Batch.of(Only(none)).x.shape==(0, 2) and (Batch.of(Only(none)).x.dtype==torch.bfloat16)==isinstance(none, torch.Tensor)
    for bad in (Only(5), Only([]), Only('ab'), (1, 2), 5, [Only(1)], Only({'a': np.ones(2), 'b': np.ones(3)}), Only(None)):
        with pytest.raises((ValueError, TypeError)): Batch.of(bad)


@pytest.mark.parametrize('kind', ['transition', 'nested', 'brain', 'odd'])
def test_batch_of_tensors(kind):
    "One tensor for each leaf, which the batch shares: on the CPU, or on another device"
    rng, world = np.random.default_rng(0), {}
    memory = ReplayMemory(20, seed=0)
    memory.extend([KINDS[kind](rng, world) for _ in range(20)])
    batch, layout = memory.sample(6), memory.layout
    tensors = [t.clone() for v in batch.astuple() for t in _tensors(v)]
    made = Batch.of_tensors(layout, tensors, ids=batch.ids, probs=batch.probs, weights=batch.weights, max_sz=20)
    assert column_bytes(made)==column_bytes(batch) and made.layout is layout and len(made)==6
    assert all(torch.equal(getattr(made, o), getattr(batch, o)) for o in ('ids', 'idxs', 'probs', 'weights'))
    assert all(t is o for t, o in zip((t for v in made.astuple() for t in _tensors(v)), tensors))
    for copied in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), made.to('meta')): assert copied.layout is layout and len(copied)==6
    assert column_bytes(pickle.loads(pickle.dumps(made)))==column_bytes(batch)
    memory.extend(made)
    assert column_bytes(memory.recent(6))==column_bytes(batch)
    far = Batch.of_tensors(layout, [t.to('meta') for t in tensors])
    assert far.ids is None and all(t.device.type=='meta' for v in far.astuple() for t in _tensors(v))
    for wrong, expected in ((tensors[:-1], f'{len(tensors)}, one for each leaf'), ([tensors[0][:3], *tensors[1:]], '3 rows')) if len(tensors) > 1 else ():
        with pytest.raises(ValueError) as caught: Batch.of_tensors(layout, wrong)
        assert caught.value.expected==expected and (caught.value.argument=='tensors') is (len(wrong) < len(tensors))
    with refused('ids', got='shape (2,)'): Batch.of_tensors(layout, tensors, ids=batch.ids[:2])
    with refused('header', got="'speed'"): Batch.of_tensors(layout, tensors, speed=batch.ids)

def _tensors(v): return [v] if isinstance(v, torch.Tensor) else [t for o in (v.values() if isinstance(v, dict) else v) for t in _tensors(o)]


def test_bfloat16_columns():
    steps = [KINDS['brain'](np.random.default_rng(i), {}) for i in range(8)]
    memory = ReplayMemory(8, seed=0)
    memory.extend(steps)
    batch = memory.recent(8)
    assert batch.state.dtype==batch.scalar.dtype==torch.bfloat16 and batch.reward.dtype==torch.float32
    assert torch.equal(batch.state, torch.stack([o.state for o in steps]))
    memory.extend(batch)                                        # and in again, as a batch
    memory.extend(Brain(*batch.astuple()))
    memory.extend(Batch.of(batch.astuple()))
    assert column_bytes(memory.recent(8))==column_bytes(batch)
    memory.add(steps[0]._replace(state=[1.5]*5, scalar=2.5))    # numbers that bfloat16 can hold
    assert memory.recent(1).state.tolist()==[[1.5]*5]
    with refused('state', TypeError, got='dtype float32, which would lose precision'): memory.add(steps[0]._replace(state=torch.full((5,), 1.001)))


# --- compiled ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('kind', ['flat', 'nested'])
@pytest.mark.parametrize('sampler', [Uniform, Proportional])
def test_a_compiled_function_of_a_batch(kind, sampler):
    torch._dynamo.reset()
    graphs = []
    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward
    if kind=='flat':
        memory = filled(sampler=sampler())
        def loss(batch): return (batch.state.sum(1) * batch.weights + batch.reward - batch.action + batch['terminated'].float() + batch.idxs).mean()
    else:
        memory, rng = ReplayMemory(60, sampler(), seed=0), np.random.default_rng(0)
        memory.extend([KINDS['nested'](rng, {}) for _ in range(60)])
        def loss(batch): return (batch.obs['camera'].sum((1, 2)) * batch.weights + batch.obs['pose'][1] + batch.reward.nan_to_num() + batch.action[0]).mean()
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    held = []
    for k in range(50):
        batch = memory.sample(8)
        torch.testing.assert_close(compiled(batch), loss(batch))
        if k % 7==0: held.append(batch)
        if k % 3==0: batch.update_priorities(np.random.default_rng(k).random(8))
        if kind=='flat': memory.add(transition(60 + k))
    assert len(graphs) <= 2
    torch._dynamo.reset()


COMPILED = {     # what one may do in a compiled function with a batch of which nothing was read before
    'ids': lambda b: b.ids + 1, 'idxs': lambda b: b.idxs + 1, 'probs': lambda b: b.probs.log().mean(), 'weights': lambda b: b.weights*b.reward,
    'by item': lambda b: b['reward'] + b['action'], 'columns': lambda b: b.columns('weights', 'ids', 'reward')[0].unsqueeze(1),
    'astuple': lambda b: b.astuple().reward.sum() + b.weights.sum(), 'len': lambda b: b.weights.sum()/len(b),
    'unsqueezed': lambda b: b.unsqueezed().weights*b.unsqueezed().reward + b.unsqueezed().state + b.unsqueezed().ids[:, None],
    'replace': lambda b: b.replace(reward=b.reward.clamp(max=2.)).reward*b.weights,
    'replace, then the header': lambda b: b.replace(reward=b.reward*2).weights.detach() + b.replace(reward=b.reward*2).ids,
    'a copy without gradients': lambda b: b.weights.detach().clone().requires_grad,
    'unsqueezed twice': lambda b: b.unsqueezed().unsqueezed().weights, 'replaced and unsqueezed': lambda b: b.replace(reward=b.reward*2).unsqueezed().reward,
    'unsqueezed and replaced': lambda b: b.unsqueezed().replace(reward=b.reward).weights, 'a slice': lambda b: b.unsqueezed()[:3].ids*b[:3].idxs[:, None],
    'assigned where it was made': lambda b: _assigned(b.unsqueezed(), b.reward)['reward'],
    'made of tensors': lambda b: (lambda m: m.weights*m.reward + m['action'] + m.idxs)(_of_tensors(b)),
    'made of tensors, and used': lambda b: (lambda m: m.replace(reward=m.reward*2).unsqueezed()[:3].reward + len(m))(_of_tensors(b)),
}
def _assigned(batch, reward):
    batch.reward = reward
    return batch
def _of_tensors(b):
    columns = [b.state*2, b.action, b.reward, b.next_state, b.terminated, b.truncated]
    return Batch.of_tensors(b.layout, columns, ids=b.ids, weights=b.weights, max_sz=60)
METHODS = {
    'unsqueeze': lambda t: t.unsqueeze(-1), 'detach': lambda t: t.detach(), 'to': lambda t: t.to(torch.float64), 'float': lambda t: t.float(),
    'log': lambda t: t.float().abs().log1p(), 'mean': lambda t: t.float().mean(), 'sum': lambda t: t.sum(), 'arithmetic': lambda t: 2*t + t/3 - t**2,
    'matrix': lambda t: t.float() @ t.float(), 'max': lambda t: t.max(), 'clamp': lambda t: t.clamp(min=1), 'view': lambda t: t.view(-1, 1),
    'index': lambda t: t[:4], 'where': lambda t: torch.where(t > 0, t, 0), 'shape': lambda t: t*t.shape[0], 'sort': lambda t: t.sort().values,
    'dtype': lambda t: torch.zeros(3, dtype=t.dtype), 'long': lambda t: t.long(), 'expand': lambda t: t[:, None].expand(-1, 3), 'cpu': lambda t: t.cpu(),
}


def compiled_alike(f, sampler, n=6):
    "`f` compiled gives what it gives without, for batches of which nothing was read before; return how many graphs that took"
    torch._dynamo.reset()
    graphs, memory = [], filled(sampler=sampler())
    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    twin = copy.deepcopy(memory)
    for k in range(n):
        torch.testing.assert_close(compiled(memory.sample(8)), f(twin.sample(8)), rtol=0, atol=0)
        for m in (memory, twin): m.add(transition(60 + k))
    torch._dynamo.reset()
    return len(graphs)


@pytest.mark.parametrize('sampler', [Uniform, Proportional])
@pytest.mark.parametrize('what', COMPILED)
def test_compiled_functions_read_every_name(what, sampler): assert compiled_alike(COMPILED[what], sampler) <= 1


@pytest.mark.parametrize('name', ['ids', 'probs', 'weights'])
@pytest.mark.parametrize('method', METHODS)
def test_in_compiled_functions_the_header_is_tensors(name, method):
    assert compiled_alike(lambda b: METHODS[method](getattr(b, name)), Proportional, n=3)==1


@pytest.mark.parametrize('made', [lambda v: v.double(), lambda v: v[:, None].expand(-1, 3), lambda v: v.to(torch.bfloat16), lambda v: v*2])
def test_what_leaves_a_compiled_function_knows_its_layout(made):
    "A column of another dtype or shape, for two memories whose layouts differ in it"
    torch._dynamo.reset()
    def f(batch): return batch.replace(action=made(batch.action)), batch.unsqueezed()
    compiled, small = torch.compile(f, fullgraph=True, backend='eager'), ReplayMemory(20, seed=0)
    small.extend([transition(i)._replace(action=np.int16(i)) for i in range(20)])
    for memory in filled(), small, filled(), small:
        batch = memory.sample(8)
        for found, want in zip(compiled(batch), f(copy.copy(batch))):
            assert found.layout is want.layout and found.memory is memory and repr(found)==repr(want)
            assert all(a.dtype==b.dtype and np.array_equal(a, b) for a, b in zip(found.arrays(), want.arrays()))
        again = ReplayMemory(8, seed=0)
        again.extend(compiled(batch)[0])
        assert len(again)==8
    torch._dynamo.reset()


def test_sequences_in_a_compiled_function():
    memory = ReplayMemory(60, sequence=Sequence(4, burn_in=1), seed=0)
    memory.extend([transition(i) for i in range(60)])
    def f(batch): return batch.mask*batch.weights[:, None] + batch.first('reward')[:, None] + batch.idxs, batch.time_first().ids
    compiled, twin = torch.compile(f, fullgraph=True, backend='eager'), copy.deepcopy(memory)
    for _ in range(3): assert all(map(torch.equal, compiled(memory.sample(5)), f(twin.sample(5))))
    torch._dynamo.reset()


# --- threads ----------------------------------------------------------------------------------------------------------
class Marked(NamedTuple):        # every field tells which step it is
    a: Any
    b: Any
    c: Any
    terminated: Any
    truncated: Any
    env_id: Any

def marked(i): return Marked(np.full(40, i, np.int64), i, np.full(7, i, np.float64), False, i % 10==0, i % 4)

def check_marked(batch):
    i = batch.ids
    assert torch.equal(batch.b, i) and (batch.a==i[:, None]).all() and (batch.c==i[:, None]).all() and torch.equal(batch.env_id, i % 4)


@pytest.mark.parametrize('sampler', [lambda: Uniform(True), Proportional])
def test_threads(sampler):
    "One adds, the others draw, look, update and save: no torn row, no error, nothing out of order"
    memory, over, errors, done = ReplayMemory(500, sampler(), seed=0), threading.Event(), [], {}
    memory.extend([marked(i) for i in range(200)])
    rng = np.random.default_rng(0)
    def add():
        i = memory.n_added
        if i % 3: return memory.add(marked(i))
        memory.extend([marked(i + k) for k in range(5)])
    def draw():
        batch = memory.sample(32)
        check_marked(batch)
        held.append(batch)
        if len(held) > 9: check_marked(held.pop(0))
    held = []
    def update(): memory.sample(16).update_priorities(rng.random(16))
    def look():
        check_marked(memory.recent(100))
        id = memory.n_added - 50
        episode = memory.episode(id)
        check_marked(episode)
        assert id in episode.ids
    def save():
        state = memory.state_dict()
        other = ReplayMemory(500, sampler(), seed=1)
        other.load_state_dict(state)
        assert other.check_valid()
        check_marked(other.fetch(np.arange(other.first_id, other.n_added)))
        assert memory.check_valid()
        for o in memory: assert o.a[0]==o.b==o.c[-1]
    def run(f):
        while not over.is_set():
            try:
                f()
                done[f.__name__] = done.get(f.__name__, 0) + 1
            except BaseException as e:     # noqa: BLE001
                errors.append((f.__name__, repr(e)))
                over.set()
            time.sleep(1e-5)
    threads = [threading.Thread(target=run, args=(f,)) for f in (add, draw, update, look, save)]
    for t in threads: t.start()
    over.wait(1)
    over.set()
    for t in threads: t.join()
    assert not errors, errors
    assert memory.check_valid() and min(done.values()) > 0 and len(done)==5
    check_marked(memory.fetch(np.arange(memory.first_id, memory.n_added)))
