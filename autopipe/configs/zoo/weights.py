"""Initial values of a model's parameters, drawn in pieces, inside the file or beside it."""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import numpy as np
import numpy.typing as npt
import onnx

from autopipe.configs.zoo.builder import Parameter
from autopipe.ir.errors import ConfigurationError

INLINE_LIMIT: Final = 3 << 29
"""Bytes of parameters (1.5 GiB) up to which they stand in the file itself; protobuf cannot hold 2 GiB."""

PIECE: Final = 1 << 22
"""Elements drawn at a time."""

ALIGNMENT: Final = 4096
"""Offset of each parameter in a data file, so that it can be mapped into memory."""

Progress = Callable[[int], None]
"""Told the number of bytes written after every piece."""


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model of the zoo: the graph with shapes for all its values, and how its parameters are initialised."""

    skeleton: onnx.ModelProto
    """The graph; its parameters have a type and a shape but no data."""

    parameters: tuple[Parameter, ...]
    """All parameters in the order in which they were made."""

    seed: int | None
    """Seed of the initial values; None leaves parameters without data."""

    @property
    def parameter_count(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def data_bytes(self) -> int:
        """Bytes of parameters to write, 0 where they stay without data."""
        return 0 if self.seed is None else 4 * self.parameter_count

    def to_proto(self) -> onnx.ModelProto:
        """The model in memory, its parameters inside; only for models below 2 GiB."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.skeleton)
        if self.seed is not None:
            _forget_types(proto, self.parameters)
            for parameter in self.parameters:
                tensor = _declared(proto, parameter)
                tensor.raw_data = b"".join(piece.tobytes() for piece in drawn(parameter, self.seed))
        return proto

    def save(self, path: Path, progress: Progress = lambda _: None, inline_limit: int = INLINE_LIMIT) -> None:
        """Write the model to `path`, and its parameters to `path`.data where they exceed `inline_limit` bytes.

        Files appear complete or not at all, the one named `path` last. Raises ConfigurationError where the folder
        cannot be written or the disk has too little room.
        """
        _require_room(path, self.data_bytes)
        try:
            proto = self._with_data_beside(path, progress) if self.data_bytes > inline_limit else self.to_proto()
            with _replacing(path) as file:
                file.write(proto.SerializeToString(deterministic=True))
        except OSError as error:
            raise ConfigurationError(f"cannot write the model: {error.strerror or error}", where=str(path)) from error
        if self.data_bytes <= inline_limit:
            progress(self.data_bytes)

    def _with_data_beside(self, path: Path, progress: Progress) -> onnx.ModelProto:
        """Write the parameters next to `path` and return the model that refers to them."""
        assert self.seed is not None, "parameters without a seed have no data to write"
        data_path = path.with_name(path.name + ".data")
        proto = onnx.ModelProto()
        proto.CopyFrom(self.skeleton)
        _forget_types(proto, self.parameters)
        with _replacing(data_path) as file:
            for parameter in self.parameters:
                file.write(bytes(-file.tell() % ALIGNMENT))
                tensor = _declared(proto, parameter)
                tensor.data_location = onnx.TensorProto.EXTERNAL
                entries = {"location": data_path.name, "offset": file.tell(), "length": 4 * parameter.size}
                for key, entry in entries.items():
                    tensor.external_data.add(key=key, value=str(entry))
                for piece in drawn(parameter, self.seed):
                    file.write(piece.data)
                    progress(piece.nbytes)
        return proto


def drawn(parameter: Parameter, seed: int) -> Iterator[npt.NDArray[np.float32]]:
    """The values of `parameter`, flat and in order, at most PIECE elements at a time.

    Each piece has its own counter range of Philox keyed by the seed and the parameter's name, so that neither the
    order of parameters nor the reading of a part changes a value.
    """
    key = np.array([seed, zlib.crc32(parameter.name.encode())], dtype=np.uint64)
    for index, start in enumerate(range(0, parameter.size, PIECE)):
        count = min(PIECE, parameter.size - start)
        counter = np.array([0, 0, 0, index], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
        scale = np.float32(parameter.initializer.scale)
        match parameter.initializer.scheme:
            case "normal":
                yield generator.standard_normal(count, dtype=np.float32) * scale
            case "uniform":
                yield (2 * generator.random(count, dtype=np.float32) - 1) * scale
            case "zeros":
                yield np.zeros(count, dtype=np.float32)
            case "ones":
                yield np.ones(count, dtype=np.float32)


def _declared(proto: onnx.ModelProto, parameter: Parameter) -> onnx.TensorProto:
    """A new initializer of `proto` for `parameter`, still without data."""
    tensor: onnx.TensorProto = proto.graph.initializer.add()
    tensor.name = parameter.name
    tensor.data_type = onnx.TensorProto.FLOAT
    tensor.dims.extend(parameter.shape)
    return tensor


def _forget_types(proto: onnx.ModelProto, parameters: tuple[Parameter, ...]) -> None:
    """Drop the types of `parameters`, which their initializers are going to say."""
    names = {parameter.name for parameter in parameters}
    kept = [info for info in proto.graph.value_info if info.name not in names]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(kept)


def _require_room(path: Path, size: int) -> None:
    """Raise ConfigurationError unless `path` can be a file in a folder that exists and has `size` bytes left."""
    folder = path.parent
    if path.is_dir():
        raise ConfigurationError("this is a folder", hint="name the file to write", where=str(path))
    if not folder.is_dir():
        raise ConfigurationError("there is no such folder to write the model to", where=str(folder))
    free = shutil.disk_usage(folder).free
    if size > free:
        message = f"its weights need {size / 2**30:.3g} GiB and {free / 2**30:.3g} GiB are free"
        raise ConfigurationError(message, hint="--set weights=none plans without them", where=str(folder))


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that becomes `path` when the block ends well, and vanishes when it does not."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
