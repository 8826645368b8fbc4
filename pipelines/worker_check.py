"""Whether a cluster's workers can do a run's work: the same packages, the same platform, the same storage."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gristmill.pipelines.steady_clock import keep_steady
from gristmill.stages.shards import filesystem, join, publish_bytes, read_bytes

COMPARED = ("gristmill", "pyarrow", "numpy", "numba", "distributed", "fsspec", "resiliparse", "fastwarc", "tokenizers")
FOUND_IN_S = 60.0  # for the first worker


class EngineError(RuntimeError):
    """The cluster cannot do the work; the message says why."""


def here() -> dict[str, str]:
    """What must be the same on the driver and on every worker."""
    found = {name: importlib.metadata.version(name) for name in COMPARED}
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, "system": sys.platform, "machine": platform.machine(), **found}


def look(question: str | None, answers: str, word: str) -> dict[str, Any]:
    """On a worker: its host, its versions, and what of the storage does not work ("" when all does).

    question: a file that the driver wrote; answers: the folder to write to; word: what stands in the question.
    """
    keep_steady()
    said: dict[str, Any] = {"host": socket.gethostname(), "here": here(), "storage": "", "answer": ""}
    if question is None:
        return said
    try:
        if read_bytes(question) != word.encode():
            said["storage"] = f"{question} holds something else there: it is another folder of the same name"
            return said
        said["answer"] = f".answer-{uuid.uuid4().hex[:12]}.tmp"
        publish_bytes(join(answers, said["answer"]), f"{said['host']} {os.getpid()}".encode())
    except FileNotFoundError:
        said["storage"] = f"{question} is not there: the folder is not on a storage that all machines share"
    except OSError as error:
        said["storage"] = f"{type(error).__name__}: {error}"
    return said


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """What differs, for a message; "" when nothing does."""
    names = [name for name in mine if mine[name] != theirs.get(name)]
    return ", ".join(f"{name} {mine[name]} here, {theirs.get(name, 'none')} there" for name in names)


def compare_workers(client: Any, scheduler: str, out: str | None, within_s: float = FOUND_IN_S) -> None:
    """Asks every worker. Raises EngineError with the host of each that cannot do the work, and what differs."""
    try:
        client.wait_for_workers(1, timeout=within_s)
    except TimeoutError as error:
        raise EngineError(
            f"The scheduler at {scheduler} has no worker. Start at least one with "
            f"`dask worker {scheduler}`; none came within {within_s:.0f} s."
        ) from error
    with suppress(Exception):  # a scheduler need not have this package
        client.run_on_scheduler(keep_steady)
    said = _asked(client, None, out)
    problems = [problem for worker, one in said.items() if (problem := _problem(worker, one, out))]
    _forget(said, out)
    if problems:
        raise EngineError(
            f"{len(problems):,} of {len(said):,} workers of {scheduler} cannot do this work:\n  "
            + "\n  ".join(problems[:20])
        )


def unfit(client: Any, workers: list[str], out: str | None) -> dict[str, str]:
    """Asks workers that joined later -> worker -> why it cannot do the work. One that is gone again is none."""
    said = _asked(client, workers, out)
    said = {worker: one for worker, one in said.items() if not isinstance(one, OSError)}
    found = {worker: problem for worker, one in said.items() if (problem := _problem(worker, one, out))}
    _forget(said, out)
    return found


def _asked(client: Any, workers: list[str] | None, out: str | None) -> dict[str, Any]:
    """worker -> what it says; None asks all of them."""
    word = uuid.uuid4().hex
    question = None if out is None else join(out, f".question-{word[:12]}.tmp")
    if question is not None:
        publish_bytes(question, word.encode())
    try:
        said: dict[str, Any] = client.run(look, question, out or "", word, workers=workers, on_error="return")
    finally:
        if question is not None:
            _remove(question)
    return said


def _forget(said: Mapping[str, Any], out: str | None) -> None:
    """Removes the answers of workers."""
    for one in said.values():
        if isinstance(one, dict) and one["answer"]:
            _remove(join(out or "", one["answer"]))


def _problem(worker: str, said: Any, out: str | None) -> str:
    if isinstance(said, BaseException):
        return f"{worker} cannot import gristmill: {said}. Install it there."
    where = f"{said['host']} ({worker})"
    if different := differences(here(), said["here"]):
        return f"{where} runs other versions: {different}. Install the same ones."
    if said["storage"]:
        return (
            f"{where} cannot use the run folder {out}: {said['storage']}. Give an absolute path on a shared disk or a "
            "URL of an object store, and see that the workers' user may read and write there."
        )
    if out is not None:
        fs, inner = filesystem(join(out, said["answer"]))
        fs.invalidate_cache()
        if not fs.exists(inner):
            return f"{where} writes to a folder {out} of its own, which is not seen here. Use a shared storage."
    return ""


def _remove(path: str) -> None:
    fs, inner = filesystem(path)
    if fs.exists(inner):
        fs.rm(inner)
