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


def running(pid):
    try: return open(f'/proc/{pid}/stat').read().split()[2] not in 'ZX'
    except OSError: return False


def workers(kinds=WORKERS):
    "The processes of actors of the package; each keeps the name of its class"
    found = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try: name = open(f'/proc/{pid}/cmdline').read()
        except OSError: continue
        if name.startswith(kinds) and running(pid): found.append(int(pid))
    return found


def beside(patch):
    "Let actors import what the tests do, and run at the same priority: 15 unless told, and other tests would starve them"
    patch.setenv('PYTHONPATH', os.pathsep.join(map(os.path.abspath, sys.path)))
    patch.setenv('RAY_worker_niceness', '0')
