"""An ablation: one model per mixture and seed, all else equal, scored and ranked.

    name: demo
    mixtures: [../../mixtures/docs_only.yaml, ../../mixtures/blend.yaml]    # relative to this file
    seeds: [1, 2]
    budget_tokens: 400_000                     # each run
    target_tokens: 20_000_000                  # of the run that is decided on: sources are repeated as often as there
    train: {model: 3m, seq_len: 256, batch_windows: 32, ranks: 2}           # `config.TrainConfig`
    evaluation_sets: {arc: eval/arc.jsonl}     # what the models are compared on later; `decontaminate` takes it out

    ranking = ablate(Ablation.load("ablation.yaml"), "out/demo/run/tokens", "out/demo/run/ablation")

Each run has a folder of its own, `<mixture>-seed<n>`. A seed decides first weights and order of windows, so mixtures
with the same seed start from the same weights. Runs that are there with the same key are not repeated; a run that
fails is tried again, then reported: in the ranking's `runs` and `notes`, and by an error when none is left to rank.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from gristmill.mixtures.mixture import Mixture
from gristmill.stages.documents import Settings
from gristmill.stages.settings_file import load as load_settings
from gristmill.stages.shards import publish_bytes
from gristmill.tokenize.shards import TokenSet
from gristmill.trainer.config import RUN_FILE, Run, TrainConfig, TrainError
from gristmill.trainer.feed import open_feed
from gristmill.trainer.launch import Outcome, finished, run
from gristmill.trainer.ranking import Ranking, RunRow, rank
from gristmill.trainer.score import Scores, held_out

RANKING_FILE = "ranking.json"
OnEvent = Callable[[dict[str, Any]], None]


class Ablation(Settings):
    """What is compared, and how each model is trained."""

    name: str = "ablation"
    mixtures: tuple[str, ...] = Field(min_length=1)  # files
    seeds: tuple[int, ...] = Field(min_length=1)
    train: TrainConfig
    match_repetition: bool = True  # false: with `target_tokens` sources stay whole, and the ranking says so
    confidence: float = Field(default=0.95, gt=0.5, lt=1)  # of intervals and verdicts
    retries: int = Field(default=1, ge=0)  # of a run that failed for good
    # Not read here: the stage `decontaminate` of a recipe with this ablation keeps these items out of the corpus.
    evaluation_sets: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _budget_goes_to_train(cls, data: Any) -> Any:
        """`budget_tokens` and `target_tokens` stand beside `seeds`: they are what an ablation is planned by."""
        if not isinstance(data, dict) or not isinstance(data.get("train", {}), dict):
            return data
        train = dict(data.get("train", {}))
        if "seed" in train:
            raise ValueError("train.seed is not used in an ablation: give `seeds`")
        out = {**data, "train": train}
        if "budget_tokens" in out:
            train["budget_tokens"] = out.pop("budget_tokens")
        if "target_tokens" in out:
            train["target_tokens"] = out.pop("target_tokens")
        return out

    @model_validator(mode="after")
    def _target_is_known(self) -> Self:
        if not self.match_repetition and self.train.target_tokens is None:
            raise ValueError("match_repetition: false says nothing without target_tokens")
        return self

    @property
    def trained(self) -> TrainConfig:
        """The settings of every run but for the seed."""
        return self.train if self.match_repetition else self.train.model_copy(update={"target_tokens": None})

    @property
    def warnings(self) -> list[str]:
        """What makes the ranking say less than it seems to, whatever the runs come to."""
        if self.match_repetition:
            return []
        return [
            f"Sources are whole in these runs of {self.train.total_tokens:,} tokens, so they repeat less than in the "
            f"run of {self.train.target_tokens:,} that is decided on: small sources look better here than there."
        ]

    @field_validator("seeds", "mixtures")
    @classmethod
    def _distinct(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(values)) < len(values):
            raise ValueError(f"{next(v for v in values if values.count(v) > 1)} is named twice")
        return values

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a YAML file; mixture paths count from its folder. Raises SettingsError with file and line."""
        ablation = load_settings(cls, path)
        folder = Path(path).parent
        return ablation.model_copy(update={"mixtures": tuple(str(folder / mixture) for mixture in ablation.mixtures)})


@dataclass(frozen=True)
class Planned:
    """A run to do."""

    name: str  # of its folder
    mixture: str
    path: str
    seed: int
    config: TrainConfig
    key: str


def plan_runs(ablation: Ablation, tokens_folder: str, out: str) -> list[Planned]:
    """Every run, mixtures in order within a seed, so that an ablation that is cut short has whole seeds.

    Compiles every mixture, so that what cannot be trained is refused before anything is. Raises MixtureError,
    TokenError, and TrainError where two mixtures share a name or nothing is held out.
    """
    tokens = TokenSet.open(tokens_folder)
    held_out(tokens, ablation.train)
    names: dict[str, str] = {}
    for path in ablation.mixtures:
        name = Mixture.load(path).name
        if not re.fullmatch(r"[\w.-]+", name):
            raise TrainError(
                f"{path}: the mixture's name {name!r} becomes a folder: use letters, digits, _, - and dots."
            )
        if name in names:
            raise TrainError(f"{path} and {names[name]} are both called {name}: an ablation tells mixtures by name.")
        names[name] = path
    runs = []
    for seed in ablation.seeds:
        for name, path in names.items():
            config = ablation.trained.model_copy(update={"seed": seed})
            folder = f"{name}-seed{seed}"
            job = Run(config=config, mixture=path, tokens=tokens_folder, out=str(Path(out) / folder))
            runs.append(Planned(folder, name, path, seed, config, open_feed(job, tokens).key))
    return runs


def ablate(ablation: Ablation, tokens_folder: str, out: str, on_progress: OnEvent | None = None) -> Ranking:
    """Trains what is missing, one run after the other, ranks, and writes `out`/ranking.json.

    on_progress gets {"event": "found" | "start" | "step" | "done" | "failed", "run", "index", "of"}; a step adds what
    metrics.jsonl has, and "steps"; done adds "bits_per_byte"; failed adds "error". Raises TrainError when no run
    finished, or when one was stopped from outside; finished runs stay and are found again.
    """
    tell = on_progress or (lambda event: None)
    planned = plan_runs(ablation, tokens_folder, out)
    cells: dict[tuple[str, int], Scores] = {}
    rows = []
    for index, job in enumerate(planned):
        where = {"run": job.name, "index": index, "of": len(planned)}
        row, scores = _one(job, ablation.retries, tokens_folder, str(Path(out) / job.name), where, tell)
        rows.append(row)
        if scores is not None:
            cells[job.mixture, job.seed] = scores
    mixtures = list(dict.fromkeys(job.mixture for job in planned))
    ranking = rank(
        ablation.name, mixtures, ablation.seeds, cells, rows, ablation.train.total_tokens, ablation.confidence
    )
    ranking = ranking.model_copy(update={"notes": [*ablation.warnings, *ranking.notes]})
    publish_bytes(str(Path(out) / RANKING_FILE), ranking.encoded())
    if not cells:
        raise TrainError(f"{out}: no run of the ablation finished. The first: {rows[0].name}: {rows[0].error}")
    return ranking


def _one(
    job: Planned, retries: int, tokens_folder: str, folder: str, where: dict[str, Any], tell: OnEvent
) -> tuple[RunRow, Scores | None]:
    """One run, found or trained -> its row, and its scores if it finished."""
    found = finished(Path(folder), job.key)
    if found is not None and found.scores is not None:
        tell({"event": "found", **where, "bits_per_byte": found.scores.bits_per_byte})
        return _row(job, found, reused=True), found.scores
    _clear_other(Path(folder), job.key)
    steps = job.config.total_steps
    tell({"event": "start", **where, "steps": steps})
    error = ""
    for _ in range(1 + retries):
        try:
            outcome = run(
                job.config,
                job.path,
                tokens_folder,
                folder,
                lambda line: tell({"event": "step", **where, "steps": steps, **line}),
                job.key,
            )
        except TrainError as problem:
            error = str(problem)
            continue
        if outcome.scores is None:
            raise TrainError(f"{folder}: training was stopped from outside. The same command goes on from there.")
        tell({"event": "done", **where, "bits_per_byte": outcome.scores.bits_per_byte})
        return _row(job, outcome, reused=False), outcome.scores
    tell({"event": "failed", **where, "error": error})
    return RunRow(name=job.name, mixture=job.mixture, seed=job.seed, status="failed", error=error), None


def _clear_other(folder: Path, key: str) -> None:
    """Removes what a run of other settings or data left under this name."""
    path = folder / RUN_FILE
    if path.exists() and Run.load(path).key != key:
        shutil.rmtree(folder)


def _row(job: Planned, outcome: Outcome, *, reused: bool) -> RunRow:
    assert outcome.scores is not None
    return RunRow(
        name=job.name,
        mixture=job.mixture,
        seed=job.seed,
        status="done",
        reused=reused,
        score=outcome.scores.mean,
        bits_per_byte=outcome.scores.bits_per_byte,
        tokens=outcome.done["sources"],
        skipped=outcome.done["skipped"],
        seconds=outcome.done["seconds"],
    )
