"""Decomposition of FlexAttention (domain ai.onnx.preview) into Q · Kᵀ, softmax and · V. Subgraphs
of the node modify the logits and the probabilities; their nodes are written between these
operators.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autopipe.ir.graph import DType
from autopipe.ir.words import plural
from autopipe.passes.frontend.elements import NUMBERS
from autopipe.passes.frontend.rewriter import FileRewriter

if TYPE_CHECKING:
    import onnx


def decompose_flex_attention(rewriter: FileRewriter) -> None:
    """Decompose FlexAttention: softmax(score_mod(scale · Q Kᵀ)), changed by prob_mod, times V.
    Query heads may share key-value heads. Raises ModelError if the query heads cannot be divided
    among the key heads.
    """
    query, key, value = (rewriter.type_of(rewriter.required(index)) for index in range(3))
    batch, heads, tokens, features = query.shape
    groups, keys = key.shape[1:3]
    rewriter.require(
        groups > 0 and heads % groups == 0,
        f"{heads} {plural(heads, 'query head')} cannot be divided among "
        f"{groups} {plural(groups, 'key head')}",
    )
    precision = DType.FLOAT32 if query.dtype.itemsize < DType.FLOAT32.itemsize else query.dtype
    precision_number = rewriter.node.integer("softmax_precision", NUMBERS[precision])
    scale = rewriter.number(rewriter.node.number("scale", 1 / math.sqrt(features)), DType.FLOAT32)
    # Query heads that share a key head become further rows of one query matrix, so that keys and
    # values need not be repeated.
    grouped = batch, groups, heads // groups * tokens
    queries = rewriter.reshape(query.name, *grouped, features)
    logits = rewriter.add("MatMul", [queries, rewriter.transpose(key.name, 0, 1, 3, 2)])
    logits = rewriter.add("Mul", [logits, rewriter.add("CastLike", [scale, logits])])
    logits = rewriter.reshape(logits, batch, heads, tokens, keys)
    logits = rewriter.add("Cast", [logits], to=precision_number)
    logits = _apply_subgraph(rewriter, "score_mod", logits)
    probabilities = rewriter.add("Softmax", [logits], axis=-1)
    probabilities = _apply_subgraph(rewriter, "prob_mod", probabilities)
    values = rewriter.add("Cast", [value.name], to=precision_number)
    weights = rewriter.reshape(probabilities, *grouped, keys)
    output = rewriter.add("MatMul", [weights, values])
    output = rewriter.add("Cast", [output], to=NUMBERS[value.dtype])
    rewriter.reshape(output, batch, heads, tokens, value.shape[3], result=0)


def _apply_subgraph(rewriter: FileRewriter, attribute: str, operand: str) -> str:
    """Write the nodes of the subgraph in `attribute`, whose input is the value `operand`. Return
    the name of the subgraph's output, or `operand` if the node has no such subgraph. Raises
    ModelError unless the subgraph has one input and one output.
    """
    found = (each.g for each in rewriter.proto.attribute if each.name == attribute)
    graph = next(found, None)
    if graph is None:
        return operand
    rewriter.require(
        len(graph.input) == 1 and len(graph.output) == 1,
        f"the subgraph {attribute!r} does not have exactly one input and one output",
    )
    return _inline_subgraph(rewriter, graph, {graph.input[0].name: operand}, attribute)


def _inline_subgraph(
    rewriter: FileRewriter, graph: onnx.GraphProto, names: dict[str, str], title: str
) -> str:
    """Write the nodes of a subgraph and return the name of its first output.

    Values of the subgraph get new names that contain `title`. `names` maps the inputs of the
    subgraph to existing values and is extended by the new names; any other name that a node reads
    is a value of the surrounding graph.
    """
    import onnx

    inside = [each.name for each in graph.initializer]
    inside += [name for node in graph.node for name in node.output if name]
    names |= {name: f"{rewriter.node.outputs[0]}/{title}/{name}" for name in inside}
    for tensor in graph.initializer:
        rewriter.copy(onnx.helper.make_node("Constant", [], [names[tensor.name]], value=tensor))
    for node in graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{rewriter.node.name}/{title}/{node.name or node.op_type}"
        for field in (copy.input, copy.output):
            field[:] = [names.get(name, name) for name in field]
        rewriter.copy(copy)
    output: str = graph.output[0].name
    return names.get(output, output)
