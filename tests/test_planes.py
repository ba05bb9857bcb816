"What a memory of images will take is told, and looked for, before it is needed: planes are a stack only where steps show it"
import numpy as np
import pytest
import torch

from fastrl_replay.all import NStep, ReplayMemory, SimpleStep, Transition
from fastrl_replay.batch import Batch
from fastrl_replay.storage import choice, rooms
from words import words


def episodes(kind, planes, n, length=20, size=24, last=False, seed=0):
    "`n` steps: planes of a picture that change all at once ('colours'), or a stack of pictures that slides"
    rng, steps, state = np.random.default_rng(seed), [], None
    for k in range(n):
        if k % length==0: state = rng.integers(0, 255, (planes, size, size)).astype(np.uint8) if kind=='colours' else np.repeat(rng.integers(0, 255, (1, size, size)), planes, 0).astype(np.uint8)
        new = rng.integers(0, 255, state.shape).astype(np.uint8)
        after = new if kind=='colours' else np.concatenate([state[1:], new[:1]])
        turn = (lambda o: np.ascontiguousarray(np.moveaxis(o, 0, -1))) if last else (lambda o: o)
        steps.append(Transition(turn(state), 0, 0., turn(after), False, k % length==length - 1))
        state = after
    return steps


@pytest.mark.parametrize('planes,last', [(2, False), (3, True), (4, True), (6, False)])
@pytest.mark.parametrize('kind', ['colours', 'stack'])
def test_an_estimate_by_a_step_is_what_a_full_memory_takes(kind, planes, last):
    steps = episodes(kind, planes, 900, 200, last=last)
    memory, told = ReplayMemory(600), ReplayMemory.estimate(steps[0], 600)
    for k in range(0, 900, 10): memory.extend(steps[k:k + 10])
    colours = last and planes==3                                       # three planes on the last axis are colours, by 'auto'
    frames = kind=='stack' and not colours
    assert told.chosen==('frames' if frames else 'plain' if colours else 'next_state') and told.planes==0
    assert 0.8*memory.nbytes < told.nbytes < 1.2*memory.nbytes and torch.equal(memory.recent(1).state, torch.from_numpy(steps[-1].state[None]))


def test_without_a_step_that_moves_both_figures_are_told():
    import gymnasium as gym
    for planes, chosen in ((3, 'next_state'), (4, 'frames')):
        env = type('Env', (), dict(observation_space=gym.spaces.Box(0, 255, (planes, 24, 24), np.uint8), action_space=gym.spaces.Discrete(2)))()
        still = np.ones((planes, 24, 24), np.uint8)
        for example in (env, SimpleStep(still, 0, still)):
            told = ReplayMemory.estimate(example, 1000)
            assert (told.chosen, told.planes)==(chosen, planes) and f'if the {planes} planes of an observation are a stack' in str(told)
            shown = [episodes(k, planes, 1)[0] for k in ('stack', 'colours')]
            low, high = (ReplayMemory.estimate(SimpleStep(o.state, 0, o.next_state), 1000) for o in shown)
            for other in (low, high):
                assert rooms.readable(other.nbytes) in str(told)
    assert ReplayMemory.estimate(SimpleStep(np.zeros(4), 0, np.zeros(4)), 10).planes==0


@pytest.mark.parametrize('way', ['add', 'list', 'batch', 'arrays', 'step'])
def test_what_does_not_fit_is_refused_by_the_first_step_that_shows_it(way, monkeypatch):
    "A million pictures of three colours, where a million stacks would fit"
    steps = episodes('colours', 3, 8)
    need = ReplayMemory.estimate(steps[0], 1_000_000).nbytes
    for module in (choice, rooms): monkeypatch.setattr(module, 'free_memory', lambda: need//2)
    def fill(step, memory):
        if way=='add': memory.add(step[0])
        elif way=='list': memory.extend(step)
        elif way=='batch': memory.extend(Batch.of_steps(step))
        else: memory.extend(Transition(*map(np.array, zip(*step))))
    def made(step): return ReplayMemory(1_000_000, step=step if way=='step' else None)
    with pytest.raises(MemoryError, match=words('they need more', n='1,000,000')): fill(steps, made(steps[0]))
    stacks = episodes('stack', 3, 8)
    memory = made(stacks[0])
    fill(stacks, memory)
    assert len(memory) > 0
    for module in (choice, rooms): monkeypatch.setattr(module, 'free_memory', lambda: need*11//10)
    memory = made(steps[0])
    fill(steps, memory)
    assert len(memory) > 0


@pytest.mark.parametrize('codec', [None, 'lz4'])
@pytest.mark.parametrize('way', ['add', 'extend'])
def test_a_first_step_that_shows_nothing_is_not_the_last_word(way, codec, monkeypatch):
    "Made with an example of zeros, or filled with n-step rows: the planes of a few hundred rows tell"
    n, steps = 100_000, episodes('colours', 3, 600)
    for rows in (steps, [*NStep(steps, 5, .9)]):
        need = ReplayMemory.estimate(steps[0], n).nbytes
        for module in (choice, rooms): monkeypatch.setattr(module, 'free_memory', lambda need=need: need//2)
        zeros = rows[0]._replace(state=np.zeros_like(steps[0].state), next_state=np.zeros_like(steps[0].state))
        memory = ReplayMemory(n, step=zeros, codec=codec)
        def fill():
            for k in range(0, 600, 10):
                if way=='add': [memory.add(o) for o in rows[k:k + 10]]
                else: memory.extend(rows[k:k + 10])
        if codec: fill()
        else:
            with pytest.raises(MemoryError, match=words('a field needs more', name='state')): fill()
            assert 250 < len(memory) < 290 and memory.check_valid()
            for module in (choice, rooms): monkeypatch.setattr(module, 'free_memory', lambda need=need: need*11//10)
            memory.extend(rows[len(memory):])
        assert len(memory)==600 and memory.check_valid() and memory.recent(600).action.tolist()==[0]*600
        if not codec: assert memory.nbytes > .9*need


@pytest.mark.parametrize('n', [1, 3, 6])
def test_a_stack_is_never_taken_for_colours(n, monkeypatch):
    "Also of short episodes, of n-step rows that leap over the whole stack, and of many streams"
    steps = episodes('stack', 4, 1200, length=5)
    rows = steps if n==1 else [*NStep(steps, n, .9)]
    need = ReplayMemory.estimate(steps[0], 100_000).nbytes
    for module in (choice, rooms): monkeypatch.setattr(module, 'free_memory', lambda: need*105//100)
    memory = ReplayMemory(100_000, step=rows[0])
    for k in range(0, 1200, 100): memory.extend(rows[k:k + 100])
    assert len(memory)==1200 and memory.check_valid()
    streams = ReplayMemory(100_000, step=rows[0])
    for k in range(240): streams.extend(Batch.of(Transition(*map(np.array, zip(*steps[k::240])))) if n==1 else rows[5*k:5*k + 5])
    assert len(streams)==1200


def test_on_disk_the_room_is_there_as_soon_as_it_is_known(tmp_path):
    n, steps = 3000, episodes('colours', 3, 400)
    def blocks(folder): return (folder/'frames.0.map').stat().st_blocks*512
    first = ReplayMemory(n, path=tmp_path/'a')
    first.add(steps[0])
    assert blocks(tmp_path/'a') >= 3*n*24*24
    first.close()
    zeros = steps[0]._replace(state=np.zeros_like(steps[0].state), next_state=np.zeros_like(steps[0].state))
    with ReplayMemory(n, path=tmp_path/'b', step=zeros) as later:
        for k in range(0, 400, 20): later.extend(steps[k:k + 20])
        assert blocks(tmp_path/'b') >= 3*n*24*24 and later.check_valid()
    with ReplayMemory.open(tmp_path/'b') as again: assert again.check_valid() and len(again)==400
