"""Weights in shared memory: whole or not at all, in every kind of process, and in time."""
import copy
import gc
import itertools
import multiprocessing
import os
import pickle
import time
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch import nn

from acting import Follower, Make, network, pull_for_a_while
from fastrl_replay.pipes.agents import EpsilonGreedy
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.pipes.weights import SharedAgent, SharedParams
from fastrl_replay.schedules import LinearSchedule
import fastrl_replay.pipes.actors, fastrl_replay.pipes.replay  # noqa: F401
from refusals import refused
from words import WORDS


multiprocessing.set_forkserver_preload(['fastrl_replay.all'])       # its workers start at once then

def set_all(model, v):
    "Every parameter and buffer of the model says `v`"
    with torch.no_grad():
        for t in itertools.chain(model.parameters(), model.buffers()): t.fill_(v)


@pytest.mark.parametrize('ctx,n', [('fork', 2), ('forkserver', 1), ('spawn', 1)])
def test_no_read_is_torn(ctx, n):
    "Readers in other processes, against a writer that only writes, float parameters and whole-number buffers alike"
    ctx = multiprocessing.get_context(ctx)
    model = network(40_000)
    set_all(model, 0)
    shared, stop, results = SharedParams(model), ctx.Event(), ctx.Queue()
    readers = [ctx.Process(target=pull_for_a_while, args=(shared, network(40_000), stop, results), daemon=True) for _ in range(n)]
    for o in readers: o.start()
    for k in itertools.count(1):
        set_all(model, k % 100)
        assert shared.publish(model)==k
        if k > 300 and not results.empty(): break
        assert k < 50_000 and all(o.is_alive() for o in readers)
    stop.set()
    got = []
    while len(got) < n: got += [o for o in [results.get(timeout=60)] if o!='enough']
    for o in readers: o.join(30)
    assert all(o.exitcode==0 for o in readers)
    for torn, versions in got: assert torn==0 and versions==sorted(versions) and versions[-1] <= k
    assert max(len(versions) for _, versions in got) >= 30


def test_a_publication_in_the_middle_of_a_read_is_noticed():
    "Deterministically: the writer strikes during each copy, a given number of times"
    model, reader = nn.Linear(5, 3), nn.Linear(5, 3)
    shared = SharedParams(model)
    class Struck:
        "The data, during whose copying a publication happens"
        def __init__(self, data, times): self.data, self.times = data, times
        def __len__(self): return len(self.data)
        def copy_(self, flat): self.data.copy_(flat)
        def clone(self):
            half = self.data[:40].clone()
            if self.times:
                self.times -= 1
                set_all(model, self.times)
                shared.publish(model)
            return torch.cat([half, self.data[40:]])
    data = shared._data
    for times in (0, 1, 3, 7):
        set_all(model, -1.)
        shared.publish(model)
        shared._data = Struck(data, times)
        assert shared.pull(reader)==shared.version and all((p==(0 if times else -1)).all() for p in reader.parameters())
    shared._data, before, have = Struck(data, 10**6), copy.deepcopy(reader.state_dict()), shared.version - 1
    assert shared.pull(reader, have)==have and shared.n_torn==1
    assert all(torch.equal(a, b) for a, b in zip(before.values(), reader.state_dict().values()))


def test_a_publication_broken_off_is_not_read():
    model, reader = nn.Linear(5, 3), nn.Linear(5, 3)
    shared = SharedParams(model)
    want = shared.pull(reader)
    class Broken:
        "Ctrl-C in the middle of the write"
        def __init__(self, data): self.data = data
        def __len__(self): return len(self.data)
        def copy_(self, flat):
            self.data[:20].copy_(flat[:20])
            raise KeyboardInterrupt
    data = shared._data
    shared._data = Broken(data)
    set_all(model, 7.)
    with pytest.raises(KeyboardInterrupt): shared.publish(model)
    shared._data = data
    assert shared.version==want and shared.pull(reader, have=-5)==-5
    assert shared.publish(model)==want + 1 and shared.pull(reader)==want + 1


MODELS = dict(linear=lambda: nn.Linear(4, 2), norm=network, half=lambda: network().to(torch.bfloat16), double=lambda: network().double(),
              conv=lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last), tied=lambda: Follower(),
              nothing=lambda: nn.ReLU())

@pytest.mark.parametrize('kind', MODELS)
def test_every_bit_arrives(kind):
    a, b = MODELS[kind](), MODELS[kind]()
    for t in a.buffers(): t.copy_(torch.full_like(t, 2**53 + 1 if t.dtype==torch.int64 else 1.7))
    shared = SharedParams(a)
    where = [t.data_ptr() for t in b.parameters()]
    assert shared.pull(b)==0 and [t.data_ptr() for t in b.parameters()]==where, 'not in place'
    for x, y in zip(itertools.chain(a.parameters(), a.buffers()), itertools.chain(b.parameters(), b.buffers())):
        assert x.dtype==y.dtype and torch.equal(x, y) and x.stride()==y.stride() and y.requires_grad==x.requires_grad
    for wrong in (nn.Linear(4, 3), network(7), nn.Linear(4, 2).double()):
        with refused('model'): shared.publish(wrong)
        with refused('model'): shared.pull(wrong)
        assert shared.version==0


def test_a_model_on_another_device():
    "There is no GPU here, so the paths are followed on the CPU, and a device without data is refused with torch's own words"
    model = nn.Linear(4, 2)
    shared = SharedParams(model)
    with pytest.raises(NotImplementedError, match=WORDS['no meta tensors']): shared.publish(copy.deepcopy(model).to('meta'))
    assert shared.version==0 and shared.pull(nn.Linear(4, 2))==0
    agent = SharedAgent(EpsilonGreedy(model, 0.), shared, device=torch.device('cpu'))
    assert next(agent.model.parameters()).device.type=='cpu' and agent.model is not model


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs CUDA')
def test_across_cuda():
    model = network().cuda()
    shared, here = SharedParams(model), network()
    assert shared.pull(here)==0 and all(torch.equal(x.cpu(), y) for x, y in zip(model.state_dict().values(), here.state_dict().values()))
    set_all(here, 3)
    shared.publish(here)
    assert shared.pull(model, 0)==1 and all((t==3).all() for t in model.state_dict().values())
    assert next(SharedAgent(EpsilonGreedy(model, 0.), shared).model.parameters()).device.type=='cpu'


def test_it_goes_into_new_processes_only_and_is_never_copied():
    shared = SharedParams(nn.Linear(4, 2))
    for f in (pickle.dumps, ForkingPickler.dumps, lambda o: torch.save(o, os.devnull)):
        with pytest.raises(RuntimeError, match=WORDS['no copy of weights']): f(shared)
    assert copy.deepcopy([shared])[0] is shared


def test_no_file_stays_open():
    def count(): return len(os.listdir('/proc/self/fd')) if os.path.isdir('/proc/self/fd') else 0
    gc.collect()
    before = count()
    many = [SharedParams(nn.Linear(4, 2)) for _ in range(20)]
    assert count()==0 or count() > before
    del many
    gc.collect()
    assert count()==before


# --- agents -------------------------------------------------------------------------------------------------------------
def acting(model, n, eps=.5, ctx='fork', **kw):
    shared = SharedParams(model)
    agent = SharedAgent(EpsilonGreedy(model, eps, seed=0), shared)
    return shared, GymStepper([Make()], agent=agent, seed=0).actors(n, ctx=ctx, chunk=16, **kw)

@pytest.mark.parametrize('n,ctx', [(0, 'fork'), (1, 'spawn'), (2, 'fork')])
def test_what_is_published_is_acted_by_within_two_chunks(n, ctx):
    "The greedy action is the number of the publication, modulo two: seen in the steps themselves, not in what a worker says of itself"
    model = nn.Linear(3, 2)
    def prefer(a):
        with torch.no_grad():
            model.weight.zero_()
            model.bias.copy_(torch.tensor([1. - a, float(a)]))
    prefer(0)
    shared, pipe = acting(model, n, eps=0., ctx=ctx)
    it = iter(pipe)
    for k in range(6):
        prefer(k % 2)
        shared.publish(model)
        late = [next(it) for _ in range(2*max(1, n))]
        for c in [next(it) for _ in range(max(1, n))]:
            assert c.action.unique().tolist()==[k % 2], f'publication {k} was not used after two chunks'
        assert len(late[0])==16 and all(v==shared.version for v in pipe.stats()['versions'])
    assert pipe.stats()['versions']==[6]*max(1, n)
    pipe.close()


def test_exploration_counts_the_steps_of_all():
    "Three actors decay together: after n steps in all, ε is that of n, give or take what is under way"
    shared, pipe = acting(nn.Linear(3, 2), 3, eps=LinearSchedule(1., 0., 3000))
    random = []
    for chunk in itertools.islice(pipe, 120): random.append(chunk.action.float().mean().item())
    n = sum(pipe.stats()['n_steps'])
    time.sleep(.2)
    assert n==16*120 <= shared.n_steps <= n + 3*3*16
    agent = pipe.source_datapipe.agent
    agent.sync()
    assert agent.n_steps==shared.n_steps and agent.eps_now()==pytest.approx(1 - shared.n_steps/3000)
    pipe.close()


def test_epsilon_is_the_one_of_all_steps_in_the_workers_too():
    "With a schedule that falls from 1 to 0 at a step, every worker stops exploring at that step of the run, not at that of its own"
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([0., 1.]))
    shared, pipe = acting(model, 2, eps=Fall(640))
    chunks = [c.action.tolist() for c in itertools.islice(pipe, 80)]
    pipe.close()
    first = next(k for k in range(80) if all(set(c)=={1} for c in chunks[k:]))
    assert 40 - 2*3 <= first <= 40 + 2*3 and all(0 in c for c in chunks[:30])


class Fall:
    "ε is 1 before step `n`, then 0"
    def __init__(self, n): self.n = n
    def __call__(self, k): return float(k < self.n)


def test_training_is_left_alone():
    "The agent's model is the one that is trained: pulling must not put old weights back into it, in this process or another"
    model = nn.Linear(3, 2)
    shared, pipe = acting(model, 0)
    set_all(model, 5)
    for _ in zip(range(3), pipe): pass
    assert all((p==5).all() for p in model.parameters()) and not any(p.is_shared() for p in model.parameters())
    assert model.training and all(p.requires_grad for p in model.parameters())
    shared, pipe = acting(model, 1, ctx='forkserver')
    for _ in zip(range(3), pipe): pass
    pipe.close()
    assert all((p==5).all() and not p.is_shared() for p in model.parameters())


def test_batch_norm_acts_by_what_was_published():
    model = network()
    for _ in range(5): model(torch.randn(16, 3)*4 + 1)
    shared = SharedParams(model)
    agent = SharedAgent(EpsilonGreedy(model, 0.), shared)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    for _ in range(3): agent(x)
    model.eval()
    assert np.allclose(agent.q_values(x), model(torch.from_numpy(x)).detach().numpy(), atol=1e-6)
    assert agent.model[1].num_batches_tracked==5


def test_a_state_brings_back_the_number_of_all_steps():
    shared, pipe = acting(nn.Linear(3, 2), 2, eps=LinearSchedule(1., 0., 5000))
    for _ in zip(range(20), pipe): pass
    state = pipe.state_dict()
    pipe.close()
    assert state['source']['agent']['n_steps'] >= 320
    shared, other = acting(nn.Linear(3, 2), 2, eps=LinearSchedule(1., 0., 5000))
    other.load_state_dict(state)
    assert shared.n_steps==state['source']['agent']['n_steps']
    for _ in zip(range(5), other): pass
    assert shared.n_steps >= state['source']['agent']['n_steps'] + 80
    other.close()


def test_a_learner_publishes():
    "When a fit begins, and every few batches; what is published is the model at that moment"
    from fastrl_replay.learner import DQNLearner
    model = network()
    shared, pipe = acting(model, 0)
    seen = []
    publish = shared.publish
    shared.publish = lambda m: seen.append((learn.n_batches, m[0].weight.sum().item())) or publish(m)
    learn = DQNLearner(model, pipe.experience_replay(bs=8, min_sz=16, max_sz=200, seed=0).loader(), shared=shared, publish_every=5)
    start = model[0].weight.sum().item()
    learn.fit(12)
    assert [n for n, _ in seen]==[0, 5, 10] and seen[0][1]==start and len({w for _, w in seen})==3 and shared.version==3
    learn.fit(3)
    assert [n for n, _ in seen][3:]==[12, 15] and seen[-1][1]==model[0].weight.sum().item()
    pipe.close()
