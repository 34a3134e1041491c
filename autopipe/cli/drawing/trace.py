"""The predicted step as Chrome's trace events, which Perfetto opens too."""

from __future__ import annotations

import json

from autopipe.ir.timeline import Timeline

PREDICTED = 0
"""The process of the prediction in the trace; its threads are the ranks."""


def chrome_trace(timeline: Timeline) -> str:
    """JSON: a thread a rank with its tasks, one with what it sends, and its memory as a counter. Times in µs."""
    events: list[dict[str, object]] = [_named("process_name", 0, "predicted")]
    for device in range(len(timeline.memory)):
        events += [_named("thread_name", 2 * device, f"rank {device}"), _named("thread_name", 2 * device + 1, "sends")]
    for span in timeline.spans:
        events.append(
            {
                "ph": "X",
                "pid": PREDICTED,
                "tid": 2 * span.device,
                "name": str(span.task),
                "cat": span.task.phase.name.lower(),
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {"stage": span.task.stage, "micro_batch": span.task.micro_batch},
            }
        )
    for transfer in timeline.transfers:
        events.append(
            {
                "ph": "X",
                "pid": PREDICTED,
                "tid": 2 * transfer.source + 1,
                "name": f"{transfer.task} to {transfer.target}",
                "cat": "send",
                "ts": transfer.start * 1e6,
                "dur": (transfer.end - transfer.start) * 1e6,
                "args": {"bytes": transfer.bytes, "to": transfer.target},
            }
        )
    for device, curve in enumerate(timeline.memory):
        for time, used in curve:
            name = f"memory of rank {device}"
            events.append({"ph": "C", "pid": PREDICTED, "name": name, "ts": time * 1e6, "args": {"bytes": used}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


def _named(kind: str, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "pid": PREDICTED, "tid": thread, "name": kind, "args": {"name": name}}
