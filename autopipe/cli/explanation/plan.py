"""Why a plan was chosen, what was next, and what would help most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from autopipe.cli.explanation.commands import alternative_command
from autopipe.cli.explanation.distance import distance_lines
from autopipe.cli.explanation.weighed import over_text, strategy_text, weighed_screen
from autopipe.cli.figures import seconds_text
from autopipe.cli.plan_screen import prediction_line, schedule_line
from autopipe.ir.plan import Alternative
from autopipe.ir.plan_file import alternatives_form, summary_form
from autopipe.passes.explain import WhatIfResult
from autopipe.passes.pipeline import PlanResult


@dataclass(frozen=True, slots=True)
class PlanExplanation:
    """The explanation of a whole plan."""

    folder: Path
    planned: PlanResult
    helps: Sequence[WhatIfResult]

    def screen(self) -> Iterator[RenderableType]:
        """Lines for the terminal."""
        plan, summary = self.planned.plan, self.planned.plan.summary
        yield f"{plan.model}: {summary.strategy} with {summary.schedule}, {plan.mode}, {summary.devices} devices"
        yield prediction_line(summary)
        yield schedule_line(plan)
        if plan.breakdown is not None:
            yield from distance_lines(plan.breakdown, summary.devices, len(set(plan.device_names)))
        yield from weighed_screen(plan.alternatives, summary.step_time_s)
        following = next_best(plan.alternatives)
        if following is None:
            yield "no other plan was weighed" + ("" if plan.alternatives else ": the strategy was named")
        else:
            assert following.step_time_s is not None
            over = over_text(following.step_time_s, summary.step_time_s)
            what = f"{strategy_text(following)} with {following.choice.schedule}"
            yield f"next best: {what}, {seconds_text(following.step_time_s)} ({over}):"
            yield f"  {alternative_command(self.folder, self.planned, following)}"
        yield from self._helps()
        yield f"more: autopipe explain {self.folder} --node NAME, --stage K or --device D"

    def data(self) -> dict[str, object]:
        """The same for a program."""
        plan = self.planned.plan
        following = next_best(plan.alternatives)
        forms = alternatives_form(plan.alternatives)
        commands = [alternative_command(self.folder, self.planned, each) for each in plan.alternatives]
        told = [{**form, "command": command} for form, command in zip(forms, commands, strict=True)]
        return {
            "plan": self.folder,
            "summary": summary_form(plan.summary),
            "breakdown": plan.breakdown,
            "alternatives": told,
            "next_best": None if following is None else told[plan.alternatives.index(following)],
            "helps": self.helps,
        }

    def _helps(self) -> Iterator[RenderableType]:
        """Changes that would help, the most helpful first."""
        now = self.planned.plan.summary.samples_per_s
        again = any(each.planned_again for each in self.helps)
        how = "planned again, by the same strategy and schedule" if again else "the same placement, ordered anew"
        table = Table(f"what would help ({how})", "samples/s", "faster", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify, column.no_wrap = "right", True
        for each in sorted(self.helps, key=lambda one: -(one.samples_per_s or 0.0)):
            if each.samples_per_s is None:
                table.add_row(f"{each.what}: {each.refused}")
            else:
                table.add_row(each.what, f"{each.samples_per_s:,.1f}", f"{each.samples_per_s / now - 1:+.1%}")
        yield table


def next_best(alternatives: Sequence[Alternative]) -> Alternative | None:
    """The alternative with the shortest step after the chosen one, which is the first of the shortest."""
    stepped = sorted((each for each in alternatives if each.same_as is None), key=lambda each: each.rank)
    return stepped[1] if len(stepped) > 1 and stepped[1].step_time_s is not None else None
