"""Arrow IPC: files (Feather version 2 is one) and streams, one document a row. `datasets` stores its folders so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

import numpy as np
import pyarrow as pa

from gristmill.stages.documents import MAX_BATCH_BYTES, MAX_BATCH_DOCUMENTS, Batch
from gristmill.stages.readers_common import Reading
from gristmill.stages.readers_parquet import check_text, read_rows
from gristmill.stages.shards import ShardError

_FILE_MAGIC = b"ARROW1"


def read_arrow(reading: Reading, file: IO[bytes]) -> Iterator[Batch]:
    """Batches in order. What follows damage cannot be found again: it is one failure, and all before it is read."""
    is_file = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    file.seek(0)
    source = pa.PythonFile(file, "r")
    try:
        # A file is a stream with a footer behind it. Read by its footer, a cut file would give nothing at all.
        stored = _without_footer(file) if is_file else pa.ipc.open_stream(source)
    except (pa.ArrowException, OSError) as error:
        raise ShardError(
            f"{reading.shard.path}: not an Arrow file or stream ({error}). Look at its format, or fetch it again."
        ) from error
    check_text(reading, stored.schema)
    row = number = 0
    while True:
        try:
            batch = stored.read_next_batch()
        except StopIteration:
            break
        except (pa.ArrowException, OSError) as error:
            reading.fail("corrupt", f"batch {number}", f"{error}; everything before was read", 0)
            break
        for part in _parts(batch):
            yield from read_rows(reading, part, row)
            row += part.num_rows
        number += 1


def _without_footer(file: IO[bytes]) -> pa.RecordBatchStreamReader:
    """The stream inside an Arrow file: it begins behind the magic, which is padded to 8 bytes."""
    file.seek(8)
    return pa.ipc.open_stream(pa.PythonFile(file, "r"))


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A stored batch, which may hold a million rows, in parts of about the size of ours."""
    mean = batch.get_total_buffer_size() / max(1, batch.num_rows)
    rows = int(np.clip(MAX_BATCH_BYTES / max(1.0, mean), 1, MAX_BATCH_DOCUMENTS))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)
