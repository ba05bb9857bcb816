"""Build the site into _docs/ from the notebooks.

Chapters come from the notebooks (chapters.py), the reference from the live package (reference.py); nbdev prepares the
notebooks in _proc/, and smalldocs renders them as `_quarto.yml` says. Afterwards finish.py makes the site light and
independent of other hosts and looks for dead links.
"""
import json, os, re, shutil, subprocess, sys, tempfile
from collections import Counter
from fnmatch import fnmatch
from functools import cache as once
from pathlib import Path

import nbdev.processors, yaml
from nbdev.config import get_config
from nbdev.serve import proc_nbs

import examples
from chapters import Chapter, plain, shown
from finish import faults, finish
from reference import Reference, page_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = ['CHANGELOG.md', 'CONTRIBUTING.md']
# The map: groups of the sidebar, and patterns for the pages in each, in their order. A page belongs to the pattern that
# names it exactly, else to the first that matches. The book is in reading order, part by part, as its folders are.
PARTS = {'memory': '1 The memory', 'learning': '2 Environments and learning', 'lasting': '3 Large and lasting',
         'processes': '4 Many processes, many machines, other devices', 'looking': '5 Looking at it',
         'elsewhere': '6 Where you already are'}
MAP = {
    'Start': ['index', 'start/install', 'start/concepts', 'start/try', 'start/*'],
    'How to': ['howto/*'],
    'The book': [f'{o}/*' for o in PARTS],
    'Tutorials': [
        'tutorials/which_buffer', 'tutorials/three_ways', 'tutorials/one_line', 'tutorials/replay_as_datapipe',
        'tutorials/taxi', 'tutorials/blind_cliffwalk', 'tutorials/minatar', 'tutorials/beside_learners',
        'tutorials/sac', 'tutorials/bit_flipping', 'tutorials/recurrent', 'tutorials/action_chunks',
        'tutorials/offline', 'tutorials/*'],
    'Reference': [examples.PAGE, 'reference/*'],
    'The project': ['*'],
}


# ---- the sidebar

def group_of(page):
    "The group of the sidebar that a page belongs to, and its place there"
    places = [(fnmatch(page, o) and '*' in o, group, k) for group, patterns in MAP.items()
              for k, o in enumerate(patterns) if fnmatch(page, o)]
    _, group, k = min(places, key=lambda o: o[0])
    return group, k


def chapters(nbs):
    "The notebooks of `nbs`, in the order of the sidebar"
    paths = [p for p in nbs.rglob('*.ipynb') if not any(o[0] in '._' for o in p.relative_to(nbs).parts)]
    found = [Chapter.read(p, nbs) for p in sorted(paths)]
    twice = [k for k, n in Counter(c.page for c in found).items() if n > 1]
    if twice: raise ValueError(f'two notebooks make one page: {twice}')
    order = [*MAP]
    return sorted(found, key=lambda c: (order.index(group_of(c.page)[0]), group_of(c.page)[1]))


def reference_contents(ref):
    "The pages of the reference: the names of `all`, in their order; then the modules"
    first = {name: k for k, name in enumerate(ref.chosen)}
    named = sorted(ref.with_pages(), key=lambda e: first[e.name])
    names = [{'text': e.name, 'href': f'{e.page}.md'} for e in named]
    modules = [{'text': m, 'href': f'{page_of(m)}.md'} for m in ref.by_module if m != 'all']
    return [{'section': 'Names', 'contents': names}, {'section': 'Modules', 'contents': modules}]


def book(found):
    "The parts of the book, each with its chapters in reading order"
    for folder, title in PARTS.items():
        own = [c.page for c in found if c.page.startswith(f'{folder}/')]
        pages = [f'{o}.ipynb' for o in own if group_of(o)[0] == 'The book']
        if pages: yield {'section': title, 'contents': pages}


def sidebar(found, ref):
    "The map in quarto's form"
    contents = {group: [f'{c.page}.ipynb' for c in found if group_of(c.page)[0] == group] for group in MAP}
    contents['Start'][0] = {'text': 'Overview', 'href': 'index.ipynb'}
    contents['The book'] = [*book(found)]
    contents['Reference'] = [{'text': 'All names', 'href': 'reference/index.md'}, *contents['Reference'],
                             *reference_contents(ref)]
    contents['The project'] += PAGES
    return [{'section': k, 'contents': v} for k, v in contents.items() if v]


# ---- the notebooks and the reference as the renderer wants them

def strings(tree, change):
    "`tree` of lists and dicts with `change` applied to every string in it"
    if isinstance(tree, str): return change(tree)
    if isinstance(tree, list): return [strings(o, change) for o in tree]
    if isinstance(tree, dict): return {k: strings(v, change) for k, v in tree.items()}
    return tree


def relinked(depth):
    "A function that rewrites the links of a page `depth` folders down"
    def change(text):
        if re.fullmatch(r'output-file: \S+\n?', text): return ''      # front matter: the files have their names already
        text = re.sub(r'\]\(([^)\s]+\.ipynb)', lambda m: f']({plain(m[1])}', text)
        return re.sub(r'\]\((?:\.\./)+(' + '|'.join(PAGES) + r')', '](' + '../' * depth + r'\1', text)
    return change


def rewritten(found, ref, nbs, copy):
    "A copy of the notebooks, with their cells as the site shows them"
    shutil.copytree(nbs, copy, ignore=shutil.ignore_patterns('.*'))
    for c in found:
        path = copy/c.path.relative_to(nbs)
        nb = json.loads(path.read_text(encoding='utf-8'))
        cells = [{**o, 'id': f'cell-{k}'} for k, o in enumerate(shown(c, ref))]
        path.write_text(json.dumps({**nb, 'cells': cells}), encoding='utf-8')
    return copy


def prepare(cfg, found, ref):
    "_proc/ with everything to render"
    nbdev.processors.CaptureShell = once(nbdev.processors.CaptureShell)     # no cell is run: one shell serves all
    with tempfile.TemporaryDirectory() as tmp:
        shutil.rmtree(ROOT/'_proc', ignore_errors=True)
        cache = proc_nbs(path=str(rewritten(found, ref, cfg.nbs_path, Path(tmp)/'nbs')), n_workers=0, force=True)
    for p in [*cache.rglob('*.ipynb')]:
        change = relinked(len(p.relative_to(cache).parts) - 1)
        p.write_text(json.dumps(strings(json.loads(p.read_text(encoding='utf-8')), change)), encoding='utf-8')
        p.rename(p.with_name(plain(p.name)))
    for folder in [*cache.iterdir()]:
        if folder.is_dir(): folder.rename(cache/plain(folder.name))
    for page in PAGES: shutil.copy(ROOT/page, cache)
    for page, text in ref.pages():
        (cache/page).parent.mkdir(parents=True, exist_ok=True)
        (cache/f'{page}.md').write_text(text, encoding='utf-8')
    write_settings(cache, cfg, sidebar(found, ref))
    return cache


def write_settings(cache, cfg, contents):
    "What `_quarto.yml` leaves to be computed"
    version = f'{cfg.title} {cfg.version} · [Changelog](/CHANGELOG.md)'
    footer = {'left': version, 'right': '[Source of this page](#page-source)'}
    website = {'title': cfg.title, 'description': cfg.description, 'page-footer': footer}
    about = {'project': {'output-dir': cfg.doc_path.name}, 'website': website}
    for name, what in [('nbdev.yml', about), ('sidebar.yml', {'website': {'sidebar': {'contents': contents}}})]:
        (cache/name).write_text(yaml.safe_dump(what, sort_keys=False), encoding='utf-8')


def render(cache):
    cmd = [str(Path(sys.executable).with_name('smalldocs')), 'render', '.']
    subprocess.run(cmd, cwd=cache, check=True, stdin=subprocess.DEVNULL)


def sources(found, ref):
    "Page → the file it is made from"
    files = {c.page: c.path for c in found}
    files |= {page_of(m): ref.chapters[m].path for m in ref.by_module}
    files |= {e.page: ref.chapters[e.module].path for e in ref.with_pages()}
    return files | {page.removesuffix('.md'): ROOT/page for page in PAGES}


def main():
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    cfg = get_config()
    found = chapters(cfg.nbs_path)
    shown_at = next(c.path for c in found if c.page == examples.PAGE)
    ref = Reference({c.module: c for c in found if c.module}, examples.read(shown_at))
    cache = prepare(cfg, found, ref)
    render(cache)
    made = cache/cfg.doc_path.name
    url = yaml.safe_load((cfg.nbs_path/'_quarto.yml').read_text(encoding='utf-8'))['website'].get('site-url') or ''
    groups = {c.page: 'Inside' if c.inside else group_of(c.page)[0] for c in found}
    finish(made, sources(found, ref), ref, groups, ROOT, url)
    wrong = list(faults(made))
    shutil.rmtree(cfg.doc_path, ignore_errors=True)
    shutil.move(made, cfg.doc_path)                 # in one go: what is there is finished
    if wrong: sys.exit('\n'.join(wrong))
    pages = len([*cfg.doc_path.rglob('*.html')])
    print(f'{cfg.doc_path.name}/index.html: {pages} pages')


if __name__ == '__main__': main()
