"""Tasks of lm-evaluation-harness on our model: against its own Hugging Face backend, and against sums by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from gristmill.pipelines.cli import app
from gristmill.trainer.config import TrainError
from gristmill.trainer.export import export_model
from gristmill.trainer.group import ALONE
from gristmill.trainer.tasks import PRESETS, TaskSettings, as_items, read_items
from gristmill.trainer.train import work
from gristmill.trainer.trained import open_trained

evaluate = pytest.importorskip("gristmill.trainer.evaluate")
pytest.importorskip("lm_eval")

HEAD = "dataset_path: json\ndataset_kwargs: {data_files: {test: ITEMS.jsonl, train: ITEMS.jsonl}, cache_dir: CACHE}\n"
FILES = {
    "choose": "test_split: test\nfewshot_split: train\noutput_type: multiple_choice\n"
    'doc_to_text: "Question: {{question}}\\nAnswer:"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n'
    "metric_list:\n"
    + "".join(
        f"  - {{metric: {m}, aggregation: mean, higher_is_better: true}}\n" for m in ("acc", "acc_norm", "acc_bytes")
    ),
    "whole": "test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\n"
    "doc_to_target: \"{{question}} {{choices | join(' ')}}\"\n"
    "metric_list:\n  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}\n",
    "last": 'test_split: test\noutput_type: loglikelihood\ndoc_to_text: "{{question}}"\n'
    'doc_to_target: " {{choices[answer]}}"\n'
    "metric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n",
    "write": 'test_split: test\noutput_type: generate_until\ndoc_to_text: "{{question}}"\n'
    'doc_to_target: "{{choices[answer]}}"\n'
    'generation_kwargs: {until: ["e", "\\n"], max_gen_toks: 6}\n'
    "metric_list:\n  - {metric: exact_match, aggregation: mean, higher_is_better: true}\n",
    "where": "test_split: test\noutput_type: multiple_choice\ndoc_to_text: answer\n"
    'doc_to_choice: choices\ndoc_to_target: "or {{question[:20]}}"\n'
    "metric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n",
}


def items() -> list[dict]:
    rng = np.random.default_rng(3)
    words = ["cat", "a dog", "Moon", "seven horses", "no", "café crème", "river bank of the old town", "Oslo", "3"]
    out = []
    for number in range(24):
        choices = [str(w) for w in rng.choice(words, 2 + number % 3, replace=False)]
        body = " ".join(str(w) for w in rng.choice(words, 1 + number % 9))
        out.append({"question": f"{body}?", "choices": choices, "answer": int(rng.integers(len(choices)))})
    return out


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "items.jsonl").write_bytes(b"".join(orjson.dumps(item) + b"\n" for item in items()))
    head = HEAD.replace("ITEMS", "items").replace("CACHE", str(tmp_path_factory.mktemp("cache")))
    for name, body in FILES.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{head}{body}")
    (folder / "all.yaml").write_text("group: both\ntask: [choose, last]\n")
    return folder


@pytest.fixture(scope="module")
def run_folder(spelled_tokens, tmp_path_factory, make_run) -> Path:
    """Three steps from large first weights, so that answers differ; windows so short that some items are cut."""
    shape = {"width": 32, "layers": 2, "heads": 4, "init_std": 0.2}
    run = make_run(tmp_path_factory.mktemp("judged") / "run", model=shape, steps=3, seq_len=64)
    run = run.model_copy(update={"tokens": str(spelled_tokens)})
    run.save(Path(run.out) / "run.json")
    work(run, ALONE)
    return Path(run.out)


@pytest.fixture(scope="module")
def settings(task_folder) -> TaskSettings:
    return TaskSettings(names=tuple(FILES), include_path=(str(task_folder),), fewshot=1)


@pytest.fixture(scope="module")
def ours(run_folder, settings, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    scores = evaluate.evaluate_tasks(open_trained(run_folder), settings, str(out))
    return scores, out


def test_every_item_is_what_the_harness_says_of_the_exported_model(run_folder, settings, ours, tmp_path):
    from lm_eval.models.huggingface import HFLM

    export_model(open_trained(run_folder), str(tmp_path / "model"))
    with evaluate.quiet():
        theirs = HFLM(pretrained=str(tmp_path / "model"), device="cpu", batch_size=4, dtype="float32")
        rows, results = evaluate.items_of(theirs, evaluate.load_tasks(settings), settings)
    kept = pq.read_table(ours[1] / "items.parquet").to_pylist()
    assert len(rows) == len(kept) == 24 * len(FILES)
    for a, b in zip(kept, rows, strict=True):
        assert a["log_likelihoods"] == pytest.approx(b["log_likelihoods"], abs=2e-4)
        for key in ("task", "item", "item_hash", "gold", "accuracy", "accuracy_chars", "accuracy_bytes", "response"):
            assert a[key] == b[key], (key, a, b)
    for task, row in results.items():
        for metric, value in row.items():
            mine = ours[0].harness["results"][task][metric]
            assert mine == (value if isinstance(value, str) else pytest.approx(value, rel=1e-4)), (task, metric)


def test_our_accuracies_are_the_harness_s(ours):
    result, mine = ours[0].harness["results"]["choose"], ours[0].tasks["choose"]
    assert mine["accuracy"] == pytest.approx(result["acc,none"])
    assert mine["accuracy_chars"] == pytest.approx(result["acc_norm,none"])
    assert mine["accuracy_bytes"] == pytest.approx(result["acc_bytes,none"])
    assert ours[0].tasks["whole"]["bits_per_byte"] == pytest.approx(result_of(ours, "whole", "bits_per_byte"), rel=1e-9)
    assert ours[0].tasks["last"]["accuracy"] == pytest.approx(result_of(ours, "last", "acc"))
    assert ours[0].tasks["write"]["accuracy"] == pytest.approx(result_of(ours, "write", "exact_match"))
    assert ours[0].tasks["where"]["accuracy"] == pytest.approx(result_of(ours, "where", "acc"))


def result_of(ours, task: str, metric: str) -> float:
    return ours[0].harness["results"][task][f"{metric},none"]


def test_bits_of_the_right_answer_by_hand(run_folder, task_folder, letters, tmp_path):
    """Softmax of the model's logits, one token after the other, without the code that scores."""
    trained = open_trained(run_folder)
    place = {c: i for i, c in enumerate(letters)}
    bits, size = 0.0, 0
    for item in items():
        context = [place[c] for c in item["question"] if c in place]
        answer = [place[c] for c in f" {item['choices'][item['answer']]}" if c in place]
        ids = (context + answer)[-65:]
        for at in range(len(ids) - len(answer), len(ids)):
            with torch.no_grad():
                logits = trained.model.logits(torch.tensor([ids[:at]]))[0, -1].double()
            bits -= float(torch.log_softmax(logits, 0)[ids[at]]) / math.log(2)
        size += len(item["choices"][item["answer"]].encode())
    settings = TaskSettings(names=("last",), include_path=(str(task_folder),), fewshot=0)
    scores = evaluate.evaluate_tasks(trained, settings, str(tmp_path))
    assert scores.tasks["last"]["bits_per_byte"] == pytest.approx(bits / size, rel=1e-5)


def test_items_are_kept_with_their_chance(ours):
    found = read_items(ours[1] / "items.parquet")
    assert list(found) == list(FILES)
    choose = found["choose"]
    assert choose.baseline.mean() == pytest.approx(np.mean([1 / len(i["choices"]) for i in items()]))
    assert ours[0].tasks["choose"]["baseline"] == pytest.approx(13 / 36)  # 2, 3 and 4 choices in turn
    assert len(set(choose.ids)) == 24
    assert choose.right().bits_per_byte == ours[0].tasks["choose"]["accuracy"]
    assert choose.answers.bytes.sum() == sum(len(i["choices"][i["answer"]].encode()) for i in items())
    assert found["write"].answers is None
    assert found["whole"].right() is None
    summary = ours[0].tasks["choose"]
    assert summary["above_chance"] == pytest.approx((summary["accuracy"] - 13 / 36) / (23 / 36))


def test_several_right_answers_and_one_that_is_none():
    assert evaluate._gold(["b", 0], ["a", "b"]) == [1, 0]
    assert evaluate._gold(7, ["a", "b"]) == []
    row = {
        "group": "g",
        "task": "t",
        "item": 0,
        "item_hash": "h",
        **dict.fromkeys(("gold_bits", "gold_bytes", "accuracy", "accuracy_chars", "accuracy_bytes")),
        "baseline": 0.0,
    }
    items = as_items([row])["g"]
    assert items.answers is None
    assert items.summary()["accuracy"] is None


def test_a_group_is_one_score(run_folder, task_folder, tmp_path):
    settings = TaskSettings(names=("both",), include_path=(str(task_folder),), limit=5)
    scores = evaluate.evaluate_tasks(open_trained(run_folder), settings, str(tmp_path))
    assert scores.tasks["both"]["items"] == 10
    assert set(scores.harness["results"]) == {"choose", "last"}
    key = scores.key
    assert evaluate.finished_tasks(tmp_path, key).tasks == scores.tasks
    assert evaluate.finished_tasks(tmp_path, "other") is None
    other = settings.model_copy(update={"limit": 6})
    state = open_trained(run_folder).state
    assert evaluate.task_key(state.course, state.progress.step, settings) == key
    assert evaluate.task_key(state.course, state.progress.step, other) != key


def test_what_cannot_be_evaluated_is_explained(run_folder, task_folder, tmp_path):
    trained = open_trained(run_folder)
    own = (str(task_folder),)
    with pytest.raises(TrainError, match=r"no task 'chose', neither .* Did you mean `choose`\?"):
        evaluate.load_tasks(TaskSettings(names=("chose",), include_path=own))
    with pytest.raises(TrainError, match="no such folder of task files"):
        evaluate.load_tasks(TaskSettings(names=("choose",), include_path=(str(tmp_path / "none"),)))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "a.yaml").write_text(f"task: lost\n{HEAD.replace('ITEMS', 'gone')}{FILES['choose']}")
    with pytest.raises(TrainError, match=r"'lost' cannot be loaded: .*both must be reachable"):
        evaluate.load_tasks(TaskSettings(names=("lost",), include_path=(str(broken),)))
    long = tmp_path / "long"
    long.mkdir()
    head = HEAD.replace("ITEMS", "items").replace("CACHE", str(tmp_path / "cache"))
    (long / "a.yaml").write_text(f"task: long\n{head}{FILES['last']}")
    (long / "items.jsonl").write_bytes(orjson.dumps({"question": "a", "choices": ["b" * 70], "answer": 0}))
    with pytest.raises(TrainError, match=r"the answer ' bbb.* is 71 tokens, and this model scores 1 to 64"):
        evaluate.evaluate_tasks(trained, TaskSettings(names=("long",), include_path=(str(long),)), str(tmp_path / "o"))
    assert not (tmp_path / "o").exists()
    (long / "b.yaml").write_text(f"task: write\n{head}{FILES['write'].replace('toks: 6', 'toks: 64')}")
    with pytest.raises(TrainError, match="a task wants 64 new tokens, and this model's window has 64"):
        evaluate.evaluate_tasks(trained, TaskSettings(names=("write",), include_path=(str(long),)), str(tmp_path / "o"))


def test_presets_are_tasks_that_the_harness_has():
    known = evaluate.shipped()
    for tasks in PRESETS.values():
        assert [name for name in tasks if name not in known] == []
        assert all(len(reason) > 20 for reason in tasks.values())
    assert TaskSettings(names=("quick", "arc_easy", "mine")).expanded == [*PRESETS["quick"], "mine"]


def test_evaluate_from_the_command_line(run_folder, task_folder, tmp_path):
    (tmp_path / "mine.jsonl").write_bytes(b"".join(orjson.dumps({"text": t}) + b"\n" for t in ("a cat", "Moon?")))
    arguments = ["evaluate", str(run_folder), "--out", str(tmp_path / "out")]
    own = ["--tasks", "choose,last", "--include-path", str(task_folder), "--limit", "6"]
    done = CliRunner().invoke(app, [*arguments, *own, "--text", f"mine={tmp_path}/mine.jsonl", "--json"])
    assert done.exit_code == 0, done.output
    rows = {row["measure"]: row for row in orjson.loads(done.stdout)["measures"]}
    assert list(rows) == ["noise", "tidy", "mine", "choose", "last"]
    assert rows["mine"]["items"] == 2
    assert rows["choose"]["chance"] == pytest.approx(13 / 36)
    assert set(read_items(tmp_path / "out/items.parquet")) == {"choose", "last"}
    table = CliRunner().invoke(app, [*arguments, *own])
    assert "choose" in table.stdout
    assert "tidy" not in table.stdout  # tasks alone were asked for
    listed = CliRunner().invoke(app, ["evaluate", "--presets"])
    assert "hellaswag" in listed.stdout
    assert CliRunner().invoke(app, ["evaluate", str(run_folder), "--text", "mine"]).exit_code != 0
