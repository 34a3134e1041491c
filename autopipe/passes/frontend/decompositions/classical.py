"""Decompositions of operators of domain ai.onnx.ml: those that skl2onnx writes before and after a
neural network.
"""

from __future__ import annotations

from collections.abc import Callable

from autopipe.ir.graph import DType
from autopipe.passes.frontend.rewriter import FileRewriter

DOMAIN = "ai.onnx.ml"


def _decompose_scaler(rewriter: FileRewriter) -> None:
    """Decompose Scaler: (x − offset) · scale, in float32."""
    node = rewriter.node
    x = rewriter.cast(rewriter.required(0), DType.FLOAT32)
    centred = rewriter.add("Sub", [x, rewriter.floats(*node.numbers("offset"))])
    rewriter.add("Mul", [centred, rewriter.floats(*node.numbers("scale"))], result=0)


def _decompose_array_feature_extractor(rewriter: FileRewriter) -> None:
    """Decompose ArrayFeatureExtractor: a Gather of elements along the last axis. An operand that is
    a vector becomes a matrix of one row.
    """
    x = rewriter.required(0)
    shape = rewriter.shape(x)
    x = x if len(shape) > 1 else rewriter.reshape(x, 1, *shape)
    indices = rewriter.required(1)
    flat = rewriter.reshape(indices, rewriter.type_of(indices).elements)
    rewriter.add("Gather", [x, flat], axis=-1, result=0)


def _decompose_linear_regressor(rewriter: FileRewriter) -> None:
    """Decompose LinearRegressor: x · coefficientsᵀ + intercepts, in float32. Raises ModelError if
    the node has a `post_transform`.
    """
    node = rewriter.node
    transform = node.text("post_transform", "NONE")
    rewriter.require(transform == "NONE", f"post_transform={transform} is not supported")
    targets = node.integer("targets", 1)
    coefficients = node.numbers("coefficients")
    operands = [
        rewriter.cast(rewriter.required(0), DType.FLOAT32),
        rewriter.reshape(
            rewriter.floats(*coefficients), targets, len(coefficients) // max(targets, 1)
        ),
    ]
    if node.has("intercepts"):
        operands.append(rewriter.floats(*node.numbers("intercepts")))
    rewriter.add("Gemm", operands, transB=1, result=0)


CLASSICAL: dict[str, Callable[[FileRewriter], None]] = {
    "ArrayFeatureExtractor": _decompose_array_feature_extractor,
    "LinearRegressor": _decompose_linear_regressor,
    "Scaler": _decompose_scaler,
}
"""Decompositions of domain ai.onnx.ml, by operator."""
