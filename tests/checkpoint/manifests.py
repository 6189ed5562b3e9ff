"""Forged checkpoints: files are changed, and the manifest is updated to match."""

from pathlib import Path

from megalith.storage import MANIFEST, manifest_of, record_of

__all__ = ["list_in_manifest", "replace_listed"]


def list_in_manifest(checkpoint: Path) -> None:
    """Writes a manifest of all files in ``checkpoint``."""
    names = [path.name for path in checkpoint.iterdir() if path.name != MANIFEST]
    records = {name: record_of([(checkpoint / name).read_bytes()]) for name in names}
    (checkpoint / MANIFEST).write_bytes(manifest_of(records))


def replace_listed(checkpoint: Path, name: str, content: bytes) -> None:
    """Writes ``content`` to the file ``name`` and lists it."""
    (checkpoint / name).write_bytes(content)
    list_in_manifest(checkpoint)
