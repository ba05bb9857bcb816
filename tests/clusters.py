"What the tests on a Ray cluster share: how to wait, and what is left of a memory's actors"
import os, sys, time

import pytest

from fastrl_replay.ray.shard import NAMESPACE

ray = pytest.importorskip('ray')
WAIT = 300.                 # seconds: more than anything takes on a busy machine
WORKERS = 'ray::Shard', 'ray::Directory', 'ray::ActingWorker', 'ray::Board'


def until(met, what, seconds=WAIT):
    "Wait until `met()`; an `AssertionError` says `what` is wrong"
    limit = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < limit, what
        time.sleep(.05)


def named():
    "The names of the package's actors"
    return [o['name'] for o in ray.util.list_named_actors(all_namespaces=True) if o['namespace'] == NAMESPACE]


def read(pid, what):
    try: return open(f'/proc/{pid}/{what}').read()
    except OSError: return ''


def state_and_parent(pid): return (read(pid, 'stat').rpartition(')')[2].split() or 'X0')[:2]


def running(pid): return state_and_parent(pid)[0] not in 'ZX'


def workers(kinds=WORKERS):
    "The processes of actors of the package, which keep the names of their classes; not those of another cluster beside this one"
    found, own = [], ray.get_runtime_context().gcs_address
    for pid in filter(str.isdigit, os.listdir('/proc')):
        if not read(pid, 'cmdline').startswith(kinds): continue
        state, parent = state_and_parent(pid)
        node = read(parent, 'cmdline')
        if state not in 'ZX' and (own in node or 'raylet' not in node): found.append(int(pid))
    return found


def beside(patch):
    "Let actors import what the tests do, and run at the same priority: 15 unless told, and other tests would starve them"
    patch.setenv('PYTHONPATH', os.pathsep.join(map(os.path.abspath, sys.path)))
    patch.setenv('RAY_worker_niceness', '0')
