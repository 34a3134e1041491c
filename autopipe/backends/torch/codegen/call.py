"""The class `Call`, which describes one use of an operator to an emitter (a function that returns
the Python code of one use of an operator): local types, code of the operands, and code of process
groups. Also helpers that emitters share.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from autopipe.ir.batch import BatchDimension
from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Value
from autopipe.ir.layout import MeshAxes, MeshAxis, merge_axes
from autopipe.ir.ops import OPERATORS, qualified_name
from autopipe.ir.ops.operator import Signature
from autopipe.ir.placement import Split


def group_code(axes: MeshAxes, group: int) -> str:
    """Return the code of this rank's process group over the mesh axes `axes`. `group` is the number
    of ranks of the stage.
    """
    if axes == (MeshAxis(group, 1),):
        return "p.group"
    return f"p.group.along({', '.join(str(tuple(axis)) for axis in axes)})"


@dataclass(frozen=True, slots=True)
class Call(Signature):
    """One use of an operator, as the argument of an emitter. All shapes are the local shapes of a
    rank.

    An emitter returns a Python expression: a tensor if the node has one output, otherwise a tuple
    with one entry per output.

    The expression may use `torch`, `F` (torch.nn.functional), `operators` (the runtime's functions
    for operators that torch lacks), `p.device`, `p.training`, `p.running`, and the code that
    `group` and `stream` return. Text from the model may occur in it only as its `repr`, because
    models are untrusted.
    """

    codes: tuple[str | None, ...]
    splits: tuple[Split, ...] = ()
    mesh: MeshAxes = ()
    """For each of `splits`, the axis of the stage's device mesh over which it is split."""
    devices: int = 1
    samples: BatchDimension | None = None
    """Dimension of the result that holds the batch, for an operator that generates random numbers;
    None if there is none.
    """

    @staticmethod
    def of(
        signature: Signature, codes: tuple[str | None, ...], splits: tuple[Split, ...] = ()
    ) -> Call:
        """Return the call of a node with the code `codes` of its operands. The fields that describe
        the stage's device mesh keep their defaults.
        """
        own = (
            signature.node,
            signature.operands,
            signature.results,
            signature.constants,
            signature.opset,
        )
        return Call(*own, codes, splits)

    @property
    def dtype(self) -> str:
        """Code of the element type of the first result, such as `torch.float32`."""
        return torch_dtype(self.result().dtype)

    def arg(self, index: int) -> str:
        """Return the code of operand `index`. The operand must be present."""
        code = self.codes[index]
        assert code is not None, f"{self.node.op} lacks operand {index}"
        return code

    def optional(self, index: int) -> str:
        """Return the code of operand `index`, or "None" if it is absent."""
        return self.arg(index) if self.present(index) else "None"

    def args(self, count: int | None = None) -> str:
        """Return the code of the first `count` operands (None: all), separated by commas. The
        operands must be present.
        """
        return ", ".join(
            self.arg(index) for index in range(len(self.codes) if count is None else count)
        )

    def optionals(self, count: int) -> str:
        """Return the code of the first `count` operands, separated by commas, with "None" for each
        absent one.
        """
        return ", ".join(map(self.optional, range(count)))

    def local_count(self, count: int, axis: str) -> int:
        """Return the number of heads or groups on this rank: the full number `count` divided by the
        degree of the split along `axis`.
        """
        return count // math.prod(split.degree for split in self.splits if split.axis == axis)

    def is_split(self, axis: str) -> bool:
        """Return True if the node is split along the iteration axis `axis`, an axis of the
        operator's loop nest such as the rows of a matmul.
        """
        return any(split.axis == axis for split in self.splits)

    def group(self, *axes: str) -> str | None:
        """Return the code of the process group over which the iteration axes `axes` are split, or
        None if none of them is split. An iteration axis is an axis of the operator's loop nest,
        such as the rows of a matmul.
        """
        if not any(map(self.is_split, axes)):
            return None
        pairs = zip(self.splits, self.mesh, strict=True)
        return group_code(
            merge_axes(place for split, place in pairs if split.axis in axes), self.devices
        )

    def stream(self) -> str:
        """Return the code of the operator's stream of random numbers. In a forward pass, each
        number depends on the name of the node's result and on the index of the element in the full
        tensor, but not on the splits.
        """
        name = next(filter(None, self.node.outputs))
        key = int.from_bytes(
            hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big"
        )
        # `cuts` lists, for each dimension of the first result, the mesh axes over which the
        # dimension is split, as pairs (degree, stride) with the outermost axis first.
        places = {split.axis: place for split, place in zip(self.splits, self.mesh, strict=True)}
        results = OPERATORS[qualified_name(self.node)].space(self).results if places else ()
        cuts = tuple(
            tuple(map(tuple, merge_axes(places[name] for name in names if name in places)))
            for names in next((each for each in results if each is not None), ())
        )
        samples: object = self.samples and (
            self.samples.dimension,
            self.samples.outer,
            self.samples.inner,
        )
        if self.samples and (self.samples.outer, self.samples.inner) == (1, 1):
            samples = self.samples.dimension
        return call_code(
            "p.random", f"{key:#018x}", cuts=cuts if any(cuts) else None, samples=samples
        )

    def bias(self, index: int, axis: str) -> str:
        """Return the code of operand `index`, or "None" if it is absent. If the contraction axis
        `axis` is split, the results are partial sums; the code then adds the operand on one rank
        only.
        """
        if not self.present(index) or not self.is_split(axis):
            return self.optional(index)
        return f"operators.once({self.arg(index)}, {self.group(axis)})"

    def scalar(self, index: int) -> str | None:
        """Return a Python literal if operand `index` is a constant with one element, otherwise
        None. An operation of a tensor with a Python literal has the element type of the tensor, as
        ONNX requires.
        """
        array = self.constant(index)
        if array is None or array.size != 1:
            return None
        value = array.reshape(()).item()
        return (
            float_literal(value)
            if self.operand(index).dtype is DType.FLOAT32
            else python_literal(value)
        )

    def text_attribute(self, name: str, default: str, choices: Iterable[str]) -> str:
        """Return the text attribute `name`, which is `default` if it is absent. Raise ModelError if
        the text is not in `choices`.
        """
        text = self.node.text(name, default)
        if text not in (known := list(choices)):
            message = f"attribute {name!r} of {self.node.op} is {text!r}"
            hint = f"it may be {', '.join(known)}"
            raise ModelError(message, hint=hint, where=repr(self.node.name))
        return text

    def float_attribute(self, name: str, default: float) -> str:
        """Return the literal of the float attribute `name`, which is `default` if it is absent.
        Attributes have single precision. The literal is the shortest one that rounds to the value,
        or the exact value if a result is float64.
        """
        value = self.node.number(name, default)
        double = any(each is not None and each.dtype is DType.FLOAT64 for each in self.results)
        return python_literal(float(np.float32(value))) if double else float_literal(value)

    def flag(self, name: str) -> bool | None:
        """Return True if the integer attribute `name` is present and not 0, otherwise None, which
        `call_code` omits.
        """
        return True if self.node.integer(name) else None

    def outputs(self, code: str) -> str:
        """Return code for the outputs of the node. `code` is the code of a tuple that may have more
        entries than the node has outputs. The returned code is its first entry if the node has one
        output, otherwise a tuple of its first entries.
        """
        count = len(self.node.outputs)
        return f"{code}[0]" if count == 1 else f"{code}[:{count}]"


def call_code(function: str, *operands: object, **settings: object) -> str:
    """Return the code of a call, such as `function(a, b, name=value)`. Operands and settings that
    are None are omitted.
    """
    words = [str(each) for each in operands if each is not None]
    words += [f"{name}={value}" for name, value in settings.items() if value is not None]
    return f"{function}({', '.join(words)})"


def python_literal(value: bool | int | float | complex) -> str:
    """Return a Python literal for a number. An infinity or a NaN becomes a call of `float`."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def float_literal(value: float) -> str:
    """Return the shortest Python literal that rounds to a single-precision number, such as 1e-05
    for 9.999999747378752e-06.

    The largest finite number is written exactly, because its shortest literal is larger, and torch
    rejects a larger number.
    """
    short = float(str(np.float32(value)))
    largest = float(np.finfo(np.float32).max)
    return python_literal(
        math.copysign(largest, value) if largest < abs(short) < math.inf else short
    )


def torch_dtype(dtype: DType) -> str:
    """Return the code of the torch type that holds elements of `dtype` in memory, such as
    `torch.float32`.
    """
    return f"torch.{dtype.torch_name}"


CodeEmitter = Callable[[Call], str]


def template_emitter(template: str, **defaults: float) -> CodeEmitter:
    """Return an emitter that fills in `template`, such as `template_emitter("F.elu({0}, {alpha})",
    alpha=1.0)`. Numbers in braces stand for the code of operands, and names for float attributes.
    `defaults` has the default values of the attributes.
    """
    return lambda call: template.format(
        *call.codes,
        **{name: call.float_attribute(name, default) for name, default in defaults.items()},
    )


def common_type_emitter(emit: CodeEmitter) -> CodeEmitter:
    """Return an emitter that calls `emit` with operands of one floating-point type, for torch
    functions that require this.

    If the floating-point types of the operands and results differ, the code casts the operands to
    the widest type (at least float32), and the results back to their own types.
    """

    def emit_in_common_type(call: Call) -> str:
        floating = [
            each.dtype
            for each in (*call.operands, *call.results)
            if each and each.dtype.is_floating
        ]
        if len(set(floating)) < 2:
            return emit(call)
        widest = max(DType.FLOAT32, *floating, key=lambda each: each.itemsize)

        def cast(code: str | None, value: Value | None) -> tuple[str | None, Value | None]:
            if (
                code is None
                or value is None
                or not value.dtype.is_floating
                or value.dtype is widest
            ):
                return code, value
            return f"{code}.to({torch_dtype(widest)})", replace(value, dtype=widest)

        pairs = [cast(*each) for each in zip(call.codes, call.operands, strict=True)]
        code = emit(
            replace(
                call,
                codes=tuple(pair[0] for pair in pairs),
                operands=tuple(pair[1] for pair in pairs),
            )
        )
        if len(call.results) == 1:
            return code if call.result().dtype is widest else f"({code}).to({call.dtype})"
        types = (torch_dtype(each.dtype) if each else "None" for each in call.results)
        return f"operators.converted({code}, ({', '.join(types)}))"

    return emit_in_common_type
