"""Matching of attention scores: from the operand of the softmax back to the product of queries and
keys, through scales, a cap by tanh, and masks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from autopipe.ir.graph import DType, Node
from autopipe.passes.frontend.fusion.view import MAX_STEPS, View
from autopipe.passes.frontend.tables import HIDDEN

ABSORBING = {DType.FLOAT16: -6e4}
"""By element type, the negative number nearest to 0 whose sum with usual scores rounds to the
number itself; −1e9 for other types.
"""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask of attention scores. If `low` is None, `factor` · `name` is added to the scores;
    otherwise `low` replaces the scores that the boolean tensor `name` hides.
    """

    name: str
    scores: Shape
    """Shape of the scores to which the mask applies."""
    factor: float = 1.0
    low: float | None = None
    shown: bool = True
    """The element of the boolean tensor for scores that are not replaced."""


@dataclass(slots=True)
class Scores:
    """The scores softcap · tanh(scale · Q Kᵀ / softcap) + masks. A `softcap` of 0 means that there
    is no tanh. `query` names Q, `transposed` names Kᵀ.
    """

    query: str = ""
    transposed: str = ""
    scale: float = 1.0
    softcap: float = 0.0
    masks: list[Mask] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    """Shapes of the scores, in order from the softmax back to the product."""


def match_scores(view: View, name: str) -> Scores | None:
    """Match attention scores whose last value, the operand of a softmax, is `name`. Return None if
    it is not computed from a product Q Kᵀ in a form that matches.
    """
    found = Scores()
    for _ in range(MAX_STEPS):
        found.shapes.append(view.shape(name))
        node = _find_score_node(view, name, found)
        if node is None:
            return None
        if node.op == "MatMul":
            return _match_factors(view, node, found)
        if node.op == "Tanh":
            if found.softcap or found.scale <= 0:
                return None
            found.softcap = found.scale
            name = node.inputs[0]
        elif node.op in ("Add", "Where"):
            inner = _match_mask(view, node, found)
            if inner is None or found.softcap:
                return None
            name = inner
        else:
            name = node.inputs[0]
    return None


def _find_score_node(view: View, name: str, found: Scores) -> Node | None:
    """Return the node that writes the scores `name`, before casts and a scale; the scale is
    multiplied into `found.scale`. None if this node's operator cannot be a part of the pattern.
    """
    scale, name = view.split_scale(view.skip_casts(name))
    node = view.producer_of(
        view.skip_casts(name),
        "MatMul",
        "Add",
        "Where",
        "Tanh",
        "Reshape",
        "Squeeze",
        "Unsqueeze",
    )
    found.scale *= scale
    if node is None or (
        node.op not in ("MatMul", "Add", "Where", "Tanh")
        and not changes_only_leading_axes(view, node)
    ):
        return None
    return node


def changes_only_leading_axes(view: View, node: Node) -> bool:
    """True if `node` reshapes only dimensions before the last two. Its operand and its result have
    at least three dimensions.
    """
    before = view.shape(node.inputs[0])
    after = view.shape(node.outputs[0])
    return len(before) > 2 and len(after) > 2 and before[-2:] == after[-2:]


def _match_factors(view: View, node: Node, found: Scores) -> Scores | None:
    """Add the factors Q and Kᵀ of the product `node` to `found` and return it; None if shapes or
    masks do not fit.
    """
    (query_scale, found.query), (key_scale, found.transposed) = map(view.split_scale, node.inputs)
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
        if fits and all(_is_supported(view, mask, query.dtype) for mask in found.masks)
        else None
    )


def _is_supported(view: View, mask: Mask, dtype: DType) -> bool:
    """True if a mask can become an operand of Attention on scores of the type `dtype`: an added
    mask has that type, and a mask that replaces scores has a `low` so small that hidden keys get no
    weight.
    """
    type_ = view.type_of(mask.name)
    if mask.low is None:
        return type_.dtype is dtype and len(type_.shape) > 1
    if kind_of_mask(view, mask) != "other":
        # In a mask of a known kind, each query sees at least one key. A value of at most `HIDDEN`
        # therefore suffices for weight 0 at hidden keys.
        return mask.low <= HIDDEN
    return mask.low <= ABSORBING.get(dtype, -1e9) and len(type_.shape) > 1


def _match_mask(view: View, node: Node, found: Scores) -> str | None:
    """Add the mask that the Add or Where `node` applies to `found.masks`. Return the name of the
    scores to which the mask applies; None if no operand is recognised as scores of the result's
    shape.
    """
    scores = ""
    result = view.shape(node.outputs[0])
    if node.op == "Add":
        first = [each for each in node.inputs if _leads_to_product(view, each, 1)]
        scores = next(
            iter(
                first or [each for each in node.inputs if _leads_to_product(view, each, MAX_STEPS)]
            ),
            "",
        )
        other = node.inputs[node.inputs[0] == scores]
        found.masks.append(Mask(other, result, found.scale))
    else:
        for slot in (1, 2):
            low = view.scalar(node.inputs[3 - slot])
            if low is not None:
                scores = node.inputs[slot]
                found.masks.append(
                    Mask(node.inputs[0], result, low=low * found.scale, shown=slot == 1)
                )
    return scores if scores and view.shape(scores) == result else None


def _leads_to_product(view: View, name: str, steps: int) -> bool:
    """True if a MatMul is found within `steps` nodes before the value `name`, through operators
    that may stand between the product and the softmax of attention.
    """
    waiting = [name]
    for _ in range(steps):
        if not waiting:
            return False
        node = _find_score_node(view, waiting.pop(), Scores())
        if node is not None and node.op == "MatMul":
            return True
        if node is not None:
            waiting.extend(
                reversed(node.inputs if node.op == "Add" else node.inputs[node.op == "Where" :][:2])
            )
    return False


def kind_of_mask(view: View, mask: Mask) -> str:
    """Return the kind of a mask. Results are cached in `view.masks`, because layers share masks.
    The kinds are:

    - `blank`: it changes no score.
    - `causal`: each query attends to its own position and all earlier ones.
    - a decimal number W: each query attends to its own position and the W before it.
    - `some`: it selects scores, and each query has at least one visible key.
    - `other`: any other mask, and each mask whose data are not known.
    """
    key = mask.name if mask.low is None else f"{mask.name} {'shown' if mask.shown else 'hidden'}"
    if key not in view.masks:
        numbers = view.array(mask.name)
        if numbers is None:
            view.masks[key] = "other"
        elif mask.low is not None:
            shown = numbers == mask.shown
            view.masks[key] = "blank" if shown.all() else _kind_of_band(shown)
            if view.masks[key] == "other" and bool(shown.any(-1).all()):
                view.masks[key] = "some"
        else:
            view.masks[key] = _kind_of_added(numbers)
    return view.masks[key]


def _kind_of_added(numbers: np.ndarray) -> str:
    """Return the kind, as `kind_of_mask` names it, of a mask with these `numbers`, which are added
    to the scores: `blank`, `causal`, the number of earlier visible positions of a causal sliding
    window, or `other`.
    """
    if not numbers.any():
        return "blank"
    if numbers.dtype.kind not in "fV":
        return "other"
    numbers = numbers.astype(np.float32, copy=False)
    shown = numbers == 0
    return _kind_of_band(shown) if bool(np.all(shown | (numbers <= HIDDEN))) else "other"


def _kind_of_band(shown: np.ndarray) -> str:
    """Return the kind of a boolean mask [..., queries, keys] that is true for visible keys:
    `causal`, the number of earlier visible positions of a causal sliding window, or `other`.
    """
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


def count_sizes_of_samples(shape: Shape, lead: tuple[int, int]) -> int | None:
    """Return how many leading sizes of `shape` belong to samples: their product is `lead[0]`, the
    number of samples, and the product of the other sizes is `lead[1]`, the number of heads. None if
    no count satisfies both.
    """
    for count in range(len(shape) + 1):
        if (math.prod(shape[:count]), math.prod(shape[count:])) == lead:
            return count
    return None
