"""Builder of ONNX graphs: adds one operator or layer at a time, with hierarchical names, and writes
the model with initialised parameters.

Layers and losses consist of the operators that a PyTorch exporter writes for them.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.files import INLINE_LIMIT, Progress, pad_to_alignment
from autopipe.ir.graph import Initializer
from autopipe.ir.output_files import open_replacement_file
from autopipe.ir.output_kinds import PRODUCER, check_data_file
from autopipe.ir.words import bytes_text

IR_VERSION: Final = 10
"""The first version of the ONNX format that supports opsets 20 and 21."""
Attribute: TypeAlias = int | float | str | Sequence[int] | Sequence[float] | ir.TensorProtocol
ZEROS: Final = Initializer("zeros")
ONES: Final = Initializer("ones")


normal: Final = partial(Initializer, "normal")
uniform: Final = partial(Initializer, "uniform")
NORMAL_0_02: Final = normal(0.02)
"""Initial values of the weights of GPT and BERT: normal with standard deviation 0.02."""


def kaiming(fan_in: int) -> Initializer:
    """Return the initializer of He et al. (2015), which preserves the variance of activations
    through layers that end in a ReLU.
    """
    return normal(math.sqrt(2.0 / fan_in))


def lecun(fan_in: int) -> Initializer:
    """Return the initializer of LeCun et al. (1998), which preserves the variance of activations
    through a linear layer.
    """
    return normal(math.sqrt(1.0 / fan_in))


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    initializer: Initializer

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Extent = int | tuple[int, int]
"""(height, width), or one number for both."""


class GraphBuilder:
    """Collects nodes, parameters, inputs and outputs of a graph. `finish` returns the graph.

    `batch` is the size of axis 0 of every input, an integer or the name of a symbolic dimension.
    `loss` is True if the graph ends with a loss. In the finished graph, parameters are values
    without a producer and without data; whoever saves the model may add the data.
    """

    def __init__(self, name: str, batch: int | str, opset: int, loss: bool) -> None:
        self._name = name
        self.batch = batch
        self._opset = opset
        self.loss = loss
        self._scopes: list[str] = []
        self._names: Counter[str] = Counter()
        self._nodes: list[ir.Node] = []
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._parameters: dict[str, Parameter] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix names inside the block: `/name/…` for nodes, `name.…` for parameters."""
        self._scopes.append(name)
        yield
        self._scopes.pop()

    def input(self, name: str, *dims: int, integer: bool = False) -> ir.Value:
        """Add a data input [batch, *dims], int64 if `integer`, otherwise float32."""
        dtype = ir.DataType.INT64 if integer else ir.DataType.FLOAT
        value = ir.Value(name=name, shape=ir.Shape([self.batch, *dims]), type=ir.TensorType(dtype))
        self._inputs.append(value)
        return value

    def output(self, name: str, value: ir.Value) -> None:
        value.name = name
        self._outputs.append(value)

    def parameter(self, name: str, *dims: int, init: Initializer = NORMAL_0_02) -> ir.Value:
        """Add a float32 parameter [*dims]. The names of the open scopes prefix its name."""
        full_name = ".".join([*self._scopes, name])
        assert full_name not in self._parameters, f"two parameters are called {full_name}"
        self._parameters[full_name] = Parameter(full_name, dims, init)
        return ir.Value(name=full_name, shape=ir.Shape(dims), type=ir.TensorType(ir.DataType.FLOAT))

    def constant(self, value: float | Sequence[float]) -> ir.Value:
        """Add a Constant node with a scalar or a vector: int64 for integers, otherwise float32."""
        array = np.asarray(value)
        array = array.astype(np.int64 if array.dtype.kind == "i" else np.float32)
        return self.op("Constant", value=ir.tensor(array))

    def op(self, op_type: str, *inputs: ir.Value, **attributes: Attribute) -> ir.Value:
        """Append an operator and return its first output."""
        return self.split_op(op_type, 1, *inputs, **attributes)[0]

    def split_op(
        self, op_type: str, outputs: int, *inputs: ir.Value, **attributes: Attribute
    ) -> tuple[ir.Value, ...]:
        """Append an operator named `/scopes/OpType` and return its outputs. The second operator of
        equal name gets the suffix `_1`, and so on.
        """
        name = "/" + "/".join([*self._scopes, op_type])
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name}_{self._names[name] - 1}"
        results = tuple(ir.Value(name=f"{name}_output_{index}") for index in range(outputs))
        self._nodes.append(
            ir.node(op_type, inputs, attributes=attributes, outputs=results, name=name)
        )
        return results

    def reshape(self, data: ir.Value, target: Sequence[int]) -> ir.Value:
        return self.op("Reshape", data, self.constant(target))

    def linear(
        self,
        name: str,
        data: ir.Value,
        inputs: int,
        outputs: int,
        init: Initializer = NORMAL_0_02,
        bias: bool = True,
    ) -> ir.Value:
        """Map […, inputs] to […, outputs] by MatMul, and by Add if `bias`. The weight is [inputs,
        outputs].
        """
        with self.scope(name):
            result = self.op("MatMul", data, self.parameter("weight", inputs, outputs, init=init))
            if bias:
                result = self.op("Add", result, self.parameter("bias", outputs, init=ZEROS))
        return result

    def dense(
        self, name: str, data: ir.Value, inputs: int, outputs: int, *, relu: bool = True
    ) -> ir.Value:
        """Map [batch, inputs] to [batch, outputs] by Gemm with a weight [outputs, inputs], then by
        Relu if `relu`.
        """
        with self.scope(name):
            weight = self.parameter(
                "weight", outputs, inputs, init=kaiming(inputs) if relu else lecun(inputs)
            )
            result = self.op(
                "Gemm", data, weight, self.parameter("bias", outputs, init=ZEROS), transB=1
            )
            return self.op("Relu", result) if relu else result

    def embedding(
        self, name: str, indices: ir.Value, rows: int, width: int, init: Initializer = NORMAL_0_02
    ) -> tuple[ir.Value, ir.Value]:
        """Return (result, table): the rows of a table [rows, width] at the int64 `indices`,
        [*indices, width], and the table.
        """
        with self.scope(name):
            table = self.parameter("weight", rows, width, init=init)
            return self.op("Gather", table, indices, axis=0), table

    def positions(self, length: int) -> ir.Value:
        """Return the int64 vector 0 … length - 1."""
        return self.op("Range", self.constant(0), self.constant(length), self.constant(1))

    def angles(self, length: int, count: int, base: float) -> ir.Value:
        """Return the angles of rotary or sinusoidal positions, float32 [length, count]: position ·
        base^(-i / count) for i in [0, count).
        """
        order = self.op(
            "Range", self.constant(0.0), self.constant(float(length)), self.constant(1.0)
        )
        place = self.op("Unsqueeze", order, self.constant([1]))
        return self.op(
            "Mul", place, self.constant([base ** (-step / count) for step in range(count)])
        )

    def layer_norm(self, name: str, data: ir.Value, width: int, epsilon: float = 1e-5) -> ir.Value:
        with self.scope(name):
            scale = self.parameter("weight", width, init=ONES)
            shift = self.parameter("bias", width, init=ZEROS)
            return self.op("LayerNormalization", data, scale, shift, axis=-1, epsilon=epsilon)

    def rms_norm(self, name: str, data: ir.Value, width: int, epsilon: float) -> ir.Value:
        """Normalise the last axis, of size `width`, by its root mean square, and scale it (Zhang
        and Sennrich, 2019). The norm consists of elementary operators.
        """
        with self.scope(name):
            mean = self.op(
                "ReduceMean",
                self.op("Pow", data, self.constant(2.0)),
                self.constant([-1]),
                keepdims=1,
            )
            deviation = self.op("Sqrt", self.op("Add", mean, self.constant(epsilon)))
            return self.op(
                "Mul", self.op("Div", data, deviation), self.parameter("weight", width, init=ONES)
            )

    def convolution(
        self,
        name: str,
        data: ir.Value,
        inputs: int,
        outputs: int,
        bias: bool = True,
        *,
        kernel: Extent,
        stride: Extent = 1,
        padding: Extent = 0,
    ) -> ir.Value:
        """Apply Conv to [batch, inputs, height, width], with `padding` on both sides of height and
        width.
        """
        extents = (
            each if isinstance(each, tuple) else (each, each) for each in (kernel, stride, padding)
        )
        size, strides, pads = map(list, extents)
        with self.scope(name):
            weight = self.parameter(
                "weight", outputs, inputs, *size, init=kaiming(inputs * math.prod(size))
            )
            shift = [self.parameter("bias", outputs, init=ZEROS)] if bias else []
            return self.op(
                "Conv", data, weight, *shift, kernel_shape=size, strides=strides, pads=pads * 2
            )

    def batch_norm(
        self, name: str, data: ir.Value, channels: int, epsilon: float = 1e-5
    ) -> ir.Value:
        """Apply BatchNormalization with running statistics, as in a model that is exported for
        fine-tuning.
        """
        with self.scope(name):
            scale = self.parameter("weight", channels, init=ONES)
            shift = self.parameter("bias", channels, init=ZEROS)
            mean = self.parameter("running_mean", channels, init=ZEROS)
            variance = self.parameter("running_var", channels, init=ONES)
            return self.op(
                "BatchNormalization", data, scale, shift, mean, variance, epsilon=epsilon
            )

    def max_pool(self, data: ir.Value, kernel: int, stride: int, padding: int = 0) -> ir.Value:
        return self.op(
            "MaxPool", data, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[padding] * 4
        )

    def end(
        self,
        name: str,
        result: ir.Value,
        loss: Callable[[ir.Value], ir.Value],
        *dims: int,
        integer: bool = False,
    ) -> None:
        """End the graph: with the output `name`, or, if the builder has `loss`, with `loss` of the
        labels. The labels are [batch, *dims], int64 if `integer`.
        """
        if self.loss:
            labels = self.input("labels", *dims, integer=integer)
            with self.scope("loss"):
                name = "loss"
                result = loss(labels)
        self.output(name, result)

    def classify(self, logits: ir.Value, *positions: int) -> None:
        """End the graph with `logits` [batch, classes, *positions], or with the mean cross-entropy
        of logits and int64 labels [batch, *positions].
        """
        loss = partial(self.op, "SoftmaxCrossEntropyLoss", logits, reduction="mean")
        self.end("logits", logits, loss, *positions, integer=True)

    def predict_tokens(self, logits: ir.Value, length: int, vocabulary: int) -> None:
        """End the graph with `logits` [batch, length, vocabulary], or with the mean cross-entropy
        of logits and labels [batch, length].

        The label of a position is the token that the position predicts: for a causal model, the
        next token. The flattened shapes are set explicitly, because ONNX shape inference does not
        name the product of `length` and a symbolic batch.
        """
        rows = self.batch * length if isinstance(self.batch, int) else f"{self.batch}*{length}"

        def loss(labels: ir.Value) -> ir.Value:
            flat = self.reshape(logits, [-1, vocabulary]), self.reshape(labels, [-1])
            flat[0].shape = ir.Shape([rows, vocabulary])
            flat[1].shape = ir.Shape([rows])
            flat[0].type = ir.TensorType(ir.DataType.FLOAT)
            flat[1].type = ir.TensorType(ir.DataType.INT64)
            return self.op("SoftmaxCrossEntropyLoss", *flat, reduction="mean")

        self.end("logits", logits, loss, length, integer=True)

    def finish(self, metadata: dict[str, str]) -> tuple[onnx.ModelProto, tuple[Parameter, ...]]:
        """Return (model, parameters): the model with inferred types and shapes of its values,
        without the data of its parameters, and these parameters.
        """
        graph = ir.Graph(
            self._inputs,
            self._outputs,
            nodes=self._nodes,
            opset_imports={"": self._opset},
            name=self._name,
        )
        parameters = tuple(self._parameters.values())
        initial: dict[str, dict[str, str | float]] = {}
        for parameter in parameters:
            init = parameter.initializer
            size = {"normal": "std", "uniform": "bound"}.get(init.scheme)
            initial[parameter.name] = {
                "scheme": init.scheme,
                **({size: init.scale} if size else {}),
            }
        properties = {
            **metadata,
            "autopipe.parameters": json.dumps([parameter.name for parameter in parameters]),
            "autopipe.init": json.dumps(initial),
        }
        model = ir.Model(
            graph, ir_version=IR_VERSION, producer_name=PRODUCER, metadata_props=properties
        )
        proto = ir.to_proto(model)
        for parameter in parameters:
            proto.graph.value_info.append(
                onnx.helper.make_tensor_value_info(
                    parameter.name, onnx.TensorProto.FLOAT, parameter.shape
                )
            )
        return onnx.shape_inference.infer_shapes(proto, strict_mode=True), parameters


PIECE_ELEMENTS: Final = 1 << 22
"""Number of elements of a parameter that are initialised at a time."""
Pieces = Iterator[npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model of the zoo: the graph with inferred shapes, and its parameters' initializers."""

    skeleton: onnx.ModelProto
    """The model. Its parameters have a type and a shape but no data."""
    parameters: tuple[Parameter, ...]
    """Parameters in the order in which they were added."""
    seed: int | None
    """Seed of the initial values; None leaves parameters without data."""

    @property
    def parameter_count(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    @property
    def data_bytes(self) -> int:
        """Bytes of parameters to write, 0 if they have no data."""
        return 0 if self.seed is None else 4 * self.parameter_count

    def to_proto(self) -> onnx.ModelProto:
        """Return the model with its parameters inside, for models below 2 GiB."""

        def store_inside(tensor: onnx.TensorProto, pieces: Pieces) -> None:
            tensor.raw_data = b"".join(piece.tobytes() for piece in pieces)

        return self._with_initializers(store_inside)

    def save(
        self,
        path: Path,
        progress: Progress = lambda _: None,
        inline_limit: int = INLINE_LIMIT,
        force: bool = False,
    ) -> None:
        """Write the model to `path`. Parameters of more than `inline_limit` bytes are written to
        `path`.data, which is completed before `path`.

        A file appears complete or not at all. Raise ConfigurationError if the folder does not exist
        or cannot be written, if the disk has too little free space, or, without `force`, if
        `path`.data exists and does not belong to the model at `path`.
        """
        free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
        if path.is_dir():
            raise ConfigurationError(
                "the output path is a folder, expected a file",
                hint="choose the path of a file",
                where=str(path),
            )
        if not path.parent.is_dir():
            raise ConfigurationError(
                "the folder of the output file does not exist", where=str(path.parent)
            )
        if self.data_bytes > free:
            message = (
                f"the weights require {bytes_text(self.data_bytes)}, but {bytes_text(free)} are "
                "free on the disk"
            )
            raise ConfigurationError(
                message, hint="omit the weights with --set weights=none", where=str(path.parent)
            )
        data = path.with_name(path.name + ".data")
        if self.data_bytes > inline_limit:
            check_data_file(path, data, force)
        try:
            if self.data_bytes > inline_limit:
                with open_replacement_file(data) as file:
                    proto = self._with_initializers(
                        partial(_store_externally, file, data.name, progress)
                    )
            else:
                proto = self.to_proto()
            with open_replacement_file(path) as file:
                file.write(proto.SerializeToString(deterministic=True))
        except OSError as error:
            raise ConfigurationError(
                f"the model cannot be written: {error.strerror or error}",
                where=str(error.filename or path),
            ) from error
        if self.data_bytes <= inline_limit:
            progress(self.data_bytes)

    def _with_initializers(
        self, store: Callable[[onnx.TensorProto, Pieces], None]
    ) -> onnx.ModelProto:
        """Return the model with its parameters as initializers, whose data `store` sets."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.skeleton)
        if self.seed is None:
            return proto
        names = {parameter.name for parameter in self.parameters}
        kept = [info for info in proto.graph.value_info if info.name not in names]
        del proto.graph.value_info[:]
        proto.graph.value_info.extend(kept)
        for each in self.parameters:
            tensor = proto.graph.initializer.add(
                name=each.name, data_type=onnx.TensorProto.FLOAT, dims=each.shape
            )
            store(tensor, initial_values(each, self.seed))
        return proto


def _store_externally(
    file: IO[bytes], name: str, progress: Progress, tensor: onnx.TensorProto, pieces: Pieces
) -> None:
    """Append the data to `file`, whose name is `name`, and make the tensor refer to it as external
    data.
    """
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entries = {
        "location": name,
        "offset": pad_to_alignment(file),
        "length": 4 * math.prod(tensor.dims),
    }
    for key, entry in entries.items():
        tensor.external_data.add(key=key, value=str(entry))
    for piece in pieces:
        file.write(piece.data)
        progress(piece.nbytes)


def initial_values(parameter: Parameter, seed: int) -> Pieces:
    """Yield the initial values of `parameter`, flat and in row-major order, at most PIECE elements
    at a time.

    The Philox key depends on the seed and the parameter's name, and the index of a piece is a word
    of the counter. So values depend neither on the order of parameters nor on which pieces are
    read.
    """
    key = np.array([seed, zlib.crc32(parameter.name.encode())], dtype=np.uint64)
    for index, start in enumerate(range(0, parameter.size, PIECE_ELEMENTS)):
        count = min(PIECE_ELEMENTS, parameter.size - start)
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
