"""The model card of a head: metadata for the Hub, and the run and its figures in words and tables."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, cast

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from specdraft.core.errors import ExportError
from specdraft.export.license import License
from specdraft.heads.base import DraftHead

CARD_NAME = "README.md"
LIBRARY = "specdraft"
RESULTS = "## Results"
HUB_NAMES = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Targets that specdraft knows by a short name -> their id on the Hub."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SHOWN_SETTINGS = {
    "data": ("sources", "regenerate", "max_length", "loss_on"),
    "loss": ("terms", "step_decay", "normalize"),
    "optim": ("lr", "schedule", "warmup_ratio"),
    "trainer": ("epochs", "max_steps", "accumulation_steps", "mixed_precision"),
}
"""Settings of the training run that the card lists, by group; the others are in config.json."""
INTRODUCTION = """\
This head drafts the next tokens of {target} from the model's own hidden states. The model checks a whole draft in one
forward pass and keeps what it would have written itself: greedy output is unchanged, in fewer passes. Made with
specdraft.
"""
MEASURED = """\
{how} decoding of one prompt at a time with {shape} of depth {depth}, at most {length} new tokens, {dtype} on
{processor} ({threads} threads), torch {torch}, transformers {transformers}.

Acceptance length: tokens per forward pass of the target, its own token included, pooled over steps. Speed-up: tokens
per second against plain decoding of the same target in the same process, prompts included. In brackets: 95 %
bootstrap intervals over prompts.
"""
SET_HEADER = (
    "prompts",
    "acceptance length",
    "tok/s plain",
    "tok/s speculative",
    "speed-up",
    "identical outputs",
)
USE = """\
```bash
specdraft generate head={repo}{words} prompt="Tell me a story."
specdraft eval head={repo}{words} prompts=builtin
```

```python
from specdraft.data.chat import ChatRenderer
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer
from specdraft.heads.storage import check_head_matches, load_head
from specdraft.targets.hf import load_target
from specdraft.targets._config import TargetConfig

target = load_target(TargetConfig(name="{target}"))
head = load_head("{repo}", {arguments}device=target.device, dtype=target.dtype)
check_head_matches(head, target.spec)
decoder = SpeculativeDecoder(target, HeadProposer(head, target))
prompt = ChatRenderer(target.tokenizer).prompt_ids([{{"role": "user", "content": "Tell me a story."}}])
print(target.tokenizer.decode(decoder.generate(prompt, max_new_tokens=128).tokens))
```
"""


def portable(value: Any) -> Any:
    """JSON values without the folders of this machine: a path becomes its last part; the rest stays as it is."""
    if isinstance(value, Mapping):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [portable(item) for item in value]
    if isinstance(value, str) and _is_path(value):
        return PureWindowsPath(value).name or value
    return value


def _is_path(text: str) -> bool:
    """Absolute paths of any system, and those relative to the home or the present folder."""
    return text.startswith(("/", "~", "./", "../", "\\\\")) or bool(re.match(r"[A-Za-z]:[\\/]", text))


def model_card(
    head: DraftHead,
    config: Mapping[str, Any],
    results: Mapping[str, Any] | None,
    *,
    base_model: str | None,
    repo_id: str | None,
    license: License | None,
    revision: str | None = None,
    serve: str | None = None,
) -> ModelCard:
    """The card of a head, filled from its run.

    Args:
        head: the head itself.
        config: its config.json, portable.
        results: its results.json, portable, if it was evaluated.
        base_model: Hub id of the target; None = a local model.
        repo_id: where it goes; None = its folder's name is left to the reader.
        license: of the head; None = not known.
        revision: branch of the repository; None = main.
        serve: how to use it, for an export in the layout of other engines; None = with specdraft.
    """
    target = config["target"]
    kind = head.config.kind
    figures = _eval_results(results)
    title = f"{kind} draft head for {base_model or target['name']}"
    data = ModelCardData(
        base_model=base_model,
        datasets=_hub_datasets(config) or None,
        library_name=LIBRARY,
        license=None if license is None else license.id,
        license_name=None if license is None else license.name,
        license_link=None if license is None else license.link,
        pipeline_tag="text-generation",
        tags=[LIBRARY, "speculative-decoding", "draft-head", kind],
        model_name=(repo_id or title) if figures else None,
        eval_results=figures or None,
    )
    repo = repo_id or "FOLDER_OR_HUB_ID"
    sections = [
        f"# {title}",
        INTRODUCTION.format(target=_link(base_model) or target["name"]),
        _facts(head, config),
        RESULTS,
        *_results(results),
        "## How to use",
        (_use(repo, revision, target["name"]) if serve is None else serve)
        + ("" if base_model else "\nThe target was a local model: give the name of your copy in its place.\n"),
        "## Training",
        *_training(config),
        "## Licence",
        "None was stated by the author." if license is None else license.sentence(),
    ]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(part.strip() for part in sections) + "\n")


def with_results(text: str, results: Mapping[str, Any], repo_id: str) -> str:
    """A card with other figures, in its section and in its metadata; the rest, of whose hand it be, stays as it is.

    A card without such a section gets it at its end.

    Raises:
        ExportError: its metadata cannot be read.
    """
    try:
        card = ModelCard(text)
    except (ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise ExportError(
            f"export.results_only: the card's metadata cannot be read, got {' '.join(str(error).split())}; export again"
        ) from error
    before, _, after = card.text.partition(f"\n{RESULTS}\n")
    # Subsections of a set are the section's own.
    rest = re.search(r"^##? ", after, re.MULTILINE)
    kept = after[rest.start() :] if rest else ""
    figures, data = _eval_results(results), cast(ModelCardData, card.data)
    data.eval_results = figures or None
    data.model_name = (data.model_name or repo_id) if figures else None
    section = "\n\n".join(part.strip() for part in (RESULTS, *_results(results)))
    return f"---\n{data.to_yaml()}\n---\n{before.rstrip()}\n\n{section}\n\n{kept}".rstrip("\n") + "\n"


def check_card(text: str, base_model: str | None, license: License | None) -> None:
    """Reads a card back as the Hub does and holds what it will display against what is meant.

    Raises:
        ExportError: the metadata is no valid block, or says something else.
    """
    wanted = {"library_name": LIBRARY, "base_model": base_model, "license": None if license is None else license.id}
    try:
        found = ModelCard(text, ignore_metadata_errors=False).data
    except (ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise ExportError(
            f"export.push_to: the model card is not valid, got {' '.join(str(error).split())}; report this"
        ) from error
    wrong = [key for key, value in wanted.items() if found.get(key) != value]
    wrong += ["tags"] * (LIBRARY not in (found.get("tags") or []))
    if wrong:
        raise ExportError(
            f"export.push_to: the model card says something else than is meant, got {wrong[0]} "
            f"{found.get(wrong[0])!r}; report this"
        )


def _use(repo: str, revision: str | None, target: str) -> str:
    """How to start with specdraft."""
    words, arguments = (f" head.revision={revision}", f'revision="{revision}", ') if revision else ("", "")
    return USE.format(repo=repo, words=words, arguments=arguments, target=target)


def hub_id(name: str) -> str | None:
    """The Hub id of a target, None for one that is only known on the machine it was trained on."""
    name = HUB_NAMES.get(name, name)
    return name if _HUB_ID.fullmatch(name) and not Path(name).exists() else None


def _link(repo: str | None) -> str | None:
    return None if repo is None else f"[{repo}](https://huggingface.co/{repo})"


def _facts(head: DraftHead, config: Mapping[str, Any]) -> str:
    """What the head is."""
    target = config["target"]
    method = (importlib.import_module(type(head).__module__).__doc__ or head.config.kind).splitlines()[0]
    drafted = head.config.draft_vocab_size
    vocabulary = (
        f"{drafted:,} of {head.spec.vocab_size:,} tokens" if drafted else f"all {head.spec.vocab_size:,} tokens"
    )
    rows = {
        "Target": target["name"],
        "Target revision": target["revision"] or "not pinned",
        "Target fingerprint": f"`{target['fingerprint']}`",
        "Method": method,
        "Draft depth": str(head.config.num_draft_tokens),
        "Draft vocabulary": vocabulary,
        "Parameters": f"{head.num_parameters:,} ({config['dtype']})",
        "Settings": _inline({k: v for k, v in config["head"].items() if k != "kind"}),
    }
    return _markdown(("", ""), list(rows.items()))


def _results(results: Mapping[str, Any] | None) -> list[str]:
    """Figures of every set, by category and by depth, and where they were measured."""
    if not results:
        return ["Not evaluated: run `specdraft eval` and export again."]
    decode, machine = results["decode"], results["environment"]
    shape = "a chain" if decode["tree"] is None else f"a tree of {len(decode['tree'])} nodes"
    if decode.get("dynamic"):
        shape = f"a tree of {decode['dynamic']['total_tokens']} nodes grown at every step"
    processor = ", ".join(machine["accelerators"]) if decode["device"] == "cuda" else machine["cpu"]
    parts = [
        MEASURED.format(
            how=_how(decode),
            shape=shape,
            depth=decode["num_draft_tokens"],
            length=decode["max_new_tokens"],
            dtype=decode["dtype"],
            processor=processor,
            threads=machine["num_threads"],
            torch=machine["libraries"]["torch"],
            transformers=machine["libraries"]["transformers"],
        ),
        _markdown(("set", *SET_HEADER), [_set_row(name, figures) for name, figures in results["sets"].items()]),
    ]
    for name, figures in results["sets"].items():
        depths = [
            (str(k + 1), _format(rate), _format(survival))
            for k, (rate, survival) in enumerate(zip(figures["acceptance_rate"], figures["survival"], strict=True))
            if figures["reached_per_depth"][k]
        ]
        parts += [f"### {name}", _markdown(("depth", "acceptance rate (given all before)", "survival"), depths)]
        if len(figures["by_category"]) > 1:
            rows = [_set_row(category, part) for category, part in figures["by_category"].items()]
            parts.append(_markdown(("category", *SET_HEADER), rows))
    return parts


def _how(decode: Mapping[str, Any]) -> str:
    """Greedy, or with which settings tokens were drawn and drafts accepted."""
    changed = decode.get("sampling")
    if not changed:
        return "Greedy"
    settings = ", ".join(f"{key} {value}" for key, value in changed.items() if key != "seed")
    kind = "Sampled" if decode["temperature"] else "Greedy"
    lossy = "" if decode["lossless"] else "; **lossy**: the text's distribution is not the target's"
    return f"{kind} ({settings}{lossy})"


def _set_row(name: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    rates = figures["tokens_per_s"]
    return (
        name,
        str(figures["num_prompts"]),
        _estimate(figures["acceptance_length"]),
        _format(rates["autoregressive"], 1),
        _format(rates["speculative"], 1),
        _estimate(figures["speedup"]),
        "not applicable (sampled)"
        if figures["identical_outputs"] is None
        else f"{figures['identical_outputs']} of {figures['num_prompts']}",
    )


def _training(config: Mapping[str, Any]) -> list[str]:
    """How the head came about, as far as config.json says."""
    training = config.get("training")
    if not training:
        return ["config.json holds no record of the training."]
    text = f"{training['step']:,} optimizer steps over {training['tokens']:,} tokens."
    if "acceptance_length" in training:
        text += f" Chosen by measured acceptance length ({training['acceptance_length']:.3f} on held-out prompts)."
    rows = [
        (f"{group}.{name}", _inline(values[name]))
        for group, names in SHOWN_SETTINGS.items()
        for values in [training["settings"].get(group) or {}]
        for name in names
        if name in values
    ]
    return [text, *([_markdown(("setting", "value"), rows)] if rows else [])]


def _hub_datasets(config: Mapping[str, Any]) -> list[str]:
    """Sources of the training data that are data sets of the Hub."""
    sources = ((config.get("training") or {}).get("settings", {}).get("data") or {}).get("sources", [])
    names = [source.partition("#")[0].partition(":")[0] for source in sources]
    return [n for n in names if _HUB_ID.fullmatch(n) and not n.endswith((".jsonl", ".json", ".parquet"))]


def _eval_results(results: Mapping[str, Any] | None) -> list[EvalResult]:
    """Acceptance length and speed-up of every set, for the Hub's model index; the values of results.json unrounded."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=name,
            dataset_name=name,
            metric_type=metric,
            metric_name=metric.replace("_", " "),
            metric_value=figures[metric]["value"],
        )
        for name, figures in (results or {"sets": {}})["sets"].items()
        for metric in ("acceptance_length", "speedup")
        if figures[metric]["value"] is not None
    ]


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


def _inline(value: Any) -> str:
    """A setting on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_inline(item)}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _format(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _estimate(estimate: Mapping[str, Any]) -> str:
    if estimate["ci95"] is None:
        return _format(estimate["value"])
    low, high = estimate["ci95"]
    return f"{_format(estimate['value'])} [{low:.3f}, {high:.3f}]"
