"""A placement as JSON: nodes as ranges, nodes that are split alike together."""

from __future__ import annotations

import dataclasses
from itertools import chain

from autopipe.ir.placement import Placement, Split, SplitProof, Stage, node_ranges
from autopipe.ir.serial.record import JsonRecord


def placement_form(placement: Placement) -> dict[str, object]:
    """The placement as lists, dicts and scalars. Ranges of node indices are half open."""
    notes = {"notes": list(placement.notes)} if placement.notes else {}
    return {"stages": [_stage_form(stage) for stage in placement.stages], **notes}


def placement_of(record: JsonRecord) -> Placement:
    """The placement that `placement_form` gave. Raises ConfigurationError."""
    stages = record.at("stages")
    found = tuple(_stage_of(each) for each in stages.items())
    if not found:
        stages.refuse("at least one stage")
    notes = tuple(each.text() for each in record.at("notes").items()) if record.has("notes") else ()
    return Placement(found, notes=notes)


def split_proof_form(proof: SplitProof | None) -> dict[str, object] | None:
    """Proof of splits, by the names of its fields."""
    return None if proof is None else dataclasses.asdict(proof)


def split_proof_of(record: JsonRecord) -> SplitProof | None:
    """Inverse of `split_proof_form`. Raises ConfigurationError."""
    if record.value is None:
        return None
    return SplitProof(
        cost=record.at("cost").number(),
        lower_bound=record.at("lower_bound").number(),
        optimal=record.at("optimal").boolean(),
        unit=record.at("unit").text(),
    )


def _stage_form(stage: Stage) -> dict[str, object]:
    alike: dict[tuple[Split, ...], list[int]] = {}
    for node, splits in stage.splits:
        alike.setdefault(splits, []).append(node)
    return {
        "devices": list(stage.devices),
        "micro_batch_size": stage.micro_batch_size,
        "recompute": stage.recompute,
        "pipeline": stage.pipeline,
        "nodes": _ranges_form(stage.nodes),
        "splits": [
            {"split": [[split.axis, split.degree] for split in splits], "nodes": _ranges_form(sorted(nodes))}
            for splits, nodes in alike.items()
        ],
    }


def _stage_of(record: JsonRecord) -> Stage:
    splits: dict[int, tuple[Split, ...]] = {}
    for each in record.at("splits").items():
        split = tuple(_split_of(pair) for pair in each.at("split").items())
        splits.update(dict.fromkeys(_nodes_of(each.at("nodes")), split))
    devices = record.at("devices")
    if not devices.integers():
        devices.refuse("at least one device")
    return Stage(
        nodes=_nodes_of(record.at("nodes")),
        devices=devices.integers(),
        micro_batch_size=record.at("micro_batch_size").integer(1),
        splits=tuple(sorted(splits.items())),
        recompute=record.at("recompute").boolean(),
        pipeline=record.at("pipeline").integer(),
    )


def _split_of(record: JsonRecord) -> Split:
    pair = tuple(record.items())
    if len(pair) != 2:
        record.refuse("an axis and a degree")
    return Split(pair[0].text(), pair[1].integer(1))


def _ranges_form(nodes: tuple[int, ...] | list[int]) -> list[list[int]]:
    return [list(each) for each in node_ranges(nodes)]


def _nodes_of(record: JsonRecord) -> tuple[int, ...]:
    return tuple(chain.from_iterable(_range_of(each) for each in record.items()))


_MOST_NODES = 10_000_000


def _range_of(record: JsonRecord) -> range:
    ends = record.integers()
    if len(ends) != 2 or not ends[0] < ends[1] <= _MOST_NODES:
        record.refuse("a range of nodes: first, one after the last")
    return range(*ends)
