"""`mixture plan`, `plot`, `diff`, `tokens measures` and `trace --train` on a finished run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from gristmill.pipelines import cli, trace_step
from gristmill.tokenize.shards import TokenSet
from gristmill.trainer.config import Run, TrainConfig

Verb = Callable[..., tuple[int, str, str]]
PARTS = """
name: parts
sources:
  low: {{source: docs, where: "gopher_quality.words < {middle}", weight: 0.7}}
  high: {{source: docs, where: "gopher_quality.words >= {middle}", weight: 0.3}}
phases:
  - {{name: all, share: 0.6}}
  - {{name: best, share: 0.4, ramp: linear, anneal: true, weights: {{low: 0.1, high: 0.9}}}}
max_epochs: 50
"""


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Verb:
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def call(*words: object) -> tuple[int, str, str]:
        code = 0
        try:
            cli.main([str(word) for word in words])
        except SystemExit as error:
            code = int(error.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def mixtures(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "a.yaml").write_text("name: a\nmax_epochs: 99\nsources: {docs: 0.5, code: 0.5}\n")
    (tmp_path / "b.yaml").write_text("name: b\nmax_epochs: 99\nsources: {docs: 0.75, code: 0.25}\n")
    return tmp_path / "a.yaml", tmp_path / "b.yaml"


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    path = tmp_path / "parts.yaml"
    path.write_text(PARTS.format(middle=300))
    return path


def test_plan_with_training_settings_shows_the_rates(verb: Verb, parts: Path, finished_run: Path) -> None:
    train = parts.parent / "train.yaml"
    train.write_text(
        "model: 1m\nseq_len: 32\nbatch_windows: 4\nsteps: 100\nlr: 0.01\nschedule: wsd\ndecay: best\nwarmup: 10\n"
        "min_lr_ratio: 0\n"
    )
    code, said, _ = verb("mixture", "plan", parts, "--tokens", finished_run / "tokens", "--train", train)
    assert code == 0
    assert "400 windows of 32 tokens = 12,800 tokens, seed 1" in said
    assert "phase all: tokens 0 to 7,680, learning rate 0.001 to 0.01" in said
    assert "phase best: tokens 7,680 to 12,800, linear ramp, anneal, learning rate 0.00975 to 0" in said
    code, said, _ = verb("mixture", "plan", parts, "--tokens", finished_run / "tokens", "--train", train, "--json")
    data = orjson.loads(said)
    assert data["phases"][1]["learning_rates"] == [pytest.approx(0.00975), 0]
    assert data["sources"]["low"]["where"] == "gopher_quality.words < 300"


def test_an_infeasible_wish_is_refused_with_numbers(
    verb: Verb, mixtures: tuple[Path, Path], finished_run: Path
) -> None:
    mixtures[0].write_text("name: a\nmax_epochs: 1\nsources: {docs: 1}\n")
    tokens = TokenSet.open(finished_run / "tokens").sources["docs"].tokens
    command = ("mixture", "plan", mixtures[0], "--tokens", finished_run / "tokens", "--seq-len", 32)
    code, _, said = verb(*command, "--budget", 3 * tokens)
    assert code == 2
    allowed = (tokens - 1) // 32 * 32
    assert f"max_epochs 1 allows {allowed:,}" in said
    assert verb(*command, "--budget", allowed)[0] == 0
    code, _, said = verb("mixture", "plan", mixtures[0])
    assert code == 2
    assert "does not say `tokens`" in said


def test_plot_on_a_terminal_and_as_a_page(verb: Verb, parts: Path, finished_run: Path) -> None:
    command = ("mixture", "plot", parts, "--tokens", finished_run / "tokens", "--seq-len", 16, "--budget", 32_000)
    code, said, _ = verb(*command)
    assert code == 0
    bars = [line.split() for line in said.splitlines() if re.match(r"\s*[\d,]+ [ab]+", line)]
    assert len(bars) == 24
    assert [len(bar[1]) for bar in bars] == [60] * 24
    assert (bars[0][1].count("a"), bars[-1][1].count("a")) == (42, pytest.approx(6, abs=3))
    assert [bar[2] for bar in bars if len(bar) > 2] == ["all", "best"]
    assert bars[-1][0] == "32,000"
    out = parts.parent / "plot.html"
    assert verb(*command, "--out", out)[:2] == (0, f"{out}\n")
    page = out.read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert page.count("<rect") > 100
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "gopher_quality.words &gt;= 300" in page  # escaped


def test_diff(verb: Verb, mixtures: tuple[Path, Path], finished_run: Path) -> None:
    command = ("mixture", "diff", *mixtures, "--tokens", finished_run / "tokens", "--seq-len", 16, "--budget", 16_000)
    code, said, _ = verb(*command)
    assert code == 0
    assert re.search(r"^docs +8,000 +12,000 +50\.00% +75\.00% +\+25\.00%", said, re.M)
    data = orjson.loads(verb(*command, "--json")[1])
    assert [(row["source"], row["weight_change"]) for row in data["sources"]] == [("docs", 0.25), ("code", -0.25)]
    assert data["same_tokens"] == 0


@pytest.fixture
def trained(parts: Path, finished_run: Path) -> Path:
    """The folder of a training run, as far as trace reads it."""
    config = TrainConfig(model="1m", seq_len=64, batch_windows=4, steps=10, seed=3)
    folder = parts.parent / "train"
    folder.mkdir()
    run = Run(config=config, mixture=str(parts), tokens=str(finished_run / "tokens"), out=str(folder))
    run.save(folder / "run.json")
    return folder


def test_trace_of_a_step_names_every_document(verb: Verb, trained: Path, finished_run: Path) -> None:
    plan, seen = trace_step.documents_of_step(str(trained), 7)
    batch = next(iter(plan.loader(batch_windows=4, start_window=24)))
    texts = {
        doc_id: (ids, split.name)
        for split in TokenSet.open(finished_run / "tokens").sources.values()
        for doc_id, ids, _ in split.documents()
    }
    for i in range(4):
        mine = [one for one in seen if one.position == 24 + i]
        assert [one.first for one in mine] == [0, *(s for s in batch.starts[i].tolist() if s)]
        assert sum(one.tokens for one in mine) == 65
        for one in mine:
            ids, source = texts[one.doc_id]
            piece = batch.tokens[i, one.first : one.first + one.tokens].tolist()
            assert any(ids[a : a + len(piece)].tolist() == piece for a in range(len(ids)))
            assert source == "docs"
            assert one.known["url"].startswith("https://docs.example/")
            words = one.known["gopher_quality.words"]
            assert (words >= 300) == (one.source == "high")
    code, said, _ = verb("trace", "--train", trained, "--step", 7)
    assert code == 0
    assert "https://docs.example/" in said
    assert orjson.loads(verb("trace", "--train", trained, "--step", 7, "--json")[1])[0]["doc_id"] == seen[0].doc_id
    code, _, said = verb("trace", "--train", trained, "--step", 11)
    assert (code, "has the steps 1 to 10" in said) == (2, True)
    code, _, said = verb("trace", "--train", trained)
    assert (code, "Give either DOC_ID and RUN, or --train RUN --step N." in said) == (2, True)


def test_measures_travel_with_the_tokens(verb: Verb, parts: Path, finished_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    code, said, _ = verb("tokens", "measures", run)
    assert code == 0
    assert "gopher_quality.words" in said
    shutil.copytree(run / "tokens", tmp_path / "alone")
    plans = [
        verb("mixture", "plan", parts, "--tokens", folder, "--seq-len", 16, "--budget", 16_000)
        for folder in (finished_run / "tokens", tmp_path / "alone")
    ]
    assert plans[0] == plans[1]
    assert plans[0][0] == 0
    assert verb("tokens", "verify", tmp_path / "alone")[0] == 0
    shutil.rmtree(tmp_path / "alone/measures")
    code, _, said = verb("mixture", "plan", parts, "--tokens", tmp_path / "alone", "--budget", 16_000)
    assert (code, "gristmill tokens measures RUN" in said) == (2, True)
