"""Run the trainings whose figures the pages show: `python benchmarks/evidence/run.py [games] [learners] [--jobs 2]`

Each training is a process of its own, `--jobs` at a time, and one row of a CSV in nbs/tutorials/data/. What the CSV
holds already isn't run again, so an interrupted night goes on where it was; a training of more frames replaces a shorter
one. All environments and all memories or libraries of one seed come before the next seed.
"""
import argparse
import csv
import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).resolve().parent
DATA = HERE.parent.parent/'nbs'/'tutorials'/'data'
sys.path.insert(0, str(HERE))


class Results:
    "The rows of a CSV by what was trained: the first three columns"
    def __init__(self, path, head):
        self.path, self.head = path, head
        self.rows = self.read()

    def read(self):
        if not self.path.exists(): return {}
        with self.path.open(encoding='utf-8') as f: return {tuple(row[:3]): row for row in list(csv.reader(f))[1:]}

    def has(self, key, frames):
        "Is there a training of `key` with at least as many frames?"
        row = self.rows.get(tuple(map(str, key)))
        return row is not None and int(row[3]) >= frames

    def put(self, row):
        "Add a row, or replace the one of the same training, and write the file whole or not at all"
        self.rows = self.read() | {tuple(row[:3]): row}         # another scheduler may have added some
        new = self.path.with_suffix('.new')
        with new.open('w', newline='', encoding='utf-8') as f:
            csv.writer(f, lineterminator='\n').writerows([self.head, *sorted(self.rows.values())])
        os.replace(new, self.path)


def single(train, envs, ways):
    "The command line of one training, which prints its row"
    parser = argparse.ArgumentParser()
    parser.add_argument('env', choices=envs)
    parser.add_argument('what', choices=ways)
    parser.add_argument('seed', type=int)
    parser.add_argument('--frames', type=int, required=True)
    asked = parser.parse_args()
    print(*train(asked.env, asked.what, asked.seed, asked.frames), sep=',')


def missing(experiment, results, seeds=None, frames=None, envs=()):
    "The trainings to run, (environment, what, seed, frames), seed by seed"
    for seed in range(seeds or experiment.SEEDS):
        for env in envs or experiment.FRAMES:
            n = frames or experiment.FRAMES[env]
            yield from ((env, o, seed, n) for o in experiment.WAYS if not results.has((env, o, seed), n))


def train(name, env, what, seed, frames):
    "Run one training in a process of its own; its row, or None after saying what went wrong"
    command = [sys.executable, str(HERE/f'{name}.py'), env, what, str(seed), '--frames', str(frames)]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | dict(OMP_NUM_THREADS='1'))
    if ran.returncode==0: return next(csv.reader(ran.stdout.splitlines()[-1:]))
    print(f'{" ".join(command)} failed:\n{ran.stderr[-2000:]}', file=sys.stderr, flush=True)
    return None


def run(name, jobs, data=DATA, train=train, **which):
    "Run what is missing of one experiment; how many trainings failed"
    experiment = importlib.import_module(name)
    data.mkdir(parents=True, exist_ok=True)
    results = Results(data/experiment.OUT, experiment.HEAD)
    todo = list(missing(experiment, results, **which))
    print(f'{name}: {len(results.rows)} trainings are there, {len(todo)} to run, {jobs} at a time', flush=True)
    failed = 0
    pool = ThreadPoolExecutor(jobs)
    try:
        for ended in as_completed([pool.submit(train, name, *o) for o in todo]):
            row = ended.result()
            if row is None:
                failed += 1
                continue
            results.put(row)
            print(*row[:5], flush=True)
    finally: pool.shutdown(cancel_futures=True)         # after an interrupt, no further training begins
    return failed


def main():
    "Run the experiments asked for"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('experiments', nargs='*', default=['games', 'learners'], help='games, learners (default: both)')
    parser.add_argument('--jobs', type=int, default=2, help='trainings at a time')
    parser.add_argument('--seeds', type=int, help='seeds of each (default: all)')
    parser.add_argument('--frames', type=int, help='frames of a training (default: those of the page)')
    parser.add_argument('--envs', nargs='+', default=(), help='only these environments or games')
    asked = parser.parse_args()
    which = dict(seeds=asked.seeds, frames=asked.frames, envs=asked.envs)
    sys.exit(bool(sum([run(name, asked.jobs, **which) for name in asked.experiments])))


if __name__ == '__main__': main()
