"""The house has floors, and imports only go down.

Floor by floor: typed steps and schedules · kernels on plain arrays · storage · samplers · the memory · pipes · the learner ·
commands. A module may import from lower floors; from its own floor only where `SIBLINGS` says so.
"""
import ast, json, re

import pytest

LIB = 'fastrl_replay'
FLOORS = {
    0: ['steps', 'schedules', 'compat', 'rng', 'batch', 'sources', 'free'],
    1: ['kernels', 'sumtree', 'pool', 'objects', 'streams', 'leaves', 'putting', 'ids', 'tally', 'raw'],
    2: ['cyclic', 'chunks', 'interning', 'stacks', 'budget', 'framing', 'frames', 'savefiles', 'mapped', 'framefiles'],
    3: ['blocks', 'samplers.uniform', 'samplers.proportional', 'samplers.rank', 'samplers.more'],
    4: ['memory', 'checkpoint', 'ondisk', 'health', 'windows', 'envs', 'workers'],
    5: ['pipes.stepper', 'pipes.nstep', 'pipes.agents', 'pipes.replay', 'pipes.actors', 'pipes.loaders', 'pipes.weights', 'pipes.saving'],
    6: ['learner', 'show', 'bench', 'resume', 'inspection'],
    7: ['cli'],
    8: ['all'],
}
FLOOR = {module: floor for floor, modules in FLOORS.items() for module in modules}
PACKAGES = {m.rpartition('.')[0] for m in FLOOR} - {''}
SIBLINGS = {  # module → those of its own floor it may import
    'batch': {'steps'},
    'free': {'batch'},
    'sumtree': {'kernels'},
    'samplers.proportional': {'samplers.uniform'},
    'tally': {'kernels'},
    'objects': {'kernels'},
    'leaves': {'kernels', 'objects', 'raw', 'tally'},
    'putting': {'kernels', 'leaves', 'objects', 'raw', 'streams'},
    'stacks': {'cyclic', 'interning'},
    'framing': {'interning'},
    'budget': {'stacks'},
    'frames': {'cyclic', 'interning', 'stacks', 'budget', 'framing'},
    'samplers.rank': {'blocks', 'samplers.uniform'},
    'samplers.more': {'samplers.uniform', 'samplers.proportional'},
    'health': {'memory'},
    'mapped': {'cyclic', 'savefiles'},
    'framefiles': {'frames', 'interning', 'mapped', 'savefiles', 'stacks'},
    'memory': {'ondisk'},
    'checkpoint': {'memory'},
    'ondisk': {'memory', 'checkpoint'},
    'pipes.replay': {'pipes.loaders'},
    'pipes.saving': {'pipes.replay', 'pipes.nstep'},
    'resume': {'learner'},
    'inspection': {'resume', 'show'},
    'pipes.weights': {'pipes.agents'},
}


def absolute(module, node):
    "The dotted module that an `ImportFrom` in `module` names, relative or not"
    if not node.level: return node.module or ''
    package = [LIB, *module.split('.')[:-1]]
    return '.'.join(package[:len(package) - node.level + 1] + ([node.module] if node.module else []))


def target(base, name):
    "The module `from base import name` reaches: `name` itself where that is a module, else `base`"
    inner = f'{base}.{name}'
    return inner if inner.removeprefix(f'{LIB}.') in FLOOR.keys() | PACKAGES else base


def imported(module, source):
    "Modules of this package that `source`, the text of `module`, imports anywhere: in functions and under `if` too"
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import): names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            names |= {target(base, a.name) for a in node.names}
    names = {n.removeprefix(LIB).removeprefix('.') for n in names if n.split('.')[0] == LIB}
    return names - {''}


def violations(module, source):
    "What `module` imports and may not, in words"
    here = FLOOR.get(module)
    if here is None: return [f'{module} has no floor']
    wrong = []
    for other in sorted(imported(module, source) - {module}):
        floor = FLOOR.get(other)
        if floor is None: wrong.append(f'{module} (floor {here}) imports {other}, which has no floor')
        elif floor > here or (floor == here and other not in SIBLINGS.get(module, ())):
            wrong.append(f'{module} (floor {here}) imports {other} (floor {floor})')
    return wrong


def modules(root):
    "The exported modules: dotted name → path"
    found = {p.relative_to(root/LIB).with_suffix('').as_posix().replace('/', '.'): p for p in sorted((root/LIB).rglob('*.py'))}
    return {k: p for k, p in found.items() if not p.name.startswith('_')}


def exports(root):
    "What the notebooks export: dotted name → notebook"
    found = {}
    for nb in sorted((root/'nbs').rglob('*.ipynb')):
        if '.ipynb_checkpoints' in nb.parts: continue
        for cell in json.loads(nb.read_text(encoding='utf-8'))['cells']:
            name = re.search(r'^#\|\s*default_exp\s+(\S+)', ''.join(cell['source']), re.M)
            if name: found[name[1]] = nb
    return found


def test_imports_go_down(root):
    wrong = [o for module, path in modules(root).items() for o in violations(module, path.read_text(encoding='utf-8'))]
    assert not wrong, '\n'.join(wrong)


def test_every_module_has_a_notebook_and_a_floor(root):
    names = modules(root).keys()
    assert names, 'no modules: nothing was exported'
    assert not names - exports(root).keys(), 'modules that no notebook exports'
    assert not names - FLOOR.keys(), 'modules without a floor'


def test_a_notebook_is_numbered_by_its_floor(root):
    assert not [f'{nb.name}: {module} is on floor {FLOOR[module]}' for module, nb in exports(root).items()
                if module in FLOOR and nb.name[0] != str(FLOOR[module])]


def test_tutorials_export_nothing(root):
    assert not [k for k, nb in exports(root).items() if 'tutorials' in nb.parts]


def test_siblings_are_siblings():
    assert all(FLOOR[a] == FLOOR[b] for a, others in SIBLINGS.items() for b in others)


@pytest.mark.parametrize('module,source', [
    ('kernels', 'from .memory import ReplayMemory'),
    ('steps', 'from fastrl_replay.kernels import fetch'),
    ('cyclic', 'import fastrl_replay.samplers.uniform as uniform'),
    ('samplers.uniform', 'from .proportional import Proportional'),
    ('samplers.uniform', 'from . import rank'),
    ('samplers.rank', 'from ..memory import ReplayMemory'),
    ('memory', 'def late():\n    from .pipes.replay import ExperienceReplay'),
    ('pipes.loaders', 'from .replay import ExperienceReplay'),
    ('learner', 'from .all import *'),
    ('memory', 'from . import pipes'),
    ('memory', 'from .nowhere import thing'),
    ('attic', 'import numpy'),
])
def test_a_violation_is_caught(module, source):
    assert violations(module, source)


@pytest.mark.parametrize('module,source', [
    ('memory', 'from .cyclic import CyclicArray\nfrom .samplers.uniform import Uniform'),
    ('samplers.rank', 'from .uniform import Uniform\nfrom ..kernels import fetch'),
    ('pipes.replay', 'from .loaders import loader\nfrom ..memory import ReplayMemory\nfrom .. import __version__'),
    ('sumtree', 'import numpy as np\nfrom . import kernels'),
    ('cli', 'from fastrl_replay.learner import DQNLearner'),
])
def test_what_is_allowed_passes(module, source):
    assert violations(module, source) == []
