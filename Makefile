## Needs only make and Python >= 3.12, which .ci/find-python looks for (or say
## PYTHON=/path/to/python). What is needed is installed into .venv, once.
##
##   make demo          train on the bundled data, measure, recommend
##   make test          the tests that are quick
##   make test-slow     slower ones
##   make test WITH_SLOW=1   both in one session, and one of seven shares of the tests for a
##                      release, chosen by the day, as CI does
##   make test-all      all tests, for a release: each annotation checked, new random examples
##   make test-as-user  commands and verbs by their defaults, optimized, with nothing cached
##   make test-x64      the sparse operations with JAX's 64-bit types enabled
##   make lint          format, lint, types, import floors, words of texts, counts below their ceilings
##   make docs          the pages, in docs/_build/index.html
##   make test-oldest   the operations and training on the oldest supported versions
##   make test-spark    preparing on Apache Spark; downloads 456 MB, once
##   make test-wheel    the wheel in an empty environment of each Python, without extras
##   make clean         remove the virtual environments and caches

VENV := .venv
OLDEST := .venv-oldest
SPARK := .venv-spark
# What a user installs, half of what developers need; theirs serves, too, if it is there.
DEMO := $(if $(wildcard $(VENV)/.installed),$(VENV),.venv-demo)
export PYTHON
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Many processes are started, and asserts take five seconds to rewrite.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-slow test-all test-as-user test-x64 lint docs test-oldest test-spark test-wheel clean

help:
	@sed -n 's/^## \{0,1\}//p' Makefile

demo: $(DEMO)/.installed
	$(DEMO)/bin/sparsejax demo

# Programs compile in two thirds of the time; `test-oldest` optimizes, as users do.
PYTEST = JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(VENV)/bin/pytest \
  --numprocesses 2 --dist worksteal --durations 20 $(OPTIONS)
# In one session modules are collected, and what their tests share is made, once.
test: $(VENV)/.installed
	$(PYTEST) $(if $(WITH_SLOW),--share-of-release today) -m "$(if $(WITH_SLOW),,not slow and )not release"

test-slow: $(VENV)/.installed
	$(PYTEST) -m slow

test-all: $(VENV)/.installed
	$(PYTEST) --check-annotations --random-examples

# `tests/as_user` has fixtures of its own: those of the other tests set up eight devices and a
# shared cache of programs.
test-as-user: $(VENV)/.installed
	$(VENV)/bin/pytest --confcutdir tests/as_user --numprocesses 2 --dist loadfile \
	  --durations 10 tests/as_user

# Of losses over all items and of ranking the tests choose their own types. Annotations are
# checked here, as types differ most, and a check of all tests would take a fifth of their time;
# `test_annotations.py` imports the modules whose functions these tests do not call.
X64 := $(addprefix tests/,test_annotations.py ops/test_gather_matmul.py ops/test_scatter_gradient.py ops/test_row_update.py test_losses.py)
test-x64: $(VENV)/.installed
	JAX_ENABLE_X64=1 JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(VENV)/bin/pytest \
	  --numprocesses 2 --dist worksteal --check-annotations -m "not release" $(OPTIONS) $(X64)

lint: $(VENV)/.installed
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/pyrefly check
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python tests/texts.py
	$(VENV)/bin/python tests/structure.py ceilings

docs: $(VENV)/.installed
	$(VENV)/bin/sphinx-build -W --keep-going --quiet docs docs/_build

# What differs between versions of JAX, Flax and orbax: sorts and scatters, meshes, how
# tracing can be watched, checkpoints, and GPU programs, which are compiled as far as a CPU
# can. The quick tests of these suffice.
OLD := $(addprefix tests/,test_sparse.py ops/test_gather_matmul.py ops/test_output_on_mesh.py optimizers/test_gradients.py)
OLD += $(addprefix tests/training/,test_dispatch.py test_checkpoint.py)
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/pytest --numprocesses 2 --dist worksteal -m "not slow and not release" $(OPTIONS) $(OLD)
	$(OLDEST)/bin/pytest --numprocesses 2 --dist worksteal -m "not slow and not release" $(OPTIONS) -k lowers_for_cuda $(addprefix --ignore=,$(OLD)) \
	  tests/ops tests/pallas_kernels

# Without Java the tests are skipped, and say so.
test-spark: $(SPARK)/.installed
	JAVA_HOME=$$(sh .ci/find-java $(SPARK)) PYSPARK_PYTHON=$(CURDIR)/$(SPARK)/bin/python \
	  JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(SPARK)/bin/pytest $(OPTIONS) --durations 10 -ra tests/spark

# Pythons that are not on this machine are passed over, and named.
test-wheel: $(VENV)/.installed
	.ci/try-wheel $(CURDIR)/$(VENV)/bin/python

clean:
	rm -rf $(VENV) $(OLDEST) $(SPARK) .venv-demo .venv-wheel-* dist docs/_build docs/jupyter_execute .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# An environment that still runs is kept: only what pyproject.toml asks for is new.
$(VENV)/.installed: pyproject.toml
	@echo "Setting up $(VENV): about a minute, once"
	@$(VENV)/bin/python -c '' 2>/dev/null || \
	  { python=$$(sh .ci/find-python) && "$$python" -m venv --clear $(VENV); }
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	@touch $@

.venv-demo/.installed: pyproject.toml
	@echo "Setting up .venv-demo: about a minute, once"
	@.venv-demo/bin/python -c '' 2>/dev/null || \
	  { python=$$(sh .ci/find-python) && "$$python" -m venv --clear .venv-demo; }
	.venv-demo/bin/python -m pip install --quiet --editable .
	@touch $@

# The lower bounds in pyproject.toml, on the oldest Python there is.
$(OLDEST)/.installed: pyproject.toml
	@echo "Setting up $(OLDEST): about a minute, once"
	@$(OLDEST)/bin/python -c '' 2>/dev/null || \
	  { python=$$(sh .ci/find-python 3.12 3.13 3.14) && "$$python" -m venv --clear $(OLDEST); }
	@$(OLDEST)/bin/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*project["dependencies"], sep="\n")' | sed 's/>=/==/' > $(OLDEST)/bounds.txt
	$(OLDEST)/bin/python -m pip install --quiet --constraint $(OLDEST)/bounds.txt --editable '.[test]'
	@touch $@

$(SPARK)/.installed: pyproject.toml
	@echo "Setting up $(SPARK): some minutes, once"
	@$(SPARK)/bin/python -c '' 2>/dev/null || \
	  { python=$$(sh .ci/find-python 3.13 3.12) && "$$python" -m venv --clear $(SPARK); }
	$(SPARK)/bin/python -m pip install --quiet --editable '.[spark,test]'
	@touch $@
