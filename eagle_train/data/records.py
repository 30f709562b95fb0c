"""What one record of a file becomes: a conversation, a row of tokens, or a reason to leave it out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""One turn as a chat template reads it: `role`, `content`, and what else the turn has."""

_EXAMPLES = 3  # of each reason
_EXAMPLE_LENGTH = 120  # characters
_CATEGORY_LENGTH = 80  # characters


class Skip(Exception):
    """This record gives no row. `kind` is counted and one of few; `detail` is the record's own."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.detail = kind, detail


class BadRecord(Exception):
    """This record is damaged; the text says how. Kept out only when the user asks for it."""


@dataclass
class Skipped:
    """Records left out, counted by kind, with a few examples of each kind: place and detail."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, source: str, detail: str = "") -> None:
        """Count one record of this kind."""
        self.counts[kind] += 1
        named = self.examples.setdefault(kind, [])
        if len(named) < _EXAMPLES:
            named.append((f"{source}: {detail}" if detail else source)[:_EXAMPLE_LENGTH])

    def __add__(self, other: Skipped) -> Skipped:
        both = Skipped(self.counts + other.counts)
        for kind in both.counts:
            named = self.examples.get(kind, []) + other.examples.get(kind, [])
            both.examples[kind] = named[:_EXAMPLES]
        return both

    def by_count(self) -> dict[str, int]:
        """Return the counts, most frequent first."""
        return dict(self.counts.most_common())


@dataclass(frozen=True)
class Turn:
    """One turn. `answer_ids` are the target's own tokens where it wrote the answer, with the
    end-of-turn token exactly when `finished`. `tool_calls` are in the OpenAI form, arguments parsed."""

    role: str
    content: str
    answer_ids: tuple[int, ...] | None = None
    finished: bool = True
    reasoning: str | None = None
    tool_calls: tuple[Message, ...] = ()
    tool_name: str | None = None
    tool_call_id: str | None = None

    def message(self) -> Message:
        """Return what a chat template reads."""
        message: Message = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        if self.tool_name is not None:
            message["name"] = self.tool_name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    @property
    def is_empty(self) -> bool:
        """True when the turn says nothing and calls nothing."""
        return not self.content.strip() and not self.tool_calls


@dataclass(frozen=True)
class Conversation:
    """Turns ready for a template: starts with (system and) user; ends with assistant, or, where answers
    are still to be made, with user.

    `id` is a hash of what is said, so copies of one conversation share it whatever file or record id
    they came with, and a split by it never tears them apart. `tools` are the functions on offer; `category`
    is the record's own word for its kind, empty where it has none.
    """

    id: str
    turns: tuple[Turn, ...]
    source: str
    tokenizer_fingerprint: str | None = None
    repairs: tuple[str, ...] = ()
    tools: tuple[Message, ...] = ()
    record_id: str | int | None = None
    category: str = ""

    def messages(self) -> list[Message]:
        """Return all turns as a chat template reads them."""
        return [turn.message() for turn in self.turns]


@dataclass(frozen=True)
class TokenRow:
    """A record that came with its tokens. `spans` are [first, last], inclusive."""

    conversation_id: str
    input_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    source: str
    repairs: tuple[str, ...] = ()
    category: str = ""


def category_of(record: dict[str, Any]) -> str:
    """Return a record's ``category``, a text or a whole number, as a printable line of at most 80 characters.

    Runs of white space and of characters that do not print become one space; what is longer ends in an
    ellipsis. Empty where there is none; true, false, fractions, lists and objects are none.
    """
    category = record.get("category")
    if isinstance(category, bool) or not isinstance(category, (str, int)):
        return ""
    seen = "".join(letter if letter.isprintable() else " " for letter in _mended(str(category)))
    line = " ".join(seen.split())
    return line if len(line) <= _CATEGORY_LENGTH else line[: _CATEGORY_LENGTH - 1].rstrip() + "\u2026"


def valid_text(text: str, where: str) -> str:
    """Return `text`. Raises BadRecord, naming `where`, when it is no valid Unicode."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRecord(f"text is not valid Unicode (character {error.start} of {where})") from error
    return text


def place_of(source: str, record_id: Any) -> str:
    """Return where a record stands, with its own id where it has one."""
    if not isinstance(record_id, (str, int)) or record_id == "":
        return source
    return _mended(f"{source}:{record_id}")


def _mended(text: str) -> str:
    """Return `text` with a question mark for what is no Unicode: a mere name makes no record bad."""
    return text.encode("utf-8", "replace").decode("utf-8")
