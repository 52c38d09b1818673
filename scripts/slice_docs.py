"""Keep code shown in documents equal to the code that runs.

A document holds `<!-- slice: PATH -->`, a fenced block, and `<!-- end slice -->`. The block repeats the lines
of PATH between `# docs: start-head` and `# docs: end-head`, or the whole of a YAML file.

Usage: `python scripts/slice_docs.py [--write] DOCUMENT ...`; without --write it changes nothing and exits
with 1 when a block differs.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START, END = "# docs: start-head", "# docs: end-head"
SLICE = re.compile(
    r"(?P<open><!-- slice: (?P<path>[\w./-]+) -->\n)(?P<block>.*?)(?P<close><!-- end slice -->)", re.DOTALL
)
FENCES = {".py": "python", ".yaml": "yaml"}


def read_slice(path: Path) -> str:
    """Return the marked lines of a source file, or all of it when it is a YAML file.

    Raises:
        ValueError: the file does not hold exactly one pair of markers, in order.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix == ".yaml":
        return "\n".join(lines).strip("\n")
    starts = [i for i, line in enumerate(lines) if line.strip() == START]
    ends = [i for i, line in enumerate(lines) if line.strip() == END]
    if len(starts) != 1 or len(ends) != 1 or starts[0] >= ends[0]:
        raise ValueError(f"{path.name}: needs one line `{START}` and after it one line `{END}`")
    return "\n".join(lines[starts[0] + 1 : ends[0]]).strip("\n")


def sliced_paths(text: str) -> list[str]:
    """Return the source files that a document slices, in order, relative to the project's root."""
    return [match["path"] for match in SLICE.finditer(text)]


def render(text: str, root: Path = ROOT) -> str:
    """Return a document's text with every block rewritten from its source."""

    def block(match: re.Match[str]) -> str:
        path = root / match["path"]
        return f"{match['open']}```{FENCES[path.suffix]}\n{read_slice(path)}\n```\n{match['close']}"

    return SLICE.sub(block, text)


def main() -> int:
    """Check or rewrite the documents named on the command line."""
    parser = argparse.ArgumentParser(description="Check that code in documents equals the code that runs.")
    parser.add_argument("--write", action="store_true", help="rewrite the blocks that differ")
    parser.add_argument("documents", nargs="+", type=Path)
    args = parser.parse_args()
    stale = []
    for document in args.documents:
        text = document.read_text(encoding="utf-8")
        fresh = render(text)
        if fresh != text:
            stale.append(document)
            if args.write:
                document.write_text(fresh, encoding="utf-8")
    for document in stale:
        print(f"{document}: {'rewritten' if args.write else 'differs; run with --write'}")
    return 1 if stale and not args.write else 0


if __name__ == "__main__":
    raise SystemExit(main())
