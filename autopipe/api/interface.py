"""The Python interface: `autopipe.export`, `autopipe.plan`, and the class `Plan` that `plan`
returns.

Each function calls the function of the application that the command of its name calls, with equal
files and equal errors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from autopipe.api import codegen, planning
from autopipe.api.plan_folder import check_plan_folder, open_plan
from autopipe.configs.configuration import merged_configuration
from autopipe.configs.yaml_source import Dumper, read_file, read_text
from autopipe.ir.placement import Placement
from autopipe.ir.plan import Alternative, Breakdown, Summary
from autopipe.ir.schedule import Schedule
from autopipe.passes.pipeline import PlanResult

if TYPE_CHECKING:
    import torch

    from autopipe.backends.torch.exporter import Example

__all__ = ["Plan", "export", "plan"]


def export(
    module: torch.nn.Module,
    example: Example,
    path: str | Path = "model.onnx",
    *,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
    labels: torch.Tensor | None = None,
    check: bool = True,
    force: bool = False,
) -> Path:
    """Write a module as an ONNX file and return the path of the file.

    `example` has the inputs: a tensor, several tensors by position, or keyword arguments by name in
    a mapping. Axis 0 of every input is the batch axis, which is symbolic in the file. With `loss`,
    such as `torch.nn.functional.cross_entropy`, and an example of `labels`, the graph ends with the
    loss. A module may also return its loss itself, as a model of `transformers` does if `labels`
    are among its inputs.

    The module is exported with its submodules in their modes (training or evaluation) and stays
    unchanged. Parameters have the names of the module. Parameters whose `requires_grad` is False
    are not trained. Values behind `detach`, regions under `no_grad` and rows at `padding_idx` have
    no gradient.

    With `check`, the loss and the gradients of the file are compared with those of the module, for
    the example and for a second example. Raises VerificationError, with the parameters and the
    likely cause, if they differ, and ConfigurationError if torch cannot export the module. `force`
    replaces a file at `path` that is not an ONNX model.
    """
    from autopipe.api.exporting import export_module

    found = export_module(module, example, loss, labels, path=Path(path), check=check, force=force)
    for note in found.notes:
        warnings.warn(note, stacklevel=2)
    return found.path


def plan(
    model: str | Path,
    cluster: str | Mapping[str, object] | None = None,
    *,
    output: str | Path | None = None,
    config: str | Path | None = None,
    force: bool = False,
    **settings: Any,
) -> Plan:
    """Plan an ONNX file for a cluster and write the plan folder, `MODEL.plan` unless `output` is
    given.

    `cluster` is the name of a preset, a file, or a mapping as under `cluster:` of a configuration.
    `settings` are keys of a configuration, and override the YAML file `config`: `gpus=4`,
    `batch_size=16`, `strategy="pipedream"`, `optimizer={"name": "adamw", "lr": 1e-3}`. `force`
    replaces files of the plan folder that were edited. Raises a child of `AutopipeError`.
    """
    for name in ("strategy", "schedule"):
        if isinstance(settings.get(name), str):
            settings[name] = {"name": settings[name]}
    if isinstance(cluster, str):
        settings["cluster"] = {"file" if "." in cluster or "/" in cluster else "preset": cluster}
    elif cluster is not None:
        settings["cluster"] = dict(cluster)
    given = read_text(yaml.dump(settings, Dumper=Dumper), "the arguments of plan()")
    configuration = merged_configuration([given] if config is None else [read_file(config), given])
    folder = None if output is None else Path(output)
    return Plan(planning.plan(configuration, Path(model), folder, force=force).folder)


@dataclass(frozen=True)
class Plan:
    """A plan folder, as `autopipe plan` writes it."""

    folder: Path

    @staticmethod
    def load(folder: str | Path) -> Plan:
        """Return the plan in a folder. Raises ConfigurationError if the folder holds no plan."""
        check_plan_folder(Path(folder))
        return Plan(Path(folder))

    @property
    def program(self) -> Path:
        """The folder to which `codegen` writes the programs of the ranks."""
        return self.folder / "program"

    @cached_property
    def result(self) -> PlanResult:
        """The plan with the problem that it solves and the simulated timeline of a step."""
        return open_plan(self.folder)

    @property
    def placement(self) -> Placement:
        """The stages: the nodes, devices and micro-batch size of each, and the splits of its
        nodes.
        """
        return self.result.plan.placement

    @property
    def schedule(self) -> Schedule:
        """The order of the tasks of each device."""
        return self.result.plan.schedule

    @property
    def summary(self) -> Summary:
        """Predicted step time, memory, bubble and communication volume."""
        return self.result.plan.summary

    @property
    def breakdown(self) -> Breakdown | None:
        """The parts of the predicted step time beyond linear speed-up, None if unknown."""
        return self.result.plan.breakdown

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The candidates that the search compared, () if the strategy was named."""
        return self.result.plan.alternatives

    def explain(
        self, *, node: str | None = None, stage: int | None = None, device: int | None = None
    ) -> Mapping[str, object]:
        """Return the reasons of the plan, or of one node, stage or device, as `explain --json`."""
        from autopipe.api.explanation import explain

        found = explain(self.folder, node=node, stage=stage, device=device)
        return {"plan": self.folder, **found.data}

    def codegen(self) -> Path:
        """Write the program of every rank to the folder `program`, and return this folder."""
        return codegen.codegen(self.folder).folder

    def verify(self, **flags: Any) -> Mapping[str, object]:
        """Check that the ranks compute the results of one device, and return the comparisons.

        `flags` are the flags of `autopipe verify` with underscores, such as `device="cpu"`. Raises
        VerificationError if a result differs.
        """
        from autopipe.api.static_verification import verify_statically
        from autopipe.api.verification import verify

        program = self._generated()
        if flags.get("model") is not None:
            flags["model"] = Path(flags["model"])
        if flags.pop("static", False):
            return verify_statically(program, **flags).data
        result = verify(program, **flags)
        if result.error is not None:
            raise result.error
        return result.data

    def launch(self, **flags: object) -> list[dict[str, Any]]:
        """Run the ranks and return a report of each step: its loss, its time, its peak memory.
        `flags` are those of `autopipe launch`, such as `steps=100`, `data="tokens.npz"`,
        `checkpoint="saved"`. With `dry_run=True`, run one step of one rank and return its report
        only. Raises ConfigurationError or LaunchError.
        """
        from autopipe.api.dry_run import rehearse
        from autopipe.api.launch_settings import launch_settings
        from autopipe.api.launching import open_launch

        settings = launch_settings(flags)
        launch = open_launch(self._generated(), settings)
        return [rehearse(launch.manifest, settings)] if settings.dry_run else launch.start().steps

    def _generated(self) -> Path:
        return self.program if (self.program / "manifest.json").is_file() else self.codegen()
