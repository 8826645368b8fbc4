"""The dataset card of an export: README.md with the YAML head that Hugging Face reads, filled from the ledgers."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ruamel.yaml import YAML

from gristmill.pipelines.funnel import HELD_OUT, INPUT, funnel
from gristmill.pipelines.open_run import Run
from gristmill.stages.documents import Batch

_SIZES = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
_LISTED_SHARE = 0.001  # of the documents that a language needs to stand in the head


@dataclass
class Contents:
    """What an export holds, counted while it is written."""

    documents: int = 0
    chars: int = 0
    bytes: int = 0  # of UTF-8 text
    memory_bytes: int = 0  # of all columns, in Arrow
    sources: Counter[str] = field(default_factory=Counter)  # documents
    source_bytes: Counter[str] = field(default_factory=Counter)  # of text
    languages: Counter[str] = field(default_factory=Counter)

    def add(self, batch: Batch) -> None:
        sizes = pc.binary_length(batch["text"])
        self.documents += batch.num_rows
        self.chars += int(pc.sum(pc.utf8_length(batch["text"])).as_py() or 0)
        self.bytes += int(pc.sum(sizes).as_py() or 0)
        self.memory_bytes += batch.nbytes
        grouped = pa.table({"source": batch["source"], "bytes": sizes}).group_by("source")
        for row in grouped.aggregate([("bytes", "sum"), ("bytes", "count")]).to_pylist():
            self.sources[row["source"]] += row["bytes_count"]
            self.source_bytes[row["source"]] += row["bytes_sum"]
        if "language" in batch.schema.names:
            for entry in pc.value_counts(batch["language"].drop_null()).to_pylist():
                self.languages[entry["values"]] += entry["counts"]


def card(run: Run, contents: Contents, schema: pa.Schema, file_bytes: int) -> str:
    """The whole README.md."""
    name = str(run.recipe.get("name") or "documents")
    head = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump(_head(name, contents, schema, file_bytes), head)
    parts = [
        f"---\n{head.getvalue()}---\n# {name}",
        f"{contents.documents:,} documents, {contents.chars:,} characters, {contents.bytes / 1e6:,.1f} MB of UTF-8 "
        f"text, made by Gristmill {run.versions.get('gristmill', '')} from its recipe, which stands below. Every "
        "figure here is from the ledgers of the run.".replace("  ", " "),
        "The documents keep the rights and licences of their sources. State them here before you publish.",
        "## Sources\n" + _sources(run, contents),
        "## Languages\n" + _languages(contents),
        "## What was removed\n" + _stages(run),
        "### By reason\n" + _reasons(run),
        "## Columns\n" + _columns(run, schema),
        f"## Recipe\n```yaml\n{run.recipe_text.replace('```', '` ` `').rstrip()}\n```",
        "## Made with\n" + ", ".join(f"{package} {version}" for package, version in run.versions.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _head(name: str, contents: Contents, schema: pa.Schema, file_bytes: int) -> dict[str, Any]:
    listed = [code for code, n in contents.languages.most_common() if n >= _LISTED_SHARE * contents.documents]
    head: dict[str, Any] = {"pretty_name": name}
    if listed:
        head["language"] = listed
    head["task_categories"] = ["text-generation"]
    head["size_categories"] = [size_category(contents.documents)]
    head["configs"] = [
        {"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]},
    ]
    split = {"name": "train", "num_bytes": contents.memory_bytes, "num_examples": contents.documents}
    head["dataset_info"] = {
        "features": [_feature(column) for column in schema],
        "splits": [split],
        "download_size": file_bytes,
        "dataset_size": contents.memory_bytes,
    }
    return head


def size_category(documents: int) -> str:
    """Hugging Face's name for a number of documents."""
    limits = [10 ** (3 + i) for i in range(len(_SIZES))]
    place = int(np.searchsorted(limits, documents, side="right"))
    if place == 0:
        return "n<1K"
    return f"n>{_SIZES[-1]}" if place == len(_SIZES) else f"{_SIZES[place - 1]}<n<{_SIZES[place]}"


def _feature(column: pa.Field) -> dict[str, Any]:
    kind = column.type
    if pa.types.is_list(kind):
        return {"name": column.name, "list": _dtype(kind.value_type)}
    return {"name": column.name, "dtype": _dtype(kind)}


def _dtype(kind: pa.DataType) -> str:
    return {"double": "float64", "float": "float32"}.get(str(kind), str(kind))


def _sources(run: Run, contents: Contents) -> str:
    read = {row.source: row for row in funnel(run) if row.stage == INPUT}
    rows = []
    for source in run.sources:
        documents = contents.sources[source]
        share = documents / read[source].documents if read[source].documents else 0.0
        size = f"{contents.source_bytes[source] / 1e6:,.1f}"
        rows.append([_cell(source), f"{read[source].documents:,}", f"{documents:,}", f"{share:.1%}", size])
    return table(["source", "documents read", "kept", "share", "MB of text"], rows)


def _languages(contents: Contents) -> str:
    if not contents.languages:
        return "Not determined."
    rows = [[_cell(c), f"{n:,}", f"{n / contents.documents:.1%}"] for c, n in contents.languages.most_common(50)]
    rest = contents.documents - sum(contents.languages.values())
    return table(["language", "documents", "share"], rows + ([["none", f"{rest:,}", ""]] if rest else []))


def _stages(run: Run) -> str:
    rows = [
        [row.stage, f"{row.documents:,}", f"{row.dropped:,}", f"{row.failed:,}", f"{row.kept_share:.1%}"]
        for row in funnel(run, sources=False)
        if row.stage != "tokenize"
    ]
    return table(["stage", "documents left", "dropped", "failed", "left of the input"], rows)


def _reasons(run: Run) -> str:
    rows = []
    for stage, book in run.stages().items():
        for reason, amount in [*book.dropped.items(), *book.failed.items()]:
            if reason != HELD_OUT:
                rows.append([stage, _cell(reason), f"{amount.documents:,}", f"{amount.chars:,}"])
    return table(["stage", "reason", "documents", "characters"], rows) if rows else "Nothing."


def _columns(run: Run, schema: pa.Schema) -> str:
    measures = run.measures
    rows = []
    for column in schema:
        what = _BASE.get(column.name, "")
        if not what and column.name in measures:
            what = f"measure of the stage {measures[column.name].stage}"
        rows.append([f"`{column.name}`", str(column.type), what or f"of the stage {column.name.partition('.')[0]}"])
    return table(["column", "type", "what"], rows)


_BASE = {
    "doc_id": "the document's own id, or a hash of its place; unique within its input file",
    "source": "the recipe's name for where it is from",
    "url": "of the page",
    "dump": "name of the crawl",
    "date": "as the source has it",
    "metadata": "a JSON object: what else the source said of the document",
    "language": "ISO 639, as fastText's lid.176 names it",
    "language_score": "0 to 1",
    "position": "where in its file the document stood: byte, line, row or file name",
    "text": "the document",
}


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; numbers to the right."""
    marks = ["---", *("---:" if _is_number(rows, i) else "---" for i in range(1, len(columns)))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, marks, *rows))


def _is_number(rows: Sequence[Sequence[str]], at: int) -> bool:
    return all(not row[at] or row[at].replace(",", "").replace(".", "").rstrip("%").isdigit() for row in rows)


def _cell(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text).replace("|", "\\|")
