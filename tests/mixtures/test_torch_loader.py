"""PyTorch's DataLoader over a plan: the plain loader's batches, whatever the workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gristmill.mixtures.mixture import Mixture
from gristmill.mixtures.plan import Plan

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

from gristmill.mixtures.torch_loader import (  # noqa: E402
    IGNORED,
    BatchStream,
    StatefulBatches,
    WindowDataset,
    hugging_face_batch,
)


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


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_is_one_integer_for_any_world_size(plan: Plan, workers: int) -> None:
    whole = np.concatenate([b.tokens for b in plan.loader(batch_windows=10)])
    first = StatefulBatches(plan, 0, 1, 10, num_workers=workers)
    steps = iter(first)
    for _ in range(2):
        inputs, labels = next(steps)
    assert (inputs["input"].numpy() == whole[10:20, :-1]).all()
    assert (labels[labels != IGNORED].numpy() == whole[10:20, 1:][(labels != IGNORED).numpy()]).all()
    assert first.state_dict() == {"next_window": 20}
    ranks = [StatefulBatches(plan, rank, 3, 6, num_workers=workers) for rank in range(3)]
    for rank in ranks:
        rank.load_state_dict(first.state_dict())
    rest = [inputs["input"].numpy() for step in zip(*ranks, strict=True) for inputs, _ in step]
    assert (np.concatenate(rest) == whole[20:, :-1]).all()
    assert {rank.state_dict()["next_window"] for rank in ranks} == {50}


def test_map_style_is_random_access(plan: Plan) -> None:
    data = WindowDataset(plan)
    whole = np.concatenate([b.tokens for b in plan.loader(batch_windows=10)])
    assert len(data) == 50
    assert (data[17]["tokens"].numpy() == whole[17]).all()
    batches = list(DataLoader(WindowDataset(plan, start_window=20), batch_size=8))
    assert (torch.cat([b["tokens"] for b in batches]).numpy() == whole[20:]).all()
    assert batches[-1]["next_window"].tolist()[-1] == 50
    with pytest.raises(IndexError, match="Window 50 is outside the data set, which has 50"):
        data[50]


def test_hugging_face_trainer_trains_on_the_plan_in_order(plan: Plan, tmp_path: Any) -> None:
    import transformers
    from torch.utils.data import SequentialSampler

    seen: list[int] = []

    class InOrder(transformers.Trainer):  # type: ignore[name-defined, misc]
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        seen.extend(int(item["position"]) for item in items)
        return hugging_face_batch(items)

    config = transformers.LlamaConfig(
        vocab_size=60_000, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=3,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = InOrder(
        transformers.LlamaForCausalLM(config),
        arguments,
        train_dataset=WindowDataset(plan, start_window=5),
        data_collator=collate,
    )
    result = trainer.train()
    assert seen[:12] == list(range(5, 17))
    assert result.global_step == 3


def test_hugging_face_labels_are_the_targets_after_their_shift(plan: Plan) -> None:
    data = WindowDataset(plan)
    batch = hugging_face_batch([data[i] for i in range(6)])
    assert batch["input_ids"].shape == batch["labels"].shape == (6, 17)
    for i in range(6):
        assert (batch["labels"][i, 1:] == data[i]["targets"]).all()
