"""One check that every pipe, memory and sampler passes: run, save, run on; load into a fresh one, run on; the same to the bit.

    check_resume(make, run)

`make()` gives a new object, always the same; `run(obj, k)` does k things with it and returns what came of them, in any nesting of
tensors, arrays, batches, steps and plain values. The state travels as `state_dict()` does in earnest: through `torch.save` and
`torch.load(weights_only=True)`, or, where it must be plain data of fixed size, through JSON."""
import io
import json

import numpy as np
import torch

from fastrl_replay.batch import Batch


def through_torch(state):
    "What is left of a state after `torch.save` and `torch.load(weights_only=True)`"
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_json(state): return json.loads(json.dumps(state))


def seen(v):
    "Anything as nested lists of plain values that == compares to the bit"
    if isinstance(v, Batch): return [v.step_type.__name__, *map(seen, (v.astuple(), v.ids, v.probs, v.weights))]
    if isinstance(v, dict): return {k: seen(o) for k, o in v.items()}
    if isinstance(v, tuple | list): return [seen(o) for o in v]
    if isinstance(v, torch.Tensor): return seen(v.view(torch.int16).numpy()) if v.dtype==torch.bfloat16 else seen(v.detach().numpy())
    if isinstance(v, np.ndarray | np.generic): return [v.dtype.str, list(v.shape), v.tobytes()]
    return float.hex(v) if isinstance(v, float) else v


def check_resume(make, run, steps=(0, 1, 9), after=8, through=through_torch, save=lambda o: o.state_dict(), load=lambda o, s: o.load_state_dict(s), said=lambda s: s):
    """For each number of steps before the save: what follows is the same in the original, undisturbed, and in a fresh object that loaded.

    `said(state)`: what a state says, where two states that say the same may differ."""
    for k in steps:
        undisturbed, original = make(), make()
        assert seen(run(undisturbed, k))==seen(run(original, k)), 'two new ones differ: `make` and `run` must always do the same'
        state = through(save(original))
        want = seen(run(undisturbed, after))
        assert seen(run(original, after))==want, f'saving after {k} steps changed what followed'
        fresh = make()
        load(fresh, state)
        once, again = through(save(fresh)), make()
        load(again, once)                          # links to what is gone may go at the first load; then nothing changes any more
        assert seen(said(through(save(again))))==seen(said(once)), f'the state that was loaded after {k} steps is saved as another one'
        assert seen(run(fresh, after))==want, f'what followed the load after {k} steps is another thing'
        used = make()
        run(used, k + 3)
        load(used, state)                          # what was there before is gone
        assert seen(run(used, after))==want, f'a used one that loaded goes on otherwise ({k} steps)'


def check_constant_size(make, run, save=lambda o: o.state_dict(), factor=1.5):
    "The state is plain data (JSON) and doesn't grow with the steps"
    sizes = []
    for k in (20, 200):
        obj = make()
        run(obj, k)
        sizes.append(len(json.dumps(save(obj))))
    assert sizes[1] <= factor*sizes[0], f'the state grew from {sizes[0]} to {sizes[1]} characters'
