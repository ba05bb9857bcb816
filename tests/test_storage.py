"""The protocol `Storage`: whatever keeps rows passes one harness, which compares it with a list of all rows ever stored after each of
thousands of random operations. `naive_storage` is the simplest thing that passes."""
import copy
import inspect
import itertools

import numpy as np
import pytest

from fastrl_replay.batch import AROUND, DRAWN, FETCHED, HEADER, Batch, as_kind
from fastrl_replay.steps import Layout, SimpleStep, Transition
from fastrl_replay.storage.base import Storage
from fastrl_replay.storage.choice import storage_for
from fastrl_replay.storage.mapped import MappedFolder
from fastrl_replay.storage.sequences import WINDOWED, SequenceBatch
from naive_storage import NaiveStorage
from twins import KINDS, column_bytes, row_bytes, stacked, step_bytes, stored


# --- worlds: endless steps, and what their rows are -------------------------------------------------------------------
def plain(rng):
    for i in itertools.count():
        yield Transition(rng.random(3, dtype=np.float32), i, rng.random(), rng.random(3, dtype=np.float32), rng.random() < .1, False)

def keyed(rng):
    for i in itertools.count():
        yield SimpleStep(rng.random(2, dtype=np.float32), np.int16(i % 99), rng.random(2, dtype=np.float32), env_id=int(rng.integers(-2, 3)) << 32)

def nested(rng):
    world = {}
    while True: yield KINDS['nested'](rng, world)

def bits(rng):
    while True: yield KINDS['brain'](rng, {})

def frames(rng, stack=3):
    line = [rng.integers(0, 255, (9, 9), dtype=np.uint8) for _ in range(stack)]
    for i in itertools.count():
        state = np.stack(line)
        line = [*line[1:], rng.integers(0, 255, (9, 9), dtype=np.uint8)] if rng.random() < .9 else [rng.integers(0, 9, (9, 9), dtype=np.uint8)]*stack
        yield Transition(state, i, 0., np.stack(line), False, rng.random() < .1)

WORLDS = dict(plain=plain, keyed=keyed, nested=nested, bits=bits, frames=frames)
OPTIONS = dict(records=dict(dedup=None), frames=dict(dedup='frames'), states=dict(dedup='next_state'))
CASES = [(kind, world) for world in WORLDS for kind in ('naive', 'records')] + [('mapped', 'plain'), ('mapped', 'keyed'), ('frames', 'frames'), ('states', 'frames'), ('states', 'plain')]


class Harness:
    "A storage of one kind, and the list of all rows that were ever put into it: stream, bytes of the leaves, reward"
    def __init__(self, kind, world, seed, max_sz, folder):
        self.kind, self.max_sz, self.rng = kind, max_sz, np.random.default_rng(seed)
        self.folders = (folder/str(k) for k in itertools.count())
        self.steps = WORLDS[world](self.rng)
        self.layout = Layout.of(next(self.steps))
        self.rows, self.held, self.snapshots = [], [], []
        self.storage = self.make()

    def make(self):
        if self.kind=='naive': return NaiveStorage(self.max_sz, self.layout)
        if self.kind!='mapped': return storage_for(self.layout, self.max_sz, **OPTIONS[self.kind])
        room = MappedFolder(next(self.folders))
        made = storage_for(self.layout, self.max_sz, dedup=None, room=room)
        room.describe(dict(max_sz=self.max_sz))
        return made

    def some(self, n): return [next(self.steps) for _ in range(n)]
    @property
    def first(self): return max(0, len(self.rows) - self.max_sz)
    @property
    def ids(self): return range(self.first, len(self.rows))
    def note(self, steps, streams):
        key = self.layout.stream_leaf
        for s, whose in zip(steps, streams): self.rows.append((whose if key is None else int(s.env_id), step_bytes(s)))

    # -- writing
    def add(self):
        [step] = self.some(1)
        assert self.storage.add(step)==len(self.rows)
        self.note([step], [0])

    def extend(self):
        m = int(self.rng.integers(1, 3*self.max_sz if self.rng.random() < .1 else 9))
        steps, form, given = self.some(m), self.rng.integers(3), self.rng.integers(4)
        chunk = steps if form==0 else stacked(steps) if form==1 else Batch.of(stacked(steps))
        streams = ['one', self.rng.integers(-3, 3, m).tolist(), None, None][given]
        whose = [0]*m if given==0 or form==0 and given > 1 else streams or range(m)
        if form==2 and given==3:
            chunk.streams = self.rng.integers(0, 4, m)
            whose = chunk.streams.tolist()
        rows = self.storage.accept(chunk, streams)
        assert len(rows)==m and self.storage.n_added==len(self.rows)
        cut = sorted(self.rng.integers(0, m + 1, int(self.rng.integers(3))).tolist())
        for a, b in zip([0, *cut], [*cut, m]):
            if b > a: assert self.storage.put(rows[a:b] if cut else rows)==len(self.rows) + a
        self.note(steps, whose)

    def correct(self):
        "What `numbers` returns is the field itself"
        view = self.storage.numbers('reward')
        if view is None or not self.ids: return
        id, value = int(self.rng.choice(self.ids)), np.float32(self.rng.random())
        view[id % self.max_sz] = value
        k = [o.name for o in self.layout.leaves].index('reward')
        stream, leaves = self.rows[id]
        leaves = list(leaves)
        leaves[k] = (*leaves[k][:2], value.tobytes())
        self.rows[id] = stream, leaves
        self.snapshots.clear()

    # -- reading
    def ask(self, ids, *args, **kw):
        "A request for these ids (−1: none), in their slots"
        ids = np.asarray(ids, np.int64)
        request = self.storage.ask(len(ids), *args, **kw)
        request.slots[:] = np.where(ids < 0, -1, ids % self.max_sz)
        return request

    def drawn_ids(self, *shape):
        ids = self.rng.choice(self.ids, shape) if self.ids else np.full(shape, -1)
        return np.where(self.rng.random(shape) < self.rng.choice([0., .3, 1.], p=[.6, .3, .1]), -1, ids)

    def same(self, batch, ids):
        zeros = [(*o[:2], bytes(len(o[2]))) for o in self.rows[0][1]] if self.rows else None
        assert batch.ids.tolist()==list(ids)
        assert column_bytes(batch)==[zeros if id < 0 else self.rows[id][1] for id in ids]

    def read(self):
        if not self.rows: return
        n, header = int(self.rng.integers(1, 12)), [DRAWN, FETCHED][self.rng.integers(2)]
        ids = self.drawn_ids(n)
        request = self.ask(ids, header=header)
        p = self.rng.random(n, dtype=np.float32)
        if header is DRAWN: request.probs[:], request.weights[:] = p, p + 1
        batch = self.storage.read(request)
        del request
        self.same(batch, ids.tolist())
        assert [o for o in HEADER if getattr(batch, o, None) is not None]==list(header) and batch.layout==self.layout
        if header is DRAWN: assert batch.probs.tolist()==p.tolist() and batch.weights.tolist()==(p + 1).tolist()
        assert batch.idxs[ids >= 0].tolist()==(ids[ids >= 0] % self.max_sz).tolist()
        if self.rng.random() < .3: self.held.append((batch if self.rng.random() < .5 else batch.astuple(), column_bytes(batch)))
        if (ids >= 0).all() and not any(o.bits_of for o in self.layout.leaves): assert [row_bytes(o) for o in batch]==column_bytes(batch)

    def read_fields(self):
        if not self.rows: return
        fields = tuple(self.rng.permutation(self.layout.fields)[:self.rng.integers(1, len(self.layout.fields) + 1)].tolist())
        ids = self.drawn_ids(int(self.rng.integers(1, 12)))
        whole, part = (self.storage.read(self.ask(ids, o)) for o in (None, fields))
        assert part.layout.fields==fields and part.ids.tolist()==ids.tolist()
        assert column_bytes(part)==column_bytes(Batch.of_tensors(part.layout, part._tensors()[len(HEADER):]))
        for f in fields: assert alike(part[f], whole[f])

    def read_windows(self):
        if not self.rows: return
        n, length = (int(o) for o in self.rng.integers(1, 6, 2))
        ids = self.drawn_ids(n, length)
        batch = as_kind(self.storage.read(self.ask(ids, header=WINDOWED, length=length)), SequenceBatch, burn_in=1)
        assert batch.mask.tolist()==(ids >= 0).tolist() and batch.ids.tolist()==ids.tolist() and len(batch)==n
        rows = self.storage.read(self.ask(ids.reshape(-1)))
        for f in self.layout.fields: assert alike(batch[f], rows[f])
        for o in (batch.to('meta'), copy.deepcopy(batch), batch[:1]): assert type(o).__mro__[1] is SequenceBatch and o.burn_in==1

    def read_around(self):
        "Rows in `around` for some fields, and those in `slots` for the others"
        if not self.ids: return
        n, windows = int(self.rng.integers(1, 6)), (('reward', (-1, 0, 1)), (self.layout.fields[0], (0, 2)))
        ids, around = self.rng.choice(self.ids, n), self.rng.choice(self.ids, (n, 5))
        request = self.ask(ids, header=AROUND, windows=windows)
        request.around[:], request.is_pad[:] = around % self.max_sz, around % 2
        batch = self.storage.read(request)
        assert batch.ids.tolist()==ids.tolist() and batch.is_pad['reward'].tolist()==(around[:, :3] % 2==1).tolist()
        for f in self.layout.fields:
            where = dict(reward=around[:, :3]).get(f, around[:, 3:] if f==self.layout.fields[0] else ids)
            assert alike(batch[f], self.storage.read(self.ask(where.ravel()))[f])

    def follow(self):
        if not self.ids: return
        ids, length, back = self.drawn_ids(int(self.rng.integers(1, 9))), int(self.rng.integers(1, 7)), bool(self.rng.integers(2))
        slots = np.where(ids < 0, -1, ids % self.max_sz)
        assert self.storage.follow(slots, length, back).tolist()==[self.line(id, length, back) for id in ids.tolist()]

    def line(self, id, length, back):
        stream = [o for o in self.ids if id >= 0 and self.rows[o][0]==self.rows[id][0] and (o <= id if back else o >= id)]
        return [*(stream[::-1] if back else stream)[:length], *[-1]*max(0, length - len(stream))]

    # -- the rest
    def resume(self):
        "A state in two pieces, the first of which was written some time before, in a storage that goes on in place of this one"
        before = self.snapshots.pop(0) if self.snapshots else None
        if before is not None and before['n_added'] >= self.first:
            made = self.make()
            made.set_state(iter([before, copy.deepcopy(self.storage.get_state(before['n_added']))]))
            self.storage.close()
            self.storage = made
        self.snapshots.append(copy.deepcopy(self.storage.get_state()))

    def mislead(self):
        "Bad input raises, and leaves all as it was"
        storage, [step], field = self.storage, self.some(1), self.layout.fields[0]
        wrong = step._replace(**{field: 'no number'})
        for f in (lambda: storage.add(wrong), lambda: storage.add((1, 2)), lambda: storage.accept([step, wrong]),
                  lambda: storage.accept(stacked([step, step]), [1, 2, 3]),
                  lambda: storage.ask(3, ('unknown',)), lambda: storage.accept(stacked([step])._replace(**{field: np.zeros((2, 7, 7))}))):
            with pytest.raises((ValueError, TypeError)): f()

    def check(self):
        storage = self.storage
        assert storage.check_valid() and (storage.n_added, storage.first_id, storage.max_sz)==(len(self.rows), self.first, self.max_sz)
        assert storage.layout==self.layout and storage.nbytes > 0
        if self.ids: self.same(storage.read(self.ask(list(self.ids)[-20:])), list(self.ids)[-20:])
        for o, was in self.held: assert column_bytes(o if isinstance(o, Batch) else Batch.of(o))==was
        del self.held[:-5]

    def run(self, n):
        ways = dict(add=6, extend=4, correct=1, read=4, read_fields=2, read_windows=2, read_around=2, follow=3, resume=1, mislead=1)
        p = np.array([*ways.values()])/sum(ways.values())
        for way in self.rng.choice([*ways], n, p=p):
            getattr(self, way)()
            self.check()
        self.storage.flush()
        self.storage.close()


def alike(a, b): return [o.tobytes() for o in stored(a)]==[o.tobytes() for o in stored(b)]


@pytest.mark.parametrize('kind,world', CASES, ids=['-'.join(o) for o in CASES])
def test_every_storage_keeps_the_protocol(kind, world, tmp_path):
    for max_sz, n in ((30, 40), (7, 40), (1, 20)): Harness(kind, world, max_sz, max_sz, tmp_path/str(max_sz)).run(n)


def test_they_have_what_the_protocol_names_and_it_is_small(tmp_path):
    members = {o for o in (*vars(Storage), *Storage.__annotations__) if not o.startswith('_')}
    assert len(members) <= 17
    made = Harness('records', 'plain', 0, 5, tmp_path)
    for o in (made.storage, NaiveStorage(5, made.layout)):
        for name in members: assert hasattr(o, name), name
        for name in members:
            wanted, there = getattr(Storage, name, None), getattr(o, name)
            if callable(there) and inspect.isfunction(wanted):
                assert [*inspect.signature(there).parameters]==[*inspect.signature(wanted).parameters][1:], name
    assert len(inspect.getsource(inspect.getmodule(NaiveStorage)).splitlines()) <= 100
