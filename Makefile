# make demo    train on real images with two workers, compare with one process, then kill a worker and compare again
# make test    lint, types, pages, doctests and tests
# make check   lint, types and tests of each layer that need one process, for the way of working
# make test-long  further tests of the same kinds
# make notebooks  remove the outputs of the notebooks, and run them
# make docs    the documentation as a site, into build/site
# make matrix  the representative tests with the oldest and the newest TensorFlow and Keras, in build/matrix
# make parity  N replicas against one process, case by case, as a table
# make gpu     the cases of the GPU kit on this machine's GPUs, as a file of results; one line where there is none
#
# Each target creates an environment in .venv first. It needs make and Python 3.11 to 3.13, for which TensorFlow 2.21,
# which it installs, has wheels. `make PYTHON=/path/to/python ...` selects one.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

WORKERS ?= 2
TEST_PROCESSES ?= 3
# Long tests start more and larger processes.
LONG_TEST_PROCESSES ?= 2
VENV := .venv
BIN := $(VENV)/bin

# Variables of the user's shell that tests must not see. Without bytecode files, each of the hundreds of processes that
# tests start would compile tfdist again.
unexport TF_CONFIG PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONDONTWRITEBYTECODE
export PYTHONNOUSERSITE := 1
export KERAS_BACKEND := tensorflow
export TF_CPP_MIN_LOG_LEVEL ?= 3
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The first candidate of a supported version that can create environments. The base interpreter, so that an activated
# .venv is not created from itself.
ifndef PYTHON
PYTHON := $(shell for python in python3 python3.13 python3.12 python3.11; do \
    "$$python" -c 'import ensurepip, sys, venv; print(sys._base_executable); sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
        2>/dev/null && break; done | tail -n 1)
endif

# The name of the stamp contains a checksum of everything that determines the environment. So .venv is created again when
# a dependency, the directory or the Python changes, whatever the modification times are.
MADE_FROM := setup.cfg pyproject.toml tfdist/requirements.txt
FINGERPRINT := $(shell { cat $(MADE_FROM); pwd; $(PYTHON) -VV; echo $(PYTHON); } 2>/dev/null | sha256sum | cut -c 1-16)
STAMP := $(VENV)/installed-$(FINGERPRINT)

.PHONY: help install demo test check test-long browser slurm lint doctest format matrix parity gpu notebooks docs clean

help:
	@sed -n 's/^# \(make \)/\1/p' Makefile

install: $(STAMP)

$(STAMP): $(MADE_FROM)
	@"$(PYTHON)" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	    echo "No suitable Python. Received: $(or $(PYTHON),$$(python3 -VV 2>&1 || true)). Expected: Python 3.11, 3.12 or" \
	         "3.13 with its venv module, for which TensorFlow has wheels. Install one, or select it:" \
	         "make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Creating $(VENV) with $(PYTHON): a few minutes and about 2 GB the first time."
	"$(PYTHON)" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[examples,test,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/tfdist run --workers $(WORKERS) examples/digits.py
	$(BIN)/python examples/recovery.py --epochs 3
	$(BIN)/python examples/elastic.py

# Three processes for two cores, because many tests wait, for processes that they started and for limits. The tests of a
# file run in one process. Files run in the order of tests/conftest.py: the default order runs files of few, slow tests
# last, when one process waits for the others.
test: lint
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# Rules of the code, what has no TensorFlow in it, and the ways of a gradient and of a loss within a process.
check: lint
	$(BIN)/python -m pytest -n 0 tests/test_architecture.py tests/test_private_symbols.py tests/test_imports.py \
	    tests/transport tests/exchange tests/utils tests/cluster tests/checkpoint tests/planning tests/collectives \
	    tests/losses tests/strategies/test_mirrored_strategy.py

# One of the long tests opens TensorBoard in a browser. It is skipped if there is none.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get -qq update && \
	    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium; } >/dev/null 2>&1 || \
	    echo "No Chromium: the test that opens TensorBoard in a browser is skipped."

# Further long tests start a Slurm, which takes root. They are skipped, with the reason, without it.
slurm:
	@{ command -v slurmctld && command -v munged; } >/dev/null || { [ "$$(id -u)" = 0 ] && \
	    tests/slurm/install_slurm.sh; } >/dev/null 2>&1 || echo "No Slurm: the tests that start one are skipped."

test-long: $(STAMP) browser slurm
	TEST_GRAPPLER=twice $(BIN)/python -m pytest -m long -n $(LONG_TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# With the modules of tests/support, among them `sitecustomize`, the import of Keras is cheaper.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=tests/support $(BIN)/python docs/building/check_pages.py

doctest: $(STAMP)
	$(BIN)/python -m pytest tests/test_doctests.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(STAMP)
	$(BIN)/python tests/notebooks/notebook_files.py
	$(BIN)/python -m pytest tests/notebooks

# Warnings are errors, except with --quiet, which hides them from --strict. The variable hides an announcement of Material.
docs: $(STAMP)
	$(BIN)/python docs/building/pictures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "The documentation: build/site/index.html"

# Some of them: `make matrix PAIRS='2.18-3.10 nightly'`.
PAIRS ?=
matrix:
	"$(PYTHON)" tests/support/version_matrix.py --processes $(LONG_TEST_PROCESSES) $(PAIRS)

parity: $(STAMP)
	$(BIN)/python benchmarks/parity.py

# Some of them, beside PyTorch: `make gpu GPU='--cases parity,recovery --torch-python /path/to/python'`.
GPU ?=
gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py $(GPU)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
