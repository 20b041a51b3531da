"""Loss and gradient are the same on one rank and on several, however the samples fall on them."""

import os
import subprocess
import sys

import pytest
import torch

from e3fast.learner import LocalLearner
from e3fast.objective import loss_weights, token_loss
from e3fast.packing import pack
from e3fast.totals import Totals
from e3fast.types import LossParams
from tests.samples import make_samples
from tests.tiny import make_model

SHAPE = [(6, [3, 9, 4]), (2, [7, 7]), (11, [2, 5, 8, 1]), (4, [6, 12]), (9, [1])]
LOSSES = [LossParams(aggregation=a) for a in ("token", "sequence", "group", "constant")] + [
    LossParams(group_weight="prompt")
]


def make_batch(loss, num_ranks, cap, sharing=True):
    samples = make_samples(SHAPE, zero_groups={1})
    return pack(samples, loss_weights(samples, loss, 16), cap, num_ranks, sharing=sharing)


def one_rank(batch, rank, loss):
    """(loss, gradient) of one rank's micro-batches in fp64."""
    model = make_model(torch.float64)
    learner = LocalLearner.__new__(LocalLearner)  # gradients alone: no masters, which would round fp64
    learner.model, learner.device = model, torch.device("cpu")
    totals = Totals()
    for micro_batch in batch.micro_batches[rank]:
        learner.backward(micro_batch, token_loss(loss), totals)
    return totals.loss, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.aggregation}-{loss.group_weight}")
@pytest.mark.parametrize("sharing", [False, True])
def test_ranks_add_up_to_one(loss, sharing):
    want_loss, want = one_rank(make_batch(loss, 1, 10_000, sharing), 0, loss)
    for num_ranks, cap in ((2, 31), (2, 200), (4, 24), (4, 90)):
        batch = make_batch(loss, num_ranks, cap, sharing)
        found = [one_rank(batch, rank, loss) for rank in range(num_ranks)]
        assert len({len(rank) for rank in batch.micro_batches}) == 1
        assert sum(part for part, _ in found) == pytest.approx(want_loss, rel=1e-6)
        assert float((sum(part for _, part in found) - want).norm() / want.norm()) < 1e-6


def test_filler_adds_nothing():
    """More ranks than samples: some hold one token that asks for nothing, and their gradients are exactly zero."""
    loss, samples = LossParams(), make_samples([(4, [5])])
    batch = pack(samples, loss_weights(samples, loss, 16), 90, 3)
    for rank in (1, 2):
        value, gradient = one_rank(batch, rank, loss)
        assert value == 0.0 and not gradient.any()


RANK = """
import sys, torch, torch.distributed as dist
from tests.test_learner_ranks import *
rank, num_ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_ranks)
loss = LOSSES[1]
value, gradient = one_rank(make_batch(loss, num_ranks, 31), rank, loss)
total = torch.cat([torch.tensor([value], dtype=torch.float64), gradient])
dist.all_reduce(total)
if rank == 0:
    want_loss, want = one_rank(make_batch(loss, 1, 10_000), 0, loss)
    print(abs(float(total[0]) / want_loss - 1), float((total[1:] - want).norm() / want.norm()))
dist.destroy_process_group()
"""


def test_two_processes_over_gloo(tmp_path):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), "2", str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    assert all(float(error) < 1e-6 for error in printed[0].split())
