"""The clusters and example configurations that ship with autopipe, found by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autopipe.configs.cluster_file import ClusterDescription, GroupDescription
from autopipe.configs.convert import convert, nearest
from autopipe.configs.source import read_file
from autopipe.ir.errors import ConfigurationError

_HERE = Path(__file__).parent


def cluster_names() -> tuple[str, ...]:
    """The presets of clusters, in alphabetical order."""
    return tuple(sorted(path.stem for path in (_HERE / "clusters").glob("*.yaml")))


def recipe_paths() -> tuple[Path, ...]:
    """The example configurations, in alphabetical order."""
    return tuple(sorted((_HERE / "recipes").glob("*.yaml")))


def cluster_preset(name: str, where: str = "") -> ClusterDescription:
    """The preset `name`; raises ConfigurationError, at `where`, with the nearest name where there is none."""
    if name not in cluster_names():
        raise ConfigurationError(
            f"no cluster preset is named {name!r}", hint=nearest(name, cluster_names()), where=where
        )
    return read_cluster(_HERE / "clusters" / f"{name}.yaml")


def read_cluster(path: str | Path) -> ClusterDescription:
    """A cluster's description from a YAML file; raises ConfigurationError with `file:line`."""
    return with_presets(convert(read_file(path), ClusterDescription), str(path))


def with_presets(description: ClusterDescription, where: str) -> ClusterDescription:
    """The description with the devices of presets in place of their names, and their links for groups without any.

    Raises ConfigurationError, at `where`, for a name that no preset of one kind of device has.
    """
    return replace(description, groups=tuple(_with_preset(group, where) for group in description.groups))


def _with_preset(group: GroupDescription, where: str) -> GroupDescription:
    if not isinstance(group.device, str):
        return group
    preset = cluster_preset(group.device, where)
    if preset.device is None:
        raise ConfigurationError(
            f"group {group.name} has the device of preset {group.device}, which has several",
            hint="name a preset with one kind of device",
            where=where,
        )
    return replace(group, device=preset.device, levels=group.levels or preset.levels)


def is_cluster(path: str | Path) -> bool:
    """True if a YAML file describes a cluster rather than a configuration, by the keys it has."""
    document = read_file(path).value
    return isinstance(document, dict) and not {"device", "levels", "groups"}.isdisjoint(document)
