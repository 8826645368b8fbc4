"""metrics.jsonl: one line an optimizer step, in order, each step once, whatever was killed in between."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import orjson

METRICS_FILE = "metrics.jsonl"
RECENT = 128  # lines of before a restart that are kept in memory


def read(path: Path) -> list[dict[str, Any]]:
    """All complete lines; a half-written last one is left out. Empty where there is no file."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line feed was cut off
    return [orjson.loads(line) for line in lines if line]


class LinesFile:
    """Appends lines that have a "step". Opening it at a step drops the lines after it: they will be made again."""

    def __init__(self, path: Path, step: int):
        self.path = path
        kept = [line for line in read(path) if line["step"] <= step]
        self.recent = kept[-RECENT:]
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in kept))
        os.replace(temporary, path)
        self._file: IO[bytes] = path.open("ab", buffering=0)

    def add(self, line: dict[str, Any]) -> None:
        """Raises OSError where the disk refuses; half a line is left out by whoever reads."""
        self._file.write(orjson.dumps(line) + b"\n")

    def close(self) -> None:
        self._file.close()


class Follower:
    """Reads lines as another process appends them."""

    def __init__(self, path: Path):
        self.path, self.offset, self.inode = path, 0, -1

    def new(self) -> list[dict[str, Any]]:
        """Complete lines since the last call; from the start again where the file was replaced."""
        try:
            with self.path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self.inode:
                    self.offset, self.inode = 0, inode
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [orjson.loads(line) for line in whole.splitlines()]
