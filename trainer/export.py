"""A checkpoint as a Hugging Face model folder: `gristmill export model RUN_OR_CHECKPOINT --out DIR`.

    model.safetensors        weights; above MAX_FILE_BYTES several files and model.safetensors.index.json
    config.json              LlamaForCausalLM, or Qwen3ForCausalLM for a model with qk-norm: the same function
    generation_config.json
    tokenizer.json, tokenizer_config.json
    README.md                the model card: shape, data by source, settings, scores
    export.json              files and checksums, written last; a folder without it is not a whole export

Weights are copied, not converted: our names and layouts are theirs. Files come out the same for the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import orjson
import torch
from safetensors.torch import save
from torch import Tensor

from gristmill.mixtures.consumption import CONSUMPTION_FILE, Consumption
from gristmill.stages.shards import checksum, publish_bytes
from gristmill.tokenize.tokenizer_json import parse, vocabulary
from gristmill.trainer.config import BYSTANDERS, SCORES_FILE, TrainConfig, TrainError
from gristmill.trainer.model import count_parameters, flops_per_token
from gristmill.trainer.score import Scores
from gristmill.trainer.trained import Trained

MAX_FILE_BYTES = 5_000_000_000  # of one file of weights, as transformers' own save_pretrained did for years
EXPORT_FILE = "export.json"
Dtype = Literal["float32", "bfloat16"]
DTYPES: dict[str, Dtype] = {"float32": "float32", "bfloat16": "bfloat16"}


def export_model(trained: Trained, out: str, dtype: Dtype = "float32", max_file_bytes: int = MAX_FILE_BYTES) -> Path:
    """Writes the folder. Raises TrainError where it is not empty, or the checkpoint's numbers are not finite."""
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrainError(f"{folder}: there is something already. Name a folder that is empty or not there.")
    config, tokenizer, card = model_config(trained, dtype), tokenizer_config(trained), model_card(trained)
    folder.mkdir(parents=True, exist_ok=True)
    names = []

    def write(name: str, data: bytes) -> None:
        publish_bytes(str(folder / name), data)
        names.append(name)

    for name, data in _weight_files(trained, getattr(torch, dtype), max_file_bytes):
        write(name, data)
    write("config.json", _json(config))
    eos = trained.manifest.eos_id
    write("generation_config.json", _json({"bos_token_id": eos, "eos_token_id": eos, "do_sample": True}))
    write("tokenizer.json", trained.tokenizer_json)
    write("tokenizer_config.json", _json(tokenizer))
    write("README.md", card.encode())
    record = {
        "checkpoint": trained.checkpoint.name,
        "dtype": dtype,
        "files": {name: checksum(str(folder / name)) for name in names},
    }
    publish_bytes(str(folder / EXPORT_FILE), _json(record))
    return folder


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n"


def hugging_face_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _weight_files(trained: Trained, dtype: torch.dtype, max_file_bytes: int) -> Iterator[tuple[str, bytes]]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in trained.model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise TrainError(f"{trained.checkpoint}: {name} is not finite; export a checkpoint before it.")
        tensors[hugging_face_name(name)] = parameter.detach().to(dtype).contiguous()
    groups: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if groups[-1] and sum(t.nbytes for t in groups[-1].values()) + tensor.nbytes > max_file_bytes:
            groups.append({})
        groups[-1][name] = tensor
    if len(groups) == 1:
        yield "model.safetensors", save(groups[0], {"format": "pt"})
        return
    places = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        places.update(dict.fromkeys(group, file))
        yield file, save(group, {"format": "pt"})
    size = sum(t.nbytes for t in tensors.values())
    yield "model.safetensors.index.json", _json({"metadata": {"total_size": size}, "weight_map": places})


def model_config(trained: Trained, dtype: Dtype) -> dict[str, Any]:
    """config.json. `rope_theta` is for transformers before 5, `rope_parameters` for 5."""
    shape, eos = trained.model.shape, trained.manifest.eos_id
    kind = ("qwen3", "Qwen3ForCausalLM") if shape.qk_norm else ("llama", "LlamaForCausalLM")
    return {
        "architectures": [kind[1]],
        "model_type": kind[0],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.width // shape.heads,
        "hidden_act": "silu",
        "max_position_embeddings": trained.run.config.seq_len,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_base},
        "initializer_range": shape.init_std,
        "tie_word_embeddings": shape.tied,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": eos,  # a document starts after the end of the one before
        "eos_token_id": eos,
        "torch_dtype": dtype,
    } | ({} if shape.qk_norm else {"mlp_bias": False})


def tokenizer_config(trained: Trained) -> dict[str, Any]:
    """tokenizer_config.json. Raises TrainError where the tokenizer has no token of the end-of-text id."""
    eos = trained.manifest.eos_id
    text = next((t for t, i in vocabulary(parse(trained.tokenizer_json)).items() if i == eos), None)
    if text is None:
        raise TrainError(
            f"{trained.run.tokens}: its tokenizer.json has no token of id {eos}, the end of text of its shards."
        )
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": text,
        "eos_token": text,
        "pad_token": text,
        "clean_up_tokenization_spaces": False,
        "model_max_length": trained.run.config.seq_len,
    }


def model_card(trained: Trained) -> str:
    """README.md: what the model is, what it saw of each source, how it was trained, what it scored."""
    config, progress, shape = trained.run.config, trained.state.progress, trained.model.shape
    tokens = progress.windows * config.seq_len
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [gristmill]",
        "---",
        f"# {trained.folder.resolve().name}",
        f"A base language model, trained with Gristmill on the mixture `{Path(trained.run.mixture).name}`. It was made "
        "to measure data: it follows no instructions and nothing was done to make it safe.",
        "",
        "| model | |",
        "|---|---|",
        f"| parameters | {count_parameters(shape):,} |",
        f"| layers, width, heads, key-value heads | {shape.layers}, {shape.width}, {shape.heads}, {shape.kv_heads} |",
        f"| vocabulary, context | {shape.vocab_size:,} ids, {config.seq_len:,} tokens |",
        f"| trained on | {tokens:,} tokens in {progress.step:,} of {config.total_steps:,} steps |",
        f"| compute | {tokens * flops_per_token(shape, config.seq_len):.3g} FLOPs |",
        "",
        *_data_table(trained),
        *_scores_table(trained),
        "## Settings",
        "```json",
        orjson.dumps(_settings(config), option=orjson.OPT_INDENT_2).decode(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _settings(config: TrainConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude=BYSTANDERS | {"threads"})


def _data_table(trained: Trained) -> list[str]:
    """Seen tokens of each source of the mixture; then what the token shards hold of each source of theirs."""
    lines = ["## Data"]
    if (trained.checkpoint / CONSUMPTION_FILE).exists():  # checkpoints of earlier versions have no books
        seen = Consumption.read(trained.checkpoint / CONSUMPTION_FILE)
        lines += ["| source of the mixture | tokens seen, with those of runs before this one |", "|---|---|"]
        lines += [f"| {name} | {use.windows * seen.seq_len:,} |" for name, use in sorted(seen.sources.items())]
        lines.append("")
    lines += ["| token shards of | tokens | documents | UTF-8 bytes | documents held out |", "|---|---|---|---|---|"]
    for source in sorted({shard.source for shard in trained.manifest.shards}):
        shards = [shard for shard in trained.manifest.shards if shard.source == source]
        train = [shard for shard in shards if shard.split == "train"]
        held = sum(shard.documents for shard in shards if shard.split == "holdout")
        sums = [sum(getattr(shard, what) for shard in train) for what in ("tokens", "documents", "bytes")]
        lines.append(f"| {source} | " + " | ".join(f"{n:,}" for n in (*sums, held)) + " |")
    return [*lines, ""]


def _scores_table(trained: Trained) -> list[str]:
    """Bits per byte on held-out documents, where the run scored just this checkpoint."""
    path = trained.folder / SCORES_FILE
    if trained.state.progress.step < trained.run.config.total_steps or not path.exists():
        return []
    scores = Scores.load(path)
    rows = [f"| {source} | {value:.4f} |" for source, value in scores.bits_per_byte.items()]
    return ["## Held-out documents", "| source | bits per byte |", "|---|---|", *rows, ""]
