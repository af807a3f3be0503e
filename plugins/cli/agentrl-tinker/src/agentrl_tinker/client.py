"""A small client of the API, for the conformance check and for tests; it needs no SDK."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from agentrl_tinker import messages
from agentrl_tinker.refusals import Refusal


@dataclass(frozen=True)
class Trained:
    """What ``forward_backward`` returned."""

    loss: float
    log_probs: list["np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class Sampled:
    """What ``asample`` returned; ``prompt`` are the log-probabilities of the prompt, the first of which is nan."""

    tokens: list[list[int]]
    log_probs: list["np.ndarray[Any, Any]"]
    stopped: list[bool]
    prompt: "np.ndarray[Any, Any]"


class Client:
    """One API key at one server."""

    def __init__(self, http: httpx.AsyncClient, key: str) -> None:
        self._http = http
        self._headers = {"X-API-Key": key}

    async def get(self, path: str) -> Any:
        return self._answer(await self._http.get(f"/api/v1/{path}", headers=self._headers))

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._answer(await self._http.post(f"/api/v1/{path}", json=body, headers=self._headers))

    async def post_message(self, path: str, message: Any) -> Any:
        headers = {**self._headers, "Content-Type": "application/x-protobuf"}
        return self._answer(
            await self._http.post(f"/api/v1/{path}", content=message.SerializeToString(), headers=headers)
        )

    def _answer(self, response: httpx.Response) -> Any:
        if response.is_success:
            return response.json()
        try:
            text = str(response.json().get("detail", response.text))
        except (ValueError, AttributeError):
            text = response.text
        raise Refusal(text, response.status_code)

    async def result(self, promise: Mapping[str, Any], seconds: float = 600.0) -> Any:
        """The result of a request: bytes for protobuf, else JSON.

        Args:
            seconds: after which no further try begins.

        Raises:
            Refusal: the request failed, or had no result in this time.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            response = await self._http.post(
                "/api/v1/retrieve_future", json={"request_id": promise["request_id"]},
                headers={**self._headers, "Accept": "application/x-protobuf"},
            )  # fmt: skip
            if response.status_code == 408 or (
                response.is_success
                and "json" in response.headers["content-type"]
                and response.json().get("type") == "try_again"
            ):
                if loop.time() >= end:
                    raise Refusal(f"request {promise['request_id']} had no result after {seconds:g} s", 408)
                # Servers may wait before they say so, or not.
                await asyncio.sleep(0.05)
                continue
            if response.is_success and "protobuf" in response.headers["content-type"]:
                return response.content
            found = self._answer(response)
            if "error" in found:
                raise Refusal(found["error"])
            return found

    async def session(self) -> str:
        body: dict[str, Any] = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0", "type": "create_session"}
        return str((await self.post("create_session", body))["session_id"])


@dataclass
class Model:
    """A model of a client: numbers its requests."""

    client: Client
    session_id: str
    model_id: str
    sent: int = 0
    samplers: int = 100
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    async def create(cls, client: Client, base_model: str, session_id: str, number: int = 0, **lora: Any) -> "Model":
        body = {
            "session_id": session_id, "model_seq_id": number, "base_model": base_model,
            "lora_config": {"rank": 8, "seed": 1, **lora}, "type": "create_model",
        }  # fmt: skip
        found = await client.result(await client.post("create_model", body))
        return cls(client, session_id, found["model_id"])

    def next(self) -> int:
        self.sent += 1
        return self.sent

    async def send_train(
        self, data: Sequence[Any], loss: str = "cross_entropy", forward_only: bool = False, seq_id: int | None = None,
        **settings: float,
    ) -> Any:  # fmt: skip
        message = messages.new(
            "ForwardBackwardRequest", model_id=self.model_id, seq_id=self.next() if seq_id is None else seq_id,
            data=data, loss_fn=loss, forward_only=forward_only,
            loss_fn_config=[messages.new("NamedNumber", key=key, value=value) for key, value in settings.items()],
        )  # fmt: skip
        return await self.client.post_message("forward_backward", message)

    async def train(self, data: Sequence[Any], loss: str = "cross_entropy", **options: Any) -> Trained:
        return trained(await self.client.result(await self.send_train(data, loss, **options)))

    async def forward(self, data: Sequence[Any]) -> Trained:
        return await self.train(data, forward_only=True)

    async def step(self, **params: Any) -> Any:
        return await self.client.result(await self.send_step(**params))

    async def send_step(self, seq_id: int | None = None, **params: Any) -> Any:
        body = {"model_id": self.model_id, "seq_id": self.next() if seq_id is None else seq_id, "adam_params": params}
        return await self.client.post("optim_step", body)

    async def save(self, name: str, **options: Any) -> str:
        return str((await self._ordered("save_weights", path=name, **options))["path"])

    async def save_for_sampler(self, name: str) -> str:
        return str((await self._ordered("save_weights_for_sampler", path=name))["path"])

    async def load(self, path: str, optimizer: bool = True) -> Any:
        return await self._ordered("load_weights", path=path, optimizer=optimizer)

    async def sampler(self, kind: str = "snapshot") -> "SamplerClient":
        self.samplers += 1
        found = await self._ordered("save_weights_for_sampler", sampling_session_seq_id=self.samplers, kind=kind)
        return SamplerClient(self.client, found["sampling_session_id"])

    async def _ordered(self, route: str, /, **body: Any) -> Any:
        body = {"model_id": self.model_id, "seq_id": self.next(), **body}
        return await self.client.result(await self.client.post(route, body))


@dataclass
class SamplerClient:
    client: Client
    sampler_id: str
    sent: int = 0

    @classmethod
    async def create(cls, client: Client, session_id: str, number: int, **what: Any) -> "SamplerClient":
        body = {"session_id": session_id, "sampling_session_seq_id": number, **what}
        return cls(client, (await client.post("create_sampling_session", body))["sampling_session_id"])

    async def send(
        self, prompt: Sequence[int], count: int = 1, extra: Mapping[str, Any] | None = None, **params: Any
    ) -> Any:
        self.sent += 1
        body = {
            "sampling_session_id": self.sampler_id, "seq_id": self.sent - 1, "num_samples": count,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]}, "sampling_params": params,
            **(extra or {}),
        }  # fmt: skip
        return await self.client.post("asample", body)

    async def sample(
        self, prompt: Sequence[int], count: int = 1, extra: Mapping[str, Any] | None = None, **params: Any
    ) -> Sampled:
        return sampled(await self.client.result(await self.send(prompt, count, extra, **params)))

    async def score(self, ids: Sequence[int]) -> "np.ndarray[Any, Any]":
        """Log-probabilities of a sequence, as ``compute_logprobs`` asks for them."""
        return (await self.sample(ids, extra={"prompt_logprobs": True}, max_tokens=1)).prompt


def datum(ids: Sequence[int], targets: Sequence[int], **inputs: Any) -> Any:
    """A datum of the API; ``inputs`` are float32."""
    tensors = {"target_tokens": _tensor(targets, "<i8", messages.INT64)}
    tensors |= {key: _tensor(values, "<f4", messages.FLOAT32) for key, values in inputs.items()}
    text = messages.new("EncodedTextChunk", tokens=np.asarray(ids, "<i4").tobytes())
    return messages.new(
        "Datum", model_input=[messages.new("Chunk", encoded_text=text)],
        loss_fn_inputs=[messages.new("NamedTensor", key=key, value=value) for key, value in tensors.items()],
    )  # fmt: skip


def _tensor(values: Any, dtype: str, kind: int) -> Any:
    array = np.asarray(values, dtype)
    return messages.new("Tensor", dense=array.tobytes(), dtype=kind, shape=list(array.shape))


def trained(content: bytes) -> Trained:
    message = messages.new("ForwardBackwardOutput")
    message.ParseFromString(content)
    metrics = {entry.key: entry.value for entry in message.metrics}
    found: list[np.ndarray[Any, Any]] = []
    for record in message.loss_fn_outputs:
        tensor = next(entry.value for entry in record.fields if entry.key == "logprobs")
        offsets = np.frombuffer(tensor.offsets, "<i8")
        found += [
            np.frombuffer(tensor.data[start:end], "<f4") for start, end in zip(offsets, offsets[1:], strict=False)
        ]
    if "loss:sum" not in metrics:
        raise Refusal("the result of forward_backward has no metric loss:sum, which the SDK needs")
    return Trained(metrics["loss:sum"], found)


def sampled(content: bytes) -> Sampled:
    message = messages.new("SampleResponse")
    message.ParseFromString(content)
    return Sampled(
        [np.frombuffer(each.tokens, "<i4").tolist() for each in message.sequences],
        [np.frombuffer(each.logprobs, "<f4") for each in message.sequences],
        [each.stop_reason == messages.STOP for each in message.sequences],
        np.frombuffer(message.prompt_logprobs, "<f4"),
    )
