"""Same seed, old against new: 200 histories (histories.py) run on this tree and on another, and every id, weight and column is compared.

    python tests/same_draws.py BASE                    BASE: a commit of this repository, or a folder with a checkout
    python tests/same_draws.py BASE --kinds 'path*'    some kinds only
    python tests/same_draws.py BASE --tree FOLDER      another tree instead of the one that this file is in

Each tree runs in a process of its own, which imports the library from there. All must be equal to the bit. What differs is told once
for each kind: the operation, the part of it, and the first number; the exit status is then 1. What is meant to differ stands in
`DELIBERATE` with its reason, and is told as such; of the rest of that history everything is still compared, unless it `follows`.
As a test (test_same_draws.py) a few histories find differences that are planted."""
import argparse
import io
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from fnmatch import fnmatch
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent.parent
HISTORIES = 200


class Deliberate(NamedTuple):
    "A difference that is meant: patterns of a kind, an operation and a part of it"
    kinds: str
    operations: str
    parts: str
    why: str
    follows: bool = False        # does all that comes later in such a history follow from it?


DELIBERATE: tuple[Deliberate, ...] = (
    Deliberate('ere*', '*', '*', 'once rows were dropped, ERE draws again what may not be drawn, and lists nothing', follows=True),
    Deliberate('*', '*', 'n_drawn', 'draws are counted since a memory was made, through saves and copies'),
    Deliberate('*', 'slots', '*', 'memory[k] is slot k, and empty slots are left out, where it was the k-th that is filled'),
    Deliberate('*', 'whole', '*', 'episodes() leaves out those whose first step may be missing'),
    Deliberate('*sequences*', 'sample', '*', 'a last window that is not longer than its burn-in cannot be drawn', follows=True),
    Deliberate('pipe_sequences', 'more', '*', 'a last window that is not longer than its burn-in cannot be drawn', follows=True))
"Who changes what is drawn or stored on purpose, adds a line; it goes when BASE has the change, too"


# ---- running histories

def plain(v):
    "A value as arrays and plain Python, which needs no library to be read again"
    import torch
    if isinstance(v, torch.Tensor):
        v = v.detach().cpu()
        return plain((v.view(torch.int16) if v.dtype==torch.bfloat16 else v).numpy())
    if isinstance(v, np.ndarray): return v.tolist() if v.dtype==object else np.array(v)
    if isinstance(v, np.generic): return np.array(v)
    if hasattr(v, '_asdict'): v = v._asdict()
    if isinstance(v, dict): return {str(k): plain(o) for k, o in v.items()}
    return [plain(o) for o in v] if isinstance(v, (list, tuple)) else v


class Told(NamedTuple):
    "What came of one operation of a history"
    kind: str
    seed: int
    operation: str
    parts: dict[str, Any]


def chosen(pattern: str, n: int) -> list[tuple[str, int]]:
    "`n` histories, kinds and seeds, of the kinds that fit a pattern in turn"
    from histories import KINDS
    names = [o for o in KINDS if fnmatch(o, pattern)]
    if not names: sys.exit(f'{pattern}: no kind fits; there are {", ".join(KINDS)}')
    return [(names[i % len(names)], i//len(names)) for i in range(n)]


def record(histories) -> Iterator[Told]:
    "Run histories with the library that is imported here"
    from histories import history
    for kind, seed in histories:
        for operation, parts in history(kind, seed):
            yield Told(kind, seed, operation, {k: plain(v) for k, v in parts.items() if k!='words'})


def write(file: str, pattern: str, n: int) -> None:
    "Run histories in this process, and write what came of each operation into a file"
    import torch
    torch.set_num_threads(1)
    with open(file, 'wb') as out:
        for told in record(chosen(pattern, n)): pickle.dump(tuple(told), out)


def read(file) -> Iterator[Told]:
    "What `write` wrote"
    with open(file, 'rb') as source:
        while source.peek(1): yield Told(*pickle.load(source))


# ---- comparing

def difference(a: Any, b: Any, at: str = '') -> str | None:
    "The first difference of two values, in words; None if there is none, to the bit"
    if type(a) is not type(b): return f'{at or "it"}: {type(a).__name__} {a!r:.80} before, {type(b).__name__} {b!r:.80} now'
    if isinstance(a, np.ndarray): return _between(a, b, at)
    if isinstance(a, dict): a, b, keys = [*a.items()], [*b.items()], True
    else: keys = False
    if not isinstance(a, list): return None if a==b or a!=a and b!=b else f'{at or "it"}: {a!r:.80} before, {b!r:.80} now'
    if len(a)!=len(b): return f'{at or "it"}: {len(a)} before, {len(b)} now'
    for i, (x, y) in enumerate(zip(a, b)):
        if keys and x[0]!=y[0]: return f'{at}: {x[0]} before, {y[0]} now'
        found = difference(x[1], y[1], f'{at}.{x[0]}') if keys else difference(x, y, f'{at}[{i}]')
        if found: return found
    return None


def _between(a, b, at):
    if (a.dtype, a.shape)!=(b.dtype, b.shape): return f'{at}: {a.dtype} of shape {a.shape} before, {b.dtype} of shape {b.shape} now'
    if a.tobytes()==b.tobytes(): return None
    x, y = (np.ascontiguousarray(o).reshape(-1).view(np.uint8).reshape(a.size, -1) for o in (a, b))
    bad = np.flatnonzero((x!=y).any(1))
    k = np.unravel_index(bad[0], a.shape)
    where = f'at {", ".join(map(str, k))}' if k else ''
    return f'{at} {where} (of {len(bad)} of {a.size} that differ): {a[k]!r} before, {b[k]!r} now'.strip()


class Found(NamedTuple):
    "A difference, and whether it is meant"
    kind: str
    seed: int
    operation: str
    part: str
    words: str
    meant: Deliberate | None

    def __str__(self):
        why = f'\n    meant: {self.meant.why}' if self.meant else ''
        return f'{self.kind}, seed {self.seed}, operation {self.operation}, {self.part}: {self.words}{why}'


def compare(before, now, deliberate=DELIBERATE) -> tuple[list[Found], dict[str, int]]:
    "The differences of histories, and how many there are, operations that are equal, parts, and refusals"
    found, counts = list[Found](), dict(histories=0, operations=0, parts=0, refused=0)
    for (_, olds), (_, news) in zip(groupby(before, which), groupby(now, which), strict=True):
        counts['histories'] += 1
        for a, b in zip_longest(olds, news):
            new, one = _differences(a, b, deliberate), a or b
            found += new
            if any(o.meant is None or o.meant.follows for o in new): break            # what comes later follows from it
            counts['operations'] += not new
            counts['parts'] += len(one.parts)
            counts['refused'] += 'raises' in one.parts
    return found, counts


def which(told): return told.kind, told.seed


def _differences(a, b, deliberate):
    one = a or b
    if a is None or b is None:
        other = [o.operation if o else 'nothing' for o in (a, b)]
        return [Found(one.kind, one.seed, one.operation, 'operation', '{} before, {} now'.format(*other), None)]
    found, name = [], one.operation.split(': ')[-1]
    for part in dict.fromkeys([*a.parts, *b.parts]):
        missing = [o for o, told in (('before', a), ('now', b)) if part not in told.parts]
        words = f'missing {missing[0]}' if missing else difference(a.parts[part], b.parts[part])
        if words is None: continue
        fits = (o for o in deliberate if fnmatch(one.kind, o.kinds) and fnmatch(name, o.operations) and fnmatch(part, o.parts))
        found.append(Found(one.kind, one.seed, one.operation, part, words, next(fits, None)))
    return found


def report(found, counts, deliberate=DELIBERATE) -> bool:
    "Print what differs, the first of each kind; return whether all of it is meant"
    wrong, meant = [o for o in found if o.meant is None], [o for o in found if o.meant is not None]
    for group in (meant, wrong):
        for one in {(o.kind, o.meant): o for o in reversed(group)}.values(): print(one)
    print(f"{counts['histories']} histories, {counts['operations']} operations equal, {counts['parts']} parts compared, "
          f"{counts['refused']} refusals; {len({(o.kind, o.seed) for o in wrong})} histories differ, "
          f"{len({(o.kind, o.seed) for o in meant})} as they are meant to")
    for o in deliberate:
        if o not in [f.meant for f in meant]: print(f'not needed any more, or not seen: {o}')
    return not wrong


# ---- two trees

def checked_out(base: str, stack: ExitStack) -> Path:
    "The folder of a tree: a folder as it is, a commit as it was in a temporary one"
    if (Path(base)/'fastrl_replay').is_dir(): return Path(base).resolve()
    packed = subprocess.run(['git', '-C', HERE, 'archive', base, 'fastrl_replay'], capture_output=True)
    if packed.returncode: sys.exit(f'{base}: neither a folder with a checkout nor a commit: {packed.stderr.decode().strip()}')
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar: tar.extractall(folder, filter='data')
    return folder


def start(tree: Path, file: Path, pattern: str, n: int) -> subprocess.Popen:
    "Run histories on a tree, in a process of its own"
    env = os.environ | dict(PYTHONPATH=str(tree), OMP_NUM_THREADS='1', PYTHONDONTWRITEBYTECODE='1')
    return subprocess.Popen([sys.executable, __file__, str(tree), '--record', str(file), '--kinds', pattern, '--histories', str(n)], env=env)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('base', help='a commit, or a folder with a checkout')
    parser.add_argument('--tree', type=Path, default=HERE, help='the tree that is compared with it (this one)')
    parser.add_argument('--kinds', default='*', help='a pattern of kinds')
    parser.add_argument('--histories', type=int, default=HISTORIES, help='how many')
    parser.add_argument('--record', help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.record:
        import fastrl_replay
        assert Path(fastrl_replay.__file__).parent.parent==Path(args.base), f'another library is imported: {fastrl_replay.__file__}'
        write(args.record, args.kinds, args.histories)
        return 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trees = checked_out(args.base, stack), args.tree.resolve()
        files = folder/'before', folder/'now'
        runs = [start(tree, file, args.kinds, args.histories) for tree, file in zip(trees, files)]
        failed = [f'{tree}: its histories ended with status {run.returncode}' for tree, run in zip(trees, runs) if run.wait()]
        if failed: sys.exit('\n'.join(failed))
        found, counts = compare(*map(read, files))
    return 0 if report(found, counts) else 1


if __name__=='__main__': sys.exit(main())
