"""Comparison of an exported ONNX file with its PyTorch module: loss, gradients and outputs on two
examples. A generated program computes the file's results on one device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import yaml

from autopipe.api.codegen import write_programs
from autopipe.api.program_folder import rank_arguments
from autopipe.api.request import make_request
from autopipe.backends.torch.launcher import run_single_rank
from autopipe.backends.torch.runtime.manifest import Manifest, read_manifest
from autopipe.backends.torch.runtime.modes.records import record_file
from autopipe.backends.torch.verification import (
    Difference,
    array_difference,
    max_tensor_difference,
    read_losses,
    read_outputs,
)
from autopipe.configs.configuration import merged_configuration
from autopipe.configs.yaml_source import Dumper, read_text
from autopipe.ir.errors import VerificationError
from autopipe.ir.program import FORWARD_FOLDER, REFERENCE_FOLDER
from autopipe.ir.words import join_first, plural
from autopipe.passes.pipeline import make_plan

if TYPE_CHECKING:
    import torch

    from autopipe.backends.torch.exporter import ExportSubject
    from autopipe.backends.torch.module_gradients import ModuleResults

_NAMED: Final = 5
"""Maximum number of parameters that an error names. Further ones are only counted."""
_ULPS: Final = 1.0
"""Units in the last place by which parameters are changed to measure the effect of rounding."""
_WITHOUT: Final = "export with check=False (--no-check) to write the file all the same"


def compare(subject: ExportSubject, file: Path, moved: Collection[str], notes: list[str]) -> str:
    """Compare the results of an exported file with those of the module on two examples.

    `moved` are the buffers that training with the file changes. Return a description of the
    comparison, or "" if nothing was compared, and append to `notes` what could not be compared.
    Dropout is removed from `file`. Raise VerificationError, with the parameters and the likely
    cause, if results differ.
    """
    from autopipe.backends.torch.module_gradients import evaluate_module, parameters_with_late_hooks

    hooked = [subject.name_of(name) for name in parameters_with_late_hooks(subject.module)]
    if hooked:
        raise VerificationError(
            (
                f"hooks of {join_first(hooked, _NAMED)} run after the backward, which an ONNX file "
                "cannot represent"
            ),
            f"remove the hooks (register_post_accumulate_grad_hook), or {_WITHOUT}",
        )
    examples = _examples(subject)
    expected = [evaluate_module(subject, each) for each in examples]
    reject_changes([name for each in expected for name in each.changed if name not in moved])
    if expected[0].changed_again:
        raise VerificationError(
            "the backward of the module repeats a part of the forward, which changes "
            f"{join_first(expected[0].changed_again, _NAMED)} twice per step, but the exported "
            "file changes these tensors only one time",
            f"export without checkpointing (a plan may recompute instead), or {_WITHOUT}",
        )
    if not expected[0].is_finite:
        notes.append(
            "the module's loss or gradients on the example are not finite: nothing was compared"
        )
        return ""
    if expected[0].loss is not None:
        _take_dropouts_out(file, expected[0].dropped)
    again = evaluate_module(subject, examples[0], seed=1)
    if not all(map(np.array_equal, again.results, expected[0].results)):
        notes.append(
            "the module draws random numbers besides those of dropout: its results were not "
            "compared"
        )
        return ""
    comparison = _Comparison(subject, file, examples, expected)
    return comparison.of_outputs() if expected[0].loss is None else comparison.of_gradients()


def reject_changes(names: Sequence[str]) -> None:
    """Raise VerificationError if there are tensors that the module's forward changes and the file
    does not change.
    """
    if names:
        changed = join_first(list(dict.fromkeys(names)), _NAMED)
        raise VerificationError(
            f"the forward of the module changes {changed}, which an ONNX file cannot represent",
            "count in place (`steps += 1`), change other tensors outside of the forward, call "
            f"eval() on the part that changes them, or {_WITHOUT}",
        )


def _examples(subject: ExportSubject) -> list[tuple[torch.Tensor, ...]]:
    """Return the user's example, and a second example if the module has finite results on one."""
    from autopipe.backends.torch.module_gradients import evaluate_module, perturb_inputs

    turned = tuple(each.flip(0) if each.dim() else each for each in subject.tensors)
    for tried in (perturb_inputs(subject.tensors), turned):
        try:
            found = evaluate_module(subject, tried)
        except Exception:  # noqa: BLE001  (The user's module may refuse other inputs, in any way.)
            continue
        if found.is_finite:
            return [subject.tensors, tried]
    return [subject.tensors]


def _take_dropouts_out(file: Path, asked: Sequence[float]) -> None:
    """Remove the dropouts from a file, because their random numbers differ from the module's. Raise
    VerificationError if their probabilities differ from those that the module `asked` for.
    """
    import onnx
    import onnx.numpy_helper

    model = onnx.load(file, load_external_data=False)
    held = {each.name: each for each in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            held[node.output[0]] = node.attribute[0].t
    dropouts = [
        node for node in model.graph.node if node.op_type == "Dropout" and len(node.input) == 3
    ]
    found: list[float] = []
    for node in dropouts:
        ratio, training = (
            float(onnx.numpy_helper.to_array(held[name]).item()) for name in node.input[1:]
        )
        if training and ratio:
            found.append(ratio)
        del node.input[1:], node.output[1:], node.attribute[:]
        node.op_type = "Identity"
    found.sort()
    if len(found) != len(asked) or not np.allclose(found, asked):
        texts = [
            str([round(each, 6) for each in probabilities]) for probabilities in (asked, found)
        ]
        raise VerificationError(
            (
                f"the module applies dropout with the probabilities {texts[0]}, but the exported "
                f"file with {texts[1]}"
            ),
            f"call eval() on the dropout modules that differ, or {_WITHOUT}",
        )
    if dropouts:
        onnx.save(model, file)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """An exported file, and the results that it is compared with."""

    subject: ExportSubject
    file: Path
    examples: Sequence[tuple[torch.Tensor, ...]]
    expected: Sequence[ModuleResults]
    """Results of the module for each example."""

    def of_gradients(self) -> str:
        """Compare losses and gradients. Each example is a training step at learning rate 0. Return
        a summary.
        """
        manifest = self._generated("train")
        folder = self._run(manifest, REFERENCE_FOLDER, self.examples)
        losses = read_losses(folder / "report.jsonl")
        trained = {entry.value.name for entry in manifest.parameters if entry.trainable}
        for step, expected in enumerate(self.expected):
            assert expected.loss is not None
            known_loss = expected.results[expected.loss]
            loss = np.asarray(losses[step], known_loss.dtype)
            self._require_equal([array_difference("the loss", loss, known_loss)], manifest, step)
            found = _recorded(folder, step, manifest)
            self._require_same_trained(trained, found, expected)
            known = {
                name: each
                for name, each in expected.gradients.items()
                if each is not None and name in found
            }
            scale = float(
                np.sqrt(
                    sum(
                        float(np.sum(np.square(each.astype(np.float64)))) for each in known.values()
                    )
                )
            )
            pairs = [
                array_difference(name, found[name], each, scale) for name, each in known.items()
            ]
            self._require_equal(pairs, manifest, step)
        return (
            f"loss and {len(trained)} {plural(len(trained), 'gradient')} on "
            f"{len(self.expected)} {plural(len(self.expected), 'example')} equal the module's"
        )

    def of_outputs(self) -> str:
        """Compare the outputs of a module without a loss. Return a summary."""
        manifest = self._generated("infer")
        forward = read_manifest(manifest.folder / FORWARD_FOLDER)
        count = 0
        for step, (example, expected) in enumerate(zip(self.examples, self.expected, strict=True)):
            folder = self._run(manifest, FORWARD_FOLDER, [example])
            found = read_outputs(folder / "outputs.npz", forward)
            count = len(found)
            triples = zip(found, found.values(), expected.results, strict=False)
            pairs = [
                array_difference(f"output {name!r}", ours, known) for name, ours, known in triples
            ]
            self._require_equal(pairs, manifest, step)
        return (
            f"{count} {plural(count, 'output')} on {len(self.expected)} "
            f"{plural(len(self.expected), 'example')} equal the module's"
        )

    def _generated(self, mode: str) -> Manifest:
        """Plan the file for one device and generate its program."""
        rows = max(len(each) for each in self.subject.tensors if each.dim())
        settings: dict[str, Any] = {
            "cluster": {"preset": "cpu-local"},
            "gpus": 1,
            "mode": mode,
            "batch_size": rows,
            "micro_batches": 1,
            "strategy": {"name": "data_parallel"},
        }
        if mode == "train":
            settings |= {"loss": "loss", "optimizer": {"name": "sgd", "lr": 0.0}}
        given = read_text(yaml.dump(settings, Dumper=Dumper), "the check of an export")
        planned = make_plan(make_request(merged_configuration([given]), self.file))
        folder = self.file.with_name("program")
        write_programs(planned, folder)
        return read_manifest(folder)

    def _run(
        self, manifest: Manifest, name: str, examples: Iterable[tuple[torch.Tensor, ...]]
    ) -> Path:
        """Run the program with one step per example. Return the folder with the recorded
        results.
        """
        folder = manifest.folder.with_name("record")
        folder.mkdir(exist_ok=True)
        columns = zip(*examples, strict=True)
        arrays: dict[str, Any] = {}
        steps = 0
        for known, column in zip(self.subject.names, columns, strict=True):
            steps = len(column)
            arrays[known] = np.concatenate([each.detach().cpu().numpy() for each in column])
        data = folder / "data.npz"
        np.savez(data, **arrays)
        files = {
            "report": folder / "report.jsonl",
            "outputs": folder / "outputs.npz",
            "record": folder,
        }
        run_single_rank(
            manifest.folder / name, rank_arguments(steps=steps, device="cpu", data=data, **files)
        )
        return folder

    def _require_same_trained(
        self, trained: set[str], found: Mapping[str, np.ndarray], expected: ModuleResults
    ) -> None:
        """Raise VerificationError if the file and the module have gradients for different
        parameters.
        """
        flowing = {
            name for name, each in expected.gradients.items() if each is not None and np.any(each)
        }
        lost = sorted(flowing - trained)
        if lost:
            raise VerificationError(
                f"the gradients of {join_first(lost, _NAMED)} exist in the module, but not in the "
                "exported file",
                f"rewrite the part of the module that reads these tensors, or {_WITHOUT}",
            )
        gained = sorted(name for name in trained - flowing if np.any(found[name]))
        if gained:
            raise VerificationError(
                (
                    f"the gradients of {join_first(gained, _NAMED)} exist in the exported file, "
                    "but not in the module"
                ),
                f"{self._cause(expected)}; freeze the tensors (requires_grad_(False)), or "
                f"{_WITHOUT}",
            )

    def _require_equal(self, pairs: Sequence[Difference], manifest: Manifest, step: int) -> None:
        """Raise VerificationError if a difference is too large to be caused by rounding."""
        bound = manifest.rounding.bound
        if all(each.relative <= bound for each in pairs):
            return
        responses = self._responses(step)
        wrong = [
            each
            for each in pairs
            if not each.relative
            <= max_tensor_difference(bound, each, responses.get(each.tensor, 0.0))
        ]
        if not wrong:
            return
        worst = max(wrong, key=lambda each: each.relative)
        what = "gradients" if worst.tensor in self.expected[step].gradients else "results"
        names = join_first(
            [each.tensor for each in sorted(wrong, key=lambda each: -each.relative)], _NAMED
        )
        where = "the example" if step == 0 else "a second example"
        raise VerificationError(
            (
                f"{what} of the exported file and of the module differ on {where}: {names} by a "
                f"relative {worst.relative:.1e}"
            ),
            f"{self._cause(self.expected[step])}; {_WITHOUT}",
        )

    def _responses(self, step: int) -> dict[str, float]:
        """Return the relative change of the loss, each gradient and each output when each parameter
        is changed by a rounding error.
        """
        from autopipe.backends.torch.module_gradients import evaluate_module

        expected = self.expected[step]
        moved = evaluate_module(self.subject, self.examples[step], ulps=_ULPS)
        found = {
            name: array_difference(name, moved_gradient, gradient).relative
            for name, gradient in expected.gradients.items()
            if gradient is not None and (moved_gradient := moved.gradients[name]) is not None
        }
        results = zip(moved.results, expected.results, strict=True)
        found["the loss"] = max(
            (array_difference("", *each).relative for each in results), default=0.0
        )
        return found

    def _cause(self, expected: ModuleResults) -> str:
        """Return the likely cause of a difference."""
        from autopipe.backends.torch.module_gradients import parts_with_backward_hooks

        if expected.functions:
            names = ", ".join(expected.functions)
            return f"the backward of the autograd function {names} is not in an ONNX file"
        hooks = parts_with_backward_hooks(self.subject.module)
        if hooks:
            return f"hooks on backward are not in an ONNX file: {join_first(hooks, _NAMED)}"
        return (
            "the module stops or changes a gradient, or computes a value, in a way that torch's "
            "exporter loses"
        )


def _recorded(folder: Path, step: int, manifest: Manifest) -> dict[str, np.ndarray]:
    """Return the gradients of a step by the name of the parameter."""
    with np.load(record_file(folder, "gradients", step, 0), allow_pickle=False) as stored:
        return {manifest.parameters[int(index)].value.name: stored[index] for index in stored.files}
