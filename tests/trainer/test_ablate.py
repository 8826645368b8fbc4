"""An ablation end to end on tiny models; runs go on in this process instead of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import pytest

from gristmill.mixtures.plan import MixtureError
from gristmill.stages.settings_file import SettingsError
from gristmill.trainer import ablation_run as module
from gristmill.trainer import launch, train
from gristmill.trainer.ablate import Ablation, ablate, plan_runs
from gristmill.trainer.config import Run, TrainError
from gristmill.trainer.group import ALONE
from gristmill.trainer.ranking import Ranking

FILE = """\
name: tiny
mixtures: [tidy.yaml, noise.yaml]
seeds: [1, 2]
budget_tokens: 5_200
train:
  model: {width: 32, layers: 2, heads: 2}
  seq_len: 32
  batch_windows: 8
  lr: 0.01
"""


@pytest.fixture
def ablation(tmp_path) -> Path:
    for name in ("tidy", "noise"):
        (tmp_path / f"{name}.yaml").write_text(f"name: {name}\nmax_epochs: 1000\nsources: {{{name}: 1}}\n")
    (tmp_path / "ablation.yaml").write_text(FILE)
    return tmp_path / "ablation.yaml"


class InProcess:
    """Takes the place of launch.run; counts, and fails where it is told to."""

    def __init__(self, failures=()):
        self.started, self.failures = [], list(failures)

    def __call__(self, config, mixture, tokens, out, on_progress=None, key=""):
        name = Path(out).name
        self.started.append(name)
        if name in self.failures:
            self.failures.remove(name)
            raise TrainError(f"{out}: the rank met its end\nand more lines")
        Path(out).mkdir(parents=True, exist_ok=True)
        run = Run(config=config, mixture=mixture, tokens=tokens, out=out, key=key)
        run.save(Path(out) / "run.json")
        train.work(run, ALONE)
        for line in launch.Follower(Path(out) / "metrics.jsonl").new():
            on_progress(line)
        done = orjson.loads((Path(out) / "done.json").read_bytes())
        return launch.finished(Path(out), done["key"])


@pytest.fixture
def runner(monkeypatch):
    def install(*failures):
        runner = InProcess(failures)
        monkeypatch.setattr(module, "run", runner)
        return runner

    return install


def test_the_better_mixture_wins_and_nothing_is_done_twice(tmp_path, tokens_folder, ablation, runner):
    first = runner()
    events: list[dict] = []
    out = str(tmp_path / "out")
    ranking = ablate(Ablation.load(ablation), str(tokens_folder), out, events.append)
    assert first.started == ["tidy-seed1", "noise-seed1", "tidy-seed2", "noise-seed2"]
    assert [row.mixture for row in ranking.mixtures] == ["tidy", "noise"]
    assert ranking.mixtures[0].tokens == {"tidy": 5120}  # 20 whole steps of 5,200 tokens
    assert ranking.budget_tokens == 5120
    assert Ranking.load(tmp_path / "out/ranking.json") == ranking
    assert [e["event"] for e in events if e["event"] != "step"] == ["start", "done"] * 4
    steps = [e for e in events if e["event"] == "step" and e["run"] == "noise-seed2"]
    assert [(e["step"], e["steps"], e["index"], e["of"]) for e in steps] == [(i, 20, 3, 4) for i in range(1, 21)]

    again = runner()
    ablation.write_text(FILE.replace("seeds: [1, 2]", "seeds: [1, 2, 3]"))
    wider = ablate(Ablation.load(ablation), str(tokens_folder), out, events.append)
    assert again.started == ["tidy-seed3", "noise-seed3"]
    assert [run.reused for run in wider.runs] == [True, True, True, True, False, False]
    assert wider.mixtures[0].seeds == [1, 2, 3]
    assert wider.pairs[0].verdict == "tidy is better"

    other = runner()
    ablation.write_text(FILE.replace("seeds: [1, 2]", "seeds: [1]").replace("lr: 0.01", "lr: 0.02"))
    changed = ablate(Ablation.load(ablation), str(tokens_folder), out)
    assert other.started == ["tidy-seed1", "noise-seed1"]  # from the start, not from the other setting's checkpoint
    assert changed.runs[0].score != ranking.runs[0].score


def test_a_run_that_fails_once_is_tried_again(tmp_path, tokens_folder, ablation, runner):
    tries = runner("noise-seed1")
    ranking = ablate(Ablation.load(ablation), str(tokens_folder), str(tmp_path / "out"))
    assert tries.started.count("noise-seed1") == 2
    assert ranking.notes == []


def test_a_run_that_always_fails_is_reported(tmp_path, tokens_folder, ablation, runner):
    runner("noise-seed1", "noise-seed1")
    events: list[dict] = []
    ranking = ablate(Ablation.load(ablation), str(tokens_folder), str(tmp_path / "out"), events.append)
    assert [run.status for run in ranking.runs] == ["done", "failed", "done", "done"]
    assert "the rank met its end" in next(e["error"] for e in events if e["event"] == "failed")
    assert any("noise-seed1 failed" in note for note in ranking.notes)
    assert any("Seed 1 is left out" in note for note in ranking.notes)
    assert ranking.pairs[0].p is None


def test_no_run_at_all_is_an_error(tmp_path, tokens_folder, ablation, runner):
    runner(*["tidy-seed1", "noise-seed1", "tidy-seed2", "noise-seed2"] * 2)
    with pytest.raises(TrainError, match=r"no run of the ablation finished. The first: tidy-seed1: .* met its end"):
        ablate(Ablation.load(ablation), str(tokens_folder), str(tmp_path / "out"))
    assert (tmp_path / "out/ranking.json").exists()


def test_what_cannot_work_is_refused_before_anything_is_trained(tmp_path, tokens_folder, ablation, runner):
    started = runner()
    (tmp_path / "noise.yaml").write_text("name: tidy\nmax_epochs: 1000\nsources: {noise: 1}\n")
    with pytest.raises(TrainError, match=r"are both called tidy: an ablation tells mixtures by name"):
        ablate(Ablation.load(ablation), str(tokens_folder), str(tmp_path / "out"))
    (tmp_path / "noise.yaml").write_text("name: noise\nsources: {noise: 1}\n")
    with pytest.raises(MixtureError, match="epochs"):  # the default allows 4
        ablate(Ablation.load(ablation).model_copy(update={"train": _more(ablation)}), str(tokens_folder), "out")
    (tmp_path / "noise.yaml").write_text("name: a/b\nmax_epochs: 99\nsources: {noise: 1}\n")
    with pytest.raises(TrainError, match="becomes a folder"):
        plan_runs(Ablation.load(ablation), str(tokens_folder), "out")
    assert started.started == []


def _more(ablation):
    return Ablation.load(ablation).train.model_copy(update={"budget_tokens": 100_000})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lr:", "lrr:", r"ablation.yaml:9: unknown key `train.lrr`. Did you mean `lr`\?"),
        ("seeds: [1, 2]", "seeds: [1, 1]", r"ablation.yaml:3: `seeds`: .*1 is named twice"),
        ("lr: 0.01", "seed: 3", r"train.seed is not used in an ablation: give `seeds`"),
        ("budget_tokens: 5_200\n", "", r"give one of steps and budget_tokens"),
        ("budget_tokens: 5_200", "budget_tokens: 5", r"less than one step"),
        ("seeds: [1, 2]", "seeds: [1, 2]\ncontrol: tidy", r"give both, or neither"),
        ("seeds: [1, 2]", "seeds: [1, 2]\ncontrol: tidy\ncontrol_seeds: [2, 3]", r"seed 2 is in `seeds` and in"),
    ],
)
def test_a_wrong_file_is_explained(ablation, old, new, message):
    ablation.write_text(FILE.replace(old, new))
    with pytest.raises(SettingsError, match=message):
        Ablation.load(ablation)


def test_repeats_of_a_control_are_trained_last_and_make_one_seed_enough(tmp_path, tokens_folder, ablation, runner):
    started = runner()
    ablation.write_text(FILE.replace("seeds: [1, 2]", "seeds: [1]\ncontrol: tidy\ncontrol_seeds: [7, 8, 9]"))
    found = ablate(Ablation.load(ablation), str(tokens_folder), str(tmp_path / "out"))
    assert started.started == ["tidy-seed1", "noise-seed1", "tidy-seed7", "tidy-seed8", "tidy-seed9"]
    assert found.noise_degrees == 2
    assert found.control_repeats == 3
    ablation.write_text(FILE.replace("seeds: [1, 2]", "seeds: [1]\ncontrol: tidied\ncontrol_seeds: [7, 8]"))
    with pytest.raises(TrainError, match="`control` names 'tidied'; the mixtures are tidy, noise"):
        plan_runs(Ablation.load(ablation), str(tokens_folder), "out")


def test_texts_given_are_scored_in_the_loop_and_need_no_second_training(
    tmp_path, tokens_folder, spelled_tokens, ablation, runner
):
    first = runner()
    ablation.write_text(FILE.replace("lr: 0.01", "lr: 0.01\n  eval_every: 10"))
    out = tmp_path / "out"
    ablate(Ablation.load(ablation), str(spelled_tokens), str(out))
    weights = (out / "tidy-seed1/checkpoints/step-00000020/state.json").read_bytes()
    assert len(first.started) == 4

    (tmp_path / "eval").mkdir()
    (tmp_path / "eval/lines.txt").write_text("the cat\na dog, and a horse\n")
    sets = "evaluation_sets: {lines: eval/lines.txt}\nrank_by: [lines]\n"
    ablation.write_text(sets + FILE.replace("lr: 0.01", "lr: 0.01\n  eval_every: 10"))
    again = runner()
    found = ablate(Ablation.load(ablation), str(spelled_tokens), str(out))
    assert len(again.started) == 4
    lines = [orjson.loads(line) for line in (out / "tidy-seed1/metrics.jsonl").read_bytes().splitlines()]
    assert len(lines) == 20
    assert (out / "tidy-seed1/checkpoints/step-00000020/state.json").read_bytes() == weights  # scored, not trained
    assert found.rank_by == ["lines"]
    row = next(row for row in found.measures if row.name == "lines")
    assert row.kind == "text"
    assert found.runs[0].evaluation_sets["lines"] == pytest.approx(
        orjson.loads((out / "tidy-seed1/done.json").read_bytes())["evaluation_sets"]["lines"]
    )

    shutil.rmtree(out)
    ablate(Ablation.load(ablation), str(spelled_tokens), str(out))
    lines = [orjson.loads(line) for line in (out / "tidy-seed1/metrics.jsonl").read_bytes().splitlines()]
    scored = [line for line in lines if "evaluation_sets" in line]
    assert [line["step"] for line in scored] == [10]
    curves = orjson.loads((out / "curves.json").read_bytes())
    assert [(c["mixture"], c["seed"]) for c in curves] == [("tidy", 1), ("noise", 1), ("tidy", 2), ("noise", 2)]
    points = curves[0]["points"]
    assert [(p["step"], p["tokens"]) for p in points] == [(10, 2560), (20, 5120)]
    assert points[0]["evaluation_sets"] == scored[0]["evaluation_sets"]
    assert points[1]["bits_per_byte"] == found.runs[0].bits_per_byte

    (tmp_path / "eval/lines.txt").write_text("other words\n")
    assert runner().started == []
    changed = ablate(Ablation.load(ablation), str(spelled_tokens), str(out))
    assert changed.runs[0].evaluation_sets != found.runs[0].evaluation_sets  # what is in the file counts

    (tmp_path / "eval/lines.txt").write_text("\n")
    with pytest.raises(TrainError, match=r"The evaluation set 'lines' .* has no text"):
        plan_runs(Ablation.load(ablation), str(spelled_tokens), str(out))
    ablation.write_text(sets.replace("lines", "noise") + FILE)
    (tmp_path / "eval/noise.txt").write_text("some\n")
    with pytest.raises(TrainError, match="'noise' has the name of a source"):
        plan_runs(Ablation.load(ablation), str(spelled_tokens), str(out))


def test_repetition_is_that_of_the_run_that_is_decided_on(ablation, runner, tokens_folder):
    folder = str(tokens_folder)
    free = {job.name: job.key for job in plan_runs(Ablation.load(ablation), folder, "out")}
    ablation.write_text(FILE + "target_tokens: 10_400\n")
    matched = Ablation.load(ablation)
    assert (matched.trained.target_tokens, matched.warnings) == (10_400, [])
    assert all(job.key != free[job.name] for job in plan_runs(matched, folder, "out"))
    ablation.write_text(FILE + "target_tokens: 10_400\nmatch_repetition: false\n")
    whole = Ablation.load(ablation)
    assert {job.name: job.key for job in plan_runs(whole, folder, "out")} == free
    runner()
    ranking = ablate(whole, folder, str(ablation.parent / "out"))
    assert ranking.notes[0].startswith("Sources are whole in these runs of 5,120 tokens, so they repeat less")
    ablation.write_text(FILE + "match_repetition: false\n")
    with pytest.raises(SettingsError, match="says nothing without target_tokens"):
        Ablation.load(ablation)
    ablation.write_text(FILE + "target_tokens: 100\n")
    with pytest.raises(SettingsError, match="target_tokens 100 is of a larger run than this one of 5,120"):
        Ablation.load(ablation)
