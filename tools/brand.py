"""The logo and the badges, made by code: nbs/brand/*.svg

    python tools/brand.py           write them
    python tools/brand.py --check   say which of them differ from what this file draws, and fail if any does

The logo is a ring of slots: those of a batch are orange, the one that is written next is empty. Badges state what
pyproject.toml and settings.ini say, so they need no server.
"""
import configparser, math, sys, tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT/'nbs'/'brand'
SLOTS, NEXT, DRAWN = 12, 0, (2, 5, 9)
OURS, PLAIN = '#ff7f0e', '#9a9a9a'
INK = dict(light='#333333', dark='#eeeeee')
SVG = 'xmlns="http://www.w3.org/2000/svg" role="img"'
FONT = 'system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'


def slot(k, inner, outer, gap=.045):
    "The outline of a slot of the ring: a path"
    begin, end = (2*math.pi*o/SLOTS - math.pi/2 for o in (k, k + 1))
    def at(radius, angle): return f'{radius*math.cos(angle):.2f} {radius*math.sin(angle):.2f}'
    small, large = gap*outer/inner, gap
    return (f'M{at(inner, begin + small)}L{at(outer, begin + large)}A{outer} {outer} 0 0 1 {at(outer, end - large)}'
            f'L{at(inner, end - small)}A{inner} {inner} 0 0 0 {at(inner, begin + small)}z')


def ring():
    "The slots, around 0, 0, with a radius of 36"
    for k in range(SLOTS):
        if k == NEXT: yield f'<path d="{slot(k, 23, 35)}" fill="none" stroke="{OURS}" stroke-width="1.6"/>'
        else: yield f'<path d="{slot(k, 22, 36)}" fill="{OURS if k in DRAWN else PLAIN}"/>'


def logo(look, name):
    "The ring and the name beside it, on a ground that is `look`, light or dark"
    return (f'<svg {SVG} viewBox="0 0 340 80" width="340" height="80">'
            f'<title>{name}</title><g transform="translate(40 40)">{"".join(ring())}</g>'
            f'<text x="92" y="52" font-family="{FONT}" font-size="36" font-weight="600" textLength="236" '
            f'lengthAdjust="spacingAndGlyphs" fill="{INK[look]}">{name}</text></svg>\n')


def badge(label, value, colour='#b45309'):
    "A label and what is said of it, side by side"
    a, b = (round(12 + 6.6*len(o)) for o in (label, value))
    def words(x, width, text):
        return (f'<text x="{x + width/2:g}" y="14" text-anchor="middle" textLength="{width - 12}" '
                f'lengthAdjust="spacingAndGlyphs" fill="#ffffff">{text}</text>')
    return (f'<svg {SVG} width="{a + b}" height="20"><title>{label}: {value}</title>'
            f'<clipPath id="r"><rect width="{a + b}" height="20" rx="3"/></clipPath><g clip-path="url(#r)">'
            f'<rect width="{a}" height="20" fill="#444444"/><rect x="{a}" width="{b}" height="20" fill="{colour}"/></g>'
            f'<g font-family="{FONT}" font-size="11">{words(0, a, label)}{words(a, b, value)}</g></svg>\n')


def made():
    "All of it: {file: text}"
    project = tomllib.loads((ROOT/'pyproject.toml').read_text(encoding='utf-8'))['project']
    settings = configparser.ConfigParser()
    settings.read(ROOT/'settings.ini', encoding='utf-8')
    said = dict(version=settings['DEFAULT']['version'], python=project['requires-python'].replace('>=', '≥ '),
                license=project['license'], book='every chapter is a test')
    logos = {'logo.svg': logo('light', project['name']), 'logo-dark.svg': logo('dark', project['name'])}
    return logos | {f'badge-{k}.svg': badge(k, v) for k, v in said.items()}


def main():
    "Write them, or compare"
    files = {FOLDER/name: text for name, text in made().items()}
    if '--check' in sys.argv[1:]:
        other = [p.name for p, text in files.items() if not p.exists() or p.read_text(encoding='utf-8') != text]
        sys.exit(f'differ from tools/brand.py: {", ".join(other)}' if other else 0)
    FOLDER.mkdir(exist_ok=True)
    for p, text in files.items(): p.write_text(text, encoding='utf-8')


if __name__ == '__main__': main()
