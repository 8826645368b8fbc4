"""Texts given beside the held-out documents: read, encoded with the run's tokenizer, scored like them.

    evaluation_sets: {arc: eval/arc.jsonl, news: "news/*.parquet", notes: {files: notes.txt}}

Any file that `stages/evaluation_sets.py` reads. What is scored of an item with choices is the question with its right
answer; of anything else, the item. A plain text is cut at its blank lines, or at its lines where there are none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np
import orjson
import xxhash
from tokenizers import Tokenizer

from gristmill.stages.evaluation_sets import EvaluationSet, files_of, items_of
from gristmill.stages.shards import read_bytes
from gristmill.tokenize.shards import TokenSet
from gristmill.tokenize.tokenizer_json import plain_tokenizer
from gristmill.trainer.config import TrainError
from gristmill.trainer.score import Held

BATCH = 256  # texts that are encoded at a time


def encoded_sets(sets: Mapping[str, EvaluationSet], tokens: TokenSet) -> dict[str, list[Held]]:
    """Name -> its texts as held-out documents are: ids with the end of text behind.

    Raises SettingsError for files that cannot be read, TrainError for a set without text, and where a name is also
    that of a source.
    """
    out = {}
    for name, settings in sorted(sets.items()):
        if name in tokens.sources or name in tokens.holdout:
            raise TrainError(f"The evaluation set {name!r} has the name of a source of the tokens: call it otherwise.")
        out[name] = list(_encoded(name, settings, tokens))
        if not any(held.bytes for held in out[name]):
            raise TrainError(f"The evaluation set {name!r} ({', '.join(settings.files)}) has no text.")
    return out


def _encoded(name: str, settings: EvaluationSet, tokens: TokenSet) -> Iterator[Held]:
    tokenizer = Tokenizer.from_str(plain_tokenizer(tokens.tokenizer_path.read_bytes()).decode())
    items = list(items_of(name, settings))
    for low in range(0, len(items), BATCH):
        texts = [item.texts[-1] for item in items[low : low + BATCH]]
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        for item, text, encoding in zip(items[low : low + BATCH], texts, encodings, strict=True):
            yield Held(item.label, np.append(np.asarray(encoding.ids, np.int64), tokens.eos_id), len(text.encode()))


def sets_digest(sets: Mapping[str, EvaluationSet]) -> str:
    """Identity of the texts: names, how they are read, and what is in the files. "" where there are none."""
    if not sets:
        return ""
    body = [
        [name, settings.model_dump(mode="json", exclude={"files"}), [_digest_of(path) for path in files_of(settings)]]
        for name, settings in sorted(sets.items())
    ]
    return xxhash.xxh3_128_hexdigest(orjson.dumps(body))


def _digest_of(path: str) -> str:
    try:
        seen = os.stat(path)
    except OSError:  # in an object store, or gone: then reading it says so
        return xxhash.xxh3_128_hexdigest(read_bytes(path))
    return _digest_of_local(path, seen.st_size, seen.st_mtime_ns)


@lru_cache(maxsize=4096)
def _digest_of_local(path: str, size: int, mtime_ns: int) -> str:
    """size and mtime_ns make an edited file a new question."""
    return xxhash.xxh3_128_hexdigest(read_bytes(path))
