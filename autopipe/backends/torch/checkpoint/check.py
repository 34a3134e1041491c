"""Check that a checkpoint is whole: every byte as written, and every element of every tensor stored once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from autopipe.backends.torch.checkpoint.element_types import numpy_type
from autopipe.backends.torch.checkpoint.folder import MANIFEST, advice
from autopipe.backends.torch.checkpoint.form import Checkpoint, StoredTensor
from autopipe.backends.torch.checkpoint.reading import verify_file
from autopipe.ir.errors import LaunchError
from autopipe.ir.layout import whole


def check_checkpoint(path: Path, checkpoint: Checkpoint, progress: Callable[[int], None] = lambda _: None) -> None:
    """Read all of the checkpoint in folder `path`. Raises LaunchError, naming the file, at the first that is wrong.

    `progress` is told the bytes of every file.
    """
    for name, tensor in tensors_of(checkpoint):
        reason = _flaw(tensor, checkpoint)
        if reason:
            message = f"the checkpoint is damaged: {name}: {reason}"
            raise LaunchError(message, hint=advice(path), where=str(path / MANIFEST))
    for file in checkpoint.files:
        verify_file(path, file)
        progress(file.size)


def tensors_of(checkpoint: Checkpoint) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor, and what a person calls it."""
    for parameter in checkpoint.parameters:
        yield f"parameter {parameter.name!r}", parameter.value
        for name, tensor in parameter.state:
            yield f"{name} of parameter {parameter.name!r}", tensor
    for generator in checkpoint.random:
        yield f"the random numbers of rank {generator.rank} on {generator.device}", generator.state


def _flaw(tensor: StoredTensor, checkpoint: Checkpoint) -> str:
    """Describe the first defect of a tensor's blocks; "" where they lie inside it, do not overlap, cover it, and lie
    within their files.
    """
    try:
        size = numpy_type(tensor.dtype).itemsize
    except TypeError:
        return f"there is no element type {tensor.dtype!r}"
    everything = whole(tensor.shape)
    rank = len(tensor.shape)
    for block in tensor.blocks:
        box = block.box
        if len(box.starts) != rank or len(box.stops) != rank:
            return f"a block has {len(box.starts)} dimensions, not {rank}"
        if any(stop < start for start, stop in zip(box.starts, box.stops, strict=True)):
            return "a block ends before it begins"
        if box.elements and box.intersect(everything) != box:
            return f"a block {box.starts} to {box.stops} lies outside of its shape {tensor.shape}"
        if not 0 <= block.file < len(checkpoint.files):
            return f"a block lies in file {block.file} of {len(checkpoint.files)}"
        if not 0 <= block.offset <= checkpoint.files[block.file].size - box.elements * size:
            return f"a block ends behind the end of {checkpoint.files[block.file].name}"
    stored = sum(block.box.elements for block in tensor.blocks)
    if stored != everything.elements:
        return f"its blocks have {stored} elements, its shape {everything.elements}"
    return "two of its blocks overlap" if _overlap(tensor) else ""


def _overlap(tensor: StoredTensor) -> bool:
    blocks = [block.box for block in tensor.blocks if block.box.elements]
    if len(blocks) < 2 or not tensor.shape:
        return len(blocks) > 1
    starts = np.array([box.starts for box in blocks])
    stops = np.array([box.stops for box in blocks])
    return any(
        bool(((starts[number + 1 :] < stops[number]) & (starts[number] < stops[number + 1 :])).all(axis=1).any())
        for number in range(len(blocks) - 1)
    )
