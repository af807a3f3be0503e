"""A workshop. The planner knows which operations a part needs, the worker which button of the machine starts which."""

from itertools import product

from agentrl_core.api import Environment, Episode, InteractionTurn, RewardResult

OPERATIONS = ("cut", "drill", "bend")
BUTTONS = ("red", "green", "blue")
PARTS = [list(pair) for pair in product(OPERATIONS, repeat=2)]
"""The two operations that each part needs, in their order: each pair makes another part."""
MACHINES = range(3)


def buttons(machine, plan):
    """The buttons that start a plan's operations: each machine has others."""
    return [BUTTONS[(OPERATIONS.index(operation) + machine) % len(BUTTONS)] for operation in plan]


class Workshop(Environment):
    def tasks(self, split):
        every = product(range(len(PARTS)), MACHINES)
        return [{"part": part, "machine": machine} for part, machine in every] if split == "train" else []

    async def open(self, task, seed):
        return Order(task["part"], task["machine"])


class Order(Episode):
    agent = "planner"

    def __init__(self, part, machine):
        self.part, self.machine = PARTS[part], machine
        self.plan, self.pressed = None, None
        self.messages = [{"role": "user", "content": f"part {part}"}]

    async def reply(self, messages):
        said = messages[-1]["content"].split()
        if self.plan is not None:
            self.pressed = said
            return InteractionTurn(True, "")
        self.plan = said
        if len(said) != len(self.part) or not set(said) <= set(OPERATIONS):
            return InteractionTurn(True, "")
        return InteractionTurn(False, f"machine {self.machine} {' '.join(said)}", agent="worker")

    async def score(self, trajectory):
        planned = self.plan == self.part
        carried_out = self.pressed is not None and self.pressed == buttons(self.machine, self.plan)
        made = self.pressed == buttons(self.machine, self.part)
        parts = {"planned": float(planned), "carried_out": float(carried_out)}
        return RewardResult(float(made), components=parts)
