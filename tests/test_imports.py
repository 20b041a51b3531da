"""The import rule: imports point only toward the front of the list; bare packages stay bare; files stay small."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = [  # each may import those before it, and its own layer
    {"csrc_triton", "e3fast.types", "e3fast.streams", "e3fast.tables", "e3fast.noise", "e3fast.ivon"},
    {"e3fast.methods"},
    {"e3fast.config"},
    {"e3fast.advantages", "e3fast.objective", "e3fast.rewards", "e3fast.sources", "e3fast.prompts"},
    {"e3fast.costs", "e3fast.placement", "e3fast.planning", "e3fast.packing"},
    {"e3fast.machine", "e3fast.config_text", "e3fast.metrics", "e3fast.runlog", "e3fast.progress", "e3fast.report"},
    {"e3fast.memory", "e3fast.demo_model", "e3fast.attention", "e3fast.model", "e3fast.rollout"},
    {"e3fast.stopwatch", "e3fast.totals", "e3fast.latents", "e3fast.draws", "e3fast.learner"},
    {"e3fast.checkpoint", "e3fast.allocator", "e3fast.trials", "e3fast.agreement"},
    {"e3fast.evaluate", "e3fast.requests"},
    {"e3fast.session"},
    {"e3fast.train"},
    {"e3fast.cli"},
]


def layer(module):
    for i, members in enumerate(LAYERS):
        if any(module == m or module.startswith((m + ".", m + "_")) for m in members):
            return i
    raise AssertionError(f"{module} stands in no layer of tests/test_imports.py")


def modules():
    for package in ("e3fast", "csrc_triton"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if name != "e3fast":
                yield name, path


def ours(path):
    """Modules of ours that a file imports at run time (not for types alone)."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in names if name and name.split(".")[0] in ("e3fast", "csrc_triton"))


def test_imports_point_to_the_front():
    for name, path in modules():
        for used in ours(path):
            if used == "e3fast":
                continue
            assert layer(used) <= layer(name), f"{name} imports {used}"


def test_kernels_import_nothing_of_the_trainer():
    for name, path in modules():
        if name.startswith("csrc_triton") or name in ("e3fast.types", "e3fast.streams", "e3fast.tables"):
            assert all(used.startswith("csrc_triton") and name.startswith("csrc_triton") for used in ours(path)), name


def test_vllm_is_named_in_two_files():
    """One release of vLLM after another renames things: what we use of it is to be found at once (trl#4617)."""
    found = {
        name
        for name, path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(
            m.split(".")[0] == "vllm"
            for m in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        )
    }
    assert found == {f"e3fast.rollout.vllm_{name}" for name in ("api", "receiver", "prompts")}


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_package_imports_with_torch_alone():
    heavy = "transformers datasets vllm ray reasoning_gym math_verify plotly triton pyarrow"
    code = (
        f"import sys, e3fast; e3fast.linear_grpo_loss, e3fast.pack, e3fast.Method; "
        f"print([m for m in '{heavy}'.split() if m in sys.modules])"
    )
    assert run(code) == "[]"


def test_a_reward_worker_does_not_load_torch():
    assert run("import sys, e3fast.rewards; print('torch' in sys.modules)") == "False"


def test_files_stay_small():
    for name, path in modules():
        assert len(path.read_text().splitlines()) <= 400, name
