"""A CUDA device that is not there: torch runs fake tensors on `cuda` without a GPU, forward and
backward.

The device (`device.cpp`) is compiled against the headers that torch comes with, once for each
version of torch, and is loaded before torch: a process that wants it is started as

    python -m autopipe.backends.torch.fake_cuda LIBRARY FILE.py ARGUMENT...
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.output_files import scratch_folder, temporary_folder

_SOURCE = Path(__file__).parent / "device.cpp"
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-shared", "-fPIC", "-O1", "-std=c++20")
_loaded = False


def is_loaded() -> bool:
    """True in a process whose CUDA device is this one."""
    return _loaded


def build(cache: Path | None) -> Path:
    """The library of the device for the torch that is installed, from `cache` where it was built
    before; without a cache, in a folder that goes with this process. Raises ConfigurationError
    where it cannot be built.
    """
    torch = _torch_folder()
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise _unavailable_error(
            f"a C++ compiler builds it, and there is none ({', '.join(_COMPILERS)})"
        )
    version = (torch / "version.py").read_bytes()
    digest = hashlib.sha256(
        b"\0".join((version, str(torch).encode(), _SOURCE.read_bytes()))
    ).hexdigest()
    name = f"fake-cuda-{digest[:32]}.so"
    for folder in _library_folders(cache):
        library = folder / name
        if library.is_file():
            return library
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with temporary_folder(".build-", folder) as scratch:
                built = scratch / name
                _compile(compiler, torch, built)
                built.replace(library)
        except OSError:
            continue  # The cache cannot be written.
        return library
    raise _unavailable_error("there is no folder for it")


def _library_folders(cache: Path | None) -> Iterator[Path]:
    """Where the library may be: in the cache; else in a folder that goes with this process."""
    if cache is not None:
        yield cache
    stack = ExitStack()
    atexit.register(stack.close)
    yield stack.enter_context(scratch_folder("fake-cuda"))


def _torch_folder() -> Path:
    """Where the installed torch is. Raises ConfigurationError where no device can be added to
    it.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise _unavailable_error("torch is not installed")
    folder = Path(found.origin).parent
    if sys.platform != "linux":
        raise _unavailable_error("it needs Linux")
    if not (folder / "include" / "ATen" / "detail" / "CUDAHooksInterface.h").is_file():
        raise _unavailable_error("the installed torch has no headers")
    return folder


def _compile(compiler: str, torch: Path, library: Path) -> None:
    # Linked with torch's libraries, it comes before them wherever one of their functions is looked
    # for.
    links = (f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}")
    command = [
        compiler,
        *_FLAGS,
        f"-I{torch / 'include'}",
        str(_SOURCE),
        *links,
        "-o",
        str(library),
    ]
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [
            "no error is named"
        ]
        raise _unavailable_error(f"{compiler} fails: {errors[0].strip()}")


def _unavailable_error(why: str) -> ConfigurationError:
    said = f"this machine lacks a CUDA device, and fake tensors cannot replace it: {why}"
    return ConfigurationError(said, hint="set --device meta", where="--device cuda")


def load(library: Path) -> None:
    """Make the device of `library` this process's CUDA device. Torch must not have been
    imported.
    """
    assert "torch" not in sys.modules, "torch has found that there is no CUDA device"
    device = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    from autopipe.backends.torch.fake_cuda import patches

    device.register_guard()
    patches.install()
    global _loaded  # noqa: PLW0603
    _loaded = True
