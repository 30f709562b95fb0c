"""Chat templates: the tokenizer's own, the built-in ones, or a file; compiled once, rendered often.

Rendering here equals ``tokenizer.apply_chat_template(..., tokenize=False)``, with one difference:
templates that write today's date get a fixed one, so that the same input gives the same rows.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_train.data.records import Message
from eagle_train.errors import UserError, nearest
from eagle_train.provenance import text_fingerprint

# FastChat's vicuna_v1.1: one space between turns, the answer closed by the end-of-sequence token.
_VICUNA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}"
    '{% set system = "A chat between a curious user and an artificial intelligence assistant. The assistant '
    "gives helpful, detailed, and polite answers to the user's questions.\" %}{% set turns = messages %}"
    "{% endif %}"
    "{{ system + ' ' }}"
    "{% for message in turns %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('vicuna: user and assistant turns must alternate') }}"
    "{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('vicuna: no such role: ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

# Llama-2-chat: every exchange opens with the begin-of-sequence token; no default system text.
_LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
    "{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('llama-2: user and assistant turns must alternate') }}"
    "{% elif message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('llama-2: no such role: ' + message['role']) }}{% endif %}"
    "{% endfor %}"
)

BUILTIN = {"vicuna": _VICUNA, "llama-2": _LLAMA_2}

_FIXED_DATE = datetime.datetime(2025, 1, 1)

Arguments = Mapping[str, Any]
"""What the user hands to a template by name, such as ``enable_thinking``."""

_OWN_NAMES = ("messages", "tools", "documents", "add_generation_prompt")


class TemplateRefused(Exception):
    """The template raised on these messages; the text says why. Counted, never shown as a traceback."""


class ChatTemplate:
    """One compiled template with the special tokens it may write and the user's `arguments`.

    `name` is ``own``, a built-in name, or the file's name; `fingerprint` covers the text alone. It travels
    to another process, where it is compiled again.
    """

    def __init__(
        self, text: str, name: str, special_tokens: dict[str, str], arguments: Arguments | None = None
    ) -> None:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self.text, self.name, self.arguments = text, name, dict(arguments or {})
        self._parts = (text, name, special_tokens, self.arguments)
        self.fingerprint = text_fingerprint(text)
        self._context: dict[str, Any] = {"documents": None, "strftime_now": _FIXED_DATE.strftime}
        self._context |= {**special_tokens, **self.arguments}
        try:
            self._compiled = _compile_jinja_template(text)
        except TemplateError as error:
            raise UserError(f"chat template {name}: not valid Jinja ({error}); correct it") from error

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[Any, ...]]:
        return ChatTemplate, self._parts

    def render(
        self, messages: list[Message], generation_prompt: bool = False, tools: Sequence[Message] = ()
    ) -> str:
        """Return the text of `messages`, ending in the generation prompt when asked.

        Raises TemplateRefused where the template does not take these messages.
        """
        from jinja2.exceptions import TemplateError

        fresh = [dict(message) for message in messages]
        try:
            return self._compiled.render(
                messages=fresh,
                tools=list(tools) or None,
                add_generation_prompt=generation_prompt,
                **self._context,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TemplateRefused(" ".join(str(error).split())[:120] or type(error).__name__) from error


def parse_arguments(given: Sequence[str]) -> dict[str, Any]:
    """Return the values of ``NAME=VALUE`` texts; a VALUE that is JSON (true, 3, null) is read as that.

    Raises UserError for a text of another form and for a name that is not the user's to give.
    """
    found: dict[str, Any] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise UserError(f"--template-arg {text}: wanted NAME=VALUE, such as enable_thinking=false")
        if name in _OWN_NAMES:
            raise UserError(f"--template-arg {text}: {name} is given by eagle itself; leave it out")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def load_template(
    tokenizer: Any, chat_template: str | None = None, arguments: Arguments | None = None
) -> ChatTemplate:
    """Return the template to use: the tokenizer's own, or `chat_template` (built-in name or file).

    `arguments` are handed to every rendering by name.

    Raises UserError when there is none, with the ways to give one.
    """
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    if chat_template is None:
        return ChatTemplate(_own_text(tokenizer), "own", special, arguments)
    if chat_template in BUILTIN:
        return ChatTemplate(BUILTIN[chat_template], chat_template, special, arguments)
    path = Path(chat_template)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(
            f"--chat-template {chat_template}: no such file, and the built-in templates are "
            f"{', '.join(BUILTIN)}{nearest(chat_template, BUILTIN)}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--chat-template {chat_template}: cannot be read ({error})") from error
    return ChatTemplate(text, path.name, special, arguments)


def _own_text(tokenizer: Any) -> str:
    try:
        text = tokenizer.get_chat_template()
    except ValueError as error:
        if isinstance(getattr(tokenizer, "chat_template", None), dict):
            names = ", ".join(sorted(tokenizer.chat_template))
            raise UserError(
                f"the tokenizer has several chat templates ({names}) and no default; save one as a file "
                "and give it with --chat-template FILE"
            ) from error
        raise UserError(
            "the tokenizer has no chat template; give one with --chat-template FILE (a Jinja file), or a "
            f"built-in one: --chat-template {' | '.join(BUILTIN)}"
        ) from error
    return str(text)
