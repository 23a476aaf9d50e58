# Every target sets itself up: python3.11, make and pip are all that a fresh machine needs.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
MEGATRON := $(VENV)/.megatron
MINDSPORE := $(VENV)/.mindspore
TENSORFLOW := $(VENV)/.tensorflow
DEEPSPEED := $(VENV)/.deepspeed
OLDER := $(VENV)/.older
OUT    ?= out/demo
# More options for pytest, e.g. make test ARGS="-k manifest -x"
ARGS   ?=
# Four for two cores: many tests wait for another process. Whole runs of neighbours, so that what they share is made once;
# who has nothing left takes over. WORKERS= runs the tests in one process, e.g. for a debugger.
WORKERS ?= -n 4 --dist worksteal

.DEFAULT_GOAL := help
# mypy computes while environments are fetched.
MAKEFLAGS += --jobs=3
.PHONY: help .venv demo docs test tests test-fast test-full test-gpu lint bench wheels clean

help:  ## this list
	@grep -hE '^[.a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.venv: $(STAMP)  ## the virtual environment, made once, renewed when what it is made from changes

$(STAMP): pyproject.toml plugins/mindformers/pyproject.toml constraints.txt hatch_build.py $(wildcard core/lastgasp/*/_*.c)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@# torch first and pinned: resolved together with the rest, pip would fetch the newest torch with CUDA.
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]' -e plugins/mindformers
	@touch $@

# 2 MB, kept out of site-packages; the demo does without. The folder has the version in its name.
$(MEGATRON): constraints.txt tests/support/megatron/place.py | $(STAMP)
	cd tests && ../$(BIN)/python -m support.megatron.place
	@touch $@

# Two environments of their own inside this one: mindformers pins what the other tests need in other versions. 1.6 GB to
# fetch, once; kept as long as the lists of their packages are the same.
$(MINDSPORE): $(wildcard tests/support/mindspore/requirements-*.txt) tests/support/mindspore/place.py | $(STAMP)
	cd tests && ../$(BIN)/python -m support.mindspore.place
	@touch $@

# One more, of 1.5 GB, for make test-full alone.
$(TENSORFLOW): tests/support/tf/requirements.txt tests/support/tf/place.py | $(STAMP)
	cd tests && ../$(BIN)/python -m support.tf.place
	@touch $@

# 25 MB, built from source, for make test-full alone; kept out of site-packages, where others would import it.
$(DEEPSPEED): constraints.txt tests/support/deepspeed_place.py | $(STAMP)
	cd tests && ../$(BIN)/python -m support.deepspeed_place
	@touch $@

# 17 MB: releases of Lightning and transformers before the newest.
$(OLDER): tests/support/older_place.py | $(STAMP)
	cd tests && ../$(BIN)/python -m support.older_place lightning transformers
	@touch $@

demo: $(STAMP)  ## kill a rank inside backward, lose nothing, end bit-equal (under two minutes)
	$(BIN)/lastgasp demo --out $(OUT)

docs: $(STAMP)  ## README and docs/ as pages in out/site; every link is checked, no network is needed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

lint: $(STAMP) docs  ## ruff, mypy --strict, import contracts, links of the documents
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A test starts some thousand processes; where the first is set, each of them compiles lastgasp, and each worker all tests,
# anew. The others are somebody's own settings, with which tests are not what they are elsewhere (tests/support/surroundings.py).
unexport PYTHONDONTWRITEBYTECODE PYTHONOPTIMIZE PYTHONWARNINGS PYTHONUNBUFFERED PYTHONHASHSEED PYTHONDEVMODE PYTHONSAFEPATH
unexport PYTEST_ADDOPTS PYTEST_PLUGINS PYTEST_DISABLE_PLUGIN_AUTOLOAD

# What is skipped without Megatron, MindSpore or an older Lightning must not be skipped where they are fetched.
test tests test-full: export TESTS_NEED_MEGATRON := 1
test tests test-full: export TESTS_NEED_MINDSPORE := 1
test tests test-full: export TESTS_NEED_OLDER := 1
test-full: export TESTS_NEED_TENSORFLOW := 1
test-full: export TESTS_NEED_DEEPSPEED := 1

# Lint runs beside the tests: mypy is one process, and a fresh checkout has nothing in its cache.
test: lint tests  ## lint, and all tests but the full matrix
tests: $(MEGATRON) $(MINDSPORE) $(OLDER)
	$(BIN)/python -m pytest -m "not full" $(WORKERS) $(ARGS)

test-fast: $(STAMP)  ## the tests of a few seconds
	$(BIN)/python -m pytest -m "not full and not slow and not fault" $(ARGS)

# Of a matrix the cases that cover each pair of values; PRODUCTS= runs all of them, TESTS_COLD=1 starts every process as
# users do, where others are forked from one that has imported torch (tests/support/prefork): half a day, and twice that.
PRODUCTS ?= --covering
test-full: lint $(MEGATRON) $(MINDSPORE) $(OLDER) $(TENSORFLOW) $(DEEPSPEED)  ## everything, the fault matrices included (hours)
	$(BIN)/python -m pytest -o faulthandler_timeout=2000 $(PRODUCTS) $(WORKERS) $(ARGS)

# For a machine with a GPU and its own torch, e.g. in an active environment: BIN=$$(dirname $$(which python3)).
GPU_TESTS ?= tests/fault/test_loop_faults.py tests/e2e/test_matrix.py tests/fault/test_transformers_faults.py \
	tests/fault/test_sharded_faults.py tests/fault/test_in_place.py tests/fault/test_in_place_sharded.py
test-gpu: export TESTS_DEVICE := cuda
test-gpu: export TESTS_COLD := 1
test-gpu: $(if $(filter .venv/bin,$(BIN)),$(STAMP))  ## jobs on one GPU with NCCL (docs/gpus.md); of a matrix the cases that cover each pair of values
	$(BIN)/python3 -m pytest -o addopts= --covering -k "not script" -n 4 --dist worksteal $(GPU_TESTS) $(ARGS)

bench: $(STAMP) $(MEGATRON) $(MINDSPORE)  ## the measurements behind the README's table
	$(BIN)/python -m benchmarks

wheels:  ## manylinux wheels for the Pythons of this machine, each tried where no compiler is
	.ci/wheels

clean:  ## remove the environment and what the tests leave
	rm -rf $(VENV) out dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
