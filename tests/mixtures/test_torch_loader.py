"""PyTorch's DataLoader over a plan: the plain loader's batches, whatever the workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gristmill.mixtures.mixture import Mixture
from gristmill.mixtures.plan import Plan

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

from gristmill.mixtures.torch_loader import IGNORED, BatchStream, WindowDataset  # noqa: E402


@pytest.fixture
def plan(tokens: Any) -> Plan:
    return Mixture(name="m", sources={"docs": 0.6, "code": 0.4}, max_epochs=9).plan(tokens, 16, 50 * 16, seed=1)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_any_number_of_workers_gives_the_plain_batches(plan: Plan, workers: int) -> None:
    stream = BatchStream(plan, rank=1, world_size=2, batch_windows=8, start_window=3)
    batches = list(DataLoader(stream, batch_size=None, num_workers=workers))
    plain = list(plan.loader(1, 2, 8, 3))
    assert [b["next_window"] for b in batches] == [b.next_window for b in plain]
    for ours, theirs in zip(batches, plain, strict=True):
        assert (ours["tokens"].numpy() == theirs.tokens).all()
        assert (ours["position"].numpy() == theirs.position).all()


def test_targets_stop_at_documents(plan: Plan) -> None:
    for batch in BatchStream(plan, 0, 1, 10):
        tokens, targets, documents = batch["tokens"], batch["targets"], batch["documents"]
        same = documents[:, 1:] == documents[:, :-1]
        assert (targets[same] == tokens[:, 1:][same]).all()
        assert (targets[~same] == IGNORED).all()
        # In the test shards EOS is 0 and ends each document: only a target that would follow it is left out.
        assert (same == (tokens[:, :-1] != 0)).all()


def test_map_style_is_random_access(plan: Plan) -> None:
    data = WindowDataset(plan)
    whole = np.concatenate([b.tokens for b in plan.loader(batch_windows=10)])
    assert len(data) == 50
    assert (data[17]["tokens"].numpy() == whole[17]).all()
    batches = list(DataLoader(data, batch_size=8, sampler=range(20, 50)))
    assert (torch.cat([b["tokens"] for b in batches]).numpy() == whole[20:]).all()
    assert batches[-1]["next_window"].tolist()[-1] == 50
    with pytest.raises(IndexError, match="outside the run"):
        data[50]
