"""One record of any file becomes one conversation, is repaired, or is skipped with a reason.

The rules, one each; every repair and every skip is counted by its kind:

- Role names in the wild are read as user, assistant, system or tool; any other role skips the record.
- A list of text parts is joined by newlines, as serving engines do; a part that is no text skips it.
- A record's ``system`` field and system turns become system turns; equal ones appear once.
- Answers and tool turns before the first user turn are dropped: nothing prompted them.
- An empty or null turn ends the conversation before it; an empty system turn is as good as none.
- Two user, two assistant or two system turns in a row are joined by a blank line.
- What follows the last answer is dropped; without any answer the record is skipped.
- Text that is no valid Unicode (lone surrogates, broken UTF-8) makes a *bad* record, named by its place.

Where answers are to be made anew, all of this holds but for the answers: those there are left out, the
last prompt needs none, and what follows a tool turn is dropped, since a new answer need not call it.
"""

from __future__ import annotations

from typing import Any

from eagle_train.data.records import Conversation, Message, Skip, TokenRow, Turn, category_of, place_of
from eagle_train.data.token_rows import read_token_row
from eagle_train.data.turn_order import cut_to_prompt_and_answer, cut_to_prompts
from eagle_train.data.turns import SYSTEM_FIELDS, TURN_LISTS, Notes, read_tools, read_turns
from eagle_train.io.checksums import sha256_json

_TOKEN_FIELDS = ("input_ids", "loss_mask", "spans", "conversation_id", "row_id", "source")
_QUESTIONS = "turns"  # MT-bench's form: user turns as plain texts

RECORD_FIELDS = (
    *("id", "category", "generated_by", "tools", _QUESTIONS),
    *(*TURN_LISTS, *SYSTEM_FIELDS, *_TOKEN_FIELDS),
)
"""Every top-level field that is looked at; columns of other names are never read."""


def read_record(record: Any, source: str) -> Conversation | TokenRow:
    """Return the conversation (or token row) of one record; `source` names its place.

    Raises Skip with the reason, or BadRecord for damaged text.
    """
    if isinstance(record, dict) and record.get("input_ids") is not None:
        return read_token_row(record, source)
    notes: Notes = {}
    turns = cut_to_prompt_and_answer(read_turns(record, notes), notes)
    return _conversation(record, source, turns, notes)


def read_prompts(record: Any, source: str) -> Conversation:
    """Return the conversation of one record without its answers: system and user turns alone.

    Also reads a record whose ``turns`` are the user's texts. Raises Skip and BadRecord as `read_record`.
    """
    if isinstance(record, dict) and record.get("input_ids") is not None:
        raise Skip("tokens instead of a conversation")
    texts = record.get(_QUESTIONS) if isinstance(record, dict) else None
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        asked = [[{"role": "user", "content": text}, {"role": "assistant", "content": ""}] for text in texts]
        record = {**record, "messages": [turn for pair in asked for turn in pair]}
    notes: Notes = {}
    turns = cut_to_prompts(read_turns(record, notes), notes)
    return _conversation(record, source, turns, notes)


def _conversation(record: Any, source: str, turns: list[Turn], notes: Notes) -> Conversation:
    fields = record if isinstance(record, dict) else {}
    made_by = fields.get("generated_by")
    fingerprint = made_by.get("tokenizer_fingerprint") if isinstance(made_by, dict) else None
    record_id = fields.get("id")
    tools = read_tools(fields.get("tools"))
    return Conversation(
        id=_hash(turns, tools),
        turns=tuple(turns),
        source=place_of(source, record_id),
        tokenizer_fingerprint=fingerprint if isinstance(fingerprint, str) else None,
        repairs=tuple(notes),
        tools=tuple(tools),
        record_id=record_id if isinstance(record_id, (str, int)) else None,
        category=category_of(fields),
    )


def _hash(turns: list[Turn], tools: list[Message]) -> str:
    said: list[Any] = [
        [turn.role, turn.content, turn.reasoning, *([list(turn.tool_calls)] if turn.tool_calls else [])]
        for turn in turns
    ]
    return sha256_json([*said, {"tools": tools}] if tools else said)[:16]
