"""`autopipe verify`: the ranks against one device, and one device against ONNX Runtime; with
`--static`, proofs about a program that need no run.
"""

from __future__ import annotations

import filecmp
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np

from autopipe.api.codegen import write_programs
from autopipe.api.plan_folder import open_plan
from autopipe.api.program_folder import open_program, other_plan, program_in
from autopipe.backends.onnxruntime import NoKernelError, ReferenceModel, node_of
from autopipe.backends.torch.fork_server import ForkServer, fork_server
from autopipe.backends.torch.launcher import LaunchConfig, launch_program, run_alone
from autopipe.backends.torch.runtime.data.sources import check_data, filled_rows, open_source
from autopipe.backends.torch.runtime.manifest import Manifest, read_manifest
from autopipe.backends.torch.runtime.modes.records import RECORDED_STEPS
from autopipe.backends.torch.verification import (
    Difference,
    Spread,
    difference,
    has_buffers,
    limit_of,
    read_losses,
    read_outputs,
    tensor_differences,
    write_whole_gradients,
)
from autopipe.cli.first_difference import first_beside_reference, first_difference
from autopipe.cli.launch import COMPILE, DATA, SEED
from autopipe.cli.options import MODEL, PATH, flag_words, standard_options
from autopipe.cli.output import Output
from autopipe.ir.errors import AutopipeError, ModelError, VerificationError
from autopipe.ir.graph import COUNTED_LABELS, DType, Initializer
from autopipe.ir.layout import full_slice
from autopipe.ir.output_files import scratch_folder
from autopipe.ir.program import FORWARD, REFERENCE
from autopipe.ir.rounding import UNIT_ROUNDOFF
from autopipe.ir.words import plural


@click.command()
@click.argument("program", type=PATH)
@click.option(
    "--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", help="Where to run."
)
@MODEL
@DATA
@SEED
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help=(
        "Largest relative difference taken for equal [what roundings and conditioning of the model "
        "come to]."
    ),
)
@click.option(
    "--static", is_flag=True, help="Prove schedule and messages without a run, and without torch."
)
@COMPILE
@standard_options
def verify(
    output: Output,
    /,
    program: Path,
    device: str,
    model: Path | None,
    data: str | None,
    seed: int | None,
    tolerance: float | None,
    static: bool,
    **flags: bool,
) -> None:
    """Check that the ranks of PROGRAM compute what one device computes.

    PROGRAM is the folder of a program, or that of a plan with its program.

    Training: the loss, every gradient and every buffer of one step, and the parameters after two
    updates. Inference: every output. Then the forward of one device against ONNX Runtime on the
    model as it was given. A difference that ONNX Runtime's distance from itself explains, with
    optimizations or in float64, is reported and accepted.

    \b
    Example:
      autopipe verify gpt.plan --device cpu
      autopipe verify gpt.plan/program --static
    """
    program = program_in(program)
    if static:
        check_static(program, model, output)
        return
    manifest = open_program(program, model)
    data = manifest.data.path if data is None else data
    check_data(manifest, data, 1, manifest.data)
    with (
        scratch_folder("verify") as scratch,
        fork_server() as server,
        output.progress("verifying", total=4) as bar,
    ):
        run = Verification(
            manifest, model, device, data, seed, scratch, tolerance, **flags, server=server
        )
        checks = list(run.run(bar.advance))
        failed = [check for check in checks if not check.relative_difference <= check.limit]
        first = run.first_difference({check.reference for check in failed}) if failed else ""
    rounding = manifest.rounding
    limit, parts = (rounding.bound, f" = {rounding}") if tolerance is None else (tolerance, "")
    result = {
        "tolerance": limit,
        "rounding": rounding,
        "checks": checks,
        "equal": not failed,
    }
    output.result(
        result,
        *_lines(checks),
        f"{'not equal' if failed else 'equal'}: the limit is {limit:.2g}{parts}",
    )
    if failed:
        check = failed[0]
        away = (
            f"{check.relative_difference:.2e} away from {check.reference} (limit {check.limit:.2g})"
        )
        raise VerificationError(
            f"{check.compared}: {away}", first or _first_node(manifest, failed), repr(check.worst)
        )


def _first_node(manifest: Manifest, failed: Sequence[Check]) -> str:
    """Where to look first: what differs in the order in which a step computes it."""
    names = {
        each.tensor for check in failed for each in check.above if not each.difference <= each.limit
    }
    if "loss of the ranks" in (check.compared for check in failed):
        return (
            f"the loss differs, so forward does, and {len(names) - 1} "
            f"{plural(len(names) - 1, 'gradient')} with it"
        )
    backward = any(check.compared == "gradients of the ranks" for check in failed)
    node, tensor = node_of(manifest.model, names, last=backward)
    if not node:
        return ""
    told = f"the gradient of {tensor!r}" if backward else repr(tensor)
    return f"{len(names)} differ; the first that is computed is {told}, at node {node!r}"


def _lines(checks: Sequence[Check]) -> Iterator[str]:
    """A line a check below the headings, then the limits that were measured as the base limit did
    not suffice. The worst tensor's name, which may be long, stands last and is never cut.
    """
    rows = [("compared", "with", "tensors", "difference", "worst")]
    rows += [
        (
            check.compared,
            check.reference,
            str(check.tensors),
            f"{check.relative_difference:.2e}",
            check.worst,
        )
        for check in checks
    ]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for compared, reference, count, relative, worst in rows:
        yield f"{compared:{first}}  {reference:{second}}  {count:>7}  {relative:>10}  {worst}"
    for check in checks:
        beyond = [each for each in check.above if each.spread is not None]
        if beyond:
            yield (
                f"{check.compared}: "
                f"{_by_spread(max(beyond, key=lambda each: each.difference / each.limit))}"
            )
            continue
        if check.response:
            yield (
                f"{check.compared}: the limit of {check.worst!r} is {check.limit:.2g}, since "
                "one unit "
                f"in the last place of every input and weight changes it by {check.response:.1e}"
            )
        if check.note:
            yield f"{check.compared}: {check.note}"


def _by_spread(found: Measured) -> str:
    """Return whether the spread of the reference explains a difference beyond the limit without
    it.
    """
    verb = "is explained by" if found.difference <= found.limit else "is not explained by"
    return (
        f"the difference of {found.tensor!r}, {found.difference:.2e}, {verb} ONNX Runtime's own "
        "spread: "
        f"{found.spread}, so the limit is {found.limit:.2g}"
    )


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: what with what, over how many tensors, and the worst of them."""

    compared: str
    reference: str
    tensors: int
    worst: str
    """The tensor that comes nearest to its limit, or is furthest beyond it."""
    relative_difference: float
    limit: float
    """Of that tensor."""
    response: float = 0.0
    """How much one step of every input and weight changes it; measured where differences need it.
    """
    note: str = ""
    above: tuple[Measured, ...] = ()
    """The tensors that differ by more than the bound for well-conditioned ones."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A tensor with a limit of its own."""

    tensor: str
    difference: float
    response: float
    limit: float
    spread: Spread | None = None
    """How far the reference is from itself. None if the limit without it holds, or if it was not
    measured.
    """


@dataclass(frozen=True, slots=True)
class Verification:
    """All checks of one program, each run leaving its record in `scratch`."""

    manifest: Manifest
    model: Path | None
    """The ONNX file in place of the planned one; None for that."""
    device: str
    data: str | None
    seed: int | None
    scratch: Path
    tolerance: float | None = None
    """The limit, in place of what follows from the program's roundings."""
    compile: bool = False
    """True if the ranks compile their stages, and what they are compared with does not."""
    server: ForkServer | None = None
    """Forks all processes of the verification."""

    def run(self, advance: Callable[[], None]) -> Iterator[Check]:
        folder = self.manifest.folder
        steps = RECORDED_STEPS if self.manifest.train else 1
        arguments = self._run_arguments("ranks", steps) + flag_words(compile=self.compile)
        launch_program(self.manifest, arguments, LaunchConfig(), server=self.server)
        advance()
        if self.manifest.train:
            # One device computes the first step's gradients, and updates by the ranks': where a
            # gradient is all but zero, optimizers such as AdamW make a whole step of its rounding.
            replay = self.scratch / "replay"
            recorded = write_whole_gradients(self.manifest, self.scratch / "ranks", replay)
            own = self._run_arguments("one", steps) + flag_words(replay=replay)
            run_alone(folder / REFERENCE, own, server=self.server)
            advance()
            ranks = self._losses("ranks")
            one = self._losses("one")
            worst = [difference("loss", ranks, one)]
            yield self._check("loss of the ranks", "one device", worst, self._training_responses)
            pairs = tensor_differences(self.manifest, self.scratch / "ranks", self.scratch / "one")
            yield self._check(
                "gradients of the ranks", "one device", pairs, self._training_responses
            )
            folders = self.scratch / "ranks", self.scratch / "one"
            pairs = tensor_differences(self.manifest, *folders, "parameters", recorded - 1)
            yield self._check(f"parameters after {recorded} updates", "one device", pairs, dict)
            if has_buffers(self.manifest):
                # One device computes the first step alone.
                pairs = tensor_differences(
                    self.manifest, *folders, "parameters", 0, trainable=False
                )
                yield self._check(
                    "buffers after a step", "one device", pairs, self._buffer_responses
                )
        forward = read_manifest(folder / FORWARD, self.model)
        run_alone(folder / FORWARD, self._run_arguments("forward"), server=self.server)
        advance()
        ours = self._outputs("forward")
        if not self.manifest.train:
            found = _in_rounds(self._outputs("ranks"), self.manifest)
            pairs = (difference(name, found[name], ours[name]) for name in ours)
            yield self._check("outputs of the ranks", "one device", pairs, self._forward_responses)
        axes = {entry.value.name: entry.batch_axis for entry in forward.outputs}
        together = {
            name: array if axes[name] is not None else self._of_step(name, array)
            for name, array in ours.items()
        }
        divided = self.manifest.loss_division.divided
        if divided and self._is_checked_whole(forward):
            together[divided] = self._divided(together, together[divided].dtype)
        yield self._reference_check(forward, together)
        advance()

    def _of_step(self, name: str, parts: np.ndarray) -> np.ndarray:
        """Return an output without samples for a whole batch, given its values for equal parts of
        the batch.

        The values of the loss are weighted as in a step, those of other outputs are averaged.
        """
        average = np.asarray(np.mean(parts, axis=0))
        weight = self.manifest.loss_division.weight
        if name not in (self.manifest.loss, COUNTED_LABELS) or weight is None:
            return average
        return np.asarray(average * (weight * len(parts)), average.dtype)

    def _divided(self, totals: Mapping[str, np.ndarray], dtype: np.dtype) -> np.ndarray:
        """Return the loss of a step whose micro-batches give totals, from these."""
        division = self.manifest.loss_division
        total = float(totals[str(self.manifest.loss)])
        if self.manifest.counts_labels:
            total /= division.divisor(float(totals[COUNTED_LABELS]))
        return np.asarray(division.loss(total), dtype)

    def _is_checked_whole(self, forward: Manifest) -> bool:
        """True if the loss of a step is that of its whole batch, and the only output without
        samples.

        Other outputs without samples are averaged over micro-batches, whatever they are.
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
        """The first value of forward in which the ranks differ from one device, or one device from
        ONNX Runtime, by which of them differ; "" where none does, or no plan is at hand.
        """
        among_ranks = "one device" in references
        alone = self.manifest.folder / (
            REFERENCE if self.manifest.train and among_ranks else FORWARD
        )
        ranks = self.scratch / "values of ranks"
        one = self.scratch / "values of one"
        ranks.mkdir()
        one.mkdir()
        try:
            run_alone(
                alone, [*self._run_arguments("one"), "--values", str(one)], server=self.server
            )
            if not among_ranks:
                return first_beside_reference(self.manifest, one, self._reference_values)
            words = [*self._run_arguments("ranks"), "--values", str(ranks)]
            launch_program(self.manifest, words, LaunchConfig(), server=self.server)
            return first_difference(self.manifest, ranks, one)
        except AutopipeError:  # What was compared is told all the same.
            return ""

    def _run_arguments(self, name: str, steps: int = 1) -> list[str]:
        """Flags of a run that leaves its record under this name."""
        folder = self.scratch / name
        folder.mkdir(exist_ok=True)
        files = {
            "report": folder / "report.jsonl",
            "outputs": folder / "outputs.npz",
            "record": folder,
        }
        model = None if self.model is None else self.model.absolute()
        return flag_words(
            steps=steps,
            device=self.device,
            model=model,
            data=self.data or None,
            seed=self.seed,
            **files,
        )

    def _losses(self, name: str) -> np.ndarray:
        """Of the first step."""
        return np.array(read_losses(self.scratch / name / "report.jsonl")[:1])

    def _outputs(self, name: str) -> dict[str, np.ndarray]:
        folder = self.manifest.folder
        manifest = self.manifest if name == "ranks" else read_manifest(folder / FORWARD, self.model)
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
        that follows, `spreads` measures how far the reference is from itself.
        """
        found = list(differences)
        told = ""
        bound = self.manifest.rounding.bound
        measured: Mapping[str, float] = {}
        if self.tolerance is None and any(not each.relative <= bound for each in found):
            measured = responses()
            told = note()
        judged = []
        for each in found:
            moved = measured.get(each.tensor, 0.0)
            limit = limit_of(bound, each, moved if math.isfinite(moved) else 0.0)
            judged.append((each, limit if self.tolerance is None else self.tolerance))
        beyond = {each.tensor for each, limit in judged if not each.relative <= limit}
        spread: dict[str, Spread] = {}
        if beyond and self.tolerance is None:
            spread = {name: each for name, each in spreads().items() if name in beyond}
            unit = UNIT_ROUNDOFF[self.manifest.rounding.dtype]
            judged = [
                (each, spread[each.tensor].raised(limit, unit) if each.tensor in spread else limit)
                for each, limit in judged
            ]
        worst, limit = max(
            judged,
            key=lambda pair: pair[0].relative / pair[1] if pair[1] else pair[0].relative,
            default=(Difference("none", 0.0), bound),
        )
        above = tuple(
            Measured(
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
            told,
            above,
        )

    def _run_moved(self, folder: Path, name: str) -> None:
        """One device's run for inputs and weights that are each one unit in the last place off,
        once.
        """
        if not (self.scratch / name).exists():
            words = [*self._run_arguments(name), "--perturb", repr(self.manifest.rounding.step)]
            run_alone(folder, words, server=self.server)

    def _training_responses(self) -> dict[str, float]:
        """How much one step of every input and weight changes the loss and each gradient."""
        folder = self.manifest.folder / REFERENCE
        self._run_moved(folder, "one moved")
        loss = difference("loss", self._losses("one moved"), self._losses("one"))
        gradients = tensor_differences(
            read_manifest(folder), self.scratch / "one moved", self.scratch / "one"
        )
        return {each.tensor: each.relative for each in (loss, *gradients)}

    def _buffer_responses(self) -> dict[str, float]:
        """Return how much one step of every input and weight changes each buffer."""
        folder = self.manifest.folder / REFERENCE
        self._run_moved(folder, "one moved")
        manifest = read_manifest(folder)
        folders = (self.scratch / "one moved", self.scratch / "one")
        pairs = tensor_differences(manifest, *folders, "parameters", 0, trainable=False)
        return {each.tensor: each.relative for each in pairs}

    def _forward_responses(self) -> dict[str, float]:
        """How much one step of every input and weight changes each output."""
        self._run_moved(self.manifest.folder / FORWARD, "forward moved")
        moved = self._outputs("forward moved")
        own = self._outputs("forward")
        return {name: difference(name, moved[name], own[name]).relative for name in own}

    def _reference_check(self, forward: Manifest, ours: dict[str, np.ndarray]) -> Check:
        """The model's outputs over the step's whole batch against ONNX Runtime's, both without
        Dropout.
        """

        def left_out(reason: str) -> Check:
            bound = self.manifest.rounding.bound
            return Check(
                "outputs of one device", "ONNX Runtime", 0, f"left out: {reason}", 0.0, bound
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
                difference(name, outputs[name], expected[name]) for name in ours if name in expected
            )

        optimized: dict[str, float] = {}

        def distances(outputs: Mapping[str, np.ndarray]) -> dict[str, float]:
            """Return how far outputs are from `expected`."""
            return {each.tensor: each.relative for each in differences(outputs)}

        def note() -> str:
            """Return a sentence if the reference's own optimizations change it by more than the
            bound.
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
                    away, in_float64[name], difference(name, ours[name], exact[name]).relative
                )
                for name, away in optimized.items()
            }

        compared = f"outputs of one device{' without Dropout' if model.dropouts else ''}"
        return self._check(
            compared, "ONNX Runtime", differences(ours), self._forward_responses, note, spreads
        )

    def _reference_model(self, forward: Manifest) -> tuple[ReferenceModel, int]:
        """The model for ONNX Runtime, and the seed of what its file does not store."""
        from autopipe.backends.torch.runtime.state.parameters import (
            init_shard,
        )  # Loads torch, which a check of data need not

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
        """Values of the first evaluation by name, in the order of the file."""
        forward = read_manifest(self.manifest.folder / FORWARD, self.model)
        model, seed = self._reference_model(forward)
        model.watch(names)
        source = open_source(forward, self.data, seed, settings=forward.data)
        size = _evaluation(forward, model)
        return model.run(
            {
                each.value.name: filled_rows(source, forward, each, 0, 0, size)
                for each in forward.inputs
            }
        )

    def _reference_outputs(
        self, forward: Manifest, model: ReferenceModel, seed: int
    ) -> dict[str, np.ndarray]:
        """The model's outputs over the step's whole batch, as ONNX Runtime gives them."""
        source = open_source(forward, self.data, seed, settings=forward.data)

        def evaluated(size: int) -> list[dict[str, np.ndarray]]:
            """Return the outputs of each evaluation of `size` samples."""
            found = []
            for start in range(0, forward.batch_size, size):
                stop = start + size
                rows = {
                    each.value.name: filled_rows(source, forward, each, 0, start, stop)
                    for each in forward.inputs
                }
                found.append(model.run(rows))
            return found

        try:
            evaluations = evaluated(
                _evaluation(forward, model, whole=self._is_checked_whole(forward))
            )
        except ModelError:
            # The file may take any batch by its inputs, and fix it inside.
            evaluations = evaluated(_evaluation(forward, model))
        axes = {entry.value.name: entry.batch_axis for entry in forward.outputs}
        shapes = {entry.value.name: entry.value.shape for entry in forward.outputs}
        found = {}
        for name in (each for each in evaluations[0] if each in axes):
            axis = axes[name]
            parts = [_filled_up(each[name], shapes[name], axis) for each in evaluations]
            if axis is None:
                found[name] = self._of_step(name, np.stack(parts))
            else:  # Of its samples those that are data.
                joined = np.concatenate(parts, axis=axis)
                count = round(joined.shape[axis] * (source.count(0) / forward.batch_size))
                found[name] = np.take(joined, range(count), axis=axis)
        return found


def _filled_up(array: np.ndarray, shape: tuple[int, ...], batch_axis: int | None) -> np.ndarray:
    """Rows that data choose as ranks give them: zeros behind them, to as many rows as there could
    be.
    """
    if array.ndim != len(shape) or array.shape == shape:
        return array
    pairs = zip(shape, array.shape, strict=True)
    behind = [
        (0, 0 if axis == batch_axis else max(most - have, 0))
        for axis, (most, have) in enumerate(pairs)
    ]
    return np.pad(array, behind)


def _in_rounds(outputs: dict[str, np.ndarray], manifest: Manifest) -> dict[str, np.ndarray]:
    """The same outputs; those that carry no samples are averaged over the micro-batches of their
    stage.
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


def _evaluation(manifest: Manifest, model: ReferenceModel, whole: bool = False) -> int:
    """Return the number of samples that the model takes at once: if its file leaves that open those
    of a micro-batch, or with `whole` those of a batch.
    """
    for entry in manifest.inputs:
        if entry.batch_axis is not None and entry.value.name in model.inputs:
            extent = model.inputs[entry.value.name][entry.batch_axis]
            per_sample = entry.value.shape[entry.batch_axis] // manifest.micro_batch_size
            if isinstance(extent, int):
                return min(extent // per_sample, manifest.batch_size)
    return manifest.batch_size if whole else manifest.micro_batch_size


def check_static(program: Path, model: Path | None, output: Output) -> None:
    """Prove that the schedule of the plan that holds `program` keeps every dependency and that no
    rank deadlocks, over gloo and over NCCL, and report the files that differ from the plan's.

    `model` is the ONNX file in place of the planned one, or None. Raises ConfigurationError if the
    folder has no program of the plan, CodegenError if the program cannot be proven.
    """
    manifest = read_manifest(program.absolute())
    folder = program.parent
    with output.progress("verifying", total=2) as bar, scratch_folder("verify") as scratch:
        if model is None and manifest.model.is_file():
            # The program may have been generated with another file than the plan's.
            model = manifest.model
        planned = open_plan(folder, model)  # Its schedule is checked when it is read.
        bar.advance(note="schedule")
        if planned.digest != manifest.plan:
            raise other_plan(program, folder)
        made = Path(scratch) / "program"
        # Where the program was generated, its model may have been elsewhere.
        planned = replace(planned, plan=replace(planned.plan, model=str(manifest.model)))
        lowered = write_programs(planned, made, home=program)
        bar.advance(note="messages")
        names = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
        edited = [name for name in names if not _same(made / name, program / name)]
    for name in edited:
        output.warn(f"{program / name} was edited: what is proven is the file as codegen writes it")
    tasks = sum(map(len, planned.plan.schedule.tasks))
    output.result(
        {"tasks": tasks, "channels": len(lowered.channels), "files": len(names), "edited": edited},
        f"schedule  {tasks} {plural(tasks, 'task')} of {lowered.world_size} "
        f"{plural(lowered.world_size, 'rank')} keep every dependency",
        f"messages  on {len(lowered.channels)} {plural(len(lowered.channels), 'channel')}, "
        f"all ranks come to their ends over gloo and NCCL",
        f"files     {len(names) - len(edited)} of {len(names)} are as the plan gives them",
    )


def _same(made: Path, found: Path) -> bool:
    return found.is_file() and filecmp.cmp(made, found, shallow=False)
