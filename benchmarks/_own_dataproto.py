"""The names that benchmarks/dataproto.py measures; a peer's module has the same ones."""

from agentrl_core.controller import ClassWithInitArgs as RayClassWithInitArgs
from agentrl_core.controller import Dispatch, RayResourcePool, RayWorkerGroup, Worker, register
from agentrl_core.protocol import DataProto

__all__ = ["DataProto", "Dispatch", "RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup", "Worker", "register"]
