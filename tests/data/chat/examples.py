"""Conversations, chat templates like those of published models, and a tokenizer that has their special tokens."""

import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megalith.data.chat.encoder import ChatEncoder, EncodedChat
from megalith.data.chat.format import ChatFormat
from megalith.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megalith.data.prepare import PrepareSummary, prepare
from megalith.data.tokenizer import Tokenizer, train_byte_level_bpe

TOKENS = (("bos_token", "<s>"), ("eos_token", "<|endoftext|>"))
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<turn>", "</turn>"]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# with BOS, trimmed contents and a name of its own for the assistant, as Gemma's
TURNS = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}
{% for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<turn>' + role + '\\n' + message.content | trim + '</turn>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<turn>model\\n' }}
{%- endif %}"""
# without a generation prompt, with end-of-text tokens, as Llama 2's
INSTRUCTIONS = """{% for message in messages %}
{% if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content + ' [/INST]' }}
{% elif message.role == 'assistant' %}{{ ' ' + message.content + ' ' + eos_token }}
{% else %}{% continue %}{% endif %}
{% endfor %}"""
# tools, as JSON, and null contents of messages that call one
TOOLS = """{% if tools %}{{ '<|im_start|>tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>' }}
{% endif %}
{% for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is defined %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson(indent=1) }}{% endfor %}
{{- '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# removes the reasoning of all turns but the last, as Qwen3's and DeepSeek-R1's
REASONING = """{% for message in messages %}
{%- set content = message.content if loop.last else message.content.split('</think>')[-1] %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
GENERATION = """{% for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}"""
TEMPLATES = {
    "chatml": CHATML,
    "turns": TURNS,
    "instructions": INSTRUCTIONS,
    "tools": TOOLS,
    "generation": GENERATION,
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


CHATS = [
    [user("How are you?"), assistant("I am fine.")],
    [user("  one "), assistant("two\n"), user("three ü"), assistant("four 漢字"), user("five"), assistant(" six ")],
    [user("left without an answer"), assistant("yes"), user("really?")],
]


def tokenizer() -> Tokenizer:
    return train_byte_level_bpe(["How are you? I am fine. one two three four five six\n"] * 9, 300, SPECIAL)


def encoder(template: str | None = CHATML, **fields: Any) -> ChatEncoder:
    return ChatEncoder(tokenizer(), ChatFormat(template, tokens=TOKENS, **fields))


def encode(template: str, messages: list[dict[str, Any]], **record: Any) -> EncodedChat:
    [found] = encoder(template)({"messages": messages, **record})
    return found


def runs(found: EncodedChat) -> list[str]:
    """The text of each run of tokens: context, learned, context, ..."""
    assert sum(found.lengths) == len(found.tokens)
    decode = tokenizer().decode
    return [decode(found.tokens[a:b]) for a, b in pairwise(accumulate(found.lengths, initial=0))]


def write_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    """Writes the tokenizer and its template; returns the path of tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(folder / "tokenizer.json")
    tokens = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder / "tokenizer.json"


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepare_chats(
    folder: Path, records: list[dict[str, Any]], *, name: str = "chats", **options: Any
) -> PrepareSummary:
    """Prepares ``records`` with the template in ``folder``, which is made if it is not there; ``folder / name``."""
    path = folder / "tokenizer.json"
    if not path.exists():
        write_tokenizer(folder)
    of_format = {option: options.pop(option) for option in ("use_template", "split_turns") if option in options}
    file = write_lines(folder / f"{name}.jsonl", records)
    return prepare([file], folder / name, tokenizer=path, chat=ChatFormat.find(path, **of_format), **options)


def write_conversations(
    prefix: Path, num_chats: int = 40, longest: int = 14, *, vocab_size: int = 61, seed: int = 0, **origin: Any
) -> str:
    """Writes conversations of 3 to ``longest`` random tokens with one or two answers; returns the prefix."""
    random = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in random.integers(3, longest + 1, num_chats):
            borders = np.sort(random.choice(np.arange(1, length), size=2, replace=False))
            lengths = np.diff([0, *borders, length]).tolist()  # context, answer, context
            builder.add_document(random.integers(1, vocab_size, length), lengths if length % 3 else [0, *lengths])
        builder.finalize(vocab_size=vocab_size, eod=0, conversations=True, **origin)
    return str(prefix)


def conversations(prefix: str | Path) -> list[tuple[list[int], list[bool]]]:
    """Tokens of each conversation, and whether each is learned, read from the files one by one."""
    dataset = IndexedDataset(prefix)
    found = []
    for first, end in pairwise(dataset.document_indices.tolist()):
        sequences = [dataset.get(number).tolist() for number in range(first, end)]
        tokens = [token for sequence in sequences for token in sequence]
        found.append((tokens, [bool(n % 2) for n, sequence in enumerate(sequences) for _ in sequence]))
    return found
