"""Who may see and do what: a token for each of two roles, sessions by cookie, and no foreign pages.

People log in with a token and get a cookie (HttpOnly, SameSite=Strict); programs send the token as
``Authorization: Bearer``. Whatever changes something must come from a page of ours: browsers say
where a request comes from, and forms carry a word that only our pages know.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote

from aiohttp import web
from aiohttp.typedefs import Middleware

from shared.errors import InvalidInputError

Role = Literal["operator", "reader"]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

COOKIE = "populace_session"
_SESSION_FOR = 30 * 86400.0
_MOST_SESSIONS = 1000
_OPEN = ("/login", "/static/", "/healthz")
"""What needs no token: nothing of an installation is told there."""
_READS = ("GET", "HEAD")
_WRONG_IN_A_ROW, _WRONG_WITHIN = 10, 60.0
"""So many wrong tokens from an address within so many seconds, and none is taken for as long."""
_ADDRESSES_HELD = 10_000
_DONE_HELD = 20


class TooManyError(Exception):
    """Too many wrong tokens came of late."""


@dataclass
class Session:
    """Somebody who has logged in."""

    role: Role
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    """A word that forms carry."""
    since: float = field(default_factory=time.monotonic)
    done: OrderedDict[str, str] = field(default_factory=OrderedDict)
    """What was done of late, by a word that stands in the address which shows it."""

    def note_done(self, said: str) -> str:
        """Note what was done; returns the word."""
        word = secrets.token_urlsafe(6)
        self.done[word] = said
        while len(self.done) > _DONE_HELD:
            self.done.popitem(last=False)
        return word


_who: ContextVar[Session | None] = ContextVar("who", default=None)


def who() -> Session | None:
    """Who makes the request that is being answered; None: somebody without a token."""
    return _who.get()


def operators_only() -> None:
    """For what is looked at, but has code run: a scenario's own, in a process of its own.

    Raises:
        HTTPForbidden: this token may only look.
    """
    session = who()
    if session is None or session.role != "operator":
        raise web.HTTPForbidden(text="this token may only look\n")


class Doorkeeper:
    """Knows tokens and sessions.

    Args:
        operator: token of those who may change things.
        reader: token of those who may only look; None: there are none.
    """

    def __init__(self, operator: str, reader: str | None) -> None:
        if not operator or reader == operator:
            raise InvalidInputError(
                "the manager needs a token, and another one for those who may only look"
            )
        self._tokens: dict[Role, str] = {"operator": operator}
        if reader:
            self._tokens["reader"] = reader
        self._sessions: dict[str, Session] = {}
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()
        """When wrong tokens came, by the address that they came from."""

    def role_of(self, token: str, remote: str | None) -> Role | None:
        """The role that a token gives, compared in constant time.

        Args:
            token: as it was given.
            remote: the address that it came from.

        Raises:
            TooManyError: too many wrong ones came from there of late.
        """
        if self._shut(remote or ""):
            raise TooManyError
        found: Role | None = None
        for role, known in self._tokens.items():
            if hmac.compare_digest(token.encode("utf-8", "replace"), known.encode()):
                found = role
        if found is None:
            held = self._wrong.setdefault(remote or "", deque(maxlen=_WRONG_IN_A_ROW))
            held.append(time.monotonic())
            while len(self._wrong) > _ADDRESSES_HELD:
                self._wrong.popitem(last=False)
        return found

    def _shut(self, remote: str) -> bool:
        held = self._wrong.get(remote)
        full = held is not None and len(held) == _WRONG_IN_A_ROW
        return full and held is not None and time.monotonic() - held[0] < _WRONG_WITHIN

    def is_open(self, name: str) -> bool:
        """Whether a session of this name goes on, for what stays open longer than a request."""
        return name in self._sessions

    def open_session(self, role: Role) -> str:
        """Begin a session; returns what the cookie holds."""
        while len(self._sessions) >= _MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        name = secrets.token_urlsafe(32)
        self._sessions[name] = Session(role)
        return name

    def close_session(self, name: str) -> None:
        """End a session."""
        self._sessions.pop(name, None)

    def session(self, request: web.Request) -> Session | None:
        """The session of a request's cookie, if there is one."""
        found = self._sessions.get(request.cookies.get(COOKIE, ""))
        if found is None or time.monotonic() - found.since > _SESSION_FOR:
            return None
        return found

    def middleware(self) -> Middleware:
        """What every request goes through."""

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            _who.set(None)  # requests of one connection are handled in one context
            if request.method not in _READS and not _same_origin(request):
                raise web.HTTPForbidden(text="this request comes from another page")
            if request.path.startswith(_OPEN):
                return await handler(request)
            scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() == "bearer":
                try:
                    role = self.role_of(bearer.strip(), request.remote)
                except TooManyError:
                    raise web.HTTPTooManyRequests(
                        text="too many wrong tokens; wait a minute"
                    ) from None
                if role is None:
                    raise web.HTTPUnauthorized(text="the token is wrong")
                session: Session | None = Session(role, "")
            else:
                session = self.session(request)
                if session is None:
                    if wants_page(request) and request.method == "GET":
                        raise web.HTTPFound(f"/login?next={quote(request.path_qs)}")
                    raise web.HTTPUnauthorized(
                        text="a token is needed: log in again (in another tab, to keep what you "
                        "have written here), then send this once more"
                    )
                if request.method not in _READS and not await _has_word(request, session.csrf):
                    raise web.HTTPForbidden(text="the form is not of this session; load it again")
            assert session is not None
            looks = request.method in _READS or request.path == "/logout"
            if not looks and session.role != "operator":
                raise web.HTTPForbidden(text="this token may only look")
            _who.set(session)
            return await handler(request)

        return check


async def _has_word(request: web.Request, word: str) -> bool:
    given = request.headers.get("X-Csrf")
    if given is None:
        given = str((await request.post()).get("csrf", ""))
    return hmac.compare_digest(given.encode(), word.encode())


def _same_origin(request: web.Request) -> bool:
    """Whether a browser says that a request comes from our own page; programs say nothing."""
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("Origin")
    if origin is None:
        return True
    return origin.partition("://")[2] == request.host


def wants_page(request: web.Request) -> bool:
    """Whether a person with a browser asks, rather than a program."""
    return not request.path.startswith(("/api/", "/metrics", "/events"))
