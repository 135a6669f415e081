"""A Python program, the host, loads the plug-in: ``plugin_in_python.py PLUGIN BUNDLE held|free``."""

from __future__ import annotations

import ctypes
import sys

import kvrelay

library, bundle, gil = sys.argv[1:]
# PyDLL keeps the GIL during a call, CDLL gives it away.
plugin = (ctypes.PyDLL if gil == "held" else ctypes.CDLL)(library)
assert plugin.plugin_generate(bundle.encode()) == 10
plugin.plugin_shutdown()
assert plugin.plugin_generate(bundle.encode()) == 10
pipe = kvrelay.Pipeline(bundle, draft="none", threads=2)
assert len(pipe.generate("hello", max_new_tokens=10, ignore_eos=True).token_ids) == 10
