"""Runs on the command line that are killed and resumed, and folders that are inspected."""
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fastrl_replay.inspection import look, summary
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from test_cli import RUN, SHORT, inside, refused
from test_harness import Own
from twins import KINDS


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
    at = json.loads((tmp_path/'run'/'checkpoint'/'manifest.json').read_text())['manifest']['state']
    assert at['learner']['n_batches'] >= 40 and at['learner']['n_batches'] % 40==0
    known = at['pipe']['ids'][1]
    if on_disk: assert ReplayMemory.peek(tmp_path/'run'/'memory').n_added >= known
    told = inside(capfd, 'inspect', tmp_path/'run')
    assert told.returncode==0 and f'learned from {at["learner"]["n_batches"]:,} batches' in told.stdout
    ran = inside(capfd, 'train', '--resume', tmp_path/'run')
    assert (ran.returncode, ran.stderr)==(0, ''), ran.stderr
    result = json.loads((tmp_path/'run'/'result.json').read_text())
    assert result['arguments']['steps']==1400 and result['arguments']['seed']==2 and result['batches']==1 + int((1400 - 2 - 100)/2)
    assert result['steps'] >= 1390


def test_what_can_not_be_resumed_is_one_line(tmp_path, capfd):
    assert 'no such folder' in refused(inside(capfd, 'train', '--resume', tmp_path/'nothing'))
    (tmp_path/'checkpoint').mkdir()
    assert 'manifest.json' in refused(inside(capfd, 'train', '--resume', tmp_path))
    assert '--checkpoint_every' in refused(inside(capfd, 'train', '--checkpoint-every', -3))
    memory = filled(tmp_path/'m', Uniform)
    memory.save(tmp_path/'memory only')
    assert 'expected the state of a learner, got that of a memory' in refused(inside(capfd, 'train', '--resume', tmp_path/'memory only'))


def test_checkpoints_change_nothing_else(tmp_path, capfd):
    "The same run with and without them"
    results = []
    for name, more in (('a', []), ('b', ['--checkpoint-every', '50']), ('c', ['--on-disk'])):
        ran = inside(capfd, 'train', '--seed', '3', '--out', tmp_path/name, *SHORT, *more)
        assert ran.returncode==0, ran.stderr
        results.append(json.loads((tmp_path/name/'result.json').read_text()))
    assert results[0]['returns']==results[1]['returns']==results[2]['returns'] and results[0]['batches']==results[1]['batches']


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
    assert memory._array.layout.step_type.__name__ in live['steps'] and 'on disk' in live['holds'] and 'checkpoint of a memory' in saved['holds']
    files = list((tmp_path/'saved').iterdir())
    assert saved['bytes']==f'{sum(p.stat().st_size for p in files)/1e6:,.1f} MB in {len(files)} files'
    rows, truth = look(tmp_path/'m').memory.recent(100), memory.recent(100)
    assert rows.columns(rows.step_type._fields[-1])[0].tolist()==truth.columns(truth.step_type._fields[-1])[0].tolist()


def test_inspect_draws(tmp_path, capfd):
    filled(tmp_path/'m', Proportional).close()
    ran = inside(capfd, 'inspect', tmp_path/'m', '--plot', tmp_path/'a.png')
    assert (ran.returncode, ran.stderr)==(0, '') and (tmp_path/'a.png').read_bytes()[:8]==b'\x89PNG\r\n\x1a\n'
    assert len(ran.stdout.splitlines()) >= 8 and 'a.png' in ran.stdout


def test_inspect_says_what_is_wrong_in_one_line(tmp_path, capfd):
    memory = filled(tmp_path/'m', Proportional)
    memory.save(tmp_path/'saved')
    memory.close()
    for folder in ('m', 'saved'):
        for path in sorted((tmp_path/folder).iterdir()):
            if not path.is_file() or path.name in ('lock', 'journal.map', 'keys.map'): continue
            whole = path.read_bytes()
            for damaged in (whole[:len(whole)//2], None):
                path.unlink() if damaged is None else path.write_bytes(damaged)
                if folder=='m' and path.name=='priorities.map' and damaged is None: continue       # a uniform memory has none
                said = refused(inside(capfd, 'inspect', tmp_path/folder))
                assert path.name in said or 'no memory and no checkpoint' in said or 'no memory here' in said, (path, said)
            path.write_bytes(whole)
    assert 'no memory and no checkpoint' in refused(inside(capfd, 'inspect', tmp_path))
    assert refused(inside(capfd, 'inspect'))
    assert refused(inside(capfd, 'inspect', tmp_path/'m', '--plot', tmp_path/'no'/'where.png'))
    ReplayMemory(5).save(tmp_path/'empty')
    assert 'nothing' not in inside(capfd, 'inspect', tmp_path/'empty').stderr
    assert refused(inside(capfd, 'inspect', tmp_path/'empty', '--plot', tmp_path/'x.png'))


def test_a_sampler_of_the_users_own_is_named(tmp_path):
    filled(None, Own).save(tmp_path)
    assert any('OwnSampler' in said for _, said in summary(tmp_path))
