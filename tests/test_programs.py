"""Programs as users write them, each killed in the middle and begun again: what they print says that nothing was lost.

Two more are tutorials: self-play, and a recurrent network that balances a pole whose velocities it does not see."""
import os
import random
import signal
import subprocess
import sys
import time


from fastrl_replay.memory import ReplayMemory

# lines of the program, without its docstring, imports and environment, are few: a limit for each
class Program:
    "A script of `programs/` with a folder of its own"
    def __init__(self, root, name, folder): self.root, self.path, self.folder = root, root/'tests'/'programs'/f'{name}.py', folder
    def start(self, n):
        env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(self.root), os.environ.get('PYTHONPATH', '')]), OMP_NUM_THREADS='1')
        return subprocess.Popen([sys.executable, '-W', 'ignore', self.path, self.folder, str(n)], stdout=subprocess.PIPE, env=env, text=True)
    def killed(self, n, lines, seed=0):
        "Run it with `n` until it has printed so many lines, and a moment longer; then kill it"
        process, found = self.start(n), []
        try:
            for line in process.stdout:
                if not line[:1].isdigit(): continue                        # a line of a log
                found.append(numbers(line))
                if len(found)==lines: break
            time.sleep(random.Random(seed).random())
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert len(found)==lines, f'it ended after {found}'
        return found + [numbers(o) for o in process.stdout if o[:1].isdigit() and o.endswith('\n')]
    def run(self, n):
        "Run it to its end"
        process = self.start(n)
        out, _ = process.communicate(timeout=280)
        assert process.returncode==0, out
        return [numbers(o) for o in out.splitlines() if o[:1].isdigit()]


def numbers(line): return [float(o.strip('(),')) for o in line.split()]


def test_chunks_online_and_offline(root, tmp_path):
    program = Program(root, 'chunks', tmp_path)
    before = program.killed(1000, 4)
    with ReplayMemory.peek(tmp_path/'online') as online: n_there = online.n_added
    after = program.run(10)
    assert n_there >= before[-1][2] and after[0][0]==before[-1][0] + 1 + (n_there > before[-1][2])
    for last, (game, length, n, demos) in zip([before[-1] if n_there==before[-1][2] else [0, 0, n_there, 0], *after], after):
        assert n==last[2] + length and demos==4000, f'game {game}: whole games are stored, and demonstrations once'
    played = [o[1] for o in before + after]
    assert sum(played[-5:])/5 > sum(played[:3])/3                  # and it learns
    with ReplayMemory.open(tmp_path/'online') as memory: assert memory.check_valid() and memory.n_added==after[-1][2]


def test_a_pipe_of_ones_own_normalised_with_actors(root, tmp_path):
    program = Program(root, 'own_pipe', tmp_path/'run')
    before = program.killed(10_000, 3, seed=1)
    after = program.run(int(before[-1][0]) + 200)
    saved = before[-1]
    assert after[0][0] in (saved[0] + 100, saved[0] + 200)         # saved once more before it was killed, perhaps
    for (n, stored, penalties, counted, spread), (m, then, later, again, _) in zip(before + after, before[1:] + after):
        assert m > n and then > stored and later >= penalties and again >= counted >= stored and spread > 1
        assert 0 <= then - 500 - 4*(m - 1) < 18                    # a batch for four steps, which come in chunks
    assert after[-1][3] - after[-1][1] < 20                        # counted, but not stored: in open windows


def test_pixels_on_disk(root, tmp_path):
    program = Program(root, 'pixels', tmp_path)
    before = program.killed(10_000, 2)
    with ReplayMemory.peek(tmp_path/'memory') as memory: n_there = memory.n_added
    after = program.run(int(before[-1][0]) + 50)
    assert n_there >= before[-1][1] and after[0][1] >= n_there
    assert all(o[2:-1]==[1, 4, 40, 40] and o[-1] < 2_000 for o in before + after)              # a state alone has 6,400 bytes
    assert after[-1][0]==before[-1][0] + 50
    with ReplayMemory.open(tmp_path/'memory') as memory: assert memory.check_valid() and memory.n_added==after[-1][1]
