"What all tests share"
import gc
from pathlib import Path

import pytest

FIRST = 'test_types.py', 'test_docs.py', 'test_cli.py', 'test_actors.py', 'test_ray_cluster.py'        # files of half a minute and more


def pytest_addoption(parser):
    parser.addoption('--nbflags', default='', help='nbdev flags to run although they are skipped by default, such as "slow"')
    parser.addoption('--kills', type=int, default=25, help='how many processes the tests of kills kill')
    parser.addoption('--soak', type=float, default=20, help='for how many seconds the soak does everything at once')
    parser.addoption('--mutants', type=int, default=100, help='how many damaged or hostile files each test of them loads')


def pytest_configure(config): config.addinivalue_line('markers', 'slow: takes minutes; run by `pytest --nbflags slow`')


def pytest_collection_modifyitems(config, items):
    items.sort(key=place)
    if 'slow' in config.getoption('--nbflags'): return
    for o in items:
        if o.get_closest_marker('slow'): o.add_marker(pytest.mark.skip(reason='slow'))


def place(item):
    "What takes long and can't be divided comes first, the notebooks last, the longest of them first: so all processes end together"
    file, notebook = item.path.name, item.get_closest_marker('notebook')
    return bool(notebook), file not in FIRST, '' if notebook else file


def pytest_collection_finish():
    "What has been imported stays: the collector needs not look through it again and again"
    gc.freeze()


@pytest.fixture(scope='session')
def root():
    "The repository's root"
    return Path(__file__).resolve().parent.parent


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    "With several processes (`-n`) the tests of a file stay together, since they share what they have made; each notebook is by itself"
    from xdist.scheduler import LoadScopeScheduling
    config.option.loadscopereorder = False          # it would begin with the files of the most tests
    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid): return nodeid if '::test_notebook[' in nodeid else nodeid.split('::')[0]
    return ByFile(config, log)
