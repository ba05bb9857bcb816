"""CPU time of an environment step, learning included, beside Stable-Baselines3 and CleanRL: `python benchmarks/loops.py [--steps N]`

Whole loops: acting, storing, drawing and an update after every other step of CartPole (4 → 120 → 84 → 2, batches of 64), with one environment
and with eight; and soft actor-critic on Pendulum as in nbs/tutorials/sac.ipynb, an update after every step. The contestants take turns of N
steps in one process, after a warm-up in which memories fill and graphs are compiled. CleanRL's loops are written out from their description
(Huang et al. 2022), on Stable-Baselines3's buffer.
"""
import argparse
import copy
import io
import json
import random
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from timing import interleaved, machine, pin, table
from torch import nn
from torch.nn import functional as F

from fastrl_replay.learner import DQNLearner, Learner
from fastrl_replay.pipes.agents import EpsilonGreedy
from fastrl_replay.pipes.replay import ExperienceReplay, PrioritizedReplay
from fastrl_replay.pipes.stepper import GymStepper

GAMMA, LR, SYNC, EPS, FIRST, MAX_SZ, BS, EVERY = .99, 2.3e-3, 250, .04, 1_000, 100_000, 64, 2
SAC_NOTEBOOK = Path(__file__).resolve().parent.parent/'nbs'/'tutorials'/'sac.ipynb'


def network(): return nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2))


def own(n_envs, replay=ExperienceReplay, **options):
    "A function of n that goes on for n steps"
    model = network()
    steps = GymStepper(['CartPole-v1'], EpsilonGreedy(model, EPS, seed=0), seed=0, n_envs=n_envs)
    pipe = replay(steps, bs=BS, max_sz=MAX_SZ, min_sz=FIRST, steps_per_batch=EVERY, seed=0)
    learn = DQNLearner(model, pipe.loader(), GAMMA, LR, double=False, target_sync=SYNC//EVERY, **options)
    return lambda n: learn.fit(n//EVERY)


def sb3(n_envs):
    "Stable-Baselines3's DQN"
    dqn = DQN('MlpPolicy', make_vec_env('CartPole-v1', n_envs, seed=0), LR, MAX_SZ, FIRST, BS, gamma=GAMMA, train_freq=max(1, EVERY//n_envs),
              gradient_steps=max(1, n_envs//EVERY), target_update_interval=SYNC, exploration_initial_eps=EPS, exploration_final_eps=EPS,
              policy_kwargs=dict(net_arch=[120, 84]), device='cpu', seed=0)
    return lambda n: dqn.learn(n, reset_num_timesteps=False)


def cleanrl(n_envs):
    "The loop of CleanRL's dqn.py: no pipes, no classes, the mean squared error without clipping"
    how = dict(autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    envs = gym.vector.SyncVectorEnv([lambda: gym.wrappers.RecordEpisodeStatistics(gym.make('CartPole-v1'))]*n_envs, **how)
    space, actions = envs.single_observation_space, envs.single_action_space
    buffer = ReplayBuffer(MAX_SZ, space, actions, 'cpu', n_envs=n_envs, handle_timeout_termination=False)
    online = network()
    target, adam = copy.deepcopy(online), torch.optim.Adam(online.parameters(), lr=LR)
    at = SimpleNamespace(states=envs.reset(seed=0)[0], step=0)

    def one():
        if random.random() < EPS: chosen = np.array([actions.sample() for _ in range(n_envs)])
        else: chosen = online(torch.Tensor(at.states)).argmax(1).numpy()
        after, rewards, terminated, truncated, infos = envs.step(chosen)
        last = after.copy()
        for k in np.flatnonzero(terminated | truncated): last[k] = infos['final_obs'][k]
        buffer.add(at.states, last, chosen, rewards, terminated, infos)
        at.states, before, at.step = after, at.step, at.step + n_envs
        for step in range(before, at.step):
            if step > FIRST and step % EVERY==0: update(buffer.sample(BS))
            if step > FIRST and step % SYNC==0: target.load_state_dict(online.state_dict())

    def update(data):
        with torch.no_grad():
            wanted = data.rewards.flatten() + GAMMA*target(data.next_observations).max(1).values*(1 - data.dones.flatten())
        loss = F.mse_loss(wanted, online(data.observations).gather(1, data.actions).squeeze())
        adam.zero_grad()
        loss.backward()
        adam.step()

    def run(n):
        for _ in range(n//n_envs): one()
    return run


def from_tutorial():
    "The names that the code of the tutorial defines: `SoftActorCritic`, `sac_loss`, `on_numpy`"
    known = {}
    for cell in json.loads(SAC_NOTEBOOK.read_text(encoding='utf-8'))['cells']:
        code = ''.join(cell['source'])
        if cell['cell_type']=='code' and code.startswith(('import', 'def', 'class')): exec(code, known)
        if 'on_numpy' in known: return SimpleNamespace(**known)
    raise LookupError(f'{SAC_NOTEBOOK}: expected cells that define on_numpy and what is before it')


def own_sac(**options):
    "Soft actor-critic as in the tutorial"
    o = from_tutorial()
    model = o.SoftActorCritic(3, 1, scale=2.)
    steps = GymStepper(['Pendulum-v1'], o.on_numpy(lambda s: model.act(s)[0]), seed=0)
    pipe = steps.experience_replay(bs=BS, max_sz=50_000, min_sz=500, seed=0)
    learn = Learner(model, pipe.loader(), o.sac_loss, lr=3e-3, tau=.005, max_norm=None, **options)
    return learn.fit


def sb3_sac():
    "Stable-Baselines3's, with the tutorial's networks and numbers"
    sac = SAC('MlpPolicy', make_vec_env('Pendulum-v1', seed=0), 3e-3, 50_000, 500, BS, tau=.005, gamma=GAMMA, train_freq=1, gradient_steps=1,
              policy_kwargs=dict(net_arch=[64, 64]), device='cpu', seed=0)
    return lambda n: sac.learn(n, reset_num_timesteps=False)


def compare(title, cases, n, reps, base='Stable-Baselines3'):
    "Warm up, take turns of `n` steps, print"
    with redirect_stdout(io.StringIO()):                    # the log of `fit`
        for f in cases.values(): f(2*FIRST)
        us = interleaved({k: (f, n) for k, f in cases.items()}, reps, time.process_time)
    table(title, [[k, f'{v:.0f}', f'{us[base]/v:.2f}'] for k, v in us.items()], ['', 'µs a step', f'times {base}'])


def main():
    "Measure, print"
    parser = argparse.ArgumentParser()
    parser.add_argument('--steps', type=int, default=800, help='of a turn, a multiple of 8')
    parser.add_argument('--reps', type=int, default=15)
    parser.add_argument('--only', choices=['1', '8', 'sac'], help='environments, or soft actor-critic')
    asked = parser.parse_args()
    pin()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings('ignore', category=UserWarning)
    print(machine())
    for n_envs in (1, 8):
        if asked.only not in (None, str(n_envs)): continue
        cases = {'Stable-Baselines3': sb3(n_envs), 'CleanRL': cleanrl(n_envs), 'ours': own(n_envs),
                 'prioritized': own(n_envs, PrioritizedReplay)}
        cases |= {'compiled': own(n_envs, compile=True), 'prioritized, compiled': own(n_envs, PrioritizedReplay, compile=True)}
        compare(f'DQN on CartPole, {n_envs} environment{"s"*(n_envs > 1)}', cases, asked.steps, asked.reps)
    if asked.only in (None, 'sac'):
        cases = {'Stable-Baselines3': sb3_sac(), 'ours': own_sac(), 'compiled': own_sac(compile=True)}
        compare('Soft actor-critic on Pendulum', cases, asked.steps//2, asked.reps)


if __name__ == '__main__': main()
