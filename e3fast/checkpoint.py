"""Saving and loading a run.

Written beside, then moved into place whole, so a crash leaves the old checkpoint or the new.

A checkpoint folder holds `model/`, a Hugging Face folder that any tool loads; `learner.pt`, masters and optimizer; and
`state.json`, everything else a resumed run needs.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

FORMAT = 4


def save_checkpoint(
    folder: Path, model: Any, tokenizer: Any, learner_state: dict[str, Any], state: dict[str, Any]
) -> None:
    """Replace `folder` atomically. An OSError (a full disk) leaves the checkpoint that was there."""
    scratch, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        model.save_pretrained(scratch / "model")
        tokenizer.save_pretrained(scratch / "model")
        torch.save(learner_state, scratch / "learner.pt")
        (scratch / "state.json").write_text(json.dumps({"format": FORMAT, **state}))
        sync_folder(scratch)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(scratch, folder)
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    for path in folder.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def load_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(learner state, the rest). ValueError where there is none, or one of another format.

    Never runs code from the file.
    """
    if not folder.exists() and folder.with_name(folder.name + ".old").exists():
        os.replace(folder.with_name(folder.name + ".old"), folder)  # the crash fell between the two moves
    try:
        state = json.loads((folder / "state.json").read_text())
        if state.pop("format", None) != FORMAT:
            raise ValueError(f"{folder} has another format than this version of e3fast reads ({FORMAT})")
        return torch.load(folder / "learner.pt", map_location="cpu", weights_only=True), state
    except FileNotFoundError as error:
        raise ValueError(f"nothing to resume: {error.filename} does not exist; start without --resume") from None
