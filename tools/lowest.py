"""Do the lowest versions that pyproject.toml allows work? Install them, and use the library with them.

    python tools/lowest.py                       in .lowest, made anew
    python tools/lowest.py --torch 2.13.0        with this PyTorch instead of the lowest, which is a large download
    python tools/lowest.py --venv DIR --no-extras

Every requirement has a lowest version (`>=` or `==`). Those of the package are installed with exactly these, and
with the newest of what they bring along, into an environment that holds nothing else (no IPython, for one). There a
small run uses what a user would: a pipeline from CartPole to a learner, a memory saved, loaded and kept on disk, its
health and its picture, the command line. Of each extra is asked whether its lowest versions can be installed beside
those of the package. The first thing that fails ends it with its message and the exit status 1.
"""
import argparse, os, re, shutil, subprocess, sys, tempfile, tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = 'fastrl_replay'

SMOKE = """
import tempfile, torch
from pathlib import Path
import gymnasium as gym, matplotlib
matplotlib.use('agg')
from fastrl_replay import cli
from fastrl_replay.all import *
from fastrl_replay.learner import q_network

env = gym.make('CartPole-v1')
model = q_network(env.observation_space, int(env.action_space.n), hidden=16, seed=0)
agent = EpsilonGreedy(model, eps=LinearSchedule(1., .05, 500), seed=0)
folder = Path(tempfile.mkdtemp())
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
"""


def bounds(lines):
    "The lowest version of each requirement, {name: '==1.2'}, of several the highest; or a `SystemExit`"
    found = {}
    for line in lines:
        name, extras, allowed = re.fullmatch(r'([\w.-]+)(\[[\w,-]+\])?\s*(.*)', line).groups()
        low = [o.strip()[2:] for o in allowed.split(',') if o.strip()[:2] in ('>=', '==')]
        if not low: raise SystemExit(f'pyproject.toml: {line}: expected a lowest version (>= or ==)')
        found[name] = max([found.get(name, ''), low[0]], key=lambda v: [int(o) for o in re.findall(r'\d+', v)])
    return {name: f'=={version}' for name, version in found.items()}


def requirements(root=ROOT):
    "What the package requires, and what each extra does: (list, {name: list})"
    project = tomllib.loads((root/'pyproject.toml').read_text(encoding='utf-8'))['project']
    return project['dependencies'], project['optional-dependencies']


def run(*args, **kw):
    "Run a command; a `SystemExit` if it fails"
    words = [str(o) for o in args]
    if subprocess.run(words, **kw).returncode: raise SystemExit(f'failed: {" ".join(words)[:200]}')


def pinned(folder, name, lines, torch):
    "Write the lowest versions of these requirements as a constraints file"
    pins = bounds(lines) | ({} if torch is None else dict(torch=f'=={torch}'))
    path = folder/f'{name}.txt'
    path.write_text(''.join(f'{k}{v}\n' for k, v in pins.items()))
    return path, pins


def copied(folder):
    "A copy of what makes the package, so that building it leaves nothing here"
    shutil.copytree(ROOT/NAME, folder/NAME, ignore=shutil.ignore_patterns('__pycache__'))
    for name in 'pyproject.toml', 'README.md', 'LICENSE': shutil.copy(ROOT/name, folder)
    return folder


def main():
    "Install, run, ask"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--venv', type=Path, default=ROOT/'.lowest')
    parser.add_argument('--torch', help='the version of PyTorch (default: the lowest allowed)')
    parser.add_argument('--extras', action=argparse.BooleanOptionalAction, default=True, help='ask about the extras')
    o = parser.parse_args()
    own, extras = requirements()
    shutil.rmtree(o.venv, ignore_errors=True)
    run(sys.executable, '-m', 'venv', o.venv)
    python = o.venv.absolute()/('Scripts' if os.name=='nt' else 'bin')/'python'
    pip = python, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', '--no-input'
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = copied(folder)
        path, pins = pinned(o.venv, NAME, own, o.torch)
        print('installing', ', '.join(k + v for k, v in pins.items()), flush=True)
        run(*pip, '-c', path, source)
        (folder/'run').mkdir()
        env = os.environ | dict(NUMBA_CACHE_DIR=str(folder/'run'), OMP_NUM_THREADS='1', TMPDIR=str(folder/'run'))
        env.pop('PYTHONPATH', None)
        run(python, '-c', SMOKE, cwd=folder/'run', env=env)
        print('the package works with its lowest versions', flush=True)
        for name, lines in extras.items() if o.extras else ():
            path, pins = pinned(o.venv, name, [*own, *lines], o.torch)
            run(*pip, '--dry-run', '-c', path, f'{source}[{name}]')
            print(f'[{name}] can be installed beside them', flush=True)


if __name__ == '__main__': main()
