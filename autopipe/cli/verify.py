"""`autopipe verify`: the ranks against one device, and one device against ONNX Runtime."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from autopipe.backends.onnxruntime import ReferenceModel, precision_of
from autopipe.backends.torch.launcher import LaunchConfig, launch_program, run_alone
from autopipe.backends.torch.runtime.data import open_source
from autopipe.backends.torch.runtime.manifest import Manifest, read_manifest
from autopipe.backends.torch.verification import (
    Difference,
    Precision,
    difference,
    gradient_differences,
    read_losses,
    read_outputs,
)
from autopipe.cli.options import standard_options
from autopipe.cli.output import Output
from autopipe.ir.graph import DType, Initializer
from autopipe.ir.layout import whole


@click.command()
@click.argument("program", type=click.Path(path_type=Path))
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", help="Where to run.")
@click.option("--data", help="FILE.npz or module:function; random data without it.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="Seed of random data, of Dropout, and of weights that the model does not store.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="Largest relative difference taken for equal [what types, depth and conditioning of the model come to].",
)
@standard_options
def verify(
    output: Output, program: Path, device: str, data: str | None, seed: int | None, tolerance: float | None
) -> None:
    """Check that the ranks of PROGRAM compute what one device computes.

    Training: the loss and every gradient of one step. Inference: every output. Then the forward of one device against
    ONNX Runtime on the model as it was given.

    \b
    Example:
      autopipe verify gpt.plan/program --device cpu
    """
    from autopipe.backends.torch.runtime.data import check_data
    from autopipe.backends.torch.runtime.manifest import read_manifest
    from autopipe.ir.errors import VerificationError

    manifest = read_manifest(program.absolute())
    check_data(manifest, data, 1)
    arguments = ["--device", device]
    arguments += ["--data", data] if data else []
    arguments += ["--seed", str(seed)] if seed is not None else []
    precision = precision_of_program(manifest)
    with tempfile.TemporaryDirectory() as scratch, output.progress("verifying", total=4) as bar:
        run = Verification(manifest, arguments, data, seed, Path(scratch), precision, tolerance)
        checks = list(run.run(bar.advance))
    failed = [check for check in checks if not check.worst.relative <= check.limit]
    limit = precision.limit if tolerance is None else tolerance
    parts = f" = {precision}" if tolerance is None else ""
    verdict = f"{'not equal' if failed else 'equal'}: the limit is {limit:.2g}{parts}"
    result = {
        "tolerance": limit,
        "precision": {"dtype": precision.dtype, "depth": precision.depth},
        "checks": [check.as_json() for check in checks],
    }
    output.result(result | {"equal": not failed}, *_lines(checks), *_measured(checks), verdict)
    if failed:
        check = failed[0]
        raise VerificationError(
            f"{check.compared}: {check.worst.relative:.2e} away from {check.reference} (limit {check.limit:.2g})",
            where=repr(check.worst.tensor),
        )


def _measured(checks: Sequence[Check]) -> Iterator[str]:
    """Limits measured where the base limit did not suffice."""
    for check in checks:
        if check.response:
            yield (
                f"{check.compared}: the limit of {check.worst.tensor!r} is {check.limit:.2g}, since one unit "
                f"in the last place of every input and weight changes it by {check.response:.1e}"
            )
        if check.note:
            yield f"{check.compared}: {check.note}"


def _lines(checks: Sequence[Check]) -> Iterator[str]:
    """A line a check below the headings. The worst tensor's name, which may be long, stands last and is never cut."""
    rows = [("compared", "with", "tensors", "difference", "worst")]
    rows += [
        (check.compared, check.reference, str(check.count), f"{check.worst.relative:.2e}", check.worst.tensor)
        for check in checks
    ]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for compared, reference, count, relative, worst in rows:
        yield f"{compared:{first}}  {reference:{second}}  {count:>7}  {relative:>10}  {worst}"


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
    """That which comes nearest to its limit, or is furthest beyond it."""
    limit: float
    """Of that tensor."""
    response: float = 0.0
    """How much one step of every input and weight changes it; measured where differences need it."""
    note: str = ""

    def as_json(self) -> dict[str, object]:
        """The check as a JSON object."""
        return {
            "compared": self.compared,
            "reference": self.reference,
            "tensors": self.count,
            "worst": self.worst.tensor,
            "relative_difference": self.worst.relative,
            "limit": self.limit,
            "response": self.response,
            "note": self.note,
        }


_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}


def precision_of_program(manifest: Manifest) -> Precision:
    """Precision of the ranks: the model's coarsest type, or that of autocast."""
    dtype, depth = precision_of(manifest.model)
    return Precision("bfloat16" if dtype == "bfloat16" else _AUTOCAST.get(manifest.precision, dtype), depth)


@dataclass(frozen=True, slots=True)
class Verification:
    """All checks of one program, each run leaving its record in `scratch`."""

    manifest: Manifest
    arguments: list[str]
    data: str | None
    seed: int | None
    scratch: Path
    precision: Precision
    tolerance: float | None = None
    """The limit, in place of what follows from the precision."""

    def run(self, advance: Callable[[], None]) -> Iterator[Check]:
        """The checks, as they are done."""
        folder = self.manifest.folder
        self._record("ranks")
        launch_program(self.manifest, self._run_arguments("ranks"), LaunchConfig())
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
            yield self._check("outputs of the ranks", "one device", pairs, self._forward_responses)
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
        worst = [difference("loss", ranks, one)]
        yield self._check("loss of the ranks", "one device", worst, self._training_responses)
        pairs = gradient_differences(self.manifest, self.scratch / "ranks", self.scratch / "one")
        yield self._check("gradients of the ranks", "one device", pairs, self._training_responses)

    def _check(
        self,
        compared: str,
        reference: str,
        differences: Iterable[Difference],
        responses: Callable[[], Mapping[str, float]],
        note: Callable[[], str] = str,
    ) -> Check:
        """Hold differences against their limits. Where the least there can be does not hold them all, it is measured
        how much a rounding of inputs and weights changes each tensor."""
        found, told = list(differences), ""
        measured: Mapping[str, float] = {}
        if self.tolerance is None and any(not each.relative <= self.precision.limit for each in found):
            measured, told = responses(), note()
        judged = [(each, self._limit(each, measured.get(each.tensor, 0.0))) for each in found]
        worst, limit = max(
            judged,
            key=lambda pair: pair[0].relative / pair[1] if pair[1] else pair[0].relative,
            default=(Difference("none", 0.0), self.precision.limit),
        )
        return Check(compared, reference, len(found), worst, limit, measured.get(worst.tensor, 0.0), told)

    def _limit(self, found: Difference, response: float) -> float:
        if self.tolerance is not None:
            return self.tolerance
        return self.precision.limit_of(found, response if math.isfinite(response) else 0.0)

    def _moved(self, folder: Path, name: str) -> Path:
        """Results of one device for inputs and weights that are each one unit in the last place off."""
        record = self.scratch / name
        if not record.exists():
            run_alone(folder, [*self._run_arguments(name), "--perturb", repr(self.precision.step)])
        return record

    def _training_responses(self) -> dict[str, float]:
        """How much one step of every input and weight changes the loss and each gradient."""
        folder = self.manifest.folder / REFERENCE
        here, there = self.scratch / "one", self._moved(folder, "one moved")
        moved, own = (np.array(read_losses(each / "report.jsonl")) for each in (there, here))
        pairs = (difference("loss", moved, own), *gradient_differences(read_manifest(folder), there, here))
        return {each.tensor: each.relative for each in pairs}

    def _forward_responses(self) -> dict[str, float]:
        """How much one step of every input and weight changes each output."""
        there = read_outputs(self._moved(self.manifest.folder / FORWARD, "forward moved") / "outputs.npz")
        here = read_outputs(self.scratch / "forward" / "outputs.npz")
        return {name: difference(name, there[name], here[name]).relative for name in here}

    def _reference_check(self, forward: Manifest, ours: dict[str, np.ndarray]) -> Check:
        """The model's outputs over the step's whole batch against ONNX Runtime's, both without Dropout."""
        seed = forward.seed if self.seed is None else self.seed
        model = ReferenceModel(forward.model, _drawn_weights(forward, seed), self.manifest.train)
        if model.random:
            reason = f"left out: {', '.join(model.random)} draws other numbers there"
            return Check("outputs of one device", "ONNX Runtime", 0, Difference(reason, 0.0), self.precision.limit)
        expected = self._reference_outputs(forward, model, seed)

        def note() -> str:
            """True if the reference is one: where its own optimizations change it by more, it says little."""
            model.optimize()
            others = self._reference_outputs(forward, model, seed)
            found = [difference(name, others[name], expected[name]) for name in ours if name in expected]
            worst = max(found, key=lambda each: each.relative, default=Difference("none", 0.0))
            if worst.relative <= self.precision.limit:
                return ""
            return f"ONNX Runtime with its optimizations is {worst.relative:.1e} away from itself without them"

        pairs = (difference(name, ours[name], expected[name]) for name in ours if name in expected)
        without = " without Dropout" if model.dropouts else ""
        return self._check(f"outputs of one device{without}", "ONNX Runtime", pairs, self._forward_responses, note)

    def _reference_outputs(self, forward: Manifest, model: ReferenceModel, seed: int) -> dict[str, np.ndarray]:
        """The model's outputs over the step's whole batch, as ONNX Runtime gives them."""
        source = open_source(forward, self.data, seed)
        size = _evaluation(forward, model)
        evaluations = [
            model.run({entry.value.name: source.rows(entry, start, start + size) for entry in forward.inputs})
            for start in range(0, forward.batch_size, size)
        ]
        share = source.count(0) / forward.batch_size
        axes = {entry.value.name: entry.batch_axis for entry in forward.outputs}
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
    """The same outputs; those that carry no samples are averaged over the micro-batches of their stage."""
    ratios = {
        entry.value.name: manifest.stages[entry.places[0].stage].micro_batch_ratio if entry.batch_axis is None else 1
        for entry in manifest.outputs
    }
    return {
        name: array if ratios[name] == 1 else np.mean(array.reshape(-1, ratios[name], *array.shape[1:]), axis=1)
        for name, array in outputs.items()
    }


def _averaged(outputs: dict[str, np.ndarray], manifest: Manifest) -> dict[str, np.ndarray]:
    """The same outputs with those that carry no samples averaged over the micro-batches."""
    axes = {entry.value.name: entry.batch_axis for entry in manifest.outputs}
    return {name: array if axes[name] is not None else np.mean(array, axis=0) for name, array in outputs.items()}


def _drawn_weights(manifest: Manifest, seed: int) -> dict[str, np.ndarray]:
    """Numbers for the parameters that the model file does not store."""
    from autopipe.backends.torch.runtime.parameters import init_shard  # Loads torch, which a check of data need not.

    found = {}
    for entry in manifest.parameters:
        if isinstance(entry.storage, Initializer):
            drawn = init_shard(entry, whole(entry.value.shape), seed)
            found[entry.value.name] = (drawn.float() if entry.value.dtype is DType.BFLOAT16 else drawn).numpy()
    return found


def _evaluation(manifest: Manifest, model: ReferenceModel) -> int:
    """Samples that the model takes at once."""
    for entry in manifest.inputs:
        if entry.batch_axis is not None and entry.value.name in model.inputs:
            extent = model.inputs[entry.value.name][entry.batch_axis]
            per_sample = entry.value.shape[entry.batch_axis] // manifest.micro_batch_size
            if isinstance(extent, int):
                return min(extent // per_sample, manifest.batch_size)
    return manifest.micro_batch_size
