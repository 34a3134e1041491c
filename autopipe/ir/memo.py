"""Answers about large values that never change, kept for those that were asked about last."""

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
"""Graphs about which answers are kept: those of one model on micro-batches of different sizes."""


def remembered(most: int) -> Callable[[Callable[Arguments, Answer]], Callable[Arguments, Answer]]:
    """Makes a pure function keep its last `most` answers. A graph, a problem or a placement is
    known by identity, since comparing it would cost more than some answers do; numbers, texts and
    tuples of texts by value. What is kept keeps its arguments alive. Answers must not be changed by
    who gets them; errors are not kept.
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
    """Makes a function of one hashable value keep every answer, and every refusal, which it raises
    again. For one search: answers stay alive as long as what is returned.
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
