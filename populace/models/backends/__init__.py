"""Back ends: one module each behind the interface of ``base``."""

from __future__ import annotations

from populace.models.backends.base import Backend
from shared.messages.scenario import ModelSpec
from shared.settings import Settings

__all__ = ["Backend", "make_backend"]


def make_backend(spec: ModelSpec, settings: Settings) -> Backend:
    """The back end for a model; nothing is started or reached yet.

    Raises:
        InvalidInputError: the specification names something that is not allowed here.
    """
    if spec.backend == "scripted":
        from populace.models.backends.scripted import ScriptedBackend

        return ScriptedBackend(spec)
    if spec.backend == "embedded":
        from populace.models.backends.embedded import EmbeddedBackend

        return EmbeddedBackend(spec, settings)
    if spec.backend == "vllm":
        from populace.models.backends.vllm import VllmBackend

        return VllmBackend(spec, settings.model_timeout)
    from populace.models.backends.openai import OpenAIBackend, api_key

    return OpenAIBackend(
        spec.endpoints,
        spec.model or "",
        key=api_key(spec.api_key_env, settings),
        timeout=spec.timeout or settings.model_timeout,
        patience=settings.model_patience,
        extra=spec.extra,
    )
