"The drawings are what tools/drawings.py draws, can be read, and are shown with a text for those who can't see them"
import json, re, subprocess, sys
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


def test_the_files_are_what_is_drawn(root):
    ran = subprocess.run([sys.executable, root/'tools'/'drawings.py', '--check'], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert sorted(p.stem for p in (root/'nbs'/'images').glob('*.svg')) == sorted(NAMES)


def test_a_difference_is_noticed(root, tmp_path):
    (tmp_path/'tools').mkdir()
    (tmp_path/'nbs'/'images').mkdir(parents=True)
    script = tmp_path/'tools'/'drawings.py'
    script.write_text((root/'tools'/'drawings.py').read_text(encoding='utf-8'), encoding='utf-8')
    def run(*args): return subprocess.run([sys.executable, script, *args], capture_output=True, text=True)
    assert run().returncode == 0 and run('--check').returncode == 0
    ring = tmp_path/'nbs'/'images'/'ring.svg'
    ring.write_text(ring.read_text(encoding='utf-8').replace('29', '30'), encoding='utf-8')
    ran = run('--check')
    assert ran.returncode != 0 and 'ring.svg' in ran.stderr and 'disk.svg' not in ran.stderr


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


def test_pictures_are_made_from_the_animation(root):
    sys.path.insert(0, str(root/'tools'))
    import drawings
    from PIL import Image
    svg = (root/'nbs'/'images'/'replay.svg').read_text(encoding='utf-8')
    for name in drawings.PICTURES:
        assert drawings.made_from(root/'nbs'/'images'/name) == drawings.digest(svg), 'run `python tools/drawings.py --pictures`'
    film = Image.open(root/'nbs'/'images'/'replay.gif')
    assert film.size == (drawings.WIDTH, drawings.replay().height) and film.n_frames > 20
    assert Image.open(root/'nbs'/'images'/'card.png').size == (1200, 630)


def test_the_animation_shows_what_a_memory_does(root):
    "Each moment against a memory that is asked the same"
    import numpy as np
    from fastrl_replay.all import Proportional, ReplayMemory, Transition
    sys.path.insert(0, str(root/'tools'))
    import drawings
    told, z = drawings.moments(), np.zeros(1, np.float32)
    memory = ReplayMemory(drawings.SLOTS, Proportional(alpha=1., eps=0.), seed=0)
    for (_, _, before, _), (words, ids, priorities, drawn) in zip(told, told[1:]):
        if words.startswith('memory.add'):
            id = memory.add(Transition(z, 0, 0., z, False, False))
            assert ids[id % drawings.SLOTS] == id
        elif words.startswith('batch.update') and before != priorities:
            memory.update_priorities(np.array([ids[o] for o in drawn]), np.array([priorities[o] for o in drawn]))
        living = [k for k, o in enumerate(ids) if o is not None]
        assert np.allclose(memory.sampler.priorities[:len(living)], [priorities[k] for k in living])
        assert set(drawn) <= {*living} and len(drawn) in (0, drawings.BATCH)


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
