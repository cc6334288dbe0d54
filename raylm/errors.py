"""The exception tree of RayLM; every class carries its HTTP status and its OpenAI type and code.

    RayLMError                      500 server_error
    ├── ConfigError                 start-up only: a configuration or checkpoint that cannot be served
    ├── InvalidRequestError         400 invalid_request_error, ``param`` names the field
    │   ├── ContextLengthError      400 context_length_exceeded
    │   ├── UnsupportedFieldError   400 unsupported_field
    │   ├── AuthenticationError     401 invalid_api_key
    │   ├── NotFoundError           404 not_found
    │   │   └── ModelNotFoundError  404 model_not_found
    │   ├── MethodNotAllowedError   405 method_not_allowed
    │   ├── BodyTooLargeError       413 body_too_large
    │   ├── MediaTypeError          415 unsupported_media_type
    │   └── HeadersTooLargeError    431 headers_too_large
    ├── OverloadedError             429 rate_limit_error, carries Retry-After
    ├── DeadlineExceededError       504 deadline_exceeded, waited longer than the client does
    └── EngineUnavailableError      503 service_unavailable, carries Retry-After
        ├── EngineDiedError         503 the engine was lost while it served this request
        │   └── PeerLostError       503 what the ranks that are left say when one is lost; never the cause
        └── ShuttingDownError       503 shutting_down, this replica is about to end

Ingress maps them once, along the class's MRO; everything else becomes a neutral 500.
"""

from __future__ import annotations

from typing import ClassVar


class RayLMError(Exception):
    """Base of all errors that RayLM raises on purpose; its message is safe to show to a client."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.param), self.__dict__)


def _rebuild(cls: type[RayLMError], message: str, param: str | None) -> RayLMError:
    return cls(message, param=param)


class ConfigError(RayLMError):
    """The configuration or the checkpoint cannot be served; raised at start only."""


class InvalidRequestError(RayLMError):
    """The request is wrong; ``param`` names the field."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt and requested tokens do not fit into the model's context."""

    code = "context_length_exceeded"


class UnsupportedFieldError(InvalidRequestError):
    """A field that the server does not know or does not serve; it is never dropped silently."""

    code = "unsupported_field"


class AuthenticationError(InvalidRequestError):
    """No key, or a wrong one."""

    status = 401
    code = "invalid_api_key"


class NotFoundError(InvalidRequestError):
    """No such route or object."""

    status = 404
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    """The model that the request names is not served here."""

    code = "model_not_found"


class MethodNotAllowedError(InvalidRequestError):
    """The route exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class BodyTooLargeError(InvalidRequestError):
    """The body is longer than the server reads."""

    status = 413
    code = "body_too_large"


class MediaTypeError(InvalidRequestError):
    """The body is not JSON."""

    status = 415
    code = "unsupported_media_type"


class HeadersTooLargeError(InvalidRequestError):
    """Too many headers, or too many bytes of them."""

    status = 431
    code = "headers_too_large"


class OverloadedError(RayLMError):
    """The queue is full; the client may come back after ``retry_after_s`` seconds."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(RayLMError):
    """The request has waited longer than its client said it would; it was dropped unanswered."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class EngineUnavailableError(RayLMError):
    """No engine is ready; one is being started."""

    status = 503
    type = "service_unavailable"
    code = "engine_unavailable"
    retry_after_s = 2


class EngineDiedError(EngineUnavailableError):
    """The engine was lost while it served this request; sending it again is safe."""

    code = "engine_died"


class PeerLostError(EngineDiedError):
    """A rank waited in vain for another one; whatever ended that one is the cause, and should be told instead."""


class ShuttingDownError(EngineUnavailableError):
    """This replica is about to end; another one, or a later try, will serve the request."""

    code = "shutting_down"
