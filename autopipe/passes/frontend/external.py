"""Tensors whose numbers lie in another file: checked, never opened while planning."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import FileSlice
from autopipe.passes.frontend.elements import dtype_of

if TYPE_CHECKING:
    import onnx


def external_slice(tensor: onnx.TensorProto, folder: Path) -> FileSlice | None:
    """Where an external tensor lies; None where its file is not there.

    Raises ModelError for a path that leaves `folder` (absolute, `..`, a link), for one that is no file, and for a
    file too short for the tensor.
    """
    where = f"tensor {tensor.name!r}"
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    path = PurePosixPath(location)
    if not location or "\0" in location or "\\" in location or path.is_absolute() or ".." in path.parts:
        raise ModelError(f"its data may not lie in {location!r}, only inside the model's folder", where=where)
    if Path(location).drive:
        raise ModelError(f"its data may not lie on another drive: {location!r}", where=where)
    file = folder / location
    if not file.resolve().is_relative_to(folder.resolve()):
        raise ModelError(f"its data file {location!r} is a link that leaves the model's folder", where=where)
    size = math.prod(tensor.dims) * dtype_of(tensor.data_type, where).itemsize
    offset, length = _number(entries, "offset", 0, where), _number(entries, "length", size, where)
    if length < size:
        raise ModelError(f"its data has {length} bytes, its shape needs {size}", where=where)
    if not file.exists():
        return None
    if not file.is_file():
        raise ModelError(f"its data file {location!r} is not a file", where=where)
    if file.stat().st_size < offset + size:
        raise ModelError(f"{location!r} ends before its data: {offset + size} bytes are needed", where=where)
    return FileSlice(location, offset, size)


def _number(entries: dict[str, str], key: str, default: int, where: str) -> int:
    text = entries.get(key, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ModelError(f"its {key} {text!r} is no number of bytes", where=where)
    return int(text)
