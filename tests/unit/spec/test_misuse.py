"""Bad specs and the exact message of each, in golden/. DSFT_UPDATE_GOLDEN=1 rewrites the messages."""

# ruff: noqa: E501  (a bad spec stays on the lines that its message names)

import os
from pathlib import Path

import pytest

from dsft.errors import DsftError
from dsft.spec.load import load_spec

GOLDEN = Path(__file__).parent / "golden"

HEAD = "name: small\ntask: sft\n"
MODEL = "model: {from_config: {model_type: llama, num_hidden_layers: 4, max_position_embeddings: 1024}}\n"
DATA = "data: {train: [{path: rows.jsonl}], max_length: 128}\n"
TRAIN = "train: {micro_batch_size: 2, accumulation_steps: 4}\n"
OPTIM = "optim: {learning_rate: 1e-3}\n"
GOOD = HEAD + MODEL + DATA + TRAIN + OPTIM


def spec(
    *, head: str = HEAD, model: str = MODEL, data: str = DATA, train: str = TRAIN, optim: str = OPTIM
) -> str:
    return head + model + data + train + optim


# name -> the spec's text, or the text and overrides
CASES: dict[str, str | tuple[str, list[str]]] = {
    # the YAML itself
    "empty": "",
    "not_a_mapping": "- a\n- b\n",
    "syntax": GOOD + "cluster: hosts: {a: 1}\n",
    "tab": "name: small\ntask:\n\tsft\n",
    "duplicate_key": GOOD + "output_dir: a\nname: other\noutput_dir: b\n",
    "tag": GOOD + "output_dir: !!python/object/apply:os.system [echo]\n",
    "tag_of_a_number": GOOD + "output_dir: !!float x\n",
    "alias_bomb": "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
    + "".join(f"{k}: &{k} [{','.join([f'*{p}'] * 10)}]\n" for p, k in ("ab", "bc", "cd", "de", "ef")),
    "two_documents": GOOD + "---\nname: second\n",
    "keys_that_are_no_texts": spec(data="data: {train: [{path: rows.jsonl, 1: 2, [a]: 3}]}\n"),
    "deep": "a: " + "[" * 60 + "]" * 60 + "\n",
    "control_characters": spec(head='name: "a\\e[2Jb"\ntask: "s\\u202eft"\n'),
    # single values
    "wrong_types": spec(
        train='train: {micro_batch_size: "8", accumulation_steps: 1.5, max_steps: 1e3, seed: true}\n'
    ),
    "yes_is_a_text": spec(model="model: {from_config: {model_type: llama}, gradient_checkpointing: yes}\n"),
    "out_of_range": GOOD + "parallel: {zero_stage: 4, pipeline_stages: 0}\ncheckpoint: {every: -1}\n",
    "not_finite": spec(optim="optim: {learning_rate: 1e999, eps: .inf, betas: [0.9, 1.0]}\n"),
    "not_offered": spec(optim="optim: {learning_rate: 1, name: adam, lr_scheduler_type: cosin}\n"),
    "missing": "name: small\ndata: {}\n",
    "bad_name": spec(head="name: ../other\ntask: sft\n"),
    "sections_of_the_wrong_kind": spec(data="data: {train: rows.jsonl}\n", train="train: [1]\n")
    + "parallel:\n",
    # names of other tools
    "config_of_another_tool": "model_name_or_path: models/a\nstage: sft\nlora_target: all\ncutoff_len: 128\n"
    "plot_loss: true\nddp_timeout: 180000000\nlearning_rate: 1e-4\n",
    "aliases": GOOD
    + "per_device_train_batch_size: 4\ncutoff_len: 512\nlearning_rate: 1e-4\nbf16: true\ndeepspeed: ds.json\n"
    + "gradient_accumulation_steps: 8\nsave_total_limit: 2\nstage: dpo\npref_beta: 0.1\ndataset: alpaca\n",
    "aliases_in_sections": spec(
        model="model: {base_model: a/b}\n",
        train="train: {batch_size: 8, epochs: 2, micro_batch_sise: 2}\n",
        optim="optim: {lr: 1e-5, learning_rat: 1e-5}\n",
    )
    + "parallel: {stage: 3, offload_param: {device: cpu}, wibble: 1}\n",
    "preferences_as_others_name_them": spec(head="name: small\ntask: orpo\n")
    + "dpo: {loss_type: cdpo, cpo_alpha: 1.0, ref_model: a/b, max_prompt_length: 64}\n",
    "not_offered_by_name": spec(
        model="model: {name_or_path: a/b, load_in_4bit: true, use_unsloth: false, finetuning_type: oft}\n",
        train="train: {micro_batch_size: 2, accumulation_steps: 4, precision: fp8, auto_find_batch_size: true}\n",
        optim="optim: {learning_rate: 1e-3, name: paged_lion_8bit}\n",
    )
    + "parallel: {tensor_parallel_size: 2, sequence-parallel-size: 4, offload_optimizer: {ratio: 0.5}}\n"
    + "adapter: qlora\nfsdp: full_shard\n",
    "task_of_rewards": spec(head="name: small\ntask: grpo\n"),
    "quantized_config": spec(
        model="model: {from_config: {model_type: llama, quantization_config: {quant_method: gptq}}}\n"
    ),
    # combinations
    "rows_split_over_too_many_ranks": spec(
        model="model: {from_config: {model_type: llama, num_attention_heads: 12}, attention: eager, compile: true}\n",
        data="data: {train: [{path: rows.jsonl}], max_length: 7}\n",
    )
    + "parallel: {sequence_parallel: 8}\ncluster: {hosts: {a: 4, b: 4}}\n",
    "rows_not_split_across_hosts": GOOD + "parallel: {sequence_parallel_across_hosts: true}\n",
    "pipeline_with_zero_3": GOOD + "parallel: {zero_stage: 3, pipeline_stages: 2}\n",
    "pipeline_and_the_model": spec(model="model: {from_config: {model_type: mamba, num_hidden_layers: 4}}\n")
    + "parallel: {pipeline_stages: 8, pipeline_cut: [2, 3]}\n",
    "cut_by_another_word": GOOD + "parallel: {pipeline_stages: 2, pipeline_cut: balanced}\n",
    "cut_of_no_layers": spec(train="train: {micro_batch_size: 1, accumulation_steps: 1, precision: [bf16]}\n")
    + "parallel: {pipeline_stages: 2, pipeline_cut: [0, 4]}\n",
    "max_length_over_positions": spec(data="data: {train: [{path: rows.jsonl}], max_length: 2048}\n"),
    "two_models": spec(model="model: {name_or_path: a/b, from_config: {hidden_size: 8}}\n"),
    "no_model": spec(model="model: {}\n"),
    "one_batch_size": spec(train="train: {global_batch_size: 64}\n"),
    "batch_of_no_world": spec(train="train: {global_batch_size: 10, micro_batch_size: 4}\n"),
    "infinite_config": spec(model="model: {from_config: {model_type: llama, rope: {theta: [1e999]}}}\n"),
    "no_batch_size": spec(train="train: {}\n"),
    "warmup_twice": spec(optim="optim: {learning_rate: 1, warmup_steps: 10, warmup_ratio: 0.1}\n"),
    "schedules": spec(
        optim="optim: {learning_rate: 1, lr_scheduler_type: constant, warmup_steps: 10, min_lr_ratio: 0.1, momentum: 0.9}\n"
    ),
    "wsd_without_decay": spec(optim="optim: {learning_rate: 1, lr_scheduler_type: wsd}\n"),
    "wsd_longer_than_the_run": spec(
        train="train: {micro_batch_size: 2, accumulation_steps: 4, max_steps: 20}\n",
        optim="optim: {learning_rate: 1, lr_scheduler_type: wsd, warmup_steps: 5, decay_steps: 16}\n",
    ),
    "wsd_longer_by_ratios": spec(
        optim="optim: {learning_rate: 1, lr_scheduler_type: wsd, warmup_ratio: 0.2, decay_ratio: 0.9}\n"
    ),
    "wsd_twice": spec(
        optim="optim: {learning_rate: 1, lr_scheduler_type: wsd, decay_steps: 3, decay_ratio: 0.1}\n"
    ),
    "decay_of_cosine": spec(
        optim="optim: {learning_rate: 1, lr_scheduler_type: cosine, decay_steps: 3, decay_type: linear}\n"
    ),
    "scaled_from_nothing": spec(optim="optim: {learning_rate: 1, scale_with_batch: sqrt}\n"),
    "base_without_scale": spec(optim="optim: {learning_rate: 1, base_batch_size: 64}\n"),
    "fp16_that_is_not_built": spec(
        train="train: {micro_batch_size: 2, accumulation_steps: 4, precision: fp16, reduce_dtype: bf16}\n"
    )
    + "parallel: {zero_stage: 0, pipeline_stages: 2}\ncluster: {hosts: {a: 2}, accelerator: {name: cpu}}\n",
    "keep_best_of_nothing": GOOD + "checkpoint: {every: null, keep_best: 2}\n",
    "evaluation_sets_of_one_name": spec(
        data="data: {train: [{path: rows.jsonl}], eval: [{path: a/rows.jsonl}, {path: b/rows.json}, {path: c.jsonl, name: rows}], max_length: 9}\n"
    ),
    "evaluation_set_of_a_bad_name": spec(
        data="data: {train: [{path: rows.jsonl, name: t}], eval: [{path: a.jsonl, name: a/loss}], max_length: 9}\n"
    ),
    "sources_of_one_name": spec(
        data="data: {train: [{path: a/rows.jsonl}, {path: b/rows.jsonl}, {path: rows.jsonl, name: b}], "
        "eval: [{path: b.jsonl}], eval_fraction: 0.1, max_length: 9}\n"
    ),
    "held_out_twice": spec(
        data="data: {train: [{path: rows.jsonl}], eval_fraction: 0.1, eval_count: 4, max_length: 9}\n"
    ),
    "weights_of_some": spec(
        data="data: {train: [{path: rows.jsonl, weight: 1.0}, {path: builtin:quickstart}], "
        "eval: [{path: builtin:quickstart-heldout, weight: 2.0}], max_length: 9}\n"
    ),
    "min_lr_missing": spec(optim="optim: {learning_rate: 1, lr_scheduler_type: cosine_with_min_lr}\n"),
    "split_in_sft": spec(data="data: {train: [{path: rows.jsonl}], on_too_long: split}\n"),
    "budget_without_packing": spec(
        data="data: {train: [{path: rows.jsonl}], max_tokens_per_micro_batch: 4096, max_length: 128}\n"
    ),
    "budget_under_max_length": spec(
        data="data: {train: [{path: rows.jsonl}], packing: true, max_tokens_per_micro_batch: 100, max_length: 128}\n"
    ),
    "packed_documents_are_not_cut": spec(
        head="name: small\ntask: pretrain\n",
        data="data: {train: [{path: rows.jsonl}], packing: true, on_too_long: drop, max_length: 128}\n",
    ),
    "flash_in_fp32": spec(
        model="model: {name_or_path: a/b, attention: flash_attention_2}\n",
        train="train: {micro_batch_size: 2, accumulation_steps: 4, precision: fp32}\n",
    ),
    "eval_without_rows": spec(train="train: {micro_batch_size: 2, accumulation_steps: 4, eval_every: 10}\n"),
    "adapter_reference_on_a_disk": spec(
        head=HEAD.replace("sft", "dpo"),
        model="model: {name_or_path: org/model, lora: {rank: 8}}\n",
    )
    + "dpo: {reference: adapter}\n"
    + "parallel: {zero_stage: 3, offload_parameters: {device: nvme, nvme_path: /d}}\n",
    "offload_at_zero_0": GOOD + "parallel: {zero_stage: 0, offload_optimizer: {device: cpu, nvme_path: /d}, "
    "offload_parameters: {pin_memory: false}}\n",
    "hosts": GOOD
    + "cluster: {hosts: {-oProxyCommand=x: 1, 'a,b': 1, no_de: 1, 'nöde': 1, 300.1.1.1: 1, node1: 1, NODE1: 1}}\n",
    "environment": GOOD
    + 'cluster: {hosts: {a: 1}, env: {HF_TOKEN: hf_xxxxxx, "A B": c, NCCL: "a\\nb", N: 1}, interface: "-x"}\n',
    # files
    "files": GOOD.replace("rows.jsonl", "nowhere.jsonl").replace(
        "max_length: 128", "chat_template: no.jinja, cache_dir: rows.jsonl"
    )
    + "checkpoint: {resume: runs/none}\n",
    "builtin": GOOD.replace("rows.jsonl", '"builtin:quikstart"'),
    "patterns_and_formats": GOOD.replace(
        "{path: rows.jsonl}", '{path: "data/*.jsonl"}, {path: rows.parquet}, {path: "."}'
    ),
    "formats_of_other_tasks": spec(
        head="name: small\ntask: pretrain\n",
        data="data: {train: [{path: rows.jsonl, format: messages}, {path: rows.jsonl, columns: {body: text}}], "
        "eval: [{path: rows.jsonl, format: text, columns: {messages: talk}}]}\n",
    ),
    "model_folder": spec(model="model: {name_or_path: ./nowhere, tokenizer: rows.jsonl}\n"),
    "a_part_of_the_model": spec(
        model="model: {from_config: {model_type: llama}, lora: {target_modules: q_proj}, trainable: []}\n"
    ).replace("optim: {", "optim: {groups: [{parameters: '*'}], "),
    "experts_of_a_dense_model": spec(
        model="model: {from_config: {model_type: llama, output_router_logits: true}, experts: {balance: sequence, balance_weight: 1, freeze_router: true}}\n"
    ),
    "balance_without_a_weight": spec(
        model="model: {from_config: {model_type: mixtral}, lora: {}, compile: true, experts: {balance: global_batch, freeze_router: true}}\n"
    ),
    "weight_without_a_balance": spec(
        model="model: {from_config: {model_type: mixtral}, experts: {balance_weight: 0.1}}\nrouter_aux_loss_coef: 0.01\n"
    ),
    # not built
    "not_built": spec(
        head="name: small\ntask: dpo\n",
        model="model: {name_or_path: a/b, attention: flex_attention, compile: true}\n",
        data="data: {train: [{path: rows.jsonl, weight: 2.0, format: sharegpt}], eval_count: 4}\n",
    )
    + "parallel: {offload_parameters: {device: nvme}, zero_stage: 2}\ncluster: {hosts: {a: 1}, min_hosts: 1}\n",
    # overrides
    "overrides": (
        GOOD,
        [
            "train", "train..x=1", "train.seed=a", "data.train.3.path=x", "name.x=1", "optim={lr: 1}",
            "seed=[", "=1",
        ],
    ),
    "compiled": spec(
        model="model: {from_config: {model_type: llama}, compile: true, attention: sdpa, "
        "lora: {use_dora: true}}\n",
        data="data: {train: [{path: rows.jsonl}], packing: true}\n",
    )
    + "parallel: {zero_stage: 3}\n",
    "kernels_on_a_cpu": spec(
        model="model: {from_config: {model_type: llama}, compile: true, kernels: liger}\n",
        train="train: {micro_batch_size: 2, accumulation_steps: 4, tf32: true}\n",
    )
    + "cluster: {hosts: {a: 2}, accelerator: {name: cpu}}\n",
    "kernels_and_tf32": spec(
        model="model: {from_config: {model_type: llama}, kernels: triton, use_liger_kernel: true}\n",
        train="train: {micro_batch_size: 2, accumulation_steps: 4, tf32: true}\n",
    ),
    "activations_of_no_checkpoint": spec(
        model="model: {from_config: {model_type: llama}, activation_offload: true, mlp_chunks: 4}\n"
    ),
    "no_mlp_chunk": spec(model="model: {from_config: {model_type: llama}, mlp_chunks: 0}\n"),
    "mlp_chunks_compiled": spec(
        model="model: {from_config: {model_type: llama}, gradient_checkpointing: true, mlp_chunks: 4, "
        "compile: true}\n"
    ),
    # everything at once
    "several": spec(
        head="name: a b\ntask: sfft\n",
        data="data: {train: [{path: gone.jsonl, weigth: 1}], max_length: 4k}\n",
        train='train: {global_batch_size: "8", eval_every: 5, precision: fp8}\n',
    )
    + "parallel: {zero_stage: 2, pipeline_stages: 2}\nname: again\ncluster: {hosts: {x_y: 0, z_z: 1}}\n",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    text, overrides = case if isinstance(case, tuple) else (case, [])
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()
    Path("spec.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(DsftError) as raised:
        load_spec("spec.yaml", overrides)
    message = f"{raised.value}\n"
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("DSFT_UPDATE_GOLDEN"):
        golden.write_text(message, encoding="utf-8")
    assert message == golden.read_text(encoding="utf-8")
    assert raised.value.exit_code == 2
    assert "Traceback" not in message
    assert message.replace("\n", "").isprintable()


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "0.0", "1.0", "-0.5", ".nan", '"yes"', "[2]", "null"])
def test_what_is_no_number_of_layers(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()
    Path("spec.yaml").write_text(
        spec(model=f"model: {{from_config: {{model_type: llama}}, gradient_checkpointing: {value}}}\n")
    )
    with pytest.raises(DsftError) as raised:
        load_spec("spec.yaml")
    _, line = str(raised.value).splitlines()
    assert "model.gradient_checkpointing: " in line and "N from 1 on for every N-th layer" in line


def test_no_golden_is_left_over() -> None:
    assert {file.stem for file in GOLDEN.glob("*.txt")} == set(CASES)
