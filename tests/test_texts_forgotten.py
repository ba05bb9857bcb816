"A run may meet any number of strings: those whose rows are gone are forgotten, and no row ever gets another's"
import copy
import os
import pickle
import shutil
import signal
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest

from fastrl_replay.all import Proportional, ReplayMemory
from fastrl_replay.storage import texts
from refusals import refused


class Told(NamedTuple):
    state: Any
    action: Any
    reward: Any
    next_state: Any
    terminated: Any
    truncated: Any
    task: Any = ''
    where: Any = ''

def told(k, task=None, where='here'): return Told(np.float32([k]), k, 0., np.float32([k + 1]), k % 9==8, False, f'task {k}' if task is None else task, where)
def table(memory, k=0): return memory._shelf.storage.tables[k]

@pytest.fixture
def few(monkeypatch):
    "Strings are looked for early, and there may be only forty"
    monkeypatch.setattr(texts, '_FEW', 8)
    monkeypatch.setattr(texts, 'MOST_TEXTS', 40)


def test_a_small_memory_meets_more_strings_than_may_be_stored():
    "More than a million, two thousand at a time"
    memory, n = ReplayMemory(2000), texts.MOST_TEXTS + 5000
    columns = [np.zeros((4096, 1), np.float32), np.arange(4096), np.zeros(4096), np.zeros((4096, 1), np.float32), np.zeros(4096, bool), np.zeros(4096, bool)]
    for a in range(0, n, 4096): memory.extend(Told(*columns, [f'number {k}' for k in range(a, a + 4096)], ['here']*4096), streams='one')
    first, end = memory.first_id, memory.n_added
    assert end > texts.MOST_TEXTS and memory.fetch(range(first, end)).task==[f'number {k}' for k in range(first, end)]
    assert memory.check_valid() and table(memory).nbytes < 2e6 and sum(len(o.texts) for o in table(memory).lists) < 30_000
    health = memory.health()
    assert health['n_texts']==2000 and health['most_texts']==texts.MOST_TEXTS and not any('strings' in o for o in health['warnings'])


class Twin:
    "All steps ever stored, by id; which are in the memory; and whether one more string is one too many"
    def __init__(self, max_sz): self.max_sz, self.tasks, self.first = max_sz, list[str](), 0
    def living(self): return self.tasks[max(self.first, len(self.tasks) - self.max_sz):]
    def fits(self, new): return len({*self.living(), *new}) <= 40


@pytest.mark.parametrize('place', ['ram', 'disk'])
@pytest.mark.parametrize('seed', range(3))
def test_beside_a_naive_twin(seed, place, few, tmp_path):
    "Random chunks, lasting and passing strings, clearing, loading, reopening: rows are right, and refused is what is too much"
    rng, max_sz = np.random.default_rng(seed), [30, 45, 200][seed % 3]
    memory, twin, n_refused = ReplayMemory(max_sz, [None, Proportional()][seed % 2], seed=seed, path=tmp_path/'there' if place=='disk' else None), Twin(max_sz), 0
    view = None
    for turn in range([140, 140, 300][seed]):
        m, k = int(rng.integers(1, 7)), len(twin.tasks)
        lasting = rng.random() < [.2, .2, .97][seed % 3]
        new = [f'lasting {rng.integers(5)}' if lasting else f'passing {seed} {k + i} ' + 'x'*int(rng.integers(40)) for i in range(m)]
        new = new[:1] if m==5 else new
        def go(): return memory.add(told(k, new[0])) if len(new)==1 else memory.extend([told(k + i, o) for i, o in enumerate(new)])
        if twin.fits(new):
            go()
            twin.tasks += new
        else:
            n_refused += 1
            with refused('task', expected='at most 40 different strings'): go()
        if rng.random() < .02 and len(memory):
            memory.clear()
            twin.first = len(twin.tasks)
        first, end = memory.first_id, memory.n_added
        assert end==len(twin.tasks) and len(memory)==len(twin.living())
        assert memory.fetch(range(first, end)).task==twin.living()
        if place=='disk':
            if view is None and len(memory): view = ReplayMemory.peek(tmp_path/'there')
            if view is not None: assert view.recent().task==twin.living()
        what = rng.random()
        if what < .03: memory.save(tmp_path/'saved')
        elif what < .06 and place=='ram': memory = pickle.loads(pickle.dumps(memory))
        elif what < .08 and place=='ram': memory = copy.deepcopy(memory)
        elif what < .1 and place=='ram' and len(memory):
            other = ReplayMemory(max_sz, memory.sampler.__class__(), step=told(0))
            other.load_state_dict(memory.state_dict())
            memory = other
        elif what < .13 and place=='ram':
            memory.save(tmp_path/'saved')
            memory = ReplayMemory.load(tmp_path/'saved')
        elif what < .1 and place=='disk':
            memory.close()
            memory = ReplayMemory.open(tmp_path/'there')
        elif what < .12 and place=='disk' and len(memory):
            shutil.copytree(tmp_path/'there', tmp_path/'copy', dirs_exist_ok=True)     # as a kill would leave it
            with ReplayMemory.open(tmp_path/'copy') as again: assert again.fetch(range(first, end)).task==twin.living() and again.check_valid()
        if turn % 50==0: assert memory.check_valid()
    assert len(table(memory).lists)==2 and sum(len(o.texts) for o in table(memory).lists) < 350 and (place=='ram' or table(memory).emptied.min() > 0)
    assert n_refused > 3 or seed % 3!=1
    assert memory.health()['n_texts']==max(len({*twin.living()}), 1 if len(memory) else 0)
    if view is not None: view.close()
    memory.close()


def test_health_warns_before_it_is_too_much(few):
    memory = ReplayMemory(100)
    memory.extend([told(k, f'{k}') for k in range(32)])
    assert memory.health()['n_texts']==32 and not any('strings' in o for o in memory.health()['warnings'])
    memory.extend([told(k, f'{k}') for k in range(32, 34)])
    assert any('34 different ones' in o and '40' in o for o in memory.health()['warnings'])
    assert 'n_texts' not in ReplayMemory(9).usage()


def test_a_folder_without_a_second_list_is_read_and_gets_one(few, tmp_path):
    "As earlier versions leave it"
    memory = ReplayMemory(30, path=tmp_path/'there')
    memory.extend([told(k) for k in range(20)])
    memory.close()
    assert not [*(tmp_path/'there').glob('texts.6.1*')]
    view = ReplayMemory.peek(tmp_path/'there')
    with ReplayMemory.open(tmp_path/'there') as memory:
        for k in range(20, 120):
            memory.add(told(k))
            assert view.recent(5).task==memory.recent(5).task
    view.close()
    assert (tmp_path/'there'/'texts.6.1.map').exists()
    with ReplayMemory.open(tmp_path/'there') as memory: assert memory.recent(30).task==[f'task {k}' for k in range(90, 120)] and memory.check_valid()


WRITER = '''
import sys, numpy as np
sys.path.insert(0, {tests!r})
from test_texts_forgotten import told, texts
from fastrl_replay.all import ReplayMemory
texts._FEW, texts.MOST_TEXTS = 4, 40
memory = ReplayMemory(20, path={path!r})
k = memory.n_added
while True:
    if k % 5: memory.add(told(k))
    else: memory.extend([told(k)])
    k += 1
    print(k, flush=True)
'''

def test_killed_while_lists_change_places(tmp_path):
    "Each row that was acknowledged has its string, four times over"
    path, done = str(tmp_path/'there'), 0
    for k in range(4):
        writer = subprocess.Popen([sys.executable, '-c', WRITER.format(tests=os.path.dirname(__file__), path=path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(150 + 37*k): done = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        done = max([done, *(int(o) for o in writer.stdout.read().split('\n')[:-1] if o)])
        writer.wait()
        with ReplayMemory.open(path) as memory:
            assert memory.n_added >= done and memory.check_valid()
            assert memory.fetch(range(memory.first_id, memory.n_added)).task==[f'task {i}' for i in range(memory.first_id, memory.n_added)]


def test_a_view_that_opens_while_a_list_begins_anew(few, tmp_path, monkeypatch):
    "Between a view's reading the first list and its looking which lists were emptied, that list is emptied and written again"
    with ReplayMemory(20, path=tmp_path/'there') as memory:
        memory.add(told(0))
        k = 1
        def write_until_emptied():
            "Go on until the first list is begun anew and twenty rows refer to it"
            nonlocal k
            before = table(memory).emptied[0] if len(table(memory).lists) > 1 else 0
            while len(table(memory).lists)==1 or table(memory).emptied[0]==before:
                memory.add(told(k))
                k += 1
            for i in range(k, k + 20): memory.add(told(i))
            k += 20
        write_until_emptied()
        while not table(memory).now:
            memory.add(told(k))
            k += 1
        find, times = texts.TextNumbers._find_second, []
        def late(self, make=False):
            if not self.room.writable and not times:
                times.append(k)
                write_until_emptied()
            find(self, make)
        monkeypatch.setattr(texts.TextNumbers, '_find_second', late)
        with ReplayMemory.peek(tmp_path/'there') as view:
            assert times and view.recent(20).task==[f'task {o}' for o in range(k - 20, k)]
