"""Emission of operators that draw numbers."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter, torch_dtype
from autopipe.ir.graph import DType
from autopipe.ir.ops.elementwise import is_active


def _dropout(call: Call) -> str:
    data = call.arg(0)
    both = len(call.signature.results) > 1
    mask = call.signature.results[1] if both else None
    ratio = _ratio(call)
    if not is_active(call.signature) or ratio == "0.0":
        return f"({data}, torch.ones_like({data}, dtype={_mask_type(call)}))" if both else data
    words = [data, ratio, call.stream()]
    if call.present(2) and call.constant(2) is None:
        words.append(f"training={call.arg(2)}")
    if not both:
        return f"operators.dropout({', '.join(words)})"
    if mask is not None and mask.dtype is not DType.BOOL:
        words.append(f"mask={torch_dtype(mask.dtype)}")
    return f"operators.dropout_and_mask({', '.join(words)})"


def _mask_type(call: Call) -> str:
    mask = call.signature.results[1]
    return torch_dtype(DType.BOOL if mask is None else mask.dtype)


def _ratio(call: Call) -> str:
    """A number where it is known: an attribute before opset 12, then an operand."""
    if call.opset < 12 or not call.present(1):
        return call.stated("ratio", 0.5)
    return call.scalar(1) or call.arg(1)


def _bernoulli(call: Call) -> str:
    return f"operators.bernoulli({call.arg(0)}, {call.stream()}, {torch_dtype(call.result().dtype)})"


def _uniform(call: Call) -> str:
    return _made(call, "uniform", call.stated("low", 0.0), call.stated("high", 1.0))


def _normal(call: Call) -> str:
    return _made(call, "normal", call.stated("mean", 0.0), call.stated("scale", 1.0))


def _made(call: Call, function: str, *settings: str) -> str:
    result = call.result()
    return f"operators.{function}({result.shape}, {', '.join(settings)}, {call.stream()}, {torch_dtype(result.dtype)})"


def _multinomial(call: Call) -> str:
    count, dtype = call.result().shape[1], torch_dtype(call.result().dtype)
    return f"operators.multinomial({call.arg(0)}, {count}, {call.stream()}, {dtype})"


RANDOM: dict[str, Emitter] = {
    "Dropout": _dropout,
    "Bernoulli": _bernoulli,
    "RandomUniform": _uniform,
    "RandomUniformLike": _uniform,
    "RandomNormal": _normal,
    "RandomNormalLike": _normal,
    "Multinomial": _multinomial,
}
