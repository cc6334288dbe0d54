"""The exception tree of RayLM; every class carries its HTTP status and its OpenAI type and code.

    RayLMError                      500 server_error
    ├── ConfigError                 start-up only: a configuration or checkpoint that cannot be served
    ├── InvalidRequestError         400 invalid_request_error, ``param`` names the field
    │   ├── ContextLengthError      400 context_length_exceeded, prompt and requested tokens do not fit
    │   ├── UnsupportedFieldError   400 unsupported_field, never dropped silently
    │   ├── AuthenticationError     401 invalid_api_key, no key or a wrong one
    │   ├── NotFoundError           404 not_found, no such route or object
    │   │   └── ModelNotFoundError  404 model_not_found
    │   ├── MethodNotAllowedError   405 method_not_allowed
    │   ├── BodyTooLargeError       413 body_too_large
    │   ├── MediaTypeError          415 unsupported_media_type, the body is not JSON
    │   └── HeadersTooLargeError    431 headers_too_large, too many headers or bytes of them
    ├── OverloadedError             429 rate_limit_error, the queue is full; carries Retry-After
    ├── DeadlineExceededError       504 deadline_exceeded, waited longer than the client does; dropped unanswered
    └── EngineUnavailableError      503 service_unavailable, none is ready, one is being started; carries Retry-After
        ├── EngineDiedError         503 the engine was lost while it served this request; sending it again is safe
        │   └── PeerLostError       503 a rank waited in vain for another one, whose end is the cause to report instead
        └── ShuttingDownError       503 shutting_down, this replica is about to end; another one may serve the request

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

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), param=self.param), (self.message,), self.__dict__


class ConfigError(RayLMError):
    """The configuration or the checkpoint cannot be served; raised at start only."""


class InvalidRequestError(RayLMError):
    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class UnsupportedFieldError(InvalidRequestError):
    code = "unsupported_field"


class AuthenticationError(InvalidRequestError):
    status = 401
    code = "invalid_api_key"


class NotFoundError(InvalidRequestError):
    status = 404
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class MethodNotAllowedError(InvalidRequestError):
    status = 405
    code = "method_not_allowed"


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
    status = 429
    type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(RayLMError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class EngineUnavailableError(RayLMError):
    status = 503
    type = "service_unavailable"
    code = "engine_unavailable"
    retry_after_s = 2


class EngineDiedError(EngineUnavailableError):
    code = "engine_died"


class PeerLostError(EngineDiedError):
    """A rank waited in vain for another one, whose end is the cause to report instead."""


class ShuttingDownError(EngineUnavailableError):
    code = "shutting_down"
