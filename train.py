"""Entry for launchers: `accelerate launch train.py experiment=...` is `specdraft train experiment=...`."""

from specdraft.cli.train import main

if __name__ == "__main__":
    raise SystemExit(main())
