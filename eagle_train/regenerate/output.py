"""The output: one line a conversation in the order of the input, and beside it a report."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from eagle_train.errors import UserError
from eagle_train.io.text import read_json, write_json
from eagle_train.io.whole_file import replacing
from eagle_train.progress import counted
from eagle_train.regenerate.answers import Answer, Asked
from eagle_train.regenerate.work import Work, folder_of, reading, refuse_other

_FAILURES_LISTED = 1000


def report_of(out: Path) -> Path:
    """Return where the report of an output lies."""
    return out.with_name(out.name + ".report.json")


def finished_report(out: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return the report of the same output where it is there without a failure, else None.

    Raises UserError when `out` holds something else.
    """
    if not out.exists():
        return None
    if not report_of(out).is_file():
        raise UserError(f"{out}: exists and was not made by eagle regenerate; give another --out")
    report = read_report(out, f"remove {out}")
    refuse_other(report_of(out), report, identity)
    return None if report["failed"] else report


def read_report(out: Path, advice: str) -> dict[str, Any]:
    """Return the report beside `out`, which `lines_of` can show. Raises UserError for anything else."""
    with reading(report_of(out), advice):
        report = read_json(report_of(out), advice)
        list(lines_of(report))
    return report


def is_complete(asked: list[Asked], work: Work) -> bool:
    """True when every answer is there or has failed."""
    for conversation in asked:
        answers = work.answers(conversation)
        if work.wanted(conversation, answers) and (conversation.row_id, len(answers)) not in work.failed:
            return False
    return True


def write_output(
    out: Path, asked: list[Asked], work: Work, identity: dict[str, Any], read: dict[str, Any]
) -> dict[str, Any]:
    """Write `out` and its report, whole; return the report. `read` says what reading the input met.

    A conversation ends before an answer that failed or says nothing; without any answer it is left out.
    Raises UserError, and writes nothing, where no answer is left at all.
    """
    counts = {"conversations": 0, "answers": 0, "unfinished": 0, "empty": 0, "answer_tokens": 0}
    failures = []
    with replacing(out) as temporary, _opened(temporary, out) as file:
        for conversation in asked:
            answers = work.answers(conversation)
            key = (conversation.row_id, len(answers))
            if work.wanted(conversation, answers) and key in work.failed:
                failures.append(_failure(conversation, len(answers), work.failed[key]))
            said = [answer for answer in answers if not answer.is_empty]
            counts["empty"] += len(answers) - len(said)
            if not said:
                continue
            counts["conversations"] += 1
            counts["answers"] += len(said)
            counts["unfinished"] += sum(not answer.finished for answer in said)
            counts["answer_tokens"] += sum(len(answer.answer_ids or ()) for answer in said)
            line = _line(conversation, said, identity["generated_by"])
            file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        if not counts["answers"]:
            raise UserError(_nothing_made(out, counts["empty"], failures))
    report = {
        **identity,
        "read": read,
        **counts,
        "failed": len(failures),
        "failures": failures[:_FAILURES_LISTED],
    }
    write_json(report_of(out), report)
    return report


def _nothing_made(out: Path, empty: int, failures: list[dict[str, Any]]) -> str:
    if not failures:
        return f"{out}: not written: all {empty:,} answers are empty; remove {folder_of(out)} to ask again"
    first = failures[0]
    return (
        f"{out}: not written: no answer was made, {len(failures):,} failed, {empty:,} are empty; the first, "
        f"{first['source']}, turn {first['turn']}: {first['reason']}. Mend the cause and give the same "
        "command again"
    )


def _failure(asked: Asked, turn: int, reason: str) -> dict[str, Any]:
    return {"row_id": asked.row_id, "source": asked.conversation.source, "turn": turn + 1, "reason": reason}


def _line(asked: Asked, answers: list[Answer], made_by: dict[str, Any]) -> dict[str, Any]:
    conversation = asked.conversation
    records = [answer.record() for answer in answers]
    messages = [*asked.messages(len(answers) - 1, records), records[-1]]
    named = {} if conversation.record_id is None else {"id": conversation.record_id}
    named |= {"category": conversation.category} if conversation.category else {}
    tools = {"tools": list(conversation.tools)} if conversation.tools else {}
    return {**named, "row_id": asked.row_id, "messages": messages, **tools, "generated_by": made_by}


@contextmanager
def _opened(path: Path, name: Path) -> Iterator[BinaryIO]:
    """Open a file to write to, compressed where the name it will have ends in ``.gz``."""
    with open(path, "wb") as raw:
        if not name.name.lower().endswith(".gz"):
            yield raw
            return
        # Without a name and a time the bytes depend on the content alone.
        with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
            yield cast(BinaryIO, packed)


def lines_of(report: dict[str, Any]) -> Iterator[str]:
    """Yield what a user reads of a report."""
    cut = f" ({report['unfinished']:,} cut by the token limit)" if report["unfinished"] else ""
    tokens = f", {report['answer_tokens']:,} answer tokens" if report["answer_tokens"] else ""
    answers = f"{counted(report['answers'], 'answer')}{cut}{tokens}"
    yield f"{counted(report['conversations'], 'conversation')}, {answers}"
    read = report["read"]
    for reason, count in read["skipped"].items():
        yield f"  skipped {count:>8,}  {reason} (first {read['skipped_examples'][reason][0]})"
    if read["bad"]:
        yield f"  damaged {read['bad']:>8,}  records; the first at {read['bad_records'][0]['place']}"
    if report["empty"]:
        yield f"  empty   {report['empty']:>8,}  answers: their conversations end before them"
    if report["failed"]:
        yield f"  failed  {report['failed']:>8,}  answers; the same command again tries them again"
    for failure in report["failures"][:10]:
        yield f"  failed  {failure['source']}, turn {failure['turn']}: {failure['reason']}"
