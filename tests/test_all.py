"What the one import brings, and what a module brings by itself"
import json, subprocess, sys

MOST = 60


def tell(root, code):
    "What a fresh process prints as JSON"
    ran = subprocess.run([sys.executable, '-c', f'import json\n{code}'], cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


METHODS = "[n for n in dir(ReplayMemory(10)) if not n.startswith('_')]"


def test_the_star_brings_few_names_and_all_are_there(root):
    names, listed = tell(root, "import fastrl_replay.all as a; scope = {}; exec('from fastrl_replay.all import *', scope); del scope['__builtins__']\n"
                               "print(json.dumps([sorted(scope), sorted(a.__all__)]))")
    assert len(names) <= MOST
    assert {'ReplayMemory', 'Batch', 'SimpleStep', 'Transition', 'GymStepper', 'NStep', 'ExperienceReplay', 'PrioritizedReplay', 'RankReplay', 'Uniform',
            'Proportional', 'RankBased', 'LAP', 'Combined', 'ERE', 'LinearSchedule', 'EpsilonGreedy', 'SharedParams', 'SharedAgent', 'as_node', 'DQNLearner',
            'CheckpointError', 'RateLimiter'} <= set(names)
    assert listed == names


def test_a_memory_is_whole_by_itself(root):
    alone, everything = tell(root, f'from fastrl_replay.memory import ReplayMemory\nalone = {METHODS}\nimport fastrl_replay.all\n'
                                   f'print(json.dumps([alone, {METHODS}]))')
    assert set(everything) - set(alone) == {'show', 'health'}
    wanted = """add extend sample update_priorities fetch recent episode n_added first_id n_stale nbytes sampler check_valid state_dict
                load_state_dict save load open peek estimate flush close next previous sample_groups"""
    assert set(wanted.split()) <= set(alone)
