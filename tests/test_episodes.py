"`memory.episodes()`: whole episodes, and none of which the beginning or the end is missing"
import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.n_step import NStep
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import SimpleStep, Transition


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


def test_steps_without_numbers():
    "Where no step says which episode it belongs to, flags and streams do"
    memory = ReplayMemory(7, Uniform())
    for k in range(12): memory.add(Transition(k, 0, 1., k + 1, k % 4 == 3, False))
    assert [o.ids.tolist() for o in memory.episodes()] == [[8, 9, 10, 11]]        # of 4 to 7 the first is gone
    one = ReplayMemory(7, Uniform())
    for k in range(6): one.add(Transition(k, 0, 1., k + 1, k % 3 == 2, False))
    assert [o.state.tolist() for o in one.episodes()] == [[0, 1, 2], [3, 4, 5]]


def test_an_episode_of_n_step_transitions_is_one():
    steps = [SimpleStep(np.float32([k]), 0, np.float32([k + 1]), k % 5 == 4, False, 1., 0., 0, 0, k % 5, k // 5) for k in range(15)]
    memory = ReplayMemory(100, Uniform())
    for item in NStep(steps, n=3, gamma=.9): memory.add(item)
    assert [len(o) for o in memory.episodes()] == [5, 5, 5]


def test_what_is_overwritten_meanwhile_is_left_out():
    memory = ReplayMemory(6, Uniform())
    def add(k): memory.add(Transition(k, 0, 1., k + 1, k % 2 == 1, False))
    for k in range(6): add(k)
    found = memory.episodes()
    assert next(found).ids.tolist() == [0, 1]
    for k in range(6, 9): add(k)
    assert [o.ids.tolist() for o in found] == [[4, 5]]
