"""What a family cannot do is refused in one line, before work that would be lost; what is slow is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle_train.decoding.batch_reader import BatchReader
from eagle_train.decoding.draft_model import DraftModel, first_layers
from eagle_train.decoding.lookahead import Lookahead
from eagle_train.decoding.loop import Settings, generate, plain
from eagle_train.decoding.prompt_lookup import PromptLookup
from eagle_train.decoding.reader import TargetReader
from eagle_train.decoding.sampling import Sampling
from eagle_train.errors import UserError
from eagle_train.regenerate.answers import AnswerSettings
from eagle_train.regenerate.regenerate import regenerate
from eagle_train.targets import checkpoint
from eagle_train.targets.capture import FeatureTap
from eagle_train.targets.load import Target, load_target
from eagle_train.targets.survey import survey

from .conftest import PROMPT
from .models import LAYERS, SIZES, family_config, random_model, save_target
from .scripted import Scripted

_EXPERTS = {"num_local_experts": 4, "intermediate_size_mlp": 48}
_MPT = {"d_model": 32, "n_heads": 4, "n_layers": 8}


def other_config(name: str, **settings):
    import transformers

    sizes = {key: SIZES[key] for key in SIZES if key not in ("max_position_embeddings", "bos_token_id")}
    return getattr(transformers, name)(**{**sizes, **settings})


def longrope(switch: int):
    rope = family_config("phi3-long").rope_parameters
    return family_config(
        "phi3-long",
        original_max_position_embeddings=switch,
        rope_parameters={**rope, "original_max_position_embeddings": switch},
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (("BloomConfig", {"n_layer": 8, "n_head": 4}), "bloom places a token by its row in the cache"),
        (("FalconConfig", {"alibi": True}), "falcon places a token by its row in the cache"),
        (("MptConfig", _MPT), "mpt places a token by its row in the cache"),
        (
            (
                "GPTNeoConfig",
                {"num_layers": 8, "num_heads": 4, "attention_types": [[["global", "local"], 4]]},
            ),
            "gpt_neo places a token by its row in the cache",
        ),
        (("Llama4TextConfig", {"head_dim": 8, **_EXPERTS}), "has layers of kind chunked_attention"),
        (("MiniMaxConfig", {"head_dim": 8, "num_local_experts": 4}), "has layers of kind linear_attention"),
        (("MambaConfig", {}), "has layers of kind linear_attention"),
    ],
    ids=["bloom", "falcon-alibi", "mpt", "gpt-neo", "llama4", "minimax", "mamba"],
)
def test_families_that_cannot_take_guesses_back_are_refused_before_decoding(config, words):
    name, settings = config
    target = Target("org/model", None, random_model(other_config(name, **settings)))
    for read in (lambda: TargetReader(target, ()), lambda: BatchReader(target, (), 4)):
        with pytest.raises(UserError) as caught:
            read()
        assert str(caught.value).startswith(f"org/model: {words}")
        assert "\n" not in str(caught.value)


def test_families_that_cannot_be_decoded_may_still_give_features():
    target = Target("llama4", None, random_model(other_config("Llama4TextConfig", head_dim=8, **_EXPERTS)))
    ids = torch.tensor([PROMPT])
    with FeatureTap(target, (2, 4, 5)) as tap, torch.no_grad():
        seen = tap.forward(ids)
        own = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    assert torch.equal(seen.aux, torch.cat([own.hidden_states[k] for k in (2, 4, 5)], dim=-1))
    assert torch.equal(target.logits(seen.last), own.logits)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            lambda: family_config("llama2", rope_parameters={"rope_type": "dynamic", "factor": 4.0}),
            "head: rope_type 'dynamic' is not supported, wanted one of default, linear,",
        ),
        (
            lambda: other_config("Gemma3nTextConfig", intermediate_size=[48] * LAYERS),
            "the target's config: intermediate_size: got [48, 48, 48, 48, 48, 48, 48, 48], wanted one number",
        ),
        (lambda: longrope(40), "rows: row "),
    ],
    ids=["dynamic", "gemma3n", "longrope"],
)
def test_families_that_no_head_can_be_trained_for_are_refused_before_extraction(
    config, words, tiny_target_dir: Path, few_conversations: Path, tmp_path: Path
):
    from eagle_train.data.prepare import prepare

    folder = tmp_path / "target"
    save_target(folder, family_config("llama2"), tiny_target_dir)
    config().save_pretrained(folder)  # the weights are never looked at
    prepare([str(few_conversations)], str(folder), tmp_path / "rows")
    with pytest.raises(UserError) as caught:
        survey(tmp_path / "rows", str(folder), None, dtype="fp32", device="cpu")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [30, 31])
def test_texts_end_where_longrope_changes_its_angles(length):
    """Up to there trees are read as the text alone; a token more is refused before anything is read."""
    target = Target("phi", None, random_model(longrope(30)))
    settings = Settings(max_new_tokens=length - len(PROMPT), eos_ids=())
    if length == 31:
        with pytest.raises(UserError, match="prompt and answer: 31 tokens, wanted at most 30"):
            plain(target, PROMPT, settings)
        return
    wanted = plain(target, PROMPT, settings).ids
    own = target.model(torch.tensor([[*PROMPT, *wanted]]), use_cache=False).logits[0]
    assert wanted == own[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    with pytest.raises(UserError, match="phi: 31 tokens, wanted at most 30"):
        target.run_body(torch.zeros(1, 31, dtype=torch.int64))
    generate(target, Scripted([*PROMPT, *wanted], ()), PROMPT, Settings(max_new_tokens=7, eos_ids=()))


def bounded(family: str, positions: int, seed: int = 0) -> Target:
    """A target whose positions end: a learned table, or RoPE whose angles change."""
    if family == "gpt2":
        config = family_config("gpt2", max_position_embeddings=positions)
    else:
        config = longrope(positions)
    return Target(family, None, random_model(config, seed))


@pytest.mark.parametrize("family", ["gpt2", "phi3-long"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7)], ids=["greedy", "sampled"])
def test_guesses_beyond_the_last_position_change_nothing(family, sampling):
    target = bounded(family, 40)
    settings = Settings(max_new_tokens=40 - len(PROMPT), eos_ids=(), sampling=sampling)
    wanted = plain(target, PROMPT, settings).ids
    short = bounded(family, 30, seed=1)  # ends earlier than the target
    drafters = {
        "lookahead": Lookahead(target, 7, 4, 7),
        "prompt-lookup": PromptLookup(8),
        "first layers": DraftModel(first_layers(target, 6), target, 6, sampling),
        "itself": DraftModel(target, target, 6, sampling),
        "shorter": DraftModel(short, target, 6, sampling),
        "scripted": Scripted([*PROMPT, *wanted, *range(20)], ()),
    }
    for name, drafter in drafters.items():
        for block in (False, True):
            made = generate(target, drafter, PROMPT, replace(settings, block=block))
            assert len(made.ids) == len(wanted), name
            assert made.ids == wanted or not sampling.greedy, name
    long = DraftModel(short, target, 6, sampling)  # a prompt beyond its positions: it never drafts
    made = generate(target, long, [*PROMPT, *wanted[:12]], Settings(max_new_tokens=8, eos_ids=()))
    assert made.accepted == [0] * 7
    with pytest.raises(UserError, match="prompt and answer: 41 tokens, wanted at most 40"):
        plain(target, PROMPT, replace(settings, max_new_tokens=41 - len(PROMPT)))


def test_answers_beyond_learned_positions_are_refused_before_any_decoding(tmp_path, tiny_target_dir):
    from eagle_train.evaluation.evaluate import evaluate
    from eagle_train.evaluation.methods import Method
    from eagle_train.evaluation.questions import Question

    save_target(tmp_path / "gpt2", family_config("gpt2", max_position_embeddings=120), tiny_target_dir)
    asked = [Question("short", "", ("Hi",)), Question("long", "", ("why is it so? " * 4,))]
    given = {"methods": [Method("lookahead"), Method("draft-model", "first:6")], "show": False}
    report = evaluate(None, tmp_path / "gpt2", asked[:1], max_new_tokens=20, dtype="fp32", **given)
    assert all(result["lossless"] for result in report["results"])
    with pytest.raises(
        UserError, match=r"^question long with --max-new-tokens 80: \d+ tokens, wanted at most 120"
    ):
        evaluate(None, tmp_path / "gpt2", asked, max_new_tokens=80, dtype="fp32", **given)


@pytest.mark.parametrize("batch", [1, 3])
def test_later_turns_end_where_the_targets_positions_do(tmp_path, tiny_target_dir, batch):
    """With their history: the answer is given fewer tokens, or the turn is left out, and both are said."""
    from eagle_train.evaluation.evaluate import evaluate
    from eagle_train.evaluation.methods import Method
    from eagle_train.evaluation.questions import Question

    save_target(tmp_path / "gpt2", family_config("gpt2", max_position_embeddings=140), tiny_target_dir)
    asked = [Question("chat", "", ("Hi",) * 4)]
    given = {"methods": [Method("prompt-lookup"), Method("draft-model", "first:6")], "show": False}
    given["batch"] = batch
    with pytest.warns(
        UserWarning, match="of 4 turns 1 left out and 1 given fewer new tokens: .* last position, 140"
    ):
        report = evaluate(None, tmp_path / "gpt2", asked, max_new_tokens=20, dtype="fp32", **given)
    assert (report["prompts"], report["turns_left_out"], report["turns_cut_short"]) == (3, 1, 1)
    assert all(result["lossless"] for result in report["results"])
    assert 2 * 20 < report["plain"]["tokens"] < 3 * 20


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("granite", {"embedding_multiplier": 2.5}),
        ("granite", {"logits_scaling": 4.0}),
        ("gemma2", {"attn_logit_softcapping": 6.0}),
        ("olmo3", {"layer_types": ["full_attention"] * LAYERS}),
        ("olmo", {"clip_qkv": 3.0}),
    ],
)
def test_the_fingerprint_sees_settings_that_change_features(family, setting):
    """The same weights under two configs are two targets."""
    prints = {
        Target(family, None, random_model(family_config(family, **s))).fingerprint for s in ({}, setting)
    }
    assert len(prints) == 2


def test_a_model_that_also_sees_is_read_as_its_text_part(tmp_path: Path):
    """Gemma 3 from 4B on: the language model is a part of the checkpoint, its config a part of the config."""
    import transformers

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=family_config("gemma3").to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=299,
        dtype="float32",
    )
    random_model(config).save_pretrained(tmp_path)
    target = load_target(tmp_path, dtype="fp32", device="cpu")
    settings = Settings(max_new_tokens=12, eos_ids=())
    wanted = plain(target, PROMPT, settings).ids
    text = torch.tensor([[*PROMPT, *wanted]])
    with FeatureTap(target, (2, 4, 5)) as tap, torch.no_grad():
        seen = tap.forward(text)
        own = target.model(input_ids=text, output_hidden_states=True, use_cache=False)
    assert torch.equal(seen.aux, torch.cat([own.hidden_states[k] for k in (2, 4, 5)], dim=-1))
    torch.testing.assert_close(target.frozen().logits(seen.last), own.logits)
    assert wanted == own.logits[0, len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert generate(target, Scripted(text[0].tolist(), (2, 5)), PROMPT, settings).ids == wanted


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"": "cpu"}, ""),
        ({"a": 0, "b": 1}, ""),
        ({"a": 0, "b": "cpu", "c": "cpu"}, "of the target's 3 parts device_map put 2 on the cpu: every"),
        ({"a": 0, "b": "cpu", "c": "disk"}, "put 1 on the cpu and 1 on the disk: every forward waits"),
        ({"a": "cpu", "b": "disk"}, "of the target's 2 parts device_map put 1 on the disk: every forward"),
    ],
)
def test_parts_on_a_slower_device_are_said(places, words, capsys):
    model = torch.nn.Module()
    model.hf_device_map = places
    checkpoint._say_spilled(model)
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == bool(words)


def test_a_target_partly_on_the_disk_is_the_same_target(tiny_target_dir: Path, tmp_path: Path, capsys):
    folder = save_target(tmp_path / "target", family_config("llama2"), tiny_target_dir)
    names = ["model.embed_tokens", "model.rotary_emb", "model.norm"]
    places = dict.fromkeys([*names, *(f"model.layers.{i}" for i in range(6))], "cpu")
    places |= dict.fromkeys(["model.layers.6", "model.layers.7", "lm_head"], "disk")
    spilled = load_target(folder, dtype="fp32", device="cpu", device_map=places)
    assert "put 3 on the disk" in capsys.readouterr().err
    assert {weight.device.type for weight in spilled.model.parameters()} == {"cpu", "meta"}
    whole = load_target(folder, dtype="fp32", device="cpu")
    assert torch.equal(spilled.frozen().lm_head, whole.frozen().lm_head)
    settings = Settings(max_new_tokens=8, eos_ids=())
    wanted = plain(whole, PROMPT, settings).ids
    assert plain(spilled, PROMPT, settings).ids == wanted
    drafter = Scripted([*PROMPT, *wanted], layer_ids=(2, 7))
    assert generate(spilled, drafter, PROMPT, settings).ids == wanted


def test_regenerated_answers_end_where_the_angles_change(tmp_path: Path, tiny_target_dir: Path) -> None:
    """Of three prompts one is past the switch, one leaves room for a short answer, one for a whole one."""
    folder = save_target(tmp_path / "target", longrope(64), tiny_target_dir)
    target = load_target(folder, dtype="fp32", device="cpu")
    questions = ["Hi", "the sea " * 5, "the sea " * 40]
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in questions]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    settings = AnswerSettings(max_new_tokens=24)
    report = regenerate(
        [str(tmp_path / "a.jsonl")],
        target,
        tmp_path / "out.jsonl",
        settings=settings,
        num_slots=2,
        show=False,
    )
    assert "room for 64" in report["failures"][0]["reason"]
    assert (report["failed"], report["answers"], report["unfinished"]) == (1, 2, 2)
    said = [json.loads(line)["messages"][-1] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    prompts = [
        target.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in questions
    ]
    assert [len(answer["answer_ids"]) for answer in said] == [24, 64 - len(prompts[1])]
    assert len(prompts[1]) > 40
