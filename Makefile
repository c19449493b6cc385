# make demo    train on real images with two workers, compare with one process, then kill a worker and compare again
# make test    lint, types, doctests and tests
# make test-long  a few tests more of the same kinds
# make notebooks  take the outputs out of the notebooks, and run them
# make docs    the documentation as a site, into build/site
# make parity  N replicas against one process, case by case, as a table
#
# Each makes its own environment in .venv first. Needs only make and a Python of 3.11 to 3.13: those for which TensorFlow
# 2.21 has wheels. `make PYTHON=/path/to/python ...` chooses one.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

WORKERS ?= 2
TEST_PROCESSES ?= 2
VENV := .venv
BIN := $(VENV)/bin

# What a user's shell may hold and a test must not see.
unexport TF_CONFIG PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PYTHONNOUSERSITE := 1
export KERAS_BACKEND := tensorflow
export TF_CPP_MIN_LOG_LEVEL ?= 3
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The first candidate that runs, is of a supported version and can make environments. The base interpreter, so that an
# activated .venv does not make itself anew from itself.
ifndef PYTHON
PYTHON := $(shell for python in python3 python3.13 python3.12 python3.11; do \
    "$$python" -c 'import ensurepip, sys, venv; print(sys._base_executable); sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
        2>/dev/null && break; done | tail -n 1)
endif

# The stamp's name holds what the environment was made from: an old .venv, one of another place or another Python, or one
# made before a dependency changed, is made anew whatever the files' times say.
MADE_FROM := setup.cfg pyproject.toml tfdist/requirements.txt
FINGERPRINT := $(shell { cat $(MADE_FROM); pwd; $(PYTHON) -VV; echo $(PYTHON); } 2>/dev/null | sha256sum | cut -c 1-16)
STAMP := $(VENV)/installed-$(FINGERPRINT)

.PHONY: help install demo test test-long browser lint doctest format parity notebooks docs clean

help:
	@sed -n 's/^# \(make \)/\1/p' Makefile

install: $(STAMP)

$(STAMP): $(MADE_FROM)
	@"$(PYTHON)" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	    echo "No suitable Python. Received: $(or $(PYTHON),$$(python3 -VV 2>&1 || true)). Expected: Python 3.11, 3.12 or" \
	         "3.13 with its venv module, for which TensorFlow has wheels. Install one, or name it:" \
	         "make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Making $(VENV) with $(PYTHON): a few minutes and about 2 GB the first time."
	"$(PYTHON)" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[examples,test,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/tfdist run --workers $(WORKERS) examples/digits.py
	$(BIN)/python examples/recovery.py --epochs 3

# Two processes: most tests wait for those that they have started. A file's tests stay together; in the order of the tree,
# as the default leaves the files of few and slow tests to the end, where one process waits for the other.
test: lint browser
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# One test opens TensorBoard in a browser, and is skipped where there is none.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get -qq update && \
	    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium; } >/dev/null 2>&1 || \
	    echo "No Chromium: the test that opens TensorBoard in a browser is skipped."

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

doctest: $(STAMP)
	$(BIN)/python -m pytest tests/test_doctests.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(STAMP)
	$(BIN)/python tests/notebooks/notebook_files.py
	$(BIN)/python -m pytest tests/notebooks

# Warnings are errors (but with --quiet, which hides them from --strict). The variable: Material tells of its own future.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "The documentation: build/site/index.html"

parity: $(STAMP)
	$(BIN)/python benchmarks/parity.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
