"""The last touches to the rendered site: nothing comes from other hosts, search knows what matters, no link is dead."""
import base64, html, json, posixpath, re, shutil
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

from latex2mathml.converter import convert

MATHS = re.compile(r'<span class="math (inline|display)">\\[(\[](.*?)\\[)\]]</span>', re.S)
KATEX = re.compile(r'<(?:link|script)\b[^>]*\bkatex[^>]*>(?:</script>)?', re.I)
IMPORT = re.compile(r'@import\s+url\(\s*["\']?https?:[^)]*\)\s*;?')


def own_maths(page):
    "Formulas as MathML, which browsers draw by themselves, instead of a script that fetches fonts"
    def mathml(m): return convert(html.unescape(m[2]).strip(), display='block' if m[1] == 'display' else 'inline')
    return KATEX.sub('', MATHS.sub(mathml, page))


PICTURE = re.compile(r'<img ((?:alt="[^"]*" )?src="data:image/png;base64,([A-Za-z0-9+/]{32}))')


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


SOURCE = re.compile(r'<a href="[^"]*#page-source">([^<]*)</a>')


def with_source(page, path, source):
    "A page whose footer leads to a copy of what it is made from, which lies beside it"
    if source is None: return SOURCE.sub('', page)
    shutil.copy(source, path.with_suffix(source.suffix))
    return SOURCE.sub(rf'<a href="{path.stem}{source.suffix}" download>\1</a>', page)


LONG_NAME = re.compile(r'(?:<h1 class="title">|class="nav-page-text">)fastrl_replay\.[\w.]+')


def with_breaks(page):
    "A page whose long names of modules may be broken after a dot"
    return LONG_NAME.sub(lambda m: m[0].replace('.', '.<wbr>'), page)


CONTENTS = re.compile(r'<nav id="TOC".*?</nav>', re.S)


def with_short_contents(page):
    "A page of the reference whose table of contents has `add` for `ReplayMemory.add`, to fit the margin"
    return CONTENTS.sub(lambda m: re.sub(r'>(?:fastrl_replay|[A-Z]\w*)\.(?=\w)', '>', m[0]), page)


# ---- search

# What a reader most probably wants comes first: entries of the reference for users, then guides, chapters, the inside
WEIGHTS = {'Start here': 1.2, 'How to': 1.2, 'Tutorials': 1, 'The library': 1, 'Other libraries': .9, 'The project': .5,
           'How it works inside': .6}
CENTRAL = {'ReplayMemory': 1.7, 'Batch': 1.6}


HEADING = re.compile(r'<h[1-6][^>]*data-anchor-id="([^"]+)".*?</h[1-6]>', re.S)
INLINE = re.compile(r'</?(?:a|code|em|span|strong)\b[^>]*>')


def texts(page):
    """What a page says below each heading, by the heading's place ('' for what comes first).

    Outputs of cells are there, folded source is not."""
    main = page.partition('<main')[2].partition('<nav class="page-navigation"')[0]
    main = re.sub(r'<details class="code-fold">.*?</details>|<(script|style)\b.*?</\1>', ' ', main, flags=re.S)
    parts = HEADING.split(main.partition('>')[2])
    says = [' '.join(html.unescape(re.sub(r'<[^>]*>', ' ', INLINE.sub('', o))).split()) for o in parts[::2]]
    return dict(zip(['', *parts[1::2]], says))


def search_entry(entry, ref, groups):
    "An entry of the search index with `weight`, and for the reference `name`"
    page = entry['href'].partition('.html')[0]
    if not page.startswith('reference/'):
        return {**entry, 'weight': WEIGHTS.get(groups.get(page, 'The project'), 1)}
    found = next((e for e in ref.entries.get(entry['section'], []) if e.page == page), None)
    if found is None: return {**entry, 'weight': .3}
    root = found.name.partition('.')[0]
    if root in CENTRAL: weight = CENTRAL[root]
    elif ref.is_public(found): weight = 1.4 if root in ref.chosen else .9
    else: weight = .5
    return {**entry, 'weight': weight, 'name': found.name}


def weigh_search(site, ref, groups):
    "Say in the search index what each entry is worth; outputs of cells are in it, folded source is not"
    path = site/'search.json'
    entries, said = json.loads(path.read_text(encoding='utf-8')), {}
    for e in entries:
        page, _, place = e['href'].partition('#')
        if page not in said: said[page] = texts((site/page).read_text(encoding='utf-8'))
        e['text'] = said[page].get(place, e['text'])
    path.write_text(json.dumps([search_entry(e, ref, groups) for e in entries], ensure_ascii=False), encoding='utf-8')


def finish(site, sources, ref, groups):
    "All of it. `sources`: page → the file it is made from; `groups`: page → its group in the sidebar"
    weigh_search(site, ref, groups)
    for p in site.rglob('*.html'):
        name = p.relative_to(site).as_posix().removesuffix('.html')
        page = with_source(p.read_text(encoding='utf-8'), p, sources.get(name))
        if name.startswith('reference/'): page = with_breaks(with_short_contents(page))
        p.write_text(wrapped(sized(own_maths(page))), encoding='utf-8')
    for p in site.rglob('*.css'):  # a theme's web font; the reader's own sans-serif serves as well
        text = p.read_text(encoding='utf-8')
        if IMPORT.search(text): p.write_text(IMPORT.sub('', text), encoding='utf-8')


# ---- what is wrong

class Page(HTMLParser):
    "What a page loads, where it links to, and what can be linked to in it"
    def __init__(self, text):
        super().__init__()
        self.loads, self.links, self.ids, self.in_code = [], [], set(), None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        a = {k: v or '' for k, v in attrs}
        self.ids.add(a.get('id'))
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


def target(page, address):
    "The path of the page that a link of `page` leads to"
    path = unquote(urlsplit(address).path)
    return posixpath.normpath(posixpath.join(page.parent.as_posix(), path)) if path else page.as_posix()


def missing(site, page, address, places):
    "Does a link of `page` lead to a file that the site lacks, or to a place that the page there lacks?"
    if urlsplit(address).scheme or is_elsewhere(address): return False
    to, place = target(page, address), unquote(urlsplit(address).fragment)
    if not (site/to).is_file(): return not (site/to/'index.html').is_file()
    return bool(place) and to in places and place not in places[to]


def faults(site):
    "What is wrong with the finished site, in words"
    pages = {p.relative_to(site): Page(p.read_text(encoding='utf-8')) for p in sorted(site.rglob('*.html'))}
    places = {name.as_posix(): page.ids for name, page in pages.items()}
    for name, page in pages.items():
        yield from (f'{name} loads {o} from another host' for o in page.loads if is_elsewhere(o))
        dead = [o for o in [*page.links, *page.loads] if missing(site, name, o, places)]
        yield from (f'{name} links to {o}, which is not there' for o in dead)
    for p in sorted(site.rglob('*.css')):
        elsewhere = outside(p.read_text(encoding='utf-8'))
        yield from (f'{p.relative_to(site)} loads {o} from another host' for o in elsewhere)
