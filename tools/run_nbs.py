"""Run notebooks in place and store their outputs.

    python tools/run_nbs.py                      every notebook of nbs/, in order
    python tools/run_nbs.py nbs/index.ipynb      only these
    python tools/run_nbs.py --flags slow ...     also cells marked `#| slow`

Cells run under the rules of `nbdev_test`: `#| eval: false`, the flags of `tst_flags` and calls of
`nbdev_export` are skipped (and keep the outputs they have). Each notebook gets a process of its own.
A notebook is written only when every cell ran; otherwise the failing cell and its traceback are shown,
the file stays as it was, and the exit status is 1. What is written is clean: `nbdev_clean` changes nothing in it.
"""
import argparse, os, re, subprocess, sys, tempfile, time
from pathlib import Path

from execnb.nbio import read_nb, write_nb
from execnb.shell import CaptureShell, format_exc
from fastcore.xtras import working_directory
from nbdev.clean import clean_nb
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.frontmatter import FrontmatterProc
from nbdev.process import NBProcessor

ROOT = Path(__file__).resolve().parent.parent


class CellFailed(Exception):
    "One cell of a notebook raised"


def _skipped(cell, flags):
    "Would `nbdev_test` leave this cell out?"
    directives = getattr(cell, 'directives_', None) or {}
    return (cell.cell_type != 'code' or 'nbdev_export(' in cell.source
            or directives.get('eval:', [''])[0].lower() == 'false' or bool(flags & directives.keys()))


def _runnable(fn, flags):
    "The cells of `fn` to run, by cell id, in order, without their directives"
    nb = NBProcessor(fn, procs=FrontmatterProc, process=True).nb
    if str(nb.frontmatter_.get('skip_exec', False)).lower() == 'true': return {}
    return {c.id: c for c in nb.cells if not _skipped(c, flags)}


# What differs from run to run or from machine to machine, and what takes its place
_VOLATILE = [
    (re.compile(re.escape(str(ROOT)) + r'/?'), ''),
    (re.compile(r'[^\s"\']*/site-packages/'), 'site-packages/'),
    (re.compile(re.escape(os.path.dirname(os.__file__))), 'python'),
    (re.compile(re.escape(str(Path.home())) + r'/'), '~/'),
    (re.compile(re.escape(tempfile.gettempdir()) + r'/tmp[a-z0-9_]{8}'), '/tmp/folder'),
    (re.compile(r'(/tmp/ipykernel_)\d+/\d+\.py'), r'\1cell.py'),
    (re.compile(r'<ipython-input-[\w-]+>'), '<cell>'),
    (re.compile(r' at 0x[0-9a-fA-F]+'), ''),
    (re.compile(r'fastrl_replay: compiling kernels[^\n]*\n?'), ''),
]


# A progress bar on a terminal
_BAR = re.compile(r'[^\n|]*\|[█▏▎▍▌▋▊▉#0-9 -]{8,}\|[^\n\]]*\](?:[^\S\n]*\n)?|^█[^\S\n]*\n?', re.M)


def _steady(text):
    "Text, or a list of lines, without the volatile bits"
    if isinstance(text, list): return [_steady(o) for o in text]
    for pattern, new in _VOLATILE: text = pattern.sub(new, text)
    return text


def _on_screen(lines):
    "The lines a terminal would still show: carriage returns obeyed, progress bars gone"
    text = re.sub(r'[^\n]*\r(?!\n)', '', ''.join(lines)) if any('\r' in o for o in lines) else None
    return lines if text is None else _BAR.sub('', text).splitlines(True)


def _is_progress(out):
    "A progress bar: all clock, and of no use on a page"
    html = ''.join(out.get('data', {}).get('text/html', ''))
    return '<progress' in html or 'progress-bar-interrupted' in html or 'display an updated' in html


def _steady_outputs(outs):
    outs = [o for o in outs if not _is_progress(o)]
    for o in outs:
        if 'text' in o: o['text'] = _steady(_on_screen(o['text']))
        for k, v in o.get('data', {}).items():
            if k.startswith('text') or 'svg' in k: o['data'][k] = _steady(v)
    return [o for o in outs if ''.join(o.get('text', 'none'))]


def _failure(fn, number, cell, shell):
    trace = ''.join(format_exc(shell.exc))
    code = '\n'.join('    ' + o for o in cell.source.splitlines())
    where = f'{fn}: code cell {number} (id {cell.get("id")})'
    return CellFailed(f'{where} raised {type(shell.exc).__name__}\n\n{code}\n\n{trace}')


def run_notebook(fn, flags=()):
    "Run `fn` and write it back with its outputs; raises `CellFailed` and writes nothing if a cell raises"
    cfg = get_config(path=ROOT)
    cells = _runnable(fn, set(cfg.tst_flags.split()) - set(flags))
    nb = read_nb(fn)
    sys.path.insert(0, str(ROOT))
    os.environ['IN_TEST'] = '1'
    shell = CaptureShell(fn)
    with working_directory(fn.parent):
        for number, cell in enumerate((c for c in nb.cells if c.id in cells), 1):
            outs = shell.run(cells[cell.id].source)
            if shell.exc: raise _failure(fn, number, cell, shell) from None
            cell.outputs = _steady_outputs(outs)
    clean_nb(nb, allowed_metadata_keys=cfg.allowed_metadata_keys.split(),
             allowed_cell_metadata_keys=cfg.allowed_cell_metadata_keys.split(), clean_ids=cfg.clean_ids)
    write_nb(nb, fn)
    return len(cells)


def _run_each(files, flags):
    "A fresh process per notebook; how many failed"
    cmd = [sys.executable, __file__, '--flags', ' '.join(flags)]
    return sum(subprocess.run([*cmd, str(f)], cwd=ROOT).returncode != 0 for f in files)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('notebooks', nargs='*', type=Path, help='default: all of nbs/')
    parser.add_argument('--flags', default='', help='nbdev flags to run although they are skipped by default')
    args = parser.parse_args()
    files = [f.absolute() for f in args.notebooks]
    os.chdir(ROOT)
    files = files or sorted(f.absolute() for f in nbglob(as_path=True))
    if len(files) != 1: sys.exit(1 if _run_each(files, args.flags.split()) else 0)
    start = time.perf_counter()
    try: n = run_notebook(files[0], args.flags.split())
    except CellFailed as e: sys.exit(f'{"=" * 100}\n{e}\nNothing was written.')
    print(f'{files[0].name}: {n} cells, {time.perf_counter() - start:.1f} s', flush=True)


if __name__ == '__main__': main()
