"""A simulated CUDA device for machines without a GPU: torch runs fake tensors, which have shapes
but no data, on the device `cuda`, forward and backward.

The device is a shared library. `build` compiles it from `device.cpp` against the headers of the
installed torch, and caches it per installation of torch, version of torch and content of
`device.cpp`. `load` must load it before torch is imported. A process with this device is therefore
started as

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
    """Return True if `load` has made the simulated device the CUDA device of this process."""
    return _loaded


def build(cache: Path | None) -> Path:
    """Return the path of the device's library for the installed torch. Compile it unless an earlier
    call has left it in the folder `cache`.

    If `cache` is None or cannot be written, the library is in a temporary folder, which is removed
    when this process ends. Raise ConfigurationError if the library cannot be built.
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
            # The library cannot be written to this folder, so the loop tries the next folder.
            continue
        return library
    raise _unavailable_error("there is no folder for it")


def _library_folders(cache: Path | None) -> Iterator[Path]:
    """Yield the folders in which the library may be stored: first `cache`, if it is given, then a
    temporary folder, which is removed when this process ends.
    """
    if cache is not None:
        yield cache
    stack = ExitStack()
    atexit.register(stack.close)
    yield stack.enter_context(scratch_folder("fake-cuda"))


def _torch_folder() -> Path:
    """Return the folder of the installed torch. Raise ConfigurationError if torch is not installed
    or lacks C++ headers, or if the system is not Linux.
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
    """Compile `device.cpp` to the file `library` with the command `compiler`, against the torch in
    the folder `torch`. Raise ConfigurationError if the compiler fails.
    """
    # The library is linked with torch's libraries, so the dynamic linker loads them after it. If
    # both define a function, the linker chooses the definition in this library.
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
    """Return the error for a machine without a CUDA device on which the simulated device is not
    available either; `why` is the reason.
    """
    said = f"this machine lacks a CUDA device, and fake tensors cannot replace it: {why}"
    return ConfigurationError(said, hint="set --device meta", where="--device cuda")


def load(library: Path) -> None:
    """Make the simulated device in the file `library` the CUDA device of this process. Torch must
    not have been imported, because it looks for a CUDA device when it is imported.
    """
    assert "torch" not in sys.modules, "torch has found that there is no CUDA device"
    device = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    from autopipe.backends.torch.fake_cuda import patches

    device.register_guard()
    patches.install_replacements()
    global _loaded  # noqa: PLW0603
    _loaded = True
