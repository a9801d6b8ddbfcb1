"""vLLM's engine in this process (extra ``vllm``): no HTTP between queue and engine.

The engine runs in child processes of its own, and batches by itself; it is given every prompt that
there is a slot for. Prefix caching is on unless ``engine`` says otherwise.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import time
from collections import deque
from typing import Any

from populace.models.backends.base import Admit, Backend, let_in
from shared.errors import PopulaceError
from shared.logs import get_logger
from shared.messages.model import ModelRequest, ModelResponse
from shared.messages.scenario import ModelSpec

_log = get_logger(__name__)

_SLOTS = 256
_RESTARTS, _RESTARTS_WITHIN = 3, 600.0
"""An engine that died so often within so many seconds is not started again."""
_INSTALL = "pip install 'populace[vllm]' where the model service runs"


_LONG = 600.0
"""Seconds: an engine with a full batch takes minutes for long answers."""


class VllmBackend(Backend):
    """Starts an ``AsyncLLM`` and asks it.

    Args:
        spec: ``model`` is a name or a path as vLLM takes it, ``engine`` arguments of its engine.
        timeout: seconds for one request, where ``spec`` names none; at least ten minutes.
    """

    def __init__(self, spec: ModelSpec, timeout: float = 0.0) -> None:
        assert spec.model is not None
        self.name = f"vllm:{spec.model.rstrip('/').rpartition('/')[2]}"
        self.slots = spec.concurrency or int(spec.engine.get("max_num_seqs", _SLOTS))
        self._model = spec.model
        self._arguments = {"enable_prefix_caching": True, **spec.engine}
        self._timeout = spec.timeout or max(_LONG, timeout)
        self._engine: Any = None
        self._tokenizer: Any = None
        self._vllm: Any = None
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._starts: deque[float] = deque(maxlen=_RESTARTS)

    async def start(self) -> None:
        """Load the model; takes from half a minute to several.

        Raises:
            PopulaceError: vLLM isn't installed, or can't load the model.
        """
        # In a thread: the service must go on answering its broker for all these seconds.
        wanted = ("vllm.sampling_params", "vllm.engine.arg_utils", "vllm.v1.engine.async_llm")
        try:
            self._vllm, arg_utils, async_llm = await asyncio.to_thread(
                lambda: [importlib.import_module(name) for name in wanted]
            )
        except ImportError as error:
            raise PopulaceError(f"the vllm backend needs vLLM ({error}): {_INSTALL}") from None
        arguments = {"model": self._model, **self._arguments}
        try:
            self._engine = await asyncio.to_thread(
                lambda: async_llm.AsyncLLM.from_engine_args(arg_utils.AsyncEngineArgs(**arguments))
            )
            self._tokenizer = self._engine.get_tokenizer()
            self.context = int(self._engine.model_config.max_model_len)
        except Exception as error:  # of whatever kind the engine likes
            said = " ".join(str(error).split())[:300]
            raise PopulaceError(f"vLLM can't load {self._model!r}: {said}") from error
        _log.info("vLLM's engine is ready", model=self._model, context=self.context)

    async def check(self) -> dict[str, Any]:
        """Have the engine make one token.

        Raises:
            PopulaceError: it does not.
        """
        response = await self.answer(
            ModelRequest(
                0,
                (0, "check", 0, 0, 0),
                [{"role": "user", "content": "Say yes."}],
                temperature=0.0,
                max_tokens=1,
            )
        )
        if response.error_kind:
            raise PopulaceError(response.error)
        return {"model": self._model, "context": self.context}

    async def count(self, messages: list[dict[str, Any]]) -> int | None:
        """Tokens of a conversation by the model's own tokenizer."""
        return len(self._tokens(messages, None))

    def _tokens(self, messages: list[dict[str, Any]], tools: Any) -> list[int]:
        found = self._tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(found)

    async def answer(self, request: ModelRequest, admit: Admit = let_in) -> ModelResponse:
        """Answer one prompt; should the engine die of it or beside it, ask the next engine once."""
        engine = self._engine
        response = await self._answer(engine, request)
        if response.error_kind != "unreachable":
            return response
        try:
            await self._revive(engine)
        except PopulaceError as error:
            response.error = str(error)
            return response
        await admit(request)
        response = await self._answer(self._engine, request)
        response.details["attempts"] = 2
        return response

    async def _revive(self, dead: Any) -> None:
        """Start another engine in place of a dead one, unless that was done.

        Raises:
            PopulaceError: it can't be started, or dies again and again.
        """
        async with self._starting:
            if self._engine is not dead and self._engine is not None:
                return
            now = time.monotonic()
            if len(self._starts) == _RESTARTS and now - self._starts[0] < _RESTARTS_WITHIN:
                raise PopulaceError(
                    f"vLLM's engine died {_RESTARTS} times within {_RESTARTS_WITHIN:g} s; its log "
                    "says why"
                )
            self._starts.append(now)
            _log.error("vLLM's engine has died and is started again", model=self._model)
            await self.close()
            await self.start()

    async def _answer(self, engine: Any, request: ModelRequest) -> ModelResponse:
        try:
            tokens = self._tokens(request.messages, request.tools)
        except Exception as error:  # whatever a chat template raises
            said = " ".join(str(error).split())[:300]
            return ModelResponse(
                request.number,
                backend=self.name,
                error_kind="refused",
                error=f"the model's chat template can't take these messages: {said}",
            )
        if self.context is not None and len(tokens) + 1 > self.context:
            return ModelResponse(
                request.number,
                backend=self.name,
                error_kind="context",
                error=f"the prompt has {len(tokens):,} tokens; the model takes {self.context:,}",
                details={"limit": self.context},
            )
        last: Any = None
        try:
            parameters = self._parameters(request, len(tokens))
            # Equal prompts of several runs may be under way at once.
            name = "/".join(map(str, (*request.key, next(self._numbers))))
            async with asyncio.timeout(self._timeout):
                async for output in engine.generate({"prompt_token_ids": tokens}, parameters, name):
                    last = output
        except TimeoutError:
            return ModelResponse(
                request.number,
                backend=self.name,
                error_kind="timeout",
                error=f"vLLM did not answer within {self._timeout:g} s",
            )
        except Exception as error:  # of whatever kind the engine likes
            said = " ".join(str(error).split())[:300]
            dead = engine is None or getattr(engine, "errored", False)
            return ModelResponse(
                request.number,
                backend=self.name,
                error_kind="unreachable" if dead else "refused",
                error=f"vLLM: {said}",
            )
        completion = last.outputs[0]
        response = ModelResponse(
            request.number,
            text=completion.text,
            finish=completion.finish_reason or "stop",
            tokens_in=len(tokens),
            tokens_out=len(completion.token_ids),
            backend=self.name,
        )
        if last.num_cached_tokens:
            response.details["cached"] = int(last.num_cached_tokens)
        return response

    def _parameters(self, request: ModelRequest, prompt_tokens: int) -> Any:
        guided = None
        if request.schema is not None:
            guided = self._vllm.StructuredOutputsParams(
                json=request.schema, disable_any_whitespace=True
            )
        left = request.max_tokens
        if self.context is not None:
            left = min(left, self.context - prompt_tokens)
        return self._vllm.SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=max(1, left),
            seed=request.draw,
            structured_outputs=guided,
            output_kind=self._vllm.RequestOutputKind.FINAL_ONLY,
        )

    async def close(self) -> None:
        """End the engine and its processes."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)
