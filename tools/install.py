"""Install the library, and the extras named, into the environment of the Python that runs this; say what goes on.

    python tools/install.py                the library and what it needs
    python tools/install.py test           with the extra `test`

pip works under the versions of constraints.txt. What it downloads is printed, with its size, as it comes; what it says itself
is shown only if it fails, and its exit status is that of this script.
"""
import re, subprocess, sys, sysconfig, threading, time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = re.compile(r'(Downloading|Using cached|Processing) (?:\S*/)?([A-Za-z0-9_.]+?)-(\d[^-\s]*)\S*(?:\s\((.*)\))?')
QUIET = 15          # seconds without a word after which a line says that it still works
MB = 1_000_000


def said(line):
    "What a line of pip's means to somebody who waits, or ''"
    if found := FILE.match(line.strip()):
        how, name, version, size = found.groups()
        return f'{name} {version}' + (f', {size}' if size else '') + (', cached' if how=='Using cached' else '')
    if line.startswith('Installing collected packages:'): return f'unpacking {line.count(",") + 1} packages'
    return 'building the package' if line.lstrip().startswith('Building editable') else ''


def megabytes(folder): return sum(p.lstat().st_size for p in folder.rglob('*') if p.is_file())/MB


class Narrator:
    "Prints lines with the seconds since the beginning, and one of its own when there was none for a while"
    def __init__(self):
        self.begun = self.last = time.monotonic()
        threading.Thread(target=self.fill, daemon=True).start()

    def say(self, text):
        self.last = time.monotonic()
        print(f'{self.last - self.begun:5.0f} s  {text}', flush=True)

    def fill(self):
        while True:
            time.sleep(1)
            if time.monotonic() - self.last > QUIET: self.say('still at it')


def main(extras):
    "Run pip; its exit status"
    what = '.' + f'[{",".join(extras)}]'*bool(extras)
    pip = [sys.executable, '-m', 'pip', 'install', '--disable-pip-version-check', '--no-input', '--progress-bar', 'off']
    print(f'installing {what} into {sys.prefix}: a few minutes where much must be downloaded', flush=True)
    narrator, words = Narrator(), []
    with subprocess.Popen([*pip, '-c', 'constraints.txt', '-e', what], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        for line in process.stdout:
            words.append(line)
            if text := said(line): narrator.say(text)
    if process.returncode:
        print(''.join(words), file=sys.stderr)
        return process.returncode
    site = Path(sysconfig.get_path('purelib'))
    total, torch = megabytes(site), megabytes(site/'torch')
    narrator.say(f'installed: {total - torch:,.0f} MB beside PyTorch, which is {torch:,.0f} MB')
    return 0


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
