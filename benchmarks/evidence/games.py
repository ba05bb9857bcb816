"""One training of a double DQN on a game of MinAtar:
`python benchmarks/evidence/games.py breakout proportional 0 --frames 100000`

It prints a row of nbs/tutorials/data/minatar.csv; `benchmarks/evidence/run.py` runs all of them. The settings are those
of the page nbs/tutorials/minatar.ipynb, which numbers where they differ from the papers.
"""
import time
import warnings
from functools import partial

import numpy as np
import torch
from torch import nn

from run import single

from fastrl_replay.all import AgeWeighted, DQNLearner, EpsilonGreedy, GymStepper, LinearSchedule

OUT, SEEDS = 'minatar.csv', 5
FRAMES = dict.fromkeys(['breakout', 'asterix', 'space_invaders', 'seaquest', 'freeway'], 500_000)
MEMORIES = {'uniform': lambda steps, **kw: steps.experience_replay(**kw),
            'proportional': lambda steps, **kw: steps.prioritized_replay(alpha=.6, beta=.4, **kw),
            'rank-based': lambda steps, **kw: steps.rank_replay(alpha=.7, beta=.5, **kw),
            'age-weighted': lambda steps, **kw: steps.experience_replay(sampler=AgeWeighted(50_000), **kw)}
WAYS = *MEMORIES, 'random'                    # the last one doesn't learn
HEAD = 'game', 'memory', 'seed', 'frames', 'cpu_seconds', 'curve'
FIRST, EVERY, WINDOW = 5_000, 4, 10_000       # frames before learning, between batches, and in a point of the curve


class ChannelsFirst(nn.Module):
    "States (bs, 10, 10, channels) as (bs, channels, 10, 10)"
    def forward(self, x): return x.permute(0, 3, 1, 2)


def network(n_channels, n_actions):
    "16 filters of 3 × 3 and 128 units, as Young and Tian (2019) have it"
    return nn.Sequential(ChannelsFirst(), nn.Conv2d(n_channels, 16, 3), nn.ReLU(), nn.Flatten(),
                         nn.Linear(16*8*8, 128), nn.ReLU(), nn.Linear(128, n_actions))


def make(game):
    "The game with the actions that have an effect in it"
    from minatar.gym import BaseEnv
    return BaseEnv(game, use_minimal_action_set=True)


def learner(env, memory, seed, max_sz=100_000, first=FIRST):
    "The learner of a whole pipeline, from the environment to the loader"
    torch.manual_seed(seed)
    model = network(env.observation_space.shape[-1], int(env.action_space.n))
    agent = EpsilonGreedy(model, LinearSchedule(1., .1, 25_000), seed=seed)
    steps = GymStepper([env], agent=agent, seed=seed).n_step(n=3, gamma=.99)
    replay = MEMORIES[memory](steps, bs=32, max_sz=max_sz, min_sz=first, steps_per_batch=EVERY, seed=seed)
    adam = partial(torch.optim.Adam, lr=2.5e-4, eps=3.125e-4, fused=True)
    return DQNLearner(model, replay.loader(), target_sync=250, optimizer=adam)


def play(env, seed, frames):
    "Transitions and return at each end of an episode, for actions at random"
    env.action_space.seed(seed)
    env.reset(seed=seed)
    ends, total = [], 0.
    for n in range(1, frames + 1):
        _, reward, terminated, *_ = env.step(env.action_space.sample())
        total += reward
        if terminated:
            ends.append((n, total))
            env.reset()
            total = 0.
    return zip(*ends)


def curve(steps, returns, frames, window=WINDOW):
    "The mean return of the episodes that ended in each `window` of frames; NaN where none did"
    place = (np.array(steps, int) - 1)//window
    found = [np.array(returns)[place==k] for k in range(frames//window)]
    return [float(o.mean()) if len(o) else float('nan') for o in found]


def train(game, memory, seed, frames):
    "One training as a row of the CSV"
    env, start = make(game), time.process_time()
    if memory=='random': steps, returns = play(env, seed, frames)
    else:
        learn = learner(env, memory, seed).fit((frames - FIRST)//EVERY + 1)
        steps, returns = learn.return_steps, learn.returns
    spent, points = time.process_time() - start, curve(steps, returns, frames)
    return game, memory, seed, frames, f'{spent:.0f}', ' '.join(f'{o:.2f}' for o in points)


def main():
    "Train and print the row"
    torch.set_num_threads(1)
    warnings.filterwarnings('ignore', module='gymnasium')
    single(train, FRAMES, WAYS)


if __name__ == '__main__': main()
