"Stacked images from a memory on the disk, in which each frame lies once; killed, it goes on with all that was stored"
import sys
from pathlib import Path
import gymnasium as gym
import numpy as np
from fastrl_replay.all import DQNLearner, EpsilonGreedy, GymStepper, ReplayMemory, q_network

class Catch(gym.Env):
    "A ball falls on an image of 40 × 40, and a paddle at the bottom should be where it lands"
    observation_space, action_space = gym.spaces.Box(0, 255, (40, 40), np.uint8), gym.spaces.Discrete(3)
    def seen(self):
        image = np.zeros((40, 40), np.uint8)
        image[self.y:self.y + 4, self.x:self.x + 4] = 255
        image[36:, self.at:self.at + 8] = 128
        return image
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.y, self.at = int(self.np_random.integers(36)), 0, 16
        return self.seen(), {}
    def step(self, action):
        self.y, self.at = self.y + 4, int(np.clip(self.at + 4*(int(action) - 1), 0, 32))
        ended = self.y >= 36
        return self.seen(), float(ended and abs(self.at + 2 - self.x) <= 4), ended, False, {}

if __name__=='__main__':
    folder, n_batches = Path(sys.argv[1]), int(sys.argv[2])
    env = gym.wrappers.FrameStackObservation(Catch(), 4)
    model = q_network(env.observation_space, 3, hidden=64, seed=0)
    replay = GymStepper([env], agent=EpsilonGreedy(model, .2, seed=0), seed=0).experience_replay(
        bs=16, max_sz=2_000, min_sz=200, steps_per_batch=4, seed=0, path=folder/'memory')
    learn = DQNLearner(model, replay.loader(), lr=1e-3, gamma=.9)
    if (folder/'learner').exists(): learn.load(folder/'learner')
    while learn.n_batches < n_batches:
        learn.fit(25)
        learn.save(folder/'learner')
        with ReplayMemory.peek(folder/'memory') as seen: n, shown = seen.n_added, seen.sample(1).state.shape
        each = replay.memory.health()['bytes_each']
        print(learn.n_batches, n, tuple(shown), round(each), flush=True)
