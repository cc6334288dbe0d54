"""Parameters of one request, validated on construction. The ingress creates them; every actor reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal

from raylm.errors import InvalidRequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_STRINGS = 4
MAX_BAD_WORDS = 128
MAX_LOGIT_BIAS = 1024
MAX_CHOICES = 1024
MAX_PENALTY = 1e6  # largest repetition penalty; the least is its inverse, so that float32 logits stay finite
MAX_GRAMMAR_CHARS = 2**18
LARK = "%llguidance {}\n"  # a grammar with this prefix is Lark

_INTEGERS = ("n", "top_k", "min_tokens")
_OPTIONAL_INTEGERS = ("seed", "max_tokens", "thinking_token_budget", "logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_LISTS = {"stop": str, "bad_words": str, "stop_token_ids": int, "allowed_token_ids": int, "logprob_token_ids": int}

_FORMS = ("json", "regex", "choice", "grammar", "json_object")

PoolingType = Literal["last", "mean", "cls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form that an answer must have. Exactly one of these fields is set:

    ``json``: a JSON schema, as an object or as its text. The answer is compact, without white space between values,
    unless the schema says otherwise (``x-guidance``). ``regex``: a regular expression for the whole answer.
    ``choice``: a list of strings, one of which is the answer. ``grammar``: Lark (with a rule ``start``) or GBNF.
    ``json_object``: any JSON object. In addition, ``param`` is the name of the field in error messages.
    """

    json: Mapping[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    param: str = "structured_outputs"

    def __post_init__(self) -> None:
        self._check_types()
        given = sum(form is not None for form in (self.json, self.regex, self.choice, self.grammar)) + self.json_object
        _check(given == 1, self.param, "takes exactly one of json, regex, choice, grammar and json_object")
        choices = self.choice is None or (0 < len(self.choice) <= MAX_CHOICES and all(self.choice))
        _check(choices, self.param, f"takes 1 to {MAX_CHOICES} choices, none of them empty")
        longest = max(len(text) for text in (self.regex or "", self.grammar or "", *(self.choice or ())))
        _check(longest <= MAX_GRAMMAR_CHARS, self.param, f"takes at most {MAX_GRAMMAR_CHARS} characters")

    def _check_types(self) -> None:
        for name in ("regex", "grammar"):
            _check(isinstance(getattr(self, name), str | None), self.param, f"takes {name} as a str")
        schema = isinstance(self.json, Mapping | bool | str | None)
        _check(schema, self.param, "takes json as a schema, an object or its text")
        _check(isinstance(self.json_object, bool), self.param, "takes json_object as a bool")
        choice: Any = self.choice
        if choice is not None:
            texts = isinstance(choice, list | tuple) and all(isinstance(text, str) for text in choice)
            _check(texts, self.param, "takes choice as a list of str")
            object.__setattr__(self, "choice", tuple(choice))

    @classmethod
    def of(cls, form: Mapping[str, Any]) -> StructuredOutputs:
        """Create from a dict of the fields; ``param`` is not one of them."""
        unknown = [key for key in form if key not in _FORMS]
        _check(not unknown, "structured_outputs", f"takes one of {', '.join(_FORMS)}, and no {unknown[:1]}")
        return cls(**form)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample the tokens of one request, and when to stop.

    ``max_tokens`` and ``min_tokens`` count generated tokens. ``logit_bias`` is added to logits (clamped to ±100).
    Presence and frequency penalties follow OpenAI: they are subtracted from logits, counted over generated tokens. The
    repetition penalty follows CTRL: it divides positive and multiplies negative logits, over prompt and generated
    tokens. ``structured_outputs`` (also as a dict of its fields) applies to the answer, after any reasoning.
    ``thinking_token_budget`` is the most reasoning tokens before the model is made to answer. ``logprob_token_ids`` are
    reported at each generated token instead of the ``logprobs`` most likely tokens.

    Raises:
        InvalidRequestError: a value is out of range; ``param`` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: int | None = None
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        _check_range("n", self.n, 1, MAX_N)
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check(self.top_k == -1 or self.top_k >= 0, "top_k", "must be -1 (off), 0 (off) or at least 1")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 1 / MAX_PENALTY, MAX_PENALTY)
        _check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "must be a 64-bit integer")
        _check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "must be at least 1")
        _check(self.min_tokens >= 0, "min_tokens", "must be at least 0")
        fits = self.max_tokens is None or self.min_tokens <= self.max_tokens
        _check(fits, "min_tokens", "must not exceed max_tokens")
        budget = self.thinking_token_budget
        _check(budget is None or budget >= 0, "thinking_token_budget", "must be at least 0")
        ends = self.structured_outputs is None or not self.ignore_eos
        _check(ends, "ignore_eos", "must be false where the form of the answer says when it ends")
        self._check_lists()

    def _check_types(self) -> None:
        for name in _INTEGERS:
            _check(type(getattr(self, name)) is int, name, "must be an int")
        for name in _OPTIONAL_INTEGERS:
            _check(type(getattr(self, name)) in (int, NoneType), name, "must be an int or None")
        for name in _NUMBERS:
            _check(_is_number(getattr(self, name)), name, "must be a number")
        for name, kind in _LISTS.items():
            self._make_tuple(name, kind)
        bias: Any = self.logit_bias
        keys_fit = isinstance(bias, Mapping) and all(type(key) is int for key in bias)
        _check(keys_fit and all(map(_is_number, bias.values())), "logit_bias", "must be a dict of numbers by int")
        form: Any = self.structured_outputs
        if isinstance(form, Mapping):
            object.__setattr__(self, "structured_outputs", form := StructuredOutputs.of(form))
        _check(isinstance(form, StructuredOutputs | None), "structured_outputs", "must be StructuredOutputs or a dict")

    def _make_tuple(self, name: str, kind: type) -> None:
        given = getattr(self, name)
        if name == "stop" and isinstance(given, str):
            given = (given,)
        fits = isinstance(given, tuple | list) and all(type(item) is kind for item in given)
        _check(fits, name, f"must be a list of {kind.__name__}")
        object.__setattr__(self, name, tuple(given))

    def _check_lists(self) -> None:
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"may hold at most {MAX_STOP_STRINGS} strings")
        _check(all(self.stop), "stop", "must not hold an empty string")
        _check(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", f"may hold at most {MAX_BAD_WORDS} strings")
        _check(all(word.strip() for word in self.bad_words), "bad_words", "must not hold a blank string")
        _check(len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", f"may hold at most {MAX_LOGIT_BIAS} tokens")
        _check(all(map(math.isfinite, self.logit_bias.values())), "logit_bias", "must hold finite numbers")
        few = len(self.logprob_token_ids) <= MAX_LOGPROB_TOKEN_IDS
        _check(few, "logprob_token_ids", f"may hold at most {MAX_LOGPROB_TOKEN_IDS} tokens")
        asked = self.logprobs is not None or not self.logprob_token_ids
        _check(asked, "logprob_token_ids", "needs logprobs")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value != -1, name, f"may not be -1, the whole vocabulary: at most {MAX_LOGPROBS} are served")
            _check(value is None or 0 <= value <= MAX_LOGPROBS, name, f"must lie between 0 and {MAX_LOGPROBS}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How to compute one vector from a prompt's last hidden states (after the model's last norm).

    ``pooling`` takes the hidden state of the last token (``last``), of the first token (``cls``), or the mean over all
    tokens (``mean``). ``dimensions`` keeps that many leading numbers, or all if None (Matryoshka representations,
    Kusupati et al. 2022). ``normalize`` then scales the vector to length 1.

    ``pair_at`` is for cross-encoders: the prompt has two texts, and the tokens of the second begin at this index. The
    vector is then one number, the score of the pair.
    """

    pooling: PoolingType = "last"
    normalize: bool = True
    dimensions: int | None = None
    pair_at: int | None = None

    def __post_init__(self) -> None:
        _check(self.pooling in ("last", "mean", "cls"), "pooling", "must be last, mean or cls")
        _check(isinstance(self.normalize, bool), "normalize", "must be a bool")
        _check(type(self.dimensions) in (int, NoneType), "dimensions", "must be an int or None")
        _check(self.dimensions is None or self.dimensions >= 1, "dimensions", "must be at least 1")
        _check(type(self.pair_at) in (int, NoneType), "pair_at", "must be an int or None")
        _check(self.pair_at is None or self.pair_at >= 1, "pair_at", "must be at least 1")

    @property
    def reads_every_token(self) -> bool:
        """Whether hidden states before the last token are needed, so that cached keys and values do not suffice."""
        return self.pooling != "last"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(ok: bool, param: str, rule: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{param} {rule}.", param=param)


def _check_range(param: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = math.isfinite(value) and value <= high and (value > low if open_low else value >= low)
    _check(inside, param, f"must lie {'above' if open_low else 'between'} {low:g} and {'at most ' * open_low}{high:g}")
