"A signal in the first call of a kernel leaves Numba whole, wherever it strikes; later calls pay nothing for that"
import os
import random
import signal
import subprocess
import sys
import threading

import pytest

from fastrl_replay import kernel_cache
from fastrl_replay.kernels import kernel


@pytest.fixture(scope='module')
def env(root, tmp_path_factory): return os.environ | dict(PYTHONPATH=str(root), NUMBA_CACHE_DIR=str(tmp_path_factory.mktemp('kernels')))


def strike(root, env, cache, company, n):
    "How the processes ended that were struck at `n` lines, drawn from all of the first calls, and which these were"
    def told(*lines):
        ran = subprocess.run([sys.executable, root/'tests'/'first_calls.py', cache, company, *map(str, lines)], env=env, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.split(), ran.stderr
    told()                                                    # fills the cache
    (n_lines,), _ = told()
    assert int(n_lines) > 10_000
    lines = sorted(random.Random(0).sample(range(1, int(n_lines)*9//10), n))
    ends, errors = told(*lines)
    return [(end, line) for end, line in zip(ends, lines, strict=True) if end != 'fine'], errors


@pytest.mark.parametrize('cache, company, n', [('warm', 'alone', 30), ('warm', 'beside', 30), ('cold', 'alone', 12), ('cold', 'beside', 12)])
def test_a_signal_at_any_line_of_the_first_calls(root, env, cache, company, n):
    wrong, errors = strike(root, env, cache, company, n)
    assert not wrong, (wrong, errors[-3000:])


class Struck(Exception): pass


@pytest.fixture
def handler():
    "Counts SIGUSR1 and raises, if it is told to"
    state = dict(calls=0, raises=False)
    def handle(number, frame):
        state['calls'] += 1
        if state['raises']: raise Struck
    state['handle'], before = handle, signal.signal(signal.SIGUSR1, handle)
    yield state
    assert signal.getsignal(signal.SIGUSR1) is handle
    signal.signal(signal.SIGUSR1, before)


def strike_now(): os.kill(os.getpid(), signal.SIGUSR1)


def test_each_signal_comes_once_and_later(handler):
    "Those that do not raise too, in their order, after one that does"
    order = []
    before = signal.signal(signal.SIGUSR2, lambda *_: order.append('second'))
    def call():
        strike_now()
        os.kill(os.getpid(), signal.SIGUSR2)
        strike_now()
        order.append(handler['calls'])
    handler['raises'] = True
    with pytest.raises(Struck): kernel_cache._undisturbed(call)()
    assert order == [0, 'second'] and handler['calls'] == 1
    signal.signal(signal.SIGUSR2, before)


def test_what_is_returned_and_raised(handler):
    assert kernel_cache._undisturbed(lambda a, b: a - b)(5, b=3) == 2
    with pytest.raises(ZeroDivisionError): kernel_cache._undisturbed(lambda: 1/0)()


def test_one_within_another(handler):
    inner = kernel_cache._undisturbed(strike_now)
    def outer():
        inner()
        assert handler['calls'] == 0
    kernel_cache._undisturbed(outer)()
    assert handler['calls'] == 1


def test_other_threads_need_no_handlers(handler):
    "Which they may not set"
    found = []
    thread = threading.Thread(target=lambda: found.append(kernel_cache._undisturbed(lambda: 3)()))
    thread.start()
    thread.join()
    assert found == [3]


def test_a_signal_at_any_line_of_the_waiting_itself(handler):
    "It is raised once, early or late, and the next one comes through"
    handler['raises'], struck, line = True, True, 0
    while struck:
        line, seen = line + 1, 0
        def trace(frame, event, arg, at=line):
            nonlocal seen
            if frame.f_code.co_filename != kernel_cache.__file__: return None
            seen += event == 'line'
            if event == 'line' and seen == at: strike_now()
            return trace
        sys.settrace(trace)
        try: kernel_cache._undisturbed(lambda: 3)()
        except Struck: assert seen >= line
        finally: sys.settrace(None)
        struck = seen >= line
        assert handler['calls'] == struck
        with pytest.raises(Struck): strike_now()
        handler['calls'] = 0
        signal.signal(signal.SIGUSR1, handler['handle'])       # one that came while handlers were put back leaves `_note`
    assert line > 10


@kernel
def plus_one(x): return x + 1


def test_later_calls_pass_none_of_it(monkeypatch):
    assert plus_one(1) == 2
    monkeypatch.setattr(kernel_cache._Waiting, 'hold', lambda _: pytest.fail('a later call'))
    assert plus_one(2) == 3
    with pytest.raises(pytest.fail.Exception): plus_one(2.5)           # the first call with a float
