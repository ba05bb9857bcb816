"""How the frozen folders beside this file were made, each by the version of the package that first wrote its format. Don't make them again:
that they still load is the test.

    python tests/data/make_checkpoint.py rows FOLDER        saved_v3, of test_saving_format.py
    python tests/data/make_checkpoint.py replay FOLDER      a replay with its memory
    python tests/data/make_checkpoint.py sequences FOLDER   sequences of n-step transitions, when an episode ended at its first flagged row
    python tests/data/make_checkpoint.py burn_in FOLDER     sequences when the first steps of an episode were burn-in like all others"""
import sys
from pathlib import Path

import numpy as np


def steps(n):
    "Two environments, whose episodes have seven steps"
    from fastrl_replay.steps import SimpleStep
    for k in range(n):
        t, e = k//2, k % 2
        yield SimpleStep(np.array([k, k/2], np.float32), k % 3, np.array([k + 1, k/2], np.float32), t % 7==6 and e==0, t % 7==6 and e==1,
                         float(k), 0., e, 0, t % 7, t//7)


def replay_of(source):
    from fastrl_replay.pipes.n_step import NStep
    from fastrl_replay.pipes.replay import PrioritizedReplay
    from fastrl_replay.schedules import LinearSchedule
    return PrioritizedReplay(NStep(source, n=3, gamma=.5), bs=4, max_sz=40, min_sz=10, steps_per_batch=2, seed=7, alpha=.7,
                             beta=LinearSchedule(.4, 1., 50), eps=.01)


def make_replay(folder):
    "Saved twice: its rows lie in two pieces, the first of which begins with rows that were overwritten"
    replay = replay_of(list(steps(75)))
    it = iter(replay)
    for k in range(20): next(it).update_priorities(np.arange(4) + k)
    replay.save(folder)
    for _ in range(8): next(it)
    replay.update_priorities([45], [3.])
    replay.save(folder)
    batch = replay.sample()
    print(replay.memory.n_added, replay.n_batches, batch.ids.tolist(), batch.weights.tolist(), replay.memory.sampler.priorities.sum())


def make_sequences(folder):
    "Saved between two of an episode's last three rows; each sequence with a priority of its own"
    from fastrl_replay.memory import ReplayMemory
    from fastrl_replay.pipes.n_step import NStep
    from fastrl_replay.samplers.proportional import Proportional
    from fastrl_replay.storage.sequence_sampler import Sequence
    memory = ReplayMemory(40, Proportional(), sequence=Sequence(5, stride=2), seed=0)
    for row in NStep(list(steps(75)), n=3, gamma=.5):
        memory.add(row)
        if memory.n_added==54: break
    starts = memory.sampler.starts[:len(memory.sampler), 0]
    ids = starts + (53 - starts)//40*40
    memory.update_priorities(ids, ids/10)
    memory.save(folder)
    print(sorted(ids.tolist()))


def make_burn_in(folder):
    "Windows of episodes of seven steps, of which the second has three steps and no loss"
    from fastrl_replay.memory import ReplayMemory
    from fastrl_replay.samplers.proportional import Proportional
    from fastrl_replay.storage.sequence_sampler import Sequence
    memory = ReplayMemory(40, Proportional(), sequence=Sequence(6, burn_in=3, stride=4), seed=0)
    for row in steps(75): memory.add(row)
    batch = memory.sample(8)
    memory.update_priorities(batch.ids, batch.ids.clamp(min=0))
    memory.save(folder)
    for _ in range(2): print(memory.sample(8).ids[:, 0].tolist())
    memory.update_priorities(batch.ids[:, 0], batch.ids[:, 0])
    print(memory.sample(8).ids[:, 0].tolist(), sorted(memory.sampler.priorities.round(3).tolist()))


def make_rows(folder):
    "The ring of the tests, saved twice; the second time with a bit of everything that a state may hold"
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from fastrl_replay.saving import save_state
    from test_saving_format import Ring, anything
    ring = Ring().add(30)
    ring.save(folder)
    ring.add(35)
    extra = {k: v for k, v in anything().items() if k not in ('tensor', 'columns')}      # those two are random
    save_state(folder, dict(max_sz=40, n=65, priorities=ring.priorities, extra=extra), 'ring', ring.as_rows())


if __name__=='__main__': dict(rows=make_rows, replay=make_replay, sequences=make_sequences, burn_in=make_burn_in)[sys.argv[1]](Path(sys.argv[2]))
