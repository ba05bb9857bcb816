"TensorDicts go into a memory and come out as they were, in TorchRL's layout, and TorchRL's own classes accept the buffer"
import copy, pickle, subprocess, sys, threading

import numpy as np
import pytest
import torch

pytest.importorskip('tensordict', reason='TensorDicts are tested where tensordict is installed')
from tensordict import TensorDict

from fastrl_replay.interop.torchrl import ReplayBuffer, as_tensordict
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.offline import by_episodes
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.steps import Transition
from refusals import refused
from words import WORDS, words


def transitions(rng, *shape, nested=False):
    "Random transitions of this batch size"
    def flags(): return torch.from_numpy(rng.random((*shape, 1)) < .2)
    def seen(): return torch.from_numpy(rng.random((*shape, 3), dtype=np.float32))
    after = dict(observation=seen(), reward=seen()[..., :1], done=flags(), terminated=flags(), truncated=flags())
    data = dict(observation=seen(), action=torch.from_numpy(rng.integers(0, 2, shape)), done=flags(), terminated=flags(),
                truncated=flags(), next=after)
    if nested:
        data |= dict(agents=dict(a=dict(x=seen()), y=flags()), hidden=seen().to(torch.bfloat16))
        after['agents'] = dict(a=dict(x=seen()), reward=seen())
    return TensorDict(data, shape)


def same(a, b):
    "Do two TensorDicts hold the same entries, values and dtypes?"
    keys = sorted(a.keys(True, True), key=str)
    return keys == sorted(b.keys(True, True), key=str) and a.shape == b.shape and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and torch.equal(a[k], b[k]) for k in keys)


@pytest.mark.parametrize('nested', [False, True])
def test_a_thousand_operations_beside_a_list(nested):
    rng, max_sz = np.random.default_rng(0), 97
    buffer, twin = ReplayBuffer(max_sz, sampler=Proportional(), seed=0), []
    for _ in range(500):
        shape = [(), (int(rng.integers(1, 9)),), (int(rng.integers(1, 4)), int(rng.integers(1, 5)))][rng.integers(3)]
        data = transitions(rng, *shape, nested=nested)
        before = data.clone()
        ids = buffer.extend(data) if shape else [buffer.add(data)]
        assert same(data, before), 'what was given stays as it was'
        assert list(ids) == list(range(len(twin), len(twin) + max(1, data.numel())))
        twin += data.reshape(-1).unbind(0) if shape else [data]
        found = buffer.sample(int(rng.integers(1, 20)))
        index = found['index']
        assert (index >= max(0, len(twin) - max_sz)).all()
        drawn = ['index', '_weight', 'priority_weight']
        assert same(found.exclude(*drawn), torch.stack([twin[i] for i in index]))
        assert torch.equal(found['_weight'], found['priority_weight']) and found['_weight'].max() == 1
        found['td_error'] = torch.from_numpy(rng.random((len(found), 1)))
        assert buffer.update_tensordict_priority(found) == len(index.unique())
        assert buffer.memory.check_valid() and len(buffer) == min(max_sz, len(twin)) and buffer.write_count == len(twin)
    assert same(buffer[index].exclude('index'), torch.stack([twin[i] for i in index]))


def test_layout_is_that_of_torchrl():
    data = transitions(np.random.default_rng(0), 64)
    buffer = ReplayBuffer(100, batch_size=32, seed=0)
    buffer.extend(data)
    found, info = buffer.sample(return_info=True)
    assert found.batch_size == (32,) and found['next'].batch_size == (32,)
    for k in 'reward', 'done', 'terminated', 'truncated': assert found['next', k].shape == (32, 1)
    assert info.keys() == {'index', '_weight', 'priority_weight'} and torch.equal(found['index'], info['index'])
    assert same(data[found['index']], found.exclude(*info))
    assert {'reward', 'terminated', 'truncated', 'next_observation'} <= set(buffer.memory.layout.fields)
    assert buffer.memory[0].reward.shape == ()


def test_the_largest_error_of_a_row_becomes_its_priority():
    buffer = ReplayBuffer(8, sampler=Proportional(alpha=1., eps=0.), seed=0)
    data = transitions(np.random.default_rng(0), 4)
    data['td_error'] = torch.tensor([[1., -2.], [3., 0.], [.5, .5], [0., -4.]])
    buffer.extend(data)
    assert buffer.sampler.priorities.tolist() == [2., 3., .5, 4.]
    assert 'td_error' not in buffer.sample(3).keys()
    buffer.extend(data, update_priority=False)
    assert buffer.sampler.priorities[4:].tolist() == [4.]*4
    late = buffer.sample(4).set('td_error', torch.ones(4))
    late['index'][:] = torch.arange(4)
    buffer.extend(data.exclude('td_error'))
    assert buffer.update_tensordict_priority(late) == 0 and buffer.memory.n_stale == 4
    with pytest.raises(KeyError): buffer.update_tensordict_priority(buffer.sample(4))
    assert ReplayBuffer(8).update_tensordict_priority(late) == 0


def test_streams_follow_trajectories_or_the_last_dimension():
    rng = np.random.default_rng(0)
    def nexts(data, n, **kw):
        buffer = ReplayBuffer(50)
        buffer.extend(data, **kw)
        return buffer.memory.next(range(n)).tolist()
    assert nexts(transitions(rng, 4), 4) == [1, 2, 3, -1]
    assert nexts(transitions(rng, 2, 3), 6) == [1, 2, -1, 4, 5, -1]
    assert nexts(transitions(rng, 4), 4, streams=np.array([0, 1, 0, 1])) == [2, 3, -1, -1]
    data = transitions(rng, 4)
    data['collector'] = TensorDict(dict(traj_ids=torch.tensor([5, 7, 5, 7])), [4])
    assert nexts(data, 4) == [2, 3, -1, -1]
    buffer = ReplayBuffer(50)
    for _ in range(2): buffer.add(transitions(rng, 3))
    assert buffer.memory.next(range(6)).tolist() == [3, 4, 5, -1, -1, -1]


@pytest.mark.parametrize('entry', ['a__b', '_own', 'two words', 'class', ('before', 'next_thing'), ('before', 'reward')])
def test_entries_that_could_not_be_read_backwards_are_refused(entry):
    buffer = ReplayBuffer(8)
    data = transitions(np.random.default_rng(0), 4)
    with pytest.raises(ValueError): buffer.extend(data.clone().set(entry, torch.zeros(4)))
    assert len(buffer) == 0 and len(buffer.extend(data)) == 4
    with refused('step', TypeError): buffer.extend(data.exclude('action'))
    with refused('observation', got='(4, 2)'): buffer.extend(data.clone().set('observation', torch.zeros(4, 2)))
    with refused('data', TypeError): buffer.extend({'observation': torch.zeros(4)})
    with refused('batch_size', got='None'): buffer.sample()
    assert len(buffer) == 4 and buffer.memory.check_valid() and len(buffer.extend(data[:0])) == 0


@pytest.mark.parametrize('key', ['next_thing', 'next_next_thing', 'next_', ('next_info', 'x'), ('next_info', 'reward'), ('next', 'next_thing'),
                                 ('next', 'next'), ('next', 'info', 'next_x'), ('info', 'next_x')])
def test_keys_that_begin_with_next_come_out_as_they_were(key):
    data = transitions(np.random.default_rng(0), 6)
    data[key], data['next', 'thing'] = torch.rand(6, 2), torch.rand(6)
    buffer = ReplayBuffer(6)
    buffer.extend(data)
    assert same(buffer[:].exclude('index'), data)
    assert len(set(buffer.memory.layout.fields)) == len(list(data.keys(True, True)))


def filled(max_sz, n, **options):
    "A buffer with the first `n` of these transitions, and a list of them"
    data = transitions(np.random.default_rng(0), n)
    buffer = ReplayBuffer(max_sz, **options)
    for k in range(0, n, 5): buffer.extend(data[k:k + 5])
    return buffer, data


@pytest.mark.parametrize('n', [7, 20, 33])
def test_rows_by_number_slice_mask_ids_and_key(n):
    buffer, data = filled(20, n)
    size = min(n, 20)
    slots = sorted(range(n - size, n), key=lambda k: k % 20)            # the id in each slot
    assert same(buffer[:].exclude('index'), data[slots]) and buffer[:]['index'].tolist() == slots
    for k in (0, 2, size - 1, -1, -size, np.int64(3)):
        row = buffer[k]
        assert row.batch_size == () and row['index'] == slots[k] and same(row.exclude('index'), data[slots[k]])
    for k in (slice(2, 5), slice(None, None, -2), slice(-3, None)): assert same(buffer[k].exclude('index'), data[slots[k]])
    mask = np.random.default_rng(1).random(size) < .5
    for k in (mask, torch.from_numpy(mask), mask.tolist()): assert same(buffer[k].exclude('index'), data[torch.tensor(slots)[mask]])
    assert len(buffer[np.zeros(size, bool)]) == 0
    ids = [slots[1], slots[0], slots[1]]
    for k in (ids, np.array(ids), torch.tensor(ids)): assert same(buffer[k].exclude('index'), data[ids])
    assert same(buffer[torch.tensor(slots[1])].exclude('index'), data[slots[1]])
    assert torch.equal(buffer['observation'], data['observation'][slots])
    assert torch.equal(buffer['next', 'reward'], data['next', 'reward'][slots])
    for k in (size, -size - 1):
        with pytest.raises(IndexError, match=words('slots of a buffer', n=size)): buffer[k]
    with refused('mask', IndexError, expected=f'{size} values, one for each filled slot'): buffer[np.ones(size + 1, bool)]
    with pytest.raises(KeyError): buffer['nothing']


def test_storage_has_tensordicts():
    buffer, data = filled(20, 33)
    slots = sorted(range(13, 33), key=lambda k: k % 20)
    rows = list(buffer.storage)
    assert len(rows) == len(buffer.storage) == 20 and buffer.storage.max_size == 20
    assert same(torch.stack(rows).exclude('index'), data[slots])
    assert same(buffer.storage[3], buffer[3]) and same(buffer.storage.get(slice(2, 4)), buffer[2:4])
    buffer.append_transform(lambda td: td.set('action', td['action'] + 7))
    assert same(buffer.storage[:].exclude('index'), data[slots]), 'what is stored is not transformed'


@pytest.mark.parametrize('sampler', [None, Proportional(alpha=1., beta=.5)])
def test_an_emptied_buffer_is_like_a_new_one_that_draws_on(sampler):
    buffer, data = filled(20, 33, sampler=sampler, seed=3, batch_size=8)
    n_batches = 5
    for _ in range(n_batches): buffer.update_tensordict_priority(buffer.sample().set('td_error', torch.full((8,), 9.)))
    rng = buffer.memory.rng.get_state()
    buffer.empty()
    assert (len(buffer), buffer.write_count) == (0, 0) and list(buffer.storage) == [] and buffer.memory.check_valid()
    with pytest.raises(ValueError, match=WORDS['all is gone']): buffer.sample()
    assert buffer.memory.rng.get_state() == rng and buffer.sampler.n_batches == n_batches
    assert buffer.extend(data[:10]).tolist() == list(range(33, 43)) and buffer.write_count == 10
    if sampler is not None: assert buffer.sampler.largest > 9 and buffer.sampler.alpha == 1. and buffer.update_priority([32], 1.) == 0
    assert same(torch.stack(sorted(buffer.storage, key=lambda o: int(o['index']))).exclude('index'), data[:10]) and buffer.memory.check_valid()
    assert (buffer.sample()['index'] >= 33).all() and [int(buffer[k]['index']) for k in range(10)] == [40, 41, 42, *range(33, 40)]
    assert buffer[torch.arange(10) < 4]['index'].tolist() == [40, 41, 42, 33]
    buffer.empty(empty_write_count=False)
    buffer.empty(empty_write_count=False)
    assert len(buffer.extend(data)) == 33 and len(buffer) == 20 and buffer.write_count == 43


def test_a_buffer_on_disk_is_emptied_too(tmp_path):
    buffer, data = filled(20, 8, path=tmp_path/'kept')
    buffer.empty()
    assert len(buffer) == 0 and buffer.extend(data[:3]).tolist() == [8, 9, 10]
    buffer.memory.close()
    again = ReplayBuffer(20, path=tmp_path/'kept')
    assert len(again) == 3 and again.memory.first_id == 8 and again.memory.check_valid()
    again.memory.close()


def test_a_priority_of_one_number_and_of_a_tensordict():
    buffer, _ = filled(20, 8, sampler=Proportional(alpha=1., eps=0.), seed=0)
    assert buffer.update_priority([1, 2], 3.) == 2 and buffer.update_priority(torch.tensor(4), torch.tensor([7.])) == 1
    assert buffer.sampler.priorities[:8].tolist() == [1., 3., 3., 1., 7., 1., 1., 1.]
    drawn = buffer.sample(4).set('td_error', torch.arange(1., 5.))
    drawn['index'][:] = torch.tensor([0, 1, 2, 3])
    assert buffer.update_priority(drawn) == 4
    assert buffer.sampler.priorities[:4].tolist() == [1., 2., 3., 4.]
    with refused('priority', TypeError, got='None'): buffer.update_priority([1, 2])


class Scaled(torch.nn.Module):
    "Doubles observations where they are read, and halves them where they are written"
    def forward(self, data): return data.set('observation', data['observation']*2)
    def inv(self, data): return data.clone(False).set('observation', data['observation']/2)


def test_transforms_apply_to_what_is_read_and_their_inverses_to_what_is_written():
    buffer, data = filled(20, 10, transform=Scaled())
    assert torch.equal(buffer.storage[:]['observation'], data['observation']/2)
    drawn = buffer.sample(8)
    assert torch.equal(drawn['observation'], data['observation'][drawn['index']])
    assert buffer.append_transform(lambda td: td.set('seen', torch.full(td.shape, 'index' in td.keys()))) is buffer
    buffer.append_transform(lambda td: td.set('action', td['action'] + 100), invert=True)         # only on what is written
    assert buffer.add(data[0]) == 10 and torch.equal(buffer[10]['action'], data['action'][0] + 100)
    assert same(buffer[10].select('observation'), data[0].select('observation'))
    assert not buffer.sample(3)['seen'].any(), 'transforms see what was stored'
    assert 'index' in buffer.sample(3).keys() and 'priority_weight' in buffer.sample(3).keys()
    buffer.append_transform(lambda td: None, invert=True)
    assert len(buffer.extend(data)) == 0 and len(buffer) == 11, 'a transform that keeps what it gets'
    with refused('transform', TypeError, got="'double'"): buffer.append_transform('double')


def test_transforms_of_torchrl():
    pytest.importorskip('torchrl', reason='TorchRL is not installed')
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.envs.transforms import Compose, DoubleToFloat, RenameTransform, RewardScaling
    made = [lambda: Compose(DoubleToFloat(in_keys=['observation'], in_keys_inv=['observation']), RewardScaling(1., 3., in_keys=[('next', 'reward')])),
            lambda: RenameTransform(in_keys=['observation', ('next', 'observation')], out_keys=['seen', ('next', 'seen')])]
    data = transitions(np.random.default_rng(0), 12)
    for make in made:
        ours, theirs = ReplayBuffer(20, transform=make()), TensorDictReplayBuffer(storage=LazyTensorStorage(20), transform=make())
        for o in (ours, theirs): o.extend(data.clone())
        assert same(ours[:].exclude('index'), theirs[:].exclude('index'))
        assert set(ours.sample(4).exclude('_weight', 'priority_weight').keys(True, True)) == set(theirs.sample(4).keys(True, True))


@pytest.mark.parametrize('sampler', [None, Proportional()])
def test_prefetched_batches_are_those_drawn_by_the_caller(sampler):
    buffer, data = filled(20, 20, sampler=copy.deepcopy(sampler), seed=1, batch_size=6, prefetch=3)
    twin = filled(20, 20, sampler=copy.deepcopy(sampler), seed=1, batch_size=6)[0]
    for _ in range(30): assert same(buffer.sample(), twin.sample())
    again = pickle.loads(pickle.dumps(buffer))
    found = again.sample()
    assert same(found.exclude('index', '_weight', 'priority_weight'), data[found['index']])
    assert len(buffer.sample(7)) == 7 and len(buffer.sample()) == 6, 'another size is drawn when it is asked for'
    buffer.empty()
    with pytest.raises(ValueError, match=WORDS['all is gone']): buffer.sample()
    buffer.extend(data[:4])
    assert (buffer.sample()['index'] >= 20).all(), 'nothing drawn before'
    with refused('batch_size', got='None'): ReplayBuffer(20, prefetch=2)
    with refused('prefetch', got='-1'): ReplayBuffer(20, batch_size=2, prefetch=-1)


def test_transforms_run_in_the_thread_that_prefetches():
    names = []
    def named(td):
        names.append(threading.current_thread().name)
        return td
    buffer, _ = filled(20, 20, batch_size=4, prefetch=2, transform=named)
    for _ in range(5): buffer.sample()
    buffer[:]
    assert len(names) > 5 and names.count(threading.current_thread().name) == 1, 'only what was read directly'
    def fails(td): raise KeyError('no such entry')
    buffer, _ = filled(20, 20, batch_size=4, prefetch=2, transform=fails)
    for _ in range(4):
        with pytest.raises(KeyError, match='no such entry'): buffer.sample()


def test_batches_are_pinned_where_there_is_a_device(monkeypatch):
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match=WORDS['no CUDA']): buffer, _ = filled(20, 20, pin_memory=True)
        assert len(buffer.sample(4)) == 4
    pinned = []
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(TensorDict, 'pin_memory', lambda self: pinned.append(self) or self)
    buffer, _ = filled(20, 20, pin_memory=True, batch_size=4)
    found = buffer.sample()
    assert any(o is found for o in pinned) and 'index' in found.keys()
    assert buffer[3] is pinned[-1]


def test_saved_and_continued(tmp_path):
    data = transitions(np.random.default_rng(0), 30, nested=True)
    buffer, again, third = (ReplayBuffer(20, batch_size=8, sampler=Proportional(), seed=0) for _ in range(3))
    buffer.extend(data)
    buffer.dumps(tmp_path/'saved')
    again.load_state_dict(buffer.state_dict())
    third.loads(tmp_path/'saved')
    drawn = buffer.sample()
    assert same(again.sample(), drawn) and same(third.sample(), drawn)


def test_large_observations_are_stored_once():
    buffer, n = ReplayBuffer(1000), 200
    frames = torch.randint(255, (n + 1, 1, 64, 64), dtype=torch.uint8)
    buffer.extend(TensorDict(dict(pixels=frames[:-1], next=dict(pixels=frames[1:], reward=torch.zeros(n, 1))), [n]))
    assert 'each stored once' in repr(buffer.memory)
    found = buffer.sample(64)
    assert torch.equal(found['next', 'pixels'], frames[found['index'] + 1])


def test_a_memory_takes_a_tensordict_of_its_fields():
    rng = np.random.default_rng(0)
    step = Transition(rng.random((5, 3), np.float32), np.arange(5), np.ones(5, np.float32), rng.random((5, 3), np.float32),
                      np.zeros(5, bool), np.ones(5, bool))
    memory, twin = ReplayMemory(20), ReplayMemory(20)
    data = TensorDict({k: torch.from_numpy(v) for k, v in step._asdict().items()}, [5])
    assert memory.extend(data).tolist() == twin.extend(step).tolist()
    assert memory.extend(memory.sample(4).as_tensordict(), streams='one').tolist() == [5, 6, 7, 8]
    for name in step._fields: assert torch.equal(getattr(memory[:5], name), getattr(twin[:5], name))
    with refused('chunk', TypeError): memory.extend(data.exclude('action'))
    assert len(memory) == 9 and memory.check_valid()


def test_without_tensordict_one_error_says_what_to_install():
    code = 'import sys; sys.modules["tensordict"] = None; import fastrl_replay.interop.torchrl'
    ran = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert ran.returncode and 'ModuleNotFoundError: TensorDicts need' in ran.stderr and "pip install -e '.[torchrl]'" in ran.stderr


def test_torchrl_trains_with_it():
    "A collector writes into it, a trainer's hooks read from it, and its loss sends priorities back"
    pytest.importorskip('torchrl', reason='TorchRL is not installed')
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv
    from torchrl.modules import QValueActor
    from torchrl.objectives import DQNLoss
    from torchrl.trainers.trainers import ReplayBufferTrainer
    torch.manual_seed(0)
    env = GymEnv('CartPole-v1', categorical_action_encoding=True)
    actor = QValueActor(torch.nn.Linear(4, 2), in_keys=['observation'], spec=env.action_spec)
    loss, buffer = DQNLoss(actor, action_space=env.action_spec), ReplayBuffer(500, 32, Proportional(), seed=0)
    collector = Collector(env, actor, frames_per_batch=50, total_frames=300, replay_buffer=buffer)
    for _ in collector: pass
    assert len(buffer) == 300 and len(by_episodes(buffer.memory)) > 3 and buffer.memory.check_valid()
    hook = ReplayBufferTrainer(buffer, batch_size=None, flatten_tensordicts=True, iterate=True)
    before = buffer.sampler.priorities
    for _ in range(3):
        data = hook.sample(None)
        loss(data)['loss'].backward()
        hook.update_priority(data)
    after = buffer.sampler.priorities
    assert data['td_error'].shape == (32, 1) and (before != after).sum() > 32
    hook.extend(buffer[torch.arange(10)].reshape(2, 5))
    assert buffer.write_count == 310
    again = ReplayBufferTrainer(ReplayBuffer(500, 32, Proportional(), seed=1))
    again.load_state_dict(hook.state_dict())
    assert again.replay_buffer.write_count == 310


def test_as_tensordict_of_a_fetched_batch():
    data = transitions(np.random.default_rng(0), 6)
    buffer = ReplayBuffer(6)
    buffer.extend(data)
    assert same(as_tensordict(buffer.memory.fetch([3, 1])), data[torch.tensor([3, 1])])
    assert same(buffer[:].exclude('index'), data)


def test_as_tensordict_stays_on_the_device():
    buffer = ReplayBuffer(6)
    buffer.extend(transitions(np.random.default_rng(0), 6))
    moved = as_tensordict(buffer.memory.recent(4).to('meta'))
    assert {v.device.type for v in moved.values(True, True)} == {'meta'}
    assert moved['next', 'reward'].shape == (4, 1)
