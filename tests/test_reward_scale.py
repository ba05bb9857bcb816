"Rewards that a learner scales: running returns beside a loop, of all memories, saved and resumed"
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from fastrl_replay.all import (
    Batch, DQNLearner, ExperienceReplay, Learner, MixedMemory, NStep, Proportional, ReplayMemory, Sequence, SimpleStep, Transition)
from fastrl_replay.memory import DeviceMemory
from fastrl_replay.ray import RayMemory
from fastrl_replay.reward_scale import RewardScale
from fastrl_replay.saving import CheckpointError
from refusals import refused
from words import WORDS

pytestmark = pytest.mark.filterwarnings('ignore:device. on a CPU')


def walks(seed, n=200, streams=3):
    "Steps of several streams that take turns at random"
    rng, at, out = np.random.default_rng(seed), {}, []
    for _ in range(n):
        s = int(rng.integers(streams))
        k, episode = at.get(s, (0, 0))
        ends, cut = rng.random() < .08, rng.random() < .04
        state = np.float32([s, k])
        out.append(SimpleStep(state, 0, state + np.float32([0, 1]), bool(ends), bool(cut and not ends), float(rng.normal(1, 3)), env_id=s, step_n=k, episode_n=episode))
        at[s] = (0, episode + 1) if ends or cut else (k + 1, episode)
    return out


def returns(steps, gamma):
    "By hand, stream by stream"
    open_, out = {}, []
    for o in steps:
        out.append(o.reward + gamma*open_.pop(o.env_id, 0.))
        if not (o.terminated or o.truncated): open_[o.env_id] = out[-1]
    return out


MAKERS = dict(
    plain=lambda: ReplayMemory(500, seed=0), prioritized=lambda: ReplayMemory(500, Proportional(), seed=0), frames=lambda: ReplayMemory(500, dedup='next_state', seed=0),
    sequences=lambda: ReplayMemory(500, sequence=Sequence(4), seed=0), mixed=lambda: MixedMemory([ReplayMemory(500)], seed=0), ray=lambda: RayMemory(0, 500, seed=0))

@pytest.mark.parametrize('make', MAKERS)
def test_the_spread_is_that_of_the_running_returns(make):
    for seed in range(3):
        steps, memory, scale, rng, at = walks(seed), MAKERS[make](), RewardScale(.9, every=1), np.random.default_rng(seed), 0
        while at < len(steps):
            m = int(rng.integers(1, 60))
            memory.extend(steps[at:at + m])
            at += m
            batch = memory.sample(4) if at > 40 else None
            if batch is not None: scaled = scale(batch)
            if rng.random() < .3:                     # saved, and gone on with elsewhere
                again = RewardScale(.9, every=1)
                again.load_state_dict(pickle.loads(pickle.dumps(scale.state_dict())))
                scale = again
        wanted = np.std(returns([o._replace(reward=float(np.float32(o.reward))) for o in steps], .9))
        np.testing.assert_allclose(scale.spread, wanted, 1e-10)
        assert scale.count==len(steps) and torch.allclose(scaled.reward*scale.spread, batch.reward) and scaled.ids is batch.ids
        assert scaled.reward.dtype==torch.float32 and {*scaled.memory.sampler.__dict__}


def test_a_memory_on_a_device_is_read_as_well():
    memory, scale = DeviceMemory(64, device='cpu', compile=False, n_envs=2, max_ends=64, gamma=.9, seed=0), RewardScale(.9, every=1)
    rng, rewards = np.random.default_rng(0), []
    for k in range(20):
        r = rng.normal(size=2).astype(np.float32)
        rewards.append(r)
        ends = torch.tensor([k % 5==4]*2)
        memory.extend(Transition(torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), torch.as_tensor(r), torch.zeros(2, 1), ends, torch.zeros(2, dtype=torch.bool)))
    scale(memory.sample(4))
    found, total = [], np.zeros(2)
    for k, r in enumerate(rewards):
        total = r + .9*total*(k % 5!=0)
        found.append(total)
    np.testing.assert_allclose(scale.spread, np.std(found), 1e-6)


@pytest.mark.filterwarnings('ignore:n_step')
@pytest.mark.parametrize('n', [1, 2, 3, 5])
def test_n_step_returns_count_each_reward_once(n):
    steps = [o._replace(env_id=0) for k in range(30) for o in walks(k, 40, 1)]
    steps = [o._replace(step_n=k % 50, episode_n=k//50, terminated=k % 50==49, truncated=False, reward=1.) for k, o in enumerate(steps)]
    memory, scale = ReplayMemory(5000, seed=0), RewardScale(.9)
    memory.extend(list(NStep(steps, n, .9)))
    scale.look(memory)
    total = {}                                        # by hand: the chain of every n-th row
    for k in range(50):
        m = min(n, 50 - k)
        total[k] = sum(.9**i for i in range(m)) + .9**n*total.get(k - n, 0.)
    np.testing.assert_allclose(scale.spread, np.std([*total.values()]*(len(steps)//50)), 1e-5)
    one = RewardScale(.9)
    plain = ReplayMemory(5000)
    plain.extend(steps)
    one.look(plain)
    assert .5 < scale.spread/one.spread < 1.2


def test_until_there_is_a_spread_nothing_changes():
    memory, scale = ReplayMemory(10, seed=0), RewardScale()
    memory.extend([SimpleStep(0., 0, 0., True, reward=3., step_n=0) for _ in range(4)])
    assert scale(memory.sample(4)).reward.tolist()==[3.]*4 and scale.spread==1.
    with refused('reward_scale: gamma'): RewardScale(-1)
    with pytest.raises(ValueError, match=WORDS['a memory here']): RewardScale()(Batch.of_steps([SimpleStep(0., 0, 0.)]))
    n_step = ReplayMemory(10, seed=0)
    n_step.extend(list(NStep(walks(0), 3, 1.)))
    with refused('reward_scale: gamma'): RewardScale(1.).look(n_step)
    with refused('reward_scale: gamma'): RewardScale(.9).look(n_step)


def learner(scale, compile=False, kind=DQNLearner):
    torch.manual_seed(0)
    memory = ReplayMemory(500, Proportional(), seed=0)
    steps = [o._replace(reward=100*o.reward) for o in walks(0)]
    replay = ExperienceReplay(steps, bs=16, memory=memory, min_sz=50, steps_per_batch=3)
    if kind is DQNLearner: return DQNLearner(nn.Linear(2, 2), replay.loader(), reward_scale=scale, compile=compile, target_sync=10)
    return Learner(nn.Linear(2, 1), replay.loader(), lambda batch, model, target: (model(batch.state)[:, 0] - batch.reward)**2, reward_scale=scale)


@pytest.mark.parametrize('kind', [DQNLearner, Learner])
def test_a_learner_learns_from_scaled_rewards(kind, tmp_path):
    plain, scaled = (learner(o, kind=kind) for o in (None, RewardScale(every=10)))
    for o in (plain, scaled): o.fit(30)
    assert np.mean(scaled.losses) < .1*np.mean(plain.losses)
    rows = scaled.memory.recent(50)
    assert rows.reward.abs().max() > 50
    scaled.save(tmp_path/'scaled')
    plain.save(tmp_path/'plain')
    again = learner(RewardScale(every=10), kind=kind)
    again.load(tmp_path/'scaled')
    assert again.reward_scale.state_dict()['open']==scaled.reward_scale.state_dict()['open'] and again.reward_scale.spread==scaled.reward_scale.spread
    for o, folder in ((learner(None, kind=kind), 'scaled'), (learner(RewardScale(), kind=kind), 'plain'), (learner(RewardScale(.5), kind=kind), 'scaled')):
        with pytest.raises(CheckpointError, match=WORDS['about the reward scale']): o.load(tmp_path/folder)
        assert o.n_batches==0 and (o.reward_scale is None or not o.reward_scale.count)


def test_a_compiled_learner_learns_the_same():
    eager, compiled = learner(RewardScale(every=10)), learner(RewardScale(every=10), compile=True)
    for o in (eager, compiled): o.fit(20)
    np.testing.assert_allclose(eager.losses, compiled.losses, 1e-4, 1e-6)
    assert eager.reward_scale.state_dict()['variance']==compiled.reward_scale.state_dict()['variance']


def test_what_was_overwritten_is_left_out_and_chains_do_not_pile_up():
    memory, scale = ReplayMemory(20, seed=0), RewardScale(every=1)
    for k in range(300):
        memory.extend([SimpleStep(0., 0, 0., reward=float(i), env_id=1000*k + i, step_n=0) for i in range(30)])
        scale(memory.sample(2))
    assert scale.count==300*20 and len(scale.open)==300*20
    scale.open = {k: [0.] for k in range(60_000)}
    memory.extend([SimpleStep(0., 0, 0., reward=1., env_id=1)]*20)
    scale.look(memory)
    assert len(scale.open)==50_000
