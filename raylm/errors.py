"""The exception tree of RayLM; every class carries its HTTP status and its OpenAI type and code.

Ingress maps them once, along the class's MRO; everything else becomes a neutral 500.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar


class RayLMError(Exception):
    """Base of all errors that RayLM raises on purpose; its message is safe to show to a client."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s or self.retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), param=self.param), (self.message,), self.__dict__


class ConfigError(RayLMError):
    """The configuration or the checkpoint cannot be served; raised at start only."""


class InvalidRequestError(RayLMError):
    """``param`` names the field."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt and requested tokens do not fit."""

    code = "context_length_exceeded"


class UnsupportedFieldError(InvalidRequestError):
    """A field that this server does not serve; it is never dropped silently."""

    code = "unsupported_field"


class AuthenticationError(InvalidRequestError):
    status = 401
    code = "invalid_api_key"


class PermissionDeniedError(InvalidRequestError):
    """The API key is valid, and not for this."""

    status = 403
    code = "permission_denied"


class NotFoundError(InvalidRequestError):
    status = 404
    code = "not_found"


class PreviousResponseNotFoundError(NotFoundError):
    code = "previous_response_not_found"


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class MethodNotAllowedError(InvalidRequestError):
    status = 405
    code = "method_not_allowed"


class BodyTimeoutError(InvalidRequestError):
    """The body did not arrive in time."""

    status = 408
    code = "body_timeout"


class ConflictError(InvalidRequestError):
    """It contradicts what it refers to."""

    status = 409
    code = "conflict"


class BodyTooLargeError(InvalidRequestError):
    status = 413
    code = "body_too_large"


class MediaTypeError(InvalidRequestError):
    status = 415
    code = "unsupported_media_type"


class HeadersTooLargeError(InvalidRequestError):
    status = 431
    code = "headers_too_large"


class OverloadedError(RayLMError):
    """The queue is full."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"
    retry_after_s = 1


class RateLimitError(OverloadedError):
    """A limit of the API key is reached; the message names it."""

    code = "rate_limit_exceeded"


class DeadlineExceededError(RayLMError):
    """It waited longer than the client does, and is dropped unanswered."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class EngineUnavailableError(RayLMError):
    """No engine is ready; one is being started."""

    status = 503
    type = "service_unavailable"
    code = "engine_unavailable"
    retry_after_s = 2


class StoreLostError(EngineUnavailableError):
    """The store of responses was lost; it is being started again."""

    code = "store_lost"


class EngineDiedError(EngineUnavailableError):
    """The engine was lost while it served this request; sending it again is safe."""

    code = "engine_died"


class EngineCrashedError(EngineDiedError):
    """The engine failed at what it computed, so that one of its requests may be the cause; it was not killed."""


class PeerLostError(EngineDiedError):
    """A rank waited in vain for another one, whose end is the cause to report instead."""


class CancelledRequestError(RayLMError):
    """Somebody ended it by DELETE /v1/requests/{id}."""

    status = 499
    type = "cancelled"
    code = "cancelled"


class ShuttingDownError(EngineUnavailableError):
    """This replica is about to end; another one may serve the request."""

    code = "shutting_down"
