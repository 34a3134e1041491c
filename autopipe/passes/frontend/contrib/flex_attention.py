"""FlexAttention (ai.onnx.preview) spelled out: the subgraphs that change scores and probabilities
stand between a product, a softmax and a product.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType
from autopipe.ir.words import plural
from autopipe.passes.frontend.contrib.spelling import Spelling
from autopipe.passes.frontend.elements import NUMBERS

if TYPE_CHECKING:
    import onnx


def flex_attention(spelling: Spelling) -> None:
    query, key, value = (spelling.type(index) for index in range(3))
    samples, heads, tokens, size = query.shape
    groups, keys = key.shape[1:3]
    if groups == 0 or heads % groups:
        raise ValueError(f"{heads} {plural(heads, 'head')} of queries do not share {groups}")
    dtype = query.dtype
    precise = NUMBERS[DType.FLOAT32 if dtype.itemsize < DType.FLOAT32.itemsize else dtype]
    precise = spelling.integer("softmax_precision", precise)
    scale = spelling.number("scale", 1 / math.sqrt(size))
    # Query heads that share keys stand side by side as queries.
    rows = samples, groups, heads // groups * tokens
    queries = spelling.shaped(spelling.operand(0), *rows, size)
    scores = spelling.add(
        "MatMul", queries, spelling.add("Transpose", spelling.operand(1), perm=[0, 1, 3, 2])
    )
    scores = spelling.add(
        "Mul", scores, spelling.add("CastLike", spelling.add("Constant", value_float=scale), scores)
    )
    scores = spelling.add("Cast", spelling.shaped(scores, samples, heads, tokens, keys), to=precise)
    probabilities = spelling.add("Softmax", _changed(spelling, "score_mod", scores), axis=-1)
    probabilities = _changed(spelling, "prob_mod", probabilities)
    values = spelling.add("Cast", spelling.operand(2), to=precise)
    result = spelling.add("MatMul", spelling.shaped(probabilities, *rows, keys), values)
    result = spelling.add("Cast", result, to=NUMBERS[value.dtype])
    shape = spelling.integers(samples, heads, tokens, value.shape[3])
    spelling.add("Reshape", result, shape, result=0)


def _changed(spelling: Spelling, name: str, operand: str) -> str:
    """A value as the subgraph that attribute `name` holds changes it; itself where there is
    none.
    """
    graph = next((each.g for each in spelling.node.attribute if each.name == name), None)
    if graph is None:
        return operand
    if len(graph.input) != 1 or len(graph.output) != 1:
        raise ModelError(
            f"{name!r} does not take and give one tensor", where=repr(spelling.node.name)
        )
    return _inlined(spelling, graph, {graph.input[0].name: operand}, name)


def _inlined(spelling: Spelling, graph: onnx.GraphProto, names: dict[str, str], title: str) -> str:
    """Add a subgraph's nodes with values named apart, but for those of `names` and of the graph
    around it; the name of its first output.
    """
    import onnx

    inside = [each.name for each in graph.initializer]
    inside += [name for node in graph.node for name in node.output if name]
    names |= {name: f"{spelling.node.output[0]}/{title}/{name}" for name in inside}
    for tensor in graph.initializer:
        spelling.nodes.append(
            onnx.helper.make_node("Constant", [], [names[tensor.name]], value=tensor)
        )
    for node in graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{spelling.node.name}/{title}/{node.name or node.op_type}"
        for field in (copy.input, copy.output):
            field[:] = [names.get(name, name) for name in field]
        spelling.nodes.append(copy)
    output: str = graph.output[0].name
    return names.get(output, output)
