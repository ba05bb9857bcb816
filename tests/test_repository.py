"The files of the repository itself: workflows and forms fit their schemas, addresses and versions agree, the archives are whole"
import configparser, re, subprocess, sys, tomllib
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent.parent/'tools'))
import dist, install
from words import WORDS, words

SCHEMAS = {'.github/workflows/*.yml': 'vendor.github-workflows', '.github/ISSUE_TEMPLATE/config.yml': 'vendor.github-issue-config',
           '.github/ISSUE_TEMPLATE/[!c]*.yml': 'vendor.github-issue-forms', '.github/dependabot.yml': 'vendor.dependabot',
           'CITATION.cff': 'vendor.citation-file-format'}


def fits(schema, *files):
    "What the schema says of the files, which comes with its checker: nothing is fetched"
    checker = [sys.executable, '-m', 'check_jsonschema', '--builtin-schema', schema]
    return subprocess.run([*checker, *map(str, files)], capture_output=True, text=True)


@pytest.fixture(scope='module')
def workflows(root):
    "Each workflow, parsed: {name: dict}"
    return {p.stem: yaml.safe_load(p.read_text(encoding='utf-8')) for p in sorted((root/'.github'/'workflows').glob('*.yml'))}


def steps(workflows): return [o for w in workflows.values() for job in w['jobs'].values() for o in job['steps']]


@pytest.mark.parametrize('files,schema', SCHEMAS.items())
def test_files_fit_their_schema(root, files, schema):
    found = sorted(root.glob(files))
    assert found
    ran = fits(schema, *found)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_file_has_a_schema(root):
    known = {p for files in SCHEMAS for p in root.glob(files)}
    assert set((root/'.github').rglob('*.yml')) <= known


@pytest.mark.parametrize('line,wrong', [('runs-on: ubuntu-latest', 'runs_on: ubuntu-latest'), ('steps:', 'step:'), ('timeout-minutes: 60', 'timeout-minutes: long')])
def test_a_mistake_in_a_workflow_is_found(root, tmp_path, line, wrong):
    text = (root/'.github'/'workflows'/'tests.yml').read_text(encoding='utf-8')
    assert line in text
    (tmp_path/'tests.yml').write_text(text.replace(line, wrong))
    ran = fits('vendor.github-workflows', tmp_path/'tests.yml')
    assert ran.returncode == 1 and 'Schema validation errors' in ran.stdout + ran.stderr


def test_what_workflows_run_is_there(root, workflows):
    "Their shell scripts can be parsed, and the targets and files that they name exist"
    targets = set(re.findall(r'^([a-z-]+):', (root/'Makefile').read_text(), re.M))
    for o in steps(workflows):
        if 'run' not in o: continue
        script = re.sub(r'\$\{\{.*?\}\}', 'value', o['run'])
        ran = subprocess.run(['bash', '-n'], input=script, capture_output=True, text=True)
        assert ran.returncode == 0, f'{script}\n{ran.stderr}'
        assert set(re.findall(r'^make ([a-z-]+)', script, re.M)) <= targets
        assert all((root/name).exists() for name in re.findall(r'(?<=python )\S+\.py|(?<=python3 )\S+\.py|^\.ci/\w+', script, re.M))


def test_workflows_read_only_what_they_may(workflows):
    "No more rights than needed, a limit of time for each job, and every action with a version"
    for name, w in workflows.items():
        assert w['permissions'] == {'contents': 'read'}, name
        for key, job in w['jobs'].items():
            assert job['timeout-minutes'], f'{name}: {key}'
            assert {*job.get('needs', '').split()} <= {*w['jobs']}
            names = [o['with']['name'] for o in job['steps'] if 'upload-artifact' in o.get('uses', '')]
            assert len(names) == len({*names})
    assert all(re.fullmatch(r'[\w-]+/[\w/-]+@[\w./]+', o['uses']) for o in steps(workflows) if 'uses' in o)
    assert not [o for o in steps(workflows) if 'github.event.' in o.get('run', '')]        # what others write is never part of a script


def test_the_workflows_test_what_is_promised(root, workflows):
    quick = workflows['tests']['jobs']['quick']['strategy']['matrix']
    systems = {quick['os'][0], *(o['os'] for o in quick['include'])}
    assert {o.split('-')[0] for o in systems} == {'ubuntu', 'macos', 'windows'}
    lowest = tomllib.loads((root/'pyproject.toml').read_text())['project']['requires-python'].removeprefix('>=')
    assert quick['python'][0] == lowest and quick['python'] == [f'3.{k}' for k in range(11, 15)]


# ---- addresses, versions, pictures

def test_addresses_follow_from_settings(root):
    "There is one place that says where the project is"
    settings = configparser.ConfigParser()
    settings.read(root/'settings.ini', encoding='utf-8')
    o = settings['DEFAULT']
    assert o['git_url'] == f'https://github.com/{o["user"]}/{o["repo"]}' and o['doc_host'] == f'https://{o["user"]}.github.io'
    site = o['doc_host'] + o['doc_baseurl']
    assert tomllib.loads((root/'pyproject.toml').read_text())['project']['urls'] == {
        'Documentation': site, 'Source': o['git_url'], 'Issues': f'{o["git_url"]}/issues', 'Changelog': f'{o["git_url"]}/blob/{o["branch"]}/CHANGELOG.md'}
    cited = yaml.safe_load((root/'CITATION.cff').read_text(encoding='utf-8'))
    assert (cited['repository-code'], cited['url']) == (o['git_url'], site)


def test_there_is_one_version(root):
    assert len({*dist.versions().values()}) == 1
    assert len(dist.notes(next(iter(dist.versions().values()))).splitlines()) > 20
    with pytest.raises(SystemExit, match=words('no section', version='9.9')): dist.notes('9.9')


# ---- what is built

@pytest.fixture(scope='module')
def archives(tmp_path_factory): return dist.build(tmp_path_factory.mktemp('dist'))


def test_the_archives_are_whole(archives):
    dist.check_contents(*archives)
    ran = subprocess.run([sys.executable, '-m', 'twine', 'check', '--strict', *archives], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_strange_or_missing_file_is_named(archives, tmp_path):
    import zipfile
    wheel, sources = archives
    for name, says in ('tests/test_x.py', 'strange files'), ('', 'missing files'):
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(tmp_path/wheel.name, 'w') as new:
            for o in old.namelist():
                if name or not o.endswith('py.typed'): new.writestr(o, old.read(o))
            if name: new.writestr(name, '')
        with pytest.raises(SystemExit, match=WORDS[says]): dist.check_contents(tmp_path/wheel.name, sources)


# ---- what the installation says

@pytest.mark.parametrize('line,says', [
    ('  Downloading numba-0.68.1-cp311-manylinux.whl (3.8 MB)\n', 'downloading numba 0.68.1, 4 MB'),
    ('  Downloading nvidia_cublas-13.1.0-x.whl (1.2 GB)\n', 'downloading nvidia_cublas 13.1.0, 1,200 MB'),
    ('Using cached torch-2.13.0+cpu-cp311.whl (192.1 MB)\n', 'using cached torch 2.13.0+cpu, 192 MB'),
    ('  Downloading torch-2.13.0-cp311.whl.metadata (30 kB)\n', ''), ('Requirement already satisfied: numpy\n', ''),
    ('Installing collected packages: a, b, c\n', 'unpacking 3 packages'),
    ('  Building editable for fastrl_replay (pyproject.toml): started\n', 'building the package')])
def test_what_pip_does_is_told(line, says): assert install.said(line) == says


def test_a_failed_installation_says_why(root, tmp_path):
    "pip's words, and its exit status"
    code = f'import sys; sys.path.insert(0, {str(root/"tools")!r}); import install; install.ROOT = __import__("pathlib").Path({str(tmp_path)!r}); sys.exit(install.main([]))'
    ran = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert ran.returncode != 0 and 'constraints.txt' in ran.stderr and ran.stdout.startswith('installing .')
