"""The held-out choice is fixed by the seed and touches every source."""

from e3fast.session import choose
from tests.records import prompt


def test_held_out_choice():
    prompts = [prompt(row) for row in range(200)]
    chosen = choose(prompts, 50, seed=3)
    rows = [p.row for p in chosen]
    assert len(set(rows)) == 50 and rows == sorted(rows) and chosen == choose(prompts, 50, seed=3)
    assert 15 < sum(row < 100 for row in rows) < 35
    assert choose(prompts, 500, seed=3) == prompts and choose(prompts, 0, seed=3) == []
