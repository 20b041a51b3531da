"""Takes one term out of the kernels at a time, in a copy of the tree; each copy must fail its tests.

make mutants        # or: python tools/mutants.py [word in a mutant's name ...]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    name: str
    file: str  # under csrc_triton
    old: str
    new: str
    tests: str  # under tests


OPS, FUSED, KEPT, VECTORS, SPARSE = (
    f"csrc_triton/test_{name}.py" for name in ("logprobs", "linear_loss", "kept", "grpo_loss", "sparse")
)
STREAM, ROW_KERNELS, KEPT_KERNELS, VECTOR_KERNEL = (
    f"interpreter/test_{name}.py" for name in ("stream", "rows", "kept_kernels", "grpo_kernel")
)
MUTANTS = (
    Mutant("target term of dW", "rows.py", "grads.weight.index_add_(0, rows.targets", "(0, rows.targets", OPS),
    Mutant("p term", "rows.py", "p *= -a if a is not None else 0.0", "p *= 0.0", OPS),
    Mutant("entropy term", "rows.py", "inner -= b * (", "inner -= 0 * b * (", OPS),
    Mutant("sum_sq term", "rows.py", "inner += 2 * g", "inner += g", OPS),
    Mutant("centring", "rows.py", "block -= top[at, None]", "pass", OPS),
    Mutant("1/tau in backward", "rows.py", "value[at, None] * (head.logit_scale / temperature)", "value[at, None] * head.logit_scale", OPS),
    Mutant("softcap factor", "rows.py", "        p *= slope\n", "", OPS),
    Mutant("a slab of dW twice", "rows.py", "out[slab] += dlin", "out[slab] = dlin", FUSED),
    Mutant("target's digits", "head.py", "torch.expm1(stats.logprobs)", "(p.bfloat16() - 1)", OPS),
    Mutant("kept rows mixed up", "rows.py", "if keep is None else keep[at]", "if True else keep[at]", FUSED),
    Mutant("weights of the loss", "linear_loss.py", "terms.loss * chunk.weights", "terms.loss", FUSED),
    Mutant("loss_scale", "linear_loss.py", "if job.loss_scale is not None:", "if False:", FUSED),
    Mutant("live rows by a alone", "linear_loss.py", "(a != 0) | (b != 0)", "(a != 0)", FUSED),
    Mutant("sequences cut anywhere", "linear_loss.py", "filled + size > num_rows", "filled > num_rows", FUSED),
    Mutant("rounded logits", "rows.py", "torch.mm(x, self", "z[:, slab] = torch.mm(hidden, self.head.weight[slab].T); torch.mm(x[:0], self", OPS),
    Mutant("repeated kept ids", "kept.py", "torch.unique(", "torch.sort(", KEPT),
    Mutant("clip below", "grpo_loss.py", "1 - clip_low", "1 - clip_high", VECTORS),
    Mutant("sparse: dropped mass", "sparse.py", ".addr_(left, mean)", "", SPARSE),
    Mutant("sparse: bound", "sparse.py", "<= self.tolerance", "<= 1e9", SPARSE),
    Mutant("sparse: temperature", "sparse.py", "(head.logit_scale / rows", "(head.logit_scale + 0 * rows", SPARSE),
    Mutant("stream: combine rescale", "stream_kernels.py", "s = s * old + ", "s = s + ", STREAM),
    Mutant("stream: entropy rescale", "stream_kernels.py", "(t + s * old_gap) * old", "t * old", STREAM),
    Mutant("stream: tail mask", "stream_kernels.py", "tl.where(cols < num_cols, 0.0, LOWEST)", "tl.where(cols < num_cols, 0.0, 0.0)", STREAM),
    Mutant("stream: centring", "stream_kernels.py", "tl.sum(e * d, 1)", "tl.sum(e * z, 1)", STREAM),
    Mutant("stream: target", "stream_kernels.py", "cols[None, :] == target[:, None], z", "cols[None, :] == target[:, None] + 1, z", STREAM),
    Mutant("stream: 1/tau in backward", "stream_kernels.py", "factor = logit_scale / tau\n", "factor = logit_scale + 0 * tau\n", STREAM),
    Mutant("stream: softcap factor", "stream_kernels.py", "factor = factor * (1.0 - squashed * squashed)", "factor = factor", STREAM),
    Mutant("stream: kept rows", "stream_kernels.py", "tl.load(keep_ptr + rows, mask=live, other=0) if", "rows.to(tl.int64) if", STREAM),
    Mutant("stream: entropy term", "stream_kernels.py", "inner += load_rows(b_ptr", "inner += 0 * load_rows(b_ptr", STREAM),
    Mutant("rows: rescale", "row_kernels.py", "s = s * fade + ", "s = s + ", ROW_KERNELS),
    Mutant("rows: entropy term", "row_kernels.py", "inner - b * (", "inner - 0 * b * (", ROW_KERNELS),
    Mutant("rows: p term", "row_kernels.py", "inner = -a", "inner = -a * 0", ROW_KERNELS),
    Mutant("rows: target", "row_kernels.py", "tl.where(cols == target, dlin_y,", "tl.where(cols == -1, dlin_y,", ROW_KERNELS),
    Mutant("rows: 1/tau", "row_kernels.py", "inner * slope * (logit_scale / tau)", "inner * slope * logit_scale", ROW_KERNELS),
    Mutant("vectors: delta", "grpo_kernels.py", "tl.where(ratio > delta, 0.0, 1.0)", "tl.where(ratio > delta, 1.0, 1.0)", VECTOR_KERNEL),
    Mutant("vectors: ties", "grpo_kernels.py", "second_term, 0.5, 1.0)", "second_term, 1.0, 1.0)", VECTOR_KERNEL),
    Mutant("vectors: mask", "grpo_kernels.py", "coefficient, 0.0), mask=at", "coefficient, 1.0), mask=at", VECTOR_KERNEL),
    Mutant("kept: one member", "kept_kernels.py", "BLOCK_K)", "BLOCK_K - 1)", KEPT_KERNELS),
)  # fmt: skip


def passes(tree: Path, tests: str) -> bool:
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if tests.startswith("interpreter") else {})
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", f"tests/{tests}"]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True).returncode == 0


def survives(mutant: Mutant) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("csrc_triton", "e3fast", "tests", "benchmarks"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "csrc_triton" / mutant.file
        text = path.read_text()
        if mutant.old not in text:
            sys.exit(f"{mutant.name}: {mutant.old!r} is not in {mutant.file} any more")
        path.write_text(text.replace(mutant.old, mutant.new))
        return passes(copy, mutant.tests)


def main() -> None:
    chosen = [m for m in MUTANTS if not sys.argv[1:] or any(word in m.name for word in sys.argv[1:])]
    for tests in sorted({m.tests for m in chosen}):  # what fails unbroken catches nothing
        if not passes(ROOT, tests):
            sys.exit(f"{tests} fails on the tree as it is")
    alive = []
    for mutant in chosen:
        lives = survives(mutant)
        print(f"{'SURVIVES' if lives else 'caught'}  {mutant.name}", flush=True)
        alive += [mutant.name] * lives
    print(f"{len(chosen) - len(alive)} of {len(chosen)} caught")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
