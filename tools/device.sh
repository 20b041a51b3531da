#!/bin/sh
# device.sh OUT: the GPU benchmark on a bare machine whose python3 has torch, triton, pytest, hypothesis and rich.
# Wheels of the peers, where .whl holds any (tools/device_wheels.sh), go beside, never into that Python.
set -eu
out=$1
site=$(mktemp -d)
if ls .whl/*.whl >/dev/null 2>&1; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl ||
        echo "the peers' wheels do not install here: they are left out"
fi
PYTHONUNBUFFERED=1 PYTHONPATH="$site:." exec python3 -m benchmarks.device --out "$out"
