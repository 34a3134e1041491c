"""In which order the stages of a chain go over devices, or over groups of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Place = TypeVar("Place")


def visited(places: Sequence[Place], chunks: int, wave: bool) -> tuple[Place, ...]:
    """The place of each stage of a chain with `chunks` stages a place.

    It goes over them again and again (Megatron's interleaving), or with `wave` back and forth (Hanayo's).
    """
    order: list[Place] = []
    for chunk in range(chunks):
        order += reversed(places) if wave and chunk % 2 else places
    return tuple(order)
