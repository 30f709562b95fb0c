"""``eagle prepare``: conversations to rows of tokens with a loss mask, in one process of its own stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_train.data.encoding import EncoderSpec, Outcome, encode_all
from eagle_train.data.mask import Encoder
from eagle_train.data.reading import Tally, read_sources
from eagle_train.data.records import Skipped, TokenRow
from eagle_train.data.rows import FORMAT_VERSION, RowsWritten, read_rows_info, write_dataset
from eagle_train.data.sources import Source, find_sources, refuse_missing
from eagle_train.data.templates import Arguments, ChatTemplate, load_template
from eagle_train.data.tokenizer import load_tokenizer
from eagle_train.distributed import num_cores, world_size
from eagle_train.errors import UserError
from eagle_train.io.text import write_json
from eagle_train.io.whole_folder import replacing_folder
from eagle_train.progress import counted, progress
from eagle_train.provenance import tokenizer_fingerprint, tool_version

_UNSTATED = {"template_arguments": {}, "last_turn_only": False, "drop_duplicates": False}


def prepare(
    sources: list[str],
    target: str,
    out: str | Path,
    *,
    chat_template: str | None = None,
    template_arguments: Arguments | None = None,
    max_length: int = 2048,
    last_turn_only: bool = False,
    drop_duplicates: bool = False,
    skip_bad: bool = False,
    num_proc: int | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    show: bool = True,
) -> dict[str, Any]:
    """Make the rows folder `out` from conversations; return its ``rows.json`` as a dict.

    `sources` are files, folders, globs or hub datasets, with ``=0.5`` behind them for a weight in a mixture;
    `target` a hub id, directory or .gguf file whose tokenizer is used; `chat_template` None for the
    tokenizer's own, ``vicuna``, ``llama-2`` or a file, rendered with `template_arguments`; `max_length` in
    tokens, cut on the right. `last_turn_only` supervises the last answer of each conversation alone;
    `drop_duplicates` leaves out rows equal to an earlier one. When `out` already holds the rows of the same
    input and settings, nothing is done and the dict has ``"reused": True``.

    Raises UserError for anything the user must change, and when no row is left.
    """
    if world_size() > 1:
        raise UserError("eagle prepare runs as one process; start it without torchrun")
    if max_length < 2:
        raise UserError(f"--max-length {max_length}: wanted 2 or more tokens")
    folder = Path(out)
    refuse_missing(sources)
    tokenizer = load_tokenizer(target, trust_remote_code)
    inputs = find_sources(sources)
    _refuse_lost_weights(inputs, drop_duplicates)
    template = _template(tokenizer, chat_template, template_arguments, inputs)
    key = {
        "inputs": [source.identity for source in inputs],
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "template_fingerprint": template.fingerprint,
        "template_arguments": template.arguments,
        "max_length": max_length,
        "last_turn_only": last_turn_only,
        "drop_duplicates": drop_duplicates,
    }
    _same_tokenizer(inputs, key["tokenizer_fingerprint"], target)
    earlier = _already_there(folder, key, skip_bad, overwrite)
    if earlier is not None:
        return {**earlier, "reused": True}
    spec = EncoderSpec(tokenizer, template, max_length, last_turn_only)
    end = Encoder(tokenizer, template).end_of_turn if template.name != "none" else None
    import datasets  # noqa: F401  # slow to load: before the progress starts

    tally, counts = Tally(), _Counts()
    with replacing_folder(folder) as temporary:
        with progress("prepare", sum(_kilo(source.size) for source in inputs), "kB", show) as bar:
            found = read_sources(inputs, tally, skip_bad, _in_kilos(bar.advance))
            outcomes = encode_all(found, spec, num_proc or num_cores())
            written = write_dataset(temporary, counts.passing(outcomes), drop_duplicates)
        summary = {
            "format_version": FORMAT_VERSION,
            "target": str(Path(target).resolve()) if Path(target).exists() else target,
            "chat_template": template.name,
            **key,
            "end_of_turn": {"id": end[0], "text": end[1]} if end else None,
            **_figures(written, tally, counts),
            "tool_version": tool_version(),
        }
        if not written.rows:
            raise UserError(_nothing_left(summary["counts"]))
        write_json(temporary / "rows.json", summary)
    return {**summary, "reused": False}


@dataclass
class _Counts:
    """Sums over outcomes as they pass."""

    kept: int = 0
    repaired: Counter[str] = field(default_factory=Counter)
    skipped: Skipped = field(default_factory=Skipped)
    truncated: Counter[str] = field(default_factory=Counter)

    def passing(self, outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
        for outcome in outcomes:
            if outcome.skipped is not None:
                self.skipped.add(outcome.skipped, outcome.source, outcome.detail)
                continue
            self.kept += 1
            self.repaired.update(outcome.repairs)
            self.truncated.update(
                rows=outcome.rows_cut,
                rows_left_without_answer=outcome.rows_lost,
                answers_dropped=outcome.answers_cut,
                answers_shortened=outcome.answers_shortened,
                tokens_cut=outcome.tokens_cut,
            )
            yield outcome


def _figures(written: RowsWritten, tally: Tally, counts: _Counts) -> dict[str, Any]:
    frequencies = sorted(written.frequencies.items())
    skipped = tally.skipped + counts.skipped
    return {
        "rows": written.rows,
        "tokens": written.tokens,
        "supervised_tokens": written.supervised_tokens,
        "rows_digest": written.digest,
        **({"categories": dict(written.categories.most_common())} if any(written.categories) else {}),
        "counts": {
            "read": tally.read,
            "kept": counts.kept - written.dropped,
            "repaired": dict(counts.repaired.most_common()),
            "skipped": skipped.by_count(),
            "truncated": dict(counts.truncated),
            "bad": tally.num_bad,
            "copies": written.copies,
            "copies_dropped": written.dropped,
            "left_out": tally.left_out,
            "repeated": tally.repeated,
        },
        "skipped_examples": skipped.examples,
        "bad_records": tally.bad,
        "supervised_frequencies": {str(token): count for token, count in frequencies},
    }


def _nothing_left(counts: dict[str, Any]) -> str:
    reasons = ", ".join(f"{reason}: {count}" for reason, count in counts["skipped"].items())
    if counts["bad"]:
        reasons = f"{reasons}, damaged: {counts['bad']}".lstrip(", ")
    read = counted(counts["read"], "conversation")
    wanted = "wanted records with messages or conversations and an answer in each"
    return f"no row is left of {read} ({reasons or 'the input is empty'}); {wanted}"


def _refuse_lost_weights(inputs: list[Source], drop_duplicates: bool) -> None:
    repeated = next((source for source in inputs if source.weight > 1), None)
    if drop_duplicates and repeated is not None:
        raise UserError(
            f"{repeated.name}: a weight of {repeated.weight:g} repeats records, and --drop-duplicates drops "
            "them again; give one of the two"
        )


def _template(
    tokenizer: Any, chat_template: str | None, arguments: Arguments | None, inputs: list[Source]
) -> ChatTemplate:
    """Load the template; input that came as tokens needs none, and then there may be none."""
    try:
        return load_template(tokenizer, chat_template, arguments)
    except UserError:
        first = next(read_sources(inputs, Tally(), skip_bad=True), None)
        if chat_template is not None or not isinstance(first, TokenRow):
            raise
        return ChatTemplate("{{ raise_exception('the tokenizer has no chat template') }}", "none", {})


def _same_tokenizer(inputs: list[Source], fingerprint: Any, target: str) -> None:
    for source in inputs:
        if source.tokenizer_fingerprint not in (None, fingerprint):
            raise UserError(
                f"{source.name}: its tokens are of tokenizer {source.tokenizer_fingerprint}, {target} has "
                f"{fingerprint}; prepare the conversations themselves again"
            )


def _already_there(
    folder: Path, key: dict[str, Any], skip_bad: bool, overwrite: bool
) -> dict[str, Any] | None:
    """Return the summary of equal rows in `folder`, None when it is free; raise UserError otherwise."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not (folder / "rows.json").is_file():
        raise UserError(f"{folder}: exists and holds no prepared rows; give another --out")
    if overwrite:
        return None
    info = read_rows_info(folder)
    there = {**_UNSTATED, **info}
    differing = [
        _difference(name, there.get(name), wanted)
        for name, wanted in key.items()
        if there.get(name) != wanted
    ]
    if info["counts"]["bad"] and not skip_bad:
        differing.append("it was made with --skip-bad")
    if differing:
        raise UserError(
            f"{folder}: holds rows made otherwise: {'; '.join(differing)}; give another --out, or --overwrite"
        )
    return info


def _difference(name: str, there: Any, wanted: Any) -> str:
    if name == "inputs":
        return (
            "the input files differ (" + ", ".join(str(item.get("name")) for item in there or []) + " there)"
        )
    return f"{name} {there} there, {wanted} now"


def _kilo(size: int) -> int:
    return size // 1000


def _in_kilos(advance: Any) -> Any:
    """Pass whole kilobytes on, keeping the rest."""
    rest = 0

    def add(count: int) -> None:
        nonlocal rest
        kilos, rest = divmod(rest + count, 1000)
        if kilos:
            advance(kilos)

    return add
