"""Finds how a model writes conversations: its chat template and special tokens, in the files beside tokenizer.json."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalith.data.companions import TEMPLATE, TOKENIZER_CONFIG, TOOLS_TEMPLATE, read_companions
from megalith.data.sidecar import ChatOrigin
from megalith.errors import CheckpointError, DataError, StorageError
from megalith.input_file import read_regular_file
from megalith.storage import LocalStore

__all__ = ["ChatFormat", "companions_with_templates", "tokenizer_file"]

_IN_RUNS = "huggingface"  # the subfolder of a run that holds these files
_MOST_BYTES = 1 << 24  # of a template; published ones have a few kB


@dataclass(frozen=True)
class ChatFormat:
    """How conversations become text.

    Attributes:
        template: a Jinja template; None: records have a prompt and a completion, which are not changed.
        tools_template: the template for conversations with tools, if it is another one.
        tokens: name and text of each special token that templates refer to, such as ``bos_token``.
        split_turns: every message of the assistant ends a document of its own, after all messages before it.
    """

    template: str | None = None
    tools_template: str | None = None
    tokens: tuple[tuple[str, str], ...] = ()
    split_turns: bool = False

    @classmethod
    def find(
        cls, tokenizer: Path, template: Path | None = None, *, use_template: bool = True, split_turns: bool = False
    ) -> "ChatFormat":
        """Reads the files beside ``tokenizer``, a tokenizer.json in the folder of a model or of a run.

        Args:
            template: a file with the template to use in place of the model's own.
            use_template: False: use no template.

        Raises:
            DataError: a file cannot be read, or is not what its name says.
        """
        folder = tokenizer.parent / _IN_RUNS
        try:
            files = read_companions(LocalStore(folder if folder.is_dir() else tokenizer.parent))
        except (CheckpointError, StorageError) as error:
            raise DataError(f"the files beside {tokenizer} must describe its chat template: {error}") from error
        settings = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
        others = json.loads(files.get("special_tokens_map.json", b"{}"))
        tokens = tuple(sorted({**_tokens(others), **_tokens(settings)}.items()))
        if not use_template:
            return cls(tokens=tokens, split_turns=split_turns)
        if template is not None:
            return cls(_template_in(template), tokens=tokens, split_turns=split_turns)
        named = _templates(files, settings)
        if named and "default" not in named:
            raise DataError(
                f"the model beside {tokenizer} has chat templates for {', '.join(sorted(named))}, but no default; give "
                "the file of one with --chat-template"
            )
        return cls(named.get("default"), named.get("tool_use"), tokens, split_turns)

    def origin(self, ends: tuple[int, ...]) -> ChatOrigin:
        """What a dataset records of this; ``ends`` are the tokens that end a turn in it."""
        return ChatOrigin(template=self.template, tools_template=self.tools_template, ends=ends)


def tokenizer_file(path: Path) -> Path:
    """``path`` itself, or the tokenizer.json in it if it is a folder."""
    return path / "tokenizer.json" if path.is_dir() else path


def companions_with_templates(kept: Mapping[str, bytes], chat: ChatOrigin) -> dict[str, bytes]:
    """``kept``, files of ``read_companions``, with the templates that made conversations in place of the model's own.

    Only the default template and the one for tools are replaced. Without a template, nothing is.
    """
    settings = json.loads(kept.get(TOKENIZER_CONFIG, b"{}"))
    own: Mapping[str, str] = {}
    with suppress(DataError):  # the model's own are damaged, and another one was given
        own = _templates(kept, settings)
    is_own = (own.get("default"), own.get("tool_use")) == (chat.template, chat.tools_template)
    if chat.template is None or (is_own and TEMPLATE not in kept):  # a list in tokenizer_config.json may have others
        return {**kept}
    others = {name: content for name, content in kept.items() if name not in (TEMPLATE, TOOLS_TEMPLATE)}
    if settings.pop("chat_template", None) is not None:  # transformers ignores it beside a file; others may not
        others[TOKENIZER_CONFIG] = (json.dumps(settings, indent=2) + "\n").encode()
    if chat.tools_template is not None:
        others[TOOLS_TEMPLATE] = chat.tools_template.encode()
    return {**others, TEMPLATE: chat.template.encode()}


def _templates(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> dict[str, str]:
    """The templates by name. Files take precedence over tokenizer_config.json, as in transformers."""
    in_files = {
        Path(name).stem if "/" in name else "default": content.decode()
        for name, content in files.items()
        if name.endswith(".jinja")
    }
    given = settings.get("chat_template")
    if in_files or given is None:
        return in_files
    try:
        named = [{"name": "default", "template": given}] if isinstance(given, str) else given
        found = {str(each["name"]): str(each["template"]) for each in named}
        "".join(found.values()).encode()  # JSON can spell half a character
    except (TypeError, KeyError, UnicodeEncodeError) as error:
        raise DataError(
            f"chat_template in tokenizer_config.json must be a text, or a list of named ones; got {given!r:.80}"
        ) from error
    return found


def _tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens among ``settings``, each a text or an object with its ``content``."""
    found = {name: value for name, value in settings.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _template_in(path: Path) -> str:
    try:
        return read_regular_file(path, _MOST_BYTES).decode()
    except OSError as error:
        raise DataError(
            f"--chat-template must be a file with a Jinja template; {path} cannot be read: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must be a Jinja template in UTF-8; {error}") from error
