"""The placement of a plan as YAML that a person can edit: a configuration whose strategy gives it."""

from __future__ import annotations

from typing import Any, cast

import yaml

from autopipe.configs.configuration import dump
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.passes.placement.given import Given, written

_HEAD = """\
# What this plan computes where. Change it (move a line from stage to stage, say), and plan again from this folder:
#   autopipe plan --from DIR
# Nodes are names, globs or [first, last]; `samples` is the axis that counts samples, whatever an operator calls it.
"""
_FLOWING = ("devices", "split")
"""Keys whose values stand on one line."""


def placement_text(graph: Graph, placement: Placement) -> str:
    """The placement as a YAML file that, loaded as a configuration, gives exactly this placement of `graph`."""
    forms = cast("list[dict[str, Any]]", dump(written(graph, placement))["placement"])
    stages = [_stage(form, placement.pipelines) for form in forms]
    document = {"strategy": {"name": Given.name, "placement": stages}}
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=False)
    return _HEAD + text


def _stage(form: dict[str, Any], pipelines: int) -> dict[str, Any]:
    """A stage with `nodes` where a person looks for them: behind what is said of all of them."""
    first = ("devices", "micro_batch_size", "recompute", *(("pipeline",) if pipelines > 1 else ()))
    return {key: _flow(key, form[key]) for key in (*first, "nodes")} | {
        "splits": [{key: _flow(key, each[key]) for key in ("split", "nodes")} for each in form["splits"]]
    }


def _flow(key: str, value: Any) -> Any:
    if key in _FLOWING:
        return _Pairs(value) if isinstance(value, dict) else _Line(value)
    return [_Line(entry) if isinstance(entry, list) else entry for entry in value] if key == "nodes" else value


class _Line(list[Any]):
    """A list on one line."""


class _Pairs(dict[str, Any]):
    """A mapping on one line."""


class _Dumper(yaml.SafeDumper):
    """Writes block style but for `_Line` and `_Pairs`."""

    def ignore_aliases(self, data: Any) -> bool:
        """Nothing is referred to: what stands twice is written twice."""
        return True


_Dumper.add_representer(_Line, lambda to, value: to.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True))
_Dumper.add_representer(_Pairs, lambda to, value: to.represent_mapping("tag:yaml.org,2002:map", value, flow_style=True))
