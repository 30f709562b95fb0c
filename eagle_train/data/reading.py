"""Reading conversations out of sources, counting what is skipped and naming what is damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from eagle_train.data.conversations import read_record
from eagle_train.data.json_stream import Damaged
from eagle_train.data.records import BadRecord, Conversation, Skip, Skipped, TokenRow
from eagle_train.data.sources import Source
from eagle_train.errors import UserError

_BAD_LISTED = 1000

Found = TypeVar("Found")


@dataclass
class Tally:
    """What reading met. `read` counts whole records: those handed on and those `skipped`, by kind.

    `num_bad` counts the damaged ones, which are no records; `bad` holds the first of them, place and damage.
    `left_out` counts records that their source's weight passed over, `repeated` those it handed on again.
    """

    read: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    num_bad: int = 0
    bad: list[dict[str, str]] = field(default_factory=list)
    left_out: int = 0
    repeated: int = 0


def read_sources(
    sources: list[Source],
    tally: Tally,
    skip_bad: bool = False,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[Conversation | TokenRow]:
    """Yield what `sources` hold, in order, each record as often as its source's weight says.

    Counts into `tally`. `advance` is told how much of `Source.size` was read since the last call. Raises
    UserError at the first damaged record unless `skip_bad`.
    """
    return read_with(read_record, sources, tally, skip_bad, advance)


def read_with(
    reader: Callable[[Any, str], Found],
    sources: list[Source],
    tally: Tally,
    skip_bad: bool = False,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[Found]:
    """Do the same with any reader of one record: (value, its place) to what is yielded."""
    for source in sources:
        done = 0
        for entry in source.entries():
            advance(entry.read - done)
            done = entry.read
            times = copies(entry.number, source.weight)
            if not times and not isinstance(entry.value, Damaged):
                tally.left_out += 1
                continue
            place = f"{source.name}#{entry.number}"
            try:
                if isinstance(entry.value, Damaged):
                    raise BadRecord(entry.value.what)
                found = reader(entry.value, place)
            except Skip as reason:
                tally.read += 1
                tally.skipped.add(reason.kind, place, reason.detail)
                continue
            except BadRecord as damage:
                if not skip_bad:
                    raise UserError(
                        f"{source.place(entry)}: {damage}; repair the file, or keep its good records "
                        "with --skip-bad"
                    ) from damage
                tally.num_bad += 1
                if len(tally.bad) < _BAD_LISTED:
                    tally.bad.append({"place": source.place(entry), "damage": str(damage)})
                continue
            tally.read += 1
            tally.repeated += times - 1
            for _ in range(times):
                yield found
        advance(source.size - done)


_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio
_ALL = 1 << 64


def copies(number: int, weight: float) -> int:
    """Return how often record `number` of a source of this weight is taken.

    Multiples of the golden ratio spread evenly over the unit interval, whatever stretch of records is
    looked at: of any n records about n * weight are taken, and no period in the file can be hit or missed.
    """
    whole = int(weight)
    return whole + (number * _GOLDEN % _ALL < (weight - whole) * _ALL)
