"""How the frozen pickles beside this file were made, once, by version 0.1.0. Don't make them again: that they still load is the test.

    python tests/data/make_pickles.py FOLDER

A pickle names modules, classes and attributes. Whatever is renamed later, these load for ever, or are refused by name. `told` says
what comes out of one; what came out when it was made stands in `pickles.json`."""
import json
import pickle
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Told(NamedTuple):
    "A step of one's own, with a string"
    state: Any
    action: Any
    reward: Any
    next_state: Any
    terminated: Any
    truncated: Any
    task: Any = 'none'


class Recent:
    "A sampler of one's own, of five methods"
    def __init__(self): self.size = 0
    def on_add(self, slots, priorities): self.size = max(self.size, int(max(slots)) + 1)
    def draw(self, bs, rng): return rng.integers(self.size, size=bs), np.full(bs, 1/self.size)
    def update(self, slots, td_errors): pass
    def get_state(self): return dict(size=self.size)
    def set_state(self, state): self.size = state['size']


MAX_SZ = 20

def flags(k): return k % 7==6, k % 11==10
def simple(k):
    from fastrl_replay.steps import SimpleStep
    e, t = k % 2, k//2
    state, after = np.array([k, e], np.float32), np.array([k + 2, e], np.float32)
    return SimpleStep(state, k % 3, after, t % 5==4 and e==0, t % 5==4 and e==1, float(k), 0., e, 0, t % 5, t//5)
def plain(k):
    from fastrl_replay.steps import Transition
    return Transition(np.array([k, -k], np.float32), k % 3, float(k), np.array([k + 1, -k - 1], np.float32), *flags(k))
def spoken(k):
    state = np.array([k], np.float32)
    return Told(state, k, float(k), state + 1, *flags(k), ['pick', 'öffne', ''][k % 3])
def nested(k):
    from fastrl_replay.steps import Transition
    state = dict(goal=np.array([k], np.uint8), place=(np.array([k, k], np.float64), np.int16(k)))
    return Transition(state, np.array([k/2, k]), float(k), state, *flags(k))
def stacked(k):
    from fastrl_replay.steps import Transition
    state = np.stack([np.full((8, 8), (3*i) % 250, np.uint8) for i in range(k, k + 4)])
    after = np.stack([np.full((8, 8), (3*i) % 250, np.uint8) for i in range(k + 1, k + 5)])
    return Transition(state, k % 4, float(k), after, *flags(k))
def reached(k):
    from fastrl_replay.steps import Transition
    def state(i): return dict(observation=np.float32([i]), achieved_goal=np.float32([i]), desired_goal=np.float32([99]))
    return Transition(state(k), k % 3, -1., state(k + 1), k % 7==6, False)
def goal_reached(achieved, desired, info): return -(achieved!=desired).any(-1).astype(np.float32)


def memory(step=simple, sampler=None, n=33, **options):
    "A ring that has been filled more than once, drawn from, and sent priorities"
    from fastrl_replay.memory import ReplayMemory
    made = ReplayMemory(MAX_SZ, sampler, seed=3, **options)
    for k in range(n):
        if k==n//2: made.extend([step(k)])
        else: made.add(step(k))
    if not n: return made
    for _ in range(2): made.sample(4)
    if made.sampler.sequence is None: made.update_priorities(np.arange(n - 9, n), np.arange(9)/4)
    else: made.sample(2).update_priorities(np.array([.5, 2.]))
    return made


def memories():
    from fastrl_replay.all import (ERE, LAP, AgeWeighted, Combined, LinearSchedule, MixedMemory, Proportional, RankBased,
                                   Sequence, Uniform)
    yield 'uniform', memory()
    yield 'uniform_repeating', memory(plain, Uniform(replace=True))
    yield 'empty', memory(n=0)
    yield 'proportional', memory(plain, Proportional(alpha=.7, beta=LinearSchedule(.4, 1., 50), normalize='memory'))
    yield 'ranked', memory(simple, RankBased(alpha=.5))
    yield 'lap', memory(plain, LAP())
    yield 'combined', memory(plain, Combined())
    yield 'ere', memory(plain, ERE(c_min=5))
    yield 'aged', memory(plain, AgeWeighted(horizon=30))
    yield 'own_sampler', memory(plain, Recent())
    yield 'nested', memory(nested)
    yield 'next_states', memory(stacked, dedup='next_state')
    yield 'frames', memory(stacked, Proportional(), dedup='frames')
    yield 'packed_frames', memory(stacked, dedup='frames', codec='lz4')
    yield 'texts', memory(spoken)
    yield 'sequences', memory(simple, sequence=Sequence(3, 1))
    yield 'prioritized_sequences', memory(simple, Proportional(), sequence=Sequence(4, stride=2, pad=False))
    yield 'windows', memory(simple, windows=dict(state=(-1, 0), action=range(3)))
    yield 'counted', memory(simple, max_draws=3)
    dropped = memory(plain, Proportional())
    dropped.drop([15, 20, 21])
    yield 'dropped', dropped
    cleared = memory(plain)
    cleared.clear()
    for k in range(33, 37): cleared.add(plain(k))
    yield 'cleared', cleared
    mixed = MixedMemory([memory(), memory(simple, Proportional())], shares=(.75, .25), seed=5)
    mixed.sample(6)
    yield 'mixed', mixed


def n_stepped(n=12):
    from fastrl_replay.pipes.n_step import NStep
    return NStep([simple(k) for k in range(n)], n=3, gamma=.5)


def batches():
    from fastrl_replay.all import Batch, MixedMemory, Sequence
    yield 'batch', memory().sample(5)
    yield 'batch_fields', memory(nested).sample(3, fields=('action', 'reward'))
    yield 'batch_windows', memory(windows=dict(state=(-1, 0), action=range(3))).sample(4)
    yield 'batch_sequences', memory(sequence=Sequence(3, 1)).sample(3)
    yield 'batch_time_first', memory(sequence=Sequence(3, 1)).sample(3).time_first()
    yield 'batch_mixed', MixedMemory([memory(), memory()], seed=5).sample(4)
    yield 'batch_texts', memory(spoken).fetch([30, 31])
    yield 'batch_frames', memory(stacked, dedup='frames').fetch([20, 21])
    yield 'batch_n_step', Batch.of_steps(list(n_stepped()))
    yield 'batch_unsqueezed', memory(plain).sample(3).unsqueezed()
    yield 'batch_steps', Batch.of_steps([plain(k) for k in range(3)])


def replay_over(source, **options):
    from fastrl_replay.pipes.replay import PrioritizedReplay
    return PrioritizedReplay(source, bs=4, max_sz=MAX_SZ, min_sz=6, steps_per_batch=2, seed=7, **options)

def others():
    from fastrl_replay.all import (ExponentialSchedule, LinearSchedule, NStep, Proportional, RankBased, ReplayMemory,
                                   Sequence, Uniform)
    from fastrl_replay.pipes.hindsight import HindsightReplay
    from fastrl_replay.pipes.sequences import SequenceReplay
    from fastrl_replay.samplers.rng import Rng
    yield 'step', simple(3)
    yield 'samplers', [Uniform(), Uniform(replace=True), Proportional(alpha=.3), RankBased(beta=LinearSchedule(0., 1., 9))]
    yield 'schedules', [LinearSchedule(1., .1, 9), ExponentialSchedule(1., .1, 9), Sequence(8, 4, 2, pad=False)]
    rng = Rng(5)
    rng.integers(9, size=3)
    yield 'rng', rng
    yield 'layout', memory(nested).layout
    pushed = NStep(n=3, gamma=.5)
    pushed.push([simple(k) for k in range(5)])
    yield 'n_step', pushed
    replay = replay_over(NStep([simple(k) for k in range(60)], n=3, gamma=.5))
    for _, batch in zip(range(5), replay): batch.update_priorities(np.arange(4))
    yield 'replay', replay
    sequences = SequenceReplay([simple(k) for k in range(60)], bs=2, max_sz=MAX_SZ, length=3, min_sz=9, seed=7)
    next(iter(sequences))
    yield 'sequence_replay', sequences
    goals = HindsightReplay([reached(k) for k in range(60)], goal_reached, bs=4, max_sz=MAX_SZ, min_sz=9, seed=7)
    next(iter(goals))
    yield 'hindsight_replay', goals
    yield 'batch_hindsight', goals.sample()
    yield 'bare', ReplayMemory(MAX_SZ, step=plain(0), seed=1)


def sb3_buffers():
    "As `save_replay_buffer` writes them"
    from fastrl_replay.interop import sb3
    from gymnasium import spaces
    flat, actions = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)
    goals = spaces.Dict({k: spaces.Box(0, 99, (1,), np.float32) for k in ('observation', 'achieved_goal', 'desired_goal')})
    class Env:                                 # all that the buffer asks of it
        def env_method(self, name, *a, **kw): return [goal_reached(*a[:2], None)]
    def fill(buffer, space, n_envs=1):
        rng = np.random.default_rng(0)
        for k in range(14):
            def seen(k=k):
                draw = lambda o: rng.uniform(0, 1, (n_envs, *o.shape)).astype(np.float32)
                return {n: draw(o) for n, o in space.spaces.items()} if isinstance(space, spaces.Dict) else draw(space)
            ended = np.full(n_envs, k % 6==5)
            buffer.add(seen(), seen(), rng.integers(3, size=(n_envs, 1)), rng.normal(size=n_envs).astype(np.float32),
                       ended, [{'TimeLimit.truncated': False}]*n_envs)
        return buffer
    yield 'sb3_flat', fill(sb3.ReplayBuffer(20, flat, actions, 'cpu', 2), flat, 2)
    yield 'sb3_dict', fill(sb3.DictReplayBuffer(10, goals, actions, 'cpu', 1), goals)
    yield 'sb3_her', fill(sb3.HerReplayBuffer(20, goals, actions, env=Env(), device='cpu', n_envs=1), goals)
    ranked = fill(sb3.PrioritizedReplayBuffer(20, flat, actions, 'cpu', 1), flat)
    ranked.memory.update_priorities(np.arange(10), np.arange(10.))
    yield 'sb3_prioritized', ranked


def rounded(v):
    "Plain data of any column, with six digits"
    import torch
    if isinstance(v, torch.Tensor): v = v.numpy()
    if isinstance(v, dict): return {k: rounded(o) for k, o in v.items()}
    if isinstance(v, np.ndarray | np.generic): v = v.tolist()
    if isinstance(v, tuple | list): return [rounded(o) for o in v]
    return float(f'{v:.6g}') if isinstance(v, float) else v

def told_of_batch(batch):
    head = {k: rounded(o) for k in ('ids', 'weights', 'mask', 'source', 'relabelled') if (o := getattr(batch, k, None)) is not None}
    return dict(kind=type(batch).__name__, fields=list(batch.layout.fields), head=head,
                columns=rounded([np.asarray(o) if isinstance(o, np.ndarray) and o.nbytes < 999 else np.sum(o) if isinstance(o, np.ndarray)
                                 else o for o in batch.arrays()]))

def told_of_memory(memory):
    "Counters, rows, links, priorities, what may be drawn, and the next two draws, which change it"
    members = getattr(memory, 'memories', None)
    if members: return [*map(told_of_memory, members), memory.sample(6).ids.tolist(), memory.sample(6).ids.tolist()]
    ids = np.arange(memory.first_id, memory.n_added)
    found: dict[str, Any] = dict(n_added=memory.n_added, first_id=memory.first_id, n_stale=memory.n_stale, sampler=memory.sampler.kind,
                 options=memory.sampler.options(), valid=memory.check_valid())
    if not len(ids): return found
    rows = memory.fetch(ids)
    links = [memory.previous(ids).tolist(), memory.next(ids).tolist()]
    p = getattr(memory.sampler, 'priorities', None)
    more = dict(action=rounded(rows.action), reward=rounded(rows.reward), links=links, task=getattr(rows, 'task', None),
                state=[rounded(o.sum()) for o in map(np.asarray, rows.arrays()) if o.dtype.kind in 'iuf'],
                priorities=None if p is None else rounded(np.sort(p)),
                n_dropped=memory.usage()['n_dropped'], windows=rounded(memory.windows), max_draws=memory.max_draws)
    return found | more | dict(draws=[told_of_batch(memory.sample(3)) for _ in range(2)])

def told(name, v):
    "What comes out of the pickle `name`, as plain data"
    if name.startswith('batch'): return told_of_batch(v)
    if name.startswith('sb3'):
        np.random.seed(4)                      # noqa: NPY002   (SB3's)
        sample = None if name=='sb3_her' else v.sample(4)
        return dict(told=told_of_memory(v.memory)['action'], size=v.size(), pos=v.pos, sample=rounded(sample and sample.rewards))
    if name.endswith('replay'):
        own = told_of_memory(v.memory)
        first = next(iter(v))
        return [own, v.n_batches, told_of_batch(first), len(v)]
    if name=='n_step': return rounded([tuple(o) for o in [*v.push([simple(k) for k in range(5, 8)]), *v.flush()]])
    if name=='rng': return v.integers(99, size=5).tolist()
    if name in ('step', 'samplers', 'schedules', 'layout'): return repr(v)
    return told_of_memory(v)


def make(folder):
    found = {}
    for made in (memories, batches, others, sb3_buffers):
        for name, v in made():
            with open(folder/f'{name}.pkl', 'wb') as f: pickle.dump(v, f, 5)
            found[name] = told(name, pickle.loads((folder/f'{name}.pkl').read_bytes()))
    (folder/'pickles.json').write_text('{\n' + ',\n'.join(f'{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}' for k, v in found.items()) + '\n}\n')
    return found


if __name__=='__main__':
    sys.path.insert(0, str(Path(__file__).parent.parent))
    warnings.simplefilter('error')
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    found = import_module('data.make_pickles').make(folder)      # the pickles name this module, not `__main__`
    print(len(found), sum(o.stat().st_size for o in folder.iterdir()))
