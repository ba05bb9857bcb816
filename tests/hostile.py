"""Folders of strangers: saved states mutated, their checksums mended, each loaded in a process of its own.

`attack(folder, load, n)` makes `n` mutants of the state saved in `folder` and calls `load(mutant)` in a forked child for each: no signal, no
hang, no error but those of `refusals`, no file outside the mutant's folder opened, made or removed. `load` should use what it loads (sample,
add, `check_valid`). Run it once before, so that kernels are compiled and modules imported."""
import base64
import copy
import faulthandler
import os
import pickle
import resource
import shutil
import signal
import sys
import traceback
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fastcore.xdg import xdg_cache_home

from fastrl_replay.saving import MANIFEST, CheckpointError, manifest_bytes, read_manifest

SECONDS, ROOM = 30, 2 << 30         # for a child: until the alarm, and bytes that it may allocate
HUGE = [2**70, 2**63, 2**63 - 1, 2**62, 2**40, 2**32, 2**31, -1, -2**31, -2**63, 1e308, float('nan'), float('inf')]
WORDS = [0, 1, 2**7, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 0x7ff8 << 48]
NAMES = ['../outside.npy', '/etc/passwd', '..', '.', 'a/b.npy', 'C:\\x.npy', '\x00', '\ud800', '', 'manifest.json', '1'*5000]
DTYPES = ['|O', '<f8', '<c16', '|V8', '<U4', '|b1', '>i2', '<M8[s]', 'float64', 'f8,f8', '(999999999,)<f8', '__import__("os").abort()']
TREES = [[], {}, [[]], {'!file': '../outside.npy'}, {'!tuple': [1]}, {'!tuple': 3}, {'!pairs': [[[], 1]]}, {'!what': 1}, {'!file': []},
         {'!tensor': [{'!array': ['|u1', [8], 'AAAAAAAAAAA=']}, 'float32', [2]]}, {'!tensor': [[1, 2], 'load', [-1]]}, {'!array': 3},
         {'!array': ['<f8', [2**40, 2**40], '']}, {'!array': ['|O', [1], 'AAAAAAAAAAA=']}, {'!array': ['<i8', [-1], 'AAAAAAAAAAA=']}]


def nested(depth):
    "Brackets in brackets"
    v = 0
    for _ in range(depth): v = [v]
    return v


def places(v, at=()):
    "Every place in a manifest: tuples of keys and positions"
    if at: yield at
    kids = v.items() if isinstance(v, dict) else enumerate(v) if isinstance(v, list) else ()
    for k, o in kids: yield from places(o, (*at, k))


def value_at(v, at):
    for k in at: v = v[k]
    return v


def other_value(old, rng, anything):
    "Something else in place of `old`: often of the same kind"
    near = []
    if type(old) in (int, float) and rng.random() < .6: near = [old + 1, old - 1, -old, 2*old, old//2 if old==old else 0, 0, str(old), float(old), bool(old)]
    elif isinstance(old, str) and rng.random() < .6:
        k = int(rng.integers(len(old) + 1))
        near = [old[:k] + old[k + 1:], old[:k] + chr(int(rng.integers(1, 300))) + old[k:], old[::-1], old*3, *NAMES, *DTYPES]
    elif isinstance(old, list) and old and rng.random() < .6: near = [old[1:], old*2, old[::-1], old*10_000 if len(str(old)) < 50 else old + old[:1], {}]
    pool = near or [*HUGE, None, True, False, 0, 1, *NAMES, *DTYPES, *TREES, nested(20), nested(200), anything]
    return copy.deepcopy(pool[int(rng.integers(len(pool)))])


def mutate(manifest, rng):
    "Change something, somewhere: values, keys, the order, or what lies in an array that is part of the manifest"
    everywhere = list(places(manifest))
    at = everywhere[int(rng.integers(len(everywhere)))]
    holder, old = value_at(manifest, at[:-1]), value_at(manifest, at)
    what = rng.random()
    if what < .12: del holder[at[-1]]
    elif what < .2 and isinstance(holder, dict): holder[str(other_value(at[-1], rng, 'x'))] = holder.pop(at[-1])
    elif what < .3 and at[-1]=='!array' and isinstance(old, list) and len(old)==3: old[2] = shuffled_text(old[2], rng)
    else: holder[at[-1]] = other_value(old, rng, value_at(manifest, everywhere[int(rng.integers(len(everywhere)))]))


def extremes(raw, rng):
    "Bytes of an array with some of its words replaced"
    raw = bytearray(raw)
    for _ in range(int(rng.integers(1, 4))):
        size = int(rng.choice([1, 2, 4, 8]))
        if len(raw) < size: continue
        k = int(rng.integers(len(raw)//size))*size
        raw[k:k + size] = WORDS[int(rng.integers(len(WORDS)))].to_bytes(8, 'little')[:size]
    return bytes(raw)


def shuffled_text(text, rng):
    try: return base64.b64encode(extremes(base64.b64decode(text), rng)).decode()
    except (ValueError, TypeError): return text


def mutate_file(folder, manifest, rng):
    "Change an array or its header, and mend its size and checksum"
    files = [(part['files'], name) for part in (manifest['state'], *manifest['pieces']) for name in part['files']]
    if not files: return mutate(manifest, rng)
    table, name = files[int(rng.integers(len(files)))]
    raw = (folder/name).read_bytes()
    head, body = raw[:128], raw[128:]
    if rng.random() < .3:
        old, new = [(b'(', b'(-'), (b',)', b'999999,)'), (b'<', b'>'), (b"'<f", b"'|O"), (b'False', b'True '), (b'{', b'{{'), (b'1', b'9'),
                    (b'descr', b'desc\xff'), (b'(', b'('*60), (b'\x93', b'PK\x03\x04'), (b'{', b'-'*100)][int(rng.integers(11))]
        head = head.replace(old, new, 1)[:128]
    else: body = extremes(body, rng)
    if rng.random() < .1: body = body[:int(rng.integers(len(body) + 1))]
    (folder/name).write_bytes(head + body)
    table[name] = [len(head + body), zlib.crc32(head + body)]


def make_mutant(folder, to, seed):
    "A copy of `folder` that is mutated; what was changed is in its manifest only, or in a file too"
    rng = np.random.default_rng(seed)
    shutil.copytree(folder, to)
    manifest = read_manifest(to/MANIFEST)
    for _ in range(int(rng.integers(1, 4))):
        if rng.random() < .25 and isinstance(manifest.get('state'), dict):
            try: mutate_file(to, manifest, rng)
            except (LookupError, TypeError, AttributeError, OSError, ValueError): mutate(manifest, rng)
        else: mutate(manifest, rng)
    (to/MANIFEST).write_bytes(manifest_bytes(manifest))


READABLE = [str(Path(o).resolve()) for o in (sys.prefix, sys.base_prefix, Path(__file__).parent.parent, '/proc', '/sys', '/dev', '/usr/lib', '/lib')]
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
TOUCHING = ('os.remove', 'os.rename', 'os.mkdir', 'os.rmdir', 'os.link', 'os.symlink', 'os.truncate', 'os.chmod', 'shutil.', 'subprocess.', 'os.system',
            'os.exec', 'os.fork', 'os.posix_spawn', 'pickle.find_class', 'socket.')


def watch(folder):
    "From here on this process exits with status 4 if it touches a file outside `folder`"
    folder, caches = str(Path(folder).resolve()), [os.environ.get('NUMBA_CACHE_DIR') or xdg_cache_home()/'fastrl_replay']
    def is_in(path, *folders):
        path = os.path.realpath(os.fsdecode(path))
        return any(path==o or path.startswith(o + os.sep) for o in map(os.path.realpath, folders))
    def hook(event, args):
        bad = event.startswith(TOUCHING) and not (args and isinstance(args[0], (str, bytes)) and is_in(args[0], folder, *caches))
        if event=='open' and isinstance(args[0], (str, bytes)):
            is_written = bool(args[2] & WRITING) if args[1] is None else bool(set(args[1]) & set('wax+'))
            bad = not is_in(args[0], folder, *caches, *(() if is_written else READABLE))
        if bad:
            os.write(2, f'outside the folder: {event} {args!r:.200}\n'.encode())
            os._exit(4)
    sys.addaudithook(hook)


def in_a_child(folder, load, refusals, log):
    "What becomes of loading `folder` in a child: 'loaded', 'refused', or what went wrong"
    pid = os.fork()
    if pid==0:
        code = 3
        try:
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, 2)
            faulthandler.enable(2)
            signal.alarm(SECONDS)
            with open('/proc/self/statm') as f: used = int(f.read().split()[0])*resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.getrlimit(resource.RLIMIT_AS)[1]))
            watch(folder)
            try:
                load(folder)
                code = 0
            except refusals as e: code = 1 if str(e) else 3
        except BaseException: os.write(2, traceback.format_exc(limit=-8).encode())    # noqa: BLE001   (whatever it is, it is told)
        finally: os._exit(code)
    status = os.waitpid(pid, 0)[1]
    said = Path(log).read_text(errors='replace')[-2000:]
    if os.WIFSIGNALED(status): return f'signal {signal.Signals(os.WTERMSIG(status)).name}: {said}'
    return {0: 'loaded', 1: 'refused', 4: f'touched {said}'}.get(os.WEXITSTATUS(status), f'failed: {said}')


def files_in(folder): return {p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob('*'))}


def attack(folder, load, n, work, refusals=(CheckpointError,), seed=0):
    """Load `n` mutants of the state saved in `folder` within the folder `work`, and count what became of them.

    An `AssertionError` tells of the mutants that did harm; they are left in `work`."""
    work, counts, harm = Path(work), Counter(), {}
    (work/'outside.npy').write_bytes(b'not yours')
    log = work/'log'
    log.touch()
    for k in range(n):
        mutant = work/f'mutant{k}'
        make_mutant(folder, mutant, [seed, k])
        before = files_in(work) if k % 50==0 else None
        became = in_a_child(mutant, load, refusals, log)
        if before is not None:
            after = files_in(work)
            others = {name for name in before.keys() | after.keys() if before.get(name)!=after.get(name)} - {'log'}
            if not all(o.startswith(mutant.name) for o in others): became = f'changed {others}'
        counts[became if became in ('loaded', 'refused') else 'harm'] += 1
        if became in ('loaded', 'refused'): shutil.rmtree(mutant)
        else: harm[mutant.name] = became
    told = '\n'.join(f'{k}: {v}' for k, v in harm.items())
    assert not harm, f'{len(harm)} of {n} mutants did harm:\n{told[:6000]}'
    assert (work/'outside.npy').read_bytes()==b'not yours'
    return counts


def rewrite(path, change):
    "Replace values in the manifest at `path`, and mend its checksum"
    path.write_bytes(manifest_bytes(read_manifest(path) | change))


def no_pickle(monkeypatch):
    "Whatever is unpickled fails the test"
    for name in ('load', 'loads', 'Unpickler'): monkeypatch.setattr(pickle, name, lambda *_: pytest.fail('unpickled something'))


def forge(folder, change):
    "The same saved state with another manifest, checksum and all: `change(manifest)`"
    manifest = read_manifest(folder/MANIFEST)
    change(manifest)
    (folder/MANIFEST).write_bytes(manifest_bytes(manifest))


def setter(*path, value):
    "A change for `forge`: what lies at `path` becomes `value`"
    def change(manifest): value_at(manifest, path[:-1])[path[-1]] = value
    return change
