"""The same work by this library and by others, in one CSV with a plot: `python benchmarks/compare.py [--rows N …] [--out FOLDER]`

Each library runs in a process and an environment of its own (see peers.py), all on one core. They take turns: one measures, the others wait
for their input. What counts are medians, and their ratios within this run. Work is what a learner needs: rows of CartPole transitions in,
batches of six torch tensors out, read while the previous batch is still held; whoever hands out numpy or jax arrays has them wrapped in the
cheapest way there is. "64 at once" begins with what a vector environment returns, arrays and float64 rewards, and what a library wants made of
them is made while the clock runs; "a ready chunk" was made before. A small buffer fits into the processor's cache, a large one may not: both are
measured. A library that can't be installed, or doesn't offer a kind of work, is named as such.
"""
import argparse
import csv
import importlib
import json
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from timing import HEAD, errors, holding, machine, once, pin, repeat

BS, BLOCK, ALPHA, BETA = 256, 10_000, .6, .4
FIELDS = 'state', 'action', 'reward', 'next_state', 'terminated', 'truncated'
CASES = 'one step in', '64 at once', '64 at once, a ready chunk', 'a batch of 32', 'a batch of 256', 'a batch of 4096', 'prioritized, 256'
TURN = 20_000       # µs that a turn shall take, after a warm-up of half of that: another process has had the caches meanwhile


def block(n=BLOCK):
    "CartPole-like transitions: {field: column}"
    rng, no = np.random.default_rng(0), np.zeros(n, bool)
    s, t = (rng.random((n, 4), dtype=np.float32) for _ in range(2))
    return dict(zip(FIELDS, (s, rng.integers(0, 2, n), rng.random(n, dtype=np.float32), t, no, no)))


def row(k=0): return {f: c[k] for f, c in block(64).items()}


def arrived(n=64):
    "What `n` environments return: gymnasium's vector environments have float64 rewards"
    columns = block(n)
    return columns | dict(reward=columns['reward'].astype(float))


def tensors(columns):
    "numpy columns as torch tensors, without a copy"
    import torch
    return [torch.from_numpy(np.asarray(c)) for c in columns]


# ---- each library: {case: a function that does it n times, or why it can't}, for buffers of `rows` transitions, full

def ours(rows):
    "This library"
    from fastrl_replay.batch import Batch
    from fastrl_replay.memory import ReplayMemory
    from fastrl_replay.samplers.proportional import Proportional
    from fastrl_replay.samplers.uniform import Uniform
    from fastrl_replay.steps import Transition
    chunk = Batch.of(Transition(**block()))
    memory, ranked = ReplayMemory(rows, Uniform(replace=True), seed=0), ReplayMemory(rows, Proportional(ALPHA, BETA), seed=0)
    tds = errors(BS)
    for m in (memory, ranked):
        for _ in range(rows//BLOCK): m.extend(chunk)
    values = row()
    step = Transition(**values | dict(action=int(values['action']), reward=float(values['reward']), terminated=False, truncated=False))
    def draw(bs):
        def once():
            batch = memory.sample(bs)
            return batch, batch.astuple(), batch.weights
        return once
    def pair():
        batch = ranked.sample(BS)
        out = batch, batch.astuple(), batch.weights
        batch.update_priorities(next(tds))
        return out
    new = arrived()
    return {'one step in': repeat(memory.add, step), '64 at once': repeat(lambda: memory.extend(Transition(**new))),
            '64 at once, a ready chunk': repeat(memory.extend, Batch.of(Transition(**block(64))))} | \
        {f'a batch of {bs}': holding(draw(bs)) for bs in (32, 256, 4096)} | {'prioritized, 256': holding(pair)}


def cpprb(rows):
    "cpprb"
    lib = importlib.import_module('cpprb')
    env = {f: dict(shape=c.shape[1:] or 1, dtype=c.dtype) for f, c in block().items()}
    buffer, ranked, tds = lib.ReplayBuffer(rows, env), lib.PrioritizedReplayBuffer(rows, env, alpha=ALPHA), errors(BS)
    for b in (buffer, ranked):
        for _ in range(rows//BLOCK): b.add(**block())
    def pair():
        got = ranked.sample(BS, beta=BETA)
        out = tensors(got.values())
        ranked.update_priorities(got['indexes'], next(tds))
        return out
    def draw(bs): return tensors(buffer.sample(bs).values())
    return {'one step in': repeat(buffer.add, **row()), '64 at once': repeat(buffer.add, **arrived()),
            '64 at once, a ready chunk': repeat(buffer.add, **block(64))} | \
        {f'a batch of {bs}': holding(lambda bs=bs: draw(bs)) for bs in (32, 256, 4096)} | {'prioritized, 256': holding(pair)}


def stable_baselines3(rows):
    "Stable-Baselines3, which has no prioritized buffer; `dones` there is one flag for both kinds of end, and its batches lack `truncated`"
    import gymnasium as gym
    lib = importlib.import_module('stable_baselines3.common.buffers')
    def made(n_envs):
        buffer = lib.ReplayBuffer(rows, gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2), n_envs=n_envs)
        one = block(rows//n_envs)
        buffer.observations[:] = np.resize(one['state'], buffer.observations.shape)
        buffer.next_observations[:] = np.resize(one['next_state'], buffer.observations.shape)
        buffer.full = True
        return buffer
    def steps(c): return c['state'], c['next_state'], c['action'], c['reward'], c['terminated'], [{} for _ in c['reward']]
    one, many = made(1), made(64)
    return {'one step in': repeat(one.add, *steps(block(1))), '64 at once': repeat(many.add, *steps(arrived())),
            '64 at once, a ready chunk': repeat(many.add, *steps(block(64)))} | \
        {f'a batch of {bs}': holding(lambda bs=bs: one.sample(bs)) for bs in (32, 256, 4096)}


def tianshou(rows):
    "Tianshou"
    lib, tds = importlib.import_module('tianshou.data'), errors(BS)
    def batch(c): return lib.Batch(obs=c['state'], act=c['action'], rew=c['reward'], obs_next=c['next_state'], terminated=c['terminated'],
                                   truncated=c['truncated'], info={})
    once, c = lib.ReplayBuffer(BLOCK), block()
    for k in range(BLOCK): once.add(batch({f: v[k] for f, v in c.items()}))
    buffer, vector = lib.ReplayBuffer(rows), lib.VectorReplayBuffer(rows, 64)
    ranked = lib.PrioritizedReplayBuffer(rows, alpha=ALPHA, beta=BETA)
    for b in (buffer, ranked):
        for _ in range(rows//BLOCK): b.update(once)
    names, step, many = ('obs', 'act', 'rew', 'obs_next', 'terminated', 'truncated'), batch(row()), batch(block(64))
    new = arrived()
    def pair():
        got, index = ranked.sample(BS)
        out = tensors(got[k] for k in (*names, 'weight'))
        ranked.update_weight(index, next(tds))
        return out
    def draw(bs):
        got, _ = buffer.sample(bs)
        return tensors(got[k] for k in names)
    return {'one step in': repeat(buffer.add, step), '64 at once': repeat(lambda: vector.add(batch(new))),
            '64 at once, a ready chunk': repeat(vector.add, many)} | \
        {f'a batch of {bs}': holding(lambda bs=bs: draw(bs)) for bs in (32, 256, 4096)} | {'prioritized, 256': holding(pair)}


def torchrl(rows):
    "TorchRL"
    import torch
    from tensordict import TensorDict
    lib, tds = importlib.import_module('torchrl.data'), errors(BS)
    def td(c, n): return TensorDict({f: torch.as_tensor(v) for f, v in c.items()}, batch_size=n)
    buffer = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(rows), batch_size=BS)
    def full(b):
        for _ in range(rows//BLOCK): b.extend(td(block(), [BLOCK]))
        return b
    full(buffer)
    def prioritized():
        try: return full(lib.TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=BETA, storage=lib.LazyTensorStorage(rows), batch_size=BS))
        except RuntimeError as e: return f'{type(e).__name__}: {e}'        # its compiled part doesn't load with every torch
    ranked = prioritized()
    step, many, new = td(row(), []), td(block(64), [64]), arrived()
    def read(got): return got, [got[f] for f in FIELDS]
    def pair():
        got = ranked.sample()
        out = read(got)
        ranked.update_priority(got['index'], torch.from_numpy(next(tds)))
        return out
    def extend():          # a storage has the dtypes of what came first
        buffer.extend(td(new | dict(reward=new['reward'].astype(np.float32)), [64]))
    return {'one step in': repeat(buffer.add, step), '64 at once': repeat(extend), '64 at once, a ready chunk': repeat(buffer.extend, many)} | \
        {f'a batch of {bs}': holding(lambda bs=bs: read(buffer.sample(bs))) for bs in (32, 256, 4096)} | \
        {'prioritized, 256': ranked if isinstance(ranked, str) else holding(pair)}


def flashbax(rows):
    "Flashbax, compiled, on the processor; a pair of neighbouring items there is what a transition is here, so an item holds one state"
    import torch
    fbx, jax = importlib.import_module('flashbax'), importlib.import_module('jax')
    items, tds = {f: c for f, c in block().items() if f != 'next_state'}, errors(BS)
    one = {f: c[0] for f, c in items.items()}
    def filled(buffer):
        state, add = buffer.init(one), jax.jit(buffer.add, donate_argnums=0)
        for _ in range(rows//BLOCK): state = add(state, items)
        return state
    def flat(bs, **kw): return fbx.make_flat_buffer(max_length=rows, min_length=bs, sample_batch_size=bs, **kw)
    keys, split = [jax.random.PRNGKey(0)], jax.jit(jax.random.split)
    def key():
        keys[0], k = split(keys[0])
        return k
    def out(got, *more):
        leaves = jax.tree_util.tree_leaves((got.experience.first, got.experience.second['state'], *more))
        return [torch.from_dlpack(o) for o in leaves]
    def adding(buffer, chunk):
        keep, add = [buffer.init(one)], jax.jit(buffer.add, donate_argnums=0)
        def once(): keep[0] = jax.block_until_ready(add(keep[0], chunk))
        return repeat(once)
    state = filled(flat(32, add_sequences=True))
    def drawing(bs):
        draw = jax.jit(flat(bs, add_sequences=True).sample)
        return holding(lambda: out(jax.block_until_ready(draw(state, key()))))
    ranked = fbx.make_prioritised_flat_buffer(max_length=rows, min_length=BS, sample_batch_size=BS, add_sequences=True,
                                              priority_exponent=ALPHA)
    keep, draw, put = [filled(ranked)], jax.jit(ranked.sample), jax.jit(ranked.set_priorities, donate_argnums=0)
    def pair():
        got = draw(keep[0], key())
        held = out(got, got.probabilities)
        keep[0] = jax.block_until_ready(put(keep[0], got.indices, next(tds)))
        return held
    many, new = {f: jax.numpy.asarray(c[:64]) for f, c in items.items()}, {f: c for f, c in arrived().items() if f in items}
    buffer = flat(32, add_batch_size=64)
    return {'one step in': adding(flat(32), one), '64 at once': adding(buffer, new), '64 at once, a ready chunk': adding(buffer, many)} | \
        {f'a batch of {bs}': drawing(bs) for bs in (32, 256, 4096)} | {'prioritized, 256': holding(pair)}


LIBRARIES = {'ours': ours, 'cpprb': cpprb, 'Stable-Baselines3': stable_baselines3, 'Tianshou': tianshou, 'TorchRL': torchrl,
             'Flashbax': flashbax}


# ---- a process for each; they take turns

def serve(name, rows):
    "Fill, then measure what is asked for, a line of JSON each"
    answers, sys.stdout = sys.stdout, sys.stderr
    pin()
    import torch
    torch.set_num_threads(1)
    cases = LIBRARIES[name](rows)
    print(json.dumps({k: v if isinstance(v, str) else None for k, v in cases.items()}), file=answers, flush=True)
    for line in sys.stdin:
        case, n = json.loads(line)
        cases[case](max(2, n//2))
        print(json.dumps(once(cases[case], n)*1e6), file=answers, flush=True)


class Library:
    "The process of one library: `cases` it offers ({case: why not, or None}), or `why` there are none"
    def __init__(self, python, name, rows):
        from peers import FOLDER
        self.log = FOLDER/f'{name}.log'
        FOLDER.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen([python, __file__, '--serve', name, '--rows', str(rows)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.log.open('w'), text=True)
        said = self.process.stdout.readline()
        self.cases, self.why = (json.loads(said), None) if said else ({}, self.failure())

    def failure(self):
        "Why the process ended"
        from peers import last_word
        self.process.wait()
        return last_word(self.log.read_text())

    def measure(self, case, n):
        "µs for one of `n`"
        self.process.stdin.write(json.dumps([case, n]) + '\n')
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)


def libraries(rows):
    "{name: (Library or None, version, why not)}"
    from peers import PEERS, install
    from fastrl_replay import __version__
    found = {'ours': (Library(sys.executable, 'ours', rows), __version__, None)}
    for name in PEERS:
        python, version, why = install(name)
        library = Library(python, name, rows) if python else None
        found[name] = library, version, why or library.why
        print(f'{name} {version}' if library and library.cases else f'{name}: not measured: {found[name][2]}', flush=True)
    return found


def rounds(found, reps):
    "{(case, name): median µs}; who doesn't offer a case is left out"
    medians = {}
    for case in CASES:
        able = {name: o for name, (o, *_) in found.items() if o and o.cases.get(case, 'no') is None}
        spent = {name: [] for name in able}
        n = {name: max(3, int(TURN/o.measure(case, 10))) for name, o in able.items()}
        for _ in range(reps):
            for name, o in able.items(): spent[name].append(o.measure(case, n[name]))
        medians |= {(case, name): statistics.median(v) for name, v in spent.items()}
        print(f'{case:18}', *(f'{name} {medians[case, name]:,.2f}' for name in able), sep='  ', flush=True)
    return medians


def write(folder, found, medians, rows, mode='w'):
    "results.csv: a line for each case and library, with what is missing said in words; `mode` 'a' adds another size"
    folder.mkdir(parents=True, exist_ok=True)
    what = machine()
    with open(folder/'results.csv', mode, newline='', encoding='utf-8') as f:
        out = csv.writer(f)
        if mode=='w': out.writerow(HEAD)
        for case in CASES:
            for name, (library, version, why) in found.items():
                us, reason = medians.get((case, name)), why or (library.cases.get(case) if library else None)
                remark = '' if us else f'not measured: {reason}' if reason else 'not offered by this library'
                cells = [f'{us:.3f}', f'{us/medians[case, "ours"]:.2f}'] if us else ['', '']
                out.writerow([case, name, version or '', *cells, rows, remark, what])


def plot(folder):
    "The CSV as a picture: how many times as long each takes"
    import matplotlib
    matplotlib.use('agg')
    import matplotlib.pyplot as plt
    from picture import speed
    with open(folder/'results.csv', encoding='utf-8') as f: lines = [o for o in csv.DictReader(f) if o['case'] in CASES]
    fig, ax = plt.subplots(figsize=(8, 4), layout='constrained', facecolor='w')
    speed(ax, lines)
    ax.set_title(lines[0]['machine'], fontsize=7)
    fig.savefig(folder/'results.png', dpi=150)


def measured(rows, reps):
    "What is `found`, and its medians, with buffers of `rows` transitions"
    found = libraries(rows)
    try: return found, rounds(found, reps)
    finally:
        for library, *_ in found.values():
            if library and library.cases: library.close()


def main():
    "Install, fill, measure in turn, write"
    parser = argparse.ArgumentParser()
    parser.add_argument('--rows', type=int, nargs='+', default=[100_000, 1_000_000])
    parser.add_argument('--reps', type=int, default=15)
    parser.add_argument('--out', type=Path, default=Path(__file__).parent.parent/'runs'/'bench')
    parser.add_argument('--serve', help=argparse.SUPPRESS)
    args = parser.parse_args()
    for rows in args.rows:
        if rows < BLOCK or rows % BLOCK: parser.error(f'--rows: expected multiples of {BLOCK:,}, got {rows}')
    if args.serve: return serve(args.serve, args.rows[0])
    print(machine())
    for k, rows in enumerate(args.rows):
        print(f'{rows:,} transitions', flush=True)
        write(args.out, *measured(rows, args.reps), rows, 'a' if k else 'w')
    plot(args.out)
    print(f'{args.out/"results.csv"}, {args.out/"results.png"}')


if __name__ == '__main__': main()
