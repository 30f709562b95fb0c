"""An export uploaded to the hub, as one commit."""

from __future__ import annotations

import re
from pathlib import Path

from eagle_train.errors import UserError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_repository(name: str) -> str:
    """Return `name`, or raise UserError where it is no OWNER/NAME."""
    if not HUB_ID.fullmatch(name):
        raise UserError(f"--push-to-hub {name}: wanted the repository as OWNER/NAME")
    return name


def push(folder: Path, repository: str, *, private: bool = False) -> str:
    """Upload all files of an export to a model repository, made where there is none; return its address.

    Token and address come as usual for the hub: HF_TOKEN or ``hf auth login``, and HF_ENDPOINT. Raises
    UserError where the hub cannot be reached or refuses; the export itself stays.
    """
    from huggingface_hub import HfApi

    check_repository(repository)
    api = HfApi()
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Draft head, made by eagle export"
        )
    except Exception as error:  # the client, its transport and its uploader each raise kinds of their own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{repository}: could not be uploaded ({reason}); check the name, HF_TOKEN and the network. "
            f"{folder} is whole: the same command tries again"
        ) from error
    return str(url)
