"`memory.episodes()` yields whole episodes only, wherever their rows come from"
import copy

import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.steps import SimpleStep, Transition


class World:
    "EpisodeIndex of random lengths in several streams; each row says which episode, and which of its steps, it is"
    def __init__(self, streams, numbered, seed=0):
        self.rng, self.numbered, self.at, self.n = np.random.default_rng(seed), numbered, [(e, 0) for e in range(streams)], streams
    def step(self, e):
        (episode, k), (end, cut) = self.at[e], self.rng.random(2) < .12
        if end or cut: self.at[e], self.n = (self.n, 0), self.n + 1
        else: self.at[e] = episode, k + 1
        state, after = np.float32([episode, k]), np.float32([episode, k + 1])
        if not self.numbered: return Transition(state, 0, 1., after, bool(end), bool(cut))
        return SimpleStep(state, 0, after, bool(end), bool(cut), 1., 0., e, 0, k, episode)
    def chunk(self, m):
        "Steps, and the stream of each"
        streams = self.rng.integers(len(self.at), size=m)
        return [self.step(e) for e in streams], streams


def wanted(memory, numbered):
    "Ids of the episodes that are known to be whole: along the links, from each row at which one is known to begin"
    rows, found = memory.fetch(np.arange(memory.first_id, memory.n_added)), []
    at = {id: k for k, id in enumerate(rows.ids.tolist())}
    ended = (rows.terminated | rows.truncated).bool().tolist()
    before = dict(zip(at, memory.previous([*at]).tolist()))
    after = dict(zip(at, memory.next([*at]).tolist()))
    for id, k in at.items():
        if not (rows.step_n[k]==0 if numbered else before[id] >= 0 and ended[at[before[id]]]): continue
        ids = [id]
        while not ended[at[ids[-1]]] and after[ids[-1]] >= 0: ids.append(after[ids[-1]])
        if ended[at[ids[-1]]]: found.append(ids)
    return sorted(found, key=lambda o: o[-1])


def check(memory, numbered):
    found = list(memory.episodes())
    for o in found:
        episode, step = o.state.T.numpy()
        assert len(set(episode))==1 and step.tolist()==[*range(len(o))]               # from the first step on, without a gap
        assert (o.terminated | o.truncated).bool().tolist()==[False]*(len(o) - 1) + [True]
    if len(memory): assert [o.ids.tolist() for o in found]==wanted(memory, numbered)
    else: assert not found
    return len(found)


@pytest.mark.parametrize('disk', [False, True], ids=['ram', 'path'])
@pytest.mark.parametrize('numbered', [True, False], ids=['step_n', 'flags'])
def test_whole_episodes_wherever_rows_come_from(numbered, disk, tmp_path):
    "Chunks of streams, overwritten, cleared, saved and loaded, reopened, copied: in random order"
    rng, world, total = np.random.default_rng(1), World(4, numbered), 0
    memory = ReplayMemory(120, seed=0, path=tmp_path/'m' if disk else None)
    for _ in range(50 if disk else 100):
        what = rng.random()
        if what < .8 or not memory.n_added:
            steps, streams = world.chunk(int(rng.integers(1, 40)))
            memory.extend(steps, streams=None if numbered else streams)
        elif what < .85: memory.clear()
        elif disk:
            memory.close()
            memory = ReplayMemory.open(tmp_path/'m', step=steps[0])
        elif what < .92: memory = copy.deepcopy(memory)
        else:
            memory.save(tmp_path/'saved')
            memory = ReplayMemory.load(tmp_path/'saved', step=steps[0])
        total += check(memory, numbered)
    assert total > 90
    memory.close()


def test_what_was_cleared_is_not_before_a_row():
    "In mid-episode: the rest of that episode is none"
    for numbered in (True, False):
        memory = ReplayMemory(50)
        steps = [SimpleStep(k, 0, k + 1, k % 5==4, False, 1., 0., 0, 0, k % 5, k//5) if numbered else Transition(k, 0, 1., k + 1, k % 5==4, False)
                 for k in range(30)]
        memory.extend(steps[:13])
        memory.clear()
        memory.extend(steps[13:])
        assert [o.ids.tolist() for o in memory.episodes()]==[[*range(k, k + 5)] for k in (15, 20, 25)]
