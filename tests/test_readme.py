"The README is the index notebook, and the commands it names exist"
import json, re, subprocess, sys

import numpy as np
import pytest


def make_targets(root):
    return set(re.findall(r'^([a-z-]+):', (root/'Makefile').read_text(), re.M))


def test_readme_is_the_index_notebook(root):
    want = subprocess.run([sys.executable, root/'tools'/'readme.py', '--print'], check=True, capture_output=True, text=True).stdout
    assert (root/'README.md').read_text(encoding='utf-8') == want, 'run `make export`'


@pytest.mark.parametrize('page', ['README.md', 'CONTRIBUTING.md'])
def test_make_targets_exist(root, page):
    text = (root/page).read_text(encoding='utf-8')
    named = set(re.findall(r'^\s*make ([a-z-]+)', text, re.M)) | set(re.findall(r'`make ([a-z-]+)', text))
    assert named, f'{page} names no make target'
    assert not named - make_targets(root)


def test_help_lists_every_target(root):
    said = subprocess.run(['make', '--no-print-directory', 'help'], cwd=root, check=True, capture_output=True, text=True).stdout
    assert set(re.findall(r'^make ([a-z-]+)', said, re.M)) == make_targets(root)


def test_links_of_the_readme_lead_somewhere(root):
    links = re.findall(r'\]\((?!https?://|#)([^)#]+)', (root/'README.md').read_text(encoding='utf-8'))
    assert not [o for o in links if not (root/o).exists()]


def test_pictures_of_the_readme_are_those_of_the_index_notebook(root):
    sys.path.insert(0, str(root/'tools'))
    import readme
    found = readme.pictures(json.loads((root/'nbs'/'index.ipynb').read_text(encoding='utf-8')))
    assert found and all(path.read_bytes() == data for path, data in found.items()), 'run `make export`'


def test_the_sampler_of_contributing_works(root):
    from fastrl_replay.samplers.own import as_sampler
    code = re.search(r'```python\n(.*?)```', (root/'CONTRIBUTING.md').read_text(encoding='utf-8'), re.S)[1]
    scope = {}
    exec(code, scope)
    first, second = (as_sampler(scope['Recent'](half_life=2, max_sz=8)) for _ in range(2))
    for o in (first, second): o.attach(8)
    first.on_add(np.arange(5), None)
    first.update(np.arange(2), np.ones(2))
    second.set_state(first.get_state())
    slots, probs = first.draw(64, np.random.default_rng(0))
    again, _ = second.draw(64, np.random.default_rng(0))
    assert slots.max() == 4 and (slots == again).all()
    assert np.allclose(probs, (.5 ** ((4 - slots) / 2)) / (.5 ** (np.arange(5) / 2)).sum())
