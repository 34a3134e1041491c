"""The operations that a graph's nodes are: what is measured of it, and what measured costs are looked up by."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopipe.ir.graph import Graph, Value
from autopipe.ir.layout import Layout, is_block
from autopipe.ir.measured_costs import Operation, Sample, operation_of
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.operator import Signature
from autopipe.ir.placement import Split
from autopipe.ir.problem import Work
from autopipe.ir.space import AxisKind
from autopipe.passes.cost.biases import bias_additions
from autopipe.passes.cost.uses import OpInstance, uses_of
from autopipe.passes.lower.exchanges import laid
from autopipe.passes.lower.gradients import differentiable_values

Splits = tuple[Split, ...]


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations of a graph's nodes at a precision, whole and under splits."""

    graph: Graph
    precision: str
    uses: tuple[OpInstance, ...]
    gradients: frozenset[str]
    """Values that gradients flow through."""
    additions: dict[int, int]
    """Products that code generation computes together with the addition of a bias, and those additions."""

    @staticmethod
    def of(graph: Graph, precision: str) -> Operations:
        """Operations of `graph`."""
        return Operations(graph, precision, uses_of(graph), differentiable_values(graph), bias_additions(graph))

    @property
    def absorbed(self) -> frozenset[int]:
        """Nodes that are computed as a part of others."""
        return frozenset(self.additions.values())

    def key(self, index: int) -> Hashable:
        """Equal for nodes that are the same operation."""
        addition = self.additions.get(index)
        more = None if addition is None else (id(self.uses[addition]), self._flowing(addition))
        return id(self.uses[index]), self._flowing(index), more

    def cuts(self, index: int, degrees: Sequence[int]) -> Iterator[Splits]:
        """The splits of a node along one axis that leave every device a share which it computes by itself."""
        space = self.uses[index].space
        windowed = {each.axis for each in space.windows}
        for axis in space.axes:
            if axis.kind not in (AxisKind.PARALLEL, AxisKind.SUM, AxisKind.MEAN) or axis.name in windowed:
                continue
            for degree in degrees:
                if degree > 1 and axis.extent % degree == 0 and is_block(space, axis.name, degree):
                    yield (Split(axis.name, degree),)

    def operation(self, index: int, splits: Splits = ()) -> Operation:
        """Operation of a node on one device."""
        own = self._local(index, splits)
        operation = operation_of(own, self._flowing(index), self.precision)
        bias = self._bias(index, splits, own)
        if bias is None:
            return operation
        addition, place = bias
        flows = addition.node.inputs[place] in self.gradients
        return replace(
            operation,
            operator=f"{operation.operator}+{addition.node.op}",
            operands=(*operation.operands, operation_of(addition, (), "").operands[place]),
            gradients=(*operation.gradients, *((len(operation.operands),) if flows else ())),
        )

    def sample(self, index: int, work: Work, splits: Splits = ()) -> Sample:
        """A node to be measured, whose whole is `work`."""
        share = 1.0 / splits[0].degree if splits else 1.0
        own = self._local(index, splits)
        bias = self._bias(index, splits, own)
        signatures = (own,) if bias is None else (own, bias[0])
        return Sample(
            operation=self.operation(index, splits),
            signatures=signatures,
            splits=splits,
            below=tuple(_limits(own).items()),
            wanted=tuple(name for each in signatures for name in each.node.inputs if name in self.gradients),
            parameters=tuple(
                name for each in signatures for name in each.node.inputs if self.graph.parameter(name) is not None
            ),
            kind=work.kind,
            flops=(work.forward_flops * share, work.backward_flops * share),
            moved_bytes=(work.forward_bytes * share, work.backward_bytes * share),
        )

    def _flowing(self, index: int) -> tuple[int, ...]:
        """Places of the operands to which a node's backward gives gradients."""
        node = self.graph.nodes[index]
        if not any(name in self.gradients for name in node.outputs):
            return ()
        return tuple(place for place, name in enumerate(node.inputs) if name in self.gradients)

    def _local(self, index: int, splits: Splits) -> Signature:
        """A node's signature on one device: numbers stay known only where the operand is the whole constant."""
        signature = signature_of(self.graph, self.graph.nodes[index])
        if not splits:
            return signature
        form = laid(self.graph, index, self.uses[index].space, splits, splits[0].degree)
        operands = tuple(map(_local_value, signature.operands, form.operands))
        constants = tuple(
            None if value is None or array is None or value.shape != array.shape else array
            for value, array in zip(operands, signature.constants, strict=True)
        )
        results = tuple(map(_local_value, signature.results, form.results))
        return replace(signature, operands=operands, results=results, constants=constants)

    def _bias(self, index: int, splits: Splits, product: Signature) -> tuple[Signature, int] | None:
        """The addition that is computed together with a product on one device, and the place of its bias."""
        addition = self.additions.get(index)
        if addition is None or any(self.uses[index].space.axis(each.axis).kind is AxisKind.SUM for each in splits):
            return None
        whole = signature_of(self.graph, self.graph.nodes[addition])
        result = product.result()
        place = 1 if whole.operand(0).name == result.name else 0
        bias = replace(whole.operand(place), shape=result.shape[-1:])
        operands = (result, bias) if place else (bias, result)
        results = (replace(whole.result(), shape=result.shape),)
        return replace(whole, operands=operands, results=results, constants=(None, None)), place


def _local_value(value: Value | None, layout: Layout | None) -> Value | None:
    return None if value is None or layout is None else replace(value, shape=layout.local_shape())


def _limits(signature: Signature) -> dict[str, int]:
    """Exclusive upper bounds of index operands, by operand."""
    from autopipe.passes.lower.inputs import input_ranges  # With programs; only what is measured asks.

    node = signature.node
    present = {value.name: value for value in signature.operands if value is not None}
    results = tuple(value for value in signature.results if value is not None)
    graph = Graph(node.name, signature.opset, tuple(present.values()), (), (), (node,), (), results)
    return {
        each.value.name: each.below
        for each in input_ranges(graph)
        if each.below is not None and each.value.dtype.is_integer
    }
