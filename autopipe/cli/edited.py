"""A plan made again from its folder: what is kept of it, and what the change costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from autopipe.cli.figures import bytes_text, seconds_text
from autopipe.cli.plan_folder import check_editable
from autopipe.configs.configuration import Configuration
from autopipe.configs.load import load_configuration
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.plan import Plan, Summary
from autopipe.ir.serial.plan_file import plan_digest, read_plan, summary_form
from autopipe.passes.pipeline import Planned
from autopipe.passes.placement.given.strategy import Given
from autopipe.passes.request import Request

_DECIDED = {
    "recompute": "placement.yaml says of each stage whether it recomputes",
    "constraints": "the stages of placement.yaml are taken as they are",
}
"""Keys that strategies read, and what decides instead where a placement is given."""
_SAME = 5e-4
"""Relative changes below this are none to a reader."""


@dataclass(frozen=True, slots=True)
class Former:
    """The folder that a plan is made again from, and the plan that it held."""

    folder: Path
    plan: Plan

    @staticmethod
    def read(folder: Path) -> Former:
        """The plan of `folder`. Raises ConfigurationError for a folder that holds none."""
        return Former(folder, read_plan(folder))

    def check_kept(self, configuration: Configuration, request: Request) -> None:
        """Raise ConfigurationError for a setting that a placement which is kept cannot bear, or has no use for."""
        strategy, summary = request.strategy, self.plan.summary
        if not isinstance(strategy, Given):
            raise self._refused(f"strategy {configuration.strategy.name} would make another placement")
        if request.mode is not None and request.mode.value != self.plan.mode:
            raise self._refused(f"the placement is to {self.plan.mode}, not to {request.mode.value}")
        devices = request.cluster.size
        if devices not in (summary.devices, strategy.devices):
            raise self._refused(f"the placement is for {summary.devices} devices, not for {devices}")
        size = _micro_batch_size(request)
        if size != summary.micro_batch_size:
            wanted = "a number of samples to be chosen" if size is None else f"{size} samples"
            raise self._refused(f"the placement is for micro-batches of {summary.micro_batch_size}, not of {wanted}")
        own = load_configuration(*check_editable(self.folder)[:1])
        for key, instead in _DECIDED.items():
            if getattr(configuration, key) != getattr(own, key):
                raise ConfigurationError(f"--from keeps the placement: {key} would change nothing", instead, key)

    def _refused(self, why: str) -> ConfigurationError:
        return ConfigurationError(f"--from keeps the placement: {why}", "plan without --from", str(self.folder))


@dataclass(frozen=True, slots=True)
class Price:
    """What a plan takes against the one that it was made from."""

    former: Former
    now: Summary
    same: bool
    """Whether the decisions and what they are predicted to take are the same."""

    @staticmethod
    def of(former: Former, planned: Planned) -> Price:
        """The price of `planned`."""
        return Price(former, planned.plan.summary, plan_digest(former.plan) == planned.digest)

    def lines(self) -> Iterator[RenderableType]:
        """The figures before and after, and whether that is worse."""
        if self.same:
            yield f"the same plan as {self.former.folder} held"
            return
        before, now = self.former.plan.summary, self.now
        table = Table("", "before", "now", "change", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        times, peaks = (
            (before.step_time_s, now.step_time_s),
            (max(before.peak_memory_bytes), max(now.peak_memory_bytes)),
        )
        rates = before.samples_per_s, now.samples_per_s
        table.add_row("step", *map(seconds_text, times), _share(*times))
        table.add_row("samples/s", *(f"{rate:,.1f}" for rate in rates), _share(*rates))
        bubbles = before.bubble_rate, now.bubble_rate
        table.add_row("bubble", *(f"{rate:.1%}" for rate in bubbles), f"{100 * (bubbles[1] - bubbles[0]):+.1f} points")
        table.add_row("peak memory", *map(bytes_text, peaks), _share(*peaks))
        yield table
        yield f"{_verdict(*times)} than what {self.former.folder} held"

    def form(self) -> dict[str, object]:
        """The same for a program."""
        before = summary_form(self.former.plan.summary)
        return {"plan": self.former.folder, "same": self.same, "worse": self.worse, "before": before}

    @property
    def worse(self) -> bool:
        """Whether a step takes longer."""
        return self.now.step_time_s > self.former.plan.summary.step_time_s


def _share(before: float, now: float) -> str:
    return f"{now / before - 1:+.1%}" if before else "-"


def _verdict(before: float, now: float) -> str:
    ratio = now / before if before else 1.0
    if abs(ratio - 1) < _SAME:
        return "a step takes no more and no less"
    return f"worse: a step takes {ratio - 1:.1%} longer" if ratio > 1 else f"better: a step takes {1 - ratio:.1%} less"


def _micro_batch_size(request: Request) -> int | None:
    """The samples of a micro-batch that a request asks for; None where it leaves them open."""
    if request.micro_batch_size is not None:
        return request.micro_batch_size
    if request.batch_size is None or request.micro_batches is None:
        return None
    return request.batch_size // request.micro_batches
