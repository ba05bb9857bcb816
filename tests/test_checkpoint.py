"""Saving and loading: every kind of step and sampler, the difference between saves, damage of every sort, and strangers."""
import json
import pickle
import resource
import signal
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from fastrl_replay.checkpoint import checked_layout, memory_state, restore_memory
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.more import ERE, LAP, Combined
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.rank import RankBased
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.savefiles import FORMAT, CheckpointError, SavedState, manifest_text, read_manifest, save_state
from fastrl_replay.schedules import LinearSchedule
from fastrl_replay.steps import SimpleStep
from harness import check_resume, seen
from test_harness import SAMPLERS, Own, memory_of, use
from twins import KINDS, stacked

MORE = SAMPLERS | dict(rank=RankBased, lap=LAP, combined=Combined, ere=lambda: ERE(c_min=5, period=7),
                       falling=lambda: RankBased(.5, LinearSchedule(1., 0., 9)))


def files_of(folder): return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.fixture
def fresh_folder(tmp_path):
    count = iter(range(10**6))
    return lambda: tmp_path/f'folder{next(count)}'


@pytest.fixture
def by_files(fresh_folder):
    "Save and load by folders, for the harness: what travels is the bytes of the files"
    def save(memory):
        folder = fresh_folder()
        memory.save(folder)
        return files_of(folder)
    def load(memory, files):
        folder = fresh_folder()
        folder.mkdir()
        for name, data in files.items(): (folder/name).write_bytes(data)
        with SavedState(folder) as saved: restore_memory(memory, saved)
    return dict(save=save, load=load, through=lambda files: files)


@pytest.mark.parametrize('sampler', MORE)
def test_a_memory_goes_on_exactly(sampler, by_files): check_resume(memory_of('simple', MORE[sampler]), use, **by_files)

@pytest.mark.parametrize('kind', [o for o in KINDS if o!='simple'])
def test_a_memory_of_any_kind_of_step_goes_on_exactly(kind, by_files):
    check_resume(memory_of(kind, Proportional), use, steps=(9,), **by_files)

def test_a_sampler_of_the_users_own_goes_on_exactly(by_files): check_resume(memory_of('only', Own), use, steps=(2, 5, 9), after=4, **by_files)


@pytest.mark.parametrize('sampler', MORE)
def test_load_makes_the_memory(sampler, tmp_path):
    "Sampler, schedule, step type and options come out of the folder; the batches are the same, of the original too"
    memory = memory_of('simple', MORE[sampler])()
    use(memory, 12)
    memory.save(tmp_path)
    again = ReplayMemory.load(tmp_path)
    assert repr(again)==repr(memory) and again.recent(1).step_type is SimpleStep and again.check_valid()
    again.make = memory.make
    assert seen(use(again, 9))==seen(use(memory, 9))


def test_a_memory_that_has_seen_no_step(tmp_path):
    ReplayMemory(7, Proportional(.3), seed=2).save(tmp_path)
    memory = ReplayMemory.load(tmp_path)
    assert (len(memory), memory.max_sz, memory.sampler.alpha)==(0, 7, .3)
    memory.add(KINDS['only'](np.random.default_rng(0), {}))
    assert len(memory)==1 and memory.check_valid()


def test_what_is_of_the_users_own_is_handed_in(tmp_path):
    memory = memory_of('nested', Own)()
    use(memory, 5)
    memory.save(tmp_path)
    with pytest.raises(ValueError, match='OwnSampler'): ReplayMemory.load(tmp_path)
    step = memory[0]
    again = ReplayMemory.load(tmp_path, sampler=Own(), step=step)
    assert type(again[0]) is type(step) and seen(again[0])==seen(step)
    like = ReplayMemory.load(tmp_path, sampler=Own())[0]
    assert type(like) is not type(step) and (type(like).__name__, like._fields)==(type(step).__name__, step._fields)

    memory = ReplayMemory(9, Proportional(beta=lambda k: .5))
    memory.save(tmp_path)
    with pytest.raises(ValueError, match='schedule'): ReplayMemory.load(tmp_path)
    assert ReplayMemory.load(tmp_path, sampler=Proportional(beta=lambda k: .5)).sampler.beta(3)==.5


def test_many_streams_come_back(tmp_path):
    "More than the table of streams holds at first"
    memory, rng = ReplayMemory(500, seed=0), np.random.default_rng(0)
    for _ in range(4): memory.extend([KINDS['transition'](rng, {}) for _ in range(100)])
    memory.save(tmp_path)
    again = ReplayMemory.load(tmp_path)
    for o in (memory, again): o.extend([KINDS['transition'](np.random.default_rng(5), {}) for _ in range(100)])
    assert again.check_valid()
    assert again._array.records[['_prev', '_next']].tolist()==memory._array.records[['_prev', '_next']].tolist()


# --- the difference ---------------------------------------------------------------------------------------------------
def random_state(rng, old):
    "A state, changed a little here and there"
    if old is None or rng.random() < .1: return dict(n=0, a=rng.integers(0, 9, int(rng.integers(1, 4_000_000)), np.uint8), b={'c': rng.random((5, 3))})
    state = dict(old, n=old['n'] + 1, a=old['a'].copy())
    for _ in range(int(rng.integers(3))):
        at = int(rng.integers(len(state['a'])))
        state['a'][at:at + int(rng.integers(1, 10**int(rng.integers(1, 6))))] = rng.integers(256)
    if rng.random() < .3: state['a'][rng.integers(len(state['a']), size=2000)] += 1
    return state

def test_a_folder_holds_the_last_state_whatever_came_before(tmp_path):
    rng, state = np.random.default_rng(0), None
    for _ in range(60):
        state = random_state(rng, state)
        before = sum(p.stat().st_size for p in tmp_path.iterdir())
        written = save_state(tmp_path, state, 'test')
        with SavedState(tmp_path, 'test') as saved:
            assert seen(saved.state())==seen(state)
            size = sum(p.stat().st_size for p in tmp_path.iterdir())
            assert written >= size - before and size <= 2*saved.nbytes + 10_000


@pytest.mark.parametrize('sampler', [Uniform, Proportional, RankBased])
def test_a_second_save_writes_what_changed(sampler, tmp_path):
    memory, rng, n = ReplayMemory(200_000, sampler(), seed=0), np.random.default_rng(0), 200_000
    chunk = stacked([KINDS['transition'](rng, {}) for _ in range(1000)])
    for _ in range(210): memory.extend(chunk)
    memory.update_priorities(np.arange(10_000, 210_000), rng.random(n))
    first = memory.save(tmp_path)
    assert memory.save(tmp_path) < first/500
    for _ in range(2): memory.extend(chunk)
    memory.update_priorities(rng.choice(np.arange(memory.first_id, memory.n_added), 2000, replace=False), rng.random(2000))
    assert memory.save(tmp_path) < first/6            # of 13 MB, in blocks of one
    again = ReplayMemory.load(tmp_path)
    assert seen(again.state_dict())==seen(memory.state_dict())


# --- damage -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope='module')
def bytes_saved_twice(tmp_path_factory):
    memory, folder = memory_of('simple', Proportional, 5000)(), tmp_path_factory.mktemp('twice')
    use(memory, 40)
    memory.extend([memory.make(np.random.default_rng(k), {}) for k in range(4000)])
    memory.save(folder)
    memory.update_priorities([5, 70], [3., 4.])
    memory.save(folder)
    return files_of(folder)

@pytest.fixture
def saved_twice(bytes_saved_twice, tmp_path):
    for name, data in bytes_saved_twice.items(): (tmp_path/name).write_bytes(data)
    return tmp_path


def refused(folder, match):
    "Loading fails with these words, and a memory that was to take the state is as it was"
    victim = memory_of('simple', Proportional, 5000)()
    use(victim, 3)
    before = seen(victim.state_dict())
    with pytest.raises(CheckpointError, match=match):
        with SavedState(folder) as saved: restore_memory(victim, saved)
    assert seen(victim.state_dict())==before and victim.check_valid()
    with pytest.raises(CheckpointError, match=match): ReplayMemory.load(folder)


def test_any_flipped_bit_is_found_and_the_file_named(saved_twice):
    rng, files = np.random.default_rng(0), files_of(saved_twice)
    assert len(files)==3
    for name, data in files.items():
        for at in {0, 10, 40, len(data) - 1, len(data) - 2, *rng.integers(len(data), size=12).tolist()}:
            at %= len(data)
            (saved_twice/name).write_bytes(data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1:])
            refused(saved_twice, name)
        (saved_twice/name).write_bytes(data)
    assert len(ReplayMemory.load(saved_twice)) > 4000


@pytest.mark.parametrize('keep', [0, 1, .5, -1])
def test_a_cut_file_is_named(saved_twice, keep):
    for name, data in files_of(saved_twice).items():
        (saved_twice/name).write_bytes(data[:int(keep*len(data)) if isinstance(keep, float) else keep])
        refused(saved_twice, name)
        (saved_twice/name).write_bytes(data)


def test_a_missing_file_is_named(saved_twice):
    for name, data in files_of(saved_twice).items():
        (saved_twice/name).unlink()
        refused(saved_twice, name)
        (saved_twice/name).write_bytes(data)
    refused(saved_twice/'nothing', 'nothing')


def test_a_damaged_folder_can_be_saved_into(saved_twice):
    "The run goes on: a save writes again what it can't trust"
    memory = ReplayMemory.load(saved_twice)
    for name, at in (('blocks-1.bin', 5000), ('manifest.json', 100)):
        data = (saved_twice/name).read_bytes()
        (saved_twice/name).write_bytes(data[:at] + b'#' + data[at + 1:])
        memory.update_priorities(np.arange(4000), np.full(4000, 2.))
        memory.extend([memory[k] for k in range(1000)])
        memory.save(saved_twice)
        assert seen(ReplayMemory.load(saved_twice).state_dict())==seen(memory.state_dict())


@contextmanager
def small_files(limit):
    "No file may grow beyond `limit` bytes: to a writer, a full disk"
    before, old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try: yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize('limit', [0, 100, 5000, 200_000])
def test_a_full_disk_leaves_the_earlier_checkpoint(saved_twice, limit):
    memory, before = ReplayMemory.load(saved_twice), files_of(saved_twice)
    memory.extend([memory[k] for k in range(4000)])
    state = seen(memory.state_dict())
    with small_files(limit), pytest.raises(OSError): memory.save(saved_twice)
    assert files_of(saved_twice)==before and seen(memory.state_dict())==state
    memory.add(memory[0])
    memory.save(saved_twice)
    assert len(ReplayMemory.load(saved_twice))==len(memory)


# --- strangers --------------------------------------------------------------------------------------------------------
def forged(folder, change):
    "The same checkpoint with another manifest, checksum and all"
    manifest = read_manifest(folder/'manifest.json')
    change(manifest)
    (folder/'manifest.json').write_bytes(manifest_text(manifest))

def _set(*path, value):
    def change(manifest):
        for k in path[:-1]: manifest = manifest[k]
        manifest[path[-1]] = value
    return change

MEMORY = 'state', 'memory'
FORGERIES = dict(
    code_as_shape=_set(*MEMORY, 'array', 'layout', 'leaves', 0, 1, value=['1) or __import__("os").abort() or (1']),
    objects=_set(*MEMORY, 'array', 'layout', 'leaves', 0, 0, value='|O'),
    objects_in_an_array=_set('arrays', 'state.memory.sampler.priorities', 'dtype', value='|O'),
    no_field=_set(*MEMORY, 'array', 'layout', 'fields', 0, value='x=print(1)'),
    no_name=_set(*MEMORY, 'array', 'layout', 'name', value='A:\n import os'),
    leaf_twice=_set(*MEMORY, 'array', 'layout', 'trees', 0, value=1),
    too_full=_set(*MEMORY, 'array', 'counters', value=[2**70, 2**70 - 5000]),
    backwards=_set(*MEMORY, 'array', 'counters', value=[-4, -5]),
    far_file=_set('arrays', 'state.memory.array.records', 'blocks', 0, 'base', 0, value='../../etc/passwd'),
    short_block=_set('arrays', 'state.memory.array.records', 'blocks', 0, 'base', 2, value=8),
    negative_place=_set('arrays', 'state.memory.array.records', 'blocks', 0, 'base', 1, value=-1),
    other_shape=_set('arrays', 'state.memory.array.tails', 'shape', value=[-1]),
    unknown_sampler=_set(*MEMORY, 'sampler', 'kind', value='os.system'),
    size=_set(*MEMORY, 'sampler', 'size', value=4999),
    no_sampler=_set(*MEMORY, 'sampler', value=3),
    random=_set(*MEMORY, 'rng', value=[1, 2]),
    nothing=_set('state', value={}),
    a_list=_set('state', value=[1]),
    no_arrays=_set('arrays', value={}),
    unknown_digest=_set('digest', value='md5'),
    another_digest=_set('digest', value='crc32'),
    no_manifest=lambda manifest: manifest.clear(),
)

@pytest.mark.parametrize('forgery', FORGERIES)
def test_a_strangers_manifest_is_refused(saved_twice, forgery, monkeypatch):
    "Whole by its checksums, and asking for what it should not have"
    forged(saved_twice, FORGERIES[forgery])
    for name in ('load', 'loads', 'Unpickler'): monkeypatch.setattr(pickle, name, lambda *_: pytest.fail('unpickled something'))
    with pytest.raises(ValueError): ReplayMemory.load(saved_twice)


@pytest.mark.parametrize('field,wrong,match', [
    ('births', lambda a: np.zeros_like(a), 'born at once'), ('births', lambda a: -1 - a, 'a birth'), ('births', lambda a: a + 10**9, 'a birth'),
    ('priorities', lambda a: -a, 'priorities'), ('largest', lambda a: -1., 'largest'), ('largest', lambda a: float('nan'), 'largest'),
    ('born', lambda a: -3, 'a birth'), ('born', lambda a: 2**63 - 1, 'a birth'), ('alpha', lambda a: float('nan'), 'alpha'), ('size', lambda a: 2**40, 'numbers'),
    ('order', lambda a: a*0 - 1, None), ('order', lambda a: a*2**20, None), ('order', lambda a: a[::-1], None), ('order', lambda a: a.astype(float), None)])
def test_a_strangers_ranks_are_refused_or_made_anew(field, wrong, match, tmp_path):
    "Kernels walk along them without looking: what could lead them astray never gets there"
    memory = memory_of('simple', RankBased)()
    use(memory, 12)
    state = dict(memory=memory_state(memory))
    state['memory']['sampler'] = dict(memory.sampler.get_state(), priorities=np.ones(memory.sampler.size)) if field=='births' else memory.sampler.get_state()
    state['memory']['sampler'][field] = wrong(state['memory']['sampler'][field])
    save_state(tmp_path, state, 'memory')
    if match is not None:
        with pytest.raises(ValueError, match=match): ReplayMemory.load(tmp_path)
        return
    again = ReplayMemory.load(tmp_path)
    assert again.check_valid() and (again.sampler.ranks==memory.sampler.ranks).all()


def test_a_newest_slot_out_of_bounds_is_refused(tmp_path):
    memory = memory_of('only', Combined)()
    use(memory, 5)
    memory.save(tmp_path)
    forged(tmp_path, _set(*MEMORY, 'sampler', 'newest', value=10**9))
    with pytest.raises(ValueError, match='newest'): ReplayMemory.load(tmp_path)


def test_a_newer_format_says_so(saved_twice):
    path = saved_twice/'manifest.json'
    path.write_bytes(path.read_bytes().replace(b'"format":%d' % FORMAT, b'"format":7', 1))
    refused(saved_twice, f'format {FORMAT}, got 7')


def test_the_manifest_is_json_with_a_checksum(saved_twice):
    text = (saved_twice/'manifest.json').read_bytes()
    whole = json.loads(text)
    assert whole['format']==FORMAT and int(whole['crc32'], 16)==zlib.crc32(text[text.index(b'"manifest":') + 11:-2])
    assert whole['manifest']['kind']=='memory'


def test_what_a_state_may_hold(tmp_path):
    state = dict(none=None, flag=True, n=-2**70, x=.1, inf=float('inf'), text='ä\n', nested=[1, (2, [3.5]), {}], keys={1: 'a', (2, 3): 'b', '!x': 4},
                 a=np.arange(6, dtype='>i2').reshape(2, 3), empty=np.empty((0, 4), np.float16), scalar=np.array(3.5), c=np.ones(2, np.complex128),
                 flags=np.array([True, False]), t=torch.arange(4.).reshape(2, 2), b=torch.ones(3, dtype=torch.bfloat16), zero=torch.tensor(2.))
    save_state(tmp_path, state, 'anything')
    with SavedState(tmp_path) as saved: assert seen(saved.state())==seen(state)
    for wrong in (object(), {1}, np.array(['a']), np.array([object()]), b'x', 1j, print):
        with pytest.raises(TypeError, match='state.deep.0'): save_state(tmp_path, dict(deep=[wrong]), 'anything')
    with SavedState(tmp_path) as saved: assert seen(saved.state())==seen(state)
    with pytest.raises(CheckpointError, match='expected the state of a memory, got that of a anything'): SavedState(tmp_path, 'memory')


def test_layouts_of_every_kind_pass_the_check():
    for kind in KINDS:
        memory = memory_of(kind, Uniform)()
        memory.add(memory.make(np.random.default_rng(0), {}))
        plain = memory._array.layout.to_plain()
        assert checked_layout(json.loads(json.dumps(plain)))==json.loads(json.dumps(plain))


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path/'notes.txt').write_text('mine')
    (tmp_path/'blocks-x.bin').write_text('mine too')
    memory = memory_of('only', Uniform)()
    use(memory, 4)
    for _ in range(3): memory.save(tmp_path)
    assert (tmp_path/'notes.txt').read_text()=='mine' and Path(tmp_path/'blocks-x.bin').read_text()=='mine too'


def test_orphans_of_a_killed_save_go_with_the_next(tmp_path):
    (tmp_path/'blocks-7.bin').write_bytes(b'half a save')
    memory = memory_of('transition', Uniform)()
    use(memory, 4)
    memory.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir())==['blocks-8.bin', 'manifest.json']
    assert len(ReplayMemory.load(tmp_path))==len(memory)


# --- old ones ---------------------------------------------------------------------------------------------------------
FROZEN = (48, 20, .7, 20, [(8., 0, 4, .125), (21., 1, 3, .125), (34., 0, 3, .125), (47., 1, 2, .125)], 602.4, [39, 28, 19, 8])

@pytest.mark.parametrize('number', [1, 2])
def test_a_checkpoint_of_an_earlier_format_is_loaded(root, number):
    "It was written once and is never written again; see make_checkpoint.py beside it"
    from data.make_checkpoint import replay_of, steps
    folder = root/'tests'/'data'/f'checkpoint_v{number}'
    assert (folder/'manifest.json').read_bytes().startswith(b'{"format":%d,' % number)
    assert b'"changes"' in (folder/'manifest.json').read_bytes(), 'a block that was saved as a list of changes is part of it'
    replay = replay_of(list(steps(75)))
    replay.load(folder)
    memory = replay.memory
    assert (memory.n_added, replay.n_batches, memory.sampler.alpha, memory.sampler.n_batches)==FROZEN[:4] and memory.check_valid()
    rows = memory.recent(40)
    assert rows.step_type.__name__=='NStepSimpleStep'
    assert [(float(r.state[0]), int(r.env_id), int(r.step_n), float(r.discount)) for r in rows][::13]==FROZEN[4]
    assert memory.sampler.priorities.sum()==pytest.approx(FROZEN[5], abs=1e-9) and memory.sampler.priorities[45 % 40]==3.01
    assert replay.sample().ids.tolist()==FROZEN[6]
    assert ReplayMemory.load(folder).sampler.beta==LinearSchedule(.4, 1., 50)


def test_a_save_into_an_earlier_format_writes_all_anew(root, tmp_path):
    for name, data in files_of(root/'tests'/'data'/'checkpoint_v1').items(): (tmp_path/name).write_bytes(data)
    memory = ReplayMemory.load(tmp_path)
    memory.save(tmp_path)
    assert (tmp_path/'manifest.json').read_bytes().startswith(b'{"format":%d,' % FORMAT)
    assert sorted(files_of(tmp_path))==['blocks-3.bin', 'manifest.json'] and seen(ReplayMemory.load(tmp_path).state_dict())==seen(memory.state_dict())
