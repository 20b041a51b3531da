"""Which methods go together. What is not refused here combines by the seam's own rules.

Two owners of one thing, and a wrong order, are refused in base.py; this is the rest, pair by pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from e3fast.methods.base import Method, check_methods
from e3fast.methods.e3 import EntropyTemperature, RolloutBudget
from e3fast.methods.expo import AccuracyKL
from e3fast.methods.lope import LoremRetry
from e3fast.methods.three_po import PerturbedWeights

if TYPE_CHECKING:
    from e3fast.config import RunConfig

Kind = TypeVar("Kind", bound=Method)


def check_combination(config: RunConfig) -> None:
    """ValueError where two parts of a run contradict each other: it names both and what to remove."""
    check_methods(config.methods)
    check_selection(config.methods)
    check_kl(config)
    perturbed, retry = find(config, PerturbedWeights), find(config, LoremRetry)
    if retry and perturbed and perturbed.variant == "m3po":
        raise ValueError("LoremRetry and PerturbedWeights 'm3po': a rescue belongs to no draw's group; remove one")
    if config.loss.importance_band and not config.start_loss().corrected:
        raise ValueError("loss.importance_band does nothing while loss.importance_sampling is off: remove one")
    if config.train.optimizer == "ivon" and not (perturbed and perturbed.ivon):
        raise ValueError('train.optimizer "ivon" needs the method perturbed_weights with posterior = "ivon"')


def check_selection(methods: Sequence[Method]) -> None:
    """A method that names each prompt of a step admits no second factor."""
    chooser = next((method for method in methods if "selection" in method.owns), None)
    other = next((method for method in methods if weighs(method) and method is not chooser), None)
    if chooser and other:
        a, b = type(chooser).__name__, type(other).__name__
        raise ValueError(f"{a} and {b} both weigh prompts, and the first admits no other: remove one")


def check_kl(config: RunConfig) -> None:
    beta, kl, perturbed = config.loss.beta, find(config, AccuracyKL), find(config, PerturbedWeights)
    if kl and beta:
        raise ValueError(f"loss.beta={beta:g} and accuracy_kl both set the KL weight: remove one")
    if kl and perturbed:
        raise ValueError("AccuracyKL and PerturbedWeights: the second has its own prior in place of a KL; remove one")
    correction = config.loss.importance_sampling
    if perturbed and perturbed.band is not None and correction in ("token", "sequence"):
        raise ValueError(
            f"PerturbedWeights '{perturbed.variant}' masks by the ratio that loss.importance_sampling = {correction!r} "
            "corrects: remove one"
        )
    for name in ("beta", "entropy_bonus"):
        if perturbed and getattr(config.loss, name):
            raise ValueError(f"PerturbedWeights goes without loss.{name}: remove one")


def combination_notes(config: RunConfig) -> list[str]:
    """What to tell the user of pairs that run."""
    budget, temperature = find(config, RolloutBudget), find(config, EntropyTemperature)
    perturbed, retry, kl = find(config, PerturbedWeights), find(config, LoremRetry), find(config, AccuracyKL)
    notes = []
    if budget:
        others = [type(method).__name__ for method in config.methods if weighs(method)]
        notes += [f"RolloutBudget and {other} both act on difficulty" for other in others]
    if temperature and perturbed:
        notes.append("EntropyTemperature and PerturbedWeights both widen exploration")
    if retry and (kl or config.loss.beta):
        notes.append("LoremRetry with a KL term: rescue rows get it too; LoPE's source uses none")
    return notes


def weighs(method: Method) -> bool:
    return type(method).weigh is not Method.weigh


def find(config: RunConfig, kind: type[Kind]) -> Kind | None:
    return next((method for method in config.methods if isinstance(method, kind)), None)
