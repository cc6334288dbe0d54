"""The fields of every body that comes down to requests of an engine, and the RequestHead that they make."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raylm.config import Config
from raylm.frontend import RequestHead
from raylm.ingress.openai.fields import Body, RequestId, unsupported


class RequestBody(Body):
    """What text and vectors are asked for with alike; None always means "not given".

    ``user`` identifies the end user for abuse detection and has by OpenAI's definition no effect on the answer.
    """

    model: str
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    request_id: RequestId | None = None
    user: str | None = None

    def check(self, config: Config) -> None:
        """Refuse what needs a configuration that this server does not have.

        Raises:
            UnsupportedFieldError: it does.
        """
        check_priority(self.priority, config)

    def head(self, request_id: str, arrival_time: float, param: str, adapter: str | None) -> RequestHead:
        """The head of its requests, whose prompts come from the field ``param``."""
        return RequestHead(
            request_id=request_id,
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
            arrival_time=arrival_time,
            param=param,
            adapter=adapter,
        )


def check_priority(priority: int | None, config: Config) -> None:
    """Refuse a priority where the server does not schedule by it.

    Raises:
        UnsupportedFieldError: it does not.
    """
    if priority is not None and config.scheduler.policy != "priority":
        raise unsupported("priority", "this server schedules first come, first served (scheduler.policy: fcfs).")
