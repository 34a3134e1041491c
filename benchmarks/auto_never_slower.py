"""The plan chosen by itself against every strategy under every schedule, on the zoo's small models,
in the simulator.

    python benchmarks/auto_never_slower.py --log /tmp/auto-table.jsonl --minutes 60
    python benchmarks/auto_never_slower.py --log /tmp/auto-table.jsonl --table /tmp/auto-table.md

A cell is a model of the zoo, a preset of a cluster and a number of devices. Single strategies are
planned with one by one, as if each were named: with their defaults, in the shapes that named
schedules ask for, and under every schedule that takes their placement. What the search placed in
the same way is not placed again for that; the best of all by name is planned from the model's file
again. Cells come in an order in which models, presets and numbers of devices take turns; each is a
line of the log, and what the log has is not computed again. A cell that takes longer than `--limit`
seconds of processor time is logged as such.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

from auto_table import written
from command_line import parse_arguments

from autopipe.configs import zoo
from autopipe.configs.cluster import build_cluster, cluster_names, cluster_preset
from autopipe.ir.errors import AutopipeError, InfeasibleError
from autopipe.passes.auto.candidates import Candidate
from autopipe.passes.auto.choose import best_plan, search_plans
from autopipe.passes.auto.search import PlanSearch
from autopipe.passes.pipeline import (
    PredictedPlacement,
    Request,
    Runner,
    make_plan,
    predict_placement,
    run_scheduler,
    run_strategy,
    simulate_schedule,
)
from autopipe.passes.registry import (
    Scheduler,
    Strategy,
    scheduler_class,
    scheduler_names,
    strategy_class,
    strategy_names,
)
from autopipe.passes.schedule.breakdown import breakdown
from autopipe.passes.schedule.limits import lower_bound

DEVICES = (4, 8, 16, 32)
SHAPES: tuple[dict[str, object], ...] = (
    {"shape": "v"},
    {"shape": "x"},
    {"shape": "v", "stages_per_rank": 2},
    {"shape": "v", "stages_per_rank": 2, "style": "v"},
)
"""What Chimera, interleaved schedules and the V-shaped ones run on."""
SEARCHED = "tessel"
NOT_NAMED = ("given", "manual")
"""Strategies that follow what somebody writes; so does the schedule csv."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is planned."""

    model: str
    preset: str
    devices: int


def cells() -> Iterator[Cell]:
    """All of them, so that the first few have every model, preset and number of devices."""
    pairs = [
        (preset, count)
        for turn in range(len(DEVICES))
        for number, preset in enumerate(cluster_names())
        if has(preset, count := DEVICES[(number + turn) % len(DEVICES)])
    ]
    models = sorted(zoo.MODELS)
    for turn in range(len(pairs)):
        for number, model in enumerate(models):
            yield Cell(model, *pairs[(number + turn) % len(pairs)])


def has(preset: str, devices: int) -> bool:
    """Whether a cluster has so many devices: groups of different ones have as many as they have."""
    try:
        build_cluster(cluster_preset(preset), devices, None, None)
    except InfeasibleError:
        return False
    return True


def answered(cell: Cell) -> dict[str, object]:
    """The chosen plan, and the best that is found by name."""
    request = Request(
        model_file(cell.model),
        build_cluster(cluster_preset(cell.preset), cell.devices, None, None),
        None,
        None,
    )
    begin = processor_s()
    runner = Runner()
    search = search_plans(request, runner)
    found = best_plan(search)
    seconds = processor_s() - begin
    singles = sorted(singles_of(request, placed_by(search)), key=lambda each: each[2])
    named, order, step_s = singles[0]
    again = make_plan(with_names(request, named, order)).timeline.end
    plan = found.plan
    summary = found.plan.summary
    problem = found.problem
    losses = breakdown(problem, plan.placement, plan.schedule, plan.prediction, found.timeline.end)
    return {
        "strategy": told(found.request.strategy),
        "schedule": summary.schedule,
        "stages": summary.stages,
        "micro_batches": summary.micro_batches,
        "step_s": found.timeline.end,
        "samples_per_s": summary.samples_per_s,
        "ideal_s": losses.ideal_s,
        "single_strategy": told(named),
        "single_schedule": order,
        "single_step_s": step_s,
        "single_again_s": again,
        "singles": len(singles),
        "search_s": seconds,
        "cell_s": processor_s() - begin,
    }


def processor_s() -> float:
    """Processor time so far in seconds, that of processes that have ended included."""
    return sum(os.times()[:4])


def placed_by(search: PlanSearch) -> dict[Strategy, PredictedPlacement]:
    """The placements of strategies that the search asked as they are when they are named."""
    plain = (each for each in search.trials if each.candidate == Candidate(each.candidate.strategy))
    return {each.candidate.strategy: each.placed for each in plain if each.placed is not None}


def singles_of(
    request: Request, known: dict[Strategy, PredictedPlacement]
) -> Iterator[tuple[Strategy, str, float]]:
    """Every strategy and schedule that make a plan by name, with its step in seconds.

    Placements that are `known` are not searched again. A schedule is searched only where the bound
    on the placement's step is below the least so far.
    """
    names = [name for name in strategy_names() if name not in NOT_NAMED]
    strategies = [strategy_class(name)() for name in names]
    shaped = [strategy_class("tessel_shapes")(**options) for options in SHAPES]
    placements: list[tuple[Strategy, PredictedPlacement]] = []
    least = math.inf
    runner = Runner()
    for strategy in (*strategies, *shaped):
        try:
            placed = known.get(strategy)
            if placed is None:
                found = run_strategy(with_names(request, strategy, "1f1b"), strategy, runner)
                placed = predict_placement(*found, runner)
        except AutopipeError:
            continue
        placements.append((strategy, placed))
        for order in scheduler_names():
            if order in ("csv", SEARCHED):
                continue
            with suppress(AutopipeError):
                step_s = step_of(placed, scheduler_class(order)(), runner)
                least = min(least, step_s)
                yield strategy, order, step_s
    for strategy, placed in placements:
        if lower_bound(placed.problem, placed.placement, placed.prediction) < least:
            with suppress(AutopipeError):
                step_s = step_of(placed, scheduler_class(SEARCHED)(), runner)
                least = min(least, step_s)
                yield strategy, SEARCHED, step_s


def step_of(placed: PredictedPlacement, scheduler: Scheduler, runner: Runner) -> float:
    """Seconds of a step in a scheduler's order."""
    return simulate_schedule(placed, run_scheduler(placed, scheduler, runner), runner).timeline.end


def with_names(request: Request, strategy: Strategy, order: str) -> Request:
    """The request that names both."""
    return Request(request.model, request.cluster, strategy, scheduler_class(order)())


def told(strategy: Strategy | None) -> str:
    """A strategy with its options that are not its defaults."""
    assert strategy is not None
    default = type(strategy)()
    options = {
        name: getattr(strategy, name)
        for name in getattr(type(strategy), "__dataclass_fields__", {})
        if getattr(strategy, name) != getattr(default, name)
    }
    return strategy.name + "".join(f" {name}={value}" for name, value in options.items())


@cache
def model_file(model: str) -> Path:
    """The model in its smallest sizes, with its loss and without weights."""
    path = Path(tempfile.gettempdir()) / f"auto-never-slower-{model}.onnx"
    if not path.exists():
        zoo.build(zoo.configure(model, {"loss": True, "weights": "none"})).save(path)
    return path


def bounded(cell: Cell, limit: int) -> dict[str, object]:
    """The cell's answer, from a process that may take so many seconds of processor time."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_answer, args=(cell, limit, theirs)
    )
    process.start()
    theirs.close()
    try:
        answer: dict[str, object] = ours.recv()
        process.join()
    except EOFError:
        process.join()
        over = process.exitcode == -signal.SIGXCPU
        answer = {
            "failed": f"no answer within {limit} s of processor time" if over else "internal error"
        }
    return answer


def _answer(cell: Cell, limit: int, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    try:
        pipe.send(answered(cell))
    except AutopipeError as error:
        pipe.send({"failed": error.message.partition("\n")[0]})


def main() -> None:
    """Compute cells that the log lacks, or write the table of those that it has."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--log", type=Path, required=True, metavar="FILE", help="a JSON object a line"
    )
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="write the log's cells as Markdown, compute nothing",
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="when to begin no more cells"
    )
    parser.add_argument("--limit", type=int, default=600, help="seconds of processor time a cell")
    parser.add_argument("--cells", type=int, help="how many to compute at most")
    parser.add_argument(
        "--only", action="append", metavar="MODEL", choices=sorted(zoo.MODELS), help="repeatable"
    )
    parser.add_argument("--devices", action="append", type=int, choices=DEVICES, help="repeatable")
    arguments = parse_arguments(parser, only=["mmt"], devices=[4], cells=1)
    rows = (
        [json.loads(line) for line in arguments.log.read_text().splitlines()]
        if arguments.log.exists()
        else []
    )
    if arguments.table:
        arguments.table.write_text(written(rows, sum(1 for _ in cells())))
        return
    done = {(row["model"], row["preset"], row["devices"]) for row in rows}
    end = time.monotonic() + 60 * arguments.minutes
    asked = (
        cell
        for cell in cells()
        if cell.model in (arguments.only or zoo.MODELS)
        and cell.devices in (arguments.devices or DEVICES)
        and (cell.model, cell.preset, cell.devices) not in done
    )
    for cell in itertools.islice(asked, arguments.cells):
        if time.monotonic() >= end:
            break
        key = cell.model, cell.preset, cell.devices
        row = dict(zip(("model", "preset", "devices"), key, strict=True)) | bounded(
            cell, arguments.limit
        )
        with arguments.log.open("a") as log:
            log.write(json.dumps(row) + "\n")
        print(
            row.get("failed") or f"{key} {row['strategy']} {row['schedule']} {row['step_s']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
