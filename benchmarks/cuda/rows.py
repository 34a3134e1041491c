"""The rows of a run on one GPU, in order of value, and the programs that they read.

A row that measures no time may run beside others. `--tiny` keeps one or two rows of each kind, in
the smallest sizes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median

from autopipe.backends.torch.launcher import read_reports
from autopipe.configs.zoo import Setting
from benchmarks.cuda.processes import ROOT, Failed, Runner, python
from benchmarks.cuda.programs import PlannedProgram, Prepared, predictions
from benchmarks.cuda.session import Figures, Group, Row, Session
from benchmarks.small_models import SIZES

ADAMW = ("--set", "optimizer.name=adamw")
BF16 = (*ADAMW, "--set", "precision=bf16")
_TERA = 1e12
_CORES_PER_RANK = 2
"""Cores that a row which starts one process after another takes, its imports included."""

_STEP_PROGRAMS = (
    PlannedProgram("bert-4-micro-batches", "bert", (("size", "base"),), 32, ("--micro-batches", "4", *BF16)),
    PlannedProgram("resnet-50", "wide-resnet", (("size", "resnet50"),), 64, ("--micro-batches", "1", *ADAMW)),
    PlannedProgram("gpt-1-3b", "gpt", (("size", "1.3b"),), 16, ("--micro-batches", "4", *BF16)),
    PlannedProgram("gpt-125m", "gpt", (("size", "125m"),), 8, ("--micro-batches", "1", *ADAMW)),
    PlannedProgram("bert-1-micro-batch", "bert", (("size", "base"),), 32, ("--micro-batches", "1", *BF16)),
    PlannedProgram(
        "llama-1-6b",
        "llama",
        (
            ("layers", 32), ("hidden", 2048), ("heads", 16), ("key_value_heads", 8), ("feed_forward", 5504),
            ("vocabulary", 32000), ("sequence", 1024),
        ),
        16,
        ("--micro-batches", "4", *BF16),
    ),
    PlannedProgram("moe-380m", "moe", (("size", "380m"),), 8, ("--micro-batches", "1", *BF16)),
)  # fmt: skip
STEP_PROGRAMS = tuple(replace(each, on_slow_host=True) for each in _STEP_PROGRAMS)
"""Programs of one rank whose steps and memory are compared with their plans."""
GRAPHED_STEPS = ("bert-4-micro-batches", "llama-1-6b")
"""Programs of `STEP_PROGRAMS` whose steps are measured as CUDA graphs too: those that the host
bounds most.
"""
HAND_SIZES: Mapping[str, Setting] = {
    "layers": 24, "hidden": 1024, "heads": 16, "vocabulary": 50257, "sequence": 1024,
}  # fmt: skip
HAND_BATCH = 16
COMPILED_LAYERS = 4
"""Layers of the compiled comparison: the compilation of 24 takes minutes."""
FOUR_RANKS: Mapping[str, tuple[str, ...]] = {
    "zb_h1": ("--strategy", "grid", "--set", "strategy.pipeline=2", "--schedule", "zb_h1"),
    "pase": ("--strategy", "pase"),
    "sharded optimizer": ("--strategy", "grid", "--set", "optimizer.zero_stage=1"),
    "recomputed, bf16": (
        "--strategy", "grid", "--set", "strategy.pipeline=2", "--set", "recompute=full", "--set", "precision=bf16",
    ),
}  # fmt: skip
NODES: Mapping[str, tuple[str, ...]] = {
    "grid": ("--strategy", "grid"),
    "chimera": ("--schedule", "chimera"),
    "1f1b_plus": ("--schedule", "1f1b_plus"),
}
"""Schedules of four ranks, each on a node of its own, over NCCL."""


def small(zoo: str, title: str, samples: int, ranks: int, *flags: str) -> PlannedProgram:
    """Return a program of the smallest model of a kind."""
    return PlannedProgram(
        f"small-{zoo}-{title}".replace(", ", "-").replace(" ", "-"),
        zoo,
        tuple(SIZES[zoo].items()),
        samples,
        flags,
        ranks,
    )


def one_rank(zoo: str, precision: str) -> PlannedProgram:
    return small(
        zoo, precision, 4, 1, "--micro-batches", "1", *ADAMW, "--set", f"precision={precision}"
    )


def hand_program(title: str, layers: int, tiny: bool) -> PlannedProgram:
    """Return the program that `one_device.py` compares with the hand-written model."""
    sizes = {**HAND_SIZES, "layers": layers} if not tiny else _TINY_HAND
    settings = tuple(sizes.items())
    return PlannedProgram(
        f"hand-{title}",
        "gpt",
        settings,
        HAND_BATCH if not tiny else 1,
        ("--micro-batches", "1", *BF16),
    )


_TINY_HAND: Mapping[str, Setting] = {
    "layers": 1,
    "hidden": 32,
    "heads": 2,
    "vocabulary": 64,
    "sequence": 16,
}


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows for a device, or with `tiny` a few of them in the smallest sizes."""

    device: str
    tiny: bool

    # Programs

    @property
    def step_programs(self) -> Sequence[PlannedProgram]:
        if not self.tiny:
            return STEP_PROGRAMS
        return (
            replace(small("gpt", "step", 4, 1, "--micro-batches", "2", *ADAMW), name="step-gpt"),
        )

    @property
    def launched(self) -> PlannedProgram:
        return small("gpt", "launched", 4, 1, "--micro-batches", "2", *ADAMW)

    @property
    def gaps(self) -> PlannedProgram:
        flags = ("--micro-batches", "4", *BF16)
        return (
            small("gpt", "gaps", 4, 1, *flags)
            if self.tiny
            else PlannedProgram("gaps-gpt-125m", "gpt", (("size", "125m"),), 8, flags)
        )

    @property
    def verified(self) -> Sequence[PlannedProgram]:
        """Programs of one rank, those of most value first."""
        if self.tiny:
            return (one_rank("gpt", "bf16"),)
        first = [one_rank(zoo, "bf16") for zoo in ("gpt", "llama", "moe", "wide-resnet")]
        return (*first, *(one_rank(zoo, "fp32") for zoo in SIZES))

    @property
    def verified_tf32(self) -> Sequence[PlannedProgram]:
        return () if self.tiny else tuple(one_rank(zoo, "tf32") for zoo in SIZES)

    @property
    def nodes(self) -> Mapping[str, PlannedProgram]:
        ranks = 2 if self.tiny else 4
        titles = list(NODES)[: 1 if self.tiny else None]
        return {
            title: small("gpt", f"nodes-{title}", 16, ranks, "--micro-batches", "8", *NODES[title])
            for title in titles
        }

    @property
    def four(self) -> Mapping[str, PlannedProgram]:
        """Programs of four ranks on one GPU."""
        zoos = ("gpt", "llama", "moe") if not self.tiny else ("gpt",)
        kinds = list(FOUR_RANKS)[: 1 if self.tiny else None]
        pairs = [(zoo, kind) for kind in kinds for zoo in zoos]
        return {
            f"{zoo}, {kind}": small(
                zoo, f"four-{kind}", 16, 4, "--micro-batches", "4", *ADAMW, *FOUR_RANKS[kind]
            )
            for zoo, kind in pairs
        }

    @property
    def hand(self) -> Mapping[str, PlannedProgram]:
        whole = hand_program("whole", int(str(HAND_SIZES["layers"])), self.tiny)
        return {
            "whole": whole,
            "part": whole if self.tiny else hand_program("part", COMPILED_LAYERS, False),
        }

    def programs(self) -> Sequence[PlannedProgram]:
        """Return all programs that the rows read, once each."""
        mappings = chain(self.nodes.values(), self.four.values(), self.hand.values())
        found = [
            self.launched,
            *self.verified,
            *self.verified_tf32,
            *self.step_programs,
            self.gaps,
            *mappings,
        ]
        return tuple({each.name: each for each in found}.values())

    # Groups

    def phases(self, prepared: Prepared, session: Session, scratch: Path) -> list[list[Group]]:
        """Return the groups of each phase."""
        measure = _Measurements(self, prepared, session, scratch)
        lanes = max(1, len(os.sched_getaffinity(0)) // _CORES_PER_RANK)
        return [
            [Group("describe", [Row("describe", measure.describe, measure.limit(75))], 1)],
            [
                Group("launch", list(measure.launch_rows()), lanes),
                Group("nccl", list(measure.nccl_rows()), 1),
            ],
            [Group("steps", list(measure.step_rows()), 1)],
            [Group("hand", list(measure.hand_rows()), 1)],
            [
                Group("four", list(measure.four_rows()), max(1, lanes // 3)),
                Group("conformance", list(measure.conformance_rows()), 1),
                Group("tf32", list(measure.tf32_rows()), max(1, lanes // 4)),
            ],
        ]


@dataclass(frozen=True, slots=True)
class _Measurements:
    """How each row is measured."""

    rows: Rows
    prepared: Prepared
    session: Session
    scratch: Path

    @property
    def device(self) -> str:
        return self.rows.device

    def limit(self, seconds: float) -> float:
        """Return a row's time limit: a few cores take longer for the smallest sizes than a GPU for
        the real ones.
        """
        return max(_TINY_S, seconds) if self.rows.tiny else seconds

    # Launch and verify

    def launch_rows(self) -> Iterator[Row]:
        yield Row("launch gpt", self.launch, self.limit(60))
        yield Row("random numbers", partial(self.random, ()), self.limit(60))
        for planned in self.rows.verified:
            yield self.verify_row(planned)
        yield Row("no synchronisation in a step", self.wait, self.limit(60))

    def tf32_rows(self) -> Iterator[Row]:
        if not self.rows.tiny:
            yield Row(
                "random numbers, compiled", partial(self.random, ("compiled",)), self.limit(150)
            )
        yield from map(self.verify_row, self.rows.verified_tf32)

    def verify_row(self, planned: PlannedProgram) -> Row:
        return Row(
            f"verify {planned.name.removeprefix('small-')}",
            partial(self.verify, planned),
            self.limit(100),
        )

    def describe(self, run: Runner) -> Figures:
        """Return card and versions.

        If forked processes cannot use the device, none is forked from then on. If no process can,
        the run ends.
        """
        processes = self.session.processes
        try:
            return {
                "forked": processes.server is not None,
                **self.part(run, "describe", self.device),
            }
        except Failed as error:
            processes.server = None
            try:
                return {"not_forked": str(error), **self.part(run, "describe", self.device)}
            except Failed:
                processes.close()
                raise

    def launch(self, run: Runner) -> Figures:
        """Run four steps by `autopipe launch`."""
        program = self.prepared.program(self.rows.launched)
        steps = run.autopipe("launch", program, "--device", self.device, "--steps", 4)["steps"]
        return {"losses": [step["loss"] for step in steps]}

    def verify(self, planned: PlannedProgram, run: Runner) -> Figures:
        """Return whether `autopipe verify` finds the ranks equal to one device, and the largest
        difference.
        """
        words = ("verify", self.prepared.program(planned), "--device", self.device, "--json")
        found = run.last_object_forked("-m", "autopipe", *words)
        worst = max(found["checks"], key=lambda check: check["relative_difference"])
        return {
            "equal": found["equal"],
            "limit": found["tolerance"],
            "difference": worst["relative_difference"],
        }

    def wait(self, run: Runner) -> Figures:
        return self.part(run, "sync", self.prepared.program(self.rows.launched), self.device)

    def random(self, kinds: tuple[str, ...], run: Runner) -> Figures:
        return self.part(run, "random", self.device, *kinds)

    def part(self, run: Runner, name: str, *words: object) -> Figures:
        """Return what a part of `parts.py` prints."""
        found: Figures = run.last_object_forked("-m", "benchmarks.cuda.parts", name, *words)
        return found

    # NCCL

    def nccl_rows(self) -> Iterator[Row]:
        yield Row(
            "one rank alone", lambda run: self.part(run, "alone", self.device), self.limit(60)
        )
        for title, planned in self.rows.nodes.items():
            yield Row(f"nodes, {title}", partial(self.run_nodes, planned), self.limit(75))

    def run_nodes(self, planned: PlannedProgram, run: Runner) -> Figures:
        """Run two steps with each rank as a node of its own, so that NCCL lets the ranks share a
        GPU.
        """
        program = self.prepared.program(planned)
        report = self.scratch / f"{planned.name}.jsonl"
        fixed = {
            "WORLD_SIZE": planned.ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": run.processes.free_port(), "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_P2P_DISABLE": 1, "NCCL_SHM_DISABLE": 1, "NCCL_MAX_CTAS": 4, "CUDA_DEVICE_MAX_CONNECTIONS": 8,
        }  # fmt: skip
        words = (
            program / "run.py",
            "--device",
            self.device,
            "--steps",
            2,
            "--step-timeout",
            60,
            "--report",
            report,
        )
        nodes = (
            python(*words, RANK=rank, NCCL_HOSTID=f"h{rank}", **fixed)
            for rank in range(planned.ranks)
        )
        run.together(*(replace(each, forked=True) for each in nodes))
        steps = read_reports(report)
        return {"losses": [step["loss"] for step in steps], "step_s": steps[-1]["step_time_s"]}

    # Steps against plans

    def step_rows(self) -> Iterator[Row]:
        yield Row("ceilings", lambda run: self.part(run, "ceilings", self.device), self.limit(45))
        yield Row("host", lambda run: self.part(run, "host", self.device), self.limit(40))
        for planned in self.rows.step_programs:
            yield Row(
                f"step {planned.name}, eager",
                partial(self.step, planned, ("--no-cuda-graphs",)),
                self.limit(60),
            )
        for planned in self.rows.step_programs:
            if planned.name in GRAPHED_STEPS:
                yield Row(
                    f"step {planned.name}, CUDA graphs",
                    partial(self.step, planned, ("--cuda-graphs",)),
                    self.limit(60),
                )

    def step(self, planned: PlannedProgram, flags: tuple[str, ...], run: Runner) -> Figures:
        """Return the median step and the peak memory of one rank, and how its plan's predictions
        compare with them.
        """
        program = self.prepared.program(planned)
        report = self.scratch / f"{planned.name}{''.join(flags)}.jsonl"
        steps_in_all = 3 if self.rows.tiny else 12
        run.run_forked(
            program / "run.py",
            "--device",
            self.device,
            "--steps",
            steps_in_all,
            "--report",
            report,
            *flags,
        )
        steps = read_reports(report)
        step_s = median(each["step_time_s"] for each in steps[len(steps) // 2 :])
        peak = max(steps[-1]["peak_memory_bytes"])
        planned_figures = predictions(program)
        tflops = planned_figures["flops"] / step_s / _TERA
        precision = "bf16" if "precision=bf16" in planned.flags else "fp32"
        return {
            "step_s": step_s,
            "predicted_step_s": planned_figures["step_s"],
            "predicted_host_s": planned_figures["host_s"],
            "predicted_over_step": planned_figures["step_s"] / step_s,
            "peak_bytes": peak,
            "predicted_peak_bytes": planned_figures["peak_bytes"],
            "predicted_over_peak": planned_figures["peak_bytes"] / peak,
            "first_step_s": steps[0]["step_time_s"],
            "last_loss": steps[-1]["loss"],
            "tflops": tflops,
            **self.of_ceiling(precision, tflops=tflops),
        }

    def of_ceiling(self, precision: str, **tflops: float) -> Figures:
        """Return rates as fractions of the card's measured ceiling, {} if that was not measured."""
        ceiling = self.session.found("ceilings").get(f"{precision}_tflops")
        return (
            {}
            if ceiling is None
            else {f"{name}_of_ceiling": rate / ceiling for name, rate in tflops.items()}
        )

    # Hand-written models

    def hand_rows(self) -> Iterator[Row]:
        yield Row("hand-written, eager", partial(self.hand, "whole", ()), self.limit(70))
        yield Row(
            "hand-written, CUDA graphs",
            partial(self.hand, "whole", ("--cuda-graphs",)),
            self.limit(70),
        )
        for title, flags in (("eager", ("--no-cuda-graphs",)), ("CUDA graphs", ("--cuda-graphs",))):
            yield Row(f"gaps, {title}", partial(self.gaps, flags), self.limit(45))
        if not self.rows.tiny:
            title = f"hand-written, {COMPILED_LAYERS} layers"
            yield Row(
                f"{title}, compiled", partial(self.hand, "part", ("--compile",)), self.limit(90)
            )
            yield Row(f"{title}, eager", partial(self.hand, "part", ()), self.limit(50))
        size = "tiny" if self.rows.tiny else "whole"
        yield Row(
            "optimizers",
            lambda run: self.part(run, "optimizers", self.device, size),
            self.limit(30),
        )

    def hand(self, which: str, flags: tuple[str, ...], run: Runner) -> Figures:
        """Return the steps of the generated program and of the hand-written model, which are
        interleaved.
        """
        planned = self.rows.hand[which]
        sizes = [word for name, value in planned.settings for word in (f"--{name}", value)]
        rounds = 2 if self.rows.tiny else 10
        common = (
            "--device",
            self.device,
            "--precision",
            "bf16",
            "--batch",
            planned.samples,
            "--rounds",
            rounds,
        )
        script = ROOT / "benchmarks" / "one_device.py"
        found = run.last_object_forked(
            script, "--program", self.prepared.program(planned), *common, *sizes, *flags
        )
        rates = {name: found[name] for name in ("generated_tflops", "hand_written_tflops")}
        kept = ("generated_s", "hand_written_s", "ratio", "ratios")
        return {**{name: found[name] for name in kept}, **rates, **self.of_ceiling("bf16", **rates)}

    def gaps(self, flags: tuple[str, ...], run: Runner) -> Figures:
        """Return the step of many small kernels, and for how much of it the device is idle."""
        return self.part(run, "gaps", self.prepared.program(self.rows.gaps), self.device, *flags)

    # Four ranks

    def four_rows(self) -> Iterator[Row]:
        for index, (title, planned) in enumerate(self.rows.four.items()):
            yield Row(f"four ranks, {title}", partial(self.verify, planned), self.limit(120))
            if index == 0:
                yield Row("four ranks, resumed", partial(self.resume, planned), self.limit(120))
        yield Row("profile", self.profile, self.limit(90))

    def resume(self, planned: PlannedProgram, run: Runner) -> Figures:
        """Compare the losses of four steps with those of two and two from a checkpoint; count the
        trace's events.
        """
        launch = ("launch", self.prepared.program(planned), "--device", self.device)
        folder = self.scratch / "checkpoint"
        trace = self.scratch / "trace.json"
        whole = run.autopipe(*launch, "--steps", 4, "--trace", trace)["steps"]
        run.autopipe(*launch, "--steps", 2, "--checkpoint", folder)
        rest = run.autopipe(*launch, "--steps", 4, "--checkpoint", folder, "--resume")["steps"]
        equal = [each["loss"] for each in whole[2:]] == [each["loss"] for each in rest]
        return {"equal": equal, "trace_bytes": trace.stat().st_size}

    def profile(self, run: Runner) -> Figures:
        """Measure the costs of the smallest model, and of messages of four ranks, by `autopipe
        profile`.
        """
        costs = self.scratch / "costs.json"
        sizes = ("--micro-batch-sizes", 1, "--seconds", 0.1 if self.rows.tiny else 5)
        ranks = () if self.rows.tiny else ("--ranks", 4)
        model = self.prepared.folder / "models" / self.rows.launched.model
        run.autopipe("profile", model, "--device", self.device, *sizes, *ranks, "-o", costs)
        return {"bytes": costs.stat().st_size}

    # Conformance

    def conformance_rows(self) -> Iterator[Row]:
        yield Row("conformance", self.conformance, self.limit(200))

    def conformance(self, run: Runner) -> Figures:
        """Run the cases that ship with ONNX on the device; return pytest's summary and the
        failures.
        """
        chosen = (
            ("-k", "test_case and test_add")
            if self.rows.tiny
            else ("-k", "CUDA", "-m", "cuda", "-n", "8")
        )
        words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", *chosen, _CASES)
        command = replace(python(*words), checked=False)  # Failures are what is measured.
        lines = run.together(command)[0].strip().splitlines()
        if not lines:
            raise Failed("pytest printed nothing")
        return {
            "pytest": lines[-1],
            "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))][:60],
        }


_CASES = "tests/conformance/test_onnx_backend.py"
_TINY_S = 240.0
"""Minimum time limit of a row in the smallest sizes, seconds."""
