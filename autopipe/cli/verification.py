"""The runs that verification compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autopipe.backends.onnxruntime.reference import ReferenceModel
from autopipe.backends.torch.launcher import Gang, launch_program, run_alone
from autopipe.backends.torch.runtime.data import check_data, open_source
from autopipe.backends.torch.runtime.manifest import Manifest, ShardEntry, read_manifest
from autopipe.backends.torch.verification import (
    Difference,
    difference,
    gradient_differences,
    read_losses,
    read_outputs,
)

REFERENCE = "reference"
"""Folder, inside a program's, of the same step on one device."""
FORWARD = "forward"
"""Folder, inside a program's, of the model's forward on one device."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: what with what, over how many tensors, and the worst of them."""

    compared: str
    reference: str
    count: int
    worst: Difference

    def as_json(self) -> dict[str, object]:
        """The check as a JSON object."""
        return {
            "compared": self.compared,
            "reference": self.reference,
            "tensors": self.count,
            "worst": self.worst.tensor,
            "relative_difference": self.worst.relative,
        }


def _check(compared: str, reference: str, differences: Iterable[Difference]) -> Check:
    found = list(differences)
    worst = max(found, key=lambda each: each.relative, default=Difference("none", 0.0))
    return Check(compared, reference, len(found), worst)


@dataclass(frozen=True, slots=True)
class Verification:
    """All checks of one program, each run leaving its record in `scratch`."""

    manifest: Manifest
    arguments: list[str]
    data: str | None
    seed: int | None
    scratch: Path

    def run(self, advance: Callable[[], None]) -> Iterator[Check]:
        """The checks, as they are done."""
        folder = self.manifest.folder
        check_data(self.manifest, self.data, 1)
        self._record("ranks")
        launch_program(self.manifest, self._run_arguments("ranks"), Gang())
        advance()
        if self.manifest.train:
            run_alone(folder / REFERENCE, self._run_arguments("one"))
            advance()
            yield from self._training_checks()
        forward = read_manifest(folder / FORWARD)
        run_alone(folder / FORWARD, self._run_arguments("forward"))
        advance()
        ours = read_outputs(self.scratch / "forward" / "outputs.npz")
        if not self.manifest.train:
            ranks = _in_rounds(read_outputs(self.scratch / "ranks" / "outputs.npz"), self.manifest)
            pairs = (difference(name, ranks[name], ours[name]) for name in ours)
            yield _check("outputs of the ranks", "one device", pairs)
        yield self._reference_check(forward, _averaged(ours, forward))
        advance()

    def _record(self, name: str) -> Path:
        folder = self.scratch / name
        folder.mkdir(exist_ok=True)
        return folder

    def _run_arguments(self, name: str) -> list[str]:
        folder = self._record(name)
        record = ["--record", str(folder), "--report", str(folder / "report.jsonl")]
        return [*self.arguments, "--steps", "1", *record, "--outputs", str(folder / "outputs.npz")]

    def _training_checks(self) -> Iterator[Check]:
        losses = [read_losses(self.scratch / name / "report.jsonl") for name in ("ranks", "one")]
        ranks, one = (np.array(each) for each in losses)
        yield _check("loss of the ranks", "one device", [difference("loss", ranks, one)])
        pairs = gradient_differences(self.manifest, self.scratch / "ranks", self.scratch / "one")
        yield _check("gradients of the ranks", "one device", pairs)

    def _reference_check(self, forward: Manifest, ours: dict[str, np.ndarray]) -> Check:
        """The model's outputs over the step's whole batch against ONNX Runtime's, both without Dropout."""
        seed = forward.seed if self.seed is None else self.seed
        model = ReferenceModel(forward.model, _drawn_weights(forward, seed), self.manifest.train)
        if model.random:
            reason = f"left out: {', '.join(model.random)} draws other numbers there"
            return Check("outputs of one device", "ONNX Runtime", 0, Difference(reason, 0.0))
        expected = self._reference_outputs(forward, model, seed)
        pairs = (difference(name, ours[name], expected[name]) for name in ours if name in expected)
        without = " without Dropout" if model.dropouts else ""
        return _check(f"outputs of one device{without}", "ONNX Runtime", pairs)

    def _reference_outputs(self, forward: Manifest, model: ReferenceModel, seed: int) -> dict[str, np.ndarray]:
        """The model's outputs over the step's whole batch, as ONNX Runtime gives them."""
        source = open_source(forward, self.data, seed)
        size = _evaluation(forward, model)
        evaluations = [
            model.run({entry.name: source.rows(entry, start, start + size) for entry in forward.inputs})
            for start in range(0, forward.batch_size, size)
        ]
        share = source.count(0) / forward.batch_size
        axes = {entry.name: entry.batch_axis for entry in forward.outputs}
        return {
            name: _joined([each[name] for each in evaluations], axes[name], share)
            for name in model.outputs
            if name in axes
        }


def _joined(evaluations: list[np.ndarray], batch_axis: int | None, share: float) -> np.ndarray:
    """An output over several evaluations: the `share` of its samples that are data, one after the other; a value
    without samples is averaged."""
    if batch_axis is None:
        return np.asarray(np.mean(np.stack(evaluations), axis=0))
    whole = np.concatenate(evaluations, axis=batch_axis)
    return np.take(whole, range(round(whole.shape[batch_axis] * share)), axis=batch_axis)


def _in_rounds(outputs: dict[str, np.ndarray], manifest: Manifest) -> dict[str, np.ndarray]:
    """The same outputs; those that carry no samples are averaged over the turns in which their stage takes samples."""
    turns = {
        entry.name: manifest.stages[entry.places[0].stage].turns if entry.batch_axis is None else 1
        for entry in manifest.outputs
    }
    return {
        name: array if turns[name] == 1 else np.mean(array.reshape(-1, turns[name], *array.shape[1:]), axis=1)
        for name, array in outputs.items()
    }


def _averaged(outputs: dict[str, np.ndarray], manifest: Manifest) -> dict[str, np.ndarray]:
    """The same outputs with those that carry no samples averaged over the micro-batches."""
    axes = {entry.name: entry.batch_axis for entry in manifest.outputs}
    return {name: array if axes[name] is not None else np.mean(array, axis=0) for name, array in outputs.items()}


def _drawn_weights(manifest: Manifest, seed: int) -> dict[str, np.ndarray]:
    """Numbers for the parameters that the model file does not store."""
    from autopipe.backends.torch.runtime.drawing import draw_block  # Loads torch, which a check of data need not.

    found = {}
    for index, entry in enumerate(manifest.parameters):
        if entry.storage.kind == "draw":
            whole = ShardEntry(index, (0,) * len(entry.shape), entry.shape, (0,))
            found[entry.name] = draw_block(entry, whole, seed).numpy()
    return found


def _evaluation(manifest: Manifest, model: ReferenceModel) -> int:
    """Samples that the model takes at once."""
    for entry in manifest.inputs:
        if entry.batch_axis is not None and entry.name in model.inputs:
            extent = model.inputs[entry.name][entry.batch_axis]
            per_sample = entry.shape[entry.batch_axis] // manifest.micro_batch_size
            if isinstance(extent, int):
                return min(extent // per_sample, manifest.batch_size)
    return manifest.micro_batch_size
