"What all tests share"
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption('--nbflags', default='', help='nbdev flags to run although they are skipped by default, such as "slow"')
    parser.addoption('--kills', type=int, default=25, help='how many processes the tests of kills kill')
    parser.addoption('--mutants', type=int, default=100, help='how many damaged or hostile files each test of them loads')


def pytest_configure(config): config.addinivalue_line('markers', 'slow: takes minutes; run by `pytest --nbflags slow`')


def pytest_collection_modifyitems(config, items):
    if 'slow' in config.getoption('--nbflags'): return
    for o in items:
        if o.get_closest_marker('slow'): o.add_marker(pytest.mark.skip(reason='slow'))


@pytest.fixture(scope='session')
def root():
    "The repository's root"
    return Path(__file__).resolve().parent.parent


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    "With several processes (`-n`) the tests of a file stay together, since they share what they have made; each notebook is by itself"
    from xdist.scheduler import LoadScopeScheduling
    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid): return nodeid if '::test_notebook[' in nodeid else nodeid.split('::')[0]
    return ByFile(config, log)
