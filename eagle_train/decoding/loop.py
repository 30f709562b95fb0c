"""The speculative loop, and plain decoding beside it: the oracle that every output is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle_train.decoding.drafters import Drafter
from eagle_train.decoding.law import TargetLaw
from eagle_train.decoding.reader import TargetReader
from eagle_train.decoding.sampling import Chance, Sampling, SeededChance, distribution, processed
from eagle_train.decoding.trees import Tree
from eagle_train.decoding.verify import verify_block, verify_greedy, verify_sampled
from eagle_train.errors import UserError
from eagle_train.losses.acceptance import AcceptanceCounts
from eagle_train.targets.lengths import check_length
from eagle_train.targets.load import Target


@dataclass(frozen=True)
class Settings:
    """How a text is continued. `eos_ids` None means the target's own; `prefill_chunk` is in tokens.

    `block`: chains of samples are accepted as a whole rather than guess by guess.
    """

    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    eos_ids: tuple[int, ...] | None = None
    seed: int = 0
    prefill_chunk: int = 2048
    block: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max-new-tokens: got {self.max_new_tokens}, wanted at least 1")


@dataclass
class Generation:
    """A continuation and how it came about. Its first token is the prefill's; rounds made the others."""

    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # per round: guesses accepted and emitted
    accepted_uncut: list[int] = field(default_factory=list)  # the same, those past the end counted too
    ended: bool = False  # at an end-of-sequence token rather than at max_new_tokens
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def counts(self) -> AcceptanceCounts:
        """Rounds, the tokens they emitted, and the histogram of accepted guesses."""
        longest = max(self.accepted, default=0)
        histogram = tuple(self.accepted.count(k) for k in range(longest + 1))
        return AcceptanceCounts(len(self.accepted), len(self.ids) - 1, histogram)

    @property
    def rounds(self) -> list[tuple[int, int]]:
        """Of each round: how many tokens stood before it, and how many it emitted."""
        found, before = [], 1  # the prefill's token
        for accepted in self.accepted:
            emitted = min(accepted + 1, len(self.ids) - before)
            found.append((before, emitted))
            before += emitted
        return found


OnTokens = Callable[[list[int], int], None]
"""Called with the tokens just emitted and how many of them were guesses."""


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    settings: Settings,
    on_tokens: OnTokens | None = None,
    chance: Chance | None = None,
) -> Generation:
    """Continue a prompt with `drafter`'s help. Greedy ids, or the law of sampled ones, are the target's own.

    x[0..b] is the text so far; the target has read x[0..b-1], so x[b] is the root of the next tree.
    """
    chance = chance or SeededChance(settings.seed)
    answer = Answer(target, settings, on_tokens)
    prompt = checked(target, prompt_ids, settings)
    with TargetReader(target, drafter.layer_ids) as reader, _Clock(target, answer.made) as clock:
        prefill(reader, drafter, prompt, answer, settings, chance)
        clock.prefill_ends()
        while not answer.finished:
            tree = drafter.propose()
            seen = reader.read_tree(tree)
            verified = seen.last[: len(tree) - tree.own]  # the drafter's own nodes need no law
            law = TargetLaw(
                target, settings.sampling, [*prompt, *answer.made.ids], tree, verified, len(prompt)
            )
            path, token = _verify(tree, law, settings, chance)
            answer.add([*(tree.tokens[node] for node in path), token], len(path))
            if not answer.finished:
                drafter.observe(reader.keep(tree, path, token, seen))
    return answer.made


@torch.inference_mode()
def plain(
    target: Target,
    prompt_ids: Sequence[int],
    settings: Settings,
    on_tokens: OnTokens | None = None,
    chance: Chance | None = None,
) -> Generation:
    """Continue a prompt with the target alone, one token per forward. Has no rounds."""
    chance = chance or SeededChance(settings.seed)
    answer = Answer(target, settings, on_tokens)
    prompt = checked(target, prompt_ids, settings)
    with TargetReader(target, ()) as reader, _Clock(target, answer.made) as clock:
        prefill(reader, None, prompt, answer, settings, chance)
        clock.prefill_ends()
        while not answer.finished:
            last = reader.read(answer.made.ids[-1:]).last[-1]
            text = [*prompt, *answer.made.ids]
            answer.add([_pick(target, text, last, settings.sampling, chance, len(prompt))], None)
    return answer.made


def prefill(
    reader: TargetReader,
    drafter: Drafter | None,
    prompt: list[int],
    answer: Answer,
    settings: Settings,
    chance: Chance,
) -> None:
    """Read a prompt in chunks, choose the answer's first token, and let the drafter observe it all."""
    if drafter is not None:
        drafter.begin(chance)
    for start, seen in reader.read_prompt(prompt, settings.prefill_chunk):
        end = start + len(seen.last)
        if end == len(prompt):
            answer.add([_pick(reader.target, prompt, seen.last[-1], settings.sampling, chance, end)], None)
        if drafter is not None:
            drafter.observe(reader.rows(start, [*prompt, *answer.made.ids][start : end + 1], seen))


def _verify(tree: Tree, law: TargetLaw, settings: Settings, chance: Chance) -> tuple[list[int], int]:
    """Return the nodes that stand and the token that follows, by the rule for how the guesses were drawn."""
    if settings.sampling.greedy:
        return verify_greedy(tree, law.best)
    if settings.block and tree.q is not None and tree.is_chain:
        return verify_block(tree, law, chance)
    return verify_sampled(tree, law, chance)


def _pick(
    target: Target, text: list[int], last: Tensor, sampling: Sampling, chance: Chance, begun: int
) -> int:
    """Choose the token that follows `text`, whose final state is `last` [H]; the answer began at `begun`."""
    logits = processed(target.logits(last), text, sampling, begun)
    return int(logits.argmax()) if sampling.greedy else chance.choose(distribution(logits, sampling))


def checked(target: Target, prompt_ids: Sequence[int], settings: Settings) -> list[int]:
    """Return the prompt's ids. Raises UserError for an empty one, and for one that leaves no room."""
    if not len(prompt_ids):
        raise UserError("prompt: got no tokens, wanted at least one")
    check_length(target.config, len(prompt_ids) + settings.max_new_tokens, "prompt and answer")
    return [int(token) for token in prompt_ids]


class Answer:
    """Tokens emitted so far, cut at the first end-of-sequence token and at max_new_tokens."""

    def __init__(self, target: Target, settings: Settings, on_tokens: OnTokens | None) -> None:
        self.made, self._limit, self._on_tokens = Generation(), settings.max_new_tokens, on_tokens
        self._eos = set(target.eos_ids if settings.eos_ids is None else settings.eos_ids)

    @property
    def finished(self) -> bool:
        """True once nothing more is emitted."""
        return self.made.ended or len(self.made.ids) >= self._limit

    def add(self, tokens: list[int], accepted: int | None) -> None:
        """Append one round's tokens; `accepted` says how many are guesses, None that this was no round."""
        made = self.made
        emitted = tokens[: self._limit - len(made.ids)]
        end = next((i for i, token in enumerate(emitted) if token in self._eos), None)
        if end is not None:
            emitted, made.ended = emitted[: end + 1], True
        made.ids += emitted
        if accepted is not None:
            made.accepted.append(min(accepted, len(emitted)))
            made.accepted_uncut.append(accepted)
        if self._on_tokens is not None:
            self._on_tokens(emitted, min(accepted or 0, len(emitted)))


def now(device: torch.device) -> float:
    """Return the time in seconds once the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _Clock:
    """Times the prefill (the drafter's reading of the prompt included) and the rest."""

    def __init__(self, target: Target, made: Generation) -> None:
        self._device, self._made = target.device, made

    def __enter__(self) -> _Clock:
        self._started = now(self._device)
        return self

    def prefill_ends(self) -> None:
        self._prefilled = now(self._device)
        self._made.prefill_seconds = self._prefilled - self._started

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._made.decode_seconds = now(self._device) - self._prefilled
