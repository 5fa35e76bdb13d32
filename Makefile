# Everything runs in a virtual environment of its own, made on first use and again when its recipe changes.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
# In a process of their own: kernels are interpreted or compiled as they were imported.
TRITON_TESTS := tests/kernels/test_attention_triton.py tests/kernels/test_cache_read_triton.py \
	tests/kernels/test_delta_rule_triton.py tests/kernels/test_delta_rule_recurrent_triton.py \
	tests/kernels/test_delta_step_triton.py tests/kernels/test_deltaformer_triton.py \
	tests/kernels/test_row_linear_triton.py \
	tests/kernels/test_short_convolution_triton.py tests/kernels/test_triangular_triton.py \
	tests/zoo/test_decoding_triton.py

.PHONY: help compare test check clean

help:  ## show this
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("mixer-zoo needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@test -d zoo/kernels || { echo "zoo/kernels is no link to ../kernels: clone with git on a system that has symbolic links"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

compare: $(READY)  ## train and run every architecture, eager and compiled: table, plot, JSON (in results/compare)
	$(VENV)/bin/zoo compare --jobs 2

test: check  ## checks and tests
	$(VENV)/bin/python -m pytest -q -n 2 --dist worksteal --durations 8
	TRITON_INTERPRET=1 $(VENV)/bin/python -m pytest -q -n 2 --dist worksteal $(TRITON_TESTS)

check: $(READY)  ## lint, format, types, import order
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/basedpyright
	$(VENV)/bin/lint-imports

clean:  ## remove the environment, results and caches
	rm -rf $(VENV) results build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache
