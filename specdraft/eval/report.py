"""Results on the terminal and on the disk: tables of one head, a table of several, results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdraft.core.errors import DataError
from specdraft.core.files import write_json
from specdraft.eval.drift import drift_line

PLAIN_WIDTH = 240
SHOWN_DIVERGENCES = 5
SHOWN_DEPTHS = 6
"""Depths that a table of several has room for."""


def report_console() -> Console:
    """Standard output; wide enough for the tables when it is a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def write_results(results: Mapping[str, Any], path: str | Path) -> Path:
    """Writes results.json through a temporary file: a kill leaves the old file or the new one.

    Raises:
        DataError: the file cannot be written; an older one is untouched.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, results)
    except OSError as error:
        raise DataError(
            f"output: the results cannot be written, got {path} ({error}); free space or choose another output"
        ) from error
    return path


def print_results(results: Mapping[str, Any], console: Console) -> None:
    """The tables of one head: a summary of all sets, then each set by category and by depth.

    On a terminal the tables have lines, elsewhere they are Markdown.
    """
    decode = results["decode"]
    shape = "a chain" if decode["tree"] is None else f"a tree of {len(decode['tree'])} nodes"
    if decode.get("dynamic"):
        shape = f"a tree of {decode['dynamic']['total_tokens']} nodes grown at every step"
    if results["head"] is None:
        shape = "drafts"
    batch = decode.get("batch_size", 1)
    rows = f"batches of {batch}, " if batch > 1 else ""
    console.print(
        f"{subject_name(results)} on {results['target']['name']}: {shape} of depth {decode['num_draft_tokens']}, "
        f"{sampling_text(decode)}, {rows}"
        f"{decode['dtype']} on {decode['device']}, at most {decode['max_new_tokens']} new tokens"
    )
    if "drift" in results:
        console.print(drift_line(results["drift"]), style="yellow", markup=False, soft_wrap=True)
    _show(console, "Summary", _summary(results, console))
    for name, figures in results["sets"].items():
        if len(figures["by_category"]) > 1:
            _show(console, f"{name} by category", _by_category(figures, console))
        if figures["survival"]:
            _show(console, f"{name} by depth", _by_depth(figures, console))
        print_notes(name, figures, console)


def subject_name(results: Mapping[str, Any]) -> str:
    """What was measured, in a few words: its name in a comparison, else the kind of its head or of its proposer."""
    kind = results["proposer"]["kind"] if results["head"] is None else results["head"]["kind"]
    name = str(results.get("name", kind))
    return f"{name} (adapted target, lossy)" if results["target"].get("adapted") else name


def comparison_table(results: Sequence[Mapping[str, Any]], console: Console, set_name: str = "builtin") -> Table:
    """One row per head or other proposer, all measured on ``set_name``: acceptance, survival by depth, speed, identity.

    Raises:
        DataError: one was not measured on that set.
    """
    for one in results:
        if set_name not in one["sets"]:
            raise DataError(
                f"results: {subject_name(one)} was not measured on the set, got {set_name}; evaluate it on that set"
            )
    tested = [sum(map(bool, one["sets"][set_name]["reached_per_depth"])) for one in results]
    depth = min(SHOWN_DEPTHS, max(tested))
    table = _table(
        console,
        "proposer",
        "acceptance length [95 %]",
        *(f"depth {k + 1}" for k in range(depth)),
        "tok/s plain",
        "tok/s speculative",
        "speed-up [95 %]",
        "identical",
    )
    for one in results:
        figures = one["sets"][set_name]
        shares = zip(figures["survival"][:depth], figures["reached_per_depth"], strict=False)
        survival = [_share(value) if reached else "" for value, reached in shares]
        table.add_row(
            escape(subject_name(one)),
            _interval(figures["acceptance_length"]),
            *survival,
            *[""] * (depth - len(survival)),
            *_rates(figures),
            _interval(figures["speedup"], "x"),
            _identical(figures),
        )
    return table


def budget_table(results: Sequence[Mapping[str, Any]], console: Console, set_name: str) -> Table:
    """One row per head that was trained with an equal budget: what it reached, what it is, and what it cost."""
    table = _table(
        console,
        "head",
        "acceptance length [95 %]",
        "speed-up [95 %]",
        "parameters",
        "training tokens",
        "training time",
        "tokens/s",
        "peak memory",
        "identical",
    )
    for one in results:
        figures, cost = one["sets"][set_name], one["training"]
        rate = cost["tokens_per_s"]
        table.add_row(
            escape(subject_name(one)),
            _interval(figures["acceptance_length"]),
            _interval(figures["speedup"], "x"),
            f"{one['head']['num_parameters']:,}",
            f"{cost['tokens']:,}",
            f"{cost['seconds'] / 60:.1f} min",
            "-" if rate is None else f"{rate:,.0f}",
            f"{cost['peak_memory_gib']:.2f} GiB",
            _identical(figures),
        )
    return table


def _summary(results: Mapping[str, Any], console: Console) -> Table:
    table = _table(
        console,
        "set",
        "prompts",
        "tokens",
        "acceptance length [95 %]",
        "accepted per step",
        "tok/s plain",
        "tok/s speculative",
        "speed-up [95 %]",
        "without prefill",
        "identical",
    )
    for name, figures in results["sets"].items():
        table.add_row(
            name,
            str(figures["num_prompts"]),
            str(figures["num_tokens"]),
            _interval(figures["acceptance_length"]),
            _number(figures["accepted_per_step"]),
            *_rates(figures),
            _interval(figures["speedup"], "x"),
            _number(figures["without_prefill"]["speedup"]["value"], "x"),
            _identical(figures),
        )
    return table


def _by_category(figures: Mapping[str, Any], console: Console) -> Table:
    table = _table(console, "category", "prompts", "acceptance length [95 %]", "speed-up [95 %]", "identical")
    for category, part in figures["by_category"].items():
        table.add_row(
            category,
            str(part["num_prompts"]),
            _interval(part["acceptance_length"]),
            _interval(part["speedup"], "x"),
            _identical(part),
        )
    return table


def _by_depth(figures: Mapping[str, Any], console: Console) -> Table:
    """Both rates: ``rate`` is conditional on all before being accepted, ``survival`` is of all steps."""
    table = _table(console, "depth", "tested", "accepted", "rate", "survival")
    rows = zip(
        figures["reached_per_depth"],
        figures["accepted_per_depth"],
        figures["acceptance_rate"],
        figures["survival"],
        strict=True,
    )
    for depth, (tested, accepted, rate, survival) in enumerate(rows, 1):
        if tested:
            table.add_row(str(depth), str(tested), str(accepted), _share(rate), _share(survival))
    return table


def print_notes(name: str, figures: Mapping[str, Any], console: Console) -> None:
    """Time of a step, and whatever was not as it should be."""
    parts = ", ".join(f"{part} {_number(ms)}" for part, ms in figures["time_ms_per_step"].items())
    console.print(
        f"{name}: ms per step: {parts}; a plain step {_number(figures['autoregressive_ms_per_step'])}", markup=False
    )
    for reason, count in figures["skipped"].items():
        console.print(f"{name}: {count} prompts not decoded to their end ({reason})", style="yellow", markup=False)
    found = figures["first_divergences"]
    for one in found[:SHOWN_DIVERGENCES]:
        margin = "none" if one["margin"] is None else f"{one['margin']:.2e}"
        console.print(
            f"{name}: output differs for prompt {one['prompt']}, turn {one['turn']}, from token {one['position']}; "
            f"margin of the two best logits there {margin}",
            style="red",
            markup=False,
        )
    if len(found) > SHOWN_DIVERGENCES:
        console.print(f"{name}: {len(found) - SHOWN_DIVERGENCES} more differences are in the results file", style="red")


def _table(console: Console, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else box.MARKDOWN)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    return table


def _show(console: Console, title: str, table: Table) -> None:
    console.print()
    console.print(title, style="bold", markup=False)
    console.print(table)


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(estimate: Mapping[str, Any], unit: str = "") -> str:
    """Value and interval, e.g. ``2.31x [2.20, 2.42]``. Brackets are escaped: rich reads them as markup."""
    text = _number(estimate["value"], unit)
    if estimate["ci95"] is None:
        return text
    low, high = estimate["ci95"]
    return f"{text} \\[{low:.2f}, {high:.2f}]"


def _rates(figures: Mapping[str, Any]) -> tuple[str, str]:
    """Tokens per second, plain and speculative."""
    rates = figures["tokens_per_s"]
    plain, speculative = rates["autoregressive"], rates["speculative"]
    return "-" if plain is None else f"{plain:.1f}", "-" if speculative is None else f"{speculative:.1f}"


def sampling_text(decode: Mapping[str, Any]) -> str:
    """How tokens were chosen, for one line: greedy, or what differs from it, and whether the drafts were lossless."""
    changed = decode.get("sampling")
    if not changed:
        return "greedy"
    text = ", ".join(f"{key} {value}" for key, value in changed.items() if key not in ("seed", "verifier"))
    text = f"{text}, drafts accepted by {decode['verifier']}"
    return text if decode["lossless"] else f"{text} (lossy: the text's distribution is not the target's)"


def _identical(figures: Mapping[str, Any]) -> str:
    if figures["identical_outputs"] is None:
        return "not applicable (sampled)"
    count, total = figures["identical_outputs"], figures["num_prompts"]
    return f"{count}/{total}" if count == total else f"[red]{count}/{total}[/red]"
