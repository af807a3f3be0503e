"""A server from its options: model, engine, state and application."""

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from agentrl_core.api.engine import AdapterSlots, EngineContext
from agentrl_core.api.errors import ConfigError, EngineError
from agentrl_core.config.schema import ModelConfig
from agentrl_core.workers.devices import resolve_device
from agentrl_tinker.adapters import Shape
from agentrl_tinker.app import Api
from agentrl_tinker.sampler import Sampler, Weights
from agentrl_tinker.service import Service, adapter_files
from agentrl_tinker.store import Store, write_files
from agentrl_tinker.trainer import Trainer

logger = logging.getLogger(__name__)

DEFAULT_LENGTH = 8192
"""Tokens of prompt and response, where the model could take more."""


@dataclass(frozen=True)
class Options:
    """What ``agentrl tinker serve`` takes.

    Args:
        model: a folder with weights, config and tokenizer.
        state: folder of the checkpoints.
        name: what clients call the model; None: the folder as it was given.
        keys: API keys that are let in; None: every key.
        max_model_len: tokens of prompt and response; None: the model's, at most 8,192.
        dtype: of the frozen weights; None: bfloat16 on CUDA, else float32.
        micro_batch_tokens: tokens that are trained on at once, padding included.
        session_timeout: seconds without a word of a client, after which its adapters are released.
        max_slots: adapters that the engine serves at once.
        unembed: adapters may change the output layer, which some engines cannot serve.
    """

    model: str
    state: Path
    name: str | None = None
    keys: Collection[str] | None = None
    engine: str = "hf"
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] | None = None
    max_adapters: int = 16
    max_rank: int = 64
    max_slots: int = 8
    unembed: bool = True
    max_model_len: int | None = None
    micro_batch_tokens: int = 8192
    gradient_checkpointing: bool = False
    session_timeout: float = 300.0


@asynccontextmanager
async def serving(options: Options) -> AsyncIterator[Api]:
    """The application of a server whose engine runs inside of the block.

    Raises:
        ConfigError: the model or the engine cannot be loaded.
    """
    from transformers import AutoTokenizer

    store = Store(options.state)
    device = resolve_device(options.device)
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    config = ModelConfig(path=options.model, dtype=dtype, gradient_checkpointing=options.gradient_checkpointing)
    trainer = Trainer(options.model, config, device, options.micro_batch_tokens)
    longest = getattr(trainer.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = options.max_model_len or min(longest or DEFAULT_LENGTH, DEFAULT_LENGTH)
    if longest and length > longest:
        raise ConfigError(f"--max-model-len: {length} is more than the {longest} positions that the model has")
    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    names = tuple(f"slot-{index}" for index in range(options.max_slots))
    context = EngineContext(
        model_path=options.model,
        dtype=dtype,
        max_model_len=length,
        device=device.type,
        vocab_size=trainer.vocabulary,
        adapters=AdapterSlots(names, 1, options.max_rank, _last_parts(trainer, options.unembed)),
    )
    sampler = await Sampler.start(options.engine, dict(options.engine_options), context)
    if options.unembed:
        await _check_unembed(trainer, sampler, options.engine)
    service = Service(
        trainer,
        sampler,
        store,
        name=options.name or options.model,
        tokenizer=str(Path(options.model).resolve()),
        decode=tokenizer.decode,
        eos=_eos(trainer.model, tokenizer),
        max_adapters=options.max_adapters,
        max_rank=options.max_rank,
        unembed=options.unembed,
        max_model_len=length,
        session_timeout=options.session_timeout,
    )
    watch = asyncio.create_task(_end_idle_sessions(service, options.session_timeout / 10))
    try:
        yield Api(service, options.keys)
    finally:
        watch.cancel()
        await service.close()


async def _check_unembed(trainer: Trainer, sampler: Sampler, engine: str) -> None:
    """Let the engine load an adapter of the output layer, before a client trains one that could never be sampled."""
    name, shape = "output_layer", Shape(1, train_attn=False, train_mlp=False)
    trainer.create(name, shape)
    try:
        with TemporaryDirectory(prefix="agentrl-tinker-") as parent:
            folder = write_files(Path(parent) / name, adapter_files(trainer, name, shape, False))
            await sampler.try_out(Weights(folder, shape))
    except EngineError as error:
        await sampler.close()
        raise ConfigError(
            f"--unembed: the engine {engine!r} serves no adapters of this model's output layer ({error}). Start with "
            "--no-unembed; clients then create models with train_unembed=False"
        ) from error
    finally:
        trainer.remove(name)


async def _end_idle_sessions(service: Service, every: float) -> None:
    while True:
        await asyncio.sleep(every)
        await service.end_idle_sessions()


def _last_parts(trainer: Trainer, unembed: bool) -> tuple[str, ...]:
    shape = Shape(1, train_mlp=not trainer.adapters.has_experts, train_unembed=unembed)
    return tuple(sorted({name.rpartition(".")[2] for name in trainer.adapters.targets(shape)}))


def _eos(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a sequence, by the model's generation config and the tokenizer."""
    found = getattr(model.generation_config, "eos_token_id", None)
    ids = found if isinstance(found, list) else [found]
    return tuple(dict.fromkeys(int(each) for each in [*ids, tokenizer.eos_token_id] if each is not None))


def run(options: Options, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM comes; then requests that run end, and the engine.

    Raises:
        ConfigError: also where the address is in use.
    """
    import uvicorn

    async def serve(listener: socket.socket) -> None:
        async with serving(options) as api:

            class Server(uvicorn.Server):
                @contextmanager
                def capture_signals(self) -> Iterator[None]:
                    # uvicorn's own would end the process before the engine is closed.
                    for number in (signal.SIGINT, signal.SIGTERM):
                        asyncio.get_running_loop().add_signal_handler(number, self.stop, number)
                    yield

                def stop(self, number: int) -> None:
                    api.stop()
                    self.handle_exit(number, None)

            config = uvicorn.Config(
                api.app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5
            )
            found = listener.getsockname()[1]
            logger.info("serving %s at http://%s:%d, checkpoints in %s", options.model, host, found, options.state)
            await Server(config).serve([listener])

    # Before the model is loaded, which can take minutes.
    with _bound(host, port) as listener:
        asyncio.run(serve(listener))


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"--host, --port: cannot listen on {host}, port {port}: {error.strerror or error}. Choose another port, or "
            "an address of this machine"
        ) from error
    return listener
