"""The last touches to the rendered site: pages are light and reach every reader, nothing comes from other hosts, search
knows what matters, no link is dead."""
import base64, html, io, json, posixpath, re, shutil, zipfile
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

from latex2mathml.converter import convert
from PIL import Image

import examples

MATHS = re.compile(r'<span class="math (inline|display)">\\[(\[](.*?)\\[)\]]</span>', re.S)
KATEX = re.compile(r'<(?:link|script)\b[^>]*\bkatex[^>]*>(?:</script>)?', re.I)
IMPORT = re.compile(r'@import\s+url\(\s*["\']?https?:[^)]*\)\s*;?')


def own_maths(page):
    "Formulas as MathML, which browsers draw by themselves, instead of a script that fetches fonts"
    def mathml(m): return convert(html.unescape(m[2]).strip(), display='block' if m[1] == 'display' else 'inline')
    return KATEX.sub('', MATHS.sub(mathml, page))


PICTURE = re.compile(r'<img ((?:alt="[^"]*" )?)src="data:image/png;base64,([A-Za-z0-9+/=\s]+)"')
COLOURS = 64                # of a plot: they look the same, and take a quarter of the bytes


def with_pictures(page, path):
    """A page whose pictures lie beside it, and are loaded when they come into sight.

    For styles.css they say how wide they should be at least: an inch of a figure is 203 pixels, and should be 62."""
    folder = path.with_name(f'{path.stem}_files')
    def beside(m):
        folder.mkdir(exist_ok=True)
        found = Image.open(io.BytesIO(base64.b64decode(m[2]))).convert('RGB')
        made = found.quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        file = folder/f'{len([*folder.iterdir()]) + 1}.png'
        made.save(file, optimize=True)
        size = f'width="{found.width}" height="{found.height}" style="--figure: {found.width*62//203}px"'
        kind = 'photo' if is_photo(made) else 'plot'
        return f'<img class="{kind}" loading="lazy" {size} {m[1]}src="{folder.name}/{file.name}"'
    return PICTURE.sub(beside, page)


def is_photo(picture):
    "Does a picture show what is dark in itself, such as a game? A dark page leaves it as it is"
    tones = picture.convert('RGB').getcolors()
    dark = sum(n for n, tone in tones if max(tone) < 128 and max(tone) - min(tone) < 24)
    return dark > .06*picture.width*picture.height


DRAWING = re.compile(r'<img (?![^>]*navbar-logo)(?:[^>]* )?src="([^"]+\.svg)"[^>]*>')      # not the logo, on every page


def with_drawings(page, path):
    "A page with its drawings in it, where they take the colour of its text"
    return DRAWING.sub(lambda m: (path.parent/m[1]).read_text(encoding='utf-8').strip(), page)


# What the theme loads and this site does not use, and what a keyboard can't reach
UNUSED = re.compile(r'<link[^>]*bootstrap-icons[^>]*>|<script src="[^"]*/(?:bootstrap\.bundle|fuse)\.min\.js"></script>'
                    r'|<button class="navbar-toggler".*?</button>')
SECTION = re.compile(r'<a class="sidebar-item-text[^>]*data-bs-target="#([^"]*)"[^>]*aria-expanded="(\w+)">'
                     r'(.*?)</a><a class="sidebar-item-toggle.*?</a>')
LINK = re.compile(r'(<a href="[^"]*" class="sidebar-item-text[^>]*>)<span class="menu-text">([^<]*)</span></a>')
SCHEME = re.compile(r'<a class="(quarto-color-scheme-toggle nav-link)"[^>]*>(.*?)</a>')
OPENS = (r'<button type="button" class="sidebar-item-text sidebar-link" aria-controls="\1" aria-expanded="\2">'
         r'\3</button>')
TURNS = (r'<button type="button" class="\1" aria-label="Light or dark" title="Light or dark" '
         r'onclick="smalldocsToggleScheme()">\2</button>')


def reachable(page):
    "A page whose sections of the sidebar, and whose switch of the scheme, are buttons; without what is not used"
    page = LINK.sub(r'\1\2</a>', UNUSED.sub('', page))
    page = page.replace('class="collapse navbar-collapse"', 'class="navbar-collapse"')
    page = page.replace('id="quarto-document-content"', 'id="quarto-document-content" tabindex="-1"')
    return SCHEME.sub(TURNS, SECTION.sub(OPENS, page))


OUTPUT = re.compile(r'(<div class="cell-output[^>]*>\s*)<pre>(.*?)</pre>', re.S)
LONG = 120      # characters of a line, from which on an output is no table


def wrapped(page):
    "A page whose outputs with very long lines are marked for styles.css, which wraps them"
    def marked(m):
        longest = max(map(len, html.unescape(re.sub(r'<[^>]*>', '', m[2])).splitlines()), default=0)
        return f'{m[1]}<pre class="wraps">{m[2]}</pre>' if longest > LONG else m[0]
    return OUTPUT.sub(marked, page)


SOURCE = re.compile(r'<a href="[^"]*#page-source">([^<]*)</a>')
DATA = re.compile(r"""['"]([\w./-]+\.csv)\\?['"]""")      # in a notebook


def data_of(source, root):
    "The files that the code of a notebook reads, as they lie in the repository"
    if source.suffix != '.ipynb': return []
    named = {(source.parent/o).resolve() for o in DATA.findall(source.read_text(encoding='utf-8'))}
    return sorted(o for o in named if o.is_file() and o.is_relative_to(root))


def with_source(page, path, source, root):
    """A page whose footer leads to a copy of what it is made from, which lies beside it.

    A notebook that reads data comes with them, in an archive with the folders of the repository."""
    if source is None: return SOURCE.sub('', page)
    data = data_of(source, root)
    copy = path.with_suffix('.zip' if data else source.suffix)
    if data:
        with zipfile.ZipFile(copy, 'w', zipfile.ZIP_DEFLATED) as archive:
            for o in [source, *data]: archive.write(o, o.relative_to(root))
    else: shutil.copy(source, copy)
    return SOURCE.sub(rf'<a href="{copy.name}" download>\1{", with its data" if data else ""}</a>', page)


LONG_NAME = re.compile(r'(<h1 class="title">|class="nav-page-text">|<h[23][^>]*>)((?:fastrl_replay|[A-Z]\w*)\.[\w.]+)')
LONG_PARAMETER = re.compile(r'(?<=<td><code>)\w{30,}(?=</code>)')


def with_breaks(page):
    "A page whose long names may be broken: of modules and methods after a dot, of parameters after a dash"
    page = LONG_NAME.sub(lambda m: m[1] + m[2].replace('.', '.<wbr>'), page)
    return LONG_PARAMETER.sub(lambda m: m[0].replace('_', '_<wbr>'), page)


OPTION = re.compile(r'<code>(--?[\w-]{1,22})</code>')
COMMAND = re.compile(r'(?<!<pre>)<code>[^<\n]* --[^<\n]*</code>')


def with_whole_options(page):
    "A page whose options of a command, such as --force, are not broken at their hyphens"
    page = OPTION.sub(r'<code class="whole">\1</code>', page)
    return COMMAND.sub(lambda m: re.sub(r'(?<=\s)--[\w-]{1,22}', r'<span class="whole">\g<0></span>', m[0]), page)


SUBTITLE = re.compile(r'<div><div class="description">.*?</div></div>', re.S)


def without_subtitle(page):
    "A page of a name without what is below its title: the first sentence of its description, which follows"
    return SUBTITLE.sub('', page, count=1)


CONTENTS = re.compile(r'<nav id="TOC".*?</nav>', re.S)


def with_short_contents(page):
    "A page of names whose table of contents has `add` for `ReplayMemory.add`, to fit the margin"
    return CONTENTS.sub(lambda m: re.sub(r'>(?:fastrl_replay|[A-Z]\w*)\.(?=\w)', '>', m[0]), page)


# ---- search

# What a reader most probably wants comes first: entries of the reference for users, then guides, chapters, the inside
WEIGHTS = {'Start': 1.2, 'How to': 1.2, 'Tutorials': 1, 'The book': 1, 'Inside': .6, 'The project': .5}
CENTRAL = {'ReplayMemory': 1.7, 'Batch': 1.6}


HEADING = re.compile(r'<h[1-6][^>]*data-anchor-id="([^"]+)".*?</h[1-6]>', re.S)
# A result has its page above it
TITLE = re.compile(r'<nav[^>]*quarto-page-breadcrumbs.*?</nav>|<h1 class="title">.*?</h1>', re.S)
HEADS = re.compile(r'<div class="parameters">\s*<div[^>]*>\s*<table[^>]*>\s*<thead>.*?</thead>', re.S)     # all alike
INLINE = re.compile(r'</?(?:a|code|em|span|strong)\b[^>]*>')


TEX = re.compile(r'\\[(\[](.*?)\\[)\]]', re.S)         # a formula, as it stands in a rendered page
SIGNS = dict(alpha='α', beta='β', gamma='γ', delta='δ', epsilon='ε', eta='η', sum='Σ', cdot='·', le='≤', ge='≥',
             times='×', infty='∞', to='→', ldots='…', max='max', min='min', log='log', exp='exp') | {'in': '∈'}


def plain_formula(tex):
    "A formula in the words of an excerpt: signs for their commands, without braces and backslashes"
    tex = re.sub(r'\\d?frac\{([^{}]*)\}\{([^{}]*)\}', r'\1/\2', tex)
    tex = re.sub(r'\\([a-zA-Z]+)', lambda m: SIGNS.get(m[1], ' '), tex)
    return re.sub(r'\s+', ' ', re.sub(r'[\\{}$]', '', tex)).strip()


def texts(page):
    """What a page says below each heading, by the heading's place ('' for what comes first).

    Outputs of cells are there, folded source is not."""
    main = page.partition('<main')[2].partition('<nav class="page-navigation"')[0]
    main = re.sub(r'<details class="code-fold">.*?</details>|<(script|style)\b.*?</\1>', ' ', main, flags=re.S)
    main = TEX.sub(lambda m: plain_formula(html.unescape(m[1])), TITLE.sub(' ', HEADS.sub(' ', main)))
    parts = HEADING.split(main.partition('>')[2])
    says = [' '.join(html.unescape(re.sub(r'<[^>]*>', ' ', INLINE.sub('', o))).split()) for o in parts[::2]]
    return dict(zip(['', *parts[1::2]], says))


def search_entry(entry, ref, groups):
    "An entry of the search index with `weight`, and for the reference `name`"
    page = entry['href'].partition('.html')[0]
    if not page.startswith('reference/'):
        return {**entry, 'weight': WEIGHTS.get(groups.get(page, 'The project'), 1)}
    named = entry['section'] or entry['title']
    found = next((e for e in ref.entries.get(named, []) if e.page == page), None)
    if found is None: return {**entry, 'weight': .3}
    root = found.name.partition('.')[0]
    if ref.is_part(found): weight = .5
    elif root in CENTRAL: weight = CENTRAL[root]
    elif ref.is_public(found): weight = 1.4 if root in ref.chosen else .9
    else: weight = .5
    if found.kind == 'property': weight *= .6            # a number such as n_steps is seldom what is asked for
    return {**entry, 'weight': weight, 'name': found.name}


WORD = re.compile(r'\w+')
SHOWN = 240     # characters of a text that a result may show


def brief(entry):
    "An entry with the beginning of its text, and the other words in it once; without what is empty"
    text = entry.pop('text')
    start = text if len(text) <= SHOWN else text[:SHOWN].rpartition(' ')[0]
    seen, more = {o.lower() for o in WORD.findall(start)}, []
    for o in WORD.findall(text[len(start):]):
        if len(o) > 1 and not o.isdigit() and o.lower() not in seen: more.append(o)
        seen.add(o.lower())
    needless = {'objectID', 'section', 'title'} if 'name' in entry else {'objectID'}      # the address has the module
    return {k: v for k, v in (entry | {'text': start, 'more': ' '.join(more)}).items() if v and k not in needless}


def write_search(site, ref, groups):
    """`search.js`: what is on the site, and what each entry is worth; outputs of cells are in it, folded source is not,
    nor are examples that the reference has, too, and methods of classes that serve the library itself.

    It is a script, since a page that is read from a disk may load nothing else."""
    path, said = site/'search.json', {}
    methods = [e for same in ref.entries.values() for e in same if e.owner]
    inner = {f'{e.page}.html#{e.place}' for e in methods if not ref.is_public(e)}
    entries = json.loads(path.read_text(encoding='utf-8'))
    entries = [e for e in entries if not e['href'].startswith(f'{examples.PAGE}.html#') and e['href'] not in inner]
    entries = [e for e in entries if not re.match(r'reference/modules/.*#(?:inside|constants)$', e['href'])]
    for e in entries:
        page, _, place = e['href'].partition('#')
        if page not in said: said[page] = texts((site/page).read_text(encoding='utf-8'))
        e['text'] = said[page].get(place, e['text'])
    made = [brief(search_entry(e, ref, groups)) for e in entries if e['text']]     # not of headings without a text
    text = json.dumps(made, ensure_ascii=False, separators=(',', ':'))
    (site/'search.js').write_text(f'window.searchIndex = {text}\n', encoding='utf-8')
    path.unlink()


# ---- style sheets

RULE = re.compile(r'([^{}]*)\{((?:[^{}]|\{[^{}]*\})*)\}')


def pruned(css, used):
    "A style sheet without the rules for classes that no page has"
    def kept(selector):
        return {*re.findall(r'\.([a-zA-Z][\w-]*)', re.sub(r':(?:not|is|where)\([^)]*\)', '', selector))} <= used
    def parts(text):
        for head, body in RULE.findall(text):
            if head.startswith(('@media', '@supports')): body = ''.join(parts(body))
            if not head.startswith('@'): head = ','.join(filter(kept, re.split(r',(?![^(]*\))', head)))
            if head and body: yield f'{head}{{{body}}}'
    return ''.join(parts(re.sub(r'/\*.*?\*/|@charset[^;]*;', '', css, flags=re.S)))


def lighten(site):
    "Themes without what no page uses, scripts in one file, no font: styles.css has the icons"
    libs = site/'site_libs'
    for unused in 'bootstrap', 'bootstrap-icons', 'fuse': shutil.rmtree(libs/unused)
    own, script = site/'site.js', libs/'smalldocs.js'
    script.write_text(script.read_text(encoding='utf-8') + own.read_text(encoding='utf-8'), encoding='utf-8')
    own.unlink()
    pages = ' '.join(p.read_text(encoding='utf-8') for p in site.rglob('*.html'))
    used = {*' '.join(re.findall(r'class="([^"]*)"', pages)).split()}
    used |= {*re.findall(r'[\w-]+', script.read_text(encoding='utf-8'))}
    for p in libs.rglob('*.css'):       # without a theme's web font: the reader's own sans-serif serves as well
        p.write_text(pruned(IMPORT.sub('', p.read_text(encoding='utf-8')), used), encoding='utf-8')


# ---- for a site with an address

def with_address(page, name, url):
    "A page that says where it is; one for addresses that lead nowhere loads all from there, whatever was asked for"
    if not url: return page
    said = f'<base href="{url}/">' if name == '404' else f'<link rel="canonical" href="{url}/{name}.html">'
    return page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">{said}', 1)


def write_map(site, url):
    "For search engines: where the map of the site is, and a map without the page for addresses that lead nowhere"
    (site/'robots.txt').write_text(f'User-agent: *\nAllow: /\nSitemap: {url}/sitemap.xml\n', encoding='utf-8')
    path = site/'sitemap.xml'
    lost = re.compile(r'\s*<url>\s*<loc>[^<]*/404\.html</loc>.*?</url>', re.S)
    path.write_text(lost.sub('', path.read_text(encoding='utf-8')), encoding='utf-8')


def finish(site, sources, ref, groups, root, url=''):
    """All of it. `sources`: page → the file it is made from; `groups`: page → its group in the sidebar, or Inside;
    `url`: where it will be, if that is known."""
    write_search(site, ref, groups)
    for p in site.rglob('*.html'):
        name = p.relative_to(site).as_posix().removesuffix('.html')
        page = with_source(p.read_text(encoding='utf-8'), p, sources.get(name), root)
        if name.startswith(('reference/', examples.PAGE)): page = with_breaks(with_short_contents(page))
        if re.fullmatch(r'reference/(?!index)\w+', name): page = without_subtitle(page)
        page = with_whole_options(wrapped(with_pictures(with_drawings(own_maths(reachable(page)), p), p)))
        p.write_text(with_address(page, name, url.rstrip('/')), encoding='utf-8')
    lighten(site)
    if url: write_map(site, url.rstrip('/'))


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
