"""Nothing that autopipe loads can run code: no source of it unpickles, and no command does so while
it runs.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "multiprocessing",
}
"""Modules that unpickle; those that call a process's functions with what another process pickled,
too.
"""
CALLS = {
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "torch.hub.load",
    "torch.package.PackageImporter",
    "dist.all_gather_object",
    "dist.gather_object",
    "dist.broadcast_object_list",
    "dist.scatter_object_list",
    "dist.send_object_list",
    "dist.recv_object_list",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "ProcessPoolExecutor",
}
"""Calls that unpickle what they are given, or pickle it for one that does: by the end of their
dotted names.
"""
ARRAYS = {"np.load", "numpy.load", "np.lib.format.read_array"}
"""Calls that unpickle arrays of objects unless they are told not to."""


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text; what is no name as nothing."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def faults(tree: ast.AST) -> Iterator[str]:
    """What in a source may unpickle, or makes what has to be unpickled, with its line."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            yield from (
                f"{line}: import {each.name}"
                for each in node.names
                if each.name.split(".")[0] in MODULES
            )
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {node.module.split(".")[0]} & MODULES | {each.name for each in node.names} & (
                MODULES | {"ProcessPoolExecutor"}
            )
            yield from (f"{line}: from {node.module} import {name}" for name in names)
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in CALLS or name.split(".")[-1] in {
                each.split(".")[-1] for each in CALLS if "_object" in each
            }:
                yield f"{line}: {name}"
            if name in ARRAYS and not any(
                each.arg == "allow_pickle"
                and isinstance(each.value, ast.Constant)
                and each.value.value is False
                for each in node.keywords
            ):
                yield f"{line}: {name} without allow_pickle=False"


def test_no_source_unpickles() -> None:
    sources = sorted((ROOT / "autopipe").rglob("*.py"))
    assert len(sources) > 100
    found = [
        f"{path.relative_to(ROOT)}:{fault}"
        for path in sources
        for fault in faults(ast.parse(path.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from torch import multiprocessing",
        "import multiprocessing.pool",
        "from concurrent.futures import ProcessPoolExecutor",
        "torch.load('x')",
        "dist.broadcast_object_list(x)",
        "torch.distributed.all_gather_object(x, y)",
        "np.load('x.npz')",
        "np.load('x.npz', allow_pickle=True)",
        "np.lib.format.read_array(file)",
        "yaml.load(text)",
    ],
)
def test_each_way_is_found(text: str) -> None:
    assert list(faults(ast.parse(text)))


GUARD = '''
"""Imported by every Python that starts: whoever unpickles is refused."""
import _pickle
import pickle
import sys

def refused(*arguments, **settings):
    frame = sys._getframe(1)
    raise RuntimeError(f"unpickles in {frame.f_code.co_filename}:{frame.f_lineno}")

class Refused:
    def __init__(self, *arguments, **settings):
        refused()

for module in (pickle, _pickle):
    module.loads = module.load = refused
    module.Unpickler = module._Unpickler = Refused
'''
DATA = """
import pickle
import numpy as np

def batches():
    try:
        pickle.loads(pickle.dumps(1))
    except RuntimeError:
        print("ranks are guarded", flush=True)
    else:
        raise AssertionError("a rank can unpickle")
    while True:
        yield {name: np.ones((8, 16), np.int64) for name in ("tokens", "labels")}
"""
COMMANDS = """
import sys
from autopipe.cli.main import main

for words in (
    "zoo build gpt -o gpt.onnx --set layers=1 --set hidden=16 --set heads=2 --set sequence=16 --set vocabulary=32 "
    "--set loss=true --set weights=random",
    "plan gpt.onnx --gpus 2 --strategy data_parallel --batch-size 8 --micro-batches 2 -o plan -q",
    "show plan -q",
    "codegen plan -q",
    "launch plan/program --device cpu --data guarded_data:batches --checkpoint saved",
    "launch plan/program --device cpu --steps 2 --data guarded_data:batches --checkpoint saved --resume",
    "verify plan/program --device cpu",
):
    code = main(words.split())
    if code:
        sys.exit(code)
"""


@pytest.mark.distributed
def test_no_command_unpickles(tmp_path: Path) -> None:
    """From an ONNX file to ranks that train, save, go on, and are verified."""
    (tmp_path / "sitecustomize.py").write_text(GUARD)
    (tmp_path / "guarded_data.py").write_text(DATA)
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    environment = dict(os.environ) | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COMMANDS)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ranks are guarded") == 2
    assert "loss" in done.stdout
