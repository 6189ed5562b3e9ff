"""Fine-tuning on conversations against transformers: labels of -100 where nothing is learned, one text at a time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config import load_run
from megalith.data.chat.dataset import ChatDataset
from megalith.data.tokenizer import train_byte_level_bpe
from megalith.models.hf import open_folder, parameter_shapes
from megalith.numerics.tolerance import NOISE_FLOAT32, gradient_error
from megalith.training.tasks.origin import settings_from
from tests.data.chat.examples import CHATS, GENERATION, SPECIAL, assistant, prepare_chats, user
from tests.models.hf.peers import as_in_files
from tests.rank_pool import ranks
from tests.tiny_run import settings
from tests.training.on_ranks import first_steps
from tests.training.tasks.conversion.folders import write_folder

transformers = pytest.importorskip("transformers")

SEQ = 128
RECORDS = [{"messages": chat} for chat in CHATS]
RECORDS += [{"messages": [user(f"{n} " * (n % 5)), assistant(f"{n} + {n} = {2 * n}")]} for n in range(20)]
GRADIENTS = 1e-4  # relative to the norm of each


def theirs_on_each(folder: Path, model: Any) -> tuple[float, dict[str, Tensor]]:
    """The mean loss over all answers, as transformers computes it for each conversation, and its gradients."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    asked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    sums, count = [], 0
    for record in RECORDS:
        out = tokenizer.apply_chat_template(record["messages"], **asked)
        ids, mask = torch.tensor([out["input_ids"]]), torch.tensor([out["assistant_masks"]]).bool()
        labels = torch.where(mask, ids, -100)
        sums.append(model(input_ids=ids, labels=labels).loss * int(mask.sum()))
        count += int(mask.sum())
    loss = torch.stack(sums).sum() / count
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("shape", "parallel", "size"), [("llama", {}, 1), ("qwen3", {"context": 2}, 2)])
def test_loss_and_gradients_are_those_of_transformers(shape, parallel, size, tmp_path):
    folder = tmp_path / "source"
    model = write_folder(folder, shape, "float32")
    train_byte_level_bpe(["some words to merge, some more words"] * 9, 270, SPECIAL).save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text(GENERATION)
    prefix = prepare_chats(folder, RECORDS).prefix
    data = {"train": str(prefix), "seq_length": SEQ, "eod_mask_loss": False}
    num_rows = ChatDataset(prefix, SEQ, 1234).num_samples
    assert num_rows < len(RECORDS)
    train = {"global_batch_size": num_rows, "micro_batch_size": 1, "seed": 1234}
    optim, precision = {"clip_norm": 1e9}, {"dtype": "float32"}
    tree = settings(tmp_path, data=data, train=train, optim=optim, precision=precision, parallel=parallel)
    of_folder = settings_from(str(folder), None)
    tree |= {"model": of_folder["model"], "load": of_folder["load"]}
    loss, gradients = theirs_on_each(folder, model)
    config = load_run(tree, world_size=size)
    want = open_folder(folder).family.from_hf(as_in_files(model, gradients), config.model)
    want = {name: want[name] for name in parameter_shapes(config.model)}
    norm = torch.stack([gradient.norm() for gradient in want.values()]).norm().item()
    for found in ranks(size, first_steps, tree, size, 1):
        assert found.losses[0] == pytest.approx(loss, rel=1e-6)
        assert found.gradients[0].keys() == want.keys()
        for name, got in found.gradients[0].items():
            assert gradient_error(got, want[name], norm, NOISE_FLOAT32) < GRADIENTS, name
