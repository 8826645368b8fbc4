"""Object stores and other places that are not a local disk: what their errors mean, and copies of what must be mapped.

`explained` makes one clear message of a wrong bucket, a missing permission or missing credentials. `passing` tells the
errors that another attempt may not meet. `PatientFile` reads on after such an error. `local_copy` brings what a library
maps or opens by itself (models, token shards, signatures) to a local disk, once for each content.

Credentials come from where the store's own library looks for them: environment, its files, the machine's role.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import orjson
import platformdirs
import tenacity
import xxhash
from fsspec.implementations.local import LocalFileSystem

from gristmill.stages.shards import ShardError, filesystem, join

ATTEMPTS = 6  # of one read, with waits of 1, 2, 4, 8, 16 s at most, each a random share of that
CACHE_VARIABLE = "GRISTMILL_CACHE"
KEPT_S = 24 * 3600  # a copy of an earlier content goes when nobody asked for it that long
MAGIC = "*?["
MANIFEST_NAME = "_download.json"  # what a download wrote into a folder, beside its files
_UNFINISHED = re.compile(r"(^|/)\.[^/]*\.(part|tmp)$")
_STAMPS = ("ETag", "etag", "mtime", "LastModified", "Last-Modified", "last_modified", "updated", "blob_id")
RETRIED = {403, 408, 425, 429}  # and 5xx. Common Crawl answers 403 to who asks too fast.
_NETWORK = (
    "aiohttp",
    "botocore",
    "aiobotocore",
    "httpx",
    "httpcore",
    "gcsfs",
    "requests",
    "urllib3",
    "huggingface_hub",
)
_ANONYMOUS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "TokenRetrievalError")
_WHERE = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE with ~/.aws, or the machine's role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, gcloud's login, or the machine's service account",
    "hf": "HF_TOKEN, or `hf auth login`",
}
_PACKAGES = {"s3": "gristmill[s3]", "gs": "gcsfs"}


class StoreError(ShardError):
    """A store refuses, or there is no such bucket; another attempt would meet the same."""


class StoreLost(RuntimeError):
    """A store did not answer, however often it was asked; a later attempt may succeed."""


def is_local(path: str) -> bool:
    """True where the path lies on a file system of this machine."""
    return isinstance(filesystem(path)[0], LocalFileSystem)


def stamp_of(info: Mapping[str, Any]) -> str:
    """What fsspec says of a file -> etag, else modification time, else nothing: with the size, its identity."""
    return str(next((info[name] for name in _STAMPS if info.get(name)), ""))


def passing(error: BaseException | None) -> bool:
    """True for errors of a network or a store that another attempt may not meet."""
    if isinstance(error, StoreLost | TimeoutError):
        return True
    if isinstance(error, FileNotFoundError):  # fsspec's, over HTTP, for every status, the true one behind it
        return type(error.__cause__).__module__.startswith("aiohttp") and passing(error.__cause__)
    if error is None or isinstance(error, PermissionError | StoreError):
        return False
    if isinstance(error, OSError):
        return True
    kind = type(error)
    if kind.__module__.split(".")[0] not in _NETWORK or kind.__name__ in (*_ANONYMOUS, "NoSuchBucket"):
        return False
    status = _status(error)
    return status is None or status >= 500 or status in RETRIED


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error of a network library carries."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    for value in (getattr(error, "status", None), getattr(response, "status_code", response)):
        if isinstance(value, int):
            return value
    code = None if hasattr(error, "status") else getattr(error, "code", None)  # gcsfs; aiohttp warns of `code`
    return code if isinstance(code, int) else None


def patiently(act: Callable[..., Any], *arguments: Any) -> Any:
    """`act(*arguments)`, tried again after errors that pass. Raises the last one."""
    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_random_exponential(multiplier=1, max=30),
        retry=tenacity.retry_if_exception(passing),
        sleep=time.sleep,
        reraise=True,
    )(act, *arguments)


@contextmanager
def explained(path: str, doing: str) -> Iterator[None]:
    """Turns what a store's library raises into a StoreError that says what, where, why, and what next.

    doing: "listed", "read" or "written". Errors of a local disk pass as they are.
    """
    try:
        yield
    except ImportError as error:
        scheme = _scheme(path)
        package = _PACKAGES.get(scheme, error.name or "its package")
        raise StoreError(f"{path}: {scheme}:// needs a package that is not installed. Install {package}.") from error
    except Exception as error:
        if "://" not in path or path.startswith("file://") or isinstance(error, StoreError):
            raise
        message = _message(path, doing, error)
        if message is None:
            raise
        raise StoreError(message) from error


def _scheme(path: str) -> str:
    scheme = path.split("://", 1)[0]
    return {"s3a": "s3", "gcs": "gs"}.get(scheme, scheme)


def _message(path: str, doing: str, error: Exception) -> str | None:
    scheme = _scheme(path)
    bucket = path.split("://", 1)[1].split("/", 1)[0]
    usual = f" Credentials are looked for in {_WHERE[scheme]}." if scheme in _WHERE else ""
    if type(error).__name__ in _ANONYMOUS:
        return f"{path} cannot be {doing}: there are no credentials for {scheme}://.{usual}"
    if isinstance(error, PermissionError):
        return f"{path} cannot be {doing}: permission denied ({error}). Ask for the right to it on {bucket}.{usual}"
    if isinstance(error, FileNotFoundError) and not passing(error):
        what = "bucket" if scheme in ("s3", "gs") else "place"
        return f"{path} cannot be {doing}: there is no {what} {bucket} ({error}). Create it, or mend the path."
    if passing(error):
        return f"{path} cannot be {doing}: {scheme}:// does not answer ({type(error).__name__}: {error}). Try again."
    return None


def matching(pattern: str) -> dict[str, str]:
    """path -> name below the fixed part of the pattern, sorted by path, of the files that a path, a folder or a glob
    names; empty where there are none. Files on their way, and what tells of downloads, are left out."""
    fs, inner = filesystem(pattern)
    if any(char in inner for char in MAGIC):
        paths = [path for path in fs.glob(inner) if not fs.isdir(path) and not _UNFINISHED.search(path)]
    elif fs.isdir(inner):
        names = ((path, path.rsplit("/", 1)[-1]) for path in fs.find(inner))
        paths = [path for path, name in names if not name.startswith(".") and name != MANIFEST_NAME]
    else:
        paths = [inner] if fs.exists(inner) else []
    fixed = inner
    for char in MAGIC:
        fixed = fixed.split(char)[0]
    base = fixed.rsplit("/", 1)[0] if fixed != inner or inner in paths else inner.rstrip("/")
    found = {(fs.unstrip_protocol(p) if "://" in pattern else p): p[len(base) :].lstrip("/") for p in paths}
    return dict(sorted(found.items()))


def check_writable(folder: str) -> None:
    """Proves that files can be written under a URL, listed and removed. Raises StoreError, before any work."""
    if "://" not in folder or is_local(folder):
        return
    with explained(folder, "written"):
        fs, inner = filesystem(folder)
        probe = f"{inner.rstrip('/')}/.probe.{uuid.uuid4().hex[:12]}.tmp"
        fs.pipe_file(probe, b"gristmill was here")
        fs.ls(inner, detail=False)
        fs.rm_file(probe)


class PatientFile(io.RawIOBase):
    """A file of a store, read on after errors that pass: opened anew, at the same place.

    Raises StoreLost when `attempts` were not enough. Not an OSError: readers take that for damage of the data.
    """

    def __init__(
        self,
        path: str,
        opening: Callable[[], IO[bytes]],
        attempts: int = ATTEMPTS,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__()
        self._path, self._opening, self._at = path, opening, 0
        self._retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(attempts),
            wait=tenacity.wait_random_exponential(multiplier=1, max=30),
            retry=tenacity.retry_if_exception(passing),
            sleep=sleep or time.sleep,
        )
        self._file: Any = None
        self._size = self._retried(lambda file: file.seek(0, 2))

    def _retried(self, act: Callable[[Any], Any]) -> Any:
        def attempt() -> Any:
            try:
                if self._file is None:
                    self._file = self._opening()
                self._file.seek(self._at)
                return act(self._file)
            except Exception:
                self._file = None
                raise

        try:
            return self._retrying(attempt)
        except tenacity.RetryError as error:
            last = error.last_attempt.exception()
            raise StoreLost(
                f"{self._path}: reading at byte {self._at:,} failed {error.last_attempt.attempt_number} times, the "
                f"last with {type(last).__name__}: {last}"
            ) from last

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        wanted = self._size - self._at if size is None or size < 0 else size
        data: bytes = self._retried(lambda file: file.read(wanted)) if wanted > 0 else b""
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed and self._file is not None:
            self._file.close()
        super().close()


def cache_folder() -> Path:
    """Where local copies lie: $GRISTMILL_CACHE, else the user's cache folder."""
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_path("gristmill")) / "copies"


def local_copy(path: str) -> str:
    """A local path of a file or folder: itself, or a copy made once for each content. Raises StoreError.

    The content is told by path, sizes and etags. Copies of an earlier content that nobody used for a day are removed.
    """
    if "://" not in path:
        return path
    with explained(path, "read"):
        fs, inner = filesystem(path)
        if isinstance(fs, LocalFileSystem):
            return str(inner)
        inner = inner.rstrip("/")
        files: dict[str, Any] = fs.find(inner, detail=True) if fs.isdir(inner) else {inner: fs.info(inner)}
        files = {name: info for name, info in files.items() if not name.rsplit("/", 1)[-1].startswith(".")}
        if not files:
            raise StoreError(f"{path}: there is nothing under this name. Mend the path, or finish what writes it.")
        identity = [[name, info.get("size"), stamp_of(info)] for name, info in sorted(files.items())]
        home = cache_folder() / xxhash.xxh3_128_hexdigest(path.rstrip("/"))
        target = home / xxhash.xxh3_128_hexdigest(orjson.dumps(identity))
        name = inner.rsplit("/", 1)[-1]
        if not target.exists():
            _copy(path, list(files), inner, target, name)
        os.utime(target)
        _forget(home, target)
    return str(target / name)


def _copy(path: str, files: list[str], inner: str, target: Path, name: str) -> None:
    fs = filesystem(path)[0]
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        for file in files:
            place = Path(join(str(scratch), name) + file[len(inner) :])
            place.parent.mkdir(parents=True, exist_ok=True)
            patiently(fs.get_file, file, str(place))
        try:
            os.rename(scratch, target)
        except OSError:
            if not target.exists():  # else another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _forget(home: Path, current: Path) -> None:
    for other in home.iterdir():
        if other != current and time.time() - other.stat().st_mtime > KEPT_S:
            shutil.rmtree(other, ignore_errors=True)


def local_model(stage: Any) -> Any:
    """A stage whose `model` is the URL of a store -> the same stage with a local copy of it."""
    model = getattr(stage, "model", None)
    if not isinstance(model, str) or "://" not in model:
        return stage
    return stage.model_copy(update={"model": local_copy(model)})
