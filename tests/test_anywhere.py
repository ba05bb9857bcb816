"`sample_sequences`: where hardly any step begins a window, those that do are counted"
import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.steps import SimpleStep, Transition
from refusals import refused
from words import WORDS, words


def played(n, length, streams=1, **kw):
    "EpisodeIndex of `length` steps in streams that take turns"
    memory = ReplayMemory(n, **kw)
    memory.extend([SimpleStep(k, 0, k, k//streams % length==length - 1, False, 0., 0., k % streams, 0, k//streams % length, k//streams//length)
                   for k in range(n)])
    return memory


def likely(counts):
    "Are these the counts of equally likely outcomes: chi-square within five sigma of its mean?"
    want = counts.sum()/len(counts)
    return ((counts - want)**2/want).sum() < len(counts) + 5*(2*len(counts))**.5


@pytest.mark.parametrize('streams', [1, 3])
def test_windows_nearly_as_long_as_episodes(streams):
    "60 of 6,000 steps begin one, and each is drawn as often as any other, with every seed"
    counts = np.zeros(6000, np.int64)
    for seed in range(25):
        memory = played(6000, 200, streams, seed=seed)
        ids = memory.sample_sequences(32, 199).ids.numpy()
        assert (np.diff(ids)==streams).all()
        np.add.at(counts, ids[:, 0], 1)
    starts = np.flatnonzero(np.arange(6000)//streams % 200 < 2)
    assert not np.delete(counts, starts).any() and likely(counts[starts]) and counts.sum()==25*32


def test_the_only_window():
    memory = played(5000, 5000, seed=0)
    assert (memory.sample_sequences(7, 5000).ids.numpy()==np.arange(5000)).all()
    assert memory.sample_sequences(3, 4999).mask.all() and memory.sample_sequences(3, 4999).learn.all()
    with refused('length', got='5001'): memory.sample_sequences(1, 5001)


def test_none_is_an_error_that_says_so():
    memory = played(1000, 200, seed=0)
    with pytest.raises(ValueError, match=words('no window', length=201, n=1000)):
        memory.sample_sequences(2, 201)
    rng = memory.rng.get_state()
    with refused('length', got='1001'): memory.sample_sequences(2, 1001)
    assert memory.rng.get_state()==rng


def test_dropped_rows_are_in_no_window():
    "All but a few windows hold a dropped row"
    memory, counts = played(4000, 200, seed=0), np.zeros(4000, np.int64)
    memory.drop(np.arange(100, 4000, 150))
    kept = np.setdiff1d(np.arange(4000), np.arange(100, 4000, 150))
    wanted = [a for a in range(4000) if a % 200 <= 60 and np.isin(np.arange(a, a + 140), kept).all()]
    assert 0 < len(wanted) < 200
    for _ in range(300): np.add.at(counts, memory.sample_sequences(8, 140).ids[:, 0].numpy(), 1)
    assert not np.delete(counts, wanted).any() and likely(counts[wanted])


def test_after_overwriting_and_clearing():
    memory = ReplayMemory(300, seed=0)
    for k in range(1000): memory.add(Transition(k, 0, 0., k, k % 100==99, False))
    assert set(memory.sample_sequences(40, 100).ids[:, 0].tolist())=={700, 800, 900}
    memory.clear()
    with pytest.raises(ValueError, match=WORDS['all is gone']): memory.sample_sequences(1, 2)
    for k in range(1000, 1150): memory.add(Transition(k, 0, 0., k, k % 100==99, False))
    assert set(memory.sample_sequences(20, 100).ids[:, 0].tolist())=={1000}
