#!/bin/sh
# device_wheels.sh FOLDER: the peers of benchmarks.device as wheels for a GPU machine without a network (Python 3.12).
# They must fit 60 MiB together, so Liger's native library goes without its MoE module and its Blackwell core.
set -eu
folder=$1
pip=${PIP:-.venv/bin/pip}
mkdir -p "$folder"
fetch() {
    $pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp -d "$folder" \
        --platform manylinux_2_35_x86_64 --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 "$@"
}
fetch liger-kernel==0.8.5 liger-cute-kernels==0.8.5 apache-tvm-ffi cut-cross-entropy==25.1.1 \
    trl==1.16.0 datasets dill multiprocess
for wheel in "$folder"/liger_cute_kernels-*.whl; do
    "${PYTHON:-.venv/bin/python}" - "$wheel" <<'PY'
import pathlib, sys, zipfile

wheel = pathlib.Path(sys.argv[1])
slim = wheel.with_suffix(".slim")
left_out = ("liger_moe_sm90_nonrdc.cubin", "libliger_cute_kernels_sm100f.so")
with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(slim, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
    for item in old.infolist():
        if not item.filename.endswith(left_out):
            new.writestr(item, old.read(item))
slim.rename(wheel)
PY
done
du -sh "$folder"
