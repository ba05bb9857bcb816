"The injector of faults does what the tests of faults rely on: it counts, and fails at the right call or line, once"
import mmap
import os

import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from faults import PACKAGE, RELEASES, Calls, Injected, Stop, interrupted, kill
from killing import make_step
from words import words


def write(path):
    path.mkdir()
    with open(path/'a', 'wb') as f: f.write(b'1')
    os.replace(path/'a', path/'b')
    os.unlink(path/'b')
    path.rmdir()


def test_calls_are_counted_by_name(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        write(tmp_path/'m')
        made = [o for o in calls.made if o!='stat']
    assert made==['mkdir', 'open file', 'write', 'close', 'replace', 'unlink', 'rmdir']
    write(tmp_path/'n')
    assert [o for o in calls.made if o!='stat']==made, 'what is undone counts no more'


@pytest.mark.parametrize('error', [Injected, KeyboardInterrupt])
def test_one_call_fails_before_or_after_its_work(tmp_path, monkeypatch, error):
    for after in (False, True):
        for fail, name in enumerate(('mkdir', 'replace', 'unlink')):
            folder = tmp_path/f'{after}{fail}'
            with monkeypatch.context() as patch:
                calls = Calls(patch, fail, after, error, names=('mkdir', 'replace', 'unlink'), methods=())
                with pytest.raises(error, match=words('an injected failure', name=name, call=fail)): write(folder)
            assert calls.made[fail]==name and len(calls.made)==fail + 1
            there = folder.exists() and sorted(o.name for o in folder.iterdir())
            assert there==([False, ['a'], ['b']], [[], ['b'], []])[after][fail]


def test_a_mapping_fails(tmp_path, monkeypatch):
    "And an opening in which one did is made good by the next"
    for fail in range(50):
        with monkeypatch.context() as patch:
            calls = Calls(patch, fail, names=('mmap',), methods=())
            try: memory = ReplayMemory(20, Proportional(), path=tmp_path/'m', step=make_step('simple', 0))
            except OSError: memory = None
        assert isinstance(memory, ReplayMemory)==(len(calls.made) <= fail)
        if memory is not None: break
    assert fail > 1 and set(calls.made)=={'mmap'} and memory.add(make_step('simple', 0))==0
    memory.close()
    assert ReplayMemory.open(tmp_path/'m').n_added==1 and mmap.mmap(-1, 9)


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='forks')
def test_a_call_kills(tmp_path):
    child = os.fork()
    if not child:
        try:
            Calls(pytest.MonkeyPatch(), 0, error=kill, names=('mkdir',), methods=())
            (tmp_path/'m').mkdir()
        finally: os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]) and not (tmp_path/'m').exists()


def test_a_line_is_interrupted():
    memory, line = ReplayMemory(9, seed=0), 0
    memory.add(make_step('simple', 0))
    while interrupted(lambda: memory.add(make_step('simple', 0)), line, PACKAGE, events=('line',), leave_out=RELEASES):
        line += 1
    assert line > 5 and memory.n_added >= 2 and memory.check_valid()
    with pytest.raises(Stop): interrupted(lambda: (_ for _ in ()).throw(Stop), 10**6)
    assert not interrupted(lambda: None, 0)
