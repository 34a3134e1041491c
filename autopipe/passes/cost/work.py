"""The costed graph: what each node's forward and backward compute, move and keep, whatever the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from autopipe.ir.graph import Graph, Node
from autopipe.ir.problem import Work
from autopipe.passes.cost.kept import kept_values
from autopipe.passes.cost.precision import element_bytes
from autopipe.passes.cost.splits import SampleAxes
from autopipe.passes.cost.uses import OpInstance, uses_of
from autopipe.passes.lower.gradients import differentiable_values

_NO_WORK = ("view",)


def annotate(graph: Graph, precision: str = "fp32") -> tuple[Work, ...]:
    """The work of every node, in order, with the widths its tensors have at `precision`.

    Backward of a product costs one product for each factor that needs a gradient, so the first layer's is cheaper.
    Raises ModelError for an operator without a row.
    """
    uses = uses_of(graph)
    widths = element_bytes(graph, uses, precision)
    sizes = {name: float(width * graph.type_of(name).elements) for name, width in widths.items()}
    return _annotated(graph, uses, sizes, [use.flops for use in uses], _kept_bytes(graph, uses, precision))


def annotate_share(graph: Graph, samples: SampleAxes, precision: str, share: float) -> tuple[Work, ...]:
    """The work of every node on `share` of the graph's samples, equal to `annotate` of a graph of that size.

    It leaves open what backward keeps.
    """
    widths = element_bytes(graph, samples.uses, precision)
    sizes = {
        name: width * graph.type_of(name).elements * (share if samples.carries(name) else 1.0)
        for name, width in widths.items()
    }
    flops = [use.flops * (share if own else 1.0) for use, own in zip(samples.uses, samples.batch.nodes, strict=True)]
    return _annotated(graph, samples.uses, sizes, flops, itertools.repeat(0))


def _kept_bytes(graph: Graph, uses: tuple[OpInstance, ...], precision: str) -> Iterator[int]:
    """Bytes of values that each node makes backward keep, counted at the first node that does."""
    seen: set[tuple[str, int]] = set()
    for kept in kept_values(graph, uses, precision):
        new = {each.key: each.bytes for each in kept if each.key not in seen}
        seen |= new.keys()
        yield sum(new.values())


def _annotated(
    graph: Graph, uses: tuple[OpInstance, ...], sizes: dict[str, float], flops: list[float], kept: Iterator[int]
) -> tuple[Work, ...]:
    gradient = differentiable_values(graph)
    found = []
    for node, use, count, kept_bytes in zip(graph.nodes, uses, flops, kept, strict=False):
        moved = 0 if use.row.kind in _NO_WORK else _moved(node, use, sizes)
        share = _gradient_share(node, use, gradient)
        found.append(
            Work(
                kind=use.row.kind,
                forward_flops=count,
                backward_flops=use.row.backward * count * share,
                forward_bytes=moved,
                backward_bytes=(use.row.backward * moved + _cleared(node, use, sizes, gradient)) * share,
                kept_bytes=kept_bytes,
            )
        )
    return tuple(found)


def _moved(node: Node, use: OpInstance, sizes: dict[str, float]) -> float:
    """Bytes read and written by forward. Copies read no more than they write: a lookup reads the rows it returns."""
    read = [sizes[name] for name in dict.fromkeys(node.inputs) if name]
    written = sum(sizes[name] for name in node.outputs if name)
    if use.row.kind == "memory":
        read = [min(size, written) for size in read]
    return float(sum(read) + written)


def _cleared(node: Node, use: OpInstance, sizes: dict[str, float], gradient: frozenset[str]) -> float:
    """Bytes of zeros that backward writes where a copy read only parts: the gradient of a table is as large as it."""
    if use.row.kind != "memory":
        return 0.0
    written = sum(sizes[name] for name in node.outputs if name)
    return sum(max(0.0, sizes[name] - written) for name in dict.fromkeys(node.inputs) if name in gradient)


def _gradient_share(node: Node, use: OpInstance, gradient: frozenset[str]) -> float:
    """The part of a full backward that is done: 0 without gradients, 1/2 for a product with one factor's."""
    if not use.row.differentiable or gradient.isdisjoint(node.inputs):
        return 0.0
    if use.row.kind not in ("matmul", "convolution"):
        return 1.0
    found = factors(node, use)
    return sum(name in gradient for name in found) / len(found)


def factors(node: Node, use: OpInstance) -> tuple[str, ...]:
    """Operands that the gradients of others need; a bias or a mask is none."""
    return tuple(name for position, name in enumerate(node.inputs) if name and _is_factor(use, position))


def _is_factor(use: OpInstance, position: int) -> bool:
    return "*" in use.row.keeps or str(position) in use.row.keeps
