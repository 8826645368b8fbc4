"""Downstream tasks: which ones, what each item came to, and what a score would be by chance.

    tasks: {names: [early_signal, my_task], include_path: eval/tasks, limit: 1000}     # in an ablation file
    tasks: [arc_easy, my_task]                                                         # the short form

Items are kept one by one in `items.parquet`, so that they can be drawn again (`stats.py`) and compared between models:

    group, task, item   what was asked for, the task of lm-evaluation-harness within it, its number of the document
    gold                positions of the right choices
    log_likelihoods     nats of each choice; of the whole text where there is one
    choice_bytes        UTF-8 bytes of each choice, without the blank in front
    gold_bits, gold_bytes    bits that the model needs for the right answer, and its bytes; null where text is generated
    accuracy, accuracy_chars, accuracy_bytes    1 where the likeliest choice is right: as it is, per character, per byte
    baseline            chance of being right by guessing; 0 where nothing is chosen from
    response            of a model that writes
    metrics             what the harness itself says, JSON

Bits per byte of the right answer move long before accuracy leaves chance and are less noisy ("Signal and Noise", arXiv
2508.13144; DataDecide, arXiv 2504.11393), so small models are compared by them. Where several choices are right, the
one that needs the fewest bits a byte counts.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, field_validator

from gristmill.stages.documents import Settings
from gristmill.trainer.config import TrainError
from gristmill.trainer.score import Texts

ITEMS_FILE, TASKS_FILE = "items.parquet", "tasks.json"

# Name -> tasks of lm-evaluation-harness 0.4.13 and why each is among them. FineWeb's criteria: above chance at small
# scale, monotone in training, little spread between runs (Penedo et al. 2024, section 3.1). Left out of its list:
# openbookqa, and boolq, which OLMo's ladder calls "too noisy to be worth tracking".
PRESETS: dict[str, dict[str, str]] = {
    "early_signal": {
        "hellaswag": "10,042 everyday continuations: the least noise of FineWeb's tasks, by their number",
        "arc_easy": "school science above chance within the first billion tokens; rewards educational text",
        "arc_challenge": "at chance as accuracy for long, but bits per byte of the answer fall from the start",
        "piqa": "everyday physics that web text holds; rewards breadth more than polish",
        "social_iqa": "everyday social sense; in FineWeb's set",
        "commonsense_qa": "five choices, so that chance is low; in FineWeb's set",
        "winogrande": "reference within a sentence: moves little when only topics change, a control for language",
        "mmlu_continuation": "MMLU with answers written out: letters stay at chance in small models, texts do not",
    },
    "quick": {
        "arc_easy": "moves first of the multiple-choice tasks",
        "lambada_openai": "last word of a passage: a likelihood on real text, no choices",
        "sciq": "science with distractors, above chance at a few hundred million tokens",
    },
}

SCHEMA = pa.schema(
    [
        ("group", pa.string()),
        ("task", pa.string()),
        ("item", pa.int64()),
        ("item_hash", pa.string()),  # of the item's content, by the harness
        ("gold", pa.list_(pa.int32())),
        ("log_likelihoods", pa.list_(pa.float64())),
        ("choice_bytes", pa.list_(pa.int32())),
        ("gold_bits", pa.float64()),
        ("gold_bytes", pa.int64()),
        ("accuracy", pa.float64()),
        ("accuracy_chars", pa.float64()),
        ("accuracy_bytes", pa.float64()),
        ("baseline", pa.float64()),
        ("response", pa.string()),
        ("metrics", pa.string()),
    ]
)


class TaskSettings(Settings):
    """Which tasks, and how much of them."""

    names: tuple[str, ...] = Field(min_length=1)  # of tasks, groups and tags of the harness, or of PRESETS
    include_path: tuple[str, ...] = ()  # folders of task files of your own; they may run Python code beside them
    fewshot: int | None = Field(default=None, ge=0)  # examples before each item; None: as the task says
    limit: int = Field(default=0, ge=0)  # items of each task, from its beginning; 0: all

    @field_validator("names", "include_path", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def expanded(self) -> list[str]:
        """Names with presets written out, each once."""
        out = [task for name in self.names for task in PRESETS.get(name, [name])]
        return list(dict.fromkeys(out))

    def below(self, folder: Path) -> TaskSettings:
        """With the paths counted from a folder."""
        return self.model_copy(
            update={"include_path": tuple(str((folder / path).resolve()) for path in self.include_path)}
        )


def short_form(value: Any) -> Any:
    """Tasks may be written as their name or names alone."""
    return {"names": value} if isinstance(value, str | list | tuple) else value


@dataclass(frozen=True)
class TaskItems:
    """The items of one group under one model. Arrays (items,) float64; NaN where a value does not apply."""

    name: str
    ids: tuple[str, ...]  # task:item:hash
    gold_bits: np.ndarray
    gold_bytes: np.ndarray
    accuracy: np.ndarray
    accuracy_chars: np.ndarray
    accuracy_bytes: np.ndarray
    baseline: np.ndarray

    @property
    def answers(self) -> Texts | None:
        """The right answers as texts; None where the task has none, or only for some items."""
        if np.isnan(self.gold_bits).any() or not self.gold_bytes.sum():
            return None
        return Texts(self.gold_bits, self.gold_bytes)

    def right(self, kind: str = "accuracy") -> Texts | None:
        """Accuracy as something that is summed over items of size 1, so that it can be drawn like texts."""
        values = getattr(self, kind)
        return None if np.isnan(values).any() else Texts(values, np.ones(len(values)))

    def summary(self) -> dict[str, Any]:
        """Means over the items; `above_chance` is 0 at chance and 1 where every item is right."""
        accuracy, chance = self.right(), float(self.baseline.mean())
        out: dict[str, Any] = {"items": len(self.ids), "baseline": chance}
        for kind in ("accuracy", "accuracy_chars", "accuracy_bytes"):
            values = self.right(kind)
            out[kind] = None if values is None else values.bits_per_byte
        out["above_chance"] = None if accuracy is None else (accuracy.bits_per_byte - chance) / (1 - chance)
        out["bits_per_byte"] = None if self.answers is None else self.answers.bits_per_byte
        return out


def items_bytes(rows: Sequence[dict[str, Any]]) -> bytes:
    """items.parquet of rows as SCHEMA has them."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows), SCHEMA), buffer, compression="zstd")
    return buffer.getvalue()


def read_items(path: Path) -> dict[str, TaskItems]:
    """Group -> its items, in the order of the file. Raises TrainError where it cannot be read."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise TrainError(f"{path}: cannot read the items of the tasks: {error}. Evaluate the run again.") from error
    return as_items(table.to_pylist())


def as_items(rows: Sequence[dict[str, Any]]) -> dict[str, TaskItems]:
    """Group -> its items, of rows as SCHEMA has them."""
    out = {}
    for group in dict.fromkeys(row["group"] for row in rows):
        own = [row for row in rows if row["group"] == group]
        columns = {
            name: np.array([np.nan if row[name] is None else row[name] for row in own], np.float64)
            for name in ("gold_bits", "gold_bytes", "accuracy", "accuracy_chars", "accuracy_bytes", "baseline")
        }
        ids = tuple(f"{row['task']}:{row['item']}:{row['item_hash'][:16]}" for row in own)
        out[group] = TaskItems(group, ids, **columns)
    return out


class TaskScores(Settings):
    """tasks.json, written last: it is there when the items are whole."""

    key: str
    checkpoint: str
    settings: TaskSettings
    harness: dict[str, Any]  # its version, and what it says of each task
    tasks: dict[str, dict[str, Any]]  # group -> `TaskItems.summary`

    def encoded(self) -> bytes:
        return orjson.dumps(self.model_dump(mode="json"), option=orjson.OPT_INDENT_2)

    @classmethod
    def load(cls, path: Path) -> TaskScores:
        return cls.model_validate(orjson.loads(path.read_bytes()))
