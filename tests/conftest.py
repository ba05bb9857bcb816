"What all tests share"
import gc
import mmap
import os
import re
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

FIRST = 'test_types.py', 'test_docs.py', 'test_cli.py', 'test_actors.py', 'test_ray_cluster.py'        # files of half a minute and more

COLLECTED = pytest.StashKey[set]()        # the names of all that was found, before a suite was chosen


class Group(NamedTuple):
    "Tests that run together: by which command, what they are, and patterns of their notebooks, files, and single tests in files"
    command: str
    what: str
    members: str


# Every notebook and test file belongs to a group (test_groups.py), by the last pattern that fits it. `make test` has 3 minutes on
# two cores and the extra `test`: what is long, or needs more, is in a group of `make test-all`, which runs all of them.
GROUPS = dict(
    book=Group('make test', 'the notebooks of parts 1 to 3, the first pages, and the quick chapters of part 4',
        'nbs/[123]_*/* nbs/index.ipynb nbs/start/* nbs/4_processes/*'),
    chapters=Group('make test', 'the tests of the chapters, beside naive twins',
        '''test_checks.py test_lasting.py test_mixed.py test_also.py test_where.py test_drop.py test_memory_protocol.py test_batch.py test_episodes.py test_episodes_index.py test_hindsight.py test_links.py test_memory.py test_n_step.py test_own_loop.py test_options.py test_rank.py
        test_rate_limiter.py test_replay.py test_samplers.py test_age.py test_schedules.py test_sequences.py test_burn_in.py test_begins.py test_anywhere.py test_stepper.py test_steps.py
        test_texts.py test_device.py test_sum_tree.py test_windows.py test_frames.py test_framefiles.py test_mapped.py test_ondisk.py test_folders.py test_counters.py
        test_checkpoint.py test_saving.py test_saving_format.py test_offline.py test_learner.py test_masks.py test_health.py test_show.py test_cli.py
        test_prefetch.py test_ray.py test_ray_replay.py test_ray_save.py
        test_upstream.py test_n_step_joins.py test_next_fields.py test_far_streams.py
        test_members.py test_texts_forgotten.py test_planes.py test_streams_torn.py
        test_messages.py test_ray_figures.py
        test_edges_of_lasting.py test_restored.py test_device_restored.py test_format.py test_pickles.py
        test_one_kernel.py test_eligible.py test_level.py
        test_whole_episodes.py
        test_normalized.py
        test_reward_scale.py
        test_gradient_step.py
        test_other_names.py test_disk_sizes.py test_drop_episodes.py test_peeked.py'''),
    hostile=Group('make test', 'bad input of every kind, and what every implementation of a protocol must pass',
        'test_bad_input.py test_faults.py test_flags.py test_harness.py test_sampler_faults.py test_edges.py test_kit.py test_kit_finds.py'),
    project=Group('make test', 'code, floors, groups, README and the notebooks\' own runner',
        'test_notebooks.py test_prose.py test_quality.py test_floors.py test_groups.py test_readme.py'),
    static=Group('make test-all', 'type checkers, linters, the files of the repository', 'test_types.py test_repository.py test_quality.py::test_ruff*'),
    site=Group('make test-all', 'the site, also in a browser, and its drawings', 'test_docs.py test_drawings.py'),
    commands=Group('make test-all', 'training runs from the command line, killed, resumed and drawn',
        '''test_runs.py test_programs.py test_cli.py::test_actors* test_cli.py::test_other_environments* test_cli.py::test_a_run_leaves_a_picture*
        test_cli.py::test_the_limit_given* test_cli.py::test_on_a_terminal* test_cli.py::test_an_episode_becomes* test_cli.py::test_the_config* test_cli.py::test_the_numbers test_cli.py::test_the_same_seed*
        test_cli.py::test_what_can_not_be_played* test_cli.py::test_a_missing_renderer*
        test_cli.py::test_any_environment_plays test_cli.py::test_a_run_says_how_it_went* test_cli.py::test_an_environment_whose*'''),
    processes=Group('make test-all', 'threads, forks, actors with every way to start a process, shared weights; the shim for datapipes',
        'test_threads.py test_sync.py test_forks.py test_actors.py test_weights.py test_shim.py test_far_streams.py::test_actors* test_upstream.py::*ones_own_is_killed* test_upstream.py::test_beyond_actors* test_normalized.py::test_after_actors test_whole_episodes.py::test_with_actors* test_kit.py::test_every_pipe*'),
    kills=Group('make test-all', 'kills, interrupts and full disks at every line; thousands of damaged files; everything at once',
        '''test_kills.py test_interrupts.py test_first_calls.py test_soak.py *::*any_line* *::*every_line* *::*killed* *::*every_call_to_the_system*
        *::test_mutants* *::*power_cut* test_lasting.py::test_a_second_writer* test_mapped.py::test_a_windows_without*
        test_ondisk.py::test_a_reader_beside* test_saving_format.py::test_two_saves*
        test_saving_format.py::test_without_fcntl*
        test_first_flush.py'''),
    thorough=Group('make test-all', 'the longest comparisons beside naive twins, and each file of each kind of folder damaged',
        '''test_texts_forgotten.py::test_a_small_memory_meets* test_frames.py::test_frames_of_any_number* test_frames.py::test_a_state_in_pieces* test_frames.py::test_frames_stacked_along*
        test_framefiles.py::test_every_row* test_sequences.py::test_windows_of_n_step_rows* test_sequences.py::test_n_step_rows_are_told*
        test_sequences.py::test_a_memory_on_disk_is_found_again* test_show.py::test_the_counts_agree_with_a_twin*
        test_lasting.py::test_a_damaged_file_is_named* test_lasting.py::test_a_spoilt_file_is_named* test_lasting.py::test_what_cannot_be*
        test_saving_format.py::test_a_folder_holds_the_last_state* test_checkpoint.py::test_a_memory_*goes_on_exactly test_drop.py::test_sequences_that_hold*
        test_same_draws.py'''),
    compiled=Group('make test-all', 'torch.compile',
        '''test_masks.py::test_a_compiled_* test_normalized.py::test_a_compiled_* test_reward_scale.py::test_a_compiled_* test_masks.py::test_a_short_training* test_learner.py::test_compiled_weights* test_learner.py::test_a_compiled_* test_learner.py::test_more_compiled_* test_learner.py::test_an_eager_run_goes_on_compiled*
        test_batch.py::*compiled_function* test_cli.py::test_a_compiled_run test_device.py::*compiled* test_device.py::*one_graph* test_device.py::*compiles_itself* test_device.py::*stays_where_it_is* test_device_compiled.py test_device_fakes.py'''),
    cluster=Group('make test-all', 'Ray on this machine, and its chapters: clusters, nodes that die',
        'test_ray_cluster.py test_ray_nodes.py test_ray_life.py test_ray.py::*nothing_imports_ray* test_ray.py::*without_ray* nbs/4_processes/0[4567]_*'),
    peers=Group('make test-all', 'part 6, other libraries, the comparison and the evidence',
        '''nbs/6_elsewhere/* test_show.py::test_tensorboard* test_sb3.py test_tensordicts.py test_tianshou.py test_rllib.py test_bench.py test_evidence.py test_device.py::test_the_benchmark* test_device.py::test_torchrl*
        test_pickles.py::*sb3*'''),
    lessons=Group('make test-all', 'tutorials, how-tos, and part 5', 'nbs/tutorials/* nbs/howto/* nbs/5_looking/*'),
    installed=Group('make test-all', 'read-only and partial installations, imports in fresh processes, cached kernels',
        'test_install.py test_all.py test_kernels.py test_kernel_cache.py test_calls.py test_editing.py'),
)


@cache
def patterns():
    "Group → one regular expression for all its members"
    return {key: re.compile('|'.join(map(translate, group.members.split()))) for key, group in GROUPS.items()}


@cache
def group_of(name):
    "The group of a notebook ('nbs/index.ipynb'), a file of tests or a test in it ('test_all.py::test_x'), or None"
    names = {name, name.split('::')[0]}
    found = [key for key, members in patterns().items() if any(map(members.match, names))]
    return found[-1] if found else None


def name_of(item):
    "What the patterns of groups are about"
    notebook = item.get_closest_marker('notebook')
    return item.callspec.params['notebook'] if notebook else f'{item.path.name}::{getattr(item, "originalname", item.name)}'


def in_suite(name, suite):
    "Does `--suite` run it? One without a group is quick, until test_groups.py has complained"
    group = group_of(name)
    quick = group is None or GROUPS[group].command == 'make test'
    return suite == 'all' or quick == (suite == 'test')


def pytest_addoption(parser):
    parser.addoption('--suite', choices=['test', 'rest', 'all'], default='all', help='the groups of `make test`, the others, or all')
    parser.addoption('--nbflags', default='', help='nbdev flags to run although they are skipped by default, such as "slow"')
    parser.addoption('--kills', type=int, default=25, help='how many processes the tests of kills kill')
    parser.addoption('--soak', type=float, default=20, help='for how many seconds the soak does everything at once')
    parser.addoption('--mutants', type=int, default=100, help='how many damaged or hostile files each test of them loads')


def pytest_configure(config): config.addinivalue_line('markers', 'slow: takes minutes; run by `pytest --nbflags slow`')


def pytest_ignore_collect(collection_path, config):
    "A file that `make test` has no use for is not imported: what it needs may not be installed"
    if not collection_path.match('test_*.py') or in_suite(collection_path.name, config.getoption('--suite')): return None
    return True if config.getoption('--suite') == 'test' else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    "Each process begins with other files, so that the first to import one rewrites its assertions for all"
    report = yield
    worker = getattr(collector.config, 'workerinput', None)
    if worker and isinstance(collector, pytest.Dir):
        begin = len(report.result)*int(worker['workerid'].removeprefix('gw'))//worker['workercount']
        report.result = report.result[begin:] + report.result[:begin]
    return report


@pytest.hookimpl(tryfirst=True)                 # before `-k`, so that it knows all
def pytest_collection_modifyitems(config, items):
    config.stash[COLLECTED] = {name_of(o) for o in items}
    suite = config.getoption('--suite')
    chosen, others = [], []
    for o in items: (chosen if in_suite(name_of(o), suite) else others).append(o)
    config.hook.pytest_deselected(items=others)
    items[:] = sorted(chosen, key=place)
    if 'slow' in config.getoption('--nbflags'): return
    for o in items:
        if o.get_closest_marker('slow'): o.add_marker(pytest.mark.skip(reason='slow'))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    "What a test of `make test` imports, the extra `test` installs: to leave it out without a word would be no test"
    report = yield
    left_out = report.skipped and call.excinfo and any(o.name == 'importorskip' for o in call.excinfo.traceback)
    if left_out and item.config.getoption('--suite') == 'test':
        report.outcome, report.longrepr = 'failed', f'{item.nodeid}: {call.excinfo.value}; its group is one of `make test`'
    return report


def place(item):
    "What takes long and can't be divided comes first, the notebooks last, the longest of them first: so all processes end together"
    file, notebook = item.path.name, item.get_closest_marker('notebook')
    return bool(notebook), file not in FIRST, '' if notebook else file


def pytest_collection_finish():
    "What has been imported stays: the collector needs not look through it again and again"
    gc.freeze()


@pytest.fixture(scope='session')
def root():
    "The repository's root"
    return Path(__file__).resolve().parent.parent


class Unsynced(mmap.mmap):
    def flush(self, *_): pass

@pytest.fixture
def quick(monkeypatch):
    "No waiting for the disk, where nothing is about the power"
    monkeypatch.setattr(os, 'fsync', lambda fd: None)
    monkeypatch.setattr(mmap, 'mmap', Unsynced)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    "With several processes (`-n`) the tests of a file stay together, since they share what they have made; each notebook is by itself"
    from xdist.scheduler import LoadScopeScheduling
    config.option.loadscopereorder = False          # it would begin with the files of the most tests
    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid): return nodeid if '::test_notebook[' in nodeid else nodeid.split('::')[0]
    return ByFile(config, log)
