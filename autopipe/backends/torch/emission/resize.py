"""Emission of Resize and Upsample: `F.interpolate` where it computes the same, else the runtime's own."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.backends.torch.emission.call import Call, Emitter, literal, number
from autopipe.ir.graph import DType
from autopipe.ir.ops.movement import ResizedAxis, resized_axes

_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}


@dataclass(frozen=True, slots=True)
class _Settings:
    """Attributes with the defaults of their opset; before opset 11 there was one rule for places."""

    mode: str
    places: str
    rounding: str
    is_plain: bool
    """No attribute asks for what `F.interpolate` lacks."""


def _settings(call: Call) -> _Settings:
    node = call.node
    early = node.op == "Upsample" or call.opset < 11
    places = node.text("coordinate_transformation_mode", "asymmetric" if early else "half_pixel")
    rounding = node.text("nearest_mode", "floor" if early else "round_prefer_floor")
    plain = not node.integer("antialias") and not node.integer("exclude_outside")
    plain = plain and node.number("cubic_coeff_a", -0.75) == -0.75
    return _Settings(node.text("mode", "nearest"), places, rounding, plain)


def _emit(call: Call) -> str:
    axes, settings = resized_axes(call.signature), _settings(call)
    if not axes:
        return call.arg(0)
    fused = _interpolate(call, axes, settings)
    return fused if fused is not None else _general(call, axes, settings)


def _interpolate(call: Call, axes: tuple[ResizedAxis, ...], settings: _Settings) -> str | None:
    """A call of `F.interpolate`, or None where it computes something else."""
    shape = call.operand(0).shape
    exact = all(each.axis > 1 and each.scale == each.result / each.source for each in axes)
    floating = call.operand(0).dtype in (DType.FLOAT32, DType.FLOAT64)
    if not (exact and floating and settings.is_plain and len(shape) in _LINEAR):
        return None
    size = call.result().shape[2:]
    if settings.mode == "nearest":
        whole = all(each.scale == int(each.scale) for each in axes)
        rounds = settings.places == "half_pixel" and settings.rounding.startswith("round")
        floors = settings.places == "asymmetric" and settings.rounding == "floor"
        return f"F.interpolate({call.arg(0)}, {size})" if whole and (rounds or floors) else None
    if settings.mode == "cubic" and len(shape) != 4:
        return None
    mode = "bicubic" if settings.mode == "cubic" else _LINEAR[len(shape)]
    centred = settings.places == "half_pixel" or (settings.places == "pytorch_half_pixel" and min(size) > 1)
    if centred:
        return f"F.interpolate({call.arg(0)}, {size}, mode={mode!r})"
    if settings.places == "align_corners":
        return f"F.interpolate({call.arg(0)}, {size}, mode={mode!r}, align_corners=True)"
    return None


def _general(call: Call, axes: tuple[ResizedAxis, ...], settings: _Settings) -> str:
    node = call.node
    words = [call.arg(0), _axes_code(axes), repr(settings.mode), repr(settings.places)]
    if settings.mode == "nearest":
        words.append(f"rounding={settings.rounding!r}")
    if settings.mode == "cubic":
        words.append(f"coefficient={call.stated('cubic_coeff_a', -0.75)}")
    words += [f"{name}=True" for name in ("antialias", "exclude_outside") if node.integer(name)]
    if settings.places == "tf_crop_and_resize":
        words.append(f"outside={number(node.number('extrapolation_value'))}")
    return f"operators.resize({', '.join(words)})"


def _axes_code(axes: tuple[ResizedAxis, ...]) -> str:
    entries = [
        f"({each.axis}, {each.result}, {literal(each.scale)}, {literal(each.region[0])}, {literal(each.region[1])})"
        for each in axes
    ]
    return f"[{', '.join(entries)}]"


RESIZE: dict[str, Emitter] = {"Resize": _emit, "Upsample": _emit}
