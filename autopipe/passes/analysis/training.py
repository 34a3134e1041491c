"""Parameters as optimizers see them: which are matrices, what a request says of them that does not
hold, and models that can be trained on batches filled up with samples that count nothing."""

from __future__ import annotations

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import COUNTED_LABELS, Graph, Node
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.ops.normalization import reduction
from autopipe.ir.ops.operator import signature_of
from autopipe.ir.problem import GROUPS, Optimizer
from autopipe.passes.analysis.input_ranges import input_ranges
from autopipe.passes.frontend.loss import LOSSES
from autopipe.passes.frontend.read import mixing_nodes


@remembered(GRAPHS)
def matrices(graph: Graph) -> frozenset[str]:
    """Trained parameters of two dimensions; not tables, whose rows are looked up."""
    tables = {node.inputs[0] for node in graph.nodes if node.op == "Gather"}
    trained = (each.value for each in graph.parameters if each.trainable)
    return frozenset(
        each.name for each in trained if len(each.shape) == 2 and each.name not in tables
    )


def check_groups(optimizer: Optimizer, graph: Graph) -> None:
    """Raise ConfigurationError for a group of parameters that has none."""
    names = [each.value.name for each in graph.parameters if each.trainable]
    for each in optimizer.groups:
        alone = Optimizer(groups=(each,))
        if all(alone.group_of(name) is None for name in names):
            hint = "autopipe inspect -v lists their names"
            raise ConfigurationError(
                f"{GROUPS}: no trained parameter is called {each.match!r}", hint
            )


_SAME = frozenset(["Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"])


def check_padding(graph: Graph, loss: str) -> None:
    """Raise ConfigurationError unless samples whose labels are ignored change neither the loss nor
    a gradient: the loss is the mean of a cross-entropy that ignores labels, which an input holds,
    and nothing else mixes samples.
    """
    node = _producer(graph, loss)
    while node is not None and node.op in _SAME:
        node = _producer(graph, node.inputs[0])
    why = ""
    by_label = graph.has(COUNTED_LABELS)
    if node is None or node.op not in LOSSES:
        made = "an input" if node is None else f"{node.op} {node.name!r}"
        why = f"the loss comes from {made}, which does not ignore labels"
    elif not node.has("ignore_index"):
        why = f"the loss, {node.op} {node.name!r}, has no ignore_index"
    elif (reduction(signature_of(graph, node)) != "mean" and not by_label) or signature_of(
        graph, node
    ).present(2):
        why = f"the loss, {node.op} {node.name!r}, is no plain mean over labels"
    elif not any(
        each.ignored is not None and each.batch_axis is not None for each in input_ranges(graph)
    ):
        why = f"the labels of {node.op} {node.name!r} are no input"
    elif mixing := [
        each
        for each in mixing_nodes(graph)
        if each is not node and not (by_label and each.op in LOSSES)
    ]:
        why = f"{mixing[0].op} {mixing[0].name!r} mixes the samples of a batch"
    if why:
        message = f"samples that fill a batch up would count: {why}"
        raise ConfigurationError(
            message, "leave samples that fill no batch out", "data.last_batch: pad"
        )


def _producer(graph: Graph, name: str) -> Node | None:
    index = graph.producer(name)
    return None if index is None else graph.nodes[index]
