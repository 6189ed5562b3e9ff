"""The prompts of ``train.generation`` as token ids."""

from megalith.config import RunConfig
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError

__all__ = ["encode_prompts"]


def encode_prompts(config: RunConfig, tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of each prompt.

    Raises ConfigError for a prompt that has no tokens, or as many as the model has positions.
    """
    generation, positions = config.train.generation, config.model.max_position_embeddings
    encoded = []
    for prompt in generation.prompts if generation is not None else ():
        [tokens] = tokenizer.encode_prompts([prompt])
        if len(tokens) == len(tokenizer.begin):
            raise ConfigError(f"the prompt {prompt!r:.60} has no tokens in {tokenizer.name}; leave it out")
        if positions is not None and len(tokens) >= positions:
            raise ConfigError(
                f"the prompt {prompt!r:.60} has {len(tokens)} tokens and the model {positions} positions; shorten it"
            )
        encoded.append(tokens)
    return encoded
