# `make run` and `make test` are all that a newcomer needs; each sets up what it uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUNDLE := engines/smollm2-135m-instruct
PROMPT ?= Why is the sky blue?
# A CPU build of torch is enough for exporting; give TORCH="torch --index-url ..." for another.
TORCH ?= torch==2.13.0

.PHONY: env export run cpp test test-full style bench gpu-check-bundle gpu-check clean

env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "exporting needs Python 3.11 or newer: make PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[cpu,export,cpp,dev]'
	touch $@

export: $(BUNDLE)/manifest.json

$(BUNDLE)/manifest.json: | $(VENV)/.ready
	$(BIN)/kvrelay export smollm2-135m-instruct --output $(BUNDLE)

run: export
	$(BIN)/kvrelay run $(BUNDLE) "$(PROMPT)"

# The C++ examples; the tests build what they need by themselves.
cpp: $(VENV)/.ready
	@$(BIN)/python runtime/cpp/prerequisites.py
	cmake -S runtime/cpp/example -B build/cpp-example -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
		-Dkvrelay_DIR="$$($(BIN)/python -m kvrelay.cpp --cmake-dir)"
	cmake --build build/cpp-example --parallel 2

test: export
	$(BIN)/python -m pytest -m "not full"

test-full: export
	$(BIN)/python -m pytest

style: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: export
	$(BIN)/kvrelay bench $(BUNDLE) --precision fp32
	$(BIN)/kvrelay bench $(BUNDLE) --precision int4

# On a workstation: what `make gpu-check` runs, a few MiB to carry to a box with a GPU. Some minutes.
gpu-check-bundle: $(VENV)/.ready
	$(BIN)/python tests/gpu/make_bundle.py build/gpu-check

# On the box, with the runtime installed: no torch, no exporter.
gpu-check:
	$(PYTHON) tests/gpu/gpu_check.py build/gpu-check

clean:
	rm -rf $(VENV) engines/*/ engines/.[!.]* dist build *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
