"""A tiny target and conversations in a folder, and the words that make a sub-command use them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tiny import tiny_target

WORDS = ("apples", "boats", "cats", "dogs", "eggs", "fish")


def make_workspace(folder: Path) -> Path:
    """``folder`` with the target in ``target``, conversations in ``chats.jsonl`` and prompts in ``asked.jsonl``."""
    target = tiny_target("llama")
    target.model.save_pretrained(folder / "target")
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(folder / "target")
    with (folder / "chats.jsonl").open("w") as chats, (folder / "asked.jsonl").open("w") as asked:
        for i, word in enumerate(WORDS):
            question = {"role": "user", "content": f"Do you like {word}?"}
            answer = {"role": "assistant", "content": f"I like {word}, and {WORDS[i - 1]} too."}
            chats.write(json.dumps({"messages": [question, answer]}) + "\n")
            asked.write(json.dumps({"prompt": f"What about {word}?"}) + "\n")
    return folder


def target_words(folder: Path) -> list[str]:
    """Overrides that name the tiny target."""
    return [f"target.name={folder / 'target'}", "target.device=cpu", "target.pack_weights=false"]


def experiment_words(folder: Path) -> list[str]:
    """Overrides for prepare, train, doctor and run: everything small."""
    return [
        *target_words(folder),
        f"data.sources=[{folder / 'chats.jsonl'}]",
        "data.regenerate=false",
        "data.batch_size=2",
        "data.max_length=128",
        "data.max_new_tokens=8",
        "trainer.mixed_precision=no",
        "trainer.epochs=1",
        "trainer.eval_prompts=0",
        "decode.max_new_tokens=8",
        f"eval.prompts=[{folder / 'asked.jsonl'}]",
        "eval.limit=2",
        "eval.bootstrap_samples=100",
    ]
