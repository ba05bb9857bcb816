"The how-to page of one's own loop: its code is run as it stands, beside the stepper, and killed in the middle"
import json
import os
import random
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from fastrl_replay.memory import ReplayMemory
from fastrl_replay.pipes.stepper import GymStepper
from fastrl_replay.steps import Transition

PAGE = 'nbs/howto/01_own_loop.ipynb'


def code_of(root):
    "The page's imports and functions, without what it runs with them"
    cells = [''.join(o['source']) for o in json.loads((root/PAGE).read_text(encoding='utf-8'))['cells'] if o['cell_type'] == 'code']
    return '\n'.join(o for o in cells if o.startswith(('import', 'def ')))


@pytest.fixture(scope='module')
def page(root):
    scope = {}
    exec(code_of(root), scope)
    return scope


class Walk(gym.Env):
    "An observation tells copy, walk and step; walks end by plan, at once in all copies if these are alike; arrays are used again"
    observation_space, action_space = gym.spaces.Box(-1, 9999, (3,), np.float32), gym.spaces.Discrete(2)

    def __init__(self, copy, lengths): self.lengths, self.buffer, self.walk = lengths, np.array([copy, -1, 0], np.float32), -1

    def reset(self, seed=None, options=None):
        self.walk += 1
        self.buffer[1:] = self.walk, 0
        return self.buffer.copy(), {}

    def step(self, action):
        self.buffer[2] += 1
        over = self.buffer[2] == self.lengths[self.walk % len(self.lengths)]
        return self.buffer.copy(), float(action), bool(over and self.walk % 2 == 0), bool(over and self.walk % 2), {}


PLANS = dict(mixed=[(3, 1, 4), (2, 2), (5,), (1, 1, 6)], alike=[(3, 2)]*4, short=[(1,)]*3, alone=[(2, 3)])
LOOPS = {AutoresetMode.NEXT_STEP: 'next_step', AutoresetMode.SAME_STEP: 'same_step', AutoresetMode.DISABLED: 'disabled'}


@pytest.mark.parametrize('plan', PLANS)
@pytest.mark.parametrize('mode', LOOPS)
def test_each_loop_stores_what_the_stepper_does(mode, plan, page):
    def walks(): return SyncVectorEnv([lambda k=k, o=o: Walk(k, o) for k, o in enumerate(PLANS[plan])], autoreset_mode=mode)
    def choose(states): return (states.sum(1) % 3 > 1).astype(int)
    own, right = ReplayMemory(5000), ReplayMemory(5000)
    page[LOOPS[mode]](walks(), choose, own, 200)
    for _, chunk in zip(range(200), GymStepper([walks()], choose, step_type=Transition)): right.extend(chunk)
    n = len(own)
    assert n >= 100 and all(torch.equal(a[:n], b[:n]) for a, b in zip(own[:].astuple(), right[:].astuple()))
    ids = np.arange(n - 2*len(PLANS[plan]))
    assert (own.next(ids) == right.next(ids)).all() and [o.tolist() for o in map(own.episode_ids, ids[:50])] == [o.tolist() for o in map(right.episode_ids, ids[:50])]


RUN = """
import hashlib, pathlib, sys
{code}
torch.set_num_threads(1)
folder, saves, calls = pathlib.Path(sys.argv[1]), int(sys.argv[2]), 400
run = load(folder) if folder.exists() else new_run()
print('begins', run.calls, flush=True)
while run.calls < calls:
    advance(run, 10)
    if saves:
        save(run, folder)
        print('saved', run.calls, flush=True)
digest = hashlib.sha256()
arrays = [*run.memory[:].astuple(), *run.model.state_dict().values(), *run.target.state_dict().values(),
          *(v for o in run.optimizer.state_dict()['state'].values() for v in o.values())]
for a in [a.numpy() for a in arrays] + [run.memory.sampler.priorities, run.obs, run.over, run.memory.sample(64).ids.numpy()]:
    digest.update(str((a.dtype, a.shape)).encode() + a.tobytes())
print('ends', digest.hexdigest(), flush=True)
"""


def test_a_run_that_is_killed_goes_on_bit_for_bit(root, tmp_path):
    "Killed again and again, at any time, also during a save: the end is that of a run that nothing has interrupted"
    script, chance = tmp_path/'run.py', random.Random(0)
    script.write_text(RUN.format(code=code_of(root)), encoding='utf-8')
    def start(folder, saves):
        return subprocess.Popen([sys.executable, script, folder, str(saves)], stdout=subprocess.PIPE, text=True, cwd=root,
                                env=os.environ | dict(PYTHONPATH=str(root), OMP_NUM_THREADS='1'))
    whole = start(tmp_path/'nothing', 0)
    lines, kills = [], 0
    while True:
        process = start(tmp_path/'saved', 1)
        if kills < 3:
            for line in process.stdout:
                lines.append(line)
                if line.startswith('saved') and int(line.split()[1]) >= 60 + 110*kills: break
            time.sleep(chance.uniform(0, .08))
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        else:
            rest, _ = process.communicate(timeout=100)
            break
    begun = int(rest.split()[1])
    assert kills == 3 and begun >= 280 and process.returncode == 0
    assert rest.splitlines()[-1] == whole.communicate(timeout=100)[0].splitlines()[-1] and rest.splitlines()[-1].startswith('ends')
