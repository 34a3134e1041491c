"""Costs of compiled operators: elementwise ones and the reductions next to them are one pass over
memory and one launch (Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python
Bytecode Transformation and Graph Compilation", ASPLOS 2024, section 4.2).

A group reads what comes from outside of it once and writes what others read; its backward reads the
same again, and computes what lies between anew. A stage's border or an exchange inside a group
parts it, which is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopipe.ir.graph import Graph
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.problem import Work
from autopipe.passes.analysis.gradients import differentiable_values, viewed
from autopipe.passes.analysis.operators import element_bytes, uses_of
from autopipe.passes.cost.roofline import annotate

_KINDS = frozenset({"elementwise", "reduction", "normalization"})


@remembered(GRAPHS)
def fused_groups(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The nodes of each kernel that computes several of them, ascending, views between them left
    out.

    A node joins the first kernel that it reads from and that runs over as many elements, or over
    the rows of them that a reduction leaves, unless it also reads what depends on that kernel in
    another way.
    """
    kernels: list[list[int]] = []
    sizes: list[set[int]] = []
    """Elements that a kernel runs over, and that its reductions leave."""
    kernel_of: dict[int, int] = {}
    for index, (node, use) in enumerate(zip(graph.nodes, uses_of(graph), strict=True)):
        if use.row.kind == "view":
            continue
        elements = [graph.type_of(name).elements for name in (*node.inputs, *node.outputs) if name]
        sources = dict.fromkeys(kernel_of[each] for each in _producers(graph, index))
        chosen = len(kernels)
        if use.row.kind in _KINDS:
            fitting = (each for each in sources if max(elements) in sizes[each])
            chosen = next(
                (each for each in fitting if not _depend(graph, sources, each, kernels, kernel_of)),
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
    uses = uses_of(graph)
    return tuple(tuple(each) for each in kernels if len(each) > 1 or uses[each[0]].row.kernels > 1)


def _producers(graph: Graph, index: int) -> Iterator[int]:
    """The nodes whose results a node reads, whole or through views."""
    for name in graph.nodes[index].inputs:
        producer = graph.producer(viewed(graph, name)) if name else None
        if producer is not None:
            yield producer


def _depend(
    graph: Graph,
    sources: Iterable[int],
    kernel: int,
    kernels: Sequence[Sequence[int]],
    of: Mapping[int, int],
) -> bool:
    """True if another one of `sources` depends on `kernel`."""
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


def fused(graph: Graph, precision: str, work: Sequence[Work]) -> tuple[Work, ...]:
    """Return the work of every node, of any number of the graph's samples, as a part of its
    kernel's work.

    A node moves its part of the kernel's bytes and starts an equal part of the kernel. A compiled
    kernel is one operator of the host, and compiled views are none.
    """
    found = [_started(each, 0.0 if each.kind == "view" else each.operators) for each in work]
    for group, (forward, backward) in zip(
        fused_groups(graph), _moved(graph, precision), strict=True
    ):
        for index in group:
            found[index] = replace(
                _started(work[index], 1 / len(group)),
                forward_bytes=work[index].forward_bytes * forward,
                backward_bytes=work[index].backward_bytes * backward,
                launches=1 / len(group),
            )
    return tuple(found)


def _started(work: Work, operators: float) -> Work:
    """Return the work with `operators` operators that the host starts forward, and as many in
    proportion backward.
    """
    backward = work.backward_operators / work.operators * operators if work.operators else 0.0
    return replace(work, operators=operators, backward_operators=backward)


@remembered(GRAPHS)
def _moved(graph: Graph, precision: str) -> tuple[tuple[float, float], ...]:
    """For each group the parts of its nodes' own bytes, of forward and of backward, that it moves
    as one kernel.
    """
    work = annotate(graph, precision)
    gradient = differentiable_values(graph)
    widths = element_bytes(graph, precision)
    readers: dict[str, set[int]] = {}
    for index, (node, use) in enumerate(zip(graph.nodes, uses_of(graph), strict=True)):
        if use.row.kind != "view":
            for name in filter(None, node.inputs):
                readers.setdefault(viewed(graph, name), set()).add(index)
    wanted = {viewed(graph, name) for name in graph.outputs}

    def size(names: Iterable[str]) -> float:
        return float(sum(graph.type_of(name).elements * widths[name] for name in names))

    found = []
    for group in fused_groups(graph):
        own = {name for index in group for name in graph.nodes[index].outputs if name}
        read = {
            viewed(graph, name) for index in group for name in graph.nodes[index].inputs if name
        } - own
        given = {
            name for name in own if name in wanted or not readers.get(name, set()) <= set(group)
        }
        passes = size(read) + size(given), size(read) + size((read | given) & gradient)
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
