"""Command `codegen`: from a plan folder to the program folder, with one program per rank and the
programs for one device that `verify` compares them with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopipe.api.events import Events, SilentEvents
from autopipe.api.plan_folder import open_plan
from autopipe.backends.torch.codegen.program import (
    ProgramFiles,
    Provenance,
    check_program_folder,
    write_program,
)
from autopipe.backends.torch.codegen.stage import Style
from autopipe.ir import VERSION
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.program import FORWARD_FOLDER, REFERENCE_FOLDER, Program, RankCode, StageCode
from autopipe.ir.rounding import Rounding
from autopipe.ir.training import Evaluation
from autopipe.ir.words import plural
from autopipe.passes.analysis.rounding import count_roundings
from autopipe.passes.analysis.training import matrix_parameters
from autopipe.passes.frontend.cleanup import remove_dropout
from autopipe.passes.lower.lower import lower, one_device_program
from autopipe.passes.lower.traffic import shards_on_several_ranks
from autopipe.passes.pipeline import PlanResult

_MAX_TITLE_TASKS = 24
"""Maximum number of tasks in the docstring of a rank's file, at the start and again at the end of
the rank's order.
"""


@dataclass(frozen=True, slots=True)
class GeneratedProgram:
    """A program that was written to a folder."""

    folder: Path
    program: Program
    ranks: tuple[int, ...]
    """The ranks whose files were written; () for all."""


def codegen(
    plan: Path,
    folder: Path | None = None,
    *,
    model: Path | None = None,
    ranks: Sequence[int] = (),
    style: Style = "layers",
    force: bool = False,
    events: Events | None = None,
) -> GeneratedProgram:
    """Write the program of the plan in the folder `plan`, to `folder` or to `program` in `plan`.

    `model` is the ONNX file if it is not where it was planned. With `ranks` only the files of these
    ranks are written. `style` is the form of the files of stages: one statement per operator
    (flat), or one function per class of repeated layers (layers). `force` replaces files that were
    edited. Raises ConfigurationError, ModelError or CodegenError.
    """
    events = events or SilentEvents()
    target = folder or plan / "program"
    only = tuple(dict.fromkeys(ranks))
    check_program_folder(target, force)
    with events.progress("generating", total=2) as bar:
        planned = open_plan(plan, model)
        bar.advance(note="plan read")
        program = write_programs(planned, target, only, force, style=style)
        bar.advance(note="programs written")
    return GeneratedProgram(target, program, only)


def write_programs(
    planned: PlanResult,
    folder: Path,
    ranks: Sequence[int] = (),
    force: bool = False,
    home: Path | None = None,
    style: Style = "layers",
) -> Program:
    """Write the program of `planned` into `folder` and return it. Raises CodegenError or
    ConfigurationError.

    `home` is the folder to which the caller moves the program afterwards (default: `folder`). With
    `ranks` only the files of these ranks are written, for reading and for dry runs. The programs
    for one device and the proof that no rank deadlocks are then omitted. `style` applies to the
    stages of the ranks.
    """
    problem = planned.problem
    plan = planned.plan
    devices = plan.schedule.devices
    for rank in ranks:
        if not 0 <= rank < devices:
            raise ConfigurationError(
                f"rank {rank} does not exist", hint=f"use ranks 0 to {devices - 1} of the plan"
            )
    program = lower_plan(planned, prove=not ranks)
    if ranks:
        kept = (rank if rank.rank in ranks else replace(rank, shards=()) for rank in program.ranks)
        program = replace(program, ranks=tuple(kept))
    if (
        problem.train
        and planned.request.data.last_batch == "pad"
        and any(each.ratio > 1 for each in program.stages)
    ):
        message = "a last batch cannot be padded if stages use different micro-batch sizes"
        raise ConfigurationError(message, "plan with data.last_batch: drop", "data.last_batch: pad")
    stage_titles = tuple(
        _stage_title(program, stage, label)
        for stage, label in zip(program.stages, plan.stage_labels, strict=True)
    )
    rank_titles = tuple(
        _rank_title(planned, program, rank) if not ranks or rank.rank in ranks else None
        for rank in program.ranks
    )
    # Without a memory limit in the problem, the program contains no limits, and a rank may use all
    # memory of its device.
    limits = () if problem.memory_limit is None else plan.memory_limits
    files = [
        ProgramFiles(
            "", program, stage_titles, rank_titles, limits, frozenset(plan.host_bound_stages), style
        )
    ]
    if not ranks:
        if problem.loss is not None:
            files.append(_one_device_program(planned, REFERENCE_FOLDER, problem.loss))
        files.append(_one_device_program(planned, FORWARD_FOLDER, None))
    provenance = Provenance(
        model=plan.model,
        model_digest=planned.model.digest,
        plan_digest=planned.digest,
        optimizer=problem.optimizer,
        precision=problem.precision,
        seed=problem.seed,
        predicted_step_s=plan.summary.step_time_s * problem.training.gradient_accumulation_steps,
        predicted_bubble=plan.summary.bubble_rate,
        rounding=_max_rounding(planned, program),
        data=planned.request.data,
        training_graph=planned.request.training_graph,
        fixed_inputs=planned.request.fixed_inputs,
        evaluation=planned.request.evaluation if problem.train else Evaluation(),
        model_flops=problem.step_flops * problem.training.gradient_accumulation_steps,
        peak_flops=problem.peak_flops,
        predicted_memory_bytes=max(plan.summary.peak_memory_bytes),
        lr_scheduler=problem.lr_scheduler,
        training=problem.training,
        matrices=matrix_parameters(problem.graph)
        if problem.optimizer.name == "muon"
        else frozenset(),
    )
    write_program(files, provenance, folder, force, home)
    return program


def lower_plan(planned: PlanResult, prove: bool = True) -> Program:
    """Return the program of all ranks of a plan. With `prove`, prove that no rank deadlocks.

    Raises CodegenError if the plan has no correct program.
    """
    problem = planned.problem
    return lower(
        problem.graph,
        planned.plan.placement,
        planned.plan.schedule,
        problem.loss if problem.train else None,
        problem.optimizer.shard,
        prove,
        problem.precision,
        problem.loss_division,
    )


def _max_rounding(planned: PlanResult, program: Program) -> Rounding:
    """Return how many roundings follow one another in a step: in the operators of the graph, in
    messages on a path through the stages, and in sums over micro-batches and ranks.
    """
    problem = planned.problem
    largest_ratio = max(stage.ratio for stage in program.stages)
    added = problem.micro_batches * largest_ratio + program.world_size
    return count_roundings(
        problem.graph, problem.precision, problem.train, added, program.roundings
    )


def _one_device_program(planned: PlanResult, name: str, loss: str | None) -> ProgramFiles:
    """Return the program `name` of the unsharded model on one device: training steps if `loss` is
    a value of the graph, forward passes without Dropout if it is None.
    """
    problem = planned.problem
    # The forward pass is compared with ONNX Runtime, whose Dropout draws other random numbers. So
    # Dropout is removed.
    graph = problem.graph if loss is not None else remove_dropout(problem.graph)
    program = one_device_program(
        graph, problem.micro_batches, problem.micro_batch_size, loss, problem.loss_division
    )
    what = "training" if loss is not None else "the forward"
    title = f"The whole model on one device, {what}: what the ranks are verified against."
    # `verify` finds the first value that differs by the numbered variables of the flat form. A
    # reference with other code than the ranks also makes the comparison stronger.
    return ProgramFiles(name, program, (title,), (title,), style="flat")


def _stage_title(program: Program, stage: StageCode, label: str) -> str:
    """Return the first line of the docstring of a stage's module. `label` names the parts of the
    model in the stage, such as `embedding, layers 0–7`; "" if it is not known.
    """
    devices = ("devices " if len(stage.devices) > 1 else "device ") + ", ".join(
        map(str, stage.devices)
    )
    size = f", {_micro_batches_text(program, stage)}" if stage.ratio > 1 else ""
    parts = f": {label}" if label else ""
    return f"Stage {stage.stage} of {len(program.stages)}, on {devices}{size}{parts}."


def _micro_batches_text(program: Program, stage: StageCode) -> str:
    return (
        f"{program.micro_batches * stage.ratio} "
        f"{plural(program.micro_batches * stage.ratio, 'micro-batch')} "
        f"of {program.micro_batch_size // stage.ratio}"
    )


def _rank_title(planned: PlanResult, program: Program, rank: RankCode) -> str:
    """Return the docstring of the file of a rank: its stages, its tasks, and the predicted step,
    bubble and peak memory.
    """
    summary = planned.plan.summary
    own = [program.stages[each.stage] for each in rank.stages]
    stages = [
        f"{each.stage} ({_micro_batches_text(program, each)})"
        if each.ratio > 1
        else str(each.stage)
        for each in own
    ]
    memory = summary.peak_memory_bytes[rank.rank] / 2**20
    row = [str(task) for task in planned.plan.schedule.tasks[rank.rank]]
    if len(row) > 2 * _MAX_TITLE_TASKS:
        row = [*row[:_MAX_TITLE_TASKS], "...", *row[-_MAX_TITLE_TASKS:]]
    lines = [
        f"Rank {rank.rank} of {program.world_size}: stages {', '.join(stages) or 'none'}; "
        f"{summary.schedule}, "
        f"{program.micro_batches} {plural(program.micro_batches, 'micro-batch')} of "
        f"{program.micro_batch_size} "
        f"(plan {planned.digest[:12]}, autopipe {VERSION}).",
        "",
        f"predicted: step {summary.step_time_s * 1e3:.3g} ms, bubble {summary.bubble_rate:.1%}, "
        f"peak memory {memory:.0f} MiB",
        "",
    ]
    if program.shard:
        lines += [_sharded_state_text(program, rank), ""]
    lines += ["    " + " ".join(row[start : start + 16]) for start in range(0, len(row), 16)]
    lines += ["", "    autopipe launch .    or    torchrun --nproc-per-node N run.py"]
    return "\n".join(lines) + "\n"


def _sharded_state_text(program: Program, rank: RankCode) -> str:
    """Return a sentence about the ranks over which the optimizer's state of this rank's parameters
    is sharded.
    """
    groups = sorted(
        {block.ranks for block in shards_on_several_ranks(program.parameters, rank.shards)}
    )
    if not groups:
        return "It updates all of its parameters: no other rank has any of them."
    names = " and over ".join(", ".join(map(str, group)) for group in groups)
    return f"Gradients and the optimizer's state are shared out over ranks {names} (ZeRO-1)."
