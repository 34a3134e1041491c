"""The reference of every YAML key in Markdown, from the declarations: `python -m autopipe.configs.reference`."""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from collections.abc import Iterator
from typing import Any

from autopipe.configs.cluster import ClusterDescription
from autopipe.configs.configuration import Configuration
from autopipe.configs.placement_file import PlacementDescription
from autopipe.configs.schema import field_docs
from autopipe.ir.codec import Dataclass, Key, Rest, describe, encode_as, is_union, keys, marked_field, unwrap

_INTRODUCTION = """\
# Configuration reference

A configuration is one YAML file, given by `--config FILE`; flags and `--set KEY=VALUE` override it. A key within
another is written with a dot: `--set optimizer.lr=0.1`. Sizes are written as `14GiB` or `512MB`, rates as `900GB/s` or
`15.7TFLOP/s`, times as `5us` or as a number of seconds. A number with an exponent needs a dot and a sign for YAML to
read it as a number: `1.0e+3`. Unknown keys, duplicate keys and values of another type are refused with `file:line`.

`autopipe config show` prints the effective configuration, `autopipe config check FILE` checks a file.
"""


def reference() -> str:
    parts = [
        _INTRODUCTION,
        "## A configuration file\n",
        table(Configuration),
        "## A cluster file\n\nGiven by `--cluster FILE` or `cluster.file`, or under `cluster.inline`.\n",
        table(ClusterDescription),
        "## A placement file\n\nBlocks given by hand, for `autopipe schedule FILE`.\n",
        table(PlacementDescription),
    ]
    return "\n".join(parts)


def table(schema: type[Dataclass]) -> str:
    """The table of the keys of `schema`; of a strategy's or a scheduler's class, the table of its options."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [_row(path, key, doc) for path, key, doc in _walk(schema, "", None)]
    return "\n".join(lines) + "\n"


def _walk(schema: type[Dataclass], prefix: str, instance: object) -> Iterator[tuple[str, Key, str]]:
    """Every key below `schema`; its default is what `instance`, the default of the key above, holds."""
    docs = field_docs(schema)
    for key in keys(schema):
        default = key.default if instance is None else getattr(instance, key.name)
        yield prefix + key.name, dataclasses.replace(key, default=default), docs.get(key.name, "")
        for inner, suffix in _inner(key.hint):
            if inner is not ClusterDescription:
                above = default if isinstance(default, inner) else None
                yield from _walk(inner, f"{prefix}{key.name}{suffix}.", above)
    if rest := marked_field(schema, Rest):
        yield f"{prefix}…", Key("…", str, dataclasses.MISSING), docs.get(rest[0], "")


def _inner(hint: Any) -> Iterator[tuple[type[Dataclass], str]]:
    """The dataclasses that a value of this type is made of, with what their keys' path has between."""
    base, _ = unwrap(hint)
    origin = typing.get_origin(base)
    if dataclasses.is_dataclass(base):
        yield typing.cast("type[Dataclass]", base), ""
    elif is_union(base):
        for member in typing.get_args(base):
            yield from _inner(member)
    elif origin is tuple:
        for inner, suffix in _inner(typing.get_args(base)[0]):
            yield inner, f"[]{suffix}"


def _row(path: str, key: Key, doc: str) -> str:
    flag = f" Flag: `{key.flag}`." if key.flag else ""
    kind = default = ""
    if key.name != "…":
        kind, default = (
            describe(key.hint),
            "needed" if key.required else f"`{json.dumps(encode_as(key.default, key.hint))}`",
        )
        if any(isinstance(key.default, inner) for inner, _ in _inner(key.hint)):
            default = ""
    cells = (f"`{path}`", kind, default, f"{doc}{flag}")
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(reference())
