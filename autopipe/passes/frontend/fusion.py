"""Operators that a graph spells out, put back together: one pass from the front, linear in the number of nodes.

Each rule looks at one node and the few that lead to it; what a fused operator replaces is dropped where nothing else
reads it. Attention is softmax(scale · Q Kᵀ + mask) V (Vaswani et al. 2017, section 3.2.1) as both of torch's exporters
write it: scale on the scores or its root on each side, NaN rows of a fully masked softmax replaced by zeros, key-value
heads repeated for the query heads that share them (Ainslie et al. 2023). LayerNormalization and RMSNormalization follow
Ba et al. (2016) and Zhang & Sennrich (2019), Gelu x · ½ · (1 + erf(x / √2)) and its approximation by tanh (Hendrycks &
Gimpel 2016, section 2).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from autopipe.ir.graph import Attribute, Graph, Node, Value
from autopipe.passes.frontend.cleanup import without_repeats, without_unread
from autopipe.passes.frontend.inference import ConstantFolder
from autopipe.passes.frontend.tables import HIDDEN

MOST_STEPS = 32
"""Multiplications that are looked back through: a chain of thousands would take the square of its length."""
SOFTMAX_SINCE = 13
"""The opset from which Softmax's default axis is the last."""
ROOT_HALF = math.sqrt(0.5)
TANH_SCALE = math.sqrt(2 / math.pi)
CUBIC = 0.044715


class View:
    """Graph as patterns see it: nodes before the current one are already rewritten."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.known = graph, ConstantFolder(graph)
        self.readers = Counter((*(name for node in graph.nodes for name in node.inputs if name), *graph.outputs))
        self.writers: dict[str, Node] = {}
        self.made: dict[str, Value] = {}
        """Values that rules have added to those of `graph`."""
        self.masks: dict[str, str] = {}
        """Positions hidden by the masks seen so far: see `_mask_kind`."""

    def type_of(self, name: str) -> Value:
        return self.made.get(name) or self.graph.type_of(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.type_of(name).shape

    def made_by(self, name: str, *operators: str) -> Node | None:
        """The node that writes `name` as its first result, if it is one of ONNX's own `operators`."""
        node = self.writers.get(name)
        if node is None or node.domain or node.op not in operators or node.outputs[0] != name:
            return None
        return node

    def path(self, name: str, *operators: str) -> tuple[Node, ...]:
        """The nodes that make `name`, each of the first operand of the one before; () unless they are `operators`."""
        found: list[Node] = []
        for operator in operators:
            node = self.made_by(name, *operator.split("|"))
            if node is None:
                return ()
            found.append(node)
            name = node.inputs[0]
        return tuple(found)

    def scalar(self, name: str) -> float | None:
        """The number of a constant of one element."""
        constant = self.graph.constant(name)
        if constant is None or constant.array.size != 1 or constant.array.dtype.kind in "bc":
            return None
        return float(constant.array.reshape(-1)[0])

    def uncast(self, name: str) -> str:
        """The value before a cast between floating-point types."""
        node = self.made_by(name, "Cast")
        if node is None or not all(self.type_of(each).dtype.is_floating for each in (node.inputs[0], name)):
            return name
        return node.inputs[0]

    def scaled(self, name: str) -> tuple[float, str]:
        """A value as coefficient times another, multiplications and divisions by one number taken off."""
        coefficient = 1.0
        for _ in range(MOST_STEPS):
            node = self.made_by(name, "Mul", "Div")
            if node is None:
                break
            left, right = node.inputs
            number = self.scalar(right)
            if number is None and node.op == "Mul":
                left, number = right, self.scalar(left)
            if number is None or number == 0 or self.shape(left) != self.shape(name):
                break
            coefficient *= number if node.op == "Mul" else 1 / number
            name = left
        return coefficient, name

    def product(self, name: str) -> tuple[float, tuple[str, ...]]:
        """A value as coefficient · f₁ · f₂ ⋯, constants of one element gathered in the coefficient.

        The factors, sorted, are values read more than once or made otherwise.
        """
        coefficient, factors, waiting = 1.0, [], [name]
        steps = 0
        while waiting:
            top, steps = waiting.pop(), steps + 1
            number = self.scalar(top)
            inside = steps <= MOST_STEPS and (top == name or self.readers[top] == 1)
            node = self.made_by(top, "Mul", "Div", "Pow") if inside else None
            operand = self.scalar(node.inputs[1]) if node is not None else None
            if number is not None:
                coefficient *= number
            elif node is not None and node.op == "Mul":
                waiting.extend(node.inputs)
            elif node is not None and node.op == "Div" and operand:
                coefficient /= operand
                waiting.append(node.inputs[0])
            elif node is not None and node.op == "Pow" and operand in (2.0, 3.0):
                factors.extend([node.inputs[0]] * int(operand))
            else:
                factors.append(top)
        return coefficient, tuple(sorted(factors))

    def sum_with(self, name: str) -> tuple[str, float]:
        """A value as another plus a number; ("", NaN) where it is no such sum."""
        node = self.made_by(name, "Add")
        for value, other in (node.inputs, node.inputs[::-1]) if node is not None else ():
            number = self.scalar(other)
            if number is not None:
                return value, number
        return "", math.nan


def near(number: float, expected: float) -> bool:
    """True if a constant is the one meant, as far as a file in half precision can tell."""
    return math.isclose(number, expected, rel_tol=1e-3)


def attention(view: View, node: Node) -> tuple[Node, ...] | None:
    """A product of softmaxed scores and values, four-dimensional: samples, heads, positions, features."""
    weights, value = node.inputs
    shapes = [view.shape(name) for name in (weights, value, node.outputs[0])]
    if any(len(shape) != 4 for shape in shapes) or shapes[0][:2] != shapes[1][:2]:
        return None
    softmax = view.made_by(_unguarded(view, view.uncast(weights)), "Softmax")
    if softmax is None or softmax.integer("axis", -1 if view.graph.opset >= SOFTMAX_SINCE else 1) not in (-1, 3):
        return None
    scores = _scores(view, view.uncast(softmax.inputs[0]))
    if scores is None or view.type_of(scores[0]).dtype is not view.type_of(value).dtype:
        return None
    query, transposed, product_scale, added, causal = scores
    key, key_scale, turn = _keys(view, transposed, value, node)
    shared = [None if turn else _shared_head(view, name) for name in (key, value)]
    if shared[0] is not None and shared[1] is not None:
        key, value = shared[0], shared[1]
    mask, sums = _summed(view, added, node)
    attributes: list[tuple[str, Attribute]] = [("scale", product_scale * key_scale)]
    if causal:
        attributes.append(("is_causal", 1))
    operands = (query, key, value, *([mask] if mask else []))
    return (*turn, *sums, Node(node.name, "Attention", operands, node.outputs, tuple(sorted(attributes))))


def _keys(view: View, transposed: str, value: str, node: Node) -> tuple[str, float, tuple[Node, ...]]:
    """K with the number it is multiplied by, and the node that makes it where only Kᵀ is at hand."""
    found = _key(view, transposed)
    if found is not None:
        scale, key = view.scaled(found)
        shared = _shared_head(view, key) is not None and _shared_head(view, value) is not None
        if shared or len(view.shape(key)) == 4:
            return key, scale, ()
    type_, key = view.type_of(transposed), f"{node.outputs[0]}_key"
    samples, heads, features, positions = type_.shape
    view.made[key] = Value(key, type_.dtype, (samples, heads, positions, features))
    order = (0, 1, 3, 2)
    transpose = view.made_by(transposed, "Transpose")
    if transpose is not None:
        transposed, perm = transpose.inputs[0], transpose.integers("perm", (3, 2, 1, 0))
        order = (perm[0], perm[1], perm[3], perm[2])
    return key, 1.0, (Node(f"{node.name}/key", "Transpose", (transposed,), (key,), (("perm", order),)),)


def _summed(view: View, masks: tuple[str, ...], node: Node) -> tuple[str, list[Node]]:
    """The sum of several masks, "" where there are none, and the nodes that add them up."""
    total, nodes = next(iter(masks), ""), []
    for number, mask in enumerate(masks[1:]):
        name = f"{node.outputs[0]}_mask_{number}"
        shape = np.broadcast_shapes(view.shape(total), view.shape(mask))
        view.made[name] = Value(name, view.type_of(total).dtype, shape)
        nodes.append(Node(f"{node.name}/mask_{number}", "Add", (total, mask), (name,)))
        total = name
    return total, nodes


def _unguarded(view: View, name: str) -> str:
    """The softmax within Where(IsNaN(softmax), 0, softmax)."""
    node = view.made_by(name, "Where")
    test = view.made_by(node.inputs[0], "IsNaN") if node is not None else None
    if node is None or test is None or test.inputs[0] != node.inputs[2] or view.scalar(node.inputs[1]) != 0.0:
        return name
    return node.inputs[2]


def _scores(view: View, name: str) -> tuple[str, str, float, tuple[str, ...], bool] | None:
    """Q, Kᵀ, scale, masks and whether they are causal of scale · Q Kᵀ + masks before a softmax.

    Masks are recognised where their numbers are known; none are left where they are causal.
    """
    masks: list[str] = []
    chosen = _chosen(view, name)
    name = chosen or name
    while (product := _product(view, name)) is None:
        node = view.made_by(name, "Add")
        if node is None:
            return None
        left, right = (view.uncast(each) for each in node.inputs)
        is_left = _product(view, left) is not None or view.made_by(left, "Add") is not None
        name = left if is_left else right
        masks.append(node.inputs[1] if is_left else node.inputs[0])
    scale, operands = product
    (query_scale, query), (key_scale, key) = map(view.scaled, operands)
    types = [view.type_of(each) for each in (query, key)]
    if any(len(each.shape) != 4 for each in types) or types[0].shape[:2] != types[1].shape[:2]:
        return None
    added = [view.type_of(mask) for mask in masks]
    if any(mask.dtype is not types[0].dtype or len(mask.shape) < 2 for mask in added):
        return None
    telling = [mask for mask in masks if _mask_kind(view, mask) != "blank"]
    if chosen and telling:
        return None
    causal = bool(chosen) or (len(telling) == 1 and _mask_kind(view, telling[0]) == "causal")
    return query, key, scale * query_scale * key_scale, () if causal else tuple(telling), causal


def _chosen(view: View, name: str) -> str | None:
    """The scores within Where(causal, scores, number that hides)."""
    node = view.made_by(name, "Where")
    hidden = view.scalar(node.inputs[2]) if node is not None else None
    if node is None or hidden is None or hidden > HIDDEN or view.shape(node.inputs[1]) != view.shape(name):
        return None
    return node.inputs[1] if _mask_kind(view, node.inputs[0]) == "causal" else None


def _product(view: View, name: str) -> tuple[float, tuple[str, ...]] | None:
    """Coefficient and operands of a value that is scale · Q Kᵀ."""
    scale, inner = view.scaled(name)
    node = view.made_by(inner, "MatMul")
    return None if node is None else (scale, node.inputs)


def _mask_kind(view: View, mask: str) -> str:
    """`blank` for a mask of zeros, `causal` for one that shows each position itself and those before it, else `other`.

    A mask is added, or chooses by true what is shown. Layers share their masks, and a mask of a long sequence is
    large: each is looked at once.
    """
    if mask not in view.masks:
        numbers = view.known.array(mask)
        if numbers is not None and numbers.dtype == np.bool_:
            numbers = np.where(numbers, np.float32(0), np.float32(-np.inf))
        blank = numbers is not None and not numbers.any()
        view.masks[mask] = "blank" if blank else "causal" if _is_causal(numbers) else "other"
    return view.masks[mask]


def _is_causal(mask: np.ndarray | None) -> bool:
    if mask is None or mask.ndim < 2 or mask.shape[-1] != mask.shape[-2] or mask.dtype.kind not in "fV":
        return False
    square = mask.reshape(-1, *mask.shape[-2:]).astype(np.float32, copy=False)
    shown = np.tri(mask.shape[-1], dtype=bool)
    return bool(np.all((square == 0) == shown) and np.all((square <= HIDDEN) != shown))


def _key(view: View, transposed: str) -> str | None:
    """K where a value is Kᵀ and K is at hand, perhaps not yet merged from (samples, heads, sharers, …)."""
    node = view.made_by(transposed, "Transpose")
    if node is not None:
        return node.inputs[0] if node.integers("perm") == (0, 1, 3, 2) else None
    path = view.path(transposed, "Reshape", "Transpose", "Reshape")
    if not path or path[1].integers("perm") != (0, 2, 1):
        return None
    samples, heads, features, positions = view.shape(transposed)
    if view.shape(path[1].inputs[0]) != (samples * heads, positions, features):
        return None
    source = view.shape(path[2].inputs[0])
    return path[2].inputs[0] if (samples, heads, positions, features) in (source, _merged_heads(source)) else None


def _merged_heads(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape (samples, heads, sharers, …) with one dimension of heads · sharers."""
    return (*shape[:1], math.prod(shape[1:3]), *shape[3:])


def _shared_head(view: View, name: str) -> str | None:
    """The keys or values of fewer heads that were repeated, head by head, to make `name`."""
    if len(view.shape(name)) == 4:
        merged = view.made_by(name, "Reshape")
        if merged is None or _merged_heads(view.shape(merged.inputs[0])) != view.shape(name):
            return None
        name = merged.inputs[0]
    path = view.path(name, "Expand", "Unsqueeze|Reshape")
    if not path:
        return None
    samples, groups, _, *rest = view.shape(name)
    middle, source = (view.shape(each.inputs[0]) for each in path)
    is_repeated = middle == (samples, groups, 1, *rest) and source == (samples, groups, *rest)
    return path[1].inputs[0] if is_repeated else None


def gelu(view: View, node: Node) -> tuple[Node, ...] | None:
    """A product of ½, x and 1 + erf or tanh of x, in any order."""
    coefficient, factors = view.product(node.outputs[0])
    if len(factors) != 2 or not near(coefficient, 0.5):
        return None
    for x, gate in (factors, factors[::-1]):
        approximate = _gate(view, gate, x)
        if approximate and view.shape(x) == view.shape(node.outputs[0]):
            return (Node(node.name, "Gelu", (x,), node.outputs, (("approximate", approximate),)),)
    return None


def _gate(view: View, name: str, x: str) -> str:
    """`none` for 1 + erf(x / √2), `tanh` for its approximation, "" for anything else."""
    value, one = view.sum_with(name)
    bend = view.made_by(value, "Erf", "Tanh") if near(one, 1.0) else None
    if bend is None:
        return ""
    coefficient, factors = view.product(bend.inputs[0])
    if bend.op == "Erf":
        return "none" if near(coefficient, ROOT_HALF) and factors == (x,) else ""
    return "tanh" if near(coefficient, TANH_SCALE) and _is_cubic(view, factors, x) else ""


def _is_cubic(view: View, factors: tuple[str, ...], x: str) -> bool:
    """True if a product of factors is x + 0.044715 x³, or x (1 + 0.044715 x²)."""
    node = view.made_by(factors[0], "Add") if len(factors) == 1 else None
    if node is not None and x in node.inputs:
        bend, one, power = node.inputs[node.inputs[0] == x], 1.0, 3
    elif len(factors) == 2 and x in factors:
        (bend, one), power = view.sum_with(factors[factors[0] == x]), 2
    else:
        return False
    if not near(one, 1.0):
        return False
    coefficient, powers = view.product(bend)
    return near(coefficient, CUBIC) and powers == (x,) * power


def normalization(view: View, node: Node) -> tuple[Node, ...] | None:
    """A product of a scale and x / √(mean x² + ε), x less its mean for LayerNormalization."""
    for scale, normal in (node.inputs, node.inputs[::-1]):
        found = _normal(view, view.uncast(normal))
        if found is None:
            continue
        deviation, axis, epsilon = found
        centred = _centred(view, deviation, axis)
        op, x = ("RMSNormalization", deviation) if centred is None else ("LayerNormalization", centred)
        x = view.uncast(x)
        type_, scales = view.type_of(x), view.type_of(scale)
        is_typed = type_ == dataclasses.replace(view.type_of(node.outputs[0]), name=x) and scales.dtype is type_.dtype
        if is_typed and scales.shape == type_.shape[axis:]:
            attributes = (("axis", axis - len(type_.shape)), ("epsilon", epsilon))
            return (Node(node.name, op, (x, scale), node.outputs, attributes),)
    return None


def offset(view: View, node: Node) -> tuple[Node, ...] | None:
    """A LayerNormalization without offset, and the offset added to it."""
    for normal, bias in (node.inputs, node.inputs[::-1]):
        made = view.made_by(normal, "LayerNormalization")
        if made is None or len(made.inputs) != 2 or view.readers[normal] != 1:
            continue
        if view.shape(bias) == view.shape(made.inputs[1]) and view.graph.producer(bias) is None:
            return (Node(node.name, made.op, (*made.inputs, bias), node.outputs, made.attributes),)
    return None


def _normal(view: View, name: str) -> tuple[str, int, float] | None:
    """x, first axis and ε of a value that is x / √(mean x² + ε)."""
    node = view.made_by(name, "Mul", "Div")
    if node is None:
        return None
    if node.op == "Div":
        pairs = [(node.inputs[0], _squared(view, node.inputs[1]))]
    else:
        pairs = [(x, _inverse_squared(view, y)) for x, y in (node.inputs, node.inputs[::-1])]
    for x, square in pairs:
        value, epsilon = view.sum_with(square)
        mean = view.made_by(value, "ReduceMean")
        if mean is not None and view.product(mean.inputs[0]) == (1.0, (x, x)):
            axis = _trailing(view, mean)
            if axis is not None:
                return x, axis, epsilon
    return None


def _squared(view: View, name: str) -> str:
    """v where a value is √v, else ""."""
    root = view.made_by(name, "Sqrt")
    return root.inputs[0] if root is not None else ""


def _inverse_squared(view: View, name: str) -> str:
    """v where a value is 1 / √v, else ""."""
    node = view.made_by(name, "Reciprocal", "Div", "Pow")
    if node is None or (node.op == "Div" and view.scalar(node.inputs[0]) != 1.0):
        return ""
    if node.op == "Pow":
        return node.inputs[0] if view.scalar(node.inputs[1]) == -0.5 else ""
    return _squared(view, node.inputs[-1])


def _centred(view: View, name: str, axis: int) -> str | None:
    """x where a value is x − mean x over the dimensions from `axis` on."""
    node = view.made_by(name, "Sub")
    mean = view.made_by(node.inputs[1], "ReduceMean") if node is not None else None
    if node is None or mean is None or mean.inputs[0] != node.inputs[0] or _trailing(view, mean) != axis:
        return None
    return node.inputs[0]


def _trailing(view: View, node: Node) -> int | None:
    """The first axis of a ReduceMean over all dimensions from there on that keeps them."""
    rank = len(view.shape(node.inputs[0]))
    stated = view.known.array(node.inputs[1]) if len(node.inputs) > 1 else None
    axes = tuple(int(axis) for axis in stated) if stated is not None else node.integers("axes")
    found = sorted(axis % rank for axis in axes) if rank else []
    if not found or found != list(range(found[0], rank)) or not node.integer("keepdims", 1):
        return None
    return found[0]


FUSED = frozenset({"Attention", "Gelu", "LayerNormalization", "RMSNormalization"})
"""Operators that rules put together."""
RULES: dict[str, tuple[Callable[[View, Node], tuple[Node, ...] | None], ...]] = {
    "Mul": (gelu, normalization),
    "Add": (offset,),
    "MatMul": (attention,),
}
"""By the operator at which a pattern ends: from a node and what leads to it to those in its place, or None.

The last of them writes the node's result; a rule puts the types of what the others write into `View.made`.
"""


def fused(graph: Graph) -> Graph:
    """The same function in terms of Attention, LayerNormalization, RMSNormalization and Gelu where it is spelt out.

    Fused operators have the meaning of opset 23, or of the opset that introduced them, whatever `graph.opset` is.
    """
    view = View(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        view.writers.update({name: node for name in node.outputs if name})
        rules = RULES.get(node.op, ()) if not node.domain else ()
        found = next((replacement for rule in rules if (replacement := rule(view, node)) is not None), (node,))
        for each in found:
            view.writers.update({name: each for name in each.outputs if name})
        nodes.extend(found)
    if len(nodes) == len(graph.nodes) and all(map(lambda new, old: new is old, nodes, graph.nodes)):
        return graph
    values = tuple(view.type_of(name) for node in nodes for name in node.outputs if name)
    return without_unread(without_repeats(dataclasses.replace(graph, nodes=tuple(nodes), values=values)))
