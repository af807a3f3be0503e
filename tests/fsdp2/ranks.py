"""Processes that train a model together through the backend's seam, and what plain torch does in one process."""

import functools
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from agentrl_core.api.training_backend import EXPERTS, MicroBatch, Outputs, TrainingContext, Wanted
from agentrl_core.config.schema import ActorConfig, ModelConfig, OptimizerConfig
from agentrl_core.fsdp2.log_probs import MOST_LOGITS
from agentrl_core.workers.micro_batching import empty_micro_batch, expert_column
from agentrl_testing.ranks import on_ranks

STEPS, LR, CLIP = 3, 1e-3, 0.5
EPS = 1e-6
"""Of AdamW: with its default, gradients near 0 decide about steps by their rounding."""
TEMPERATURE, ENTROPY = 1.25, 0.02
BETAS = OptimizerConfig(lr=LR).betas
Row = tuple[list[int], list[int], list[int]]
"""prompt ids, response ids, response mask."""
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Case:
    """What ranks are asked to train.

    Args:
        path: of the model.
        options: of the backend.
        rows: [steps][rows].
        model: options of ``model``.
        head: of the model.
        resume: directory of a checkpoint that they start from.
        save: directory for a checkpoint at the end.
        first_step: of those to do.
        steps: how many.
        moves: the weights move, as between phases.
        on_host: moments wait on the host.
        most_logits: that a rank computes at a time; 0: the usual number.
        replays: tokens are sent to the experts of :func:`experts_of`.
    """

    path: str
    rows: Sequence[Row]
    options: Mapping[str, int] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    head: str = "tokens"
    resume: str = ""
    save: str = ""
    first_step: int = 0
    steps: int = STEPS
    moves: bool = False
    on_host: bool = False
    most_logits: int = 0
    replays: bool = False


@dataclass
class Trained:
    """What came of it.

    Args:
        found: log-probs or values, and entropies, by row, before the first step.
        gradients: of the first step, by the model's own names.
        norms: of each step.
        weights: at the end, as they are handed out, and from a file.
        file: those of a file.
        widths: logits of a token on a rank.
        logits: most tokens whose logits a rank computes at once.
        tokens: that the first layer of a rank computes at most.
        held: share of the model's elements that a rank has.
        steps: so far.
    """

    found: dict[int, Arrays]
    gradients: Arrays
    norms: list[float]
    weights: Arrays
    file: Arrays = field(default_factory=dict)
    widths: set[int] = field(default_factory=set)
    logits: int = 0
    tokens: int = 0
    held: float = 1.0
    steps: int = 0


def micro_batch(rows: Sequence[Row], numbers: Sequence[int]) -> MicroBatch:
    p = max(len(row[0]) for row in rows)
    r = max(len(row[1]) for row in rows)
    ids, attention = torch.zeros(len(rows), p + r, dtype=torch.long), torch.zeros(len(rows), p + r, dtype=torch.long)
    mask = torch.zeros(len(rows), r, dtype=torch.bool)
    for number, (prompt, response, sampled) in enumerate(rows):
        ids[number, p - len(prompt) : p + len(response)] = torch.tensor(prompt + response)
        attention[number, p - len(prompt) : p + len(response)] = 1
        mask[number, : len(response)] = torch.tensor(sampled, dtype=torch.bool)
    columns = {
        "input_ids": ids, "attention_mask": attention, "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "responses": ids[:, p:].clone(), "response_mask": mask,
    }  # fmt: skip
    return MicroBatch(torch.tensor(numbers), columns)


def experts_of(row: int, tokens: int) -> np.ndarray[Any, Any]:
    """[tokens, layers, 2] of 4: two of each token of a row."""
    rng = np.random.default_rng(row)
    return np.array([[rng.permutation(4)[:2] for _ in range(2)] for _ in range(tokens)], np.uint8)


def replayed(micro: MicroBatch) -> MicroBatch:
    """With them; the last token of a row has none."""
    lengths = micro["attention_mask"].sum(-1).tolist()
    rows = [experts_of(row, length - 1) for row, length in zip(micro.rows.tolist(), lengths, strict=False)]
    rows = rows or [np.zeros((0, 2, 2), np.uint8)]
    return replace(micro, columns=micro.columns | {EXPERTS: expert_column(rows, micro["attention_mask"], "test")})


def weights_of(row: int, step: int, length: int) -> torch.Tensor:
    """What the log-probs of a row's tokens are multiplied with in the loss of a step."""
    return torch.randn(length, generator=torch.Generator().manual_seed(100 * step + row)) / 8


def model_config(path: str, **options: Any) -> ModelConfig:
    return ModelConfig(path=path, **options)


def backend_of(case: Case, rank: int, size: int) -> Any:
    from agentrl_core.fsdp2.backend import Fsdp2
    from agentrl_core.fsdp2.config import Fsdp2Config

    settings = ActorConfig(
        optimizer=OptimizerConfig(lr=LR, weight_decay=0.01),
        micro_batch_tokens=64,
        offload_optimizer=case.on_host,
        router_replay=case.replays,
    )
    context = TrainingContext(
        "actor", case.head, True, case.path, "model.path", model_config(case.path, **case.model),  # type: ignore[arg-type]
        settings, rank=rank, world_size=size, longest=32,
    )  # fmt: skip
    return Fsdp2(Fsdp2Config(**case.options), context)


def micros_of(rows: Sequence[Row], part: int, count: int) -> list[MicroBatch]:
    """Two of them for each part of the rows."""
    own = list(range(len(rows)))[part::count]
    half = -(-len(own) // 2)
    micros = [micro_batch([rows[each] for each in some], some) for some in (own[:half], own[half:])]
    # As the core makes one where another rank has more of them.
    return [*micros, empty_micro_batch(micros[0].columns)]


def train(case: Case, rank: int, size: int) -> Trained:
    from agentrl_core.fsdp2 import backend as module
    from agentrl_core.fsdp2 import log_probs

    backend = backend_of(case, rank, size)
    # Nothing waits on the host where models are there, too.
    module.HOST = torch.device("meta" if case.on_host else "cpu")
    log_probs.MOST_LOGITS = case.most_logits or MOST_LOGITS
    backend.load()
    if case.resume:
        backend.restore(case.resume)
    for group in backend._optimizer._adamw.param_groups:
        group["eps"] = EPS
    share = backend.share
    micros = micros_of(case.rows, share.index, share.count)
    if case.replays:
        micros = [replayed(micro) for micro in micros]
    if case.moves:
        # What offload does to a model, with a copy in place of another device.
        backend.module._apply(torch.clone)
    logits, tokens = set[tuple[int, ...]](), [0]
    if case.head == "tokens":
        backend.module.lm_head.register_forward_hook(lambda _, inputs, out: logits.add(tuple(out.shape)))
    result = Trained({}, {}, [], {})
    parameters = list(backend.module.parameters())
    result.held = sum(each.to_local().numel() for each in parameters) / sum(each.numel() for each in parameters)
    with backend.on_device():
        with torch.no_grad():
            for micro, outputs in zip(micros, backend.forward(micros, wanted()), strict=True):
                if share.counts:
                    result.found |= rows_of(micro, outputs)

        capture(backend, result)
        decoder = backend._language_model
        decoder = decoder if case.head == "values" else decoder.get_decoder()
        decoder.layers[0].register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0].shape[1]))
        for step in range(case.first_step, case.first_step + case.steps):
            with backend.updating(step):

                def loss(number: int, outputs: Outputs, step: int = step) -> torch.Tensor:
                    return loss_of(micros[number], outputs, step)

                backend.forward_backward(micros, wanted(), loss)
                result.norms.append(backend.optimizer_step(LR, CLIP))
                backend.steps += 1
        if case.moves:
            backend.module._apply(torch.clone)
        for bucket in backend.weights(2000):
            result.weights |= {name: each.numpy().copy() for name, each in bucket.items()}
        path = backend.weight_file()
        if rank == 0:
            result.file = {name: each.numpy() for file in path for name, each in load_file(file).items()}
    if case.save:
        backend.snapshot()(case.save)
    result.widths, result.logits = {each[-1] for each in logits}, max((each[1] for each in logits), default=0)
    result.tokens, result.steps = max(tokens), backend.steps
    backend.close()
    return result


def wanted() -> Wanted:
    return Wanted(TEMPERATURE, "gradient")


def rows_of(micro: MicroBatch, outputs: Outputs) -> dict[int, Arrays]:
    columns = {"log_probs": outputs.log_probs, "entropies": outputs.entropies, "values": outputs.values}
    found: dict[int, Arrays] = {}
    for place, row in enumerate(micro.rows.tolist()):
        mask = micro["response_mask"][place]
        found[row] = {name: each[place, mask].numpy() for name, each in columns.items() if each is not None}
    return found


def loss_of(micro: MicroBatch, outputs: Outputs, step: int) -> torch.Tensor:
    said = outputs.log_probs if outputs.values is None else outputs.values
    assert said is not None
    total = 0.0 * said.sum()
    for place, row in enumerate(micro.rows.tolist()):
        mask = micro["response_mask"][place]
        weights = weights_of(row, step, len(mask))[mask]
        if outputs.values is not None:
            total = total + ((outputs.values[place, mask] - weights) ** 2).sum()
            continue
        assert outputs.log_probs is not None and outputs.entropies is not None
        total = total - (weights * outputs.log_probs[place, mask]).sum()
        total = total - ENTROPY * outputs.entropies[place, mask].sum()
    return total


def capture(backend: Any, result: Trained) -> None:
    """Keep the gradients of the first step, gathered."""
    step = backend._optimizer.step

    def first(lr: float, max_norm: float) -> float:
        if not result.gradients:
            for name, parameter in backend.module.named_parameters():
                gradient = parameter.grad
                whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                result.gradients[name] = whole.clone().numpy()
        norm: float = step(lr, max_norm)
        return norm

    backend._optimizer.step = first


def reference(case: Case) -> Trained:
    """The same in plain transformers and torch: each row alone, without padding."""
    if case.head == "values":
        return reference_of_values(case)
    model = AutoModelForCausalLM.from_pretrained(case.path, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, eps=EPS, betas=BETAS)
    result = Trained({}, {}, [], {})
    chosen: list[torch.Tensor] = []
    for layer, block in enumerate(model.model.layers if case.replays else []):
        block.mlp.gate.forward = functools.partial(_gate, layer, block.mlp.gate, chosen)
    for step in range(case.steps):
        for row, (prompt, response, sampled) in enumerate(case.rows):
            mask = torch.tensor(sampled, dtype=torch.bool)
            # The last token predicts nothing.
            own = experts_of(row, len(prompt + response) - 1).astype(np.int64)
            chosen[:] = [torch.from_numpy(np.concatenate([own, own[-1:]]))]
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float() / TEMPERATURE
            every = logits.log_softmax(-1)
            log_probs = every.gather(-1, torch.tensor(response).unsqueeze(-1)).squeeze(-1)
            entropies = -(every.exp() * every).sum(-1)
            if step == 0:
                result.found[row] = {
                    "log_probs": log_probs[mask].detach().numpy(), "entropies": entropies[mask].detach().numpy()
                }  # fmt: skip
            loss = -(weights_of(row, step, len(response)) * log_probs)[mask].sum() - ENTROPY * entropies[mask].sum()
            loss.backward()
        if step == 0:
            result.gradients = {name: each.grad.clone().numpy() for name, each in model.named_parameters()}
        result.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        # In the form that files have.
        model.save_pretrained(folder)
        result.weights = {name: each.numpy() for name, each in load_file(f"{folder}/model.safetensors").items()}
    return result


def _gate(layer: int, gate: Any, chosen: list[torch.Tensor], hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A router of Qwen3-MoE with given experts."""
    logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
    weights = logits.softmax(-1).gather(-1, chosen[0][:, layer])
    return logits, weights / weights.sum(-1, keepdim=True), chosen[0][:, layer]


def reference_of_values(case: Case) -> Trained:
    model = AutoModel.from_pretrained(case.path, dtype=torch.float32).eval()
    head = torch.nn.Linear(model.config.hidden_size, 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.01, eps=EPS, betas=BETAS)
    result = Trained({}, {}, [], {})
    for step in range(case.steps):
        for row, (prompt, response, sampled) in enumerate(case.rows):
            mask = torch.tensor(sampled, dtype=torch.bool)
            states = model(torch.tensor([prompt + response])).last_hidden_state[0, len(prompt) - 1 : -1]
            values = head(states).squeeze(-1)
            if step == 0:
                result.found[row] = {"values": values[mask].detach().numpy()}
            ((values - weights_of(row, step, len(response)))[mask] ** 2).sum().backward()
        if step == 0:
            named = [*((f"backbone.{name}", each) for name, each in model.named_parameters()),
                     *((f"value_head.{name}", each) for name, each in head.named_parameters())]  # fmt: skip
            result.gradients = {name: each.grad.clone().numpy() for name, each in named}
        result.norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    result.weights = {name: each.detach().numpy() for name, each in named}
    return result


def train_on(ranks: int, case: Case) -> Trained:
    """What the ranks that count found, the rest from rank 0."""
    first, *others = on_ranks(ranks, _train, case)
    for answer in others:
        first.found |= answer.found
        first.widths |= answer.widths
        first.logits = max(first.logits, answer.logits)
        first.held = max(first.held, answer.held)
        first.tokens = max(first.tokens, answer.tokens)
        assert answer.norms == first.norms
    return first


def _train(rank: int, ranks: int, case: Case) -> Trained:
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    return train(case, rank, ranks)
