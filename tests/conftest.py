"What all tests share"
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption('--nbflags', default='', help='nbdev flags to run although they are skipped by default, such as "slow"')
    parser.addoption('--kills', type=int, default=25, help='how many processes test_kills.py kills')


@pytest.fixture(scope='session')
def root():
    "The repository's root"
    return Path(__file__).resolve().parent.parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    "With several processes (`-n`), the tests of a file stay together, since they share what they have made; each notebook is by itself"
    for item in items:
        if item.get_closest_marker('notebook') is None: item.add_marker(pytest.mark.xdist_group(item.path.stem))
