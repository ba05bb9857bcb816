"Sources, environments and agents for the tests of actors; in a module, so that a spawned process finds them"
import os
import signal
import time

import gymnasium as gym
import numpy as np
import torch

from fastrl_replay.batch import Batch
from fastrl_replay.pipes.base import IterDataPipe
from fastrl_replay.steps import SimpleStep, Transition


class Counting(gym.Env):
    "Observation: [seed, episode, step]; an episode of `length` steps; `trouble` comes at step `at` of its life"
    observation_space = gym.spaces.Box(-1e9, 1e9, (3,), np.float64)
    action_space = gym.spaces.Discrete(2)
    def __init__(self, length=7, at=None, trouble='', pause=0.): self.length, self.at, self.trouble, self.pause, self.life, self.episode = length, at, trouble, pause, 0, -1
    def obs(self): return np.array([self.number, self.episode, self.t], np.float64)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None: self.number = float(seed % 1_000_003)
        self.episode, self.t = self.episode + 1, 0
        return self.obs(), {}
    def step(self, action):
        if self.life==self.at: self.strike()
        time.sleep(self.pause)
        self.life, self.t = self.life + 1, self.t + 1
        return self.obs(), self.number % 7 + self.t, False, self.t==self.length, {}
    def strike(self):
        if self.trouble=='raise': raise OSError('the robot ran out of battery')
        if self.trouble=='odd': raise Odd('nobody can unpickle me', 3)
        if self.trouble=='kill': os.kill(os.getpid(), signal.SIGKILL)
        if self.trouble=='exit': os._exit(7)
        if self.trouble=='pipe': raise BrokenPipeError('the robot hung up')
        if self.trouble=='leave': raise SystemExit(3)
        if self.trouble=='hang': time.sleep(1000)


class Odd(Exception):
    "Pickles, and doesn't unpickle"
    def __init__(self, a, b): super().__init__(a)

class Make:
    "A function that makes a `Counting`, and can be pickled"
    def __init__(self, **kw): self.kw = kw
    def __call__(self): return Counting(**self.kw)


class Source(IterDataPipe):
    """`n` steps of streams 0 … k−1 in turn (for ever: None), as many in each item as `rows` says (0: single steps);
    a list of them or, `stacked`, a `Batch`; then the end, or an error"""
    def __init__(self, n=None, k=1, rows=0, step_type=SimpleStep, counter=None, error=None, stacked=False):
        self.stacked = stacked
        self.n, self.k, self.rows, self.step_type, self.counter, self.error, self.i, self.at = n, k, rows, step_type, counter, error, 0, 0
    def one(self):
        i, self.i, self.at = self.i, self.i + 1, self.at + 1
        if self.counter is not None:
            with self.counter.get_lock(): self.counter.value += 1
        s = np.array([i], np.float32)
        if self.step_type is Transition: return Transition(s, 0, float(i), s + 1, False, False)
        return SimpleStep(s, 0, s + 1, False, False, float(i), 0., i % self.k, 0, i//self.k, 0)
    def __iter__(self):
        while self.n is None or self.at < self.n: yield self.item()
        self.at = 0
        if self.error: raise self.error
    def item(self):
        if not self.rows: return self.one()
        steps = [self.one() for _ in range(self.rows)]
        return Batch.of(self.step_type(*map(np.array, zip(*steps)))) if self.stacked else steps
    def state_dict(self): return dict(i=self.i, at=self.at)
    def load_state_dict(self, state): self.i, self.at = state['i'], state['at']


class Unfindable:
    "Pickles here; unpickling runs into an error"
    def __reduce__(self): return fail, ()
    def __iter__(self): return iter(())

def fail(): raise ImportError('no module named robots')


class Follower(torch.nn.Module):
    "One parameter under two names"
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.b.weight = self.a.weight

def network(h=8, n=3):
    "A network with batch norm"
    return torch.nn.Sequential(torch.nn.Linear(n, h), torch.nn.BatchNorm1d(h), torch.nn.Linear(h, 2))

def pull_for_a_while(shared, model, stop, results):
    "Pull until told to stop; how many models were not of one piece, and the versions seen"
    torch.set_num_threads(1)                 # a forked process can't use the threads that its parent had
    have, torn, versions = -1, 0, []
    while not stop.is_set():
        got = shared.pull(model, have)
        if got==have: continue
        have = got
        versions.append(got)
        torn += len({o.item() for t in [*model.parameters(), *model.buffers()] for o in (t.min(), t.max())})!=1
        if len(versions)==30: results.put('enough')
    results.put((torn, versions))
