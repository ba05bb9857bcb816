"""Stacks of Atari frames, beside Stable-Baselines3 and cpprb: `python benchmarks/frames.py`

Stable-Baselines3 stores with `optimize_memory_usage`, cpprb with `next_of` and `stack_compress`, Tianshou (bytes only) the last frame of
each observation. All memories are full and wrapped around
before the clock starts. Each contender lives in a process of its own, and they take turns: what one allocates and frees changes
the C library's allocator, and with it how often another one's fresh arrays meet untouched pages. Resident bytes are the growth of the
process while a buffer is filled.
"""
import itertools
import multiprocessing
import statistics

import ale_py
import cpprb
import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from stable_baselines3.common.buffers import ReplayBuffer
from timing import machine, once, pin, repeat, table

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.steps import Transition

ROWS, EPISODE, S, SIDE, PONG = 30_000, 500, 4, 84, 5_000
NOISE = np.random.default_rng(0).integers(256, size=(3_000, SIDE, SIDE), dtype=np.uint8)


def transitions(n):
    "Stacks that slide over noise, in episodes of 500 steps, each with an end and a new beginning"
    for t in range(n):
        k = (t + t//EPISODE*S) % (len(NOISE) - S - 1)
        yield Transition(NOISE[k:k + S], t % 6, 1., NOISE[k + 1:k + S + 1], t % EPISODE==EPISODE - 1, False)


def ours():
    "Our memory, wrapped around"
    memory = ReplayMemory(ROWS, seed=0)
    for step in transitions(ROWS + 1000): memory.add(step)
    return memory


def sb3():
    "Stable-Baselines3's buffer, wrapped around"
    buffer = ReplayBuffer(ROWS, gym.spaces.Box(0, 255, (S, SIDE, SIDE), np.uint8), gym.spaces.Discrete(6), optimize_memory_usage=True,
                          handle_timeout_termination=False)
    for step in transitions(ROWS + 1000): add_sb3(buffer, step)
    return buffer


def add_sb3(buffer, o):
    "One step into Stable-Baselines3's buffer"
    buffer.add(o.state[None], o.next_state[None], np.array([o.action]), np.array([o.reward]), np.array([o.terminated]), [{}])


def empty_peer():
    "cpprb's buffer; its stacks are the last axis"
    fields = dict(obs=dict(shape=(SIDE, SIDE, S), dtype=np.uint8), act=dict(dtype=np.int64), rew={}, term=dict(dtype=np.bool_))
    return cpprb.ReplayBuffer(ROWS, fields, next_of='obs', stack_compress='obs')


def peer():
    "cpprb's buffer, wrapped around"
    buffer = empty_peer()
    for step in transitions(ROWS + 1000): add_cpprb(buffer, step)
    return buffer


def add_cpprb(buffer, o):
    "One step into cpprb's buffer"
    buffer.add(obs=np.moveaxis(o.state, 0, -1), act=o.action, rew=o.reward, next_obs=np.moveaxis(o.next_state, 0, -1), term=o.terminated)
    if o.terminated: buffer.on_episode_end()


def numpy_copy():
    "A function that copies five frames for each of `bs` transitions, out of as many as a memory holds, into an array that is used again"
    rng, outs = np.random.default_rng(0), {}
    frames = np.empty((ROWS, SIDE, SIDE), np.uint8)
    for k in range(0, ROWS, len(NOISE)): frames[k:k + len(NOISE)] = NOISE[:ROWS - k]
    def copy(bs):
        out = outs.setdefault(bs, np.zeros((bs, 5, SIDE, SIDE), np.uint8))
        for row, k in zip(out, rng.integers(ROWS - 5, size=bs).tolist()): row[...] = frames[k:k + 5]
    return copy


def tensors(sample):
    "A draw of cpprb, as tensors"
    return lambda bs: {k: torch.from_numpy(v) for k, v in sample(bs).items()}


def adding(add):
    "A function that adds n steps"
    steps, at = list(transitions(2000)), [0]
    def run(n):
        for k in range(at[0], at[0] + n): add(steps[k % 2000])
        at[0] = (at[0] + n) % 2000
    return run


def pong(n):
    "Transitions of random play in Pong"
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    env = FrameStackObservation(AtariPreprocessing(gym.make('ALE/Pong-v5', frameskip=1)), S)
    env.action_space.seed(0)
    state, _ = env.reset(seed=0)
    for _ in range(n):
        action = env.action_space.sample()
        following, reward, terminated, truncated, _ = env.step(action)
        yield Transition(state, action, reward, following, terminated, truncated)
        state = env.reset()[0] if terminated or truncated else following


def of_pong(codec):
    "A memory of Pong, and its bytes a transition"
    memory = ReplayMemory(PONG, seed=0, codec=codec)
    for step in pong(PONG): memory.add(step)
    return memory, memory.nbytes/PONG


def contender(name):
    "What a contender can do: {'draw': f(bs), 'add': f(n), …}"
    if name=='sb3':
        buffer = sb3()
        return dict(draw=buffer.sample, add=adding(lambda o: add_sb3(buffer, o)))
    if name=='cpprb':
        buffer = peer()
        return dict(draw=tensors(buffer.sample), add=adding(lambda o: add_cpprb(buffer, o)))
    if name=='numpy': return dict(draw=numpy_copy())
    if name.startswith('pong'):
        memory, nbytes = of_pong('lz4' if 'lz4' in name else None)
        return dict(draw=memory.sample, nbytes=lambda _: nbytes)
    memory = ours()
    return dict(draw=memory.sample, add=adding(memory.add))


def serve(name, pipe):
    "A process of one contender: does what it is asked, and answers with seconds for each"
    pin()
    torch.set_num_threads(1)
    can = contender(name)
    while (asked := pipe.recv()) is not None:
        what, n, *args = asked
        if what=='nbytes': pipe.send(can[what](n))
        else: pipe.send(once(can[what] if what=='add' else repeat(can[what], *args), n))


class Contenders:
    "One process each, which take turns"
    def __init__(self, *names):
        context = multiprocessing.get_context('spawn')
        self.pipes = {}
        for name in names:
            here, there = context.Pipe()
            context.Process(target=serve, args=(name, there), daemon=True).start()
            self.pipes[name] = here

    def ask(self, name, *what):
        "The answer of one of them"
        self.pipes[name].send(what)
        return self.pipes[name].recv()

    def times(self, what, n, *args, names=None, reps=9):
        "Median µs of each, after a warm-up"
        names = names or list(self.pipes)
        spent = {name: [] for name in names}
        for rep in range(reps + 1):
            for name in names:
                t = self.ask(name, what, n, *args)*1e6
                if rep: spent[name].append(t)
        return {name: statistics.median(v) for name, v in spent.items()}

    def close(self):
        "Send them home"
        for pipe in self.pipes.values(): pipe.send(None)


def adder(name):
    "A function that adds a step to an empty buffer"
    if name=='ours': return ReplayMemory(ROWS, seed=0).add
    if name=='cpprb':
        buffer = empty_peer()
        return lambda o: add_cpprb(buffer, o)
    from tianshou.data import Batch, ReplayBuffer as Theirs
    buffer = Theirs(ROWS, stack_num=S, save_only_last_obs=True, ignore_obs_next=True)
    return lambda o: buffer.add(Batch(obs=o.state, act=o.action, rew=o.reward, terminated=o.terminated, truncated=o.truncated, obs_next=o.next_state, info={}))


def resident(name, pipe):
    "Bytes a transition by which a process grows while a buffer fills"
    def now():
        with open('/proc/self/statm') as f: return int(f.read().split()[1])*4096
    warm = adder(name)                         # what is imported and compiled is no row
    for step in itertools.islice(transitions(ROWS), 100): warm(step)
    before, add = now(), adder(name)
    for step in transitions(ROWS): add(step)
    pipe.send((now() - before)/ROWS)


def main():
    "Resident bytes, draws, insertion, Pong"
    pin()
    print(machine())
    context = multiprocessing.get_context('spawn')
    print(f'\nas plain records {8*SIDE*SIDE:,} bytes a transition; resident:', flush=True)
    for name in 'ours', 'cpprb', 'tianshou':
        here, there = context.Pipe()
        context.Process(target=resident, args=(name, there)).start()
        print(f'{name} {here.recv():,.0f}', flush=True)
    all_ = Contenders('ours', 'sb3', 'cpprb', 'numpy')
    rows = []
    for bs, n in ((32, 40), (256, 8)):
        us = all_.times('draw', n, bs)
        rows += [[bs, k, f'{v:.0f}', f'{us["sb3"]/v:.2f}', f'{us["cpprb"]/v:.2f}', f'{v/us["numpy"]:.2f}'] for k, v in us.items()]
    table('Draws', rows, ['batch', '', 'µs', 'times as fast as sb3', 'as cpprb', 'of copying 5 frames with numpy'])
    us = all_.times('add', 300, names=['ours', 'sb3', 'cpprb'])
    table('One step in', [[k, f'{v:.2f}', f'{us["sb3"]/v:.2f}'] for k, v in us.items()], ['', 'µs', 'times as fast as sb3'])
    all_.close()
    screens = Contenders('pong', 'pong, lz4')
    us = screens.times('draw', 40, 32)
    table(f'Pong, {PONG} steps of it', [[k, f'{screens.ask(k, "nbytes", 0):,.0f}', f'{v:.0f}'] for k, v in us.items()],
          ['', 'bytes a transition', 'µs for a draw of 32'])
    screens.close()


if __name__ == '__main__': main()
