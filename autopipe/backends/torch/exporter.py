"""From a PyTorch module to an ONNX file with its loss, by torch's own exporter.

The exporter loses parts of a module that training needs. They are put into the traced program
(`traced_program.py`) or, if a file has no place for them, into its metadata.
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
    overlapping,
    record_state,
    tensors_of,
)
from autopipe.backends.torch.torch_interfaces import FakeTensor, NormBase
from autopipe.backends.torch.traced_program import InSupportedParts, prepare, translations
from autopipe.ir.errors import ConfigurationError

_BATCH: Final = "batch"
_FROZEN: Final = "autopipe.frozen"
"""Key of the file's metadata that lists the parameters whose `requires_grad` is False."""
_LOSS: Final = "loss"
"""Name of the output that is the module's loss."""
_MODULE: Final = "module."
"""Prefix of the names in `_WithLoss` that the module's own names have."""
_SCOPES: Final = "pkg.torch.onnx.name_scopes"
"""Key of a node's metadata: the modules around it, outermost first, and its own name."""
_CLASSES: Final = "pkg.torch.onnx.class_hierarchy"
"""Key of a node's metadata: the classes of these modules, and the traced operator."""
_SIGNATURE: Final = "pkg.torch.export.ExportedProgram.graph_signature"
"""Key of the graph's metadata in which torch says which tensors are parameters."""

Example = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""Inputs of a module: one, several by position, or keyword arguments by name."""


class _WithLoss(nn.Module):
    """A module that ends in a loss, if there is one."""

    def __init__(
        self, module: nn.Module, loss: Callable[..., torch.Tensor] | None, keywords: Sequence[str]
    ) -> None:
        super().__init__()
        self.module = module
        self._loss_name = _LOSS
        while hasattr(module, self._loss_name):  # Parameters of the loss have names of their own.
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
        # A model of `transformers` returns its loss if it is called with labels.
        return found if getattr(found, "loss", None) is None else found.loss


@dataclass(frozen=True, slots=True)
class Subject:
    """A module to export: the module with its loss, and an example of its inputs."""

    module: _WithLoss
    """The user's module and its loss as one module."""
    names: tuple[str, ...]
    """Names of the inputs in the file, labels last."""
    tensors: tuple[torch.Tensor, ...]
    """An example of each input."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return each parameter under the first of its names in the user's module."""
        return {self.name_of(name): parameter for name, parameter in self.module.named_parameters()}

    def tensor_names(self) -> dict[int, list[str]]:
        """Return the names in the user's module of each parameter and buffer, by its `id`."""
        found: dict[int, list[str]] = {}
        for name, tensor in tensors_of(self.module):
            found.setdefault(id(tensor), []).append(self.name_of(name))
        return found

    @staticmethod
    def name_of(name: str) -> str:
        """Return the name in the user's module of what `module` calls `name`."""
        return name.removeprefix(_MODULE)


def subject_of(
    module: nn.Module,
    example: Example,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] | None,
    labels: torch.Tensor | None,
) -> Subject:
    """Return the module and its example inputs as they are exported. Raises ConfigurationError if
    these do not fit.
    """
    if (loss is None) != (labels is None):
        raise ConfigurationError(
            "loss and labels go together", "labels is an example of what loss compares with"
        )
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"a {type(module).__name__} is no torch.nn.Module")
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
                f"the example of input {name!r} is a {type(tensor).__name__}, no tensor"
            )
    batches = {len(each) for each in tensors if each.dim()}
    if len(batches) != 1:
        raise ConfigurationError(
            f"examples have {sorted(batches)} samples", "give each the same number of rows"
        )
    if batches == {1}:  # Torch takes an extent of 1 for a constant.
        tensors = [torch.cat([each, each]) if each.dim() else each for each in tensors]
    wrapped = _WithLoss(module, loss, list(named))
    wrapped.training = module.training
    _require_exportable(wrapped)
    held = {Subject.name_of(name) for name, _ in tensors_of(wrapped)}
    # A trace would make one input of two that are the same tensor, such as tokens that are their
    # own labels.
    return Subject(
        module=wrapped,
        names=tuple(_without_namesake(name, held) for name in names),
        tensors=tuple(each.detach().clone() for each in tensors),
    )


def _without_namesake(name: str, held: Collection[str]) -> str:
    """Return the name of an input, with underscores behind it if a parameter or buffer has its
    name.
    """
    while name in held:
        name += "_"
    return name


def _require_exportable(module: _WithLoss) -> None:
    """Raise ConfigurationError, naming the part, for parts of a module that no ONNX file can
    hold.
    """
    for name, _ in tensors_of(module):
        if Subject.name_of(name) == _LOSS:
            raise ConfigurationError(
                f"the module has a tensor {_LOSS!r}: the loss of the file has this name"
            )
    for first, second in overlapping(module):
        names = f"{Subject.name_of(first)!r} and {Subject.name_of(second)!r}"
        raise ConfigurationError(
            f"{names} are different tensors in one memory: a file holds them apart",
            "make one parameter of them (b.weight = a.weight), or copies (clone())",
        )
    for name, each in module.named_modules():
        if not isinstance(each, NormBase) or not each.training or not each.track_running_stats:
            continue
        if each.momentum is None and each.running_mean is not None:
            raise ConfigurationError(
                (
                    f"{type(each).__name__} {Subject.name_of(name)!r} has momentum=None: ONNX has "
                    "no cumulative average"
                ),
                "set a momentum such as 0.1, or put it into eval()",
            )


def loss_among(results: Sequence[object]) -> int | None:
    """Return the position of the only scalar with a gradient among a module's results, its loss;
    None if there is none or if there are several.
    """
    places = [
        place
        for place, each in enumerate(results)
        if isinstance(each, torch.Tensor) and each.dim() == 0 and each.is_floating_point()
    ]
    return places[0] if len(places) == 1 else None


@dataclass(frozen=True, slots=True)
class ExportedModule:
    """A module as an ONNX model."""

    program: torch.onnx.ONNXProgram
    """The model; `save` writes its file."""
    changed: tuple[str, ...]
    """Buffers and parameters that the module's forward changes and the model does not."""
    moved: tuple[str, ...]
    """Buffers that both change."""
    left_out: tuple[str, ...]
    """Entries of the module's `state_dict` that the file has no record of, each with the reason."""


def exported(subject: Subject) -> ExportedModule:
    """Return the module as an ONNX model whose batch axis is symbolic, with a record of its
    `state_dict`.

    The module stays as it is. Raises ConfigurationError if torch's exporter is not installed or
    cannot export it.
    """
    batch = torch.export.Dim(_BATCH)
    shapes = (tuple({0: batch} if each.dim() else None for each in subject.tensors),)
    with _without_remarks():
        traced = _traced(subject, shapes)
        program = _translated(traced, subject)
    _name_tensors(program.model, subject)
    # Outputs of the trace begin with buffers that change.
    results = [each.meta.get("val") for each in traced.graph.output_node().args[0]]
    place = loss_among(results[-len(program.model.graph.outputs) :])
    if place is not None:
        program.model.graph.outputs[place].name = _LOSS
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


def _traced(subject: Subject, shapes: Any) -> torch.export.ExportedProgram:
    """Return the traced program: of the Python code that runs, else, if that reads the number of
    samples as a constant (`len(x)`), of its bytecode.
    """
    first = ""
    for strict in (False, True):
        try:
            with InSupportedParts():
                traced = torch.export.export(
                    subject.module, subject.tensors, dynamic_shapes=shapes, strict=strict
                )
        except Exception as error:  # noqa: BLE001  (The user's own code runs in a trace.)
            first = first or _reason(error)
            continue
        if not any(isinstance(each, FakeTensor) for each in traced.constants.values()):
            return traced
        first = (
            "it takes a value that the module computes for a constant, as of `.data` (use detach())"
        )
    raise ConfigurationError(
        f"torch cannot trace the module: {first}", "torch.export.export says more"
    )


def _reason(error: BaseException) -> str:
    """Return the first line of an error of torch's, and the first item of its list of reasons."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    items = [line.removeprefix("- ") for line in lines[1:] if line.startswith("- ")]
    return ": ".join([lines[0].partition(" For more information")[0], *items[:1]])


def _translated(traced: torch.export.ExportedProgram, subject: Subject) -> torch.onnx.ONNXProgram:
    try:
        program = torch.onnx.export(
            prepare(traced),
            dynamo=True,
            input_names=subject.names,
            custom_translation_table=translations(),
            # It would make one parameter of several that are equal, as a new module's are.
            optimize=False,
            verbose=False,
        )
    except ModuleNotFoundError as error:
        hint = f"pip install {error.name}, or autopipe with its extra 'export'"
        raise ConfigurationError(f"torch's exporter needs {error.name}", hint) from error
    except torch.onnx.errors.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        message = f"torch cannot export the module: {_reason(cause)}"
        raise ConfigurationError(message, "torch.onnx.export says more") from error
    assert program is not None
    return program


def _name_tensors(model: Any, subject: Subject) -> None:
    """Give tensors of the file the module's names, and state in its metadata which parameters are
    not trained.

    A tensor that the module has under several names has the first of them in the file.
    """
    first = first_names(subject.module)
    signature = model.graph.metadata_props.get(_SIGNATURE, "")
    for name, known in first.items():
        value = model.graph.initializers.get(name)
        if name != known and value is not None:
            # The trace reads another of the names. The signature says both names, each of the other
            # argument.
            value.name = known
            signature = _exchanged(signature, f"target='{name}'", f"target='{known}'")
    wanted = {subject.name_of(value.name) for value in model.graph.initializers.values()}
    _rename_results(model.graph, wanted)
    for value in list(model.graph.initializers.values()):
        value.name = subject.name_of(value.name)
    model.graph.metadata_props[_SIGNATURE] = signature.replace(f"target='{_MODULE}", "target='")
    frozen = [
        name for name, parameter in subject.parameters().items() if not parameter.requires_grad
    ]
    model.metadata_props[_FROZEN] = json.dumps(frozen)


def _name_scopes(model: Any, subject: Subject) -> None:
    """Give the modules around each node of the file their names in the user's module."""
    for node in model.graph:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
        classes = ast.literal_eval(node.metadata_props.get(_CLASSES, "[]"))
        if len(scopes) < 3 or f"{scopes[1]}." != _MODULE:
            continue  # A part of the loss.
        inner = [subject.name_of(scope) for scope in scopes[2:]]
        node.metadata_props[_SCOPES] = str(["", *inner])
        node.metadata_props[_CLASSES] = str(classes[1:])


def _exchanged(text: str, first: str, second: str) -> str:
    """Return the text with each of two words in the place of the other."""
    pattern = f"{re.escape(first)}|{re.escape(second)}"
    return re.sub(pattern, lambda found: second if found[0] == first else first, text)


def _name_batch(model: Any) -> None:
    """Give the symbol of the batch axis its name in the file."""
    symbols = {
        str(value.shape[0])
        for value in model.graph.inputs
        if value.shape is not None and len(value.shape)
    }
    if len(symbols) != 1:
        return
    (symbol,) = symbols
    for value in (*model.graph.inputs, *model.graph.outputs, *_results(model.graph)):
        for axis, extent in enumerate(value.shape or ()):
            if str(extent) == symbol:
                value.shape[axis] = _BATCH


def _rename_results(graph: Any, wanted: Collection[str]) -> None:
    """Give results of nodes other names than those that parameters shall have: a parameter `mean`
    beside a mean.
    """
    taken = {
        *wanted,
        *(value.name for value in graph.inputs),
        *(value.name for value in _results(graph)),
    }
    for value in _results(graph):
        if value.name not in wanted:
            continue
        name = f"{value.name}_result"
        while name in taken:
            name += "_"
        taken.add(name)
        value.name = name


def _results(graph: Any) -> Iterator[Any]:
    for node in graph:
        yield from node.outputs


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Suppress the exporter's remarks about its own parts and about a module in training mode."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
