"""Answers about large values that never change, kept for those that were asked about last."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import ParamSpec, TypeVar

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")

GRAPHS = 32
"""Graphs about which answers are kept: those of one model on micro-batches of different sizes."""


def remembered(most: int) -> Callable[[Callable[Asked, Answer]], Callable[Asked, Answer]]:
    """Makes a pure function keep its last `most` answers.

    A graph, a problem or a placement is known by identity, since comparing it would cost more than some answers do;
    numbers, texts and tuples of texts by value. What is kept keeps its arguments alive. Answers must not be changed by
    who gets them; errors are not kept.
    """

    def remembering(function: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
        known: OrderedDict[Hashable, tuple[object, Answer]] = OrderedDict()

        @functools.wraps(function)
        def answer(*args: Asked.args, **kwargs: Asked.kwargs) -> Answer:
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


def _named(value: object) -> Hashable:
    if isinstance(value, tuple) and all(isinstance(each, str) for each in value):
        return ("texts", *value)
    return value if isinstance(value, str | int | float) else (id(value),)
