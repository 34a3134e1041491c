"""`autopipe codegen`: from a plan folder to one program a device, and those on one device to verify
them against.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from autopipe.backends.torch.codegen.program import (
    ProgramFiles,
    Provenance,
    check_program_folder,
    write_program,
)
from autopipe.cli.options import FORCE, MODEL, PATH, standard_options
from autopipe.cli.output import Output
from autopipe.cli.plan_folder import open_plan
from autopipe.ir import VERSION
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.program import FORWARD, REFERENCE, Program, RankCode, StageCode
from autopipe.ir.rounding import Rounding
from autopipe.ir.training import Evaluation
from autopipe.ir.words import plural
from autopipe.passes.analysis.rounding import rounding_of
from autopipe.passes.analysis.training import matrices
from autopipe.passes.frontend.cleanup import without_dropout
from autopipe.passes.lower.lower import lower, one_device_program
from autopipe.passes.lower.traffic import held_together
from autopipe.passes.pipeline import PlanResult


@click.command()
@click.argument("plan", type=PATH)
@click.option("-o", "--output", "folder", type=PATH, help="Where to write [PLAN/program].")
@MODEL
@click.option(
    "--ranks", metavar="R,R,...", help="Write these ranks alone, for looking at and for dry runs."
)
@FORCE
@standard_options
def codegen(
    output: Output,
    plan: Path,
    folder: Path | None,
    model: Path | None,
    ranks: str | None,
    force: bool,
) -> None:
    """Write the program of every rank for the plan in folder PLAN.

    \b
    Example:
      autopipe codegen gpt.plan
      autopipe codegen llama.plan --ranks 0,17,4095
    """
    target = folder or plan / "program"
    try:
        only = tuple(dict.fromkeys(map(int, ranks.split(",")))) if ranks is not None else ()
    except ValueError:
        raise click.BadParameter(
            f"{ranks!r} is no list of numbers like 0,17", param_hint="--ranks"
        ) from None
    check_program_folder(target, force)
    with output.progress("generating", total=2) as bar:
        planned = open_plan(plan, model)
        bar.advance(note="plan read")
        program = generate(planned, target, only, force)
        bar.advance(note="programs written")
    launch = ["autopipe", "launch", str(target)]
    if only:
        launch += ["--dry-run", "--device", "meta", "--rank", str(only[0])]
    some = f"{len(only)} of {program.world_size}" if only else f"{program.world_size}"
    output.report(
        {
            "program": target,
            "ranks": program.world_size,
            "written": only or None,
            "stages": len(program.stages),
        },
        f"{some} rank {plural(program.world_size, 'program')} of {len(program.stages)} "
        f"{plural(len(program.stages), 'stage')} in {target}",
        f"next: {shlex.join(launch)}",
    )


_ROW_TASKS = 24
"""Tasks of a rank's row that its docstring shows, from the start and from the end."""


def generate(
    planned: PlanResult,
    folder: Path,
    ranks: Sequence[int] = (),
    force: bool = False,
    home: Path | None = None,
) -> Program:
    """Write the program of `planned` into `folder` and return it; `home` is the folder that it is
    moved to (default: `folder`). Raises CodegenError or ConfigurationError.

    With `ranks` only the files of these ranks are written, for reading and for dry runs: without
    the one-device programs, and without the proof that no rank deadlocks.
    """
    problem = planned.problem
    plan = planned.plan
    loss = problem.loss if problem.train else None
    devices = plan.schedule.devices
    for rank in ranks:
        if not 0 <= rank < devices:
            raise ConfigurationError(
                f"there is no rank {rank}", hint=f"the plan has ranks 0 to {devices - 1}"
            )
    how = loss, problem.optimizer.shard, not ranks, problem.precision, problem.loss_division
    program = lower(problem.graph, plan.placement, plan.schedule, *how)
    if ranks:
        kept = (rank if rank.rank in ranks else replace(rank, shards=()) for rank in program.ranks)
        program = replace(program, ranks=tuple(kept))
    if (
        problem.train
        and planned.request.data.last_batch == "pad"
        and any(each.ratio > 1 for each in program.stages)
    ):
        message = "stages with micro-batches of their own do not fill a batch up"
        raise ConfigurationError(message, "plan with data.last_batch: drop", "data.last_batch: pad")
    stage_titles = tuple(_stage_title(program, stage) for stage in program.stages)
    rank_titles = tuple(
        _rank_title(planned, program, rank) if not ranks or rank.rank in ranks else None
        for rank in program.ranks
    )
    limits = (
        () if problem.memory_limit is None else plan.memory_limits
    )  # Else a device has all of its memory.
    files = [
        ProgramFiles(
            "", program, stage_titles, rank_titles, limits, frozenset(plan.host_bound_stages)
        )
    ]
    if not ranks:
        if problem.loss is not None:
            files.append(_one_device(planned, REFERENCE, problem.loss))
        files.append(_one_device(planned, FORWARD, None))
    provenance = Provenance(
        model=plan.model,
        model_digest=planned.model.digest,
        plan_digest=planned.digest,
        optimizer=problem.optimizer,
        precision=problem.precision,
        seed=problem.seed,
        predicted_step_s=plan.summary.step_time_s * problem.training.gradient_accumulation_steps,
        predicted_bubble=plan.summary.bubble_rate,
        rounding=_rounding(planned, program),
        data=planned.request.data,
        training_graph=planned.request.training_graph,
        fixed_inputs=planned.request.fixed_inputs,
        evaluation=planned.request.evaluation if problem.train else Evaluation(),
        model_flops=problem.step_flops * problem.training.gradient_accumulation_steps,
        peak_flops=problem.peak_flops,
        predicted_memory_bytes=max(plan.summary.peak_memory_bytes),
        lr_scheduler=problem.lr_scheduler,
        training=problem.training,
        matrices=matrices(problem.graph) if problem.optimizer.name == "muon" else frozenset(),
    )
    write_program(files, provenance, folder, force, home)
    return program


def _rounding(planned: PlanResult, program: Program) -> Rounding:
    """The roundings in sequence of the whole model, of messages on a way through it, and of sums
    over all ranks.
    """
    problem = planned.problem
    added = (
        problem.micro_batches * max(stage.ratio for stage in program.stages) + program.world_size
    )
    return rounding_of(problem.graph, problem.precision, problem.train, added, program.roundings)


def _one_device(planned: PlanResult, name: str, loss: str | None) -> ProgramFiles:
    """The same steps on one device: training with `loss`, the whole forward without."""
    problem = planned.problem
    # ONNX Runtime, which the forward is compared with, would drop other elements.
    graph = problem.graph if loss is not None else without_dropout(problem.graph)
    program = one_device_program(
        graph, problem.micro_batches, problem.micro_batch_size, loss, problem.loss_division
    )
    what = "training" if loss is not None else "the forward"
    title = f"The whole model on one device, {what}: what the ranks are verified against."
    return ProgramFiles(name, program, (title,), (title,))


def _stage_title(program: Program, stage: StageCode) -> str:
    devices = ("devices " if len(stage.devices) > 1 else "device ") + ", ".join(
        map(str, stage.devices)
    )
    size = f", {_own_size(program, stage)}" if stage.ratio > 1 else ""
    return f"Stage {stage.stage} of {len(program.stages)}, on {devices}{size}."


def _own_size(program: Program, stage: StageCode) -> str:
    return (
        f"{program.micro_batches * stage.ratio} "
        f"{plural(program.micro_batches * stage.ratio, 'micro-batch')} "
        f"of {program.micro_batch_size // stage.ratio}"
    )


def _rank_title(planned: PlanResult, program: Program, rank: RankCode) -> str:
    """Docstring of a rank's file: the figures to check the rank against the timeline."""
    summary = planned.plan.summary
    own = [program.stages[each.stage] for each in rank.stages]
    stages = [
        f"{each.stage} ({_own_size(program, each)})" if each.ratio > 1 else str(each.stage)
        for each in own
    ]
    memory = summary.peak_memory_bytes[rank.rank] / 2**20
    row = [str(task) for task in planned.plan.schedule.tasks[rank.rank]]
    if len(row) > 2 * _ROW_TASKS:
        row = [*row[:_ROW_TASKS], "...", *row[-_ROW_TASKS:]]
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
        lines += [_shares(program, rank), ""]
    lines += ["    " + " ".join(row[start : start + 16]) for start in range(0, len(row), 16)]
    lines += ["", "    autopipe launch .    or    torchrun --nproc-per-node N run.py"]
    return "\n".join(lines) + "\n"


def _shares(program: Program, rank: RankCode) -> str:
    """With whom the rank shares out the update of its parameters."""
    groups = sorted({block.ranks for block in held_together(program.parameters, rank.shards)})
    if not groups:
        return "It updates all of its parameters: no other rank has any of them."
    names = " and over ".join(", ".join(map(str, group)) for group in groups)
    return f"Gradients and the optimizer's state are shared out over ranks {names} (ZeRO-1)."
