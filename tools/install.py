"""Install the library, and the extras named, into the environment of the Python that runs this; say what goes on.

    python tools/install.py                the library and what it needs
    python tools/install.py test           with the extra `test`

pip works under the versions of constraints.txt. What it downloads is printed, with its size, as it comes; what it
says itself is shown only if it fails, and its exit status is that of this script.
"""
import re, subprocess, sys, sysconfig, threading, time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = re.compile(r'(Downloading|Using cached|Processing) (\S+?\.(?:whl|tar\.gz))(?:\s\(([\d.]+) ([kMG]?B)\))?')
QUIET = 10          # seconds without a word after which a line says what is still going on
MB = 1_000_000


def size(path, number, unit):
    "The megabytes of a file, of which pip says its size in words, or its path on this machine"
    if number: return float(number)*{'B': 1/MB, 'kB': .001, 'MB': 1, 'GB': 1_000}[unit]
    return Path(path).stat().st_size/MB if Path(path).is_file() else 0


def said(line):
    "What a line of pip's means to somebody who waits, or ''. Of files, those of a megabyte and more"
    if found := FILE.match(line.strip()):
        how, path, *known = found.groups()
        name, version = Path(path).name.split('-')[:2]
        how = dict(Processing='taking').get(how, how.lower())
        return f'{how} {name} {version}, {size(path, *known):,.0f} MB' if size(path, *known) >= 1 else ''
    if line.startswith('Installing collected packages:'): return f'unpacking {line.count(",") + 1} packages'
    return 'building the package' if re.match(r'\s*Building editable .*started', line) else ''


def megabytes(folder): return sum(p.lstat().st_size for p in folder.rglob('*') if p.is_file())/MB


class Narrator:
    "Prints lines with the seconds since the beginning, and one of its own when there was none for a while"
    def __init__(self):
        self.begun = self.last = time.monotonic()
        self.doing = 'asking for what there is'
        threading.Thread(target=self.fill, daemon=True).start()

    def say(self, text, doing=None):
        self.last, self.doing = time.monotonic(), doing or text
        print(f'{self.last - self.begun:5.0f} s  {text}', flush=True)

    def fill(self):
        while True:
            time.sleep(1)
            if time.monotonic() - self.last > QUIET: self.say(f'still {self.doing}', self.doing)


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
