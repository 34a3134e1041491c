"""Suggested names of variables in generated code, from the names that the exporter kept and from
operators: `query` for the result of a linear layer `layers.3.attention.query`, `scores` for the
operand of a softmax.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from autopipe.backends.torch.codegen.identifiers import identifier
from autopipe.ir.graph import Value
from autopipe.ir.layer_names import is_invented_name, path_words
from autopipe.ir.ops import OPERATORS, qualified_name
from autopipe.ir.program import Collective, Compute, Operation

HIDDEN: Final = "hidden"
"""Name of the sum of two values, and of an activation from another stage."""
_NAMES: Final[Mapping[str, str]] = {
    "Add": HIDDEN,
    "Mul": "product",
    "Sub": "difference",
    "Div": "quotient",
    "MatMul": "product",
    "Einsum": "product",
    "Attention": "attention",
    "LinearAttention": "attention",
    "Softmax": "probabilities",
    "LogSoftmax": "log_probabilities",
    "SoftmaxCrossEntropyLoss": "loss",
    "NegativeLogLikelihoodLoss": "loss",
    "autopipe.LinearCrossEntropy": "loss",
    "Gather": "rows",
    "GatherND": "rows",
    "GatherElements": "rows",
    "Concat": "joined",
    "Split": "part",
    "Range": "positions",
    "Where": "selected",
    "ReduceMean": "mean",
    "ReduceSum": "total",
    "ReduceMax": "largest",
    "Conv": "conv",
    "autopipe.Experts": "experts",
    "autopipe.ListedExperts": "experts",
    "SwiGLU": "gated",
    "autopipe.GatedUnit": "gated",
}
"""Name of the first result, by operator."""
_FURTHER_NAMES: Final[Mapping[str, Sequence[str]]] = {
    "TopK": ("largest", "indices"),
    "Dropout": ("", "mask"),
    "LSTM": ("states", "last_state", "last_cell"),
    "GRU": ("states", "last_state"),
    "RNN": ("states", "last_state"),
}
"""Names of all results of operators with several results; "" for the name from the model."""
_COMPARISONS: Final = frozenset(
    {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor", "Not"}
)
"""Operators whose result is named `mask`."""
_ROTARY: Final = frozenset({"RotaryEmbedding", "autopipe.Rotary", "com.microsoft.RotaryEmbedding"})
"""Operators whose result has the name of the first operand."""
_ANGLES: Final = frozenset({"Cos", "Sin"})
"""Elementwise operators whose result has the name of the operator."""
_KINDS: Final[Mapping[str, str]] = {
    "normalization": "normalized",
    "recurrent": "states",
    "convolution": "conv",
    "matmul": "product",
}
"""Name of the first result, by kind of the operator (`Operator.kind`)."""
_TRANSPARENT_KINDS: Final = frozenset({"elementwise", "view", "memory"})
"""Kinds of operators whose result has the name of their operand, if they have only one."""
_BEFORE_SOFTMAX: Final = frozenset({"Mul", "Div", "Add", "Sub", "Where", "Cast", "Clip"})
"""Operators between the matmul that computes attention scores and the softmax."""


_AFTER_SOFTMAX: Final = frozenset({"Cast", "Dropout", "Reshape", "Identity", "Where"})
"""Operators between the softmax and the matmul of the attention probabilities with the values."""


@dataclass(frozen=True, slots=True)
class NameHint:
    """Suggested name of a variable."""

    stem: str = HIDDEN
    follows: str | None = None
    """Operand whose name the variable should have, if the operand has a name in the function; None
    if the variable should be called `stem`. The operand is given by its name in the graph or, in a
    hint for statements, by its token.
    """


def name_hints(
    operations: Sequence[Operation], parameters: Mapping[str, str], constants: Iterable[str]
) -> dict[str, NameHint]:
    """Return a hint for each value that the operations compute, by its name in the graph.
    `parameters` has the name of each parameter. Time is linear in the number of operands.
    """
    held = {*parameters, *constants}
    hints: dict[str, NameHint] = {}
    for operation in operations:
        hint = _hint_of(operation, parameters, held)
        named = _names_of_results(operation)
        for index, name in enumerate(operation.writes):
            if index < len(named) and named[index]:
                hints[name] = NameHint(named[index])
            else:
                hints[name] = hint if index == 0 else NameHint(hint.stem)
    _name_attention(operations, hints, held)
    return hints


def _names_of_results(operation: Operation) -> Sequence[str]:
    """Return the names of the results of an operator with several results, () for another
    operation.
    """
    if isinstance(operation, Collective):
        return ()
    return _FURTHER_NAMES.get(qualified_name(operation.signature.node), ())


def _hint_of(operation: Operation, parameters: Mapping[str, str], held: set[str]) -> NameHint:
    """Return the hint for the first result of an operation. `held` has the names of parameters and
    constants.
    """
    if isinstance(operation, Collective):
        return NameHint(follows=operation.source.name)
    node = operation.signature.node
    variables = [name for name in dict.fromkeys(operation.reads) if name not in held]
    for name in operation.reads:
        if name in parameters and (module := _module_name(parameters[name])):
            return NameHint(module)
    name = qualified_name(node)
    operator = OPERATORS.get(name)
    kind = operator.kind if operator is not None else "matmul"
    reads_parameter = any(each in parameters for each in operation.reads)
    if reads_parameter and (scope := _scope_name(node.name, node.op)):
        return NameHint(scope)
    if name in _ROTARY:
        return NameHint(follows=operation.reads[0])
    is_transparent = kind in _TRANSPARENT_KINDS and name not in _COMPARISONS | _ANGLES
    if len(variables) == 1 and is_transparent and len(operation.writes) == 1:
        return NameHint(follows=variables[0])
    if name in _COMPARISONS:
        return NameHint("mask")
    return NameHint(_NAMES.get(name) or _KINDS.get(kind) or identifier(node.op))


def _module_name(parameter: str) -> str:
    """Return the identifier of the module to which a parameter belongs, such as `query` for
    `layers.0.attention.query.weight`; "" if the name of the parameter does not tell.
    """
    if is_invented_name(parameter):
        return ""
    return _last_word(path_words(parameter)[:-1])


def _scope_name(node: str, op: str) -> str:
    """Return the identifier of the innermost module in the name of a node, such as `query` for
    `/layers.0/attention/query/MatMul`; "" if the name has no module.
    """
    if "/" not in node:
        return ""
    words = [word for word in node.strip("/").split("/") if word]
    if words and re.fullmatch(rf"{re.escape(op)}(_\d+)?", words[-1]):
        words = words[:-1]
    return _last_word(path_words(words[-1])) if words else ""


def _last_word(words: Sequence[str]) -> str:
    """Return an identifier for the last word of a path. Numbers are joined to the word before
    them.
    """
    start = len(words) - 1
    while start > 0 and words[start].isdigit():
        start -= 1
    text = "_".join(words[start:]) if words else ""
    return "" if not text or text[0].isdigit() else identifier(text)


def _name_attention(
    operations: Sequence[Operation], hints: dict[str, NameHint], held: set[str]
) -> None:
    """Name the parts of an attention that is written as matmuls and a softmax: `scores` for the
    operand of the softmax, and `attention` for its product with the values. Also name the operands
    of fused attentions.
    """
    producers = {
        name: operation
        for operation in operations
        if isinstance(operation, Compute)
        for name in operation.writes
    }
    probabilities: set[str] = set()
    for operation in operations:
        if not isinstance(operation, Compute):
            continue
        name = qualified_name(operation.signature.node)
        if name == "Attention":
            _name_operands_of_attention(operation.reads, hints)
        variables = [each for each in operation.reads if each not in held]
        if name == "Softmax":
            probabilities.update(operation.writes)
            for scores in _values_before_softmax(variables[:1], producers, held):
                hints[scores] = NameHint("scores")
        elif name in ("MatMul", "Einsum") and probabilities.intersection(variables):
            hints[operation.writes[0]] = NameHint("attention")
        elif name in _AFTER_SOFTMAX and probabilities.intersection(variables):
            probabilities.update(operation.writes)


def _name_operands_of_attention(operands: Sequence[str], hints: dict[str, NameHint]) -> None:
    """Name the parts of a joint projection that become the query, the key and the value of an
    attention.
    """
    for operand, name in zip(operands, ("query", "key", "value"), strict=False):
        origin = operand
        while origin in hints and hints[origin].follows in hints:
            origin = hints[origin].follows or origin
        if origin in hints and hints[origin].stem == _NAMES["Split"]:
            hints[origin] = NameHint(name)


def _values_before_softmax(
    names: Sequence[str], producers: Mapping[str, Compute], held: set[str]
) -> list[str]:
    """Return the values from the result of the matmul that computes attention scores to the operand
    of the softmax, `names`; [] if no such matmul is found.
    """
    found: list[str] = []
    name = next(iter(names), None)
    while name is not None and (producer := producers.get(name)) is not None:
        found.append(name)
        op = qualified_name(producer.signature.node)
        if op in ("MatMul", "Einsum"):
            return found
        if op not in _BEFORE_SOFTMAX:
            return []
        candidates = [each for each in producer.reads if each not in held and each in producers]
        largest = max(
            producer.signature.operands, key=lambda each: 0 if each is None else each.elements
        )
        is_known = largest is not None and largest.name in candidates
        name = largest.name if is_known and largest is not None else None
    return []


def model_input_name(value: Value) -> str:
    """Return an identifier for an input or output of a stage from its name in the model; "" if the
    name does not look like the name of an input or output of the model.
    """
    is_result_of_node = re.fullmatch(r"(?!input|output).*_\d+", value.name) is not None
    is_plain = value.name.isidentifier() and not is_invented_name(value.name)
    return identifier(value.name) if is_plain and not is_result_of_node else ""
