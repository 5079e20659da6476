"""The training loop: optimizer steps, evaluation, checkpoints, resume.

A run is a pure function of its config, its seed and the shards it saw: the state holds the shard names of
the current epoch and the position in it, so a resumed run repeats the unbroken one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speccompile.model.llama import Llama
from speccompile.train.batches import Batch, plan_epoch, supervision
from speccompile.train.cache import CacheError, RolloutCache, SequenceRef
from speccompile.train.checkpoint import STATE_FILE, Progress, RunState, trainable
from speccompile.train.config import TrainConfig
from speccompile.train.distributed import Ranks
from speccompile.train.evaluate import Acceptance, greedy_rows, measure_acceptance
from speccompile.train.export import DEFAULT_FORMAT, check_format, export_head
from speccompile.train.feature_cache import FeatureCache
from speccompile.train.features import FeatureSource
from speccompile.train.initial import WarmStart, head_aux_layers
from speccompile.train.loss import parse_loss
from speccompile.train.optimizer import make_optimizer, set_learning_rate
from speccompile.train.preflight import check_data
from speccompile.train.run_log import RunLog
from speccompile.train.schedule import MicroBatch, epoch_steps, supervised_columns, training_refs
from speccompile.train.start import start_head
from speccompile.train.step import StepResult, step_results, total_loss
from speccompile.train.vocabulary import choose_draft_vocabulary

__all__ = ["STATE_FILE", "Trainer"]

Log = Callable[[dict[str, Any]], None]


class Trainer:
    """One run, on the device of ``target``.  ``log`` receives one record per optimizer step and per
    evaluation; they also go to ``log.jsonl`` in ``output``."""

    def __init__(
        self,
        target: Llama,
        cache: RolloutCache,
        config: TrainConfig,
        output: Path,
        log: Log,
        *,
        special_ids: tuple[int, ...] = (),
        init: WarmStart | None = None,
        format_name: str = DEFAULT_FORMAT,
        feature_cache: FeatureCache | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.target, self.cache, self.config, self.output, self.log = target, cache, config, output, log
        self.ranks, self.format_name, self.progress = ranks or Ranks(), format_name, Progress()
        self.ranks.check_accumulate(config.accumulate)
        self.device = target.embed_tokens.weight.device
        self.run_log = RunLog(output)
        self.eos_ids = torch.tensor(target.config.eos_token_ids, dtype=torch.int64)
        self.source = FeatureSource(target, cache, head_aux_layers(config, target, init), feature_cache)
        check_data(self.source, target, self._answers, config.max_length)
        torch.manual_seed(config.seed)
        always = (*target.config.eos_token_ids, *special_ids)
        self.token_ids = choose_draft_vocabulary(self._counts(), config.draft_vocab_size, always).to(
            self.device
        )
        self.ranks.copy_from_first([self.token_ids])
        self.head = start_head(config, self.source, self.token_ids, init)
        check_format(format_name, self.head.config)
        self.ranks.copy_from_first(self.head.parameters())
        self.teacher_weight_Uh = target.lm_head.weight.detach()[self.token_ids]
        self.loss = parse_loss(config.loss, config.loss_top_k)
        self.optimizer = make_optimizer(self.head, config)
        self._rate = _Rate()

    def _answers(self, ids: Tensor, answer: Tensor) -> Tensor:
        return supervision(ids, answer, self.eos_ids, False)

    def _supervise(self, ids: Tensor, answer: Tensor) -> Tensor:
        return supervision(ids, answer, self.eos_ids, self.config.supervise == "all")

    def _counts(self) -> Tensor:
        counts = torch.zeros(self.target.config.vocab_size, dtype=torch.int64)
        for ref in training_refs(self.cache):
            ids, answer = self.cache.tokens(ref)
            counts += torch.bincount(ids[answer], minlength=len(counts))
        return counts

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.dtype == "bf16")

    def load(self, refs: list[SequenceRef], *, answers_only: bool = False) -> Batch:
        """The sequences as one batch with this run's labels."""
        supervise = self._answers if answers_only else self._supervise
        return self.source.batch(refs, self.config.max_length, supervise)

    def train(self, checkpoint_seconds: float = 180.0) -> Acceptance | None:
        """Runs to ``config.steps``; returns the last held-out acceptance (None without held-out data)."""
        self.head.train()
        saved = time.monotonic()
        acceptance = None
        while self.progress.step < self.config.steps:
            for micro_batches in epoch_steps(self.cache, self.config, self.progress, self.ranks.agree):
                self.step(micro_batches)
                finished = self.progress.step >= self.config.steps
                if self.ranks.leads and (finished or time.monotonic() - saved > checkpoint_seconds):
                    acceptance = self.checkpoint()
                    saved = time.monotonic()
                if finished:
                    break
        self.ranks.wait()
        return acceptance

    def step(self, micro_batches: list[MicroBatch]) -> None:
        """One optimizer step; its loss is normalised by the labels of all micro-batches of all processes."""
        started = time.monotonic()
        c, p = self.config, self.progress
        set_learning_rate(self.optimizer, c, p.step)
        self.optimizer.zero_grad(set_to_none=True)
        counts = supervised_columns(self.cache, micro_batches, c, self._supervise)
        sums = torch.zeros(2 + 3 * c.unroll, device=self.device)
        for refs in self.ranks.share(micro_batches):
            sums += self._backward(refs, counts)
        sums = self.ranks.add(sums)
        trained = [q for q in self.head.parameters() if q.requires_grad]
        self.ranks.add_gradients(trained)
        norm = torch.nn.utils.clip_grad_norm_(trained, c.clip)
        self.optimizer.step()
        p.step += 1
        self._log_step(sums, counts, float(norm), time.monotonic() - started)

    def _backward(self, refs: MicroBatch, counts: list[int]) -> Tensor:
        """Adds the gradients of one micro-batch; its part of the loss, positions, and sums by draft step."""
        c = self.config
        batch = self.load(refs)
        with self._autocast():
            results = step_results(self.head, batch, c.unroll, self.loss, self.teacher_weight_Uh)
            loss = total_loss(results, counts, c.decay, c.feature_weight)
        if not torch.isfinite(loss):
            raise CacheError(
                f"{refs[0].shard}: loss is {loss.item()} at step {self.progress.step}; damaged features there"
            )
        loss.backward()
        return torch.stack([loss.detach(), batch.length.sum().float(), *_sums(results)])

    def _log_step(self, sums: Tensor, counts: list[int], norm: float, seconds: float) -> None:
        loss, tokens, *rest = sums.tolist()
        means = [x / max(1, n) for x, n in zip(rest, counts * 3, strict=True)]
        steps, p = self.config.unroll, self.progress
        rate = self._rate.after(tokens, seconds)
        self._record(
            {
                "kind": "step",
                "step": p.step,
                "epoch": p.epoch,
                "loss": loss,
                "token_loss": means[:steps],
                "feature_loss": means[steps : 2 * steps],
                "accuracy": means[2 * steps :],
                "grad_norm": norm,
                "lr": self.optimizer.param_groups[0]["lr"],
                "tokens": int(tokens),
                "seconds": seconds,
                "tokens_per_second": rate,
                "eta": (self.config.steps - p.step) * self._rate.seconds,
            }
        )

    def _record(self, record: dict[str, Any]) -> None:
        if self.ranks.leads:
            self.run_log(record)
            self.log(record)

    def evaluate(self) -> Acceptance | None:
        """Acceptance on the held-out sequences that the target decoded greedily."""
        measured = set(self.progress.eval_shards)
        refs = [r for r in self.cache.refs if r.held_out and r.shard.name in measured]
        refs = refs[:: max(1, len(refs) // self.config.eval_sequences)]
        plan = plan_epoch(refs, self.config.batch_tokens, self.config.max_length, 0) if refs else []
        greedy = (greedy_rows(self.load(b, answers_only=True), self.target.lm_head) for b in plan)
        with torch.no_grad(), self._autocast():
            result = measure_acceptance(self.head, self.token_ids, (b for b in greedy if b is not None))
        return result if result.rounds else None

    def checkpoint(self) -> Acceptance | None:
        """Evaluates, saves the state, and exports the head if it is the best so far."""
        acceptance = self.evaluate()
        score = acceptance.chain_length if acceptance else float(self.progress.step)
        best = score >= self.progress.best
        if best:
            self.progress.best = score
            export_head(self.output, self.head, self.token_ids, self.target.config, self.format_name)
        self.save_state()
        if acceptance:
            self._record(
                {
                    "kind": "eval",
                    "step": self.progress.step,
                    "chain": acceptance.chain,
                    "chain_length": acceptance.chain_length,
                    "tree": acceptance.tree,
                    "tree_length": acceptance.tree_length,
                    "rounds": acceptance.rounds,
                    "best": best,
                }
            )
        return acceptance

    def save_state(self) -> None:
        """Writes everything a resumed run needs, atomically."""
        RunState(
            config=self.config.to_json(),
            progress=self.progress,
            token_ids=self.token_ids,
            head=trainable(self.head),
            optimizer=self.optimizer.state_dict(),
            target=self.source.digest,
            shard_rows=self.cache.shard_rows(),
        ).save(self.output)

    def resume(self) -> bool:
        """Continues from the state in ``output``; False when there is none."""
        state = RunState.load(self.output, self.config)
        if state is None:
            return False
        state.check_same(self.source.digest, self.cache.shard_rows(), self.head)
        self.token_ids.copy_(state.token_ids)
        self.teacher_weight_Uh = self.target.lm_head.weight.detach()[self.token_ids]
        if not self.config.owns_lm_head:
            self.head.lm_head.weight.data.copy_(self.teacher_weight_Uh)
        self.head.load_state_dict(state.head, strict=False)
        self.optimizer.load_state_dict(state.optimizer)
        self.progress = state.progress
        if self.ranks.leads:
            self.run_log.cut(self.progress.step)
        return True


class _Rate:
    """Smoothed seconds per step and tokens per second of this process's part of a run."""

    def __init__(self) -> None:
        self.seconds, self._tokens = 0.0, 0.0

    def after(self, tokens: float, seconds: float) -> float:
        """Takes one step in; tokens per second."""
        keep = 0.95 if self.seconds else 0.0
        self.seconds = keep * self.seconds + (1 - keep) * seconds
        self._tokens = keep * self._tokens + (1 - keep) * tokens
        return self._tokens / max(self.seconds, 1e-9)


def _sums(results: list[StepResult]) -> list[Tensor]:
    """Token losses, feature losses and correct guesses by draft step."""
    return [
        *(r.token_loss.detach() for r in results),
        *(r.feature_loss.detach() for r in results),
        *(r.correct.float() for r in results),
    ]
