"""The head that a user names: a run, a head directory of ours or another's, or a hub id."""

from __future__ import annotations

import warnings
from pathlib import Path

from eagle_train import hub
from eagle_train.errors import UserError
from eagle_train.heads.disk import CONFIG, WEIGHTS, Head
from eagle_train.heads.foreign import read_any
from eagle_train.heads.foreign_tensors import INDEX, PICKLED
from eagle_train.targets.load import Target
from eagle_train.training.checkpoints import FOLDER, head_folder
from eagle_train.training.trained_on import PROVENANCE, other_weights

_FETCHED = [CONFIG, PROVENANCE, WEIGHTS, INDEX, "model-*.safetensors"]


def find_head(name: str | Path) -> Path:
    """Return the directory of a head: a run's best, the directory itself, or a copy from the hub.

    Raises UserError when there is none. Nothing is fetched with ``HF_HUB_OFFLINE=1``.
    """
    path = Path(name)
    if path.exists():
        return head_folder(path)
    text = str(name)
    if text.count("/") != 1 or text.startswith((".", "/", "~")) or text.endswith("/"):
        raise UserError(f"{text}: no such folder; wanted a run, a head directory or a hub id (owner/name)")
    return _from_hub(text)


def open_head(name: str | Path, target: Target | None = None, *, depth: int | None = None) -> Head:
    """Load the head behind `name`, in the dtype it is stored in.

    For heads made elsewhere `target`, or its `depth` alone, tells what their files leave open; copies of the
    target's tables must then equal them. Warns of a head that was trained on other weights than `target` has.
    Raises UserError as `heads.foreign.read_any` does.
    """
    folder = find_head(name)
    if target is None:
        return read_any(folder, depth)
    if words := other_weights(folder, target.identity()):
        warnings.warn(f"{words}; expect a shorter acceptance length")
    frozen = target.frozen()
    return read_any(folder, target.num_layers, (frozen.embedding, frozen.lm_head))


def checkpoint_of(name: str | Path) -> str | None:
    """Say which checkpoint of its run a head is, such as ``best, step 30``; None where `name` tells or none.

    Raises UserError where there is a folder without a head.
    """
    path = Path(name)
    if not path.exists():  # on the hub
        return None
    folder = head_folder(path)
    step = folder.resolve().name
    if run_of(folder.resolve()) is None or not step.startswith("step-") or path.name == step:
        return None
    return f"{'' if folder == path else 'best, '}step {int(step.removeprefix('step-')):,}"


def run_of(folder: Path) -> Path | None:
    """Return the run whose checkpoint a head directory (resolved) is, None where it is none."""
    run = folder.parent.parent
    return run if folder.parent.name == FOLDER else None


def _from_hub(name: str) -> Path:
    """Fetch a head, its pickle only where it has no safetensors."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    with hub.asked_once(name) as silent:
        try:
            folder = Path(snapshot_download(name, allow_patterns=_FETCHED))
            if not any((folder / file).is_file() for file in (WEIGHTS, INDEX)):
                folder = Path(snapshot_download(name, allow_patterns=[*_FETCHED, PICKLED]))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            reason = silent or (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"{name}: no such folder, and the hub gave no head of that name ({reason}); "
                "check the name, the network, HF_TOKEN and HF_HUB_OFFLINE"
            ) from error
    return head_folder(folder)
