"A gradient step against the lines that everybody writes, and Adam against torch's own"
import copy
import itertools
import pickle
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from fastrl_replay.batch import Batch
from fastrl_replay.gradient_step import EagerStep, FusedAdam, move_towards, weighted
from fastrl_replay.learner import DQNLearner, Learner, dqn_loss, q_targets
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.steps import Transition, derived_type


def network(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def transitions(n, seed=0, discount=False):
    rng = np.random.default_rng(seed)
    s, t = rng.normal(size=(2, n, 4)).astype(np.float32)
    step = Transition(s, rng.integers(0, 3, n), rng.normal(size=n).astype(np.float32), t, rng.random(n) < .2, rng.random(n) < .1)
    if not discount: return step
    return derived_type('Discounted', (*step._fields, 'discount'))(*step, rng.random(n).astype(np.float32))


def batch_of(n, seed=0, weights=True, **kw):
    "A batch by hand, with weights if it is to have some"
    made = Batch.of(transitions(n, seed, **kw))
    if weights: made.weights = torch.from_numpy(np.random.default_rng(seed + 1).random(n).astype(np.float32))
    return made


def plain_loss(batch, model, target, gamma=.99, double=True):
    "The loss of a DQN, as one writes it"
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        values = target(batch.next_state.to(dtype))
        rated = model(batch.next_state.to(dtype)) if double else values
        future = values.gather(1, rated.argmax(1, keepdim=True))[:, 0].masked_fill(batch.terminated, 0.)
        wanted = batch.reward + getattr(batch, 'discount', gamma)*future
    q = model(batch.state.to(dtype)).gather(1, batch.action[:, None])[:, 0]
    return nn.functional.smooth_l1_loss(q, wanted, reduction='none'), wanted - q.detach()


class Plain:
    "A learner in ten lines, with torch's own parts"
    def __init__(self, model, loss, make, max_norm, tau, sync):
        self.model, self.target = model, copy.deepcopy(model).requires_grad_(False)
        self.loss, self.optimizer, self.max_norm, self.tau, self.sync = loss, make(model.parameters()), max_norm, tau, sync
        self.losses, self.td_errors = [], []
    def update(self, batch):
        losses, td_errors = self.loss(batch, self.model, self.target)
        loss = losses.mean() if batch.weights is None else (batch.weights*losses).mean()
        self.optimizer.zero_grad()
        loss.backward()
        if self.max_norm is not None: nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.losses.append(loss.item())
        self.td_errors.append(td_errors)
        if len(self.losses) % self.sync: return
        for old, new in zip(self.target.parameters(), self.model.parameters()): old.data.mul_(1 - self.tau).add_(new.data, alpha=self.tau)


def close(model, other, rtol, atol):
    for p, q in zip(model.parameters(), other.parameters()): torch.testing.assert_close(p, q, rtol=rtol, atol=atol)


MAKERS = {'Adam': partial(Adam, lr=3e-3, fused=True), 'AdamW': partial(AdamW, lr=3e-3), 'SGD': partial(SGD, lr=.05, momentum=.9),
          'RMSprop': partial(RMSprop, lr=1e-3)}


@pytest.mark.parametrize('name', MAKERS)
@pytest.mark.parametrize('weights,double,max_norm,tau,sync,discount', [(True, True, None, 1., 10, False), (False, False, .3, .05, 1, True)])
def test_an_update_is_the_plain_one(name, weights, double, max_norm, tau, sync, discount):
    "In double precision, to 1e-9 after 50 updates; the default optimizer is Adam"
    start = network(dtype=torch.float64)
    plain = Plain(copy.deepcopy(start), partial(plain_loss, double=double), MAKERS[name], max_norm, tau, sync)
    optimizer = None if name=='Adam' else MAKERS[name]
    learn = DQNLearner(copy.deepcopy(start), [], double=double, lr=3e-3 if name=='Adam' else None, optimizer=optimizer, max_norm=max_norm, tau=tau, target_sync=sync)
    for k in range(50):
        batch = batch_of(20 + k % 5, k, weights, discount=discount)
        plain.update(batch)
        learn.update(batch)
    loose = 1e-5 if max_norm else 1e-6            # torch adds 1e-6 to the norm; shares w/n are of float32's weights
    close(plain.model, learn.model, loose, loose/10)
    close(plain.target, learn.target, loose, loose/10)
    assert np.allclose(plain.losses, learn.losses, rtol=loose)


@pytest.mark.parametrize('double', [True, False])
def test_bit_for_bit_where_rows_are_a_power_of_two(double):
    "Nothing is rounded in another order, unless gradients are clipped"
    plain = Plain(network(), partial(plain_loss, double=double), MAKERS['Adam'], None, 1., 10)
    learn = DQNLearner(network(), [], double=double, lr=3e-3, max_norm=None, target_sync=10)
    for k in range(200):
        batch = batch_of(64, k)
        plain.update(batch)
        learn.update(batch)
    close(plain.model, learn.model, 0, 0)
    close(plain.target, learn.target, 0, 0)
    for p, q in zip(plain.model.parameters(), learn.model.parameters()):
        a, b = plain.optimizer.state[p], learn.optimizer.state[q]
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_td_errors_and_priorities_are_the_plain_ones():
    memory = ReplayMemory(64, Proportional(eps=0.), seed=0)
    memory.extend(transitions(64))
    plain = Plain(network(), plain_loss, MAKERS['Adam'], None, 1., 10)
    learn = DQNLearner(network(), [], lr=3e-3, max_norm=None, target_sync=10)
    for _ in range(20):
        batch = memory.sample(32)
        plain.update(batch)
        learn.update(batch)
        got = memory.sampler.priorities[batch.idxs.numpy()]
        assert np.allclose(got, last_of(batch.idxs.tolist(), plain.td_errors[-1].abs().tolist()), rtol=1e-6)


def last_of(slots, values):
    "Of rows that are there several times, the value that came last"
    found = dict(zip(slots, values))
    return [found[o] for o in slots]


# ---- what a loss may return

@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('given', [True, False])
@pytest.mark.parametrize('shape', [(), (5,), (5, 3), (5, 3, 2)])
@pytest.mark.parametrize('pair', [True, False])
def test_shares_give_the_gradient_of_the_weighted_mean(shape, given, pair, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weights = torch.rand(5) if given else None
    each = x.square()
    rows = each if each.ndim < 2 else each.flatten(1).mean(1)
    mean = rows if not rows.ndim else (rows if weights is None else weights*rows).mean()
    [want] = torch.autograd.grad(mean, x, retain_graph=True)
    errors = torch.ones(5, requires_grad=True)
    losses, shares, td_errors = weighted((each, errors) if pair else each, weights)
    [got] = torch.autograd.grad(losses, x, shares)
    assert torch.allclose(got, want, rtol=1e-6) and torch.allclose(losses if shares is None else losses.dot(shares), mean, rtol=1e-6)
    if pair: assert torch.equal(td_errors, errors)
    elif shape: assert torch.equal(td_errors, each)
    else: assert td_errors is None
    assert td_errors is None or not td_errors.requires_grad


# ---- targets

def test_targets_are_those_of_the_plain_formula():
    "Bit for bit, with ties and NaN among the Q-values"
    class Table(nn.Module):
        def __init__(self, q):
            super().__init__()
            self.q = nn.Parameter(q)
        def forward(self, s): return self.q[:len(s)]
    rng = np.random.default_rng(0)
    for k in range(100):
        q, other = (torch.from_numpy(rng.integers(-2, 3, (8, 3)).astype(np.float32)) for _ in range(2))
        if k % 3==0: q[k % 8, k % 3] = other[k % 5, 1] = np.nan
        model, target, batch = Table(q), Table(other), batch_of(8, k, discount=k % 2==1)
        for double in (True, False):
            losses, errors = dqn_loss(batch, model, target, .9, double)
            wanted_losses, wanted = plain_loss(batch, model, target, .9, double)
            assert torch.equal(losses.nan_to_num(7.), wanted_losses.nan_to_num(7.)) and torch.equal(errors.nan_to_num(7.), wanted.nan_to_num(7.))
            y = q_targets(batch, model, target, .9, double)
            assert torch.equal((y - model(batch.state).gather(1, batch.action[:, None])[:, 0]).detach().nan_to_num(7.), wanted.nan_to_num(7.))


def test_a_batch_of_another_class_has_its_discount_too():
    "One that passes its attributes on, or a namespace"
    class Other:
        def __init__(self, batch): self.batch = batch
        def __getattr__(self, name): return getattr(self.batch, name)
    batch, model = batch_of(8, discount=True), network()
    want = q_targets(batch, model, model, .5)
    assert torch.equal(q_targets(Other(batch), model, model, .5), want)
    assert torch.equal(q_targets(SimpleNamespace(**batch.astuple()._asdict()), model, model, .5), want)
    plain = SimpleNamespace(**batch_of(8).astuple()._asdict())
    assert torch.equal(q_targets(plain, model, model, .5), q_targets(batch_of(8), model, model, .5))


# ---- Adam

OPTIONS = {'plain': {}, 'decay': dict(weight_decay=.1), 'largest squares': dict(amsgrad=True), 'uphill': dict(maximize=True),
           'not fused': dict(fused=False), 'one by one': dict(fused=False, foreach=False), 'betas': dict(betas=(.5, .9), eps=1e-3)}


def both(options, groups=False):
    "torch's Adam and ours on the same network, as two pairs of model and optimizer"
    found = []
    for kind in (Adam, FusedAdam):
        model = network()
        parameters = [*model.parameters()]
        if groups: parameters = [dict(params=parameters[:2], lr=.1), dict(params=parameters[2:])]
        found.append((model, kind(parameters, **{'lr': .01, 'fused': True} | options)))
    return found


def descend(pairs, k, frozen=()):
    for model, optimizer in pairs:
        optimizer.zero_grad()
        model(torch.from_numpy(transitions(16, k).state)).square().sum().backward()
        for i in frozen: [*model.parameters()][i].grad = None
        (optimizer.descend if isinstance(optimizer, FusedAdam) else optimizer.step)()


def same(pairs):
    (model, optimizer), (other, ours) = pairs
    close(model, other, 0, 0)
    a, b = optimizer.state_dict(), ours.state_dict()
    assert a['param_groups'] == b['param_groups'] and a['state'].keys() == b['state'].keys()
    for k in a['state']: assert a['state'][k].keys() == b['state'][k].keys() and all(torch.equal(a['state'][k][o], b['state'][k][o]) for o in a['state'][k])


@pytest.mark.parametrize('groups', [False, True])
@pytest.mark.parametrize('name', OPTIONS)
def test_adam_is_torchs_bit_for_bit(name, groups):
    pairs = both(OPTIONS[name], groups)
    for k in range(30):
        if k==10:
            for _, o in pairs: o.param_groups[0]['lr'] = .002
        descend(pairs, k)
        same(pairs)


def test_parameters_without_a_gradient_rest():
    "Those that come late begin with an empty state, as in torch's"
    pairs = both({})
    for k in range(12):
        descend(pairs, k, frozen=(0, 5) if k < 6 else (3,))
        same(pairs)
    assert pairs[1][1].state[[*pairs[1][0].parameters()][0]]['step'] == 6


def test_adams_state_may_be_cleared_loaded_copied_and_pickled():
    "Nothing of it is kept anywhere else"
    pairs = both({})
    for k in range(25):
        if k==5:
            for _, o in pairs: o.state.clear()
        if k==10:
            states = [copy.deepcopy(o.state_dict()) for _, o in pairs]
        if k==15:
            for (_, o), state in zip(pairs, reversed(states)): o.load_state_dict(state)
        if k in (18, 21): pairs = copy.deepcopy(pairs) if k==18 else pickle.loads(pickle.dumps(pairs))
        descend(pairs, k)
        same(pairs)


@pytest.mark.parametrize('when', ['pre', 'post'])
def test_hooks_are_called(when):
    pairs, seen = both({}), []
    descend(pairs, 0)
    handle = getattr(pairs[1][1], f'register_step_{when}_hook')(lambda *a: seen.append(len(seen)))
    for k in (1, 2): descend(pairs, k)
    same(pairs)
    handle.remove()
    descend(pairs, 3)
    same(pairs)
    assert seen == [0, 1]


def test_schedulers_of_torch_see_the_steps():
    learn = DQNLearner(network(), [])
    scheduler = torch.optim.lr_scheduler.StepLR(learn.optimizer, 3, .5)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for k in range(7):
            learn.update(batch_of(8, k))
            scheduler.step()
    assert learn.optimizer.param_groups[0]['lr'] == pytest.approx(1e-3/4)


def test_the_default_optimizer_and_ones_own():
    assert type(DQNLearner(network(), []).optimizer) is FusedAdam
    calls = []
    class Mine(Adam):
        def step(self, closure=None):
            calls.append(1)
            return super().step(closure)
    learn = DQNLearner(network(), [], optimizer=Mine)
    for k in range(3): learn.update(batch_of(8, k))
    assert type(learn.optimizer) is Mine and calls == [1, 1, 1]


# ---- networks that follow

class Counting(nn.Module):
    "Its buffer is another tensor after each forward"
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer('seen', torch.zeros(()))
    def forward(self, s):
        if self.training: self.seen = self.seen + 1
        return self.head(s)


@pytest.mark.parametrize('tau,sync', [(1., 3), (.2, 1), (.2, 4)])
def test_the_target_follows_with_its_buffers(tau, sync):
    learn = Learner(Counting(), [], lambda b, m, t: m(b.state).square().sum(1), tau=tau, target_sync=sync)
    want = copy.deepcopy(learn.target)
    for k in range(1, 13):
        learn.update(batch_of(8, k))
        if k % sync==0: move_towards(want, learn.model, tau)
        close(want, learn.target, 0, 0)
        assert int(learn.target.seen) == int(want.seen) == k//sync*sync


def test_a_learner_may_be_copied():
    "A deep copy trains networks of its own, target included"
    learn = DQNLearner(network(), [], tau=.5)
    learn.update(batch_of(8))
    other = copy.deepcopy(learn)
    before = copy.deepcopy(learn.target)
    for k in range(3): other.update(batch_of(8, k))
    close(before, learn.target, 0, 0)
    for k in range(3): learn.update(batch_of(8, k))
    close(learn.model, other.model, 0, 0)
    close(learn.target, other.target, 0, 0)


def test_steps_by_hand():
    "What a step needs is what `Trained` lists, and no learner"
    model = network()
    learn = SimpleNamespace(model=model, target=copy.deepcopy(model), loss=plain_loss, optimizer=FusedAdam(model.parameters(), fused=True),
                            max_norm=None, tau=1., device=torch.device('cpu'))
    step = EagerStep(learn)
    for due, k in zip(itertools.cycle([False, True]), range(4)):
        loss, td_errors = step(learn, batch_of(8, k), due)
        assert loss.ndim == 0 and not loss.requires_grad and td_errors.shape == (8,)
        assert all(map(torch.equal, model.parameters(), learn.target.parameters()))==due
