"""What stepping through the pipes costs: `python benchmarks/stepper.py`

A vector environment of CartPole alone, and through a `GymStepper`: the same copies, the same kind of actions. Then transitions a
second of one environment and of eight, through the stepper, three-step returns and a replay, without a learner.
"""
import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from timing import begin, interleaved, table

from fastrl_replay.pipes.n_step import NStep
from fastrl_replay.pipes.replay import ExperienceReplay
from fastrl_replay.pipes.stepper import GymStepper

N, CALLS = 8, 60
LEFT_RIGHT = np.arange(N) % 2


def lean(states): return (states[:, 2] + .5*states[:, 3] > 0).astype(np.int64)
def constant(states): return LEFT_RIGHT[:len(states)]


def vectors():
    "Functions that make CartPole's vector environments: name → function"
    yield 'its own vector form', lambda: gym.make_vec('CartPole-v1', N, vectorization_mode='vector_entry_point')
    for mode in AutoresetMode:
        kw = dict(autoreset_mode=mode)
        yield f'SyncVectorEnv, {mode.name}', lambda kw=kw: gym.make_vec('CartPole-v1', N, vectorization_mode='sync', vector_kwargs=kw)


def alone(envs, agent):
    "A function that steps `envs` n times, and resets what it has to"
    disabled = envs.metadata['autoreset_mode'] is AutoresetMode.DISABLED
    obs, _ = envs.reset(seed=0)
    def run(n):
        nonlocal obs
        for _ in range(n):
            obs, _, terminated, truncated, _ = envs.step(envs.action_space.sample() if agent is None else agent(obs))
            ended = terminated | truncated
            if disabled and ended.any(): obs, _ = envs.reset(options=dict(reset_mask=ended))
    return run


def pulling(pipe, at_once=1):
    "A function that pulls n times as many items, and holds none"
    items = iter(pipe)
    def run(n):
        for _ in range(n*at_once): next(items)
    return run


def whole(n_envs, agent):
    "One batch of 32 for every eight steps, from `n_envs` environments"
    steps = NStep(GymStepper(['CartPole-v1'], agent=agent, seed=0, n_envs=n_envs), 3, .99)
    return ExperienceReplay(steps, bs=32, max_sz=50_000, min_sz=1000, steps_per_batch=N, seed=0)


if __name__ == '__main__':
    begin()
    rows = []
    for how, agent in (('at random', None), ('the same actions', constant)):
        for name, make in vectors():
            us = interleaved(dict(alone=(alone(make(), agent), CALLS), pipe=(pulling(GymStepper([make()], agent=agent, seed=0)), CALLS)), 101)
            rows.append([f'{name}, {how}', f'{us["alone"]:.1f}', f'{us["pipe"]:.1f}', f'{us["pipe"]/us["alone"]:.2f}'])
    table(f'A step of {N} copies of CartPole', rows, ['', 'alone µs', 'GymStepper µs', 'times'])
    rows = []
    for how, agent in (('at random', None), ('leaning', lean)):
        us = interleaved({n: (pulling(whole(n, agent)), CALLS) for n in (1, N)}, 101)
        rows.append([how, f'{us[1]/N:.1f}', f'{us[N]/N:.1f}', f'{us[1]/us[N]:.2f}'])
    table('A step through stepper, n-step and replay', rows, ['', 'one environment µs', f'{N} environments µs', 'times as many'])
