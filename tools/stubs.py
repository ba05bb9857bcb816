"""fastrl_replay/pipes/base.pyi: what type checkers and editors know of the pipes' functional forms.

    python tools/stubs.py           write the stub
    python tools/stubs.py --print   write it to standard output instead

`pipe.n_step(n=3, gamma=.99)` is found at run time by its name, so no type checker can see it. The stub lists every
class decorated with `@datapipe(name)` as a method of `IterDataPipe`, with the arguments of its `__init__` but the
source. It is made from the text of the package; nothing is imported.
"""
import ast, builtins, sys
from pathlib import Path

LIB = 'fastrl_replay'
ROOT = Path(__file__).resolve().parent.parent
BASE = f'{LIB}.pipes.base'
STUB = 'pipes/base.pyi'
HEAD = '"""What a pipe is, for type checkers: made by `make export` (tools/stubs.py), not by hand."""\n'
# What `torch.utils.data` adds to its own `IterDataPipe`
TORCH = ['batch', 'collate', 'concat', 'demux', 'filter', 'fork', 'groupby', 'map', 'mux', 'sharding_filter', 'shuffle',
         'unbatch', 'zip']
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


class Module:
    "One file of the package: its classes, and where the names in its annotations come from"
    def __init__(self, name, text):
        self.name, self.tree = name, ast.parse(text)
        self.classes = {o.name: o for o in self.tree.body if isinstance(o, ast.ClassDef)}
        self.origins = dict(self._origins())

    def _origins(self):
        "Name → the line that imports it"
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom): yield from self._from(node)
            elif isinstance(node, ast.Import):
                for a in node.names: yield a.asname or a.name.split('.')[0], f'import {renamed(a)}'
        for name in self.classes: yield name, f'from {self.name} import {name}'

    def _from(self, node):
        base = node.module or ''
        if node.level: base = '.'.join([*self.name.split('.')[:-node.level], *filter(None, [node.module])])
        for a in node.names: yield a.asname or a.name, f'from {base} import {renamed(a)}'


class Writer:
    "The lines of the stub, and the imports that they need"
    def __init__(self, modules): self.modules, self.needed = modules, set()

    def annotation(self, node, module, default=None):
        "An annotation as text; `Any` where there is none, or a name in it has no known origin"
        if node is None: return self.any()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode='eval').body
        names = {o.id for o in ast.walk(node) if isinstance(o, ast.Name)} - set(dir(builtins))
        if names - module.origins.keys(): return self.any()
        self.needed |= {module.origins[o] for o in names} - {f'from {BASE} import {o}' for o in names}
        text = ast.unparse(node)
        is_none = isinstance(default, ast.Constant) and default.value is None
        return f'{text} | None' if is_none and 'None' not in text and text != 'Any' else text

    def any(self):
        self.needed.add('from typing import Any')
        return 'Any'

    def argument(self, arg, default, module, stars=''):
        text = f'{stars}{arg.arg}: {self.annotation(arg.annotation, module, default)}'
        return text if default is None else f'{text} = {literal(default)}'

    def arguments(self, function, module, leave_out=1):
        "The arguments of `function` without the first `leave_out`, as a list of text"
        a = function.args
        plain = [*a.posonlyargs, *a.args]
        defaults = [*[None]*(len(plain) - len(a.defaults)), *a.defaults]
        texts = [self.argument(o, d, module) for o, d in zip(plain, defaults)]
        if a.posonlyargs: texts.insert(len(a.posonlyargs), '/')
        texts = texts[leave_out:]
        if a.vararg: texts.append(self.argument(a.vararg, None, module, '*'))
        elif a.kwonlyargs: texts.append('*')
        texts += [self.argument(o, d, module) for o, d in zip(a.kwonlyargs, a.kw_defaults)]
        if a.kwarg: texts.append(self.argument(a.kwarg, None, module, '**'))
        return texts

    def function(self, node, module, in_class=False):
        "A function or method as a line or two"
        decorators = [ast.unparse(o) for o in node.decorator_list]
        static = not in_class or 'staticmethod' in decorators
        first = [] if static else ['cls' if 'classmethod' in decorators else 'self']
        result = 'None' if node.name == '__init__' else self.annotation(node.returns, module)
        indent = '    ' if in_class else ''
        yield from (f'{indent}@{o}' for o in decorators)
        yield from definition(node.name, [*first, *self.arguments(node, module, 0 if static else 1)], result, indent)

    def klass(self, node, module):
        "A class: its bases, annotated attributes, what its methods assign to `self`, and its methods"
        bases = [self.annotation(o, module) for o in node.bases]
        if 'IterableDataset' in bases:      # another base for the pipes; what it looks up by name is in IterDataPipe
            yield f'class {node.name}(IterDataPipe): ...'
            return
        yield f'class {node.name}({", ".join(bases)}):' if bases else f'class {node.name}:'
        annotated = [o for o in node.body if isinstance(o, ast.AnnAssign)]
        fields = {o.target.id: self.annotation(o.annotation, module) for o in annotated}
        methods = [o for o in node.body if isinstance(o, FUNCTIONS) and is_public(o.name)]
        fields = dict.fromkeys(assigned(node.body), 'Any') | fields
        fields = {k: v for k, v in fields.items() if is_public(k) and k not in {o.name for o in methods}}
        if 'Any' in fields.values(): self.any()
        yield from (f'    {k}: {v}' for k, v in fields.items())
        for o in methods: yield from self.function(o, module, in_class=True)
        if not fields and not methods: yield '    ...'

    def forms(self):
        "The functional forms: (name, module, class, its `__init__`), in the order of names"
        found = []
        for module in self.modules.values():
            for c in module.classes.values():
                calls = [o for o in c.decorator_list if isinstance(o, ast.Call) and ast.unparse(o.func) == 'datapipe']
                found += [(o.args[0].value, module, c) for o in calls]
        return [(name, module, c, self.init(c, module)) for name, module, c in sorted(found, key=lambda o: o[0])]

    def init(self, c, module):
        "The `__init__` of a class, its own or that of the nearest base class in the package, and its module"
        own = next((o for o in c.body if isinstance(o, FUNCTIONS) and o.name == '__init__'), None)
        if own is not None: return own, module
        for base in c.bases:
            name = ast.unparse(base)
            origin = module.origins.get(name)
            homes = [m for m in self.modules.values() if name in m.classes and m.origins[name] == origin]
            if homes: return self.init(homes[0].classes[name], homes[0])
        raise ValueError(f'{module.name}.{c.name}: a datapipe without an __init__')

    def pipe(self):
        "The base class of all pipes, with the functional forms"
        self.needed |= {'from collections.abc import Callable, Iterator', 'from typing import Any, ClassVar',
                        'from torch.utils.data import IterableDataset'}
        yield 'class IterDataPipe(IterableDataset[Any]):'
        yield '    functions: ClassVar[dict[str, Callable[..., Any]]]'
        yield '    def __init__(self, *args: Any, **kwargs: Any) -> None: ...'
        yield '    def __iter__(self) -> Iterator[Any]: ...'
        for name, module, c, (init, home) in self.forms():
            self.needed.add(f'from {module.name} import {c.name}')
            yield from definition(name, ['self', *self.arguments(init, home, 2)], c.name, '    ')
        yield from (f'    def {name}(self, *args: Any, **kwargs: Any) -> IterDataPipe: ...' for name in TORCH)


def renamed(alias): return f'{alias.name} as {alias.asname}' if alias.asname else alias.name


def literal(node):
    "A default as a stub has it: plain values, and `...` for all else"
    try: return repr(ast.literal_eval(node))
    except ValueError: return '...'


def is_public(name): return not name.startswith('_') or name.startswith('__')


def assigned(body):
    "Attributes that the methods of a class give to `self`"
    targets = [o for m in body for o in ast.walk(m) if isinstance(o, ast.Attribute) and isinstance(o.ctx, ast.Store)]
    return dict.fromkeys(o.attr for o in targets if ast.unparse(o.value) == 'self')


def definition(name, arguments, result, indent, width=120):
    "A `def` in one line, or with its arguments in several"
    line = f'{indent}def {name}({", ".join(arguments)}) -> {result}: ...'
    if len(line) <= width: return [line]
    lines, rest = [f'{indent}def {name}('], ''
    for o in arguments:
        if rest and len(indent) + 4 + len(rest) + len(o) + 3 > width: lines, rest = [*lines, f'{indent}    {rest},'], ''
        rest = f'{rest}, {o}' if rest else o
    return [*lines, f'{indent}    {rest}', f'{indent}) -> {result}: ...']


def read(folder):
    "The package's modules: dotted name → Module"
    files = [p for p in sorted(folder.rglob('*.py')) if not p.name.startswith('_')]
    names = ['.'.join([LIB, *p.relative_to(folder).with_suffix('').parts]) for p in files]
    return {name: Module(name, p.read_text(encoding='utf-8')) for name, p in zip(names, files)}


def imports(needed):
    "Import lines, those from one module joined"
    froms = {}
    for line in needed:
        module, _, names = line.removeprefix('from ').partition(' import ')
        if line.startswith('from '): froms.setdefault(module, set()).update(names.split(', '))
    plain = sorted(o for o in needed if o.startswith('import '))
    ours = sorted(froms, key=lambda o: (o.startswith(LIB), o))
    return plain + [f'from {module} import {", ".join(sorted(froms[module]))}' for module in ours]


def stub(folder):
    "The text of the stub for the package in `folder`"
    modules = read(folder)
    base, writer, parts = modules[BASE], Writer(modules), []
    for node in base.tree.body:
        if getattr(node, 'name', '_').startswith('_') or node.name == 'IterDataPipe': continue
        if isinstance(node, ast.ClassDef): parts.append(list(writer.klass(node, base)))
        elif isinstance(node, FUNCTIONS): parts.append(list(writer.function(node, base)))
    parts.append(list(writer.pipe()))
    return '\n'.join([HEAD, *imports(writer.needed), *(line for part in parts for line in ['', *part])]) + '\n'


if __name__ == '__main__':
    text = stub(ROOT/LIB)
    if '--print' in sys.argv[1:]: sys.stdout.write(text)
    else: (ROOT/LIB/STUB).write_text(text, encoding='utf-8')
