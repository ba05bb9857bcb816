"""Pipelines saved and loaded: every replay through the harness, windows that waited, stateful loaders, nodes, learners, refusals."""
import itertools
import threading

import numpy as np
import pytest
import torch
from torch import nn

from fastrl_replay.batch import Batch
from fastrl_replay.learner import DQNLearner
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.loader import as_node
from fastrl_replay.pipes.n_step import NStep, items_from, items_state
from fastrl_replay.pipes.replay import ExperienceReplay, PrioritizedReplay, RankReplay
from fastrl_replay.saving import CheckpointError, SavedState
from fastrl_replay.schedules import LinearSchedule
from fastrl_replay.steps import Transition
from harness import check_constant_size, check_resume, seen, through_json
from test_harness import Stream, draw
from refusals import about, refused
from words import words

REPLAYS = dict(uniform=lambda s, **kw: ExperienceReplay(s, bs=4, max_sz=30, min_sz=9, steps_per_batch=3, seed=1, **kw),
               often=lambda s, **kw: ExperienceReplay(s, bs=4, max_sz=30, steps_per_batch=.4, seed=1, replace=True, **kw),
               prioritized=lambda s, **kw: PrioritizedReplay(s, bs=4, max_sz=30, min_sz=9, steps_per_batch=2.5, seed=1, beta=LinearSchedule(.4, 1., 20), **kw),
               rank=lambda s, **kw: RankReplay(s, bs=4, max_sz=30, min_sz=9, seed=1, **kw))


def files_of(folder): return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}

@pytest.fixture
def by_folder(tmp_path):
    "What travels is the bytes of the files in a folder"
    numbers = itertools.count()
    def fresh_folder(): return tmp_path/str(next(numbers))
    def save(o):
        folder = fresh_folder()
        o.save(folder)
        return files_of(folder)
    def load(o, files):
        folder = fresh_folder()
        folder.mkdir()
        for name, data in files.items(): (folder/name).write_bytes(data)
        o.load(folder)
    def said(files):
        folder = fresh_folder()
        folder.mkdir()
        for name, data in files.items(): (folder/name).write_bytes(data)
        with SavedState(folder) as saved: return [saved.kind, saved.state(), list(saved.pieces())]
    return dict(save=save, load=load, through=lambda files: files, said=said)


@pytest.mark.parametrize('replay,kind,chunk', [('uniform', 'simple', 0), ('often', 'simple', 5), ('prioritized', 'transition', 0), ('rank', 'nested', 3)])
def test_a_replay_goes_on_exactly(replay, kind, chunk, by_folder):
    def make(): return REPLAYS[replay](Stream(kind, chunk))
    check_resume(make, draw, steps=(0, 9), **by_folder)
    if not chunk: check_constant_size(make, draw)


def test_a_replay_on_disk_goes_on_exactly(tmp_path, by_folder):
    "Saved and opened again at the same moment; and, later, with the steps that came in since"
    for name, replay in REPLAYS.items():
        made = itertools.count()
        straight, first = REPLAYS[name](Stream()), replay(Stream(), path=tmp_path/name)
        assert seen(draw(straight, 12))==seen(draw(first, 12))
        first.save(tmp_path/f'{name}{next(made)}')
        at_save = first.n_batches
        first.memory.close()
        again = replay(Stream(), path=tmp_path/name)
        again.load(tmp_path/f'{name}0')
        assert seen(draw(straight, 9))==seen(draw(again, 9)), name
        n, batches = again.memory.n_added, again.n_batches
        again.memory.close()                   # never saved since: the checkpoint is of an earlier moment
        late = replay(Stream(), path=tmp_path/name)
        assert late.n_batches==batches or name=='often'
        late.load(tmp_path/f'{name}0')
        assert (late.memory.n_added, late.n_batches)==(n, at_save)
        late.source_datapipe.n = n
        assert [len(b) for b in itertools.islice(late, batches - at_save)]==[4]*(batches - at_save) and late.memory.n_added==n, 'the batches due for steps that were kept'
        late.memory.close()


@pytest.mark.parametrize('chunk', [0, 4])
def test_no_step_in_a_window_is_lost_or_repeated(chunk, tmp_path):
    "n-step transitions begin once at each step that was pulled, over many saves and loads; those that were cut are marked"
    def make(): return ExperienceReplay(NStep(Stream('simple', chunk), n=4, gamma=.9), bs=1, max_sz=500, seed=0)
    replay = make()
    for k in range(6):
        for _ in itertools.islice(replay, 7 + k): pass
        replay.save(tmp_path/'saved')
        fresh = make()
        fresh.load(tmp_path/'saved')
        replay = fresh
    for _ in itertools.islice(replay, 20): pass
    stored = replay.memory.fetch(np.arange(replay.memory.n_added))
    begun = sorted(zip(stored.env_id.tolist(), stored.episode_n.tolist(), stored.step_n.tolist()))
    assert len(begun)==len(set(begun)), 'a step began two windows'
    source, made = Stream('simple'), []
    for _ in range(replay.source_datapipe.source_datapipe.n):
        step = source.step()
        made.append((step.env_id, step.episode_n, step.step_n))
    missing = set(made) - set(begun)
    assert len(missing) <= 5*3 and set(begun) <= set(made)
    assert missing <= set(made[-30:]), 'a step that waited was lost'


@pytest.mark.parametrize('kind', ['nested', 'brain'])
def test_items_come_back(kind):
    "Steps, lists and batches, in their order; what goes into a memory afterwards is the same to the bit"
    source = Stream(kind)
    steps = [source.step() for _ in range(12)]
    items = [steps[0], steps[1], steps[2:5], Batch.of_steps(steps[5:8]), steps[8], steps[9:12]]
    back = list(items_from(items_state(items)))
    def form(o): return next((kind for kind in (Batch, list) if isinstance(o, kind)), None) or o._fields
    assert [form(o) for o in back]==[form(o) for o in items]
    assert seen(back[3])==seen(items[3]) and seen(back[3].streams)==seen(items[3].streams)
    for a, b in zip((back, items), (items, back)):
        memories = [ReplayMemory(20, step=steps[0], seed=0) for _ in range(2)]
        for memory, these in zip(memories, (a, b)):
            for o in these: memory.extend(o) if isinstance(o, Batch | list) else memory.add(o)
        assert seen(memories[0].recent(12))==seen(memories[1].recent(12))


class Stubborn(Stream):
    "A source whose state can't be loaded"
    def load_state_dict(self, state): raise OSError('the simulator is not ready')


@pytest.mark.parametrize('before', [0, 7])
def test_a_source_that_fails_to_load_changes_nothing(before, tmp_path):
    saved = REPLAYS['prioritized'](Stream())
    draw(saved, 20)
    saved.save(tmp_path)
    victim, twin = (REPLAYS['prioritized'](Stubborn()) for _ in range(2))
    draw(victim, before), draw(twin, before)
    with pytest.raises(OSError, match='not ready'): victim.load(tmp_path)
    assert seen(victim.memory.state_dict())==seen(twin.memory.state_dict()) and seen(draw(victim, 9))==seen(draw(twin, 9))


def test_a_load_that_fails_changes_nothing(tmp_path):
    "Another n, another memory: the replay is what it was, and goes on as if nothing had been tried"
    def make(n=3, max_sz=60): return PrioritizedReplay(NStep(Stream(), n=n, gamma=.9), bs=4, max_sz=max_sz, min_sz=9, seed=1)
    saved = make()
    draw(saved, 20)
    saved.save(tmp_path/'a')
    for victim, what in ((make(n=2), ('n_step', None, 'n=3, gamma=0.9')), (make(max_sz=50), 'another size')):
        twin = make(victim.source_datapipe.n, victim.memory.max_sz)
        draw(victim, 7), draw(twin, 7)
        with about(what): victim.load(tmp_path/'a')
        assert seen(victim.memory.state_dict())==seen(twin.memory.state_dict()) and seen(draw(victim, 5))==seen(draw(twin, 5))
    with pytest.raises(CheckpointError, match=words('another number of waiting pipes')): PrioritizedReplay(Stream(), bs=4, max_sz=60, min_sz=9).load(tmp_path/'a')
    with refused('path'): PrioritizedReplay(NStep(Stream(), 3, .9), bs=4, max_sz=60, path=tmp_path/'m').load(tmp_path/'a')


# --- loaders and nodes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('replay', REPLAYS)
def test_a_stateful_loader_goes_on_in_mid_stream(replay):
    def some(loader, k):
        out = []
        for batch in itertools.islice(iter(loader), k):
            out.append(batch)
            batch.update_priorities(batch.ids.float() % 7 / 3)
        return out
    a, b = (REPLAYS[replay](Stream()) for _ in range(2))
    straight = a.loader(stateful=True)
    it = iter(straight)
    for batch in itertools.islice(it, 13): batch.update_priorities(batch.ids.float() % 7 / 3)
    state, contents = through_json(straight.state_dict()), a.memory.state_dict()
    wanted = []
    for batch in itertools.islice(it, 9):
        wanted.append(batch)
        batch.update_priorities(batch.ids.float() % 7 / 3)
    b.memory.load_state_dict(contents)
    fresh = b.loader(stateful=True)
    fresh.load_state_dict(state)
    assert seen(some(fresh, 9))==seen(wanted)


def test_a_node_resumes_under_a_loader():
    from torchdata.nodes import Loader
    a, b = (REPLAYS['prioritized'](Stream()) for _ in range(2))
    loader = Loader(as_node(a))
    it = iter(loader)
    for _ in range(11): next(it)
    state, contents = loader.state_dict(), a.memory.state_dict()
    wanted = [next(it) for _ in range(6)]
    b.memory.load_state_dict(contents)
    fresh = Loader(as_node(b))
    fresh.load_state_dict(state)
    assert seen(list(itertools.islice(iter(fresh), 6)))==seen(wanted)


@pytest.mark.parametrize('replay', ['prioritized', 'rank'])
def test_prefetching_beside_updates(replay):
    "A node's thread pulls and draws while this one updates priorities and adds steps: rows stay whole, and everything is in order"
    from torchdata.nodes import Loader, Prefetcher
    source = Stream('transition')
    pipe = dict(prioritized=PrioritizedReplay, rank=RankReplay)[replay](source, bs=16, max_sz=200, min_sz=50, steps_per_batch=2, seed=0)
    rng, errors, stop = np.random.default_rng(0), [], threading.Event()
    def hammer():
        try:
            while not stop.is_set():
                n = pipe.memory.n_added
                if n: pipe.update_priorities(rng.integers(max(0, n - 150), n, size=20), rng.random(20))
        except Exception as e: errors.append(e)      # noqa: BLE001
    thread = threading.Thread(target=hammer)
    thread.start()
    try:
        for k, batch in enumerate(itertools.islice(iter(Loader(Prefetcher(as_node(pipe), prefetch_factor=4))), 300)):
            kept = pipe.memory.n_added
            assert len(batch)==16 and (batch.ids < kept).all() and (batch.weights > 0).all()
            batch.update_priorities(torch.rand(16))
            if k % 50==0: assert pipe.memory.check_valid()
    finally:
        stop.set()
        thread.join()
    assert not errors and pipe.memory.check_valid()
    rows, truth = pipe.memory.recent(200), Stream('transition')
    steps = {i: truth.step() for i in range(int(rows.ids.max()) + 1)}
    for row, i in zip(rows, rows.ids.tolist()): assert seen(row.state)==seen(steps[i].state)


def test_pinned_nodes():
    if not torch.cuda.is_available(): pytest.skip('needs CUDA')
    from torchdata.nodes import Loader, PinMemory, Prefetcher
    loader = Loader(Prefetcher(PinMemory(as_node(REPLAYS['prioritized'](Stream('transition')))), prefetch_factor=2))
    for batch in itertools.islice(iter(loader), 5): assert batch.state.is_pinned()


# --- learners ---------------------------------------------------------------------------------------------------------
class Bandit(Stream):
    "Transitions with rewards, from a number"
    def step(self):
        self.n += 1
        rng = np.random.default_rng(self.n)
        return Transition(rng.random(4, np.float32), int(rng.integers(2)), float(rng.random()), rng.random(4, np.float32), self.n % 9==0, False)

def learner(hidden=8, **kw):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 2))
    return DQNLearner(model, PrioritizedReplay(Bandit(), bs=8, max_sz=100, min_sz=20, seed=3, **kw).loader(), lr=LinearSchedule(.01, .001, 40), target_sync=7)

def everything(learn): return [learn.model.state_dict(), learn.target.state_dict(), learn.optimizer.state_dict()['state'], learn.losses, learn.n_batches]

def test_the_last_save_and_its_notes_are_loaded(tmp_path):
    learn = learner()
    for k in range(3):
        learn.fit(4)
        learn.save(tmp_path, k=k, more=[1.5, None])
    fresh = learner()
    assert fresh.load(tmp_path)==dict(k=2, more=[1.5, None]) and seen(everything(fresh))==seen(everything(learn))


def test_a_frozen_replay_is_read():
    "A folder written when its format (3) was new; `data/make_checkpoint.py` says how"
    import shutil
    import sys
    import tempfile
    from pathlib import Path
    data = Path(__file__).parent/'data'
    sys.path.insert(0, str(data))
    try: from make_checkpoint import replay_of, steps as frozen_steps
    finally: sys.path.remove(str(data))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(data/'replay_v3', folder, dirs_exist_ok=True)
        replay = replay_of(list(frozen_steps(3))).load(folder)
        assert (replay.memory.n_added, replay.n_batches)==(64, 28) and replay.memory.check_valid()
        batch = replay.sample()
        assert batch.ids.tolist()==[32, 48, 61, 58]
        np.testing.assert_allclose(batch.weights, [1.0, 0.7923682928085327, 0.7923682928085327, 0.7923682928085327], rtol=1e-6)
        np.testing.assert_allclose(replay.memory.sampler.priorities.sum(), 747.4, rtol=1e-12)
        assert replay.memory.recent(3).reward.tolist()==[108.75, 110.5, 112.25]
