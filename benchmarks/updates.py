"""Updates of a DQN a CPU second, the draw included, beside Stable-Baselines3 and CleanRL: `python benchmarks/updates.py [--rows N]`

No environment: each library draws from a full uniform buffer of CartPole-like transitions and updates the same network (4 → 120 → 84 → 2)
with the settings of the library that ours stands beside. Stable-Baselines3: smooth L1 loss, gradients clipped to a norm of 10. CleanRL: mean
squared error, no clipping, transitions from Stable-Baselines3's buffer, the target network copied every 500 updates; its update is written
out below from its description (Huang et al. 2022). Both take the target network's own maximum; what a double DQN and priorities cost is the last table.
"""
import copy
import time

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.logger import Logger
from timing import begin, interleaved, repeat, table
from torch import nn

from fastrl_replay.learner import DQNLearner, q_targets
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import Transition

GAMMA, LR, SYNC = .99, 2.5e-4, 500


def network(): return nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2))


def transitions(rows):
    "CartPole-like transitions, as a step of stacked arrays"
    rng = np.random.default_rng(0)
    s, t = (rng.random((rows, 4), dtype=np.float32) for _ in range(2))
    return Transition(s, rng.integers(0, 2, rows), np.ones(rows, np.float32), t, rng.random(rows) < .02, np.zeros(rows, bool))


def own(rows, bs, sampler=None, **kw):
    "A function that updates our learner once"
    memory = ReplayMemory(rows, sampler or Uniform(), seed=0)
    memory.extend(transitions(rows))
    learn = DQNLearner(network(), [], gamma=GAMMA, lr=LR, target_sync=SYNC, **kw)
    return lambda: learn.update(memory.sample(bs))


def filled(buffer, rows):
    "Stable-Baselines3's buffer with the same transitions"
    steps = transitions(rows)
    names = dict(observations=steps.state, next_observations=steps.next_state, actions=steps.action,
                 rewards=steps.reward, dones=steps.terminated, timeouts=steps.truncated)
    for name, column in names.items():
        place = getattr(buffer, name)
        place[:] = column.reshape(place.shape)
    buffer.full = True
    return buffer


def sb3(rows, bs):
    "A function that updates Stable-Baselines3's DQN once"
    kw = dict(net_arch=[120, 84])
    dqn = DQN('MlpPolicy', 'CartPole-v1', LR, rows, gamma=GAMMA, max_grad_norm=10., policy_kwargs=kw, device='cpu', seed=0)
    dqn.set_logger(Logger(None, []))
    filled(dqn.replay_buffer, rows)
    return lambda: dqn.train(1, bs)


def cleanrl(rows, bs):
    "A function that updates as CleanRL's DQN does, once"
    box, actions = gym.spaces.Box(-4, 4, (4,)), gym.spaces.Discrete(2)
    buffer = filled(ReplayBuffer(rows, box, actions, 'cpu', handle_timeout_termination=False), rows)
    model = network()
    target, optimizer, n = copy.deepcopy(model), torch.optim.Adam(model.parameters(), lr=LR), 0
    def update():
        nonlocal n
        batch = buffer.sample(bs)
        with torch.no_grad(): future = target(batch.next_observations).max(dim=1).values
        wanted = batch.rewards.flatten() + GAMMA*future*(1 - batch.dones.flatten())
        values = model(batch.observations).gather(1, batch.actions).squeeze()
        loss = nn.functional.mse_loss(wanted, values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        n += 1
        if n % SYNC==0: target.load_state_dict(model.state_dict())
    return update


def squared(batch, model, target):
    "CleanRL's loss of each row"
    q = model(batch.state).gather(1, batch.action[:, None])[:, 0]
    return (q - q_targets(batch, model, target, GAMMA, double=False)).square()


def compare(title, name, cases):
    "A table for two cases {batch size: (ours, theirs)}"
    out = []
    for bs, (ours, theirs) in cases.items():
        us = interleaved(dict(ours=(repeat(ours), 200), theirs=(repeat(theirs), 100)), clock=time.process_time)
        out.append([bs, f'{us["ours"]:.0f}', f'{us["theirs"]:.0f}', f'{us["theirs"]/us["ours"]:.2f}', f'{1e6/us["ours"]:,.0f}', f'{1e6/us["theirs"]:,.0f}'])
    table(title, out, ['rows', 'ours µs', f'{name} µs', 'times as fast', 'ours a CPU second', f'{name} a CPU second'])


def main():
    "Fill, measure, print"
    rows, sizes = begin(rows=100_000), (32, 128)
    single = dict(double=False, max_norm=10.)
    compare('DQN update, smooth L1, clipped', 'Stable-Baselines3', {bs: (own(rows, bs, **single), sb3(rows, bs)) for bs in sizes})
    plain = dict(loss=squared, max_norm=None)
    compare('DQN update, squared error, unclipped', 'CleanRL', {bs: (own(rows, bs, **plain), cleanrl(rows, bs)) for bs in sizes})
    out = []
    for bs in sizes:
        cases = {'single': own(rows, bs, double=False), 'double': own(rows, bs), 'prioritized': own(rows, bs, Proportional())}
        us = interleaved({k: (repeat(f), 200) for k, f in cases.items()}, clock=time.process_time)
        out.append([bs, *(f'{us[k]:.0f}' for k in cases)])
    table('Our DQN update', out, ['rows', 'single µs', 'double µs', 'double, prioritized µs'])


if __name__ == '__main__': main()
