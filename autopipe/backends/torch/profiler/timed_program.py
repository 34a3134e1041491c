"""Timing of parts of one-device programs. Each program runs in a process of its own. Marks (points
in time) are recorded before and after selected calls of the program.

`python -m autopipe.backends.torch.profiler.timed_program FILE KIND PROGRAM DEVICE SECONDS` writes
the result of the measurement KIND, a key of `MEASUREMENTS`, to FILE as a JSON list.
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
from autopipe.backends.torch.runtime.watch.clock import TimeMark, seconds_between
from autopipe.ir.errors import LaunchError
from autopipe.ir.measured_costs import Timing
from autopipe.ir.output_files import scratch_folder

MIN_REPETITIONS = 5
"""Minimum number of timed repetitions, however slow the work is."""
MAX_REPETITIONS = 200


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Timer for work on one device.

    On CUDA, it records events on the current stream. On a CPU with one torch thread, it reads the
    CPU time of this thread, so that other processes on the machine do not affect the result. On a
    CPU with several threads, it reads the wall clock.
    """

    device: torch.device

    def mark(self) -> TimeMark:
        """Return a mark for the present time: an event on CUDA, otherwise seconds."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()

    def spans(self, marks: Sequence[TimeMark]) -> list[float]:
        """Return the seconds from each mark to the next. On a CPU, the time that reading the clock
        takes is subtracted.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [max(0.0, seconds_between(*pair)) for pair in itertools.pairwise(marks)]
        looks = [self.mark() for _ in range(9)]
        own = statistics.median(seconds_between(*pair) for pair in itertools.pairwise(looks))
        return [max(0.0, seconds_between(*pair) - own) for pair in itertools.pairwise(marks)]

    def seconds(self, work: Callable[[], object]) -> float:
        """Call `work` and return its seconds."""
        start = self.mark()
        work()
        return self.spans([start, self.mark()])[0]


def repeat_timed(run: Callable[[], Sequence[float]], seconds: float) -> list[Timing]:
    """Call `run` repeatedly and return one `Timing` for each of the parts whose seconds `run`
    returns.

    The first call is a warm-up and is not counted. `run` is called at least `MIN_REPETITIONS`
    times. It is then called until `seconds` have passed, but at most `MAX_REPETITIONS` times.
    """
    run()
    started = time.perf_counter()
    found: list[Sequence[float]] = []
    while len(found) < MIN_REPETITIONS or (
        len(found) < MAX_REPETITIONS and time.perf_counter() - started < seconds
    ):
        found.append(run())
    return [Timing.of(each) for each in zip(*found, strict=True)]


def average_timings(timings: Sequence[Timing]) -> Timing:
    """Return the mean time and the mean spread of several timings with an equal number of
    repetitions.
    """
    return Timing(
        statistics.fmean(each.seconds for each in timings),
        statistics.fmean(each.spread for each in timings),
        timings[0].repetitions,
    )


def measure_in_process(kind: str, program: Path, device: str, seconds: float) -> list[float]:
    """Run the measurement `kind`, a key of `MEASUREMENTS`, on the program in folder `program`, in
    another process for about `seconds`. Return the seconds of each part of the program; the
    functions in `MEASUREMENTS` define the parts.

    Raise LaunchError with the last line that the process printed if it fails.
    """
    with scratch_folder("profile") as scratch, rank_environment():
        found = Path(scratch) / "numbers.json"
        words = (__name__, str(found), kind, str(program), device, str(seconds))
        last_words = run_child(words, {"OMP_NUM_THREADS": str(torch.get_num_threads())})
        if last_words:
            raise LaunchError(f"the process that measures a program failed: {last_words}")
        numbers: list[float] = json.loads(found.read_text(encoding="utf-8"))
    return numbers


@dataclass(frozen=True, slots=True)
class TimedProgram:
    """A one-device program that is loaded in this process: its rank, its function for a step, and a
    timer.
    """

    rank: Rank
    step: Callable[[], None]
    watch: Stopwatch

    @staticmethod
    def of(program: Path, data: Path, device: torch.device) -> TimedProgram:
        """Load the program in folder `program` and set up its rank. The samples of one step are
        generated and written to the file `data` first, and the program reads this file, so that the
        time of a step does not include the generation of samples.
        """
        sys.path.insert(0, str(program))
        sys.argv = ["rank_000.py", "--device", device.type, "--data", str(data)]
        names = runpy.run_path(str(program / "rank_000.py"))
        rank: Rank = names["rank"]
        save_samples(rank.manifest, data)
        rank.set_up()
        return TimedProgram(rank, names["step"], Stopwatch(device))

    def seconds_in_stages(self) -> dict[str, float]:
        """Run one step. Return the mean seconds per micro-batch of the generated functions and of
        autograd, by stage and phase: `0F` is the forward of stage 0.
        """
        calls: list[tuple[Any, str]] = [(stage, "function") for stage in self.rank.stages.values()]
        calls.append((output_edges, "accumulate_gradients"))
        return self.seconds_of(calls, lambda _: self.rank.heartbeat.task[:2])

    def seconds_of(
        self, calls: Sequence[tuple[Any, str]], key: Callable[[str], str] = str
    ) -> dict[str, float]:
        """Run one step. Return the mean seconds per call of the given methods, by key.

        `calls` has pairs of an object and the name of a method of it. `key` maps the name to a key
        of the result, and is called after the method has returned. The methods must not call one
        another, because the marks of an inner call would count in the time of the outer call.
        """
        found: dict[str, list[tuple[TimeMark, TimeMark]]] = defaultdict(list)

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


def _time_whole_step(timed: TimedProgram) -> Callable[[], list[float]]:
    """Return a function that runs steps of a program with one stage and returns the mean seconds of
    four parts of its tasks.

    The parts are [forward operators, backward operators, rest of the forward task, rest of the
    backward task]. The forward operators are the call of the generated function; the backward
    operators are the call of autograd. Both backward parts are 0 in inference.
    """
    tasks = [(timed.rank.stages[0], task) for task in ("forward", "backward")]

    def run() -> list[float]:
        inside = timed.seconds_in_stages()
        whole = timed.seconds_of(tasks)
        own = inside["0F"], inside.get("0B", 0.0)
        around = whole["forward"] - own[0], whole.get("backward", 0.0) - own[1]
        return [*own, *(max(0.0, each) for each in around)]

    return run


def _time_tasks(timed: TimedProgram) -> Callable[[], list[float]]:
    """Return a function that runs steps of a program with two equal stages and returns the seconds
    of four parts. The backward of stage 1 is split into the gradients of inputs and of weights.

    The parts are [rest of stage 0's forward task, rest of stage 0's backward task, time by which
    stage 1 exceeds stage 0 per micro-batch, optimizer update]. The rest of a task is the time of
    the task minus that of its operators. It includes reading samples.
    """
    rank = timed.rank
    tasks: list[tuple[Any, str]] = [(rank.stages[0], "forward"), (rank.stages[0], "backward")]
    update = [(rank.update.optimizer, "step"), (rank.update.optimizer, "zero_grad")]

    def run() -> list[float]:
        own = timed.seconds_in_stages()
        found = timed.seconds_of([*tasks, *update])
        around = [found["forward"] - own["0F"], found["backward"] - own["0B"]]
        lengths = [0.0, 0.0]
        rank.clock.step.wait()
        for span in rank.clock.step.spans():
            lengths[int(span.task[0])] += span.end - span.start
        split = (lengths[1] - lengths[0]) / rank.manifest.micro_batches
        return [*(max(0.0, each) for each in (*around, split)), found["step"] + found["zero_grad"]]

    return run


MEASUREMENTS = {"whole": _time_whole_step, "tasks": _time_tasks}


def main() -> None:
    """Run the measurement that the command line names."""
    target, kind, program, device, seconds = sys.argv[1:]
    timed = TimedProgram.of(Path(program), Path(target).with_suffix(".npz"), torch.device(device))
    numbers = [each.seconds for each in repeat_timed(MEASUREMENTS[kind](timed), float(seconds))]
    Path(target).write_text(json.dumps(numbers), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
