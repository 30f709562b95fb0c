"""Acceptance predicted without decoding equals what the chain loop measures, round for round."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from eagle_train.decoding.drafters import HeadDrafter
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.shapes import Chain
from eagle_train.heads.config import HeadConfig
from eagle_train.heads.disk import Head, build_head
from eagle_train.losses.acceptance import AcceptanceCounts, chain_hits, greedy_chain
from eagle_train.shards.batches import PackedBatch, pack
from eagle_train.shards.row_source import ShardRow
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.load import Target, load_target
from eagle_train.training.eagle1_step import Eagle1Step
from eagle_train.training.eagle3_step import Eagle3Step


def text_row(target: Target, layer_ids: tuple[int, ...], prompt: list[int], answer: list[int]) -> ShardRow:
    """One text with its features, from one forward without a cache."""
    ids = torch.tensor([*prompt, *answer])
    with FeatureTap(target, layer_ids) as tap:
        seen = tap.forward(ids[None])
    labels = seen.last[0, len(prompt) - 1 : -1]
    logits = target.logits(labels).float()
    return ShardRow(
        input_ids=ids,
        spans=[(len(prompt), len(ids) - 1)],
        aux=None if seen.aux is None else seen.aux[0],
        last_all=seen.last[0],
        label_last=labels,
        label_argmax=logits.argmax(-1),
        label_lse=logits.logsumexp(-1),
    )


def texts(target: Target, count: int, length: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and the target's greedy answers, some cut by the limit, some ended by a token."""
    draw, found = random.Random(3), []
    for number in range(count):
        prompt = [draw.randrange(target.vocab_size) for _ in range(4 + 3 * number)]
        answer = plain(target, prompt, Settings(max_new_tokens=length, eos_ids=())).ids
        found.append((prompt, answer))
    return found


def overfit(head: Head, target: Target, batch: PackedBatch, steps: int) -> None:
    """Train on the very texts, so that chains of every length are accepted."""
    kind = Eagle3Step if head.config.kind == "eagle3" else Eagle1Step
    step = kind(head, target.frozen(), **({"num_steps": 4} if kind is Eagle3Step else {}))
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-2)
    counts = torch.tensor([float((batch.room > i).sum()) for i in range(4)])
    for _ in range(steps):
        optimizer.zero_grad()
        step(batch, counts if kind is Eagle3Step else counts[:1]).loss.backward()
        optimizer.step()


def measured(
    target: Target, head: Head, gamma: int, some: list[tuple[list[int], list[int]]], eos
) -> AcceptanceCounts:
    total = AcceptanceCounts(0, 0, (0,) * (gamma + 1))
    drafter = HeadDrafter(head, target, Chain(gamma))
    for prompt, answer in some:
        got = generate(target, drafter, prompt, Settings(max_new_tokens=len(answer), eos_ids=eos))
        assert got.ids == answer
        total = total + got.counts
    return total


@pytest.mark.parametrize(("kind", "norms"), [("eagle1", False), ("eagle3", False), ("eagle3", True)])
def test_predicted_acceptance_equals_the_loops(tiny_target_dir: Path, kind: str, norms: bool):
    torch.manual_seed(0)
    target = load_target(str(tiny_target_dir), dtype="fp32", device="cpu")
    some = texts(target, 4, 32)
    eos = (some[0][1][21],)  # ends some answers inside blocks, leaves others to the limit
    some = [(p, a[: a.index(eos[0]) + 1] if eos[0] in a else a) for p, a in some]
    switches = {"fc_norm": True, "norm_output": True} if norms else {}
    sizes = {"draft_vocab_size": 200, **switches} if kind == "eagle3" else {}
    config = HeadConfig.for_target(target.config.to_dict(), kind, **sizes)
    head = build_head(config, torch.randperm(300)[:200].sort().values if kind == "eagle3" else None)
    layers = config.layers_for(target.num_layers)
    batch = pack([text_row(target, layers, *text) for text in some], kind)
    overfit(head, target, batch, 25)
    taus = []
    for gamma in range(1, 6):
        predicted = greedy_chain(chain_hits(head, target.frozen(), batch, gamma), batch)
        assert measured(target, head, gamma, some, eos) == predicted
        taus.append(predicted.tau)
        assert sum(count > 0 for count in predicted.histogram) >= 2  # both right and wrong guesses occur
    assert taus == sorted(taus)
    assert taus[-1] > 1.2
