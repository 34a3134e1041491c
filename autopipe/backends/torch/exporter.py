"""Export of a PyTorch module with its loss as an ONNX file, by torch's exporter.

The exporter loses information that training needs. This module and `traced_program.py` add the
information to the traced program or, if ONNX cannot express it, to the metadata of the file.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from autopipe.backends.torch.module_state import (
    buffer_changes,
    first_names,
    named_tensors,
    overlapping_tensors,
    record_state,
)
from autopipe.backends.torch.torch_interfaces import FakeTensor, NormBase
from autopipe.backends.torch.traced_program import (
    DecomposeUnsupported,
    onnx_translations,
    prepare_for_onnx,
)
from autopipe.ir.errors import ConfigurationError

_BATCH_SYMBOL: Final = "batch"
_FROZEN_KEY: Final = "autopipe.frozen"
"""Key of the file's metadata whose value lists the parameters with `requires_grad=False`."""
_LOSS_OUTPUT: Final = "loss"
"""Name of the output that is the module's loss."""
_MODULE_PREFIX: Final = "module."
"""Prefix that `_ModuleWithLoss` adds to the names of the user's module."""
_SCOPES_KEY: Final = "pkg.torch.onnx.name_scopes"
"""Key of a node's metadata whose value lists the names of the modules that contain the node, the
outermost first, and then the name of the node.
"""
_CLASSES_KEY: Final = "pkg.torch.onnx.class_hierarchy"
"""Key of a node's metadata whose value lists the classes of the modules that contain the node, the
outermost first, and then the traced operator.
"""
_SIGNATURE_KEY: Final = "pkg.torch.export.ExportedProgram.graph_signature"
"""Key of the graph's metadata whose value states which tensors are parameters; torch's exporter
writes it.
"""

Example = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""Inputs of a module: one tensor, several by position, or keyword arguments by name."""


class _ModuleWithLoss(nn.Module):
    """The user's module and loss function as one module. Its inputs are the positional inputs of
    the module, the inputs called `keywords`, and the labels if there is a loss. Its result is the
    loss or, without a loss function, the module's result.
    """

    def __init__(
        self, module: nn.Module, loss: Callable[..., torch.Tensor] | None, keywords: Sequence[str]
    ) -> None:
        super().__init__()
        self.module = module
        self._loss_name = _LOSS_OUTPUT
        # The loss may be a module, which becomes an attribute of this module. Its name must differ
        # from the names of the user's module, because export removes the prefix of the user's
        # module from tensor names.
        while hasattr(module, self._loss_name):
            self._loss_name += "_"
        setattr(self, self._loss_name, loss)
        self._keywords = tuple(keywords)

    def forward(self, *tensors: torch.Tensor) -> Any:
        labels = None
        loss = getattr(self, self._loss_name)
        if loss is not None:
            labels = tensors[-1]
            tensors = tensors[:-1]
        count = len(tensors) - len(self._keywords)
        named = dict(zip(self._keywords, tensors[count:], strict=True))
        found = self.module(*tensors[:count], **named)
        if loss is not None:
            return loss(getattr(found, "logits", found), labels)
        # A model of the package transformers returns its loss if it is called with labels. This
        # loss is then the result.
        return found if getattr(found, "loss", None) is None else found.loss


@dataclass(frozen=True, slots=True)
class ExportSubject:
    """A module to export, with its loss and example inputs."""

    module: _ModuleWithLoss
    """The user's module and its loss as one module."""
    names: tuple[str, ...]
    """Names of the inputs in the file, in the order of `tensors`. The labels, if there are any, are
    last.
    """
    tensors: tuple[torch.Tensor, ...]
    """An example of each input."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their names in the user's module. A tied parameter has the first
        of its names.
        """
        return {self.name_of(name): parameter for name, parameter in self.module.named_parameters()}

    def tensor_names(self) -> dict[int, list[str]]:
        """Return the names of each parameter and buffer in the user's module, by the `id` of the
        tensor. A tied tensor has several names.
        """
        found: dict[int, list[str]] = {}
        for name, tensor in named_tensors(self.module):
            found.setdefault(id(tensor), []).append(self.name_of(name))
        return found

    @staticmethod
    def name_of(name: str) -> str:
        """Return the name in the user's module for a tensor name of the combined `module`."""
        return name.removeprefix(_MODULE_PREFIX)


def make_subject(
    module: nn.Module,
    example: Example,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] | None,
    labels: torch.Tensor | None,
) -> ExportSubject:
    """Return the module, its loss function and its example inputs as an `ExportSubject`. `labels`
    are an example of the labels that `loss` reads. Raise ConfigurationError if the arguments do not
    match one another, or if ONNX cannot express a part of the module.
    """
    if (loss is None) != (labels is None):
        raise ConfigurationError(
            "loss and labels require each other, but only one is set",
            "set labels to an example of the labels that the loss reads",
        )
    if not isinstance(module, nn.Module):
        raise ConfigurationError(
            f"the module is of type {type(module).__name__}, expected torch.nn.Module"
        )
    named = dict(example) if isinstance(example, Mapping) else {}
    positional: list[torch.Tensor] = []
    if isinstance(example, torch.Tensor):
        positional = [example]
    elif not isinstance(example, Mapping):
        positional = list(example)
    names = (
        ["input"]
        if len(positional) == 1
        else [f"input_{index}" for index in range(len(positional))]
    )
    names += named
    tensors = [*positional, *named.values()]
    if labels is not None:
        names.append("labels")
        tensors.append(labels)
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise ConfigurationError(
                f"the example of input {name!r} is of type {type(tensor).__name__}, expected a "
                "tensor"
            )
    batches = {len(each) for each in tensors if each.dim()}
    if len(batches) != 1:
        raise ConfigurationError(
            f"the examples differ in the number of samples: {sorted(batches)}",
            "use equal sizes of dimension 0 for all examples",
        )
    # A single sample is repeated, because tracing treats a dimension of size 1 as a constant, so
    # the batch size would be fixed.
    if batches == {1}:
        tensors = [torch.cat([each, each]) if each.dim() else each for each in tensors]
    wrapped = _ModuleWithLoss(module, loss, list(named))
    wrapped.training = module.training
    _require_exportable(wrapped)
    held = {ExportSubject.name_of(name) for name, _ in named_tensors(wrapped)}
    # The example tensors are copied, because tracing merges two inputs that are one tensor, for
    # example tokens that are also the labels.
    return ExportSubject(
        module=wrapped,
        names=tuple(_unique_input_name(name, held) for name in names),
        tensors=tuple(each.detach().clone() for each in tensors),
    )


def _unique_input_name(name: str, held: Collection[str]) -> str:
    """Return `name` with as many underscores appended as needed to differ from all names in
    `held`.
    """
    while name in held:
        name += "_"
    return name


def _require_exportable(module: _ModuleWithLoss) -> None:
    """Raise ConfigurationError for the first part of the module that ONNX cannot express. The
    message names the part.
    """
    for name, _ in named_tensors(module):
        if ExportSubject.name_of(name) == _LOSS_OUTPUT:
            raise ConfigurationError(
                f"the module uses the tensor name {_LOSS_OUTPUT!r}, which is reserved for the loss"
            )
    for first, second in overlapping_tensors(module):
        names = f"{ExportSubject.name_of(first)!r} and {ExportSubject.name_of(second)!r}"
        raise ConfigurationError(
            f"{names} are different tensors that overlap in memory, which an ONNX file cannot "
            "represent",
            "make them one parameter (b.weight = a.weight), or copies (clone())",
        )
    for name, each in module.named_modules():
        if not isinstance(each, NormBase) or not each.training or not each.track_running_stats:
            continue
        if each.momentum is None and each.running_mean is not None:
            raise ConfigurationError(
                (
                    f"{type(each).__name__} {ExportSubject.name_of(name)!r} uses momentum=None, a "
                    "cumulative average, which ONNX does not support"
                ),
                "set a momentum such as 0.1, or call eval() on the module",
            )


def find_loss_result(results: Sequence[object]) -> int | None:
    """Return the index of the loss in the results of a module: the only floating-point scalar.
    Return None if there is none or if there are several.
    """
    places = [
        place
        for place, each in enumerate(results)
        if isinstance(each, torch.Tensor) and each.dim() == 0 and each.is_floating_point()
    ]
    return places[0] if len(places) == 1 else None


@dataclass(frozen=True, slots=True)
class ExportedModule:
    """Result of an export: the ONNX model, and what the model does not reproduce."""

    program: torch.onnx.ONNXProgram
    """The ONNX model. Its method `save` writes the file."""
    changed: tuple[str, ...]
    """Buffers and parameters that the module's forward changes and that the ONNX model leaves
    unchanged.
    """
    moved: tuple[str, ...]
    """Buffers that both the module's forward and the ONNX model change: running statistics and
    counters.
    """
    left_out: tuple[str, ...]
    """Entries of the module's `state_dict` that the file does not record, as texts `NAME (REASON)`.
    """


def export_to_onnx(subject: ExportSubject) -> ExportedModule:
    """Export the module as an ONNX model with a symbolic batch dimension and a record of its
    `state_dict`.

    The module is not changed. Raise ConfigurationError if torch's exporter is not installed or
    cannot export the module.
    """
    batch = torch.export.Dim(_BATCH_SYMBOL)
    shapes = (tuple({0: batch} if each.dim() else None for each in subject.tensors),)
    with _suppress_exporter_output():
        traced = _trace_module(subject, shapes)
        program = _translate_to_onnx(traced, subject)
    _name_tensors(program.model, subject)
    # The traced program returns changed buffers before the results of the module, so only its last
    # results can be the loss.
    results = [each.meta.get("val") for each in traced.graph.output_node().args[0]]
    place = find_loss_result(results[-len(program.model.graph.outputs) :])
    if place is not None:
        program.model.graph.outputs[place].name = _LOSS_OUTPUT
    _name_scopes(program.model, subject)
    _name_batch(program.model)
    assert program.exported_program is not None
    changes = buffer_changes(program.exported_program)
    counts = {subject.name_of(name): count for name, count in changes.counts.items()}
    first = first_names(subject.module)
    state = subject.module.module.state_dict(keep_vars=True)
    left_out = record_state(program.model, state, subject.tensor_names(), counts)
    return ExportedModule(
        program=program,
        changed=tuple(subject.name_of(first[name]) for name in changes.others),
        moved=tuple(
            subject.name_of(first[name]) for name in (*changes.statistics, *changes.counts)
        ),
        left_out=tuple(left_out),
    )


def _trace_module(subject: ExportSubject, shapes: Any) -> torch.export.ExportedProgram:
    """Return the traced program of the module. `shapes` has the dynamic dimensions for
    `torch.export.export`.

    The Python code of the module is traced first. If that fails, for example because the code reads
    the batch size as a constant (`len(x)`), its bytecode is traced (`strict=True`). Raise
    ConfigurationError if both fail.
    """
    first = ""
    for strict in (False, True):
        try:
            with DecomposeUnsupported():
                traced = torch.export.export(
                    subject.module, subject.tensors, dynamic_shapes=shapes, strict=strict
                )
        except Exception as error:  # noqa: BLE001  (The user's own code runs in a trace.)
            first = first or _first_reason(error)
            continue
        if not any(isinstance(each, FakeTensor) for each in traced.constants.values()):
            return traced
        first = (
            "the module computes a value that the trace treats as a constant, such as `.data` "
            "(use detach())"
        )
    raise ConfigurationError(
        f"torch cannot trace the module: {first}", "run torch.export.export for the full error"
    )


def _first_reason(error: BaseException) -> str:
    """Return the first line of an error of torch. If the error lists reasons, append the first
    reason.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    items = [line.removeprefix("- ") for line in lines[1:] if line.startswith("- ")]
    return ": ".join([lines[0].partition(" For more information")[0], *items[:1]])


def _translate_to_onnx(
    traced: torch.export.ExportedProgram, subject: ExportSubject
) -> torch.onnx.ONNXProgram:
    """Return the ONNX model of a traced program. Raise ConfigurationError if a package is missing
    or the exporter fails.
    """
    try:
        program = torch.onnx.export(
            prepare_for_onnx(traced),
            dynamo=True,
            input_names=subject.names,
            custom_translation_table=onnx_translations(),
            # The optimizer is disabled, because it would merge parameters with equal values, such
            # as the initial biases of a new module.
            optimize=False,
            verbose=False,
        )
    except ModuleNotFoundError as error:
        hint = f"pip install {error.name}, or install autopipe with the extra 'export'"
        raise ConfigurationError(
            f"torch's exporter requires the package {error.name}", hint
        ) from error
    except torch.onnx.errors.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        message = f"torch cannot export the module: {_first_reason(cause)}"
        raise ConfigurationError(message, "run torch.onnx.export for the full error") from error
    assert program is not None
    return program


def _name_tensors(model: Any, subject: ExportSubject) -> None:
    """Rename the initializers of an exported `model` to their names in the user's module, a tied
    tensor to the first of its names. Record in the metadata which parameters are not trained.
    """
    first = first_names(subject.module)
    signature = model.graph.metadata_props.get(_SIGNATURE_KEY, "")
    for name, known in first.items():
        value = model.graph.initializers.get(name)
        if name != known and value is not None:
            # The trace names this tied tensor `name` instead of `known`, the first of its names.
            # The signature contains both names, so they are exchanged in it.
            value.name = known
            signature = _exchange_words(signature, f"target='{name}'", f"target='{known}'")
    wanted = {subject.name_of(value.name) for value in model.graph.initializers.values()}
    _rename_results(model.graph, wanted)
    for value in list(model.graph.initializers.values()):
        value.name = subject.name_of(value.name)
    model.graph.metadata_props[_SIGNATURE_KEY] = signature.replace(
        f"target='{_MODULE_PREFIX}", "target='"
    )
    frozen = [
        name for name, parameter in subject.parameters().items() if not parameter.requires_grad
    ]
    model.metadata_props[_FROZEN_KEY] = json.dumps(frozen)


def _name_scopes(model: Any, subject: ExportSubject) -> None:
    """Rewrite the metadata of each node so that module names are those of the user's module. Nodes
    of the loss are not changed.
    """
    for node in model.graph:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES_KEY, "[]"))
        classes = ast.literal_eval(node.metadata_props.get(_CLASSES_KEY, "[]"))
        if len(scopes) < 3 or f"{scopes[1]}." != _MODULE_PREFIX:
            # This node computes the loss, outside of the user's module, so its scopes are not
            # changed.
            continue
        inner = [subject.name_of(scope) for scope in scopes[2:]]
        node.metadata_props[_SCOPES_KEY] = str(["", *inner])
        node.metadata_props[_CLASSES_KEY] = str(classes[1:])


def _exchange_words(text: str, first: str, second: str) -> str:
    """Return `text` with `first` and `second` exchanged."""
    pattern = f"{re.escape(first)}|{re.escape(second)}"
    return re.sub(pattern, lambda found: second if found[0] == first else first, text)


def _name_batch(model: Any) -> None:
    """Rename the symbol of the batch dimension in the file to `batch`. Do nothing if the inputs
    differ in dimension 0.
    """
    symbols = {
        str(value.shape[0])
        for value in model.graph.inputs
        if value.shape is not None and len(value.shape)
    }
    if len(symbols) != 1:
        return
    (symbol,) = symbols
    for value in (*model.graph.inputs, *model.graph.outputs, *_node_results(model.graph)):
        for axis, extent in enumerate(value.shape or ()):
            if str(extent) == symbol:
                value.shape[axis] = _BATCH_SYMBOL


def _rename_results(graph: Any, wanted: Collection[str]) -> None:
    """Rename each node result whose name is in `wanted`, the names of the parameters: a result
    `mean` becomes `mean_result` if there is a parameter `mean`.
    """
    taken = {
        *wanted,
        *(value.name for value in graph.inputs),
        *(value.name for value in _node_results(graph)),
    }
    for value in _node_results(graph):
        if value.name not in wanted:
            continue
        name = f"{value.name}_result"
        while name in taken:
            name += "_"
        taken.add(name)
        value.name = name


def _node_results(graph: Any) -> Iterator[Any]:
    """Yield the results of all nodes of an exported graph."""
    for node in graph:
        yield from node.outputs


@contextmanager
def _suppress_exporter_output() -> Iterator[None]:
    """Context manager that suppresses Python warnings, and log lines up to level WARNING. The
    exporter warns about its internals and about modules in training mode.
    """
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
