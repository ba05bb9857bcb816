"The trainings behind the evidence pages: what is stored isn't run again, all learners get the same updates, curves are what they say"
import csv, importlib, sys

import gymnasium as gym
import numpy as np
import pytest
import torch

from fastrl_replay.gradient_step import FusedAdam


@pytest.fixture(scope='module')
def evidence(root):
    "benchmarks/evidence/ as a place to import from"
    sys.path.insert(0, str(root/'benchmarks'/'evidence'))
    torch.set_num_threads(1)
    yield importlib.import_module
    sys.path.remove(str(root/'benchmarks'/'evidence'))


# ---- the scheduler

def pretend(ran, failing=()):
    "A `train` that notes what it was asked for, and fails for some"
    def train(name, env, what, seed, frames):
        ran.append((env, what, seed, frames))
        return None if (env, what, seed) in failing else [env, what, str(seed), str(frames), '1', '0.5 0.6']
    return train


def test_what_is_stored_is_not_run_again(evidence, tmp_path):
    run, ran = evidence('run'), []
    failing = {('asterix', 'uniform', 1)}
    assert run.run('games', 2, tmp_path, pretend(ran, failing), seeds=2, frames=50) == 1
    games = evidence('games')
    assert len(ran) == 2*len(games.FRAMES)*len(games.WAYS)
    assert run.run('games', 1, tmp_path, pretend(again := []), seeds=2, frames=50) == 0
    assert again == [('asterix', 'uniform', 1, 50)]
    assert run.run('games', 1, tmp_path, pretend(none := []), seeds=2, frames=40) == 0 and not none
    rows = list(csv.DictReader((tmp_path/games.OUT).open()))
    assert len(rows) == len(ran) and tuple(rows[0]) == games.HEAD


def test_a_longer_training_replaces_a_shorter_one(evidence, tmp_path):
    run = evidence('run')
    for frames in (50, 100):
        run.run('games', 1, tmp_path, pretend([]), seeds=1, frames=frames, envs=['breakout'])
        rows = list(csv.DictReader((tmp_path/'minatar.csv').open()))
        assert {o['frames'] for o in rows} == {str(frames)} and len(rows) == len(evidence('games').WAYS)


def test_seeds_come_one_after_the_other(evidence, tmp_path):
    run, ran = evidence('run'), []
    run.run('learners', 1, tmp_path, pretend(ran), seeds=3, frames=10, envs=['Acrobot-v1', 'CartPole-v1'])
    assert [seed for *_, seed, _ in ran] == sorted(seed for *_, seed, _ in ran)
    assert [env for env, *_ in ran[:5]] == ['Acrobot-v1']*4 + ['CartPole-v1']


def test_a_failed_training_is_told(evidence, capfd):
    assert evidence('run').train('learners', 'NoSuch-v0', 'sb3', 0, 10) is None
    assert 'NoSuch-v0' in capfd.readouterr().err


def test_a_training_is_a_process(evidence):
    row = evidence('run').train('learners', 'CartPole-v1', 'cleanrl', 3, 1_040)
    assert row[:4] == ['CartPole-v1', 'cleanrl', '3', '1040'] and len(row[6].split()) == len(row[7].split()) == 20


# ---- MinAtar

class Grid(gym.Env):
    "Ten by ten cells in four planes, as MinAtar shows them; an episode ends by chance"
    observation_space = gym.spaces.Box(0, 1, (10, 10, 4), bool)
    action_space = gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.state(), {}

    def state(self): return self.np_random.random((10, 10, 4)) < .1
    def step(self, action): return self.state(), int(action==1), self.np_random.random() < .05, False, {}


@pytest.mark.parametrize('memory', ['uniform', 'proportional', 'rank-based', 'age-weighted'])
def test_a_game_is_learned(evidence, memory):
    games = evidence('games')
    learn = games.learner(Grid(), memory, seed=0, max_sz=500, first=100).fit(50)
    assert sum(p.numel() for p in learn.model.parameters()) == 16*(4*9 + 1) + 128*(1024 + 1) + 3*129
    assert learn.n_steps in range(100 + 49*4, 100 + 49*4 + 3) and all(np.isfinite(learn.losses))
    assert type(learn.memory.sampler).__name__.lower()[:4] == memory.replace('-', '')[:4]
    batch = learn.memory.sample(8)
    assert batch.state.shape == (8, 10, 10, 4) and np.isclose(batch.discount[:, None], [.99, .9801, .970299]).any(1).all()


def test_random_play_is_counted(evidence):
    steps, returns = evidence('games').play(Grid(), 0, 2_000)
    assert 50 < len(steps) < 200 and sorted(steps) == list(steps)
    assert 2_000/3*.8 < sum(returns) < 2_000/3*1.2


@pytest.mark.parametrize('seed', range(5))
def test_a_curve_has_the_means_of_its_windows(evidence, seed):
    rng = np.random.default_rng(seed)
    steps = np.sort(rng.choice(np.arange(1, 101), 12, replace=False)).tolist()
    returns = rng.normal(size=12).tolist()
    naive = [[r for s, r in zip(steps, returns) if 10*k < s <= 10*k + 10] for k in range(10)]
    found = evidence('games').curve(steps, returns, 100, window=10)
    for o, mine in zip(naive, found, strict=True): assert np.isnan(mine) if not o else np.isclose(mine, np.mean(o))


# ---- beside other learners

@pytest.mark.parametrize('library', ['fastrl_replay', 'prioritized', 'sb3', 'cleanrl'])
def test_all_learners_do_as_many_updates(evidence, library, monkeypatch):
    if library in ('sb3', 'cleanrl'): pytest.importorskip('stable_baselines3')
    learners, steps = evidence('learners'), []
    kind, name = (torch.optim.Adam, 'step') if library in ('sb3', 'cleanrl') else (FusedAdam, 'descend')
    step = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda self, *args: steps.append(self) or step(self, *args))
    row = dict(zip(learners.HEAD, learners.train('CartPole-v1', library, 1, 1_400)))
    settings = learners.SETTINGS['CartPole-v1']
    assert abs(len(steps) - (1_400 - learners.FIRST)/settings.every) <= 1
    assert all(g['lr'] == settings.lr for g in steps[-1].param_groups)
    assert sum(p.numel() for g in steps[-1].param_groups for p in g['params']) == 4*120 + 120 + 120*84 + 84 + 84*2 + 2
    cpu_at = [float(o) for o in row['cpu_at'].split()]
    assert len(row['returns'].split()) == learners.LOOKS and cpu_at == sorted(cpu_at) and float(row['cpu_seconds']) > 0
