"Our buffers under Tianshou: rows, neighbours and n-step returns are those of its own buffers, and what it can't do is refused"
import copy, pickle

import gymnasium as gym
import numpy as np
import pytest
import torch

theirs = pytest.importorskip('tianshou.data', reason="needs Tianshou 2: pip install -e '.[tianshou]'")

from tianshou.algorithm import Algorithm
from tianshou.algorithm.algorithm_base import RandomActionPolicy
from tianshou.data import Batch, Collector
from tianshou.env import DummyVectorEnv

from fastrl_replay.all import Proportional, RankBased, Uniform
from fastrl_replay.interop import tianshou
from fastrl_replay.interop.tianshou import PrioritizedVectorReplayBuffer, VectorReplayBuffer
from refusals import about, refused
from words import WORDS, words

KEYS = 'obs', 'act', 'rew', 'terminated', 'truncated', 'done', 'obs_next'


def rows(rng, n, ended=.15, nested=False, **more):
    "A batch of one transition of each of `n` environments"
    def observations():
        flat = rng.random((n, 3)).astype(np.float32)
        return Batch(a=flat, b=Batch(c=rng.integers(9, size=n))) if nested else flat
    return Batch(obs=observations(), act=rng.integers(4, size=n), rew=rng.normal(size=n), terminated=rng.random(n) < ended,
                 truncated=rng.random(n) < ended/2, obs_next=observations(), info=Batch(), policy=Batch(), **more)


def pair(n, size, n_times, seed=0, **kw):
    "Tianshou's buffer and ours, filled alike, and the indices of the same rows in both, by environment and time"
    a, b = theirs.VectorReplayBuffer(size, n), VectorReplayBuffer(size, n)
    rng = np.random.default_rng(seed)
    for _ in range(n_times):
        batch = rows(rng, n, **kw)
        x, y = a.add(batch), b.add(batch)
        np.testing.assert_array_equal(x[1], y[1]), np.testing.assert_array_equal(x[2], y[2])
        np.testing.assert_array_equal([ours_of(a, i) for i in x[0]], y[0])
    return a, b


def ours_of(own, index):
    "The slot of our ring with the row that Tianshou's buffer has at `index`, if all environments were stepped together"
    each = own.maxsize//own.buffer_num
    return index % each*own.buffer_num + index//each


def same(a, b):
    "Equal values of equal types in Tianshou's batches"
    if isinstance(a, Batch):
        assert set(a.get_keys()) == set(b.get_keys())
        for k in a.get_keys(): same(a[k], b[k])
    else:
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_steps_have_the_fields_of_memories_on_disk_in_their_order():
    "In another order, a folder could not be opened again"
    fields = 'env_id', 'state', 'action', 'reward', 'rew', 'next_state', 'terminated', 'truncated'
    assert tuple(pair(1, 4, 1)[1].memory.layout.fields)==fields


SIZES = [(1, 20, 7), (1, 20, 20), (1, 20, 77), (4, 40, 9), (4, 40, 10), (4, 40, 111), (7, 70, 33)]


@pytest.mark.parametrize('n,size,n_times', SIZES)
@pytest.mark.parametrize('nested', [False, True])
def test_rows_and_neighbours_are_those_of_tianshou(n, size, n_times, nested):
    a, b = pair(n, size, n_times, nested=nested)
    i, j = a.sample_indices(0), b.sample_indices(0)
    np.testing.assert_array_equal(ours_of(a, i), j)
    for f in ('prev', 'next'):
        np.testing.assert_array_equal(ours_of(a, getattr(a, f)(i)), getattr(b, f)(j))
        assert getattr(b, f)(int(j[-1])) == getattr(b, f)(j)[-1]
    np.testing.assert_array_equal(ours_of(a, a.unfinished_index()), b.unfinished_index())
    for key in KEYS:
        same(a[:][key], b[:][key])
        same(a.get(i, key), b.get(j, key))
        same(a[i[:3]][key], b[j[:3]][key])
        assert getattr(a, key).shape == getattr(b, key).shape
        same(getattr(a, key)[i], getattr(b, key)[j])
    same(a[int(i[0])].obs, b[int(j[0])].obs)
    assert len(a) == len(b) and a.maxsize == b.maxsize and not b.hasnull() and b.memory.check_valid()
    assert len(b.sample(-1)[1]) == len(b.sample(-1)[0]) == 0
    batch, k = b.sample(50)
    same(batch, b[k])


@pytest.mark.parametrize('n,size,n_times', SIZES)
def test_returns_differ_by_nothing(n, size, n_times):
    a, b = pair(n, size, n_times)
    for n_step in (1, 2, 3, 10):
        for dtype in (torch.float32, torch.float64):
            def value(buffer, indices): return torch.from_numpy(buffer[indices].obs_next.sum(1)).to(dtype)
            x, y = (Algorithm.compute_nstep_return(o[:], o, o.sample_indices(0), value, .9, n_step).returns for o in (a, b))
            assert torch.equal(x, y)
    v = np.random.default_rng(1).normal(size=len(a))
    for x, y in zip(*(Algorithm.compute_episodic_return(o[:], o, o.sample_indices(0), v, v, .9, .8) for o in (a, b))):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize('seed', range(3))
def test_environments_out_of_step_follow_their_own_rows(seed):
    rng, n, size = np.random.default_rng(seed), 5, 60
    buffer, stored, running = VectorReplayBuffer(size, n), [], [[] for _ in range(n)]
    for t in range(300):
        envs = rng.permutation(n)[:rng.integers(1, n + 1)]
        batch = rows(rng, len(envs), .08)
        index, returns, lengths, starts = buffer.add(batch, envs)
        for k, env in enumerate(envs):
            running[env].append((t, env))
            stored.append(dict(key=(t, env), env=env, episode=running[env], rew=batch.rew[k], index=index[k]))
            ended = batch.terminated[k] or batch.truncated[k]
            living = {o['key']: o for o in stored[-size:]}
            if ended:
                kept = [living[o]['index'] for o in running[env] if o in living]
                assert lengths[k] == len(running[env])
                assert returns[k] == pytest.approx(sum(o['rew'] for o in stored if o['episode'] is running[env]))
                if len(envs) == k + 1:                     # else the next rows of this batch may overwrite its first
                    np.testing.assert_array_equal(buffer.get_buffer_indices(int(starts[k]), int(index[k]) + 1), kept)
                running[env] = []
            else: assert lengths[k] == returns[k] == 0
        if t % 20: continue
        for o in stored[-size:]:
            at = o['episode'].index(o['key'])
            before, after = o['episode'][at - 1:at], o['episode'][at + 1:at + 2]
            here = o['index']
            assert buffer.prev(here) == (living[before[0]]['index'] if before and before[0] in living else here)
            assert buffer.next(here) == (living[after[0]]['index'] if after else here)
            assert buffer[here].rew == o['rew']
        order = sorted(stored[-size:], key=lambda o: o['key'][::-1])
        np.testing.assert_array_equal(buffer.sample_indices(0), [o['index'] for o in order])
        last = [living[o[-1]]['index'] for o in running if o and o[-1] in living]
        np.testing.assert_array_equal(buffer.unfinished_index(), last)
    assert buffer.memory.check_valid()


def test_an_episode_longer_than_the_buffer_begins_at_its_first_stored_row():
    buffer, rng = VectorReplayBuffer(6, 1), np.random.default_rng(0)
    for t in range(20):
        batch = rows(rng, 1, 0.)
        batch.truncated[:] = t == 19
        index, _, lengths, starts = buffer.add(batch)
    assert lengths == [20]
    np.testing.assert_array_equal(buffer.get_buffer_indices(int(starts[0]), int(index[0]) + 1), np.arange(14, 20) % 6)
    with refused('start', got='4'): buffer.get_buffer_indices(4, 3)
    assert len(buffer.get_buffer_indices(3, 5)) == 2


def test_a_collector_finds_the_same_episodes():
    def collected(buffer):
        def cartpole(): return gym.make('CartPole-v1')
        envs = DummyVectorEnv([cartpole]*3)
        envs.seed(0)
        for k, space in enumerate(envs.action_space): space.seed(k)
        collector = Collector(RandomActionPolicy(envs.action_space[0]), envs, buffer, raise_on_nan_in_buffer=True)
        collector.reset()
        found = [collector.collect(n_step=31, random=True), collector.collect(n_episode=7, random=True)]
        return [(o.returns.tolist(), o.lens.tolist(), o.n_collected_steps) for o in found]
    assert collected(VectorReplayBuffer(3000, 3)) == collected(theirs.VectorReplayBuffer(3000, 3))


def test_frames_are_stored_once():
    buffer, rng = VectorReplayBuffer(40, 2), np.random.default_rng(0)
    video = rng.integers(0, 256, (60, 2, 84, 84), np.uint8)
    for t in range(50):
        batch = rows(rng, 2, 0.)
        batch.obs, batch.obs_next = (video[t + k:t + k + 4].swapaxes(0, 1) for k in (0, 1))
        buffer.add(batch)
    assert 'each stored once' in repr(buffer.memory) and buffer.memory.usage()['bytes_each'] < 2*84*84
    for k, stored in enumerate(buffer[:].obs_next):                 # the newest 20 times of both environments
        env, t = divmod(k, 20)
        np.testing.assert_array_equal(stored, video[t + 31:t + 35, env])


def test_on_disk_it_goes_on_with_new_episodes(tmp_path):
    buffer, rng = VectorReplayBuffer(40, 4, path=tmp_path/'a'), np.random.default_rng(0)
    for _ in range(25): buffer.add(rows(rng, 4, .1))
    before, running = buffer[:], buffer.unfinished_index()
    assert len(running)
    buffer.memory.close()
    with refused('buffer_num', got='2'): VectorReplayBuffer(40, 2, path=tmp_path/'a')
    again = VectorReplayBuffer(40, 4, path=tmp_path/'a')
    same(again[:].obs, before.obs), same(again[:].rew, before.rew)
    assert again.truncated[running].all() and not len(again.unfinished_index())
    new = again.add(rows(rng, 4, 0.))[0]
    np.testing.assert_array_equal(again.prev(new), new)
    np.testing.assert_array_equal(again.next(running), running)
    with refused('reset'): again.reset()
    assert len(again) == 40
    again.memory.close()
    empty = VectorReplayBuffer(40, 4, path=tmp_path/'b')
    empty.reset()
    empty.memory.close()


@pytest.mark.parametrize('made', [VectorReplayBuffer, PrioritizedVectorReplayBuffer])
def test_copies_go_on_alike(made, tmp_path):
    buffer, rng = made(40, 4), np.random.default_rng(0)
    for _ in range(17): buffer.add(rows(rng, 4))
    buffer.save_hdf5(str(tmp_path/'buffer.hdf5'))
    copies = [copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer)), made.load_hdf5(str(tmp_path/'buffer.hdf5'))]
    batch = rows(rng, 4)
    for o in [buffer, *copies]:
        o.added, o.drawn = o.add(batch), o.sample(64)
    for o in copies:
        for x, y in zip(o.added, buffer.added): np.testing.assert_array_equal(x, y)
        same(o.drawn[0], buffer.drawn[0])
        np.testing.assert_array_equal(o.unfinished_index(), buffer.unfinished_index())
        o.add(rows(rng, 4))
    assert buffer.memory.n_added == 72


def test_priorities_and_weights_are_those_of_tianshou():
    a = theirs.PrioritizedVectorReplayBuffer(40, 4, alpha=.6, beta=.4)
    b, rng = PrioritizedVectorReplayBuffer(40, 4, alpha=.6, beta=.4), np.random.default_rng(0)
    for _ in range(60):
        batch = rows(rng, 4)
        a.add(batch), b.add(batch)
        i = np.unique(rng.choice(a.sample_indices(0), 8))
        errors = rng.normal(size=len(i))*3
        a.update_weight(i, torch.from_numpy(errors)), b.update_weight(ours_of(a, i), torch.from_numpy(errors))
        i = a.sample_indices(0)
        np.testing.assert_allclose(b.memory.sampler.priorities[ours_of(a, i)]**.6, a.weight[i], rtol=1e-6)
    batch, j = b.sample(4000)
    expected = a.get_weight(j % 4*10 + j//4)
    np.testing.assert_allclose(batch.weight, expected/expected.max(), rtol=1e-5)
    p = b.memory.sampler.priorities**.6
    np.testing.assert_allclose(np.bincount(j, minlength=40)/4000, p/p.sum(), atol=4e-4)      # stratified
    b.set_beta(1.)
    batch, j = b.sample(64)
    np.testing.assert_allclose(batch.weight, p[j].min()/p[j], rtol=1e-5)
    assert not hasattr(VectorReplayBuffer(4, 1), 'update_weight')
    with refused('td_errors'): b.update_weight(j[:2], [1., np.nan])
    ranked = PrioritizedVectorReplayBuffer(40, 4, sampler=RankBased())
    ranked.add(rows(rng, 4))
    assert 'weight' in ranked.sample(4)[0].get_keys()


def test_info_and_policy_are_kept_where_they_are_named():
    names = 'info.TimeLimit.truncated', 'policy.hidden_state'
    buffer, rng = VectorReplayBuffer(20, 2, keep=names), np.random.default_rng(0)
    for t in range(3):
        batch = rows(rng, 2)
        batch.info = Batch({'TimeLimit.truncated': np.array([t == 1, False]), 'other': np.array(['a', 'b'])})
        batch.policy = Batch(hidden_state=Batch(h=np.full((2, 5), t, np.float32)))
        buffer.add(batch)
    assert buffer[2].info['TimeLimit.truncated'] and 'other' not in buffer[:].info.get_keys()
    np.testing.assert_array_equal(buffer.policy.hidden_state.h[:6, 0], [0, 0, 1, 1, 2, 2])
    with refused('keep'): buffer.add(rows(rng, 2))
    assert len(buffer) == 6
    for wrong in ('info', 'obs.a', 'TimeLimit.truncated'):
        with refused('keep'): VectorReplayBuffer(20, 2, keep=(wrong,))


def test_reset_empties_it_and_draws_go_on():
    buffer, rng = VectorReplayBuffer(20, 2), np.random.default_rng(0)
    for _ in range(5): buffer.add(rows(rng, 2, 0.))
    first = buffer.sample(10)[1]
    buffer.reset(keep_statistics=True)
    assert len(buffer) == len(buffer.sample_indices(0)) == len(buffer.unfinished_index()) == 0
    batch = rows(rng, 2, 0.)
    batch.terminated[:] = True
    assert buffer.add(batch)[2].tolist() == [6, 6]
    buffer.reset()
    for k in range(5): lengths = buffer.add(batch if k == 4 else rows(rng, 2, 0.))[2]
    assert lengths.tolist() == [5, 5] and (buffer.sample(10)[1] != first).any()


@pytest.mark.parametrize('option', [dict(stack_num=4), dict(ignore_obs_next=True), dict(save_only_last_obs=True), dict(sample_avail=True)])
def test_options_that_it_lacks_are_refused_by_name(option):
    (name, value), = option.items()
    with refused(name, got=str(value)): VectorReplayBuffer(20, 2, **option)
    VectorReplayBuffer(20, 2, **{name: type(value)(name == 'stack_num')})
    with refused('stack_num', got='2'): pair(1, 20, 3)[1].get([0], 'obs', stack_num=2)


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing():
    buffer, rng = pair(4, 40, 5)[1], np.random.default_rng(0)
    state = buffer[:], buffer.unfinished_index(), buffer._starts.copy(), buffer._lengths.copy()
    for ids, what in (([0, 1, 2, 2], 'buffer_ids'), ([0, 1], 'rew'), ([1, 2, 3, 4], ('buffer_ids', 'different numbers below 4', '[1, 2, 3, 4]'))):
        with about(what): buffer.add(rows(rng, 4), buffer_ids=ids)
    with refused('batch', got='no obs_next'): buffer.add(Batch({k: v for k, v in rows(rng, 4).items() if k != 'obs_next'}))
    several, other = rows(rng, 4), rows(rng, 4)
    several.rew, other.obs = np.ones((4, 2)), np.ones((4, 5), np.float32)
    with refused('rew', got='shape (4, 2)'): buffer.add(several)
    with refused('state', got='(4, 5)'): buffer.add(other)
    for name in ('set_batch', 'set_array_at_key', 'dropnull'):
        with refused(name, NotImplementedError): getattr(buffer, name)(other)
    with pytest.raises(NotImplementedError): buffer.update(buffer)
    for index in (20, [0, 20], np.array([-50])):
        with refused('index', IndexError): buffer[index]
    with pytest.raises(AttributeError, match=words('no such field', name='_meta')): buffer._meta
    with refused('sampler'): VectorReplayBuffer(40, 4, sampler=Proportional())
    with refused('sampler'): PrioritizedVectorReplayBuffer(40, 4, sampler=Uniform())
    for name, kw in (('total_size', dict(total_size=0, buffer_num=1)), ('buffer_num', dict(total_size=9, buffer_num=0))):
        with refused(name, got='0'): VectorReplayBuffer(**kw)
    same(buffer[:], state[0])
    for x, y in zip((buffer.unfinished_index(), buffer._starts, buffer._lengths), state[1:]): np.testing.assert_array_equal(x, y)
    with pytest.raises(ValueError, match=WORDS['it is empty']): VectorReplayBuffer(40, 4).sample(3)
    assert not hasattr(VectorReplayBuffer(40, 4), 'rew') and tianshou.__all__
