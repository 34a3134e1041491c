"""Suggestions of options of `autopipe plan`, with which a plan may fit into memory or a step may
become shorter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from autopipe.ir.errors import CANDIDATE_ERRORS, OutOfMemoryError
from autopipe.ir.problem import Mode
from autopipe.passes.cost.loss_scores import may_exceed_memory
from autopipe.passes.cost.memory_check import size_text
from autopipe.passes.pipeline.reading import read_request_model
from autopipe.passes.pipeline.request import Request
from autopipe.passes.pipeline.result import PlanResult
from autopipe.passes.pipeline.runner import Runner
from autopipe.passes.pipeline.scheduling import place_and_schedule

_OPTIONS_S = 20.0
"""Seconds after which no further option is tried, if a plan does not fit into memory. A search that
started earlier may take as long again.
"""


def memory_hints(request: Request, runner: Runner) -> Iterator[str]:
    """Yield hints for a request whose plan does not fit into memory: recomputation, sharded
    optimizer state, or both, if the plan then fits. If no option suffices, the hint states this.

    Each option is planned with the request's strategy and scheduler. Both together are tried only
    if neither suffices alone. A hint contains the maximum peak memory over all devices.
    """
    model = read_request_model(request, runner)
    if model.mode is not Mode.TRAIN:
        return
    full = "--recompute full"
    shard = "--set optimizer.zero_stage=1"
    sharded = replace(request.optimizer, shard=True)
    scores = request.scores if model.other is None else request.scores or "recompute"
    limit_s = _OPTIONS_S if request.time_limit is None else min(request.time_limit, _OPTIONS_S)
    base = replace(request, scores=scores, time_limit=limit_s)
    varied: dict[tuple[str, ...], Request] = {}
    if request.recompute in (None, "none"):
        varied[full,] = replace(base, recompute="full")
    if not request.optimizer.shard and request.optimizer.name != "muon":
        varied[shard,] = replace(base, optimizer=sharded)
    if len(varied) == 2:
        varied[full, shard] = replace(base, recompute="full", optimizer=sharded)
    end = time.monotonic() + limit_s
    found = list[str]()
    refused = list[str]()
    for options, each in varied.items():
        if time.monotonic() > end or (found and len(options) > 1):
            break
        # A new runner is used, because the observer of `runner` must not report the passes of these
        # trial plans.
        own = Runner()
        own.models = runner.models
        own.work = runner.work
        try:
            timeline = place_and_schedule(each, own)[1].timeline
        except OutOfMemoryError:
            refused.append(" ".join(options))
        except CANDIDATE_ERRORS:
            continue
        else:
            found.append(f"{' '.join(options)} (needs {size_text(max(timeline.peak_memory))})")
    if found:
        yield f"add {' or '.join(found)}"
        settled = {full: request.recompute is not None, shard: not request.shard_open}
        left_out = [
            option for option in (full, shard) if (option,) in varied and not settled[option]
        ]
        if left_out:
            yield (
                f"a named strategy leaves out {' and '.join(left_out)}, which plan without "
                "--strategy tries"
            )
    elif refused:
        yield f"{refused[-1]} does not suffice"


def untried_options(request: Request, planned: PlanResult) -> tuple[str, ...]:
    """Return the options that strategy `auto` would have tried, and that the strategy named in
    `request` did not try.

    `planned` is the plan of `request`. Recomputation is included if memory may not suffice, the
    request leaves recomputation open, and no stage recomputes. Sharded optimizer state is included
    if the request leaves it open and several devices hold equal parameters.
    """
    plan = planned.plan
    problem = planned.problem
    if request.strategy is None or not problem.train:
        return ()
    options = []
    recomputed = any(stage.recompute for stage in plan.placement.stages)
    if request.recompute is None and not recomputed and may_exceed_memory(problem):
        options.append("--recompute")
    degrees = plan.summary.degrees
    if (
        request.shard_open
        and not problem.optimizer.shard
        and degrees is not None
        and degrees.has_replicas
    ):
        options.append("optimizer.zero_stage=1")
    return tuple(options)
