"""Kinds of the files that commands write, which are recognised by their content, and the rule for
replacing a file.

A command may replace an empty file, and a file of the kind that it writes, unless that file is an
input of the command. It replaces any other file only with `--force`.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.output_files import follow_links, open_descriptor, open_replacement_file

_START_BYTES: Final = 4096
"""Number of bytes at the beginning of a file in which a pattern is searched."""
_MAX_HEADER_BYTES: Final = 100_000_000
"""Maximum size in bytes of the header of a safetensors file, as the format defines it."""
PRODUCER: Final = "autopipe"
"""Producer name in the ONNX files that `autopipe zoo` writes."""


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file that commands write. `words` describe it in messages. `recognises` returns
    True if the content of a file is of this kind.
    """

    words: str
    recognises: Callable[[Path], bool]


def _starts_with_pattern(pattern: str) -> Callable[[Path], bool]:
    """Return a function that returns True if the beginning of a file matches the regular expression
    `pattern`.
    """
    mark = re.compile(pattern.encode())

    def recognises(path: Path) -> bool:
        with path.open("rb") as file:
            return mark.match(file.read(_START_BYTES)) is not None

    return recognises


def _has_format(name: str) -> Callable[[Path], bool]:
    """Return a function that returns True if a file is a JSON document of autopipe whose format
    name matches the regular expression `name`. The format is the first member of such a document.
    """
    return _starts_with_pattern(rf'\s*\{{\s*"format":\s*"autopipe\.{name}/\d+"')


is_autopipe_document: Final = _has_format(r"\w+")
"""Function that returns True if a file is any of autopipe's JSON documents."""
_MODEL_FIELDS: Final = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
"""Wire type of each field of ONNX's ModelProto, by the number of the field. Wire type 0 is an
integer; wire type 2 is a length and that many bytes.
"""
_PRODUCER_FIELD = 2
_GRAPH_FIELD = 7
_OPSET_FIELD = 8
_MAX_VARINT_BYTES: Final = 10


def _onnx_producer(path: Path) -> str | None:
    """Return the producer name of an ONNX model, which may be "", or None if the file is not an
    ONNX model.
    """
    size = path.stat().st_size
    found: dict[int, bytes] = {}
    with path.open("rb") as file:
        while file.tell() < size:
            number, wire = divmod(_read_varint(file), 8)
            if _MODEL_FIELDS.get(number) != wire:
                return None
            if wire == 0:
                _read_varint(file)
                continue
            length = _read_varint(file)
            if not 0 <= length <= size - file.tell():
                return None
            found[number] = file.read(min(length, len(PRODUCER) + 1))
            file.seek(max(0, length - len(found[number])), os.SEEK_CUR)
    if _GRAPH_FIELD not in found or _OPSET_FIELD not in found:
        return None
    return found.get(_PRODUCER_FIELD, b"").decode(errors="replace")


def _read_varint(file: IO[bytes]) -> int:
    """Read a protobuf varint from the file and return it. Return -1 if the bytes are not a valid
    varint.
    """
    found = 0
    for place in range(_MAX_VARINT_BYTES):
        byte = file.read(1)
        if not byte:
            return -1
        found |= (byte[0] & 0x7F) << 7 * place
        if byte[0] < 0x80:
            return found
    return -1


def _is_safetensors(path: Path) -> bool:
    """Return True if the file is a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, path.stat().st_size - 8):
            return False
        try:
            entries = json.loads(file.read(length))
        except (ValueError, RecursionError):
            return False
    return isinstance(entries, dict) and all(isinstance(each, dict) for each in entries.values())


def _is_safetensors_index(path: Path) -> bool:
    """Return True if the file is an index of safetensors files (a JSON object with a
    `weight_map`).
    """
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and isinstance(document.get("weight_map"), dict)


def _is_npz(path: Path) -> bool:
    """Return True if the file is an archive of numpy arrays."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError):
        return False
    return bool(names) and all(name.endswith(".npy") for name in names)


def _is_token_list(path: Path) -> bool:
    """Return True if the file is a JSON list of lists of integers."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(found, list) and all(
        isinstance(row, list) and all(type(each) is int for each in row) for row in found
    )


_TRACE_PATTERN = (
    r'\{"traceEvents": \[(\{"ph": "M", "pid": [12], "tid": 0, "name": "process_name"|\], '
    r'"displayTimeUnit")'
)
_REPORT_PATTERN = r'(?s)<!DOCTYPE html>.*<meta name="generator" content="autopipe">'
_ORDER_PATTERN = r"(?:\d+[FBIW]\d+(?:,\d+[FBIW]\d+)*\n)+"

ONNX: Final = FileKind("an ONNX model", lambda path: _onnx_producer(path) is not None)
ZOO_MODEL: Final = FileKind(
    "an ONNX model of the zoo", lambda path: _onnx_producer(path) == PRODUCER
)
SAFETENSORS: Final = FileKind("a safetensors file", _is_safetensors)
SAFETENSORS_INDEX: Final = FileKind("an index of safetensors files", _is_safetensors_index)
NPZ: Final = FileKind("an .npz file of arrays", _is_npz)
NPY: Final = FileKind("an .npy array", _starts_with_pattern(r"\x93NUMPY"))
TOKENS: Final = FileKind("a list of token ids", _is_token_list)
COSTS: Final = FileKind("a cost file of autopipe", _has_format("costs"))
SCHEDULE: Final = FileKind("a schedule of autopipe", _has_format("schedule"))
TRACE: Final = FileKind("a trace of autopipe", _starts_with_pattern(_TRACE_PATTERN))
REPORT: Final = FileKind("a report of autopipe", _starts_with_pattern(_REPORT_PATTERN))
PICTURE: Final = FileKind(
    "a picture of autopipe",
    _starts_with_pattern(r"(?s)<svg [^>]*>\s*<metadata>autopipe</metadata>"),
)
ORDER: Final = FileKind("a schedule as CSV", _starts_with_pattern(_ORDER_PATTERN))


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file that a command writes: its path and kind, the files and folders that the command
    reads, and the flag `--force`.
    """

    path: Path
    kind: FileKind
    inputs: tuple[Path, ...] = ()
    force: bool = False

    def check(self) -> None:
        """Raise ConfigurationError if the file cannot be written or must not be replaced. Commands
        call this method before a long computation.
        """
        if open_descriptor(self.path) is not None:
            return
        path = follow_links(self.path)
        hint = "choose another path"
        if path.is_dir():
            raise ConfigurationError(
                f"the output {self.path} is a folder, expected a file",
                hint="choose the path of a file",
            )
        parent = path.parent
        if not os.access(parent, os.W_OK | os.X_OK):
            why = "the folder is not writable" if parent.is_dir() else "the folder does not exist"
            raise ConfigurationError(
                f"the file {self.path} cannot be written: {parent}: {why}", hint
            )
        try:
            status = path.stat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigurationError(
                f"the file {self.path} cannot be written: {error.strerror}", hint
            ) from error
        is_stream = stat.S_ISCHR(status.st_mode) or stat.S_ISFIFO(status.st_mode)
        if self.force or is_stream or (stat.S_ISREG(status.st_mode) and not status.st_size):
            return
        why = self._reason_not_replaceable(path)
        if why:
            raise ConfigurationError(
                f"the file {self.path} exists and {why}",
                f"{hint}, or replace the file with --force",
            )

    def _reason_not_replaceable(self, path: Path) -> str:
        """Return the reason why the file at `path` must not be replaced, or "" if it may be
        replaced.
        """
        for each in self.inputs:
            if os.path.exists(each) and (
                each.samefile(path) or path.is_relative_to(os.path.realpath(each))
            ):
                return "is an input of this command"
        if not path.is_file():
            return "is not a regular file"
        if holder := _folder_containing(path):
            return f"belongs to {holder}"
        try:
            is_own = self.kind.recognises(path)
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return "" if is_own else f"is not {self.kind.words}"

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Context manager that yields the file to write. Raise ConfigurationError if `check` does
        or if writing fails.
        """
        self.check()
        try:
            with open_replacement_file(self.path) as file:
                yield file
        except OSError as error:
            raise ConfigurationError(
                f"the file {self.path} cannot be written: {error.strerror}", "choose another path"
            ) from error


_FOLDER_FILES: Final = ("plan.json", "schedule.json", "config.yaml", "placement.yaml")
_FOLDER_HEADS: Final = (
    ("plan.json", _has_format("plan"), "the plan"),
    ("manifest.json", _has_format("program"), "the program"),
    ("manifest.json", _has_format("checkpoint"), "the checkpoint"),
)
"""For each kind of folder that autopipe writes: the name of its head (the file that describes the
others), a test of the head's content, and a description of the folder.
"""


def _folder_containing(path: Path) -> str:
    """Return a description of the plan, program or checkpoint folder to which the file at `path`
    belongs, or "" if it belongs to none.
    """
    for head, recognises, words in _FOLDER_HEADS:
        if (path.parent / head).is_file() and recognises(path.parent / head):
            return (
                f"{words} in {path.parent}"
                if head != _FOLDER_FILES[0] or path.name in _FOLDER_FILES
                else ""
            )
    return ""


def check_data_file(model: Path, data: Path, force: bool) -> None:
    """Raise ConfigurationError if the file `data`, to which the weights of the ONNX file `model`
    are to be written, exists and contains something other than the weights of the present file
    `model`. With `force`, or if `data` is empty, it may be replaced.
    """
    if force or not data.exists() or not data.stat().st_size:
        return
    is_own = model.is_file() and ONNX.recognises(model) and data.name.encode() in model.read_bytes()
    if not is_own:
        hint = "choose another file, or replace the file with --force"
        raise ConfigurationError(
            f"the file {data} exists and does not contain the weights of {model}", hint
        )


def plan_inputs(folder: Path) -> tuple[Path, ...]:
    """Return the files that a command reads from a plan folder or a program folder. Other files
    there may be outputs of an earlier command, so they may be replaced. If `folder` is a file,
    return this file.
    """
    return (
        tuple(folder / name for name in (*_FOLDER_FILES, "manifest.json"))
        if folder.is_dir()
        else (folder,)
    )


def write_texts(texts: Mapping[Path | OutputFile, str]) -> None:
    """Write several files: write each text to a temporary file next to its path, and rename all of
    them at the end. Raise ConfigurationError if a file must not be replaced or cannot be written.
    """
    for target in texts:
        if isinstance(target, OutputFile):
            target.check()
    path = Path()
    try:
        with ExitStack() as stack:
            for target, text in texts.items():
                path = target.path if isinstance(target, OutputFile) else target
                if path.is_dir():
                    raise ConfigurationError(f"{path} is a folder", hint="name a file")
                file = stack.enter_context(open_replacement_file(path))
                file.write(text.encode())
                file.flush()
    except OSError as error:
        raise ConfigurationError(
            f"the file {path} cannot be written: {error.strerror}", hint="choose another path"
        ) from error


def check_writable(path: Path) -> None:
    """Raise ConfigurationError if no file can be written at `path`. Commands call this function
    before a long computation.
    """
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder", hint="name a file")
    parent = path.absolute().parent
    if not os.access(parent, os.W_OK | os.X_OK):
        why = "the folder is not writable" if parent.is_dir() else "the folder does not exist"
        raise ConfigurationError(
            f"the file {path} cannot be written: {parent}: {why}", hint="choose another path"
        )
