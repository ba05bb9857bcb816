"What may be drawn: drop, clear, where and max_draws (draws beside a law that is written out: test_kit.py)"
import copy
import pickle
import re
import shutil
from threading import Event, Thread

import numpy as np
import pytest
import torch

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.replay import ExperienceReplay
from fastrl_replay.pipes.hindsight import HindsightReplay
from fastrl_replay.samplers.age import AgeWeighted
from fastrl_replay.samplers.base import Prioritized
from fastrl_replay.samplers.more import LAP
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.steps import SimpleStep, Transition
from fastrl_replay.saving import CheckpointError
from fastrl_replay.storage.sequence_sampler import Sequence
from faults import small_files
from faults import PACKAGE, interrupted, moments, torn
from refusals import refused
from words import WORDS, words

MAX_SZ = 37


def step(i, env_id=0, step_n=0, end=False):
    state = np.full(2, i, np.float32)
    return SimpleStep(state, i % 4, state + 1, end, False, float(i), 0., env_id, 0, step_n, 0)


class Own:
    "A sampler of five methods, and `on_drop`: the uniform one, written out"
    def __init__(self): self.there = set()
    def on_add(self, slots, priorities): self.there |= set(np.asarray(slots).tolist())
    def on_drop(self, slots): self.there -= set(np.asarray(slots).tolist())
    def draw(self, bs, rng):
        return rng.choice(sorted(self.there), bs), np.full(bs, 1/len(self.there))
    def update(self, slots, td_errors): pass
    def get_state(self): return dict(there=np.array(sorted(self.there), np.int64))
    def set_state(self, state): self.there = set(state['there'].tolist())


SAMPLERS = dict(uniform=Uniform, repeating=lambda: Uniform(True), proportional=lambda: Proportional(alpha=.7, eps=.01, normalize='memory'),
                rank=lambda: RankBased(alpha=.8), lap=LAP, own=Own, aged=lambda: AgeWeighted(20))


class Naive:
    "How many rows there were, and which of them may not be drawn"
    def __init__(self): self.n, self.dropped, self.cleared = 0, set(), 0
    @property
    def first(self): return max(self.cleared, self.n - MAX_SZ)
    def drop(self, ids):
        new = set(ids) - self.dropped
        self.dropped |= new
        return len(new)
    def clear(self): self.cleared = self.n


def filled(sampler=None, n=40, max_sz=50, **options):
    memory = ReplayMemory(max_sz, sampler, seed=0, **options)
    memory.extend([step(i, step_n=i % 10, end=i % 10==9) for i in range(n)])
    return memory


# ---- sequences

def windows(twin, episodes, o):
    "The starts of the windows that can be drawn, and how long they are: by looking at every one"
    found = {}
    for rows in episodes:                                # (id, step_n, end) of each step
        rows = [r for r in rows if r[0] >= twin.first]
        for k, (id, step_n, _) in enumerate(rows):
            part = rows[k:k + o.length]
            whole = len(part)==o.length or o.pad and part[-1][2]
            if len(part) <= o.burn_in and step_n: continue                # none of its steps would count for the loss
            if step_n % o.stride==0 and whole and not twin.dropped & {r[0] for r in part}: found[id] = len(part)
    return found


@pytest.mark.parametrize('disk', [False, True], ids=['ram', 'path'])
@pytest.mark.parametrize('pad', [True, False], ids=['pad', 'whole'])
@pytest.mark.parametrize('base', [Uniform, Proportional])
def test_sequences_that_hold_a_dropped_row_are_not_drawn(base, pad, disk, tmp_path):
    rng, o, folder = np.random.default_rng(3), Sequence(4, 1, 2, pad=pad), tmp_path/'memory'
    memory, twin = ReplayMemory(MAX_SZ, base(), seed=0, sequence=o, path=folder if disk else None), Naive()
    at, open_, episodes = [0, 0], [None, None], []
    for k in range(200 if disk else 600):
        n, what = twin.n, rng.random()
        if what < .6 or n==twin.first:
            e, end = int(rng.integers(2)), bool(rng.random() < .15)
            if open_[e] is None: episodes.append(open_.__setitem__(e, []) or open_[e])
            memory.add(step(n, e, at[e], end))
            twin.n += 1
            open_[e].append((n, at[e], end))
            at[e] = 0 if end else at[e] + 1
            if end: open_[e] = None
        elif what < .75:
            ids = rng.integers(twin.first, n, size=2)
            assert memory.drop(ids) == twin.drop(ids.tolist())
        elif what < .77:
            memory.clear()
            twin.clear()
            for e in range(2):                           # an open episode goes on as a new one, in steps that are counted on
                if open_[e]: episodes.append(open_.__setitem__(e, []) or open_[e])
        elif what < .8:
            if disk:
                memory.close()
                memory = ReplayMemory.open(folder, step=step(0))
            else: memory = [lambda: pickle.loads(pickle.dumps(memory)), lambda: copy.deepcopy(memory)][int(rng.integers(2))]()
        if not k % 4 or what > .6:
            wanted = windows(twin, episodes, o)
            sampler = memory.sampler
            slots, spans = sampler.starts[:len(sampler)].T
            ids = [next(i for i in range(twin.first, twin.n) if i % MAX_SZ==s) for s in slots]
            assert dict(zip(ids, spans.tolist())) == wanted and memory.check_valid()
        if len(sampler := memory.sampler) >= 2:
            batch = memory.sample(2)
            ids = batch.ids[batch.mask]
            assert not set(ids.tolist()) & twin.dropped and (batch.reward[batch.mask] == ids).all()
            memory.update_priorities(batch.ids, rng.standard_normal((2, 4)))
    memory.close()


def test_windows_from_anywhere_hold_no_dropped_row():
    memory = filled()
    memory.drop([3, 17])
    ids = np.concatenate([memory.sample_sequences(8, 4).ids.numpy() for _ in range(40)])
    assert not np.isin(ids, [3, 17]).any()
    assert set(ids[:, 0]) == {i for i in range(40) if i % 10 <= 6 and not {3, 17} & set(range(i, i + 4))}
    memory.drop(np.arange(0, 40, 3))
    with refused('length'): memory.sample_sequences(2, 4)
    memory.clear()
    with pytest.raises(ValueError, match=WORDS['all is gone']): memory.sample_sequences(1, 2)


# ---- hindsight

@pytest.mark.parametrize('strategy', ['future', 'final', 'episode'])
def test_hindsight_takes_no_goal_from_a_dropped_row(strategy):
    def state(i): return dict(observation=np.zeros(1, np.float32), achieved_goal=np.array([i], np.float32), desired_goal=np.array([-1.], np.float32))
    steps = [Transition(state(i), 0, 0., state(i), i % 10==9, False) for i in range(40)]
    replay = HindsightReplay(steps, lambda a, d, info: np.zeros(len(a)), k=9, strategy=strategy, bs=10, max_sz=50, seed=0)
    replay.extend(steps)
    dropped = [4, 5, 9, 17, 18, 19, 29]
    replay.memory.drop(dropped)
    seen, allowed = {}, {}
    for _ in range(300):
        batch = replay.sample()
        for i, goal in zip(batch.ids[batch.relabelled].tolist(), batch.state['desired_goal'][batch.relabelled, 0].tolist()):
            seen.setdefault(i, []).append(int(goal))
    for i, goals in seen.items():
        living = [k for k in range(i//10*10, i//10*10 + 10) if k not in dropped]
        allowed = dict(future=[k for k in living if k >= i], final=living[-1:], episode=living)[strategy]
        assert i not in dropped and set(goals) <= set(allowed)
        expected = len(goals)/len(allowed)
        chi = sum((goals.count(k) - expected)**2/expected for k in allowed)
        assert len(allowed)==1 or chi < len(allowed) + 6*np.sqrt(2*len(allowed)), (i, chi)


# ---- what is counted

@pytest.mark.parametrize('kind', [o for o in SAMPLERS if o!='own'])
def test_a_row_is_dropped_once_it_was_drawn_so_often(kind):
    memory, counts = filled(SAMPLERS[kind](), max_draws=3), np.zeros(400, int)
    for k in range(60):
        if k % 3==0: memory.extend([step(memory.n_added + i) for i in range(4)])
        any_gone = not memory.sampler.eligible.all
        if len(memory.sampler) < 5: continue
        before, ids = counts.copy(), memory.sample(5).ids.numpy()
        assert (before[ids] < 3).all(), 'drawn although it had been drawn three times'
        np.add.at(counts, ids, 1)
        stored = np.arange(memory.first_id, memory.n_added)
        assert memory.usage()['n_dropped'] == (counts[stored] >= 3).sum() and memory.check_valid()
    assert counts.max() >= 3 and any_gone


def test_each_row_of_a_sequence_is_counted():
    memory = filled(sequence=Sequence(5, stride=5), max_draws=2)
    for _ in range(16): memory.sample(1)
    with pytest.raises(ValueError, match=words('too few windows', bs=1, n=0)): memory.sample(1)
    assert memory.usage()['n_dropped'] == 40
    memory = filled(max_draws=1)
    ids = memory.sample_sequences(3, 4).ids.unique()
    assert memory.usage()['n_dropped'] == len(ids) and memory.drop(ids) == 0


@pytest.mark.parametrize('way', ['save', 'state_dict', 'deepcopy', 'path'])
def test_draws_are_counted_on_elsewhere(way, tmp_path):
    memory = filled(Uniform(), n=8, max_sz=8, max_draws=2, path=tmp_path/'m' if way=='path' else None)
    memory.sample(8)
    if way=='save':
        memory.save(tmp_path/'s')
        memory = ReplayMemory.load(tmp_path/'s')
    elif way=='state_dict':
        other = ReplayMemory(8, max_draws=2)
        other.load_state_dict(memory.state_dict())
        memory = other
    elif way=='deepcopy': memory = copy.deepcopy(memory)
    else:
        memory.close()
        with refused('max_draws'): ReplayMemory(8, path=tmp_path/'m')
        memory = ReplayMemory.open(tmp_path/'m')
    assert memory.max_draws == 2 and memory.usage()['n_dropped'] == 0
    memory.sample(8)
    assert memory.usage()['n_dropped'] == 8
    memory.extend([step(8)])
    assert memory.sample(1).ids.tolist() == [8], 'what replaces a row begins at zero'
    memory.close()


# ---- where, clear, errors

def test_where_finds_rows_by_a_field_of_one_number():
    memory = filled(n=60)
    memory.drop([50, 51])
    assert memory.where('reward', lambda r: r > 48).tolist() == list(range(49, 60)), 'in order, dropped ones too'
    assert memory.where('step_n', 9).tolist() == [19, 29, 39, 49, 59] and memory.where('terminated', True).tolist() == [19, 29, 39, 49, 59]
    assert memory.where('action', lambda a: torch.from_numpy(a)==3).tolist() == list(range(11, 60, 4))
    assert memory.drop(memory.where('reward', lambda r: r < 20)) == 10
    memory.clear()
    assert memory.where('reward', lambda r: r > 0).tolist() == []
    for field, test, says in (('state', 1, 'state'), ('rewards', 1, 'column'), ('reward', lambda r: r, 'test'),
                              ('reward', lambda r: True, 'test')):
        memory.add(step(60))
        with refused(says): memory.where(field, test)


def test_bad_ids_change_nothing():
    memory = filled(n=60)
    for bad, says in (([9], 'ids'), ([60], 'ids'), ([20, -1], 'ids')):
        with refused(says): memory.drop(bad)
    with refused('ids', TypeError, got='float64 of shape (1,)'): memory.drop([1.5])
    assert memory.drop([]) == 0 and memory.sampler.eligible.all and memory.usage()['n_dropped'] == 0
    with refused('max_draws', got='0'): ReplayMemory(9, max_draws=0)
    memory.drop([20])
    for ids, td, says in (([20, 60], [1., 1.], 'ids'), ([20], [np.nan], 'td_errors'), ([20, 21], [1.], 'td_errors')):
        with refused(says): memory.update_priorities(ids, td)
    assert memory.n_stale == 0


class Deaf(Own):
    on_drop = None


def test_a_sampler_of_ones_own_without_on_drop_is_refused_by_name():
    memory = filled(Deaf())
    for call in (lambda: memory.drop([1]), memory.clear):
        with refused('sampler', TypeError): call()
    assert memory.sampler.eligible.all and len(memory) == 40
    with refused('sampler', TypeError): ReplayMemory(9, Deaf(), max_draws=2)


class Wrong(Own):
    def on_drop(self, slots): pass


def test_a_sampler_that_draws_a_dropped_slot_is_told():
    memory = filled(Wrong())
    memory.drop(np.arange(39))
    with refused('Wrong.draw'): memory.sample(30)


@pytest.mark.parametrize('dedup', [None, 'frames'])
def test_what_is_cleared_comes_back_in_no_form(dedup, tmp_path):
    "An empty memory, and one with rows again, saved over the state before and loaded"
    def stack(i): return np.stack([np.full((6, 6), k, np.uint8) for k in range(i, i + 4)])
    def images(a, b): return [Transition(stack(i), 0, float(i), stack(i + 1), False, False) for i in range(a, b)]
    memory = ReplayMemory(16, Proportional(), dedup=dedup, seed=0)
    memory.extend(images(0, 20))
    memory.save(tmp_path)
    memory.clear()
    for more in (0, 3, 20):
        n = memory.n_added
        if more: memory.extend(images(n, n + more))
        memory.save(tmp_path)
        for other in (ReplayMemory.load(tmp_path), copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
            assert (other.first_id, other.n_added, len(other)) == (memory.first_id, memory.n_added, len(memory)) and other.check_valid()
            assert other.add(images(n + more, n + more + 1)[0]) == n + more
            rows = other.recent(len(other))
            assert all((rows.state[k].numpy() == stack(int(rows.reward[k]))).all() for k in range(len(rows)))
            assert (other.sample(9).ids >= 20).all()


def test_health_and_show_tell_what_was_dropped():
    memory = filled(Proportional())
    memory.drop(np.arange(10))
    health = memory.health()
    assert health['n_dropped'] == 10 and health['n'] == 40 and health['effective'] == pytest.approx(30) and health['effective_share'] == pytest.approx(1)
    texts = [o.get_text() for o in memory.show().findobj(lambda o: hasattr(o, 'get_text'))]
    assert any('10 dropped' in o for o in texts)
    memory.drop(np.arange(40))
    assert any('all 40 transitions stored were dropped' in o for o in memory.health()['warnings'])
    memory.show()


def test_a_peek_sees_what_was_dropped(tmp_path):
    memory = filled(path=tmp_path/'m')
    with ReplayMemory.peek(tmp_path/'m') as view:
        assert not view.dropped(np.arange(40)).any()
        memory.drop(np.arange(30))
        assert np.flatnonzero(view.dropped(np.arange(40))).tolist() == list(range(30))
        assert set(view.sample(200, seed=0).ids.tolist()) == set(range(30, 40)) and len(view.recent()) == 40
        memory.clear()
        assert len(view) == 0
        with pytest.raises(ValueError, match=WORDS['it is empty']): view.sample(1)
    memory.close()


# ---- pipes

def test_a_pipe_waits_for_steps_when_nothing_is_left():
    replay = ExperienceReplay((step(i) for i in range(200)), bs=4, max_sz=50, min_sz=8, max_draws=1, seed=0)
    seen = [i for batch in replay for i in batch.ids.tolist()]
    assert len(seen) == len(set(seen)) > 150 and replay.memory.check_valid()
    assert max(seen) - min(seen) > 150


# ---- killed, struck by an exception, in a forked child

def what_is_there(memory):
    "What was dropped, what is stored, and the priorities of those that may be drawn"
    stored = np.arange(memory.first_id, memory.n_added)
    kept = stored[memory.sampler.eligible.holds(stored % memory.max_sz)]
    p = memory.sampler.priorities[kept % memory.max_sz].tolist() if isinstance(memory.sampler, Prioritized) else []
    return memory.first_id, memory.n_added, kept.tolist(), p


CALLS = dict(drop=lambda m: m.drop(np.arange(22, 26)), more=lambda m: m.drop([20, 23, 27, 28]), clear=lambda m: m.clear(),
             drop_again=lambda m: m.drop([m.n_added - 1]))

@pytest.mark.parametrize('kind', ['uniform', 'proportional', 'rank', 'own'])
def test_killed_at_any_line_it_is_the_state_before_or_after(kind, tmp_path):
    "The files are copied before every line; each copy, and a mixture of two, opens as what was there before, or after"
    rng, folder, count = np.random.default_rng(0), tmp_path/'m', 0
    memory = ReplayMemory(12, SAMPLERS[kind](), path=folder, seed=0)
    memory.extend([step(i) for i in range(30)])
    memory.sample(4)
    notes = {name: (folder/name).read_bytes() for name in ('memory.json', 'flushed.json')}
    for name, call in CALLS.items():
        if name=='drop_again': memory.extend([step(30 + i) for i in range(3)])
        before = what_is_there(memory)
        shots = moments(folder, lambda call=call: call(memory))
        after = what_is_there(memory)
        assert after != before and len(shots) > (1 if name=='clear' else 2)
        for a, b in zip(shots, shots[1:] + shots[-1:]):
            for files in (a, torn(a, b, rng)):
                path, count = tmp_path/str(count), count + 1
                path.mkdir()
                for file, data in (files | notes).items(): (path/file).write_bytes(data)
                again = ReplayMemory.open(path, sampler=Own() if kind=='own' else None, step=step(0))
                assert what_is_there(again) in (before, after) and again.check_valid()
                again.add(step(again.n_added))
                assert what_is_there(again)[2][-1] == again.n_added - 1 and again.check_valid()
                again.close()
                shutil.rmtree(path)
    assert count > 30
    memory.close()


LINES = tuple(f'{PACKAGE}/{o}' for o in ('memory/', 'storage/'))


@pytest.mark.parametrize('disk', [False, True], ids=['ram', 'path'])
@pytest.mark.parametrize('kind', ['uniform', 'proportional', 'rank', 'sequences'])
def test_an_exception_at_any_line_leaves_the_state_before_or_after(kind, disk, tmp_path):
    options = dict(sequence=Sequence(3)) if kind=='sequences' else {}
    for name in ('drop', 'clear'):
        for k in range(0, 1000, 5 if disk else 1 if kind=='uniform' else 3):
            memory = ReplayMemory(12, None if options else SAMPLERS[kind](), path=tmp_path/f'{name}{k}' if disk else None, seed=0, **options)
            memory.extend([step(i, step_n=i % 10, end=i % 10==9) for i in range(30)])
            before = what_is_there(memory)
            if not interrupted(lambda name=name, memory=memory: CALLS[name](memory), k, LINES): break
            memory.check_valid()
            found = what_is_there(memory)
            wanted = (18, 30, [i for i in range(18, 30) if not 22 <= i < 26]) if name=='drop' else (30, 30, [])
            assert found==before or found[:3]==wanted
            memory.extend([step(30 + i, step_n=i) for i in range(4)])
            assert memory.check_valid() and len(memory.sampler) >= 0
            memory.close()
        assert k > 5
        memory.close()


def test_a_forked_child_may_not_drop_and_draws_no_dropped_row():
    memory = filled(Proportional())
    memory.drop(np.arange(30))
    memory._guard.read_only = 'made before this process was forked'
    for call in (lambda: memory.drop([35]), memory.clear):
        with pytest.raises(RuntimeError, match=WORDS['forked']): call()
    assert (memory.sample(50).ids >= 30).all()
    memory._guard.read_only = ''
    memory.close()
    with pytest.raises(RuntimeError, match=WORDS['closed']): memory.drop([1])
    with pytest.raises(RuntimeError, match=WORDS['closed']): memory.clear()


def test_a_full_disk_changes_nothing(tmp_path):
    memory = filled(path=tmp_path/'m', max_sz=4000)
    with small_files(1000):
        with pytest.raises(OSError, match=words('it is named', name='dropped')): memory.drop([3, 4])
    assert sorted(o.name for o in (tmp_path/'m').iterdir() if 'dropped' in o.name) == []
    assert set(memory.sample(40).ids.tolist()) == set(range(40)) and memory.usage()['n_dropped'] == 0
    memory.close()


def test_a_folder_of_an_earlier_version_gets_its_file_with_the_first_drop(tmp_path):
    memory = filled(path=tmp_path/'m')
    memory.close()
    assert not (tmp_path/'m'/'dropped.map').exists() and 'max_draws' not in (tmp_path/'m'/'memory.json').read_text()
    memory = ReplayMemory.open(tmp_path/'m')
    memory.drop([7])
    assert (tmp_path/'m'/'dropped.map').stat().st_size == 8*51
    memory.close()
    (tmp_path/'m'/'dropped.map').unlink()
    with pytest.raises(CheckpointError, match=words('a file is missing', name='dropped.map')): ReplayMemory.open(tmp_path/'m')


def test_threads_that_add_drop_clear_and_draw():
    memory, stop, faults = ReplayMemory(64, Proportional(), seed=0), Event(), []
    memory.extend([step(i) for i in range(64)])
    def every(call):
        while not stop.is_set():
            try: call()
            except ValueError as e:                    # overwritten or cleared meanwhile, or nothing left
                if not re.search(WORDS['meanwhile gone'], str(e)): faults.append(e)
            except (TypeError, RuntimeError, IndexError, AttributeError, AssertionError) as e: faults.append(e)
    def drop(): memory.drop([memory.n_added - 1, memory.first_id])
    def draw():
        batch = memory.sample(8)
        batch.update_priorities(np.ones(8))
    calls = [lambda: memory.add(step(memory.n_added)), drop, draw, memory.health, memory.clear, lambda: memory.where('reward', 3.)]
    threads = [Thread(target=every, args=(o,)) for o in calls]
    for o in threads: o.start()
    stop.wait(.5)
    stop.set()
    for o in threads: o.join(10)
    assert not faults and memory.check_valid()
