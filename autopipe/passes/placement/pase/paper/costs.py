"""Costs of a layer under the paper's model: operations on one device's part, and the layer's exchanges as operations.

Every cost is a function of the axes' degrees, vectorised over configurations. A multiply-add counts one operation;
forward and backward are counted together. Volumes are words. Where a degree does not divide what it cuts (the input of
a pooling), parts are fractions of an element, as in the authors' prototype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from autopipe.passes.placement.pase.paper.configurations import Degrees

Floats = npt.NDArray[np.float64]

WORD_OPERATIONS = 5000.0
"""r: operations in the time of a word of 8 bytes, for 10 TFLOP/s a device and links of 16 GB/s."""


def all_reduce(words: Floats, degree: Degrees, rate: float) -> Floats:
    """Operations in the time of a ring all-reduce of `words` on each of `degree` devices: 2 r (w / c)(c - 1)."""
    return 2.0 * rate * (words / degree) * (degree - 1)


class Cost(Protocol):
    """The cost of one kind of layer."""

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """Operations for each configuration, given the axes' extents; `rate` is r. [configurations]"""


@dataclass(frozen=True, slots=True)
class Product:
    """A (batched) matrix product over groups of axes, forward and both of its backward products.

    `pointwise` operations follow each element of the result; each counts forward, its derivative, and the chain rule's
    product.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    summed: tuple[int, ...]
    pointwise: int = 0

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """β (3 MNK + 3 q MN + AR(MN, c_k) + AR(MK, c_n) + AR(NK, c_m)), all of a device's part."""
        beta = _part(extents, degrees, self.batch)
        return beta * _product(
            (
                _part(extents, degrees, self.rows),
                _part(extents, degrees, self.columns),
                _part(extents, degrees, self.summed),
            ),
            (_parts(degrees, self.rows), _parts(degrees, self.columns), _parts(degrees, self.summed)),
            self.pointwise,
            rate,
        )


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Equal LSTM layers on axes (layer, step, batch, units out, units in): layers cut apart work as a wavefront."""

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """One product of 4n columns and 2k summed, three pointwise operations, and each step's output made an input."""
        layers, steps, batch, outs, ins = (extents[axis] / degrees[:, axis] for axis in range(5))
        rows = _parts(degrees, (1, 2))
        cell = _product(
            (steps * batch, 4 * outs, 2 * ins), (rows, degrees[:, 3], degrees[:, 4]), pointwise=3, rate=rate
        )
        common = np.where(degrees[:, 4] > degrees[:, 3], 0.0, batch * np.minimum(outs, ins))
        moved = np.maximum(batch * ins - common, 0.0)
        return layers * cell + rate * extents[0] * extents[1] * moved


@dataclass(frozen=True, slots=True)
class Softmax:
    """A softmax over `axis`."""

    axis: int

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """4 T + T D + 2 AR(R, c) + AR(R D, c), where T is the part, R its rows and D the full axis."""
        rows = _part(extents, degrees, _without(extents, self.axis))
        full, degree = extents[self.axis], degrees[:, self.axis]
        part = rows * (full / degree)
        sums = 2.0 * all_reduce(rows, degree, rate) + all_reduce(rows * full, degree, rate)
        return (4.0 + full) * part + sums


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """A softmax over `axis` and the cross-entropy of its result."""

    axis: int

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """4 T + 2 R, and 2 r R where classes are cut."""
        rows = _part(extents, degrees, _without(extents, self.axis))
        degree = degrees[:, self.axis]
        part = rows * (extents[self.axis] / degree)
        return 4.0 * part + 2.0 * rows + np.where(degree > 1, 2.0 * rate * rows, 0.0)


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over `axis`; the paper takes batch normalisation for one over the batch."""

    axis: int

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """16 T + 4 AR(T / t, c) + 4 AR(t, Π of the others' c), where t is the part of the axis."""
        others = _without(extents, self.axis)
        rows, along = _part(extents, degrees, others), extents[self.axis] / degrees[:, self.axis]
        statistics = all_reduce(rows, degrees[:, self.axis], rate)
        weights = all_reduce(along, _parts(degrees, others), rate)
        return 16.0 * rows * along + 4.0 * (statistics + weights)


@dataclass(frozen=True, slots=True)
class Pooling:
    """A window moved over the axes from `spatial` on; `source` are the operand's extents."""

    spatial: int
    source: tuple[int, ...]
    window: tuple[int, ...]

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """T + r · halo: a cut axis needs a window's width of elements more."""
        axes = tuple(range(len(extents)))
        part = _part(extents, degrees, axes)
        inner = _part(self.source, degrees, axes[self.spatial :])
        outer = np.ones(len(degrees))
        for axis, width in zip(axes[self.spatial :], self.window, strict=True):
            outer *= self.source[axis] / degrees[:, axis] + np.where(degrees[:, axis] > 1, width, 0)
        halo = (outer - inner) * _part(self.source, degrees, axes[: self.spatial])
        return part + rate * halo


@dataclass(frozen=True, slots=True)
class Elementwise:
    """One operation an element, and `pointwise` more."""

    pointwise: int = 0

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """(1 + q) T."""
        return (1.0 + self.pointwise) * _part(extents, degrees, tuple(range(len(extents))))


@dataclass(frozen=True, slots=True)
class Reduction:
    """A mean (or another reduction) over `axes`, of which the paper counts the exchange alone."""

    axes: tuple[int, ...]

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """AR(T, Π c of the axes)."""
        return all_reduce(_part(extents, degrees, tuple(range(len(extents)))), _parts(degrees, self.axes), rate)


@dataclass(frozen=True, slots=True)
class Movement:
    """Data put elsewhere, free in itself: concatenation, stacking, flattening."""

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """Nothing."""
        return np.zeros(len(degrees))


def _product(
    parts: tuple[Floats, Floats, Floats], cuts: tuple[Degrees, Degrees, Degrees], pointwise: int, rate: float
) -> Floats:
    (m, n, k), (cut_m, cut_n, cut_k) = parts, cuts
    work = 3.0 * m * n * k + 3.0 * pointwise * m * n
    return work + all_reduce(m * n, cut_k, rate) + all_reduce(m * k, cut_n, rate) + all_reduce(n * k, cut_m, rate)


def _part(extents: tuple[int, ...], degrees: Degrees, axes: tuple[int, ...]) -> Floats:
    """Elements along `axes` of one device's part."""
    return np.asarray(math.prod(extents[axis] for axis in axes) / _parts(degrees, axes))


def _parts(degrees: Degrees, axes: tuple[int, ...]) -> Degrees:
    """Parts along `axes` together."""
    return np.asarray(degrees[:, axes].prod(axis=1, dtype=np.int64))


def _without(extents: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(each for each in range(len(extents)) if each != axis)
