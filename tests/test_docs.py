"""The site: it builds, says what it should, and in a browser nothing is fetched elsewhere, nothing complains, search finds.

What needs a browser is skipped where no Chromium is installed (`.ci/run` installs it)."""
import ast, importlib, inspect, json, re, subprocess, sys, time, zipfile
from html import unescape
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urldefrag

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent/'tools'))
pytest.importorskip('latex2mathml', reason='the site is made with the extra `docs`')
import chapters, docs, examples, finish, reference
from fastrl_replay import all as everything

try: from browser import CHROMIUM, Browser, Server
except ModuleNotFoundError: CHROMIUM = None     # the browser is driven through websockets, which is not installed

PHONE = 400
TOO_WIDE = """Array.from(document.querySelectorAll("main *")).filter(o => {
    const box = o.getBoundingClientRect();
    if (o.ownerSVGElement || box.width <= 1 || box.left + Math.max(box.width, o.scrollWidth) <= PHONE + 1) return false;
    for (let up = o; up && up !== document.body; up = up.parentElement)
        if (["auto", "scroll"].includes(getComputedStyle(up).overflowX)) return false;
    return getComputedStyle(o).position !== "absolute";
}).map(o => o.outerHTML.slice(0, 120))""".replace('PHONE', str(PHONE))       # what sticks out to the right and can't be scrolled to
def newest(root):
    "When the newest of what the site is made from was written"
    made_from = [p for folder in ('nbs', 'tools', 'fastrl_replay') for p in (root/folder).rglob('*')
                 if p.is_file() and not {'.ipynb_checkpoints', '__pycache__'} & {*p.parts}]
    return max(p.stat().st_mtime for p in [*made_from, root/'CONTRIBUTING.md', root/'CHANGELOG.md'])


@pytest.fixture(scope='module')
def site(root):
    "The built site's folder; it is built if it isn't there, or is older than its sources"
    index = root/'_docs'/'index.html'
    if not index.exists() or index.stat().st_mtime < newest(root):
        ran = subprocess.run([sys.executable, 'tools/docs.py'], cwd=root, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    return root/'_docs'


@pytest.fixture(scope='module')
def pages(site):
    "The text of each page but that for addresses that lead nowhere"
    return {p.relative_to(site).as_posix(): p.read_text(encoding='utf-8') for p in sorted(site.rglob('*.html')) if p.name != '404.html'}


@pytest.fixture(scope='module')
def entries(site):
    "What the search knows"
    return json.loads((site/'search.js').read_text(encoding='utf-8').removeprefix('window.searchIndex = '))


@pytest.fixture(scope='module')
def server(site):
    if CHROMIUM is None: pytest.skip('no Chromium here: apt-get install chromium')
    server = Server(site)
    yield server
    server.close()


@pytest.fixture(scope='module')
def browser(server):
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope='module')
def visited(site, server, browser):
    "Each page, opened at a phone's width: {path: (complaints, what it asked for, links, ids, what is too wide)}"
    found = {}
    browser.size(PHONE, mobile=True)
    for page in sorted(p.relative_to(site).as_posix() for p in site.rglob('*.html')):
        browser.open(server.url + page)
        links = browser.eval('Array.from(document.querySelectorAll("a[href]"), a => new URL(a.getAttribute("href"), location.href).href)')
        ids = browser.eval('Array.from(document.querySelectorAll("[id], a[name]"), o => o.id || o.name)')
        found[page] = list(browser.complaints()), browser.asked(), links, set(ids), browser.eval(TOO_WIDE)
    return found


# ---- what the pages say

def words(markup): return ' '.join(unescape(re.sub(r'<[^>]*>', ' ', markup)).split())


def main_of(page): return page.partition('<main')[2].partition('</main>')[0]


def test_all_chapters_are_there(root, pages):
    notebooks = [p.relative_to(root/'nbs').with_suffix('.html') for p in (root/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts]
    assert len(notebooks) > 50
    assert not {re.sub(r'(^|/)\d+[a-z]?_', r'\1', p.as_posix()) for p in notebooks} - pages.keys(), 'a chapter at its path without the numbers'


def public_methods():
    "`Class.method` → method for the classes that users have by name"
    for name in everything.__all__:
        cls = getattr(everything, name)
        if not inspect.isclass(cls) or not cls.__module__.startswith('fastrl_replay'): continue
        others = {c for b in cls.__mro__[1:] if getattr(everything, b.__name__, None) is b for c in b.__mro__}      # these have entries of their own
        parts = [c for c in cls.__mro__ if c.__module__.startswith('fastrl_replay') and c not in others]
        for k, v in {k: v for c in reversed(parts) for k, v in c.__dict__.items()}.items():
            if not k.startswith('_') and (inspect.isfunction(v) or isinstance(v, property | classmethod | staticmethod)):
                yield name, k


def entry_of(page, name):
    "What a page of the reference has between the heading of a name and the next; of a name with a page, what is before the first"
    if f'<h1 class="title">{name}</h1>' in page: return main_of(page).partition('<h2')[0]
    found = re.search(rf'<h[23][^>]*data-anchor-id="{re.escape(name.lower())}".*?(?=<h[23]|</main>)', page, re.S)
    return found[0] if found else None


def test_every_public_method_has_an_entry_and_a_search_hit(pages, entries):
    names = {e.get('name') for e in entries}
    wanted = [*public_methods()]
    assert len(wanted) > 100
    lacking = [f'{c}.{m}' for c, m in wanted if not entry_of(pages[f'reference/{c}.html'], f'{c}.{m}') or f'{c}.{m}' not in names]
    assert not lacking


def rows_of(entry):
    "The table of an entry: parameter → (type, default, meaning)"
    rows = [[words(o) for o in re.findall(r'<td.*?</td>', row, re.S)] for row in re.findall(r'<tr>.*?</tr>', entry, re.S)]
    return {row[0].strip('*'): row[1:] for row in rows if row}


def test_parameters_stand_in_a_table_with_types_and_defaults(pages):
    said = 0
    for c, m in public_methods():
        obj = inspect.getattr_static(getattr(everything, c), m)
        if isinstance(obj, property): continue
        rows = rows_of(entry_of(pages[f'reference/{c}.html'], f'{c}.{m}'))
        function = getattr(getattr(everything, c), m)
        first = 0 if inspect.ismethod(function) or isinstance(obj, staticmethod) else 1
        wanted = [*inspect.signature(function).parameters.values()][first:]
        for p in wanted:
            kind, default, _ = rows[p.name]
            assert (kind == '') == (p.annotation is p.empty) and (default == '') == (p.default is p.empty)
            said += 1
    assert said > 150


def test_signatures_are_true(pages):
    text = {k: words(v).replace(' ', '') for k, v in pages.items() if k.startswith('reference/')}
    assert 'classTransition(state:Any,action:Any,reward:Any' in text['reference/Transition.html']
    assert 'classReplayMemory(max_sz:int' in text['reference/ReplayMemory.html'] and 'Proportional(alpha:float=0.6' in text['reference/Proportional.html']
    assert not [k for k, v in text.items() if '(*args,**kwargs)' in v or 'NoneType' in v]
    assert not [k for k, v in pages.items() if re.search(r'\bdef [A-Z]\w*\(', words(v))]


def test_the_index_names_everything_and_leads_there(root, pages):
    index = pages['reference/index.html']
    links = {(words(text), address) for address, text in re.findall(r'<a href="([^"]*)"[^>]*>(<code.*?)</a>', main_of(index), re.S)}
    named = {name for name, _ in links}
    assert set(everything.__all__) <= named
    for p in (root/'fastrl_replay').rglob('[!_]*.py'):
        tree = ast.parse(p.read_text(encoding='utf-8'))
        lists = [ast.literal_eval(o.value) for o in tree.body if isinstance(o, ast.Assign) and ast.unparse(o.targets[0]) == '__all__']
        module = '.'.join(p.relative_to(root).with_suffix('').parts)
        try: importlib.import_module(module)
        except ModuleNotFoundError: continue     # an extra that is not installed
        assert {*sum(lists, [])} <= named, p
    for name, address in links:
        page, place = urldefrag(address)
        assert f'id="{place}"' in pages[f'reference/{page}'] if place else page == f'{words(name)}.html', (name, address)


def sidebar(page):
    "The sidebar of a page: its groups in order, as (title, open?, links)"
    nav = page.partition('<nav id="quarto-sidebar"')[2].partition('</nav>')[0]
    parts = re.split(r'<ul id="quarto-sidebar-section-\d+" class="(collapse[^"]*)">', nav)      # after each section's button
    heads = [re.findall(r'<span class="menu-text">([^<]*)</span>', o)[-1] for o in parts[0:-1:2]]
    return [(unescape(title), ' show' in kind, re.findall(r'href="([^"]*)"', links)) for title, kind, links in zip(heads, parts[1::2], parts[2::2])
            if 'depth1' in kind]


def test_the_sidebar_is_a_map(pages):
    found = sidebar(pages['memory/memory.html'])
    titles = [title for title, _, _ in found]
    assert titles == [o for o in docs.MAP if o in titles] and titles == ['Start', 'How to', 'The book', 'Tutorials', 'Reference', 'The project']
    assert [title for title, is_open, _ in found if is_open] == ['The book']
    assert [title for title, is_open, _ in sidebar(pages['reference/ReplayMemory.html']) if is_open] == ['Reference']


def test_the_book_is_in_reading_order(root, pages):
    "Previous and next lead from chapter to chapter, and each page says its part"
    chapters = [docs.plain(p.relative_to(root/'nbs').with_suffix('.html').as_posix()) for p in sorted((root/'nbs').glob('[1-6]_*/*.ipynb'))]
    chapters = [o for o in chapters if o != f'{examples.PAGE}.html']
    for page, following in zip(chapters, chapters[1:]):
        link = re.search(r'class="nav-page nav-page-next".*?href="([^"]*)"', pages[page], re.S)[1]
        assert (Path('/', page).parent/link).resolve() == Path('/', following), page
        part = docs.PARTS[page.partition('/')[0]]
        assert f'The book {part}' in words(re.search(r'<nav[^>]*quarto-page-breadcrumbs.*?</nav>', pages[page], re.S)[0]).replace(' > ', ' '), page


def test_every_page_is_in_the_sidebar_once_and_leads_on(pages):
    nav = pages['index.html'].partition('<nav id="quarto-sidebar"')[2].partition('</nav>')[0]
    order = re.findall(r'href="([^"#]+\.html)"', nav)
    assert sorted(order) == sorted(pages)
    for k, name in enumerate(order):
        _, at, after = pages[name].partition('class="nav-page nav-page-next"')
        link = re.search(r'href="([^"]*)"', after.partition('</nav>')[0]) if at else None
        following = (Path(name).parent/link[1]).as_posix() if link else None
        assert (k + 1 == len(order)) if link is None else Path('/', following).resolve() == Path('/', order[k + 1]), name


@pytest.mark.parametrize('page,group', [('index', 'Start'), ('start/install', 'Start'), ('start/compared', 'Start'), ('howto/atari', 'How to'), ('memory/steps', 'The book'),
                                        ('tutorials/new', 'Tutorials'), ('looking/names', 'Reference'), ('looking/new', 'The book'), ('unheard/of', 'The project'),
                                        ('elsewhere/sb3', 'The book')])
def test_a_page_has_a_group(page, group): assert docs.group_of(page)[0] == group


def test_source_is_folded(pages):
    folds = [(k, *o) for k, v in pages.items() for o in re.findall(r'<details([^>]*) class="code-fold">\s*<summary>(.*?)</summary>(.*?)</details>', v, re.S)]
    assert len(folds) > 150
    assert not [o for o in folds if 'open' in o[1]]
    assert not [k for k, v in pages.items() if 'Exported source' in v]
    said = [summary for _, _, summary, _ in folds]
    assert any('Source: ' in o and 'ReplayMemory' in o for o in said) and 'Imports' in said and 'Checks' in said


def test_imports_and_checks_are_folded(pages):
    for name, page in pages.items():
        for code in re.findall(r'<div class="sourceCode"[^>]*><pre class="sourceCode python cell-code[^>]*>(.*?)</pre>', re.sub(r'<details.*?</details>', '', page, flags=re.S), re.S):
            text = unescape(re.sub(r'<[^>]*>', '', code)).strip()
            assert chapters.fold(text, imports=not name.startswith(chapters.TO_COPY)) == text, (name, text)


def test_every_page_has_version_changelog_and_source(site, root, pages):
    version = re.search(r'^version = (\S+)', (root/'settings.ini').read_text(encoding='utf-8'), re.M)[1]
    for name, page in pages.items():
        footer = page.partition('<footer')[2].partition('</footer>')[0]
        assert version in footer and 'CHANGELOG.html' in footer, name
        source = re.search(r'<a href="([^"]*)" download>', footer)
        assert source and ((site/name).parent/source[1]).is_file() if name != 'reference/index.html' else source is None, name


def test_a_notebook_that_reads_data_comes_with_them(site, root, pages, tmp_path):
    archives = {*site.rglob('*.zip')}
    assert {'minatar.zip', 'blind_cliffwalk.zip', 'sac.zip', 'sb3.zip', 'compared.zip', 'index.zip'} <= {p.name for p in archives}
    for p in archives:
        names = zipfile.ZipFile(p).namelist()
        notebook, data = [o for o in names if o.endswith('.ipynb')], [o for o in names if o.endswith('.csv')]
        assert len(notebook) == 1 and data and len(names) == 1 + len(data), names
        for o in names: assert zipfile.ZipFile(p).read(o) == (root/o).read_bytes()
        assert 'with its data' in pages[p.with_suffix('.html').relative_to(site).as_posix()].partition('<footer')[2]
    for p in (root/'nbs').rglob('*.ipynb'):
        code = ''.join(''.join(c['source']) + '\n' for c in json.loads(p.read_text(encoding='utf-8'))['cells'] if c['cell_type'] == 'code')
        read = [o for o in re.findall(r"""['"]([^'"]*\.csv)['"]""", code) if (p.parent/o).is_file()]
        page = docs.plain(p.relative_to(root/'nbs').as_posix()).removesuffix('.ipynb')
        assert bool(read) == (site/f'{page}.zip').exists(), p


def test_rules_for_what_no_page_has_are_left_out():
    css = '@charset "x";/* y */a,.on,.off>b{c:d}.on:not(.off){e:f}@media print{.off{g:h}.on i{j:k}}@media screen{.off{l:m}}:is(.on,.off) n{o:p}@keyframes q{to{r:s}}'
    assert finish.pruned(css, {'on'}) == 'a,.on{c:d}.on:not(.off){e:f}@media print{.on i{j:k}}:is(.on,.off) n{o:p}@keyframes q{to{r:s}}'


def test_what_a_public_address_gives(tmp_path):
    page, url = '<head><meta charset="utf-8">', 'https://example.com/docs'
    assert finish.with_address(page, 'memory/memory', '') == page
    assert f'<link rel="canonical" href="{url}/memory/memory.html">' in finish.with_address(page, 'memory/memory', url)
    assert f'<base href="{url}/">' in finish.with_address(page, '404', url)
    rows = [f'\n  <url>\n    <loc>{url}/{o}.html</loc>\n    <lastmod>x</lastmod>\n  </url>' for o in ('a', '404', 'b/404s')]
    (tmp_path/'sitemap.xml').write_text('<urlset>' + ''.join(rows) + '\n</urlset>')
    finish.write_map(tmp_path, url)
    assert (tmp_path/'sitemap.xml').read_text() == '<urlset>' + rows[0] + rows[2] + '\n</urlset>'
    assert f'Sitemap: {url}/sitemap.xml' in (tmp_path/'robots.txt').read_text()


def test_without_an_address_nothing_pretends_one(site, pages):
    assert not (site/'robots.txt').exists() and not [k for k, v in pages.items() if 'rel="canonical"' in v]
    assert all('property="og:title"' in v for v in pages.values())
    assert 'Not here' in (site/'404.html').read_text(encoding='utf-8')


def test_names_in_the_text_lead_to_their_entries(pages):
    for name, page in pages.items():
        for address, text in re.findall(r'<a href="([^"]*reference/[^"]*)"[^>]*><code[^>]*>(.*?)</code>', main_of(page), re.S):
            shown = re.split(r'[(\s]', words(text))[0]
            place, asked = address.partition('#')[2], shown.rpartition('.')[2].lower()
            named = place.rpartition('.')[2].partition('-')[0] if place else Path(address).stem.lower()
            assert named == asked, (name, shown, address)
            assert not asked.startswith('_'), (name, shown)


def test_ordinary_words_are_not_linked(pages):
    linked = {words(text) for page in pages.values() for text in re.findall(r'<a href="[^"]*reference/(?!modules/checks)[^"]*"[^>]*><code[^>]*>(.*?)</code>', main_of(page), re.S)}
    assert not linked & {'size', 'number', 'state', 'name', 'sample', 'add', 'take'} and {'Batch', 'ReplayMemory'} <= linked


def test_the_index_of_the_search_leaves_source_out(entries):
    assert not [e['href'] for e in entries if 'class ReplayMemory: ' in e['text']]
    assert all(e['text'] and e['weight'] > 0 for e in entries)
    assert {e['href'].partition('#')[0] for e in entries} > {'memory/memory.html', 'reference/ReplayMemory.html', 'index.html'}


# ---- the tools on small inputs

def test_a_meaning_stands_beside_the_parameter_or_beside_that_of_a_base(monkeypatch):
    class Base:
        def __init__(self, a, b: int = 1,    # for Base
                     **kw): pass             # the rest
        def method(self, x,  # of Base
                   y): pass

    class Child(Base):
        def __init__(
            self, a,         # for Child
            *, b: int = 1, c=2): pass
        def method(self, x, y,    # of Child
                   ): pass

    class Step(NamedTuple):
        state: int           # of a step
        flag: bool = False

    def function(*args,      # of a function
                 n=2): pass
    monkeypatch.setattr(reference, 'ours', lambda cls: cls in (Base, Child, Step))

    def said(name, obj, kind, owner=None): return reference.meanings(e := reference.Entry(name, obj, 'here', kind, owner), reference.signature(e))
    assert said('Base', Base, 'class') == {'a': '', 'b': 'for Base', 'kw': 'the rest'}
    assert said('Child', Child, 'class') == {'a': 'for Child', 'b': 'for Base', 'c': ''}
    assert said('Child.method', Child.method, 'method', Child) == {'x': 'of Base', 'y': 'of Child'}
    assert said('Step', Step, 'class') == {'state': 'of a step', 'flag': ''}
    assert said('function', function, 'function') == {'args': 'of a function', 'n': ''}


@pytest.fixture(scope='module')
def ref(root):
    "The reference of all modules, without the chapters"
    return reference.Reference(dict.fromkeys('.'.join(p.relative_to(root/'fastrl_replay').with_suffix('').parts)
                                             for p in (root/'fastrl_replay').rglob('[!_]*.py')))


@pytest.fixture(scope='module')
def at_work(root):
    "Name → its section of the chapter *Names at work*"
    return examples.read(next(p for p in (root/'nbs').rglob('*.ipynb') if docs.plain(p.relative_to(root/'nbs').as_posix()) == f'{examples.PAGE}.ipynb'))


def test_adapters_have_their_pages_also_where_their_libraries_are_missing(ref, pages):
    for module in 'sb3', 'torchrl', 'tianshou', 'rllib':
        wanted = {e.name for e in ref.by_module[f'interop.{module}']}
        assert wanted and all(entry_of(pages[f'reference/modules/interop/{module}.html'], o) for o in wanted), module
    assert not [k for k, v in sys.modules.items() if k.startswith('ray.rllib') and v.__spec__ is None], 'a stand-in stayed'


MOST_USED = """ReplayMemory ReplayMemory.add ReplayMemory.extend ReplayMemory.sample ReplayMemory.update_priorities ReplayMemory.fetch ReplayMemory.recent
    ReplayMemory.episode ReplayMemory.episodes ReplayMemory.sample_sequences ReplayMemory.estimate ReplayMemory.health ReplayMemory.show ReplayMemory.save
    ReplayMemory.load ReplayMemory.open ReplayMemory.peek ReplayMemory.from_minari ReplayMemory.to_minari Transition Batch Batch.of Batch.replace Batch.to
    Batch.update_priorities Uniform Proportional RankBased LinearSchedule RateLimiter GymStepper NStep ExperienceReplay PrioritizedReplay
    ExperienceReplay.loader SequenceReplay HindsightReplay Actors EpsilonGreedy DQNLearner DQNLearner.fit DQNLearner.evaluate DQNLearner.plot
    DQNLearner.save DQNLearner.load BestWeights interop.sb3.ReplayBuffer interop.torchrl.ReplayBuffer RayReplay RayMemory AgeWeighted MixedMemory
    ReplayMemory.where ReplayMemory.drop ReplayMemory.clear DeviceMemory""".split()


def test_the_most_used_names_show_their_example_where_they_are_described(pages, ref, at_work):
    chapter = pages[f'{examples.PAGE}.html']
    contents, headings = re.findall(r'<td.*?</td>', main_of(chapter).partition('</table>')[0], re.S), []
    for name, example in at_work.items():
        e = ref.find(name)
        entry = entry_of(pages[f'{e.page}.html'], e.name)
        said = [re.sub(r'\W', '', o) for o in (words(entry), *example.points.values(), *sum(map(examples.texts, example.cells), []))]
        assert all(o and o in said[0] for o in said[1:]), name
        assert f'{example.place}"' in entry and (e.has_page or f'id="{e.place}"' in pages[f'{e.page}.html'])
        assert re.search(rf'id="{re.escape(name.lower())}".*?<div class="defines">\s*<ul>\s*<li>.*?href="[^"]*{e.page}.html{re.escape("#"*(not e.has_page) + e.place)}"', chapter, re.S), name
        headings.append(name.lower())
    assert re.findall(r'href="#([\w.]+)"', ' '.join(contents[1::2])) == headings, 'the table of contents by subject has each once, in order'


def test_what_serves_the_library_itself_stands_behind_what_users_need(ref):
    for module in 'batch', 'steps', 'storage.choice', 'ray.memory', 'learner':
        public = [ref.is_public(e) for e in ref.by_module[module]]
        assert any(public) and not all(public), module
    assert not any(map(ref.is_public, ref.by_module['checks'])) and not ref.is_public(ref.find('ray.memory.Dealer'))
    memory = ref.find('ReplayMemory')
    assert {'saved', 'restore', 'news'} <= {m.name.partition('.')[2] for m in memory.methods if ref.is_part(m)} and not ref.is_part(ref.find('ReplayMemory.save'))
    assert not {o.partition('.')[2] for o in MOST_USED} & reference.PARTS
    named = {m.name.partition('.')[2] for same in ref.entries.values() for e in same for m in e.methods}
    assert not {o for o in reference.PARTS if o not in named}, 'each is a method of something'
    for module, names in reference.FOR_USERS.items():
        assert {*names.split()} <= {e.name for e in ref.by_module[module]}, module


@pytest.mark.parametrize('code,summary', [('import os\nfrom a import b', 'Imports'), ('assert f(1)', 'Checks'), ('test_eq(a, b)\nfor o in x: assert o', 'Checks'),
                                          ('import os\nx = 1', None), ('assert f(1)\nx = 2', None), ('', None), ('print(1)', None)])
def test_folding(code, summary):
    assert chapters.fold(code) == code if summary is None else f'code-summary: "{summary}"' in chapters.fold(code)


def test_faults_are_found(tmp_path):
    (tmp_path/'a.html').write_text('<a href="b.html#here">x</a><a href="b.html#gone">x</a><a href="c.html">x</a><img src="https://example.com/x.png">')
    (tmp_path/'b.html').write_text('<p id="here"><a href="a.html">x</a><a href="#nowhere">x</a><a href="https://example.com">x</a>')
    assert list(finish.faults(tmp_path)) == ['a.html loads https://example.com/x.png from another host', 'a.html links to b.html#gone, which is not there',
                                             'a.html links to c.html, which is not there', 'b.html links to #nowhere, which is not there']


# ---- in a browser

def page_of(url, server):
    "The path of a page of ours, and the place in it"
    address, place = urldefrag(url)
    path = unquote(address.removeprefix(server.url))
    return ('index.html' if path == '' else path + 'index.html' if path.endswith('/') else path), unquote(place)


def test_no_page_complains(visited, server):
    assert not {page: said for page, (said, *_) in visited.items() if said}
    assert not server.failed


def test_nothing_is_fetched_from_elsewhere(visited, server):
    outside = {page: [o for o in asked if not o.startswith((server.url, 'data:'))] for page, (_, asked, *_) in visited.items()}
    assert not {k: v for k, v in outside.items() if v}
    assert sum(len(asked) for _, asked, *_ in visited.values()) > len(visited)


def test_every_internal_link_leads_somewhere(site, visited, server):
    dead, followed = [], 0
    for page, (_, _, links, *_) in visited.items():
        for link in links:
            if not link.startswith(server.url): continue
            target, place = page_of(link, server)
            followed += 1
            if target.endswith('.html') and target not in visited or not (site/target).is_file(): dead.append((page, link))
            elif place and target in visited and place not in visited[target][3]: dead.append((page, link))
    assert followed > 1000
    assert not dead


def test_each_page_fits_a_phone(visited):
    assert not {page: wide[:3] for page, (*_, wide) in visited.items() if wide}


def test_methods_with_examples_come_first(pages):
    row = words(re.search(r'<p>Methods: (.*?)</p>', pages['reference/ReplayMemory.html'], re.S)[1]).split(' · ')
    assert row[:3] == ['add', 'extend', 'sample'] and row.index('save') < row.index('n_added')


def test_options_of_a_command_are_not_broken():
    assert finish.with_whole_options('<code>a --b-c d</code>') == '<code>a <span class="whole">--b-c</span> d</code>'
    assert finish.with_whole_options('<code>--force</code>') == '<code class="whole">--force</code>'
    for o in '<pre><code>a --b</code></pre>', '<code>a -- b</code>', '<code>a\n --b</code>': assert finish.with_whole_options(o) == o


@pytest.mark.parametrize('width', [PHONE, 1280])
@pytest.mark.parametrize('start,query,wanted', [('index.html', 'importance weights', ''), ('tutorials/taxi.html', 'ReplayMemory', 'reference/ReplayMemory.html'),
                                                ('memory/steps.html', 'Blind Cliffwalk', 'tutorials/blind_cliffwalk.html')])
def test_search_finds(browser, server, width, start, query, wanted):
    browser.size(width, mobile=width == PHONE)
    browser.open(server.url + start)
    box = 'Array.from(document.querySelectorAll("input[type=search], .smalldocs-search input")).find(o => o.offsetParent)'
    browser.until(f'!!({box})')
    browser.eval(f'({box}).focus()')
    browser.type(query)
    hits = browser.until('(o => o.length && o)(Array.from(document.querySelectorAll("a.search-result"), a => a.href))')
    found = [page_of(o, server)[0] for o in hits]
    assert any(o == wanted for o in found) if wanted else len(found) > 3
    browser.events = []
    at = found.index(wanted) if wanted else 0
    browser.eval(f'document.querySelectorAll("a.search-result")[{at}].click()')
    browser.wait('Page.loadEventFired')
    assert page_of(browser.eval('location.href'), server)[0] == found[at]
    assert not list(browser.complaints())


def hits(browser, query):
    "The first results of a search: (address in the site, title)"
    browser.eval('(o => { o.value = ""; o.focus() })(document.querySelector(".smalldocs-search input"))')
    browser.type(query)
    browser.until(f'document.querySelector(".smalldocs-search input").value == {json.dumps(query)} && !!document.querySelector(".smalldocs-search-results.show a, .search-none")')
    read = 'Array.from(document.querySelectorAll("a.search-result"), a => [a.getAttribute("href"), a.firstChild.innerText])'
    previous, now = None, browser.eval(read)
    while previous != now:                  # until no further letter changes it
        time.sleep(.15)
        previous, now = now, browser.eval(read)
    return now


@pytest.mark.parametrize('query,first', [('ReplayMemory.add', 'ReplayMemory.add'), ('sample', 'ReplayMemory.sample'), ('priority', 'ReplayMemory.update_priorities'),
                                         ('update priorities', 'ReplayMemory.update_priorities'), ('Proportional', 'Proportional'), ('add()', 'ReplayMemory.add'),
                                         ('save', 'ReplayMemory.save'), ('n_step', 'NStep'), ('episode', 'ReplayMemory.episode'), ('to', 'Batch.to')])
def test_search_puts_the_public_names_first(browser, server, query, first):
    browser.size(1280)
    browser.open(server.url + 'index.html')
    found = hits(browser, query)
    assert found[0][1] == first, found[:5]
    assert found[0][0].startswith('./reference/')


@pytest.fixture(scope='module')
def home(browser, server):
    "The browser, with the first page open"
    browser.size(1280)
    browser.open(server.url + 'index.html')
    return browser


@pytest.mark.parametrize('query,wanted', [
    ('replaymemory', 'reference/ReplayMemory.html'), ('gymstepper', 'reference/GymStepper.html'), ('dataloader', 'start/faq.html#can-i-use-dataloader-workers'),
    ('pytorch', 'start/install.html'), ('lunarlander', 'tutorials/beside_learners.html'), ('d4rl', 'lasting/offline.html'), ('nstep', 'reference/NStep.html'),
    ('atari 1 million laptop memory', 'howto/atari.html'), ('PER', 'reference/Proportional.html'), ('OOM', 'reference/ReplayMemory.html#replaymemory.estimate'), ('out of memory', 'reference/ReplayMemory.html#replaymemory.estimate'), ('clear', 'reference/ReplayMemory.html#replaymemory.clear'),
    ('delete', 'start/faq.html#how-do-i-delete-an-episode'), ('remove', 'reference/ReplayMemory.html#replaymemory.drop'), ('delete an episode', 'reference/ReplayMemory.html#replaymemory.drop'),
    ('demonstrations', 'reference/MixedMemory.html'), ('RLPD', 'reference/MixedMemory.html'), ('action mask', 'learning/agents.html#legal-actions'), ('invalid actions', 'learning/agents.html#legal-actions'),
    ('sample weight decay', 'reference/AgeWeighted.html'), ('action chunks', 'tutorials/action_chunks.html'), ('frame history', 'howto/atari.html'),
    ('GPU replay buffer', 'start/faq.html#can-the-memory-be-on-the-gpu'), ('IsaacLab', 'reference/DeviceMemory.html'), ('device memory', 'reference/DeviceMemory.html'),
    ('string field', 'lasting/texts.html'), ('language instruction', 'lasting/texts.html'), ('own loop', 'howto/own_loop.html'), ('illegal actions', 'start/faq.html#how-do-i-mask-illegal-actions'), ('replay_ratio', 'start/concepts.html#replay-ratio'), ('PPO', 'start/faq.html#can-i-use-it-for-ppo'), ('cite', ''), ('license', ''), ('transformer', 'equence'), ('wandb', 'start/faq.html#how-do-i-log-to-weights-biases'), ('quickstart', 'start/install.html'), ('resize', 'reference/ReplayMemory.html'),
    ('github', ''), ('multi-GPU', 'start/faq.html#how-do-i-use-several-gpus'), ('distributed', 'reference/RayReplay.html'), ('weights all 1', 'start/faq.html#why-are-all-my-weights-1'), ('mixing offline data', 'start/faq.html#how-do-i-mix-offline-and-online-data'),
    ('how do I mix offline and online data', 'start/faq.html#how-do-i-mix-offline-and-online-data'), ('several GPUs', 'start/faq.html#how-do-i-use-several-gpus'), ('how to keep only the best weights', 'start/faq.html#how-do-i-keep-only-the-best-weights'),
    ('can I use it for PPO', 'start/faq.html#can-i-use-it-for-ppo'), ('how do I delete an episode', 'start/faq.html#how-do-i-delete-an-episode'), ('why are my weights all 1', 'start/faq.html#why-are-all-my-weights-1')])
def test_search_finds_what_people_type(home, query, wanted):
    found = home.eval(f"""(async box => {{
        box.value = {json.dumps(query)};
        document.querySelector("#search-results").innerHTML = "";
        box.dispatchEvent(new Event("input", {{bubbles: true}}));
        while (!document.querySelector("#search-results > *")) await new Promise(o => setTimeout(o, 10));
        return Array.from(document.querySelectorAll("a.search-result"), a => a.getAttribute("href"));
    }})(document.querySelector(".smalldocs-search input"))""")
    assert found and any(wanted in o for o in found[:6]), found[:6]


def test_search_ranks_what_has_all_words_first(browser, server):
    browser.size(1280)
    browser.open(server.url + 'index.html')
    assert hits(browser, 'replay ratio')[0][0] == './start/concepts.html#replay-ratio'
    assert hits(browser, 'replay ratio qqxzzy')[0][0] == './start/concepts.html#replay-ratio'


def test_what_the_search_knows_is_loaded_when_its_field_is_first_used(browser, server):
    browser.size(1280)
    browser.open(server.url + 'index.html')
    browser.eval('new Promise(o => setTimeout(o, 300))')
    assert not browser.eval('!!window.searchIndex') and not [o for o in browser.asked() if o.endswith('search.js')]
    browser.eval('document.querySelector(".smalldocs-search input").focus()')
    assert browser.until('window.searchIndex && window.searchIndex.length') > 500
    assert len([o for o in browser.asked() if o.endswith('search.js')]) == 1


def test_search_works_on_pages_read_from_a_disk(site, browser):
    browser.size(1280)
    browser.open((site/'memory'/'memory.html').as_uri())
    assert hits(browser, 'replaymemory')[0][1] == 'ReplayMemory'
    assert not list(browser.complaints())


# ---- for the keyboard, and for who hears the page

def press(browser, key, code=0, text=''):
    for kind in ('keyDown', 'keyUp'): browser.call('Input.dispatchKeyEvent', type=kind, key=key, windowsVirtualKeyCode=code, text=text if kind == 'keyDown' else '')


def test_the_first_tab_leads_past_the_navigation(browser, server):
    browser.size(1280)
    browser.open(server.url + 'memory/memory.html')
    press(browser, 'Tab', 9)
    assert browser.eval('document.activeElement.innerText') == 'Skip to the text'
    assert browser.eval('document.activeElement.getBoundingClientRect().left') >= 0
    press(browser, 'Enter', 13, '\r')
    assert browser.until('document.activeElement.id') == 'quarto-document-content'


def test_sections_of_the_sidebar_open_by_keyboard(browser, server):
    browser.size(1280)
    browser.open(server.url + 'memory/memory.html')
    assert browser.eval('document.querySelectorAll("#quarto-sidebar a:not([href]), [role=navigation]").length') == 0
    button = 'Array.from(document.querySelectorAll("#quarto-sidebar button")).find(o => o.innerText == "How to")'
    link = 'Array.from(document.querySelectorAll("#quarto-sidebar a")).find(o => o.href.endsWith("howto/processes.html"))'
    state = f'[{button}.getAttribute("aria-expanded"), !!{link}.offsetParent]'
    assert browser.eval(state) == ['false', False]
    browser.eval(f'{button}.focus()')
    press(browser, 'Enter', 13, '\r')
    assert browser.eval(state) == ['true', True]
    press(browser, ' ', 32, ' ')
    assert browser.eval(state) == ['false', False]
    assert browser.eval('document.querySelector("#quarto-sidebar button[aria-expanded=true]").innerText') == 'The book'


def test_search_says_what_it_shows(browser, server):
    browser.size(1280)
    browser.open(server.url + 'index.html')
    read = 'Object.fromEntries(["role", "aria-expanded", "aria-controls", "aria-activedescendant"].map(o => [o, document.querySelector(".smalldocs-search input").getAttribute(o)]))'
    assert browser.eval(read) == {'role': 'combobox', 'aria-expanded': 'false', 'aria-controls': 'search-results', 'aria-activedescendant': None}
    found = hits(browser, 'sample')
    assert browser.eval(read)['aria-expanded'] == 'true'
    assert browser.eval('document.querySelector(".smalldocs-search [role=status]").innerText') == f'{len(found)} results'
    press(browser, 'ArrowDown')
    assert browser.eval('document.getElementById(document.querySelector(".smalldocs-search input").getAttribute("aria-activedescendant")).getAttribute("aria-selected")') == 'true'
    assert browser.eval('document.querySelector("#search-results").getAttribute("role") + document.querySelectorAll("#search-results > [role=option]").length') == f'listbox{len(found)}'
    press(browser, 'Escape')
    assert browser.eval(read) == {'role': 'combobox', 'aria-expanded': 'false', 'aria-controls': 'search-results', 'aria-activedescendant': None}


def test_on_a_phone_the_search_is_in_sight_and_the_sidebar_says_whether_it_is_open(browser, server):
    browser.size(PHONE, mobile=True)
    browser.open(server.url + 'memory/memory.html')
    box = browser.eval('(o => [o.left, o.right, o.bottom])(document.querySelector(".smalldocs-search input").getBoundingClientRect())')
    assert 0 < box[0] < box[1] <= PHONE and box[2] < 80
    state = 'document.querySelector(".quarto-btn-toggle").getAttribute("aria-expanded")'
    assert browser.eval(state) == 'false'
    browser.eval('document.querySelector(".quarto-btn-toggle").click()')
    assert browser.until(f'{state} == "true"')


def test_search_by_keyboard(browser, server):
    browser.size(1280)
    browser.open(server.url + 'memory/memory.html')
    for kind in ('keyDown', 'keyUp'): browser.call('Input.dispatchKeyEvent', type=kind, key='/')
    assert browser.eval('document.activeElement == document.querySelector(".smalldocs-search input") && document.activeElement.value') == ''
    titles = [title for _, title in hits(browser, 'sample')]
    for kind in ('keyDown', 'keyUp') * 2: browser.call('Input.dispatchKeyEvent', type=kind, key='ArrowDown')
    assert browser.eval('document.querySelector(".search-result.active").firstChild.innerText') == titles[1]
    browser.events = []
    for kind in ('keyDown', 'keyUp'): browser.call('Input.dispatchKeyEvent', type=kind, key='Enter')
    browser.wait('Page.loadEventFired')
    assert titles[1].lower() in browser.eval('location.href')


def test_a_link_to_folded_source_opens_it(browser, server):
    browser.size(1280)
    browser.open(server.url + 'reference/RateLimiter.html')
    browser.events = []
    browser.eval('Array.from(document.querySelectorAll("main a")).find(o => o.innerText == "Source").click()')
    browser.wait('Page.loadEventFired')
    assert browser.until('document.querySelector("details.code-fold[open]") && document.querySelector("details.code-fold[open]").innerText.includes("class RateLimiter")')
    assert browser.eval('document.querySelectorAll("details.code-fold[open]").length') == 1


def test_paper_has_the_text_alone(browser, server):
    browser.size(1280)
    browser.open(server.url + 'memory/memory.html')
    browser.call('Emulation.setEmulatedMedia', media='print')
    try:
        shown = 'Array.from(document.querySelectorAll("#quarto-header, #quarto-sidebar, #quarto-margin-sidebar, .page-navigation, main h1, main pre"), o => [o.id || o.tagName, !!o.getClientRects().length])'
        assert {name for name, seen in browser.eval(shown) if seen} == {'H1', 'PRE'}
    finally: browser.call('Emulation.setEmulatedMedia', media='')


def test_search_finds_nothing_where_there_is_nothing(browser, server):
    browser.size(1280)
    browser.open(server.url)
    browser.eval('document.querySelector(".smalldocs-search input, input[type=search]").focus()')
    browser.type('qqxzzy')
    assert browser.until('document.querySelector(".search-none") && document.querySelector(".search-none").innerText') == 'No results'


# ---- what a reader can move

def moved(browser, place, name, value):
    "Move a slider of the page start/try"
    browser.eval(f'(o => {{ o.value = {value}; o.dispatchEvent(new Event("input")) }})(document.querySelector("#{place} input[name={name}]"))')


def pressed(browser, place, words):
    browser.eval(f'Array.from(document.querySelectorAll("#{place} button")).find(o => o.innerText == {json.dumps(words)}).click()')


def xorshift(x):
    "Marsaglia's random numbers"
    while True:
        for shift in (13, -17, 5): x ^= (x << shift if shift > 0 else x >> -shift) & 0xffffffff
        yield x / 2**32


@pytest.mark.parametrize('alpha,beta,batches', [(.6, .4, 0), (.6, .4, 101), (1, 1, 3), (0, .4, 1)])
def test_fifty_bars_show_what_a_memory_would(browser, server, alpha, beta, batches):
    browser.size(1280)
    browser.open(server.url + 'start/try.html')
    for name, value in ('alpha', alpha), ('beta', beta), ('which', 7): moved(browser, 'try-bars', name, value)
    for _ in range(batches // 100): pressed(browser, 'try-bars', 'draw 100 batches')
    for _ in range(batches % 100): pressed(browser, 'try-bars', 'draw a batch of 32')

    priorities = np.array([.02 + .98*u*u*u for u, _ in zip(xorshift(2463534242), range(50))])
    memory = everything.ReplayMemory(50, everything.Proportional(alpha=alpha, beta=beta, normalize='memory'), seed=0)
    z = np.zeros(1, np.float32)
    for p in priorities: memory.add(everything.Transition(z, 0, 0., z, False, False), priority=p)
    batch = memory.sample(6_400)
    probs, weights = np.zeros(50), np.zeros(50)
    probs[batch.ids], weights[batch.ids] = batch.probs, batch.weights
    assert probs.min() > 0
    counts, ends = np.zeros(50, int), (priorities**alpha).cumsum()
    for k, u in zip(range(32*batches), xorshift(123456789)): counts[np.searchsorted(ends, (k % 32 + u)/32*ends[-1], 'right')] += 1
    said = browser.eval('Array.from(document.querySelectorAll("#try-bars .try-said"), o => o.innerText)')
    assert said == [f'Transition 7: priority {priorities[7]:.3f}, probability {100*probs[7]:.2f} %, weight {weights[7]:.3f}, drawn {counts[7]} times.',
                    f'The likeliest is drawn {50*probs.max():.2f} times as often as by uniform replay, the unlikeliest {50*probs.min():.2f} times. '
                    f'The least weight is {weights.min():.3f}. {32*batches} rows are drawn, {(counts == 0).sum()} of 50 transitions never.']
    bars = np.array(browser.eval('Array.from(document.querySelectorAll("#try-bars rect[width=\'5\']"), o => +o.getAttribute("height"))')).reshape(50, 2)
    assert np.allclose(bars[:, 0]/bars[:, 0].max(), probs/probs.max(), atol=1e-6) and np.allclose(bars[:, 1]/bars[:, 1].max(), weights, atol=1e-6)
    if batches: assert (abs(counts - 32*batches*probs) < 2*batches**.5).all(), 'four times the deviation that a stratified draw may have'


def test_the_sum_tree_to_try_is_that_of_the_library(browser, server):
    from fastrl_replay.kernels import kernel
    from fastrl_replay.samplers import sum_tree
    @kernel
    def put(tree, lows, slots, weights):
        lines = np.empty(slots.shape[0], np.int64)
        for i in range(slots.shape[0]):
            lines[i] = np.int64(tree[0, 0]) + (slots[i] >> 2)
            tree[lines[i], slots[i] & 3] = weights[i]
        sum_tree.resum_many(tree, lows, lines, slots.shape[0])
    @kernel
    def find(flat, targets, slots): sum_tree.find(flat, targets, slots)

    browser.size(PHONE, mobile=True)
    browser.open(server.url + 'start/try.html')
    rng, leaves = np.random.default_rng(0), np.array([2, 3, 0, 4, 5, 1, 6, 2, 0, 1, 4, 1, 3, 3, 0, 5.])
    read = 'Array.from(document.querySelectorAll("#try-tree .try-node, #try-tree .try-leaf"), o => [o.innerText, o.classList.contains("on")])'
    for turn in range(25):
        if turn:
            slot, weight = rng.integers(16), rng.integers(10)*(rng.random() < .7)
            leaves[slot] = weight
            browser.eval(f'document.querySelectorAll("#try-tree .try-leaf")[{slot}].click()')
            moved(browser, 'try-tree', 'weight', weight)
        tree = sum_tree.new_tree(16)
        put(tree, sum_tree.NO_LOWS, np.arange(16), leaves)
        target = [17.5, 9, 0, leaves.sum()][turn] if turn < 4 else rng.integers(int(2*leaves.sum()))/2
        slots = np.empty(1, np.int64)
        find(tree.reshape(-1), np.array([float(target)]), slots)
        moved(browser, 'try-tree', 'dart', target)
        for level in range(3):
            shown = browser.eval(read)
            total, rows = shown[0][0], [shown[1 + 5*g:6 + 5*g] for g in range(4)]
            assert total == f'total {leaves.sum():g}'
            assert [[o for o, _ in row] for row in rows] == [[f'{leaves[4*g:4*g + 4].sum():g}', *(f'{o:g}' for o in leaves[4*g:4*g + 4])] for g in range(4)]
            lit = {(g, k) for g in range(4) for k in range(5) if rows[g][k][1]}
            group = (slots[0]//4, 0)
            assert lit == [set(), {group}, {group, (slots[0]//4, slots[0] % 4 + 1)}][level], (leaves, target)
            pressed(browser, 'try-tree', 'one level down')
        assert browser.eval('document.querySelector("#try-tree ol").innerText').endswith(f'slot {slots[0]}.')
    assert not list(browser.complaints())


def test_the_animation_can_be_stopped(browser, server):
    browser.size(1280)
    browser.open(server.url + 'start/concepts.html')
    paused = 'document.querySelector("svg.moving").animationsPaused()'
    assert not browser.eval(paused)
    browser.eval('document.querySelector("button.stop").click()')
    assert browser.eval(paused)
    browser.call('Emulation.setEmulatedMedia', features=[dict(name='prefers-reduced-motion', value='reduce')])
    browser.open(server.url + 'start/concepts.html')
    assert browser.eval(paused)
    browser.call('Emulation.setEmulatedMedia', features=[])


def brightness(browser):
    "Of the ground the page is written on, 0 to 255"
    return browser.eval('(c => (c[0]*3 + c[1]*6 + +c[2])/10)(getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).map(Number))')


def test_light_and_dark(browser, server):
    browser.size(1280)
    try:
        for scheme, fits in (('light', lambda b: b > 200), ('dark', lambda b: b < 80)):
            browser.prefer(scheme)
            browser.open(server.url + 'looking/show.html')
            assert fits(brightness(browser)), scheme
        browser.eval('window.smalldocsToggleScheme ? smalldocsToggleScheme() : quartoToggleColorScheme()')
        assert brightness(browser) > 200
        browser.eval('window.smalldocsToggleScheme ? smalldocsToggleScheme() : quartoToggleColorScheme()')
    finally:
        browser.prefer('light')
        browser.eval('localStorage.clear()')


def test_a_broken_page_is_noticed(browser, tmp_path):
    (tmp_path/'bad.html').write_text('<!doctype html><meta name="viewport" content="width=device-width"><title>x</title><body>'
                                     '<main><pre>' + 'x'*300 + '</pre><pre style="overflow:auto">' + 'y'*300 + '</pre></main><script>console.error("oh"); nothing.here()</script><img src="gone.png">'
                                     '<script src="https://example.com/x.js"></script>')
    server = Server(tmp_path)
    browser.size(PHONE, mobile=True)
    browser.open(server.url + 'bad.html')
    said = ' '.join(browser.complaints())
    assert 'oh' in said and 'nothing is not defined' in said and '404' in said
    assert (404, '/gone.png') in server.failed
    assert 'https://example.com/x.js' in browser.asked()
    assert [o[:6] for o in browser.eval(TOO_WIDE)] == ['<pre>x']
    server.close()
