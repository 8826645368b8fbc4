"""Settings of a training run: the shape of the model, the optimizer, the schedule, how often to save.

    TrainConfig(model="3m", budget_tokens=400_000, batch_windows=32, ranks=2)
    TrainConfig(model=ModelShape(width=64, layers=2, heads=4), steps=50)

Lengths are windows, tokens or optimizer steps, and the name says which. A `Run` adds where the data are and where the
results go; it is the JSON file that every rank reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import orjson
import xxhash
from pydantic import Field, field_validator, model_validator

from gristmill.stages.documents import Settings
from gristmill.stages.evaluation_sets import EvaluationSet, short_form

VERSION = 3  # raise it when the same settings train another model; it is part of a run's key


RUN_FILE, LOG_FILE = "run.json", "log.txt"  # of a run's folder
DONE_FILE, STOPPED_FILE, FAILED_FILE = "done.json", "stopped.json", "failed.json"  # how it ended; one of them
SCORES_FILE = "scores.json"
LAUNCHER = "GRISTMILL_LAUNCHER"  # in the environment of the ranks: the process whose end they must not outlive


def pause(tries: int) -> float:
    """Seconds to wait before another try, after so many without success: none, 0.5, 1, 2, ..., at most 30."""
    return min(2.0 ** (tries - 1) * 0.5, 30.0) if tries else 0.0


class TrainError(RuntimeError):
    """Training cannot start or go on; the message says what, where, why, and what to do."""


class ModelShape(Settings):
    """The shape of a Llama-style model."""

    vocab_size: int = Field(default=0, ge=0)  # 0: as many as the tokenizer has
    width: int = Field(default=256, ge=2)  # of the residual stream
    layers: int = Field(default=4, ge=1)
    heads: int = Field(default=4, ge=1)
    kv_heads: int = Field(default=0, ge=0)  # 0: as many as heads; fewer is grouped-query attention
    hidden: int = Field(default=0, ge=0)  # of the feed-forward part; 0: 8/3 of width, up to a multiple of 32
    qk_norm: bool = False  # RMSNorm on each head's queries and keys, as in Qwen3 and OLMo 2
    tied: bool = True  # one matrix for embedding and output
    rope_base: float = Field(default=10_000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    init_std: float = Field(default=0.02, gt=0)

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must be an even multiple of heads {self.heads}: RoPE turns pairs")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        return self

    def resolved(self, vocab_size: int) -> ModelShape:
        """Every 0 replaced by what it stands for. Raises TrainError where the vocabulary does not fit."""
        if self.vocab_size and self.vocab_size < vocab_size:
            raise TrainError(
                f"The model has a vocabulary of {self.vocab_size:,}, the tokenizer one of {vocab_size:,}: "
                "ids would be out of range. Set model.vocab_size to at least that, or leave it out."
            )
        return self.model_copy(
            update={
                "vocab_size": self.vocab_size or vocab_size,
                "kv_heads": self.kv_heads or self.heads,
                "hidden": self.hidden or -(-self.width * 8 // (3 * 32)) * 32,
            }
        )


# Those with a vocabulary have the source's, so that the count is the published one; the others take the tokenizer's.
PRESETS: dict[str, ModelShape] = {
    "1m": ModelShape(width=96, layers=3, heads=3),  # 1.1 M with 8,192 ids
    "3m": ModelShape(width=192, layers=3, heads=3),  # 2.9 M with 8,192 ids
    "10m": ModelShape(width=320, layers=6, heads=5),  # 10.1 M with 8,192 ids
    "14m": ModelShape(width=384, layers=6, heads=6),  # 13.8 M with 8,192 ids
    "olmix-14m": ModelShape(  # OLMo-core's olmo2_14M, whose norms stand after the parts; embedding not counted
        width=128,
        layers=4,
        heads=8,
        hidden=512,
        qk_norm=True,
        tied=False,
        rope_base=500_000.0,
        norm_eps=1e-6,
        vocab_size=100_352,
    ),
    "124m": ModelShape(width=768, layers=12, heads=12, hidden=2048),  # GPT-2 small's depth and width
    "411m-1x": ModelShape(  # DCLM, training/configs: 411M-1x; open_lm rounds hidden up to a multiple of 256
        width=1024, layers=24, heads=8, hidden=2816, qk_norm=True, tied=False, vocab_size=50_432
    ),
    "1b-1x": ModelShape(  # DCLM, 1B-1x
        width=2048, layers=24, heads=16, hidden=5632, qk_norm=True, tied=False, vocab_size=50_432
    ),
    "1.8b": ModelShape(width=2048, layers=24, heads=32, hidden=8192, vocab_size=50_272),  # FineWeb's ablation model
    "8b": ModelShape(  # Llama 3.1 8B
        width=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        hidden=14_336,
        tied=False,
        rope_base=500_000.0,
        vocab_size=128_256,
    ),
}


class TrainConfig(Settings):
    """How to train one model. Two runs with the same settings, data and number of ranks are bit-equal on a CPU."""

    model: str | ModelShape = "3m"  # a preset's name, or a shape
    seq_len: int = Field(default=256, ge=2)  # tokens that a window predicts
    batch_windows: int = Field(default=32, ge=1)  # per optimizer step, over all ranks
    micro_windows: int = Field(default=0, ge=0)  # per rank in one forward pass; 0: the rank's whole share
    steps: int = Field(default=0, ge=0)  # 0: from budget_tokens
    budget_tokens: int = Field(default=0, ge=0)  # 0: from steps
    # Of the run that this one stands for: each source is cut down to budget / target (`mixtures/subsample.py`).
    target_tokens: int | None = Field(default=None, ge=1)

    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices of the blocks, adamw for the rest
    lr: float = Field(default=3e-3, gt=0)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)  # of lr, at the end
    warmup: float = Field(default=0.05, ge=0)  # below 1 a share of the steps, else steps
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    # wsd: share of the steps, or the name of the mixture phase in which it decays; "fork": from the fork on
    decay: str | float = 0.2
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)  # on matrices; never on gains
    clip: float = Field(default=1.0, ge=0)  # largest gradient norm; 0: none
    z_loss: float = Field(default=0.0, ge=0)  # weight of mean(log Z squared); PaLM, section 5, has 1e-4
    mask_documents: bool = False  # attention stays inside a document
    boundary_loss: bool = True  # also on a document's first token, which nothing but an end-of-text token foretells

    init_from: str = ""  # RUN, RUN@STEP, RUN@best or a checkpoint: fork that run (`fork.py`)
    seed: int = 1  # of the first weights and of the order of windows
    ranks: int = Field(default=1, ge=1)
    parallel: Literal["fsdp", "hsdp", "ddp"] = "fsdp"  # how ranks share the weights: `parallel.py`
    replicas: int = Field(default=2, ge=2)  # hsdp: copies of the weights, such as one a machine
    tensor: int = Field(default=1, ge=1)  # neighbouring ranks that share the products of a block
    threads: int = Field(default=1, ge=1)  # per rank
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bf16"] = "float32"  # of activations and gathered weights; masters are float32
    recompute: Literal["none", "selective", "full"] = "none"  # in the backward pass, to save memory: `recompute.py`
    compile: bool = False  # torch.compile of each block: faster steps, about a minute to start on a CPU

    checkpoint_every: int = Field(default=100, ge=0)  # steps; 0: only the last
    keep_last: int = Field(default=2, ge=1)  # checkpoints
    keep_every: int = Field(default=0, ge=0)  # steps; of such a step it is kept for good, to fork from; 0: none
    keep_best: int = Field(default=0, ge=0)  # checkpoints of the lowest loss, beside the last
    best_by: Literal["training", "evaluation"] = "training"  # mean loss of the last 50 steps, or bits per byte
    async_save: bool = True  # a thread writes checkpoints while training goes on
    eval_every: int = Field(default=0, ge=0)  # steps between held-out scores; 0: only after the last step
    eval_bytes: int = Field(default=200_000, ge=0)  # of held-out text a source; 0: everything
    eval_document_bytes: int = Field(default=0, ge=0)  # of one document, from its beginning; 0: whole documents
    evaluation_sets: dict[str, EvaluationSet] = Field(default_factory=dict)  # texts that are scored like held-out ones
    max_skipped: int = Field(default=5, ge=0)  # steps with a loss that is no number, before the run stops
    max_restarts: int = Field(default=3, ge=0)  # of the group, after a rank died, without a new checkpoint in between
    spike_threshold: float = Field(default=6.0, ge=0)  # robust deviations above the median loss; 0: nothing is logged
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)  # beside metrics.jsonl
    profile: bool = False  # write PyTorch profiler traces of a few steps

    @field_validator("evaluation_sets", mode="before")
    @classmethod
    def _files_alone(cls, sets: Any) -> Any:
        return {name: short_form(entry) for name, entry in sets.items()} if isinstance(sets, dict) else sets

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if isinstance(self.model, str) and self.model not in PRESETS:
            raise ValueError(f"there is no model preset {self.model!r}; presets: {', '.join(PRESETS)}")
        if bool(self.steps) == bool(self.budget_tokens):
            raise ValueError("give one of steps and budget_tokens")
        self._check_mesh()
        if self.budget_tokens and self.budget_tokens < self.batch_windows * self.seq_len:
            raise ValueError(
                f"budget_tokens {self.budget_tokens:,} is less than one step of {self.batch_windows} windows x "
                f"{self.seq_len} tokens"
            )
        if self.target_tokens is not None and self.target_tokens < self.total_tokens:
            raise ValueError(
                f"target_tokens {self.target_tokens:,} is of a larger run than this one of {self.total_tokens:,}"
            )
        if self.keep_best and self.best_by == "evaluation":
            every = self.eval_every
            if not every or not self.checkpoint_every or self.checkpoint_every % every:
                raise ValueError(
                    f"best_by evaluation needs a score at every checkpoint: eval_every ({every}) must divide "
                    f"checkpoint_every ({self.checkpoint_every})"
                )
        if isinstance(self.decay, float) and not 0 <= self.decay <= 1:
            raise ValueError(f"decay {self.decay} must be a share between 0 and 1, or the name of a phase")
        return self

    def below(self, folder: Path) -> TrainConfig:
        """With the files of evaluation sets counted from a folder."""
        sets = {
            name: entry.model_copy(
                update={"files": tuple(f if "://" in f else str((folder / f).resolve()) for f in entry.files)}
            )
            for name, entry in self.evaluation_sets.items()
        }
        return self.model_copy(update={"evaluation_sets": sets})

    def _check_mesh(self) -> None:
        """Raises ValueError where the ranks cannot be laid out as asked."""
        if self.ranks % self.tensor:
            raise ValueError(f"ranks {self.ranks} must be a multiple of tensor {self.tensor}")
        if self.parallel == "hsdp" and self.data_ranks % self.replicas:
            raise ValueError(
                f"hsdp: ranks {self.ranks} / tensor {self.tensor} = {self.data_ranks} must be a multiple of replicas "
                f"{self.replicas}; or take fsdp"
            )
        if self.batch_windows % self.data_ranks:
            readers = "ranks" if self.tensor == 1 else f"ranks / tensor {self.tensor} ="
            raise ValueError(f"batch_windows {self.batch_windows} must be a multiple of {readers} {self.data_ranks}")
        if self.tensor == 1 or (isinstance(self.model, str) and self.model not in PRESETS):
            return
        shape = self.shape.resolved(0)
        for name in ("heads", "kv_heads", "hidden"):
            size, parts = getattr(shape, name), self.tensor
            if size % parts:
                raise ValueError(f"tensor {parts} must divide model.{name} {size}: each of these ranks takes a part")

    @property
    def data_ranks(self) -> int:
        """Ranks that read different windows."""
        return self.ranks // self.tensor

    @property
    def copies(self) -> int:
        """Of the weights: groups of data ranks that hold everything between them."""
        return {"fsdp": 1, "hsdp": self.replicas, "ddp": self.data_ranks}[self.parallel]

    @property
    def shape(self) -> ModelShape:
        return PRESETS[self.model] if isinstance(self.model, str) else self.model

    @property
    def tokens_per_step(self) -> int:
        return self.batch_windows * self.seq_len

    @property
    def total_steps(self) -> int:
        """Whole steps that the budget pays for."""
        return self.steps or self.budget_tokens // self.tokens_per_step

    @property
    def total_tokens(self) -> int:
        """Tokens that those steps predict."""
        return self.total_steps * self.tokens_per_step


# Settings that change where and how often something is written, never the trained weights or the scores.
BYSTANDERS = {
    "init_from",  # the trunk of a fork counts by its content
    "checkpoint_every",
    "keep_last",
    "keep_every",
    "keep_best",
    "best_by",
    "async_save",
    "max_restarts",
    "spike_threshold",
    "trackers",
    "profile",
    "eval_every",
    "evaluation_sets",  # what is in them counts, not where they lie: `run_key`
}
# Settings of the scores alone.
SCORING = {"eval_bytes", "eval_document_bytes"}
# Settings that a run may change half way: the steps that follow are the same but for rounding.
MACHINERY = {
    "ranks",
    "parallel",
    "replicas",
    "tensor",
    "threads",
    "device",
    "recompute",
    "compile",
    "micro_windows",
    "max_skipped",
    *SCORING,
}


class Run(Settings):
    """One training run: settings, data, and the folder that takes the results."""

    config: TrainConfig
    mixture: str  # path of a mixture file
    tokens: str  # folder of token shards
    out: str
    key: str = ""  # identity of the result, where the starter knows it

    def save(self, path: Path) -> None:
        path.write_bytes(orjson.dumps(self.model_dump(mode="json"), option=orjson.OPT_INDENT_2))

    @classmethod
    def load(cls, path: Path) -> Run:
        """Raises TrainError where the file is missing or is not a run."""
        try:
            return cls.model_validate(orjson.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise TrainError(f"{path}: cannot read the run: {error}") from error


def run_key(config: TrainConfig, data: str, sets: str = "") -> str:
    """Identity of a run's result. data: identity of mixture and tokens (the plan's hash); sets: of the texts scored.

    The number of ranks and threads is part of it: sums in another order give another last bit.
    """
    body = {"version": VERSION, "config": config.model_dump(mode="json", exclude=BYSTANDERS), "data": data}
    body |= {"sets": sets} if sets else {}
    return xxhash.xxh3_128_hexdigest(orjson.dumps(body, option=orjson.OPT_SORT_KEYS))


def course_key(config: TrainConfig, data: str) -> str:
    """Identity of a run's course: a checkpoint with the same one can be gone on from."""
    settings = config.model_dump(mode="json", exclude=BYSTANDERS | MACHINERY)
    body = {"version": VERSION, "config": settings, "data": data}
    return xxhash.xxh3_128_hexdigest(orjson.dumps(body, option=orjson.OPT_SORT_KEYS))
