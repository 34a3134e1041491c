"""Reasons why operators without a definition are not supported."""

from __future__ import annotations

_FLOW = "control flow that is not known while reading"
_TEXT = "text, which is prepared before the model"
_OPTIONAL = "optional values"
_DATA = "the shape of its result depends on data"
_CLASSICAL = "classical machine learning"
_OPTIMIZER = (
    "an optimizer within the model: give the model without it, optimizer is a setting of the plan"
)
GRADIENT = "training within the model: give the forward model, whose backward is made here"

REASONS = {
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), _FLOW),
    **dict.fromkeys(
        ("StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch", "TfIdfVectorizer"),
        _TEXT,
    ),
    **dict.fromkeys(("Optional", "OptionalGetElement", "OptionalHasElement"), _OPTIONAL),
    **dict.fromkeys(("Compress", "NonZero", "Unique"), _DATA),
    "ImageDecoder": "images in files, which are read before the model",
    **dict.fromkeys(
        (
            f"com.microsoft.{name}"
            for name in ("AdamOptimizer", "AdamWOptimizer", "LambOptimizer", "SGDOptimizerV2")
        ),
        _OPTIMIZER,
    ),
    **dict.fromkeys(
        (f"com.microsoft.{name}" for name in ("BeamSearch", "GreedySearch", "Sampling")), _FLOW
    ),
    "com.microsoft.YieldOp": GRADIENT,
}
"""Reason why an operator is not supported, by the name of the operator. The name includes the
domain, except for ONNX's default domain.
"""
REASONS_BY_DOMAIN = {
    "ai.onnx.ml": _CLASSICAL,
    "ai.onnx.preview.training": _OPTIMIZER,
    "ai.onnx.training": GRADIENT,
    "ai.onnx.contrib": _TEXT,
    "com.microsoft.extensions": _TEXT,
    "com.microsoft": (
        "an operator of ONNX Runtime that autopipe does not define: give the model as it was "
        "before its optimizer"
    ),
    "org.pytorch.aten": "a function of torch that its exporter left as it is",
}
