"""The model card: valid metadata, the figures of results.json, nothing of this machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from specdraft.core.files import file_sha256
from specdraft.data.chat import ChatRenderer
from specdraft.decode._config import DecodeConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.eval._config import EvalConfig
from specdraft.eval.acceptance import evaluate_head
from specdraft.eval.prompts import Prompt
from specdraft.export.card import hub_id, model_card, portable
from specdraft.export.license import License
from specdraft.heads.storage import WEIGHTS_NAME, load_head, read_head_config, save_head
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import load_target
from tests.hub_server import card_errors
from tests.support import make_head
from tests.tiny import tiny_models, tiny_target, tiny_tokenizer

SETTINGS = {
    "name": "x",
    "output_dir": "/" + "home/someone/outputs",
    "data": {
        "sources": ["builtin", "/" + "data/mine.jsonl", "HuggingFaceH4/ultrachat_200k#train_sft"],
        "regenerate": True,
    },
    "loss": {"terms": {"soft_ce": 1.0, "smooth_l1": 0.5}, "step_decay": 0.8},
    "optim": {"lr": 3e-4, "schedule": "cosine"},
    "trainer": {"epochs": 2, "max_steps": None},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head with the record of a training, evaluated on two sets."""
    target = tiny_target()
    head = make_head("eagle3", target.spec, num_draft_tokens=3, draft_vocab_size=40)
    training = {"step": 1200, "tokens": 345678, "settings": SETTINGS, "acceptance_length": 2.125}
    folder = save_head(head, tmp_path_factory.mktemp("run") / "best", {"training": training})
    prompts = [Prompt(str(i), "odd" if i % 2 else "even", (f"Say {i}.",)) for i in range(4)]
    results = evaluate_head(
        target,
        head,
        {"builtin": prompts, "mt_bench": prompts[:1]},
        DecodeConfig(max_new_tokens=8),
        EvalConfig(bootstrap_samples=100),
        head_sha256=file_sha256(folder / WEIGHTS_NAME),
    )
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def card_of(folder: Path, target_name: str = "meta-llama/Llama-3.2-1B-Instruct", **changes: Any) -> ModelCard:
    config = portable(read_head_config(folder))
    config["target"]["name"] = target_name
    results = json.loads((folder / "results.json").read_text())
    arguments: dict[str, Any] = {
        "results": results,
        "base_model": hub_id(target_name),
        "repo_id": "me/my-head",
        "license": License("apache-2.0"),
        **changes,
    }
    return model_card(load_head(folder), config, **arguments)


def test_metadata_is_valid(folder: Path) -> None:
    card = card_of(folder)
    assert card_errors(str(card)) == []
    again = ModelCard(str(card), ignore_metadata_errors=False)
    data = again.data.to_dict()
    assert data["base_model"] == "meta-llama/Llama-3.2-1B-Instruct"
    assert data["license"] == "apache-2.0"
    assert data["library_name"] == "specdraft"
    assert data["datasets"] == ["HuggingFaceH4/ultrachat_200k"]
    assert {"speculative-decoding", "eagle3"} <= set(data["tags"])


def test_metadata_checker_refuses_what_the_hub_refuses(folder: Path) -> None:
    text = str(card_of(folder))
    assert card_errors(text.replace("base_model: meta", "base_modle: meta"))
    assert card_errors(text.replace("base_model: meta-llama/", "base_model: ../meta/"))
    assert card_errors("# no metadata")


def test_index_holds_the_figures_of_the_results(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text())
    found = {
        (result.dataset_type, result.metric_type): result.metric_value
        for result in ModelCard(str(card_of(folder))).data.eval_results
    }
    assert found == {
        (name, metric): figures[metric]["value"]
        for name, figures in results["sets"].items()
        for metric in ("acceptance_length", "speedup")
    }


def table_rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_tables_hold_the_figures_of_the_results(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text())
    rows = table_rows(str(card_of(folder)))
    for name, figures in results["sets"].items():
        length, speedup, rates = figures["acceptance_length"], figures["speedup"], figures["tokens_per_s"]
        (row,) = [row for row in rows if row[0] == name]
        assert row[1] == str(figures["num_prompts"])
        numbers = [float(n) for n in re.findall(r"[\d.]+", " ".join(row[2:6]))]
        wanted = [
            length["value"],
            *(length["ci95"] or []),
            rates["autoregressive"],
            rates["speculative"],
            speedup["value"],
            *(speedup["ci95"] or []),
        ]
        assert numbers == pytest.approx(wanted, abs=0.06)
        assert numbers[0] == pytest.approx(length["value"], abs=0.0006)
        assert row[6] == f"{figures['identical_outputs']} of {figures['num_prompts']}"
        for k in range(3):
            rate, survival = figures["acceptance_rate"][k], figures["survival"][k]
            row = [str(k + 1), "-" if rate is None else f"{rate:.3f}", f"{survival:.3f}"]
            assert (row in rows) == (figures["reached_per_depth"][k] > 0)
    assert {"even", "odd"} <= {row[0] for row in rows}


def test_card_tells_the_run(folder: Path) -> None:
    text = str(card_of(folder))
    rows = dict(row[:2] for row in table_rows(text))
    assert rows["Draft depth"] == "3"
    assert rows["Draft vocabulary"] == "40 of 97 tokens"
    assert "EAGLE-3" in rows["Method"]
    assert rows["Target fingerprint"] == f"`{read_head_config(folder)['target']['fingerprint']}`"
    assert rows["data.sources"] == "builtin, mine.jsonl, HuggingFaceH4/ultrachat_200k#train_sft"
    assert rows["loss.terms"] == "soft_ce 1.0, smooth_l1 0.5"
    assert rows["optim.lr"] == "0.0003"
    assert "1,200 optimizer steps over 345,678 tokens" in text
    assert "measured acceptance length (2.125" in text
    assert f"torch {torch.__version__}" in text
    assert 'load_head("me/my-head"' in text


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code block of the card, word for word, with head and target as folders of the names it uses."""
    monkeypatch.chdir(tmp_path)
    model, tokenizer = tiny_models["llama"](), tiny_tokenizer()
    model.save_pretrained("tiny-target")
    tokenizer.save_pretrained("tiny-target")
    target = load_target(TargetConfig(name="tiny-target"))
    save_head(make_head("medusa", target.spec), "me/my-head")
    config = read_head_config(Path("me/my-head"))
    text = str(model_card(load_head("me/my-head"), config, None, base_model=None, repo_id="me/my-head", license=None))
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(code, {})
    prompt = ChatRenderer(tokenizer).prompt_ids([{"role": "user", "content": "Tell me a story."}])
    answer = SpeculativeDecoder(target).generate(prompt, max_new_tokens=128).tokens
    assert capsys.readouterr().out == f"{tokenizer.decode(answer)}\n"


def test_card_without_results_licence_or_hub_target(folder: Path) -> None:
    card = card_of(folder, "my-local-model", results=None, license=None, repo_id=None)
    text = str(card)
    data = card.data.to_dict()
    assert not {"license", "base_model", "model-index"} & set(data)
    assert "Not evaluated" in text
    assert "None was stated" in text
    assert "The target was a local model" in text


def test_a_head_of_the_embedded_target_names_its_hub_id() -> None:
    assert hub_id("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert hub_id("my-local-model") is None
    assert hub_id("/" + "models/smollm2") is None


def test_a_local_folder_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_id("models/mine") == "models/mine"
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_id("models/mine") is None


def test_portable_drops_folders_and_nothing_else() -> None:
    value = {
        "a": [
            "/" + "home/me/data.jsonl",
            "C:\\data\\b.jsonl",
            "~/c.jsonl",
            "../d.jsonl",
            "owner/name#train",
            "x.jsonl",
        ],
        "b": {"c": 1, "d": None, "e": 0.5, "f": "text, with / a slash", "g": True},
    }
    assert portable(value) == {
        "a": ["data.jsonl", "b.jsonl", "c.jsonl", "d.jsonl", "owner/name#train", "x.jsonl"],
        "b": value["b"],
    }
