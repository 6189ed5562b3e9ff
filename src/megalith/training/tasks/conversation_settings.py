"""Refuses settings that have no effect on conversations, or only on them."""

from megalith.config import DataConfig
from megalith.data.conversations import holds_conversations
from megalith.data.indexed_dataset import IndexedDataset
from megalith.errors import ConfigError

__all__ = ["check_settings_of_conversations"]


def check_settings_of_conversations(data: DataConfig) -> None:
    """Raises ConfigError for a setting of ``data`` without effect. Raises DataError if a dataset cannot be read."""
    are_chats = [holds_conversations(IndexedDataset(prefix)) for prefix in data.train_sets.values()]
    if data.fill_in_the_middle is not None and all(are_chats):
        raise ConfigError(
            "data.fill_in_the_middle reorders texts, but data.train holds conversations, which keep their order; leave "
            "it out"
        )
    if data.long_conversations is None or any(are_chats):
        return
    if not any(holds_conversations(IndexedDataset(prefix)) for prefix in data.valid_sets.values()):
        raise ConfigError(
            f"data.long_conversations ({data.long_conversations}) has no effect, because no dataset of the run holds "
            "conversations (megalith data chat); leave it out"
        )
