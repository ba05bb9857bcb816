"""The picture of the first page, from what was measured: `python benchmarks/picture.py`

Reads benchmarks/measured.csv (what compare.py wrote, and bytes a transition from frames.py) and draws nbs/beside_others.png.
"""
import csv
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
MARKS = dict(zip(('cpprb', 'Stable-Baselines3', 'Tianshou', 'TorchRL', 'Flashbax'), 'osD^v'))
OURS, GREYS = 'C1', ('.15', '.35', '.5', '.6', '.7')       # this library is orange in every picture, the others are grey
BYTES = 'bytes of a stacked Atari transition'
MOST = {'fastrl_replay, LZ4': (1_950, '{:.1f} kB (Pong) to {:.0f} (Alien)')}        # packed frames depend on the game


def rows():
    "What was measured, as dicts"
    with open(ROOT/'benchmarks'/'measured.csv', newline='', encoding='utf-8') as f: return list(csv.DictReader(f))


def speed(ax, found):
    "How many times as long each peer takes, for each kind of work: filled marks for the largest buffers, hollow ones for smaller"
    cases, sizes = (list(dict.fromkeys(r[k] for r in found)) for k in ('case', 'transitions'))
    largest = max(sizes, key=int)
    for name, mark, colour in zip(MARKS, MARKS.values(), GREYS):
        for size in sizes:
            own = [(float(r['times ours']), cases.index(r['case'])) for r in found
                   if (r['library'], r['transitions'])==(name, size) and r['times ours']]
            hollow = {} if size==largest else dict(markerfacecolor='none')
            label = name if size==largest else None
            if own: ax.plot(*zip(*own), mark, color=colour, markersize=7, label=label, **hollow)
    ax.axvline(1, color=OURS, linewidth=3, label='fastrl_replay')
    said = f'{int(largest):,} transitions' + ''.join(f', hollow: {int(o):,}' for o in sizes if o!=largest)
    ax.set(xscale='log', xlim=(.6, 500), xlabel=f'times as long as fastrl_replay; filled: {said}', yticks=range(len(cases)), yticklabels=cases)
    ax.invert_yaxis()
    ax.xaxis.set_major_formatter('{x:g}')
    ax.grid(axis='x', alpha=.3)
    ax.legend(loc='upper center', bbox_to_anchor=(.4, 1.2), ncols=3, frameon=False)


def memory(ax, found):
    "Bytes of a transition of stacked frames"
    names = [r['library'].replace('ours', 'fastrl_replay') for r in found]
    sizes, colours = [float(r['microseconds']) for r in found], [OURS if r['library'].startswith('ours') else '.6' for r in found]
    most = [MOST.get(name, (v, '{:.1f} kB')) for name, v in zip(names, sizes)]
    bars = ax.barh(names, [v/1000 for v, _ in most], color=colours, alpha=.4)
    ax.barh(names, [v/1000 for v in sizes], color=colours)
    ax.bar_label(bars, [form.format(v/1000, m/1000) for v, (m, form) in zip(sizes, most)], padding=3)
    ax.set(xlabel='kB of an 84×84×4 transition', xlim=(0, 78))
    ax.invert_yaxis()


def main():
    "Draw and save"
    found = rows()
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), width_ratios=(3, 2), layout='constrained')
    speed(left, [r for r in found if r['case'] != BYTES])
    memory(right, [r for r in found if r['case']==BYTES])
    fig.savefig(ROOT/'nbs'/'beside_others.png', dpi=110, facecolor='white')


if __name__ == '__main__': main()
