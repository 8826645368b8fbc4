"""How well a run's tokenizer fits its documents: computed once when the tokens are done, drawn by the report.

Looked at are at most SAMPLE_BYTES of each source and language, from at most PARTS shards of each source, so that the
time does not grow with the corpus. The tokenizer learned from these documents, all but those held out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import orjson

from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.token_files import kept_sample, tokenizer_file
from gristmill.stages.shards import join, publish_bytes
from gristmill.tokenize.report import tokenizer_report

REPORT_VERSION = 1  # raise it when the figures mean something else
TOKENIZER_REPORT = "tokens/tokenizer_report.json"
SAMPLE_BYTES = 200_000  # of text of each source and language
PARTS = 8  # of each source


@dataclass(frozen=True)
class TokenizerReportOrder:
    """Measure the tokenizer of a run whose token shards are done."""

    out: str
    key: str


def run_tokenizer_report(order: TokenizerReportOrder) -> dict[str, Any]:
    """Publishes tokens/tokenizer_report.json -> what is in it: key, seconds, report."""
    begun = time.perf_counter()
    tokenizers = {"tokenizer": tokenizer_file(order.out)}
    report = tokenizer_report(tokenizers, kept_sample(open_run(order.out), PARTS), max_bytes=SAMPLE_BYTES)
    card = {"key": order.key, "seconds": time.perf_counter() - begun, "report": report.model_dump(mode="json")}
    publish_bytes(join(order.out, TOKENIZER_REPORT), orjson.dumps(card, option=orjson.OPT_INDENT_2))
    return card
