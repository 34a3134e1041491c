"""From a softmax back to the product of queries and keys: what scales, caps, biases and hides its
scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from autopipe.ir.graph import DType, Node
from autopipe.passes.frontend.fusion.view import MOST_STEPS, View
from autopipe.passes.frontend.tables import HIDDEN

ABSORBING = {DType.FLOAT16: -6e4}
"""By type the number from which on a sum with scores is that number, as far as the type can tell;
else -1e9.
"""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mask:
    """A tensor added to scores, or that hides some: `factor` multiplies what is added; where `low`
    is a number it stands in the place of the scores that the truth values `name` hide, which are
    those that are not `shown`.
    """

    name: str
    scores: Shape
    """Of the scores at this place."""
    factor: float = 1.0
    low: float | None = None
    shown: bool = True


@dataclass(slots=True)
class Scores:
    """softcap · tanh(scale · Q Kᵀ / softcap) + masks, without a cap where it is 0."""

    query: str = ""
    transposed: str = ""
    scale: float = 1.0
    softcap: float = 0.0
    masks: list[Mask] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    """Of the scores, from the softmax to the product."""


def scores_of(view: View, name: str) -> Scores | None:
    """The scores that a softmax reads, None where they are no product."""
    found = Scores()
    for _ in range(MOST_STEPS):
        found.shapes.append(view.shape(name))
        node = _step(view, name, found)
        if node is None:
            return None
        if node.op == "MatMul":
            return _factored(view, node, found)
        if node.op == "Tanh":
            if found.softcap or found.scale <= 0:
                return None
            found.softcap = found.scale
            name = node.inputs[0]
        elif node.op in ("Add", "Where"):
            inner = _masked(view, node, found)
            if inner is None or found.softcap:
                return None
            name = inner
        else:
            name = node.inputs[0]
    return None


def _step(view: View, name: str, found: Scores) -> Node | None:
    """The node that makes scores, but for a scale that goes to what was found."""
    scale, name = view.scaled(view.uncast(name))
    node = view.made_by(
        view.uncast(name), "MatMul", "Add", "Where", "Tanh", "Reshape", "Squeeze", "Unsqueeze"
    )
    found.scale *= scale
    if node is None or (
        node.op not in ("MatMul", "Add", "Where", "Tanh") and not keeps_rows(view, node)
    ):
        return None
    return node


def keeps_rows(view: View, node: Node) -> bool:
    """True if a node gives what it reads other dimensions before the last two, three at least in
    all.
    """
    before = view.shape(node.inputs[0])
    after = view.shape(node.outputs[0])
    return len(before) > 2 and len(after) > 2 and before[-2:] == after[-2:]


def _factored(view: View, node: Node, found: Scores) -> Scores | None:
    (query_scale, found.query), (key_scale, found.transposed) = map(view.scaled, node.inputs)
    found.scale *= query_scale * key_scale
    query, keys, scores = (
        view.type_of(name) for name in (found.query, found.transposed, node.outputs[0])
    )
    lead = scores.shape[:-2]
    is_shared = len(lead) == 2 and keys.shape[:-2] == (lead[0], 1)
    fits = lead and query.shape[:-2] == lead and (keys.shape[:-2] == lead or is_shared)
    found.shapes.append(scores.shape)
    return (
        found
        if fits and all(_is_applied(view, mask, query.dtype) for mask in found.masks)
        else None
    )


def _is_applied(view: View, mask: Mask, dtype: DType) -> bool:
    type_ = view.type_of(mask.name)
    if mask.low is None:
        return type_.dtype is dtype and len(type_.shape) > 1
    if kind_of_mask(view, mask) != "other":
        return mask.low <= HIDDEN  # each row shows something, and what is hidden weighs nothing
    return mask.low <= ABSORBING.get(dtype, -1e9) and len(type_.shape) > 1


def _masked(view: View, node: Node, found: Scores) -> str | None:
    """The scores that a node adds to, or hides some of; the mask goes to what was found."""
    scores = ""
    result = view.shape(node.outputs[0])
    if node.op == "Add":
        first = [each for each in node.inputs if _reaches(view, each, 1)]
        scores = next(
            iter(first or [each for each in node.inputs if _reaches(view, each, MOST_STEPS)]), ""
        )
        other = node.inputs[node.inputs[0] == scores]
        found.masks.append(Mask(other, result, found.scale))
    else:
        for place in (1, 2):
            low = view.scalar(node.inputs[3 - place])
            if low is not None:
                scores = node.inputs[place]
                found.masks.append(
                    Mask(node.inputs[0], result, low=low * found.scale, shown=place == 1)
                )
    return scores if scores and view.shape(scores) == result else None


def _reaches(view: View, name: str, steps: int) -> bool:
    """True if a value is a product with a scale, a cap and masks, of at most `steps` nodes."""
    waiting = [name]
    for _ in range(steps):
        if not waiting:
            return False
        node = _step(view, waiting.pop(), Scores())
        if node is not None and node.op == "MatMul":
            return True
        if node is not None:
            waiting.extend(
                reversed(node.inputs if node.op == "Add" else node.inputs[node.op == "Where" :][:2])
            )
    return False


def kind_of_mask(view: View, mask: Mask) -> str:
    """`blank` for a mask that changes nothing, `causal` for one that shows each position itself and
    those before it, a number W for one that shows itself and the W before it, `some` for one that
    chooses and hides no row, else `other`.

    Layers share their masks, and a mask of a long sequence is large: each is looked at once.
    """
    key = mask.name if mask.low is None else f"{mask.name} {'shown' if mask.shown else 'hidden'}"
    if key not in view.masks:
        numbers = view.known.array(mask.name)
        if numbers is None:
            view.masks[key] = "other"
        elif mask.low is not None:
            shown = numbers == mask.shown
            view.masks[key] = "blank" if shown.all() else _band(shown)
            if view.masks[key] == "other" and bool(shown.any(-1).all()):
                view.masks[key] = "some"
        else:
            view.masks[key] = _added(numbers)
    return view.masks[key]


def _added(numbers: np.ndarray) -> str:
    if not numbers.any():
        return "blank"
    if numbers.dtype.kind not in "fV":
        return "other"
    numbers = numbers.astype(np.float32, copy=False)
    shown = numbers == 0
    return _band(shown) if bool(np.all(shown | (numbers <= HIDDEN))) else "other"


def _band(shown: np.ndarray) -> str:
    if shown.ndim < 2 or shown.shape[-1] != shown.shape[-2]:
        return "other"
    square = shown.reshape(-1, *shown.shape[-2:])
    window = int(square[0, -1].sum())
    ones = np.tri(shown.shape[-1], dtype=bool)
    if window < len(ones):
        ones &= ~np.tri(len(ones), k=-window, dtype=bool)
    if not (square == ones).all():
        return "other"
    return "causal" if window == len(ones) else str(window - 1)


def parts(shape: Shape, lead: tuple[int, int]) -> int | None:
    """How many of the dimensions of `shape` make up the first one of `lead`, where the others make
    up the second.
    """
    for count in range(len(shape) + 1):
        if (math.prod(shape[:count]), math.prod(shape[count:])) == lead:
            return count
    return None
