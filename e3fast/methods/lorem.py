"""Meaningless words to put before a question: ordinary Latin, none with a mathematical sense."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from e3fast.streams import stream_key, uniforms

LATIN = """
acies aetas ager agmen ala amnis annus aqua arbor argentum arma ars arx astrum audax aura aurum avis barba bellum
brevis caelum campus candidus canis cantus caput carmen castra causa celer cera cervus cibus cinis civis clamor
classis clavis collis color comes corona corpus cura currus custos decus dies digitus domus dulcis ensis equus faber
fabula facies fama familia fatum felix ferrum festus fides filum flamma flos fluctus flumen foedus folium fons fortis
frater frigus frons fructus fuga fulmen fumus funis gaudium gemma genus gladius gloria gratia gravis grex harena herba
hiems honor hora hortus hospes hostis humus ignis imago imber insula iter iugum iustus lacus lapis laurus lectus leo
levis lignum limen lingua litus longus luna lupus lux mare mater mensa mensis miles mons mora mundus murus musa navis
nemus nidus nox nubes nuntius oculus olea onus otium panis pastor pater pax pectus pinus piscis portus pratum puella
puer pulvis quercus ramus regnum ripa rosa rota sal saxum scutum semen silva sol somnus spes stella tabula templum
terra turris umbra unda urbs ventus verbum vesper via vicus vinum virtus vita vox
"""
WORDS = tuple(LATIN.split())
LEAST_WORDS = 20  # of a file: fewer repeat too often to be a random text


@cache
def word_list(path: str | None) -> tuple[str, ...]:
    """The words of a text file, one a line; the built-in ones without a file. ValueError if it does not serve."""
    if path is None:
        return WORDS
    try:
        words = tuple(line.strip() for line in Path(path).read_text().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read words file {path!r}: {error}") from None
    if len(words) < LEAST_WORDS:
        raise ValueError(f"words file {path!r} has {len(words)} words, needs at least {LEAST_WORDS}")
    return words


def lorem(
    seed: int, step: int, index: int, prompt_id: str, low: int, high: int, vocabulary: Sequence[str] = WORDS
) -> list[str]:
    """Between `low` and `high` random words, both included: text number `index` of a prompt in a step."""
    u = uniforms(stream_key(seed, "lorem", step, index, prompt_id), np.arange(high + 1))
    count = low + int(u[0] * (high - low + 1))
    return [vocabulary[int(x * len(vocabulary))] for x in u[1 : count + 1]]
