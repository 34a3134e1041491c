"""The effective configuration of a command, from the defaults, a YAML file and the command line; and back to YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from autopipe.configs.cluster import ClusterDescription, build_cluster, cluster_preset, read_cluster, with_presets
from autopipe.configs.configuration import ClusterChoice, Configuration, Setting, check, override, settings
from autopipe.configs.schema import convert
from autopipe.configs.yaml_source import Entry, Place, read_file, read_text
from autopipe.ir.cluster import Cluster
from autopipe.ir.codec import encode


def load_configuration(
    file: str | Path | None = None,
    words: Mapping[str, str] | None = None,
    dims: Sequence[str] = (),
    assignments: Sequence[str] = (),
    over: str | Path | None = None,
) -> Configuration:
    """The defaults, overridden by a YAML file, overridden by another one, `over`, overridden by the command line.

    `words` are the flags of `merge.flags()` with what follows them, `dims` the words after each `--dim`,
    `assignments` those after each `--set`. Raises ConfigurationError with `file:line` or the flag.
    """
    documents = [read_file(each) for each in (file, over) if each is not None]
    return _effective(documents or [Entry({}, Place("the command line"))], settings(words or {}, dims, assignments))


def parse_configuration(text: str, source: str) -> Configuration:
    """The configuration written in a YAML text; `source` names it in errors."""
    return _effective([read_text(text, source)], [])


def dump_configuration(configuration: Configuration) -> str:
    """The configuration as a YAML file that, loaded, gives the same configuration."""
    text: str = yaml.safe_dump(encode(configuration), sort_keys=False, width=120, allow_unicode=False)
    return text


def resolve_cluster(configuration: Configuration) -> Cluster:
    """The devices and links that a configuration plans for.

    Raises ConfigurationError for a cluster that cannot be read, InfeasibleError where it has fewer than `gpus` devices.
    """
    choice = configuration.cluster
    found = build_cluster(_description(choice), configuration.gpus, choice.nodes, choice.devices_per_node)
    return replace(found, straddle=choice.straddle)


def _description(choice: ClusterChoice) -> ClusterDescription:
    if choice.inline is not None:
        return with_presets(choice.inline, "cluster.inline")
    if choice.file is not None:
        return read_cluster(choice.file)
    return cluster_preset(choice.preset or "")


def _effective(documents: Sequence[Entry], given: Sequence[Setting]) -> Configuration:
    merged = override(documents, given)
    configuration = convert(merged, Configuration)
    check(configuration, merged)
    return configuration
