"""Memories that store each frame once, beside a naive twin that stores everything: every row equal, byte for byte."""
import copy
import pickle
from typing import Any, NamedTuple

import lz4.block
import numpy as np
import pytest
import torch

import fastrl_replay.checkpoint  # noqa: F401  (save and load)
from fastrl_replay import frames as frames_module
from fastrl_replay import free
from fastrl_replay import stacks as stacks_module
from fastrl_replay.batch import Batch
from fastrl_replay.cyclic import CyclicArray, in_ram
from fastrl_replay.frames import FrameStore
from fastrl_replay.interning import CELL_USED, FREE
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.nstep import NStep
from fastrl_replay.pipes.replay import ExperienceReplay, PrioritizedReplay, RankReplay
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.raw import fingerprint, pack, unpack
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.stacks import stack_axis
from fastrl_replay.steps import SimpleStep, Transition
from harness import check_resume, seen
from twins import Twin, column_bytes, stacked


# --- worlds -----------------------------------------------------------------------------------------------------------
class World:
    """Streams of stacked observations, some slow and some fast, with everything that breaks the rule "the next state is the state shifted
    by one": ends of both kinds, stacks padded by repetition or by zeros, odd stacks, states that are not what came before, still pictures."""
    def __init__(self, seed, stack=3, shape=(4, 5), last=False, dtype=np.uint8, end=.1, odd=.05, speeds=(.5, .3, .19, .01), pad=None):
        self.rng, self.S, self.shape, self.last, self.dtype = np.random.default_rng(seed), stack, shape, last, np.dtype(dtype)
        self.end, self.odd, self.speeds, self.pad, self.now = end, odd, speeds, pad, {}

    def frame(self):
        if self.rng.random() < .1: return np.zeros(self.shape, self.dtype)
        return self.rng.integers(3, size=self.shape).astype(self.dtype)           # few values: some frames are equal by chance

    def beginning(self):
        first = self.frame()
        padding = np.zeros_like(first) if (self.pad or self.rng.choice(['zeros', 'copies']))=='zeros' else first
        return [padding]*(self.S - 1) + [first], 0, 0

    def together(self, frames): return np.stack(frames, -1 if self.last else 0)

    def step(self):
        env = int(self.rng.choice(len(self.speeds), p=self.speeds))
        state, step_n, episode_n = self.now.get(env) or self.beginning()
        if self.rng.random() < self.odd: state = [self.frame() for _ in state]                       # not the last one's next state
        following = state[1:] + [state[-1] if self.rng.random() < .1 else self.frame()]
        if self.rng.random() < self.odd: following = [self.frame() for _ in state]                   # a stack that doesn't slide
        terminated, truncated = (bool(self.rng.random() < self.end*o) for o in (.7, .5))
        again = self.beginning()[0] if terminated or truncated else following
        self.now[env] = again, 0 if again is not following else step_n + 1, episode_n + (again is not following)
        return SimpleStep(self.together(state), int(self.rng.integers(9)), self.together(following), terminated, truncated,
                          float(self.rng.standard_normal()), env_id=env, step_n=step_n, episode_n=episode_n)

    def steps(self, m): return [self.step() for _ in range(m)]


class Room(NamedTuple):
    obs: Any
    action: Any
    reward: Any
    next_obs: Any
    terminated: Any
    truncated: Any

class Rooms(World):
    "Nested observations: a camera's stack, a large map, and a small pose that isn't worth it"
    def step(self):
        s = super().step()
        def room(stack): return dict(camera=stack, map=np.full(130, stack[-1].sum(), np.float32), pose=stack.reshape(-1)[:3].astype(np.float32))
        return Room(room(s.state), s.action, s.reward, room(s.next_state), s.terminated, s.truncated)

class Vectors(World):
    "Float vectors, too large for a plain record"
    def step(self):
        s = super().step()
        return s._replace(state=s.state[-1].reshape(-1).astype(np.float64)/7, next_state=s.next_state[-1].reshape(-1).astype(np.float64)/7)

class Windows(World):
    "What an n-step pipe makes of a world"
    n = 3
    def __init__(self, seed, **kw):
        super().__init__(seed, **kw)
        self.made = iter(NStep(iter(super().step, None), self.n, .9))
    def step(self): return next(self.made)

class Long(Windows): n = 7

WORLDS = dict(stacks=lambda s: World(s), last=lambda s: World(s, 4, (20, 9), True, np.float32), rooms=lambda s: Rooms(s, 2, (20, 20)),
              vectors=lambda s: Vectors(s, 2, (8, 10)), windows=lambda s: Windows(s), long=lambda s: Long(s))
OPTIONS = dict(stacks=dict(dedup='frames'), last={}, rooms={}, vectors={}, windows=dict(dedup='frames'), long=dict(dedup='frames'))


class Pair:
    "A memory and its twin, on which the same things are done"
    def __init__(self, world, seed, max_sz=30, **options):
        self.world, self.rng, self.twin = WORLDS[world](seed) if isinstance(world, str) else world, np.random.default_rng(seed + 99), Twin(max_sz)
        self.options = OPTIONS[world] | options if isinstance(world, str) else options
        self.memory = ReplayMemory(max_sz, seed=seed, **self.options)

    def add(self):
        [step] = self.world.steps(1)
        assert self.memory.add(self.odd(step))==self.twin.add(step)

    def odd(self, step):
        "Now and then the same step in other clothes: arrays out of order, tensors"
        if not self.twin.n_added or self.rng.random() < .8 or isinstance(step, Room): return step
        wear = [np.asfortranarray, torch.from_numpy, lambda a: np.stack([a, a], -1)[..., 0]][self.rng.integers(3)]
        return step._replace(state=wear(step.state.copy()))

    def extend(self):
        steps = self.world.steps(int(self.rng.integers(1, 3*self.memory.max_sz if self.rng.random() < .05 else 12)))
        form = self.rng.integers(3)
        chunk = steps if form==0 else stacked(steps) if form==1 else Batch.of(stacked(steps))
        assert self.memory.extend(chunk).tolist()==self.twin.extend(steps)

    def check(self):
        assert self.memory.check_valid() and len(self.memory)==len(self.twin.ids)
        if not len(self.memory): return
        ids = self.rng.permutation(self.twin.ids)[:20]
        self.same(self.memory.fetch(ids))
        self.same(self.memory.sample(int(self.rng.integers(1, len(self.memory) + 1))))

    def same(self, batch): assert column_bytes(batch)==[self.twin.bytes[i] for i in batch.ids.tolist()]

    def more(self):
        [id] = self.rng.choice(self.twin.ids, 1)
        batch = self.memory.episode(id)
        assert id in batch.ids.tolist()
        self.same(batch)
        self.same(self.memory.recent(int(self.rng.integers(1, len(self.memory) + 1))))
        k = int(self.rng.integers(len(self.memory)))
        assert column_bytes(Batch.of(stacked([self.memory[k]])))[0]==self.twin.bytes[self.twin.by_slot[k]]
        fields = list(self.rng.permutation(self.memory.recent(1).step_type._fields)[:2])
        part = self.memory.sample(3 if len(self.memory) > 3 else 1, fields)
        whole = self.memory.fetch(part.ids)
        for f in fields: assert_equal(getattr(part, f), getattr(whole, f))

    def run(self, n):
        for _ in range(n):
            (self.add if self.rng.random() < .7 else self.extend)()
            self.check()
            if self.rng.random() < .2: self.more()


def assert_equal(a, b):
    if isinstance(a, dict):
        for k in a: assert_equal(a[k], b[k])
    else: assert torch.equal(a, b)


@pytest.mark.parametrize('codec', [None, 'lz4'])
@pytest.mark.parametrize('world', WORLDS)
def test_every_row_is_what_it_was(world, codec):
    for seed, max_sz in ((0, 30), (1, 7), (2, 1), (3, 100)): Pair(world, seed, max_sz, codec=codec).run(80)

@pytest.mark.parametrize('world', ['stacks', 'windows', 'last'])
def test_every_row_is_what_it_was_in_windows(world):
    for seed, codec in ((0, None), (1, 'lz4')):
        pair = Pair(world, seed, 25, frame_views=True, codec=codec)
        pair.run(150)

def test_bytes_stacked_along_the_last_axis():
    "Four of them are taken apart and put together four bytes at a time"
    for views, side in ((False, 21), (True, 21)): Pair(World(4, 4, (20, side), True), 4, 25, frame_views=views).run(40)

@pytest.mark.parametrize('world', ['stacks', 'vectors'])
def test_every_row_is_what_it_was_by_next_states(world): Pair(world, 5, 40, dedup='next_state').run(200)

def test_many_thousand_steps_wrap_again_and_again():
    pair = Pair('stacks', 8, 50)
    for _ in range(150):
        steps = pair.world.steps(40)
        assert pair.memory.extend(steps).tolist()==pair.twin.extend(steps)
        pair.check()
    assert pair.memory.n_added==6000 and len(pair.memory._array.frames[0].meta.blocks)*64 <= 8*50 + 64


def digest(memory):
    "A number for all that a memory holds"
    return hash(repr(seen(memory.state_dict())))


# --- what is shared -----------------------------------------------------------------------------------------------------
def held(memory): return memory._array.frames[0].n_frames

def filled(world, n, max_sz=10_000, **options):
    memory = ReplayMemory(max_sz, seed=0, **options)
    for step in world.steps(n): memory.add(step)
    assert memory.check_valid()
    return memory

def calm(seed=0, **kw): return World(seed, **{'end': 0., 'odd': 0., 'speeds': (1.,), 'pad': 'copies', 'shape': (30, 30), **kw})

def test_a_frame_a_step():
    "One stream without ends: a frame for each step, and one for the beginning; a few more for each stream and each beginning"
    for views in (False, True): assert held(filled(calm(), 300, dedup='frames', frame_views=views)) <= 301
    assert held(filled(calm(pad='zeros'), 300, dedup='frames')) <= 302
    assert held(filled(calm(speeds=(.25,)*4), 300, dedup='frames')) <= 304
    memory = filled(calm(end=.2), 300, dedup='frames')
    ends = sum(bool(o.terminated or o.truncated) for o in memory)
    assert ends > 40 and held(memory) <= 301 + ends

def test_a_frame_a_step_in_chunks():
    "Rows of one chunk share as steps do that come one by one"
    steps = calm(end=.1).steps(300)
    one, many = ReplayMemory(1000, dedup='frames'), ReplayMemory(1000, dedup='frames')
    for o in steps: one.add(o)
    many.extend(steps[:200])
    many.extend(Batch.of(stacked(steps[200:])))
    assert held(one)==held(many)

@pytest.mark.parametrize('n', [1, 3, 7, 12])
def test_n_step_windows_share_too(n):
    "The state is the next state of n records ago; beyond the stack's size only the last frame of a stack is new"
    made = NStep(calm().steps(300), n, .9)
    memory = ReplayMemory(1000, dedup='frames')
    for step in made: memory.add(step)
    assert memory.check_valid() and held(memory) <= 301 + 2*n, held(memory)

def test_float_vectors_share_the_next_state():
    assert held(filled(Vectors(0, 2, (8, 10), end=0., odd=0., speeds=(1.,)), 300)) <= 302

def test_a_still_picture_is_one_frame():
    picture = np.full((4, 30, 30), 7, np.uint8)
    memory = ReplayMemory(50)
    for _ in range(500): memory.add(Transition(picture, 0, 0., picture, False, False))
    assert held(memory)==1 and memory.check_valid()


# --- pitfalls -----------------------------------------------------------------------------------------------------------
def test_episodes_of_one_step():
    "They need more frames than steps, and the memory is as large as ever"
    for pad in ('zeros', 'copies'):
        pair = Pair(World(0, end=3., odd=0., speeds=(1.,), pad=pad, shape=(30, 30)), 0, 200, dedup='frames')
        for _ in range(500): pair.add()
        pair.check()
        assert len(pair.memory)==200 and sum(bool(o.terminated or o.truncated) for o in pair.memory) > 180
        assert held(pair.memory) > 350 > 200 + 200//32 + 6                   # more than the blocks that were there at the beginning

def test_a_slow_stream_among_fast_ones():
    "When it moves at last, its frames of before are gone: or they live on, where a record still holds them"
    pair = Pair(World(0, end=0., odd=0., speeds=(1.,), shape=(30, 30)), 0, 20, dedup='frames')
    slow, fast = World(1, end=0., odd=0., speeds=(1.,), shape=(30, 30)), pair.world
    for gap in (0, 5, 18, 19, 20, 21, 100):
        step = slow.step()._replace(env_id=7)
        assert pair.memory.add(step)==pair.twin.add(step)
        for _ in range(gap): pair.add()
        pair.check()
    assert fast.now and held(pair.memory) <= 20 + 2*3 + 2

@pytest.mark.parametrize('form', ['list', 'batch', 'arrays'])
def test_a_chunk_longer_than_the_memory(form):
    for before in (0, 3, 25):
        pair = Pair('stacks', before, 10)
        pair.twin.extend(first := pair.world.steps(before))
        if first: pair.memory.extend(first)
        steps = pair.world.steps(37)
        pair.twin.extend(steps)
        pair.memory.extend(steps if form=='list' else stacked(steps) if form=='arrays' else Batch.of(stacked(steps)))
        pair.check()
        pair.run(20)

@pytest.mark.parametrize('pad', ['zeros', 'copies'])
def test_stacks_padded_on_reset(pad):
    pair = Pair(World(3, end=.3, odd=0., pad=pad), 3, 40, dedup='frames')
    pair.run(100)
    firsts = [o for o in pair.memory if o.step_n==0]
    assert len(firsts) > 5
    for o in firsts: assert (o.state[0]==(0 if pad=='zeros' else o.state[-1])).all()

def test_an_environment_that_writes_over_its_observations():
    "What is stored is what the arrays held then"
    rng, pair = np.random.default_rng(0), Pair('stacks', 0, 20)
    state, following = np.zeros((3, 4, 5), np.uint8), np.zeros((3, 4, 5), np.uint8)
    for k in range(60):
        state[:] = following
        following[:] = rng.integers(3, size=following.shape)
        step = SimpleStep(state, k, following)
        pair.twin.add(copy.deepcopy(step))
        pair.memory.add(step) if k % 3 else pair.memory.extend([step])
        pair.check()

def test_a_bad_step_changes_nothing():
    pair = Pair('stacks', 0, 20)
    pair.run(30)
    before = digest(pair.memory)
    good = pair.world.step()
    for bad in (good._replace(state=good.state[:2]), good._replace(next_state=good.next_state.astype(np.float32) + .5), good._replace(reward='x'),
                good._replace(env_id=None), good._replace(action=1.5), Transition(*range(6)), good._replace(next_state=None)):
        with pytest.raises((ValueError, TypeError)): pair.memory.add(bad)
        with pytest.raises((ValueError, TypeError)): pair.memory.extend([good, bad])
    with pytest.raises((ValueError, TypeError)): pair.memory.extend(stacked([good, good])._replace(state=np.zeros((2, 3, 4, 4), np.uint8)))
    assert digest(pair.memory)==before
    pair.run(10)

def test_an_allocation_that_fails_changes_nothing(monkeypatch):
    "The memory goes on when there is room again"
    for codec in (None, 'lz4'):
        allowed = [10**9]
        def allocate(name, nbytes, allowed=allowed):
            if nbytes > allowed[0]: raise MemoryError(f'{name}: no room')
            return in_ram(name, nbytes)
        monkeypatch.setattr(frames_module, 'in_free_ram', allocate)
        pair = Pair(World(0, end=0., odd=1., shape=(30, 30)), 0, 70, dedup='frames', codec=codec)
        for _ in range(3): pair.add()
        allowed[0] = 0
        with pytest.raises(MemoryError, match='no room'):
            for _ in range(100): pair.add_or_nothing()
        before = digest(pair.memory)
        for failing in (lambda p=pair: p.memory.add(p.last), lambda p=pair: p.memory.extend([p.last]*9), lambda p=pair: p.memory.extend(Batch.of(stacked([p.last]*9)))):
            with pytest.raises(MemoryError, match='no room'): failing()
        assert digest(pair.memory)==before and pair.memory.check_valid()
        allowed[0] = 10**9
        pair.twin.add(pair.last)
        pair.memory.add(pair.last)
        for _ in range(80): pair.add()
        pair.check()

def add_or_nothing(self):
    self.last = self.world.step()
    self.memory.add(self.last)
    self.twin.add(self.last)
Pair.add_or_nothing = add_or_nothing


# --- batches ------------------------------------------------------------------------------------------------------------
def test_columns_are_contiguous_and_independent():
    for codec in (None, 'lz4'):
        batch = filled(calm(), 60, dedup='frames', codec=codec).sample(16)
        assert batch.state.is_contiguous() and batch.next_state.is_contiguous()
        before = batch.next_state.clone()
        batch.state.zero_()
        assert torch.equal(batch.next_state, before)

def test_windows_overlap_and_their_strides_never_vary():
    memory = filled(calm(end=.05), 200, dedup='frames', frame_views=True)
    odd = World(9, odd=1., shape=(30, 30)).steps(3)
    for o in odd: memory.add(o)
    plain = ReplayMemory(10_000, dedup=None)
    plain.extend(list(memory))
    strides, starts = set(), set()
    for ids in ([5, 6, 7], [200, 5], [199, 3, 201], [0]):
        batch = memory.fetch(ids)
        strides.add((batch.state.stride(), batch.next_state.stride(), batch.state.shape[1:]))
        starts.add(batch.next_state.storage_offset() - batch.state.storage_offset())
        want = plain.fetch(ids)
        for f in SimpleStep._fields: assert torch.equal(getattr(batch, f), getattr(want, f)), f
    assert len(strides)==1 and starts=={900, 2700}                                # one frame on, or a stack of three
    shared = memory.fetch([5, 6])
    shared.state[0, 1] = 99                                                       # read only by convention, for this is what happens
    assert (shared.next_state[0, 0]==99).all()

def test_windows_of_n_steps_slide_by_n():
    memory = ReplayMemory(1000, dedup='frames', frame_views=True)
    for step in NStep(calm().steps(100), 2, .9): memory.add(step)
    batch = memory.fetch(np.arange(10, 20))
    assert batch.next_state.storage_offset() - batch.state.storage_offset()==2*900

@pytest.mark.parametrize('views', [False, True])
def test_a_batch_that_is_held_stays_as_it_is(views):
    memory = filled(calm(end=.05), 200, 100, dedup='frames', frame_views=views)
    kept = [memory.sample(8) for _ in range(3)]
    part = memory.sample(8).next_state[2:3]
    before = [(o.state.clone(), o.next_state.clone()) for o in kept], part.clone()
    for step in calm(7).steps(150):
        memory.add(step)
        memory.sample(8)
    for o, (a, b) in zip(kept, before[0]): assert torch.equal(o.state, a) and torch.equal(o.next_state, b)
    assert torch.equal(part, before[1])
    del kept, part
    pool = memory._array.whole[0]
    made = pool.n_made
    for _ in range(20): memory.sample(8)
    assert pool.n_made==made, 'buffers are not used again'

def test_what_a_batch_of_windows_can_do():
    memory = filled(calm(), 50, dedup='frames', frame_views=True, sampler=Proportional())
    batch = memory.sample(6)
    for other in (pickle.loads(pickle.dumps(batch)), batch.to('cpu'), batch[0:6], copy.deepcopy(batch)):
        for f in SimpleStep._fields: assert torch.equal(getattr(other, f), getattr(batch, f))
    assert batch.update_priorities(torch.ones(6))==len(set(batch.ids.tolist()))
    n = memory.n_added
    assert memory.extend(batch).tolist()==list(range(n, n + 6)) and memory.check_valid()
    assert column_bytes(memory.recent(6))==column_bytes(batch)

def test_large_batches_are_fetched_by_several_threads(monkeypatch):
    memory, views = (filled(calm(end=.1), 300, dedup='frames', frame_views=o) for o in (False, True))
    alone, alone_views = memory.recent(250), views.recent(250)
    asked = []
    monkeypatch.setattr(frames_module, '_LARGE', 100_000)
    monkeypatch.setattr(frames_module, 'cores', lambda: 4)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 3)
    monkeypatch.setattr(frames_module._team, 'run', lambda n, f, m, run=frames_module._team.run: asked.append(n) or run(n, f, m))
    for o, want in ((memory, alone), (views, alone_views)):
        for ids, rows in ((np.arange(50, 300), np.arange(250)), ([299, 51]*120, [249, 1]*120)):
            got = o.fetch(ids)
            for f in SimpleStep._fields: assert torch.equal(getattr(got, f), getattr(want, f)[rows])
    assert asked and set(asked)=={3}


# --- what is chosen -----------------------------------------------------------------------------------------------------
def test_small_observations_stay_in_plain_records():
    s = np.zeros(4, np.float32)
    memory = ReplayMemory(10, step=Transition(s, 0, 0., s, False, False))
    assert type(memory._array) is CyclicArray and 'plain records' in repr(memory)
    assert type(ReplayMemory(10, step=Transition(s, 0, 0., s, False, False), dedup='next_state')._array) is FrameStore

def test_what_auto_chooses_is_said():
    def said(shape, dtype=np.uint8, **options):
        s = np.zeros(shape, dtype)
        return repr(ReplayMemory(10, step=Transition(s, 0, 0., s, False, False), **options))
    assert 'state by frames of stacks of 4' in said((4, 30, 30))
    assert 'state by states, each stored once' in said((30, 30, 3)) and 'state by states' in said((600,))
    assert 'lz4' in said((4, 30, 30), codec='lz4') and 'plain records' in said((4, 30, 30), dedup=None)
    assert 'no step seen yet' in repr(ReplayMemory(10))

def test_what_a_stack_looks_like():
    want = {(4, 84, 84): 0, (84, 84, 4): -1, (4, 84, 84, 3): 0, (84, 84): None, (84, 84, 1): None, (17,): None, (4, 10): 0, (1, 84, 84): None, (64, 64): None}
    assert {o: stack_axis(o) for o in want}==want

def test_wrong_options_say_what_is_wrong():
    s, small = np.zeros((4, 30, 30), np.uint8), np.zeros(4, np.float32)
    step, little = Transition(s, 0, 0., s, False, False), Transition(small, 0, 0., small, False, False)
    for options, example, said in ((dict(dedup='frame'), step, "'frame'"), (dict(codec='zip'), step, "'zip'"), (dict(dedup='frames'), little, 'stack'),
                                   (dict(frame_views=True), little, 'frame_views'), (dict(codec='lz4'), little, 'codec'),
                                   (dict(frame_views=True, dedup=None), step, 'frame_views'), (dict(dedup='next_state'), Only(s), 'next_state')):
        with pytest.raises(ValueError, match=said): ReplayMemory(10, step=example, **options)
        memory = ReplayMemory(10, **options) if options.get('dedup')!='frame' and options.get('codec')!='zip' else None
        if memory is not None:
            with pytest.raises(ValueError, match=said): memory.add(example)
            assert memory._array is None and len(memory)==0

class Only(NamedTuple):
    x: Any

@pytest.mark.parametrize('pipe', [ExperienceReplay, PrioritizedReplay, RankReplay])
def test_pipes_pass_the_options_on(pipe):
    steps = calm().steps(60)
    replay = pipe(steps, bs=8, max_sz=40, seed=0, dedup='frames', frame_views=True, codec='lz4')
    batches = list(replay)
    assert 'frames of stacks of 3, lz4' in repr(replay) and replay.memory.check_valid()
    for batch in batches[-3:]:
        for i, state in zip(batch.ids.tolist(), batch.state.numpy()): assert (state==steps[i].state).all()


# --- bytes --------------------------------------------------------------------------------------------------------------
def test_an_estimate_is_what_is_allocated():
    for shape, chosen in (((4, 84, 84), 'frames'), ((600,), 'next_state'), ((4,), 'plain')):
        s = np.zeros(shape, np.uint8)
        step = SimpleStep(s, 0, s)
        for max_sz in (1, 100, 12_345):
            told = ReplayMemory.estimate(step, max_sz)
            assert told.chosen==chosen and told.nbytes==getattr(told, chosen)
            for dedup, want in (('auto', told.nbytes), (None, told.plain)): assert ReplayMemory(max_sz, step=step, dedup=dedup).nbytes==want
    assert '56.5 GB as plain' in str(ReplayMemory.estimate(SimpleStep(np.zeros((4, 84, 84), np.uint8), 0, np.zeros((4, 84, 84), np.uint8)), 1_000_000))

def test_an_estimate_from_spaces():
    import gymnasium as gym
    box, act = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(6)
    env = type('Env', (), dict(observation_space=box, action_space=act))()
    s = np.zeros((4, 84, 84), np.uint8)
    assert ReplayMemory.estimate(env, 1000)==ReplayMemory.estimate(SimpleStep(s, 0, s), 1000)
    envs = gym.make_vec('CartPole-v1', 3)
    assert ReplayMemory.estimate(envs, 1000).chosen=='plain'
    envs.close()
    nested = type('Env', (), dict(observation_space=gym.spaces.Dict(a=box, b=gym.spaces.Tuple([act, act])), action_space=act))()
    assert ReplayMemory.estimate(nested, 1000).chosen=='frames'
    text = type('Env', (), dict(observation_space=gym.spaces.Text(5), action_space=act))()
    for bad, said in ((text, 'fixed size'), (7, 'expected a step'), ('CartPole-v1', 'expected a step')):
        with pytest.raises(TypeError, match=said): ReplayMemory.estimate(bad, 10)
    with pytest.raises(ValueError, match='max_sz'): ReplayMemory.estimate(env, 0)

def test_a_memory_that_does_not_fit_is_refused(monkeypatch):
    "With the figure, and the largest that fits: which fits, and one more doesn't"
    s = np.zeros((4, 84, 84), np.uint8)
    step = Transition(s, 0, 0., s, False, False)
    monkeypatch.setattr(free, 'free_memory', lambda: 10**9)
    monkeypatch.setattr('fastrl_replay.budget.free_memory', lambda: 10**9)
    for dedup in ('auto', None):
        memory = ReplayMemory(1_000_000, dedup=dedup)
        with pytest.raises(MemoryError, match=r'1,000,000 transitions need .* GB and 1.0 GB are free; at most ') as e: memory.add(step)
        assert memory._array is None
        most = int(str(e.value).split('at most ')[1].split(' fit')[0].replace(',', ''))
        assert ReplayMemory(most, step=step, dedup=dedup).nbytes <= 10**9
        with pytest.raises(MemoryError): ReplayMemory(most + 300, step=step, dedup=dedup)
    monkeypatch.setattr(free, 'free_memory', lambda: 10)
    with pytest.raises(MemoryError, match='make max_sz smaller'): free.in_free_ram('frames', 11)

def test_pages_are_taken_as_they_are_written():
    def resident():
        with open('/proc/self/statm') as f: return int(f.read().split()[1])*4096
    world = calm(shape=(84, 84), stack=4)
    steps = world.steps(300)
    before = resident()
    memory = ReplayMemory(200_000, step=steps[0])
    assert memory.nbytes > 1.4e9 and resident() - before < 50e6
    for o in steps: memory.add(o)
    assert 200*7056 < memory._array.nbytes_used < 310*7300


# --- state --------------------------------------------------------------------------------------------------------------
def use(memory, k):
    rng, out = np.random.default_rng(memory.n_added), []
    for _ in range(k):
        steps = memory.world.steps(int(rng.integers(1, 5)))
        out.append(memory.extend(steps) if len(steps) > 1 else memory.add(steps[0]))
        out.append(memory.sample(int(rng.integers(1, min(5, len(memory) + 1)))))
    assert memory.check_valid()
    return out

@pytest.mark.parametrize('world,options', [('stacks', {}), ('stacks', dict(codec='lz4', frame_views=True)), ('rooms', {}), ('vectors', dict(codec='lz4'))])
def test_a_state_is_saved_and_loaded(world, options):
    def make():
        memory = ReplayMemory(20, seed=3, **{**OPTIONS[world], **options})
        memory.world = WORLDS[world](0)
        return memory
    def save(memory): return dict(memory=memory.state_dict(), world=0)
    def load(memory, state): memory.load_state_dict(state['memory'])
    def run(memory, k):
        memory.world = WORLDS[world](memory.n_added)            # what comes depends on nothing but the memory
        return use(memory, k)
    check_resume(make, run, save=save, load=load)

def test_a_memory_pickles_and_copies():
    pair = Pair('stacks', 0, 30, codec='lz4')
    pair.run(40)
    for other in (pickle.loads(pickle.dumps(pair.memory)), copy.deepcopy(pair.memory)):
        assert other.check_valid() and repr(other)==repr(pair.memory)
        assert column_bytes(other.recent(20))==column_bytes(pair.memory.recent(20))
        other.add(pair.world.step())
    pair.run(20)

@pytest.mark.parametrize('options', [{}, dict(codec='lz4'), dict(frame_views=True)])
def test_a_memory_is_saved_in_a_folder_and_loaded_as_it_was(options, tmp_path):
    pair = Pair('stacks', 0, 30, **options)
    pair.run(30)
    whole = pair.memory.save(tmp_path/'here')
    pair.run(1)
    assert pair.memory.save(tmp_path/'here') < whole
    loaded = ReplayMemory.load(tmp_path/'here')
    assert loaded.check_valid() and repr(loaded)==repr(pair.memory) and loaded.sample(9).state.stride()==pair.memory.sample(9).state.stride()
    pair.memory = loaded
    pair.run(20)

def test_a_state_of_another_kind_is_refused():
    kinds = [dict(dedup='frames'), dict(dedup='next_state'), dict(dedup=None), dict(dedup='frames', codec='lz4')]
    memories = [filled(World(0), 30, 20, **o) for o in kinds]
    for a in memories:
        for b in memories:
            before = digest(b)
            if a is b: continue
            with pytest.raises(ValueError, match='dedup|codec|stack'): b.load_state_dict(a.state_dict())
            assert digest(b)==before and b.check_valid()

def test_a_wrong_count_is_noticed_and_a_damaged_frame_too():
    memory = filled(World(0), 60, 40, dedup='frames', codec='lz4')
    frames = memory._array.frames[0]
    memory._array.records['state'][5, 0] = memory._array.records['state'][9, 1]
    with pytest.raises(AssertionError, match='more or fewer'): memory.check_valid()
    memory = filled(World(0), 60, 40, dedup='frames', codec='lz4')
    frames = memory._array.frames[0]
    frames.cells.blocks[0].reshape(-1, 128)[:int(frames.plan[CELL_USED]), 4:] = 255
    with pytest.raises(AssertionError, match='damaged'): memory.check_valid()
    with pytest.raises(RuntimeError, match='damaged'): memory.sample(20)
    memory = filled(World(0), 60, 40, dedup='frames')
    memory._array.frames[0].plan[FREE] = 0
    with pytest.raises(AssertionError, match='free slots'): memory.check_valid()


# --- LZ4 ----------------------------------------------------------------------------------------------------------------
def test_packed_bytes_are_those_of_lz4():
    "What is packed here, the library unpacks; what it packs is unpacked here; and nothing is written beyond the end"
    rng = np.random.default_rng(0)
    kinds = [lambda n: rng.integers(256, size=n, dtype=np.uint8), lambda n: np.zeros(n, np.uint8), lambda n: np.tile(rng.integers(256, size=rng.integers(1, 9), dtype=np.uint8), n),
             lambda n: np.repeat(rng.integers(4, size=n, dtype=np.uint8), rng.integers(1, 40)), lambda n: rng.integers(2, size=n, dtype=np.uint8)]
    for trial in range(1500):
        a = kinds[trial % 5](int(rng.integers(1, 400)))
        n, room = len(a), np.empty(2*len(a) + 100, np.uint8)
        m = pack(a.ctypes.data, n, room.ctypes.data, len(room))
        assert lz4.block.decompress(room[:m].tobytes(), uncompressed_size=n)==a.tobytes()
        out = np.full(n + 8, 7, np.uint8)
        for block in (room[:m].copy(), np.frombuffer(lz4.block.compress(a.tobytes(), store_size=False), np.uint8)):
            assert unpack(block.ctypes.data, len(block), out.ctypes.data, n)==n and (out[:n]==a).all() and (out[n:]==7).all()

def test_bytes_that_are_no_lz4_end_in_an_error_and_not_elsewhere():
    rng = np.random.default_rng(0)
    for _ in range(3000):
        n = int(rng.integers(1, 60))
        a = rng.integers(256, size=n, dtype=np.uint8)
        if rng.random() < .5: a = np.frombuffer(lz4.block.compress(np.repeat(a, 20).tobytes(), store_size=False), np.uint8).copy()
        if rng.random() < .7: a[rng.integers(len(a))] ^= rng.integers(1, 256, dtype=np.uint8)
        else: a = a[:-1].copy()
        room = int(rng.integers(1, 1500))
        out = np.full(room + 64, 7, np.uint8)
        got = unpack(a.ctypes.data, len(a), out.ctypes.data, room) if len(a) else -1
        assert -1 <= got <= room and (out[room:]==7).all()

def test_what_does_not_get_smaller_is_kept_as_it_is():
    noise = np.random.default_rng(0).integers(256, size=(41, 30, 30), dtype=np.uint8)
    memory = ReplayMemory(20, codec='lz4')
    for k in range(40 - 3): memory.add(Transition(noise[k:k + 4], k, 0., noise[k + 1:k + 5], False, False))
    assert memory.check_valid()
    for o in memory: assert (o.state==noise[o.action:o.action + 4]).all() and (o.next_state==noise[o.action + 1:o.action + 5]).all()

def test_equal_bytes_have_equal_fingerprints():
    rng = np.random.default_rng(0)
    a = rng.integers(256, size=300, dtype=np.uint8)
    found = {}
    for n in range(1, 250):
        for start in range(0, 50, 7):
            print_, b = fingerprint(a.ctypes.data + start, n), a[start:start + n].copy()
            assert print_==fingerprint(b.ctypes.data, n)
            found[print_] = b.tobytes()
            b[rng.integers(n)] ^= 1
            assert fingerprint(b.ctypes.data, n)!=print_
    assert len(found)==249*8
    assert stacks_module.WIDE==512


# --- real Atari ---------------------------------------------------------------------------------------------------------
def pong(n_envs=None, **kw):
    import ale_py
    import gymnasium as gym
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    if n_envs is None: return FrameStackObservation(AtariPreprocessing(gym.make('ALE/Pong-v5', frameskip=1, **kw)), 4)
    return gym.make_vec('ALE/Pong-v5', n_envs, vectorization_mode='sync', frameskip=1, wrappers=[AtariPreprocessing, lambda e: FrameStackObservation(e, 4)], **kw)

@pytest.mark.parametrize('n_envs', [None, 3])
def test_real_pong(n_envs):
    "Every transition as it was made, a frame a step and a few for beginnings, streams unbroken; NEXT_STEP autoreset in the vector environment"
    env = pong(n_envs, max_num_frames_per_episode=160)
    plain, memories = ReplayMemory(250, dedup=None), [ReplayMemory(250, **o) for o in ({}, dict(codec='lz4'), dict(frame_views=True))]
    n, ends = 0, 0
    for item in GymStepper([env], seed=0):
        for memory in (plain, *memories): (memory.extend if n_envs else memory.add)(item)
        n += n_envs or 1
        if n > 400: break
    env.close()
    want = plain.recent(250)
    ends = int((want.terminated | want.truncated).sum())
    assert ends >= 4
    for memory in memories:
        got = memory.recent(250)
        for f in SimpleStep._fields: assert torch.equal(getattr(got, f), getattr(want, f)), f
        assert memory.check_valid() and held(memory) <= 250 + ends + 8*(n_envs or 1)
    raw, packed, _ = (o._array.nbytes_used/250 for o in memories)
    assert raw < 7300*1.2 and packed < 1500
    last = {}
    for step in plain.recent(250):
        before = last.get(step.env_id)
        if before is not None and before.episode_n==step.episode_n:
            assert step.step_n==before.step_n + 1 and (step.state==before.next_state).all()
        last[step.env_id] = step
    assert len(last)==(n_envs or 1)
