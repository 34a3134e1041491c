"""A rank's safetensors file, written and hashed in one pass.

An 8-byte little-endian length, a JSON header of that length, and the tensors' bytes one behind the other
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from autopipe.backends.torch.checkpoint.element_types import numpy_type, safetensors_type
from autopipe.backends.torch.checkpoint.folder import writing
from autopipe.backends.torch.checkpoint.form import StoredFile

_CHUNK = 2**22
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A tensor to be stored: its elements' bytes row by row, little-endian."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def write_shard(path: Path, contents: Sequence[Content]) -> tuple[StoredFile, dict[str, int]]:
    """Write a file, down to the disk. Returns what it is, and each tensor's offset in bytes by key.

    Raises LaunchError where it cannot be written.
    """
    ordered = sorted(contents, key=lambda each: -numpy_type(each.dtype).itemsize)  # So that each is aligned.
    ends = list(accumulate(each.data.nbytes for each in ordered))
    starts = [end - each.data.nbytes for each, end in zip(ordered, ends, strict=True)]
    header = _header(ordered, starts)
    digest = hashlib.sha256()
    with writing(path), path.open("xb", buffering=0) as file:
        for data in (memoryview(header), *(each.data for each in ordered)):
            for start in range(0, data.nbytes, _CHUNK):
                chunk = data[start : start + _CHUNK]
                digest.update(chunk)
                while chunk.nbytes:
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    size = len(header) + sum(each.data.nbytes for each in ordered)
    offsets = {each.key: len(header) + start for each, start in zip(ordered, starts, strict=True)}
    return StoredFile(path.name, size, digest.hexdigest()), offsets


def _header(contents: Sequence[Content], starts: Sequence[int]) -> bytes:
    """The length and the header, filled up with spaces."""
    form = {}
    for each, start in zip(contents, starts, strict=True):
        tag, shape = safetensors_type(each.dtype, each.shape)
        form[each.key] = {"dtype": tag, "shape": shape, "data_offsets": [start, start + each.data.nbytes]}
    text = json.dumps(form).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
