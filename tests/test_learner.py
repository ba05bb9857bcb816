"The learner's arithmetic, against worlds and sums small enough to check by hand"
import copy
import itertools
import re
import sys
import tracemalloc
from functools import partial

import gymnasium as gym
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import nn

from fastrl_replay.batch import Batch
from fastrl_replay.learner import DQNLearner, EndedEpisodes, Learner, OneHot, dqn_loss, evaluate, q_network, q_targets
from fastrl_replay.gradient_step import clip_gradients
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.agents import EpsilonGreedy
from fastrl_replay.pipes.n_step import NStep
from fastrl_replay.pipes.replay import ExperienceReplay, PrioritizedReplay
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.pipes.weights import SharedParams
from fastrl_replay.runs import BestWeights
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.storage.sequence_sampler import Sequence
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.schedules import LinearSchedule
from fastrl_replay.show import plot_training
from fastrl_replay.steps import SimpleStep, Transition, derived_type
from refusals import about, refused
from words import words

matplotlib.use('agg')


class Table(nn.Module):
    "Q-values of numbered states"
    def __init__(self, q):
        super().__init__()
        self.q = nn.Parameter(torch.as_tensor(q, dtype=torch.float32).clone())
    def forward(self, s): return self.q[s.long()]


def rows(*steps): return Batch.of(type(steps[0])(*(np.array(o) for o in zip(*steps))))
def T(s=0, a=0, r=1., t=1, terminated=False, truncated=False): return Transition(s, a, r, t, terminated, truncated)


# ---- targets

MODEL, TARGET = Table([[0., 0.], [3., 2.]]), Table([[0., 0.], [10., 20.]])      # the model prefers 0, the target 1


@pytest.mark.parametrize('double,future', [(True, 10.), (False, 20.)])
def test_who_picks_and_who_rates(double, future):
    assert q_targets(rows(T()), MODEL, TARGET, .5, double).tolist() == [1 + .5*future]


def test_an_end_is_no_cut():
    batch = rows(T(), T(terminated=True), T(truncated=True), T(terminated=True, truncated=True))
    assert q_targets(batch, MODEL, TARGET, .5).tolist() == [6., 1., 6., 1.]


def test_the_next_state_of_an_end_may_be_garbage():
    assert q_targets(rows(T(terminated=True)), MODEL, Table([[0., 0.], [np.nan, np.nan]]), .5).tolist() == [1.]


def test_the_discount_column_counts():
    step = derived_type('Discounted', (*Transition._fields, 'discount'))
    assert q_targets(rows(step(*T(), .25), step(*T(), .5)), MODEL, TARGET, gamma=.9).tolist() == [1 + .25*10, 1 + .5*10]


def test_targets_carry_no_gradient():
    assert not q_targets(rows(T()), MODEL, TARGET).requires_grad


# ---- one update

def drawn(memory, weights=None):
    "A batch with the importance weights given"
    batch = memory.sample(len(memory))
    if weights is not None: batch.weights = torch.as_tensor(weights, dtype=torch.float32)
    return batch


def loss_of(weights):
    memory = ReplayMemory(2, Proportional(), seed=0)
    memory.extend(rows(T(r=1.), T(r=1.)))
    learn = DQNLearner(Table(np.zeros((2, 2))), [drawn(memory, weights)], gamma=0.)
    learn.fit(1)
    return learn.losses[0], learn


def test_weights_scale_the_loss_and_the_gradient():
    ones, _ = loss_of([1., 1.])
    assert ones == pytest.approx(.5)                       # smooth L1 of an error of 1
    assert loss_of([.5, .5])[0] == pytest.approx(.25)
    assert loss_of([1., 0.])[0] == pytest.approx(.25)


def test_weights_go_row_by_row():
    memory = ReplayMemory(2, Uniform(), seed=0)
    memory.extend(rows(T(a=0), T(a=1)))
    model = Table(np.zeros((2, 2)))
    batch = drawn(memory)
    batch.weights = (batch.action==1).float()
    DQNLearner(model, [batch], gamma=0.).fit(1)
    assert model.q[0, 0] == 0 and model.q[0, 1] > 0


def test_without_weights_the_mean():
    learn = DQNLearner(Table(np.zeros((2, 2))), [rows(T(), T(r=3.))], gamma=0.)
    learn.fit(1)
    assert learn.losses == [pytest.approx((.5 + 2.5)/2)]


def test_priorities_are_the_errors_from_before_the_update():
    memory = ReplayMemory(4, Proportional(eps=0.), seed=0)
    memory.extend(rows(*(T(r=float(r)) for r in (1, 2, 3, 4))))
    batch = memory.sample(16)
    DQNLearner(Table(np.zeros((2, 2))), [batch], gamma=0.).fit(1)
    want = np.ones(4)
    want[batch.ids.numpy()] = batch.reward.numpy()
    assert np.array_equal(memory.sampler.priorities, want)


def test_a_batch_without_a_memory_is_fine():
    learn = DQNLearner(Table(np.zeros((2, 2))), [rows(T())])
    assert learn.fit(5).n_batches == 5 and learn.returns == [] and learn.n_steps == 0


def test_pairs_of_batch_and_slots_are_fine():
    replay = ExperienceReplay([SimpleStep(0, 0, 1)]*20, bs=2, max_sz=20, return_idxs=True, seed=0)
    assert DQNLearner(Table(np.zeros((2, 2))), replay.loader()).fit(4).n_batches == 4


def test_the_target_is_copied_every_so_often():
    learn = DQNLearner(Table(np.zeros((2, 2))), [rows(T())], target_sync=3)
    same = []
    for _ in range(7):
        learn.fit(1)
        same.append(torch.equal(learn.model.q, learn.target.q))
    assert same == [False, False, True, False, False, True, False]
    assert not any(p.requires_grad for p in learn.target.parameters())


def test_the_learning_rate_may_be_a_schedule():
    learn = DQNLearner(Table(np.zeros((2, 2))), [rows(T())], lr=LinearSchedule(.1, .01, 10))
    rates = []
    learn.fit(12, lambda o: rates.append(o.optimizer.param_groups[0]['lr']))
    assert rates[0] == .1 and rates[5] == pytest.approx(.055) and rates[-1] == .01


def test_the_gradient_is_clipped():
    model = Table(np.zeros((2, 2)))
    learn = DQNLearner(model, [rows(T(r=1e6))], max_norm=1e-3)
    learn.fit(1)
    assert model.q.grad.norm() == pytest.approx(1e-3, rel=1e-3)


def test_a_double_model_gets_double_states():
    class Only64(nn.Linear):
        def forward(self, x):
            assert x.dtype==torch.float64
            return super().forward(x)
    s = np.zeros((1, 3), np.uint8)
    DQNLearner(Only64(3, 2, dtype=torch.float64), [Batch.of(Transition(s, [0], [1.], s, [False], [False]))]).fit(2)


# ---- a loss, an optimizer, a target of one's own

def pulled(learn, batch):
    "The parameters after one update, as a plain list"
    learn.update(batch)
    return [p.detach().clone() for p in learn.model.parameters()]


def squares(batch, model, target): return (batch.reward - model(batch.state).gather(1, batch.action[:, None])[:, 0]).square()


def by_torch(model, f, n=1, lr=.1):
    "The parameters after `n` steps of plain gradient descent on f(model)"
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(n):
        optimizer.zero_grad()
        f(model).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize('n', [1, 2, 5])
@pytest.mark.parametrize('shape', ['rows', 'column', 'grid', 'number'])
def test_a_loss_of_ones_own(shape, n):
    batch, weights = rows(T(r=3.), T(s=1, r=5.), T(s=1, a=1)), torch.tensor([1., .5, .25])
    batch.weights = weights
    shapes = dict(rows=lambda o: o, column=lambda o: o[:, None], grid=lambda o: torch.stack([o, 3*o], 1)/2, number=lambda o: (weights*o).mean())
    model = Table(np.zeros((2, 2)))
    want = by_torch(model, lambda m: (weights*squares(batch, m, None)).mean(), n)
    learn = DQNLearner(model, [], loss=lambda *o: shapes[shape](squares(*o)), optimizer=partial(torch.optim.SGD, lr=.1), gradient_steps=n, max_norm=None)
    assert all(torch.allclose(a, b) for a, b in zip(pulled(learn, batch), want))
    assert learn.n_batches == len(learn.losses) == 1


@pytest.mark.parametrize('kind', ['losses', 'pair', 'number'])
def test_which_priorities_a_loss_brings(kind):
    memory = ReplayMemory(4, Proportional(eps=0.), seed=0)
    memory.extend(rows(*(T(r=float(r)) for r in (1, 2, 3, 4))))
    def loss(batch, model, target):
        found = squares(batch, model, target)
        return dict(losses=found, pair=(found, -7*batch.reward), number=found.mean())[kind]
    batch = memory.sample(16)
    Learner(Table(np.zeros((2, 2))), [batch], loss).fit(1)
    want, ids = np.ones(4), batch.ids.numpy()
    if kind!='number': want[ids] = batch.reward.numpy()**2 if kind=='losses' else 7*batch.reward.numpy()
    assert np.allclose(memory.sampler.priorities, want)


def test_the_loss_gets_batch_model_and_target():
    seen = []
    def loss(*args):
        seen.append(args)
        return squares(*args)
    batch, learn = rows(T()), Learner(Table(np.zeros((2, 2))), [], loss)
    learn.update(batch)
    assert len(seen) == 1 and seen[0][0] is batch and seen[0][1] is learn.model and seen[0][2] is learn.target


def test_the_default_loss_is_that_of_a_double_dqn():
    batch = rows(T(), T(a=1, r=4., terminated=True))
    for double in (True, False):
        learn, model = DQNLearner(copy.deepcopy(MODEL), [], .5, double=double, optimizer=torch.optim.SGD, lr=1.), copy.deepcopy(MODEL)
        losses, errors = dqn_loss(batch, model, learn.target, .5, double)
        want = q_targets(batch, MODEL, MODEL, .5, double) - MODEL.q.detach()[0, batch.action]
        assert torch.equal(errors, want) and not errors.requires_grad
        assert torch.allclose(losses, torch.nn.functional.smooth_l1_loss(torch.zeros(2), want, reduction='none'))
        assert torch.allclose(pulled(learn, batch)[0], by_torch(MODEL, lambda m: dqn_loss(batch, m, MODEL, .5, double)[0].mean(), lr=1.)[0])


def test_the_learning_rate_is_the_optimizers_own():
    def rate(**kw): return DQNLearner(Table(np.zeros((2, 2))), [rows(T())], **kw).fit(3).optimizer.param_groups[0]['lr']
    own = partial(torch.optim.RMSprop, lr=.03)
    assert rate() == 1e-3 and rate(optimizer=own) == .03 and rate(optimizer=own, lr=.5) == .5
    assert rate(optimizer=own, lr=LinearSchedule(1., 0., 4)) == .5


def test_groups_of_parameters():
    def two(parameters):
        first, *rest = parameters
        return torch.optim.SGD([dict(params=[first], lr=.5), dict(params=rest)], lr=.1)
    learn = DQNLearner(net(), [], optimizer=two)
    s = np.ones((2, 4), np.float32)
    learn.update(Batch.of(Transition(s, [0, 1], [1., 2.], s, [True]*2, [False]*2)))
    assert [g['lr'] for g in learn.optimizer.param_groups] == [.5, .1]


@pytest.mark.parametrize('tau,sync,every', [(.3, None, 1), (.3, 2, 2), (1., None, 250), (1., 3, 3)])
def test_the_target_moves(tau, sync, every):
    class Counts(Table):
        def __init__(self, q):
            super().__init__(q)
            self.register_buffer('n', torch.zeros((), dtype=torch.int64))
        def forward(self, s):
            self.n += self.training
            return super().forward(s)
    learn = DQNLearner(Counts(np.zeros((2, 2))), [rows(T())], target_sync=sync, tau=tau, optimizer=torch.optim.SGD, lr=.5)
    want, n = torch.zeros(2, 2), 0
    for k in range(1, 8):
        learn.fit(1)
        if k % every==0: want, n = (1 - tau)*want + tau*learn.model.q.detach(), int(learn.model.n)
        assert torch.allclose(learn.target.q, want) and (every > 7 or int(learn.target.n)==n or k % every)


def test_clipping_is_torchs():
    rng = np.random.default_rng(0)
    for _ in range(300):
        model, norm = net(), float(rng.choice([.01, 1., 5.]))
        x = torch.from_numpy(rng.normal(size=(5, 4)).astype(np.float32)*np.float32(rng.choice([.1, 1, 10])))
        for m in (model, twin := copy.deepcopy(model)): m(x).square().mean().backward()
        frozen = model[0].bias.grad = twin[0].bias.grad = None
        clip_gradients([*model.parameters()], norm)
        nn.utils.clip_grad_norm_(twin.parameters(), norm)
        assert frozen is None and all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-9) for a, b in zip(model.parameters(), twin.parameters()) if b.grad is not None)


def test_no_clipping():
    def norm(**kw):
        learn = DQNLearner(Table(np.zeros((2, 2))), [rows(T(r=1e6))], gamma=0., loss=squares, **kw)
        learn.fit(1)
        return learn.model.q.grad.norm().item()
    assert norm() == pytest.approx(10., rel=1e-4) and norm(max_norm=None) == 2e6


def test_a_recurrent_loss_over_sequences():
    "Rows are windows (bs, length, …): the loss burns in, masks, and returns errors (bs, length)"
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 2)
        def forward(self, s): return self.head(self.cell(s)[0])
    def loss(batch, model, target):
        q = model(batch.state).gather(2, batch.action[..., None])[..., 0][:, 2:]
        errors = batch.reward[:, 2:] - q
        return errors.square().sum(1), errors.detach()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    s = rng.integers(0, 2, (64, 5, 1)).astype(np.float32)
    memory = ReplayMemory(64, Proportional(), seed=0)
    Window = derived_type('Window', ('state', 'action', 'reward'))
    memory.extend(Window(s, np.zeros((64, 5), np.int64), s[:, [0, 0, 0, 1, 2], 0]))      # pays what was seen two steps before
    class Mean:           # what stands for a sequence's priority: its largest error
        def __init__(self, batch): self.__dict__.update(batch=batch)
        def __getattr__(self, name): return getattr(self.batch, name)
        def to(self, device): return self
        def update_priorities(self, errors): return self.batch.update_priorities(errors.abs().amax(1))
    learn = Learner(Remembers(), (Mean(memory.sample(32)) for _ in itertools.count()), loss, lr=.01)
    learn.fit(300)
    assert np.mean(learn.losses[:5]) > .5 and np.mean(learn.losses[-5:]) < .15
    assert len({*memory.sampler.priorities.tolist()}) > 20


@pytest.mark.parametrize('bad,what', [(dict(tau=0.), ('tau', 'a number above 0, at most 1', '0.0')), (dict(tau=1.5), ('tau', 'a number above 0, at most 1', '1.5')),
                                      (dict(tau=float('nan')), 'tau'), (dict(gradient_steps=0), 'gradient_steps'), (dict(target_sync=.5), 'target_sync'),
                                      (dict(max_nrom=3), words('an unknown option', name='max_nrom'))])
def test_bad_options(bad, what):
    with about(what, (ValueError, TypeError)): DQNLearner(Table(np.zeros((2, 2))), [], **bad)


@pytest.mark.parametrize('n', [-1, 1.5, None])
def test_a_number_of_batches_that_is_none_is_refused(n):
    learn = DQNLearner(Table(np.zeros((2, 2))), [])
    with refused('n_batches'): learn.fit(n)
    assert learn.fit(0) is learn


# ---- what an update doesn't do

def test_td_errors_go_to_samplers_that_want_them(monkeypatch):
    asked = []
    monkeypatch.setattr(Batch, 'update_priorities', lambda batch, errors: asked.append(len(errors)))
    for sampler in Uniform(), Proportional():
        memory = ReplayMemory(4, sampler, seed=0)
        memory.extend(rows(*(T(r=float(r)) for r in (1, 2, 3, 4))))
        learn = DQNLearner(Table(np.zeros((2, 2))), [memory.sample(4)]).fit(3)
        assert learn.memory is memory
    assert asked == [4, 4, 4]


def test_losses_are_read_in_one_go(monkeypatch):
    learn, read = DQNLearner(net(), [random_rows(16)], lr=.01), []
    whole = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, 'tolist', lambda t: read.append(len(t)) or whole(t))
    monkeypatch.setattr(torch.Tensor, 'item', None)
    for k in range(250): learn.update(random_rows(16, k))
    assert read == [100, 100]
    assert len(learn.losses) == 250 and read == [100, 100, 50] and learn.losses[-1] == pytest.approx(learn.progress()['loss'], rel=2)
    assert all(type(o) is float for o in learn.losses) and read == [100, 100, 50]
    again = DQNLearner(net(), [random_rows(16)], lr=.01)
    again.update(random_rows(16))
    again.load_state_dict(learn.state_dict())
    assert again.losses == learn.losses and len({*learn.losses}) == 250


# ---- one graph

def random_rows(n, seed=0, discount=False):
    "Random transitions of four numbers and two actions, some of them ends"
    rng = np.random.default_rng(seed)
    step = Transition(rng.normal(size=(n, 4)).astype(np.float32), rng.integers(0, 2, n), rng.normal(size=n).astype(np.float32),
                      rng.normal(size=(n, 4)).astype(np.float32), rng.random(n) < .2, rng.random(n) < .1)
    if not discount: return Batch.of(step)
    return Batch.of(derived_type('Discounted', (*step._fields, 'discount'))(*step, rng.random(n).astype(np.float32)))


class Normed(nn.Module):
    "With buffers that each forward changes (one of them by assigning it), and a layer that isn't trained"
    def __init__(self):
        super().__init__()
        self.frozen, self.norm, self.head = nn.Linear(4, 8).requires_grad_(False), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer('seen', torch.zeros(()))
    def forward(self, s):
        if self.training: self.seen = self.seen + len(s)
        return self.head(self.norm(self.frozen(s)))


def two_groups(parameters):
    first, *rest = parameters
    return torch.optim.AdamW([dict(params=[first], lr=.01, weight_decay=.1), dict(params=rest)], lr=3e-3, amsgrad=True)


def cubes(batch, model, target):
    "A loss of one number for the batch"
    return (batch.reward - model(batch.state.double()).gather(1, batch.action[:, None])[:, 0]).abs().pow(3).mean()


def on_doubles(batch, model, target): return squares(batch.replace(state=batch.state.double()), model, target)


GRAPHS = {      # a case, and how many graphs it takes
    'double, clipped, a schedule': (dict(max_norm=.05, lr=LinearSchedule(.02, .001, 50)), 1),
    'single, hardly clipped, a soft target': (dict(double=False, max_norm=2., tau=.05), 1),
    'not clipped, a soft target at times': (dict(max_norm=None, tau=.3, target_sync=7), 1),
    'several steps, a hard target': (dict(gradient_steps=3, target_sync=5), 1),
    'a loss of one number': (dict(loss=cubes), 1), 'plain Adam': (dict(loss=on_doubles, optimizer=partial(torch.optim.Adam, lr=.01, fused=False)), 1),
    'groups': (dict(optimizer=two_groups), 1), 'buffers': (dict(model=Normed, tau=.1), 2),      # torch begins again where a float64 number is read
    'discounts': (dict(discount=True), 1),
}


@pytest.fixture
def graphs(monkeypatch):
    "The graphs made since: without the compiler that writes C++, so that it is quick"
    torch._dynamo.reset()
    made, plain, whole = [], torch._dynamo.lookup_backend('aot_eager'), torch.compile
    def backend(gm, inputs):
        made.append(gm)
        return plain(gm, inputs)
    monkeypatch.setattr(torch, 'compile', lambda f, **kw: whole(f, **{'backend': backend, **kw}))
    yield made
    torch._dynamo.reset()


def memory_of(n=200, sampler=None, **kw):
    memory = ReplayMemory(n, sampler or Proportional(), seed=0)
    memory.extend(random_rows(n, **kw))
    return memory


def twins(model=None, discount=False, dtype=torch.float64, **kw):
    "An eager and a compiled learner, each with a memory of its own, and functions that learn from n batches"
    torch.manual_seed(0)
    first, found = (model or net)().to(dtype), []
    for compile in (False, True):
        learn = DQNLearner(copy.deepcopy(first), [], compile=compile, **{'lr': .01, **kw} if 'optimizer' not in kw else kw)
        memory = memory_of(discount=discount)
        found.append((learn, memory, lambda n, learn=learn, memory=memory: [learn.update(memory.sample(32)) for _ in range(n)]))
    return found


def close(a, b, rtol=1e-6, atol=1e-7):
    assert a.keys() == b.keys()
    for k in a: torch.testing.assert_close(a[k], b[k], rtol=rtol, atol=atol, msg=lambda m, k=k: f'{k}: {m}')


def alike(eager, memory, compiled, other, rtol=1e-6, atol=1e-7):
    "Both have learned the same, and say so in the same form"
    close(eager.model.state_dict(), compiled.model.state_dict(), rtol, atol)
    close(eager.target.state_dict(), compiled.target.state_dict(), rtol, atol)
    assert np.allclose(eager.losses, compiled.losses, rtol=max(rtol, 1e-6)) and eager.n_batches == compiled.n_batches
    assert np.allclose(memory.sampler.priorities, other.sampler.priorities, rtol=max(rtol, 1e-6), atol=atol)
    a, b = eager.optimizer.state_dict(), compiled.optimizer.state_dict()
    assert a['param_groups'] == b['param_groups'] and a['state'].keys() == b['state'].keys()
    for k in a['state']: close(a['state'][k], b['state'][k], rtol, atol)


@pytest.mark.parametrize('case', GRAPHS)
def test_a_compiled_update_is_the_eager_one(case, graphs):
    options, n_graphs = GRAPHS[case]
    (eager, memory, learn), (compiled, other, learn_compiled) = twins(**options)
    places = [p.data_ptr() for p in compiled.model.parameters()]
    for _ in range(3):
        learn(20)
        learn_compiled(20)
        alike(eager, memory, compiled, other)
    assert [p.data_ptr() for p in compiled.model.parameters()] == places
    assert len(graphs) == n_graphs and len({*compiled.losses}) == 60


def test_a_compiled_update_in_c_plus_plus():
    "Everything at once, with torch's own backend, to the accuracy of float32"
    torch._dynamo.reset()
    (eager, memory, learn), (compiled, other, learn_compiled) = twins(dtype=torch.float32, lr=LinearSchedule(2e-3, 1e-4, 50), tau=.05, max_norm=.05, discount=True)
    learn(60)
    learn_compiled(60)
    alike(eager, memory, compiled, other, 1e-3, 1e-4)
    assert len({*compiled.losses}) == 60
    torch._dynamo.reset()


def test_an_eager_run_goes_on_compiled_and_back(graphs, tmp_path):
    (eager, memory, learn), (compiled, other, learn_compiled) = twins(tau=.1)
    learn(10)
    for _ in range(2):                                   # saved eager, loaded compiled
        eager.save(tmp_path/'eager')
        compiled.load(tmp_path/'eager')
        other.load_state_dict(memory.state_dict())
        learn(10)
        learn_compiled(10)
        alike(eager, memory, compiled, other)
    compiled.save(tmp_path/'compiled')
    eager.load(tmp_path/'compiled')
    close(eager.optimizer.state_dict()['state'][0], compiled.optimizer.state_dict()['state'][0], 0, 0)
    learn(10)
    learn_compiled(10)
    alike(eager, memory, compiled, other)
    assert eager.optimizer.state_dict()['state'][0]['step']==40 and len(graphs)==1


def test_compiled_weights_are_published_and_played(graphs):
    model = net()
    shared, far = SharedParams(model), net(5)
    learn = DQNLearner(model, [random_rows(32)], lr=.01, shared=shared, publish_every=2, compile=True)
    learn.fit(4)
    shared.pull(far)
    assert all(map(torch.equal, far.parameters(), model.parameters())) and not torch.equal(model[0].weight, net()[0].weight)
    assert learn.evaluate('CartPole-v1', 2).tolist() == by_hand(model, np.random.SeedSequence(0).generate_state(2))
    best = BestWeights('CartPole-v1', every=2, episodes=2, confirm=0)
    learn.fit(4, best)
    best.restore(learn)
    learn.fit(1)
    assert len(graphs) == 1


@torch._dynamo.config.patch(recompile_limit=2)
def test_more_compiled_learners_than_torch_keeps_graphs(graphs):
    "Each with another γ, in turn; and batches of many sizes"
    pairs = [twins(gamma=.9 + k/100) for k in range(3)]
    for _ in range(2):
        for pair in pairs:
            for _, _, learn in pair: learn(3)
    (eager, memory, _), (compiled, other, _) = pairs[0]
    for n in (5, 64, 100, 17, 32, 33, 2, 3, 4):
        for learn, m in ((eager, memory), (compiled, other)): learn.update(m.sample(n))
    for (eager, memory, _), (compiled, other, _) in pairs: alike(eager, memory, compiled, other)
    assert len(graphs) == 4


def test_a_compiled_loss_of_sequences(graphs):
    def loss(batch, model, target):
        errors = (batch.reward - model(batch.state).amax(2))*batch.learn
        return errors.square(), errors
    found = []
    for compile in (False, True):
        memory = ReplayMemory(200, Proportional(), sequence=Sequence(4, burn_in=1), seed=0)
        memory.extend(random_rows(200), streams='one')
        learn = Learner(net(), [], loss, .01, compile=compile)
        for _ in range(20): learn.update(memory.sample(16))
        found.append((learn, memory))
    (eager, memory), (compiled, other) = found
    close(eager.model.state_dict(), compiled.model.state_dict())
    assert np.allclose(eager.losses, compiled.losses, rtol=1e-3) and len(graphs) == 1


def test_a_compiled_loss_may_be_random(graphs):
    def noisy(batch, model, target): return model(batch.state + torch.randn_like(batch.state)).square().sum(1)
    learn, batch = Learner(net(), [], noisy, lr=0., compile=True), random_rows(32)
    for _ in range(5): learn.update(batch)
    assert len({*learn.losses}) == 5


def test_what_cannot_be_compiled(graphs):
    extra = nn.Parameter(torch.zeros(()))
    with refused('compile'):
        DQNLearner(net(), [], optimizer=lambda p: torch.optim.Adam([*p, extra]), compile=True)
    def branches(batch, model, target): return squares(batch, model, target)*(2 if batch.reward.sum() > 0 else 3)
    model = net()
    learn = Learner(model, [], branches, compile=True)
    with pytest.raises(RuntimeError) as e: learn.update(random_rows(8))
    assert 'compile=True: torch must be able to trace model and loss' in ''.join(e.value.__notes__)
    assert learn.n_batches == len(learn.losses) == 0 and all(map(torch.equal, model.parameters(), net().parameters()))


def test_without_a_compiler_one_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv('PATH', str(tmp_path))
    for name in 'CXX', 'TORCH_INDUCTOR_INSTALL_GXX': monkeypatch.delenv(name, raising=False)
    DQNLearner(net(), [])
    for name in {'linux': 'g++', 'darwin': 'clang++', 'win32': 'cl'}[sys.platform], 'no-such':
        if name=='no-such': monkeypatch.setenv('CXX', name)
        with pytest.raises(RuntimeError, match=words('no compiler', name=repr(name))):
            DQNLearner(net(), [], compile=True)


# ---- images

def images(*shape, dtype=np.uint8): return gym.spaces.Box(0, 255 if dtype==np.uint8 else 1, shape, dtype)


@pytest.mark.parametrize('c,side', [(4, 84), (1, 36), (3, 35), (2, 8)])
def test_channels_first_or_last(c, side):
    first, last = q_network(images(c, side, side + 1), 3, seed=0), q_network(images(side, side + 1, c), 3, seed=0)
    x = torch.randint(0, 256, (5, c, side, side + 1), dtype=torch.uint8)
    assert torch.allclose(first(x), last(x.permute(0, 2, 3, 1)), atol=1e-6)
    convolutions = [m for m in last if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == ([32, 64, 64] if side >= 36 else [16]) and first(x).shape == (5, 3)
    assert torch.allclose(first(x), first[1:](x/255), atol=1e-6)


def test_channels_are_last_where_both_axes_are_alike():
    "MinAtar's Seaquest: ten by ten, with ten channels"
    model, x = q_network(images(10, 10, 10, dtype=np.bool_), 2, seed=0), torch.rand(3, 10, 10, 10)
    assert torch.equal(model(x), model[1:](x.permute(0, 3, 1, 2))) and not torch.equal(model(x), model[1:](x))


def test_what_is_no_image_is_flattened():
    for space in (images(7, 7, 3), images(84, 84), images(4, 84, 84, 3), images(5, 5, 5, dtype=np.float32), images(128)):
        model = q_network(space, 2, seed=0)
        assert not any(isinstance(m, nn.Conv2d) for m in model) and model(torch.zeros(2, *space.shape)).shape == (2, 2)


def test_float_images_keep_their_scale():
    model, x = q_network(images(10, 10, 4, dtype=np.float32), 2, seed=0), torch.rand(3, 10, 10, 4)
    assert torch.allclose(model(x), model[1:](x.permute(0, 3, 1, 2)), atol=1e-6)


def test_a_learner_on_images():
    class Bright(gym.Env):
        "Whether the image is bright says which action pays"
        observation_space, action_space = images(10, 10, 1), gym.spaces.Discrete(2)
        rng = np.random.default_rng(0)
        def look(self):
            self.bright = int(self.rng.integers(2))
            return np.full((10, 10, 1), 200*self.bright, np.uint8)
        def reset(self, *, seed=None, options=None): return self.look(), {}
        def step(self, action):
            paid = float(action==self.bright)
            return self.look(), paid, True, False, {}
    model = q_network(Bright.observation_space, 2, 16, seed=0)
    replay = ExperienceReplay(GymStepper([Bright], seed=0), bs=16, max_sz=500, seed=0)
    learn = DQNLearner(model, replay.loader(), lr=.01)
    learn.fit(100)
    assert evaluate(model, Bright, 30).mean() == 1.


# ---- an agent in place of Q-values

def test_an_agent_is_evaluated():
    class Aim(gym.Env):
        observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Box(-1, 1, (2,))
        def reset(self, *, seed=None, options=None):
            self.at, self.t = np.random.default_rng(seed).uniform(-1, 1, 2).astype(np.float32), 0
            return self.at, {}
        def step(self, action):
            self.t += 1
            assert action.shape==(2,) and action.dtype==np.float32
            return self.at, -float(np.abs(action - self.at).sum()), self.t==3, False, {}
    sizes = []
    def agent(states):
        sizes.append(len(states))
        return states + np.float32(.5)
    assert evaluate(agent, Aim, 7).tolist() == pytest.approx([-3.]*7) and sizes == [7, 7, 7]


# ---- a whole world

ROOMS, GAMMA = 6, .9


def corridor():
    "All transitions of a corridor, and its Q* by value iteration; the right end pays 1"
    def go(s, a): return (max(s - 1, 0) if a==0 else s + 1), (1. if a==1 and s==ROOMS - 1 else -.05)
    steps = [(s, a, *go(s, a)[::-1], go(s, a)[0]==ROOMS) for s in range(ROOMS) for a in (0, 1)]
    q = np.zeros((ROOMS + 1, 2))
    for _ in range(300):
        for s, a, r, t, terminated in steps: q[s, a] = r + GAMMA*(not terminated)*q[t].max()
    return [Transition(s, a, r, t, e, truncated=bool(s % 2)) for s, a, r, t, e in steps], q[:ROOMS]


@pytest.mark.parametrize('sampler,double', [(Uniform(replace=True), True), (Proportional(), True), (Proportional(), False)])
def test_q_star_is_found(sampler, double):
    steps, q = corridor()
    memory = ReplayMemory(100, sampler, seed=0)
    memory.extend(steps)
    model = Table(np.zeros((ROOMS + 1, 2)))
    batches = (memory.sample(32) for _ in itertools.count())
    DQNLearner(model, batches, gamma=GAMMA, lr=LinearSchedule(.1, 1e-4, 700), target_sync=5, double=double).fit(700)
    assert np.abs(model.q.detach().numpy()[:ROOMS] - q).max() < 2e-3


# ---- the loop

def test_fit_goes_on_where_it_stopped():
    def after(*fits):
        replay = ExperienceReplay(GymStepper(['CartPole-v1'], seed=3), bs=8, max_sz=500, seed=3)
        learn = DQNLearner(q_network(gym.spaces.Box(-1, 1, (4,)), 2, 16, seed=3), replay.loader(), lr=1e-3)
        for n in fits: learn.fit(n)
        return learn.losses, learn.returns, learn.return_steps, learn.n_steps
    assert after(60) == after(25, 0, 35)


def test_a_finite_loader_begins_again():
    seen = []
    class Spy(DQNLearner):
        def update(self, batch):
            seen.append(float(batch.reward[0]))
            super().update(batch)
    Spy(Table(np.zeros((2, 2))), [rows(T(r=1.)), rows(T(r=2.))]).fit(5)
    assert seen == [1., 2., 1., 2., 1.]


def test_no_batch_is_pulled_in_vain():
    source = iter([rows(T()) for _ in range(5)])
    DQNLearner(Table(np.zeros((2, 2))), source).fit(3)
    assert len(list(source)) == 2


def test_an_empty_loader_is_an_error():
    with refused('fit'): DQNLearner(Table(np.zeros((2, 2))), []).fit(1)


def test_watch_may_end_the_fit():
    learn = DQNLearner(Table(np.zeros((2, 2))), [rows(T())])
    assert learn.fit(100, lambda o: o.n_batches==7).n_batches == 7


def test_a_log_stays_short(capsys):
    learn = DQNLearner(Table(np.zeros((2, 2))), [rows(T())]).fit(249)
    assert capsys.readouterr() == ('', '')
    learn.fit(6000)                          # twenty lines at the most
    out, err = capsys.readouterr()
    assert [o.split('  ')[0] for o in out.splitlines()] == [f'batch {n:,}' for n in range(300, 6249, 300)] and err == ''


@pytest.mark.parametrize('bad,match', [(dict(target_sync=0), 'target_sync'), (dict(lr='fast'), 'lr'), (dict(lr=float('nan')), 'lr'), (dict(gamma=2), 'gamma'), (dict(gamma=None), 'gamma')])
def test_bad_arguments(bad, match):
    with refused(match, (ValueError, TypeError)): DQNLearner(Table(np.zeros((2, 2))), [], **bad)


# ---- returns

def episodes_of(pipe, n):
    "(steps, return) of each episode, by hand"
    ended, steps = [], 0
    for step in itertools.islice(pipe, n):
        for o in (step if isinstance(step, Batch) else [step]):
            steps += 1
            if o.terminated or o.truncated: ended.append(float(o.total_reward))
    return ended


@pytest.mark.parametrize('n_envs', [1, 3])
@pytest.mark.parametrize('n', [1, 3])
def test_returns_are_those_of_the_stream(n, n_envs):
    def stepper(): return GymStepper(['CartPole-v1'], seed=5, n_envs=n_envs)
    replay = PrioritizedReplay(NStep(stepper(), n=n, gamma=.9), bs=4, max_sz=1000, steps_per_batch=n_envs, seed=0)
    learn = DQNLearner(q_network(gym.spaces.Box(-1, 1, (4,)), 2, 8, seed=0), replay.loader())
    for _ in range(7): learn.fit(50)                  # looks at odd moments: episodes' ends are seen in parts
    want = episodes_of(stepper(), 600)
    got = learn.returns
    assert len(got) > 10
    assert sorted(got) == sorted(want[:len(got)]) if n_envs > 1 else got == want[:len(got)]
    assert learn.return_steps == sorted(learn.return_steps)
    assert learn.n_steps == replay.memory.n_added


def test_only_five_numbers_of_a_step_are_read():
    "After 2,000 steps of 40 kB the first look takes no 80 MB"
    memory = ReplayMemory(2000)
    for a in range(0, 2000, 100):
        s, k = np.zeros((100, 20_000), np.uint8), np.arange(a, a + 100)
        ends = k % 50==49
        memory.extend(Batch.of(SimpleStep(s, k, s, ends, ends & False, k + 0., k + 1., k*0, k*0, k % 50, k//50)))
    look = EndedEpisodes()
    look.memory = memory
    tracemalloc.start()
    ended = look.ended()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ended == [(k, float(k)) for k in range(50, 2001, 50)] and look.n_seen == 2000
    assert peak < 2 << 20, f'{peak:,} bytes'


def test_a_look_in_pieces(monkeypatch):
    from fastrl_replay.memory import base
    monkeypatch.setattr(base, '_AT_ONCE', 7)
    memory, look, fetched = ReplayMemory(100), EndedEpisodes(), []
    look.memory, fetch = memory, memory.fetch
    memory.fetch = lambda ids, fields=None: fetched.append(len(ids)) or fetch(ids, fields)
    for k in range(250):
        memory.add(SimpleStep(0, 0, 0, terminated=k % 10==9, total_reward=float(k), episode_n=k//10))
        if k in (30, 31, 55): look.look()
    assert look.ended() == [(k + 1, float(k)) for k in range(9, 250, 10) if k < 55 or k >= 150]
    assert max(fetched) == 7 and sum(fetched) == 56 + 100


def test_returns_that_were_overwritten_are_lost_quietly():
    replay = ExperienceReplay(GymStepper(['CartPole-v1'], seed=5), bs=4, max_sz=10, seed=0)
    learn = DQNLearner(q_network(gym.spaces.Box(-1, 1, (4,)), 2, 8, seed=0), replay.loader())
    learn.fit(300)
    assert 0 < len(learn.returns) and learn.n_steps == replay.memory.n_added


def test_the_plot_has_what_there_is():
    history = dict(n_batches=[(10, 1), (210, 100)], eps=[(10, 1.), (210, .5)], beta=[(10, .4), (210, .4)])
    for args, labels in ((([], [], []), ['transitions']), (([10, 20], [1., 2.], [.5]), ['transitions', 'batches']),
                         (([10], [1.], [.5]*200, [(5, 1.), (7, 3.), (9, 2.)], 20, history), ['transitions']*3)):
        fig = plot_training(*args)
        assert [ax.get_xlabel() for ax in fig.axes] == labels
        assert len({ax.get_xlim() for ax in fig.axes if ax.get_xlabel()=='transitions'})==1
        fig.canvas.draw()
        plt.close(fig)
    assert fig._suptitle.get_text()=='β 0.4' and fig.axes[2].get_title()=='ε'
    assert 'the best: 3' in [o.get_text() for o in fig.axes[0].get_legend().get_texts()]
    assert [(*o.get_xdata(), *o.get_ydata()) for o in fig.axes[0].lines if o.get_label().startswith('the best')] == [(7, 3.)]


def test_means_and_losses_are_drawn_where_they_belong():
    steps, returns = list(range(10, 410, 10)), [float(k) for k in range(40)]
    fig = plot_training(steps, returns, [float(k) for k in range(1, 201)], smooth=5, history=dict(n_batches=[(50, 1), (448, 200)]), threshold=30., title='it')
    x, y = fig.axes[0].lines[1].get_data()
    assert x[-1]==steps[-1] and np.allclose([steps.index(at) for at in x], y + 2), 'a mean is drawn at the last of its episodes'
    x, y = fig.axes[1].lines[0].get_data()
    assert np.allclose(x, 48 + 2*(y - .5)) and fig.axes[0].lines[-1].get_ydata()[0]==30 and fig._suptitle.get_text()=='it'
    plt.close(fig)


def test_the_picture_says_what_was_learned_where_and_how_it_was_set():
    def made():
        model = q_network(gym.spaces.Box(-1, 1, (4,)), 2, 8, seed=0)
        agent = EpsilonGreedy(model, LinearSchedule(1., .1, 400), seed=1)
        replay = GymStepper(['CartPole-v1'], agent, seed=5).prioritized_replay(bs=8, max_sz=1000, beta=LinearSchedule(.4, 1., 300), seed=0)
        return DQNLearner(model, replay.loader(), lr=LinearSchedule(1e-2, 1e-3, 300))
    learn = made().fit(150)
    learn.fit(160)
    assert [n for _, n in learn.history['n_batches']]==[1, 100, 200, 300] and set(learn.history)=={
        'return', 'loss', 'lr', 'eps', 'beta', 'samples_per_insert', 'effective', 'stale_share', 'n_batches'}
    for n, v in learn.history['eps']: assert v==pytest.approx(max(.1, 1 - .9*n/400), abs=.01)
    assert learn.history['beta'][1][1]==pytest.approx(.4 + .6*100/300) and learn.history['lr'][1][1]==pytest.approx(1e-2 - 9e-3*99/300)
    fig = learn.plot()
    assert fig._suptitle.get_text()=='CartPole-v1, PrioritizedReplay, environment seed 5'
    assert [ax.get_title() for ax in fig.axes][2:]==['ε', 'β', 'learning rate', 'samples per insert', 'effective sample size']
    assert 'solved from 475' in [o.get_text() for o in fig.axes[0].get_legend().get_texts()]
    plt.close(fig)
    assert learn.plot(title='mine')._suptitle.get_text()=='mine'
    plt.close('all')
    again = made()
    again.load_state_dict(learn.state_dict())
    assert again.history==learn.history
    old = learn.state_dict()
    del old['history']
    again.load_state_dict(old)
    assert again.history=={}


# ---- evaluation

def test_how_the_memory_was_used():
    "As `health()` has it, while batches are drawn; and by hand"
    memory, means = ReplayMemory(200, Proportional(), seed=0), []
    def batches():
        for k in range(1000):
            for i in range(4): memory.add(SimpleStep(np.ones(4, np.float32), i % 2, np.ones(4, np.float32), reward=float(k % 7)))
            batch = memory.sample(8)
            means.append(batch.probs.mean().item())
            if k % 3==0: memory.update_priorities(np.arange(max(0, memory.first_id - 5), memory.first_id), np.ones(min(5, memory.first_id)))
            yield batch
    learn = DQNLearner(q_network(gym.spaces.Box(-1, 1, (4,)), 2, 8, seed=0), batches())
    learn.fit(40)
    assert 'evicted_undrawn' not in learn.progress() and learn.progress()['effective']==pytest.approx(1/np.mean(means), rel=1e-4)
    learn.fit(360)
    now, health = learn.progress(), memory.health()
    for k in 'samples_per_insert', 'evicted_undrawn', 'stale_share': assert now[k]==health[k] > 0, k
    assert len(means)==400 and now['effective']==pytest.approx(1/np.mean(means[300:]), rel=1e-4)
    assert now['effective']==pytest.approx(health['effective'], rel=.2)
    assert [n for n, _ in learn.history['evicted_undrawn']]==[400, 800, 1200, 1600] and len(learn.history['effective'])==5
    fig = learn.plot()
    assert [ax.get_title() for ax in fig.axes][1:]==['effective sample size', 'share of updates stale', 'share never sampled']
    assert fig._suptitle.get_text().endswith('samples per insert 2')
    plt.close(fig)
    uniform = ReplayMemory(10, seed=0)
    uniform.extend([SimpleStep(np.ones(4, np.float32), 0, np.ones(4, np.float32))]*20)
    plain = DQNLearner(learn.model, [uniform.sample(4)]).fit(1)
    assert plain.progress().keys()=={'loss', 'lr', 'samples_per_insert', 'evicted_undrawn'}


def test_more_than_four_numbers_take_two_rows():
    many = ['eps', 'beta', 'lr', 'samples_per_insert', 'effective', 'stale_share', 'evicted_undrawn']
    for n, rows in {1: [1], 4: [4], 5: [3, 2], 6: [3, 3], 7: [4, 3]}.items():
        fig = plot_training([10], [1.], [.5]*200, history={k: [(10, 0.), (200, 1.)] for k in [*many[:n], 'n_batches']})
        fig.canvas.draw()
        places = [round(ax.get_position().y0, 3) for ax in fig.axes[2:]]
        assert [places.count(y) for y in sorted({*places}, reverse=True)]==rows
        assert fig.axes[0].get_position().x1==pytest.approx(fig.axes[1 + rows[0]].get_position().x1, abs=.01)
        plt.close(fig)


def test_the_bar_and_the_log_have_the_best_evaluation(capsys):
    class Watch:
        every, history, score = 100, [], -np.inf
        def __call__(self, learn):
            if learn.n_batches % 100: return False
            self.history = [*self.history, (learn.n_batches, float(300 - learn.n_batches))]
            self.score = max(self.score, self.history[-1][1])
    memory, watch = ReplayMemory(4, Proportional(), seed=0), Watch()
    memory.add(Transition(np.zeros(4, np.float32), 0, 1., np.zeros(4, np.float32), False, False))
    learn = DQNLearner(q_network(gym.spaces.Box(-1, 1, (4,)), 2, 8, seed=0), (memory.sample(2) for _ in range(500)))
    learn.fit(200, watch)
    logged = capsys.readouterr().out.splitlines()
    assert re.fullmatch('batch 200  step 1  greedy 100  best 200  loss [.0-9e-]+', logged[1]), logged
    assert learn._note(watch).startswith('best 200, loss ') and ', samples per insert 400, beta 0.4' in learn._note(watch)
    assert 'best' not in learn._note(None)


def by_hand(model, seeds):
    env, out = gym.make('CartPole-v1'), []
    for seed in seeds:
        s, total, over = env.reset(seed=int(seed))[0], 0., False
        while not over:
            with torch.no_grad(): a = int(model(torch.from_numpy(s)[None]).argmax())
            s, r, terminated, truncated, _ = env.step(a)
            total, over = total + r, terminated or truncated
        out.append(total)
    return out


def net(seed=0): return q_network(gym.spaces.Box(-1, 1, (4,)), 2, 16, seed)


def test_evaluation_is_a_greedy_episode_for_each_seed():
    seeds = np.random.SeedSequence(9).generate_state(6)
    for k in range(3): assert evaluate(net(k), 'CartPole-v1', 6, seed=9).tolist() == by_hand(net(k), seeds)


def test_evaluation_leaves_training_alone():
    def train(between):
        torch.manual_seed(0)
        np.random.seed(0)       # noqa: NPY002   (the global generator: nobody may use it)
        model = net()
        agent = EpsilonGreedy(model, .5, seed=1)
        replay = ExperienceReplay(GymStepper(['CartPole-v1'], agent=agent, seed=1), bs=8, max_sz=500, seed=1)
        learn = DQNLearner(model, replay.loader(), lr=1e-3)
        learn.fit(30)
        between(learn)
        learn.fit(30)
        return learn.losses, torch.rand(1).item(), np.random.rand()       # noqa: NPY002
    assert train(lambda learn: None) == train(lambda learn: learn.evaluate('CartPole-v1', 5, seed=3))


def test_evaluation_turns_dropout_off_and_on_again():
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(.9), nn.Linear(16, 2))
    assert evaluate(model, 'CartPole-v1', 4).tolist() == evaluate(model, 'CartPole-v1', 4).tolist()
    assert model.training and evaluate(model.eval(), 'CartPole-v1', 1) is not None and not model.training


def test_an_episode_that_never_ends_is_ended():
    class Endless(gym.Env):
        observation_space, action_space = gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2)
        def reset(self, *, seed=None, options=None): return np.zeros(4, np.float32), {}
        def step(self, action): return np.zeros(4, np.float32), 1, False, False, {}
    assert evaluate(net(), Endless, 2, max_steps=7).tolist() == [7., 7.]


def test_nested_observations():
    class Nested(gym.Env):
        observation_space = gym.spaces.Dict(a=gym.spaces.Box(-1, 1, (2,)), b=gym.spaces.Tuple([gym.spaces.Discrete(3)]))
        action_space = gym.spaces.Discrete(2)
        def reset(self, *, seed=None, options=None): self.t = 0; return self.look(), {}
        def look(self): return dict(a=np.full(2, self.t, np.float32), b=(self.t % 3,))
        def step(self, action): self.t += 1; return self.look(), 1., self.t==5, False, {}

    class Net(nn.Module):
        def __init__(self): super().__init__(); self.lin = nn.Linear(3, 2)
        def forward(self, s): return self.lin(torch.cat([s['a'], s['b'][0][:, None]], 1))
    assert evaluate(Net(), Nested, 3).tolist() == [5.]*3
    replay = ExperienceReplay(GymStepper([Nested], seed=0), bs=4, max_sz=50, seed=0)
    assert DQNLearner(Net(), replay.loader()).fit(10).n_batches == 10


def test_an_unknown_environment():
    with refused('evaluate'): evaluate(net(), 'CartPoll-v1')


# ---- networks

def test_a_network_depends_on_its_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = net(7)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), net(7).parameters()))
    assert not torch.equal(one[0].weight, net(8)[0].weight)


def test_one_hot():
    assert OneHot(3, start=1)(torch.tensor([1., 3.])).tolist() == [[1, 0, 0], [0, 0, 1]]
    assert OneHot(3)(torch.tensor([[2], [0]])).shape == (2, 3)


# ---- the best weights

def fitted(watch, n=40):
    replay = PrioritizedReplay(GymStepper(['CartPole-v1'], seed=0), bs=8, max_sz=500, seed=0)
    learn = DQNLearner(net(), replay.loader(), lr=.01)
    learn.fit(n, watch)
    return learn


def test_the_weights_kept_are_those_that_scored():
    seen = {}
    best = BestWeights('CartPole-v1', every=10, episodes=3, confirm=2, seed=4, average=0)
    def watch(learn):
        over = best(learn)
        if learn.n_batches % 10==0: seen[learn.n_batches] = copy.deepcopy(learn.model)
        return over
    learn = fitted(watch)
    assert [n for n, _ in best.history] == [17, 27, 37, 47]
    scores = {n: (evaluate(m, 'CartPole-v1', 3, seed=4).mean(), evaluate(m, 'CartPole-v1', 5, seed=4).mean()) for n, m in seen.items()}
    score, kept, history = -np.inf, None, []
    for n, (few, many) in scores.items():
        history.append(many if few > score else few)                # a second round counts with the first
        if history[-1] > score: score, kept = history[-1], n
    assert best.score == score == max(r for _, r in best.history) and [r for _, r in best.history] == history
    best.restore(learn)
    assert all(torch.equal(a, b) for a, b in zip(learn.model.parameters(), seen[kept].parameters()))


def test_the_mean_of_the_weights_is_a_running_one():
    best, weights = BestWeights('CartPole-v1', every=1000, average=.25), []
    def watch(learn):
        weights.append(learn.model[0].weight.detach().clone())
        return best(learn)
    fitted(watch, 5)
    want = weights[0]
    for w in weights[1:]: want = want + .25*(w - want)
    assert torch.allclose(best.mean[0].weight, want)


@pytest.mark.parametrize('goal,stops', [(0., True), (1e9, False)])
def test_patience(goal, stops):
    class Frozen(BestWeights):
        def _averaged(self, model): return self.__dict__.setdefault('same', copy.deepcopy(model))
    best = Frozen('CartPole-v1', every=5, episodes=2, confirm=0, patience=3, goal=goal)
    assert fitted(best, 60).n_batches == (20 if stops else 60)


def test_nothing_to_restore():
    with refused('BestWeights', RuntimeError): BestWeights('CartPole-v1').restore(None)


def test_the_second_round_is_for_those_who_reach_the_goal(monkeypatch):
    from fastrl_replay import runs
    asked, scores = [], iter([10., 50., 40., 40., 60.])
    def played(model, env_id, episodes, seed):
        asked.append(episodes)
        return np.full(episodes, next(scores))
    monkeypatch.setattr(runs, 'evaluate', played)
    best = BestWeights('CartPole-v1', every=10, episodes=3, confirm=2, goal=45.)
    fitted(best, 30)           # 10: below the goal; 50: again, and 40 then, still better than 10; 40: not better
    assert asked == [3, 3, 5, 3] and best.score == 40. and [r for _, r in best.history] == [10., 40., 40.]
