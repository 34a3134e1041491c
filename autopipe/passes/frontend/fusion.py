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
from dataclasses import dataclass, field

import numpy as np

from autopipe.ir.graph import Attribute, Graph, Node, Value
from autopipe.passes.frontend.cleanup import without_repeats, without_unread
from autopipe.passes.frontend.constants import ConstantFolder
from autopipe.passes.frontend.tables import HIDDEN

MOST_STEPS = 32
"""Multiplications that are looked back through: a chain of thousands would take the square of its length."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """Nodes in place of one node, the last of which writes its result; `values` types what the others write."""

    nodes: tuple[Node, ...]
    values: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class Product:
    """A value as coefficient · f₁ · f₂ ⋯, constants of one element gathered in the coefficient."""

    coefficient: float
    factors: tuple[str, ...]


@dataclass(slots=True)
class View:
    """Graph as patterns see it. Nodes before the current one are already rewritten."""

    graph: Graph
    known: ConstantFolder
    readers: Counter[str]
    writers: dict[str, Node] = field(default_factory=dict)
    made: dict[str, Value] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)
    """Positions hidden by the masks seen so far."""

    @classmethod
    def of(cls, graph: Graph) -> View:
        """A view of `graph` before anything is rewritten."""
        readers = Counter(name for node in graph.nodes for name in node.inputs if name)
        readers.update(graph.outputs)
        return cls(graph, ConstantFolder.of(graph), readers)

    def type_of(self, name: str) -> Value:
        """The type of a value, new ones included."""
        return self.made.get(name) or self.graph.type_of(name)

    def made_by(self, name: str, *operators: str) -> Node | None:
        """The node that writes `name` as its first result, if it is one of ONNX's own `operators`."""
        node = self.writers.get(name)
        if node is None or node.domain or node.op not in operators or node.outputs[0] != name:
            return None
        return node

    def scalar(self, name: str) -> float | None:
        """The number of a constant of one element."""
        constant = self.graph.constant(name)
        if constant is None or constant.array.size != 1 or constant.array.dtype.kind in "bc":
            return None
        return float(constant.array.reshape(-1)[0])

    def uncast(self, name: str) -> str:
        """The value before a cast between floating-point types."""
        node = self.made_by(name, "Cast")
        if node is None:
            return name
        floating = all(self.type_of(each).dtype.is_floating for each in (node.inputs[0], name))
        return node.inputs[0] if floating else name

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
            if number is None or number == 0 or self.type_of(left).shape != self.type_of(name).shape:
                break
            coefficient *= number if node.op == "Mul" else 1 / number
            name = left
        return coefficient, name

    def product(self, name: str) -> Product:
        """A value as a product, whose factors are values read more than once or made otherwise; sorted."""
        coefficient, factors, waiting = 1.0, [], [name]
        steps = 0
        while waiting:
            top, steps = waiting.pop(), steps + 1
            number = self.scalar(top)
            inside = steps <= MOST_STEPS and (top == name or self.readers[top] == 1)
            node = self.made_by(top, "Mul", "Div", "Pow") if inside else None
            if number is not None:
                coefficient *= number
            elif node is None:
                factors.append(top)
            elif node.op == "Mul":
                waiting.extend(node.inputs)
            else:
                operand = self.scalar(node.inputs[1])
                if node.op == "Div" and operand:
                    coefficient /= operand
                    waiting.append(node.inputs[0])
                elif node.op == "Pow" and operand in (2.0, 3.0):
                    factors.extend([node.inputs[0]] * int(operand))
                else:
                    factors.append(top)
        return Product(coefficient, tuple(sorted(factors)))

    def sum_with(self, name: str) -> tuple[str, float] | None:
        """A value as another plus a number."""
        node = self.made_by(name, "Add")
        if node is None:
            return None
        for value, other in (node.inputs, node.inputs[::-1]):
            number = self.scalar(other)
            if number is not None:
                return value, number
        return None

    def numbers(self, name: str) -> np.ndarray | None:
        """The numbers of a value that depends on constants alone."""
        return self.known.array(name)


Rule = Callable[[View, Node], Replacement | None]
"""Looks at a node and what leads to it; gives what to put in its place, or None."""


def near(number: float, expected: float) -> bool:
    """True if a constant is the one meant, as far as a file in half precision can tell."""
    return math.isclose(number, expected, rel_tol=1e-3)


SOFTMAX_SINCE = 13
"""The opset from which Softmax's default axis is the last."""
NOTHING = Replacement(())


@dataclass(frozen=True, slots=True)
class _Scores:
    """Argument of a softmax."""

    query: str
    key_transposed: str
    scale: float
    masks: tuple[str, ...]
    """Masks added to the scores."""
    causal: bool


def attention(view: View, node: Node) -> Replacement | None:
    """A product of softmaxed scores and values, four-dimensional: samples, heads, positions, features."""
    weights, value = node.inputs
    shapes = [view.type_of(name).shape for name in (weights, value, node.outputs[0])]
    if any(len(shape) != 4 for shape in shapes) or shapes[0][:2] != shapes[1][:2]:
        return None
    softmax = view.made_by(_unguarded(view, view.uncast(weights)), "Softmax")
    if softmax is None or softmax.integer("axis", -1 if view.graph.opset >= SOFTMAX_SINCE else 1) not in (-1, 3):
        return None
    scores = _scores(view, view.uncast(softmax.inputs[0]))
    if scores is None or view.type_of(scores.query).dtype is not view.type_of(value).dtype:
        return None
    key, key_scale, turned = _keys(view, scores, value, node)
    shared = [None if turned.nodes else _shared_head(view, name) for name in (key, value)]
    if shared[0] is not None and shared[1] is not None:
        key, value = shared[0], shared[1]
    masks = _sum(view, scores.masks, node)
    attributes: list[tuple[str, Attribute]] = [("scale", scores.scale * key_scale)]
    if scores.causal:
        attributes.append(("is_causal", 1))
    mask = masks.values[-1].name if masks.values else next(iter(scores.masks), "")
    operands = (scores.query, key, value, *([mask] if mask else []))
    fused = Node(node.name, "Attention", operands, node.outputs, tuple(sorted(attributes)))
    return Replacement((*turned.nodes, *masks.nodes, fused), (*turned.values, *masks.values))


def _keys(view: View, scores: _Scores, value: str, node: Node) -> tuple[str, float, Replacement]:
    """K with the number it is multiplied by, and the nodes that make it where only Kᵀ is at hand."""
    found = _key(view, scores.key_transposed)
    if found is not None:
        scale, key = view.scaled(found)
        shared = _shared_head(view, key) is not None and _shared_head(view, value) is not None
        if shared or len(view.type_of(key).shape) == 4:
            return key, scale, NOTHING
    type_ = view.type_of(scores.key_transposed)
    samples, heads, features, positions = type_.shape
    made = Value(f"{node.outputs[0]}_key", type_.dtype, (samples, heads, positions, features))
    source, order = scores.key_transposed, (0, 1, 3, 2)
    transpose = view.made_by(source, "Transpose")
    if transpose is not None:
        source, perm = transpose.inputs[0], transpose.integers("perm", (3, 2, 1, 0))
        order = (perm[0], perm[1], perm[3], perm[2])
    turn = Node(f"{node.name}/key", "Transpose", (source,), (made.name,), (("perm", order),))
    return made.name, 1.0, Replacement((turn,), (made,))


def _sum(view: View, masks: tuple[str, ...], node: Node) -> Replacement:
    """Nodes that add up several masks; nothing to do for one or none."""
    nodes: list[Node] = []
    values: list[Value] = []
    for number, mask in enumerate(masks[1:]):
        first = values[-1] if values else view.type_of(masks[0])
        shape = np.broadcast_shapes(first.shape, view.type_of(mask).shape)
        values.append(Value(f"{node.outputs[0]}_mask_{number}", first.dtype, shape))
        nodes.append(Node(f"{node.name}/mask_{number}", "Add", (first.name, mask), (values[-1].name,)))
    return Replacement(tuple(nodes), tuple(values))


def _unguarded(view: View, name: str) -> str:
    """The softmax within Where(IsNaN(softmax), 0, softmax)."""
    node = view.made_by(name, "Where")
    if node is None:
        return name
    test = view.made_by(node.inputs[0], "IsNaN")
    if test is None or test.inputs[0] != node.inputs[2] or view.scalar(node.inputs[1]) != 0.0:
        return name
    return node.inputs[2]


def _scores(view: View, name: str) -> _Scores | None:
    """Match scale · Q Kᵀ + masks before a softmax; recognised where their numbers are known."""
    masks: list[str] = []
    chosen = _chosen(view, name)
    name = chosen or name
    while (found := _product(view, name)) is None:
        node = view.made_by(name, "Add")
        if node is None:
            return None
        left, right = (view.uncast(each) for each in node.inputs)
        is_left = _product(view, left) is not None or view.made_by(left, "Add") is not None
        name = left if is_left else right
        masks.append(node.inputs[1] if is_left else node.inputs[0])
    scale, product = found
    query_scale, query = view.scaled(product.inputs[0])
    key_scale, key = view.scaled(product.inputs[1])
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
    return _Scores(query, key, scale * query_scale * key_scale, () if causal else tuple(telling), causal)


def _chosen(view: View, name: str) -> str | None:
    """The scores within Where(causal, scores, number that hides)."""
    node = view.made_by(name, "Where")
    hidden = view.scalar(node.inputs[2]) if node is not None else None
    if node is None or hidden is None or hidden > HIDDEN:
        return None
    if view.type_of(node.inputs[1]).shape != view.type_of(name).shape:
        return None
    return node.inputs[1] if _mask_kind(view, node.inputs[0]) == "causal" else None


def _product(view: View, name: str) -> tuple[float, Node] | None:
    """Coefficient and product of a value that is scale · Q Kᵀ."""
    scale, inner = view.scaled(name)
    node = view.made_by(inner, "MatMul")
    return None if node is None else (scale, node)


def _mask_kind(view: View, mask: str) -> str:
    """`blank` for a mask of zeros, `causal` for one that shows each position itself and those before it, else `other`.

    A mask is added, or chooses by true what is shown.

    Layers share their masks, and a mask of a long sequence is large: each is looked at once.
    """
    if mask not in view.masks:
        numbers = view.numbers(mask)
        if numbers is not None and numbers.dtype == np.bool_:
            numbers = np.where(numbers, np.float32(0), np.float32(-np.inf))
        blank = numbers is not None and not numbers.any()
        view.masks[mask] = "blank" if blank else "causal" if _is_causal(numbers) else "other"
    return view.masks[mask]


def _is_causal(mask: np.ndarray | None) -> bool:
    """True if a mask shows each position itself and those before it, and hides all others."""
    if mask is None or mask.ndim < 2 or mask.shape[-1] != mask.shape[-2] or mask.dtype.kind not in "fV":
        return False
    square = mask.reshape(-1, *mask.shape[-2:]).astype(np.float32, copy=False)
    shown = np.tri(mask.shape[-1], dtype=bool)
    hidden = square <= HIDDEN
    return bool(np.all((square == 0) == shown) and np.all(hidden != shown))


def _key(view: View, transposed: str) -> str | None:
    """K where a value is Kᵀ and K is at hand, perhaps not yet merged from (samples, heads, sharers, …)."""
    node = view.made_by(transposed, "Transpose")
    if node is not None:
        return node.inputs[0] if node.integers("perm") == (0, 1, 3, 2) else None
    merged = view.made_by(transposed, "Reshape")
    turned = view.made_by(merged.inputs[0], "Transpose") if merged is not None else None
    flat = view.made_by(turned.inputs[0], "Reshape") if turned is not None else None
    if turned is None or flat is None or turned.integers("perm") != (0, 2, 1):
        return None
    samples, heads, features, positions = view.type_of(transposed).shape
    if view.type_of(flat.outputs[0]).shape != (samples * heads, positions, features):
        return None
    source = view.type_of(flat.inputs[0]).shape
    regrouped = len(source) == 5 and (source[0], source[1] * source[2], *source[3:]) == (
        samples, heads, positions, features
    )  # fmt: skip
    return flat.inputs[0] if regrouped or source == (samples, heads, positions, features) else None


def _shared_head(view: View, name: str) -> str | None:
    """The keys or values of fewer heads that were repeated, head by head, to make `name`."""
    if len(view.type_of(name).shape) == 4:
        merged = view.made_by(name, "Reshape")
        if merged is None:
            return None
        samples, heads, *rest = view.type_of(name).shape
        name = merged.inputs[0]
        repeated = view.type_of(name).shape
        if len(repeated) != 5 or (repeated[0], repeated[1] * repeated[2], *repeated[3:]) != (samples, heads, *rest):
            return None
    expand = view.made_by(name, "Expand")
    apart = view.made_by(expand.inputs[0], "Unsqueeze", "Reshape") if expand is not None else None
    if expand is None or apart is None:
        return None
    samples, groups, _, *rest = view.type_of(name).shape
    middle, source = view.type_of(expand.inputs[0]).shape, view.type_of(apart.inputs[0]).shape
    if middle == (samples, groups, 1, *rest) and source == (samples, groups, *rest):
        return apart.inputs[0]
    return None


ROOT_HALF = math.sqrt(0.5)
TANH_SCALE = math.sqrt(2 / math.pi)
CUBIC = 0.044715


def gelu(view: View, node: Node) -> Replacement | None:
    """A product of ½, x and 1 + erf or tanh of x, in any order."""
    product = view.product(node.outputs[0])
    if len(product.factors) != 2 or not near(product.coefficient, 0.5):
        return None
    for x, gate in (product.factors, product.factors[::-1]):
        approximate = _gate(view, gate, x)
        if approximate and view.type_of(x).shape == view.type_of(node.outputs[0]).shape:
            return Replacement((Node(node.name, "Gelu", (x,), node.outputs, (("approximate", approximate),)),))
    return None


def _gate(view: View, name: str, x: str) -> str:
    """`none` for 1 + erf(x / √2), `tanh` for its approximation, "" for anything else."""
    found = view.sum_with(name)
    if found is None or not near(found[1], 1.0):
        return ""
    bend = view.made_by(found[0], "Erf", "Tanh")
    if bend is None:
        return ""
    argument = view.product(bend.inputs[0])
    if bend.op == "Erf":
        return "none" if near(argument.coefficient, ROOT_HALF) and argument.factors == (x,) else ""
    return "tanh" if near(argument.coefficient, TANH_SCALE) and _is_cubic(view, argument.factors, x) else ""


def _is_cubic(view: View, factors: tuple[str, ...], x: str) -> bool:
    """True if a product of factors is x + 0.044715 x³, or x (1 + 0.044715 x²)."""
    if len(factors) == 1:
        node = view.made_by(factors[0], "Add")
        if node is None or x not in node.inputs:
            return False
        cubic = view.product(node.inputs[1] if node.inputs[0] == x else node.inputs[0])
        return near(cubic.coefficient, CUBIC) and cubic.factors == (x, x, x)
    if len(factors) == 2 and x in factors:
        found = view.sum_with(factors[1] if factors[0] == x else factors[0])
        if found is None or not near(found[1], 1.0):
            return False
        square = view.product(found[0])
        return near(square.coefficient, CUBIC) and square.factors == (x, x)
    return False


def normalization(view: View, node: Node) -> Replacement | None:
    """A product of a scale and x / √(mean x² + ε), x less its mean for LayerNormalization."""
    for scale, normal in (node.inputs, node.inputs[::-1]):
        found = _normal(view, view.uncast(normal))
        if found is None:
            continue
        deviation, axis, epsilon = found
        source = view.uncast(deviation)
        centred = _centred(view, deviation, axis)
        result, scales = view.type_of(node.outputs[0]), view.type_of(scale)
        for x, op in ((source, "RMSNormalization"), (centred and view.uncast(centred), "LayerNormalization")):
            if x is None or (op == "RMSNormalization") != (centred is None):
                continue
            type_ = view.type_of(x)
            if type_ != dataclasses.replace(result, name=type_.name) or scales.dtype != type_.dtype:
                continue
            if scales.shape == type_.shape[axis:]:
                attributes = (("axis", axis - len(type_.shape)), ("epsilon", epsilon))
                return Replacement((Node(node.name, op, (x, scale), node.outputs, attributes),))
    return None


def offset(view: View, node: Node) -> Replacement | None:
    """A LayerNormalization without offset, and the offset added to it."""
    for normal, bias in (node.inputs, node.inputs[::-1]):
        made = view.made_by(normal, "LayerNormalization")
        if made is None or len(made.inputs) != 2 or view.readers[normal] != 1:
            continue
        if view.type_of(bias).shape == view.type_of(made.inputs[1]).shape and view.graph.producer(bias) is None:
            return Replacement((Node(node.name, made.op, (*made.inputs, bias), node.outputs, made.attributes),))
    return None


def _normal(view: View, name: str) -> tuple[str, int, float] | None:
    """x, first axis and ε of a value that is x / √(mean x² + ε)."""
    node = view.made_by(name, "Mul", "Div")
    if node is None:
        return None
    if node.op == "Div":
        root = view.made_by(node.inputs[1], "Sqrt")
        pairs = [(node.inputs[0], root.inputs[0])] if root is not None else []
    else:
        inverse = [(x, _inverse_root(view, y)) for x, y in (node.inputs, node.inputs[::-1])]
        pairs = [(x, inside) for x, inside in inverse if inside is not None]
    for x, inside in pairs:
        found = view.sum_with(inside)
        if found is None:
            continue
        axis = _mean_square(view, found[0], x)
        if axis is not None:
            return x, axis, found[1]
    return None


def _inverse_root(view: View, name: str) -> str | None:
    """v where a value is 1 / √v."""
    node = view.made_by(name, "Reciprocal", "Div", "Pow")
    if node is None:
        return None
    if node.op == "Pow":
        return node.inputs[0] if view.scalar(node.inputs[1]) == -0.5 else None
    if node.op == "Div" and view.scalar(node.inputs[0]) != 1.0:
        return None
    root = view.made_by(node.inputs[-1], "Sqrt")
    return root.inputs[0] if root is not None else None


def _mean_square(view: View, name: str, x: str) -> int | None:
    """The first axis over which a value is the mean of x²."""
    node = view.made_by(name, "ReduceMean")
    if node is None:
        return None
    square = view.product(node.inputs[0])
    if square.coefficient != 1.0 or square.factors != (x, x):
        return None
    return _trailing(view, node)


def _centred(view: View, name: str, axis: int) -> str | None:
    """x where a value is x − mean x over the dimensions from `axis` on."""
    node = view.made_by(name, "Sub")
    mean = view.made_by(node.inputs[1], "ReduceMean") if node is not None else None
    if node is None or mean is None or mean.inputs[0] != node.inputs[0] or _trailing(view, mean) != axis:
        return None
    return node.inputs[0]


def _trailing(view: View, node: Node) -> int | None:
    """The first axis of a ReduceMean over all dimensions from there on that keeps them."""
    rank = len(view.type_of(node.inputs[0]).shape)
    stated = view.numbers(node.inputs[1]) if len(node.inputs) > 1 else None
    axes = tuple(int(axis) for axis in stated) if stated is not None else node.integers("axes")
    found = sorted(axis % rank for axis in axes) if rank else []
    if not found or found != list(range(found[0], rank)) or not node.integer("keepdims", 1):
        return None
    return found[0]


RULES: dict[str, tuple[Rule, ...]] = {"Mul": (gelu, normalization), "Add": (offset,), "MatMul": (attention,)}
"""By the operator of the node at which a pattern ends."""


def fused(graph: Graph) -> Graph:
    """The same function in terms of Attention, LayerNormalization, RMSNormalization and Gelu where it is spelt out.

    Fused operators have the meaning of opset 23, or of the opset that introduced them, whatever `graph.opset` is.
    """
    view = View.of(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        view.writers.update({name: node for name in node.outputs if name})
        rules = RULES.get(node.op, ()) if not node.domain else ()
        found = next((replacement for rule in rules if (replacement := rule(view, node)) is not None), None)
        written = (node,) if found is None else found.nodes
        if found is not None:
            view.made.update({value.name: value for value in found.values})
        for each in written:
            view.writers.update({name: each for name in each.outputs if name})
        nodes.extend(written)
    if len(nodes) == len(graph.nodes) and all(map(lambda new, old: new is old, nodes, graph.nodes)):
        return graph
    values = tuple(view.type_of(name) for node in nodes for name in node.outputs if name)
    return without_unread(without_repeats(dataclasses.replace(graph, nodes=tuple(nodes), values=values)))
