"""The record in an ONNX file of a module's `state_dict`, which `autopipe export` writes into the
file's metadata.

A file holds each tensor once, under one name, and only tensors that its nodes read. The record has
the other names of tied tensors. Tensors that no node reads are initializers whose names begin with
`INITIALIZER_PREFIX`. Buffers that the module does not save are not in the record.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from autopipe.ir.errors import ModelError

METADATA_KEY: Final = "autopipe.state_dict"
"""Key of the file's metadata: a JSON object with the fields of `StateNames`."""
INITIALIZER_PREFIX: Final = "autopipe.state/"
"""Start of the names of initializers that are in the file for the module's `state_dict` only."""
MAX_NAMES: Final = 1 << 20
"""Maximum entries of a `state_dict`."""
MAX_TIED_NAMES: Final = 1024
"""Maximum names of one tensor. Each name is written as a tensor, so a small file could otherwise
expand to a huge one.
"""
MAX_COUNT: Final = 1 << 20
"""Maximum increment of a counter per forward pass."""


def is_for_state_only(name: str) -> bool:
    """True if no node reads the initializer, which exists only for the module's `state_dict`."""
    return name.startswith(INITIALIZER_PREFIX)


def module_name(name: str) -> str:
    """Return the name of an initializer without `INITIALIZER_PREFIX`: its name in the module."""
    return name.removeprefix(INITIALIZER_PREFIX)


@dataclass(frozen=True, slots=True)
class StateNames:
    """The entries of a module's `state_dict`."""

    names: Mapping[str, str]
    """The initializer of the file that holds an entry, by the entry's name, in the order of the
    module.
    """
    counts: Mapping[str, int] = field(default_factory=dict)
    """The increment of a counter per forward pass in training, such as 1 for BatchNorm's
    `num_batches_tracked`, by the name of the counter's initializer.
    """

    def text(self) -> str:
        """Return the record as JSON text for the metadata."""
        return json.dumps({"names": dict(self.names), "counts": dict(self.counts)})

    @classmethod
    def of(cls, metadata: Mapping[str, str], initializers: Collection[str]) -> StateNames | None:
        """Return the record of a file, None if it has none. Raises ModelError if the record does
        not fit the initializers.
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
    return type(value) is int and 0 <= value <= MAX_COUNT


def _invalid_record_error(reason: str) -> ModelError:
    return ModelError(f"the model's metadata entry {METADATA_KEY!r} {reason}")
