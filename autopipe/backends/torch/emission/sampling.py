"""Emission of operators that sample images at the points of a grid."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter

_MODES = {"linear": "bilinear", "bilinear": "bilinear", "nearest": "nearest", "cubic": "bicubic", "bicubic": "bicubic"}
"""ONNX's words, of both spellings it has had, and torch's."""


def _grid_sample(call: Call) -> str:
    mode = _MODES[call.choice("mode", "linear", _MODES)]
    padding = call.choice("padding_mode", "zeros", ("zeros", "border", "reflection"))
    corners = bool(call.node.integer("align_corners"))
    settings = f"mode={mode!r}, padding_mode={padding!r}, align_corners={corners}"
    return f"F.grid_sample({call.arg(0)}, {call.arg(1)}, {settings})"


def _affine_grid(call: Call) -> str:
    size = call.constant(1)
    assert size is not None, "AffineGrid needs a known size"
    local = (call.operand(0).shape[0], *(int(extent) for extent in size[1:]))
    return f"F.affine_grid({call.arg(0)}, {local}, align_corners={bool(call.node.integer('align_corners'))})"


SAMPLING: dict[str, Emitter] = {"GridSample": _grid_sample, "AffineGrid": _affine_grid}
