"""Runs a file of Python as the main program of a process with a fake CUDA device."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from autopipe.backends.torch import fake_cuda

_, library, *sys.argv = sys.argv
fake_cuda.load(Path(library))
runpy.run_path(sys.argv[0], run_name="__main__")
