"""A head as a folder with a model card, checked by loading it back, and its upload to the Hub."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from rich.console import Console

from specdraft.core.errors import ExportError, SpecDraftError
from specdraft.core.tree import DraftTree
from specdraft.core.types import DraftContext, Features, Unembedding
from specdraft.data.sources import file_sha256
from specdraft.export._config import ExportConfig
from specdraft.export.card import hub_id, model_card, portable
from specdraft.heads.base import DraftHead
from specdraft.heads.storage import CONFIG_NAME, WEIGHTS_NAME, load_head, read_head_config, resolve_head

RESULTS_NAME, CARD_NAME = "results.json", "README.md"
FILES = (CARD_NAME, CONFIG_NAME, WEIGHTS_NAME, RESULTS_NAME)
"""All that an export may hold, and all that is ever uploaded."""
MARK = "export"
"""Key of config.json by which an earlier export is told from a head of a run."""
RESULTS_SCHEMA = 1
PROBE_TOKENS = 8
MAX_REASON = 240
UPLOAD_ERRORS: tuple[type[BaseException], ...] = (*HfHubHTTPError.__bases__, ValueError, RuntimeError)
"""What an upload raises: the HTTP library's errors (the Hub's are a kind of them), OSError, and two of the client."""


@dataclass(frozen=True)
class Export:
    """folder: what was written, None on a dry run. sizes: bytes by file name. card: its text. url: of the commit."""

    folder: Path | None
    sizes: dict[str, int]
    card: str
    url: str | None = None


def export_head(
    source: str | Path,
    config: ExportConfig,
    *,
    revision: str | None = None,
    endpoint: str | None = None,
    console: Console | None = None,
) -> Export:
    """Writes a head with its card to a folder and, with ``config.push_to``, uploads that folder.

    The folder is complete and was loaded back before it gets its name, and before anything is uploaded.

    Args:
        source: folder or Hub id of a head.
        config: destination; with ``dry_run`` nothing is written or sent.
        revision: of a Hub id.
        endpoint: of the Hub; None = the library's own.
        console: where a dry run prints what would go.

    Raises:
        CheckpointError: no head there, or a torn one.
        ExportError: the results belong to other weights, the folder is occupied or cannot be written, the export read
            back differs, or the upload failed; after a failed upload the folder is whole.
    """
    folder = resolve_head(source, revision)
    output = output_folder(source, folder, config)
    with _scratch(output, config.dry_run) as scratch:
        card = build(folder, scratch, config)
        sizes = {name: (scratch / name).stat().st_size for name in FILES if (scratch / name).exists()}
        if config.dry_run:
            _print_plan(config, output, sizes, card, console or Console())
            return Export(None, sizes, card)
        _put_in_place(scratch, output)
    url = None if config.push_to is None else upload(output, config.push_to, config.private, endpoint)
    return Export(output, sizes, card, url)


def output_folder(source: str | Path, folder: Path, config: ExportConfig) -> Path:
    """The folder that is written, checked to be free: absent, empty, or an earlier export.

    Raises:
        ExportError: it holds anything else, such as the head itself.
    """
    name = f"export-{config.format}"
    beside = folder.absolute().parent / name if Path(source).exists() else Path(name)
    output = Path(config.output).expanduser() if config.output is not None else beside
    if not output.exists():
        return output
    names = {path.name for path in output.iterdir()} if output.is_dir() else {output.name}
    if not output.is_dir() or names - set(FILES) or (names and not _is_export(output)):
        raise ExportError(
            f"export.output: is occupied by something other than an earlier export, got {output}; choose another folder"
        )
    return output


def _is_export(folder: Path) -> bool:
    try:
        return MARK in read_head_config(folder)
    except SpecDraftError:
        return False


@contextmanager
def _scratch(output: Path, dry_run: bool) -> Iterator[Path]:
    """A folder to build in: beside the output, so that a rename puts it in place; elsewhere on a dry run."""
    try:
        if not dry_run:
            output.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=None if dry_run else output.parent))
    except OSError as error:
        raise _cannot_write(output, error) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _cannot_write(output: Path, error: OSError) -> ExportError:
    return ExportError(f"export.output: cannot be written, got {output} ({error}); free space or choose another folder")


def build(folder: Path, scratch: Path, config: ExportConfig) -> str:
    """Fills ``scratch`` from the head in ``folder``, reads it back, and returns the card."""
    head = load_head(folder)
    recorded = read_head_config(folder)
    head_config = {**portable(recorded), MARK: {"format": config.format}}
    results = _read_results(folder)
    card = str(
        model_card(
            head,
            head_config,
            results,
            base_model=hub_id(recorded["target"]["name"]),
            repo_id=config.push_to,
            license_name=config.license,
        )
    )
    try:
        shutil.copyfile(folder / WEIGHTS_NAME, scratch / WEIGHTS_NAME)
        (scratch / CONFIG_NAME).write_text(json.dumps(head_config, indent=2) + "\n")
        if results is not None:
            (scratch / RESULTS_NAME).write_text(json.dumps(results, indent=2) + "\n")
        (scratch / CARD_NAME).write_text(card, encoding="utf-8")
        for path in scratch.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    except OSError as error:
        raise _cannot_write(scratch, error) from error
    verify(scratch, head)
    return card


def _read_results(folder: Path) -> dict[str, Any] | None:
    """results.json of the head without folders of this machine; None if it was not evaluated.

    Raises:
        ExportError: torn, of another schema, or measured with other weights.
    """
    path = folder / RESULTS_NAME
    if not path.exists():
        return None
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ExportError(
            f"head: {RESULTS_NAME} cannot be read, got {path} ({error}); evaluate the head again"
        ) from error
    if not isinstance(results, dict) or results.get("schema") != RESULTS_SCHEMA:
        raise ExportError(
            f"head: {RESULTS_NAME} is not of schema {RESULTS_SCHEMA}, got {path}; evaluate the head again"
        )
    measured = results["head"]["sha256"]
    if measured is not None and measured != file_sha256(folder / WEIGHTS_NAME):
        raise ExportError(f"head: {RESULTS_NAME} was measured with other weights, got {path}; evaluate the head again")
    portable_results: dict[str, Any] = portable(results)
    return portable_results


def verify(folder: Path, head: DraftHead) -> None:
    """Loads an export strictly and compares it with ``head``: every tensor bit by bit, and the tokens of a draft.

    Raises:
        ExportError: anything differs.
    """
    try:
        copy = load_head(folder)
    except SpecDraftError as error:
        raise ExportError(f"export.format: the export cannot be read back, got {error}; report this") from error
    wanted, found = head.state_dict(), copy.state_dict()
    wrong = [name for name in wanted if name not in found or not torch.equal(wanted[name], found[name])]
    if wrong or len(found) != len(wanted):
        raise ExportError(f"export.format: the export holds other tensors, got {wrong or sorted(found)}; report this")
    if not torch.equal(probe(head), probe(copy)):
        raise ExportError(f"export.format: the export drafts other tokens, got {folder}; report this")


@torch.no_grad()
def probe(head: DraftHead) -> torch.Tensor:
    """``[1, K]`` int64: what the head drafts after random features, with a random matrix for the target's lm_head.

    It needs memory for one matrix of the lm_head's size.
    """
    generator = torch.Generator().manual_seed(0)
    spec, size = head.spec, PROBE_TOKENS

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32).to(head.dtype)

    unembed = Unembedding(random(spec.vocab_size, spec.hidden_size))
    num_aux = len(head.features().aux_layers)
    aux = random(1, size, num_aux * spec.hidden_size) if num_aux else None
    tokens = torch.randint(spec.vocab_size, (1, size), generator=generator)
    context = DraftContext(tokens, Features(random(1, size, spec.hidden_size), aux), 0)
    tree = DraftTree.chain(head.config.num_draft_tokens)
    state = head.init_state(size + len(tree) + 1, tree, unembed)
    return head.propose(state, context, lambda ids: unembed.weight[ids], tree).tokens


def _put_in_place(scratch: Path, output: Path) -> None:
    """Gives the finished folder its name; an earlier export is moved aside first and removed after."""
    old = output.with_name(f".{output.name}-old")
    try:
        scratch.chmod(0o755)
        shutil.rmtree(old, ignore_errors=True)
        if output.exists():
            output.rename(old)
        scratch.rename(output)
    except OSError as error:
        raise _cannot_write(output, error) from error
    shutil.rmtree(old, ignore_errors=True)


def upload(folder: Path, repo_id: str, private: bool, endpoint: str | None = None) -> str:
    """Uploads an export to ``repo_id``, which is made if there is none, and checks what the Hub holds then.

    Returns:
        The address of the commit.

    Raises:
        ExportError: no network, no right to write, or other bytes arrived. The folder is untouched.
    """
    api = HfApi(endpoint=endpoint)
    names = [name for name in FILES if (folder / name).exists()]
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, allow_patterns=names, commit_message="Upload a draft head of specdraft"
        )
        remote = api.get_paths_info(repo_id, names, revision=commit.oid)
    except UPLOAD_ERRORS as error:
        # The client wraps what went wrong with one file in a RuntimeError that does not say it.
        first = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        reason = " ".join(str(first).split())[:MAX_REASON] or type(first).__name__
        raise ExportError(
            f"export.push_to: the upload failed, got {repo_id} ({reason}); the export is whole in {folder}; check "
            "network, token and rights, then export again"
        ) from error
    sizes = {info.path: info.size for info in remote if isinstance(info, RepoFile)}
    missing = [name for name in names if sizes.get(name) != (folder / name).stat().st_size]
    if missing:
        raise ExportError(
            f"export.push_to: the Hub holds other bytes than were sent, got {', '.join(missing)}; export again"
        )
    return str(commit.commit_url)


def _print_plan(config: ExportConfig, output: Path, sizes: Mapping[str, int], card: str, console: Console) -> None:
    """What a run without ``dry_run`` would write and send."""
    console.print(f"would write {output}", markup=False)
    for name, size in sizes.items():
        console.print(f"  {name:<20} {size:>14,} bytes", markup=False, highlight=False)
    if config.push_to is not None:
        kind = "private" if config.private else "public"
        console.print(f"would upload these files to {config.push_to} ({kind} if it has to be made)", markup=False)
    console.print(f"model card:\n\n{card}", markup=False, highlight=False, soft_wrap=True)
