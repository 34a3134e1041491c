"""One use of an operator, as input of an emitter: local types, the code of operands, and the code
of process groups.
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
    """Return the code of this rank's process group along `axes`. `group` is the number of ranks of
    the stage.
    """
    if axes == (MeshAxis(group, 1),):
        return "p.group"
    return f"p.group.along({', '.join(str(tuple(axis)) for axis in axes)})"


@dataclass(frozen=True, slots=True)
class Call(Signature):
    """One use of an operator. All shapes are the local shapes of this rank.

    An emitter returns one Python expression: a tensor if the operator has one result, otherwise a
    tuple with one entry per output of the node.

    The expression may use `torch`, `F` (torch.nn.functional), `operators` (the runtime's library of
    functions that torch lacks), `p.device`, and the code that `group` and `stream` return. Text
    from the model may occur only as its `repr`.
    """

    codes: tuple[str | None, ...]
    splits: tuple[Split, ...] = ()
    mesh: MeshAxes = ()
    """The axis of the stage's device mesh for each split."""
    devices: int = 1
    samples: BatchDimension | None = None
    """Batch dimension of the result of a random operator, or None."""

    @staticmethod
    def of(
        signature: Signature, codes: tuple[str | None, ...], splits: tuple[Split, ...] = ()
    ) -> Call:
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
        return torch_dtype(self.result().dtype)

    def arg(self, index: int) -> str:
        """Return the code of operand `index`, which must be present."""
        code = self.codes[index]
        assert code is not None, f"{self.node.op} lacks operand {index}"
        return code

    def optional(self, index: int) -> str:
        """Return the code of operand `index`, or "None" if it is absent."""
        return self.arg(index) if self.present(index) else "None"

    def args(self, count: int | None = None) -> str:
        """Return the codes of the first `count` operands (default: all), which must be present."""
        return ", ".join(
            self.arg(index) for index in range(len(self.codes) if count is None else count)
        )

    def optionals(self, count: int) -> str:
        """Return the codes of the first `count` operands, with "None" for each absent operand."""
        return ", ".join(map(self.optional, range(count)))

    def share(self, count: int, axis: str) -> int:
        """Return the local number of `count` heads or groups along `axis`: `count` divided by the
        degree of the split.
        """
        return count // math.prod(split.degree for split in self.splits if split.axis == axis)

    def is_split(self, axis: str) -> bool:
        return any(split.axis == axis for split in self.splits)

    def group(self, *axes: str) -> str | None:
        """Return the code of the process group over which the joint `axes` are split, or None if
        none of them is split.
        """
        if not any(map(self.is_split, axes)):
            return None
        pairs = zip(self.splits, self.mesh, strict=True)
        return group_code(
            merge_axes(place for split, place in pairs if split.axis in axes), self.devices
        )

    def stream(self) -> str:
        """Return the code of the random stream of this operator. The random values depend on the
        node and on the index of an element in the full tensor.
        """
        name = next(filter(None, self.node.outputs))
        key = int.from_bytes(
            hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big"
        )
        # For each dimension of the first result: the mesh axes over which it is split, outer to
        # inner, as (degree, stride).
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
        """Return the code of operand `index`, or "None" if it is absent. If `axis` is split, only
        one rank along the axis adds the operand, because the results are partial sums.
        """
        if not self.present(index) or not self.is_split(axis):
            return self.optional(index)
        return f"operators.once({self.arg(index)}, {self.group(axis)})"

    def scalar(self, index: int) -> str | None:
        """Return a Python literal for operand `index` if it is a constant of one element, otherwise
        None. An operation of a tensor with a literal keeps the tensor's type, as ONNX requires.
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

    def choice(self, name: str, default: str, choices: Iterable[str]) -> str:
        """Return the string attribute `name`. Raise ModelError if its value is not in `choices`."""
        text = self.node.text(name, default)
        if text not in (known := list(choices)):
            message = f"attribute {name!r} of {self.node.op} is {text!r}"
            hint = f"it may be {', '.join(known)}"
            raise ModelError(message, hint=hint, where=repr(self.node.name))
        return text

    def stated(self, name: str, default: float) -> str:
        """Return the literal of a float attribute, which has single precision. The literal is the
        shortest number that rounds to it, or the exact value if a result is float64.
        """
        value = self.node.number(name, default)
        double = any(each is not None and each.dtype is DType.FLOAT64 for each in self.results)
        return python_literal(float(np.float32(value))) if double else float_literal(value)

    def flag(self, name: str) -> bool | None:
        """Return True if the integer attribute `name` is set, otherwise None."""
        return True if self.node.integer(name) else None

    def outputs(self, code: str) -> str:
        """Return the code of the first n entries of the tuple `code`, for the n outputs of the
        node.
        """
        count = len(self.node.outputs)
        return f"{code}[0]" if count == 1 else f"{code}[:{count}]"


def call_code(function: str, *operands: object, **settings: object) -> str:
    """Return the code `function(a, b, name=value)`, without the operands and settings that are
    None.
    """
    words = [str(each) for each in operands if each is not None]
    words += [f"{name}={value}" for name, value in settings.items() if value is not None]
    return f"{function}({', '.join(words)})"


def python_literal(value: bool | int | float | complex) -> str:
    """Return a Python literal. Infinities and NaN become calls of `float`."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def float_literal(value: float) -> str:
    """Return a literal for a single-precision number: the shortest that rounds to it, such as 1e-05
    for 9.999999747378752e-06.

    The largest finite number is written in full, because its shortest literal exceeds it and torch
    rejects a larger value.
    """
    short = float(str(np.float32(value)))
    largest = float(np.finfo(np.float32).max)
    return python_literal(
        math.copysign(largest, value) if largest < abs(short) < math.inf else short
    )


def torch_dtype(dtype: DType) -> str:
    return f"torch.{dtype.held}"


CodeEmitter = Callable[[Call], str]


def template_emitter(template: str, **defaults: float) -> CodeEmitter:
    """Return an emitter that fills in a template, as in `formula("F.elu({0}, {alpha})",
    alpha=1.0)`: operands by position, float attributes by name. `defaults` has the attributes'
    default values.
    """
    return lambda call: template.format(
        *call.codes, **{name: call.stated(name, default) for name, default in defaults.items()}
    )


def in_common_type(emit: CodeEmitter) -> CodeEmitter:
    """Return an emitter for torch functions that require operands of one floating-point type.

    If the operands and results have several types, the operands are cast to the widest (at least
    float32), and the results to their types.
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
