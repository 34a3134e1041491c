"""Emission of pooled regions."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter


def _roi_align(call: Call) -> str:
    node = call.node
    half_pixel = node.text("coordinate_transformation_mode", "half_pixel" if call.opset >= 16 else "output_half_pixel")
    words = [
        *(call.arg(index) for index in range(3)),
        f"size={call.result().shape[2:]}",
        f"samples={node.integer('sampling_ratio')}",
        f"scale={call.stated('spatial_scale', 1.0)}",
        f"half_pixel={half_pixel == 'half_pixel'}",
        f"largest={node.text('mode', 'avg') == 'max'}",
    ]
    return f"operators.roi_align({', '.join(words)})"


REGIONS: dict[str, Emitter] = {"RoiAlign": _roi_align}
