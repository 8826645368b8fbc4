"""`normalize`: one Unicode form, tidy whitespace, no control characters.

    normalize:
      form: NFC
      max_blank_lines: 1

The parts run in this order, because each can make work for the next (NFKC turns a no-break space into a space):
    ftfy        off by default; repairs text that was decoded with the wrong encoding ("schÃ¶n" -> "schön"),
                with the settings of datatrove's FTFYFormatter, which change no quotes, widths or ligatures
    control     C0 and C1 control characters and DEL go. "\\t" stays; a line break of another kind ("\\r\\n", "\\r",
                "\\v", "\\f", U+0085) becomes "\\n", so that no two lines are joined
    form        Unicode Standard Annex #15: NFC keeps what a reader sees; NFKC also folds ligatures, widths, exponents
    whitespace  each run of spaces and tabs becomes one space, spaces at the end of a line go, and at most
                `max_blank_lines` blank lines follow each other

The stage changes nothing when it runs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from gristmill.stages.documents import Batch, Result, Rule, Settings, cut, with_columns
from gristmill.stages.readers_common import clean_string

_LINE_BREAKS = "\r\n|[\r\v\f\u0085]"
_CONTROL = "[\x01-\x08\x0e-\x1f\x7f-\u0084\u0086-\u009f]"  # NUL never reaches a stage
_ROUNDS = 8  # with ftfy, whose repair can follow from another part; 4% of 20,000 random texts needed two, none three


class Normalize(Settings):
    """Edits the text. Drops what has no visible character left (`empty`). Counts the documents that a part changed."""

    name: ClassVar[str] = "normalize"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("text",)
    adds: ClassVar[Mapping[str, pa.DataType]] = {}
    measures: ClassVar = ()

    form: Literal["none", "NFC", "NFKC"] = "NFC"
    whitespace: bool = True
    max_blank_lines: int | None = Field(1, ge=0, le=100)  # in a row; none: no limit. Part of `whitespace`
    control: bool = True  # remove control characters
    ftfy: bool = False  # repair wrong encodings; 1 MB/s on one shared core, where the other parts together do 30

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages whose version is part of the result's identity."""
        return ("ftfy",) if self.ftfy else ()

    def rules(self) -> tuple[Rule, ...]:
        return ()

    def __call__(self, batch: Batch) -> Result:
        text, changed = self.normalized(batch["text"])
        empty = pc.or_(pc.equal(pc.binary_length(text), 0), pc.utf8_is_space(text)).to_numpy(zero_copy_only=False)
        counters = {f"changed.{name}": int(mask.sum()) for name, mask in changed.items()}
        return cut(with_columns(batch, {"text": text}), {"empty": empty}, counters)

    def normalized(self, text: pa.Array) -> tuple[pa.Array, dict[str, np.ndarray]]:
        """(n,) strings -> (n,) strings, and for each part the documents that it changed, (n,) bool."""
        parts = self._parts()
        changed = {name: np.zeros(len(text), bool) for name in parts}
        rows = np.arange(len(text))  # that may still change
        current = text
        for _ in range(_ROUNDS if self.ftfy else 1):  # the other parts are idempotent together
            before = current
            for name, part in parts.items():
                after = part(current)
                changed[name][rows] |= pc.not_equal(current, after).to_numpy(zero_copy_only=False)
                current = after
            again = pc.not_equal(before, current).to_numpy(zero_copy_only=False)
            if not again.any():
                break
            text = pc.replace_with_mask(text, _mask(rows, len(text)), current)
            rows, current = rows[again], current.filter(pa.array(again))
        return text, changed

    def _parts(self) -> dict[str, Callable[[pa.Array], pa.Array]]:
        parts: dict[str, Callable[[pa.Array], pa.Array]] = {}
        if self.ftfy:
            parts["ftfy"] = _repaired
        if self.control:
            parts["control"] = _without_control
        if self.form != "none":
            parts["unicode_form"] = lambda text: pc.utf8_normalize(text, form=self.form)
        if self.whitespace:
            parts["whitespace"] = lambda text: _tidy(text, self.max_blank_lines)
        return parts


def _mask(rows: np.ndarray, length: int) -> pa.Array:
    mask = np.zeros(length, bool)
    mask[rows] = True
    return pa.array(mask)


def _without_control(text: pa.Array) -> pa.Array:
    return _where(_where(text, _LINE_BREAKS, "\n"), _CONTROL, "")


def _where(text: pa.Array, pattern: str, replacement: str) -> pa.Array:
    """replace_substring_regex for the few texts that match: looking is cheaper than copying."""
    found = pc.match_substring_regex(text, pattern)
    if not pc.any(found).as_py():
        return text
    return pc.replace_with_mask(text, found, pc.replace_substring_regex(text.filter(found), pattern, replacement))


def _tidy(text: pa.Array, max_blank_lines: int | None) -> pa.Array:
    text = _where(text, r"[ \t]{2,}|\t", " ")  # not a lone space: most texts have no other
    text = _where(text, r" \n", "\n")
    text = _where(text, r" \z", "")
    if max_blank_lines is not None:
        text = _where(text, rf"\n{{{max_blank_lines + 2},}}", "\n" * (max_blank_lines + 1))
        text = _where(text, rf"\A\n{{{max_blank_lines + 1},}}", "\n" * max_blank_lines)  # no line stands before them
    return text


@lru_cache(1)
def _ftfy() -> tuple[Callable[..., str], Any]:
    import ftfy

    return ftfy.fix_text, ftfy.TextFixerConfig(
        uncurl_quotes=False,
        fix_latin_ligatures=False,
        fix_character_width=False,
        fix_line_breaks=False,
        remove_control_chars=False,  # the next part's
        normalization=None,
    )


def _repaired(text: pa.Array) -> pa.Array:
    fix, config = _ftfy()
    return pa.array([clean_string(fix(value, config=config))[0] for value in text.to_pylist()], pa.string())
