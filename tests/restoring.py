"""How a state goes from one memory into another that was made before, for the tests of what is restored: a form is a function of both and a
folder, `(saved, here, folder)`."""
import warnings
from collections.abc import Callable
from typing import Any

from fastrl_replay.pipes.replay import ExperienceReplay
from fastrl_replay.saving import CheckpointError
from refusals import about


def piped(memory): return ExperienceReplay([], bs=4, memory=memory)

def by_restore(a, b, folder):
    state, rows = a.saved()
    b.restore(state, rows.pieces())

def by_pipe(a, b, folder):
    piped(a).save(folder)
    piped(b).load(folder)


def made_by(filled: Callable[..., Any], options: dict[str, Any], n: int) -> Any:
    "A memory that `filled` makes with `n` rows and these options, of which the sampler is a function that makes one"
    sampler = options.get('sampler')
    return filled(n, **options | dict(sampler=sampler and sampler()))

def stays(move, saved, here, what, folder, now: Callable[[Any], Any], ignored: str | None = None) -> None:
    """Refused by name (`what`: as of `about`), with a memory that is `now` as it was; a pipe says in which file, and why. `ignored`: with what
    a warning that is not of this begins"""
    before = now(here)
    with warnings.catch_warnings():
        warnings.simplefilter('error')         # nothing is said before it is refused
        if ignored: warnings.filterwarnings('ignore', message=ignored)
        with about(what):
            try: move(saved, here, folder)
            except CheckpointError as e: raise e.__cause__ from None
    assert now(here)==before

def said(move, saved, here, folder) -> list[str]:
    "What warnings say while a state goes from one into the other"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        move(saved, here, folder)
    return [str(o.message) for o in found]
