"""The GPU check is also run on a fake GPU, which the tests of the TensorRT backend have."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "trt"))
