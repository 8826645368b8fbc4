"""An ablation: one model per mixture and seed, all else equal, scored and ranked.

    name: demo
    mixtures: [../../mixtures/docs_only.yaml, ../../mixtures/blend.yaml]    # relative to this file
    seeds: [1, 2]
    budget_tokens: 400_000                     # each run
    target_tokens: 20_000_000                  # of the run that is decided on: sources are repeated as often as there
    train: {model: 3m, seq_len: 256, batch_windows: 32, ranks: 2}           # `config.TrainConfig`
    evaluation_sets: {arc: eval/arc.jsonl}     # texts that are scored too; `decontaminate` takes them out
    tasks: [arc_easy, hellaswag]               # of lm-evaluation-harness, or `tasks.TaskSettings`
    rank_by: [arc]                             # whose bits per byte the ranking is by; default: every held-out source
    control: docs_only                         # a mixture that is repeated, so that the noise is known better
    control_seeds: [11, 12, 13]

    ranking = ablate(Ablation.load("ablation.yaml"), "out/demo/run/tokens", "out/demo/run/ablation")

Each run has a folder of its own, `<mixture>-seed<n>`; curves of all runs are in `curves.json`. A seed decides first
weights and order of windows, so mixtures with the same seed start from the same weights. Runs that are there with the
same key are not repeated; a run that fails is tried again, then reported: in the ranking's `runs` and `notes`, and by
an error when none is left to rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson
from pydantic import Field, field_validator, model_validator

from gristmill.mixtures.mixture import Mixture
from gristmill.stages.documents import Settings
from gristmill.stages.settings_file import load as load_settings
from gristmill.stages.shards import publish_bytes
from gristmill.tokenize.shards import TokenSet
from gristmill.trainer import metrics
from gristmill.trainer.ablation_run import TASKS_FOLDER, OnEvent, Planned, carry_out, found_row
from gristmill.trainer.comparison import Tasks
from gristmill.trainer.config import Run, TrainConfig, TrainError
from gristmill.trainer.feed import open_feed
from gristmill.trainer.launch import finished
from gristmill.trainer.ranking import Ranking, RunRow, rank
from gristmill.trainer.score import Scores, yardstick
from gristmill.trainer.tasks import ITEMS_FILE, TaskSettings, read_items, short_form

RANKING_FILE, CURVES_FILE = "ranking.json", "curves.json"


class Ablation(Settings):
    """What is compared, and how each model is trained."""

    name: str = "ablation"
    mixtures: tuple[str, ...] = Field(min_length=1)  # files
    seeds: tuple[int, ...] = Field(min_length=1)
    train: TrainConfig
    match_repetition: bool = True  # false: with `target_tokens` sources stay whole, and the ranking says so
    confidence: float = Field(default=0.95, gt=0.5, lt=1)  # of intervals and verdicts
    retries: int = Field(default=1, ge=0)  # of a run that failed for good
    tasks: TaskSettings | None = None  # every finished run is asked
    rank_by: tuple[str, ...] = ()  # sources, evaluation sets or tasks, by their bits per byte; empty: the sources
    control: str = ""  # the name of a mixture
    control_seeds: tuple[int, ...] = ()  # that it alone is trained with besides

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
        for name in ("budget_tokens", "target_tokens", "evaluation_sets"):
            if name in out:
                train[name] = out.pop(name)
        if "tasks" in out:
            out["tasks"] = short_form(out["tasks"])
        return out

    @model_validator(mode="after")
    def _control_is_whole(self) -> Self:
        if bool(self.control) != bool(self.control_seeds):
            raise ValueError("`control` names a mixture and `control_seeds` its further seeds: give both, or neither")
        if shared := set(self.seeds) & set(self.control_seeds):
            raise ValueError(f"seed {min(shared)} is in `seeds` and in `control_seeds`: repeats need other seeds")
        return self

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
    def configs(self) -> dict[int, TrainConfig]:
        """The settings of every run by its seed, the repeats of a control last."""
        return {seed: self.trained.model_copy(update={"seed": seed}) for seed in (*self.seeds, *self.control_seeds)}

    @property
    def warnings(self) -> list[str]:
        """What makes the ranking say less than it seems to, whatever the runs come to."""
        if self.match_repetition:
            return []
        return [
            f"Sources are whole in these runs of {self.train.total_tokens:,} tokens, so they repeat less than in the "
            f"run of {self.train.target_tokens:,} that is decided on: small sources look better here than there."
        ]

    @field_validator("seeds", "mixtures", "control_seeds")
    @classmethod
    def _distinct(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(values)) < len(values):
            raise ValueError(f"{next(v for v in values if values.count(v) > 1)} is named twice")
        return values

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a YAML file; paths count from its folder. Raises SettingsError with file and line."""
        return load_settings(cls, path).below(Path(path).parent)

    def below(self, folder: Path) -> Self:
        """With its files counted from a folder."""
        return self.model_copy(
            update={
                "mixtures": tuple(str(folder / mixture) for mixture in self.mixtures),
                "train": self.train.below(folder),
                "tasks": None if self.tasks is None else self.tasks.below(folder),
            }
        )


@dataclass(frozen=True)
class Candidate:
    """One of those that are compared."""

    name: str
    mixture: str  # file
    tokens: str  # folder


@dataclass(frozen=True)
class Trials:
    """What is trained: every candidate with every seed."""

    candidates: tuple[Candidate, ...]
    configs: Mapping[int, TrainConfig]  # seed -> settings; for branches of trunks the number of the trunk
    # The held-out documents of the candidates are not the same ones: they are compared on the evaluation sets alone.
    by_texts: bool = False
    notes: tuple[str, ...] = ()  # for the ranking: what a reader must know of the candidates

    @property
    def names(self) -> list[str]:
        return [candidate.name for candidate in self.candidates]


def trials_of(ablation: Ablation, tokens_folder: str) -> Trials:
    """The mixtures of an ablation on one folder of tokens. Raises MixtureError, and TrainError for two of a name."""
    found: dict[str, Candidate] = {}
    for path in ablation.mixtures:
        name = Mixture.load(path).name
        if not re.fullmatch(r"[\w.-]+", name):
            raise TrainError(
                f"{path}: the mixture's name {name!r} becomes a folder: use letters, digits, _, - and dots."
            )
        if name in found:
            raise TrainError(
                f"{path} and {found[name].mixture} are both called {name}: an ablation tells mixtures by name."
            )
        found[name] = Candidate(name, path, tokens_folder)
    return Trials(tuple(found.values()), ablation.configs)


def plan_runs(ablation: Ablation, what: str | Trials, out: str) -> list[Planned]:
    """Every run, candidates in order within a seed, so that an ablation that is cut short has whole seeds.

    what: a folder of tokens, for the mixtures of the ablation; or what else is compared.

    Compiles every mixture, so that what cannot be trained is refused before anything is. Raises MixtureError,
    TokenError, and TrainError where two mixtures share a name, nothing is held out, or a task is not to be had. The
    repeats of a control come last.
    """
    trials = trials_of(ablation, what) if isinstance(what, str) else what
    tokens = {candidate.tokens: TokenSet.open(candidate.tokens) for candidate in trials.candidates}
    for each in tokens.values():
        yardstick(each, next(iter(trials.configs.values())))
    if ablation.control and ablation.control not in trials.names:
        raise TrainError(f"`control` names {ablation.control!r}; the mixtures are {', '.join(trials.names)}.")
    if ablation.tasks is not None:
        from gristmill.trainer.evaluate import load_tasks

        load_tasks(ablation.tasks)
    further = set(ablation.control_seeds)
    wanted = [(c, seed) for seed in trials.configs if seed not in further for c in trials.candidates]
    wanted += [(c, seed) for seed in ablation.control_seeds for c in trials.candidates if c.name == ablation.control]
    return [_planned(ablation, candidate, seed, trials.configs[seed], tokens, out) for candidate, seed in wanted]


def _planned(
    ablation: Ablation, which: Candidate, seed: int, config: TrainConfig, tokens: Mapping[str, TokenSet], out: str
) -> Planned:
    folder = f"{which.name}-seed{seed}"
    job = Run(config=config, mixture=which.mixture, tokens=which.tokens, out=str(Path(out) / folder))
    feed = open_feed(job, tokens[which.tokens])
    return Planned(
        name=folder,
        mixture=which.name,
        path=which.mixture,
        seed=seed,
        config=config,
        key=feed.key,
        course=feed.course,
        tokens=which.tokens,
        out=job.out,
        tasks=ablation.tasks,
        retries=ablation.retries,
    )


# What carries the runs out: gets those to do, with their positions, and gives each one's row back as it ends.
Carry = Callable[[Sequence[tuple[int, Planned]], OnEvent], Iterator[tuple[int, RunRow]]]


def one_after_the_other(todo: Sequence[tuple[int, Planned]], tell: OnEvent) -> Iterator[tuple[int, RunRow]]:
    """The `Carry` of one machine."""
    for position, job in todo:
        yield position, carry_out(job, tell)


def ablate(
    ablation: Ablation,
    what: str | Trials,
    out: str,
    on_progress: OnEvent | None = None,
    carry: Carry = one_after_the_other,
    planned: Sequence[Planned] | None = None,
) -> Ranking:
    """Trains what is missing, ranks, and writes `out`/ranking.json and curves.json. what: as `plan_runs` takes it.
    planned: what that gave, where the caller has it already.

    on_progress gets {"event": "found" | "start" | "step" | "done" | "failed", "run", "index", "of"}; a step adds what
    metrics.jsonl has, and "steps"; done adds "bits_per_byte"; failed adds "error". Raises TrainError when no run
    finished, or when one was stopped from outside; finished runs stay and are found again.
    """
    tell = on_progress or (lambda event: None)
    trials = trials_of(ablation, what) if isinstance(what, str) else what
    planned = plan_runs(ablation, trials, out) if planned is None else planned
    places = {job.name: {"run": job.name, "index": index, "of": len(planned)} for index, job in enumerate(planned)}

    def placed(event: dict[str, Any]) -> None:
        tell({**event, **places[event["run"]]})

    rows = {position: row for position, job in enumerate(planned) if (row := found_row(job)) is not None}
    for row in rows.values():
        placed({"event": "found", "run": row.name, "bits_per_byte": row.bits_per_byte})
    todo = [(position, job) for position, job in enumerate(planned) if position not in rows]
    for position, row in carry(todo, placed):
        rows[position] = row
    ranking = ranked(ablation, trials, planned, [rows[position] for position in range(len(planned))])
    ranking = ranking.model_copy(update={"notes": [*ablation.warnings, *trials.notes, *ranking.notes]})
    publish_bytes(str(Path(out) / CURVES_FILE), orjson.dumps(curves(planned), option=orjson.OPT_INDENT_2))
    publish_bytes(str(Path(out) / RANKING_FILE), ranking.encoded())
    if not any(row.status == "done" for row in rows.values()):
        raise TrainError(f"{out}: no run of the ablation finished. The first: {rows[0].name}: {rows[0].error}")
    return ranking


def ranked(ablation: Ablation, trials: Trials, planned: Sequence[Planned], rows: Sequence[RunRow]) -> Ranking:
    """The ranking of the runs that are done, read from their folders."""
    cells: dict[tuple[str, int], Scores] = {}
    tasks: dict[tuple[str, int], Tasks] = {}
    for job, row in zip(planned, rows, strict=True):
        if row.status == "done":
            outcome = finished(Path(job.out), job.key)
            if outcome is None or outcome.scores is None:
                raise TrainError(
                    f"{job.out}: the run ended, but its scores are not here. Runs on other machines must write to a "
                    "folder that all of them and this one share."
                )
            cells[job.mixture, job.seed] = outcome.scores.of_texts() if trials.by_texts else outcome.scores
            if job.tasks is not None:
                tasks[job.mixture, job.seed] = read_items(Path(job.out) / TASKS_FOLDER / ITEMS_FILE)
    seeds = [seed for seed in trials.configs if seed not in ablation.control_seeds]
    return rank(
        ablation.name,
        trials.names,
        seeds,
        cells,
        rows,
        next(iter(trials.configs.values())).total_tokens,
        ablation.confidence,
        tasks,
        ablation.rank_by,
        ablation.control,
        ablation.control_seeds,
    )


def curves(planned: Sequence[Planned]) -> list[dict[str, Any]]:
    """For each run that has some: its scores while it was trained, and after."""
    out = []
    for job in planned:
        folder = Path(job.out)
        lines = [line for line in metrics.read(folder / metrics.METRICS_FILE) if "bits_per_byte" in line]
        points: list[dict[str, Any]] = [
            {name: line[name] for name in ("step", "tokens", "bits_per_byte", "evaluation_sets") if name in line}
            for line in lines
        ]
        outcome = finished(folder, job.key)
        if outcome is not None and outcome.scores is not None:
            last = {"step": outcome.done["steps"], "tokens": outcome.done["tokens"]}
            last["bits_per_byte"] = outcome.scores.bits_per_byte
            points.append(last | ({"evaluation_sets": outcome.scores.of_sets} if outcome.scores.sets else {}))
        if points:
            out.append({"run": job.name, "mixture": job.mixture, "seed": job.seed, "points": points})
    return out
