"What the one import brings, and what a module brings by itself"
import json, subprocess, sys

MOST = 60


def tell(root, code):
    "What a fresh process prints as JSON"
    ran = subprocess.run([sys.executable, '-c', f'import json\n{code}'], cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


LATER = """matplotlib ray minari cv2 PIL IPython pandas tensorboard tensordict torchrl stable_baselines3 tianshou fastprogress safetensors lz4
           torch._dynamo torch._inductor sympy fastrl_replay.offline fastrl_replay.cli fastrl_replay.interop""".split()
USED = """
from fastrl_replay.all import *
memory = ReplayMemory(50, Proportional(), seed=0)
for k in range(60): memory.add(SimpleStep([float(k)], k % 2, [k + 1.], reward=1., step_n=k))
batch = memory.sample(8)
memory.update_priorities(batch.ids, [1.]*8)
repr(memory), memory.health(), DeviceMemory(50, device='cpu')
"""


def test_nothing_is_imported_before_it_is_used(root):
    "Libraries that draw, compile, read data sets, run clusters, and our modules for them: neither by the one import nor by a memory in use"
    for code in ('from fastrl_replay.all import *', USED):
        assert tell(root, f'{code}\nimport sys\nprint(json.dumps([o for o in {LATER} if o in sys.modules]))') == []


def test_the_mark_of_a_constant_is_torchs_own():
    "Set without the import of its compiler"
    import torch
    from fastrl_replay.batch import constant_result
    def ours(): pass
    def torchs(): pass
    assert constant_result(ours) is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(torchs)) != {}


METHODS = "[n for n in dir(ReplayMemory(10)) if not n.startswith('_')]"


def test_the_star_brings_few_names_and_all_are_there(root):
    names, listed = tell(root, "import fastrl_replay.all as a; scope = {}; exec('from fastrl_replay.all import *', scope); del scope['__builtins__']\n"
                               "print(json.dumps([sorted(scope), sorted(a.__all__)]))")
    assert len(names) <= MOST
    assert {'ReplayMemory', 'Batch', 'SimpleStep', 'Transition', 'GymStepper', 'NStep', 'ExperienceReplay', 'PrioritizedReplay', 'RankReplay', 'Uniform',
            'Proportional', 'RankBased', 'LAP', 'Combined', 'ERE', 'AgeWeighted', 'LinearSchedule', 'EpsilonGreedy', 'SharedParams', 'SharedAgent', 'as_node', 'DQNLearner',
            'CheckpointError', 'RateLimiter'} <= set(names)
    assert listed == names


def test_what_annotations_need_is_among_them():
    "What methods of these classes take and return"
    from fastrl_replay import all as names
    memory = names.ReplayMemory(50, sequence=names.Sequence(2), seed=0)
    memory.extend([names.SimpleStep([float(k)], 0, [k + 1.], step_n=k) for k in range(20)])
    mixed = names.MixedMemory([memory])
    assert isinstance(memory.sample(2), names.SequenceBatch) and issubclass(names.SequenceBatch, names.Batch)
    assert isinstance(memory.health(), names.Health) and isinstance(memory.estimate(memory[0], 9), names.Estimate)
    assert issubclass(names.MixedBatch, names.Batch) and isinstance(mixed.recent(3), names.Batch) and issubclass(type(names.ReplayMemory), type)
    assert {*names.Memory.__annotations__} <= {*dir(memory)} and hasattr(names.View, 'recent')


def test_a_batch_has_pictures_whatever_was_imported(root):
    code = """from fastrl_replay.memory import ReplayMemory
from fastrl_replay.steps import SimpleStep
memory = ReplayMemory(9, seed=0)
for k in range(9): memory.add(SimpleStep([float(k)], 0, [k + 1.]))
import sys
drawn = 'matplotlib' in sys.modules
print(json.dumps([drawn, memory.sample(3)._repr_html_().count('<table'), type(memory.sample(3).show()).__name__]))"""
    assert tell(root, code)==[False, 1, 'Figure']


def test_a_memory_is_whole_by_itself(root):
    alone, everything = tell(root, f'from fastrl_replay.memory import ReplayMemory\nalone = {METHODS}\nimport fastrl_replay.all\n'
                                   f'print(json.dumps([alone, {METHODS}]))')
    assert alone == everything
    wanted = """add extend sample update_priorities fetch recent episode n_added first_id n_stale nbytes sampler check_valid state_dict
                load_state_dict save load open peek estimate flush close next previous news usage
                health show"""
    assert set(wanted.split()) <= set(alone)


LOOKED_AT = """
import sys
drawn = 'matplotlib' in sys.modules                  # by what was imported so far
for k in range(50): memory.add(SimpleStep([float(k)], k % 2, [k + 1.], reward=float(k % 3), step_n=k))
memory.sample(8)
health, kind = memory.health(), type(memory.health()).__name__
drawn |= 'matplotlib' in sys.modules
figure = memory.show()
print(json.dumps([drawn, kind, health['n'], health['warnings'], [o.get_title() for o in figure.axes], type(memory.sample(4).show()).__name__,
                  memory._repr_html_().count('<tr>'), memory.sample(4)._repr_html_().count('<tr>')]))
"""

def test_a_memory_can_be_looked_at_whatever_was_imported(root):
    "`health` and `show` are its own; pictures are drawn by a library that only `show` imports"
    ways = ['from fastrl_replay.memory import ReplayMemory\nfrom fastrl_replay.steps import SimpleStep\nmemory = ReplayMemory(50)',
            'from fastrl_replay.memory import ReplayMemory\nmemory = ReplayMemory(50)\nfrom fastrl_replay.all import SimpleStep']
    alone, everything = [tell(root, way + LOOKED_AT) for way in ways]
    assert alone == everything and not alone[0]
    assert alone[1:4] == ['Health', 50, []] and 'rewards' in alone[4] and alone[5] == 'Figure' and alone[6] == 12 and alone[7] == 5


def test_a_buffer_of_another_library_can_be_looked_at(root):
    "Its memory is a whole one, although nothing but the adapter was imported"
    code = """import numpy as np, gymnasium as gym
from fastrl_replay.interop.sb3 import ReplayBuffer
box = gym.spaces.Box(-1., 1., (3,), np.float32)
buffer, zeros = ReplayBuffer(100, box, gym.spaces.Discrete(2)), np.zeros((1, 3), np.float32)
for k in range(30): buffer.add(zeros + k, zeros + k + 1, np.zeros(1), np.ones(1), np.zeros(1), [{}])
print(json.dumps([buffer.memory.health()['n'], type(buffer.memory.show()).__name__]))"""
    assert tell(root, code) == [30, 'Figure']


def test_a_pipe_can_be_looked_at_whatever_was_imported(root):
    code = """from fastrl_replay.pipes.replay import ExperienceReplay
from fastrl_replay.steps import SimpleStep
replay = ExperienceReplay([SimpleStep(k, 0, k + 1, step_n=k) for k in range(30)], bs=4)
next(iter(replay))
print(json.dumps([replay.health()['n'], type(replay.show()).__name__, 'ReplayMemory of' in replay._repr_html_()]))"""
    assert tell(root, code) == [4, 'Figure', True]
