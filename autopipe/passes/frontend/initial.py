"""How to draw parameters that have no stored numbers: as the file says, else by the operator that reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Initializer
from autopipe.passes.frontend.uses import Uses

SPREAD = 0.02
"""Standard deviation of embeddings and of what no product reads (Radford et al. 2018, GPT, section 4.1)."""
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
"""Rows of a recurrent layer's weights for each hidden unit."""
PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum"})
SCALES = frozenset(
    {(f"{kind}Normalization", 1) for kind in ("Batch", "Instance", "Group", "Layer", "RMS")}
    | {("BatchNormalization", 4), ("Mul", 0), ("Mul", 1)}
)


def stated_initializers(metadata: Mapping[str, str]) -> dict[str, Initializer]:
    """The schemes in the file's metadata `autopipe.init`: name -> {"scheme": …, "std" or "bound": …}."""
    text = metadata.get("autopipe.init", "{}")
    try:
        entries = json.loads(text)
        return {str(name): _stated(entry) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError("its metadata 'autopipe.init' is not of the form {name: {scheme: ..., std: ...}}") from error


def _stated(entry: Mapping[str, object]) -> Initializer:
    scheme = entry["scheme"]
    if scheme not in ("normal", "uniform", "zeros", "ones"):
        raise ValueError(scheme)
    scale = float(str(entry.get("std", entry.get("bound", 0.0))))
    if not (math.isfinite(scale) and scale >= 0):
        raise ValueError(scale)
    return Initializer(str(scheme), scale)


def default_initializer(name: str, shape: tuple[int, ...], uses: Uses) -> Initializer:
    """The usual scheme for what reads `name`, by operator, operand and shape.

    Ones for scales, zeros for offsets; He et al. (2015) for convolutions; Glorot and Bengio (2010) for products,
    whichever of a matrix's extents is summed over; torch's [-1/√h, 1/√h] for recurrent layers of h hidden units.
    """
    slots = uses.slots(name)
    operators = {operator for operator, _ in slots}
    if recurrent := [(GATES[operator], slot) for operator, slot in slots if operator in GATES]:
        return _recurrent(shape, *min(recurrent))
    if len(shape) <= 1:
        return Initializer("ones") if slots & SCALES else Initializer("zeros")
    if operators & {"Conv", "ConvTranspose"}:
        return Initializer("normal", math.sqrt(2.0 / max(math.prod(shape[1:]), 1)))
    if operators & PRODUCTS and ("Gather", 0) not in slots:
        return Initializer("normal", math.sqrt(2.0 / max(shape[-2] + shape[-1], 1)))
    return Initializer("normal", SPREAD)


def _recurrent(shape: tuple[int, ...], gates: int, slot: int) -> Initializer:
    """Operands 1 to 3 are weights, recurrence and both biases; states and peepholes come after them."""
    if slot > 3 or len(shape) < 2:
        return Initializer("zeros")
    hidden = shape[1] // (gates * (2 if slot == 3 else 1))
    return Initializer("uniform", 1.0 / math.sqrt(max(hidden, 1)))
