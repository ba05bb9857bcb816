"Episodes that are handed on when they are over, beside a list for each stream"
import itertools, json, pickle
from typing import NamedTuple

import numpy as np
import pytest

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.base import IterDataPipe
from fastrl_replay.pipes.n_step import NStep
from fastrl_replay.pipes.actors import Actors
from fastrl_replay.pipes.replay import ExperienceReplay
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.pipes.whole_episodes import Episodes
from fastrl_replay.saving import CheckpointError, SavedState, save_state
from fastrl_replay.steps import SimpleStep, Transition
from refusals import refused


class Game(NamedTuple):
    "A step with strings, a nested state and what is known only at the end"
    state: dict
    action: int
    next_state: dict
    terminated: bool
    truncated: bool
    reward: float
    word: str
    env_id: int
    step_n: int
    episode_n: int
    total: float = 0.


def walks(seed, n=60, streams=4, gaps=True):
    "Steps of several streams in a random order; some episodes break off without an end"
    rng, at, out = np.random.default_rng(seed), {}, []
    for _ in range(n):
        s = int(rng.integers(streams))
        k, episode = at.get(s, (0, 0))
        if gaps and rng.random() < .05: k, episode = 0, episode + 1
        ends = rng.random() < .2
        def seen(t, s=s): return dict(place=np.float32([s, t]), image=np.full((2, 2), t, np.uint8))
        out.append(Game(seen(k), int(rng.integers(3)), seen(k + 1), bool(ends and rng.random() < .5), False, float(rng.normal()), f'word {k}', s, k, episode))
        if ends: out[-1] = out[-1]._replace(truncated=not out[-1].terminated)
        at[s] = (0, episode + 1) if ends else (k + 1, episode)
    return out


class Naive:
    "A list for each stream"
    def __init__(self, fn): self.fn, self.held = fn, {}
    def push(self, step):
        out, held = [], self.held.setdefault(step.env_id, [])
        if held and (held[-1].episode_n, held[-1].step_n + 1)!=(step.episode_n, step.step_n): out += self.close(step.env_id, True)
        self.held.setdefault(step.env_id, []).append(step)
        if step.terminated or step.truncated: out += self.close(step.env_id)
        return out
    def close(self, stream, cut=False):
        steps = self.held.pop(stream)
        if cut: steps[-1] = steps[-1]._replace(truncated=True)
        return [self.fn(steps)]
    def flush(self): return [o for s in sorted(self.held) for o in self.close(s, True)]


def summed(episode): return dict(total=episode.reward.flip(0).cumsum(0).flip(0))
def summed_steps(steps):
    rewards = np.float32([o.reward for o in steps])
    return [o._replace(total=t) for o, t in zip(steps, rewards[::-1].cumsum()[::-1])]

def plain(step):
    "What can be compared"
    return json.loads(json.dumps(step._asdict(), default=lambda a: np.asarray(a, np.float32).tolist() if not isinstance(a, np.bool_) else bool(a)))
def rows(batch): return [{k: round(v, 4) if k in ('reward', 'total') else v for k, v in plain(o).items()} for o in batch]
def rounded(steps): return [{k: round(float(np.float32(v)), 4) if k in ('reward', 'total') else v for k, v in plain(o).items()} for o in steps]


def parts(steps, kind, rng):
    "The same steps one by one, in lists, in batches, or all of it in turn"
    while steps:
        m = int(rng.integers(1, 7))
        part, steps = steps[:m], steps[m:]
        form = rng.choice(['steps', 'list', 'batch']) if kind=='mixed' else kind
        if form=='steps': yield from part
        else: yield part if form=='list' else Batch.of_steps(part)


@pytest.mark.filterwarnings('ignore:whole_episodes')
@pytest.mark.parametrize('kind', ['steps', 'list', 'batch', 'mixed'])
def test_every_form_does_what_a_list_for_each_stream_does(kind):
    for seed in range(12):
        steps, rng = walks(seed, streams=1 + seed % 5), np.random.default_rng(seed)
        naive, episodes, wanted, got = Naive(summed_steps), Episodes(fn=summed), [], []
        for x in parts(steps, kind, rng):
            for step in x if isinstance(x, (list, Batch)) else [x]: wanted += naive.push(step)
            got += rows(episodes.push(x))
            if rng.random() < .1:                        # saved, and gone on with elsewhere
                again = Episodes(fn=summed)
                again.load_state_dict(pickle.loads(pickle.dumps(episodes.state_dict())))
                episodes = again
        assert sum(map(len, episodes._open.rows.values())) <= len(steps)
        wanted, got = wanted + naive.flush(), got + rows(episodes.flush())
        key = lambda o: (o['env_id'], o['episode_n'], o['step_n'])           # (when 64 single steps settle, order may differ)
        assert sorted(got, key=key)==sorted((r for o in wanted for r in rounded(o)), key=key), seed
        assert len(got)==len(steps) and not len(episodes.flush())


def test_without_gaps_the_order_is_that_of_the_ends():
    steps = walks(3, 200, gaps=False)
    naive, wanted = Naive(summed_steps), []
    for step in steps: wanted += naive.push(step)
    for source in (steps, [steps[a:a + 9] for a in range(0, 200, 9)], [Batch.of_steps(steps[a:a + 9]) for a in range(0, 200, 9)]):
        assert [rows(o) for o in Episodes(source, summed)]==[rounded(o) for o in wanted]


def test_a_pipe_left_at_any_item_hands_on_the_same():
    steps = walks(5, 150, gaps=False)
    chunks = [Batch.of_steps(steps[a:a + 11]) for a in range(0, 150, 11)]
    wanted = [rows(o) for o in Episodes(chunks, summed)]
    for k in range(1, 6):
        pipe, got = Episodes(chunks, summed), []
        while part := list(itertools.islice(pipe, k)):
            got += part
            if len(got) >= len(wanted): break
        assert [rows(o) for o in got]==wanted


def test_streams_without_numbers_are_those_of_the_batch_or_its_rows():
    def chunk(ends, streams=None):
        n = len(ends)
        return Batch.of(Transition(np.arange(n), np.zeros(n), np.ones(n), np.arange(n) + 1, np.array(ends), np.zeros(n, bool)), streams=streams)
    episodes = Episodes()
    assert not len(episodes.push(chunk([False, False])))
    with refused('whole_episodes', got='3'): episodes.push(chunk([False]*3))
    made = episodes.push(chunk([True, False], [7, 1]))
    assert made.streams.tolist()==[7] and made.state.tolist()==[0]           # stream 0 goes on, and 7 is another
    assert episodes.push(chunk([True, True], [0, 1])).streams.tolist()==[0, 0, 1, 1, 1]
    memory = ReplayMemory(10)
    assert len(memory.extend(Episodes().push(Batch.of_steps([SimpleStep(0., 0, 1.)]))))==0


def test_a_replay_keeps_what_is_held(tmp_path):
    "And what had ended, but was not handed on yet; `fn` sees it after the restart"
    seen = []
    def fn(episode):
        seen.append(len(episode))
        return summed(episode)
    def replay(items): return ExperienceReplay(NStep(Episodes(items, fn), 2, .9), bs=1, max_sz=500, seed=0)
    steps = walks(7, 120, gaps=False)
    chunks = [Batch.of_steps(steps[a:a + 30]) for a in range(0, 120, 30)]       # each ends several episodes
    first = replay(chunks)
    for _ in range(9): next(iter(first))
    first.save(tmp_path)
    before, held = len(seen), first.source_datapipe.source_datapipe
    n_waiting = sum(map(len, held._ended)) + len(held._open)
    assert len(held._ended) and len(held._open)
    second = replay([])
    second.load(tmp_path)
    assert len(seen)==before
    stored = second.memory.n_added
    for _ in second: pass
    assert second.memory.n_added + len(second.source_datapipe._open)==stored + n_waiting and second.memory.check_valid()
    assert sum(seen[before:])==n_waiting
    rows = second.memory.recent(n_waiting)
    assert (rows.truncated | rows.terminated).any()


def test_saved_states_of_other_pipes_are_refused(tmp_path):
    steps = walks(1, gaps=False)
    first = ExperienceReplay(Episodes(steps), bs=1, max_sz=100, seed=0)
    list(first)
    first.save(tmp_path)
    for other in (NStep(steps, 2, .9), steps):
        with pytest.raises(CheckpointError): ExperienceReplay(other, bs=1, max_sz=100, seed=0).load(tmp_path)
    with pytest.raises(CheckpointError): Episodes(steps).load_state_dict(Episodes().state_dict())
    with pytest.raises(CheckpointError): Episodes().load_state_dict(Episodes(steps).state_dict())
    with pytest.raises(CheckpointError): Episodes(steps).read_waiting(NStep(steps, 2, .9).waiting())


def test_open_episodes_go_into_a_folder_beside_a_memory(tmp_path):
    steps, memory, episodes = walks(2, gaps=False), ReplayMemory(100, seed=0), Episodes(fn=summed)
    for step in steps[:31]: memory.extend(episodes.push(step))
    memory.save(tmp_path, also=dict(episodes=episodes.state_dict()))
    again, other = ReplayMemory.load(tmp_path), Episodes(fn=summed)
    other.load_state_dict(again.also['episodes'])
    for step in steps[31:]:
        memory.extend(episodes.push(step))
        again.extend(other.push(step))
    assert again.n_added==memory.n_added > 20 and rows(again.recent(len(again)))==rows(memory.recent(len(memory)))
    assert save_state(tmp_path/'x', dict(a=other.state_dict()), 'test') and SavedState(tmp_path/'x', 'test')


def test_wrong_steps_change_nothing():
    good = walks(4, 12, gaps=False)
    episodes, wanted = Episodes(fn=summed), Episodes(fn=summed)
    wrong = good[3]._replace(reward='x'), good[3]._replace(state=dict(place=np.zeros(3, np.float32), image=np.zeros((2, 2), np.uint8))), 3, SimpleStep(0., 0, 1.)
    found, right = [], []
    for step in good:
        for bad in (*wrong, [good[0], wrong[0]], [good[0], 3], Batch.of_steps([SimpleStep(0., 0, 1., env_id=step.env_id)])):
            if episodes._open.layout is None: break
            with pytest.raises((ValueError, TypeError)): episodes.push(bad)
        found += rows(episodes.push(step))
        right += rows(wanted.push(step))
    assert found==right and rows(episodes.flush())==rows(wanted.flush())
    class Endless(NamedTuple):
        state: float
    with refused('whole_episodes', expected='steps with terminated, truncated'): Episodes().push(Endless(0.))


def test_an_error_in_fn_loses_nothing():
    steps, failing = walks(6, gaps=False), iter([True, False, True]*40)
    def fn(episode):
        if next(failing): raise KeyError('mine')
        return summed(episode)
    wanted = [rows(o) for o in Episodes(steps, summed)]
    pipe, got = Episodes(steps, fn), []
    while len(got) < len(wanted):
        try: got += [rows(o) for o in itertools.islice(pipe, 1)]
        except KeyError: pass
    assert got==wanted and pipe.n_episodes==len(wanted)


@pytest.mark.parametrize('returned, argument', [
    (None, 'whole_episodes: fn'), ([1], 'whole_episodes: fn'), (dict(winner=1), 'whole_episodes: fn'), (dict(total=[1., 2.]), 'total'),
    (dict(env_id=[.5]), 'env_id'), (dict(terminated=[3]), 'terminated')])
def test_what_fn_may_return(returned, argument):
    step = walks(0, 1)[0]._replace(terminated=True, truncated=False)
    with refused(argument, (TypeError, ValueError)): Episodes(fn=lambda episode: returned).push(step)


def test_it_is_a_pipe_in_a_chain_and_pickles():
    assert IterDataPipe.functions['whole_episodes'] and Actors
    steps = walks(8)
    pipe = Episodes(steps, summed)
    assert [rows(o) for o in pickle.loads(pickle.dumps(pipe))]==[rows(o) for o in pipe]


@pytest.mark.parametrize('before', [True, False])
def test_with_actors_each_step_is_handed_on_once(before):
    "In the workers, or in this process, where their chunks arrive"
    steps = GymStepper(['CartPole-v1'], seed=0)
    whole = steps.whole_episodes(summed_reward).actors(2, 'fork', chunk=32) if before else steps.actors(2, 'fork', chunk=32).whole_episodes(summed_reward)
    actors, seen = whole if before else whole.source_datapipe, {}
    try:
        for _, item in zip(range(12), whole):
            for step in item:
                key = int(step.env_id), int(step.episode_n), int(step.step_n)
                assert key not in seen
                seen[key] = int(step.total_reward)
    finally: actors.close()
    assert {env for env, _, _ in seen}=={0, 1}
    for env, episode, n in seen:                                   # whole: from the first step to the last, which is followed by nothing
        assert seen[env, episode, 0]==seen[env, episode, n] + n
        assert seen[env, episode, n]==1 or (env, episode, n + 1) in seen

def summed_reward(episode): return dict(total_reward=episode.reward.flip(0).cumsum(0).flip(0))
