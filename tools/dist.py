"""Build a wheel and a source archive in dist/, and try both: `python tools/dist.py`, with --version as a tag names it.

What is checked: the two are whole and have valid metadata; the version is everywhere the same; neither brings anything
along that is not the library's. Then the wheel is installed, with all that it asks for, into an empty environment,
where a run uses the library with nothing of the checkout in sight; and the source archive in its place.

    python tools/dist.py --notes 0.2.0      prints what CHANGELOG.md says of this version, and does nothing else
"""
import argparse, os, re, shutil, subprocess, sys, tarfile, tempfile, zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = 'fastrl_replay'
IN_WHEEL = re.compile(NAME + r'(/.*\.pyi?|/py\.typed|-[\d.]+\.dist-info/.*)')
IN_SOURCES = re.compile(NAME + r'(/.*\.pyi?|/py\.typed|\.egg-info/.*)|PKG-INFO|LICENSE|pyproject\.toml|setup\.cfg|'
                        r'MANIFEST\.in|CITATION\.cff|(README|CHANGELOG)\.md')


def run(*args, **kw):
    "Run a command; a `SystemExit` if it fails"
    words = [str(o) for o in args]
    if subprocess.run(words, **kw).returncode: raise SystemExit(f'failed: {" ".join(words)[:200]}')


def found(file, pattern):
    "What a pattern finds in a file of the project; a `SystemExit` if it doesn't"
    got = re.search(pattern, (ROOT/file).read_text(encoding='utf-8'), re.M)
    if got is None: raise SystemExit(f'{file}: expected {pattern}')
    return got[1]


def versions():
    "The version, wherever it is written"
    return {'fastrl_replay/__init__.py': found('fastrl_replay/__init__.py', r"""^__version__ = ["'](.+)["']"""),
            'settings.ini': found('settings.ini', r'^version = (.+)$'),
            'CITATION.cff': found('CITATION.cff', r'^version: (.+)$'),
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
    return next(out.glob('*.whl')), next(out.glob('*.tar.gz'))


def check_contents(wheel, sources):
    "Neither has a file that is not the library's, and both have all of the library's"
    with zipfile.ZipFile(wheel) as f: in_wheel = {o for o in f.namelist() if not o.endswith('/')}
    with tarfile.open(sources) as f: in_sources = {o.name.split('/', 1)[1] for o in f if o.isfile()}
    ours = {p.relative_to(ROOT).as_posix() for p in (ROOT/NAME).rglob('*') if p.suffix in ('.py', '.pyi', '.typed')}
    for path, names, allowed in (wheel, in_wheel, IN_WHEEL), (sources, in_sources, IN_SOURCES):
        strange, gone = [o for o in names if not allowed.fullmatch(o)], ours - names
        if strange or gone:
            raise SystemExit(f'{path.name}: unexpected {sorted(strange)}, missing {sorted(gone)}')


def try_out(archives, folder):
    "Install them, one after the other, into an environment that is empty at first, and use the library there"
    run(sys.executable, '-m', 'venv', folder/'venv')
    python = folder/'venv'/('Scripts' if os.name == 'nt' else 'bin')/'python'
    pip = python, '-m', 'pip', 'install', '-q', '--disable-pip-version-check', '-c', ROOT/'constraints.txt'
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    env |= dict(NUMBA_CACHE_DIR=str(folder/'cache'), OMP_NUM_THREADS='1')
    for k, archive in enumerate(archives):
        print(f'installing {archive.name}' + ', and what the library needs'*(k == 0), flush=True)
        run(*pip, *['--force-reinstall', '--no-deps']*(k > 0), archive, cwd=folder)
        where = 'import fastrl_replay as f, sys; assert f.__file__.startswith(sys.prefix), f.__file__'
        run(python, '-c', where, cwd=folder, env=env)
        run(python, ROOT/'tools'/'smoke.py', cwd=folder, env=env)


def main():
    "Build, check, try"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--version', help='what the version must be')
    parser.add_argument('--notes', metavar='VERSION', help='print what the changelog says of it, and do nothing else')
    o = parser.parse_args()
    if o.notes: return print(notes(o.notes))
    written = versions()
    if len({*written.values(), o.version or written['settings.ini']}) > 1:
        raise SystemExit(f'expected one version{", " + o.version if o.version else ""}: {written}')
    out = ROOT/'dist'
    shutil.rmtree(out, ignore_errors=True)
    archives = build(out)
    run(sys.executable, '-m', 'twine', 'check', '--strict', *archives)
    check_contents(*archives)
    with tempfile.TemporaryDirectory() as name: try_out(archives, Path(name))
    print('\n'.join(f'dist/{o.name}: {o.stat().st_size/1e3:,.0f} kB' for o in archives))


if __name__ == '__main__': main()
