"""The pages of docs/methods say what the code has: a page a method, every knob of it, and every combination rule."""

from dataclasses import fields
from pathlib import Path

import pytest

from e3fast.methods import METHODS

DOCS = Path(__file__).parents[1] / "docs" / "methods"


@pytest.mark.parametrize("name", METHODS)
def test_a_page_names_every_knob_and_no_other(name):
    text = (DOCS / f"{name}.md").read_text()
    assert f'name = "{name}"' in text
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {knob.strip("` ") for cell in cells for knob in cell.split(",")}
    assert named == {f.name for f in fields(METHODS[name]) if f.init}


def test_the_index_links_every_page():
    index = (DOCS / "README.md").read_text()
    assert all(f"({path.name})" in index for path in DOCS.glob("*.md") if path.name != "README.md")


def test_links_lead_somewhere():
    for page in [*DOCS.glob("*.md"), DOCS.parents[1] / "README.md"]:
        for part in page.read_text().split("](")[1:]:
            target = part.split(")")[0]
            if not target.startswith(("http", "#")):
                assert (page.parent / target.split("#")[0]).exists(), f"{page.name}: {target}"
