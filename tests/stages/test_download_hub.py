"""`hf://` against a local server that speaks the parts of the hub's protocol that are needed."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import fsspec
import pytest

from gristmill.stages import download_http
from gristmill.stages.download import Policy, Tools, fetch
from gristmill.stages.download_http import DownloadError
from gristmill.stages.download_listing import Download, choose

FILES = {
    "README.md": b"# words\n",
    "en/part-0.jsonl.gz": bytes(range(256)) * 40,
    "en/part-1.jsonl.gz": bytes(range(255, -1, -1)) * 30,
    "de/part-0.jsonl.gz": b"x" * 5_000,
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """A dataset owner/words whose .gz files lie in the large file storage of another host."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str, str | None]]  # method, path, authorization
    faults: list[int]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        self.seen.append((self.command, path, self.headers.get("Authorization")))
        if path.startswith(("/api/datasets/owner/words/revision/", "/api/datasets/owner/words/tree/")) or path in (
            "/api/datasets/owner/words",
        ):
            if "/tree/" not in path:
                return self.give(json.dumps({"id": "owner/words", "sha": COMMIT, "siblings": []}).encode())
            return self.tree(path.split("/tree/", 1)[1].partition("/")[2])
        if path.startswith("/api/datasets/owner/words/paths-info/"):
            wanted = json.loads(body)["paths"]
            return self.give(json.dumps([entry(p) for p in wanted if p in FILES]).encode())
        if path.startswith("/datasets/owner/words/resolve/main/"):
            name = path.removeprefix("/datasets/owner/words/resolve/main/")
            if not name.endswith(".gz"):
                return self.give(FILES[name])
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/lfs/{name}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if path.startswith("/lfs/") and not self.faults:
            return self.give(FILES[path.removeprefix("/lfs/")])
        self.send_response(self.faults.pop() if self.faults else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def tree(self, folder: str) -> None:
        inside = [name for name in FILES if not folder or name.startswith(f"{folder}/")]
        entries = []
        for name in inside:
            rest = name[len(folder) :].lstrip("/")
            if "/" in rest and "recursive=true" not in self.path.lower():
                place = f"{folder}/{rest.split('/')[0]}".lstrip("/")
                directory = {"type": "directory", "path": place, "oid": "d" * 40, "size": 0}
                entries += [directory] if directory not in entries else []
            else:
                entries.append(entry(name))
        self.give(json.dumps(entries).encode())

    def give(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def entry(name: str) -> dict[str, object]:
    data = FILES[name]
    out: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if name.endswith(".gz"):
        out["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return out


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    import huggingface_hub.constants

    handler = type("H", (Hub,), {"seen": [], "faults": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    fsspec.get_filesystem_class("hf").clear_instance_cache()
    yield handler
    download_http.close_clients()
    fsspec.get_filesystem_class("hf").clear_instance_cache()
    server.shutdown()
    thread.join()
    server.server_close()


def test_files_of_a_dataset_are_listed_fetched_and_checked(hub: type[Hub], tmp_path: Path) -> None:
    wanted = choose(Download(urls="hf://datasets/owner/words/*/*.jsonl.gz"))
    assert [(w.name, w.size) for w in wanted] == [
        ("de/part-0.jsonl.gz", 5_000),
        ("en/part-0.jsonl.gz", 10_240),
        ("en/part-1.jsonl.gz", 7_680),
    ]
    hub.faults = [503]
    waits: list[float] = []
    tools = Tools(sleep=waits.append)
    cards = [fetch(w, str(tmp_path), Policy(timeout_s=5.0), tools) for w in wanted]
    for card in cards:
        assert (tmp_path / card.name).read_bytes() == FILES[card.name]
        assert card.verified == ("length", "sha256")
    assert [card.attempts for card in cards] == [2, 1, 1]
    assert len(waits) == 1
    asked = {path: token for _, path, token in hub.seen}
    assert asked["/datasets/owner/words/resolve/main/en/part-0.jsonl.gz"] == "Bearer hf_secret"
    assert asked["/lfs/en/part-0.jsonl.gz"] is None, "the token went to another host"


def test_a_folder_of_a_dataset(hub: type[Hub]) -> None:
    assert [w.name for w in choose(Download(urls="hf://datasets/owner/words/en"))] == [
        "part-0.jsonl.gz",
        "part-1.jsonl.gz",
    ]


def test_a_dataset_that_there_is_not(hub: type[Hub]) -> None:
    with pytest.raises(DownloadError, match=r"hf://datasets/owner/other/\*"):
        choose(Download(urls="hf://datasets/owner/other/*"))


def test_a_file_that_is_not_the_listed_one_is_refused(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = choose(Download(urls="hf://datasets/owner/words/de/*"))[0]
    monkeypatch.setitem(FILES, "de/part-0.jsonl.gz", b"y" * 5_000)
    with pytest.raises(DownloadError, match="its sha256 is"):
        fetch(wanted, str(tmp_path), Policy(timeout_s=5.0))
