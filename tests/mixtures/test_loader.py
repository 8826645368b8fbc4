"""Loaders: the same global order for every world size and batch split, resumed anywhere, with document boundaries."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gristmill.mixtures.loader import Batch, Loader
from gristmill.mixtures.mixture import Mixture
from gristmill.mixtures.plan import MixtureError, Plan
from gristmill.tokenize import shards
from gristmill.tokenize.shards import TokenError, TokenSet

WEIGHTS = {"docs": 0.5, "code": 0.3, "readmes": 0.2}


def plan_of(tokens: Any, windows: int = 100, seq_len: int = 16, seed: int = 3) -> Plan:
    mixture = Mixture(name="m", sources=WEIGHTS, max_epochs=20)
    return mixture.plan(tokens, seq_len, windows * seq_len, seed)


def together(parts: list[Batch]) -> np.ndarray:
    return np.concatenate([part.tokens for part in parts])


def test_worked_example(tokens: Any) -> None:
    plan = plan_of(tokens, windows=4)
    (batch,) = plan.loader(batch_windows=4)
    assert batch.tokens.dtype == np.int64
    assert batch.tokens.shape == (4, 17)
    for i in range(4):
        name, epoch, window = plan.locate(i)
        assert (plan.sources[batch.source[i]], batch.epoch[i], batch.window[i]) == (name, epoch, window)
        # By the rule of the test shards: token at place p of source number s is 1 + 20,000 s + p, or EOS.
        expected = 1 + 20_000 * list(WEIGHTS).index(name) + window * 16 + np.arange(17)
        assert ((batch.tokens[i] == expected) | (batch.tokens[i] == 0)).all()
    assert batch.next_window == 4
    assert batch.position.tolist() == [0, 1, 2, 3]


def test_documents_are_numbered_from_stored_boundaries(make_tokens: Callable[..., Any]) -> None:
    tokens = make_tokens({"docs": [[5, 3], [4, 9]]})
    plan = Mixture(name="m", sources={"docs": 1}, max_epochs=1).plan(tokens, 10, 20)
    by_window = {int(b.window[0]): b for b in plan.loader()}
    # Documents begin at 0, 5, 8 and 12; window 0 is places 0 to 10, window 1 places 10 to 20.
    assert by_window[0].starts[0].tolist() == [0, 5, 8]
    assert by_window[0].documents.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2]]
    assert by_window[1].starts[0].tolist() == [2]
    assert by_window[1].documents.tolist() == [[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]]
    # The last token of window 0 is the first of window 1: every token but the source's first is a target once.
    assert by_window[0].tokens[0, -1] == by_window[1].tokens[0, 0]


@pytest.mark.parametrize("seq_len", [5, 16, 120])
def test_documents_are_those_of_the_starts(tokens: Any, seq_len: int) -> None:
    plan = plan_of(tokens, windows=60 if seq_len < 100 else 10, seq_len=seq_len)
    for batch in plan.loader(batch_windows=12):
        for row, starts in zip(batch.documents, batch.starts, strict=True):
            rises = np.flatnonzero(np.diff(row)) + 1
            assert row[0] == 0
            assert rises.tolist() == [s for s in starts.tolist() if s > 0]
            assert set(np.diff(row)) <= {0, 1}


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_windows", [1, 5, 16, 100, 130])
def test_every_world_size_and_split_gives_the_same_order(tokens: Any, world_size: int, batch_windows: int) -> None:
    plan = plan_of(tokens)
    whole = together(list(plan.loader(batch_windows=7)))
    ranks = [list(plan.loader(rank, world_size, batch_windows)) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {len(plan.loader(0, world_size, batch_windows))}
    assert (together([batch for step in zip(*ranks, strict=True) for batch in step]) == whole).all()
    for step in zip(*ranks, strict=True):
        assert len({batch.next_window for batch in step}) == 1
        sizes = [len(batch.tokens) for batch in step]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("start", [0, 1, 37, 99, 100])
def test_resume_at_any_sample_on_any_world_size(tokens: Any, start: int) -> None:
    plan = plan_of(tokens)
    whole = together(list(plan.loader(batch_windows=10)))
    rest = [b for step in zip(*[plan.loader(r, 3, 8, start) for r in range(3)], strict=True) for b in step]
    got = together(rest) if rest else np.zeros((0, 17), np.int64)
    assert (got == whole[start:]).all()
    assert len(got) == 100 - start


def test_tokens_may_stay_narrow(tokens: Any) -> None:
    plan = plan_of(tokens)
    narrow = next(iter(plan.loader(batch_windows=9, dtype=np.uint16)))
    assert narrow.tokens.dtype == np.uint16
    assert (narrow.tokens == next(iter(plan.loader(batch_windows=9))).tokens).all()


def test_a_changed_bit_is_refused_by_the_windows_that_read_it(
    make_tokens: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a set that is too large to be read by all who open it."""
    monkeypatch.setattr(shards, "CHECKED_BYTES", 1_000)
    lengths = [500] * 70  # 70,000 bytes: two blocks of 64 KiB
    tokens = make_tokens({"docs": [lengths], "code": [[400] * 10], "readmes": [[2000]]})
    plan = plan_of(tokens, windows=1400)
    path = tokens.folder / "part-00000.bin"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))
    for group in (1, 16):  # window by window, and many at a time
        broken, read = 0, 0
        loader = plan_of(TokenSet.open(tokens.folder), windows=1400).loader(batch_windows=group)
        for at in range(0, 1400, group):
            place = [plan.locate(i) for i in range(at, min(at + group, 1400))]
            touched = any(plan.sources[0] == name and (window + 1) * 16 + 1 > 32_768 for name, _, window in place)
            if touched:
                with pytest.raises(TokenError, match=r"part-00000\.bin: the checksum of a block .* documents 65 to 69"):
                    loader.batch(at)
                broken += 1
            else:
                loader.batch(at)
                read += 1
        assert broken
        assert read


def test_windows_across_shards_are_whole(tokens: Any) -> None:
    plan = Mixture(name="m", sources={"docs": 1}).plan(tokens, 64, 15 * 64)
    windows = {int(b.window[0]): b.tokens[0] for b in plan.loader()}
    assert sorted(windows) == list(range(15))  # (1000 - 1) // 64
    crossing = windows[7]  # places 448 to 512; the second shard begins at 500
    expected = 1 + 448 + np.arange(65)
    expected[499 - 448] = 0
    assert (crossing == expected).all()


@pytest.mark.parametrize("seq_len", [20, 24, 499])
def test_windows_that_end_at_the_edge_of_a_shard(tokens: Any, seq_len: int) -> None:
    # 1,000 tokens in two shards of 500. Windows of 21 may end one token past the edge (480 to 500), windows of 500 end
    # with the shard. All in one batch, so that addresses are used.
    windows = 999 // seq_len
    plan = Mixture(name="m", sources={"docs": 1}, max_epochs=20).plan(tokens, seq_len, max(windows, 10) * seq_len)
    (batch,) = plan.loader(batch_windows=plan.windows)
    for row, window in zip(batch.tokens, batch.window, strict=True):
        assert (row == tokens.sources["docs"].read(int(window) * seq_len, seq_len + 1)).all()


def test_plan_and_loader_can_be_pickled(tokens: Any) -> None:
    plan = plan_of(tokens)
    loader = plan.loader(batch_windows=10)
    first = together(list(loader))
    assert (together(list(pickle.loads(pickle.dumps(loader)))) == first).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 of world_size 2"),
        ({"batch_windows": 0}, "at least 1 window"),
        ({"start_window": 101}, "start_window is 101, but the plan has 100 windows"),
    ],
)
def test_impossible_numbers_are_refused(tokens: Any, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(MixtureError, match=message):
        Loader(plan_of(tokens), **arguments)


def test_a_plan_from_sizes_cannot_load() -> None:
    with pytest.raises(MixtureError, match="plan with a TokenSet"):
        plan_of({"docs": 1000, "code": 1000, "readmes": 1000}).loader()
