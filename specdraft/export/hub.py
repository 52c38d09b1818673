"""The upload of an export to the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile

from specdraft.core.errors import ExportError

MAX_REASON = 240
UPLOAD_ERRORS: tuple[type[BaseException], ...] = (*HfHubHTTPError.__bases__, ValueError, RuntimeError)
"""What an upload raises: the HTTP library's errors (the Hub's are a kind of them), OSError, and two of the client."""


def upload(
    folder: Path, names: Sequence[str], repo_id: str, private: bool, endpoint: str | None = None, subfolder: str = ""
) -> str:
    """Uploads ``names`` of an export to ``repo_id``, which is made if there is none, and checks what the Hub holds then.

    ``subfolder``: of the repository; empty = its root.

    Returns:
        The address of the commit.

    Raises:
        ExportError: no network, no right to write, or other bytes arrived. The folder is untouched.
    """
    api = HfApi(endpoint=endpoint)
    prefix = f"{subfolder}/" if subfolder else ""
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            path_in_repo=subfolder or None,
            allow_patterns=list(names),
            commit_message="Upload a draft head of specdraft",
        )
        remote = api.get_paths_info(repo_id, [prefix + name for name in names], revision=commit.oid)
    except UPLOAD_ERRORS as error:
        # The client wraps what went wrong with one file in a RuntimeError that does not say it.
        first = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        reason = " ".join(str(first).split())[:MAX_REASON] or type(first).__name__
        raise ExportError(
            f"export.push_to: the upload failed, got {repo_id} ({reason}); the export is whole in {folder}; check "
            "network, token and rights, then export again"
        ) from error
    sizes = {info.path: info.size for info in remote if isinstance(info, RepoFile)}
    missing = [name for name in names if sizes.get(prefix + name) != (folder / name).stat().st_size]
    if missing:
        raise ExportError(
            f"export.push_to: the Hub holds other bytes than were sent, got {', '.join(missing)}; export again"
        )
    return str(commit.commit_url)
