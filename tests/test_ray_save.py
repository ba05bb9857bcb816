"""What a memory of several shards saves, what half-stored chunks leave, and frames that travel once. Without Ray: the shards are in this process."""
import os
from typing import NamedTuple

import numpy as np
import pytest
from harness import check_resume

from fastrl_replay.batch import Batch
from fastrl_replay.ray import RayMemory
from fastrl_replay.ray import memory as module
from fastrl_replay.ray.shard import Ledger, LocalShard, Sender, Shard, ShardLost, from_wire, to_wire
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.saving import CheckpointError
from fastrl_replay.storage.records import Records
from refusals import refused
from words import WORDS, words


class Row(NamedTuple):
    value: int
    terminated: bool
    truncated: bool
    env_id: int


def rows(start, n, env=0, every=10):
    k = np.arange(start, start + n)
    return Batch.of(Row(k, k % every == every - 1, k < 0, np.full(n, env)))


class Sight(NamedTuple):
    state: np.ndarray
    action: int
    next_state: np.ndarray
    env_id: int


def sights(start, m, envs=1, ahead=1, last=False, shape=(12, 12), stack=4):
    "Stacks of frames of `envs` streams in turns; a frame is known by its stream and its number"
    k, env = start + np.arange(m)//envs, np.arange(m) % envs
    def stacks(first):
        numbers = first[:, None] + np.arange(stack) if stack else first
        world = np.random.default_rng(7).integers(0, 255, (envs, start + m + ahead + 9, *shape), np.uint8)
        found = world[env[:, None] if stack else env, numbers]
        return np.ascontiguousarray(np.moveaxis(found, 1, -1)) if last else found
    return Batch.of(Sight(stacks(k), k*envs + env, stacks(k + ahead), env))


def loaded(folder): return RayMemory.load(folder, place='here')


def small(**options): return RayMemory(3, 90, Proportional(beta=.6), place='here', seed=5, **options)


def same(a, b):
    for name in ('value', 'ids', 'probs', 'weights'): assert (getattr(a, name) == getattr(b, name)).all(), name


def shard_with(sender, n, key=None):
    for k in range(n): sender.push(rows(10*k, 10))
    sender.flush()


# ---- the ledger is saved with the rows

def test_what_is_sent_again_after_a_load_meets_the_ledger_of_that_time(tmp_path):
    shard = Shard(0, 1000)
    for seq in (1, 2, 3): shard.push(7, seq, seq, rows(10*seq, 10))
    shard.save(tmp_path/'a')
    shard.push(7, 4, 4, rows(40, 10))
    for load in ('same', 'new'):
        again = shard if load == 'same' else Shard(9, 1000)
        info = again.load(tmp_path/'a')
        assert (info.number, info.n_added) == (0, 30)
        assert again.push(7, 3, 3, rows(30, 10))[:2] == (4, 20) and again.n_doubled >= 1          # it was stored, and isn't again
        assert again.push(7, 4, 3, rows(40, 10))[:2] == (5, 30)
        assert again.memory.fetch(np.arange(40)).value.tolist() == list(range(10, 50))
        again.load(tmp_path/'a')
        assert again.push(7, 6, 6, rows(60, 10))[:2] == (7, 30)           # the pusher knows 4 and 5 to be stored: it goes on at 6


def test_a_ledger_with_a_cut_chunk_is_saved(tmp_path):
    ledger = Ledger(0, tmp_path/'a')
    for key, m, before in ((1, 5, 0), (2, 4, 0), (1, 3, 0)): ledger.begin(key, 1 + (m == 3), 10*m, m, before)
    cut = Ledger()
    cut.set_state(ledger.get_state())
    assert cut.known == ledger.known
    file = (tmp_path/'a').read_bytes()
    for n_added in (30, 31, 33, 40, 44):
        (tmp_path/'a').write_bytes(file)
        opened = Ledger(n_added, tmp_path/'a')
        again = Ledger(0, tmp_path/f'{n_added}')
        again.set_state(opened.get_state())
        assert again.known == opened.known and again.wants(1, 2)[1] == {30: 0, 31: 1}.get(n_added, 0)
        assert Ledger(n_added + 5, tmp_path/f'{n_added}').known == opened.known             # rows of others since


@pytest.mark.parametrize('kind', ['rows', 'frames'])
@pytest.mark.parametrize('between', [False, True])
def test_a_process_killed_in_the_middle_of_a_chunk(tmp_path, monkeypatch, kind, between):
    "The second half is stored when the chunk comes again, whether or not others stored rows meanwhile"
    make = rows if kind == 'rows' else lambda start, n: sights(start, n)
    field = 'value' if kind == 'rows' else 'action'
    chunk, path, put = make(0, 900), tmp_path/'shard', Records._put
    if not (pid := os.fork()):
        left = [2]
        def dying(self, rows):
            left[0] -= 1
            if left[0] < 0: os._exit(0)
            put(self, rows[:100])
            os._exit(0) if left[0] == 0 else None
        try:
            shard = Shard(0, 5000, path=path)
            shard.push(3, 1, 1, make(5000, 20))
            monkeypatch.setattr(Records, '_put', dying)
            shard.push(7, 1, 1, chunk)
        finally: os._exit(1)
    os.waitpid(pid, 0)
    shard = Shard(0, 5000, path=path)
    there = shard.memory.n_added - 20
    assert 0 < there < 900
    if between: shard.push(3, 2, 2, make(6000, 5))
    wanted, first, info = shard.push(7, 1, 1, chunk)
    assert wanted == 2 and first == (-1 if between else 20) and info.n_added == 920 + 5*between
    held = getattr(shard.memory.recent(len(shard.memory)), field)
    assert held[held < 900].tolist() == list(range(900)) and shard.memory.check_valid()
    assert shard.push(7, 1, 1, chunk)[0] == 2 and shard.n_doubled == 1
    shard.close()


# ---- the whole

def use(memory, k):
    "Things done with a memory: always the same for the same memory"
    out, rng = [], np.random.default_rng(memory.n_added)
    for _ in range(k):
        n = memory.n_added
        ids = memory.extend(rows(n, 7, int(rng.integers(3))))
        batch = memory.sample(12)
        out += [ids, batch, memory.update_priorities(batch.ids, rng.random(12)), memory.n_stale, memory.next(ids), memory.previous(ids), memory.episode(int(ids[0]))]
    assert memory.check_valid()
    return out


def test_a_memory_resumes(tmp_path):
    def saved(memory):
        folder = tmp_path/str(len(list(tmp_path.iterdir())))
        memory.save(folder)
        return str(folder)
    def said(folder):
        memory = RayMemory.load(folder, place='here')              # which ends with the last reference to it
        shards = sorted(memory.shards.places, key=lambda o: o.info.number)
        return [(o.info._replace(pid=0, cpu=0., rate=0.), o.handle.shard.memory.state_dict()) for o in shards]
    check_resume(small, use, steps=(0, 1, 7), after=5, through=lambda s: s, save=saved, load=lambda o, s: o.restore(s), said=said)


def test_one_shard_has_an_order_of_time():
    one, several = RayMemory(0, 50), small()
    for o in (one, several): o.extend(rows(0, 70))
    assert one.recent(9).value.tolist() == list(range(61, 70)) and one.recent(2, ['value']).layout.fields == ('value',)
    with refused('k', got='51'): one.recent(51)
    with refused('recent', NotImplementedError): several.recent(1)


def test_a_second_save_writes_what_is_new_and_the_first_stands_until_then(tmp_path, monkeypatch):
    memory = RayMemory(2, 40_000, Proportional(), place='here', seed=1)
    memory.extend(rows(0, 30_000))
    first = memory.save(tmp_path, dict(n=1))
    memory.extend(rows(30_000, 100))
    files = sorted(o.name for o in tmp_path.rglob('*'))
    def failing(*a): raise OSError('the disk is full')
    with monkeypatch.context() as patch:
        patch.setattr(module, 'save_state', failing)
        with pytest.raises(OSError, match='full'): memory.save(tmp_path, dict(n=2))
    assert sorted(o.name for o in tmp_path.rglob('*')) == files
    old = loaded(tmp_path)
    assert len(old) == 30_000 and old.restore(tmp_path) == dict(n=1)
    with monkeypatch.context() as patch:                       # killed before the whole is replaced: what is left is no harm
        patch.setattr(module, 'save_state', failing)
        patch.setattr(module.shutil, 'rmtree', lambda *a, **kw: None)
        with pytest.raises(OSError, match='full'): memory.save(tmp_path)
    assert len(loaded(tmp_path)) == 30_000 and len(list(tmp_path.glob('shard-*'))) == 4
    second = memory.save(tmp_path, dict(n=3))
    assert second < .5*first and len(list(tmp_path.glob('shard-*'))) == 2          # priorities are written whole
    again = loaded(tmp_path)
    assert len(again) == 30_100 and again.restore(tmp_path) == dict(n=3) and again.check_valid()
    same(again.sample(50), memory.sample(50))
    third = again.save(tmp_path)                               # also into the folder it was loaded from
    assert third < .5*first


def test_damage_is_named(tmp_path):
    memory = small()
    memory.extend(rows(0, 80))
    memory.save(tmp_path)
    files = [o for o in tmp_path.rglob('*') if o.is_file()]
    assert len(files) >= 4
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[:-3] + b'x' + content[-2:])
        with pytest.raises(CheckpointError, match=words('it is named', name=file.name)): loaded(tmp_path)
        file.unlink()
        with pytest.raises(CheckpointError): loaded(tmp_path)
        file.write_bytes(content)
    assert len(loaded(tmp_path)) == 80
    with pytest.raises(CheckpointError, match=WORDS['no folder']): loaded(tmp_path/'else')
    for n in (2, 3):
        with pytest.raises(ValueError, match=WORDS['a shard of another kind']): RayMemory(n, 90, place='here').restore(tmp_path)


# ---- saved with n shards, loaded with m

class Ended(NamedTuple):
    value: int
    terminated: bool
    truncated: bool


def contents(memory):
    "By value, of all that is stored: the values after and before in its episode, all of its episode, and its priority"
    found = {}
    for place in memory.shards.places:
        shard = place.handle.shard.memory
        if not len(shard): continue
        ids = np.arange(shard.first_id, shard.n_added)
        p = shard.sampler.priorities[ids % shard.max_sz] if shard.sampler.prioritized else np.ones(len(ids))
        values = shard.fetch(ids).value.numpy()
        def beside(name): return [-1 if i < 0 else int(values[i - shard.first_id]) for i in getattr(shard, name)(ids, within_episode=True)]
        for value, after, before, i, own in zip(values.tolist(), beside('next'), beside('previous'), ids, p.tolist()):
            assert value not in found
            found[value] = after, before, tuple(shard.episode(int(i)).value.tolist()), own
    return found


def used(n, sampler, full=False, flags=Row):
    "Shards that hold episodes of five streams, some of them open, some without their beginnings; and priorities of all sizes"
    memory, rng = RayMemory(n, 120*n, sampler, place='here', seed=2), np.random.default_rng(n)
    made = [0]*5
    while memory.shards.known_added < (300 if full else 70)*n:
        env, m = int(rng.integers(5)), int(rng.integers(1, 9))
        k = made[env] + np.arange(m)
        value, ends = env + 5*k, k % 13 == 12
        memory.extend(Batch.of(Row(value, ends & (env < 3), ends & (env >= 3), np.full(m, env)) if flags is Row else Ended(value, ends, ends & False)),
                      streams=None if flags is Row else np.full(m, env))
        made[env] += m
    if memory.sampler.prioritized:
        ids = memory.sample(60*n).ids
        memory.update_priorities(ids, rng.random(60*n)**4*9)
    memory.update_priorities([5 << 44], [1.])
    return memory


@pytest.mark.parametrize('n, m', [(2, 3), (3, 1), (4, 2), (1, 4)])
@pytest.mark.parametrize('sampler, flags', [(Proportional(alpha=.7, beta=.6), Row), (Uniform(), Row), (Proportional(), Ended)])
def test_saved_with_n_shards_and_loaded_with_m(tmp_path, n, m, sampler, flags):
    "The same rows, each with its priority and its neighbours; what was counted goes on; ids from before are stale"
    memory = used(n, sampler, flags=flags)
    before, ids = contents(memory), memory.sample(40).ids
    memory.save(tmp_path, dict(n=1))
    again = RayMemory.load(tmp_path, place='here', shards=m, step=memory.layout.example)
    after, rows = contents(again), int(memory.max_sz//m)
    assert after == before and len(again.shards.places) == m and again.max_sz == memory.max_sz and again.check_valid()
    assert (again.n_added, again.n_stale, again.first_id) == (memory.n_added, memory.n_stale, memory.first_id)
    stats, was = again.stats(), memory.stats()
    assert np.isclose(sum(stats['mass']), sum(was['mass']), rtol=1e-9) and max(stats['largest']) == max(was['largest'])
    assert min(stats['fill']) > .5*len(again)/m and max(stats['fill']) <= rows and min(stats['number']) == n
    assert again.sampler.n_batches == memory.sampler.n_batches and not set(ids >> 44) & set(stats['number'])
    assert again.update_priorities(ids, np.ones(40)) == 0 and again.n_stale == memory.n_stale + 40
    new = again.add(Row(10**6, False, False, 77) if flags is Row else Ended(10**6, False, False))
    if sampler.prioritized: assert dict(zip(*(o.tolist() for o in drawn_all(again))))[new] == max(was['largest'])
    back = RayMemory.load(tmp_path, place='here')                     # the folder is as it was
    assert contents(back) == before and back.stats()['number'] == list(range(n)) and back.restore(tmp_path) == dict(n=1)


def drawn_all(memory):
    "All ids, and their priorities"
    held = [o.handle.shard.memory for o in memory.shards.places]
    return [np.concatenate(o) for o in zip(*((np.arange(h.first_id, h.n_added) | p.info.number << 44, h.sampler.priorities[np.arange(h.first_id, h.n_added) % h.max_sz])
                                             for h, p in zip(held, memory.shards.places)))]


@pytest.mark.parametrize('n, m', [(4, 2), (2, 3), (3, 1)])
def test_full_shards_find_room_in_others_to_the_last_row(tmp_path, n, m):
    "No row is lost where there is just room for all; what was older is overwritten earlier, whichever shard held it"
    memory = used(n, Proportional(), full=True)
    before = contents(memory)
    memory.save(tmp_path)
    again = RayMemory.load(tmp_path, place='here', shards=m)
    after = contents(again)
    assert after.keys() == before.keys() and len(again) == 120*n == len(memory)
    assert all(after[k][3] == before[k][3] for k in before)
    assert sum(after[k][2] == before[k][2] for k in before) > .8*len(before)             # a few episodes are cut where a shard is full
    old = {v: k/120 for o in memory.shards.places for k, v in enumerate(o.handle.shard.memory.recent(120).value.tolist())}
    for o in again.shards.places:
        held = o.handle.shard.memory.recent(o.info.fill).value.tolist()
        assert np.corrcoef(np.arange(len(held)), [old[v] for v in held])[0, 1] > .75
    with refused('max_sz', expected=f'at least {120*n}, the steps that were saved', got=str(120*n//2)):
        RayMemory.load(tmp_path, place='here', shards=m + 1, max_sz=120*n//2)
    other = RayMemory(m, 120*n + m, Proportional(), place='here', seed=0)
    other.extend(rows(0, 5))
    with refused('restore', got='one with 5 steps'): other.restore(tmp_path)


def test_after_another_number_of_shards_the_law_is_that_of_the_priorities(tmp_path):
    memory = used(3, Proportional(alpha=.8, beta=1.))
    memory.save(tmp_path)
    leaves = {k: o[3]**.8 for k, o in contents(memory).items()}
    again = RayMemory.load(tmp_path, place='here', shards=2)
    total, n = sum(leaves.values()), 0
    times = dict.fromkeys(leaves, 0)
    for batch in again.take(again.ask(600, 64)):
        expected = np.array([leaves[k]/total for k in batch.value.tolist()])
        assert np.allclose(batch.probs, expected, rtol=1e-5)
        for k in batch.value.tolist(): times[k] += 1
        n += 64
    mean = np.array([leaves[k]/total*n for k in leaves])
    got = np.array([times[k] for k in leaves])
    common = mean > 5
    assert ((got - mean)[common]**2/mean[common]).mean() < 1.2 and common.sum() > 100


# ---- more and fewer shards

def test_shards_come_and_go():
    memory = RayMemory(2, 200, Proportional(), place='here', seed=0)
    ids = memory.extend(rows(0, 150))
    memory.add_shards(2)
    assert memory.max_sz == 400 and len(memory) == 150
    ids = np.concatenate([ids, *(memory.extend(rows(a, 10)) for a in range(150, 450, 10))])
    assert set((ids >> 44).tolist()) == {0, 1, 2, 3} and min(memory.stats()['n_added']) >= 40
    memory.retire_shard(0)
    held = memory.shards.places[0].info.n_added
    more = memory.extend(rows(450, 200))
    assert memory.max_sz == 300 and 0 not in (more >> 44) and memory.shards.places[0].info.n_added == held
    assert (memory.sample(64).ids >> 44 == 0).any() and memory.stats()['retired'] == [True, False, False, False]
    while not memory.shards.places[0].dropped:                        # its rows are old once as many came as the others hold
        assert memory.n_added < 450 + 300 + 20
        memory.extend(rows(memory.n_added, 10))
    batch = memory.sample(64)
    assert not (batch.ids >> 44 == 0).any() and len(memory) == 300 and memory.n_added - memory.first_id == 300
    assert memory.update_priorities(ids[ids >> 44 == 0], np.ones((ids >> 44 == 0).sum())) == 0 and memory.check_valid()
    memory.retire_shard(1, drop=True)
    with refused('ids'): memory.fetch(ids[ids >> 44 == 1][:1])
    memory.retire_shard(2, drop=True)
    with refused('retire_shard'): memory.retire_shard(3)
    assert set((memory.sample(9).ids >> 44).tolist()) == {3} and memory.health()['n'] == len(memory) == 100


def test_a_pusher_leaves_a_retired_shard_and_loses_nothing():
    "What the old shard has acknowledged stays there, all else goes to the new one"
    old, new, lost = Shard(0, 1000), Shard(1, 1000), [False]

    class Flaky(LocalShard):
        def get(self, ref, timeout):
            if lost[0]: raise ShardLost('no answer')
            return super().get(ref, timeout)

    sender = Sender(lambda failed: Flaky(new if old.retired and failed and not lost[0] else old), in_flight=8)
    for k in range(4): sender.push(rows(10*k, 10))
    old.retire()
    for k in range(4, 7): sender.push(rows(10*k, 10))
    sender.flush()
    assert old.memory.n_added == 40 and new.memory.n_added == 30
    assert [*old.memory.recent(40).value.tolist(), *new.memory.recent(30).value.tolist()] == list(range(70))


def test_a_shard_that_has_ended_is_lost_to_those_that_still_call_it():
    "Between its end and that of its process: a pusher that asks for room goes elsewhere, and doesn't fail"
    shard = Shard(0, 100)
    assert from_wire(shard.call(to_wire(('room', (7, 5))))) == 0
    shard.close()
    for call in (('room', (7, 5)), ('push', (7, 1, 1, rows(0, 5))), ('info', ())):
        with pytest.raises(ShardLost, match=words('a shard has ended', k=0)): shard.call(to_wire(call))


# ---- frames once

def travelling(sent): return sum(map(len, sent)) if isinstance(sent, list) else len(sent)


@pytest.mark.parametrize('how', [dict(), dict(envs=8), dict(ahead=3), dict(last=True), dict(ahead=9), dict(stack=0, shape=(30, 30))])
def test_frames_travel_once_and_arrive_to_the_bit(how):
    chunk = sights(0, 64, **dict(shape=(40, 40)) | how)
    sent = to_wire(chunk)
    for a, b in zip(chunk.arrays(), from_wire(sent).arrays()): assert a.dtype == b.dtype and a.shape == b.shape and (a == b).all()
    nbytes, each = travelling(sent), 900 if 'stack' in how else 1600
    different = len({f.tobytes() for s in (chunk.state, chunk.next_state) for row in (np.moveaxis(s.numpy(), -1, 1) if how.get('last') else s.numpy())
                     for f in (row if 'stack' not in how else [row])})
    assert different*each < nbytes < (different + 3)*each + 64*80           # a few are beyond the rows that are looked at
    if how in ({}, dict(last=True)): assert nbytes < 1.15*64*each


def test_episodes_and_odd_rows_arrive_too():
    parts = [sights(a, m).arrays() for a, m in ((0, 7), (100, 1), (30, 9))]
    arrays = [np.concatenate(o) for o in zip(*parts)]
    arrays[0][3] = 9                                            # a state that has nothing to do with what came before
    chunk = Batch.of_arrays(sights(0, 1).layout, arrays)
    got = from_wire(to_wire(chunk))
    assert all((a == b).all() and b.flags.writeable for a, b in zip(arrays, got.arrays()))
    assert from_wire(to_wire(chunk[:0])).layout is got.layout


def test_a_shard_stores_and_draws_packed_frames():
    shard, chunk = Shard(0, 500), sights(0, 64)
    for seq in (1, 2): shard.push(1, seq, seq, from_wire(to_wire(chunk)))
    _, (ids, _, drawn) = shard.serve(counts=[20, 10])
    got = from_wire(sent := to_wire(drawn))
    assert len(ids) == 30 and travelling(sent) < .75*sum(a.nbytes for a in drawn.arrays())
    at = got.action.numpy()[:30]
    assert (got.state.numpy()[:30] == chunk.state.numpy()[at]).all() and (got.next_state.numpy()[:30] == chunk.next_state.numpy()[at]).all()
    memory = RayMemory(2, 500, place='here', seed=0)
    memory.extend(chunk)
    batch = memory.sample(32)
    assert (batch.state.numpy() == chunk.state.numpy()[batch.action]).all() and (batch.next_state.numpy() == chunk.next_state.numpy()[batch.action]).all()
    assert memory.sample(8, ['state']).state.shape == (8, 4, 12, 12)


# ---- how it stands

def test_warnings_say_what_is_wrong():
    memory = RayMemory(4, 400, Proportional(alpha=1.), place='here', seed=0)
    ids = memory.extend(rows(0, 300))
    assert memory.health()['warnings'] == []
    memory.update_priorities(ids[ids >> 44 == 2], np.full((ids >> 44 == 2).sum(), 50.))
    found = memory.health()
    assert len(found['warnings']) == 1 and 'shard 2 has 9' in found['warnings'][0] and abs(sum(found['share']) - 1) < 1e-9
    shard = memory.shards.places[1].handle.shard
    shard.n_capped, shard.n_chunks = 5000, 10
    for k, seconds in enumerate((10, 10, 10, 30)):
        shard = memory.shards.places[k].handle.shard
        shard.memory.extend(rows(0, 200))
        shard.began = shard.began[0] - seconds, 0
    place = memory.shards.places[0]
    memory.shards.look_for_lost = lambda: None
    memory.shards.n_lost, place.live, place.since, place.handle = 7, False, place.since - 20, LocalShard(None)
    said = '\n'.join(memory.health()['warnings'])
    for part in ('shard 0 has not answered for', 'keeps steps for', 'actors wait for the learner', '7 priority updates were lost'): assert part in said, said
    memory.show()
