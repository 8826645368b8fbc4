"""Pages whose main text is known, for `extract.py`: rules by the generator of a site, not pages.

A rule names the element of the main text and what in it is no text: permalinks, tables of contents, navigation inside.
The rules were checked by reading labels beside their pages. lxml makes the label: neither of the engines measured.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lxml import etree
from lxml import html as lxml_html

MIN_TOKENS = 50  # of a label
MAX_HTML_BYTES = 500_000
_CLASS = "contains(concat(' ', normalize-space(@class), ' '), ' {} ')"
_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"  # a token is a character there
_TOKENS = re.compile(rf"[{_SPACELESS}]|[^\W{_SPACELESS}]+")
_NO_TEXT = "//script|//style|//noscript|//template"


def _has(*classes: str) -> str:
    return " or ".join(_CLASS.format(name) for name in classes)


@dataclass(frozen=True)
class Rule:
    """hosts: pattern of the host's beginning. main: the first match holds the main text. without: removed from it.

    sidebars: around the main text stand menus, lists of sections and footers, as on most pages of the web.
    """

    hosts: str
    main: str
    without: str = ""
    sidebars: bool = False


_DOCBOOK_PARTS = ("chapter", "section", "sect1", "sect2", "sect3", "refentry", "appendix", "preface", "article")
_DOCBOOK = f"//body//div[{_has(*_DOCBOOK_PARTS)}]"
_DOCBOOK_NAVIGATION = f".//div[{_has('toc', 'navheader', 'navfooter', 'titlepage_nav')}]|.//ul[{_has('docnav')}]"
RULES = (
    Rule(r"libreoffice-help-", "//*[@id='DisplayArea']", f".//div[{_has('howtoget')}]"),
    Rule(
        r"(installation-guide|postgresql-doc|libboost|aptitude-doc|debian-reference|debian-handbook|harden-doc|gimp-help)",
        _DOCBOOK,
        _DOCBOOK_NAVIGATION,
    ),
    Rule(r"linux-doc", "//div[@role='main']", f".//a[{_has('headerlink')}]", sidebars=True),
    Rule(
        r"(python3\.|debian-policy|developers-reference)",
        f"//div[{_has('body')}]",
        f".//a[{_has('headerlink')}]|.//div[{_has('contents')}]",
        sidebars=True,
    ),
    Rule(
        r"python-django-doc",
        "//*[@id='yui-main']",
        f".//a[{_has('headerlink')}]|.//div[{_has('contents', 'nav')}]|.//nav[{_has('contents')}]",
        sidebars=True,
    ),
    Rule(
        r"rust-doc",
        "//*[@id='main-content']|//div[@id='content']//main",
        f".//a[{_has('anchor', 'src', 'srclink', 'header')}]|.//button|.//*[{_has('out-of-band', 'side-by-side')}]",
        sidebars=True,
    ),
    Rule(r"openjdk-17-doc", "//main", f".//nav|.//ul[{_has('sub-nav-list')}]", sidebars=True),
    Rule(r"erlang-doc", "//*[@id='content']", f".//a[{_has('ghlink', 'ghlink-after')}]", sidebars=True),
    Rule(r"sqlite3-doc", "//body", f".//div[{_has('nosearch', 'fancy_toc', 'toct')}]", sidebars=True),
    Rule(r"git-doc", "//*[@id='content']"),
    Rule(r"apache2-doc", "//*[@id='page-content']", f".//*[@id='quickview']|.//div[{_has('top', 'toplang')}]"),
    Rule(r"qtbase5-doc", f"//div[{_has('mainContent')}]", f".//div[{_has('sidebar', 'toc')}]"),
    Rule(r"lilypond-doc", "//*[@id='main']", f".//table[{_has('nav_table')}]|.//*[@id='footer']"),
    Rule(
        r"octave-doc",
        "//body",
        f".//div[{_has('header', 'nav-panel', 'contents')}]|.//table[{_has('menu')}]|.//ul[{_has('section-toc')}]",
    ),
)
_LISTS = re.compile(r"genindex|-members\.html|-obsolete\.html|(^|/)(index|idx\d*|toc)\b")  # pages without main text


@dataclass(frozen=True)
class Labelled:
    """A page and its main text."""

    host: str
    url: str
    html: bytes
    text: str
    sidebars: bool = False  # see Rule


def labelled(pages: Iterable[tuple[str, bytes]], count: int) -> list[Labelled]:
    """Up to `count` pages (url, HTML), the same of every host with a rule, chosen by a hash of the URL."""
    by_host: dict[str, list[tuple[int, str, bytes]]] = {}
    most = max(1, count // 8)  # of one host, until it is known how many hosts there are
    for url, html in pages:
        host = url.split("/")[2] if url.count("/") > 2 else ""
        if _rule(host) is None or len(html) > MAX_HTML_BYTES or _LISTS.search(url):
            continue
        kept = by_host.setdefault(host, [])
        kept.append((zlib.crc32(url.encode()), url, html))
        if len(kept) > 4 * most:
            kept.sort()
            del kept[2 * most :]
    found = {host: _labels(host, sorted(kept), most) for host, kept in sorted(by_host.items())}
    out: list[Labelled] = []
    for turn in range(most):  # one of each host in turn
        out += [mine[turn] for mine in found.values() if len(mine) > turn]
    return sorted(out[:count], key=lambda page: page.url)


def _labels(host: str, pages: list[tuple[int, str, bytes]], most: int) -> list[Labelled]:
    out: list[Labelled] = []
    rule = _rule(host)
    for _, url, html in pages if rule else ():
        text = label(host, html)
        if rule and text is not None and len(tokens(text)) >= MIN_TOKENS:
            out.append(Labelled(host, url, html, text, rule.sidebars))
        if len(out) == most:
            break
    return out


def _rule(host: str) -> Rule | None:
    return next((rule for rule in RULES if re.match(rule.hosts, host)), None)


def label(host: str, html: bytes) -> str | None:
    """The main text of a page; None where there is no rule, no main element, or bytes that are not UTF-8."""
    rule = _rule(host)
    try:
        text = html.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if rule is None:
        return None
    try:
        tree = lxml_html.document_fromstring(re.sub(r"^\s*<\?xml[^>]*\?>", "", text))
    except (etree.ParserError, ValueError):
        return None
    found = tree.xpath(rule.main)
    if not found:
        return None
    for element in [*tree.xpath(_NO_TEXT), *(found[0].xpath(rule.without) if rule.without else [])]:
        element.drop_tree()
    return " ".join(found[0].itertext())


def tokens(text: str) -> list[str]:
    """Words, and single characters of scripts without spaces; lower case."""
    return _TOKENS.findall(text.lower())


def f1(found: str, wanted: str) -> float:
    """F1 of the bags of tokens, 0 to 1."""
    mine, right = Counter(tokens(found)), Counter(tokens(wanted))
    shared = (mine & right).total()
    return 2 * shared / (mine.total() + right.total()) if shared else 0.0
