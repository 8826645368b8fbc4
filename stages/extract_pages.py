"""One page of HTML bytes -> its text: which charset, which engine. `extract.py` is the stage."""

from __future__ import annotations

import codecs
import logging
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5
from resiliparse.parse.html import HTMLTree

from gristmill.stages.documents import Settings
from gristmill.stages.readers_common import clean_string

# How the charset of a page was found, in the order of trust. The index is what the guard's helper sends.
CHARSET_BY = ("bom", "utf8", "header", "meta", "detected", "fallback")
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_META_BYTES = 1024  # HTML standard, 13.2.3.2: a meta charset stands in the first 1024 bytes
_META = re.compile(
    rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9._:-]+)|<\?xml[^>]{0,100}?encoding=[\"']([\w.-]+)", re.I
)


class Engine(Settings):
    """How text is taken from a page."""

    engine: Literal["resiliparse", "trafilatura", "plain"] = "resiliparse"  # plain: the whole page's text
    links: bool = False  # keep the targets of links
    tables: bool = True
    alt_texts: bool = False  # of images; resiliparse and plain
    comments: bool = False  # of readers, below an article
    favour: Literal["precision", "balance", "recall"] = "precision"  # trafilatura; FineWeb ran precision
    min_share: float = Field(0.0, ge=0, le=1)  # main content below this share of the page's text: all of it is kept


@dataclass(frozen=True)
class Page:
    """What was made of a page."""

    text: str
    charset_by: str  # one of CHARSET_BY
    replaced: int  # bytes that the charset does not know, NULs and surrogates, now U+FFFD
    main_share: float  # characters of the main content by those of the whole page; NaN where that was not asked for


def extract_page(engine: Engine, html: bytes, charset: str | None) -> Page:
    """Raises ValueError and what the engines raise for pages that they cannot take."""
    decoded, by, bad = decode_page(html, charset)
    main, share = _main(engine, decoded)
    text, nuls, surrogates = clean_string(main)
    # A no-break space is layout. fastText and KenLM do not split at it, so words around it would be glued to one.
    return Page(text.replace("\u00a0", " ").strip("\n"), by, bad + nuls + surrogates, share)


def _main(engine: Engine, html: str) -> tuple[str, float]:
    """The text that is taken, and the share that the main content has of the page; NaN without `min_share`."""
    if engine.engine == "plain":
        return _resiliparse(engine, html, main=False), math.nan
    if not engine.min_share:
        return _trafilatura(engine, html) if engine.engine == "trafilatura" else _resiliparse(engine, html), math.nan
    tree = HTMLTree.parse(html)  # once for both
    main = _trafilatura(engine, html) if engine.engine == "trafilatura" else _resiliparse(engine, tree)
    whole = _resiliparse(engine, tree, main=False)
    share = min(1.0, len(main) / len(whole)) if whole else 1.0
    return (whole if share < engine.min_share else main), share


def decode_page(html: bytes, charset: str | None) -> tuple[str, str, int]:
    """HTML bytes -> (text, one of CHARSET_BY, replaced bytes).

    charset: of the HTTP header. A declared charset counts only where the bytes fit it; servers lie too often. Bytes
    that are valid UTF-8 are UTF-8 whatever is declared (but for 7-bit charsets with escapes, which look like ASCII):
    text of other charsets is valid UTF-8 by accident about never.
    """
    for bom, codec in _BOMS:
        if html.startswith(bom):
            text = html[len(bom) :].decode(codec, "replace")
            return text, "bom", text.count("\ufffd")
    declared = [("header", _codec(charset)), ("meta", _codec(_meta_charset(html)))]
    wide = any(name and name.startswith("utf-16") for _, name in declared)
    if b"\x1b" not in html and not (wide and b"\0" in html[:_META_BYTES]):
        try:
            return html.decode("utf-8"), "utf8", 0
        except UnicodeDecodeError:
            pass
    detected = detect_encoding(html)
    candidates = [*declared, ("detected", _codec(detected))]
    for by, name in candidates:
        if name:
            try:
                return html.decode(name), by, 0
            except (UnicodeDecodeError, LookupError):
                continue
    # No charset fits every byte. The detector's is the likeliest: it forgives a page that was cut or patched.
    text = html.decode(_codec(detected) or "cp1252", "replace")
    return text, "fallback", text.count("\ufffd")


def _codec(charset: str | None) -> str | None:
    """A charset's label as HTML reads it -> Python's name for the codec, None where there is no such thing."""
    if not charset:
        return None
    name = map_encoding_to_html5(charset, fallback_utf8=False)
    try:
        return codecs.lookup(name).name if name else None
    except LookupError:
        return None


def _meta_charset(html: bytes) -> str | None:
    match = _META.search(html[:_META_BYTES])
    return (match.group(1) or match.group(2)).decode("ascii", "replace") if match else None


def _resiliparse(engine: Engine, html: str | HTMLTree, main: bool = True) -> str:
    return str(
        extract_plain_text(
            html,
            main_content=main,
            links=engine.links,
            alt_texts=engine.alt_texts,
            comments=engine.comments,
            skip_elements=None if engine.tables else ["table"],
        )
    )


def _trafilatura(engine: Engine, html: str) -> str:
    import trafilatura

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # it logs an error for every page without text
    # deduplicate=True, which datatrove sets, remembers passages of earlier pages: a page's text would depend on order.
    text: Any = trafilatura.extract(
        html,
        favor_precision=engine.favour == "precision",
        favor_recall=engine.favour == "recall",
        include_comments=engine.comments,
        include_tables=engine.tables,
        include_links=engine.links,
        deduplicate=False,
    )
    return str(text) if text is not None else ""
