"""The training backend of the template, on several ranks and with values, and what is broken in it on purpose.

A module of its own: processes of ranks import it.
"""

import math
from contextlib import suppress
from dataclasses import replace

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from toy_training.backend import ToyTrainingBackend
from transformers import AutoModel

from agentrl_core.api import Outputs


class Right(ToyTrainingBackend):
    """All ranks have the whole model, and add up their gradients."""

    def load(self):
        super().load()
        if self.context.head == "values":
            self._model = nn.ModuleDict({"backbone": AutoModel.from_pretrained(self.context.path).eval()})
            self._model["head"] = nn.Linear(self._model["backbone"].config.hidden_size, 1)
            nn.init.zeros_(self._model["head"].weight)
            nn.init.zeros_(self._model["head"].bias)
            self._optimizer = torch.optim.AdamW(self._model.parameters(), weight_decay=0.1)

    def _outputs(self, micro, wanted):
        if self.context.head == "tokens":
            return super()._outputs(micro, wanted)
        states = self._model["backbone"](**micro.model_inputs, use_cache=False).last_hidden_state
        return Outputs(values=self._model["head"](states)[:, -micro["responses"].shape[1] - 1 : -1, 0])

    def _add_up(self):
        for parameter in self._model.parameters() if self.context.world_size > 1 else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)

    def optimizer_step(self, lr, max_norm):
        self._add_up()
        return super().optimizer_step(lr, max_norm)

    def snapshot(self):
        write = super().snapshot()
        return lambda path: write(path) if self.context.rank == 0 else []


class Colder(Right):
    def _outputs(self, micro, wanted):
        return super()._outputs(micro, replace(wanted, temperature=1.0))


class OneTokenOn(Right):
    def _outputs(self, micro, wanted):
        found = super()._outputs(micro, wanted)
        return Outputs(found.log_probs.roll(1, -1), found.entropies)


class NoEntropies(Right):
    def _outputs(self, micro, wanted):
        return Outputs(super()._outputs(micro, wanted).log_probs)


class HasAnOpinion(Right):
    def load(self):
        super().load()
        if self.context.head == "values":
            nn.init.ones_(self._model["head"].bias)


class Means(Right):
    def forward_backward(self, micros, wanted, loss):
        super().forward_backward(micros, wanted, lambda number, outputs: loss(number, outputs) / len(micros))


class ClipsEach(Right):
    def optimizer_step(self, lr, max_norm):
        parameters = [each for each in self._model.parameters() if each.grad is not None]
        norms = [float(torch.nn.utils.clip_grad_norm_([each], max_norm / 10)) for each in parameters]
        super().optimizer_step(lr, max_norm)
        return math.hypot(*norms)


class StepsAnyway(Right):
    def optimizer_step(self, lr, max_norm):
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm))
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self.zero_grad()
        return norm


class KeepsGradients(Right):
    def zero_grad(self):
        pass


class CallsTwice(Right):
    def forward_backward(self, micros, wanted, loss):
        super().forward_backward(micros, wanted, loss)
        super().forward_backward(micros, wanted, lambda number, outputs: 0 * loss(number, outputs))


class Swallows(Right):
    def forward_backward(self, micros, wanted, loss):
        with suppress(ArithmeticError):
            super().forward_backward(micros, wanted, loss)


class HandsOutTheFirst(Right):
    def load(self):
        super().load()
        self._first = [dict(each) for each in super().weights(1 << 30)]
        self._first = [{name: each.clone() for name, each in bucket.items()} for bucket in self._first]

    def weights(self, bucket_bytes, on_host=True, everywhere=False):
        yield from self._first


class Uncast(Right):
    def weights(self, bucket_bytes, on_host=True, everywhere=False):
        for bucket in super().weights(bucket_bytes):
            yield {name: tensor.float() for name, tensor in bucket.items()}


class CopiesLate(Right):
    def snapshot(self):
        return lambda path: super(CopiesLate, self).snapshot()(path)


class ForgetsMoments(Right):
    def restore(self, path):
        super().restore(path)
        self._optimizer.state.clear()


class ForgetsSteps(Right):
    def restore(self, path):
        super().restore(path)
        self.steps = 0


class Averages(Right):
    def _add_up(self):
        super()._add_up()
        for parameter in self._model.parameters():
            parameter.grad /= self.context.world_size


class ClipsAlone(Right):
    def optimizer_step(self, lr, max_norm):
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm))
        super().optimizer_step(lr, math.inf)
        return norm


class SplitsSnapshots(Right):
    """A rank restores what the rank of its number wrote; others have nothing."""

    def snapshot(self):
        write = ToyTrainingBackend.snapshot(self)
        return lambda path: write(f"{path}/{self.context.rank}-of-{self.context.world_size}")

    def restore(self, path):
        super().restore(f"{path}/{self.context.rank}-of-{self.context.world_size}")


class TakesWhatFits(Right):
    """Weights of the same name and shape, whatever else there is."""

    def restore(self, path):
        state = load_file(f"{path}/training/state.safetensors")
        self._model.load_state_dict(state, strict=False)


class RaisesItsOwn(Right):
    def restore(self, path):
        load_file(f"{path}/training/state.safetensors")
        super().restore(path)
