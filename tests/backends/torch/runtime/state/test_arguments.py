"""Attributes of the argument `p` of generated functions."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from autopipe.backends.torch.runtime.state.arguments import (
    Arguments,
    get_attribute,
    read_attributes,
    set_attributes,
)
from autopipe.ir.errors import ConfigurationError


def module_of(folder: Path, attributes: dict[str, object]) -> ModuleType:
    """Return a stage module whose file of names has these attributes."""
    text = json.dumps({"attributes": attributes, "segments": [["w0"]]})
    (folder / "stage_00.json").write_text(text, encoding="utf-8")
    module = ModuleType("stage_00")
    module.__file__ = str(folder / "stage_00.py")
    return module


def test_layers(tmp_path: Path) -> None:
    paths = {
        "embedding.weight": "w0",
        "layers.0.norm.weight": "w1",
        "layers.1.norm.weight": "w2",
        "layers.1.random_key": 7,
        "constant": "c0",
    }
    attributes = read_attributes(module_of(tmp_path, {**paths}))
    assert dict(attributes.attributes) == paths
    assert attributes.segments == (("w0",),)
    tensors = {name: torch.zeros(1) for name in ("w0", "w1", "w2", "c0")}
    p = Arguments(training=True)
    set_attributes(p, attributes.attributes, tensors)
    for path, content in paths.items():
        expected = tensors[content] if isinstance(content, str) else content
        assert get_attribute(p, path) is expected
    p.training = False
    assert [layer.training for layer in p.layers] == [False, False]
    assert [layer.path for layer in p.layers] == ["layers.0", "layers.1"]
    with pytest.raises(AttributeError, match="missing"):
        _ = p.layers[0].missing


@pytest.mark.parametrize(
    ("path", "content"),
    [("a", "x0"), ("a", "w"), ("__class__", "w0"), ("a.__dict__", "w0"), ("a b", "w0"), ("", "w0")],
)
def test_invalid_attributes(tmp_path: Path, path: str, content: str) -> None:
    with pytest.raises(ConfigurationError, match="expected the path of an attribute") as caught:
        read_attributes(module_of(tmp_path, {path: content}))
    assert caught.value.hint == "run autopipe codegen again"


def test_missing_files_and_tensors(tmp_path: Path) -> None:
    module = ModuleType("stage_01")
    module.__file__ = str(tmp_path / "stage_01.py")
    with pytest.raises(ConfigurationError, match="names of the stage's parameters"):
        read_attributes(module)
    with pytest.raises(ConfigurationError, match="'w5', which this rank does not have"):
        set_attributes(Arguments(), [("a", "w5")], {})
