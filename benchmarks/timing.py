"Interleaved timing on one core: ratios of medians within one run are what counts, not microseconds"
import argparse
import csv
import gc
import os
import platform
import statistics
import time


def pin(core=None):
    "Run on one core (the last allowed, unless given), so that caches stay one's own"
    if hasattr(os, 'sched_setaffinity'): os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if core is None else core})


def machine():
    "The processor, its largest cache and the versions that matter, in a line"
    import numba
    import numpy
    import torch
    cpu = platform.processor() or 'unknown processor'
    if os.path.exists('/proc/cpuinfo'):
        with open('/proc/cpuinfo') as f: cpu = next((line.split(':')[1].strip() for line in f if line.startswith('model name')), cpu)
    cache = '/sys/devices/system/cpu/cpu0/cache/index3/size'           # whether a buffer fits into it decides much
    if os.path.exists(cache):
        with open(cache) as f: cpu += f', {int(f.read().strip().rstrip("K"))//1024} MB of cache'
    return f'{cpu}; Python {platform.python_version()}, numpy {numpy.__version__}, numba {numba.__version__}, torch {torch.__version__}'


def begin(multiple_of=1, rows=1_000_000):
    "The number of transitions asked for on the command line (`--rows`); and one core, one thread, and the machine in a line"
    import torch
    parser = argparse.ArgumentParser()
    parser.add_argument('--rows', type=int, default=rows)
    rows = parser.parse_args().rows
    if rows % multiple_of or rows < multiple_of: parser.error(f'--rows: expected a multiple of {multiple_of:,}, got {rows}')
    pin()
    torch.set_num_threads(1)
    print(machine())
    return rows


def repeat(f, *args, **kw):
    "A function that calls `f` n times"
    def run(n):
        for _ in range(n): f(*args, **kw)
    return run


def holding(draw):
    "A function that draws `n` times while the previous batch is held"
    def run(n):
        held = None
        for _ in range(n): held = draw()
        return held
    return run


def errors(bs):
    "TD errors for one batch of `bs` after another, endlessly"
    import numpy as np
    values = np.abs(np.random.default_rng(1).normal(size=(64, bs))).astype(np.float32)
    while True: yield from values


def once(f, n, clock=time.perf_counter):
    "Seconds for each of `n` calls, garbage collection off"
    gc.disable()
    start = clock()
    f(n)
    spent = clock() - start
    gc.enable()
    return spent / n


def interleaved(cases, reps=15, clock=time.perf_counter):
    "Median µs per operation of `cases` {name: (function of n, n)}, run in turn `reps` times after a warm-up"
    for f, n in cases.values(): f(max(2, n // 10))
    spent = {name: [] for name in cases}
    for _ in range(reps):
        for name, (f, n) in cases.items(): spent[name].append(once(f, n, clock)*1e6)
    return {name: statistics.median(v) for name, v in spent.items()}


HEAD = 'case', 'library', 'version', 'microseconds', 'times ours', 'transitions', 'remark', 'machine'


def is_number(o): return o.replace(',', '').replace('.', '', 1).isdigit()


def record(path, title, rows, head):
    "Append what a table says in microseconds to a CSV with the columns HEAD: a column of it is a library or, if named only 'µs', a row"
    with open(path, 'a', newline='', encoding='utf-8') as f:
        out = csv.writer(f)
        for row in rows:
            for name, v in zip(head, map(str, row)):
                if 'µs' not in name: continue
                library = name.replace('µs', '').replace('a call', '').strip()
                case, library = (f'{title}: {row[0]}', library) if library else (title, row[0])
                known = is_number(v)
                out.writerow([case, library, '', v.replace(',', '') if known else '', '', '', '' if known else v, machine()])


def table(title, rows, head):
    "Print rows of numbers under a heading, aligned; with BENCH_CSV in the environment, record them in that file too"
    if path := os.environ.get('BENCH_CSV'): record(path, title, rows, head)
    print(f'\n{title}')
    widths = [max(len(str(r[k])) for r in [head, *rows]) for k in range(len(head))]
    for row in [head, *rows]: print('  '.join(str(o).rjust(w) for o, w in zip(row, widths)), flush=True)
