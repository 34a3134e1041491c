"""How to draw parameters that have no stored numbers: as the file says, else by the operator that reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Initializer
from autopipe.passes.frontend.parameters import Uses

SPREAD = 0.02
"""Standard deviation for matrices and embeddings (Radford et al. 2018, GPT, section 4.1)."""
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
    """The usual scheme for what reads `name`: ones for scales, zeros for offsets, He et al. (2015) for convolutions."""
    slots = uses.slots(name)
    operators = {operator for operator, _ in slots}
    if len(shape) <= 1:
        return Initializer("ones") if slots & SCALES else Initializer("zeros")
    if operators & {"Conv", "ConvTranspose"}:
        return Initializer("normal", math.sqrt(2.0 / max(math.prod(shape[1:]), 1)))
    return Initializer("normal", SPREAD)
