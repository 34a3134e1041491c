"""Recognition of tables that depend only on positions, for example masks and sinusoidal embeddings.
Such tables are not parameters.

Only the data of a tensor are examined. A tensor whose elements are all equal does not count as a
table, because new parameters may be all ones or zeros.
"""

from __future__ import annotations

import math

import numpy as np

HIDDEN = -1e4
"""Upper bound of values that an additive mask has at hidden positions. Softmax maps them to 0, in
half precision too.
"""
MIN_RANDOM_ELEMENTS = 16
"""Minimum number of elements of a matrix that can count as random. Fewer elements may all be
distinct in other matrices, too.
"""
MIN_SERIES = 4
"""Minimum number of positions of a regular series or of sampled sines that count as a table."""
MAX_POSITIONS = 512
"""Maximum number of positions of a table that are examined."""


def is_uniform(array: np.ndarray) -> bool:
    """True if all elements are equal, or if there are none."""
    if array.size == 0:
        return True
    flat = array.reshape(-1)
    return bool(flat[0] == flat[-1]) and bool((flat == flat[0]).all())


def is_random(array: np.ndarray) -> bool:
    """True if the elements of a matrix look random or trained: 90% or more of them are distinct.
    Two random matrices with equal data are therefore copies.
    """
    axes = sum(size > 1 for size in array.shape)
    return (
        axes > 1 and array.size >= MIN_RANDOM_ELEMENTS and len(np.unique(array)) >= 0.9 * array.size
    )


def kind_of_table(array: np.ndarray, named: bool) -> str:
    """Return what kind of table a tensor is, for messages; "" if it may be a weight.

    `named` is True if the tensor has a name of its module. A regular series then counts as a
    weight, because some modules are initialised like this, for example RWKV's decays.
    """
    if array.size < 2 or is_uniform(array):
        return ""
    numbers = np.asarray(array[:MAX_POSITIONS] if array.ndim == 1 else array, dtype=np.float64)
    if np.isin(numbers[~(numbers <= HIDDEN)], (0.0, 1.0)).all():
        return "a mask"
    if bool((numbers == np.round(numbers)).all()):
        return "whole numbers, such as positions"
    table = _reshape_to_positions(numbers)
    if table is None:
        return ""
    if table.shape[1] > 1:
        if are_sampled_sines(table) or (not named and _begins_like_sinusoids(table)):
            return "a table of sines and cosines"
    elif not named and _is_series(table[:, 0]):
        return "a series of positions or frequencies"
    return ""


def are_sampled_sines(table: np.ndarray) -> bool:
    """True if each column of `table` [positions, columns] is a sampled sine.

    A column x is one if x[i−1] + x[i+1] = c · x[i] for all i, with one constant c per column and
    |c| ≤ 2. At least one column must change visibly between positions.
    """
    if len(table) < MIN_SERIES:
        return False
    middle = table[1:-1]
    around = table[:-2] + table[2:]
    square = (middle * middle).sum(axis=0)
    factor = np.divide(
        (middle * around).sum(axis=0), square, out=np.full(len(square), 2.0), where=square > 0
    )
    if not bool((np.abs(factor) <= 2 + 1e-3).all()):
        return False
    size = np.abs(table).max(axis=0)
    steps = np.abs(np.diff(table, axis=0)).max(axis=0)
    # Columns of a low frequency are nearly constant, but constant columns also occur in tensors
    # that are not sampled sines. At least one column must therefore change clearly between adjacent
    # positions.
    is_changing = steps > 0.05 * size
    close = np.abs(around - factor * middle).max(axis=0) <= 2e-3 * size + 1e-12
    return bool(close.all()) and bool(is_changing.any())


def _reshape_to_positions(numbers: np.ndarray) -> np.ndarray | None:
    """Return the data in the shape [positions, columns], with at most `MAX_POSITIONS` positions.
    Returns None if the number of dimensions of size above 1 is neither 1 nor 2.
    """
    shape = [size for size in numbers.shape if size > 1]
    if not 1 <= len(shape) <= 2:
        return None
    return numbers.reshape(shape[0], -1)[:MAX_POSITIONS]


def _begins_like_sinusoids(table: np.ndarray) -> bool:
    """True if the columns of `table` [positions, columns] may be sines or cosines that begin at
    position 0: the first row has only ones or only zeros, and no magnitude is above 1.
    """
    first = table[0]
    begins = bool((first == 1).all()) or bool((first == 0).all())
    return begins and len(table) >= MIN_SERIES and float(np.abs(table).max()) <= 1 + 1e-6


def _is_series(numbers: np.ndarray) -> bool:
    """True if a vector is an arithmetic or geometric series: the differences, or the ratios, of
    consecutive elements are equal up to rounding errors.
    """
    if len(numbers) < MIN_SERIES:
        return False
    steps = np.diff(numbers)
    size = float(np.abs(steps).max())
    if math.isfinite(size) and float(np.abs(steps - steps[0]).max()) <= 1e-5 * size:
        return True
    if not (numbers > 0).all():
        return False
    factors = np.diff(np.log(numbers))
    return float(np.abs(factors - factors[0]).max()) <= 1e-5 * float(np.abs(factors).max())
