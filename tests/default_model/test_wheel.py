"""A wheel, installed as kvrelay[cpu] in an empty environment, runs a bundle that was copied there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_installed_wheel_runs_a_copied_bundle(llama_bundle: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path / "dist"), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", f"{wheel}[cpu]"], check=True, capture_output=True, timeout=600
    )
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
