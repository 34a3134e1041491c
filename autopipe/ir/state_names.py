"""The record of a PyTorch module's `state_dict` in the metadata of an ONNX file, which `autopipe
export` writes.

A file contains each tensor once, under one name, and the exporter writes only tensors that nodes
read. The record adds the other names of tied tensors. Tensors that no node reads are added to the
file as initializers with the prefix `INITIALIZER_PREFIX`. Buffers that the module does not save in
its `state_dict` are not recorded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from autopipe.ir.errors import ModelError

METADATA_KEY: Final = "autopipe.state_dict"
"""Key of the record in the file's metadata. Its value is a JSON object with the fields of
`StateNames`.
"""
INITIALIZER_PREFIX: Final = "autopipe.state/"
"""Prefix of the names of initializers that are in the file only because they belong to the module's
`state_dict`.
"""
MAX_NAMES: Final = 1 << 20
"""Maximum number of entries of a `state_dict` in a record."""
MAX_TIED_NAMES: Final = 1024
"""Maximum number of names of one tensor. Reading a record writes the tensor once per name, so a
small file could otherwise expand to a huge one.
"""
MAX_COUNT: Final = 1 << 20
"""Maximum increment of a counter, such as `num_batches_tracked` of BatchNorm, in one forward pass.
"""


def is_for_state_only(name: str) -> bool:
    """Return True if an initializer exists only for the module's `state_dict`, so that no node
    reads it.
    """
    return name.startswith(INITIALIZER_PREFIX)


def module_name(name: str) -> str:
    """Return the name of a tensor in the module: the name of its initializer without
    `INITIALIZER_PREFIX`.
    """
    return name.removeprefix(INITIALIZER_PREFIX)


@dataclass(frozen=True, slots=True)
class StateNames:
    """Record of the entries of a PyTorch module's `state_dict`, stored in the metadata of an ONNX
    file.
    """

    names: Mapping[str, str]
    """For each entry, in the order of the module, the name of the initializer that contains it."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """For each counter, the increment in one forward pass in training, by the name of its
    initializer. It is 1 for `num_batches_tracked` of BatchNorm.
    """

    def text(self) -> str:
        """Return the record as JSON text for the metadata."""
        return json.dumps({"names": dict(self.names), "counts": dict(self.counts)})

    @classmethod
    def of(cls, metadata: Mapping[str, str], initializers: Collection[str]) -> StateNames | None:
        """Return the record in the metadata of a file, or None if the file has none. Raise
        ModelError if the record is invalid or does not fit the names of the initializers.
        """
        text = metadata.get(METADATA_KEY)
        if text is None:
            return None
        try:
            document = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise _invalid_record_error("is not valid JSON") from error
        if not isinstance(document, dict) or document.keys() != {"names", "counts"}:
            raise _invalid_record_error("is not an object with the keys 'names' and 'counts'")
        names = document["names"]
        counts = document["counts"]
        if not isinstance(names, dict) or not all(isinstance(each, str) for each in names.values()):
            raise _invalid_record_error("does not map each name to a tensor")
        if len(names) > MAX_NAMES:
            raise _invalid_record_error(f"has {len(names)} names, expected {MAX_NAMES} or fewer")
        for tensor, tied in Counter(names.values()).items():
            if tensor not in initializers:
                raise _invalid_record_error(
                    f"names the tensor {tensor!r}, which the model does not contain"
                )
            if tied > MAX_TIED_NAMES:
                raise _invalid_record_error(
                    f"has {tied} names of tensor {tensor!r}, expected {MAX_TIED_NAMES} or fewer"
                )
        if not isinstance(counts, dict) or not all(map(_is_count, counts.values())):
            raise _invalid_record_error(f"has counts that are not integers from 0 to {MAX_COUNT}")
        for tensor in counts:
            if not is_for_state_only(tensor) or tensor not in initializers:
                raise _invalid_record_error(
                    f"counts in {tensor!r}, which is not a counter of the model"
                )
        return cls(names, counts)


def _is_count(value: object) -> bool:
    """Return True if the value is a valid increment of a counter, such as `num_batches_tracked` of
    BatchNorm, in one forward pass.
    """
    return type(value) is int and 0 <= value <= MAX_COUNT


def _invalid_record_error(reason: str) -> ModelError:
    """Return the error for an invalid record; `reason` says why it is invalid."""
    return ModelError(f"the model's metadata entry {METADATA_KEY!r} {reason}")
