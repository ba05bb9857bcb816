"Legal actions: masks in observations are honoured by the agent, the targets, the learner and the evaluation; beside naive twins"
import copy
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_learner import close, graphs                    # noqa: F401 (a fixture)
from test_samplers import chi2, limit
from torch import nn

from fastrl_replay.batch import Batch
from fastrl_replay.learner import DQNLearner, _Observed, dqn_loss, evaluate, q_network, q_targets
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.actors import Actors
from fastrl_replay.pipes.agents import EpsilonGreedy, explore
from fastrl_replay.pipes.n_step import NStep
from fastrl_replay.pipes.replay import ExperienceReplay
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rng import Rng
from fastrl_replay.steps import SimpleStep, Transition
from refusals import refused
from words import WORDS

DTYPES = [np.int8, np.bool_, np.float32, np.int64]


class Doors(gym.Env):
    """Rooms in a row, each with four doors, of which two open: one leads on, one leads nowhere. Whoever runs into a closed one is out.
    An observation is that of PettingZoo: what is seen, and which actions are legal"""
    rooms = 5
    observation_space = gym.spaces.Dict(observation=gym.spaces.Box(0, 1, (5,), np.float32), action_mask=gym.spaces.Box(0, 1, (4,), np.int8))
    action_space = gym.spaces.Discrete(4)

    def doors(self): return self.at % 4, (self.at + 1 + self.at % 2) % 4              # the one that leads on, the other

    def seen(self):
        mask = np.zeros(4, np.int8)
        if self.at < self.rooms: mask[list(self.doors())] = 1
        return dict(observation=np.eye(self.rooms + 1, dtype=np.float32)[self.at, :self.rooms], action_mask=mask)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.n = 0, 0
        return self.seen(), {}

    def step(self, action):
        on, other = self.doors()
        self.n += 1
        if action not in (on, other): return self.seen(), -10., True, False, {}
        self.at += action == on
        there = self.at == self.rooms
        return self.seen(), float(there), there, not there and self.n == 20, {}


def net(seed=0): return q_network(Doors.observation_space, 4, hidden=16, seed=seed)


def random_masks(rng, n, dtype=np.int8):
    masks = (rng.random((n, 4)) < .4).astype(dtype)
    masks[np.arange(n), rng.integers(0, 4, n)] = 1
    return masks


def random_states(rng, n, dtype=np.int8):
    return dict(observation=rng.random((n, 5), np.float32), action_mask=random_masks(rng, n, dtype))


# ---- the agent

def test_random_actions_are_uniform_among_the_legal():
    rng = np.random.default_rng(0)
    masks = random_masks(rng, 200, bool)
    for eps in (1., .3):
        counts = np.zeros((200, 5))
        for _ in range(300):
            found = explore(rng.random(200), eps, 4, masks)
            counts[np.arange(200), found] += 1
        assert (counts[:, :4] > 0).sum() <= masks.sum() and not counts[:, :4][~masks].any()
        for row, mask in zip(counts, masks):
            n = row[:4].sum()
            assert chi2(row[:4][mask], n/mask.sum()) < limit(mask.sum()) and abs(n - 300*eps) < 5*np.sqrt(300*eps*(1 - eps)) + 1e-9


def test_all_legal_is_no_mask():
    u = np.concatenate([np.random.default_rng(1).random(10_000), [0., np.nextafter(.3, 0), .3, np.nextafter(1, 0)]])
    for eps in (0., .3, 1.): assert (explore(u, eps, 7, np.ones((len(u), 7), bool)) == explore(u, eps, 7)).all()


def naive_agent(model, states, eps, u):
    "What an agent does with each state, one after the other"
    actions = []
    for k in range(len(u)):
        legal = [a for a in range(4) if states['action_mask'][k][a]]
        q = model({name: torch.tensor(v[k:k + 1], dtype=torch.float32) for name, v in states.items()})[0].detach()
        best = max(legal, key=lambda a: float(q[a]))
        actions.append(legal[min(int(u[k]*len(legal)/eps), len(legal) - 1)] if u[k] < eps else best)
    return actions


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('eps', [0., .4, 1.])
def test_the_agent_and_its_twin(eps, dtype):
    rng, model, agent, twin = np.random.default_rng(2), net(), EpsilonGreedy(net(), eps, seed=3), Rng(3)
    for n in (1, 2, 50, 300):
        states = random_states(rng, n, dtype)
        assert agent(states).tolist() == naive_agent(model, states, eps, twin.random(n))
    assert agent.n_steps == 353


def test_an_agent_says_what_is_wrong_with_a_mask_and_stays_as_it_was():
    agent, states = EpsilonGreedy(net(), .5, seed=0), random_states(np.random.default_rng(0), 3)
    for mask, said in ((np.zeros((3, 4)), 'action_mask: state 0'),
                       (np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]), 'action_mask: state 2'), (np.ones(3), 'action_mask')):
        before = agent.state_dict()
        with refused(said): agent(states | dict(action_mask=mask))
        assert agent.state_dict() == before
    agent.eps = 0.
    with refused('action_mask', got='(3, 5)'): agent(states | dict(action_mask=np.ones((3, 5))))


# ---- the targets

def masked_rows(rng, n, dtype=np.int8):
    "Transitions between random states; some terminated, and of these every other without a legal action"
    ends = rng.random(n) < .3
    after = random_states(rng, n, dtype)
    after['action_mask'][ends & (rng.random(n) < .5)] = 0
    state = random_states(rng, n, dtype)
    actions = state['action_mask'].argmax(1)
    return Transition(state, actions, rng.random(n, np.float32), after, ends, (rng.random(n) < .2) & ~ends)


def naive_targets(rows, model, target, gamma, double):
    "Row by row: the best of the legal actions, by one network, is rated by the other"
    found = []
    for k in range(len(rows.reward)):
        after = {name: torch.tensor(v[k:k + 1], dtype=torch.float32) for name, v in rows.next_state.items()}
        chooser, judge = (model if double else target)(after)[0].detach(), target(after)[0].detach()
        legal = [a for a in range(4) if rows.next_state['action_mask'][k][a]]
        future = 0. if rows.terminated[k] else float(judge[max(legal, key=lambda a: float(chooser[a]))])
        found.append(float(rows.reward[k]) + gamma*future)
    return found


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('double', [True, False])
def test_targets_and_their_twin(double, dtype):
    rows = masked_rows(np.random.default_rng(5), 300, dtype)
    model, target, batch = net(1), net(2), Batch.of(rows)
    right = naive_targets(rows, model, target, .9, double)
    assert np.allclose(q_targets(batch, model, target, .9, double), right, atol=1e-6)
    bare = batch.replace(next_state=dict(observation=batch.next_state['observation'], action_mask=torch.ones_like(batch.next_state['action_mask'])))
    assert not np.allclose(q_targets(bare, model, target, .9, double), right, atol=1e-3)      # the masks decide
    assert np.allclose(dqn_loss(batch, model, target, .9, double)[1] + model(batch.state).gather(1, batch.action[:, None])[:, 0].detach(), right, atol=1e-5)


def test_a_next_state_without_legal_actions_is_an_error_unless_terminated():
    rows = masked_rows(np.random.default_rng(6), 40)
    rows.next_state['action_mask'][7], rows.terminated[7] = 0, False
    for what in (q_targets, dqn_loss):
        with refused('action_mask: state 7', got='none'): what(Batch.of(rows), net(), net())
    with refused('action_mask', got='torch.bool of shape (40,)'):
        flat = dict(observation=rows.next_state['observation'], action_mask=np.ones(40))
        q_targets(Batch.of(rows._replace(state=flat, next_state=flat)), net(), net())


@pytest.mark.parametrize('options', [{}, dict(double=False, tau=.1)])
def test_a_compiled_learner_honours_masks_as_the_eager_one(options, graphs):                   # noqa: F811
    found = []
    for compile in (False, True):
        memory = ReplayMemory(200, Proportional(), seed=0)
        memory.extend(masked_rows(np.random.default_rng(7), 200))
        learn = DQNLearner(net(), [], lr=.01, compile=compile, **options)
        for _ in range(30): learn.update(memory.sample(32))
        found.append((learn, memory))
    (eager, memory), (compiled, other) = found
    close(eager.model.state_dict(), compiled.model.state_dict(), 1e-4, 1e-5)
    assert np.allclose(eager.losses, compiled.losses, rtol=1e-4) and np.allclose(memory.sampler.priorities, other.sampler.priorities, rtol=1e-3, atol=1e-5)
    assert len(graphs) == 1
    rows = masked_rows(np.random.default_rng(6), 40)
    rows.next_state['action_mask'][7], rows.terminated[7] = 0, False
    before = copy.deepcopy(compiled.model.state_dict())
    for learn in eager, compiled:
        with refused('action_mask: state 7', got='none'): learn.update(Batch.of(rows))
    close(before, compiled.model.state_dict(), 0, 0)


# ---- environments

def played(memory): return bool(np.take_along_axis(memory[:].state['action_mask'].numpy(), memory[:].action.numpy()[:, None], 1).all())


@pytest.mark.parametrize('n_envs,n_step', [(1, 1), (4, 1), (1, 3), (4, 3)])
def test_no_illegal_action_is_ever_taken(n_envs, n_step):
    pipe = GymStepper([Doors], EpsilonGreedy(net(), .5, seed=0), seed=0, n_envs=n_envs)
    if n_step > 1: pipe = NStep(pipe, n_step, .9)
    replay = ExperienceReplay(pipe, bs=16, max_sz=1000, min_sz=400, seed=0)
    batch = next(iter(replay))
    assert played(replay.memory) and (replay.memory[:].reward >= 0).all() and len(replay) >= 400
    assert q_targets(batch, net(1), net(2)).isfinite().all()
    last = replay.memory[:]
    assert (last.next_state['action_mask'].any(1) | last.terminated).all()


@pytest.mark.parametrize('compile', [False, True])
def test_a_short_training_learns_with_masks(compile, graphs):                               # noqa: F811
    "Out of the last room in five steps, where an untrained network dawdles, and one that knows no masks runs into a wall"
    def blind(states): return np.array([int(np.random.default_rng(int(s.argmax())).integers(4)) for s in states['observation']])
    model = net()
    agent = EpsilonGreedy(model, .3, seed=0)
    replay = ExperienceReplay(GymStepper([Doors], agent, seed=0), bs=32, max_sz=2000, min_sz=100, steps_per_batch=2, seed=0)
    assert evaluate(blind, Doors, 3).tolist() == [-10.]*3
    before = evaluate(model, Doors, 3)
    learn = DQNLearner(model, replay.loader(), gamma=.8, lr=3e-3, target_sync=20, compile=compile).fit(300)
    assert learn.evaluate(Doors, 4).tolist() == [1.]*4 and (before < 1).all() and played(replay.memory)
    state = Doors()
    seen, n = state.reset()[0], 0
    while state.at < state.rooms: seen, n = state.step(int(EpsilonGreedy(model, 0.)({k: v[None] for k, v in seen.items()})[0]))[0], n + 1
    assert n == state.rooms


class Masked(gym.ObservationWrapper):
    "gymnasium's Taxi tells the mask in `info`: this puts it into the observation, as PettingZoo has it"
    def __init__(self, env):
        super().__init__(env)
        n = int(env.action_space.n)
        self.observation_space = gym.spaces.Dict(observation=env.observation_space, action_mask=gym.spaces.Box(0, 1, (n,), np.int8))
    def reset(self, **kw):
        obs, info = self.env.reset(**kw)
        return dict(observation=obs, action_mask=info['action_mask']), info
    def step(self, action):
        obs, *rest, info = self.env.step(action)
        return dict(observation=obs, action_mask=info['action_mask']), *rest, info


def taxi(): return Masked(gym.make('Taxi-v4'))


class Noted(NamedTuple):
    "A step with what `info` said of the next state's actions"
    state: Any
    action: Any
    reward: float
    next_state: Any
    terminated: bool
    truncated: bool
    mask: Any = np.zeros(6, np.int8)


@pytest.mark.parametrize('n_envs', [1, 3])
def test_taxi_whose_info_has_the_mask(n_envs):
    "No action without effect, by a network of its own; and `info=` copies what the wrapper does"
    env = taxi()
    model = q_network(env.observation_space, 6, seed=0)
    assert isinstance(model[0], _Observed) and model(dict(observation=torch.tensor([3., 499.]))).shape == (2, 6)
    pipe = GymStepper([taxi], EpsilonGreedy(model, .5, seed=0), seed=0, n_envs=n_envs, step_type=Noted, info=dict(mask='action_mask'))
    memory = ReplayMemory(1000, seed=0)
    for _, chunk in zip(range(300//n_envs), pipe): memory.extend([chunk] if n_envs == 1 else chunk)
    rows = memory[:]
    assert played(memory) and (rows.mask == rows.next_state['action_mask']).all() and not played_blindly(rows)


def played_blindly(rows): return (rows.state['observation'] == rows.next_state['observation']).any() and (rows.reward == -10).any()


class Stuck(Doors):
    "An environment that forgets to end an episode that can't go on"
    def seen(self):
        found = super().seen()
        if self.at == 2: found['action_mask'][:] = 0
        return found


@pytest.mark.parametrize('n_envs', [1, 3])
def test_an_environment_that_is_stuck_is_an_error_in_words(n_envs):
    with pytest.raises(ValueError) as caught:
        for _ in zip(range(200), GymStepper([Stuck], EpsilonGreedy(net(), 1., seed=0), seed=0, n_envs=n_envs)): pass
    assert caught.value.argument.startswith('action_mask: state ') and (caught.value.expected, caught.value.got)==('at least one legal action of 4', 'none')
    assert caught.match(WORDS['an episode has to end'])


def test_masks_in_workers():
    agent = EpsilonGreedy(net(), .5, seed=0)
    actors = Actors(GymStepper([Doors], agent, seed=0), 1, 'fork', chunk=16)
    try: rows = [s for _, chunk in zip(range(4), actors) for s in chunk]
    finally: actors.close()
    assert len(rows) == 64 and all(s.state['action_mask'][s.action] for s in rows) and isinstance(rows[0], SimpleStep)


def test_a_network_for_masked_spaces():
    for space in (gym.spaces.Box(0, 1, (3,)), gym.spaces.Discrete(7)):
        both = gym.spaces.Dict(observation=space, action_mask=gym.spaces.MultiBinary(2))
        torch.manual_seed(0)
        x = torch.rand(4, 3) if isinstance(space, gym.spaces.Box) else torch.arange(4.)
        a, b = (q_network(o, 2, seed=1) for o in (space, both))
        assert torch.equal(a(x), b(dict(observation=x, action_mask=torch.ones(4, 2)))) and isinstance(b, nn.Sequential)
    with refused('q_network', TypeError, got="Dict('observation': Discrete(7))"): q_network(gym.spaces.Dict(observation=space), 2)
