"""KenLM's own estimator, the program `lmplz`, for those who have it: `estimator: lmplz` of a model.

It is no package: it is compiled from KenLM's source (github.com/kpu/kenlm; the source archive of the package kenlm on
PyPI holds it). It writes the ARPA file; the table that the stage maps is made from that.
"""

from __future__ import annotations

import mmap
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.stages.kernels import arpa as kernel
from gristmill.stages.kernels import ngram_table
from gristmill.stages.kneser_ney import ModelError, thresholds

PROGRAM = "lmplz"
_COUNT = re.compile(rb"^ngram (\d+)=(\d+)$")
_TOKENS = re.compile(r"Unigram tokens (\d+) types (\d+)")
_DISCOUNTS = re.compile(r"^(\d+) (\d+) D1=(\S+) D2=(\S+) D3\+=(\S+)$", re.MULTILINE)


def program() -> str:
    """Path of lmplz. Raises ModelError where it is not on the PATH."""
    found = shutil.which(PROGRAM)
    if found is None:
        raise ModelError(
            f"`estimator: lmplz` asks for the program {PROGRAM}, which is not on the PATH of this machine. Compile it "
            "from KenLM's source and put it there, or leave `estimator` out: the estimator here gives the same model."
        )
    return found


def estimate(
    text: Path, arpa: Path, table: Path, *, order: int, prune: Sequence[int], max_memory_mb: float, scratch: Path
) -> dict[str, Any]:
    """Has lmplz write `arpa` from the lines of `text`, pieces separated by spaces, then writes `table` -> figures.

    Raises ModelError when lmplz fails, with the end of what it said, and when its ARPA file is not whole.
    """
    limits = thresholds(order, prune)
    command = [program(), "-o", str(order), "-S", f"{int(max_memory_mb)}M", "-T", str(scratch / "lmplz-")]
    command += ["--prune", *map(str, limits), "--discount_fallback"]
    with text.open("rb") as lines, arpa.open("wb") as out:
        done = subprocess.run(command, stdin=lines, stdout=out, stderr=subprocess.PIPE, check=False)
    said = done.stderr.decode(errors="replace")
    if done.returncode:
        arpa.unlink()
        last = "\n".join(said.strip().splitlines()[-4:]) or "It said nothing."
        raise ModelError(f"{PROGRAM} failed (exit code {done.returncode}): {last}")
    kept = write_table(arpa, table)
    figures: dict[str, Any] = {"by": PROGRAM, "order": order, "prune": limits, "words": kept[0], "kept": kept}
    if tokens := _TOKENS.search(said):
        figures["tokens"] = int(tokens[1])
    if discounts := _DISCOUNTS.findall(said):
        figures["discounts"] = [[float(d) for d in row[2:]] for row in discounts]
    return figures


def write_table(arpa: Path, table: Path) -> tuple[int, ...]:
    """The n-grams of an ARPA file as `kneser_ney.load_table` reads them -> how many of each order.

    Raises ModelError where the file is not whole or not in the form of ARPA.
    """
    with arpa.open("rb") as file:
        if not arpa.stat().st_size:
            raise ModelError(f"{arpa} is empty: {PROGRAM} wrote no model.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            counts = _counts(data, arpa)
            shape = (ngram_table.slots(sum(counts)), 2)
            entries = np.asarray(np.lib.format.open_memmap(table, "w+", np.uint64, shape))  # zeros; a file, not memory
            view = np.frombuffer(data, np.uint8)
            try:
                for order, count in enumerate(counts, 1):
                    start, end = _section(data, order, arpa)
                    found = kernel.enter_lines(
                        view, start, end, order, ngram_table.RESERVED, entries, entries.view(np.float32)
                    )
                    if found < 0:
                        line = bytes(data[-1 - found : -1 - found + 80]).split(b"\n")[0]
                        raise ModelError(f"{arpa}: this is no {order}-gram of an ARPA file: {line!r}")
                    if found != count:
                        raise ModelError(f"{arpa} has {found:,} {order}-grams, and says {count:,}: it was cut short.")
            finally:
                del view  # the map cannot be closed while an array looks at it
    return counts


def _counts(data: mmap.mmap, path: Path) -> tuple[int, ...]:
    head = data[: max(0, data.find(b"\n\n"))].split(b"\n")
    found = [_COUNT.match(line) for line in head[1:]]
    if head[0] != b"\\data\\" or not found or not all(found):
        raise ModelError(f"{path} does not begin as an ARPA file does.")
    return tuple(int(match[2]) for match in found if match)


def _section(data: mmap.mmap, order: int, path: Path) -> tuple[int, int]:
    """Where the n-grams of an order begin and end."""
    title = b"\n\\%d-grams:\n" % order
    at = data.find(title)
    end = data.find(b"\n\n", at + len(title) - 1)
    if at < 0 or end < 0:
        raise ModelError(f"{path} has no whole section of {order}-grams: it was cut short.")
    return at + len(title), end + 1
