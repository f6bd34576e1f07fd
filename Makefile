# One command from a fresh clone: every target first makes the environment it needs, in .venv.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
RUNTIME := $(VENV)/.runtime
DEV := $(VENV)/.dev
ENGINES := $(addprefix $(VENV)/engines/,transformers-4 mlx llama.cpp vllm sglang)
SITE := $(VENV)/.site
RELEASE := $(VENV)/.release
# A process per core, up to four: each holds torch and small models, and computes on one thread.
PARALLEL := -n logical --maxprocesses 4 --dist worksteal
# Other versions than the tested set: make test VENV=build/venv-5.21 WITH="transformers==5.21.0". WITH is installed last,
# over the pins; an empty CONSTRAINTS takes the newest of everything that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
WITH ?=
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
INSTALL := $(PIP) $(addprefix -c ,$(CONSTRAINTS))
# Folders and files to test, all of them by default.
TESTS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help docs demo smollm2 gemma3 qwen smollm2-checkpoint gemma3-checkpoint qwen-checkpoint gpu commands test test-full test-engines check release

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(RUNTIME) ## extend a bundled model to 4 times its context, in two minutes
	$(BIN)/rope-patch demo

smollm2: $(RUNTIME) ## extend a public model of 135M parameters (93 MB to download) and ask it: about 8 minutes of two cores
	$(BIN)/python benchmarks/tour.py smollm2

gemma3: $(RUNTIME) ## the same for Gemma 3 270M (238 MB to download, under Gemma's terms): about 12 minutes
	$(BIN)/python benchmarks/tour.py gemma3

qwen: $(RUNTIME) ## Qwen2.5-Coder 0.5B (467 MB to download): what YaRN and an fp8 cache cost, and why; SIZE=1.5b for 1.5B (1.1 GB)
	$(BIN)/python benchmarks/tour.py qwen$(if $(SIZE),-$(SIZE))

smollm2-checkpoint: $(RUNTIME) ## download that model alone: its GGUF file and a folder of transformers, in build/smollm2
	$(BIN)/python benchmarks/public_checkpoint.py

gemma3-checkpoint: $(RUNTIME) ## the same for Gemma 3 270M (238 MB to download, under Gemma's terms), in build/gemma3
	$(BIN)/python benchmarks/public_checkpoint.py gemma3

qwen-checkpoint: $(RUNTIME) ## the same for Qwen2.5-Coder 0.5B (467 MB to download), in build/qwen; SIZE=1.5b for 1.5B (1.1 GB)
	$(BIN)/python benchmarks/public_checkpoint.py qwen$(if $(SIZE),-$(SIZE))

gpu: $(DEV) ## what only a GPU can measure, 25 minutes a run: make gpu TEXT="novels/*.txt" BUDGET=25m
	$(BIN)/python benchmarks/gpu.py --budget $(or $(BUDGET),25m) $(if $(TEXT),--text $(TEXT))

# The tests start many processes: each would compile the package again where Python keeps nothing compiled.
test test-full test-engines: export PYTHONDONTWRITEBYTECODE :=

test: $(DEV) ## the tests, without those that take minutes
	$(BIN)/python -m pytest $(PARALLEL) -m "not full and not engines" --durations=20 $(TESTS)

test-full: $(DEV) ## the tests, with those that take minutes
	$(BIN)/python -m pytest $(PARALLEL) -m "not engines" --durations=20

test-engines: $(DEV) $(ENGINES) ## transformers 4, vLLM, MLX and llama.cpp read our folders; builds them first, about 15 minutes
	$(BIN)/python -m pytest -m engines --durations=20 $(TESTS)

check: $(DEV) ## style, format, types, and whether what docs/commands.py writes is current
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python docs/commands.py --check

commands: $(DEV) ## docs/commands.md, docs/families.md, and the tables of methods in docs/methods.md and docs/results/tables.md
	$(BIN)/python docs/commands.py

docs: $(SITE) ## the pages under docs as a site, with search, the commands and the Python API, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

release: $(RELEASE) ## the wheel and the source archive, in build/dist, as the package index will check them
	rm -rf build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist
	$(BIN)/twine check --strict build/dist/*

.venv: $(DEV)

# The demo and the tour ask for half of what the tests need. The second environment holds the first.
$(RUNTIME): pyproject.toml constraints.txt
	$(make_venv)
	$(INSTALL) -e ".[plots,gguf]"
	@touch $@

$(DEV): pyproject.toml constraints.txt
	$(make_venv)
	$(INSTALL) -e ".[dev]"
	$(if $(WITH),$(PIP) "$(WITH)")
	@touch $@ $(RUNTIME)

# Each engine in an environment of its own, outside the package's. What vLLM installs for pictures and sound is built for
# GPUs unless it comes from PyTorch's index of CPU builds, and then fails beside a torch for a CPU.
$(VENV)/engines/%: tests/engines/environments/%.txt
	rm -rf $@
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install -q --disable-pip-version-check -r $<
	$(if $(filter %/vllm,$@),$@/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec)
	$(if $(filter %/sglang,$@),$@/bin/python -m pip install -q --disable-pip-version-check --no-deps sglang==0.5.23)
	@touch $@

$(SITE): $(RUNTIME)
	$(INSTALL) -e ".[docs]"
	@touch $@

$(RELEASE): $(RUNTIME)
	$(INSTALL) -e ".[release]"
	@touch $@

define make_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rope_patch needs Python 3.11 or newer, for example: make PYTHON=python3.11")'
$(PYTHON) -m venv $(VENV)
endef
