"Health, pictures and tables of a memory: right beside a twin, for any step, and without disturbing anything"
import copy, pickle, warnings
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from fastrl_replay.all import (DQNLearner, ExperienceReplay, GymStepper, NStep, Proportional, RankBased, ReplayMemory, Sequence, SimpleStep,
                               TensorBoardLog, Transition, Uniform)
from fastrl_replay.health import Health, episode_returns, memory_health, newest
from fastrl_replay.protocol import Memory, members
from fastrl_replay.show import memory_figure
from fastrl_replay.storage.draw_counts import watch_stride
from refusals import refused

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
    assert health['samples_per_insert'] == twin.n_rows/n and health['n_drawn'] == memory.draws.n_rows == twin.n_rows
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
    assert twin.draws.n_rows == 0 and twin.usage()['samples_per_insert'] == 20*50/150
    twin.extend([step(k) for k in range(100)])
    assert twin.health()['n_watched_evicted'] == 0 and np.isnan(twin.health()['evicted_undrawn'])
    twin.extend([step(k) for k in range(100)])
    assert twin.health()['evicted_undrawn'] == 1 and twin.health()['n_watched_evicted'] == 100
    assert pickle.loads(pickle.dumps(memory)).draws.n_rows == copy.deepcopy(memory).draws.n_rows == 0


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
        for k in range(3):
            asked.health()
            if not k: plt.close(asked.show())
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
    plt.close('all')                        # those of other files: more than twenty are a warning
    if name == 'no mass': memory.update_priorities(np.arange(20), np.zeros(20))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        fig = memory.show()
        fig.canvas.draw()
        table = memory.recent(min(len(memory), 8)).show()
        table.canvas.draw()
    plt.close(table)
    images = [o for ax in fig.get_axes() for o in ax.get_images()]
    wanted = {'grey': 4, 'stack': 4, 'colour': 4, 'colour first, floats': 4, 'n-step pictures': 2}.get(name, 0)
    assert len(images) == wanted and all(ax.has_data() for ax in fig.get_axes()), 'a panel is empty'
    assert fig.get_facecolor()[:3] == (1, 1, 1)
    plt.close(fig)
    assert set(memory.health()) == set(ReplayMemory(3).health()) | set(next(memories())[1].health())
    assert memory._repr_html_().count('<tr>') == len(memory.layout.leaves) + 1
    assert memory.fetch([memory.first_id])._repr_html_().count('<tr>') == 2


def test_the_strip_follows_the_transition_asked_for():
    steps = [Transition(np.full((8, 9), k, np.uint8), 0, float(k), np.full((8, 9), k + 1, np.uint8), k % 5 == 4, False) for k in range(20)]
    memory = ReplayMemory(64)
    for s in steps: memory.add(s)
    for id, n, pictures, title in ((10, 3, [10, 11, 12, 13], '10 + 0.5·11 + 0.25·12 = 18.5, then 0.125·Q'), (13, 3, [13, 14, 15], '13 + 0.5·14 = 20, and the end')):
        fig = memory.show(id, n, .5)
        assert [int(o.get_array().max()) for ax in fig.get_axes() for o in ax.get_images()] == pictures
        assert fig.subfigs[-1]._suptitle.get_text() == f'transition {id}: {title}'
        plt.close(fig)
    with refused('ids', got='99'): memory.show(99)


def test_an_n_step_transition_that_ended_has_no_next_value():
    memory = ReplayMemory(8)
    steps = [SimpleStep(np.full((8, 9), k, np.uint8), 0, np.full((8, 9), k + 1, np.uint8), k==2, False, 1., step_n=k) for k in range(3)]
    for s in NStep(steps, 2, .5): memory.add(s)
    for id, words in (0, 'stored: 1.5, then 0.25·Q'), (1, 'stored: 1.5, and the end'):
        fig = memory.show(id)
        assert fig.subfigs[-1]._suptitle.get_text()==f'transition {id}: {words}'
        plt.close(fig)


def test_not_a_number_is_found():
    memory = dict(memories())['infinite']
    assert memory.health()['not_finite'] == {'state': 20, 'reward': 20}
    assert any('NaN or infinity in state (20), reward (20), of 20 rows read' in o for o in memory.health()['warnings'])


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
    assert again.draws.n_rows == 0
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
    assert set(events.Tags()['scalars']) == {'loss', 'lr', 'beta', 'samples_per_insert', 'evicted_undrawn', 'effective', 'stale_share'}
    assert [(e.step, round(e.value, 6)) for e in events.Scalars('samples_per_insert')] == [(10, .5), (20, .5)]
    assert events.Scalars('loss')[0].value == pytest.approx(np.mean(learn.losses[:10]), rel=1e-5)
    used = {k: memory.health()[k] for k in ('evicted_undrawn', 'stale_share')}
    assert events.Scalars('evicted_undrawn')[-1].value > .5 and learn.progress() == pytest.approx(dict(
        loss=np.mean(learn.losses), lr=1e-3, beta=.25, samples_per_insert=.5, effective=1/np.mean([o.item() for o in learn.probs]), **used))


# ---- where the panels are, and what they say

def test_no_panel_is_left_alone_in_its_row():
    memory, rng = ReplayMemory(200, Proportional(), seed=0), np.random.default_rng(0)
    for k in range(300): memory.add(SimpleStep(rng.normal(size=3), k % 2, rng.normal(size=3), k % 9==8, reward=k % 3, step_n=k % 9, episode_n=k//9))
    for _ in range(20): memory.sample(16).update_priorities(rng.exponential(size=16))
    fig = memory.show()
    tops = [ax.get_subplotspec().rowspan.start for ax in fig.get_axes() if ax.get_title()]
    assert min(map(tops.count, tops)) > 1 and max(map(tops.count, tops)) < 4, tops
    fig.canvas.draw()
    boxes = [ax.get_tightbbox() for ax in fig.get_axes() if ax.get_title()]
    for k, a in enumerate(boxes):
        for b in boxes[k + 1:]: assert not a.overlaps(b), 'a label runs into another panel'
    plt.close(fig)



def panel(fig, title):
    found = [ax for ax in fig.get_axes() if ax.get_title()==title]
    assert len(found)==1, [ax.get_title() for ax in fig.get_axes()]
    return found[0]


def words(fig): return [o.get_text() for o in fig.subfigs[0].texts]


def filled(rewards, sampler=None, max_sz=2000, **kw):
    memory, rng = ReplayMemory(max_sz, sampler, seed=0), np.random.default_rng(0)
    for k, r in enumerate(rewards):
        memory.add(SimpleStep(rng.normal(size=3), k % 2, rng.normal(size=3), k % 50==49, reward=r, step_n=k % 50, episode_n=k//50, **kw))
    return memory


def test_an_empty_memory_says_so():
    for memory in (ReplayMemory(7), ReplayMemory(7, step=step(0)), ExperienceReplay([], bs=2, max_sz=7)):
        fig = memory.show()
        title, said = words(fig)
        assert not fig.get_axes() and title.startswith('ReplayMemory, Uniform: 0 of 7 (empty)') and said=='Nothing is stored yet.'
        plt.close(fig)


def test_rare_rewards_and_what_is_no_number_are_seen():
    fig = filled({700: 1000., 800: np.nan, 801: np.inf}.get(k, k % 37/37) for k in range(1500)).show()
    ax = panel(fig, 'rewards')
    x, y = ax.lines[0].get_data()
    assert ax.get_yscale()=='log' and y.sum()==1498 and y[-1]==1 and 900 < x[-1] <= 1000
    assert {'1 NaN, 1 infinite', '1 × 1000'} <= {o.get_text() for o in ax.texts}
    assert any('NaN or infinity in reward (2), of 1,500 rows read' in o for o in words(fig))
    plt.close(fig)
    fig = filled([0.]*1000 + [5.]*4).show()
    assert panel(fig, 'rewards').lines[0].get_data()[1].tolist()==[1000, 4]
    plt.close(fig)


def test_lengths_are_shown_where_they_are_not_the_returns():
    lengths = [3, 9, 5, 2, 7]*4
    memory = ReplayMemory(500)
    for e, n in enumerate(lengths):
        for k in range(n): memory.add(SimpleStep(0, 0, 0, k==n - 1, reward=-1., total_reward=-k - 1., step_n=k, episode_n=e))
    fig = memory.show()
    assert panel(fig, 'lengths of stored episodes').lines[0].get_ydata().tolist()==lengths
    assert panel(fig, 'returns of stored episodes').lines[0].get_ydata().tolist()==[-n for n in lengths]
    plt.close(fig)
    same = ReplayMemory(50)
    for k in range(40): same.add(SimpleStep(0, 0, 0, k % (4 + k//20)==0, reward=1., total_reward=k % 9 + 1., step_n=k % 9, episode_n=k//9))
    fig = same.show()
    assert not [ax for ax in fig.get_axes() if ax.get_title().startswith('lengths')]
    plt.close(fig)


def test_the_title_of_a_pipe_has_its_environment():
    replay = GymStepper(['CartPole-v1'], seed=0).n_step(n=2, gamma=.9).experience_replay(bs=4, max_sz=50, seed=0)
    next(iter(replay))
    fig, bare = replay.show(), replay.memory.show()
    assert words(fig)[0].startswith('CartPole-v1: ReplayMemory of NStepSimpleSteps, Uniform: ') and words(fig)[0]=='CartPole-v1: ' + words(bare)[0]
    plt.close('all')


def test_what_is_the_same_everywhere_is_a_word_and_no_panel():
    fig = filled([1.]*100).show()
    assert 'every reward is 1' in words(fig)[1] and 'rewards' not in [ax.get_title() for ax in fig.get_axes()]
    assert not any('(now)' in ax.get_title() for ax in fig.get_axes())                  # uniform
    plt.close(fig)


def test_the_curve_of_draws_is_that_of_the_probabilities():
    memory, rng = filled(range(500), Proportional(alpha=1., eps=0.)), np.random.default_rng(1)
    p = rng.exponential(size=500)**3
    memory.update_priorities(np.arange(500), p)
    fig = memory.show()
    x, y = panel(fig, 'draws by share of transitions (now)').lines[0].get_data()
    share = np.sort(p)[::-1].cumsum()/p.sum()
    for k in (5, 25, 100, 250): assert np.interp(k/5, x, y)==pytest.approx(100*share[k - 1], abs=1.5)
    n = p.sum()**2/(p**2).sum()
    assert memory.health()['effective']==pytest.approx(n, rel=.1)
    plt.close(fig)


def test_those_never_sampled_are_marked():
    memory, seen = filled(range(900), Proportional()), set()
    for k in range(20):
        batch = memory.sample(16)
        batch.update_priorities(np.random.default_rng(k).exponential(size=16))
        seen |= set(batch.ids.tolist())
    fig = memory.show()
    bars = panel(fig, 'priorities').containers                            # stacked: the second stands on the first
    heights = [sum(o.get_height() for o in c) for c in bars]
    assert heights==pytest.approx([100*len(seen)/900, 100 - 100*len(seen)/900])
    plt.close(fig)


def test_quantiles_of_weights():
    memory = filled(range(300), Proportional(beta=.5))
    memory.update_priorities(np.arange(300), np.arange(300.) + 1)
    fig = memory.show()
    ax = panel(fig, 'importance weights')
    few = np.interp(.5, *ax.lines[0].get_data())
    weights = np.concatenate([memory.sample(64).weights for _ in range(200)])
    assert few==pytest.approx(np.quantile(weights, .05), abs=.02) and ax.lines[1].get_xdata()[0]==.5
    plt.close(fig)


def test_times_sampled_have_their_range_from_the_data():
    memory = filled(range(100), max_sz=100)
    for _ in range(80): memory.sample(100)
    fig = memory.show()
    values, edges, _ = panel(fig, 'times sampled').patches[0].get_data()
    assert edges[-1] > 80 >= edges[-2] and values[-1]==100
    plt.close(fig)


def test_warnings_and_figures_stand_in_full():
    memory = filled([0.]*3000, Proportional())
    for _ in range(200): memory.sample(8)
    said = words(fig := memory.show())
    plt.close(fig)
    assert [' '.join(o.split()) for o in said[2:]]==[f'Warning: {o}.' for o in memory.health()['warnings']] and len(said) > 3
    assert 'ReplayMemory of SimpleSteps, Proportional, α 0.6, β 0.4: 2,000 of 2,000 (full)' in said[0]
    assert {o.get_color() for o in fig.subfigs[0].texts[2:]}=={'tab:red'} and fig.subfigs[0].texts[1].get_color()=='k'
    sizes = [o.get_fontsize() for o in fig.findobj(matplotlib.text.Text) if o.get_text()]
    assert min(sizes) >= 9 or min(sizes) > 6 and panel(fig, 'times sampled'), 'only exponents are smaller'


class Few:
    "A memory with nothing but the members of the protocol, whose draws are counted elsewhere"
    draws = None
    def __init__(self, memory): self.memory = memory
    def __len__(self): return len(self.memory)
    def __getattr__(self, name):
        if name not in members(Memory): raise AttributeError(name)
        return getattr(self.memory, name)


def test_any_memory_of_the_protocol_can_be_shown():
    known = dict(memories())
    for name in ('grey', 'nested, no reward', 'continuous actions', 'n-step pictures'):
        fig = memory_figure(Few(known[name]))
        fig.canvas.draw()
        assert words(fig)[0].startswith('Few of ')
        plt.close(fig)
        mine, own = memory_health(Few(known[name])), known[name].health()
        assert mine['not_finite']==own['not_finite']
        same = [k for k in mine if k not in ('warnings', 'return_mean', 'n_episodes', 'n_terminated', 'not_finite')]
        assert [mine[k] for k in same]==pytest.approx([own[k] for k in same], nan_ok=True)


def test_sequences_and_frames():
    memory = ReplayMemory(500, Proportional(), sequence=Sequence(8, burn_in=2), seed=0)
    for k in range(700): memory.add(step(k, terminated=k % 31==30, step_n=k % 31, episode_n=k//31))
    memory.sample(8).update_priorities(np.full((8, 8), 3.))
    assert not [o for o in memory.health()['warnings'] if 'effective' in o] and memory.health()['effective_share'] > .5
    fig = memory.show()
    assert {'priorities', 'priorities by age', 'draws by share of sequences (now)'} <= {ax.get_title() for ax in fig.get_axes()}
    plt.close(fig)
    for batch in (memory.sample(8), memory.sample(9).time_first()):
        fig, first = batch.show(), batch.ids.numpy()[0][:8]
        assert [o.get_text() for o in fig.axes[0].get_yticklabels()]==[f'id {o}' for o in first]
        plt.close(fig)
    frames, rng = ReplayMemory(400, seed=0), np.random.default_rng(0)
    seen = [rng.integers(0, 255, (84, 84), dtype=np.uint8) for _ in range(205)]
    for k in range(200): frames.add(SimpleStep(np.stack(seen[k:k + 4]), 0, np.stack(seen[k + 1:k + 5]), step_n=k))
    assert frames.health()['bytes_each'] < 8000 < 56_000
    assert '(56,498 unshared)' in repr(frames) and '(56,498 unshared)' in frames._repr_html_() and len(repr(frames)) < 200


def test_a_batch_of_images_is_a_row():
    batch = dict(memories())['stack'].sample(12)
    fig = batch.show()
    assert len(fig.axes)==8 and all((ax.get_images()[0].get_array()==batch.state[k, -1].numpy()).all() for k, ax in enumerate(fig.axes))
    wanted = f'id {batch.ids[3]}\naction {batch.action[3]}\nreward {batch.reward[3]:.4g}\nweight 1'
    assert fig.axes[3].get_xlabel()==wanted
    plt.close(fig)


def test_a_batch_of_numbers_is_a_table():
    memory = filled([1.]*60, Proportional())
    memory.update_priorities(np.arange(60), np.arange(60.))
    batch = memory.sample(32)
    ax = (fig := batch.show()).axes[0]
    names = [o.get_text() for o in ax.get_xticklabels()]
    assert names[:3]==['state[0]', 'state[1]', 'state[2]'] and 'reward' not in names and names[-1]=='weight'
    shown = np.array([o.get_text() for o in ax.texts]).reshape(8, len(names))
    assert shown[:, 0].tolist()==[f'{v:.3g}' for v in batch.state[:8, 0].tolist()]
    plt.close(fig)


def test_tables_say_false_and_pad_their_cells():
    memory = filled([1.]*60)
    html = memory.fetch(range(45, 53))._repr_html_()
    assert '>False<' in html and '>True<' in html and 'padding' in html and 'text-align:right' in html
    assert 'the same in all rows: ' in html and 'env_id 0' in html and 'reward 1' in html


@pytest.mark.parametrize('n,gamma', [(3, .9), (3, 1.), (5, .99), (1, .9)])
def test_an_end_counts_once_however_many_windows_lead_to_it(n, gamma):
    rng, memory, ends, left = np.random.default_rng(n), ReplayMemory(600), [], dict.fromkeys(range(3))
    place = dict.fromkeys(range(3), (0, 0))
    def steps():
        for _ in range(900):
            e = int(rng.integers(3))
            k, episode = place[e]
            left[e] = int(rng.integers(2, 12)) if not left[e] else left[e]
            left[e] -= 1
            last, cut = left[e]==0, left[e]==0 and rng.random() < .3
            place[e] = (0, episode + 1) if last else (k + 1, episode)
            yield SimpleStep(0, 0, 0, last and not cut, bool(cut), 1., k + 1., e, 0, k, episode)
    for s in NStep(steps(), n=n, gamma=gamma): memory.add(s)
    for s in memory.recent(600): ends += [(int(s.env_id), int(s.episode_n), bool(s.terminated))]*bool(s.terminated or s.truncated)
    health = memory.health()
    assert health['n_terminated']==sum(o[2] for o in set(ends)) and health['n_truncated']==sum(not o[2] for o in set(ends)) > 5
    assert health['n_episodes']==len(set(ends))


def test_health_is_a_dict_that_can_be_read():
    health = filled([0.]*1500).health()
    assert isinstance(health, dict) and type(health) is Health and health['n']==1500
    lines = repr(health).splitlines()
    assert lines[0].startswith('warning: ') and len(lines)==len(health) - 1 + len(health['warnings'])
    assert '<pre>' in health._repr_html_() and repr(filled([float(k) for k in range(60)]).health())


def test_a_pipeline_says_what_it_is_made_of():
    replay = GymStepper(['CartPole-v1'], seed=0).n_step(n=3, gamma=.99).prioritized_replay(bs=4, max_sz=50, seed=0)
    learn = DQNLearner(torch.nn.Linear(4, 2), replay.loader())
    assert repr(learn).startswith('GymStepper(CartPole-v1) → NStep(3, 0.99) → PrioritizedReplay(bs=4, ') and repr(learn).endswith(' → loader → DQNLearner(0 batches)')
    learn.fit(101)
    assert repr(learn).endswith('(101 batches)') and len(repr(learn)) < 300 and len(repr(replay.memory)) < 150
    html = learn._repr_html_()
    assert 'GymStepper(CartPole-v1) → NStep(3, 0.99) → PrioritizedReplay(bs=4, min_sz=4, steps_per_batch=1; ReplayMemory(50 of 50 ' in html and '→ loader → DQNLearner(101 batches)' in html
    assert 'samples per insert' in html and replay._repr_html_().count('<table')==1 and 'NStep(3, 0.99)' in replay._repr_html_()
    assert repr(GymStepper([lambda: None, 'Taxi-v3', 'Acrobot-v1', 'a']))=='GymStepper(<lambda>, Taxi-v3, Acrobot-v1, …)'
    assert repr(GymStepper(iter(())))=='GymStepper()' and repr(ExperienceReplay([], bs=2)).startswith('ExperienceReplay(bs=2')
    assert repr(DQNLearner(torch.nn.Linear(4, 2), []))=='list → DQNLearner(0 batches)'


# ---- observations in dicts

def in_a_dict(k, form):
    "An observation with an image of this form, whose newest or only frame has k at its corner, and a vector"
    picture = np.zeros(form, np.uint8)
    picture[...] = k % 200
    return dict(camera=picture, joints=np.full(3, k, np.float32), level=k % 4)

FORMS = {(3, 20, 24): (20, 24, 3), (20, 24, 3): (20, 24, 3), (20, 24): (20, 24), (1, 20, 24): (20, 24), (20, 24, 1): (20, 24), (4, 20, 24): (20, 24),
         (2, 3, 20, 24): (20, 24, 3), (4, 20, 24, 3): (20, 24, 3), (20, 24, 3, 4): (20, 24, 3), (20, 24, 4): (20, 24)}


@pytest.mark.parametrize('form', FORMS)
def test_images_of_any_form_are_pictures(form):
    from fastrl_replay.show import as_picture, is_image
    assert is_image(form) and as_picture(np.zeros(form, np.uint8)).shape==FORMS[form]
    assert as_picture(np.linspace(-3, 5, int(np.prod(form))).reshape(form)).max()==1.


def test_of_a_stack_the_newest_is_shown():
    from fastrl_replay.show import as_picture
    for form, last in (((4, 20, 24), np.s_[-1]), ((4, 20, 24, 3), np.s_[-1]), ((4, 3, 20, 24), np.s_[-1]), ((20, 24, 3, 4), np.s_[..., -1])):
        stack = np.zeros(form, np.uint8)
        stack[last] = 9
        assert (as_picture(stack)==9).all()


@pytest.mark.parametrize('kind,form', [('ram', (3, 20, 24)), ('ram', (2, 20, 24, 3)), ('disk', (20, 24, 3)), ('peek', (4, 20, 24)),
                                       ('sequence', (4, 20, 24)), ('windows', (3, 20, 24)), ('n_step', (20, 24, 3))])
def test_dict_observations_are_shown(form, kind, tmp_path):
    import matplotlib.pyplot as plt
    from fastrl_replay.all import NStep, Sequence
    options = dict(sequence=dict(sequence=Sequence(3)), windows=dict(windows={'state': (-1, 0)}), disk=dict(path=tmp_path/'m'), peek=dict(path=tmp_path/'m')).get(kind, {})
    memory = ReplayMemory(60, seed=0, **options)
    steps = [Transition(in_a_dict(k, form), k % 3, float(k % 5==4), in_a_dict(k + 1, form), k % 5==4, False) for k in range(40)]
    memory.extend(NStep(n=2, gamma=.9).push(steps) if kind=='n_step' else steps)
    looked_at = ReplayMemory.peek(tmp_path/'m') if kind=='peek' else memory
    figure = looked_at.show(n=2)
    pictures = [ax for ax in figure.axes if ax.images]
    assert len(pictures)==(2 if kind=='n_step' else 3) and 'state.joints' in [ax.get_title() for ax in figure.axes]
    batch = memory.sample(6)
    if kind=='windows' and len(form)==4: return           # windows of stacks of colours have five dimensions: numbers are shown
    shown = [ax for ax in batch.show().axes if ax.images]
    assert len(shown)==(3 if kind=='sequence' else 6) and all(ax.images[0].get_array().shape[:2]==(20, 24) for ax in shown)
    assert batch._repr_html_().count('>state.camera<')==1 and looked_at.health()['n']==len(memory)
    plt.close('all')
    memory.close()


def test_two_cameras_have_a_row_each():
    import matplotlib.pyplot as plt
    memory = ReplayMemory(20, seed=0)
    def seen(k): return dict(left=np.full((3, 9, 9), k, np.uint8), right=np.full((12, 12), k, np.uint8), low=np.zeros((4, 4), np.uint8))
    for k in range(10): memory.add(Transition(seen(k), 0, float(k==9), seen(k + 1), k==9, False))
    axes = [ax for ax in memory.show(n=3).axes if ax.images]
    assert len(axes)==8 and [ax.get_ylabel() for ax in axes]==['state.left', '', '', '', 'state.right', '', '', '']
    assert [ax.get_xlabel() for ax in axes[-2:]]==['action 0, reward 1', 'end'] and not axes[0].get_xlabel()
    assert [int(ax.images[0].get_array().max()) for ax in axes]==[7, 8, 9, 10]*2
    axes = [ax for ax in memory.sample(4).show().axes if ax.images]
    assert len(axes)==8 and 'id' in axes[-1].get_xlabel()
    plt.close('all')


def test_a_dict_without_images_shows_its_numbers():
    import matplotlib.pyplot as plt
    memory = ReplayMemory(20, seed=0)
    def seen(k): return dict(a=np.full(3, k, np.float32), b=float(k))
    for k in range(10): memory.add(Transition(seen(k), 0, 1., seen(k + 1), k==9, False))
    assert 'state.a' in [ax.get_title() for ax in memory.show().axes]
    figure = memory.sample(4).show()
    assert {'state.a[0]', 'state.b'} <= {o.get_text() for o in figure.axes[0].get_xticklabels()}
    plt.close('all')
