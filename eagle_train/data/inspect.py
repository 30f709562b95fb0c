"""One prepared row for people: its text with the supervised tokens marked, and the counts of all rows."""

from __future__ import annotations

from typing import Any

from eagle_train.data.rows import Rows
from eagle_train.data.tokenizer import load_tokenizer
from eagle_train.errors import UserError
from eagle_train.progress import counted
from eagle_train.provenance import tokenizer_fingerprint


def describe_row(
    rows: Rows, number: int, target: str | None = None, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Return row `number` with its `segments` (text, supervised or not) and `token_texts`.

    The tokenizer is that of `target`, by default the one the rows were made with. Raises UserError for a
    number out of range and for another tokenizer.
    """
    if not 0 <= number < len(rows):
        raise UserError(f"{rows.path}: no row {number}; wanted 0 to {len(rows) - 1}")
    tokenizer = load_tokenizer(target or rows.info["target"], trust_remote_code)
    found, wanted = tokenizer_fingerprint(tokenizer), rows.info["tokenizer_fingerprint"]
    if found != wanted:
        raise UserError(
            f"{rows.path}: made with tokenizer {wanted}, but {target or rows.info['target']} now has "
            f"{found}; give the right one with --target"
        )
    row = dict(rows.dataset[number])
    row["segments"] = _segments(tokenizer, row["input_ids"], row["spans"])
    row["token_texts"] = [_text(tokenizer, [token]) for token in row["input_ids"]]
    return row


def _segments(tokenizer: Any, ids: list[int], spans: list[list[int]]) -> list[dict[str, Any]]:
    """Cut the row at its spans; two adjacent answers stay two segments."""
    segments, done = [], 0
    for first, last in spans:
        if first > done:
            segments.append({"supervised": False, "text": _text(tokenizer, ids[done:first])})
        segments.append({"supervised": True, "text": _text(tokenizer, ids[first : last + 1])})
        done = last + 1
    if done < len(ids):
        segments.append({"supervised": False, "text": _text(tokenizer, ids[done:])})
    return segments


def _text(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def answers_at(spans: list[list[int]]) -> str:
    """Say where the answers lie, such as ``answers at tokens 38 to 69, 80 to 90 (from 0, both included)``."""
    if not spans:
        return "no answers"
    places = ", ".join(f"{first} to {last}" for first, last in spans)
    return f"answers at tokens {places} (from 0, both included)"


def bracketed(segments: list[dict[str, Any]]) -> str:
    """Return the text with supervised parts between ⟦ and ⟧."""
    return "".join(f"⟦{part['text']}⟧" if part["supervised"] else part["text"] for part in segments)


def print_coloured(segments: list[dict[str, Any]]) -> None:
    """Print the text to the terminal, supervised parts bold green, the rest dim."""
    from rich.console import Console
    from rich.text import Text

    shown = Text()
    for part in segments:
        shown.append(part["text"], style="bold green" if part["supervised"] else "dim")
    Console(highlight=False).print(shown, soft_wrap=True)


def shown(info: dict[str, Any]) -> dict[str, Any]:
    """Return ``rows.json`` without what is too long for a screen."""
    return {name: value for name, value in info.items() if name != "supervised_frequencies"}


def count_lines(info: dict[str, Any]) -> list[str]:
    """Return the counts of a rows folder by reason, one short line each."""
    counts = info["counts"]
    examples = info.get("skipped_examples", {})
    lines = [
        f"{counted(info['rows'], 'row')}, {counted(info['tokens'], 'token')}, "
        f"{info['supervised_tokens']:,} supervised",
        f"conversations: {counts['read']:,} read, {counts['kept']:,} kept, "
        f"{sum(counts['skipped'].values()):,} skipped; damaged records: {counts['bad']:,}",
    ]
    if categories := info.get("categories"):
        each = ", ".join(f"{name or 'none'} {count:,}" for name, count in categories.items())
        lines.append(f"rows by category: {each}")
    for reason, count in counts["skipped"].items():
        named = f" (first {examples[reason][0]})" if examples.get(reason) else ""
        lines.append(f"  skipped {count:>8,}  {reason}{named}")
    lines += [f"  repaired{count:>8,}  {reason}" for reason, count in counts["repaired"].items()]
    lines += [
        f"  cut     {count:>8,}  {name.replace('_', ' ')}"
        for name, count in counts["truncated"].items()
        if count
    ]
    if counts["copies"]:
        what = "dropped" if info.get("drop_duplicates") else "kept"
        lines.append(f"  note    {counts['copies']:>8,}  rows equal an earlier one ({what})")
    if counts.get("left_out") or counts.get("repeated"):
        lines.append(
            f"  note    {counts['left_out']:>8,}  records left out and {counts['repeated']:,} taken again, "
            "by their source's weight"
        )
    if info.get("last_turn_only"):
        lines.append("  note: only the last answer of each conversation is supervised")
    if info["end_of_turn"] is None and info["chat_template"] != "none":
        lines.append(
            "  note: the template closes answers with no token of its own; no end of turn is supervised"
        )
    lines += [f"  damaged  {bad['place']}: {bad['damage']}" for bad in info["bad_records"][:10]]
    if counts["bad"] > 10:
        lines.append(f"  damaged  and {counts['bad'] - 10:,} more; rows.json names the first 1,000")
    return lines
