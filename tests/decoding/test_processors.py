"""The target's own processors of logits, in chains and trees: what transformers' generate makes of them."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import GenerationConfig

from eagle_train.decoding.batch import Job, generate_together
from eagle_train.decoding.law import own_law
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.processors import BY_TEXT, OF_THE_LAW, REFUSED, own_processors
from eagle_train.decoding.sampling import Sampling, SeededChance
from eagle_train.decoding.shapes import Chain, Static
from eagle_train.errors import UserError

from .test_sampled_loop import PROMPT, SHAPES, toy_drafter
from .toys import law_of

EOS, LENGTH = 5, 3
NODES = Static(((0,), (0, 0)))
CASES = {
    "sequence_bias": [[[1, 4], 3.0], [[2], -1.0]],
    "repetition_penalty": 1.7,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[3], [1, 4], [4, 4]],
    "min_length": 9,
    "min_new_tokens": 7,
    "forced_bos_token_id": 3,
    "exponential_decay_length_penalty": [1, 4.0],
    "suppress_tokens": [0, 3],
    "begin_suppress_tokens": [3, 0],
    "min_p": 0.6,
    "typical_p": 0.4,
    "epsilon_cutoff": 0.15,
    "eta_cutoff": 0.3,
}


def config(**values) -> GenerationConfig:
    return GenerationConfig(eos_token_id=EOS, pad_token_id=0, **values)


def settings(sampling: Sampling, length: int = LENGTH) -> Settings:
    return Settings(max_new_tokens=length, sampling=sampling, eos_ids=(EOS,))


def own(values: dict, **sampling) -> Sampling:
    return Sampling(**sampling, processors=own_processors(config(**values), (EOS,), "toy"))


@torch.inference_mode()
def by_transformers(toy, generation: GenerationConfig, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The law of texts of up to LENGTH tokens, each step's by the list that transformers' generate builds."""
    generation._eos_token_tensor = torch.tensor([EOS])
    made = toy.model._get_logits_processor(generation, input_ids_seq_length=len(prompt), device="cpu")
    law, ended = {(): 1.0}, {}
    for _ in range(LENGTH):
        grown = {}
        for text, probability in law.items():
            ids = torch.tensor([[*prompt, *text]])
            scores = made(ids, toy.model(ids).logits[:, -1].float())
            for token, p in enumerate(scores.softmax(-1)[0].tolist()):
                (ended if token == EOS else grown)[(*text, token)] = probability * p
        law = grown
    return {**ended, **law}


def test_every_processor_of_the_text_or_the_law_has_its_case():
    assert set(CASES) == {*BY_TEXT, *OF_THE_LAW}


@pytest.mark.parametrize("name", BY_TEXT)
def test_greedy_texts_are_those_of_transformers_generate(toy, name):
    changed = 0
    for prompt in (PROMPT, [2]):
        given = config(max_new_tokens=8, do_sample=False, **{name: CASES[name]})
        whole = toy.model.generate(torch.tensor([prompt]), generation_config=given)
        wanted = whole[0, len(prompt) :].tolist()
        sampling = own({name: CASES[name]})
        assert plain(toy, prompt, settings(sampling, 8)).ids == wanted
        for shape in ("chain", "dynamic"):
            drafter = toy_drafter(toy, SHAPES[shape], sampling, 4)
            assert generate(toy, drafter, prompt, settings(sampling, 8)).ids == wanted
        jobs = [Job(prompt, toy_drafter(toy, Chain(2), sampling, 4), SeededChance(0)) for _ in range(2)]
        together = generate_together(toy, jobs, settings(sampling, 8), 2)
        assert [made.ids for made in together] == [wanted, wanted]
        changed += wanted != plain(toy, prompt, settings(Sampling(), 8)).ids
    assert changed, "the case changes no text"


@pytest.mark.parametrize(("name", "shape"), [*((name, NODES) for name in CASES), ("all", Chain(2))])
def test_the_law_kept_is_the_one_after_the_targets_own_processors(toy, name, shape):
    chosen = ("no_repeat_ngram_size", "repetition_penalty", "min_new_tokens", "min_p")
    short = {**CASES, "min_length": 5, "min_new_tokens": 2}
    values = {key: short[key] for key in (chosen if name == "all" else [name])}
    prompt, top_k = [2] if name == "forced_bos_token_id" else PROMPT, 2 if name == "all" else 0
    sampling = own(values, temperature=0.9, top_k=top_k)
    drafter = toy_drafter(toy, shape, sampling, 4)
    law = law_of(lambda chance: tuple(generate(toy, drafter, prompt, settings(sampling), chance=chance).ids))

    def error(given: dict) -> float:
        wanted = by_transformers(toy, config(do_sample=True, temperature=0.9, top_k=top_k, **given), prompt)
        return max(abs(law.get(text, 0.0) - wanted.get(text, 0.0)) for text in {*law, *wanted})

    assert error(values) < 3e-6
    assert error({}) > 1e-3


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_tree_can_honour_is_refused_by_name(name):
    given = config()
    setattr(given, name, {"forced_eos_token_id": 5, "remove_invalid_values": True}.get(name, 0.5))
    with pytest.raises(UserError, match=f"toy: its generation_config sets {name} to .*--no-processors"):
        own_processors(given, (EOS,), "toy")


def test_a_target_that_sets_none_costs_nothing(toy):
    sampling = own_law(toy, Sampling(0.7))
    assert sampling.processors is None
    assert not sampling.reads_text
    values = {"repetition_penalty": 1.0, "typical_p": 1.0, "no_repeat_ngram_size": 0, "temperature": 0.3}
    assert own_processors(config(**values), (EOS,), "toy") is None
    assert own({"min_p": 0.1}).reads_text is False


def test_a_penalty_asked_for_takes_the_place_of_the_targets(toy, monkeypatch):
    given = config(repetition_penalty=1.3, suppress_tokens=[0])
    monkeypatch.setattr(toy.model, "generation_config", given)
    assert own_law(toy, Sampling()).processors.values == {"repetition_penalty": 1.3, "suppress_tokens": [0]}
    assert own_law(toy, Sampling(repetition_penalty=2.0)).processors.values == {"suppress_tokens": [0]}


BAD = {
    "repetition_penalty": ["a", -1.0, math.nan, math.inf, 0, [1], True],
    "min_length": ["x", 3.5, -4],
    "min_new_tokens": [-1],
    "no_repeat_ngram_size": ["2", -2, 1.5],
    "bad_words_ids": [[5], [[9999]], [[-5]], [[]], "x"],
    "sequence_bias": [{"5": 1}, [[[9999], 2.0]], [[[2], math.nan]], [[[2], 1]], 3],
    "suppress_tokens": [["a"], [99999], [True], 2],
    "begin_suppress_tokens": [[-1]],
    "exponential_decay_length_penalty": [3, [3], ["3", 1.0], [3, 0]],
    "forced_bos_token_id": [9999, "0"],
    "min_p": [3, "q", -0.1],
    "typical_p": ["q", 0, 1.5],
    "epsilon_cutoff": [5, 1],
    "eta_cutoff": ["x", -1],
}


@pytest.mark.parametrize("name", BAD)
def test_a_value_that_no_processor_takes_is_refused_in_a_line(name):
    for value in BAD[name]:
        with pytest.raises(UserError) as caught:
            own_processors({name: value}, (EOS,), "toy", 8)
        words = f"toy: generation_config.json: {name}: got {value!r}, wanted "
        assert str(caught.value).startswith(words)
        assert "; mend the file, or give --no-processors" in str(caught.value)
    assert own_processors({name: CASES[name]}, (EOS,), "toy", 8).values == {name: CASES[name]}


def test_what_transformers_itself_does_not_take_is_refused_in_a_line(monkeypatch):
    def refusing(_):
        raise ValueError("never")

    monkeypatch.setattr("transformers.generation.logits_process.NoRepeatNGramLogitsProcessor", refusing)
    with pytest.raises(UserError, match=r"ngram_size: got 2, wanted what transformers takes \(never\)"):
        own_processors({"no_repeat_ngram_size": 2}, (EOS,), "toy")


def test_token_0_may_be_forced():
    assert own_processors({"forced_bos_token_id": 0}, (EOS,), "toy", 8).values == {"forced_bos_token_id": 0}
