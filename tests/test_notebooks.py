"""Every notebook is a test of its own, run in a process of its own by the very function behind `nbdev_test`.

The processes are forked from one that has imported the large libraries, which would take longer than most notebooks do.
Cells flagged `slow` are left out; `pytest --nbflags slow` runs them too.
"""
import json, os, shutil, signal, subprocess, sys, threading
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((p.relative_to(ROOT).as_posix() for p in (ROOT/'nbs').rglob('*.ipynb')
                    if not any(part[0] in '._' for part in p.relative_to(ROOT).parts)), reverse=True)      # tutorials take the longest
LIMIT = 240        # seconds; a notebook that takes longer hangs
SERVER = """
import functools, gc, json, os, sys
import nbdev.test
import gymnasium, matplotlib.pyplot, numba.np.arraymath
import torch._dynamo       # the first update of an optimizer imports it
from matplotlib_inline.config import InlineBackend
InlineBackend.instance().print_figure_kwargs = dict(bbox_inches=None)       # "tight" would lay each picture out once more
nbdev.test.CaptureShell = functools.partial(nbdev.test.CaptureShell, mpl_format='png')      # a quarter of the pixels
gc.freeze()       # else each process looks through all of them once more before it ends, which takes a second
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if not pid: break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else: sys.exit()
os.setsid()
os.chdir(job['cwd'])
for fd, name in (0, os.devnull), (1, job['out']), (2, job['err']): os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), fd)
nbdev.test.nbdev_test.__wrapped__(path=job['path'], flags=job['flags'], n_workers=0)
"""


@pytest.fixture(scope='session')
def forge(tmp_path_factory):
    "A function that runs a notebook as `nbdev_test` does: (returncode, stdout, stderr)"
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'}
    server = subprocess.Popen([sys.executable, '-c', SERVER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    def run(path, flags='', cwd=ROOT):
        out, err = (tmp_path_factory.mktemp('notebook')/o for o in ('out', 'err'))
        server.stdin.write(json.dumps(dict(path=str(path), flags=flags, cwd=str(cwd), out=str(out), err=str(err))) + '\n')
        server.stdin.flush()
        pid = int(server.stdout.readline())
        alarm = threading.Timer(1e6 if flags else LIMIT, os.killpg, (pid, signal.SIGKILL))
        alarm.start()
        code = int(server.stdout.readline())
        alarm.cancel()
        return SimpleNamespace(returncode=code, stdout=out.read_text(), stderr=err.read_text())
    yield run
    server.stdin.close()
    server.wait(10)


@pytest.mark.notebook
@pytest.mark.parametrize('notebook', NOTEBOOKS)
def test_notebook(notebook, pytestconfig, forge):
    ran = forge(ROOT/notebook, pytestconfig.getoption('--nbflags'))
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


def test_a_failing_cell_is_reported(tmp_path, forge):
    ran = forge(_project_of_one(tmp_path, 'x = 6', 'assert x*7 == 41, "not the answer"'), cwd=tmp_path)
    assert ran.returncode != 0
    assert 'not the answer' in ran.stderr


@pytest.mark.parametrize('flags,fails', [('', False), ('slow', True)])
def test_slow_cells_need_their_flag(tmp_path, flags, fails, forge):
    ran = forge(_project_of_one(tmp_path, '#| slow\n1/0'), flags, cwd=tmp_path)
    assert (ran.returncode != 0) == fails, ran.stderr
