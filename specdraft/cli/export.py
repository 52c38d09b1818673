"""``specdraft export``: writes a head for its users and uploads it if asked to, or refreshes the cards of one that is there."""

from __future__ import annotations

from specdraft.config.schema import ExportRun


def run(cfg: ExportRun) -> None:
    """Writes (or, with ``dry_run``, describes) the exports of the head.

    Raises:
        CheckpointError, ConfigError, ExportError, UnsupportedTargetError: see the messages; a failed upload leaves the
            folders whole.
    """
    from rich.console import Console

    from specdraft.export.exporting import Source, export_head
    from specdraft.export.refresh import refresh_results

    assert cfg.head.path is not None
    console = Console()
    source = Source(cfg.head.path, cfg.head.revision, cfg.target.name, cfg.target.revision)
    if cfg.export.results_only:
        for url in refresh_results(source, cfg.export, console=console):
            console.print(f"refreshed: {url}", markup=False, soft_wrap=True)
        return
    for export in export_head(source, cfg.export, console=console):
        if export.folder is not None:
            console.print(f"written: {export.folder} ({', '.join(export.sizes)})", markup=False, soft_wrap=True)
        if export.url is not None:
            console.print(f"uploaded: {export.url}", markup=False, soft_wrap=True)
