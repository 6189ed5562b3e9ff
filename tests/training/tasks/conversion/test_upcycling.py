"""megalith convert upcycle: a dense model, ours or Hugging Face's, becomes a mixture of experts with the same loss."""

import json

import pytest
import torch

from megalith.checkpoint import find_checkpoint
from megalith.checkpoint.load import read_state
from megalith.config.recipes import read_preset
from megalith.errors import ConfigError
from megalith.observe.metrics import read_metrics
from megalith.training.inference import evaluate_checkpoint, load_model
from megalith.training.tasks.conversion import upcycle_model
from tests.program import here
from tests.rank_pool import ranks
from tests.tiny_run import settings
from tests.training.outcomes import losses, run_here
from tests.training.tasks.conversion.folders import write_folder

EXPERTS = ("model.moe.num_experts=8", "model.moe.ffn_hidden_size=24")
TOKENS = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))


def trained(folder, **model):
    """A dense run of two steps in float32."""
    tree = settings(folder, model=model, precision={"dtype": "float32"}, train={"steps": 2})
    ranks(1, run_here, tree, 1)
    return folder / "run"


def loss_of(run, data):
    [found] = evaluate_checkpoint(run, str(data), None)
    return found.loss


@pytest.mark.parametrize(
    ("model", "experts"),
    [
        ({}, ()),
        pytest.param({"mlp_bias": True, "activation": "squared_relu"}, ("model.moe.top_k=4",), marks=pytest.mark.slow),
        (
            {},
            (
                "model.moe.router.score_function=sigmoid",
                "model.moe.router.expert_bias_update_rate=1e-3",
                "model.moe.shared_ffn_hidden_size=16",
                "model.moe.layers=[false,true]",
            ),
        ),
    ],
    ids=["swiglu", "squared relu with biases", "sigmoid with an expert bias, shared experts, a dense layer"],
)
def test_the_loss_at_step_0_is_that_of_the_dense_run_and_training_goes_on_from_it(model, experts, tmp_path):
    run, out = trained(tmp_path, **model), tmp_path / "experts"
    found = upcycle_model(run, out, [*EXPERTS, *experts])
    assert found.inexact_for == ()
    data = tmp_path / "text"
    assert abs(loss_of(out, data) - loss_of(run, data)) < 1e-5
    few = (f"data.train={data}", "train.steps=1", "train.global_batch_size=2", "optim.lr=1e-3")
    began = here("train", out, *few)
    assert f"started at step 0 from the weights of {out}/checkpoints/step-00000000" in began.out, began


# two layers of the demo's model, whose MLPs are 704 wide, with weights large enough for these to dominate the loss
DEMO = {**read_preset("llama-4m"), "num_layers": 2, "vocab_size": 2048, "init_method_std": 0.1}


@pytest.mark.parametrize(
    "experts",
    [
        ("model.moe.ffn_hidden_size=352",),
        pytest.param(("model.moe.ffn_hidden_size=704",), marks=pytest.mark.slow),
        pytest.param(("model.moe.ffn_hidden_size=176", "model.moe.top_k=4"), marks=pytest.mark.slow),
    ],
    ids=["G=2", "G=1", "G=4"],
)
def test_experts_of_the_demos_model_have_its_loss_and_are_trained_by_several_ranks(experts, tmp_path):
    run, out = trained(tmp_path, **DEMO), tmp_path / "experts"
    found = upcycle_model(run, out, ["model.moe.num_experts=8", *experts])
    assert found.inexact_for == ()
    assert abs(loss_of(out, tmp_path / "text") - loss_of(run, tmp_path / "text")) < 1e-5
    step = str(find_checkpoint(out / "checkpoints"))
    tree = settings(tmp_path, model=found.config, precision={"dtype": "float64"}, load=step)
    whole, half = tmp_path / "one process", tmp_path / "two ranks"
    begin = {**tree["train"], "steps": 1}
    ranks(1, run_here, {**tree, "run": str(whole), "train": {**begin, "steps": 2}}, 1)
    ranks(2, run_here, {**tree, "run": str(half), "train": begin, "parallel": {"expert": 2}}, 2)
    ranks(1, run_here, {**tree, "run": str(half), "train": {**begin, "steps": 2}, "load": None}, 1)
    assert len(losses(half)) == 2
    assert losses(half) == pytest.approx(losses(whole), rel=1e-9)
    assert [record["layout"] for record in read_metrics(half)] == ["tp1 ep2 dp2", "tp1 dp1"]


def test_how_it_was_made_is_in_the_checkpoint_and_the_seed_is_that_of_training(tmp_path):
    run = trained(tmp_path)
    for seed in (1, 2):
        upcycle_model(run, tmp_path / f"of {seed}", [*EXPERTS, f"train.seed={seed}"], noise=0.5, scaling="published")
    step = find_checkpoint(tmp_path / "of 2" / "checkpoints")
    assert read_state(step)["upcycling"] == {
        "source": str(find_checkpoint(run / "checkpoints")),
        "granularity": 2,
        "num_experts": 8,
        "scaling": "published",
        "noise": 0.5,
        "seed": 2,
    }
    about = json.loads((tmp_path / "of 2" / "about.json").read_text())
    assert about["upcycled from"] == str(find_checkpoint(run / "checkpoints"))
    one, other = (dict(load_model(tmp_path / f"of {seed}").model.named_parameters()) for seed in (1, 2))
    assert sum(tensor.numel() for tensor in one.values()) == about["parameters"]
    differing = {name.rpartition("mlp.")[2] for name, tensor in one.items() if not tensor.equal(other[name])}
    assert differing == {"gate.weight", "experts.gate_up_proj", "experts.down_proj"}


def test_a_folder_of_hugging_face_is_upcycled_by_the_command_and_keeps_its_dtype_and_its_tokenizer(tmp_path):
    source, dense, out = (tmp_path / name for name in ("source", "dense", "out"))
    write_folder(source, "llama", "bfloat16")
    assert here("convert", "import", source, "--out", dense, "--no-proof").code == 0
    found = here("convert", "upcycle", source, "--out", out, *EXPERTS)
    assert (found.code, found.err) == (0, ""), found
    for line in (
        "parameters; new ones in bfloat16\n",
        "experts    8 per layer, 2 per token: 4 copies of 2 shards of an MLP\n",
        "tokenizer  270 entries; '<|endoftext|>' ends a document\n",
    ):
        assert line in found.out, found.out
    assert "not exact" not in found.out
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert {tensor.dtype for tensor in load_model(out).model.parameters()} == {torch.bfloat16}
    ours, want = (load_model(run, dtype=torch.float32).model for run in (out, dense))
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), want(TOKENS), rtol=0, atol=1e-5)


def test_what_makes_it_inexact_is_said_and_what_is_impossible_is_refused(tmp_path):
    source = tmp_path / "source"
    write_folder(source, "llama")
    found = here("convert", "upcycle", source, "--out", tmp_path / "out", *EXPERTS, "model.moe.top_k=3")
    assert "not exact  model.moe.top_k (3) is not a multiple of the 2 shards" in found.out, found
    refused = here(
        "convert", "upcycle", source, "--out", tmp_path / "no", "model.moe.num_experts=8", "model.moe.ffn_hidden_size=7"
    )
    assert (refused.code, "model.moe.ffn_hidden_size (7) must divide" in refused.err) == (2, True), refused
    refused = here("convert", "upcycle", source, "--out", tmp_path / "no", *EXPERTS, "model.hidden_size=64")
    assert (refused.code, "must not change settings of model except model.moe" in refused.err) == (2, True), refused
    with pytest.raises(ConfigError, match="upcycling needs a dense model; this one already has 8 experts per layer"):
        upcycle_model(tmp_path / "out", tmp_path / "no", EXPERTS)
    assert not (tmp_path / "no").exists()
