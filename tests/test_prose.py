"Titles, the links from chapter to chapter, and an image for each tutorial"
import json, re
from collections import Counter

import pytest


NEIGHBOUR = re.compile(r'\[(?:the )?(last|previous|next) chapter\]\(([^)#]+)', re.I)
COUNTED = re.compile(r'\b(?:first|second|third|fourth|fifth|sixth)\]?(?:\([^)]*\))? part\b(?= of (?:this|the) book)|\[(?:first|second|third|fourth|fifth|sixth) part\]'
                     r'|\b(?:two|three|four|five|\d+) chapters\]?(?:\([^)]*\))? (?:before|ago|later|after)\b', re.I)


@pytest.fixture(scope='module')
def notebooks(root):
    "{path below nbs: cells}"
    paths = [p for p in sorted((root/'nbs').rglob('*.ipynb')) if not any(o[0] in '._' for o in p.relative_to(root).parts)]
    return {p.relative_to(root/'nbs').as_posix(): json.loads(p.read_text(encoding='utf-8'))['cells'] for p in paths}


def texts(cells): return [''.join(c['source']) for c in cells if c['cell_type'] == 'markdown']


def test_titles_differ(notebooks):
    titles = Counter(re.match(r'# (.*)', texts(cells)[0])[1] for name, cells in notebooks.items())
    assert not [o for o, n in titles.items() if n > 1]


def misnamed(name, text, order):
    "The links of a page that call a chapter the last or the next one, and lead elsewhere; and what counts chapters or parts"
    wrong = [m[0] for m in COUNTED.finditer(text)]
    for m in NEIGHBOUR.finditer(text):
        at = order.index(name) + (1 if m[1].lower() == 'next' else -1)
        if order[at].rpartition('/')[2] != m[2].rpartition('/')[2]: wrong.append(m[0])
    return wrong


def test_the_last_and_the_next_chapter_are_these(notebooks):
    "Chapters move: nothing counts them, or the parts of the book"
    order = [*notebooks]
    assert not {name: found for name, cells in notebooks.items() if (found := misnamed(name, '\n'.join(texts(cells)), order))}


@pytest.mark.parametrize('text,n', [
    ('as [the next chapter](3_c.ipynb) shows', 0), ('as [the last chapter](p/1_a.ipynb) shows', 0), ('as [the next chapter](1_a.ipynb) shows', 1),
    ('[three chapters](1_a.ipynb) before', 1), ('the [third part](3_c.ipynb) of this book', 1), ('the third part of the book', 1), ('a third part of the rows', 0)])
def test_a_misnamed_chapter_is_noticed(text, n): assert len(misnamed('p/2_b.ipynb', text, ['p/1_a.ipynb', 'p/2_b.ipynb', 'p/3_c.ipynb'])) == n


def test_each_tutorial_has_an_image(notebooks):
    "In a stored output, or beside the text"
    def images(cells):
        shown = [k for c in cells for o in c.get('outputs', []) for k in o.get('data', {}) if k.startswith('image/')]
        return shown + [o for text in texts(cells) for o in re.findall(r'!\[[^\]]*\]\(([^)]*)\)', text)]
    tutorials = {name: images(cells) for name, cells in notebooks.items() if name.startswith('tutorials/')}
    assert len(tutorials) > 10 and not [name for name, found in tutorials.items() if not found]
