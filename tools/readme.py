"""README.md from nbs/index.ipynb: prose as it stands, code cells as fenced code, stored outputs below them.

    python tools/readme.py           write README.md
    python tools/readme.py --print   write it to standard output instead

Nothing is executed. A drawing shown by `SVG('images/x.svg')` becomes a link to that file, or to `images/x.gif` and
`images/x-dark.gif` where there are such: animations move everywhere as a GIF. A stored picture of a cell with
`#| readme: images/x.png` is written to that file and shown. The logo takes the place of the title, and badges and
links stand below it: on the site, they are in the head of every page. Obeyed are `#| hide`, `#| echo: false`,
`#| output: false`, `#| include: false` and a leading front matter cell or `# Title` with its `> description`.
"""
import base64, json, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BRAND = ROOT/'nbs'/'brand'
START = 'nbs/start/'
BADGES = {'version': 'CHANGELOG.md', 'python': START + '01_install.ipynb', 'license': 'LICENSE',
          'book': 'CONTRIBUTING.md'}
LINKS = {'Install': '#install', 'Documentation': START + '02_concepts.ipynb', 'Comparison': START + '04_compared.ipynb',
         'FAQ': START + '03_faq.ipynb', 'Limits': '#limits', 'Citation': 'CITATION.cff', 'Licence': 'LICENSE'}
NOTE = '<!-- Made from nbs/index.ipynb by `make export`: edit the notebook, not this file. -->'


def directives(source):
    "The `#|` lines on top of a cell, as a dict, and the code below them"
    head = re.match(r'(?:#\|[^\n]*\n?|\n)*', source)[0]
    found = re.findall(r'^#\|\s*([\w-]+)\s*:?\s*(.*?)\s*$', head, re.M)
    return dict(found), source[len(head):].strip()


def hidden(options):
    return ('hide' in options or options.get('include') == 'false' or 'default_exp' in options)


def linked(text):
    "Text with links to notebooks and pictures pointing into nbs/, where a reader of the repository finds them"
    return re.sub(r'\]\((?!https?://|#|\.\./)([^)]+\.(?:ipynb|png|svg))', r'](nbs/\1', text).replace('](../', '](')


def output_text(out):
    "One stored output as Markdown; None where it has no text"
    data = out.get('data', {})
    if 'text/markdown' in data: return linked(''.join(data['text/markdown']).strip())
    text = ''.join(out.get('text') or data.get('text/plain') or '').rstrip()
    if text.startswith('<Figure'): return None      # a picture, which only the site can show
    return '\n'.join(('    ' + line).rstrip() for line in text.splitlines()) or None


def drawing(code):
    "The picture in Markdown that a cell of code `SVG('images/x.svg')` shows, with the drawing's title; else None"
    shown = re.fullmatch(r"SVG\('(images/[^']+\.svg)'\)", code)
    if not shown: return None
    path = ROOT/'nbs'/shown[1]
    title = re.search('<title>(.*)</title>', path.read_text(encoding='utf-8'))[1]
    moving, dark = path.with_suffix('.gif'), path.with_name(f'{path.stem}-dark.gif')
    if not dark.exists(): return f'![{title}]({path.relative_to(ROOT).as_posix()})'
    return themed(moving, dark, f'alt="{title}" width="300"')


def themed(light, dark, attributes):
    "A picture for light pages, and another one for dark ones"
    light, dark = (o.relative_to(ROOT).as_posix() for o in (light, dark))
    return (f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
            f'<img src="{light}" {attributes}></picture>')


def stored_picture(cell):
    "The PNG among the stored outputs of a cell, as bytes"
    found = (o.get('data', {}).get('image/png') for o in cell['outputs'])
    return base64.b64decode(''.join(next(filter(None, found))))


def pictures(nb):
    "The pictures that the page takes from stored outputs: {file: bytes}"
    found = {}
    for cell in nb['cells']:
        if cell['cell_type'] != 'code': continue
        name = directives(''.join(cell['source']))[0].get('readme')
        if name: found[ROOT/'nbs'/name] = stored_picture(cell)
    return found


def code_cell(cell):
    options, code = directives(''.join(cell['source']))
    if hidden(options): return
    if drawing(code):
        yield drawing(code)
        return
    if code and options.get('echo') != 'false': yield f'```python\n{code}\n```'
    if 'readme' in options: yield f'![{options["fig-cap"]}](nbs/{options["readme"]})'
    elif options.get('output') != 'false': yield from filter(None, map(output_text, cell.get('outputs', [])))


def front(title):
    "The logo as the title, badges, and links"
    logo = themed(BRAND/'logo.svg', BRAND/'logo-dark.svg', f'alt="{title}" width="340"')
    yield f'<h1>{logo}</h1>'
    def badge(name):
        path = BRAND/f'badge-{name}.svg'
        says = re.search('<title>(.*)</title>', path.read_text(encoding='utf-8'))[1]
        return f'[![{says}]({path.relative_to(ROOT).as_posix()})]({BADGES[name]})'
    yield ' '.join(map(badge, BADGES))
    yield ' · '.join(f'[{name}]({where})' for name, where in LINKS.items())


def readme(nb):
    "The whole page"
    parts = []
    for cell in nb['cells']:
        if cell['cell_type'] == 'markdown': parts.append(linked(''.join(cell['source']).strip()))
        elif cell['cell_type'] == 'code': parts += code_cell(cell)
    title, _, rest = parts[0].partition('\n')
    logo, badges, links = front(title.lstrip('# '))
    return '\n\n'.join(filter(None, [logo, NOTE, badges, rest.strip(), links, *parts[1:]])) + '\n'


def main():
    "Write the page and its pictures, or print the page"
    nb = json.loads((ROOT/'nbs'/'index.ipynb').read_text(encoding='utf-8'))
    if '--print' in sys.argv[1:]: sys.stdout.buffer.write(readme(nb).encode())
    else:
        (ROOT/'README.md').write_text(readme(nb), encoding='utf-8')
        for path, data in pictures(nb).items(): path.write_bytes(data)


if __name__ == '__main__': main()
