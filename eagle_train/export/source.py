"""Where a head to be exported comes from, and what was recorded about it on the way."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_train.errors import UserError
from eagle_train.heads.disk import CONFIG, WEIGHTS
from eagle_train.io import os_error


@dataclass(frozen=True)
class Source:
    """A head directory, and the run it belongs to where there is one."""

    folder: Path  # holds config.json and model.safetensors
    run: Path | None = None

    @property
    def checkpoint(self) -> str:
        """The head directory's own name, such as ``step-000500``."""
        return self.folder.name

    def recipe(self) -> str | None:
        return None

    def acceptance(self) -> dict[str, Any] | None:
        return None


def find_source(path: str | Path) -> Source:
    """Return the head behind `path`: a run (its ``best``), one of a run's checkpoints, or a head directory.

    Raises UserError saying what was found there instead.
    """
    given = Path(path)
    if not given.is_dir():
        raise UserError(f"{given}: no such folder; wanted a run of eagle train or a head directory")
    given = given.resolve()
    if (given / CONFIG).is_file() and (given / WEIGHTS).is_file():
        inside = given.parent.name == "checkpoints"
        return Source(given, given.parent.parent if inside else None)
    best = _best(given)
    if best is not None:
        return Source(best, given)
    if (given / "checkpoints").is_dir():
        raise UserError(
            f"{given}: this run has no best checkpoint yet; wait for its first evaluation, "
            f"or export one of {given / 'checkpoints'}"
        )
    raise UserError(
        f"{given}: holds neither a run (best) nor a head ({CONFIG} and {WEIGHTS}); "
        "wanted what eagle train wrote"
    )


def _best(run: Path) -> Path | None:
    """Return the checkpoint that ``best`` names: a link, a folder, or a file with its name in it."""
    best = run / "best"
    if best.is_file():
        try:
            best = run / "checkpoints" / Path(best.read_text(encoding="utf-8").strip()).name
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{best}: cannot be read ({error}); give a checkpoint instead") from error
    return best.resolve() if (best / CONFIG).is_file() else None


def target_facts(target: str) -> tuple[str | None, int | None]:
    """Return (dtype such as ``bfloat16``, number of layers) from the target's config.json; None where unseen.

    Only a directory, or a file in the local hub cache, is looked at: nothing is fetched.
    """
    value = _target_config(target)
    text = value.get("text_config") or value
    dtype = text.get("dtype") or text.get("torch_dtype") or value.get("dtype") or value.get("torch_dtype")
    return (str(dtype) if dtype else None), text.get("num_hidden_layers")


def _target_config(target: str) -> dict[str, Any]:
    if not target:
        return {}
    path: Any = Path(target) / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            path = try_to_load_from_cache(target, "config.json")
        except HFValidationError:  # a path that is gone
            return {}
        if not isinstance(path, str):
            return {}
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise os_error(path, error) from error
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
