"""The kit finds what is wrong: samplers, memories, storages, pipes, each with one fault, and says where.

The right one of each, from which the others are made, passes."""
import re
from itertools import islice

import numpy as np
import pytest

from fastrl_replay.all import IterDataPipe, Proportional, RankBased, ReplayMemory, Sampler
from fastrl_replay.pipes.base import Resumable, state_upstream
from fastrl_replay.steps import Layout
from fastrl_replay.storage.records import Records
from fastrl_replay.testing import check_memory, check_pipe, check_sampler, check_storage


def found(check, make, says):
    "The check fails, in one line, and says this"
    with pytest.raises(AssertionError) as raised: check(make)
    said = str(raised.value)
    assert '\n' not in said and ': expected ' in said and ', got ' in said, said
    assert re.search(says, said), said
    return said


# --- samplers
class Right:
    "Proportional to priorities; drops"
    beta = .4
    def __init__(self): self.p, self.gone, self.largest = np.zeros(0), set(), 1.
    def on_add(self, slots, priorities):
        self.p = np.append(self.p, np.zeros(max(0, int(max(slots)) + 1 - len(self.p))))
        self.p[slots] = self.largest if priorities is None else priorities + .1
        self.largest = max(self.largest, self.p.max())
        self.gone -= {*slots.tolist()}
    def chances(self):
        mass = self.p.copy()
        mass[[*self.gone]] = 0
        return mass/max(mass.sum(), 1e-9)
    def draw(self, bs, rng):
        p = self.chances()
        slots = rng.choice(len(p), bs, p=p)
        return slots, p[slots]
    def update(self, slots, td_errors): self.p[slots] = np.abs(td_errors) + .1
    def on_drop(self, slots): self.gone |= {*slots.tolist()}
    def get_state(self): return dict(p=self.p.copy(), gone=sorted(self.gone), largest=self.largest)
    def set_state(self, state): self.p, self.gone, self.largest = np.array(state['p']), {*state['gone']}, float(state['largest'])

class OneMore(Right):
    "A row more than was asked for"
    def draw(self, bs, rng): return super().draw(bs + 1, rng)
class Squared(Right):
    "Drawn by p², told as p"
    def draw(self, bs, rng):
        p = self.chances()
        slots = rng.choice(len(p), bs, p=p**2/(p**2).sum())
        return slots, p[slots]
class Distinct(Right):
    "No row twice, although the probabilities are those of draws with replacement"
    def draw(self, bs, rng):
        p = self.chances()
        bs = min(bs, np.count_nonzero(p))
        slots = rng.choice(len(p), bs, replace=False, p=p)
        return slots, p[slots]
class NotNormalized(Right):
    def draw(self, bs, rng):
        p = self.chances()
        slots = rng.choice(len(p), bs, p=p)
        return slots, p[slots]*.5
class Global(Right):
    "Draws from the global generator"
    def draw(self, bs, rng): return super().draw(bs, np.random)
class ForgetsDrops(Right):
    def on_drop(self, slots): pass
class DropsForEver(Right):
    "A slot that was dropped is never drawn again, whatever is written there"
    def on_add(self, slots, priorities):
        gone = set(self.gone)
        super().on_add(slots, priorities)
        self.gone = gone
class HalfAState(Right):
    "What new rows get is not in the state: those after a load get another priority"
    def get_state(self): return dict(p=self.p.round(0) + .1, gone=sorted(self.gone), largest=self.largest)
class SharedState(Right):
    "The state is the array itself"
    def get_state(self): return super().get_state() | dict(p=self.p)
class WrongWeights(Sampler):
    "A `draw_into` of its own, whose weights ignore beta"
    prioritized = False
    beta = 1.
    def draw_into(self, slots, probs, weights, rng):
        n = self.size
        p = np.arange(1., n + 1)/np.arange(1., n + 1).sum()
        slots[:] = rng.choice(n, len(slots), p=p)
        probs[:], weights[:] = p[slots], 1
        self.n_batches += 1

WRONG_SAMPLERS = {
    OneMore: 'draw.*as many', Squared: '^draw: .*as often', Distinct: '^draw: .*as (often|many)',
    NotNormalized: '^draw: .*add up to 1, got .0.5', Global: '^set_state: .*drawn again',
    ForgetsDrops: 'draw.*on_drop', DropsForEver: '^draw: ', HalfAState: '^set_state: .*drawn again',
    SharedState: '^get_state: expected a copy', WrongWeights: '^draw: .*weights'}

def test_the_right_sampler_passes():
    assert check_sampler(Right)['drop'] > 5

@pytest.mark.parametrize('sampler', WRONG_SAMPLERS, ids=lambda o: o.__name__)
def test_a_wrong_sampler_is_found(sampler): found(check_sampler, sampler, WRONG_SAMPLERS[sampler])


# --- memories
class Slots(ReplayMemory):
    "Late errors reach newer rows"
    def update_priorities(self, ids, td_errors):
        ids = np.asarray(ids)
        return super().update_priorities(ids + (self.n_added - 1 - ids)//self.max_sz*self.max_sz, td_errors)
class Lost(ReplayMemory):
    "A chunk longer than the memory leaves its oldest rows"
    def extend(self, chunk, priorities=None, streams=None):
        ids = super().extend(chunk, priorities, streams)
        return ids[-self.max_sz:]
class Crossing(ReplayMemory):
    "What is before a row is in its stream, whatever the episode"
    def previous(self, ids, within_episode=False): return super().previous(ids)
class HalfCopied(ReplayMemory):
    "A copy has a generator of its own"
    def __deepcopy__(self, memo):
        made = super().__deepcopy__(memo)
        made.rng = type(self.rng)(5)
        return made
class Undropped(ReplayMemory):
    "What was dropped counts again"
    def drop(self, ids):
        super().drop(ids)
        return len(ids)
class Biased(ReplayMemory):
    "Of two batches, the one with the newer rows"
    def sample(self, bs, fields=None, windows=None):
        return max((super(Biased, self).sample(bs, fields, windows) for _ in range(2)), key=lambda o: o.ids.sum())
class Twice(ReplayMemory):
    "An interrupt leaves a memory that takes its rows twice"
    def extend(self, chunk, priorities=None, streams=None):
        try: return super().extend(chunk, priorities, streams)
        except KeyboardInterrupt: return super().extend(chunk, priorities, streams) + super().extend(chunk, priorities, streams)

WRONG_MEMORIES = {
    Slots: '^update_priorities: ', Lost: '^extend: expected ids', Crossing: '^previous: .*within_episode=True',
    HalfCopied: '^(deepcopy|pickled): .*drawn again', Undropped: '^drop: expected',
    Biased: '^sample: expected rows as often', Twice: '^(fetch|first_id|Ctrl)'}

@pytest.mark.parametrize('kind', WRONG_MEMORIES, ids=lambda o: o.__name__)
def test_a_wrong_memory_is_found(kind):
    said = found(check_memory, lambda n, step, folder: kind(n, Proportional(), step=step, seed=0), WRONG_MEMORIES[kind])
    if '(after ' in said: assert len(said.partition('(after ')[2].split(', ')) < 12, f'a history that could be shorter: {said}'

def test_a_memory_on_disk_that_forgets_is_found():
    class Forgets(ReplayMemory):
        def close(self):
            self.n_stale, self.sampler.n_batches = 0, 0
            if len(self): self.update_priorities([self.first_id], [9.])
            super().close()
    found(check_memory, lambda n, step, folder: Forgets(n, RankBased(), step=step, seed=0, path=folder), '^sample: expected probabilities')


# --- storages
class NoZeros(Records):
    "Row −1 is the last one"
    def read(self, request):
        request.slots[:] = np.where(request.slots < 0, 0, request.slots)
        return super().read(request)
class Copied(Records):
    "`numbers` is a copy"
    def numbers(self, field):
        view = super().numbers(field)
        return None if view is None or field.startswith('_') else view.copy()

WRONG_STORAGES = {
    NoZeros: '^read: .*zeros', Copied: '^(read: expected reward|follow: )'}

@pytest.mark.parametrize('kind', WRONG_STORAGES, ids=lambda o: o.__name__)
def test_a_wrong_storage_is_found(kind): found(check_storage, lambda n, step, folder: kind(n, Layout.of(step)), WRONG_STORAGES[kind])


# --- pipes
class Passing(IterDataPipe):
    "Passes on what comes, and goes on where it was"
    def __init__(self, source_datapipe): self.source_datapipe, self.place, self.n = source_datapipe, Resumable(), 0
    def __iter__(self):
        for item in self.place.over(self.source_datapipe):
            self.n += 1
            yield item
    def state_dict(self): return dict(n=self.n, source=state_upstream(self))
    def load_state_dict(self, state):
        self.n = state['n']
        self.source_datapipe.load_state_dict(state['source'])

class Over(Passing):
    "Starts over in every loop"
    def __iter__(self): yield from self.source_datapipe
class Repeats(Passing):
    "Yields some items twice, by the global generator"
    def __iter__(self):
        for item in self.place.over(self.source_datapipe):
            yield item
            if np.random.random() < .5: yield item              # noqa: NPY002   (that is what is wrong)
class Grows(Passing):
    "Its state holds all that came"
    def state_dict(self): return super().state_dict() | dict(n=self.n, all=[0]*self.n)
class Forgetful(Passing):
    "Does not load where its source was"
    def load_state_dict(self, state): self.n = state['n']

WRONG_PIPES = {
    Over: '^__iter__, after a loop', Repeats: '^__iter__: expected item', Grows: '^state_dict: .*as small',
    Forgetful: '^load_state_dict: '}

def test_the_right_pipe_passes(): assert check_pipe(Passing)['loops']==1

@pytest.mark.parametrize('pipe', WRONG_PIPES, ids=lambda o: o.__name__)
def test_a_wrong_pipe_is_found(pipe):
    assert [*islice(Passing([1, 2]), 2)]==[1, 2]
    found(check_pipe, pipe, WRONG_PIPES[pipe])
