"""The embedded corpus: this Python installation as a small crawl of three domains.

    docs/part-*.warc.gz       pages that `pydoc` renders for modules, one WARC response record a page
    readmes/part-*.jsonl.zst  long descriptions of the installed distributions, in the shape of datatrove's documents
    code/part-*.parquet       source files of the standard library, a seeded part

Nothing is downloaded and no text of others is shipped. The corpus holds what a crawl holds: boilerplate, licences,
vendored copies, aliased modules.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import pkgutil
import queue
import subprocess
import sys
import sysconfig
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from fastwarc.warc import WarcRecord, WarcRecordType

from gristmill.stages.documents import Settings
from gristmill.stages.shards import checksum, publish, publish_bytes

DATE = "2026-01-01T00:00:00Z"  # fixed: the same installation gives the same bytes
SECONDS_PER_MODULE = 20.0
LEFT_OUT = (  # open windows or browsers, print, take long, or are tests
    "antigravity",
    "this",
    "idlelib",
    "turtledemo",
    "turtle",
    "test",
    "lib2to3",
    "__main__",
    "ensurepip._bundled",
    "distutils.tests",
    "tkinter",
    "ctypes.test",
    "unittest.test",
    "sqlite3.test",
    "msilib",
)
LIBRARIES = (  # third-party packages whose modules are cheap to import and have prose in their documentation
    "bokeh",
    "click",
    "dask",
    "datasketch",
    "datatrove",
    "distributed",
    "fsspec",
    "jinja2",
    "joblib",
    "networkx",
    "numpy",
    "packaging",
    "pydantic",
    "pygments",
    "requests",
    "rich",
    "ruamel",
    "scipy",
    "sympy",
    "trafilatura",
    "typer",
    "urllib3",
)


class DemoCorpusSettings(Settings):
    """How much of the installation to take."""

    library_modules: int = 250  # modules of installed packages, a seeded sample; the standard library is taken whole
    stdlib_modules: int = 2_000  # at most
    code_bytes: int = 8_000_000  # of the standard library's source files, a seeded sample
    files_per_source: int = 4
    seed: int = 1


Progress = Callable[[str, int, int], None]  # what, done, in all


def build(folder: str | Path, settings: DemoCorpusSettings, progress: Progress) -> dict[str, int]:
    """Writes the corpus under `folder` -> documents per source. A finished corpus of the same settings is left alone.

    Raises RuntimeError when nothing could be rendered.
    """
    folder = Path(folder)
    done = folder / "corpus.json"
    identity = {"settings": settings.model_dump(), "python": sys.version, "packages": _packages()}
    if done.exists():
        written = json.loads(done.read_text("utf-8"))
        if written["identity"] == identity and all((folder / f).exists() for f in written["files"]):
            return dict(written["documents"])
    documents = {
        "docs": _write_docs(folder / "docs", settings, progress),
        "readmes": _write_readmes(folder / "readmes", settings, progress),
        "code": _write_code(folder / "code", settings, progress),
    }
    files = sorted(str(p.relative_to(folder)) for s in documents for p in (folder / s).iterdir())
    sums = {f: checksum(str(folder / f)) for f in files}
    publish_bytes(
        str(done), json.dumps({"identity": identity, "documents": documents, "files": sums}, indent=1).encode()
    )
    return documents


def _packages() -> list[str]:
    return sorted({f"{d.name}=={d.version}" for d in importlib.metadata.distributions()})


def _rank(name: str, seed: int) -> bytes:
    """A seeded order that does not depend on what else is there."""
    return hashlib.blake2b(f"{seed}:{name}".encode()).digest()


def _left_out(name: str) -> bool:
    return any(name == x or name.startswith(f"{x}.") for x in LEFT_OUT) or name.endswith(".__main__")


def _submodules(folder: Path, prefix: str) -> Iterator[str]:
    """Module names under a package's folder, from its files alone: nothing is imported."""
    for info in sorted(pkgutil.iter_modules([str(folder)]), key=lambda i: i.name):
        name = f"{prefix}.{info.name}"
        if info.name.startswith("_test") or info.name in ("tests", "test", "conftest"):
            continue
        yield name
        if info.ispkg:
            yield from _submodules(folder / info.name, name)


def module_names(settings: DemoCorpusSettings) -> list[str]:
    """The modules to render: standard library first, then the sample of installed packages; seeded order."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for name in sorted(sys.stdlib_module_names):
        names.append(name)
        if (stdlib / name / "__init__.py").exists():
            names.extend(_submodules(stdlib / name, name))
    names = sorted((n for n in set(names) if not _left_out(n)), key=lambda n: _rank(n, settings.seed))
    site = Path(sysconfig.get_paths()["purelib"])
    others = []
    for library in LIBRARIES:
        if (site / library).is_dir():
            others.extend([library, *_submodules(site / library, library)])
    others = sorted((n for n in set(others) if not _left_out(n)), key=lambda n: _rank(n, settings.seed))
    return names[: settings.stdlib_modules] + others[: settings.library_modules]


def rendered(names: list[str]) -> Iterator[tuple[str, str | None]]:
    """(module, HTML or None where it could not be rendered), in the order of `names`.

    The child is restarted behind a module that kills it or that takes longer than SECONDS_PER_MODULE.
    """
    todo = list(names)
    while todo:
        with tempfile.TemporaryDirectory(prefix="gristmill-demo-") as scratch:
            environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")}
            environment |= {"PYTHONHASHSEED": "0", "MPLBACKEND": "agg", "HOME": scratch, "PYTHONSTARTUP": ""}
            child = subprocess.Popen(
                [sys.executable, "-m", "gristmill.pipelines.demo_render"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=scratch,
                env=environment,
            )
            try:
                yield from _answers(child, todo)
            finally:
                child.kill()
                child.wait()


def _answers(child: subprocess.Popen[bytes], todo: list[str]) -> Iterator[tuple[str, str | None]]:
    """Feeds `todo` to a child and takes off it what was answered; ends when the child dies or hangs."""
    assert child.stdin is not None
    assert child.stdout is not None
    lines: queue.Queue[bytes] = queue.Queue()
    stdin, stdout = child.stdin, child.stdout

    def feed() -> None:
        try:
            stdin.write("".join(f"{name}\n" for name in todo).encode())
        except OSError:
            pass  # the child died; what it left unanswered is still in `todo`
        finally:
            with contextlib.suppress(OSError):
                stdin.close()

    def pump() -> None:
        for line in stdout:
            lines.put(line)
        lines.put(b"")

    threads = [threading.Thread(target=target, daemon=True) for target in (feed, pump)]
    for thread in threads:
        thread.start()
    try:
        while todo:
            try:
                line = lines.get(timeout=SECONDS_PER_MODULE)
            except queue.Empty:
                line = b""
            if not line:
                yield todo.pop(0), None  # this module killed the child or hung
                return
            answer = json.loads(line)
            if "begin" in answer:
                continue
            todo.pop(0)
            yield answer["name"], answer.get("html")
    finally:
        child.kill()
        for thread in threads:
            thread.join()
        stdout.close()


def _write_docs(folder: Path, settings: DemoCorpusSettings, progress: Progress) -> int:
    names = module_names(settings)
    parts: list[io.BytesIO] = [io.BytesIO() for _ in range(settings.files_per_source)]
    for i, part in enumerate(parts):
        _warc_record(part, "warcinfo", f"demo-{i}", b"software: gristmill demo\r\nformat: WARC File Format 1.1\r\n")
    pages = 0
    for done, (name, html) in enumerate(rendered(names), 1):
        if html is not None:
            body = html.encode("utf-8", "backslashreplace")
            head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: {len(body)}\r\n\r\n"
            _warc_record(parts[pages % len(parts)], "response", name, head.encode() + body)
            pages += 1
        progress("rendering module pages", done, len(names))
    if not pages:
        raise RuntimeError("No module page could be rendered: `python -m pydoc json` should print a page; does it?")
    for i, part in enumerate(parts):
        publish_bytes(str(folder / f"part-{i:05d}.warc.gz"), part.getvalue())
    return pages


def _warc_record(out: io.BytesIO, kind: str, name: str, payload: bytes) -> None:
    digest = hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()
    record = WarcRecord()
    urn = f"uuid:{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:]}"
    record.init_headers(
        record_type=WarcRecordType.response if kind == "response" else WarcRecordType.warcinfo, record_urn=urn.encode()
    )
    record.headers["WARC-Date"] = DATE
    if kind == "response":
        record.headers["WARC-Target-URI"] = f"https://docs.example/{name.replace('.', '/')}.html"
        record.headers["Content-Type"] = "application/http; msgtype=response"
        record.headers["WARC-Identified-Payload-Type"] = "text/html"
    else:
        record.headers["Content-Type"] = "application/warc-fields"
    record.set_bytes_content(payload)
    buffer = io.BytesIO()
    record.write(buffer, checksum_data=False)
    compressor = zlib.compressobj(6, 8, 31)  # one gzip member a record, no time stamp in its header
    out.write(compressor.compress(buffer.getvalue()) + compressor.flush())


def _write_readmes(folder: Path, settings: DemoCorpusSettings, progress: Progress) -> int:
    documents = []
    for distribution in importlib.metadata.distributions():
        metadata: Any = distribution.metadata  # an email.message.Message; its typing as a protocol lacks methods
        text = metadata.get_payload() or metadata.get("Description") or ""
        if isinstance(text, str) and text.strip():
            name = distribution.metadata["Name"]
            document = {
                "text": text,
                "id": f"{name}-{distribution.version}",
                "metadata": {"url": f"https://readmes.example/{name}", "date": DATE, "version": distribution.version},
            }
            documents.append(document)
    unique = sorted({d["id"]: d for d in documents}.values(), key=lambda d: _rank(str(d["id"]), settings.seed))
    for i in range(settings.files_per_source):
        lines = b"".join(
            json.dumps(d, ensure_ascii=False).encode() + b"\n" for d in unique[i :: settings.files_per_source]
        )
        publish_bytes(str(folder / f"part-{i:05d}.jsonl.zst"), zstandard.ZstdCompressor(level=3).compress(lines))
        progress("collecting package descriptions", i + 1, settings.files_per_source)
    return len(unique)


def _write_code(folder: Path, settings: DemoCorpusSettings, progress: Progress) -> int:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in stdlib.rglob("*.py") if "site-packages" not in p.parts and "lib2to3" not in p.parts]
    chosen, total = [], 0
    for path in sorted(files, key=lambda p: _rank(p.relative_to(stdlib).as_posix(), settings.seed)):
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # a few files of the test suite are written in other encodings on purpose
        if not text:
            continue
        chosen.append((path.relative_to(stdlib).as_posix(), text))
        total += len(text)
        if total >= settings.code_bytes:
            break
    for i in range(settings.files_per_source):
        rows = chosen[i :: settings.files_per_source]
        table = pa.table(
            {
                "id": [name for name, _ in rows],
                "text": [text for _, text in rows],
                "url": [f"https://code.example/{name}" for name, _ in rows],
            }
        )
        with publish(str(folder / f"part-{i:05d}.parquet")) as file:
            pq.write_table(table, file, compression="zstd", row_group_size=200)
        progress("collecting source files", i + 1, settings.files_per_source)
    return len(chosen)
