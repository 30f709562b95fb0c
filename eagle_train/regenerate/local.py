"""Answers made in this process: turn after turn of all conversations, batched."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import torch

from eagle_train.data.mask import Encoder
from eagle_train.data.templates import ChatTemplate, TemplateRefused
from eagle_train.errors import UserError
from eagle_train.progress import Progress
from eagle_train.provenance import tokenizer_fingerprint
from eagle_train.regenerate.answers import Answer, AnswerSettings, Asked, opens_thinking, without_thinking
from eagle_train.regenerate.decode import Job, Made, decode, sampling_of
from eagle_train.regenerate.failures import Failures
from eagle_train.regenerate.work import Work
from eagle_train.targets.lengths import longest_text
from eagle_train.targets.load import Target

_SLOTS = {"cuda": 128}  # by kind of device
_FEW_SLOTS = 32


class LocalAnswers:
    """The target, its template and how it answers. `generated_by` is what the output says of them."""

    def __init__(
        self, target: Target, template: ChatTemplate, settings: AnswerSettings, num_slots: int | None
    ) -> None:
        self.target, self.template, self.settings = target, template, settings
        self.num_slots = num_slots or _SLOTS.get(target.device.type, _FEW_SLOTS)
        self.stop_ids = _stop_ids(target, template)
        self.generated_by: dict[str, Any] = {
            "model": target.name,
            **{name: value for name, value in target.identity().items() if name != "name"},
            "tokenizer_fingerprint": tokenizer_fingerprint(target.tokenizer),
            "template_fingerprint": template.fingerprint,
            "template_arguments": template.arguments,
            **settings.record(),
            **_own(target, settings),
        }

    def run(self, asked: list[Asked], work: Work, failures: Failures, bar: Progress) -> None:
        """Make every answer that `work` lacks. Raises UserError when the device's memory is too small."""
        for turn in range(max((conversation.num_turns for conversation in asked), default=0)):
            prompts = list(self._prompts(asked, turn, work, failures))
            openings = {job.number: opened for job, opened in prompts}
            jobs = [job for job, _ in prompts]
            tokens = 0
            try:
                for made in decode(self.target, jobs, self.settings, self.stop_ids, self.num_slots):
                    answer = self._answer(made, openings[made.number])
                    work.put((asked[made.number].row_id, turn), answer)
                    tokens += len(made.ids)
                    bar.advance(1, f"turn {turn + 1}, {tokens:,} tokens")
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"{self.target.name}: the device's memory does not hold {self.num_slots} texts at once; "
                    f"give --batch {max(1, self.num_slots // 2)} (finished answers are kept)"
                ) from error

    def _prompts(
        self, asked: list[Asked], turn: int, work: Work, failures: Failures
    ) -> Iterator[tuple[Job, bool]]:
        """Yield this turn's jobs, each with whether its prompt opens a thought."""
        config = self.target.config
        positions = longest_text(config) or int(getattr(config, "max_position_embeddings", None) or 2**31)
        for number, conversation in enumerate(asked):
            answers = work.answers(conversation)
            if len(answers) != turn or not work.wanted(conversation, answers):
                continue
            messages = conversation.messages(turn, [answer.message() for answer in answers])
            try:
                prompt = self.template.render(messages, True, conversation.conversation.tools)
            except TemplateRefused as error:
                failures.add(conversation, turn, f"refused by the chat template: {error}")
                continue
            ids = array("i", self.target.tokenizer.encode(prompt, add_special_tokens=False))
            limit = min(self.settings.max_new_tokens, positions - len(ids))
            if not ids or limit < 1:
                failures.add(conversation, turn, f"a prompt of {len(ids)} tokens, room for {positions}")
                continue
            seed = self.settings.seed_of(conversation.row_id, turn)
            yield Job(number, ids, limit, seed), opens_thinking(prompt)

    def _answer(self, made: Made, opened: bool) -> Answer:
        shown = made.ids[:-1] if made.finished else made.ids
        text = self.target.tokenizer.decode(
            shown, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        answer = Answer(str(text), made.finished, made.ids)
        return answer if self.settings.keep_thinking else without_thinking(answer, opened)


def _own(target: Target, settings: AnswerSettings) -> dict[str, Any]:
    """Return what the output says of the target's own processors, nothing where it has none."""
    own = sampling_of(target, settings).processors
    return {} if own is None else {"processors": own.values}


def _stop_ids(target: Target, template: ChatTemplate) -> frozenset[int]:
    """Return the ids that end an answer: the model's own and the template's end of turn."""
    end = Encoder(target.tokenizer, template).end_of_turn
    return frozenset(target.eos_ids) | ({end[0]} if end else set())
