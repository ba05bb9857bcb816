"Our buffer under RLlib: what it draws is what was added, and what it can't do is refused. RLlib pins gymnasium 1.2.2, so it is rarely there"
import copy, pickle

import numpy as np
import pytest
from refusals import refused
from words import WORDS, words

try: from fastrl_replay.interop.rllib import EpisodeReplayBuffer
except ModuleNotFoundError as e: pytest.skip(f'{e}', allow_module_level=True)

from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from fastrl_replay.all import Uniform
from fastrl_replay.offline import by_episodes


def episode(rng, number, n, nested=False, terminated=True):
    "An episode of `n` steps; its observations tell its number and their time"
    def seen(t): return {'a': np.array([number, t], np.float32), 'b': np.array(t)} if nested else np.array([number, t], np.float32)
    made = SingleAgentEpisode(observations=[seen(0)], len_lookback_buffer=0)
    for t in range(n): made.add_env_step(seen(t + 1), int(rng.integers(2)), float(rng.normal()), terminated=terminated and t == n - 1, truncated=not terminated and t == n - 1)
    return made


def fragments(whole, cuts):
    "The episode in pieces, as an environment runner returns them"
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)])]
    for o in parts: o.id_ = whole.id_
    return parts


def time_of(o, k):
    "The number of the episode and the time of an observation"
    seen = o.get_observations(k)
    return tuple(np.asarray(seen['a'] if isinstance(seen, dict) else seen).astype(int).tolist())


@pytest.mark.parametrize('nested', [False, True])
@pytest.mark.parametrize('n_step', [None, 1, 3, (1, 5)])
def test_samples_are_steps_and_sums_of_what_was_added(nested, n_step):
    rng, buffer, gamma = np.random.default_rng(0), EpisodeReplayBuffer(10_000, seed=0), .9
    wholes = [episode(rng, k, int(rng.integers(2, 12)), nested, bool(k % 2)) for k in range(12)]
    pieces = [fragments(o, sorted({int(x) for x in rng.integers(1, len(o), 2)})) for o in wholes]
    while any(pieces):                                       # episodes run side by side
        part = [o.pop(0) for o in pieces if o]
        buffer.add([o.to_numpy() if rng.random() < .5 else o for o in part])
    assert len(buffer) == buffer.get_added_timesteps() == sum(map(len, wholes)) and buffer.get_num_episodes() == 12
    assert buffer.memory.check_valid() and not buffer.running and len(by_episodes(buffer.memory)) == 12
    high, counts = n_step[1] - 1 if isinstance(n_step, tuple) else n_step or 1, set()
    for o in buffer.sample(400, n_step=n_step, gamma=gamma):
        (k, t), (_, after) = time_of(o, 0), time_of(o, 1)
        whole, m = wholes[k], o.get_extra_model_outputs('n_step', 0)
        assert len(o) == 1 and after == t + m and time_of(o, 1)[0] == k
        assert m <= high and (isinstance(n_step, tuple) or m == min(high, len(whole) - t))
        assert o.get_rewards(0) == pytest.approx(sum(gamma**j*whole.get_rewards(t + j) for j in range(m)), rel=1e-5, abs=1e-6)
        assert o.get_actions(0) == whole.get_actions(t)
        assert o.is_terminated == (after == len(whole) and whole.is_terminated) and o.is_truncated == (after == len(whole) and whole.is_truncated)
        counts.add(m)
    assert counts == set(range(1, high + 1))
    assert all(o.is_numpy for o in buffer.sample(3, to_numpy=True)) and buffer.get_sampled_timesteps() == 403


def test_a_window_ends_at_the_newest_step_of_a_running_episode():
    rng, buffer = np.random.default_rng(0), EpisodeReplayBuffer(100, sampler=Uniform(replace=True), seed=0)
    first, second = fragments(episode(rng, 0, 6), [3])
    buffer.add(first)
    ends = {time_of(o, 0)[1]: (time_of(o, 1)[1], o.is_done) for o in buffer.sample(100, n_step=3)}
    assert ends == {0: (3, False), 1: (3, False), 2: (3, False)}
    buffer.add(second)
    ends = {time_of(o, 0)[1]: (time_of(o, 1)[1], o.is_done) for o in buffer.sample(200, n_step=3)}
    assert ends == {t: (min(t + 3, 6), t >= 3) for t in range(6)}


def test_errors_become_priorities_and_weights():
    rng, buffer = np.random.default_rng(0), EpisodeReplayBuffer(1_000, alpha=1., beta=1., seed=0)
    buffer.add([episode(rng, k, 10) for k in range(4)])
    for _ in range(30):
        drawn = buffer.sample(32)
        buffer.update_priorities(np.array([.1 + time_of(o, 0)[0] for o in drawn]), 'default_policy')
    p = np.repeat(.1 + np.arange(4), 10) + buffer.memory.sampler.eps
    np.testing.assert_allclose(buffer.memory.sampler.priorities, p, rtol=1e-6)
    drawn = buffer.sample(4_000)
    share = np.bincount([time_of(o, 0)[0] for o in drawn], minlength=4)/4_000
    np.testing.assert_allclose(share, p.reshape(4, 10).sum(1)/p.sum(), atol=.002)
    for o in drawn[:50]: assert o.get_extra_model_outputs('weights', 0) == pytest.approx(p[0]/p[time_of(o, 0)[0]*10], rel=1e-4)


def test_a_state_goes_on_alike():
    rng, buffer = np.random.default_rng(0), EpisodeReplayBuffer(50, seed=0)
    first, second = fragments(episode(rng, 0, 9), [4])
    buffer.add([episode(rng, k, 9) for k in range(1, 8)] + [first])
    other = EpisodeReplayBuffer(50, seed=5)
    other.set_state(pickle.loads(pickle.dumps(buffer.get_state())))
    for o in (buffer, other, copy.deepcopy(buffer)):
        o.add(copy.deepcopy(second))
        o.found = [(time_of(x, 0), time_of(x, 1), x.get_rewards(0)) for x in o.sample(20, n_step=(1, 4))]
        assert len(o) == 50 and o.found == buffer.found
    assert buffer.get_metrics() is not None


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing():
    rng, buffer = np.random.default_rng(0), EpisodeReplayBuffer(50, seed=0)
    with pytest.raises(ValueError, match=WORDS['it is empty']): buffer.sample(3)
    buffer.add(episode(rng, 0, 9))
    with refused('episodes', TypeError, expected='SingleAgentEpisodes'): buffer.add(MultiAgentEpisode())
    with refused('state', TypeError): buffer.add(episode(rng, 1, 9, nested=True))
    with refused('weight', got='2.0'): buffer.add(episode(rng, 1, 9), 2.)
    for option in (dict(batch_length_T=4), dict(include_infos=True), dict(include_extra_model_outputs=True)):
        with refused(next(iter(option))): buffer.sample(3, **option)
    with refused('capacity', got='0'): EpisodeReplayBuffer(0)
    with pytest.raises(TypeError, match=words('an unknown option', name='prefetch')): EpisodeReplayBuffer(10, prefetch=2)
    assert len(buffer) == 9 and buffer.n_episodes == 1 and not buffer.running
