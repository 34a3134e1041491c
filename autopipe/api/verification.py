"""Command `verify`: compare the ranks of a program with one device, and one device with ONNX
Runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autopipe.api.events import Events, SilentEvents
from autopipe.api.first_difference import first_difference, first_difference_from_reference
from autopipe.api.program_folder import (
    find_program_folder,
    open_program,
    rank_arguments,
)
from autopipe.backends.onnxruntime import NoKernelError, ReferenceModel, find_node_of_tensors
from autopipe.backends.torch.fork_server import ForkServer, fork_server
from autopipe.backends.torch.launcher import LaunchConfig, launch_program, run_single_rank
from autopipe.backends.torch.runtime.data.sources import check_data, open_source, rows_with_filler
from autopipe.backends.torch.runtime.manifest import Manifest, read_manifest
from autopipe.backends.torch.runtime.modes.records import RECORDED_STEPS
from autopipe.backends.torch.verification import (
    Difference,
    Spread,
    array_difference,
    has_buffers,
    max_tensor_difference,
    read_losses,
    read_outputs,
    tensor_differences,
    write_whole_gradients,
)
from autopipe.ir.errors import AutopipeError, ModelError, VerificationError
from autopipe.ir.graph import COUNTED_LABELS, DType, Initializer
from autopipe.ir.layout import full_slice
from autopipe.ir.output_files import scratch_folder
from autopipe.ir.program import FORWARD_FOLDER, REFERENCE_FOLDER
from autopipe.ir.rounding import UNIT_ROUNDOFF, Rounding
from autopipe.ir.words import plural


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """The comparisons of one program."""

    tolerance: float | None
    """Maximum relative difference that the caller set, None if it follows from `rounding`."""
    rounding: Rounding
    """Roundings of the program, from which limits are derived."""
    checks: tuple[Check, ...]
    first: str = ""
    """A sentence about the first tensor that differs; "" if none differs or it is unknown."""

    @property
    def limit(self) -> float:
        """Maximum relative difference of a well-conditioned tensor."""
        return self.rounding.bound if self.tolerance is None else self.tolerance

    @property
    def failed(self) -> tuple[Check, ...]:
        """The comparisons whose worst tensor exceeds its limit."""
        return tuple(each for each in self.checks if not each.relative_difference <= each.limit)

    @property
    def data(self) -> dict[str, object]:
        """The comparisons as data of `verify --json`."""
        return {
            "tolerance": self.limit,
            "rounding": self.rounding,
            "checks": list(self.checks),
            "equal": not self.failed,
        }

    @property
    def error(self) -> VerificationError | None:
        """The error that names the first failed comparison, None if all tensors are equal within
        their limits.
        """
        if not self.failed:
            return None
        check = self.failed[0]
        away = (
            f"{check.relative_difference:.2e} away from {check.reference} (limit {check.limit:.2g})"
        )
        return VerificationError(f"{check.compared}: {away}", self.first, repr(check.worst))


def verify(
    program: Path,
    *,
    device: str = "auto",
    model: Path | None = None,
    data: str | None = None,
    seed: int | None = None,
    tolerance: float | None = None,
    compile: bool = False,  # noqa: A002  (the name of the flag)
    events: Events | None = None,
) -> VerificationResult:
    """Compare the ranks of a program with one device, and one device with ONNX Runtime.

    `program` is the folder of a program, or a plan folder that holds one. A training program runs
    two steps: the loss, the gradients and the buffers of the first step and the parameters after
    the updates are compared. An inference program runs one step, and its outputs are compared.

    `device` is "auto", "cuda" or "cpu". `model` is the ONNX file if it is not where it was planned.
    `data` is a source as for `launch`. `tolerance` is a maximum relative difference; None derives
    limits from the roundings of the program and from its condition. With `compile` the ranks
    compile their stages. Raises ConfigurationError or LaunchError, but no error for differences:
    see `VerificationResult.error`.
    """
    events = events or SilentEvents()
    manifest = open_program(find_program_folder(program), model)
    data = manifest.data.path if data is None else data
    check_data(manifest, data, 1, manifest.data)
    with (
        scratch_folder("verify") as scratch,
        fork_server() as server,
        events.progress("verifying", total=4) as bar,
    ):
        run = Verification(
            manifest, model, device, data, seed, scratch, tolerance, compile, server=server
        )
        result = VerificationResult(tolerance, manifest.rounding, tuple(run.run(bar.advance)))
        if not result.failed:
            return result
        first = run.first_difference({check.reference for check in result.failed})
    return replace(result, first=first or _first_difference_text(manifest, result.failed))


def _first_difference_text(manifest: Manifest, failed: Sequence[Check]) -> str:
    """Return a sentence about the first tensor that differs, in the order of computation, "" if it
    is unknown.
    """
    names = {
        each.tensor for check in failed for each in check.above if not each.difference <= each.limit
    }
    if "loss of the ranks" in (check.compared for check in failed):
        return (
            f"the loss differs, so forward does, and {len(names) - 1} "
            f"{plural(len(names) - 1, 'gradient')} with it"
        )
    backward = any(check.compared == "gradients of the ranks" for check in failed)
    node, tensor = find_node_of_tensors(manifest.model, names, last=backward)
    if not node:
        return ""
    name = f"the gradient of {tensor!r}" if backward else repr(tensor)
    return f"{len(names)} differ; the first that is computed is {name}, at node {node!r}"


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of tensors with a reference."""

    compared: str
    reference: str
    tensors: int
    worst: str
    """The tensor with the largest ratio of difference to limit."""
    relative_difference: float
    """Relative difference of the worst tensor."""
    limit: float
    """Maximum relative difference of the worst tensor."""
    response: float = 0.0
    """Relative change of the worst tensor if one unit in the last place is added to every input and
    weight; 0 if this was not measured.
    """
    note: str = ""
    above: tuple[ExceededTensor, ...] = ()
    """The tensors whose difference exceeds the bound for well-conditioned tensors."""


@dataclass(frozen=True, slots=True)
class ExceededTensor:
    """A tensor whose difference exceeds the bound for well-conditioned tensors."""

    tensor: str
    difference: float
    response: float
    limit: float
    spread: Spread | None = None
    """Differences between runs of the reference with other settings. None if the difference is
    within the limit without the spread, or if the spread was not measured.
    """


@dataclass(frozen=True, slots=True)
class Verification:
    """The runs and comparisons of one program. Each run writes its tensors into `scratch`."""

    manifest: Manifest
    model: Path | None
    """The ONNX file if it is not where it was planned, None otherwise."""
    device: str
    data: str | None
    seed: int | None
    scratch: Path
    tolerance: float | None = None
    """Maximum relative difference; None to derive it from the roundings of the program."""
    compile: bool = False
    """True if the ranks compile their stages. The program for one device is not compiled."""
    server: ForkServer | None = None
    """Starts all processes of the verification; None to start each with a new interpreter."""

    def run(self, advance: Callable[[], None]) -> Iterator[Check]:
        """Run the ranks, one device and ONNX Runtime, and yield one check per comparison. `advance`
        is called after each of four parts.
        """
        folder = self.manifest.folder
        steps = RECORDED_STEPS if self.manifest.train else 1
        arguments = self._run_arguments("ranks", steps) + rank_arguments(compile=self.compile)
        launch_program(self.manifest, arguments, LaunchConfig(), server=self.server)
        advance()
        if self.manifest.train:
            # The reference on one device computes its own gradients in the first step, but updates
            # parameters with the gradients of the ranks. Otherwise AdamW would turn the rounding
            # error of a gradient near zero into an update of full size.
            replay = self.scratch / "replay"
            recorded = write_whole_gradients(self.manifest, self.scratch / "ranks", replay)
            own = self._run_arguments("one", steps) + rank_arguments(replay=replay)
            run_single_rank(folder / REFERENCE_FOLDER, own, server=self.server)
            advance()
            ranks = self._losses("ranks")
            one = self._losses("one")
            worst = [array_difference("loss", ranks, one)]
            yield self._check("loss of the ranks", "one device", worst, self._training_responses)
            pairs = tensor_differences(self.manifest, self.scratch / "ranks", self.scratch / "one")
            yield self._check(
                "gradients of the ranks", "one device", pairs, self._training_responses
            )
            folders = self.scratch / "ranks", self.scratch / "one"
            pairs = tensor_differences(self.manifest, *folders, "parameters", recorded - 1)
            yield self._check(f"parameters after {recorded} updates", "one device", pairs, dict)
            if has_buffers(self.manifest):
                # The reference on one device computes buffers in the first step only, so they are
                # compared after step 0.
                pairs = tensor_differences(
                    self.manifest, *folders, "parameters", 0, trainable=False
                )
                yield self._check(
                    "buffers after a step", "one device", pairs, self._buffer_responses
                )
        forward = read_manifest(folder / FORWARD_FOLDER, self.model)
        run_single_rank(folder / FORWARD_FOLDER, self._run_arguments("forward"), server=self.server)
        advance()
        ours = self._outputs("forward")
        if not self.manifest.train:
            found = _per_micro_batch(self._outputs("ranks"), self.manifest)
            pairs = (array_difference(name, found[name], ours[name]) for name in ours)
            yield self._check("outputs of the ranks", "one device", pairs, self._forward_responses)
        axes = {entry.value.name: entry.batch_axis for entry in forward.outputs}
        together = {
            name: array if axes[name] is not None else self._value_of_step(name, array)
            for name, array in ours.items()
        }
        divided = self.manifest.loss_division.divided
        if divided and self._is_compared_by_batch(forward):
            together[divided] = self._divide_loss(together, together[divided].dtype)
        yield self._reference_check(forward, together)
        advance()

    def _value_of_step(self, name: str, parts: np.ndarray) -> np.ndarray:
        """Return an output without a batch axis for the batch of a step, given its values for equal
        parts of the batch.

        Values of the loss are weighted as in a step. Values of other outputs are averaged.
        """
        average = np.asarray(np.mean(parts, axis=0))
        weight = self.manifest.loss_division.weight
        if name not in (self.manifest.loss, COUNTED_LABELS) or weight is None:
            return average
        return np.asarray(average * (weight * len(parts)), average.dtype)

    def _divide_loss(self, totals: Mapping[str, np.ndarray], dtype: np.dtype) -> np.ndarray:
        """Return the loss of a step, given the dividend and the divisor of the loss (`totals`)."""
        division = self.manifest.loss_division
        total = float(totals[str(self.manifest.loss)])
        if self.manifest.counts_labels:
            total /= division.divisor(float(totals[COUNTED_LABELS]))
        return np.asarray(division.loss(total), dtype)

    def _is_compared_by_batch(self, forward: Manifest) -> bool:
        """Return True if the program trains, the loss of a step equals the loss of its batch, and
        the loss is the only output without a batch axis.

        Other outputs without a batch axis are averaged over micro-batches.
        """
        single = {entry.value.name for entry in forward.outputs if entry.batch_axis is None}
        division = self.manifest.loss_division
        loss = {self.manifest.loss}
        if division.divided:
            loss |= (
                {division.divided, COUNTED_LABELS}
                if self.manifest.counts_labels
                else {division.divided}
            )
        return self.manifest.train and division.exact and single == loss

    def first_difference(self, references: Collection[str]) -> str:
        """Return a sentence about the first value of the forward pass that differs, "" if none
        differs or if the plan is not available.

        The ranks are compared with one device if `references` contains "one device". Otherwise one
        device is compared with ONNX Runtime.
        """
        among_ranks = "one device" in references
        alone = self.manifest.folder / (
            REFERENCE_FOLDER if self.manifest.train and among_ranks else FORWARD_FOLDER
        )
        ranks = self.scratch / "values of ranks"
        one = self.scratch / "values of one"
        ranks.mkdir()
        one.mkdir()
        try:
            run_single_rank(
                alone, [*self._run_arguments("one"), "--values", str(one)], server=self.server
            )
            if not among_ranks:
                return first_difference_from_reference(self.manifest, one, self._reference_values)
            words = [*self._run_arguments("ranks"), "--values", str(ranks)]
            launch_program(self.manifest, words, LaunchConfig(), server=self.server)
            return first_difference(self.manifest, ranks, one)
        except AutopipeError:
            # The search for the first differing value is optional. If it fails, verification
            # reports the differences without this value.
            return ""

    def _run_arguments(self, name: str, steps: int = 1) -> list[str]:
        """Return the flags of a run that writes its tensors into the folder `name`."""
        folder = self.scratch / name
        folder.mkdir(exist_ok=True)
        files = {
            "report": folder / "report.jsonl",
            "outputs": folder / "outputs.npz",
            "record": folder,
        }
        model = None if self.model is None else self.model.absolute()
        return rank_arguments(
            steps=steps,
            device=self.device,
            model=model,
            data=self.data or None,
            seed=self.seed,
            **files,
        )

    def _losses(self, name: str) -> np.ndarray:
        """Return the loss of the first step as an array of one element."""
        return np.array(read_losses(self.scratch / name / "report.jsonl")[:1])

    def _outputs(self, name: str) -> dict[str, np.ndarray]:
        folder = self.manifest.folder
        manifest = (
            self.manifest if name == "ranks" else read_manifest(folder / FORWARD_FOLDER, self.model)
        )
        return read_outputs(self.scratch / name / "outputs.npz", manifest)

    def _check(
        self,
        compared: str,
        reference: str,
        differences: Iterable[Difference],
        responses: Callable[[], Mapping[str, float]],
        note: Callable[[], str] = str,
        spreads: Callable[[], Mapping[str, Spread]] = dict,
    ) -> Check:
        """Compare differences with their limits.

        If a difference exceeds the bound for well-conditioned tensors, `responses` measures how
        much a rounding of inputs and weights changes each tensor. If a difference exceeds the limit
        derived from this, `spreads` measures differences between runs of the reference with other
        settings.
        """
        found = list(differences)
        sentence = ""
        bound = self.manifest.rounding.bound
        measured: Mapping[str, float] = {}
        if self.tolerance is None and any(not each.relative <= bound for each in found):
            measured = responses()
            sentence = note()
        judged = []
        for each in found:
            moved = measured.get(each.tensor, 0.0)
            limit = max_tensor_difference(bound, each, moved if math.isfinite(moved) else 0.0)
            judged.append((each, limit if self.tolerance is None else self.tolerance))
        beyond = {each.tensor for each, limit in judged if not each.relative <= limit}
        spread: dict[str, Spread] = {}
        if beyond and self.tolerance is None:
            spread = {name: each for name, each in spreads().items() if name in beyond}
            unit = UNIT_ROUNDOFF[self.manifest.rounding.dtype]
            judged = [
                (
                    each,
                    spread[each.tensor].raised_limit(limit, unit)
                    if each.tensor in spread
                    else limit,
                )
                for each, limit in judged
            ]
        worst, limit = max(
            judged,
            key=lambda pair: pair[0].relative / pair[1] if pair[1] else pair[0].relative,
            default=(Difference("none", 0.0), bound),
        )
        above = tuple(
            ExceededTensor(
                each.tensor,
                each.relative,
                measured.get(each.tensor, 0.0),
                own,
                spread.get(each.tensor),
            )
            for each, own in judged
            if not each.relative <= min(bound, own)
        )
        response = measured.get(worst.tensor, 0.0)
        return Check(
            compared,
            reference,
            len(found),
            worst.tensor,
            worst.relative,
            limit,
            response,
            sentence,
            above,
        )

    def _run_moved(self, folder: Path, name: str) -> None:
        """Run the program in `folder` with one unit in the last place added to every input and
        weight, unless this was already done under the name `name`.
        """
        if not (self.scratch / name).exists():
            words = [*self._run_arguments(name), "--perturb", repr(self.manifest.rounding.step)]
            run_single_rank(folder, words, server=self.server)

    def _training_responses(self) -> dict[str, float]:
        """Return the relative change of the loss and of each gradient if one unit in the last place
        is added to every input and weight.
        """
        folder = self.manifest.folder / REFERENCE_FOLDER
        self._run_moved(folder, "one moved")
        loss = array_difference("loss", self._losses("one moved"), self._losses("one"))
        gradients = tensor_differences(
            read_manifest(folder), self.scratch / "one moved", self.scratch / "one"
        )
        return {each.tensor: each.relative for each in (loss, *gradients)}

    def _buffer_responses(self) -> dict[str, float]:
        """Return the relative change of each buffer if one unit in the last place is added to every
        input and weight.
        """
        folder = self.manifest.folder / REFERENCE_FOLDER
        self._run_moved(folder, "one moved")
        manifest = read_manifest(folder)
        folders = (self.scratch / "one moved", self.scratch / "one")
        pairs = tensor_differences(manifest, *folders, "parameters", 0, trainable=False)
        return {each.tensor: each.relative for each in pairs}

    def _forward_responses(self) -> dict[str, float]:
        """Return the relative change of each output if one unit in the last place is added to every
        input and weight.
        """
        self._run_moved(self.manifest.folder / FORWARD_FOLDER, "forward moved")
        moved = self._outputs("forward moved")
        own = self._outputs("forward")
        return {name: array_difference(name, moved[name], own[name]).relative for name in own}

    def _reference_check(self, forward: Manifest, ours: dict[str, np.ndarray]) -> Check:
        """Compare the outputs `ours` for the batch of a step with those of ONNX Runtime, both
        without Dropout.
        """

        def left_out(reason: str) -> Check:
            bound = self.manifest.rounding.bound
            return Check(
                "outputs of one device", "ONNX Runtime", 0, f"omitted: {reason}", 0.0, bound
            )

        try:
            model, seed = self._reference_model(forward)
        except NoKernelError as error:
            return left_out(error.message)
        if model.random:
            return left_out(f"{', '.join(model.random)} draws other numbers there")
        try:
            expected = self._reference_outputs(forward, model, seed)
        except ModelError as error:
            return left_out(error.message)

        def differences(outputs: Mapping[str, np.ndarray]) -> Iterator[Difference]:
            return (
                array_difference(name, outputs[name], expected[name])
                for name in ours
                if name in expected
            )

        optimized: dict[str, float] = {}

        def distances(outputs: Mapping[str, np.ndarray]) -> dict[str, float]:
            """Return the relative difference of each output from `expected`."""
            return {each.tensor: each.relative for each in differences(outputs)}

        def note() -> str:
            """Return a sentence if the optimizations of ONNX Runtime change its outputs by more
            than the bound, otherwise "".
            """
            model.optimize()
            optimized.update(distances(self._reference_outputs(forward, model, seed)))
            worst = max(optimized.values(), default=0.0)
            text = (
                f"ONNX Runtime with its optimizations is {worst:.1e} away from itself without them"
            )
            return "" if worst <= self.manifest.rounding.bound else text

        def spreads() -> dict[str, Spread]:
            try:
                model.widen()
                exact = self._reference_outputs(forward, model, seed)
            except ModelError:
                return {name: Spread(away) for name, away in optimized.items()}
            in_float64 = distances(exact)
            return {
                name: Spread(
                    away, in_float64[name], array_difference(name, ours[name], exact[name]).relative
                )
                for name, away in optimized.items()
            }

        compared = f"outputs of one device{' without Dropout' if model.dropouts else ''}"
        return self._check(
            compared, "ONNX Runtime", differences(ours), self._forward_responses, note, spreads
        )

    def _reference_model(self, forward: Manifest) -> tuple[ReferenceModel, int]:
        """Return the model for ONNX Runtime, and the seed of random data and of parameters whose
        values the file does not store.
        """
        # This module imports torch, which takes long and is not required before.
        from autopipe.backends.torch.runtime.state.parameters import init_shard

        seed = forward.seed if self.seed is None else self.seed
        weights = {}
        for entry in forward.parameters:
            if isinstance(entry.storage, Initializer):
                drawn = init_shard(entry, full_slice(entry.value.shape), seed)
                weights[entry.value.name] = (
                    drawn.float() if entry.value.dtype is DType.BFLOAT16 else drawn
                ).numpy()
        fixed = dict(self.manifest.fixed_inputs)
        return ReferenceModel(forward.model, weights, self.manifest.is_training_graph, fixed), seed

    def _reference_values(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """Return the values that ONNX Runtime computes in its first forward pass, by name, in the
        order of the file.
        """
        forward = read_manifest(self.manifest.folder / FORWARD_FOLDER, self.model)
        model, seed = self._reference_model(forward)
        model.watch(names)
        source = open_source(forward, self.data, seed, settings=forward.data)
        size = _samples_per_pass(forward, model)
        return model.run(
            {
                each.value.name: rows_with_filler(source, forward, each, 0, 0, size)
                for each in forward.inputs
            }
        )

    def _reference_outputs(
        self, forward: Manifest, model: ReferenceModel, seed: int
    ) -> dict[str, np.ndarray]:
        """Return the outputs of ONNX Runtime for the batch of a step."""
        source = open_source(forward, self.data, seed, settings=forward.data)

        def evaluated(size: int) -> list[dict[str, np.ndarray]]:
            """Return the outputs of each forward pass of `size` samples."""
            found = []
            for start in range(0, forward.batch_size, size):
                stop = start + size
                rows = {
                    each.value.name: rows_with_filler(source, forward, each, 0, start, stop)
                    for each in forward.inputs
                }
                found.append(model.run(rows))
            return found

        try:
            evaluations = evaluated(
                _samples_per_pass(forward, model, whole=self._is_compared_by_batch(forward))
            )
        except ModelError:
            # A node of the file may require the micro-batch size, although the inputs of the file
            # accept any batch size. So the passes are repeated with one micro-batch each.
            evaluations = evaluated(_samples_per_pass(forward, model))
        axes = {entry.value.name: entry.batch_axis for entry in forward.outputs}
        shapes = {entry.value.name: entry.value.shape for entry in forward.outputs}
        found = {}
        for name in (each for each in evaluations[0] if each in axes):
            axis = axes[name]
            parts = [_pad_to_shape(each[name], shapes[name], axis) for each in evaluations]
            if axis is None:
                found[name] = self._value_of_step(name, np.stack(parts))
            else:
                # The last batch may end with filler samples. `count` excludes them, because only
                # real samples are compared.
                joined = np.concatenate(parts, axis=axis)
                count = round(joined.shape[axis] * (source.sample_count(0) / forward.batch_size))
                found[name] = np.take(joined, range(count), axis=axis)
        return found


def _pad_to_shape(array: np.ndarray, shape: tuple[int, ...], batch_axis: int | None) -> np.ndarray:
    """Return the output `array` padded with zeros to `shape`, except along the batch axis. Ranks
    return an output with a data-dependent number of rows in this form.
    """
    if array.ndim != len(shape) or array.shape == shape:
        return array
    pairs = zip(shape, array.shape, strict=True)
    behind = [
        (0, 0 if axis == batch_axis else max(most - have, 0))
        for axis, (most, have) in enumerate(pairs)
    ]
    return np.pad(array, behind)


def _per_micro_batch(outputs: dict[str, np.ndarray], manifest: Manifest) -> dict[str, np.ndarray]:
    """Return the outputs with one value per micro-batch of the step. A stage with smaller
    micro-batches runs several of them per micro-batch of the step. Its outputs without a batch axis
    are averaged over these.
    """
    ratios = {
        entry.value.name: manifest.stages[entry.places[0].stage].micro_batch_ratio
        if entry.batch_axis is None
        else 1
        for entry in manifest.outputs
    }
    return {
        name: array
        if ratios[name] == 1
        else np.mean(array.reshape(-1, ratios[name], *array.shape[1:]), axis=1)
        for name, array in outputs.items()
    }


def _samples_per_pass(manifest: Manifest, model: ReferenceModel, whole: bool = False) -> int:
    """Return the number of samples of one forward pass of ONNX Runtime: the number that the file
    fixes, otherwise the micro-batch size, or the batch size with `whole`.
    """
    for entry in manifest.inputs:
        if entry.batch_axis is not None and entry.value.name in model.inputs:
            extent = model.inputs[entry.value.name][entry.batch_axis]
            per_sample = entry.value.shape[entry.batch_axis] // manifest.micro_batch_size
            if isinstance(extent, int):
                return min(extent // per_sample, manifest.batch_size)
    return manifest.batch_size if whole else manifest.micro_batch_size
