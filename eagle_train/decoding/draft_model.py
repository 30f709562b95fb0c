"""Guesses of a smaller causal language model with the same vocabulary.

Source: Leviathan et al. 2023 (arXiv 2211.17192); Chen et al. 2023 (arXiv 2302.01318).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from eagle_train.decoding.reader import Rows, TargetReader
from eagle_train.decoding.sampling import Chance, Sampling, distribution
from eagle_train.decoding.shapes import check_size
from eagle_train.decoding.trees import Tree
from eagle_train.errors import UserError
from eagle_train.targets.lengths import longest_text
from eagle_train.targets.load import Target


class DraftModel:
    """Continues the text by `gamma` tokens: the model's best when greedy, else drawn from its law.

    Its cache keeps the rows of guesses that stood; those that were refused are forgotten. It stops guessing
    where its own positions end.
    """

    layer_ids: tuple[int, ...] = ()

    def __init__(
        self, model: Target, target: Target, gamma: int = 3, sampling: Sampling | None = None
    ) -> None:
        if model.vocab_size != target.vocab_size:
            raise UserError(
                f"draft model {model.name}: its vocabulary is {model.vocab_size}, that of {target.name} is "
                f"{target.vocab_size}; wanted a smaller model of the same family"
            )
        check_size("draft-model: got {} guesses", gamma)
        self.model, self.gamma, self.sampling = model, gamma, sampling or Sampling()
        self._longest = longest_text(model.config)

    @property
    def figures(self) -> dict[str, object]:
        """How reports name it. `nodes` counts the root."""
        return {"draft": "chain", "nodes": self.gamma + 1, "depth": self.gamma}

    def begin(self, chance: Chance) -> None:
        """Forget the text."""
        self.chance = chance
        self._reader = TargetReader(self.model, ())
        self._text: list[int] = []  # verified, its last token the next root
        self._read: list[int] = []  # what the cache holds

    def observe(self, rows: Rows) -> None:
        """Take in new tokens, and forget the guesses that do not stand."""
        self._text[rows.start :] = rows.tokens.tolist()
        pairs = zip(self._text, self._read, strict=False)
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self._text), len(self._read)))
        if equal < len(self._read):
            self._reader.cache.keep(equal, [])
            del self._read[equal:]
        many = len(self._text) - len(self._read) > self.gamma + 2  # a prompt, not the tokens of a round
        if many and self._room:
            self._take(self._text[len(self._read) : -1])

    def propose(self) -> Tree:
        """Draft a chain below the last token observed."""
        greedy, tokens, q = self.sampling.greedy, [self._text[-1]], []
        unread = self._text[len(self._read) :]
        guesses = min(self.gamma, self._room)
        for _ in range(guesses):
            logits = self._logits(unread)
            if greedy:
                token = int(logits.argmax())
            else:
                q.append(distribution(logits, self.sampling))
                token = self.chance.choose(q[-1])
            tokens.append(token)
            unread = [token]
        return Tree(tuple(tokens), tuple(range(-1, guesses)), None if greedy else (*q, None))

    @property
    def _room(self) -> int:
        """How many more tokens the model can read, the root included: as many guesses it can make."""
        return self.gamma if self._longest is None else max(0, self._longest - len(self._text) + 1)

    def _logits(self, ids: list[int]) -> Tensor:
        """Read tokens; return the logits [V] of the one that follows."""
        return self.model.logits(self._take(ids)[-1])

    @torch.inference_mode()
    def _take(self, ids: list[int]) -> Tensor:
        """Read tokens; return their final states [m, H]."""
        self._read += ids
        return self._reader.read(ids).last


def first_layers(target: Target, number: int) -> Target:
    """Return a model of the target's first `number` layers, its norm and its lm_head, sharing all weights.

    Raises UserError for a number that leaves none out.
    """
    if not 1 <= number < target.num_layers:
        raise UserError(
            f"draft model of the first {number} layers: {target.name} has {target.num_layers}; wanted 1 to "
            f"{target.num_layers - 1}"
        )
    shared = {id(parameter): parameter for parameter in target.model.parameters()}  # copied by reference
    model = copy.deepcopy(target.model, shared)
    cut = Target(f"the first {number} layers of {target.name}", target.revision, model)
    kept = cut.layers[:number]
    for module in cut.body.modules():
        for name, child in module.named_children():
            if child is cut.layers:
                setattr(module, name, kept)
                cut.config.num_hidden_layers = number
                return Target(cut.name, cut.revision, model)
    raise UserError(f"{target.name}: its layers could not be cut; give a draft model of its own")
