"""The head that a user names: a run, a head directory or a hub id."""

from __future__ import annotations

from pathlib import Path

from eagle_train.errors import UserError
from eagle_train.heads.disk import CONFIG, WEIGHTS, Head, load_head
from eagle_train.training.checkpoints import head_folder


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


def open_head(name: str | Path) -> Head:
    """Load the head behind `name`, in the dtype it is stored in."""
    return load_head(find_head(name))


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{name}: no such folder, and the hub gave no head of that name ({reason}); "
            "check the name, the network, HF_TOKEN and HF_HUB_OFFLINE"
        ) from error
    return head_folder(folder)
