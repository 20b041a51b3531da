"""How other trainers schedule samples into micro-batches: their rules, read in their code of August 2026, in our words.

A scheduler takes (lengths, ranks, cap, cost coefficients) and gives bins[rank][slot] of sample indices. All ranks meet
in a slot; one with fewer slots waits, and filler costs nothing here. The order of a rank's bins is the project's own.
"""

from __future__ import annotations

from benchmarks.schedulers_fit import Scheduler, areal, nemo_rl, skyrl, slime, torchtitan, trl_async
from benchmarks.schedulers_kk import openrlhf, prime_rl, slime_kk, verl, verl_strict

PEERS: dict[str, Scheduler] = {
    "verl": verl,
    "verl-strict": verl_strict,
    "openrlhf": openrlhf,
    "slime-rr": slime,
    "slime-kk": slime_kk,
    "prime-rl": prime_rl,
    "nemo-rl": nemo_rl,
    "skyrl": skyrl,
    "areal": areal,
    "trl-async": trl_async,
    "torchtitan": torchtitan,
}
