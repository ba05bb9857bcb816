"""Sequences beside a twin that lists all windows: which can be drawn, with what probability, and what is in them.

The twin keeps every step ever stored and looks at all of them each time. It knows nothing of links, tails or places."""
import copy
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from data.make_checkpoint import steps

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.n_step import NStep
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.storage.sequence_sampler import Sequence
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import Transition
from refusals import refused
from words import WORDS, words


class Numbered(NamedTuple):      # with all that may decide where an episode begins and ends
    x: Any
    terminated: Any
    truncated: Any
    env_id: Any
    step_n: Any
    episode_n: Any

class Flagged(NamedTuple):       # steps are counted along the episode
    x: Any
    terminated: Any
    truncated: Any
    env_id: Any

class Bare(NamedTuple):          # only links decide
    x: Any
    env_id: Any


class Rewarded(NamedTuple):     # what n-step transitions need, beside numbers
    x: Any
    reward: Any
    next_state: Any
    terminated: Any
    truncated: Any
    env_id: Any
    step_n: Any
    episode_n: Any

class Unnumbered(NamedTuple):    # and without: only the discount tells where an episode ends
    x: Any
    reward: Any
    next_state: Any
    terminated: Any
    truncated: Any
    env_id: Any


class Twin:
    "All windows of a memory, listed"
    def __init__(self, max_sz, sequence, kind=Numbered, streams=3, ends=.06):
        self.max_sz, self.o, self.kind, self.ends = max_sz, sequence, kind, ends
        self.steps, self.newest = [], {}                    # of each step: its run, its phase, does the run end with it?
        self.fresh, self.over = set(), {}                   # steps known to begin an episode; did the newest of a stream end one?
        self.world, self.p, self.largest = [(0, 0)]*streams, {}, 1.

    def play(self, rng, lull=0.):
        "The next step of a random stream; in a lull, only of the first"
        e, (end, cut) = int(rng.integers(len(self.world))) if rng.random() > lull else 0, rng.random(2) < self.ends
        id, (step_n, episode_n), before = len(self.steps), self.world[e], self.newest.get(e)
        self.world[e] = (0, episode_n + 1) if end or cut else (step_n + 1, episode_n)
        goes_on = before is not None and id - before < self.max_sz and not self.steps[before][3]
        run, number = (self.steps[before][0], self.steps[before][1] + 1) if goes_on else (id, 0)
        along = self.kind is Bare or self.o.across_episodes
        phase = step_n if self.kind is Numbered and not along else number
        self.steps.append((run, number, phase, bool(end or cut) and not along))
        self.note(id, e, step_n, before is not None and id - before < self.max_sz and self.over[e])
        self.newest[e], self.over[e] = id, bool(end or cut) and self.kind is not Bare
        made = dict(x=np.float32([id, e]), terminated=bool(end), truncated=bool(cut), env_id=e, step_n=step_n, episode_n=episode_n)
        return self.kind(**{k: made[k] for k in self.kind._fields})

    def note(self, id, e, step_n, follows_an_end):
        "A step is known to begin an episode by its number, or else by the step before it, if that is stored"
        if step_n==0 if self.kind in (Numbered, Rewarded) else follows_an_end: self.fresh.add(id)

    def learned(self, window):
        "Which steps of a window count: those after the burn-in, and where the option is on, from an episode's first one on"
        known = [self.o.learn_first and any(o in self.fresh for o in window[:k + 1]) for k in range(len(window))]
        return [known[k] or k >= self.o.burn_in for k in range(len(window))]

    def windows(self):
        "Start → ids of its window, for every start that can be drawn"
        n, runs, found = len(self.steps), {}, {}
        for id in range(max(0, n - self.max_sz), n): runs.setdefault(self.steps[id][0], []).append(id)
        for ids in runs.values():
            for k, id in enumerate(ids):
                window = ids[k:k + self.o.length]
                if len(window) < self.o.length:               # what is stored of it up to a flag, if it may be padded
                    while window and not (self.o.pad and self.steps[window[-1]][3]): window.pop()
                if self.o.learn_first and not any(self.learned(window)): continue
                if window and self.steps[id][2] % self.o.stride==0: found[id] = window
        for id in self.p.keys() - found.keys(): del self.p[id]
        for id in found.keys() - self.p.keys(): self.p[id] = self.largest
        return found

    def update(self, ids, td, eps=1e-6):
        "p = eta · max|δ| + (1 − eta) · mean|δ| over the steps that count and have an error, the last of duplicates"
        changed = {}
        for row, errors in zip(ids.tolist(), np.abs(td).tolist()):
            learn, skipped = self.learned([id for id in row if id >= 0]), self.o.length - len(errors)
            late = [d for d, counts in zip(errors, learn[skipped:]) if counts]
            changed[row[0]] = (self.o.eta*max(late) + (1 - self.o.eta)*sum(late)/len(late) if late else 0.) + eps
        self.p |= changed
        self.largest = max([self.largest, *changed.values()])


def check_batch(batch, windows, length, twin=None):
    "Is each row of the batch one of the windows, zeros where it ends? Do the steps count that the twin counts?"
    if twin: assert batch.learn.tolist()==[(twin.learned(windows[ids[0]]) + [False]*length)[:length] for ids in batch.ids.tolist()]
    for row, ids, mask, terminated in zip(batch.x.numpy(), batch.ids.tolist(), batch.mask.tolist(), getattr(batch, 'terminated', batch.ids)):
        want = windows[ids[0]]
        assert ids==want + [-1]*(length - len(want)) and mask==[True]*len(want) + [False]*(length - len(want))
        assert row[:, 0].tolist()==want + [0.]*(length - len(want)) and len(set(row[:len(want), 1]))==1
        if terminated is not batch.ids: assert not terminated[len(want):].any()


def check_all(memory, twin):
    "Are the windows that can be drawn the twin's, each once?"
    windows, n = twin.windows(), 0 if not len(memory) else len(memory.sampler)
    assert n==len(windows)
    if not n: return windows
    batch = memory.sample(n if not memory.sampler.prioritized else 40)
    check_batch(batch, windows, twin.o.length, twin)
    if not memory.sampler.prioritized: assert sorted(batch.ids[:, 0].tolist())==sorted(windows)
    else: check_probabilities(batch, twin)
    return windows


def check_probabilities(batch, twin, alpha=.6, beta=.4):
    "P = p^alpha / Σ p^alpha and w = (N·P)^-beta over the batch's largest, to 1e-6"
    masses = {id: p**alpha for id, p in twin.p.items()}
    want = np.array([masses[id] for id in batch.ids[:, 0].tolist()])/sum(masses.values())
    assert np.allclose(batch.probs, want, rtol=1e-6, atol=1e-7)
    assert np.allclose(batch.weights, (want.min()/want)**beta, rtol=1e-6, atol=1e-7)


class NStepTwin(Twin):
    """The same for n-step transitions: each is a row of the episode whose step it begins with, whatever its flags say.

    With `gaps`, steps are missing, each for itself, so that windows close in mid-episode; such rows follow each other all the same."""
    def __init__(self, n, gamma, gaps, *args):
        super().__init__(*args)
        self.gaps, self.made = gaps, None
        self.n_step = lambda rng: iter(NStep(self.source(rng), n, gamma))

    def source(self, rng):
        while True:
            e, (end, cut) = int(rng.integers(len(self.world))), rng.random(2) < self.ends
            step_n, episode_n = self.world[e]
            self.world[e] = (0, episode_n + 1) if end or cut else (step_n + 1, episode_n)
            if rng.random() < self.gaps and not (end or cut): continue
            made = dict(x=np.float32([episode_n, step_n]), reward=1., next_state=0., terminated=bool(end), truncated=bool(cut),
                        env_id=e, step_n=step_n, episode_n=episode_n)
            yield self.kind(**{k: made[k] for k in self.kind._fields})

    def play(self, rng, lull=0.):
        if self.made is None: self.made = self.n_step(rng)
        row, id = next(self.made), len(self.steps)
        (episode_n, step_n), e = row.x.astype(int).tolist(), int(row.env_id)
        before = self.newest.get(e)
        if before is not None and (id - before[0] >= self.max_sz or before[1]!=episode_n): before = None
        run, number = (id, 0) if before is None or self.o.across_episodes else (self.steps[before[0]][0], self.steps[before[0]][1] + 1)
        if self.o.across_episodes and e in self.newest and id - self.newest[e][0] < self.max_sz:
            run, number = self.steps[self.newest[e][0]][0], self.steps[self.newest[e][0]][1] + 1
        phase = step_n if self.kind is Rewarded and not self.o.across_episodes else number
        self.steps.append((run, number, phase, bool(row.terminated or row.truncated) and not self.o.across_episodes))
        last = self.newest.get(e, (-self.max_sz, None))
        self.note(id, e, step_n, id - last[0] < self.max_sz and last[1]!=episode_n)
        self.newest[e] = id, episode_n
        return row._replace(x=np.float32([id, e]))


CASES = [Sequence(4), Sequence(4, 1), Sequence(1), Sequence(5, stride=1), Sequence(5, stride=1, pad=False), Sequence(3, 2, 2, pad=False),
         Sequence(7, 3, 5), Sequence(4, stride=9), Sequence(6, stride=1, across_episodes=True), Sequence(6, 2, across_episodes=True),
         Sequence(30, stride=1), Sequence(30, 10), Sequence(8, 6, 2), Sequence(8, 6, 3, learn_first=False), Sequence(12, 5, 4, across_episodes=True),
         Sequence(5, 2, learn_first=False)]


def live(memory, twin, rng, rounds):
    "Random steps, one by one and in chunks of any size, draws and updates, checked all the time"
    for _ in range(rounds):
        lull = .9 if rng.random() < .1 else 0.
        m = int(rng.choice([1, 1, 1, 2, 5, 20, twin.max_sz, 2*twin.max_sz + 3] if twin.kind is Numbered else [1, 1, 2, 5, 20]))
        steps = [twin.play(rng, lull) for _ in range(m)]
        if m==1: memory.add(steps[0])
        else: memory.extend(steps)
        if rng.random() < .3: continue
        assert memory.check_valid()
        if check_all(memory, twin) and memory.sampler.prioritized: change(memory, twin, rng)


def change(memory, twin, rng):
    "New priorities for a batch, some of which overwritten meanwhile"
    batch, o = memory.sample(8), twin.o
    for _ in range(int(rng.integers(3))): memory.add(twin.play(rng))
    td = rng.standard_normal((8, rng.choice([o.length, o.length - o.burn_in])))*3
    twin.windows()
    gone = {id for id in batch.ids[:, 0].tolist() if id < memory.first_id}
    stale = memory.n_stale
    assert batch.update_priorities(td)==len(set(batch.ids[:, 0].tolist()) - gone)
    assert memory.n_stale - stale==sum(id in gone for id in batch.ids[:, 0].tolist())
    keep = [k for k, id in enumerate(batch.ids[:, 0].tolist()) if id not in gone]
    twin.update(batch.ids[keep], td[keep])


@pytest.mark.parametrize('sequence', CASES, ids=repr)
def test_windows_are_those_of_the_twin(sequence):
    k = CASES.index(sequence)
    for i, (streams, ends, max_sz) in enumerate(((1, .06, 40), (3, .2, 50), (3, .02, 70), (12, .1, 64))):
        rng, kind, prioritized = np.random.default_rng([k, i]), (Numbered, Flagged, Bare)[(k + i) % 3], (k//3 + i) % 2
        twin = Twin(max_sz, sequence, kind, streams, ends)
        memory = ReplayMemory(max_sz, Proportional() if prioritized else Uniform(), sequence=sequence, seed=0)
        live(memory, twin, rng, 25)


def play_n_steps(steps, n, gamma=.9, **options):
    "A memory of sequences over the n-step transitions of one episode of `steps`"
    memory = ReplayMemory(100, seed=0, **options)
    for row in NStep([Transition(k, 0, 1., k + 1, k==steps - 1, False) for k in range(steps)], n, gamma): memory.add(row)
    return memory


@pytest.mark.parametrize('n', [1, 2, 3, 5, 20])
def test_an_episode_of_n_step_transitions_is_one_window(n):
    "Its last n rows are flagged, and belong to it all the same"
    memory = play_n_steps(12, n, sequence=Sequence(12))
    assert memory.episode_ids(0).tolist()==list(range(12))
    assert len(memory.sampler)==1 and memory.sample(1).ids.tolist()==[list(range(12))]
    memory = play_n_steps(12, n, sequence=Sequence(8))
    found = sorted(memory.sample(2).ids.tolist())
    assert len(memory.sampler)==2 and found==[list(range(8)), [8, 9, 10, 11, -1, -1, -1, -1]]


@pytest.mark.parametrize('n,kind,gamma,prioritized', [(1, Unnumbered, .9, True), (2, Rewarded, 1., True), (3, Rewarded, .9, False), (5, Unnumbered, .9, False)])
def test_windows_of_n_step_rows_are_those_of_the_twin(n, gamma, prioritized, kind):
    rng = np.random.default_rng([n, prioritized])
    for k, sequence in enumerate(CASES):
        streams, ends, max_sz = ((1, .06, 40), (3, .2, 50), (3, .02, 70), (12, .1, 64))[k % 4]
        twin = NStepTwin(n, gamma, .1*(k % 3==0 and kind is Rewarded), max_sz, sequence, kind, streams, ends)
        memory = ReplayMemory(max_sz, Proportional() if prioritized else Uniform(), sequence=sequence, seed=0)
        live(memory, twin, rng, 12)


@pytest.mark.parametrize('prioritized', [False, True])
def test_n_step_rows_are_told_in_mid_tail(prioritized, tmp_path):
    "One row at a time, saved, loaded, copied and reopened wherever an episode's tail is cut in two"
    rng = np.random.default_rng(prioritized)
    twin = NStepTwin(4, .9, 0., 30, Sequence(6, stride=2), Unnumbered, 2, .15)
    def new(**kw): return ReplayMemory(30, Proportional() if prioritized else Uniform(), sequence=twin.o, seed=0, **kw)
    memory, on_disk = new(), new(path=tmp_path/'disk')
    for k in range(70):
        row = twin.play(rng)
        for o in (memory, on_disk): o.add(row)
        windows = check_all(memory, twin)
        assert memory.check_valid() and len(on_disk.sampler)==len(windows)
        if k % 3: continue
        if k % 6: memory = copy.deepcopy(memory)
        else:
            memory.save(tmp_path/'saved')
            memory = ReplayMemory.load(tmp_path/'saved')
        on_disk.close()
        on_disk = ReplayMemory.open(tmp_path/'disk')
        if windows: check_batch(on_disk.sample(len(windows)), windows, 6)
    on_disk.close()


def test_sequences_saved_when_an_episode_ended_at_its_first_flag():
    "Loaded in mid-tail: their windows are those of a memory of today, and priorities are kept"
    rows = list(NStep(list(steps(75)), n=3, gamma=.5))
    loaded = ReplayMemory.load(Path(__file__).parent/'data'/'sequences_v3')
    today = ReplayMemory(40, Proportional(), sequence=Sequence(5, stride=2), seed=0)
    for row in rows[:54]: today.add(row)
    for row in rows[54:]:
        assert loaded.check_valid()
        found = [{o[0]: o for o in m.sample(500).ids.tolist()} for m in (loaded, today)]
        assert found[0]==found[1] and len(found[0])==len(loaded.sampler)==len(today.sampler)
        p = {id: loaded.sampler.kept[id % 40] for id in found[0]}
        assert all(p[id]==pytest.approx(id/10) for id in p if id < 45)           # those that were drawn then
        for o in (loaded, today): o.add(row)


def made(sampler=None, max_sz=50, sequence=None, kind=Numbered, n=70, streams=3, **kw):
    "A memory and its twin after `n` steps"
    rng, sequence = np.random.default_rng(1), sequence or Sequence(5, 1)
    memory, twin = ReplayMemory(max_sz, sampler, sequence=sequence, seed=0, **kw), Twin(max_sz, sequence, kind, streams)
    for _ in range(n): memory.add(twin.play(rng))
    return memory, twin, rng


@pytest.mark.parametrize('prioritized', [False, True])
def test_starts_are_drawn_with_their_probability(prioritized):
    "Chi-square over 200,000 windows, within five sigma of its mean"
    memory, twin, rng = made(Proportional(1.) if prioritized else Uniform(), 400, Sequence(6, stride=2), n=1000)
    windows = twin.windows()
    if prioritized:
        ids = np.array([o + [-1]*(6 - len(o)) for o in windows.values()])
        td = rng.random((len(ids), 6))
        memory.update_priorities(ids, td)
        twin.update(ids, td)
    counts, bs = Counter(), len(windows)//2
    for _ in range(200_000//bs + 1): counts.update(memory.sample(bs).ids[:, 0].tolist())
    total, n = sum(counts.values()), len(windows)
    want = {id: total*p/sum(twin.p.values()) for id, p in twin.p.items()}
    chi = sum((counts[id] - w)**2/w for id, w in want.items())
    assert counts.keys() <= windows.keys() and total >= 200_000
    assert chi < n + 5*(2*n)**.5 and (prioritized or chi < n)       # strata and distinct draws vary less


@pytest.mark.parametrize('prioritized', [False, True])
@pytest.mark.parametrize('kind', [Numbered, Flagged, Bare])
def test_what_is_loaded_goes_on_to_the_bit(prioritized, kind, tmp_path):
    sampler = Proportional if prioritized else Uniform
    memory, twin, rng = made(sampler(), kind=kind)
    if prioritized: change(memory, twin, rng)
    memory.save(tmp_path/'m')
    into = ReplayMemory(50, sampler(), sequence=Sequence(5, 1), seed=9)
    into.load_state_dict(memory.state_dict())
    others = [copy.deepcopy(memory), ReplayMemory.load(tmp_path/'m'), into]
    more = [twin.play(rng) for _ in range(30)]
    for k in range(0, 30, 10):
        want = memory.sample(4)
        if prioritized: want.update_priorities(np.arange(4.))
        for o in others:
            batch = o.sample(4)
            if prioritized: batch.update_priorities(np.arange(4.))
            for name in ('ids', 'mask', 'probs', 'weights', 'x'): assert np.array_equal(getattr(batch, name), getattr(want, name))
        for o in (memory, *others):
            o.extend(more[k:k + 10])
            assert o.check_valid()
    with refused('sampler.options.sequence.burn_in'): ReplayMemory(50, sampler(), sequence=Sequence(5)).load_state_dict(memory.state_dict())


@pytest.mark.parametrize('prioritized', [False, True])
@pytest.mark.parametrize('kind', [Numbered, Flagged, Bare])
def test_a_memory_on_disk_is_found_again(prioritized, kind, tmp_path):
    "Starts, phases and priorities, whether it was closed or copied while it was open, as after a kill"
    import shutil
    memory, twin, rng = made(Proportional() if prioritized else Uniform(), kind=kind, path=tmp_path/'m')
    if prioritized: change(memory, twin, rng)
    check_all(memory, twin)
    shutil.copytree(tmp_path/'m', tmp_path/'killed')
    memory.close()
    for where in ('m', 'killed'):
        with ReplayMemory.open(tmp_path/where) as again:
            assert again.check_valid() and again.sampler.sequence==Sequence(5, 1)
            check_all(again, twin)
    with ReplayMemory.open(tmp_path/'m', seed=0) as again: live(again, twin, rng, 20)
    with refused('sampler.options.sequence.length'): ReplayMemory(50, path=tmp_path/'m', sequence=Sequence(4))


@pytest.mark.parametrize('prioritized', [False, True])
def test_the_file_of_starts_is_read_as_every_version_writes_it(prioritized, tmp_path):
    "Four int32 a slot, the second of them the phase, then the priorities: what else earlier versions kept there is not read"
    import shutil
    memory, twin, rng = made(Proportional() if prioritized else Uniform(), kind=Flagged, path=tmp_path/'m', sequence=Sequence(5, stride=3))
    if prioritized: change(memory, twin, rng)
    check_all(memory, twin)
    n = len(twin.steps)
    shutil.copytree(tmp_path/'m', tmp_path/'killed')                 # as after a kill: no checksum of this file
    raw = np.memmap(tmp_path/'killed'/'starts.map', np.uint8, 'r+')
    rows = raw[:16*50].view(np.int32).reshape(50, 4)
    phases = {id: twin.steps[id][2] % 3 for id in range(n - 50, n)}
    assert [rows[id % 50, 1] for id in phases]==[*phases.values()]
    rows[:, 0], rows[:, 2] = 77, -3
    raw.flush()
    with ReplayMemory.open(tmp_path/'killed') as again:
        assert again.check_valid()
        check_all(again, twin)


def test_a_batch_of_sequences():
    import pickle
    import torch
    memory, twin, _ = made(Proportional())
    batch = memory.sample(7)
    check_batch(batch, twin.windows(), 5)
    assert batch.burn_in==1 and len(batch)==7 and batch.x.shape==(7, 5, 2) and batch.first('x').tolist()==batch.x[:, 0].tolist()
    assert torch.equal(batch.idxs, torch.where(batch.mask, batch.ids % 50, -1))
    turned = batch.time_first()
    assert turned.x.shape==(5, 7, 2) and turned.x.is_contiguous() and torch.equal(turned.mask, batch.mask.T) and turned.burn_in==1
    assert torch.equal(turned.first('x'), batch.first('x')) and torch.equal(turned.ids, batch.ids.T)
    td, again = np.random.default_rng(0).random((7, 5)), made(Proportional())[0]
    same = again.sample(7)
    assert same.update_priorities(td)==turned.update_priorities(td.T)
    assert torch.equal(memory.sample(9).probs, again.sample(9).probs)
    part, thawed = batch[2:5], pickle.loads(pickle.dumps(batch))
    for o, want in ((part, slice(2, 5)), (thawed, slice(None)), (batch.to('cpu'), slice(None)), (batch.replace(x=batch.x), slice(None))):
        assert o.burn_in==1 and torch.equal(o.mask, batch.mask[want]) and torch.equal(o.x, batch.x[want]) and torch.equal(o.ids, batch.ids[want])
    moved = batch.to('meta')
    assert moved.x.shape==(7, 5, 2) and moved.x.device.type=='meta' and moved.mask.shape==(7, 5) and moved.burn_in==1
    assert memory.sample(3, fields=['x']).x.shape==(3, 5, 2)
    rows = list(batch)
    assert len(rows)==7 and rows[0].x.shape==(5, 2)


def test_windows_from_any_memory():
    "`sample_sequences`: all windows of one episode alike, whatever the sampler"
    memory, twin, _ = made(None, 60, Sequence(3, stride=1, pad=False), n=150)
    plain = ReplayMemory(60, seed=0)
    plain.extend(memory[:])
    windows, counts = twin.windows(), Counter()
    for _ in range(400):
        batch = memory.sample_sequences(20, 3)
        check_batch(batch, windows, 3)
        counts.update(batch.ids[:, 0].tolist())
    n, want = len(windows), 8000/len(windows)
    assert sum((counts[id] - want)**2/want for id in windows) < n + 5*(2*n)**.5
    with refused('length'): memory.sample_sequences(2, 60)
    for wrong in (0, 61):
        with refused('length'): memory.sample_sequences(2, wrong)
    with pytest.raises(ValueError, match=WORDS['it is empty']): ReplayMemory(9).sample_sequences(1, 1)
    assert plain.sample_sequences(5, 2).weights.tolist()==[1.]*5


@pytest.mark.parametrize('options,said', [
    (dict(length=0), 'length'), (dict(length=4, stride=0), 'stride'), (dict(length=4, burn_in=4), 'burn_in'), (dict(length=4, burn_in=-1), 'burn_in'),
    (dict(length=2.5), 'length'), (dict(length=4, eta=2), 'eta'), (dict(length=4, eta=np.nan), 'eta')])
def test_options_that_make_no_sense(options, said):
    with refused(said): Sequence(**options)


def test_bad_input_changes_nothing():
    from fastrl_replay.samplers.rank import RankBased
    for sampler in (RankBased(), object()):
        with refused('sampler', TypeError): ReplayMemory(10, sampler, sequence=Sequence(3))
    with refused('sequence', got='11'): ReplayMemory(10, sequence=Sequence(11))
    with refused('sequence', TypeError, got='int 4'): ReplayMemory(10, sequence=4)
    memory, twin, rng = made(Proportional())
    batch, before = memory.sample(4), memory.state_dict()
    good = np.ones((4, 5))
    for wrong in (np.ones(3), np.ones((4, 3)), np.ones((5, 4)), np.full((4, 5), np.nan), np.full(4, np.inf)):
        with refused('td_errors'): batch.update_priorities(wrong)
    for ids in (batch.ids + 1000, batch.ids[:, :4], batch.ids[:3]):
        with pytest.raises(ValueError): memory.update_priorities(ids, good)
    with refused('priority'): memory.add(memory[0], priority=2.)
    with pytest.raises(ValueError, match=words('too few windows', bs=1, n=0)): made(kind=Bare, n=2)[0].sample(1)
    after = memory.state_dict()
    assert memory.n_added==70 and str(after['memory']['sampler']['inner'])==str(before['memory']['sampler']['inner'])
    no_start = next(id for id in range(memory.first_id, 70) if id not in twin.windows())
    with refused('ids', got='one that is not the first of a sequence'): memory.update_priorities([no_start], [1.])
