"""The drawings of the book, made by code: nbs/images/*.svg

    python tools/drawings.py           write them
    python tools/drawings.py --check   say which of them differ from what this file draws, and fail if any does

Each has a light ground of its own, so that it can be read on a dark page. Orange is this library and what it does; all
else is grey.
"""
import math, sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT/'nbs'/'images'
WIDTH, SIZE, SMALL = 680, 15, 13       # of a drawing, of its text, of its smallest text; shown at this size
OURS, PALE = '#ff7f0e', '#ffe5cc'
INK, SOFT, GREY, FAINT, GROUND = '#333', '#555', '#767676', '#d5d5d5', '#fcfcfa'
FONT = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
MONO = dict(font_family='monospace')
HEAD = ('<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>')      # of an arrow


class Drawing:
    "Shapes and words on a ground of `WIDTH` by `height`; `title` is read aloud in place of the picture"
    def __init__(self, height, title):
        self.height, self.title, self.parts = height, title, []

    def put(self, tag, body=None, **attributes):
        "An element; `_` in an attribute's name is `-`, numbers are rounded to a tenth"
        def plain(v): return f'{v:.1f}'.removesuffix('.0') if isinstance(v, (int, float)) else v
        named = ' '.join(f'{k.rstrip("_").replace("_", "-")}="{escape(plain(v))}"' for k, v in attributes.items())
        self.parts.append(f'<{tag} {named}/>' if body is None else f'<{tag} {named}>{escape(body)}</{tag}>')

    def text(self, x, y, words, size=SIZE, anchor='middle', fill=INK, **more):
        self.put('text', words, x=x, y=y, font_size=size, text_anchor=anchor, fill=fill, **more)

    def box(self, x, y, w, h, words='', small='', ours=False, **more):
        "A rectangle, with words in its middle and smaller ones below them"
        look = dict(fill=PALE if ours else '#fff', stroke=OURS if ours else GREY, rx=4) | more
        self.put('rect', x=x, y=y, width=w, height=h, **look)
        middle = y + h/2 + 5 - (9 if small else 0)
        if words: self.text(x + w/2, middle, words)
        if small: self.text(x + w/2, middle + 18, small, SMALL, fill=SOFT)

    def line(self, *points, ours=False, arrow=True, **more):
        "Straight lines from point to point, with an arrow's head at the end"
        way = 'M' + 'L'.join(f'{x:g} {y:g}' for x, y in points)
        colour = OURS if ours else GREY
        look = dict(fill='none', stroke=colour, stroke_width=1.6) | more
        if arrow: look['marker_end'] = f'url(#{"ours" if ours else "grey"})'
        self.put('path', d=way, **look)

    def link(self, page):
        "What follows, until `unlink`, leads to a page of the site"
        self.parts.append(f'<a href="{page}">')
    def unlink(self): self.parts.append('</a>')

    def svg(self):
        "The whole file"
        heads = ''.join(HEAD.format(name=name, colour=colour) for name, colour in (('ours', OURS), ('grey', GREY)))
        size = f'width="{WIDTH}" height="{self.height}"'
        top = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {self.height}" role="img" {FONT}>'
        ground = (f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{self.height - 1}" rx="6" '
                  f'fill="{GROUND}" stroke="{FAINT}"/>')
        head = [top, f'<title>{escape(self.title)}</title>', f'<defs>{heads}</defs>', ground]
        return '\n'.join([*head, *self.parts, '</svg>']) + '\n'


def flow():
    "How data flows, from the environments to the learner and back"
    d = Drawing(310, 'Environments make steps, NStep adds up rewards, the replay stores steps in a memory and draws '
                     'batches, the loader hands them to the learner, which returns TD errors to the sampler and '
                     'weights to the agent')
    stages = [(112, 'GymStepper', 'makes steps', 'learning/stepper.html'),
              (106, 'NStep', 'n-step returns', 'learning/n_step.html'),
              (144, 'PrioritizedReplay', 'one batch is due', 'learning/replay.html'),
              (90, 'loader', 'hands over', 'learning/loader.html'),
              (110, 'DQNLearner', 'learns', 'learning/learner.html')]
    x, middles = 11, []
    for k, (w, name, small, page) in enumerate(stages):
        d.link(page)
        d.box(x, 26, w, 56, name, small, ours=True)
        d.unlink()
        if k: d.line((x - 24, 54), (x - 2, 54))
        middles.append(x + w/2)
        x += w + 24
    stepper, _, replay, _, learner = middles
    d.line((replay - 34, 82), (replay - 34, 138))
    d.text(replay - 42, 115, 'steps', SMALL, 'end')
    d.line((replay + 34, 140), (replay + 34, 84))
    d.text(replay + 42, 115, 'batches', SMALL, 'start')
    d.link('memory/memory.html')
    d.put('rect', x=replay - 122, y=140, width=244, height=98, rx=6, fill='#fff', stroke=OURS)
    d.text(replay, 160, 'ReplayMemory')
    d.box(replay - 112, 172, 108, 54, 'Storage', 'where rows are', ours=True)
    d.box(replay + 4, 172, 108, 54, 'Sampler', 'who is drawn', ours=True)
    d.unlink()
    d.line((learner - 22, 82), (learner - 22, 199), (replay + 114, 199))
    d.text(learner - 34, 190, 'TD errors', SMALL, 'end')
    d.link('learning/agents.html')
    d.box(11, 244, 112, 48, 'agent', 'states → actions', ours=True)
    d.unlink()
    d.line((learner + 22, 82), (learner + 22, 268), (125, 268))
    d.text(learner + 12, 260, 'weights', SMALL, 'end')
    d.line((stepper, 244), (stepper, 84))
    d.text(stepper + 8, 190, 'actions', SMALL, 'start')
    return d


def cells(d, x, y, values, w=36, h=30, bright=(), blank=()):
    "A row of small boxes; those at the places `bright` are orange"
    for k, v in enumerate(values):
        d.box(x + k*w, y, w, h, '' if k in blank else str(v), ours=k in bright, rx=0)


def concepts():
    "Two streams go into slots, and a batch comes out as columns"
    d = Drawing(372, 'Two environments make two streams of steps; the memory writes each into the next slot and gives '
                     'it an id; a batch is drawn from it as columns')
    d.text(16, 28, 'two streams of steps', anchor='start', fill=SOFT)
    for row, (name, steps) in enumerate((('env_id 0', range(4)), ('env_id 1', range(4)))):
        y = 42 + 40*row
        d.text(16, y + 20, name, SMALL, 'start')
        for k in steps:
            d.box(92 + 74*k, y, 62, 30, f'step {k}')
            if k: d.line((80 + 74*k, y + 15), (90 + 74*k, y + 15))
    d.line((382, 77), (416, 77))
    d.text(424, 66, 'each step gets the next id,', SMALL, 'start')
    d.text(424, 84, 'and is written to the slot', SMALL, 'start')
    d.text(424, 102, 'id % max_sz', SMALL, 'start', **MONO)
    d.text(16, 150, 'memory of 6 slots', anchor='start', fill=SOFT)
    d.text(16, 190, 'id', SMALL, 'start')
    d.text(16, 219, 'slot', SMALL, 'start')
    for slot, id in enumerate((6, 7, 2, 3, 4, 5)):
        d.box(92 + 74*slot, 168, 74, 32, str(id), ours=id in (3, 6, 7), rx=0)
        d.text(129 + 74*slot, 219, str(slot), SMALL, fill=SOFT)
    d.text(548, 180, 'ids 0 and 1', SMALL, 'start')
    d.text(548, 197, 'are overwritten', SMALL, 'start')
    d.text(16, 256, 'a batch: three rows, one array for each field', anchor='start', fill=SOFT)
    columns = [('ids', (7, 3, 6)), ('weights', ('1.0', '.62', '.9')), ('state', ('…',)*3), ('action', (0, 1, 1)),
               ('reward', ('1.', '0.', '1.')), ('next_state', ('…',)*3)]
    for k, (name, values) in enumerate(columns):
        x = 16 + 108*k
        d.text(x + 50, 280, name, SMALL, **MONO)
        for r, v in enumerate(values): d.box(x, 288 + 24*r, 100, 24, str(v), ours=True, rx=0)
    return d


def segment(x, y, inner, outer, start, end):
    "The path of a piece of a ring, between two angles in turns, clockwise from the top"
    def at(radius, turn): return f'{x + radius*math.sin(math.tau*turn):.1f} {y - radius*math.cos(math.tau*turn):.1f}'
    return (f'M{at(outer, start)}A{outer} {outer} 0 0 1 {at(outer, end)}L{at(inner, end)}'
            f'A{inner} {inner} 0 0 0 {at(inner, start)}z')


def ring():
    "The slots of a memory as a ring, with the ids in them"
    n, n_added, x, y = 12, 29, 170, 172
    d = Drawing(344, f'A ring of {n} slots with the ids {n_added - n} to {n_added - 1}: the oldest and the newest are '
                     f'neighbours, and the next step, id {n_added}, replaces the oldest')
    for id in range(n_added - n, n_added):
        slot = id % n
        share = (id - n_added + n + 1)/n                     # the newer, the darker
        way = segment(x, y, 84, 138, slot/n, (slot + 1)/n)
        d.put('path', d=way, fill=OURS, fill_opacity=.08 + .62*share, stroke='#fff', stroke_width=2)
        turn = math.tau*(slot + .5)/n
        d.text(x + 111*math.sin(turn), y - 111*math.cos(turn) + 5, str(id))
        d.text(x + 68*math.sin(turn), y - 68*math.cos(turn) + 5, str(slot), SMALL, fill=SOFT)
    d.text(x, y - 4, 'slot', SMALL, fill=SOFT)
    d.text(x, y + 14, '= id % 12', SMALL, fill=SOFT)
    turn = math.tau*((n_added % n) + .5)/n
    d.line((356, 238), (x + 142*math.sin(turn), y - 142*math.cos(turn)), ours=True)
    words = [(62, 'n_added = 29', 'steps were ever stored:'), (86, '', 'the next one gets id 29'),
             (124, 'first_id = 17', 'is the oldest id stored'), (158, 'len = 12', 'ids are alive: 17 to 28')]
    for below, name, meaning in words:
        d.text(364, below, name, anchor='start', **MONO)
        d.text(500, below, meaning, SMALL, 'start', fill=SOFT)
    d.text(364, 243, 'The next step goes to slot 29 % 12 = 5', anchor='start')
    d.text(364, 264, 'and replaces id 17. Priorities sent for 17', anchor='start')
    d.text(364, 285, 'from then on are dropped.', anchor='start')
    return d


def sum_tree():
    "A dart goes down the tree of sums"
    lines = [(2, 3, 0, 4), (5, 1, 6, 2), (0, 1, 4, 1), (3, 3, 0, 5)]
    sums = [sum(o) for o in lines]
    where = 1, 2                   # what a dart at 17.5 hits: the second group, its third weight
    d = Drawing(330, 'A sum tree over 16 weights: a dart at 17.5 passes the first group, whose sum is 9, and falls in '
                     'the second; 8.5 remain, which pass the weights 5 and 1 and fall on 6')
    d.box(290, 20, 100, 34, f'total {sum(sums)}', ours=True)
    d.text(404, 36, 'dart at 17.5, of 0 to 40', SMALL, 'start')
    d.text(404, 53, '17.5 ≥ 9, so not the first; 17.5 < 9 + 14', SMALL, 'start', fill=SOFT)
    for k, (total, line) in enumerate(zip(sums, lines)):
        x, ours = 22 + 162*k, k == where[0]
        d.line((340, 54), (x + 75, 96), ours=ours, arrow=ours)
        d.box(x + 40, 98, 70, 32, str(total), ours=ours)
        for j in range(4):
            hit = (k, j) == where
            d.line((x + 75, 130), (x + 20 + 37*j, 178), ours=hit, arrow=hit)
        cells(d, x + 2, 180, line, w=37, bright=[where[1]] if ours else ())
        for j in range(4): d.text(x + 20 + 37*j, 228, str(4*k + j), SMALL, fill=SOFT)
    d.text(218, 120, '8.5 are left', SMALL, 'end')
    d.text(22, 256, 'slot', SMALL, 'start', fill=SOFT)
    d.text(184, 256, '8.5 ≥ 5 and 5 + 1, but 8.5 < 5 + 1 + 6: slot 6', SMALL, 'start', fill=INK)
    d.text(22, 290, 'A draw walks down: one comparison of a line of sums at each level.', anchor='start')
    d.text(22, 312, 'An update walks up: each sum is computed again from its children.', anchor='start')
    return d


def frames():
    "Records hold numbers of frames, and each frame is stored once"
    d = Drawing(296, 'Three records, each with the numbers of the four frames of its state and of its next state; '
                     'lines lead from the numbers to eight frames, each stored once')
    records = [('transition 7', (4, 5, 6, 7), (5, 6, 7, 8)), ('transition 8', (5, 6, 7, 8), (6, 7, 8, 9)),
               ('transition 9: a new episode', (10, 10, 10, 10), (10, 10, 10, 11))]
    def place(number): return 122 + 74*(number - 4)
    for k, (name, *sides) in enumerate(records):
        x = 16 + 222*k
        d.text(x + 102, 28, name)
        for side, numbers in enumerate(sides):
            for j, number in enumerate(numbers):
                left = x + 106*side + 25*j
                way = (left + 12, 78), (place(number), 196)
                d.line(*way, ours=not side, arrow=False, stroke_width=1, stroke_opacity=.75)
                d.box(left, 52, 25, 26, ours=not side, rx=0)
                d.text(left + 12.5, 70, str(number), SMALL)
            d.text(x + 106*side + 50, 46, ('state', 'next_state')[side], SMALL, fill=SOFT)
    for number in range(4, 12):
        d.box(place(number) - 30, 196, 60, 46, f'{number}', fill='#e9e9e9', stroke=GREY)
    d.text(16, 214, 'frames,', SMALL, 'start', fill=SOFT)
    d.text(16, 231, 'once each', SMALL, 'start', fill=SOFT)
    d.text(16, 276, 'A record takes 8 numbers of 4 bytes where two stacks of four 84 × 84 frames take 56,448.', SMALL,
           'start')
    return d


def disk():
    "What a process does, in this order, when a new step replaces the oldest one in a file"
    d = Drawing(352, 'Four stores replace step 2 by step 10: the old row is copied to a journal, first_id is raised, '
                     'the new row is written, n_added is raised; killed after the first three the memory still has '
                     'step 2, after the fourth it has step 10')
    stages = [('1 copy the old row', 'to a journal', 'step 2', 'step 2', 2, 10, 'journal'),
              ('2 publish', 'first_id', 'step 2', 'step 2', 3, 10, 'first_id'),
              ('3 write the row', 'into its slot', 'step 2', '2 | 10', 3, 10, 'slot 2'),
              ('4 publish', 'n_added', 'step 2', 'step 10', 3, 11, 'n_added')]
    found = [('step 2', 'untouched'), *[('step 2', 'from the journal')]*2, ('step 10', 'complete')]
    rows = ('journal', 'first_id', 'slot 2', 'n_added')
    for r, name in enumerate(rows): d.text(12, 101 + 40*r, name, SMALL, 'start', **MONO)
    for k, (first, second, journal, slot, first_id, n_added, changed) in enumerate(stages):
        x = 84 + 150*k
        d.text(x + 68, 30, first, SIZE)
        d.text(x + 68, 50, second, SIZE)
        for r, value in enumerate((journal, f'{first_id}', slot, f'{n_added}')):
            d.box(x, 80 + 40*r, 134, 32, value, ours=rows[r] == changed)
        d.line((x + 67, 240), (x + 67, 266))
        d.text(x + 67, 288, found[k][0])
        d.text(x + 67, 308, found[k][1], SMALL, fill=SOFT)
    d.text(12, 288, 'killed here,', SMALL, 'start', fill=SOFT)
    d.text(12, 306, 'one finds', SMALL, 'start', fill=SOFT)
    d.text(12, 338, 'A memory of 8 slots, with steps 2 to 9. What changes is orange; a half-written row never shows.',
           SMALL, 'start')
    return d


def n_step():
    "Windows of three steps over two streams that arrive in turns"
    d = Drawing(330, 'Windows of up to three steps over two streams. In stream 0 an episode ends after four steps, '
                     'and its last windows are shorter; in stream 1 every window has three steps. No window contains '
                     'steps of both')
    def at(stream, k): return 100 + 88*k + 40*stream
    for stream, n in ((0, 6), (1, 6)):
        y = 118 + 62*stream
        d.text(14, y + 20, f'stream {stream}', SMALL, 'start')
        for k in range(n):
            label = str(k if stream or k < 4 else k - 4)
            d.box(at(stream, k), y, 36, 30, label)
    d.line((at(0, 3) + 52, 20), (at(0, 3) + 52, 154), arrow=False, stroke=INK, stroke_dasharray='4 3')
    d.text(at(0, 3) + 60, 26, 'the episode terminates', SMALL, 'start')
    def window(stream, first, last, y, label):
        a, b, tip = at(stream, first), at(stream, last) + 36, 8 if stream == 0 else -8
        d.line((a, y + tip), (a, y), (b, y), (b, y + tip), ours=True, arrow=False, stroke_width=2.2)
        if stream: d.text(b + 8, y + 4, label, SMALL, 'start')
        else: d.text((a + b)/2, y - 5, label, SMALL)
    for k, y in enumerate((44, 66, 88, 108)): window(0, k, min(k + 2, 3), y, ('γ³', 'γ³', 'γ²', '')[k])
    d.text(at(0, 3) - 8, 111, 'γ', SMALL, 'end')
    for k, y in enumerate((224, 246, 268, 290)): window(1, k, k + 2, y, 'γ³')
    way = (at(0, 4), 114), (at(0, 4), 106), (at(0, 5) + 36, 106)
    d.line(*way, ours=True, arrow=False, stroke_width=2.2, stroke_dasharray='5 4')
    d.text(at(0, 5) - 26, 98, 'still open', SMALL)
    d.text(14, 316, 'time →', SMALL, 'start', fill=SOFT)
    return d


DRAWINGS = [flow, concepts, ring, sum_tree, frames, disk, n_step]


def main():
    made = {FOLDER/f'{f.__name__}.svg': f().svg() for f in DRAWINGS}
    if '--check' in sys.argv[1:]:
        old = [p.name for p, text in made.items() if not p.exists() or p.read_text(encoding='utf-8') != text]
        sys.exit(f'run `python tools/drawings.py`: {", ".join(old)}' if old else 0)
    FOLDER.mkdir(exist_ok=True)
    for p, text in made.items(): p.write_text(text, encoding='utf-8')


if __name__ == '__main__': main()
