"""What an agent remembers of its conversations: messages, oldest first."""

from __future__ import annotations

from typing import Literal, TypedDict

Role = Literal["system", "user", "assistant"]


class ChatMessage(TypedDict):
    """One message, as in the chat APIs of language models."""

    role: Role
    content: str


class Memory:
    """A list of messages that goes before each prompt."""

    __slots__ = ("messages",)

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []

    def add(self, role: Role, content: str) -> None:
        """Remember a message."""
        self.messages.append({"role": role, "content": content})

    def add_user(self, content: str) -> None:
        """Remember something that the agent was told."""
        self.add("user", content)

    def add_assistant(self, content: str) -> None:
        """Remember something that the agent said."""
        self.add("assistant", content)

    def clear(self) -> None:
        """Forget everything."""
        self.messages.clear()

    def __len__(self) -> int:
        return len(self.messages)
