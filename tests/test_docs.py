"""The site in a browser: it builds, every internal link leads somewhere, search finds, nothing is fetched elsewhere, nothing complains.

Skipped where no Chromium is installed (`.ci/run` installs it)."""
import re, subprocess, sys
from urllib.parse import unquote, urldefrag

import pytest

pytest.importorskip('websockets', reason='the browser is driven through websockets, which is not installed')
from browser import CHROMIUM, Browser, Server

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason='no Chromium here: apt-get install chromium')

PHONE = 400
TOO_WIDE = """Array.from(document.querySelectorAll("main *")).filter(o => {
    const box = o.getBoundingClientRect();
    if (box.width <= 1 || box.left + Math.max(box.width, o.scrollWidth) <= PHONE + 1) return false;
    for (let up = o; up && up !== document.body; up = up.parentElement)
        if (["auto", "scroll"].includes(getComputedStyle(up).overflowX)) return false;
    return getComputedStyle(o).position !== "absolute";
}).map(o => o.outerHTML.slice(0, 120))""".replace('PHONE', str(PHONE))       # what sticks out to the right and can't be scrolled to


def newest(root):
    "When the newest of what the site is made from was written"
    made_from = [p for folder in ('nbs', 'tools') for p in (root/folder).rglob('*') if p.is_file() and '.ipynb_checkpoints' not in p.parts]
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
def server(site):
    server = Server(site)
    yield server
    server.close()


@pytest.fixture(scope='module')
def browser():
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
        links = browser.eval('Array.from(document.querySelectorAll("a[href]"), a => a.href)')
        ids = browser.eval('Array.from(document.querySelectorAll("[id], a[name]"), o => o.id || o.name)')
        wide = browser.eval(TOO_WIDE)
        found[page] = list(browser.complaints()), browser.asked(), links, set(ids), wide
    return found


def page_of(url, server):
    "The path of a page of ours, and the place in it"
    address, place = urldefrag(url)
    path = unquote(address.removeprefix(server.url))
    return ('index.html' if path == '' else path + 'index.html' if path.endswith('/') else path), unquote(place)


def test_all_chapters_are_there(root, visited):
    chapters = [p.relative_to(root/'nbs').with_suffix('.html') for p in (root/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts]
    assert len(visited) > 30
    assert not {re.sub(r'(^|/)\d+_', r'\1', p.as_posix()) for p in chapters} - visited.keys(), 'a chapter at its path without the numbers'


def test_methods_have_entries_of_their_own(visited):
    for page, names in {'memory/memory.html': ['replaymemory', 'replaymemory.add', 'replaymemory.sample', 'replaymemory.update_priorities'],
                        'memory/batch.html': ['batch.update_priorities', 'batch.to'], 'learning/learner.html': ['learner.fit', 'dqnlearner.evaluate']}.items():
        assert set(names) <= visited[page][3], page


def test_the_sidebar_has_the_parts_of_the_book(root, browser, server):
    browser.size(1280)
    browser.open(server.url)
    titles = browser.eval('Array.from(document.querySelectorAll("#quarto-sidebar .sidebar-item-section > .sidebar-item-container"), o => o.innerText.trim())')
    parts = sorted(p.name for p in (root/'nbs').iterdir() if p.is_dir() and p.name[0].isdigit())
    assert [o[:2] for o in titles[:len(parts)]] == [f'{o.split("_")[0]} ' for o in parts] and titles[len(parts):] == ['Tutorials', 'The project']


def test_no_page_complains(visited, server):
    assert not {page: said for page, (said, *_) in visited.items() if said}
    assert not server.failed


def test_nothing_is_fetched_from_elsewhere(visited, server):
    outside = {page: [o for o in asked if not o.startswith((server.url, 'data:'))] for page, (_, asked, *_) in visited.items()}
    assert not {k: v for k, v in outside.items() if v}
    assert sum(len(asked) for _, asked, *_ in visited.values()) > len(visited)


def test_every_internal_link_leads_somewhere(site, visited, server):
    dead, followed = [], 0
    for page, (_, _, links, _, _) in visited.items():
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


@pytest.mark.parametrize('width', [PHONE, 1280])
@pytest.mark.parametrize('start,query,wanted', [('index.html', 'importance weights', ''), ('tutorials/taxi.html', 'ReplayMemory', 'memory/memory.html'),
                                                ('index.html', 'ReplayMemory.add', 'memory/memory.html'),
                                                ('memory/steps.html', 'Blind Cliffwalk', 'tutorials/blind_cliffwalk.html')])
def test_search_finds(browser, server, width, start, query, wanted):
    browser.size(width, mobile=width == PHONE)
    browser.open(server.url + start)
    box = 'Array.from(document.querySelectorAll("input[type=search], .smalldocs-search input")).find(o => o.offsetParent)'
    if not browser.eval(f'!!({box})'): browser.eval('document.querySelector(".quarto-btn-toggle, .navbar-toggler").click()')
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


def test_search_finds_nothing_where_there_is_nothing(browser, server):
    browser.size(1280)
    browser.open(server.url)
    browser.eval('document.querySelector(".smalldocs-search input, input[type=search]").focus()')
    browser.type('qqxzzy')
    assert browser.until('document.querySelector(".search-none") && document.querySelector(".search-none").innerText') == 'No results'


CONTRAST = """(query => {
    const rgb = o => o.match(/[0-9.]+/g).map(Number), light = c => c.slice(0, 3).map(v => (c.srgb ? v : v/255)).map(v => v <= .04 ? v/12.92 : ((v + .055)/1.055)**2.4);
    const colour = o => { const c = rgb(o); c.srgb = o.startsWith('color('); return c };
    const y = o => (([r, g, b]) => .2126*r + .7152*g + .0722*b)(light(colour(o)));
    return Array.from(document.querySelectorAll(query)).filter(o => o.innerText.trim()).map(o => {
        let under = o;
        while (under && /rgba\\(.*, 0\\)|transparent/.test(getComputedStyle(under).backgroundColor)) under = under.parentElement;
        const a = y(getComputedStyle(o).color), b = y(under ? getComputedStyle(under).backgroundColor : 'rgb(255,255,255)');
        return (Math.max(a, b) + .05)/(Math.min(a, b) + .05) })
})"""       # how far the words of elements stand out from their ground, from 1 to 21


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_search_results_and_links_can_be_read(browser, server, scheme):
    browser.size(1280)
    browser.prefer(scheme)
    browser.open(server.url + 'index.html')
    browser.eval('document.querySelector(".smalldocs-search input, input[type=search]").focus()')
    browser.type('priority')
    browser.until('document.querySelectorAll(".search-result-section, .search-result-text").length > 3')
    for query in ('.search-result-section, .search-result-text', 'main p a'):
        found = browser.eval(f'{CONTRAST}({query!r})')
        assert found and min(found) >= 4.5, (query, found)
    browser.prefer('light')


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
            ground = browser.eval('getComputedStyle(document.querySelector(".cell-output img, figure img, main img")).backgroundColor')
            if scheme == 'dark': assert ground == 'rgb(255, 255, 255)', 'pictures need a ground of their own on a dark page'
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
