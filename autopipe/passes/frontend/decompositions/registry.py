"""The table of all decompositions by operator, and the function that applies a decomposition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Node
from autopipe.passes.frontend.decompositions import (
    attention,
    classical,
    fused_operators,
    nchwc,
    standard_counterparts,
    weight_only,
)
from autopipe.passes.frontend.decompositions.flex_attention import decompose_flex_attention
from autopipe.passes.frontend.decompositions.quantized import QUANTIZED
from autopipe.passes.frontend.elements import attributes_of
from autopipe.passes.frontend.rewriter import FileRewriter

if TYPE_CHECKING:
    import onnx

MICROSOFT = "com.microsoft"
PREVIEW = "ai.onnx.preview"


class Decomposition(NamedTuple):
    """A function that replaces one node by other nodes. `write` gets the rewriter of the node and
    writes the new nodes with it; if it writes nothing, the node is kept.
    """

    write: Callable[[FileRewriter], None]
    is_typed: bool = False
    """True if `write` uses operators of opset `rewriter.NEWEST`, which the file's opset may lack.
    Such a `write` gives the shapes of all results.
    """


_TYPED = {
    "Attention": attention.decompose_attention,
    "CausalConvWithState": standard_counterparts.decompose_causal_convolution,
    "DecoderMaskedMultiHeadAttention": attention.decompose_decoder_masked_attention,
    "DequantizeLinear": standard_counterparts.decompose_dequantize_linear,
    "GroupQueryAttention": attention.decompose_group_query_attention,
    "LinearAttention": standard_counterparts.decompose_linear_attention,
    "MultiHeadAttention": attention.decompose_multi_head_attention,
    "PackedAttention": attention.decompose_packed_attention,
    "PackedMultiHeadAttention": attention.decompose_packed_multi_head_attention,
    "QuantizeLinear": standard_counterparts.decompose_quantize_linear,
}
_WEIGHT_ONLY = {
    "GatherBlockQuantized": weight_only.decompose_gather_block_quantized,
    "MatMulBnb4": weight_only.decompose_matmul_bnb4,
    "MatMulNBits": weight_only.decompose_matmul_nbits,
}


def _key_by_domain(
    domain: str, table: Mapping[str, Callable[[FileRewriter], None]], is_typed: bool = False
) -> dict[tuple[str, str], Decomposition]:
    """Return {(domain, operator): decomposition} for `table`, which maps each operator of `domain`
    to the function that writes its decomposition. `is_typed` becomes the field of this name of all
    decompositions.
    """
    return {(domain, op): Decomposition(write, is_typed) for op, write in table.items()}


DECOMPOSITIONS: dict[tuple[str, str], Decomposition] = {
    **_key_by_domain(MICROSOFT, _TYPED, is_typed=True),
    **_key_by_domain(MICROSOFT, _WEIGHT_ONLY),
    **_key_by_domain(MICROSOFT, fused_operators.FUSED),
    **_key_by_domain(MICROSOFT, QUANTIZED),
    **_key_by_domain(nchwc.DOMAIN, fused_operators.NCHWC),
    **_key_by_domain(classical.DOMAIN, classical.CLASSICAL),
    (PREVIEW, "FlexAttention"): Decomposition(decompose_flex_attention),
}
"""All decompositions, by (domain, operator)."""


def decomposition_of(node: onnx.NodeProto) -> Decomposition | None:
    """Return the decomposition of a node's operator, None if the operator has none."""
    return DECOMPOSITIONS.get((node.domain, node.op_type))


def node_from_proto(proto: onnx.NodeProto, operands: tuple[str, ...]) -> Node:
    """Convert a node of a file into a `Node` that reads `operands` instead of the operands in the
    file. Attributes that are graphs are omitted.
    """
    plain = type(proto)()
    plain.CopyFrom(proto)
    kept = [each for each in proto.attribute if not each.HasField("g")]
    del plain.attribute[:]
    plain.attribute.extend(kept)
    outputs = tuple(proto.output)
    return Node(proto.name, proto.op_type, operands, outputs, attributes_of(plain), proto.domain)


def decompose(decomposition: Decomposition, rewriter: FileRewriter) -> bool:
    """Write the nodes that replace `rewriter.node`, by `decomposition`. Return False if nothing was
    written and the node is kept.

    Raises ModelError if the operands do not fit the operator or the decomposition does not support
    them.
    """
    try:
        decomposition.write(rewriter)
    except (ArithmeticError, LookupError, ValueError) as error:
        shapes = ", ".join(
            str(rewriter.shape(name)) if name else "absent" for name in rewriter.node.inputs
        )
        raise ModelError(
            f"the operands have the shapes {shapes}, which the operator does not accept",
            where=rewriter.where,
        ) from error
    return not rewriter.is_unchanged
