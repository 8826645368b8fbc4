"""One driver a run folder: a lock file that says who works there, on any storage.

    with RunLock("out/demo/run") as lock:
        ...
        lock.check()          # raises LockError when another driver has taken over

The file is created exclusively where the storage can do that, and renewed every few seconds. A lock is stale when its
process is gone (same host, same boot, same process namespace), and elsewhere when it was not renewed for
`stale_after_s`. A stale lock is taken over without a question.

Clocks jump, and those of two hosts differ. So a process is known by its start on the clock of the boot, which nobody
sets, and a lock of another host that looks stale by its time is watched for some renewals before it is taken over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import psutil
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ConfigDict, ValidationError

from gristmill.stages.shards import filesystem, join, publish_bytes, read_bytes
from gristmill.stages.stores import check_writable

NAME = "driver.lock"
RENEW_S = 10.0
WATCHED_RENEWALS = 3  # of a lock that looks stale: nobody behind it when none of them comes
STALE_AFTER_S = 120.0  # twelve renewals missed: a pause of the storage or of the process does not last that long


class LockError(RuntimeError):
    """Another driver works on the run folder; the message says which, and what to do."""


class Holder(BaseModel):
    """Who holds a lock."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    host: str
    pid: int
    process_start: float  # seconds since 1970, as the system has it: a process id is used again
    since_boot: float | None = None  # seconds from the boot to the start of the process; None where it is not known
    boot: str  # identity of the boot and of the process namespace; "" where the system does not say
    started: float  # seconds since 1970, when the lock was taken
    renewed: float  # the same, of the last renewal
    token: str  # of this taking
    command: str = ""

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host}, since {since}"


def _boot() -> str:
    """The same for two processes exactly when they see the same process ids; "" where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "time"))])
    except OSError:
        return ""


def _since_boot(pid: int) -> float | None:
    """Seconds from the boot to the start of a process: the same whatever the clock does. None where it is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), counted after the name
    except (OSError, ValueError, IndexError):
        return None


def _me() -> Holder:
    now = time.time()
    process = psutil.Process()
    return Holder(
        host=socket.gethostname(),
        pid=process.pid,
        process_start=process.create_time(),
        since_boot=_since_boot(process.pid),
        boot=_boot(),
        started=now,
        renewed=now,
        token=uuid.uuid4().hex,
    )


def is_stale(holder: Holder, now: float, stale_after_s: float = STALE_AFTER_S) -> bool:
    """True when nobody can be behind the lock any more. now: seconds since 1970."""
    if _is_here(holder):
        try:
            process = psutil.Process(holder.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            started = _since_boot(holder.pid)
            if holder.since_boot is not None and started is not None:
                return started != holder.since_boot
            return abs(process.create_time() - holder.process_start) > 1.0
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False
    return now - holder.renewed > stale_after_s


def _is_here(holder: Holder) -> bool:
    """True when this machine can say whether the holder's process lives."""
    return holder.host == socket.gethostname() and bool(holder.boot) and holder.boot == _boot()


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def holder_of(folder: str) -> Holder | None:
    """Who holds the lock of a run folder; None when nobody does or the file cannot be understood."""
    try:
        return Holder.model_validate(orjson.loads(read_bytes(join(folder, NAME))))
    except (FileNotFoundError, orjson.JSONDecodeError, ValidationError):
        return None


class RunLock:
    """Holds the lock of a run folder for as long as the block runs.

    Raises LockError when another driver has it, StoreError for a bucket that is missing or may not be written.
    """

    def __init__(
        self,
        folder: str,
        *,
        renew_s: float = RENEW_S,
        stale_after_s: float = STALE_AFTER_S,
        say: Callable[[str], None] = _to_stderr,
    ) -> None:
        self.folder, self.path = folder, join(folder, NAME)
        self.taken_over: Holder | None = None  # whose stale lock this one replaces
        self._renew_s, self._stale_after_s, self._say = renew_s, stale_after_s, say
        self._mine = _me()
        self._lost = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renewing, name="gristmill-lock", daemon=True)
        self._fs, self._inner = filesystem(self.path)
        self._local = isinstance(self._fs, LocalFileSystem)

    def __enter__(self) -> RunLock:
        check_writable(self.folder)
        try:
            if not self._create():
                self._take_over()
        except OSError as error:
            raise LockError(
                f"{self.path} cannot be written: {type(error).__name__}: {error}. Every run begins with this file. "
                "Make room there, or give the permission to write, or choose another folder with --out."
            ) from error
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        found = holder_of(self.folder)
        if found is None or found.token != self._mine.token:
            return
        self._fs.rm(self._inner)
        if self._local:
            with contextlib.suppress(OSError):  # a folder with nothing in it was made for the lock alone
                os.rmdir(self._inner.rsplit("/", 1)[0])

    def check(self) -> None:
        """Raises LockError when the lock was taken by another driver since."""
        if self._lost:
            raise LockError(self._lost)

    def _data(self) -> bytes:
        return orjson.dumps(self._mine.model_dump(), option=orjson.OPT_INDENT_2)

    def _create(self) -> bool:
        """Makes the file -> False when it is there already."""
        data = self._data()
        try:
            if self._local:
                self._fs.makedirs(self._inner.rsplit("/", 1)[0], exist_ok=True)  # a store would make a missing bucket
                # Linked into place, so that nobody ever reads half of it.
                draft = f"{self._inner}.{self._mine.token[:12]}.tmp"
                Path(draft).write_bytes(data)
                try:
                    os.link(draft, self._inner)
                finally:
                    os.unlink(draft)
                return True
            self._fs.pipe_file(self._inner, data, mode="create")
        except FileExistsError:
            return False
        except (TypeError, ValueError, NotImplementedError):  # the storage has no exclusive creation
            if self._fs.exists(self._inner):
                return False
            publish_bytes(self.path, data)
        return self._is_mine()

    def _is_mine(self) -> bool:
        self._fs.invalidate_cache()
        found = holder_of(self.folder)
        return found is not None and found.token == self._mine.token

    def _take_over(self) -> None:
        with _guard(self._inner if self._local else None):
            found = holder_of(self.folder)
            if found is not None and not self._nobody_behind(found):
                raise LockError(self._refusal(found))
            self.taken_over = found
            with contextlib.suppress(FileNotFoundError):  # released in between
                self._fs.rm(self._inner)
            if not self._create():
                found = holder_of(self.folder)
                raise LockError(self._refusal(found) if found else f"{self.path} was taken by another driver just now.")

    def _nobody_behind(self, found: Holder) -> bool:
        """True for a stale lock. Of another host the time in the lock decides only when it is near to ours: else one
        of two clocks is wrong, and what counts is whether it is renewed now."""
        if _is_here(found):
            return is_stale(found, time.time(), self._stale_after_s)
        silent = time.time() - found.renewed
        if abs(silent) <= self._stale_after_s:
            return False
        wait_s = WATCHED_RENEWALS * self._renew_s
        self._say(f"{self.path} is of {found}, last renewed {silent:.0f} s ago: watching it for {wait_s:.0f} s.")
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            time.sleep(self._renew_s / 10)
            self._fs.invalidate_cache()
            now = holder_of(self.folder)
            if now is None or (now.token, now.renewed) != (found.token, found.renewed):
                return now is None
        return True

    def _refusal(self, found: Holder) -> str:
        silent = max(0.0, time.time() - found.renewed)
        return (
            f"{self.folder} is being worked on by another driver: {found} (last sign of life {silent:.0f} s ago). "
            f"Watch it with `gristmill status {self.folder} --watch`, or stop it and run the same command again. A "
            f"driver of this host that is gone is noticed at once, one of another host after {self._stale_after_s:.0f} "
            f"s. If you know that it is gone, delete {self.path}."
        )

    def _renewing(self) -> None:
        while not self._stop.wait(self._renew_s):
            try:
                found = holder_of(self.folder)
                if found is None or found.token != self._mine.token:
                    who = str(found) if found else "somebody who deleted the lock"
                    self._lost = (
                        f"The lock of {self.folder} was taken over by {who}. This driver stops, so that two do not "
                        "write at once. What is done stays."
                    )
                    return
                self._mine = self._mine.model_copy(update={"renewed": time.time()})
                publish_bytes(self.path, self._data())
            except OSError:
                continue  # the storage is away for a moment: the next renewal tries again, the run itself reports it


@contextlib.contextmanager
def _guard(inner: str | None) -> Iterator[None]:
    """Lets one process of this machine after the other judge and replace a stale lock. None: no local file."""
    if inner is None:
        yield
        return
    descriptor = os.open(inner.rsplit("/", 1)[0], os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a network disk without flock: the exclusive creation still decides
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_driver(folder: str) -> dict[str, Any] | None:
    """What the driver of a run last said of itself; None when it never did."""
    try:
        said = orjson.loads(read_bytes(join(folder, "driver.json")))
    except (FileNotFoundError, orjson.JSONDecodeError):
        return None
    return said if isinstance(said, dict) else None
