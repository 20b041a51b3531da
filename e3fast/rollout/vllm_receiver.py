"""The end of a weight hand-over inside vLLM's worker: a back end of its weight-transfer interface."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from e3fast.rollout.transfer import compare_checksums, fetch


@dataclass
class NoInfo(WeightTransferInitInfo):
    pass


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """All weights of one hand-over."""

    weights: Iterable[tuple[str, Tensor]] = ()  # where learner and engine share a machine
    source: tuple[str, int, str, float] | None = None  # host, port, token, deadline: where they do not
    checksums: dict[str, int] = field(default_factory=dict)


class Receiver(WeightTransferEngine[NoInfo, UpdateInfo]):
    init_info_cls = NoInfo
    update_info_cls = UpdateInfo

    checksums: dict[str, int]

    def init_transfer_engine(self, init_info: NoInfo) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.checksums = update_info.checksums
        self.model.load_weights(fetch(*update_info.source) if update_info.source else update_info.weights)

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_tied_head(self.model)
        compare_checksums(dict(self.model.named_parameters()), self.checksums)

    def shutdown(self) -> None: ...


def refresh_tied_head(model: Any) -> None:
    """Pack the head again where it is the embedding's.

    A layer-wise reload works the embedding through, but a CPU head multiplies with a packed copy of its own, made when
    the model was built (vLLM 0.32): without this it samples with the old weights, and says nothing.
    """
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is not None and embedding is not None and head.weight is embedding.weight:
        head.quant_method.process_weights_after_loading(head)
