"""Drawing ahead in a thread: the same batches as the naive twin that draws ahead without one."""
import gc
import itertools
import threading
import time
from collections import deque

import numpy as np
import pytest
import torch

from acting import Source
from fastrl_replay.learner import DQNLearner, q_network
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.agents import EpsilonGreedy
from fastrl_replay.pipes.loaders import _Turns, make_loader
from fastrl_replay.pipes.replay import ExperienceReplay, PrioritizedReplay, RankReplay
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.uniform import Uniform
from harness import seen

import gymnasium as gym
import fastrl_replay.pipes.actors, fastrl_replay.pipes.nstep  # noqa: F401


def lagged(replay, k):
    drawn, batches = deque(), iter(replay)
    while True:
        while len(drawn) <= k:
            item = next(batches, None)
            if item is None: break
            drawn.append(item)
        if not drawn: return
        yield drawn.popleft()


class Log(ReplayMemory):
    "A memory that writes down what happens to it, in order"
    def __init__(self, *args, **kw):
        self.log = []
        super().__init__(*args, **kw)
    def sample(self, bs, fields=None):
        with self._lock:
            self.log.append('draw')
            return super().sample(bs, fields)
    def extend(self, chunk, priorities=None):
        with self._lock:
            self.log.append('put')
            return super().extend(chunk, priorities)
    def update_priorities(self, ids, td_errors):
        with self._lock:
            self.log.append('update')
            return super().update_priorities(ids, td_errors)


REPLAYS = dict(uniform=ExperienceReplay, prioritized=PrioritizedReplay, rank=RankReplay)
def make(kind, n=None, chunk=3, **kw): return REPLAYS[kind](Source(n, k=2, rows=chunk), bs=8, max_sz=64, min_sz=20, seed=0, **(dict(steps_per_batch=2) | kw))

def use(batches, n, jitter=None):
    "Learn, after a fashion, from n batches"
    out = []
    for item in itertools.islice(batches, n):
        batch = item[0] if isinstance(item, tuple) else item
        if jitter is not None: time.sleep(jitter.choice([0, 0, 1e-4, 1e-3]))
        out.append(item if isinstance(item, tuple) else batch)
        out.append(batch.update_priorities(batch.reward % 17 + len(out)))
    return out


@pytest.mark.parametrize('kind', REPLAYS)
@pytest.mark.parametrize('k', [1, 2, 5])
def test_the_same_as_without_a_thread(kind, k):
    "Random delays on both sides change nothing"
    one, other = make(kind), make(kind)
    jitter, late_by = np.random.default_rng(k), np.random.default_rng(9)
    sample = other.memory.sample
    def late(*args):
        time.sleep(float(late_by.choice([0, 1e-4, 2e-3])))
        return sample(*args)
    other.memory.sample = late
    assert seen(use(lagged(one, k), 120))==seen(use(other.loader(prefetch=k), 120, jitter))
    assert one.memory.check_valid() and other.memory.check_valid()
    assert seen(one.memory.state_dict())==seen(other.memory.state_dict()) and one.n_batches==other.n_batches==120 + k
    assert seen(one.state_dict()['rng'])==seen(other.state_dict()['rng'])


def test_the_lag_is_what_was_promised():
    "Batch i is drawn after the updates of batch i − k − 1 and before those of batch i − k"
    for k in (1, 3):
        replay = make('prioritized')
        replay.memory = Log(64, Proportional(), seed=0)
        use(replay.loader(prefetch=k), 40)
        order = [o for o in replay.memory.log if o!='put']
        for i in range(k + 1, 40):
            draw, updates = [j for j, o in enumerate(order) if o=='draw'][i], [j for j, o in enumerate(order) if o=='update']
            assert updates[i - k - 1] < draw < updates[i - k]


def test_nothing_is_lost_when_a_loop_is_left():
    one, other = make('prioritized'), make('prioritized')
    loader, twin, got, want = other.loader(prefetch=2), lagged(one, 2), [], []
    for n in (1, 4, 0, 7):
        got += use(loader, n)
        want += use(twin, n)
    assert seen(got)==seen(want)


def test_the_end_of_the_source_delivers_what_was_drawn():
    one, other = make('uniform', 60), make('uniform', 60)
    assert seen(list(lagged(one, 4)))==seen(list(other.loader(prefetch=4)))
    assert other.n_batches==1 + (60 - 20)//2


def test_indices_frozen_memories_and_other_columns():
    one, other = make('uniform', return_idxs=True), make('uniform', return_idxs=True)
    assert seen(use(lagged(one, 1), 9))==seen(use(other.loader(prefetch=1), 9))
    for o in (one, other): o.freeze_memory = True
    n = other.memory.n_added
    assert seen(use(other.loader(prefetch=1), 9)) and other.memory.n_added==n


def test_an_error_comes_with_its_batch_and_the_memory_is_free():
    class Sulky(Uniform):
        "Raises once"
        def draw_into(self, *args):
            if self.n_batches==5 and not self.raised:
                self.raised = True
                raise ArithmeticError('not today')
            return super().draw_into(*args)
    sampler = Sulky()
    sampler.raised = False
    replay = ExperienceReplay(Source(), bs=4, max_sz=50, sampler=sampler, seed=0)
    loader = replay.loader(prefetch=2)
    it, n = iter(loader), 0
    with pytest.raises(ArithmeticError, match='not today'):
        while True:
            next(it)
            n += 1
    assert n==5 and replay.memory.check_valid() and len(replay.sample(3))==3
    assert len(use(loader, 10))==20


def test_everybody_waits_for_a_promised_draw():
    replay = make('uniform')
    next(iter(replay.loader(prefetch=1)))
    turns = replay.memory._lock
    assert isinstance(turns, _Turns)
    with turns: pass                   # what is under way
    turns.made.clear()
    came = []
    others = [threading.Thread(target=lambda f=f: (f(), came.append(1)), daemon=True)
              for f in (lambda: replay.sample(2), lambda: replay.memory.recent(1), replay.state_dict, lambda: replay.update_priorities([0], [1.]), lambda: replay.extend([]))]
    for o in others: o.start()
    time.sleep(.1)
    early = list(came)
    turns.made.set()
    for o in others: o.join(20)
    assert not early and len(came)==len(others)


def test_no_buffer_is_made_anew_however_many_are_drawn_ahead():
    replay = make('uniform')
    loader = replay.loader(prefetch=8)
    for _ in itertools.islice(loader, 90): pass
    assert replay.memory._array.whole[0].n_made <= 8 + 3            # those that wait, one being filled, the learner's, and the one before it


def test_threads_end_with_their_loader():
    def count(): return sum(o.name=='prefetch' for o in threading.enumerate())
    gc.collect()
    before = count()
    loaders = [make('uniform').loader(prefetch=1) for _ in range(3)]
    for o in loaders: use(o, 3)
    assert count()==before + 3
    del loaders, o
    gc.collect()
    limit = time.monotonic() + 20
    while count() > before and time.monotonic() < limit: time.sleep(.01)
    assert count()==before


def test_wrong_arguments():
    for k in (-1, 1.5, 'two'):
        with pytest.raises(ValueError, match='prefetch'): make('uniform').loader(prefetch=k)
    with pytest.raises(ValueError, match='only a replay can draw ahead, got list'): make_loader([], prefetch=1)
    a, b = make('uniform'), make('uniform')
    assert seen(use(a.loader(prefetch=0), 5))==seen(use(iter(b), 5))


def test_training_is_the_same_each_time_and_as_without_a_thread():
    "The agent acts by the model that is being trained, in the learner's thread, at fixed points"
    def train(k, wrap):
        env = gym.make('CartPole-v1')
        model = q_network(env.observation_space, 2, hidden=16, seed=0)
        replay = (GymStepper(['CartPole-v1'], agent=EpsilonGreedy(model, .2, seed=1), seed=0).n_step(3, .99)
                  .prioritized_replay(bs=16, max_sz=500, min_sz=50, steps_per_batch=2, seed=0))
        learn = DQNLearner(model, wrap(replay, k))
        learn.fit(150)
        return learn.losses, [p.detach().numpy() for p in model.parameters()], replay.memory.n_added
    class Again:
        def __init__(self, replay, k): self.it = lagged(replay, k)
        def __iter__(self): return self.it
    threaded = [train(2, lambda r, k: r.loader(prefetch=k)) for _ in range(2)]
    assert seen(threaded[0])==seen(threaded[1])==seen(train(2, Again)) and seen(threaded[0])!=seen(train(1, Again))


def test_with_actors():
    pipe = Source(k=2).actors(2, ctx='fork', chunk=10)
    replay = PrioritizedReplay(pipe, bs=8, max_sz=500, min_sz=50, steps_per_batch=4, seed=0)
    got = use(replay.loader(prefetch=2), 50)
    pipe.close()
    pipe = Source(k=2).actors(2, ctx='fork', chunk=10)
    want = use(lagged(PrioritizedReplay(pipe, bs=8, max_sz=500, min_sz=50, steps_per_batch=4, seed=0), 2), 50)
    pipe.close()
    assert seen(got)==seen(want)


def test_where_there_is_cuda_batches_are_pinned(monkeypatch):
    "In the thread; without CUDA the call alone can be seen"
    pinned = []
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr('fastrl_replay.batch.Batch.pin_memory', lambda self: pinned.append(threading.current_thread().name) or self)
    loader = make('uniform').loader(prefetch=1)
    assert loader.pin_memory is False and len(list(itertools.islice(loader.dataset.ahead, 4)))==4
    loader.dataset.ahead.drawn[-1].result()
    assert set(pinned)=={'prefetch'}
    n = len(pinned)
    list(itertools.islice(make('uniform').loader(prefetch=1, pin_memory=False).dataset.ahead, 4))
    assert len(pinned)==n
