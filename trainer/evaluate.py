"""Runs tasks of lm-evaluation-harness on a checkpoint and keeps every item.

    scores = evaluate_tasks(open_trained("out/train"), TaskSettings(names=("arc_easy",)), "out/train/tasks")
    read_items(Path("out/train/tasks/items.parquet"))["arc_easy"].accuracy

Files that a task of your own names are looked for beside its YAML file first, then below the working folder; the
harness looks in the working folder alone.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
import torch
import xxhash

from gristmill.stages.evaluation_sets import EvaluationSet
from gristmill.stages.settings_file import nearest
from gristmill.stages.shards import publish_bytes
from gristmill.tokenize.shards import TokenSet
from gristmill.trainer.config import TrainError
from gristmill.trainer.group import Group
from gristmill.trainer.score import Scores, score, yardstick
from gristmill.trainer.tasks import ITEMS_FILE, TASKS_FILE, TaskScores, TaskSettings, as_items, items_bytes
from gristmill.trainer.trained import Trained

NAMES = re.compile(r"^(task|group|tag):[ \t]*[\"']?([\w.-]+)", re.MULTILINE)
ANSWERED = ("exact_match", "acc", "f1")  # metrics of a task with written answers, the first that it has


def evaluate_tasks(trained: Trained, settings: TaskSettings, out: str, device: str = "cpu") -> TaskScores:
    """Scores the checkpoint, writes items.parquet and then tasks.json below `out`.

    Raises TrainError for a missing package, an unknown task, data that are not there, and items that do not fit the
    model's window.
    """
    key = task_key(trained.state.course, trained.state.progress.step, settings)
    rows, results = run_tasks(trained, settings, device)
    found = as_items(rows)
    harness = {"lm_eval": version("lm_eval"), "results": results}
    scores = TaskScores(
        key=key,
        checkpoint=trained.checkpoint.name,
        settings=settings,
        harness=harness,
        tasks={name: items.summary() for name, items in found.items()},
    )
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TASKS_FILE).unlink(missing_ok=True)
    publish_bytes(str(folder / ITEMS_FILE), items_bytes(rows))
    publish_bytes(str(folder / TASKS_FILE), scores.encoded())
    return scores


def score_texts(trained: Trained, sets: Mapping[str, EvaluationSet], device: str = "cpu") -> Scores:
    """Bits per byte of the held-out documents of the run's tokens, and of texts given."""
    config = trained.run.config.model_copy(update={"evaluation_sets": dict(sets)})
    on = yardstick(TokenSet.open(trained.run.tokens), config)
    group = Group(0, 1, torch.device(device), None)
    return score(trained.model.to(group.device), on, group, trained.state.progress.step)


def finished_tasks(folder: Path, key: str) -> TaskScores | None:
    """What a folder has, if it is whole and of this key."""
    try:
        scores = TaskScores.load(folder / TASKS_FILE)
    except (OSError, ValueError):
        return None
    return scores if scores.key == key and (folder / ITEMS_FILE).exists() else None


def task_key(course: str, step: int, settings: TaskSettings) -> str:
    """Identity of the items: course and step of the checkpoint, settings, harness, the content of own task folders."""
    check_installed()
    files = [
        [path.relative_to(folder).as_posix(), xxhash.xxh3_128_hexdigest(path.read_bytes())]
        for folder in map(Path, settings.include_path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    body = {
        "course": course,
        "step": step,
        "settings": settings.model_dump(mode="json", exclude={"include_path"}),
        "lm_eval": version("lm_eval"),
        "files": files,
    }
    return xxhash.xxh3_128_hexdigest(orjson.dumps(body, option=orjson.OPT_SORT_KEYS))


def check_installed() -> None:
    """Raises TrainError where lm-evaluation-harness is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        raise TrainError(
            f"Tasks need lm-evaluation-harness ({error.name} is missing): pip install 'gristmill[eval]'."
        ) from error


def load_tasks(settings: TaskSettings) -> dict[str, dict[str, Any]]:
    """Name that was asked for -> {task: the harness's object}, data loaded.

    Raises TrainError for a name that nobody knows, for a folder that is not there, and where data cannot be loaded.
    """
    check_installed()
    for folder in settings.include_path:
        if not Path(folder).is_dir():
            raise TrainError(f"{folder}: there is no such folder of task files (`include_path`).")
    with quiet():
        manager = _manager(settings)
    out = {}
    for name in settings.expanded:
        if name not in manager.task_index:
            raise TrainError(
                f"There is no task {name!r}, neither in lm-evaluation-harness nor below `include_path`."
                + nearest(name, [*manager.task_index, *shipped()])
            )
        try:
            with quiet():
                out[name] = dict(manager.load([name])["tasks"])
        except Exception as error:  # whatever a loader of data raises, this task cannot be had
            raise TrainError(
                f"The task {name!r} cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())[:500]}. "
                "Its data come from the Hugging Face hub or from files that its YAML names: both must be reachable."
            ) from error
    return out


@functools.cache
def shipped() -> dict[str, tuple[bool, str]]:
    """What the harness brings: name -> (whether it is a single task, folder that defines it).

    Its own index parses some 13,000 files, about half a minute of one core; this reads the lines that name things.
    """
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    out: dict[str, tuple[bool, str]] = {}
    for path in sorted(root.rglob("*.yaml")):
        for kind, name in NAMES.findall(path.read_text("utf-8", errors="replace")):
            out.setdefault(name, (kind == "task", str(root / path.relative_to(root).parts[0])))
    return out


def _manager(settings: TaskSettings) -> Any:
    """The harness's index over own folders, and over as much of what it brings as the names need."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._factory import TaskFactory

    class Beside(TaskFactory):  # type: ignore[misc]
        """Finds data files beside the task file."""

        def _load_full_config(self, entry: Any, overrides: Any = None) -> dict[str, Any]:
            config: dict[str, Any] = super()._load_full_config(entry, overrides)
            if entry.yaml_path and config.get("dataset_kwargs"):
                kwargs = deepcopy(config["dataset_kwargs"])
                kwargs["data_files"] = beside(kwargs.get("data_files"), Path(entry.yaml_path).parent)
                config["dataset_kwargs"] = {k: v for k, v in kwargs.items() if v is not None}
            return config

    own = list(settings.include_path)
    manager = TaskManager(include_path=own, include_defaults=False)
    missing = [name for name in settings.expanded if name not in manager.task_index]
    known = [shipped()[name] for name in missing if name in shipped()] if missing else []
    if any(not alone for alone, _ in known):  # a group or tag: its tasks may be anywhere
        manager = TaskManager(include_path=own, include_defaults=True)
    elif known:
        manager = TaskManager(
            include_path=[*dict.fromkeys(folder for _, folder in known), *own], include_defaults=False
        )
    manager._factory = Beside(meta=None)
    return manager


def beside(files: Any, folder: Path) -> Any:
    """data_files as `datasets` takes them, with names that exist below the folder made whole."""
    if isinstance(files, dict):
        return {split: beside(names, folder) for split, names in files.items()}
    if isinstance(files, list | tuple):
        return [beside(name, folder) for name in files]
    if (
        isinstance(files, str)
        and "://" not in files
        and any(folder.glob(files) if not Path(files).is_absolute() else ())
    ):
        return str((folder / files).resolve())
    return files


def run_tasks(trained: Trained, settings: TaskSettings, device: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """-> (rows of items.parquet, task -> what the harness says)."""
    loaded = load_tasks(settings)
    from gristmill.trainer.harness import Harness

    return items_of(Harness(trained, device), loaded, settings)


def items_of(
    model: Any, loaded: dict[str, dict[str, Any]], settings: TaskSettings
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """As run_tasks, for any model behind the harness's interface."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    with quiet():
        nothing = TaskManager(include_path=[], include_defaults=False)  # else each call makes an index of everything
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    for group, tasks in loaded.items():
        with quiet():
            found = simple_evaluate(
                model=model,
                tasks=list(tasks.values()),
                task_manager=nothing,
                num_fewshot=settings.fewshot,
                limit=settings.limit or None,
                bootstrap_iters=0,  # intervals are made here, over the items
                log_samples=True,
            )
        for name, task in tasks.items():
            rows += _rows(group, name, task, found["samples"][name])
            results[name] = {k: v for k, v in found["results"][name].items() if isinstance(v, int | float | str)}
            results[name]["fewshot"] = found["n-shot"].get(name)
            results[name]["version"] = found["versions"].get(name)
    return rows, results


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the harness's bars and remarks; errors come as exceptions."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _rows(group: str, name: str, task: Any, samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each item; where a task has several filters, their metrics are put together in it."""
    rows: dict[int, dict[str, Any]] = {}
    for sample in samples:
        metrics = {key: _plain(sample[key]) for key in sample["metrics"]}
        if sample["doc_id"] in rows:
            row = rows[sample["doc_id"]]
            named = {f"{key},{sample['filter']}": value for key, value in metrics.items()}
            row["metrics"] = orjson.dumps(orjson.loads(row["metrics"]) | named).decode()
            continue
        row = {
            "group": group,
            "task": name,
            "item": int(sample["doc_id"]),
            "item_hash": sample["doc_hash"],
            "metrics": orjson.dumps(metrics).decode(),
            **dict.fromkeys(("gold_bits", "gold_bytes", "accuracy", "accuracy_chars", "accuracy_bytes", "response")),
            "gold": [],
            "log_likelihoods": [],
            "choice_bytes": [],
            "baseline": 0.0,
        }
        kind = {"multiple_choice": _choices, "generate_until": _written}.get(task.OUTPUT_TYPE, _whole)
        rows[row["item"]] = row | kind(task, sample, metrics)
    return list(rows.values())


def _choices(task: Any, sample: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    choices = [str(choice) for choice in task.doc_to_choice(sample["doc"])]
    answers = [responses[0] for responses in sample["resps"]][: len(choices)]  # more: with mutual information
    nats = [float(value) for value, _ in answers]
    gold = _gold(task.doc_to_text(sample["doc"]) if task.multiple_input else sample["target"], choices)
    chars = [max(1, len(choice)) for choice in choices]
    sizes = [max(1, len(choice.encode())) for choice in choices]
    # With several contexts and one continuation it is the continuation that the model needs bits for.
    texts = [str(sample["target"])] * len(choices) if task.multiple_input else choices
    answer_bytes = [max(1, len(text.removeprefix(" ").encode())) for text in texts]

    def right(values: list[float]) -> float | None:
        return float(max(range(len(values)), key=values.__getitem__) in gold) if gold else None

    best = min(gold, key=lambda i: -nats[i] / answer_bytes[i], default=None)
    return {
        "gold": gold,
        "log_likelihoods": nats,
        "choice_bytes": sizes,
        "gold_bits": None if best is None else -nats[best] / math.log(2),
        "gold_bytes": None if best is None else answer_bytes[best],
        "accuracy": right(nats),
        "accuracy_chars": right([n / size for n, size in zip(nats, chars, strict=True)]),
        "accuracy_bytes": right([n / size for n, size in zip(nats, sizes, strict=True)]),
        "baseline": len(gold) / len(choices),
    }


def _gold(target: Any, choices: Sequence[str]) -> list[int]:
    """Positions of the right choices, as the harness reads a target; none where it is not among them."""
    targets = target if isinstance(target, list) else [target]
    places = [choices.index(t) if isinstance(t, str) and t in choices else t for t in targets]
    return [int(p) for p in places if isinstance(p, int) and 0 <= p < len(choices)]


def _whole(task: Any, sample: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    """One text: the last words of a context, or a text from its beginning."""
    answer = sample["resps"][0][0]
    nats, greedy = (answer, None) if isinstance(answer, float) else answer
    text = str(sample["arguments"][0][-1]).removeprefix(" ")
    size = max(1, len(text.encode()))
    return {
        "log_likelihoods": [float(nats)],
        "choice_bytes": [size],
        "gold": [0],
        "gold_bits": -float(nats) / math.log(2),
        "gold_bytes": size,
        "accuracy": None if greedy is None else float(greedy),
    }


def _written(task: Any, sample: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    name = next((name for name in ANSWERED if isinstance(metrics.get(name), int | float)), None)
    return {
        "response": str(sample["filtered_resps"][0]),
        "accuracy": None if name is None else float(metrics[name]),
    }


def _plain(value: Any) -> Any:
    """A metric of the harness as JSON takes it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, int | float | str | bool | type(None)) else str(value)
