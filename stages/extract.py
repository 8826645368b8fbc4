"""`extract`: HTML -> text.

    extract:
      engine: resiliparse      # main content; or trafilatura, or plain for all text of the page
      min_chars: 200
      min_share: 0.2           # a page whose main content is less of its text than that is kept whole

With `min_share` the share of the main content is the measure `extract.main_share`, and the pages that were kept whole
are counted as `whole_page`: engines that look for the main content lose most of the text of some pages.

Pages that cannot be done are dropped, each with its reason, and never cost another page: `too_large_html`,
`too_deep` (nested tags; engines take quadratic time in the depth), `too_slow` and `too_much_memory` (limits per page,
see `extract_guard.py`), `engine_crashed`, `extract_failed` (the engine raised), `no_main_text`, `too_few_chars`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.stages.documents import (
    Batch,
    BySettings,
    Measure,
    Result,
    Rule,
    cut,
    linear_edges,
    log_edges,
    with_columns,
    without_columns,
)
from gristmill.stages.extract_guard import Guarded, extract_guarded
from gristmill.stages.extract_pages import CHARSET_BY, Engine
from gristmill.stages.kernels.nesting import tag_depths

_CHARS = Measure("extract.chars", "characters", log_edges(1, 1e7))
_MAIN_SHARE = Measure("extract.main_share", "share of the page's characters", linear_edges(0, 1))


class Extract(Engine):
    """HTML -> plain text, and the columns of HTML go. Drops pages without text and pages that cost too much."""

    name: ClassVar = "extract"
    version: ClassVar = 2
    needs: ClassVar = ("html",)
    adds: ClassVar[Mapping[str, pa.DataType]] = cast(
        Any, BySettings(lambda stage: {"text": pa.string(), **{m.column: pa.float64() for m in stage.measures}})
    )
    measures: ClassVar[tuple[Measure, ...]] = cast(
        Any, BySettings(lambda stage: (_CHARS, _MAIN_SHARE) if stage.min_share else (_CHARS,))
    )

    min_chars: int = 1
    max_html_bytes: int = 10_000_000
    max_depth: int = 2_000  # open elements; 2,000 take resiliparse 0.1 s, 20,000 take it 16 s
    timeout_s: float | None = 20.0  # seconds of processor time for a page; None: no limits, in this process
    max_memory_bytes: int = 2 << 30  # for a page, in the helper process

    def rules(self) -> tuple[Rule, ...]:
        return (Rule("too_few_chars", "extract.chars", at_least=self.min_chars),)

    def __call__(self, batch: Batch) -> Result:
        html = batch["html"]
        sizes = pc.fill_null(pc.binary_length(html), 0).to_numpy(zero_copy_only=False)
        large = sizes > self.max_html_bytes
        deep = ~large & (tag_depths(html) > self.max_depth)
        todo = np.flatnonzero(~large & ~deep)
        charsets = batch["html_charset"] if "html_charset" in batch.schema.names else pa.nulls(len(html), pa.string())
        done = extract_guarded(
            Engine(**{name: getattr(self, name) for name in Engine.model_fields}),
            html.take(pa.array(todo)),
            charsets.take(pa.array(todo)),
            self.timeout_s,
            self.max_memory_bytes,
        )
        return self._cut(batch, done, todo, {"too_large_html": large, "too_deep": deep})

    def _cut(self, batch: Batch, done: Guarded, todo: np.ndarray, fails: dict[str, np.ndarray]) -> Result:
        """Puts the results in their rows, and sorts out the pages that gave nothing."""
        rows = batch.num_rows
        back = np.full(rows, len(todo), np.int64)  # row -> place in `done`
        back[todo] = np.arange(len(todo))
        text = done.texts.take(pa.array(back, mask=back == len(todo)))
        for reason in ("too_slow", "too_much_memory", "engine_crashed", "extract_failed"):
            fails[reason] = np.zeros(rows, bool)
            fails[reason][todo] = done.errors == reason
        chars = pc.utf8_length(text).cast(pa.float64()).to_numpy(zero_copy_only=False)  # NaN where there is no text
        blank = pc.fill_null(pc.utf8_is_space(text), False).to_numpy(zero_copy_only=False) | (chars == 0)
        fails["no_main_text"] = blank
        fails["too_few_chars"] = ~blank & (chars < self.min_chars)
        counters = {f"charset.{by}": int(n) for by, n in zip(CHARSET_BY, done.charsets, strict=True) if n}
        if done.replaced:
            counters["replaced.bytes"] = done.replaced
        columns = {"text": text, "extract.chars": pa.array(chars)}
        if self.min_share:
            shares = np.full(rows, np.nan)
            shares[todo] = done.main_shares
            columns["extract.main_share"] = pa.array(shares, from_pandas=True)
            if whole := int((shares < self.min_share).sum()):
                counters["whole_page"] = whole
        result = cut(with_columns(batch, columns), fails, counters)
        return Result(without_columns(result.kept, ("html", "html_charset")), result.dropped, result.counters)
