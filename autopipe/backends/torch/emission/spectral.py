"""Emission of Fourier transforms and determinants."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter
from autopipe.ir.ops.elementwise import transformed_axis


def _dft(call: Call) -> str:
    axis = transformed_axis(call.signature)
    settings = [call.arg(0), str(axis)]
    if call.present(1):
        settings.append(f"length={call.scalar(1)}")
    settings += [f"{name}=True" for name in ("inverse", "onesided") if call.node.integer(name)]
    return f"operators.dft({', '.join(settings)})"


def _stft(call: Call) -> str:
    window = call.optional(2)
    length = call.scalar(3) if call.present(3) else str(call.operand(2).shape[0])
    onesided = bool(call.node.integer("onesided", 1))
    return f"operators.stft({call.arg(0)}, {call.scalar(1)}, {window}, {length}, onesided={onesided})"


SPECTRAL: dict[str, Emitter] = {
    "DFT": _dft,
    "STFT": _stft,
    "Det": lambda call: f"torch.linalg.det({call.arg(0)})",
}
