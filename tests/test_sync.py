"The package is exactly what the notebooks export, and the notebooks are clean"
import __future__, importlib, inspect, json, os, shutil, subprocess, sys, types

import pytest

EXPORT = 'from nbdev.doclinks import nbdev_export; nbdev_export.__wrapped__()'
CLEAN = 'from nbdev.clean import nbdev_clean; nbdev_clean.__wrapped__()'
LIB = 'fastrl_replay'
BASE = f'{LIB}.pipes.base'
STUB = f'{LIB}/pipes/base.pyi'
TORCH = 'batch collate concat demux filter fork groupby map mux sharding_filter shuffle unbatch zip'.split()      # its own forms, where it has them


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


# ---- the stub for type checkers, which is written by hand

def silent(notebook):
    "Whether none of the code cells of a notebook has a stored output"
    cells = [c for c in notebook['cells'] if c['cell_type'] == 'code']
    return len(cells) > 2 and not any(c['outputs'] for c in cells)


def test_notebooks_keep_their_outputs(root):
    assert [name for name, text in texts(root/'nbs', '*.ipynb').items() if silent(json.loads(text))] == []


def test_lost_outputs_are_noticed():
    cell = dict(cell_type='code', outputs=[])
    assert silent(dict(cells=[cell] * 3)) and not silent(dict(cells=[cell, cell, dict(cell, outputs=['42'])]))


def face(function, skip=0):
    "A signature to compare: name, kind, default and annotation of each parameter but the first `skip`, and what is returned"
    sig = inspect.signature(function, eval_str=True)
    returns = None if function.__name__ == '__init__' else sig.return_annotation
    return [(p.name, p.kind, p.default, p.annotation) for p in [*sig.parameters.values()][skip:]], returns


def agree(stub, code):
    "Do two such signatures agree? A default of the stub may be `...`"
    same = len(stub[0]) == len(code[0]) and all(a[:2] == b[:2] and a[3] == b[3] and a[2] in (b[2], ...) for a, b in zip(stub[0], code[0]))
    return same and str(stub[1]).replace('stub', BASE) == str(code[1])


def faults(text):
    "Where a stub with this text differs from the package: names"
    base = importlib.import_module(BASE)
    importlib.import_module(f'{LIB}.all')
    stub = types.ModuleType('stub')
    exec(compile(text, 'base.pyi', 'exec', __future__.annotations.compiler_flag), vars(stub))
    forms = {k: f.__wrapped__ for k, f in base.IterDataPipe.functions.items() if f.__module__ == BASE and f.__wrapped__.__module__.startswith(LIB)}
    for name, cls in forms.items():
        form = vars(stub.IterDataPipe).get(name)
        if form is None or not agree(face(form, 1), (face(cls.__init__, 2)[0], cls)): yield name
    yield from {k for k in vars(stub.IterDataPipe) if k[0] != '_'} - {*forms, *TORCH}
    for name in {*base.__all__} - {'IterDataPipe', 'ShimDataPipe'}:
        there, here = getattr(base, name), getattr(stub, name, None)
        pairs = [(name, here, there)] if inspect.isfunction(there) else [
            (f'{name}.{k}', vars(here).get(k), v) for k, v in vars(there).items() if inspect.isfunction(v) and (k == '__init__' or k[0] != '_')]
        yield from (k for k, a, b in pairs if a is None or not agree(face(a), face(b)))


def test_the_stub_is_true(root):
    assert not [*faults((root/STUB).read_text(encoding='utf-8'))]
    assert (root/LIB/'py.typed').exists()


@pytest.mark.parametrize('old,new,named', [
    ('chunk: int = 64, timeout: float = 60,', 'chunk: int = 32, timeout: float = 60,', 'actors'), ('gamma: float | None', 'gamma: int | None', 'n_step'),
    ('first_env_id: int = 0, ', '', 'gym_stepper'), (') -> NStep', ') -> Actors', 'n_step'), ('def rank_replay(', 'def ranked(', 'rank_replay'),
    ('*, alpha: float = .7,', 'alpha: float = .7,', 'rank_replay'), ('def map(', 'def mapped(', 'mapped'), ('what: str) -> None', 'what: str) -> int', 'refuse_worker'),
    ('def drop(self)', 'def dropped(self)', 'Resumable.drop'), ('def over(self, source: Iterable[object])', 'def over(self, source: Iterable[object], n: int)', 'Resumable.over')])
def test_an_untrue_stub_is_noticed(root, old, new, named):
    text = (root/STUB).read_text(encoding='utf-8')
    assert text.count(old) == 1 and named in faults(text.replace(old, new))


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
