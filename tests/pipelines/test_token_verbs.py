"""`gristmill tokenizer` and `gristmill tokens`, on the small run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from gristmill.pipelines.cli import main
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.token_files import show
from gristmill.tokenize.sample import is_held_out
from gristmill.tokenize.shards import TokenError, TokenSet


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a command in this process."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


@pytest.fixture
def mine(finished_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished_run, tmp_path / "run")
    return tmp_path / "run"


def test_training_on_a_run_gives_the_tokenizer_of_the_run(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "own.json"
    code, shown, err = call(capsys, "tokenizer", "train", "--on", str(mine), "--out", str(out))
    assert (code, shown.strip()) == (0, str(out))
    assert out.read_bytes() == (mine / "tokens/tokenizer.json").read_bytes()
    assert "learns 400 tokens from" in err
    assert "MB of memory" in err


def test_training_with_the_section_of_another_file(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.yaml").write_text("tokenizer: {vocab_size: 300, special_tokens: ['<end>', '<pad>']}\n")
    code, out, _ = call(capsys, "tokenizer", "train", str(tmp_path / "t.yaml"), "--on", str(mine), "--json")
    assert code == 0
    result = [json.loads(line) for line in out.splitlines()][-1]
    assert result == {"event": "result", "tokenizer": str(mine / "tokenizer.json")}
    tokenizer = Tokenizer.from_file(result["tokenizer"])
    assert [tokenizer.token_to_id(name) for name in ("<end>", "<pad>")] == [298, 299]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\n", "there is no `tokenizer` section"),
        ("name: x\ntokenizer: {vocab_size: 100}\n", "t.yaml:2"),
        ("name: none_such\ntokenizer: {vocab_size: 300}\n", "There is no run folder at out/none_such"),
    ],
)
def test_training_asked_wrongly(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.yaml").write_text(text)
    code, _, err = call(capsys, "tokenizer", "train", str(tmp_path / "t.yaml"))
    assert (code, message in err) == (2, True), err
    assert call(capsys, "tokenizer", "train")[0] == 2


def test_the_tokenizer_of_the_token_shards_is_not_replaced(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = mine / "tokens/tokenizer.json"
    before = own.read_bytes()
    code, _, err = call(capsys, "tokenizer", "train", "--on", str(mine), "--out", str(own))
    assert (code, "Choose another file" in err) == (2, True)
    assert own.read_bytes() == before


def test_an_unfinished_run_is_not_learned_from(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(next(mine.glob("*-minhash")) / "kept")
    code, _, err = call(capsys, "tokenizer", "train", "--on", str(mine))
    assert (code, "the run is not finished" in err) == (2, True), err


def test_tokenizers_side_by_side(mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "tokenizer", "train", "--on", str(mine), "--out", str(tmp_path / "a.json"))
    names = (str(tmp_path / "a.json"), str(mine))
    code, out, _ = call(capsys, "tokenizer", "report", *names, "--on", str(mine), "--json")
    assert code == 0
    figures = json.loads(out)["tokenizers"]
    assert figures[names[0]] == figures[names[1]]  # the same tokenizer twice
    assert figures[names[0]]["vocab_size"] == 400
    assert {group.split("/")[0] for group in figures[names[0]]["groups"]} == {"code", "docs", "readmes"}
    code, out, _ = call(capsys, "tokenizer", "report", names[1], "--on", str(mine))
    assert (code, "tokens of numbers" in out, "docs/en" in out) == (0, True, True)
    (tmp_path / "bad.json").write_text("[]")
    code, _, err = call(capsys, "tokenizer", "report", str(tmp_path / "bad.json"), "--on", str(mine))
    assert (code, "bad.json: Not a tokenizer.json" in err) == (1, True)
    code, _, err = call(capsys, "tokenizer", "report", str(tmp_path / "none"), "--on", str(mine))
    assert (code, "there is no tokenizer" in err) == (1, True)


def test_a_document_token_by_token(finished_run: Path) -> None:
    """Every document by its place and by its id, against the run's kept text."""
    folder = str(finished_run / "tokens")
    kept = open_run(finished_run).kept().to_table(columns=["doc_id", "source", "text"]).to_pylist()
    texts = {row["doc_id"]: row["text"] for row in kept if row["source"] == "docs"}
    docs = TokenSet.open(folder).sources["docs"]
    for place, (doc_id, ids, size) in enumerate(docs.documents()):
        found = show(folder, str(place), "docs", "train")
        assert (found.doc_id, found.ids, found.bytes) == (doc_id, ids.tolist(), size)
        assert found.text == texts[doc_id]
        assert found.pieces[-1] == "<|endoftext|>"
        if "<0x" not in "".join(found.pieces):
            assert "".join(found.pieces[:-1]) == texts[doc_id]
        assert show(folder, doc_id) == found
    one = docs.shards[1].name
    assert show(f"{folder}/{one}.bin", "0").shard == one
    assert show(f"{folder}/{one}", "0").row == 0


def test_questions_that_have_no_answer(finished_run: Path) -> None:
    folder = str(finished_run / "tokens")
    count = TokenSet.open(folder).sources["docs"].documents_count
    for arguments, message in (
        ((folder, "0"), "3 sources .code, docs, readmes."),
        ((folder, str(count), "docs", "train"), rf"there are {count} documents, 0 to {count - 1}\."),
        ((folder, "none such"), "no document 'none such'"),
        ((folder, "id:0"), "no document '0'"),
        ((folder, "0", "doc"), "no source 'doc'"),
        ((f"{folder}/part-00099.bin", "0"), "lists no shard 'part-00099'"),
        ((str(finished_run / "none"), "0"), "no such file"),
    ):
        with pytest.raises(TokenError, match=message):
            show(*arguments)  # type: ignore[arg-type]


def test_the_terminal_gets_no_commands(finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow as pa

    from gristmill.tokenize.encode import Encoder
    from gristmill.tokenize.write import write_manifest, write_shard

    encoder = Encoder((finished_run / "tokens/tokenizer.json").read_bytes())
    batch = pa.RecordBatch.from_pydict({"doc_id": ["7"], "source": ["s"], "text": ["\x1b[31mred \u202e [bold]\u00e9x"]})
    write_manifest(str(tmp_path), write_shard([batch], encoder, str(tmp_path), "part-00000"), encoder)
    code, out, _ = call(capsys, "tokens", "show", str(tmp_path), "--doc", "id:7")
    assert code == 0
    assert not {"\x1b", "\u202e"} & set(out)
    assert "<U+001B>" in out
    assert "[" in out
    assert "\u2502<|endoftext|>" in out
    code, out, _ = call(capsys, "tokens", "show", str(tmp_path), "--doc", "0", "--json")
    assert json.loads(out)["text"] == batch["text"][0].as_py()
    code, out, _ = call(capsys, "tokens", "show", str(tmp_path), "--doc", "0", "-n", "3")
    assert "more tokens; -n 0 prints all" in out


def test_verify_says_which_file(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "tokens", "verify", str(mine), "--json")
    assert (code, json.loads(out)["sound"]) == (0, True)
    path = mine / "tokens/part-00001.bin"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    code, out, _ = call(capsys, "tokens", "verify", str(mine / "tokens"))
    assert (code, "part-00001.bin: its checksum" in out) == (1, True)


def test_export_and_import(finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Out to Megatron-LM and datatrove and back: the same ids, without a copy of them."""
    tokens = TokenSet.open(finished_run / "tokens")
    for kind, name in (("megatron", "docs_train.idx"), ("datatrove", "docs_train.ds")):
        exported, adopted = tmp_path / kind, tmp_path / f"{kind}-back"
        code, out, _ = call(capsys, "tokens", "export", str(finished_run), "--format", kind, "--out", str(exported))
        assert (code, str(exported / name) in out) == (0, True)
        code, out, _ = call(
            capsys, "tokens", "import", str(exported / name), "--tokenizer", str(finished_run), "--source", "web",
            "--eos", "<|endoftext|>", "--out", str(adopted), "--json",
        )  # fmt: skip
        back = TokenSet.open(adopted).sources["web"]
        assert (code, json.loads(out)["ids"]) == (0, back.tokens)
        assert np.array_equal(back.read(0, back.tokens), tokens.sources["docs"].read(0, back.tokens))
        assert (adopted / "part-00000.bin").is_symlink()
    code, _, err = call(capsys, "tokens", "export", str(finished_run), "--format", "megatrn", "--out", str(tmp_path))
    assert (code, "Did you mean `megatron`?" in err) == (2, True)
    code, _, err = call(
        capsys, "tokens", "import", "none.idx", "--tokenizer", str(finished_run), "--source", "s", "--eos", "x",
        "--out", str(tmp_path / "no"),
    )  # fmt: skip
    assert (code, "none.idx: no such file" in err) == (1, True)


def test_a_mixture_of_imported_files_and_a_run(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of Megatron-LM and of datatrove beside the run's own shards, in one set that a mixture draws from."""
    from gristmill.mixtures.mixture import Mixture

    for kind in ("megatron", "datatrove"):
        call(capsys, "tokens", "export", str(finished_run), "--format", kind, "--out", str(tmp_path / kind))
    files = (f"mega={tmp_path}/megatron/docs_train.idx", f"trove={tmp_path}/datatrove/code_train.ds")
    fixed = ("--tokenizer", str(finished_run), "--eos", "<|endoftext|>", "--out", str(tmp_path / "all"))
    code, out, err = call(capsys, "tokens", "import", *files, str(finished_run / "tokens"), *fixed)
    assert (code, "of sources code, docs, mega, readmes, trove" in out) == (0, True), err
    code, out, _ = call(capsys, "tokens", "verify", str(tmp_path / "all"))
    assert (code, out) == (0, f"{tmp_path}/all: sound.\n")
    both, own = TokenSet.open(tmp_path / "all"), TokenSet.open(finished_run / "tokens")
    for name, as_named in (("docs", "mega"), ("code", "trove"), ("readmes", "readmes")):
        count = own.sources[name].tokens
        assert np.array_equal(both.sources[as_named].read(0, count), own.sources[name].read(0, count))
    assert list(both.holdout) == ["code", "docs", "readmes"]
    (tmp_path / "m.yaml").write_text(
        "name: m\nsources: {mega: {weight: 1}, trove: {weight: 1}, readmes: {weight: 1}}\n"
    )
    plan = Mixture.load(str(tmp_path / "m.yaml")).plan(str(tmp_path / "all"), seq_len=64, budget_tokens=2_000)
    drawn = set()
    for batch in plan.loader():
        source, start = batch.sources[int(batch.source[0])], 64 * int(batch.window[0])
        theirs = {"mega": "docs", "trove": "code"}.get(source, source)
        assert np.array_equal(batch.tokens[0], own.sources[theirs].read(start, 65))
        drawn.add(source)
    assert (plan.windows, drawn) == (31, {"mega", "readmes", "trove"})
    code, _, err = call(capsys, "tokens", "import", files[0].partition("=")[2], *fixed)
    assert (code, "which source is it?" in err) == (1, True)
    other = ("--tokenizer", str(tmp_path / "t.json"), *fixed[2:])
    text = (finished_run / "tokens/tokenizer.json").read_text()
    (tmp_path / "t.json").write_text(text + "\n")
    code, _, err = call(capsys, "tokens", "import", str(finished_run / "tokens"), *other)
    assert (code, "made with another tokenizer" in err) == (1, True)


def test_held_out_documents_are_shown_as_such(finished_run: Path) -> None:
    found = show(str(finished_run), "0", "docs", "holdout")
    assert found.split == "holdout"
    share = open_run(finished_run).recipe["tokens"]["holdout_share"]
    import pyarrow as pa

    assert is_held_out(pa.array([found.text]), share).all()
