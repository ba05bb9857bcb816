"""Processes killed with -9 at random moments: nothing that was acknowledged is lost, and nothing is torn.

25 kills; 200 with `--kills 200`."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from killing import KINDS, SAMPLERS, KillTwin, is_whole, make_step, open_memory, plan
from words import WORDS, words


@pytest.fixture(scope='module')
def forge(root):
    "Starts working processes"
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(root), str(root/'tests'), os.environ.get('PYTHONPATH', '')]))
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, str(root/'tests'/'killing.py')], env=env, **pipes)
    assert process.stdout.readline()=='ready\n'
    def work_and_die(seed, folder, sampler, kind, lines, seconds):
        "Kill it `seconds` after it has said so many lines"
        process.stdin.write(f'{seed} {folder} {sampler} {kind}\n')
        process.stdin.flush()
        child = int(process.stdout.readline())
        log, patience = folder/'log', time.monotonic() + 20
        def said(): return log.read_bytes().count(b'\n') if log.exists() else -1
        while time.monotonic() < patience and said() < lines: time.sleep(.0005)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        assert process.stdout.readline()=='gone\n'
    yield work_and_die
    process.stdin.close()
    process.wait(10)


def log_of(folder):
    path = folder/'log'
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def follow(twin, seed, lines):
    "The twin after all that was acknowledged, and after what was under way too (None if nothing was)"
    if not lines or not lines[-1].startswith('open ') and len(lines) < 2: return twin, None
    assert lines[1]==f'open {twin.n}', 'the process opened another memory than the last one left'
    rng = np.random.default_rng(seed)
    for line in lines[2:]:
        twin.apply(plan(rng, twin.n, twin.first))
        assert twin.n==int(line.split()[1]), f'the twin has {twin.n} steps where the process said {line}'
    after = KillTwin(twin.sampler)
    after.__dict__.update(twin.__dict__, p=dict(twin.p))
    after.apply(plan(rng, twin.n, twin.first))
    return twin, after


def priorities_of(memory): return getattr(memory.sampler, 'priorities', None)


def check(memory, twin, after, kind):
    "Is the memory what the twin says it must or may be?"
    memory.check_valid()
    most = twin.n if after is None else after.n
    assert twin.n <= memory.n_added <= most, f'{memory.n_added} steps, expected {twin.n} to {most}'
    assert memory.first_id==max(0, memory.n_added - memory.max_sz), 'a step was lost that nobody overwrote'
    if not len(memory): return
    rows = memory.fetch(np.arange(memory.first_id, memory.n_added))
    assert is_whole(kind, rows), 'a torn row'
    if priorities_of(memory) is None: return
    got = dict(zip(rows.ids.tolist(), priorities_of(memory)[rows.idxs].tolist()))
    for i, p in got.items():
        may = {o.p[i] for o in (twin, after) if o is not None and i in o.p}
        if i >= twin.n:                        # a step that was not acknowledged
            may |= {twin.largest, after.largest, *(max(twin.largest, o) for o in after.p.values())}
        assert p in may, f'step {i} has priority {p}, expected one of {may}'
    assert memory.sampler.largest >= max(twin.largest, *got.values())


def adopt(twin, memory):
    "The twin goes on from what was found"
    rows = memory.fetch(np.arange(memory.first_id, memory.n_added)) if len(memory) else None
    twin.n = memory.n_added
    if rows is None or priorities_of(memory) is None: return
    twin.p = dict(zip(rows.ids.tolist(), priorities_of(memory)[rows.idxs].tolist()))
    twin.largest = memory.sampler.largest


def check_saved(folder, twin, after, kind):
    "The last checkpoint is whole: the one that was acknowledged, or the one that was being made"
    wanted = {o.saved for o in (twin, after) if o is not None}
    if wanted=={None} or not (folder/'manifest.json').exists() and None in wanted: return
    memory = ReplayMemory.load(folder)
    assert memory.n_added in wanted and memory.check_valid()
    if len(memory): assert is_whole(kind, memory.fetch(np.arange(memory.first_id, memory.n_added)))
    twin.saved = memory.n_added


CASES = [(s, k) for s in SAMPLERS for k in KINDS]

@pytest.mark.parametrize('sampler,kind', CASES)
def test_killed_again_and_again(forge, sampler, kind, tmp_path, request):
    kills = -(-request.config.getoption('--kills')//len(CASES))
    rng, twin, worked = np.random.default_rng([len(sampler), len(kind)]), KillTwin(sampler), 0
    for k in range(kills):
        forge(k, tmp_path, sampler, kind, int(rng.choice([0, 1, 2, 10, 30, 80])), float(rng.uniform(0, .005)))
        lines = log_of(tmp_path)
        worked += len(lines)
        twin, after = follow(twin, k, lines)
        memory = open_memory(tmp_path, sampler, kind)
        check(memory, twin, after, kind)
        check_saved(tmp_path/'checkpoint', twin, after, kind)
        adopt(twin, memory)
        memory.close()
    assert worked > kills, f'only {worked} things were done in {kills} lives: the kills test nothing'


def stored(memory): return np.memmap(Path(memory.path)/'records.map', memory.layout.record, 'r+')

def test_the_check_sees_what_is_wrong(tmp_path):
    "A lost step, a torn row, a changed priority, a stale link, another frame"
    def fresh(name, kind='transition'):
        memory, twin = open_memory(Path(tmp_path)/name, 'proportional', kind), KillTwin('proportional')
        rng = np.random.default_rng(0)
        for _ in range(400):
            priority = float(rng.integers(1, 9))
            memory.add(make_step(kind, memory.n_added), priority=priority)
            twin.apply(('give', 0, 1, [priority]))
        check(memory, twin, None, kind)
        return memory, twin
    memory, twin = fresh('a')
    twin.n += 1
    with pytest.raises(AssertionError, match=words('another number', n=401)): check(memory, twin, None, 'transition')
    memory, twin = fresh('b')
    stored(memory)['state'][7, 3] += 1
    with pytest.raises(AssertionError, match=WORDS['a torn row']): check(memory, twin, None, 'transition')
    memory, twin = fresh('c')
    memory.update_priorities([350], [77.])
    with pytest.raises(AssertionError, match=words('another priority', id=350, p=77.5)): check(memory, twin, None, 'transition')
    memory, twin = fresh('d')
    stored(memory)['_next'][399 % 300] = 1
    with pytest.raises(AssertionError, match=WORDS['wrong links']): check(memory, twin, None, 'transition')
    memory, twin = fresh('e', 'frames')
    for file in Path(memory.path).glob('frames*.map'): np.memmap(file, np.uint8, 'r+')[:100_000] += 1
    with pytest.raises(AssertionError, match=WORDS['a damaged frame']): check(memory, twin, None, 'frames')
