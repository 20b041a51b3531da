"""Exploration methods by their run-file names."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from typing import Any

from e3fast.methods.base import Method, check_methods
from e3fast.methods.combinations import check_combination, combination_notes
from e3fast.methods.e3 import EntropyTemperature, RolloutBudget
from e3fast.methods.expo import AccuracyKL, GaussianCurriculum
from e3fast.methods.leeps import PortfolioSampler
from e3fast.methods.lope import LoremRetry
from e3fast.methods.selection import DynamicSampling, FixedTemperature, PosteriorSampler, SkipTrivial
from e3fast.methods.three_po import PerturbedWeights
from e3fast.tables import build_table

METHODS: dict[str, type[Method]] = {
    "rollout_budget": RolloutBudget,
    "entropy_temperature": EntropyTemperature,
    "perturbed_weights": PerturbedWeights,
    "lorem_retry": LoremRetry,
    "portfolio_sampler": PortfolioSampler,
    "accuracy_kl": AccuracyKL,
    "gaussian_curriculum": GaussianCurriculum,
    "dynamic_sampling": DynamicSampling,
    "skip_trivial": SkipTrivial,
    "posterior_sampler": PosteriorSampler,
    "fixed_temperature": FixedTemperature,
}


def find_method(name: str) -> type[Method]:
    """The class a run file names: a known name, or "package.module:Class" for one's own."""
    if name in METHODS:
        return METHODS[name]
    if ":" not in name:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown method {name!r}; {hint}known: {', '.join(METHODS)}, or 'package.module:Class'")
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot load method {name!r}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ValueError(f"method {name!r} is not a subclass of e3fast.Method")
    return found


def make_method(table: dict[str, Any]) -> Method:
    """A method from its [[methods]] table: `name` and knobs. Unknown or mistyped knobs are ValueErrors."""
    knobs = dict(table)
    name = knobs.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f"each [[methods]] table needs a name, one of {', '.join(METHODS)}; got {name!r}")
    return build_table(find_method(name), knobs, f"methods.{name}")


def method_table(method: Method) -> dict[str, Any]:
    """The inverse of `make_method`: the table that makes this method."""
    names = {cls: name for name, cls in METHODS.items()}
    cls = type(method)
    knobs = {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.init}
    return {"name": names.get(cls, f"{cls.__module__}:{cls.__qualname__}"), **knobs}


__all__ = [
    "METHODS",
    "AccuracyKL",
    "DynamicSampling",
    "EntropyTemperature",
    "FixedTemperature",
    "GaussianCurriculum",
    "LoremRetry",
    "Method",
    "PerturbedWeights",
    "PortfolioSampler",
    "PosteriorSampler",
    "RolloutBudget",
    "SkipTrivial",
    "check_combination",
    "check_methods",
    "combination_notes",
    "make_method",
    "method_table",
]
