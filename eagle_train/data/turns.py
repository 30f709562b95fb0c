"""A record's turns as they stand: where they are listed, who speaks, what is said, thought and called."""

from __future__ import annotations

import json
from typing import Any

from eagle_train.data.records import Message, Skip, Turn, valid_text
from eagle_train.data.token_rows import are_ids

ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "ai"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
TURN_LISTS = ("conversations", "messages", "conversation", "dialogue", "dialog")
SYSTEM_FIELDS = ("system", "system_prompt")
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

Notes = dict[str, None]
"""Repairs made to a record, each once, in order."""


def read_turns(record: Any, notes: Notes) -> list[Turn]:
    """Return all turns of a record in their order, its system text first. Raises Skip and BadRecord."""
    listed = _listed_turns(record)
    return _system_first(
        record if isinstance(record, dict) else {}, [_turn(item, notes) for item in listed], notes
    )


def _listed_turns(record: Any) -> list[Any]:
    if isinstance(record, list):
        found: Any = record
    elif isinstance(record, dict):
        present = [key for key in TURN_LISTS if key in record]
        if not present:
            raise Skip("no conversation in the record")
        found = next((record[key] for key in present if record[key] is not None), None)
    else:
        raise Skip("the record is not an object")
    found = _parsed(found, "[", "the conversation is not a list of turns")
    if found is None or found == [] or found == "":
        raise Skip("empty conversation")
    if not isinstance(found, list):
        raise Skip("the conversation is not a list of turns")
    return found


def _parsed(value: Any, opens_with: str, reason: str) -> Any:
    """Open a value that was stored as JSON text."""
    if not isinstance(value, str) or not value.lstrip().startswith(opens_with):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Skip(reason) from error


def _turn(item: Any, notes: Notes) -> Turn:
    if not isinstance(item, dict):
        raise Skip("a turn is not an object")
    named = next((item[key] for key in ("role", "from") if item.get(key) is not None), None)
    if not isinstance(named, str):
        raise Skip("a turn without a role")
    role = ROLES.get(valid_text(named, "a role").strip().lower())
    if role is None:
        raise Skip("unknown role", repr(named[:40]))
    raw = next((item[key] for key in ("content", "value", "text") if item.get(key) is not None), None)
    reasoning = next((item[key] for key in _REASONING_FIELDS if item.get(key)), None)
    ids = item.get("answer_ids")
    if ids is not None and not are_ids(ids):
        raise Skip("answer_ids is not a list of token ids")
    if role == "tool" and named.strip().lower() != "tool":
        notes[f"role {named.strip().lower()} read as tool"] = None
    answers, tool = role == "assistant", role == "tool"
    return Turn(
        role=role,
        content=valid_text(_text(raw, notes), "a turn"),
        answer_ids=tuple(ids) if ids and answers else None,
        finished=item.get("finished") is not False,
        reasoning=valid_text(reasoning, "a thought") if isinstance(reasoning, str) and answers else None,
        tool_calls=tuple(_tool_calls(item.get("tool_calls"))) if answers else (),
        tool_name=item["name"] if tool and isinstance(item.get("name"), str) else None,
        tool_call_id=item["tool_call_id"] if tool and isinstance(item.get("tool_call_id"), str) else None,
    )


def _text(raw: Any, notes: Notes) -> str:
    if raw is None:
        return ""
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise Skip("the text of a turn is not a string")
    parts = []
    for part in raw:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise Skip("a part of a turn is not text")
        parts.append(text)
    notes["text parts joined"] = None
    return "\n".join(parts)


def _tool_calls(raw: Any) -> list[Message]:
    """Return calls as ``{"type": "function", "function": {"name", "arguments"}}``, arguments an object."""
    reason = "tool_calls is not a list of calls of functions"
    calls = _parsed(raw, "[", reason)
    if not calls:
        return []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Skip(reason)
    made = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Skip(reason)
        arguments = _parsed(function.get("arguments") or {}, "{", reason)
        kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        called = {"name": function["name"], "arguments": arguments}
        made.append({**kept, "type": "function", "function": called})
    valid_text(json.dumps(made, ensure_ascii=False), "a tool call")
    return made


def read_tools(raw: Any) -> list[Message]:
    """Return the functions on offer, from a list or its JSON text. Raises Skip and BadRecord."""
    tools = _parsed(raw, "[", "tools is not a list of functions")
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Skip("tools is not a list of functions")
    valid_text(json.dumps(tools, ensure_ascii=False), "tools")
    return tools


def _system_first(fields: dict[str, Any], turns: list[Turn], notes: Notes) -> list[Turn]:
    """Put the record's system text before the turns, unless a system turn says the same."""
    text = next((fields[key] for key in SYSTEM_FIELDS if fields.get(key)), None)
    if text is not None and not isinstance(text, str):
        raise Skip("the system text is not a string")
    kept = [turn for turn in turns if turn.role != "system" or turn.content.strip()]
    if len(kept) < len(turns):
        notes["empty system turn dropped"] = None
    if not text or not text.strip():
        return kept
    if any(turn.role == "system" and turn.content.strip() == text.strip() for turn in kept):
        return kept
    return [Turn("system", valid_text(text, "the system text")), *kept]
