"""The list of mutants follows the kernels: each term to be taken out is there."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_mutant_finds_its_term():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    mutants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    for mutant in mutants.MUTANTS:
        assert mutant.old in (ROOT / "csrc_triton" / mutant.file).read_text(), mutant.name
