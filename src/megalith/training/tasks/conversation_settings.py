"""Refuses settings that have no effect on conversations, or only on them."""

from megalith.config import DataConfig
from megalith.data.conversations import holds_conversations
from megalith.data.indexed_dataset import IndexedDataset
from megalith.errors import ConfigError

__all__ = ["check_settings_of_conversations"]


def check_settings_of_conversations(data: DataConfig) -> None:
    """Raises ConfigError for a setting of ``data`` without effect. Raises DataError if a dataset cannot be read."""
    are_chats = [holds_conversations(IndexedDataset(prefix)) for prefix in data.train_sets.values()]
    held_out = [holds_conversations(IndexedDataset(prefix)) for prefix in data.valid_sets.values()]
    if data.fill_in_the_middle is not None and all(are_chats):
        raise ConfigError(
            "data.fill_in_the_middle reorders texts, but data.train holds conversations, which keep their order; leave "
            "it out"
        )
    for name in ("eod_mask_loss", "reset_attention_mask", "reset_position_ids"):
        if getattr(data, name) and all(are_chats + held_out):
            raise ConfigError(
                f"data.{name} has no effect on conversations, which are kept apart in their rows and have a loss of "
                "their own, and no dataset of the run holds texts; leave it out"
            )
    if data.long_conversations is not None and not any(are_chats + held_out):
        raise ConfigError(
            f"data.long_conversations ({data.long_conversations}) has no effect, because no dataset of the run holds "
            "conversations (megalith data chat); leave it out"
        )
