# Start with `make demo` and `make test`. Every target installs into .venv.
PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.installed
DEMO   := .venv/.installed-demo
PYTEST := $(BIN)/python -m pytest
# More processes than cores, because up to half of the time is waiting. One of test-all is for the cluster of Spark.
PROCESSES = 2
test: PROCESSES = 4
test-all: PROCESSES = 3
# A test run starts hundreds of processes. Without bytecode, each compiles its packages again.
unexport PYTHONDONTWRITEBYTECODE
TESTS  ?= --numprocesses $(PROCESSES) --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help demo demo-pipeline unit test test-all test-real test-long rehearsal test-versions soak coverage mutants lint format docs chart docs-serve bench \
	bench-simulation bench-pipeline pictures audit build dist dist-check release-check constraints clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

# pip installs uv, by its hash in constraints.txt. uv installs everything else.
$(BIN)/uv: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": set PYTHON=python3.11")'
	@$(PYTHON) -m venv .venv || { echo "python3 -m venv failed. On Debian: apt-get install python3-venv"; exit 1; }
	@sed -n '/^uv==/,/[^\\]$$/p' constraints.txt > .venv/uv.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --require-hashes --requirement .venv/uv.txt 2> .venv/install.log || $(FAILED)
	@touch $@

FAILED = { echo "Installing into .venv failed: $$(grep -iE '^ *(error|cause):' .venv/install.log | tr -s '[:space:]' ' ')(full log: .venv/install.log). Check the connection to the package index and run make again."; exit 1; }
# Choose the packages for the Python $(1) and the flags $(2) within constraints.txt, then install files whose hash is there.
INSTALL = { $(BIN)/uv pip compile --quiet --no-header --no-annotate --python $(1) --constraint constraints.txt $(2) > .venv/chosen.txt && \
  $(BIN)/uv pip install --quiet --python $(1) --require-hashes --constraint constraints.txt --build-constraint constraints.txt \
    --requirement .venv/chosen.txt; }
EDITABLE = $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --build-constraint constraints.txt --editable .

$(DEMO): $(BIN)/uv pyproject.toml outbox/_version.py
	@echo "Installing the demo's dependencies into .venv (pinned by constraints.txt) ..."
	@{ $(call INSTALL,$(BIN)/python,pyproject.toml --extra worker --extra console --group demo) && $(EDITABLE); } 2> .venv/install.log || $(FAILED)
	@touch $@

$(STAMP): $(BIN)/uv pyproject.toml outbox/_version.py
	@echo "Installing all dependencies into .venv (pinned by constraints.txt) ..."
	@{ $(call INSTALL,$(BIN)/python,pyproject.toml --extra worker --extra spark --group dev) && $(EDITABLE); } 2> .venv/install.log || $(FAILED)
	@touch $(DEMO) $@

demo: $(DEMO) ## run an order service, two workers and a subscriber on the emulators (TASKS=1000, CONSOLE=1)
	@PYTHONPATH=docs/examples $(BIN)/python -m orders.demo $(if $(TASKS),--tasks $(TASKS)) $(if $(CONSOLE),--console)

demo-pipeline: $(STAMP) ## run the Spark jobs: register, drain with live workers, archive, audit, replay (TASKS=5000)
	@PYTHONPATH=docs/examples $(BIN)/python -m payments.demo $(if $(TASKS),--tasks $(TASKS)) $(if $(OUTPUT),--output $(OUTPUT))

unit: $(STAMP) ## run the tests without emulators and processes, in a minute
	@$(PYTEST) $(TESTS) tests/unit

test: $(STAMP) ## test every promise, command and Spark job on the emulators, in five minutes
	@$(PYTEST) $(TESTS) -m "not extended and not long"

test-all: $(STAMP) ## run the tests that `make test` omits, in fifteen minutes
	@$(PYTEST) $(TESTS) -m "extended and not long" --durations 30 --durations-min 5

# One process, because the instance is shared. The Pub/Sub emulator stays.
test-real: $(STAMP) ## test the store, the relay and faults on another Spanner: SPANNER_ENDPOINT=HOST:PORT, or PROJECT= INSTANCE=
	@test -n "$(SPANNER_ENDPOINT)$(and $(PROJECT),$(INSTANCE))" || { \
	  echo "Pass SPANNER_ENDPOINT=HOST:PORT of a plaintext endpoint, or PROJECT= and INSTANCE= of Google Cloud"; exit 2; }
	@TEST_SPANNER=$(or $(SPANNER_ENDPOINT),cloud) TEST_PROJECT=$(or $(PROJECT),default) TEST_INSTANCE=$(or $(INSTANCE),default) \
	  $(PYTEST) -m "not long" $(or $(ONLY),tests/contract tests/integration tests/faults)

test-long: $(STAMP) ## run long fault and load tests, an hour of random histories and 25,000 random rows, for hours
	@$(PYTEST) --long $(TESTS) -rP -m long_form

rehearsal: $(STAMP) ## build the current commit as a release, install it with hashes, upgrade to it from another commit under load and roll back
	@$(PYTEST) --long -m long_form tests/acceptance/test_release.py

# Not part of CI, because it takes long. RUN=oldest runs one row of the page.
test-versions: $(STAMP) ## test other Python versions and the oldest and newest clients and Spark; prints the rows of docs/reference/versions.md
	@nice -n 19 $(BIN)/python -m tools.versions $(RUN) --pytest="$(TESTS)"

soak: $(STAMP) ## run mixed load with random faults and measure memory; writes build/soak (MINUTES=30)
	@$(BIN)/python -m tests.faults.soak $(if $(MINUTES),--minutes $(MINUTES))

# Omitted: tests of other code, and two that fail under coverage, because it imports and writes more.
coverage: $(STAMP) ## measure branch coverage of outbox, publishworker and outbox_admin, including processes; writes build/coverage
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --cov --cov-report term:skip-covered --cov-report html:build/coverage \
		--ignore tests/pipeline --ignore tests/manifests --ignore tests/faults \
		--deselect tests/acceptance/test_containers.py::test_a_worker_runs_as_process_1_without_rights_on_a_read_only_file_system \
		--deselect tests/integration/test_imports.py::test_the_health_check_imports_the_standard_library_only

mutants: $(STAMP) ## run mutation tests of the core; writes mutants (docs/acceptance.md)
	@$(call INSTALL,$(BIN)/python,--group mutants)
	@PATH=$(CURDIR)/$(BIN):$$PATH mutmut run --max-children 2
	@$(BIN)/mutmut results

lint: $(STAMP) ## run ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP) ## format the code and apply ruff's fixes
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(STAMP) ## generate the reference pages and build the site, strictly; writes build/site
	@$(BIN)/python docs/generate.py
	@$(BIN)/python docs/licences.py
	@$(BIN)/python docs/site.py

chart: $(STAMP) ## generate the Helm chart from the kustomize base; needs kubectl; writes k8s/helm
	@$(BIN)/python k8s/chart.py

docs-serve: docs ## show the site on http://127.0.0.1:8000
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000

bench: $(STAMP) ## measure the relay on the emulators, in ten minutes; writes docs/benchmarks.md
	@$(BIN)/python -m tools.benchmarks

bench-simulation: $(STAMP) ## print the figures of the simulation; writes docs/architecture/scale.md
	@PYTHONPATH=. $(BIN)/python -m tools.scale.rates
	@PYTHONPATH=. $(BIN)/python -m tools.scale

bench-pipeline: $(STAMP) ## run the Spark jobs on real input, and print how they grow, in two hours; writes docs/benchmarks.md
	@$(call INSTALL,$(BIN)/python,--group flights)
	@$(BIN)/python -m tools.benchmarks --only flights
	@$(BIN)/python -m tools.benchmarks.spark_growth

# Not part of CI. It also needs Chromium: apt-get install chromium.
pictures: $(STAMP) ## take the pictures of the documentation from runs on the emulators; writes docs/pictures
	@PYTHONPATH=.:docs/examples $(BIN)/python docs/pictures.py $(ONLY)

audit: $(BIN)/uv ## find known vulnerabilities of the pinned packages; needs access to the advisories
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-audit
	@$(call INSTALL,.venv-audit/bin/python,--group audit)
	@.venv-audit/bin/python tools/advisories.py constraints.txt
	@rm -rf .venv-audit

build: $(BIN)/uv ## build wheel, source distribution and SBOM, and nothing else; writes dist
	@rm -rf dist build/release build/wheel
	@$(BIN)/uv build --quiet --require-hashes --build-constraint constraints.txt --out-dir dist
	@$(RELEASE_ENVIRONMENTS)
	@build/release/bin/cyclonedx-py environment --output-reproducible --output-file build/spanner_outbox.cdx.json build/wheel/bin/python

# The wheel alone, and the tools of a release.
RELEASE_ENVIRONMENTS = $(BIN)/uv venv --quiet --clear --python $(BIN)/python build/release && $(call INSTALL,build/release/bin/python,--group release) && \
  $(BIN)/uv venv --quiet --clear --python $(BIN)/python build/wheel && $(call INSTALL,build/wheel/bin/python,pyproject.toml) && \
  $(BIN)/uv pip install --quiet --python build/wheel/bin/python --no-deps --no-index --find-links dist spanner-outbox

dist: build dist-check ## build, check the files, and run the quick start from the wheel; writes dist

dist-check: $(STAMP) ## check the files in dist and the SBOM, and run the quick start from the wheel
	@$(RELEASE_ENVIRONMENTS)
	@build/release/bin/twine check --strict dist/*
	@DIST=$(CURDIR)/dist SBOM=$(CURDIR)/build/spanner_outbox.cdx.json INSTALLED=$(CURDIR)/build/wheel/bin/python $(PYTEST) tests/acceptance/test_release.py \
	  tests/acceptance/test_readme.py::test_the_quick_start_runs_as_written

release-check: ## compare TAG=v1.2.3 and REPOSITORY=URL with version, changelog and pyproject.toml
	@$(PYTHON) tools/release.py "$(TAG)" "$(REPOSITORY)"

# KEEP=1 keeps the versions and only adds what pyproject.toml needs in addition. 3.11.5: a package needs it.
constraints: $(BIN)/uv ## resolve the newest versions; writes constraints.txt, with hashes (KEEP=1)
	@$(BIN)/uv pip compile --quiet $(if $(KEEP),,--upgrade) --universal --python-version 3.11.5 --generate-hashes --no-annotate \
	   --no-emit-index-url --custom-compile-command 'make constraints' --all-extras --group dev --group build --group release --group mutants --group audit --group flights \
	   pyproject.toml --output-file constraints.txt > /dev/null

clean: ## remove .venv and caches
	@rm -rf .venv dist build mutants .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis
