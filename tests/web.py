"""A local web server that misbehaves in every way that servers do. For tests of downloads."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gristmill.stages import download_http

BODY = bytes(i * i % 251 for i in range(300_000))
ETAG = '"one"'
LINGER = (socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset


@dataclass
class Site:
    """What the server does. `faults` are taken one a request, first to last; then it behaves."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=lambda: {"/data.bin": BODY})
    etag: str | None = ETAG
    ranges: bool = True
    faults: list[str] = field(default_factory=list)
    head_faults: list[str] = field(default_factory=list)  # the same for HEAD, which `faults` spares
    trickling: threading.Event = field(default_factory=threading.Event)  # set: a trickle ends
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)  # path, Range
    peers: set[tuple[str, int]] = field(default_factory=set)  # connections


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        body = self.site.files.get(self.path)
        if self.site.head_faults:
            return self.refuse(int(self.site.head_faults.pop(0)), "")
        self.send_response(200 if body is not None else 404)
        self.send_header("Content-Length", str(len(body or b"")))
        self.send_header("Accept-Ranges", "bytes")
        if self.site.etag is not None:
            self.send_header("ETag", self.site.etag)
        self.end_headers()

    def do_GET(self) -> None:
        site = self.site
        asked = self.headers.get("Range")
        site.requests.append((self.path, asked))
        site.peers.add(self.client_address)
        fault, _, detail = (site.faults.pop(0) if site.faults else "").partition(":")
        if fault.isdigit():
            return self.refuse(int(fault), detail)
        if fault == "changed":
            site.files[self.path], site.etag = BODY[::-1], '"two"'
        if self.path not in site.files:
            return self.refuse(404, "")
        self.give(site.files[self.path], asked, fault)

    def refuse(self, status: int, retry_after: str) -> None:
        self.send_response(status)
        if retry_after:
            self.send_header("Retry-After", retry_after)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def give(self, body: bytes, asked: str | None, fault: str) -> None:
        site, start, stop = self.site, 0, len(body)
        condition = self.headers.get("If-Range")
        if asked and site.ranges and condition in (None, site.etag):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start = int(first)
            stop = min(stop, int(last) + 1) if last else stop
        if fault == "wrong_range":
            start = 0
        partial = start > 0 or stop < len(body) or fault == "wrong_range"
        self.send_response(206 if partial else 200)
        if partial:
            total = len(body) + (7 if fault == "wrong_total" else 0)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{total}")
        sent = body[start:stop]
        if fault == "endless":
            self.close_connection = True  # HTTP/1.0's way: the body ends with the connection
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(sent) - (1_000 if fault == "short_length" else 0)))
        if site.etag is not None:
            self.send_header("ETag", site.etag)
        for name, value in site.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if fault == "reset":
            self.wfile.write(sent[: len(sent) // 3])
            self.wfile.flush()
            self.connection.setsockopt(*LINGER)
            os.close(self.connection.detach())
            return
        if fault == "trickle":
            for i in range(0, len(sent), 100):
                self.wfile.write(sent[i : i + 100])
                if site.trickling.wait(0.005):
                    break
            self.close_connection = True
            return
        if fault == "truncated":
            self.wfile.write(sent[: len(sent) // 2])
            self.close_connection = True
            return
        self.wfile.write(sent)


@contextmanager
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A site, and clients that know nothing of others."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download_http, "GATE", download_http.Gate())
    monkeypatch.setattr("gristmill.stages.download.GATE", download_http.GATE)
    made = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("H", (Handler,), {"site": made}))
    server.handle_error = lambda *_: None  # a reset on purpose is no news
    server.daemon_threads = True
    made.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.trickling.set()
    download_http.close_clients()
    server.shutdown()
    thread.join()
    server.server_close()
