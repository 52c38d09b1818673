"""The licence that a head is published under: the one that was given, else its target's, as far as that is known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

KNOWN = {"smollm2": "apache-2.0"}
"""Targets that specdraft knows by a short name -> their licence."""


@dataclass(frozen=True)
class License:
    """id: as the Hub writes it; ``other`` comes with a name and a link. of_target: taken from the target's own card."""

    id: str
    name: str | None = None
    link: str | None = None
    of_target: bool = False

    def sentence(self) -> str:
        """For the card."""
        named = f"{self.id} ({self.name})" if self.name else self.id
        return f"{named}, the target's." if self.of_target else f"{named}. The target has a licence of its own."


def find_license(given: str | None, target: str, revision: str | None) -> License | None:
    """The licence of a head. target, revision: folder, short name or Hub id of its target, whose card is looked at."""
    if given is not None:
        return License(given)
    if target in KNOWN:
        return License(KNOWN[target], of_target=True)
    card = _card(target, revision)
    if card is None:
        return None
    # Some models name several.
    found = {key: card.data.get(key) for key in ("license", "license_name", "license_link")}
    if not isinstance(found["license"], str):
        return None
    name, link = (str(found[key]) if found[key] else None for key in ("license_name", "license_link"))
    return License(found["license"], name, link, of_target=True)


def _card(target: str, revision: str | None) -> ModelCard | None:
    """The target's card, of its folder or of the Hub; None where it has none that can be had or read."""
    try:
        if Path(target).is_dir():
            text = (Path(target) / "README.md").read_text(encoding="utf-8")
        elif target.count("/") == 1 and not target.startswith((".", "/", "~")):
            text = Path(hf_hub_download(target, "README.md", revision=revision)).read_text(encoding="utf-8")
        else:
            return None
        return ModelCard(text, ignore_metadata_errors=True)
    except (OSError, *HfHubHTTPError.__bases__, HFValidationError, ValueError, TypeError, yaml.YAMLError):
        return None
