"""A server that is checked, and what checks do with it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np

from agentrl_tinker.client import Client, Model, SamplerClient, datum
from agentrl_tinker.refusals import Refusal

IDS = [5, 6, 7, 8, 9, 10]
NEAR = 0.05
"""Log-probabilities of trainer and sampler that differ by less are the same."""
LINEAR = {"eps": 1e4, "beta1": 0.0, "beta2": 0.0}
"""With these AdamW's step is proportional to the gradient, so it shows sums, means and what was clipped."""


class Failed(Exception):
    """What the server did instead."""


class Skipped(Exception):
    """Why a check says nothing about this server."""


class Bench:
    """A server, and what checks do with it."""

    def __init__(
        self, client: Client, other: Client | None, stranger: Client, base_model: str, lora: dict[str, Any]
    ) -> None:
        self.client, self.other, self.stranger, self.base_model = client, other, stranger, base_model
        self._lora = lora
        self._rate = 0.0
        self._sessions: list[str] = []

    async def session(self) -> str:
        self._sessions.append(await self.client.session())
        return self._sessions[-1]

    async def end(self) -> None:
        """Release what the sessions so far hold; a server may not know how."""
        while self._sessions:
            with suppress(Refusal):
                body = {"reason": {"type": "success"}, "detail": None}
                await self.client.post(f"sessions/{self._sessions.pop()}/finish", body)

    async def model(self, **lora: Any) -> Model:
        return await Model.create(self.client, self.base_model, await self.session(), **{**self._lora, **lora})

    @asynccontextmanager
    async def refuses(self, what: str) -> AsyncIterator[None]:
        """Fails unless a request inside is refused with a status of the client's own."""
        try:
            yield
        except Refusal as refusal:
            if not 400 <= refusal.status < 500:
                raise Failed(f"{what} got the status {refusal.status}: {refusal}") from refusal
        else:
            raise Failed(f"{what} was accepted")

    async def base(self) -> SamplerClient:
        return await SamplerClient.create(self.client, await self.session(), 0, base_model=self.base_model)

    async def log_probs(self, model: Model) -> "np.ndarray[Any, Any]":
        return (await model.forward([row()])).log_probs[0]

    async def learned(self, model: Model, steps: int = 4) -> "np.ndarray[Any, Any]":
        for _ in range(steps):
            await model.train([row()])
            await model.step(learning_rate=0.01)
        return await self.log_probs(model)

    async def moved(self, *requests: Callable[[Model], Awaitable[Any]], **step: float) -> float:
        """By how much the sum of log-probabilities rises by requests and a step with their gradient."""
        model = await self.model()
        before = await self.log_probs(model)
        for request in requests:
            await request(model)
        await model.step(**{"learning_rate": await self.rate(), **LINEAR, **step})
        after = await self.log_probs(model)
        await self.end()
        return float((after - before).sum())

    async def rate(self) -> float:
        """A learning rate with which a datum moves its log-probabilities by about a half."""
        if not self._rate:
            rate, moved = 1e-3 * LINEAR["eps"], 0.0
            for _ in range(8):
                self._rate = rate
                moved = abs(await self.moved(lambda model: model.train([row()])))
                if 0.2 <= moved <= 1.0:
                    return rate
                rate *= min(max(0.5 / max(moved, 1e-6), 0.01), 100.0)
            self._rate = 0.0
            raise Failed(f"no learning rate moves the model: the last step moved it by {moved:.3g}")
        return self._rate


def row(weights: Sequence[float] = (1.0,) * 5) -> Any:
    return datum(IDS[:-1], IDS[1:], weights=weights)


def expect(holds: bool, why: str) -> None:
    if not holds:
        raise Failed(why)


def close(found: Any, wanted: Any, what: str, near: float = NEAR) -> None:
    gap = float(np.max(np.abs(np.asarray(found) - np.asarray(wanted)), initial=0.0))
    expect(gap <= near, f"{what} differ by {gap:.3g}")
