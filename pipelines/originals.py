"""The page that a document was extracted from, read again from the crawl archive by its position."""

from __future__ import annotations

import re
from typing import Any

from gristmill.pipelines.open_run import Run
from gristmill.stages.extract_pages import decode_page
from gristmill.stages.readers_common import open_shard
from gristmill.stages.readers_warc import page_at
from gristmill.stages.shards import Shard

PART = re.compile(r"part-(\d+)\.parquet")


def original(run: Run, part: str, row: dict[str, Any]) -> str | None:
    """The decoded HTML of a document. part: the Parquet file of the run that holds it; row: with `position`, `url`.

    None where the input is not a crawl archive, is no longer there, or has another page at that place.
    """
    found = PART.fullmatch(part.rsplit("/", 1)[-1])
    position = row.get("position")
    if found is None or not isinstance(position, str) or int(found[1]) >= len(run.inputs):
        return None
    entry = run.inputs[int(found[1])]
    if entry.get("format") != "warc" or not re.fullmatch(r"\d+(\.\d+)?", position):
        return None
    try:
        with open_shard(Shard.model_validate(entry)) as file:
            page = page_at(file, position, row.get("url"))
    except ValueError:  # ShardError where the file is gone; a listing of an older version is no Shard
        return None
    return None if page is None else decode_page(*page)[0]
