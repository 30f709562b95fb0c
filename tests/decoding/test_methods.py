"""Ways of guessing without a head: the target's own text whatever they guess, each against a naive twin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_train.decoding.draft_model import DraftModel, first_layers
from eagle_train.decoding.lookahead import Lookahead
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.prompt_lookup import PromptLookup
from eagle_train.decoding.sampling import Sampling
from eagle_train.errors import UserError
from eagle_train.targets.load import Target, load_target

from .toys import law_of, spied

PROMPT = [5, 17, 250, 33, 8, 121, 64, 5, 17, 250]
REPEATING = [9, 8, 7, 6] * 4


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(str(tiny_target_dir), dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def shallow(tiny_target_dir: Path, tmp_path_factory) -> Target:
    """The target cut to its first six layers, with the same output map."""
    cut = load_target(str(tiny_target_dir), dtype="fp32", device="cpu")
    cut.body.layers = cut.body.layers[:6]
    cut.model.config.num_hidden_layers = 6
    folder = tmp_path_factory.mktemp("cut") / "llama"
    cut.model.save_pretrained(folder)
    cut.tokenizer.save_pretrained(folder)
    return load_target(str(folder), dtype="fp32", device="cpu")


def drafters(target: Target, shallow: Target, sampling: Sampling | None = None) -> dict:
    return {
        "prompt-lookup": PromptLookup(),
        "lookahead": Lookahead(target, 4, 3, 3),
        "lookahead of two": Lookahead(target, 3, 2, 2),
        "draft-model": DraftModel(shallow, target, 3, sampling),
    }


NAMES = ("prompt-lookup", "lookahead", "lookahead of two", "draft-model")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", [PROMPT, REPEATING, [3]], ids=["mixed", "repeating", "one"])
@pytest.mark.parametrize("chunk", [3, 100])
def test_greedy_text_is_the_targets_own(target, shallow, name, prompt, chunk):
    settings = Settings(max_new_tokens=24, eos_ids=(), prefill_chunk=chunk)
    drafter = drafters(target, shallow)[name]
    wanted = plain(target, prompt, settings).ids
    for _ in range(2):  # the second time on a drafter that has seen a text
        got = generate(target, drafter, prompt, settings)
        assert got.ids == wanted
        assert got.counts.tokens == 23


@pytest.mark.parametrize("name", NAMES[1:])
def test_some_guesses_stand(target, shallow, name):
    settings = Settings(max_new_tokens=80, eos_ids=())
    got = generate(target, drafters(target, shallow)[name], PROMPT, settings)
    assert got.ids == plain(target, PROMPT, settings).ids
    assert got.counts.tau > 1.05


@pytest.mark.parametrize("name", ["prompt-lookup", "lookahead", "draft-model"])
def test_the_loops_law_is_the_targets(law_error, toy, toy_draft, name):
    sampling, length, prompt = Sampling(0.9, top_k=2), 3, [1, 4, 2, 1, 4]
    drafter = {
        "prompt-lookup": PromptLookup(2, 2),
        "lookahead": Lookahead(toy, 2, 3, 2),
        "draft-model": DraftModel(toy_draft, toy, 2, sampling),
    }[name]
    for block in (False, True):
        settings = Settings(max_new_tokens=length, sampling=sampling, eos_ids=(), block=block)
        law = law_of(lambda chance: tuple(generate(toy, drafter, prompt, settings, chance=chance).ids))  # noqa: B023
        assert law_error(law, prompt, length, sampling) < 2e-6


def naive_lookup(text: list[int], gamma: int, longest: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest ending, by looking everywhere."""
    for n in range(min(longest, len(text)), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return text[end : end + gamma]
    return []


@pytest.mark.parametrize(("gamma", "longest"), [(1, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("prompt", [PROMPT, REPEATING, [3]], ids=["mixed", "repeating", "one"])
def test_prompt_lookup_equals_a_search_of_the_whole_text(target, prompt, gamma, longest):
    drafter = PromptLookup(gamma, longest)
    trees = spied(drafter)
    got = generate(target, drafter, prompt, Settings(max_new_tokens=60, eos_ids=(), prefill_chunk=4))
    text, rounds = [*prompt, got.ids[0]], iter(got.accepted)
    for tree in trees:
        guesses = naive_lookup(text, gamma, longest)
        assert list(tree.tokens) == [text[-1], *guesses]
        assert tree.is_chain
        text = [*prompt, *got.ids][: len(text) + next(rounds) + 1]
    assert any(len(tree) > 1 for tree in trees)


class NaiveLookahead:
    """The window as the paper draws it: every token's own context is written out and read from scratch."""

    def __init__(self, target: Target, window: int, level: int, guesses: int) -> None:
        self.target, self.window, self.level, self.guesses = target, window, level, guesses
        self.pool: list[tuple[int, ...]] = []  # n-grams, the latest last

    def fill(self, text: list[int], count: int, row: int) -> list[int]:
        return [text[-1 - (row * self.window + i) % len(text)] for i in range(count)]

    def begin(self, text: list[int]) -> None:
        self.rows = [self.fill(text, self.window, row) for row in range(self.level - 1)]
        self.rows[0][0] = text[-1]

    def fitting(self, root: int) -> set[tuple[int, ...]]:
        found = [gram for gram in self.pool if gram[0] == root][-self.guesses :]
        return {gram[1 : n + 1] for gram in found for n in range(1, self.level)}

    @torch.inference_mode()
    def step(self, text: list[int], after: list[int]) -> None:
        """Read every column's context, then move the window on to the longer text `after`."""
        new = []
        for column in range(self.window):
            above = [row[column] for row in self.rows[1:]]
            context = [*text, *self.rows[0][1 : column + 1], *above]
            new.append(int(self.target.model(torch.tensor([context])).logits[0, -1].argmax()))
        for column, token in enumerate(new):
            gram = (*(row[column] for row in self.rows), token)
            self.pool = [other for other in self.pool if other != gram] + [gram]
        gone = len(after) - len(text) - 1
        rows = [*self.rows[1:], new]
        self.rows = [
            [*row[gone:], *self.fill(after, min(gone, self.window), n)] for n, row in enumerate(rows)
        ]
        self.rows[0][0] = after[-1]


@pytest.mark.parametrize(("window", "level", "guesses"), [(4, 3, 3), (3, 2, 2), (2, 5, 1), (6, 4, 9)])
def test_lookahead_equals_a_window_without_masks_or_caches(target, window, level, guesses):
    drafter, twin = Lookahead(target, window, level, guesses), NaiveLookahead(target, window, level, guesses)
    trees = spied(drafter)
    got = generate(target, drafter, PROMPT, Settings(max_new_tokens=50, eos_ids=()))
    text = [*PROMPT, got.ids[0]]
    twin.begin(text)
    for tree, accepted in zip(trees, got.accepted, strict=True):
        assert drafted(tree) == twin.fitting(text[-1])
        assert list(tree.tokens[len(tree) - tree.own :]) == [t for row in twin.rows for t in row][1:]
        after = [*PROMPT, *got.ids][: len(text) + accepted + 1]
        twin.step(text, after)
        text = after
    assert any(len(tree) - tree.own > 1 for tree in trees)


def drafted(tree) -> set[tuple[int, ...]]:
    """The guesses of a tree as paths of tokens."""
    return {tree.words(node) for node in range(1, len(tree) - tree.own)}


def test_a_draft_model_guesses_as_it_would_alone(target, shallow):
    drafter = DraftModel(shallow, target, 3)
    trees = spied(drafter)
    got = generate(target, drafter, PROMPT, Settings(max_new_tokens=50, eos_ids=(), prefill_chunk=4))
    text = [*PROMPT, got.ids[0]]
    for tree, accepted in zip(trees, got.accepted, strict=True):
        alone = plain(shallow, text, Settings(max_new_tokens=3, eos_ids=())).ids
        assert list(tree.tokens) == [text[-1], *alone]
        text = [*PROMPT, *got.ids][: len(text) + accepted + 1]


def test_the_first_layers_of_the_target_are_a_draft_model_that_shares_its_weights(target, shallow):
    cut = first_layers(target, 6)
    assert (cut.num_layers, target.num_layers) == (6, 8)
    ours = {name: parameter.data_ptr() for name, parameter in target.model.named_parameters()}
    assert all(parameter.data_ptr() == ours[name] for name, parameter in cut.model.named_parameters())
    settings = Settings(max_new_tokens=20, eos_ids=())
    assert plain(cut, PROMPT, settings).ids == plain(shallow, PROMPT, settings).ids
    got = generate(target, DraftModel(cut, target, 2), PROMPT, settings)
    assert got.ids == plain(target, PROMPT, settings).ids
    for number in (0, 8):
        with pytest.raises(UserError, match="wanted 1 to 7"):
            first_layers(target, number)


def test_the_target_as_its_own_draft_model_is_always_right(toy):
    for sampling in (Sampling(), Sampling(1.0)):
        for block in (False, True):
            drafter = DraftModel(toy, toy, 3, sampling)
            settings = Settings(max_new_tokens=41, eos_ids=(), sampling=sampling, block=block)
            assert generate(toy, drafter, [1, 4, 2], settings).accepted == [3] * 10


def test_sizes_that_cannot_work_are_refused(target, toy):
    with pytest.raises(UserError, match=r"its vocabulary is 6, that of .* is 300"):
        DraftModel(toy, target)
    for make, words in (
        (lambda: DraftModel(target, target, 0), "draft-model: got 0 guesses"),
        (lambda: PromptLookup(0), "prompt-lookup: got gamma 0"),
        (lambda: PromptLookup(3, 0), "prompt-lookup: got longest 0"),
        (lambda: Lookahead(target, 1), "lookahead: got window 1, wanted at least 2"),
        (lambda: Lookahead(target, 3, 1), "lookahead: got level 1, wanted at least 2"),
        (lambda: Lookahead(target, 3, 3, 0), "lookahead: got guesses 0"),
        (
            lambda: Lookahead(target, 256, 64, 256),
            "256 guesses make 32256 rows a round, wanted at most 1024",
        ),
        (lambda: DraftModel(target, target, 1000), "draft-model: got 1000 guesses, wanted at most 256"),
        (lambda: PromptLookup(10**9), "prompt-lookup: got gamma 1000000000, wanted at most 256"),
    ):
        with pytest.raises(UserError, match=words):
            make()
