"""Settings of the answers that the target writes for the training data. No torch here."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from specdraft.core.errors import ConfigError

WRITERS = ("target", "server", "vllm")
APIS = ("completions", "chat", "llamacpp")
PROMPTS = ("auto", "ids", "text")
OF_SERVERS: dict[str, Any] = {
    "endpoints": [],
    "model": None,
    "api": "completions",
    "prompts": "auto",
    "api_key_env": None,
    "requests_per_minute": None,
}
"""Settings that only servers heed, with the values that say nothing."""
FREE = tuple(
    f"data.answers.{name}"
    for name in (
        "head",
        "endpoints",
        "prompts",
        "api_key_env",
        "concurrency",
        "requests_per_minute",
        "timeout_s",
        "retries",
        "backoff_s",
        "probes",
        "load_target",
        "check_rows",
        "max_suspect_share",
    )
)
"""Settings that say how answers are had, not which they are."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_URL = re.compile(r"https?://[^/?#\s]+(/[^?#\s]*)?")


@dataclass(slots=True, kw_only=True)
class AnswersConfig:
    """Who writes the answers where ``data.regenerate`` is true, how many and how warm, and how they are checked."""

    by: str = "target"
    """target = the model of ``target``, loaded here; server = the model behind ``endpoints``; vllm = vLLM in this
    process, where it is installed."""
    head: str | None = None
    """Folder or Hub id of a trained head of the target, which makes by=target faster; the answers stay the target's."""
    samples: int = 1
    """Answers to every conversation."""
    temperatures: list[float] = field(default_factory=list)
    """Each answer is drawn at one of these, which seed and conversation decide; empty = data.temperature for all."""
    weights: list[float] = field(default_factory=list)
    """Shares of ``temperatures``; empty = equal ones."""
    endpoints: list[str] = field(default_factory=list)
    """Addresses of OpenAI-compatible servers of the target, e.g. http://host:8000/v1; the work is shared among them."""
    model: str | None = None
    """The target's name at the servers."""
    api: str = "completions"
    """completions = our own template in /completions; llamacpp = the same through llama.cpp's own route, which returns
    token ids; chat = /chat/completions with the server's template."""
    prompts: str = "auto"
    """How prompts are sent: ids, text (rendered), or auto = ids where the server takes them."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' key; the key itself is written nowhere."""
    concurrency: int = 32
    """Requests under way at each endpoint, in each process."""
    requests_per_minute: float | None = None
    """Requests to all endpoints together, over all processes; null = no limit."""
    timeout_s: float = 600.0
    """Seconds until a request without a whole reply is given up."""
    retries: int = 8
    """Failures of one request, or of one endpoint in a row, after which it is given up for this run."""
    backoff_s: float = 1.0
    """Wait after the first failure; it doubles with each further one, up to a minute. A server's Retry-After wins."""
    probes: int = 4
    """Prompts whose greedy answers a server must give as the target does, where the target is loaded; 0 = not compared."""
    load_target: bool = False
    """True: `prepare` loads the target beside server or data set answers, to compare and to check them."""
    check_rows: int = 64
    """Rows whose answers are scored under the target, where it is loaded; 0 = none."""
    max_suspect_share: float | None = None
    """An error if more of those rows are not the target's own; null = a warning from a tenth on."""

    def __post_init__(self) -> None:
        for name, known in (("by", WRITERS), ("api", APIS), ("prompts", PROMPTS)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"data.answers.{name}: unknown, got {getattr(self, name)!r}; use {' or '.join(known)}"
                )
        for name, least in (("samples", 1), ("concurrency", 1), ("retries", 0), ("probes", 0), ("check_rows", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"data.answers.{name}: must be at least {least}, got {getattr(self, name)}; use more")
        for name in ("timeout_s", "backoff_s", "requests_per_minute"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ConfigError(f"data.answers.{name}: must be positive and finite, got {value}; use e.g. 60")
        self._check_mix()
        self._check_servers()
        if self.head is not None and self.by != "target":
            raise ConfigError(f"data.answers.head: drafts with by=target alone, got by={self.by}; use null")
        if self.max_suspect_share is not None and not 0.0 <= self.max_suspect_share <= 1.0:
            raise ConfigError(
                f"data.answers.max_suspect_share: must lie in 0..1, got {self.max_suspect_share}; use e.g. 0.05 or null"
            )

    def _check_mix(self) -> None:
        for value in self.temperatures:
            check_temperature("data.answers.temperatures", value)
        if len(set(self.temperatures)) != len(self.temperatures):
            raise ConfigError(
                f"data.answers.temperatures: one is given twice, got {self.temperatures}; use data.answers.weights"
            )
        if self.weights and len(self.weights) != len(self.temperatures):
            raise ConfigError(
                f"data.answers.weights: must be one for each of data.answers.temperatures ({len(self.temperatures)}), "
                f"got {self.weights}; give as many or none"
            )
        if not all(0.0 < weight < math.inf for weight in self.weights):
            raise ConfigError(
                f"data.answers.weights: must be positive, got {self.weights}; leave out what gets nothing"
            )

    def _check_servers(self) -> None:
        if self.by != "server":
            for name, nothing in OF_SERVERS.items():
                if getattr(self, name) != nothing:
                    raise ConfigError(
                        f"data.answers.{name}: has no effect with data.answers.by={self.by}, got "
                        f"{'a value' if name == 'api_key_env' else getattr(self, name)}; set data.answers.by=server"
                    )
            return
        if not self.endpoints:
            raise ConfigError("data.answers.endpoints: are needed for by=server, got none; add [http://host:8000/v1]")
        if not self.model:
            raise ConfigError("data.answers.model: is needed for by=server, got none; give the target's name there")
        for url in self.endpoints:
            if "@" in url:
                raise ConfigError(
                    "data.answers.endpoints: an address must not hold a name or key, got one with '@'; put the key into "
                    "an environment variable and name it in data.answers.api_key_env"
                )
            if not _URL.fullmatch(url):
                raise ConfigError(
                    f"data.answers.endpoints: is no http address without query, got {url!r}; write http://host:8000/v1"
                )
        if len({url.rstrip("/") for url in self.endpoints}) != len(self.endpoints):
            raise ConfigError(f"data.answers.endpoints: one is given twice, got {self.endpoints}; remove it")
        # The value may be the key itself, pasted by mistake: it is not repeated.
        if self.api_key_env is not None and not _VARIABLE.fullmatch(self.api_key_env):
            raise ConfigError(
                "data.answers.api_key_env: is the name of an environment variable, got something else; put the key "
                "into e.g. SERVER_KEY and write SERVER_KEY"
            )
        if self.api == "chat" and self.prompts != "auto":
            raise ConfigError(
                f"data.answers.prompts: chat sends messages, got {self.prompts}; use auto, or api=completions"
            )

    def identity(self) -> dict[str, Any]:
        """What decides the rows, apart from ``data.temperature``: a data set made with other values is another one."""
        found: dict[str, Any] = {"samples": self.samples, "temperatures": self.temperatures, "weights": self.weights}
        if self.by != "target":
            found |= {"by": self.by}
        if self.by == "server":
            found |= {"model": self.model, "api": self.api}
        nothing = asdict(AnswersConfig())
        return {key: value for key, value in found.items() if value != nothing[key]}


def check_temperature(key: str, value: float) -> None:
    """Raises ConfigError unless an answer can be drawn at ``value``, the value of ``key``."""
    if not (value == 0.0 or 1e-3 <= value <= 100.0):
        raise ConfigError(f"{key}: must be 0 (greedy) or lie in 0.001..100, got {value}; use e.g. 0.7")
