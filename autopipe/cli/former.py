"""The plan that another one is made from, and what the new one has to keep of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopipe.cli.plan_folder import check_editable
from autopipe.configs.configuration import Configuration
from autopipe.configs.load import load_configuration
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.plan import Plan
from autopipe.ir.plan_file import read_plan
from autopipe.passes.pipeline import Request
from autopipe.passes.placement.given import Given

_DECIDED = {
    "recompute": "placement.yaml says of each stage whether it recomputes",
    "constraints": "the stages of placement.yaml are taken as they are",
}
"""Keys that strategies read, and what decides instead where a placement is given."""


@dataclass(frozen=True, slots=True)
class BasePlan:
    """The folder that a plan is made again from, and the plan that it held."""

    folder: Path
    plan: Plan

    @staticmethod
    def read(folder: Path) -> BasePlan:
        """The plan of `folder`. Raises ConfigurationError for a folder that holds none."""
        return BasePlan(folder, read_plan(folder))

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
        own = load_configuration(check_editable(self.folder)[0])
        for key, instead in _DECIDED.items():
            if getattr(configuration, key) != getattr(own, key):
                raise ConfigurationError(f"--from keeps the placement: {key} would change nothing", instead, key)

    def _refused(self, why: str) -> ConfigurationError:
        return ConfigurationError(f"--from keeps the placement: {why}", "plan without --from", str(self.folder))


def _micro_batch_size(request: Request) -> int | None:
    """The samples of a micro-batch that a request asks for; None where it leaves them open."""
    if request.micro_batch_size is not None:
        return request.micro_batch_size
    if request.batch_size is None or request.micro_batches is None:
        return None
    return request.batch_size // request.micro_batches
