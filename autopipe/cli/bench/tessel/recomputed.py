"""Recomputation where transformer layers are, as in the paper."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.placement import Placement, Stage

_TABLE_NODES = 100
"""A table or a head with its loss has fewer nodes than so many, the layers of a stage have more."""


def with_layers_recomputed(placement: Placement) -> Placement:
    """The placement with recomputation in all stages but the tables' and heads' own."""
    return replace(placement, stages=tuple(replace(stage, recompute=_has_layers(stage)) for stage in placement.stages))


def _has_layers(stage: Stage) -> bool:
    return len(stage.devices) == 1 or len(stage.nodes) > _TABLE_NODES
