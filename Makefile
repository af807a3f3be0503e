# Everything runs in .venv, which is made on first use; nothing is needed but Python 3.11+, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two processes on a small machine thrash with one thread per core each.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Empty is off: without its cache every process compiles what it imports again, torch for seconds each time.
export PYTHONDONTWRITEBYTECODE :=

PROJECTS := $(shell git ls-files '*pyproject.toml')
CALCULATOR := examples/calculator
TEST_PROCESSES ?= 2
FUZZ_MINUTES ?= 15
DEMO_ARGS ?=
GPU_ARGS ?=
CHAOS_ARGS ?= --write
PROOF_ARGS ?=
TWO_NODES_ARGS ?=

SGLANG := plugins/engines/agentrl-engine-sglang
VLLM := plugins/engines/agentrl-engine-vllm
TESTING := plugins/testing/agentrl-testing
TINKER := plugins/cli/agentrl-tinker
TINKER_BACKEND := plugins/backends/agentrl-backend-tinker
MEGATRON := plugins/backends/agentrl-backend-megatron

.PHONY: help env wheels demo demo-ray demo-ppo test test-slow check lint format changelog bench browser chaos proof fuzz gpu two-nodes release clean engines-cpu engines-cpu-sglang engines-cpu-vllm \
	megatron-env test-megatron test-megatron-learn tinker-env test-tinker test-tinker-learn vision-env test-vision test-engines test-engine-sglang test-engine-vllm test-engines-benchmark test-engines-fleet test-engines-learn

help:
	@echo "make demo    install, make a tiny model and its data, train it, show the curve and sample trajectories"
	@echo "make test    install, run the tests but the slow ones"
	@echo "make test-slow   the slow ones: runs that are killed, learning, the examples, predictions of large models"
	@echo "make check   install, lint, types, import rules, example configurations"
	@echo "make env     install only: .venv with everything editable"
	@echo "make wheels  every package as a wheel in dist, for: pip install --find-links dist agentrl-all"
	@echo "make bench   the benchmarks"
	@echo "make proof   train the examples with known optima, three seeds each, to docs/results/proof.md; PROOF_ARGS=\"kuhn_poker --seeds 1\""
	@echo "make chaos   kill, freeze and starve a tiny run again and again, see docs/reliability.md; CHAOS_ARGS=\"--parts local --faults 20\""
	@echo "make fuzz    hostile input for FUZZ_MINUTES=15; a minute of it is in make test"
	@echo "make changelog   gather the fragments of changelog.d in CHANGELOG.md; VERSION=0.2.0 for a release"
	@echo "make release VERSION=0.2.0   build, check, install and try every distribution; uploads nothing"
	@echo "make gpu     what only a GPU can show, to runs/gpu/gpu.md; without one a rehearsal on the CPU"
	@echo "make two-nodes   train on two nodes in namespaces of this machine, as root; TWO_NODES_ARGS=--slow takes the link down too"
	@echo "make test-engines   the engines with environments of their own, for real, on the CPU; also:"
	@echo "make test-engine-sglang, make test-engine-vllm   one of them"
	@echo "make test-engines-learn   train the calculator example with both, for ten minutes"
	@echo "make test-tinker   the Tinker SDK and recipes of its cookbook against agentrl tinker serve, on the CPU"
	@echo "make test-tinker-learn   train two examples at agentrl tinker serve, for ten minutes"
	@echo "make test-megatron   the training backend on Megatron-Core, on 1, 2 and 4 ranks, on the CPU"
	@echo "make test-vision   families of vision-language models whose processors need torchvision or num2words"
	@echo "make test-engines-fleet   two replicas of each, with faults, for many minutes"

env: $(VENV)/.installed

# Without compiling what is installed: half a minute less, and Python compiles what it imports once anyway.
$(VENV)/.installed: requirements-dev.txt constraints.txt $(PROJECTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "agentrl needs Python 3.11 or newer; name one with PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt hatchling editables setuptools wheel
	$(BIN)/python -m pip install --quiet --no-compile --no-build-isolation -c constraints.txt -r requirements-dev.txt
	touch $@

wheels:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt hatchling
	for project in $(dir $(filter-out examples/%,$(PROJECTS))); do \
		(cd $$project && $(CURDIR)/$(BIN)/python -m hatchling build --target wheel --directory $(CURDIR)/dist) || exit 1; done

$(CALCULATOR)/model/config.json: $(VENV)/.installed $(CALCULATOR)/prepare.py
	$(BIN)/python $(CALCULATOR)/prepare.py
	touch $@

demo: $(CALCULATOR)/model/config.json
	$(BIN)/agentrl train $(CALCULATOR)/config.yaml $(DEMO_ARGS)
	$(BIN)/agentrl rollouts show runs/calculator -n 3

demo-ray: $(CALCULATOR)/model/config.json
	$(BIN)/agentrl train $(CALCULATOR)/config.yaml cluster.runtime=ray trainer.name=calculator-ray $(DEMO_ARGS)

demo-ppo: $(CALCULATOR)/model/config.json
	$(BIN)/agentrl train $(CALCULATOR)/ppo.yaml $(DEMO_ARGS)

# What tests use and pip cannot install: a browser for those of agentrl-viewer, bubblewrap for those of the sandbox.
# They are skipped without it. In one target, because two apt-get at a time wait for each other's lock and fail.
browser:
	@packages=; \
	command -v chromium >/dev/null || command -v google-chrome >/dev/null || packages="chromium fonts-dejavu-core"; \
	command -v bwrap >/dev/null || packages="$$packages bubblewrap"; \
	test -z "$$packages" || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$packages >/dev/null; } || \
		echo "could not install: $$packages; the tests of agentrl-viewer or agentrl-tools-sandbox that need it will be skipped"

# The slowest file begins first; --dist loadfile keeps what shares a Ray cluster in one process. With plugins/*/*/tests
# the process that only hands out tests would import their conftest files, and torch, before any other starts.
TESTS := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder tests/scaffold tests plugins \
	--ignore-glob='*/tests_real' --ignore-glob='*/src'

test: $(VENV)/.installed
	$(TESTS) -m "not slow"

# Each of them takes more than six seconds: runs that learn or are killed on Ray, predictions of large models, the
# benchmarks on a small scale, the examples, clean environments.
test-slow: $(VENV)/.installed
	$(TESTS) -m slow

fuzz: $(VENV)/.installed
	$(BIN)/python benchmarks/fuzz.py --minutes $(FUZZ_MINUTES)

# Environments of engines, in .engines: their interpreters are for rollout.engine.python.
engines-cpu: engines-cpu-sglang engines-cpu-vllm

test-engines: test-engine-sglang test-engine-vllm test-engines-benchmark test-tinker

# What compares the engines with others, and replicas of a run, in the trainer's environment.
test-engines-benchmark: engines-cpu $(VENV)/.installed
	$(BIN)/python -m pytest tests_real/test_benchmarks.py

# Slow: several replicas of each as a run uses them, their processes killed, a death in the middle of an update.
test-engines-fleet: engines-cpu $(VENV)/.installed
	$(BIN)/python -m pytest tests_real/test_fleet.py

# An environment in which SGLang runs on a CPU, for tests. Its own requirements ask for CUDA packages: hence --no-deps.
engines-cpu-sglang: .engines/sglang/.installed

.engines/sglang/.installed: $(SGLANG)/cpu-requirements.txt $(SGLANG)/pyproject.toml $(TESTING)/pyproject.toml pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile -c constraints.txt torch
	$(@D)/bin/python -m pip install --quiet --no-compile --no-deps -r $(SGLANG)/cpu-requirements.txt
	$(@D)/bin/python -m pip install --quiet --no-compile -c constraints.txt hatchling editables hypothesis pytest pytest-timeout tensordict
	$(@D)/bin/python -m pip install --quiet --no-compile --no-build-isolation -c constraints.txt -e .
	$(@D)/bin/python -m pip install --quiet --no-compile --no-build-isolation --no-deps -e $(SGLANG) -e $(TESTING)
	printf '%s\nimport sglang_cpu_stand_ins\n' '$(CURDIR)/$(SGLANG)/tests_real/cpu_support' \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/agentrl-cpu-support.pth"
	touch $@

test-engine-sglang: .engines/sglang/.installed
	.engines/sglang/bin/python -m pytest $(SGLANG)/tests_real

# The same for vLLM. What its packages ask for and nothing uses, CUDA builds among it, stays away: --no-deps.
engines-cpu-vllm: .engines/vllm/.installed

.engines/vllm/.installed: $(VLLM)/cpu-requirements.txt $(VLLM)/pyproject.toml $(TESTING)/pyproject.toml pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile "$$(grep '^torch==' constraints.txt)"
	$(@D)/bin/python -m pip install --quiet --no-compile --no-deps -r $(VLLM)/cpu-requirements.txt
	$(@D)/bin/python -m pip install --quiet --no-compile --no-build-isolation --no-deps -e . -e $(VLLM) -e $(TESTING)
	printf '%s\nimport vllm_cpu_stand_ins\n' '$(CURDIR)/$(VLLM)/tests_real/cpu_support' \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/agentrl-cpu-support.pth"
	touch $@

# Most of the time an engine starts, which takes one core.
test-engine-vllm: .engines/vllm/.installed
	.engines/vllm/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(VLLM)/tests_real

# An environment in which Megatron-Core runs on a CPU, for tests, with every plugin of this tree: training processes get
# the options of all. Megatron-Core is whole without its extras, which are for CUDA.
megatron-env: .engines/megatron/.installed

.engines/megatron/.installed: requirements-dev.txt $(MEGATRON)/cpu-requirements.txt $(MEGATRON)/pyproject.toml $(TESTING)/pyproject.toml pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile "$$(grep '^torch==' constraints.txt)"
	$(@D)/bin/python -m pip install --quiet --no-compile -c constraints.txt hatchling editables hypothesis pytest pytest-timeout
	$(@D)/bin/python -m pip install --quiet --no-compile --no-build-isolation -c constraints.txt -e .[train,ray]
	$(@D)/bin/python -m pip install --quiet --no-compile --no-deps -r $(MEGATRON)/cpu-requirements.txt
	$(@D)/bin/python -m pip install --quiet --no-compile --no-build-isolation --no-deps $$(sed -n 's/^\(-e plugins[^[]*\).*/\1/p' requirements-dev.txt)
	printf '%s\nimport megatron_cpu_stand_ins\n' '$(CURDIR)/$(MEGATRON)/tests_real/cpu_support' \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/agentrl-cpu-support.pth"
	touch $@

test-megatron: .engines/megatron/.installed $(VENV)/.installed
	.engines/megatron/bin/python -m pytest $(MEGATRON)/tests_real
	$(BIN)/python -m pytest tests_real/test_backends.py -k two_ranks

# The calculator example is trained with it, from the trainer's environment.
test-megatron-learn: .engines/megatron/.installed $(VENV)/.installed
	$(BIN)/python -m pytest tests_real/test_backends.py -k learns

# An environment with the SDK of Tinker and its cookbook, which pull other versions than the trainer has.
tinker-env: .engines/tinker/.installed

.engines/tinker/.installed: $(TINKER)/sdk-requirements.txt constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile "$$(grep '^torch==' constraints.txt)"
	$(@D)/bin/python -m pip install --quiet --no-compile -r $(TINKER)/sdk-requirements.txt
	$(@D)/bin/python -m pip install --quiet --no-compile --no-deps tinker-cookbook==0.6.1
	touch $@

test-tinker: .engines/tinker/.installed $(VENV)/.installed
	AGENTRL_PYTHON=$(CURDIR)/$(BIN)/python .engines/tinker/bin/python -m pytest -c /dev/null --rootdir $(TINKER)/tests_real $(TINKER)/tests_real

# Slow: the calculator and guess_number are trained at a server, from the trainer's environment.
test-tinker-learn: $(VENV)/.installed
	$(BIN)/python -m pytest $(TINKER_BACKEND)/tests_real

# An environment with what processors of images ask for beyond Pillow. torchvision is built for CUDA: hence the stand-in.
vision-env: .engines/vision/.installed

.engines/vision/.installed: pyproject.toml $(TESTING)/pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile "$$(grep '^torch==' constraints.txt)"
	$(@D)/bin/python -m pip install --quiet --no-compile -c constraints.txt hatchling editables hypothesis pytest pytest-timeout num2words pillow
	$(@D)/bin/python -m pip install --quiet --no-compile --no-build-isolation -c constraints.txt -e .[train]
	$(@D)/bin/python -m pip install --quiet --no-compile --no-build-isolation --no-deps $$(sed -n 's/^\(-e plugins[^[]*\).*/\1/p' requirements-dev.txt) "$$(grep '^torchvision==' $(SGLANG)/cpu-requirements.txt)"
	printf '%s\nimport sglang_cpu_stand_ins\n' '$(CURDIR)/$(SGLANG)/tests_real/cpu_support' \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/agentrl-cpu-support.pth"
	touch $@

# Families of vision-language models whose processors work in no other environment here.
test-vision: .engines/vision/.installed
	.engines/vision/bin/python -m pytest tests/workers/test_vision.py -k "gemma4 or smolvlm or llama4"

# Slow: the calculator example is trained with each of them.
test-engines-learn: engines-cpu $(VENV)/.installed
	$(BIN)/python -m pytest tests_real/test_calculator.py tests_real/test_judge.py

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

lint: check

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Everything that only a GPU can show; without one on a tiny model on the CPU. GPU_ARGS="--parts local --output FOLDER"
gpu: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu.py $(GPU_ARGS)

# Two nodes that share nothing but this folder, with the commands of docs/training-on-many-gpus.md.
two-nodes: $(VENV)/.installed
	$(BIN)/python -m pytest tests_real/test_two_nodes.py $(if $(findstring --slow,$(TWO_NODES_ARGS)),,-m "not slow") $(filter-out --slow,$(TWO_NODES_ARGS))

chaos: $(VENV)/.installed
	$(BIN)/python benchmarks/chaos.py $(CHAOS_ARGS)

proof: $(VENV)/.installed
	$(BIN)/python benchmarks/proof.py $(PROOF_ARGS)

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/orchestration.py

# The fragments of changelog.d under "Unreleased" of CHANGELOG.md; with VERSION=0.2.0 as that release, and deleted.
changelog: $(VENV)/.installed
	sed -i '/^## Unreleased/,/^## [0-9]/{/^## [0-9]/!d}' CHANGELOG.md
	$(BIN)/towncrier build $(if $(VERSION),--yes --version $(VERSION),--keep --version Unreleased)

# PYTHONS="/path/to/python3.12 /path/to/python3.13" names interpreters that are not on the search path.
release: $(VENV)/.installed
	@test -n "$(VERSION)" || { echo "error: which version? make release VERSION=0.2.0" >&2; exit 2; }
	$(BIN)/python .ci/release.py $(VERSION) $(PYTHONS)

clean:
	rm -rf $(VENV) runs $(CALCULATOR)/model $(CALCULATOR)/data
