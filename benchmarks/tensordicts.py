"""TensorDicts in and out, compared with TorchRL's own buffer: `python benchmarks/tensordicts.py [--rows N]`

64 transitions of CartPole at once, as TorchRL's collector yields them, and batches of 256. Both buffers have wrapped around before the
clock starts; a sampled TensorDict is held while the next one is drawn. The short TensorDict has only the entries that a DQN reads.
"""
import os

os.environ.setdefault('RL_LOGGING_LEVEL', 'WARNING')      # before torchrl is imported
import torch
from tensordict import TensorDict
from timing import begin, holding, interleaved, repeat, table
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from fastrl_replay.interop.torchrl import ReplayBuffer

ENVS, BS, WRITE = 64, 256, 100_000


def transitions(n):
    "`n` transitions, as a collector yields them"
    def no(): return torch.zeros(n, 1, dtype=torch.bool)
    after = dict(observation=torch.rand(n, 4), reward=torch.ones(n, 1), done=no(), terminated=no(), truncated=no())
    return TensorDict(dict(observation=torch.rand(n, 4), action=torch.randint(2, (n,)), done=no(), terminated=no(), truncated=no(),
                           collector=dict(traj_ids=torch.arange(n)), next=after), [n])


def short(data):
    "What a DQN reads"
    return data.select('observation', 'action', *(('next', k) for k in ('observation', 'reward', 'done', 'terminated'))).clone()


def compare(what, data, rows):
    "Both buffers, filled with `data` until they have wrapped around"
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), batch_size=BS)
    ours, much = ReplayBuffer(rows, batch_size=BS), torch.cat([data]*(WRITE//ENVS))
    while len(ours) < rows or ours.write_count==rows:
        for o in (theirs, ours): o.extend(much)
    for name, calls in {f'extend of {ENVS}': [repeat(o.extend, data) for o in (theirs, ours)],
                        f'sample of {BS}': [holding(o.sample) for o in (theirs, ours)]}.items():
        us = interleaved({k: (f, 300) for k, f in zip(('TorchRL', 'ours'), calls)})
        rows_ = [[k, f'{v:.1f}', f'{us["TorchRL"]/v:.2f}'] for k, v in us.items()]
        table(f'{name}, {what}', rows_, ['', 'µs a call', 'times as fast'])


def main():
    "Measure and print"
    rows, data = begin(), transitions(ENVS)
    compare('all entries of a collector', data, rows)
    compare('the entries of a DQN', short(data), rows)


if __name__ == '__main__': main()
