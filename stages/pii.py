"""`pii`: replaces e-mail addresses and public IP addresses in the text; on request telephone numbers and secrets.

    pii:
      email_value: email@example.com
      phone_numbers: true
      secrets: true

What counts as an address follows datatrove's PIIFormatter, which FineWeb ran. Differences, each on purpose:
    - an address that touches a letter of another script is found: "请写信给a@b.cn" (there, `\\b` sees no border)
    - dotted numbers inside longer ones stay: "1.2.3.4.5", "v1.2.3.4" (there, "1.2.3.4" is replaced)
    - a kind has one replacement value; there, values take turns, and a text depends on the texts before it
    - IPv6 too: addresses of the global unicast range 2000::/3
What counts as a telephone number: `pii_phones.py`; as a secret: `pii_secrets.py`. Where two overlap, the secret goes
first, then the address.

Addresses that are not globally reachable (private, loopback, link-local, documentation, ...) stay: they identify
nobody. The default values are of that kind (RFC 2606, 5737, 3849; 555-0100 is for fiction), and those of secrets are
after BigCode's `<KEY>`, so the stage changes nothing when it runs twice.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pyarrow as pa
from pydantic import field_validator

from gristmill.stages.documents import Batch, Result, Rule, Settings, cut, with_columns
from gristmill.stages.kernels.addresses import IPV6, find_addresses, replace_spans
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.pii_phones import find_phones, known_regions
from gristmill.stages.pii_secrets import KINDS as SECRETS
from gristmill.stages.pii_secrets import added, find_secrets

# Parts of 2000::/3 that are not globally reachable: IETF protocols with Teredo, documentation, documentation.
_NOT_GLOBAL_V6 = tuple(ipaddress.IPv6Network(block) for block in ("2001::/23", "2001:db8::/32", "3fff::/20"))


_KINDS = ("emails", "ipv4", "ipv6", "phones", *SECRETS)  # the first three as the kernel numbers them


class Pii(Settings):
    """Replaces addresses, numbers and keys. Drops nothing. Counts what it replaced and the documents changed."""

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

    phone_numbers: bool = False
    phone_regions: tuple[str, ...] = ("US", "GB", "DE", "FR")  # whose numbers are known without "+"; ISO 3166
    phone_value: str = "+1-202-555-0100"  # 555-0100 to 555-0199: reserved for fiction

    secrets: bool = False  # all of the kinds below
    aws_key_value: str = "<AWS_KEY>"
    github_token_value: str = "<GITHUB_TOKEN>"  # noqa: S105
    slack_token_value: str = "<SLACK_TOKEN>"  # noqa: S105
    google_key_value: str = "<GOOGLE_KEY>"
    openai_key_value: str = "<OPENAI_KEY>"
    stripe_key_value: str = "<STRIPE_KEY>"
    jwt_value: str = "<JWT>"
    private_key_value: str = "<PRIVATE_KEY>"

    @field_validator("phone_regions")
    @classmethod
    def _are_known(cls, regions: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [region for region in regions if region not in known_regions()]:
            raise ValueError(f"no region {', '.join(unknown)} with telephone numbers; write ISO 3166 codes, such as US")
        return regions

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages whose version is part of the result's identity."""
        return ("phonenumbers",) if self.phone_numbers else ()

    def rules(self) -> tuple[Rule, ...]:
        return ()

    def __call__(self, batch: Batch) -> Result:
        ends, data = string_views(batch["text"])
        spans = self._spans(batch["text"], data, ends)
        if not len(spans):
            return cut(batch, {})
        values = self._values()
        value_ends = np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype(np.int64)
        joined = np.frombuffer(b"".join(values) or b"\0", np.uint8)
        out, offsets = replace_spans(data, ends, spans, joined, value_ends)
        text = pa.LargeStringArray.from_buffers(len(ends) - 1, pa.py_buffer(offsets), pa.py_buffer(out))
        counts = np.bincount(spans[:, 3], minlength=len(_KINDS))
        counters = {
            f"{kind}_replaced": int(n) for kind, n, wanted in zip(_KINDS, counts, self._wanted(), strict=True) if wanted
        }
        counters["documents_changed"] = len(np.unique(spans[:, 0]))
        return cut(with_columns(batch, {"text": text.cast(pa.string())}), {}, counters)

    def _spans(self, text: pa.Array, data: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """(found, 4) int64: document, first byte, byte after, index in _KINDS; in text order, without overlap."""
        spans = find_addresses(data, ends, self.emails, self.ipv4, self.ipv6)
        spans = spans[_real(spans, data)]
        if self.secrets:
            secrets = find_secrets(text, data, ends)
            secrets[:, 3] += _KINDS.index(SECRETS[0])
            spans = added(secrets, spans)
        if self.phone_numbers:
            phones = find_phones(data, ends, self.phone_regions)
            kind = np.full((len(phones), 1), _KINDS.index("phones"))
            spans = added(spans, np.concatenate([phones, kind], axis=1))
        return spans

    def _values(self) -> list[bytes]:
        """What takes the place of each kind, in the order of _KINDS."""
        secrets = (
            self.aws_key_value,
            self.github_token_value,
            self.slack_token_value,
            self.google_key_value,
            self.openai_key_value,
            self.stripe_key_value,
            self.jwt_value,
            self.private_key_value,
        )
        of_kinds = (self.email_value, self.ipv4_value, self.ipv6_value, self.phone_value, *secrets)
        return [value.encode() for value in of_kinds]

    def _wanted(self) -> list[bool]:
        """Whether each kind is looked for, in the order of _KINDS. Addresses are always counted."""
        return [True] * 3 + [self.phone_numbers] + [self.secrets] * len(SECRETS)


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
