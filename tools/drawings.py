"""The drawings of the book, made by code: nbs/images/*.svg

    python tools/drawings.py            write them
    python tools/drawings.py --check    say which of them differ from what this file draws, and fail if any does
    python tools/drawings.py --pictures write replay.gif and card.png too, which takes a Chromium

They are as wide as a phone, and have the colour of the text around them. Orange is this library and what it does; all
else is grey.
"""
import base64, hashlib, math, random, sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT/'nbs'/'images'
WIDTH, SIZE, SMALL = 360, 13, 12       # of a drawing, of its text, of its smallest text; shown at this size or larger
OURS, INK = '#ff7f0e', 'currentColor'
SOFT = dict(fill_opacity=.75)
FONT = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
MONO = dict(font_family='monospace')
# Where a drawing stands alone, as in a README, it goes by the system's scheme
STYLE = '<style>.drawing{color:#333}@media(prefers-color-scheme:dark){.drawing{color:#ddd}}</style>'
HEAD = ('<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="{colour}" fill-opacity="{opacity}"/></marker>')      # of an arrow


class Drawing:
    "Shapes and words on `WIDTH` by `height`; `title` is read aloud in place of the picture"
    def __init__(self, height, title, kind='drawing', **data):
        self.height, self.title, self.kind, self.data, self.parts = height, title, kind, data, []

    def put(self, tag, body=None, inside='', **attributes):
        "An element; `_` in an attribute's name is `-`, numbers are rounded; `inside`: elements in it"
        def plain(v): return f'{v:.2f}'.rstrip('0').removesuffix('.') if isinstance(v, (int, float)) else v
        named = ' '.join(f'{k.rstrip("_").replace("_", "-")}="{escape(plain(v))}"' for k, v in attributes.items())
        within = inside + (escape(body) if body is not None else '')
        self.parts.append(f'<{tag} {named}>{within}</{tag}>' if within else f'<{tag} {named}/>')

    def text(self, x, y, words, size=SIZE, anchor='middle', fill=INK, **more):
        self.put('text', words, x=x, y=y, font_size=size, text_anchor=anchor, fill=fill, **more)

    def box(self, x, y, w, h, words='', small='', ours=False, **more):
        "A rectangle, with words in its middle and smaller ones below them"
        look = dict(fill=OURS if ours else INK, fill_opacity=.2 if ours else .04, stroke=OURS if ours else INK,
                    stroke_opacity=1 if ours else .55, rx=4) | more
        self.put('rect', x=x, y=y, width=w, height=h, **look)
        middle = y + h/2 + 4.5 - (8 if small else 0)
        if words: self.text(x + w/2, middle, words)
        if small: self.text(x + w/2, middle + 16, small, SMALL, **SOFT)

    def line(self, *points, ours=False, arrow=True, **more):
        "Straight lines from point to point, with an arrow's head at the end"
        way = 'M' + 'L'.join(f'{x:g} {y:g}' for x, y in points)
        colour, opacity = (OURS, 1) if ours else (INK, .55)
        look = dict(fill='none', stroke=colour, stroke_opacity=opacity, stroke_width=1.6) | more
        if arrow: look['marker_end'] = f'url(#{"ours" if ours else "grey"})'
        self.put('path', d=way, **look)

    def link(self, page):
        "What follows, until `unlink`, leads to a page of the site"
        self.parts.append(f'<a href="{page}">')
    def unlink(self): self.parts.append('</a>')

    def svg(self, name):
        "The whole file; a page may have several drawings, so what is named in one bears the drawing's name"
        heads = ''.join(HEAD.format(name=f'{name}-{kind}', colour=colour, opacity=opacity)
                        for kind, colour, opacity in (('ours', OURS, 1), ('grey', INK, .55)))
        size = f'width="{WIDTH}" height="{self.height}" viewBox="0 0 {WIDTH} {self.height}" role="img"'
        data = ''.join(f' data-{k}="{v}"' for k, v in self.data.items())
        top = f'<svg xmlns="http://www.w3.org/2000/svg" class="{self.kind}" {size}{data} {FONT}>'
        parts = [o.replace('url(#', f'url(#{name}-') for o in self.parts]
        said = f'<title>{escape(self.title)}</title>'
        return '\n'.join([top, said, STYLE, f'<defs>{heads}</defs>', *parts, '</svg>']) + '\n'


def flow():
    "How data flows, from the environments to the learner and back"
    d = Drawing(424, 'Environments make steps, NStep adds up rewards, the replay stores steps in a memory and draws '
                     'batches, the loader hands them to the learner, which returns TD errors to the sampler and '
                     'weights to the agent')
    stages = [('agent', 'states → actions', 'learning/agents.html'),
              ('GymStepper', 'makes steps', 'learning/stepper.html'),
              ('NStep', 'n-step returns', 'learning/n_step.html'),
              ('PrioritizedReplay', 'one batch is due', 'learning/replay.html'),
              ('loader', 'hands over', 'learning/loader.html'), ('DQNLearner', 'learns', 'learning/learner.html')]
    x, w, h, step = 42, 136, 44, 68
    for k, (name, small, page) in enumerate(stages):
        y = 8 + step*k
        d.link(page)
        d.box(x, y, w, h, name, small, ours=True)
        d.unlink()
        if k: d.line((x + w/2, y - step + h), (x + w/2, y - 2))
    d.text(x + w/2 + 10, 70, 'actions', SMALL, 'start')
    d.link('memory/memory.html')
    d.put('rect', x=236, y=176, width=118, height=136, rx=6, fill='none', stroke=OURS)
    d.text(295, 194, 'ReplayMemory')
    d.box(243, 204, 104, 46, 'Storage', 'where rows are', ours=True)
    d.box(243, 258, 104, 46, 'Sampler', 'who is drawn', ours=True)
    d.unlink()
    d.line((x + w, 226), (234, 226))
    d.text(207, 218, 'steps', SMALL)
    d.line((236, 242), (x + w + 2, 242))
    d.text(207, 258, 'batches', SMALL)
    d.line((x + w, 370), (295, 370), (295, 306))
    d.text(288, 362, 'TD errors', SMALL, 'end')
    d.line((x, 370), (14, 370), (14, 30), (x - 2, 30))
    d.text(8, 412, 'weights, up to the agent', SMALL, 'start')
    return d


def cells(d, x, y, values, w=36, h=30, bright=(), blank=()):
    "A row of small boxes; those at the places `bright` are orange"
    for k, v in enumerate(values):
        d.box(x + k*w, y, w, h, '' if k in blank else str(v), ours=k in bright, rx=0)


def concepts():
    "Two streams go into slots, and a batch comes out as columns"
    d = Drawing(416, 'Two environments make two streams of steps; the memory writes each into the next slot and gives '
                     'it an id; a batch is drawn from it as columns')
    d.text(8, 20, 'two streams of steps', anchor='start', **SOFT)
    for row, name in enumerate(('env_id 0', 'env_id 1')):
        y = 32 + 38*row
        d.text(8, y + 19, name, SMALL, 'start')
        for k in range(4):
            d.box(64 + 74*k, y, 56, 28, f'step {k}')
            if k: d.line((46 + 74*k, y + 14), (62 + 74*k, y + 14))
    d.line((24, 112), (24, 148))
    d.text(36, 127, 'each step gets the next id, and is written', SMALL, 'start')
    d.text(36, 144, 'to the slot', SMALL, 'start')
    d.text(100, 144, 'id % max_sz', SMALL, 'start', **MONO)
    d.text(8, 172, 'memory of 6 slots: ids 0 and 1 are overwritten', anchor='start', **SOFT)
    d.text(8, 204, 'id', SMALL, 'start')
    d.text(8, 232, 'slot', SMALL, 'start')
    for slot, id in enumerate((6, 7, 2, 3, 4, 5)):
        d.box(46 + 50*slot, 184, 50, 30, str(id), ours=id in (3, 6, 7), rx=0)
        d.text(71 + 50*slot, 232, str(slot), SMALL, **SOFT)
    d.line((24, 246), (24, 270))
    d.text(8, 290, 'a batch: three rows, one array for each field', anchor='start', **SOFT)
    columns = [('ids', 44, (7, 3, 6)), ('weights', 60, ('1.0', '.62', '.9')), ('state', 56, ('…',)*3),
               ('reward', 60, ('1.', '0.', '1.')), ('next_state', 88, ('…',)*3)]
    x = 8
    for name, w, values in columns:
        d.text(x + w/2, 314, name, SMALL, **MONO)
        for r, v in enumerate(values): d.box(x, 322 + 28*r, w, 28, str(v), ours=True, rx=0)
        x += w + 9
    return d


def segment(x, y, inner, outer, start, end):
    "The path of a piece of a ring, between two angles in turns, clockwise from the top"
    def at(radius, turn): return f'{x + radius*math.sin(math.tau*turn):.1f} {y - radius*math.cos(math.tau*turn):.1f}'
    return (f'M{at(outer, start)}A{outer} {outer} 0 0 1 {at(outer, end)}L{at(inner, end)}'
            f'A{inner} {inner} 0 0 0 {at(inner, start)}z')


def around(x, y, radius, turn):
    "The point at an angle in turns, clockwise from the top"
    return x + radius*math.sin(math.tau*turn), y - radius*math.cos(math.tau*turn)


def ring():
    "The slots of a memory as a ring, with the ids in them"
    n, n_added, x, y = 12, 29, 180, 146
    d = Drawing(442, f'A ring of {n} slots with the ids {n_added - n} to {n_added - 1}: the oldest and the newest are '
                     f'neighbours, and the next step, id {n_added}, replaces the oldest')
    for id in range(n_added - n, n_added):
        slot = id % n
        share = (id - n_added + n + 1)/n                     # the newer, the darker
        way = segment(x, y, 82, 136, slot/n + .003, (slot + 1)/n - .003)
        d.put('path', d=way, fill=OURS, fill_opacity=.08 + .62*share)
        for radius, words, look in ((109, id, {}), (66, slot, SOFT)):
            a, b = around(x, y, radius, (slot + .5)/n)
            d.text(a, b + 5, str(words), SIZE if radius > 100 else SMALL, **look)
    d.text(x, y - 4, 'slot', SMALL, **SOFT)
    d.text(x, y + 14, '= id % 12', SMALL, **SOFT)
    a, b = around(x, y, 140, (n_added % n + .5)/n)
    d.line((a + 10, 312), (a, b), ours=True)
    d.text(8, 330, 'The next step goes to slot 29 % 12 = 5 and replaces', SMALL, 'start')
    d.text(8, 348, 'id 17. Priorities sent for 17 from then on are dropped.', SMALL, 'start')
    words = [('n_added = 29', 'steps were ever stored: the next is id 29'),
             ('first_id = 17', 'is the oldest id stored'), ('len = 12', 'ids are alive: 17 to 28')]
    for k, (name, meaning) in enumerate(words):
        d.text(8, 380 + 24*k, name, SMALL, 'start', **MONO)
        d.text(112, 380 + 24*k, meaning, SMALL, 'start', **SOFT)
    return d


def sum_tree():
    "A dart goes down the tree of sums"
    lines = [(2, 3, 0, 4), (5, 1, 6, 2), (0, 1, 4, 1), (3, 3, 0, 5)]
    sums = [sum(o) for o in lines]
    where = 1, 2                   # what a dart at 17.5 hits: the second group, its third weight
    d = Drawing(352, 'A sum tree over 16 weights: a dart at 17.5 passes the first group, whose sum is 9, and falls in '
                     'the second; 8.5 remain, which pass the weights 5 and 1 and fall on 6')
    d.box(136, 8, 88, 30, f'total {sum(sums)}', ours=True)
    d.text(234, 28, 'dart at 17.5', SMALL, 'start')
    for k, (total, line) in enumerate(zip(sums, lines)):
        x, ours = 6 + 88*k, k == where[0]
        d.line((180, 38), (x + 42, 80), ours=ours, arrow=ours)
        d.box(x + 18, 82, 48, 28, str(total), ours=ours)
        for j in range(4):
            hit = (k, j) == where
            d.line((x + 42, 110), (x + 10.5 + 21*j, 154), ours=hit, arrow=hit)
        cells(d, x, 156, line, w=21, h=26, bright=[where[1]] if ours else ())
        for j in range(4): d.text(x + 10.5 + 21*j, 198, str(4*k + j), SMALL, **SOFT)
    d.text(6, 216, 'slot', SMALL, 'start', **SOFT)
    words = ['17.5 ≥ 9: not in the first group.', '17.5 < 9 + 14: in the second, where 8.5 are left.',
             '8.5 ≥ 5 and 8.5 ≥ 5 + 1, but 8.5 < 5 + 1 + 6: slot 6.', '',
             'A draw walks down: one comparison of a line', 'of sums at each level. An update walks up: each',
             'sum is computed again from its children.']
    for k, o in enumerate(words):
        if o: d.text(6, 240 + 17*k, o, SMALL, 'start')
    return d


def frames():
    "Records hold numbers of frames, and each frame is stored once"
    d = Drawing(398, 'Three records, each with the numbers of the four frames of its state and of its next state; '
                     'lines lead from the numbers to eight frames, each stored once')
    records = [(8, 22, 'transition 7', (4, 5, 6, 7), (5, 6, 7, 8)),
               (186, 22, 'transition 8', (5, 6, 7, 8), (6, 7, 8, 9)),
               (97, 318, 'transition 9: a new episode', (10, 10, 10, 10), (10, 10, 10, 11))]
    def place(number): return 26 + 44*(number - 4)
    for left, y, name, *sides in records:
        below = y > 200                      # the frames
        d.text(left + 83, y + 46 if below else y - 6, name)
        for side, numbers in enumerate(sides):
            x = left + 86*side
            d.text(x + 40, y + 30 if below else y + 10, ('state', 'next_state')[side], SMALL, **SOFT)
            top = y - 8 if below else y + 16
            for j, number in enumerate(numbers):
                ends = [(x + 20*j + 10, top + (0 if below else 24)), (place(number), 200 if below else 158)]
                d.line(*ends, ours=not side, arrow=False, stroke_width=1, stroke_opacity=.75)
                d.box(x + 20*j, top, 20, 24, str(number), ours=not side, rx=0)
    for number in range(4, 12): d.box(place(number) - 19, 158, 38, 42, str(number), fill_opacity=.12)
    d.text(8, 222, 'frames,', SMALL, 'start', **SOFT)
    d.text(8, 238, 'once each', SMALL, 'start', **SOFT)
    d.text(8, 388, '8 numbers of 4 bytes, not 2 stacks of 28,224 bytes', SMALL, 'start')
    return d


def disk():
    "What a process does, in this order, when a new step replaces the oldest one in a file"
    d = Drawing(420, 'Four stores replace step 2 by step 10: the old row is copied to a journal, first_id is raised, '
                     'the new row is written, n_added is raised; killed after the first three the memory still has '
                     'step 2, after the fourth it has step 10')
    stages = [('1  copy the old row to a journal', ('step 2', 2, 'step 2', 10), 'step 2, untouched'),
              ('2  publish first_id', ('step 2', 3, 'step 2', 10), 'step 2, from the journal'),
              ('3  write the row into its slot', ('step 2', 3, '2 | 10', 10), 'step 2, from the journal'),
              ('4  publish n_added', ('step 2', 3, 'step 10', 11), 'step 10, complete')]
    for k, name in enumerate(('journal', 'first_id', 'slot 2', 'n_added')): d.text(48 + 88*k, 20, name, SMALL, **MONO)
    for k, (name, values, found) in enumerate(stages):
        y = 48 + 88*k
        d.text(8, y, name, SIZE, 'start')
        for j, value in enumerate(values): d.box(8 + 88*j, y + 8, 80, 28, str(value), ours=j == k)
        d.line((22, y + 40), (22, y + 58), (34, y + 58))
        d.text(40, y + 62, f'killed here, one finds {found}', SMALL, 'start', **SOFT)
    d.text(8, 396, 'A memory of 8 slots, with steps 2 to 9. What changes', SMALL, 'start')
    d.text(8, 412, 'is orange; a half-written row never shows.', SMALL, 'start')
    return d


def n_step():
    "Windows of three steps over two streams that arrive in turns"
    d = Drawing(318, 'Windows of up to three steps over two streams. In stream 0 an episode ends after four steps, '
                     'and its last windows are shorter; in stream 1 every window has three steps. No window contains '
                     'steps of both')
    def at(stream, k): return 64 + 45*k + 22*stream
    for stream in range(2):
        y = 112 + 54*stream
        d.text(6, y + 18, f'stream {stream}', SMALL, 'start')
        for k in range(6): d.box(at(stream, k), y, 24, 26, str(k if stream or k < 4 else k - 4))
    d.line((at(0, 3) + 34, 14), (at(0, 3) + 34, 142), arrow=False, stroke_dasharray='4 3')
    d.text(at(0, 3) + 42, 22, 'the episode', SMALL, 'start')
    d.text(at(0, 3) + 42, 38, 'terminates', SMALL, 'start')
    def window(stream, first, last, y, label):
        a, b, tip = at(stream, first), at(stream, last) + 24, 7 if stream == 0 else -7
        d.line((a, y + tip), (a, y), (b, y), (b, y + tip), ours=True, arrow=False, stroke_width=2.2)
        if stream: d.text(b + 7, y + 4, label, SMALL, 'start')
        else: d.text(a - 6, y + 6, label, SMALL, 'end')
    for k, y in enumerate((30, 52, 74, 96)): window(0, k, min(k + 2, 3), y, ('γ³', 'γ³', 'γ²', 'γ')[k])
    for k, y in enumerate((210, 230, 250, 270)): window(1, k, k + 2, y, 'γ³')
    way = (at(0, 4), 106), (at(0, 4), 98), (at(0, 5) + 24, 98)
    d.line(*way, ours=True, arrow=False, stroke_width=2.2, stroke_dasharray='5 4')
    d.text(at(0, 4), 90, 'still open', SMALL, 'start')
    d.text(6, 304, 'time →', SMALL, 'start', **SOFT)
    return d


# ---- a replay memory at work

SLOTS, BATCH = 10, 3
PER_MOMENT = .4            # seconds


def moments():
    """What happens to a memory of ten slots, in moments: (words, ids in the slots, their priorities, slots drawn).

    Ten steps are added, then three times a batch is drawn and repriced and two more steps replace the oldest. A new
    step gets the largest priority so far, which is the 1 that a memory begins with."""
    rng, ids, priorities, told = random.Random(5), [None]*SLOTS, [0.]*SLOTS, []
    def say(words, drawn=()): told.append((words, [*ids], [*priorities], tuple(drawn)))
    def add(id):
        ids[id % SLOTS], priorities[id % SLOTS] = id, 1.
        say('memory.add(step)')
    say('memory = ReplayMemory(10)')
    for id in range(SLOTS): add(id)
    for turn in range(3):
        drawn = sorted(draw(priorities, (k + rng.random())/BATCH*sum(priorities)) for k in range(BATCH))
        for _ in range(3): say(f'batch = memory.sample({BATCH})', drawn)
        for slot in {*drawn}: priorities[slot] = round(.12 + .88*rng.random()**2, 2)
        for _ in range(3): say('batch.update_priorities(errors)', drawn)
        for k in range(2): add(SLOTS + 2*turn + k)
    return told


def draw(weights, target):
    "The index that a dart at `target` hits"
    for i, w in enumerate(weights):
        if target < w: return i
        target -= w


def animated(attribute, values, takes=0):
    "An element that gives an attribute one value for each moment; a change takes this share of it"
    n, keys = len(values), [(0, values[0])]
    for k in range(1, n):
        if values[k] == values[k - 1]: continue
        if takes: keys.append((k/n, values[k - 1]))
        keys.append(((k + takes)/n, values[k]))
    if len(keys) == 1: return ''
    if takes: keys.append((1, values[-1]))
    times, listed = (';'.join(f'{o:.4g}' for o in column) for column in zip(*keys))
    mode = 'linear' if takes else 'discrete'
    return (f'<animate attributeName="{attribute}" dur="{n*PER_MOMENT:g}s" repeatCount="indefinite" '
            f'calcMode="{mode}" keyTimes="{times}" values="{listed}"/>')


def slot_at_work(d, told, slot, x, y, inner, longest):
    "A slot of the ring: its cell, its priority as a bar, and the ids that it holds one after the other"
    turn, fill = (slot + .5)/SLOTS, .08
    (a, b), (e, f) = around(x, y, inner, turn), around(x, y, inner + longest, turn)
    mark = [.6 if slot in o[3] else .25 if o[1][slot] is not None else fill for o in told]
    d.put('path', d=segment(x, y, inner - 30, inner - 2, slot/SLOTS + .004, (slot + 1)/SLOTS - .004),
          fill=OURS, fill_opacity=fill, inside=animated('fill-opacity', mark))
    hidden = [longest*(1 - o[2][slot]) + .5 for o in told]
    drawn = animated('stroke-opacity', [.95 if slot in o[3] else .5 for o in told])
    d.put('path', d=f'M{a:.1f} {b:.1f}L{e:.1f} {f:.1f}', stroke=OURS, stroke_width=22, stroke_opacity=.5,
          stroke_dasharray=f'{longest} {2*longest}', stroke_dashoffset=hidden[0],
          inside=animated('stroke-dashoffset', hidden, .7) + drawn)
    a, b = around(x, y, inner - 16, turn)
    for id in sorted({o[1][slot] for o in told} - {None}):
        appear(d, a, b + 4.5, str(id), [o[1][slot] == id for o in told], SMALL)


def appear(d, x, y, words, when, size=SIZE, **more):
    "Words that are seen in some of the moments"
    d.text(x, y, words, size, opacity=int(when[0]), inside=animated('opacity', [int(o) for o in when]), **more)


def replay():
    "A ring fills, is drawn from, and is repriced"
    told, x, y = moments(), 180, 172
    still = next(k for k, o in enumerate(told) if o[3] and o[1][0]) + .9      # a second batch: the bars differ
    d = Drawing(372, 'An animation: ten steps fill the slots of a ring, with priorities as bars; batches of three are '
                     'drawn, longer bars more often, and get new priorities; further steps replace the oldest',
                'drawing moving', still=f'{still*PER_MOMENT:.2f}')
    for slot in range(SLOTS): slot_at_work(d, told, slot, x, y, 76, 78)
    for words in dict.fromkeys(o[0] for o in told): appear(d, x, 358, words, [o[0] == words for o in told], **MONO)
    batches = [' '.join(str(ids[slot]) for slot in drawn) for _, ids, _, drawn in told]
    appear(d, x, y - 8, 'batch', [bool(o) for o in batches], SMALL, **SOFT)
    for batch in dict.fromkeys(filter(None, batches)): appear(d, x, y + 11, batch, [o == batch for o in batches])
    return d


DRAWINGS = [flow, concepts, ring, sum_tree, frames, disk, n_step, replay]


# ---- pictures for where no SVG can be

def shots(page, size, times):
    "Pictures of a drawing in a page of so many pixels, at these seconds of its animation"
    from PIL import Image
    sys.path.insert(0, str(ROOT/'tests'))
    from browser import Browser
    browser, html = Browser(), f'<body style="margin:0;background:#fff;zoom:2">{page}'
    try:
        browser.size(*(2*o for o in size))
        browser.open('data:text/html;base64,' + base64.b64encode(html.encode()).decode())
        for seconds in times:
            browser.eval('document.querySelector("svg").pauseAnimations()')
            browser.eval(f'document.querySelector("svg").setCurrentTime({seconds})')
            yield browser.picture().resize(size, Image.Resampling.LANCZOS)
    finally: browser.close()


def digest(text): return hashlib.sha256(text.encode()).hexdigest()


def write_gif(path):
    "The animation, for a README"
    svg, told = replay().svg('replay'), moments()
    per = [PER_MOMENT*(k + part) for k in range(len(told)) for part in (.3, .8)]
    first, *rest = (o.quantize(48) for o in shots(svg, (WIDTH, replay().height), per))
    first.save(path, save_all=True, append_images=rest, duration=int(500*PER_MOMENT), loop=0, comment=digest(svg))


def write_card(path):
    "What a social network shows beside a link"
    from PIL.PngImagePlugin import PngInfo
    svg = replay().svg('replay')
    words = ('<div style="display:flex;align-items:center;width:1200px;height:630px;font:44px sans-serif;color:#333">'
             f'<div style="zoom:1.6;margin:0 10px">{svg}</div><div><b style="font-size:72px">fastrl_replay</b><br>'
             'Replay for PyTorch RL</div></div>')
    info = PngInfo()
    info.add_text('Comment', digest(svg))
    times = [float(replay().data['still'])]
    for o in shots(words, (1200, 630), times): o.quantize(64).save(path, optimize=True, pnginfo=info)


def made_from(path):
    "The digest of the drawing that a picture was made from"
    from PIL import Image
    if not path.exists(): return None
    said = Image.open(path).info
    return (said.get('comment') or said['Comment'].encode()).decode()


PICTURES = {'replay.gif': write_gif, 'card.png': write_card}


def main():
    made = {FOLDER/f'{f.__name__}.svg': f().svg(f.__name__) for f in DRAWINGS}
    if '--check' in sys.argv[1:]:
        old = [p.name for p, text in made.items() if not p.exists() or p.read_text(encoding='utf-8') != text]
        sys.exit(f'run `python tools/drawings.py`: {", ".join(old)}' if old else 0)
    FOLDER.mkdir(exist_ok=True)
    for p, text in made.items(): p.write_text(text, encoding='utf-8')
    if '--pictures' in sys.argv[1:]:
        for name, write in PICTURES.items(): write(FOLDER/name)


if __name__ == '__main__': main()
