# Two commands matter to a newcomer: `make demo` and `make test`. Everything installs into .venv.
PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.installed
DEMO   := .venv/.installed-demo
PYTEST := $(BIN)/python -m pytest
# Processes of a test run: one for each core, because most tests compute.
TESTS  ?= --numprocesses 2 --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help demo demo-pipeline unit test test-all test-long soak coverage mutants lint format docs bench \
	bench-pipeline audit constraints clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

# uv installs the pinned versions twice as fast as pip does; pip installs uv.
$(BIN)/uv: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": set PYTHON=python3.11")'
	@$(PYTHON) -m venv .venv || { echo "python3 -m venv failed. On Debian: apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt uv 2> .venv/install.log || $(FAILED)
	@touch $@

FAILED = { echo "Installing into .venv failed: $$({ grep -m1 '^ERROR' .venv/install.log || grep -v '^ *$$' .venv/install.log | tail -1; } | sed 's/^[^[:alnum:]]*//') (all of it: .venv/install.log). Check the connection to the package index, then run make again."; exit 1; }
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --build-constraint constraints.txt

$(DEMO): $(BIN)/uv pyproject.toml outbox/_version.py
	@echo "Installing what the demo needs into .venv (pinned by constraints.txt) ..."
	@$(INSTALL) --group demo --editable '.[worker]' 2> .venv/install.log || $(FAILED)
	@touch $@

$(STAMP): $(BIN)/uv pyproject.toml outbox/_version.py
	@echo "Installing into .venv (pinned by constraints.txt) ..."
	@$(INSTALL) --group dev --editable '.[worker,spark]' 2> .venv/install.log || $(FAILED)
	@touch $(DEMO) $@

demo: $(DEMO) ## run the whole thing on the emulators: an order service, two workers, a subscriber (TASKS=1000)
	@PYTHONPATH=docs/examples $(BIN)/python -m orders.demo $(if $(TASKS),--tasks $(TASKS))

demo-pipeline: $(STAMP) ## the pipeline on Spark: register, drain beside workers, archive, audit, replay, audit (TASKS=5000)
	@PYTHONPATH=docs/examples $(BIN)/python -m payments.demo $(if $(TASKS),--tasks $(TASKS)) $(if $(OUTPUT),--output $(OUTPUT))

unit: $(STAMP) ## what needs no emulator and no process, in less than a minute
	@$(PYTEST) $(TESTS) tests/unit

test: $(STAMP) ## every promise, command and Spark job at least once, on the real emulators, in five minutes
	@$(PYTEST) $(TESTS) -m "not extended and not long"

test-all: $(STAMP) ## everything that `make test` leaves out, in fifteen minutes
	@$(PYTEST) $(TESTS) -m "extended and not long" --durations 30 --durations-min 5

test-long: $(STAMP) ## faults and outages of a minute each, load, 5,000 random histories, 121,000 random inputs; hours
	@$(PYTEST) --long $(TESTS) -rP -m long_form

soak: $(STAMP) ## mixed load with all faults at random, memory watched; writes build/soak (MINUTES=30)
	@$(BIN)/python -m tests.faults.soak $(if $(MINUTES),--minutes $(MINUTES))

# Left out: tests of other code, and three that a measured process fails (it imports and writes more).
coverage: $(STAMP) ## branch coverage of outbox and publishworker, also in processes; writes build/coverage
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --cov --cov-report term:skip-covered --cov-report html:build/coverage \
		--ignore tests/pipeline --ignore tests/manifests --ignore tests/faults --ignore tests/model \
		--ignore tests/acceptance/test_demo_pipeline.py --ignore tests/acceptance/test_kubernetes_confined.py \
		--deselect tests/integration/test_imports.py::test_the_health_check_imports_the_standard_library_only

mutants: $(STAMP) ## mutants of the core, by mutmut; writes mutants (docs/architecture/mutants.md)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --group mutants
	@PATH=$(CURDIR)/$(BIN):$$PATH mutmut run --max-children 2
	@$(BIN)/mutmut results

lint: $(STAMP) ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP) ## let ruff format and mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(STAMP) ## write the generated reference pages again
	@$(BIN)/python docs/generate.py

bench: $(STAMP) ## speed, costs, latency and memory on the emulators, ten minutes; writes docs/benchmarks.md
	@$(BIN)/python -m tests.benchmarks

bench-pipeline: $(STAMP) ## the jobs on Spark beside plain loops, fifteen minutes; writes docs/benchmarks.md
	@$(BIN)/python -m tests.benchmarks --rounds 3 --only spark-read spark-archive spark-audit spark-register

audit: ## known vulnerabilities of the pinned packages, where the advisories can be reached
	@$(PYTHON) -m venv .venv-audit
	@.venv-audit/bin/python -m pip install --quiet pip-audit
	@.venv-audit/bin/python tests/support/advisories.py constraints.txt
	@rm -rf .venv-audit

constraints: $(BIN)/uv ## resolve the newest versions and write constraints.txt
	@{ echo '# Written by `make constraints`: every version that the targets of the Makefile install.'; \
	   $(BIN)/uv pip compile --quiet --upgrade --no-header --no-annotate --python $(BIN)/python \
	   --group dev --extra worker --extra spark pyproject.toml; } > constraints.txt.new
	@mv constraints.txt.new constraints.txt

clean: ## remove .venv and caches
	@rm -rf .venv dist build mutants .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis
