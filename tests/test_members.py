"Members of a mixture that cannot hold one task are told; a bad and a good agent of one task are not accused"
import numpy as np
import pytest
import torch

from fastrl_replay.all import DeviceMemory, GymStepper, MixedMemory, ReplayMemory, SimpleStep, Transition
from fastrl_replay.ray import RayMemory


def told(memory): return [o for o in memory.health()['warnings'] if 'memory 0' in o and 'memory 1' in o]

def walked(n=400, length=20, ends='truncated', reward=lambda rng: rng.normal(), scale=1., width=4, seed=0, dtype=np.float32, max_sz=1000):
    rng, memory, state = np.random.default_rng(seed), ReplayMemory(max_sz), None
    for k in range(n):
        if k % length==0: state = rng.normal(size=width)
        after, last = state + rng.normal(size=width), k % length==length - 1
        flags = dict(terminated=last and ends=='terminated', truncated=last and ends=='truncated')
        memory.add(Transition((state*scale).astype(dtype), 0, reward(rng), (after*scale).astype(dtype), **flags))
        state = after
    return memory


@pytest.mark.parametrize('swap', [False, True])
@pytest.mark.parametrize('times', [10, 100, 255])
def test_rewards_and_states_of_another_scale_are_told(times, swap):
    def mixed(a, b): return MixedMemory([b, a] if swap else [a, b])
    one, other = walked(), walked(seed=1, reward=lambda rng: times*rng.normal())
    warning, = told(mixed(one, other))
    big, small = (0, 1) if swap else (1, 0)
    assert warning.startswith(f'rewards of memory {big} are ') and f'those of memory {small}' in warning and 'before they are stored' in warning
    warning, = told(mixed(one, walked(seed=1, scale=times)))
    assert warning.startswith(f'states of memory {big} are ') and 'normalize both alike' in warning
    exact = walked(reward=lambda rng: times*rng.normal())
    assert len(told(mixed(one, exact)))==1
    scales = mixed(one, exact).health()['scales']
    assert scales[big]['reward']==pytest.approx(times*scales[small]['reward'], rel=1e-5) and scales[0]['n_truncated']==20


def test_a_time_limit_that_is_termination_in_one_is_told():
    cut, ended, early = walked(), walked(ends='terminated', seed=1), walked(ends='terminated', length=7, seed=2)
    for pair in ((cut, ended), (ended, cut)):
        warning, = told(MixedMemory([*pair]))
        assert 'a time limit is stored as truncated' in warning and f'memory {pair.index(ended)} are terminated, after 20 steps' in warning
    assert not told(MixedMemory([cut, early])) and not told(MixedMemory([early, ended])) and not told(MixedMemory([cut, walked(seed=4)]))


def test_one_task_is_not_accused():
    "Other agents, other rewards of the same kind, none at all, few rows, other fields, one number, images"
    for a, b in ((walked(), walked(seed=1, reward=lambda rng: 4*rng.normal())), (walked(), walked(reward=lambda rng: 0.)), (walked(), walked(n=3)),
                 (walked(), ReplayMemory(9)), (walked(reward=lambda rng: float(rng.random() < .1)), walked(reward=lambda rng: float(rng.random() < .9))),
                 (walked(reward=lambda rng: -16*rng.random()), walked(reward=lambda rng: -16.*(rng.random() < .05) - .01)),
                 (walked(width=1), walked(width=1, scale=100.)), (walked(), ReplayMemory(9, step=walked(1)[0]))):
        for memory in (MixedMemory([a, b]), MixedMemory([b, a])): assert told(memory)==[]
    class Good:
        def __call__(self, states): return (states[:, 2] + states[:, 3] > 0).astype(int)
    both = [ReplayMemory(3000), ReplayMemory(3000)]
    for memory, agent in zip(both, (None, Good())):
        for _, s in zip(range(3000), GymStepper(['CartPole-v1'], agent=agent, seed=0)): memory.add(s)
    assert told(MixedMemory(both))==[]


def test_memories_of_other_kinds():
    "A device's rows are compared too, those of shards are left out"
    with pytest.warns(UserWarning): device = DeviceMemory(400, device='cpu', next_of=None)
    rows = walked(400)[:]
    device.extend(Transition(*(torch.as_tensor(o) for o in rows.astuple())))
    shards = RayMemory(0, 500)
    shards.extend(rows)
    assert MixedMemory([walked(reward=lambda rng: 10*rng.normal()), shards]).health()['scales'][1] is None
    shards.close()
    warning, = told(MixedMemory([walked(reward=lambda rng: 10*rng.normal()), device]))
    assert warning.startswith('rewards of memory 0 are ')


def test_what_a_health_reads_is_shown():
    mixed = MixedMemory([walked(), walked(seed=1, reward=lambda rng: 10*rng.normal())])
    assert 'warning: rewards of memory 1' in repr(mixed.health())
    images = [ReplayMemory(60) for _ in range(2)]
    for k, memory in enumerate(images):
        rng = np.random.default_rng(k)
        for t in range(50):
            s = rng.integers(0, 255 if k else 2, (12, 12)).astype(np.uint8)
            memory.add(SimpleStep(s, 0, s, step_n=t))
    assert told(MixedMemory(images))[0].startswith('states of memory 1 are 25')
