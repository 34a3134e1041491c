"""Files that are no model, broken models and models that are not supported: exit code 3 and one
line, from inspect and from plan.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.helper as oh
import pytest

from tests.cli.command_line import CommandLine
from tests.passes.frontend.building import floats, linear, linear_beside, model, node, saved

MODEL = "model.onnx"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def _bytes(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / MODEL).write_bytes(content)


def _inferred(build: Callable[[], onnx.ModelProto]) -> Callable[[Path], object]:
    return lambda folder: saved(build(), folder)


def _unread(build: Callable[[], onnx.ModelProto]) -> Callable[[Path], object]:
    """As `_inferred`, for models that onnx cannot infer shapes of."""
    return lambda folder: (folder / MODEL).write_bytes(build().SerializeToString())


def _symlinked_weights(folder: Path) -> None:
    linear_beside(folder, "data.bin")
    (folder.parent / "secret").mkdir()
    (folder.parent / "secret/data.bin").write_bytes(bytes(48))
    (folder / "data.bin").symlink_to(folder.parent / "secret/data.bin")


def _symlinked_parent(folder: Path) -> None:
    linear_beside(folder, "inner/data.bin")
    (folder.parent / "secret").mkdir()
    (folder.parent / "secret/data.bin").write_bytes(bytes(48))
    (folder / "inner").symlink_to(folder.parent / "secret", target_is_directory=True)


def _short_weights(folder: Path) -> None:
    linear_beside(folder, "data.bin")
    (folder / "data.bin").write_bytes(bytes(47))


def _weights_of_lfs(folder: Path) -> None:
    linear_beside(folder, "data.bin")
    (folder / "data.bin").write_bytes(LFS_POINTER)


def _weights_behind_the_end(folder: Path) -> None:
    linear_beside(folder, "data.bin", offset=2**62)
    (folder / "data.bin").write_bytes(bytes(48))


def _weights_are_a_folder(folder: Path) -> None:
    linear_beside(folder, "data.bin")
    (folder / "data.bin").mkdir()


def _cycle() -> onnx.ModelProto:
    return model([node("Add", "x b", "a"), node("Neg", "a", "b")], {"x": [2]}, "b")


def _duplicate_value() -> onnx.ModelProto:
    return model([node("Neg", "x", "y"), node("Exp", "x", "y")], {"x": [2]}, "y")


def _control_flow() -> onnx.ModelProto:
    branch = oh.make_graph(
        [node("Neg", "x", "z")], "branch", [], [oh.make_empty_tensor_value_info("z")]
    )
    other = oh.make_graph(
        [node("Concat", "x x", "w", axis=0)], "other", [], [oh.make_empty_tensor_value_info("w")]
    )
    choice = oh.make_node(
        "If", ["flag"], ["y"], name="choice", then_branch=branch, else_branch=other
    )
    return model([choice], {"x": [2], "flag": (onnx.TensorProto.BOOL, [])}, "y")


def _unknown_domain() -> onnx.ModelProto:
    named = oh.make_node("Frobnicate", ["x"], ["y"], name="f\n'0'", domain="org.example")
    return model([named], {"x": [2]}, "y", domains=["org.example"])


def _misspelt() -> onnx.ModelProto:
    return model([oh.make_node("Sofmax", ["x"], ["y"], name="last")], {"x": [2, 3]}, "y")


def _mismatch() -> onnx.ModelProto:
    return model([node("Add", "x w", "y")], {"x": [2, 3]}, "y", {"w": floats(4)})


def _learnt_before() -> onnx.ModelProto:
    named = oh.make_node(
        "Normalizer", ["x"], ["y"], name="normalizer", domain="ai.onnx.ml", norm="L2"
    )
    return model([named], {"x": [2, 3]}, "y", domains=["ai.onnx.ml"])


def _strings() -> onnx.ModelProto:
    return model([node("Identity", "x", "y")], {"x": (onnx.TensorProto.STRING, [2])}, "y")


def _wrong_size() -> onnx.ModelProto:
    proto = linear()
    proto.graph.initializer[0].raw_data = bytes(44)
    return proto


def _negative_shape() -> onnx.ModelProto:
    proto = linear()
    proto.graph.initializer[0].dims[:] = [-3, 4]
    return proto


def _no_rank() -> onnx.ModelProto:
    proto = linear()
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    return proto


def _broken_attribute() -> onnx.ModelProto:
    return model([node("Transpose", "x", "y", perm=[0, 7])], {"x": [2, 3]}, "y")


def _missing_value() -> onnx.ModelProto:
    return model([node("Add", "x nowhere", "y")], {"x": [2]}, "y")


def _recursive_function() -> onnx.ModelProto:
    proto = model(
        [oh.make_node("Again", ["x"], ["y"], domain="local")], {"x": [2]}, "y", domains=["local"]
    )
    body = [oh.make_node("Again", ["a"], ["b"], domain="local")]
    imports = [oh.make_opsetid("", 20), oh.make_opsetid("local", 1)]
    proto.functions.append(oh.make_function("local", "Again", ["a"], ["b"], body, imports))
    return proto


def _opset_of(domain: str, version: int) -> onnx.ModelProto:
    proto = linear()
    proto.opset_import.add(domain=domain, version=version)
    return proto


def _opset_in_a_function() -> onnx.ModelProto:
    proto = model(
        [oh.make_node("Twice", ["x"], ["y"], domain="local")], {"x": [2]}, "y", domains=["local"]
    )
    body = [oh.make_node("Add", ["a", "a"], ["b"])]
    imports = [oh.make_opsetid("", 20), oh.make_opsetid("org.example", 2**62)]
    proto.functions.append(oh.make_function("local", "Twice", ["a"], ["b"], body, imports))
    return proto


def _metadata_of_bytes(folder: Path) -> None:
    """protobuf writes text only as UTF-8, thus the bytes are exchanged afterwards."""
    proto = linear()
    proto.metadata_props.add(key="author", value="abcd")
    (folder / MODEL).write_bytes(proto.SerializeToString().replace(b"abcd", b"\xff\xfe\xfd\xfc"))


def _without_grid() -> onnx.ModelProto:
    sample = oh.make_node("GridSample", ["x", ""], ["y"], name="sample")
    return model([sample], {"x": [1, 1, 4, 4]}, "y")


CASES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "absent": (lambda folder: None, ("does not exist",)),
    "folder": (lambda folder: (folder / MODEL).mkdir(), ("not a file", "name the .onnx file")),
    "dangling link": (lambda folder: (folder / MODEL).symlink_to("gone"), ("does not exist",)),
    "fifo": (lambda folder: os.mkfifo(folder / MODEL), ("not a file",)),
    "empty": (_bytes(b""), ("is empty",)),
    "pointer of Git LFS": (_bytes(LFS_POINTER), (f"{MODEL} is a pointer of Git LFS",)),
    "weights are a pointer of Git LFS": (_weights_of_lfs, ("tensor 'w'", "data.bin is a pointer of Git LFS")),
    "text": (_bytes(b"hello, this is no model at all\n"), ("not an ONNX",)),
    "zeros": (_bytes(bytes(4096)), ("not an ONNX",)),
    "cut": (_bytes(linear().SerializeToString()[:-9]), ("not an ONNX",)),
    "no graph": (_bytes(onnx.ModelProto(ir_version=10).SerializeToString()), ("graph is missing or empty",)),
    "opset 999": (_unread(lambda: linear(opset=999)), ("uses opset 999, expected 7 to",)),
    "opset 1": (_unread(lambda: linear(opset=1)), ("opset 1, expected 7", "version_converter")),
    "opset 2^31": (_unread(lambda: linear(opset=2**31)), ("opset 2147483648, expected 7 to ",)),
    "opset of another domain": (_unread(lambda: _opset_of("org.example", 2**31)), ("opset 2147483648", "org.example")),
    "opset below int32": (_unread(lambda: _opset_of("org.example", -(2**63))), ("opset -9223", "org.example")),
    "opset of a function": (_unread(_opset_in_a_function), ("opset 4611686018427387904", "org.example")),
    "metadata of bytes": (_metadata_of_bytes, ("a name in it is not text",)),
    "GridSample without grid": (_unread(_without_grid), ("GridSample 'sample'", "violates the ONNX specification")),
    "weights under a long name": (lambda folder: linear_beside(folder, "a" * 5000), ("tensor 'w'", "too long")),
    "weights under a long part": (lambda folder: linear_beside(folder, "a" * 300), ("tensor 'w'", "too long")),
    "cycle": (_unread(_cycle), ("cycle", "'add_a'")),
    "value written twice": (_unread(_duplicate_value), ("two nodes write the value 'y'", "'exp_y'")),
    "value never written": (_unread(_missing_value), ("'nowhere'",)),
    "shapes that do not fit": (_unread(_mismatch), ("do not fit", "'add_y'")),
    "attribute out of range": (_unread(_broken_attribute), ("'transpose_y'",)),
    "function that calls itself": (_unread(_recursive_function), ("cannot be inlined", "local::Again")),
    "input without rank": (_unread(_no_rank), ("input 'x'", "number of dimensions is unknown")),
    "strings": (_inferred(_strings), ("STRING is not supported", "'x'")),
    "weights too few": (_unread(_wrong_size), ("'w'", "44 bytes", "requires 48")),
    "weights of negative shape": (_unread(_negative_shape), ("'w'", "shape")),
    "weights cut": (_short_weights, ("tensor 'w'", "'data.bin' has 47 bytes", "requires 48")),
    "weights behind the end": (_weights_behind_the_end, ("tensor 'w'", "file 'data.bin' has")),
    "weights are a folder": (_weights_are_a_folder, ("tensor 'w'", "'data.bin' is not a regular file")),
    "weights above": (lambda folder: linear_beside(folder, "../data.bin"), ("tensor 'w'", "'../data.bin'", "inside")),
    "weights absolute": (lambda here: linear_beside(here, "/etc/passwd"), ("tensor 'w'", "'/etc/passwd'", "inside")),
    "weights without end": (lambda folder: linear_beside(folder, "a\0b"), ("tensor 'w'", "inside")),
    "weights behind a link": (_symlinked_weights, ("tensor 'w'", "'data.bin'", "is a link to a file outside")),
    "weights behind a linked folder": (_symlinked_parent, ("tensor 'w'", "'inner/data.bin'", "is a link to a file outside")),
}  # fmt: skip
"""What lies at model.onnx, and what the line says besides its name."""

UNSUPPORTED: dict[str, tuple[Callable[[], onnx.ModelProto], tuple[str, ...]]] = {
    "domain": (
        _unknown_domain,
        ("org.example.Frobnicate (1)", "a custom operator of domain 'org.example'"),
    ),
    "misspelt": (_misspelt, ("Sofmax (1)", "did you mean 'Softmax'?", "'last'")),
    "control flow": (_control_flow, ("If 'choice'", "so the type of 'y' is unknown")),
    "depends on data": (
        lambda: model(
            [node("NonZero", "x", "n"), node("Einsum", "n n", "y", equation="ij,kl->ijkl")],
            {"x": [2, 3]},
            "y",
        ),
        ("is unknown", "nonzero"),
    ),
    "other learning": (
        _learnt_before,
        ("ai.onnx.ml.Normalizer (1)", "'normalizer'", "classical machine learning"),
    ),
}
"""Sound models of which something is not supported, and what the line says besides the file's name.
"""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_a_file_that_cannot_be_read(command_line: CommandLine, command: str, name: str) -> None:
    prepare, says = CASES[name]
    prepare(command_line.folder)
    line = command_line.refuses(3, (command, MODEL), *says)
    assert line.startswith(MODEL)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_named(command_line: CommandLine, name: str) -> None:
    build, says = UNSUPPORTED[name]
    saved(build(), command_line.folder)
    assert command_line.refuses(3, ("plan", MODEL), *says).startswith(MODEL)


def _infinite_weights(folder: Path) -> None:
    weights = floats(3, 4)
    weights[0], weights[1] = np.nan, np.inf
    saved(model([node("MatMul", "x w", "y")], {"x": [2, 3]}, "y", {"w": weights}), folder)


@pytest.mark.parametrize(
    ("prepare", "warning"),
    [
        (_infinite_weights, ""),
        (lambda folder: linear_beside(folder, "gone.bin"), "at random"),
    ],
    ids=["weights that are no numbers", "weights absent"],
)
def test_what_is_survived_is_planned(
    command_line: CommandLine, prepare: Callable[[Path], object], warning: str
) -> None:
    prepare(command_line.folder)
    shown = command_line.done("plan", MODEL, "--strategy", "pipedream", "--json", "-q")
    assert json.loads(shown.out)["mode"] == "infer"
    assert warning in shown.err
    assert command_line.done("codegen", f"{MODEL}.plan", "-q", "--json").err == ""
