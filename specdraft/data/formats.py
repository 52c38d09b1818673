"""One row of a data set -> messages in normal form, whatever its columns are called. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Message = dict[str, str | None]
"""``{"role": system | user | assistant, "content": text}``; content None = an answer still to be written."""

COLUMNS = ("messages", "conversations", "turns", "instruction", "prompt")
"""The columns by which a row is recognised, in this order."""

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
}
_TOOL_ROLES = {
    "tool",
    "function",
    "function_call",
    "function_response",
    "observation",
    "tool_response",
    "ipython",
}


_MEDIA_COLUMNS = {"image": "images", "images": "images", "audio": "audio", "audios": "audio", "videos": "video"}
_MEDIA = {
    "image": "images",
    "image_url": "images",
    "input_image": "images",
    "audio": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
}
"""Kind of a part of a content -> the reason under which its row is counted."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Where chat servers put what a target thought before its answer."""


class NotAConversationError(ValueError):
    """The row has no known column, or one of the wrong type: the file is not what the user thinks it is."""


class UnusableRowError(ValueError):
    """A conversation that heads cannot be trained on. The message is the reason under which it is counted."""


def parse_row(row: object) -> list[Message]:
    """The conversation of a row: a system message or none, then pairs of a user and an assistant message.

    Known: OpenAI ``messages`` (text or text parts), ShareGPT ``conversations``, FastChat ``turns`` (user
    turns only), Alpaca ``instruction``/``input``/``output``, and ``prompt`` (text or messages) with or
    without ``completion``. A column ``system`` counts where the messages bring no system message. Answers
    that a row lacks have content None. Thinking that stands beside an answer (``reasoning_content``) is put before it,
    between <think> and </think>, where the templates of thinking targets look for it.

    Raises:
        NotAConversationError: no known column, or one of the wrong type.
        UnusableRowError: a conversation to drop and count, e.g. empty, starting with the assistant, with
        images.
    """
    if not isinstance(row, Mapping):
        raise NotAConversationError(f"the row is a {type(row).__name__}, not an object")
    present = [name for name in COLUMNS if name in row]
    if not present:
        columns = ", ".join(map(str, list(row)[:6])) or "none"
        raise NotAConversationError(f"the row has none of the columns {', '.join(COLUMNS)}; it has {columns}")
    name = next((name for name in present if row[name] is not None), None)
    if name is None:
        raise UnusableRowError("empty")
    if row.get("tools") or row.get("functions"):
        raise UnusableRowError("tool calls")
    for column, what in _MEDIA_COLUMNS.items():
        if row.get(column):
            raise UnusableRowError(what)
    messages = _READERS[name](row)
    system = row.get("system")
    if isinstance(system, str) and system.strip() and not any(m["role"] == "system" for m in messages):
        messages = [{"role": "system", "content": system}, *messages]
    return _normal_form(messages)


def _normal_form(messages: list[Message]) -> list[Message]:
    """The messages, with an unwritten answer after a last user turn; UnusableRowError if they do not pair."""
    if not messages:
        raise UnusableRowError("empty")
    for message in messages:
        content = message["content"] or ""
        if message["role"] != "assistant" and not content.strip():
            raise UnusableRowError("a message without text")
        if not _is_unicode(content):
            raise UnusableRowError("text that is not Unicode")
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    roles = [message["role"] for message in turns]
    if "user" not in roles:
        raise UnusableRowError("no user turn")
    if "system" in roles:
        raise UnusableRowError("a system message after the first")
    if roles[0] == "assistant":
        raise UnusableRowError("starts with the assistant")
    for before, after in pairwise(roles):
        if before == after:
            raise UnusableRowError(f"two {before} turns in a row")
    if roles[-1] == "user":
        messages = [*messages, {"role": "assistant", "content": None}]
    return messages


def _is_unicode(text: str) -> bool:
    """False for text with half of a surrogate pair, which no tokenizer takes."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _messages_of(value: object, column: str) -> list[Message]:
    """OpenAI or ShareGPT messages; the two are told apart by their keys."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise NotAConversationError(f"{column} is a {type(value).__name__}, not a list of messages")
    return [_message_of(item, column) for item in value]


def _message_of(item: object, column: str) -> Message:
    if not isinstance(item, Mapping):
        raise NotAConversationError(f"{column} holds a {type(item).__name__}, not an object with role and content")
    role = item.get("role", item.get("from"))
    if not isinstance(role, str) or not ({"content", "value"} & set(item)):
        raise NotAConversationError(f"a message of {column} lacks role and content (or from and value)")
    if item.get("tool_calls") or item.get("function_call") or role.lower() in _TOOL_ROLES:
        raise UnusableRowError("tool calls")
    if role.lower() not in _ROLES:
        raise UnusableRowError("unknown role")
    content = item["content"] if "content" in item else item["value"]
    text = _text_of(content, column)
    known = _ROLES[role.lower()]
    if known == "assistant" and not text.strip():
        raise UnusableRowError("an empty answer")
    thought = next((item[name] for name in _REASONING if isinstance(item.get(name), str) and item[name].strip()), None)
    if known == "assistant" and thought is not None and "</think>" not in text:
        text = f"<think>\n{thought.strip()}\n</think>\n\n{text.lstrip()}"
    return {"role": known, "content": text}


def _text_of(content: object, column: str) -> str:
    """The text of a content: a string, or OpenAI's list of parts of which every one must be text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise NotAConversationError(f"a content of {column} is a {type(content).__name__}, not text")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else None
            raise UnusableRowError(_MEDIA.get(str(kind), "content other than text"))
    return "".join(texts)


def _read_messages(row: Mapping[str, Any]) -> list[Message]:
    return _messages_of(row["messages"], "messages")


def _read_conversations(row: Mapping[str, Any]) -> list[Message]:
    return _messages_of(row["conversations"], "conversations")


def _read_turns(row: Mapping[str, Any]) -> list[Message]:
    turns = row["turns"]
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not all(isinstance(t, str) for t in turns):
        raise NotAConversationError("turns is not a list of texts")
    messages: list[Message] = []
    for turn in turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": None}]
    return messages


def _read_alpaca(row: Mapping[str, Any]) -> list[Message]:
    parts = [row["instruction"], row.get("input") or "", row.get("output") or ""]
    if not all(isinstance(part, str) for part in parts):
        raise NotAConversationError("instruction, input and output are not all texts")
    instruction, context, answer = parts
    question = f"{instruction}\n\n{context}" if context.strip() else instruction
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer if answer.strip() else None},
    ]


def _read_prompt(row: Mapping[str, Any]) -> list[Message]:
    messages: list[Message] = []
    for column, role in (("prompt", "user"), ("completion", "assistant")):
        value = row.get(column)
        if isinstance(value, str):
            messages.append({"role": role, "content": value if role == "user" or value.strip() else None})
        elif value is not None:
            messages += _messages_of(value, column)
    return messages


_READERS = {
    "messages": _read_messages,
    "conversations": _read_conversations,
    "turns": _read_turns,
    "instruction": _read_alpaca,
    "prompt": _read_prompt,
}
