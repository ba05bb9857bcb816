"""Every notebook is a test of its own, run in a fresh process by the very function behind `nbdev_test`.

Cells flagged `slow` are left out; `pytest --nbflags slow` runs them too.
"""
import json, os, shutil, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT/'nbs').rglob('*.ipynb')
                   if not any(part[0] in '._' for part in p.relative_to(ROOT).parts))
LIMIT = 240        # seconds; a notebook that takes longer hangs
RUN = 'import sys; from nbdev.test import nbdev_test; nbdev_test.__wrapped__(path=sys.argv[1], flags=sys.argv[2], n_workers=0)'


def run_as_nbdev_test(path, flags='', cwd=ROOT):
    "Run one notebook; the finished process, its output included"
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'}
    return subprocess.run([sys.executable, '-c', RUN, str(path), flags], cwd=cwd, env=env, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=None if flags else LIMIT)


@pytest.mark.notebook
@pytest.mark.parametrize('notebook', NOTEBOOKS)
def test_notebook(notebook, pytestconfig):
    ran = run_as_nbdev_test(ROOT/notebook, pytestconfig.getoption('--nbflags'))
    assert ran.returncode == 0, f'{ran.stdout}\n{ran.stderr}'
    assert 'Success.' in ran.stdout, f'{notebook} was not run: {ran.stdout}'


def _project_of_one(folder, *cells):
    "A copy of the project with a single notebook made of `cells`"
    cells = [dict(cell_type='code', id=f'cell{i}', metadata={}, outputs=[], execution_count=None, source=o.splitlines(True))
             for i, o in enumerate(cells)]
    kernel = dict(name='python3', display_name='python3', language='python')
    nb = dict(nbformat=4, nbformat_minor=5, metadata=dict(kernelspec=kernel), cells=cells)
    shutil.copy(ROOT/'settings.ini', folder)
    for d in ('nbs', 'fastrl_replay'): (folder/d).mkdir()
    (folder/'nbs'/'00_one.ipynb').write_text(json.dumps(nb))
    return folder/'nbs'/'00_one.ipynb'


def test_a_failing_cell_is_reported(tmp_path):
    ran = run_as_nbdev_test(_project_of_one(tmp_path, 'x = 6', 'assert x*7 == 41, "not the answer"'), cwd=tmp_path)
    assert ran.returncode != 0
    assert 'not the answer' in ran.stderr


@pytest.mark.parametrize('flags,fails', [('', False), ('slow', True)])
def test_slow_cells_need_their_flag(tmp_path, flags, fails):
    ran = run_as_nbdev_test(_project_of_one(tmp_path, '#| slow\n1/0'), flags, cwd=tmp_path)
    assert (ran.returncode != 0) == fails, ran.stderr
