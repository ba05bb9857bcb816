"Groups of tests: every notebook and every file belongs to one, and `make test` and `make test-all` leave none out"
import re, shutil, subprocess, sys
from fnmatch import fnmatch

import pytest
from conftest import COLLECTED, GROUPS, group_of, in_suite


@pytest.fixture(scope='module')
def members(root):
    "Every file of tests and every notebook"
    notebooks = [p.relative_to(root) for p in (root/'nbs').rglob('*.ipynb')]
    notebooks = [p.as_posix() for p in notebooks if not any(o[0] in '._' for o in p.parts)]
    return [p.name for p in (root/'tests').glob('test_*.py')] + notebooks


def test_every_file_and_notebook_belongs_to_a_group(members):
    assert not [o for o in members if group_of(o) is None], 'add it to GROUPS in tests/conftest.py'


def test_two_suites_make_up_everything(members):
    assert all(in_suite(o, 'all') and in_suite(o, 'test') != in_suite(o, 'rest') for o in members)
    assert {group.command for group in GROUPS.values()} == {'make test', 'make test-all'}


def test_no_pattern_is_left_without_a_test(pytestconfig, members):
    "Those of single tests are looked at where their file was collected too"
    collected = pytestconfig.stash[COLLECTED]
    files = {o.split('::')[0] for o in collected}
    patterns = [o for group in GROUPS.values() for o in group.members.split()]
    known = [o for o in patterns if '::' not in o or o.split('::')[0] in files]
    assert not [o for o in known if not any(fnmatch(name, o) for name in collected | set(members))]


def test_the_parts_of_the_book_that_a_newcomer_runs(members):
    assert all(in_suite(o, 'test') for o in members if re.match('nbs/[123]_', o))
    assert not any(in_suite(o, 'test') for o in members if re.match('nbs/(6_|tutorials|howto)', o))


def test_the_makefile_runs_both(root):
    said = {k: subprocess.run(['make', '-n', k], cwd=root, capture_output=True, text=True, check=True).stdout for k in ('test', 'test-all')}
    assert '--suite test ' in said['test'] and '--suite' not in said['test-all']
    assert re.search('make test\n(.*\n)*make test-all', (root/'.ci'/'run').read_text())


def test_contributing_has_the_table(root):
    rows = re.findall(r'^\| `(\w+)` \| `(make [\w-]+)` \| (.*) \|$', (root/'CONTRIBUTING.md').read_text(encoding='utf-8'), re.M)
    assert rows == [(key, *group[:2]) for key, group in GROUPS.items()]


@pytest.mark.parametrize('suite,code', [('test', 1), ('all', 0)])
def test_a_missing_library_is_no_silent_skip(root, tmp_path, suite, code):
    shutil.copy(root/'tests'/'conftest.py', tmp_path)
    (tmp_path/'test_batch.py').write_text('import pytest\ndef test_it(): pytest.importorskip("nonesuch", reason="not here")\n')
    ran = subprocess.run([sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', '--suite', suite, '-rs', tmp_path],
                         cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == code, ran.stdout + ran.stderr
    assert 'not here' in ran.stdout
