"""Caches for results of pure functions of large immutable values."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import ParamSpec, TypeVar

from autopipe.ir.errors import AutopipeError

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Key = TypeVar("Key", bound=Hashable)
GRAPHS = 32
"""Number of graphs whose results are cached: one model at different micro-batch sizes has
several.
"""


def remembered(most: int) -> Callable[[Callable[Arguments, Answer]], Callable[Arguments, Answer]]:
    """Return a decorator that caches the `most` most recently used results of a pure function.

    Numbers, strings and tuples of strings are compared by value, all other arguments by identity,
    because comparing a graph can take longer than the function. The cache keeps arguments alive.
    Callers must not modify a result. Exceptions are not cached.
    """

    def remembering(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        known: OrderedDict[Hashable, tuple[object, Answer]] = OrderedDict()

        @functools.wraps(function)
        def answer(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            key = (*map(_named, args), *((name, _named(value)) for name, value in kwargs.items()))
            found = known.get(key)
            if found is None:
                found = known[key] = ((args, kwargs), function(*args, **kwargs))
                while len(known) > most:
                    known.popitem(last=False)
            else:
                known.move_to_end(key)
            return found[1]

        return answer

    return remembering


def once_each(function: Callable[[Key], Answer]) -> Callable[[Key], Answer]:
    """Return `function` with a cache of all results. An AutopipeError is cached too, and raised
    again. The cache lives as long as the returned function, for example for one search.
    """
    known: dict[Key, Answer | AutopipeError] = {}

    def answer(key: Key) -> Answer:
        if key not in known:
            try:
                known[key] = function(key)
            except AutopipeError as error:
                known[key] = error
        found = known[key]
        if isinstance(found, AutopipeError):
            raise found
        return found

    return answer


def _named(value: object) -> Hashable:
    if isinstance(value, tuple) and all(isinstance(each, str) for each in value):
        return ("texts", *value)
    return value if isinstance(value, str | int | float) else (id(value),)
