"""The commands from Python: `autopipe.plan`, and what is done with a `Plan`.

Each runs the command of its name, on the same files, and raises what the command would print.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from autopipe.cli.options import flag_words, run_command
from autopipe.cli.plan_folder import check_plan_folder, check_target, open_plan, write_plan_folder
from autopipe.cli.request import request_of
from autopipe.configs.configuration import effective
from autopipe.configs.yaml_source import Dumper, read_file, read_text
from autopipe.ir.placement import Placement
from autopipe.ir.plan import Alternative, Breakdown, Summary
from autopipe.ir.schedule import Schedule
from autopipe.passes.auto.choose import choose
from autopipe.passes.auto.plan_cache import answers
from autopipe.passes.pipeline import PlanResult, make_plan

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
    """Write a module as an ONNX file whose batch axis, the first of every input, is symbolic, and
    return its path.

    `example` has the inputs: a tensor, several by position, or keyword arguments by name in a
    mapping. With `loss`, such as `torch.nn.functional.cross_entropy`, and an example of `labels`
    the graph ends in that loss. A module may also return its loss itself, as a model of
    `transformers` does with `labels` among its inputs.

    The module is exported as it trains, in the modes of its submodules, and stays unchanged.
    Parameters have the module's names; those whose `requires_grad` is False are not trained. Values
    behind `detach`, regions under `no_grad` and rows at `padding_idx` have no gradient.

    With `check`, loss and gradients of the file on the example and on a second one are compared
    with the module's. Raises VerificationError, naming parameters and the likely cause, if they
    differ, and ConfigurationError if torch cannot export the module. A file at `path` that is no
    ONNX model is replaced only with `force`.
    """
    from autopipe.cli.export import export_module

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
    """Plan an ONNX file for a cluster and write the plan's folder, MODEL.plan unless `output` names
    another.

    `cluster` is a preset, a file, or a mapping as under `cluster:` of a configuration. `settings`
    are the keys of a configuration, which lie over those of the YAML file `config`: `gpus=4`,
    `batch_size=16`, `strategy="pipedream"`, `optimizer={"name": "adamw", "lr": 1e-3}`. Raises a
    child of `AutopipeError`.

    `force` replaces files of the folder that were edited.
    """
    folder = Path(f"{model}.plan" if output is None else output)
    check_target(folder, force=force)
    for name in ("strategy", "schedule"):
        if isinstance(settings.get(name), str):
            settings[name] = {"name": settings[name]}
    if isinstance(cluster, str):
        settings["cluster"] = {"file" if "." in cluster or "/" in cluster else "preset": cluster}
    elif cluster is not None:
        settings["cluster"] = dict(cluster)
    given = read_text(yaml.dump(settings, Dumper=Dumper), "the arguments of plan()")
    configuration = effective([given] if config is None else [read_file(config), given])
    request = request_of(configuration, Path(model))
    planned = (
        choose(request, None, answers())
        if request.strategy is None
        else make_plan(request, advise=True)
    )
    write_plan_folder(folder, planned, configuration, force=force)
    return Plan(folder)


@dataclass(frozen=True)
class Plan:
    """A plan's folder, which `autopipe plan` writes."""

    folder: Path

    @staticmethod
    def load(folder: str | Path) -> Plan:
        """The plan in a folder. Raises ConfigurationError where there is none."""
        check_plan_folder(Path(folder))
        return Plan(Path(folder))

    @property
    def program(self) -> Path:
        """Where `codegen` writes the programs of its ranks."""
        return self.folder / "program"

    @cached_property
    def result(self) -> PlanResult:
        """Placement, schedule, timeline, and the problem that they answer."""
        return open_plan(self.folder)

    @property
    def placement(self) -> Placement:
        """The stages: the nodes of each, its devices, its micro-batch size, and how its nodes are
        split.
        """
        return self.result.plan.placement

    @property
    def schedule(self) -> Schedule:
        """The tasks of each device in order."""
        return self.result.plan.schedule

    @property
    def summary(self) -> Summary:
        """Predicted step, memory, bubble, and what is exchanged."""
        return self.result.plan.summary

    @property
    def breakdown(self) -> Breakdown | None:
        """Where the predicted step goes, above linear speed-up."""
        return self.result.plan.breakdown

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The candidates that the search weighed."""
        return self.result.plan.alternatives

    def explain(
        self, *, node: str | None = None, stage: int | None = None, device: int | None = None
    ) -> Mapping[str, object]:
        """Why the plan, or a node, a stage or a device of it, is as it is."""
        from autopipe.cli.explain import explain

        return run_command(explain, self.folder, *flag_words(node=node, stage=stage, device=device))

    def codegen(self) -> Path:
        """Write the program of every rank into `program`, and return that folder."""
        from autopipe.cli.codegen import codegen

        run_command(codegen, self.folder)
        return self.program

    def verify(self, **flags: object) -> Mapping[str, object]:
        """Check that the ranks compute what one device computes; `flags` are those of `autopipe
        verify`, such as `device="cpu"`. Raises VerificationError where they do not.
        """
        from autopipe.cli.verify import verify

        return run_command(verify, self._generated(), *flag_words(**flags))

    def launch(self, **flags: object) -> list[dict[str, Any]]:
        """Run the ranks and return a report of each step: its loss, its time, its peak memory.
        `flags` are those of `autopipe launch`, such as `steps=100`, `data="tokens.npz"`,
        `checkpoint="saved"`. Raises LaunchError.
        """
        from autopipe.cli.launch import launch

        found = run_command(launch, self._generated(), *flag_words(**flags))
        return cast("list[dict[str, Any]]", found["steps"])

    def _generated(self) -> Path:
        return self.program if (self.program / "manifest.json").is_file() else self.codegen()
