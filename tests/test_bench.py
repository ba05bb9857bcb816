"The comparison with other libraries: every case runs and gives tensors, and who is missing is named"
import csv, importlib, sys

import pytest
import torch


@pytest.fixture(scope='module')
def bench(root):
    "benchmarks/ as a place to import from"
    sys.path.insert(0, str(root/'benchmarks'))
    yield importlib.import_module('compare'), importlib.import_module('peers')
    sys.path.remove(str(root/'benchmarks'))


def columns(held):
    "All tensors in what a draw gives"
    if isinstance(held, torch.Tensor): return [held]
    return [t for o in held for t in columns(o)] if isinstance(held, (tuple, list)) else []


@pytest.mark.parametrize('name', ['ours', 'cpprb', 'Stable-Baselines3'])
def test_every_case_runs_and_gives_tensors(bench, name):
    compare, peers = bench
    if name != 'ours': pytest.importorskip(peers.module(name), reason=f'{name} is not installed')
    cases = compare.LIBRARIES[name](20_000)
    assert set(cases) - {'prioritized, 256'} == set(compare.CASES) - {'prioritized, 256'}
    for case, f in cases.items():
        held = f(2)
        if 'batch' not in case and 'prior' not in case: continue
        bs = int(case.replace(',', '').split()[-1])
        got = columns(held)
        assert len([t for t in got if t.shape == (bs, 4) and t.dtype == torch.float32]) >= 2
        assert all(len(t) == bs for t in got) and len(got) >= 5


def test_who_is_missing_is_named(bench, tmp_path):
    compare, _ = bench
    class Offers: cases = dict.fromkeys(compare.CASES)
    class Lacks: cases = {'one step in': None, 'prioritized, 256': 'RuntimeError: no tree'}
    found = {'ours': (Offers, '1', None), 'Here': (Lacks, '2', None), 'Gone': (None, None, 'ERROR: No matching distribution')}
    medians = {(case, 'ours'): 2. for case in compare.CASES} | {('one step in', 'Here'): 7.}
    compare.write(tmp_path, found, medians, 10_000)
    compare.write(tmp_path, found, medians, 20_000, 'a')
    with open(tmp_path/'results.csv', encoding='utf-8') as f: lines = list(csv.DictReader(f))
    assert len(lines) == 2*3*len(compare.CASES) and {o['library'] for o in lines} == set(found)
    assert {o['transitions'] for o in lines} == {'10000', '20000'}
    said = {(o['case'], o['library']): (o['times ours'], o['remark']) for o in lines}
    assert said['one step in', 'Here'] == ('3.50', '')
    assert said['prioritized, 256', 'Here'] == ('', 'not measured: RuntimeError: no tree')
    assert said['a batch of 32', 'Here'] == ('', 'not offered by this library')
    assert said['a batch of 32', 'Gone'] == ('', 'not measured: ERROR: No matching distribution')
    assert all('Python' in o['machine'] for o in lines)
    compare.plot(tmp_path)
    assert (tmp_path/'results.png').stat().st_size > 10_000


def test_tables_go_into_the_same_file(bench, tmp_path, monkeypatch, capsys):
    timing = importlib.import_module('timing')
    monkeypatch.setenv('BENCH_CSV', str(tmp_path/'r.csv'))
    timing.table('Draws', [[32, '4.5', '12.0', '2.7'], [256, '1,234.5', '–', '–']], ['rows', 'ours µs', 'cpprb µs', 'times as fast'])
    timing.table('Steps', [['one', '0.3', '10'], ['Tianshou', 'not installed', '–']], ['', 'µs a call', 'times'])
    with open(tmp_path/'r.csv', encoding='utf-8') as f: lines = [dict(zip(timing.HEAD, o)) for o in csv.reader(f)]
    assert [(o['case'], o['library'], o['microseconds'], o['remark']) for o in lines] == [
        ('Draws: 32', 'ours', '4.5', ''), ('Draws: 32', 'cpprb', '12.0', ''), ('Draws: 256', 'ours', '1234.5', ''), ('Draws: 256', 'cpprb', '', '–'),
        ('Steps', 'one', '0.3', ''), ('Steps', 'Tianshou', '', 'not installed')]
    assert 'not installed' in capsys.readouterr().out


def test_a_library_that_fails_says_why(bench, root):
    compare, _ = bench
    library = compare.Library(sys.executable, 'nonesuch', 10_000)
    assert library.cases == {} and library.why == "KeyError: 'nonesuch'"


def test_turns_are_taken(bench):
    compare, _ = bench
    turns = []
    class Clock:
        def __init__(self, name): self.name, self.cases = name, dict.fromkeys(compare.CASES)
        def measure(self, case, n):
            turns.append((case, self.name))
            return {'a': 10., 'b': 1000.}[self.name] + len(turns) % 3
    medians = compare.rounds({'a': (Clock('a'), '', None), 'b': (Clock('b'), '', None), 'c': (None, None, 'gone')}, reps=3)
    for case in compare.CASES: assert [name for c, name in turns if c == case] == ['a', 'b']*4
    assert set(medians) == {(case, name) for case in compare.CASES for name in 'ab'}


def test_reasons_are_one_line(bench):
    _, peers = bench
    assert peers.last_word('noise\nERROR: No matching distribution found for x\nWARNING: old pip\n') == 'ERROR: No matching distribution found for x'
    assert peers.last_word('Traceback\n  File\nModuleNotFoundError: No module named x\n').endswith('named x')
    assert peers.last_word('') == 'it said nothing'


def test_updates_learn(bench):
    "Each update runs, and the loss that stands beside CleanRL is its squared error"
    pytest.importorskip('stable_baselines3')
    updates = importlib.import_module('updates')
    torch.manual_seed(0)
    for update in (updates.own(200, 32, double=False), updates.sb3(200, 32), updates.cleanrl(200, 32)): update()
    memory = updates.ReplayMemory(200, seed=0)
    memory.extend(updates.transitions(200))
    batch, model, target = memory.sample(32), updates.network(), updates.network()
    q, future = model(batch.state)[range(32), batch.action], target(batch.next_state).max(1).values
    want = (batch.reward + updates.GAMMA*future*(1 - batch.terminated.float()) - q).square()
    assert torch.allclose(updates.squared(batch, model, target), want)
