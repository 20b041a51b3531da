"""A group's prompt worked out once where vLLM's own prefix cache cannot share it: a KV connector inside one vLLM.

That cache holds whole blocks. On a CPU they are of 32 tokens, so each rollout works the rest of its prompt out again:
all of a prompt shorter than that. Here the first rollout of a prompt does, and those that come while it is under way
get a copy of its blocks and start at the prompt's last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus


@dataclass
class Copies(KVConnectorMetadata):
    """Blocks to copy before the next forward pass."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


class PromptSharing(KVConnectorBase_V1, SupportsHMA):
    """One object lives in the scheduler and decides, one in the worker and copies."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.block_size = self._vllm_config.cache_config.block_size
        self.leaders: dict[tuple[int, ...], Any] = {}  # prompt -> the request that works it out, or has
        self.copies = Copies()
        self.caches: list[Tensor] = []

    # ---- in the scheduler ----

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Prompt tokens that a leader has beyond those in the prefix cache; None: wait until it has them."""
        prompt = tuple(request.prompt_token_ids)
        leader = self.leaders.get(prompt)
        if leader is None or leader is request or leader.status != RequestStatus.RUNNING:
            self.leaders[prompt] = request
            return 0, False
        missing = len(prompt) - 1 - num_computed_tokens  # each works the last one out: its logits are wanted
        if leader.num_computed_tokens < len(prompt):
            return (None, False) if missing > 0 else (0, False)
        return max(missing, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        leader, last = self.leaders[tuple(request.prompt_token_ids)], len(request.prompt_token_ids) - 1
        own = slice((last - num_external_tokens) // self.block_size, -(-last // self.block_size))
        assert self._kv_cache_manager is not None
        for there, here in zip(
            self._kv_cache_manager.get_block_ids(leader.request_id), blocks.get_block_ids(), strict=True
        ):
            self.copies.sources += there[own]
            self.copies.targets += here[own]

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        found, self.copies = self.copies, Copies()
        return found

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, None]:
        prompt = tuple(request.prompt_token_ids)
        if self.leaders.get(prompt) is request:
            del self.leaders[prompt]
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids)

    # ---- in the worker ----

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Each layer's, (blocks, ...)."""
        self.caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **named: Any) -> None:
        copies = self._get_connector_metadata()
        assert isinstance(copies, Copies)
        if copies.sources:
            for cache in self.caches:
                cache[copies.targets] = cache[copies.sources]

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **named: Any) -> None: ...

    def wait_for_save(self) -> None: ...
