"""The wire format: msgpack with a few extension types; JSON is accepted on public subjects.

Never pickle. What msgpack lacks travels as extensions: tuples, sets, dates, integers over
64 bits, and pydantic models, dataclasses and enums by import path, which are rebuilt only if
the code loader allows that path.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
from collections.abc import Callable
from typing import Any

import msgpack
from pydantic import BaseModel, ValidationError

from shared.code import CodeLoader, import_path
from shared.errors import CodecError, CodeError

JSON_TYPE = "application/json"
MSGPACK_TYPE = "application/msgpack"
CONTENT_TYPE = "content-type"

_BIG_INT, _TUPLE, _SET, _FROZENSET, _DATETIME, _DATE, _OBJECT, _TIMEDELTA = range(1, 9)
_PLAIN_TYPES: tuple[Any, ...] = (str, int, float, bytes, dict, list)
FIRST_FREE_EXTENSION = 32
"""Extension codes from here on are for packages above this one."""

Encoder = Callable[[Any], Any]
Decoder = Callable[[Any], Any]


class Codec:
    """Packs and unpacks values; packages above add their own types by ``register``.

    Args:
        loader: finds the classes of objects on the wire; without one they can't be read.
    """

    def __init__(self, loader: CodeLoader | None = None) -> None:
        self._loader = loader
        self.on_bad_object: Callable[[CodecError], Any] | None = None
        """Makes what stands for an object that can't be made again; None: reading fails."""
        self._encoders: dict[type, tuple[int, Encoder]] = {}
        self._decoders: dict[int, Decoder] = {
            _BIG_INT: int,
            _TUPLE: tuple,
            _SET: set,
            _FROZENSET: frozenset,
            _DATETIME: dt.datetime.fromisoformat,
            _DATE: dt.date.fromisoformat,
            _TIMEDELTA: lambda parts: dt.timedelta(*parts),
            _OBJECT: self._decode_object,
        }

    def register(self, code: int, cls: type, encode: Encoder, decode: Decoder) -> None:
        """Let a type travel: ``encode`` makes it plain, ``decode`` makes it again."""
        if code < FIRST_FREE_EXTENSION or code in self._decoders:
            raise ValueError(f"extension code {code} is taken")
        self._encoders[cls] = (code, encode)
        self._decoders[code] = decode

    def pack(self, value: Any) -> bytes:
        """The value as bytes.

        Raises:
            CodecError: it holds something that can't travel; the message names its type.
        """
        try:
            packed: bytes = msgpack.packb(value, default=self._encode, strict_types=True)
        except CodecError:
            raise
        except Exception as error:  # properties and serialisers of users' objects may raise
            raise CodecError(f"a value can't be sent: {error or type(error).__name__}") from None
        return packed

    def unpack(self, data: bytes) -> Any:
        """The value that bytes hold.

        Raises:
            CodecError: they aren't a value of ours.
        """
        try:
            return msgpack.unpackb(data, ext_hook=self._decode, strict_map_key=False)
        except CodecError:
            raise
        except Exception as error:
            raise CodecError(
                f"a message can't be read as msgpack: {error or type(error).__name__}"
            ) from None

    def _encode(self, value: Any) -> Any:
        cls = type(value)
        known = self._encoders.get(cls)
        if known is not None:
            return msgpack.ExtType(known[0], self.pack(known[1](value)))
        for base, (code, encode) in self._encoders.items():
            if isinstance(value, base):
                return msgpack.ExtType(code, self.pack(encode(value)))
        return self._encode_builtin(value, cls)

    def _encode_builtin(self, value: Any, cls: type) -> Any:
        code = _OBJECT
        plain: Any = None
        if cls is tuple:
            code, plain = _TUPLE, list(value)
        elif cls is int:
            code, plain = _BIG_INT, str(value)
        elif cls is set or cls is frozenset:
            code = _SET if cls is set else _FROZENSET
            # Sorted, so that equal sets are equal bytes, whatever their order in this process.
            plain = sorted(value, key=self.pack)
        elif isinstance(value, dt.datetime):
            code, plain = _DATETIME, value.isoformat()
        elif isinstance(value, dt.date):
            code, plain = _DATE, value.isoformat()
        elif isinstance(value, dt.timedelta):
            code, plain = _TIMEDELTA, [value.days, value.seconds, value.microseconds]
        elif isinstance(value, enum.Enum):
            plain = [self._path(cls), value.value]
        elif isinstance(value, BaseModel):
            plain = [self._path(cls), value.model_dump()]
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            plain = [self._path(cls), fields]
        elif cls.__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 1):
            return value.item()
        else:
            for base in _PLAIN_TYPES:
                if isinstance(value, base):  # a subclass: its plain form travels
                    return base(value)
            raise CodecError(
                f"a value of type {cls.__module__}.{cls.__qualname__} can't be sent; use plain "
                "values, dataclasses or pydantic models"
            )
        return msgpack.ExtType(code, self.pack(plain))

    def _path(self, cls: type) -> str:
        try:
            return import_path(cls)[0] if self._loader is None else self._loader.path_of(cls)
        except CodeError as error:
            raise CodecError(str(error)) from None

    def _decode(self, code: int, data: bytes) -> Any:
        decoder = self._decoders.get(code)
        if decoder is None:
            raise CodecError(f"a message holds the unknown extension type {code}")
        return decoder(self.unpack(bytes(data)))

    def _decode_object(self, parts: list[Any]) -> Any:
        try:
            return self._make_object(*parts)
        except CodecError as error:
            if self.on_bad_object is None:
                raise
            return self.on_bad_object(error)

    def _make_object(self, path: str, content: Any) -> Any:
        if self._loader is None:
            raise CodecError(f"an object of {path!r} came where only plain values are read")
        try:
            cls = self._loader.load(path)
        except CodeError as error:
            raise CodecError(str(error)) from None
        try:
            if isinstance(cls, type):
                if issubclass(cls, BaseModel):
                    return cls.model_validate(content)
                if issubclass(cls, enum.Enum):
                    return cls(content)
                if dataclasses.is_dataclass(cls):
                    return cls(**content)
        except (ValidationError, TypeError, ValueError) as error:
            raise CodecError(f"an object of {path!r} can't be made again: {error}") from None
        raise CodecError(f"{path!r} is not a pydantic model, dataclass or enum")


def plain(value: Any) -> Any:
    """The value in JSON's terms alone: what readers outside Populace can take.

    Tuples and sets become lists, models and dataclasses become dicts, bytes become text.

    Raises:
        CodecError: it holds something else.
    """
    cls = type(value)
    if cls in (str, int, float, bool) or value is None:
        return value
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k if isinstance(k, str) else str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((plain(v) for v in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (dt.date, dt.timedelta)):
        return str(value)
    for base in _PLAIN_TYPES:
        if isinstance(value, base):
            return base(value)
    if cls.__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 1):
        return value.item()
    raise CodecError(
        f"a value of type {cls.__module__}.{cls.__qualname__} has no plain form; use plain values, "
        "dataclasses or pydantic models"
    )


_PLAIN = Codec()


def use_plain_codec(codec: Codec) -> None:
    """Have plain values packed and read by this codec, which may measure its time."""
    global _PLAIN
    _PLAIN = codec


def readable(data: bytes) -> Any:
    """What bytes of ours hold, for people to read: no class is needed, nothing is made again.

    Objects become dicts with their import path as ``class``; tuples and sets become lists; what is
    known to packages above alone becomes a word.

    Raises:
        CodecError: it isn't msgpack.
    """

    def hook(code: int, inner: bytes) -> Any:
        if code >= FIRST_FREE_EXTENSION:
            return "(not shown)"
        value = readable(inner)
        if code != _OBJECT:
            return str(value) if code in (_BIG_INT, _TIMEDELTA) else value
        path, content = value
        return {"class": path, **content} if isinstance(content, dict) else content

    def mapping(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        # A tuple, say, that was a key is a list by now.
        return {k if isinstance(k, (str, int)) else str(k): v for k, v in pairs}

    try:
        return msgpack.unpackb(data, ext_hook=hook, object_pairs_hook=mapping, strict_map_key=False)
    except Exception as error:
        raise CodecError(f"bytes can't be read as msgpack: {error}") from None


def pack_plain(value: Any) -> bytes:
    """Msgpack bytes of plain values (control plane, public records)."""
    return _PLAIN.pack(value)


def writable(value: Any) -> Any:
    """A plain value whose texts can be written: of halves of characters a mark is left.

    Models cut answers short within a character, and JSON lets such a half through.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {writable(key): writable(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [writable(part) for part in value]
    return value


def to_json(value: Any) -> bytes:
    """Compact JSON bytes. Numbers that JSON lacks (NaN, infinities) become null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def is_json(data: bytes, content_type: str | None = None) -> bool:
    """Whether a public message is JSON: by its content-type, else by its first byte."""
    if content_type:
        return "json" in content_type
    return data.lstrip()[:1] in (b"{", b"[", b'"')


def from_public(data: bytes, content_type: str | None = None) -> Any:
    """The plain value of a message on a public subject, JSON or msgpack.

    Raises:
        CodecError: it is neither.
    """
    if is_json(data, content_type):
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CodecError(f"a message can't be read as JSON: {error}") from None
    return _PLAIN.unpack(data)
