"""Properties of a graph that a request to train depends on: which parameters are matrices (for the
optimizer Muon), whether each parameter group matches a parameter, and whether the last batch can be
padded with samples that have ignored labels.
"""

from __future__ import annotations

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import COUNTED_LABELS, Graph, Node
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.ops import is_label_loss, operator_of, operators_with
from autopipe.ir.ops.normalization import loss_reduction
from autopipe.ir.ops.operator import signature_of
from autopipe.ir.problem import PARAMETER_GROUPS_KEY, Optimizer
from autopipe.passes.analysis.input_ranges import input_ranges
from autopipe.passes.frontend.read import mixing_nodes


@memoize(MAX_CACHED_GRAPHS)
def matrix_parameters(graph: Graph) -> frozenset[str]:
    """Return the names of the trainable parameters with two dimensions, except embedding tables."""
    tables = {
        node.inputs[0]
        for node in graph.nodes
        if (row := operator_of(node)) is not None and row.lookup
    }
    trained = (each.value for each in graph.parameters if each.trainable)
    return frozenset(
        each.name for each in trained if len(each.shape) == 2 and each.name not in tables
    )


def check_parameter_groups(optimizer: Optimizer, graph: Graph) -> None:
    """Raise ConfigurationError if a parameter group of the optimizer matches no trainable
    parameter.
    """
    names = [each.value.name for each in graph.parameters if each.trainable]
    for each in optimizer.groups:
        alone = Optimizer(groups=(each,))
        if all(alone.group_of(name) is None for name in names):
            hint = "list the names with autopipe inspect -v"
            raise ConfigurationError(
                f"{PARAMETER_GROUPS_KEY}: no trainable parameter matches {each.match!r}", hint
            )


_SAME = operators_with(lambda row: row.same_elements) | {"Cast"}


def check_padding(graph: Graph, loss: str) -> None:
    """Raise ConfigurationError unless samples with ignored labels, which pad the last batch, change
    neither the loss nor a gradient.

    This holds if the loss is the unweighted mean of a cross-entropy with an `ignore_index`, its
    labels are an input, and no other node mixes samples. If the graph counts labels
    (`COUNTED_LABELS`), the loss may be a sum, and other cross-entropies may mix samples.
    """
    node = _producing_node(graph, loss)
    while node is not None and node.op in _SAME:
        node = _producing_node(graph, node.inputs[0])
    why = ""
    by_label = graph.has(COUNTED_LABELS)
    if node is None or not is_label_loss(node):
        origin = "an input" if node is None else f"{node.op} {node.name!r}"
        why = f"the loss is computed by {origin}, which does not ignore labels"
    elif not node.has("ignore_index"):
        why = f"the loss, {node.op} {node.name!r}, has no ignore_index"
    elif (loss_reduction(signature_of(graph, node)) != "mean" and not by_label) or signature_of(
        graph, node
    ).present(2):
        why = f"the loss, {node.op} {node.name!r}, is not an unweighted mean over labels"
    elif not any(
        each.ignored is not None and each.batch_axis is not None for each in input_ranges(graph)
    ):
        why = f"the labels of {node.op} {node.name!r} are not an input"
    elif mixing := [
        each
        for each in mixing_nodes(graph)
        if each is not node and not (by_label and is_label_loss(each))
    ]:
        why = f"{mixing[0].op} {mixing[0].name!r} mixes the samples of a batch"
    if why:
        message = f"the samples that pad the last batch would change the loss because {why}"
        raise ConfigurationError(message, "set data.last_batch to drop", "data.last_batch: pad")


def _producing_node(graph: Graph, name: str) -> Node | None:
    """Return the node that computes the value `name`, None for inputs, parameters and constants."""
    index = graph.producer(name)
    return None if index is None else graph.nodes[index]
