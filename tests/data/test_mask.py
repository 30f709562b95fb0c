"""Masks supervise exactly the answers and their end of turn, whatever the template does."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_train.data.conversations import read_record
from eagle_train.data.encoding import EncoderSpec
from eagle_train.data.mask import EncodedRow, Encoder, cut
from eagle_train.data.records import Skip
from eagle_train.data.templates import load_template

from .talks import TWO_TURNS, encoder_of, rendered, supervised, talk


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("chatml", "<|im_end|>"),
        ("llama-3", "<|eot_id|>"),
        ("mistral", "</s>"),
        ("gemma", "<end_of_turn>"),
        ("dated", "<|im_end|>"),
        ("phi", "<|end|>"),
    ],
)
def test_mask_supervises_exactly_the_answers_and_their_end_of_turn(
    byte_level: Any, name: str, end: str
) -> None:
    tokenizer = byte_level(name)
    conversation = talk(*TWO_TURNS)
    (row,) = encoder_of(tokenizer).rows(conversation)
    first_word = {"mistral": " Paris"}.get(name, "Paris")
    space = first_word[: len(first_word) - 5]
    assert supervised(tokenizer, row) == [
        f"{space}Paris is the capital.{end}",
        f"{space}I am fine.{end}",
    ]
    for first, last in row.spans:
        assert row.input_ids[last] == tokenizer.convert_tokens_to_ids(end)
        assert tokenizer.decode(row.input_ids[first]).strip() in ("Paris", "I")
    # Before the first answer stands the very prompt of inference; the whole row is the whole rendering.
    # (The library writes today's date; and this tokenizer joins the two line breaks of a Llama-3 header
    # only as long as no answer follows, so that its whole rendering begins with another prompt.)
    messages = conversation.messages()
    if name != "dated":
        assert row.input_ids[: row.spans[0][0]] == rendered(tokenizer, messages[:1], True)
    if name not in ("dated", "llama-3"):
        assert row.input_ids[: row.spans[1][0]] == rendered(tokenizer, messages[:3], True)
        assert row.input_ids == rendered(tokenizer, messages, False)


@pytest.mark.parametrize("name", ["vicuna", "llama-2"])
def test_built_in_templates_on_a_tokenizer_that_begins_texts_with_a_space(
    sentence_piece: Any, name: str
) -> None:
    tokenizer = sentence_piece()
    (row,) = encoder_of(tokenizer, name).rows(talk(("system", "Be kind."), *TWO_TURNS))
    end, word = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids
    for first, last in row.spans:
        assert row.input_ids[last] == end
        assert end not in row.input_ids[first:last]
    assert row.input_ids[row.spans[0][0]] == word("▁Paris")
    assert row.input_ids[row.spans[1][0]] == word("▁I")
    texts = [text.strip() for text in supervised(tokenizer, row)]
    assert [text.removesuffix("</s>").strip() for text in texts] == ["Paris is the capital.", "I am fine."]
    # One BOS where the format has one; Llama-2 opens every exchange with one.
    assert row.input_ids.count(tokenizer.bos_token_id) == (1 if name == "vicuna" else 2)
    whole = tokenizer.decode(row.input_ids)
    assert whole.count("Be kind.") == 1
    assert "curious user" not in whole


def test_vicuna_equals_its_format_to_the_letter(sentence_piece: Any) -> None:
    template = load_template(sentence_piece(), "vicuna")
    system = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
        "helpful, detailed, and polite answers to the user's questions."
    )
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert template.render([*messages, messages[0]], True) == (
        f"<s>{system} USER: Hi ASSISTANT: Hello</s>USER: Hi ASSISTANT:"
    )


def test_llama_2_equals_its_format_to_the_letter(sentence_piece: Any) -> None:
    template = load_template(sentence_piece(), "llama-2")
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    assert template.render(messages, True) == (
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST] Hello </s><s>[INST] Bye [/INST]"
    )


@pytest.mark.parametrize("name", ["llama-3", "mistral", "gemma"])
def test_exactly_one_bos(byte_level: Any, sentence_piece: Any, name: str) -> None:
    for tokenizer in (byte_level(name), sentence_piece(name)):
        for row in encoder_of(tokenizer).rows(talk(*TWO_TURNS)):
            assert row.input_ids[0] == tokenizer.bos_token_id
            assert row.input_ids.count(tokenizer.bos_token_id) == 1


def test_the_records_system_text_replaces_the_default_and_appears_once(byte_level: Any) -> None:
    tokenizer = byte_level("chatml")
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    system = {"from": "system", "value": "Speak French."}
    as_field = {"system": "Speak French.", "conversations": turns}
    as_turn = {"conversations": [system, *turns]}
    as_both = {"system": "Speak French.", "conversations": [system, *turns]}
    for record in (as_field, as_turn, as_both):
        (row,) = encoder_of(tokenizer).rows(read_record(record, "test"))
        text = tokenizer.decode(row.input_ids)
        assert text.count("Speak French.") == 1
        assert "Be kind." not in text
        assert supervised(tokenizer, row) == ["Hello<|im_end|>"]


def test_a_token_never_reaches_over_the_border(byte_level: Any) -> None:
    """The answer begins with line breaks that would merge with the header's in a text tokenised whole."""
    tokenizer = byte_level("chatml")
    conversation = talk(("user", "Hi"), ("assistant", "\n\nHello"))
    prompt = rendered(tokenizer, conversation.messages()[:1], True)
    whole = rendered(tokenizer, conversation.messages(), False)
    assert whole[: len(prompt)] != prompt, "the case must be one where tokens merge"
    (row,) = encoder_of(tokenizer).rows(conversation)
    ((first, last),) = row.spans
    answer = tokenizer("\n\nHello", add_special_tokens=False)["input_ids"]
    assert row.input_ids[:first] == prompt
    assert row.input_ids[first : last + 1] == [*answer, tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_a_template_that_closes_answers_with_no_token(byte_level: Any) -> None:
    tokenizer = byte_level("plain")
    encoder = encoder_of(tokenizer)
    (row,) = encoder.rows(talk(*TWO_TURNS))
    assert encoder.end_of_turn is None
    assert supervised(tokenizer, row) == [" Paris is the capital.", " I am fine."]
    assert (
        tokenizer.decode(row.input_ids[: row.spans[0][0]])
        == "USER: What is the capital of France?\nASSISTANT:"
    )


def test_a_text_that_begins_with_a_mark_of_the_tokenizer_gets_none_behind_a_prompt(
    sentence_piece: Any,
) -> None:
    """The generation prompt ends in a space that would join the answer's word in a text tokenised whole."""
    tokenizer = sentence_piece("plain")
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
    conversation = talk(("user", "Hi"), ("assistant", "Paris"))
    prompt = rendered(tokenizer, conversation.messages()[:1], True)
    (row,) = encoder_of(tokenizer).rows(conversation)
    assert row.input_ids[: row.spans[0][0]] == prompt
    assert tokenizer.decode(row.input_ids) == "USER: Hi\nASSISTANT: Paris\n"


def test_generation_marks_in_a_template_change_nothing(byte_level: Any) -> None:
    plain, marked = byte_level("chatml"), byte_level("chatml")
    marked.chat_template = marked.chat_template.replace(
        "{{ '<|im_start|>' + message['role']", "{% generation %}{{ '<|im_start|>' + message['role']"
    ).replace("'<|im_end|>\n' }}{% endfor %}", "'<|im_end|>\n' }}{% endgeneration %}{% endfor %}")
    assert "endgeneration" in marked.chat_template
    assert encoder_of(marked).rows(talk(*TWO_TURNS)) == encoder_of(plain).rows(talk(*TWO_TURNS))


def test_a_template_that_wants_a_system_text_is_usable(byte_level: Any) -> None:
    tokenizer = byte_level("chatml")
    tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system text') }}{% endif %}"
        + tokenizer.chat_template
    )
    encoder = encoder_of(tokenizer)
    assert encoder.end_of_turn == (tokenizer.convert_tokens_to_ids("<|im_end|>"), "<|im_end|>")
    (row,) = encoder.rows(talk(("system", "Be kind."), *TWO_TURNS))
    assert len(row.spans) == 2


def test_end_of_turn_is_found_by_rendering(byte_level: Any) -> None:
    for name, text in [("chatml", "<|im_end|>"), ("gemma", "<end_of_turn>"), ("mistral", "</s>")]:
        tokenizer = byte_level(name)
        assert encoder_of(tokenizer).end_of_turn == (tokenizer.convert_tokens_to_ids(text), text)


def test_templates_refuse_and_the_reason_is_theirs(byte_level: Any) -> None:
    with pytest.raises(Skip, match="System role not supported"):
        encoder_of(byte_level("gemma")).rows(talk(("system", "Be kind."), *TWO_TURNS))
    with pytest.raises(Skip, match="roles must alternate"):
        encoder_of(byte_level("mistral")).rows(talk(("user", "Hi"), ("tool", "42"), ("assistant", "Hello")))


def test_a_turn_the_template_leaves_out_skips_the_record(byte_level: Any) -> None:
    with pytest.raises(Skip, match="drops or changes a tool turn"):
        encoder_of(byte_level("dated")).rows(
            talk(("user", "Hi"), ("assistant", "Wait"), ("tool", "42"), ("assistant", "Hello"))
        )


def test_an_answer_that_writes_the_end_of_turn_token_is_skipped(byte_level: Any) -> None:
    with pytest.raises(Skip, match="end-of-turn token in its middle"):
        encoder_of(byte_level("chatml")).rows(talk(("user", "Hi"), ("assistant", "a<|im_end|>b")))


def test_dates_in_templates_are_fixed(byte_level: Any) -> None:
    (row,) = encoder_of(byte_level("dated")).rows(talk(*TWO_TURNS))
    assert "Today is 01 Jan 2025" in byte_level("dated").decode(row.input_ids)


def test_cut_is_on_the_right_in_tokens() -> None:
    row = EncodedRow(list(range(20)), [(3, 6), (7, 9), (12, 18)])
    assert cut(row, 20) == (row, [])
    same, lost = cut(row, 19)
    assert (same.input_ids, same.spans, lost) == (list(range(19)), row.spans, [])
    shortened, lost = cut(row, 15)
    assert (shortened.input_ids[-1], shortened.spans, lost) == (14, [(3, 6), (7, 9), (12, 14)], [(12, 18)])
    dropped, lost = cut(row, 11)
    assert (dropped.input_ids[-1], dropped.spans, lost) == (9, [(3, 6), (7, 9)], [(12, 18)])
    nothing, _ = cut(row, 3)
    assert (nothing.input_ids, nothing.spans) == ([], [])


def test_rendering_equals_the_librarys(byte_level: Any) -> None:
    for name in ("chatml", "llama-3", "qwen-thinking", "opens-thinking", "mistral", "gemma", "phi"):
        tokenizer = byte_level(name)
        messages = talk(*TWO_TURNS).messages()
        for prompt in (True, False):
            assert load_template(tokenizer).render(messages, prompt) == tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )


pieces = st.sampled_from([*"ab \n\t.,?é界🙂", "Hello", "Paris", " the", "<|", "\n\n"])
texts = st.lists(pieces, min_size=1, max_size=20).map("".join).filter(str.strip)
talks = st.lists(st.tuples(texts, texts), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(texts | st.sampled_from(["<|im_end|>", "<s>", "<|end|>", "<|end|>\n"]), max_size=8))
def test_history_by_its_parts_has_the_tokens_of_the_whole(
    byte_level: Any, sentence_piece: Any, parts: list[str]
) -> None:
    for tokenizer, by_parts in (
        (byte_level("chatml"), True),
        (byte_level("phi"), False),
        (sentence_piece("chatml"), False),
    ):
        tokens = encoder_of(tokenizer).tokens
        assert tokens.by_parts == by_parts
        assert tokens.ids_of_history("".join(parts)) == tokens.ids("".join(parts))


@pytest.mark.parametrize("name", ["chatml", "qwen-thinking", "mistral", "phi", "plain"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(exchanges=talks)
def test_any_text_is_supervised_whole_and_nothing_else(
    byte_level: Any, name: str, exchanges: list[tuple[str, str]]
) -> None:
    tokenizer = byte_level(name)
    encoder = encoder_of(tokenizer)
    turns = [turn for question, answer in exchanges for turn in (("user", question), ("assistant", answer))]
    conversation = talk(*turns)
    rows = encoder.rows(conversation)
    found = [text for row in rows for text in supervised(tokenizer, row)]
    ends = encoder.end_of_turn
    answers = [turn.content for turn in conversation.turns if turn.role == "assistant"]
    assert len(found) == len(answers)
    for text, answer in zip(found, answers, strict=True):
        shown = text.removesuffix(ends[1]) if ends else text
        assert shown == (" " + answer if name in ("mistral", "plain") else answer)
    for row in rows:
        assert row.spans[0][0] > 0
        for (_, last), (first, _) in zip(row.spans, row.spans[1:], strict=False):
            assert first > last
        head = rendered(tokenizer, conversation.messages()[:1], True)
        assert name == "plain" or row.input_ids[: len(head)] == head or len(rows) > 1


def test_what_makes_an_encoder_travels_to_another_process(byte_level: Any) -> None:
    tokenizer = byte_level("chatml")
    template = load_template(tokenizer, arguments={"mood": "calm"})
    spec = pickle.loads(pickle.dumps(EncoderSpec(tokenizer, template, 100)))
    assert (spec.template.name, spec.template.arguments) == ("own", {"mood": "calm"})
    assert spec.template.fingerprint == template.fingerprint
    found = Encoder(spec.tokenizer, spec.template).rows(talk(*TWO_TURNS))
    assert found == encoder_of(tokenizer).rows(talk(*TWO_TURNS))
