"""``specdraft export``: writes a head for its users, and uploads it if asked to."""

from __future__ import annotations

from specdraft.config.schema import ExportRun


def run(cfg: ExportRun) -> None:
    """Writes (or, with ``dry_run``, describes) the export of the head.

    Raises:
        CheckpointError, ExportError: see the messages; a failed upload leaves the folder whole.
    """
    from rich.console import Console

    from specdraft.export.hub import export_head

    assert cfg.head.path is not None
    console = Console()
    export = export_head(cfg.head.path, cfg.export, revision=cfg.head.revision, console=console)
    if export.folder is None:
        return
    console.print(f"written: {export.folder} ({', '.join(export.sizes)})", markup=False, soft_wrap=True)
    if export.url is not None:
        console.print(f"uploaded: {export.url}", markup=False, soft_wrap=True)
