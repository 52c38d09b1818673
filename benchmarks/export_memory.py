"""What an export takes: seconds, and the most memory above that of the process before it, for every format of a head.

    python benchmarks/export_memory.py --head FOLDER [--target FOLDER] [--formats eagle3 gguf ...]

Every format is written and verified in a process of its own. Before the clock starts, everything is imported and the
target's config and tokenizer are read. The memory is by the system's books, above that before: what the process allocated,
looked at every millisecond, and the largest resident set, in which pages of mapped files count that the system can take back
at any time. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

MIB = 2**20


def resident(key: str) -> int:
    """Bytes of this process under a key of the system's status: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"the system does not tell {key}")


class Watch:
    """The most memory that the process has allocated while it is entered: ``peak``, in bytes."""

    def __init__(self) -> None:
        self.peak = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._end.wait(0.001):
            self.peak = max(self.peak, resident("RssAnon"))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()


def measure(head: str, target: str | None, name: str) -> dict[str, float]:
    """Exports in this process. Bytes above the memory before, and seconds."""
    from specdraft.export._config import ExportConfig
    from specdraft.export.exporting import Source, export_head
    from specdraft.export.registry import find_format
    from specdraft.heads.storage import read_head_config
    from specdraft.targets.weights import TargetFiles

    find_format(name)
    TargetFiles(target or read_head_config(Path(head))["target"]["name"]).spec()
    with tempfile.TemporaryDirectory() as folder:
        config = ExportConfig(format=[name], output=f"{folder}/out")
        before, allocated = resident("VmRSS"), resident("RssAnon")
        Path("/proc/self/clear_refs").write_text("5")  # the largest set counts from here
        start = time.perf_counter()
        with Watch() as watch:
            (export,) = export_head(Source(head, target=target), config, console=Console(quiet=True))
        return {
            "seconds": time.perf_counter() - start,
            "allocated": watch.peak - allocated,
            "resident": resident("VmHWM") - before,
            "written": sum(export.sizes.values()),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", required=True)
    parser.add_argument("--target")
    parser.add_argument("--formats", nargs="+", default=["hf", "eagle3", "gguf", "openvino", "speculators", "trtllm"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.head, arguments.target, arguments.one)))
        return
    size = (Path(arguments.head) / "model.safetensors").stat().st_size
    names = ("format", "seconds", "allocated MiB", "over the head's size", "with mapped files", "written MiB")
    table = Table(*names, box=box.MARKDOWN)
    for name in arguments.formats:
        command = [sys.executable, __file__, "--head", arguments.head, "--one", name]
        command += ["--target", arguments.target] if arguments.target else []
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        table.add_row(
            name,
            f"{found['seconds']:.1f}",
            f"{found['allocated'] / MIB:.0f}",
            f"{found['allocated'] / size:.2f}",
            f"{found['resident'] / size:.2f}",
            f"{found['written'] / MIB:.0f}",
        )
    console = Console(width=120)
    console.print(f"head: {size / MIB:.1f} MiB")
    console.print(table)


if __name__ == "__main__":
    main()
