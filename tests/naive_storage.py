"A storage that is too simple to be wrong: an array for each leaf, a list of streams, and loops. It keeps the protocol `Storage`"
from types import SimpleNamespace

import numpy as np

from fastrl_replay.batch import DRAWN, Batch, as_kind, as_tensor
from fastrl_replay.steps import Layout, encode
from fastrl_replay.storage.request import windows_of


class NaiveStorage:
    def __init__(self, max_sz, layout):
        self.max_sz, self.layout, self.n_added = max_sz, layout, 0
        self.columns = [np.zeros((max_sz, *o.shape), o.dtype) for o in layout.leaves]
        self.streams = [None]*max_sz

    nbytes = property(lambda self: sum(a.nbytes for a in self.columns))
    first_id = property(lambda self: max(0, self.n_added - self.max_sz))
    def ids(self): return range(self.first_id, self.n_added)
    def id_in(self, slot): return next((id for id in self.ids() if id % self.max_sz==slot), -1)
    def add(self, step): return self.put(self.accept([step]))

    def accept(self, chunk, streams=None):
        "A list of (stream, leaves), which has a length and slices as it is"
        leaves = self.layout.leaves
        if isinstance(chunk, list):
            rows = [[encode(o, v) for o, v in zip(leaves, self.layout.values(step))] for step in chunk]
        else:
            values = self.layout.values(chunk.astuple() if isinstance(chunk, Batch) else chunk)
            rows = list(zip(*(encode(o, v, (len(values[0]),)) for o, v in zip(leaves, values))))
        return list(zip(self.whose(chunk, rows, streams), rows))

    def whose(self, chunk, rows, streams):
        given = np.zeros(len(rows), int) if isinstance(streams, str) and streams=='one' else None if streams is None else np.asarray(streams)
        if given is not None and (given.shape!=(len(rows),) or given.dtype.kind not in 'iu'): raise ValueError('streams: expected one for each row')
        if self.layout.stream_leaf is not None: return [int(row[self.layout.stream_leaf]) for row in rows]
        if given is None and isinstance(chunk, Batch): given = chunk.streams
        if given is None: return [0]*len(rows) if isinstance(chunk, list) else list(range(len(rows)))
        return given.tolist()

    def put(self, rows):
        first = self.n_added
        for stream, row in rows:
            slot = self.n_added % self.max_sz
            for column, v in zip(self.columns, row): column[slot] = v
            self.streams[slot] = stream
            self.n_added += 1
        return first

    def ask(self, n, fields=None, header=DRAWN, length=None, windows=()):
        layout, slots = self.layout if fields is None else self.layout.select(fields), np.zeros((n,) if length is None else (n, length), np.int64)
        probs, weights = (np.zeros(n, np.float32) if o in header else None for o in ('probs', 'weights'))
        mask, learn = (np.zeros(slots.shape, bool) if o in header else None for o in ('mask', 'learn'))
        offsets = np.array([o for _, many in windows for o in many], np.int64)
        around, is_pad = (np.zeros((n, len(offsets)), kind) if windows else None for kind in (np.int64, bool))
        return SimpleNamespace(layout=layout, slots=slots, flat=slots.reshape(-1), probs=probs, weights=weights, mask=mask, learn=learn, length=length,
                               windows=windows, offsets=offsets, around=around, is_pad=is_pad)

    def read(self, request):
        slots, at = request.slots, {o.path: a for o, a in zip(self.layout.leaves, self.columns)}
        if request.mask is not None: request.mask[:] = slots >= 0
        layout = request.layout if request.length is None else windows_of(request.layout, request.length)
        tensors, first, where = [], 0, {}
        for field, many in request.windows:
            where[field], first = request.around[:, first:first + len(many)], first + len(many)
            layout = windows_of(layout, len(many), fields=(field,))
        for o in request.layout.leaves:
            column = at[o.path][where.get(o.path[0], slots)]
            if o.path[0] not in where: column[slots < 0] = 0
            tensors.append(as_tensor(column, o.bits_of))
        request.flat[:] = [self.id_in(slot) for slot in request.flat]
        header = dict(ids=request.slots, probs=request.probs, weights=request.weights, mask=request.mask, learn=request.learn, _is_pad=request.is_pad)
        return as_kind(Batch.of_tensors(layout, tensors, max_sz=self.max_sz, **header), Batch, windows=request.windows)

    def follow(self, slots, length, back=False):
        found = np.full((len(slots), length), -1)
        for i, slot in enumerate(slots):
            id = self.id_in(slot)
            others = [] if id < 0 else [o for o in self.ids() if self.streams[o % self.max_sz]==self.streams[slot]]
            line = [o for o in others[::-1] if o <= id] if back else [o for o in others if o >= id]
            found[i, :len(line)] = line[:length]
        return found
    def numbers(self, field):
        k = self.layout.leaf(field)
        return None if k is None or self.layout.leaves[k].shape else self.columns[k]

    def get_state(self, since=0):
        ids = [id for id in self.ids() if id >= since]
        rows = [(self.streams[id % self.max_sz], [a[id % self.max_sz].copy() for a in self.columns]) for id in ids]
        return dict(layout=self.layout.to_plain(), n_added=self.n_added, since=max(since, self.first_id), rows=rows)

    def set_state(self, pieces):
        pieces = list(pieces)
        if any(Layout.from_plain(o['layout'])!=self.layout for o in pieces): raise ValueError('state: steps of another layout')
        if any(b['since']!=a['n_added'] for a, b in zip(pieces, pieces[1:])): raise ValueError('state: rows are missing')
        self.n_added = pieces[0]['since']
        for o in pieces: self.put(o['rows'])
    def check_valid(self): return all(self.streams[id % self.max_sz] is not None for id in self.ids())
    def flush(self): pass
    def close(self): self.columns = self.streams = None
