"""A chat room: posts, mentions, and who has read what."""

from __future__ import annotations

import re
from typing import Any

from populace.environment import Environment, readonly

_MOST_SHOWN, _SHOWN = 200, 2000
_MENTION = re.compile(r"@([A-Za-z0-9_\-/]+)")


class ChatRoom(Environment):
    """People join, post, mention one another by ``@name``, and read.

    Args:
        topic: what it is about.
        keep: messages kept; older ones are let go.
        longest: characters of a message; longer ones are refused.

    Events: ``joined(name)``, ``left(name)``, ``posted(number, author, text)``, and
    ``mentioned(name, number, author, text)`` for each one who is mentioned and in the room.
    """

    def __init__(self, topic: str = "", *, keep: int = 1000, longest: int = 4000) -> None:
        if keep < 1 or longest < 1:
            raise ValueError("keep and longest must be at least 1")
        self.topic = topic
        self.keep = keep
        self.longest = longest
        self.names: dict[str, str] = {}
        """Name in the room of each who is there, by the agent's own."""
        self.messages: list[dict[str, Any]] = []
        self.count = 0
        """Messages posted so far, those let go included."""
        self.seen: dict[str, int] = {}
        """Number of the last message that each has read."""

    def join(self, name: str = "") -> str:
        """Come in, under a name (default: the agent's own); returns the name.

        Raises:
            ValueError: someone else has the name.
        """
        who = self.caller or name
        name = name or who
        if not _MENTION.fullmatch(f"@{name}"):
            raise ValueError(f"{name!r} can't be mentioned; use letters, digits, '_', '-', '/'")
        if name in self.names.values() and self.names.get(who) != name:
            raise ValueError(f"someone in {self.path} is called {name!r} already")
        self.names[who] = name
        self.seen.setdefault(name, self.count)
        self.emit("joined", None, name=name)
        return name

    def leave(self, name: str = "") -> None:
        """Go."""
        name = self.names.pop(self._who(name))
        self.emit("left", None, name=name)

    def post(self, text: str, name: str = "") -> int:
        """Say something; returns the message's number, from 1.

        Raises:
            LookupError: the author isn't in the room.
            ValueError: the text is empty or too long.
        """
        author = self.names[self._who(name)]
        if not text.strip():
            raise ValueError("an empty message can't be posted")
        if len(text) > self.longest:
            raise ValueError(f"a message may have {self.longest} characters, not {len(text)}")
        self.count += 1
        message = {"number": self.count, "author": author, "text": text, "round": self.round}
        self.messages.append(message)
        if len(self.messages) > self.keep:
            del self.messages[: len(self.messages) - self.keep]
        self.emit("posted", None, number=self.count, author=author, text=text)
        here = set(self.names.values())
        for mentioned in dict.fromkeys(_MENTION.findall(text)):
            if mentioned in here and mentioned != author:
                told = {"name": mentioned, "number": self.count, "author": author, "text": text}
                self.emit("mentioned", None, **told)
        return self.count

    @readonly
    def history(self, last: int = 20) -> list[dict[str, Any]]:
        """The last messages, oldest first: number, author, text, round."""
        return self.messages[-last:] if last > 0 else []

    def read(self, name: str = "", most: int = 100) -> list[dict[str, Any]]:
        """What one has not read yet, oldest first, and now has."""
        name = self.names[self._who(name)]
        unread = [m for m in self.messages if m["number"] > self.seen[name]][:most]
        if unread:
            self.seen[name] = unread[-1]["number"]
        return unread

    @readonly
    def readers(self, number: int) -> list[str]:
        """Names of those who have read a message, or were there and wrote it."""
        author = next((m["author"] for m in self.messages if m["number"] == number), None)
        return sorted(n for n, last in self.seen.items() if last >= number or n == author)

    def view(self) -> dict[str, Any]:
        """See ``Environment.view``."""
        told = [{**m, "text": m["text"][:_SHOWN]} for m in self.messages[-_MOST_SHOWN:]]
        return {"kind": "chat", "messages": told, "left_out": self.count - len(told)}

    @readonly
    def present(self) -> list[str]:
        """Names of those who are in the room."""
        return sorted(self.names.values())

    def _who(self, name: str) -> str:
        who = self.caller or next((w for w, n in self.names.items() if n == name), name)
        if who not in self.names:
            raise LookupError(f"{name or who or 'the caller'} is not in {self.path}; join first")
        return who
