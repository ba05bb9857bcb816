"""Storages that keep each frame once, beside a naive twin that stores everything: every row equal, byte for byte."""
import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.steps import Layout, SimpleStep, Transition
from fastrl_replay.storage import choice, rooms
from fastrl_replay.storage.choice import check_fits, check_storage_options, storage_for, tables_for
from fastrl_replay.storage.frames import interned
from harness import seen
from twins import Twin, column_bytes, read, stacked
from refusals import refused
from words import WORDS, words


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

def windows(step, n):
    "What an n-step pipe makes of the steps that `step()` gives: next state and flags of the last of up to n, the rest of the first"
    opened = {}
    while True:
        new = step()
        queue = opened.setdefault(new.env_id, [])
        queue.append(new)
        ended = new.terminated or new.truncated
        while queue and (ended or len(queue)==n):
            first = queue.pop(0)
            yield first._replace(next_state=new.next_state, terminated=new.terminated, truncated=new.truncated)

class Windows(World):
    n = 3
    def __init__(self, seed, **kw):
        super().__init__(seed, **kw)
        self.made = windows(super().step, self.n)
    def step(self): return next(self.made)

class Long(Windows): n = 7

WORLDS = dict(stacks=lambda s: World(s), last=lambda s: World(s, 4, (20, 9), True, np.float32), rooms=lambda s: Rooms(s, 2, (20, 20)),
              vectors=lambda s: Vectors(s, 2, (8, 10)), windows=lambda s: Windows(s), long=lambda s: Long(s))
OPTIONS = dict(stacks=dict(dedup='frames'), last={}, rooms={}, vectors={}, windows=dict(dedup='frames'), long=dict(dedup='frames'))


def extend(storage, chunk):
    "Store a chunk as a memory does"
    return list(range(storage.put(storage.accept(chunk)), storage.n_added))

def slots_of(storage, ids): return np.asarray(ids) % storage.max_sz
def fetched(storage, ids, fields=None): return read(storage, slots_of(storage, ids), fields)
def ids_in(storage): return np.arange(storage.first_id, storage.n_added)
def recent(storage, k): return fetched(storage, ids_in(storage)[-k:])


class Pair:
    "A storage and its twin, in which the same things are stored"
    def __init__(self, world, seed, max_sz=30, room=None, **options):
        named = isinstance(world, str)
        self.world, self.rng, self.twin = WORLDS[world](seed) if named else world, np.random.default_rng(seed + 99), Twin(max_sz)
        self.options = dict(OPTIONS[world] if named else {}, **options)
        self.example = (WORLDS[world](seed) if named else copy.deepcopy(world)).step()
        self.storage = storage_for(Layout.of(self.example), max_sz, room=room, **self.options)

    def add(self):
        [step] = self.world.steps(1)
        assert self.storage.add(self.odd(step))==self.twin.add(step)

    def odd(self, step):
        "Now and then the same step in other clothes: arrays out of order, tensors"
        if self.rng.random() < .8 or isinstance(step, Room): return step
        wear = [np.asfortranarray, torch.from_numpy, lambda a: np.stack([a, a], -1)[..., 0]][self.rng.integers(3)]
        return step._replace(state=wear(step.state.copy()))

    def extend(self):
        steps = self.world.steps(int(self.rng.integers(1, 3*self.storage.max_sz if self.rng.random() < .05 else 12)))
        form = self.rng.integers(3)
        assert extend(self.storage, steps if form==0 else stacked(steps) if form==1 else Batch.of(stacked(steps)))==self.twin.extend(steps)

    def check(self):
        storage = self.storage
        assert storage.check_valid() and storage.n_added - storage.first_id==len(self.twin.ids)
        if not self.twin.ids: return
        self.same(fetched(storage, self.rng.permutation(self.twin.ids)[:20]))
        self.same(fetched(storage, self.rng.choice(self.twin.ids, int(self.rng.integers(1, len(self.twin.ids) + 1)))))

    def same(self, batch): assert column_bytes(batch)==[self.twin.bytes[i] for i in batch.ids.tolist()]

    def more(self):
        self.same(recent(self.storage, int(self.rng.integers(1, len(self.twin.ids) + 1))))
        id = int(self.rng.choice(self.twin.ids))
        fields = tuple(self.rng.permutation(self.storage.layout.fields)[:2].tolist())
        part = fetched(self.storage, [id]*3, fields)
        for f in fields: assert_equal(getattr(part, f), getattr(fetched(self.storage, [id]*3), f))

    def run(self, n):
        for _ in range(n):
            (self.add if self.rng.random() < .7 else self.extend)()
            self.check()
            if self.rng.random() < .2: self.more()


def assert_equal(a, b):
    if isinstance(a, dict):
        for k in a: assert_equal(a[k], b[k])
    else: assert torch.equal(a, b)

def digest(storage):
    "All that a storage holds, and what it knows of frames"
    return [seen(recent(storage, storage.max_sz)) if storage.n_added else 0, storage.n_added, storage.first_id,
            held(storage) if storage.tables else 0]


@pytest.mark.parametrize('codec', [None, 'lz4'])
@pytest.mark.parametrize('world', WORLDS)
def test_every_row_is_what_it_was(world, codec):
    for seed, max_sz in ((0, 30), (1, 7), (2, 1), (3, 100)): Pair(world, seed, max_sz, codec=codec).run(25)

@pytest.mark.parametrize('dtype,stack', [(np.uint8, 4), (np.uint8, 3), (np.float32, 2), (np.complex128, 2)])
def test_frames_stacked_along_the_last_axis(dtype, stack):
    "Pixels that are one word, and others"
    Pair(World(4, stack, (20, 21), True, dtype), 4, 25).run(30)

@pytest.mark.parametrize('world', ['stacks', 'vectors'])
def test_every_row_is_what_it_was_by_next_states(world): Pair(world, 5, 40, dedup='next_state').run(60)

def test_frames_of_any_number_of_bytes():
    for shape in ((7, 7), (3, 5), (2, 9), (4, 4)): Pair(World(6, 3, shape), 6, 25, dedup='frames').run(30)


# --- what is shared -----------------------------------------------------------------------------------------------------
def held(storage): return storage.tables[0].sweep(storage.n_added - storage.first_id)

def filled(world, n, max_sz=10_000, **options):
    steps = world.steps(n)
    storage = storage_for(Layout.of(steps[0]), max_sz, **options)
    for step in steps: storage.add(step)
    assert storage.check_valid()
    return storage

def calm(seed=0, **kw): return World(seed, **{'end': 0., 'odd': 0., 'speeds': (1.,), 'pad': 'copies', 'shape': (30, 30), **kw})

def test_a_frame_a_step():
    "One stream without ends: a frame for each step, and one for the beginning; a few more for each stream and each beginning"
    assert held(filled(calm(), 300, dedup='frames')) <= 301
    assert held(filled(calm(pad='zeros'), 300, dedup='frames')) <= 302
    assert held(filled(calm(speeds=(.25,)*4), 300, dedup='frames')) <= 304
    storage = filled(calm(end=.2), 300, dedup='frames')
    batch = recent(storage, 300)
    ends = int((batch.terminated | batch.truncated).sum())
    assert ends > 40 and held(storage) <= 301 + ends


# --- pitfalls -----------------------------------------------------------------------------------------------------------

class Interrupt(BaseException): pass

@pytest.mark.parametrize('codec', [None, 'lz4'])
@pytest.mark.parametrize('where', ['refer', 'ensure', 'after'])
def test_an_interrupt_at_any_moment_is_forgotten(where, codec, monkeypatch):
    "Ctrl-C before frames are stored, after it, or when room was made for them: nothing is stored, and frames without a record are free"
    pair = Pair('stacks', 0, 15, codec=codec)
    pair.run(20)
    kind = type(pair.storage.tables[0])
    for k in range(20):
        with monkeypatch.context() as patch:
            name = where if where=='ensure' else 'refer_step' if k % 2 else 'refer'
            plain = getattr(kind, name)
            def interrupted(*args, plain=plain):
                if where!='refer': plain(*args)
                raise Interrupt
            patch.setattr(kind, name, interrupted)
            steps = pair.world.steps(1 if k % 2 else 4)
            n = pair.storage.n_added
            with pytest.raises(Interrupt): pair.storage.add(steps[0]) if k % 2 else extend(pair.storage, stacked(steps))
        assert pair.storage.n_added==n
        if k % 3: pair.check()
        pair.extend()
        pair.check()

class Small(rooms.Ram):
    "Memory of a few bytes"
    allowed = 10**9
    def extend(self, name, upto):
        if upto > self.allowed: raise MemoryError(f'{name}: no room')

def test_an_allocation_that_fails_changes_nothing():
    "The storage goes on when there is room again"
    pair = Pair(World(0, end=0., odd=1., shape=(30, 30)), 0, 70, Small(), dedup='frames')
    for _ in range(3): pair.add()
    pair.storage.room.allowed = 70_000
    with refused('frames.0', MemoryError):
        for _ in range(100):
            last = pair.world.step()
            pair.storage.add(last)
            pair.twin.add(last)
    before = digest(pair.storage)
    for failing in (lambda: pair.storage.add(last), lambda: extend(pair.storage, [last]*9), lambda: extend(pair.storage, stacked([last]*9))):
        with refused('frames.0', MemoryError): failing()
        assert digest(pair.storage)==before and pair.storage.check_valid()
    pair.storage.room.allowed = 10**9
    pair.twin.add(last)
    pair.storage.add(last)
    for _ in range(80): pair.add()
    pair.check()

def test_a_damaged_record_is_noticed_and_nothing_crashes():
    "A number that is not that of a frame, a free one, a damaged frame, wrong free numbers"
    def damaged(**options): return filled(World(0), 60, 40, dedup='frames', **options)
    for number in (0, -1, -2**31, 2**31 - 1, 500):
        storage = damaged()
        storage.records['next_state'][5, 1] = number
        with refused('state', RuntimeError): recent(storage, 40)
        with pytest.raises(AssertionError, match=WORDS['a missing frame']): storage.check_valid()
        storage.add(World(1).step())
    storage = damaged()
    assert held(storage) < storage.tables[0].used
    storage.records['state'][5, 0] = storage.tables[0].free[0]
    with pytest.raises(AssertionError, match=WORDS['a free number is held']): storage.check_valid()
    storage = damaged()
    storage.tables[0].frames[:storage.tables[0].used] ^= 1
    with pytest.raises(AssertionError, match=WORDS['a damaged frame']): storage.check_valid()
    storage = damaged()
    storage.tables[0].counts[1] += 1
    with pytest.raises(AssertionError, match=WORDS['a free number is held']): storage.check_valid()
    storage = damaged(codec='lz4')
    storage.tables[0].packed = [o[:-1] for o in storage.tables[0].packed]
    with refused('state'): recent(storage, 40)


# --- what is chosen -----------------------------------------------------------------------------------------------------
def example(shape, dtype=np.uint8):
    s = np.zeros(shape, dtype)
    return Transition(s, 0, 0., s, False, False)

class Only(NamedTuple):
    x: Any

def test_wrong_options_say_what_is_wrong(monkeypatch):
    image, little = example((4, 30, 30)), example(4, np.float32)
    for options, step, said in ((dict(dedup='frame'), image, 'dedup'), (dict(codec='zip'), image, 'codec'), (dict(dedup='frames'), little, 'dedup'),
                                (dict(codec='lz4'), little, 'codec'), (dict(codec='lz4', dedup=None), image, 'codec'),
                                (dict(dedup='next_state'), Only(image.state), 'dedup')):
        with refused(said): storage_for(Layout.of(step), 10, **options)
    for options in (('x', None), (['auto'], None), ('auto', 'zip'), (None, 'lz4'), ('auto', 'lz4', True)):
        with refused('codec' if len(options) > 2 or options[1]=='zip' or options[0] is None else 'dedup'): check_storage_options(*options)
    monkeypatch.setitem(__import__('sys').modules, 'lz4.block', None)
    with pytest.raises(ImportError, match=words('the package lz4')): check_storage_options('auto', 'lz4')


# --- bytes --------------------------------------------------------------------------------------------------------------
def test_an_estimate_is_what_is_allocated():
    for shape, chosen in (((4, 84, 84), 'frames'), ((16_000,), 'next_state'), ((4,), 'plain')):
        s = np.zeros(shape, np.uint8)
        step = SimpleStep(s, 0, s)
        for max_sz in (1, 100, 12_345):
            told = ReplayMemory.estimate(step, max_sz)
            assert told.chosen==chosen and told.nbytes==getattr(told, chosen)
            for dedup, want in (('auto', told.nbytes), (None, told.plain)):
                assert storage_for(Layout.of(step), max_sz, dedup).nbytes==want
    s = np.zeros((4, 84, 84), np.uint8)
    assert '56.5 GB as plain' in str(ReplayMemory.estimate(SimpleStep(s, 0, s), 1_000_000))

def test_an_estimate_from_spaces():
    import gymnasium as gym
    box, act = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(6)
    env = type('Env', (), dict(observation_space=box, action_space=act))()
    s = np.zeros((4, 84, 84), np.uint8)
    assert ReplayMemory.estimate(env, 1000)==ReplayMemory.estimate(SimpleStep(s, 0, s), 1000)
    envs = gym.make_vec('CartPole-v1', 3)
    assert ReplayMemory.estimate(envs, 1000).chosen=='plain'
    envs.close()
    assert ReplayMemory.estimate(box, 1000)==ReplayMemory.estimate(SimpleStep(s, 0, s), 1000)        # an action of one number
    twelve = ReplayMemory.estimate((box, gym.spaces.MultiBinary(200)), 1000)
    assert twelve==ReplayMemory.estimate(SimpleStep(s, np.zeros(200, np.int8), s), 1000)!=ReplayMemory.estimate(box, 1000)
    assert ReplayMemory.estimate(gym.spaces.Dict(a=box, b=act), 1000).chosen=='frames'
    nested = type('Env', (), dict(observation_space=gym.spaces.Dict(a=box, b=gym.spaces.Tuple([act, act])), action_space=act))()
    assert ReplayMemory.estimate(nested, 1000).chosen=='frames'
    text = type('Env', (), dict(observation_space=gym.spaces.Text(5), action_space=act))()
    many = type('Env', (), dict(observation_space=gym.spaces.Sequence(box), action_space=act))()
    for bad, said in ((text, 'state'), (many, 'estimate'), (7, 'estimate'), ('CartPole-v1', 'estimate'), (gym.spaces.Sequence(box), 'estimate'), ((box, 3), 'estimate')):
        with refused(said, TypeError): ReplayMemory.estimate(bad, 10)

def test_a_storage_that_does_not_fit_is_refused(monkeypatch):
    "With the figure, and the largest that fits: which fits, and one a little larger doesn't"
    layout = Layout.of(example((4, 84, 84)))
    monkeypatch.setattr(choice, 'free_memory', lambda: 10**9)
    for dedup in ('auto', None):
        with refused('max_sz', MemoryError) as e:
            storage_for(layout, 1_000_000, dedup)
        most = int(str(e.value).split('at most ')[1].split(' fit')[0].replace(',', ''))
        assert storage_for(layout, most, dedup).nbytes <= 10**9
        with pytest.raises(MemoryError): storage_for(layout, most + 300, dedup)
    with refused('max_sz', MemoryError): check_fits(layout, 10, tables_for(layout, interned(layout)), free=5)

def test_pages_are_taken_as_they_are_written():
    def resident():
        with open('/proc/self/statm') as f: return int(f.read().split()[1])*4096
    steps = calm(shape=(84, 84), stack=4).steps(3000)
    before = resident()
    storage = storage_for(Layout.of(steps[0]), 200_000)
    assert storage.nbytes > 1.4e9 and resident() - before < 50e6
    for o in steps: storage.add(o)
    assert resident() - before < 3000*7300 + 12e6


# --- state --------------------------------------------------------------------------------------------------------------
def taken(state):
    "A state as it comes back from a file: copies"
    return {k: taken(v) if isinstance(v, dict) else v.copy() if isinstance(v, np.ndarray) else v for k, v in state.items()}

@pytest.mark.parametrize('codec', [None, 'lz4'])
@pytest.mark.parametrize('world', ['stacks', 'rooms', 'vectors', 'long'])
def test_a_state_in_pieces_is_loaded_as_it_was(world, codec):
    "Each piece holds what is new; pieces of which no row lives are dropped, as saving does"
    for seed, max_sz in ((0, 25), (1, 6), (2, 90)):
        pair, pieces = Pair(world, seed, max_sz, codec=codec), []
        for k in range(25):
            for _ in range(4): pair.add() if pair.rng.random() < .8 else pair.extend()
            pieces = [o for o in pieces if o['n_added'] > pair.storage.first_id]
            pieces.append(taken(pair.storage.get_state(pieces[-1]['n_added'] if pieces else 0)))
            fresh = storage_for(pair.storage.layout, max_sz, **pair.options)
            fresh.set_state(pieces)
            assert fresh.check_valid() and digest(fresh)==digest(pair.storage)
            if k % 4==0: pair.storage = fresh                       # and it goes on from there
            pair.check()

def test_a_piece_that_is_missing_is_noticed():
    storage, world = filled(calm(), 5, 50), calm(1)
    pieces = [taken(storage.get_state())]
    for _ in range(2):
        for step in world.steps(3): storage.add(step)
        pieces.append(taken(storage.get_state(pieces[-1]['n_added'])))
    fresh = storage_for(storage.layout, 50)
    with refused('state'): fresh.set_state(pieces[::2])
    fresh.set_state(pieces)
    assert digest(fresh)==digest(storage)

def test_a_state_of_another_kind_is_refused():
    kinds = [dict(dedup='frames'), dict(dedup='next_state'), dict(dedup=None), dict(dedup='frames', codec='lz4')]
    storages = [filled(World(0), 30, 20, **o) for o in kinds]
    for a in storages:
        for b in storages:
            if a is b: continue
            before = digest(b)
            with refused('state'): b.set_state([taken(a.get_state())])
            assert digest(b)==before and b.check_valid()

@pytest.mark.parametrize('codec', [None, 'lz4'])
def test_a_damaged_state_is_refused_and_nothing_crashes(codec):
    "Every array of a state in turn: too short, of another type, with numbers that can't be, with any number; never a crash"
    rng, source = np.random.default_rng(0), filled(World(0), 60, 40, dedup='frames', codec=codec)
    names, refused = list(source.get_state()['frames']['0']), 0
    def spoilt(a):
        kind = rng.integers(5)
        if not isinstance(a, np.ndarray): return [None, 7, 'x', [], {}][kind]
        if kind==0: return a[:-1]
        if kind==1: return a.astype(np.float64)
        if kind==2: return None
        a = a.copy()
        a.reshape(-1)[rng.integers(a.size, size=3)] = [np.iinfo(a.dtype).min, 0, np.iinfo(a.dtype).max][rng.integers(3)]
        return a
    for trial in range(300):
        state, storage = taken(source.get_state()), storage_for(source.layout, 40, 'frames', codec)
        name = names[trial % len(names)]
        state['frames']['0'][name] = spoilt(state['frames']['0'][name])
        if trial % 7==0: state['records'][rng.integers(40), rng.integers(storage.size)] ^= 1 << rng.integers(8)
        try: storage.set_state([state])
        except ValueError:
            refused += 1
            continue
        try: recent(storage, 40), storage.check_valid()
        except (ValueError, RuntimeError, AssertionError): pass
    assert refused > 100


# --- memories -----------------------------------------------------------------------------------------------------------

def test_saves_in_which_old_rows_are_dropped(tmp_path):
    "A still picture is held by new rows and was stored by one that is long gone: each save can be loaded"
    memory, world, still = ReplayMemory(30, dedup='frames', seed=0), World(0), World(1).step()
    for k in range(40):
        for step in world.steps(7): memory.add(step)
        memory.add(still._replace(env_id=9))
        memory.save(tmp_path)
        if k % 3==0:
            loaded = ReplayMemory.load(tmp_path)
            assert loaded.check_valid() and seen(loaded.recent(len(memory)))==seen(memory.recent(len(memory)))
        if k % 10==9: memory, loaded = loaded if k % 3==0 else ReplayMemory.load(tmp_path), None


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
    plain, memories = ReplayMemory(250, dedup=None), [ReplayMemory(250), ReplayMemory(250, codec='lz4')]
    n = 0
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
        assert memory.check_valid()
    assert memories[0].nbytes < 300*7300 and memories[1].nbytes < 300*1500
    last = {}
    for step in plain.recent(250):
        before = last.get(step.env_id)
        if before is not None and before.episode_n==step.episode_n:
            assert step.step_n==before.step_n + 1 and (step.state==before.next_state).all()
        last[step.env_id] = step
    assert len(last)==(n_envs or 1)
