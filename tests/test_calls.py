"Every function that the package exports can be called from Python: none ends the interpreter"
import os
import subprocess
import sys

import calls
import pytest


@pytest.fixture(scope='module')
def told(root):
    "What came of each call, and which modules ended their process"
    env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(root), str(root/'tests')]))
    ran = subprocess.run([sys.executable, root/'tests'/'calls.py'], env=env, cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return [line.partition(': ')[::2] for line in ran.stdout.splitlines()]


def test_each_function_can_be_called(told):
    wrong = [f'{name}: {what}' for name, what in told if not what.startswith(('fine', 'left out'))]
    assert not wrong, wrong
    assert len(told) > 250 and {'samplers.rng.load', 'kernels.prefetch', 'storage.base.find_place'} <= {name for name, _ in told}


def test_what_is_left_out_is_another_library(told):
    left_out = [name for name, what in told if what.startswith('left out')]
    assert all(name.startswith('interop.') for name in left_out), left_out


def test_arguments_are_of_functions_that_exist():
    "A function that went, or became private, takes its arguments with it"
    for name, own in calls.CALLS.items(): assert set(own) <= {key for key, _ in calls.functions(name)}, name


@pytest.mark.parametrize('source, what', [('@kernel\ndef added(x): return x', 'has no arguments in CALLS'), ('def added(unheard): return 1', "['unheard']"),
                                          ('@kernel\ndef added(x): return x[0]', 'raised'), ('def added(ok): os.kill(os.getpid(), 9)', 'ended the process')])
def test_a_function_that_was_added_is_noticed(source, what, monkeypatch, capfd):
    from fastrl_replay import schedules
    from fastrl_replay.kernels import kernel
    scope = dict(kernel=kernel, os=os, __name__=schedules.__name__)
    exec(source, scope)
    monkeypatch.setattr(schedules, 'added', scope['added'], raising=False)
    if what == 'raised': monkeypatch.setitem(calls.CALLS, 'schedules', dict(added=lambda o: (3,)))
    calls.main('schedules')
    assert any(what in line for line in capfd.readouterr().out.splitlines())
