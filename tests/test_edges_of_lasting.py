"What lasts, at its edges: relative paths, locks that were not completed, mappings after `close`, forged and old parts, counts through a load"
import copy
import os
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.mixed import MixedMemory
from fastrl_replay.pipes.replay import ExperienceReplay
from fastrl_replay.ray import RayMemory
from fastrl_replay.saving import CheckpointError, manifest_bytes, read_manifest
from fastrl_replay.steps import Transition
from fastrl_replay.storage import mapped
from harness import seen
from refusals import about
from test_folders import files_in
from words import WORDS, words


def step(k): return Transition(np.float32([k, k]), k, float(k), np.float32([k + 1, k]), k % 7==6, False)
def steps(n, first=0): return [step(k) for k in range(first, first + n)]

def filled(n=30, max_sz=20, sampler=None, **options):
    memory = ReplayMemory(max_sz, sampler, seed=1, **options)
    memory.extend(steps(n))
    return memory


# --- a relative path --------------------------------------------------------------------------------------------------
def test_a_relative_path_means_the_same_after_a_change_of_directory(tmp_path, monkeypatch):
    for name in ('here', 'there'): (tmp_path/name).mkdir()
    monkeypatch.chdir(tmp_path/'here')
    memory = filled(path='m')
    os.chdir(tmp_path/'there')
    assert memory.path==tmp_path/'here'/'m'
    memory.flush()
    memory.drop([15])                          # makes a file late
    memory.extend(steps(5, 30))
    memory.close()
    assert not os.listdir(tmp_path/'there')
    os.chdir(tmp_path/'here')
    with ReplayMemory.open('m') as again, ReplayMemory.peek('m') as view:
        os.chdir(tmp_path/'there')
        assert again.n_added==35 and again.check_valid() and view.recent(3).ids.tolist()==[32, 33, 34]
        assert view.path==tmp_path/'here'/'m' and view.dropped([15, 16]).tolist()==[True, False]


def test_pipes_and_shards_with_a_relative_path(tmp_path, monkeypatch):
    for name in ('here', 'there'): (tmp_path/name).mkdir()
    monkeypatch.chdir(tmp_path/'here')
    replay = ExperienceReplay(steps(30), bs=4, max_sz=20, min_sz=8, path='pipe')
    shards = RayMemory(2, 20, place='here', path='shards')
    next(iter(replay))
    os.chdir(tmp_path/'there')
    for k in range(0, 30, 5): shards.extend(steps(5, k))
    next(iter(replay))
    replay.save(tmp_path/'saved')
    replay.memory.close()
    shards.close()
    assert not os.listdir(tmp_path/'there')
    os.chdir(tmp_path/'here')
    again = RayMemory(2, 20, place='here', path='shards')
    assert again.n_added==30 and again.check_valid()
    again.close()


# --- opening and closing ----------------------------------------------------------------------------------------------
def test_a_lock_whose_number_cannot_be_written_is_released(tmp_path, monkeypatch):
    real, failing = os.ftruncate, [True]
    def ftruncate(fd, n):
        if failing: raise OSError(28, 'No space left on device')
        return real(fd, n)
    monkeypatch.setattr(mapped.os, 'ftruncate', ftruncate)
    with pytest.raises(OSError, match=WORDS['a full disk']) as error: mapped._lock_file(tmp_path)
    code = f'import fcntl; fcntl.flock(open({str(tmp_path/"lock")!r}), fcntl.LOCK_EX | fcntl.LOCK_NB)'
    subprocess.run([sys.executable, '-c', code], check=True)             # while the error, and all that it refers to, is alive
    with pytest.raises(OSError, match=WORDS['a full disk']): ReplayMemory(20, path=tmp_path/'m')
    failing.clear()
    filled(path=tmp_path/'m').close()
    assert error.value.errno==28


# --- forged and old ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('forged', [3, 'state', {'state': 'x'}, {'state': []}, {'state': [None]}, {'state': [0, 10**9]}, [1], {'state': {'a': 1}}])
def test_forged_windows_name_the_file(forged, tmp_path):
    filled(path=tmp_path/'m', windows={'state': (-1, 0)}).close()
    path = tmp_path/'m'/'memory.json'
    path.write_bytes(manifest_bytes(read_manifest(path) | dict(windows=forged)))
    for open_it in (lambda: ReplayMemory.open(tmp_path/'m'), lambda: ReplayMemory(20, path=tmp_path/'m'), lambda: ReplayMemory(20, path=tmp_path/'m', windows={'state': (0, 1)})):
        with pytest.raises(CheckpointError, match=WORDS['forged windows']): open_it()


def test_an_older_state_in_a_closed_folder_is_noticed(tmp_path):
    with filled(path=tmp_path/'m') as memory:
        memory.flush()
        shutil.copytree(tmp_path/'m'/'state', tmp_path/'older')
        memory.sample(5)
        memory.n_stale = 7
    newer = (tmp_path/'m'/'state'/'manifest.json').read_bytes()
    shutil.copytree(tmp_path/'older', tmp_path/'m'/'state', dirs_exist_ok=True)
    before = files_in(tmp_path/'m')
    with pytest.raises(CheckpointError, match=words('a damaged file', name='manifest.json')): ReplayMemory.open(tmp_path/'m')
    assert files_in(tmp_path/'m')==before
    (tmp_path/'m'/'state'/'manifest.json').unlink()
    with pytest.raises(CheckpointError, match=words('a file is missing', name='manifest.json')): ReplayMemory.open(tmp_path/'m')
    (tmp_path/'m'/'state'/'manifest.json').write_bytes(newer)
    with ReplayMemory.open(tmp_path/'m') as again: assert again.n_stale==7 and again.check_valid()


@pytest.mark.parametrize('on_disk', [False, True])
@pytest.mark.parametrize('wrong, what', [(lambda a: a[:-1], 'shape (536,)'), (lambda a: a.reshape(2, -1), 'shape (536,)'), (lambda a: a.astype(float), 'whole numbers'),
                                         (lambda a: -1 - a, 'below no draws'), (lambda a: 'counts', 'numbers (bool, int, float, complex)'), (lambda a: np.append(a, 0), 'shape (536,)')],
                         ids=['short', 'shape', 'floats', 'negative', 'text', 'long'])
def test_wrong_draws_change_nothing(wrong, what, on_disk, tmp_path):
    first = filled(max_draws=3)
    first.sample(6)
    state, rows = first.saved()
    here = filled(25, max_draws=3, **dict(path=tmp_path/'m') if on_disk else {})
    here.sample(4)
    before = seen(here.state_dict())
    with about(what if what in WORDS else ('state: drawn', what, None), (TypeError, ValueError)): here.restore(state | dict(drawn=wrong(state['drawn'])), rows.pieces())
    assert seen(here.state_dict())==before and here.check_valid()
    here.restore(state, rows.pieces())
    assert seen(here.state_dict())==seen(first.state_dict())


# --- what belongs to it -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize('how', [copy.deepcopy, copy.copy, lambda o: pickle.loads(pickle.dumps(o))], ids=['deepcopy', 'copy', 'pickle'])
def test_also_is_copied(how, tmp_path):
    also = dict(epoch=3, weights=np.arange(3.))
    for memory in filled(), MixedMemory([filled(), filled()], seed=0):
        memory.save(tmp_path/type(memory).__name__, also=also)
        loaded = type(memory).load(tmp_path/type(memory).__name__)
        made = how(loaded)
        assert seen(made.also)==seen(also) and made.also['weights'] is not loaded.also['weights']
        assert how(memory).also is None


# --- draws and insertions, counted from one moment --------------------------------------------------------------------
def by_folder(memory, folder):
    memory.save(folder)
    return ReplayMemory.load(folder)
def by_dict(memory, folder):
    made = ReplayMemory(memory.max_sz, max_draws=memory.max_draws)
    made.load_state_dict(memory.state_dict())
    return made
def by_reopening(memory, folder):
    memory.close()
    return ReplayMemory.open(memory.path)
def by_pickle(memory, folder): return pickle.loads(pickle.dumps(memory))
def by_copy(memory, folder): return copy.deepcopy(memory)

@pytest.mark.parametrize('way', [by_folder, by_dict, by_reopening, by_pickle, by_copy])
@pytest.mark.parametrize('max_draws', [None, 50])
def test_samples_per_insert_goes_on_through_a_load(way, max_draws, tmp_path):
    path = dict(path=tmp_path/'m') if way is by_reopening else {}
    memory, drawn, n = ReplayMemory(100, seed=0, max_draws=max_draws, **path), 0, 0
    for life in range(3):
        memory.extend(steps(50, n))
        n += 50
        for _ in range(5):
            memory.sample(20)
            drawn += 20
        used = memory.usage()
        assert used['n_drawn']==drawn and used['samples_per_insert']==drawn/n==2
        memory = way(memory, tmp_path/f'life {life}')
        used = memory.usage()
        assert (used['n_drawn'], used['samples_per_insert'])==(drawn, 2) and memory.check_valid()
    memory.close()


@pytest.mark.parametrize('max_draws', [None, 50])
def test_of_an_older_save_both_count_from_the_load(max_draws):
    memory = ReplayMemory(100, seed=0, max_draws=max_draws)
    memory.extend(steps(50))
    for _ in range(10): memory.sample(20)
    state = memory.state_dict()
    del state['memory']['usage']
    again = ReplayMemory(100, max_draws=max_draws)
    again.load_state_dict(state)
    assert again.usage()['n_drawn']==0 and np.isnan(again.usage()['samples_per_insert'])
    again.extend(steps(10, 50))
    again.sample(20)
    assert again.usage()['samples_per_insert']==2


def test_rows_whose_draws_are_not_known_do_not_count(tmp_path):
    "After a kill the draws are those of the last flush; so are the rows that they are compared with"
    memory = filled(20, path=tmp_path/'m')
    for _ in range(10): memory.sample(4)
    memory.flush()
    memory.extend(steps(500, 20))
    memory.sample(4)
    shutil.copytree(tmp_path/'m', tmp_path/'killed')
    memory.close()
    with ReplayMemory.open(tmp_path/'killed') as again: assert again.usage()['samples_per_insert']==2 and again.n_added==520
