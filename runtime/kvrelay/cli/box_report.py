"""What a box has, and what of kvrelay can run on it. Nothing heavy is imported to find out."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ..boxcache import cpu_name
from .gpu_report import gpu_report, jetson

__all__ = ["box_report"]

# Instruction sets that decide how fast a product is, by the names that the kernel gives them.
_INSTRUCTION_SETS = {
    "avx2": ("avx2",),
    "avx512": ("avx512f",),
    "vnni": ("avx512_vnni", "avx_vnni"),
    "amx": ("amx_tile",),
}
_ARM_INSTRUCTION_SETS = {"neon": ("asimd",), "dot product": ("asimddp",), "i8mm": ("i8mm",), "sve": ("sve",)}
_EXPORT_NEEDS = ("torch", "transformers", "accelerate", "optimum", "onnx", "onnx_ir", "onnxscript", "onnxruntime")


def box_report() -> dict[str, str]:
    """Return facts about this box by name, in words."""
    platform_name = jetson()
    return {
        "CPU": cpu_name(),
        "usable cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": _memory(),
        "instruction sets": _instruction_sets(),
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        **({"platform": platform_name} if platform_name is not None else {}),
        **gpu_report(),
        "kvrelay export": _export(),
    }


def _proc(file: str) -> Iterator[tuple[str, str]]:
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        key, _, value = line.partition(":")
        yield key.strip(), value.strip()


def _memory() -> str:
    sizes = {key: int(value.split()[0]) / 2**20 for key, value in _proc("meminfo") if key.startswith("Mem")}
    if not {"MemTotal", "MemAvailable"} <= set(sizes):
        return "unknown"
    return f"{sizes['MemTotal']:.1f} GiB, {sizes['MemAvailable']:.1f} available"


def _instruction_sets() -> str:
    flags = next((set(value.split()) for key, value in _proc("cpuinfo") if key in ("flags", "Features")), set())
    sets = _ARM_INSTRUCTION_SETS if platform.machine() == "aarch64" else _INSTRUCTION_SETS
    has = [name for name, wanted in sets.items() if flags & set(wanted)]
    lacks = [name for name in sets if name not in has]
    return "; ".join([", ".join(has) or "none of note", *([f"not {', '.join(lacks)}"] if lacks else [])])


def _export() -> str:
    if sys.version_info < (3, 11):
        return "cannot run: it needs Python 3.11"
    missing = [name for name in _EXPORT_NEEDS if find_spec(name) is None]
    return f"cannot run without {', '.join(missing)}: pip install 'kvrelay[export]'" if missing else "can run"
