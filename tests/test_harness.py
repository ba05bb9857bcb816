"""Save, load, go on: everything that has a state, through the one harness."""
import numpy as np
import pytest
import torch

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.agents import EpsilonGreedy
from fastrl_replay.pipes.n_step import NStep
from fastrl_replay.pipes.replay import ExperienceReplay, PrioritizedReplay
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.schedules import LinearSchedule
from harness import check_constant_size, check_resume, seen, through_json, through_torch
from twins import KINDS, Only, stacked
from refusals import refused


class Stream:
    "Steps for ever, from a seed, with a state: a source that goes on where it was"
    def __init__(self, kind='simple', chunk=0): self.kind, self.chunk, self.n, self.world = kind, chunk, 0, {}
    def step(self):
        self.n += 1
        return KINDS[self.kind](np.random.default_rng(self.n), self.world)
    def __iter__(self):
        while True: yield stacked_batch(self) if self.chunk else self.step()
    def state_dict(self): return dict(n=self.n, world=[[k, *v] for k, v in self.world.items()])
    def load_state_dict(self, state): self.n, self.world = state['n'], {k: (a, b) for k, a, b in state['world']}

def stacked_batch(source): return Batch.of(stacked([source.step() for _ in range(source.chunk)]))


class Own:
    "A user's sampler: the newest, and one in three any"
    def __init__(self): self.size, self.newest, self.n_updates = 0, 0, 0
    def on_add(self, slots, priorities): self.size, self.newest = max(self.size, int(max(slots)) + 1), int(slots[-1])
    def draw(self, bs, rng):
        slots = np.where(rng.random(bs) < .3, rng.integers(self.size, size=bs), self.newest)
        return slots, np.full(bs, 1/bs, np.float32)
    def update(self, slots, td_errors): self.n_updates += len(slots)
    def get_state(self): return dict(size=self.size, newest=self.newest, n_updates=self.n_updates)
    def set_state(self, state): self.__dict__.update(state)


def use(memory, k):
    "k random-looking things done with a memory, always the same for the same memory"
    rng, out, world = np.random.default_rng(memory.n_added), [], {}
    for _ in range(k):
        steps = [memory.make(rng, world) for _ in range(rng.integers(1, 5))]
        out.append(memory.extend(steps, rng.random(len(steps)) if rng.random() < .5 else None) if len(steps) > 1 else memory.add(steps[0]))
        batch = memory.sample(int(rng.integers(1, min(5, len(memory) + 1))))
        ids = rng.integers(max(0, memory.first_id - 3), memory.n_added, size=6)
        out += [batch, memory.update_priorities(ids, rng.random(6)), memory.n_stale, memory.recent(1)]
        if 'episode_n' in steps[0]._fields: out.append(memory.episode(memory.first_id + len(memory)//2))
    assert memory.check_valid()
    return out

def memory_of(kind, sampler, max_sz=20):
    def make():
        memory = ReplayMemory(max_sz, sampler(), seed=3)
        memory.make = KINDS[kind]
        return memory
    return make


@pytest.mark.parametrize('kind', [o for o in KINDS if o!='simple'])
def test_a_memory_of_any_kind_of_step(kind): check_resume(memory_of(kind, Proportional), use, steps=(9,), after=8)


def test_what_a_loaded_memory_makes_of_the_step_type():
    "It knows our own types; another one comes back as an equal NamedTuple, and steps of the real type go in"
    for kind in ('simple', 'nested', 'brain', 'odd'):
        memory, rng = memory_of(kind, Uniform)(), np.random.default_rng(0)
        steps = [KINDS[kind](rng, {}) for _ in range(5)]
        memory.extend(steps)
        fresh = ReplayMemory(20)
        fresh.load_state_dict(through_torch(memory.state_dict()))
        got, real = fresh.recent(5).step_type, type(steps[0])
        assert (got.__name__, got._fields)==(real.__name__, real._fields) and (got is real or kind!='simple')
        for chunk in ([steps[0]], stacked(steps), Batch.of(stacked(steps)), memory.recent(2)): fresh.extend(chunk)
        assert fresh.add(steps[0])==18 and fresh.check_valid()
        other = memory_of('only', Uniform)()
        other.add(Only(np.zeros(3, np.int32)))
        with refused('state', expected='steps of Layout(Only: x int32[3]; 32 bytes)'): other.load_state_dict(memory.state_dict())


# --- pipes ------------------------------------------------------------------------------------------------------------
def draw(replay, k):
    out = []
    for batch, _ in zip(replay, range(k)):
        out.append(batch)
        batch.update_priorities(batch.ids.float() % 7 / 3)
    return [*out, replay.n_batches, replay.memory.n_added]

def save_both(replay): return dict(memory=replay.memory.state_dict(), pipe=through_json(replay.state_dict()))

REPLAYS = dict(uniform=lambda s: ExperienceReplay(s, bs=4, max_sz=30, min_sz=9, steps_per_batch=3, seed=1),
               often=lambda s: ExperienceReplay(s, bs=4, max_sz=30, steps_per_batch=.4, seed=1, replace=True),
               prioritized=lambda s: PrioritizedReplay(s, bs=4, max_sz=30, min_sz=9, steps_per_batch=2.5, seed=1, beta=LinearSchedule(.4, 1., 20)))


def test_a_replay_loads_its_state_only_over_the_memory_it_belongs_to():
    a, b = (REPLAYS['prioritized'](Stream()) for _ in range(2))
    draw(a, 20)
    before = seen(save_both(b))
    with refused('state'): b.load_state_dict(a.state_dict())
    assert seen(save_both(b))==before
    b.memory.load_state_dict(a.memory.state_dict())
    b.load_state_dict(through_json(a.state_dict()))
    assert seen(draw(a, 10))==seen(draw(b, 10))


def test_an_n_step_pipe_goes_on_with_closed_windows():
    "What waits in open windows isn't saved, and closed as truncated where it is; other parameters are refused"
    for chunk in (0, 4):
        pipe = NStep(Stream(chunk=chunk), n=3, gamma=.9)
        for _ in zip(range(25), pipe): pass
        state = through_json(pipe.state_dict())
        fresh = NStep(Stream(chunk=chunk), n=3, gamma=.9)
        fresh.load_state_dict(state)
        assert through_json(fresh.state_dict())==state
        for wrong in (dict(n=4, gamma=.9), dict(n=3, gamma=.99)):
            with refused('n_step', expected='a state of n={n}, gamma={gamma}'.format(**wrong), got='n=3, gamma=0.9'): NStep(Stream(), **wrong).load_state_dict(state)
    check_constant_size(lambda: NStep(Stream(), n=3, gamma=.9), lambda o, k: [x for x, _ in zip(o, range(k))])


@pytest.mark.parametrize('vector', [False, True])
def test_a_stepper_begins_new_episodes_and_is_the_same_each_time(vector):
    "Environments aren't saved: a loaded stepper goes on with the next episodes, and two that load the same state do the same"
    def make():
        model = torch.nn.Linear(4, 2)
        torch.nn.init.constant_(model.weight, .1)
        torch.nn.init.zeros_(model.bias)
        return GymStepper(['CartPole-v1'], agent=EpsilonGreedy(model, LinearSchedule(1., .1, 50), seed=5), seed=3, n_envs=2 if vector else 1)
    def run(stepper, k): return [o.astuple() if vector else o for o, _ in zip(stepper, range(k))]
    assert seen(run(make(), 60))==seen(run(make(), 60))
    for k in (0, 1, 33):
        old = make()
        before = run(old, k)
        state = through_json(old.state_dict())
        a, b, used = make(), make(), make()
        run(used, 5)
        for o in (a, b, used): o.load_state_dict(state)
        after = run(a, 40)
        assert seen(after)==seen(run(b, 40))==seen(run(used, 40))
        if not k or vector: continue
        ended = before[-1].terminated or before[-1].truncated
        assert (after[0].step_n, after[0].episode_n)==(0, before[-1].episode_n + 1) and (ended or after[0].episode_n > before[-1].episode_n)
        assert after[0].env_id==before[0].env_id and seen(after[0].state)!=seen(before[0].state)
        assert a.agent.n_steps >= old.agent.n_steps + len(after)
    check_constant_size(make, run)
