"""The exported package read as text: linter, vocabulary, widths, what is out of bounds, the size of functions, docstrings.

What is generated (`_modidx.py`) is left out; nothing else is.
"""
import ast, re, statistics, subprocess, sys, tokenize

import pytest

LIB = 'fastrl_replay'
LONGEST, MEDIAN = 40, 8          # lines of a function
WIDEST, MOST = 120, 100          # characters of a line: of any, and of nine in ten
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


def sources(root):
    "The package's files: path below the root → text"
    files = [p for p in sorted((root/LIB).rglob('*.py')) if p.name != '_modidx.py']
    return {p.relative_to(root).as_posix(): p.read_text(encoding='utf-8') for p in files}


def tool(root, *args):
    ran = subprocess.run([sys.executable, '-m', *args], cwd=root, capture_output=True, text=True)
    return ran.returncode, ran.stdout + ran.stderr


def test_ruff(root):
    code, said = tool(root, 'ruff', 'check', '--output-format=concise', LIB, 'tests', 'tools', 'benchmarks')
    assert code == 0, said


def test_ruff_can_fail(root, tmp_path):
    (tmp_path/'bad.py').write_text('import os\nfrom math import *\n')
    code, said = tool(tmp_path, 'ruff', 'check', '--config', str(root/'pyproject.toml'), '--output-format=concise', 'bad.py')
    assert code != 0 and 'F401' in said and 'F403' in said


# ---- words

def identifiers(source):
    "Every name in `source`, with its line: variables, attributes, arguments, keywords"
    for t in tokenize.generate_tokens(iter(source.splitlines(True)).__next__):
        if t.type == tokenize.NAME: yield t.string, t.start[0]


def banned(source):
    "Lines that use the word `done` in a name: an episode terminates or is truncated"
    return [line for name, line in identifiers(source) if {'done', 'dones'} & set(name.lower().split('_'))]


def test_the_word_done_is_banned(root):
    own = {k: text for k, text in sources(root).items() if not k.startswith(f'{LIB}/interop/')}      # there, other libraries' words are spoken
    wrong = {k: lines for k, text in own.items() if (lines := banned(text))}
    assert not wrong, f'`done` is neither terminated nor truncated (file: lines): {wrong}'


@pytest.mark.parametrize('source', ['done = 1', 'def f(done): pass', 'x.done', 'f(done=1)', 'is_done = dones = 1',
                                    'class A:\n    done: bool'])
def test_done_is_noticed(source): assert banned(source)


def test_done_in_prose_is_fine(): assert not banned('"What is done"\nabandoned = 1  # done')


HOUSE_WORDS = {'tally', 'leaves', 'putting', 'raw', 'free', 'framing', 'interning', 'objects', 'stacks'}


def test_modules_have_the_words_of_the_field(root):
    assert not {k for k in sources(root) if k.rpartition('/')[2].removesuffix('.py') in HOUSE_WORDS}


# ---- the width of lines

def widths(source):
    "Length of each line that is neither blank nor part of the generated `__all__`"
    inside, found = False, []
    for line in source.splitlines():
        inside = inside or line.startswith('__all__ = [')
        if line.strip() and not inside: found.append(len(line))
        inside = inside and not line.endswith(']')
    return found


def test_lines_can_be_read(root):
    long = [f'{k}: {n}' for k, text in sources(root).items() for n in widths(text) if n > WIDEST]
    assert not long, f'lines of more than {WIDEST} characters: {long}'
    all_of_them = sorted(n for text in sources(root).values() for n in widths(text))
    ninth = all_of_them[int(.9*len(all_of_them))]
    assert ninth <= MOST, f'one line in ten has {ninth} characters or more'


def test_widths_are_measured():
    assert widths("__all__ = ['a',\n           'b']\n\nx = 1\n    y = [2]\n__all__ = []\nz") == [5, 11, 1]


# ---- what is out of bounds

def calls(source):
    "Dotted names of what is called or used as a decorator or looked up, with their lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name): yield f'{node.func.id}(', node.lineno
        elif isinstance(node, ast.Attribute): yield ast.unparse(node), node.lineno
        elif isinstance(node, ast.ImportFrom): yield from ((f'{node.module}.{a.name}', node.lineno) for a in node.names)
        elif isinstance(node, ast.Import): yield from ((a.name, node.lineno) for a in node.names)


def outside(source):
    "Uses of code made of text, of torch's private parts, of objects by address"
    private = re.compile(r'(eval|exec)\($|torch\._C\b|.*\b(from_address|string_at|basicsize)$')
    return [(what, line) for what, line in calls(source) if private.match(what)]


def intrinsics(source):
    "Names of the functions made of LLVM instructions by hand"
    return [f.name for _, f in functions(source) if any('intrinsic' in ast.unparse(d) for d in f.decorator_list)]


def test_nothing_out_of_bounds_is_used(root):
    wrong = {k: found for k, text in sources(root).items() if (found := outside(text))}
    assert not wrong, wrong


def test_few_intrinsics(root):
    found = [o for text in sources(root).values() for o in intrinsics(text)]
    assert len(found) <= 4, found


@pytest.mark.parametrize('source', ['eval("1")', 'def f():\n    exec(code)', 'torch._C._cuda', 'from torch import _C', 'import torch._C', 'c_uint64.from_address(3)',
                                    'ctypes.string_at(p, 3)'])
def test_what_is_out_of_bounds_is_noticed(source): assert outside(source)


def test_what_is_allowed_passes():
    source = 'model.eval()\nre.compile("x")\n@intrinsic\ndef f(): pass\n@numba.extending.intrinsic\ndef g(): pass\n# torch._C'
    assert not outside(source) and intrinsics(source) == ['f', 'g']


# ---- the size of functions

def is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def code_lines(function, lines):
    "How many lines the body takes without its docstring, comments and blanks; a one-liner takes 1"
    body = function.body[1:] if is_docstring(function.body[0]) else function.body
    if not body: return 0
    span = range(body[0].lineno, body[-1].end_lineno + 1)
    return sum(bool(o := lines[i - 1].strip()) and not o.startswith('#') for i in span)


def functions(source):
    "Every function in `source`, nested ones too: (qualified name, node)"
    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            name = f'{prefix}{child.name}' if isinstance(child, (*FUNCTIONS, ast.ClassDef)) else prefix.rstrip('.')
            if isinstance(child, FUNCTIONS): yield name, child
            yield from walk(child, f'{name}.' if name else '')
    return walk(ast.parse(source), '')


def sizes(root):
    "(file: function) → lines of code"
    return {f'{k}: {name}': code_lines(f, text.splitlines()) for k, text in sources(root).items() for name, f in functions(text)}


def is_public(name): return not any(part.startswith('_') for part in name.split('.'))


def test_functions_are_small(root):
    long = {k: n for k, n in sizes(root).items() if n > LONGEST}
    assert not long, f'functions of more than {LONGEST} lines of code: {long}'


def test_the_median_public_function_is_small(root):
    public = {k: n for k, n in sizes(root).items() if is_public(k.split(': ')[1])}
    assert public, 'no public functions'
    median = statistics.median(public.values())
    largest = sorted(public.items(), key=lambda o: -o[1])[:10]
    assert median <= MEDIAN, f'the median public function has {median} lines of code, not {MEDIAN}; the largest: {largest}'


def test_lines_of_code_are_counted():
    source = 'def f(x):\n    "Doc"\n    # why\n    y = [1,\n\n         2]\n    def g(): return x\n    return y\n'
    (_, f), (name, g) = functions(source)
    assert name == 'f.g'
    assert code_lines(f, source.splitlines()) == 4
    assert code_lines(g, source.splitlines()) == 1


# ---- docstrings

def is_overload(node):
    "A second face of something documented elsewhere: `@overload`, a property's setter"
    names = {d.attr if isinstance(d, ast.Attribute) else getattr(d, 'id', '') for d in node.decorator_list}
    return bool(names & {'overload', 'setter', 'deleter'})


def public(body):
    "Public functions and classes among the statements of `body`, under `if` and `try` too"
    for node in body:
        if isinstance(node, (ast.If, ast.Try, ast.ExceptHandler)): yield from public(ast.iter_child_nodes(node))
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not (node.name.startswith('_') or is_overload(node)): yield node


def described(trees):
    "Class name → names of its base classes, and of its methods with a docstring or a declaration"
    classes = {c.name: c for tree in trees for c in ast.walk(tree) if isinstance(c, ast.ClassDef)}
    def declared(c): return {o.target.id for o in c.body if isinstance(o, ast.AnnAssign)}      # with a comment beside it
    return {name: ({b.attr if isinstance(b, ast.Attribute) else getattr(b, 'id', '') for b in c.bases},
                   {f.name for f in public(c.body) if ast.get_docstring(f)} | declared(c)) for name, c in classes.items()}


def inherits(name, method, classes):
    "Does a base class of `name` say what `method` does?"
    bases, _ = classes.get(name, ((), ()))
    return any(method in classes.get(b, ((), ()))[1] or inherits(b, method, classes) for b in bases)


def undocumented(files):
    "What is public and has no docstring, its own or inherited, in `files` (name → text): file:line: name"
    trees = {k: ast.parse(text) for k, text in files.items()}
    classes = described(trees.values())
    for k, tree in trees.items():
        for node in public(tree.body):
            if not ast.get_docstring(node): yield f'{k}:{node.lineno}: {node.name}'
            if not isinstance(node, ast.ClassDef): continue
            for f in public(node.body):
                if not (ast.get_docstring(f) or inherits(node.name, f.name, classes)): yield f'{k}:{f.lineno}: {node.name}.{f.name}'


def test_what_is_public_has_a_docstring(root):
    wrong = list(undocumented(sources(root)))
    assert not wrong, 'no docstring:\n' + '\n'.join(wrong)


def test_a_missing_docstring_is_noticed():
    a = ('class A:\n    "Doc"\n    def f(self): pass\n    def _g(self): pass\n    def said(self): "Doc"\n'
         'def h(): pass\ntry:\n    import x\nexcept ImportError:\n    class B: pass\n')
    b = 'class C(A):\n    "Doc"\n    def said(self): pass\n    def new(self): pass\n'
    assert [o.split(': ')[1] for o in undocumented({'a': a, 'b': b})] == ['A.f', 'h', 'B', 'C.new']
