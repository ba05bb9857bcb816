"Pickles that version 0.1.0 made, frozen in `data/pickles`, load for ever: what comes out of them stands beside them"
import json
import pickle
from pathlib import Path

import pytest

from data.make_pickles import told

FOLDER = Path(__file__).parent/'data'/'pickles'
EXPECTED = json.loads((FOLDER/'pickles.json').read_text())
OWN = [o for o in EXPECTED if not o.startswith('sb3')]
SB3 = [o for o in EXPECTED if o.startswith('sb3')]


def check(name):
    loaded = pickle.loads((FOLDER/f'{name}.pkl').read_bytes())
    assert json.loads(json.dumps(told(name, loaded)))==EXPECTED[name]

@pytest.mark.parametrize('name', OWN)
def test_a_frozen_pickle_loads(name): check(name)

@pytest.mark.parametrize('name', SB3)
def test_a_frozen_buffer_of_sb3_loads(name):
    pytest.importorskip('stable_baselines3')
    check(name)

def test_every_pickle_is_tested(): assert {o.stem for o in FOLDER.glob('*.pkl')}=={*EXPECTED} and len(OWN) > 40 and len(SB3)==4
