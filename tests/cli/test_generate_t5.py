"""megalith generate for a T5: the decoder's output for a prompt, with sentinels, from a run or its export."""

import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megalith.cli import generate as command
from megalith.config import load_run
from megalith.data.tokenizer import Tokenizer
from megalith.models.sampling import Sampling
from megalith.models.t5_generation import generate as answer
from megalith.training.inference import load_model
from megalith.training.pretrain import pretrain
from megalith.training.tasks.conversion import export_model, import_model
from megalith.training.tasks.generation import TextSource
from tests.program import Ended, here
from tests.rank_pool import ranks
from tests.tiny_masked import masked_settings
from tests.training.tasks.test_pretrain_t5 import t5_settings

PROMPT = "the red <extra_id_0> sees a house <extra_id_1> river"
PARTS = ["the red ", "<extra_id_0>", " sees a house ", "<extra_id_1>", " river"]


def trained(tree: dict[str, Any]) -> None:
    pretrain(load_run(tree), str, str)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t5")
    # a large learning rate, so that its answers differ
    tree = t5_settings(folder / "text", train={"steps": 4}, optim={"lr": 0.03}, precision={"dtype": "float32"})
    ranks(1, trained, {**tree, "run": str(folder / "run")})
    return folder / "run"


def generate(source: Path, *arguments: object, prompt: str = PROMPT) -> Ended:
    return here("generate", source, "--prompt", prompt, "--max-new-tokens", 8, *arguments)


def worked_out(run: Path, ids: list[int], sampling: Sampling, seed: int = 0) -> str:
    """The answer to token ids, computed by the model alone."""
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    padding = tokenizer.token_id("<pad>")
    assert padding is not None
    model: Any = load_model(run).model
    end = [tokenizer.eod]
    [tokens] = answer(model, [ids], 8, start_token=padding, sampling=sampling, seeds=[seed], end_tokens=end)
    return tokenizer.decode(tokens)


def ids_of(run: Path, parts: list[str]) -> list[int]:
    """Sentinels become tokens, the rest is text, and the end token is that of every encoder row."""
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    found = [[tokenizer.token_id(part)] if part.startswith("<extra_id") else tokenizer.encode(part) for part in parts]
    return [*(id for ids in found for id in ids if id is not None), tokenizer.eod]


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 0), (1.5, 3)])
def test_a_prompt_is_answered_on_a_line_of_its_own(temperature, seed, run):
    found = generate(run, "--special-tokens", "--temperature", temperature, "--seed", seed)
    assert found.code == 0, found.err
    want = worked_out(run, ids_of(run, PARTS), Sampling(temperature), seed)
    assert want
    assert found.out == f"{PROMPT}\n{want}\n"


def test_the_encoder_reads_sentinels_and_the_end_as_in_training(run):
    # after a few steps, the model would give much the same answers without them
    opened = TextSource.open(run)
    assert opened.encode([PROMPT, "the"], special_tokens=True) == [ids_of(run, PARTS), ids_of(run, ["the"])]
    assert opened.encode([PROMPT]) == [ids_of(run, [PROMPT])]


def test_sentinels_are_text_unless_they_are_asked_for(run, caplog):
    with caplog.at_level(logging.WARNING):
        found = generate(run, "--temperature", 0)
    assert caplog.text.count("--special-tokens parses them") == 1
    assert found.out == f"{PROMPT}\n{worked_out(run, ids_of(run, [PROMPT]), Sampling(0.0))}\n"
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        generate(run, "--temperature", 0, prompt="the red house")
        generate(run, "--temperature", 0, "--special-tokens")
    assert not caplog.records


def test_an_exported_folder_answers_as_its_run(run, tmp_path):
    export_model(run, tmp_path / "hf", with_proof=False)
    asked = ["--special-tokens", "--temperature", 1.2, "--samples", 2]
    want = generate(run, *asked)
    assert want.out.count(PROMPT + "\n") == 2
    assert generate(tmp_path / "hf", *asked) == want


def test_an_answer_is_shown_as_it_is_drawn_and_ends_before_a_stop_string(run, monkeypatch):
    shown: list[str] = []
    monkeypatch.setattr(command, "_show", shown.append)
    sampled = ["--special-tokens", "--temperature", 1.5, "--seed", 3]
    generate(run, *sampled)
    assert shown[0] == f"{PROMPT}\n"
    assert len(shown) > 4
    monkeypatch.undo()
    text = "".join(shown).removeprefix(f"{PROMPT}\n").removesuffix("\n")
    stop = text[len(text) // 2 :][:3]
    assert generate(run, *sampled, "--stop", stop).out == f"{PROMPT}\n{text[: text.index(stop)]}\n"


def test_a_prompt_that_is_longer_than_the_rows_of_training_is_told(run, caplog):
    with caplog.at_level(logging.WARNING):
        assert generate(run, prompt="the red house " * 40).code == 0
    assert any("the encoder was trained on rows of 32" in record.message for record in caplog.records)


def test_what_writes_no_text_or_has_no_likelihood_is_refused(run, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"context": "a", "choices": ["b", "c"], "answer": 0}\n')
    asked = here("eval", run, "--choices", tmp_path / "x.jsonl")
    assert asked.code == 2
    assert "must be a GPT to score text, such as the choices of questions; it is a model.t5, whose loss" in asked.err
    tree = masked_settings(tmp_path / "text", train={"steps": 1}, precision={"dtype": "float32"})
    ranks(1, trained, {**tree, "run": str(tmp_path / "bert")})
    refused = generate(tmp_path / "bert")
    assert refused.code == 2
    assert "must be a GPT or a T5 to generate text; it is a model.bert, whose predictions" in refused.err
    refused = here("eval", tmp_path / "bert", "--choices", tmp_path / "x.jsonl")
    assert refused.code == 2
    assert "must be a GPT to score text, such as the choices of questions; it is a model.bert" in refused.err


def test_an_import_whose_tokenizer_has_an_unused_token_beyond_the_last_row_generates(run, tmp_path):
    export_model(run, tmp_path / "hf", with_proof=False)
    before = generate(tmp_path / "hf", "--temperature", 0)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    import_model(tmp_path / "hf", tmp_path / "back", with_proof=False)
    assert generate(tmp_path / "back", "--temperature", 0) == before


def test_a_tokenizer_without_sentinels_is_refused(run, tmp_path):
    export_model(run, tmp_path / "hf", with_proof=False)
    kept = (tmp_path / "hf" / "tokenizer.json").read_text()
    (tmp_path / "hf" / "tokenizer.json").write_text(kept.replace("<extra_id_0>", "<other>"))
    refused = generate(tmp_path / "hf")
    assert refused.code == 2
    assert "T5 needs a tokenizer with sentinels" in refused.err
