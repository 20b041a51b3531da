"""Fresh memory full of nan: a kernel that leaves a number unwritten, or reads one, is found out."""

import pytest
import torch


@pytest.fixture
def poisoned(monkeypatch):
    real = torch.empty

    def empty(*size, **options):
        fresh = real(*size, **options)
        return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch, "empty", empty)
