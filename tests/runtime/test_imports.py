"""The runtime stands without the frameworks that made the engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HEAVY = ["torch", "transformers", "onnx", "onnx_ir", "onnxscript", "optimum", "accelerate", "kvrelay_export"]


def modules_after(program: str, *arguments: str) -> set[str]:
    """Top-level modules that a new interpreter has loaded after ``program``."""
    source = f"import sys, json\n{program}\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    found = subprocess.run(
        [sys.executable, "-c", source, *arguments], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    return set(json.loads(found.stdout.splitlines()[-1]))


def test_importing_kvrelay_loads_no_framework_and_no_backend() -> None:
    loaded = modules_after("import kvrelay")
    assert "kvrelay" in loaded
    assert not loaded & {*HEAVY, "onnxruntime", "tensorrt", "tensorrt_rtx", "cuda"}


def test_generating_loads_no_framework(llama_bundle: Path) -> None:
    program = (
        "import kvrelay\n"
        "pipe = kvrelay.Pipeline(sys.argv[1], draft='cousin', threads=2)\n"
        "pipe.generate([{'role': 'user', 'content': 'hello'}], max_new_tokens=8)"
    )
    loaded = modules_after(program, str(llama_bundle))
    assert "onnxruntime" in loaded
    assert not loaded & set(HEAVY)


def test_generating_works_where_no_framework_can_be_imported(llama_bundle: Path) -> None:
    program = (
        f"for name in {HEAVY}: sys.modules[name] = None\n"
        "import kvrelay\n"
        "assert kvrelay.Pipeline(sys.argv[1], threads=2).generate('hello', max_new_tokens=8).token_ids"
    )
    modules_after(program, str(llama_bundle))


def test_a_missing_backend_is_named_with_the_extras_that_bring_it(llama_bundle: Path) -> None:
    program = (
        "sys.modules['onnxruntime'] = None\n"
        "import kvrelay\n"
        "try: kvrelay.Pipeline(sys.argv[1])\n"
        "except kvrelay.BackendMissingError as error: assert 'kvrelay[cpu]' in str(error), error\n"
        "else: raise SystemExit('no error')"
    )
    modules_after(program, str(llama_bundle))


def test_a_session_made_before_kvrelay_works_or_is_explained(llama_bundle: Path) -> None:
    program = (
        "import onnxruntime, kvrelay\n"
        "session = onnxruntime.InferenceSession(sys.argv[1] + '/fp32-decode.onnx')\n"
        "try: assert kvrelay.Pipeline(sys.argv[1], threads=2).generate('hello', max_new_tokens=3).token_ids\n"
        "except kvrelay.EngineError as error: assert 'kvrelay.use_threads()' in str(error), error"
    )
    modules_after(program, str(llama_bundle))
