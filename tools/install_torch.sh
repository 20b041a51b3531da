#!/bin/sh
# install_torch.sh BIN VERSION CPU_INDEX: torch into a virtual environment. Any torch that is there already stays.
set -eu
bin=$1 version=$2 index=$3
if "$bin/python" -c 'import torch' 2>/dev/null; then exit 0; fi
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    "$bin/pip" install -q "torch>=2.11"
    exit 0
fi
# A CPU wheel where the package index is a local one; a dry run tells without a download of the wheel's CUDA stack.
if "$bin/pip" install -q --dry-run --report - "torch==$version" 2>/dev/null | grep -q '"name": "nvidia'; then
    "$bin/pip" install -q "torch==$version" --index-url "$index" || "$bin/pip" install -q "torch==$version"
else
    "$bin/pip" install -q "torch==$version"
fi
