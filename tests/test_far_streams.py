"""Stream numbers from anywhere in 64 bits, such as hashed ids, are ordinary numbers everywhere, beside twins that know a dict only."""
import collections

import numpy as np
import pytest

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.actors import Actors, apart
from fastrl_replay.pipes.n_step import NStep
from fastrl_replay.steps import SimpleStep, Transition
from refusals import refused

LEAST, MOST = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)
STREAMS = dict(
    ends=[LEAST, MOST],
    around=[LEAST, LEAST + 1, -1, 0, 1, MOST - 1, MOST],
    halves=[LEAST, 0, MOST, -2**62, 2**62, 2**32, -2**32],
    hashed=[int(v) for v in np.random.default_rng(0).integers(LEAST, MOST, 40, endpoint=True)])


def steps_of(streams, n=300, seed=0, goals=False):
    "Steps of these streams in any order; their states say which stream, episode and step they are"
    rng, at, out = np.random.default_rng(seed), collections.Counter(), []
    for _ in range(n):
        k = int(rng.integers(len(streams)))
        step_n, episode_n = at[k, 'step'], at[k, 'episode']
        last = bool(step_n and rng.integers(5)==0)
        def seen(t): return np.array([k, episode_n, t], np.float32)
        state, after = seen(step_n), seen(step_n + 1)
        if goals: state, after = (dict(observation=o, achieved_goal=o.copy(), desired_goal=np.zeros(3, np.float32)) for o in (state, after))
        out.append(SimpleStep(state, k, after, last, False, float(rng.integers(9)), 0., streams[k], 0, step_n, episode_n))
        at[k, 'step'], at[k, 'episode'] = (0, episode_n + 1) if last else (step_n + 1, episode_n)
    return out


def without_numbers(steps): return [Transition(s.state, s.action, s.reward, s.next_state, s.terminated, s.truncated) for s in steps]


def n_step_twin(steps, n, gamma):
    "First principles: the steps of each stream, then its windows; by their first state"
    by, out = collections.defaultdict(list), {}
    for s in steps: by[s.env_id].append(s)
    for stream in by.values():
        for t in range(len(stream)):
            window = []
            for s in stream[t:t + n]:
                window.append(s)
                if s.terminated: break
            if len(window)==n or window[-1].terminated:
                out[tuple(stream[t].state)] = sum(gamma**k*s.reward for k, s in enumerate(window)), gamma**len(window), tuple(window[-1].next_state), stream[t].env_id
    return out


@pytest.mark.parametrize('form,name', [*zip(['steps', 'lists', 'chunks', 'streams', 'turns'], [*STREAMS]*2)])
def test_n_step(name, form):
    steps = steps_of(STREAMS[name])
    parts, numbered = [steps[a:a + 16] for a in range(0, len(steps), 16)], form!='streams'
    kinds = dict(steps=lambda k, p: p, lists=lambda k, p: [p], chunks=lambda k, p: [Batch.of_steps(p)],
                 streams=lambda k, p: [Batch.of_steps(without_numbers(p), streams=np.array([s.env_id for s in p]))])
    kinds['turns'] = lambda k, p: kinds[('steps', 'chunks', 'lists')[k % 3]](k, p)
    pipe, made = NStep(None, 3, .5), []
    for k, p in enumerate(parts):
        for item in kinds[form](k, p):
            out = pipe.push(item)
            streams = [s.env_id for s in out] if numbered or not len(out) else out.streams
            made += [(tuple(map(float, s.state)), (float(s.reward), float(s.discount), tuple(map(float, s.next_state)), int(e))) for s, e in zip(out, streams)]
    twin = n_step_twin(steps, 3, .5)
    assert len(made)==len(twin) and dict(made)==twin
    again = NStep(None, 3, .5)
    again.load_state_dict(pipe.state_dict())
    rest, other = list(pipe.flush()), list(again.flush())
    assert len(rest)==len(other)==len(steps) - len(twin) and all(map(_equal, rest, other))


def _equal(a, b): return all(np.array_equal(x, y) for x, y in zip(a, b))


def checked(memory, steps, max_sz):
    "Compare links and episodes with those of a dict of lists"
    first = max(0, len(steps) - max_sz)
    stored = {i: s for i, s in enumerate(steps) if i >= first}
    by = collections.defaultdict(list)
    for i, s in enumerate(steps): by[s.env_id].append(i)
    ids = np.arange(first, len(steps))
    after = {i: j for line in by.values() for i, j in zip(line, line[1:])}
    before = {j: i for i, j in after.items()}
    assert memory.next(ids).tolist()==[after.get(i, -1) for i in ids]
    assert memory.previous(ids).tolist()==[before[i] if before.get(i, -1) >= first else -1 for i in ids]
    for i in ids[::7]:
        line = [j for j in by[steps[i].env_id] if j in stored and stored[j].episode_n==steps[i].episode_n]
        assert memory.episode_ids(int(i)).tolist()==line
    memory.check_valid()


@pytest.mark.parametrize('folder,name', [*zip([False, True]*2, STREAMS)])
def test_links_and_episodes(name, folder, tmp_path):
    steps = steps_of(STREAMS[name])
    for how in ('add', 'list', 'batch', 'streams'):
        memory = ReplayMemory(120, path=tmp_path/how if folder else None, seed=0)
        for a in range(0, len(steps), 20):
            part = steps[a:a + 20]
            if how=='add':
                for s in part: memory.add(s)
            elif how=='list': memory.extend(part)
            elif how=='batch': memory.extend(Batch.of_steps(part))
            else: memory.extend(Batch.of_steps(without_numbers(part)), streams=np.array([s.env_id for s in part]))
        checked(memory, steps, 120)
        again = ReplayMemory(120, seed=0)
        again.load_state_dict(memory.state_dict())
        checked(again, steps, 120)
        if folder: memory.close()


class Source:
    "The same streams in every worker"
    def __init__(self, streams): self.streams = streams
    def __iter__(self): return iter(steps_of(self.streams, 500))


@pytest.mark.parametrize('name', STREAMS)
def test_actors(name):
    streams = STREAMS[name]
    for n in (0, 1, 3):
        pipe = Actors(Source(streams), n, ctx='fork', chunk=16)
        by = collections.defaultdict(list)
        for batch in pipe:
            for s in batch: by[int(s.env_id)].append((int(s.action), int(s.episode_n), int(s.step_n)))
        assert len(by)==max(1, n)*len(streams)
        for line in by.values():
            assert len({k for k, _, _ in line})==1 and line==sorted(line)
        state = pipe.state_dict()
        pipe.load_state_dict(state)
        assert [len(b) for _, b in zip(range(2), pipe)]==[16, 16]
        pipe.close()


@pytest.mark.parametrize('name', STREAMS)
def test_numbers_of_workers_never_meet(name):
    streams = np.array(STREAMS[name] + list(range(50)))
    found = [apart(streams, first, place, 4, number) for first, number in ((0, 0), (50, 4)) for place, number in ((k, number + k) for k in range(4))]
    assert len(set(np.concatenate(found).tolist()))==8*len(set(streams.tolist()))
    assert all(v.dtype==np.int64 for v in found)
    assert apart(np.arange(5), 2, 1, 3, 7).tolist()==[7, 10, 13, 16, 19]


def test_a_small_field_refuses_what_it_cannot_hold():
    steps = [SimpleStep(0., 0, 1., False, False, 0., 0., np.int16(e), 0, 0, 0) for e in (-3, 5)]
    pipe = Actors(steps, 2, ctx='fork', chunk=2)
    with refused('env_id', got='int16'):
        for _ in pipe: pass
    pipe.close()
