"""Tables that a model computes from positions alone, known by their numbers: they are no
parameters.

A trained tensor never looks like one; a fresh one may be all ones or zeros, which therefore says
nothing by itself.
"""

from __future__ import annotations

import math

import numpy as np

HIDDEN = -1e4
"""Below this an added mask hides a position from a softmax, in half precision too."""
SURE = 16
"""Numbers of which most are different only where they were drawn."""
LEAST = 4
"""Places from which a regular series is no accident."""
STEEPEST = 512
"""Places of a table that are looked at: enough to tell it from numbers that were drawn."""


def is_uniform(array: np.ndarray) -> bool:
    if array.size == 0:
        return True
    flat = array.reshape(-1)
    return bool(flat[0] == flat[-1]) and bool((flat == flat[0]).all())


def is_drawn(array: np.ndarray) -> bool:
    """True if a matrix's numbers were drawn at random or trained: hardly any stands twice, so that
    no two tensors have the same by accident.
    """
    wide = sum(extent > 1 for extent in array.shape)
    return wide > 1 and array.size >= SURE and len(np.unique(array)) >= 0.9 * array.size


def table_of(array: np.ndarray, named: bool) -> str:
    """Kind of table that the numbers are, "" where they may be a weight's.

    A tensor that the module names (`named`) may hold a series: modules begin so (RWKV's decays).
    """
    if array.size < 2 or is_uniform(array):
        return ""
    numbers = np.asarray(array[:STEEPEST] if array.ndim == 1 else array, dtype=np.float64)
    if np.isin(numbers[~(numbers <= HIDDEN)], (0.0, 1.0)).all():
        return "a mask"
    if bool((numbers == np.round(numbers)).all()):
        return "whole numbers, such as positions"
    places = _by_place(numbers)
    if places is None:
        return ""
    if places.shape[1] > 1:
        if are_waves(places) or (not named and _begins_as_angles(places)):
            return "a table of sines and cosines"
    elif not named and _is_series(places[:, 0]):
        return "a series of positions or frequencies"
    return ""


def are_waves(places: np.ndarray) -> bool:
    """True if each column is a sampled sine: x[i-1] + x[i+1] is the same multiple of x[i]
    everywhere.
    """
    if len(places) < LEAST:
        return False
    middle = places[1:-1]
    around = places[:-2] + places[2:]
    square = (middle * middle).sum(axis=0)
    factor = np.divide(
        (middle * around).sum(axis=0), square, out=np.full(len(square), 2.0), where=square > 0
    )
    if not bool((np.abs(factor) <= 2 + 1e-3).all()):
        return False
    size = np.abs(places).max(axis=0)
    steps = np.abs(np.diff(places, axis=0)).max(axis=0)
    # A column that hardly moves says nothing; some must turn visibly.
    turning = steps > 0.05 * size
    close = np.abs(around - factor * middle).max(axis=0) <= 2e-3 * size + 1e-12
    return bool(close.all()) and bool(turning.any())


def _by_place(numbers: np.ndarray) -> np.ndarray | None:
    """The numbers as [places, columns] where only the last two axes, or one, are more than 1
    wide.
    """
    shape = [extent for extent in numbers.shape if extent > 1]
    if not 1 <= len(shape) <= 2:
        return None
    places = numbers.reshape(shape[0], -1)
    return places[:STEEPEST]


def _begins_as_angles(places: np.ndarray) -> bool:
    """True if the numbers are sines or cosines that begin at position 0."""
    first = places[0]
    begins = bool((first == 1).all()) or bool((first == 0).all())
    return begins and len(places) >= LEAST and float(np.abs(places).max()) <= 1 + 1e-6


def _is_series(numbers: np.ndarray) -> bool:
    """True if numbers grow by the same step or by the same factor."""
    if len(numbers) < LEAST:
        return False
    steps = np.diff(numbers)
    size = float(np.abs(steps).max())
    if math.isfinite(size) and float(np.abs(steps - steps[0]).max()) <= 1e-5 * size:
        return True
    if not (numbers > 0).all():
        return False
    factors = np.diff(np.log(numbers))
    return float(np.abs(factors - factors[0]).max()) <= 1e-5 * float(np.abs(factors).max())
