"""Upload a folder to a repository of Hugging Face."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .._compat.huggingface_hub import hub_faults, require_hub_library
from .._version import __version__
from ..errors import CheckpointError, OptionError, as_option, expected


def require_repository(name: str, token: str | None = None) -> None:
    """Raise an error unless the hub can be asked for a repository, by somebody who is known there.

    Raises:
        OptionError: `name` is not that of a repository.
        CheckpointError: the hub cannot be reached, or does not know who asks.
    """
    wanted = 'the name of a repository, as "user/name"'
    if not isinstance(name, str):
        raise OptionError(expected("push_to_hub", wanted, name))
    require_hub_library()
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise OptionError(expected("push_to_hub", wanted, name)) from error
    if token is None and get_token() is None:
        raise CheckpointError(
            f"{as_option('push_to_hub', name)}: there is no token of Hugging Face here. Run `hf "
            "auth login`, or set HF_TOKEN. Nothing was written."
        )
    with _asking(name, "Nothing was written. Leave push_to_hub out to write the folder alone."):
        HfApi(token=token).whoami()


def upload(folder: Path, name: str, private: bool | None, token: str | None) -> None:
    """Upload a folder; a repository that does not exist is made. Raises CheckpointError."""
    from huggingface_hub import HfApi

    api = HfApi(token=token, library_name="fp4pass", library_version=__version__)
    with _asking(name, f"The folder is whole: upload it with `hf upload {name} {folder}`."):
        made = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id,
            folder_path=os.fspath(folder),
            commit_message=f"Upload a model that fp4pass {__version__} quantized",
        )


@contextmanager
def _asking(name: str, remedy: str) -> Iterator[None]:
    """Make what the hub and its library raise a CheckpointError that says what to do."""
    try:
        yield
    except hub_faults() as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{as_option('push_to_hub', name)}: Hugging Face refuses or cannot be reached: "
            f"{lines[0].rstrip('.'):.300}. {remedy}"
        ) from error
