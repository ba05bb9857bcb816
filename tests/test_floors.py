"""The house has floors, and imports only go down: computed from what the modules really import.

An import counts wherever it stands: at the top of a file, in a function, under `if TYPE_CHECKING`, in a string of generated code. The
units of the house are the package's folders and its top-level files: a unit's floor is one above the highest that it imports.
"""
import ast, json, re
from graphlib import CycleError, TopologicalSorter

import pytest

LIB = 'fastrl_replay'
FLOORS = 8             # of folders and top-level files, at most
PRIVATE = 12           # private names that cross from one module to another, at most
AHEAD = 8              # modules that a chapter needs and only a later one tells, at most
IN_TEXT = re.compile(r'(?:^|[;`\n])[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import\b[ \t]*([^\n;`]*)|import[ \t]+([\w.]+(?:[ \t]*,[ \t]*[\w.]+)*))')


# ---- what a module imports

def read(folder, lib=LIB):
    "The package `lib` in `folder`: dotted name → text; that of a package is its `__init__`"
    found = {}
    for p in sorted((folder/lib).rglob('*.py')):
        parts = [lib, *p.relative_to(folder/lib).with_suffix('').parts]
        name = '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)
        if p.name != '_modidx.py': found[name] = p.read_text(encoding='utf-8')
    return found


def packages(modules):
    "Names of those that hold others"
    return {name.rpartition('.')[0] for name in modules} - {''}


def absolute(module, level, name, modules):
    "The dotted name that `from <level dots><name> import …` in `module` means"
    if not level: return name or ''
    here = module.split('.') if module in packages(modules) else module.split('.')[:-1]
    here = here[:len(here) - level + 1]
    return '.'.join([*here, *([name] if name else [])])


def statements(tree):
    "What is imported in a tree: (dots, module, names) of `from`, (0, module, None) of `import`"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom): yield node.level, node.module, [a.name for a in node.names]
        elif isinstance(node, ast.Import): yield from ((0, a.name, None) for a in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(('import_module', '__import__')):
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from ((len(n) - len(n.lstrip('.')), n.lstrip('.'), None) for n in names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str): yield from in_text(node.value)


def in_text(text):
    "What a string would import if it were run as code"
    for base, names, plain in IN_TEXT.findall(text):
        if plain: yield from ((0, o.strip(), None) for o in plain.split(','))
        elif base: yield len(base) - len(base.lstrip('.')), base.lstrip('.'), re.findall(r'[\w*]+', names.split('#')[0])


def imports(module, modules):
    "Modules of the package that `module` imports"
    found = set()
    for level, name, names in statements(ast.parse(modules[module])):
        base = absolute(module, level, name, modules)
        inner = {f'{base}.{o}' for o in names or () if f'{base}.{o}' in modules}
        only_modules = bool(names) and len(inner) == len(names)
        found |= inner | (set() if only_modules else {base})
    return (found & modules.keys()) - {module}


def graph(modules): return {name: imports(name, modules) for name in modules}


# ---- floors

def unit(module):
    "The folder, or the top-level file, that a module belongs to"
    return '.'.join(module.split('.')[:2])


def units(edges):
    "Which unit imports which. The package's own `__init__` (its version) is the ground that all stand on"
    found = {unit(m): set() for m in edges if '.' in m}
    for m, others in edges.items():
        if '.' in m: found[unit(m)] |= {unit(o) for o in others if '.' in o} - {unit(m)}
    return found


def circle(edges):
    "A circle in a graph, as a list of names; empty if there is none"
    try: TopologicalSorter(edges).prepare()
    except CycleError as e: return e.args[1]
    return []


def floors(edges):
    "Unit → floor, from 1, of a graph of units without circles"
    found = {}
    for name in TopologicalSorter(edges).static_order(): found[name] = 1 + max((found[o] for o in edges[name]), default=0)
    return found


def private(module, modules):
    "Private names of other modules that `module` imports, or looks up in a module that it has imported"
    tree, known, found = ast.parse(modules[module]), set(), []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom): continue
        base = absolute(module, node.level, node.module, modules)
        if base.split('.')[0] != module.split('.')[0]: continue
        known |= {a.asname or a.name for a in node.names if f'{base}.{a.name}' in modules}
        found += [f'{module}: {base}.{a.name}' for a in node.names if is_private(a.name)]
    looked_up = [o for o in ast.walk(tree) if isinstance(o, ast.Attribute) and isinstance(o.value, ast.Name) and o.value.id in known]
    return found + [f'{module}: {o.value.id}.{o.attr}' for o in looked_up if is_private(o.attr)]


def is_private(name): return name.startswith('_') and not name.startswith('__')


def exports(root):
    "What the notebooks export: dotted name → notebook"
    found = {}
    for nb in sorted((root/'nbs').rglob('*.ipynb')):
        if '.ipynb_checkpoints' in nb.parts: continue
        for cell in json.loads(nb.read_text(encoding='utf-8'))['cells']:
            name = re.search(r'^#\|\s*default_exp\s+(\S+)', ''.join(cell['source']), re.M)
            if name: found.setdefault(f'{LIB}.{name[1]}', []).append(nb)
    return found


# ---- the order of the book

def forward(chapters, modules):
    "What chapters (names of their modules, in reading order) import although only a later one exports it: module → who needs it"
    place, ahead = {name: k for k, name in enumerate(chapters)}, {}
    for name in chapters:
        for o in imports(name, modules):
            if place.get(o, 0) > place[name]: ahead.setdefault(o, []).append(name)
    return ahead


# ---- this house

@pytest.fixture(scope='module')
def modules(root): return read(root)


@pytest.fixture(scope='module')
def edges(modules): return graph(modules)


def test_modules_import_in_no_circle(edges):
    assert len(edges) > 20
    assert not circle(edges)


def test_folders_and_files_form_floors(edges):
    house = units(edges)
    assert not circle(house), 'folders or top-level files import each other in a circle'
    plan = floors(house)
    assert max(plan.values()) <= FLOORS, sorted(plan.items(), key=lambda o: o[1])


def test_private_names_stay_at_home(modules):
    crossing = [o for name in modules for o in private(name, modules)]
    assert len(crossing) <= PRIVATE, '\n'.join(crossing)


def test_every_module_has_one_notebook(root, modules):
    found = exports(root)
    assert not {k: v for k, v in found.items() if len(v) > 1}, 'modules made of several notebooks'
    assert not modules.keys() - found.keys() - packages(modules), 'modules that no notebook exports'


def test_chapters_stand_in_reading_order(root, modules):
    "A chapter needs only what came before it; where one has to name a later storage, it does so in a line"
    found = sorted(exports(root).items(), key=lambda o: o[1][0].relative_to(root).as_posix())
    ahead = forward([name for name, _ in found if name in modules], modules)
    assert len(ahead) <= AHEAD, ahead


def test_tutorials_export_nothing(root):
    assert not [k for k, nbs in exports(root).items() if any('tutorials' in nb.parts for nb in nbs)]


# ---- the computation itself, on small houses

def house(folder, **files):
    "The modules of a package made of `files`: name with `__` for `/` → text"
    for name, text in files.items():
        path = folder/LIB/(name.replace('__', '/') + '.py')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for d in [folder/LIB, *(o for o in (folder/LIB).rglob('*') if o.is_dir())]: (d/'__init__.py').touch()
    return read(folder)


WAYS = ['from .a import x', 'from . import a', f'from {LIB}.a import x', f'from {LIB} import a', f'import {LIB}.a', f'import {LIB}.a as other',
        'def f():\n    from .a import x', 'if TYPE_CHECKING:\n    from .a import x', f'CODE = """\nfrom {LIB}.a import x\n"""',
        f'CODE = "import numpy; from {LIB}.a import x"', f'CODE = f"from {LIB}.a import {{name}}"', f'CODE = "import {LIB}.a"',
        f'import importlib; importlib.import_module("{LIB}.a")', 'from importlib import import_module; import_module(".a", __package__)', 'from .a import *']


@pytest.mark.parametrize('source', WAYS)
def test_an_import_is_seen_wherever_it_stands(tmp_path, source):
    modules = house(tmp_path, a='', b=source)
    assert imports(f'{LIB}.b', modules) == {f'{LIB}.a'}


@pytest.mark.parametrize('source,wanted', [
    ('from .other import x', {'pipes.other'}), ('from . import other', {'pipes.other'}), ('from ..a import x', {'a'}), ('from .. import a', {'a'}),
    ('from .. import __version__', {''}), ('from ..pipes import other', {'pipes.other'}), ('from ..pipes import other, x', {'pipes.other', 'pipes'}),
    ('import numpy\nfrom torch import nn', set()), ('TEXT = "important: from a to b"', set())])
def test_names_are_found_from_inside_a_folder(tmp_path, source, wanted):
    modules = house(tmp_path, a='', pipes__here=source, pipes__other='')
    assert imports(f'{LIB}.pipes.here', modules) == {f'{LIB}.{o}' if o else LIB for o in wanted}


def test_the_init_of_a_folder_counts(tmp_path):
    modules = house(tmp_path, a='from .pipes import x', pipes__here='from ..a import y')
    assert not circle(graph(modules)) and circle(units(graph(modules)))
    (tmp_path/LIB/'pipes'/'__init__.py').write_text('from .here import x')
    assert circle(graph(read(tmp_path)))


def test_a_circle_of_modules_is_seen(tmp_path):
    modules = house(tmp_path, a='from .b import x', b='def late():\n    from .c import x', c=f'CODE = "from {LIB}.a import x"')
    assert set(circle(graph(modules))) == {f'{LIB}.{o}' for o in 'abc'}


def test_a_circle_of_folders_is_seen(tmp_path):
    modules = house(tmp_path, low__a='', low__b='from ..high.c import x', high__c='', high__d='from ..low.a import x')
    assert not circle(graph(modules))
    assert set(circle(units(graph(modules)))) == {f'{LIB}.low', f'{LIB}.high'}


def test_floors_are_counted(tmp_path):
    modules = house(tmp_path, a='', b='from .a import x', pipes__base='from ..b import x', pipes__more='from .base import x\nfrom ..a import y', top='from .pipes.more import x')
    assert floors(units(graph(modules))) == {f'{LIB}.{k}': n for k, n in dict(a=1, b=2, pipes=3, top=4).items()}


def test_what_comes_later_is_seen(tmp_path):
    modules = house(tmp_path, a='from .b import x', b='', c='from .a import x\nfrom .b import x')
    assert forward([f'{LIB}.{o}' for o in 'abc'], modules) == {f'{LIB}.b': [f'{LIB}.a']}
    assert not forward([f'{LIB}.{o}' for o in 'bac'], modules)


def test_the_version_is_no_floor(tmp_path):
    modules = house(tmp_path, a='from . import __version__')
    assert floors(units(graph(modules))) == {f'{LIB}.a': 1}


def test_private_names_are_seen(tmp_path):
    modules = house(tmp_path, a='', b='from .a import _x, y, __version__\nfrom . import a\na._z, a.y, self._own\nfrom numpy import _core')
    assert [o.split(': ')[1] for o in private(f'{LIB}.b', modules)] == [f'{LIB}.a._x', 'a._z']
