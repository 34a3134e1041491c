"""What of a graph is trained: only what gradients reach, listed with the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from autopipe.ir.graph import Graph
from autopipe.ir.ops import operator_of
from autopipe.passes.frontend.model import Tensor

if TYPE_CHECKING:
    from autopipe.passes.frontend.apart import Apart
    from autopipe.passes.frontend.parameters import Role

UNREACHED = "no gradient reaches it"
NAMED = 3
"""Tensors that a warning names before the rest is only counted."""


def only_reached(graph: Graph, loss: str) -> Graph:
    """The graph with those parameters not trained whose change cannot change `loss` a little."""
    reached = {loss}
    for node in reversed(graph.nodes):
        row = operator_of(node)
        if not reached.isdisjoint(node.outputs) and (row is None or row.differentiable):
            reached.update(name for name in node.inputs if name and graph.type_of(name).dtype.is_floating)
    kept = tuple(
        replace(each, trainable=False) if each.trainable and each.value.name not in reached else each
        for each in graph.parameters
    )
    return graph if kept == graph.parameters else replace(graph, parameters=kept)


def tensors_of(graph: Graph, roles: Mapping[str, Role]) -> tuple[Tensor, ...]:
    """The file's floating-point tensors that `graph` reads, scalars of no module left out."""
    found = []
    for each in graph.parameters:
        role = roles.get(each.value.name)
        if role is not None and each.value.dtype.is_floating:
            lost = role.trained and not each.trainable
            why, doubtful = (UNREACHED, False) if lost else (role.why, role.doubtful)
            found.append(Tensor(each.value, each.trainable, why, doubtful))
    for constant in graph.constants:
        role = roles.get(constant.value.name)
        if role is not None and constant.value.elements > 1:
            found.append(Tensor(constant.value, False, role.why, role.doubtful))
    return tuple(found)


def trained_warnings(tensors: tuple[Tensor, ...], apart: Apart) -> tuple[str, ...]:
    """What to say of tensors whose role the file does not settle."""
    known = {each.value.name for each in tensors}
    split = [name for name in apart.doubtful if name in known]
    trained = [each.value.name for each in tensors if each.doubtful and each.trained]
    kept = [each.value.name for each in tensors if each.doubtful and not each.trained]
    told = (
        (trained, "trained, though nothing in the file says so; model.frozen decides"),
        (kept, "not trained, though nothing in the file says so; model.trainable decides"),
        (split, "trained apart from others whose numbers are equal: exporters merge such parameters"),
    )
    return tuple(f"{_named(names)}: {what}" for names, what in told if names)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(map(repr, names[:NAMED]))}{more}"
