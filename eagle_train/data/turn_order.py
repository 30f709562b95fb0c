"""Turns in the order that a chat template wants: a prompt first, nothing empty, no role twice in a row."""

from __future__ import annotations

from dataclasses import replace

from eagle_train.data.records import Skip, Turn
from eagle_train.data.turns import Notes


def _from_first_prompt(turns: list[Turn], missing: str, notes: Notes) -> list[Turn]:
    """Drop what stands before the first user turn, system turns excepted."""
    if not turns or all(turn.role == "system" for turn in turns):
        raise Skip("system turn only" if turns else "empty conversation")
    first = next((place for place, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        raise Skip(missing)
    lead = [turn for turn in turns[:first] if turn.role == "system"]
    if len(lead) < first:
        notes["answer before the first prompt dropped"] = None
    return lead + turns[first:]


def cut_to_prompt_and_answer(turns: list[Turn], notes: Notes) -> list[Turn]:
    """Apply the rules on order and emptiness; what is left starts with a prompt and ends with an answer."""
    if any(turn.role == "user" for turn in turns) and all(turn.role != "assistant" for turn in turns):
        raise Skip("no answer")
    kept = _from_first_prompt(turns, "no prompt before the answer", notes)
    for place, turn in enumerate(kept):
        if turn.is_empty:
            notes["cut before an empty turn"] = None
            kept = kept[:place]
            break
    joined = _join_repeated(kept, notes)
    last = max((place for place, turn in enumerate(joined) if turn.role == "assistant"), default=None)
    if last is None:
        raise Skip("an empty turn before the first answer")
    if last + 1 < len(joined):
        notes["turn without an answer dropped"] = None
    return joined[: last + 1]


def cut_to_prompts(turns: list[Turn], notes: Notes) -> list[Turn]:
    """Apply the same rules to what is to be answered anew; what is left ends with a user turn."""
    kept = _from_first_prompt(turns, "no prompt", notes)
    for place, turn in enumerate(kept):
        if turn.role == "tool" or (turn.role != "assistant" and turn.is_empty):
            kind = "a tool" if turn.role == "tool" else "an empty"
            notes[f"cut before {kind} turn"] = None
            kept = kept[:place]
            break
    prompts = [turn for turn in _join_repeated(kept, notes) if turn.role != "assistant"]
    while prompts and prompts[-1].role != "user":
        prompts.pop()
    if not prompts:
        raise Skip("an empty turn before the first answer")
    return prompts


def _join_repeated(turns: list[Turn], notes: Notes) -> list[Turn]:
    joined: list[Turn] = []
    for turn in turns:
        if joined and turn.role == joined[-1].role and turn.role != "tool":
            notes[f"{turn.role} turns in a row joined"] = None
            before = joined[-1]
            text = "\n\n".join(filter(None, (before.content, turn.content)))
            calls = before.tool_calls + turn.tool_calls
            joined[-1] = replace(
                turn, content=text, answer_ids=None, reasoning=before.reasoning, tool_calls=calls
            )
        else:
            joined.append(turn)
    return joined
