"""The command `specdraft`: finds the sub-command, composes its settings, runs it, and reports mistakes in one line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import specdraft
from specdraft.core.errors import ConfigError, SpecDraftError

COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("plan", "say what a run will take: disk, memory, steps and time, here and on named GPUs"),
    "doctor": ("doctor", "check target, data, masks and head before a long run"),
    "prepare": ("prepare", "render the training conversations, answered by the target itself"),
    "train": ("train", "train a draft head"),
    "eval": ("evaluate", "measure acceptance, speed and unchanged output of a head"),
    "tune": ("tune", "choose the draft's shape for this machine, by measurement"),
    "generate": ("generate", "answer a prompt, streaming"),
    "export": ("export", "write a head for its users and their engines, upload it to the Hub"),
    "import": ("importing", "bring in a head that another project has published"),
    "run": ("run", "prepare, train and measure in one go"),
    "compare": ("compare", "train several heads at an equal budget, measure them, print one table"),
}
"""Sub-command -> its module in specdraft.cli, and what it does."""

USAGE = """\
specdraft {version}: draft heads that make a language model decode faster with unchanged output

usage: specdraft COMMAND [KEY=VALUE ...] [FLAG ...]

commands:
{commands}

examples:
  specdraft run experiment=smollm2_eagle3
  specdraft eval head=outputs/smollm2_eagle3/best prompts=builtin
  specdraft generate head=outputs/smollm2_eagle3/best prompt='Why is the sky blue?' decode.show=true

flags of every command:
  --help              its settings with their present values and meaning, and the options of each group
  --cfg job           the composed settings as YAML, without running
  --info searchpath   where YAML is looked for
  --config-dir DIR    look for YAML in DIR, too
  --multirun          run once for each combination of values such as optim.lr=1e-3,3e-4
  --hydra-help        further flags
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (without the program's name; None = that of the process).

    Returns the exit code: 0, 1 (a fault of specdraft, or a check that failed), 2 (a mistake of the user, told in one
    line on stderr) or 130 (interrupted).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _main(words))


def guarded(action: Callable[[], int]) -> int:
    """The exit code of ``action``, with the user's mistakes told in one line; a fault of ours keeps its traceback."""
    if not sys.stderr.isatty():
        # transformers and huggingface_hub read it when they are imported: no bars in files and pipes.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        return action()
    except SpecDraftError as error:
        sys.stderr.write(f"specdraft: error: {' '.join(str(error).split())}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\nspecdraft: interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader of a pipe, such as `| head`, has left. Python flushes once more at exit: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _main(words: list[str]) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        return _print_usage(ok=bool(words))
    if words[0] == "--version":
        sys.stdout.write(f"specdraft {specdraft.__version__}\n")
        return 0
    command, *rest = words
    if command not in COMMANDS:
        raise _no_such_command(command)
    return _dispatch(command, rest)


def _print_usage(*, ok: bool) -> int:
    lines = [f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items()]
    (sys.stdout if ok else sys.stderr).write(USAGE.format(version=specdraft.__version__, commands="\n".join(lines)))
    return 0 if ok else 2


def _no_such_command(word: str) -> ConfigError:
    import difflib

    near = difflib.get_close_matches(word, COMMANDS, n=1)
    advice = f"did you mean {near[0]}?" if near else f"use one of {', '.join(COMMANDS)}"
    return ConfigError(f"command: no such command, got {word}; {advice}")


def _dispatch(command: str, words: list[str]) -> int:
    """Reads flags and overrides; runs the command, or prints what was asked for instead."""
    flags = _parse_flags(words)
    if flags.multirun and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"--multirun: every process would sweep on its own, got WORLD_SIZE={os.environ['WORLD_SIZE']}; "
            "launch once per combination"
        )
    if flags.hydra_help or flags.info or flags.cfg or flags.multirun:
        from specdraft.cli.hydra_flags import run_hydra
        from specdraft.config.overrides import prepare_overrides

        def job(run: Any) -> None:
            check_before_loading(run)
            run_command(command, run)

        run_hydra(command, prepare_overrides(command, flags.overrides), flags, job)
        return 0
    return _compose_and_run(command, flags)


def _compose_and_run(command: str, flags: argparse.Namespace) -> int:
    """The ordinary case. Settings are the same in every process, so only the first reports a mistake in them."""
    from specdraft.config.overrides import prepare_overrides

    folders = [flags.config_dir] if flags.config_dir is not None else []
    words = flags.overrides
    if command == "compare" and folders:
        words = [*words, f"hydra.searchpath=[file://{Path(folders[0]).absolute()}]"]  # for the heads' own composition
    try:
        overrides = prepare_overrides(command, words)
        from specdraft.config.store import compose_config, to_run  # Hydra takes a third of the time of an answer

        config = compose_config(command, overrides, config_dirs=folders, config_name=flags.config_name)
        if flags.help:
            from specdraft.cli.help import print_help

            print_help(command, COMMANDS[command][1], config)
            return 0
        run = to_run(command, config)
        check_before_loading(run)
    except SpecDraftError:
        if is_first_process():
            raise
        return 2
    run_command(command, run)
    return 0


def check_before_loading(run: Any) -> None:
    """What can be known about the run's folder before torch is imported and weights load.

    Raises:
        ConfigError: see ``check_output`` and ``check_comparison``.
    """
    from specdraft.config.comparison import check_comparison
    from specdraft.config.paths import check_output
    from specdraft.config.schema import CompareRun, PipelineRun, TrainRun

    # Only one process looks: another may find what the first has begun to write.
    if isinstance(run, (TrainRun, PipelineRun)) and is_first_process():
        check_output(run.folder, run.resume)
    if isinstance(run, CompareRun):
        check_comparison(run)


def run_command(command: str, run: Any) -> None:
    """Imports the sub-command and runs it with its settings."""
    module = importlib.import_module(f"specdraft.cli.{COMMANDS[command][0]}")
    module.run(run)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from specdraft.train.sharding import end_processes

        end_processes()


def is_first_process() -> bool:
    """Whether this is the process of rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one of ours."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: cannot be read, got {message}; see specdraft --help")


def _parse_flags(words: list[str]) -> argparse.Namespace:
    """The flags of Hydra that have a meaning here; Hydra reads those it acts on once more."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=INFO)
    return parser.parse_intermixed_args(words)


INFO = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]


def train_main() -> int:
    """Entry of the root ``train.py``, for launchers of several processes."""
    return main(["train", *sys.argv[1:]])
