"What type checkers say: of the package, of a user's script under `mypy --strict`, and of misuse that they must notice"
import os, re, subprocess, sys, tomllib

import pytest

LIB = 'fastrl_replay'
SCRIPT = '''
from typing import NamedTuple

import numpy as np
from torch import nn
from fastrl_replay.all import (
    Batch, DQNLearner, EpsilonGreedy, GymStepper, LinearSchedule, NStep, PrioritizedReplay, Proportional, ReplayMemory, Sequence,
    SequenceReplay, SimpleStep, Transition,
)


class Mine(NamedTuple):
    state: np.ndarray[tuple[int], np.dtype[np.float32]]
    reward: float


def fill(memory: ReplayMemory, n: int) -> float:
    for k in range(n): memory.add(Mine(np.zeros(4, np.float32), float(k)))
    batch = memory.sample(8)
    batch.update_priorities(np.ones(8))
    total: float = batch.reward.sum().item()
    assert batch.ids is not None        # as they are in a batch that nobody drew
    return total + len(batch) + float(batch.ids[0]) + len(memory)


memory = ReplayMemory(1_000, Proportional(alpha=.6), seed=0)
print(fill(memory, 100), memory.n_added, memory.first_id)
memory.save('folder')
again = ReplayMemory.load('folder')
state = again.sample(8).state
print(state.shape, again.fetch([1, 2]), again.recent(3, fields=['reward']))

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
agent = EpsilonGreedy(model, eps=LinearSchedule(1., .05, 1_000), seed=0)
steps = GymStepper(['CartPole-v1'], agent=agent, seed=0)
windows = steps.n_step(n=3, gamma=.99)
replay = windows.prioritized_replay(bs=64, max_sz=5_000, min_sz=1_000, steps_per_batch=2, seed=0)
learn = DQNLearner(model, replay.loader())
learn.fit(10)
replay.show()
print(memory.health()['n_terminated'], [len(o) for o in memory.episodes()])
for batch in replay:
    print(batch.state)
    break
plain = GymStepper(['CartPole-v1'], step_type=Transition).experience_replay(bs=2)
windowed = ReplayMemory(1_000, sequence=Sequence(8, burn_in=2), seed=0)
print(windowed.sample_sequences(4, length=8), windowed.sample(4).update_priorities(np.ones((4, 6))))
sequences = SequenceReplay(steps, bs=8, max_sz=1_000, length=8, burn_in=2, alpha=.9)
reveal_type(memory)
reveal_type(again)
reveal_type(memory.sample(8))
reveal_type(steps)
reveal_type(windows)
reveal_type(replay)
reveal_type(plain)
reveal_type(sequences)
reveal_type(steps.sequence_replay(bs=8, max_sz=1_000, length=8))
reveal_type(memory.n_added)
'''
REVEALED = ['memory.replay_memory.ReplayMemory', 'memory.replay_memory.ReplayMemory', 'batch.Batch', 'pipes.stepper.GymStepper', 'pipes.n_step.NStep',
            'pipes.replay.PrioritizedReplay', 'pipes.replay.ExperienceReplay', 'pipes.sequences.SequenceReplay', 'pipes.sequences.SequenceReplay', 'int']


# What `--strict` adds for the script, and for the package as the script sees it. Libraries are read as `mypy` reads them in
# test_mypy, so that they are read once
STRICT = ['disallow_any_generics', 'disallow_subclassing_any', 'disallow_untyped_calls', 'disallow_untyped_defs', 'disallow_incomplete_defs',
          'check_untyped_defs', 'disallow_untyped_decorators', 'warn_redundant_casts', 'warn_unused_ignores', 'warn_return_any',
          'no_implicit_reexport', 'strict_equality', 'extra_checks', 'no_implicit_optional']


def section(name, options): return '\n'.join([f'[{name}]', *(f'{k} = {v}' for k, v in options.items()), ''])


@pytest.fixture(scope='module')
def check(root, tmp_path_factory):
    "A function that runs `mypy --strict` over a user's script, with the package where pip would put it: (returncode, what was said)"
    folder, settings = tmp_path_factory.mktemp('user'), tomllib.loads((root/'pyproject.toml').read_text(encoding='utf-8'))['tool']['mypy']
    overrides = {f'mypy-{",".join(o.pop("module"))}': o for o in settings.pop('overrides')}
    plain = {k: v for k, v in settings.items() if not isinstance(v, list)} | dict(cache_dir=root/'.mypy_cache')
    strict = dict.fromkeys(STRICT, True)
    (folder/'mypy.ini').write_text('\n'.join(map(section, ['mypy', *overrides, f'mypy-{LIB}.*,script'], [plain, *overrides.values(), strict])))
    def run(code):
        (folder/'script.py').write_text(code)
        ran = subprocess.run([sys.executable, '-m', 'mypy', 'script.py'], cwd=folder, env={'MYPYPATH': str(root), 'PATH': ''}, capture_output=True, text=True)
        return ran.returncode, ran.stdout + ran.stderr
    return run


def test_mypy(root):
    ran = subprocess.run([sys.executable, '-m', 'mypy'], cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    checked, files = int(re.search(r'in (\d+) source file', ran.stdout)[1]), [p for p in (root/LIB).rglob('*.py') if p.name != '_modidx.py']
    assert checked >= len(files), f'mypy looked at {checked} files only: {ran.stdout}'


def test_strict_is_all_of_it():
    said = subprocess.run([sys.executable, '-m', 'mypy', '--help'], capture_output=True, text=True, env=os.environ | dict(COLUMNS='200')).stdout
    flags = re.search(r'--strict +Strict mode; enables the following flags:(.*?)\n  -', re.sub(r'-\n +', '-', said), re.S)[1]
    assert {o.replace('-', '_') for o in re.findall(r'--([a-z-]+)', flags)} <= {*STRICT}


def test_a_strict_script_passes_and_types_are_known(check):
    code, said = check(SCRIPT)
    assert code == 0, said
    assert re.findall(r'Revealed type is "([^"]*)"', said.replace('fastrl_replay.', '').replace('builtins.', '')) == REVEALED


MISUSE = {
    'GymStepper(["CartPole-v1"]).n_stepp(n=3, gamma=.99)': '"GymStepper" has no attribute "n_stepp"',
    'GymStepper(["CartPole-v1"]).n_step(3, gama=.99)': 'Unexpected keyword argument "gama"',
    'GymStepper(["CartPole-v1"]).n_step(gamma="much")': 'incompatible type "str"',
    'ReplayMemory(10).smaple(3)': '"ReplayMemory" has no attribute "smaple"',
    'ReplayMemory()': 'Missing positional argument',
    'ReplayMemory(10).sample(3).ids.summ()': 'Item "Tensor" of "Tensor | None" has no attribute "summ"',
    'from fastrl_replay.memory.shelf import Batch': 'does not explicitly export attribute "Batch"',
    'def f(x): return x': 'Function is missing a type annotation',
}


@pytest.fixture(scope='module')
def misused(check):
    "What is said of each line of misuse, all in one script"
    code, out = check('\n'.join(['from fastrl_replay.all import GymStepper, ReplayMemory', *MISUSE]))
    assert code == 1, out
    return {k: ''.join(re.findall(f'^script.py:{line}: (error: .*)$', out, re.M)) for line, k in enumerate(MISUSE, 2)}


@pytest.mark.parametrize('wrong', MISUSE)
def test_misuse_is_noticed(misused, wrong): assert MISUSE[wrong] in misused[wrong], misused


def test_types_travel_with_the_package(root):
    "A wheel has `py.typed` and the stub"
    from setuptools import find_packages
    from setuptools.config.pyprojecttoml import read_configuration
    patterns = read_configuration(root/'pyproject.toml')['tool']['setuptools']['package-data']
    named = {p.relative_to(root/package.replace('.', '/')).as_posix() for package, globs in patterns.items() if package in find_packages(root)
             for g in globs for p in (root/package.replace('.', '/')).glob(g)}
    assert {'py.typed', 'pipes/base.pyi'} <= named
