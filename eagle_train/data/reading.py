"""Reading conversations out of sources, counting what is skipped and naming what is damaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from eagle_train.data.conversations import BadRecord, Conversation, Skip, TokenRow, read_record
from eagle_train.data.json_stream import Damaged
from eagle_train.data.sources import Source, find_sources
from eagle_train.errors import UserError


@dataclass
class Tally:
    """What reading met. `read` counts whole records: those handed on and those `skipped`, by reason.

    `bad` holds the damaged ones, which are no records: place and damage.
    """

    read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    bad: list[dict[str, str]] = field(default_factory=list)


def read_sources(
    sources: list[Source],
    tally: Tally,
    skip_bad: bool = False,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[Conversation | TokenRow]:
    """Yield what `sources` hold, in order, counting into `tally`.

    `advance` is told how much of `Source.size` was read since the last call. Raises UserError at the
    first damaged record unless `skip_bad`.
    """
    for source in sources:
        done = 0
        for entry in source.entries():
            advance(entry.read - done)
            done = entry.read
            try:
                if isinstance(entry.value, Damaged):
                    raise BadRecord(entry.value.what)
                found = read_record(entry.value, f"{source.name}#{entry.number}")
            except Skip as reason:
                tally.read += 1
                tally.skipped[str(reason)] += 1
                continue
            except BadRecord as damage:
                if not skip_bad:
                    raise UserError(
                        f"{source.place(entry)}: {damage}; repair the file, or keep its good records "
                        "with --skip-bad"
                    ) from damage
                tally.bad.append({"place": source.place(entry), "damage": str(damage)})
                continue
            tally.read += 1
            yield found
        advance(source.size - done)


def read_conversations(data: list[str], skip_bad: bool = False) -> Iterator[Conversation]:
    """Yield the conversations of files, folders, globs or hub datasets; see `read_record` for the rules.

    Token rows are passed over. Raises UserError for missing or damaged input.
    """
    for found in read_sources(find_sources(data), Tally(), skip_bad):
        if isinstance(found, Conversation):
            yield found
