"""Batches of conversations to batches of rows, in this process or in several, always in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from eagle_train.data.mask import EncodedRow, Encoder, cut
from eagle_train.data.records import Conversation, Skip, TokenRow
from eagle_train.data.templates import ChatTemplate
from eagle_train.errors import UserError
from eagle_train.parent import end_with

_BATCH = 64
_SMALL = 256  # fewer conversations than this are not worth starting processes for

TOO_LONG = "prompt longer than max length"


@dataclass(frozen=True)
class Outcome:
    """What became of one conversation: its rows, or why it has none (`skipped`, a kind, and `detail`)."""

    conversation_id: str
    source: str
    rows: list[EncodedRow]
    repairs: tuple[str, ...] = ()
    skipped: str | None = None
    detail: str = ""
    rows_cut: int = 0
    rows_lost: int = 0
    answers_cut: int = 0
    answers_shortened: int = 0
    tokens_cut: int = 0
    category: str = ""


@dataclass(frozen=True)
class EncoderSpec:
    """All that makes an encoder; it travels to worker processes."""

    tokenizer: Any
    template: ChatTemplate
    max_length: int
    last_turn_only: bool = False


def encode(
    found: Conversation | TokenRow,
    encoder: Encoder,
    vocabulary: int,
    max_length: int,
    last_turn_only: bool = False,
) -> Outcome:
    """Return the rows of one conversation, cut to `max_length`, or why there are none.

    With `last_turn_only` one row, of which the last answer alone is supervised.
    """
    label = found.conversation_id if isinstance(found, TokenRow) else found.id
    repairs = list(found.repairs)
    try:
        if isinstance(found, TokenRow):
            if max(found.input_ids) >= vocabulary:
                raise Skip("a token id outside the tokenizer's vocabulary")
            whole = [EncodedRow(list(found.input_ids), list(found.spans))]
        else:
            given, found = found, encoder.with_true_ids(found)
            whole = encoder.rows(found)
            if found is not given:
                repairs.append("answer ids that are not tokens of the answer: text tokenised again")
            if any(turn.answer_ids for turn in found.turns) and not encoder.uses_ids_of(found):
                repairs.append("answer ids of another tokenizer: text tokenised again")
            if len(whole) > 1:
                repairs.append("earlier answers read otherwise in later prompts: one row per answer")
            if found.tools and not encoder.shows_tools(found):
                repairs.append("tools that the chat template does not show")
    except Skip as reason:
        return Outcome(label, found.source, [], skipped=reason.kind, detail=reason.detail)
    if last_turn_only:
        whole = [EncodedRow(whole[-1].input_ids, whole[-1].spans[-1:])]
    rows, rows_cut, gone, shortened, tokens = [], 0, 0, 0, 0
    for row in whole:
        kept, lost = cut(row, max_length)
        rows_cut += bool(lost)
        gone += len(row.spans) - len(kept.spans)
        shortened += len(lost) - (len(row.spans) - len(kept.spans))
        tokens += len(row.input_ids) - len(kept.input_ids)
        if kept.spans:
            rows.append(kept)
    if not rows:
        return Outcome(label, found.source, [], skipped=TOO_LONG)
    rows_lost = len(whole) - len(rows)
    return Outcome(
        label,
        found.source,
        rows,
        tuple(repairs),
        rows_cut=rows_cut,
        rows_lost=rows_lost,
        answers_cut=gone,
        answers_shortened=shortened,
        tokens_cut=tokens,
        category=found.category,
    )


def encode_all(
    conversations: Iterable[Conversation | TokenRow], spec: EncoderSpec, processes: int
) -> Iterator[Outcome]:
    """Yield the outcome of every conversation, in order. The result does not depend on `processes`."""
    source = iter(conversations)
    first = list(islice(source, _SMALL)) if processes > 1 else []
    if processes <= 1 or len(first) < _SMALL:
        _start_encoder(spec)
        for found in chain(first, source):
            yield from _encode_batch([found])
        return
    yield from _in_processes(chain(first, source), spec, processes)


def _in_processes(
    source: Iterator[Conversation | TokenRow], spec: EncoderSpec, processes: int
) -> Iterator[Outcome]:
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(processes, context, _start_worker, (spec, os.getpid()))
    waiting: deque[Future[list[Outcome]]] = deque()
    try:
        while batch := list(islice(source, _BATCH)):
            with _held_back():  # it may fork
                waiting.append(pool.submit(_encode_batch, batch))
            if len(waiting) > 2 * processes:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        _release(pool)
        raise UserError(
            f"one of the {processes} worker processes died (out of memory?); use fewer with --num-proc"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_encoder: tuple[Encoder, int, int, bool] | None = None  # of this process, set once before its first batch


def _start_encoder(spec: EncoderSpec) -> None:
    global _encoder
    encoder = Encoder(spec.tokenizer, spec.template)
    _encoder = (encoder, len(spec.tokenizer), spec.max_length, spec.last_turn_only)


def _release(pool: ProcessPoolExecutor) -> None:
    """Let a broken pool end: before Python 3.11.5 it may for ever feed the dead (CPython gh-94777)."""
    manager: Any = pool._executor_manager_thread
    if manager is not None and sys.version_info < (3, 11, 5):
        manager.join(5)
        if manager.is_alive():  # it does not end by itself, so nobody else closes this
            pool._call_queue._reader.close()  # type: ignore[attr-defined]


_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def _held_back() -> Iterator[None]:
    """Let interrupts wait: what a handler raises amid a fork, in a callback of it, Python drops."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows, which does not fork
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(spec: EncoderSpec, parent: int) -> None:
    """Leave Ctrl-C to the parent, die with it, and keep to one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    end_with(parent)
    _start_encoder(spec)


def _encode_batch(batch: list[Conversation | TokenRow]) -> list[Outcome]:
    assert _encoder is not None
    return [encode(found, *_encoder) for found in batch]
