"States that a network normalises: statistics beside NumPy's, in all that handles a network"
import copy, multiprocessing, pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from fastrl_replay.all import (
    Batch, DQNLearner, EpsilonGreedy, ExperienceReplay, GymStepper, MixedMemory, NStep, ReplayMemory, SharedAgent, SharedParams,
    SimpleStep, evaluate, q_network)
from fastrl_replay.memory import DeviceMemory
from fastrl_replay.pipes.actors import ActorError
from fastrl_replay.gradient_step import move_towards
from fastrl_replay.pipes.normalized import Normalized, Running, Statistics, merged
from fastrl_replay.steps import tree_map
from refusals import refused
from words import WORDS


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))

class Arms(nn.Module):
    "Q-values of a dict of parts, of which it takes two"
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 2)
    def forward(self, states): return self.head(torch.cat([states['arm'], states['place'].reshape(*states['place'].shape[:-2], 4)], -1))

def arms(rng, *n):
    return dict(arm=rng.normal(30, 5, (*n, 2)).astype(np.float32), image=rng.integers(0, 255, (*n, 3, 3), np.uint8), kind=rng.integers(0, 9, n),
                place=rng.normal(-1e4, 1e-3, (*n, 2, 2)), mask=rng.random((*n, 2)) < .5)

def states_of(model, part='state'): return model.running[part].mean.numpy(), model.running[part].variance.numpy(), int(model.running[part].count)

def agree(model, part, values, axes=0):
    mean, variance, count = states_of(model, part)
    values = np.asarray(values, np.float64)
    assert count==len(values)
    np.testing.assert_allclose(mean, values.mean(axes), 1e-13, 1e-13)
    np.testing.assert_allclose(variance, values.var(axes), 1e-9, 1e-16)

def step_of(state): return SimpleStep(state, 0, state, env_id=0)


@pytest.mark.parametrize('seed', range(10))
def test_any_pieces_of_the_states_give_numpys_statistics(seed):
    rng = np.random.default_rng(seed)
    states, model, at = arms(rng, 300), Normalized(Arms()), 0
    while at < 300:
        m = int(rng.integers(1, 40))
        part = {k: v[at:at + m] for k, v in states.items()}
        rows = [step_of({k: v[i] for k, v in part.items()}) for i in range(len(part['arm']))]
        items = dict(steps=rows, list=[rows], batch=[Batch.of_steps(rows)])[['steps', 'list', 'batch'][int(rng.integers(3))]]
        assert [*Statistics(items, model)]==items
        at += m
    assert {*model.running}=={'state/arm', 'state/place'}
    for k in ('arm', 'place'): agree(model, f'state/{k}', states[k])
    found = model.normalized(tree_map(torch.as_tensor, states))
    assert {k: v.dtype for k, v in found.items()}=={k: torch.as_tensor(v).dtype for k, v in states.items()}
    for k in ('image', 'kind', 'mask'): assert (found[k].numpy()==states[k]).all()
    assert abs(found['arm'].mean()) < 1e-3 and abs(found['arm'].std() - 1) < .02 and found['arm'].abs().max() <= 10
    assert abs(found['place'].double().std() - 1) < .02              # 1e-3 around -1e4, in float64


def test_no_more_than_one_float32_lies_between():
    model = Normalized(nn.Identity(), clip=None, observation=np.zeros(3))
    x = np.random.default_rng(0).normal([1., 1e3, 1e-4], [1., .5, 1e-5], (1000, 3))
    model.update(x)
    wanted = (x - x.mean(0))/np.sqrt(x.var(0) + 1e-8)
    assert abs(model(torch.as_tensor(x, dtype=torch.float32)).double().numpy() - wanted).max() < 2e-3       # what float32 leaves of 1e3
    assert model(torch.as_tensor(x, dtype=torch.float32)).dtype==torch.float32
    assert model(torch.zeros(2, 5, 3)).shape==(2, 5, 3)                                                     # of sequences, too
    assert model(torch.zeros(2, 3, dtype=torch.bfloat16)).dtype==torch.bfloat16
    assert Normalized(nn.Identity(), clip=2, observation=np.zeros(1))(torch.tensor([[5.], [-7.], [1.]])).flatten().tolist()==[2, -2, 1]


@pytest.mark.parametrize('make', [
    lambda: Normalized(Arms(), observation=gym.spaces.Dict(dict(arm=gym.spaces.Box(-1, 1, (2,)), image=gym.spaces.Box(0, 255, (3, 3), np.uint8),
                       kind=gym.spaces.Discrete(9), place=gym.spaces.Box(-1, 1, (2, 2), np.float64), mask=gym.spaces.MultiBinary(2)))),
    lambda: Normalized(Arms(), observation=arms(np.random.default_rng(0)))])
def test_its_form_comes_from_a_space_or_a_state(make):
    model = make()
    assert {k: tuple(o.mean.shape) for k, o in model.running.items()}=={'state/arm': (2,), 'state/place': (2, 2)}
    SharedParams(model)


def test_its_form_comes_from_the_first_layer_or_the_first_states():
    assert tuple(Normalized(nn.Sequential(nn.Sequential(nn.Linear(7, 2)))).running['state'].mean.shape)==(7,)
    assert tuple(Normalized(nn.GRU(3, 5)).running['state'].mean.shape)==(3,)
    for items in ([step_of(np.zeros((2, 2)))], [[step_of(np.zeros((2, 2)))]], [Batch.of_steps([step_of(np.zeros((2, 2)))]*3)]):
        model = Normalized(nn.Flatten())
        assert [*Statistics(items, model)] and model.running['state'].mean.shape==(2, 2)
    assert not Normalized(nn.Sequential()).is_formed
    images = Normalized(nn.Flatten())
    assert [*Statistics([step_of(np.zeros((8, 8), np.uint8))], images)] and images.is_formed and not len(images.running)
    assert images(torch.full((1, 8, 8), 255.)).max()==255             # as an agent casts them


def test_wrong_states_change_nothing():
    model = Normalized(Arms(), observation=arms(np.random.default_rng(0)))
    good = arms(np.random.default_rng(1), 20)
    model.update(good)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    nan = good['place'].copy()
    nan[3, 0, 1] = np.nan
    for wrong, name in ((good | dict(place=nan), 'state.place'), (good | dict(arm=good['arm'][:, :1]), 'state.arm'), (good | dict(other=np.ones(20)), 'state.other'),
                        ({k: v for k, v in good.items() if k!='place'}, 'state'), (good['arm'], 'state')):
        with refused(name): model.update(wrong)
        assert all((v==before[k]).all() for k, v in model.state_dict().items())
    with refused('statistics: model', TypeError): Statistics([], Arms())
    with refused('statistics: field'): [*Statistics([step_of(np.zeros(2))], model, field='obs')]
    with refused('statistics', TypeError): [*Statistics([3], model)]
    with refused('clip'): Normalized(Arms(), clip=0.)


def test_copies_pickles_and_checkpoints_have_it():
    states = np.random.default_rng(0).normal(5, 3, (50, 4)).astype(np.float32)
    model = Normalized(net())
    model.update(states)
    model.frozen = True
    x = torch.as_tensor(states[:3])
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert (again(x)==model(x)).all() and again.frozen
        again.frozen = False
        again.update(states)
        assert states_of(again)[2]==100 and states_of(model)[2]==50
    for other in (Normalized(net(1)), nn.ModuleDict(dict(q=Normalized(nn.Sequential(nn.Flatten(), *net(1)))))):
        whole = nn.ModuleDict(dict(q=model)) if isinstance(other, nn.ModuleDict) else model
        if other is not whole and isinstance(other, nn.ModuleDict):
            whole = nn.ModuleDict(dict(q=Normalized(nn.Sequential(nn.Flatten(), *net()))))
            whole.q.form(states[0]), whole.q.update(states)
        other.load_state_dict(whole.state_dict())
        assert all((a==b).all() for a, b in zip(other.state_dict().values(), whole.state_dict().values()))
    assert 'running.state.shift' not in model.state_dict()
    again = Normalized(net(1))
    again.load_state_dict(model.state_dict())
    assert (again(x)==model(x)).all() and again.frozen


@pytest.mark.parametrize('change', [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double(), lambda m: m.float()])
def test_what_is_counted_stays_float64(change):
    model = Normalized(net())
    model.update(np.random.default_rng(0).normal(1e3, 1, (50, 4)))
    before = model.running['state'].mean.clone()
    change(model)
    assert model.running['state'].mean.dtype==torch.float64 and (model.running['state'].mean==before).all()
    assert model.running['state'].count.dtype==torch.int64
    dtype = model.net[0].weight.dtype
    assert model(torch.zeros(2, 4, dtype=dtype)).dtype==dtype


def test_a_target_made_before_the_first_state_follows():
    model = Normalized(Arms())
    target = copy.deepcopy(copy.deepcopy(model))
    rng = np.random.default_rng(0)
    direct = copy.deepcopy(model)
    model.form(arms(rng))
    model.update(arms(rng, 30))
    for o in (direct, target):
        move_towards(o, model, .5)
        assert all((a==b).all() for a, b in zip(o.buffers(), model.buffers(), strict=True)) and len([*o.buffers()])==10


class Metres(gym.ObservationWrapper):
    def observation(self, o): return o*np.float32([100, 100, 1, 1])

def cart(): return Metres(gym.make('CartPole-v1'))

def training(model, compile=False, **kw):
    agent = EpsilonGreedy(model, .3, seed=0)
    replay = GymStepper([cart], agent=agent, seed=0).statistics(model).n_step(3, .99).experience_replay(bs=16, max_sz=2000, min_sz=100, seed=0)
    return DQNLearner(model, replay.loader(), target_sync=30, compile=compile, **kw)


def test_a_training_counts_each_state_once_and_keeps_rows_raw(tmp_path):
    model = Normalized(net())
    learn = training(model)
    learn.fit(145)
    memory = learn.replay.memory
    n_step = learn.replay.source_datapipe
    n, waiting = states_of(model)[2], len(n_step._ready) + len(n_step._open.waiting()[0])
    assert n==memory.n_added + waiting and 0 < states_of(learn.target)[2] < n
    rows = memory.recent(len(memory))
    assert rows.state.abs().max() > 30 and rows.state.dtype==torch.float32
    if not waiting: agree(model, 'state', rows.state)
    learn.save(tmp_path)
    other = training(Normalized(net(5)))
    other.load(tmp_path)
    assert states_of(other.model)[2]==n and (states_of(other.target)[0]==states_of(learn.target)[0]).all()
    other.fit(20)
    assert states_of(other.model)[2] > n
    returns = evaluate(model, cart, episodes=3)
    assert (returns==evaluate(copy.deepcopy(model), cart, episodes=3)).all() and states_of(model)[2]==n


def test_a_compiled_training_is_the_eager_one():
    found = []
    for compile in (False, True):
        learn = training(Normalized(net()), compile)
        learn.fit(40)
        found.append((learn.losses, states_of(learn.model), learn.target.net[0].weight))
    (a, one, w), (b, two, v) = found
    np.testing.assert_allclose(a, b, 1e-4, 1e-6)
    assert one[2]==two[2] and (one[0]==two[0]).all() and torch.allclose(w, v, 1e-4, 1e-5)


def test_a_compiled_network_that_learns_its_form_late():
    model = Normalized(nn.Sequential(nn.Flatten(), *net()))
    learn = training(model, compile=True)
    learn.fit(40)
    other = Normalized(nn.Sequential(nn.Flatten(), *net()))
    eager = training(other)
    eager.fit(40)
    np.testing.assert_allclose(learn.losses, eager.losses, 1e-4, 1e-6)
    assert states_of(learn.target)[2]==states_of(eager.target)[2] > 0


def test_shared_weights_bring_the_statistics():
    model = Normalized(net())
    shared = SharedParams(model)
    agent = SharedAgent(EpsilonGreedy(model, 0., seed=0), shared, every=1)
    states = np.random.default_rng(0).normal(5, 3, (50, 4)).astype(np.float32)
    model.update(states)
    shared.publish(model)
    agent(states[:1]), agent(states[:1])
    assert (states_of(agent.model)[0]==states_of(model)[0]).all() and (agent.model(torch.as_tensor(states))==model(torch.as_tensor(states))).all()
    with pytest.raises(TypeError, match=WORDS['tell its form']): SharedParams(Normalized(Arms()))


def test_after_actors(tmp_path):
    model = Normalized(net())
    shared = SharedParams(model)
    agent = SharedAgent(EpsilonGreedy(model, .3, seed=0), shared)
    source = GymStepper(['CartPole-v1'], agent=agent, seed=0).actors(2, ctx=multiprocessing.get_all_start_methods()[-1], chunk=16)
    replay = source.statistics(model).experience_replay(bs=16, max_sz=1000, min_sz=64, seed=0)
    learn = DQNLearner(model, replay.loader(), shared=shared)
    learn.fit(60)
    rows = replay.memory.recent(len(replay.memory))
    agree(model, 'state', rows.state)
    replay.save(tmp_path)
    source.close()
    with pytest.raises(ActorError, match=WORDS['after the actors']):
        next(iter(GymStepper(['CartPole-v1']).statistics(model).actors(1, ctx=multiprocessing.get_all_start_methods()[-1])))


@pytest.mark.filterwarnings('ignore:device. on a CPU')
def test_on_other_memories():
    for make in (lambda: DeviceMemory(200, device='cpu', compile=False, seed=0), lambda: MixedMemory([ReplayMemory(200)], seed=0)):
        model, memory = Normalized(net()), make()
        device = isinstance(memory, DeviceMemory)
        rng = np.random.default_rng(0)
        states = rng.normal(3, 2, (60, 2, 4)).astype(np.float32)
        def chunk(s):
            step = SimpleStep(s, np.zeros(2, int), s, np.zeros(2, bool), np.zeros(2, bool), np.zeros(2, np.float32), np.zeros(2, np.float32), np.arange(2))
            step = step._replace(proc_id=np.zeros(2, int), step_n=np.zeros(2, int), episode_n=np.zeros(2, int))
            return type(step)(*map(torch.as_tensor, step)) if device else Batch.of(step)
        replay = ExperienceReplay(Statistics([chunk(s) for s in states], model), bs=4, memory=memory, min_sz=4)
        assert len([*replay])
        agree(model, 'state', states.reshape(-1, 4))


def test_those_inside_another_module_and_those_that_share():
    both = nn.ModuleDict(dict(actor=Normalized(net()), critic=Normalized(net()), own=Normalized(net())))
    both['critic'].running = both['actor'].running
    assert [*Statistics([step_of(np.float32([k, 0, 0, 0])) for k in range(5)], both)]
    assert states_of(both['critic'])[2]==5 and states_of(both['own'])[2]==5


def test_a_mask_and_a_q_network():
    space = gym.spaces.Dict(dict(observation=gym.spaces.Box(-1, 1, (4,)), action_mask=gym.spaces.Box(0, 1, (2,), np.int8)))
    model = Normalized(q_network(space, 2, seed=0), observation=space)
    state = dict(observation=np.float32([1, 2, 3, 4]), action_mask=np.int8([0, 1]))
    assert [*Statistics([step_of(state)]*3, model)] and [*model.running]==['state/observation']
    assert EpsilonGreedy(model, 0.)(tree_map(lambda a: a[None], state)).tolist()==[1]


def test_arrays_and_tensors_are_counted_by_one_formula():
    "On a GPU the same is computed with tensors"
    rng, a, b = np.random.default_rng(0), (np.zeros(3), np.ones(3), 0), (torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), 0)
    for n in (1, 7, 1, 30):
        rows = rng.normal(100, 2, (n, 3))
        a = *merged(*a, rows), a[2] + n
        b = *merged(b[0], b[1], torch.tensor(b[2]).double(), torch.as_tensor(rows)), b[2] + n
        np.testing.assert_allclose(a[0], b[0].numpy(), 1e-14)
        np.testing.assert_allclose(a[1], b[1].numpy(), 1e-12, 1e-25)


def test_a_state_that_is_one_number():
    model = Normalized(nn.Identity())
    assert [*Statistics([step_of(float(k)) for k in range(5)], model)] and model.running['state'].mean==2 and model.running['state'].variance==2
    assert model(torch.tensor([2., 4.])).tolist()==[0, pytest.approx(2**.5)]


def test_one_step_loop_without_a_pipe():
    running = Running((2,))
    for k in range(5): running.update(np.array([k, 2.*k]))
    assert running.mean.tolist()==[2, 4] and running.variance.tolist()==[2, 8] and running.count==5
    assert NStep([step_of(np.zeros(4, np.float32))]*3, 2, .9).statistics(Normalized(net())).state_dict()=={'source': {'n': 2, 'gamma': .9, 'source': None}}
