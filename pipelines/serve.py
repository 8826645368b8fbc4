"""The report of a run from this machine's own address, with all documents behind it: `gristmill serve RUN`.

    server = Server(open_run("out/demo/run"), stages)
    print(server.url)                     # http://127.0.0.1:PORT/?token=...
    server.run()                          # until it is interrupted

Who may ask
    - The server listens on 127.0.0.1 only, and answers only to requests that name that host and port (or `localhost`):
      a page of another name that resolves to this machine gets nothing (DNS rebinding).
    - The address that is printed holds a token. Its first visit is answered with a cookie and a redirect to the bare
      address, so that the token is in no later request. Programs send it as `Authorization: Bearer TOKEN`.
    - Only GET, nothing is changed by it, and nothing outside the run folder and its own input is read.
    - The page's content policy, as a header: the one script, the one style, requests to this server; nothing else.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlencode

import orjson
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, HTTPError, RequestHandler

from gristmill.pipelines import browse
from gristmill.pipelines.inspect import Filter, Range
from gristmill.pipelines.open_run import Run, RunError, open_run
from gristmill.pipelines.originals import original
from gristmill.pipelines.report.figures import page_data
from gristmill.pipelines.report.write import content_policy, render

HOST = "127.0.0.1"
PER_PAGE = 10  # documents, where the request names no number
TEXT_CHARS = 20_000  # of each text in a page of documents; `/document` gives all of it
HTML_CHARS = 400_000  # of an original page
SAFETY = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "gristmill",
}


class Server:
    """Listens from the moment it is made; `run` answers. port: 0 takes a free one."""

    def __init__(self, run: Run, stages: Mapping[str, type], port: int = 0, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(32)
        self.session = secrets.token_urlsafe(32)  # what the cookie holds: not the token, which stands in histories
        self._sockets = bind_sockets(port, HOST)
        self.port = int(self._sockets[0].getsockname()[1])
        self.hosts = {f"{name}:{self.port}" for name in (HOST, "localhost")}
        self.cookie = f"gristmill-{self.port}"  # cookies know no ports
        self.source = Source(run, stages)

    @property
    def url(self) -> str:
        """The address to open."""
        return f"http://{HOST}:{self.port}/?{urlencode({'token': self.token})}"

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Answers until the thread's loop is stopped or the process is interrupted. ready: called when it listens."""
        asyncio.run(self.answer(ready))

    async def answer(self, ready: Callable[[], None] = lambda: None, until: asyncio.Event | None = None) -> None:
        """Answers until `until` is set."""
        with ThreadPoolExecutor(2, "gristmill-serve") as pool:
            routes = [
                (rf"/{name}", Handler, {"server": self, "pool": pool, "answer": answer})
                for name, answer in (
                    ("", Source.page),
                    ("documents", Source.documents),
                    ("count", Source.count),
                    ("document", Source.document),
                    ("original", Source.original),
                )
            ]
            others = {"server": self, "pool": pool}
            application = Application(
                routes, default_handler_class=Handler, default_handler_args=others, log_function=lambda _: None
            )
            http = HTTPServer(application, max_body_size=1 << 16, max_header_size=1 << 16)
            http.add_sockets(self._sockets)
            try:
                ready()
                await (until or asyncio.Event()).wait()
            finally:
                http.stop()
                await http.close_all_connections()


class Source:
    """What there is to answer with. Everything here is called in a thread of its own."""

    def __init__(self, run: Run, stages: Mapping[str, type]) -> None:
        self._run, self._stages = run, stages
        self._page: bytes | None = None
        self._drawn: float | None = None
        self._drawing = threading.Lock()

    def page(self, asked: Mapping[str, str]) -> bytes:
        """The report; drawn again when the run went on."""
        with self._drawing:
            changed = max((t for s in self._run.segments if (t := self._run.modified(f"{s}/ledger"))), default=0.0)
            if self._page is None or changed != self._drawn:
                self._run = open_run(self._run.path)
                data = {**page_data(self._run, self._stages), "served": True}
                self._page, self._drawn = render(data).encode("utf-8", errors="replace"), changed
            return self._page

    def documents(self, asked: Mapping[str, str]) -> dict[str, Any]:
        """A page of documents."""
        query = self._query(asked)
        n = _whole(asked, "n", PER_PAGE)
        after = _place(asked)
        if measure := asked.get("order"):
            found = browse.ordered(
                self._run, query, measure, n, after[2] if after else 0, descending=asked.get("down") == "1"
            )
        else:
            found = browse.page(self._run, query, after, n)
        return {
            "documents": [_short(document) for document in found.documents],
            "next": found.next,
            "looked_at": found.looked_at,
            "timed_out": found.timed_out,
        }

    def count(self, asked: Mapping[str, str]) -> dict[str, Any]:
        """How many documents match, as far as some seconds go."""
        found, whole = browse.count(self._run, self._query(asked))
        return {"documents": found, "whole": whole}

    def document(self, asked: Mapping[str, str]) -> dict[str, Any]:
        """One document with its whole text."""
        return self._at(asked)

    def original(self, asked: Mapping[str, str]) -> dict[str, Any]:
        """The page that a document was extracted from; `html` is null where it is not to be had."""
        html = original(self._run, asked.get("part", ""), _columns(self._at(asked)))
        return {"html": None if html is None else html[:HTML_CHARS], "more": max(0, len(html or "") - HTML_CHARS)}

    def _at(self, asked: Mapping[str, str]) -> dict[str, Any]:
        return browse.document_at(self._run, asked.get("part", ""), _whole(asked, "group", 0), _whole(asked, "row", 0))

    def _query(self, asked: Mapping[str, str]) -> browse.Query:
        ranges: tuple[Range, ...] = ()
        if measure := asked.get("measure"):
            ranges = (Range(measure, _number(asked, "low"), _number(asked, "high")),)
        wanted = Filter(language=asked.get("language"), text=asked.get("text"), ranges=ranges, address=True)
        kept = {"1": True, "0": False}.get(asked.get("kept", ""))
        return browse.query(self._run, kept, asked.get("stage"), asked.get("reason"), asked.get("source"), wanted)


class Handler(RequestHandler):
    """Checks who asks, and hands the question on."""

    def initialize(self, server: Server, pool: ThreadPoolExecutor, answer: Callable[..., Any] | None = None) -> None:
        self._server, self._pool, self._answer = server, pool, answer

    def set_default_headers(self) -> None:
        for name, value in SAFETY.items():
            self.set_header(name, value)
        self.set_header("Content-Security-Policy", content_policy(connect=True) + "; frame-ancestors 'none'")

    def prepare(self) -> None:
        _check_host(self, self._server)
        given = self.get_query_argument("token", None)
        if given is not None and _same(given, self._server.token) and self.request.path == "/":
            self.set_cookie(self._server.cookie, self._server.session, httponly=True, samesite="Strict", path="/")
            self.redirect("/")
            return
        bearer = self.request.headers.get("Authorization", "").removeprefix("Bearer ")
        cookie = self.get_cookie(self._server.cookie, "") or ""
        if not (_same(bearer, self._server.token) | _same(cookie, self._server.session)):
            raise HTTPError(403, "Open the address that `gristmill serve` printed: it holds the token.")

    async def get(self) -> None:
        if self._answer is None:
            raise HTTPError(404, "There is nothing here.")
        asked = {name: values[-1].decode("utf-8", "replace") for name, values in self.request.query_arguments.items()}
        asked = {name: value for name, value in asked.items() if value != ""}
        work: Awaitable[Any] = asyncio.get_running_loop().run_in_executor(
            self._pool, partial(self._answer, self._server.source, asked)
        )
        try:
            found = await work
        except RunError as error:
            raise HTTPError(400, str(error)) from error
        if isinstance(found, bytes):
            self.set_header("Content-Type", "text/html; charset=utf-8")
            self.finish(found)
            return
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(orjson.dumps(found))

    def write_error(self, status_code: int, **details: Any) -> None:
        error = (details.get("exc_info") or (None, None, None))[1]
        message = (error.log_message or "") if isinstance(error, HTTPError) else "The request could not be answered."
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(message + "\n")

    def log_exception(self, *details: Any) -> None:
        """Refusals are no errors of ours."""
        if not isinstance(details[1], HTTPError):
            super().log_exception(*details)


def _check_host(handler: RequestHandler, server: Server) -> None:
    """Raises HTTPError for a request that was meant for another host, or sent by another page."""
    if handler.request.headers.get("Host", "").lower() not in server.hosts:
        raise HTTPError(403, f"This server answers to {HOST}:{server.port} only.")
    origin = handler.request.headers.get("Origin")
    if origin is not None and origin.removeprefix("http://").lower() not in server.hosts:
        raise HTTPError(403, "This server answers to its own page only.")


def _same(given: str, right: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(given.encode(), right.encode())


def _short(document: dict[str, Any]) -> dict[str, Any]:
    text = document["text"]
    if text is None:
        return {**document, "more_chars": 0}
    return {**document, "text": text[:TEXT_CHARS], "more_chars": max(0, len(text) - TEXT_CHARS)}


def _columns(document: dict[str, Any]) -> dict[str, Any]:
    return {"position": document.get("position"), "url": document.get("url")}


def _whole(asked: Mapping[str, str], name: str, default: int) -> int:
    text = asked.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise RunError(f"{name} is {text!r}; it is a whole number.")
    return int(text)


def _number(asked: Mapping[str, str], name: str) -> float | None:
    text = asked.get(name)
    try:
        return None if text is None else float(text)
    except ValueError:
        raise RunError(f"{name} is {text!r}; it is a number.") from None


def _place(asked: Mapping[str, str]) -> browse.Place | None:
    """`after=PART,GROUP,ROW`, as a page gave it."""
    text = asked.get("after")
    if text is None:
        return None
    try:
        at, group, row = (int(part) for part in text.split(","))
        if at < 0 or group < 0 or row < -1:
            raise ValueError(text)
    except ValueError:
        raise RunError(f"after is {text!r}; give what the page before said under `next`.") from None
    return at, group, row


def serve(run: Run, port: int, say: Callable[[str], None]) -> None:
    """Serves until Ctrl-C or SIGTERM; `say` is told the address. To be called on the main thread."""
    from gristmill.pipelines.recipe import STAGES

    begun = time.perf_counter()
    server = Server(run, STAGES, port)
    server.source.page({})
    say(f"The report was drawn in {time.perf_counter() - begun:.1f} s. Open it, on this machine (Ctrl-C ends):")
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts what runs in its background with Ctrl-C ignored
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt):  # the way to end it
        server.run(lambda: say(server.url))
