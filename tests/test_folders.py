"""The folder of a memory on disk: it takes nobody's files, follows no link, knows when it was moved, and notices damage."""
import errno
import os
import shutil
import warnings
from collections import Counter

import numpy as np
import pytest

from fastrl_replay import saving
from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.samplers.uniform import Uniform
from fastrl_replay.saving import CheckpointError, read_manifest
from fastrl_replay.steps import SimpleStep
from fastrl_replay.storage import mapped
from fastrl_replay.storage.mapped import Checksums
from faults import Calls, kill
from killing import is_whole, make_step
from test_ondisk import SAMPLERS, filled, no_warning, step_of
from words import WORDS, words

SIZE = 60

def files_in(folder):
    "Everything in a folder: bytes of files, targets of links, None for folders"
    def what(p): return os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else None
    return {p.relative_to(folder).as_posix(): what(p) for p in sorted(folder.rglob('*'))}


# --- a folder of its own ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize('name', ['level1.map', 'notes.txt', '.hidden', 'flushed.json', 'sub/x', 'manifest.json'])
def test_a_folder_of_other_things_is_refused_and_left_as_it_was(name, tmp_path):
    (tmp_path/name).parent.mkdir(exist_ok=True)
    (tmp_path/name).write_bytes(b'not yours')
    before = files_in(tmp_path)
    for _ in range(2):
        with pytest.raises((FileExistsError, CheckpointError), match=words('another folder', name=name.split('/')[0])):
            ReplayMemory(SIZE, path=tmp_path, step=step_of(0))
        assert files_in(tmp_path)==before


@pytest.mark.parametrize('there', [False, True])
def test_a_lock_of_another_program_is_not_overwritten(there, tmp_path):
    if there: filled(tmp_path).close()
    (tmp_path/'lock').write_bytes(b'{"of": "another program"}')
    before = files_in(tmp_path)
    with pytest.raises(FileExistsError, match=words('it is named', name='lock')): ReplayMemory(20, path=tmp_path)
    assert files_in(tmp_path)==before
    (tmp_path/'lock').write_bytes(b'process 12')
    ReplayMemory(20, path=tmp_path).close()


def test_a_memory_without_its_description_is_refused_not_emptied(tmp_path):
    filled(tmp_path).close()
    description = (tmp_path/'memory.json').read_bytes()
    (tmp_path/'memory.json').unlink()
    before = files_in(tmp_path)
    with pytest.raises(CheckpointError, match=WORDS['no description']): ReplayMemory(20, path=tmp_path)
    assert files_in(tmp_path)==before
    (tmp_path/'memory.json').write_bytes(description)
    assert ReplayMemory(20, path=tmp_path).n_added==30


def test_files_that_appear_between_the_opening_and_the_first_step_stay(tmp_path):
    memory = ReplayMemory(20, path=tmp_path)
    (tmp_path/'records.map').write_bytes(b'not yours')
    with pytest.raises(FileExistsError, match=words('it is named', name='records.map')): memory.add(step_of(0))
    memory.close()
    assert files_in(tmp_path).keys()=={'lock', 'records.map'} and (tmp_path/'records.map').read_bytes()==b'not yours'


CALLS = ('open', 'unlink', 'remove', 'replace', 'fsync', 'truncate', 'ftruncate', 'posix_fallocate', 'write', 'mkdir', 'rename')

def killed_at(number, path, sampler):
    "Open a memory in a child, and kill that before the call to the system of this number; did it get that far?"
    pid = os.fork()
    if not pid:
        try:
            Calls(pytest.MonkeyPatch(), number, error=kill, names=CALLS, methods=())
            memory = ReplayMemory(20, sampler(), path=path)
            memory.add(step_of(0))
        finally: os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@pytest.mark.parametrize('sampler', [Uniform, Proportional])
def test_an_opening_that_is_killed_at_any_call_is_begun_again(sampler, tmp_path, quick):
    "And so is one that finds what a killed one left, killed at the same call; a stranger's file is never touched"
    for number in range(500):
        path, other = tmp_path/str(number), tmp_path/f'{number} and another'
        again = killed_at(number, path, sampler)
        if again and path.exists():
            shutil.copytree(path, other)
            if not (other/'memory.json').exists():
                (other/'levels.map').write_bytes(b'not yours')
                before = files_in(other)
                with pytest.raises(CheckpointError, match=words('it is named', name='levels.map')): ReplayMemory(20, sampler(), path=other)
                assert files_in(other)==before
            killed_at(number, path, sampler)
        memory = ReplayMemory(20, sampler(), path=path)
        assert memory.n_added in (0, 1), 'the only step that was ever added'
        memory.add(step_of(memory.n_added))
        assert memory.check_valid() and not (path/'memory.json.opening').exists()
        memory.close()
        if not again: return
    raise AssertionError('an opening never ends')


@pytest.mark.parametrize('name', ['../outside.map', '/etc/x.map', 'records.map/../../x', 'lock', 'memory.json', '\x00.map'])
def test_a_marker_names_files_of_a_memory_only(name, tmp_path):
    (tmp_path/'outside.map').write_bytes(b'not yours')
    (tmp_path/'m').mkdir()
    saving.write_file(tmp_path/'m'/'memory.json.opening', saving.manifest_bytes(dict(files=[name])))
    with pytest.raises(CheckpointError, match=words('a damaged file', name='memory.json.opening')): ReplayMemory(20, path=tmp_path/'m')
    assert (tmp_path/'outside.map').read_bytes()==b'not yours'


# --- one writer, and no links -----------------------------------------------------------------------------------------
def test_an_earlier_version_that_locks_the_file_alone_keeps_this_one_out(tmp_path):
    filled(tmp_path).close()
    lock = saving.Lock(tmp_path/'lock', True, flags=os.O_RDWR)
    with pytest.raises(BlockingIOError): ReplayMemory.open(tmp_path)
    lock.free()
    assert ReplayMemory.open(tmp_path).n_added==30


def test_where_folders_cannot_be_locked_the_file_is(tmp_path, monkeypatch):
    real = saving.fcntl.flock
    def flock(fd, kind):
        if os.path.isdir(f'/proc/self/fd/{fd}'): raise OSError(errno.EBADF, 'NFS locks no folders')
        return real(fd, kind)
    monkeypatch.setattr(saving.fcntl, 'flock', flock)
    memory = filled(tmp_path)
    with pytest.raises(BlockingIOError): ReplayMemory(20, path=tmp_path)
    memory.close()


def test_a_system_without_locks_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, 'fcntl', None)
    monkeypatch.setattr(mapped, 'LOCKS', False)
    with pytest.warns(UserWarning, match=WORDS['no locks']): memory = ReplayMemory(20, path=tmp_path)
    memory.close()


def test_nothing_waits_for_a_memory_that_stays_open(tmp_path):
    "A save into its own folder is refused at once, a load says that nothing is saved there; a folder within it is fine"
    memory = filled(tmp_path)
    with pytest.raises(BlockingIOError, match=WORDS['a memory lies there']): memory.save(tmp_path)
    with pytest.raises(CheckpointError, match=words('a file is missing', name='manifest.json')): ReplayMemory.load(tmp_path)
    memory.save(tmp_path/'saved')
    assert ReplayMemory.load(tmp_path/'saved').n_added==30
    memory.close()
    assert ReplayMemory.open(tmp_path).n_added==30


@pytest.mark.parametrize('name', ['lock', 'records.map', 'counts.map', 'priorities.map', 'memory.json', 'flushed.json', 'state',
                                  'flushed.json.part', 'state/manifest.json.part'])
def test_no_link_is_followed(name, tmp_path):
    "What it points to is neither read as a part of the memory nor written to"
    filled(tmp_path/'m', sampler=Proportional).close()
    path, outside = tmp_path/'m'/name, tmp_path/'outside'
    if path.exists(): path.rename(outside)
    else: outside.write_bytes(b'not yours')
    path.symlink_to(outside)
    before = files_in(tmp_path)['outside'], outside.is_dir() and files_in(outside)
    with pytest.raises((OSError, CheckpointError), match=words('it is named', name=name.rsplit('/')[-1])):
        memory = ReplayMemory(20, Proportional(), path=tmp_path/'m')
        memory.add(step_of(30))
        memory.close()
    assert before==(files_in(tmp_path)['outside'], outside.is_dir() and files_in(outside)) and path.is_symlink()


def test_a_new_memory_follows_no_link(tmp_path):
    for name in ('lock', 'memory.json', 'records.map', 'memory.json.opening', 'memory.json.opening.part'):
        folder, outside = tmp_path/f'of {name}', tmp_path/f'{name} outside'
        folder.mkdir()
        outside.write_bytes(b'not yours')
        (folder/name).symlink_to(outside)
        with pytest.raises((OSError, CheckpointError), match=words('it is named', name=name)): ReplayMemory(20, path=folder, step=step_of(0))
        assert outside.read_bytes()==b'not yours'


# --- the folder is moved ----------------------------------------------------------------------------------------------
def moved(path): path.rename(path.with_name('elsewhere'))
def deleted(path): shutil.rmtree(path)
def replaced(path):
    moved(path)
    shutil.copytree(path.with_name('elsewhere'), path)
def another(path):
    moved(path)
    filled(path, 5).close()
def a_file_is_replaced(path):
    shutil.copy(path/'records.map', path/'copy')
    (path/'copy').replace(path/'records.map')

@pytest.mark.parametrize('done', [moved, deleted, replaced, another, a_file_is_replaced])
def test_a_folder_that_is_no_longer_there_is_not_flushed_into(done, tmp_path):
    memory = filled(tmp_path/'m')
    memory.flush()
    memory.add(step_of(30))
    assert memory.sampler.size==20                     # it has been told: `flush` has nothing more to store
    done(tmp_path/'m')
    before = files_in(tmp_path)
    for call in (memory.flush, memory.close, memory.close):
        with pytest.raises(OSError, match=WORDS['it was moved']): call()
    assert files_in(tmp_path)==before
    memory.add(step_of(31))                            # all is there still
    memory.save(tmp_path/'saved')
    assert ReplayMemory.load(tmp_path/'saved').n_added==32 and memory.check_valid()


def test_frames_do_not_grow_in_another_folder(tmp_path):
    "The file of frames is opened again when it grows"
    memory = ReplayMemory(3000, path=tmp_path/'m', dedup='next_state')
    def step(k): return SimpleStep(np.full(700, k, np.float32), 0, np.full(700, -k, np.float32), False, False)
    for k in range(10): memory.add(step(k))
    replaced(tmp_path/'m')
    before = os.stat(tmp_path/'m'/'frames.0.map').st_blocks
    with pytest.raises(OSError, match=WORDS['it was moved']):
        for k in range(10, 3000): memory.add(step(k))
    assert os.stat(tmp_path/'m'/'frames.0.map').st_blocks==before and memory.check_valid()


# --- damage has a name ------------------------------------------------------------------------------------------------
def test_an_earlier_state_that_is_loaded_is_not_taken_for_damage(tmp_path):
    memory = filled(tmp_path/'m', 10)
    state = memory.state_dict()
    for k in range(10, 40): memory.add(step_of(k))
    memory.flush()
    memory.load_state_dict(state)
    del memory                                     # as a kill
    with ReplayMemory.open(tmp_path/'m') as again: assert again.n_added==10 and again.check_valid()


# --- checksums --------------------------------------------------------------------------------------------------------
class Twin:
    "Rows that any id may be damaged in, and what a naive table says of each since the last flush"
    def __init__(self, max_sz): self.max_sz, self.n_added, self.reads, self.rows = max_sz, 0, 0, {}
    @property
    def first_id(self): return max(0, self.n_added - self.max_sz)
    def checksum(self, a, b):
        self.reads += b - a
        return hash(tuple(self.rows[k] for k in range(a, b))) % 2**32
    def add(self, m):
        for _ in range(m):
            self.rows[self.n_added] = int(self.n_added)
            self.n_added += 1


@pytest.mark.parametrize('max_sz,parts', [(7, 1024), (50, 10), (53, 10), (200, 1)])
def test_checksums_notice_every_row_that_changed_since(max_sz, parts, monkeypatch):
    "Whatever was damaged is noticed for as long as its run is whole, however often there is a flush"
    monkeypatch.setattr(Checksums, 'PARTS', parts)
    rng, rows, sums, size, noticed, calm = np.random.default_rng(0), Twin(max_sz), Checksums(), -(-max_sz//parts), 0, 0
    for _ in range(300):
        rows.add(int(rng.choice([0, 1, 3, max_sz//2, 2*max_sz])))
        before = rows.reads
        sums.update(rows)
        sums = Checksums([list(o) for o in sums.runs])                 # as through the file
        covered = [k for a, b, _ in sums.runs for k in range(a, b)]
        assert covered==list(range(rows.first_id, rows.n_added)) and len(sums.runs) <= parts + 2
        sums.check(rows)
        calm += rows.reads - before < 3*size + max_sz//2
        rows.add(int(rng.choice([0, 1, size])))
        whole = [k for a, b, _ in sums.runs if a >= rows.first_id for k in range(a, b)]
        if not whole: continue
        bad = int(rng.choice(whole))
        rows.rows[bad] = -1
        with pytest.raises(AssertionError, match=WORDS['damaged rows']): sums.check(rows)
        if rng.random() < .5:                                          # a flush doesn't make it good
            first = rows.first_id
            sums.update(rows)
            run = next(o for o in sums.runs if o[0] <= bad < o[1])
            if run[0]!=first or first==0:
                noticed += 1
                with pytest.raises(AssertionError, match=WORDS['damaged rows']): sums.check(rows)
        rows.rows[bad] = bad
        sums = Checksums()
        sums.update(rows)
    assert noticed > 20


def test_links_that_change_later_are_no_damage(tmp_path, quick):
    "Streams, episodes, reopenings, corrections, chunks: a checksum never says that a right row is wrong"
    rng = np.random.default_rng(0)
    memory = ReplayMemory(50, Proportional(), path=tmp_path)
    for _ in range(400):
        what, n = rng.integers(7), memory.n_added
        if what < 3: memory.add(make_step('simple', n))
        elif what==3: memory.extend([make_step('simple', n + i) for i in range(int(rng.integers(1, 70)))])
        elif what==4: memory.flush()
        elif what==5 and n: memory.correct(rng.integers(memory.first_id, n, size=2), 'truncated', bool(rng.integers(2)))
        elif what==6 and n:
            if rng.random() < .5: memory.close()
            del memory
            memory = ReplayMemory(50, Proportional(), path=tmp_path)
        assert memory.check_valid()
    memory.close()


def test_a_folder_of_an_earlier_version_is_opened_and_has_checksums_from_then_on(tmp_path):
    filled(tmp_path).close()
    note = read_manifest(tmp_path/'flushed.json')
    for k in ('runs', 'files'): del note[k]
    (tmp_path/'flushed.json').write_bytes(saving.manifest_bytes(note))
    with ReplayMemory.open(tmp_path) as memory: assert memory.check_valid() and memory.n_added==30
    assert read_manifest(tmp_path/'flushed.json')['runs']
    with ReplayMemory.open(tmp_path) as memory: assert memory.check_valid()


@pytest.mark.parametrize('runs', [3, [[0]], [[0, 5, 1], [3, 8, 1]], [[5, 5, 0]], [[0, 'x', 1]], [None], {'a': 1}])
def test_runs_that_cannot_be_are_damage(runs, tmp_path):
    filled(tmp_path).close()
    note = read_manifest(tmp_path/'flushed.json') | dict(runs=runs)
    (tmp_path/'flushed.json').write_bytes(saving.manifest_bytes(note))
    with pytest.raises(CheckpointError, match=words('a damaged file', name='flushed.json')): ReplayMemory.open(tmp_path)


# --- the power goes, and strangers ------------------------------------------------------------------------------------
PAGE, ROOM = 4096, 300

def grown(path, kind, sampler, times, rng):
    "A memory at several times: so many steps later, after a flush, after `close`, or after neither; the files of each"
    shots, memory, dedup = [], None, 'frames' if kind=='frames' else None
    for m, how in times:
        if memory is None: memory = ReplayMemory(ROOM, SAMPLERS[sampler](), path=path, seed=0, dedup=dedup)
        for _ in range(m): memory.add(make_step(kind, memory.n_added))
        if hasattr(memory.sampler, 'priorities'):
            memory.update_priorities(rng.integers(memory.first_id, memory.n_added, size=20), rng.random(20))
        if how=='flush': memory.flush()
        if how=='close': memory = memory.close()
        shots.append({p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob('*')) if p.is_file()})
    if memory is not None: memory.close()
    return shots


def mixed(a, b, rng):
    "Pages of two files, some of each"
    if len(a)!=len(b): return a if rng.random() < .5 else b
    out, share = bytearray(a), rng.random()
    for k in range(0, len(a), PAGE):
        if rng.random() < share: out[k:k + PAGE] = b[k:k + PAGE]
    return bytes(out)


def lay(files, path):
    for name, data in files.items():
        (path/name).parent.mkdir(parents=True, exist_ok=True)
        (path/name).write_bytes(data)


def is_right(memory, kind, below):
    "Is every row that a memory shows, up to this id, what its id says?"
    return is_whole(kind, memory.fetch(np.arange(memory.first_id, min(below, memory.n_added))))


def what_is_noticed(path, kind, make):
    "Open it: 'refused', 'found' by `check_valid` after a flush, or 'fine'; wrong rows that nobody noticed are an error"
    with warnings.catch_warnings(record=True):
        warnings.simplefilter('always')
        try: memory = make(path)
        except CheckpointError: return 'refused'
    assert memory.n_added >= 150, 'silently empty'
    cut = memory.power_cut
    try:
        memory.flush()
        memory.check_valid()
    except AssertionError: return 'found'
    assert is_right(memory, kind, memory.n_added if cut is None else cut.n_added), 'wrong rows that nobody noticed'
    memory.close()
    return 'fine' if cut is None else 'warned'


@pytest.mark.parametrize('kind,sampler', [('simple', 'uniform'), ('transition', 'proportional'), ('frames', 'uniform')])
def test_after_a_power_cut_no_row_below_those_flushed_is_wrong_unnoticed(kind, sampler, tmp_path, monkeypatch, quick):
    "Any mixture of the pages of the last flush and of later ones; only `flushed.json` is that of the flush"
    rng, became = np.random.default_rng([1, len(kind)]), Counter()
    times = grown(tmp_path/'m', kind, sampler, [(200, 'flush'), (3, ''), (90, ''), (120, ''), (400, '')], rng)
    monkeypatch.setattr(mapped, 'boot_id', lambda: 'the next boot')
    for k in range(60):
        later = times[1 + k % 4]
        files = {o: mixed(a, later[o], rng) if o.endswith('.map') else a for o, a in times[0].items()}
        lay(files, tmp_path/str(k))
        became[what_is_noticed(tmp_path/str(k), kind, ReplayMemory.open)] += 1
        shutil.rmtree(tmp_path/str(k))
    assert became['warned'] > 3 and became['found'] > 5, became


def test_the_warning_says_what_is_known(tmp_path, monkeypatch):
    memory = filled(tmp_path)
    memory.flush()
    memory.add(step_of(30))
    del memory                                     # no close, no flush: as a kill
    with no_warning(): assert ReplayMemory.open(tmp_path).power_cut is None
    monkeypatch.setattr(mapped, 'boot_id', lambda: 'the next boot')
    with pytest.warns(UserWarning, match=words('no checksums below', n=30)):
        memory = ReplayMemory.open(tmp_path)
    assert memory.power_cut[:2]==(30, 10) and memory.check_valid()
    memory.close()
    with no_warning(): ReplayMemory.open(tmp_path).close()
    note = read_manifest(tmp_path/'flushed.json') | dict(runs=[], closed=False)
    (tmp_path/'flushed.json').write_bytes(saving.manifest_bytes(note))
    monkeypatch.setattr(mapped, 'boot_id', lambda: 'one more')
    with pytest.warns(UserWarning, match=WORDS['no checksums']): ReplayMemory.open(tmp_path).close()


def mutant(shots, rng):
    "The files of one time, with something done to them; the names of what was changed"
    k = int(rng.integers(len(shots)))
    files, other = dict(shots[k]), shots[int(rng.integers(len(shots)))]
    for _ in range(int(rng.integers(1, 4))):
        names = [o for o in sorted(files) if o!='lock' and (rng.random() < .4 or o.startswith(('records', 'frames')))]
        if not names: continue
        name = str(rng.choice(names))
        raw, what = bytearray(files[name]), rng.choice(['bits', 'pages', 'cut', 'swap', 'mix', 'remove', 'empty', 'bytes'])
        if what=='bits' and raw:
            for _ in range(int(rng.integers(1, 5))): raw[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(8))
        elif what=='bytes' and raw:
            at = int(rng.integers(len(raw)))
            raw[at:at + 8] = rng.bytes(len(raw[at:at + 8]))
        elif what=='pages':
            for at in rng.integers(-(-len(raw)//PAGE) or 1, size=2)*PAGE: raw[at:at + PAGE] = bytes(len(raw[at:at + PAGE]))
        elif what=='cut': raw = raw[:int(rng.integers(len(raw) + 1))]
        elif what=='swap': raw = other.get(name, raw)
        elif what=='mix': raw = mixed(bytes(raw), other.get(name, bytes(raw)), rng)
        elif what=='empty': raw = b''
        if what=='remove': files.pop(name)
        else: files[name] = bytes(raw)
    return files


KINDS_OF_MUTANTS = [('simple', 'uniform'), ('transition', 'proportional'), ('frames', 'ranked'), ('frames', 'uniform')]

@pytest.mark.parametrize('kind,sampler', KINDS_OF_MUTANTS)
def test_no_mutant_opens_empty_or_shows_wrong_rows_unnoticed(kind, sampler, tmp_path, request, quick):
    """Flipped bits, zeroed pages, files that are cut, emptied, removed, of another time or another memory, and pages of two times.

    100 in all; 2,000 with `--mutants 2000`."""
    rng, became = np.random.default_rng([7, len(kind), len(sampler)]), Counter()
    shots = grown(tmp_path/'m', kind, sampler, [(150, 'close'), (100, 'flush'), (30, 'flush'), (0, 'close'), (600, 'close')], rng)
    shots += grown(tmp_path/'n', kind, sampler, [(290, 'flush'), (290, 'close')], rng)
    n = -(-request.config.getoption('--mutants')//len(KINDS_OF_MUTANTS))
    def again(path): return ReplayMemory(ROOM, SAMPLERS[sampler](), path=path, dedup='frames' if kind=='frames' else None)
    for k in range(n):
        path = tmp_path/str(k)
        path.mkdir()
        lay(mutant(shots, rng), path)
        try: became[what_is_noticed(path, kind, again)] += 1
        except Exception as e: raise AssertionError(f'mutant {k} of {kind}, {sampler}: {e}') from e
        shutil.rmtree(path)
    assert became['refused'] > n//4 and became['found'] > n//50 and became['fine'] > n//50, became
