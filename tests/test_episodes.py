"`memory.episodes()`: whole episodes, and none of which the beginning or the end is missing"
import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.n_step import NStep
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import Layout, SimpleStep, Transition
from refusals import refused


def play(rng, n, streams=3):
    "Steps of interleaved streams whose episodes end at random, with the number of the episode that each belongs to"
    step_n, number, made = [0]*streams, list(range(streams)), streams
    for k in range(n):
        e = int(rng.integers(streams))
        end, cut = rng.random(2) < .1
        yield SimpleStep(np.float32([k]), 0, np.float32([k + 1]), bool(end), bool(cut), float(k), 0., e, 0, step_n[e], number[e]), number[e]
        step_n[e] += 1
        if end or cut: step_n[e], number[e], made = 0, made, made + 1


def whole(steps, first, numbers):
    "Ids of each whole episode among the steps from id `first` on, in the order in which they ended"
    ids = {}
    for id, number in enumerate(numbers): ids.setdefault(number, []).append(id)
    found = [o for o in ids.values() if o[0] >= first and (steps[o[-1]].terminated or steps[o[-1]].truncated)]
    return sorted(found, key=lambda o: o[-1])


@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('on_disk', [False, True])
def test_whole_episodes_are_found(seed, on_disk, tmp_path):
    rng = np.random.default_rng(seed)
    made = list(play(rng, 400))
    steps, numbers = [s for s, _ in made], [n for _, n in made]
    memory = ReplayMemory(150, Uniform(), path=tmp_path/'m' if on_disk else None)
    assert list(memory.episodes()) == []
    for n in (60, 149, 150, 260, 400):
        memory.extend(steps[memory.n_added:n])
        found = list(memory.episodes())
        assert [o.ids.tolist() for o in found] == whole(steps[:n], memory.first_id, numbers[:n])
        for o in found: assert o.reward.tolist() == o.ids.tolist() and o.episode_n.unique().numel() == 1


def test_an_episode_of_n_step_transitions_is_one():
    steps = [SimpleStep(np.float32([k]), 0, np.float32([k + 1]), k % 5 == 4, False, 1., 0., 0, 0, k % 5, k // 5) for k in range(15)]
    memory = ReplayMemory(100, Uniform())
    for item in NStep(steps, n=3, gamma=.9): memory.add(item)
    assert [len(o) for o in memory.episodes()] == [5, 5, 5]


@pytest.mark.parametrize('numbered', [True, False])
@pytest.mark.parametrize('length', [1, 2, 7, 150])
def test_where_an_episode_ends_is_the_same_for_all(numbered, length):
    "`episode`, `next`, `previous` and `sample_sequences` agree, whether or not steps are numbered"
    rng, memory, episode, n, expected = np.random.default_rng(length), ReplayMemory(400, Uniform(), seed=0), 0, 0, []
    for k in range(600):
        end, expected = bool(rng.random() < 1/length), [*expected, episode]
        memory.add(SimpleStep(np.float32([k]), 0, np.float32([k]), end, False, 0., 0., 0, 0, n, episode if numbered else 0))
        episode, n = (episode + 1, 0) if end else (episode, n + 1)
    expected, ids = np.array(expected), np.arange(200, 600)
    for id in rng.choice(ids, 20): assert memory.episode_ids(id).tolist() == ids[expected[ids] == expected[id]].tolist()
    for found, ahead in ((memory.next(ids, within_episode=True), 1), (memory.previous(ids, within_episode=True), -1)):
        there = np.isin(ids + ahead, ids)
        there[there] = expected[ids[there]] == expected[ids[there] + ahead]
        assert found.tolist() == np.where(there, ids + ahead, -1).tolist()
    if length > 2: assert (np.ptp(expected[memory.sample_sequences(50, 3).ids.numpy()], axis=1) == 0).all()


def test_flags_that_are_no_numbers_are_refused():
    "A memory that an early version saved may have them"
    memory, odd = ReplayMemory(10), Transition(0., 0, 0., 0., np.zeros(2, bool), False)
    with refused('terminated', got='(2,)'): memory.add(odd)
    memory._parts.open(Layout.as_is(odd))
    for _ in range(2): memory.add(odd)
    for ask in (lambda: memory.episode(0), lambda: memory.next([0], within_episode=True), lambda: memory.sample_sequences(1, 2)):
        with refused('terminated'): ask()
    assert memory.next([0]).tolist() == [1]
