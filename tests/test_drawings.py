"The drawings can be read, and are shown with a text for those who can't see them"
import json, re
from xml.etree import ElementTree

import pytest

SVG = '{http://www.w3.org/2000/svg}'
NAMES = ['flow', 'concepts', 'ring', 'sum_tree', 'frames', 'disk', 'n_step', 'replay']
SMALLEST = 12        # pixels of a letter; drawings are shown at their own size or larger
PHONE = 366          # pixels of a column on a screen of 400


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


def width_of(text, size):
    "About how wide a text is in DejaVu Sans, which is wider than most"
    return .5*size*len(text)


def sticking_out(tree):
    "Texts that leave their drawing"
    width, height = float(tree.get('width')), float(tree.get('height'))
    for o in tree.iter(f'{SVG}text'):
        x, wide = float(o.get('x')), width_of(o.text or '', float(o.get('font-size')))
        left = x - dict(start=0, middle=wide/2, end=wide)[o.get('text-anchor')]
        if not (0 < left and left + wide < width and 0 < float(o.get('y')) < height): yield o.text


def test_letters_are_large_enough_and_inside(drawing):
    _, tree = drawing
    sizes = [float(o.get('font-size')) for o in tree.iter(f'{SVG}text')]
    assert len(sizes) > 8 and min(sizes) >= SMALLEST
    assert float(tree.get('width')) <= PHONE
    assert not list(sticking_out(tree))


def test_a_text_that_sticks_out_is_noticed():
    text = '<text x="{}" y="10" font-size="15" text-anchor="{}">twelve signs</text>'
    for x, anchor, out in ((60, 'middle', False), (10, 'middle', True), (60, 'start', True), (90, 'end', True), (110, 'end', False)):
        tree = ElementTree.fromstring(f'<svg xmlns="{SVG[1:-1]}" width="120" height="20">{text.format(x, anchor)}</svg>')
        assert bool(list(sticking_out(tree))) == out, (x, anchor)


def test_each_has_a_title_and_the_colour_of_the_text(drawing):
    "Nothing but orange is of a colour of its own, so that a drawing can be read on any ground"
    name, tree = drawing
    assert len(tree.find(f'{SVG}title').text) > 60
    colours = {o.get(k) for o in tree.iter() for k in ('fill', 'stroke')} - {None}
    assert colours <= {'none', 'currentColor', '#ff7f0e'} and 'currentColor' in colours
    assert all(o.get('fill') == 'currentColor' for o in tree.iter(f'{SVG}text'))
    assert all(o.get('id').startswith(f'{name}-') for o in tree.iter() if o.get('id')), 'a page may have several drawings'


def test_the_animation_moves_in_light_and_dark_and_begins_with_a_full_ring(root):
    from PIL import Image
    light, dark = (Image.open(root/'nbs'/'images'/name) for name in ('replay.gif', 'replay-dark.gif'))
    tree = ElementTree.parse(root/'nbs'/'images'/'replay.svg').getroot()
    assert light.size == dark.size == (int(tree.get('width')), int(tree.get('height'))) and light.n_frames == dark.n_frames > 20
    assert light.convert('L').getpixel((1, 1)) > 250 and dark.convert('L').getpixel((1, 1)) < 20
    seen = {''.join(o.itertext()) for o in tree.iter(f'{SVG}text') if o.get('opacity') == '1'}
    assert {str(k) for k in range(10)} <= seen
    assert Image.open(root/'nbs'/'images'/'card.png').size == (1200, 630)


def test_links_lead_to_chapters(root, drawing):
    name, tree = drawing
    pages = {re.sub(r'(^|/)\d+[a-z]?_', r'\1', p.relative_to(root/'nbs').with_suffix('.html').as_posix()) for p in (root/'nbs').rglob('*.ipynb')}
    links = {o.get('href') for o in tree.iter(f'{SVG}a')}
    assert links <= pages and bool(links) == (name == 'flow')


def test_each_is_shown_in_a_notebook_with_its_text(root):
    shown = set()
    for p, kind, source, outputs in cells(root):
        for alt, path in re.findall(r'!\[([^\]]*)\]\(([^)]*\.svg)\)', source if kind == 'markdown' else ''):
            assert (p.parent/path).is_file(), (p.name, path)
            assert len(alt) > 40, (p.name, path)
            shown.add(path.rpartition('/')[2][:-4])
        if kind == 'code' and (found := re.search(r"^SVG\('(.*)'\)$", source, re.M)):
            stored = [''.join(o['data']['image/svg+xml']) for o in outputs if 'image/svg+xml' in o.get('data', {})]
            assert [o.strip() for o in stored] == [(p.parent/found[1]).read_text(encoding='utf-8').strip()], p.name
            shown.add(found[1].rpartition('/')[2][:-4])
    assert shown == set(NAMES)
