"""README.md from nbs/index.ipynb: prose as it stands, code cells as fenced code, stored outputs below them.

    python tools/readme.py           write README.md
    python tools/readme.py --print   write it to standard output instead

Nothing is executed. A drawing shown by `SVG('images/x.svg')` becomes a link to that file, or to `images/x.gif` where
there is one: animations move everywhere as a GIF. The logo takes the place of the title, and the badges stand below
it: on the site it is in the head of every page. Obeyed are `#| hide`, `#| echo: false`, `#| output: false`,
`#| include: false` and a leading front matter cell or `# Title` with its `> description`.
"""
import json, re, sys
from pathlib import Path

import brand

ROOT = Path(__file__).resolve().parent.parent
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
    moving = path.with_suffix('.gif')
    return f'![{title}]({(moving if moving.exists() else path).relative_to(ROOT).as_posix()})'


def code_cell(cell):
    options, code = directives(''.join(cell['source']))
    if hidden(options): return
    if drawing(code):
        yield drawing(code)
        return
    if code and options.get('echo') != 'false': yield f'```python\n{code}\n```'
    if options.get('output') != 'false': yield from filter(None, map(output_text, cell.get('outputs', [])))


def picture(name, says, size=''):
    return f'<img src="{(brand.FOLDER/name).relative_to(ROOT).as_posix()}" alt="{says}"{size}>'


def front(title):
    "The logo as the title, with another one for dark pages, and a line of badges"
    dark = (brand.FOLDER/'logo-dark.svg').relative_to(ROOT).as_posix()
    logo = picture('logo.svg', title, ' width="340"')
    yield f'<h1><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">{logo}</picture></h1>'
    said = {name: re.search('<title>(.*)</title>', text)[1] for name, text in brand.made().items()}
    yield '\n'.join(picture(name, o) for name, o in said.items() if name.startswith('badge'))


def readme(nb):
    "The whole page"
    parts = []
    for cell in nb['cells']:
        if cell['cell_type'] == 'markdown': parts.append(linked(''.join(cell['source']).strip()))
        elif cell['cell_type'] == 'code': parts += code_cell(cell)
    title, _, rest = parts[0].partition('\n')
    logo, badges = front(title.lstrip('# '))
    return '\n\n'.join(filter(None, [logo, NOTE, badges, rest.strip(), *parts[1:]])) + '\n'


if __name__ == '__main__':
    page = readme(json.loads((ROOT/'nbs'/'index.ipynb').read_text(encoding='utf-8')))
    if '--print' in sys.argv[1:]: sys.stdout.buffer.write(page.encode())
    else: (ROOT/'README.md').write_text(page, encoding='utf-8')
