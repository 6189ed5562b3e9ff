"""Text from a trained run: its model, its tokenizer, and a prompt."""

from megalith.errors import CheckpointError
from megalith.models.generation import Sampling, generate
from megalith.models.gpt_model import GPTModel
from megalith.training.inference import load_model
from megalith.training.preflight import load_tokenizer

__all__ = ["generate_text"]


def generate_text(source: str, prompt: str, max_new_tokens: int, *, sampling: Sampling, seed: int) -> str:
    """What the model of ``source``, a run or a checkpoint, adds to ``prompt``.

    Raises as ``load_model`` and ``generate`` do, and CheckpointError for a model that does not write text.
    """
    trained = load_model(source)
    if not isinstance(trained.model, GPTModel):
        raise CheckpointError(f"{source} holds a {type(trained.model).__name__}, which writes no text; name a GPT run")
    tokenizer = load_tokenizer(trained.config)
    tokens = generate(
        trained.model,
        tokenizer.encode(prompt),
        max_new_tokens,
        sampling=sampling,
        seed=seed,
        end_token=tokenizer.eod,
    )
    return tokenizer.decode(tokens)
