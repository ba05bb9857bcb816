"""Runs on the command line that are killed and resumed, and folders that are inspected."""
import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import gymnasium as gym
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from fastrl_replay.learner import DQNLearner, q_network
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.replay import PrioritizedReplay
from fastrl_replay.runs import BestWeights, look, picture, summary
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.saving import CheckpointError, SavedState
from fastrl_replay.schedules import LinearSchedule
from fastrl_replay.steps import Transition
from fastrl_replay.steps import readable
from test_cli import RUN, SHORT, inside, refused
from faults import Calls, Injected
from test_harness import Own
from twins import KINDS
from words import WORDS, words


def until(path, seconds=60):
    patience = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < patience, f'{path} never came'
        time.sleep(.02)


LONG = ['--steps', '1400', '--min_sz', '100', '--bs', '16', '--episodes', '2', '--select', '2', '--confirm', '1', '--hidden', '16', '--every', '5000']

@pytest.mark.parametrize('on_disk', [False, True])
def test_a_killed_run_is_resumed(on_disk, tmp_path, capfd):
    "It goes on from its last checkpoint, with its own options; with the memory on disk every step is there"
    args = ['train', 'CartPole-v1', *LONG, '--seed', '2', '--out', str(tmp_path/'run'), '--checkpoint-every', '40', *(['--on_disk'] if on_disk else [])]
    process = subprocess.Popen([sys.executable, '-c', RUN, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | dict(MPLBACKEND='agg'))
    until(tmp_path/'run'/'checkpoint'/'manifest.json')
    time.sleep(.3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    if (tmp_path/'run'/'result.json').exists(): pytest.skip('the run was over before it could be killed')
    with SavedState(tmp_path/'run'/'checkpoint', 'learner') as saved: at = saved.state()
    assert at['learner']['n_batches'] >= 40 and at['learner']['n_batches'] % 40==0
    known = at['pipe']['ids'][1]
    if on_disk: assert ReplayMemory.peek(tmp_path/'run'/'memory').n_added >= known
    told = inside(capfd, 'inspect', tmp_path/'run')
    assert told.returncode==0 and f'learned from {at["learner"]["n_batches"]:,} batches' in told.stdout
    ran = inside(capfd, 'train', '--resume', tmp_path/'run')
    assert ran.returncode==0, ran.stderr
    result = json.loads((tmp_path/'run'/'result.json').read_text())
    assert result['arguments']['steps']==1400 and result['arguments']['seed']==2 and result['batches']==1 + int((1400 - 2 - 100)/2)
    assert result['steps'] >= 1390


def test_what_can_not_be_resumed_is_one_line(tmp_path, capfd):
    assert 'no such folder' in refused(inside(capfd, 'train', '--resume', tmp_path/'nothing'))
    assert 'no checkpoint' in refused(inside(capfd, 'train', '--resume', tmp_path))
    (tmp_path/'checkpoint').mkdir()                          # killed while it wrote the first
    assert 'no checkpoint' in refused(inside(capfd, 'train', '--resume', tmp_path))
    (tmp_path/'checkpoint'/'manifest.json').write_text('{')
    assert 'manifest.json' in refused(inside(capfd, 'train', '--resume', tmp_path))
    assert '--checkpoint_every' in refused(inside(capfd, 'train', '--checkpoint-every', -3))
    memory = filled(tmp_path/'m', Uniform)
    memory.save(tmp_path/'memory only')
    assert 'got a memory' in refused(inside(capfd, 'train', '--resume', tmp_path/'memory only'))


def test_checkpoints_change_nothing_else(tmp_path, capfd):
    "The same run with and without them"
    results = []
    for name, more in (('a', []), ('b', ['--checkpoint-every', '50']), ('c', ['--on-disk'])):
        ran = inside(capfd, 'train', '--seed', '3', '--out', tmp_path/name, *SHORT, *more)
        assert ran.returncode==0, ran.stderr
        results.append(json.loads((tmp_path/name/'result.json').read_text()))
    assert results[0]['returns']==results[1]['returns']==results[2]['returns'] and results[0]['batches']==results[1]['batches']


def files_in(folder): return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}


def test_a_finished_run_is_not_overwritten(tmp_path, capfd):
    "One line that says what to do; with --force nothing of the earlier run is left"
    out, first = tmp_path/'run', ['train', '--seed', '3', '--out', tmp_path/'run', *SHORT, '--checkpoint-every', '50', '--on_disk']
    assert inside(capfd, *first).returncode==0
    before = files_in(out)
    for args in (first, ['train', '--out', out, *SHORT], ['train', '--out', out, '--no-force']):
        told = refused(inside(capfd, *args))
        assert all(o in told for o in (f'--out {out}: ', 'result.json', f'--resume {out}', 'another folder', '--force')), told
    assert files_in(out)==before
    (out/'own notes').write_text('mine')
    ran = inside(capfd, 'train', '--seed', '5', '--out', out, *SHORT, '--force')
    assert ran.returncode==0, ran.stderr
    result = json.loads((out/'result.json').read_text())
    assert result['seed']==5 and not (out/'checkpoint').exists() and not (out/'memory').exists()
    assert (out/'own notes').read_text()=='mine'
    assert inside(capfd, *first, '--force').returncode==0           # the memory holds this run's steps, no earlier ones
    result = json.loads((out/'result.json').read_text())
    assert result['returns']==json.loads(before['result.json'])['returns'] and ReplayMemory.peek(out/'memory').n_added==result['steps']


@pytest.mark.parametrize('left', ['checkpoint', 'memory', 'model.safetensors'])
def test_what_a_killed_run_left_is_not_overwritten(left, tmp_path, capfd):
    (tmp_path/left).mkdir()
    told = refused(inside(capfd, 'train', *SHORT, '--out', tmp_path))
    assert left in told and '--force' in told
    assert (tmp_path/left).is_dir() and not (tmp_path/'result.json').exists()


def test_a_memory_in_use_is_not_removed(tmp_path, capfd):
    with ReplayMemory(100, path=tmp_path/'memory') as memory:
        memory.add(Transition(0., 0, 1., 0., False, False))
        assert 'memory' in refused(inside(capfd, 'train', *SHORT, '--out', tmp_path, '--force', '--on_disk'))
        memory.add(Transition(0., 0, 1., 0., False, False))
    with ReplayMemory.open(tmp_path/'memory') as memory: assert len(memory)==2


@pytest.mark.parametrize('more', [[], ['--on_disk'], ['--checkpoint-every', '100000']])
def test_a_run_killed_before_its_first_save_says_so(more, tmp_path, capfd, monkeypatch):
    "When it is inspected or resumed; it can be started again, by force if its steps are kept"
    def killed(*args): raise KeyboardInterrupt
    args = ['train', '--seed', '4', *SHORT, '--out', tmp_path/'run', *more]
    with monkeypatch.context() as m:
        m.setattr(DQNLearner, 'fit', killed)
        assert inside(capfd, *args).returncode==130
    told = inside(capfd, 'inspect', tmp_path/'run')
    assert told.returncode==0 and 'unfinished: CartPole-v1, prioritized, seed 4' in told.stdout, told.stderr
    assert 'still running, or was ended before it saved a checkpoint' in told.stdout
    told = refused(inside(capfd, 'train', '--resume', tmp_path/'run'))
    assert 'no checkpoint' in told and 'ended before its first' in told and '--checkpoint_every' in told
    assert inside(capfd, *args, *(['--force'] if '--on_disk' in more else [])).returncode==0
    assert 'finished: CartPole-v1' in inside(capfd, 'inspect', tmp_path/'run').stdout


def test_an_interrupted_run_with_checkpoints_is_unfinished(tmp_path, capfd, monkeypatch):
    save, saves = DQNLearner.save, []
    def twice(self, *args, **kw):
        if len(saves)==2: raise KeyboardInterrupt
        saves.append(save(self, *args, **kw))
    monkeypatch.setattr(DQNLearner, 'save', twice)
    assert inside(capfd, 'train', *SHORT, '--out', tmp_path, '--checkpoint-every', '20').returncode==130
    told = inside(capfd, 'inspect', tmp_path).stdout
    assert 'unfinished: CartPole-v1' in told and 'learned from 40 batches' in told and f'--resume {tmp_path}' in told
    assert '--resume' in refused(inside(capfd, 'train', *SHORT, '--out', tmp_path))


# --- inspect ----------------------------------------------------------------------------------------------------------
def filled(path, sampler, kind='simple', n=150, **kw):
    memory, rng, world = ReplayMemory(100, sampler(), **({} if path is None else dict(path=path))), np.random.default_rng(0), {}
    memory.extend([KINDS[kind](rng, world) for _ in range(n)])
    memory.update_priorities(np.arange(n - 50, n), np.arange(50.))
    return memory


@pytest.mark.parametrize('sampler', [Uniform, Proportional, RankBased])
@pytest.mark.parametrize('kind', ['simple', 'transition', 'nested', 'image'])
def test_what_is_said_is_so(sampler, kind, tmp_path):
    "The same of a memory on disk that is in use as of its checkpoint"
    memory = filled(tmp_path/'m', sampler, kind)
    memory.save(tmp_path/'saved')
    live, saved = (dict(summary(tmp_path/o)) for o in ('m', 'saved'))
    assert live['stored']==saved['stored']=='100 of 100 (100%), ids 50 to 149'
    assert live.get('priorities')==saved.get('priorities') and live['steps']==saved['steps'] and live['returns']==saved['returns']
    if sampler is not Uniform: assert live['priorities'].startswith('0 to 49' if sampler is RankBased else '1e-06 to 49')
    assert memory.layout.step_type.__name__ in live['steps'] and 'on disk' in live['holds'] and 'checkpoint of a memory' in saved['holds']
    files = list((tmp_path/'saved').iterdir())
    assert saved['bytes']==f'{readable(sum(p.stat().st_size for p in files))} in {len(files)} files'
    rows, truth = look(tmp_path/'m').memory.recent(100), memory.recent(100)
    assert rows.columns(rows.step_type._fields[-1])[0].tolist()==truth.columns(truth.step_type._fields[-1])[0].tolist()


def words_in(figure):
    "All text of a figure"
    return [o.get_text() for part in figure.subfigs for o in part.texts] + [ax.get_title() for ax in figure.get_axes()]


@pytest.mark.parametrize('where', ['m', 'saved'])
@pytest.mark.parametrize('n', [70, 150, 1000])
def test_the_picture_agrees_with_the_text(where, n, tmp_path):
    "It said full, ids from 0 and never drawn, whatever there was"
    memory = filled(tmp_path/'m', Proportional, n=n)
    for _ in range(30): memory.sample(8)
    memory.save(tmp_path/'saved')
    said, first = dict(summary(tmp_path/where)), max(0, n - 100)
    share = '(70% full)' if n==70 else '(full)'
    assert said['stored']==f'{min(n, 100)} of 100 ({min(n, 100)}%), ids {first:,} to {n - 1:,}'
    figure = picture(tmp_path/where)
    words = '\n'.join(words_in(figure))
    assert f': {min(n, 100)} of 100 {share}' in words and f'ids {first:,} to {n - 1:,};' in words
    assert 'times sampled' not in words                        # nothing was, since it was opened; of the draws before, their number is saved
    assert ('samples per insert' in words)==(where=='saved')
    ids = [int(x) for ax in figure.get_axes() if ax.get_xlabel()=='id of the last step' for x in ax.lines[0].get_xdata()]
    assert ids and min(ids) >= first and max(ids) <= n - 1
    assert ('30 batches' in words)==('30 batches' in said['sampler'])
    plt.close(figure)


def test_inspect_draws(tmp_path, capfd):
    filled(tmp_path/'m', Proportional).close()
    ran = inside(capfd, 'inspect', tmp_path/'m', '--plot', tmp_path/'a.png')
    assert (ran.returncode, ran.stderr)==(0, '') and (tmp_path/'a.png').read_bytes()[:8]==b'\x89PNG\r\n\x1a\n'
    assert len(ran.stdout.splitlines()) >= 8 and 'a.png' in ran.stdout


def test_a_run_with_its_memory_on_disk_shows_it(tmp_path, capfd):
    assert inside(capfd, 'train', *SHORT, '--on_disk', '--checkpoint_every', 50, '--out', tmp_path).returncode==0
    ran = inside(capfd, 'inspect', tmp_path, '--plot', tmp_path/'a.png')
    assert ran.returncode==0 and 'learned from 150 batches' in ran.stdout and 'ids 0 to 39' in ran.stdout


# --- a learner is saved whole or not at all ---------------------------------------------------------------------------
class Steps:
    "A source of steps that knows where it is"
    def __init__(self): self.n = 0
    def __iter__(self):
        while True:
            self.n += 1
            rng = np.random.default_rng(self.n)
            yield Transition(rng.random(4, np.float32), int(rng.integers(2)), rng.random(), rng.random(4, np.float32), self.n % 20==0, False)
    def state_dict(self): return dict(n=self.n)
    def load_state_dict(self, state): self.n = state['n']


class Play(BestWeights):
    "Chooses by the number of batches: no environment is needed"
    def __call__(self, learn):
        self._averaged(learn.model)
        self.score, self.weights = float(learn.n_batches), copy.deepcopy(learn.model.state_dict())
        return False


def learner(hidden=8, **kw):
    model = q_network(gym.spaces.Box(0, 1, (4,)), 2, hidden, seed=0)
    replay = PrioritizedReplay(Steps(), bs=8, max_sz=60, min_sz=16, seed=1, **kw)
    return DQNLearner(model, replay.loader(), lr=LinearSchedule(.01, .001, 40), target_sync=7), Play('CartPole-v1')


def everything(learn, best):
    "All that a learner and its callback hold, as comparable bytes"
    def plain(v):
        if isinstance(v, torch.Tensor): return v.numpy().tobytes()
        if isinstance(v, np.ndarray): return v.tobytes()
        if isinstance(v, dict): return {k: plain(o) for k, o in v.items()}
        return [plain(o) for o in v] if isinstance(v, (list, tuple)) else v
    return plain([learn.state_dict(), best.state_dict(), learn.memory.recent(len(learn.memory)).numpy()._asdict(), learn.memory.sampler.priorities])


@pytest.mark.parametrize('error', [Injected, KeyboardInterrupt], ids=['error', 'interrupt'])
@pytest.mark.parametrize('after', [False, True])
def test_every_call_to_the_system_fails_in_turn(tmp_path, monkeypatch, after, error):
    "Weights that the manifest in place needs were removed: the old or the new state loads, always"
    learn, best = learner(hidden=128)
    learn.fit(5, best)
    learn.save(tmp_path/'start', best)
    states, old_ones, new_ones = [everything(learn, best)], 0, 0
    learn.fit(3, best)
    states.append(everything(learn, best))
    for k in range(500):
        folder = tmp_path/f'{k}'
        shutil.copytree(tmp_path/'start', folder)
        with monkeypatch.context() as patch:
            patch.setattr(os, 'fsync', lambda fd: None)
            calls = Calls(patch, k, after, error, methods=('close',))
            try: learn.save(folder, best)
            except (Injected, KeyboardInterrupt): pass
        if len(calls.made) <= k: break
        again, best_again = learner(hidden=128)
        again.load(folder, best_again)
        again.episodes.memory = again.replay.memory
        found = everything(again, best_again)
        assert found in states, f'call {k} ({calls.made[k]}): neither the old state nor the new one'
        old_ones, new_ones = old_ones + (found==states[0]), new_ones + (found==states[1])
        shutil.rmtree(folder)
    else: pytest.fail('a save never ends')
    assert old_ones > 10 and new_ones > 2 and {'replace', 'fsync', 'unlink'} <= {*calls.made}


def test_a_learner_goes_on_exactly(tmp_path):
    "Bit for bit, its best weights too"
    whole, best = learner()
    whole.fit(20, best)
    first, best_first = learner()
    first.fit(12, best_first)
    assert first.save(tmp_path, best_first, k=1, more=[1.5, None]) > 1000
    second, best_second = learner()
    assert second.load(tmp_path, best_second)==dict(k=1, more=[1.5, None])
    second.fit(8, best_second)
    assert everything(whole, best)==everything(second, best_second)


def test_a_learner_without_a_replay(tmp_path):
    batches = [o for o, _ in zip(learner()[0].dl, range(9))]
    def make(): return DQNLearner(q_network(gym.spaces.Box(0, 1, (4,)), 2, 8, seed=0), batches)
    one, other = make().fit(5), make()
    one.save(tmp_path)
    assert other.load(tmp_path)=={} and other.losses==one.losses
    with pytest.raises(ValueError, match=WORDS['no replay was saved']): learner()[0].load(tmp_path)
    learner()[0].save(tmp_path/'with')
    with pytest.raises(ValueError, match=WORDS['a replay was saved']): make().load(tmp_path/'with')


def test_a_learners_save_after_a_load_writes_what_is_new(tmp_path):
    "Every row was written again"
    def make():
        replay = PrioritizedReplay(Steps(), bs=8, max_sz=4000, min_sz=3000, steps_per_batch=20, seed=1)
        return DQNLearner(q_network(gym.spaces.Box(0, 1, (4,)), 2, 1, seed=0), replay.loader())
    one, other, last = make().fit(3), make(), make()
    whole = one.save(tmp_path)
    other.load(tmp_path)
    assert other.fit(2).save(tmp_path) < whole/2
    last.load(tmp_path)
    one.fit(2)
    assert np.array_equal(*(o.replay.memory.recent(3080).numpy().state for o in (one, last))) and last.losses==one.losses


def test_a_learner_that_fails_to_load_is_as_it_was(tmp_path):
    saved, best = learner()
    saved.fit(10, best).save(tmp_path/'a', best)
    victim, watch = learner()
    victim.fit(3, watch)
    before = everything(victim, watch)
    for path in sorted((tmp_path/'a').iterdir()):
        data = path.read_bytes()
        for damaged in (data[:-2], data[:99] + bytes([data[99] ^ 1]) + data[100:], None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=words('it is named', name=path.name)): victim.load(tmp_path/'a', watch)
            path.write_bytes(data)
    with pytest.raises(ValueError, match=words('other weights', name='0.bias')): learner(hidden=9)[0].load(tmp_path/'a')
    smaller = DQNLearner(learner()[0].model, PrioritizedReplay(Steps(), bs=8, max_sz=50, min_sz=16, seed=1).loader()).fit(2)
    weights = [o.clone() for o in smaller.model.parameters()]
    with pytest.raises(ValueError, match=WORDS['another size']): smaller.load(tmp_path/'a')
    assert all(torch.equal(a, b) for a, b in zip(weights, smaller.model.parameters())) and smaller.n_batches==2
    assert everything(victim, watch)==before


def test_inspect_says_what_is_wrong_in_one_line(tmp_path, capfd):
    memory = filled(tmp_path/'m', Proportional)
    memory.save(tmp_path/'saved')
    memory.close()
    for folder in ('m', 'saved'):
        for path in sorted((tmp_path/folder).iterdir()):
            if not path.is_file() or path.name in ('lock', 'journal.map', 'flushed.json'): continue
            whole = path.read_bytes()
            for damaged in (whole[:len(whole)//2], None):
                path.unlink() if damaged is None else path.write_bytes(damaged)
                if folder=='m' and path.name=='priorities.map' and damaged is None: continue       # a uniform memory has none
                said = refused(inside(capfd, 'inspect', tmp_path/folder))
                assert path.name in said or 'expected a memory, a checkpoint' in said or 'no memory here' in said, (path, said)
            path.write_bytes(whole)
    assert 'expected a memory, a checkpoint' in refused(inside(capfd, 'inspect', tmp_path))
    assert refused(inside(capfd, 'inspect'))
    assert refused(inside(capfd, 'inspect', tmp_path/'m', '--plot', tmp_path/'no'/'where.png'))
    ReplayMemory(5).save(tmp_path/'empty')
    assert 'nothing' not in inside(capfd, 'inspect', tmp_path/'empty').stderr
    assert refused(inside(capfd, 'inspect', tmp_path/'empty', '--plot', tmp_path/'x.png'))


def test_a_runs_folder_tells_all_that_is_in_it(tmp_path, capfd):
    "The result, the memory one folder below and the checkpoint beside it, also where the folder has been moved; the picture agrees"
    plain = ['train', '--seed', '3', *SHORT]
    for name, more in dict(plain=[], disk=['--on_disk'], saved=['--checkpoint_every', '100'], both=['--on_disk', '--checkpoint_every', '100']).items():
        assert inside(capfd, *plain, *more, '--out', tmp_path/name).returncode==0
        moved = (tmp_path/name).rename(tmp_path/f'moved {name}')
        told = inside(capfd, 'inspect', moved).stdout
        result = json.loads((moved/'result.json').read_text())
        assert f'finished: CartPole-v1, prioritized, seed 3: mean evaluation return {result["mean_return"]:.1f} (3 episodes), 150 batches' in told
        assert told.startswith('holds      a training run\n') and ('learned from 100 batches' in told)==bool({name} & {'saved', 'both'})
        assert (f'a memory on disk, Proportional, in {moved/"memory"}' in told)==bool({name} & {'disk', 'both'})
        if name=='plain':
            assert 'stored' not in told and 'no memory to draw' in refused(inside(capfd, 'inspect', moved, '--out', tmp_path/'x.png'))
            continue
        n = 298 if name=='saved' else 398
        assert f'stored     {n} of 50,000 (1%), ids 0 to {n - 1}\n' in told, told
        drawn = inside(capfd, 'inspect', moved, '--plot', tmp_path/'x.png')
        assert drawn.stdout==f'{told}picture    {tmp_path/"x.png"}\n' and (tmp_path/'x.png').stat().st_size > 1000
        words = '\n'.join(words_in(picture(moved)))
        assert f': {n} of 50,000 (1% full)' in words
    for text in ('{}', '{"mean_return": 3', '[]'):
        (moved/'result.json').write_text(text)
        assert 'result.json: not the result of a run' in refused(inside(capfd, 'inspect', moved))


def test_a_callback_beside_the_best_weights():
    called = []
    learn, _ = learner()
    best = BestWeights('CartPole-v1', every=2, episodes=1, confirm=0, also=lambda o: called.append(o.n_batches) or o.n_batches==5)
    assert learn.fit(9, best).n_batches==5 and called==[1, 2, 3, 4, 5] and len(best.history)==2


def test_a_sampler_of_the_users_own_is_named(tmp_path):
    filled(None, Own).save(tmp_path)
    assert any('OwnSampler' in said for _, said in summary(tmp_path))
