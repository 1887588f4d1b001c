"""Score the model of a run in tasks of EleutherAI's lm-evaluation-harness (package lm_eval)."""

from __future__ import annotations

import argparse
import logging
import math
import sys
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table
from torch import Tensor

from foundation.errors import InputError, as_input_error
from foundation.overrides import overridden
from pretrain.metrics.console import Console
from pretrain.metrics.run_folder import METRICS_FILE, RunFolder, version_of
from pretrain.metrics.trackers import JsonlTracker
from pretrain.model.distributed import refused_together
from pretrain.model.packed import PackedLanguageModel
from pretrain.run.assembly import Assembly
from pretrain.run.job import Job

# Maximum number of tokens whose logits exist at once, unless a single document has more.
TOKENS_AT_ONCE = 4096


class TaskScores:
    """The tasks of the command line, for scores in one precision after another."""

    def __init__(
        self,
        options: argparse.Namespace,
        job: Job,
        accelerator: Accelerator,
        step: int | None,
        stack: ExitStack,
    ) -> None:
        """Load the tasks and their datasets. All ranks must call this method.

        Args:
            options: The command line of `evaluate`.
            job: The job of the run.
            accelerator: The run's Accelerator.
            step: Step at which scores are logged to metrics.jsonl, or None to log no scores.
            stack: If scores are logged, it keeps the run folder locked until its end.

        Raises InputError if a task does not exist, cannot be loaded, or needs generated text.
        """
        self.options = options
        self.step = step
        self.metrics = JsonlTracker(job.run_dir / METRICS_FILE, sys.maxsize)
        if job.tokenizer is None:
            raise InputError("--tasks needs a tokenizer, but there is none; set `data.tokenizer`")
        # Datasets and the Python functions of tasks may raise any exception.
        with as_input_error(
            (Exception,), "--tasks: cannot be loaded", "`lm_eval ls tasks` lists all tasks"
        ):
            self.manager = TaskManager(include_path=options.include_path)
            tasks = self.manager.load(options.tasks)["tasks"]
        for name, task in tasks.items():
            if task.OUTPUT_TYPE == "generate_until":
                raise InputError(
                    f"--tasks: {name} needs generated text, but here tasks are scored by the "
                    "probabilities of given texts; for this task, run `lm_eval --model hf "
                    f"--model_args pretrained=RUN/final --tasks {name}`"
                )
        if step is not None:
            is_main = accelerator.is_main_process
            stack.enter_context(refused_together(lambda: RunFolder(job.run_dir, owner=is_main)))
            if is_main:
                self.metrics.start()

    def __call__(
        self,
        job: Job,
        assembly: Assembly,
        accelerator: Accelerator,
        console: Console,
        precision: str,
    ) -> None:
        """Score the model in its current precision. Print the scores and log them.

        The ranks share the documents. All ranks must call this method.
        """
        options = self.options
        assembly.model.eval()
        results: Any = simple_evaluate(
            PackedHFLM(job, assembly.model, accelerator),
            tasks=options.tasks,
            task_manager=self.manager,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            log_samples=False,
        )
        assembly.model.train()
        if not accelerator.is_main_process:
            return
        # A group of tasks has scores of its own. Omit the scores of its members.
        members = {name for names in results["group_subtasks"].values() for name in names}
        scores = {
            task: {
                key.removesuffix(",none"): value
                for key, value in figures.items()
                if isinstance(value, float)
            }
            for task, figures in results["results"].items()
            if task not in members
        }
        console.notice(f"in {precision}\n{make_table(results)}")
        self.metrics.log(
            {
                "step": self.step,
                "event": "tasks",
                "precision": precision,
                "num_fewshot": options.num_fewshot,
                "limit": options.limit,
                "length": job.recipe.data.length,
                "lm_eval": version_of("lm_eval"),
                "scores": scores,
            }
        )


class PackedHFLM(HFLM):
    """The harness's model of transformers, with the forward of a `PackedLanguageModel`."""

    def __init__(self, job: Job, model: PackedLanguageModel, accelerator: Accelerator) -> None:
        length = job.recipe.data.length
        # HFLM encodes texts and cuts them to `length` tokens. It needs the configuration of the
        # model, but not its weights. Several ranks must compute the same number of batches.
        # Therefore only a single rank reuses the logits of equal contexts.
        # HFLM would warn that a model in memory is given.
        with overridden(logging.getLogger(HFLM.__module__), disabled=True):
            super().__init__(
                job.shapes,
                tokenizer=job.tokenizer,
                max_length=length,
                batch_size=max(TOKENS_AT_ONCE // length, 1),
                softmax_dtype="float32",
                logits_cache=accelerator.num_processes == 1,
            )
        self.packed = model
        self.accelerator = accelerator
        self._device = accelerator.device
        self._rank = accelerator.process_index
        self._world_size = accelerator.num_processes

    @torch.no_grad()
    def _model_call(self, inps: Tensor, *_: Any) -> Tensor:
        """Return the logits [documents, tokens, vocabulary] of token ids [documents, tokens].

        Each row of `inps` is a document of the pack, with its padding at the end. A token attends
        only to earlier tokens of its document, so neither padding nor other documents change it.
        """
        # Every precision of the run supports a multiple of this number of tokens.
        multiple = math.gcd(self.max_length, 128)
        rows = F.pad(inps, (0, -inps.shape[1] % multiple))
        documents, length = rows.shape
        positions = torch.arange(length, device=rows.device).expand_as(rows)
        ends = torch.arange(0, rows.numel() + 1, length, dtype=torch.int32, device=rows.device)
        head: Any = self.packed.hf.get_output_embeddings()
        with (
            # The number of tokens varies too much for torch.compile.
            torch.compiler.set_stance("force_eager"),
            # Without labels, the head returns logits.
            overridden(head, forward=lambda hidden, labels: type(head).forward(head, hidden)),
        ):
            logits = self.packed(rows.view(1, -1), positions.reshape(1, -1), rows, ends, length)
        return logits.view(documents, length, -1)[:, : inps.shape[1]]
