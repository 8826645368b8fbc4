"""`pii`: replaces e-mail addresses and public IP addresses in the text.

    pii:
      email_value: email@example.com

What counts as an address follows datatrove's PIIFormatter, which FineWeb ran. Differences, each on purpose:
    - an address that touches a letter of another script is found: "请写信给a@b.cn" (there, `\\b` sees no border)
    - dotted numbers inside longer ones stay: "1.2.3.4.5", "v1.2.3.4" (there, "1.2.3.4" is replaced)
    - a kind has one replacement value; there, values take turns, and a text depends on the texts before it
    - IPv6 too: addresses of the global unicast range 2000::/3

Addresses that are not globally reachable (private, loopback, link-local, documentation, ...) stay: they identify
nobody. The default values are of that kind (RFC 2606, 5737, 3849), so the stage changes nothing when it runs twice.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pyarrow as pa

from gristmill.stages.documents import Batch, Result, Rule, Settings, cut, with_columns
from gristmill.stages.kernels.addresses import EMAIL, IPV4, IPV6, find_addresses, replace_spans
from gristmill.stages.kernels.buffers import string_views

# Parts of 2000::/3 that are not globally reachable: IETF protocols with Teredo, documentation, documentation.
_NOT_GLOBAL_V6 = tuple(ipaddress.IPv6Network(block) for block in ("2001::/23", "2001:db8::/32", "3fff::/20"))


class Pii(Settings):
    """Replaces addresses. Drops nothing. Counts what it replaced, and the documents that it changed."""

    name: ClassVar = "pii"
    version: ClassVar = 1
    needs: ClassVar = ("text",)
    adds: ClassVar[Mapping[str, pa.DataType]] = {}
    measures: ClassVar = ()

    emails: bool = True
    ipv4: bool = True
    ipv6: bool = True
    email_value: str = "email@example.com"  # RFC 2606
    ipv4_value: str = "192.0.2.1"  # RFC 5737
    ipv6_value: str = "2001:db8::1"  # RFC 3849

    def rules(self) -> tuple[Rule, ...]:
        return ()

    def __call__(self, batch: Batch) -> Result:
        ends, data = string_views(batch["text"])
        spans = find_addresses(data, ends, self.emails, self.ipv4, self.ipv6)
        spans = spans[_real(spans, data)]
        if not len(spans):
            return cut(batch, {})
        values = [value.encode() for value in (self.email_value, self.ipv4_value, self.ipv6_value)]
        value_ends = np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype(np.int64)
        joined = np.frombuffer(b"".join(values), np.uint8)
        out, offsets = replace_spans(data, ends, spans, joined, value_ends)
        text = pa.LargeStringArray.from_buffers(len(ends) - 1, pa.py_buffer(offsets), pa.py_buffer(out))
        kinds = np.bincount(spans[:, 3], minlength=3)
        counters = {
            "emails_replaced": int(kinds[EMAIL]),
            "ipv4_replaced": int(kinds[IPV4]),
            "ipv6_replaced": int(kinds[IPV6]),
            "documents_changed": len(np.unique(spans[:, 0])),
        }
        return cut(with_columns(batch, {"text": text.cast(pa.string())}), {}, counters)


def _real(spans: np.ndarray, data: np.ndarray) -> np.ndarray:
    """spans: (found, 4) -> (found,) bool, false for IPv6 candidates that are none or are not global."""
    real = np.ones(len(spans), bool)
    for i in np.flatnonzero(spans[:, 3] == IPV6):
        try:
            address = ipaddress.IPv6Address(data[spans[i, 1] : spans[i, 2]].tobytes().decode("ascii"))
        except ValueError:
            real[i] = False
        else:
            real[i] = not any(address in block for block in _NOT_GLOBAL_V6)
    return real
