"""Costs of operators under `torch.compile`: elementwise operators and adjacent reductions are fused
into one kernel, which is one pass over memory and one launch (Ansel et al., "PyTorch 2: Faster
Machine Learning Through Dynamic Python Bytecode Transformation and Graph Compilation", ASPLOS 2024,
section 4.2).

A fused group reads each value from outside of the group once, and writes only the values that
operators outside of it read. Its backward reads these inputs again and recomputes the values in
between. A stage boundary or a collective inside a group divides it into two kernels; the model
ignores this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopipe.ir.graph import Graph
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.problem import NodeCost
from autopipe.passes.analysis.gradients import differentiable_values, view_base
from autopipe.passes.analysis.operators import element_bytes, op_instances
from autopipe.passes.cost.roofline import roofline_costs

_KINDS = frozenset({"elementwise", "reduction", "normalization"})


@memoize(MAX_CACHED_GRAPHS)
def fused_groups(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the nodes of each fused kernel, in ascending order and without views.

    A kernel of a single node is returned only if eager PyTorch runs several kernels for this node.

    An elementwise node, reduction or normalisation joins an earlier kernel of such nodes under
    three conditions. The kernel computes one of the node's operands, directly or through views. A
    node of the kernel has an iteration space or a result with as many elements as the iteration
    space of the joining node. No operand that another kernel computes depends on this kernel,
    because the kernel would then need its own result. If several kernels qualify, the node joins
    the kernel of its first operand among them.
    """
    kernels: list[list[int]] = []
    sizes: list[set[int]] = []
    """For each kernel, the numbers of elements over which it iterates, and those of its results."""
    kernel_of: dict[int, int] = {}
    for index, (node, use) in enumerate(zip(graph.nodes, op_instances(graph), strict=True)):
        if use.row.kind == "view":
            continue
        elements = [graph.type_of(name).elements for name in (*node.inputs, *node.outputs) if name]
        sources = dict.fromkeys(kernel_of[each] for each in _producers(graph, index))
        chosen = len(kernels)
        if use.row.kind in _KINDS:
            fitting = (each for each in sources if max(elements) in sizes[each])
            chosen = next(
                (
                    each
                    for each in fitting
                    if not _depends_on_kernel(graph, sources, each, kernels, kernel_of)
                ),
                chosen,
            )
        if chosen == len(kernels):
            kernels.append([])
            sizes.append(set())
        kernel_of[index] = chosen
        kernels[chosen].append(index)
        if use.row.kind in _KINDS:
            sizes[chosen] |= {
                max(elements),
                *(graph.type_of(name).elements for name in node.outputs if name),
            }
    uses = op_instances(graph)
    return tuple(tuple(each) for each in kernels if len(each) > 1 or uses[each[0]].row.kernels > 1)


def _producers(graph: Graph, index: int) -> Iterator[int]:
    """Yield the nodes whose results a node reads, directly or through views."""
    for name in graph.nodes[index].inputs:
        producer = graph.producer(view_base(graph, name)) if name else None
        if producer is not None:
            yield producer


def _depends_on_kernel(
    graph: Graph,
    sources: Iterable[int],
    kernel: int,
    kernels: Sequence[Sequence[int]],
    of: Mapping[int, int],
) -> bool:
    """True if one of the kernels `sources`, other than `kernel` itself, depends on `kernel`,
    directly or through other kernels.

    `kernels` contains the nodes of each kernel in ascending order, and `of` maps each node to its
    kernel.
    """
    found = {kernel}
    left = [each for each in sources if each != kernel]
    while left:
        each = left.pop()
        if each in found or kernels[each][-1] < kernels[kernel][0]:
            continue
        found.add(each)
        before = {
            of[producer] for node in kernels[each] for producer in _producers(graph, node)
        } - {each}
        if kernel in before:
            return True
        left += before
    return False


def fused_work(graph: Graph, precision: str, work: Sequence[NodeCost]) -> tuple[NodeCost, ...]:
    """Return the work of each node under `torch.compile`, given the nodes' work in eager mode.

    `work` may be that of any number of samples. The bytes of all nodes of a fused kernel are scaled
    by one factor for forward and one for backward, so that they add up to the bytes that the kernel
    moves. Each of n nodes of a kernel gets 1 / n of its launch. The host starts one operator per
    fused kernel, and no operator for a view.
    """
    found = [_with_operators(each, 0.0 if each.kind == "view" else each.operators) for each in work]
    for group, (forward, backward) in zip(
        fused_groups(graph), _moved_fractions(graph, precision), strict=True
    ):
        for index in group:
            found[index] = replace(
                _with_operators(work[index], 1 / len(group)),
                forward_bytes=work[index].forward_bytes * forward,
                backward_bytes=work[index].backward_bytes * backward,
                launches=1 / len(group),
            )
    return tuple(found)


def _with_operators(work: NodeCost, operators: float) -> NodeCost:
    """Return the work with `operators` as the number of operators that the host starts in forward,
    and with the number in backward scaled by the same factor.
    """
    backward = work.backward_operators / work.operators * operators if work.operators else 0.0
    return replace(work, operators=operators, backward_operators=backward)


@memoize(MAX_CACHED_GRAPHS)
def _moved_fractions(graph: Graph, precision: str) -> tuple[tuple[float, float], ...]:
    """Return (forward, backward) of each fused kernel: the bytes that the kernel moves, divided by
    the bytes that its nodes move in eager mode; at most 1.
    """
    work = roofline_costs(graph, precision)
    gradient = differentiable_values(graph)
    widths = element_bytes(graph, precision)
    readers: dict[str, set[int]] = {}
    for index, (node, use) in enumerate(zip(graph.nodes, op_instances(graph), strict=True)):
        if use.row.kind != "view":
            for name in filter(None, node.inputs):
                readers.setdefault(view_base(graph, name), set()).add(index)
    wanted = {view_base(graph, name) for name in graph.outputs}

    def total_bytes(names: Iterable[str]) -> float:
        return float(sum(graph.type_of(name).elements * widths[name] for name in names))

    found = []
    for group in fused_groups(graph):
        own = {name for index in group for name in graph.nodes[index].outputs if name}
        read = {
            view_base(graph, name) for index in group for name in graph.nodes[index].inputs if name
        } - own
        given = {
            name for name in own if name in wanted or not readers.get(name, set()) <= set(group)
        }
        passes = (
            total_bytes(read) + total_bytes(given),
            total_bytes(read) + total_bytes((read | given) & gradient),
        )
        eager = (
            sum(getattr(work[index], f"{way}_bytes") for index in group)
            for way in ("forward", "backward")
        )
        parts = [
            min(1.0, moved / total) if total else 1.0
            for moved, total in zip(passes, eager, strict=True)
        ]
        found.append((parts[0], parts[1]))
    return tuple(found)
