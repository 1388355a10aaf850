"""Define the spec: one frozen model per section. A docstring below each key describes it, with its unit.

A default written here is the value that the run uses, except where the docstring gives another one.
`dsft.spec.load` reads a spec's file and checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import ceil
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, WithJsonSchema, model_validator
from pydantic_core import PydanticKnownError

from dsft.spec.formats import FORMATS
from dsft.spec.losses import PREFERENCE_LOSSES, LossType, PreferenceLoss
from dsft.spec.optimizers import OPTIMIZERS, OptimizerFacts
from dsft.spec.task import LABELS, TASKS, Head, TaskFacts

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"

# Accepts a YAML list for a tuple; all other values must have the exact type (strict below).
FromList = Strict(False)
Strings = Annotated[tuple[str, ...], FromList]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Part = Annotated[float, Field(gt=0, lt=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _key_of(table: Mapping[str, Any], name: object) -> object:
    """Check that a name is a key of a table. A program may add entries of its own to it."""
    if not isinstance(name, str) or name not in table:
        *most, last = map(repr, table)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(most)} or {last}"})
    return name


TaskName = Annotated[
    str, BeforeValidator(partial(_key_of, TASKS)), WithJsonSchema({"enum": list(TASKS), "type": "string"})
]
"""The name of a task in `TASKS`."""
FormatName = Annotated[
    str, BeforeValidator(partial(_key_of, FORMATS)), WithJsonSchema({"enum": list(FORMATS), "type": "string"})
]
"""The name of a format in `FORMATS`."""
OptimizerName = Annotated[
    str,
    BeforeValidator(partial(_key_of, OPTIMIZERS)),
    WithJsonSchema({"enum": list(OPTIMIZERS), "type": "string"}),
]
"""The name of an optimizer in `OPTIMIZERS`."""
QuantizedForm = Literal["nf4", "fp4"]
"""How weights are stored in 4 bits."""


class Section(BaseModel):
    """Base of all sections: frozen, without unknown keys, type conversion, NaN or infinity."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


class Lora(Section):
    """Low-rank adapters in place of full weights."""

    rank: Count = 16
    """Rank of an adapter's two factor matrices."""
    alpha: Positive = 32.0
    """Scale: the product of an adapter's factors is multiplied by alpha ÷ rank."""
    dropout: Beta = 0.0
    """Dropout probability of an adapter's input, 0 to 1."""
    target_modules: str | Strings = "all-linear"
    """Names of the linear modules that get an adapter, or all-linear."""
    use_rslora: bool = False
    """Scale by alpha ÷ √rank instead of alpha ÷ rank."""
    use_dora: bool = False
    """DoRA: also train a magnitude per output feature."""
    modules_to_save: Strings = ()
    """Modules that are trained in full beside the adapters, such as lm_head."""
    path: Text | None = None
    """Folder of a saved adapter to start from; keys that you leave out are taken from it."""


class Experts(Section):
    """How a mixture of experts is computed, and how its routers are trained."""

    balance: Literal["none", "sequence", "global_batch"] = "none"
    """Loss that makes routers use all experts alike. none: no such loss, as transformers trains by default
    (Qwen3-MoE, Mixtral, OLMoE, …); sequence: within each sequence (DeepSeek-V3's pretraining); global_batch:
    over the whole step (Qwen3-MoE's pretraining), which takes one more forward pass."""
    balance_weight: Positive | None = None
    """Weight of the balance loss, which is 1 per layer where all experts are used alike; such as 0.0001 with
    sequence (DeepSeek-V3) and 0.001 with global_batch."""
    freeze_router: bool = False
    """Train everything but the routers, for any mixture of experts."""
    implementation: Literal["auto", "eager", "batched_mm", "grouped_mm"] = "auto"
    """What computes the experts, of transformers. auto: grouped_mm (one matrix product for all experts at
    once) where the widths allow it, else eager (one expert after the other); batched_mm copies an expert's
    weights for each token."""


class Model(Section):
    """The model to train: pretrained, or newly initialized from a config."""

    name_or_path: Text | None = None
    """Hub id or folder of a pretrained causal language model; alternatively give from_config."""
    from_config: dict[str, Any] | None = None
    """Keys of a transformers config, including model_type, for a newly initialized model."""
    tokenizer: Text | None = None
    """Hub id, folder or sentencepiece .model file of the tokenizer; by default the model's own, or a
    byte-level tokenizer with from_config."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention implementation. auto: that of torch, for packed rows the fastest one that device, precision
    and model allow; sdpa: packed rows are computed segment by segment; the others: those of transformers."""
    gradient_checkpointing: bool | Count | Part | Literal["auto"] = False
    """Recompute activations in the backward pass to save memory: true for every layer, N for every N-th one,
    a number below 1 for that share of the layers, auto for as few as fit into memory by the plan. The result
    is the same to the last bit."""
    trust_remote_code: bool = False
    """Not offered: code that comes with a model is never run."""
    add_tokens: Annotated[tuple[Text, ...], FromList] = ()
    """Special tokens to add to the tokenizer; their embeddings start as the mean of all others."""
    lora: Lora | None = None
    """Train low-rank adapters instead of all weights."""
    quantize: QuantizedForm | None = None
    """Store the frozen weights of linear layers and experts in 4 bits (NF4 or FP4), with model.lora."""
    quantize_skip: Strings = ()
    """Patterns for the names of more weights that model.quantize leaves as they are."""
    experts: Experts = Experts()
    """How a mixture of experts is computed, and how its routers are trained."""
    trainable: Strings | None = None
    """Patterns for the names of the parameters to train; by default all are trained."""
    compile: bool = False
    """Compile the model's layers with torch.compile."""
    kernels: Literal["auto", "torch", "liger"] = "auto"
    """Implementation of norms, rotary embeddings and SwiGLU: torch (the model's own modules), liger (Liger's
    fused kernels, for GPUs only; install dsft[gpu]) or auto (liger where it works)."""
    activation_offload: bool = False
    """Keep the activations of checkpointed layers in host memory."""
    mlp_chunks: Count | None = None
    """Number of chunks of tokens in which checkpointed layers compute their MLP, so that less of it is in
    memory at once; by default so many that a chunk takes at most 1 GiB, or 256 MiB on a CPU."""

    _head: Head = "vocabulary"  # both are set by the spec, and by dsft.prove.small
    _labels: tuple[str, ...] = ()

    @property
    def head(self) -> Head:
        """The last layer, which follows from the task of the spec; that of a section on its own is over the
        vocabulary."""
        return self._head

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the scores that the last layer gives, if it is one of scores."""
        return self._labels

    def checkpoints(self, layer: int) -> bool:
        """Return whether the layer of this number is checkpointed; all are for an auto that
        `dsft.plan.checkpointing` has not replaced."""
        value = self.gradient_checkpointing
        if value == "auto" or isinstance(value, bool):
            return bool(value)
        share = 1 / value if isinstance(value, int) else value
        return ceil((layer + 1) * share) > ceil(layer * share)


class Source(Section):
    """A source of rows: one file, or several of the same kind."""

    path: Text
    """File, folder, pattern or hub data set (owner/name[:split]); or builtin:quickstart,
    builtin:quickstart-heldout, and for pairs builtin:quickstart-pairs, builtin:quickstart-pairs-heldout."""
    format: FormatName | None = None
    """Format of the rows; by default it is detected from their keys and printed."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns to rename, as {name in dsft: name in the file}, such as {text: content}."""
    name: str | None = Field(default=None, pattern=NAME_PATTERN)
    """Name in metrics (data/NAME/tokens, eval/NAME/loss), of letters, digits, '.', '_' and '-'; by default
    derived from the path."""
    weight: Positive | None = None
    """Share of this source in training, relative to the others; give one to all sources or to none."""
    max_rows: Count | None = None
    """Number of rows to read from the start of the file; by default all."""


class Data(Section):
    """The rows: their sources and maximum length, and what to do with those that do not fit."""

    train: Annotated[tuple[Source, ...], FromList] = Field(min_length=1)
    """Files of rows to train on."""
    eval: Annotated[tuple[Source, ...], FromList] = ()
    """Files of held-out rows."""
    max_length: int = Field(default=2048, ge=2)
    """Maximum length of a row, in tokens."""
    on_too_long: Literal["error", "drop", "truncate", "split"] = "error"
    """What to do with a row longer than max_length; split divides it into several rows (pretraining only;
    packing does so anyway)."""
    packing: bool = False
    """Pack several examples into one row without padding; the loss stays the same. In pretraining, each row
    has exactly max_length tokens."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=2)
    """Maximum tokens of a packed micro-batch; by default micro_batch_size × max_length, twice that for
    pairs."""
    eval_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of training rows, 0 to 1, to hold out for evaluation, chosen by a hash of their content."""
    eval_count: Count | None = None
    """Number of training rows to hold out for evaluation, chosen by a hash of their content."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Targets of a conversation: the tokens of all assistant turns (assistant), of the last one (last), or
    all tokens (all)."""
    thinking: Literal["as_in_template", "empty", "strip", "keep"] = "empty"
    """Thoughts of answers: as the chat template writes them (as_in_template); as it writes them, and an empty
    one where its prompt opens a thought that the answer lacks (empty); none (strip); those of all turns, and
    an empty one for answers without (keep)."""
    max_dropped_fraction: Share | None = None
    """Fraction of rows, 0 to 1, that may be left out (too long, bad, empty or without a target); with more,
    the run does not start."""
    max_truncated_fraction: Share | None = None
    """Fraction of rows, 0 to 1, that may be truncated; with more, the run does not start."""
    max_duplicate_fraction: Share | None = None
    """Fraction of rows, 0 to 1, that may repeat an earlier row; with more, the run does not start."""
    on_bad_row: Literal["error", "drop"] = "error"
    """What to do with a row that cannot be read."""
    chat_template: Text | None = None
    """File of a Jinja chat template, or the name of one; by default the tokenizer's own."""
    cache_dir: Text | None = None
    """Folder that caches tokenized rows, shared by hosts and runs; by default OUTPUT_DIR/.cache/data."""
    num_workers: Natural | None = None
    """Number of processes that tokenize; 0: only the run's own process; by default one per core."""


class Reference(Section):
    """Base of the section of a task whose loss compares the policy with a frozen reference."""

    is_initial_policy: ClassVar[bool] = True
    """Whether the reference is the policy before training. Dropout and noise are then refused, since policy
    and reference must agree at step 0."""

    reference: Literal["precomputed", "live", "adapter"] = "precomputed"
    """Where the reference's log-probabilities come from: precomputed (from disk), live (from a second engine)
    or adapter (from the policy with its adapter switched off)."""
    reference_model: Text | None = None
    """Hub id or folder of the reference; by default the model that is trained, as it is at the start."""
    reference_quantize: QuantizedForm | None = None
    """Store the weights of linear layers and experts of reference_model in 4 bits, as model.quantize does."""
    reference_zero_stage: Literal[0, 3] | None = None
    """0: every GPU holds the whole reference; 3: it is sharded. By default 3 if parallel.zero_stage is 3,
    else 0; in a pipeline it is cut into the policy's stages."""
    reference_offload: Literal["none", "cpu"] = "none"
    """Where the reference's parameters are stored while they are not in use (ZeRO 3)."""
    reference_store: Text | None = None
    """Folder of precomputed log-probabilities; by default OUTPUT_DIR/.cache/reference."""
    recheck_rows: Natural = 4
    """Number of stored rows or pairs, chosen at random, that are scored again at the start; 0: none."""

    @property
    def is_needed(self) -> bool:
        """Whether the loss needs the reference."""
        return True

    @property
    def has_baseline(self) -> bool:
        """Whether each step needs one more forward pass before it, over as many tokens (KTO's divergence)."""
        return False

    @property
    def teacher_keys(self) -> dict[str, float]:
        """Keys that change what a teacher returns; {} for a reference of whole answers."""
        return {}

    @property
    def teacher_values(self) -> int:
        """Number of float32 values that a teacher returns for each target; 0 for a reference of answers."""
        return 0


class Dpo(Reference):
    """Direct preference optimization."""

    beta: Positive = 0.1
    """Strength of the pull towards the reference; it has no unit."""
    loss_type: LossType = "sigmoid"
    """Preference loss to minimize."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed probability that the two answers of a pair are swapped."""
    share_prompts: bool | None = None
    """Compute a pair's prompt once for both answers; by default true if rows are packed and model.attention
    is auto or sdpa."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of the next-token loss on chosen answers, which is added to the preference loss."""
    simpo_gamma: float = Field(default=0.5, ge=0)
    """Target margin of simpo, in units of the reward."""

    @property
    def loss(self) -> PreferenceLoss:
        """Properties of the loss."""
        return PREFERENCE_LOSSES[self.loss_type]

    @property
    def is_needed(self) -> bool:
        return self.loss.reference


class Kto(Reference):
    """KTO: training on single answers, each labeled desirable or undesirable."""

    beta: Positive = 0.1
    """Strength of the pull towards the reference; it has no unit."""
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """Loss to minimize; apo_zero_unpaired is that of kto without the divergence that it estimates."""
    desirable_weight: Positive = 1.0
    """Weight of the loss of desirable answers."""
    undesirable_weight: Positive = 1.0
    """Weight of the loss of undesirable answers."""

    @property
    def has_baseline(self) -> bool:
        return self.loss_type == "kto"


class Reward(Section):
    """Training of a reward model, which gives an answer a score."""

    center_rewards_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the mean square of a pair's sum of rewards, which keeps rewards near 0; 0: no such term."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed probability that the two answers of a pair are swapped."""
    share_prompts: bool | None = None
    """Compute a pair's prompt once for both answers; by default true if rows are packed and model.attention
    is auto or sdpa."""


class Classify(Section):
    """Training of a classifier, which gives a row one of several labels."""

    labels: Strings = ()
    """Names of the labels, in the order of the model's scores; required."""


class Distill(Reference):
    """Distillation from a teacher, which is the reference."""

    is_initial_policy = False

    reference: Literal["precomputed", "live"] = "precomputed"
    """Where the teacher's log-probabilities come from: precomputed (from disk) or live (a second engine)."""
    reference_model: Text | None = None
    """Hub id or folder of the teacher, which must have the student's tokenizer; required."""
    recheck_rows: Natural = 0
    """Number of random stored examples that the teacher, loaded for it, scores again at a start; 0: none."""
    top_k: Count = 64
    """The teacher's most probable tokens of each target that are compared one by one; all others are compared
    as one."""
    loss_type: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """Divergence of the student from the teacher: forward_kl, KL(teacher ‖ student), reverse_kl, KL(student ‖
    teacher), or jsd, the generalized Jensen-Shannon divergence."""
    beta: Part = 0.5
    """Weight of the teacher in the mixture of jsd: near 0 it is like forward_kl, near 1 like reverse_kl."""
    temperature: Positive = 1.0
    """Divisor of both models' logits before the divergence; the loss is not multiplied by its square."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Weight of the divergence in the loss; 1 - weight is that of the next-token loss."""

    @property
    def teacher_keys(self) -> dict[str, float]:
        return {"top_k": self.top_k, "temperature": self.temperature}

    @property
    def teacher_values(self) -> int:
        return 2 * self.top_k + 1


SECTIONS: dict[str, type[Section]] = {
    "dpo": Dpo, "kto": Kto, "reward": Reward, "classify": Classify, "distill": Distill,
}  # fmt: skip
"""The sections of tasks, by name: see `TaskFacts.section`."""


class Offload(Section):
    """Where a part of the training state is stored."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where it is stored: none (GPU memory), cpu (host memory) or nvme."""
    nvme_path: Text | None = None
    """Folder on a local disk of each host; device nvme needs it."""
    pin_memory: bool | None = None
    """Pin its host memory, for faster copies; by default true if the hosts have enough memory."""


class Parallel(Section):
    """How the training state and the layers are divided among the ranks."""

    zero_stage: int = Field(default=1, ge=0, le=3)
    """What is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters. By default 2 in
    bf16 without a pipeline, unless the accelerator is cpu; else 1."""
    pipeline_stages: Count = 1
    """Number of pipeline stages, each with consecutive layers; 1: no pipeline."""
    pipeline_cut: Literal["parameters"] | Annotated[tuple[Count, ...], FromList] = "parameters"
    """Layers per stage: a list of numbers, or parameters, which balances the stages' parameters."""
    sequence_parallel: Count = 1
    """Number of ranks in a group, which split the tokens of each row among them (Ulysses); 1: no split."""
    sequence_parallel_across_hosts: bool = False
    """Allow a group to have ranks on several hosts; its all-to-alls in each layer then use the network."""
    zero_hpz_partition_size: Count = 1
    """Number of consecutive ranks, normally those of a host, that keep a second copy of the parameters among
    them at ZeRO 3, from which each gathers them until the next step (DeepSpeed's hpZ); 1: no copy."""
    offload_optimizer: Offload = Offload()
    """Where optimizer states and fp32 master weights are stored and updated."""
    offload_parameters: Offload = Offload()
    """Where parameters are stored while they are not in use (ZeRO 3)."""
    allow_torch_adam: bool = False
    """Use torch's Adam if DeepSpeed's CPU Adam cannot be compiled, instead of stopping."""


class Train(Section):
    """Batch sizes, length of the run, precision. Give two of the three batch keys; the third follows."""

    global_batch_size: Count | None = None
    """Examples per optimizer step, over all ranks."""
    micro_batch_size: Count | None = None
    """Examples per forward pass of one data-parallel rank, or of a group of ranks that split rows."""
    accumulation_steps: Count | None = None
    """Micro-batches per optimizer step of one data-parallel rank, or of such a group."""
    num_train_epochs: Positive = 1.0
    """Passes over the training rows; a fraction is allowed."""
    max_steps: Count | None = None
    """Number of optimizer steps; overrides num_train_epochs."""
    eval_every: Count | None = None
    """Optimizer steps between evaluations of data.eval; by default there is only one, at the end."""
    eval_on_start: bool = False
    """Also evaluate data.eval before the first step."""
    log_every: Count = 1
    """Optimizer steps between records of metrics.jsonl. A log of the output has a line every ten steps."""
    precision: Literal["bf16", "fp32", "fp16"] = "bf16"
    """Data type of the weights in forward and backward; master weights and moments are fp32."""
    tf32: bool = False
    """Let GPUs multiply fp32 matrices as TF32, with 10 bits of mantissa; for precision fp32."""
    reduce_dtype: Literal["fp32", "bf16"] | None = None
    """Data type in which gradients are reduced over the ranks; by default fp32."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """2-norm to which the gradient is clipped; 0 switches clipping off."""
    seed: int = Field(default=42, ge=0, le=2**32 - 1)
    """Seed of newly initialized weights, of the order of rows and of dropout."""
    max_consecutive_nonfinite: Count = 3
    """Number of consecutive steps with an infinite or NaN gradient at which the run stops; such a gradient is
    never applied."""
    compare_ranks_every: Count | None = 100
    """Steps between bitwise comparisons of replicated weights; null: only before checkpoints."""
    neftune_alpha: Positive | None = None
    """NEFTune: α of noise within ±α ÷ √(tokens × hidden size) added to embeddings in training, such as 5."""
    label_smoothing: Beta = 0.0
    """Probability mass that is taken from the target and spread evenly over all tokens."""


class OptimGroup(Section):
    """A group of parameters with its own learning rate or weight decay."""

    parameters: Text
    """Pattern for the names of the parameters in this group."""
    learning_rate: float | None = Field(default=None, ge=0)
    """Peak learning rate of this group; by default optim.learning_rate."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of all parameters of this group; by default as without a group."""


Schedule = Literal[
    "linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt", "cosine_with_min_lr", "wsd"
]
DecayType = Literal["cosine", "linear", "1-sqrt"]


class Optim(Section):
    """The optimizer and its learning rate, a function of the step alone."""

    name: OptimizerName = "adamw"
    """The optimizer; adamw_8bit stores AdamW's moments in 8 bits (bitsandbytes), muon is for the matrices of
    the layers, beside adamw for the rest."""
    learning_rate: Positive
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of matrices and embeddings; biases, norms and other vectors have none."""
    lr_scheduler_type: Schedule = "linear"
    """Learning rate schedule, equal to that of transformers.get_scheduler."""
    warmup_steps: Natural | None = None
    """Number of warm-up steps, from 0 (wsd: from min_lr_ratio); alternatively give warmup_ratio."""
    warmup_ratio: Beta | None = None
    """Fraction of all steps that are warm-up, rounded up to a step; alternatively give warmup_steps."""
    min_lr_ratio: Share | None = None
    """Lowest learning rate of cosine_with_min_lr and wsd, as a fraction of learning_rate."""
    decay_steps: Count | None = None
    """Number of last steps in which wsd's learning rate falls; alternatively give decay_ratio."""
    decay_ratio: float | None = Field(default=None, gt=0, le=1)
    """Fraction of all steps, rounded up to a step, in which wsd's learning rate falls; alternatively give
    decay_steps."""
    decay_type: DecayType | None = None
    """Shape of wsd's decay; by default cosine, as in transformers."""
    betas: Annotated[tuple[Beta, Beta], FromList] = (0.9, 0.999)
    """Decay per step of adamw's first and second moment."""
    eps: Positive = 1e-8
    """Added to the root of adamw's second moment."""
    momentum: Beta = 0.0
    """Momentum factor of sgd."""
    muon_momentum: Beta = 0.95
    """Momentum factor of muon."""
    scale_with_batch: Literal["none", "linear", "sqrt"] = "none"
    """Scale learning_rate by global batch ÷ base_batch_size (linear), or by its square root (sqrt)."""
    base_batch_size: Count | None = None
    """Global batch size, in examples, for which learning_rate was tuned; scale_with_batch needs it."""
    groups: Annotated[tuple[OptimGroup, ...], FromList] = ()
    """Groups of parameters with their own learning rate or weight decay."""

    @property
    def facts(self) -> OptimizerFacts:
        """Properties of the optimizer."""
        return OPTIMIZERS[self.name]


class Checkpoint(Section):
    """When checkpoints are written and which stay on disk; a run always writes one at its end."""

    every: Count | None = 200
    """Optimizer steps between checkpoints; null: only one, at the end."""
    keep_last: Count | None = 2
    """Number of newest checkpoints to keep on disk; null keeps all."""
    resume: Text = "auto"
    """auto: resume from the newest checkpoint of the run's folder, if there is one; never: refuse a folder
    that has one; or a checkpoint to start from: its folder, a file latest or best, or a run (its newest)."""
    keep_best: Count | None = None
    """Number of checkpoints with the lowest eval/loss to keep as well; each checkpoint is evaluated."""


class Accelerator(Section):
    """The device of each slot of a host; with it, a machine without such a device can plan a run."""

    name: Text
    """cpu, or the GPU's name, such as H100."""
    memory_gib: Positive | None = None
    """Memory of one device, in GiB (2^30 bytes); by default what nvidia-smi shows for a GPU of this name."""
    peak_tflops: Positive | None = None
    """Peak throughput of one device at the run's precision, in 10^12 operations per second."""


class Cluster(Section):
    """The hosts of the run. A run with another number of processes stops at its start."""

    hosts: dict[str, Annotated[int, Field(ge=1, le=1024)]] = Field(min_length=1)
    """Number of processes (slots) per host, as {host: slots}, in the order of the ranks; a key may be a range
    of hosts, such as node[01-16]."""
    interface: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,14}$")
    """Network interface for the traffic between hosts, such as eth0."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables to set on every host."""
    accelerator: Accelerator | None = None
    """The device of each slot; by default that of the machine."""
    host_memory_gib: Positive | None = None
    """Memory that the run may use on each host, in GiB (2^30 bytes)."""
    launcher: Literal["dsft", "deepspeed", "torchrun", "slurm"] = "dsft"
    """What dsft launch reaches the hosts with: srun (slurm) or ssh (all others)."""
    hang_timeout: Count | None = None
    """Seconds without a new step, evaluation or save after which a rank is taken to hang: dsft launch names
    it and ends the run with exit code 124. Other launchers do not check; there, a collective times out after
    30 minutes."""
    time_limit: Count | None = None
    """Seconds after the start at which the run finishes its step, saves and exits with 75; the same command
    resumes it. At least one step is trained; leave time for two steps and a save."""
    min_hosts: Count | None = None
    """Smallest number of hosts with which the run starts and continues."""


class Wandb(Section):
    """Weights & Biases. The run's name is the spec's."""

    project: Text = "dsft"
    """Project of the run."""
    entity: Text | None = None
    """User or team that owns the run; by default that of the API key."""
    group: Text | None = None
    """Group in which the run is shown."""
    tags: Strings = ()
    """Tags of the run."""
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online if an API key is found, else offline."""


class SwanLab(Section):
    """SwanLab. The run's name is the spec's."""

    project: Text = "dsft"
    """Project of the run."""
    workspace: Text | None = None
    """User or organization that owns the run; by default that of the API key."""
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online if SWANLAB_API_KEY is set, else offline."""


class Spec(Section):
    """One experiment."""

    name: str = Field(pattern=NAME_PATTERN)
    """Name of the run and of its folder: at most 100 letters, digits, '.', '_' and '-'."""
    task: TaskName
    """Training task: sft (answers in conversations), pretrain (plain text), dpo (preferences), kto (answers
    labeled desirable or undesirable), reward (a reward model of preferences), classify (rows with one of
    several labels) or distill (answers, with a teacher)."""
    model: Model
    """The model to train."""
    data: Data
    """The rows to train on and to evaluate."""
    dpo: Dpo | None = None
    """Settings of task dpo; by default the defaults of its keys."""
    kto: Kto | None = None
    """Settings of task kto; by default the defaults of its keys."""
    reward: Reward | None = None
    """Settings of task reward; by default the defaults of its keys."""
    classify: Classify | None = None
    """Settings of task classify, which needs the labels."""
    distill: Distill | None = None
    """Settings of task distill, which needs the teacher in reference_model."""
    parallel: Parallel = Parallel()
    """How state and layers are divided among the ranks."""
    train: Train
    """Batch sizes, length of the run, precision."""
    optim: Optim
    """The optimizer and its learning rate schedule."""
    checkpoint: Checkpoint = Checkpoint()
    """When checkpoints are written and which are kept."""
    cluster: Cluster | None = None
    """The hosts; without this section the run accepts any number of processes."""
    wandb: Wandb | None = None
    """Weights & Biases; without this section used only if WANDB_PROJECT and an API key are set."""
    tensorboard: bool = False
    """Also write TensorBoard's files, to OUTPUT_DIR/NAME/tensorboard."""
    swanlab: SwanLab | None = None
    """SwanLab; without this section nothing is sent to it."""
    output_dir: Text = "runs"
    """Folder of all runs, shared by all hosts."""

    @property
    def task_kind(self) -> TaskFacts:
        """Properties of the task."""
        return TASKS[self.task]

    @property
    def of_task(self) -> Section | None:
        """The section of the task's own keys, or its defaults if the spec has none; None: a task without."""
        name = self.task_kind.section
        return None if name is None else getattr(self, name) or SECTIONS[name]()

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels of rows that the loss uses, by their number; empty if it uses none."""
        if self.task_kind.label == "class":
            return tuple(getattr(self.of_task, "labels", ()))
        return LABELS if self.task_kind.label == "answer" else ()

    @property
    def reference(self) -> Reference | None:
        """The keys of the loss's reference; None if it needs none."""
        own = self.of_task
        return own if isinstance(own, Reference) and own.is_needed else None

    def own_key(self, name: str) -> str:
        """Return a key of the task's section as messages name it, such as "dpo.reference"."""
        return f"{self.task_kind.section}.{name}"

    @property
    def longest_example(self) -> int:
        """Maximum tokens of an example: data.max_length limits each of its rows."""
        return self.task_kind.rows * self.data.max_length

    @property
    def accelerator(self) -> Accelerator | None:
        """The device in cluster.accelerator; None if the spec does not name it."""
        return self.cluster.accelerator if self.cluster else None

    @property
    def is_on_cpu(self) -> bool:
        """Whether cluster.accelerator is the CPU."""
        return self.accelerator is not None and self.accelerator.name.lower() == "cpu"

    @model_validator(mode="after")
    def _default_zero_stage(self) -> Spec:
        """Set the default of zero_stage. It depends on the spec alone, so that generated files are the same
        on every machine. The key stays out of `model_fields_set`."""
        given = "zero_stage" in self.parallel.model_fields_set
        has_pipeline = self.parallel.pipeline_stages > 1
        if not given and self.train.precision == "bf16" and not has_pipeline and not self.is_on_cpu:
            parallel = self.parallel.model_copy()
            parallel.__dict__["zero_stage"] = 2
            self.__dict__["parallel"] = parallel
        return self

    @model_validator(mode="after")
    def _set_head(self) -> Spec:
        """Tell the model section which last layer the task trains, and what it gives."""
        model = self.model.model_copy()
        model._head, model._labels = self.task_kind.head, self.labels
        self.__dict__["model"] = model
        return self
