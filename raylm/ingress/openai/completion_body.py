"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.ingress.openai.fields import unsupported
from raylm.ingress.openai.generation_body import GenerationBody
from raylm.ingress.openai.prompts import Prompt, Prompts, split_prompts
from raylm.params import MAX_LOGPROBS

MAX_PROMPTS = 1024
MAX_CHOICES = 4096
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationBody):
    """Fields of a completion. ``best_of`` is accepted where it means nothing: equal to ``n``."""

    unserved: ClassVar[frozenset[str]] = frozenset({"suffix"})

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    def check(self, config: Config) -> None:
        """Refuse combinations and values that are not served.

        Raises:
            InvalidRequestError: fields contradict each other.
            UnsupportedFieldError: OpenAI serves this value and this server does not.
        """
        super().check(config)
        if self.best_of not in (None, self.n or 1):
            raise unsupported("best_of", "only a value equal to 'n' is supported.")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("'max_tokens' may be 0 only with 'echo'.", param="max_tokens")
        if self.max_tokens == 0 and self.min_tokens:
            raise InvalidRequestError("'min_tokens' must not exceed 'max_tokens'.", param="min_tokens")

    def prompts(self) -> list[Prompt]:
        """The prompts, each a string or token ids.

        Raises:
            InvalidRequestError: ``prompt`` has none of the four forms, or asks for too much at once.
        """
        prompts = split_prompts(self.prompt, "prompt")
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequestError(f"'prompt' may hold at most {MAX_PROMPTS} prompts.", param="prompt")
        if len(prompts) * (self.n or 1) > MAX_CHOICES:
            raise InvalidRequestError(f"'n' times the prompts may make at most {MAX_CHOICES} choices.", param="n")
        return prompts
