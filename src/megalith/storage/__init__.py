"""Storage: stores, atomically published files and folders, manifests, and the lock that allows one run per folder."""

from megalith.storage.atomic import fsync_folder, publish_file, publish_folder, write_json_atomic, write_text_atomic
from megalith.storage.failures import explained
from megalith.storage.free_space import free_bytes, require_free_bytes
from megalith.storage.json_fields import MOST_COUNTED, WAY_OUT, JsonFields, float_sized, shown
from megalith.storage.local_store import LocalStore
from megalith.storage.manifest import FileRecord, Recorder, has_all_files, manifest_of, read_manifest, record_of
from megalith.storage.new_folder import new_folder
from megalith.storage.open_store import Location, child, open_store, sibling
from megalith.storage.run_lock import RunLock
from megalith.storage.store import MANIFEST, Buffer, Store

__all__ = [
    "MANIFEST",
    "MOST_COUNTED",
    "WAY_OUT",
    "Buffer",
    "FileRecord",
    "JsonFields",
    "LocalStore",
    "Location",
    "Recorder",
    "RunLock",
    "Store",
    "child",
    "explained",
    "float_sized",
    "free_bytes",
    "fsync_folder",
    "has_all_files",
    "manifest_of",
    "new_folder",
    "open_store",
    "publish_file",
    "publish_folder",
    "read_manifest",
    "record_of",
    "require_free_bytes",
    "shown",
    "sibling",
    "write_json_atomic",
    "write_text_atomic",
]
