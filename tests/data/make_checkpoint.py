"""How `checkpoint_v1` and `checkpoint_v2` were made, each by the version of the package that first wrote this format. Don't make them again:
that they still load is the test.

    python tests/data/make_checkpoint.py FOLDER"""
import sys

import numpy as np

from fastrl_replay.pipes.nstep import NStep
from fastrl_replay.pipes.replay import PrioritizedReplay
from fastrl_replay.pipes import saving  # noqa: F401   (brings save)
from fastrl_replay.schedules import LinearSchedule
from fastrl_replay.steps import SimpleStep


def steps(n):
    "Two environments, whose episodes have seven steps"
    for k in range(n):
        t, e = k//2, k % 2
        yield SimpleStep(np.array([k, k/2], np.float32), k % 3, np.array([k + 1, k/2], np.float32), t % 7==6 and e==0, t % 7==6 and e==1,
                         float(k), 0., e, 0, t % 7, t//7)


def replay_of(source):
    return PrioritizedReplay(NStep(source, n=3, gamma=.5), bs=4, max_sz=40, min_sz=10, steps_per_batch=2, seed=7, alpha=.7,
                             beta=LinearSchedule(.4, 1., 50), eps=.01)


if __name__=='__main__':
    replay = replay_of(list(steps(75)))
    it = iter(replay)
    for k in range(20): next(it).update_priorities(np.arange(4) + k)
    replay.save(sys.argv[1])
    replay.update_priorities([45], [3.])
    replay.save(sys.argv[1])
    batch = replay.sample()
    print(replay.memory.n_added, replay.n_batches, batch.ids.tolist(), batch.weights.tolist(), replay.memory.sampler.priorities.sum())
