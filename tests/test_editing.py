"A change without a notebook server, as CONTRIBUTING tells it: in the module, and carried back into its notebook"
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MODULES = 'saving', 'samplers/sum_tree', 'kernels'


@pytest.fixture
def tree(root, tmp_path):
    "A copy of the notebooks and the package"
    for name in ('nbs', 'fastrl_replay'): shutil.copytree(root/name, tmp_path/name, ignore=shutil.ignore_patterns('__pycache__', 'data', '*.png', '*.gif'))
    for name in ('settings.ini', 'pyproject.toml'): shutil.copy(root/name, tmp_path)
    return tmp_path


def run(tree, command):
    program = Path(sys.executable).with_name(command)
    ran = subprocess.run([program], cwd=tree, env=os.environ | dict(PYTHONPATH=str(tree)), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def sources(tree):
    "All cells of all notebooks: (notebook, id) → text"
    return {(nb.relative_to(tree).as_posix(), cell['id']): ''.join(cell['source'])
            for nb in sorted((tree/'nbs').rglob('*.ipynb')) for cell in json.loads(nb.read_text(encoding='utf-8'))['cells']}


def test_an_edit_of_a_module_is_carried_back(tree, root):
    "A line of a function, and one that imports: these cells change, no other does; exported, they are the edited modules"
    before = sources(tree)
    edited = {}
    for name in MODULES:
        path = tree/'fastrl_replay'/f'{name}.py'
        text = path.read_text(encoding='utf-8')
        at = text.index('\ndef ', text.index('# %%', text.index('import ')))
        text = text[:at] + '\n# carried back' + text[at:]
        path.write_text(text.replace('from typing import Any\n', 'from typing import Any  # for all\n'), encoding='utf-8')
        edited[path] = path.read_text(encoding='utf-8')
    run(tree, 'nbdev_update')
    after = sources(tree)
    changed = [key for key in after if after[key] != before[key]]
    assert after.keys() == before.keys() and len(changed) == 2*len(MODULES), changed
    assert all('# carried back' in after[key] or '# for all' in after[key] for key in changed)
    run(tree, 'nbdev_export')
    for path, text in edited.items(): assert path.read_text(encoding='utf-8') == text
    guide = (root/'CONTRIBUTING.md').read_text(encoding='utf-8')
    assert 'nbdev_update' in guide
