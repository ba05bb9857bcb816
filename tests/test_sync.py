"The package is exactly what the notebooks export, and the notebooks are clean"
import os, re, shutil, subprocess, sys
from pathlib import Path

import pytest

EXPORT = 'from nbdev.doclinks import nbdev_export; nbdev_export.__wrapped__()'
CLEAN = 'from nbdev.clean import nbdev_clean; nbdev_clean.__wrapped__()'
LIB = 'fastrl_replay'


def nbdev(code, cwd):
    "Run nbdev in a process of its own: it caches where its settings are"
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'}
    ran = subprocess.run([sys.executable, '-c', code], cwd=cwd, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def texts(folder, pattern):
    "What lies under `folder`: path → text"
    return {p.relative_to(folder).as_posix(): p.read_text(encoding='utf-8') for p in sorted(folder.rglob(pattern))
            if '.ipynb_checkpoints' not in p.parts}


def differences(have, want):
    "What is wrong with `have`, in words; empty if it equals `want`"
    yield from (f'{k}: no notebook exports it' for k in have.keys() - want.keys())
    yield from (f'{k}: a notebook exports it, the package lacks it' for k in want.keys() - have.keys())
    yield from (f'{k}: differs from its notebook' for k in have.keys() & want.keys() if have[k] != want[k])


@pytest.fixture
def copy(root, tmp_path):
    "The notebooks and nothing they export: of the package, the folders with their `__init__`"
    shutil.copytree(root/'nbs', tmp_path/'nbs', ignore=shutil.ignore_patterns('.ipynb_checkpoints'))
    shutil.copy(root/'settings.ini', tmp_path)
    shutil.copytree(root/LIB, tmp_path/LIB, ignore=lambda folder, names: [o for o in names if '.' in o and o != '__init__.py'])
    return tmp_path


def test_package_is_what_the_notebooks_export(root, copy):
    nbdev(EXPORT, copy)
    wrong = sorted(differences(texts(root/LIB, '*.py'), texts(copy/LIB, '*.py')))
    assert not wrong, 'run `make export`:\n' + '\n'.join(wrong)


def test_notebooks_are_clean(root, copy):
    before = texts(copy/'nbs', '*.ipynb')
    nbdev(CLEAN, copy)
    wrong = sorted(k for k, v in texts(copy/'nbs', '*.ipynb').items() if before[k] != v)
    assert not wrong, f'run `make export`: {wrong}'


def stub(*args, cwd):
    "What tools/stubs.py writes or prints in `cwd`"
    return subprocess.run([sys.executable, cwd/'tools'/'stubs.py', *args], cwd=cwd, check=True, capture_output=True, text=True).stdout


def test_the_stub_is_that_of_the_package(root):
    assert (root/LIB/'pipes'/'base.pyi').read_text(encoding='utf-8') == stub('--print', cwd=root), 'run `make export`'
    assert (root/LIB/'py.typed').exists()


def test_the_stub_has_every_form_with_its_arguments(root):
    import inspect
    import fastrl_replay.all
    from fastrl_replay.pipes.base import IterDataPipe
    said = stub('--print', cwd=root)
    forms = {name: form for name, form in IterDataPipe.functions.items() if form.__module__.startswith(LIB)}
    assert {'gym_stepper', 'n_step', 'experience_replay', 'prioritized_replay', 'rank_replay', 'actors'} <= forms.keys()
    classes = {o.__name__: o for o in vars(fastrl_replay.all).values() if inspect.isclass(o)}
    for name in forms:
        head = re.search(rf'def {name}\((.*?)\) -> (\w+): \.\.\.', said, re.S)
        written = re.findall(r'(\*{0,2}\w+): ', head[1])
        wanted = list(inspect.signature(classes[head[2]].__init__).parameters.values())[2:]
        assert written == ['*'*{p.VAR_POSITIONAL: 1, p.VAR_KEYWORD: 2}.get(p.kind, 0) + p.name for p in wanted], name


PIPES = {'base': 'def datapipe(name: str): "Doc"\nclass _Own: pass\n',
         'one': 'from collections.abc import Callable\nfrom .base import datapipe\nfrom ..steps import Step as S\n@datapipe("one")\nclass One:\n'
                '    def __init__(self, source_datapipe, n, kind=S, *, f: Callable | None = None, m: int = None, **kw) -> None: pass\n',
         'two': 'from .one import One\nfrom .base import datapipe\n@datapipe("two")\nclass Two(One): pass\n'}


def test_a_stub_is_written(root, tmp_path):
    for name in ('tools/stubs.py', *(f'{LIB}/pipes/{o}.py' for o in PIPES)):
        (tmp_path/name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path/name).write_text((root/name).read_text() if name[0] == 't' else PIPES[Path(name).stem])
    stub(cwd=tmp_path)
    said = (tmp_path/LIB/'pipes'/'base.pyi').read_text()
    arguments = 'n: Any, kind: Any = ..., *, f: Callable | None = None, m: int | None = None, **kw: Any'
    for line in (f'    def one(self, {arguments}) -> One: ...', f'    def two(self, {arguments}) -> Two: ...', 'def datapipe(name: str) -> Any: ...',
                 f'from {LIB}.pipes.two import Two', 'from collections.abc import Callable, Iterator'): assert line in said.splitlines()
    assert '_Own' not in said


def test_versions_agree(root):
    "nbdev reads its version in settings.ini, packaging reads the package's"
    import configparser
    import fastrl_replay
    settings = configparser.ConfigParser()
    settings.read(root/'settings.ini')
    assert settings['DEFAULT']['version'] == fastrl_replay.__version__


@pytest.mark.parametrize('have,want,said', [
    ({'a.py': '1', 'b.py': ''}, {'a.py': '1'}, 'b.py: no notebook'),
    ({'a.py': '1'}, {'a.py': '1', 'pipes/b.py': ''}, 'pipes/b.py: a notebook exports'),
    ({'a.py': '1'}, {'a.py': '2'}, 'a.py: differs')])
def test_drift_is_noticed(have, want, said):
    wrong = list(differences(have, want))
    assert len(wrong) == 1 and wrong[0].startswith(said)
