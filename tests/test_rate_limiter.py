"The rate limiter beside its definition in fractions: the corridor, standstill, threads"
import math, threading
from fractions import Fraction

import numpy as np
import pytest

from fastrl_replay.rate_limiter import RateLimiter
from refusals import refused


class Twin:
    "Reverb's conditions, as they are written down: d = (steps − min_sz)·ratio − rows must stay within ± error_buffer"
    def __init__(self, ratio, min_sz, slack):
        self.ratio, self.min_sz, self.buffer = Fraction(str(ratio)), min_sz, Fraction(str(slack))*Fraction(str(ratio))
        self.steps = self.rows = 0

    def ahead(self, steps=0, rows=0): return (self.steps + steps - self.min_sz)*self.ratio - self.rows - rows
    def may_insert(self, n): return self.ahead(steps=n) <= self.buffer
    def may_sample(self, rows): return self.steps >= self.min_sz and self.ahead(rows=rows) >= -self.buffer
    def most(self, may):
        n = 0
        while may(n + 1): n += 1
        return n


def options(rng):
    ratio = [1, 2, .1, 8, 32, Fraction(1, 3), .7, 1.5][rng.integers(8)]
    bs, min_sz = int(rng.integers(1, 9)), int(rng.integers(0, 12))
    least = float((1 + bs/Fraction(str(ratio)))/2)
    return ratio, min_sz, round(least + float(rng.integers(0, 3))*rng.random()*least + .01, 2), bs


@pytest.mark.parametrize('seed', range(20))
def test_it_agrees_with_the_definition(seed):
    rng = np.random.default_rng(seed)
    ratio, min_sz, slack, bs = options(rng)
    limiter, twin = RateLimiter(ratio, min_sz, slack, bs), Twin(ratio, min_sz, slack)
    for _ in range(150):
        assert limiter.insertable() == twin.most(twin.may_insert)
        assert limiter.sampleable() == twin.most(lambda k: twin.may_sample(k*bs))
        assert limiter.sampleable(3) == twin.most(lambda k: twin.may_sample(3*k))
        n, k = int(rng.integers(0, 4)), int(rng.integers(0, 3))
        n, k = min(n, limiter.insertable()), min(k, limiter.sampleable())
        if rng.random() < .5: k = 0
        else: n = 0
        limiter.inserted(n)
        limiter.sampled(k*bs)
        twin.steps, twin.rows = twin.steps + n, twin.rows + k*bs
        assert (limiter.n_inserted, limiter.n_sampled) == (twin.steps, twin.rows)


@pytest.mark.parametrize('seed', range(30))
def test_what_is_accepted_never_stands_still(seed):
    "Whoever may act does, in random order and in chunks; there is always somebody who may"
    rng = np.random.default_rng(seed)
    ratio, min_sz, slack, bs = options(rng)
    limiter, n = RateLimiter(ratio, min_sz, slack, bs), 1
    for chunk in range(2, 50):
        try: limiter.wait_insert(chunk, timeout=0)
        except ValueError: break
        n = chunk
    for _ in range(400):
        may = [limiter.insertable() >= n, limiter.sampleable() > 0]
        assert any(may), (ratio, min_sz, slack, bs, n)
        greedy = rng.random() < .5                        # to the very end of the corridor
        if may[0] and (not may[1] or rng.random() < .5): limiter.inserted(n*(limiter.insertable()//n if greedy else 1))
        else: limiter.sampled(bs*(limiter.sampleable() if greedy else 1))


def test_too_little_slack_is_refused_with_the_figures():
    with refused('slack'):
        RateLimiter(4, 100, 2, bs=32)
    assert RateLimiter(4, 100, 4.5, bs=32).insertable() == 104
    limiter = RateLimiter(4, 100, 10, bs=32)
    assert limiter.wait_insert(11, timeout=0)
    with refused('slack'): limiter.wait_insert(12, timeout=0)      # 99 in, 12 more do not fit
    with refused('slack'): limiter.wait_sample(0, bs=400)


def test_and_it_would_have_stood_still():
    "The definition itself, with the slack that is refused: 3 steps ahead, and nobody may go on"
    twin, limiter = Twin(1, 0, 2), RateLimiter(1, 0, 2, bs=1)
    twin.steps = limiter_steps = 2
    assert not twin.may_insert(1) and not twin.may_sample(5)
    limiter.inserted(limiter_steps)
    with pytest.raises(ValueError): limiter.wait_sample(0, bs=5)


@pytest.mark.parametrize('args,says', [
    ((0, 10, 5), 'samples_per_insert'), (('a', 10, 5), 'samples_per_insert'), ((True, 10, 5), 'samples_per_insert'), ((math.nan, 10, 5), 'samples_per_insert'),
    ((1, -1, 5), 'min_sz'), ((1, 1.5, 5), 'min_sz'), ((1, 10, -5), 'slack'), ((1, 10, None), 'slack'), ((1, 10, math.inf), 'slack'), ((1, 10, 5, 0), 'bs')])
def test_bad_options(args, says):
    with refused(says): RateLimiter(*args)


def test_bad_reports_change_nothing():
    limiter = RateLimiter(1, 10, 5)
    limiter.inserted(3)
    for call in (lambda: limiter.inserted(-1), lambda: limiter.inserted(.5), lambda: limiter.sampled(-1), lambda: limiter.sampleable(0),
                 lambda: limiter.load_state_dict({}), lambda: limiter.load_state_dict(dict(n_inserted=3, n_sampled=-1))):
        with pytest.raises(ValueError): call()
    assert limiter.state_dict() == dict(n_inserted=3, n_sampled=0)


def test_a_tenth_is_a_tenth():
    limiter = RateLimiter(.1, 0, 10)
    for _ in range(10_000):
        limiter.inserted(10)
        limiter.sampled(1)
    assert limiter.insertable() == 10 and limiter.sampleable() == 1


def test_a_state_is_taken_over():
    one, other = RateLimiter(2, 5, 9, bs=4), RateLimiter(2, 5, 9, bs=4)
    one.inserted(11)
    one.sampled(8)
    other.load_state_dict(one.state_dict())
    assert (other.insertable(), other.sampleable()) == (one.insertable(), one.sampleable()) and repr(other) == repr(one)


def test_a_timeout_is_told():
    limiter = RateLimiter(1, 2, 1)
    assert limiter.wait_sample(timeout=.01) is False
    limiter.inserted(3)
    assert limiter.wait_insert(timeout=.01) is False and limiter.wait_sample(timeout=.01) is True


@pytest.mark.parametrize('seed', range(3))
def test_threads_stay_in_the_corridor(seed):
    "Several on each side, who hold the limiter from the question to the report"
    limiter, twin, n, wrong = RateLimiter(2, 30, 12, bs=8), Twin(2, 30, 12), 400, []
    def actor():
        for _ in range(n):
            with limiter.lock:
                if not limiter.wait_insert(timeout=60): wrong.append('standstill')
                limiter.inserted()
                look()
    def learner():
        for _ in range((3*n - 30)*2//8//2):
            with limiter.lock:
                if not limiter.wait_sample(timeout=60): wrong.append('standstill')
                limiter.sampled(8)
                look()
    def look():
        twin.steps, twin.rows = limiter.n_inserted, limiter.n_sampled
        if abs(twin.ahead()) > twin.buffer and twin.steps >= 30: wrong.append((twin.steps, twin.rows))
    threads = [threading.Thread(target=o) for o in (actor, actor, actor, learner, learner)]
    for o in threads: o.start()
    for o in threads: o.join()
    assert not wrong and limiter.n_inserted == 3*n
