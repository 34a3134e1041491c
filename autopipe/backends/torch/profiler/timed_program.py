"""One-device programs, timed in processes of their own by marks around what they call.

`… -m autopipe.backends.torch.profiler.timed_program FILE KIND PROGRAM DEVICE SECONDS` writes what
`numbers_of` gives.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autopipe.backends.torch.fork_server import rank_environment
from autopipe.backends.torch.launcher import run_child
from autopipe.backends.torch.runtime.data.sources import save_samples
from autopipe.backends.torch.runtime.rank import Rank
from autopipe.backends.torch.runtime.step import output_edges
from autopipe.backends.torch.runtime.watch.clock import Mark, seconds_between
from autopipe.ir.errors import LaunchError
from autopipe.ir.measured_costs import Timing
from autopipe.ir.output_files import scratch_folder

LEAST = 5
"""Repetitions of even the slowest work."""
MOST = 200


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times work on one device: on a CPU by the processor time of a thread that works alone, which
    other processes on the machine do not add to, and by the clock where there are several; by
    events on a CUDA stream.
    """

    device: torch.device

    def mark(self) -> Mark:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()

    def spans(self, marks: Sequence[Mark]) -> list[float]:
        """Seconds from each mark to the next, without what looking at the clock takes."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [max(0.0, seconds_between(*pair)) for pair in itertools.pairwise(marks)]
        looks = [self.mark() for _ in range(9)]
        own = statistics.median(seconds_between(*pair) for pair in itertools.pairwise(looks))
        return [max(0.0, seconds_between(*pair) - own) for pair in itertools.pairwise(marks)]

    def seconds(self, work: Callable[[], object]) -> float:
        start = self.mark()
        work()
        return self.spans([start, self.mark()])[0]


def repeated(run: Callable[[], Sequence[float]], seconds: float) -> list[Timing]:
    """`run` gives what each of several parts took; the median of each, after a warm-up, of as many
    runs as `seconds` of the clock allow.
    """
    run()
    started = time.perf_counter()
    found: list[Sequence[float]] = []
    while len(found) < LEAST or (len(found) < MOST and time.perf_counter() - started < seconds):
        found.append(run())
    return [Timing.of(each) for each in zip(*found, strict=True)]


def averaged(timings: Sequence[Timing]) -> Timing:
    return Timing(
        statistics.fmean(each.seconds for each in timings),
        statistics.fmean(each.spread for each in timings),
        timings[0].repetitions,
    )


def numbers_of(kind: str, program: Path, device: str, seconds: float) -> list[float]:
    """Seconds of the parts of a program, of a `kind` of `KINDS`, measured for about `seconds` in
    another process. Raises LaunchError with the last line that it wrote where it fails.
    """
    with scratch_folder("profile") as scratch, rank_environment():
        found = Path(scratch) / "numbers.json"
        words = (__name__, str(found), kind, str(program), device, str(seconds))
        last_words = run_child(words, {"OMP_NUM_THREADS": str(torch.get_num_threads())})
        if last_words:
            raise LaunchError(f"a program cannot be measured: {last_words}")
        numbers: list[float] = json.loads(found.read_text(encoding="utf-8"))
    return numbers


@dataclass(frozen=True, slots=True)
class TimedProgram:
    rank: Rank
    step: Callable[[], None]
    watch: Stopwatch

    @staticmethod
    def of(program: Path, data: Path, device: torch.device) -> TimedProgram:
        """The program in folder `program`, set up. One step's samples are drawn and written to
        `data`, from where it reads them: drawing is no part of a step.
        """
        sys.path.insert(0, str(program))
        sys.argv = ["rank_000.py", "--device", device.type, "--data", str(data)]
        names = runpy.run_path(str(program / "rank_000.py"))
        rank: Rank = names["rank"]
        save_samples(rank.manifest, data)
        rank.set_up()
        return TimedProgram(rank, names["step"], Stopwatch(device))

    def seconds_inside(self) -> dict[str, float]:
        """Seconds inside generated functions and autograd, under the task's stage and phase, such
        as `0F`.
        """
        calls: list[tuple[Any, str]] = [(stage, "function") for stage in self.rank.stages.values()]
        calls.append((output_edges, "accumulate_gradients"))
        return self.seconds_of(calls, lambda _: self.rank.heartbeat.task[:2])

    def seconds_of(
        self, calls: Sequence[tuple[Any, str]], key: Callable[[str], str] = str
    ) -> dict[str, float]:
        """Run a step with marks around the calls of these attributes alone, for others would count
        in what they are made around. Returns mean seconds by `key` of an attribute's name, asked
        for behind the call.
        """
        found: dict[str, list[tuple[Mark, Mark]]] = defaultdict(list)

        def timed(call: Callable[..., Any], name: str, /, *arguments: Any, **settings: Any) -> Any:
            start = self.watch.mark()
            result = call(*arguments, **settings)
            found[key(name)].append((start, self.watch.mark()))
            return result

        with ExitStack() as stack:
            for owner, name in calls:
                call = getattr(owner, name)
                stack.callback(setattr, owner, name, call)
                setattr(owner, name, partial(timed, call, name))
            self.rank.run(self.step)
        return {
            name: statistics.fmean(self.watch.spans(each)[0] for each in own)
            for name, own in found.items()
        }


def _whole(timed: TimedProgram) -> Callable[[], list[float]]:
    """Of a program of one stage: a forward's and a backward's operators, and what both tasks take
    besides them. A forward's operators are what its generated function takes, a backward's what
    autograd does; 0 for a backward where there is none.
    """
    tasks = [(timed.rank.stages[0], task) for task in ("forward", "backward")]

    def run() -> list[float]:
        inside = timed.seconds_inside()
        whole = timed.seconds_of(tasks)
        own = inside["0F"], inside.get("0B", 0.0)
        around = whole["forward"] - own[0], whole.get("backward", 0.0) - own[1]
        return [*own, *(max(0.0, each) for each in around)]

    return run


def _tasks(timed: TimedProgram) -> Callable[[], list[float]]:
    """Of a program of two equal stages, of which the second's backward is split: what a forward and
    a backward of the first take besides their operators, how much longer a micro-batch of the
    second takes, and an update. Reading samples counts.
    """
    rank = timed.rank
    tasks: list[tuple[Any, str]] = [(rank.stages[0], "forward"), (rank.stages[0], "backward")]
    update = [(rank.update.optimizer, "step"), (rank.update.optimizer, "zero_grad")]

    def run() -> list[float]:
        own = timed.seconds_inside()
        found = timed.seconds_of([*tasks, *update])
        around = [found["forward"] - own["0F"], found["backward"] - own["0B"]]
        lengths = [0.0, 0.0]
        rank.clock.step.wait()
        for span in rank.clock.step.spans():
            lengths[int(span.task[0])] += span.end - span.start
        split = (lengths[1] - lengths[0]) / rank.manifest.micro_batches
        return [*(max(0.0, each) for each in (*around, split)), found["step"] + found["zero_grad"]]

    return run


KINDS = {"whole": _whole, "tasks": _tasks}


def main() -> None:
    target, kind, program, device, seconds = sys.argv[1:]
    timed = TimedProgram.of(Path(program), Path(target).with_suffix(".npz"), torch.device(device))
    numbers = [each.seconds for each in repeated(KINDS[kind](timed), float(seconds))]
    Path(target).write_text(json.dumps(numbers), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
