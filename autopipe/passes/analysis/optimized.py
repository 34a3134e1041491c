"""Parameters as optimizers see them: which are matrices, and what a request says of them that does not hold."""

from __future__ import annotations

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.problem import GROUPS, Optimizer


@remembered(GRAPHS)
def matrices(graph: Graph) -> frozenset[str]:
    """Trained parameters of two dimensions; not tables, whose rows are looked up."""
    tables = {node.inputs[0] for node in graph.nodes if node.op == "Gather"}
    trained = (each.value for each in graph.parameters if each.trainable)
    return frozenset(each.name for each in trained if len(each.shape) == 2 and each.name not in tables)


def check_groups(optimizer: Optimizer, graph: Graph) -> None:
    """Raise ConfigurationError for a group of parameters that has none."""
    names = [each.value.name for each in graph.parameters if each.trainable]
    for each in optimizer.groups:
        alone = Optimizer(groups=(each,))
        if all(alone.group_of(name) is None for name in names):
            hint = "autopipe inspect -v lists their names"
            raise ConfigurationError(f"{GROUPS}: no trained parameter is called {each.match!r}", hint)
