"""The prompts of ``train.generation`` as token ids."""

from math import ceil, lcm

from megalith.config import RunConfig
from megalith.data.special_tokens import t5_tokens
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.training.exchange_sizes import symmetric_sizes

__all__ = ["encode_prompts"]


def encode_prompts(config: RunConfig, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the token ids of each prompt; for a T5, sentinels are parsed and its end token is appended.

    Raises ConfigError for a prompt that has no tokens, or as many as the model has positions, and if all prompts
    together exceed the room of dispatch.method=symmetric; DataError for a tokenizer that lacks a T5's special tokens.
    """
    generation, positions = config.train.generation, config.model.max_position_embeddings
    is_t5 = config.model.kind == "t5"
    end = [t5_tokens(tokenizer).end] if is_t5 else []
    encoded = []
    for prompt in generation.prompts if generation is not None else ():
        [tokens] = tokenizer.encode_prompts([prompt], special_tokens=is_t5)
        if len(tokens) == len(tokenizer.begin):
            raise ConfigError(f"the prompt {prompt!r:.60} has no tokens in {tokenizer.name}; leave it out")
        if positions is not None and len(tokens) >= positions:
            raise ConfigError(
                f"the prompt {prompt!r:.60} must be shorter than the model's {positions} positions; got {len(tokens)} "
                "tokens; shorten it"
            )
        encoded.append(tokens + end)
    _check_room(config, [len(tokens) for tokens in encoded])
    return encoded


def _check_room(config: RunConfig, lengths: list[int]) -> None:
    """Checks that all prompts fit at once, padded; if rows are split over ranks, also with all generated tokens."""
    generation, sizes, parallel = config.train.generation, symmetric_sizes(config), config.parallel
    if generation is None or sizes is None:
        return
    columns, split = max(lengths), parallel.context * parallel.tensor
    if split > 1:
        positions = config.model.max_position_embeddings
        columns += generation.max_new_tokens
        if positions is not None:  # a text ends at the last position, while its prompt is padded to the longest
            columns = min(columns, max(lengths) + positions - min(lengths))
        multiple = lcm(2 * parallel.context if parallel.context > 1 else 1, split)
        columns = ceil(columns / multiple) * multiple
    given = len(lengths) * columns // split
    if given > sizes.max_tokens:
        lower = "a lower max_new_tokens, " if split > 1 else ""
        raise ConfigError(
            f"parallel.dispatch.method=symmetric has room for {sizes.max_tokens} tokens per rank (a micro-batch), but "
            f"{len(lengths)} prompts padded to {columns} tokens need {given} per rank; use fewer or shorter prompts, "
            f"{lower}a larger train.micro_batch_size, or parallel.dispatch.method=all_to_all"
        )
