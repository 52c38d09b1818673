"""The Hub: whose a repository is, an export put into a place of it, and single files of it changed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile

from specdraft.core.errors import ExportError, SpecDraftError
from specdraft.export.formats.hf import FILES
from specdraft.export.material import MAIN, Place
from specdraft.export.sidecar import SIDECAR
from specdraft.heads.storage import CONFIG_NAME

MAX_REASON = 240
UPLOAD_ERRORS: tuple[type[BaseException], ...] = (*HfHubHTTPError.__bases__, ValueError, RuntimeError)
"""What the client raises: the HTTP library's errors (the Hub's are a kind of them), OSError, and two of its own."""
HUBS_OWN = {".gitattributes"}
"""Files that the Hub puts into a new repository."""


class Repository:
    """One model repository. ``whole``: what stays as it is when the Hub fails, for the message."""

    def __init__(self, repo_id: str, endpoint: str | None = None, whole: str = "nothing was changed") -> None:
        self.repo_id, self.whole = repo_id, whole
        self._api = HfApi(endpoint=endpoint)

    def open(self, private: bool, branches: Sequence[str]) -> None:
        """Makes the repository and those of ``branches`` that are not there.

        Raises:
            ExportError: it is there and holds something else than heads of ours; no network, or no right to write.
        """
        with self._reasons("the upload failed"):
            self._api.create_repo(self.repo_id, private=private, exist_ok=True)
            known = self.branches()
            for branch in sorted({MAIN, *branches} & known):
                self._check_ours(branch)
            for branch in sorted(set(branches) - known):
                self._api.create_branch(self.repo_id, branch=branch)

    def branches(self) -> set[str]:
        """Names of the branches that there are."""
        with self._reasons("cannot be read"):
            return {branch.name for branch in self._api.list_repo_refs(self.repo_id).branches}

    def files(self, branch: str) -> list[str]:
        """Every file of a branch."""
        with self._reasons("cannot be read"):
            return [file.rfilename for file in self._api.model_info(self.repo_id, revision=branch).siblings or []]

    def read(self, name: str, branch: str) -> str:
        """The text of one file, past the cache, which is for models."""
        with self._reasons("cannot be read"), tempfile.TemporaryDirectory() as folder:
            path = self._api.hf_hub_download(self.repo_id, name, revision=branch, local_dir=folder)
            return Path(path).read_text(encoding="utf-8")

    def sha256(self, name: str, branch: str) -> str | None:
        """Of a large file, as the Hub keeps it; None for a small one."""
        with self._reasons("cannot be read"):
            (info,) = self._api.get_paths_info(self.repo_id, [name], revision=branch)
        return info.lfs.sha256 if isinstance(info, RepoFile) and info.lfs is not None else None

    def upload(self, folder: Path, names: Sequence[str], place: Place) -> str:
        """Puts ``names`` of an export into ``place`` in one commit, takes out what an earlier export left there, and checks.

        A commit takes all or nothing, which a folder that an engine loads must be; of large files the Hub is first sent
        those that it lacks, so that an upload which was cut off goes on with the next file. (``upload_large_folder``
        resumes inside its own many commits, and keeps its record in the folder: for hundreds of files, not for five.)

        Returns:
            The address of the commit.

        Raises:
            ExportError: no network, no right to write, or other bytes arrived. The folder is untouched.
        """
        with self._reasons("the upload failed"):
            stale = self._earlier(place) - set(names)
            commit = self._api.upload_folder(
                repo_id=self.repo_id,
                folder_path=folder,
                path_in_repo=place.folder or None,
                revision=place.branch,
                allow_patterns=list(names),
                delete_patterns=sorted(stale) or None,
                commit_message="Upload a draft head of specdraft",
            )
            paths = [place.path(name) for name in names]
            remote = self._api.get_paths_info(self.repo_id, paths, revision=commit.oid)
        sizes = {info.path: info.size for info in remote if isinstance(info, RepoFile)}
        missing = [name for name in names if sizes.get(place.path(name)) != (folder / name).stat().st_size]
        if missing:
            raise ExportError(
                f"export.push_to: the Hub holds other bytes than were sent, got {', '.join(missing)}; export again"
            )
        return str(commit.commit_url)

    def replace(self, texts: Mapping[str, str], branch: str) -> str:
        """Writes small files in one commit; the address of it."""
        operations = [CommitOperationAdd(name, text.encode()) for name, text in texts.items()]
        with self._reasons("the upload failed"):
            commit = self._api.create_commit(
                self.repo_id, operations, commit_message="Refresh the figures of a draft head", revision=branch
            )
        return str(commit.commit_url)

    def _check_ours(self, branch: str) -> None:
        """Refuses a branch that holds something, and no head of ours at its root or in a folder of it."""
        names = set(self.files(branch)) - HUBS_OWN
        if not names:
            return
        own = [name for name in names if name in (SIDECAR, CONFIG_NAME) or name.endswith(f"/{SIDECAR}")]
        for name in own:
            if is_record(self.read(name, branch)):
                return
        raise ExportError(
            f"export.push_to: is there and holds no draft head of specdraft, got {self.repo_id} (branch {branch}, "
            f"{min(names)}); nothing was uploaded, choose another name"
        )

    def _earlier(self, place: Place) -> set[str]:
        """Names that an earlier export has in ``place``."""
        names = set(self.files(place.branch))
        if place.path(SIDECAR) in names:
            written = json.loads(self.read(place.path(SIDECAR), place.branch)).get("files", [])
        elif place.path(CONFIG_NAME) in names and is_record(self.read(place.path(CONFIG_NAME), place.branch)):
            written = list(FILES)
        else:
            return set()
        return {name for name in written if place.path(name) in names}

    @contextmanager
    def _reasons(self, what: str) -> Iterator[None]:
        """Raises the client's errors as ours, in one line."""
        try:
            yield
        except SpecDraftError:
            raise
        except UPLOAD_ERRORS as error:
            # The client wraps what went wrong with one file in a RuntimeError that does not say it.
            first = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
            reason = " ".join(str(first).split())[:MAX_REASON] or type(first).__name__
            raise ExportError(
                f"export.push_to: {what}, got {self.repo_id} ({reason}); {self.whole}; check network, token and rights, "
                "then export again"
            ) from error


def is_record(text: str) -> bool:
    """Whether a JSON file is the config of a head of ours or the record beside an export of ours."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and {"kind", "head", "target"} <= set(found)
