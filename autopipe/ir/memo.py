"""Caches for the results of pure functions of large immutable values."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import ParamSpec, TypeVar

from autopipe.ir.errors import AutopipeError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)
MAX_CACHED_GRAPHS = 32
"""Number of graphs for which results are cached. More than one is needed, because a search plans
one model with several micro-batch sizes.
"""


def memoize(most: int) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator that caches the `most` most recently used results of a pure function.

    Arguments that are numbers, strings or tuples of strings are compared by value. Others are
    compared by identity, because comparing two graphs can take longer than the function. The cache
    keeps its arguments alive. Callers must not modify a result. Exceptions are not cached.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        known: OrderedDict[Hashable, tuple[object, Result]] = OrderedDict()

        @functools.wraps(function)
        def call_memoized(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            key = (
                *map(_hashable, args),
                *((name, _hashable(value)) for name, value in kwargs.items()),
            )
            found = known.get(key)
            if found is None:
                found = known[key] = ((args, kwargs), function(*args, **kwargs))
                while len(known) > most:
                    known.popitem(last=False)
            else:
                known.move_to_end(key)
            return found[1]

        return call_memoized

    return decorate


def memoize_all(function: Callable[[Key], Result]) -> Callable[[Key], Result]:
    """Return `function` with a cache for all of its results. An AutopipeError that it raises is
    cached as well, and raised again. The cache exists as long as the returned function, for example
    during one search.
    """
    known: dict[Key, Result | AutopipeError] = {}

    def call_memoized(key: Key) -> Result:
        if key not in known:
            try:
                known[key] = function(key)
            except AutopipeError as error:
                known[key] = error
        found = known[key]
        if isinstance(found, AutopipeError):
            raise found
        return found

    return call_memoized


def _hashable(value: object) -> Hashable:
    """Return a key for an argument: the argument if it is compared by value, otherwise its
    identity.
    """
    if isinstance(value, tuple) and all(isinstance(each, str) for each in value):
        return ("texts", *value)
    return value if isinstance(value, str | int | float) else (id(value),)
