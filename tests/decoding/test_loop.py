"""The output is the target's own, whatever is guessed, and the counters count what was emitted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.law import TargetLaw, logits_of_rows
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.reader import Rows, TargetReader
from eagle_train.decoding.sampling import Chance, Sampling, SeededChance, distribution, penalised
from eagle_train.decoding.shapes import Chain, Dynamic, Static
from eagle_train.decoding.trees import EAGLE1_PATHS, StaticShape, Tree
from eagle_train.errors import UserError
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head
from eagle_train.targets.capture import Captured
from eagle_train.targets.load import Target, load_target

PROMPT = [5, 17, 250, 33, 8, 121, 64]
TREE = StaticShape.from_paths(EAGLE1_PATHS)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(str(tiny_target_dir), dtype="fp32", device="cpu")


class Scripted:
    """Guesses from a known text: right at the given ranks, wrong elsewhere. Checks what it is told."""

    layer_ids: tuple[int, ...] = ()

    def __init__(self, text: Sequence[int], shape: StaticShape, right: Sequence[bool]) -> None:
        self.text, self.shape, self.right = list(text), shape, right
        self.rounds = 0

    def begin(self, chance: Chance) -> None:
        self.read = 0

    def observe(self, rows: Rows) -> None:
        assert rows.start == self.read
        assert len(rows.last) == len(rows.tokens) - 1
        self.read += len(rows.last)
        self.root = int(rows.tokens[-1])

    def propose(self) -> Tree:
        """Put the text's tokens at rank 0 in `right` rounds, nowhere in the others."""
        right = self.right[self.rounds % len(self.right)]
        self.rounds += 1
        tokens = [self.root]
        for depth, rank in zip(self.shape.depths[1:], self.shape.ranks[1:], strict=True):
            at = self.read + depth  # x[read] is the root
            true = self.text[at] if at < len(self.text) else 0
            tokens.append((true + rank + (not right) * 7) % 300)
        return Tree(tuple(tokens), self.shape.parents)


def small_head(target: Target, kind: str, seed: int = 0, draft: int | None = 64, **settings):
    torch.manual_seed(seed)
    config = HeadConfig.for_target(
        target.config.to_dict(), kind, draft_vocab_size=draft if kind == "eagle3" else None, **settings
    )
    draft_ids = torch.arange(0, 300, 300 // draft)[:draft] if kind == "eagle3" and draft else None
    return build_head(config, draft_ids)


SHAPES = {"chain": StaticShape.chain(3), "tree": TREE}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("right", "tau"), [([True], None), ([False], 1.0), ([True, False, False], None), ([False, True], None)]
)
def test_greedy_speculation_equals_plain_greedy(target, shape, right, tau):
    settings = Settings(max_new_tokens=50)
    wanted = plain(target, PROMPT, settings)
    drafter = Scripted([*PROMPT, *wanted.ids], SHAPES[shape], right)
    got = generate(target, drafter, PROMPT, settings)
    assert got.ids == wanted.ids
    assert got.counts.tokens == len(got.ids) - 1
    if tau is not None:
        assert got.counts.tau == tau
    if right == [True]:
        depth = max(SHAPES[shape].depths)
        full, rest = divmod(49, depth + 1)  # every round but the last emits depth + 1 tokens
        assert got.accepted == [depth] * full + [min(rest, depth)] * (rest > 0)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("shape", [Chain(1), Chain(4), Static(), Dynamic(20, 4, 5), Dynamic(60, 100, 3)])
def test_greedy_speculation_with_a_random_head_equals_plain_greedy(target, kind, shape):
    settings = Settings(max_new_tokens=30)
    drafter = HeadDrafter(small_head(target, kind), target, shape)
    assert generate(target, drafter, PROMPT, settings).ids == plain(target, PROMPT, settings).ids


def test_plain_greedy_equals_transformers_own(target):
    wanted = target.model.generate(
        torch.tensor([PROMPT]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(PROMPT) :]
    assert plain(target, PROMPT, Settings(max_new_tokens=30, eos_ids=())).ids == wanted.tolist()


@pytest.mark.parametrize("penalty", [0.8, 1.4])
def test_greedy_text_under_a_repetition_penalty_equals_transformers_own(target, penalty):
    wanted = target.model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=30,
        do_sample=False,
        repetition_penalty=penalty,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(PROMPT) :].tolist()
    sampling = Sampling(repetition_penalty=penalty)
    settings = Settings(max_new_tokens=30, eos_ids=(), sampling=sampling)
    assert wanted != plain(target, PROMPT, Settings(max_new_tokens=30, eos_ids=())).ids
    assert plain(target, PROMPT, settings).ids == wanted
    for right in ([True], [False, True]):
        for shape in SHAPES.values():
            drafter = Scripted([*PROMPT, *wanted], shape, right)
            got = generate(target, drafter, PROMPT, settings)
            assert got.ids == wanted
            assert sum(got.accepted) > 0


def test_all_shapes_accept_the_same_greedy_ids_and_trees_accept_no_less_than_their_chain(target):
    settings, head = Settings(max_new_tokens=40), small_head(target, "eagle1")
    runs = [
        generate(target, HeadDrafter(head, target, shape), PROMPT, settings)
        for shape in (Chain(5), Static(), Dynamic(40, 300, 5))
    ]
    assert runs[0].ids == runs[1].ids == runs[2].ids
    assert runs[0].counts.tau <= runs[1].counts.tau


@pytest.mark.parametrize("pieces", [(3, 4), (1, 6), (2, 1, 4)])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("layers", [1, 2])
def test_rows_observed_in_pieces_leave_the_head_as_rows_observed_at_once(target, pieces, kind, layers):
    head, text = small_head(target, kind, num_hidden_layers=layers), [*PROMPT, 99]
    whole, parts = (HeadDrafter(head, target, Dynamic(12, 3, 4)) for _ in range(2))
    with TargetReader(target, whole.layer_ids) as reader, torch.inference_mode():
        seen = reader.read(PROMPT)
        for drafter in (whole, parts):
            drafter.begin(SeededChance(0))
        whole.observe(reader.rows(0, text, seen))
        start = 0
        for end in itertools.accumulate(pieces):
            aux = None if seen.aux is None else seen.aux[start:end]
            part = Captured(aux, seen.last[start:end])
            parts.observe(reader.rows(start, text[start : end + 1], part))
            start = end
        torch.testing.assert_close(parts._outs, whole._outs, atol=1e-5, rtol=1e-5)
        for layer in range(layers):
            for ours, theirs in (
                (parts.cache._keys, whole.cache._keys),
                (parts.cache._values, whole.cache._values),
            ):
                torch.testing.assert_close(ours[layer][:, :7], theirs[layer][:, :7], atol=1e-5, rtol=1e-5)
        assert parts.propose() == whole.propose()


@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize("shape", [Chain(3), Static(), Dynamic(12, 3, 4)], ids=["chain", "static", "dynamic"])
def test_a_prompt_read_in_pieces_gives_the_same_rounds(target, chunk, shape):
    head = small_head(target, "eagle3", num_hidden_layers=2)
    runs = [
        generate(
            target, HeadDrafter(head, target, shape), PROMPT, Settings(max_new_tokens=25, prefill_chunk=size)
        )
        for size in (chunk, 100)
    ]
    assert runs[0].ids == runs[1].ids
    assert runs[0].accepted == runs[1].accepted


def test_nothing_follows_an_end_of_sequence_inside_an_accepted_block(target):
    free = plain(target, PROMPT, Settings(max_new_tokens=40, eos_ids=()))
    for end in range(1, 12):
        eos = free.ids[end]
        first = free.ids.index(eos)
        settings = Settings(max_new_tokens=40, eos_ids=(299, eos))
        assert plain(target, PROMPT, settings).ids == free.ids[: first + 1]
        drafter = Scripted([*PROMPT, *free.ids], StaticShape.chain(4), [True])
        got = generate(target, drafter, PROMPT, settings)
        assert got.ids == free.ids[: first + 1]
        assert got.ended
        # Rounds of five tokens after the prefill's; in the last only what was emitted counts.
        assert got.counts.tokens == first
        full, rest = divmod(first, 5)
        assert got.accepted == [4] * full + [min(rest, 4)] * (rest > 0)
        assert got.accepted_uncut == [4] * len(got.accepted)


def test_the_first_token_may_end_the_answer(target):
    first = plain(target, PROMPT, Settings(max_new_tokens=1)).ids
    got = generate(target, Scripted([], StaticShape.chain(2), [False]), PROMPT, Settings(eos_ids=(first[0],)))
    assert got.ids == first
    assert got.counts.rounds == got.counts.tokens == 0


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 9])
def test_max_new_tokens_is_kept_and_only_emitted_guesses_count(target, limit):
    wanted = plain(target, PROMPT, Settings(max_new_tokens=20, eos_ids=())).ids[:limit]
    drafter = Scripted([*PROMPT, *wanted, 1, 2, 3, 4], StaticShape.chain(3), [True])
    got = generate(target, drafter, PROMPT, Settings(max_new_tokens=limit, eos_ids=()))
    assert got.ids == wanted
    assert got.counts.tokens == limit - 1
    assert sum(got.accepted) <= limit - 1
    assert not got.ended


def test_on_tokens_hears_every_token_once_and_which_were_guesses(target):
    settings, heard = Settings(max_new_tokens=21), []
    wanted = plain(target, PROMPT, settings)
    drafter = Scripted([*PROMPT, *wanted.ids], StaticShape.chain(3), [True, False])
    got = generate(target, drafter, PROMPT, settings, on_tokens=lambda *news: heard.append(news))
    assert [token for tokens, _ in heard for token in tokens] == got.ids
    assert [accepted for _, accepted in heard] == [0, *got.accepted]


def test_a_text_longer_than_the_head_knows_is_warned_about_and_right(target):
    head = small_head(target, "eagle3", max_position_embeddings=12)
    settings = Settings(max_new_tokens=20)
    with pytest.warns(UserWarning, match="positions up to 12"):
        got = generate(target, HeadDrafter(head, target, Chain(2)), PROMPT, settings)
    assert got.ids == plain(target, PROMPT, settings).ids


def test_a_head_for_another_target_is_refused_with_both_numbers(target):
    sizes = target.config.to_dict()
    head = build_head(HeadConfig.for_target({**sizes, "vocab_size": 320}, "eagle1"))
    with pytest.raises(UserError, match=r"vocabulary is 320, that of .* is 300"):
        HeadDrafter(head, target, Chain())
    head = build_head(HeadConfig.for_target({**sizes, "hidden_size": 64}, "eagle1"))
    with pytest.raises(UserError, match=r"hidden size is 64, that of .* is 32"):
        HeadDrafter(head, target, Chain())


def test_an_empty_prompt_and_no_tokens_are_refused(target):
    with pytest.raises(UserError, match="prompt: got no tokens"):
        plain(target, [], Settings())
    with pytest.raises(UserError, match="max-new-tokens: got 0"):
        Settings(max_new_tokens=0)


@pytest.mark.parametrize("rows", [1, 2, 8, 9])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_the_output_map_of_a_few_rows_is_the_targets_own(rows, bias):
    states = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
    lm_head = torch.nn.Linear(32, 300, bias=bias)
    like = SimpleNamespace(
        lm_head=lm_head, output_map=torch.tanh, logits=lambda last: torch.tanh(lm_head(last))
    )
    torch.testing.assert_close(logits_of_rows(like, states), like.logits(states), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("nodes", [2, 8, 9, 20])
def test_the_law_of_a_node_is_that_of_its_text(target, nodes):
    tree = Tree(tuple(range(3, 3 + nodes)), (-1, *(node // 2 for node in range(nodes - 1))))
    with TargetReader(target, ()) as reader, torch.inference_mode():
        reader.read(PROMPT)
        last = reader.read_tree(tree).last
        for sampling in (Sampling(), Sampling(0.7, repetition_penalty=1.3)):
            law = TargetLaw(target, sampling, [*PROMPT, tree.tokens[0]], tree, last)
            for node in range(nodes):
                text = [*PROMPT, tree.tokens[0], *tree.words(node)]
                logits = target.model(torch.tensor([text])).logits[0, -1]
                wanted = distribution(penalised(logits, text, sampling.repetition_penalty), sampling)
                torch.testing.assert_close(law(node), wanted, atol=2e-5, rtol=1e-3)
                assert law.best(node) == int(penalised(logits, text, sampling.repetition_penalty).argmax())
