"""Machine code of every Triton kernel without a GPU: registers, spills, tensor-core and TMA opcodes, shared memory.

    python -m benchmarks.aot [--quick] [--arch sm_90a] [--write]

Compiles each line of `cases` for each line of `launch.CONFIGS` and exits 1 on a spill, a missing matrix or TMA opcode,
too much shared memory, warp specialisation asked for and not applied, or more than 1.2 times the committed number of
instructions. `--write` commits the figures to profiles/aot-<triton version>.md; `--quick` takes one variant a kernel.
Run it without TRITON_INTERPRET. Speed is measured on a GPU, elsewhere; this says that nothing stands in its way.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from csrc_triton import grpo_kernels, kept_kernels, row_kernels, stream_kernels
from csrc_triton.cublas import ROW_LAUNCH
from csrc_triton.grpo_loss import BLOCK as GRPO_BLOCK
from csrc_triton.grpo_loss import OPTIONS as GRPO_OPTIONS
from csrc_triton.kept import STATS_LAUNCH, SUMS_LAUNCH
from csrc_triton.launch import CONFIGS, FP32_CONFIG, POINTER_CONFIG, Config

PROFILE = Path(__file__).parents[1] / "profiles" / f"aot-{triton.__version__}.md"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "e3fast" / "aot"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
ARCHES = {80: "sm_80", 90: "sm_90a", 100: "sm_100"}
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
MATRIX_OPCODES = {80: ("HMMA", "LDGSTS"), 90: ("HGMMA", "UTMALDG"), 100: ("UTCHMMA", "UTMALDG")}
GROWTH = 1.2  # instructions over the committed number that still pass
DEFAULT_STAGES = 3  # Triton's own, where a launch names none
PARSER = 1  # changes when `figures` reads more: old cache entries are then not used
OPCODES = ("HMMA", "HGMMA", "UTCHMMA", "LDGSTS", "UTMALDG", "UTMASTG", "LDL", "STL", "MUFU")
COLUMNS = ("registers", "stack", "shared", "matrix", "UTMALDG", "UTMASTG", "LDL", "STL", "MUFU", "instructions")


class Case(NamedTuple):
    """One variant of a kernel; arguments without a type in `signature` are None."""

    kernel: str  # key of CONFIGS
    variant: str
    function: Any  # a JITFunction
    signature: dict[str, str]  # argument -> "*bf16", "*fp32", "i32", "fp32", ...
    constexprs: dict[str, Any] | None = None  # those that the configuration does not give
    loads_matrix: bool = False  # tensor cores, fed by TMA from sm_90 on
    stores_matrix: bool = False  # by TMA from sm_90 on
    config: Config | None = None  # instead of the table's line
    quick: bool = False


PRODUCT = {
    "hidden_ptr": "*bf16",
    "weight_ptr": "*bf16",
    "temperature_ptr": "*fp32",
    "targets_ptr": "*i64",
    "num_rows": "i32",
    "num_cols": "i32",
    "width": "i32",
    "hidden_stride": "i32",
    "weight_stride": "i32",
    "logit_scale": "fp32",
}
DIVISIBLE = {
    "width",
    "hidden_stride",
    "weight_stride",
    "exp_stride",
    "out_stride",
    "first_col",
    "raw_stride",
    "dlin_stride",
}
STATS = PRODUCT | {"part_top_ptr": "*fp32", "part_s_ptr": "*fp32", "target_z_ptr": "*fp32"}
STORE = {"exp_ptr": "*bf16", "exp_stride": "i32"}
COEFFICIENTS = {name: "*fp32" for name in ("target_dlin_ptr", "top_ptr", "log_s_ptr", "a_ptr")}
SLAB = PRODUCT | COEFFICIENTS | {"out_ptr": "*bf16", "out_stride": "i32", "first_col": "i32"}
ENTROPY = {"b_ptr": "*fp32", "entropy_ptr": "*fp32"}
SUM_SQ = {"g_ptr": "*fp32", "sum_sq_ptr": "*fp32"}
PART_T, PART_Q = {"part_t_ptr": "*fp32"}, {"part_q_ptr": "*fp32"}
SHAPED = {"bias_ptr": "*bf16", "softcap": "fp32"}
ROWS = {"temperature_ptr": "*fp32", "targets_ptr": "*i64", "logit_scale": "fp32"}
DZ = ROWS | COEFFICIENTS | STORE | {name: "i32" for name in ("num_rows", "num_kept", "num_padded")}
DZ |= {"part_top_ptr": "*fp32", "keep_ptr": "*i64"}
COMBINED = ("part_top_ptr", "part_s_ptr", "target_z_ptr", "top_ptr", "log_s_ptr", "logprobs_ptr", "lse_ptr")
COMBINE = {name: "*fp32" for name in COMBINED} | {"targets_ptr": "*i64"}
COMBINE |= {name: "i32" for name in ("num_rows", "num_cols", "num_tiles")}


def in_fp32(signature: dict[str, str]) -> dict[str, str]:
    return {name: kind.replace("bf16", "fp32") for name, kind in signature.items()}


def in_fp16(signature: dict[str, str]) -> dict[str, str]:
    return {name: kind.replace("bf16", "fp16") for name, kind in signature.items()}


def stream_cases() -> Iterator[Case]:
    stats, slab_dz = stream_kernels.stats_kernel, stream_kernels.slab_dz_kernel
    variants = (
        ("plain", {}, {}),
        ("entropy", PART_T, ENTROPY),
        ("entropy sum_sq", PART_T | PART_Q, ENTROPY | SUM_SQ),
        ("entropy bias softcap", PART_T | SHAPED, ENTROPY | SHAPED),
    )
    for variant, parts, terms in variants:
        quick = variant == "entropy"
        yield Case("stats", variant, stats, STATS | parts, loads_matrix=True, quick=quick)
        store = STATS | STORE | parts
        yield Case("stats_store", variant, stats, store, loads_matrix=True, stores_matrix=True, quick=quick)
        yield Case("slab_dz", variant, slab_dz, SLAB | terms, loads_matrix=True, stores_matrix=True, quick=quick)
        terms = {name: kind for name, kind in terms.items() if name != "bias_ptr"}
        yield Case("dz", variant, stream_kernels.dz_kernel, DZ | terms, {"TILE_N": 128}, quick=quick)
    store, slab = STATS | STORE | PART_T, SLAB | ENTROPY
    yield Case("stats_store", "fp16", stats, in_fp16(store), loads_matrix=True, stores_matrix=True)
    yield Case("slab_dz", "fp16", slab_dz, in_fp16(slab), loads_matrix=True, stores_matrix=True)
    shaped = store | SHAPED | PART_Q
    yield Case("stats_store", "fp32 all", stats, in_fp32(shaped), config=FP32_CONFIG)
    yield Case("stats_store", "pointers all", stats, shaped, {"USE_DESC": False}, config=POINTER_CONFIG)
    plain = STATS | PART_T
    yield Case("stats", "fp32", stats, in_fp32(plain), config=FP32_CONFIG)
    yield Case("stats", "pointers", stats, plain, {"USE_DESC": False}, config=POINTER_CONFIG)
    yield Case("stats_store", "fp32", stats, in_fp32(store), config=FP32_CONFIG)
    yield Case("stats_store", "pointers", stats, store, {"USE_DESC": False}, config=POINTER_CONFIG)
    yield Case("slab_dz", "fp32", slab_dz, in_fp32(slab), config=FP32_CONFIG)
    yield Case("slab_dz", "pointers", slab_dz, slab, {"USE_DESC": False}, config=POINTER_CONFIG)
    outputs = PART_T | PART_Q | {"entropy_ptr": "*fp32", "sum_sq_ptr": "*fp32"}
    yield Case("combine", "entropy sum_sq", stream_kernels.combine_kernel, COMBINE | outputs, quick=True)


def row_cases() -> Iterator[Case]:
    """Kernels without a matrix product; their launchers hold the configuration."""
    rows = row_kernels
    stats = {
        name: "*fp32" for name in ("raw_ptr", "temperature_ptr", "top_ptr", "log_s_ptr", "logprobs_ptr", "lse_ptr")
    }
    stats |= {"targets_ptr": "*i64", "num_cols": "i32", "raw_stride": "i32", "logit_scale": "fp32"}
    both = {"entropy_ptr": "*fp32", "sum_sq_ptr": "*fp32"}
    yield row_case("row_stats", "entropy sum_sq", rows.row_stats_kernel, stats | both, ROW_LAUNCH, quick=True)
    yield row_case("row_stats", "all bias softcap", rows.row_stats_kernel, stats | both | SHAPED, ROW_LAUNCH)
    dz = {name: kind for name, kind in stats.items() if name != "lse_ptr"}
    dz |= {"keep_ptr": "*i64", "dlin_ptr": "*bf16", "num_kept": "i32", "dlin_stride": "i32"}
    dz |= {name: "*fp32" for name in ("a_ptr", "b_ptr", "entropy_ptr", "residual_ptr")}
    yield row_case("row_dz", "entropy", rows.row_dz_kernel, dz, ROW_LAUNCH, quick=True)
    yield row_case("row_dz", "all bias softcap", rows.row_dz_kernel, dz | SUM_SQ | SHAPED, ROW_LAUNCH)
    loss = {name: "*fp32" for name in ("logprobs_ptr", "old_ptr", "advantages_ptr", "ref_ptr", "correction_ptr")}
    loss |= {"mask_ptr": "*fp32", "coefficients_ptr": "*fp32", "partials_ptr": "*fp32"}
    loss |= {name: "i32" for name in ("num_tokens", "num_blocks")}
    loss |= {name: "fp32" for name in ("low", "high", "delta", "beta")}
    options = {"KL": 3, "LIMIT": 20.0, "BLOCK": GRPO_BLOCK, **GRPO_OPTIONS}
    yield row_case("token_loss", "all", grpo_kernels.token_loss_kernel, loss, options, quick=True)
    sums = {name: "*fp32" for name in ("partials_ptr", "loss_ptr", "counters_ptr")} | {"num_blocks": "i32"}
    options = {"BLOCK": 256, **GRPO_OPTIONS}
    yield row_case("sum_blocks", "all", grpo_kernels.sum_blocks_kernel, sums, options, quick=True)
    kept = PRODUCT | stats | both | SHAPED | {"indptr_ptr": "*i64", "ids_ptr": "*i64", "z_ptr": "*fp32"}
    kept = {name: kept[name] for name in kept_kernels.kept_stats_kernel.arg_names if name in kept}
    yield row_case("kept_stats", "all", kept_kernels.kept_stats_kernel, kept, STATS_LAUNCH, quick=True)
    sums = {"source_ptr": "*bf16", "weights_ptr": "*fp32", "out_ptr": "*fp32"}
    sums |= {name: "*i64" for name in ("index_ptr", "indptr_ptr", "out_rows_ptr")}
    sums |= {name: "i32" for name in ("num_sources", "num_outs", "width", "source_stride", "out_stride")}
    yield row_case("weighted_sums", "all", kept_kernels.weighted_sums_kernel, sums, SUMS_LAUNCH, quick=True)


def row_case(
    kernel: str, variant: str, function: Any, signature: dict[str, str], launch: dict[str, Any], quick: bool = False
) -> Case:
    constexprs = {name: value for name, value in launch.items() if name.isupper()}
    config = Config(0, 0, 0, launch["num_warps"], DEFAULT_STAGES)
    return Case(kernel, variant, function, signature, constexprs, config=config, quick=quick)


def cases() -> list[Case]:
    return [*stream_cases(), *row_cases()]


def choose_config(case: Case, arch: int) -> Config | None:
    """As the launchers do; None where the kernel has no line for these GPUs."""
    if case.config is not None:
        return case.config
    special = CONFIGS.get((f"{case.kernel}_softcap", arch)) if "softcap" in case.signature else None
    return special or CONFIGS.get((case.kernel, arch))


class Built(NamedTuple):
    case: Case
    config: Config
    arch: int
    figures: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.case.kernel} | {self.case.variant} | {ARCHES[self.arch]}"


def source(case: Case, config: Config) -> ASTSource:
    function: JITFunction = case.function
    tiles = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "BLOCK_T": config.block_k,
        "WARP_SPECIALIZE": config.warp_specialize,
        "FLATTEN": config.flatten,
        "USE_DESC": True,
        "INTERPRET": False,
    } | (case.constexprs or {})
    constexprs = {(i,): tiles.get(name) for i, name in enumerate(function.arg_names) if name not in case.signature}
    signature = {name: case.signature.get(name, "constexpr") for name in function.arg_names}
    loose = {"width", "hidden_stride", "weight_stride"} if not tiles["USE_DESC"] else set()
    aligned = lambda name: signature[name][0] == "*" or (name in case.signature and name in DIVISIBLE - loose)  # noqa: E731
    divisibility: Any = [["tt.divisibility", 16]]
    attrs = {(i,): divisibility for i, name in enumerate(function.arg_names) if aligned(name)}
    return ASTSource(function, signature, constexprs, attrs)


def figures(case: Case, config: Config, arch: int) -> dict[str, Any]:
    """Compile and read the machine code; from the cache where nothing of it changed."""
    made = source(case, config)
    text = repr(
        (PARSER, triton.__version__, case.function.cache_key, made.signature, made.constants, made.attrs, config, arch)
    )
    path = CACHE / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    if path.exists():
        return json.loads(path.read_text())
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    built = triton.compile(made, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        dump = lambda flag: subprocess.run([CUOBJDUMP, flag, file.name], capture_output=True, text=True, check=True)  # noqa: E731
        usage, sass = dump("--dump-resource-usage").stdout, dump("-sass").stdout
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)", sass, re.M)
    found: dict[str, Any] = {name: sum(op == name for op in opcodes) for name in OPCODES}
    resource = lambda name: int(re.findall(rf"{name}:(\d+)", usage)[0])  # noqa: E731
    found |= {"registers": resource("REG"), "stack": resource("STACK"), "shared": built.metadata.shared}
    found |= {"instructions": sum(op != "NOP" for op in opcodes), "matrix": found[MATRIX_OPCODES[arch][0]]}
    found["specialized"] = "ttg.warp_specialize" in built.asm["ttgir"] and "setmaxnreg" in built.asm["ptx"]
    CACHE.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    return found


def faults(one: Built, committed: dict[str, int]) -> list[str]:
    """What the gate has against a kernel, in words."""
    case, arch, found = one.case, one.arch, one.figures
    out = [f"{name} {found[name]}" for name in ("stack", "LDL", "STL") if found[name]]
    if case.loads_matrix:
        out += [f"no {name}" for name in MATRIX_OPCODES[arch] if not found[name]]
        if arch == 90 and found["HMMA"]:
            out.append(f"HMMA {found['HMMA']}")
        if case.stores_matrix and arch >= 90 and not found["UTMASTG"]:
            out.append("no UTMASTG")
        if one.config.warp_specialize and not found["specialized"]:
            out.append("warps not specialised")
    if found["shared"] > SHARED_LIMIT[arch]:
        out.append(f"shared memory {found['shared']} > {SHARED_LIMIT[arch]}")
    before = committed.get(one.key)
    if before is not None and found["instructions"] > GROWTH * before:
        out.append(f"instructions {found['instructions']} > {GROWTH} x {before} of {PROFILE.name}")
    return out


def config_text(case: Case, config: Config) -> str:
    sizes = f"{config.block_m}x{config.block_n}x{config.block_k}"
    if case.config is not None and not config.block_m:
        sizes = " ".join(f"{name}={value}" for name, value in (case.constexprs or {}).items())
    marks = [f"{config.num_warps} warps", f"{config.num_stages} stages"]
    marks += ["WS"] * config.warp_specialize + ["flatten"] * config.flatten
    return ", ".join([sizes, *marks])


def cells(one: Built) -> list[str]:
    kernel, variant, arch = one.key.split(" | ")
    specialized = "yes" if one.figures["specialized"] else "no"
    return [
        kernel,
        variant,
        arch,
        config_text(one.case, one.config),
        *(str(one.figures[name]) for name in COLUMNS),
        specialized,
    ]


HEADINGS = ("kernel", "variant", "arch", "configuration", *COLUMNS, "specialised")


def committed_instructions() -> dict[str, int]:
    """Instructions of each line of the committed table of this Triton version; none is no complaint."""
    if not PROFILE.exists():
        return {}
    lines = [[cell.strip() for cell in line.strip(" |").split("|")] for line in PROFILE.read_text().splitlines()]
    table = [line for line in lines if len(line) == len(HEADINGS) and line[2] in ARCHES.values()]
    return {" | ".join(line[:3]): int(line[HEADINGS.index("instructions")]) for line in table}


def write_profile(built: list[Built]) -> None:
    head = [
        f"# Machine code of the kernels, Triton {triton.__version__}",
        "Written by `python -m benchmarks.aot --write`; the gate compares instruction counts with it. `matrix` counts "
        "HMMA, HGMMA or UTCHMMA; `shared` is bytes per block; with specialised warps `registers` is that at launch.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    PROFILE.parent.mkdir(exist_ok=True)
    PROFILE.write_text("\n".join([*head, *("| " + " | ".join(cells(one)) + " |" for one in built)]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one variant a kernel")
    parser.add_argument("--arch", choices=list(ARCHES.values()), help="this one alone")
    parser.add_argument("--kernel", help="this one alone")
    parser.add_argument("--write", action="store_true", help=f"commit the figures to profiles/{PROFILE.name}")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 compiles nothing; unset it")
    if args.write and (args.quick or args.arch or args.kernel):
        parser.error("--write takes the whole table")
    built, wrong = [], []
    for case in cases():
        if (args.quick and not case.quick) or (args.kernel and case.kernel != args.kernel):
            continue
        for arch, name in ARCHES.items():
            config = choose_config(case, arch)
            if config is None or args.arch not in (None, name):
                continue
            try:
                built.append(Built(case, config, arch, figures(case, config, arch)))
            except RuntimeError as error:  # the compiler's own report stands above, on stderr
                wrong.append(f"{case.kernel} | {case.variant} | {name}: does not compile, {error}")
    committed = {} if args.write else committed_instructions()
    table = Table(title=f"Triton {triton.__version__}", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading)
    for one in built:
        table.add_row(*cells(one), style="red" if faults(one, committed) else None)
    Console(width=200).print(table)
    wrong += [f"{one.key}: {fault}" for one in built for fault in faults(one, committed)]
    for line in wrong:
        print(f"failed: {line}")
    if args.write and not wrong:
        write_profile(built)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
