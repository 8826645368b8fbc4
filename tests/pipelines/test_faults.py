"""What a run does when something breaks: it sets shards aside, goes on as far as it can, and says what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.cli import main
from gristmill.pipelines.isolation import Limits, isolated
from gristmill.pipelines.learn import TokensOrder
from gristmill.pipelines.lock import LockError, RunLock
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.poison import IS_DROPPED
from gristmill.pipelines.progress import Display
from gristmill.pipelines.run import Options, Outcome, RunError, run
from gristmill.pipelines.shuffled_tokens import ScatterOrder, scatter_card
from gristmill.pipelines.status import status
from gristmill.pipelines.verify import verify
from gristmill.stages.shards import Shard, read_bytes
from gristmill.tokenize.encode import Encoder

sys.path.append(str(Path(__file__).parent))
from poison_stage import Fragile, tokens_or_death


def write_input(folder: Path, name: str, marks: dict[int, str], documents: int = 40) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = [f"{marks.get(i, 'good')} document number {i} of {name}" for i in range(documents)]
    lines = [json.dumps({"id": f"{name}-{i}", "text": text}) for i, text in enumerate(texts)]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def write_recipe(folder: Path, stages: str, sources: tuple[str, ...] = ("a",)) -> Path:
    listed = "".join(f'  {name}: {{files: "{folder}/{name}/*.jsonl"}}\n' for name in sources)
    path = folder / "r.yaml"
    path.write_text(f"name: r\nsources:\n{listed}stages:\n{stages}")
    return path


@pytest.fixture(autouse=True)
def fragile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recipes.STAGES, "fragile", Fragile)


def do(recipe: Path, out: Path, **options: bool) -> Outcome:
    with Display() as display:
        return run(recipes.load(recipe), str(out), Options(debug=True, **options), display)


def test_a_shard_of_poison_is_set_aside_and_taken_up_again_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_input(tmp_path / "a", "good", {3: "RAISE"})
    write_input(tmp_path / "a", "bad", dict.fromkeys(range(40), "RAISE"))
    recipe = write_recipe(tmp_path, "  - fragile\n")
    listed = r"1 of 2 pieces of 01-fragile were given up; the others are done:\n  .*bad\.jsonl: stage fragile: cannot"
    with pytest.raises(RunError, match=listed):
        do(recipe, tmp_path / "run")
    record = json.loads((tmp_path / "run/failed/01-fragile-part-00000.json").read_text())
    assert record["path"].endswith("bad.jsonl")
    assert (record["stage"], record["kind"], record["attempts"]) == ("fragile", "fault", 1)
    (done,) = (tmp_path / "run/01-fragile/ledger").glob("*.json")
    assert done.name == "part-00001.json"
    row = status(open_run(tmp_path / "run"))[0]
    assert (row.done, row.left, row.set_aside) == (1, 0, 1)

    with pytest.raises(RunError, match=r"`--retry-failed` takes up again"):  # a plain start leaves it out
        do(recipe, tmp_path / "run")
    assert "left out, set aside before" in capsys.readouterr().err
    recipe.write_text(recipe.read_text().replace("- fragile", "- fragile: {healed: true}"))  # changes no key
    with pytest.raises(RunError, match="given up"):
        do(recipe, tmp_path / "run")
    outcome = do(recipe, tmp_path / "run", retry_failed=True)
    assert outcome.done == 1
    assert not list((tmp_path / "run/failed").iterdir())
    assert verify(open_run(tmp_path / "run")) == []
    book = open_run(tmp_path / "run").stages()["fragile"]
    assert book.dropped["poison"].documents == 1
    assert book.read.documents == 80


@pytest.mark.end_to_end
def test_a_run_on_workers_loses_one_document_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_input(tmp_path / "a", "a0", {17: "KILL"})
    write_input(tmp_path / "a", "a1", {})
    recipe = write_recipe(tmp_path, "  - fragile\n  - exact\n")
    with Display() as display:
        run(recipes.load(recipe), str(tmp_path / "run"), Options(workers=1), display)
    shown = capsys.readouterr().err
    assert "a0.jsonl: document a0-17 dropped as poison by stage fragile: was killed by SIGKILL" in shown
    assert verify(open_run(tmp_path / "run")) == []
    book = open_run(tmp_path / "run").stages()["fragile"]
    assert (book.read.documents, book.kept.documents) == (80, 79)
    folder = tmp_path / "run/01-fragile"
    first = {p: p.read_bytes() for kind in ("kept", "dropped") for p in (folder / kind).iterdir()}
    for ledger in (folder / "ledger").iterdir():
        ledger.unlink()
    do(recipe, tmp_path / "run")  # in this process, which the document would kill
    assert {p: p.read_bytes() for p in first} == first


def test_what_needs_all_shards_waits_and_the_rest_goes_on(tmp_path: Path) -> None:
    write_input(tmp_path / "a", "a0", {})
    write_input(tmp_path / "a", "a1", {})
    write_input(tmp_path / "b", "b0", dict.fromkeys(range(40), "RAISE"))
    recipe = write_recipe(tmp_path, "  - fragile\n  - exact:\n    only: [a]\n  - minhash\n", ("a", "b"))
    with pytest.raises(RunError, match=r"03-minhash \(minhash\) needs all of them, and waits"):
        do(recipe, tmp_path / "run")
    # `exact` compares source a alone, which is complete: it is done for its shards.
    assert len(list((tmp_path / "run/02-exact/ledger").glob("*.json"))) == 2
    assert not (tmp_path / "run/03-minhash").exists()
    recipe.write_text(recipe.read_text().replace("- fragile", "- fragile: {healed: true}"))
    do(recipe, tmp_path / "run", retry_failed=True)
    assert verify(open_run(tmp_path / "run")) == []
    assert open_run(tmp_path / "run").stages()["minhash"].read.documents > 40


def test_poison_found_while_signing_is_dropped_by_the_global_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(tmp_path / "a", "a0", {5: "RAISE"})
    write_input(tmp_path / "a", "a1", {})
    exact = recipes.STAGES["exact"]

    class Picky(exact):  # type: ignore[misc,valid-type]
        def sign(self, batch):  # type: ignore[no-untyped-def]
            if any("RAISE" in text for text in batch["text"].to_pylist()):
                raise KeyError("unsigned")
            return super().sign(batch)

    monkeypatch.setitem(recipes.STAGES, "exact", Picky)
    recipe = write_recipe(tmp_path, "  - exact\n")
    do(recipe, tmp_path / "run")
    opened = open_run(tmp_path / "run")
    assert verify(opened) == []
    book = opened.stages()["exact"]
    assert book.dropped["poison"].documents == 1
    assert book.kept.documents == 79
    first = {p.name: p.read_bytes() for p in (tmp_path / "run/01-exact/kept").iterdir()}
    for part in (tmp_path / "run/01-exact/ledger").iterdir():
        part.unlink()
    do(recipe, tmp_path / "run")
    assert {p.name: p.read_bytes() for p in (tmp_path / "run/01-exact/kept").iterdir()} == first


def test_a_second_driver_does_nothing(tmp_path: Path) -> None:
    write_input(tmp_path / "a", "a0", {})
    recipe = write_recipe(tmp_path, "  - fragile\n")
    with RunLock(str(tmp_path / "run")):
        with pytest.raises(LockError, match=f"process {os.getpid()} on "):
            do(recipe, tmp_path / "run")
        with pytest.raises(SystemExit) as ended:
            main(["run", str(recipe), "--out", str(tmp_path / "run"), "--debug"])
        assert ended.value.code == 1
        assert [p.name for p in (tmp_path / "run").iterdir()] == ["driver.lock"]
    do(recipe, tmp_path / "run")
    assert not (tmp_path / "run/driver.lock").exists()


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
from gristmill.pipelines.cli import main
main(sys.argv[2:])
"""


@pytest.mark.end_to_end
def test_a_storage_that_takes_no_more_is_one_message_and_the_run_goes_on_later(tmp_path: Path) -> None:
    for name in ("a0", "a1", "a2"):
        write_input(tmp_path / "a", name, {}, 2_000)
    write_input(tmp_path / "a", "b0", {}, 10)
    recipe = write_recipe(tmp_path, "  - gopher_quality: {min_words: 1}\n")
    command = ["run", str(recipe), "--out", str(tmp_path / "run"), "--debug"]
    limited = [sys.executable, "-c", LIMITED, "12000", *command]
    environment = {**os.environ, "NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR", "")}
    environment = {name: value for name, value in environment.items() if value}
    done = subprocess.run(limited, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert f"The storage of {tmp_path}/run does not take any more: " in done.stderr
    assert "File too large" in done.stderr
    assert "run the same command again" in done.stderr
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert not (tmp_path / "run/driver.lock").exists()
    again = subprocess.run(
        [sys.executable, "-m", "gristmill.pipelines.cli", *command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert verify(open_run(tmp_path / "run")) == []


def test_leftovers_of_killed_attempts_are_cleaned(tmp_path: Path) -> None:
    write_input(tmp_path / "a", "a0", {})
    recipe = write_recipe(tmp_path, "  - fragile\n")
    left = tmp_path / "run/01-fragile/kept/.part-00000.parquet.0123456789ab.tmp"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    do(recipe, tmp_path / "run")
    assert not left.exists()


def test_a_driver_says_where_it_is(tmp_path: Path) -> None:
    write_input(tmp_path / "a", "a0", {})
    do(write_recipe(tmp_path, "  - fragile\n"), tmp_path / "run")
    said = orjson.loads((tmp_path / "run/driver.json").read_bytes())
    assert (said["state"], said["pid"], said["workers"]) == ("ended", os.getpid(), 1)


def results(out: Path) -> dict[str, bytes]:
    """kept, dropped and token files, and the keys that ledgers carry."""
    files = [*out.glob("*/kept/*"), *out.glob("*/dropped/*"), *out.glob("tokens/*.bin"), *out.glob("tokens/*.idx")]
    keys = {p: orjson.loads(p.read_bytes())["key"].encode() for p in out.glob("*/ledger/*.json")}
    found = {p: p.read_bytes() for p in [*files, *out.glob("tokens/shards.json")]} | keys
    return {path.relative_to(out).as_posix(): data for path, data in found.items()}


TOKENS = "tokenizer: {vocab_size: 300}\ntokens: {encoder: tokenizers}\n"


def test_poison_is_part_of_the_key_of_its_shard_and_of_all_that_follows(tmp_path: Path) -> None:
    write_input(tmp_path / "a", "a0", {7: "RAISE"})
    write_input(tmp_path / "a", "a1", {})
    recipe = write_recipe(tmp_path, "  - fragile\n  - exact\n")
    recipe.write_text(recipe.read_text() + TOKENS)
    healed = tmp_path / "healed.yaml"
    healed.write_text(recipe.read_text().replace("- fragile", "- fragile: {healed: true}"))  # changes no key
    outcome = do(recipe, tmp_path / "run")
    assert do(recipe, tmp_path / "run").done == 0
    do(recipe, tmp_path / "scratch")  # the same from nothing
    assert results(tmp_path / "run") == results(tmp_path / "scratch")
    do(healed, tmp_path / "other")  # a machine on which the document does no harm: another corpus, other keys
    keys = {name: [r[name] for r in map(results, (tmp_path / "run", tmp_path / "other"))] for name in (
        "01-fragile/ledger/part-00000.json", "01-fragile/ledger/part-00001.json", "02-exact/ledger/part-00001.json",
        "tokens/ledger/part-00001.json",
    )}  # fmt: skip
    differ = {name: ours != theirs for name, (ours, theirs) in keys.items()}
    assert list(differ.values()) == [True, False, True, True]

    # The findings go along where the same bytes are wanted.
    (tmp_path / "told/01-fragile").mkdir(parents=True)
    (tmp_path / "run/01-fragile/poison").rename(tmp_path / "told/01-fragile/poison")
    do(healed, tmp_path / "told")
    assert results(tmp_path / "told") == results(tmp_path / "scratch")

    # Without them the shard and what follows is done again, the other shard of the segment is not.
    again = do(healed, tmp_path / "run")
    assert results(tmp_path / "run") == results(tmp_path / "other")
    assert again.done == outcome.done - 2  # all but the other shard and its signatures
    assert verify(open_run(tmp_path / "run")) == []
    row = status(open_run(tmp_path / "scratch"))[-1]
    assert (row.done, row.left) == (2, 0)


@pytest.mark.parametrize(("shuffle", "redone"), [("none", 1), ("documents", 3)])  # both parts sorted, one merged
def test_a_document_that_cannot_be_encoded_is_dropped_from_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: str, redone: int
) -> None:
    write_input(tmp_path / "a", "a0", {5: "RAISE", 30: "RAISE"})
    write_input(tmp_path / "a", "a1", {})
    recipe = write_recipe(tmp_path, "  - exact\n")
    recipe.write_text(recipe.read_text() + TOKENS.replace("tokenizers}", f"tokenizers, shuffle: {shuffle}}}"))
    encode = Encoder.encode

    def picky(self: Encoder, texts: pa.Array) -> Any:
        if any("RAISE" in text for text in texts.to_pylist()):
            raise KeyError("no such piece")
        return encode(self, texts)

    monkeypatch.setattr(Encoder, "encode", picky)
    do(recipe, tmp_path / "run")
    opened = open_run(tmp_path / "run")
    assert verify(opened) == []
    book = opened.stages()["tokenize"]
    assert (book.read.documents, book.dropped["poison"].documents) == (80, 2)
    assert do(recipe, tmp_path / "run").done == 0
    first = results(tmp_path / "run")
    monkeypatch.setattr(Encoder, "encode", encode)
    (tmp_path / "run/tokens/ledger/part-00000.json").unlink()
    assert do(recipe, tmp_path / "run").done == redone  # known, so it is left out where it would do no harm
    assert results(tmp_path / "run") == first


@pytest.mark.end_to_end
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_document_that_kills_the_encoder_is_found(tmp_path: Path, shuffled: bool) -> None:
    """Shuffled: while the part is sorted for token shards of all documents of a source."""
    write_input(tmp_path / "a", "a0", {5: "KILL"})
    recipe = write_recipe(tmp_path, "  - fragile: {healed: true}\n")
    recipe.write_text(recipe.read_text() + TOKENS)
    do(recipe, tmp_path / "run")
    opened = open_run(tmp_path / "run")
    card = orjson.loads((tmp_path / "run/tokens/tokenizer_card.json").read_bytes())
    shard = Shard.model_validate(orjson.loads((tmp_path / "run/inputs.json").read_bytes())[0])
    order = TokensOrder(
        out=str(tmp_path / "run"),
        key=card["key"],
        upstream="01-fragile",
        shard=shard,
        holdout_share=0.0,
        encoder="tokenizers",
        eos_token="<|endoftext|>",
        shuffle_seed=1 if shuffled else None,
    )
    result = isolated(tokens_or_death, ScatterOrder(**vars(order)) if shuffled else order, Limits())
    (problem,) = result["problems"]
    assert f"document a0-5 {IS_DROPPED} by stage tokenize" in problem
    (found,) = orjson.loads((tmp_path / "run/tokens/poison/part-00000.json").read_bytes())
    assert (found["doc_id"], found["stage"]) == ("a0-5", "tokenize")
    if shuffled:
        assert orjson.loads(read_bytes(scatter_card(order.out, shard)))["scattered"]["documents"] == 39
    else:
        assert open_run(tmp_path / "run").stages()["tokenize"].dropped["poison"].documents == 1
    assert opened.path
