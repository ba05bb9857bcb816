"Minari data sets in and out of memories, beside loops over their episodes"
import os, sys
from collections import namedtuple
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest

minari = pytest.importorskip('minari', reason='minari is not installed')
from minari.data_collector import EpisodeBuffer

from fastrl_replay import cli
from fastrl_replay.all import Batch, GymStepper, NStep, Proportional, ReplayMemory, SimpleStep, Transition
from fastrl_replay.offline import by_episodes
from fastrl_replay.steps import tree_map
from refusals import about, refused
from words import words

pytestmark = pytest.mark.filterwarnings('ignore::UserWarning')      # Minari would like to know the author
BOX, EYE = gym.spaces.Box(-np.inf, np.inf, (3,)), gym.spaces.Box(0, 255, (40, 33), np.uint8)
SPACES = dict(
    box=(BOX, gym.spaces.Discrete(4)),
    number=(gym.spaces.Discrete(500), gym.spaces.Box(-1, 1, (2,), np.float64)),
    image=(EYE, gym.spaces.Discrete(2, start=3)),
    nested=(gym.spaces.Dict(arm=BOX, eyes=gym.spaces.Tuple([EYE, gym.spaces.Dict(n=gym.spaces.Discrete(7))])), gym.spaces.Dict(a=BOX, b=gym.spaces.MultiDiscrete([3, 4]))),
    bits=(gym.spaces.MultiBinary(5), gym.spaces.Tuple([gym.spaces.Discrete(3), BOX])))


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv('MINARI_DATASETS_PATH', str(tmp_path/'sets'))
    return tmp_path


def stacked(values): return tree_map(lambda *a: np.stack(a), *values)


def recorded(kind, lengths, seed=0, flags='right', name='test/set-v0'):
    "A data set of episodes of random values; `flags`: at the ends, at none, or at both"
    rng, (states, actions), episodes = np.random.default_rng(seed), SPACES[kind], []
    for space in (states, actions): space.seed(seed)
    for n in lengths:
        cut, last = rng.random() < .5, np.arange(n)==n - 1
        ends = dict(right=(last & ~cut, last & cut), none=(last & False, last & False), both=(last, last))[flags]
        episodes.append(EpisodeBuffer(observations=stacked([states.sample() for _ in range(n + 1)]), actions=stacked([actions.sample() for _ in range(n)]),
                                      rewards=rng.random(n).astype(np.float32), terminations=ends[0], truncations=ends[1]))
    return minari.create_dataset_from_buffers(name, episodes, observation_space=states, action_space=actions, jpeg_encoding=False)


def twin(dataset, step_type=Transition):
    "Its transitions, one after the other"
    found = []
    for k, e in enumerate(dataset):
        for t in range(len(e.rewards)):
            def at(v, t): return tree_map(lambda a: a[t], v)
            known = dict(state=at(e.observations, t), next_state=at(e.observations, t + 1), action=at(e.actions, t), reward=e.rewards[t],
                         terminated=e.terminations[t], truncated=e.truncations[t], total_reward=np.float32(e.rewards[:t + 1].astype(float).sum()),
                         env_id=0, proc_id=0, step_n=t, episode_n=k)
            found.append((k, step_type(**{f: known[f] for f in step_type._fields})))
    return found


def equal(a, b):
    try: np.testing.assert_equal(a, b)
    except AssertionError: return False
    return True


def same_episodes(one, two):
    assert one.total_steps == two.total_steps
    for a, b in zip(one, two):
        for name in ('observations', 'actions', 'rewards', 'terminations', 'truncations'):
            np.testing.assert_equal(getattr(a, name), getattr(b, name))


# ---- in

class Marked(NamedTuple):
    "A step of a loop in which a person may intervene, with what a recording doesn't know"
    state: Any
    action: Any
    reward: float
    next_state: Any
    terminated: bool
    truncated: bool
    intervened: bool = False
    score: float = .5
    count: int = 3
    hidden: np.ndarray = np.ones(2, np.float16)
    parts: Any = {'a': 1., 'b': (np.int8(2), True)}


def test_fields_of_your_own_get_their_defaults():
    dataset = recorded('box', [4, 3])
    memory = ReplayMemory.from_minari(dataset, Marked)
    rows, plain = memory.fetch(np.arange(7)), ReplayMemory.from_minari(dataset).fetch(np.arange(7))
    assert all((getattr(rows, f)==getattr(plain, f)).all() for f in Transition._fields)
    assert (rows.score==.5).all() and (rows.count==3).all() and not rows.intervened.any() and (rows.hidden==1).all() and (rows.parts['b'][0]==2).all()
    one = Marked(np.zeros(3, np.float32), 0, 0., np.zeros(3, np.float32), False, False)
    for field in 'intervened', 'score', 'count', 'hidden', 'parts':                # as a step of that type has them
        assert memory.layout.select([field])==ReplayMemory(9, step=one).layout.select([field])
    memory.add(memory[0]._replace(intervened=True))
    bare = NamedTuple('Bare', [*((f, Any) for f in Transition._fields), ('intervened', bool)])
    with refused('step_type', got="'intervened'"): ReplayMemory.from_minari(dataset, bare)
    when = namedtuple('When', (*Transition._fields, 'when'), defaults=(None,))
    with refused('when', (TypeError, ValueError), got='NoneType None'): ReplayMemory.from_minari(dataset, when)


@pytest.mark.parametrize('kind', SPACES)
@pytest.mark.parametrize('step_type,flags', [(Transition, 'right'), (SimpleStep, 'none'), (SimpleStep, 'both')])
def test_rows_and_borders_are_those_of_the_set(kind, step_type, flags):
    dataset = recorded(kind, [1, 5, 2, 1, 9], flags=flags)
    memory, rows = ReplayMemory.from_minari('test/set-v0', step_type, seed=3), twin(dataset, step_type)
    assert len(memory) == memory.max_sz == len(rows) == 18 and memory.check_valid() and memory.layout.step_type is step_type
    stored = memory.recent(18)
    for k in range(18): np.testing.assert_equal(stored[k]._asdict(), rows[k][1]._asdict())
    for k, (episode, _) in enumerate(rows): assert [rows[i][0] for i in memory.episode_ids(k)] == [episode]*[1, 5, 2, 1, 9][episode]
    whole = [1, 5, 2, 1, 9] if step_type is SimpleStep else [5, 2, 1, 9]       # without step_n, the first has nothing before it
    if flags != 'none': assert [len(o) for o in memory.episodes()] == whole


def test_the_newest_rows_survive_and_options_are_the_memorys(place):
    dataset = recorded('box', [30, 30, 7])
    memory = ReplayMemory.from_minari(dataset, max_sz=20, sampler=Proportional(), path=place/'m', seed=1)
    assert (len(memory), memory.n_added, memory.sampler.prioritized) == (20, 67, True)
    for row, (_, step) in zip(memory.recent(20), twin(dataset)[-20:]): np.testing.assert_equal(row, step)
    memory.close()
    with ReplayMemory.open(place/'m') as again: assert len(again) == 20


def test_what_is_added_later_is_another_episode():
    memory = ReplayMemory.from_minari(recorded('number', [3], flags='none'), max_sz=10)
    memory.add(Transition(1, np.zeros(2), 1., 2, False, False))
    assert memory.previous([3]).tolist() == [-1]


def test_a_part_of_a_set(place):
    dataset = recorded('box', [4, 6, 2])
    assert len(ReplayMemory.from_minari(dataset.filter_episodes(lambda e: len(e.rewards) > 3))) == 10


def test_many_rows_in_one_pass():
    states = np.arange(50*2001*3, dtype=np.float32).reshape(50, 2001, 3)
    flags = np.arange(2000)==1999
    buffers = [EpisodeBuffer(observations=o, actions=np.arange(2000), rewards=np.ones(2000), terminations=flags, truncations=flags & False) for o in states]
    dataset = minari.create_dataset_from_buffers('test/many-v0', buffers, observation_space=BOX, action_space=gym.spaces.Discrete(2000))
    memory = ReplayMemory.from_minari(dataset)
    rows = memory.recent(100_000).numpy()
    assert (rows.state == states[:, :-1].reshape(-1, 3)).all() and (rows.next_state == states[:, 1:].reshape(-1, 3)).all()
    assert len(by_episodes(memory)) == 50 and rows.terminated.sum() == 50


# ---- out

class Episodes:
    "Which rows belong together, by walking from each row to the one before"
    def __init__(self, memory, ended):
        self.found, where = [], {}
        for id in range(memory.first_id, memory.n_added):
            before = int(memory.previous([id])[0])
            if before in where and not ended[before]: where[id] = where[before]
            else:
                where[id] = len(self.found)
                self.found.append([])
            self.found[where[id]].append(id)


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('counted', [False, True])
def test_episodes_of_mixed_streams_that_went_round(seed, counted):
    rng = np.random.default_rng(seed)
    memory, state, ended, episode = ReplayMemory(int(rng.integers(5, 80))), dict.fromkeys(range(4), 0.), {}, dict.fromkeys(range(4), 0)
    for _ in range(int(rng.integers(3, 60))):
        streams = rng.permutation(4)[:rng.integers(1, 5)]
        before, after = np.array([state[s] for s in streams]), rng.random(len(streams))
        ends, cuts = rng.random((2, len(streams))) < .15
        columns = dict(state=before, action=streams, reward=after, next_state=after, terminated=ends, truncated=cuts)
        if counted: ids = memory.extend(SimpleStep(**columns, total_reward=after, env_id=streams, proc_id=streams, step_n=streams, episode_n=np.array([episode[s] for s in streams])))
        else: ids = memory.extend(Transition(**columns), streams=streams)
        for k, s in enumerate(streams.tolist()):
            ended[int(ids[k])] = bool(ends[k] or cuts[k])
            episode[s] += ended[int(ids[k])]
            state[s] = rng.random() if ended[int(ids[k])] else after[k]
    expected = Episodes(memory, ended).found
    assert [o.tolist() for o in by_episodes(memory)] == expected and sum(map(len, expected)) == len(memory)
    dataset = memory.to_minari('test/out-v0')
    assert [len(e.rewards) for e in dataset] == [len(o) for o in expected]
    again = ReplayMemory.from_minari(dataset)
    for row, id in zip(again.recent(len(memory)), np.concatenate(expected)): np.testing.assert_equal(row, Transition(*(getattr(memory.fetch([id])[0], f) for f in Transition._fields)))
    assert memory.check_valid() and again.check_valid()


@pytest.mark.parametrize('kind', SPACES)
@pytest.mark.parametrize('flags', ['right', 'none'])
def test_there_and_back_is_equal(kind, flags):
    "Images too: JPEG would change them. Spaces are given, or come from the layout"
    dataset = recorded(kind, [3, 1, 8], flags=flags)
    memory = ReplayMemory.from_minari(dataset)
    given = dict(observation_space=dataset.observation_space, action_space=dataset.action_space)
    one, two = memory.to_minari('test/one-v0', **given), memory.to_minari('test/two-v0')
    assert one.observation_space == dataset.observation_space and one.action_space == dataset.action_space
    for made in (one, two):
        same_episodes(dataset, made)
        np.testing.assert_equal(ReplayMemory.from_minari(made).recent(12).numpy(), memory.recent(12).numpy())
        for e in made: assert made.action_space.contains(tree_map(lambda a: np.asarray(a[0]), e.actions))


def test_an_environments_steps_there_and_back(place):
    "From the stepper, with an open episode at the end and one overwritten at the beginning; frames on disk"
    memory = ReplayMemory(300, path=place/'m')
    for _, step in zip(range(500), GymStepper(['CartPole-v1'], seed=0)): memory.add(step)
    dataset = memory.to_minari('cartpole/random-v0', env='CartPole-v1', algorithm_name='random')
    assert dataset.env_spec.id == 'CartPole-v1' and dataset.total_steps == 300
    assert dataset.observation_space == gym.make('CartPole-v1').observation_space
    back = ReplayMemory.from_minari(dataset, SimpleStep).recent(300).numpy()
    for f in Transition._fields: np.testing.assert_equal(getattr(back, f), getattr(memory.recent(300).numpy(), f))
    memory.close()


def test_shared_frames_there_and_back():
    rng, memory = np.random.default_rng(0), ReplayMemory(60, dedup='frames')
    frames = [rng.integers(0, 255, (16, 16)).astype(np.uint8) for _ in range(200)]
    for k in range(100):
        at = k - k % 10
        def stack(i, at=at): return np.stack([frames[at + max(0, j)] for j in range(i - at - 3, i - at + 1)])
        memory.add(Transition(stack(k), 0, 0., stack(k + 1), k % 10==9, False))
    again = ReplayMemory.from_minari(memory.to_minari('test/frames-v0'), dedup='frames')
    np.testing.assert_equal(again.recent(60).numpy(), memory.recent(60).numpy())
    assert again.check_valid()


# ---- what does not fit

class Goal(NamedTuple):
    state: Any
    goal: Any


def folders(place): return sorted(p.relative_to(place).as_posix() for p in place.rglob('*'))


@pytest.mark.parametrize('call,error,what', [
    (lambda p: ReplayMemory.from_minari('no/such-v0'), FileNotFoundError, words('it is named', name='no/such-v0')),
    (lambda p: ReplayMemory.from_minari(7), TypeError, ('dataset', 'a MinariDataset or the id of one', '7')),
    (lambda p: ReplayMemory.from_minari('test/set-v0', Goal), ValueError, ('step_type', None, "'goal'")),
    (lambda p: ReplayMemory.from_minari('test/set-v0', int), ValueError, 'step_type'),
    (lambda p: ReplayMemory.from_minari('test/set-v0', step=Transition(np.zeros(4, np.float32), 0, 0., np.zeros(4, np.float32), False, False)), ValueError, ('state', 'shape (3, 4)', '(3, 3)')),
    (lambda p: ReplayMemory.from_minari('test/set-v0', step=Transition(np.zeros(3, np.float16), 0, 0., np.zeros(3, np.float16), False, False)), TypeError, ('state', 'float16[3]', None)),
    (lambda p: ReplayMemory.from_minari('test/set-v0', SimpleStep, step=Transition(0, 0, 0., 0, False, False)), TypeError, 'step'),
    (lambda p: ReplayMemory.from_minari('test/set-v0', max_sz=0), ValueError, 'max_sz'),
    (lambda p: ReplayMemory.from_minari('test/set-v0', path=p/'m', step=Transition(0, 0, 0., 0, False, False)), ValueError, 'state'),
    (lambda p: ReplayMemory.from_minari('test/set-v0', path=p/'sets'), FileExistsError, 'path'),
    (lambda p: ReplayMemory(3).to_minari('test/new-v0'), ValueError, ('memory', 'an episode', 'an empty memory')),
    (lambda p: full().to_minari('test/set-v0'), FileExistsError, 'dataset_id'),
    (lambda p: full().to_minari('test/new'), ValueError, ('dataset_id', "a name such as 'cartpole/mixed-v0'", "'test/new'")),
    (lambda p: full().to_minari('test/new'), ValueError, 'a version'),
    (lambda p: full().to_minari('t/new-v0'), ValueError, words('a short namespace', name='t')),
    (lambda p: full().to_minari('/new-v0'), ValueError, 'a namespace'),
    (lambda p: full().to_minari('../new-v0'), ValueError, 'dataset_id'),
    (lambda p: full().to_minari(None), ValueError, 'dataset_id'),
    (lambda p: full().to_minari('test/new-v0', env='Acrobot-v1'), ValueError, 'observation_space'),
    (lambda p: full().to_minari('test/new-v0', action_space=gym.spaces.Discrete(1)), ValueError, 'action_space'),
    (lambda p: full().to_minari('test/new-v0', colour='red'), TypeError, words('an unknown option', name='colour')),
    (lambda p: full(skip=True).to_minari('test/new-v0'), ValueError, words('a gap', first=4, last=5)),
    (lambda p: windows().to_minari('test/new-v0'), ValueError, 'next_state'),
    (lambda p: of_goals().to_minari('test/new-v0'), ValueError, 'no action'),
])
def test_a_mistake_is_named_and_nothing_is_left(call, error, what, place):
    recorded('box', [3, 2])
    before = folders(place)
    with about(what, error): call(place)
    assert folders(place) == before


def full(skip=False):
    "A memory of two episodes; with `skip` the second leaves out a state"
    memory = ReplayMemory(10)
    for k in range(6): memory.add(Transition(np.full(3, k, np.float32), 1, 0., np.full(3, k + 1 + (skip and k==4), np.float32), k==3, False))
    return memory


def windows():
    memory = ReplayMemory(10)
    for step in NStep([Transition(float(k), 0, 1., float(k + 1), False, False) for k in range(9)], n=3, gamma=.9): memory.add(step)
    return memory


def of_goals():
    memory = ReplayMemory(10)
    memory.add(Goal(1., 2.))
    return memory


@pytest.mark.parametrize('space,name', [(gym.spaces.Text(5), 'observation_space'), (gym.spaces.Dict(words=gym.spaces.Text(5)), 'observation_space.words'),
                                        (gym.spaces.Tuple([gym.spaces.Sequence(BOX)]), 'observation_space.0')])
def test_a_space_without_a_fixed_size_is_named(space, name):
    class Set:
        id, observation_space, action_space, total_steps = 'words', space, BOX, 3
        def iterate_episodes(self): raise AssertionError('read before it was checked')
    with refused(name, expected='arrays of a fixed size'): ReplayMemory.from_minari(Set())


@pytest.mark.parametrize('name', ['observations', 'actions', 'terminations', 'truncations'])
def test_a_damaged_episode_leaves_no_memory(name, place):
    import h5py
    dataset = recorded('box', [3, 4])
    with h5py.File(place/'sets'/'test'/'set-v0'/'data'/'main_data.hdf5', 'a') as file:
        rows = file['episode_1'][name]
        rows.resize(len(rows) - 1, axis=0)
    with refused(f'episode 1: {name}', expected=f'{4 + (name=="observations")} rows'): ReplayMemory.from_minari(dataset, path=place/'m')
    assert not (place/'m').exists()


def test_a_disk_that_fills_up_leaves_no_set(place, monkeypatch):
    from minari.dataset._storages import hdf5_storage
    before, calls, add = folders(place), [], hdf5_storage._add_episode_to_group
    def failing(*args, **kw):
        calls.append(1)
        if len(calls) > 1: raise OSError(28, 'No space left on device')
        return add(*args, **kw)
    monkeypatch.setattr(hdf5_storage, '_add_episode_to_group', failing)
    with pytest.raises(OSError, match='No space'): full().to_minari('set-v0')
    assert [o for o in folders(place) if o not in before] == ['sets'] and len(calls) == 2


def test_without_minari_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'minari', None)
    for call in (lambda: ReplayMemory.from_minari('a/b-v0'), lambda: full().to_minari('a/b-v0')):
        with pytest.raises(ImportError, match=words('an extra', what='Minari data sets', name='minari')): call()


# ---- other mappings

def test_a_tensordict_and_a_dict_go_in_by_extend():
    tensordict = pytest.importorskip('tensordict')
    columns = dict(state=dict(a=np.zeros((5, 2), np.float32), b=np.arange(5)), action=np.arange(5), reward=np.ones(5, np.float32),
                   next_state=dict(a=np.ones((5, 2), np.float32), b=np.arange(5)), terminated=np.zeros(5, bool), truncated=np.zeros(5, bool))
    one, two = ReplayMemory(9), ReplayMemory(9)
    one.extend(columns)
    two.extend(tensordict.TensorDict(columns, batch_size=[5]))
    assert isinstance(two.recent(5), Batch) and equal(one.recent(5).numpy(), two.recent(5).numpy())
    with refused('chunk', TypeError, got="one of ('state',)"): two.extend(tensordict.TensorDict(dict(state=np.zeros(3)), batch_size=[3]))
    assert len(two) == 5


# ---- on the command line

def command(capfd, *args):
    code = cli.main([str(o) for o in args])
    out, err = capfd.readouterr()
    return code, out, ''.join(o for o in err.splitlines(True) if 'compiling kernels' not in o)


@pytest.mark.parametrize('more', [[], ['--on_disk'], ['--simple'], ['--max-sz', '6', '--on-disk', '--simple']], ids=str)
def test_import_and_export(more, place, capfd):
    dataset = recorded('nested', [2, 5, 3])
    code, out, err = command(capfd, 'import', 'test/set-v0', place/'m', *more)
    assert (code, err) == (0, '') and str(place/'m') in out and out.count('\n') == 1
    memory = (ReplayMemory.open if '--on_disk' in more or '--on-disk' in more else ReplayMemory.load)(place/'m')
    assert memory.layout.step_type is (SimpleStep if '--simple' in more else Transition) and len(memory) == memory.max_sz == (6 if '6' in more else 10)
    memory.close()
    code, out, err = command(capfd, 'export', place/'m', 'test/back-v0')
    assert (code, err) == (0, '') and out == f'test/back-v0: {len(memory_rows := minari.load_dataset("test/back-v0"))and memory_rows.total_steps} steps in {memory_rows.total_episodes} episodes\n'
    if '6' not in more: same_episodes(dataset, minari.load_dataset('test/back-v0'))
    else: assert [len(e.rewards) for e in minari.load_dataset('test/back-v0')] == [3, 3]


@pytest.mark.parametrize('args,says', [
    (['import'], 'required'), (['import', 'no/such-v0', 'new'], 'no/such-v0'), (['import', 'test/set-v0', 'sets'], 'sets'), (['import', 'test/set-v0', 'file'], 'file'),
    (['import', 'test/set-v0', 'new', '--max_sz', '0'], 'max_sz'), (['import', 'test/set-v0', 'new', '--max_sz', 'many'], 'many'), (['import', 'nonsense', 'new'], 'nonsense'),
    (['export'], 'required'), (['export', 'new', 'test/new-v0'], 'found none'), (['export', 'm', 'test/set-v0'], 'exists already'), (['export', 'm', 'new'], 'dataset_id'),
    (['export', 'm', 'test/new-v0', '--env', 'CartPoll-v1'], 'CartPoll'), (['export', 'm', 'test/new-v0', '--env', 'Acrobot-v1'], 'observation_space'),
    (['export', 'empty', 'test/new-v0'], 'empty')])
def test_a_mistake_on_the_command_line_gets_one_line(args, says, place, capfd, monkeypatch):
    monkeypatch.chdir(place)
    ReplayMemory.from_minari(recorded('box', [3, 2])).save('m')
    ReplayMemory(3).save('empty')
    (place/'file').touch()
    before = folders(place)
    code, out, err = command(capfd, *args)
    assert code not in (0, None) and not out and says in err and err.startswith('fastrl_replay: ') and err.count('\n') == 1
    assert folders(place) == before and os.getcwd() == str(place)
