"""``results_only``: the cards of a repository with the present figures of its head, and nothing else changed."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from specdraft.core.errors import ExportError
from specdraft.core.files import file_sha256
from specdraft.export._config import FORMATS, ExportConfig
from specdraft.export.card import CARD_NAME, portable, with_results
from specdraft.export.exporting import Source
from specdraft.export.hub import Repository, is_record
from specdraft.export.material import MAIN, RESULTS_NAME, Place, read_results
from specdraft.export.sidecar import SIDECAR
from specdraft.heads.storage import CONFIG_NAME, WEIGHTS_NAME, read_head_config, resolve_head


def refresh_results(
    source: Source, config: ExportConfig, *, endpoint: str | None = None, console: Console | None = None
) -> list[str]:
    """Puts the figures of a head's results.json into every card of the repository that speaks of this head.

    Of a card only the section and the metadata of the figures change, so that what its owner wrote stays. Our own format
    has results.json replaced, too. With ``config.dry_run`` the cards are printed and nothing is sent.

    Returns:
        The address of each commit, one for a branch.

    Raises:
        CheckpointError: no head there.
        ExportError: it was not evaluated, the repository holds no head of ours or another one, or it cannot be reached.
    """
    assert config.push_to is not None
    console = console or Console()
    folder = resolve_head(source.head, source.revision)
    results = read_results(folder)
    if results is None:
        raise ExportError(
            f"export.results_only: the head has no {RESULTS_NAME}, got {source.head}; run specdraft eval with it first"
        )
    mine = {**portable(read_head_config(folder)), "weights": file_sha256(folder / WEIGHTS_NAME)}
    repository = Repository(config.push_to, endpoint)
    branches = [config.revision or MAIN]
    if config.layout == "branches":
        branches += sorted(set(FORMATS) & repository.branches())
    changed = {branch: _changed(repository, branch, mine, results) for branch in branches}
    if not any(changed.values()):
        raise ExportError(
            f"export.push_to: holds no draft head of specdraft, got {config.push_to} ({', '.join(branches)}); export first"
        )
    if config.dry_run:
        for branch, texts in changed.items():
            for name, text in texts.items():
                console.print(f"would replace {name} of {config.push_to} ({branch}):", markup=False, soft_wrap=True)
                console.print(f"\n{text}", markup=False, highlight=False, soft_wrap=True)
        return []
    return [repository.replace(texts, branch) for branch, texts in changed.items() if texts]


def _changed(repository: Repository, branch: str, mine: dict[str, Any], results: dict[str, Any]) -> dict[str, str]:
    """The new text of every file of a branch that has to be changed, by name.

    Raises:
        ExportError: a place holds another head, or has no card.
    """
    names = set(repository.files(branch))
    texts: dict[str, str] = {}
    for place in [Place(branch), *(Place(branch, name) for name in FORMATS)]:
        record = next((place.path(name) for name in (SIDECAR, CONFIG_NAME) if place.path(name) in names), None)
        text = None if record is None else repository.read(record, branch)
        if record is None or text is None or not is_record(text):
            continue
        is_ours = record == place.path(CONFIG_NAME)
        found = json.loads(text)
        weights = repository.sha256(place.path(WEIGHTS_NAME), branch) if is_ours else found.get("weights")
        _check_same(repository, place, {**found, "weights": weights}, mine)
        card = place.path(CARD_NAME)
        if card not in names:
            raise ExportError(f"export.results_only: there is no {card}, got {repository.repo_id}; export again")
        texts[card] = with_results(repository.read(card, branch), results, repository.repo_id)
        if is_ours:
            texts[place.path(RESULTS_NAME)] = json.dumps(results, indent=2) + "\n"
    return texts


def _check_same(repository: Repository, place: Place, record: dict[str, Any], mine: dict[str, Any]) -> None:
    """Refuses a place with another head: its kind, settings and target, and its weights as far as they are recorded."""
    same = all(record[key] == mine[key] for key in ("kind", "head"))
    same = same and record["target"]["fingerprint"] == mine["target"]["fingerprint"]
    if not same or record["weights"] not in (None, mine["weights"]):
        raise ExportError(
            f"export.results_only: the repository holds another head, got {repository.repo_id} "
            f"({place.branch}{', ' + place.folder if place.folder else ''}) for figures of {mine['kind']} with weights "
            f"{mine['weights'][:12]}; evaluate the head that is there"
        )
