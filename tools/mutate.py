"""Change the package in one place at a time, and see whether its tests notice: `python tools/mutate.py --n 60`.

A mutant has another comparison, another sign, `or` for `and`, no `not`, or a number that is one larger. Places are
chosen by chance, by seed, as many in each module, within functions; what Numba compiles is left out, as are docstrings,
annotations and messages. No file is changed: processes of a test import the mutant in the module's place, and compiled
kernels are still valid. The tests of a module run for at most `--limit` seconds of processor time: the files that are
named after it, begin alike, or use most of it, and what the kit has for its kind.

`--tests FOLDER` takes the tests of another version, so that two runs of one seed tell what was lost between them:

    git worktree add ../before v1.2 && python tools/mutate.py --tests ../before/tests --out before.csv
    python tools/mutate.py --out after.csv --beside before.csv
"""
import argparse, ast, csv, os, random, re, signal, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIB = 'fastrl_replay'
COMPARED = {ast.Lt: ('<', '<='), ast.LtE: ('<=', '<'), ast.Gt: ('>', '>='), ast.GtE: ('>=', '>'),
            ast.Eq: ('==', '!='), ast.NotEq: ('!=', '==')}
COMPUTED = {ast.Add: ('+', '-'), ast.Sub: ('-', '+'), ast.Mult: ('*', '+'), ast.FloorDiv: ('//', '*'),
            ast.Mod: ('%', '*'), ast.Div: ('/', '*')}
MESSAGES = ('refuse', 'refusal', 'require', 'warn', '_need', '_expect', 'Words')       # calls with messages
FAR = ('interop', 'ray', 'testing', '__main__', '_modidx', '__init__', 'all')       # need other libraries, or no tests
SLOW = ('ray', 'kills', 'soak', 'install', 'docs', 'types', 'compiled', 'fakes', 'interrupts', 'notebooks', 'shim',
        'first_calls', 'kit', 'drawings')      # files of tests that are about other things, or take long
PATIENCE = 10       # seconds on the clock for each of processor time: others may be busy, or a test waits
FILES = 3           # files of tests that a mutant meets, and then the kit
KIT = dict(samplers='test_kit.py::test_every_sampler', memory='test_kit.py::test_every_memory',
           storage='test_kit.py::test_every_storage', pipes='test_kit.py::test_every_pipe')


class Mutant(NamedTuple):
    "A change of one place in a module"
    module: str
    line: int
    start: int      # in the text
    end: int
    old: str
    new: str


def compiled(node):
    return any(re.search(r'kernel|inlined|njit|jit|intrinsic', ast.unparse(d)) for d in node.decorator_list)


def places(tree):
    "The nodes of a module that may be changed"
    todo = [o for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and not compiled(f) for o in f.body]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)): continue         # has its own turn
        if isinstance(node, ast.AnnAssign):
            if node.value is not None: todo.append(node.value)
            continue
        if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)): continue
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition('.')[2] in MESSAGES: continue
        yield node
        todo += ast.iter_child_nodes(node)


def changed(node, source, at):
    "The (start, end, new text) of each way to change a node; `at`: its place in the text by line and column"
    def between(left, right, old, new):
        a, b = at(left.end_lineno, left.end_col_offset), at(right.lineno, right.col_offset)
        sign = rf'\b{old}\b' if old in ('and', 'or') else rf'(?<![<>=!*/]){re.escape(old)}(?![=*/])'
        found = re.search(sign, source[a:b])
        if found: yield a + found.start(), a + found.end(), new
    if isinstance(node, ast.Compare):
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators):
            if type(op) in COMPARED: yield from between(left, right, *COMPARED[type(op)])
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        yield from between(node.left, node.right, *COMPUTED[type(node.op)])
    elif isinstance(node, ast.BoolOp):
        old, new = ('and', 'or') if isinstance(node.op, ast.And) else ('or', 'and')
        yield from between(node.values[0], node.values[1], old, new)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield at(node.lineno, node.col_offset), at(node.operand.lineno, node.operand.col_offset), ''
    elif isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 1000:
        yield at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset), str(node.value + 1)


def mutants_of(path, name):
    "All mutants of a module, which still can be parsed"
    source = path.read_text(encoding='utf-8')
    lines = [line.encode() for line in source.splitlines(True)]
    begins = [0]
    for line in lines: begins.append(begins[-1] + len(line.decode()))
    def at(line, column): return begins[line - 1] + len(lines[line - 1][:column].decode())
    found = []
    for node in places(ast.parse(source)):
        for start, end, new in changed(node, source, at):
            try: ast.parse(source[:start] + new + source[end:])
            except SyntaxError: continue
            found.append(Mutant(name, node.lineno, start, end, source[start:end], new))
    return sorted(found, key=lambda o: (o.start, o.new))


def modules():
    "Name of each module → its file"
    files = sorted((ROOT/LIB).rglob('*.py'))
    found = {'.'.join(p.relative_to(ROOT/LIB).with_suffix('').parts): p for p in files}
    return {name: p for name, p in found.items() if not {*name.split('.')} & {*FAR}}


def chosen(n, seed, only=()):
    "`n` mutants, spread over the modules"
    rng = random.Random(seed)
    left = {name: mutants_of(p, name) for name, p in modules().items() if not only or name in only}
    for found in left.values(): rng.shuffle(found)
    names, out = [*left], []
    rng.shuffle(names)
    while len(out) < n and any(left.values()):
        for name in names:
            if left[name] and len(out) < n: out.append(left[name].pop())
    return out


def tests_of(module, folder):
    "The files of tests about a module: named after it, then those that begin alike, then those that use most of it"
    stem, part = module.rpartition('.')[2], module.partition('.')[0]
    exported = re.search(r'__all__ = \[(.*?)\]', modules()[module].read_text(encoding='utf-8'), re.S)
    names = '|'.join([stem, *re.findall(r'\w+', exported[1] if exported else '')])
    used = re.compile(rf'\b(?:{names})\b')
    word = stem.partition('_')[0].rstrip('s')
    def place(p):
        name = p.stem.removeprefix('test_')
        nearness = 2 if name.rstrip('s') == stem.rstrip('s') else len(word) > 2 and name.startswith(word)
        return -nearness, -len(used.findall(p.read_text(encoding='utf-8'))), p.name
    found = sorted((p for p in folder.glob('test_*.py') if not any(o in p.stem for o in SLOW)), key=place)
    own = [p.name for p in found][:FILES]
    return [*own, KIT[part]] if part in KIT else own


SITE = """
import os, resource
from importlib.machinery import SourceFileLoader
resource.setrlimit(resource.RLIMIT_CPU, [int(os.environ['MUTANT_SECONDS'])]*2)
get_code = SourceFileLoader.get_code
def of_mutant(self, name):
    path = self.get_filename(name)
    if path != os.environ['MUTANT_OF']: return get_code(self, name)
    with open(os.environ['MUTANT'], encoding='utf-8') as file: source = file.read()
    return compile(source, path, 'exec', dont_inherit=True)
SourceFileLoader.get_code = of_mutant
"""


def became(mutant, tests, limit):
    "Is a mutant found by the tests in a folder? 'found', 'alive', or 'slow': the time was over"
    path = modules()[mutant.module]
    source = path.read_text(encoding='utf-8')
    with tempfile.TemporaryDirectory(prefix='mutant-') as folder:
        folder = Path(folder)
        (folder/'sitecustomize.py').write_text(SITE)
        (folder/'mutant.py').write_text(source[:mutant.start] + mutant.new + source[mutant.end:], encoding='utf-8')
        env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]), MUTANT=str(folder/'mutant.py'),
                                MUTANT_OF=str(path), MUTANT_SECONDS=str(limit), OMP_NUM_THREADS='1')
        files = [str(tests/o) for o in tests_of(mutant.module, tests)]
        command = [sys.executable, '-m', 'pytest', '-x', '-q', '-p', 'no:cacheprovider', *files]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   start_new_session=True)
        try: code = process.wait(PATIENCE*limit)
        except subprocess.TimeoutExpired: code = -signal.SIGXCPU
        finally:
            try: os.killpg(process.pid, signal.SIGKILL)       # and whatever it has started
            except ProcessLookupError: pass
            process.wait()
    if code in (-signal.SIGXCPU, -signal.SIGKILL): return 'slow'
    return 'alive' if code == 0 else 'found'


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--n', type=int, default=60, help='how many mutants')
    parser.add_argument('--seed', type=int, default=0, help='which')
    parser.add_argument('--limit', type=int, default=60, help='seconds of processor time for each')
    parser.add_argument('--jobs', type=int, default=1, help='how many at a time')
    parser.add_argument('--modules', nargs='*', default=(), help='only these, such as samplers.rank')
    parser.add_argument('--tests', type=Path, default=ROOT/'tests', help='the folder of the tests')
    parser.add_argument('--out', type=Path, help='a table of what became of each (CSV)')
    parser.add_argument('--beside', type=Path, help='the table of another run: what it found, and this one did not')
    o = parser.parse_args()
    mutants, tests = chosen(o.n, o.seed, o.modules), o.tests.resolve()
    with ThreadPoolExecutor(o.jobs) as pool: ends = [*pool.map(lambda m: say(m, became(m, tests, o.limit)), mutants)]
    print(f'{ends.count("found")} of {len(ends)} mutants found, {ends.count("slow")} not decided within {o.limit:g} s')
    rows = [[m.module, m.line, m.old, m.new, end] for m, end in zip(mutants, ends)]
    if o.out:
        with o.out.open('w', newline='') as file: csv.writer(file).writerows(rows)
    if o.beside:
        with o.beside.open(newline='') as file: before = {tuple(row[:4]): row[4] for row in csv.reader(file)}
        lost = [row for row in rows if before.get(tuple(map(str, row[:4]))) == 'found' != row[4]]
        print([*before.values()].count('found'), 'were found before; of these not any more:', *lost or ['none'])


def say(mutant, end):
    print(f'{end:5} {mutant.module}:{mutant.line} {mutant.old!r} → {mutant.new!r}', flush=True)
    return end


if __name__ == '__main__': main()
