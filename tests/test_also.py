"What is saved with a memory: the same types come back, whole or not at all, and nothing but plain data is taken"
import math, random
from collections import OrderedDict, defaultdict, namedtuple
from enum import IntEnum

import numpy as np
import pytest
import torch

from fastrl_replay.all import MixedMemory, Proportional, ReplayMemory, Transition
from test_saving_format import Calls, Injected, quiet_disk
from refusals import refused


def step(n): return Transition(np.full(3, n, np.float32), n, float(n), np.full(3, n + 1, np.float32), False, False)

def one(n=20, seed=0):
    memory = ReplayMemory(50, Proportional(), seed=seed)
    memory.extend([step(i) for i in range(n)])
    return memory

def several(n=20): return MixedMemory([one(n), one(n, 1)], seed=0)

KINDS = dict(one=one, several=several)

@pytest.fixture(params=KINDS)
def make(request): return KINDS[request.param]

def same(a, b):
    "Are these the same, types and bits included?"
    if isinstance(a, dict): return isinstance(b, dict) and [*a]==[*b] and all(same(k, i) and same(v, b[k]) for k, i, v in zip(a, b, a.values()))
    if type(a) is not type(b): return False
    if isinstance(a, (list, tuple)): return len(a)==len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor): return a.dtype==b.dtype and a.shape==b.shape and same(a.contiguous().reshape(-1).view(torch.uint8).tolist(), b.reshape(-1).view(torch.uint8).tolist())
    if isinstance(a, (np.ndarray, np.generic)): return a.dtype==b.dtype and a.shape==b.shape and a.tobytes()==b.tobytes()
    return repr(a)==repr(b)


def anything():
    model = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 2))
    moments = {k: dict(step=torch.tensor(1.), exp_avg=torch.randn(o.shape)) for k, o in enumerate(model.parameters())}
    optimizer = dict(state=moments, param_groups=[dict(lr=1e-3, betas=(.9, .999), foreach=None, params=[*moments])])
    return dict(model=dict(model.state_dict()), optimizer=optimizer, torch=torch.Generator().manual_seed(3).get_state(),
                numpy=np.random.default_rng(5).bit_generator.state, old=np.random.RandomState(2).get_state()[1:], python=random.Random(1).getstate(),
                numbers=[0, -1, 2**200, 1.5, -0., math.inf, -math.inf, math.nan, 5e-324, True, False, None, '', 'é\n"', '!tuple'],
                numpys=[np.float32(1.1), np.float64(1/3), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1 + 2j), np.float16(7)],
                arrays=(np.arange(12.).reshape(3, 4).T, np.zeros((0, 3), np.int16), np.array(5), np.ones(1000, '>f4'), np.zeros(5, bool)),
                tensors=[torch.tensor(3), torch.ones(2, 3, dtype=torch.bfloat16).T, torch.empty(0, 4), torch.zeros(3, dtype=torch.complex64), torch.tensor(True)],
                nested={'a.b': {'!x': {}}, 5: {(1, 'a', None): []}, None: (), True: ((),), 2.5: [[[]]], '': {'': ''}})

def test_what_comes_back_is_what_was_saved(make, tmp_path):
    state = anything()
    memory = make()
    assert memory.also is None and memory.save(tmp_path/'a', also=state) > 0
    again = type(memory).load(tmp_path/'a')
    assert same(again.also, state) and again.sample(9).ids.tolist()==memory.sample(9).ids.tolist()

def test_nothing_is_none_and_empty_is_empty(make, tmp_path):
    memory = make()
    for also in (None, {}, dict(a=1), None):
        memory.save(tmp_path/'a', also=also)
        assert type(memory).load(tmp_path/'a').also==also
    assert memory.also is None                                    # it was not loaded


Point = namedtuple('Point', 'x y')
class Kind(IntEnum): A = 1
class Words(str): pass

REFUSED = {'also.net': dict(net=torch.nn.Linear(2, 2)), 'also.a.b.1': dict(a=dict(b=[1, object()])), 'also.f': dict(f=len), 'also.s': dict(s={1, 2}),
           'also.raw': dict(raw=b'x'), 'also.z': dict(z=1j), 'also.p': dict(p=Point(1, 2)), 'also.k': dict(k=Kind.A), 'also.w': dict(w=Words('x')),
           'also.d': dict(d=defaultdict(int)), 'also.n': dict(n=np.array(['a'])), 'also.o': dict(o=np.array([None])), 'also.sparse': dict(sparse=torch.eye(2).to_sparse()),
           'also.meta': dict(meta=torch.empty(2, device='meta')), 'also, a key': {Point(1, 2): 1}, 'also.3.0': {3: [object]},
           'also.masked': dict(masked=np.ma.masked_array([1], [True]))}

@pytest.mark.parametrize('path', REFUSED)
def test_what_is_not_plain_is_named_by_its_path(make, path, tmp_path):
    memory = make()
    with refused(path, TypeError):
        memory.save(tmp_path/'a', also=REFUSED[path])
    assert not (tmp_path/'a').exists()

def test_a_model_state_is_an_ordered_dict_and_taken(tmp_path):
    model = torch.nn.Linear(2, 3)
    one().save(tmp_path/'a', also=dict(model=model.state_dict()))
    found = ReplayMemory.load(tmp_path/'a').also['model']
    assert found==OrderedDict(found) and model.load_state_dict(found)

@pytest.mark.parametrize('after', [False, True])
def test_every_call_to_the_system_fails_in_turn(tmp_path, monkeypatch, after):
    "There is the memory from before with what was saved then, or the new one with the new"
    quiet_disk(monkeypatch)
    olds = news = 0
    for fail in range(300):
        memory, folder = one(), tmp_path/f'{fail}'
        memory.save(folder, also=dict(n=20, weights=np.full(999, 20.)))
        memory.extend([step(n) for n in range(9)])
        with monkeypatch.context() as patch:
            calls = Calls(patch, fail, after)
            try: memory.save(folder, also=dict(n=29, weights=np.full(999, 29.)))
            except Injected: pass
        if len(calls.made) <= fail: break
        found = ReplayMemory.load(folder)
        assert found.n_added==found.also['n']==found.also['weights'][0]==found.also['weights'][-1]
        olds, news = olds + (found.n_added==20), news + (found.n_added==29)
    assert olds > 15 and news > 3
