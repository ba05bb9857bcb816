"""A memory on a device, on the CPU and, where there is one, on CUDA: beside naive twins, never waiting, one graph for ever."""
import copy, math, pickle, random, re, subprocess, sys, warnings
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fastrl_replay.all import (
    Batch, CheckpointError, ExponentialSchedule, GymStepper, IterDataPipe, LAP, Learner, LinearSchedule, Proportional, RankBased, ReplayMemory, Sequence, SimpleStep,
    Transition, Uniform)
from fastrl_replay.memory import DeviceMemory
from fastrl_replay.memory.device_draws import DeviceRng, law_of
from fastrl_replay.samplers.age import AgeWeighted
from refusals import about, refused
from words import WORDS, words

pytestmark = pytest.mark.filterwarnings('ignore:device. on a CPU')
DEVICES = ['cpu', pytest.param('cuda', marks=pytest.mark.skipif(not torch.cuda.is_available(), reason='this machine has no CUDA device'))]


@pytest.fixture(params=DEVICES)
def device(request): return request.param


class World:
    "Streams of episodes that end at random; an observation says its stream, episode and step"
    def __init__(self, n, device='cpu', seed=0, p=.1):
        self.n, self.device, self.p, self.log = n, device, p, []
        self.rng, self.ep, self.t = torch.Generator().manual_seed(seed), torch.zeros(n), torch.zeros(n)
    def state(self):
        who = torch.stack([torch.arange(self.n).float(), self.ep, self.t], 1)
        return dict(who=who, eye=(self.t[:, None, None] + torch.arange(self.n)[:, None, None]).expand(-1, 2, 2).to(torch.uint8))
    def step(self):
        a = self.state()
        self.t = self.t + 1
        u = torch.rand(self.n, generator=self.rng)
        terminated, truncated = u < self.p, (u >= self.p) & (u < 1.5*self.p)
        made = Transition(a, torch.randint(0, 4, (self.n,), generator=self.rng), torch.rand(self.n, generator=self.rng), self.state(), terminated, truncated)
        ended = terminated | truncated
        self.ep, self.t = self.ep + ended, self.t*~ended
        self.log.append(made)
        return tree_map(lambda v: v.to(self.device), made)
    def row(self, id): return tree_map(lambda v: v[id % self.n], self.log[id//self.n])
    def ended(self, id): return bool(self.row(id).terminated | self.row(id).truncated)


def filled(n=8, steps=30, max_sz=160, device='cpu', seed=0, p=.1, **kw):
    world, memory = World(n, device, seed, p), DeviceMemory(max_sz, device=device, seed=seed, **kw)
    for _ in range(steps): memory.extend(world.step())
    return world, memory


def same_rows(batch, world, ids):
    for i, id in enumerate(ids):
        for a, b in zip(tree_leaves(tree_map(lambda v: v[i].cpu(), batch.astuple())), tree_leaves(world.row(id)), strict=True):
            assert torch.equal(a, b), (id, a, b)


def likely(counts, probs):
    "Whether counts have these probabilities, by chi²"
    wanted = probs/probs.sum()*counts.sum()
    keep = wanted >= 5
    x, k = float(((counts - wanted)[keep]**2/wanted[keep]).sum()), int(keep.sum()) - 1
    return .5*math.erfc(((x/k)**(1/3) - (1 - 2/(9*k)))/math.sqrt(2/(9*k))/math.sqrt(2)) > 1e-4


def counted(memory, draws, bs):
    ids = torch.cat([memory.sample(bs).ids for _ in range(draws)]).cpu()
    return torch.bincount(ids - memory.first_id, minlength=len(memory)).double()


# ---- who is drawn


@pytest.mark.parametrize('steps', [9, 40])
@pytest.mark.parametrize('next_of', [None, {'next_state': 'state'}])
def test_uniform_draws_are_all_alike(device, steps, next_of):
    world, memory = filled(steps=steps, device=device, next_of=next_of, p=.02)
    assert likely(counted(memory, 30, 2000), torch.ones(len(memory)))
    batch = memory.sample(64)
    assert torch.allclose(batch.probs, torch.full_like(batch.probs, 1/len(memory))) and (batch.weights==1).all()
    same_rows(batch, world, batch.ids.tolist())


@pytest.mark.parametrize('bs,steps', [(1, 20), (40, 20), (41, 20), (160, 20), (30, 5), (8, 1)])
def test_without_replacement_no_row_comes_twice(device, bs, steps):
    _, memory = filled(steps=steps, device=device, sampler=Uniform(), next_of=None)
    n, found, pairs = len(memory), torch.zeros(len(memory)), 0
    for _ in range(300):
        ids = memory.sample(bs).ids
        assert len(set(ids.tolist()))==bs
        found += torch.bincount(ids.cpu() - memory.first_id, minlength=n)
        pairs += bool((found.new_tensor(ids.tolist())==memory.first_id).any() and (ids==memory.first_id + 1).any())
    share = bs*(bs - 1)/(n*(n - 1))
    assert (found.mean() - 300*bs/n).abs() < 1e-3 and (found/300 - bs/n).abs().max() < 5.5*math.sqrt(bs/n*(1 - bs/n)/300) + 1e-9
    assert abs(pairs/300 - share) < 5*math.sqrt(share*(1 - share)/300) + 1e-9
    with refused('bs', expected=f'at most the {n} rows that there are', got=str(n + 1)): memory.sample(n + 1)


def test_a_batch_without_replacement_needs_rows_that_were_not_given_up(device):
    world, memory = filled(4, 40, 40, device, sampler=Uniform(), max_ends=4, p=.5)
    there, n = len(memory), 0
    assert there < 20
    with refused('bs', expected=f'at most the {there} rows that there are', got='20'): memory.sample(20)
    assert len(set(memory.sample(there).ids.tolist()))==there
    with Watch() as watch: memory.sample(8)               # so many there always are: 4 ends, and the newest of 4 streams
    assert not watch.waits
    for _ in range(40):
        memory.extend(world.step())
        n += len(memory)==8
        assert len(memory) >= 8
    assert n


@pytest.mark.parametrize('sampler', [lambda: Uniform(True), Uniform, Proportional, lambda: AgeWeighted(40)])
def test_errors_that_are_no_numbers_are_counted_by_every_sampler(device, sampler):
    _, memory = filled(device=device, sampler=sampler())
    memory.update_priorities(torch.tensor([100, 239, 238, 237, 10**6], device=device), torch.tensor([1., math.nan, math.inf, -math.inf, 1.], device=device))
    assert int(memory.n_stale)==4 + (memory.first_id > 100)


def test_deterministic_algorithms_draw_alike_and_without_sums_of_floats(device):
    class Sums(Watch):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name.split('::')[1]
            assert not ('cumsum' in name and args[0].is_floating_point()) and 'scatter' not in name
            return super().__torch_dispatch__(func, types, args, kwargs)
    (world, plain), (_, memory) = (filled(device=device, sampler=Proportional(), max_ends=24, p=.2) for _ in range(2))
    step = world.step()
    torch.use_deterministic_algorithms(True)
    try:
        with Sums():
            memory.extend(step)
            batch = memory.sample(500)
            memory.update_priorities(batch.ids, batch.reward)
            again = memory.sample(500)
    finally: torch.use_deterministic_algorithms(False)
    plain.extend(step)
    wanted = plain.sample(500)
    plain.update_priorities(wanted.ids, wanted.reward)
    assert torch.equal(batch.ids, wanted.ids) and torch.equal(batch.probs, wanted.probs) and torch.equal(again.ids, plain.sample(500).ids)


@pytest.mark.parametrize('horizon,floor', [(50, .1), (1000, .2), (30.5, 0.), (20, 1.), (1, .5)])
def test_age_weighted_draws_are_those_of_their_weights(device, horizon, floor):
    _, memory = filled(device=device, sampler=AgeWeighted(horizon, floor), next_of=None)
    age = torch.arange(len(memory) - 1, -1, -1).double()
    wanted = (1 - age/horizon).clamp(min=floor)
    wanted /= wanted.sum()
    counts = counted(memory, 20, 5000)
    assert likely(counts, wanted) and (counts[wanted==0]==0).all()
    batch = memory.sample(500)
    assert torch.allclose(batch.probs.double().cpu(), wanted[batch.ids.cpu() - memory.first_id], rtol=1e-5)


def test_priorities_are_exact_stratified_and_weighted(device):
    _, memory = filled(16, 20, 320, device, sampler=Proportional(.6, .5), next_of=None)
    td = torch.empty(320, device=device).exponential_()
    memory.update_priorities(torch.arange(320, device=device), td)
    p = (td.double().cpu() + 1e-6)**.6
    p /= p.sum()
    host = ReplayMemory(320, Proportional(.6, .5), seed=0)
    host.extend([Transition(0, 0, 0., 0, False, False)]*320)
    host.update_priorities(np.arange(320), td.cpu())
    drawn = host.sample(320)
    assert torch.allclose(p[drawn.ids].float(), drawn.probs, rtol=2e-6)                  # as the host's
    counts = torch.zeros(320)
    for _ in range(100):
        batch = memory.sample(1000)
        ids, probs, weights = (o.cpu() for o in (batch.ids, batch.probs, batch.weights))
        assert ((probs.double() - p[ids])/p[ids]).abs().max() < 1e-6
        assert torch.allclose(weights, ((p[ids].min()/p[ids])**.5).float(), rtol=1e-4)
        each = torch.bincount(ids, minlength=320)
        assert ((each - 1000*p).abs() < 2.).all()                                     # strata: at most one at each edge
        counts += each
    assert ((counts/100_000 - p).abs() < 4e-4).all()
    first = torch.stack([memory.sample(8).ids[i % 8] for i in range(2000)]).cpu()
    assert likely(torch.bincount(first, minlength=320).double(), p)                      # each place of a batch has the law


def test_ten_million_probabilities_are_exact_to_a_millionth(device):
    law, n = law_of(Proportional(.6, 0.), 10_000_000, DeviceRng(0, torch.empty(0, device=device).device)), 10_000_000
    leaves = torch.rand(n, device=device)**4
    law.leaves[:n] = leaves
    first, end, exact = torch.tensor(0, device=device), torch.tensor(n, device=device), leaves.double()/leaves.sum(dtype=torch.float64)
    ids, probs = law.draw(32_768, first, end)
    assert ((probs.double() - exact[ids])/exact[ids]).abs().max() < 1e-6
    edges = exact.cumsum(0)[ids.sort()[0]]                                               # one draw in each stratum
    assert (edges - torch.arange(1, 32_769, device=device)/32_768).abs().max() < 2/32_768 + exact.max()


@pytest.mark.parametrize('alpha', [0., .7, 2.])
def test_updates_are_those_of_a_dict(device, alpha):
    world, memory = filled(8, 30, 80, device, sampler=Proportional(alpha), next_of=None)
    rng, twin, largest, stale = random.Random(1), dict.fromkeys(range(160, 240), 1.), 1., 0
    for _ in range(40):
        twin |= dict.fromkeys(range(memory.n_added, memory.n_added + 8), largest)
        memory.extend(world.step())
        twin = {i: v for i, v in twin.items() if i >= memory.first_id}
        ids = [rng.randrange(memory.first_id - 30, memory.n_added + 5) for _ in range(40)]
        td = [rng.choice((-1, 1))*rng.expovariate(.3) for _ in ids]
        td[3], td[7], td[9] = math.nan, math.inf, -math.inf
        new = {i: abs(v) + 1e-6 for i, v in zip(ids, td) if i in twin and math.isfinite(v)}
        stale += sum(i not in twin or not math.isfinite(v) for i, v in zip(ids, td))
        twin |= new
        largest = max(largest, *new.values())
        assert memory.update_priorities(torch.tensor(ids, device=device), torch.tensor(td, device=device)) is None
    at = torch.tensor([i % 80 for i in twin])
    assert torch.allclose(memory.sampler.leaves.cpu()[at], torch.tensor([v**alpha for v in twin.values()]), rtol=1e-4)
    assert math.isclose(float(memory.sampler.largest), largest, rel_tol=1e-5) and int(memory.n_stale)==stale
    given = torch.tensor([.5, math.nan, -1., 2., 3., 4., 5., 1e4], device=device)        # priorities at extend
    memory.extend(world.step(), given)
    assert not alpha or math.isclose(memory.sampler.priorities(slice(80)).max(), 1e4, rel_tol=1e-4)
    assert int(memory.n_stale)==stale + 2 and float(memory.sampler.largest)==1e4


def test_without_any_mass_draws_are_uniform(device):
    _, memory = filled(8, 30, 80, device, sampler=Proportional(eps=0.), next_of=None)
    memory.update_priorities(torch.arange(160, 240, device=device), torch.zeros(80, device=device))
    assert likely(counted(memory, 20, 800), torch.ones(80)) and torch.allclose(memory.sample(4).probs.cpu(), torch.tensor(1/80))


@pytest.mark.parametrize('beta', [LinearSchedule(.4, 1., 6), ExponentialSchedule(.1, 1., 6)])
def test_a_schedule_of_beta_counts_batches_on_the_device(beta):
    _, memory = filled(sampler=Proportional(1., beta), next_of=None)
    memory.update_priorities(torch.arange(80, 240), torch.rand(160) + .1)
    for k in range(9):
        batch = memory.sample(64)
        assert torch.allclose(batch.weights, (batch.probs.min()/batch.probs)**beta(k), rtol=1e-4)
    assert memory.sampler.n_batches==9


def test_groups_are_one_draw_of_several_batches(device):
    world, memory = filled(device=device, sampler=Proportional(1., 1.))
    memory.update_priorities(torch.arange(memory.first_id, memory.n_added, device=device), torch.rand(len(memory), device=device) + .1)
    groups = memory.sample_groups(5, 16)
    assert groups.state['who'].shape==(5, 16, 3) and groups.ids.shape==groups.weights.shape==(5, 16) and len(groups)==5
    assert torch.equal(groups.weights.amax(1), torch.ones(5, device=device))
    for k in range(5):
        rows = memory.fetch(groups.ids[k])
        assert all(torch.equal(a[k], b) for a, b in zip(tree_leaves(groups.astuple()), tree_leaves(rows.astuple())))
    groups.update_priorities(torch.full((5, 16), 7., device=device))
    assert torch.allclose(memory.sampler.leaves[groups.ids % 160], torch.tensor(7., device=device), atol=1e-4)


# ---- rows, and what comes next

def first_of(world, memory, n_ends):
    "The oldest row that may be drawn: all ends from it on find room. Those of the newest time step are no ends yet"
    first, ends = max(0, memory.n_added - memory.max_sz), [id for id in range(memory.n_added - world.n) if world.ended(id)]
    return max(first, ends[-n_ends - 1] + 1) if len(ends) > n_ends else first


@pytest.mark.parametrize('max_ends,p,chunk', [(None, .3, 1), (8, .1, 1), (24, .2, 3), (160, .1, 20)])
def test_next_observations_are_found_or_not_drawn(device, max_ends, p, chunk):
    world, memory = World(8, device, p=p), DeviceMemory(160, device=device, n_envs=8, seed=0, max_ends=max_ends)
    for _ in range(60//chunk):
        steps = [world.step() for _ in range(chunk)]
        memory.extend(tree_map(lambda *v: torch.cat(v), *steps))
        assert memory.first_id==first_of(world, memory, max_ends or 10)
        same_rows(batch := memory.sample(8), world, batch.ids.tolist())
        assert batch.ids.min() >= memory.first_id and batch.ids.max() < memory.n_added
    everything = np.arange(memory.first_id, memory.n_added)
    same_rows(memory.fetch(everything), world, everything.tolist())
    assert likely(counted(memory, 20, 1000), torch.ones(len(memory)))
    used = memory.usage()
    assert used['n_unlike']==0 and used['n_lost']==memory.first_id - (memory.n_added - 160)


def test_rows_of_lost_ends_have_no_part_in_prioritized_draws(device):
    world, memory = World(8, device, p=.2), DeviceMemory(160, Proportional(1., .5), device=device, seed=0, max_ends=24)
    for k in range(40):
        memory.extend(world.step())
        ids = np.arange(memory.first_id, memory.n_added)
        td = torch.rand(len(ids), generator=torch.Generator().manual_seed(k)).to(device)
        memory.update_priorities(torch.from_numpy(ids).to(device), td)
        exact = (td.double() + 1e-6)/(td.double() + 1e-6).sum()
        batch = memory.sample(200)
        at = batch.ids - int(ids[0])
        assert at.min() >= 0 and torch.allclose(batch.probs.double(), exact[at], rtol=1e-5)
        same_rows(batch, world, batch.ids.tolist()[:10])
        assert ((torch.bincount(at, minlength=len(ids)) - 200*exact).abs() < 2).all()
    assert memory.usage()['n_lost'] > 0


HOW = ['follows', 'resets', 'wanders', 'nan', 'swaps', 'equal']
@pytest.mark.parametrize('seed', range(18))
def test_every_next_observation_is_the_one_given_whatever_comes_next(device, seed):
    "A loop that flags some ends, resets without one, changes the order of streams, or shows NaN and −0"
    rng = random.Random(seed)
    n_envs, times, how = rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 3, 5, 17]), rng.choice(HOW)
    max_sz, rows = n_envs*times, []
    max_ends = rng.choice([n_envs, min(max_sz, 2*n_envs), max_sz])
    memory = DeviceMemory(max_sz, device=device, n_envs=n_envs, max_ends=max_ends, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    def fresh(): return torch.randint(0, 3, (n_envs, 2), generator=draw).float()
    state = fresh()
    for _ in range(rng.choice([1, 3, 40])):
        steps = []
        for _time in range(rng.choice([1, 1, 1, 2, 5])):
            after, flags = fresh(), torch.rand(n_envs, 2, generator=draw) < .1
            if how=='nan': after = torch.where(torch.rand(n_envs, 2, generator=draw) < .3, torch.tensor(rng.choice([math.nan, -0.])), after)
            if how=='equal': after = torch.ones(n_envs, 2)
            steps.append(Transition(state, torch.zeros(n_envs), torch.rand(n_envs, generator=draw), after, flags[:, 0], flags[:, 1]))
            state = torch.where(flags.any(1)[:, None], fresh(), after)
            if how=='resets' and rng.random() < .2: state = fresh()
            if how=='wanders': state = fresh()
            if how=='swaps': state = state.flip(0)
        rows += [tuple(v[i] for v in o) for o in steps for i in range(n_envs)]
        memory.extend(tree_map(lambda *v: torch.cat(v).to(device), *steps))
        first, n = memory.first_id, memory.n_added
        others = [id for id in range(n - n_envs) if rows[id][3].numpy().tobytes()!=rows[id + n_envs][0].numpy().tobytes()]
        assert n==len(rows) and first==max(0, n - max_sz, *(id + 1 for id in others[:-max_ends]))
        there = memory.fetch(range(first, n))
        for i, id in enumerate(range(first, n)):
            for a, b in zip(there.astuple(), rows[id], strict=True): assert a[i].cpu().numpy().tobytes()==b.numpy().tobytes(), (id, a[i], b)
        flagged = {id for id, row in enumerate(rows) if row[4] | row[5]}
        assert memory.usage()['n_unlike']==len([id for id in others if id >= first and id not in flagged])


def test_returns_do_not_cross_a_reset_that_was_not_flagged(device):
    memory, no = DeviceMemory(30, device=device, n_step=3, gamma=.5, seed=0, max_ends=30), torch.zeros(1, dtype=torch.bool, device=device)
    def at(t): return torch.tensor([[float(t)]], device=device)
    for t in (0, 1, 2, 3, 50, 51, 52): memory.extend(Transition(at(t), at(0)[0], at(1)[0], at(t + 1), no, no))
    batch = memory.sample(200)
    found = {int(i): (float(r), float(d), float(s)) for i, r, d, s in zip(batch.ids, batch.reward, batch.discount, batch.next_state[:, 0])}
    assert found[1]==(1.75, .125, 4.) and found[2]==(1.5, .25, 4.) and found[3]==(1., .5, 4.) and found[4]==(1.75, .125, 53.)
    assert memory.episode_ids(2).tolist()==[0, 1, 2, 3] and memory.usage()['n_unlike']==1


def test_several_fields_come_next():
    class Both(NamedTuple):
        state: Any
        critic: Any
        reward: Any
        next_state: Any
        next_critic: Any
        terminated: Any
    memory, rows = DeviceMemory(40, device='cpu', n_envs=4, next_of={'next_state': 'state', 'next_critic': 'critic'}), []
    for t in range(15):
        ended = torch.arange(4)==t % 5
        rows.append(Both(torch.full((4, 2), t), torch.full((4,), -t), torch.rand(4), torch.full((4, 2), t + 1 + 100*(t % 5)), torch.full((4,), -t - 1), ended))
        rows[-1].next_state[~ended] = t + 1
        memory.extend(rows[-1])
    batch = memory.fetch(range(memory.first_id, 60))
    for i, id in enumerate(batch.ids.tolist()):
        for f in Both._fields: assert torch.equal(batch[f][i], getattr(rows[id//4], f)[id % 4])
    in_full = DeviceMemory(40, device='cpu', next_of=None)
    in_full.extend(rows[0])
    assert memory.nbytes < in_full.nbytes + 10*30


NEXT = {'next_state': 'state'}
@pytest.mark.parametrize('n_envs,steps,max_sz,next_of', [(8, 33, 96, None), (8, 9, 96, NEXT), (1, 50, 20, NEXT)])
def test_n_step_rows_are_those_of_a_loop(device, n_envs, steps, max_sz, next_of):
    world, memory = filled(n_envs, steps, max_sz, device, n_step=4, gamma=.9, next_of=next_of, max_ends=max_sz if next_of else None)
    short = 0
    batch = memory.sample(300)
    assert batch.step_type._fields[-1]=='discount'
    for i, id in enumerate(batch.ids.tolist()):
        total, k = 0., 0
        while True:
            total += .9**k*float(world.row(id + k*n_envs).reward)
            k += 1
            last = id + (k - 1)*n_envs
            if k==4 or world.ended(last) or last + n_envs >= memory.n_added: break
        short += k < 4 and not world.ended(last)
        row, end = world.row(id), world.row(last)
        assert abs(total - float(batch.reward[i])) < 1e-5 and abs(.9**k - float(batch.discount[i])) < 1e-6
        assert bool(batch.terminated[i])==bool(end.terminated) and bool(batch.truncated[i])==bool(end.truncated)
        assert torch.equal(batch.next_state['who'][i].cpu(), end.next_state['who']) and torch.equal(batch.state['eye'][i].cpu(), row.state['eye'])
    assert short                                          # the newest rows, which are not called truncated
    some = memory.sample(5, ('discount', 'state'))
    assert some.step_type._fields==('discount', 'state')


WINDOWS = [dict(), dict(pad=False), dict(stride=1), dict(stride=3, burn_in=2), dict(across_episodes=True), dict(across_episodes=True, stride=2),
           dict(across_episodes=True, burn_in=4), dict(burn_in=4, learn_first=False), dict(burn_in=5, stride=2)]
@pytest.mark.parametrize('kw', WINDOWS, ids=str)
def test_windows_are_the_starts_that_a_loop_finds(device, kw):
    next_of = [None, {'next_state': 'state'}][WINDOWS.index(kw) % 2]
    o, n = Sequence(6, **kw), 8
    world, memory = filled(n, 70, n*40, device, sequence=o, next_of=next_of, max_ends=n*40 if next_of else None)
    found, born = {}, [0]*n
    for t in range(70):
        for e in range(n):
            age, id = t - born[e], t*n + e
            if age % o.stride==0 and t >= 30:
                k = next((j + 1 for j in range(6) if t + j >= 70 or not o.across_episodes and world.ended(id + j*n)), 6)
                cut = t + k - 1 < 70 and world.ended(id + (k - 1)*n)
                whole = k==6 and t + 5 < 70
                known = o.learn_first and age==0             # the row before ended an episode
                if whole or o.pad and not o.across_episodes and cut and (k > o.burn_in or known or not o.learn_first): found[id] = k
            if world.ended(id) and not o.across_episodes: born[e] = t + 1
    counts = dict.fromkeys(found, 0)
    for _ in range(10):
        batch = memory.sample(800)
        for id, k in zip(batch.ids[:, 0].tolist(), batch.mask.sum(1).tolist()):
            assert found[id]==k
            counts[id] += 1
    for ids, learn in zip(batch.ids[:80].tolist(), batch.learn[:80].tolist()):
        fresh = [o.learn_first and id >= n and world.ended(id - n) for id in ids]
        assert learn==[id >= 0 and (j >= o.burn_in or any(fresh[:j + 1])) for j, id in enumerate(ids)]
    assert likely(torch.tensor([*counts.values()]).double(), torch.ones(len(counts))) and min(counts.values())
    assert batch.burn_in==o.burn_in and batch.state['who'].shape==(800, 6, 3) and torch.allclose(batch.probs.cpu(), torch.tensor(1/len(found)))
    for i in range(0, 800, 80):
        for j in range(6):
            id = int(batch.ids[i, j])
            assert (id >= 0)==bool(batch.mask[i, j])
            if id < 0: assert all((v[i, j]==0).all() for v in tree_leaves(batch.astuple()))
            else: same_rows(batch.__class__.of_tensors(memory.layout, [v[i, j:j + 1] for v in tree_leaves(batch.astuple())]), world, [id])


def test_priorities_of_windows_mix_the_largest_and_the_mean(device):
    _, memory = filled(8, 70, 320, device, sampler=Proportional(.6), sequence=Sequence(6, burn_in=1))
    for td in torch.rand(64, 6, device=device), torch.rand(64, 5, device=device), torch.rand(64, device=device):
        batch = memory.sample(64)
        batch.update_priorities(td)
        mask = batch.learn[:, -td.shape[1]:] if td.ndim==2 else None
        want = td if mask is None else .9*(td*mask).amax(1) + .1*(td*mask).sum(1)/mask.sum(1).clamp(min=1)
        last = dict(zip(batch.ids[:, 0].tolist(), ((want + 1e-6)**.6).tolist()))
        for id, leaf in last.items(): assert abs(float(memory.sampler.leaves[id % 320]) - leaf) < 1e-5
    starts = memory.sampler.leaves[:320] > 0
    memory.update_priorities(torch.arange(memory.first_id, memory.n_added, device=device), torch.ones(len(memory), device=device))
    assert torch.equal(starts, memory.sampler.leaves[:320] > 0)                          # what is no start stays none


# ---- the protocol, and what is refused


@pytest.mark.parametrize('next_of', [None, {'next_state': 'state'}])
def test_reading_is_that_of_a_twin(device, next_of):
    world, memory = World(4, device), DeviceMemory(48, device=device, next_of=next_of, seed=0)
    seen, news = {}, []
    for turn in range(30):
        ids = memory.extend(world.step())
        assert ids.tolist()==[*range(4*turn, 4*turn + 4)] and memory.n_added==4*turn + 4
        for stored, rows in memory.news(seen, ('reward',)): news += zip(stored.tolist(), rows.reward.tolist())
        alive = np.arange(memory.first_id, memory.n_added)
        assert len(memory)==len(alive)
        same_rows(memory.fetch(alive[::-1].copy()), world, alive[::-1].tolist())
        def there(i): return i if memory.first_id <= i < memory.n_added else -1
        assert memory.next(alive).tolist()==[there(i + 4) for i in alive] and memory.previous(alive).tolist()==[there(i - 4) for i in alive]
        assert memory.next(alive, True).tolist()==[-1 if world.ended(i) else there(i + 4) for i in alive]
        assert memory.previous(alive, True).tolist()==[-1 if there(i - 4) < 0 or world.ended(i - 4) else i - 4 for i in alive]
        id = int(alive[turn % len(alive)])
        episode = memory.episode(id).ids.tolist()
        assert id in episode and memory.next(episode, True).tolist()==[*episode[1:], -1] and memory.previous(episode, True).tolist()==[-1, *episode[:-1]]
    assert news==[(k + 1, float(world.row(k).reward)) for k in range(120)]
    for ids in ([memory.first_id - 1], [120], [-1]):
        for read in memory.fetch, memory.next, memory.previous:
            with refused('ids', expected=f'{memory.first_id} to 119', got=str(ids[0])): read(ids)
    assert memory.sample(5, ('action', 'reward')).step_type._fields==('action', 'reward')


def test_chunks_of_every_kind_are_the_same(device):
    world = World(4, device)
    step, kinds = world.step(), []
    for chunk in step, step._asdict(), Batch.of(tree_map(lambda v: v.cpu(), step)):
        memory = DeviceMemory(8, device=device)
        memory.extend(chunk)
        kinds.append(memory.fetch(range(4)))
    for o in kinds: same_rows(o, world, range(4))
    one = DeviceMemory(8, device=device)
    assert one.add(tree_map(lambda v: v[0].cpu(), step))==0 and one.n_envs==1
    assert one.extend([tree_map(lambda v: v[0].cpu(), step)]*3).tolist()==[1, 2, 3]
    loose = DeviceMemory(8, device=device)
    loose.extend(step._replace(reward=step.reward.double()))
    assert loose.fetch([0]).reward.dtype==torch.float32


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing():
    world, memory = filled(4, 3, 16)
    step, state = world.step(), [o.clone() for o in memory._ring.columns if o is not None]
    wrong = {'reward': step.reward[:3], 'state.who': step.state | dict(who=step.state['who'][:, :2]), 'action': step.action.int(), 'terminated': step.terminated.long(),
             'truncated': np.zeros(4, bool), 'state.eye': step.state | dict(eye=step.state['eye'].to('meta'))}
    for name, v in wrong.items():
        with refused(name, (ValueError, TypeError)): memory.extend(step._replace(**{name.split('.')[0]: v}))
    with refused('chunk', got='3'): memory.extend(tree_map(lambda v: v[:3], step))
    with refused('streams', TypeError, got='[0, 1, 2, 3]'): memory.extend(step, streams=[0, 1, 2, 3])
    with refused('chunk', TypeError): memory.extend([step])
    with refused('td_errors', got='torch.float32 of shape (1,)'): memory.update_priorities([8, 9], [1.])
    with refused('bs', got='0'): memory.sample(0)
    assert memory.n_added==12 and all(map(torch.equal, state, [o for o in memory._ring.columns if o is not None]))
    fresh = DeviceMemory(10, device='cpu')
    with refused('max_sz', got='10'): fresh.extend(step)
    assert fresh.layout is None and len(fresh)==0


REFUSED = [
    (dict(path='here'), TypeError, words('no option of a device', name='path')), (dict(codec='lz4'), TypeError, 'codec'), (dict(dedup='auto'), TypeError, 'dedup'),
    (dict(windows={}), TypeError, 'windows'), (dict(max_draws=3), TypeError, 'max_draws'), (dict(sampler=RankBased()), TypeError, ('sampler', 'Uniform, Proportional or AgeWeighted', None)),
    (dict(sampler=LAP()), TypeError, 'sampler'), (dict(sampler=Proportional(normalize='memory')), ValueError, 'normalize'),
    (dict(sampler=Proportional(beta=lambda k: .5)), ValueError, 'beta'), (dict(device='meta'), ValueError, ('device', "'cuda' or 'cpu'", "'meta'")),
    (dict(device='nonsense'), ValueError, 'device'), (dict(sequence=Sequence(4), n_step=3), ValueError, 'n_step'), (dict(sequence=Sequence(4), sampler=Uniform()), ValueError, 'sampler'),
    (dict(sequence=4), TypeError, 'sequence'), (dict(n_envs=0), ValueError, 'n_envs'), (dict(gamma=2.), ValueError, 'gamma'), (dict(seed=-1), ValueError, 'seed'),
    (dict(dtypes={'state': torch.int8}), ValueError, 'dtypes: state'), (dict(dtypes={'state': torch.float8_e4m3fn}), ValueError, 'dtypes: state'), (dict(dtypes={'state': 'bfloat16'}), ValueError, 'dtypes: state')]
@pytest.mark.parametrize('kw,error,what', REFUSED, ids=[next(iter(o[0])) for o in REFUSED])
def test_options_that_it_has_not_are_refused_by_name(kw, error, what):
    with about(what, error): DeviceMemory(32, **dict(device='cpu') | kw)


OPENED = [(dict(next_of={'next_state': 'reward'}), 'next_of'), (dict(next_of={'next_eye': 'eye'}), 'next_of'), (dict(max_ends=3), 'max_ends'), (dict(dtypes={'eye': torch.float16}), 'dtypes'),
          (dict(dtypes={'reward': torch.float64}), 'dtypes: reward'), (dict(sequence=Sequence(40)), ('length', 'at most 8, the rows of each stream', '40'))]
@pytest.mark.parametrize('kw,what', OPENED, ids=[str(o[1]) for o in OPENED])
def test_options_that_do_not_suit_the_first_rows_are_refused_by_name(kw, what):
    memory = DeviceMemory(32, device='cpu', **kw)
    with about(what): memory.extend(World(4).step())
    assert memory.layout is None


def test_text_copies_and_unknown_names_are_refused_by_name():
    memory = DeviceMemory(8, device='cpu')
    class Told(NamedTuple):
        reward: Any
        task: Any
    with refused('step', TypeError): memory.extend([Told(1., 'lift')])
    for copied in copy.deepcopy, pickle.dumps:
        with pytest.raises(TypeError, match=WORDS['no copy of a device']): copied(memory)
    with refused('drop', AttributeError): memory.drop([0])


# ---- bytes

def test_next_observations_cost_a_little_more_than_half():
    def nbytes(step, **kw):
        memory, n = DeviceMemory(64*256, device='cpu', **kw), len(step.reward)
        estimated = DeviceMemory.estimate(step, 64*256, **kw)
        memory.extend(step)
        assert estimated.nbytes==memory.nbytes and n==256
        return memory.nbytes
    def step(*shape, dtype=torch.float32):
        obs = torch.zeros(256, *shape, dtype=dtype)
        return Transition(obs, torch.zeros(256, 12), torch.zeros(256), obs, torch.zeros(256, dtype=torch.bool), torch.zeros(256, dtype=torch.bool))
    humanoid, robot, atari = step(235), step(48), step(4, 21, 21, dtype=torch.uint8)
    full = {k: nbytes(o, next_of=None) for k, o in dict(humanoid=humanoid, atari=atari).items()}
    assert nbytes(humanoid) <= .58*full['humanoid'] and nbytes(atari) <= .58*full['atari']
    few, many = (DeviceMemory.estimate(robot, 1 << 20, max_ends=o) for o in (1 << 14, None))
    assert few.nbytes <= .58*few.plain and many.nbytes <= .61*many.plain               # of small observations by how many ends there are
    assert nbytes(humanoid, dtypes=dict(state=torch.bfloat16, next_state=torch.bfloat16)) <= .31*full['humanoid']
    told = str(DeviceMemory.estimate(humanoid, 10**6))
    assert 'next_state' in told and DeviceMemory.estimate(humanoid, 10**6, next_of=None).chosen=='plain'


@pytest.mark.parametrize('dtype', [torch.float8_e4m3fn, torch.uint16, torch.uint32])
def test_dtypes_without_kernels_are_refused_by_name_and_nothing_is_stored(dtype):
    memory, step = DeviceMemory(16, device='cpu'), World(4).step()
    step = step._replace(state=step.state['who'].to(dtype), next_state=step.next_state['who'].to(dtype))
    with refused('state', got=str(dtype)): memory.extend(step)
    assert memory.layout is None and len(memory)==0
    memory.extend(step._replace(state=step.state.float(), next_state=step.next_state.float()))


def test_what_became_infinite_is_told(device):
    memory, flags = DeviceMemory(16, device=device, dtypes={'state': torch.float16, 'next_state': torch.float16}), torch.zeros(4, dtype=torch.bool, device=device)
    for state in torch.tensor([[1.], [1e5], [-7e4], [math.inf]]), torch.ones(4, 1):
        memory.extend(Transition(state.to(device), flags.float(), flags.float(), torch.ones(4, 1, device=device), flags, flags))
    assert memory.usage()['n_too_large']==2
    [said] = [o for o in memory.health()['warnings'] if 'float16' in o]
    assert '2 numbers' in said and '65,504' in repr(memory)
    wide = DeviceMemory(16, device=device, dtypes={'state': torch.bfloat16, 'next_state': torch.bfloat16})
    wide.extend(Transition(state.to(device)*1e5, flags.float(), flags.float(), state.to(device), flags, flags))
    assert wide.usage()['n_too_large']==0 and '65,504' not in repr(wide)


def test_what_comes_next_has_the_dtype_of_where_it_is_found(device):
    world, memory = World(4, device), DeviceMemory(16, device=device, dtypes={'state': torch.bfloat16}, max_ends=16)
    steps = [tree_map(lambda v: v, world.step()) for _ in range(6)]
    steps = [o._replace(state=o.state['who']/7, next_state=o.next_state['who']/7) for o in steps]
    for o in steps: memory.extend(o)
    batch = memory.fetch(range(8, 24))
    assert batch.next_state.dtype==torch.float32 and memory.usage()['n_unlike']==0
    assert torch.equal(batch.next_state, torch.cat([o.next_state for o in steps[2:]]).bfloat16().float())
    alone = DeviceMemory(16, device=device, dtypes={'next_state': torch.bfloat16})
    with refused('dtypes: next_state', got='torch.bfloat16'): alone.extend(steps[0])


# ---- never waits

VIEWS = {'view', '_unsafe_view', 'select', 'slice', 'expand', 'unsqueeze', 'squeeze', 'permute', 'transpose', 't', 'alias', 'detach', 'split', 'unbind', 'reshape', '_reshape_alias',
         'as_strided', 'split_with_sizes', 'lift_fresh', 'empty', 'empty_like', 'empty_strided', 'new_empty', 'new_empty_strided'}
WAITS = {'_local_scalar_dense', 'nonzero', 'masked_select', 'item', 'unique', '_unique2', 'unique_dim', 'is_nonzero', 'equal', 'repeat_interleave', 'unique_consecutive'}

class Watch(TorchDispatchMode):
    "What is launched, and which of it needs a result on the host, or has a shape that depends on one"
    def __init__(self):
        super().__init__()
        self.launched, self.waits, self.made = [], [], []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found, name = func(*args, **(kwargs or {})), func._schema.name.split('::')[1]
        if name in VIEWS: return found
        indices = tree_leaves(args[1]) if name in ('index', 'index_put', 'index_put_') else ()
        if name in WAITS or any(isinstance(o, torch.Tensor) and o.dtype==torch.bool for o in indices): self.waits.append(name)
        self.launched.append(name)
        self.made += [tuple(o.shape) for o in tree_leaves(found) if isinstance(o, torch.Tensor)]
        return found


def test_the_watch_sees_what_waits():
    x = torch.rand(4)
    for f in (lambda: float(x[0]), lambda: x[x > .5], lambda: x.nonzero(), lambda: bool(x.any()), lambda: x.unique(), lambda: x[x[0].long()]):
        with Watch() as watch: f()
        assert watch.waits


KINDS = dict(uniform=dict(), in_full=dict(next_of=None), distinct=dict(sampler=Uniform, max_ends=128), proportional=dict(sampler=Proportional), scheduled=dict(sampler=lambda: Proportional(beta=LinearSchedule(.4, 1., 9))),
             in_full_proportional=dict(sampler=Proportional, next_of=None), age=dict(sampler=lambda: AgeWeighted(99)), n_step=dict(n_step=3), windows=dict(sequence=Sequence(8)),
             prioritized_windows=dict(sequence=Sequence(8), sampler=Proportional))
MOST = dict(in_full=(8, 31, 9), in_full_proportional=(11, 68, 25), uniform=(25, 32, 9), proportional=(28, 86, 25))     # launches: extend, sample, update

def made(kind, device='cpu', **more):
    options = KINDS[kind] | more
    return filled(16, 40, 16*32, device, **options | dict(sampler=options['sampler']()) if 'sampler' in options else options)


@pytest.mark.parametrize('kind', KINDS)
def test_no_call_waits_and_shapes_stay(kind):
    world, memory = made(kind)
    shapes = []
    for _ in range(12):
        step, watches = world.step(), [Watch() for _ in range(4)]
        with watches[0]: memory.extend(step)
        with watches[1]: batch = memory.sample(64)
        td = torch.rand(batch.ids.shape)
        with watches[2]: memory.update_priorities(batch.ids, td)
        if not memory.sequence:
            with watches[3]: memory.sample_groups(2, 8)
        assert not any(o.waits for o in watches)
        shapes.append([(o.launched, o.made) for o in watches])
    assert all(o==shapes[0] for o in shapes)


@pytest.mark.parametrize('kind', MOST)
def test_few_kernels_are_launched(kind):
    flags = torch.zeros(16, dtype=torch.bool)
    step = Transition(torch.rand(16, 48), torch.rand(16, 12), torch.rand(16), torch.rand(16, 48), flags, flags)
    options = {k: v() if k=='sampler' else v for k, v in KINDS[kind].items()}
    memory = DeviceMemory(16*32, device='cpu', **options)
    for _ in range(40): memory.extend(step)
    watches = [Watch() for _ in range(3)]
    with watches[0]: memory.extend(step)
    with watches[1]: batch = memory.sample(64)
    td = torch.rand(64)
    with watches[2]: memory.update_priorities(batch.ids, td)
    launches = [len(o.launched) for o in watches]
    assert all(n <= most for n, most in zip(launches, MOST[kind], strict=True)), launches


@pytest.mark.parametrize('kind', KINDS)
def test_tensors_are_changed_in_place(kind):
    world, memory = made(kind)
    held = [o for o in (*vars(memory._ring).values(), *memory._ring.columns, *memory.sampler.tensors().values()) if isinstance(o, torch.Tensor)]
    at = [o.data_ptr() for o in held]
    for _ in range(5):
        memory.extend(world.step())
        batch = memory.sample(8)
        memory.update_priorities(batch.ids, torch.rand(batch.ids.shape))
    now = [o for o in (*vars(memory._ring).values(), *memory._ring.columns, *memory.sampler.tensors().values()) if isinstance(o, torch.Tensor)]
    assert [o.data_ptr() for o in now]==at


# ---- compiled

def whole_update(memory, weight):
    batch = memory.sample(32)
    state = batch.state['who'].flatten(1).sum(1)
    td = (batch.reward.sum(-1) if batch.reward.ndim==2 else batch.reward)*weight - state
    batch.update_priorities(td)
    return batch.ids, td, batch.weights, *tree_leaves(batch.next_state)


def alike(kind, backend, device='cpu', turns=7):
    "Compiled and eager memories draw, learn and store alike; return how many graphs were made, of the update and of extend"
    graphs = []
    def counted(gm, inputs):
        graphs.append(gm)
        return gm.forward if backend=='eager' else torch._dynamo.lookup_backend(backend)(gm, inputs)
    torch._dynamo.reset()
    (world, eager), (_, other) = (made(kind, device, compile=False) for _ in range(2))
    update, extend = (torch.compile(f, fullgraph=True, backend=counted) for f in (whole_update, lambda m, s: m.extend(s)))
    weight = torch.tensor(2., device=device)
    for k in range(turns):
        for a, b in zip(whole_update(eager, weight), update(other, weight), strict=True): torch.testing.assert_close(a, b)
        step = world.step()
        eager.extend(step)
        (other.extend if k < 2 else lambda s: extend(other, s))(step)
    n = len(graphs)
    assert other.n_added==eager.n_added and not other._counted and len(other)==len(eager)
    assert torch.equal(eager.sample(9).ids, other.sample(9).ids)
    for a, b in zip(eager.sampler.tensors().values(), other.sampler.tensors().values()): torch.testing.assert_close(a, b)
    rings = [[o for k, o in vars(m._ring).items() if isinstance(o, torch.Tensor) and k!='owners'] + [o for o in m._ring.columns if o is not None] for m in (eager, other)]
    for a, b in zip(*rings, strict=True): assert torch.equal(a[:512] if a.ndim else a, b[:512] if b.ndim else b)
    assert torch.equal(eager._ring.owners[:-1], other._ring.owners[:-1])
    torch._dynamo.reset()
    return n


MOST_KINDS = ['uniform', 'distinct', 'scheduled', 'in_full_proportional', 'age', 'n_step', 'prioritized_windows']

@pytest.mark.parametrize('kind', MOST_KINDS)
def test_draw_loss_and_update_are_one_graph_for_ever(kind, device): assert alike(kind, 'eager', device)==2


@pytest.mark.parametrize('kw', [{}, dict(n_step=2), dict(sequence=Sequence(3))], ids=str)
@pytest.mark.parametrize('draw', [lambda m: m.sample(8).reward, lambda m: m.sample(8, ('reward',)).reward, lambda m: m.sample_groups(3, 8).reward])
def test_the_first_batch_may_be_drawn_in_a_compiled_function(kw, draw):
    class New(NamedTuple):                                # of which no batch was made before
        reward: Any
        terminated: Any
    memory = DeviceMemory(64, device='cpu', **kw)
    for _ in range(9): memory.extend(New(torch.ones(4), torch.zeros(4, dtype=torch.bool)))
    torch._dynamo.reset()
    if kw.get('sequence') and draw.__code__.co_names[0]=='sample_groups': return
    assert (torch.compile(draw, fullgraph=True, backend='eager')(memory) >= 1).all()


@pytest.mark.parametrize('kind', ['prioritized_windows', 'in_full_proportional', 'distinct'])
def test_compiled_code_does_the_same(kind, device): assert alike(kind, 'inductor', device)==2


@pytest.mark.parametrize('kind', ['uniform', 'distinct', 'in_full_proportional', 'prioritized_windows'])
def test_what_a_compiled_function_changes_stays_where_it_is(kind):
    "What is changed and may move keeps CUDA graphs from mode='reduce-overhead'"
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    seen = []
    def looked_at(gm, inputs):
        about = torch._guards.TracingContext.get().fw_metadata
        changed = [i for i, o in enumerate(about.input_info) if o.mutates_data]
        seen.append((len(changed), {*changed} - {*about.static_input_indices}))
        return make_boxed_func(gm.forward)
    options = {k: v() if k=='sampler' else v for k, v in KINDS[kind].items()}
    memory, world = DeviceMemory(512, device='cpu', compile=True, **options), World(16)
    memory._store, memory._draw, memory._put = memory._stored, memory._drawn, memory._updated
    for _ in range(9): memory.extend(world.step())
    torch._dynamo.reset()
    def whole(step):
        memory.extend(step)
        return whole_update(memory, 2.)
    torch.compile(whole, fullgraph=True, backend=aot_autograd(fw_compiler=looked_at))(world.step())
    torch._dynamo.reset()
    [(n_changed, moving)] = seen
    assert n_changed >= 8 and not moving


def test_a_ninth_batch_size_is_told_once(monkeypatch):
    from torch._dynamo import config
    monkeypatch.setattr(torch, 'compile', lambda f, **kw: f)
    _, memory = filled(compile=True)
    def told(*sizes):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            with config.patch(recompile_limit=3):
                for bs in sizes: memory.sample(bs)
        return [(str(o.message), o.filename) for o in said]
    assert told(4, 5, 6, 5, 4)==[]
    [(text, where)] = told(7, 8, 9)
    assert text.startswith('sample: ') and '(7, None)' in text and where==__file__
    assert told(10)==[]


def compiled_code(f):
    "What inductor makes of a function"
    from torch._inductor.utils import run_and_get_code
    torch._dynamo.reset()
    return '\n'.join(run_and_get_code(torch.compile(f, fullgraph=True))[1])


@pytest.mark.parametrize('kind', ['uniform', 'proportional', 'prioritized_windows'])
def test_compiled_calls_copy_no_column(kind):
    "A buffer as large as what is stored would be a copy of it"
    options = {k: v() if k=='sampler' else v for k, v in KINDS[kind].items()}
    world, memory = World(16), DeviceMemory(16*1000, device='cpu', compile=False, max_ends=999, **options)
    for _ in range(20): memory.extend(world.step())
    batch, step = memory.sample(8), world.step()
    code = compiled_code(lambda: memory.update_priorities(batch.ids, batch.reward)) + compiled_code(lambda: memory.extend(step))
    torch._dynamo.reset()
    made = [int(n) for shape in re.findall(r'empty_strided_cpu\(\((\d+)', code) for n in [shape]]
    assert made and max(made) < 999, made


def test_a_memory_compiles_itself_where_asked():
    torch._dynamo.reset()
    (world, plain), (_, fast) = made('proportional'), filled(16, 0, 512, sampler=Proportional(), compile=True)
    for step in world.log: fast.extend(step)
    for _ in range(3):
        a, b = plain.sample(16), fast.sample(16)
        assert torch.equal(a.ids, b.ids) and torch.allclose(a.weights, b.weights)
        for m, batch in ((plain, a), (fast, b)): m.update_priorities(batch.ids, batch.reward)
        step = world.step()
        plain.extend(step)
        fast.extend(step)
    assert fast.n_added==plain.n_added
    torch._dynamo.reset()


@pytest.mark.skipif(not torch.cuda.is_available(), reason='this machine has no CUDA device')
@pytest.mark.parametrize('kind', KINDS)
def test_on_cuda_a_captured_update_is_replayed_a_thousand_times(kind):
    (_, eager), (_, other) = made(kind, 'cuda', compile=False), made(kind, 'cuda', compile=False)
    weight = torch.tensor(2., device='cuda')
    torch.cuda.set_sync_debug_mode('error')
    try:
        for _ in range(3):
            whole_update(eager, weight)
            whole_update(other, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph): found = whole_update(other, weight)
        for _ in range(1000): graph.replay()
        for _ in range(1000): wanted = whole_update(eager, weight)
    finally: torch.cuda.set_sync_debug_mode('default')
    for a, b in zip(found, wanted): torch.testing.assert_close(a, b)


# ---- saved and loaded

SAVED = dict(uniform=dict(), in_full=dict(next_of=None), distinct=dict(sampler=Uniform), proportional=dict(sampler=Proportional), scheduled=dict(sampler=lambda: Proportional(beta=LinearSchedule(.4, 1., 9))),
             lost=dict(max_ends=16, sampler=Proportional), age=dict(sampler=lambda: AgeWeighted(40)), n_step=dict(n_step=3), windows=dict(sequence=Sequence(4, stride=3)),
             prioritized_windows=dict(sequence=Sequence(4), sampler=lambda: Proportional(.5)), bits=dict(dtypes=None))

@pytest.mark.parametrize('kind', SAVED)
@pytest.mark.parametrize('steps', [3, 37])
def test_what_is_loaded_goes_on_alike(device, kind, steps, tmp_path):
    options = SAVED[kind]
    if 'sampler' in options: options = options | dict(sampler=options['sampler']())
    world, memory = filled(8, steps, 160, device, **options)
    if steps > 8:
        batch = memory.sample(32)
        memory.update_priorities(batch.ids, torch.rand(batch.ids.shape, device=device)*3)
    assert memory.save(tmp_path/'saved') > 0
    other = DeviceMemory.load(tmp_path/'saved', device=device)
    assert (other.n_added, other.first_id, len(other), int(other.n_stale))==(memory.n_added, memory.first_id, len(memory), int(memory.n_stale))
    for _ in range(6):
        if steps > 8 or memory.sequence is None:
            a, b = memory.sample(8), other.sample(8)
            assert all(map(torch.equal, (a.ids, a.probs, a.weights, *tree_leaves(a.astuple())), (b.ids, b.probs, b.weights, *tree_leaves(b.astuple()))))
            for o in (memory, other): o.update_priorities(a.ids, a.reward)
        step = world.step()
        memory.extend(step)
        other.extend(step)
        assert memory.first_id==other.first_id
    assert memory.usage()==other.usage()


def test_what_belongs_to_it_is_saved_with_it(device, tmp_path):
    _, memory = filled(device=device)
    memory.save(tmp_path, also=dict(n_steps=7, weights=torch.arange(3.)))
    for o in DeviceMemory.load(tmp_path, device=device), ReplayMemory.load(tmp_path):
        assert o.also['n_steps']==7 and torch.equal(o.also['weights'], torch.arange(3.))
    memory.save(tmp_path)
    assert DeviceMemory.load(tmp_path, device=device).also is None
    with refused('also', TypeError, got='list [1]'): memory.save(tmp_path, also=[1])


def test_a_snapshot_is_a_replay_memory_of_the_same_rows(device):
    world, memory = filled(8, 37, 160, device, sampler=Proportional(.7), max_ends=24, p=.2)
    ids = np.arange(memory.first_id, memory.n_added)
    memory.update_priorities(torch.from_numpy(ids).to(device), torch.rand(len(ids), device=device))
    host = memory.snapshot()
    assert (host.first_id, host.n_added)==(memory.first_id, memory.n_added) and host.check_valid() and memory.first_id > memory.n_added - 160
    same_rows(host.fetch(ids), world, ids.tolist())
    assert np.allclose(host.sampler.priorities[ids % host.max_sz], memory.sampler.priorities(ids % 160))
    assert host.episode(ids[-1]).ids.tolist()==memory.episode(ids[-1]).ids.tolist()
    step = world.step()
    assert host.max_sz==160 and host.sample(9).ids.min() >= memory.first_id
    host.extend(tree_map(lambda v: v.cpu(), step))                # it goes on by itself
    assert host.n_added==memory.n_added + 8 and len(DeviceMemory(8, device=device).snapshot())==0


@pytest.mark.parametrize('sampler', [lambda: Uniform(True), lambda: Proportional(.7), lambda: AgeWeighted(40)])
@pytest.mark.parametrize('max_ends', [160, 16])
def test_a_replay_memory_loads_it_and_back(sampler, max_ends, tmp_path):
    world, memory = filled(8, 37, 160, sampler=sampler(), max_ends=max_ends)
    memory.update_priorities(np.arange(150, 290), np.random.default_rng(0).random(140))
    memory.save(tmp_path/'device')
    host = ReplayMemory.load(tmp_path/'device')
    ids = np.arange(memory.first_id, memory.n_added)
    assert (host.first_id, host.n_added)==(memory.first_id, memory.n_added) and host.check_valid()
    same_rows(host.fetch(ids), world, ids.tolist())
    assert host.next(ids).tolist()==memory.next(ids).tolist() and host.previous(ids).tolist()==memory.previous(ids).tolist()
    if memory.sampler.prioritized:
        p = memory.sampler.priorities(ids % 160)
        assert np.array_equal(host.sampler.priorities[ids % host.max_sz], p) and host.sampler.largest==float(memory.sampler.largest)
    host.save(tmp_path/'host')
    assert host.max_sz==160 and set(host.sample(8).ids.tolist()) <= {*ids.tolist()}
    back = DeviceMemory.load(tmp_path/'host', device='cpu', max_ends=160)
    assert (back.first_id, back.max_sz)==(memory.first_id, 160)
    same_rows(back.fetch(ids), world, ids.tolist())
    if memory.sampler.prioritized: assert torch.equal(back.sampler.leaves[ids % 160], memory.sampler.leaves[ids % 160])
    back.extend(world.step())
    same_rows(back.fetch(np.arange(290, 304)), world, range(290, 304))


def test_streams_that_do_not_take_turns_are_refused(tmp_path):
    host, rng = ReplayMemory(60, seed=0), np.random.default_rng(0)
    for _ in range(50): host.add(SimpleStep(0., 0, 0., env_id=int(rng.integers(3))))
    host.save(tmp_path)
    with pytest.raises(ValueError, match=WORDS['streams that take turns']): DeviceMemory.load(tmp_path, device='cpu')
    with pytest.raises(CheckpointError): DeviceMemory.load(tmp_path/'nowhere', device='cpu')


def test_lost_rows_are_told_by_health():
    _, memory = filled(8, 37, 160, max_ends=8, p=.3)
    [found] = [o for o in memory.health()['warnings'] if 'max_ends' in o]
    assert f'{160 - len(memory)} of' in found


# ---- environments of tensors, pipes, learners

class Items(IterDataPipe):
    def __init__(self, items): self.items = items
    def __iter__(self): return iter(self.items)


class Clocks(gym.vector.VectorEnv):
    "Clocks that show tensors; each has its own end, terminated for some, truncated for others"
    def __init__(self, mode, n=6, device='cpu', tells=True):
        self.metadata = dict(autoreset_mode=mode)
        self.num_envs, self.device, self.tells, self.resets = n, device, tells, 0
        self.single_action_space, self.single_observation_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Box(0, 99, (1,))
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, n)
    def reset(self, seed=None, options=None):
        mask = (options or {}).get('reset_mask')
        if mask is None:
            self.end, self.t = torch.arange(3, 3 + self.num_envs, device=self.device), torch.zeros(self.num_envs, device=self.device)
            self.resets += 1
        else: self.t = torch.where(mask, 0., self.t)
        return self.t[:, None].clone(), {}
    def step(self, action):
        assert isinstance(action, torch.Tensor) and action.shape==(self.num_envs, 2) and action.dtype==torch.float32
        self.t = self.t + 1
        ended, shown = self.t==self.end, self.t[:, None].clone()
        odd = torch.arange(self.num_envs, device=self.device) % 2==1
        info = {}
        if self.metadata['autoreset_mode']==AutoresetMode.SAME_STEP:
            if self.tells: info = dict(final_obs=shown)
            self.t = torch.where(ended, 0., self.t)
        return self.t[:, None].clone(), action.sum(1), ended & ~odd, ended & odd, info


@pytest.mark.parametrize('mode', [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_a_stepper_keeps_tensors_on_their_device_and_finds_last_observations(device, mode):
    env = Clocks(mode, device=device)
    def agent(states): return torch.full((len(states), 2), .25, device=states.device, dtype=torch.float64)
    stepper, seen = GymStepper([env], agent=agent), torch.zeros(6)
    for k, chunk in zip(range(40), stepper):
        assert isinstance(chunk, Batch) and chunk.state.device.type==device and chunk.step_type is SimpleStep
        assert torch.equal(chunk.state[:, 0].cpu(), seen) and torch.equal(chunk.next_state[:, 0].cpu(), seen + 1)
        assert torch.equal(chunk.step_n.cpu(), seen.long()) and torch.equal(chunk.total_reward.cpu(), .5*(seen + 1)) and torch.equal(chunk.env_id.cpu(), torch.arange(6))
        ended = seen + 1==torch.arange(3, 9)
        assert torch.equal((chunk.terminated | chunk.truncated).cpu(), ended) and not (chunk.terminated[1::2].any() or chunk.truncated[::2].any())
        assert torch.equal(chunk.episode_n.cpu(), torch.tensor([k//n for n in range(3, 9)]))
        seen = torch.where(ended, 0, seen + 1)
    assert env.resets==1 and stepper.state_dict()['episodes']==[[(40//n) + (40 % n > 0) for n in range(3, 9)]]


def test_tensor_environments_that_hide_last_observations_are_refused():
    with pytest.raises(ValueError, match=WORDS['no final observation']):
        for _ in zip(range(9), GymStepper([Clocks(AutoresetMode.SAME_STEP, tells=False)])): pass
    with refused('final_obs', got="'no'"): GymStepper([Clocks(AutoresetMode.SAME_STEP)], final_obs='no')
    with refused('actions', got='(6,)'): next(iter(GymStepper([Clocks(AutoresetMode.SAME_STEP)], agent=lambda s: torch.zeros(6))))


class Walks(gym.vector.VectorEnv):
    "Walks from anywhere, cut off at random, which then show only where the next one begins"
    num_envs, metadata = 6, dict(autoreset_mode=AutoresetMode.SAME_STEP)
    single_action_space, single_observation_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Box(-99, 99, (3,))
    action_space = gym.vector.utils.batch_space(single_action_space, 6)
    def __init__(self, kind): self.kind, self.rng = kind, np.random.default_rng(0)
    def reset(self, **kw):
        self.x = self.rng.normal(size=(6, 3)).astype(np.float32)*9
        return self.kind(self.x), {}
    def step(self, action):
        ended = self.rng.random(6) < .2
        self.x = np.where(ended[:, None], self.rng.normal(size=(6, 3))*9, self.x + .1).astype(np.float32)
        return *map(self.kind, (self.x, np.ones(6, np.float32), ended & False, ended)), {}

@pytest.mark.parametrize('kind', [torch.from_numpy, np.copy])
def test_where_last_observations_are_hidden_the_resets_may_be_taken(kind):
    stepper, memory, before = GymStepper([Walks(kind)], agent=lambda states: kind(np.zeros((6, 2), np.float32)), final_obs='reset'), ReplayMemory(600, seed=0), None
    with pytest.warns(UserWarning, match=WORDS['no final observation']) as said:
        for _, chunk in zip(range(80), stepper):
            assert before is None or torch.equal(chunk.state, before)
            before = chunk.next_state
            memory.extend(chunk)
    assert len(said)==1
    assert memory.health()['n_wrong_ends'] and any('final_obs' in o for o in memory.health()['warnings'])


@pytest.mark.parametrize('prioritized', [False, True])
def test_a_pipe_with_a_device_drives_a_learner(device, prioritized):
    source = GymStepper([Clocks(AutoresetMode.SAME_STEP, device=device)], agent=lambda states: states.new_zeros(6, 2))
    if prioritized: replay = source.prioritized_replay(bs=16, max_sz=120, min_sz=30, steps_per_batch=3, device=device, max_ends=60, seed=0)
    else: replay = source.experience_replay(bs=16, max_sz=120, min_sz=30, steps_per_batch=3, device=device, max_ends=60, seed=0, replace=True)
    model = torch.nn.Linear(1, 1).to(device)
    learn = Learner(model, replay.loader(), lambda batch, model, target: (model(batch.state)[:, 0] - batch.reward)**2).fit(40)
    assert isinstance(replay.memory, DeviceMemory) and replay.memory.n_added==30 + 3*39 + 3 and len(learn.losses)==40
    if prioritized: assert len(replay.memory.sampler.leaves[:120].unique()) > 20
    assert learn.n_steps==replay.memory.n_added and learn.returns and set(learn.returns) <= {0.}
    assert replay.health()['n_unlike']==0 and len(replay)==len(replay.memory)


def test_a_pipe_is_saved_with_its_memory(tmp_path):
    def pipe(world): return Items([world.step() for _ in range(30)]).prioritized_replay(bs=8, max_sz=64, min_sz=16, steps_per_batch=4, seed=0, device='cpu')
    a, b = pipe(World(4)), pipe(World(4))
    for _, batch in zip(range(5), a): batch.update_priorities(batch.reward)
    a.save(tmp_path)
    b.load(tmp_path)
    assert b.n_batches==a.n_batches and torch.equal(a.sample().ids, b.sample().ids)
    used, fresh = pipe(World(4)), pipe(World(4))
    for _ in zip(range(9), used): pass
    for o in (used, fresh): o.load(tmp_path)
    assert used.memory.n_added==fresh.memory.n_added and torch.equal(used.sample().ids, fresh.sample().ids)


@pytest.mark.parametrize('pipe,kw', [('rank_replay', {}), ('experience_replay', dict(path='x')), ('experience_replay', dict(dedup=None)), ('experience_replay', dict(codec='lz4'))])
def test_pipes_refuse_what_no_device_has(pipe, kw):
    with refused(next(iter(kw), 'sampler'), TypeError): getattr(Items([]), pipe)(bs=1, device='cpu', **kw)


def test_torchrl_gets_the_columns_without_a_copy(device):
    pytest.importorskip('torchrl')
    from fastrl_replay.interop.torchrl import as_tensordict
    from tensordict import TensorDict
    memory, step = DeviceMemory(64, device=device, seed=0), World(4, device).step()
    plain = step._replace(state=step.state['who'], next_state=step.next_state['who'])
    memory.extend(TensorDict(plain._asdict(), [4]))
    batch = memory.sample(16)
    data = as_tensordict(batch, index=batch.ids)
    assert data['next', 'reward'].shape==(16, 1) and data['next', 'terminated'].dtype==torch.bool and data.device is None or data.device.type==device
    for key, name in dict(state='state', action='action').items(): assert data[key].data_ptr()==batch[name].data_ptr()
    assert data['next', 'state'].data_ptr()==batch.next_state.data_ptr() and torch.equal(data['index'], batch.ids)


# ---- the benchmark

def test_the_benchmark_runs_small(root):
    pytest.importorskip('torchrl')
    ran = subprocess.run([sys.executable, root/'benchmarks'/'device.py', '--small', '--eager'], capture_output=True, text=True, timeout=240)
    assert ran.returncode==0, ran.stderr
    for word in ('extend 1,024', 'sample 1,024', 'update 1,024', 'flat', 'blocks_64', 'fasttd3', 'host and copy'): assert word in ran.stdout
