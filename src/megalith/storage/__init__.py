"""What lies on disk: files and folders that appear whole or not at all, manifests, free space, one run per folder."""

from megalith.storage.atomic import (
    fsync_folder,
    publish_file,
    publish_folder,
    write_json_atomic,
    write_text_atomic,
)
from megalith.storage.failures import explained
from megalith.storage.free_space import free_bytes, require_free_bytes
from megalith.storage.manifest import MANIFEST, FileRecord, has_all_files, read_manifest, record_of, write_manifest
from megalith.storage.run_lock import RunLock

__all__ = [
    "MANIFEST",
    "FileRecord",
    "RunLock",
    "explained",
    "free_bytes",
    "fsync_folder",
    "has_all_files",
    "publish_file",
    "publish_folder",
    "read_manifest",
    "record_of",
    "require_free_bytes",
    "write_json_atomic",
    "write_manifest",
    "write_text_atomic",
]
