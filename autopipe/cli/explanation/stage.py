"""Why a stage is as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType

from autopipe.cli.explanation.prices import price_forms, price_table
from autopipe.cli.figures import bytes_text, group_text, seconds_text
from autopipe.passes.explain import EditPrice
from autopipe.passes.pipeline import PlanResult
from autopipe.passes.schedule.breakdown import StageParts


@dataclass(frozen=True, slots=True)
class StageExplanation:
    """The explanation of a stage."""

    planned: PlanResult
    stage: int
    parts: StageParts
    busy_s: float
    """Seconds of a step in which its devices do something."""
    prices: Sequence[EditPrice]

    def screen(self) -> Iterator[RenderableType]:
        """Lines for the terminal."""
        plan = self.planned.plan
        stage, predicted = plan.placement.stages[self.stage], plan.prediction.stages[self.stage]
        nodes = self.planned.problem.graph.nodes
        yield (
            f"stage {self.stage} of {len(plan.placement.stages)}: devices {group_text(stage.devices)},"
            f" {len(stage.nodes)} nodes from {nodes[stage.nodes[0]].name!r} to {nodes[stage.nodes[-1]].name!r},"
            f" micro-batches of {stage.micro_batch_size}"
        )
        yield (
            f"takes {seconds_text(predicted.forward_s)} forward and {seconds_text(predicted.backward_s)} backward for a"
            f" micro-batch; {bytes_text(predicted.parameter_bytes)} of parameters"
        )
        told = self._told()
        if told:
            yield f"of that: {', '.join(told)}"
        for source, target, size, seconds in self._messages():
            other = f"from stage {source}" if target == self.stage else f"to stage {target}"
            way = f"{seconds_text(seconds)} each way for a micro-batch" if seconds else "on the same devices"
            yield f"values {other}: {bytes_text(size)}, {way}"
        share = self.busy_s / plan.summary.step_time_s if plan.summary.step_time_s else 0.0
        yield f"its devices are busy {share:.1%} of the step of {seconds_text(plan.summary.step_time_s)}"
        yield price_table(self.prices, plan.summary.step_time_s)

    def data(self) -> dict[str, object]:
        """The same for a program."""
        plan = self.planned.plan
        stage, step_s = plan.placement.stages[self.stage], plan.summary.step_time_s
        return {
            "stage": self.stage,
            "devices": stage.devices,
            "nodes": stage.nodes,
            "micro_batch_size": stage.micro_batch_size,
            "recompute": stage.recompute,
            "predicted": plan.prediction.stages[self.stage],
            "parts": self.parts,
            "busy_s": self.busy_s,
            "step_time_s": step_s,
            "others": price_forms(self.prices, step_s),
        }

    def _told(self) -> list[str]:
        parts = {
            "collectives": self.parts.forward.exchange_s + self.parts.backward.exchange_s,
            "running forward again": self.parts.backward.recomputation_s,
            "what several devices compute": self.parts.forward.repetition_s + self.parts.backward.repetition_s,
        }
        return [f"{name} {seconds_text(seconds)}" for name, seconds in parts.items() if seconds]

    def _messages(self) -> list[tuple[int, int, int, float]]:
        """(source, target, bytes, the longest message's seconds) for each neighbour."""
        found: dict[tuple[int, int], tuple[int, float]] = {}
        for each in self.planned.plan.prediction.messages:
            if self.stage in (each.source_stage, each.target_stage):
                size, seconds = found.get((each.source_stage, each.target_stage), (0, 0.0))
                both = size + each.forward_bytes, max(seconds, each.forward_s)
                found[each.source_stage, each.target_stage] = both
        return [(*ends, *figures) for ends, figures in sorted(found.items())]
