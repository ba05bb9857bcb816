"""What works on which memory: the table of the page, tried cell by cell. `yes` works, `no` is refused by name, before anything changes.

A row of the page is a line of `TRIES`; whatever it needs is made by a `Kind`, which makes memories of one column."""
import copy, json, pickle, re
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from fastrl_replay.all import (
    AgeWeighted, DQNLearner, Episodes, ExperienceReplay, HindsightReplay, IterDataPipe, LinearSchedule, MixedMemory, Normalized,
    PrioritizedReplay, Proportional, RankBased, RankReplay, ReplayMemory, RewardScale, Sampler, Sequence, SequenceReplay, SimpleStep)
from fastrl_replay.memory import DeviceMemory
from fastrl_replay.pipes.normalized import Statistics
from fastrl_replay.ray import RayMemory
from fastrl_replay.steps import tree_map
from fastrl_replay.testing import LACKS
from words import WORDS, words

pytestmark = pytest.mark.filterwarnings('ignore:device. on a CPU')


class Own(Sampler):
    "A sampler of the user's own, which draws the newest"
    prioritized = False
    def draw(self, bs, rng): return np.arange(self.size - 1, self.size - 1 - bs, -1), np.full(bs, 1/self.size)


class Goal(NamedTuple):
    state: dict
    action: int
    reward: float
    next_state: dict
    terminated: bool
    truncated: bool


class Said(NamedTuple):
    state: float
    word: str


def said(): return [Said(1., 'left' if i % 2 else 'right') for i in range(40)]
def steps(first=0, n=40): return [SimpleStep(np.full(3, i, np.float32), i % 2, np.full(3, i + 1, np.float32), i % 8==7, False, 1., env_id=0, step_n=i % 8,
                                             episode_n=i//8) for i in range(first, first + n)]
def stacked(): return SimpleStep(*map(np.stack, zip(*steps())))._replace(env_id=np.arange(40) % 2)
FRAMES = np.zeros((4, 84, 84), np.uint8)
def goals():
    def seen(i): return dict(observation=np.float32(i), achieved_goal=np.float32(i), desired_goal=np.float32(9))
    return [Goal(seen(i), 0, 0., seen(i + 1), False, i % 8==7) for i in range(40)]


class Kind:
    "Makes memories of one kind, with options, and fills them"
    def __init__(self, name, tmp_path, close): self.name, self.folder, self.close, self.n = name, tmp_path, close, 0
    def make(self, *samplers, **options):
        "`samplers` for a single memory, or each member of a mixture"
        sampler = samplers[0] if samplers else None
        def one(make=ReplayMemory, **kw): return make(max_sz=60, sampler=sampler and sampler(), seed=0, **options, **kw)
        self.n += 1
        if self.name=='RayMemory': made = one(RayMemory, shards=0)
        elif self.name=='DeviceMemory': return one(DeviceMemory, device='cpu', compile=False, max_ends=60)
        elif self.name=='MixedMemory': made = MixedMemory([one(), one()], seed=0)
        else: made = one() if self.name=='ReplayMemory' else one(path=self.folder/f'{self.n}')
        for o in [made] if self.name=='RayMemory' else getattr(made, 'memories', [made]): self.close(o.close)
        return made
    def filled(self, *samplers, rows=steps, **options):
        made = self.make(*samplers, **options)
        for o in made.memories if self.name=='MixedMemory' else [made]: o.extend(rows())
        return made
    def source(self, rows):
        "Steps; for a memory on a device, each as a chunk of tensors"
        if self.name!='DeviceMemory': return rows
        def tensor(v): return torch.as_tensor(np.asarray(v, np.float32 if type(v) is float else None))[None]
        return [type(o)(*(tree_map(tensor, v) for v in o)) for o in rows]
    def pipe(self, make, *samplers, rows=steps, **kw):
        options = {k: kw.pop(k) for k in ('sequence',) if k in kw}
        replay = make(self.source(rows()), memory=self.filled(*samplers, rows=rows, **options), **dict(bs=4) | kw)
        assert len([len(o) for o in replay]) > 3 and replay.health()
        return replay


def used(memory, **kw):
    "Rows go in, come out, and take priorities"
    batch = memory.sample(6, **kw)
    assert len(batch)==6 and (memory.fetch(batch.ids.flatten()[:1]).ids==batch.ids.flatten()[:1]).all() and memory.n_added==40
    changed = batch.update_priorities(np.ones(6))
    assert changed is None or (changed > 0)==memory.sampler.prioritized        # a device doesn't wait to count
    return batch

def saved(kind, **kw):
    memory = kind.filled()
    memory.save(kind.folder/'saved', **kw)
    again = type(memory).load(kind.folder/'saved', **dict(device='cpu') if kind.name=='DeviceMemory' else {})
    kind.close(getattr(again, 'close', int))
    assert again.n_added==40 and again.sample(3) and kw=={k: getattr(again, k) for k in kw}

def dropped(kind):
    memory = kind.filled()
    assert memory.drop([1, 2])==2 and not {1, 2} & {*memory.sample(30).ids.tolist()}

def cleared(kind):
    memory = kind.filled()
    memory.clear()
    assert len(memory)==0 and memory.n_added==40

def learned(kind):
    replay = ExperienceReplay(kind.source(steps(40)), bs=4, memory=kind.filled())
    DQNLearner(nn.Linear(3, 2), replay.loader()).fit(5)

def with_returns(kind):
    "Whole episodes, in which each step knows what followed; rows of a memory on a device are streams in order: here there is one"
    memory = kind.make(**dict(n_envs=1) if kind.name=='DeviceMemory' else {})
    for o in Episodes(steps(), lambda episode: dict(total_reward=episode.reward.flip(0).cumsum(0).flip(0))): memory.extend(o)
    assert memory.n_added==40 and memory.episode(11).total_reward.tolist()==[8, 7, 6, 5, 4, 3, 2, 1]

def counted(kind):
    model = Normalized(nn.Linear(3, 2))
    replay = ExperienceReplay(Statistics(kind.source(steps(40)), model), bs=4, memory=kind.filled())
    assert len([*replay]) > 3 and model.running['state'].count==40 and model.running['state'].mean.tolist()==[59.5]*3

def scaled(kind):
    replay = ExperienceReplay(kind.source(steps(40)), bs=4, memory=kind.filled())
    learn = DQNLearner(nn.Linear(3, 2), replay.loader(), reward_scale=RewardScale())
    learn.fit(5)
    assert learn.reward_scale.count >= 40 and abs(learn.reward_scale.spread - 2.17) < .2 and replay.sample().reward.max()==1

class Halved(IterDataPipe):
    "A pipe of the user's own"
    def __init__(self, source_datapipe): self.source_datapipe = source_datapipe
    def __iter__(self):
        for item in self.source_datapipe: yield item._replace(reward=item.reward*.5)

def through_own(kind):
    replay = ExperienceReplay(Halved(kind.source(steps(40))), bs=4, memory=kind.filled())
    assert [*replay] and {*replay.memory.fetch([45]).reward.tolist()}=={.5}

def shown(kind):
    import matplotlib.pyplot as plt
    memory = kind.filled()
    assert memory.health()['n'] and memory.show()
    plt.close('all')

def written(kind):
    minari = pytest.importorskip('minari')
    kind.set('MINARI_DATASETS_PATH', str(kind.folder))
    assert kind.filled().to_minari('test/where-v0').total_steps==40
    assert minari

def copied(kind):
    memory = kind.filled()
    for again in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert again.n_added==40 and again.sample(3).ids.tolist()==copy.deepcopy(memory).sample(3).ids.tolist()

def mixed(kind):
    other = ReplayMemory(60, seed=1)
    other.extend(steps())
    assert MixedMemory([kind.filled(), other], seed=0).sample(8).source.sum()==4


TRIES = {       # row of the page → what is tried
    '`add`, `extend`, `sample`, `fetch`, `update_priorities`': lambda k: used(k.filled()).idxs.max() and k.make().add(steps()[0]),
    '`extend(streams=…)`': lambda k: k.make().extend(stacked(), streams=np.arange(40) % 2).tolist(),
    'arrays of `NumPy` in `extend`': lambda k: k.filled().extend(stacked()).tolist(),
    '`previous`, `next`, `episode`': lambda k: (m := k.filled()).next([33])[0]==34 and m.episode(33).ids,
    '`sample(fields=…)`': lambda k: used(k.filled(), fields=['reward']).reward,
    '`Proportional()`, priorities': lambda k: used(k.filled(Proportional)),
    '`beta=` a schedule': lambda k: used(k.filled(lambda: Proportional(beta=LinearSchedule(.4, 1., 9)))),
    '`RankBased()`': lambda k: used(k.filled(RankBased)),
    '`AgeWeighted()`': lambda k: used(k.filled(lambda: AgeWeighted(10))),
    'a sampler of your `own`': lambda k: used(k.filled(Own)),
    '`sequence=`': lambda k: k.filled(sequence=Sequence(4)).sample(4).mask.all(),
    '`windows=`': lambda k: used(k.filled(windows={'action': range(3)})).is_pad['action'].any() and used(k.filled(), windows={'state': [-1, 0]}),
    '`sample_sequences`': lambda k: k.filled().sample_sequences(4, 3),
    'fields of `str`': lambda k: {*k.filled(rows=said).sample(9).word} <= {'left', 'right'},
    '`dedup=`': lambda k: used(k.filled(dedup='next_state')),
    '`codec=`': lambda k: k.make(codec='lz4', step=steps()[0]._replace(state=FRAMES, next_state=FRAMES)),
    '`drop`': dropped,
    '`drop_episodes`': lambda k: k.filled().drop_episodes(older_than=10) > 0,
    '`clear`': cleared,
    '`where`': lambda k: k.filled().where('reward', lambda r: r > 0),
    '`max_draws=`': lambda k: used(k.filled(max_draws=3)),
    '`recent`': lambda k: k.filled().recent(3),
    '`episodes`': lambda k: next(iter(k.filled().episodes())),
    '`correct`, `column`': lambda k: k.filled().correct([3], 'reward', 5.),
    '`save`, `load`': saved,
    '`save(also=…)`': lambda k: saved(k, also=dict(a=[1, 2.])),
    '`check_valid`': lambda k: k.filled().check_valid(),
    '`state_dict`': lambda k: k.filled().state_dict(),
    '`deepcopy`, pickle': copied,
    '`health`, `show`': shown,
    '`to_minari`': written,
    '`experience_replay(memory=…)`': lambda k: k.pipe(ExperienceReplay),
    '`prioritized_replay(memory=…)`': lambda k: k.pipe(PrioritizedReplay, Proportional),
    '`rank_replay(memory=…)`': lambda k: k.pipe(RankReplay, RankBased),
    '`sequence_replay(memory=…)`': lambda k: k.pipe(SequenceReplay, max_sz=60, length=4, sequence=Sequence(4)),
    '`hindsight_replay(memory=…)`': lambda k: k.pipe(HindsightReplay, compute_reward=lambda a, b, info: a*0., rows=goals),
    '`loader()`, `DQNLearner`': learned,
    '`whole_episodes`, `Episodes`': with_returns,
    '`statistics`, `Normalized`': counted,
    '`reward_scale=` of a learner': scaled,
    '`IterDataPipe` of your own': through_own,
    'in a `MixedMemory`': mixed,
}


SAID = {        # what the refusal names, where that is not the first name of the row
    '`extend(streams=…)`': 'streams', 'arrays of `NumPy` in `extend`': 'state: expected a tensor',
    '`AgeWeighted()`': WORDS['no ages here'], 'a sampler of your `own`': WORDS['not ones own'], '`deepcopy`, pickle': WORDS['no copies'],
    '`rank_replay(memory=…)`': words('a word', name='RankBased'), '`sequence_replay(memory=…)`': words('a word', name='sequence'), '`hindsight_replay(memory=…)`': WORDS['no index of episodes'],
}


def table(root):
    "Row → column → cell of the page's table"
    cells = json.loads((root/'nbs'/'howto'/'05_where.ipynb').read_text(encoding='utf-8'))['cells']
    lines = [o for c in cells if c['cell_type']=='markdown' for o in ''.join(c['source']).splitlines() if o.startswith('|')]
    head, _, *rows = [[o.strip() for o in line.strip('|').split('|')] for line in lines]
    return {row[0]: dict(zip((o.strip('`') for o in head[1:]), row[1:], strict=True)) for row in rows}


def key(row):
    "By what name the kit knows a row of the page"
    return re.findall(r'(?<!memory)\b(\w+)=', row.replace('memory=', ''))[:1] or re.findall(r'`(\w+)', row)[:1]


def test_the_kit_knows_what_the_page_says(root):
    found = table(root)
    names = {row: key(row)[0] for row in found}
    for column, said_words in LACKS.items():
        where = 'ReplayMemory' if column=='ReplayMemory' else column
        assert {names[row] for row, cells in found.items() if cells[where]!='yes'}=={*said_words.split()} - {'Ctrl'}, column


COLUMNS = 'ReplayMemory', 'with a path', 'RayMemory', 'MixedMemory', 'DeviceMemory'

def test_the_page_has_every_row_and_every_cell_says_yes_or_no(root):
    found = table(root)
    assert [*found]==[*TRIES]
    for row, cells in found.items():
        assert {*cells} >= {*COLUMNS} and all(o in ('yes', '**no**') for o in cells.values()), row


@pytest.mark.parametrize('column', COLUMNS)
@pytest.mark.parametrize('row', TRIES)
def test_it_works_or_says_that_it_does_not(row, column, root, tmp_path, request, monkeypatch):
    kind = Kind(column, tmp_path, request.addfinalizer)
    kind.set = monkeypatch.setenv
    if table(root)[row][column]=='yes':
        assert TRIES[row](kind) is not False
        return
    said = SAID.get(row) or words('a word', name=re.findall(r'`(\w+)', row)[0])
    with pytest.raises((TypeError, ValueError, AttributeError, RuntimeError), match=said) as raised: TRIES[row](kind)
    assert len(str(raised.value).split()) >= 5, f'{raised.value}: what, and why or what instead'
