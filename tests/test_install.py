"The package where pip may put it: read-only, without a place for compiled kernels, and on systems that lack Linux's calls"
import ctypes, os, shutil, stat, subprocess, sys, tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent/'tools'))
import lowest

SMALL = """
import numpy as np
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.steps import Transition
def step(k): return Transition(np.full(4, k, np.float32), k % 2, float(k), np.full(4, k + 1, np.float32), False, k % 5 == 4)
def try_out(memory):
    for k in range(30): memory.add(step(k))
    batch = memory.sample(8)
    assert (batch.state[:, 0] == batch.reward).all() and len(set(batch.ids.tolist())) == 8
    memory.check_valid()
"""


PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1


def obey():
    "In a child process, before it runs anything: permissions hold for root too"
    if os.geteuid() == 0: ctypes.CDLL(None, use_errno=True).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


def python(code, **kw): return subprocess.run([sys.executable, '-c', code], preexec_fn=obey, capture_output=True, text=True, **kw)


@pytest.fixture
def read_only(root):
    "A folder with a copy of the package that may be read and not written"
    folder = Path(tempfile.mkdtemp(prefix='installed-'))
    shutil.copytree(root/'fastrl_replay', folder/'fastrl_replay', ignore=shutil.ignore_patterns('__pycache__', '*.nb?'))
    for p in [folder, *folder.rglob('*')]: p.chmod(stat.S_IREAD | (stat.S_IEXEC if p.is_dir() else 0))
    yield folder
    for p in [folder, *folder.rglob('*')]: p.chmod(0o700)
    shutil.rmtree(folder)


def test_a_read_only_installation_without_a_cache_works(read_only):
    if python('open("here", "w")', cwd=read_only).returncode == 0: pytest.skip('this user may write everywhere')
    env = {'HOME': str(read_only), 'PYTHONPATH': str(read_only), 'PATH': os.defpath, 'OMP_NUM_THREADS': '1', 'PYTHONDONTWRITEBYTECODE': '1'}
    ran = python(f'{SMALL}\nimport fastrl_replay\nprint(fastrl_replay.__file__)\ntry_out(ReplayMemory(20, seed=0))', cwd='/', env=env)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(str(read_only))
    assert ran.stderr.count('NUMBA_CACHE_DIR') == 1 and 'Traceback' not in ran.stderr, ran.stderr


BARE = """
import os, sys
import gymnasium, matplotlib.pyplot, numba, torch, torchdata.nodes, torchdata.stateful_dataloader, multiprocessing.connection     # they need it on this system
sys.modules['fcntl'] = None
for name in ('posix_fallocate', 'posix_fadvise', 'register_at_fork', 'O_DIRECTORY'):
    if hasattr(os, name): delattr(os, name)
import fastrl_replay.all
"""
ON_DISK = """
try: memory = ReplayMemory(20, path=sys.argv[1], seed=0)
except (OSError, RuntimeError, NotImplementedError) as e:
    assert sys.argv[1] in str(e) or 'system' in str(e), e
    print('refused')
else:
    try_out(memory)
    memory.close()
    with_steps = ReplayMemory.open(sys.argv[1])
    assert with_steps.n_added == 30 and with_steps.recent(1).reward[0] == 29
    print('works')
"""


def test_a_system_without_fcntl(root, tmp_path):
    "In RAM, and then on disk, where it may be refused"
    code = f'{BARE}\n{SMALL}\ntry_out(ReplayMemory(20, seed=0)); print("works")\n{ON_DISK}'
    ran = subprocess.run([sys.executable, '-c', code, str(tmp_path/'memory')], cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() in (['works', 'works'], ['works', 'refused'])


# ---- requirements

def test_every_requirement_has_a_lowest_version(root):
    "One that exists and is not above what the tests run with; `make lowest` installs and uses them"
    from packaging.requirements import Requirement
    from packaging.version import Version
    pinned = dict(line.split('#')[0].strip().split('==') for line in (root/'constraints.txt').read_text().splitlines() if '==' in line.split('#')[0])
    tested = {k.lower().replace('_', '-'): Version(v) for k, v in pinned.items()}
    own, extras = lowest.requirements(root)
    lines = [*own, *(o for extra in extras.values() for o in extra)]
    for o in map(Requirement, lines):
        low = [s.version.removesuffix('.*') for s in o.specifier if s.operator in ('>=', '==')]
        assert low, f'{o}: expected a lowest version'
        assert tested[o.name.lower()] in o.specifier, f'{o}: the tests run with {tested[o.name.lower()]}'
        assert Version(low[0]) <= tested[o.name.lower()]
    assert 'tqdm>=4.66' in own


def test_a_requirement_without_a_lowest_version_is_named(root):
    code = 'import lowest; print(lowest.bounds(["a>=1.2,<3", "b[x,y]==2.*", "a>=1.10"])); lowest.bounds(["numpy>=2", "matplotlib<4"])'
    ran = subprocess.run([sys.executable, '-c', code], cwd=root/'tools', capture_output=True, text=True)
    assert ran.stdout.strip()=="{'a': '==1.10', 'b': '==2.*'}" and 'matplotlib<4: expected a lowest version' in ran.stderr
