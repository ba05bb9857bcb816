"""Which version may read what was saved: number 3 is for what its first readers knew; what is newer is named under `needs`, with number 4.

A reader that does not know one of the features refuses by its name, rather than bring dropped rows back."""
import json
import re
import zlib

import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.samplers.proportional import Proportional
from fastrl_replay.saving import FEATURES, CheckpointError, manifest_bytes, read_manifest
from data.make_pickles import plain, spoken
from refusals import refused
from words import words

def filled(step=plain, n=30, **options):
    memory = ReplayMemory(20, seed=1, **options)
    memory.extend([step(k) for k in range(n)])
    return memory

def dropped(**o):
    memory = filled(**o)
    memory.drop([15, 16])
    return memory
def cleared(**o):
    memory = filled(**o)
    memory.clear()
    memory.add(plain(30))
    return memory
def with_windows_set(**o):
    memory = filled(**o)
    memory.windows = {'reward': (0, 1)}
    return memory

USING = dict(dropped=(dropped, ['dropped rows']), cleared=(cleared, ['dropped rows']), windows=(lambda **o: filled(windows={'reward': (0, 1)}, **o), ['windows']),
             windows_set=(with_windows_set, ['windows']), draws=(lambda **o: filled(max_draws=3, **o), ['max_draws']), texts=(lambda **o: filled(spoken, **o), ['strings']),
             several=(lambda **o: dropped(max_draws=9, windows={'reward': (0,)}, **o), ['dropped rows', 'max_draws', 'windows']))
PLAIN = dict(rows=filled, prioritized=lambda **o: filled(sampler=Proportional(), **o), once=lambda **o: filled(dedup='next_state', **o), empty=lambda **o: filled(n=0, **o))


def number_of(path): return int(re.match(rb'\{"format":(\d+)', path.read_bytes())[1])

def forge(path, change):
    "Another manifest, with a checksum that is right"
    manifest = read_manifest(path)
    change(manifest)
    path.write_bytes(manifest_bytes(manifest))

def add_need(manifest): manifest['needs'] = [*manifest.get('needs', []), 'time travel']


@pytest.mark.parametrize('kind', USING)
def test_what_is_newer_is_named_and_has_number_4(kind, tmp_path):
    make, needs = USING[kind]
    memory = make()
    memory.save(tmp_path/'saved')
    assert number_of(tmp_path/'saved'/'manifest.json')==4 and sorted(read_manifest(tmp_path/'saved'/'manifest.json')['needs'])==needs
    state = memory.state_dict()
    assert state['format']==4 and sorted(state['needs'])==needs
    fresh = ReplayMemory(20, max_draws=memory.max_draws)
    fresh.load_state_dict(state)
    for again in fresh, ReplayMemory.load(tmp_path/'saved'): assert again.n_added==memory.n_added and again.check_valid()
    make(path=tmp_path/'folder').close()
    assert number_of(tmp_path/'folder'/'memory.json')==4 and sorted(read_manifest(tmp_path/'folder'/'memory.json')['needs'])==needs
    with ReplayMemory.open(tmp_path/'folder') as again: assert again.check_valid() and again.usage()['n_dropped']==memory.usage()['n_dropped']
    with ReplayMemory.peek(tmp_path/'folder') as view: assert view.n_added==memory.n_added
    assert set(needs) <= set(FEATURES)


@pytest.mark.parametrize('kind', PLAIN)
def test_what_needs_nothing_has_number_3(kind, tmp_path):
    memory = PLAIN[kind]()
    memory.save(tmp_path/'saved')
    assert memory.state_dict()['format']==3 and 'needs' not in memory.state_dict()
    manifest = tmp_path/'saved'/'manifest.json'
    assert number_of(manifest)==3 and 'needs' not in read_manifest(manifest)
    if kind=='empty': return
    with PLAIN[kind](path=tmp_path/'folder'): assert number_of(tmp_path/'folder'/'memory.json')==3
    assert all(number_of(o)==3 for o in (tmp_path/'folder').rglob('*.json'))


@pytest.mark.parametrize('kind', ['dropped', 'rows'])
def test_a_need_that_nobody_knows_is_refused_by_name(kind, tmp_path):
    make = USING[kind][0] if kind in USING else PLAIN[kind]
    memory = make()
    memory.save(tmp_path/'saved')
    make(path=tmp_path/'folder').close()
    forge(tmp_path/'saved'/'manifest.json', add_need)
    forge(tmp_path/'folder'/'memory.json', add_need)
    for load in (lambda: ReplayMemory.load(tmp_path/'saved'), lambda: ReplayMemory.open(tmp_path/'folder'), lambda: ReplayMemory.peek(tmp_path/'folder'),
                 lambda: ReplayMemory(20, path=tmp_path/'folder')):
        with pytest.raises(CheckpointError, match=words('an unknown need', name='json', need='time travel')): load()
    fresh, state = filled(n=3), memory.state_dict()
    with pytest.raises(ValueError, match=words('an unknown need', name='state', need='time travel')): fresh.load_state_dict(state | dict(format=4, needs=['time travel']))
    for needs, what in ((None, 'no list of needs'), (3, 'no list of needs'), ([], 'no list of needs'), ('windows', 'no list of needs'), ([3], 'an unknown need')):
        with pytest.raises(ValueError, match=words(what, name='state', need=3)): fresh.load_state_dict(state | dict(format=4, needs=needs))
    with refused('state', expected='format 4 or format 3', got='5'): fresh.load_state_dict(state | dict(format=5))
    assert fresh.n_added==3


def test_number_4_without_needs_is_refused(tmp_path):
    filled().save(tmp_path)
    path = tmp_path/'manifest.json'
    body = path.read_bytes().partition(b'\n')[2]
    path.write_bytes(b'{"format":4,"crc32":"%08x"}\n%b' % (zlib.crc32(body), body))
    with pytest.raises(CheckpointError, match=words('a key is missing', name='manifest.json', key='needs')): ReplayMemory.load(tmp_path)


def test_a_folder_needs_more_from_the_moment_that_it_uses_more(tmp_path):
    "Noted before it happens: a reader that finds dropped rows finds the need as well"
    description = tmp_path/'memory.json'
    with filled(path=tmp_path) as memory:
        assert number_of(description)==3
        before = json.loads(description.read_bytes().partition(b'\n')[2])
        memory.drop([12])
        after = json.loads(description.read_bytes().partition(b'\n')[2])
        assert number_of(description)==4 and after=={**before, 'needs': ['dropped rows']}
        memory.windows = {'reward': (0, 1)}
        memory.flush()
        assert read_manifest(description)['needs']==['dropped rows', 'windows']
    with ReplayMemory.open(tmp_path) as again: assert again.windows=={'reward': (0, 1)} and again.usage()['n_dropped']==1


def test_nothing_else_in_a_save_has_changed(root):
    "A frozen save of number 3 is written again as it was, but for what has been counted"
    memory = ReplayMemory.load(root/'tests'/'data'/'sequences_v3')
    state = memory.saved()[0]
    assert state.keys()=={'max_sz', 'n_stale', 'rng', 'options', 'usage', 'sampler'} and np.isfinite(state['usage']).all()
