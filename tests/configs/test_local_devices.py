"""The default cluster: the GPUs that NVML finds and CUDA_VISIBLE_DEVICES leaves, else this
machine's cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autopipe.configs.local_devices import Gpu, preset_of_gpu, visible_gpus

NVML = """
#include <string.h>
static const char *names[] = {NAMES};
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = sizeof(names) / sizeof(*names); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = &names[index]; return 0; }
int nvmlDeviceGetName(const char **device, char *text, unsigned size) { strncpy(text, *device, size); return 0; }
int nvmlDeviceGetUUID(const char **device, char *text, unsigned size) {
  strncpy(text, "GPU-a", size); text[4] += device - names; return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) { memory[0] = BYTESull; return 0; }
"""
"""A library that answers as NVIDIA's does."""
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
ASK = """
from autopipe.configs.configuration import load_configuration, resolve_cluster
from autopipe.configs.local_devices import local_cluster
import sys
cluster, here = resolve_cluster(load_configuration()), local_cluster()
print(cluster.name, cluster.size, cluster.devices_per_node, here.why, here.warning, "torch" in sys.modules, sep="|")
"""
GB = 10**9


def told(folder: Path, names: list[str], memory: int, **variables: str) -> list[str]:
    """What a new process finds where the driver lists GPUs of these names."""
    source = folder / "nvml.c"
    quoted = ", ".join(f'"{name}"' for name in names)
    source.write_text(NVML.replace("NAMES", quoted).replace("BYTES", str(memory)))
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True
    )
    environment = {
        name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"
    }
    environment |= {"LD_LIBRARY_PATH": str(folder), **variables}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip().split("|")


@pytest.mark.skipif(
    COMPILER is None, reason="the library that stands in for NVML needs a C compiler"
)
def test_the_gpus_that_nvml_finds_are_the_default_cluster(tmp_path: Path) -> None:
    h100 = ["NVIDIA H100 80GB HBM3"] * 4
    assert told(tmp_path, h100, 85 * GB) == [
        "h100-80gb",
        "4",
        "4",
        "4 NVIDIA H100 80GB HBM3 here",
        "",
        "False",
    ]
    assert told(tmp_path, h100, 85 * GB, CUDA_VISIBLE_DEVICES="1,3")[1] == "2"
    sixteen = told(tmp_path, ["Tesla V100-SXM3-32GB"] * 16, 34 * GB)
    assert sixteen[:3] == ["v100-32gb", "16", "16"], "all of them are in one node"
    mixed = told(tmp_path, [h100[0], "NVIDIA L40S"], 85 * GB)
    assert (
        mixed[0] == "cpu-local"
        and "1 NVIDIA H100 80GB HBM3 and 1 NVIDIA L40S, of several kinds" in mixed[4]
    )
    assert told(tmp_path, h100, 85 * GB, CUDA_VISIBLE_DEVICES="")[3].startswith("no GPU here")


@pytest.mark.parametrize(
    ("name", "gigabytes", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", 85, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 42, None),
        ("NVIDIA H200", 150, "h200"),
        ("Tesla V100-SXM2-16GB", 17, "v100-16gb"),
        ("Tesla V100-PCIE-32GB", 34, "v100-32gb"),
        ("NVIDIA GeForce RTX 4090", 25, "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17, None),
        ("NVIDIA GeForce GTX 1080 Ti", 11, "1080ti-pcie"),
        ("NVIDIA L40S", 48, None),
    ],
)
def test_a_preset_is_known_by_name_and_memory(
    name: str, gigabytes: int, preset: str | None
) -> None:
    assert preset_of_gpu(Gpu(name, gigabytes * GB, "GPU-0")) == preset


@pytest.mark.parametrize(
    ("variable", "left"),
    [
        (None, "abc"),
        ("", ""),
        ("2,0", "ca"),
        ("GPU-b", "b"),
        ("0,-1,2", "a"),
        ("0,7,1", "a"),
        ("MIG-a", ""),
    ],
)
def test_visible_devices_are_those_that_cuda_takes(variable: str | None, left: str) -> None:
    gpus = tuple(Gpu("G", GB, f"GPU-{letter}") for letter in "abc")
    assert "".join(gpu.uuid[-1] for gpu in visible_gpus(gpus, variable)) == left
