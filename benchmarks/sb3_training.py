"""Stable-Baselines3's DQN and SAC with its own replay buffer and with ours: `python benchmarks/sb3_training.py [--most N] [--out CSV]`

For each algorithm and seed the same training runs twice, in two processes that take turns of 50 steps, so that whatever slows the machine
down hits both; which buffer comes first alternates. A row of the CSV is one training: the mean return of ten evaluation episodes, a checksum
of the weights, and the CPU time of `learn`. What the CSV holds already isn't run again, so an interrupted run goes on where it was.
"""
import argparse
import csv
import multiprocessing
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from fastrl_replay.interop import sb3

HEAD = 'algorithm', 'environment', 'buffer', 'seed', 'steps', 'return', 'cpu_seconds', 'weights_crc32'
OUT = Path(__file__).resolve().parent.parent/'nbs'/'6_elsewhere'/'sb3_training.csv'
# The hyperparameters for CartPole are those of the RL Zoo; Pendulum learns with the defaults
CARTPOLE = dict(learning_rate=2.3e-3, batch_size=64, buffer_size=100_000, learning_starts=1000, target_update_interval=10,
                train_freq=256, gradient_steps=128, exploration_fraction=.16, exploration_final_eps=.04, policy_kwargs=dict(net_arch=[256, 256]))
CASES = {'DQN': (DQN, 'CartPole-v1', 50_000, 8, CARTPOLE), 'SAC': (SAC, 'Pendulum-v1', 10_000, 4, {})}
BUFFERS = {'SB3': None, 'ours': sb3.ReplayBuffer}
TURN = 50


class Turns(BaseCallback):
    "Two trainings take turns: this one holds the semaphore `mine` while it runs"
    def __init__(self, mine, other):
        super().__init__()
        self.mine, self.other = mine, other
    def _on_step(self):
        if self.n_calls % TURN==0:
            self.other.release()
            self.mine.acquire()
        return True


def train(case, buffer, seed, steps, turns):
    "One training as a row of the CSV"
    algorithm, env_id, _, _, options = CASES[case]
    model = algorithm('MlpPolicy', make_vec_env(env_id, seed=seed), seed=seed, replay_buffer_class=BUFFERS[buffer], **options)
    start = time.process_time()
    model.learn(steps, callback=turns)
    spent = time.process_time() - start
    weights = np.concatenate([p.detach().numpy().ravel() for p in model.policy.parameters()])
    mean, _ = evaluate_policy(model, make_vec_env(env_id, seed=1000 + seed), n_eval_episodes=10)
    return case, env_id, buffer, seed, steps, f'{mean:.2f}', f'{spent:.2f}', f'{zlib.crc32(weights.tobytes()):08x}'


def pair(case, seed, steps=None):
    "The same training with each buffer, as two rows"
    fork = multiprocessing.get_context('fork')
    turns, rows = [fork.Semaphore(o) for o in (1, 0)], fork.Queue()
    def run(k, buffer):
        turns[k].acquire()
        rows.put((k, train(case, buffer, seed, steps or CASES[case][2], Turns(turns[k], turns[1 - k]))))
        turns[1 - k].release()
    for k, o in enumerate(sorted(BUFFERS, reverse=seed % 2==1)): fork.Process(target=run, args=(k, o)).start()
    return [row for _, row in sorted(rows.get() for _ in BUFFERS)]


def plan():
    "Algorithm and seed of all pairs: one seed of each algorithm after the other"
    for seed in range(max(o[3] for o in CASES.values())):
        yield from ((case, seed) for case, (*_, seeds, _) in CASES.items() if seed < seeds)


def main():
    "Run what is missing"
    parser = argparse.ArgumentParser()
    parser.add_argument('--out', type=Path, default=OUT)
    parser.add_argument('--most', type=int, help='pairs to run now, at most')
    asked = parser.parse_args()
    out = asked.out
    torch.set_num_threads(1)
    there = list(csv.DictReader(out.open(encoding='utf-8'))) if out.exists() else []
    known = {(o['algorithm'], int(o['seed'])) for o in there}
    if not there: out.write_text(','.join(HEAD) + '\n', encoding='utf-8')
    for case in [o for o in plan() if o not in known][:asked.most]:
        rows = pair(*case)
        with out.open('a', newline='', encoding='utf-8') as f: csv.writer(f, lineterminator='\n').writerows(rows)
        for row in rows: print(*row, flush=True)


if __name__ == '__main__': main()
