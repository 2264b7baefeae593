"""Errors of the shared core, and untrusted text made visible, in errors and elsewhere.

FedcoreError
├── SchemaError             a vector or tensor does not have the declared name, shape or type
├── PlanError               a plan or manifest is malformed or of an unknown version
│   ├── DigestMismatch      bytes do not have the digest that names them
│   ├── BadSignature        a plan's signature is not its signer's
│   └── BadRelease          a release or an entry of its lineage is malformed, or contradicts the rules
├── NotWritten              a file could not be written
├── InvalidKey              a key is malformed, or a file that should hold one does not
├── BrokenSuccession        no chain of signatures leads from the pinned key to the presented one
├── WireError               a message is malformed or of an unknown version
│   └── RequestError        a signed request is refused; each is one problem type of fedcore.wire.messages
│       ├── MalformedSignature  the signature is not of the form that this protocol has, or covers too little
│       │   └── Unsigned    the request has no signature
│       ├── ForgedSignature     the signature was not made by its key over the request
│       ├── StaleSignature  the signature is too old, too new or expired
│       └── WrongBody       the body does not have the digest that was signed or named
├── ReportError             a report has the wrong length or layout, or holds a non-finite number
├── PrivacyError            a promise of privacy has a value that it cannot have, or cannot be accounted for
├── DeltaError              a delta is damaged, or does not turn the present blob into the wanted one
├── CompressionError        no compression has that name, its number is out of range, or it does not commute with sums
├── ScheduleError           a server schedule has a value out of range, or lacks one that another needs
├── BadTarget               an expression on labels does not parse
├── QuestionError           a question to devices cannot be asked or answered like this
│   └── QueryError          a query in SQL is none that devices answer
└── AlgorithmError
    ├── UnknownAlgorithm    no algorithm has that name
    │   └── UntrustedAlgorithm  a user's own algorithm is in a module that must not be imported here
    ├── InvalidAlgorithm    a user's own algorithm breaks the contract
    └── InvalidSetting      the algorithm has no such setting, or the value is out of range
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import ClassVar

# Untrusted text made visible, in lines and in tables of a notebook: nothing in it hides or reverses the rest.


# Python calls these printable, and they have no width or no ink: Unicode's Default_Ignorable_Code_Point, and a blank.
_INKLESS = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def visible(text: str) -> str:
    """A text as one line that is safe to show: all but letters, marks, numbers, signs and plain spaces is escaped.

    Escaped are controls with line breaks, overrides of direction, and characters without width. They become `\\u001b`
    and the like, as in JSON, so a JSON document stays the same document.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character.isprintable() and not _INKLESS.match(character) else _escaped(character)
        for character in text
    )


def visible_lines(text: str) -> str:
    """As `visible`, for a text of several lines, such as a traceback."""
    return "\n".join(map(visible, text.split("\n")))


def _escaped(letter: str) -> str:
    return re.sub("....", r"\\u\g<0>", letter.encode("utf-16-be", "surrogatepass").hex())


def table_of(columns: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table in HTML."""
    head = "".join(f"<th>{_cell(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def facts_of(title: str, facts: Mapping[str, object]) -> str:
    """Named values as a table in HTML, without those that are None or empty."""
    return table_of([title, ""], [(name, value) for name, value in facts.items() if value not in (None, "", {}, [])])


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        value = ", ".join(f"{name}={inner}" for name, inner in value.items())
    elif isinstance(value, float):
        value = f"{value:.4g}"
    elif isinstance(value, int) and not isinstance(value, bool):
        value = f"{value:,}"
    return escape(visible("" if value is None else str(value)))


# Errors of the shared core.


def why(error: Exception) -> str:
    """The words of an error, for a sentence that names the file; of an OSError, only the operating system's words."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


_LIBRARIES_WORDS = {
    r"Input should be a valid integer.*": "it must be a whole number",
    r"Input should be a valid number.*": "it must be a number",
    r"Input should be greater than or equal to (\S+)": r"it must be at least \1",
    r"Input should be less than or equal to (\S+)": r"it must be at most \1",
    r"Input should be greater than (\S+)": r"it must be above \1",
    r"Input should be less than (\S+)": r"it must be below \1",
    r"Input should be (.*)": r"it must be \1",
}


def in_our_words(message: str) -> str:
    """The message of a library about a value that is not what it may be, as our own messages say it."""
    for pattern, words in _LIBRARIES_WORDS.items():
        message = re.sub(pattern, words, message)
    return message


class FedcoreError(Exception):
    """Base of every error raised by `fedcore`."""


class SchemaError(FedcoreError):
    """A vector or tensor does not have the declared name, shape or type."""


class PlanError(FedcoreError):
    """A plan or manifest is malformed or of an unknown version."""


class DigestMismatch(PlanError):
    """Bytes do not have the digest that names them."""


class BadSignature(PlanError):
    """A plan's signature is not its signer's."""


class BadRelease(PlanError):
    """A release or an entry of its lineage is malformed, or contradicts the rules."""


class NotWritten(FedcoreError, OSError):
    """A file could not be written. An OSError whose message is a sentence that names the file."""

    def __str__(self) -> str:
        return f"{self.filename} cannot be written: {self.strerror}"


class InvalidKey(FedcoreError):
    """A key is malformed, or a file that should hold one does not."""


class BrokenSuccession(FedcoreError):
    """No chain of signatures leads from the pinned key to the presented one."""


class WireError(FedcoreError):
    """A message is malformed or of an unknown version."""


class RequestError(WireError):
    """A signed request is refused: `slug` names the problem type, the message is its detail."""

    slug: ClassVar[str]


class MalformedSignature(RequestError):
    """The signature is not of the form that this protocol has, or covers too little."""

    slug = "malformed-signature"


class Unsigned(MalformedSignature):
    """The request has no signature."""

    slug = "unsigned"


class ForgedSignature(RequestError):
    """The signature was not made by its key over the request."""

    slug = "forged-signature"


class StaleSignature(RequestError):
    """The signature is too old, too new or expired. `after_s`: a fresh one will do in so many seconds."""

    slug = "stale-signature"

    def __init__(self, detail: str, after_s: float = 0.0) -> None:
        super().__init__(detail)
        self.after_s = after_s


class WrongBody(RequestError):
    """The body does not have the digest that was signed or named."""

    slug = "digest-mismatch"


class ReportError(FedcoreError):
    """A report has the wrong length or layout, or holds a non-finite number."""


class PrivacyError(FedcoreError):
    """A promise of privacy has a value that it cannot have, or cannot be accounted for."""


class DeltaError(FedcoreError):
    """A delta is damaged, or does not turn the present blob into the wanted one."""


class CompressionError(FedcoreError):
    """No compression has that name, its number is out of range, or it does not commute with sums."""


class ScheduleError(FedcoreError):
    """A server schedule has a value out of range, or lacks one that another needs."""


class BadTarget(FedcoreError):
    """An expression on labels does not parse. The message says at which column."""


class QuestionError(FedcoreError):
    """A question to devices cannot be asked or answered like this."""


class QueryError(QuestionError):
    """A query in SQL is none that devices answer; the message names the place in its text."""


class AlgorithmError(FedcoreError):
    """An algorithm cannot be used as requested."""


class UnknownAlgorithm(AlgorithmError):
    """No algorithm has that name."""


class UntrustedAlgorithm(UnknownAlgorithm):
    """A user's own algorithm is in a module that must not be imported here."""


class InvalidAlgorithm(AlgorithmError):
    """A user's own algorithm breaks the contract."""


class InvalidSetting(AlgorithmError):
    """The algorithm has no such setting, or the value is out of range."""
