"""Runs ``train.py`` as a launcher does, and then prints the threads of gloo that are left: ``launch_job.py WORD...``."""

from __future__ import annotations

import json
import os
import runpy
import sys

from tests.integration.test_distributed import ROOT
from tests.integration.train_job import gloo_threads


def main() -> None:
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except SystemExit:
        sys.stdout.write(f"RESULT {json.dumps({'rank': int(os.environ['RANK']), 'threads': gloo_threads()})}\n")
        raise


if __name__ == "__main__":
    main()
