"""Plans and schedules of blocks that are drawn in tests."""

from __future__ import annotations

from autopipe.ir.block_schedule import Block, BlockGraph, BlockRepetend, BlockSchedule
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.plan import Plan, Summary
from autopipe.ir.schedule import MicroBatchSlice, StageGraph
from autopipe.ir.timeline import Message, Prediction, StagePrediction
from autopipe.passes.schedule.predict import make_ticks
from autopipe.passes.schedule.published.one_f_one_b import order_kfkb
from autopipe.passes.schedule.simulate import simulate

HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>&"\'.onnx'


def chain_plan(stages=4, micro_batches=6, model="/models/gpt.onnx", gradient_s=0.0, update_s=0.0):
    """A balanced chain, and its step, at whose end gradient sums and updates take these times."""
    groups = tuple((stage,) for stage in range(stages))
    edges = tuple((stage, stage + 1) for stage in range(stages - 1))
    sizes = {"parameter_bytes": 2**20, "static_bytes": 2**22, "kept_bytes": 2**21}
    predicted = (
        StagePrediction(1.0, 2.0, gradient_s=gradient_s, update_s=update_s, **sizes),
    ) * stages
    messages = tuple(Message(a, b, a, b, 2**10, 2**10, 0.0, 0.0) for a, b in edges)
    prediction = Prediction(predicted, messages)
    schedule = order_kfkb(
        StageGraph(stages, groups, edges), micro_batches, True, make_ticks(predicted)
    )
    timeline = simulate(schedule, groups, prediction)
    summary = Summary(
        "manual", "1f1b", stages, stages, micro_batches, 2, stages, timeline.end, 1.0, timeline.bubble_rate,
        timeline.peak_memory, (("read", 0.1),), 18.0, False, None, (("send", 12 * 2**10),),
    )  # fmt: skip
    placement = Placement(tuple(Stage((index,), group, 2) for index, group in enumerate(groups)))
    return Plan(
        model, "abc", "train", 2 * micro_batches, placement, schedule, summary, prediction
    ), timeline


def own_sizes_plan(sizes, micro_batches=6, model="/models/gpt.onnx"):
    """A chain whose stages take 1 s forward and 2 s backward for each sample of a micro-batch of
    their own.
    """
    groups = tuple((stage,) for stage in range(len(sizes)))
    most = max(sizes)
    turns = tuple(most // size for size in sizes)
    edges = tuple((a, a + 1) for a in range(len(sizes) - 1))
    graph = StageGraph(len(sizes), groups, edges, ratios=turns)
    predicted = tuple(StagePrediction(1.0 * size, 2.0 * size, kept_bytes=size) for size in sizes)
    messages = tuple(
        Message(
            a,
            b,
            a,
            b,
            2**10,
            2**10,
            0.0,
            0.0,
            MicroBatchSlice(own, turns[a]),
            MicroBatchSlice(other, turns[b]),
        )
        for a, b in edges
        for own in range(turns[a])
        for other in graph.micro_batches_sharing_samples(a, own, b)
    )
    prediction = Prediction(predicted, messages)
    schedule = order_kfkb(graph, micro_batches, True, make_ticks(predicted))
    timeline = simulate(schedule, groups, prediction)
    summary = Summary(
        "manual", "kfkb", len(sizes), len(sizes), micro_batches, most, len(sizes), timeline.end, 1.0,
        timeline.bubble_rate, timeline.peak_memory, (("read", 0.1),), 18.0, False, None, (("send", 12 * 2**10),),
    )  # fmt: skip
    placement = Placement(
        tuple(Stage((index,), (index,), size) for index, size in enumerate(sizes))
    )
    return Plan(
        model, "abc", "train", most * micro_batches, placement, schedule, summary, prediction
    ), timeline


def split_embedding(units=8, memory=4, first_name="TPf0"):
    """Two stages between a forward and a backward that both devices run together; every period of 6
    is full.
    """
    both = (0, 1)
    blocks = (
        Block(first_name, both, 1),
        Block("F0", (0,), 1, 1, (0,)),
        Block("F1", (1,), 1, 1, (1,)),
        Block("B1", (1,), 3, -1, (2,)),
        Block("B0", (0,), 3, -1, (3,)),
        Block("TPb0", both, 1, 0, (4,)),
    )
    first = (0, 1, 7, 8, 14, 17)
    starts = tuple(tuple(start + 6 * unit for start in first) for unit in range(units))
    repetend = BlockRepetend(
        tuple(start % 6 for start in first), tuple(2 - start // 6 for start in first)
    )
    return BlockSchedule(BlockGraph(2, blocks, (memory, memory)), starts, 6, 6, True, repetend)
