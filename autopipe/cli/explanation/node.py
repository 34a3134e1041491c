"""Why a node is where and split as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rich.console import RenderableType
from rich.table import Table

from autopipe.cli.explanation.prices import price_forms, price_table
from autopipe.cli.figures import bytes_text, group_text, seconds_text
from autopipe.cli.output import printable
from autopipe.ir.plan import Plan
from autopipe.passes.explain import Edge, EditPrice, NodeReport

_MOST_EDGES = 12


@dataclass(frozen=True, slots=True)
class NodeExplanation:
    """The explanation of a node's place."""

    plan: Plan
    report: NodeReport
    prices: Sequence[EditPrice]

    def screen(self) -> Iterator[RenderableType]:
        """Lines for the terminal."""
        report, summary = self.report, self.plan.summary
        split = ", ".join(map(str, report.splits)) or ("not split" if len(report.devices) > 1 else "whole")
        each = "" if report.share == 1 else f": each computes {Fraction(report.share).limit_denominator(1 << 20)} of it"
        yield (
            f"node {report.node} {report.name!r}, {report.op}: stage {report.stage}, devices"
            f" {group_text(report.devices)}, {split}{each}"
        )
        taken, whole = report.forward_s + report.backward_s, self._stage_s()
        share = f", {taken / whole:.1%} of the stage" if whole else ""
        yield (
            f"takes {seconds_text(report.forward_s)} forward and {seconds_text(report.backward_s)} backward for a"
            f" micro-batch{share}"
        )
        if report.recomputed:
            yield "each stage that reads its values computes it for itself: that costs less than sending them"
        yield self._edges()
        if self.prices:
            yield price_table(self.prices, summary.step_time_s)
            yield f"the step takes {seconds_text(summary.step_time_s)} now; {summary.schedule} orders the others, too"
        else:
            yield "nothing else can be done with it in this plan"

    def data(self) -> dict[str, object]:
        """The same for a program."""
        step_s = self.plan.summary.step_time_s
        splits = {split.axis: split.degree for split in self.report.splits}
        return {"node": self.report, "split": splits, "step_time_s": step_s, "others": price_forms(self.prices, step_s)}

    def _stage_s(self) -> float:
        predicted = self.plan.prediction.stages[self.report.stage]
        return predicted.forward_s + predicted.backward_s

    def _edges(self) -> Table:
        table = Table("value", "bytes", "other end", "what moves", box=None, pad_edge=False)
        table.columns[1].justify = "right"
        for edge in self.report.edges[:_MOST_EDGES]:
            value = f"{'reads' if edge.reads else 'gives'} {printable(edge.value)}"
            table.add_row(value, bytes_text(edge.bytes), self._other(edge), self._moved(edge))
        if len(self.report.edges) > _MOST_EDGES:
            table.add_row(f"... and {len(self.report.edges) - _MOST_EDGES} more")
        return table

    def _other(self, edge: Edge) -> str:
        if edge.stage is None:
            return printable(edge.node) or "the model's own"
        node = printable(edge.node)
        return node if edge.stage == self.report.stage else f"{node} (stage {edge.stage})"

    def _moved(self, edge: Edge) -> str:
        moved = [f"{' and '.join(edge.exchanges).replace('_', '-')}, {seconds_text(edge.exchange_s)}"]
        found = moved if edge.exchanges else []
        if edge.stage not in (None, self.report.stage):
            found.append("a message between the stages")
        return "; ".join(found) or "nothing"
