"""``agentrl try``: calls each tool and reward function once."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl_core.api import Termination
from agentrl_core.api.tree import Tree, TreePath
from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.hosting.rewards import HostedRewardFunction
from agentrl_core.hosting.tools import HostedTool
from agentrl_core.plugins.boundary import traced
from agentrl_core.rollout.loop_output import TreeRow
from agentrl_core.rollout.results import TrajectoryResult, reward_trajectory
from agentrl_core.serving.clients import absent_clients

_SAMPLES: dict[Any, Any] = {"string": "1", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


async def trial_lines(config: ResolvedConfig, row: Mapping[str, Any]) -> list[str]:
    """One line or traceback for each call. Tools get made-up arguments, rewards an empty answer to ``row``."""
    lines: list[str] = []
    clients = absent_clients(config.engines)
    for slot in config.tools:
        tool = HostedTool(slot, config.trainer.seed, clients)
        called = next(iter(tool.schemas))
        arguments = dict(_sampled(*tool.parameters(called)))
        kwargs = (((row.get("extra_info") or {}).get("tools_kwargs") or {}).get(tool.name) or {}).get("create_kwargs")
        what = f"tool {called}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
        try:
            await tool.call("create", "trial", kwargs=kwargs or {})
            result = await tool.execute("trial", called, arguments, {})
            lines.append(f"{what} returned {result.response.text!r}")
        except Exception as error:  # noqa: BLE001 - a tool may raise anything, and this is here to show it
            lines.append(f"{what} failed:\n{traced(error)}")
        finally:
            await tool.release("trial", {})
            await tool.close()
    empty = TreeRow(TreePath(Tree(), ()))
    empty.messages = list(row["raw_prompt"])
    ended = TrajectoryResult(dict(row), "trial", Termination.COMPLETED, [empty])
    for reward in config.reward.functions:
        function = HostedRewardFunction(reward, clients)
        try:
            result = await function(reward_trajectory(ended))
            lines.append(f"reward function {function.name} returned {result.score:g} for an empty answer")
        except Exception as error:  # noqa: BLE001 - as above
            lines.append(f"reward function {function.name} failed:\n{traced(error)}")
        finally:
            await function.close()
    return lines


def _sampled(properties: Mapping[str, Any], required: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for name in required:
        schema = properties.get(name, {})
        yield name, next(iter(schema.get("enum", ())), _SAMPLES.get(schema.get("type"), "1"))
