"The command, run as a user runs it"
import json, os, re, shutil, signal, subprocess, sys, time
from datetime import datetime
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from PIL import Image

import fastrl_replay
from fastrl_replay import cli
from fastrl_replay.learner import evaluate

RUN = 'import sys; from fastrl_replay.cli import main; sys.exit(main())'
SHORT = ['--steps', '400', '--min_sz', '100', '--bs', '16', '--episodes', '3', '--select', '2', '--confirm', '1', '--hidden', '16']


def command(*args, code=RUN, **kw):
    env = os.environ | dict(PYTHONWARNINGS='default', MPLBACKEND='tkagg')       # a desktop's settings must not matter
    ran = subprocess.run([sys.executable, '-c', code, *map(str, args)], capture_output=True, text=True, env=env, timeout=300, **kw)
    return subprocess.CompletedProcess(ran.args, ran.returncode, ran.stdout, said(ran.stderr))


def said(stderr):
    "What a program said on stderr, but for the word about kernels, which are compiled once"
    return ''.join(o for o in stderr.splitlines(True) if 'fastrl_replay: compiling kernels' not in o)


def refused(ran, began=False):
    "The one line of a run that failed, before it `began` or after (None: after it said something else)"
    assert ran.returncode not in (0, None) and (began is None or ran.stdout.startswith('training ')==began), ran
    assert began is not False or not ran.stdout, ran
    assert ran.stderr.startswith('fastrl_replay: ') and ran.stderr.endswith('\n') and ran.stderr.count('\n') == 1, ran.stderr
    return ran.stderr


def inside(capfd, *args):
    "The same in this process, which has everything imported already"
    code = cli.main([str(o) for o in args])
    out, err = capfd.readouterr()
    return subprocess.CompletedProcess(args, code, out, said(err))


# ---- a run

@pytest.fixture(scope='module')
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp('run')/'made'/'for it'
    done_well = command('train', 'CartPole-v1', '--memory', 'prioritized', '--seed', '3', '--out', folder, *SHORT)
    return folder, done_well


def test_a_run_leaves_a_picture_and_numbers(ran):
    folder, run = ran
    assert (run.returncode, run.stderr) == (0, '')
    assert sorted(o.name for o in folder.iterdir()) == ['config.json', 'learning_curve.csv', 'learning_curve.png', 'model.safetensors', 'result.json']
    assert (folder/'learning_curve.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'


def test_a_run_says_how_it_went_and_where_the_picture_lies(ran):
    folder, run = ran
    result = json.loads((folder/'result.json').read_text())
    assert f'mean evaluation return: {result["mean_return"]:.1f}' in run.stdout
    assert str(folder/'learning_curve.png') in run.stdout
    lines = run.stdout.splitlines()
    assert '\r' not in run.stdout and len(lines) == 9
    assert lines[0].startswith('training CartPole-v1 for at most 400 steps (150 batches of 16), prioritized memory, seed 3, into ')
    assert re.fullmatch(r'batch 150  step 39\d  return [\d.]+  greedy [\d.]+  best [\d.]+  loss [\d.]+', lines[1]), lines[1]
    assert re.fullmatch(r'not solved: the best score, [\d.]+, is below 475', lines[2]), lines[2]
    assert lines[3] == 'evaluating the best weights: 3 episodes of at most 500 steps'
    assert lines[7] == f'weights: {folder/"model.safetensors"}; in Python: fastrl_replay.cli.load_model({str(folder)!r})'
    assert lines[8] == f'watch it play: fastrl_replay play {folder}'


def test_what_is_about_to_happen_is_said_before_torch_is_loaded(tmp_path):
    code = ('import sys; from fastrl_replay import cli; say = cli._say\n'
            'def first(line): say(line); print(sorted({"torch", "numba", "matplotlib"} & sys.modules.keys())); sys.exit(0)\n'
            'cli._say = first; cli.main()')
    lines = command('train', '--out', tmp_path, code=code).stdout.splitlines()
    assert lines[0].startswith('training CartPole-v1 for at most 30,000 steps (14,500 batches of 128)') and lines[1] == '[]'


def test_the_config_the_curve_and_the_weights(ran):
    folder, _ = ran
    config, result = (json.loads((folder/f'{o}.json').read_text()) for o in ('config', 'result'))
    assert config['arguments'] == result['arguments'] and config['versions'] == result['versions'] and config['date'] == result['date']
    assert config['versions'].keys() == {'fastrl_replay', 'torch', 'numpy', 'numba', 'gymnasium', 'python', 'platform'}
    assert config['versions']['numpy'] == np.__version__ and datetime.fromisoformat(config['date']).tzinfo is not None
    head, *rows = (folder/'learning_curve.csv').read_text().splitlines()
    series = {}
    for name, at, value in (o.split(',') for o in rows): series.setdefault(name, []).append((int(at), float(value)))
    assert head == 'series,at,value' and series.keys() == {'training', 'greedy', 'loss'} and [at for at, _ in series['loss']] == [100]
    assert series['training'] == sorted(series['training']) and series['greedy'][0][0] == result['steps'] and sum(r for _, r in series['training']) <= 400
    model = cli.load_model(folder)
    assert not model.training
    seeds, options = cli._seeds(3), config['arguments']
    again = evaluate(model, partial(cli.make_env, 'CartPole-v1', options['max_steps']), options['episodes'], seeds['reported'])
    assert again.tolist() == result['returns']


def test_the_numbers(ran):
    result = json.loads((ran[0]/'result.json').read_text())
    assert len(result['returns']) == 3 and result['mean_return'] == pytest.approx(np.mean(result['returns']))
    assert result['seed'] == 3 and result['seconds'] > 0
    assert result['batches'] == 1 + (400 - 2 - 100)//2 and 398 - 1 <= result['steps'] <= 400
    options = result['arguments']
    assert options['env'] == 'CartPole-v1' and options['memory'] == 'prioritized' and options['goal'] == 475
    assert options['bs'] == 16 and options['gamma'] == .99 and options['double'] is True
    assert (options['alpha'], options['beta'], options['beta_end'], options['patience']) == (.6, .4, 1., 10)


@pytest.mark.parametrize('args,betas', [([], (.4, 1.)), (['--memory', 'rank'], (.5, 1.)), (['--beta', '.3', '--beta_end', '.3'], (.3, .3))])
def test_beta_rises_over_the_run(args, betas, tmp_path):
    "Schaul et al. 2016, section 3.4: to 1, in equal steps, with the last batch"
    o = SimpleNamespace(**cli.parse_options(cli.train, ['--out', str(tmp_path), *SHORT, *args]))
    env = cli.make_env('CartPole-v1')
    learn, _ = cli._learner(cli._filled(o, env), env, cli._seeds(0))
    beta, n = learn.replay.memory.sampler.beta, cli._n_batches(o)
    assert n == 150 and (beta(0), beta(n)) == betas and beta(75) == pytest.approx(sum(betas)/2)


def test_a_compiled_run(tmp_path, capfd, monkeypatch):
    made, whole = [], torch.compile
    monkeypatch.setattr(torch, 'compile', lambda f, **kw: made.append(f) or whole(f, backend='eager', **kw))
    run = inside(capfd, 'train', '--compile', '--out', tmp_path, '--checkpoint_every', '50', *SHORT)
    assert (run.returncode, run.stderr, len(made)) == (0, '', 1)
    result = json.loads((tmp_path/'result.json').read_text())
    assert result['batches'] == 150 and result['arguments']['compile'] is True
    torch._dynamo.reset()
    monkeypatch.setenv('PATH', '')
    monkeypatch.delenv('CXX', raising=False)
    told = refused(inside(capfd, 'train', '--compile', '--out', tmp_path/'other', *SHORT), began=True)
    assert told.startswith('fastrl_replay: --compile: torch.compile needs a C++ compiler')


def test_what_is_not_given_comes_from_the_memory_and_the_environment():
    def filled(env_id, **given):
        env = cli.make_env(env_id)
        options = dict(memory='rank', alpha=None, beta=.3, goal=None, patience=10, max_steps=None) | given
        return vars(cli._filled(SimpleNamespace(**options), env))
    assert filled('CartPole-v1') == dict(memory='rank', alpha=.7, beta=.3, goal=475, patience=10, max_steps=500)
    assert filled('Acrobot-v1', goal=-80., memory='uniform') == dict(memory='uniform', alpha=None, beta=.3, goal=-80., patience=10, max_steps=500)
    assert filled('CliffWalking-v1')['max_steps'] == 1000 and filled('CartPole-v1', max_steps=70)['max_steps'] == 70
    assert filled('Blackjack-v1')['patience'] == 0         # no threshold, so nobody knows when it is good enough
    assert filled('Blackjack-v1', goal=0.)['patience'] == 10


def test_the_same_seed_gives_the_same_returns(ran, tmp_path, capfd):
    first = json.loads((ran[0]/'result.json').read_text())
    assert inside(capfd, 'train', '--seed', 3, '--out', tmp_path, *SHORT).returncode == 0
    again = json.loads((tmp_path/'result.json').read_text())
    assert again['returns'] == first['returns'] and again['selection_score'] == first['selection_score']


@pytest.mark.parametrize('args', [
    ['Acrobot-v1', '--memory', 'uniform'], ['CartPole-v1', '--memory', 'rank'], ['Taxi-v4', '--no-double'], ['FrozenLake-v1', '--n_envs', '3'],
    ['CartPole-v1', '--steps', '60'], ['CartPole-v1', '--n_envs', '4', '--n', '1', '--average', '0']])
def test_other_environments_and_settings(args, tmp_path, capfd):
    run = inside(capfd, 'train', *SHORT, *args, '--out', tmp_path)
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path/'result.json').read_text())
    assert len(result['returns']) == 3 and np.isfinite(result['mean_return'])


def test_the_global_generators_are_left_alone(tmp_path, capfd):
    import random
    torch.manual_seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()      # noqa: NPY002
    inside(capfd, 'train', *SHORT, '--out', tmp_path)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()       # noqa: NPY002
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


# ---- mistakes

@pytest.mark.parametrize('args,says', [
    ([], 'expected a command (train'),
    (['trian'], "'trian'"),
    (['--sed', '1'], "'--sed'"),
    (['train', '--lerning_rate', '1'], '--lerning_rate'),
    (['train', 'CartPole-v1', 'Acrobot-v1'], 'Acrobot-v1'),
    (['train', '--steps', 'many'], "'many'"),
    (['train', '--steps'], '--steps'),
    (['train', '--steps', '0'], '--steps'),
    (['train', '--steps', '-7'], '--steps'),
    (['train', '--steps', '100'], '--bs'),
    (['train', '--memory', 'vivid'], "'vivid'"),
    (['train', '--seed', '-1'], '--seed'),
    (['train', '--seed', '1.5'], '--seed'),
    (['train', '--gamma', '7'], 'gamma'),
    (['train', '--lr', 'nan'], 'finite'),
    (['train', '--alpha', '-1'], 'alpha'),
    (['train', '--max_sz', '0'], 'max_sz'),
    (['train', '--steps_per_batch', '0'], '--steps_per_batch'),
    (['train', '--n', '0'], '--n'),
    (['train', '--n_envs', '0'], '--n_envs'),
    (['train', '--max_steps', '0'], '--max_steps'),
    (['train', '--target_sync', '0'], '--target_sync'),
    (['train', '--eps_end', '-2'], 'eps'),
    (['train', '--average', '3'], 'average'),
    (['train', '--device', 'abacus'], '--device abacus'),
    (['train', '--beta', '1.5'], '--beta: expected a number from 0 to 1'),
    (['train', '--eps_steps', '0'], '--eps_steps'),
    (['train', '--steps_per_batch', 'inf'], '--steps_per_batch'),
    (['train', 'Taxi-v3'], 'Taxi-v4'),
    (['train', '--double', 'no'], 'no'),
    (['play'], 'folder'),
    (['inspect', '--seed', '1', 'x'], '--seed'),
    (['train', 'CartPoll-v1'], 'CartPoll-v1'),
    (['train', ''], 'environment'),
    (['train', 'no_such_module:Env-v0'], 'no_such_module'),
    (['train', 'Pendulum-v1'], 'Discrete'),
])
def test_a_mistake_gets_one_line(args, says, tmp_path, capfd):
    run = inside(capfd, *args, *(['--out', tmp_path/'out'] if args[:1]==['train'] else []))
    assert says in refused(run)
    assert not (tmp_path/'out'/'result.json').exists()


@pytest.mark.parametrize('args,says', [(['train', 'CartPoll-v1'], 'CartPoll'), (['nonsense'], 'nonsense'), (['train', '--bs'], '--bs')])
def test_and_in_a_process_of_its_own(args, says, tmp_path):
    assert says in refused(command(*args, cwd=tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_typo_is_answered_before_torch_is_loaded():
    code = 'import sys; from fastrl_replay.cli import main; main(); main(["--help"]); sys.exit("torch" in sys.modules)'
    assert command('nonsense', code=code).returncode == 0


def test_a_folder_that_cannot_be_written(tmp_path, capfd):
    (tmp_path/'file').write_text('')
    assert 'file' in refused(inside(capfd, 'train', '--out', tmp_path/'file'))
    assert 'inner' in refused(inside(capfd, 'train', '--out', tmp_path/'file'/'inner'))


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write anywhere')
def test_a_folder_without_permission(tmp_path, capfd):
    tmp_path.chmod(0o500)
    assert 'Permission denied' in refused(inside(capfd, 'train', '--out', tmp_path/'out'))


def test_a_disk_that_fills_up(tmp_path, capfd, monkeypatch):
    def full(*args, **kw): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(cli.os, 'replace', full)
    for more in [], ['--checkpoint_every', 100]:
        run = inside(capfd, 'train', *SHORT, *more, '--out', tmp_path)
        assert run.returncode == 1 and run.stderr == f'fastrl_replay: --out {tmp_path}: No space left on device\n'


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_a_device_that_is_not_there(tmp_path, capfd):
    for name in 'cuda', 'cuda:1':
        told = refused(inside(capfd, 'train', '--device', name, '--out', tmp_path))
        assert told==f'fastrl_replay: --device {name}: torch finds no CUDA GPU here; leave --device out to train on the CPU\n'


@pytest.mark.parametrize('env', ['Taxi-v3', 'CartPole-v0'])
def test_gymnasium_warns_in_its_error_only(env, tmp_path):
    ran = command('train', env, '--steps', '1', '--bs', '1', '--n', '1', '--actors', '1', '--out', tmp_path/'file'/'no', cwd=tmp_path)
    assert 'WARN' not in ran.stderr and ran.stderr.count('\n') <= 1


def test_an_environment_that_breaks(tmp_path, capfd, monkeypatch):
    class Broken(gym.Env):
        observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
        def reset(self, *, seed=None, options=None): return np.zeros(2, np.float32), {}
        def step(self, action): raise ZeroDivisionError('the simulator\nfell over')
    monkeypatch.setitem(gym.registry, 'Broken-v0', gym.envs.registration.EnvSpec('Broken-v0', entry_point=Broken))
    assert 'ZeroDivisionError: the simulator fell over' in refused(inside(capfd, 'train', 'Broken-v0', *SHORT, '--out', tmp_path), began=True)


def test_an_environment_whose_actions_begin_elsewhere(tmp_path, capfd, monkeypatch):
    class Late(gym.Env):
        observation_space, action_space = gym.spaces.Discrete(3, start=2), gym.spaces.Discrete(2, start=5)
        def reset(self, *, seed=None, options=None): self.t = 0; return 2, {}
        def step(self, action):
            assert self.action_space.contains(action), action
            self.t += 1
            return 2 + self.t % 3, float(action==6), self.t==4, False, {}
    monkeypatch.setitem(gym.registry, 'Late-v0', gym.envs.registration.EnvSpec('Late-v0', entry_point=Late))
    run = inside(capfd, 'train', 'Late-v0', *SHORT, '--steps', '1000', '--out', tmp_path)
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path/'result.json').read_text())['returns'] == [4.]*3


@pytest.mark.skipif(os.name != 'posix', reason='signals')
def test_ctrl_c_gets_one_line(tmp_path):
    with subprocess.Popen([sys.executable, '-c', RUN, 'train', '--steps', '10000000', '--patience', '0', '--out', str(tmp_path/'out')],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        while not (tmp_path/'out').exists() and p.poll() is None: time.sleep(.05)
        time.sleep(2.)
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=60)
    assert (p.returncode, said(err)) == (130, 'fastrl_replay: interrupted\n') and 'evaluating' not in out


# ---- time limits, and what a run says

def test_an_environment_without_a_limit_gets_one(tmp_path, capfd):
    "CliffWalking played 27,000 steps an episode: 20 episodes took minutes"
    run = inside(capfd, 'train', 'CliffWalking-v1', *SHORT, '--out', tmp_path)
    assert run.returncode == 0, run.stderr
    assert 'CliffWalking-v1 has no time limit: episodes are cut off after 1,000 steps (--max_steps)' in run.stdout
    assert 'evaluating the best weights: 3 episodes of at most 1,000 steps' in run.stdout
    result = json.loads((tmp_path/'result.json').read_text())
    assert result['arguments']['max_steps'] == 1000 and min(result['returns']) >= -100*1000


@pytest.mark.parametrize('actors', [0, 1])
def test_the_limit_given_holds_in_training_and_evaluation(actors, tmp_path, capfd):
    run = inside(capfd, 'train', 'CartPole-v1', *SHORT, '--max_steps', 9, '--actors', actors, '--on_disk', '--out', tmp_path)
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path/'result.json').read_text())
    assert max(result['returns']) <= 9 and 'at most 9 steps' in run.stdout and 'no time limit' not in run.stdout
    from fastrl_replay.memory import ReplayMemory
    rows = ReplayMemory.peek(tmp_path/'memory').recent()
    assert rows.truncated.any() and int(rows.step_n.max()) == 8


def test_an_early_stop_is_explained(tmp_path, capfd):
    run = inside(capfd, 'train', *SHORT, '--goal', 1, '--patience', 2, '--every', 20, '--out', tmp_path)
    assert run.returncode == 0, run.stderr
    stopped, = (o for o in run.stdout.splitlines() if o.startswith('solved: '))
    batches = json.loads((tmp_path/'result.json').read_text())['batches']
    assert re.fullmatch(rf'solved: the best score, [\d.]+, is at least 1; stopped early, after {batches:,} of 150 batches', stopped)
    assert sum(o.startswith('batch ') for o in run.stdout.splitlines()) == batches//20


# ---- actors

def session(pid):
    "Living processes of the session that `pid` leads"
    found = []
    for o in os.listdir('/proc') if os.path.isdir('/proc/self') else ():
        try: fields = open(f'/proc/{int(o)}/stat').read().rpartition(')')[2].split()
        except (ValueError, OSError): continue
        if int(fields[3])==pid and fields[0]!='Z': found.append(int(o))
    return found


def nobody_left(pid):
    limit = time.monotonic() + 30
    while session(pid) and time.monotonic() < limit: time.sleep(.05)
    return not session(pid)


@pytest.mark.parametrize('how', ['to the end', 'interrupted'])
def test_actors(how, tmp_path):
    "Two spawned workers: a whole run, and Ctrl-C, which reaches the workers too; nobody stays"
    steps = ['--steps', '10000000', '--patience', '0'] if how=='interrupted' else SHORT
    with subprocess.Popen([sys.executable, '-c', RUN, 'train', '--actors', '2', '--seed', '3', '--out', str(tmp_path/'out'), *steps],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as p:
        if how=='interrupted':
            while len(session(p.pid)) < 4 and p.poll() is None and os.path.isdir('/proc/self'): time.sleep(.05)
            time.sleep(3.)
            os.killpg(p.pid, signal.SIGINT)
        out, err = p.communicate(timeout=120)
        assert nobody_left(p.pid)
    if how=='interrupted': return check((p.returncode, said(err)) == (130, 'fastrl_replay: interrupted\n'), err)
    result = json.loads((tmp_path/'out'/'result.json').read_text())
    assert (p.returncode, said(err)) == (0, '') and result['arguments']['actors'] == 2
    assert result['batches'] == 1 + (400 - 2*2 - 100)//2 and 396 - 1 <= result['steps'] < 400 + cli._CHUNK


def test_actors_go_on_after_a_resume(tmp_path, capfd, monkeypatch):
    "By the weights and the number of steps that were saved, with streams that were not there before"
    import fastrl_replay.pipes.actors as actors
    monkeypatch.setattr(actors.Actors.__init__, '__defaults__', (1, 'fork', *actors.Actors.__init__.__defaults__[2:]))
    args = ['train', '--actors', '2', '--seed', '3', *SHORT]
    assert inside(capfd, *args, '--out', tmp_path/'a', '--checkpoint_every', '100').returncode == 0
    seen = []
    started = actors.Actors._start
    def noting(self, place, number):
        agent = self.source_datapipe.source_datapipe.agent
        seen.append((number//2, agent.shared.version, agent.shared.n_steps))
        return started(self, place, number)
    monkeypatch.setattr(actors.Actors, '_start', noting)
    run = inside(capfd, 'train', '--resume', tmp_path/'a')
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path/'a'/'result.json').read_text())['batches'] == 1 + (400 - 2*2 - 100)//2
    assert [o[0] for o in seen] == [1, 1] and all(version >= 1 and n_steps >= 280 for _, version, n_steps in seen)


def check(truth, why): assert truth, why


@pytest.mark.parametrize('text,number', [('1e4', 10_000), ('12', 12), ('2.5e3', 2_500), ('9007199254740993', 9007199254740993)])
def test_counts_may_be_written_with_an_exponent(text, number):
    assert cli.parse_options(cli.train, ['--steps', text])['steps'] == number


@pytest.mark.parametrize('text', ['1.5', 'inf', 'nan', 'many', ''])
def test_other_counts_are_refused(capfd, text):
    assert f'--steps: expected a whole number, got {text!r}' in refused(inside(capfd, 'train', '--steps', text))


def test_atari_without_its_package_names_the_extra(capfd, monkeypatch):
    import gymnasium
    monkeypatch.setattr(gymnasium.envs.registration, 'registry', {k: v for k, v in gymnasium.registry.items() if not k.startswith('ALE/')})
    assert "need the package ale-py: pip install -e '.[atari]'" in refused(inside(capfd, 'train', 'ALE/Pong-v5', '--steps', '10000'))


def test_a_negative_number_of_actors(capfd): assert '--actors: expected a number ≥ 0, got -1' in refused(inside(capfd, 'train', '--actors', '-1'))


# ---- what it says of itself

def test_version(capfd):
    assert inside(capfd, '--version').stdout == f'fastrl_replay {fastrl_replay.__version__}\n'


@pytest.mark.parametrize('args', [['--help'], ['-h'], ['help']])
def test_help_lists_the_commands(args, capfd):
    run = inside(capfd, *args)
    assert run.returncode == 0 and all(name in run.stdout for name in cli.COMMANDS)


def test_every_option_has_a_default_and_help():
    helped = command('train', '--help').stdout
    for action in cli.make_parser(cli.train)._actions:
        if action.dest=='help': continue
        assert not action.required and action.help, action
        assert 'default' in action.help and 'default: None' not in action.help
        assert action.option_strings==[] or action.option_strings[0] in helped
    assert helped.startswith('usage: fastrl_replay train [ENV] [OPTIONS]') and cli.make_parser(cli.play).usage=='fastrl_replay play FOLDER [OPTIONS]'
    titles = [o[:-1] for o in helped.splitlines() if re.fullmatch(r'[a-z]+:', o)]
    assert titles == ['options', 'environment', 'memory', 'learning', 'evaluation', 'files']
    assert not re.search(r'\b(int|float|str|bool|None|NoneType|Param|Literal)\b|<|\[[a-z]', helped), helped


@pytest.mark.parametrize('args,double,on_disk', [([], True, False), (['--no-double', '--on-disk'], False, True), (['--double', '--no-on-disk'], True, False),
                                                 (['--no-double', '--double', '--on_disk', '--no-on_disk'], True, False)])
def test_a_bool_is_a_pair_of_options(args, double, on_disk):
    o = cli.parse_options(cli.train, args)
    assert (o['double'], o['on_disk'], o['env'], o['max_steps']) == (double, on_disk, 'CartPole-v1', None)


def test_options_are_the_parameters():
    import inspect
    for name, f in cli.COMMANDS.items():
        parameters = inspect.signature(f).parameters
        given = cli.parse_options(f, ['x']*sum(o.kind is not o.KEYWORD_ONLY for o in parameters.values()))
        assert given == {k: o.default if o.kind is o.KEYWORD_ONLY else 'x' for k, o in parameters.items()}, name
    assert cli.parse_options(cli.inspect, ['x', '--plot', 'a.png']) == cli.parse_options(cli.inspect, ['x', '--out', 'a.png']) == dict(folder='x', out='a.png')


def test_the_command_is_installed():
    script = os.path.join(os.path.dirname(sys.executable), 'fastrl_replay')
    if not os.path.exists(script): pytest.skip('not installed as a package')
    run = subprocess.run([script, '--version'], capture_output=True, text=True)
    assert run.stdout.startswith('fastrl_replay ')


# ---- watching

def test_an_episode_becomes_a_moving_picture(ran, tmp_path):
    pytest.importorskip('pygame')
    folder, _ = ran
    run = command('play', folder, '--seed', 5)
    said_so = re.match(r'CartPole-v1: return (\d+) in (\d+) steps, seed 5\npicture: ', run.stdout)
    assert said_so and (run.returncode, run.stderr) == (0, ''), run
    with Image.open(folder/'play.gif') as film:
        assert film.n_frames <= int(said_so[2])//2 + 1 and film.info['duration'] == 40 and film.size == (600, 400)      # 50 a second, every other
    (folder/'play.gif').unlink()


class Blinking(gym.Env):
    "Four steps of a picture that says which step it is, seven a second; action 6 is better"
    metadata = dict(render_modes=['rgb_array', 'human'], render_fps=7)
    observation_space, action_space = gym.spaces.Discrete(3, start=2), gym.spaces.Discrete(2, start=5)
    def __init__(self, render_mode=None): self.render_mode, self.t = render_mode, 0
    def reset(self, *, seed=None, options=None):
        self.t = 0
        return 2, {}
    def step(self, action):
        self.t += 1
        return 2 + self.t % 3, float(action==6), self.t==4, False, {}
    def render(self): return np.full((20, 30, 3), 60*self.t, np.uint8) if self.render_mode=='rgb_array' else None


class Unseen(Blinking):
    metadata = dict(render_modes=[])
    def __init__(self): super().__init__()


def test_any_environment_plays(tmp_path, capfd, monkeypatch):
    for name, kind in dict(Blinking=Blinking, Unseen=Unseen).items():
        monkeypatch.setitem(gym.registry, f'{name}-v0', gym.envs.registration.EnvSpec(f'{name}-v0', entry_point=kind))
        assert inside(capfd, 'train', f'{name}-v0', *SHORT, '--steps', '1000', '--out', tmp_path/name).returncode == 0
    run = inside(capfd, 'play', tmp_path/'Blinking', '--out', tmp_path/'a.gif')
    assert run.stdout == f'Blinking-v0: return 4 in 4 steps, seed 0\npicture: {tmp_path/"a.gif"}\n', run
    with Image.open(tmp_path/'a.gif') as film:
        assert (film.n_frames, film.info['duration'] // 10) == (4, 14)
        for k in range(4):
            film.seek(k)
            assert np.ptp(np.asarray(film.convert('RGB'))) <= 8 and abs(int(np.asarray(film.convert('RGB'))[0, 0, 0]) - 60*k) <= 8
    window = inside(capfd, 'play', tmp_path/'Blinking', '--window')
    assert window.stdout == 'Blinking-v0: return 4 in 4 steps, seed 0\n' and not (tmp_path/'Blinking'/'play.gif').exists()
    assert 'Unseen-v0' in refused(inside(capfd, 'play', tmp_path/'Unseen'))
    assert '.doc' in refused(inside(capfd, 'play', tmp_path/'Blinking', '--out', tmp_path/'a.doc'), began=None)


def test_what_can_not_be_played_is_one_line(ran, tmp_path, capfd):
    assert 'no config.json' in refused(inside(capfd, 'play', tmp_path))
    shutil.copytree(ran[0], tmp_path/'run')
    for name in ('config.json', 'model.safetensors'):
        whole = (tmp_path/'run'/name).read_bytes()
        (tmp_path/'run'/name).write_bytes(whole[:len(whole)//2])
        assert name in refused(inside(capfd, 'play', tmp_path/'run'))
        (tmp_path/'run'/name).unlink()
        assert f'no {name}' in refused(inside(capfd, 'play', tmp_path/'run'))
        (tmp_path/'run'/name).write_bytes(whole)


def test_a_missing_renderer_is_named(ran, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pygame', None)
    assert 'gymnasium[classic' in refused(inside(capfd, 'play', ran[0]))


# ---- what is left of a bar

@pytest.mark.skipif(os.name != 'posix', reason='pseudo-terminals')
def test_on_a_terminal_the_bar_ends_full_and_leaves_no_tail(tmp_path):
    import fcntl, pty, struct, termios
    pid, fd = pty.fork()
    if pid==0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack('HHHH', 30, 80, 0, 0))
        os.environ.pop('COLUMNS', None)
        os.execv(sys.executable, [sys.executable, '-c', RUN, 'train', *SHORT, '--goal', '1', '--patience', '2', '--every', '20', '--out', str(tmp_path)])
    data = b''
    try:
        while more := os.read(fd, 1 << 16): data += more
    except OSError: pass                 # the terminal is gone
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    shown = [screen_line(o) for o in said(data.decode().replace('\r\n', '\n')).split('\n')]
    bar, = (o for o in shown if '|' in o)
    n = json.loads((tmp_path/'result.json').read_text())['batches']
    assert bar.startswith('100%|') and f'| {n}/{n} [00:00, return ' in bar and len(bar) <= 80
    assert shown[shown.index(bar) + 1].endswith(f' is at least 1; stopped early, after {n} of 150 batches')
    assert not [o for o in shown if o.startswith('batch ')]


def screen_line(text):
    "What a terminal shows of a line with carriage returns and erasures"
    line, at = '', 0
    for c in text.replace('\x1b[K', '\v'):
        if c=='\r': at = 0
        elif c=='\v': line = line[:at]
        else: line, at = line[:at] + c + line[at + 1:], at + 1
    return line


def test_the_package_itself_is_a_command(root, tmp_path):
    "As the program is, from any folder; imported, as by a worker process, it does nothing"
    def run(*args): return subprocess.run([sys.executable, *args], cwd=tmp_path, env=os.environ | dict(PYTHONPATH=str(root)), capture_output=True, text=True)
    ran = run('-m', 'fastrl_replay', '--version')
    assert ran.returncode==0 and ran.stdout.startswith('fastrl_replay ')
    ran = run('-m', 'fastrl_replay', 'inspect', 'nowhere')
    assert ran.returncode==1 and ran.stderr=='fastrl_replay: nowhere: expected a memory, a checkpoint or the result of a run, found none\n'
    ran = run('-c', 'import fastrl_replay.__main__ as o; print(o.COMMAND)')
    assert (ran.stdout, ran.returncode)==('fastrl_replay.cli:main\n', 0)
    assert f'fastrl_replay = "{ran.stdout.strip()}"' in (root/'pyproject.toml').read_text()
