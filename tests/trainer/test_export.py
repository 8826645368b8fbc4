"""Exported models against transformers, and what an export refuses."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import orjson
import pytest
import torch
from typer.testing import CliRunner

from gristmill.pipelines.cli import app
from gristmill.trainer import checkpoint
from gristmill.trainer.config import TrainError
from gristmill.trainer.export import export_model
from gristmill.trainer.group import ALONE
from gristmill.trainer.train import work
from gristmill.trainer.trained import continue_ids, continue_text, open_trained

sys.path.append(str(Path(__file__).parent))
from token_texts import spelled


@pytest.fixture(scope="module")
def readable_tokens(tokens_folder, tmp_path_factory):
    """The token shards with a tokenizer that can be read: 60 letters, each an id, and <eos>."""
    letters = [chr(ord("A") + i) for i in range(60)]
    return spelled(tokens_folder, tmp_path_factory.mktemp("export") / "tokens", letters)


@pytest.fixture(scope="module")
def trained_run(readable_tokens, tmp_path_factory, make_run):
    """trained_run(**model) -> folder of a run of three steps with large first weights, so that logits differ."""

    def make(**model: object) -> Path:
        shape = {"width": 32, "layers": 2, "heads": 4, "init_std": 0.2, **model}
        run = make_run(tmp_path_factory.mktemp("trained") / "run", model=shape, steps=3, checkpoint_every=2)
        run = run.model_copy(update={"tokens": str(readable_tokens)})
        run.save(Path(run.out) / "run.json")
        work(run, ALONE)
        return Path(run.out)

    return make


@pytest.fixture(scope="module")
def plain(trained_run):
    return trained_run(kv_heads=2)


@pytest.mark.parametrize(
    "model",
    [
        {"kv_heads": 2},
        {"tied": False, "rope_base": 100.0, "vocab_size": 64},
        {"qk_norm": True, "kv_heads": 1, "norm_eps": 1e-3},
    ],
)
def test_transformers_computes_the_same_logits_and_generates(trained_run, tmp_path, model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = open_trained(trained_run(**model))
    export_model(trained, str(tmp_path / "model"))
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("ABz")["input_ids"] == [0, 1, 57]
    assert tokenizer.eos_token_id == 60
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        ours = trained.model.logits(ids)
        torch.testing.assert_close(theirs.eval()(ids).logits, ours, atol=1e-4, rtol=0)
        assert ours.std() > 0.1  # a comparison of zeros would show nothing
        written = theirs.generate(ids[:1, :4], max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=60)
    assert written[0, 4:].tolist() == list(continue_ids(trained.model, [0, 1, 2, 3], 5, 32, temperature=0))


def test_weights_in_several_files_and_in_bfloat16_are_read_as_one(plain, tmp_path):
    from transformers import AutoModelForCausalLM

    trained = open_trained(plain)
    export_model(trained, str(tmp_path / "model"), "bfloat16", max_file_bytes=10_000)
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 2
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert theirs.dtype == torch.bfloat16
    ours = dict(trained.model.named_parameters())
    for name, parameter in theirs.model.named_parameters():
        assert torch.equal(parameter, ours[name].to(torch.bfloat16)), name


def test_the_same_checkpoint_gives_the_same_files_and_a_card_with_its_numbers(plain, tmp_path):
    runner = CliRunner()
    for name in ("a", "b"):
        result = runner.invoke(app, ["export", "model", str(plain), "--out", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
    digests = [
        {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (tmp_path / name).iterdir()} for name in "ab"
    ]
    assert digests[0] == digests[1]
    card = (tmp_path / "a" / "README.md").read_text()
    assert "| trained on | 768 tokens in 3 of 3 steps |" in card  # 3 steps of 8 windows of 32
    assert "| tidy | 384 |" in card
    assert "bits per byte" in card
    assert set(orjson.loads((tmp_path / "a" / "export.json").read_bytes())["files"]) == set(digests[0]) - {
        "export.json"
    }


def test_one_checkpoint_of_a_run_can_be_named(plain):
    earlier = open_trained(plain / "checkpoints" / "step-00000002")
    assert earlier.state.progress.step == 2
    assert open_trained(plain).state.progress.step == 3
    assert not torch.equal(earlier.model.embed_tokens.weight, open_trained(plain).model.embed_tokens.weight)


def test_a_checkpoint_without_books_is_exported_without_that_table(plain, tmp_path):
    shutil.copytree(plain, tmp_path / "run")
    next((tmp_path / "run").glob("checkpoints/step-00000003/consumption.json")).unlink()
    state = tmp_path / "run" / "checkpoints" / "step-00000003" / "state.json"
    body = orjson.loads(state.read_bytes())
    del body["files"]["consumption.json"]
    state.write_bytes(orjson.dumps(body))
    card = export_model(open_trained(tmp_path / "run"), str(tmp_path / "model")) / "README.md"
    assert "tokens seen" not in card.read_text()
    assert "| token shards of |" in card.read_text()


def test_a_seed_decides_what_is_written(plain):
    trained = open_trained(plain)
    texts = [continue_text(trained, "ABC", 20, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all("A" <= c <= chr(ord("A") + 59) for text in texts for c in text)
    result = CliRunner().invoke(app, ["generate", str(plain), "--prompt", "ABC", "--max-tokens", "20", "--seed", "1"])
    assert result.output == f"ABC{texts[0]}\n"


def test_ids_beyond_the_tokenizer_are_never_written(trained_run):
    trained = open_trained(trained_run(vocab_size=1000))
    assert max(continue_ids(trained.model, [1], 50, 32, temperature=100.0, vocab_size=61)) < 61


def test_what_cannot_be_exported_is_refused(plain, tmp_path):
    with pytest.raises(TrainError, match="neither a training run with a checkpoint nor a checkpoint"):
        open_trained(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(TrainError, match="there is something already"):
        export_model(open_trained(plain), str(tmp_path / "full"))
    shutil.copytree(plain, tmp_path / "run")
    newest = checkpoint.complete(tmp_path / "run" / "checkpoints")[-1]
    data = next(newest.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    with pytest.raises(TrainError, match="not a sound checkpoint"):
        open_trained(tmp_path / "run")
