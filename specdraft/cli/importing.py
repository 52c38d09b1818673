"""``specdraft import``: brings in a head that another project has published, and says what it took for granted."""

from __future__ import annotations

from pathlib import Path

from specdraft.config.sources import ImportRun


def run(cfg: ImportRun) -> None:
    """Reads the head, holds it against its own conventions, and saves it in our format.

    Raises:
        CheckpointError, ConfigError, UnsupportedTargetError: see the messages; nothing is written then.
    """
    from rich.console import Console

    from specdraft.export.importing import import_head

    output = Path(cfg.output or f"import-{Path(cfg.source).absolute().name}")
    brought = import_head(
        cfg.source,
        output,
        revision=cfg.revision,
        target=cfg.target.name,
        target_revision=cfg.target.revision,
        num_draft_tokens=cfg.num_draft_tokens,
    )
    console = Console()

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    head = brought.head
    say(f"layout: {brought.layout}, kind {head.config.kind}, {head.num_parameters:,} parameters, for {head.spec.name}")
    for line in brought.assumed:
        say(f"assumed: {line}")
    for line in brought.warnings:
        say(f"warning: {line}")
    say(f"written: {brought.folder}")
