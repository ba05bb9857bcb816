"""Which value a call refuses: `with refused('bs'): memory.sample(0)`. What the refusal says in words is compared in test_messages.py."""
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from words import WORDS, Pattern, words


def named(error: BaseException) -> str:
    """The value that an error is about: its `argument`, or, of one that the checks did not make, what stands before the first colon, without
    a value ("dedup='frames': …")"""
    argument = getattr(error, 'argument', None)
    if argument is not None: return argument
    before = str(error.args[0] if error.args else '').partition(':')[0]
    name, _, value = before.partition('=')
    return before if ' ' in value else name


@contextmanager
def refused(argument: str, error: type[BaseException] = ValueError, expected: str | None = None,
            got: str | None = None) -> Iterator[pytest.ExceptionInfo]:
    "What happens here is refused by an `error` about this argument; `expected`, `got`: its attributes, where they are told"
    with pytest.raises(error) as caught: yield caught
    told = caught.value
    assert named(told) == argument, f'expected a refusal of {argument!r}, got {type(told).__name__}: {told}'
    for name, wanted in dict(expected=expected, got=got).items():
        if wanted is not None: assert getattr(told, name, None) == wanted, f'{name}: {type(told).__name__}: {told}'


def about(what: str | tuple, error: type[BaseException] = ValueError) -> AbstractContextManager[pytest.ExceptionInfo]:
    "For tables: an error with these words (words.py, or a name of theirs), or a refusal of this argument, or of (argument, expected, got)"
    if isinstance(what, str) and what in WORDS: what = words(what)
    if isinstance(what, Pattern): return pytest.raises(error, match=what)
    argument, expected, got = what if isinstance(what, tuple) else (what, None, None)
    return refused(argument, error, expected, got)
