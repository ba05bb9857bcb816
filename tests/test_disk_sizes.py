"What a memory on disk takes: what was estimated is what its files occupy, from the first step on, and `inspect` says so"
import gymnasium as gym
import numpy as np
import pytest

from fastrl_replay.all import Proportional, RankBased, ReplayMemory, SimpleStep, Uniform
from fastrl_replay.runs import summary
from fastrl_replay.steps import readable
from refusals import refused


def occupied(folder, but=()):
    "Bytes of the disk, and how many files"
    files = [p for p in folder.rglob('*') if p.is_file()]
    if not hasattr(files[0].stat(), 'st_blocks'): pytest.skip('this system does not say what files occupy')
    return sum(512*p.stat().st_blocks for p in files if p.name not in but), len(files)


def small(k): return SimpleStep(np.full(4, k, np.float32), 0, np.full(4, k + 1, np.float32), False, k % 10==9, 1., step_n=k % 10)
def frames(k, planes=4):
    rng = np.random.default_rng(k//10)
    seen = rng.integers(0, 255, (20, 84, 84)).astype(np.uint8)
    i = k % 10
    return SimpleStep(seen[i:i + planes], 0, seen[i + 1:i + 1 + planes], False, i==9, 1., step_n=i)
def colours(k): return SimpleStep(np.full((64, 64, 3), k, np.uint8), 0, np.full((64, 64, 3), k + 1, np.uint8))


@pytest.mark.parametrize('kind, n, sampler', [(small, 50_000, Proportional), (frames, 3_000, RankBased), (colours, 3_000, Uniform)])
def test_what_is_estimated_is_occupied_from_the_first_step_on(kind, n, sampler, tmp_path):
    told = ReplayMemory.estimate(kind(0), n)
    with ReplayMemory(n, sampler(), path=tmp_path/'m') as memory:
        memory.add(kind(0))
        now, _ = occupied(tmp_path/'m', but=['priorities.map'])
        assert abs(now/told.on_disk - 1) < .02 and told.nbytes < told.on_disk
        for k in range(1, 40): memory.add(kind(k))
        assert occupied(tmp_path/'m', but=['priorities.map'])[0]==now
        priorities = occupied(tmp_path/'m')[0] - now
        assert priorities <= {Uniform: 0, Proportional: 50*n, RankBased: 8*n + 8192}[sampler]
    assert f'with path=, {readable(told.on_disk)} of the disk are reserved' in str(told)


def test_a_given_layout_is_reserved_at_once(tmp_path):
    "On opening, not at the first step"
    with ReplayMemory(50_000, step=small(0), path=tmp_path/'m'): assert occupied(tmp_path/'m')[0] > .98*ReplayMemory.estimate(small(0), 50_000).on_disk


def test_inspect_says_what_is_occupied_and_what_is_filled(tmp_path):
    memory = ReplayMemory(20_000, path=tmp_path/'m')
    for k in range(30): memory.add(small(k))
    memory.save(tmp_path/'saved')
    taken, files = occupied(tmp_path/'m')
    lines = summary(tmp_path/'m')
    at = [k for k, (head, _) in enumerate(lines) if head=='bytes']
    assert lines[at[0]]==('bytes', f'{readable(taken)} of the disk in {files} files: a memory on disk reserves its whole size')
    assert lines[at[0] + 1]==('', f'{readable(30*memory.usage()["bytes_each"])} of them are filled so far, by 30 transitions')
    saved = [p.stat().st_size for p in (tmp_path/'saved').rglob('*') if p.is_file()]
    said = summary(tmp_path/'saved')
    assert ('bytes', f'{readable(sum(saved))} in {len(saved)} files') in said and not [o for o in said if 'filled so far' in o[1]]
    memory.close()


def test_an_empty_memory_on_disk_has_filled_nothing(tmp_path):
    ReplayMemory(50, step=small(0), path=tmp_path/'m').close()
    assert [head for head, _ in summary(tmp_path/'m')][-1]=='bytes'


def test_packing_on_disk_is_refused_with_the_reason(tmp_path):
    for how in (dict(), dict(step=frames(0))):
        with refused('codec'): ReplayMemory(50, codec='lz4', path=tmp_path/'m', **how)
    assert not (tmp_path/'m').exists()
    space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    assert ReplayMemory.estimate(space, 100).on_disk > ReplayMemory.estimate(space, 100).nbytes
