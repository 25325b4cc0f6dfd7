# make demo, make test, make test-slurm, make test-numerics, make test-lowest, make gpu, make site: each makes what it needs. Another interpreter: make demo PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# what running needs, and what tests need besides
READY := $(VENV)/.ready
TESTED := $(VENV)/.ready-to-test
# Bytecode is compiled as modules are imported, a third of the time that pip takes with all of PyTorch; so it is kept,
# also where PYTHONDONTWRITEBYTECODE is set: tests alone are some fifty processes.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable
LOWEST := build/lowest

.PHONY: help demo test test-slurm test-numerics test-lowest gpu lint site clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo    train a small ProLIP on data/emoji, evaluate it, write runs/demo/report.html'
	@echo 'make test    run the tests'
	@echo 'make test-slurm  those that start a SLURM cluster on this machine (as root, with slurm-wlm and munge)'
	@echo 'make test-numerics  those of arithmetic with the kernels of every kind of CPU that this one can stand in for'
	@echo 'make test-lowest  the tests of the packages with the lowest versions of requirements.txt, in $(LOWEST)'
	@echo 'make gpu     on a machine with an H100 or H200: tests, speed and a killed run, in 15 minutes, into docs/benchmarks/gpu.md'
	@echo 'make lint    ruff, its format, and mypy'
	@echo 'make site    docs/ as a site in build/site'
	@echo 'make clean   delete the virtual environment and caches; runs/ stays'

demo: $(READY)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python scripts/demo.py

test: $(TESTED)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test-slurm: $(TESTED)
	$(BIN)/python -m pytest -m "slurm and not slow" tests/slurm

test-numerics: $(TESTED)
	$(BIN)/python scripts/dev/numerics.py

# The tests of the packages that need no extra: those of ONNX, S3, notebooks and pages skip themselves.
test-lowest: $(LOWEST)/.ready
	PYTHONDONTWRITEBYTECODE= PYTHONPATH=src $(LOWEST)/bin/python -m pytest --numprocesses auto --maxprocesses 8 \
	  --dist loadfile --no-loadscope-reorder -m "not slow and not network and not slurm and not rounding" tests/prolip tests/training

gpu: $(TESTED)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python scripts/bench/gpu/gpu.py

# Without ruff's cache: it keeps a verdict about the order of imports when a module of ours that is new changes it.
lint: $(TESTED)
	$(BIN)/ruff check --no-cache; ruff=$$?; $(BIN)/ruff format --check; form=$$?; $(BIN)/mypy && exit $$((ruff | form))

site: $(TESTED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict -f .mkdocs.yml
	@echo 'build/site is written. To read it: $(BIN)/python -m http.server -d build/site, then http://localhost:8000'

define BROKEN
echo 'error: the installation broke off, for the reason above. It takes about 7 GB here and, meanwhile, 3 GB of'; \
echo "temporary files; free now:"; df -h . "$${TMPDIR:-/tmp}"; echo 'Make room, or get the network back, and run it again.'; exit 1
endef

# Stamped last, so that an installation that broke off is taken up again.
$(READY): requirements.txt pyproject.toml
	@command -v $(PYTHON) > /dev/null || { \
	  echo 'error: no $(PYTHON) on PATH. Install Python 3.10 or newer, or name one: make demo PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), Python 3.10 or newer is needed. Name one: make demo PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo 'error: $(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@echo 'Installing into $(VENV), once; PyTorch is most of the download and takes some minutes.'
	$(PYTHON) -m venv $(VENV)
	@$(INSTALL) . || { $(BROKEN); } >&2
	@touch $@

$(TESTED): $(READY)
	@echo 'Installing what the tests need into $(VENV), once.'
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
