"""Worker processes: the same steps, apart from one another, and every way they can fail."""
import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest
import torch

from acting import Counting, Make, Source, Unfindable
from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.actors import ActorError, Actors, Crew, gather
from fastrl_replay.pipes.agents import EpsilonGreedy
from fastrl_replay.pipes.base import IterDataPipe
from fastrl_replay.pipes.n_step import NStep
from fastrl_replay.pipes.replay import ExperienceReplay, batches_due
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.schedules import LinearSchedule
from fastrl_replay.steps import SimpleStep, Transition
from harness import check_constant_size, check_resume, seen, through_json
from twins import named
from refusals import refused
from words import WORDS, words

multiprocessing.set_forkserver_preload(['fastrl_replay.all'])       # its workers start at once then
ROOT = Path(__file__).resolve().parent.parent
CONTEXTS = ['fork', 'forkserver', 'spawn']
pytestmark = pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')


def actors(source, n=1, ctx='fork', **kw): return Actors(source, n, ctx, **kw)

def taken(pipe, k): return list(itertools.islice(pipe, k))

def rows(chunks): return [s for c in chunks for s in c]

def until(happens, patience=20):
    "Does it happen, within so many seconds?"
    limit = time.monotonic() + patience
    while not happens():
        if time.monotonic() > limit: return False
        time.sleep(.02)
    return True

def gone(pids, patience=20): return until(lambda: not any(alive(p) for p in pids), patience)

def alive(pid):
    try: return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]!='Z'
    except FileNotFoundError: return False

def pids(pipe): return [o.process.pid for o in pipe._crew.workers.values()]


# --- what arrives -------------------------------------------------------------------------------------------------------
def cartpole(n_envs=1):
    model = torch.nn.Linear(4, 2)
    torch.nn.init.constant_(model.weight, .1)
    torch.nn.init.zeros_(model.bias)
    agent = EpsilonGreedy(model, LinearSchedule(1., .1, 50), seed=5)
    return NStep(GymStepper(['CartPole-v1'], agent=agent, seed=3, n_envs=n_envs), 3, .99)

class Films(IterDataPipe):
    "Stacks of frames of three games in turns; now and then a game begins anew, and a stack has nothing to do with the last one"
    def __iter__(self):
        rng = np.random.default_rng(0)
        stacks = [rng.integers(0, 255, (4, 30, 30), np.uint8) for _ in range(3)]
        for k in range(600):
            env, new = k % 3, rng.integers(0, 255, (1, 30, 30), np.uint8)
            state, stacks[env] = stacks[env], np.concatenate([stacks[env][1:], new])
            yield SimpleStep(state, k, stacks[env], env_id=env)
            if rng.random() < .05: stacks[env] = rng.integers(0, 255, (4, 30, 30), np.uint8)

def test_frames_arrive_to_the_bit_and_each_is_sent_once(monkeypatch):
    none, one = (taken(actors(Films(), k, chunk=50), 8) for k in (0, 1))
    for a, b in zip(none, one):
        for u, v in zip(a.arrays(), b.arrays()): assert u.dtype==v.dtype and (u==v).all() and v.flags.writeable
    n_sent, loads = [], pickle.loads
    monkeypatch.setattr('fastrl_replay.pipes.actors.pickle.loads', lambda content: n_sent.append(len(content)) or loads(content))
    chunk = taken(actors(Films(), 1, chunk=300), 1)[0]
    assert .9*300 < max(n_sent)/900 < 1.4*300 and len(chunk)==300         # of the eight frames of a step little more than one

@pytest.mark.parametrize('n_envs', [1, 4])
def test_one_worker_makes_the_very_steps_that_none_makes(n_envs):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        pipes = [actors(cartpole(n_envs), k, chunk=50) for k in (0, 1, 2)]
    none, one, two = (taken(o, 8) for o in pipes)
    assert seen(none)==seen(one)
    by_worker = [[c for c in two if c.env_id[0] % 2==w] for w in (0, 1)]
    for field in set(none[0].step_type._fields) - {'env_id'}:
        assert seen([c[field] for c in by_worker[0]])==seen([c[field] for c in none[:4]])
    assert {s.proc_id for s in rows(by_worker[1])}=={1} and {s.env_id for s in rows(by_worker[1])}=={2*k + 1 for k in range(n_envs)}
    assert {s.env_id for s in rows(by_worker[0])}=={2*k for k in range(n_envs)}
    firsts = [tuple(s.state) for c in two[:2] for s in c if s.step_n==0 and s.episode_n==0]
    assert len(set(firsts))==len(firsts)==2*n_envs, 'two streams begin alike'
    mine, theirs = ([s.action for s in rows(c)] for c in by_worker)
    assert mine!=theirs
    for o in pipes: o.close()


@pytest.mark.parametrize('ctx', CONTEXTS)
def test_every_start_method_gives_the_same_steps_in_the_same_order(ctx):
    def make(how, n): return NStep(GymStepper([Make(length=5)]*2, seed=1), 3, .9).actors(n, ctx=how, chunk=10)
    pipe = make(ctx, 2)
    got = taken(pipe, 8)
    used = make('fork', 2)
    assert seen(got)==seen(taken(used, 8))
    processes = pids(pipe)
    pipe.close(), used.close()
    assert gone(processes, 0)


@pytest.mark.parametrize('kind', ['single', 'vector'])
def test_streams_are_whole_and_windows_never_mix(kind):
    "Three workers of two streams: every stream is the unbroken n-step image of one environment"
    n_envs = 1 if kind=='single' else 2
    pipe = NStep(GymStepper([Make(length=5)]*(2//n_envs), seed=1, n_envs=n_envs), 3, .9).actors(3, ctx='fork', chunk=11)
    got = rows(taken(pipe, 40))
    pipe.close()
    streams = {k: [s for s in got if s.env_id==k] for k in sorted({s.env_id for s in got})}
    assert list(streams)==list(range(6)) and len({s[0].state[0] for s in streams.values()})==6
    for k, steps in streams.items():
        assert {s.proc_id for s in steps}=={k % 3} and len({s.state[0] for s in steps})==1
        for i, s in enumerate(steps):
            assert (s.episode_n, s.step_n)==divmod(i, 5) and tuple(s.state[1:])==divmod(i, 5)
            m = min(3, 5 - i % 5)
            assert s.next_state[2]==s.step_n + m and s.truncated==(s.step_n + m==5) and s.discount==pytest.approx(.9**m)
            assert s.reward==pytest.approx(sum(.9**j*(s.state[0] % 7 + s.step_n + j + 1) for j in range(m)), rel=1e-5)


@pytest.mark.parametrize('rows_,stacked', [(0, False), (3, False), (3, True)])
@pytest.mark.parametrize('n', [0, 1, 3])
def test_steps_without_env_id_keep_their_streams(n, rows_, stacked):
    "In the memory the links are those of each worker's stream: single steps and lists are one, rows of a batch one each"
    pipe = actors(Source(rows=rows_, step_type=Transition, stacked=stacked), n, chunk=10)
    memory = ReplayMemory(1000, seed=0)
    for c in taken(pipe, 9): memory.extend(c)
    pipe.close()
    assert memory.check_valid()
    every = [s.state[0] for s in memory]
    if n==0 or rows_==0: assert len(memory)>=90
    step, width = rows_ if stacked else 1, max(1, n)
    for id in range(0, memory.n_added, 7):
        episode = memory.episode(id).state[:, 0].tolist()
        assert np.all(np.diff(episode)==step) and every[id] in episode
        assert len(episode)==pytest.approx(len(memory)/step/width, abs=8)


def test_a_chunk_is_what_the_memory_would_have_stored_step_by_step():
    def source(): return GymStepper(['CartPole-v1'], seed=4)
    one, other = ReplayMemory(500, seed=0), ReplayMemory(500, seed=0)
    pipe = actors(source(), 1, chunk=32)
    for c in taken(pipe, 10): one.extend(c)
    pipe.close()
    for s in taken(source(), 320): other.add(s)
    assert seen(one.recent(320))==seen(other.recent(320)) and seen(one.sample(64))==seen(other.sample(64))


def test_gather():
    steps = [SimpleStep(np.full(2, i, np.float32), i, np.zeros(2, np.float32)) for i in range(100)]
    def sizes(items, size): return [len(chunk) for chunk, _ in gather(items, size)]
    assert sizes(steps, 30)==[30, 30, 30, 10] and sizes([], 5)==[] and sizes([[], steps[:0]], 5)==[]
    stacked = Batch.of(SimpleStep(*map(np.array, zip(*steps[:8]))))
    assert sizes([stacked]*5, 20)==[24, 16] and sizes([stacked], 5)==[8]
    assert sizes([steps[0], stacked, steps[:3], steps[1]], 13)==[13]
    other = Transition(np.zeros(2), 0, 0., np.zeros(2), False, False)
    got = [a for b, _ in gather([steps[0], stacked, steps[1:4], steps[4]], 13) for a in b['action'].tolist()]
    assert got==[0, *range(8), 1, 2, 3, 4]
    with refused('step', TypeError): list(gather([steps[0], other], 2))
    with refused('step', TypeError): list(gather([steps[0], other], 1))
    with refused('step', TypeError, got='int 3'): list(gather([3]))
    notes = itertools.count()
    assert [v for _, v in gather(steps, 25, begin=lambda: next(notes))]==[0, 1, 2, 3]


def test_a_slow_environment_does_not_keep_the_learner_waiting():
    pipe = actors(GymStepper([Make(pause=.02)], seed=0), 1, timeout=1)
    first, second = taken(pipe, 2)
    pipe.close()
    assert 1 <= len(first) < 40 and 1 <= len(second) < 40


def test_a_source_that_ends_is_begun_anew():
    "As without workers: windows stay open over the end, and nothing is lost"
    def values(n):
        pipe = actors(NStep(Source(10), 4, 1.), n, chunk=6)
        got = [[s.state[0] for s in rows(list(pipe))] for _ in range(3)]
        pipe.close()
        return got
    assert values(0)==values(1)==[list(range(7)), list(range(7, 17)), list(range(17, 27))]
    assert [sorted(o) for o in values(2)]==[sorted(2*o) for o in values(0)]


@pytest.mark.parametrize('n', [0, 2])
def test_leaving_the_loop_loses_nothing(n):
    pipe = actors(Source(), n, chunk=5)
    got = []
    for k in (1, 3, 0, 2, 6): got += [s for c in taken(pipe, k) for s in c]
    pipe.close()
    for w in range(max(1, n)):
        mine = [s.state[0] for s in got if s.env_id==w]
        assert mine==list(range(len(mine))) and len(mine)==60//max(1, n)


def test_as_they_come():
    "Out of order, a slow worker holds up nobody; what comes is the same"
    pipe = actors(Source(200, k=2), 3, chunk=10, in_order=False)
    got = rows(list(pipe))
    again = rows(list(pipe))
    pipe.close()
    for o, start in ((got, 0), (again, 200)):
        for w in range(3): assert [s.state[0] for s in o if s.env_id % 3==w]==list(range(start, start + 200))


def test_no_more_is_under_way_than_was_agreed():
    counter = multiprocessing.Value('q', 0)
    pipe = actors(Source(counter=counter), 2, chunk=16, in_flight=3)
    for k, _ in zip(range(1, 30), pipe):
        time.sleep(.005 if k % 7 else .2)
        assert counter.value <= 16*(k + 2*3) and (k % 7 or counter.value > 16*(k + 2))
    pipe.close()


# --- exactness ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('steps_per_batch', [.4, 1, 2.5, 30])
@pytest.mark.parametrize('chunk', [1, 7, 64])
def test_the_ratio_holds_to_the_step(steps_per_batch, chunk):
    pipe = actors(Source(k=2), 2, chunk=chunk)
    replay = ExperienceReplay(pipe, bs=8, max_sz=500, min_sz=50, steps_per_batch=steps_per_batch, seed=0)
    for k, _ in enumerate(itertools.islice(replay, 60), 1):
        n = replay.memory.n_added
        assert n >= 50 and replay.n_batches==k <= batches_due(n, 50, replay.steps_per_batch) and n % chunk==0
        assert batches_due(n - chunk, 50, replay.steps_per_batch) < k, 'a chunk came too early'
    assert replay.memory.check_valid()
    pipe.close()


# --- faults -------------------------------------------------------------------------------------------------------------
FAULTS = dict(raise_=('raise', words('a worker raised', worker=0, error='OSError: the robot ran out of battery')), odd=('odd', words('a worker raised', worker=0, error='Odd: nobody can unpickle me')),
              pipe=('pipe', words('a worker raised', worker=0, error='BrokenPipeError: the robot hung up')),
              kill=('kill', words('a worker was killed', worker=0)), exit=('exit', words('a worker left', worker=0, code=7)),
              leave=('leave', words('a worker raised', worker=0, error='SystemExit: 3')), hang=('hang', words('a worker is silent', worker=0, seconds=1.5)))

@pytest.mark.parametrize('fault', FAULTS)
def test_one_clear_error_and_the_memory_stays_usable(fault):
    trouble, said = FAULTS[fault]
    replay = ExperienceReplay(actors(GymStepper([Make(at=100, trouble=trouble)], seed=0), 2, chunk=16, timeout=1.5), bs=8, max_sz=500, seed=0)
    pipe, n = replay.source_datapipe, 0
    with pytest.raises(ActorError, match=said) as caught:
        for _ in replay:
            n += 1
            processes = pids(pipe) or processes      # noqa: F821
    memory = replay.memory
    assert memory.check_valid() and len(replay.sample(8))==8 and gone(processes) and not pipe._crew
    if trouble in ('raise', 'odd'):
        kept = [s for s in memory if s.env_id==0]
        assert [s.episode_n*7 + s.step_n for s in kept]==list(range(100)), 'steps made before the error are missing'
        assert 'in strike' in caught.value.__notes__[0]
        assert repr(caught.value.__cause__)==("OSError('the robot ran out of battery')" if trouble=='raise' else 'None')
    before = memory.n_added
    taken(replay, 40)                                  # new workers, with new streams
    assert memory.n_added > before and memory.check_valid() and {int(s.env_id) for s in memory.recent(20)} <= {2, 3}
    assert pipe.n_restarts==0
    pipe.close()


class Paid(Counting):
    "Its fifth reward is `reward`"
    def __init__(self, reward): self.reward = reward; super().__init__()
    def step(self, action):
        obs, reward, *others = super().step(action)
        return obs, self.reward if self.life==5 else reward, *others

def steps_with(reward):
    for k in range(20): yield SimpleStep(np.zeros(2), 0, np.ones(2), False, False, reward if k==5 else 1, step_n=k)

class Steps(IterDataPipe):
    def __init__(self, reward): self.reward = reward
    def __iter__(self): return steps_with(self.reward)

PAID = dict(stepper=lambda reward: GymStepper([functools.partial(Paid, reward)], seed=0), n_step=lambda reward: NStep(PAID['stepper'](reward), 3, .9),
            own=Steps, own_n_step=lambda reward: NStep(Steps(reward), 3, .9))

@pytest.mark.parametrize('pipe', PAID)
@pytest.mark.parametrize('reward', ['high', '1.5', None, np.ones(2), torch.ones(2), {'a': 1}, 1j, [[1], [1, 2]]], ids=named)
def test_a_wrong_reward_is_named(pipe, reward):
    with refused('reward', (TypeError, ValueError)): taken(actors(PAID[pipe](reward), 0, chunk=8), 5)
    if reward is not None: return                                   # the same message travels with any of them
    failing = actors(PAID[pipe](reward), 1, chunk=8)
    with pytest.raises(ActorError, match=words('a worker refused a reward', worker=0)): taken(failing, 5)
    failing.close()


@pytest.mark.parametrize('trouble', ['raise', 'kill', 'hang'])
def test_a_dead_worker_is_replaced(trouble):
    pipe = actors(GymStepper([Make(at=40, trouble=trouble)], seed=0), 2, chunk=8, timeout=.7 if trouble=='hang' else 20, restart=True)
    with pytest.warns(RuntimeWarning, match=WORDS['a worker is replaced']):
        got = rows(taken(pipe, 25))
    assert pipe.n_restarts >= 2 and pipe.stats()['n_restarts']==pipe.n_restarts and sum(pipe.stats()['n_chunks'])==25
    assert sum(pipe.stats()['n_steps'])==len(got)
    streams = {k: [s for s in got if s.env_id==k] for k in sorted({s.env_id for s in got})}
    assert list(streams)==list(range(len(streams))) and len(streams) >= 4
    assert len({s[0].state[0] for s in streams.values()})==len(streams), 'a replacement repeats a stream'
    for steps in streams.values():
        assert [7*s.episode_n + s.step_n for s in steps]==list(range(len(steps))) and len({s.proc_id for s in steps})==1
    assert len({s[0].proc_id for s in streams.values()})==len(streams)
    pipe.close()


class Large(Source):
    "Steps of 4 MB, so that a worker waits in the middle of a message"
    def one(self): return super().one()._replace(state=np.zeros(2**19, np.float32), next_state=np.zeros(2**19, np.float32))

def test_a_worker_that_was_stopped_in_the_middle_of_a_message():
    pipe = actors(Large(), 1, chunk=1, timeout=1)
    it = iter(pipe)
    next(it)
    time.sleep(.5)                                     # the next message fills the socket's buffer
    processes = pids(pipe)
    os.kill(processes[0], signal.SIGSTOP)
    with pytest.raises(ActorError, match=words('a worker is silent', worker=0, seconds=1)): next(it)
    assert gone(processes)


def test_restarts_end():
    "After as many as were allowed, or when a worker fails before it has made anything"
    pipe = actors(GymStepper([Make(at=10, trouble='raise')], seed=0), 1, chunk=8, restart=3)
    with pytest.warns(RuntimeWarning), pytest.raises(ActorError, match='battery'): list(pipe)
    assert pipe.n_restarts==3
    pipe = actors(GymStepper([Make(at=0, trouble='raise')], seed=0), 1, chunk=8, restart=True)
    with pytest.raises(ActorError, match='battery'): list(pipe)
    assert pipe.n_restarts==0


@pytest.mark.parametrize('ctx', ['spawn', 'forkserver'])
def test_what_cannot_be_pickled_is_refused_before_anything_starts(ctx):
    pipe = actors(GymStepper(['CartPole-v1'], agent=lambda s: [0], seed=0), 2, ctx)
    replay = ExperienceReplay(pipe, bs=4)
    with pytest.raises(TypeError, match=WORDS['it cannot be sent']): next(iter(replay))
    assert not pipe._crew and len(replay)==0 and replay.memory.check_valid()
    pipe = actors(GymStepper(['CartPole-v1'], agent=lambda s: [0], seed=0), 1, 'fork')
    assert len(taken(pipe, 2))==2
    pipe.close()


def test_what_cannot_be_unpickled_there_is_told_here():
    pipe = actors(Unfindable(), 1, 'forkserver')
    with pytest.raises(ActorError, match=words('a worker raised', worker=0, error='ImportError: no module named robots')): next(iter(pipe))


def test_a_bad_step_names_its_field():
    def bad():
        yield from Source(20)
        yield SimpleStep(np.zeros(2, np.float32), 0, np.zeros(1, np.float32))
    class Bad(Source):
        def __iter__(self): return bad()
    pipe = actors(Bad(), 1, chunk=8)
    with pytest.raises(ActorError, match=WORDS['a refused state']): list(pipe)


def test_wrong_arguments():
    for name, value in (('num_workers', -1), ('num_workers', 1.5), ('chunk', 0), ('timeout', 0), ('in_flight', 0)):
        with refused(f'actors: {name}', got=repr(value)): Source().actors(**dict(num_workers=1) | {name: value})
    with pytest.raises(ValueError, match=words('no such context', name='thread')): Source().actors(1, ctx='thread')
    with refused('actors', got='ExperienceReplay'): ExperienceReplay(Source(), bs=2).actors(2)
    with refused('actors', got='Actors(1)'): Source().actors(1).actors(1)
    with pytest.warns(UserWarning, match=WORDS['share the weights']): cartpole().actors(1)
    small = actors(GymStepper([Make()], seed=0), 300)
    narrow = Batch.of(SimpleStep(*[np.zeros((3, 1))]*3, *[np.zeros(3)]*4, env_id=np.zeros(3, np.int8), proc_id=np.zeros(3), step_n=np.zeros(3), episode_n=np.zeros(3)))
    with refused('env_id', got='int8'): small._numbers.put(narrow, 200)


def test_a_memory_refuses_to_run_in_an_actor():
    class Hidden(Source):
        def __init__(self): self.replay = lambda: ExperienceReplay(Source(), bs=2)
        def __iter__(self): return iter(self.replay())
    with pytest.raises(ActorError, match=words('a pipe in an actor', worker=0)): list(actors(Hidden(), 1))


# --- state --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('rows_', [0, 3])
def test_without_workers_a_state_is_exact(rows_):
    def make(): return actors(Source(rows=rows_, k=2), 0, chunk=7)
    check_resume(make, taken, through=through_json)
    check_constant_size(make, taken)
    def whole(): return ExperienceReplay(make(), bs=4, max_sz=50, steps_per_batch=3, seed=1)
    def save(o): return dict(memory=o.memory.state_dict(), pipe=through_json(o.state_dict()))
    def load(o, state):
        o.memory.load_state_dict(state['memory'])
        o.load_state_dict(state['pipe'])
    def run(o, k): return taken(o, k)
    check_resume(whole, run, save=save, load=load)


def test_workers_go_on_with_new_streams_after_a_load():
    "The same ones after each load of the same state, whatever was there before, and by any number of workers none that were there before"
    def make(n=2): return actors(GymStepper([Make()], seed=3), n, chunk=9)
    old = make()
    before = rows(taken(old, 7))
    state = through_json(old.state_dict())
    a, b, used, more = make(), make(), make(), make(3)
    taken(used, 5)
    for o in (a, b, used, more): o.load_state_dict(state)
    after = taken(a, 6)
    assert seen(after)==seen(taken(b, 6))==seen(taken(used, 6))
    for new in (rows(after), rows(taken(more, 6))):
        for field in ('env_id', 'proc_id'): assert not {getattr(s, field) for s in before} & {getattr(s, field) for s in new}
        assert not {s.state[0] for s in before} & {s.state[0] for s in new}
    assert through_json(make().state_dict())==make().state_dict()
    for o in (old, a, b, used, more): o.close()


# --- nothing stays ------------------------------------------------------------------------------------------------------
def shared_files(pids):
    "The files in shared memory, semaphores among them, that these processes have open or mapped"
    maps = [line.split(maxsplit=5)[-1].strip() for p in pids for line in Path(f'/proc/{p}/maps').read_text().splitlines()]
    files = [os.readlink(o) for p in pids for o in Path(f'/proc/{p}/fd').iterdir() if o.is_symlink()]
    return {Path(o) for o in maps + files if o.startswith('/dev/shm/') and not o.endswith(' (deleted)')}

def test_a_forgotten_pipe_ends_its_workers():
    pipe = actors(Source(), 2)
    taken(pipe, 3)
    processes = pids(pipe)
    assert all(map(alive, processes))
    del pipe
    gc.collect()
    assert gone(processes)


SCRIPT = '''
import sys, os, signal, time
from acting import Make
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.pipes.weights import SharedAgent, SharedParams
from fastrl_replay.pipes.agents import EpsilonGreedy
import fastrl_replay.pipes.actors, fastrl_replay.pipes.replay, torch
if __name__=='__main__':
    signal.signal(signal.SIGINT, signal.default_int_handler)         # as in a terminal: whoever runs the tests may have it ignored
    model = torch.nn.Linear(3, 2)
    agent = SharedAgent(EpsilonGreedy(model, .5, seed=0), SharedParams(model))
    pipe = GymStepper([Make(pause=float(sys.argv[2]))], agent=agent, seed=0).actors(2, ctx=sys.argv[1], chunk=8)
    for k, batch in enumerate(pipe.experience_replay(bs=4, min_sz=16)):
        if k==1: print('running', flush=True)
'''

def session(pid):
    "All living processes of the session that `pid` leads"
    found = []
    for o in os.listdir('/proc'):
        if not o.isdigit(): continue
        try: fields = Path(f'/proc/{o}/stat').read_text().rpartition(')')[2].split()
        except (FileNotFoundError, ProcessLookupError): continue
        if int(fields[3])==pid and fields[0]!='Z': found.append(int(o))
    return found

@pytest.mark.skipif(not os.path.isdir('/dev/shm'), reason='looks for files in /dev/shm')
def test_shared_memory_would_be_seen():
    own = SharedMemory(create=True, size=64)
    try: assert Path('/dev/shm')/own.name in shared_files([os.getpid()])
    finally:
        own.close()
        own.unlink()

@pytest.mark.skipif(not os.path.isdir('/proc/self'), reason='looks for processes in /proc')
@pytest.mark.parametrize('ctx,sign', [('spawn', signal.SIGINT), ('forkserver', signal.SIGKILL), ('fork', signal.SIGINT), ('fork', signal.SIGKILL), ('spawn', signal.SIGTERM)])
def test_no_process_and_no_shared_memory_is_left(ctx, sign, tmp_path):
    "Ctrl-C goes to all of them at once; a kill to the learner alone, while its workers are in the middle of a step"
    (tmp_path/'script.py').write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT), str(ROOT/'tests'), os.environ.get('PYTHONPATH', '')])
    run = subprocess.Popen([sys.executable, 'script.py', ctx, '.001'], cwd=tmp_path, env=os.environ | dict(PYTHONPATH=path), text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        assert run.stdout.readline()=='running\n', run.stderr.read()
        assert len(session(run.pid)) >= 3
        assert not shared_files(session(run.pid)), 'what has a name may be left behind'
        (os.killpg if sign==signal.SIGINT else os.kill)(run.pid, sign)
        run.wait(30)
        assert gone(session(run.pid)), 'orphans'
        said = run.stderr.read()
        if sign==signal.SIGINT: assert said.count('Traceback')==1 and said.rstrip().endswith('KeyboardInterrupt'), said
    finally:
        for pid in session(run.pid): os.kill(pid, signal.SIGKILL)
        run.stdout.close(), run.stderr.close()


def test_workers_hold_no_files_of_one_another():
    "Else the end of one would not be seen, and the end of the learner would not be seen by any"
    pipe = actors(Source(), 3)
    taken(pipe, 3)
    sockets = [sum(os.readlink(f'/proc/{p}/fd/{f}').startswith('socket') for f in os.listdir(f'/proc/{p}/fd')) for p in pids(pipe)]
    mine = sum(os.readlink(o).startswith('socket') for o in map('/proc/self/fd/{}'.format, os.listdir('/proc/self/fd')) if os.path.islink(o))
    assert max(sockets) <= mine - 3 + 1
    pipe.close()


def test_counting_is_what_the_tests_take_it_for():
    env = Counting(length=3)
    assert env.reset(seed=5)[0].tolist()==[5, 0, 0] and [env.step(0)[3] for _ in range(3)]==[False, False, True]


# --- the supervisor ------------------------------------------------------------------------------------------------------
class Late(IterDataPipe):
    "A source whose worker needs some seconds until it has begun"
    def __init__(self, seconds): self.seconds = seconds
    def __iter__(self): return iter([SimpleStep(np.zeros(2, np.float32), 0, np.ones(2, np.float32), step_n=k) for k in range(8)])
    def in_worker(self, number): time.sleep(self.seconds)

def test_a_worker_that_starts_gets_five_times_the_patience():
    pipe = Actors(Late(.9), 1, ctx='fork', chunk=4, timeout=.3)
    assert [len(o) for o in pipe]==[4, 4]
    pipe.close()
    pipe = Actors(Late(60), 1, ctx='fork', timeout=.2)
    with pytest.raises(ActorError, match=words('a worker has not started', worker=0, seconds=1)) as caught: next(iter(pipe))
    assert not caught.value.again and not pipe._crew

class Hired:
    "A worker that notes what happens to it"
    def __init__(self, place, number, told): self.place, self.number, self.told = place, number, told
    def close(self): self.told.append(('close', self.number))
    def join(self, limit): self.told.append(('join', self.number, limit > time.monotonic()))

def test_a_crew_numbers_replaces_and_ends():
    told, crew = [], Crew(2, restart=True, each=2)
    def start(place, number): return Hired(place, number, told)
    def fails(place):
        with pytest.warns(RuntimeWarning, match='broken'): crew.replace(place, ActorError('broken'), start)
    crew.begin(start), crew.begin(start)
    assert [o.number for o in crew.workers.values()]==[0, 1]
    fails(1), fails(1), fails(0)
    assert {k: o.number for k, o in crew.workers.items()}=={0: 2, 1: 5} and crew.n_restarts==3
    assert told==[(what, n, *([True] if what=='join' else [])) for n in (1, 3, 0) for what in ('close', 'join')]
    for place, again in ((1, True), (0, False)):                 # two in this place already; another one would do no better
        (error := ActorError('broken')).again = again
        with pytest.raises(ActorError, match='broken'): crew.replace(place, error, start)
    copy = pickle.loads(pickle.dumps(crew)) if not crew.end() else None
    assert told[-4:-2]==[('close', 5), ('close', 2)] or told[-4:-2]==[('close', 2), ('close', 5)]
    assert not crew and not copy and copy.starts==[2, 3]
    crew.begin(start)
    fails(1)                                                     # its places are new, its numbers are not
    assert {k: o.number for k, o in crew.workers.items()}=={0: 4, 1: 9}

def test_a_forked_copy_of_a_crew_ends_nobody():
    told, crew = [], Crew(1)
    crew.begin(lambda place, number: Hired(place, number, told))
    crew.pid += 1                                                # as if this were a child of who started them
    crew.end()
    assert not told and not crew
