"""A memory in several shards, without Ray: the ledger, the law of the draws, and a naive twin.

The shards are in this process here; tests/test_ray_cluster.py has them in Ray actors, and kills them."""
import copy, heapq, subprocess, sys
from typing import NamedTuple

import numpy as np
import pytest

from fastrl_replay.batch import Batch
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.ray import RayMemory, memory as module
from fastrl_replay.ray.memory import SHIFT, Dealer, Drawing, shares, systematic
from fastrl_replay.ray.shard import Directory, Ledger, LocalShard, Sender, Shard, ShardLost, from_wire, to_wire
from fastrl_replay.samplers.more import LAP
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from refusals import refused
from words import WORDS, words


class Step(NamedTuple):
    value: int
    terminated: bool
    truncated: bool
    env_id: int


def chunk(values, ends=(), env=0):
    values = np.asarray(values, np.int64)
    return Batch.of(Step(values, np.isin(values, ends), values < 0, np.broadcast_to(np.asarray(env, np.int64), len(values))))


# ---- the ledger

def crashes(before, after):
    "The ledger's bytes at each moment of one write: word by word, in the order in which they are written, the key last"
    changed = np.argwhere((before != after).any(-1))
    assert len(changed) == 1
    (at,), image = changed[0], before.copy()
    yield image.copy()
    for k in (1, 2, 3, 4, 0):
        image[at, k] = after[at, k]
        yield image.copy()


@pytest.mark.parametrize('seed', range(3))
def test_a_chunk_is_stored_once_whenever_the_process_is_killed(seed, tmp_path, monkeypatch):
    "Pushers at random; a kill between any two stores, in the ledger's write or after any row; then all is sent again"
    monkeypatch.setattr('fastrl_replay.ray.shard.ENTRIES', 7)           # a new file every few chunks
    rng, file = np.random.default_rng(seed), tmp_path/'ledger'
    stored, ledger, sent = [], Ledger(0, file), dict.fromkeys((11, 12, 13), 0)
    for _ in range(60):
        key, m = int(rng.choice(list(sent))), int(rng.integers(1, 6))
        sent[key] += 1
        seq, rows = sent[key], [(key, sent[key], i) for i in range(m)]
        if ledger.n_entries == len(ledger.entries):
            check_resend(np.fromfile(file, np.int64), stored, key, seq, rows, rng, tmp_path)
            ledger = Ledger(len(stored), file)                          # killed just after the new file took its place
        before = ledger.entries.copy()
        ledger.begin(key, seq, len(stored), m, 0)
        after = ledger.entries.copy()
        images = [(o, 0) for o in crashes(before, after)] + [(after, k) for k in range(m + 1)]
        for image, k in images:
            check_resend(image, [*stored, *rows[:k]], key, seq, rows, rng, tmp_path)
        stored += rows
        if rng.random() < .1: ledger = Ledger(len(stored), file)


def check_resend(image, stored, key, seq, rows, rng, folder):
    "Open the ledger of a crash, let another pusher store in between, open it again; the chunk that is sent again is there once"
    (folder/'copy').write_bytes(image.tobytes())
    ledger = Ledger(len(stored), folder/'copy')
    if rng.random() < .5:
        ledger.begin(99 if 99 in ledger.known else 13, 1000, len(stored), 2, 0)
        stored = [*stored, ('other', 0), ('other', 1)]
        ledger = Ledger(len(stored), folder/'copy')
    if key == 13 and ledger.wants(13, 0)[0] == 1001: return      # it was the other one
    wanted, before = ledger.wants(key, seq)
    assert wanted in (seq, seq + 1)
    if wanted == seq: stored = [*stored, *rows[before:]]
    assert [o for o in stored if o[:2] == (key, seq)] == rows


@pytest.mark.parametrize('mapped', [False, True])
def test_no_pusher_is_forgotten(mapped, tmp_path, monkeypatch):
    "A ledger that is full begins another file; what it knows is there when it is opened again, and in what it saves"
    monkeypatch.setattr('fastrl_replay.ray.shard.ENTRIES', 300)
    file = tmp_path/'ledger' if mapped else None
    ledger = Ledger(0, file)
    for n in range(3000): ledger.begin(n + 1, 1 + n % 5, n, 1, 0)
    other = Ledger()
    other.set_state(ledger.get_state())
    for o in (ledger, other, Ledger(3000, file) if mapped else ledger):
        assert len(o.known) == 3000 and all(o.wants(n + 1, 1)[0] == 2 + n % 5 for n in range(3000))
    assert ledger.wants(1, 9) == (9, 0)            # a load took back what the pusher knows to be stored


@pytest.mark.parametrize('seed', range(4))
def test_a_sender_and_a_shard_that_loses_calls_and_answers(seed):
    "Calls vanish, answers vanish, the limit is closed at times: every chunk is stored once, in order"
    rng, shard = np.random.default_rng(seed), Shard(0, 10_000)

    class Flaky(LocalShard):
        def send(self, *call):
            shard.cap = shard.memory.n_added + int(rng.integers(0, 40))
            return None if rng.random() < .2 else super().send(*call)
        def get(self, ref, timeout):
            if ref is None or rng.random() < .2: raise ShardLost('lost')
            return super().get(ref, timeout)

    senders = [Sender(lambda failed: Flaky(shard), int(rng.integers(1, 5)), limited=True) for _ in range(2)]
    made = [0, 0]
    for _ in range(25):
        w, m = int(rng.integers(2)), int(rng.integers(1, 12))
        senders[w].push(chunk(range(made[w], made[w] + m), env=w))
        made[w] += m
    for o in senders: o.flush()
    rows = shard.memory.recent(len(shard.memory))
    for w in (0, 1): assert rows.value[rows.env_id == w].tolist() == list(range(made[w]))
    assert shard.n_doubled and senders[0].n_resent
    assert shard.memory.check_valid()


def test_waiting_pushers_ask_a_shard_a_hundred_times_a_second_together(monkeypatch):
    "However many there are; alone, one asks as often; and all are let in soon after there is room"
    clock = [0.]
    monkeypatch.setattr('fastrl_replay.ray.shard.time.monotonic', lambda: clock[0])
    for n in (1, 7, 90, 360):
        shard = Shard(0, 10**6, closed=True)
        due, asked = [(clock[0] + k*1e-6, k) for k in range(n)], []
        begin, opened = clock[0], clock[0] + 20
        while due:
            clock[0], key = heapq.heappop(due)
            asked.append(clock[0] - begin)
            if clock[0] > opened: shard.cap = 64*n
            wait = shard.room(key, 64)
            if wait: heapq.heappush(due, (clock[0] + wait, key))
            assert clock[0] < opened + .011*n + .1
        early = [t for t in asked if 8 < t <= 20]
        assert 80 < len(early)/12 < 120 and not shard.waiting


def test_what_travels_as_bytes_arrives_unchanged():
    "A chunk, an answer, a dict: few bytes, also with their layout; large arrays stay arrays, for Ray to share"
    m = 20_000
    for value in (chunk(range(50)), chunk(range(m)), Shard(1, 10).info(), dict(a=[1, None, np.arange(3.)])):
        sent = to_wire(value)
        assert isinstance(sent, list if isinstance(value, Batch) and len(value) == m else bytes)
        got = from_wire(sent)
        if not isinstance(value, Batch): assert str(got) == str(value)
        else: assert got.layout is value.layout and all((a == b).all() and a.dtype == b.dtype for a, b in zip(got.arrays(), value.arrays()))
    assert len(to_wire(chunk(range(1)))) < 1500


def test_what_the_memory_refuses_is_not_asked_for_again():
    shard = Shard(0, 100)
    sender = Sender(lambda failed: LocalShard(shard), in_flight=1)
    sender.push(chunk(range(4)))
    with refused('priorities', got='-1.0 at 0'):
        sender.push(chunk(range(4, 8)), np.full(4, -1.))
    sender.push(chunk(range(8, 12)))
    assert shard.memory.recent(8).value.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]


def test_pushers_take_turns_at_the_shards_that_take_steps(monkeypatch):
    "They begin apart; who has chunks at a shard that can't be started stays there, others pass it over"
    directory = Directory('replay', 3, dict(max_sz=80), 'here')
    assert [directory.assign() for _ in range(4)] == [0, 1, 2, 3]
    assert [directory.turn(k)[::2] for k in range(5)] == [(0, 10), (1, 10), (2, 10), (0, 10), (1, 10)]
    directory.grow(4)
    directory.retire(1, False)
    assert [directory.turn(k, True)[0] for k in range(4)] == [0, 2, 2, 3]
    def find(k):
        if k == 2: raise ShardLost('it waits for its node')
        return k, k, None
    monkeypatch.setattr(directory, 'find', find)
    assert [directory.turn(k)[0] for k in range(4)] == [0, 3, 3, 3]
    with pytest.raises(ShardLost): directory.turn(2, True)
    directory.end()
    with pytest.raises(ShardLost): directory.turn(0)


# ---- the law

def test_systematic_counts():
    rng = np.random.default_rng(0)
    for _ in range(50):
        q = rng.dirichlet(np.full(rng.integers(1, 6), .5))
        bs = int(rng.integers(1, 200))
        n = systematic(q, bs, 4000, rng)
        assert (n.sum(1) == bs).all() and (n >= 0).all() and (abs(n - bs*q) < 1 + 1e-9).all()
        assert (abs(n.mean(0) - bs*q) < 5*.5/4000**.5).all()


MASSES = 1., 5., .2, 2.
FILLS = 250, 250, 160, 50


def unlike(beta=1., cls=Drawing, sampler=None):
    "Four shards of unlike fill and mass; the values are 0, 1, … in order of the shards"
    memory = RayMemory(4, 1000, sampler or Proportional(alpha=1., beta=beta), place='here', seed=0)
    memory.drawing.__class__ = cls
    rng, a, leaves = np.random.default_rng(1), 0, []
    for place, m, mass in zip(memory.shards.places, FILLS, MASSES):
        p = rng.uniform(.5, 1.5, m)*mass
        place.handle.shard.memory.extend(chunk(range(a, a + m)), p)
        leaves.append(p)
        a += m
    memory.refresh()
    return memory, np.concatenate(leaves)


def judged(memory, leaves, jump=False, batches=600, bs=128):
    "χ²/df of the draws against the law of one memory, and z of a weighted mean, with masses that jump in between if `jump`"
    n, P = len(leaves), leaves/leaves.sum()
    f, counts, means = np.sin(np.arange(n)/40) + (np.arange(n) < 250), np.zeros(n), []
    for k in range(batches//10):
        for batch in memory.take(memory.ask(10, bs)):
            v = batch.value.numpy()
            counts[v] += 1
            w = 1/(n*batch.probs.numpy().astype(float))
            assert np.allclose(batch.weights.numpy(), w/w.max(), rtol=1e-5)
            means.append((w*f[v]).mean())
        if jump: change(memory, (8, 1/8)[k % 2])
    expected = batches*bs*P
    wide = expected > 5
    chi = ((counts - expected)[wide]**2/expected[wide]).sum()/wide.sum()
    return chi, (np.mean(means) - f.mean())/(np.std(means)/len(means)**.5)


def change(memory, factor):
    "Another learner's updates, which this client doesn't know of when it plans the next draw"
    m = memory.shards.places[0].handle.shard.memory
    m.update_priorities(np.arange(len(m)), m.sampler.priorities*factor)


class EqualShares(Drawing):
    def plan(self, n, bs):
        counts, q = super().plan(n, bs)
        return systematic(np.full(4, .25), bs, n, self.rng), np.full(4, .25)


class OwnShareAlone(Drawing):
    def joined(self, asked, parts): return super().joined(asked._replace(q=np.full(4, .25)), parts)


class KnownTotals(Drawing):
    "P = leaf/known total, although the shard drew by the mass that it has now"
    def plan(self, n, bs):
        counts, self.q = super().plan(n, bs)
        self.total = self.shards.known('mass').sum()
        return counts, self.q
    def joined(self, asked, parts):
        now = self.shards.known('mass')
        return super().joined(asked._replace(q=now/self.total), parts)


def test_the_law_is_that_of_one_memory():
    chi, z = judged(*unlike())
    assert chi < 1.25 and abs(z) < 4


def test_weights_are_unbiased_with_masses_out_of_date(): assert abs(judged(*unlike(), jump=True)[1]) < 4


def test_equal_shares_are_noticed(): assert judged(*unlike(cls=EqualShares))[0] > 3


def test_weights_of_the_own_share_alone_are_noticed(): assert abs(judged(*unlike(cls=OwnShareAlone))[1]) > 6


def test_weights_of_known_totals_are_noticed(): assert abs(judged(*unlike(cls=KnownTotals), jump=True)[1]) > 6


def test_uniform_batches_are_those_of_one_memory():
    "No row twice in a batch, all rows alike, and the number from a shard has the variance of a draw without replacement"
    memory, _ = unlike(sampler=Uniform())
    n, counts, first = sum(FILLS), np.zeros(sum(FILLS)), []
    for batch in memory.take(memory.ask(1500, 128)):
        v = batch.value.numpy()
        assert len(set(v.tolist())) == 128 and (batch.weights == 1).all()
        counts[v] += 1
        first.append((v < 250).sum())
    e = 1500*128/n
    assert .8 < ((counts - e)**2).sum()/(e*(1 - 128/n))/n < 1.2
    share = 250/n
    assert .85 < np.var(first)/(128*share*(1 - share)*(n - 128)/(n - 1)) < 1.15
    assert np.allclose(batch.probs, 1/n)


def test_weights_normalized_by_the_memory():
    memory, leaves = unlike(sampler=Proportional(alpha=1., beta=.5, normalize='memory'))
    batch = memory.sample(200)
    assert np.allclose(batch.weights, (leaves.min()/leaves[batch.value])**.5, rtol=1e-5)


def test_lap_has_weights_of_one():
    memory, _ = unlike(sampler=LAP())
    assert (memory.sample(50).weights == 1).all()


# ---- the memory

def twin(memory, seed, ops=200):
    "Random operations on a memory and on a dict: after each, the memory holds what the dict does"
    rng, held, n = np.random.default_rng(seed), {}, 0
    for _ in range(ops):
        what = rng.integers(5)
        if what < 2 or not n:
            m = int(rng.integers(1, 9))
            ids = memory.extend(chunk(range(n, n + m), ends=range(7, 10**6, 8), env=rng.integers(0, 3, m)))
            held |= dict(zip(ids.tolist(), range(n, n + m)))
            n += m
        elif what == 2:
            batch = memory.sample(int(rng.integers(1, 20)))
            assert [held[i] for i in batch.ids.tolist()] == batch.value.tolist()
            check_probs(memory, batch)
            batch.update_priorities(rng.normal(size=len(batch)))
        elif what == 3:
            ids = rng.choice(list(held), min(len(held), 10), replace=False)
            living = alive(memory, ids)
            assert memory.update_priorities(ids, rng.normal(size=len(ids))) == living.sum()
        else:
            ids = np.array(list(held))
            living = alive(memory, ids)
            assert living.sum() == len(memory) and memory.n_added == n
            assert memory.fetch(ids[living]).value.tolist() == [held[i] for i in ids[living].tolist()]
            for i in ids[~living].tolist(): del held[i]
            if len(ids[~living]): assert memory.update_priorities(ids[~living][:3], np.ones(len(ids[~living][:3]))) == 0
        assert memory.check_valid()


def alive(memory, ids):
    first = {o.info.number: o.info.first_id for o in memory.shards.places}
    return np.array([i & (1 << SHIFT) - 1 >= first[i >> SHIFT] for i in np.asarray(ids).tolist()])


def check_probs(memory, batch):
    "P of each row is its leaf over the sum of all leaves"
    masses = {o.info.number: o.handle.shard.memory.sampler for o in memory.shards.places}
    total = sum(o.mass() for o in masses.values())
    held = {k: o.priorities for k, o in masses.items()}
    for i, p in zip(batch.ids.tolist(), batch.probs.tolist()):
        sampler = masses[i >> SHIFT]
        leaf = held[i >> SHIFT][(i & (1 << SHIFT) - 1) % sampler.max_sz]**sampler.alpha
        assert abs(p*total/leaf - 1) < 1e-5


@pytest.mark.parametrize('shards', [0, 3])
def test_a_memory_and_its_naive_twin(shards): twin(RayMemory(shards, 60, Proportional(), place='here', seed=shards), shards)


def test_one_shard_draws_what_one_memory_draws_by_law():
    "The same rows, priorities and probabilities as a ReplayMemory; only the random numbers differ"
    ray, one = RayMemory(0, 100, Proportional(alpha=.6, beta=.4), seed=0), ReplayMemory(100, Proportional(alpha=.6, beta=.4), seed=0)
    for m in (ray, one):
        ids = m.extend(chunk(range(130)))
        m.update_priorities(ids[-50:], np.linspace(0, 3, 50))
        m.add(Step(500, False, False, 0), 7.)
    batches = ray.take(ray.ask(200, 64)), [one.sample(64) for _ in range(200)]
    chances = [{v: (p, w) for b in drawn for v, p, w in zip(*(o.tolist() for o in b.columns('value', 'probs', 'weights')))} for drawn in batches]
    both = chances[0].keys() & chances[1].keys()
    assert len(both) > 90
    assert all(abs(chances[0][v][0]/chances[1][v][0] - 1) < 1e-5 for v in both)
    assert ray.n_stale == one.n_stale and len(ray) == len(one)


def test_episodes_stay_on_one_shard_and_shards_fill_alike():
    memory = RayMemory(4, 4000, place='here', seed=0)
    ids = np.concatenate([memory.extend(chunk(range(a, a + 50), ends=range(19, 10**6, 20), env=env)) for a in range(0, 1000, 50) for env in range(3)])
    assert max(memory.stats()['n_added']) - min(memory.stats()['n_added']) <= 60
    for i in ids[::97].tolist():
        episode = memory.episode(i)
        value = memory.fetch([i]).value.item()
        assert episode.value.tolist() == list(range(value//20*20, value//20*20 + 20)) and len(set(episode.env_id.tolist())) == 1


def test_an_endless_stream_is_dealt_over_all_shards():
    memory = RayMemory(4, 1000, place='here')
    memory.extend(chunk(range(1000)))
    assert len(memory) == 1000


@pytest.mark.parametrize('seed', range(3))
def test_the_dealer_keeps_episodes_together(seed):
    rng, dealer, last = np.random.default_rng(seed), Dealer(20), {}
    for _ in range(100):
        m = int(rng.integers(1, 60))
        streams, ends = rng.integers(0, 4, m), rng.random(m) < .2
        for s, e, k in zip(streams.tolist(), ends.tolist(), dealer.deal(streams, ends, [0, 1, 2]).tolist()):
            run = last.get(s)
            if run and run[1] < 20: assert k == run[0]
            last[s] = None if e else [k, 1 if not run or run[1] >= 20 else run[1] + 1]
    assert max(dealer.dealt.values()) - min(dealer.dealt.values()) < 60


def test_batches_are_independent_and_stay_valid():
    memory = RayMemory(3, 100, Proportional(), place='here', seed=0)
    memory.extend(chunk(range(300)))
    held = [memory.sample(32) for _ in range(100)]
    said = [o.value.tolist() for o in held]
    held[0].value[:] = -1
    memory.extend(chunk(range(1000, 1100)))
    assert [o.value.tolist() for o in held[1:]] == said[1:] and (held[0].value == -1).all()
    assert min(memory.sample(90).value) >= 0


@pytest.mark.parametrize('shards', [0, 3])
@pytest.mark.parametrize('sampler', [None, Proportional(beta=.7)])
def test_saved_and_loaded_it_draws_the_same(tmp_path, shards, sampler):
    memory = RayMemory(shards, 200, sampler, place='here', seed=3)
    memory.extend(chunk(range(250), env=np.arange(250) % 5))
    memory.sample(20).update_priorities(np.arange(20.))
    memory.save(tmp_path)
    again = RayMemory.load(tmp_path, place='here', step=Step(0, False, False, 0))
    for _ in range(5):
        a, b = memory.sample(30), again.sample(30)
        for name in ('value', 'ids', 'probs', 'weights'): assert (getattr(a, name) == getattr(b, name)).all()
        a.update_priorities(np.ones(30)), b.update_priorities(np.ones(30))
    assert again.check_valid() and again.n_added == memory.n_added
    with refused('max_sz', got='78'): RayMemory(3, 77, copy.deepcopy(sampler), place='here').restore(tmp_path)
    for other in (Proportional(beta=.8), RankBased()):              # not what was saved
        with pytest.raises(ValueError, match=WORDS['the saved one']): RayMemory.load(tmp_path, other, place='here')


def test_a_path_is_reopened(tmp_path):
    with RayMemory(2, 100, Proportional(), place='here', path=tmp_path, step=Step(0, False, False, 0)) as memory:
        ids = memory.extend(chunk(range(80), ends=range(0, 80, 5)))
        memory.update_priorities(ids[:5], np.full(5, 9.))
    with RayMemory(2, 100, Proportional(), place='here', path=tmp_path) as again:
        assert again.fetch(ids).value.tolist() == list(range(80)) and again.check_valid()
        assert max(again.stats()['largest']) == 9.000001


def test_errors_change_nothing():
    memory = RayMemory(2, 100, Proportional(), place='here', seed=0)
    with pytest.raises(ValueError, match=WORDS['it is empty']): memory.sample(4)
    with refused('ids'): memory.fetch([0])
    ids = memory.extend(chunk(range(50), ends=range(9, 50, 10)))
    before = [o.info.mass for o in memory.shards.places]
    for wrong, match in [((ids[:2], [1.]), 'td_errors'), ((ids[:2], [1., np.nan]), 'td_errors'), (([ids[0], 30 | 1 << SHIFT], [2., 1.]), 'ids: shard 1')]:
        with refused(match): memory.update_priorities(*wrong)
    with refused('value', TypeError, got="str 'x'"): memory.extend([Step('x', False, False, 0)])
    with refused('priorities', got='-1.0 at 1'): memory.extend(chunk([1, 2]), [1., -1.])
    with refused('ids'): memory.fetch([1 << 50])
    memory.refresh()
    assert [o.info.mass for o in memory.shards.places] == before and len(memory) == 50
    assert memory.update_priorities([5 << SHIFT], [1.]) == 0 and memory.n_stale == 1
    with pytest.raises(ValueError, match=words('too few for a batch', bs=2000, n=710)): unlike(sampler=Uniform())[0].sample(2000)


def test_samplers_that_rank_are_refused():
    with refused('sampler'): RayMemory(2, 100, RankBased(), place='here')
    memory = RayMemory(2, 100, RankBased(), place='here', rank='shard', seed=0)
    memory.extend(chunk(range(100), ends=range(0, 100, 10)))
    memory.sample(20).update_priorities(np.arange(20.))
    assert memory.check_valid()
    for wrong in (dict(on_loss='never'), dict(rank='all'), dict(shards=-1), dict(max_sz=0)):
        with refused(next(iter(wrong))): RayMemory(**dict(shards=0, max_sz=10) | wrong)
    used = Proportional()
    ReplayMemory(10, used)
    with refused('sampler'): RayMemory(0, 10, used)


# ---- without Ray

def fresh(code): return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)


def test_nothing_imports_ray_before_it_is_needed():
    code = ("import sys, fastrl_replay.all, fastrl_replay.ray\nfrom fastrl_replay.ray import RayMemory\n"
            "RayMemory(0, 10)\nassert 'ray' not in sys.modules, 'imported'")
    ran = fresh(code)
    assert not ran.returncode, ran.stderr


def test_without_ray_there_is_one_line_of_error():
    ran = fresh("import sys\nsys.modules['ray'] = None\nfrom fastrl_replay.ray import RayMemory\n"
                "try: RayMemory(2, 10)\nexcept ImportError as e: print(e)")
    assert ran.stdout.strip() == "a memory in several processes needs the package ray: pip install -e '.[ray]'", ran.stderr


def test_shares():
    assert shares(np.array([1., 3.]), np.array([9, 1])).tolist() == [.25, .75]
    assert shares(np.zeros(2), np.array([9, 1])).tolist() == [.9, .1]
    assert module.SHIFT == 44


@pytest.mark.parametrize('shards', [0, 1, 3])
def test_what_was_saved_in_this_process_is_loaded_into_it(tmp_path, shards):
    "Without Ray, although nobody says so again"
    memory = RayMemory(shards, 90, Proportional(), place='here', seed=0)
    memory.extend(chunk(range(60)))
    memory.save(tmp_path)
    again = RayMemory.load(tmp_path)
    assert [type(o.handle) for o in again.shards.places] == [LocalShard]*max(1, shards)
    assert again.sample(20).ids.tolist() == memory.sample(20).ids.tolist()


def test_the_only_shard_gets_all_and_others_join_it():
    dealer, rows = Dealer(20), chunk(range(30), env=np.arange(30) % 3)
    assert dealer.deal_chunk(rows, [0]) == {0: slice(None)} and dealer.dealt == {0: 30}
    dealt = dealer.deal_chunk(rows, [0, 1])
    assert sorted(np.concatenate([*dealt.values()])) == [*range(30)] and dealer.dealt[1] >= 30
