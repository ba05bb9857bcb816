"Health, pictures and tables of a memory: right beside a twin, for any step, and without disturbing anything"
import copy, pickle, warnings
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from fastrl_replay.all import (DQNLearner, NStep, Proportional, RankBased, ReplayMemory, SimpleStep, TensorBoardLog, Transition, Uniform)
from fastrl_replay.health import episode_returns, newest
from fastrl_replay.storage.draw_counts import watch_stride

matplotlib.use('agg')


def step(k, **kw): return SimpleStep(np.full(3, k, np.float32), k % 2, np.full(3, k + 1, np.float32), reward=float(k % 5), **kw)


class Twin:
    "How often each id was drawn, in a dict"
    def __init__(self): self.draws, self.n_rows = {}, 0

    def drew(self, ids):
        self.n_rows += len(ids)
        for id in ids: self.draws[id] = self.draws.get(id, 0) + 1

    def of(self, ids): return np.array([self.draws.get(id, 0) for id in ids])


@pytest.mark.parametrize('max_sz', [1, 7, 100, 4097, 6000])
@pytest.mark.parametrize('make', [lambda: Uniform(replace=True), Proportional, RankBased])
def test_the_counts_agree_with_a_twin(max_sz, make):
    rng, memory, twin = np.random.default_rng(max_sz), ReplayMemory(max_sz, make(), seed=0), Twin()
    for _ in range(400):
        if rng.random() < .3: memory.add(step(memory.n_added))
        else: memory.extend([step(memory.n_added + k) for k in range(int(rng.integers(0, max_sz//10 + 3)))])
        if not len(memory): continue
        for _ in range(int(rng.integers(0, 4))): twin.drew(memory.sample(int(rng.integers(1, 70))).ids.tolist())
        if rng.random() < .1: memory.fetch([memory.first_id])             # asked for by id: not a draw
    stride, n = watch_stride(max_sz), memory.n_added
    gone = twin.of([id for id in range(memory.first_id) if id % max_sz % stride == 0])
    here = twin.of([id for id in range(memory.first_id, n) if id % max_sz % stride == 0])
    health = memory.health()
    assert health['samples_per_insert'] == twin.n_rows/n and memory.n_drawn == twin.n_rows
    assert health['n_watched_evicted'] == len(gone) and health['watched_every'] == stride
    assert health['evicted_undrawn'] == pytest.approx((gone == 0).mean(), nan_ok=True)
    assert health['evicted_draws'] == pytest.approx(gone.mean())
    assert health['stored_undrawn'] == pytest.approx((here == 0).mean())


def test_the_watched_slots_favour_no_environment():
    for max_sz in (10_000, 65_536, 1_000_000, 2**20):
        watched = np.arange(0, max_sz, watch_stride(max_sz))
        for n_envs in (2, 8, 10, 64):
            assert np.bincount(watched % n_envs, minlength=n_envs).min() > .7*len(watched)/n_envs


def test_after_loading_the_old_are_not_called_undrawn():
    memory = ReplayMemory(100, seed=0)
    memory.extend([step(k) for k in range(150)])
    for _ in range(20): memory.sample(50)
    twin = ReplayMemory(100)
    twin.load_state_dict(memory.state_dict())
    assert twin.n_drawn == 0 and np.isnan(twin.samples_per_insert)
    twin.extend([step(k) for k in range(100)])
    assert twin.health()['n_watched_evicted'] == 0 and np.isnan(twin.health()['evicted_undrawn'])
    twin.extend([step(k) for k in range(100)])
    assert twin.health()['evicted_undrawn'] == 1 and twin.health()['n_watched_evicted'] == 100
    assert pickle.loads(pickle.dumps(memory)).n_drawn == copy.deepcopy(memory).n_drawn == 0


def sums(steps):
    "Returns of the episodes that ended in `steps`, by hand"
    out, total = [], 0.
    for s in steps:
        total += s.reward
        if s.terminated or s.truncated: out, total = [*out, total], 0.
    return out


@pytest.mark.parametrize('with_totals', [True, False])
def test_returns_of_stored_episodes(with_totals):
    rng, memory, streams, made = np.random.default_rng(0), ReplayMemory(300), [[], []], []
    for _ in range(1000):
        e = int(rng.integers(2)) if with_totals else 0
        mine = streams[e]
        start = not mine or mine[-1].terminated or mine[-1].truncated
        r, end, cut = float(rng.integers(-3, 9)), rng.random() < .05, rng.random() < .03
        total = r + (0. if start else mine[-1].total_reward)
        s = SimpleStep(0, 0, 0, end, cut and not end, r, total, e, 0, 0 if start else mine[-1].step_n + 1,
                       (mine[-1].episode_n + start) if mine else 0)
        mine.append(s)
        made.append(s)
        memory.add(s if with_totals else Transition(0, 0, s.reward, 0, s.terminated, s.truncated))
    ids, returns = episode_returns(newest(memory))
    ends = [k for k in range(700, 1000) if made[k].terminated or made[k].truncated]
    if with_totals: assert dict(zip(ids.tolist(), returns.tolist())) == {k: made[k].total_reward for k in ends}
    else: assert returns.tolist() == sums(made)[-len(returns):] and len(ends) - len(returns) in (0, 1)


def test_asking_changes_no_batch():
    for make in (Uniform, Proportional, RankBased):
        asked, left = (ReplayMemory(200, make(), seed=3) for _ in range(2))
        for m in (asked, left): m.extend([step(k) for k in range(250)])
        for _ in range(3):
            asked.health()
            plt.close(asked.show())
            asked._repr_html_()
            a, b = asked.sample(16), left.sample(16)
            assert torch.equal(a.ids, b.ids) and torch.equal(a.weights, b.weights)
        assert asked.sampler.n_batches == left.sampler.n_batches and asked.check_valid()


class Odd(NamedTuple):
    "A step with fields of every kind"
    state: Any
    action: Any
    mark: Any


def memories():
    rng = np.random.default_rng(0)
    def of(steps, **kw):
        memory = ReplayMemory(64, seed=0, **kw)
        for s in steps: memory.add(s)         # one by one: rows of a chunk without env_id would be streams of their own
        return memory
    def image(shape, dtype=np.uint8): return (rng.random(shape)*200).astype(dtype)
    def played(shape, dtype=np.uint8): return [Transition(image(shape, dtype), k % 3, float(k % 7 == 6), image(shape, dtype), k % 7 == 6, False) for k in range(40)]
    yield 'one step', of([step(0)])
    yield 'nested, no reward', of(Odd({'arm': np.zeros(2), 'eye': (np.ones(3, np.float32), k)}, np.float32(k), torch.tensor([1., k], dtype=torch.bfloat16)) for k in range(90))
    yield 'continuous actions', of(Transition(np.zeros(2), rng.normal(size=(2, 4)), 1., np.zeros(2), False, k % 9 == 8) for k in range(40))
    yield 'grey', of(played((20, 16)))
    yield 'stack', of(played((4, 20, 16)))
    yield 'colour', of(played((20, 16, 3)))
    yield 'colour first, floats', of(played((3, 20, 16), np.float32))
    yield 'infinite', of(step(k)._replace(state=np.array([np.inf, np.nan, 1.], np.float32), reward=float('nan')) for k in range(20))
    yield 'no mass', of((step(k) for k in range(20)), sampler=Proportional(eps=0.))
    n = ReplayMemory(64, seed=0)
    for s in NStep(played((20, 16)), n=3, gamma=.9): n.add(s)
    yield 'n-step pictures', n


@pytest.mark.parametrize('name,memory', list(memories()), ids=lambda o: o if isinstance(o, str) else '')
def test_any_memory_can_be_shown(name, memory):
    if name == 'no mass': memory.update_priorities(np.arange(20), np.zeros(20))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        fig = memory.show()
        fig.canvas.draw()
    images = [o for ax in fig.get_axes() for o in ax.get_images()]
    wanted = {'grey': 4, 'stack': 4, 'colour': 4, 'colour first, floats': 4, 'n-step pictures': 2}.get(name, 0)
    assert len(images) == wanted and len(fig.get_axes()) == 8 + wanted
    assert fig.get_facecolor()[:3] == (1, 1, 1)
    plt.close(fig)
    assert set(memory.health()) == set(ReplayMemory(3).health()) | set(next(memories())[1].health())
    assert memory._repr_html_().count('<tr>') == len(memory.layout.leaves) + 2
    assert memory.fetch([memory.first_id])._repr_html_().count('<tr>') == 2


def test_the_strip_follows_the_transition_asked_for():
    steps = [Transition(np.full((8, 9), k, np.uint8), 0, float(k), np.full((8, 9), k + 1, np.uint8), k % 5 == 4, False) for k in range(20)]
    memory = ReplayMemory(64)
    for s in steps: memory.add(s)
    for id, n, pictures, title in ((10, 3, [10, 11, 12, 13], '10 + 0.5·11 + 0.25·12 = 18.5, then 0.125·Q'), (13, 3, [13, 14, 15], '13 + 0.5·14 = 20, and the end')):
        fig = memory.show(id, n, .5)
        assert [int(o.get_array().max()) for ax in fig.get_axes() for o in ax.get_images()] == pictures
        assert fig.subfigs[1]._suptitle.get_text() == f'transition {id}: {title}'
        plt.close(fig)
    with pytest.raises(ValueError, match='99 is not in the memory'): memory.show(99)


def test_not_a_number_is_found():
    memory = dict(memories())['infinite']
    assert memory.health()['not_finite'] == {'state': 20, 'reward': 20}
    assert any('NaN or infinity in state (20 rows), reward (20 rows)' in o for o in memory.health()['warnings'])


def test_names_in_tables_are_escaped():
    memory = ReplayMemory(4, sampler=Uniform(), step=step(0))
    memory.add(step(1))
    memory.sampler.__class__ = type('<b>Sampler', (Uniform,), {})
    assert '<b>Sampler' not in memory._repr_html_() and '&lt;b&gt;Sampler' in memory._repr_html_()


def test_batches_with_tables_still_pickle_and_compile():
    memory = ReplayMemory(100, Proportional(), seed=0)
    memory.extend([step(k) for k in range(50)])
    batch = memory.sample(8)
    html = batch._repr_html_()
    assert html.count('<tr>') == 6 and 'of 8 SimpleSteps' in html
    again = pickle.loads(pickle.dumps(batch))
    assert again._repr_html_() == html and '_repr_html_' not in batch.__dict__
    f = torch.compile(lambda b: (b.reward*b.weights).sum() + b.state.mean(), fullgraph=True, backend='eager')
    for _ in range(3):
        batch = memory.sample(8)
        assert torch.allclose(f(batch), (batch.reward*batch.weights).sum() + batch.state.mean())


def test_a_sampler_of_ones_own_can_be_looked_at():
    class Newest:
        def __init__(self): self.slots = []
        def on_add(self, slots, priorities): self.slots += slots.tolist()
        def draw(self, bs, rng): return np.array(self.slots[-bs:]), np.full(bs, 1/bs)
        def update(self, slots, td_errors): pass
        def get_state(self): return dict(slots=list(self.slots))
        def set_state(self, state): self.slots = list(state['slots'])
    memory = ReplayMemory(500, Newest())
    memory.extend([step(k) for k in range(400)])
    health = memory.health()
    assert health['effective'] == pytest.approx(64, rel=1e-4) and np.isnan(health['priority_max'])
    plt.close(memory.show())


def test_a_sampler_that_remembers_its_draws_is_not_disturbed():
    class InTurn:
        def __init__(self): self.n, self.at = 0, 0
        def on_add(self, slots, priorities): self.n = max(self.n, int(slots.max()) + 1)
        def draw(self, bs, rng):
            self.at += bs
            return np.arange(self.at - bs, self.at) % self.n, np.full(bs, 1/self.n)
        def update(self, slots, td_errors): pass
        def get_state(self): return dict(n=self.n, at=self.at)
        def set_state(self, state): self.n, self.at = state['n'], state['at']
    memory = ReplayMemory(100, InTurn())
    memory.extend([step(k) for k in range(70)])
    assert memory.sample(3).ids.tolist() == [0, 1, 2]
    assert memory.health()['effective'] == pytest.approx(70, rel=1e-4)
    assert memory.sample(3).ids.tolist() == [3, 4, 5] and memory.sampler.n_batches == 2


def test_a_memory_on_disk_can_be_asked(tmp_path):
    memory = ReplayMemory(100, Proportional(), path=tmp_path/'m', seed=0)
    for k in range(150): memory.add(step(k))
    memory.update_priorities(np.arange(50, 150), np.arange(100.))
    memory.sample(32)
    before = memory.sampler.priorities
    health = memory.health()
    assert health['n_watched_evicted'] == 50 and health['evicted_undrawn'] == 1 and not health['not_finite']
    plt.close(memory.show())
    assert (memory.sampler.priorities == before).all() and memory.check_valid()
    memory.close()
    again = ReplayMemory(100, Proportional(), path=tmp_path/'m')
    assert again.n_drawn == 0
    again.sample(8)
    again.add(step(150))
    assert again.health()['n_watched_evicted'] == 0          # what went was there before
    again.close()


def test_tensorboard_gets_what_the_bar_shows(tmp_path):
    pytest.importorskip('tensorboard', reason='tensorboard is not installed')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    memory = ReplayMemory(40, Proportional(beta=.25), seed=0)
    def batches():
        while True:
            memory.extend([Transition(np.ones(2, np.float32), 0, 1., np.ones(2, np.float32), False, False)]*8)
            yield memory.sample(4)
    model = torch.nn.Linear(2, 2)
    learn, asked = DQNLearner(model, batches()), []
    def stop(learn):
        asked.append(learn.n_batches)
        return learn.n_batches == 25
    log = TensorBoardLog(tmp_path, every=10, also=stop)
    learn.fit(1000, log)
    log.close()
    assert asked == list(range(1, 26))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()['scalars']) == {'loss', 'beta', 'samples_per_insert', 'evicted_undrawn'}
    assert [(e.step, round(e.value, 6)) for e in events.Scalars('samples_per_insert')] == [(10, .5), (20, .5)]
    assert events.Scalars('loss')[0].value == pytest.approx(np.mean(learn.losses[:10]), rel=1e-5)
    assert learn.progress() == pytest.approx(dict(loss=np.mean(learn.losses), beta=.25, samples_per_insert=.5))
