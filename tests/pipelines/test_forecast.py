"""The arithmetic of `gristmill plan` by hand, the pieces that a sample is cut into, and a plan beside the real run."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.pipelines.cli import main
from gristmill.pipelines.cli_plan import size
from gristmill.pipelines.forecast import Measured, Phase, Serial, Target, fixed, forecast, memory_mb, ratio
from gristmill.pipelines.forecast_run import clustering_mb
from gristmill.pipelines.forecast_sample import sample, targets
from gristmill.pipelines.forecast_show import hours
from gristmill.stages.ledger import StageLedger
from gristmill.stages.minhash import MinHash
from gristmill.stages.readers import read_batches
from gristmill.stages.shards import Shard


def measured(cpu_s: float, input_bytes: int, **more: object) -> Measured:
    return Measured("web", input_bytes, cpu_s, cpu_s, **more)  # type: ignore[arg-type]


def test_rate_and_interval_of_three_pieces_by_hand() -> None:
    # 12 s for 12 bytes: 1 s a byte. Residuals 1, -1, 0; error sqrt(3/2 * 2) / 12; t of 2 degrees is 2.920.
    found = ratio([5.0, 3.0, 4.0], [4, 4, 4])
    half = 2.920 * math.sqrt(1.5 * 2) / 12
    assert found.value == 1.0
    assert found.low == pytest.approx(1 - half)
    assert found.high == pytest.approx(1 + half)
    alone = ratio([5.0], [10])
    assert (alone.value, alone.low, alone.high, alone.known) == (0.5, 0.5, 0.5, False)
    with pytest.raises(ValueError, match="a rate cannot be taken"):
        ratio([1.0], [0])


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 10**9)), min_size=2, max_size=30), st.integers(1, 100))
def test_interval_holds_the_rate_and_is_none_for_equal_rates(pairs: list[tuple[float, int]], rate: int) -> None:
    found = ratio([cost for cost, _ in pairs], [bytes_ for _, bytes_ in pairs])
    assert 0 <= found.low <= found.value <= found.high
    even = ratio([float(rate * bytes_) for _, bytes_ in pairs], [bytes_ for _, bytes_ in pairs])
    assert even.high - even.low <= 1e-9 * even.value


def fake() -> Phase:
    """2 s a MB and 3 s a shard; the first piece loads for 7 s."""
    pieces = tuple(
        measured(
            3 + 2 * mb,
            mb * 1_000_000,
            documents=10 * mb,
            disk={"kept": 500_000 * mb},
            disk_shard=1_000,
            stages={"read": 1.0 * mb, "url": 0.5 * mb},
            peak_mb=300.0,
        )
        for mb in (10, 10)
    )
    small = measured(3.0 + 2.0, 1_000_000)
    return Phase("01-url", pieces, (measured(12.0, 1_000_000),), (small,))


def test_fixed_cost_is_told_from_the_cost_of_a_byte() -> None:
    start, per_shard = fixed(fake(), "web", lambda piece: piece.cpu_s)
    assert start == 7.0
    assert per_shard == pytest.approx(5 - 46 / 20)  # the rate it is taken with holds the shards' share: 2.3 s a MB
    assert fixed(Phase("x", fake().pieces), "web", lambda piece: piece.cpu_s) == (0.0, 0.0)


def test_a_forecast_by_hand() -> None:
    target = {"web": Target(bytes=1e9, shards=100, largest_bytes=1e7)}
    serial = Serial("02-minhash cluster", 3600.0, 3600.0, 900.0, 5e9, "10,000 documents")
    found = forecast([fake(), serial], target, workers=10, price=0.5)
    per_shard = 5 - 46 / 20
    rate = 2 * (23 - per_shard) / 20  # s a MB
    cpu = rate * 1000 + per_shard * 100
    first, second = found.phases
    assert first.cpu_h.value == pytest.approx((cpu + 7 * 10) / 3600)
    assert first.wall_h.value == pytest.approx((cpu / 10 + 7) / 3600)
    assert (first.serial, second.serial) == (False, True)
    assert found.documents.value == pytest.approx(1000 * 10)
    assert first.disk_gb.value == pytest.approx(0.5 + 100 * 1_000 / 1e9)
    assert first.disk == {"kept": pytest.approx(0.5)}
    assert found.disk_gb.value == pytest.approx(5.5001)
    assert found.serial_h == 1.0
    assert found.wall_h.value == pytest.approx(1 + (cpu / 10 + 7) / 3600)
    assert found.money is not None
    assert found.money.value == pytest.approx(found.wall_h.value * 10 * 0.5)
    assert found.memory_mb == 900.0
    shares = {row.stage: row.cpu_h.value / first.cpu_h.value for row in found.stages[:-1]}
    assert shares == {
        "read": pytest.approx(20 / 46),
        "url": pytest.approx(10 / 46),
        "write and books": pytest.approx(16 / 46),
    }


def test_no_number_of_workers_is_faster_than_the_largest_shard() -> None:
    target = {"web": Target(bytes=1e9, shards=10, largest_bytes=5e8)}
    found = forecast([Phase("01-url", (measured(1, 10**6), measured(1, 10**6)))], target, workers=1_000)
    assert found.wall_h.value * 3600 == pytest.approx(500)
    assert found.cpu_h.value * 3600 == pytest.approx(1000)


def test_memory_of_a_batch_goes_on_from_what_text_takes() -> None:
    large = measured(1, 10, peak_mb=500.0, text_bytes=8 << 20)
    small = measured(1, 1, peak_mb=300.0, text_bytes=0)
    phase = Phase("x", (large,), (), (small,))
    assert memory_mb(phase, 32 << 20) == 500 + 200 / 8 * 24
    assert memory_mb(phase, 128 << 20) == 500
    assert memory_mb(phase, 4 << 20) == 500
    # docs/scale.md: 48.03 bytes a document at least, 78 in one pass; 12 more to verify.
    assert clustering_mb(MinHash(), 1e6) == (pytest.approx(48.03, abs=0.01), pytest.approx(78.0))
    assert clustering_mb(MinHash(verify="jaccard"), 1e6)[1] == pytest.approx(90.0)


def shard(path: Path, format: str, **more: object) -> Shard:
    values = {"source": "s", "index": 0, "path": str(path), "name": path.name, "size": path.stat().st_size}
    return Shard.model_validate({**values, "format": format, "stamp": "1", **more})


def ids(piece: Shard) -> list[str]:
    account, problems = StageLedger(stage="read"), []  # type: ignore[var-annotated]
    found = [row for batch in read_batches(piece, account, problems, 10**7) for row in batch["doc_id"].to_pylist()]
    assert not problems
    assert not account.failed
    return found


def warc_record(number: int) -> bytes:
    page = b"<html><body>" + (f"page {number} " * 40).encode() + b"</body></html>"
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + page
    head = (
        "WARC/1.0\r\nWARC-Type: response\r\n"
        f"WARC-Record-ID: <urn:uuid:{number:032d}>\r\nWARC-Target-URI: http://a.example/{number}\r\n"
        f"WARC-Date: 2026-01-01T00:00:00Z\r\nContent-Type: application/http\r\nContent-Length: {len(http)}\r\n\r\n"
    )
    return head.encode() + http + b"\r\n\r\n"


def write(folder: Path, kind: str) -> tuple[Path, str]:
    rng = np.random.default_rng(1)  # words that do not shrink to nothing
    rows = [{"text": rng.bytes(150).hex(" ", 5), "id": f"id-{i}"} for i in range(6_000)]
    lines = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    records = [warc_record(i) for i in range(2_000)]
    path = folder / f"a.{kind}"
    if kind == "warc.gz":
        path.write_bytes(b"".join(gzip.compress(record) for record in records))
    elif kind == "warc":
        path.write_bytes(b"".join(records))
    elif kind == "parquet":
        table = pa.table({"text": [row["text"] for row in rows], "id": [row["id"] for row in rows]})
        pq.write_table(table, path, row_group_size=100)
    elif kind == "jsonl":
        path.write_bytes(lines)
    elif kind == "csv":
        path.write_text("text,id\n" + "".join(f"{row['text']},{row['id']}\n" for row in rows))
    else:
        with pa.CompressedOutputStream(str(path), {"gz": "gzip", "zst": "zstd"}[kind.split(".")[1]]) as out:
            out.write(lines)
    return path, kind.split(".", maxsplit=1)[0]


@pytest.mark.parametrize("kind", ["warc.gz", "warc", "parquet", "jsonl", "jsonl.gz", "jsonl.zst", "csv"])
def test_pieces_are_whole_records_of_the_input_and_the_same_for_a_seed(kind: str, tmp_path: Path) -> None:
    path, format = write(tmp_path, kind)
    whole = shard(path, format)
    every = set(ids(whole))
    (tmp_path / "cut").mkdir()
    pieces = sample([whole], whole.size // 2, 7, tmp_path / "cut")
    assert {piece.role for piece in pieces} == {"first", "second", "piece"}
    found = [one for piece in pieces if piece.role == "piece" for one in ids(piece.shard)]
    assert found
    assert set(found) <= every
    assert len(set(found)) == len(found) or kind == "parquet"  # whose row groups may be taken twice
    assert len(found) < len(every)
    assert sum(p.input_bytes for p in pieces if p.role == "piece") <= whole.size
    again = sample([whole], whole.size // 2, 7, tmp_path / "cut")
    assert [(p.input_bytes, ids(p.shard)) for p in again] == [(p.input_bytes, ids(p.shard)) for p in pieces]
    assert [piece.shard.index for piece in pieces] == list(range(len(pieces)))


def test_targets_count_a_file_once_however_many_ranges_it_has(tmp_path: Path) -> None:
    path, format = write(tmp_path, "jsonl")
    whole = shard(path, format)
    half = whole.size // 2
    ranges = [whole.model_copy(update={"index": 0, "stop": half}), whole.model_copy(update={"index": 1, "start": half})]
    assert targets(ranges) == {"s": Target(whole.size, 2, whole.size - half)}


def test_sizes_with_units() -> None:
    assert [size(text) for text in ("1000", "1.5TB", "3 gb", "2_000k")] == [1e3, 1.5e12, 3e9, 2e6]
    assert [hours(h) for h in (0.001, 0.5, 5.25, 1204.4)] == ["3.60 s", "30.0 min", "5.2 h", "1,204 h"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Twelve WARC files, some of them the same pages, and lines."""
    (tmp_path / "in").mkdir()
    for n in range(12):
        records = [warc_record((n % 10) * 100 + i) for i in range(100)]
        (tmp_path / f"in/{n}.warc.gz").write_bytes(b"".join(gzip.compress(record) for record in records))
    text = f"""name: p
out: {tmp_path}/run
sources:
  web: {{files: "{tmp_path}/in/*.warc.gz"}}
stages:
  - extract: {{min_chars: 10}}
  - exact
tokenizer: {{vocab_size: 300}}
tokens: {{holdout_share: 0.05}}
"""
    (tmp_path / "r.yaml").write_text(text)
    return tmp_path / "r.yaml"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert end.value.code == 0, err
    return out


def test_a_plan_foretells_documents_and_disk_of_the_real_run(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = json.loads(run(capsys, "plan", str(recipe), "--sample-mb", "0.1", "--json", "--core-hour-price", "2"))
    assert not (tmp_path / "run").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "r.yaml"]
    run(capsys, "run", str(recipe), "--debug", "--no-ablation")
    assert plan["documents"]["value"] == pytest.approx(1_200, rel=0.1)
    assert plan["input_bytes"] == sum(path.stat().st_size for path in (tmp_path / "in").iterdir())
    assert plan["shards"] == 12
    by_phase = {row["phase"]: row for row in plan["phases"]}
    assert list(by_phase) == [
        *("01-extract", "02-exact sign", "02-exact cluster", "02-exact", "tokenizer", "held-out documents"),
        *("held-out documents, together", "near held-out documents", "token shards", "tokenizer report"),
    ]
    kept = sum(path.stat().st_size for path in (tmp_path / "run/01-extract/kept").iterdir()) / 1e9
    assert kept / 2 < by_phase["01-extract"]["disk"]["kept"] < kept * 2
    tokens = sum(p.stat().st_size for p in (tmp_path / "run/tokens").iterdir() if p.suffix in (".bin", ".idx")) / 1e9
    assert tokens / 2 < by_phase["token shards"]["disk"]["tokens"] < tokens * 2
    assert by_phase["02-exact cluster"]["serial"]
    assert plan["money"]["value"] == pytest.approx(plan["wall_h"]["value"] * 2)
    assert {row["stage"] for row in plan["stages"] if row["phase"] == "01-extract"} == {
        "read", "extract", "write and books",
    }  # fmt: skip
    assert plan["memory_mb"] > 50


def test_more_input_and_crawls_are_carried_on(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = json.loads(run(capsys, "plan", str(recipe), "--sample-mb", "0.1", "--json", "--input-bytes", "1TB"))
    assert more["input_bytes"] == pytest.approx(1e12)
    crawls = json.loads(run(capsys, "plan", str(recipe), "--sample-mb", "0.1", "--json", "--dumps", "2"))
    assert crawls["input_bytes"] == 180e12
    assert crawls["shards"] == 180_000
    assert any("CC-MAIN-2024-51" in note for note in crawls["notes"])
    shown = run(capsys, "plan", str(recipe), "--sample-mb", "0.1", "--dumps", "1", "--workers", "64")
    assert "CPU time by stage" in shown
    assert "one worker's, whatever their number" in shown
    assert "MORE THAN ONE CLUSTERING" not in shown or "4,294,967,294" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input-bytes", "many"], "is no size"),
        (["--input-bytes", "1", "--dumps", "1"], "Give one of them"),
        (["--dumps", "0"], "a number of crawls above 0"),
        (["--workers", "0"], "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_asked(
    options: list[str], message: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", str(recipe), *options])
    assert end.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_inputs_of_which_no_plan_can_be_made(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def says(text: str, *options: str) -> str:
        recipe.write_text(text)
        with pytest.raises(SystemExit) as end:
            main(["plan", str(recipe), *options])
        assert end.value.code == 2
        return capsys.readouterr().err

    assert "no file matches" in says(f"name: p\nsources: {{web: {{files: {tmp_path}/none/*.jsonl}}}}\n")
    (tmp_path / "e.jsonl").write_bytes(b"")
    assert "nothing that a sample" in says(f"name: p\nsources: {{web: {{files: {tmp_path}/e.jsonl}}}}\n")
    (tmp_path / "e.jsonl").write_bytes(orjson.dumps({"text": "some words"}) + b"\n")
    lines = f"name: p\nsources: {{web: {{files: {tmp_path}/e.jsonl}}}}\n"
    assert "no source of this recipe is WARC or WET" in says(lines, "--dumps", "1")
