"Drawings lead to chapters, and each is shown in a notebook as it is in its file"
import json, re
from xml.etree import ElementTree

import pytest

SVG = '{http://www.w3.org/2000/svg}'
NAMES = ['flow', 'concepts', 'ring', 'sum_tree', 'frames', 'disk', 'n_step', 'replay']
@pytest.fixture(scope='module', params=NAMES)
def drawing(request, root):
    "(name, the root of its tree)"
    return request.param, ElementTree.parse(root/'nbs'/'images'/f'{request.param}.svg').getroot()


def cells(root):
    "Every cell: (notebook's path, kind, source, outputs)"
    for p in sorted((root/'nbs').rglob('*.ipynb')):
        if any(o[0] in '._' for o in p.relative_to(root).parts): continue
        for c in json.loads(p.read_text(encoding='utf-8'))['cells']:
            yield p, c['cell_type'], ''.join(c['source']), c.get('outputs', [])


def test_links_lead_to_chapters(root, drawing):
    name, tree = drawing
    pages = {re.sub(r'(^|/)\d+[a-z]?_', r'\1', p.relative_to(root/'nbs').with_suffix('.html').as_posix()) for p in (root/'nbs').rglob('*.ipynb')}
    links = {o.get('href') for o in tree.iter(f'{SVG}a')}
    assert links <= pages and bool(links) == (name == 'flow')


def test_each_is_shown_in_a_notebook(root):
    shown = set()
    for p, kind, source, outputs in cells(root):
        for path in re.findall(r'!\[[^\]]*\]\(([^)]*\.svg)\)', source if kind == 'markdown' else ''):
            assert (p.parent/path).is_file(), (p.name, path)
            shown.add(path.rpartition('/')[2][:-4])
        if kind == 'code' and (found := re.search(r"^SVG\('(.*)'\)$", source, re.M)):
            stored = [''.join(o['data']['image/svg+xml']) for o in outputs if 'image/svg+xml' in o.get('data', {})]
            assert [o.strip() for o in stored] == [(p.parent/found[1]).read_text(encoding='utf-8').strip()], p.name
            shown.add(found[1].rpartition('/')[2][:-4])
    assert shown == set(NAMES)
