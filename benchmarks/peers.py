"""Other libraries' replay buffers, each in an environment of its own, so that what they pin can't clash: `python benchmarks/peers.py`

An environment sees the packages of the one that runs this script, through a path file, and holds only what differs. What can't be installed
is named, with pip's own last word, and the comparison goes on without it.
"""
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PEERS = {'cpprb': 'cpprb==11.*', 'Stable-Baselines3': 'stable-baselines3',
         'Tianshou': 'tianshou', 'TorchRL': 'torchrl', 'Flashbax': 'flashbax'}
ROOT = Path(__file__).resolve().parent.parent
FOLDER = (Path(sys.prefix) if sys.prefix != sys.base_prefix else ROOT/'.venv')/'peers'        # beside what `make` made
IMPORTED = 'import importlib.metadata as m, importlib as i; i.import_module({module!r}); print(m.version({package!r}))'


def package(name):
    "The name of a peer's package, without its version"
    return PEERS[name].partition('=')[0]


def module(name):
    "What a peer is imported as"
    return package(name).replace('-', '_')


def ask(python, code):
    "The last line that some code prints in another Python, or None where it fails"
    ran = subprocess.run([python, '-c', code], capture_output=True, text=True)
    return ran.stdout.strip().splitlines()[-1] if ran.returncode == 0 and ran.stdout.strip() else None


def make(name):
    "Python of the environment for a peer, made if it isn't there"
    folder = FOLDER/package(name)
    FOLDER.mkdir(parents=True, exist_ok=True)
    python = folder/'bin'/'python'
    if python.exists(): return python
    venv.create(folder, with_pip=False, symlinks=True)
    inside = Path(ask(python, 'import sysconfig; print(sysconfig.get_path("purelib"))'))
    paths = [sysconfig.get_path('purelib'), *site.getsitepackages(), str(ROOT)]
    (inside/'parent.pth').write_text('\n'.join(dict.fromkeys(paths)) + '\n')
    return python


def version(python, name):
    "The version of a peer in an environment, or None where it can't be imported"
    return ask(python, IMPORTED.format(module=module(name), package=package(name)))


def last_word(text):
    "The line of pip's output, or of a traceback, that says what went wrong"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(('ERROR', 'ModuleNotFoundError', 'ImportError')) or 'Error:' in line]
    return (said or lines or ['it said nothing'])[-1][:160]


def install(name):
    "(python, version, None), or (None, None, why not)"
    python = make(name)
    if found := version(python, name): return python, found, None
    pip = [sys.executable, '-m', 'pip', '--python', str(python), 'install', '--quiet', '--disable-pip-version-check', '--no-input']
    ran = subprocess.run([*pip, PEERS[name]], capture_output=True, text=True)
    if found := version(python, name): return python, found, None
    asked = subprocess.run([python, '-c', f'import {module(name)}'], capture_output=True, text=True)
    return None, None, last_word(ran.stderr if ran.returncode else asked.stderr)


def main():
    "Install all, and say what there is"
    for name in PEERS:
        _, found, why = install(name)
        print(f'{name}: {found}' if found else f'{name}: not installed: {why}')


if __name__ == '__main__': main()
