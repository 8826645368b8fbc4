"""How well the run's tokenizer fits its documents, as `tokenizer_card.py` measured it; what is near held-out ones."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from gristmill.pipelines.near_holdout import HOLDOUT_REPORT
from gristmill.pipelines.open_run import Run
from gristmill.pipelines.tokenizer_card import TOKENIZER_REPORT
from gristmill.tokenize.report import TokenizerReport

SHOWN_GROUPS = 200  # of source and language, largest first


def tokenizer(run: Run) -> dict[str, Any] | None:
    """What the page says of the tokenizer; None where it was not measured, or by a version with other figures."""
    card = run.json(TOKENIZER_REPORT)
    if not isinstance(card, dict):
        return None
    try:
        report = TokenizerReport.model_validate(card.get("report"))
    except ValidationError:
        return None
    figures = next(iter(report.tokenizers.values()), None)
    if figures is None:
        return None
    rows = [
        {
            "group": name,
            **sums.model_dump(),
            "bytes_per_token": sums.bytes_per_token,
            "tokens_per_word": sums.tokens_per_word,
            "whole_words": figures.whole_words.get(name, 0.0),
        }
        for name, sums in sorted(figures.groups.items(), key=lambda item: (-item[1].bytes, item[0]))
    ]
    return {
        "vocab_size": figures.vocab_size,
        "unused": figures.unused,
        "unused_share": figures.unused_share,
        "documents": figures.total.documents,
        "lossy": figures.total.lossy,
        "groups": rows[:SHOWN_GROUPS],
        "more_groups": max(0, len(rows) - SHOWN_GROUPS),
        "indentation": [[spaces, count] for spaces, count in figures.indentation.items()],
        "numbers": [[number, count] for number, count in figures.numbers.items()],
    }


def holdout(run: Run) -> dict[str, Any] | None:
    """tokens/holdout_report.json; None where there is none."""
    found = run.json(HOLDOUT_REPORT)
    return {k: v for k, v in found.items() if k != "key"} if isinstance(found, dict) else None
