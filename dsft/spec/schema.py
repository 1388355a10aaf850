"""Define the spec: one frozen model per section, each key with a description and its unit.

A default written here is the value that the run uses, except where a description gives another one.
`dsft.spec.load` reads a spec's file and checks it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from dsft.spec.task import TASKS, Task

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"

# Accepts a YAML list for a tuple; all other values must have the exact type (strict below).
Listed = Strict(False)


class Section(BaseModel):
    """Base of all sections: frozen, without unknown keys, type conversion, NaN or infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class Lora(Section):
    """Low-rank adapters in place of full weights."""

    rank: int = Field(default=16, ge=1, description="Rank of each adapter's two factors.")
    alpha: float = Field(
        default=32.0, gt=0, description="Scale: the adapter's product is multiplied by alpha ÷ rank."
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout probability of an adapter's input, 0 to 1."
    )
    target_modules: str | Annotated[tuple[str, ...], Listed] = Field(
        default="all-linear", description="Names of the linear modules that get an adapter, or all-linear."
    )
    use_rslora: bool = Field(default=False, description="Scale by alpha ÷ √rank instead of alpha ÷ rank.")
    use_dora: bool = Field(default=False, description="DoRA: also learn a magnitude per output feature.")
    modules_to_save: Annotated[tuple[str, ...], Listed] = Field(
        default=(), description="Modules trained in full beside the adapters, such as lm_head."
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of a saved adapter to start from; keys that are left out are taken from it.",
    )


class Model(Section):
    """The model to train: pretrained, or with fresh weights from a config."""

    name_or_path: str | None = Field(
        default=None,
        min_length=1,
        description="Hub id or folder of a pretrained causal language model; or give from_config.",
    )
    from_config: dict[str, Any] | None = Field(
        default=None,
        description="Keys of a transformers config, including model_type, for a model with fresh weights.",
    )
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="Hub id, folder or sentencepiece .model file of the tokenizer; by default the model's "
        "own, or a byte-level one for from_config.",
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = Field(
        default="auto",
        description="Attention: auto takes torch's, for packed rows the fastest that device, precision and "
        "model allow; sdpa computes packed rows segment by segment; the others are those of transformers.",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="Recompute each layer's activations in the backward pass to save memory.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Not offered: code that comes with a model is never run."
    )
    add_tokens: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Listed] = Field(
        default=(),
        description="Special tokens to add to the tokenizer; new embeddings start as the mean of the others.",
    )
    lora: Lora | None = Field(default=None, description="Train low-rank adapters instead of all weights.")
    trainable: Annotated[tuple[str, ...], Listed] | None = Field(
        default=None, description="Patterns of the names of the parameters to train; by default all."
    )
    compile: bool = Field(default=False, description="Compile the model's layers with torch.compile.")
    kernels: Literal["torch", "liger"] = Field(
        default="torch",
        description="Implementation of norms, rotary embeddings and SwiGLU: torch (the model's own modules) "
        "or Liger's fused kernels (GPUs only; install dsft[liger]).",
    )
    activation_offload: bool = Field(
        default=False, description="Keep the activations of checkpointed layers in host memory."
    )


class Source(Section):
    """A source of rows: one file, or several of the same kind."""

    path: str = Field(
        min_length=1,
        description="File, folder, pattern, hub data set (owner/name[:split]), or builtin:quickstart, "
        "builtin:quickstart-heldout; for pairs builtin:quickstart-pairs, -pairs-heldout.",
    )
    format: (
        Literal["text", "messages", "alpaca", "sharegpt", "prompt_completion", "preference", "kto"] | None
    ) = Field(default=None, description="Format of a row; detected from its keys and printed when not given.")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Renamed columns, as {name in dsft: name in the file}, such as {text: content}.",
    )
    name: str | None = Field(
        default=None,
        pattern=NAME_PATTERN,
        description="Name in metrics (data/NAME/tokens, eval/NAME/loss): letters, digits, '.', '_', '-'; by "
        "default derived from the path.",
    )
    weight: float | None = Field(
        default=None,
        gt=0,
        description="Share of this source in training, relative to the others; all have one, or none.",
    )
    max_rows: int | None = Field(
        default=None, ge=1, description="Number of rows to read from the start of the file; by default all."
    )


class Data(Section):
    """The rows: their sources and maximum length, and what to do with those that do not fit."""

    train: Annotated[tuple[Source, ...], Listed] = Field(
        min_length=1, description="Files of rows to train on."
    )
    eval: Annotated[tuple[Source, ...], Listed] = Field(default=(), description="Files of held-out rows.")
    max_length: int = Field(default=2048, ge=2, description="Maximum tokens of a row.")
    on_too_long: Literal["error", "drop", "truncate", "split"] = Field(
        default="error",
        description="What to do with a row over max_length; split divides it into several rows (pretraining "
        "only; packing does so anyway).",
    )
    packing: bool = Field(
        default=False,
        description="Pack several examples into one row without padding; the loss stays the same. In "
        "pretraining: rows of exactly max_length tokens.",
    )
    max_tokens_per_micro_batch: int | None = Field(
        default=None,
        ge=2,
        description="Maximum tokens of a packed micro-batch; by default micro_batch_size × max_length, for "
        "pairs twice that.",
    )
    eval_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Fraction of training rows held out for evaluation, 0 to 1, by a hash of their content.",
    )
    eval_count: int | None = Field(
        default=None, ge=1, description="Number of training rows held out, by a hash of their content."
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="Targets in a conversation: all assistant turns, only the last one, or everything.",
    )
    max_dropped_fraction: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Fraction of rows left out (too long, bad, empty, without a target) that stops the run.",
    )
    max_truncated_fraction: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Fraction of truncated rows, 0 to 1, above which the run does not start.",
    )
    max_duplicate_fraction: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Fraction of rows that repeat an earlier one, above which the run does not start.",
    )
    on_bad_row: Literal["error", "drop"] = Field(
        default="error", description="What to do with a row that cannot be read."
    )
    chat_template: str | None = Field(
        default=None,
        min_length=1,
        description="File of a Jinja chat template, or the name of one; by default the tokenizer's own.",
    )
    cache_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Cache of tokenized rows, shared by hosts and runs; by default OUTPUT_DIR/.cache/data.",
    )
    num_workers: int | None = Field(
        default=None,
        ge=0,
        description="Processes that tokenize; 0: only the run's own; by default one per core.",
    )


class Dpo(Section):
    """Direct preference optimization."""

    beta: float = Field(
        default=0.1, gt=0, description="Strength of the pull towards the reference, without unit."
    )
    loss_type: Literal["sigmoid", "robust", "ipo", "hinge", "apo_zero", "simpo", "orpo"] = Field(
        default="sigmoid", description="Preference loss to minimize."
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="Probability that the answers of a pair are swapped."
    )
    reference: Literal["precomputed", "live", "adapter"] = Field(
        default="precomputed",
        description="Source of the reference's log-probabilities: precomputed (disk), live (a second "
        "engine), adapter (the policy with its adapter off).",
    )
    reference_model: str | None = Field(
        default=None, min_length=1, description="Hub id or folder of the reference; by default the model."
    )
    reference_zero_stage: Literal[0, 3] | None = Field(
        default=None,
        description="0: the reference is whole on every GPU; 3: sharded. By default 3 if "
        "parallel.zero_stage is 3, else 0; in a pipeline it is cut into the policy's stages.",
    )
    reference_offload: Literal["none", "cpu"] = Field(
        default="none", description="Where the reference's parameters are stored between their uses (ZeRO 3)."
    )
    reference_store: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of precomputed log-probabilities; by default OUTPUT_DIR/.cache/reference.",
    )
    recheck_rows: int = Field(
        default=4, ge=0, description="Number of random stored pairs scored again at the start; 0: none."
    )
    share_prompts: bool | None = Field(
        default=None,
        description="Compute a pair's prompt once for both answers; by default if rows are packed and "
        "model.attention is auto or sdpa.",
    )
    sft_weight: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the added next-token loss on chosen answers.",
    )
    simpo_gamma: float = Field(
        default=0.5, ge=0, description="Target margin of simpo, in units of the reward."
    )


class Offload(Section):
    """Where a part of the training state is stored."""

    device: Literal["none", "cpu", "nvme"] = Field(
        default="none", description="Where it is stored: none (GPU memory), cpu (host memory) or nvme."
    )
    nvme_path: str | None = Field(
        default=None, min_length=1, description="Folder on a local disk of each host, for device nvme."
    )
    pin_memory: bool | None = Field(
        default=None,
        description="Pin its host memory, for faster copies; by default if the hosts have enough memory.",
    )


Layers = Annotated[int, Field(ge=1)]


class Parallel(Section):
    """How the training state and the layers are divided among the ranks."""

    zero_stage: int = Field(
        default=1,
        ge=0,
        le=3,
        description="What is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters. "
        "By default 2 in bf16 without a pipeline, unless the accelerator is cpu; else 1.",
    )
    pipeline_stages: int = Field(
        default=1, ge=1, description="Pipeline stages, each with consecutive layers; 1: no pipeline."
    )
    pipeline_cut: Literal["parameters"] | Annotated[tuple[Layers, ...], Listed] = Field(
        default="parameters",
        description="Layers per stage: a list, or parameters, which balances the stages' parameters.",
    )
    offload_optimizer: Offload = Field(
        default=Offload(), description="Where optimizer states and fp32 weights are stored and updated."
    )
    offload_parameters: Offload = Field(
        default=Offload(), description="Where parameters are stored between their uses (ZeRO 3)."
    )
    allow_torch_adam: bool = Field(
        default=False,
        description="Use torch's Adam if DeepSpeed's CPU Adam cannot be compiled, instead of stopping.",
    )


class Train(Section):
    """Batch sizes, length of the run, precision. Two of the three batch keys are given, the third follows."""

    global_batch_size: int | None = Field(
        default=None, ge=1, description="Examples per optimizer step, over all ranks."
    )
    micro_batch_size: int | None = Field(
        default=None, ge=1, description="Examples per forward pass of one data-parallel rank."
    )
    accumulation_steps: int | None = Field(
        default=None, ge=1, description="Micro-batches per optimizer step of one data-parallel rank."
    )
    num_train_epochs: float = Field(
        default=1.0, gt=0, description="Passes over the training rows; a fraction is allowed."
    )
    max_steps: int | None = Field(
        default=None, ge=1, description="Optimizer steps; overrides num_train_epochs when given."
    )
    eval_every: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps between evaluations of data.eval; by default only at the end.",
    )
    eval_on_start: bool = Field(default=False, description="Evaluate data.eval before the first step, too.")
    log_every: int = Field(default=1, ge=1, description="Optimizer steps between lines of metrics.")
    precision: Literal["bf16", "fp32", "fp16"] = Field(
        default="bf16",
        description="Data type of weights in forward and backward; master weights and moments are fp32.",
    )
    tf32: bool = Field(
        default=False,
        description="Let GPUs multiply fp32 matrices as TF32, with 10 bits of mantissa; for precision fp32.",
    )
    reduce_dtype: Literal["fp32", "bf16"] | None = Field(
        default=None, description="Data type of the gradient reduction over ranks; by default fp32."
    )
    max_grad_norm: float = Field(
        default=1.0, ge=0, description="2-norm to which the gradient is clipped; 0 switches clipping off."
    )
    seed: int = Field(
        default=42, ge=0, le=2**32 - 1, description="Seed of fresh weights, the order of rows and dropout."
    )
    max_consecutive_nonfinite: int = Field(
        default=3,
        ge=1,
        description="Steps in a row with an infinite or NaN gradient (never applied) that stop the run.",
    )
    compare_ranks_every: int | None = Field(
        default=100,
        ge=1,
        description="Steps between bitwise comparisons of replicated weights; null: only before checkpoints.",
    )
    neftune_alpha: float | None = Field(
        default=None,
        gt=0,
        description="NEFTune: in training, noise in ±α ÷ √(tokens × hidden size) on embeddings, such as 5.",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Probability mass taken from the target and spread evenly over all tokens.",
    )


class OptimGroup(Section):
    """A group of parameters with its own learning rate or weight decay."""

    parameters: str = Field(min_length=1, description="Pattern of the parameter names in this group.")
    learning_rate: float | None = Field(
        default=None, ge=0, description="Peak learning rate of this group; by default optim.learning_rate."
    )
    weight_decay: float | None = Field(default=None, ge=0, description="Weight decay of this group.")


Schedule = Literal[
    "linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt", "cosine_with_min_lr", "wsd"
]
DecayType = Literal["cosine", "linear", "1-sqrt"]


Beta = Annotated[float, Field(ge=0, lt=1)]


class Optim(Section):
    """The optimizer and its learning rate, a function of the step alone."""

    name: Literal["adamw", "sgd"] = Field(default="adamw", description="The optimizer.")
    learning_rate: float = Field(gt=0, description="Peak learning rate.")
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Weight decay of matrices and embeddings; biases, norms and other vectors have none.",
    )
    lr_scheduler_type: Schedule = Field(
        default="linear", description="Learning rate schedule, equal to transformers.get_scheduler."
    )
    warmup_steps: int | None = Field(
        default=None, ge=0, description="Steps of warm-up from 0 (wsd: min_lr_ratio); or give warmup_ratio."
    )
    warmup_ratio: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Fraction of all steps, rounded up, that are warm-up; or give warmup_steps.",
    )
    min_lr_ratio: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Lowest learning rate of cosine_with_min_lr and wsd, as a fraction of learning_rate.",
    )
    decay_steps: int | None = Field(
        default=None, ge=1, description="Last steps, in which wsd's learning rate falls; or give decay_ratio."
    )
    decay_ratio: float | None = Field(
        default=None, gt=0, le=1, description="Fraction of all steps, rounded up, in which wsd's rate falls."
    )
    decay_type: DecayType | None = Field(
        default=None, description="Shape of wsd's decay; by default cosine, as in transformers."
    )
    betas: Annotated[tuple[Beta, Beta], Listed] = Field(
        default=(0.9, 0.999), description="Decay per step of adamw's first and second moment."
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of adamw's second moment.")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Share of the last update that sgd keeps.")
    scale_with_batch: Literal["none", "linear", "sqrt"] = Field(
        default="none",
        description="Scale learning_rate by global batch ÷ base_batch_size (linear) or its root (sqrt).",
    )
    base_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Global batch, in examples, for which learning_rate was tuned; for scale_with_batch.",
    )
    groups: Annotated[tuple[OptimGroup, ...], Listed] = Field(
        default=(), description="Groups of parameters with their own learning rate or weight decay."
    )


class Checkpoint(Section):
    """When checkpoints are written and which stay on disk; a run always writes one at its end."""

    every: int | None = Field(
        default=200, ge=1, description="Optimizer steps between checkpoints; null writes one at the end only."
    )
    keep_last: int | None = Field(
        default=2, ge=1, description="Number of newest checkpoints that stay on disk; null keeps all."
    )
    resume: str = Field(
        default="auto",
        min_length=1,
        description="auto resumes from the newest checkpoint, never refuses a folder with one; or a path.",
    )
    keep_best: int | None = Field(
        default=None,
        ge=1,
        description="Checkpoints with the lowest eval/loss that also stay on disk; each is evaluated.",
    )


class Accelerator(Section):
    """The device of each slot of a host; with it, a machine without such a device can plan a run."""

    name: str = Field(min_length=1, description="cpu, or the GPU's name, such as H100.")
    memory_gib: float | None = Field(
        default=None, gt=0, description="Memory of one device, in GiB (2^30 bytes)."
    )
    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        description="Peak of one device at the run's precision, in 10^12 operations per second.",
    )


class Cluster(Section):
    """The hosts of the run. A world of another size stops at once."""

    hosts: dict[str, Annotated[int, Field(ge=1)]] = Field(
        min_length=1,
        description="Processes (slots) per host, as {host: slots}, in the order of the ranks; a key may be a "
        "range of hosts, such as node[01-16].",
    )
    interface: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,14}$",
        description="Network interface for the traffic between hosts, such as eth0.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables set on every host.")
    accelerator: Accelerator | None = Field(
        default=None, description="The device of each slot; by default that of the machine."
    )
    host_memory_gib: float | None = Field(
        default=None, gt=0, description="Memory that the run may take on each host, in GiB (2^30 bytes)."
    )
    launcher: Literal["dsft", "deepspeed", "torchrun", "slurm"] = Field(
        default="dsft", description="What starts the ranks under dsft launch. slurm: dsft, through srun."
    )
    hang_timeout: int | None = Field(
        default=None,
        ge=1,
        description="Seconds in which a rank starts no step, evaluation or save, after which dsft launch "
        "names it and ends the run with exit code 124. Other launchers do not check; there, a collective "
        "times out after 30 minutes.",
    )
    time_limit: int | None = Field(
        default=None,
        ge=1,
        description="Seconds after the start at which the run ends its step, saves and exits with 75; the "
        "same command resumes it. At least one step is trained; leave room for two steps and a save.",
    )
    min_hosts: int | None = Field(default=None, ge=1, description="Fewest hosts on which the run continues.")


class Wandb(Section):
    """Weights & Biases. The run's name is the spec's."""

    project: str = Field(default="dsft", min_length=1, description="Project of the run.")
    entity: str | None = Field(
        default=None, min_length=1, description="Owning user or team; by default that of the API key."
    )
    group: str | None = Field(default=None, min_length=1, description="Group in which the run is shown.")
    tags: Annotated[tuple[str, ...], Listed] = Field(default=(), description="Tags of the run.")
    mode: Literal["auto", "online", "offline", "disabled"] = Field(
        default="auto", description="auto: online if an API key is found, else offline."
    )


class SwanLab(Section):
    """SwanLab. The run's name is the spec's."""

    project: str = Field(default="dsft", min_length=1, description="Project of the run.")
    workspace: str | None = Field(
        default=None, min_length=1, description="Owning user or organization; by default that of the API key."
    )
    mode: Literal["auto", "online", "offline", "disabled"] = Field(
        default="auto", description="auto: online if SWANLAB_API_KEY is set, else offline."
    )


class Spec(Section):
    """One experiment."""

    name: str = Field(
        pattern=NAME_PATTERN,
        description="Name of the run and its folder: letters, digits, '.', '_', '-', at most 100.",
    )
    task: Literal["sft", "pretrain", "dpo"] = Field(
        description="Training task: sft (answers in conversations), pretrain (plain text) or dpo "
        "(preferences)."
    )
    model: Model = Field(description="The model to train.")
    data: Data = Field(description="The rows to train on and to evaluate.")
    dpo: Dpo | None = Field(
        default=None, description="Settings of task dpo; by default the defaults of its keys."
    )
    parallel: Parallel = Field(
        default=Parallel(), description="How state and layers are divided among the ranks."
    )
    train: Train = Field(description="Batch sizes, length of the run, precision.")
    optim: Optim = Field(description="The optimizer and its schedule.")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="When checkpoints are written and kept.")
    cluster: Cluster | None = Field(
        default=None, description="The hosts; without it the run accepts any number of processes."
    )
    wandb: Wandb = Field(default=Wandb(), description="Weights & Biases.")
    tensorboard: bool = Field(default=False, description="Also write OUTPUT_DIR/NAME/tensorboard.")
    swanlab: SwanLab | None = Field(default=None, description="SwanLab; nothing is sent without the section.")
    output_dir: str = Field(
        default="runs", min_length=1, description="Folder of all runs, shared by all hosts."
    )

    @property
    def task_kind(self) -> Task:
        """Properties of the task."""
        return TASKS[self.task]

    @property
    def longest_example(self) -> int:
        """Maximum tokens of an example: data.max_length limits each of its rows."""
        return self.task_kind.rows * self.data.max_length

    @property
    def accelerator(self) -> Accelerator | None:
        """The device in cluster.accelerator; None if the spec does not name it."""
        return self.cluster.accelerator if self.cluster else None

    @model_validator(mode="after")
    def _default_zero_stage(self) -> Spec:
        """Set the default of zero_stage. It depends on the spec alone, so that generated files are the same
        on every machine. The key stays out of `model_fields_set`."""
        on_cpu = self.accelerator is not None and self.accelerator.name.lower() == "cpu"
        given = "zero_stage" in self.parallel.model_fields_set
        if not given and self.train.precision == "bf16" and self.parallel.pipeline_stages == 1 and not on_cpu:
            parallel = self.parallel.model_copy()
            parallel.__dict__["zero_stage"] = 2
            self.__dict__["parallel"] = parallel
        return self
