"""Why an operator without a row is not supported, told by what it is."""

from __future__ import annotations

import difflib

from autopipe.ir.ops import OPERATORS

_FLOW = "control flow that is not known while reading"
_TEXT = "text, which is prepared before the model"
_OPTIONAL = "optional values"
_DATA = "the shape of its result depends on data"
_CLASSICAL = "classical machine learning"
_OPTIMIZER = "an optimizer within the model: give the model without it, optimizer is a setting of the plan"
_GRADIENT = "training within the model: give the forward model, whose backward is made here"

BY_OPERATOR = {
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), _FLOW),
    **dict.fromkeys(("StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch", "TfIdfVectorizer"), _TEXT),
    **dict.fromkeys(("Optional", "OptionalGetElement", "OptionalHasElement"), _OPTIONAL),
    **dict.fromkeys(("Compress", "NonMaxSuppression", "NonZero", "Unique"), _DATA),
    "ImageDecoder": "images in files, which are read before the model",
    **dict.fromkeys(
        (f"com.microsoft.{name}" for name in ("AdamOptimizer", "AdamWOptimizer", "LambOptimizer", "SGDOptimizerV2")),
        _OPTIMIZER,
    ),
    **dict.fromkeys((f"com.microsoft.{name}" for name in ("BeamSearch", "GreedySearch", "Sampling")), _FLOW),
    "com.microsoft.YieldOp": _GRADIENT,
}
"""By operator, with the domain in front unless it is ONNX's own."""
BY_DOMAIN = {
    "ai.onnx.ml": _CLASSICAL,
    "ai.onnx.preview.training": _OPTIMIZER,
    "ai.onnx.training": _GRADIENT,
    "ai.onnx.contrib": _TEXT,
    "com.microsoft.extensions": _TEXT,
    "com.microsoft.nchwc": "a layout for one CPU: save the model with optimizations up to extended",
    "com.microsoft": "an operator of ONNX Runtime without a row here: give the model as it was before its optimizer",
    "org.pytorch.aten": "a function of torch that its exporter left as it is",
}


def reason_for(operator: str) -> str:
    """Why an operator without a row, with its domain in front, is not supported."""
    import onnx.defs

    domain, _, name = operator.rpartition(".")
    if operator in BY_OPERATOR:
        return BY_OPERATOR[operator]
    if domain == "com.microsoft" and name.endswith("Grad"):
        return _GRADIENT
    if domain:
        return BY_DOMAIN.get(domain, f"a custom operator of domain {domain!r}, which only its makers can compute")
    if onnx.defs.has(name):
        return "an operator of ONNX without a row here"
    near = difflib.get_close_matches(name, [each for each in OPERATORS if "." not in each], n=1)
    return f"ONNX has no such operator{f', did you mean {near[0]!r}?' if near else ''}"
