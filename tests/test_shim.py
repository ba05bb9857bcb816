"""Everything about pipes once more on the shim, as with a torch that has no IterDataPipe."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIM = dict(os.environ, FASTRL_REPLAY_SHIM='1')
PIPES = [o for o in ('test_replay.py', 'test_n_step.py', 'test_stepper.py', 'test_agents.py', 'test_upstream.py') if (ROOT/'tests'/o).exists()]


def ran(*args, **kw):
    done = subprocess.run([sys.executable, *args], cwd=ROOT, env=SHIM, capture_output=True, text=True, stdin=subprocess.DEVNULL, **kw)
    assert done.returncode==0, f'{done.stdout[-5000:]}\n{done.stderr[-5000:]}'
    return done.stdout


@pytest.mark.skipif(os.environ.get('FASTRL_REPLAY_SHIM')=='1', reason='this is the shim')
class TestShim:
    def test_it_is_the_shim_and_torch_is_not_asked(self):
        out = ran('-c', 'from fastrl_replay.pipes.replay import ExperienceReplay as E; from torch.utils.data import IterDataPipe as I;'
                        'print(*[o.__name__ for o in E.__mro__ if o.__module__=="fastrl_replay.pipes.base"][:1], issubclass(E, I), hasattr(I, "n_step"), "experience_replay" in I.functions)')
        assert out.split()==['ShimDataPipe', 'False', 'False', 'False']

    def test_a_torch_without_datapipes_gets_it_by_itself(self):
        out = ran('-c', 'import os, torch.utils.data as d; del os.environ["FASTRL_REPLAY_SHIM"]; del d.IterDataPipe;'
                        'from fastrl_replay.pipes.base import IterDataPipe; print(IterDataPipe.__name__)')
        assert out.split()==['ShimDataPipe']

    def test_the_pipe_tests(self):
        out = ran('-m', 'pytest', '-q', '-p', 'no:cacheprovider', *(f'tests/{o}' for o in PIPES), '--deselect', 'tests/test_replay.py::test_a_worker_process_is_refused[pipe, spawn]')
        assert ' passed' in out and ' failed' not in out

    def test_actors(self):
        out = ran('-m', 'pytest', '-q', '-p', 'no:cacheprovider', 'tests/test_actors.py', '-k', 'very_steps or begun_anew or leaving or 2.5 or (start_method and forkserver)')
        assert ' passed' in out and ' failed' not in out

    def test_a_training_run(self, tmp_path):
        if not (ROOT/'fastrl_replay'/'cli.py').exists(): pytest.skip('no command line yet')
        ran('-c', 'import sys; sys.argv[0] = "fastrl_replay"; from fastrl_replay.cli import main; main()', 'train', 'CartPole-v1', '--memory', 'prioritized',
            '--steps', '1000', '--bs', '32', '--episodes', '2', '--select', '2', '--confirm', '1', '--seed', '0', '--out', str(tmp_path))
        result = json.loads((tmp_path/'result.json').read_text())
        assert result['mean_return'] > 5 and result['batches'] > 50 and (tmp_path/'learning_curve.png').stat().st_size > 1000
