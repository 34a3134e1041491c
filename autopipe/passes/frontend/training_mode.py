"""Two files of one model, one exported for training and one for evaluation: do they differ in nothing else?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopipe.passes.frontend.load import Source

if TYPE_CHECKING:
    import onnx


def are_one_model(one: Source, other: Source) -> bool:
    """True if two files compute the same where nothing is dropped and BatchNormalization reads running statistics, from
    tensors of the same names. What values in between and nodes are called does not count."""
    if sorted(one.opsets) != sorted(other.opsets) or _interface(one) != _interface(other):
        return False
    return list(_computed(one)) == list(_computed(other))


def _interface(source: Source) -> tuple[list[str], list[str]]:
    return [each.name for each in source.graph.input], [each.name for each in source.graph.output]


def _computed(source: Source) -> Iterator[object]:
    """All that decides on the outputs: nodes with their operands by where these come from, and tensors by name."""
    same: dict[str, str] = {}
    nodes = []
    for node in source.nodes:
        operands = [same.get(name, name) for name in node.input]
        if _is(node, "Dropout") and not any(node.output[1:]):
            same[node.output[0]] = operands[0]
        else:
            nodes.append((node, operands))
    needed = {same.get(each.name, each.name) for each in source.graph.output}
    kept = []
    for node, operands in reversed(nodes):
        if not needed.isdisjoint(_results(node)):
            needed.update(operands)
            kept.append((node, operands))
    places: dict[str, object] = {}
    for number, (node, operands) in enumerate(reversed(kept)):
        yield node.op_type, node.domain, _settings(node), [places.get(name, name) for name in operands]
        places |= {name: (number, index) for index, name in enumerate(_results(node))}
    yield [places.get(same.get(each.name, each.name), each.name) for each in source.graph.output]
    tensors = {each.name: each for each in source.graph.initializer if each.name in needed}
    # Large ones are read without their numbers, which may differ.
    yield sorted((name, each.SerializeToString(deterministic=True)) for name, each in tensors.items())


def _is(node: onnx.NodeProto, operator: str) -> bool:
    return node.op_type == operator and node.domain in ("", "ai.onnx")


def _results(node: onnx.NodeProto) -> list[str]:
    """Without the new statistics that a BatchNormalization gives in training."""
    return list(node.output[:1] if _is(node, "BatchNormalization") else node.output)


def _settings(node: onnx.NodeProto) -> list[bytes]:
    ignored = {"training_mode"} if _is(node, "BatchNormalization") else set()
    return sorted(each.SerializeToString(deterministic=True) for each in node.attribute if each.name not in ignored)
