"""Converts a Gemma checkpoint of Kaggle's Flax variations to a Hugging Face directory.

    python -m podrl.contrib.kaggle_gemma --checkpoint=gemma2-2b-it --size=gemma2-2b --out=DIR

Kaggle's archive holds an Orbax checkpoint in the layout of google-deepmind/gemma (gemma/gm/ckpts, gemma/gm/nn) and
`tokenizer.model`. Gemma 2 and Gemma 3 can be read; a Gemma 3 with images is converted without its vision tower.
"""

import collections
import json
import pathlib
import re
import sys
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import sentencepiece
from jax.sharding import SingleDeviceSharding

from podrl.data.train_tokenizer import CHAT_TEMPLATE, TURNS
from podrl.models import hf_save, orbax_files
from podrl.models.config import ModelConfig
from podrl.models.hf_config import config_from_hf
from podrl.models.parameters import is_param, param_specs
from podrl.models.sizes import SIZES
from podrl.runtime.arguments import Parser, as_sentence
from podrl.storage.storage import locate
from podrl.types import PyTree

# Names of the sizes whose checkpoints have this layout.
READ = tuple(name for name in SIZES if name.startswith(("gemma2", "gemma3")))
_PREFIX = re.compile(r"(params/)?(transformer/)?")
_LAYER = re.compile(r"layer_(\d+)/(.+)")
_IMAGES = re.compile(r"SigLiPFromPatches_0/.*|vision_encoder/.*|embedder/mm_.*")
_NORMS = {
    "pre_attention_norm/scale": "pre_attn_norm",
    "post_attention_norm/scale": "post_attn_norm",
    "pre_ffw_norm/scale": "pre_mlp_norm",
    "post_ffw_norm/scale": "post_mlp_norm",
    "attn/_query_norm/scale": "q_norm",
    "attn/_key_norm/scale": "k_norm",
}


def read(folder: str | pathlib.Path, size: str) -> tuple[ModelConfig, dict]:
    """Reads a checkpoint into the host's memory as podrl's parameter tree, in bfloat16.

    Rows of the embedding beyond the published vocabulary are left out: Gemma 2 has 128 rows without a token.

    Args:
      folder: directory of the Orbax checkpoint.
      size: size of the model, one of `READ`.

    Returns:
      (configuration, parameter tree of numpy arrays).

    Raises:
      ValueError: there is no checkpoint, it has another size, or leaves are missing or unknown.
    """
    if size not in READ:
        raise ValueError(f"--size={size} must be one of {', '.join(READ)}.")
    found = orbax_files.find_checkpoint(locate(folder))
    if found is None:
        raise ValueError(f"--checkpoint={folder} holds no Orbax checkpoint (a file _METADATA): give its directory.")
    stored = {path: leaf for path, leaf in orbax_files.stored_leaves(found).items() if not _IMAGES.match(_name(path))}
    by_name = {_name(path): path for path in stored}
    rows = stored[by_name["embedder/input_embedding"]].shape[0] if "embedder/input_embedding" in by_name else 0
    fields = dict(SIZES[size])
    fields["vocab_size"] = min(fields["vocab_size"], rows or fields["vocab_size"])
    config = config_from_hf(fields, where=size)
    leaves: dict[str, dict[int, np.ndarray]] = collections.defaultdict(dict)
    unknown = []
    for name, path in sorted(by_name.items()):
        layer = _LAYER.fullmatch(name)
        takes = _CONVERSIONS.get(layer[2] if layer else name)
        if takes is None:
            unknown.append(name)
            continue
        for leaf, value in takes(_array(found, path, stored[path].shape), config).items():
            leaves[leaf][int(layer[1]) if layer else 0] = value
    return config, _tree(leaves, config, unknown, f"{folder} ({size})")


def convert(checkpoint: str | pathlib.Path, size: str, out: str | pathlib.Path, tokenizer: str = "") -> None:
    """Writes a checkpoint as a Hugging Face directory, complete or not at all.

    Args:
      checkpoint: directory of the Orbax checkpoint.
      size: size of the model, one of `READ`.
      out: directory to write, which must not exist or must be empty.
      tokenizer: path of tokenizer.model; '' looks for it in the checkpoint's directory and in the directory above.

    Raises:
      ValueError: the checkpoint cannot be read (see `read`), or there is no tokenizer.model of Gemma.
    """
    folder = pathlib.Path(checkpoint)
    places = [pathlib.Path(tokenizer)] if tokenizer else [folder / "tokenizer.model", folder.parent / "tokenizer.model"]
    model = next((place for place in places if place.is_file()), None)
    if model is None:
        raise ValueError(f"There is no {' or '.join(map(str, places))}: give Kaggle's file as --tokenizer=FILE.")
    config, params = read(checkpoint, size)
    tokenizer_config = {
        "tokenizer_class": "GemmaTokenizer",
        "add_bos_token": True,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "added_tokens_decoder": _turn_marks(model),
        "chat_template": CHAT_TEMPLATE,
    }
    files = {
        "tokenizer.model": model.read_bytes(),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2).encode(),
    }
    hf_save.save(out, config, params, dtype=jnp.bfloat16, extra_files=files)


def _turn_marks(model: pathlib.Path) -> dict[str, dict[str, object]]:
    """Describes the marks around turns as special tokens, by their ids; the tokenizer's file has them as plain pieces.

    Raises:
      ValueError: the file is not a SentencePiece model, or lacks a mark.
    """
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_proto=model.read_bytes())
    except RuntimeError as error:
        raise ValueError(f"{model} is not a SentencePiece model: copy it from Kaggle's archive again.") from error
    ids = {text: pieces.piece_to_id(text) for text in TURNS}  # pyright: ignore[reportAttributeAccessIssue]
    if unknown := [text for text, i in ids.items() if i == pieces.unk_id()]:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(f"{model} has no piece {' or '.join(unknown)}: it must be Gemma's tokenizer.")
    return {str(i): {"content": text, "special": True} for text, i in ids.items()}


def _name(path: tuple[str, ...]) -> str:
    """Makes the name of a leaf, which is the same whether the checkpoint nests its keys or joins them with slashes."""
    name = "/".join(path)
    name = name[_PREFIX.match(name).end() :]  # pyright: ignore[reportOptionalMemberAccess]
    return re.sub(r"(mlp/(linear|gating_einsum))/w$", r"\1", name)


def _array(folder: orbax_files.Place, path: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
    item: PyTree = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=SingleDeviceSharding(jax.devices()[0]))
    for key in reversed(path):
        item = {key: item}
    return np.asarray(jax.tree.leaves(orbax_files.read_leaves(folder, item))[0])


def _tree(
    leaves: Mapping[str, Mapping[int, np.ndarray]], config: ModelConfig, unknown: list[str], where: str
) -> dict[str, PyTree]:
    """Stacks the leaves of all layers, and checks the shape of every leaf.

    Args:
      leaves: arrays by the name of the leaf, then by the number of the layer; a leaf outside of layers has number 0.
      config: configuration of the model.
      unknown: names of leaves that no rule reads.
      where: description of the checkpoint, for the error message.

    Raises:
      ValueError: a leaf is missing, unknown or of another shape.
    """
    specs = param_specs(config)
    wanted = {key: (spec.shape, False) for key, spec in specs.items() if is_param(spec)}
    wanted |= {name: (spec.shape, True) for name, spec in specs["layers"].items()}
    wrong = [f"{name} is unknown" for name in unknown]
    for name, (shape, stacked) in wanted.items():
        have, count = leaves.get(name, {}), shape[0] if stacked else 1
        if sorted(have) != list(range(count)):
            wrong.append(f"{name} is there for {len(have)} of {count} layers" if stacked else f"{name} is missing")
        elif (one := have[0].shape) != (shape[1:] if stacked else shape):
            wrong.append(f"{name} is {one} but must be {shape[1:] if stacked else shape}")
    wrong += [f"{name} is unknown" for name in leaves if name not in wanted]
    if wrong:
        raise ValueError(f"The checkpoint {where} is not of this size: {'; '.join(wrong[:8])}.")
    tree: dict[str, PyTree] = {"layers": {}}
    for name, (shape, stacked) in wanted.items():
        if stacked:
            tree["layers"][name] = np.stack([leaves[name][i] for i in range(shape[0])])
        else:
            tree[name] = leaves[name][0]
    return tree


def _gates(both: np.ndarray, config: ModelConfig) -> dict[str, np.ndarray]:
    # The array is (2, F, D) or, in Gemma 2 2B, (2, D, F). In every size F is larger than D, so the shape tells which.
    turned = both.shape[-1] == config.model_dim
    return {name: part.T if turned else part for name, part in zip(("gate", "up"), both, strict=True)}


_Conversion = Callable[[np.ndarray, ModelConfig], Mapping[str, np.ndarray]]
_CONVERSIONS: Mapping[str, _Conversion] = {
    "embedder/input_embedding": lambda embed, config: {"embed": embed[: config.vocab_size]},
    "final_norm/scale": lambda scale, config: {"final_norm": scale},
    "attn/q_einsum/w": lambda w_NDH, config: {"q": w_NDH.transpose(1, 0, 2)},
    "attn/kv_einsum/w": lambda w_CKDH, config: {
        name: w_KDH.transpose(1, 0, 2) for name, w_KDH in zip(("k", "v"), w_CKDH, strict=True)
    },
    "attn/attn_vec_einsum/w": lambda w_NHD, config: {"o": w_NHD},
    "mlp/gating_einsum": _gates,
    "mlp/linear": lambda w_FD, config: {"down": w_FD},
    **{stored: lambda scale, config, name=name: {name: scale} for stored, name in _NORMS.items()},
}


def main(argv: list[str]) -> int:
    parser = Parser("podrl.contrib.kaggle_gemma", __doc__)
    parser.add_argument("--checkpoint", required=True, help="the directory with _METADATA, from Kaggle's archive")
    parser.add_argument(
        "--size", required=True, help=f"one of {', '.join(READ)}; checkpoints with and without -it have the same size"
    )
    parser.add_argument("--out", required=True, help="the Hugging Face directory to write")
    parser.add_argument(
        "--tokenizer", default="", help="tokenizer.model; by default it is looked for in --checkpoint and above"
    )
    args = parser.parse_args(argv)
    try:
        convert(args.checkpoint, args.size, args.out, args.tokenizer)
    except ValueError as error:
        sys.stderr.write(f"podrl: error: {as_sentence(error)}\n")
        return 1
    sys.stdout.write(f"Written to {args.out}: --config.model.path={args.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
