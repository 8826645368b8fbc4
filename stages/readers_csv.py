"""CSV and TSV with a header, plain or compressed: one document a row, RFC 4180 with quoted line ends."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from typing import IO

from gristmill.stages.documents import Batch
from gristmill.stages.ledger import Amount
from gristmill.stages.readers_common import Reading, blocks, clean_string, is_empty
from gristmill.stages.readers_jsonl import Cut, lines, longest_line
from gristmill.stages.readers_record import base_row
from gristmill.stages.shards import ShardError

_BROKEN = re.compile("[\udc80-\udcff]")  # what `surrogateescape` makes of bytes that are not UTF-8


def read_csv(reading: Reading, file: IO[bytes]) -> Iterator[Batch]:
    yield from _read(reading, file, ",")


def read_tsv(reading: Reading, file: IO[bytes]) -> Iterator[Batch]:
    yield from _read(reading, file, "\t")


def _read(reading: Reading, file: IO[bytes], delimiter: str) -> Iterator[Batch]:
    """A row with another number of fields than the header fails alone as `bad_record`.

    A quote that never closes takes what follows for its field, up to the length of the longest line: that is one
    `bad_record`, and reading goes on at the next line.
    """
    longest = longest_line(reading.max_chars)
    csv.field_size_limit(sys.maxsize)  # of the process; the lines are bounded here
    source = _Lines(reading, file, longest)
    rows = csv.reader(source, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    try:
        while True:
            first = source.number + 1
            source.begin()
            try:
                row = next(rows, None)
            except csv.Error as error:
                reading.fail("bad_record", str(first), str(error), source.size)
                rows = csv.reader(source, delimiter=delimiter, strict=True)  # the old one is inside a quote
                continue
            if row is None:
                break
            if header is None:
                header = _header(reading, row)
            elif not row:
                reading.skip("blank")
            else:
                yield from _read_row(reading, header, row, str(first), source.size)
    except Cut as cut:
        reading.fail(cut.reason, str(source.number + 1), f"{cut}; everything before was read", cut.bytes_left)
    yield from reading.flush()


class _Lines:
    """Decoded lines for `csv.reader`, which may take several for a row."""

    def __init__(self, reading: Reading, file: IO[bytes], longest: int) -> None:
        self._reading, self._longest = reading, longest
        self._lines = lines(blocks(file), longest)
        self.number = 0  # of the line read last, from 1
        self.size = 0  # bytes since `begin`

    def begin(self) -> None:
        self.size = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        while True:
            line, size = next(self._lines)
            self.number += 1
            if line is None:
                self._reading.drop("too_large", Amount(documents=1, bytes=size))
                if self.size:
                    raise csv.Error("a field goes on in a line that is too long")
                continue
            self.size += size + 1
            if self.size > self._longest:
                raise csv.Error(f"the row has more than {self._longest:,} bytes; a quote may be open")
            text = line.decode("utf-8", "surrogateescape")
            return (text.removeprefix("\ufeff") if self.number == 1 else text) + "\n"


def _header(reading: Reading, row: list[str]) -> list[str]:
    name = reading.names.get("text", "text")
    if name not in row:
        raise ShardError(
            f"{reading.shard.path}: no column {name!r}; there are {', '.join(row)[:500]}. "
            "Say which one is the text with `columns: {text: <name>}`; a file without a header cannot be read."
        )
    return row


def _read_row(reading: Reading, header: list[str], row: list[str], where: str, size: int) -> Iterator[Batch]:
    if len(row) != len(header):
        return reading.fail("bad_record", where, f"it has {len(row)} fields, the header {len(header)}", size)
    if any(_BROKEN.search(value) for value in row):
        return reading.fail("not_utf8", where, "a field is not valid UTF-8", size)
    record = dict(zip(header, row, strict=True))
    text, nuls, surrogates = clean_string(record.pop(reading.names.get("text", "text")))
    if is_empty(text) or len(text) > reading.max_chars:
        amount = Amount(documents=1, chars=len(text), bytes=len(text.encode()) - 2 * nuls)
        return reading.drop("too_large" if len(text) > reading.max_chars else "empty", amount)
    base = base_row(reading, {key: value for key, value in record.items() if value}, where)
    reading.edited(nuls, surrogates)
    yield from reading.keep((*base, text), size)
    return None
