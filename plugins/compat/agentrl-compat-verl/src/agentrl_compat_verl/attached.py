"""Files that a configuration of verl names: of tools, function tools, interactions and agent loops."""

import ast
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentrl_compat_verl import keys
from agentrl_compat_verl.conversion import Conversion
from agentrl_compat_verl.hydra import find, load_yaml

_TURNS = "actor_rollout_ref.rollout.multi_turn"
_AGENT = "actor_rollout_ref.rollout.agent"
TOOLS, FUNCTIONS, INTERACTIONS = (
    f"{_TURNS}.{name}" for name in ("tool_config_path", "function_tool_path", "interaction_config_path")
)
LOOPS, DEFAULT_LOOP = f"{_AGENT}.agent_loop_config_path", f"{_AGENT}.default_agent_loop"
_SANDBOX, _SEARCH, _MCP = "SandboxFusionTool", "SearchTool", ("MCPBaseTool", "MCPSearchTool")
PORT = "docs/coming-from-verl.md shows how"


def attach(result: Conversion) -> None:
    """Convert the tools, interactions and loops."""
    tools: list[Any] = []
    if file := _file(result, TOOLS, "tools"):
        for index, entry in enumerate(_listed(result, TOOLS, file, "tools")):
            where = f"{TOOLS}: {file.name}: tools.{index}"
            tools += _shaped(result, where, _tool, entry, file) or []
    if file := _file(result, FUNCTIONS, "tools"):
        tools += _functions(result, file)
    if tools:
        result.values["tools"] = tools
    if file := _file(result, INTERACTIONS, "interactions"):
        found = _listed(result, INTERACTIONS, file, "interaction")
        result.values["interactions"] = []
        for index, entry in enumerate(found):
            where = f"{INTERACTIONS}: {file.name}: interaction.{index}"
            made = _shaped(result, where, _interaction, entry)
            result.values["interactions"] += [made] if made else []
    _loops(result, tools_or_turns=any(key in result.given for key in (TOOLS, FUNCTIONS, INTERACTIONS, LOOPS)))


def _shaped(result: Conversion, where: str, made: Callable[..., Any], *given: Any) -> Any:
    """What ``made`` returns; None for an entry that does not have the shape that verl reads, which is then missing."""
    try:
        return made(result, where, *given)
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError) as error:
        result.incomplete[where] = f"it is not converted, because its form is not verl's ({error!r:.120})"
        return None


def _file(result: Conversion, key: str, here: str) -> Path | None:
    """The file, which is then converted; one that is not found is missing in the configuration."""
    path = result.get(key)
    if path is None:
        return None
    for found in find(str(path), result.roots):
        result.converted[key] = f"{here}: from {path}"
        return found
    looked = ", ".join(dict.fromkeys(str(root.resolve()) for root in result.roots[:3]))
    result.incomplete[key] = (
        f"{here}: {path} was not found in {looked}. Run from-verl in the checkout, or write {key}=FILE after the script"
    )
    return None


def _listed(result: Conversion, key: str, file: Path, name: str) -> list[dict[str, Any]]:
    tree = load_yaml(file)
    found = tree.get(name) if isinstance(tree, dict) else tree
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        result.incomplete[key] = f"{file}: expected a list of mappings under `{name}`; nothing of it is converted"
        return []
    return found


def _tool(result: Conversion, where: str, entry: Mapping[str, Any], file: Path) -> list[Any]:
    path, config = str(entry.get("class_name", "")), dict(entry.get("config") or {})
    config.pop("type", None)
    name = path.rpartition(".")[2]
    if not name:
        result.incomplete[where] = f"class_name is missing; found {', '.join(entry) or 'nothing'}"
        return []
    if name in _MCP:
        return _mcp(result, where, entry, config, file)
    schema = entry.get("tool_schema") or {}
    if path.startswith("verl.tools.") and name in (_SANDBOX, _SEARCH):
        return [_service(result, where, name, config, schema)]
    result.decisions[where] = (
        f"tools: port {path} into {_module(path)}.py as a Tool with a config_class; its execute returns "
        f"ToolResult(ToolResponse(text), reward, metrics). {PORT}"
    )
    return [{"name": _own(path), "config": config | ({"tool_schema": schema} if schema else {})}]


def _service(result: Conversion, where: str, name: str, config: dict[str, Any], schema: Mapping[str, Any]) -> Any:
    """SandboxFusion or Search-R1's retriever, which agentrl asks with tools of its own."""
    here, table = ("remote_python", keys.SANDBOX) if name == _SANDBOX else ("remote_search", keys.SEARCH)
    options = {table[key]: value for key, value in config.items() if key in table}
    if here == "remote_python" and "url" in options:
        options["url"] = str(options["url"]).removesuffix("/run_code")
    slot: dict[str, Any] = {"name": here, "config": options}
    # In agentrl the slot's limit ends a call, the queue included.
    seconds = float(options.get("timeout", 0))
    if here == "remote_python" and seconds >= keys.ANSWER_TIMEOUT:
        options["answer_timeout"] = seconds + 15
    slot["timeout"] = max(keys.SLOT_TIMEOUT, seconds + 30)
    for key in sorted(set(config) - set(table)):
        result.missing[f"{where}: config.{key}"] = "agentrl limits concurrent requests (max_concurrent), nothing else"
    theirs = (schema.get("function") or {}).get("name")
    function, argument = ("python", "code") if here == "remote_python" else ("search", "query")
    result.decisions[where] = (
        f"tools: {here}; the model sees {function}({argument}) instead of {theirs or 'its schema'}: "
        "change prompts and rewards that name the old one"
    )
    return slot


def _mcp(result: Conversion, where: str, entry: Mapping[str, Any], config: Mapping[str, Any], file: Path) -> list[Any]:
    options = entry.get("mcp") or {}
    path = str(options.get("mcp_servers_config_path", ""))
    found = find(path, [file.parent, *result.roots]) if path else []
    if not found:
        result.incomplete[where] = f"tools: the MCP servers' file {path or '(none is named)'} was not found"
        return []
    try:
        listed = json.loads(found[0].read_text(encoding="utf-8"))["mcpServers"]
        servers = {name: _server(result, where, name, server) for name, server in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        result.incomplete[where] = f"{found[0]}: expected {{'mcpServers': {{NAME: {{…}}}}}} ({error!r})"
        return []
    chosen = options.get("tool_selected_list") or []
    if chosen and len(servers) == 1:
        next(iter(servers.values()))["tools"] = list(chosen)
    elif chosen:
        result.decisions[f"{where}: tool_selected_list"] = (
            f"tools: write {list(chosen)} under `tools` of the servers that have them"
        )
    slot: dict[str, Any] = {"name": "mcp", "config": {"servers": servers}}
    if "timeout" in config:
        slot["timeout"] = float(config["timeout"])
    for key in sorted(set(config) - {"timeout"}):
        result.missing[f"{where}: config.{key}"] = "agentrl has no such limit"
    result.decisions[f"{where}: session"] = (
        "tools: mcp opens a session for each trajectory; `session: shared` is cheaper if the servers keep no state"
    )
    return [slot]


def _server(result: Conversion, where: str, name: str, server: Mapping[str, Any]) -> dict[str, Any]:
    if "url" in server:
        made: dict[str, Any] = {"url": server["url"]}
        headers = dict(server.get("headers") or {})
        if "auth_token" in server:
            # A token does not belong into a file that runs are made of.
            headers["Authorization"] = "Bearer ${oc.env:MCP_TOKEN}"
            result.decisions[f"{where}: {name}.auth_token"] = "export MCP_TOKEN with the server's token"  # noqa: S105
        return made | ({"headers": headers} if headers else {})
    made = {"command": [server["command"], *server.get("args", [])]}
    if env := server.get("env"):
        made["env"] = list(env)
        result.decisions[f"{where}: {name}.env"] = f"export {', '.join(env)}: the server gets them by name"
    return made


def _functions(result: Conversion, file: Path) -> list[Any]:
    """Functions with the decorator ``function_tool``."""
    try:
        # Bytes: the file may declare an encoding.
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        result.incomplete[FUNCTIONS] = f"{file}: no Python that can be read ({error!r:.120})"
        return []
    names = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any("function_tool" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    if not names:
        result.incomplete[FUNCTIONS] = f"{file}: no function has the decorator function_tool"
    else:
        result.decisions[f"{FUNCTIONS}: {file.name}"] = (
            f"tools: copy {file.name} next to the configuration, without the decorator function_tool"
        )
    return [f"./{file.name}:{name}" for name in names]


def _interaction(result: Conversion, where: str, entry: Mapping[str, Any]) -> Any:
    path, config = str(entry.get("class_name", "")), dict(entry.get("config") or {})
    result.decisions[where] = (
        f"interactions: port {path} into {_module(path)}.py as an Interaction; rows name it "
        f"{entry.get('name') or path!r} in extra_info.interaction_kwargs.name. {PORT}"
    )
    return {"name": _own(path), **({"config": config} if config else {})}


def _loops(result: Conversion, tools_or_turns: bool) -> None:
    multi_turn = tools_or_turns or result.get(f"{_TURNS}.enable", False)
    default = result.get(DEFAULT_LOOP, "tool_agent" if multi_turn else "single_turn_agent")
    loops: list[Any] = []
    own = {}
    if file := _file(result, LOOPS, "rollout.agent.loops"):
        own = {
            str(entry.get("name")): str(entry.get("_target_", "")) for entry in _listed(result, LOOPS, file, "loops")
        }
    for name in dict.fromkeys([default, *own]):
        if name in own:
            result.decisions[f"{LOOPS}: {name}"] = (
                f"rollout.agent.loops: port {own[name]} into {_module(own[name])}.py; rows choose it by its name in "
                f"agent_name. {PORT}"
            )
            loops.append(_own(own[name]))
        elif name in keys.LOOPS:
            loops.append(keys.LOOPS[name])
        else:
            result.incomplete[DEFAULT_LOOP] = f"rollout.agent.loops: the class of the loop {name!r} is not known here"
    if tools_or_turns and "tool_agent" not in loops and not own:
        loops.append("tool_agent")
    if loops and loops[0] == "single_turn" and tools_or_turns:
        # Rows with agent_name=tool_agent choose it in verl; without that column they had no tools.
        loops = [loop for loop in loops if loop != "single_turn"]
        result.done(DEFAULT_LOOP)
    result.values["rollout.agent.loops"] = [
        {"name": loop, "config": {}} if loop == "tool_agent" else loop for loop in loops or ["tool_agent"]
    ]
    result.done(f"{_TURNS}.enable", DEFAULT_LOOP)


def _module(path: str) -> str:
    return path.split(".")[-2] if "." in path else path


def _own(path: str) -> str:
    return f"./{_module(path)}.py:{path.rpartition('.')[2]}"
