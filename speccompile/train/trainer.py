"""The training loop: epochs over a growing rollout cache, evaluation, checkpoints, resume.

A run is a pure function of its config, its seed and the shards it saw: the state holds the shard names of
the current epoch and the position in it, so a resumed run repeats the unbroken one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speccompile.errors import ConfigError
from speccompile.model.eagle import EagleHead
from speccompile.model.llama import Llama
from speccompile.train.batches import Batch, load_batch, plan_epoch, supervision
from speccompile.train.cache import CacheError, RolloutCache, SequenceRef
from speccompile.train.config import TrainConfig
from speccompile.train.evaluate import Acceptance, greedy_rows, measure_acceptance
from speccompile.train.export import export_head
from speccompile.train.initial import fit_fusion, head_config, initial_head
from speccompile.train.loss import step_results, total_loss
from speccompile.train.optimizer import make_optimizer, set_learning_rate
from speccompile.train.vocabulary import choose_draft_vocabulary

STATE_FILE = "train_state.pt"
_AGREEMENT_SAMPLE = 16
_MIN_AGREEMENT = 0.05
_FIT_SEQUENCES = 800

Log = Callable[[dict[str, Any]], None]


@dataclass
class Progress:
    """Where a run stands; saved with its state.

    ``eval_shards`` are the shards of the first epoch: their held-out sequences measure the whole run.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    shards: list[str] = field(default_factory=list)
    eval_shards: list[str] = field(default_factory=list)
    best: float = 0.0


class Trainer:
    """One run.  ``log`` receives one record per optimizer step and per evaluation."""

    def __init__(
        self,
        target: Llama,
        cache: RolloutCache,
        config: TrainConfig,
        output: Path,
        log: Log,
        *,
        special_ids: tuple[int, ...] = (),
        init: EagleHead | None = None,
    ) -> None:
        self.target_config, self.cache, self.config, self.output, self.log = (
            target.config, cache, config, output, log,
        )  # fmt: skip
        self.full_lm_head = target.lm_head
        self.eos_ids = torch.tensor(target.config.eos_token_ids, dtype=torch.int64)
        check_cache(cache, target, self._answers)
        torch.manual_seed(config.seed)
        always = (*target.config.eos_token_ids, *special_ids)
        self.token_ids = choose_draft_vocabulary(self._counts(), config.draft_vocab_size, always)
        self.head = self._new_head(target, init)
        self.optimizer = make_optimizer(self.head, config)
        self.progress = Progress()

    def _answers(self, ids: Tensor, answer: Tensor) -> Tensor:
        return supervision(ids, answer, self.eos_ids, False)

    def _supervise(self, ids: Tensor, answer: Tensor) -> Tensor:
        return supervision(ids, answer, self.eos_ids, self.config.supervise == "all")

    def _counts(self) -> Tensor:
        counts = torch.zeros(self.target_config.vocab_size, dtype=torch.int64)
        for ref in self._training_refs():
            ids, answer = self.cache.tokens(ref)
            counts += torch.bincount(ids[answer], minlength=len(counts))
        return counts

    def _new_head(self, target: Llama, init: EagleHead | None) -> EagleHead:
        config = head_config(target, self.config.layers, len(self.token_ids))
        if init is not None:
            fc = init.get_parameter("fc.weight").detach()
        else:
            refs = self._training_refs()
            sample = refs[:: max(1, len(refs) // _FIT_SEQUENCES)]
            pairs = ((self.cache.tokens(r)[0], self.cache.feature(r, "hidden")) for r in sample)
            fc = fit_fusion(target.embed_tokens.weight, pairs)
        head = initial_head(config, target, self.token_ids, fc)
        if init is not None:
            head.layers.load_state_dict(init.layers.state_dict())
        return head

    def _training_refs(self) -> list[SequenceRef]:
        return [r for r in self.cache.refs if not r.held_out]

    def _load(self, refs: list[SequenceRef], *, answers_only: bool = False) -> Batch:
        supervise = self._answers if answers_only else self._supervise
        return load_batch(self.cache, refs, self.config.max_length, "hidden", supervise)

    def train(self, checkpoint_seconds: float = 180.0) -> Acceptance | None:
        """Runs to ``config.steps``; returns the last held-out acceptance (None without held-out data)."""
        self.head.train()
        saved = time.monotonic()
        acceptance = None
        while self.progress.step < self.config.steps:
            for batch in self._epoch():
                self._step(batch)
                finished = self.progress.step >= self.config.steps
                if finished or time.monotonic() - saved > checkpoint_seconds:
                    acceptance = self.checkpoint()
                    saved = time.monotonic()
                if finished:
                    break
        return acceptance

    def _epoch(self) -> Iterator[list[SequenceRef]]:
        """Batches left in the current epoch; a new epoch starts by listing the shards again."""
        p, c = self.progress, self.config
        p.shards = self.cache.refresh(p.shards if p.batch else None)
        p.eval_shards = p.eval_shards or p.shards
        plan = plan_epoch(self._training_refs(), c.batch_tokens, c.max_length, c.seed * 100003 + p.epoch)
        for index in range(p.batch, len(plan)):
            p.batch = index + 1
            yield plan[index]
        p.epoch, p.batch = p.epoch + 1, 0

    def _step(self, refs: list[SequenceRef]) -> None:
        started = time.monotonic()
        c, p = self.config, self.progress
        set_learning_rate(self.optimizer, c, p.step)
        batch = self._load(refs)
        with torch.autocast("cpu", torch.bfloat16, enabled=c.dtype == "bf16"):
            results = step_results(self.head, batch, c.unroll)
            loss = total_loss(results, c.decay, c.feature_weight)
        if not torch.isfinite(loss):
            raise CacheError(
                f"{refs[0].shard}: loss is {loss.item()} at step {p.step}; damaged features there"
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        trained = [q for q in self.head.parameters() if q.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trained, c.clip)
        self.optimizer.step()
        p.step += 1
        self.log(
            {
                "kind": "step",
                "step": p.step,
                "epoch": p.epoch,
                "loss": loss.item(),
                "token_loss": [(r.token_loss / max(1, r.count)).item() for r in results],
                "feature_loss": [(r.feature_loss / max(1, r.count)).item() for r in results],
                "accuracy": [(r.correct / max(1, r.count)).item() for r in results],
                "grad_norm": norm.item(),
                "lr": self.optimizer.param_groups[0]["lr"],
                "tokens": int(batch.length.sum()),
                "seconds": time.monotonic() - started,
            }
        )

    def evaluate(self) -> Acceptance | None:
        """Acceptance on the held-out sequences that the target decoded greedily."""
        measured = set(self.progress.eval_shards)
        refs = [r for r in self.cache.refs if r.held_out and r.shard.name in measured]
        refs = refs[:: max(1, len(refs) // self.config.eval_sequences)]
        plan = plan_epoch(refs, self.config.batch_tokens, self.config.max_length, 0) if refs else []
        greedy = (greedy_rows(self._load(b, answers_only=True), self.full_lm_head) for b in plan)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.config.dtype == "bf16"):
            result = measure_acceptance(self.head, self.token_ids, (b for b in greedy if b is not None))
        return result if result.rounds else None

    def checkpoint(self) -> Acceptance | None:
        """Evaluates, saves the state, and exports the head if it is the best so far."""
        acceptance = self.evaluate()
        score = acceptance.chain_length if acceptance else float(self.progress.step)
        best = score >= self.progress.best
        if best:
            self.progress.best = score
            export_head(self.output, self.head, self.token_ids, self.target_config)
        self.save_state()
        if acceptance:
            self.log(
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
        self.output.mkdir(parents=True, exist_ok=True)
        trained = {n: q.detach() for n, q in self.head.named_parameters() if q.requires_grad}
        state = {
            "config": self.config.to_json(),
            "progress": vars(self.progress),
            "token_ids": self.token_ids,
            "head": trained,
            "optimizer": self.optimizer.state_dict(),
        }
        part = self.output / f"{STATE_FILE}.part"
        torch.save(state, part)
        part.replace(self.output / STATE_FILE)

    def resume(self) -> bool:
        """Continues from the state in ``output``; False when there is none."""
        path = self.output / STATE_FILE
        if not path.is_file():
            return False
        state = torch.load(path, weights_only=True)
        changed = [k for k, v in self.config.to_json().items() if state["config"].get(k) != v]
        if changed:
            was = ", ".join(f"{k} {state['config'].get(k)!r}" for k in changed)
            raise ConfigError(f"{path}: that run had {was}; use the same settings or another output folder")
        self.token_ids.copy_(state["token_ids"])
        self.head.lm_head.weight.data.copy_(self.full_lm_head.weight.detach()[self.token_ids])
        self.head.load_state_dict(state["head"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        return True


def check_cache(cache: RolloutCache, target: Llama, supervise: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Stops a run that cannot succeed: nothing supervised, or features of another target.

    The features must let the target's ``lm_head`` predict some of the answer tokens; those of another
    model, or of shifted positions, do not.
    """
    c = target.config
    if all(r.held_out for r in cache.refs):
        raise CacheError(f"{cache.folder}: all sequences are held out; make more, or lower held_out_percent")
    width = cache.hidden_size
    if width != c.hidden_size:
        raise CacheError(f"{cache.folder}: wrong target: features are {width} wide, its are {c.hidden_size}")
    empty = sum(not supervise(*cache.tokens(r))[2:].any() for r in cache.refs)
    if empty == len(cache.refs):
        raise CacheError(
            f"{cache.folder}: 0 supervised tokens in 100% of {empty} sequences; "
            f"the answer mask is empty, so the chat template does not match the data"
        )
    hits = total = 0
    for ref in cache.refs[:: max(1, len(cache.refs) // _AGREEMENT_SAMPLE)]:
        ids, answer = cache.tokens(ref)
        if int(ids.max()) >= c.vocab_size:
            raise CacheError(f"{ref.shard}: wrong target: id {int(ids.max())} is outside its vocabulary")
        rows = answer[1:]
        hidden = cache.feature(ref, "hidden")[rows].to(target.lm_head.weight.dtype)
        hits += int((target.lm_head(hidden).argmax(-1) == ids[1:][rows]).sum())
        total += int(rows.sum())
    if total and hits < _MIN_AGREEMENT * total:
        raise CacheError(
            f"{cache.folder}: wrong target: its lm_head predicts {hits} of {total} answer tokens from them"
        )
