"""All engines of one precision share their weights in memory, packed ones included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# PSS counts a page that several processes map only in part; one fresh process here, so it is what that process adds.
MEASURE = """
import sys
import numpy as np
from kvrelay.box import Box
from kvrelay.bundle import open_bundle
from kvrelay.kv import KVCache

def pss():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith("Pss:"))

bundle, precision, which = sys.argv[1:]
opened = open_bundle(bundle)
box = Box(opened, 2)
cache = KVCache(opened.target, range(opened.target.layers), slots=4)
for tensor in cache.tensors.values():
    tensor.fill(0)  # all of it resident, so that it can be left out of the figure, whatever the size of a page
entries = [e for e in opened.manifest.engines if e.precision == precision and e.model == opened.manifest.target]
passes = []
for entry in entries if which == "all" else [e for e in entries if e.name == which]:
    bound = box.engine(entry).bind(cache, entry.sequence or 1, entry.rows or 1, batch=entry.batch or 1)
    bound.run()
    bound.run()
    passes.append(bound)
print(pss() - cache.bytes // 1024)
"""


def pss(bundle: Path, precision: str, which: str) -> int:
    """KiB of a process that has loaded and run ``which`` engine, or all of them; KV left out."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(bundle), precision, which],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return int(done.stdout)


@pytest.mark.parametrize(("precision", "limit"), [pytest.param("fp32", 1.2, marks=pytest.mark.full), ("int4", 1.45)])
def test_all_engines_of_a_precision_take_little_more_than_the_largest(
    default_bundle: Path, precision: str, limit: float, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((default_bundle / "manifest.json").read_text())
    names = [e["name"] for e in manifest["engines"] if e["precision"] == precision]
    pss(default_bundle, precision, "all")  # prepares them
    alone = {name: pss(default_bundle, precision, name) for name in names}
    together = pss(default_bundle, precision, "all")
    largest = max(alone.values())
    with capsys.disabled():
        print(
            f"\n{precision}: {len(names)} engines together {together / 1024:.0f} MiB PSS, the largest alone "
            f"{largest / 1024:.0f} MiB: {together / largest:.2f}x"
        )
    assert together < limit * largest, alone
