"""The fake CUDA device is built once for each torch, and says in one line why it cannot be."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from autopipe.backends.torch import fake_cuda
from autopipe.ir.errors import ConfigurationError


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What the compiler was told to write, in order; it writes a line of text."""
    found = []

    def compiled(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        found.append(Path(command[-1]))
        found[-1].write_text("a library", encoding="utf-8")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", compiled)
    return found


@pytest.fixture
def torch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed torch, as far as it is looked at."""
    folder = tmp_path / "torch"
    headers = folder / "include" / "ATen" / "detail"
    headers.mkdir(parents=True)
    (folder / "lib").mkdir()
    for path in (folder / "__init__.py", headers / "CUDAHooksInterface.h"):
        path.touch()
    (folder / "version.py").write_text("__version__ = '1'\n", encoding="utf-8")
    spec = type("Spec", (), {"origin": str(folder / "__init__.py")})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    return folder


def test_it_is_built_once_for_a_torch(
    tmp_path: Path, torch_folder: Path, built: list[Path]
) -> None:
    cache = tmp_path / "cache"
    library = fake_cuda.build(cache)
    assert library.parent == cache and library.read_text(encoding="utf-8") == "a library"
    assert fake_cuda.build(cache) == library and len(built) == 1
    (torch_folder / "version.py").write_text("__version__ = '2'\n", encoding="utf-8")
    assert fake_cuda.build(cache) != library and len(built) == 2
    assert sorted(path.suffix for path in cache.iterdir()) == [".so", ".so"]


@pytest.mark.usefixtures("torch_folder", "built")
def test_without_a_cache_it_is_built_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for cache in (None, tmp_path / "file"):
        assert fake_cuda.build(cache).read_text(encoding="utf-8") == "a library"


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("compiler", "a C++ compiler builds it, and there is none"),
        ("headers", "the installed torch has no headers"),
        ("torch", "torch is not installed"),
    ],
)
def test_what_is_missing_is_named(
    torch_folder: Path, monkeypatch: pytest.MonkeyPatch, missing: str, says: str
) -> None:
    if missing == "compiler":
        monkeypatch.setattr(shutil, "which", lambda _: None)
    elif missing == "headers":
        shutil.rmtree(torch_folder / "include")
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError) as caught:
        fake_cuda.build(None)
    assert says in caught.value.message and "\n" not in caught.value.message
    assert "--device meta" in caught.value.hint


def test_an_error_of_the_compiler_is_said_in_one_line(
    tmp_path: Path, torch_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (torch_folder / "lib" / "libtorch_cpu.so").touch()
    (torch_folder / "include" / "ATen" / "detail" / "CUDAHooksInterface.h").write_text(
        "#error no good\n"
    )
    if shutil.which("g++") is None:
        pytest.skip("there is no compiler")
    with pytest.raises(ConfigurationError, match=r"g\+\+ fails: .*no good") as caught:
        fake_cuda.build(tmp_path / "cache")
    assert "\n" not in caught.value.message
    assert list((tmp_path / "cache").iterdir()) == []
