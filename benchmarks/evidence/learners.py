"""One training of a DQN by one library: `python benchmarks/evidence/learners.py CartPole-v1 sb3 0 --frames 40000`

It prints a row of nbs/tutorials/data/learners.csv; `benchmarks/evidence/run.py` runs all of them. All have the same
network, optimizer, batches, target synchronisation and exploration (below); nbs/tutorials/beside_learners.ipynb says what
still differs. The clock stands still during the evaluations: twenty in a training, ten greedy episodes each.
"""
import random
import time
import warnings
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from run import single

from fastrl_replay.all import DQNLearner, EpsilonGreedy, GymStepper, LinearSchedule
from fastrl_replay.learner import evaluate

OUT, SEEDS = 'learners.csv', 10
FRAMES = {'CartPole-v1': 50_000, 'Acrobot-v1': 50_000, 'LunarLander-v3': 150_000}
WAYS = 'fastrl_replay', 'sb3', 'cleanrl', 'prioritized'
HEAD = 'environment', 'library', 'seed', 'frames', 'cpu_seconds', 'wall_seconds', 'returns', 'cpu_at'
HIDDEN, GAMMA, FIRST, LOOKS = (120, 84), .99, 1_000, 20


class Settings(NamedTuple):
    "What differs between environments; `every` and `sync` in steps of the environment"
    lr: float = 6.3e-4
    bs: int = 128
    max_sz: int = 50_000
    every: int = 2
    sync: int = 250
    eps_end: float = .1
    eps_steps: int = 12_000


# Those of the RL Zoo for SB3's DQN, without its bursts: one update after every other step, on LunarLander after every
# fourth (SB3's default). On CartPole a burst of 128 updates sees one target network; the updates here see one for 250 steps
SETTINGS = {'CartPole-v1': Settings(2.3e-3, 64, 100_000, 2, 250, .04, 8_000), 'Acrobot-v1': Settings(),
            'LunarLander-v3': Settings(every=4)}


class Watch:
    "Evaluates after each of `LOOKS` equal parts of a training, off the clock"
    def __init__(self, env_id, frames):
        self.env_id, self.every = env_id, frames//LOOKS
        self.returns, self.cpu_at, self.cpu, self.wall = [], [], 0., 0.
        self.start()

    def start(self): self.began = time.process_time(), time.perf_counter()

    def look(self, model):
        "The mean return of ten greedy episodes, and the time until now"
        self.cpu += time.process_time() - self.began[0]
        self.wall += time.perf_counter() - self.began[1]
        self.returns.append(float(evaluate(model, self.env_id, 10, max_steps=1000).mean()))
        self.cpu_at.append(self.cpu)
        self.start()


def network(env):
    "A network with the two hidden layers of CleanRL's"
    n, k = int(np.prod(env.observation_space.shape)), int(env.action_space.n)
    return nn.Sequential(nn.Linear(n, HIDDEN[0]), nn.ReLU(), nn.Linear(HIDDEN[0], HIDDEN[1]), nn.ReLU(),
                         nn.Linear(HIDDEN[1], k))


def ours(env_id, seed, frames, watch, memory='experience_replay'):
    "This library, its memory drawn uniformly or by `memory`"
    o, model = SETTINGS[env_id], network(gym.make(env_id))
    agent = EpsilonGreedy(model, LinearSchedule(1., o.eps_end, o.eps_steps), seed=seed)
    steps = GymStepper([env_id], agent=agent, seed=seed)
    replay = getattr(steps, memory)(bs=o.bs, max_sz=o.max_sz, min_sz=FIRST, steps_per_batch=o.every, seed=seed)
    learn = DQNLearner(model, replay.loader(), gamma=GAMMA, lr=o.lr, double=False, target_sync=o.sync//o.every)
    watch.start()
    for k in range(1, LOOKS + 1):
        due = 1 + (k*watch.every - FIRST)//o.every                  # none in the first frames
        learn.fit(max(0, due - learn.n_batches))
        watch.look(model)


def prioritized(*args): return ours(*args, memory='prioritized_replay')


def sb3(env_id, seed, frames, watch):
    "Stable-Baselines3's DQN, given an environment: of an id it would make one that can render, with smoke to simulate"
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback

    class Look(BaseCallback):
        def _on_step(self):
            if self.num_timesteps % watch.every==0: watch.look(self.model.q_net)
            return True

    o = SETTINGS[env_id]
    model = DQN('MlpPolicy', gym.make(env_id), learning_rate=o.lr, buffer_size=o.max_sz, learning_starts=FIRST, batch_size=o.bs,
                gamma=GAMMA, train_freq=o.every, target_update_interval=o.sync, policy_kwargs=dict(net_arch=[*HIDDEN]),
                exploration_fraction=o.eps_steps/frames, exploration_final_eps=o.eps_end, seed=seed, device='cpu')
    watch.start()
    model.learn(frames, callback=Look())


def cleanrl(env_id, seed, frames, watch):
    "The loop of CleanRL's dqn.py: one file, a vector environment of one, SB3's buffer, the mean squared error"
    from stable_baselines3.common.buffers import ReplayBuffer
    o, modes = SETTINGS[env_id], dict(autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    envs = gym.vector.SyncVectorEnv([lambda: gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))], **modes)
    online, target = network(gym.make(env_id)), network(gym.make(env_id))
    target.load_state_dict(online.state_dict())
    adam = torch.optim.Adam(online.parameters(), lr=o.lr)
    buffer = ReplayBuffer(o.max_sz, envs.single_observation_space, envs.single_action_space, 'cpu',
                          handle_timeout_termination=False)
    envs.single_action_space.seed(seed)
    watch.start()
    states, _ = envs.reset(seed=seed)
    for step in range(frames):
        eps = max(o.eps_end, 1 + (o.eps_end - 1)*step/o.eps_steps)
        if random.random() < eps: actions = np.array([envs.single_action_space.sample()])
        else: actions = online(torch.Tensor(states)).argmax(1).numpy()
        after, rewards, terminated, truncated, infos = envs.step(actions)
        last = after.copy()
        if (terminated | truncated)[0]: last[0] = infos['final_obs'][0]
        buffer.add(states, last, actions, rewards, terminated, infos)
        states = after
        if step > FIRST and step % o.every==0: _cleanrl_update(buffer.sample(o.bs), online, target, adam)
        if step > FIRST and step % o.sync==0: target.load_state_dict(online.state_dict())
        if (step + 1) % watch.every==0: watch.look(online)


def _cleanrl_update(data, online, target, adam):
    with torch.no_grad():
        best = target(data.next_observations).max(1).values
        wanted = data.rewards.flatten() + GAMMA*best*(1 - data.dones.flatten())
    q = online(data.observations).gather(1, data.actions).squeeze()
    loss = F.mse_loss(wanted, q)
    adam.zero_grad()
    loss.backward()
    adam.step()


LEARNERS = dict(fastrl_replay=ours, prioritized=prioritized, sb3=sb3, cleanrl=cleanrl)


def train(env_id, library, seed, frames):
    "One training as a row of the CSV"
    torch.manual_seed(seed)
    random.seed(seed)
    watch = Watch(env_id, frames)
    LEARNERS[library](env_id, seed, frames, watch)
    returns, cpu_at = ' '.join(f'{o:.1f}' for o in watch.returns), ' '.join(f'{o:.1f}' for o in watch.cpu_at)
    return env_id, library, seed, frames, f'{watch.cpu:.1f}', f'{watch.wall:.1f}', returns, cpu_at


def main():
    "Train and print the row"
    torch.set_num_threads(1)
    warnings.filterwarnings('ignore', category=UserWarning)
    single(train, FRAMES, WAYS)


if __name__ == '__main__': main()
