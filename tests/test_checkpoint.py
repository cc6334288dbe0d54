"""A model that the hub does not provide: network errors, gated models and misspelled names each get their own line."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from raylm.checkpoint import resolve
from raylm.errors import ConfigError


class Hub(BaseHTTPRequestHandler):
    """Refuses requests as the real hub does: with a status and X-Error-Code."""

    def do_GET(self) -> None:
        answers = {"gated": (403, "GatedRepo"), "old": (404, "RevisionNotFound"), "misspelt": (401, "RepoNotFound")}
        answers["embeded"] = answers["misspelt"]
        status, code = next((answer for name, answer in answers.items() if name in self.path), (500, ""))
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("content-length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def _empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, _empty_cache: None) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    name_hub(monkeypatch, url)
    yield url
    server.shutdown()
    server.server_close()
    thread.join()


def name_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    from huggingface_hub import constants
    from huggingface_hub.hf_api import api

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(api, "endpoint", url)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def refusal(model: str, revision: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(model, revision)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_what_the_hub_refuses_is_told_apart(hub: str) -> None:
    assert refusal("me/gated").startswith("model: 'me/gated' is gated, and this token has no access; log in")
    assert f"ask for access at {hub}/me/gated" in refusal("me/gated")
    assert refusal("me/old", "v9") == "model: 'me/old' has no revision 'v9'."
    said = refusal("me/misspelt")
    assert said.startswith(
        f"model: there is no directory 'me/misspelt' here, and no such model at {hub}; is it misspelt?"
    )
    assert "does not give 'me/broken': Server error '500" in refusal("me/broken")


def test_a_misspelt_embedded_model_is_recognized(hub: str) -> None:
    assert "did you mean 'embedded'?" in refusal("embeded")


@pytest.mark.usefixtures("_empty_cache")
def test_a_hub_that_cannot_be_reached_is_the_networks_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        name_hub(monkeypatch, url)
        assert f"'me/model' is not on this machine, and {url} cannot be reached (ConnectError)" in refusal("me/model")


def test_a_name_that_cannot_be_one_is_said_without_asking() -> None:
    assert refusal("not a name") == "model: 'not a name' is neither 'embedded', nor a directory here, nor a hub id."


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def full(*args: object, **kwargs: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    assert refusal("me/model").startswith(
        "model: the disk is full where 'me/model' is kept; free some space, or set HF_HOME"
    )
