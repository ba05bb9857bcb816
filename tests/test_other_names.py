"Names and keywords that people guess: an error says what to use, and nothing else is different from where nobody guesses"
import copy, pickle, pydoc, rlcompleter
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fastrl_replay.all import (
    Batch, DeviceMemory, GymStepper, MixedMemory, ReplayMemory, Sequence, SimpleStep, Transition)
from fastrl_replay.checks import BATCH, MEMORY, KnowsOtherNames, of_batch, of_memory
from fastrl_replay.ray import RayMemory
from words import WORDS

pytestmark = pytest.mark.filterwarnings('ignore:device. on a CPU')
GUESSES = 'push store append put capacity max_size buffer_size size sample_batch can_sample is_full remove delete update reset'.split()
OF_BATCHES = 'done dones obs observations next_obs rewards actions device cuda shape _asdict _replace'.split()


def steps(n=20): return [Transition(np.full(2, k, np.float32), k % 2, 1., np.full(2, k + 1, np.float32), k % 5==4, False) for k in range(n)]


def filled(**kw):
    memory = ReplayMemory(60, seed=0, **kw)
    memory.extend(steps())
    return memory


def memories():
    "One of each kind"
    plain = filled()
    return plain, MixedMemory([plain]), RayMemory(0, 60), DeviceMemory(60, device='cpu', compile=False)


def said(o, name):
    with pytest.raises(AttributeError) as raised: getattr(o, name)
    return str(raised.value)


@pytest.mark.parametrize('name', GUESSES)
def test_a_guess_says_what_to_use_and_that_works(name):
    for memory in memories():
        kind = type(memory).__name__
        told = said(memory, name)
        assert not hasattr(memory, name) and getattr(memory, name, None) is None and told.count('\n')==0
        method = MEMORY[name].partition('(')[0]
        if method in ('drop', 'clear') and not isinstance(memory, ReplayMemory):
            assert told.startswith(f'{name}: {kind} has no such method; ')       # it lacks that as well
        else:
            assert told==f'{kind} has no {name!r}: use {MEMORY[name]}'
            assert method in dir(memory) or method.startswith(('len(memory)', 'len'))


def test_the_table_has_no_name_that_a_memory_has():
    for memory in memories(): assert not {*MEMORY} & {*dir(memory)} and not {*MEMORY} & {*dir(type(memory))}
    assert {*GUESSES}=={*MEMORY}


def test_completion_and_help_show_no_guess():
    memory = filled()
    found = []
    completer = rlcompleter.Completer(dict(memory=memory))
    while (word := completer.complete('memory.', len(found))) is not None: found.append(word.split('.')[1].partition('(')[0])
    assert {'add', 'sample', 'max_sz'} <= {*found} and not {*found} & {*MEMORY}
    listed = {line.strip(' |').partition('(')[0] for line in pydoc.plain(pydoc.render_doc(ReplayMemory)).splitlines()}
    assert {'add', 'sample', 'n_added'} <= listed and not listed & {*MEMORY}


def test_what_is_there_is_read_as_before():
    "No `__getattr__` or `__getattribute__`, with which each attribute would be read on a longer way"
    assert not {'__getattr__', '__getattribute__'} & {k for o in ReplayMemory.__mro__[:-1] for k in vars(o)}
    assert type(ReplayMemory) is KnowsOtherNames and 'colour' in said(filled(), 'colour')


def test_a_derived_class_may_have_the_name():
    class Own(ReplayMemory):
        capacity = 7
        def push(self, step): return self.add(step)
    memory = Own(60, seed=0)
    assert memory.push(steps()[0])==0 and memory.capacity==7 and {'push', 'capacity'} <= {*dir(memory)} & {*dir(Own)} and 'push' not in dir(ReplayMemory)
    assert said(memory, 'size')=='Own has no \'size\': use ' + MEMORY['size']
    memory.size = 3                                       # as of any object
    assert memory.size==3 and 'size' in dir(memory)
    assert copy.deepcopy(memory).push(steps()[1])==1


def test_copies_pickles_and_states_are_as_before(tmp_path):
    memory = filled()
    for again in copy.copy(memory), copy.deepcopy(memory), pickle.loads(pickle.dumps(memory)):
        assert again.sample(5).ids.tolist()==copy.deepcopy(memory).sample(5).ids.tolist() and said(again, 'push')
    memory.save(tmp_path/'m')
    assert said(ReplayMemory.load(tmp_path/'m'), 'reset')=='ReplayMemory has no \'reset\': use clear()'


class Seen(NamedTuple):
    obs: np.ndarray
    rewards: float
    shape: float


@pytest.mark.parametrize('name', OF_BATCHES)
def test_a_guess_about_a_batch_says_what_to_use_and_that_works(name):
    batch = filled().sample(4)
    told = said(batch, name)
    assert not hasattr(batch, name) and told.startswith(f"this Batch has no {name!r}; use batch.") or name=='shape'
    assert told.endswith(f'its fields are {Transition._fields}')
    said_to_use = told.partition('; use ')[2]
    expected = dict(done=('batch.terminated', 'batch.truncated'), obs=('batch.state',), next_obs=('batch.next_state',), rewards=('batch.reward',),
                    actions=('batch.action',), device=('batch.state.device', 'batch.to(device)'), cuda=("batch.to('cuda')",),
                    shape=('len(batch)', 'batch.state.shape'), _asdict=('batch.astuple()._asdict()',), _replace=('batch.replace(',))
    expected |= dict(dones=expected['done'], observations=expected['obs'])
    assert all(o in said_to_use for o in expected[name])
    assert name not in dir(batch)


def test_every_guess_about_batches_is_tried(): assert {*OF_BATCHES} >= {*BATCH} and all(of_batch(o, Transition._fields) for o in OF_BATCHES)


def test_a_field_of_that_name_is_the_field():
    memory = ReplayMemory(9, seed=0)
    memory.add(Seen(np.zeros(2, np.float32), 1., 2.))
    batch = memory.sample(1)
    assert batch.obs.shape==(1, 2) and batch.rewards.item()==1 and batch.shape.item()==2
    assert 'use batch.obs;' in said(batch, 'observations') and said(batch, 'actions')==f"this Batch has no 'actions'; its fields are {Seen._fields}"
    assert said(batch, 'done')==f"this Batch has no 'done'; its fields are {Seen._fields}"        # it has no flags
    assert 'batch.obs.device' in said(batch, 'device')


def test_a_batch_of_nothing_names_nothing(): assert of_batch('device', ())=='' and of_memory('reset', DeviceMemory)==''


def test_sequences_and_mixtures_say_the_same():
    memory = filled(sequence=Sequence(4))
    for batch in memory.sample(2), MixedMemory([filled()]).sample(2), Batch.of_steps(steps()): assert 'use batch.reward;' in said(batch, 'rewards')


def test_a_compiled_function_asks_for_a_field_that_may_be_there():
    memory = filled()
    def asks(batch): return batch.reward*(batch.discount if hasattr(batch, 'discount') else 2.)
    compiled = torch.compile(asks, fullgraph=True, backend='eager')
    batch = memory.sample(4)
    assert torch.equal(compiled(batch), 2*batch.reward)


# ---- keywords, and values of another form

CALLS = {
    'ReplayMemory.sample()': lambda o: o.sample(4, weights=True), 'ReplayMemory.add()': lambda o: o.add(steps()[0], td=1.),
    'ReplayMemory.__init__()': lambda o: ReplayMemory(capacity=9), 'ReplayMemory.load()': lambda o: type(o).load('x', path='y'),
    'show()': lambda o: o.show(size=3), 'MixedMemory.extend()': lambda o: MixedMemory([o]).extend([], gamma=1), 'MixedMemory.__init__()': lambda o: MixedMemory([o], share=1),
    'MixedMemory.fetch()': lambda o: MixedMemory([o]).fetch([0], names=1), 'DeviceMemory.add()': lambda o: DeviceMemory(9, device='cpu').add(steps()[0], td=1.),
    'RayMemory.sample()': lambda o: RayMemory(0, 9).sample(4, weights=1), 'Batch.to()': lambda o: o.sample(2).to(devise='cpu'),
    }

@pytest.mark.parametrize('method', CALLS)
def test_an_unknown_keyword_names_the_method_that_was_called(method):
    memory = filled()
    with pytest.raises(TypeError, match=WORDS['an unexpected keyword']) as raised: CALLS[method](memory)
    assert str(raised.value).startswith(f'{method} got'), raised.value


def test_a_number_as_a_window_names_the_range():
    for make in (lambda w: ReplayMemory(60, windows=w), lambda w: filled().sample(4, windows=w)):
        for number in (8, np.int64(8)):
            with pytest.raises(TypeError, match=WORDS['a range of 8']): make({'action': number})


def test_an_environment_by_itself_is_refused_as_an_id_is():
    import gymnasium as gym
    for alone in ('CartPole-v1', gym.spec('CartPole-v1'), gym.make('CartPole-v1'), gym.make_vec('CartPole-v1', num_envs=2)):
        with pytest.raises(TypeError, match=WORDS['put it in a list']): GymStepper(alone)
    assert isinstance(next(iter(GymStepper([gym.make('CartPole-v1')], seed=0))), SimpleStep)
