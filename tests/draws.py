"A sampler on its own, without a memory: filled, and asked for a batch"
import numpy as np


def filled(sampler, n, max_sz=None):
    sampler.attach(max_sz or n)
    sampler.add_run(0, n)
    return sampler


def batch(sampler, bs, rng):
    slots, probs, weights = np.empty(bs, np.int64), np.empty(bs, np.float32), np.empty(bs, np.float32)
    sampler.draw_into(slots, probs, weights, rng)
    return slots, probs, weights
