"What the notebooks say around their code: captions, titles, for whom a chapter is, and which chapter they mean"
import json, re
from collections import Counter

import numpy as np
import pytest

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.mixed import MixedMemory
from fastrl_replay.steps import Transition

NEIGHBOUR = re.compile(r'\[(?:the )?(last|previous|next) chapter\]\(([^)#]+)', re.I)
COUNTED = re.compile(r'\b(?:first|second|third|fourth|fifth|sixth)\]?(?:\([^)]*\))? part\b(?= of (?:this|the) book)|\[(?:first|second|third|fourth|fifth|sixth) part\]'
                     r'|\b(?:two|three|four|five|\d+) chapters\]?(?:\([^)]*\))? (?:before|ago|later|after)\b', re.I)


@pytest.fixture(scope='module')
def notebooks(root):
    "{path below nbs: cells}"
    paths = [p for p in sorted((root/'nbs').rglob('*.ipynb')) if not any(o[0] in '._' for o in p.relative_to(root).parts)]
    return {p.relative_to(root/'nbs').as_posix(): json.loads(p.read_text(encoding='utf-8'))['cells'] for p in paths}


def texts(cells): return [''.join(c['source']) for c in cells if c['cell_type'] == 'markdown']


def uncaptioned(cells):
    "The cells that show a figure, and have no caption of their own"
    shown = [c for c in cells if any(k.startswith('image/') for o in c.get('outputs', []) for k in o.get('data', {}))]
    return [''.join(c['source'])[:80] for c in shown if not re.search(r'^#\| fig-cap: .{20}', ''.join(c['source']), re.M)]


def test_every_figure_has_a_caption_of_its_own(notebooks):
    assert not {name: found for name, cells in notebooks.items() if (found := uncaptioned(cells))}


def test_a_figure_without_a_caption_is_noticed():
    cell = dict(outputs=[dict(data={'image/png': ''})])
    assert uncaptioned([dict(cell, source=['plt.plot(x)'])]) == ['plt.plot(x)']
    assert not uncaptioned([dict(cell, source=['#| fig-cap: It rises from left to right.\n', 'plt.plot(x)']), dict(source=['x'], outputs=[])])


def test_a_chapter_says_whom_it_is_for_where_users_can_do_without_it(notebooks):
    "The others are for everybody, so they need not say it"
    begins = Counter(m[1] for cells in notebooks.values() for o in texts(cells) if (m := re.match(r'\*(For [^*]*)\*', o)))
    assert set(begins) == {'For contributors.', 'For the curious.'} and sum(begins.values()) < len(notebooks)/2


def test_the_notebooks_are_few_enough_to_be_known(notebooks): assert len(notebooks) <= 106, 'which two say the same?'


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


def test_the_newest_version_says_how_to_upgrade(root):
    newest = (root/'CHANGELOG.md').read_text(encoding='utf-8').split('\n## ')[1]
    assert re.match(r'\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)\n\n### Upgrading from \d+\.\d+\n', newest)
    said = newest.partition('### Upgrading')[2].partition('\n### ')[0]
    assert {'learn_first', "dedup='large'", 'ids_in', 'memory.episodes()'} <= set(re.findall(r"`([^`=]+(?:='\w+')?)", said))


def test_the_title_of_a_mixture_can_be_read(notebooks):
    "A line for each memory"
    members = [ReplayMemory(100, seed=k) for k in range(3)]
    for o in members: o.extend([Transition(np.zeros(2, np.float32), 0, 1., np.zeros(2, np.float32), False, False)]*5)
    figure = MixedMemory(members, shares=(.5, .25, .25), seed=0).show()
    lines = figure._suptitle.get_text().splitlines()
    assert len(lines) == 3 and all(o.startswith(f'memory {k}: ReplayMemory(5 of 100') and len(o) < 110 for k, o in enumerate(lines))
