"""`decontaminate`: takes evaluation items out of the corpus.

    decontaminate:
      sets:
        arc: "eval/arc_*.jsonl"
        mine: {files: [a.jsonl], fields: [problem, choices], answer: solution}
        task: {files: tasks/my_task.yaml}
      mode: drop

`evaluation_sets` says what a set may be, `contamination_index` what is measured. Modes: `drop` drops documents over a
limit; `mark` keeps them with their measures; `cut` takes the matching text out with `margin_chars` on each side, drops
the pieces shorter than `min_piece_chars` and documents in more than `max_pieces` pieces: Brown et al. 2020, appendix C
(200, 200, 10).

Every document that holds something of an item, over the limits or not, has `decontaminate.item`, the label of the
worst, and `decontaminate.matches`, a JSON list of {item, hits, overlap, containment, text}: the report and `gristmill
contamination` read them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import orjson
import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from gristmill.stages.contamination_index import Found, Index, IndexSettings
from gristmill.stages.documents import Batch, Measure, Result, Rule, Settings, judge, log_edges, with_columns
from gristmill.stages.evaluation_sets import EvaluationSet, files_of, items_of, short_form
from gristmill.stages.kernels import contamination as kernel
from gristmill.stages.settings_file import SettingsError
from gristmill.stages.shards import filesystem

_GPT3 = "Brown et al. 2020, appendix C"
_PALM = "PaLM (Chowdhery et al. 2022), section 8"
MAX_MATCHES = 50  # items of a document that are written down; the rest is counted
MAX_MATCH_CHARS = 400  # of the matching text of an item


class Decontaminate(Settings):
    """Drops, marks or cuts documents that hold evaluation items."""

    name: ClassVar = "decontaminate"
    version: ClassVar = 1
    needs: ClassVar = ("text",)
    packages: ClassVar = ("datasketch",)
    measures: ClassVar = (
        Measure("decontaminate.hits", "n-grams", log_edges(1, 1e4)),
        Measure("decontaminate.overlap", "share of an item's n-grams"),
        Measure("decontaminate.containment", "share of an item's pairs of words"),
        Measure("decontaminate.pieces", "pieces", tuple(float(i) for i in range(32))),
    )
    adds: ClassVar[Mapping[str, pa.DataType]] = {
        **{m.column: pa.float64() for m in measures},
        "decontaminate.item": pa.string(),
        "decontaminate.matches": pa.string(),
    }

    sets: dict[str, EvaluationSet] = Field(default_factory=dict)  # those of the recipe's ablation come to these
    include_ablation: bool = True  # the evaluation sets that the recipe's ablation file names
    ngram: int = Field(default=13, ge=2, le=50)
    max_hits: int = Field(default=0, ge=0)
    min_words: int = Field(default=8, ge=3)  # items of fewer words cannot be told from ordinary text: they are listed
    overlap_ngram: int = Field(default=8, ge=2, le=50)
    max_overlap: float | None = Field(default=0.7, ge=0, le=1)
    max_containment: float | None = Field(default=0.6, ge=0, le=1)
    max_items_per_ngram: int = Field(default=10, ge=1)  # of a set; n-grams that more of its items share are ignored
    mode: Literal["drop", "mark", "cut"] = "drop"
    margin_chars: int = Field(default=200, ge=0)  # for `cut`
    min_piece_chars: int = Field(default=200, ge=0)
    max_pieces: int = Field(default=10, ge=1)

    @field_validator("sets", mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        """A name may have its files alone."""
        if not isinstance(value, Mapping):
            return value
        return {name: short_form(one) for name, one in value.items()}

    @model_validator(mode="after")
    def _sizes(self) -> Decontaminate:
        if self.min_words > self.ngram:
            raise ValueError(f"min_words is {self.min_words}, more than ngram, {self.ngram}")
        for name in self.sets:
            if "/" in name:
                raise ValueError(f"the set's name {name!r} has a /, which stands between a set and its item")
        return self

    def files(self) -> list[str]:
        """Every file that the items come from."""
        return [path for settings in self.sets.values() for path in files_of(settings)]

    def limits(self) -> tuple[Rule, ...]:
        """What makes a document contaminated, whatever the mode."""
        overlap, containment = self.max_overlap, self.max_containment
        rules = [Rule("too_many_hits", "decontaminate.hits", at_most=self.max_hits, published=_GPT3)]
        if overlap is not None:
            rules.append(Rule("too_much_overlap", "decontaminate.overlap", at_most=overlap, published=_PALM))
        if containment is not None:
            rules.append(Rule("too_much_containment", "decontaminate.containment", at_most=containment))
        return tuple(rules)

    def rules(self) -> tuple[Rule, ...]:
        """What drops a document in this mode."""
        if self.mode == "drop":
            return self.limits()
        if self.mode == "mark":
            return ()
        return (
            Rule("nothing_left", "decontaminate.pieces", at_least=1, published=_GPT3),
            Rule("too_many_pieces", "decontaminate.pieces", at_most=self.max_pieces, published=_GPT3),
        )

    def over(self, found: Found) -> bool:
        """Whether one item is over a limit."""
        return (
            found.hits > self.max_hits
            or (self.max_overlap is not None and found.overlap > self.max_overlap)
            or (self.max_containment is not None and found.containment > self.max_containment)
        )

    def index(self) -> Index:
        """The items, indexed; once in a process. Raises SettingsError where there are none or they cannot be read."""
        return _index_of(self)

    def __call__(self, batch: Batch) -> Result:
        index = self.index()
        rows = batch.num_rows
        values = {m.column: np.zeros(rows) for m in self.measures}
        values["decontaminate.pieces"][:] = 1
        items: list[str | None] = [None] * rows
        matches: list[str | None] = [None] * rows
        edited: dict[int, str] = {}
        counters: Counter[str] = Counter(contaminated_documents=0, matches_not_listed=0, passages_not_searched=0)
        for row, found in index.search(batch["text"], counters):
            text = batch["text"][row].as_py().encode()
            spans = kernel.spans_of(text)
            values["decontaminate.hits"][row] = len({s for f in found for s in f.hit_spans})
            values["decontaminate.overlap"][row] = max(f.overlap for f in found)
            values["decontaminate.containment"][row] = max(f.containment for f in found)
            over = [f for f in found if self.over(f)]
            shown = over or found[:1]
            items[row] = index.items[shown[0].item].label
            listed = [_match(index, f, text, spans, self.over(f)) for f in shown[:MAX_MATCHES]]
            matches[row] = orjson.dumps(listed).decode()
            counters["matches_not_listed"] += max(0, len(shown) - MAX_MATCHES)
            counters["contaminated_documents"] += bool(over)
            if over and self.mode == "cut":
                pieces = _pieces(text, [s for f in over for s in _spans(f, spans)], self)
                values["decontaminate.pieces"][row] = len(pieces)
                edited[row] = "\n".join(pieces)
        columns: dict[str, Any] = {name: pa.array(column) for name, column in values.items()}
        columns["decontaminate.item"] = pa.array(items, pa.string())
        columns["decontaminate.matches"] = pa.array(matches, pa.string())
        if edited:
            counters["documents_cut"] = len(edited)
            texts = batch["text"].to_pylist()
            for row, changed in edited.items():
                texts[row] = changed
            columns["text"] = pa.array(texts, pa.string())
        return judge(with_columns(batch, columns), self.rules(), counters)


def _spans(found: Found, spans: np.ndarray) -> list[tuple[int, int]]:
    """What a document holds of an item -> stretches of its bytes, in order, none touching another."""
    passage = [found.passage] if found.passage is not None else []
    words = sorted({*found.hit_spans, *found.overlap_spans, *passage})
    return merged([(int(spans[first, 0]), int(spans[last, 1])) for first, last in words])


def merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Stretches that overlap or touch, as one."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return out


def _match(index: Index, found: Found, text: bytes, spans: np.ndarray, over: bool) -> dict[str, Any]:
    """What is written down of an item in a document: the matching text is the longest stretch."""
    start, stop = max(_spans(found, spans), key=lambda s: (s[1] - s[0], -s[0]))
    shown = text[start:stop].decode("utf-8", "replace")
    return {
        "item": index.items[found.item].label,
        "over": over,
        "hits": found.hits,
        "overlap": round(found.overlap, 4),
        "containment": round(found.containment, 4),
        "text": shown[:MAX_MATCH_CHARS],
    }


def _pieces(text: bytes, spans: list[tuple[int, int]], settings: Decontaminate) -> list[str]:
    """What is left of a document: the text between the stretches and their margins, long enough pieces only."""
    pieces = []
    rest = text.decode()
    at = 0
    cuts = []
    begin = chars = 0
    for start, stop in merged(spans):  # bytes -> characters, widened by the margin
        first = chars + len(text[begin:start].decode())
        last = first + len(text[start:stop].decode())
        begin, chars = stop, last
        cuts.append((max(0, first - settings.margin_chars), last + settings.margin_chars))
    for first, last in merged(cuts):
        pieces.append(rest[at:first])
        at = last
    pieces.append(rest[at:])
    return [piece.strip() for piece in pieces if len(piece.strip()) >= max(1, settings.min_piece_chars)]


@dataclass(frozen=True)
class _Loaded:
    settings: str
    stamps: tuple[tuple[str, int, str], ...]  # of the files, as they were read
    index: Index


_loaded: list[_Loaded] = []
_loading = threading.Lock()


def _index_of(settings: Decontaminate) -> Index:
    if not settings.sets:
        raise SettingsError(
            "decontaminate: there is no evaluation set. Name some in `sets`, or in `evaluation_sets` of the recipe's "
            "ablation file."
        )
    key = settings.model_dump_json()
    with _loading:
        if not _loaded or _loaded[0].settings != key or _loaded[0].stamps != _stamps(p for p, *_ in _loaded[0].stamps):
            _loaded.clear()  # one recipe, one index; it may be large
            stamps = _stamps(settings.files())
            items = [item for name, one in settings.sets.items() for item in items_of(name, one)]
            if not items:
                raise SettingsError(f"decontaminate: the sets {', '.join(settings.sets)} have no item.")
            wanted = IndexSettings(
                settings.ngram,
                None if settings.max_overlap is None else settings.overlap_ngram,
                settings.min_words,
                settings.max_items_per_ngram,
                settings.max_containment is not None,
            )
            _loaded.append(_Loaded(key, stamps, Index.of(items, wanted)))
        return _loaded[0].index


def _stamps(paths: Iterable[str]) -> tuple[tuple[str, int, str], ...]:
    """(path, size, modification time or etag) of each file; size -1 for one that is gone."""
    out = []
    for path in paths:
        fs, inner = filesystem(path)
        info = fs.info(inner) if fs.exists(inner) else {"size": -1}
        out.append((path, int(info["size"]), str(info.get("ETag") or info.get("mtime") or "")))
    return tuple(out)
