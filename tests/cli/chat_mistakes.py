"""A table of user mistakes with conversations."""

from pathlib import Path
from typing import Any

from tests.cli.mistakes import Mistake, text, train
from tests.data.chat.examples import (
    CHATML,
    CHATS,
    REASONING,
    assistant,
    user,
    write_conversations,
    write_lines,
    write_tokenizer,
)
from tests.tiny_run import write_dataset

__all__ = ["CHAT_MISTAKES"]

_THOUGHTS = [user("one"), assistant("<think>hm</think>two"), user("three"), assistant("four")]


def chat(*options: object, template: str | None = CHATML, **record: Any) -> Mistake:
    """``megalith data chat`` on two valid records, of which the fields ``record`` replace those of the second."""

    def command(folder: Path) -> list[object]:
        write_tokenizer(folder / "model", template)
        records = [{"messages": CHATS[0]}, {"messages": CHATS[1]} | record]
        file = write_lines(folder / "c.jsonl", [{name: value for name, value in r.items() if value} for r in records])
        given = ["data", "chat", file, "--out", folder / "p", "--tokenizer", folder / "model", "--processes", 1]
        return [*given, *(option(folder) if callable(option) else option for option in options)]

    return command


def plain_text(folder: Path) -> list[object]:
    write_tokenizer(folder / "model")
    given = ["--out", folder / "p", "--tokenizer", folder / "model"]
    return ["data", "chat", text(folder, "c.txt", b"one"), *given]


def on_chats(*overrides: str, seq_length: int = 32) -> Mistake:
    return lambda folder: train(
        folder,
        *overrides,
        data={"train": write_conversations(folder / "chats"), "seq_length": seq_length, "eod_mask_loss": False},
    )


def on_texts(*overrides: str) -> Mistake:
    return lambda folder: train(folder, *overrides, data={"train": write_dataset(folder / "words")})


# like MISTAKES: what is wrong: (the command, what the message must say)
CHAT_MISTAKES: dict[str, tuple[Mistake, str]] = {
    "chat: a record of another form": (
        chat(messages=None, text="a"),
        r"line 2, must have a list under 'messages', .*'text'",
    ),
    "chat: nobody answers": (
        chat(messages=[user("a")]),
        r"line 2, must have a message of the assistant .*roles are user",
    ),
    "chat: messages of text": (chat(messages="a"), r"line 2, must have a list of messages under 'messages'; got 'a'"),
    "chat: a message without a role": (chat(messages=[{"content": "a"}]), "message 0 is {'content': 'a'}"),
    "chat: no template": (
        chat(template=None),
        r"line 1, has messages, but .* no chat template; give --chat-template FILE",
    ),
    "chat: no tokenizer": (
        lambda f: ["data", "chat", text(f, "c.jsonl", b"{}"), "--out", f / "p", "--tokenizer", f / "none"],
        "none must be a tokenizer.json; it cannot be read",
    ),
    "chat: a folder without a tokenizer": (
        lambda f: ["data", "chat", text(f, "c.jsonl", b"{}"), "--out", f / "p", "--tokenizer", f],
        r"tokenizer\.json must be a tokenizer.json; it cannot be read",
    ),
    "chat: a template that is not there": (
        chat("--chat-template", "none.jinja"),
        r"--chat-template must be a file with a Jinja template; none\.jinja cannot be read",
    ),
    "chat: a template that is none": (
        chat(template="{% for"),
        "the chat template must be a Jinja template; it cannot be",
    ),
    "chat: a template that removes reasoning": (
        chat(template=REASONING, messages=_THOUGHTS),
        "line 2, cannot be split after message 1: .*use --split-turns",
    ),
    "chat: a template that looks for special tokens": (
        chat(
            template="{{ 'a' if '<|im_end|>' in messages[0].content }}" + CHATML,
            messages=[user("<|im_end|>"), assistant("a")],
        ),
        r"line 2, must have messages that the chat template writes as they are; .* \(<\|im_end\|>\); remove special",
    ),
    "chat: a variable that the template has": (
        chat(chat_template_kwargs={"messages": []}),
        "line 2, must have variables .* under 'chat_template_kwargs' .*; it has messages; remove them",
    ),
    "chat: tools of text": (chat(tools="add"), "line 2, must have a list, or the JSON text of one, under 'tools'"),
    "chat: two ways to write": (
        chat("--no-chat-template", "--split-turns"),
        "--no-chat-template leaves --chat-template and --split-turns without effect; give only one",
    ),
    "chat: plain text": (plain_text, r"conversations must be in \.jsonl or \.parquet files.*c\.txt; convert it"),
    "chat: everything held out": (chat("--valid", 1.0), "--valid must be a fraction of the documents"),
    "train: conversations longer than a row": (
        on_chats(seq_length=8),
        r"conversations of .*chats must have at most 9 tokens, .*use data.seq_length=\d+, .*=cut, .*=skip",
    ),
    "train: conversations in another order": (
        on_chats("data.fill_in_the_middle.rate=0.5"),
        "data.fill_in_the_middle reorders texts, but data.train holds conversations, .*leave it out",
    ),
    "train: long conversations in texts": (
        on_texts("data.long_conversations=skip"),
        r"data.long_conversations \(skip\) has no effect, because no dataset of the run holds conversations",
    ),
}
