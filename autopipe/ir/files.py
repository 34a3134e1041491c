"""Two file formats: JSON documents (plans, schedules, measured costs, manifests, checkpoints) and
safetensors.

A safetensors file (https://huggingface.co/docs/safetensors) begins with the length of its header in
eight bytes, and the header, a JSON object with type, shape and byte offsets of each tensor. The
data of the tensors follow, row-major and little-endian.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Final, NoReturn

from autopipe.ir.codec import Record
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import DType

INLINE_LIMIT: Final = 3 << 29
"""Maximum bytes of tensors that are stored inside an ONNX file (1.5 GiB). The limit of a protobuf
file is 2 GiB.
"""
_ALIGNMENT_BYTES: Final = 4096
Progress = Callable[[int], None]
"""Callback that a writer calls after each piece with the number of bytes of the piece."""


_LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/v1\n"
"""First line of a Git LFS pointer, the small text file that stands for a file that Git has not
downloaded.
"""


def lfs_error(path: Path) -> tuple[str, str] | None:
    """Return (message, hint) of an error if the file is a Git LFS pointer instead of the file
    itself, otherwise None.
    """
    if not path.is_file():  # Only regular files are read, because reading a pipe would block.
        return None
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
    except OSError:  # The caller reads the file next and reports the error.
        return None
    if start != _LFS_POINTER:
        return None
    return f"{path.name} is a pointer of Git LFS, not the file itself", "git lfs pull"


def pad_to_alignment(file: IO[bytes]) -> int:
    """Write zero bytes up to the next multiple of 4,096 bytes, so that a tensor from there on can
    be mapped into memory. Return the new offset.
    """
    file.write(bytes(-file.tell() % _ALIGNMENT_BYTES))
    return file.tell()


class JsonRecord(Record):
    """A value of a JSON document. `file` is the name of the document for errors."""

    __slots__ = ("file",)
    is_plain = True

    def __init__(
        self, value: Any, file: str, parent: JsonRecord | None = None, key: str | int = ""
    ) -> None:
        self.value = value
        self.file = file
        self.parent = parent
        self.key = key

    @property
    def display(self) -> str:
        """JSON text of the value for messages, reduced to at most 40 characters."""
        text = json.dumps(self.value, default=str)
        return text if len(text) <= 40 else text[:37] + "..."

    def child(self, value: Any, key: str | int) -> JsonRecord:
        return JsonRecord(value, self.file, self, key)

    def error(self, message: str, hint: str = "") -> ConfigurationError:
        return ConfigurationError(message, hint=hint, where=self.file)

    def refusal(self, expected: str) -> ConfigurationError:
        return self.error(
            f"{self.path or 'the document'} is {self.display}", f"expected {expected}"
        )

    def lacks(self, key: str, hint: Any) -> ConfigurationError:
        return self.error(f"{self.child(None, key).path} is missing", "write the file anew")


def read_json_record(path: Path, form: str) -> JsonRecord:
    """Return the JSON object in the file `path`. Raise ConfigurationError if the file cannot be
    read, is not JSON, or has a value other than `form` for the key `format`.
    """
    where = str(path)

    def reject_constant(text: str) -> NoReturn:
        """Raise ValueError for NaN and infinities, which Python's parser would accept."""
        raise ValueError(f"{text} is not a valid number")

    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=reject_constant)
    except OSError as error:
        raise ConfigurationError(
            f"the file cannot be read: {error.strerror}", where=where
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"the file is not valid JSON: {error}", where=where) from error
    record = JsonRecord(document, where)
    found = record.get("format", str)
    if found != form:
        raise record.error(
            f"the format is {found!r}", f"this autopipe reads {form!r}; write the file anew"
        )
    return record


def document_text(form: dict[str, object]) -> str:
    """Return a document as JSON with one line per key of the outer object. The file is compact, and
    differences between two files are readable.
    """
    lines = [f"{json.dumps(key)}: {_value_text(value)}" for key, value in form.items()]
    return "{" + ",\n ".join(lines) + "}\n"


def _value_text(value: object) -> str:
    """Return a value as JSON. An object that occurs several times in a list is converted only once,
    because devices with equal tasks share one list of tasks.
    """
    if not isinstance(value, list | tuple):
        return json.dumps(value, allow_nan=False)
    texts = {
        key: json.dumps(entry, allow_nan=False)
        for key, entry in {id(each): each for each in value}.items()
    }
    return "[" + ", ".join(texts[id(each)] for each in value) + "]"


SAFETENSORS_TYPES: Final = {
    DType.FLOAT64: "F64",
    DType.FLOAT32: "F32",
    DType.FLOAT16: "F16",
    DType.BFLOAT16: "BF16",
    DType.INT64: "I64",
    DType.INT32: "I32",
    DType.INT16: "I16",
    DType.INT8: "I8",
    DType.UINT64: "U64",
    DType.UINT32: "U32",
    DType.UINT16: "U16",
    DType.UINT8: "U8",
    DType.BOOL: "BOOL",
    DType.FLOAT8E4M3FN: "F8_E4M3",
    DType.FLOAT8E5M2: "F8_E5M2",
    DType.FLOAT8E8M0: "F8_E8M0",
}
"""Name of each element type in the safetensors format. Other types cannot be stored."""
_COMPLEX_COMPONENT_TYPES = {DType.COMPLEX64: "F32", DType.COMPLEX128: "F64"}
_HEADER_ALIGNMENT_BYTES = 8


def safetensors_header(
    tensors: Iterable[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """Return (header, offsets, size) for a safetensors file in which tensors follow one another.

    `tensors` lists (name, type, shape). `header` is the bytes before the data, `offsets` has the
    offset of each tensor in the file by name, and `size` is the size of the file; all are in bytes.
    A complex number is stored as two real numbers.
    """
    form: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    starts = dict[str, int]()
    end = 0
    for name, dtype, shape in tensors:
        pair = _COMPLEX_COMPONENT_TYPES.get(dtype)
        starts[name] = end
        end += math.prod(shape) * dtype.itemsize
        stored = (*shape, 2) if pair else shape
        form[name] = {
            "dtype": pair or SAFETENSORS_TYPES[dtype],
            "shape": stored,
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(form).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + end
