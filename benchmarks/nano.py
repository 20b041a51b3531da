"""A model of 1.3 million parameters that adds as a careless pupil does, made in a few minutes and kept in the cache.

Task: reasoning-gym's basic_arithmetic, sums of 2, 3, 4, 6 and 8 numbers of one digit: five grades. The warm start shows
running sums ("7 15 21": the last number is the answer) of a pupil who slips at some steps, and more often than not
forgets the carry. So the model knows what is right, easy grades mostly come out right and hard ones mostly wrong, and
the likeliest answer to a carry is a wrong one: a policy that loses its entropy early never learns better. What follows
is reinforcement learning on the gym's own verifier, which sees the answer alone.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from e3fast.demo_model import cache_folder

GRADES = (2, 3, 4, 6, 8)  # terms
SHAPE: dict[str, Any] = dict(
    hidden_size=160,
    intermediate_size=448,
    num_hidden_layers=4,
    num_attention_heads=5,
    num_key_value_heads=5,
    head_dim=32,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=0,
)
VOCAB = ("<end>", "Calculate", "+", ".", "_", *map(str, range(10)))  # "_" stands between numbers of a completion
LARGEST = 10  # term
SLIP, CARRY_SLIP, FORGET = 0.12, 0.2, 0.45  # chances: of a random error, of one at a carry, of forgetting the carry
STEPS, BATCH, LEARNING_RATE, SEED = 1200, 128, 2e-3, 1
TEMPLATE = "{{ messages[-1]['content'] }}"


def grade_options(terms: int) -> dict[str, Any]:
    """Options of gym:basic_arithmetic."""
    return dict(
        min_terms=terms, max_terms=terms, min_digits=1, max_digits=1, operators=["+"], allow_parentheses=False,
        allow_negation=False, format_style="simple",
    )  # fmt: skip


def make_tokenizer() -> Any:
    """A token for each digit and sign; completions decode to digits and spaces."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCAB)}, unk_token="."))
    core.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.Split(Regex("Calculate|[+._0-9]"), "isolated")]
    )
    core.decoder = decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()])  # pyright: ignore
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def trace(terms: list[int], rng: np.random.Generator) -> str:
    """The pupil's running sums, the answer last; an error is carried on."""
    total, said = terms[0], []
    for term in terms[1:]:
        total = pupil_adds(total, term, float(rng.random()), int(rng.choice((-3, -2, -1, 1, 2, 3))))
        said.append(str(total))
    return "_".join(said)


def pupil_adds(total: int, term: int, luck: float, error: int) -> int:
    right = total + term
    carry = total % 10 + term >= 10
    if luck < (CARRY_SLIP if carry else SLIP):
        return max(right + error, 0)
    return right - 10 if carry and luck > 1 - FORGET else right


def examples(tokenizer: Any, num: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Token ids and targets, (num, T); -100 where nothing is asked."""
    rows = []
    for _ in range(num):
        terms = rng.integers(0, LARGEST + 1, rng.choice(GRADES)).tolist()
        question = tokenizer.encode(f"Calculate {' + '.join(map(str, terms))}.")
        rows.append((question, [*tokenizer.encode(trace(terms, rng)), 0]))
    longest = max(len(q) + len(a) for q, a in rows)
    ids = torch.zeros(num, longest, dtype=torch.int64)
    targets = torch.full((num, longest), -100)
    for i, (question, answer) in enumerate(rows):
        ids[i, : len(question) + len(answer)] = torch.tensor(question + answer)
        targets[i, len(question) - 1 : len(question) + len(answer) - 1] = torch.tensor(answer)
    return ids, targets


def warm_start(tokenizer: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(VOCAB), **SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    rng = np.random.default_rng(SEED)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 50, (STEPS - step) / (0.3 * STEPS))
        ids, targets = examples(tokenizer, BATCH, rng)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"warm start: step {step} of {STEPS}, loss {loss.item():.3f}", flush=True)
    return model.eval()


def nano_checkpoint() -> Path:
    """Folder of the model; trained at the first call. The same recipe gives the same folder."""
    recipe = (SHAPE, VOCAB, GRADES, LARGEST, SLIP, CARRY_SLIP, FORGET, STEPS, BATCH, LEARNING_RATE, SEED)
    target = cache_folder() / f"nano-{hashlib.blake2b(repr(recipe).encode(), digest_size=6).hexdigest()}"
    if not (target / "config.json").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = make_tokenizer()
        scratch = Path(tempfile.mkdtemp(dir=target.parent))
        warm_start(tokenizer).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
    return target
