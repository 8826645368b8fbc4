"""Limits per page that hold inside C code: pages are extracted in a helper process, which may die.

A thread cannot be stopped inside an HTML parser, and a signal handler of Python waits until the parser returns. So
each thread that extracts has one helper. Before every page the helper sets a timer of processor time
(`ITIMER_PROF`), whose signal ends the process wherever it is; its memory is bounded by `RLIMIT_AS`. When the helper
dies, the page that it had in hand is the culprit, and a new helper goes on behind it. Processor time, not the
clock: a busy machine drops no page that an idle one keeps.

In the common case this costs one copy of the page and of the text through a pipe.
"""

from __future__ import annotations

import io
import math
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa

from gristmill.stages.extract_pages import CHARSET_BY, Engine, extract_page

_REQUEST = struct.Struct("<dQQ")  # timeout in seconds, memory in bytes, length of what follows
_REPLY = struct.Struct("<BBIdQ")  # error, index into CHARSET_BY, replaced, main_share, length of the text that follows
_FAILED, _MEMORY = 1, 2
_ERRORS = {0: "", _FAILED: "extract_failed", _MEMORY: "too_much_memory"}


@dataclass
class Guarded:
    """Results, in the order of the pages."""

    texts: pa.Array  # string (n,); null where there is an error
    errors: np.ndarray  # object (n,): "", "too_slow", "too_much_memory", "engine_crashed" or "extract_failed"
    charsets: np.ndarray  # int64 (len(CHARSET_BY),): pages by how their charset was found
    replaced: int
    main_shares: np.ndarray  # float64 (n,): see Page; NaN where there is an error


class _Results:
    def __init__(self) -> None:
        self.texts: list[str | bytes | None] = []
        self.errors: list[str] = []
        self.charsets = np.zeros(len(CHARSET_BY), np.int64)
        self.replaced = 0
        self.main_shares: list[float] = []

    def add(self, error: str, text: str | bytes | None, charset_by: int, replaced: int, main_share: float) -> None:
        self.errors.append(error)
        self.texts.append(None if error else text)
        self.main_shares.append(math.nan if error else main_share)
        if not error:
            self.charsets[charset_by] += 1
            self.replaced += replaced

    def done(self) -> Guarded:
        texts = pa.array(self.texts, pa.binary()).cast(pa.string())
        shares = np.array(self.main_shares, np.float64)
        return Guarded(texts, np.array(self.errors, dtype=object), self.charsets, self.replaced, shares)


def extract_guarded(
    engine: Engine, html: pa.Array, charsets: pa.Array, timeout_s: float | None, max_memory_bytes: int
) -> Guarded:
    """html: binary (n,), charsets: string (n,). Without `timeout_s` the pages are done in this process, unlimited."""
    results = _Results()
    if timeout_s is None:
        for page, charset in zip(html, charsets, strict=True):
            results.add(*_one(engine, page.as_py() or b"", charset.as_py()))
        return results.done()
    start = 0
    while start < len(html):
        helper = _helper()
        helper.send(engine, html.slice(start), charsets.slice(start), timeout_s, max_memory_bytes)
        for reply in helper.replies(len(html) - start):
            results.add(*reply)
        start = len(results.errors)
    return results.done()


def _one(engine: Engine, html: bytes, charset: str | None) -> tuple[str, bytes | None, int, int, float]:
    """One page -> (error, UTF-8 text, index into CHARSET_BY, replaced, main_share)."""
    try:
        page = extract_page(engine, html, charset)
    except MemoryError:
        return "too_much_memory", None, 0, 0, math.nan
    except Exception:  # whatever an engine raises is a property of the page: it is booked with it
        return "extract_failed", None, 0, 0, math.nan
    return "", page.text.encode(), CHARSET_BY.index(page.charset_by), page.replaced, page.main_share


_of_thread = threading.local()


def _helper() -> _Helper:
    """This thread's helper; a new one when the last one died, or belongs to the process before a fork."""
    helper: _Helper | None = getattr(_of_thread, "helper", None)
    if helper is None or not helper.alive():
        helper = _of_thread.helper = _Helper()
    return helper


class _Helper:
    """The parent's end."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        # It ends by itself when its stdin closes, which happens whatever becomes of this process.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gristmill.stages.extract_guard"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        weakref.finalize(self, _end, self.process)

    def alive(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def send(self, engine: Engine, html: pa.Array, charsets: pa.Array, timeout_s: float, memory: int) -> None:
        table = pa.record_batch([html.cast(pa.binary()), charsets.cast(pa.string())], names=["html", "charset"])
        table = table.replace_schema_metadata({"engine": engine.model_dump_json()})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_batch(table)
        body = sink.getvalue()
        pipe = self.process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError):  # it died while it started: `replies` sees that
            pipe.write(_REQUEST.pack(timeout_s, memory, body.size))
            pipe.write(memoryview(body))
            pipe.flush()

    def replies(self, pages: int) -> Iterator[tuple[str, bytes | None, int, int, float]]:
        """Up to `pages` replies. When the helper dies, the last one says what the page in hand died of."""
        pipe = self.process.stdout
        assert pipe is not None
        for _ in range(pages):
            head = pipe.read(_REPLY.size)
            if len(head) == _REPLY.size:
                error, charset_by, replaced, main_share, length = _REPLY.unpack(head)
                text = pipe.read(length)
                if len(text) == length:
                    yield _ERRORS[error], text, charset_by, replaced, main_share
                    continue
            code = self.process.wait()
            _end(self.process)
            yield self._cause(code), None, 0, 0, math.nan
            return

    def _cause(self, code: int) -> str:
        if code == -signal.SIGPROF:
            return "too_slow"
        if code in (-signal.SIGABRT, -signal.SIGKILL):  # what C and Rust do when an allocation fails; the kernel
            return "too_much_memory"
        if code < 0:
            return "engine_crashed"
        raise RuntimeError(
            f"The helper process that extracts pages ended with code {code} before it did a page. "
            "Its own message stands above. Set `timeout_s: null` to extract without a helper."
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Closes the pipes, at which a helper ends, and waits for it."""
    for pipe in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):
            if pipe is not None:
                pipe.close()
    process.wait()


def _serve(source: IO[bytes], sink: IO[bytes]) -> None:
    """The helper's life: requests until the pipe closes."""
    while len(head := source.read(_REQUEST.size)) == _REQUEST.size:
        timeout_s, memory, length = _REQUEST.unpack(head)
        body = source.read(length)
        if len(body) < length:
            return
        batch = next(iter(pa.ipc.open_stream(io.BytesIO(body))))
        engine = Engine.model_validate_json(batch.schema.metadata[b"engine"])
        _limit_memory(memory)
        for page, charset in zip(batch["html"], batch["charset"], strict=True):
            signal.setitimer(signal.ITIMER_PROF, timeout_s)
            error, text, charset_by, replaced, main_share = _one(engine, page.as_py() or b"", charset.as_py())
            signal.setitimer(signal.ITIMER_PROF, 0)
            code = next(key for key, name in _ERRORS.items() if name == error)
            sink.write(_REPLY.pack(code, charset_by, replaced, main_share, len(text or b"")))
            sink.write(text or b"")
            sink.flush()
        _limit_memory(None)


def _address_space() -> int:
    """Bytes of address space in use; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _limit_memory(more: int | None) -> None:
    """Bounds the address space to `more` bytes than now; None takes the bound away."""
    used, hard = _address_space(), resource.getrlimit(resource.RLIMIT_AS)[1]
    if used:
        wanted = hard if more is None else used + more
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def main() -> None:
    """Entry of the helper. Its stdout carries replies only: whatever a library prints goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business; closing the pipe ends this one
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    replies: Any = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
