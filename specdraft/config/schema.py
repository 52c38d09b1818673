"""What each sub-command is configured with: the owners' settings put together, and the rules between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdraft.config.comparison import CompareRun
from specdraft.config.doctor import DoctorRun, PlanRun
from specdraft.config.experiment import (
    FROM_HEAD,
    MISSING,
    ExperimentRun,
    PipelineRun,
    PrepareRun,
    TrainRun,
)
from specdraft.config.sources import HeadSource, ImportRun, TargetSource
from specdraft.core.errors import ConfigError
from specdraft.decode._config import DecodeConfig, check_drawable
from specdraft.decode._proposer_config import ProposerConfig
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.eval._config import EvalConfig, TuneConfig
from specdraft.export._config import ExportConfig
from specdraft.targets._config import TargetConfig

__all__ = [
    "FROM_HEAD",
    "RUNS",
    "SHORTHANDS",
    "CompareRun",
    "DoctorRun",
    "EvalRun",
    "ExperimentRun",
    "ExportRun",
    "GenerateRun",
    "PipelineRun",
    "PlanRun",
    "PrepareRun",
    "TrainRun",
    "TuneRun",
]


def _need_target(target: TargetConfig, head: str) -> None:
    if target.name == FROM_HEAD:
        raise ConfigError(
            f"target.name: there is no head to take it from, got {FROM_HEAD!r}; add target=smollm2, or {head}"
        )


def check_method(run: EvalRun | GenerateRun) -> None:
    """Rules of a run whose proposer is no trained head.

    Raises:
        ConfigError: one of them is broken.
    """
    kind = run.proposer.kind
    if run.head.path is not None:
        raise ConfigError(f"head: has no effect with proposer={kind}, got {run.head.path}; leave one of them out")
    _need_target(run.target, "proposer=head head=FOLDER")
    if run.decode.shapes_heads:
        raise ConfigError(
            f"decode: the draft's shape and head_dtype are those of heads, got them with proposer={kind}; "
            "use the settings of proposer"
        )
    _need_drawn_drafts(run.sampling, f"proposer={kind}")


def _need_drawn_drafts(sampling: SamplingConfig, what: str) -> None:
    if sampling.verifier in ("speculative_sampling", "block"):
        raise ConfigError(
            f"sampling.verifier: needs drafts that are drawn, got {sampling.verifier} with {what}; use auto"
        )


@dataclass(slots=True, kw_only=True)
class EvalRun:
    """Measures a trained head or another proposer: acceptance, speed, and whether the output is unchanged."""

    head: HeadSource = field(default_factory=HeadSource)
    """The head to measure; ``head=PATH`` for short."""
    proposer: ProposerConfig = field(default_factory=ProposerConfig)
    """What drafts: that head, or a method without training."""
    heads: list[str] = field(default_factory=list)
    """Heads to compare, folders or Hub ids, in place of ``head``."""
    proposers: list[Any] = field(default_factory=list)
    """Methods to compare, in place of ``proposer``: kinds, or dictionaries of a kind and its settings."""
    target: TargetConfig = field(default_factory=lambda: TargetConfig(name=FROM_HEAD))
    """The model to decode; ``from_head`` = the one the head was trained for."""
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    """How a head drafts, and how long answers are."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """What tokens are drawn from, and which drafts are accepted."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Prompts and repetitions; ``prompts=NAME_OR_FILE`` for short."""
    output: str | None = None
    """File for the results; null = results.json in the head's folder, or here without one; comparison.json here for
    several."""

    def __post_init__(self) -> None:
        if self.compares:
            self._check_comparison()
        elif self.proposer.kind != "head":
            check_method(self)
        elif self.head.path is None:
            raise ConfigError("head: is needed, got null; add head=FOLDER or a Hub id, or e.g. proposer=prompt_lookup")
        if self.decode.show:
            raise ConfigError("decode.show: has no effect where answers are not shown, got true; use generate")
        check_sampling(self.sampling, self.decode)

    @property
    def compares(self) -> bool:
        """Whether several are measured."""
        return bool(self.heads or self.proposers)

    def _check_comparison(self) -> None:
        if self.head.path is not None or self.proposer.kind != "head":
            raise ConfigError(
                "heads, proposers: are in place of head and proposer, got both; move them into heads=[...] or "
                "proposers=[...]"
            )
        if not all(self.heads) or len(set(self.heads)) != len(self.heads):
            raise ConfigError(f"heads: a head is empty or named twice, got {self.heads}; correct the list")
        if self.heads:
            return
        _need_target(self.target, "heads=[FOLDER]")
        if self.decode.shapes_heads:
            raise ConfigError("decode: the draft's shape is that of heads, got no heads; set it in proposers=[{...}]")
        _need_drawn_drafts(self.sampling, "proposers and no heads")


@dataclass(slots=True, kw_only=True)
class TuneRun:
    """Chooses the shape of a head's drafts for this machine: chain, tree, or plain decoding."""

    head: HeadSource = field(default_factory=HeadSource)
    """The head to tune for; ``head=PATH`` for short."""
    target: TargetConfig = field(default_factory=lambda: TargetConfig(name=FROM_HEAD))
    """The model to decode; ``from_head`` = the one the head was trained for."""
    tune: TuneConfig = field(default_factory=TuneConfig)
    """Prompts, sizes and repetitions; ``prompts=NAME_OR_FILE`` and ``batch_size=`` for short."""
    output: str | None = None
    """File for the shape; null = decode.json in the head's folder, or here for a head from the Hub."""

    def __post_init__(self) -> None:
        if self.head.path is None:
            raise ConfigError("head: is needed, got null; add head=FOLDER or a Hub id")


@dataclass(slots=True, kw_only=True)
class GenerateRun:
    """Answers one prompt on the terminal, token by token."""

    prompt: str = MISSING
    """The user's message, or the text to continue with ``raw``."""
    raw: bool = False
    """True: the prompt is continued as it is; false = it goes through the chat template."""
    head: HeadSource = field(default_factory=HeadSource)
    """The head that drafts; null = plain decoding."""
    proposer: ProposerConfig = field(default_factory=ProposerConfig)
    """What drafts: that head, or a method without training."""
    target: TargetConfig = field(default_factory=lambda: TargetConfig(name=FROM_HEAD))
    """The model that answers; ``from_head`` = the one the head was trained for."""
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    """Length, drafts and display."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """What tokens are drawn from, and which drafts are accepted."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ConfigError("prompt: must not be empty, got ''; write prompt='...'")
        check_sampling(self.sampling, self.decode)
        if self.proposer.kind != "head":
            check_method(self)
            if self.proposer.kind == "none" and self.decode.show:
                raise ConfigError("decode.show: has no effect with proposer=none, got true; use false")
        if self.head.path is not None or self.proposer.kind != "head":
            return
        if self.target.name == FROM_HEAD:
            raise ConfigError(
                f"target.name: there is no head to take it from, got {FROM_HEAD!r}; add target.name=smollm2"
            )
        if self.decode.show or self.decode.shapes_heads:
            raise ConfigError(
                "decode: show, head_dtype and the draft's shape have no effect, got no head; add head=FOLDER"
            )
        if self.sampling.verifier not in ("auto", "greedy"):
            raise ConfigError(
                f"sampling.verifier: has no effect without drafts, got {self.sampling.verifier}; add head=FOLDER"
            )


@dataclass(slots=True, kw_only=True)
class ExportRun:
    """Writes a trained head in the format of its users, and uploads it if asked to."""

    head: HeadSource = field(default_factory=HeadSource)
    """The head to export; ``head=PATH`` for short."""
    target: TargetSource = field(default_factory=TargetSource)
    """Its target, whose files the formats of other engines need; ``target=PATH`` for short."""
    export: ExportConfig = field(default_factory=ExportConfig)
    """Formats and destination; ``format=``, ``push_to=``, ``private=``, ``dry_run=``, ``output=`` or ``out=`` for short."""

    def __post_init__(self) -> None:
        if self.export.results_only and self.target.name is not None:
            raise ConfigError(f"target: has no effect with results_only, got {self.target.name}; leave it out")
        if self.export.results_only and self.head.path is None:
            # The head that the repository holds, with the figures beside it.
            self.head = HeadSource(path=self.export.push_to, revision=self.export.revision)
        if self.head.path is None:
            raise ConfigError("head: is needed, got null; add head=FOLDER or a Hub id")


def check_sampling(sampling: SamplingConfig, decode: DecodeConfig) -> None:
    """Rules between what is drawn and how it is drafted.

    Raises:
        ConfigError: one of them is broken.
    """
    if sampling.min_new_tokens > decode.max_new_tokens:
        raise ConfigError(
            f"sampling.min_new_tokens: must not exceed decode.max_new_tokens ({decode.max_new_tokens}), "
            f"got {sampling.min_new_tokens}; use fewer"
        )
    if sampling.min_new_tokens and decode.ignore_eos:
        raise ConfigError(
            f"sampling.min_new_tokens: has no effect with decode.ignore_eos, got {sampling.min_new_tokens}; use 0"
        )
    is_branched = decode.dynamic_total_tokens is not None or any(
        len(path) != i for i, path in enumerate(decode.tree or [], 1)
    )
    if sampling.verifier == "block" and is_branched:
        raise ConfigError("sampling.verifier: block takes a chain, got block for a tree; use auto")
    if sampling.verifier == "speculative_sampling" and decode.dynamic_total_tokens is not None:
        raise ConfigError(
            "sampling.verifier: needs drafts that are drawn, which grown trees are not, got speculative_sampling; use auto"
        )
    if sampling.samples_drafts and decode.tree is not None:
        check_drawable(decode.tree)


RUNS: dict[str, type] = {
    "plan": PlanRun,
    "doctor": DoctorRun,
    "prepare": PrepareRun,
    "train": TrainRun,
    "eval": EvalRun,
    "tune": TuneRun,
    "generate": GenerateRun,
    "export": ExportRun,
    "import": ImportRun,
    "run": PipelineRun,
    "compare": CompareRun,
}
"""Sub-command -> what it is configured with; the primary config has the sub-command's name."""

SHORTHANDS: dict[str, dict[str, str]] = {
    "eval": {"head": "head.path", "prompts": "eval.prompts", "batch_size": "eval.batch_size"},
    "tune": {"head": "head.path", "prompts": "tune.prompts", "batch_size": "tune.batch_size"},
    "generate": {"head": "head.path"},
    "export": {"head": "head.path", "target": "target.name", "out": "export.output"}
    | {
        name: f"export.{name}"
        for name in (
            *("format", "push_to", "private", "revision", "layout", "results_only", "dry_run", "output", "license"),
            *("verify", "engines", "target_gguf"),
        )
    },
    "import": {"target": "target.name", "out": "output"},
    "compare": {"heads": "compare.heads"},
}
"""Keys that the command line offers for longer ones."""
