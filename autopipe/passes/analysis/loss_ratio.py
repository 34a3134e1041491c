"""Losses that divide one sum over samples by another, and losses that are a square root of a sum.
This module extends a graph so that it returns the sums, from which the loss of a complete batch is
computed.

Let N and D be sums over samples, where D depends on no trained parameter, and let N_k and D_k be
their values for micro-batch k. The loss of the batch is h(Σ N_k / d(Σ D_k)), where h is the
identity or the square root, and d adds a constant or applies a minimum. Its gradient is h'(Σ N_k /
d(Σ D_k)) / d(Σ D_k) · Σ ∇N_k: a factor that is known after the last forward, times a sum that
micro-batches accumulate.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from autopipe.ir.graph import COUNTED_LABELS, Attribute, DType, Graph, Node
from autopipe.ir.ops import is_label_loss, operator_of
from autopipe.passes.frontend.elements import NUMBERS
from autopipe.passes.frontend.rewriter import GraphEdit

Stated = tuple[str, Attribute]
"""An attribute of a node: (name, value)."""


@dataclass(frozen=True, slots=True)
class Divisor:
    """The divisor d(D) = max(D + `added`, `minimum`) of a loss, where D is a sum or mean over
    samples with the name `total`. If `minimum` is None, d(D) = D + `added`.
    """

    total: str
    """Name of the value D. For the mean of a loss with class weights, the name of the loss node; D
    then is the sum of the class weights of its labels.
    """
    degree: int = 0
    """0 if D is a sum over samples, -1 if it is a mean."""
    added: float = 0.0
    minimum: float | None = None

    @property
    def is_plain(self) -> bool:
        """True if the divisor d(D) is the sum D itself: it has no added constant and no minimum."""
        return not self.added and self.minimum is None


@dataclass(frozen=True, slots=True)
class Ratio:
    """A loss h(N / d(D)). N and D are sums over samples, d adds a constant or applies a minimum,
    and h is the square root if `root` is True, otherwise the identity.
    """

    divisor: Divisor | None
    """The divisor d(D); None if N is not divided."""
    root: bool
    degree: int
    """0 if N is a sum over samples, -1 if it is a mean."""
    values: tuple[str, ...]
    """Names of the values between N and the loss: the quotient or square root, and the values
    computed from it.
    """


def with_total_outputs(graph: Graph, loss: str, ratio: Ratio) -> tuple[Graph, str] | None:
    """Return (graph, name of N) for a loss that is a sum N over samples, divided by a function of
    another sum D. The graph has N as an additional output and, if the ratio has a divisor, D as the
    last output.

    None if the graph lacks values of `ratio`, because it differs from the graph from which `ratio`
    was derived.
    """
    building = _TotalBuilder(graph, ratio)
    total = building.total(loss)
    if total is None:
        return None
    outputs = [*graph.outputs, total]
    if ratio.divisor is not None:
        if building.divisor_value() is None:
            return None
        outputs.append(COUNTED_LABELS)
    return dataclasses.replace(building.added.build(building.nodes), outputs=tuple(outputs)), total


def summed_elements(graph: Graph, total: str) -> int:
    """Return the number of elements that are added up in the sum `total`. `total` is the name of
    the sum or, for a loss with class weights, the name of the loss node. Return 1 if the number is
    not found.
    """
    loss = next((each for each in graph.nodes if each.name == total and is_label_loss(each)), None)
    if loss is not None:
        return graph.type_of(loss.inputs[1]).elements
    while (index := graph.producer(total)) is not None:
        read = graph.nodes[index].inputs[:1]
        if not read or not graph.has(read[0]):
            break
        total = read[0]
        if graph.type_of(total).elements > 1:
            return graph.type_of(total).elements
    return 1


class _TotalBuilder:
    """Adds nodes to a graph that compute N, the sum over samples that a loss divides, and D, the
    sum from which its divisor is computed. `nodes` are the graph's nodes and the added ones,
    `added` are the new values.
    """

    def __init__(self, graph: Graph, ratio: Ratio) -> None:
        self._graph = graph
        self._ratio = ratio
        self._values = frozenset(ratio.values)
        self.added = GraphEdit(graph)
        self.nodes = list(graph.nodes)
        self._totals: dict[str, str | None] = {}
        self._counted: str | None = None

    def total(self, name: str) -> str | None:
        """Return the name of a new or existing value: the value `name` without the division by the
        loss's divisor and without the square root. None if the graph lacks the necessary values.
        """
        if name not in self._totals:
            self._totals[name] = self._new_total(name)
        return self._totals[name]

    def _new_total(self, name: str) -> str | None:
        """Return the name of the value `name` without the division and the square root, adding the
        nodes that compute it. None if the graph lacks the necessary values.

        If the value is a sum, each summand that was not divided is multiplied by D, the divisor of
        the other summands.
        """
        index = self._graph.producer(name)
        if index is None:
            return None
        node = self._graph.nodes[index]
        values = self._values
        if is_label_loss(node):
            attributes = tuple(pair for pair in node.attributes if pair[0] != "reduction")
            return self._append(node, node.inputs, name, (*attributes, ("reduction", "sum")))
        if values.isdisjoint(node.inputs):
            return node.inputs[0]
        if node.op in ("Sqrt", "Pow"):
            return self.total(node.inputs[0])
        row = operator_of(node)
        adds = row is not None and row.adds
        inputs = []
        for each in node.inputs:
            new: str | None = each
            if each in values:
                new = self.total(each)
            elif adds:
                new = self._times_divisor(each)
            if new is None:
                return None
            inputs.append(new)
        return self._append(node, tuple(inputs), name, node.attributes)

    def _append(
        self, node: Node, inputs: tuple[str, ...], result: str, attributes: tuple[Stated, ...]
    ) -> str:
        """Add a copy of `node` with these inputs and attributes. The copy writes a new value
        instead of the value `result`, for the computation of the sum that the loss divides. Return
        the name of the new value.
        """
        value = self._graph.type_of(result)
        total = self.added.value(f"{result}_total", value.dtype, value.shape)
        name = f"autopipe/{node.op}/{total}"
        self.nodes.append(
            dataclasses.replace(
                node, name=name, inputs=inputs, outputs=(total,), attributes=attributes
            )
        )
        return total

    def _node(self, op: str, inputs: tuple[str, ...], result: str, *attributes: Stated) -> str:
        """Add a node with the operator `op` that writes the value `result`, and return `result`."""
        self.nodes.append(Node(f"autopipe/{op}/{result}", op, inputs, (result,), attributes))
        return result

    def _times_divisor(self, name: str) -> str | None:
        """Return the name of the product of the value `name` and D, the sum over samples by which
        the loss is divided, adding the nodes that compute it. None if the graph has no D.
        """
        value = self._graph.type_of(name)
        divisor = self.divisor_value()
        if divisor is None:
            return None
        if value.dtype is not DType.FLOAT32:
            cast = self.added.value(f"{name}_divisor", value.dtype, ())
            divisor = self._node("Cast", (divisor,), cast, ("to", NUMBERS[value.dtype]))
        return self._node(
            "Mul", (name, divisor), self.added.value(f"{name}_total", value.dtype, value.shape)
        )

    def divisor_value(self) -> str | None:
        """Return the name of D, the sum over samples by which the loss is divided, as a float32
        scalar. The first call adds the nodes that compute it. None if the graph lacks D, or already
        has a value `COUNTED_LABELS`.
        """
        divisor = self._ratio.divisor
        assert divisor is not None
        if self._counted is None and not self._graph.has(COUNTED_LABELS):
            loss = next(
                (
                    each
                    for each in self._graph.nodes
                    if each.name == divisor.total and is_label_loss(each)
                ),
                None,
            )
            if loss is not None:
                self._counted = self._as_float32_scalar(self._sum_of_weights(loss), ())
            elif self._graph.has(divisor.total):
                self._counted = self._as_float32_scalar(
                    divisor.total, self._graph.type_of(divisor.total).shape
                )
        return self._counted

    def _as_float32_scalar(self, total: str, shape: tuple[int, ...]) -> str:
        """Return the name of the value `total`, which has one element, converted to a float32
        scalar.
        """
        if shape:
            number = self.added.value(f"{total}_number", self._graph.type_of(total).dtype, ())
            total = self._node("Reshape", (total, self.added.shape_operand(number, ())), number)
        counted = self.added.value(COUNTED_LABELS, DType.FLOAT32, ())
        return self._node("Cast", (total,), counted, ("to", NUMBERS[DType.FLOAT32]))

    def _sum_of_weights(self, loss: Node) -> str:
        """Return the name of the sum of the class weights of a loss's labels, adding the nodes that
        compute it. Ignored labels do not count.
        """
        labels, weights = (self._graph.type_of(name) for name in loss.inputs[1:3])
        chosen = labels.name
        added = self.added
        left_out = None
        if loss.has("ignore_index"):
            number = np.asarray(loss.integer("ignore_index"), labels.dtype.value)
            ignored = added.constant(f"{labels.name}_ignored", number)
            left_out = self._node(
                "Equal",
                (chosen, ignored),
                added.value(f"{chosen}_left_out", DType.BOOL, labels.shape),
            )
            first = added.constant(f"{labels.name}_first", np.zeros((), labels.dtype.value))
            known = added.value(f"{chosen}_known", labels.dtype, labels.shape)
            chosen = self._node("Where", (left_out, first, chosen), known)
        own = added.value(f"{labels.name}_weights", weights.dtype, labels.shape)
        self._node("Gather", (weights.name, chosen), own, ("axis", 0))
        if left_out is not None:
            zero = added.constant(f"{labels.name}_zero", np.zeros((), weights.dtype.value))
            counting = added.value(f"{labels.name}_counting_weights", weights.dtype, labels.shape)
            own = self._node("Where", (left_out, zero, own), counting)
        axes = added.constant(f"{labels.name}_axes", np.arange(len(labels.shape), dtype=np.int64))
        total = added.value(f"{labels.name}_weight", weights.dtype, ())
        return self._node("ReduceSum", (own, axes), total, ("keepdims", 0))
