"""Drawing ahead: the same batches as the naive twin, whatever a thread does with them afterwards; and nothing ever waits for ever."""
import collections
import contextlib
import copy
import gc
import itertools
import pickle
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
from fastrl_replay.batch import Underway
from fastrl_replay.mixed import MixedMemory
from fastrl_replay.pipes.agents import EpsilonGreedy
from fastrl_replay.pipes.loader import Ahead, Courier, make_loader
from fastrl_replay.pipes.replay import ExperienceReplay, PrioritizedReplay, RankReplay
from fastrl_replay.pipes.sequences import SequenceReplay
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import Layout, Transition
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
@pytest.mark.parametrize('k,how', [(1, 'moved'), (5, 'kept')])
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


# ---- to a GPU and back, told by a CUDA that only notes what it is asked

class NotedCuda:
    "Streams and events; an event has come when `done` says so"
    def __init__(self):
        self.log, self.current, self.done, self.n_events = [], 'main', True, 0
        outer = self
        class Event:
            def __init__(self): self.k, outer.n_events = outer.n_events, outer.n_events + 1
            def query(self): return outer.done
            def record(self, stream): outer.log.append(('record', self.k, stream.name, outer.current))
            def synchronize(self): outer.log.append(('synchronize', self.k))
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


class Locked:
    "Page-locked memory that is none: what was made, and how often something was copied there first"
    def __init__(self): self.made, self.n_copied = [], 0
    def __call__(self, n, dtype=np.uint8):
        self.made.append(np.empty(n, dtype))
        return self.made[-1]
    def has(self, t):
        at = t.data_ptr()
        return any(o.ctypes.data <= at < o.ctypes.data + o.nbytes for o in self.made)
    def like(self, t):
        self.n_copied += 1
        return torch.empty_like(t, device='cpu')


@pytest.fixture
def locked(monkeypatch):
    made = Locked()
    monkeypatch.setattr('fastrl_replay.pipes.loader.page_locked', made)
    monkeypatch.setattr(Courier, 'is_locked', staticmethod(made.has))
    monkeypatch.setattr(Courier, 'locked_like', staticmethod(made.like))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    return made


@pytest.fixture
def courier(locked, monkeypatch):
    made = Courier(torch.device('meta'), cuda=NotedCuda())
    monkeypatch.setattr(torch.Tensor, 'record_stream', lambda self, stream: made.cuda.log.append(('used', stream.name)))
    return made


@pytest.fixture
def near(locked, monkeypatch):
    "The cuda of couriers whose device is the CPU, as if that were elsewhere"
    cuda = NotedCuda()
    class Near(Courier):
        def __init__(self, device, late): super().__init__(torch.device('cpu'), late, cuda)
        def is_there(self, t): return False
    monkeypatch.setattr('fastrl_replay.pipes.loader.Courier', Near)
    monkeypatch.setattr(torch.Tensor, 'record_stream', lambda self, stream: None)
    return cuda


KINDS = dict(uniform=lambda: make('uniform'), prioritized=lambda: make('prioritized'), rank=lambda: make('rank'),
             fields=lambda: ExperienceReplay(Source(k=2, rows=3), bs=8, max_sz=64, min_sz=20, seed=0, windows={'state': (-1, 0)}),
             sequences=lambda: SequenceReplay(Source(k=2, rows=3), length=4, bs=8, max_sz=64, min_sz=40, seed=0),
             pairs=lambda: make('prioritized', return_idxs=True),
             mixed=lambda: ExperienceReplay(Source(k=2, rows=3), bs=8, min_sz=20, memory=MixedMemory([ReplayMemory(64, seed=0), ReplayMemory(64, Proportional(), seed=1)], shares=(1., 0.), seed=0)))
GPU = dict(pin_memory=True, device='cuda:0')


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('k', [0, 2])
def test_rows_are_gathered_straight_into_page_locked_memory(kind, k, near, locked):
    "Nothing is copied on the host, few requests are made, and the batches are the twin's"
    one, other = KINDS[kind](), KINDS[kind]()
    wanted, n_made = lagged(one, k), 0
    for i, batch in enumerate(itertools.islice(other.loader(prefetch=k, **GPU), 60)):
        assert seen(batch)==seen(next(wanted))
        if i==20: n_made = len(locked.made)
    n_sent = 60 + k if kind=='pairs' else 0              # of slots, a tensor of their own
    assert n_sent - k <= locked.n_copied <= n_sent and len(locked.made)==n_made <= 2*(k + 4)


def test_requests_that_were_there_before_are_no_obstacle(near, locked):
    "A batch drawn without a loader lies in ordinary memory; its request is not filled for the loader"
    replay = make('uniform')
    before = next(iter(replay))
    assert not locked.has(before.state) and not locked.made
    del before
    assert all(locked.has(o.state) for o in itertools.islice(replay.loader(**GPU), 9)) and not locked.n_copied
    assert not locked.has(replay.memory.sample(8).state) and all(locked.has(o.state) for o in itertools.islice(replay.loader(**GPU), 9))


def test_a_batch_is_not_overwritten_on_its_way(courier, locked):
    "However many are sent before the first has arrived; then their memory is used again"
    batches, snapshots = iter(Ahead(make('uniform'), allocate=locked)), []
    courier.cuda.done = False
    for _ in range(7):
        batch = next(batches)
        snapshots.append(batch._raw.copy())
        courier.send(batch)
        del batch
    assert len(locked.made)==7 and not locked.n_copied
    for (_, [source]), bits in zip(courier.sent, snapshots): assert source.numpy().tobytes()==bits.tobytes()
    courier.cuda.done = True
    for _ in range(20): assert courier.send(next(batches))[0].state.device.type=='meta'
    assert len(courier.sent)==1 and len(locked.made) <= 8          # one draw came before the first look at an event


def test_copies_have_a_stream_of_their_own_for_which_that_of_the_caller_waits(courier, locked):
    batch = next(iter(make('uniform')))
    changed = batch.replace(reward=batch.reward*2)        # no longer in one buffer
    for item, n_copies in (batch, 1), ((batch, torch.arange(8)), 2), (changed, None):
        log, locked.n_copied = courier.cuda.log, 0
        log.clear()
        sent = courier.send(item)
        assert [o[0] for o in log]==['record'] and log[0][2:]==('copies', 'main')
        assert n_copies in (None, len(sent[1])) and locked.n_copied==len(sent[1])        # none of it was drawn into locked memory
        arrived = log[-1][1]
        log.clear()
        found = courier.receive(sent)
        assert log==[('wait', 'main', arrived), *[('used', 'main')]*len(sent[1])]
        assert type(found) is type(item) or isinstance(found, Batch)


@pytest.mark.parametrize('k', [0, 2])
def test_a_thread_sends_and_the_caller_receives(k, monkeypatch, locked):
    log, me = [], threading.current_thread()
    class Noted:
        def __init__(self, device, late): log.append((device, late))
        def send(self, item): return log.append(('send', threading.current_thread() is me)) or (item, item)
        def receive(self, sent): return log.append(('receive', threading.current_thread() is me)) or sent[0]
    monkeypatch.setattr('fastrl_replay.pipes.loader.Courier', Noted)
    one, other = make('prioritized'), make('prioritized')
    got = use(other.loader(prefetch=k, late=3, **GPU), 20)
    assert seen(got)==seen(use(lagged(one, k), 20))
    assert log[0]==(torch.device('cuda', 0), 3) and {*log[1:]}=={('send', k==0), ('receive', True)}


def test_batches_that_are_there_already_stay_as_they_are():
    "Those of a `DeviceMemory` on the same device, whose TD errors it takes itself"
    ids = torch.arange(3)
    batch = Batch.of_tensors(Layout.of(Transition(np.zeros(2), 0, 0., np.zeros(2), False, False)),
                             [torch.zeros(3, 2), ids, torch.zeros(3), torch.zeros(3, 2), ids > 5, ids > 5], ids=ids)
    courier = Courier(torch.device('cpu'), cuda=NotedCuda())
    found, copies, _ = courier.send((batch, ids))
    assert found[0] is batch and not copies


# ---- TD errors that come later than the next draw

def errors_of(batch, i): return (batch.reward % 17 + i)*(batch.ids >= 0)

def later(replay, k, late, n):
    "The twin: TD errors are kept, and taken just before the draw that is `late` draws after the next, by hand"
    memory, kept, out, n_drawn = replay.memory, deque(), [], 0
    draw = memory.sample
    def sample(*args):
        nonlocal n_drawn
        while late and kept and kept[0][0] + late <= n_drawn: memory.update_priorities(*kept.popleft()[1:])
        n_drawn += 1
        return draw(*args)
    memory.sample = sample
    for i, batch in enumerate(itertools.islice(lagged(replay, k), n)):
        out.append(batch.ids.tolist())
        if late: kept.append((n_drawn, batch.ids.clone(), errors_of(batch, i)))
        else: batch.update_priorities(errors_of(batch, i))
    del memory.sample
    for _, *what in kept: memory.update_priorities(*what)
    return out


LATER = dict(prioritized=lambda: make('prioritized'), rank=lambda: make('rank'),
             sequences=lambda: SequenceReplay(Source(k=2, rows=3), length=4, bs=8, max_sz=64, min_sz=40, alpha=.9, seed=0))

@pytest.mark.parametrize('kind', LATER)
@pytest.mark.parametrize('k,late', [(0, 0), (0, 1), (1, 1), (3, 2), (3, 5)])
def test_td_errors_are_taken_at_the_draw_that_was_promised(kind, k, late, near):
    "Before that, nobody waits for them; a saved state has all"
    one, other, out = LATER[kind](), LATER[kind](), []
    for i, batch in enumerate(itertools.islice(other.loader(prefetch=k, late=late, **GPU), 60)):
        out.append(batch.ids.tolist())
        assert (batch.update_priorities(errors_of(batch, i))==0) is (late > 0)
        waited = sum(o[0]=='synchronize' for o in near.log)
        assert waited==(max(0, i - late) if late else 0)
    assert out==later(one, k, late, 60)
    assert seen(one.memory.state_dict())==seen(other.memory.state_dict())
    assert sum(o[0]=='synchronize' for o in near.log)==60*(late > 0)


def test_the_copy_back_lies_in_the_stream_of_the_caller(near):
    replay = make('prioritized')
    batch = next(iter(replay.loader(**GPU)))
    near.log.clear()
    near.current = 'learner'
    batch.update_priorities(torch.ones(8, requires_grad=True)*2)
    assert near.log==[('record', near.n_events - 1, 'learner', 'learner')]


def prioritized_with(td):
    "A memory, TD errors of its row 3 that are underway, and the log of who waits for them"
    memory = ReplayMemory(16, Proportional(), seed=0)
    for _, step in zip(range(16), Source()): memory.add(step) if not isinstance(step, list) else memory.extend(step)
    log = []
    class Event:
        def synchronize(self): log.append('waits')
    assert memory.update_priorities([3], Underway(torch.tensor(td), Event(), 1))==0
    return memory, log

def priority(memory): return float(memory.sampler.priorities[3])


SETTLED = dict(state=lambda m, d: m.state_dict(), save=lambda m, d: m.save(d), copy=lambda m, d: copy.deepcopy(m), pickle=lambda m, d: pickle.dumps(m))

@pytest.mark.parametrize('how', SETTLED)
def test_whatever_saves_or_copies_waits_for_all(how, tmp_path):
    memory, log = prioritized_with([50.])
    assert priority(memory) < 50 and not log                    # looking at the sampler does not
    found = SETTLED[how](memory, tmp_path/'saved')
    assert log==['waits'] and priority(memory) > 49
    if how=='state':
        other = ReplayMemory(16, Proportional(), seed=0)
        other.load_state_dict(found)
    else: other = {'save': lambda: ReplayMemory.load(tmp_path/'saved'), 'copy': lambda: found, 'pickle': lambda: pickle.loads(found)}[how]()
    assert priority(other) > 49


@pytest.mark.parametrize('how', ['flush', 'close'])
def test_so_does_a_memory_on_disk(how, tmp_path):
    log = []
    class Event:
        def synchronize(self): log.append('waits')
    memory = ReplayMemory(16, Proportional(), path=tmp_path/'rows', seed=0)
    for _, step in zip(range(16), Source()): memory.add(step)
    memory.update_priorities([3], Underway(torch.tensor([50.]), Event(), 1))
    getattr(memory, how)()
    assert log==['waits']
    memory.close()
    with ReplayMemory.open(tmp_path/'rows') as again: assert priority(again) > 49


def test_order_is_kept_where_plain_numbers_follow():
    memory, log = prioritized_with([50.])
    assert memory.update_priorities([3], [7.])==1 and log==['waits'] and 6.9 < priority(memory) < 7.1


def test_what_is_restored_knows_nothing_of_errors_for_other_rows():
    memory, log = prioritized_with([50.])
    other, _ = prioritized_with([9.])
    memory.load_state_dict(other.state_dict())
    for _ in range(4): memory.sample(4)
    assert not log and 8.9 < priority(memory) < 9.1 and memory.check_valid()


def test_a_count_of_batches_that_is_set_back_delays_nothing():
    memory, log = prioritized_with([50.])
    for _ in range(3): memory.sample(4)
    memory.update_priorities([3], Underway(torch.tensor([7.]), NotedCuda().Event(), 2))
    memory.sampler.n_batches = 0
    memory.sample(4)
    assert 6.9 < priority(memory) < 7.1


@pytest.mark.parametrize('td', [[float('nan')], [1., 2.]])
def test_errors_that_do_not_fit_come_out_of_the_draw_that_was_to_take_them_once(td):
    memory, _ = prioritized_with(td)
    before = priority(memory)
    memory.sample(4)
    with refused('td_errors') as e: memory.sample(4)
    assert len(e.value.__notes__)==1
    memory.sample(4)
    assert priority(memory)==before and memory.check_valid()


def test_an_interrupt_while_waiting_loses_nothing():
    memory, log = prioritized_with([50.])
    struck = iter([KeyboardInterrupt])
    class Sulky:
        def synchronize(self):
            for error in struck: raise error
    memory.update_priorities([3], Underway(torch.tensor([70.]), Sulky(), 1))
    memory.sample(4)
    with pytest.raises(KeyboardInterrupt): memory.sample(4)
    assert 49 < priority(memory) < 51
    memory.sample(4)
    assert priority(memory) > 69


def test_a_memory_of_another_kind_waits_at_once():
    "A mixture hands plain numbers on"
    members = [ReplayMemory(16, Proportional(), seed=k) for k in range(2)]
    mixed = MixedMemory(members, seed=0)
    for o in members:
        for _, step in zip(range(16), Source()): o.add(step)
    waits = NotedCuda()
    assert mixed.update_priorities([3, 1 << 56 | 3], Underway(torch.tensor([50., 60.], dtype=torch.bfloat16), waits.Event(), 1))==2
    assert waits.log==[('synchronize', 0)] and priority(members[0]) > 49 and priority(members[1]) > 59


def test_td_errors_from_elsewhere_are_taken_at_once(near):
    replay = make('prioritized')
    batch = next(iter(replay.loader(**GPU)))
    assert batch.update_priorities([1.]*8)==batch.update_priorities(np.ones(8))==len({*batch.ids.tolist()})
    assert batch.replace(reward=batch.reward).update_priorities(torch.ones(8))==0             # a copy knows the way, too


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
