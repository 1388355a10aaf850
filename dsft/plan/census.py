"""Take the census of a model: name, shape and layer of each parameter, read from the model's own class.

`dsft.model.census` builds the class on the meta device. It imports torch, so it is imported only for a model
that is not in the cache. Censuses are cached under a digest of the model section, the config files it names,
the versions of transformers and peft, and VERSION.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dsft.errors import DsftError, brief
from dsft.plan.storage import Form, Storage, Stored
from dsft.spec.schema import Model
from dsft.system.files import cache_folder, cache_json, cached_json

if TYPE_CHECKING:  # dsft.plan.cut imports this module
    from dsft.plan.cut import Cut

VERSION = 12
"""Version of cached censuses. Increase it when the same model section, files and library versions give
another census (parameters, names, layers, reasons) or another JSON format. Checked by
tests/unit/plan/test_census_version.py."""
COUNTER = "dsft.model.census"  # above this package, and it imports torch


class Elements(NamedTuple):
    """Number of elements of a model: all of them, and the trained ones."""

    whole: int
    trained: int


@dataclass(frozen=True)
class Parameter:
    """One distinct parameter tensor.

    layer      number of its layer, None outside the layers
    embedding  whether it is the input embedding of tokens
    aliases    further names of a tied tensor
    trained    False if it is frozen
    before     whether it is used before the layers, as embeddings and learned positions are
    experts    number of experts whose weights it has; 1 outside a mixture of experts
    top_k      number of these experts that each token passes through
    mlp        name of the MLP that it belongs to, of those that can be computed in chunks of tokens
    saved      of the parameters of a recurrent module: at its first one the bytes per token that the module's
               backward needs, in 16 bits and in fp32, at the others zeros; empty outside such modules
    form       what it is stored as (`dsft.plan.storage`)
    fused      whether it belongs to a norm or an MLP that Liger's kernels can compute
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    embedding: bool
    aliases: tuple[str, ...]
    trained: bool = True
    before: bool = False
    experts: int = 1
    top_k: int = 1
    mlp: str | None = None
    saved: tuple[int, ...] = ()
    form: Form = "plain"
    fused: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def active(self) -> int:
        """Number of elements that one token uses."""
        return self.numel * self.top_k // self.experts

    def stored(self, precision: str) -> tuple[Stored, ...]:
        """Return the tensors that hold it on a rank that has all of it."""
        return Storage(precision, self.form, self.experts).tensors(self.numel)

    @property
    def module(self) -> str:
        """Name of the module that has the parameter; experts have their adapters themselves."""
        name = self.name.partition(".lora_")[0] if self.experts > 1 else self.name
        return name.rpartition(".")[0]


@dataclass(frozen=True)
class Heads:
    """The attention heads of a layer.

    queries, keys  number of heads of the queries, and of the keys and values
    width, values  size of a head of queries and keys, and of values
    softcap        whether scores are soft-capped, as in Gemma 2
    """

    queries: int
    keys: int
    width: int
    values: int
    softcap: bool = False

    def repeated(self, ranks: int) -> int:
        """Return the number of heads of keys, and of values, that a group of `ranks` exchanges."""
        return math.lcm(self.keys, ranks)

    def exchanged(self, ranks: int) -> int:
        """Return the elements per token that attention over rows split among `ranks` exchanges in one
        direction: queries, keys, values and output."""
        return (self.queries + self.repeated(ranks)) * (self.width + self.values)


@dataclass(frozen=True)
class Census:
    """The parameters of a model. uncuttable: why its layers cannot be cut into pipeline stages, None if they
    can; max_positions: longest sequence in tokens, None if the config sets no limit; heads: None if unknown;
    unsplittable: why its rows cannot be split over ranks, None if they can."""

    architecture: str
    num_layers: int
    max_positions: int | None
    parameters: tuple[Parameter, ...]
    uncuttable: str | None = None
    heads: Heads | None = None
    unsplittable: str | None = None

    @property
    def numel(self) -> int:
        """Number of elements of all parameters; tied ones count once."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def active(self) -> int:
        """Number of elements that one token uses: in a mixture of experts only those of its experts."""
        return sum(parameter.active for parameter in self.parameters)

    @property
    def elements(self) -> Elements:
        return Elements(self.numel, self.trained)

    @property
    def trained(self) -> int:
        """Number of trained elements, including adapters."""
        return sum(parameter.numel for parameter in self.parameters if parameter.trained)

    def stage(self, stage: int, cut: Cut) -> tuple[Parameter, ...]:
        """Return the parameters of one pipeline stage. Embeddings are on the first stage, final norm and head
        on the last; an embedding that is tied to the head is on both."""
        layers, is_last = cut.layers(stage), stage == cut.stages - 1

        def is_on(parameter: Parameter) -> bool:
            if parameter.layer is not None:
                return parameter.layer in layers
            if not (parameter.embedding or parameter.before):
                return is_last
            return stage == 0 or (is_last and bool(parameter.aliases))

        return tuple(p for p in self.parameters if is_on(p))


def census(model: Model, cache: Path | None = None) -> Census:
    """Return the census of a spec's model, from the cache if it is there.

    Raise SpecError for a config with unknown keys, MissingInputError if a config or tokenizer cannot be read.
    cache: folder of cached censuses, by default `$XDG_CACHE_HOME/dsft` or `~/.cache/dsft`.
    """
    found = known_census(model, cache)
    if found is not None:
        return found
    answer = _count(model)
    result = census_from(answer)
    if not _is_hub_id(model):  # the model behind a hub id may change
        cache_json(_path(model, cache), answer)
    return result


def known_census(model: Model, cache: Path | None = None) -> Census | None:
    """Return the cached census; None if there is none."""
    try:
        return census_from(cached_json(_path(model, cache)))
    except (KeyError, TypeError):
        return None


def _path(model: Model, cache: Path | None) -> Path:
    return (cache or cache_folder()) / "census" / f"{_digest(model)}.json"


def known_elements(model: Model) -> Elements | None:
    """Return the model's number of elements if the section and local files give it; None for a hub id, whose
    files another machine may not have, and for a folder that does not exist here."""
    if _is_hub_id(model):
        return None
    return census(model).elements


def _count(model: Model) -> dict[str, Any]:
    """Return what `take_census` answers. Raises its errors, and DsftError for what a model's class raises."""
    try:
        answer: dict[str, Any] = import_module(COUNTER).take_census(model)
    except DsftError:
        raise
    except Exception as error:
        raise DsftError(f"the model's parameters could not be counted: {brief(error)}") from error
    return answer


def census_from(answer: Mapping[str, Any]) -> Census:
    """Build a census from the JSON answer of `dsft.model.census.take_census`."""
    parameters = tuple(
        Parameter(**{**p, **{key: tuple(p.get(key, ())) for key in ("shape", "aliases", "saved")}})
        for p in answer["parameters"]
    )
    heads = Heads(**answer["heads"]) if answer["heads"] else None
    return Census(**{**answer, "parameters": parameters, "heads": heads})


def _digest(model: Model) -> str:
    files = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in _files(model)}
    versions = [VERSION, *map(importlib.metadata.version, ("transformers", "peft"))]
    facts = [model.model_dump(mode="json"), model.head, files, versions]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _files(model: Model) -> list[Path]:
    """Return the config and tokenizer files in the folders of the model section that the census depends
    on."""
    named = [Path(name) for name in (model.name_or_path, model.tokenizer) if name]
    folders = [path for path in named if path.is_dir()]
    names = ("config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "added_tokens.json")
    found = [folder / name for folder in folders for name in names if (folder / name).is_file()]
    return found + [path for path in named if path.is_file()]


def _is_hub_id(model: Model) -> bool:
    named = (model.name_or_path, model.tokenizer)
    return any(name is not None and not Path(name).exists() for name in named)
