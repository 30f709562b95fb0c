"""Where a head to be exported comes from, and what was recorded about it on the way.

Only the head itself is required. The rest is taken where it lies: a run's recipe and figures beside its
checkpoints, an earlier export's record of its target, the target's config.json in its directory or in the
local hub cache. Nothing is fetched.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_train.config import Recipe
from eagle_train.errors import UserError
from eagle_train.evaluation.heads import find_head, run_of
from eagle_train.heads.disk import WEIGHTS
from eagle_train.io.checksums import sha256_file
from eagle_train.recipe_files import load_recipe
from eagle_train.shards import frozen_target
from eagle_train.shards.schema import MANIFEST
from eagle_train.targets.load import DTYPES
from eagle_train.training.metrics import read_metrics
from eagle_train.training.run_folder import RECIPE, RECORD
from eagle_train.training.trained_on import trained_on

_LONG_NAMES = {short: str(dtype).removeprefix("torch.") for short, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Source:
    """A head directory and the records of the run that it belongs to, empty where there is none."""

    folder: Path  # holds config.json and model.safetensors
    run: Path | None = None
    record: dict[str, Any] = field(default_factory=dict)  # run.json; of an export the target alone
    recipe: Recipe | None = None

    @property
    def name(self) -> str:
        """The head directory's own name, such as ``step-000500``."""
        return self.folder.name

    @property
    def recipe_name(self) -> str | None:
        """The recipe that the run was started with."""
        return self.record.get("recipe")

    def acceptance(self) -> dict[str, Any] | None:
        """Return the figures predicted on held-out rows at this checkpoint; None where not recorded."""
        if self.run is None or not self.name.startswith("step-"):
            return None
        known = [line for line in read_metrics(self.run) if "tau" in line]
        lines = [line for line in known if self.name == f"step-{line['step']:06d}"]
        if not lines:
            return None
        figures = {key: lines[-1].get(key) for key in ("tau", "accepted_by_position", "rounds")}
        gamma = self.recipe.run.eval_gamma if self.recipe else None
        return {
            "draft": f"chain of {gamma}" if gamma else "chain",
            "temperature": 0.0,
            **figures,
            "held_out_conversations": _whole(self.record.get("held_out_conversations")),
        }

    def data(self) -> dict[str, Any] | None:
        """Return the fingerprints of what the head was trained on; None where not recorded."""
        if not self.record.get("shards"):
            return None
        rows = self.record.get("rows_fingerprint")
        if rows is None:  # a run of before it was recorded
            rows = _read(Path(str(self.record.get("shards_folder"))) / MANIFEST).get("rows_fingerprint")
        return {"shards": self.record["shards"], "rows": rows}

    def weights_sha256(self) -> str | None:
        """Return the checksum of the head's weights; None where they are not in one safetensors file."""
        file = self.folder / WEIGHTS
        return sha256_file(file) if file.is_file() else None

    def _shards(self) -> dict[str, Any]:
        """Return the target.json of the shards that the run read, {} where they are gone."""
        folder = self.record.get("shards_folder")
        return _read(Path(str(folder)) / frozen_target.RECORD) if folder else {}

    def target(self, name: str) -> TargetFacts:
        """Return what is known of the target `name`: from its config.json, else from the run's records."""
        config, recorded = find_target_config(name), self.record.get("target")
        if not config or not isinstance(recorded, dict):
            shards = self._shards()
            seen, taken = (_object(shards.get(key)) for key in ("target", "config"))
            recorded = recorded if isinstance(recorded, dict) else seen
            config = config or {**taken, "dtype": None}
        text = text_config(config)
        dtypes = [where.get(key) for where in (text, config) for key in ("dtype", "torch_dtype")]
        dtypes.append(_LONG_NAMES.get(str(recorded.get("dtype")), recorded.get("dtype")))
        return TargetFacts(
            name=name,
            dtype=next((str(dtype) for dtype in dtypes if dtype), None),
            num_layers=_whole(text.get("num_hidden_layers")),
            model_type=text.get("model_type") or config.get("model_type"),
            max_positions=_whole(text.get("max_position_embeddings")),
            revision=recorded.get("revision") if recorded.get("name") == name else None,
            fingerprint=recorded.get("fingerprint"),  # whatever its name is now
        )


@dataclass(frozen=True)
class TargetFacts:
    """The target that a head is for; None is what could not be seen."""

    name: str
    dtype: str | None = None  # torch's name, such as bfloat16
    num_layers: int | None = None
    model_type: str | None = None
    max_positions: int | None = None
    revision: str | None = None
    fingerprint: str | None = None


def find_source(path: str | Path) -> Source:
    """Return the head behind `path`: a run (its best), one of its checkpoints, a head directory or a hub id.

    Raises UserError saying what is there instead.
    """
    folder = find_head(path).resolve()
    run, recipe = run_of(folder), None
    if run is None:
        with contextlib.suppress(UserError):
            return Source(folder, record={"target": trained_on(folder)})
        return Source(folder)
    with contextlib.suppress(UserError):  # a run of another version: its recipe is not needed
        recipe = load_recipe(run / RECIPE)
    return Source(folder, run, _read(run / RECORD), recipe)


def find_target_config(target: str) -> dict[str, Any]:
    """Return the target's config.json, {} where it is not at hand. Nothing is fetched."""
    if not target:
        return {}
    file: Any = Path(target) / "config.json"
    if not file.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            file = try_to_load_from_cache(target, "config.json")
        except HFValidationError:  # the path of a folder that is gone
            return {}
        if not isinstance(file, str):
            return {}
    return _read(Path(file))


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a target's config.json that speaks of its language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) and inner else dict(config)


def _object(value: Any) -> dict[str, Any]:
    """Return a part of a record, {} where it is not there."""
    return value if isinstance(value, dict) else {}


def _whole(value: Any) -> int | None:
    """Return a count that a record names, None where it is none."""
    return value if type(value) is int and value > 0 else None


def _read(file: Path) -> dict[str, Any]:
    """Return a JSON object that is of use but not required: {} where it cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = json.loads(file.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    return {}
