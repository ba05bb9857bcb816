"""Drawing ahead: the same batches as the naive twin, whatever a thread does with them afterwards; and nothing ever waits for ever."""
import collections
import contextlib
import gc
import itertools
import signal
import threading
import time
from collections import deque

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from acting import Source
from fastrl_replay.batch import Batch
from fastrl_replay.learner import DQNLearner, q_network
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.agents import EpsilonGreedy
from fastrl_replay.pipes.loader import Courier, make_loader
from fastrl_replay.pipes.replay import ExperienceReplay, PrioritizedReplay, RankReplay
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import Transition
from harness import seen

import gymnasium as gym
import fastrl_replay.pipes.actors, fastrl_replay.pipes.n_step, fastrl_replay.show  # noqa: F401
from refusals import refused
from words import WORDS


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
    def sample(self, *args):
        self.log.append('draw')
        return super().sample(*args)
    def extend(self, *args):
        self.log.append('put')
        return super().extend(*args)
    def update_priorities(self, *args):
        self.log.append('update')
        return super().update_priorities(*args)


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


MOVED = dict(kept={}, moved=dict(device='cpu'))      # `moved`: a thread of torchdata's finishes the batches; on the CPU it has nothing to do

@pytest.mark.parametrize('kind', REPLAYS)
@pytest.mark.parametrize('k', [1, 2, 5])
@pytest.mark.parametrize('how', MOVED)
def test_the_same_as_the_twin(kind, k, how):
    "Random delays change nothing"
    one, other = make(kind), make(kind)
    jitter = np.random.default_rng(k)
    assert seen(use(lagged(one, k), 120))==seen(use(other.loader(prefetch=k, **MOVED[how]), 120, jitter))
    assert one.memory.check_valid() and other.memory.check_valid()
    assert seen(one.memory.state_dict())==seen(other.memory.state_dict()) and one.n_batches==other.n_batches==120 + k
    assert seen(one.state_dict()['rng'])==seen(other.state_dict()['rng'])


@pytest.mark.parametrize('k', [0, 3])
def test_the_caller_draws_and_a_thread_finishes(k, monkeypatch):
    "The pipe is pulled, and the memory touched, by the caller alone; with k > 0 another thread moves the batches, in order"
    drawn, moved = set(), []
    monkeypatch.setattr('fastrl_replay.batch.Batch.to', lambda self, device, non_blocking=False: moved.append((self.ids.tolist(), threading.current_thread())) or self)
    replay = make('uniform')
    sample = replay.memory.sample
    replay.memory.sample = lambda *args: drawn.add(threading.current_thread()) or sample(*args)
    got = [o.ids.tolist() for o in itertools.islice(replay.loader(prefetch=k, device='cpu'), 20)]
    me = threading.current_thread()
    assert drawn=={me} and [ids for ids, _ in moved][:20]==got and {thread==me for _, thread in moved}=={k==0}


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


@pytest.mark.parametrize('how', MOVED)
def test_an_error_while_drawing_loses_no_batch(how):
    class Sulky(Uniform):
        "Raises once"
        raised = False
        def draw_into(self, *args):
            if self.n_batches==5 and not self.raised:
                self.raised = True
                raise ArithmeticError('not today')
            return super().draw_into(*args)
    replay = ExperienceReplay(Source(), bs=4, max_sz=50, sampler=Sulky(), seed=0)
    loader, got = replay.loader(prefetch=2, **MOVED[how]), []
    with pytest.raises(ArithmeticError, match='not today'):
        for batch in loader: got.append(batch)
    assert len(got)==3 and replay.memory.check_valid() and replay.n_batches==5
    got += itertools.islice(loader, 10)
    twin = ExperienceReplay(Source(), bs=4, max_sz=50, seed=0)
    assert seen([o.ids for o in got])==seen([o.ids for o in itertools.islice(twin, 13)])


def test_an_error_while_a_batch_is_moved_comes_out_and_the_loader_goes_on(monkeypatch):
    to, calls = Batch.to, itertools.count()
    def failing(self, *args, **kw):
        if next(calls)==7: raise MemoryError('the device is full')
        return to(self, *args, **kw)
    monkeypatch.setattr(Batch, 'to', failing)
    for k in (0, 2):
        calls = itertools.count()
        loader = make('uniform').loader(prefetch=k, device='cpu')
        with pytest.raises(MemoryError, match='the device is full'): list(itertools.islice(loader, 20))
        assert len(list(itertools.islice(loader, 20)))==20


def test_an_interrupt_leaves_a_loader_that_goes_on():
    "Ctrl-C at any moment, again and again: the next loop always gets its batches"
    loader, struck = make('prioritized').loader(prefetch=3, device='cpu'), 0
    def strike(*_): raise KeyboardInterrupt
    old = signal.signal(signal.SIGALRM, strike)
    try:
        for k in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + k*5e-5)
                use(loader, 300)
            except KeyboardInterrupt: struck += 1
            finally: signal.setitimer(signal.ITIMER_REAL, 0)
            assert len(use(loader, 6))==12
    finally: signal.signal(signal.SIGALRM, old)
    assert struck > 30


@pytest.mark.parametrize('how', MOVED)
def test_whatever_another_thread_asks_it_gets_an_answer(how):
    "While a loop draws ahead and updates, a second thread reads, looks, draws, adds and updates; nobody waits for ever"
    memory = ReplayMemory(64, Proportional(), seed=0)
    replay = ExperienceReplay(Source(None, k=2, rows=3), bs=8, min_sz=20, steps_per_batch=2, memory=memory)
    asked, errors, stop = collections.Counter(), [], threading.Event()
    source = Source(k=2)
    calls = dict(recent=lambda: memory.recent(5), episode=lambda: memory.episode(memory.n_added - 1), health=lambda: memory.health(), valid=lambda: memory.check_valid(),
                 state=replay.state_dict, contents=memory.state_dict, sample=lambda: replay.sample(3), add=lambda: replay.add(source.one()),
                 extend=lambda: replay.extend([source.one() for _ in range(3)]), update=lambda: replay.update_priorities([memory.n_added - 1], [1.]),
                 fetch=lambda: memory.fetch([memory.n_added - 1]), show=lambda: asked['show'] < 3 and plt.close(memory.show()))
    def ask():
        while not stop.is_set():
            for name, call in calls.items():
                try: call()
                except Exception as e: errors.append((name, e))      # noqa: BLE001
                asked[name] += 1
    use(replay.loader(), 3)
    other = threading.Thread(target=ask, daemon=True)
    other.start()
    loader, n = replay.loader(prefetch=4, **MOVED[how]), 0
    while min((asked[o] for o in calls), default=0) < 5 or n < 300: n += len(use(loader, 20))//2
    stop.set()
    other.join(60)
    assert not other.is_alive() and not [o for o in errors if 'not in the memory' not in str(o[1])] and memory.check_valid()


def test_threads_end_with_their_loader():
    gc.collect()
    before = threading.active_count()
    loaders = [make('uniform').loader(prefetch=1, device='cpu') for _ in range(3)]
    for o in loaders: use(o, 3)
    assert threading.active_count()==before + 3
    del loaders, o
    gc.collect()
    limit = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < limit: time.sleep(.01)
    assert threading.active_count()==before


def test_a_loader_that_is_never_asked_has_no_thread():
    before = threading.active_count()
    loader = make('uniform').loader(prefetch=1, device='cpu')
    assert threading.active_count()==before and len(use(loader, 2))==4


def test_wrong_arguments():
    for k in (-1, 1.5, 'two'):
        with refused('prefetch'): make('uniform').loader(prefetch=k)
    with refused('prefetch', got='1'): make('uniform').loader(prefetch=1, stateful=True)
    with pytest.raises(RuntimeError, match=WORDS['no device of this name']): make('uniform').loader(device='no such device')
    a, b = make('uniform'), make('uniform')
    assert seen(use(a.loader(prefetch=0), 5))==seen(use(iter(b), 5))


def test_training_is_the_same_each_time_and_as_without_a_thread():
    "The agent acts by the model that is being trained, at fixed points"
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


def test_any_iterable_can_be_drawn_ahead():
    batches = list(itertools.islice(make('uniform'), 7))
    assert seen(list(make_loader(batches, 3)))==seen(list(make_loader(iter(batches), 2, device='cpu')))==seen(batches) and list(make_loader([], 2))==[]


@pytest.mark.parametrize('k', [0, 1])
def test_batches_are_pinned(k, monkeypatch):
    "Where there is CUDA; without, the call alone can be seen"
    pinned = []
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr('fastrl_replay.batch.Batch.pin_memory', lambda self: pinned.append(len(self)) or self)
    list(itertools.islice(make('uniform').loader(prefetch=k).dataset, 4))
    assert not pinned
    loader = make('uniform').loader(prefetch=k, pin_memory=True)
    assert loader.pin_memory is False and len(list(itertools.islice(loader.dataset, 4)))==4 and pinned[:4]==[8]*4


@pytest.mark.skipif(torch.cuda.is_available(), reason='without CUDA')
def test_without_cuda_nothing_is_pinned_and_a_warning_says_so():
    with pytest.warns(UserWarning, match=WORDS['no CUDA']): loader = make('uniform').loader(prefetch=1, pin_memory=True)
    assert len(use(loader, 3))==6


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs CUDA')
@pytest.mark.parametrize('pin', [False, True])
@pytest.mark.parametrize('k', [0, 2])
def test_on_a_gpu(pin, k):
    one, other = make('prioritized'), make('prioritized')
    got = use(other.loader(prefetch=k, pin_memory=pin, device='cuda'), 50)
    assert all(o.state.is_cuda for o in got[::2]) and seen([o.to('cpu') if hasattr(o, 'to') else o for o in got])==seen(use(lagged(one, k), 50))


# ---- copies to a GPU, told by a CUDA that only notes what it is asked

class NotedCuda:
    "Streams and events; an event has come when `done` says so"
    def __init__(self):
        self.log, self.current, self.done, self.n_events = [], 'main', True, 0
        outer = self
        class Event:
            def __init__(self): self.k, outer.n_events = outer.n_events, outer.n_events + 1
            def query(self): return outer.done
            def record(self, stream): outer.log.append(('record', self.k, stream.name, outer.current))
        self.Event = Event
    class _Stream:
        def __init__(self, name, log): self.name, self.log = name, log
        def wait_event(self, event): self.log.append(('wait', self.name, event.k))
    def Stream(self, device): return self._Stream('copies', self.log)
    def current_stream(self, device): return self._Stream(self.current, self.log)
    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before


@pytest.fixture
def courier(monkeypatch):
    monkeypatch.setattr(Courier, 'locked', staticmethod(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)))
    made = Courier(torch.device('meta'), NotedCuda())
    monkeypatch.setattr(torch.Tensor, 'record_stream', lambda self, stream: made.cuda.log.append(('used', stream.name)))
    return made


def test_a_buffer_is_used_again_when_the_copy_from_it_is_done(courier):
    batches = list(itertools.islice(make('uniform'), 6))
    courier.cuda.done = False
    sent = [courier.send(o) for o in batches[:3]]
    assert len(courier.buffers)==3                        # none is overwritten on its way
    for (raw, _), batch in zip(courier.buffers, batches):
        block = []
        batch.moved(lambda t, block=block: block.append(t) or t)
        assert torch.equal(raw, block[0])
    courier.cuda.done = True
    sent += [courier.send(o) for o in batches[3:]]
    assert len(courier.buffers)==3 and all(o[0].state.device.type=='meta' for o in sent)
    assert seen([o[0].ids.shape for o in sent])==seen([o.ids.shape for o in batches])


def test_copies_have_a_stream_of_their_own_for_which_that_of_the_caller_waits(courier):
    batch = next(iter(make('uniform')))
    changed = batch.replace(reward=batch.reward*2)        # no longer in one buffer
    for item, n_copies in (batch, 1), ((batch, torch.arange(8)), 2), (changed, None):
        log = courier.cuda.log
        log.clear()
        sent = courier.send(item)
        assert {o[2:] for o in log}=={('copies', 'copies'), ('copies', 'main')} and [o[0] for o in log]==['record']*len(log)
        assert n_copies in (None, len(sent[1])) and len(log)==len(sent[1]) + 1
        arrived = log[-1][1]
        log.clear()
        found = courier.receive(sent)
        assert log==[('wait', 'main', arrived), *[('used', 'main')]*len(sent[1])]
        assert type(found) is type(item) or isinstance(found, Batch)


@pytest.mark.parametrize('k', [0, 2])
def test_a_thread_sends_and_the_caller_receives(k, monkeypatch):
    log, me = [], threading.current_thread()
    class Noted:
        def __init__(self, device): log.append(device)
        def send(self, item): return log.append(('send', threading.current_thread() is me)) or (item, item)
        def receive(self, sent): return log.append(('receive', threading.current_thread() is me)) or sent[0]
    monkeypatch.setattr('fastrl_replay.pipes.loader.Courier', Noted)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    one, other = make('prioritized'), make('prioritized')
    got = use(other.loader(prefetch=k, pin_memory=True, device='cuda:0'), 20)
    assert seen(got)==seen(use(lagged(one, k), 20))
    assert log[0]==torch.device('cuda', 0) and {*log[1:]}=={('send', k==0), ('receive', True)}


def test_options_of_a_dataloader_are_obeyed():
    "Without them nothing lies between the pipe and the loop; with them it is torch's own"
    torch.manual_seed(0)
    alone = torch.rand(2)
    torch.manual_seed(0)
    replay = ExperienceReplay([], bs=2, max_sz=4, seed=0)
    states, flags = np.zeros((4, 2), np.float32), np.zeros(4, bool)
    replay.extend(Transition(states, np.arange(4), np.zeros(4), states, flags, flags))
    replay.freeze_memory = True
    plain = replay.loader()
    assert isinstance(plain, DataLoader) and plain.batch_size is None and plain.num_workers==0
    assert isinstance(next(iter(plain)), Batch)
    collated = replay.loader(collate_fn=lambda batch: (type(batch), len(batch)))
    for kind, n in itertools.islice(collated, 3): assert issubclass(kind, Batch) and n == 2
    assert torch.equal(torch.rand(2), alone)             # nobody else's numbers changed
