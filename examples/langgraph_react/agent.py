"""A ReAct agent in LangGraph: the model and its tools alternate, until an answer calls no tool."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, ToolRuntime, tools_condition
from langgraph.runtime import Runtime


@dataclass
class Shop:
    """What differs between trajectories: the model behind the endpoint, and the prices."""

    chat: Runnable[Any, Any]
    prices: dict[str, int]


@tool
async def price(item: str, runtime: ToolRuntime[Shop]) -> int:
    """Looks up the price of one piece of an item."""
    return runtime.context.prices[item]


@tool
async def calculator(a: int, operator: Literal["+", "-", "*"], b: int) -> int:
    """Calculates a + b, a - b or a * b."""
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


TOOLS = [price, calculator]


async def ask(state: MessagesState, runtime: Runtime[Shop]) -> dict[str, Any]:
    return {"messages": [await runtime.context.chat.ainvoke(state["messages"])]}


graph = StateGraph(MessagesState, context_schema=Shop)
graph.add_node("model", ask)
# A call that fails is answered with the error: the model's mistake must not end the agent.
graph.add_node("tools", ToolNode(TOOLS, handle_tool_errors=True))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
REACT = graph.compile()


async def solve(base_url, api_key, model, messages, row, instructions=""):
    """The agent of the loop `openai_agent`. Too many turns are the model's mistake too, so they are scored as well."""
    chat = ChatOpenAI(base_url=base_url, api_key=api_key, model=model).bind_tools(TOOLS)
    shop = Shop(chat, row["extra_info"]["prices"])
    system = [{"role": "system", "content": instructions}] if instructions else []
    with suppress(GraphRecursionError):
        await REACT.ainvoke({"messages": [*system, *messages]}, {"recursion_limit": 10}, context=shop)
