"""Kuhn poker: three cards, two players, one bet. Both players are the policy; each sees only its own card."""

from itertools import permutations

from agentrl_core.api import Environment, Episode, InteractionTurn

PLAYERS = ("first", "second")
DEALS = [list(cards) for cards in permutations("JQK", 2)]


def payoff(history, cards):
    """What the first player wins with these actions (p: pass, b: bet); None: the hand is not over."""
    if history not in ("pp", "bp", "pbp", "bb", "pbb"):
        return None
    stake = 2 if history.endswith("bb") else 1
    folded = {"bp": 1, "pbp": -1}
    return folded.get(history) or (stake if "JQK".index(cards[0]) > "JQK".index(cards[1]) else -stake)


class KuhnPoker(Environment):
    def tasks(self, split):
        return [{"cards": cards} for cards in DEALS] if split == "train" else []

    async def open(self, task, seed):
        return Hand(task["cards"])


class Hand(Episode):
    agent = PLAYERS[0]

    def __init__(self, cards):
        self.cards, self.history = cards, ""
        self.messages = [{"role": "user", "content": f"first {cards[0]}"}]

    async def reply(self, messages):
        said = messages[-1]["content"].strip()
        if said not in ("pass", "bet"):
            return InteractionTurn(True, "")
        self.history += said[0]
        text = f"second {self.cards[1]} {said}" if len(self.history) == 1 else said
        over = payoff(self.history, self.cards) is not None
        return InteractionTurn(over, text, agent=PLAYERS[len(self.history) % 2])

    async def score(self, trajectory):
        won = payoff(self.history, self.cards)
        if won is None:  # the last turn is no action: whose it was loses the largest stake
            won = 2 if len(self.history) % 2 else -2
        return float(won if trajectory.agent == PLAYERS[0] else -won)
