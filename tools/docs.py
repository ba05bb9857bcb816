"""Build the site into _docs/ from the notebooks: with quarto where it is installed, else with smalldocs.

Both read the same `_quarto.yml` and give the same pages. nbdev prepares the notebooks in _proc/ (it runs the cells that
import or show signatures, so a chapter that does not import fails here). This script gives them their final names,
makes links between pages relative, and checks that the finished site loads nothing from other hosts and has no dead
links.
"""
import ast, base64, html, json, os, posixpath, re, shutil, subprocess, sys, tempfile
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml
from latex2mathml.converter import convert
from nbdev.config import get_config
from nbdev.serve import proc_nbs

ROOT = Path(__file__).resolve().parent.parent
PARTS = {'memory': 'The memory', 'learning': 'Environments and learning', 'lasting': 'Large and lasting',
         'processes': 'Many processes', 'looking': 'Looking at it',    # folders of nbs/ without their numbers
         'elsewhere': 'Where you already are'}
PAGES = ['CONTRIBUTING.md', 'CHANGELOG.md']
# The tutorials, in reading order
LESSONS = ['which_buffer', 'three_ways', 'one_line', 'replay_as_datapipe', 'taxi', 'blind_cliffwalk', 'sac',
           'bit_flipping', 'recurrent', 'offline']


# ---- before: notebooks as the renderer wants them

def plain(name):
    "`2_learning/01_stepper.ipynb` → `learning/stepper.ipynb`: a path without the numbers that order it"
    return re.sub(r'(^|/)\d+[a-zA-Z0-9]*_(?=[^/])', r'\1', name)


def strings(tree, change):
    "`tree` of lists and dicts with `change` applied to every string in it"
    if isinstance(tree, str): return change(tree)
    if isinstance(tree, list): return [strings(o, change) for o in tree]
    if isinstance(tree, dict): return {k: strings(v, change) for k, v in tree.items()}
    return tree


def relinked(cfg, depth):
    "A function that rewrites the links of a page `depth` folders down"
    base = cfg.doc_host + cfg.doc_baseurl.rstrip('/') + '/'
    source = re.compile(r'\[source\]\(' + re.escape(cfg.git_url) + r'[^)]*\)(\{[^}]*\})?\s*')

    def change(text):
        text = source.sub('', text) if 'example' in cfg.git_url else text
        text = re.sub(re.escape(base) + r'([\w./-]*)', lambda m: '../'*depth + plain(m[1]), text)
        if re.fullmatch(r'output-file: \S+\n?', text): return ''      # front matter: the files have their names already
        text = re.sub(r'\]\(([^)\s]+\.ipynb)', lambda m: f']({plain(m[1])}', text)
        return re.sub(r'\]\((?:\.\./)+(' + '|'.join(PAGES) + r')', '](' + '../' * depth + r'\1', text)
    return change


def chapters(nbs):
    "The notebooks of `nbs`, in reading order: the parts by their numbers, then the tutorials"
    found = [p.relative_to(nbs) for p in nbs.rglob('*.ipynb')]
    found = [p for p in found if not any(o[0] in '._' for o in p.parts)]
    lesson = {name: k for k, name in enumerate(LESSONS)}
    found.sort(key=lambda p: (len(p.parts), p.parent.as_posix(), lesson.get(p.stem, len(lesson)), p.name))
    twice = [k for k, n in Counter(plain(p.as_posix()) for p in found).items() if n > 1]
    if twice: raise ValueError(f'two notebooks make one page: {twice}')
    return found


def part(folder):
    "The title of a part of the book: `2_learning` → `2 Environments and learning`"
    name = plain(folder)
    number = folder.removesuffix(name).rstrip('_')
    return f'{number} {PARTS.get(name, name.capitalize())}'.strip()


def sidebar(nbs):
    "The parts of the book, then the tutorials, in quarto's form"
    sections = {}
    for p in chapters(nbs):
        if p.name == 'index.ipynb': continue
        sections.setdefault(part(p.parent.name), []).append(plain(p.as_posix()))
    contents = ['index.ipynb', *({'section': k, 'contents': v} for k, v in sections.items())]
    return {'website': {'sidebar': {'contents': [*contents, {'section': 'The project', 'contents': PAGES}]}}}


def shown(cell):
    "An export cell as the site shows it: with its code, unless that is imports only (`exports` in nbdev's words)"
    code = ''.join(cell['source'])
    if cell['cell_type'] != 'code' or not re.match(r'#\| ?export *$', code, re.M): return cell
    if all(isinstance(o, (ast.Import, ast.ImportFrom)) for o in ast.parse(code).body): return cell
    return {**cell, 'source': re.sub(r'^#\| ?export *$', '#| exports', code, count=1, flags=re.M).splitlines(True)}


def for_users():
    "The names that `from fastrl_replay.all import *` brings"
    tree = ast.parse((ROOT/'fastrl_replay'/'all.py').read_text(encoding='utf-8'))
    lists = [o.value for o in tree.body if isinstance(o, ast.Assign) and ast.unparse(o.targets[0]) == '__all__']
    return set(ast.literal_eval(lists[0]))


def methods(cell, names):
    "`Class.method` for each documented public method of those classes in an export cell that users have by name"
    code = ''.join(cell['source'])
    if cell['cell_type'] != 'code' or not re.match(r'#\| ?exports? *$', code, re.M): return
    for c in ast.parse(code).body:
        if not (isinstance(c, ast.ClassDef) and c.name in names): continue
        for f in c.body:
            if not isinstance(f, ast.FunctionDef) or f.name.startswith('_') or not ast.get_docstring(f): continue
            decorators = ' '.join(map(ast.unparse, f.decorator_list))
            if not re.search(r'\bproperty|setter|overload', decorators): yield f'{c.name}.{f.name}'


def documented(cell, names):
    "A cell, and after it those that give each of its public methods an entry of its own"
    yield shown(cell)
    for name in methods(cell, names):
        place = re.sub(r'[._]', '-', f'doc-{name}')[:64]
        yield {'cell_type': 'code', 'id': place, 'metadata': {}, 'outputs': [], 'execution_count': None,
               'source': [f'show_doc({name})']}


def with_source(nbs, copy):
    "A copy of the notebooks in which what is exported shows its code too, and methods that users call have entries"
    shutil.copytree(nbs, copy, ignore=shutil.ignore_patterns('.*'))
    names = for_users()
    for p in copy.rglob('*.ipynb'):
        nb = json.loads(p.read_text(encoding='utf-8'))
        cells = [new for cell in nb['cells'] for new in documented(cell, names)]
        p.write_text(json.dumps({**nb, 'cells': cells}), encoding='utf-8')
    return copy


def prepare(cfg):
    "_proc/ with everything to render"
    with tempfile.TemporaryDirectory() as tmp:
        shutil.rmtree(ROOT/'_proc', ignore_errors=True)
        cache = proc_nbs(path=str(with_source(cfg.nbs_path, Path(tmp)/'nbs')), n_workers=2, force=True)
    for p in [*cache.rglob('*.ipynb')]:
        change = relinked(cfg, len(p.relative_to(cache).parts) - 1)
        p.write_text(json.dumps(strings(json.loads(p.read_text(encoding='utf-8')), change)), encoding='utf-8')
        p.rename(p.with_name(plain(p.name)))
    for folder in [*cache.iterdir()]:
        if folder.is_dir(): folder.rename(cache/plain(folder.name))
    for page in PAGES: shutil.copy(ROOT/page, cache)
    website = {'title': cfg.title, 'description': cfg.description}
    about = {'project': {'output-dir': cfg.doc_path.name}, 'website': website}
    for name, what in [('nbdev.yml', about), ('sidebar.yml', sidebar(cfg.nbs_path))]:
        (cache/name).write_text(yaml.safe_dump(what, sort_keys=False), encoding='utf-8')
    return cache


def render(cache):
    if shutil.which('quarto'): cmd = ['quarto', 'render', '--no-cache', '--no-execute']
    else: cmd = [str(Path(sys.executable).with_name('smalldocs')), 'render', '.']
    subprocess.run(cmd, cwd=cache, check=True, stdin=subprocess.DEVNULL)


# ---- after: a site that needs nobody else

MATHS = re.compile(r'<span class="math (inline|display)">\\[(\[](.*?)\\[)\]]</span>', re.S)
KATEX = re.compile(r'<(?:link|script)\b[^>]*\bkatex[^>]*>(?:</script>)?', re.I)
IMPORT = re.compile(r'@import\s+url\(\s*["\']?https?:[^)]*\)\s*;?')


def own_maths(page):
    "Formulas as MathML, which browsers draw by themselves, instead of a script that fetches fonts"
    def mathml(m): return convert(html.unescape(m[2]).strip(), display='block' if m[1] == 'display' else 'inline')
    return KATEX.sub('', MATHS.sub(mathml, page))


def placed(page, address, places):
    """A link of `page`, without its place where the page it leads to has none of that name.

    The place of a method is that of its class, if there is one."""
    head, _, place = address.partition('#')
    target = (posixpath.normpath(posixpath.join(page.parent.as_posix(), unquote(head))) if head else page.as_posix())
    if not place or is_elsewhere(address) or target not in places: return address
    fits = [o for o in (place, place.rpartition('.')[0]) if o in places[target]]
    return f'{head}#{fits[0]}' if fits else head or '#'


def with_places(site):
    "Make every link lead to a place that exists: nbdev links to all that is exported, headings or not"
    pages = {p.relative_to(site): p.read_text(encoding='utf-8') for p in site.rglob('*.html')}
    places = {p.as_posix(): set(re.findall(r'\bid="([^"]+)"', text)) for p, text in pages.items()}
    for p, text in pages.items():
        new = re.sub(r'(<a\b[^>]*\bhref=")([^"]*)"', lambda m, p=p: f'{m[1]}{placed(p, m[2], places)}"', text)
        if new != text: (site/p).write_text(new, encoding='utf-8')


PICTURE = re.compile(r'<img (src="data:image/png;base64,([A-Za-z0-9+/]{32}))')


def sized(page):
    """A page whose pictures say how wide they should be at least, for styles.css.

    An inch of a figure is 203 pixels, and should be 62 points wide."""
    def width(m): return int.from_bytes(base64.b64decode(m[2])[16:20], 'big')*62//203
    return PICTURE.sub(lambda m: f'<img style="--figure: {width(m)}px" {m[1]}', page)


OUTPUT = re.compile(r'(<div class="cell-output[^>]*>\s*)<pre>(.*?)</pre>', re.S)
LONG = 120      # characters of a line, from which on an output is no table


def wrapped(page):
    "A page whose outputs with very long lines are marked for styles.css, which wraps them"
    def marked(m):
        longest = max(map(len, html.unescape(re.sub(r'<[^>]*>', '', m[2])).splitlines()), default=0)
        return f'{m[1]}<pre class="wraps">{m[2]}</pre>' if longest > LONG else m[0]
    return OUTPUT.sub(marked, page)


SIGNATURE = re.compile(r'(<pre class="sourceCode[^>]*><code[^>]*><span class="kw">)def(</span> <span class="fu">[A-Z])')


def classed(page):
    "A page whose signatures of classes begin with that word: nbdev writes `def` before everything that can be called"
    return SIGNATURE.sub(r'\1class\2', page)


def localise(site):
    with_places(site)
    for p in site.rglob('*.html'):
        page = own_maths(p.read_text(encoding='utf-8'))
        p.write_text(classed(wrapped(sized(page))), encoding='utf-8')
    for p in site.rglob('*.css'):  # a theme's web font; the reader's own sans-serif serves as well
        text = p.read_text(encoding='utf-8')
        if IMPORT.search(text): p.write_text(IMPORT.sub('', text), encoding='utf-8')


class Page(HTMLParser):
    "What a page loads, where it links to, and what can be linked to in it"
    def __init__(self, text):
        super().__init__()
        self.loads, self.links, self.in_code = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        a = {k: v or '' for k, v in attrs}
        self.in_code = tag if tag in ('script', 'style') else None
        if tag == 'a' and 'href' in a: self.links.append(a['href'])
        elif tag == 'link':
            names = {'canonical', 'alternate', 'next', 'prev'} & set(a.get('rel', '').split())
            if not names: self.loads.append(a.get('href', ''))
        elif tag != 'a': self.loads += [a[k] for k in ('src', 'srcset', 'data', 'poster') if k in a]
        self.loads += outside(a.get('style', ''))

    def handle_endtag(self, tag): self.in_code = None

    def handle_data(self, data):
        if self.in_code == 'style': self.loads += outside(data)
        elif self.in_code: self.loads += re.findall(r'(?:from|import)\s*\(?["\'](https?:[^"\']+)', data)


def outside(css):
    "Addresses on other hosts that a style sheet fetches"
    return re.findall(r'(?:url\(\s*|@import\s+)["\']?((?:https?:)?//[^)"\'\s;]+)', css)


def is_elsewhere(address): return bool(urlsplit(address).netloc)


def missing(site, page, address):
    "Does a link of `page` lead to a file the site does not have?"
    path = unquote(urlsplit(address).path)
    if urlsplit(address).scheme or is_elsewhere(address) or not path: return False
    target = posixpath.normpath(posixpath.join(page.parent.as_posix(), path))
    return not ((site/target).is_file() or (site/target/'index.html').is_file())


def faults(site):
    "What is wrong with the finished site, in words"
    for p in sorted(site.rglob('*.html')):
        page, name = Page(p.read_text(encoding='utf-8')), p.relative_to(site)
        yield from (f'{name} loads {o} from another host' for o in page.loads if is_elsewhere(o))
        dead = [o for o in [*page.links, *page.loads] if missing(site, name, o)]
        yield from (f'{name} links to {o}, which is not there' for o in dead)
    for p in sorted(site.rglob('*.css')):
        elsewhere = outside(p.read_text(encoding='utf-8'))
        yield from (f'{p.relative_to(site)} loads {o} from another host' for o in elsewhere)


def main():
    os.chdir(ROOT)
    cfg = get_config()
    cache = prepare(cfg)
    render(cache)
    made = cache/cfg.doc_path.name
    localise(made)
    wrong = list(faults(made))
    shutil.rmtree(cfg.doc_path, ignore_errors=True)
    shutil.move(made, cfg.doc_path)                 # in one go: what is there is finished
    if wrong: sys.exit('\n'.join(wrong))
    pages = len([*cfg.doc_path.rglob('*.html')])
    print(f'{cfg.doc_path.name}/index.html: {pages} pages')


if __name__ == '__main__': main()
