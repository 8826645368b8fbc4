"""Every benchmark runs by its path on a tiny input, and speaks the one form. How fast is no matter here."""

from __future__ import annotations

import gzip
import html
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.end_to_end

ROOT = Path(__file__).resolve().parent.parent.parent
KEYS = ["bench", "value", "unit", "peer", "peer_value", "ratio"]
MODULES = "argparse asyncio collections csv datetime decimal difflib email enum fractions inspect io logging os".split()
TINY = {
    "rules": "--mb 0.05 --peer-mb 0.02 --rounds 1 --list-entries 2000 --urls 500",
    "dedupe": "--mb 0.05 --peer-mb 0.02 --rounds 1 --documents 2000 --end-mb 0.05 --end-rounds 1 --skip datatrove",
    "substrings": "--mb 0.2 --rounds 1",
    "decontaminate": "--mb 0.05 --peer-mb 0.02 --rounds 1 --ngrams 2000",
    "models": "--mb 0.03 --rounds 1 --order 2 --prune 0 --buckets 1000",
    "tokens": "--mb 0.05 --vocab 400 --rounds 1 --skip datatrove",
    "loader": "--mb 1 --windows 256 --rounds 1 --documents 4000 --skip torch datatrove",
    "end_to_end": "--mb 0.05 --rounds 1 --skip datatrove",
    "train": "--shape 1m --no-compile --dtype float32 --threads 1 --batch 1 --seq-len 32 --steps 1 --rounds 1",
}
FIGURES = {  # name -> the peers that must be beside it
    "rules": {
        "rules.all": {None},
        "rules.chain_all": {None},
        "rules.chain": {"datatrove"},
        "rules.language": {"datatrove"},
        "rules.url": {"datatrove"},
        "rules.url_memory": {"datatrove"},
    },
    "dedupe": {
        "dedupe.signatures": {"datasketch"},
        "dedupe.cluster_2000_s": {None},
        "dedupe.cluster_2000_cpu_s": {None},
        "dedupe.cluster_2000_gb": {None},
        "dedupe.end_to_end_exact": {None},
        "dedupe.end_to_end_normalised": {None},
        "dedupe.end_to_end_minhash": {None},
        "dedupe.exact_raw": {None},
        "dedupe.exact_normalised": {None},
    },
    "substrings": {
        f"substrings.{name}": {None}
        for name in "signatures group suffix_array scan scan_repeats edit memory_per_mb".split()
    },
    "decontaminate": {
        "decontaminate.lookup": {"datatrove"},
        "decontaminate.lookup_all": {None},
        "decontaminate.all": {None},
    },
    "models": {
        "models.kenlm_train": set(),
        "models.perplexity": {"kenlm"},
        "models.classifier": set(),
        "models.language": {"fasttext-numpy2-wheel"},
        "models.language_full": {"fasttext-numpy2-wheel"},
    },
    "tokens": {
        "tokens.encode": {"gigatoken", "tokenizers"},
        "tokens.encode_peak_mb": {"gigatoken", "tokenizers"},
        "tokens.shards": {None},
        "tokens.train": {"tokenizers"},
    },
    "loader": {
        "loader.warm": {"nanoGPT"},
        "loader.cold": {"nanoGPT"},
        "loader.start_ms": {None},
        "order.start_ms": set(),
    },
    "end_to_end": {
        f"end_to_end.{name}": {None}
        for name in ("whole", "after_extract", "after_extract_english", "two_workers", "eight_workers")
    },
    "train": {"train.1m": {"torch"}, "train.overhead": {None}, "train.share_of_matrix_limit": {None}},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of docstrings, some tens of kB each, and some of them as pages of a WARC file."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = []
    for name in MODULES:
        module = importlib.import_module(name)
        found = [getattr(module, n).__doc__ for n in sorted(dir(module)) if not n.startswith("_")]
        texts += [t for t in found if isinstance(t, str) and len(t) > 400]
    assert 60_000 < len("".join(texts)) < 500_000
    for i in range(2):
        with gzip.open(folder / f"part-{i}.jsonl.gz", "wt", encoding="utf-8") as file:
            for j, text in enumerate(texts[i::2]):
                file.write(json.dumps({"text": text, "id": f"{i}-{j}", "metadata": {}}) + "\n")
    (folder / "warc").mkdir()
    pages = [page(i, text) for i, text in enumerate(texts[:40])]
    (folder / "warc/part-0.warc.gz").write_bytes(b"".join(gzip.compress(record) for record in pages))
    return folder


def page(number: int, text: str) -> bytes:
    """A WARC record of a page with a paragraph for each line."""
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in text.splitlines() if line.strip())
    body = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html><body>{lines}</body></html>".encode()
    head = (
        f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:{number:032d}>\r\n"
        f"WARC-Target-URI: https://a.example/{number}\r\nWARC-Date: 2026-01-01T00:00:00Z\r\n"
        f"Content-Type: application/http\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body + b"\r\n\r\n"


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"benchmarks/{name}.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("name", TINY)
def test_runs_on_a_tiny_input_and_prints_one_line_of_json_a_figure_and_peer(name: str, corpus: Path) -> None:
    done = run(name, "--corpus", str(corpus), "--json", *TINY[name].split())
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    peers: dict[str, set[str | None]] = {}
    for row in rows:
        assert list(row) == KEYS
        assert row["value"] > 0
        assert row["unit"]
        assert [row[key] is None for key in KEYS[3:]] in ([True] * 3, [False] * 3), row
        if row["peer"] is not None:
            assert row["ratio"] > 0
            assert row["peer_value"] > 0
            assert row["peer"].split()[1][0].isalnum(), "a peer is named with its version"
        peers.setdefault(row["bench"], set()).add(row["peer"] and row["peer"].split()[0])
    for bench, expected in FIGURES[name].items():
        assert expected <= peers[bench], (bench, done.stderr)
    for skipped in TINY[name].partition("--skip ")[2].split():
        assert f"{skipped} is skipped, as --skip asks." in done.stderr
        assert all(skipped not in found for found in peers.values())


def test_decisions_are_compared_on_english_documents(corpus: Path) -> None:
    done = run("rules", "--corpus", str(corpus), "--json", "--differences", "--documents", "12", "--max-bytes", "4000")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["documents"] == 12
    assert found["differences"] == {"gopher_repetition": [], "gopher_quality": [], "c4": [], "fineweb": []}
    assert "12 English documents" in done.stderr


def test_a_difference_names_both_reasons_and_what_is_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    of = importlib.import_module("rules_chain")
    text = "These are the words of a line that ends here.\n" + "\n".join(
        f"Chapter {word} of the description continues with several other sentences."
        for word in "one two three four five six seven eight nine".split()
    )
    monkeypatch.setitem(of.STAGES, "gopher_quality", of.GopherQuality(min_words=1000))
    monkeypatch.setitem(of.STAGES, "c4", of.C4(require_end_punctuation=False, min_words_per_line=20))
    found = of.differences([text])
    (row,) = found["gopher_quality"]
    assert (row["ours"], row["datatrove"], row["why"]) == (["too_few_words"], None, "the words are equal")
    assert row["measures"]["gopher_quality.words"] < 1000
    assert [row["ours"] for row in found["c4"]] == [["too_few_sentences"]]
    assert found["fineweb"] == found["gopher_repetition"] == []


def test_a_dolma_that_cannot_be_run_is_an_error(corpus: Path) -> None:
    for python, said in (("/no/python", "cannot be run"), ("/bin/true", "ended. Does it have dolma?")):
        done = run("rules", "--corpus", str(corpus), *TINY["rules"].split(), "--dolma-python", python)
        assert done.returncode != 0
        assert said in done.stderr


def test_peers_of_another_interpreter_that_it_lacks_are_skipped(common: Any, tmp_path: Path) -> None:
    lacking = common.in_peer_python("--peer-python", Path(sys.executable), "peer_dedupe.py", ["a b c d e"], "daft")
    with lacking as (version, _):
        assert version is None
    ended = common.in_peer_python("--peer-python", Path("/bin/true"), "peer_dedupe.py", ["a"], "rensa")
    with (
        pytest.raises(SystemExit, match=r"/bin/true of --peer-python ended. Does it have rensa\? See peer_dedupe.py."),
        ended,
    ):
        raise AssertionError("not reached")


def test_a_peer_of_another_interpreter_answers_each_round(common: Any, tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys\n"
        "texts = [json.loads(line) for line in open(sys.argv[1], encoding='utf-8')]\n"
        "print(json.dumps({'version': sys.argv[2]}), flush=True)\n"
        "for i, line in enumerate(sys.stdin):\n"
        "    print(json.dumps({'seconds': i + len(texts)}), flush=True)\n"
    )
    with common.in_peer_python("--x", Path(sys.executable), str(script), ["a\nb", "ü"], "7") as (version, work):
        assert (version, work(), work()) == ("7", 2.0, 3.0)


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("common")


def test_the_ratio_is_the_median_of_the_rounds(common: Any) -> None:
    found = {"gristmill": [10.0, 40.0, 20.0], "peer 1.0": [5.0, 4.0, 5.0], "peer 2.0": [20.0, 20.0, 20.0]}
    first, second = common.compared("x.y", "MB/s", found)
    assert first == common.Figure("x.y", 20.0, "MB/s", "peer 1.0", 5.0, 4.0)  # of 2, 10, 4
    assert second == common.Figure("x.y", 20.0, "MB/s", "peer 2.0", 20.0, 1.0)  # of 0.5, 2, 1
    (seconds, _) = common.compared("x.y_s", "s", found, smaller_is_better=True)
    assert seconds.ratio == 0.25
    assert list(common.compared("x.y", "s", {"gristmill": [2.0]})) == [common.Figure("x.y", 2.0, "s")]


def test_a_peer_that_is_not_installed_is_skipped_aloud(common: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert common.peer("no-such-package") is None
    assert common.peer("numpy", needs=["no-such-package"]) is None
    assert common.peer("numpy", ["numpy"]) is None
    assert common.peer("nanoGPT", needs=["numpy"], at="3adf61e1") == "nanoGPT 3adf61e1"
    assert capsys.readouterr().err.splitlines() == [
        "no-such-package is skipped: it is not installed.",
        "numpy is skipped: no-such-package, which it needs, is not installed.",
        "numpy is skipped, as --skip asks.",
    ]


def test_documents_come_from_each_file_in_turn(common: Any, tmp_path: Path) -> None:
    for name, texts in (("a", ["a1", "", "a2"]), ("b", ["b1", "b2", "b3"])):
        lines = "".join(json.dumps({"text": t, "id": t, "metadata": {}}) + "\n" for t in texts)
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert common.documents(tmp_path, 1000) == ["a1", "b1", "b2", "a2", "b3"]
    assert common.documents(tmp_path, 3) == ["a1", "b1"]
    batches = common.batches(["abc", "de", "f"], batch_bytes=4)
    assert [b["text"].to_pylist() for b in batches] == [["abc", "de"], ["f"]]
    assert batches[1]["doc_id"].to_pylist() == ["00000002"]


def test_a_folder_without_documents_and_a_line_that_is_none_are_named(common: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as empty:
        common.documents(tmp_path, 1)
    assert str(empty.value).startswith(f"{tmp_path} holds no documents in *.jsonl.gz")
    for line in (b'{"words": 3}', b'{"text": null}', b"[1]", b"{"):
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line + b"\n"))
        with pytest.raises(SystemExit) as broken:
            common.documents(tmp_path, 1)
        assert str(broken.value).startswith(f"{tmp_path / 'a.jsonl.gz'} has a line that is no document")
        assert line.decode() in str(broken.value)


def test_the_table_and_the_json_have_the_same_rows(common: Any, capsys: pytest.CaptureFixture[str]) -> None:
    figures = [common.Figure("a.b", 1234.5, "MB/s", "peer 1.0", 2.0, 617.25), common.Figure("a.c_s", 2 / 3, "s")]
    common.show(figures, False)
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["a.b", "1,234.50", "MB/s", "peer", "1.0", "2.00", "617.25"]
    assert second.split() == ["a.c_s", "0.67", "s"]
    common.show(figures, True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"bench": "a.b", "value": 1234.5, "unit": "MB/s", "peer": "peer 1.0", "peer_value": 2.0, "ratio": 617.25},
        {"bench": "a.c_s", "value": 0.66667, "unit": "s", "peer": None, "peer_value": None, "ratio": None},
    ]
