"""Loading the target's tokenizer from a hub id, a directory or a .gguf file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_train import hub
from eagle_train.data.config_file import check_config_file
from eagle_train.data.gguf_file import gguf_source
from eagle_train.errors import UserError
from eagle_train.folders import refuse_as_target


def load_tokenizer(target: str, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of `target`: a hub id, a directory, or a ``.gguf`` file.

    Nothing is fetched when ``HF_HUB_OFFLINE=1``. Raises UserError when there is no tokenizer to load.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    path = Path(target)
    arguments: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    name = target
    if target.endswith(".gguf"):
        name, source = gguf_source(target)
        arguments.update(source)
    elif not path.exists() and _looks_like_path(target):
        raise UserError(f"{target}: no such directory; give a hub id, a directory or a .gguf file")
    elif path.is_file():
        raise UserError(f"{target}: is a file; give a hub id, a directory or a .gguf file")
    else:
        refuse_as_target(target)
    with hub.asked_once(name) as silent:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, **arguments)
            if len(tokenizer.get_vocab()) <= len(tokenizer.added_tokens_decoder):  # made up from nothing
                raise ValueError("its files hold no vocabulary")
            return tokenizer
        except StrictDataclassError as error:  # some tokenizers are found through the model's config
            raise UserError(f"{target}: config.json: {error}; correct it, or fetch it again") from error
        except (
            OSError,
            ValueError,
            ImportError,
            KeyError,
            AttributeError,
            TypeError,
            ArithmeticError,
        ) as error:
            if (config := path / "config.json").is_file():
                check_config_file(config, target)
            reason = silent or (str(error).strip() or type(error).__name__).splitlines()[0]
            if path.is_dir() and not any(any(path.glob(name)) for name in _FILES):
                reason = "it holds none of its files"
            elif silent is None and hub.is_kept_offline(error):
                reason = hub.KEPT_OFFLINE
            raise UserError(
                f"{target}: no tokenizer could be loaded ({reason}); give a hub id, a directory with "
                "tokenizer files, or a .gguf file"
            ) from error


_FILES = ("token*", "vocab*", "*.model", "*.tiktoken")


def _looks_like_path(target: str) -> bool:
    """A hub id is ``name`` or ``owner/name``; everything else was meant as a path."""
    return target.startswith((".", "/", "~")) or target.count("/") > 1 or "\\" in target
