"""Do the lowest versions that pyproject.toml allows work? Install them, and use the library with them.

    python tools/lowest.py                       in .lowest, made anew
    python tools/lowest.py --torch 2.13.0        with this PyTorch instead of the lowest, which is a large download
    python tools/lowest.py --venv DIR --no-extras

Every requirement has a lowest version (`>=` or `==`). Those of the package are installed with exactly these, and
with the newest of what they bring along, into an environment that holds nothing else (no IPython, for one). There a
small run uses what a user would: a pipeline from CartPole to a learner, a memory saved, loaded and kept on disk, its
health and its picture, the command line. Of each extra is asked whether its lowest versions can be installed beside
those of the package. The first thing that fails ends it with its message and the exit status 1.
"""
import argparse, os, re, shutil, subprocess, sys, tempfile, tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = 'fastrl_replay'


def bounds(lines):
    "The lowest version of each requirement, {name: '==1.2'}, of several the highest; or a `SystemExit`"
    found = {}
    for line in lines:
        name, extras, allowed = re.fullmatch(r'([\w.-]+)(\[[\w,-]+\])?\s*(.*)', line).groups()
        low = [o.strip()[2:] for o in allowed.split(',') if o.strip()[:2] in ('>=', '==')]
        if not low: raise SystemExit(f'pyproject.toml: {line}: expected a lowest version (>= or ==)')
        found[name] = max([found.get(name, ''), low[0]], key=lambda v: [int(o) for o in re.findall(r'\d+', v)])
    return {name: f'=={version}' for name, version in found.items()}


def requirements(root=ROOT):
    "What the package requires, and what each extra does: (list, {name: list})"
    project = tomllib.loads((root/'pyproject.toml').read_text(encoding='utf-8'))['project']
    extras = project['optional-dependencies']
    return project['dependencies'], {name: whole(name, extras) for name in extras}


def whole(name, extras):
    "What an extra asks for, with that of the extras that it includes"
    found = []
    for line in extras[name]:
        inner = re.fullmatch(NAME + r'\[([\w,-]+)\]', line)
        found += [o for k in inner[1].split(',') for o in whole(k, extras)] if inner else [line]
    return found


def run(*args, **kw):
    "Run a command; a `SystemExit` if it fails"
    words = [str(o) for o in args]
    if subprocess.run(words, **kw).returncode: raise SystemExit(f'failed: {" ".join(words)[:200]}')


def pinned(folder, name, lines, torch):
    "Write the lowest versions of these requirements as a constraints file"
    pins = bounds(lines) | ({} if torch is None else dict(torch=f'=={torch}'))
    path = folder/f'{name}.txt'
    path.write_text(''.join(f'{k}{v}\n' for k, v in pins.items()))
    return path, pins


def copied(folder):
    "A copy of what makes the package, so that building it leaves nothing here"
    shutil.copytree(ROOT/NAME, folder/NAME, ignore=shutil.ignore_patterns('__pycache__'))
    for name in 'pyproject.toml', 'README.md', 'LICENSE': shutil.copy(ROOT/name, folder)
    return folder


def main():
    "Install, run, ask"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--venv', type=Path, default=ROOT/'.lowest')
    parser.add_argument('--torch', help='the version of PyTorch (default: the lowest allowed)')
    parser.add_argument('--extras', action=argparse.BooleanOptionalAction, default=True, help='ask about the extras')
    o = parser.parse_args()
    own, extras = requirements()
    shutil.rmtree(o.venv, ignore_errors=True)
    run(sys.executable, '-m', 'venv', o.venv)
    python = o.venv.absolute()/('Scripts' if os.name=='nt' else 'bin')/'python'
    pip = python, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', '--no-input'
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = copied(folder)
        path, pins = pinned(o.venv, NAME, own, o.torch)
        print('installing', ', '.join(k + v for k, v in pins.items()), flush=True)
        run(*pip, '-c', path, source)
        (folder/'run').mkdir()
        env = os.environ | dict(NUMBA_CACHE_DIR=str(folder/'run'), OMP_NUM_THREADS='1', TMPDIR=str(folder/'run'))
        env.pop('PYTHONPATH', None)
        run(python, ROOT/'tools'/'smoke.py', cwd=folder/'run', env=env)
        print('the package works with its lowest versions', flush=True)
        for name, lines in extras.items() if o.extras else ():
            path, pins = pinned(o.venv, name, [*own, *lines], o.torch)
            run(*pip, '--dry-run', '-c', path, f'{source}[{name}]')
            print(f'[{name}] can be installed beside them', flush=True)


if __name__ == '__main__': main()
