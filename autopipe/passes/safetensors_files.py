"""Read and write safetensors files, single or divided into shards with an index, in the format of
Hugging Face's libraries.

The index of a set of shards, `NAME.safetensors.index.json`, is a JSON object whose member
`weight_map` maps the name of each tensor to its file. The files are in the folder of the index.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.files import SAFETENSORS_TYPES, Progress, lfs_error, safetensors_header
from autopipe.ir.graph import FileSlice, Value
from autopipe.ir.output_files import open_replacement_file
from autopipe.ir.words import plural
from autopipe.passes.export import TensorData, stored_tensor

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
"""Suffix of the file name of the index of a set of shards."""
_METADATA: Final = "__metadata__"
"""Name of the member of a file's header that contains metadata; all other members are tensors."""
_TYPES: Final = {tag: dtype for dtype, tag in SAFETENSORS_TYPES.items()}
_MOST_HEADER: Final = 100_000_000
"""Maximum bytes of the header of a file, as defined by the format."""
_MOST_INDEX: Final = 100_000_000
"""Maximum bytes of an index file that is read. The index of a model of 1,000 layers has about 1
MB.
"""


def is_safetensors(path: Path) -> bool:
    """True if the name of a file has the suffix of a safetensors file or of an index."""
    return path.name.endswith((SUFFIX, INDEX_SUFFIX))


def read_safetensors(path: Path) -> dict[str, TensorData]:
    """Return all tensors of the safetensors file `path`, by name. If `path` is an index, return the
    tensors of all its files.

    The content of the files is not trusted. Raise ConfigurationError if a file cannot be read or is
    invalid, or if the index does not match the files.
    """
    return _read_index(path) if path.name.endswith(INDEX_SUFFIX) else _read_file(path)


def _read_index(path: Path) -> dict[str, TensorData]:
    """Return the tensors of all files of the index `path`, by name. Raise ConfigurationError for an
    invalid index or file.
    """
    try:
        if path.stat().st_size > _MOST_INDEX:
            raise ValueError(
                f"the file has {path.stat().st_size} bytes, expected at most {_MOST_INDEX}"
            )
        files = json.loads(path.read_bytes())["weight_map"]
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise ValueError("the key 'weight_map' does not map each tensor to a file")
    except OSError as error:
        raise ConfigurationError(
            f"the weights cannot be read: {error.strerror}", where=str(path)
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigurationError(
            f"the file is not an index of safetensors files: {error}", where=str(path)
        ) from error
    found: dict[str, TensorData] = {}
    for file in sorted(set(files.values())):
        if not file or Path(file).name != file or file == "..":
            message = (
                f"the index names the file {file!r}, expected a file in the folder of the index"
            )
            raise ConfigurationError(message, where=str(path))
        for name, numbers in _read_file(path.with_name(file)).items():
            if name in found:
                raise ConfigurationError(
                    f"two files of the index contain tensor {name!r}", where=str(path)
                )
            found[name] = numbers
    for name, file in files.items():
        if name not in found:
            raise ConfigurationError(
                f"the index assigns tensor {name!r} to the file {file!r}, which does not contain "
                "it",
                where=str(path),
            )
    return found


def _read_file(path: Path) -> dict[str, TensorData]:
    """Return the tensors of one safetensors file, by name. Only the header is read at once. Raise
    ConfigurationError for an invalid file.
    """
    try:
        if pointer := lfs_error(path):
            raise ConfigurationError(*pointer, where=str(path))
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(_MOST_HEADER, size - 8):
                raise ValueError(
                    f"the header length is {length} {plural(length, 'byte')}, more than the file "
                    "or the limit permits"
                )
            entries = json.loads(file.read(length))
        return dict(_header_tensors(path, entries, 8 + length, size))
    except OSError as error:
        raise ConfigurationError(
            f"the weights cannot be read: {error.strerror}", where=str(path)
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"the file is not a safetensors file: {error}", where=str(path)
        ) from error


def _header_tensors(
    path: Path, entries: Any, start: int, size: int
) -> Iterator[tuple[str, TensorData]]:
    """Yield (name, tensor) for each tensor of the header `entries` of a file. The data starts at
    offset `start` of the file, which has `size` bytes. Raise ValueError, TypeError, KeyError or
    AttributeError for an invalid header.
    """
    for name, entry in entries.items():
        if name == _METADATA:
            continue
        if entry["dtype"] not in _TYPES:
            raise ValueError(f"tensor {name!r} has the unsupported type {entry['dtype']!r}")
        value = Value(name, _TYPES[entry["dtype"]], tuple(map(_checked_count, entry["shape"])))
        begin, end = map(_checked_count, entry["data_offsets"])
        if end - begin != value.bytes or start + end > size:
            raise ValueError(
                f"the data offsets of tensor {name!r} do not match its shape or the file size"
            )
        yield name, stored_tensor(value, FileSlice("", start + begin, value.bytes), path)


def _checked_count(number: object) -> int:
    """Return `number`. Raise ValueError unless it is an integer of at least 0."""
    if type(number) is not int or number < 0:
        raise ValueError(f"a size or offset is {number!r}, expected an integer of at least 0")
    return number


def group_into_shards(tensors: Sequence[TensorData], most: int | None) -> list[list[TensorData]]:
    """Return the tensors in consecutive groups, one per file, of at most `most` bytes each. A
    larger tensor is a group by itself. If `most` is None, there is one group.
    """
    groups: list[list[TensorData]] = [[]]
    size = 0
    for each in tensors:
        if groups[-1] and most is not None and size + each.value.bytes > most:
            groups.append([])
            size = 0
        groups[-1].append(each)
        size += each.value.bytes
    return groups


def safetensors_paths(target: Path, count: int) -> list[Path]:
    """Return the paths of `count` safetensors files that are written for `target`: `target` itself
    if it is one file, and otherwise the numbered shards, followed by their index.

    If `target` has the name of an index, there is an index even for a single shard.
    """
    is_index = target.name.endswith(INDEX_SUFFIX)
    if count == 1 and not is_index:
        return [target]
    stem = target.name.removesuffix(INDEX_SUFFIX if is_index else SUFFIX)
    shards = [
        target.with_name(f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}")
        for number in range(1, count + 1)
    ]
    return [*shards, target.with_name(f"{stem}{INDEX_SUFFIX}")]


def write_safetensors(
    target: Path,
    tensors: Sequence[TensorData],
    progress: Progress = lambda _: None,
    most: int | None = None,
) -> tuple[list[Path], int]:
    """Write `tensors` to the safetensors file `target`. Return (files, bytes): the files that were
    written, and the total bytes of all tensors.

    If the tensors have more than `most` bytes, they are written to shards of at most `most` bytes
    and an index instead. Each file is written atomically, the index last. `progress` is called with
    the number of bytes of each piece. Raise ConfigurationError if a file cannot be written, or if
    the format has no type for a tensor or reserves its name.
    """
    for value in (each.value for each in tensors):
        if value.dtype not in SAFETENSORS_TYPES:
            raise ConfigurationError(
                f"tensor {value.name!r} has type {value.dtype.value}, which safetensors does not "
                "support"
            )
        if value.name == _METADATA:
            raise ConfigurationError(
                f"a tensor has the name {_METADATA!r}, which safetensors reserves"
            )
    groups = group_into_shards(tensors, most)
    paths = safetensors_paths(target, len(groups))
    total = sum(each.value.bytes for each in tensors)
    try:
        for path, group in zip(paths, groups, strict=False):
            _write_file(path, group, progress)
        if len(paths) > len(groups):
            _write_index(paths, groups, total)
    except OSError as error:
        place = error.filename or target
        raise ConfigurationError(
            f"the file {place} cannot be written: {error.strerror}", hint="choose another folder"
        ) from error
    return paths, total


def _write_file(path: Path, tensors: Sequence[TensorData], progress: Progress) -> None:
    """Write one safetensors file atomically."""
    # In descending order of element sizes, each tensor starts at a multiple of its element size.
    ordered = sorted(tensors, key=lambda each: -each.value.dtype.itemsize)
    listed = ((each.value.name, each.value.dtype, each.value.shape) for each in ordered)
    header, _, _ = safetensors_header(listed, {"format": "pt"})
    with open_replacement_file(path) as file:
        file.write(header)
        for each in ordered:
            each.write(file, progress)


def _write_index(paths: Sequence[Path], groups: Sequence[Sequence[TensorData]], total: int) -> None:
    """Write the index of a set of shards atomically. `paths` are the shards, then the index;
    `groups` are the tensors of each shard; `total` is the number of bytes of all tensors.
    """
    files = {
        each.value.name: path.name
        for path, group in zip(paths, groups, strict=False)
        for each in group
    }
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    with open_replacement_file(paths[-1]) as file:
        file.write(json.dumps(document, indent=2).encode() + b"\n")
