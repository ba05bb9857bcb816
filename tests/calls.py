"""Every function of the package, called from Python. What compiled code may crash on has arguments of its own, by module, in `CALLS`:
`CALLS['samplers.rng']['load']` takes what `things` made, and returns them. Other functions are ordinary Python: they get what `GIVEN` says
for the names of their parameters, and may refuse it.

As a script, it calls all functions of the modules on its command line, each module in a process of its own. It prints a line for each
function: its name, and what came of the call; and one for a module that ended its process."""
import importlib
import inspect
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FunctionType, SimpleNamespace

import gymnasium as gym
import numpy as np
import torch

u64 = np.uint64
PACKAGE = 'fastrl_replay'

def things(folder):
    "What functions are called with"
    from fastrl_replay.memory import ReplayMemory, several
    from fastrl_replay.pipes.replay import ExperienceReplay
    from fastrl_replay.samplers import age, proportional, rank, rng, sum_tree
    from fastrl_replay.steps import SimpleStep
    from fastrl_replay.storage.sequence_sampler import Sequence
    o = SimpleNamespace(folder=folder, step=SimpleStep([0., 1.], 0, [1., 2.], reward=1., step_n=0), np=np)
    o.steps = [SimpleStep([float(k), 1.], k % 2, [k + 1., 1.], reward=1., step_n=k % 10, terminated=k % 10 == 9) for k in range(40)]
    o.memory = ReplayMemory(50, proportional.Proportional(), seed=0)
    o.memory.extend(o.steps)
    o.batch, o.storage, o.layout = o.memory.sample(8), o.memory._shelf.storage, o.memory.layout
    o.words = rng.Rng(0).words
    o.state = tuple(o.words)
    o.tree, o.lows = sum_tree.new_tree(16), sum_tree.NO_LOWS
    proportional.write_run(o.tree, o.lows, 0, 16, .5, np.arange(1., 17.))
    o.flat = o.tree.reshape(-1)
    o.blocks = rank.empty_blocks(16, 8)
    rank.change(*o.blocks, np.arange(16), rank.keys_of(np.arange(16.)), True)
    o.opened = rank.blocks_in(*(a.copy() for a in o.blocks))
    o.law = age.law_of(16, 20., .1)
    o.slots, o.probs, o.weights = np.zeros(4, np.int64), np.zeros(4), np.zeros(4)
    o.memories = lambda arrays: several.listed(None, *arrays)
    o.model, o.pipe = torch.nn.Linear(2, 2), ExperienceReplay(o.steps, bs=4)
    windows = ReplayMemory(50, proportional.Proportional(), seed=0, sequence=Sequence(4))
    windows.extend(o.steps)
    windows.sample(4)
    o.windows = windows.sampler
    o.episodes = o.windows.episodes
    o.arrays, o.tables, o.starts = o.episodes.arrays, o.episodes.tables, (o.windows.rows, o.windows.starts)
    base = o.windows.base_sampler
    o.marks, o.priorities = (*o.starts, o.windows.kept), (base.tree, base.lows, .6, 1.)
    return o


PLAN = np.array([[3, 2, 0, 16, 0, 0, 0, 0], [1] + 7*[0], [8, 0, 2, 2, 0, 0, 0, 0]])       # two rows of two words behind their numbers
# Two rows of a word each, of four slots of 16 bytes; the words that a memory draws by, no marks, counts of draws, counters, records
COPY = np.array([[2, 0, 2, 4, 1, 1, 0, 16], [0, 16, 24, 8, 1, 0, 0, 0], [1] + 7*[0], [8, 1, 1, 16, 2, 0, 0, 0]])
LISTED = np.arange(4, dtype=u64), np.zeros(0, u64), np.zeros(600, np.int64), np.array([4] + 7*[0]), np.zeros(64, np.uint8)

CALLS = {
    'kernels': dict(
        njit=lambda o: (lambda x: x,), kernel=lambda o: (lambda x: x,), inlined=lambda o: (lambda x: x,), in_kernels=lambda o: (lambda x: x, lambda x: x),
        instead_of=lambda o: (lambda x: x,), prefetch=lambda o: (o.flat, 3), ids_in=lambda o: (3, 12, 8), package_key=lambda o: ()),
    'kernel_cache': dict(
        source_key=lambda o: (Path(__file__),), package_key=lambda o: (), kernel_folder=lambda o: (), cached=lambda o: (lambda x: x,)),
    'samplers.rng': dict(
        advance=lambda o: (o.state,), as_unit=lambda o: (o.words[0],), below_of=lambda o: (o.state, u64(10)), load=lambda o: (o.words,), store=lambda o: (o.words, o.state),
        shuffle=lambda o: (np.arange(9), o.state), unit=lambda o: (o.words,), below=lambda o: (o.words, u64(10)), words_of=lambda o: (np.random.default_rng(0),)),
    'samplers.sum_tree': dict(
        tree_shape=lambda o: (16,), new_tree=lambda o: (16,), leaf_lines=lambda o: (o.tree,), clear_sums=lambda o: (o.tree.copy(),), new_lows=lambda o: (o.tree,),
        parent_of=lambda o: (2,), leaves_of=lambda o: (o.flat,), leaf_place=lambda o: (2, 7), two_terms=lambda o: (2., 1, 3), least_below=lambda o: (o.tree, o.tree, u64(1), True), resum=lambda o: (o.tree, o.lows, 1), resum_run=lambda o: (o.tree, o.lows, 0, 16), resum_many=lambda o: (o.tree, o.lows, np.arange(1, 3), 2),
        count_reached=lambda o: (o.flat, u64(8), 1.), find_block=lambda o: (o.flat, np.arange(4.), o.slots), find=lambda o: (o.flat, np.arange(4.), o.slots),
        binary_log=lambda o: (2.,), binary_power=lambda o: (2.,), power=lambda o: (2., .5)),
    'samplers.proportional': dict(
        draw_proportional=lambda o: (o.slots, o.probs, o.weights, o.words, o.flat, o.lows, np.zeros(4), 16, .4),
        write_ids=lambda o: (o.tree, o.lows, np.arange(4), o.slots, np.arange(8.), 0, 16, 0., 1e-6, .5),
        write_run=lambda o: (o.tree, o.lows, 0, 4, .5, np.arange(4.)), zero_leaves=lambda o: (o.tree, o.lows, np.arange(2)),
        lay_down=lambda o: (o.tree, o.lows, np.arange(1., 17.), 16., .5), lows_for=lambda o: (o.tree, 'memory')),
    'samplers.rank': dict(
        empty_blocks=lambda o: (16, 8), blocks_in=lambda o: o.blocks, entries_of=lambda o: (o.blocks[3],), reaches=lambda o: (o.opened, 0, -5, 0),
        key_of=lambda o: (2.,), priority_of=lambda o: (-5,), keys_of=lambda o: (np.arange(4.),), is_older=lambda o: (o.opened, 0, -5, 0),
        block_among_equals=lambda o: (o.opened, 0, -5, 0), find_blocks=lambda o: (o.opened, np.arange(-4, 0), np.zeros(4, np.int64), o.slots),
        block_now=lambda o: (o.opened, 0, -5, 0), fetch_block=lambda o: (o.opened, 0),
        place_of=lambda o: (o.opened, 0, o.opened.key_of[15], 15), slide=lambda o: (np.arange(9), 0, 3, 4), move=lambda o: (o.opened, 0, 3, 4),
        shift_directory=lambda o: (o.opened, 0, 1, 1), open_block=lambda o: (o.opened, 1, -5, 0),
        merge=lambda o: (o.opened, 0), make_room=lambda o: (o.opened, 0, 4, -5, 0),
        insert=lambda o: (o.opened, 0, 15), delete=lambda o: (o.opened, 0, 15), change=lambda o: (*o.blocks, np.arange(2), np.arange(-2, 0), False),
        remove=lambda o: (*(a.copy() for a in o.blocks), np.arange(2)), slots_at=lambda o: (o.blocks[1], o.blocks[3], np.arange(1, 5), o.slots),
        check_blocks=lambda o: (*o.blocks, 16), grow_mass=lambda o: (np.zeros(17), o.blocks[3], 16, .7),
        ranks_at=lambda o: (np.arange(4.)/4, np.arange(17.)/16, 16, .7, o.slots),
        draw_ranks=lambda o: (o.slots, o.probs, o.weights, o.words, o.blocks[1], o.blocks[3].copy(), np.zeros(17), 16, .7, .4),
        write_ids=lambda o: (*o.blocks, np.zeros(24), np.arange(2), np.ones(2), 0, 16, True)),
    'samplers.age': dict(
        law_of=lambda o: (16, 20., .1), age_at=lambda o: (o.law, 1.), draw_ages=lambda o: (o.law, np.zeros(4), o.state), weight_at=lambda o: (3, 20., .1),
        try_line=lambda o: (o.law, np.zeros(4), o.slots, np.arange(16), 15, 16, o.state),
        try_list=lambda o: (o.law, np.zeros(4), o.slots, np.arange(16), 15, 16, o.state), draw_aged=lambda o: (o.slots, o.probs, o.weights, o.words, 3, 16, 20., .1),
        mass_left=lambda o: (np.arange(16), np.array([[16], [120]]), 16, 15, 16, 16, 20., .1),
        draw_left=lambda o: (o.slots, o.probs, o.weights, o.words, np.arange(16), np.arange(16), 10., 16., 15, 16, 16, 20., .1)),
    'samplers.uniform': dict(
        draw_repeating=lambda o: (o.slots, o.probs, o.weights, o.words, 16), draw_distinct=lambda o: (o.slots, o.probs, o.weights, o.words, 16, np.zeros(1, u64)),
        fill_even=lambda o: (o.probs, o.weights, 16), mark_distinct=lambda o: (o.slots, u64(4), u64(16), np.zeros(1, u64), o.state), take_unmarked=lambda o: (np.zeros(16, np.int64), 16, np.zeros(1, u64))),
    'samplers.base': dict(
        importance_weights=lambda o: (np.ones(4)/4, .4), release=lambda o: (o.memory.sampler,), as_errors=lambda o: (np.ones(4), 4),
        as_priorities=lambda o: ('priorities', np.ones(4), 4), as_slots=lambda o: (np.arange(4),), check_answers=lambda o: ('td_errors', np.arange(4), np.ones(4), 9),
        check_beta=lambda o: (.4,), checked_draw=lambda o: ('sampler', (np.arange(4), np.ones(4)/4), 4, 16), resolve=lambda o: (np.arange(4), np.ones(4), 0, 9, 16)),
    'storage.base': dict(
        first_place=lambda o: (np.zeros(8, np.int64), 60, 7), find_place=lambda o: (np.zeros(8, np.int64), 60, 7),
        move_streams=lambda o: (np.ones(8, np.int64), np.zeros(16, np.int64), 60, 1),
        link=lambda o: (np.zeros(2, np.int64), np.zeros(32, np.int64), 60, 8, np.arange(4), 0, np.zeros((4, 2), np.int32), 0, np.zeros((16, 2), np.int32), 0),
        link_own=lambda o: (np.zeros(16, np.int64), np.zeros((4, 2), np.int32), np.zeros((16, 2), np.int32), 0, 4),
        follow_links=lambda o: (np.ones((16, 2), np.int32), np.arange(4), np.zeros((4, 2), np.int64), 9, 0, False)),
    'storage.draw_counts': dict(watch_stride=lambda o: (50,), count_drawn=lambda o: (np.zeros(9, np.int64), np.arange(4), 9, 1, 9)),
    'storage.episodes': dict(
        place_of=lambda o: (o.tables, 3), slot_at=lambda o: (o.tables, o.tables.rows[3].episode, 3), new_arrays=lambda o: (9,), tables_of=lambda o: (o.arrays,), column_of=lambda o: (o.storage, 'reward'),
        enter_rows=lambda o: (o.episodes.columns, o.arrays, np.zeros((50, 1), np.int32), 0, 40, 0, False)),
    'storage.sequence_sampler': dict(
        enter_starts=lambda o: (*o.windows.columns, o.marks, o.priorities, np.empty(2000, np.int64), o.windows.base_sampler.size, 40, 40, 0, 40),
        bar_starts=lambda o: (o.arrays, o.marks, o.priorities, np.empty(2000, np.int64), o.windows.base_sampler.size, np.array([5]), 4),
        new_scratch=lambda o: (9,), write_windows=lambda o: (o.arrays, o.starts[1], np.arange(2), np.zeros((2, 4), np.int64)),
        mark_learned=lambda o: (o.starts[0], np.zeros((2, 4), np.int64), 1, 2, np.zeros((2, 4), bool)),
        join_errors=lambda o: (np.ones((2, 4), bool), np.ones((2, 4)), .9),
        consistent=lambda o: (*o.starts, 40, o.windows.base_sampler.size, o.windows.sequence)),
    'storage.frames': dict(
        fingerprints=lambda o: (np.ones((3, 4), u64),),
        intern_rows=lambda o: (np.zeros((9, 4), u64), np.zeros(9, u64), np.zeros(2, np.int64), np.zeros(1, np.int32), np.zeros((2, 1), np.int32),
                               np.zeros(3, np.int64), np.ones((1, 2, 4), u64), np.ones((1, 2, 4), u64), np.zeros(1, np.int32), 0,
                               np.zeros((1, 4), np.int32)),
        free_frames=lambda o: (np.ones((3, 2), np.int32), np.arange(2), np.array([3, 0]), np.zeros(9, np.int32)),
        gather_stacks=lambda o: (np.ones((3, 4), u64), 3, np.ones((2, 2), np.int64), np.empty(0, u64), np.zeros((2, 8), u64))),
    'storage.request': dict(fetch=lambda o: (np.zeros(64, np.uint8), np.zeros(64, np.uint8), PLAN, 4, 4)),
    'pipes.n_step': dict(follows=lambda o: ((0, 1), (0, 2))),
    'steps': dict(goes_on=lambda o: (False, (0, 0), (1., 1.), (0, 1))),
    'storage.choice': dict(strings_in=lambda o: (o.storage, 'reward', np.arange(4))),
    'samplers.eligible': dict(
        take_out=lambda o: (np.arange(8), np.arange(8), np.array([8]), np.array([[8], [28]]), np.array([3])), put_in=lambda o: (np.arange(8), np.full(8, -1), np.array([0]), np.zeros((2, 1), np.int64), 6, 4),
        look_up=lambda o: (np.arange(8), np.arange(3)), last_before=lambda o: (np.arange(8), np.array([[8], [28]]), 3, 8), may_draw=lambda o: (np.arange(8), 3),
        count_between=lambda o: (np.arange(16), np.array([[16], [120]]), 2, 7), nth_from=lambda o: (np.arange(16), np.array([[16], [120]]), 2, 7)),
    'samplers.more': dict(
        draw_recent=lambda o: (o.slots, o.words, 15, 9, 16, np.arange(8), np.r_[np.arange(8), np.full(8, -1)], np.array([[8], [28]]))),
    'mixed': dict(
        dealt=lambda o: (8, (.5, .5), (0., 0.)), common_fields=lambda o: ([o.layout],)),
    'ray.memory': dict(by_place=lambda o: (np.arange(3),)),
    'ray.shard': dict(answered=lambda o: (SimpleNamespace(send=lambda *call: call, get=lambda ref, timeout: ref), 1., 'info')),
    'memory.several': dict(
        scatter=lambda o: (o.words, np.array([2, 5]), np.zeros(5, np.int64)), listed=lambda o: (None, *LISTED),
        draw_rows=lambda o: (o.memories(LISTED), COPY[None], np.zeros(6, np.int64), o.words, np.zeros(256, np.uint8)),
        put_rows=lambda o: (np.zeros(64, np.uint8), np.zeros(256, np.uint8), COPY, np.arange(2)),
        numbered=lambda o: (np.arange(4), 1, 44), by_memory=lambda o: (np.arange(4), 44), serial=lambda o: (o.memory,)),
}


def given(o):
    "What ordinary functions get for a parameter of a name"
    from fastrl_replay.health import newest
    from fastrl_replay.protocol import Memory
    text = 'name what title draws_so why hint path_of dataset dataset_id command field env_id expected got kind_of words'
    number = 'n n_wrong n_envs k number each v value total low end cpus seconds'
    known = dict.fromkeys(text.split(), 'x') | dict.fromkeys(number.split(), 3)
    lists = 'choices known names sent infos items states workers args fills masses steps_of returns losses shares columns leaves trees'
    known |= {k: [] for k in lists.split()}
    plain = '''across alpha arr at at_link back begin beta birth births burn_in capacity changed count
        counts drawn e ends errors eta example exponent factors first_id first_slot fitters floor free
        fresh gone head here holes horizon i inserts keys largest layouts learn least lines links
        listed m marks mask mass message moves n_added n_left n_rows needs next_states numbers options
        owed own drops pair phases piece pipes place places ranks room scale scales shift slot source stop
        stream stride sums table targets tries wanted where word b cls dtypes
        episode fitter fn found gradients group guard look max_norm mean older_than optimizer parameters
        size test variance view weights'''          # which functions refuse
    known = dict.fromkeys(plain.split()) | known
    known |= dict(
        a=np.ones((2, 3)), also=None, bars={'rows': [1]}, batch=o.batch, bits=np.ones(2, np.uint16), bs=8, chunk=o.batch, codec=None, column=lambda k: None,
        compute_reward=lambda *k: np.zeros(8), data=b'x', dedup=None, device='cpu', dtype=torch.bfloat16, directory=None, discount=(1., 1.), env_or_step=o.step,
        episode_n=(0, 0), episodes=o.episodes, eps=.1, error=ValueError, exclusive=False, f=lambda k: k, fd=0, fields=('a', 'b'), first=0, flagged=False, flags=0,
        flat=torch.zeros(6), folder=o.folder, function=lambda: 1, gamma=.9, get=lambda k: k, given=None, goals=np.zeros((8, 2), np.float32), high=1.,
        env=gym.make('CartPole-v1'), ids=np.arange(2), infos=[], instead='y', item=3, key=torch.zeros(1, dtype=torch.int64), kind=type(o.batch), kw={}, layout=o.layout, leaf=o.layout.leaves[0],
        legal=np.ones((1, 2), bool), length=4, make=lambda *k, **kw: o.memory, made=[], manifest={}, max_sz=50, memory=o.memory, method=lambda: 1, min_sz=9,
        mine={}, model=o.model, n_actions=2, nbytes=64, next_of={}, observation_space=gym.spaces.Box(-1., 1., (2,)), of_type=type(o.batch), ok=True, pairs=(),
        memo={}, often=lambda slots, n: slots, parts=o.memory._parts, pieces=[], array=np.array,
        path=Path(o.folder)/'file', pipe=o.pipe, plain={}, plan=None, policy=None, protocol=Memory, put=lambda k: k, q=np.ones(2), ratio=1, raw=np.zeros(64, np.uint8),
        replay=o.pipe, request=None, ring=None, rng=np.random.default_rng(0), rows=newest(o.memory), sampler=o.memory.sampler, saved=None, schedule=.5, seed=0,
         before=lambda k: None, shelf=o.memory._shelf, host=o.memory, chooser=o.memory._chooser, leaving=np.arange(2),
        sequence=None, shape=(2, 8, 8), state={}, step=o.step, step_n=(0, 1), step_type=type(o.step), steps=o.steps, steps_per_batch=2, storage=o.storage,
        streams=np.zeros(8, np.int64), tables={}, target=o.model, tensors=[torch.zeros(2)], there={}, types=int, u=np.zeros(1), values=[1., 2.])
    return known


SKIPPED = 'cli.train', 'cli.play', 'ray.memory.open_directory'       # whole runs and clusters, which tests of their own start


def modules(root):
    "Names of the package's modules, without the package's own"
    for file in sorted((root/PACKAGE).rglob('*.py')):
        parts = (file.parent if file.name == '__init__.py' else file.with_suffix('')).relative_to(root/PACKAGE).parts
        if parts and parts[-1] != '_modidx': yield '.'.join(parts)


def functions(name):
    "The functions of a module that it exports, or that are public in it"
    module = importlib.import_module(f'{PACKAGE}.{name}')
    own = [k for k, v in vars(module).items() if not k.startswith('_') and getattr(v, '__module__', '') == module.__name__]
    for k in dict.fromkeys([*getattr(module, '__all__', []), *own]):
        v = getattr(module, k)
        if callable(v) and not isinstance(v, type) and (isinstance(v, FunctionType) or hasattr(v, 'py_func') or k in CALLS.get(name, {})): yield k, v


def call(name, key, function, o, known):
    "Call it; return what came of it"
    own = CALLS.get(name, {}).get(key)
    compiled = hasattr(function, 'py_func') or hasattr(function, 'compiled')
    if own is None and compiled: return 'has no arguments in CALLS'
    if own is not None:
        with np.errstate(over='ignore'): function(*own(o))
        return 'fine'
    needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind in (0, 1)]
    unknown = [p for p in needed if p not in known]
    if unknown: return f'nothing is given for {unknown}'
    try: function(*(known[p] for p in needed))
    except Exception as e: return f'fine: refused by {type(e).__name__}'           # noqa: BLE001
    return 'fine'


def call_all(name, o, known):
    "Call the functions of a module, and say what came of it"
    try: found = list(functions(name))
    except ImportError as e: return print(f'{name}: left out ({e})', flush=True)
    for key, function in found:
        if f'{name}.{key}' in SKIPPED: continue
        print(f'{name}.{key}:', end=' ', flush=True)
        try: print(call(name, key, function, o, known), flush=True)
        except BaseException as e: print(f'raised {type(e).__name__}: {e}'.splitlines()[0][:150], flush=True)           # noqa: BLE001


def main(*names):
    "Call all functions of these modules, each module in a fork, with what has been made before"
    importlib.import_module(f'{PACKAGE}.all')
    with tempfile.TemporaryDirectory() as folder:
        o = things(folder)
        known = given(o)
        for name in names:
            child = os.fork()
            if not child:
                signal.alarm(200)
                try: call_all(name, o, known)
                finally: os._exit(0)
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if ended: print(f'ended the process: {ended}', flush=True)


if __name__ == '__main__': main(*(sys.argv[1:] or modules(Path(importlib.import_module(PACKAGE).__file__).parent.parent)))
