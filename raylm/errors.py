"""The exceptions of RayLM. Each class has an HTTP status and an OpenAI error type and code.

The ingress maps an exception to an HTTP answer by its class. Any other exception becomes a 500 without details.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar


class RayLMError(Exception):
    """Base of all errors that RayLM raises on purpose. The message may be shown to a client.

    ``param`` names the field of the request, ``retry_after_s`` the seconds after which a retry makes sense.
    """

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
    """The configuration or the checkpoint cannot be served. Raised only at start."""


class InvalidRequestError(RayLMError):
    """The request is invalid; ``param`` names the field."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """The prompt and the requested tokens exceed the longest sequence of the model."""

    code = "context_length_exceeded"


class UnsupportedFieldError(InvalidRequestError):
    """The request has a field that this server does not support. Such a field is never ignored silently."""

    code = "unsupported_field"


class AuthenticationError(InvalidRequestError):
    status = 401
    code = "invalid_api_key"


class PermissionDeniedError(InvalidRequestError):
    """The API key is valid, but does not permit this request."""

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
    """The request body did not arrive in time."""

    status = 408
    code = "body_timeout"


class ConflictError(InvalidRequestError):
    """The request conflicts with the state of the object that it refers to."""

    status = 409
    code = "conflict"


class McpServerError(InvalidRequestError):
    """An MCP server that the request names did not do what the request needs."""

    status = 424
    code = "failed_dependency"


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
    """The request waited until its client's time limit, and is dropped."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class EngineUnavailableError(RayLMError):
    """No engine is ready. An engine is being started."""

    status = 503
    type = "service_unavailable"
    code = "engine_unavailable"
    retry_after_s = 2


class StoreLostError(EngineUnavailableError):
    """The store of responses was lost and is being restarted."""

    code = "store_lost"


class EngineDiedError(EngineUnavailableError):
    """The engine was lost while it served this request. Retrying the request is safe."""

    code = "engine_died"


class EngineCrashedError(EngineDiedError):
    """The engine failed while computing, so one of its requests may be the cause. It was not killed from outside."""


class PeerLostError(EngineDiedError):
    """A rank lost the connection to another rank. The loss of that rank is the cause to report instead."""


class CancelledRequestError(RayLMError):
    """The request was cancelled by DELETE /v1/requests/{id}."""

    status = 499
    type = "cancelled"
    code = "cancelled"


class ShuttingDownError(EngineUnavailableError):
    """This replica is shutting down. Another replica may serve the request."""

    code = "shutting_down"
