"""megalith generate and megalith eval --choices on Hugging Face folders: results match the models' own logits."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import AddedToken, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from megalith.data.tokenizer import Tokenizer
from tests.cli.mistakes import tokenizer
from tests.program import here
from tests.training.tasks.conversion.folders import write_folder

MEGATRON = Path(__file__).parents[1] / "models" / "megatron"
ROWS, EOD = 48, 47  # vocabulary size of the checkpoints there, and its last id


@pytest.fixture
def words(tmp_path):
    """A tokenizer.json whose words are w0 to w46, in id order."""
    made = tokenizers.Tokenizer(models.WordLevel({f"w{id}": id for id in range(EOD)} | {"</s>": EOD}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken("</s>", special=True)])
    made.save(str(tmp_path / "words.json"))
    return tmp_path / "words.json"


def text_of(ids):
    return " ".join(f"w{id}" for id in ids)


def ask(path, questions):
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return path


def wrong(questions):
    """The same questions, each with a wrong answer."""
    return [question | {"answer": (question["answer"] + 1) % len(question["choices"])} for question in questions]


def assert_accuracies(folder, questions, path, *arguments):
    """Every question is answered correctly, and none if another choice is marked as correct."""
    for asked, share in ((questions, "100.00%"), (wrong(questions), "0.00%")):
        found = here("eval", folder, "--choices", ask(path, asked), *arguments)
        assert found.code == 0, found
        assert f"accuracy {share}" in found.out


@pytest.mark.parametrize("name", ["llama-tp2", "gpt-tp1", "windows-tp1", "nemotron-tp1"])
def test_a_checkpoint_of_megatron_goes_on_and_answers_as_the_logits_that_megatron_computed_say(name, words, tmp_path):
    saved = torch.load(MEGATRON / name / "logits.pt")
    tokens, logits = saved["tokens"][0].tolist(), saved["logits"][0, :, :EOD]
    contexts = [text_of(tokens[:length]) for length in range(1, len(tokens) + 1)]
    (tmp_path / "prompts").write_text("\n".join(contexts))
    likeliest = saved["logits"][0].argmax(-1).tolist()
    drawn = here(
        *("generate", MEGATRON / name, "--tokenizer", words, "--prompts-file", tmp_path / "prompts"),
        *("--temperature", 0, "--max-new-tokens", 1),
    )
    assert drawn.code == 0, drawn
    wanted = [context + ("" if id == EOD else f" w{id}") for context, id in zip(contexts, likeliest, strict=True)]
    assert [line for line in drawn.out.splitlines() if not line.startswith("===")] == wanted
    offered = [(3 * number % EOD, (5 * number + 1) % EOD, (7 * number + 2) % EOD) for number in range(len(tokens))]
    questions = [
        {"context": context, "choices": [f" w{id}" for id in ids], "answer": int(row[list(ids)].argmax())}
        for context, ids, row in zip(contexts, offered, logits, strict=True)
    ]
    assert_accuracies(MEGATRON / name, questions, tmp_path / "asked.jsonl", "--tokenizer", words)


@pytest.mark.parametrize("shape", ["llama", "gpt2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_folder_of_hugging_face_answers_as_transformers_does(shape, tmp_path):
    folder = tmp_path / "hf"
    theirs = write_folder(folder, shape)
    encode = Tokenizer.load(folder / "tokenizer.json").encode
    questions = []
    for context in ("some", "words to", "to merge, some"):
        choices, likelihoods = [" words", " more words", " to"], []
        for choice in choices:
            start, whole = len(encode(context)), encode(context + choice)
            with torch.no_grad():
                logits = theirs(torch.tensor([whole])).logits[0].log_softmax(-1)
            likelihoods.append(sum(logits[at - 1, whole[at]].item() for at in range(start, len(whole))))
        questions.append({"context": context, "choices": choices, "answer": likelihoods.index(max(likelihoods))})
    assert_accuracies(folder, questions, tmp_path / "asked.jsonl")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_text_ends_where_transformers_ends_it_at_any_of_several_tokens(file, tmp_path):
    folder = tmp_path / "hf"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        write_folder(folder, "llama")
    read = Tokenizer.load(folder / "tokenizer.json")
    prompt = torch.tensor([read.encode("some words to merge")])
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    [whole] = AutoModelForCausalLM.from_pretrained(folder).generate(prompt, **how)
    new = whole[prompt.shape[1] :].tolist()
    at = next(index for index in range(1, 11) if new[index] not in new[:index])
    if file == "config.json":  # it is used where the other file is missing
        (folder / "generation_config.json").unlink()
    described = folder / file
    described.write_text(json.dumps(json.loads(described.read_text()) | {"eos_token_id": [0, new[at]]}))
    [theirs] = AutoModelForCausalLM.from_pretrained(folder).generate(prompt, **how)
    assert theirs.tolist() == whole[: prompt.shape[1] + at + 1].tolist()
    found = here("generate", folder, "--prompt", "some words to merge", "--max-new-tokens", 12, "--temperature", 0)
    assert found.code == 0, found
    assert found.out == read.decode(theirs[:-1].tolist()) + "\n"


def test_a_model_without_a_tokenizer_or_with_one_that_does_not_fit_is_one_message(words, tmp_path):
    folder = MEGATRON / "gpt-tp1"
    asked = ask(tmp_path / "asked.jsonl", [{"context": "w1", "choices": [" w2", " w3"], "answer": 0}])
    larger = tokenizer(tmp_path, 270, "larger.json")
    for arguments, says in {
        (): "has no tokenizer.json; give --tokenizer PATH",
        ("--tokenizer", larger): f"must have ids below {ROWS}, the vocabulary size of the model in {folder}",
        ("--tokenizer", words, "--eod", "none"): "must have an end-of-document token, 'none'",
        ("--eod", "</s>"): "--eod names a token of --tokenizer, but --tokenizer is not given",
    }.items():
        for command in (("eval", folder, "--choices", asked), ("generate", folder, "--prompt", "w1")):
            found = here(*command, *arguments)
            assert (found.code, found.out) == (2, ""), found
            assert found.err.startswith("error: ")
            assert found.err.count("\n") == 1
            assert says in found.err
