"The package is exactly what the notebooks export, and the notebooks are clean"
import os, shutil, subprocess, sys

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
    "The notebooks and nothing they export"
    shutil.copytree(root/'nbs', tmp_path/'nbs', ignore=shutil.ignore_patterns('.ipynb_checkpoints'))
    shutil.copy(root/'settings.ini', tmp_path)
    (tmp_path/LIB).mkdir()
    shutil.copy(root/LIB/'__init__.py', tmp_path/LIB)
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
