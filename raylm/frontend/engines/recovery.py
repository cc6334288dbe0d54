"""Recovery: sends the prompts of a lost engine to another engine, with the tokens drawn so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from raylm.errors import EngineDiedError, EngineUnavailableError, RayLMError
from raylm.frontend.engines.routed_engine import RoutedPrompt

MOST_CRASHES = 3


class Recovery:
    """Sends the prompts of a lost engine to another engine.

    ``send`` hands a prompt to an engine that can continue it. If there is no such engine, ``send`` raises
    EngineUnavailableError, and the prompt waits for one for at most ``timeout_s`` seconds.

    A prompt is suspected of crashing engines if two engines crashed in a row while they ran it and neither produced a
    token. Recovery sends suspects one at a time. If a third engine crashes, the suspect fails with EngineDiedError.
    """

    def __init__(self, send: Callable[[RoutedPrompt], None], timeout_s: float) -> None:
        self._send, self._timeout_s = send, timeout_s
        self._waiting: dict[RoutedPrompt, None] = {}  # in the order in which they came
        self.on_trial: RoutedPrompt | None = None

    def suspect(self, prompts: Iterable[RoutedPrompt]) -> None:
        """Note that an engine crashed while it ran these prompts. Call it before ``take``."""
        for prompt in prompts:
            prompt.crashes += 1
        if self.on_trial is not None and self.on_trial.crashes >= MOST_CRASHES:
            message = f"This request was stopped because {MOST_CRASHES} engines crashed while running it."
            self.on_trial.fail(EngineDiedError(message))

    def take(self, prompts: Iterable[RoutedPrompt], fingerprint: str, error: RayLMError) -> None:
        """Send prompts to another engine of this ``fingerprint``; ``error`` ends them if none comes."""
        for prompt in prompts:
            prompt.fingerprint = fingerprint
            prompt.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._give_up, prompt, error)
            self._waiting[prompt] = None
        self.retry()

    def retry(self) -> None:
        """Send the waiting prompts. Call it when an engine has started or has loaded an adapter."""
        for prompt in list(self._waiting):
            is_suspect = prompt.crashes >= MOST_CRASHES - 1
            if is_suspect and self.on_trial not in (None, prompt):
                continue
            if self._resend(prompt) and is_suspect:
                self.on_trial = prompt

    def check_trial(self) -> None:
        """End the trial of a prompt that got tokens. Call it after outputs while a prompt is ``on_trial``."""
        if self.on_trial is not None and not self.on_trial.crashes:
            self._end_trial()

    def forget(self, prompt: RoutedPrompt) -> None:
        """Drop a prompt that has ended."""
        if prompt.timer is not None:
            self._no_longer_waits(prompt)
        if prompt is self.on_trial:
            self._end_trial()

    def close(self, error: RayLMError) -> None:
        """Fail all waiting prompts with ``error``."""
        for prompt in list(self._waiting):
            self._give_up(prompt, error)

    def _end_trial(self) -> None:
        self.on_trial = None
        self.retry()

    def _resend(self, prompt: RoutedPrompt) -> bool:
        if not prompt.finished:
            try:
                self._send(prompt)
            except EngineUnavailableError:
                return False
            except RayLMError as error:
                prompt.fail(error)
        self._no_longer_waits(prompt)
        return not prompt.finished

    def _no_longer_waits(self, prompt: RoutedPrompt) -> None:
        if prompt.timer is not None:
            prompt.timer.cancel()
            prompt.timer = None
        del self._waiting[prompt]

    def _give_up(self, prompt: RoutedPrompt, error: RayLMError) -> None:
        prompt.fail(error)
        self.forget(prompt)
