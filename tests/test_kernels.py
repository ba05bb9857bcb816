"""Where compiled kernels are kept: only where nobody else can have put code, and where there is room for it"""
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from numba.core.compiler_lock import global_compiler_lock

from fastrl_replay import kernel_cache

if not hasattr(os, 'geteuid'): pytest.skip('files have no owner here', allow_module_level=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    "The folder that is used by right: in a cache that users share, made by this one"
    monkeypatch.setattr(kernel_cache._config, 'CACHE_DIR', str(tmp_path/'shared'))
    (tmp_path/'shared').mkdir()
    (tmp_path/'shared').chmod(0o1777)
    made = find()
    assert made==tmp_path/'shared'/f'kernels-{kernel_cache.package_key()}'
    return made


def find(): return kernel_cache.kernel_folder.__wrapped__()


def trusted(folder, capfd):
    assert find()==folder
    assert capfd.readouterr().err==''


def refused(folder, capfd, why):
    "A private folder is used instead, and one line says so; the other is left alone"
    before = [(p, p.lstat().st_mode, p.lstat().st_uid) for p in (folder, *sorted(folder.glob('**/*')))]
    found = find()
    line, = capfd.readouterr().err.splitlines()
    assert found!=folder and folder not in found.parents and not list(found.iterdir())
    assert found.lstat().st_uid==os.geteuid() and stat.S_IMODE(found.lstat().st_mode)==0o700
    assert line.startswith('fastrl_replay: ') and str(folder.parent) in line and why in line and 'NUMBA_CACHE_DIR' in line, line
    assert [(p, p.lstat().st_mode, p.lstat().st_uid) for p in (folder, *sorted(folder.glob('**/*')))]==before


def give_away(path):
    if os.geteuid(): pytest.skip('only root may give a file to somebody else')
    os.chown(path, 12345, -1, follow_symlinks=False)


@pytest.mark.parametrize('umask', [0, 0o002, 0o022, 0o077])
def test_the_folder_is_made_for_this_user_alone(umask, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(kernel_cache._config, 'CACHE_DIR', str(tmp_path/'new'/'cache'))
    before = os.umask(umask)
    try: made = find()
    finally: os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode)==0o700
    (made/'sub').mkdir()
    (made/'sub'/'kernel.nbi').write_text('')
    (made/'sub'/'kernel.nbi').chmod(0o664)                # by a umask of 002; nobody else can reach it
    trusted(made, capfd)


@pytest.mark.parametrize('mode', [0o777, 0o775, 0o702, 0o720, 0o1777])
def test_a_folder_that_others_may_write_to_is_not_used(mode, folder, capfd):
    folder.chmod(mode)
    refused(folder, capfd, 'others may write to')
    folder.chmod(0o755)
    trusted(folder, capfd)


@pytest.mark.parametrize('mode', [0o700, 0o755, 0o777])
def test_a_folder_of_somebody_else_is_not_used(mode, folder, capfd):
    folder.chmod(mode)
    give_away(folder)
    refused(folder, capfd, 'belongs to another user')


@pytest.mark.parametrize('of', ['mine', 'theirs'])
def test_a_link_is_not_used(of, folder, tmp_path, capfd):
    folder.rmdir()
    (tmp_path/'elsewhere').mkdir(mode=0o700)
    folder.symlink_to(tmp_path/'elsewhere')
    if of=='theirs': give_away(folder)
    refused(folder, capfd, 'symbolic link')


@pytest.mark.parametrize('kind', ['file', 'folder', 'link', 'writable'])
def test_what_lies_in_it_is_looked_at_too(kind, folder, tmp_path, capfd):
    "Planted while the folder was open to all, as by somebody who made it so"
    sub = folder/'fastrl_replay_0'
    sub.mkdir()
    planted = sub/'planted.nbi'
    if kind=='folder': planted.mkdir()
    elif kind=='link': planted.symlink_to(tmp_path)
    else: planted.write_text('')
    trusted_without = folder.stat().st_mode
    if kind in ('file', 'folder'): give_away(planted)
    if kind=='writable':
        folder.chmod(0o755)
        planted.chmod(0o666)
    refused(folder, capfd, dict(link='symbolic link', writable='others may write to').get(kind, 'belongs to another user'))
    planted.rmdir() if kind=='folder' else planted.unlink()
    folder.chmod(trusted_without)
    trusted(folder, capfd)


def test_a_file_in_its_place(folder, capfd):
    folder.rmdir()
    folder.write_text('')
    found = find()
    assert found!=folder and 'not writable' in capfd.readouterr().err


def run(code, cache, before=''):
    env = os.environ | dict(NUMBA_CACHE_DIR=str(cache))
    return subprocess.run([sys.executable, '-c', f'{before}\n{code}'], env=env, capture_output=True, text=True)


def test_a_planted_file_does_not_run(tmp_path):
    "What one process compiled is taken by the next of the same user; of another user it isn't"
    code = ('import numpy as np\nfrom fastrl_replay.kernel_cache import kernel_folder\n'
            'from fastrl_replay.storage.frames import fingerprints\n'
            'print(kernel_folder(), fingerprints(np.arange(6, dtype=np.uint64).reshape(2, 3)))')
    first, second = run(code, tmp_path), run(code, tmp_path)
    assert first.stdout==second.stdout and str(tmp_path) in first.stdout
    assert not second.stderr                              # of the first, a line if it took more than a second
    folder = Path(first.stdout.partition(' [')[0])
    for data in folder.rglob('*.nbc'): data.write_bytes(b'cos\nsystem\n(S"echo it runs >&2; false"\ntR.')      # what unpickling would run
    third = run(code, tmp_path)
    assert 'it runs' in third.stderr                      # so it would run, were it trusted
    folder.chmod(0o777)
    fourth = run(code, tmp_path)
    assert fourth.returncode==0 and fourth.stdout.endswith(first.stdout.partition(' [')[2])
    assert 'it runs' not in fourth.stderr and 'others may write to' in fourth.stderr and str(tmp_path) not in fourth.stdout


def test_a_cache_on_a_full_disk_is_not_used(tmp_path):
    "It takes a few kilobytes more, and not all kernels: as where a quota is nearly used up"
    resource = pytest.importorskip('resource')
    for room in (100, 4096, 1 << 20):
        limit = f'import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {resource.RLIM_INFINITY}))'
        ran = run('from fastrl_replay.kernel_cache import kernel_folder; print(kernel_folder())', tmp_path, limit)
        assert ran.returncode==0 and str(tmp_path) not in ran.stdout, ran
        assert ran.stderr.count('\n')==1 and f'{tmp_path} is not writable' in ran.stderr and 'NUMBA_CACHE_DIR' in ran.stderr
    assert not [p for p in tmp_path.rglob('*') if p.is_file()]


def thrice(x): return 3*x


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork on this system')
def test_a_fork_while_another_thread_compiles():
    "The child compiles too: it does not wait for a thread that it does not have"
    began = threading.Event()
    def compiling():
        with global_compiler_lock:
            began.set()
            time.sleep(.5)
    thread = threading.Thread(target=compiling)
    thread.start()
    began.wait()
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        code = 1
        try: code = int(kernel_cache.cached(thrice)(14)!=42)
        finally: os._exit(code)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])==0
    assert kernel_cache.cached(thrice)(21)==63
