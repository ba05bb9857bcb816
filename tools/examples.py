"""The examples of the reference: sections of a chapter, each headed by the name that it is about.

A section says what is returned, what is raised and what to see also, in three points, and has a few lines of code. The
chapter runs as a test like any other; its sections are shown once more below the entries of the reference.
"""
import html, json, re
from dataclasses import dataclass, field

PAGE, STEPS = 'looking/names', 'the-steps'           # the chapter, and the place of what all of its examples use
NAME = re.compile(r'^### `([\w.]+)`\n', re.M)
POINT = re.compile(r'^- \*\*(Returns|Raises|See also)\*\* (.+)$', re.M)
OPTIONS = re.compile(r'\A(?:#\|.*\n)+')              # on top of a cell
OUTPUT = '```{{=html}}\n<div class="cell-output cell-output-stdout">\n<pre><code>{}</code></pre>\n</div>\n```'


@dataclass
class Example:
    "What the chapter says of a name, and the cells of code below it"
    name: str
    says: str
    cells: list[dict] = field(default_factory=list)

    @property
    def place(self): return f'{PAGE}.html#{self.name.lower()}'

    @property
    def points(self):
        "Returns, Raises, See also → what is said"
        return dict(POINT.findall(self.says))

    def markdown(self, up):
        "The example for a page of the reference, from which the root is `up`"
        steps = f'[the steps]({up}{PAGE}.html#{STEPS})'
        yield f'From [Names at work]({up}{self.place}), where {steps} are described:'
        for cell in self.cells:
            yield f'```python\n{OPTIONS.sub("", "".join(cell["source"]))}\n```'
            yield from (OUTPUT.format(html.escape(o)) for o in texts(cell))
            if pictured(cell): yield f'The figure is shown [there]({up}{self.place}).'


def texts(cell):
    "The outputs of a cell that are text"
    found = (''.join(o.get('text') or o.get('data', {}).get('text/plain') or '') for o in cell['outputs'])
    return [o.rstrip() for o in found if o and not o.startswith('<Figure')]


def pictured(cell): return any('image/png' in o.get('data', {}) for o in cell['outputs'])


def read(path):
    "Name → `Example`, from a notebook: a heading that is a name, and the code up to the next text"
    found, at = {}, None
    for cell in json.loads(path.read_text(encoding='utf-8'))['cells']:
        text = ''.join(cell['source'])
        if cell['cell_type'] == 'markdown':
            names = NAME.findall(text)
            at = Example(names[0], NAME.split(text)[2].strip()) if names else None
            if at: found[at.name] = at
        elif at and cell['cell_type'] == 'code': at.cells.append(cell)
    return found
