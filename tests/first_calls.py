"""Processes that get SIGINT in the first call of a kernel, and then use kernels again. Run as a script, it takes
`COLD|warm ALONE|beside LINE LINE ...` and prints how each process ended, in the order of the lines.

cold: nothing is cached. beside: a thread waits beside the call; a signal that the main thread blocks then reaches it."""
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np

from fastrl_replay.kernel_cache import kernel_folder
from fastrl_replay.samplers import rng

ENDS = {0: 'fine', 1: 'broken', 2: 'not struck', -signal.SIGALRM: 'hung'}
SECONDS = 100            # of a process that seems to hang


def use():
    "The first calls of two kernels"
    words = rng.Rng(0).words.copy()
    return rng.unit(words), int(rng.below(words, np.uint64(10)))


def run_to(line, call):
    "Call; at its `line`-th line of Python comes a signal. Return whether it was interrupted, and how many lines there were"
    seen = 0
    def trace(frame, event, arg):
        nonlocal seen
        seen += event == 'line'
        if event == 'line' and seen == line: os.kill(os.getpid(), signal.SIGINT)
        return trace
    sys.settrace(trace)
    try: call()
    except KeyboardInterrupt: return True, seen
    finally: sys.settrace(None)
    return False, seen


def struck(line, beside):
    "In a process of its own: 0, if kernels work after an interrupt, in this thread and in another"
    if beside: threading.Thread(target=threading.Event().wait, daemon=True).start()
    if not run_to(line, use)[0]: return 2
    found = []
    thread = threading.Thread(target=lambda: found.append(use()))
    thread.start()
    thread.join()
    return int(found != [use()])


def in_a_fork(function):
    "Call it in a fork; return how that ended"
    child = os.fork()
    if child: return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        signal.alarm(SECONDS)
        code = function()
    except BaseException as e: print(f'{type(e).__name__}: {e}'[:300], file=sys.stderr)           # noqa: BLE001
    finally: os._exit(code)


def count():
    "Print how many lines the first calls have"
    print(run_to(0, use)[1], flush=True)
    return 0


def main(cache, company, *lines):
    for line in lines or [None]:
        if cache == 'cold':
            for file in Path(kernel_folder()).rglob('*.nb?'): file.unlink()
        if line is None: in_a_fork(count)
        else: print(ENDS.get(in_a_fork(lambda: struck(int(line), company == 'beside')), 'crashed'), flush=True)


if __name__ == '__main__': main(*sys.argv[1:])
