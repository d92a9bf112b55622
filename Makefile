# make serve | demo | test | test-long | test-vllm | test-vllm-all | check-vllm | soak | kill-test | walks | lint | format | docs | audit | release | clean. Needs Python 3.11 to 3.13 and make; the rest is installed into .venv.

VENV ?= .venv
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
# Looked for at its first use, once.
PYTHON ?= $(eval PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c "$(SUITABLE)" 2>/dev/null && echo $$p && break; done))$(PYTHON)
BIN := $(VENV)/bin
# The virtual environment with what serving needs, and with the tools of developers too.
SERVING := $(VENV)/.serving
STAMP := $(VENV)/.installed
# Where PyTorch comes from, besides the usual index: without a GPU the index of its builds for the CPU, which are much smaller.
TORCH_INDEX ?= $(if $(wildcard /dev/nvidiactl /dev/dxg),,https://download.pytorch.org/whl/cpu)
# A folder for import paths that has this checkout as `kvferry`, and what it is installed as.
IMPORT := $(VENV)/import
# Clients of servers for the vLLM suite, which runs in a venv that has kvferry's own requirements only.
CLIENTS := $(VENV)/clients
CODE := app core cuda_ops migrations tests bench
# What `make lint` checks for the words of .codespell-words.txt.
PROSE := $(filter-out tests,$(CODE)) deploy docs README.md CONTRIBUTING.md CHANGELOG.md
DOCKERFILES := Dockerfile deploy/vllm/Dockerfile
OMP_NUM_THREADS ?= 1
PYTEST_ARGS ?=
# A file of tests at a time in each process; by hand, plain pytest runs them one by one. One process more than cores, at
# most 4, since tests also wait.
PROCESSES := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 3 ? cores + 1 : 4)))
# Bytecode is stored even where the environment says not to: tests start hundreds of processes.
COMPILED := PYTHONDONTWRITEBYTECODE=
XDIST := -n $(PROCESSES) --dist loadfile
SEED ?= 1
STEPS ?= 100000
ROUNDS ?= 100

# What pip says is in a file; its end is shown if it fails.
define install
@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(1) >>"$(VENV)/install.log" 2>&1 || \
	{ tail -n 20 "$(VENV)/install.log" >&2; echo "kvferry: installing failed, see $(VENV)/install.log" >&2; exit 1; }
endef

.PHONY: help serve demo test test-long test-vllm test-vllm-interface test-vllm-all check-vllm soak kill-test walks lint format docs audit release clean
help:
	@sed -n '1s/^# //p' Makefile

serve: $(SERVING)
	@exec $(BIN)/kvferry serve

# What offloading is worth, in a minute: on the running service, else on an engine of its own.
demo: $(SERVING)
	@exec $(BIN)/kvferry demo

test: $(STAMP)
	$(COMPILED) OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest $(XDIST) $(PYTEST_ARGS)

# What takes long: kill rounds, fault storms, simulated worlds, PostgreSQL, benchmarks, all examples of property tests.
test-long: $(STAMP)
	TEST_LONG=1 $(COMPILED) OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest $(XDIST) $(PYTEST_ARGS)

# One simulated world for as long as one likes; what it prints when it fails shows the failure again.
soak: $(STAMP)
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m tests.sim $(SEED) $(STEPS)

# A process with a kept pool, killed so many times in a row; every byte that comes back is checked.
kill-test: $(STAMP)
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m tests.kill $(ROUNDS) $(SEED)

# Calls, files and moves between files of each main operation; SHOW="match, hit" also lists the calls of those that begin so.
SHOW ?=
walks: $(STAMP)
	@OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m bench.walks $(if $(SHOW),--show "$(SHOW)")

# In a venv of its own, outside the checkout, which is used again while its versions match. VLLM is what make_venv.py
# is asked for: 0.31, 0.32, or the Python files of a release over the binaries of 0.32 ("--python 0.33").
VLLM ?= 0.32
VLLM_TESTS ?= tests/vllm
test-vllm: $(STAMP) $(CLIENTS)
	@venv="$$($(BIN)/python tests/vllm/make_venv.py $(VLLM))" && cd "$(CURDIR)" && TEST_VLLM=1 OMP_NUM_THREADS=1 \
		PYTHONPATH="$(abspath $(IMPORT)):$(abspath $(CLIENTS))" "$$venv/bin/python" -m pytest $(VLLM_TESTS) $(XDIST) $(PYTEST_ARGS)

# What the connector needs of the releases that are not run in full: parts, signatures, layouts and orders of calls.
INTERFACE := $(addprefix tests/vllm/test_,interface.py fabricated_steps.py layouts.py)
test-vllm-interface: $(STAMP)
	@for version in 0.31 0.33; do echo "vLLM $$version: interface" && \
		$(MAKE) --no-print-directory test-vllm VLLM="--python $$version" VLLM_TESTS="$(INTERFACE)" || exit 1; done

test-vllm-all: $(STAMP)
	@for version in 0.31 0.32 "--python 0.33"; do echo "vLLM $$version" && \
		$(MAKE) --no-print-directory test-vllm VLLM="$$version" || exit 1; done

# Downloads the newest release of vLLM, and prints which parts that the connector needs it lacks.
check-vllm: $(STAMP)
	@venv="$$($(BIN)/python tests/vllm/make_venv.py --python newest)" && cd "$(CURDIR)" && VLLM_LOGGING_LEVEL=ERROR \
		PYTHONPATH="$(abspath $(IMPORT))" "$$venv/bin/python" -m kvferry.app.engines.vllm.versions

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/codespell $(PROSE)
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive app core cuda_ops migrations
	$(BIN)/python .ci/budget.py
	@if [ -x $(BIN)/hadolint ]; then echo $(BIN)/hadolint $(DOCKERFILES); $(BIN)/hadolint $(DOCKERFILES); \
		else echo "no hadolint for this platform: $(DOCKERFILES) not linted"; fi

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation as a site, in build/site; what does not fit together, such as a link to nothing, fails.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --config-file deploy/site/mkdocs.yml

# Compares the pinned packages with the advisories of the package index, which it has to reach; a package that it cannot look
# up fails, too.
audit: $(STAMP)
	$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

# A release of the commit that is checked out, in dist/: sdist, wheel, bills of materials (CycloneDX) and SHA256SUMS.
release: $(STAMP)
	$(BIN)/python deploy/release.py $(if $(TORCH_INDEX),--index $(TORCH_INDEX))

$(SERVING): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && "$(PYTHON)" -c "$(SUITABLE)" 2>/dev/null || { \
		echo "kvferry needs Python 3.11, 3.12 or 3.13, and PYTHON=$(PYTHON) is none; name one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "kvferry: making a virtual environment in $(VENV)" >&2
	@"$(PYTHON)" -m venv --clear "$(VENV)"
	@echo "kvferry: installing PyTorch, which takes a minute or more" >&2
	$(call install,$(if $(TORCH_INDEX),--retries 1 --extra-index-url $(TORCH_INDEX)) torch)
	@echo "kvferry: installing kvferry and what it needs" >&2
	$(call install,-e '.[embedded]')
	@rm -rf "$(IMPORT)" && mkdir "$(IMPORT)" && ln -s "$(CURDIR)" "$(IMPORT)/kvferry" && \
		ln -s "$(abspath $(VENV))"/lib/python3*/site-packages/kvferry-*.dist-info "$(IMPORT)/"
	@touch $@

$(STAMP): $(SERVING)
	@echo "kvferry: installing what tests and linters need" >&2
	$(call install,-e '.[dev]')
	@touch $@

$(CLIENTS): | $(STAMP)
	@mkdir "$@" && ln -s "$(abspath $(VENV))"/lib/python3*/site-packages/redis "$@/"

clean:
	rm -rf "$(VENV)" build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(wildcard $(CODE)) -name __pycache__ -type d -prune -exec rm -rf {} +
