"""Batched decoding, row by row: what each prompt gets is what it would get alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eagle_train.decoding.loop import Settings, plain
from eagle_train.decoding.sampling import Sampling, SeededChance, distribution
from eagle_train.errors import UserError
from eagle_train.regenerate.answers import AnswerSettings
from eagle_train.regenerate.decode import Job, Made, decode, pick
from eagle_train.regenerate.slots import Slots
from eagle_train.targets.load import Target

GREEDY = AnswerSettings()
SAMPLED = AnswerSettings(temperature=0.8, top_p=0.7)


def jobs(count: int = 24, longest: int = 70, limit: int = 40) -> list[Job]:
    draw = random.Random(0)
    return [
        Job(
            number,
            [draw.randrange(3, 290) for _ in range(draw.choice((1, 2, 9, 30, longest)))],
            draw.randint(1, limit),
            seed=draw.randrange(1000),
        )
        for number in range(count)
    ]


def alone(target: Target, job: Job, settings: AnswerSettings) -> Made:
    """The naive twin: one prompt, one token a forward."""
    how = Settings(
        job.limit,
        Sampling(settings.temperature, top_p=settings.top_p),
        eos_ids=tuple(target.eos_ids),
        seed=job.seed,
    )
    made = plain(target, job.prompt, how)
    return Made(job.number, made.ids, made.ids[-1] in target.eos_ids)


@pytest.fixture(scope="module")
def singly(target: Target) -> dict[str, list[Made]]:
    """Every job alone, greedy and sampled."""
    return {
        name: [alone(target, job, settings) for job in jobs()]
        for name, settings in (("greedy", GREEDY), ("sampled", SAMPLED))
    }


@pytest.mark.parametrize("num_slots", [1, 3, 8, 24])
@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_batched_equals_one_by_one(
    target: Target, singly: Any, num_slots: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"greedy": GREEDY, "sampled": SAMPLED}[way]
    shrunk: list[int] = []
    shrink = Slots.shrink
    monkeypatch.setattr(Slots, "shrink", lambda self, kept: shrunk.append(len(kept)) or shrink(self, kept))
    made = list(decode(target, jobs(), settings, target.eos_ids, num_slots))
    assert sorted(made, key=lambda one: one.number) == singly[way]
    assert {one.finished for one in made} == {True, False}
    assert len({len(one.ids) for one in made}) > 5
    if 1 < num_slots < 24:
        assert num_slots in shrunk, "columns that nobody used any more were to be given back"
        assert any(count < num_slots for count in shrunk), "slots that nobody used any more, too"


def test_a_pool_wider_than_one_forward_over_prompts(
    target: Target, singly: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_train.regenerate.decode._PREFILL_TOKENS", 64)
    made = list(decode(target, jobs(), GREEDY, target.eos_ids, 16))
    assert sorted(made, key=lambda one: one.number) == singly["greedy"]


def _family(name: str, **more: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 2,
        **more,
    }
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    "build",
    [
        lambda: _family("Mistral", sliding_window=8),
        lambda: _family("Gemma2", sliding_window=8, query_pre_attn_scalar=16, attn_implementation="eager"),
        lambda: _family("Qwen3", num_key_value_heads=4),
        lambda: _family("Phi3"),
    ],
    ids=["sliding", "soft-capped", "one head a group", "fused projections"],
)
def test_families(build: Callable[[], Any]) -> None:
    target = Target("tiny", None, build())
    some = jobs(8, longest=30, limit=20)
    made = list(decode(target, some, GREEDY, (2,), 3))
    assert sorted(made, key=lambda one: one.number) == [alone(target, job, GREEDY) for job in some]


def test_layers_with_a_running_state_are_refused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.config, "layer_types", ["linear_attention"] * 4, raising=False)
    with pytest.raises(UserError, match=r"layers of kind linear_attention.*--server URL"):
        list(decode(target, jobs(1), GREEDY, (), 1))


def test_an_answer_ends_before_a_choice_that_is_too_close(target: Target) -> None:
    for job in jobs(8):
        whole = alone(target, job, GREEDY)
        logits = target.logits(target.run_body(torch.tensor([[*job.prompt, *whole.ids]])))[0].float()
        best = logits[len(job.prompt) - 1 : -1].topk(2).values
        gaps = (best[:, 0] - best[:, 1]).tolist()
        ordered = sorted([0.0, *gaps, 1e9])
        widest = max(range(1, len(gaps)), key=lambda i: ordered[i + 1] - ordered[i]) if len(gaps) > 1 else 0
        for below in (0, widest, len(gaps)):  # limits with room to both sides
            limit = (ordered[below] + ordered[below + 1]) / 2
            (made,) = decode(target, [job], AnswerSettings(min_gap=limit), target.eos_ids, 1)
            kept = next((place for place, gap in enumerate(gaps) if gap < limit), len(gaps))
            assert made.ids == whole.ids[:kept]
            assert made.finished == (whole.finished and kept == len(gaps))


def test_draws_follow_the_law_after_temperature_and_top_p() -> None:
    """Every stretch of the unit interval gives its token: the naive twin inverts the same law."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 3
    sampling = Sampling(SAMPLED.temperature, top_p=SAMPLED.top_p)
    for seed in range(50):
        chances = [torch.Generator().manual_seed(seed + row) for row in range(4)]
        twins = [SeededChance(seed + row) for row in range(4)]
        for _ in range(5):
            drawn = pick(logits, chances, sampling)
            assert drawn == [
                twin.choose(distribution(row, sampling)) for twin, row in zip(twins, logits, strict=True)
            ]


def test_a_draw_at_the_very_end_is_the_last_possible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5, -30.0]])
    one = torch.tensor(1.0, dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: one)
    assert pick(logits, [torch.Generator()], Sampling(1.0, top_p=0.9)) == [2]
