"A pipeline with a pipe of one's own, normalised states, scaled rewards and actors, saved as it goes and resumed"
import sys
from pathlib import Path
import gymnasium as gym
import numpy as np
from torch import nn
import torch
from fastrl_replay.all import (
    DQNLearner, EpsilonGreedy, GymStepper, IterDataPipe, Normalized, RewardScale, SharedAgent, SharedParams, datapipe)

class Centimetres(gym.ObservationWrapper):
    def observation(self, o): return o*np.float32([100, 100, 1, 1])
def cart(): return Centimetres(gym.make('CartPole-v1'))

@datapipe('bounded')
class Bounded(IterDataPipe):
    "Penalises an end, and counts the penalties"
    def __init__(self, source_datapipe): self.source_datapipe, self.n = source_datapipe, 0
    def __iter__(self):
        for chunk in self.source_datapipe:
            self.n += int(chunk.terminated.sum())
            yield chunk.replace(reward=torch.where(chunk.terminated, -10., chunk.reward))
    def state_dict(self): return dict(n=self.n)
    def load_state_dict(self, state): self.n = state['n']

if __name__=='__main__':
    folder, n_batches = Path(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(0)
    model = Normalized(nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2)))
    shared = SharedParams(model)
    agent = SharedAgent(EpsilonGreedy(model, .2, seed=0), shared)
    penalties = GymStepper([cart], agent=agent, seed=0).actors(2, chunk=16).bounded()
    replay = penalties.statistics(model).n_step(3, .99).prioritized_replay(bs=32, max_sz=20_000, min_sz=500, steps_per_batch=4, seed=0)
    learn = DQNLearner(model, replay.loader(), shared=shared, reward_scale=RewardScale(.99))
    if folder.exists(): learn.load(folder)
    while learn.n_batches < n_batches:
        learn.fit(100)
        learn.save(folder)
        running = model.running['state']
        print(learn.n_batches, replay.memory.n_added, penalties.n, int(running.count), f'{learn.reward_scale.spread:.3f}', flush=True)
