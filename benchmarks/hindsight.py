"""Hindsight, compared with Stable-Baselines3's HerReplayBuffer: `python benchmarks/hindsight.py [--rows N]`

Batches of 256 out of episodes of 50 steps and of 1,000, four fifths of the rows with another goal, the shapes of a robot arm that
fetches things. What the reward function takes for so many rows is measured apart, and subtracted in the last column. Ours is
measured with a step stored between two draws too, when the index has to be brought up to date.
"""
import gymnasium as gym
import numpy as np
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv
from timing import begin, holding, interleaved, repeat, table

from fastrl_replay.pipes.hindsight import HindsightReplay
from fastrl_replay.steps import Transition

BS, K = 256, 4


def reward(achieved, desired, info): return -(np.linalg.norm(achieved - desired, axis=1) > .05).astype(np.float32)


class Arm(gym.Env):
    "The spaces of an arm, and its reward"
    observation_space = gym.spaces.Dict({k: gym.spaces.Box(-np.inf, np.inf, (n,)) for k, n in
                                         dict(observation=25, achieved_goal=3, desired_goal=3).items()})
    action_space = gym.spaces.Box(-1, 1, (4,))
    def compute_reward(self, achieved, desired, info): return reward(achieved, desired, info)


def rows(n, length):
    "`n` transitions in episodes of `length`, as a step of stacked arrays"
    rng = np.random.default_rng(0)
    state, after = ({k: rng.random((n, o.shape[0]), np.float32) for k, o in Arm.observation_space.items()} for _ in range(2))
    after['desired_goal'] = state['desired_goal']
    return Transition(state, rng.random((n, 4), np.float32), np.full(n, -1, np.float32), after, np.zeros(n, bool),
                      np.arange(n) % length == length - 1)


def one(steps, i):
    "Row `i` of stacked arrays, as a step"
    def at(v): return {k: o[i] for k, o in v.items()} if isinstance(v, dict) else v[i]
    return Transition(*map(at, steps))


def peer(steps):
    "Stable-Baselines3's buffer, filled"
    n = len(steps.reward)
    buffer = HerReplayBuffer(n, Arm.observation_space, Arm.action_space, DummyVecEnv([Arm]), n_sampled_goal=K)
    for i in range(n):
        state, after = ({k: v[i:i + 1] for k, v in o.items()} for o in (steps.state, steps.next_state))
        buffer.add(state, after, steps.action[i:i + 1], steps.reward[i:i + 1], steps.truncated[i:i + 1], [{}])
    return buffer


def ours(steps):
    "A replay of ours, filled, its index up to date"
    replay = HindsightReplay([], reward, k=K, bs=BS, max_sz=len(steps.reward), seed=0)
    replay.extend(steps, streams='one')
    replay.sample()
    return replay


def measure(n, length):
    "Rows of the table for episodes of `length`"
    steps = rows(n, length)
    replay, buffer, step = ours(steps), peer(steps), one(steps, 0)
    goals = steps.state['achieved_goal'][:round(BS*K/(K + 1))]

    def after_a_step():
        replay.add(step)
        return replay.sample()

    cases = {'the reward function alone': repeat(reward, goals, goals + 1, {}), 'Stable-Baselines3': holding(lambda: buffer.sample(BS)),
             'ours': holding(replay.sample), 'ours, a step between draws': holding(after_a_step)}
    us = interleaved({k: (f, 100) for k, f in cases.items()})
    apart = us.pop('the reward function alone')
    base = us['Stable-Baselines3'] - apart
    return [[f'{length:,} steps', name, f'{v:.0f}', f'{apart:.0f}', f'{base/(v - apart):.2f}'] for name, v in us.items()]


def main():
    "Measure and print"
    n = begin(1000, 100_000)
    found = [o for length in (50, 1000) for o in measure(n, length)]
    table(f'{BS} of {n:,} rows, goals replaced', found, ['episodes of', '', 'µs a batch', 'of it reward', 'times as fast'])


if __name__ == '__main__': main()
