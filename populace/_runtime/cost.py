"""What one call has spent on models."""

from __future__ import annotations

from shared.messages.model import ModelResponse


class Cost:
    """Sums over the questions of one call; most calls ask none, and have none of these."""

    __slots__ = ("backend", "model", "tokens_in", "tokens_out")

    def __init__(self) -> None:
        self.tokens_in = 0
        self.tokens_out = 0
        self.model = ""
        """The model that was asked last, by its name in the scenario."""
        self.backend = ""
        """What answered."""

    def add(self, model: str, response: ModelResponse) -> None:
        """Count a response."""
        self.tokens_in += response.tokens_in
        self.tokens_out += response.tokens_out
        self.model = model
        self.backend = response.backend or self.backend

    @property
    def tokens(self) -> int:
        """Prompt and answer tokens."""
        return self.tokens_in + self.tokens_out
