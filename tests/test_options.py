"""Options that do not go together are refused at once, by name, with what to use instead: a table of all pairs.

An option that a pipe lacks is refused in the pipe's own name, not in that of a class that it makes."""
import re
from typing import Any

import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.hindsight import HindsightReplay
from fastrl_replay.pipes.n_step import NStep
from fastrl_replay.pipes.replay import ExperienceReplay, PrioritizedReplay, RankReplay
from fastrl_replay.pipes.sequences import SequenceReplay
from fastrl_replay.ray.replay import RayReplay
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.storage.sequence_sampler import Sequence
from fastrl_replay.samplers.uniform import Uniform
from refusals import refused
from words import words


def goal_reached(achieved, desired, info): return np.zeros(len(achieved))
def experience(**o): return ExperienceReplay([], bs=2, **dict(max_sz=50) | o)
def prioritized(**o): return PrioritizedReplay([], bs=2, **dict(max_sz=50) | o)
def rank(**o): return RankReplay([], bs=2, **dict(max_sz=50) | o)
def sequences(**o): return SequenceReplay([], 2, 50, 5, **o)
def hindsight(**o): return HindsightReplay(o.pop('source', []), goal_reached, bs=2, **dict(max_sz=50) | o)
def ray(**o): return RayReplay([], 0, 2, 50, **o)
def memory(**o): return ReplayMemory(50, **o)
def a_memory(**o): return ReplayMemory(50, seed=0, **o)


class Pair:
    "Two options, or a pipe and one, that do not go together: what is named first, and what is said to do"
    def __init__(self, make, named, instead, **options): self.make, self.named, self.instead, self.options = make, named, instead, options
    def __repr__(self): return f'{self.make.__name__}-{"-".join(self.options)}'


PAIRS = [
    # a memory that is given, and options of a new one
    *(Pair(experience, name, 'a memory is given', memory=a_memory, **{name: value})
      for name, value in dict(seed=3, replace=True, sampler=Uniform(), step=1, dtype=int, dedup='frames', codec='lz4', path='x',
                              sequence=Sequence(4)).items()),
    Pair(experience, 'max_sz', 'a memory is given', memory=a_memory, max_sz=51),
    Pair(hindsight, 'seed', 'a memory is given', memory=a_memory, seed=3),
    Pair(prioritized, 'memory', 'one with priorities', memory=a_memory),
    Pair(rank, 'memory', 'one with ranks', memory=a_memory),
    Pair(sequences, 'memory', 'one with sequences', memory=lambda: a_memory(sequence=Sequence(6))),
    Pair(hindsight, 'memory', 'take sequence_replay', memory=lambda: a_memory(sequence=Sequence(5))),
    # how it draws
    Pair(experience, 'replace', 'leave it out', sampler=Proportional, replace=True),
    Pair(prioritized, 'replace', 'leave it out', replace=True),
    Pair(prioritized, 'replace', 'leave it out', replace=False),
    Pair(rank, 'replace', 'leave it out', replace=True),
    Pair(sequences, 'replace', 'leave it out', alpha=.5, replace=True),
    Pair(sequences, 'beta', 'give alpha', beta=.5),
    Pair(prioritized, 'sampler', 'take experience_replay', sampler=Uniform),
    Pair(rank, 'sampler', 'take experience_replay', sampler=RankBased),
    Pair(sequences, 'sampler', 'alpha tells it', sampler=Proportional),
    Pair(sequences, 'sequence', 'leave it out', sequence=Sequence(5)),
    Pair(rank, 'sequence', 'sequence_replay with alpha', sequence=Sequence(5)),
    Pair(hindsight, 'sequence', 'take sequence_replay', sequence=Sequence(5)),
    Pair(hindsight, 'hindsight', 'leave out n_step', source=NStep([], 3, .9)),
    Pair(ray, 'sequence', 'single steps', sequence=Sequence(5)),
    Pair(memory, 'sampler', 'Uniform or Proportional', sampler=RankBased, sequence=Sequence(5)),
    Pair(memory, 'sequence', 'within 50', sequence=Sequence(51)),
    Pair(memory, 'codec', 'leave one out', codec='lz4', dedup=None),
    Pair(memory, 'codec', 'leave out codec or path', codec='lz4', path='x'),
    # options of other pipes
    *(Pair(make, name, 'give a sampler', **{name: value}) for make in (experience, hindsight, ray)
      for name, value in dict(alpha=.5, beta=.5, eps=.1, normalize='memory').items()),
    *(Pair(make, name, 'an option of prioritized_replay', **{name: value}) for make in (rank, sequences)
      for name, value in dict(eps=.1, normalize='memory').items()),
    *(Pair(make, name, 'an option of sequence_replay', **{name: value}) for make in (experience, prioritized, rank, hindsight, ray)
      for name, value in dict(length=5, burn_in=2, stride=3, across_episodes=True, pad=False, eta=.5).items()),
    *(Pair(make, name, 'an option of hindsight_replay', **{name: value}) for make in (experience, prioritized, rank, sequences, ray)
      for name, value in dict(k=4, strategy='final', compute_reward=goal_reached, goal='g', achieved='a', compute_terminated=goal_reached).items()),
    *(Pair(make, 'maxsz', 'no such option', maxsz=5) for make in (experience, prioritized, rank, sequences, hindsight, ray)),
]

@pytest.mark.parametrize('pair', PAIRS, ids=repr)
def test_options_that_do_not_go_together_are_refused_by_name(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {k: v() if k in ('memory', 'sampler') and callable(v) else v for k, v in pair.options.items()}
    with refused(pair.named, (TypeError, ValueError)) as raised: pair.make(**options)
    said = str(raised.value)
    assert re.search(words(pair.instead), said), said
    name = dict(experience='experience_replay', ray='ray_replay').get(pair.make.__name__, pair.make.__name__)
    if pair.make is not memory and 'option' in pair.instead: assert name.rstrip('s') in said and '__init__' not in said, said
    assert not list(tmp_path.iterdir())
