"Compiled kernels are found again as long as nothing that they depend on has changed, and only then"
import ast
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import test_floors as floors

from fastrl_replay import kernel_cache
from fastrl_replay.kernel_cache import _ROOT, _path_of, _read, cached, kernel_folder, package_key, source_key

COUNT = """
from numba.core import event
class Count(event.Listener):
    n = 0
    def on_start(self, event): Count.n += 1
    def on_end(self, event): pass
event.register('numba:compile', Count())
"""
MEMORY = """
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.steps import SimpleStep
memory = ReplayMemory(20, seed=0)
for k in range(30): memory.add(SimpleStep([float(k)], k % 2, [k + 1.], reward=1., step_n=k))
memory.drop([15])
print(memory.sample(4).ids.tolist(), Count.n)
"""


@pytest.fixture
def package(root, tmp_path):
    "A copy of the package to edit, and its own cache: call it with code, and it says what that prints"
    shutil.copytree(root/'fastrl_replay', tmp_path/'fastrl_replay', ignore=shutil.ignore_patterns('__pycache__'))
    env = os.environ | dict(PYTHONPATH=str(tmp_path), NUMBA_CACHE_DIR=str(tmp_path/'cache'), PYTHONDONTWRITEBYTECODE='1')
    def begin(code):
        return subprocess.Popen([sys.executable, '-c', COUNT + code], cwd=tmp_path, env=env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    def end(process):
        out, err = process.communicate()
        assert process.returncode == 0, err
        return out.strip()
    def run(code): return end(begin(code))
    run.begin, run.end, run.folder = begin, end, tmp_path/'fastrl_replay'
    return run


def test_what_no_kernel_depends_on_may_change(package):
    "Pictures, the list of names, pipes, the learner: nothing is compiled again, and one folder holds all"
    ids, n = package(MEMORY).rsplit(' ', 1)
    assert int(n) > 3
    for name in ('show', 'all', 'learner', 'runs', 'cli', 'pipes/n_step', 'interop/sb3'):
        with (package.folder/f'{name}.py').open('a') as file: file.write('\n# a comment\n')
    assert package(MEMORY) == f'{ids} 0'
    assert len(list((package.folder.parent/'cache').glob('kernels-*'))) == 1


def test_processes_that_begin_together_compile_each_kernel_once(package):
    ran = [package.end(o).rsplit(' ', 1) for o in [package.begin(MEMORY) for _ in range(4)]]
    together = sum(int(n) for _, n in ran)
    shutil.rmtree(package.folder.parent/'cache')
    ids, alone = package(MEMORY).rsplit(' ', 1)
    assert [o for o, _ in ran]==[ids]*4 and together==int(alone)


@pytest.mark.skipif(kernel_cache.fcntl is None, reason='no locks')
def test_a_process_that_is_stopped_while_it_compiles_holds_up_nobody_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache, '_PATIENCE', .2)
    with open(tmp_path/'kernel.lock', 'wb') as held:
        kernel_cache._lock(held)
        begun = time.monotonic()
        assert kernel_cache._in_turn(lambda: 42, tmp_path/'kernel.lock')()==42
        assert time.monotonic() - begun >= .2


def test_without_a_place_for_a_lock_each_compiles_for_itself(tmp_path):
    (tmp_path/'a').write_text('no folder')
    assert kernel_cache._in_turn(lambda: 42, tmp_path/'a'/'kernel.lock')()==42


KERNELS = dict(
    constants='FIRST = 1\nSECOND = 20\n',
    between='from . import constants\nfrom .constants import FIRST\n',
    callee='from ..kernels import inlined\nfrom .between import (FIRST,\n    constants)\n@inlined\ndef inner(x): return x + FIRST + constants.SECOND\n',
    outer='from ..kernels import kernel\nfrom .callee import inner\n@kernel\ndef total(x): return 300 + inner(x)\n')
TOTAL = 'from fastrl_replay.samplers.outer import total\nprint(total(4000), Count.n > 0)'


@pytest.mark.parametrize('module, old, new, total', [
    ('outer', '300', '500', 4521), ('callee', 'x + FIRST', 'x - FIRST', 4319), ('constants', 'FIRST = 1', 'FIRST = 7', 4327),
    ('constants', 'SECOND = 20', 'SECOND = 90', 4391), ('between', 'FIRST\n', 'SECOND as FIRST\n', 4340)])
def test_nothing_is_stale(package, module, old, new, total):
    "The kernel, what it calls in another module, a constant in another module, taken by name or looked up, or on its way"
    for name, source in KERNELS.items(): (package.folder/'samplers'/f'{name}.py').write_text(source)
    assert package(TOTAL) == '4321 True' and package(TOTAL) == '4321 False'
    path = package.folder/'samplers'/f'{module}.py'
    text, time = path.read_text(), path.stat().st_mtime_ns
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    os.utime(path, ns=(time, time))                      # as old as before
    assert package(TOTAL) == f'{total} True'
    path.write_text(text)
    assert package(TOTAL) == '4321 False'                # what was compiled then is still there


@pytest.mark.parametrize('library', [numba, np, kernel_cache.llvmlite, kernel_cache.fastrl_replay])
def test_another_version_is_another_folder(library, monkeypatch):
    before = package_key()
    assert kernel_folder().name == f'kernels-{before}'
    monkeypatch.setattr(library, '__version__', '0.0.0')
    assert package_key() != before
    monkeypatch.undo()
    assert package_key() == before


# ---- what a module depends on

def body(nodes):
    "Statements that run when a module is imported"
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)): continue
        yield node
        for part in ('body', 'orelse', 'handlers', 'finalbody'): yield from body(getattr(node, part, []))


def files_imported(name, modules):
    "Files of the package that a module imports when it is imported"
    for node in body(ast.parse(modules[name]).body):
        if not isinstance(node, (ast.Import, ast.ImportFrom)): continue
        for level, module, names in floors.statements(node):
            base = floors.absolute(name, level, module, modules)
            yield from filter(None, map(_path_of, {base, *(f'{base}.{o}' for o in names or ())} & modules.keys()))


@pytest.fixture(scope='module')
def modules(root): return floors.read(root)


def test_all_that_a_module_imports_is_found(modules):
    "By its lines, as by its syntax"
    found = {name: set(files_imported(name, modules)) - _read(_path_of(name), None)[1] for name in modules}
    assert not any(found.values()), found
    assert sum(len(_read(_path_of(name), None)[1]) for name in modules) > 200


def test_no_kernel_depends_on_pictures(modules, monkeypatch):
    "A comment in show.py compiles nothing, whichever kernels are used"
    monkeypatch.setattr(kernel_cache, '_read', lambda path, _: _read(path, None) if path != _ROOT/'show.py' else pytest.fail('depends on show'))
    with_kernels = [name for name, text in modules.items() if '@kernel' in text or '@_kernel' in text]
    assert len(with_kernels) > 10
    for name in with_kernels: source_key(_path_of(name))


def test_a_source_that_changes_beneath_a_process_has_another_key(tmp_path):
    path = tmp_path/'own.py'
    path.write_text('a = 1\n')
    before = source_key(path)
    path.write_text('a = 22\n')
    assert source_key(path) != before


def test_a_notebooks_cell_is_compiled_each_time():
    "In a kernel of Jupyter its code is said to be in a file, which does not exist"
    def thrice(x): return 3*x
    thrice.__code__ = thrice.__code__.replace(co_filename='/tmp/ipykernel_1/123.py')
    compiled = cached(thrice)
    assert compiled(14) == 42 and compiled.stats.cache_path is None


def test_what_nobody_has_begun_with_for_a_month_is_removed(package):
    "Of other versions and of other sources; what is in use, younger, or not ours stays"
    cache = package.folder.parent/'cache'
    ids, n = package(MEMORY).rsplit(' ', 1)
    [ours] = cache.glob('kernels-*')
    used = {o.name for o in ours.iterdir()}
    old, young, strange = 'kernels-0123456789ab', 'kernels-ba9876543210', 'kernels-of-others'
    for name in (old, young, strange, f'{ours.name}/rng-0123456789ab', f'{ours.name}/rng-ba9876543210'):
        (cache/name).mkdir()
        (cache/name/'kernel.nbi').write_bytes(b'x')
        days = 31 if not name.endswith('ba9876543210') else 29
        os.utime(cache/name, (0, time.time() - days*86_400))
    os.utime(ours, (0, 0))
    package('import fastrl_replay.memory')
    assert {o.name for o in cache.glob('kernels-*')} == {ours.name, young, strange}
    assert {o.name for o in ours.iterdir()} == used | {'rng-ba9876543210'}
    assert min(o.stat().st_mtime for o in [ours]) > time.time() - 86_400
    assert package(MEMORY) == f'{ids} 0'


def test_a_process_whose_kernels_were_removed_goes_on(package):
    "It has some in memory, and compiles the others into a new folder"
    remove = "import shutil\nfrom fastrl_replay.kernel_cache import kernel_folder\nshutil.rmtree(kernel_folder())\n"
    assert package(MEMORY + remove + MEMORY + "memory.update_priorities([19], [1.]), memory.next([18]), memory.sample_sequences(2, 3)\n").count(' ') > 2
    assert int(package(MEMORY).rsplit(' ', 1)[1]) > 3


# ---- the line that announces it

OURS, ANOTHER = 'fastrl_replay.kernels', 'numpy'

def heard(monkeypatch, capsys, *events):
    "After which of the events (seconds since the one before, whether a kernel begins or ends, of which module) the line was there, and how often"
    now, listener, after = 0., kernel_cache._Compiling(), []
    monkeypatch.setattr(kernel_cache.time, 'monotonic', lambda: now)
    for k, (seconds, begins, module) in enumerate(events):
        now += seconds
        kernel = SimpleNamespace(py_func=SimpleNamespace(__module__=module))
        (listener.on_start if begins else listener.on_end)(SimpleNamespace(data=dict(dispatcher=kernel)))
        after += [k]*capsys.readouterr().err.count('compiling kernels')
    return after


@pytest.mark.parametrize('events, after', [
    ([(0, True, OURS), (.9, False, OURS)]*1, []),
    ([(0, True, OURS), (.4, False, OURS), (99, True, OURS), (.4, False, OURS)], []),                        # what lies between is not compiling
    ([(0, True, OURS), (.4, False, OURS)]*4, [5]),
    ([(0, True, OURS), (9, False, OURS)]*4, [1]),
    ([(0, True, OURS), (.2, True, OURS), (.2, False, OURS), (.2, False, OURS), (0, True, OURS), (.3, False, OURS)], []),      # one within another counts once
    ([(0, True, OURS), (1.2, True, OURS), (.2, False, OURS), (.2, False, OURS)], [1]),                      # … and is a moment at which to say it
    ([(0, True, ANOTHER), (9, False, ANOTHER)]*3, []),
    ([(0, True, OURS), (0, True, ANOTHER), (.5, False, ANOTHER), (.6, False, OURS)], [3])])
def test_compiling_is_announced_once_and_after_a_second(events, after, monkeypatch, capsys):
    assert heard(monkeypatch, capsys, *events)==after
