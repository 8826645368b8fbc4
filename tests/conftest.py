"""A small crawl for tests of whole runs: real English from the standard library's docstrings, in three formats."""

from __future__ import annotations

import html
import importlib
import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fastwarc.warc import WarcRecord, WarcRecordType

MODULES = (
    "argparse asyncio bisect calendar codecs collections configparser contextlib copy csv dataclasses datetime "
    "decimal difflib dis email enum fractions functools getopt gettext glob gzip hashlib heapq hmac html http "
    "inspect io ipaddress itertools json keyword linecache locale logging mailbox math mimetypes netrc numbers "
    "operator optparse os pathlib pdb pickle pickletools pkgutil platform plistlib poplib pprint profile random "
    "reprlib sched selectors shelve shlex shutil smtplib socket sqlite3 ssl statistics string stringprep struct "
    "subprocess tarfile tempfile textwrap threading timeit token tokenize trace traceback types unittest "
    "urllib uuid warnings wave weakref webbrowser zipfile zipimport"
).split()


def docstrings() -> list[tuple[str, str]]:
    """(name, text) of modules, classes and functions with at least 300 characters of documentation."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        texts = [module.__doc__ or ""]
        for member in sorted(vars(module)):
            value = vars(module)[member]
            if not member.startswith("_") and callable(value) and isinstance(getattr(value, "__doc__", None), str):
                texts.append(value.__doc__)
        text = "\n\n".join(t.strip() for t in texts if len(t) > 80)
        if len(text) > 300 and text not in found.values():
            found[name] = text[:6_000]
    return list(found.items())


def warc_bytes(pages: list[tuple[str, str, bytes]]) -> bytes:
    """(url, record id, HTML) -> a .warc.gz, one gzip member a record."""
    out = io.BytesIO()
    for url, record_id, body in pages:
        payload = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + body
        record = WarcRecord()
        record.init_headers(record_type=WarcRecordType.response, record_urn=f"uuid:{record_id}".encode())
        record.headers["WARC-Date"] = "2026-01-01T00:00:00Z"
        record.headers["WARC-Target-URI"] = url
        record.headers["Content-Type"] = "application/http; msgtype=response"
        record.set_bytes_content(payload)
        buffer = io.BytesIO()
        record.write(buffer, checksum_data=False)
        compressor = zlib.compressobj(6, 8, 31)
        out.write(compressor.compress(buffer.getvalue()) + compressor.flush())
    return out.getvalue()


def page(title: str, text: str) -> bytes:
    """A web page with navigation, the text as paragraphs, and a footer."""
    paragraphs = "".join(f"<p>{html.escape(p)}</p>" for p in text.split("\n\n"))
    return (
        f"<html><head><title>{title}</title></head><body><nav><a href='/'>Home</a> <a href='/a'>About</a></nav>"
        f"<main><h1>{title}</h1>{paragraphs}</main><footer>Copyright. All rights reserved.</footer></body></html>"
    ).encode()


@pytest.fixture(scope="session")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """docs/*.warc.gz (3 files), readmes/*.jsonl.zst (2), code/*.parquet (2), with planted duplicates."""
    folder = tmp_path_factory.mktemp("crawl")
    texts = docstrings()
    for i in range(3):
        rows = texts[i::4]
        pages = [
            (f"https://docs.example/{n}.html", f"0000000{i}-0000-0000-0000-{j:012d}", page(n, t))
            for j, (n, t) in enumerate(rows)
        ]
        pages.append((f"https://docs.example/copy-{i}.html", f"9999999{i}-0000-0000-0000-000000000000", pages[0][2]))
        write(folder / "docs" / f"part-{i}.warc.gz", warc_bytes(pages))
    for i in range(2):
        rows = texts[3::4][i::2]
        lines = [
            json.dumps({"text": t, "id": f"readme-{n}", "metadata": {"url": f"https://r.example/{n}"}}) for n, t in rows
        ]
        write(folder / "readmes" / f"part-{i}.jsonl.zst", zstandard.compress("\n".join(lines).encode() + b"\n"))
    for i in range(2):
        sources = [Path(importlib.import_module(n).__file__ or "") for n in MODULES[i * 8 : i * 8 + 8]]
        kept = [(p.name, p.read_text("utf-8")[:20_000]) for p in sources if p.suffix == ".py"]
        (folder / "code").mkdir(exist_ok=True)
        table = pa.table({"id": [f"{i}-{j}-{n}" for j, (n, _) in enumerate(kept)], "text": [t for _, t in kept]})
        pq.write_table(table, folder / "code" / f"part-{i}.parquet")
    return folder


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


RECIPE = """
name: small
sources:
  docs: {{files: "{crawl}/docs/*.warc.gz"}}
  readmes: {{files: "{crawl}/readmes/*.jsonl.zst"}}
  code: {{files: "{crawl}/code/*.parquet"}}
models:
  prose: {{kenlm: {{order: 2, text: {{sources: [docs, readmes]}}}}}}
  quality:
    fasttext: {{positive: {{sources: [docs, readmes]}}, negative: {{sources: [code]}}, dim: 4, epoch: 1, buckets: 1000}}
stages:
  - extract: {{min_chars: 100}}
    only: [docs]
  - language: {{keep: [en], min_score: 0.3}}
    only: [docs, readmes]
  - gopher_quality: {{min_words: {min_words}, min_alphabetic_words: 0.3}}
    only: [docs, readmes]
  - perplexity: {{model: prose, max_perplexity: 100000}}
    only: [docs, readmes]
  - classifier: {{model: quality, min_score: 0.0}}
  - exact
  - minhash: {{ngram: 5, bands: 14, rows: 8}}
  - pii
tokenizer: {{vocab_size: 400}}
tokens: {{holdout_share: 0.1}}
"""


@pytest.fixture(scope="session")
def recipe_text(crawl: Path) -> str:
    """The small recipe."""
    return RECIPE.format(crawl=crawl, min_words=30)


@pytest.fixture
def recipe_file(crawl: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes the small recipe; `replace` pairs change its text."""

    def make(name: str = "small.yaml", *, min_words: int = 30, replace: dict[str, str] | None = None) -> Path:
        text = RECIPE.format(crawl=crawl, min_words=min_words)
        for old, new in (replace or {}).items():
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / name
        path.write_text(text, "utf-8")
        return path

    return make


@pytest.fixture(scope="session")
def finished_run(recipe_text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small recipe, run to its end in one process. Tests that change it copy it first."""
    from gristmill.pipelines import recipe as recipes
    from gristmill.pipelines.progress import Display
    from gristmill.pipelines.run import Options, run

    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.yaml").write_text(recipe_text)
    with Display() as display:
        outcome = run(recipes.load(folder / "small.yaml"), str(folder / "run"), Options(debug=True), display)
    assert outcome.found == 0
    assert outcome.done > 20
    return folder / "run"
