"""Every store of the kernels, told as it happens: imported before they are, in a process in which Numba compiles nothing."""
import numpy as np

from fastrl_replay import kernels, raw


class Watched(np.ndarray):
    "An array that tells of every store"
    watch = None
    def __setitem__(self, k, v):
        super().__setitem__(k, v)
        if Watched.watch: Watched.watch()


def telling(store):
    "A function that stores, and tells"
    def tells(*args):
        store(*args)
        if Watched.watch: Watched.watch()
    return tells


for name in ('store8', 'store16', 'store32', 'store64', 'copy'): setattr(raw, name, telling(getattr(raw, name)))
plain = kernels.array_at
kernels.array_at = lambda address, n: plain(int(address), int(n)).view(Watched)       # what the kernels of storage are made of
