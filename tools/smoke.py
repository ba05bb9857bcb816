"""What a user does, in one run of half a minute: `python tools/smoke.py`. It needs the library, and no extra.

A pipeline from CartPole to a learner, a memory saved, loaded and kept on disk, its health and its picture, sequences,
the command line. `make lowest` runs it with the lowest versions allowed, `make dist` with what it has built.
"""
import tempfile
from pathlib import Path

import gymnasium as gym
import matplotlib
import torch

matplotlib.use('agg')
from fastrl_replay import cli
from fastrl_replay.all import DQNLearner, EpsilonGreedy, GymStepper, LinearSchedule, ReplayMemory
from fastrl_replay.learner import q_network

env = gym.make('CartPole-v1')
model = q_network(env.observation_space, int(env.action_space.n), hidden=16, seed=0)
agent = EpsilonGreedy(model, eps=LinearSchedule(1., .05, 500), seed=0)
held = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
folder = Path(held.name)

def pipeline(**how):
    return (GymStepper(['CartPole-v1'], agent=agent, seed=0).n_step(n=3, gamma=.99)
            .prioritized_replay(bs=32, max_sz=1_000, min_sz=100, steps_per_batch=2, seed=0, **how))

replay = pipeline()
learn = DQNLearner(model, replay.loader())
learn.fit(150)
assert learn.n_batches == 150 and len(learn.evaluate('CartPole-v1', 2)) == 2
learn.plot().savefig(folder/'curve.png')
replay.show().savefig(folder/'memory.png')
assert (folder/'memory.png').stat().st_size > 10_000
print(sorted(replay.memory.health())[:3])

replay.save(folder/'saved')
again = pipeline().load(folder/'saved')
assert torch.equal(again.sample().ids, replay.sample().ids) and again.memory.check_valid()
assert ReplayMemory.load(folder/'saved').n_added == replay.memory.n_added

on_disk = pipeline(path=folder/'disk')
for _, batch in zip(range(20), on_disk): batch.update_priorities(torch.ones(32))
n = on_disk.memory.n_added
on_disk.memory.close()
with ReplayMemory.open(folder/'disk') as memory: assert memory.n_added == n and memory.check_valid()

windows = GymStepper(['CartPole-v1'], seed=0).sequence_replay(bs=4, max_sz=500, length=8, min_sz=200, seed=0)
assert next(iter(windows)).state.shape == (4, 8, 4)
args = '--steps 600 --bs 16 --episodes 2 --confirm 0 --select 2 --memory rank --out'
assert cli.main(['train', *args.split(), str(folder/'run')]) == 0
print('works')
