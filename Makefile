# See make help. Each target installs its requirements. Another interpreter: make demo PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# stamps of the installations for running and for testing
READY := $(VENV)/.ready
TESTED := $(VENV)/.ready-to-test
# Compile bytecode on import, in a third of the time that pip needs for all of PyTorch. Keep it even if
# PYTHONDONTWRITEBYTECODE is set: the tests start about fifty processes.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable
LOWEST := build/lowest

.PHONY: help demo test test-slurm test-numerics test-lowest gpu lint site clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo    train a small ProLIP on data/emoji, evaluate it, write runs/demo/report.html'
	@echo 'make test    run the tests'
	@echo 'make test-slurm  run the tests with a SLURM cluster on this machine (as root, with slurm-wlm and munge)'
	@echo 'make test-numerics  run the tests of arithmetic with the kernels of every CPU type that this machine can emulate'
	@echo 'make test-lowest  run the tests with the lowest versions of requirements.txt, in $(LOWEST)'
	@echo 'make gpu     test an H100 or H200, its speed and a killed run, in 15 minutes, and write docs/benchmarks/gpu.md'
	@echo 'make lint    run ruff, ruff format and mypy'
	@echo 'make site    build docs/ as a site in build/site'
	@echo 'make clean   delete the virtual environment and caches, keep runs/'

demo: $(READY)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python scripts/demo.py

test: $(TESTED)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test-slurm: $(TESTED)
	$(BIN)/python -m pytest -m "slurm and not slow" tests/slurm

test-numerics: $(TESTED)
	$(BIN)/python scripts/dev/numerics.py

# Tests of the packages without extras: tests of ONNX, S3, notebooks and pages skip themselves.
test-lowest: $(LOWEST)/.ready
	PYTHONDONTWRITEBYTECODE= PYTHONPATH=src $(LOWEST)/bin/python -m pytest --numprocesses auto --maxprocesses 8 \
	  --dist loadfile --no-loadscope-reorder -m "not slow and not network and not slurm and not rounding" tests/prolip tests/training

gpu: $(TESTED)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python scripts/bench/gpu/gpu.py

# Without ruff's cache, which keeps an old verdict on the order of imports after a module is added.
lint: $(TESTED)
	$(BIN)/ruff check --no-cache; ruff=$$?; $(BIN)/ruff format --check; form=$$?; $(BIN)/mypy && exit $$((ruff | form))

site: $(TESTED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict -f .mkdocs.yml
	@echo 'Wrote build/site. To read it: $(BIN)/python -m http.server -d build/site, then http://localhost:8000'

define BROKEN
echo 'error: the installation failed, see above. It needs about 7 GB here and 3 GB of temporary files. Free now:'; \
df -h . "$${TMPDIR:-/tmp}"; echo 'Free space or restore the network, then run it again.'; exit 1
endef

# The stamp comes last, so that an interrupted installation is resumed.
$(READY): requirements.txt pyproject.toml
	@command -v $(PYTHON) > /dev/null || { \
	  echo 'error: no $(PYTHON) on PATH. Install Python 3.10 or newer, or give one: make demo PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), but Python 3.10 or newer is required. Give one: make demo PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo 'error: $(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@echo 'Installing into $(VENV), once. The download, mostly PyTorch, takes some minutes.'
	$(PYTHON) -m venv $(VENV)
	@$(INSTALL) . || { $(BROKEN); } >&2
	@touch $@

$(TESTED): $(READY)
	@echo 'Installing the requirements of the tests into $(VENV), once.'
	@$(INSTALL) '.[test]' || { $(BROKEN); } >&2
	@touch $@

$(LOWEST)/.ready: requirements.txt pyproject.toml tests/lowest.txt
	@echo 'Installing the lowest versions of requirements.txt into $(LOWEST), once.'
	$(PYTHON) -m venv $(LOWEST)
	@$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint tests/lowest.txt \
	  --requirement requirements.txt --editable . pytest pytest-timeout pytest-xdist hypothesis mpmath || { $(BROKEN); } >&2
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
