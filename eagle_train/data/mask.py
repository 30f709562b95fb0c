"""From turns to tokens: which tokens of a conversation are answers.

Nothing is known about a template's headers. Each answer is found by rendering the conversation up to
its prompt, then with the answer, then with a marker word in the answer's place:

    prompt   the conversation before the answer, with the generation prompt
    answer   the answer as the template shows it
    ending   what the template puts behind it, up to its end-of-turn token

The prompt's tokens are followed by those of answer and ending, as at inference, where the prompt is
tokenised before the answer exists. Supervised is exactly answer + ending. An unfinished answer has no
supervised ending. Rows run on through later turns as long as what was said is a prefix of the next
prompt; a template that rewrites history breaks that, and each answer then gets a row of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from eagle_train.data.answer_ids import say
from eagle_train.data.records import Conversation, Message, Skip, Turn
from eagle_train.data.templates import ChatTemplate, TemplateRefused
from eagle_train.data.tokens import Tokens
from eagle_train.errors import UserError
from eagle_train.provenance import tokenizer_fingerprint

_MARKER = "markerofanswer"
_NOT_SHOWN = "the chat template does not show the answer as given"


@dataclass(frozen=True)
class TurnText:
    """One answer's text in three pieces, and its own token ids where it came with them.

    `shown` is `prompt` + `answer` + `ending`: what a later prompt must begin with. `tail` follows it in
    a finished conversation (a line break, as a rule).
    """

    prompt: str
    answer: str
    ending: str
    tail: str
    answer_ids: tuple[int, ...] | None
    finished: bool

    @property
    def shown(self) -> str:
        return self.prompt + self.answer + (self.ending if self.finished else "")


@dataclass(frozen=True)
class EncodedRow:
    """Tokens of one row. `spans` are (first, last) of each answer, inclusive."""

    input_ids: list[int]
    spans: list[tuple[int, int]]


class Encoder:
    """Turns conversations into rows for one tokenizer and template.

    `end_of_turn` is the token id (and text) that closes a finished answer, None where the template
    closes answers with plain text: then answers end with their own last token. Asking for it raises
    UserError where the template cannot show a plain question and answer.
    """

    def __init__(self, tokenizer: Any, template: ChatTemplate) -> None:
        self.template = template
        self.fingerprint = tokenizer_fingerprint(tokenizer)
        self.tokens = Tokens(tokenizer)
        self._tokenizer = tokenizer
        self._stops = {number for number in (tokenizer.eos_token_id,) if number is not None}

    def turn_text(
        self, turns: Sequence[Turn], place: int, own_ids: bool, tools: Sequence[Message] = ()
    ) -> TurnText:
        """Return the pieces of the answer `turns[place]`; `own_ids` allows the ids it came with.

        Raises Skip where the template refuses these turns or does not show the answer.
        """
        messages = [turn.message() for turn in turns[: place + 1]]
        turn = turns[place]
        try:
            prompt = self.template.render(messages[:-1], True, tools)
            whole = self.template.render(messages, tools=tools)
            messages[-1] = {"role": turn.role, "content": _MARKER}
            marked = self.template.render(messages, tools=tools)
        except TemplateRefused as error:
            raise Skip("refused by the chat template", str(error)) from error
        before, marker, behind = marked.rpartition(_MARKER)
        if not marker or not whole.endswith(behind):
            raise Skip(_NOT_SHOWN)
        body_end = len(whole) - len(behind)
        if whole.startswith(prompt) and len(prompt) <= body_end:
            answer = whole[len(prompt) : body_end]
            supplied = before[len(prompt) :] if before.startswith(prompt) else ""
        elif whole.startswith(before) and len(before) <= body_end:
            # The generation prompt writes something (an empty think block) that the finished turn lacks.
            said = _said_behind(prompt, before, turn)
            answer, supplied = whole[len(before) : body_end] if said is None else said, ""
        else:
            raise Skip(_NOT_SHOWN)
        ids = turn.answer_ids if own_ids else None
        if supplied.strip() and answer.startswith(supplied) and ids is None:
            # What the template writes before any answer belongs to the prompt; a mere space does not.
            supplied = supplied.rstrip(" ")
            prompt, answer = prompt + supplied, answer[len(supplied) :]
        if not answer.strip() and ids is None:
            raise Skip(_NOT_SHOWN)
        if any(call["function"]["name"] not in answer for call in turn.tool_calls):
            raise Skip("the chat template does not show a tool call")
        ending = self._ending(behind)
        return TurnText(prompt, answer, ending, behind[len(ending) :], ids, turn.finished)

    def _ending(self, behind: str) -> str:
        """Return `behind` up to its first added token: the end of turn. Empty where there is none."""
        found = self.tokens.added.search(behind)
        return behind[: found.end()] if found else ""

    @property
    def end_of_turn(self) -> tuple[int, str] | None:
        try:
            text = self._plain_answer()
        except Skip as reason:
            raise UserError(
                f"chat template {self.template.name}: cannot show a plain question and answer ({reason}); "
                "give another with --chat-template"
            ) from reason
        found = self.tokens.added.search(text.ending)
        return (self.tokens.ids_of_added[found.group()], found.group()) if found else None

    def _plain_answer(self) -> TurnText:
        probe = (Turn("user", "Hello"), Turn("assistant", "Hi"))
        try:
            return self.turn_text(probe, 1, False)
        except Skip:  # some templates cannot do without a system text
            return self.turn_text((Turn("system", "Be kind."), *probe), 2, False)

    def _dropped(self, turns: Sequence[Turn], prompt: str) -> None:
        """Raise Skip when the prompt lacks the text of a system, user or tool turn."""
        for turn in turns:
            text = turn.content.strip()
            if turn.role == "assistant" or text in prompt:
                continue
            if turn.role != "tool" or json.dumps(text, ensure_ascii=False)[1:-1] not in prompt:
                raise Skip(f"the chat template drops or changes a {turn.role} turn")

    def uses_ids_of(self, conversation: Conversation) -> bool:
        """True when the conversation's answer ids are of this very tokenizer."""
        return conversation.tokenizer_fingerprint == self.fingerprint

    def with_true_ids(self, conversation: Conversation) -> Conversation:
        """Return the conversation without those answer ids of this tokenizer that say something else.

        It is the very same where there are none.
        """
        if not self.uses_ids_of(conversation):
            return conversation
        turns = tuple(self._with_true_ids(turn) for turn in conversation.turns)
        return conversation if turns == conversation.turns else replace(conversation, turns=turns)

    def _with_true_ids(self, turn: Turn) -> Turn:
        ids = turn.answer_ids
        if ids is None or say(
            self._tokenizer, ids, turn.finished, turn.content, turn.reasoning, turn.tool_calls
        ):
            return turn
        return replace(turn, answer_ids=None)

    def shows_tools(self, conversation: Conversation) -> bool:
        """True when the template writes the conversation's tools into a prompt."""
        plain = [turn.message() for turn in conversation.turns[:1]]
        return self.template.render(plain, True, conversation.tools) != self.template.render(plain, True)

    def texts(self, conversation: Conversation) -> list[TurnText]:
        """Return the pieces of every answer, in order. Raises Skip."""
        own_ids = self.uses_ids_of(conversation)
        turns = conversation.turns
        places = [place for place, turn in enumerate(turns) if turn.role == "assistant"]
        found = [self.turn_text(turns, place, own_ids, conversation.tools) for place in places]
        self._dropped(turns[: places[-1]], found[-1].prompt)
        return found

    def rows(self, conversation: Conversation) -> list[EncodedRow]:
        """Return one row, or one per answer where later prompts read earlier answers otherwise. Raises Skip.

        They do where the template rewrites history, and where an answer's own tokens are not those of
        its text, which is what a later prompt is made of.
        """
        texts = self.texts(conversation)
        if all(after.prompt.startswith(text.shown) for text, after in pairwise(texts)):
            row = self._row(texts)
            if all(text.answer_ids is None for text in texts[:-1]) or all(
                row.input_ids[:first] == self.tokens.ids_of_history(text.prompt)
                for text, (first, _) in zip(texts, row.spans, strict=True)
            ):
                return [row]
        return [self._row([text]) for text in texts]

    def _row(self, texts: Sequence[TurnText]) -> EncodedRow:
        ids = self.tokens.ids_of_history(texts[0].prompt)
        spans: list[tuple[int, int]] = []
        said = texts[0].prompt
        for number, text in enumerate(texts):
            if number:
                ids += self.tokens.ids_after(said, text.prompt[len(said) :])
            answer = self._answer_ids(text)
            spans.append((len(ids), len(ids) + len(answer) - 1))
            ids += answer
            said = text.shown
        if texts[-1].finished and texts[-1].tail:
            ids += self.tokens.ids_after(said, texts[-1].tail)
        return EncodedRow(ids, spans)

    def _answer_ids(self, text: TurnText) -> list[int]:
        if text.answer_ids is not None:
            return list(text.answer_ids)
        ending = text.ending if text.finished else ""
        ids = self.tokens.ids_after(text.prompt, text.answer + ending, generated=True)
        closing = self.tokens.added.search(text.ending)
        stops = self._stops | ({self.tokens.ids_of_added[closing.group()]} if closing else set())
        if stops.intersection(ids[:-1] if ending else ids):
            raise Skip("an answer holds the end-of-turn token in its middle")
        return ids


def cut(row: EncodedRow, max_length: int) -> tuple[EncodedRow, list[tuple[int, int]]]:
    """Cut `row` on the right to `max_length` tokens; return it with the spans that were lost or shortened.

    An answer that is cut has no end-of-turn token. A cut row ends at its last supervised token.
    """
    if len(row.input_ids) <= max_length:
        return row, []
    kept = [(first, min(last, max_length - 1)) for first, last in row.spans if first < max_length]
    lost = [span for span in row.spans if span[1] >= max_length]
    length = kept[-1][1] + 1 if kept else 0
    return replace(row, input_ids=row.input_ids[:length], spans=kept), lost


def _said_behind(prompt: str, before: str, turn: Turn) -> str | None:
    """Return what was generated behind a `prompt` that opens something no finished turn shows.

    As a rule that is a think tag: the thought, its closing tag, the answer. None where the turn has no
    thought of its own.
    """
    opening = prompt[_common(prompt, before) :].rstrip()
    if not opening:
        return None
    content = turn.content.lstrip()
    if content.startswith(opening):
        said = content[len(opening) :]
        return said[len(prompt) - len(prompt.rstrip()) :] if said[:1].isspace() else said
    tag = re.fullmatch(r"<([\w:-]+)>", opening.strip())
    closing = f"</{tag.group(1)}>" if tag else None
    if closing and turn.reasoning is not None:
        return f"{turn.reasoning.strip()}\n{closing}\n\n{content}"
    return turn.content if closing and closing in turn.content else None


def _common(one: str, other: str) -> int:
    """Return the length of the longest common beginning."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))
