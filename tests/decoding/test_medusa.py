"""Medusa heads in the loop: the target's own text, the prediction's figures, a tree that is the best."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from eagle_train.decoding.loop import Settings, generate
from eagle_train.decoding.medusa import MedusaDrafter, usual_tree
from eagle_train.decoding.sampling import Sampling
from eagle_train.decoding.shapes import Chain, Dynamic, Static
from eagle_train.decoding.trees import StaticShape, best_paths
from eagle_train.errors import UserError
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import build_head, load_head, save_head
from eagle_train.losses.acceptance import chain_hits, greedy_chain
from eagle_train.shards.batches import pack
from eagle_train.targets.load import Target, load_target
from eagle_train.training.medusa_step import MedusaStep

from .test_prediction import text_row, texts
from .toys import law_of


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(str(tiny_target_dir), dtype="fp32", device="cpu")


def medusa_head(target: Target, heads: int = 3, draft: int | None = None):
    config = HeadConfig.for_target(
        target.config.to_dict(), "medusa", medusa_heads=heads, draft_vocab_size=draft
    )
    draft_ids = (
        None if draft is None else torch.arange(0, target.vocab_size, target.vocab_size // draft)[:draft]
    )
    head = build_head(config, draft_ids)
    with torch.no_grad():
        for weight in head.lm_heads.parameters():
            weight.copy_(target.frozen().lm_head[head.draft_ids])
    return head


def test_predicted_acceptance_equals_the_loops(target):
    torch.manual_seed(0)
    some = texts(target, 4, 24)
    head = medusa_head(target)
    batch = pack([text_row(target, (), *text) for text in some], "medusa")
    step, optimizer = MedusaStep(head, target.frozen()), torch.optim.AdamW(head.parameters(), lr=1e-2)
    counts = torch.tensor([float((batch.room > i).sum()) for i in range(3)])
    for _ in range(40):  # by heart, so that chains of every length are accepted
        optimizer.zero_grad()
        step(batch, counts).loss.backward()
        optimizer.step()
    for gamma in (1, 2, 3):
        predicted = greedy_chain(chain_hits(head, target.frozen(), batch, gamma), batch)
        drafter, measured = MedusaDrafter(head, target, Chain(gamma)), None
        for prompt, answer in some:
            made = generate(target, drafter, prompt, Settings(max_new_tokens=len(answer), eos_ids=()))
            assert made.ids == answer
            measured = made.counts if measured is None else measured + made.counts
        assert (measured.rounds, measured.tokens) == (predicted.rounds, predicted.tokens)
        assert measured.tau > 1.3
    tree = MedusaDrafter(head, target)
    for prompt, answer in some:
        made = generate(target, tree, prompt, Settings(max_new_tokens=len(answer), eos_ids=()))
        assert made.ids == answer


@pytest.mark.parametrize("draft", [None, 100])
def test_a_node_is_its_heads_guess_of_its_rank(target, draft):
    head = medusa_head(target, draft=draft)
    paths = ((0,), (1,), (4,), (0, 0), (0, 2), (4, 1), (4, 1, 3))
    drafter = MedusaDrafter(head, target, Static(paths))
    trees, propose = [], drafter.propose
    drafter.propose = lambda: trees.append(propose()) or trees[-1]
    prompt = [5, 17, 250, 33]
    made = generate(target, drafter, prompt, Settings(max_new_tokens=12, eos_ids=()))
    text = [*prompt, made.ids[0]]
    shape = StaticShape.from_paths(paths)
    for tree, accepted in zip(trees, made.accepted, strict=True):
        with torch.no_grad():
            state = target.run_body(torch.tensor([text[:-1]]))[0, -1]  # f[b-1]; the root x[b] is not read
        assert tree.tokens[0] == text[-1]
        assert tree.parents == shape.parents
        for node in range(1, len(tree)):
            logits = head.lm_heads[shape.depths[node] - 1].weight @ state  # blocks are 0 at the start
            ranked = head.draft_ids[logits.argsort(descending=True)]
            assert tree.tokens[node] == ranked[shape.ranks[node]]
        text = [*prompt, *made.ids][: len(text) + accepted + 1]


def test_the_loops_law_is_the_targets(law_error, toy):
    sampling, settings_length = Sampling(0.9, top_k=2), 3
    drafter = MedusaDrafter(medusa_head(toy, 2), toy, Static(((0,), (1,), (0, 0), (1, 1))))
    settings = Settings(max_new_tokens=settings_length, sampling=sampling, eos_ids=())
    law = law_of(lambda chance: tuple(generate(toy, drafter, [1, 4, 2], settings, chance=chance).ids))
    assert law_error(law, [1, 4, 2], settings_length, sampling) < 2e-6


def test_a_head_survives_the_disk(target, tmp_path):
    head = medusa_head(target, draft=100)
    save_head(head, tmp_path / "head")
    again = load_head(tmp_path / "head")
    assert again.config == head.config
    for ours, theirs in zip(again.parameters(), head.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(again.draft_ids, head.draft_ids)


def test_the_best_paths_are_those_likeliest_to_stand():
    rates = [[0.5, 0.3, 0.1], [0.6, 0.1, 0.05], [0.4, 0.3, 0.2]]
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]

    def worth(path):
        return math.prod(rates[depth][rank] for depth, rank in enumerate(path))

    for guesses in (1, 5, 12, 39):
        paths = best_paths(rates, guesses)
        assert sum(map(worth, paths)) == pytest.approx(sum(sorted(map(worth, every), reverse=True)[:guesses]))
        StaticShape.from_paths(paths)  # every parent is there
    assert len(best_paths(rates, 100)) == 39
    assert len(usual_tree(4).paths) == 63


def test_drafts_that_medusa_cannot_make_are_refused(target):
    head = medusa_head(target, 2)
    for shape, words in (
        (Chain(3), "a draft of depth 3 and 1 ranks: the head has 2 Medusa heads"),
        (Dynamic(12, 3, 2), "a dynamic draft: Medusa heads draft a chain or a static tree"),
        (Chain(2, stop=0.5), "a chain draft: Medusa heads"),
    ):
        with pytest.raises(UserError, match=words):
            MedusaDrafter(head, target, shape)
