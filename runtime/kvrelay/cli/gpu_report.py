"""What a box has for engines on a GPU, which dialects it can run there, and what is missing, by package."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from ..dialects import dialects_of
from ..errors import KvrelayError
from ..gpu import cuda_versions, gpus
from ..ort.library import onnxruntime
from ..ort.probe import listed_providers, why_it_does_not_run
from ..trt.library import Backend, tensorrt

__all__ = ["gpu_report", "jetson"]

_NAMES: dict[Backend, str] = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}


def gpu_report() -> dict[str, str]:
    """Return facts about GPUs and their libraries by name, in words."""
    usable, gpu = _gpu()
    report = {"GPU": gpu, "CUDA": _cuda()}
    providers = _providers()
    report["onnxruntime"] = "; ".join(providers.values()) if providers else _missing_onnxruntime()
    libraries = {name: _tensorrt(name) for name in _NAMES}
    report |= {_NAMES[name]: said for name, (_, said) in libraries.items()}
    report["engines on the CPU"] = _on_onnxruntime(["cpu"], providers)
    report["engines on onnxruntime's GPU providers"] = _on_onnxruntime(["cuda", "tensorrt"], providers)
    for name, (found, _) in libraries.items():
        report[f"engines on {_NAMES[name]}"] = _on_tensorrt(name, found, usable=usable)
    return report


def jetson(root: Path = Path("/")) -> str | None:
    """Return which Jetson this is, with its release of Jetson Linux; None if it is none."""
    try:
        release = (root / "etc/nv_tegra_release").read_text(errors="replace")
    except OSError:
        return None
    try:
        model = (root / "proc/device-tree/model").read_text(errors="replace").strip("\0\n ")
    except OSError:
        model = "Jetson"
    match = re.search(r"R(\d+).*?REVISION:\s*([\d.]+)", release)
    if match is None:
        return f"{model}, Jetson Linux of an unknown release"
    major = int(match[1])
    jetpack = {35: "JetPack 5", 36: "JetPack 6"}.get(major, "JetPack 7" if major >= 38 else "")
    return f"{model}, Jetson Linux {major}.{match[2]}" + (f" ({jetpack})" if jetpack else "")


def _gpu() -> tuple[bool, str]:
    """Return whether CUDA can use a GPU, and what to say of it."""
    driver = _nvidia_smi()
    try:
        found = gpus()
    except KvrelayError as error:
        return False, f"none can be used: {error}" + (f"; nvidia-smi: {driver}" if driver is not None else "")
    said = "; ".join(f"{g}, {g.bytes / 2**30:.1f} GiB" + (" shared with the CPU" * g.integrated) for g in found)
    return True, said


def _nvidia_smi() -> str | None:
    """Return what the driver's tool says of GPUs; None where there is no such tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed ({error})"
    lines = [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    text = "; ".join(lines) or "nothing said"
    return text if done.returncode == 0 else f"failed ({text})"


def _cuda() -> str:
    try:
        driver, library = cuda_versions()
    except KvrelayError as error:
        return str(error)
    said = "no driver" if driver == "none" else f"the driver serves CUDA {driver}"
    return f"{said}, the runtime library is of CUDA {library}"


def _providers() -> dict[str, str]:
    """Return what each listed provider does, by name; empty without onnxruntime."""
    try:
        names = listed_providers()
    except KvrelayError:
        return {}
    said = {}
    for name in names:
        why = why_it_does_not_run(name)
        said[name] = f"{name} runs" if why is None else f"{name} does not run: {why}"
    first = next(iter(said), None)
    if first is not None:
        said[first] = f"{onnxruntime().__version__}: {said[first]}"
    return said


def _missing_onnxruntime() -> str:
    try:
        onnxruntime()
    except KvrelayError as error:
        return str(error)
    return "none of its providers is one that kvrelay uses"


def _tensorrt(backend: Backend) -> tuple[str | None, str]:
    """Return the version, None where it cannot be used, and what to say of it."""
    try:
        found = str(tensorrt(backend).__version__)
    except KvrelayError as error:
        return None, f"not installed: {error}"
    return found, found


def _on_onnxruntime(wanted: list[str], providers: dict[str, str]) -> str:
    running = [name for name in wanted if name in providers and providers[name].endswith(f"{name} runs")]
    if not running:
        if any(name in providers for name in wanted):
            return "cannot run: see onnxruntime"
        if "cpu" in providers:
            return "cannot run: this onnxruntime is the CPU build; pip uninstall it, then pip install 'kvrelay[gpu]'"
        return f"cannot run: pip install 'kvrelay[{'cpu' if wanted == ['cpu'] else 'gpu'}]'"
    dialects = ", ".join(dialects_of("onnxruntime", onnxruntime().__version__))
    where = "" if wanted == ["cpu"] else f" on {', '.join(running)}"
    return f"can run{where}: dialects {dialects}"


def _on_tensorrt(backend: Backend, found: str | None, *, usable: bool) -> str:
    if found is None:
        return f"cannot run: see {_NAMES[backend]}"
    dialects = ", ".join(dialects_of(backend, found)) or "none"
    if usable:
        return f"can run after `kvrelay build`: dialects {dialects}"
    builds = "; `kvrelay build --device sm86,...` works without one" if backend == "tensorrt-rtx" else ""
    return f"cannot run: no GPU (dialects {dialects}{builds})"
