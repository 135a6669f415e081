"""A wheel, installed in an empty environment without the exporter, runs a bundle that was copied there."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def test_an_installed_wheel_runs_a_copied_bundle(wheel_python: Path, llama_bundle: Path, tmp_path: Path) -> None:
    python = wheel_python
    bundle = shutil.copytree(llama_bundle, tmp_path / "elsewhere" / "bundle")
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KVRELAY_CACHE")}
    done = subprocess.run(
        [str(python.with_name("kvrelay")), "run", str(bundle), "hello", "-n", "8", "--draft", "ngram"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "acceptance" in done.stderr
    packages = subprocess.run([str(python), "-m", "pip", "list"], check=True, capture_output=True, text=True).stdout
    for absent in ("torch", "transformers", "onnx "):
        assert f"\n{absent}" not in packages
    listing = subprocess.run(
        [str(python.with_name("kvrelay")), "export", "x"], capture_output=True, text=True, check=False, timeout=60
    )
    assert listing.returncode == 2
    assert "kvrelay[export]" in listing.stderr
