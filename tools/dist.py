"""Build a wheel and a source archive in dist/, and try both: `python tools/dist.py`, with --version as a tag names it.

What is checked: the two are whole and have valid metadata; the version is everywhere the same; neither brings anything along that
is not the library's. Then each is installed into an empty environment, where a run uses the library with nothing of the checkout
in sight. PyTorch and the other requirements are taken from this environment for that, not downloaded once more.

    python tools/dist.py --notes 0.1.0      prints what CHANGELOG.md says of this version, and does nothing else
"""
import argparse, os, re, shutil, subprocess, sys, sysconfig, tarfile, tempfile, zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = 'fastrl_replay'
IN_WHEEL = re.compile(NAME + r'(/.*\.pyi?|/py\.typed|-[\d.]+\.dist-info/.*)')
IN_SOURCES = re.compile(NAME + r'(/.*\.pyi?|/py\.typed|\.egg-info/.*)|PKG-INFO|LICENSE|README\.md|pyproject\.toml|setup\.cfg|CITATION\.cff|CHANGELOG\.md')


def run(*args, **kw):
    "Run a command; a `SystemExit` if it fails"
    if subprocess.run([str(o) for o in args], **kw).returncode: raise SystemExit(f'failed: {" ".join(map(str, args))[:200]}')


def found(file, pattern):
    "What a pattern finds in a file of the project; a `SystemExit` if it doesn't"
    got = re.search(pattern, (ROOT/file).read_text(encoding='utf-8'), re.M)
    if got is None: raise SystemExit(f'{file}: expected {pattern}')
    return got[1]


def versions():
    "The version, wherever it is written"
    return {'fastrl_replay/__init__.py': found('fastrl_replay/__init__.py', r"""^__version__ = ["'](.+)["']"""),
            'settings.ini': found('settings.ini', r'^version = (.+)$'), 'CITATION.cff': found('CITATION.cff', r'^version: (.+)$'),
            'CHANGELOG.md': found('CHANGELOG.md', r'^## ([\d.]+)')}


def notes(version):
    "What the changelog says of a version"
    text = (ROOT/'CHANGELOG.md').read_text(encoding='utf-8')
    got = re.search(rf'^## {re.escape(version)}\b.*\n((?:(?!^## ).*\n)*)', text, re.M)
    if got is None: raise SystemExit(f'CHANGELOG.md: expected a section {version}')
    return got[1].strip()


def build(out):
    "The wheel and the source archive, made from a copy of what belongs to them, so that nothing is left here"
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)/NAME
        shutil.copytree(ROOT/NAME, copy/NAME, ignore=shutil.ignore_patterns('__pycache__', '*.nb?'))
        for o in 'pyproject.toml', 'README.md', 'LICENSE', 'CHANGELOG.md', 'CITATION.cff': shutil.copy(ROOT/o, copy)
        (copy/'MANIFEST.in').write_text('include CHANGELOG.md CITATION.cff\n')
        run(sys.executable, '-m', 'build', '--no-isolation', '--outdir', out, copy, stdout=subprocess.DEVNULL)
    wheel, sources = next(out.glob('*.whl')), next(out.glob('*.tar.gz'))
    return wheel, sources


def check_contents(wheel, sources):
    "Neither has a file that is not the library's, and both have all of the library's"
    with zipfile.ZipFile(wheel) as f: in_wheel = {o for o in f.namelist() if not o.endswith('/')}
    with tarfile.open(sources) as f: in_sources = {o.name.split('/', 1)[1] for o in f if o.isfile()} - {'MANIFEST.in'}
    ours = {p.relative_to(ROOT).as_posix() for p in (ROOT/NAME).rglob('*') if p.suffix in ('.py', '.pyi', '.typed') or p.name == 'py.typed'}
    for path, names, allowed in (wheel, in_wheel, IN_WHEEL), (sources, in_sources, IN_SOURCES):
        strange, gone = [o for o in names if not allowed.fullmatch(o)], ours - names
        if strange or gone: raise SystemExit(f'{path.name}: unexpected {sorted(strange)}, missing {sorted(gone)}')


def try_out(archive):
    "Install it into an empty environment, without the checkout, and use it there"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, '-m', 'venv', folder/'venv')
        python = folder/'venv'/('Scripts' if os.name == 'nt' else 'bin')/'python'
        run(python, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', '--no-input', '--no-deps', '--no-build-isolation',
            *(['setuptools>=77'] if archive.suffix == '.gz' else []), cwd=folder) if archive.suffix == '.gz' else None
        run(python, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', '--no-input', '--no-deps', archive, cwd=folder)
