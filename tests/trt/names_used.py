"""Which names of TensorRT and CUDA the runtime uses, and whether a module has them.

Run as a program, since one process can import one version:
``python names_used.py MODULE CUDA_MODULE FILE...`` prints the names that are missing, as JSON.

Types are followed from the receivers that every file calls alike (`RECEIVERS`), through constructors and through the
return types that the bindings' docstrings state. What is used on something of another type must be ours or Python's.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

MODULE, CUDA = "MODULE", "CUDA"
RECEIVERS = {
    "trt": MODULE,
    "library": MODULE,
    "self._trt": MODULE,
    "self._library": MODULE,
    "cuda": CUDA,
    "runtime()": CUDA,
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "engine": "ICudaEngine",
    "self._engine": "ICudaEngine",
    "self._runtime": "Runtime",
    "self._context": "IExecutionContext",
    "layer": "ILayer",
    "tensor": "ITensor",
    "attention.handle": "IAttention",
}
# Words that files use for different things.
LOCAL = {
    "contexts.py": {"config": "IRuntimeConfig"},
    "network.py": {"error": "ParserError"},
    "*": {"config": "IBuilderConfig", "properties": "cudaDeviceProp"},
}
OURS = (str, bytes, int, list, dict, set, tuple, deque, Path, Exception, OSError, np.ndarray, np.dtype, memoryview)


class Names:
    """The names that one file uses of a module.

    Args:
        file: the source.
        module: the bindings of TensorRT.
        cuda: CUDA's.
    """

    def __init__(self, file: Path, module: Any, cuda: Any, own: set[str]) -> None:
        self.file = file
        self.modules = {MODULE: module, CUDA: cuda}
        self.own = own
        self.used: set[str] = set()
        self.missing: set[str] = set()
        self.unknown: set[str] = set()
        self.classes = {n: c for n, c in vars(module).items() if inspect.isclass(c)}
        self.structures = {n: c for n, c in vars(cuda).items() if inspect.isclass(c)}
        self.foreign = {m for c in self.classes.values() for m in vars(c) if not m.startswith("__")}
        tree = ast.parse(file.read_text())
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        inner = {id(n) for f in functions for n in ast.walk(f)}
        for function in functions:
            self.look_through(function)
        for node in ast.walk(tree):
            if id(node) not in inner:
                self.look_at(node, {})

    def look_through(self, function: ast.FunctionDef) -> None:
        types: dict[str, Any] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                found = self.type_of(node.value, types)
                if found is not None:
                    types[node.targets[0].id] = found
        for node in ast.walk(function):
            self.look_at(node, types)

    def type_of(self, node: ast.expr, types: dict[str, Any]) -> Any:
        """The module, the class, or for an enum's member the enum, of an expression; None if it is not theirs."""
        text = ast.unparse(node)
        if isinstance(node, ast.Name) and text in types:
            return types[text]
        name = {**RECEIVERS, **LOCAL["*"], **LOCAL.get(self.file.name, {})}.get(text)
        if name is not None:
            return self.modules.get(name) or self.classes.get(name) or self.structures.get(name)
        if isinstance(node, ast.Attribute):
            owner = self.type_of(node.value, types)
            if owner in self.modules.values():
                return getattr(owner, node.attr, None)
        if isinstance(node, ast.Call):
            called = node.func
            made = self.type_of(called, types)
            if inspect.isclass(made):
                return made
            owner = self.type_of(called.value, types) if isinstance(called, ast.Attribute) else None
            if inspect.isclass(owner):
                text = getattr(getattr(owner, called.attr, None), "__doc__", None) or ""
                given = re.search(r"-> (?:[\w.]*\.)?(\w+)", text)
                return self.classes.get(given.group(1)) if given else None
        return None

    def look_at(self, node: ast.AST, types: dict[str, Any]) -> None:
        if isinstance(node, ast.Constant) and re.fullmatch(r"cuda[A-Z]\w+", str(node.value)):
            self.used.add(f"{self.modules[CUDA].__name__.split('.')[-1]}.{node.value}")
            if not hasattr(self.modules[CUDA], node.value):
                self.missing.add(f"{self.file.name}: {node.value}")
        if not isinstance(node, ast.Attribute) or node.attr.startswith("__"):
            return
        owner = self.type_of(node.value, types)
        if owner is None:
            if isinstance(node.value, ast.Attribute) and self.type_of(node.value.value, types) in self.modules.values():
                return  # what it is taken from is missing, and was named
            if node.attr in self.foreign and node.attr not in self.own:
                self.unknown.add(f"{self.file.name}: {ast.unparse(node)}")
            return
        name = f"{getattr(owner, '__name__', owner).split('.')[-1]}.{node.attr}"
        # A layer is often one of a more special kind, of which the library's base class has the rest.
        kinds = [owner, *(owner.__subclasses__() if inspect.isclass(owner) else ())]
        self.used.add(name)
        if not any(hasattr(kind, node.attr) for kind in kinds):
            self.missing.add(f"{self.file.name}: {name}")


def own_names(folder: Path) -> set[str]:
    """Names of attributes that are ours or Python's."""
    found = {name for kind in (*OURS, np, threading.Lock(), threading.Thread) for name in dir(kind)}
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                found.add(node.attr)
    return found


def main(module: str, cuda: str, *files: str) -> None:
    """Print what is missing."""
    theirs = importlib.import_module(module)
    calls = importlib.import_module(cuda)
    own = own_names(Path(files[0]).parents[1])
    found = [Names(Path(file), theirs, calls, own) for file in files]
    print(
        json.dumps(
            {
                "version": theirs.__version__,
                "used": sorted(set().union(*(names.used for names in found))),
                "missing": sorted(set().union(*(names.missing for names in found))),
                "unknown": sorted(set().union(*(names.unknown for names in found))),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
