"""The distinct operations of a graph: what is measured of it, and what measured costs are looked up by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopipe.ir.costs import Sample, operation_of
from autopipe.ir.graph import Graph, Value
from autopipe.ir.layout import Layout, is_block
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.row import Signature
from autopipe.ir.placement import Split
from autopipe.ir.problem import Work
from autopipe.ir.space import AxisKind
from autopipe.passes.cost.uses import Use, uses_of
from autopipe.passes.lower.exchanges import laid
from autopipe.passes.lower.gradients import differentiable_values
from autopipe.passes.lower.inputs import input_ranges


def samples_of(graph: Graph, work: Sequence[Work], precision: str, degree: int = 1) -> tuple[tuple[Sample, ...], ...]:
    """For each node what there is to measure of it: the node whole or, of more than one `degree`, its shares under the
    splits along one axis into so many. Equal nodes have equal operations, and one sample."""
    uses, gradients = uses_of(graph), differentiable_values(graph)
    known: dict[tuple[int, tuple[int, ...]], tuple[Sample, ...]] = {}
    found = []
    for index, use in enumerate(uses):
        flowing = flowing_operands(graph, index, gradients)
        key = id(use), flowing
        if key not in known:
            cuts = single_splits(use, (degree,)) if degree > 1 else ((),)
            known[key] = tuple(_sample(graph, index, use, splits, work[index], precision, flowing) for splits in cuts)
        found.append(known[key])
    return tuple(found)


def flowing_operands(graph: Graph, index: int, gradients: frozenset[str]) -> tuple[int, ...]:
    """Places of the operands to which a node's backward gives gradients."""
    node = graph.nodes[index]
    if not any(name in gradients for name in node.outputs):
        return ()
    return tuple(place for place, name in enumerate(node.inputs) if name in gradients)


def single_splits(use: Use, degrees: Sequence[int]) -> Iterator[tuple[Split, ...]]:
    """The splits along one axis that leave every device a share which it computes by itself."""
    windowed = {each.axis for each in use.space.windows}
    for axis in use.space.axes:
        if axis.kind not in (AxisKind.PARALLEL, AxisKind.SUM, AxisKind.MEAN) or axis.name in windowed:
            continue
        for degree in degrees:
            if degree > 1 and axis.extent % degree == 0 and is_block(use.space, axis.name, degree):
                yield (Split(axis.name, degree),)


def local_signature(graph: Graph, index: int, use: Use, splits: tuple[Split, ...]) -> Signature:
    """A node's signature on one device: numbers stay known only where the operand is the whole constant."""
    signature = signature_of(graph, graph.nodes[index])
    if not splits:
        return signature
    form = laid(graph, index, use.space, splits, splits[0].degree)
    operands = tuple(map(_local_value, signature.operands, form.operands))
    constants = tuple(
        None if value is None or array is None or value.shape != array.shape else array
        for value, array in zip(operands, signature.constants, strict=True)
    )
    results = tuple(map(_local_value, signature.results, form.results))
    return replace(signature, operands=operands, results=results, constants=constants)


def _local_value(value: Value | None, layout: Layout | None) -> Value | None:
    return None if value is None or layout is None else replace(value, shape=layout.local_shape())


def _sample(
    graph: Graph,
    index: int,
    use: Use,
    splits: tuple[Split, ...],
    work: Work,
    precision: str,
    gradients: tuple[int, ...],
) -> Sample:
    signature = local_signature(graph, index, use, splits)
    share = 1.0 / splits[0].degree if splits else 1.0
    return Sample(
        operation=operation_of(signature, gradients, precision),
        signature=signature,
        splits=splits,
        below=_limits(signature),
        parameters=tuple(
            place for place, name in enumerate(signature.node.inputs) if graph.parameter(name) is not None
        ),
        kind=work.kind,
        flops=(work.forward_flops * share, work.backward_flops * share),
        moved_bytes=(work.forward_bytes * share, work.backward_bytes * share),
    )


def _limits(signature: Signature) -> tuple[int | None, ...]:
    """What the numbers of each operand must stay below, where they index something."""
    node = signature.node
    present = {value.name: value for value in signature.operands if value is not None}
    results = tuple(value for value in signature.results if value is not None)
    graph = Graph(node.name, signature.opset, tuple(present.values()), (), (), (node,), (), results)
    below = {each.value.name: each.below for each in input_ranges(graph)}
    return tuple(below.get(name) if _is_index(present, name) else None for name in node.inputs)


def _is_index(present: dict[str, Value], name: str) -> bool:
    return name in present and present[name].dtype.is_integer
