"""Emission of operators that put elements elsewhere."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter
from autopipe.backends.torch.emission.regroup import reshaped, shape_arguments
from autopipe.ir.ops.movement import joined_axis, padding, permutation, slices


def _transpose(call: Call) -> str:
    order = permutation(call.signature)
    moved = [axis for axis, source in enumerate(order) if axis != source]
    if not moved:
        return call.arg(0)
    if len(moved) == 2:
        return f"{call.arg(0)}.transpose({moved[0]}, {moved[1]})"
    return f"{call.arg(0)}.permute({', '.join(map(str, order))})"


def _expand(call: Call) -> str:
    if call.operand(0).shape == call.result().shape:
        return call.arg(0)
    return f"{call.arg(0)}.expand({shape_arguments(call.result().shape)})"


def _concat(call: Call) -> str:
    if len(call.codes) == 1:
        return call.arg(0)
    parts = ", ".join(call.arg(index) for index in range(len(call.codes)))
    return f"torch.cat([{parts}], dim={joined_axis(call.signature)})"


def _split(call: Call) -> str:
    axis = joined_axis(call.signature)
    if len(call.signature.results) == 1:
        return call.arg(0)
    total = call.operand(0).shape[axis]
    sizes = [value.shape[axis] if value is not None else -1 for value in call.signature.results]
    if -1 in sizes:
        array = call.constant(1)
        stated = call.node.integers("split") if array is None else tuple(int(size) for size in array)
        sizes = list(stated) or [-(-total // len(sizes))] * (len(sizes) - 1)
        sizes += [total - sum(sizes)] * (not stated)
    even = sizes[0] > 0 and len(set(sizes[:-1])) == 1 and 0 < sizes[-1] <= sizes[0]
    return f"torch.split({call.arg(0)}, {sizes[0] if even else sizes}, dim={axis})"


def _slice(call: Call) -> str:
    taken = slices(call.signature)
    shape = call.operand(0).shape
    reversed_axes = [axis for axis, (_, count, step) in enumerate(taken) if step < 0 and count]
    parts = [_range(*each, extent) for each, extent in zip(taken, shape, strict=True)]
    while parts and parts[-1] == ":":
        parts.pop()
    code = call.arg(0)
    if reversed_axes:
        code = f"{code}.flip({', '.join(map(str, reversed_axes))})"
    return f"{code}[{', '.join(parts)}]" if parts else code


def _range(start: int, count: int, step: int, extent: int) -> str:
    """Code of one dimension's slice; where the step is negative, of the dimension turned round."""
    if not count:
        return "0:0"
    if step < 0:
        start, step = extent - 1 - start, -step
    if (start, count, step) == (0, extent, 1):
        return ":"
    stop = start + (count - 1) * step + 1
    to_end = len(range(start, extent, step)) == count
    return f"{start or ''}:{'' if to_end else stop}" + (f":{step}" if step > 1 else "")


def _pad(call: Call) -> str:
    pads = padding(call.signature)
    mode = call.choice("mode", "constant", ("constant", "reflect", "edge", "wrap"))
    if all(pair == (0, 0) for pair in pads):
        return call.arg(0)
    if mode != "constant":
        return f'operators.pad({call.arg(0)}, {pads}, "{mode}")'
    if call.opset < 11:
        value = call.stated("value", 0.0)
    else:
        value = call.scalar(2) or "0"
    return padded(call.arg(0), pads, value)


def padded(code: str, pads: tuple[tuple[int, int], ...], value: str = "0") -> str:
    """`F.pad(x, (left, right, top, bottom))`: torch counts from the last dimension."""
    inner = list(pads)
    while inner and inner[0] == (0, 0):
        inner.pop(0)
    flat = tuple(count for pair in reversed(inner) for count in pair)
    ending = "" if value in ("0", "0.0") else f", value={value}"
    return f"F.pad({code}, {flat}{ending})" if flat else code


def _tile(call: Call) -> str:
    repeats = call.constant(1)
    assert repeats is not None, "Tile needs known repeats"
    return f"{call.arg(0)}.repeat({shape_arguments(tuple(int(each) for each in repeats))})"


def _center_crop_pad(call: Call) -> str:
    """Crops where the target is smaller (the surplus cell comes off the end), pads where it is larger."""
    before, after = call.operand(0).shape, call.result().shape
    parts, pads = [], []
    for extent, target in zip(before, after, strict=True):
        start = max(0, (extent - target) // 2)
        parts.append(_range(start, min(extent, target), 1, extent))
        missing = max(0, target - extent)
        pads.append((missing // 2, missing - missing // 2))
    cut = f"{call.arg(0)}[{', '.join(parts)}]" if any(part != ":" for part in parts) else call.arg(0)
    return padded(cut, tuple(pads))


def _depth_to_space(call: Call) -> str:
    block = call.node.integer("blocksize")
    if call.choice("mode", "DCR", ("DCR", "CRD")) == "CRD":
        return f"F.pixel_shuffle({call.arg(0)}, {block})"
    batch, channels, height, width = call.operand(0).shape
    split = reshaped(call.arg(0), (batch, block, block, channels // block**2, height, width))
    return reshaped(f"{split}.permute(0, 3, 4, 1, 5, 2)", call.result().shape)


def _space_to_depth(call: Call) -> str:
    block = call.node.integer("blocksize")
    if call.choice("mode", "DCR", ("DCR", "CRD")) == "CRD":
        return f"F.pixel_unshuffle({call.arg(0)}, {block})"
    batch, channels, height, width = call.operand(0).shape
    split = reshaped(call.arg(0), (batch, channels, height // block, block, width // block, block))
    return reshaped(f"{split}.permute(0, 3, 5, 1, 2, 4)", call.result().shape)


def _reverse_sequence(call: Call) -> str:
    time, batch = call.node.integer("time_axis"), call.node.integer("batch_axis", 1)
    return f"operators.reverse_sequence({call.arg(0)}, {call.arg(1)}, {time}, {batch})"


def _trilu(call: Call) -> str:
    function = "torch.triu" if call.node.integer("upper", 1) else "torch.tril"
    rank = len(call.operand(0).shape)
    diagonal = call.scalar(1) or "0"
    for axis, sign in ((rank - 2, "+"), (rank - 1, "-")):
        if call.is_split(f"d{axis}"):
            diagonal += f" {sign} {call.group(f'd{axis}')}.position * {call.operand(0).shape[axis]}"
    return f"{function}({call.arg(0)}, {diagonal})"


def _compress(call: Call) -> str:
    axis = str(joined_axis(call.signature)) if call.node.has("axis") else "None"
    return f"operators.compress({call.arg(0)}, {call.arg(1)}, {axis})"


def _col2im(call: Call) -> str:
    image, block = call.constant(1), call.constant(2)
    assert image is not None and block is not None, "Col2Im needs known shapes"
    rank = len(block)
    settings = {
        "dilations": call.node.integers("dilations", (1,) * rank),
        "strides": call.node.integers("strides", (1,) * rank),
        "pads": call.node.integers("pads", (0,) * (2 * rank)),
    }
    sizes = f"{tuple(image.tolist())}, {tuple(block.tolist())}"
    return f"operators.col2im({call.arg(0)}, {sizes}, {', '.join(f'{key}={value}' for key, value in settings.items())})"


MOVEMENT: dict[str, Emitter] = {
    "Identity": lambda call: call.arg(0),
    "Transpose": _transpose,
    "Expand": _expand,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Pad": _pad,
    "Tile": _tile,
    "CenterCropPad": _center_crop_pad,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "ReverseSequence": _reverse_sequence,
    "Trilu": _trilu,
    "Compress": _compress,
    "Col2Im": _col2im,
}
