"Our buffers under Stable-Baselines3: what they give is what its own give, trainings included, and what it can't do"
import pickle, subprocess, sys, warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common import buffers
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize
from stable_baselines3.her import HerReplayBuffer as TheirHer

from fastrl_replay.interop import sb3
from refusals import refused
from words import WORDS, words

FLAT = spaces.Box(-1, 1, (4,), np.float32)
NESTED = spaces.Dict(a=spaces.Box(0, 255, (2, 3), np.uint8), b=spaces.Discrete(5), c=spaces.Box(-1, 1, (1,), np.float64))
ACTIONS = spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float64), spaces.MultiBinary(3)


def small(**kw):
    "Options of a short training; SB3 writes into the dict of the policy's"
    return dict(policy_kwargs=dict(net_arch=[8]), buffer_size=300, learning_starts=60, batch_size=16, train_freq=4, seed=0) | kw


@pytest.fixture(autouse=True)
def one_thread():
    "Networks this small are slower on more"
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def observations(space, n, rng):
    "`n` observations, stacked as SB3's vector environments stack them"
    if isinstance(space, spaces.Dict): return {k: observations(o, n, rng) for k, o in space.items()}
    if isinstance(space, spaces.Discrete): return rng.integers(0, space.n, n)
    return (rng.random((n, *space.shape))*100).astype(space.dtype)


def time_step(space, action_space, n, rng, flags=.2):
    "The arguments of one `add`"
    actions = np.array([action_space.sample() for _ in range(n)])
    ended = rng.random(n) < flags
    infos = [{'TimeLimit.truncated': bool(e and rng.random() < .5)} if rng.random() < .9 else {} for e in ended]
    return observations(space, n, rng), observations(space, n, rng), actions, rng.normal(size=n).astype(np.float32), ended, infos


def leaves(o):
    "The tensors in samples, in order; None is left out"
    if isinstance(o, dict): return [t for v in o.values() for t in leaves(v)]
    if isinstance(o, tuple): return [t for v in o for t in leaves(v)]
    return [] if o is None else [o]


def same(a, b):
    "Equal tensors, of equal shapes and dtypes, in equal structures"
    assert type(a) is type(b)
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert torch.equal(x, y)


def both(space, action_space, size, n, theirs=None, **kw):
    "SB3's buffer and ours"
    nested = isinstance(space, spaces.Dict)
    theirs = theirs or (buffers.DictReplayBuffer if nested else buffers.ReplayBuffer)
    own = sb3.DictReplayBuffer if nested else sb3.ReplayBuffer
    return theirs(size, space, action_space, 'cpu', n, **kw), own(size, space, action_space, 'cpu', n, **kw)


class Alike(sb3.ReplayBuffer):
    "Ours, but with several environments it draws a time and an environment apart, as SB3 does: the same rows"
    sample = buffers.BaseBuffer.sample


def drawn(buffer, seed, *args):
    "A sample, from a seed; with several environments the rows that SB3 draws"
    np.random.seed(seed)                   # noqa: NPY002
    apart = buffer.n_envs > 1 and not isinstance(buffer, TheirHer)
    return buffers.BaseBuffer.sample(buffer, *args) if apart else buffer.sample(*args)


# ---- what sample returns

@pytest.mark.parametrize('n', [1, 3, 8])
@pytest.mark.parametrize('space', [FLAT, NESTED, spaces.Discrete(7), spaces.Box(0, 255, (3, 8, 8), np.uint8)], ids=['flat', 'nested', 'discrete', 'image'])
@pytest.mark.parametrize('timeouts', [True, False])
def test_samples_are_those_of_sb3(n, space, timeouts):
    rng = np.random.default_rng(n)
    for k, action_space in enumerate(ACTIONS):
        action_space.seed(k)
        theirs, ours = both(space, action_space, 50, n, handle_timeout_termination=timeouts)
        for t in range(120):
            args = time_step(space, action_space, n, rng)
            theirs.add(*args), ours.add(*args)
            assert (theirs.pos, theirs.full, theirs.size()) == (ours.pos, ours.full, ours.size())
            if t % 10 == 0: same(drawn(theirs, t, 16), drawn(ours, t, 16))
        inds = rng.integers(0, ours.size(), 32)
        np.random.seed(1)                  # noqa: NPY002
        a = theirs._get_samples(inds)
        np.random.seed(1)                  # noqa: NPY002
        same(a, ours._get_samples(inds))
        assert ours.memory.check_valid()
        np.testing.assert_array_equal(theirs.dones, ours.dones)
        np.testing.assert_array_equal(theirs.rewards, ours.rewards)
        np.testing.assert_array_equal(theirs.actions, ours.actions)
        for name in ('observations', 'next_observations'):
            a, b = getattr(theirs, name), getattr(ours, name)
            for x, y in zip(leaves(a if isinstance(a, dict) else (a,)), leaves(b if isinstance(b, dict) else (b,)), strict=True):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize('n,steps,normalized', [(1, 3, False), (1, 5, True), (4, 2, True), (4, 3, False), (8, 7, False)])
def test_n_step_samples_are_those_of_sb3(n, steps, normalized):
    rng = np.random.default_rng(steps)
    env = VecNormalize(DummyVecEnv([lambda: gym.make('CartPole-v1')]*n)) if normalized else None
    if env: env.obs_rms.mean[:], env.ret_rms.var = .3, 4.
    theirs, ours = both(FLAT, ACTIONS[0], 30*n, n, buffers.NStepReplayBuffer, n_steps=steps, gamma=.9)
    for t in range(100):
        args = time_step(FLAT, ACTIONS[0], n, rng)
        theirs.add(*args), ours.add(*args)
        if t % 7 == 0: same(drawn(theirs, t, 64, env), drawn(ours, t, 64, env))


def test_n_step_dicts():
    rng = np.random.default_rng(0)
    ours = sb3.DictReplayBuffer(20, NESTED, ACTIONS[0], 'cpu', n_steps=2, gamma=.5)
    for _ in range(20): ours.add(*time_step(NESTED, ACTIONS[0], 1, rng, flags=0.))
    got = ours._get_samples(np.array([3, 19]))
    np.testing.assert_array_equal(got.next_observations['a'], ours.next_observations['a'][[4, 19], 0])
    np.testing.assert_allclose(got.rewards[:, 0], [ours.rewards[3, 0] + .5*ours.rewards[4, 0], ours.rewards[19, 0]])
    assert got.discounts.tolist() == [[.25], [.5]]


@pytest.mark.parametrize('space', [FLAT, NESTED.spaces['a']])
def test_normalized_samples_are_those_of_sb3(space):
    class Env(gym.Env):
        observation_space, action_space = space, ACTIONS[0]
        def reset(self, **kw): return space.sample(), {}
    rng, env = np.random.default_rng(0), VecNormalize(DummyVecEnv([Env]))
    env.obs_rms.mean[:], env.ret_rms.var = .5, 9.
    theirs, ours = both(space, ACTIONS[0], 40, 1)
    for _ in range(30):
        args = time_step(space, ACTIONS[0], 1, rng)
        theirs.add(*args), ours.add(*args)
    same(drawn(theirs, 0, 20, env), drawn(ours, 0, 20, env))


@pytest.mark.parametrize('added', [100, 20])
def test_rows_of_several_environments_are_equally_likely(added):
    buffer, n, draws = sb3.ReplayBuffer(128, FLAT, ACTIONS[0], 'cpu', 4), 4, 500
    for t in range(added):
        state = (4*t + np.arange(4.))[:, None].repeat(4, 1).astype(np.float32)
        buffer.add(state, state, np.zeros(n), state[:, 0], np.zeros(n, bool), [{}]*n)
    np.random.seed(0)                      # noqa: NPY002
    found = torch.cat([buffer.sample(256).rewards for _ in range(draws)]).long().flatten()
    assert found.min() == max(0, 4*added - 128) and found.max() == 4*added - 1
    counts, size = torch.bincount(found - found.min()), min(128, 4*added)
    assert len(counts) == size and ((counts*size/len(found) - 1)**2).mean()*len(found)/size < 1.5      # chi-squared a row: 1


@pytest.mark.parametrize('n', [1, 3])
def test_rows_reach_the_memory_when_it_is_asked_for(n):
    rng, a, b = np.random.default_rng(0), *(sb3.ReplayBuffer(90*n, FLAT, ACTIONS[0], 'cpu', n) for _ in range(2))
    for t in range(300):
        args = time_step(FLAT, ACTIONS[0], n, rng)
        a.add(*args), b.add(*args)
        assert (b.pos, b.full, b.size()) == ((t + 1) % 90, t >= 89, min(t + 1, 90))
        if rng.random() < .1: assert len(a.memory) == n*a.size() and a.memory.check_valid()
        if t % 100 == 50: b = pickle.loads(pickle.dumps(b))
    for name in a.memory.layout.fields: np.testing.assert_array_equal(a.stored(name), b.stored(name))
    assert a.memory.next(range(210*n, 300*n)).tolist() == b.memory.next(range(210*n, 300*n)).tolist()


def test_on_disk_each_time_goes_in_at_once(tmp_path):
    buffer, rng = sb3.ReplayBuffer(20, FLAT, ACTIONS[0], 'cpu', path=tmp_path/'kept'), np.random.default_rng(0)
    memory = buffer.memory
    for t in range(5):
        buffer.add(*time_step(FLAT, ACTIONS[0], 1, rng))
        assert memory.n_added == t + 1
    memory.close()


def test_what_was_sampled_stays_as_it_was():
    rng, held = np.random.default_rng(0), []
    ours = sb3.DictReplayBuffer(50, NESTED, ACTIONS[0], 'cpu')
    for t in range(200):
        ours.add(*time_step(NESTED, ACTIONS[0], 1, rng))
        got = leaves(ours.sample(8))[t % 6]
        held.append((got, got.clone()))
    for a, b in held: assert torch.equal(a, b)


# ---- trainings

def weights(model): return torch.cat([p.detach().ravel() for p in model.policy.parameters()])


@pytest.mark.parametrize('algorithm', [DQN, SAC, TD3])
@pytest.mark.parametrize('n', [1, 8])
def test_a_training_is_the_same_to_the_last_bit(algorithm, n):
    found = []
    for own in (None, sb3.ReplayBuffer if n == 1 else Alike):
        env = make_vec_env('CartPole-v1' if algorithm is DQN else 'Pendulum-v1', n, seed=0)
        model = algorithm('MlpPolicy', VecNormalize(env) if n > 1 else env, replay_buffer_class=own, **small())
        found.append(weights(model.learn(400)))
    assert torch.equal(*found)


@pytest.mark.parametrize('n', [1, 4])
def test_n_steps_are_passed_as_sb3_says(n):
    found = []
    for own in (dict(n_steps=3), dict(replay_buffer_class=sb3.ReplayBuffer if n == 1 else Alike, replay_buffer_kwargs=dict(n_steps=3, gamma=.9))):
        model = DQN('MlpPolicy', make_vec_env('CartPole-v1', n, seed=0), gamma=.9, **own, **small())
        assert (model.replay_buffer.n_steps, model.replay_buffer.gamma) == (3, .9)
        found.append(weights(model.learn(400)))
    assert torch.equal(*found)
    model = DQN('MlpPolicy', 'CartPole-v1', replay_buffer_class=sb3.ReplayBuffer, replay_buffer_kwargs=dict(n_steps=2, gamma=.5), **small())
    assert (model.replay_buffer.n_steps, model.replay_buffer.gamma) == (2, .5)


class Frames(gym.Env):
    "Random images, in episodes that a time limit ends"
    observation_space, action_space = spaces.Box(0, 255, (36, 36, 1), np.uint8), spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.integers(0, 256, (36, 36, 1), np.uint8), {}
    def step(self, action):
        self.t += 1
        return self.np_random.integers(0, 256, (36, 36, 1), np.uint8), 1., False, self.t % 17 == 0, {}


def test_less_memory_with_time_limits_and_learning_on(tmp_path):
    models = []
    for own, less in ((None, False), (Alike, True)):
        env = VecFrameStack(make_vec_env(Frames, 2, seed=0), 4)
        model = DQN('CnnPolicy', env, replay_buffer_class=own, optimize_memory_usage=less,
                    **small(policy_kwargs=dict(features_extractor_kwargs=dict(features_dim=8))))
        models.append(model.learn(100))
    theirs, ours = models
    assert torch.equal(weights(theirs), weights(ours))
    assert ours.replay_buffer.memory.nbytes < .6*sum(o.nbytes for o in (theirs.replay_buffer.observations, theirs.replay_buffer.next_observations))
    same(drawn(theirs.replay_buffer, 0, 32), drawn(ours.replay_buffer, 0, 32))
    pos = ours.replay_buffer.pos
    with pytest.warns(UserWarning, match=WORDS['a trajectory ends']): ours.learn(40)          # SB3 sets `dones[pos]`
    got = ours.replay_buffer._get_samples(np.full(8, pos - 1))
    assert got.dones.all() and ours.replay_buffer.dones[pos - 1].all()
    assert ours.replay_buffer.memory.check_valid()


@pytest.mark.parametrize('algorithm', [SAC, TD3])
def test_learning_goes_on_from_a_saved_buffer(tmp_path, algorithm):
    env = make_vec_env('Pendulum-v1', 2, seed=0)
    model = algorithm('MlpPolicy', env, replay_buffer_class=sb3.ReplayBuffer, **small()).learn(100)
    model.save_replay_buffer(tmp_path/'buffer')
    before = model.replay_buffer
    model.load_replay_buffer(tmp_path/'buffer')
    assert model.replay_buffer is not before and isinstance(model.replay_buffer, sb3.ReplayBuffer)
    same(drawn(before, 0, 32), drawn(model.replay_buffer, 0, 32))
    model.learn(60, reset_num_timesteps=False)
    assert model.replay_buffer.size() == 84 and model.replay_buffer.memory.check_valid()


def test_a_saved_buffer_is_as_large_as_what_it_holds():
    env = make_vec_env(lambda: BitFlippingEnv(4), 1)
    for own, space, kw in ((sb3.ReplayBuffer, FLAT, {}), (sb3.HerReplayBuffer, env.observation_space, dict(env=env))):
        buffer, rng = own(1_000_000, space, ACTIONS[0], **kw), np.random.default_rng(0)
        args = time_step(space, ACTIONS[0], 1, rng)
        for _ in range(3000): buffer.add(*args)
        saved = pickle.dumps(buffer, pickle.HIGHEST_PROTOCOL)
        assert len(saved) < 1e6
        assert pickle.loads(saved).size() == 3000


# ---- the buffer itself

def test_pos_full_and_reset():
    buffer, rng = sb3.ReplayBuffer(10, FLAT, ACTIONS[0], 'cpu', 2), np.random.default_rng(0)
    assert buffer.buffer_size == 5
    for _ in range(3): buffer.add(*time_step(FLAT, ACTIONS[0], 2, rng))
    with refused('pos', got='2'): buffer.pos = 2
    buffer.reset()
    assert (buffer.pos, buffer.full, buffer.size()) == (0, False, 0)
    with pytest.raises(ValueError, match=WORDS['it is empty']): buffer.sample(3)
    buffer.full = True
    assert buffer.full and not buffer.sample(4).observations.any() and buffer.memory.check_valid()
    buffer.add(*time_step(FLAT, ACTIONS[0], 2, rng))
    assert (buffer.pos, buffer.full) == (1, True)
    with refused('full', got='False'): buffer.full = False
    buffer.reset()
    assert buffer.size() == 0
    with pytest.raises(ValueError): buffer.observations[0] = 1


def test_what_does_not_fit_changes_nothing():
    buffer, rng = sb3.ReplayBuffer(10, FLAT, ACTIONS[0], 'cpu'), np.random.default_rng(0)
    good = time_step(FLAT, ACTIONS[0], 1, rng)
    buffer.add(*good)
    with pytest.raises(ValueError): buffer.add(good[0][:, :3], *good[1:])
    with pytest.raises((ValueError, TypeError)): buffer.add(good[0], good[1], good[2], np.array(['x']), *good[4:])
    assert buffer.size() == 1 and buffer.memory.check_valid()
    for wrong in (0, -1, 1.5):
        with refused('n_steps'): sb3.ReplayBuffer(10, FLAT, ACTIONS[0], n_steps=wrong)
    with pytest.raises(TypeError, match=words('an unknown option', name='wrong')): sb3.ReplayBuffer(10, FLAT, ACTIONS[0], wrong=1)


def test_a_flag_that_is_written_is_in_the_next_save(tmp_path):
    "As SB3 ends an episode before it continues learning"
    buffer, rng = sb3.ReplayBuffer(20, FLAT, ACTIONS[0], 'cpu'), np.random.default_rng(0)
    for _ in range(6): buffer.add(*time_step(FLAT, ACTIONS[0], 1, rng, flags=0.))
    buffer.memory.save(tmp_path)
    buffer.dones[buffer.pos - 1] = True
    buffer.timeouts[2] = True
    buffer.memory.save(tmp_path)
    rows = type(buffer.memory).load(tmp_path, sb3.SharedRandom()).fetch(np.arange(6))
    assert rows.terminated.tolist() == [*5*[0], 1] and rows.truncated.tolist() == [0, 0, 1, 0, 0, 0]


def test_flags_are_written_into_the_memory():
    buffer, rng = sb3.ReplayBuffer(20, FLAT, ACTIONS[0], 'cpu', 2), np.random.default_rng(0)
    for _ in range(6): buffer.add(*time_step(FLAT, ACTIONS[0], 2, rng, flags=0.))
    buffer.dones[4] = True
    buffer.timeouts[2, 1] = True
    assert buffer.memory.fetch([8, 9], ('terminated',)).terminated.all()
    assert [len(buffer.memory.episode(k)) for k in (0, 1, 10)] == [5, 3, 1]
    buffer.dones[1][0] = 1.                            # a part of it is as good
    buffer.dones[3:5, 1] = [1, 0]
    buffer.timeouts[9] = True                          # nothing is stored there
    buffer.dones[1] *= ~buffer.timeouts[1]
    assert buffer.memory.column('terminated')[:12].tolist() == [*2*[0], 1, *4*[0], 1, 1, *3*[0]]
    assert buffer.memory.column('truncated').sum() == 1 and buffer.memory.check_valid()
    with refused('state'): buffer.memory.column('state')
    with refused('column'): buffer.memory.column('nothing')


# ---- priorities

def test_priorities_reach_the_loss_and_come_back():
    model = sb3.PrioritizedDQN('MlpPolicy', 'CartPole-v1', replay_buffer_kwargs=dict(alpha=.7, beta=.5), **small())
    model.learn(300)
    memory = model.replay_buffer.memory
    assert len(np.unique(memory.sampler.priorities)) > 100 and memory.check_valid()
    samples = model.replay_buffer.sample(16)
    assert samples.weights.shape == samples.rewards.shape == (16, 1) and samples.weights.max() == 1
    probs = samples.batch.probs.numpy()
    np.testing.assert_allclose(samples.weights[:, 0], (probs.min()/probs)**.5, rtol=1e-5)
    assert samples.update_priorities(torch.arange(16.)[:, None]) == len(samples.batch.ids.unique())


def test_a_train_that_uses_no_priorities_is_warned_of():
    model = DQN('MlpPolicy', 'CartPole-v1', replay_buffer_class=sb3.PrioritizedReplayBuffer, **small())
    with pytest.warns(UserWarning, match=WORDS['no priority']): model.learn(480)


ALGORITHMS = 'DQN', 'SAC', 'TD3', 'QRDQN', 'TQC', 'CrossQ'


def prioritized(name):
    "An algorithm, and the same with priorities"
    if name in ('QRDQN', 'TQC', 'CrossQ'):
        algorithm = getattr(pytest.importorskip('sb3_contrib', reason='sb3-contrib is not installed'), name)
        return algorithm, type(f'Prioritized{name}', (sb3.Prioritized, algorithm), {})
    return {'DQN': DQN, 'SAC': SAC, 'TD3': TD3}[name], getattr(sb3, f'Prioritized{name}')


class AsDict(gym.ObservationWrapper):
    "An environment whose observation is a dict"
    def __init__(self, env):
        super().__init__(env)
        self.observation_space = spaces.Dict(a=env.observation_space)
    def observation(self, observation): return dict(a=observation)


def trained(algorithm, nested=False, n=120, alpha=0., n_envs=1, **kw):
    "A model after `n` steps with a prioritized buffer; with alpha 0 it draws all rows alike, and weights are one"
    kinds = {o.__name__ for o in algorithm.__mro__}
    name = 'CartPole-v1' if kinds & {'DQN', 'QRDQN'} else 'Pendulum-v1'
    env = make_vec_env(lambda: AsDict(gym.make(name)) if nested else gym.make(name), n_envs, seed=0)
    more = dict(n_quantiles=5) if kinds & {'QRDQN', 'TQC'} else {}
    options = small(gradient_steps=3, learning_starts=40, policy_kwargs=dict(net_arch=[8]) | more,
                    replay_buffer_class=sb3.PrioritizedReplayBuffer, replay_buffer_kwargs=dict(alpha=alpha)) | kw
    return algorithm('MultiInputPolicy' if nested else 'MlpPolicy', env, **options).learn(n)


@pytest.mark.parametrize('name,nested', [(k, False) for k in ALGORITHMS] + [(k, True) for k in ALGORITHMS[:-1]])    # CrossQ has no policy for dicts
def test_with_weights_of_one_it_is_the_algorithm_to_the_last_bit(name, nested):
    own, ours = prioritized(name)
    theirs = trained(own, nested)
    assert theirs._n_updates == 60
    assert torch.equal(weights(theirs), weights(trained(ours, nested)))
    assert not torch.equal(weights(theirs), weights(trained(ours, nested, alpha=.6)))


@pytest.mark.parametrize('name', ['DQN', 'TD3'])
def test_with_weights_of_one_it_is_the_algorithm_with_n_step_returns_and_several_environments(name):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')              # SB3 says that it ignores n_steps; `Prioritized` passes it
        own, ours = prioritized(name)
        given = dict(alpha=0., n_steps=3, gamma=.99)
        models = [trained(own, n=240, n_envs=3, n_steps=3, replay_buffer_kwargs=given), trained(ours, n=240, n_envs=3, n_steps=3)]
    assert torch.equal(*map(weights, models)) and models[0]._n_updates > 30


def rows_alone(loss, q, target, w):
    "A weighted mean of the losses of single rows"
    return sum(w[k]*loss(q[k:k + 1], target[k:k + 1]) for k in range(len(q)))/len(q)


@pytest.mark.parametrize('name', ['mse', 'smooth_l1', 'written_out', 'quantiles', 'quantiles_of_critics'])
def test_each_row_of_a_loss_has_its_weight(name):
    torch.manual_seed(0)
    shape = {'quantiles': (6, 5), 'quantiles_of_critics': (6, 2, 5)}.get(name, (6, 1))
    loss = {'mse': F.mse_loss, 'smooth_l1': F.smooth_l1_loss, 'written_out': lambda q, target: ((q - target)**2).mean()}.get(name)
    if loss is None: loss = pytest.importorskip('sb3_contrib.common.utils', reason='sb3-contrib is not installed').quantile_huber_loss
    space, rng = ACTIONS[0], np.random.default_rng(0)
    buffer = sb3.PrioritizedReplayBuffer(50, FLAT, space, 'cpu', seed=0)
    for _ in range(50): buffer.add(*time_step(FLAT, space, 1, rng))
    buffer.sample(50).update_priorities(torch.rand(50))
    feedback = sb3.Feedback(buffer)
    rewards, w = feedback.sample(6).rewards, feedback.samples.weights[:, 0]
    assert len(w.unique()) > 3
    q, more = torch.randn(shape, requires_grad=True), torch.randn(shape)
    with torch.no_grad(): target = (rewards + .9*more) if q.ndim == 2 else (rewards.unsqueeze_(1) + .9*more)
    made = loss(q, target) + .1*q.square().mean()            # what else q is used for stays as it is
    assert type(target) is sb3.Targets and type(made) is torch.Tensor
    twin = rows_alone(loss, q, target.as_subclass(torch.Tensor), w) + .1*q.square().mean()
    torch.testing.assert_close(torch.autograd.grad(made, q), torch.autograd.grad(twin, q))
    slots, mean = feedback.samples.batch.ids, [o.as_subclass(torch.Tensor).detach() for o in (target, q)]
    if 'quantiles' in name: mean = [o.mean(-1, keepdim=True) for o in mean]
    errors = (mean[0] - mean[1]).abs().flatten(1).mean(1)
    feedback.send()
    np.testing.assert_allclose(buffer.memory.sampler.priorities[slots], [errors[slots == k][-1] for k in slots], rtol=1e-4)


class WrittenOut(DQN):
    "A DQN whose loss is weighted as in the paper, too simple to be wrong"
    def train(self, gradient_steps, batch_size=100):
        self._update_learning_rate(self.policy.optimizer)
        for _ in range(gradient_steps):
            o = self.replay_buffer.sample(batch_size)
            with torch.no_grad(): target = o.rewards + (1 - o.dones)*self.gamma*self.q_net_target(o.next_observations).max(1, keepdim=True)[0]
            q = self.q_net(o.observations).gather(1, o.actions.long())
            self.policy.optimizer.zero_grad()
            (o.weights*F.smooth_l1_loss(q, target, reduction='none')).mean().backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            o.update_priorities(target - q)


def test_a_whole_training_beside_one_with_the_weighted_loss_written_out():
    kw = dict(n=300, alpha=.6, replay_buffer_kwargs=dict(alpha=.6, beta=.8))
    ours, twin = trained(sb3.PrioritizedDQN, **kw), trained(WrittenOut, **kw)
    torch.testing.assert_close(weights(ours), weights(twin))
    np.testing.assert_allclose(*(o.replay_buffer.memory.sampler.priorities for o in (ours, twin)), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize('name', ALGORITHMS)
def test_td_errors_come_back(name):
    "They are computed here from the networks before the update, with the same noise"
    own, ours = prioritized(name)
    kw = {} if 'DQN' in name else dict(target_policy_noise=.3, target_noise_clip=.2) if name == 'TD3' else dict(ent_coef=.2)
    model = trained(ours, alpha=1., **kw)
    draw, batches, errors = model.replay_buffer.sample, [], []
    def sample(batch_size, env=None):
        batches.append(draw(batch_size, env))
        noise = torch.get_rng_state()
        errors.append(by_hand(name, model, batches[-1]).numpy())
        torch.set_rng_state(noise)
        return batches[-1]
    model.replay_buffer.sample = sample
    sampler = model.replay_buffer.memory.sampler
    for steps in (1, 2):
        model.train(steps, 32)
        ids = batches[-1].batch.ids
        wanted = [errors[-1][ids == k][-1] for k in ids]         # of a row drawn twice, the last
        np.testing.assert_allclose(sampler.priorities[ids], wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def by_hand(name, model, samples):
    "The absolute TD errors of the rows; of several critics their mean, of quantiles those of their means"
    networks, obs, after, actions = model.policy, samples.observations, samples.next_observations, samples.actions
    networks.set_training_mode(True)
    if name == 'DQN':
        q, best = networks.q_net(obs).gather(1, actions.long()), networks.q_net_target(after).max(1, keepdim=True)[0]
    elif name == 'QRDQN':
        q = networks.quantile_net(obs).mean(1).gather(1, actions.long())
        best = networks.quantile_net_target(after).mean(1).max(1, keepdim=True)[0]
    elif name == 'TD3':
        noise = torch.empty_like(actions).normal_(0, .3).clamp(-.2, .2)
        q = torch.cat(networks.critic(obs, actions), 1)
        best = torch.cat(networks.critic_target(after, (networks.actor_target(after) + noise).clamp(-1, 1)), 1).min(1, keepdim=True)[0]
    else:
        if name == 'CrossQ': networks.actor.set_bn_training_mode(False)
        else: networks.actor.action_log_prob(obs)
        new, log_prob = networks.actor.action_log_prob(after)
        if name == 'SAC': q, best = torch.cat(networks.critic(obs, actions), 1), torch.cat(networks.critic_target(after, new), 1).min(1, keepdim=True)[0]
        elif name == 'TQC':
            q = networks.critic(obs, actions).mean(2)
            best = networks.critic_target(after, new).reshape(len(obs), -1).sort()[0][:, :-4].mean(1, keepdim=True)
        else:
            networks.critic.set_bn_training_mode(True)
            both_q = torch.cat(networks.critic(torch.cat([obs, after]), torch.cat([actions, new])), 1)
            q, best = both_q[:len(obs)], both_q[len(obs):].min(1, keepdim=True)[0]
        best = best - .2*log_prob[:, None]
    return (samples.rewards + (1 - samples.dones)*model.gamma*best - q).abs().mean(1)


def test_a_buffer_without_priorities_or_a_loss_without_targets_is_refused():
    with refused('replay_buffer_class', TypeError):
        sb3.PrioritizedDQN('MlpPolicy', 'CartPole-v1', **small(replay_buffer_class=sb3.ReplayBuffer)).learn(80)
    class Other(DQN):
        def train(self, gradient_steps, batch_size=100):
            for _ in range(gradient_steps): self.replay_buffer.sample(batch_size)
    class PrioritizedOther(sb3.Prioritized, Other): pass
    model = PrioritizedOther('MlpPolicy', 'CartPole-v1', **small(learning_starts=1000)).learn(80)
    before = model.replay_buffer.memory.sampler.priorities.copy()
    for steps in (1, 3):
        with refused('train', TypeError, got='none'): model.train(steps, 8)
        assert isinstance(model.replay_buffer, sb3.PrioritizedReplayBuffer)
    np.testing.assert_array_equal(model.replay_buffer.memory.sampler.priorities, before)


def test_a_prioritized_model_is_saved_and_continued(tmp_path):
    model = trained(sb3.PrioritizedSAC, alpha=.6)
    model.save(tmp_path/'model')
    model.save_replay_buffer(tmp_path/'buffer')
    again = sb3.PrioritizedSAC.load(tmp_path/'model', env=model.get_env())
    again.load_replay_buffer(tmp_path/'buffer')
    assert torch.equal(weights(model), weights(again))
    before = again.replay_buffer.memory.sampler.priorities.copy()
    again.learn(40, reset_num_timesteps=False)
    assert (again.replay_buffer.memory.sampler.priorities[:120] != before[:120]).any()


def test_the_same_seed_gives_the_same_prioritized_training():
    found = [weights(sb3.PrioritizedDQN('MlpPolicy', 'CartPole-v1', **small(seed=k)).learn(200)) for k in (0, 0, 1)]
    assert torch.equal(*found[:2]) and not torch.equal(*found[1:])


# ---- goals

def goal_env(n, n_bits=4): return make_vec_env(lambda: BitFlippingEnv(n_bits, continuous=False), n, seed=0)


def her(env, size=60, **kw):
    return sb3.HerReplayBuffer(size, env.observation_space, env.action_space, env, 'cpu', env.num_envs, **kw)


def play(env, buffers_, n, rng, obs=None):
    "`n` random steps into several buffers; the last observation"
    obs = env.reset() if obs is None else obs
    for _ in range(n):
        actions = rng.integers(0, env.action_space.n, env.num_envs)
        new, rewards, ended, infos = env.step(actions)
        after = {k: v.copy() for k, v in new.items()}
        for k, info in enumerate(infos):
            if ended[k]:
                for key in after: after[key][k] = info['terminal_observation'][key]
        for o in buffers_: o.add({k: v.copy() for k, v in obs.items()}, {k: v.copy() for k, v in after.items()}, actions, rewards, ended, infos)
        obs = new
    return obs


@pytest.mark.parametrize('n', [1, 3])
def test_episodes_are_known_as_sb3_knows_them(n):
    env, rng = goal_env(n), np.random.default_rng(0)
    ours = her(env, 20*n)
    theirs = TheirHer(20*n, env.observation_space, env.action_space, env, 'cpu', n)
    obs = None
    for _ in range(60):
        obs = play(env, (theirs, ours), 1, rng, obs)
        np.testing.assert_array_equal(theirs.ep_length, ours.ep_length)
        np.testing.assert_array_equal(theirs.ep_start, ours.ep_start)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        theirs.truncate_last_trajectory(), ours.truncate_last_trajectory()
    np.testing.assert_array_equal(theirs.dones, ours.dones)
    np.testing.assert_array_equal(theirs.timeouts, ours.timeouts)
    np.testing.assert_array_equal(theirs.ep_length, ours.ep_length)
    last = np.full(9, ours.pos - 1)
    assert not (ours._get_samples(last).dones.numpy().astype(bool) & ours.timeouts[ours.pos - 1].all()).any()


@pytest.mark.parametrize('strategy', ['future', 'final', 'episode'])
def test_goals_are_those_of_the_strategy(strategy):
    env, rng = goal_env(2, 8), np.random.default_rng(1)
    ours = her(env, 120, goal_selection_strategy=strategy, n_sampled_goal=3)
    play(env, [ours], 90, rng)
    start, length = ours.ep_start, ours.ep_length
    slots = np.flatnonzero(length.ravel())
    times, envs = np.divmod(np.repeat(slots, 200), 2)
    goals = ours._goal_times(times, envs)
    at, goal_at = (times - start[times, envs]) % 60, (goals - start[times, envs]) % 60
    assert (goal_at < length[times, envs]).all()
    if strategy == 'final': assert (goal_at == length[times, envs] - 1).all()
    if strategy == 'future': assert (goal_at >= at).all()
    least = {'final': length[times, envs] - 1, 'future': at, 'episode': 0*at}[strategy]
    share = (goal_at - least)/np.maximum(1, length[times, envs] - 1 - least)
    assert strategy == 'final' or abs(share[length[times, envs] - least > 1].mean() - .5) < .02


def test_relabelled_rows_have_the_rewards_of_their_goals():
    env, rng = goal_env(2), np.random.default_rng(2)
    ours = her(env, 200, n_sampled_goal=3, copy_info_dict=True)
    with refused('HerReplayBuffer', RuntimeError): ours.sample(4)
    play(env, [ours], 100, rng)
    got, before = drawn(ours, 0, 40), pickle.dumps(ours.memory[:])
    goals = got.observations['desired_goal'].numpy()
    np.testing.assert_array_equal(goals, got.next_observations['desired_goal'])
    wanted = env.env_method('compute_reward', got.next_observations['achieved_goal'].numpy(), goals, [{}]*40, indices=[0])[0]
    np.testing.assert_array_equal(got.rewards[:, 0], wanted)
    assert (got.rewards[10:] == 0).float().mean() > (got.rewards[:10] == 0).float().mean()
    assert pickle.dumps(ours.memory[:]) == before
    assert ours.copy_info_dict and set(ours.infos) == set(range(100))
    assert len(drawn(her_of_one_goal(env, rng), 0, 8).rewards) == 8


def her_of_one_goal(env, rng):
    "A buffer that relabels nothing"
    ours = her(env, 200, n_sampled_goal=0)
    play(env, [ours], 50, rng)
    return ours


def test_hindsight_learns_bit_flipping():
    env = make_vec_env(lambda: BitFlippingEnv(5, continuous=False), 2, seed=0)
    model = DQN('MultiInputPolicy', env, replay_buffer_class=sb3.HerReplayBuffer, replay_buffer_kwargs=dict(n_sampled_goal=4), seed=0, learning_rate=2e-3,
                train_freq=1, gradient_steps=2, learning_starts=50, exploration_final_eps=.02, target_update_interval=100, batch_size=32, buffer_size=10_000,
                policy_kwargs=dict(net_arch=[64]))
    model.learn(800)
    assert np.mean(model.ep_success_buffer) > .7


def test_hindsight_refuses_n_step_returns():
    env = goal_env(1)
    with refused('n_steps', got='2'): her(env, n_steps=2)
    buffer = pickle.loads(pickle.dumps(her(env)))
    play(env, [buffer], 30, np.random.default_rng(0))
    with refused('env'): buffer.sample(8)
    buffer.set_env(env)
    assert len(buffer.sample(8).rewards) == 8


def test_without_sb3_the_error_names_the_extra():
    code = 'import sys; sys.modules["stable_baselines3"] = None\nimport fastrl_replay.interop.sb3'
    ran = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert ran.returncode == 1 and ran.stderr.strip().splitlines()[-1] == (
        "ModuleNotFoundError: fastrl_replay.interop.sb3 needs Stable-Baselines3: pip install -e '.[sb3]'")


# ---- what SB3's own tests look at besides

@pytest.mark.parametrize('options', [{}, dict(optimize_memory_usage=True)])
@pytest.mark.parametrize('space', [FLAT, NESTED, spaces.Box(0, 255, (3, 8, 8), np.uint8)], ids=['flat', 'nested', 'image'])
def test_an_empty_buffer_shows_zeros_of_the_right_dtype(space, options):
    theirs, ours = both(space, ACTIONS[0], 6, 2)[0], both(space, ACTIONS[0], 6, 2, sb3.ReplayBuffer, **options)[1]
    for name in ('observations', 'next_observations', 'actions', 'rewards', 'dones', 'timeouts'):
        a, b = getattr(theirs, name), getattr(ours, name)
        for x, y in zip(*(list(o.values()) if isinstance(o, dict) else [o] for o in (a, b)), strict=True):
            assert x.shape == y.shape and not y.any()
            assert x.dtype == y.dtype or name == 'timeouts'                # which SB3 keeps as float32


@pytest.mark.parametrize('n', [1, 2, 3, 600, 65536, 65537, 1_000_000, 2**30 + 5])
def test_slots_are_those_of_randint_and_the_generator_is_left_where_it_would_be(n):
    sampler = sb3.SharedRandom()
    sampler.attach(8)
    sampler.size = n
    for bs in (1, 7, 256, 3000):
        slots, numbers = np.empty(bs, np.int64), np.empty((2, bs), np.float32)
        np.random.seed(bs)                 # noqa: NPY002
        sampler.draw_into(slots, *numbers, None)
        after = np.random.rand()           # noqa: NPY002
        np.random.seed(bs)                 # noqa: NPY002
        np.testing.assert_array_equal(slots, np.random.randint(0, n, bs))        # noqa: NPY002
        assert np.random.rand() == after   # noqa: NPY002
